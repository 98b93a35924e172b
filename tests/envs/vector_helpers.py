"""What the tests of vector environments share.

Ways to make them, a plain loop to hold batches against, and a homemade vector environment that can be wrong in every
way that was seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase

from rlcollect.testing import Counter, Probe, Tagged
from tests.reference import observation_leaves

MODES = list(AutoresetMode)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ENDS = ("terminated", "truncated", "both")
BACKENDS: dict[str, Callable[..., VectorEnv]] = {
    "sync": SyncVectorEnv,
    "async": AsyncVectorEnv,
    "async without shared memory": lambda makers, **options: AsyncVectorEnv(makers, shared_memory=False, **options),
}
Lane = Callable[[], gym.Env[Any, Any]]
Frames = dict[Any, np.ndarray[Any, Any]]


class Maker:
    """Makes one vector environment, and keeps it, to ask its lanes afterwards what was done to them."""

    def __init__(self, backend: str, lanes: Sequence[Lane], **options: Any) -> None:
        self.backend, self.lanes, self.options = backend, lanes, options
        self.made: VectorEnv | None = None

    def __call__(self) -> VectorEnv:
        assert self.made is None
        self.made = BACKENDS[self.backend](self.lanes, **self.options)
        return self.made

    def ask(self, name: str) -> list[Any]:
        """An attribute of each lane; while the collector is open."""
        assert self.made is not None
        return list(self.made.get_attr(name))


class TaggedTree(Probe):
    """A `Tagged` whose observation is a nested Dict, also of the last action; the reward tells lane, t and action."""

    def __init__(self, worker: int = 0, length: int | None = 5, *, end: Any = "terminated") -> None:
        super().__init__(length, end=end)
        self.worker = worker
        self.observation_space = spaces.Dict(
            {
                "tag": spaces.Box(-np.inf, np.inf, (3,), np.float64),
                "nested": spaces.Dict({"acted": spaces.Discrete(6, start=-1), "grid": spaces.MultiBinary([2, 2])}),
            }
        )
        self.action_space = spaces.Discrete(4)

    def _observe(self) -> Any:
        acted = -1 if self.last_action is None else int(self.last_action)
        bits = [self.t & 1, self.t >> 1 & 1, self.worker & 1, self.worker >> 1 & 1]
        return {
            "tag": np.array([self.worker, self.resets - 1, self.t], np.float64),
            "nested": {"acted": np.int64(acted), "grid": np.array(bits, np.int8).reshape(2, 2)},
        }

    def _reward_for(self, action: Any) -> float:
        return 100.0 * self.worker + 10 * self.t + float(action)


class Scripted(Tagged):
    """Ends its episodes as the script says, over and over."""

    def __init__(self, lane: int, script: list[tuple[int, str]]) -> None:
        super().__init__(lane, max(length for length, _ in script))
        self.script = script

    def _draw_limit(self) -> int:
        length, self.end = self.script[(self.resets - 1) % len(self.script)]  # type: ignore[assignment]
        return length


# --- batches ----------------------------------------------------------------------------------------------------------


def mask_of(batch: TensorDictBase) -> torch.Tensor:
    """Bool `[N, T]`, which rows are frames."""
    mask = batch.get(("collector", "mask"), None)
    return torch.ones(batch.batch_size, dtype=torch.bool) if mask is None else mask


def lanes_of(batches: Iterable[TensorDictBase]) -> list[TensorDictBase]:
    """The frames of each lane, in order of time: `[F]` each."""
    batches = list(batches)
    return [
        torch.cat([batch[lane][mask_of(batch)[lane]] for batch in batches]) for lane in range(batches[0].batch_size[0])
    ]


def count(batches: Iterable[TensorDictBase]) -> int:
    """Frames."""
    return sum(int(mask_of(batch).sum()) for batch in batches)


def all_keys(batch: TensorDictBase) -> set[tuple[str, ...]]:
    keys = batch.keys(include_nested=True, leaves_only=True)
    return {key if isinstance(key, tuple) else (key,) for key in keys}


def bits_of(batch: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    """Every leaf as integers, so that NaN equals NaN and nothing else does."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {key: batch.get(key).contiguous().view(kinds[batch.get(key).element_size()]) for key in all_keys(batch)}


