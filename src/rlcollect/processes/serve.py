"""A worker's side: receives requests, has them handled, sends one reply to each, until nobody is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

from rlcollect.processes.arena import Arena
from rlcollect.processes.board import Board, Row
from rlcollect.processes.channel import Channel
from rlcollect.processes.crossing import unpacked
from rlcollect.processes.launch import hear_no_interrupts
from rlcollect.processes.messages import Notice, Reply, Request
from rlcollect.processes.relay import Failure

__all__ = ["Handler", "serve"]

GRACE = 3.0  # seconds that a worker without a program has to close what it holds


class Handler(Protocol):
    """What does the work.

    Attributes:
        is_over: whether nothing more is to be handled.
    """

    is_over: bool

    def handle(self, command: Any, attached: Sequence[Any]) -> Any:
        """The result of a command; what goes with it are file descriptors, or what its pool has in their place."""

    def withdraw(self, command: Any) -> Any:
        """The result of a command that is not to be done."""

    def close(self) -> None:
        """Lets go of everything. Safe to call again."""


class Stopped(SystemExit):
    """Somebody ends this process."""


def serve(
    connection: Connection[Any, Any],
    worker: int,
    stages: tuple[str, ...],
    make: Callable[[int, Row], Handler],
    environ: Mapping[str, str],
) -> None:
    """The life of a worker process.

    Args:
        connection: to the pool.
        worker: its number.
        stages: for the board.
        make: makes what handles the commands.
        environ: the program's environment variables.
    """
    hear_no_interrupts()
    _yield_to_waker()
    signal.signal(signal.SIGTERM, _stopper())
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
    threading.Thread(target=_end_with_program, daemon=True).start()
    channel = Channel(connection)
    try:
        server = _Server(channel, worker, stages, make)
    except (EOFError, ConnectionError):  # the program has changed its mind
        return
    server.run()


def _yield_to_waker() -> None:
    """Whoever wakes this process goes on first: the program has others to wake."""
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        except OSError:  # where it is not allowed, it is only a little slower
            return


def _stopper() -> Callable[[int, FrameType | None], None]:
    """A handler that stops the process once; it stays in place, since what it raises is known by it."""
    has_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as handlers are called
        nonlocal has_stopped
        if not has_stopped:
            has_stopped = True
            raise Stopped(128 + number)

    return stop


def _end_with_program() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        threading.Event().wait(GRACE)
        os._exit(1)


class _Server:
    def __init__(
        self, channel: Channel, worker: int, stages: tuple[str, ...], make: Callable[[int, Row], Handler]
    ) -> None:
        self._channel = channel
        self._worker = worker
        self._waiting: deque[tuple[Request, list[int]]] = deque()
        self._notices: list[Notice] = []
        (nbytes, page) = self._welcome()
        self._row = Board(page[:nbytes], stages).row(worker)
        self._handler = make(worker, self._row)

    def _welcome(self) -> tuple[int, Any]:
        nbytes: int = self._channel.receive()
        (fd,) = self._channel.receive_descriptors(1)
        return nbytes, Arena.attached(fd, nbytes)

    def run(self) -> None:
        warnings.showwarning = self._note
        try:
            while not self._handler.is_over:
                request, attached = self._next()
                self._send(self._handled(request, attached))
        except (EOFError, ConnectionError):
            pass  # the program has let go of this worker, or is gone
        finally:
            self._handler.close()

    def _next(self) -> tuple[Request, list[int]]:
        """The request to handle: the first that does not wait for its turn, else the first."""
        while not self._waiting or self._channel.has_message():
            request: Request = self._channel.receive()
            self._waiting.append((request, self._channel.receive_descriptors(request.descriptors)))
        for place, (request, attached) in enumerate(self._waiting):
            if not request.in_turn:
                del self._waiting[place]
                return request, attached
        return self._waiting.popleft()

    def _handled(self, request: Request, attached: list[int]) -> Reply:
        try:
            command = unpacked(request.body)
            if command is None:
                self._withdraw(request.id)
                value = None
            else:
                value = self._handler.handle(command, attached)
        except Stopped:
            raise
        except BaseException as error:
            return Reply(request.id, self._worker, None, Failure.of(error, self._worker), self._taken())
        return Reply(request.id, self._worker, value, None, self._taken())

    def _withdraw(self, before: int) -> None:
        """Those that were waiting for their turn then are not to be done."""
        withdrawn = [each for each in self._waiting if each[0].id < before]
        self._waiting = deque(each for each in self._waiting if each[0].id > before)
        for request, attached in withdrawn:
            for fd in attached:
                os.close(fd)
            self._send(Reply(request.id, self._worker, self._handler.withdraw(unpacked(request.body)), None))

    def _send(self, reply: Reply) -> None:
        try:
            if getattr(reply.value, "is_plain", False) and not reply.notices:
                self._channel.send(reply)
            else:
                self._channel.send_result(reply)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            failure = Failure.of(error, self._worker)
            self._channel.send_result(Reply(reply.id, self._worker, None, failure))

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        self._notices.append(Notice(category, str(message)))

    def _taken(self) -> tuple[Notice, ...]:
        taken, self._notices = tuple(self._notices), []
        return taken
