"""Frames per second of a `Collector` beside a hand-written loop over the same environments and the same policy.

The hand loop steps and acts, and records nothing: 1.0 means that recording costs nothing.

    python benchmarks/single_process.py                every case
    python benchmarks/single_process.py mlp-16 record-16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from harness import run
from tensordict.nn import TensorDictModule
from torch import nn

from rlcollect import Collector

FRAMES = 1024


class Greedy(nn.Module):
    """A small network's best action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


class Idle(gym.Env[np.ndarray[Any, Any], int]):
    """Does nothing, with observations of any size: what is left is the cost of collecting."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        high = 255 if dtype is np.uint8 else 1
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self._answer = (np.zeros(shape, dtype), 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._answer[0], {}

    def step(self, action: int) -> Any:
        return self._answer


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def by_hand(make: Callable[[], Any], lanes: int, act: Callable[[torch.Tensor], Any] | None) -> Iterator[int]:
    envs = [make() for _ in range(lanes)]
    current = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    observations = torch.from_numpy(current)
    while True:
        frames = 0
        with torch.no_grad():
            while frames < FRAMES:
                if act is None:
                    actions = [env.action_space.sample() for env in envs]
                elif lanes == 1:
                    actions = [act(observations[0])]
                else:
                    actions = act(observations)
                for lane, env in enumerate(envs):
                    observation, _, terminated, truncated, _ = env.step(actions[lane])
                    current[lane] = env.reset()[0] if terminated or truncated else observation
                frames += lanes
        yield frames


def collected(make: Callable[[], Any], policy: Any, lanes: int, frames: int = FRAMES) -> Iterator[int]:
    collector = Collector(make, policy, frames_per_batch=frames, num_envs=None if lanes == 1 else lanes)
    return (batch.numel() for batch in collector)


def greedy() -> Callable[[torch.Tensor], Any]:
    net = Greedy().net
    return lambda observation: net(observation).argmax(-1).tolist()


def constant(lanes: int) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """A policy that costs nothing, for both sides: recording alone."""
    action = torch.zeros(() if lanes == 1 else (lanes,), dtype=torch.int64)
    actions = action.tolist()
    return (lambda observation: action), (lambda observation: actions)


def case(name: str) -> dict[str, Iterator[int]]:
    kind, lanes = name.rsplit("-", 1)[0], int(name.rsplit("-", 1)[1])
    if kind == "random":
        return {"rlcollect": collected(cartpole, None, lanes), "hand": by_hand(cartpole, lanes, None)}
    if kind in ("mlp", "mlp-long", "tensordict"):
        policy: Any = Greedy()
        if kind == "tensordict":
            policy = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
        frames = 8 * FRAMES if kind == "mlp-long" else FRAMES
        return {"rlcollect": collected(cartpole, policy, lanes, frames), "hand": by_hand(cartpole, lanes, greedy())}
    make: Callable[[], Any] = cartpole
    if kind.startswith("record-idle"):
        shape, dtype = ((84, 84, 4), np.uint8) if kind.endswith("image") else ((4,), np.float32)
        make = partial(Idle, shape, dtype)
    ours, theirs = constant(lanes)
    return {"rlcollect": collected(make, ours, lanes), "hand": by_hand(make, lanes, theirs)}


CASES = [
    "random-1",
    "mlp-1",
    "tensordict-1",
    "mlp-16",
    "mlp-long-16",
    "record-1",
    "record-16",
    "record-idle-1",
    "record-idle-16",
    "record-idle-image-8",
]


if __name__ == "__main__":
    run(__doc__, {name: partial(case, name) for name in CASES})
