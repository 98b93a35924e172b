"""What of a rollout stays when its worker dies: it is finished in small parts, and each part is said to stand."""

from __future__ import annotations

import time

from rlcollect.processes.board import Row

__all__ = ["Keeping"]

SECONDS = 0.02  # that a part is to take: so much work is lost at most, or the step under way where that takes longer


class Keeping:
    """See `rollout.engine.Parts`: parts that take about as long as is lost without regret.

    The first is a single step, since nobody knows yet how long one takes; the next are twice as long each, at most.

    Args:
        row: where it is said what stands.
    """

    keeps = True

    def __init__(self, row: Row) -> None:
        self._row = row
        self._command = 0
        self._steps = 1
        self._begun = 0.0
        self._under_way = 0

    def begin(self, command: int, start: int) -> None:
        """The rollout of this command goes on after so many steps."""
        self._command = command
        self._row.keep(command, start)

    def next(self, left: int) -> int:
        """See `Parts`."""
        self._begun = time.perf_counter()
        self._under_way = min(left, self._steps)
        return self._under_way

    def finished(self, made: int, steps: int) -> None:
        """See `Parts`."""
        self._row.keep(self._command, made)
        self._row.beat(steps)
        took = time.perf_counter() - self._begun
        fitting = int(self._under_way * SECONDS / max(took, 1e-6))
        self._steps = max(1, min(fitting, 2 * max(self._steps, self._under_way)))
