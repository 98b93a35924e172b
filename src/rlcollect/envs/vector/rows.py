"""Vector environments whose steps are not all frames: what they write to a scratch memory, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcollect.envs.opening import Opening
from rlcollect.envs.spaces import Rows, rows_in_time
from rlcollect.envs.vector.batched import Batched
from rlcollect.errors import OptionError
from rlcollect.layout import Arrays

__all__ = ["ScratchRows"]

Array = np.ndarray[Any, Any]
FEW = 8  # rows that are quicker one by one than by a list of their numbers


class ScratchRows(Batched):
    """What `ScratchDriver`s have in common.

    Args:
        opening: with one environment.
        first: what its first reset gave; None: it is still to come.
    """

    def __init__(self, opening: Opening, first: tuple[Any, dict[str, Any]] | None = None) -> None:
        super().__init__(opening, first)
        rows = self.rows_at_once()
        self.num_rows = rows
        self.row_lanes = np.zeros((0, rows), np.int64)
        self.is_frame = np.zeros((0, rows), bool)
        self.starts: list[tuple[int, int]] = []
        self.cuts: list[tuple[int, int]] = []
        self.fresh = list(range(rows))
        self._arrays = Arrays({}, remember=False)
        self._rows: list[Rows] = []
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0))

    def _take(self, arrays: Arrays) -> None:
        """Takes the scratch memory, and writes the current rows into its first."""
        self.ends, self.starts, self.cuts, self.failed_lane = [], [], [], None
        self._arrays = arrays
        for leaf in self.leaves:
            arrays[leaf.key][:, 0] = self.current[leaf.key]
        self._rewards, self._terminated, self._truncated = (
            arrays["next", name][..., 0].swapaxes(0, 1) for name in ("reward", "terminated", "truncated")
        )
        self.infos.bind(arrays)

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these: of a scratch memory all, from the first."""
        arrays = {leaf.key: self._arrays[leaf.key][:, start + 1 : stop + 1] for leaf in self.leaves}
        self._rows = self._arrays.once(("rows", start, stop), lambda: rows_in_time(self.codec, arrays))

    def _write(self, t: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Writes what came of step t."""
        seen = self.seen(observation, info)
        self.look(seen, reward, terminated, truncated)
        self._rewards[t] = reward
        self._terminated[t] = terminated
        self._truncated[t] = truncated
        self._rows[t][...] = seen
        if self.infos.leaves:
            self._record(t, info)

    def _record(self, t: int, info: Any) -> None:
        self.infos.record(t, info)

    def _hide_finals(self, t: int, rows: Array) -> None:
        """What lanes had come to with step t goes below "next", and the rows show what was shown there before.

        Nothing is done from such a row, and a policy need not be able to: a mask may allow no action in a final state.
        """
        few = rows.tolist() if len(rows) <= FEW else None
        for leaf in self.leaves:
            now, after = self._arrays[leaf.key], self._arrays["next", *leaf.key]
            if few is None:
                after[rows, t] = now[rows, t + 1]
                now[rows, t + 1] = now[rows, t]
            else:
                for row in few:
                    after[row, t] = now[row, t + 1]
                    now[row, t + 1] = now[row, t]

    def truncate(self, t: int, lanes: Sequence[int]) -> None:  # noqa: ARG002
        """Refused: lanes go on by themselves."""
        raise OptionError(str(self.refuses_lane_resets))

    def _let_go(self, made: int) -> None:
        """There were `made` steps: keeps what the rows show now, lets the memory go."""
        for leaf in self.leaves:
            self.current[leaf.key][...] = self._arrays[leaf.key][:, made]
        self._arrays, self._rows = Arrays({}, remember=False), []
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0))
        self.infos.release()
