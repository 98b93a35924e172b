"""Steps that a program and its workers take together, without a message: numbers in shared memory, and bells.

The program asks a worker for its step k by writing k; the worker answers by writing k where it alone writes. Whoever
waits looks at the other's number for a while, then says that it sleeps and waits for a bell, which the other rings only
for those who sleep. What a step is, and where what it needs and makes lies, is not known here.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlcollect.processes.channel import Held

__all__ = ["WORDS", "Follower", "Leader", "turns"]

Array = np.ndarray[Any, Any]
WORDS = 16  # int64 a worker: the program's line, then its own; each is one cache line with one writer
LINE = 8
ASKED, WAITS = 0, 1  # of the program's line
ANSWERED, SLEEPS, NOTE = 0, 1, 2  # of the worker's

# A writer looks at the other's sleep word only after a fence, and a sleeper at the number likewise: without it, a store
# and the load of another word that follows it may change places (on x86 too), and both sides could miss each other.
# Should a bell be lost all the same, the sleeper looks again after LOOK seconds. Once is enough: what was written
# before is seen by then, and what is written later finds the sleep word set.
LOOK = 0.02
NAP = 0.5  # seconds; of any later look
DRAINED = 4096  # bytes
let_others = getattr(os, "sched_yield", lambda: None)


def turns(workers: int) -> int:
    """How often each side should look before it sleeps, if so many workers and the program take steps together.

    Measured on two cores, the time of a step. One worker, 60 to 800 us of work: 15 to 70 us beside the work with no
    look, 4 to 25 us with 500, and 40 to 140 us if nobody lets others have the processor between two looks. Two workers,
    so that the program has no core of its own, CartPole, 8 lanes each: 240 to 280 us with no look, 170 to 200 with 100,
    150 to 170 with 300, 500 or 1000; it takes both sides. Four workers of 4 lanes: 400 us with no look, 300 with 100,
    240 with 500; but where lanes work longer (50 us), those that look are in the way: 1.2, 1.1 and 1.4 to 1.7 ms.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers <= cores:
        return 500
    return 100 if workers <= 2 * cores else 0


class _Side:
    def __init__(self, mine: Array, others: Array) -> None:
        self._mine, self._others = mine.data, others.data  # of all ways to read a word the quickest
        self._fence = threading.Lock()

    def _in_order(self) -> None:
        with self._fence:
            pass


class Follower(_Side):
    """A worker's side. Its loop is `while follower.waits(is_over): ...; follower.answer()`.

    Args:
        words: int64 `[16]`, its own.
        bell: a descriptor of a socket, which it takes over.
        looks: how often it looks before it sleeps.
    """

    def __init__(self, words: Array, bell: int, looks: int) -> None:
        super().__init__(words[LINE:], words[:LINE])
        self._bell = socket.socket(fileno=bell)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._looks = range(looks)
        self._done = 0

    def resume(self, since: int) -> None:
        """Steps up to this one are not to be made any more, whether they were or not."""
        self._done = max(self._done, since)

    def waits(self, is_over: Callable[[], bool]) -> bool:
        """Waits to be asked for another step.

        Args:
            is_over: whether none is to be made now, be it asked for; looked at when something is asked for, when it is
                rung for, and now and then.

        Returns:
            Whether there is one to be made.
        """
        words, done = self._others, self._done
        for _ in self._looks:
            if words[ASKED] > done:
                break
            let_others()
        else:
            self._sleep(is_over)
        self._in_order()
        return words[ASKED] > done and not is_over()

    def _sleep(self, is_over: Callable[[], bool]) -> None:
        words, seconds = self._others, LOOK
        self._mine[SLEEPS] = 1
        try:
            self._in_order()
            while words[ASKED] <= self._done and not is_over():
                if self._poll.poll(seconds * 1000) and not _drained(self._bell):
                    return  # nobody is there
                seconds = NAP
        finally:
            self._mine[SLEEPS] = 0

    def answer(self, note: int = 0) -> None:
        """The step that was asked for is made.

        Args:
            note: a number for the program.
        """
        self._done = self._others[ASKED]
        self._mine[NOTE] = note
        self._in_order()
        self._mine[ANSWERED] = self._done
        self._in_order()
        if self._others[WAITS]:
            _ring(self._bell)

    def close(self) -> None:
        """Safe to call again."""
        self._bell.close()


