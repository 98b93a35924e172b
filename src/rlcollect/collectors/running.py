"""Collection in the background, into a buffer, while the program learns from it."""

from __future__ import annotations

import asyncio
import time
import weakref

from rlcollect.collectors.background import Background, Pause
from rlcollect.collectors.crew import Left
from rlcollect.collectors.delivering import Delivering
from rlcollect.errors import OptionError, WorkerTimeout
from rlcollect.options.checks import positive, seconds
from rlcollect.processes.channel import Held

__all__ = ["Running"]


NOTHING_LOST = "Nothing is lost: wait again."
PATIENCE = 10.0  # seconds in which another thread may publish what all wait for


class Running(Delivering):
    """Can go on by itself."""

    def start(self) -> None:
        """Begins to collect into the `replay_buffer`, in the background, until `total_frames` or `shutdown`.

        All else can be called meanwhile: what talks to workers waits for the rollout under way, new weights do not. The
        policy that acts is a copy: `update_policy_weights_` gives it new weights. What fails there is raised by the
        next method that is called, whichever it is, and by `wait_for`.

        Worker processes make the frames, and a thread of the program asks them to. In a `Collector` that thread makes
        them: next to what the program computes, and its random draws are between those of the program, so the same
        seed does not give the same actions.

        Raises:
            OptionError: there is no `replay_buffer`; it is at it already; or, in one process, the policy cannot act in
                a thread, since it is called with a TensorDict, looks at the exploration type (as TorchRL's exploration
                modules do), or is a function that uses modules: an `AsyncCollector` can; or `update_at_each_batch`, by
                which the policy would be published in the midst of a step of its optimiser.
            PolicyError: in one process, the policy cannot be copied.
            ClosedError: after `shutdown`.
        """
        self._check_open()
        if self._sink.replay_buffer is None:
            raise OptionError("start() needs replay_buffer=, for frames to go to; without one, iterate over batches.")
        if self._is_started:
            raise OptionError("This collector collects in the background already; pause() and resume() it.")
        background = Background(weakref.WeakMethod(self._made_one), weakref.WeakMethod(self._failed))
        self._go_apart()
        with Held():
            self._crew.is_to_leave = background.is_to_leave
            self._ending.callback(background.end)
            self._background = background
            background.start()

    def _go_apart(self) -> None:
        """Makes ready for frames to be made beside what the program does."""

    @property
    def _is_started(self) -> bool:
        return self._background is not None and not self._background.is_over

    def _made_one(self) -> bool:
        """Makes a batch, in the background; whether there are more to come."""
        try:
            return self._given() is not None
        except Left:
            return True

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._crew.is_to_leave = None  # who waits from now on does so for all that comes

    def is_running(self) -> bool:
        """Whether frames are made in the background now: it was started, and is not paused, and not at its end."""
        self._tell_failure()
        if self._background is None or self.closed or self._has_all:
            return False
        return self._is_started and not self._background.is_paused

    def pause(self) -> Pause:
        """Has collection in the background rest: nothing is written to the buffer when this returns, until `resume`.

        Rollouts under way are finished, and counted. Also a context manager: `with collector.pause(): ...`.

        Raises:
            OptionError: it was not started.
            What collection failed by.
        """
        background = self._started_background("pause")
        was_running = background.pause()
        self._tell_failure()
        with self._turn():
            self._settle()
        return Pause(self.resume if was_running else None)

    def _settle(self) -> None:
        """What workers are making is finished, where they write it to the buffer themselves."""
        while self._counts_what_comes and (left := self._gather.outstanding):
            self._given(left)

    def resume(self) -> None:
        """Goes on after `pause`.

        Raises:
            OptionError: it was not started.
        """
        self._started_background("resume").resume()

    def _started_background(self, what: str) -> Background:
        self._check_open()
        if self._background is None:
            raise OptionError(f"{what}() is for collection in the background; call start() first.")
        return self._background

    def wait_for(
        self, *, frames: int | None = None, write_count: int | None = None, timeout: float | None = None
    ) -> None:
        """Waits until so much was collected in the background.

        Args:
            frames: `collected_frames`.
            write_count: that of the buffer, with what others have written to it.
            timeout: seconds; None: any.

        Raises:
            OptionError: neither is given, or both; it was not started, or is paused; more was asked for than will
                come; the buffer has no `write_count`.
            WorkerTimeout: it took longer; or, where there is no `timeout`, nothing can come for ten seconds since new
                weights are due (`max_policy_lag`). Nothing is lost by that.
            What collection failed by.
        """
        if (frames is None) is (write_count is None):
            raise OptionError("wait_for() takes frames= or write_count=, one of them.")
        if timeout is not None:
            seconds("timeout", timeout)
        name, goal = ("frames", frames) if write_count is None else ("write_count", write_count)
        goal = positive(name, goal)
        background = self._started_background("wait_for")
        if write_count is not None and not hasattr(self._sink.replay_buffer, "write_count"):
            raise OptionError(f"{self._sink.replay_buffer!r} has no write_count; wait for frames=.")
        deadline = None if timeout is None else time.monotonic() + timeout
        last = time.monotonic()  # when more could come
        while not background.wait(lambda: self._failure is not None or self._count_of(name) >= goal, deadline):
            self._tell_failure()
            self._check_coming(background, name, goal)
            now, why = time.monotonic(), self._gather.why_none
            last = last if why else now
            if deadline is not None and now >= deadline:
                told = f"{timeout} s were not enough for {name}={goal}; there are {self._count_of(name)}."
                raise WorkerTimeout(f"{told} {why or NOTHING_LOST}", workers=())
            if deadline is None and now - last >= PATIENCE:  # who is to publish may be who waits
                raise WorkerTimeout(f"No more frames come, and wait_for has no timeout=. {why}", workers=())
        self._tell_failure()

    def _check_coming(self, background: Background, name: str, goal: int) -> None:
        """Whether more is to come."""
        count = self._count_of(name)
        if self.closed or background.is_over:
            raise OptionError(f"Collection has ended with {name}={count}, and wait_for was asked for {goal}.")
        if background.is_paused:
            raise OptionError(
                f"Collection is paused at {name}={count}, and wait_for was asked for {goal}: resume() it."
            )

    def _count_of(self, name: str) -> int:
        if name == "frames":
            return self._frames
        buffer = self._sink.replay_buffer
        return int(buffer.write_count)

    async def async_shutdown(self, timeout: float | None = None) -> None:
        """`shutdown`, for programs with an event loop, which goes on meanwhile.

        Args:
            timeout: seconds after which it is not waited for any longer; it goes on by itself. None: any.

        Raises:
            TimeoutError: it took longer.
            What collection in the background failed by, if nobody was told yet.
        """
        ending = asyncio.get_running_loop().run_in_executor(None, self.shutdown)
        await asyncio.wait_for(asyncio.shield(ending), timeout)

    def _check_foreground(self, what: str) -> None:
        super()._check_foreground(what)
        if self._is_started:
            raise OptionError(f"{what} does not go with start(): batches are made in the background already.")
