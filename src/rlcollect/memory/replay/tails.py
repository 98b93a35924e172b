"""Where trajectories begin among frames that follow each other: the position of each frame in its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcollect.errors import InvalidBatchError
from rlcollect.layout import show_key
from rlcollect.memory.replay.rows import Parts
from rlcollect.memory.replay.table import DONE, IDS

__all__ = ["Marks", "Tails"]

Array = np.ndarray[Any, Any]
NOTHING = -1  # no number of frames is that


class Marks:
    """What frames say of their trajectories.

    Attributes:
        ids: int64 `[lanes, T]`; None: they do not say.
        done: bool `[lanes, T]`, whether the episode ended with it; likewise.

    Args:
        parts: `[lanes, T, *shape]` by key.

    Raises:
        InvalidBatchError: there are several values a frame.
    """

    def __init__(self, parts: Parts) -> None:
        self.ids = _per_frame(parts, IDS)
        done = _per_frame(parts, DONE)
        self.done = None if done is None else done.astype(bool, copy=False)

    def begins(self) -> Array | None:
        """Bool `[lanes, T - 1]`, whether another trajectory begins after each frame; None: they do not say."""
        if self.ids is None:
            return None if self.done is None else self.done[:, :-1]
        begins: Array = self.ids[:, 1:] != self.ids[:, :-1]
        if self.done is not None:
            begins |= self.done[:, :-1]
        return begins


def _per_frame(parts: Parts, key: tuple[str, ...]) -> Array | None:
    values = parts.get(key)
    if values is None:
        return None
    if values.ndim == 2:
        return values  # type: ignore[no-any-return]
    if values[:1, :1].size != 1 and values.size:
        raise InvalidBatchError(f"expected one value a frame under {show_key(key)}, but there are {values.shape[2:]}")
    return values.reshape(values.shape[:2])  # type: ignore[no-any-return]


class Tails:
    """The last frame of each ring that was written here: what comes may go on with its trajectory.

    Args:
        rings: how many there are.
    """

    def __init__(self, rings: int) -> None:
        self._end = np.full(rings, NOTHING)  # frames of the ring, the last one included
        self._ids = np.zeros(rings, np.int64)
        self._next = np.zeros(rings, np.int64)  # the position after it; 0: its trajectory ended

    def cut(self, rings: slice) -> None:
        """What comes next is another trajectory, whatever it says."""
        self._end[rings] = NOTHING

    def ring_of(self, rings: Array, ends: Array) -> dict[int, int]:
        """Trajectories that go on, where their frames say which they are: the place of their ring in `rings` by id."""
        go_on = (self._end[rings] == ends) & (self._next[rings] > 0)
        return dict(zip(self._ids[rings][go_on].tolist(), np.flatnonzero(go_on).tolist(), strict=True))

    def add(self, rings: Array, ends: Array, counts: Array, ids: Array | None, done: Array | None) -> Array:
        """Frames that are written: their positions, int64 `[F]`, ring after ring.

        Args:
            rings: int64 `[R]`, to which.
            ends: int64 `[R]`, frames of each that are there before.
            counts: int64 `[R]`, one at least to each.
            ids: int64 `[F]`, ring after ring; None: they do not say.
            done: bool `[F]`; likewise.
        """
        stops = np.cumsum(counts)
        starts, total = stops - counts, int(stops[-1])
        carried = np.where(self._end[rings] == ends, self._next[rings], 0)
        if ids is not None:
            carried[self._ids[rings] != ids[starts]] = 0
        positions = carried if total == len(carried) else _positions(starts, total, carried, ids, done)
        last = stops - 1
        after = positions[last] + 1
        if done is not None:
            after[done[last]] = 0
        self._end[rings], self._next[rings] = ends + counts, after
        if ids is not None:
            self._ids[rings] = ids[last]
        return positions


def _positions(starts: Array, total: int, carried: Array, ids: Array | None, done: Array | None) -> Array:
    """Of frames ring after ring, those of each from `starts` on, the first of which have the positions `carried`."""
    begins = np.zeros(total, bool)
    if ids is not None:
        np.not_equal(ids[1:], ids[:-1], out=begins[1:])
    if done is not None:
        begins[1:] |= done[:-1]
    begins[starts] = True
    firsts = np.flatnonzero(begins)
    lengths = np.empty_like(firsts)
    lengths[:-1] = firsts[1:] - firsts[:-1]
    lengths[-1] = total - firsts[-1]
    shift = firsts.copy()
    shift[np.searchsorted(firsts, starts)] -= carried
    positions: Array = np.arange(total) - np.repeat(shift, lengths)
    return positions
