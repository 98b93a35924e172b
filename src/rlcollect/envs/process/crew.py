"""The workers of a vector environment as it has them: asks for steps, sends commands, hears what they say.

Whatever is broken off, by a time limit or a Ctrl-C, is as it was, and goes on at the next call: what is asked for, what
has failed and what is being replaced is noted here, and nowhere on the stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcollect.envs.process.memory import Memory, Plan
from rlcollect.envs.process.messages import Attach, Attend, Build, Command, Facts, Fetch, Give, Reset, Started
from rlcollect.errors import OptionError, SpaceError, WorkerDied, WorkerTimeout
from rlcollect.failures import OnceEach, warn
from rlcollect.processes.arena import Arena
from rlcollect.processes.channel import Held
from rlcollect.processes.lockstep import Leader, turns
from rlcollect.processes.messages import Reply
from rlcollect.processes.pool import ProcessPool
from rlcollect.processes.restarts import Restarts
from rlcollect.seeds import Seed, lane_seed

__all__ = ["Crew", "Limits", "raised"]

LAST = 2**62  # a number that no command gets
FLUSH = 0.005  # seconds between two looks while a worker takes something long
USUAL = -1.0  # the time limit of all waits
LATE_HINT = "Nothing is lost: wait again (step_wait, recv) or reset, allow more (timeout=), or close it."
BROKEN_HINT = "It counts as broken down (worker_timeout=)."
START_HINT = "Allow more time (start_timeout=), or look at what it does there."


@dataclass(frozen=True)
class Limits:
    """Seconds; None: any.

    Attributes:
        start: for making environments.
        wait: for all else that the program waits for.
        worker: for a worker to answer, after which it counts as broken down.
    """

    start: float | None
    wait: float | None
    worker: float | None


class Crew:
    """Asks workers for steps and for all else.

    Attributes:
        is_over: whether something failed that is not made good.
        replaced: workers that were replaced, and how their lanes began; until that was told.
        restarts: how often that was done.
        seed: the last that the user gave.
        options: for the resets of those that are replaced now.

    Args:
        pool: the workers.
        builds: what each makes.
        limits: on time.
        restarts: which may be replaced; None: none.
    """

    def __init__(self, pool: ProcessPool, builds: Sequence[Build], limits: Limits, restarts: Restarts | None) -> None:
        self.is_over = False
        self.replaced: dict[int, Sequence[Started]] = {}
        self.restarts = Restarts(len(builds), 0) if restarts is None else restarts
        self.seed: Seed | None = None
        self.options: Any = None
        self._may_replace = restarts is not None
        self._pool = pool
        self._builds = builds
        self._limits = limits
        self._owner = os.getpid()
        self._failed: dict[int, BaseException] = {}
        self._replacing: dict[int, tuple[int, float]] = {}  # the command that is the last of it, and its deadline
        self._open: dict[
            int, tuple[int, bool]
        ] = {}  # commands without a reply: whose, and whether a failure is its end
        self._awaited: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._attending: list[int | None] = [None] * len(builds)
        self._asked_at = [0.0] * len(builds)
        self._fetched: dict[int, tuple[int, bytes]] = {}
        self._warnings = OnceEach()
        self._leader: Leader | None = None
        self._arena: Arena | None = None
        self._memory: Memory | None = None
        self._plan: Plan | None = None

    # --- starting and ending ---

    def build(self) -> list[Facts]:
        """Has environments made.

        Raises:
            What was raised there; WorkerDied, WorkerTimeout.
        """
        answers = self.ask(dict(enumerate(self._builds)), limit=self._limits.start, hint=START_HINT, is_vital=True)
        return list(raised(answers).values())

    def attach(self, plan: Plan) -> Memory:
        """Gives all workers their memory.

        Raises:
            SharedMemoryError: there is too little.
        """
        self._plan, self._arena = plan, Arena(plan.nbytes)
        self._memory = Memory(plan, self._arena.buffer)
        self._leader = Leader(self._memory.words, turns(len(self._builds)))
        for worker in range(len(self._builds)):
            self._send_memory(worker)
        self._leader.watch(self._pool.watched())
        return self._memory

    def _send_memory(self, worker: int) -> int:
        assert self._leader is not None
        assert self._arena is not None
        assert self._plan is not None
        stop = self._builds[worker].first + len(self._builds[worker].makers)
        with self._leader.new_bell(worker) as bell:
            command = Attach(self._plan, stop, turns(len(self._builds)))
            return self._submit(worker, command, is_vital=True, attached=(self._arena.fd, bell.fileno()))

    def close(self, seconds: float) -> None:
        """Ends the workers. Safe to repeat.

        Args:
            seconds: that they may take to finish what they are doing and close their environments.
        """
        if os.getpid() == self._owner:  # in a copy of the program they are not its own
            for worker in range(len(self._builds)):
                self._pool.board.stop(worker, LAST)
                if self._leader is not None:
                    self._leader.ring(worker)
        try:
            self._pool.shutdown(seconds)
        finally:
            if self._leader is not None:
                self._leader.close()
            if self._arena is not None:
                self._arena.let_go()
            self._leader = self._memory = None

    # --- steps ---

    def begin(self, workers: Iterable[int], number: int) -> None:
        """Asks for a step. Those whose lanes have begun anew without the user's knowing are not asked."""
        for worker in workers:
            if worker not in self.replaced and worker not in self._failed and worker not in self._replacing:
                self._ask(worker, number)

    def give(self, worker: int, actions: Sequence[Any]) -> None:
        """Sends the actions of the next step, by value."""
        if worker not in self._failed:
            self.leave([worker])
            self._submit(worker, Give(actions), is_vital=False)

    def _ask(self, worker: int, number: int) -> None:
        assert self._leader is not None
        if self._attending[worker] is None:
            with Held():
                command = self._pool.new_number()
                self._attending[worker] = command
                self._submit(worker, Attend(command, number - 1), is_vital=True, number=command)
        if self._leader.asked(worker) < number:
            if self._limits.worker is not None:
                self._asked_at[worker] = time.monotonic()
            self._leader.ask(worker, number)

    def deadline(self) -> float | None:
        """When a wait that begins now has taken too long."""
        return _later(self._limits.wait)

    def finish(self, workers: Sequence[int], number: int, deadline: float | None) -> None:
        """Waits until all have made a step, or were replaced.

        Args:
            workers: who.
            number: of the step.
            deadline: see above.

        Raises:
            WorkerTimeout: it took too long.
            WorkerDied, and what was raised in a worker.
        """
        for worker in workers:
            while not self._has_made(worker, number):
                if self._failed or self._replacing:
                    self._settle(deadline)
                else:
                    self._await_step(worker, number, deadline, workers)

    def _has_made(self, worker: int, number: int) -> bool:
        assert self._leader is not None
        if worker in self.replaced:
            return True
        if self._failed or self._replacing or not self._leader.has_answered(worker, number):
            return False
        assert self._plan is not None
        if self._leader.note(worker) > self._plan.page and self._fetched.get(worker, (0, b""))[0] != number:
            answer = self.ask({worker: Fetch()}, is_vital=False)[worker]
            if not isinstance(answer, bytes):
                return worker in self.replaced
            self._fetched[worker] = number, answer
        self.restarts.works(worker)
        return True

    def _await_step(self, worker: int, number: int, deadline: float | None, workers: Sequence[int]) -> None:
        assert self._leader is not None
        self._ask(worker, number)
        late = None if self._limits.worker is None else self._asked_at[worker] + self._limits.worker
        seconds = _until(deadline, late)
        if self._pool.is_behind(worker):
            seconds = FLUSH if seconds is None else min(seconds, FLUSH)
        if self._leader.wait(worker, number, seconds):
            return
        self._hear(0)
        if not self._leader.has_answered(worker, number) and not self._failed:
            if late is not None and time.monotonic() >= late:
                workers = [worker]
            lacking = [each for each in workers if not self._leader.has_answered(each, number)]
            self._check_late(lacking, deadline, late, self._limits.wait, LATE_HINT)

    def told(self, worker: int, number: int) -> bytes:
        """What it has to say about a step that it has made, packed; empty: nothing."""
        assert self._leader is not None
        assert self._memory is not None
        count = self._leader.note(worker)
        if count > self._memory.pages.shape[1]:
            return self._fetched[worker][1] if self._fetched[worker][0] == number else b""
        return self._memory.pages[worker, :count].tobytes()

    def leave(self, workers: Iterable[int]) -> None:
        """Has workers listen to commands again, after the step that they are making."""
        for worker in workers:
            if (number := self._attending[worker]) is not None:
                self._pool.board.stop(worker, number)
                self._attending[worker] = None
                if self._leader is not None:
                    self._leader.ring(worker)

    # --- commands ---

    def ask(
        self, commands: Mapping[int, Command], *, is_vital: bool, limit: float | None = USUAL, hint: str = LATE_HINT
    ) -> dict[int, Any]:
        """Has commands done.

        Args:
            commands: by worker.
            is_vital: whether a worker that fails at it has broken down.
            limit: seconds, in the place of the usual ones.
            hint: what to do when it took too long.

        Returns:
            What came of each: the answer, or the exception.

        Raises:
            WorkerTimeout: it took too long.
            WorkerDied, and what was raised in a worker, where it is not to be replaced.
        """
        is_usual = limit == USUAL
        limit = self._limits.wait if is_usual else limit
        deadline = _later(limit)
        late = _later(self._limits.worker) if is_usual and is_vital else None
        self._settle(deadline)
        ids: dict[int, int] = {}
        try:
            self.leave(commands)
            for worker, command in commands.items():
                with Held():
                    number = self._pool.new_number()
                    ids[number] = worker
                    self._awaited.add(number)
                    self._submit(worker, command, is_vital=is_vital, number=number)
            while lacking := [worker for number, worker in ids.items() if number not in self._answers]:
                if not self._hear(_until(deadline, late)) and not self._failed:
                    self._check_late(lacking, deadline, late, limit, hint)
                self._settle(deadline)
            return {worker: self._answers[number] for number, worker in ids.items()}
        finally:
            self._awaited.difference_update(ids)
            for number in ids:
                self._answers.pop(number, None)

    def _check_late(
        self, workers: Sequence[int], deadline: float | None, late: float | None, limit: float | None, hint: str
    ) -> None:
        now = time.monotonic()
        if late is not None and now >= late:
            for worker in workers:
                self._fail(worker, self._late(self._limits.worker, [worker], BROKEN_HINT))
        elif deadline is not None and now >= deadline:
            raise self._late(limit, workers, hint)

    def _submit(
        self,
        worker: int,
        command: Command,
        *,
        is_vital: bool,
        attached: Sequence[int] = (),
        number: int | None = None,
    ) -> int:
        with Held():
            number = self._pool.new_number() if number is None else number
            self._open[number] = worker, is_vital
            try:
                self._pool.submit(worker, command, attached=attached, number=number)
            except WorkerDied as error:
                self._fail(worker, error)
            except OptionError:
                del self._open[number]
                raise
        return number

    # --- replies ---

    def _hear(self, seconds: float | None) -> bool:
        """Whether somebody said something."""
        try:
            replies = self._pool.ready(seconds)
        except WorkerDied as error:
            self._fail(error.worker, error)
            return True
        with Held():
            for reply in replies:
                self._take(reply)
            self._pool.done()
        for reply in replies:
            for notice in reply.notices:
                self._warnings.warn(f"worker {reply.worker}: {notice.text}", notice.category)
        return bool(replies)

    def _take(self, reply: Reply) -> None:
        worker, is_vital = self._open.pop(reply.id, (reply.worker, None))
        if is_vital is None:  # of a process that was replaced
            return
        value: Any = reply.value if reply.failure is None else reply.failure.raised()
        if reply.id in self._awaited:
            self._answers[reply.id] = value
        if self._attending[worker] == reply.id:
            self._attending[worker] = None
        if reply.failure is not None and is_vital and self._is_end(worker, value):
            self._fail(worker, value)
        elif self._replacing.get(worker, (0, 0.0))[0] == reply.id:
            del self._replacing[worker]
            self.replaced[worker] = value

    def _is_end(self, worker: int, error: BaseException) -> bool:
        return worker in self._replacing or not isinstance(error, OptionError | SpaceError)

    # --- failures ---

    def _fail(self, worker: int, error: BaseException) -> None:
        """A worker has broken down: it does nothing of what it was asked for."""
        if worker in self._failed:
            return
        self._failed[worker] = error
        self.restarts.note(worker, error)
        self._attending[worker] = None
        self._replacing.pop(worker, None)
        self.replaced.pop(worker, None)
        for number in [number for number, (whose, _) in self._open.items() if whose == worker]:
            del self._open[number]
            if number in self._awaited:
                self._answers[number] = error

    def _settle(self, deadline: float | None) -> None:
        """Makes good what has failed.

        Raises:
            WorkerTimeout: it takes too long.
            What has failed, if that cannot be.
        """
        while self._failed or self._replacing:
            for worker, error in self._failed.items():
                if not self._may_replace:
                    self.is_over = True
                    raise error
                if self.restarts.is_over(worker):
                    self.is_over = True
                    raise self.restarts.last(worker)
            if self._failed:
                self._replace_failed(deadline)
            else:
                self._await_replacements(deadline)

    def _replace_failed(self, deadline: float | None) -> None:
        pause = max(self.restarts.pause(worker) for worker in self._failed)
        if deadline is not None and deadline - time.monotonic() < pause:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise self._late(self._limits.wait, list(self._failed), LATE_HINT)
        time.sleep(max(0.0, pause))
        for worker in list(self._failed):
            with Held():  # a Ctrl-C comes when it is done
                warning = self._replace(worker)
            warn(warning)

    def _replace(self, worker: int) -> Warning:
        try:
            self._pool.restart(worker)
            self.restarts.count(worker)
            warning = self.restarts.warning(worker)
            del self._failed[worker]
            self._begin_anew(worker, self.restarts.counts[worker])
        except BaseException:  # there is nobody there now
            self.is_over = True
            raise
        return warning

    def _begin_anew(self, worker: int, generation: int) -> None:
        assert self._leader is not None
        build = self._builds[worker]
        build = Build(build.makers, build.first, build.seed, generation)
        self._submit(worker, build, is_vital=True)
        self._send_memory(worker)
        seeds = {
            lane: None if self.seed is None else lane_seed(self.seed, worker, lane, generation)
            for lane in range(len(build.makers))
        }
        last = self._submit(worker, Reset(seeds, self.options, self.seed, generation), is_vital=True)
        if worker not in self._failed:
            seconds = self._limits.start
            self._replacing[worker] = last, float("inf") if seconds is None else time.monotonic() + seconds
        self._leader.watch(self._pool.watched())

    def _await_replacements(self, deadline: float | None) -> None:
        own = min(end for _, end in self._replacing.values())
        end = own if deadline is None else min(own, deadline)
        if self._hear(None if end == float("inf") else max(0.0, end - time.monotonic())):
            return
        now = time.monotonic()
        for worker in [worker for worker, (_, end) in self._replacing.items() if now >= end]:
            self._fail(worker, self._late(self._limits.start, [worker], START_HINT))
        if deadline is not None and now >= deadline:
            raise self._late(self._limits.wait, list(self._replacing), LATE_HINT)

    def _late(self, seconds: float | None, workers: Sequence[int], hint: str) -> WorkerTimeout:
        told = "; ".join(self._pool.told(worker) for worker in workers)
        return WorkerTimeout(f"{seconds} s were not enough for {told}. {hint}", workers=tuple(workers))


def raised(answers: Mapping[int, Any]) -> Mapping[int, Any]:
    """The answers, if none is an exception; else raises the first."""
    for answer in answers.values():
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _later(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _until(*ends: float | None) -> float | None:
    """Seconds until the first of these times; None: there is none."""
    return max(0.0, min(there) - time.monotonic()) if (there := [end for end in ends if end is not None]) else None
