"""Who belongs to which episode: ids, step counts and returns of a rollout, worked out after it, all at once.

The step loop only notes where episodes ended. Frames are handed over by lane, then by time, as many of each lane as
there are. Ids are `(worker prefix << 40) | counter`, sparse, in the order in which episodes began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Episodes"]

Array = np.ndarray[Any, Any]
COUNTER_BITS = 40
REMEMBERED = 100  # finished episodes whose returns and lengths are kept for statistics


class Episodes:
    """The episodes of N lanes.

    Attributes:
        ages: int64 `[N]`, frames that the open episode of each lane has so far.
        numbers: int64 `[N]`, how many episodes each lane had before the open one.
        finished: how many episodes have ended.
        returns, lengths: of the last hundred of these.

    Args:
        num_lanes: N.
        prefix: the worker's number, unique among all workers there ever are.
    """

    def __init__(self, num_lanes: int, prefix: int = 0) -> None:
        self.ages = np.zeros(num_lanes, np.int64)
        self.finished = 0
        self.returns: deque[float] = deque(maxlen=REMEMBERED)
        self.lengths: deque[int] = deque(maxlen=REMEMBERED)
        self.numbers = np.full(num_lanes, -1, np.int64)
        self._ids = np.zeros(num_lanes, np.int64)
        self._next_id = prefix << COUNTER_BITS
        self._sums = np.zeros(num_lanes, np.float64)  # rewards of the open episodes
        self.cut(range(num_lanes))

    def cut(self, lanes: Sequence[int]) -> None:
        """These lanes begin a new episode, though the one before did not end."""
        where = np.asarray(lanes, np.int64)
        self._ids[where] = self._new_ids(len(where))
        self.numbers[where] += 1
        self.ages[where] = 0
        self._sums[where] = 0.0

    def skip(self, count: int) -> None:
        """The first so many ids are somebody else's; no frame has one yet."""
        self._ids += count
        self._next_id += count

    def _new_ids(self, count: int) -> Array:
        first = self._next_id
        self._next_id += count
        return np.arange(first, self._next_id)

    def numbered(self, lanes: Array, over: Array) -> Array:
        """The number of each frame's episode in its lane: int64 `[F]`; asked before `go_on` takes the frames.

        Args:
            lanes: as there.
            over: bool `[F]`, whether another episode began after a frame.
        """
        before = np.cumsum(over) - over
        heads = np.flatnonzero(np.diff(lanes, prepend=-1))
        per_lane = np.diff(heads, append=len(lanes))
        numbers: Array = self.numbers[lanes] + before - np.repeat(before[heads], per_lane)
        return numbers

    def go_on(
        self, lanes: Array, times: Array, ended: Array, rewards: Array, cut: Array | None = None
    ) -> tuple[Array, Array]:
        """Takes the frames that were made since.

        Args:
            lanes: int64 `[F]`, the lane of each frame; by lane, then in the order of time.
            times: int64 `[F]`, when each was made.
            ended: bool `[F]`, whether it was the last of its episode.
            rewards: `[F]`.
            cut: bool `[F]`, whether another began after it, though this one did not end. None: nowhere.

        Returns:
            The id of each frame's episode, and how many frames that had before it: int64 `[F]` each.
        """
        count = len(lanes)
        if not count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        heads = np.flatnonzero(np.diff(lanes, prepend=-1))  # where the frames of a lane begin
        here, last = lanes[heads], np.append(heads[1:], count) - 1
        true_ends, ended = ended, ended if cut is None else ended | cut
        ends = np.flatnonzero(ended)
        in_time = times[ends].argsort(kind="stable")
        ids_made = np.full(len(ends) + 1, -1)  # at each end that of the next episode; the last one is never used
        ids_made[in_time] = self._new_ids(len(ends))
        # a piece is what lies between two of these: of one lane and one episode
        firsts = np.union1d(heads, ends[ends + 1 < count] + 1)
        at_head = firsts.searchsorted(heads)
        piece_ids, born = ids_made[ends.searchsorted(firsts - 1)], firsts.copy()
        piece_ids[at_head] = self._ids[here]
        born[at_head] -= self.ages[here]
        lengths = np.diff(firsts, append=count)
        ids, counts = np.repeat(piece_ids, lengths), np.arange(count) - np.repeat(born, lengths)
        over = ended[last]
        last_in_time = ends[in_time]
        last_in_time = last_in_time[true_ends[last_in_time]]
        self._remember(rewards, firsts, at_head, here, last_in_time, over)
        self.lengths.extend((counts[last_in_time] + 1).tolist())
        self._ids[here] = np.where(over, ids_made[ends.searchsorted(last)], ids[last])
        self.ages[here] = np.where(over, 0, counts[last] + 1)
        self.numbers[here] += np.add.reduceat(ended.astype(np.int64), heads)
        return ids, counts

    def _remember(self, rewards: Array, firsts: Array, at_head: Array, here: Array, ends: Array, over: Array) -> None:
        """Returns of the episodes that ended; sums of those that go on."""
        with np.errstate(invalid="ignore"):  # an environment may give inf, and -inf
            sums = np.add.reduceat(rewards, firsts, dtype=np.float64)
            sums[at_head] += self._sums[here]
        self.returns.extend(sums[firsts.searchsorted(ends, side="right") - 1].tolist())
        self.finished += len(ends)
        self._sums[here] = np.where(over, 0.0, sums[np.append(at_head[1:], len(firsts)) - 1])

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the open episodes."""
        return {
            "open": {
                "ids": self._ids.tolist(),
                "ages": self.ages.tolist(),
                "sums": self._sums.tolist(),
                "numbers": self.numbers.tolist(),
            },
            "next_id": self._next_id,
            "finished": self.finished,
            "returns": [*self.returns],
            "lengths": [*self.lengths],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; lanes whose open episodes do not are to be `cut`."""
        for name, own in (("ids", self._ids), ("ages", self.ages), ("sums", self._sums), ("numbers", self.numbers)):
            own[:] = state["open"][name]
        self._next_id = state["next_id"]
        self.finished = state["finished"]
        self.returns = deque(state["returns"], maxlen=REMEMBERED)
        self.lengths = deque(state["lengths"], maxlen=REMEMBERED)
