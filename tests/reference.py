"""A plain loop that says what every key of a batch must be, and environments whose every observation is unique."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}

OBSERVATION_SPACES: dict[str, gym.Space[Any]] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "scalar box": spaces.Box(-1, 1, (), np.float32),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
    "image": spaces.Box(0, 255, (2, 3, 1), np.uint8),
    "int16": spaces.Box(-5, 5, (2,), np.int16),
    "discrete": spaces.Discrete(9, start=-4),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict({"b": spaces.Discrete(5), "a": spaces.Dict({"c": spaces.Box(0, 1, (2,), np.float32)})}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (1,), np.float32))),
    "dict of tuple": spaces.Dict({"t": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": spaces.MultiBinary(3)})))}),
}

ACTION_SPACES: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([2, 5]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "float64 box": spaces.Box(-1, 1, (1,), np.float64),
    "integer box": spaces.Box(0, 200, (2,), np.uint8),
    "dict": spaces.Dict({"g": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": spaces.MultiBinary(2)}))),
}


def sample(space: gym.Space[Any], *seed: int) -> Any:
    """The same value for the same numbers."""
    space.seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return space.sample()


class Scripted(gym.Env[Any, Any]):
    """Ends its episodes as the script says, over and over; remembers the actions it got and how often it was reset."""

    def __init__(
        self,
        lane: int,
        script: Sequence[tuple[int, str]],
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.lane, self.script = lane, script
        self.episode, self.t = -1, 0
        self.received: list[Any] = []

    def observe(self) -> Any:
        return sample(self.observation_space, self.lane, self.episode, self.t)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        self.t += 1
        length, end = self.script[self.episode % len(self.script)]
        terminated, truncated = ENDS[end] if self.t >= length else (False, False)
        return self.observe(), 100.0 * self.lane + 10 * self.episode + self.t, terminated, truncated, {}


def leaves(space: gym.Space[Any], value: Any, key: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The parts of a value by the key they are stored under."""
    if isinstance(space, spaces.Dict):
        return {k: v for n, s in space.spaces.items() for k, v in leaves(s, value[n], (*key, n)).items()}
    if isinstance(space, spaces.Tuple):
        return {k: v for i, s in enumerate(space.spaces) for k, v in leaves(s, value[i], (*key, str(i))).items()}
    return {key: value}


def observation_leaves(space: gym.Space[Any], value: Any) -> dict[tuple[str, ...], Any]:
    return leaves(space, value, () if isinstance(space, spaces.Dict) else ("observation",))


class ScriptedPolicy:
    """Returns a different action each call; the first call, at construction, is not counted."""

    def __init__(self, action_space: gym.Space[Any], lanes: int | None) -> None:
        self.action_space, self.lanes = action_space, lanes
        self.calls = -1

    def actions(self, step: int) -> list[Any]:
        """What each lane does in this step."""
        actions = [sample(self.action_space, 7, step, lane) for lane in range(self.lanes or 1)]
        if isinstance(self.action_space, spaces.Box) and self.action_space.dtype == np.float64:
            actions = [action.astype(np.float32).astype(np.float64) for action in actions]  # stored as float32
        return actions

    def __call__(self, tensordict: Any) -> Any:
        step, self.calls = max(self.calls, 0), self.calls + 1
        parts = [leaves(self.action_space, action, ("action",)) for action in self.actions(step)]
        for key in parts[0]:
            stacked = torch.from_numpy(np.stack([part[key] for part in parts]))
            tensordict[key] = stacked if self.lanes else stacked[0]
        return tensordict


def reference(
    envs: Sequence[Scripted], actions: Callable[[int], list[Any]], steps: int, limit: int | None = None
) -> dict[Any, np.ndarray[Any, Any]]:
    """Steps the environments and writes down, frame by frame, `[N, T, ...]` arrays by key."""
    frames: list[dict[Any, list[Any]]] = [{} for _ in envs]
    current = [env.reset()[0] for env in envs]
    ids, counts, next_id = list(range(len(envs))), [0] * len(envs), len(envs)
    for step in range(steps):
        ended = []
        for lane, env in enumerate(envs):
            put = lambda key, value: frames[lane].setdefault(key, []).append(value)  # noqa: B023, E731
            action = actions(step)[lane]
            after, reward, terminated, truncated, _ = env.step(action)
            truncated = truncated or (limit is not None and counts[lane] + 1 == limit)
            for key, value in observation_leaves(env.observation_space, current[lane]).items():
                put(key, value)
            for key, value in observation_leaves(env.observation_space, after).items():
                put(("next", *key), value)
            for key, value in leaves(env.action_space, action, ("action",)).items():
                put(key, value)
            put(("next", "reward"), [reward])
            put(("next", "terminated"), [terminated])
            put(("next", "truncated"), [truncated])
            put(("next", "done"), [terminated or truncated])
            put(("collector", "traj_ids"), ids[lane])
            put(("step_count",), [counts[lane]])
            put(("next", "step_count"), [counts[lane] + 1])
            put(("is_init",), [counts[lane] == 0])
            for name in ("done", "terminated", "truncated"):
                put((name,), [False])
            counts[lane] += 1
            current[lane] = after
            if terminated or truncated:
                by_limit = not (
                    ENDS[env.script[env.episode % len(env.script)][1]]
                    and env.t >= env.script[env.episode % len(env.script)][0]
                )
                ended.append((by_limit, lane))
        for lane in sorted(lane for _, lane in ended):  # ids go by the time of the end, then by lane
            current[lane] = envs[lane].reset()[0]
            ids[lane], next_id, counts[lane] = next_id, next_id + 1, 0
    return {key: np.stack([np.stack(lane[key]) for lane in frames]) for key in frames[0]}
