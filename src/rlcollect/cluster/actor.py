"""A worker's side: requests come in from the cluster, one thread has them handled, one after the other.

What is asked about a worker while it works (`pulse`), or said to it (`stop`), is answered beside that thread.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import ray

from rlcollect.processes.board import Board, Row
from rlcollect.processes.crossing import unpacked
from rlcollect.processes.messages import Beside, Notice, Reply, Request
from rlcollect.processes.relay import Failure
from rlcollect.processes.serve import Handler

__all__ = ["Pulse", "Serving", "find_modules"]


def find_modules(path: Sequence[str]) -> None:
    """Modules that the program finds are found here too, where they are in the same place."""
    sys.path += [each for each in path if each not in sys.path]


@dataclass(frozen=True)
class Pulse:
    """A sign of life.

    Attributes:
        stage: what the worker is doing.
        told: the same in words, with since when.
        at: when this was, by the clock of its machine.
        age: seconds since it was last heard of by its own process.
        count: how much it says to have done.
        node: where it is, as Ray calls the node.
    """

    stage: str
    told: str
    at: float
    age: float
    count: int
    node: str


Answer = tuple[int, bytes]


@dataclass
class _Waiting:
    """A request that was not handled yet, and where its answer is waited for."""

    request: Request
    attached: Sequence[Any]
    answer: asyncio.Future[tuple[Answer, Any]]


class Serving:
    """The life of a worker in an actor, whose methods run in an event loop.

    Args:
        worker: its number.
        stages: what it may be doing.
        make: makes what handles the commands, in the thread that will.
        node: where it is.
        path: of the program's modules, for those that are found by their names.
    """

    def __init__(
        self,
        worker: int,
        stages: tuple[str, ...],
        make: Callable[[int, Row], Handler],
        node: Callable[[], str],
        path: Sequence[str],
    ) -> None:
        find_modules(path)
        self._worker = worker
        self._make = make
        self._node = node()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[_Waiting] = deque()
        self._early: dict[int, _Waiting] = {}  # that have come before others that were sent before them
        self._place = 0  # of the one that comes next
        self._answers = itertools.count()
        self._is_leaving = False
        self._something = threading.Condition()
        self._notices: list[Notice] = []
        self._board = Board(np.zeros(Board.nbytes(1), np.uint8), stages)
        self._thread = threading.Thread(target=self._work, name="rlcollect-worker", daemon=True)
        warnings.showwarning = self._note
        self._thread.start()

    # --- in the event loop ---

    @ray.method(num_returns=2)
    async def do(self, place: int, request: bytes, attached: Sequence[Any]) -> tuple[Answer, Any]:
        """Has a request handled.

        Args:
            place: how many were sent before; Ray does not say that they come in order.
            request: what, pickled.
            attached: what goes with it.

        Returns:
            How many answers there were before, with the reply and a sign of life, pickled; and what comes beside.
        """
        self._loop = asyncio.get_running_loop()
        waiting = self._early[place] = _Waiting(unpacked(request), attached, self._loop.create_future())
        with self._something:
            while self._place in self._early:
                self._take_in(self._early.pop(self._place))
                self._place += 1
            self._something.notify()
        return await waiting.answer

    def _take_in(self, waiting: _Waiting) -> None:
        if waiting.request.is_news:
            self._replace_news()
        self._waiting.append(waiting)

    def _replace_news(self) -> None:
        """News that nobody took yet are made up for by those that come."""
        for old in [each for each in self._waiting if each.request.is_news]:
            self._waiting.remove(old)
            old.answer.set_result(self._packed(Reply(old.request.id, self._worker, None, None)))

    async def stop(self, number: int) -> None:
        """What has this number, or a lower one, may end early."""
        self._board.stop(0, number)

    async def pulse(self) -> Pulse:
        """What it is doing."""
        return self._pulse()

    async def live(self) -> None:
        """Never ends by itself: who waits for it sees that the actor is gone."""
        await asyncio.get_running_loop().create_future()

    async def leave(self) -> None:
        """Closes what is held, when what is under way is done; nothing more is handled."""
        with self._something:
            self._is_leaving = True
            self._something.notify()
        await asyncio.to_thread(self._thread.join)

    def _pulse(self) -> Pulse:
        board = self._board
        now = time.monotonic()
        return Pulse(board.stage(0), board.told(0), now, now - board.beat(0), board.count(0), self._node)

    def _packed(self, reply: Reply, beside: Any = None) -> tuple[Answer, Any]:
        """A reply with a sign of life, and what comes beside it. Answers may overtake others: each has a place."""
        data = cloudpickle.dumps((reply, self._pulse()))
        return (next(self._answers), data), beside

    # --- in the thread ---

    def _work(self) -> None:
        row = self._board.row(0)
        try:
            handler = self._make(self._worker, row)
        except BaseException as error:  # it is told to whoever asks something
            self._refuse(Failure.of(error, self._worker))
            return
        try:
            while not handler.is_over and (waiting := self._next()) is not None:
                self._answer(waiting, self._handled(handler, waiting))
        finally:
            handler.close()

    def _next(self) -> _Waiting | None:
        """The one to handle: the first that does not wait for its turn, else the first. None: no more is."""
        with self._something:
            self._something.wait_for(lambda: self._waiting or self._is_leaving)
            if self._is_leaving:
                return None
            chosen = next((each for each in self._waiting if not each.request.in_turn), self._waiting[0])
            self._waiting.remove(chosen)
            return chosen

    def _handled(self, handler: Handler, waiting: _Waiting) -> tuple[Answer, Any]:
        request = waiting.request
        try:
            command = unpacked(request.body)
            value, beside = None, None
            if command is None:
                self._withdraw(handler, request.id)
            else:
                value = handler.handle(command, waiting.attached)
            if isinstance(value, Beside):
                value, beside = value.value, value.data
            return self._packed(Reply(request.id, self._worker, value, None, self._taken()), beside)
        except BaseException as error:
            return self._packed(Reply(request.id, self._worker, None, Failure.of(error, self._worker), self._taken()))

    def _withdraw(self, handler: Handler, before: int) -> None:
        """Those that were waiting for their turn then are not to be done."""
        with self._something:
            withdrawn = [each for each in self._waiting if each.request.id < before and each.request.in_turn]
            for each in withdrawn:
                self._waiting.remove(each)
        for each in withdrawn:
            value = handler.withdraw(unpacked(each.request.body))
            self._answer(each, self._packed(Reply(each.request.id, self._worker, value, None)))

    def _answer(self, waiting: _Waiting, answer: tuple[Answer, Any]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(waiting.answer.set_result, answer)

    def _refuse(self, failure: Failure) -> None:
        """Nothing can be handled: whoever asks hears why."""
        while (waiting := self._next()) is not None:
            self._answer(waiting, self._packed(Reply(waiting.request.id, self._worker, None, failure, self._taken())))

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        self._notices.append(Notice(category, str(message)))

    def _taken(self) -> tuple[Notice, ...]:
        taken, self._notices = tuple(self._notices), []
        return taken
