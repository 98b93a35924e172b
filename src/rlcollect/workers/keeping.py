"""What of a rollout stays when its worker dies: it is finished in small parts, and each part is said to stand."""

from __future__ import annotations

from rlcollect.memory.slots import Slot
from rlcollect.processes.board import Row
from rlcollect.workers.pacing import Pace

__all__ = ["Keeping"]

SECONDS = 0.02  # that a part is to take: so much work is lost at most, or the step under way where that takes longer


class Keeping:
    """See `rollout.parts.Parts`: parts that take about as long as is lost without regret.

    Args:
        row: where it is said what stands.
    """

    keeps = True

    def __init__(self, row: Row) -> None:
        self._row = row
        self._command = 0
        self._pace = Pace(SECONDS)

    def begin(self, command: int, start: int) -> None:
        """The rollout of this command goes on after so many steps."""
        self._command = command
        self._row.keep(command, start)

    def standing(self, command: int, written: int) -> int:
        """How much of what this command asks for was written already, by somebody who died at it.

        It may be more than is said to stand: who dies in between had no time to say so.

        Args:
            command: that is about to be done.
            written: by now, in all.
        """
        before = self._row.noted(command)
        if before is None:
            self._row.note(command, written)
            return 0
        return written - before

    def next(self, left: int) -> int:
        """See `Parts`."""
        return self._pace.begin(left)

    def finished(self, made: int, steps: int, slot: Slot) -> None:  # noqa: ARG002
        """See `Parts`."""
        self._row.keep(self._command, made)
        self._row.beat(steps)
        self._pace.finished()
