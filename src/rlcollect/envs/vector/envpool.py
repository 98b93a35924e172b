"""EnvPool's environments, with `env_type="gymnasium"`: all lanes at every step, or those that are done first.

They reset themselves with the step after an episode's end, as in mode NEXT_STEP. An episode that terminates on the very
step of its time limit is told to be truncated, and not terminated: that is how EnvPool labels it, and nothing here can
tell. (`elapsed_step == 0` does not mark every reset row: with Atari's episodic life it goes on.)

Seeds are fixed when a pool is built, so seeding builds another one, of the same configuration.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcollect.envs.make import close_all
from rlcollect.envs.opening import Opening
from rlcollect.envs.vector.batched import Batched, check_num_envs, in_lane_order
from rlcollect.envs.vector.dense import MaskedResets
from rlcollect.envs.vector.pending import PendingResets
from rlcollect.envs.vector.rows import ScratchRows
from rlcollect.errors import OptionError, PolicyError
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Arrays, Key, numpy_dtype

__all__ = ["is_envpool", "open_envpool"]

Array = np.ndarray[Any, Any]
LARGEST_SEED = 2**31 - 1
LANE_SEEDS = "EnvPool's seeds are fixed when a pool is built: seed all lanes, or none."


def is_envpool(made: Any) -> bool:
    """Whether it is a pool of EnvPool, in Gymnasium's form."""
    return isinstance(made, VectorEnv) and all(
        hasattr(made, name) for name in ("async_reset", "recv", "send", "config")
    )


def open_envpool(opening: Opening) -> EnvPoolLanes | EnvPoolMasked | EnvPoolRows:
    """Resets a pool, and plans how what it gives is stored.

    Raises:
        OptionError, SpaceError, EnvError: it does not fit.
    """
    check_num_envs(opening)
    if opening.what.reset_options is not None:
        raise OptionError("reset_options: EnvPool's environments take none.")
    pool, what = opening.envs[0], opening.what
    if int(pool.config["batch_size"]) < int(pool.config["num_envs"]):
        if not opening.owned:  # what it has under way is its owner's
            opening = dataclasses.replace(opening, envs=[again := _as_new(pool)], owned=[again])
            try:
                return EnvPoolRows(opening)
            except BaseException:
                close_all([again])
                raise
        return EnvPoolRows(opening)
    if opening.where.masked_reset or what.max_frames_per_traj is not None or what.reset_at_each_iter:
        return EnvPoolMasked(opening, AutoresetMode.NEXT_STEP)
    return EnvPoolLanes(opening, AutoresetMode.NEXT_STEP)


def _as_new(pool: Any) -> Any:
    """The same pool, with nothing under way."""
    config = pool.config
    return rebuilt(pool, config["env_seed"] or [config["seed"] + lane for lane in range(config["num_envs"])])


def rebuilt(pool: Any, seeds: Sequence[int]) -> Any:
    """A pool of the same configuration, with a seed for each of its environments."""
    spec = type(pool.spec)
    config = {**pool.config, "seed": 0, "env_seed": [int(seed) for seed in seeds]}
    return type(pool)(spec(spec.gen_config(**config)))


