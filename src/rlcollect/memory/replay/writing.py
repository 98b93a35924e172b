"""Who writes to rings: frames of so many lanes, each to a ring of its own, in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlcollect.layout import Key
from rlcollect.memory.replay.cursors import Cursors
from rlcollect.memory.replay.rows import Parts, Table, parts_of
from rlcollect.memory.replay.table import MASK, Columns
from rlcollect.memory.replay.tails import Marks, Tails

__all__ = ["Pieces", "Writer"]

Array = np.ndarray[Any, Any]
AT_A_TIME = 4  # parts of a ring, of which one is written at a time: the others can be read


@dataclass(frozen=True)
class Pieces:
    """Frames to be written.

    Attributes:
        columns: `[lanes, T, *shape]` by key.
        valid: bool `[lanes, T]`, which rows are frames; None: all are.
    """

    columns: dict[Key, torch.Tensor]
    valid: Array | None

    @classmethod
    def of(cls, columns: dict[Key, torch.Tensor]) -> Pieces:
        """Frames, but for rows that they say are none."""
        if MASK not in columns:
            return cls(columns, None)
        mask = columns[MASK]
        valid = mask.numpy(force=True).reshape(mask.shape[:2]).astype(bool, copy=False)
        return cls(columns, None if valid.all() else valid)

    def of_lanes(self, lanes: slice) -> Pieces:
        """Those of some lanes."""
        columns = {key: column[lanes] for key, column in self.columns.items()}
        return Pieces(columns, None if self.valid is None else self.valid[lanes])

    def trajectories(self, marks: Marks) -> Iterator[tuple[int, int, int]]:
        """Frames of one trajectory side by side: lane, from, and before."""
        first = next(iter(self.columns.values()))
        lanes, steps = first.shape[:2]
        begins = marks.begins()
        for lane in range(lanes):
            for start, stop in [(0, steps)] if self.valid is None else _runs(self.valid[lane]):
                inside = [] if begins is None else (np.flatnonzero(begins[lane, start : stop - 1]) + start + 1).tolist()
                for begin, end in pairwise([start, *inside, stop]):
                    yield lane, begin, end


class Writer:
    """Writes frames of some lanes to as many rings, which nobody else writes to. It goes on where they are.

    Attributes:
        lanes: how many.

    Args:
        cursors: of all rings.
        table: where frames lie.
        first: the ring of the first lane.
        lanes: how many.
        tails: of all rings, of who writes to them in this process; None: nobody else does.
    """

    def __init__(self, cursors: Cursors, table: Table, first: int, lanes: int, tails: Tails | None = None) -> None:
        self.lanes = lanes
        self._cursors = cursors
        self._table = table
        self._first = first
        self._size = cursors.size
        self._most = max(1, self._size // AT_A_TIME)
        self._rings = np.arange(first, first + lanes)
        self._targets = table.rings(cursors.rings, self._size, first, lanes)
        self._tails = Tails(cursors.rings) if tails is None else tails
        self._at = cursors.committed[first : first + lanes]  # the number of each lane's next frame

    @property
    def written(self) -> int:
        """Frames that were ever written to its rings."""
        return int(self._at.sum())

    def write(self, columns: Columns, steps: int, valid: Array | None = None, *, start: int = 0) -> None:
        """Writes frames, and commits them.

        Args:
            columns: `[lanes, T, *shape]` by key.
            steps: the time before which they end.
            valid: bool `[lanes, T]`, which rows are frames; None: all are.
            start: the time with which they begin.
        """
        parts = parts_of(columns)
        marks = Marks(parts)
        for begin in range(start, steps, self._most):
            times = slice(begin, min(begin + self._most, steps))
            if valid is None and (self._at == self._at[0]).all():
                self._write_even(parts, marks, times)
                continue
            chosen = np.ones((self.lanes, times.stop - begin), bool) if valid is None else valid[:, times]
            lanes, offsets = np.nonzero(chosen)
            self._write_rows(parts, marks, lanes, offsets + begin, lanes)

    def _write_even(self, parts: Parts, marks: Marks, times: slice) -> None:
        """Frames of all lanes, which are equally far."""
        size, at, count = self._size, int(self._at[0]), times.stop - times.start
        rings = slice(self._first, self._first + self.lanes)
        if at + count > size:
            self._cursors.retire(rings, at + count - size)
        ids, done = (None if each is None else each[:, times].reshape(-1) for each in (marks.ids, marks.done))
        positions = self._tails.add(self._rings, self._at, np.full(self.lanes, count), ids, done)
        row = at % size
        fits = min(count, size - row)
        positions = positions.reshape(self.lanes, count)
        self._targets.put(parts, positions[:, :fits], slice(times.start, times.start + fits), row)
        if fits < count:
            self._targets.put(parts, positions[:, fits:], slice(times.start + fits, times.stop), 0)
        self._cursors.commit(rings, at + count)

    def _write_rows(self, parts: Parts, marks: Marks, lanes: Array, times: Array, to: Array) -> None:
        """Any frames, fewer than a ring has room for to each.

        Args:
            parts: `[lanes, T, *shape]` by key.
            marks: of them.
            lanes: int64 `[F]`, which they are, ring after ring.
            times: likewise.
            to: int64 `[F]`, the place of its ring among ours, ascending.
        """
        counts = np.bincount(to, minlength=self.lanes)
        places = np.flatnonzero(counts)
        if not len(places):
            return
        counts, rings, ends = counts[places], self._rings[places], self._at[places]
        if (ends + counts > self._size).any():
            self._cursors.retire(rings, ends + counts - self._size)
        ids, done = (None if each is None else each[lanes, times] for each in (marks.ids, marks.done))
        positions = self._tails.add(rings, ends, counts, ids, done)
        numbers = np.arange(len(to)) + np.repeat(ends - np.cumsum(counts) + counts, counts)
        rows = np.repeat(rings, counts) * self._size + numbers % self._size
        self._table.scatter(parts, (lanes, times), positions, rows)
        self._cursors.commit(rings, ends + counts)

    def deal(self, pieces: Pieces, places: Sequence[int]) -> None:
        """Writes trajectories, each to the ring to which the least was written, or that it goes on in.

        Args:
            pieces: the frames.
            places: the rings that may be written to, among ours.
        """
        parts = parts_of(pieces.columns)
        marks = Marks(parts)
        heap = [(int(self._at[place]), place) for place in places]
        heapq.heapify(heap)
        rings = self._rings[list(places)]
        known = self._tails.ring_of(rings, self._at[list(places)]) if marks.ids is not None else {}
        waiting: list[tuple[int, int, int, int]] = []  # place of the ring, lane, from, before
        load: dict[int, int] = {}
        for lane, start, stop in pieces.trajectories(marks):
            goes_on = None if marks.ids is None else known.pop(int(marks.ids[lane, start]), None)
            place = heap[0][1] if goes_on is None else places[goes_on]
            for begin in range(start, stop, self._most):
                end = min(begin + self._most, stop)
                if load.get(place, 0) + end - begin > self._most:
                    self._write_pieces(parts, marks, waiting)
                    waiting, load = [], {}
                waiting.append((place, lane, begin, end))
                load[place] = load.get(place, 0) + end - begin
            if goes_on is None:  # what went on elsewhere is not counted: rings are only about equally full
                heapq.heapreplace(heap, (heap[0][0] + stop - start, place))
        self._write_pieces(parts, marks, waiting)

    def _write_pieces(self, parts: Parts, marks: Marks, pieces: list[tuple[int, int, int, int]]) -> None:
        if not pieces:
            return
        to, lanes, begins, ends = np.array(sorted(pieces, key=lambda piece: piece[0])).T
        lengths = ends - begins
        starts = np.repeat(begins - np.cumsum(lengths) + lengths, lengths)
        times = np.arange(int(lengths.sum())) + starts
        self._write_rows(parts, marks, np.repeat(lanes, lengths), times, np.repeat(to, lengths))


def _runs(valid: Array) -> list[tuple[int, int]]:
    """Where it is true: from, and before."""
    edges = np.flatnonzero(np.diff(valid.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
