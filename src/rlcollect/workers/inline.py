"""A pool of one worker, in the program's own process: commands are done when their replies are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rlcollect.failures import is_interrupt
from rlcollect.processes.messages import Reply
from rlcollect.rollout.seeding import ProgramState
from rlcollect.workers.answers import Withdrawn
from rlcollect.workers.commands import Build, Command
from rlcollect.workers.worker import Worker

__all__ = ["InlinePool"]


class InlinePool:
    """See `interfaces.WorkerPool`.

    What a command raises comes out of `ready` as it is. What of the program's own it had changed is put back.

    Attributes:
        worker: the one there is; None before a `Build`.
        is_spent: never.
    """

    def __init__(self) -> None:
        self.is_spent = False
        self.worker: Worker | None = None
        self._at_once: deque[tuple[int, Command]] = deque()
        self._waiting: deque[tuple[int, Command]] = deque()
        self._next_id = 0
        self._stage = "waiting for a command"

    def __len__(self) -> int:
        return 1

    def new_number(self) -> int:
        """See `WorkerPool`."""
        self._next_id += 1
        return self._next_id

    def submit(
        self,
        worker: int,  # noqa: ARG002
        command: Command,
        *,
        in_turn: bool = True,
        attached: Sequence[Any] = (),  # noqa: ARG002
        number: int | None = None,
    ) -> int:
        """See `WorkerPool`. Memory is the program's own: there is nothing to attach."""
        number = self.new_number() if number is None else number
        (self._waiting if in_turn else self._at_once).append((number, command))
        return number

    def stop(self, worker: int, number: int) -> None:
        """See `WorkerPool`: nothing is under way when this is called."""

    def withdraw(self, worker: int) -> int:
        """See `WorkerPool`."""
        while self._waiting:
            self._at_once.append((self._waiting.popleft()[0], _Withdraw()))
        return self.submit(worker, _Withdraw(), in_turn=False)

    def ready(self, timeout: float | None) -> list[Reply]:  # noqa: ARG002 - what is done here cannot be waited for
        """See `WorkerPool`: does the first of the commands that wait."""
        queue = self._at_once or self._waiting
        if not queue:
            return []
        number, command = queue.popleft()
        try:
            return [Reply(number, 0, self._done(command), None)]
        finally:
            self._stage = "waiting for a command"

    def done(self) -> None:
        """See `WorkerPool`. What was broken off here is done anew, and not given again."""

    def _done(self, command: Command) -> Any:
        if isinstance(command, _Withdraw):
            return Withdrawn()
        if isinstance(command, Build):
            self.worker = Worker(command, self._enter)
            return self.worker.facts
        assert self.worker is not None
        if self.worker.is_apart:  # nothing of the program's own is changed
            return self.worker.handle(command)
        with _PutBack(self.worker):
            return self.worker.handle(command)

    def _enter(self, stage: str) -> None:
        self._stage = stage

    def told(self, worker: int) -> str:
        """See `WorkerPool`."""
        return f"worker {worker} ({self._stage})"

    def shutdown(self, timeout: float = 0.0) -> None:  # noqa: ARG002
        """See `WorkerPool`."""
        worker, self.worker = self.worker, None
        self._at_once.clear()
        self._waiting.clear()
        errors = [] if worker is None else worker.close()
        if interrupt := next(filter(is_interrupt, errors), None):
            raise interrupt


class _Withdraw(Command):
    """Nothing is to be done."""


class _PutBack:
    """Around a rollout: the program's own state is put back where it was broken off.

    A class: a generator, interrupted in `contextlib`, would be closed like one that failed.
    """

    def __init__(self, worker: Worker) -> None:
        self._state = ProgramState(worker.acting.device)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._state.put_back()