class _Pool(Batched):
    """What the drivers of pools have in common: seeding builds another pool, and actions are looked at."""

    def __init__(self, *args: Any) -> None:
        self._is_owed = False  # rows that were asked for and did not come: an interrupt came between
        super().__init__(*args)
        self.refuses_lane_seeds = LANE_SEEDS
        self.refuses_options = "EnvPool's environments take none."
        self.largest_seed = LARGEST_SEED

    def _build(self, seeds: Sequence[int]) -> None:
        """Another pool, with these seeds, takes the place of this one."""
        pool = self.env
        self.env = rebuilt(pool, seeds)
        self._is_owed = False
        if any(pool is owned for owned in self._owned):
            self._owned = [owned for owned in self._owned if owned is not pool]
            close_all([pool])
        self._owned.append(self.env)

    def ask(self, actions: Any, lanes: Array | None = None) -> Any:
        """One step, of these lanes or of all."""
        self._is_owed = True
        self.env.send(actions, lanes)
        result = self.env.recv()
        self._is_owed = False
        return result

    @property
    def ask_quickly(self) -> Callable[[Any], Any]:
        """See `Batched`: the call between is needed here."""
        return self.ask

    def _settle_debts(self) -> None:
        """Takes what is owed, so that what is asked for next comes next."""
        if self._is_owed:
            self.env.recv()
        self._is_owed = True

    def _lanes_anew(self, lanes: Sequence[int]) -> dict[Key, Array]:
        """Resets these lanes alone: what they show, in their order."""
        self._settle_debts()
        observation, info = self.env.reset(np.asarray(lanes, np.int32))
        self._is_owed = False
        return self.parts(self.seen(observation, info))

    def _lanes_stepped(self, lanes: Sequence[int]) -> dict[Key, Array]:
        """Lets these lanes begin anew by themselves, by a step that they ignore: with lives left the game goes on."""
        actions = [np.zeros((len(lanes), *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in self.action_codec.leaves]
        observation, *_, info = self.ask(self.batch(actions), np.asarray(lanes, np.int32))
        return self.parts(self.seen(observation, info))

    def _some_anew(self, lanes: Sequence[int]) -> None:
        """Resets these lanes, between rollouts."""
        for key, values in self._lanes_anew(lanes).items():
            self.current[key][list(lanes)] = values

    def _all_anew(self, seeds: Sequence[int] | None, lanes: Sequence[int]) -> None:
        """Resets all lanes, of another pool if there are seeds."""
        if (ordered := in_lane_order(lanes, seeds)) is not None:
            self._build(ordered)
        self._settle_debts()
        self.reset_all(None, None)
        self._is_owed = False

    def _check_actions(self, arrays: Arrays, made: int) -> None:
        """Whether actions are in range: EnvPool takes any number.

        Raises:
            PolicyError: naming the lane.
        """
        for leaf, space in zip(self.action_codec.leaves, self.action_codec.parts, strict=True):
            if not hasattr(space, "n"):
                continue
            first = int(getattr(space, "start", 0))
            actions = arrays[leaf.key][:, :made]
            wrong = (actions < first) | (actions >= first + int(space.n))
            if wrong.any():
                row, t = (int(place) for place in np.argwhere(wrong)[0][:2])
                self.failed_lane, self.failed_step = self._lane_of_row(t, row), t
                raise PolicyError(f"The action {actions[row, t]} is not in {space}.")

    def _lane_of_row(self, t: int, row: int) -> int:  # noqa: ARG002 - a row a lane
        return row

    def state_dict(self) -> dict[str, Any]:
        """Nothing: pools do not show their state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


class EnvPoolLanes(_Pool, PendingResets):
    """A pool that gives all lanes at every step."""

    def __init__(self, opening: Opening, mode: AutoresetMode) -> None:
        super().__init__(opening, mode)
        self.refuses_lane_resets: str | None = None

    def finish(self, made: int) -> None:
        """See `PendingResets`."""
        self._check_actions(self._arrays, made)
        super().finish(made)

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | None = None,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - none are taken
    ) -> None:
        """Begins a new episode in these lanes."""
        if len(lanes) < self.num_lanes:
            self._some_anew(lanes)
            self._is_fresh[list(lanes)] = True
            self._done[0, list(lanes)] = False
            return
        self._all_anew(seeds, lanes)
        self._is_fresh[:] = True
        self._done[0], self._newest = False, 0


class EnvPoolMasked(_Pool, MaskedResets):
    """The same where lanes are to be reset one by one: ended ones are reset at once."""

    def __init__(self, opening: Opening, mode: AutoresetMode) -> None:
        super().__init__(opening, mode)
        self.refuses_lane_resets: str | None = None

    def _end(self, t: int, ended: Array, info: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._note(t, ended)
        lanes = np.flatnonzero(ended).tolist()
        self._show(t, lanes, self._lanes_stepped(lanes))

    def _begin_anew(self, t: int, ended: Array) -> None:
        lanes = np.flatnonzero(ended).tolist()
        self._show(t, lanes, self._lanes_anew(lanes))

    def _show(self, t: int, lanes: Sequence[int], first: Mapping[Key, Array]) -> None:
        row = self._after(t)
        for key, values in first.items():
            for place, lane in enumerate(lanes):
                self._next[key][lane, t] = row[key][lane]
                row[key][lane] = values[place]

    def finish(self, made: int) -> None:
        """See `VectorDriver`."""
        self._check_actions(self._arrays, made)
        super().finish(made)

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | None = None,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - none are taken
    ) -> None:
        """Begins a new episode in these lanes."""
        if len(lanes) < self.num_lanes:
            self._some_anew(lanes)
            return
        self._all_anew(seeds, lanes)


class EnvPoolRows(_Pool, ScratchRows):
    """A pool that gives M of its N lanes at every step: those that are done first.

    Its rows are told apart by `info["env_id"]`. It is built anew for each reset, since what it has under way cannot be
    taken back.
    """

    def __init__(self, opening: Opening) -> None:
        self._ids: Array = np.zeros(0, np.int32)  # the lanes of the rows that are there now
        self._generation = 0
        super().__init__(opening)
        self.refuses_lane_resets: str | None = (
            "an asynchronous pool of EnvPool cannot reset single lanes, some of which are under way. Build it with "
            "batch_size=num_envs."
        )
        self._fresh_now = self.fresh
        self._pending = np.ones(self.num_lanes, bool)  # lanes whose next row is no frame
        self._pending[self._ids] = False
        self._recv = self.env.recv

    def _lane_of_row(self, t: int, row: int) -> int:
        return int(self.row_lanes[t, row])

    def rows_at_once(self) -> int:
        """M."""
        return int(self.env.config["batch_size"])

    def first_answer(self) -> tuple[Any, dict[str, Any]]:
        """The first rows of a pool that has nothing under way."""
        self.env.async_reset()
        observation, info = self.env.recv(reset=True)
        self._ids = info["env_id"]
        return observation, info

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the scratch memory, and writes the current rows into its first."""
        arrays = memory.arrays
        steps = arrays["next", "reward"].shape[1]
        if len(self.is_frame) != steps:
            self.row_lanes = np.zeros((steps, self.rows_at_once()), np.int64)
            self.is_frame = np.zeros((steps, self.rows_at_once()), bool)
        self.fresh, self.row_lanes[0] = self._fresh_now, self._ids
        self._take(arrays)

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Gives the lanes of row t their actions, and takes the rows that are done first."""
        self.env.send(self.batch(actions), self._ids)
        observation, reward, terminated, truncated, info = self._recv()
        self._write(t, observation, reward, terminated, truncated, info)
        ids = info["env_id"]
        self._ids = ids
        self.row_lanes[t + 1] = ids
        begins = self._pending[ids]
        np.logical_not(begins, out=self.is_frame[t + 1])
        done = np.logical_or(terminated, truncated)
        self._pending[ids] = done
        if np.count_nonzero(done):
            rows = np.flatnonzero(done)
            self._hide_finals(t, rows)
            self.ends += [(t, lane) for lane in ids[rows].tolist()]
            if self.infos.leaves:
                self.infos.episodes_ended(len(rows))
        if np.count_nonzero(begins):
            self.starts += [(t, row) for row in np.flatnonzero(begins).tolist()]

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environments measured and their answers held against the spaces."""
        self._recv = self._timed_recv
        try:
            self.step(t, actions)
        finally:
            self._recv = self.env.recv

    def _timed_recv(self) -> Any:
        start = time.perf_counter()
        result = self.env.recv()
        self.env_seconds += time.perf_counter() - start
        self.check_answer(result)
        return result

    def settle(self, made: int) -> None:
        """All is up to date after every step."""

    def finish(self, made: int) -> None:
        """There were `made` steps: keeps what the rows show now, lets the memory go."""
        self._check_actions(self._arrays, made)
        self._let_go(made)
        self._fresh_now = [row for t, row in self.starts if t == made - 1]

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | None = None,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - none are taken
    ) -> None:
        """Begins a new episode in every lane, by another pool."""
        if len(lanes) < self.num_lanes:
            raise OptionError(str(self.refuses_lane_resets))
        if seeds is None:  # what this one was built with would give the same episodes again
            self._generation += 1
            config = self.env.config
            root = np.random.SeedSequence(config["env_seed"] or [config["seed"]], spawn_key=(self._generation,))
            seeds = (root.generate_state(self.num_lanes) & LARGEST_SEED).tolist()
        else:
            self._generation = 0
        self._build(in_lane_order(lanes, seeds) or [])
        self.take_current(*self.first_answer())
        self._fresh_now = list(range(self.rows_at_once()))
        self._pending[:] = True
        self._pending[self._ids] = False
        self._recv = self.env.recv
