"""The workers of a collector as it sees them: asks, waits, and sorts what comes back.

Every wait has a deadline if the user gave one, ends when a worker dies, and loses nothing when its time is up: what
comes later is there at the next call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rlcollect.collectors.tally import Tally
from rlcollect.errors import ClosedError, WorkerDied, WorkerTimeout
from rlcollect.failures import OnceEach
from rlcollect.interfaces import WorkerPool
from rlcollect.processes.channel import Held
from rlcollect.processes.messages import Reply
from rlcollect.workers.answers import Collected, Report, Withdrawn
from rlcollect.workers.commands import Close, Collect, Command

__all__ = ["USUAL", "Arrival", "Crew", "Left"]

ASKED_EACH = 0.01  # seconds between two questions to an interruptor of the user's own making
USUAL = -1.0  # the collector's own time limit
LATE_HINT = "Nothing is lost: call again to go on waiting, allow more (timeout=), or shut the collector down."


@dataclass(frozen=True)
class Arrival:
    """A rollout that came.

    Attributes:
        worker: whose.
        command: what was asked.
        rollout: what came.
        beside: its bytes, where they are in no shared memory.
    """

    worker: int
    command: Collect
    rollout: Collected
    beside: Any = None


class Left(WorkerTimeout):
    """A wait was broken off, since somebody else wants the workers; nothing is lost by it."""


class Crew:
    """Asks workers, and gathers what they answer.

    Attributes:
        pool: the workers.
        arrived: rollouts in the order in which they were finished.
        reports: the newest of each worker.
        tally: what became of each one's frames.
        has_failed: whether a rollout was not made, since what makes it has failed.
        is_to_leave: asked now and then, in a wait, whether to break it off; None: nobody is.

    Args:
        pool: the workers.
        timeout: seconds that a wait may take; None: any.
        is_stopped: asked now and then, while workers are waited for, whether rollouts are to end early.
    """

    def __init__(
        self, pool: WorkerPool, timeout: float | None, *, is_stopped: Callable[[], bool] | None = None
    ) -> None:
        self.pool = pool
        self.arrived: deque[Arrival] = deque()
        self.reports = [Report() for _ in range(len(pool))]
        self.tally = Tally(len(pool))
        self.has_failed = False
        self.is_to_leave: Callable[[], bool] | None = None
        self._timeout = timeout
        self._is_stopped = is_stopped
        self._under_way: dict[int, tuple[int, Collect]] = {}
        self._awaited: dict[int, int] = {}
        self._answers: dict[int, Any] = {}
        self._unheard: dict[int, bool] = {}  # whose failures are not raised, and whether they are told
        self._warnings = OnceEach()

    def add(self, workers: int) -> None:
        """There are so many more."""
        self.reports += [Report() for _ in range(workers)]
        self.tally.add(workers)

    # --- rollouts ---

    def collect(self, worker: int, command: Collect) -> int:
        """Has a rollout made; it will arrive. It gets a number, if it has none."""
        with Held():
            number = command.number or self.pool.new_number()
            command = replace(command, number=number)
            self.pool.submit(worker, command, number=number)
            self._under_way[number] = worker, command
        return number

    def patience(self, usual: float) -> float:
        """Seconds that a wait may take, where it must have an end."""
        return usual if self._timeout is None else self._timeout

    def stop(self) -> None:
        """Rollouts that are under way end with their next frame, and arrive as they are."""
        for number, (worker, _) in self._under_way.items():
            self.pool.stop(worker, number)

    @property
    def under_way(self) -> Sequence[tuple[int, Collect]]:
        """Rollouts that were asked for and have not arrived."""
        return list(self._under_way.values())

    def wait_for_rollouts(self, enough: Callable[[], bool]) -> None:
        """Waits for rollouts to arrive until there are enough.

        Raises:
            WorkerTimeout: it took too long.
            WorkerDied, and what was raised in a worker.
        """
        if not enough():
            self._pump(self._timeout, enough, lambda: [worker for worker, _ in self._under_way.values()])

    def look(self) -> None:
        """Takes what has come, without waiting for anything: so that a death is noticed while others deliver."""
        self._take(self.pool.ready(0))

    def withdraw(self) -> None:
        """Nobody wants the rollouts that have not begun; those that have will arrive before this returns."""
        if self._under_way:
            ids = {self.pool.withdraw(worker): worker for worker in {worker for worker, _ in self._under_way.values()}}
            self._await(ids, self._timeout)

    def lose(self) -> None:
        """What was asked for will not arrive: whoever made it was broken off."""
        self._under_way.clear()
        self.arrived.clear()

    # --- all else ---

    def ask(
        self,
        commands: Mapping[int, Command],
        *,
        timeout: float | None = USUAL,
        attached: Sequence[Any] = (),
        hint: str = LATE_HINT,
    ) -> list[Any]:
        """Has commands done as soon as what is under way is done; the answers, in order.

        Args:
            commands: by worker.
            timeout: seconds, in the place of the collector's own; None: any.
            attached: that go with each.
            hint: what to do when it took too long.

        Raises:
            WorkerTimeout: it took too long. They are done all the same.
            WorkerDied, and what was raised in a worker.
        """
        ids = {
            self.pool.submit(worker, command, in_turn=False, attached=attached): worker
            for worker, command in commands.items()
        }
        return self._await(ids, self._timeout if timeout == USUAL else timeout, hint)

    def tell(self, worker: int, command: Command, attached: Sequence[Any] = ()) -> None:
        """Has a command done as soon as what is under way is done, and does not wait for it."""
        self.pool.submit(worker, command, in_turn=False, attached=attached)

    def dismiss(self, timeout: float) -> None:
        """Has the environments closed, and passes on what is said about that; not what fails."""
        deadline, ids = time.monotonic() + timeout, set[int]()
        try:
            for worker in range(len(self.pool)):
                with suppress(ClosedError):  # it has failed, and nobody came in its place yet
                    ids.add(self.pool.submit(worker, Close(), in_turn=False))
            while ids and (left := deadline - time.monotonic()) > 0:
                for reply in self.pool.ready(left):
                    self._pass_on(reply)
                    ids.discard(reply.id)
                self.pool.done()
        except WorkerDied:  # there is nobody to be dismissed, or not in order
            return

    def _await(self, ids: Mapping[int, int], timeout: float | None, hint: str = LATE_HINT) -> list[Any]:
        self._awaited = dict(ids)
        try:
            self._pump(timeout, lambda: not self._awaited, lambda: list(self._awaited.values()), hint)
            return [self._answers[number] for number in ids]
        except WorkerTimeout:
            self._unheard |= dict.fromkeys(self._awaited, True)
            raise
        except BaseException:  # one of them failed, which is enough, or a Ctrl-C came
            self._unheard |= dict.fromkeys(self._awaited, False)
            raise
        finally:  # what comes later for these is not looked at
            self._awaited, self._answers = {}, {}

    def _pump(
        self,
        timeout: float | None,
        enough: Callable[[], bool],
        lacking: Callable[[], Sequence[int]],
        hint: str = LATE_HINT,
    ) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not enough():
            self.check_leaving()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            replies = self.pool.ready(self._asked_meanwhile(left))
            if not replies and left is not None and time.monotonic() >= (deadline or 0.0):
                raise self._late(timeout, lacking(), hint)
            self._take(replies)

    def _asked_meanwhile(self, left: float | None) -> float | None:
        """Asks whether to stop rollouts; the seconds until something is to be asked again, or that are left."""
        is_asked = self._is_stopped is not None and bool(self._under_way)
        if self._is_stopped is not None and is_asked and self._is_stopped():
            self.stop()
        if not is_asked and self.is_to_leave is None:
            return left
        return ASKED_EACH if left is None else min(left, ASKED_EACH)

    def check_leaving(self) -> None:
        """Breaks a wait off, if it is to be.

        Raises:
            Left: it is.
        """
        if self.is_to_leave is not None and self.is_to_leave():
            raise Left("Somebody else wants the workers.", workers=())

    def _take(self, replies: Sequence[Reply]) -> None:
        came, failures = [], []
        with Held():
            for reply in replies:
                try:
                    arrival = self._sorted_in(reply)
                except BaseException as error:  # of a worker; what the others say is heard all the same
                    failures.append(error)
                else:
                    came += [] if arrival is None else [arrival]
            self.arrived.extend(sorted(came, key=lambda arrival: arrival.rollout.finished))
            self.pool.done()
        if failures:
            raise failures[0]

    def _sorted_in(self, reply: Reply) -> Arrival | None:
        self._pass_on(reply)
        asked = self._under_way.pop(reply.id, None)
        if reply.failure is None:
            self._unheard.pop(reply.id, None)
        if reply.failure is not None and reply.id in self._unheard:
            if self._unheard.pop(reply.id):
                self._warnings.warn(
                    f"worker {reply.worker}, at a command that nobody waits for any more: {reply.failure.text}"
                )
            return None
        if reply.failure is not None:
            self.has_failed |= asked is not None
            self._awaited.pop(reply.id, None)
            raise reply.failure.raised()
        if asked is None:
            if self._awaited.pop(reply.id, None) is not None:
                self._answers[reply.id] = reply.value
            return None
        if isinstance(reply.value, Withdrawn):
            return None
        self.reports[reply.worker] = reply.value.report
        return Arrival(reply.worker, asked[1], reply.value, reply.beside)

    def _pass_on(self, reply: Reply) -> None:
        """Warnings, once each."""
        for notice in reply.notices:
            self._warnings.warn(f"worker {reply.worker}: {notice.text}", notice.category)

    def _late(self, timeout: float | None, workers: Sequence[int], hint: str) -> WorkerTimeout:
        late = tuple(dict.fromkeys(workers))
        told = "; ".join(self.pool.told(worker) for worker in late) or "its workers"
        return WorkerTimeout(f"{timeout} s were not enough for {told}. {hint}", workers=late)
