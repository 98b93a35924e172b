"""What is put in the place of a worker that failed: how often, how soon, and from what it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlcollect.errors import WorkerRestarted
from rlcollect.processes.restarts import Restarts
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Build, Command, Load, Seed

__all__ = ["Attachment", "Prefixes", "Revival", "owed"]

Attachment = tuple[Command, Sequence[Any]]  # with what goes with it: see `WorkerPool.submit`


class Prefixes:
    """Gives prefixes of ids, each once.

    Attributes:
        given: how many were.

    Args:
        given: those that workers have which were there from the beginning.
    """

    def __init__(self, given: int) -> None:
        self.given = given

    def take(self, count: int) -> int:
        """So many that nobody else gets; the first."""
        first, self.given = self.given, self.given + count
        return first

    def skip(self, given: int) -> None:
        """So many were given before, elsewhere."""
        self.given = max(self.given, given)


class Revival:
    """Knows how workers are made anew.

    Attributes:
        worker_timeout: seconds without a sign of life after which a worker counts as failed; None: any.
        start_timeout: seconds in which one must be made; None: any.

    Args:
        builds: what each was made from.
        limit: times that each worker may be made anew; None: any.
        worker_timeout: see above.
        start_timeout: see above.
        attachments: what a worker is told when it is made, each time.
        check: raises where a worker is not like those before.
        prefixes: of the ids of their episodes.
    """

    def __init__(
        self,
        builds: Sequence[Build],
        *,
        limit: int | None,
        worker_timeout: float | None,
        start_timeout: float | None,
        attachments: Callable[[int], Sequence[Attachment]],
        check: Callable[[int, Facts], None],
        prefixes: Prefixes,
    ) -> None:
        self.worker_timeout = worker_timeout
        self.start_timeout = start_timeout
        self.check = check
        self._attachments = attachments
        self._prefixes = prefixes
        self._builds = list(builds)
        self._restarts = Restarts(len(builds), limit)
        self._seeds: dict[int, Seed] = {}
        self._loaded: dict[int, Mapping[str, Any]] = {}

    def add(self, builds: Sequence[Build]) -> None:
        """There are more workers, made from these, each with a prefix that was taken for it."""
        self._builds += builds
        self._restarts.add(len(builds))

    def note(self, worker: int, command: Command | None) -> None:
        """This was sent: a child of a seed, and weights of a state, are for those that come after too."""
        if isinstance(command, Seed):
            self._seeds[worker] = command
        elif isinstance(command, Load):
            self._loaded[worker] = command.state

    def note_progress(self, worker: int) -> None:
        """It has made something: the next failure is the first in a row."""
        self._restarts.works(worker)

    def wait_after(self, worker: int, cause: BaseException) -> float:
        """A worker failed: the seconds to wait before it is made anew.

        Raises:
            The cause, with a note that tells those before, when that was once too often.
        """
        restarts = self._restarts
        restarts.note(worker, cause)
        if restarts.is_over(worker):
            raise restarts.last(worker)
        restarts.count(worker)
        return max(0.0, restarts.pause(worker))

    def warning(self, worker: int) -> WorkerRestarted:
        """What is said of the newest failure."""
        return self._restarts.warning(worker)

    def build(self, worker: int, warmup: Sequence[int], numbers: Sequence[int]) -> Build:
        """What it is made from.

        Args:
            worker: which.
            warmup: random frames that each of its lanes still owes.
            numbers: of the episode that each begins with.
        """
        prefix = self._prefixes.take(1)
        loaded = self._loaded.get(worker, {})
        return replace(
            self._builds[worker],
            generation=self._restarts.counts[worker],
            prefix=prefix,
            warmup=tuple(warmup),
            numbers=tuple(numbers),
            weights=loaded.get("weights"),
            version=loaded.get("policy_version", 0),
        )

    def afterwards(self, worker: int) -> list[Attachment]:
        """What it is told then: where to write to and to take weights from, and its seed."""
        told = [*self._attachments(worker)]
        if worker in self._seeds:
            told.append((replace(self._seeds[worker], generation=self._restarts.counts[worker]), ()))
        return told


def owed(warmup: Sequence[int], steps: int) -> tuple[int, ...]:
    """Random frames that lanes owe after so many more steps."""
    left = np.maximum(np.asarray(warmup, np.int64) - steps, 0)
    return tuple(left.tolist())
