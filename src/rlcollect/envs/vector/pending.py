"""Vector environments in mode NEXT_STEP whose lanes cannot be reset one by one.

The step after an episode's end ignores the action and returns the first observation of the next episode: that row is no
frame, whatever reward and flags stand in it. Which lanes are in this state is kept here, not read off their answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rlcollect.envs.opening import Opening
from rlcollect.envs.vector.batched import in_lane_order
from rlcollect.envs.vector.modes import base_of, refuse_finals, resets_twice
from rlcollect.envs.vector.rows import ScratchRows
from rlcollect.errors import EnvError, OptionError
from rlcollect.interfaces import RolloutMemory

__all__ = ["PendingResets"]

Array = np.ndarray[Any, Any]
CALMING = 20  # steps


class PendingResets(ScratchRows):
    """The `ScratchDriver` of these environments: a row for each lane, all of which are always asked.

    Args:
        opening: with one environment.
        mode: NEXT_STEP.
        first: what its first reset gave; None: it is still to come.
    """

    def __init__(self, opening: Opening, mode: AutoresetMode, first: tuple[Any, dict[str, Any]] | None = None) -> None:
        super().__init__(opening, first)
        name = type(base_of(self.env)).__name__
        self.refuses_lane_resets: str | None = (
            f'{name} in mode {mode.value} is not known to reset single lanes (options={{"reset_mask": mask}}), and '
            "goes on by itself. If it does, say so: masked_reset=True. Or use the mode DISABLED, or what makes one of "
            "its environments, with num_envs=."
        )
        if opening.what.reset_options is not None:
            raise OptionError(f"reset_options: {self.refuses_lane_resets}")
        self._is_fresh = np.ones(self.num_lanes, bool)
        self._done = np.zeros((1, self.num_lanes), bool)  # by row; the next row is then no frame
        self._settled = 0
        self._newest = 0  # row
        self._step = self.ask_quickly
        if resets_twice(self.env) and not opening.owned:
            self._calm()
            self.reset_all(None, None)

    def _calm(self) -> None:
        """Steps an environment until no lane has a reset due: one that is reset before would be reset twice.

        Which have one due may not be known. Lanes that do not come to rest keep theirs.
        """
        actions = copy.deepcopy(self.env.action_space)
        actions.seed(0)
        for _ in range(CALMING):
            _, _, terminated, truncated, _ = self.undisturbed(lambda: self.env.step(actions.sample()))
            self._done[0] = np.logical_or(terminated, truncated)
            if not self._done[0].any():
                return

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the scratch memory, and writes the current observations into its first row."""
        arrays = memory.arrays
        steps = arrays["next", "reward"].shape[1]
        if len(self.is_frame) != steps:
            self.row_lanes = np.broadcast_to(np.arange(self.num_lanes), (steps, self.num_lanes))
            self.is_frame = np.ones((steps, self.num_lanes), bool)
            self._done = np.concatenate((self._done[:1], np.zeros((steps - 1, self.num_lanes), bool)))
        self._settled = self._newest = 0
        self.fresh = np.flatnonzero(self._is_fresh).tolist()
        self._take(arrays)

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane."""
        observation, reward, terminated, truncated, info = self._step(self.batch(actions))
        self._write(t, observation, reward, terminated, truncated, info)
        done = self._done[t + 1]
        np.logical_or(terminated, truncated, out=done)
        self._newest = t + 1
        if np.count_nonzero(done):
            self._hide_finals(t, np.flatnonzero(done))
        if info:
            refuse_finals(info, AutoresetMode.NEXT_STEP)

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environment measured and its answer held against the spaces."""
        self._step = self.timed_step
        try:
            self.step(t, actions)
        finally:
            self._step = self.ask_quickly

    def settle(self, made: int) -> None:
        """Brings `is_frame`, `ends` and `starts` up to what `made` steps have given.

        Raises:
            EnvError: an episode is over as it begins.
        """
        first, self._settled = self._settled, made
        before, done = self._done[first:made], self._done[first + 1 : made + 1]
        np.logical_not(before, out=self.is_frame[first + 1 : made + 1])
        self.starts += [(first + t, lane) for t, lane in np.argwhere(before).tolist()]
        ends = np.argwhere(done).tolist()
        self.ends += [(first + t, lane) for t, lane in ends]
        if self.infos.leaves:
            self.infos.episodes_ended(len(ends))
        if (both := np.argwhere(before & done)).size:
            self.failed_lane = int(both[0, 1])
            raise EnvError(
                "An episode ended in the step after another's end, which in mode NEXT_STEP only resets: does this "
                'environment reset in another way than its metadata["autoreset_mode"] says?'
            )

    def finish(self, made: int) -> None:
        """There were `made` steps: keeps what the lanes show now, lets the memory go."""
        self.settle(made)
        self._let_go(made)
        self._is_fresh = ~self.is_frame[made]
        self._done[0], self._newest = self._done[made], 0

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in every lane; `current` holds their first observations.

        Raises:
            OptionError: not all lanes were asked for.
        """
        if len(lanes) != self.num_lanes:
            raise OptionError(str(self.refuses_lane_resets))
        ordered = in_lane_order(lanes, seeds)
        due, self._newest = self._done[self._newest].any(), 0
        self._done[0] = False
        if due and resets_twice(self.env):
            self._calm()
        self.reset_all(ordered, kwargs)
        self._is_fresh = np.ones(self.num_lanes, bool)
