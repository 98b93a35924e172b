"""What became of each worker's frames: counts that only the program's side knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlcollect.stats import Late, Spread, WorkerStats

__all__ = ["LateRollout", "Tally"]

REMEMBERED = 100  # late rollouts whose ages are kept


@dataclass(frozen=True)
class LateRollout:
    """A rollout that comes in a later batch than it was begun for.

    Attributes:
        worker: whose.
        frames: in it.
        batches: how many batches later.
        version: of the weights that made it.
    """

    worker: int
    frames: int
    batches: int
    version: int


class Tally:
    """Counts of each worker.

    Attributes:
        restarts, preempted, dropped: see `WorkerStats`; of `dropped` those of workers that failed.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self.restarts = [0] * workers
        self.preempted = [0] * workers
        self.dropped = [0] * workers
        self._late = [0] * workers
        self._late_rollouts = 0
        self._ages = deque[tuple[int, int]](maxlen=REMEMBERED)

    def add(self, workers: int) -> None:
        """There are so many more; whose `restarts` and `dropped` are counted elsewhere is told there."""
        for counts in (self.preempted, self._late):
            counts += [0] * workers
        for counts in (self.restarts, self.dropped):
            counts += [0] * (len(self._late) - len(counts))

    def note_late(self, rollouts: Sequence[LateRollout], version: int) -> None:
        """These were delivered now, when the newest weights had this version."""
        for rollout in rollouts:
            self._late_rollouts += 1
            self._late[rollout.worker] += rollout.frames
            self._ages.append((rollout.batches, version - rollout.version))

    def workers(self, dropped: Sequence[int]) -> tuple[WorkerStats, ...]:
        """Of each; with the frames that it says itself to have dropped."""
        return tuple(
            WorkerStats(*counts)
            for counts in zip(
                self.restarts,
                [own + lost for own, lost in zip(dropped, self.dropped, strict=True)],
                self.preempted,
                self._late,
                strict=True,
            )
        )

    def late(self) -> Late:
        """Of rollouts that came late."""
        batches, versions = [age for age, _ in self._ages], [behind for _, behind in self._ages]
        return Late(self._late_rollouts, Spread.of(batches), Spread.of(versions))
