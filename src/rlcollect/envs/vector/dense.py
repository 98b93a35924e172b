"""Vector environments whose ended lanes begin anew before the next step: every step is a frame of every lane.

Either the environment resets them in the step itself (SAME_STEP), and says in the info what they had come to; or it is
asked to, by a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlcollect.envs.calls import MASK
from rlcollect.envs.driver import fill_next
from rlcollect.envs.opening import Opening
from rlcollect.envs.spaces import Rows, rows_in_time
from rlcollect.envs.vector.batched import Batched, in_lane_order
from rlcollect.envs.vector.modes import base_of, finals_of, keeps_masks, refuse_finals
from rlcollect.errors import EnvError, OptionError
from rlcollect.failures import warn
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Arrays, Key, show_key

__all__ = ["MaskedResets", "SameStep", "VectorDriver"]

Array = np.ndarray[Any, Any]
DOUBTS = 3  # episodes in a row that ended in what the next one began with


class VectorDriver(Batched):
    """What is the same for both: see `MaskedResets` and `SameStep`."""

    def __init__(self, opening: Opening, mode: AutoresetMode, first: tuple[Any, dict[str, Any]] | None = None) -> None:
        super().__init__(opening, first)
        masked = opening.where.masked_reset
        knows_masks = mode is AutoresetMode.DISABLED or keeps_masks(self.env, mode)
        self.refuses_lane_resets: str | None = None
        if not (knows_masks if masked is None else masked):
            self.refuses_lane_resets = (
                f"{type(base_of(self.env)).__name__} in mode {mode.value} is not known to reset single lanes "
                '(options={"reset_mask": mask}). If it does, say so: masked_reset=True.'
            )
        self._mode = mode
        self._step = self.ask_quickly
        self._arrays = Arrays({}, remember=False)
        self._now: Mapping[Key, Array] = {}
        self._next: Mapping[Key, Array] = {}
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0))
        self._rows: list[Rows] = []
        self._start = 0
        self._bound = 0

    # --- a rollout ---

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""
        arrays = memory.arrays
        self._arrays, self.ends, self.failed_lane = arrays, [], None
        self._now = {leaf.key: arrays[leaf.key] for leaf in self.leaves}
        self._next = {leaf.key: arrays["next", *leaf.key] for leaf in self.leaves}
        self._bound = arrays["next", "reward"].shape[1]
        for key, array in self._now.items():
            array[:, 0] = self.current[key]
        self._rewards, self._terminated, self._truncated = (
            arrays["next", name][..., 0].swapaxes(0, 1) for name in ("reward", "terminated", "truncated")
        )
        self.infos.bind(arrays)

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        self._start = start
        self._rows = self._arrays.once(("rows", start, stop), lambda: self._views(start, stop))

    def _views(self, start: int, stop: int) -> list[Rows]:
        """Where the observations after these steps go; after the last of all, to the current ones."""
        rows = rows_in_time(self.codec, {key: now[:, start + 1 : stop + 1] for key, now in self._now.items()})
        return rows if stop < self._bound else [*rows, self.codec.rows(self.current)]

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""
        time = self._start + t
        observation, reward, terminated, truncated, info = self._step(self.batch(actions))
        seen = self.seen(observation, info)
        self.look(seen, reward, terminated, truncated)
        self._rewards[time] = reward
        self._terminated[time] = terminated
        self._truncated[time] = truncated
        self._rows[t][...] = seen
        if info:
            self._check_mode(info)
        done = np.logical_or(terminated, truncated)
        ended = done if np.count_nonzero(done) else None
        if self.infos.leaves:
            self._record(time, info, ended)
        if ended is not None:
            self._end(time, ended, info)

    def _check_mode(self, info: Mapping[str, Any]) -> None:
        """Whether the environment keeps to its mode, as far as the info tells."""

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environment measured and its answer held against the spaces."""
        self._step = self.timed_step
        try:
            self.step(t, actions)
        finally:
            self._step = self.ask_quickly

    def _after(self, t: int) -> Mapping[Key, Array]:
        """Where the observations after step t go, `[N, *shape]` by key."""
        if t + 1 == self._bound:
            return self.current
        return {key: array[:, t + 1] for key, array in self._now.items()}

    def _record(self, t: int, info: Mapping[str, Any], ended: Array | None) -> None:  # noqa: ARG002
        self.infos.record(t, info)

    def _end(self, t: int, ended: Array, info: Mapping[str, Any]) -> None:
        """Stores what these lanes had come to, `("next", ...)`, and what they begin with."""
        raise NotImplementedError

    def _note(self, t: int, ended: Array) -> None:
        lanes = np.flatnonzero(ended).tolist()
        self.ends += [(t, lane) for lane in lanes]
        if self.infos.leaves:
            self.infos.episodes_ended(len(lanes))

    def _begin_anew(self, t: int, ended: Array) -> None:
        """Resets these lanes after step t, whose row holds what they had come to."""
        row, lanes = self._after(t), np.flatnonzero(ended).tolist()
        values, _ = self.reset_masked(ended)
        for key, value in values.items():
            before, after = row[key], self._next[key]
            for lane in lanes:
                after[lane, t] = before[lane]
            self._check_untouched(key, before, value, ended)
            before[ended] = value[ended]

    def _check_untouched(self, key: Key, before: Array, after: Array, ended: Array) -> None:
        """Whether other lanes show what they showed.

        Raises:
            EnvError: they do not.
        """
        if self.paired and key == MASK:  # infos are of the lanes that were reset
            return
        after = after.astype(before.dtype, copy=False)
        differs = before != after
        if before.ndim > 1:
            differs = differs.reshape(len(before), -1).any(1)
        differs &= ~ended
        if not np.count_nonzero(differs):
            return
        others = ~ended
        if before.dtype.kind == "f" and np.array_equal(before[others], after[others], equal_nan=True):
            return
        self.failed_lane = int(differs.argmax())
        raise EnvError(
            f"A reset of the lanes {np.flatnonzero(ended).tolist()} alone changed {show_key(key)} of lane "
            f"{self.failed_lane}: the environment, or a wrapper around it, does not keep to "
            'options["reset_mask"]. Leave out masked_reset=True, mend it, or use another autoreset mode.'
        )

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""
        ended = np.zeros(self.num_lanes, bool)
        ended[list(lanes)] = True
        self._truncated[t, ended] = True
        self.ends += [(t, lane) for lane in lanes]
        self._begin_anew(t, ended)

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: copies next observations and the current one, lets the memory go."""
        for key, array in self._after(made - 1).items():
            if array is not self.current[key]:
                self.current[key][...] = array
        fill_next(self._now, self._next, self.current, self.ends, made)
        self._now, self._next, self._rows, self._arrays = {}, {}, [], Arrays({}, remember=False)
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0))
        self.infos.release()

    # --- between rollouts ---

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations.

        Raises:
            EnvError: a lane that was not to be reset changed.
        """
        if len(lanes) == self.num_lanes:
            self.reset_all(in_lane_order(lanes, seeds), kwargs)
            return
        chosen = np.zeros(self.num_lanes, bool)
        chosen[list(lanes)] = True
        ordered = in_lane_order(lanes, seeds)
        values, _ = self.reset_masked(chosen, ordered, kwargs)
        for key, value in values.items():
            self._check_untouched(key, self.current[key], value, chosen)
            self.current[key][chosen] = value[chosen]


