"""Rollouts of drivers whose steps are not all frames: steps go to a scratch memory, and frames from there to batches.

A lane that is being reset, or whose answer is still to come, has no frame in a step, so lanes come forward at their own
pace. Frames fill the batch that comes next, and those of lanes that run ahead the one after it: at most a whole batch.
A lane that is further behind than that is delivered short, and a mask says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensordict import TensorDict

from rlcollect.interfaces import Actor, ScratchDriver
from rlcollect.layout import Key
from rlcollect.memory.scratch import Scratch
from rlcollect.memory.slots import Slot, SlotSource
from rlcollect.options import What
from rlcollect.rollout.chance import MixedActor
from rlcollect.rollout.engine import RANDOM_VERSION, Engine, counts_of
from rlcollect.rollout.parts import Memory

__all__ = ["ScratchEngine"]

Array = np.ndarray[Any, Any]
IDS: Key = ("collector", "traj_ids")
NO_EPISODE = -1
MASK: Key = ("collector", "mask")
VERSION: Key = ("collector", "policy_version")


@dataclass(frozen=True)
class _Frames:
    """Frames in the scratch, by lane and then by time.

    Attributes:
        lanes: int64 `[F]`.
        acted: rows that hold what was observed and what the policy wrote.
        after: rows that hold what was observed next.
        came: rows that hold reward and flags.
        ended: bool `[F]`, whether they are the last of their episode: what was observed next is then in `came` too.
        cut: bool `[F]`, whether their lane began anew after them, though their episode had not ended; None: none did.
        places: which frame of its lane each is, counted from the beginning of the batch that comes next.
    """

    lanes: Array
    acted: Array
    after: Array
    came: Array
    ended: Array
    cut: Array | None
    places: Array


class ScratchEngine(Engine):
    """Makes rollouts by way of a scratch memory.

    Frames that were made ahead are not part of `state_dict`: they are made again.

    Args:
        driver: steps the environments.
        memory: gives the memory of each rollout.
        scratch: where steps go.
        steps: T of a full rollout.
        what: limits and marks.
        same: gives the memory of every batch, in which it is handed out; None: as it was filled.
        parts: the other arguments of `Engine`.
    """

    def __init__(
        self,
        driver: ScratchDriver,
        memory: SlotSource,
        *,
        scratch: Scratch,
        steps: int,
        what: What,
        same: Memory | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(driver, memory, what=what, **parts)
        assert driver.num_rows is not None
        self._rows: ScratchDriver = driver
        self._width = driver.num_rows
        self._scratch = scratch
        self._full = steps
        self._num_lanes = driver.num_lanes
        self._wanted = steps  # frames of each lane
        self._same = same
        self._slots: list[Slot] = []  # the batch that comes next, and the one after it
        self._filled = np.zeros(driver.num_lanes, np.int64)  # frames of each lane in both
        self._waiting = np.zeros(driver.num_lanes, bool)  # whose action's result is still to come
        self._versions = np.zeros(scratch.steps * self._width + driver.num_lanes, np.int64)
        self._policy_from = np.zeros(self._width, np.int64)
        self._random_until = 0
        self._come = self._filled  # the same, with those that are in the scratch so far
        self._counted = 0  # steps of the scratch that are in it
        self._mixed: MixedActor | None = None
        observed = {leaf.key for leaf in driver.leaves}
        outputs = set() if self._policy is None else {leaf.key for leaf in self._policy.outputs}
        self._acted = [key for key in scratch.flat if key[0] != "next" or key in outputs]
        seen_after = {("next", *key) for key in observed}
        self._came = [key for key in scratch.flat if key[0] == "next" and key not in outputs | seen_after]
        self._observed = [key for key in self._acted if key in observed]

    may_deliver_short = True

    @property
    def surplus(self) -> int:
        """Frames that were made and wait for the next batch."""
        return int(self._filled.sum())

    # --- a rollout ---

    def rollout(self, steps: int, at_most: int | None = None, start: int = 0) -> TensorDict:  # noqa: ARG002 - none stand
        """See `Engine`. Lanes that are too far behind are delivered short; a short batch is the last one."""
        assert steps == self._full or at_most is not None
        self._prepare()
        try:
            self._wanted = steps
            while (ticks := self._room()) and self._lack(0):
                made = self._make(self._scratch, ticks)
                self._random.finish(made if self._policy is None else self._random_until)
                self._deal(self._found(made))
                self.steps += made
                if self.interrupted and self._filled.any():
                    break
        except BaseException:
            self.abandon()
            raise
        return self._delivered(min(steps, int(self._filled.max())), at_most)

    def deliver_to(self, memory: Memory) -> bool:
        """See `Engine`: batches are copied there."""
        self._same = memory
        return True

    def _room(self) -> int:
        """How many steps there is room for: each may be a frame of any lane."""
        return min(2 * self._full - int(self._filled.max()), self._scratch.steps - 1)

    def _lack(self, t: int) -> int:
        """How many frames the lane that is furthest behind needs, after t steps in the scratch."""
        if not t:
            return max(0, self._wanted - int(self._filled.min()))
        self._settle(t)
        new = slice(self._counted + 1, t + 1)
        came = self._rows.row_lanes[new][self._rows.is_frame[new]]
        self._come, self._counted = self._come + np.bincount(came, minlength=self._num_lanes), t
        return max(0, self._wanted - int(self._come.min()))

    def _settle(self, t: int) -> None:
        with self._located(t):
            self._rows.settle(t)

    def _goal(self, t: int, steps: int) -> int:
        return min(steps, t + self._lack(t))

    def _row_lanes(self) -> Array | None:
        return self._rows.row_lanes

    def _fresh(self) -> list[int]:
        return self._rows.fresh

    def _starts(self) -> list[tuple[int, int]]:
        return self._rows.starts

    def _window_after(self, t: int, steps: int) -> int:  # noqa: ARG002 - views of all of it are kept
        return self._scratch.steps - 1

    def _open_window(self, start: int, stop: int) -> None:
        self._versions[: self._scratch.steps * self._width] = (
            RANDOM_VERSION if self._policy is None else self.policy_version
        )
        self._policy_from, self._random_until = np.zeros(self._width, np.int64), 0
        self._come, self._counted = self._filled, 0
        super()._open_window(start, stop)
        if self._policy is not None and self.warmup_left.any():
            self._mixed = MixedActor(self._policy, self._random, np.zeros(self._width, bool))

    def _act_by(self, version: int, t: int) -> None:
        self.policy_version = version
        if self._policy is not None:
            self._versions[t * self._width : self._scratch.steps * self._width] = version

    def _stretch(self, t: int, steps: int) -> tuple[Actor, int]:
        if self._policy is None:
            return self._random, t + 1 if self._is_asked else steps
        if not self.warmup_left.any():
            if t:
                self._settle(t)
            self._policy.enter(t)
            each = self._is_asked or self._policy.has_state
            return self._policy, t + 1 if each else steps
        by_chance = self.warmup_left[self._rows.row_lanes[t]] > 0
        width = self._width
        self._versions[t * width : (t + 1) * width][by_chance] = RANDOM_VERSION
        if by_chance.any():
            self._policy_from[by_chance] = self._random_until = t + 1
        if by_chance.all():
            return self._random, t + 1
        self._policy.enter(t)
        if not by_chance.any():
            return self._policy, t + 1
        assert self._mixed is not None
        self._mixed.lanes = by_chance
        return self._mixed, t + 1

    def _after(self, t: int) -> None:
        """Frames of a warm-up are counted as they come: a lane that is asked has had all that it was asked before."""
        if self.warmup_left.any():
            self._settle(t)
            lanes = self._rows.row_lanes[t][self._rows.is_frame[t]]
            left = self.warmup_left.copy()
            left[lanes] = np.maximum(left[lanes] - 1, 0)
            self.warmup_left = left

    def _policy_acts_from(self, made: int) -> Array:  # noqa: ARG002
        return self._policy_from

    # --- from the scratch to batches ---

    def _found(self, made: int) -> _Frames:
        """The frames of the last `made` steps. Rows that wait for their result are kept."""
        rows, width = self._rows, self._width
        behind = self._scratch.steps * width
        waiting = np.flatnonzero(self._waiting)
        lanes = np.concatenate((waiting, rows.row_lanes[: made + 1].ravel()))
        index = np.concatenate((behind + waiting, np.arange((made + 1) * width)))
        is_frame = np.concatenate((np.zeros(len(waiting), bool), rows.is_frame[: made + 1].ravel()))
        order = lanes.argsort(kind="stable")
        lanes, index, is_frame = lanes[order], index[order], is_frame[order]
        of_one = lanes[1:] == lanes[:-1]
        pairs = np.flatnonzero(of_one & is_frame[1:])
        of_frame, after = lanes[1:][pairs], index[1:][pairs]
        heads = np.flatnonzero(np.diff(of_frame, prepend=-1))
        ranks = np.arange(len(of_frame)) - np.repeat(heads, np.diff(heads, append=len(of_frame)))
        came = after - width
        flags = (self._scratch.flat["next", name].numpy()[came, 0] for name in ("terminated", "truncated"))
        ended = np.logical_or(*flags)
        cut = self._cut(of_frame, after)
        frames = _Frames(of_frame, index[:-1][pairs], after, came, ended, cut, self._filled[of_frame] + ranks)
        last = np.append(np.flatnonzero(~of_one), len(lanes) - 1)
        self._keep(lanes[last], index[last], (index[last] // width != made) | (index[last] >= behind))
        return frames

    def _cut(self, lanes: Array, after: Array) -> Array | None:
        """After which frames their lane began anew. Where there are none before that, its episode is cut now."""
        if not self._rows.cuts:
            return None
        cut = np.zeros(len(lanes), bool)
        for t, row in self._rows.cuts:
            lane = int(self._rows.row_lanes[t + 1, row])
            before = np.flatnonzero((lanes == lane) & (after < (t + 1) * self._width + row))
            if len(before):
                cut[before[-1]] = True
            else:
                self.episodes.cut([lane])
        return cut

    def _keep(self, lanes: Array, rows: Array, waits: Array) -> None:
        """Keeps the newest row of each lane that has acted, and has not come back."""
        self._waiting = np.zeros(len(self._waiting), bool)
        self._waiting[lanes[waits]] = True
        if waits.any():
            behind = self._scratch.steps * self._width
            self._kept_rows = rows[waits], behind + lanes[waits]
        else:
            self._kept_rows = rows[:0], lanes[:0]

    def _deal(self, frames: _Frames) -> None:
        """Copies frames to where they belong in the batches to come."""
        ended = frames.ended
        times = self.steps * self._width + frames.after
        numbers = self.episodes.numbered(frames.lanes, ended if frames.cut is None else ended | frames.cut)
        ids, counts = self.episodes.go_on(frames.lanes, times, ended, self._rewards(frames), frames.cut)
        marks: dict[Key, Array] = {
            ("next", "done"): ended[:, None],
            MASK: np.ones(len(ended), bool),
            VERSION: self._versions[frames.acted],
            IDS: ids,
            ("collector", "worker"): np.full(len(ids), self._worker),
            ("collector", "episode"): numbers,
            ("step_count",): counts[:, None],
            ("next", "step_count"): counts[:, None] + 1,
            ("is_init",): counts[:, None] == 0,
        }
        if not self._slots:
            self._slots.append(self._new_slot())
        ahead = frames.places >= self._full
        if ahead.any() and len(self._slots) == 1:
            self._slots.append(self._new_slot())
        for number, slot in enumerate(self._slots):
            chosen = np.flatnonzero(ahead == bool(number))
            self._copy(slot, frames, marks, chosen, frames.places[chosen] - number * self._full)
        self._filled = self._filled + np.bincount(frames.lanes, minlength=len(self._filled))
        rows, behind = self._kept_rows
        self._scratch.copy_rows(rows, behind)
        self._versions[behind] = self._versions[rows]

    def _copy(self, slot: Slot, frames: _Frames, marks: Mapping[Key, Array], chosen: Array, places: Array) -> None:
        to = frames.lanes[chosen] * self._full + places
        acted, after, came = frames.acted[chosen], frames.after[chosen], frames.came[chosen]
        taken = slot.flat()
        for key in self._acted:
            if key in taken:
                self._scratch.read(key, acted, taken[key], to)
        ends = np.flatnonzero(frames.ended[chosen])
        for key in self._observed:
            self._scratch.read(key, after, taken["next", *key], to)
            self._scratch.read(("next", *key), came[ends], taken["next", *key], to[ends])
        for key in self._came:
            self._scratch.read(key, came, taken[key], to)
        for key, values in marks.items():
            if key in taken:
                taken[key].numpy()[to] = values[chosen]

    def _rewards(self, frames: _Frames) -> Array:
        """`[F]`, what each frame paid."""
        paid = np.zeros(len(frames.lanes))
        if not len(paid):
            return paid
        for key in self._driver.reward_keys:
            paid += self._scratch.flat["next", *key].numpy()[frames.came].reshape(len(paid), -1).sum(1)
        return paid

    def _new_slot(self) -> Slot:
        slot = self._memory.take(self._full)
        for key in (("done",), ("terminated",), ("truncated",), MASK):
            slot.arrays[key].fill(False)
        return slot

    def _delivered(self, steps: int, at_most: int | None) -> TensorDict:
        """The first `steps` steps of the batch that comes next; all of it, if more is to come than stands in these."""
        slot, *ahead = self._slots
        if at_most is not None and np.minimum(self._filled, steps).sum() < at_most:
            steps = min(self._full, int(self._filled.max()))
        frames = np.minimum(self._filled, steps)
        while at_most is not None and frames.sum() > at_most:
            frames[np.flatnonzero(frames == frames.max())[-1]] -= 1
        for lane in np.flatnonzero(frames < steps).tolist():
            for key, array in slot.tensors.items():
                array[lane, frames[lane] : steps] = NO_EPISODE if key == IDS else 0
        if self._set_truncated:
            lanes = np.flatnonzero(frames)
            for name in ("truncated", "done"):
                slot.arrays["next", name][lanes, frames[lanes] - 1] = True
        self.frames = int(frames.sum())
        self.versions = counts_of(slot.arrays[VERSION][np.arange(self._full) < frames[:, None]])
        self._slots, self._filled = ahead, self._filled - frames
        if self.frames == at_most and self._filled.any():  # it was the last
            self.dropped += self.surplus
            self._resets.cut()
            self._slots, self._filled = [], np.zeros_like(frames)
        if self._same is not None:
            kept = self._same.take(self._full)
            for key, tensor in kept.tensors.items():
                tensor.copy_(slot.tensors[key])
            slot = kept
        return slot.batch(steps)

    # --- between rollouts ---

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """See `Engine`. Frames that are made already come first; actions under way have no result."""
        super().reset(lanes, seeds, options)
        self._waiting[:] = False

    def abandon(self, warmup_left: Array | None = None) -> None:
        """See `Engine`. Frames that were made ahead are lost with it."""
        self.dropped += self.surplus
        super().abandon(warmup_left)
        self._slots, self._filled = [], np.zeros_like(self._filled)
        self._waiting[:] = False

    @property
    def warmup_owed(self) -> Array:
        """See `Engine`. Frames that were made ahead are not delivered yet."""
        owed = self.warmup_left.copy()
        if self._policy is None:
            return owed
        for number, slot in enumerate(self._slots):
            versions, times = slot.arrays[VERSION], np.arange(self._full) + number * self._full
            owed += ((versions == RANDOM_VERSION) & (times < self._filled[:, None])).sum(1)
        return owed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self.dropped += self.surplus
        super().load_state_dict(state)
        self._slots, self._filled = [], np.zeros_like(self._filled)
        self._waiting[:] = False
