"""The program's side of its worker processes: starts them, sends requests, gathers replies, notices deaths, ends them.

Every wait wakes on a reply, on a death, or when its time is up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from rlcollect.errors import ClosedError, WorkerDied
from rlcollect.processes.arena import Arena
from rlcollect.processes.board import Board, Row
from rlcollect.processes.channel import Held, Outbox
from rlcollect.processes.launch import launch
from rlcollect.processes.messages import Reply, Request
from rlcollect.processes.serve import Handler, serve

__all__ = ["ProcessPool"]

ADVICE = (
    "The others are stopped. Look at its standard error for what native code wrote; run the same environment and "
    "policy in a Collector, which needs no process, to find out more."
)
LET_GO, TERMINATE, KILL = 0.5, 1.5, 1.0  # seconds that each way of ending a process is given
REPORTING = 5.0  # seconds that the server of processes may take to say how one has ended


class ProcessPool:
    """Worker processes. All are started at once, and each makes what handles its commands by itself.

    Attributes:
        board: what each is doing.
        is_spent: never by itself: a death is raised.

    Args:
        count: how many.
        make: a function of a module: from a worker's number and its row of the board to a `Handler`.
        method: how processes are started.
        stages: what workers may be doing.
        name: of the processes, with their number after it.
        preload: a module for the server of processes to import.
        advice: what to do when one has died, for the error.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int, Row], Handler],
        *,
        method: str,
        stages: Sequence[str],
        name: str = "worker",
        preload: str | None = None,
        advice: str = ADVICE,
    ) -> None:
        self.is_spent = False
        self._make = make
        self._advice = advice
        self._method = method
        self._stages = tuple(stages)
        self._name = name
        self._preload = preload
        self._processes: list[BaseProcess] = []
        self._channels: list[Outbox] = []
        self._numbers = itertools.count(1)
        self._is_open = True
        self._owner = os.getpid()
        self._gone: list[int] = []
        self._retired = set[int]()
        self._heard: list[Reply] = []
        self._page = Arena(Board.nbytes(count))
        self.board = Board(self._page.buffer, stages)
        try:
            with Held():  # what is made has its owner before a Ctrl-C comes
                for worker in range(count):
                    process, channel = self._launched(worker)
                    self._processes.append(process)
                    self._channels.append(channel)
                for worker in range(count):
                    self._welcome(worker)
        except BaseException:
            self.shutdown()
            raise

    def _launched(self, worker: int) -> tuple[BaseProcess, Outbox]:
        here, there = multiprocessing.Pipe(duplex=True)
        with there:
            process = launch(
                self._method,
                serve,
                there,
                (worker, self._stages, self._make),
                name=f"{self._name}-{worker}",
                preload=self._preload,
                inherited=[*[channel.let_go for channel in self._channels], here.close],
            )
        return process, Outbox(here)

    def _welcome(self, worker: int) -> None:
        self._sent(worker, self._page.nbytes, [self._page.fd])

    def __len__(self) -> int:
        return len(self._processes)

    def restart(self, worker: int) -> None:
        """Puts a new process in the place of one: what the old one was doing, or had been sent, is lost."""
        self.retire(worker)
        self.board.begin_anew(worker)
        process, channel = self._launched(worker)
        with Held(), channel.lock:  # the first that it hears of is this
            if not self._is_open:  # another thread has shut it down meanwhile
                channel.close()
                self._end([process], LET_GO)
                raise ClosedError("It was shut down while a worker was started.")
            self._processes[worker], self._channels[worker] = process, channel
            self._retired.discard(worker)
            self._welcome(worker)

    def retire(self, worker: int) -> None:
        """Ends one worker, which is then neither heard nor waited for. Safe to call again."""
        if worker not in self._retired:
            self._retired.add(worker)
            self._gone = [gone for gone in self._gone if gone != worker]
            self._channels[worker].close()
            self._end([self._processes[worker]], LET_GO)

    def kept(self, worker: int, number: int) -> int:
        """How many steps of what this command asked for stand in shared memory, whatever became of the worker."""
        return self.board.kept(worker, number)

    def count(self, worker: int) -> int:
        """How much a worker said to have done."""
        return self.board.count(worker)

    def last_sign(self, worker: int) -> float:
        """When a worker was last heard of, by the machine's monotonic clock."""
        return self.board.beat(worker)

    def new_number(self) -> int:
        """A number for a command."""
        return next(self._numbers)

    def submit(
        self,
        worker: int,
        command: Any,
        *,
        in_turn: bool = True,
        attached: Sequence[int] = (),
        number: int | None = None,
    ) -> int:
        """Sends a command; its reply has the number that is returned.

        Args:
            worker: who is to do it.
            command: what; by value, unless it has `is_plain`. One that has `is_news`, and that the worker has not begun
                to take when the next comes, is not sent, and gets no reply.
            in_turn: after those that were sent before; else as soon as the one under way is done.
            attached: file descriptors that go with it.
            number: that it gets; None: a new one.

        Raises:
            OptionError: it cannot be pickled. Nothing was sent.
            WorkerDied: nobody is there.
        """
        number = self.new_number() if number is None else number
        request = Request.of(number, command, in_turn=in_turn, descriptors=len(attached))
        self._sent(worker, request, attached, is_news=request.is_news and not attached)
        return number

    def stop(self, worker: int, number: int) -> None:
        """The worker may end early what has this number, or a lower one; its row of the board says so."""
        self.board.stop(worker, number)

    def withdraw(self, worker: int) -> int:
        """The commands that wait for their turn there are not to be done; each gets its reply nevertheless."""
        return self.submit(worker, None, in_turn=False)

    def ready(self, timeout: float | None) -> list[Reply]:
        """The replies that are there; waits for one, if there is none.

        Args:
            timeout: seconds; None: for as long as the workers live. After it: no replies.

        Raises:
            WorkerDied: a worker is gone.
        """
        try:
            return self._ready(timeout)
        except (OSError, ValueError) as error:
            if self._is_open:
                raise
            raise ClosedError("It was shut down while its workers were waited for.") from error

    def _ready(self, timeout: float | None) -> list[Reply]:
        if self._heard:
            return self._heard
        if self._gone:
            raise self._died(self._gone[0])
        deadline = None if timeout is None else time.monotonic() + timeout
        speaking, ended = self._awake(timeout)
        while not (speaking or ended) and (deadline is None or time.monotonic() < deadline):  # something was sent on
            speaking, ended = self._awake(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with Held():  # what is received is kept
            heard = {worker for worker in speaking if self._received(worker)}
        gone = [worker for worker in speaking if worker not in heard]
        gone += [worker for worker in ended if worker not in speaking]
        if gone and not heard:
            raise self._died(gone[0])
        self._gone = self._gone or gone  # when what the others had to say is heard
        return self._heard

    def done(self) -> None:
        """What `ready` gave was taken; until then it gives the same."""
        self._heard = []

    def _awake(self, timeout: float | None) -> tuple[list[int], list[int]]:
        """Workers that have said something, and workers that have ended; sends what waits to be sent meanwhile."""
        speak, take, end = set[int](), set[int](), set[int]()
        with selectors.PollSelector() as selector:
            for worker, (channel, process) in enumerate(zip(self._channels, self._processes, strict=True)):
                if worker in self._retired:
                    continue
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.is_behind else 0)
                selector.register(channel.fileno(), events, (speak, worker))
                selector.register(process.sentinel, selectors.EVENT_READ, (end, worker))
            for key, events in selector.select(timeout):
                said, worker = key.data
                if events & selectors.EVENT_READ:
                    said.add(worker)
                if events & selectors.EVENT_WRITE:
                    take.add(worker)
        for worker in take:
            self._flushed(worker)
        return sorted(speak), sorted(end)

    def _flushed(self, worker: int) -> None:
        try:
            self._channels[worker].flush()
        except ConnectionError:
            return  # its end is noticed where it is looked for

    def watched(self) -> list[int]:
        """Descriptors of which one becomes readable when a worker has said something, or has ended."""
        return [*(channel.fileno() for channel in self._channels), *(process.sentinel for process in self._processes)]

    def is_behind(self, worker: int) -> bool:
        """Whether something that was sent to a worker waits for it to take more; `ready` sends it on."""
        return self._channels[worker].is_behind

    def told(self, worker: int) -> str:
        """What a worker is doing, in words."""
        return f"worker {worker} ({self.board.told(worker)})"

    def shutdown(self, timeout: float = LET_GO) -> None:
        """Ends the workers: they close what they hold; those that do not are terminated, then killed. Safe to repeat.

        Args:
            timeout: seconds that a worker may take for the command under way.
        """
        if not self._is_open:
            return
        if os.getpid() != self._owner:  # a copy, in a process that was forked from the program
            self._is_open = False
            for channel in self._channels:
                channel.let_go()
            return
        processes = [each for worker, each in enumerate(self._processes) if worker not in self._retired]
        try:
            with Held():  # a Ctrl-C leaves nothing half closed
                self._is_open = False
                for channel in self._channels:
                    channel.close()
        finally:
            try:
                self._end(processes, timeout)
            finally:
                with Held():
                    self._processes = []
                    self.board.let_go()
                    self._page.let_go()

    def _end(self, processes: Sequence[BaseProcess], timeout: float) -> None:
        """Ends processes whose pipes are closed."""
        try:
            _join(processes, timeout)  # they end when they look
            for process in _living(processes):
                process.terminate()
            _join(processes, TERMINATE)
        finally:  # a Ctrl-C here means at once
            for process in _living(processes):
                process.kill()
            _join(processes, KILL)
            for process in processes:
                if not process.is_alive():
                    process.close()

    def _sent(self, worker: int, message: Any, attached: Sequence[int], *, is_news: bool = False) -> None:
        channel = self._channels[worker]
        try:
            with Held(), channel.lock:
                if not channel.is_open:
                    raise ClosedError(f"Worker {worker} was ended; start another in its place first.")
                if is_news:
                    channel.send_news(message)
                else:
                    channel.send(message)
                channel.send_descriptors(attached)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._died(worker) from error

    def _received(self, worker: int) -> bool:
        """Whether it had something to say."""
        try:
            self._heard.append(self._channels[worker].receive())
        except (EOFError, ConnectionError):
            return False
        return True

    def _died(self, worker: int) -> WorkerDied:
        process, stage = self._processes[worker], self.board.stage(worker)
        try:
            process.join(REPORTING)
            code = process.exitcode
        except ValueError:  # another thread has put it away by now
            code = None
        # it may end by itself when it is told to, with the code that shells give to signals
        number = -code if code is not None and code < 0 else (code or 0) - 128
        if code is None:
            how = "ended, nobody knows how"
        elif number in signal.valid_signals():
            how = f"was killed by {signal.Signals(number).name}"
            if number == signal.SIGKILL:
                how += " (by somebody, or by the system for lack of memory)"
        else:
            how = f"ended by itself with exit code {code}, without an exception"
        return WorkerDied(
            f"worker {worker} {how} while {stage}. {self._advice}",
            worker=worker,
            exitcode=code,
            stage=stage,
        )


def _living(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [process for process in processes if process.is_alive()]


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in _living(processes):
        process.join(max(0.0, deadline - time.monotonic()))