def same_bits(left: TensorDictBase, right: TensorDictBase) -> bool:
    ours, theirs = bits_of(left), bits_of(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def masked_rows_are_zero(batch: TensorDictBase) -> bool:
    """Whether rows that are no frames hold zeros, and the id of no episode."""
    masked = ~mask_of(batch)
    ids = ("collector", "traj_ids")
    others = all(not batch.get(key)[masked].any() for key in all_keys(batch) if key != ids)
    return others and (ids not in all_keys(batch) or bool((batch.get(ids)[masked] == -1).all()))


# --- the plain loop ---------------------------------------------------------------------------------------------------


def by_hand(
    env: gym.Env[Any, Any], actions: Sequence[Any], info_keys: Sequence[str] = (), limit: int | None = None
) -> Frames:
    """Steps one environment through these actions, and writes down what every key of a batch must be.

    Episodes are truncated at the limit. Its `("collector", "traj_ids")` is the number of the episode.
    """
    frames: dict[Any, list[Any]] = {}
    space, episode, age = env.observation_space, 0, 0
    current = copy.deepcopy(env.reset()[0])  # it may be an array that is written over
    for action in actions:
        after, reward, terminated, truncated, info = env.step(action)
        truncated = truncated or age + 1 == limit
        frame = {
            **observation_leaves(space, current),
            **{("next", *key): value for key, value in observation_leaves(space, after).items()},
            ("action",): action,
            ("next", "reward"): [np.float32(reward)],
            ("next", "terminated"): [terminated],
            ("next", "truncated"): [truncated],
            ("next", "done"): [terminated or truncated],
            **{("next", "info", key): info[key] for key in info_keys},
            ("collector", "traj_ids"): episode,
            ("collector", "policy_version"): 0,
            ("step_count",): [age],
            ("next", "step_count"): [age + 1],
            ("is_init",): [age == 0],
            **{(flag,): [False] for flag in ("done", "terminated", "truncated")},
        }
        for key, value in frame.items():
            frames.setdefault(key, []).append(np.asarray(value).copy())
        current, age = copy.deepcopy(after), age + 1
        if terminated or truncated:
            current, episode, age = copy.deepcopy(env.reset()[0]), episode + 1, 0
    return {key: np.stack(values) for key, values in frames.items()}


def assert_by_hand(
    batches: Sequence[TensorDictBase],
    lanes: Sequence[Lane],
    info_keys: Sequence[str] = (),
    version: int = -1,
    limit: int | None = None,
) -> None:
    """Every key of every frame is what a single environment gives that is stepped by hand with the same actions."""
    owners: dict[int, tuple[int, int]] = {}
    for lane, (made, make) in enumerate(zip(lanes_of(batches), lanes, strict=True)):
        expected = by_hand(make(), list(made["action"].numpy()), info_keys, limit)
        expected["collector", "policy_version"][:] = version
        assert all_keys(made) - {("collector", "mask")} == expected.keys()
        for key, values in expected.items():
            got = made.get(key)
            if key == ("collector", "traj_ids"):
                for identity, episode in zip(got.tolist(), values.tolist(), strict=True):
                    assert owners.setdefault(identity, (lane, episode)) == (lane, episode), (lane, key)
                continue
            wanted = torch.from_numpy(values).to(got.dtype)
            assert torch.equal(got, wanted), (lane, key, got, wanted)
    assert len({*owners.values()}) == len(owners)


# --- a vector environment of one's own --------------------------------------------------------------------------------


class Homemade(VectorEnv):
    """Counts in arrays, as batched simulators do: lane, episode and t are observed, and t is paid.

    Args:
        lengths: of each lane's episodes; None for one that never ends.
        behaves: what it does at an episode's end.
        declares: what its metadata says; "nothing" for no entry at all.
        masks: whether it resets the lanes that `reset_mask` names: "kept", or "ignored" (all are reset).
        final: what it gives of the final observation in SAME_STEP: "array" of objects and a mask, "batch" (all lanes'
            rows, no mask), "older" (the same under its older name), or "nothing".
        seeds: "lists" or "ints", what `reset` takes.
        aliased: whether it gives the same array each time.
    """

    def __init__(
        self,
        *lengths: int | None,
        behaves: AutoresetMode = NEXT_STEP,
        declares: Any = None,
        masks: str = "kept",
        final: str = "array",
        seeds: str = "lists",
        aliased: bool = False,
    ) -> None:
        self.num_envs = len(lengths)
        self.single_observation_space = spaces.Box(-1, 1e9, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {} if declares == "nothing" else {"autoreset_mode": declares or behaves}
        self.behaves, self.masks, self.final, self.seeds, self.aliased = behaves, masks, final, seeds, aliased
        self.lengths = np.array([length or 10**9 for length in lengths])
        self.given_seeds: list[Any] = []
        self.given_options: list[Any] = []
        self.t = np.zeros(self.num_envs, int)
        self.episode = np.full(self.num_envs, -1)
        self.frames = np.zeros(self.num_envs, int)
        self.pending = np.zeros(self.num_envs, bool)
        self.array = np.zeros((self.num_envs, 3), np.float32)

    def observe(self) -> Any:
        self.array[:] = np.stack([np.arange(self.num_envs), self.episode, self.t], -1)
        return self.array if self.aliased else self.array.copy()

    def begin(self, which: Any) -> None:
        self.t[which], self.pending[which] = 0, False
        self.episode[which] += 1

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.seeds == "ints" and not (seed is None or isinstance(seed, int)):
            raise TypeError(f"seed={seed!r} is no int")
        self.given_seeds.append(seed)
        self.given_options.append(options)
        mask = (options or {}).get("reset_mask")
        self.begin(np.ones(self.num_envs, bool) if mask is None or self.masks == "ignored" else mask)
        return self.observe(), self.inform()

    def inform(self) -> dict[str, Any]:
        return {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert actions.shape == (self.num_envs,)
        acting, info = ~self.pending, {}
        rewards = np.where(acting, self.t, 0).astype(np.float64)
        if self.behaves is DISABLED:
            assert acting.all(), "an ended lane was stepped"
        self.begin(self.pending.copy())
        self.t += acting
        self.frames += acting
        done = acting & (self.t >= self.lengths)
        info = self.inform()
        if self.behaves is SAME_STEP:
            if done.any():
                info = {**self.final_infos(done), **info}
            self.begin(done)
        else:
            self.pending = done
        return self.observe(), rewards, done.copy(), np.zeros(self.num_envs, bool), info

    def final_infos(self, done: Any) -> dict[str, Any]:
        rows = self.observe().copy()
        if self.final == "nothing":
            return {}
        if self.final in ("batch", "older"):
            return {"final_obs" if self.final == "batch" else "final_observation": rows}
        finals = np.full(self.num_envs, None, object)
        for lane in np.flatnonzero(done):
            finals[lane] = rows[lane]
        return {"final_obs": finals, "_final_obs": done.copy(), "final_info": self.inform(), "_final_info": done.copy()}


def rows_stay_in_their_episode(batches: Iterable[TensorDictBase]) -> bool:
    """Of observations (lane, episode, t): no frame joins two episodes, and t goes on by one."""
    for batch in batches:
        mask = mask_of(batch)
        before, after = batch["observation"][mask], batch["next", "observation"][mask]
        lanes = torch.arange(float(len(mask)))[:, None].expand_as(mask)[mask]
        if not (
            torch.equal(before[:, :2], after[:, :2])
            and torch.equal(before[:, 2] + 1, after[:, 2])
            and torch.equal(before[:, 0], lanes)
            and torch.equal(batch["next", "reward"][mask][:, 0], before[:, 2])
        ):
            return False
    return True


def counters(*lengths: int | None, **options: Any) -> list[Lane]:
    return [lambda length=length: Counter(length, **options) for length in lengths]  # type: ignore[misc]
