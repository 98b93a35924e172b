"""Vector environments: ours beside a bare loop over the same environment that records nothing.

    python benchmarks/vector_environments.py                  every case
    python benchmarks/vector_environments.py sync masked

Real frames are counted on both sides: a row in which a lane only begins anew is none. EnvPool's cases need EnvPool.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from harness import run
from torch import nn

from rlcollect import Collector
from rlcollect.testing import TensorTagged

STEPS = 64
warnings.filterwarnings("ignore", message=".*precision lowered")  # EnvPool's spaces


class Greedy(nn.Module):
    """Observation in, index of the best action out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def sync() -> SyncVectorEnv:
    return SyncVectorEnv([cartpole] * 16)


def shared() -> AsyncVectorEnv:
    return AsyncVectorEnv([cartpole] * 16)


def entry_point() -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")


def envpool(num_envs: int = 64, batch_size: int | None = None) -> Any:
    import envpool

    sizes = {} if batch_size is None else {"batch_size": batch_size}
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs, seed=1, num_threads=1, **sizes)


def bare(make: Callable[[], Any], *, act: bool) -> Iterator[int]:
    env, net, rng = make(), Greedy().net, np.random.default_rng(0)
    observations = torch.from_numpy(env.reset()[0])
    begins = np.zeros(env.num_envs, bool)
    while True:
        frames = 0
        with torch.no_grad():
            for _ in range(STEPS):
                actions = net(observations).argmax(-1).numpy() if act else rng.integers(0, 2, env.num_envs)
                observation, _, terminated, truncated, _ = env.step(actions)
                observations = torch.from_numpy(observation)
                frames += env.num_envs - np.count_nonzero(begins)
                begins = terminated | truncated
        yield frames


def bare_async(make: Callable[[], Any]) -> Iterator[int]:
    env, rng = make(), np.random.default_rng(0)
    env.async_reset()
    _, info = env.recv(reset=True)
    begins = np.ones(env.num_envs, bool)
    begins[info["env_id"]] = False
    while True:
        frames = 0
        for _ in range(STEPS):
            ids = info["env_id"]
            env.send(rng.integers(0, 2, len(ids)), ids)
            _, _, terminated, truncated, info = env.recv()
            came = info["env_id"]
            frames += len(came) - np.count_nonzero(begins[came])
            begins[came] = terminated | truncated
        yield frames


def bare_tensors(lanes: int) -> Iterator[int]:
    env = TensorTagged([20] * lanes)
    env.reset()
    while True:
        for _ in range(STEPS):
            env.step(torch.zeros(lanes, 2))
        yield lanes * STEPS


def ours(make: Callable[[], Any], policy: Any, **options: Any) -> Iterator[int]:
    lanes = make().num_envs
    with Collector(make, policy, frames_per_batch=lanes * STEPS, total_frames=-1, **options) as collector:
        for batch in collector:
            mask = batch.get(("collector", "mask"), None)
            yield batch.numel() if mask is None else int(mask.sum())


def still(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(observation), 2)


CASES: dict[str, Callable[[], dict[str, Iterator[int]]]] = {
    "sync": lambda: {"ours": ours(sync, Greedy()), "bare": bare(sync, act=True)},
    "masked": lambda: {"ours": ours(sync, Greedy(), masked_reset=True), "bare": bare(sync, act=True)},
    "scratch": lambda: {"ours": ours(sync, Greedy(), masked_reset=False), "bare": bare(sync, act=True)},
    "async": lambda: {"ours": ours(shared, Greedy()), "bare": bare(shared, act=True)},
    "async-scratch": lambda: {"ours": ours(shared, Greedy(), masked_reset=False), "bare": bare(shared, act=True)},
    "entry-point": lambda: {"ours": ours(entry_point, Greedy()), "bare": bare(entry_point, act=True)},
    "envpool-random": lambda: {"ours": ours(envpool, None), "bare": bare(envpool, act=False)},
    "envpool-mlp": lambda: {"ours": ours(envpool, Greedy()), "bare": bare(envpool, act=True)},
    "envpool-masked": lambda: {"ours": ours(envpool, Greedy(), masked_reset=True), "bare": bare(envpool, act=True)},
    "envpool-async": lambda: {
        "ours": ours(lambda: envpool(64, 32), None),
        "bare": bare_async(lambda: envpool(64, 32)),
    },
    "tensors-1024": lambda: {
        "ours": ours(lambda: TensorTagged([20] * 1024), still),
        "bare": bare_tensors(1024),
    },
}

if __name__ == "__main__":
    run(__doc__, CASES)
