"""A thread that makes one batch after the other, and others that want to talk to the collector meanwhile.

The thread has the collector for one batch at a time. Whoever else wants it says so by a `Turn`, has it when that batch
is made (or as far as it can be broken off without loss), and gives it back. Knows nothing of batches.

A Ctrl-C comes into whichever call of the main thread it likes. So nobody waits for a condition here, whose lock could
stay locked; what is noted under the lock is noted whole; and a turn whose owner was broken off counts as long as it is
referred to, and no longer.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from rlcollect.failures import warn
from rlcollect.processes.channel import Held

__all__ = ["Background", "Pause", "Turn"]

PATIENCE = 5.0  # seconds that the end waits for a step under way in this process
A_WHILE = 0.2  # seconds
GLANCE = 0.001  # seconds between two looks


class Background:
    """Collection in a thread.

    Attributes:
        is_paused: whether no batch is to be begun.
        is_over: whether the thread has ended, or is about to.

    Args:
        step: makes a batch; whether there are more to come. Called as long as its owner lives.
        failed: told what it raised.
    """

    def __init__(
        self, step: weakref.WeakMethod[Callable[[], bool]], failed: weakref.WeakMethod[Callable[[BaseException], None]]
    ) -> None:
        self.is_paused = False
        self.is_over = False
        self._step = step
        self._failed = failed
        self._lock = threading.Lock()  # of those that follow; nobody waits with it
        self._is_busy = False  # whether a batch is being made
        self._turns = weakref.WeakSet[Turn]()  # of all others that want the collector, or have it
        self._is_ending = False
        self._has_failed = False
        self._is_left = False  # to itself: it was waited for in vain
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="rlcollect-collect", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether who asks is the thread itself."""
        return threading.current_thread() is self._thread

    @property
    def is_ending(self) -> bool:
        """Whether the batch under way will not be wanted."""
        return self._is_ending

    def is_to_leave(self) -> bool:
        """Whether the thread, if it is who asks, is to break off what it waits for, if that loses nothing."""
        return self.is_mine and (len(self._turns) > 0 or self._is_ending or self.is_paused)

    # --- the thread ---

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._begins():
                try:
                    goes_on = self._made()
                finally:
                    self._is_busy = False
                if not goes_on:
                    return
        finally:
            self.is_over = True

    def _begins(self) -> bool:
        """Waits for its turn; whether there is one."""
        while not self._is_ending:
            with self._lock:
                if not (len(self._turns) or self.is_paused):
                    self._is_busy = True
                    return True
            time.sleep(GLANCE)
        return False

    def _made(self) -> bool:
        step = self._step()
        if step is None:  # its owner is gone
            return False
        try:
            return step()
        except BaseException as error:
            self.fail(error)
            return False

    def fail(self, error: BaseException) -> None:
        """Tells what the thread raised, once; not what comes of a batch that nobody wants any more."""
        if not self._has_failed and not self._is_ending and (failed := self._failed()) is not None:
            self._has_failed = True
            failed(error)

    # --- the others ---

    def enter(self, turn: Turn) -> None:
        """Waits until the collector is free, and has it: one thread at a time, as often as it likes."""
        if self.is_mine:
            return
        try:
            with Held(), self._lock:
                self._turns.add(turn)
            while not self._has_got(turn):
                time.sleep(GLANCE)
        except BaseException:
            self.leave(turn)
            raise

    def _has_got(self, turn: Turn) -> bool:
        with Held(), self._lock:
            is_busy = self._is_busy and not self._is_left
            turn.has_it = not is_busy and all(other.thread is turn.thread for other in self._turns if other.has_it)
            return turn.has_it

    def leave(self, turn: Turn) -> None:
        """Gives it back, or wants it no more."""
        with Held(), self._lock:
            turn.has_it = False
            self._turns.discard(turn)

    def pause(self) -> bool:
        """No batch is begun from now on, and none is under way when this returns; whether it was not so before."""
        was_paused, self.is_paused = self.is_paused, True
        with Turn(self):
            return not was_paused

    def resume(self) -> None:
        """Batches are made again."""
        self.is_paused = False

    def wait(self, is_there: Callable[[], bool], deadline: float | None) -> bool:
        """Waits a while for something to be there; whether it is. Also returns when nothing more can come."""
        end = min(time.monotonic() + A_WHILE, deadline or math.inf)
        while not is_there():
            if time.monotonic() >= end or self.is_over or self.is_paused:
                return is_there()
            time.sleep(GLANCE)
        return True

    def end(self) -> None:
        """Ends the thread, when the batch under way is made or broken off. Safe to call again."""
        self._is_ending = True
        if self.is_mine or self._is_left or not self._thread.is_alive():
            return
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._is_left = True
            warn(
                f"A step of an environment or policy has not come back in {PATIENCE} s, in the thread that collects in "
                "the background: it is left to itself, and its environments may be closed under it."
            )


class Turn:
    """Around what talks to the workers: waits for the background's batch, if there is one.

    Attributes:
        thread: whose it is.
        has_it: whether the collector is this one's now.

    Args:
        background: the one there is; None: nobody else has the collector.
    """

    def __init__(self, background: Background | None) -> None:
        self.thread = threading.current_thread()
        self.has_it = False
        self._background = background

    def __enter__(self) -> Self:
        if self._background is not None:
            self._background.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._background is not None:
            self._background.leave(self)


class Pause:
    """What `pause` returns: at the end of `with`, collection goes on.

    Args:
        resume: has it go on; None: it had been paused before.
    """

    def __init__(self, resume: Callable[[], Any] | None) -> None:
        self._resume = resume

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._resume is not None:
            self._resume()
