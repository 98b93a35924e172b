"""Who belongs to which episode: ids, step counts and returns of a rollout, worked out after it, all at once.

The step loop only notes where episodes ended. Ids are `(worker prefix << 40) | counter`, sparse, in the order in
which episodes began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rlcollect.layout import Key

__all__ = ["Episodes"]

Array = np.ndarray[Any, Any]
COUNTER_BITS = 40
REMEMBERED = 100  # finished episodes whose returns and lengths are kept for statistics


class Episodes:
    """The episodes of N lanes.

    Attributes:
        ages: int64 `[N]`, frames that the open episode of each lane has so far.
        finished: how many episodes have ended.
        returns, lengths: of the last hundred of these.

    Args:
        num_lanes: N.
        prefix: the worker's number, unique among all workers there ever are.
        record: which of "traj_ids", "step_count", "is_init" are written. (A key of that name may be the user's own.)
    """

    def __init__(self, num_lanes: int, prefix: int = 0, record: Collection[str] = ()) -> None:
        self._record = frozenset(record)
        self.ages = np.zeros(num_lanes, np.int64)
        self.finished = 0
        self.returns: deque[float] = deque(maxlen=REMEMBERED)
        self.lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._ids = np.zeros(num_lanes, np.int64)
        self._next_id = prefix << COUNTER_BITS
        self._sums = np.zeros(num_lanes, np.float64)  # rewards of the open episodes
        self.cut(range(num_lanes))

    def cut(self, lanes: Sequence[int]) -> None:
        """These lanes begin a new episode, though the one before did not end."""
        where = np.asarray(lanes, np.int64)
        self._ids[where] = self._new_ids(len(where))
        self.ages[where] = 0
        self._sums[where] = 0.0

    def _new_ids(self, count: int) -> Array:
        first = self._next_id
        self._next_id += count
        return np.arange(first, self._next_id)

    def fill(self, arrays: Mapping[Key, Array], made: int, ends: Sequence[tuple[int, int]]) -> None:
        """Writes what is asked for of ids, step counts and first-frame marks, and goes on to the next rollout.

        Args:
            arrays: the memory `[N, T, ...]`.
            made: how many of the T steps were made.
            ends: (t, lane) of every episode that ended, in order of time.
        """
        times, lanes = _columns(ends)
        self._remember(arrays["next", "reward"][:, :made, 0], times, lanes)
        ids = self._forward(self._ids, times, lanes, self._new_ids(len(times)), made)
        if "traj_ids" in self._record:
            arrays["collector", "traj_ids"][:, :made] = ids[:, :-1]
        self._ids = ids[:, -1].copy()
        if self._record & {"step_count", "is_init"}:
            self._fill_counts(arrays, made, times, lanes)
        self.ages += made
        self.ages[lanes] = made - 1 - times  # the latest of each lane is assigned last

    def _fill_counts(self, arrays: Mapping[Key, Array], made: int, times: Array, lanes: Array) -> None:
        first = self._forward(-self.ages, times, lanes, times + 1, made)  # when the episode of each frame began
        counts = np.arange(made + 1) - first
        if "step_count" in self._record:
            arrays["step_count",][:, :made, 0] = counts[:, :-1]
            arrays["next", "step_count"][:, :made, 0] = counts[:, :-1] + 1
        if "is_init" in self._record:
            arrays["is_init",][:, :made, 0] = counts[:, :-1] == 0

    @staticmethod
    def _forward(initial: Array, times: Array, lanes: Array, values: Array, made: int) -> Array:
        """int64 `[N, made + 1]`: the newest value at each time. Values of a lane only grow."""
        marks = np.full((len(initial), made + 1), np.iinfo(np.int64).min)
        marks[:, 0] = initial
        marks[lanes, times + 1] = values
        return np.maximum.accumulate(marks, axis=1, out=marks)

    def _remember(self, rewards: Array, times: Array, lanes: Array) -> None:
        """Returns and lengths of the episodes that ended; sums of those that go on."""
        num_lanes, made = rewards.shape
        heads, ends = np.arange(num_lanes) * made, lanes * made + times  # places in the rewards, lane after lane
        starts = np.concatenate((heads, ends[times < made - 1] + 1))  # a piece is what lies between two of these
        starts.sort()
        with np.errstate(invalid="ignore"):  # an environment may give inf, and -inf
            sums = np.add.reduceat(rewards.ravel(), starts, dtype=np.float64)
            sums[starts.searchsorted(heads)] += self._sums
        pieces = starts.searchsorted(ends, side="right") - 1
        self.returns.extend(sums[pieces].tolist())
        self.lengths.extend((ends - starts[pieces] + 1 + self.ages[lanes] * (starts[pieces] == heads[lanes])).tolist())
        self.finished += len(times)
        self._sums = sums[starts.searchsorted(heads + made - 1, side="right") - 1]
        self._sums[lanes[times == made - 1]] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What goes on after a load: counters. Open episodes do not: a load cuts them."""
        return {
            "next_id": self._next_id,
            "finished": self.finished,
            "returns": [*self.returns],
            "lengths": [*self.lengths],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ids go on after those of the state."""
        self._next_id = state["next_id"]
        self.finished = state["finished"]
        self.returns = deque(state["returns"], maxlen=REMEMBERED)
        self.lengths = deque(state["lengths"], maxlen=REMEMBERED)


def _columns(ends: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    pairs = np.asarray(ends, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
