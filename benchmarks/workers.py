"""Worker processes: what they gain, what starting them costs, what their memory costs, and what the program does not.

    python benchmarks/workers.py                every case
    python benchmarks/workers.py start memory   some of them

scaling: two workers of 16 lanes against one process of 16 lanes: CartPole-v1, an MLP. Aim: sync 1.7, async 1.75.
start: seconds from the constructor to the first batch, two workers, when the server of processes is up. Aim: 0.5.
memory: an environment that does no work, with observations of 65,536 floats: bytes that its frames hold (what is seen
    before and after each step), a second, against copying into memory that was used before. Aim: 0.6 of it where the
    same TensorDict is delivered each time, 0.3 where batches are the user's.
waiting: processor time of the program while workers that sleep make its batches, as a share of the time. Aim: near 0.
which: workers against one process of as many lanes in all, where nobody learns: cheap and costly environments, large
    and small batches. Two cores.
learner: a learner that lets the processor go half of the time (as one on a GPU does): frames a second against those
    of no learner at all. Aim: async 0.95; sync shows what it loses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from harness import compare
from single_process import Greedy, cartpole

from rlcollect import Collector, MultiAsyncCollector, MultiSyncCollector

WORKERS, LANES, FRAMES = 2, 16, 4096
KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


class Idle(gym.Env):
    """Does no work, and shows a large observation."""

    observation_space = spaces.Box(-np.inf, np.inf, (65_536,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._shown = np.ones(65_536, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action):
        return self._shown, 0.0, False, False, {}


class Slow(Idle):
    """Sleeps for a millisecond."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self) -> None:
        self._shown = np.ones(4, np.float32)

    def step(self, action):
        time.sleep(0.001)
        return super().step(action)


def batches(collector: Collector) -> Iterator[int]:
    for batch in collector:
        yield batch.numel()
        del batch


def scaling() -> None:
    for name, kind in KINDS.items():
        workers = kind([cartpole] * WORKERS, Greedy(), frames_per_batch=FRAMES, num_envs=LANES)
        one = Collector(cartpole, Greedy(), frames_per_batch=1024, num_envs=LANES)
        arms = {"workers": _arm(name, workers), "one process": batches(one)}
        print(compare(f"scaling, {name} 2x16", arms, rounds=5, seconds=2.0), flush=True)
        workers.shutdown()
        one.shutdown()


def _arm(name: str, collector: Collector) -> Iterator[int]:
    arm = batches(collector)
    return arm if name == "sync" else _from_now(arm)  # what was made ahead in the other arm's turn does not count


def _from_now(arm: Iterator[int]) -> Iterator[int]:
    last = time.perf_counter()
    for count in arm:
        if time.perf_counter() - last > 0.5:  # the other arm had its turn
            for _ in range(2 * WORKERS):
                next(arm)
        last = time.perf_counter()
        yield count


def start() -> None:
    with MultiSyncCollector([cartpole] * WORKERS, Greedy(), frames_per_batch=64) as collector:
        collector.next()
    for name, kind in KINDS.items():
        seconds = []
        for _ in range(7):
            begin = time.perf_counter()
            with kind([cartpole] * WORKERS, Greedy(), frames_per_batch=64) as collector:
                collector.next()
                seconds.append(time.perf_counter() - begin)
        print(
            f"start, {name:5}  {statistics.median(seconds):.3f} s ({min(seconds):.3f} - {max(seconds):.3f})", flush=True
        )


def warm_copy() -> float:
    """Bytes a second."""
    source, target = np.ones(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return source.nbytes / statistics.median(seconds)


def memory() -> None:
    frame_bytes = 2 * Idle.observation_space.shape[0] * 4
    for name, kind in KINDS.items():
        for same in (True, False):
            shares = []
            with kind([Idle] * WORKERS, None, frames_per_batch=128, num_envs=2, return_same_td=same) as collector:
                arm = batches(collector)
                for _ in range(8):
                    next(arm)
                for _ in range(7):
                    count, begin = 0, time.perf_counter()
                    while (elapsed := time.perf_counter() - begin) < 0.7:
                        count += next(arm)
                    shares.append(count * frame_bytes / elapsed / warm_copy())
            what = "the same TensorDict" if same else "batches of one's own"
            print(f"memory, {name:5} {what:22} {statistics.median(shares):.2f} ({min(shares):.2f} - {max(shares):.2f})")


def waiting() -> None:
    for name, kind in KINDS.items():
        with kind([Slow] * WORKERS, Greedy(), frames_per_batch=1000) as collector:
            collector.next()
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(4):
                collector.next()
            share = (time.process_time() - used) / (time.perf_counter() - begin)
        print(f"waiting, {name:5} {share:.4f} of the time is the program's", flush=True)


class Costly(gym.Env):
    """Half a millisecond of work a step."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._shown = np.ones(4, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action):
        end = time.perf_counter() + 0.0005
        while time.perf_counter() < end:
            pass
        return self._shown, 0.0, False, False, {}


def which() -> None:
    table = {  # environment, policy, lanes of a worker, frames a batch
        "CartPole, MLP, 16 lanes, 4096 frames": (cartpole, Greedy, 16, 4096),
        "CartPole, MLP, 16 lanes, 256 frames": (cartpole, Greedy, 16, 256),
        "CartPole, MLP, one lane, 1024 frames": (cartpole, Greedy, 1, 1024),
        "CartPole, random, one lane, 64 frames": (cartpole, None, 1, 64),
        "0.5 ms a step, MLP, 4 lanes, 512 frames": (Costly, Greedy, 4, 512),
    }
    for case, (make, policy, lanes, frames) in table.items():
        for name, kind in KINDS.items():
            given = None if policy is None else policy()
            workers = kind([make] * WORKERS, given, frames_per_batch=frames, num_envs=lanes)
            one = Collector(make, given, frames_per_batch=frames, num_envs=WORKERS * lanes)
            arms = {"workers": _arm(name, workers), "one process": batches(one)}
            print(compare(f"{case}, {name}", arms, rounds=5, seconds=1.0), flush=True)
            workers.shutdown()
            one.shutdown()


def learner() -> None:
    for name, kind in KINDS.items():
        ratios = []
        with kind([cartpole] * WORKERS, Greedy(), frames_per_batch=FRAMES, num_envs=LANES) as collector:
            for _ in range(7):
                free = _learned(collector, 0.0)
                # half of the time in which the workers make a batch, if they never stand still
                ratios.append(_learned(collector, 0.5 * FRAMES / free) / free)
        print(f"learner, {name:5} {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})", flush=True)


def _learned(collector: Collector, pause: float, seconds: float = 2.0) -> float:
    for _ in range(2 * WORKERS + 2):
        collector.next()
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        count += collector.next().numel()
        if pause:
            time.sleep(pause)
    return count / elapsed


CASES: dict[str, Callable[[], None]] = {
    "scaling": scaling,
    "start": start,
    "memory": memory,
    "waiting": waiting,
    "which": which,
    "learner": learner,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all when none is named")
    torch.set_num_threads(1)
    for case in parser.parse_args().cases or CASES:
        CASES[case]()


if __name__ == "__main__":
    main()
