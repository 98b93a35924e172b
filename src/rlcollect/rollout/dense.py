"""Rollouts of drivers that give a frame of every lane at every step: frames go straight into the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcollect.devices import CPU
from rlcollect.envs.tensordicts.loose import with_loose
from rlcollect.interfaces import Actor, EnvDriver
from rlcollect.layout import Key
from rlcollect.memory.slots import Slot
from rlcollect.options import What
from rlcollect.rollout.chance import MixedActor
from rlcollect.rollout.engine import RANDOM_VERSION, Engine, counts_of
from rlcollect.rollout.parts import Memory

__all__ = ["DenseEngine"]

Array = np.ndarray[Any, Any]
ONE_REWARD: Sequence[Key] = (("reward",),)


class DenseEngine(Engine):
    """Makes rollouts in which step t of a lane is its frame t. Arguments are those of `Engine`."""

    def __init__(self, driver: EnvDriver, memory: Any, *, what: What, **parts: Any) -> None:
        super().__init__(driver, memory, what=what, **parts)
        self._limit = what.max_frames_per_traj
        self._births = np.zeros(driver.num_lanes, np.int64)  # the step with which each open episode began
        self._seen_ends = 0
        self._ended_at_limit: list[tuple[int, int]] = []  # by the environment itself: both flags, as TimeLimit has it
        self._mixed: MixedActor | None = None
        self._changes: list[tuple[int, int]] = []  # from which step on the policy had which version
        self._is_of_one_version = True
        self._random_in_all = 0  # steps of the part under way that chance makes in all lanes
        self._random_in_some = 0  # and in any

    def rollout(self, steps: int, at_most: int | None = None, start: int = 0) -> TensorDictBase:
        """See `Engine`."""
        self._prepare()
        slot: Slot = self._memory.take(steps)
        goal = steps if at_most is None else min(steps, -(-at_most // self._driver.num_lanes))
        made, self.interrupted, self._failure = start, False, None
        self._is_of_one_version = not start and not self.warmup_left.any()
        try:
            while made < goal and not self.interrupted:
                part = self.parts.next(goal - made)
                made += self._make_part(slot if part == steps else slot.part(made, made + part), part)
                if self._set_truncated and (made == goal or self.interrupted):
                    self._truncate_softly(slot.arrays, made)
                self.parts.finished(made, self.steps, slot)
                self._raise_failure()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._mixed = None
        self.frames = made * self._driver.num_lanes
        self.versions = self._counted_versions(slot.arrays, made)
        batch, loose = slot.batch(made), self._driver.loose_batch(made)
        return with_loose(batch, loose) if loose else batch

    def _make_part(self, slot: Slot, steps: int) -> int:
        """Makes some steps of a rollout, and all that follows from them."""
        self._seen_ends, self._ended_at_limit = 0, []
        self._changes = [(0, self.policy_version)]
        self._random_in_all, self._random_in_some = int(self.warmup_left.min()), int(self.warmup_left.max())
        self._births = self.steps - self.episodes.ages
        made = self._make(slot, steps)
        self._fill(slot.arrays, made)
        self._random.finish(made if self._policy is None else min(made, self._random_in_some))
        self.steps += made
        self.warmup_left = np.maximum(self.warmup_left - made, 0)
        return made

    def _act_by(self, version: int, t: int) -> None:
        self._changes.append((t, version))
        self.policy_version, self._is_of_one_version = version, False

    def _counted_versions(self, arrays: Mapping[Key, Array], made: int) -> tuple[tuple[int, int], ...]:
        if self._is_of_one_version:
            return ((RANDOM_VERSION if self._policy is None else self.policy_version, self.frames),)
        return counts_of(arrays["collector", "policy_version"][:, :made])

    def deliver_to(self, memory: Memory) -> bool:
        """See `Engine`: frames are written there."""
        if self._driver.device != CPU:
            return False
        self._memory = memory
        return True

    def _fresh(self) -> list[int]:
        fresh: list[int] = np.flatnonzero(self.episodes.ages == 0).tolist()
        return fresh

    def _policy_acts_from(self, made: int) -> Array:  # noqa: ARG002
        return self.warmup_left

    def _open_window(self, start: int, stop: int) -> None:
        super()._open_window(start, stop)
        if self._policy is not None and start < self._random_in_some:
            self._mixed = MixedActor(self._policy, self._random, self.warmup_left == self._random_in_some)

    def _stretch(self, t: int, steps: int) -> tuple[Actor, int]:
        stop = t + 1 if self._is_asked else steps
        if self._limit is not None:
            stop = min(stop, int(self._births.min()) + self._limit - self.steps)
        if self._policy is None:
            return self._random, stop
        if t < self._random_in_all:
            return self._random, min(stop, self._random_in_all)
        self._policy.enter(t)
        if t < self._random_in_some:
            assert self._mixed is not None
            return self._mixed, min(stop, self._random_in_some)
        return self._policy, stop

    def _after(self, t: int) -> None:
        if self._limit is not None:
            self._truncate(t, self._limit)

    def _truncate(self, t: int, limit: int) -> None:
        """Ends the episodes that have reached their limit with frame t - 1."""
        ends = self._driver.ends
        for end, lane in ends[self._seen_ends :]:
            if self._births[lane] + limit == self.steps + end + 1:
                self._ended_at_limit.append((lane, end))
            self._births[lane] = self.steps + end + 1
        due = np.flatnonzero(self._births + limit <= self.steps + t).tolist()
        if due:
            with self._located(t - 1):
                self._driver.truncate(t - 1, due)
            self._births[due] = self.steps + t
        self._seen_ends = len(ends)

    def _fill(self, arrays: Mapping[Key, Array], made: int) -> None:
        """What follows from the frames, for all of them at once."""
        for name in ("terminated", "truncated", "done"):
            arrays[name,].fill(False)  # ended lanes were reset at once
        next_done, truncated = arrays["next", "done"], arrays["next", "truncated"]
        for lane, t in self._ended_at_limit:
            truncated[lane, t] = True
        np.logical_or(arrays["next", "terminated"], truncated, out=next_done)
        versions = arrays["collector", "policy_version"]
        if self._policy is None:
            versions.fill(RANDOM_VERSION)
        else:
            for t, version in self._changes:
                versions[:, t:] = version
        if self._policy is not None and self.warmup_left.any():
            versions[:, :made][np.arange(made) < self.warmup_left[:, None]] = RANDOM_VERSION
        for name, value in (("worker", self._worker), ("mask", True)):
            if name in self._recorded:
                arrays["collector", name].fill(value)
        self._fill_episodes(arrays, made)

    def _truncate_softly(self, arrays: Mapping[Key, Array], made: int) -> None:
        """Marks the last frame of each lane, whose episode goes on."""
        for key in (("truncated",), ("done",), *self._driver.truncated_keys):
            arrays["next", *key][:, made - 1] = True
        for key in self._driver.truncated_keys:
            arrays["next", *key[:-1], "done"][:, made - 1] = True

    def _fill_episodes(self, arrays: Mapping[Key, Array], made: int) -> None:
        num_lanes = self._driver.num_lanes
        ended = np.zeros((num_lanes, made), bool)
        for t, lane in self._driver.ends:
            ended[lane, t] = True
        lanes, times = np.indices((num_lanes, made))
        if "episode" in self._recorded:
            numbers = self.episodes.numbered(lanes.ravel(), ended.ravel())
            arrays["collector", "episode"][:, :made] = numbers.reshape(num_lanes, made)
        ids, counts = self.episodes.go_on(
            lanes.ravel(), times.ravel(), ended.ravel(), self._rewards(arrays, made).ravel()
        )
        ids, counts = ids.reshape(num_lanes, made), counts.reshape(num_lanes, made)
        if "traj_ids" in self._recorded:
            arrays["collector", "traj_ids"][:, :made] = ids
        if "step_count" in self._recorded:
            arrays["step_count",][:, :made, 0] = counts
            arrays["next", "step_count"][:, :made, 0] = counts + 1
        if "is_init" in self._recorded:
            arrays["is_init",][:, :made, 0] = counts == 0

    def _rewards(self, arrays: Mapping[Key, Array], made: int) -> Array:
        """`[N, made]`, what each lane was paid; by several parts, or agents: the sum."""
        if self._driver.reward_keys == ONE_REWARD and arrays["next", "reward"].shape[2:] == (1,):
            return arrays["next", "reward"][:, :made, 0]
        parts = [arrays["next", *key][:, :made] for key in self._driver.reward_keys]
        paid = np.zeros((self._driver.num_lanes, made))
        return sum((part.reshape(*paid.shape, -1).sum(-1) for part in parts), paid)
