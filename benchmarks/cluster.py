"""Collection on a Ray cluster, started in this machine: against processes, against bytes, against TorchRL's.

    python benchmarks/cluster.py                 every case
    python benchmarks/cluster.py small images    some of them

small: two remotes of 16 CartPole lanes and an MLP against `MultiAsyncCollector` with as many. Aim: 0.8.
images: 84 x 84 x 4 bytes an observation, 8 lanes, one remote. An environment of 0.5 ms a step against processes
    (aim: 0.9); one that does no work, in bytes a second, where batches are the user's (0.6 GB/s) and where they are
    views of the object store (1 GB/s).
driver: microseconds that a rollout costs the program, with 2 to 16 remotes that answer at once with what a true one has
    answered before, and have not even torch.
weights: 40 MB to 8 remotes, until all act with them, against 8 times the time for one. Aim: 0.6.
torchrl: frames a second against TorchRL's `RayCollector`: CartPole, the MLP, two remotes of one lane each. Aim: 5.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import ray
import torch
from gymnasium import spaces
from harness import compare
from single_process import Greedy, cartpole
from torch import nn

from rlcollect import Collector, MultiAsyncCollector, RayCollector
from rlcollect.cluster import pool as pools

LANES, FRAMES = 16, 4096
SHAPE = (84, 84, 4)
SMALL = {"num_cpus": 0.1}


class Images(gym.Env[np.ndarray[Any, Any], int]):
    """Shows images; takes its time.

    Args:
        seconds: that a step takes at least.
    """

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._shown = np.ones(SHAPE, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action):
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:  # it works
            pass
        return self._shown, 0.0, False, False, {}


def working() -> Images:
    return Images(0.0005)


def numbers(collector: Collector) -> Iterator[int]:
    """Frames of batch after batch; what was made ahead while another arm had its turn does not count."""
    last = time.perf_counter()
    for batch in collector:
        count = batch.numel()
        del batch
        if time.perf_counter() - last > 0.5:
            for _ in range(4):
                collector.next()
        last = time.perf_counter()
        yield count


def small() -> None:
    form = {"frames_per_batch": FRAMES, "num_envs": LANES}
    there = RayCollector([cartpole] * 2, Greedy(), remote_configs=SMALL, **form)
    here = MultiAsyncCollector([cartpole] * 2, Greedy(), **form)
    arms = {"Ray": numbers(there), "processes": numbers(here)}
    print(compare("small, async 2x16", arms, rounds=7, seconds=2.0), flush=True)
    here.shutdown()
    there.shutdown()


def images() -> None:
    form = {"frames_per_batch": 8 * 32, "num_envs": 8}
    there = RayCollector([working], None, remote_configs=SMALL, **form)
    here = MultiAsyncCollector([working], None, **form)
    arms = {"Ray": numbers(there), "processes": numbers(here)}
    print(compare("images, 0.5 ms a step", arms, rounds=5, seconds=2.0), flush=True)
    here.shutdown()
    there.shutdown()
    frame = 2 * int(np.prod(SHAPE))
    for name, kind, own in (
        ("Ray, owned", RayCollector, {"remote_configs": SMALL}),
        ("Ray, views", RayCollector, {"remote_configs": SMALL, "return_same_td": True}),
        ("processes, owned", MultiAsyncCollector, {}),
        ("processes, views", MultiAsyncCollector, {"return_same_td": True}),
    ):
        with kind([Images], None, **form, **own) as collector:
            arm = numbers(collector)
            for _ in range(6):
                next(arm)
            rates = []
            for _ in range(5):
                count, begin = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - begin) < 1.0:
                    count += next(arm)
                rates.append(count * frame / elapsed / 1e9)
        told = f"{statistics.median(rates):.2f} GB/s ({min(rates):.2f} - {max(rates):.2f})"
        print(f"images, no work, {name:18} {told}", flush=True)


class Recorded(pools.ActorPool):
    """Keeps what its workers answer."""

    answers: ClassVar[list[tuple[tuple[int, bytes], Any]]] = []

    def _receive(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            reply, beside = ray.get([call.reply, call.beside])
            self.answers.append((reply, None if beside is None else np.array(beside)))
        super()._receive(number)


def canned(answers: Sequence[tuple[tuple[int, bytes], Any]]) -> type:
    """A remote that answers so, the last answer for good. Its class goes by value: nothing is imported there."""

    class Canned:
        def __init__(self, *_: Any) -> None:
            self._answers = answers
            self._given = 0

        @ray.method(num_returns=2)
        async def do(self, place: int, request: bytes, attached: Sequence[Any]) -> tuple[tuple[int, bytes], Any]:
            (_, data), beside = self._answers[min(place, len(self._answers) - 1)]
            self._given += 1
            return (self._given - 1, data), beside

        async def leave(self) -> None:
            pass

        async def stop(self, number: int) -> None:
            pass

        async def live(self) -> None:
            await asyncio.get_running_loop().create_future()

        async def pulse(self) -> SimpleNamespace:
            return SimpleNamespace(stage="", told="", at=0.0, age=0.0, count=0, node="here")

    return Canned


def driver() -> None:
    form = {"frames_per_batch": 64 * LANES, "num_envs": LANES, "remote_configs": {"num_cpus": 0.05}}
    from rlcollect.workers import remote

    kept, remote.ActorPool = remote.ActorPool, Recorded
    with RayCollector([cartpole], None, **form) as collector:
        collector.next()
    remote.ActorPool = kept
    real, pools.Serving = pools.Serving, canned(Recorded.answers[:3])
    try:
        for remotes in (2, 4, 8, 16):
            with RayCollector([cartpole] * remotes, None, **form) as collector:
                for _ in range(20 * remotes):
                    collector.next()
                costs = []
                for _ in range(5):
                    wall, busy = time.perf_counter(), time.process_time()
                    for _ in range(400):
                        collector.next()
                    wall, busy = (time.perf_counter() - wall) / 400, (time.process_time() - busy) / 400
                    costs.append((wall * 1e6, busy * 1e6))
            told, took = statistics.median(wall for wall, _ in costs), statistics.median(busy for _, busy in costs)
            print(
                f"driver, {remotes:2} remotes       {told:5.0f} us a rollout, {took:5.0f} of its processor", flush=True
            )
    finally:
        pools.Serving = real


class Large(nn.Module):
    """40 MB of weights, of which it uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10_000_000))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 0] + self.weight[0] > 0).long()


