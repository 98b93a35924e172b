"""Samples that are made ahead, while the learner is at work on others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Ahead"]

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Makes samples in a thread, in the order in which they are asked for.

    Args:
        make: makes a sample of so many rows.
        count: how many are made ahead.
    """

    def __init__(self, make: Callable[[int], Made], count: int) -> None:
        self._make = make
        self._count = count
        self._rows = 0
        self._waiting: deque[Future[Made]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._asking = threading.RLock()

    def get(self, rows: int) -> Made:
        """The next sample of so many rows. What making it raises comes out here."""
        with self._asking:
            if rows != self._rows:
                self.forget()
                self._rows = rows
            if not self._waiting:
                self._waiting.append(self._ask(rows))
            sample = self._waiting.popleft()
        try:
            made = sample.result()
        except BaseException:
            self.forget()  # they were made of frames that may have changed since
            raise
        with self._asking:
            while rows == self._rows and len(self._waiting) < self._count:
                self._waiting.append(self._ask(rows))
        return made

    def _ask(self, rows: int) -> Future[Made]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlcollect-sample")
        return self._thread.submit(self._make, rows)

    def forget(self) -> None:
        """What was made ahead is not wanted."""
        with self._asking:
            while self._waiting:
                self._waiting.pop().cancel()

    def close(self) -> None:
        """Ends the thread, and makes none ahead any more. Safe to call again."""
        with self._asking:
            self._count = 0
            self.forget()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
