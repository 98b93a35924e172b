"""Lanes in worker processes, as a driver: one group after the other, so that the policy acts for one while others step.

With one group, and workers that are not replaced, every step is a frame of every lane: that is the driver of vector
environments that reset in the step that ends an episode. This one is for all else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rlcollect.envs.make import is_sequence
from rlcollect.envs.opening import Opening
from rlcollect.envs.process.env import ProcessVectorEnv
from rlcollect.envs.vector.batched import check_num_envs, checked_reset, in_lane_order
from rlcollect.envs.vector.dense import SameStep
from rlcollect.envs.vector.modes import finals_of
from rlcollect.envs.vector.rows import ScratchRows
from rlcollect.errors import OptionError
from rlcollect.interfaces import RolloutMemory
from rlcollect.options import Where

__all__ = ["Groups", "is_process_env", "made_of", "open_process_env"]

Array = np.ndarray[Any, Any]


def is_process_env(made: Any) -> bool:
    """Whether it is a `ProcessVectorEnv`."""
    return isinstance(made, ProcessVectorEnv)


def made_of(create_env_fn: Any, where: Where) -> ProcessVectorEnv:
    """The lanes that the user asks for, in worker processes.

    Raises:
        What `ProcessVectorEnv` raises.
    """
    lanes = len(create_env_fn) if is_sequence(create_env_fn) else where.num_envs or 1
    assert where.env_workers is not None
    return ProcessVectorEnv(
        create_env_fn,
        lanes,
        where.env_workers,
        num_groups=where.env_groups,
        create_env_kwargs=where.create_env_kwargs,
    )


def open_process_env(opening: Opening) -> SameStep | Groups:
    """Resets the lanes, and plans how what they give is stored.

    Raises:
        OptionError, SpaceError, EnvError: they do not fit.
    """
    check_num_envs(opening)
    env: ProcessVectorEnv = opening.envs[0]
    if env.num_groups == 1 and env.on_worker_failure == "raise":
        return SameStep(opening, AutoresetMode.SAME_STEP)
    if env.num_envs % env.num_groups or len({len(env.lanes(group)) for group in range(env.num_groups)}) > 1:
        raise OptionError(
            f"Groups should be of one size, and {env.num_envs} lanes cannot be divided into {env.num_groups} such."
        )
    if not env.copy:
        raise OptionError("copy=False: a group would write into what another one shows. Leave it out.")
    if opening.what.reset_options is not None:
        raise OptionError("reset_options: lanes in worker processes are reset there, and given no options.")
    return Groups(opening)


class Groups(ScratchRows):
    """The `ScratchDriver` of lanes in worker processes: each step is of one group, the next one in turn.

    A row is a lane of the group whose turn it is. Where a worker was replaced, its lanes have begun anew: what came
    with such a row is no frame, and the episode before it is cut.

    Args:
        opening: with one environment.
    """

    def __init__(self, opening: Opening) -> None:
        env: ProcessVectorEnv = opening.envs[0]
        self._lanes = [np.asarray(env.lanes(group), np.int64) for group in range(env.num_groups)]
        self._group = 0  # whose rows are there now
        self._first: dict[int, tuple[Any, Mapping[str, Any]]] = {}  # of groups that have not been stepped since a reset
        super().__init__(opening)
        self.refuses_lane_resets: str | None = (
            "lanes that are stepped in groups, or whose worker processes may be replaced, go on by themselves."
        )
        self._fresh_now = self.fresh
        self._recv = self.env.recv
        self._no_reward, self._no_flag = (np.zeros(len(self._lanes[0]), dtype) for dtype in (np.float64, np.bool_))

    def rows_at_once(self) -> int:
        """Lanes of a group."""
        return len(self._lanes[0])

    def first_answer(self) -> tuple[Any, dict[str, Any]]:
        """What the lanes of the first group show; what the others do is kept."""
        return self._begun(self.envs[0].reset())

    def _begun(self, result: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = checked_reset(result)
        self._group = 0
        shown = [(_rows_of(observation, lanes), _rows_of(info, lanes)) for lanes in self._lanes]
        self._first = dict(enumerate(shown[1:], 1))
        return shown[0]

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the scratch memory, and writes the current rows into its first."""
        arrays = memory.arrays
        steps = arrays["next", "reward"].shape[1]
        if len(self.is_frame) != steps:
            self.row_lanes = np.zeros((steps, self.rows_at_once()), np.int64)
            self.is_frame = np.zeros((steps, self.rows_at_once()), bool)
        self.fresh, self.row_lanes[0] = self._fresh_now, self._lanes[self._group]
        self._take(arrays)

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Gives the group of row t its actions, and takes the rows of the next one."""
        self.env.send(self._group, self.batch(actions))
        self._group = (self._group + 1) % len(self._lanes)
        self.row_lanes[t + 1] = self._lanes[self._group]
        if self._group in self._first:
            observation, info = self._first.pop(self._group)
            self._write(t, observation, self._no_reward, self._no_flag, self._no_flag, info)
            self.is_frame[t + 1] = False
            self.starts += [(t, row) for row in range(self.rows_at_once())]
            return
        observation, reward, terminated, truncated, info = self._recv(self._group)
        anew = info.get("restarted")
        if anew is None:
            self.is_frame[t + 1] = True
        else:
            truncated = truncated & ~anew
            np.logical_not(anew, out=self.is_frame[t + 1])
            rows = [(t, row) for row in np.flatnonzero(anew).tolist()]
            self.cuts += rows
            self.starts += rows
        self._write(t, observation, reward, terminated, truncated, info)
        done = np.logical_or(terminated, truncated)
        if np.count_nonzero(done):
            self._end(t, np.flatnonzero(done).tolist(), info)

    def _record(self, t: int, info: Any) -> None:
        self.infos.record_ends(t, info, np.logical_or(self._terminated[t], self._truncated[t]))

    def _end(self, t: int, rows: Sequence[int], info: Mapping[str, Any]) -> None:
        """What these rows had come to goes below "next"; they show what their next episode begins with."""
        finals = finals_of(info)
        after = self.codec.rows({leaf.key: self._arrays["next", *leaf.key] for leaf in self.leaves})
        for row in rows:
            lane = self.failed_lane = int(self.row_lanes[t + 1, row])
            after[row, t] = self.final_of(finals, row, info)
            self.ends.append((t, lane))
            self.starts.append((t, row))
        self.failed_lane = None
        if self.infos.leaves:
            self.infos.episodes_ended(len(rows))

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time that is waited for lanes measured, and their answer held against the spaces."""
        self._recv = self._timed_recv
        try:
            self.step(t, actions)
        finally:
            self._recv = self.env.recv

    def _timed_recv(self, group: int) -> Any:
        start = time.perf_counter()
        result = self.env.recv(group)
        self.env_seconds += time.perf_counter() - start
        self.check_answer(result)
        return result

    def settle(self, made: int) -> None:
        """All is up to date after every step."""

    def finish(self, made: int) -> None:
        """There were `made` steps: keeps what the rows show now, lets the memory go."""
        self._fresh_now = [row for t, row in self.starts if t == made - 1]
        self._let_go(made)

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in every lane; what was under way is dropped.

        Raises:
            OptionError: not all lanes were asked for.
        """
        if len(lanes) != self.num_lanes:
            raise OptionError(str(self.refuses_lane_resets))
        given = {} if seeds is None else {"seed": in_lane_order(lanes, seeds)}
        self.take_current(*self._begun(self.env.reset(**given, **(kwargs or {}))))
        self._fresh_now = list(range(self.rows_at_once()))


def _rows_of(value: Any, lanes: Array) -> Any:
    """What belongs to these lanes, of observations or infos of all."""
    if isinstance(value, Mapping):
        return {name: _rows_of(part, lanes) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows_of(part, lanes) for part in value)
    return value[lanes] if isinstance(value, np.ndarray) else value
