"""Which frames of a buffer stand: words in memory that its writers and readers share, without a lock.

A buffer is divided into rings of equal size. A ring has one writer, which counts its frames: those from `retired` on
and before `committed` stand, the one of number p in row p modulo the size. It retires frames before it writes over
them, and commits those that it has written; so one that is killed loses what it had not committed, and nothing else.
Readers take frames that stand, and look afterwards whether they still do. Knows neither frames nor where they lie.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlcollect.errors import OptionError

__all__ = ["Cursors", "Moment"]

Array = np.ndarray[Any, Any]
MOST_RINGS = 65536
GLANCE = 2e-4  # seconds between two looks at a word that somebody else changes
PATIENCE = 10.0  # seconds that rings may take to be divided anew
HEAD = 8  # words before those of the rings
MOVED = -1  # a division that says: frames lie elsewhere by now
_DIVISION, _RINGS, _SIZE, _BEFORE, _HOLD = range(5)


@dataclass(frozen=True)
class Moment:
    """The frames that stand at a moment.

    Attributes:
        division: the number of the division into rings that this is of.
        size: rows of a ring.
        first, end: int64 `[R]`, of each ring the numbers of its oldest frame, and of the next that will come.
    """

    division: int
    size: int
    first: Array
    end: Array

    @cached_property
    def counts(self) -> Array:
        """int64 `[R]`, frames of each ring."""
        return self.end - self.first

    @cached_property
    def total(self) -> int:
        """Frames of all rings."""
        return int(self.counts.sum())

    @cached_property
    def _each(self) -> int:
        """Frames of each ring, where all have as many; else 0."""
        each = int(self.counts[0]) if len(self.counts) else 0
        return each if (self.counts == each).all() else 0

    @cached_property
    def _ends(self) -> Array:
        ends: Array = np.cumsum(self.counts)
        return ends

    @cached_property
    def _shift(self) -> Array:
        """From the number of a frame among all to that in its ring, by ring."""
        shift: Array = self.first - self._ends + self.counts
        return shift

    def located(self, numbers: Array) -> tuple[Array, Array]:
        """Of frames by their number among all, ring after ring: the ring, and the number there, `[...]` each."""
        rings = numbers // self._each if self._each else np.searchsorted(self._ends, numbers, side="right")
        return rings, numbers + self._shift[rings]

    def rows(self, rings: Array, numbers: Array) -> Array:
        """int64 `[...]`, where these frames lie."""
        rows: Array = rings * self.size + numbers % self.size
        return rows

    def all(self) -> tuple[Array, Array]:
        """Every frame that stands, ring after ring, in the order of time."""
        return self.located(np.arange(self.total))


class Cursors:
    """The words.

    Attributes:
        retired, committed: int64 `[most]`, by ring; a writer changes its own.

    Args:
        words: int64 `[words_of(most)]`, zero at first.
    """

    def __init__(self, words: Array) -> None:
        most = (len(words) - HEAD) // 2
        self._head = words[:HEAD].data  # an index into it costs a fourth of one into an array
        self.retired = words[HEAD : HEAD + most]
        self.committed = words[HEAD + most : HEAD + 2 * most]
        self._fence = threading.Lock()
        self._words = words
        self._seen: tuple[Any, Moment | None] = None, None

    @staticmethod
    def words_of(capacity: int) -> int:
        """How many words there are for a buffer of so many frames."""
        return HEAD + 2 * min(capacity, MOST_RINGS)

    def in_order(self) -> None:
        """What was written before is seen before what is written after, by a processor that would reorder it."""
        with self._fence:
            pass

    # --- rings ---

    @property
    def rings(self) -> int:
        """How many there are; 0: it is not divided yet."""
        return int(self._head[_RINGS])

    @property
    def size(self) -> int:
        """Rows of each."""
        return int(self._head[_SIZE])

    @property
    def division(self) -> int:
        """The number of the division into rings; odd while it is changed."""
        return int(self._head[_DIVISION])

    @property
    def is_moved(self) -> bool:
        """Whether frames lie elsewhere by now, and have other words."""
        return self.division == MOVED

    def move(self) -> None:
        """Who reads these words is told to look for others."""
        self._head[_DIVISION] = MOVED

    def begin_to_divide(self) -> None:
        """Nobody may read until `divide`, or `replace`."""
        self._head[_DIVISION] |= 1
        self.in_order()

    def replace(self, words: Array) -> None:
        """These stand in the place of what did, the number of the division last."""
        self.begin_to_divide()
        self._words[_DIVISION + 1 :] = words[_DIVISION + 1 :]
        self.in_order()
        self._head[_DIVISION] = words[_DIVISION]

    def recover(self) -> None:
        """What a process left that was killed: nothing is held, and where it was at dividing, nothing stands."""
        self._head[_HOLD] = 0
        if self.division % 2:
            self.divide(0, 0)

    def divide(self, rings: int, size: int, counts: Array | None = None, *, total: int | None = None) -> None:
        """From now on there are so many rings.

        Args:
            rings: R.
            size: rows of each.
            counts: int64 `[R]`, frames that stand in each, in its first rows; None: none do.
            total: frames that were ever written; None: as many as by now.
        """
        total = self.written if total is None else total
        self.begin_to_divide()
        self.retired[:] = self.committed[:] = 0
        if counts is not None:
            self.committed[:rings] = counts
        self._head[_RINGS], self._head[_SIZE] = rings, size
        self._head[_BEFORE] = total - int(self.committed.sum())
        self.in_order()
        self._head[_DIVISION] += 1

    def check_rings(self, rings: int, capacity: int) -> None:
        """Whether there can be so many.

        Raises:
            OptionError: there cannot.
        """
        if rings > min(capacity, MOST_RINGS):
            raise OptionError(
                f"The buffer is to be divided among {rings} lanes, and there is room for {min(capacity, MOST_RINGS)}: "
                f"its capacity is {capacity} frames."
            )

    @property
    def written(self) -> int:
        """Frames that were ever written."""
        return int(self._head[_BEFORE]) + int(self.committed[: self.rings].sum())

    @property
    def is_written_over(self) -> bool:
        """Whether no frame may stand only because others come in their place: else a part of a ring stands always."""
        return self.size == 1 and bool(self.retired[: self.rings].any())

    def written_at(self, moment: Moment) -> int:
        """Frames that were ever written, at that moment."""
        return int(self._head[_BEFORE]) + int(moment.end.sum())

    # --- reading ---

    def moment(self) -> Moment:
        """The frames that stand now; none, where these words are not those that count any more."""
        deadline = 0.0
        while True:
            division, rings, size = self.division, self.rings, self.size
            end = self.committed[:rings].tobytes()
            self.in_order()
            first = self.retired[:rings].tobytes()
            self.in_order()
            if division == MOVED:
                return Moment(MOVED, 0, np.zeros(0, np.int64), np.zeros(0, np.int64))
            if division % 2 == 0 and self.division == division:
                moment = self._moment(division, size, first, end)
                if moment.total or self.committed[:rings].tobytes() == end:
                    return moment
                continue  # all of it was written over since `end` was read
            deadline = deadline or time.monotonic() + PATIENCE
            if time.monotonic() >= deadline:
                raise OptionError(
                    "The buffer was to be divided anew, and that has not ended: its owner was killed meanwhile. Make a "
                    "new one."
                )
            time.sleep(GLANCE)

    def _moment(self, division: int, size: int, first: bytes, end: bytes) -> Moment:
        """The same one, as long as nothing is written: what it knows of itself is kept."""
        words, moment = self._seen
        if moment is None or words != (division, first, end):
            ends = np.frombuffer(end, np.int64)
            moment = Moment(division, size, np.minimum(np.frombuffer(first, np.int64), ends), ends)
            self._seen = (division, first, end), moment
        return moment

    def lost(self, moment: Moment, rings: Array, numbers: Array) -> Array:
        """Bool `[...]`, which of these frames do not stand any more, and may have been written over."""
        self.in_order()
        gone: Array = numbers < self.retired[rings]
        self.in_order()  # the cursors are those of this division, if it is the same afterwards
        return gone if self.division == moment.division else np.ones(numbers.shape, bool)

    # --- holding ---

    def hold(self, seconds: float) -> None:
        """No frame that stands is written over, for so long."""
        self._head[_HOLD] = time.monotonic_ns() + int(seconds * 1e9)
        self.in_order()
        time.sleep(GLANCE)  # who was about to retire frames has by now, or sees it

    def release(self) -> None:
        """Frames may be written over."""
        self._head[_HOLD] = 0

    @property
    def is_held(self) -> bool:
        """Whether no frame that stands is written over."""
        return bool(self._head[_HOLD] and time.monotonic_ns() < self._head[_HOLD])

    def written_over(self, moment: Moment) -> Array:
        """int64 `[R]`, how many of the oldest of each ring are, or may be by now."""
        if self.is_held:
            return np.zeros_like(moment.first)
        gone: Array = np.clip(self.retired[: len(moment.first)] - moment.first, 0, moment.counts)
        return gone

    def retire(self, rings: slice | Array, before: int | Array) -> None:
        """Frames of these rings before this number are about to be written over; waits while they are held."""
        self.retired[rings] = np.maximum(self.retired[rings], before)
        self.in_order()
        while self.is_held:
            time.sleep(GLANCE)

    def commit(self, rings: slice | Array, end: int | Array) -> None:
        """Frames of these rings before this number stand."""
        self.in_order()
        self.committed[rings] = end
