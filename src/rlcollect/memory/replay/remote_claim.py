"""Who writes to a buffer in an actor of a cluster, as those see it who have them write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcollect.errors import BufferDied, ClosedError, WorkerTimeout

if TYPE_CHECKING:
    from rlcollect.cluster.service import Line

__all__ = ["RemoteClaim", "let_go"]

LETTING_GO = 10.0  # seconds that an actor may take to answer who closes a collector


class RemoteClaim:
    """Who writes to a buffer in an actor, each to its own lanes.

    Attributes:
        told: what the buffer is, in words.
        writers: their numbers there.

    Args:
        line: to the `Hosted` in the actor.
        told: see above.
        number: of them all.
        writers: see above.
        timeout: seconds that a call may take; None: any.
    """

    def __init__(self, line: Line, told: str, number: int, writers: Sequence[int], *, timeout: float | None) -> None:
        self.told = told
        self.writers = writers
        self._line = line
        self._number = number
        self._timeout = timeout
        self._is_lost = False  # whether nobody answers

    @property
    def actor(self) -> Any:
        """The handle of the actor."""
        return self._line.actor

    @property
    def written(self) -> int:
        """Frames that they have written.

        Raises:
            ClosedError: nobody could say that when they were let go.
            WorkerTimeout: it took too long.
        """
        if self._is_lost:
            raise ClosedError(f"{self.told} did not answer.")
        return int(self._line.call("written", self.writers, group="write", timeout=self._timeout))

    def let_go(self) -> None:
        """They write no more, and what still comes of them is not written. Safe to call again."""
        self._is_lost = not let_go(self._line, self._number)


def let_go(line: Line, number: int) -> bool:
    """Ends what has this number in the actor; whether that has answered."""
    try:
        line.call("let_go", number, group="write", timeout=LETTING_GO)
    except (BufferDied, ClosedError, WorkerTimeout):
        return False
    return True
