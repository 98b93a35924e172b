"""`ProcessVectorEnv`, two workers of 8 lanes, against what Gymnasium has; and two groups against one.

    python benchmarks/process_vector_env.py                 every case
    python benchmarks/process_vector_env.py async groups    some of them

async: CartPole-v1, against an AsyncVectorEnv of 16 lanes, a process each. Aim: 5.
50us: the same, environments that work for 50 us a step. Aim: 2.
500us: environments that work for 500 us a step, against a SyncVectorEnv of 16 lanes. Aim: 1.7.
groups: a policy that works for 1 ms a call, environments that work for 50 us a step: two groups of 16 lanes, a worker
    each, against one group of 16 lanes, of two workers. Aim: 1.3.
groups, one worker: the same against one group of 16 lanes in one worker.
groups, 32 lanes: against one group of 32 lanes, of two workers: what more lanes to each call are worth.
collector, 500us: `Collector(env_workers=2)` against one that steps its 16 lanes itself, random actions. Aim: 1.7.
collector, CartPole: the same with CartPole-v1 and an MLP.
collector, groups: a policy of 1 ms, environments of 50 us: two groups of 16 lanes against one of 16.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from harness import run
from single_process import Greedy

from rlcollect import Collector, ProcessVectorEnv

WORKERS, LANES = 2, 16
POLICY = 0.001  # seconds a call


def work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Working(gym.Env):
    """Works for some time a step."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._shown = np.ones(4, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action):
        work(self._seconds)
        return self._shown, 0.0, False, False, {}


def cartpole() -> gym.Env:
    return gym.make("CartPole-v1")


def short() -> gym.Env:
    return Working(50e-6)


def long() -> gym.Env:
    return Working(500e-6)


def steps(envs: VectorEnv) -> Iterator[int]:
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    while True:
        envs.step(actions)
        yield envs.num_envs


def against_async(make) -> Mapping[str, Iterator[int]]:
    theirs = AsyncVectorEnv([make] * LANES, autoreset_mode=AutoresetMode.SAME_STEP)
    return {"processes": steps(ProcessVectorEnv(make, LANES, WORKERS)), "AsyncVectorEnv": steps(theirs)}


def against_sync(make) -> Mapping[str, Iterator[int]]:
    theirs = SyncVectorEnv([make] * LANES, autoreset_mode=AutoresetMode.SAME_STEP)
    return {"processes": steps(ProcessVectorEnv(make, LANES, WORKERS)), "SyncVectorEnv": steps(theirs)}


def acting(envs: ProcessVectorEnv) -> Iterator[int]:
    """Each group's lanes are stepped while the policy acts for the other."""
    envs.reset(seed=0)
    groups = range(envs.num_groups)
    actions = [np.zeros(len(envs.lanes(group)), np.int64) for group in groups]
    for group in groups[1:]:
        envs.send(group, actions[group])
    while True:
        for group in groups:
            work(POLICY)
            envs.send(group, actions[group])
            following = (group + 1) % len(groups)
            envs.recv(following)
            yield len(envs.lanes(following))


def collecting(make, policy=None, **options) -> Iterator[int]:
    collector = Collector(make, policy, frames_per_batch=1024, **options)
    while True:
        yield collector.next().numel()


def slow_policy(observation):
    work(POLICY)
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def against_lanes_here(make, policy=None) -> Mapping[str, Iterator[int]]:
    return {
        "env_workers": collecting(make, policy, num_envs=LANES, env_workers=WORKERS),
        "here": collecting(make, policy, num_envs=LANES),
    }


def collector_in_groups() -> Mapping[str, Iterator[int]]:
    return {
        "two groups": collecting(short, slow_policy, num_envs=2 * LANES, env_workers=2, env_groups=2),
        "one group": collecting(short, slow_policy, num_envs=LANES, env_workers=WORKERS),
    }


def groups_against_one(workers: int, lanes: int = LANES) -> Mapping[str, Iterator[int]]:
    return {
        "two groups": acting(ProcessVectorEnv(short, 2 * LANES, 2, num_groups=2)),
        "one group": acting(ProcessVectorEnv(short, lanes, workers)),
    }


if __name__ == "__main__":
    run(
        __doc__,
        {
            "async": lambda: against_async(cartpole),
            "50us": lambda: against_async(short),
            "500us": lambda: against_sync(long),
            "groups": lambda: groups_against_one(WORKERS),
            "groups, one worker": lambda: groups_against_one(1),
            "groups, 32 lanes": lambda: groups_against_one(WORKERS, 2 * LANES),
            "collector, 500us": lambda: against_lanes_here(long),
            "collector, CartPole": lambda: against_lanes_here(cartpole, Greedy()),
            "collector, groups": collector_in_groups,
        },
    )
