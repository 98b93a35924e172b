"""Recording frames of 84 x 84 x 4 bytes: ours beside a hand-written loop that records the same two arrays.

    python benchmarks/frames.py

Eight lanes of an environment that does nothing, random actions. The hand loop writes observation and next observation
into preallocated arrays, two sets by turns, as a batch is still held while the next is made. Told too: what both add to
stepping alone, in copies of a frame from warm memory to warm memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from harness import compare, run

from rlcollect import Collector

LANES = 8
SHAPE = (84, 84, 4)


class Still(gym.Env):
    """Shows one of two pictures, by turns; never ends."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.pictures = [np.full(SHAPE, value, np.uint8) for value in (0, 255)]
        self.t = 0

    def reset(self, *, seed=None, options=None):
        return self.pictures[0], {}

    def step(self, action):
        self.t ^= 1
        return self.pictures[self.t], 0.0, False, False, {}


def stepped(steps: int) -> Iterator[int]:
    envs = [Still() for _ in range(LANES)]
    while True:
        for _ in range(steps):
            for env in envs:
                env.step(0)
        yield LANES * steps


def by_hand(steps: int) -> Iterator[int]:
    envs = [Still() for _ in range(LANES)]
    memory = [(np.zeros((LANES, steps, *SHAPE), np.uint8), np.zeros((LANES, steps, *SHAPE), np.uint8)) for _ in (0, 1)]
    current = np.stack([env.reset()[0] for env in envs])
    turn = 0
    while True:
        turn ^= 1
        now, after = memory[turn]
        now[:, 0] = current
        for t in range(steps):
            row = now[:, t + 1] if t + 1 < steps else current
            for lane, env in enumerate(envs):
                row[lane] = env.step(0)[0]
        for lane in range(LANES):
            after[lane, :-1] = now[lane, 1:]
        after[:, -1] = current
        yield LANES * steps


def ours(steps: int) -> Iterator[int]:
    with Collector(Still, frames_per_batch=LANES * steps, num_envs=LANES) as collector:
        for batch in collector:
            yield batch.numel()


def one_copy() -> float:
    source, target = np.zeros(SHAPE, np.uint8), np.empty(SHAPE, np.uint8)
    count, start = 5000, time.perf_counter()
    for _ in range(count):
        target[...] = source
    return (time.perf_counter() - start) / count


CASES = {
    f"{steps} steps": lambda steps=steps: {"ours": ours(steps), "by hand": by_hand(steps)} for steps in (16, 64, 256)
}


def main() -> None:
    run(__doc__, CASES)
    for steps in (16, 64, 256):
        told = {}
        for name, arm in (("ours", ours), ("by hand", by_hand)):
            rates = compare(name, {name: arm(steps), "stepping": stepped(steps)}).rates
            told[name] = (1 / rates[name] - 1 / rates["stepping"]) / one_copy()
        print(f"{steps} steps: in warm copies, a frame costs", ", ".join(f"{n} {v:.1f}" for n, v in told.items()))


if __name__ == "__main__":
    main()