def weights() -> None:
    times: dict[int, float] = {}
    for remotes in (1, 8):
        config = {"num_cpus": 0.05}
        with RayCollector([cartpole] * remotes, Large(), frames_per_batch=8, sync=False, remote_configs=config) as each:
            each.next()
            seconds = []
            for _ in range(9):
                begin = time.perf_counter()
                each.wait_for_version(each.update_policy_weights_())
                seconds.append(time.perf_counter() - begin)
            times[remotes] = statistics.median(seconds)
    print(
        f"weights, 40 MB               {times[8] / 8 / times[1]:.2f} of 8 times one   1: {times[1] * 1e3:.0f} ms, "
        f"8: {times[8] * 1e3:.0f} ms",
        flush=True,
    )


def torchrl() -> None:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RayCollector as Theirs
    from torchrl.envs import GymEnv

    ours = RayCollector([cartpole] * 2, Greedy(), frames_per_batch=1000, remote_configs=SMALL)
    theirs = Theirs(
        [lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)] * 2,
        TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=1000,
        total_frames=10_000_000,
        ray_init_config={},
        remote_configs={"num_cpus": 0.1, "num_gpus": 0},
        sync=False,
    )
    arms = {"ours": numbers(ours), "TorchRL": (batch.numel() for batch in theirs)}
    print(compare("torchrl, async 2x1", arms, rounds=5, seconds=4.0), flush=True)
    ours.shutdown()


CASES: dict[str, Callable[[], None]] = {
    "small": small,
    "images": images,
    "driver": driver,
    "weights": weights,
    "torchrl": torchrl,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all when none is named")
    ray.init(
        address="local", num_cpus=4, object_store_memory=1_000_000_000, include_dashboard=False, log_to_driver=False
    )
    for case in parser.parse_args().cases or CASES:
        CASES[case]()
    ray.shutdown()
