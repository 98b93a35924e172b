"""How a buffer is divided into rings, and where frames go that were there before."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcollect.failures import warn
from rlcollect.memory.replay.cursors import Moment
from rlcollect.memory.replay.rows import Table
from rlcollect.memory.replay.table import DONE

__all__ = ["Deal", "newest", "pieces_of", "ring_size"]

Array = np.ndarray[Any, Any]


def pieces_of(moment: Moment, table: Table) -> tuple[Array, Array, Array]:
    """Frames of one trajectory that stand side by side, of all that stand, ring after ring.

    Returns:
        The number of the first of each among all, and how many there are: int64 `[P]` each; and bool `[P]`, whether
        its trajectory ends with it, as far as frames tell.
    """
    rings, numbers = moment.all()
    rows = moment.rows(rings, numbers)
    cut = (table.positions[rows[1:]] == 0) | (rings[1:] != rings[:-1])
    edges = np.concatenate(([0], np.flatnonzero(cut) + 1, [len(rings)]))
    last = edges[1:] - 1
    whole = table.flags(DONE, rows[last]) if DONE in table else np.zeros(len(last), bool)
    return edges[:-1], np.diff(edges), whole


class Deal:
    """How frames that stand are dealt out to other rings: whole trajectories first, each piece where most room is.

    Attributes:
        rows, places: int64 `[F]`, where each frame is, and goes to.
        positions: int64 `[F]`, of each in its piece.
        counts: int64 `[R]`, of each ring.
        lost: frames that find no room.

    Args:
        moment: those that stand.
        table: where they are.
        rings: R.
        lanes: how many of them get frames, the first ones.
        size: rows of each.
    """

    def __init__(self, moment: Moment, table: Table, *, rings: int, lanes: int, size: int) -> None:
        firsts, lengths, whole = pieces_of(moment, table)
        order = np.lexsort((-lengths, ~whole))
        room = [(-size, ring) for ring in range(lanes)]  # a heap: the one with most room first
        dealt: list[list[tuple[int, int]]] = [[] for _ in range(rings)]
        split = []
        for first, length in zip(firsts[order].tolist(), lengths[order].tolist(), strict=True):
            if length <= -room[0][0]:
                left, ring = room[0]
                heapq.heapreplace(room, (left + length, ring))
                dealt[ring].append((first, length))
            else:
                split.append((first, length))
        self.lost = 0
        for first, length in split:  # those that fit nowhere as a whole: the newest part first
            while length and room[0][0]:
                left, ring = room[0]
                kept = min(length, -left)
                heapq.heapreplace(room, (left + kept, ring))
                length -= kept
                dealt[ring].append((first + length, kept))
            self.lost += length
        index, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self.counts = np.zeros(rings, np.int64)
        positions = [np.zeros(0, np.int64)]
        for ring, pieces in enumerate(dealt):
            parts = [np.arange(first, first + count) for first, count in sorted(pieces)]  # the older come first
            self.counts[ring] = count = sum(map(len, parts))
            index += parts
            positions += [part - part[0] for part in parts]
            places.append(ring * size + np.arange(count))
        self.rows: Array = moment.rows(*moment.located(np.concatenate(index)))
        self.places: Array = np.concatenate(places)
        self.positions: Array = np.concatenate(positions)


def newest(counts: Sequence[int], left_out: Sequence[int], size: int) -> tuple[Array, Array, Array]:
    """Which frames there is room for, of some that stand ring after ring: the newest of each.

    Args:
        counts: how many there are of each ring.
        left_out: how many of the oldest of each do not count.
        size: rows of a ring, where they go.

    Returns:
        How many of each ring find room, int64 `[R]`; which they are, and in which rows, int64 `[F]` each.
    """
    kept = np.minimum(np.array(counts, np.int64) - np.array(left_out, np.int64), size)
    ends = np.cumsum(counts)
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, kept, strict=True)])
    places = np.concatenate([ring * size + np.arange(count) for ring, count in enumerate(kept)])
    return kept, rows, places


def ring_size(capacity: int, rings: int) -> int:
    """Rows of each of so many rings; one warning where some are left over."""
    size, left = divmod(capacity, rings)
    if left:
        warn(f"A capacity of {capacity} frames is no multiple of {rings} lanes: each keeps {size} of them.")
    return size
