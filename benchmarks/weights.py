"""Weights on their way to workers: what a publish costs, what taking one costs, and what collection loses by them.

    python benchmarks/weights.py                every case
    python benchmarks/weights.py publish take   some of them

All with a policy of ten million parameters (40 MB), and two workers.

publish: `update_policy_weights_()` against copying as many bytes into memory that was used before. Aim: 1.3 copies.
take: what a worker does with a version that is new, against the same. Aim: 1.3 copies.
check: nanoseconds that a worker needs to see that there is none. Aim: below 1,000.
collect: frames a second with ten publishes a second, against none. Aim: 0.95.
step: frames a second with `weights_update="step"` against "rollout", where nothing is published: a small policy,
    CartPole, 16 lanes.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable, Iterator

import torch
from harness import compare
from single_process import Greedy, cartpole
from torch import nn

from rlcollect import MultiAsyncCollector, MultiSyncCollector
from rlcollect.layout import Leaf
from rlcollect.processes.arena import Arena
from rlcollect.weights.versioned import Publisher, Taker, buffer_bytes

WORKERS, LANES = 2, 16
EACH = 0.1  # seconds between two publishes
KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


class Large(nn.Module):
    """Ten million parameters between an observation of CartPole and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3160), nn.ReLU(), nn.Linear(3160, 3160), nn.ReLU(), nn.Linear(3160, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def copying(size: int) -> Iterator[int]:
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    while True:
        target.copy_(source)
        yield size


def publish() -> None:
    policy = Large()
    with MultiSyncCollector([cartpole] * WORKERS, policy, frames_per_batch=64, num_envs=LANES) as collector:
        torch.set_num_threads(1)

        def publishing() -> Iterator[int]:
            while True:
                collector.update_policy_weights_()
                yield nbytes(policy)

        arms = {"publish": publishing(), "one copy": copying(nbytes(policy))}
        print(compare("publish", arms, rounds=9, seconds=0.5), flush=True)


def take() -> None:
    torch.set_num_threads(1)
    policy = Large()
    weights = {(name,): parameter.detach() for name, parameter in policy.named_parameters()}
    leaves = [Leaf(key, tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()]
    buffer = Arena(buffer_bytes(leaves)).buffer
    publisher, taker = Publisher(buffer, leaves), Taker(buffer, leaves)
    publisher.publish(weights, 1)
    targets = {key: [tensor.clone()] for key, tensor in weights.items()}

    def taking() -> Iterator[int]:
        while True:
            taker._taken = 0  # as if it were new
            taker.take(targets)
            yield nbytes(policy)

    arms = {"take": taking(), "one copy": copying(nbytes(policy))}
    print(compare("take", arms, rounds=9, seconds=0.5), flush=True)


def check() -> None:
    leaves = [Leaf(("w",), (8,), torch.float32)]
    taker = Taker(Arena(buffer_bytes(leaves)).buffer, leaves)
    print(f"{'check':28} {min(timeit.repeat(taker.is_behind, number=100_000)) * 1e4:6.0f} ns", flush=True)


def collect() -> None:
    for name, kind in KINDS.items():
        policy = Large()
        with kind([cartpole] * WORKERS, policy, frames_per_batch=1024, num_envs=LANES) as collector:
            arms = {"publishing": published(collector, EACH), "not": published(collector, float("inf"))}
            print(compare(f"collect, {name}", arms, rounds=7, seconds=3.0), flush=True)


def published(collector: MultiSyncCollector | MultiAsyncCollector, each: float) -> Iterator[int]:
    due = time.perf_counter() + each
    for batch in collector:
        yield batch.numel()
        if time.perf_counter() >= due:
            collector.update_policy_weights_()
            due = time.perf_counter() + each
        del batch


def step() -> None:
    for name, kind in KINDS.items():
        arms, opened = {}, []
        for mode in ("step", "rollout"):
            collector = kind([cartpole] * WORKERS, Greedy(), frames_per_batch=4096, num_envs=LANES, weights_update=mode)
            opened.append(collector)
            arms[mode] = published(collector, float("inf"))
        print(compare(f"step, {name}", arms, rounds=5, seconds=2.0), flush=True)
        for collector in opened:
            collector.shutdown()


CASES: dict[str, Callable[[], None]] = {
    "publish": publish,
    "take": take,
    "check": check,
    "collect": collect,
    "step": step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all when none is named")
    chosen = parser.parse_args().cases or [*CASES]
    for case in chosen:
        CASES[case]()


if __name__ == "__main__":
    main()
