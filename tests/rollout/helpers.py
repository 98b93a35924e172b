"""What the tests of policies share: environments whose observations differ, and a collector over lanes of them."""

from __future__ import annotations

from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from rlcollect import Collector
from tests.reference import Scripted

BOX = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE = spaces.Discrete(4)
SCRIPT = [(3, "terminated"), (5, "truncated")]
LANES = [None, 1, 3]


class Env(Scripted):
    """Observes another sample of its space in each lane, episode and step; keeps actions, and whether it was closed."""

    def __init__(self, observation_space=BOX, action_space=DISCRETE, lane=0):
        super().__init__(lane, SCRIPT, observation_space, action_space)
        self.closed = 0

    def close(self):
        self.closed += 1


def maker(envs, observation_space=BOX, action_space=DISCRETE):
    """Makes lane after lane, and puts them into a list."""

    def make() -> gym.Env:
        envs.append(Env(observation_space, action_space, len(envs)))
        return envs[-1]

    return make


@contextmanager
def collecting(policy, lanes=3, observation_space=BOX, action_space=DISCRETE, steps=4, **options):
    """A collector over new lanes; batches of `steps` steps."""
    envs = []
    with Collector(
        maker(envs, observation_space, action_space),
        policy,
        frames_per_batch=steps * (lanes or 1),
        num_envs=lanes,
        **options,
    ) as collector:
        yield collector, envs
    assert [env.closed for env in envs] == [1] * (lanes or 1)


def collect(policy, lanes=3, observation_space=BOX, action_space=DISCRETE, batches=3, **options):
    """Some batches in one piece, and the environments they come from."""
    with collecting(policy, lanes, observation_space, action_space, **options) as (collector, envs):
        return torch.cat([collector.next() for _ in range(batches)], -1), envs


def received(envs, lanes):
    """The actions that the environments got, as a tensor `[N, T, *shape]`, or `[T, *shape]` for a single lane."""
    tensor = torch.from_numpy(np.stack([np.stack(env.received) for env in envs]))
    return tensor if lanes else tensor[0]


def leaf_keys(batch):
    """Root keys of a batch that are neither flags nor the collector's."""
    keys = [key if isinstance(key, tuple) else (key,) for key in batch.keys(include_nested=True, leaves_only=True)]
    return {key for key in keys if key[0] not in ("next", "collector", "done", "terminated", "truncated")}


def bits(batch):
    """Every leaf by key, with its dtype and its bytes."""
    return {
        key: (value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist())
        for key, value in batch.items(include_nested=True, leaves_only=True)
    }
