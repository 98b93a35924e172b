"""What each worker is doing, on a page of shared memory: written by the worker, read by anybody, at any time.

Each row has one writer, and every value is one machine word; nothing waits for anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Board", "Row"]

Array = np.ndarray[Any, Any]
STAGE, COUNT, SINCE, BEAT = range(4)
WORDS = 8  # of a row: a cache line


class Row:
    """What one worker writes.

    Args:
        words: int64 `[8]`.
        stages: the names of what it may be doing.
    """

    def __init__(self, words: Array, stages: Sequence[str]) -> None:
        self._words = words
        self._numbers = {name: number for number, name in enumerate(stages)}

    def enter(self, stage: str) -> None:
        """It is doing this now."""
        self._words[SINCE] = self._words[BEAT] = time.monotonic_ns()
        self._words[STAGE] = self._numbers[stage]

    def beat(self, count: int) -> None:
        """It is alive, and has done so much."""
        self._words[COUNT] = count
        self._words[BEAT] = time.monotonic_ns()


class Board:
    """All rows.

    Args:
        buffer: uint8, `nbytes` of them.
        stages: the names of what a worker may be doing; the first is what it does at first.
    """

    def __init__(self, buffer: Array, stages: Sequence[str]) -> None:
        self._rows = buffer.view(np.int64).reshape(-1, WORDS)
        self._stages = tuple(stages)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for so many workers."""
        return workers * WORDS * 8

    def row(self, worker: int) -> Row:
        """The row of a worker, to be written by it alone."""
        return Row(self._rows[worker], self._stages)

    def let_go(self) -> None:
        """Keeps what stands there now, and not the memory."""
        self._rows = self._rows.copy()

    def stage(self, worker: int) -> str:
        """What a worker is doing."""
        return self._stages[int(self._rows[worker, STAGE])]

    def count(self, worker: int) -> int:
        """How much a worker says to have done."""
        return int(self._rows[worker, COUNT])

    def told(self, worker: int) -> str:
        """What a worker is doing, since when, and when it was last heard of, in words."""
        since, beat = int(self._rows[worker, SINCE]), int(self._rows[worker, BEAT])
        if not since:
            return self.stage(worker)
        now = time.monotonic_ns()
        text = f"{self.stage(worker)}, for {(now - since) / 1e9:.1f} s"
        return text if beat == since else f"{text}; last sign of life {(now - beat) / 1e9:.1f} s ago"
