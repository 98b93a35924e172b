"""Environments for the tests of `ProcessVectorEnv`, and what they share. Environments cross by value or by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlcollect import ProcessVectorEnv

METHOD = "fork"  # the quickest; others have tests of their own

SPACES = {
    "box": spaces.Box(-1, 1, (3, 2), np.float32),
    "float64": spaces.Box(-1, 1, (), np.float64),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "dict": spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Dict(c=spaces.Discrete(3), d=spaces.MultiBinary(2))),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float16))),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Discrete(3)),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    "one_of": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
    "mixed": spaces.Dict(image=spaces.Box(0, 255, (4,), np.uint8), mission=spaces.Text(6), way=spaces.Discrete(4)),
}


class Random(gym.Env):
    """Shows samples of a space, tells what it did in its infos, and ends now and then."""

    def __init__(self, space: str = "box", actions: str = "discrete", infos: bool = True) -> None:
        import copy

        self.observation_space = copy.deepcopy(SPACES[space])
        self.action_space = copy.deepcopy(SPACES[actions])
        self.infos = infos
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {"began": True, "options": str(options)} if self.infos else {}

    def step(self, action: Any) -> Any:
        self.t += 1
        chance = self.np_random.random()
        info: dict[str, Any] = {}
        if self.infos and chance < 0.7:
            info = {"chance": chance, "nested": {"t": self.t}, "array": np.full(2, self.t), "said": repr(action)}
        reward = np.float32(chance)
        return self.observation_space.sample(), reward, chance < 0.1, 0.1 <= chance < 0.2, info


class Steps(gym.Env):
    """Counts its steps: the observation is (which life of its lane, t). Does what `trouble` says at some step.

    Args:
        trouble: what, and at which step of its life: ("raise", 3), say; None: none.
        once: a file; there is trouble only until it exists.
        length: of an episode.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(100)

    def __init__(self, trouble: tuple[str, int] | None = None, once: str | None = None, length: int = 10**9) -> None:
        self.trouble, self.once, self.length = trouble, once, length
        self.steps = self.t = 0
        self.life = float(time.monotonic_ns())
        self.value = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.seed = seed
        if self.trouble == ("reset", 0):
            self.act("raise")
        return self.shown(), {}

    def shown(self) -> Any:
        return np.array([self.life, self.t])

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.t += 1
        if self.trouble is not None and self.trouble[1] == self.steps:
            self.act(self.trouble[0])
        return self.shown(), float(action), False, self.t >= self.length, {}

    def act(self, how: str) -> None:
        if self.once is not None:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return
        if how == "raise":
            raise LookupError("broken")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
        if how == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(600)
        if how == "nap":
            time.sleep(0.6)

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise LookupError("asked for")


def sync(makers: list[Any]) -> SyncVectorEnv:
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def processes(make: Any, envs: int = 4, workers: int = 2, **options: Any) -> ProcessVectorEnv:
    return ProcessVectorEnv(make, envs, workers, **{"start_method": METHOD, "start_timeout": 30.0, **options})


def check_same(one: Any, other: Any, where: str = "result") -> None:
    """Types, dtypes and bits."""
    assert type(one) is type(other), (where, one, other)
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            check_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, tuple | list):
        assert len(one) == len(other), where
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            check_same(first, second, f"{where}[{place}]")
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        if one.dtype == object:
            check_same(one.tolist(), other.tolist(), where)
        else:
            assert one.tobytes() == other.tobytes(), (where, one, other)
    else:
        assert one == other or one != one, (where, one, other)
