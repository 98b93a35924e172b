"""Batches with each observation once (`compact_obs=True`), against full ones: what is kept of them, what it costs.

    python benchmarks/compact.py                  every case
    python benchmarks/compact.py bytes resident   some of them

Eight lanes of frames of 84 x 84 x 4 bytes, 64 steps a batch, random actions, episodes of 201 steps.

bytes: of a batch. Aim: 0.5.
resident: memory that the process has more when it keeps ten batches; a process each. Aim: 0.5.
dropped: frames a second where batches are let go as they come, of an environment that does nothing.
kept: the same where the last ten are held.
100us: batches are let go; the environment works for 100 us a step.
parts: batches are let go; each is looked at lane by lane, expanded, or as a part of the full one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from frames import LANES, Still
from harness import compare

from rlcollect import Collector

STEPS, LENGTH, KEPT = 64, 201, 10


class Short(Still):
    """Ends, and works for some time a step."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._left = LENGTH

    def reset(self, *, seed=None, options=None):
        self.t, self._left = 0, LENGTH
        return super().reset(seed=seed, options=options)

    def step(self, action):
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        self._left -= 1
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self._left == 0, truncated, info


def collector(make: Callable[[], Short] = Short, *, compact: bool) -> Collector:
    return Collector(make, frames_per_batch=LANES * STEPS, num_envs=LANES, compact_obs=compact)


def batches(make: Callable[[], Short], *, compact: bool, held: int = 0) -> Iterator[int]:
    kept = deque(maxlen=held)
    for batch in collector(make, compact=compact):
        kept.append(batch)
        yield LANES * STEPS


def by_lanes(*, compact: bool) -> Iterator[int]:
    for batch in collector(compact=compact):
        for lane in range(LANES):
            part = batch[lane : lane + 1]
            (part.expand() if compact else part)["next", "observation"].max()
        yield LANES * STEPS


def nbytes() -> None:
    sizes = {}
    for compact in (True, False):
        with collector(compact=compact) as frames:
            kept = [frames.next() for _ in range(KEPT)]
        sizes[compact] = sum(batch.nbytes if compact else batch.bytes() for batch in kept) / KEPT
    print(f"{'bytes':28} {sizes[True] / sizes[False]:6.3f}   {sizes[True]:,.0f} against {sizes[False]:,.0f} a batch")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def grown(compact: bool) -> int:
    with collector(compact=compact) as frames:
        for _ in range(3):
            frames.next()
        gc.collect()
        before = resident_bytes()
        kept = [frames.next() for _ in range(KEPT)]
        return (resident_bytes() - before) // len(kept)


def resident() -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        compact, full = pool.map(grown, [True, False], chunksize=1)
    print(f"{'resident':28} {compact / full:6.3f}   {compact:,} against {full:,} a batch")


def speed(case: str, arm: Callable[[bool], Iterator[int]]) -> None:
    torch.set_num_threads(1)
    print(compare(case, {"compact": arm(True), "full": arm(False)}), flush=True)


CASES: dict[str, Callable[[], None]] = {
    "bytes": nbytes,
    "resident": resident,
    "dropped": lambda: speed("dropped", lambda compact: batches(Short, compact=compact)),
    "kept": lambda: speed("kept", lambda compact: batches(Short, compact=compact, held=KEPT)),
    "100us": lambda: speed("100us", lambda compact: batches(lambda: Short(100e-6), compact=compact)),
    "parts": lambda: speed("parts", lambda compact: by_lanes(compact=compact)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all when none is named")
    for case in parser.parse_args().cases or CASES:
        CASES[case]()


if __name__ == "__main__":
    main()