class MaskedResets(VectorDriver):
    """Ended lanes are reset at once, by a mask: mode DISABLED, and NEXT_STEP where that is known to work."""

    def _check_mode(self, info: Mapping[str, Any]) -> None:
        refuse_finals(info, self._mode)

    def _end(self, t: int, ended: Array, info: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._note(t, ended)
        self._begin_anew(t, ended)


class SameStep(VectorDriver):
    """Ended lanes were reset by the step itself; what they had come to is in the info."""

    def __init__(self, opening: Opening, mode: AutoresetMode, first: tuple[Any, dict[str, Any]] | None = None) -> None:
        super().__init__(opening, mode, first)
        if opening.what.reset_options is not None:
            raise OptionError(
                "reset_options: in mode SAME_STEP the environment resets its lanes itself, and gives them no options. "
                "Use the mode DISABLED, or what makes one of its environments, with num_envs=."
            )
        base = base_of(self.env)
        self._held = base._env_obs if type(base) is SyncVectorEnv else None  # what its environments gave last
        self._doubts = 0

    def _record(self, t: int, info: Mapping[str, Any], ended: Array | None) -> None:
        if ended is None:
            self.infos.record(t, info)
        else:
            self.infos.record_ends(t, info, ended)

    def _end(self, t: int, ended: Array, info: Mapping[str, Any]) -> None:
        finals = finals_of(info)
        lanes = np.flatnonzero(ended).tolist()
        row, after = self._after(t), self.codec.rows(self._next)
        for lane in lanes:
            self.failed_lane = lane
            final = self.final_of(finals, lane, info)
            after[lane, t] = final
            self._check_kept(t, lane, final, row)
        self.failed_lane = None
        self._note(t, ended)

    def _check_kept(self, t: int, lane: int, final: Any, row: Mapping[Key, Array]) -> None:
        """Whether an environment has overwritten its last observation by resetting (gymnasium gives the same array).

        Raises:
            EnvError: it has.
        """
        if self._held is not None and _share(final[0] if self.paired else final, self._held[lane]):
            raise EnvError(
                'The environment uses one array for all its observations: what the info has as "final_obs" was '
                "overwritten by the reset that followed. Let it return copies, or use the mode NEXT_STEP or DISABLED."
            )
        same = all(np.array_equal(self._next[key][lane, t], row[key][lane]) for key in row)
        moved = any(not np.array_equal(self._now[key][lane, t], row[key][lane]) for key in row)
        self._doubts = self._doubts + 1 if same and moved else 0
        if self._doubts == DOUBTS:
            warn(
                f'{DOUBTS} episodes in a row ended, says the info\'s "final_obs", in the very observation that the '
                "next began with. An environment that uses one array for all its observations looks like this: its "
                "last ones are lost. Let it return copies, or use the mode NEXT_STEP or DISABLED."
            )


def _share(one: Any, other: Any) -> bool:
    """Whether two observations have memory in common."""
    if isinstance(one, Mapping):
        return any(_share(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return any(_share(left, right) for left, right in zip(one, other, strict=True))
    return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.may_share_memory(one, other)
