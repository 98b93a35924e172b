"""What an engine is given beside driver and actors: memory for a rollout, and how much of it is finished at a time."""

from __future__ import annotations

from typing import Protocol

from rlcollect.memory.slots import Slot

__all__ = ["Memory", "Parts", "Whole"]


class Memory(Protocol):
    """Gives the memory of a rollout."""

    def take(self, steps: int) -> Slot:
        """Memory for so many steps."""

    def forget(self) -> None:
        """No more memory will be asked for."""


class Parts(Protocol):
    """How many steps of a rollout are finished at a time, and what is to be done when they are.

    Attributes:
        keeps: whether the steps before one that an environment failed in are wanted.
    """

    keeps: bool

    def next(self, left: int) -> int:
        """Of so many that are left, how many are made next; at least one."""

    def finished(self, made: int, steps: int, slot: Slot) -> None:
        """So many steps of the rollout stand in memory, whole. The engine has made `steps` in all."""


class Whole:
    """All of them at once."""

    keeps = False

    def next(self, left: int) -> int:
        """See `Parts`."""
        return left

    def finished(self, made: int, steps: int, slot: Slot) -> None:
        """See `Parts`."""
