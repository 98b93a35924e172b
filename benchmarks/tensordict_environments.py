"""Frames per second of a `Collector` with TorchRL's environments, beside TorchRL's own and a bare loop.

The bare loop calls the policy and `step_and_maybe_reset`, and records nothing: what is left is the environment.

    python benchmarks/tensordict_environments.py                 every case
    python benchmarks/tensordict_environments.py serial serial-bare
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchrl.collectors
from harness import run
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv

from rlcollect import Collector

FRAMES = 1024
LANES = 16

Make = Callable[[], Any]


def policy() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return TensorDictModule(lambda observation: net(observation).argmax(-1), ["observation"], ["action"])


def single() -> Any:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def transformed() -> Any:
    env = TransformedEnv(single(), RewardSum())
    env.append_transform(StepCounter())
    return env


def serial() -> Any:
    return SerialEnv(LANES, single)


def ours(make: Make) -> Iterator[int]:
    return (batch.numel() for batch in Collector(make(), policy(), frames_per_batch=FRAMES))


def lanes() -> Iterator[int]:
    return (batch.numel() for batch in Collector(single, policy(), frames_per_batch=FRAMES, num_envs=LANES))


def theirs(make: Make) -> Iterator[int]:
    collector = torchrl.collectors.Collector(make(), policy(), frames_per_batch=FRAMES, total_frames=-1)
    return (batch.numel() for batch in collector)


def bare(make: Make) -> Iterator[int]:
    env, act = make(), policy().module
    data = env.reset()
    while True:
        frames = 0
        with torch.no_grad():
            while frames < FRAMES:
                data.set("action", act(data.get("observation")))
                _, data = env.step_and_maybe_reset(data)
                frames += data.numel() or 1
        yield frames


def against(other: Callable[[Make], Iterator[int]], make: Make) -> Callable[[], dict[str, Iterator[int]]]:
    return lambda: {"rlcollect": ours(make), "torchrl" if other is theirs else "bare": other(make)}


CASES = {
    "single": against(theirs, single),
    "single-bare": against(bare, single),
    "transformed": against(theirs, transformed),
    "transformed-bare": against(bare, transformed),
    "serial": against(theirs, serial),
    "serial-bare": against(bare, serial),
    "lanes": lambda: {"rlcollect": lanes(), "torchrl, serial": theirs(serial)},
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(__doc__, CASES)