class Leader:
    """The program's side.

    Args:
        words: int64 `[workers, 16]`, zero.
        looks: how often it looks before it sleeps.
    """

    def __init__(self, words: Array, looks: int) -> None:
        self._lines = [_Line(each) for each in words]
        self._watched: Sequence[int] = ()
        self._looks = looks

    def new_bell(self, worker: int) -> socket.socket:
        """A new bell for a worker; what is returned is to be passed on to it, and closed here."""
        with Held():
            here, there = socket.socketpair()
            self._lines[worker].hang(here)
        return there

    def watch(self, descriptors: Sequence[int]) -> None:
        """From now on waits end, too, when one of these becomes readable."""
        self._watched = tuple(descriptors)
        for line in self._lines:
            line.poll = None

    def ask(self, worker: int, number: int) -> None:
        """Asks for a step. What it needs was written before.

        Args:
            worker: who is to make it.
            number: of the step: more than that of any before.
        """
        self._lines[worker].ask(number)

    def asked(self, worker: int) -> int:
        """The number of the last step that it was asked for."""
        return self._lines[worker].asked

    def ring(self, worker: int) -> None:
        """Has a worker look up, whatever for."""
        self._lines[worker].ring()

    def has_answered(self, worker: int, number: int) -> bool:
        """Whether the step is made; what it made can be read then."""
        return self._lines[worker].has_answered(number)

    def note(self, worker: int) -> int:
        """The number that came with the last answer."""
        return self._lines[worker].note

    def wait(self, worker: int, number: int, seconds: float | None) -> bool:
        """Waits for an answer, or until something that is watched has something to say.

        Args:
            worker: whose answer.
            number: of the step.
            seconds: at most; None: any.

        Returns:
            Whether the step is made.
        """
        line = self._lines[worker]
        return line.spin(number, self._looks) or line.sleep(number, seconds, self._watched)

    def close(self) -> None:
        """Safe to call again."""
        for line in self._lines:
            line.hang(None)


class _Line(_Side):
    """The program's side, of one worker."""

    def __init__(self, words: Array) -> None:
        super().__init__(words[:LINE], words[LINE:])
        self._bell: socket.socket | None = None
        self.poll: Any = None

    def hang(self, bell: socket.socket | None) -> None:
        if self._bell is not None:
            self._bell.close()
        self._bell, self.poll = bell, None

    @property
    def asked(self) -> int:
        return self._mine[ASKED]

    @property
    def note(self) -> int:
        return self._others[NOTE]

    def ask(self, number: int) -> None:
        self._in_order()
        self._mine[ASKED] = number
        self._in_order()
        if self._others[SLEEPS]:
            self.ring()

    def ring(self) -> None:
        if self._bell is not None:
            _ring(self._bell)

    def has_answered(self, number: int) -> bool:
        if self._others[ANSWERED] < number:
            return False
        self._in_order()
        return True

    def spin(self, number: int, looks: int) -> bool:
        words = self._others
        for _ in range(looks):
            if words[ANSWERED] >= number:
                break
            let_others()
        return self.has_answered(number)

    def sleep(self, number: int, seconds: float | None, watched: Sequence[int]) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        nap = LOOK
        self._mine[WAITS] = 1
        try:
            self._in_order()
            while not self.has_answered(number):
                left = NAP if deadline is None else max(0.0, deadline - time.monotonic())
                came = {fd for fd, _ in self._polled(watched).poll(min(nap, left) * 1000)}
                if self._bell is not None and self._bell.fileno() in came and _drained(self._bell):
                    came.remove(self._bell.fileno())
                if came or (deadline is not None and time.monotonic() >= deadline):
                    break
                nap = NAP
        finally:
            self._mine[WAITS] = 0
        return self.has_answered(number)

    def _polled(self, watched: Sequence[int]) -> Any:
        if self.poll is None:
            self.poll = select.poll()
            for fd in watched if self._bell is None else (self._bell.fileno(), *watched):
                self.poll.register(fd, select.POLLIN)
        return self.poll


def _ring(bell: socket.socket) -> None:
    try:
        bell.send(b"\0", socket.MSG_DONTWAIT)
    except (BlockingIOError, ConnectionError):
        return  # it rings already, or nobody is there, which is noticed where that is looked for


def _drained(bell: socket.socket) -> bool:
    """Whether somebody is there."""
    try:
        return bool(bell.recv(DRAINED, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
