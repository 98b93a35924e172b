"""What each worker is doing, and what it is to stop, on a page of shared memory that is read by anybody, at any time.

Each row has one writer: the worker; what the program says to a worker is in a row of its own. Every value is one
machine word; nothing waits for anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Board", "Row"]

Array = np.ndarray[Any, Any]
STAGE, COUNT, SINCE, BEAT, KEPT, NOTED, BEFORE = range(7)
STOP = 0  # of the program's row
WORDS = 8  # of a row: a cache line
STEP_BITS = 32  # of a word that tells what is kept; the others are the command's


class Row:
    """What one worker writes, and what the program says to it.

    Args:
        words: int64 `[8]`.
        said: int64 `[8]`, the program's.
        stages: the names of what it may be doing.
    """

    def __init__(self, words: Array, said: Array, stages: Sequence[str]) -> None:
        self._words = words
        self._stop = said[STOP : STOP + 1].data  # of all ways to read a word the quickest
        self._numbers = {name: number for number, name in enumerate(stages)}

    def enter(self, stage: str) -> None:
        """It is doing this now."""
        self._words[SINCE] = self._words[BEAT] = time.monotonic_ns()
        self._words[STAGE] = self._numbers[stage]

    def beat(self, count: int) -> None:
        """It is alive, and has done so much."""
        self._words[COUNT] = count
        self._words[BEAT] = time.monotonic_ns()

    def live(self) -> None:
        """It is alive."""
        self._words[BEAT] = time.monotonic_ns()

    def keep(self, command: int, steps: int) -> None:
        """So many steps of what this command asks for are in shared memory, and stay there if the process ends."""
        self._words[KEPT] = command << STEP_BITS | steps

    def note(self, command: int, count: int) -> None:
        """So much was written before anything of what this command asks for; that stays if the process ends."""
        self._words[BEFORE] = count
        self._words[NOTED] = command

    def noted(self, command: int) -> int | None:
        """What was noted with this command; None: nothing was."""
        return int(self._words[BEFORE]) if self._words[NOTED] == command else None

    def is_to_stop(self, command: int) -> bool:
        """Whether the program wants no more of what this command asks for."""
        return self._stop[0] >= command


class Board:
    """All rows.

    Args:
        buffer: uint8, `nbytes` of them.
        stages: the names of what a worker may be doing; the first is what it does at first.
    """

    def __init__(self, buffer: Array, stages: Sequence[str]) -> None:
        rows = buffer.view(np.int64).reshape(-1, 2, WORDS)
        self._rows, self._said = rows[:, 0], rows[:, 1]
        self._stages = tuple(stages)

    @staticmethod
    def nbytes(workers: int) -> int:
        """Bytes for so many workers."""
        return workers * 2 * WORDS * 8

    def row(self, worker: int) -> Row:
        """The row of a worker, to be written by it alone."""
        return Row(self._rows[worker], self._said[worker], self._stages)

    def let_go(self) -> None:
        """Keeps what stands there now, and not the memory."""
        self._rows, self._said = self._rows.copy(), self._said.copy()

    def begin_anew(self, worker: int) -> None:
        """Another is to write this row, and nobody writes it now: it has done nothing yet. What is kept stays kept."""
        self._rows[worker, [STAGE, COUNT, SINCE, BEAT]] = 0

    def stop(self, worker: int, command: int) -> None:
        """A worker is to stop what this command asks for, and those with lower numbers; not what comes later."""
        self._said[worker, STOP] = max(self._said[worker, STOP], command)

    def kept(self, worker: int, command: int) -> int:
        """How many steps of what this command asks for are in shared memory."""
        number, steps = divmod(int(self._rows[worker, KEPT]), 1 << STEP_BITS)
        return steps if number == command else 0

    def beat(self, worker: int) -> float:
        """When a worker was last heard of, by the machine's monotonic clock, in seconds."""
        return int(self._rows[worker, BEAT]) / 1e9

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
