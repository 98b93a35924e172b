"""Workers of different speed, and what it costs that one that fails can be made anew.

    python benchmarks/stragglers.py                 every case
    python benchmarks/stragglers.py uneven keeping  some of them

uneven: four workers, one of which is five times slower; steps sleep, so that cores are no matter. Frames a second, of
    the sum of what each makes alone: plain, with the late one ended early, with it going on. Aim: "continue" 0.95.
keeping: CartPole-v1, an MLP: `on_worker_failure="restart"`, which finishes rollouts in parts, against "raise".
restart: seconds from the death of a worker to the first frame of the one in its place.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from harness import compare
from single_process import Greedy
from workers import batches

from rlcollect import AsyncCollector, MultiSyncCollector
from rlcollect.testing import Counter

WAITS, STEPS = (0.001, 0.001, 0.001, 0.005), 100


class Slow(Counter):
    """Sleeps in each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None)
        self._seconds = seconds

    def step(self, action):
        time.sleep(self._seconds)
        return super().step(action)


def frames_per_second(waits: tuple[float, ...], seconds: float, **options: Any) -> tuple[float, Any]:
    makers = [lambda wait=wait: Slow(wait) for wait in waits]
    with MultiSyncCollector(makers, frames_per_batch=STEPS * len(waits), **options) as collector:
        collector.next()
        before, start = collector.collected_frames, time.perf_counter()
        while time.perf_counter() - start < seconds:
            collector.next()
        return (collector.collected_frames - before) / (time.perf_counter() - start), collector.stats()


def uneven() -> None:
    alone = {wait: frames_per_second((wait,), 3)[0] for wait in {*WAITS}}
    whole = sum(alone[wait] for wait in WAITS)
    for name, options in (
        ("all are waited for", {}),
        ('threshold 0.75, "stop"', {"preemptive_threshold": 0.75}),
        ('threshold 0.75, "continue"', {"preemptive_threshold": 0.75, "stragglers": "continue"}),
        ('threshold 0.5, "continue"', {"preemptive_threshold": 0.5, "stragglers": "continue"}),
    ):
        rate, stats = frames_per_second(WAITS, 10, **options)
        lost = sum(each.preempted for each in stats.workers)
        print(f"uneven: {name:28} {rate / whole:.3f} of {whole:,.0f} frames/s; {lost} rows left empty; {stats.late}")


def keeping() -> None:
    for lanes in (None, 16):
        arms = {
            name: batches(
                AsyncCollector("CartPole-v1", Greedy(), frames_per_batch=4096, num_envs=lanes, on_worker_failure=name)
            )
            for name in ("restart", "raise")
        }
        print(compare(f"keeping, {lanes or 1} lane(s)", arms))


def restart() -> None:
    took = []
    with MultiSyncCollector(
        [lambda: Counter(None)], frames_per_batch=1, on_worker_failure="restart", max_restarts=None
    ) as collector:
        for _ in range(10):
            collector.next()
            (pid,) = collector.map_fn(lambda envs: os.getpid())
            os.kill(pid, signal.SIGKILL)
            start = time.perf_counter()
            collector.next()
            took.append(time.perf_counter() - start)
    print(f"restart: {statistics.median(took):.3f} s ({min(took):.3f} - {max(took):.3f})")


CASES: dict[str, Callable[[], None]] = {"uneven": uneven, "keeping": keeping, "restart": restart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all when none is named")
    for case in parser.parse_args().cases or CASES:
        CASES[case]()


if __name__ == "__main__":
    main()
