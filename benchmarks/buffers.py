"""Collection into a shared buffer by two worker processes, against iterating over the same rollouts.

    python benchmarks/buffers.py [--seconds 3] [--rounds 5]

Prints frames a second of both, and the median of their ratios over interleaved rounds. Batches that are iterated over
are looked at by nobody.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from rlcollect import MultiAsyncCollector, MultiStep, MultiSyncCollector, ReplayBuffer
from rlcollect.collectors.base import BaseCollector

OPTIONS: dict[str, Any] = {"frames_per_batch": 4096, "num_envs": 16, "num_workers": 2}


def policy() -> torch.nn.Module:
    """The yardstick's: 4-64-64-2, greedy."""
    net = torch.nn.Sequential(
        *[torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)]
    )
    return Greedy(net)


class Greedy(torch.nn.Module):
    """The action of the largest value."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """`[N]`, int64."""
        return self.net(observation).argmax(-1)


def speed(collector: BaseCollector, seconds: float) -> float:
    """Frames a second of a collector that is warm."""
    before, start = collector.collected_frames, time.perf_counter()
    while time.perf_counter() < start + seconds:
        collector.next()
    return (collector.collected_frames - before) / (time.perf_counter() - start)


def in_background(collector: BaseCollector, seconds: float) -> float:
    """The same of one that goes on by itself."""
    collector.resume()
    before, start = collector.collected_frames, time.perf_counter()
    time.sleep(seconds)
    made = collector.collected_frames - before, time.perf_counter() - start
    collector.pause()
    return made[0] / made[1]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        ways: dict[str, dict[str, Any]] = {
            "iterated": {},
            "shared": {"replay_buffer": ReplayBuffer(200_000, storage="shared")},
            "shared, each step": {
                "replay_buffer": ReplayBuffer(200_000, storage="shared"),
                "extend_buffer": False,
            },
            "shared, MultiStep": {
                "replay_buffer": ReplayBuffer(200_000, storage="shared"),
                "postproc": MultiStep(0.99, 3),
            },
            "memmap": {"replay_buffer": ReplayBuffer(200_000, storage="memmap")},
            "shared, background": {"replay_buffer": ReplayBuffer(200_000, storage="shared")},
        }
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, options in ways.items():
                with kind("CartPole-v1", policy(), **OPTIONS, **options) as collector:
                    for _ in range(5):
                        collector.next()
                    if way.endswith("background"):
                        collector.start()
                        collector.pause()
                        figures[way].append(in_background(collector, arguments.seconds))
                    else:
                        figures[way].append(speed(collector, arguments.seconds))
        for way, each in figures.items():
            ratio = statistics.median(one / other for one, other in zip(each, figures["iterated"], strict=True))
            print(f"{kind.__name__:20} {way:20} {statistics.median(each):10,.0f} frames/s   x {ratio:.3f}")


if __name__ == "__main__":
    main()
