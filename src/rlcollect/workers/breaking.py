"""How a rollout is broken off that is made in a thread: somebody is asked now and then, and raises."""

from __future__ import annotations

from collections.abc import Callable

from rlcollect.interfaces import Interruptor
from rlcollect.memory.slots import Slot
from rlcollect.rollout.parts import Parts
from rlcollect.workers.pacing import Pace

__all__ = ["Checking", "InGlances"]

SECONDS = 0.05  # between two questions, or a step where that takes longer


class InGlances:
    """Parts of a rollout, between which is asked. See `rollout.parts.Parts`.

    Args:
        check: asked; raises what the rollout is to be broken off by.
        parts: says how long they are at most, and is told of them.
    """

    def __init__(self, check: Callable[[], None], parts: Parts) -> None:
        self.keeps = parts.keeps
        self._check = check
        self._parts = parts
        self._pace = Pace(SECONDS)

    def next(self, left: int) -> int:
        """See `Parts`."""
        return self._pace.begin(self._parts.next(left))

    def finished(self, made: int, steps: int, slot: Slot) -> None:
        """See `Parts`."""
        self._parts.finished(made, steps, slot)
        self._pace.finished()
        self._check()


class Checking:
    """An interruptor that asks first, and then does what another says.

    Args:
        check: asked; raises what the rollout is to be broken off by.
        other: None: there is no other.
    """

    def __init__(self, check: Callable[[], None], other: Interruptor | None) -> None:
        self._check = check
        self._other = other

    def start_collection(self) -> None:
        """See `interfaces.Interruptor`."""
        if self._other is not None:
            self._other.start_collection()

    def stop_collection(self) -> None:
        """See `interfaces.Interruptor`."""
        if self._other is not None:
            self._other.stop_collection()

    def collection_stopped(self) -> bool:
        """See `interfaces.Interruptor`."""
        self._check()
        return self._other is not None and self._other.collection_stopped()
