"""How long the parts of a rollout are to be, so that each takes about as long as is wanted."""

from __future__ import annotations

import time

__all__ = ["Pace"]


class Pace:
    """Says how many steps a part has.

    The first has one, since nobody knows yet how long that takes; each later one at most twice as many as the last.

    Args:
        seconds: that a part is to take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._steps = 1
        self._begun = 0.0
        self._under_way = 0

    def begin(self, most: int) -> int:
        """A part begins; its steps, of so many at most."""
        self._begun = time.perf_counter()
        self._under_way = min(most, self._steps)
        return self._under_way

    def finished(self) -> None:
        """It is made."""
        took = time.perf_counter() - self._begun
        fitting = int(self._under_way * self._seconds / max(took, 1e-6))
        self._steps = max(1, min(fitting, 2 * max(self._steps, self._under_way)))
