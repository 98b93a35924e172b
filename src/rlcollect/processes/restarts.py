"""When a worker that broke down gets another process, how soon, and what is said when it gets none."""

from __future__ import annotations

import time
from collections import deque

from rlcollect.errors import WorkerRestarted
from rlcollect.failures import text_of

__all__ = ["Restarts"]

REMEMBERED = 20  # causes that are told in the end
PAUSE, LONGEST = 0.1, 10.0  # seconds: before the second process in a row, doubled from there on; and at most


class Restarts:
    """What broke down, by worker.

    Attributes:
        counts: how often each was replaced.

    Args:
        workers: how many.
        limit: how often each may be; None: any number; 0: none is.
    """

    def __init__(self, workers: int, limit: int | None) -> None:
        self.counts = [0] * workers
        self._limit = limit
        self._last: list[BaseException | None] = [None] * workers
        self._before = [deque[str](maxlen=REMEMBERED) for _ in range(workers)]  # texts: errors would keep their frames
        self._in_a_row = [0] * workers
        self._due = [0.0] * workers

    def add(self, workers: int) -> None:
        """There are so many more."""
        self.counts += [0] * workers
        self._last += [None] * workers
        self._before += [deque[str](maxlen=REMEMBERED) for _ in range(workers)]
        self._in_a_row += [0] * workers
        self._due += [0.0] * workers

    def note(self, worker: int, cause: BaseException) -> None:
        """It broke down."""
        row = self._in_a_row[worker]
        if (last := self._last[worker]) is not None:
            self._before[worker].append(_told(last))
        self._last[worker] = cause
        self._due[worker] = time.monotonic() + (min(LONGEST, PAUSE * 2.0 ** (row - 1)) if row else 0.0)
        self._in_a_row[worker] = row + 1

    def works(self, worker: int) -> None:
        """It has made a step."""
        self._in_a_row[worker] = 0

    def pause(self, worker: int) -> float:
        """Seconds until it may be replaced."""
        return self._due[worker] - time.monotonic()

    def is_over(self, worker: int) -> bool:
        """Whether it was replaced as often as it may be."""
        return self._limit is not None and self.counts[worker] >= self._limit

    def count(self, worker: int) -> None:
        """It was replaced."""
        self.counts[worker] += 1

    def warning(self, worker: int) -> WorkerRestarted:
        """The warning that says so."""
        cause = self._last[worker]
        assert cause is not None
        of = "" if self._limit is None else f" of at most {self._limit}"
        after = _told(cause).rstrip(".")
        return WorkerRestarted(
            f"worker {worker} was replaced (restart {self.counts[worker]}{of}), after {after}. Its lanes begin new "
            "episodes; those under way are cut.",
            worker=worker,
            cause=cause,
        )

    def last(self, worker: int) -> BaseException:
        """What broke down last, with a note of all that did before."""
        last = self._last[worker]
        assert last is not None
        if before := self._before[worker]:
            first = self.counts[worker] - len(before) + 1
            causes = "".join(f"\n{number}. {told}" for number, told in enumerate(before, first))
            last.add_note(
                f"worker {worker} was replaced {self.counts[worker]} times (max_restarts={self._limit}), after:{causes}"
            )
        return last


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"
