"""A pool whose workers last: one that fails is put in the place of by another, and nobody who waits for it notices.

What a worker was asked and has not answered is sent to its successor, under the same number; a rollout that was under
way goes on after the steps that stand in shared memory. The rest of the house sees answers, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcollect.errors import BufferDied, ClosedError, OptionError, SpaceError, WorkerDied, WorkerError
from rlcollect.failures import warn
from rlcollect.interfaces import RevivablePool
from rlcollect.processes.channel import Held
from rlcollect.processes.crossing import packed
from rlcollect.processes.messages import Reply
from rlcollect.workers.answers import RECENT, Collected, Facts, Report, Saved
from rlcollect.workers.commands import Build, Close, Collect
from rlcollect.workers.revival import Revival, owed

__all__ = ["LastingPool"]


@dataclass(frozen=True)
class _Sent:
    """A command that waits for its answer."""

    worker: int
    command: Any
    in_turn: bool
    at: float


class LastingPool:
    """See `interfaces.WorkerPool`. Until it is given a `Revival` it only passes on.

    Attributes:
        restarts: how many times each worker was put in the place of another.
        dropped: frames that each lost by that, as far as is known.
        is_spent: whether a worker failed once too often.

    Args:
        pool: the workers.
    """

    def __init__(self, pool: RevivablePool) -> None:
        count = len(pool)
        self.restarts = [0] * count
        self.dropped = [0] * count
        self.is_spent = False
        self._pool = pool
        self._revival: Revival | None = None
        self._facts: Sequence[Facts] = ()
        self._sent: dict[int, _Sent] = {}
        self._heard: list[Reply] = []
        self._due: dict[int, float] = {}  # when those that failed are made anew
        self._past = [Report() for _ in range(count)]  # of those that each worker came after
        self._own = [Report() for _ in range(count)]
        self._rollouts = [0] * count  # of those that each worker came after, and of its own
        self._own_rollouts = [0] * count
        self._missed = [0] * count  # frames of `dropped` that may turn out to stand in a buffer
        self._cuts = [0] * count  # commands that begin new episodes, since it was heard of last

    def last_by(self, revival: Revival, facts: Sequence[Facts]) -> None:
        """From now on workers are made anew.

        Args:
            revival: how, and how often.
            facts: what they said of themselves.
        """
        self._revival = revival
        self._facts = facts
        self._own = [Report(warmup=each.warmup, numbers=(0,) * each.num_lanes) for each in facts]

    def add(self, facts: Sequence[Facts]) -> None:
        """There are more workers, which have said this of themselves."""
        count = len(facts)
        for counts in (self.restarts, self.dropped, self._rollouts, self._own_rollouts, self._missed, self._cuts):
            counts += [0] * count
        self._past += [Report() for _ in range(count)]
        self._own += [Report(warmup=each.warmup, numbers=(0,) * each.num_lanes) for each in facts]

    def __len__(self) -> int:
        return len(self._pool)

    # --- asking ---

    def new_number(self) -> int:
        """See `WorkerPool`."""
        return self._pool.new_number()

    def submit(
        self,
        worker: int,
        command: Any,
        *,
        in_turn: bool = True,
        attached: Sequence[Any] = (),
        number: int | None = None,
    ) -> int:
        """See `WorkerPool`. What has anything attached, and news, are not sent again: `Revival` has its own."""
        if isinstance(command, Close):  # the end
            self._revival = None
        if self._revival is None or worker >= len(self._own):  # it is not one of these yet
            return self._pool.submit(worker, command, in_turn=in_turn, attached=attached, number=number)
        number = self.new_number() if number is None else number
        self._revival.note(worker, command)
        self._cuts[worker] += getattr(command, "is_cut", False)
        with Held():
            if worker in self._due:
                packed(command, getattr(command, "title", "command"))  # whether it can be sent shows now
            else:
                self._send(number, worker, command, in_turn=in_turn, attached=attached)
            if not (attached or getattr(command, "is_news", False)):
                self._sent[number] = _Sent(worker, command, in_turn, time.monotonic())
        return number

    def _send(
        self, number: int, worker: int, command: Any, *, in_turn: bool = False, attached: Sequence[Any] = ()
    ) -> None:
        try:
            self._pool.submit(worker, command, in_turn=in_turn, attached=attached, number=number)
        except (WorkerDied, ClosedError):  # it is noticed where it is listened for, and sent again then
            return

    def withdraw(self, worker: int) -> int:
        """See `WorkerPool`."""
        return self.submit(worker, None, in_turn=False)

    def stop(self, worker: int, number: int) -> None:
        """See `WorkerPool`."""
        self._pool.stop(worker, number)

    # --- listening ---

    def ready(self, timeout: float | None) -> Sequence[Reply]:
        """See `WorkerPool`.

        Raises:
            What a worker failed by, where that was once too often.
        """
        if self._revival is None:
            return self._pool.ready(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._go_on()
        while not self._heard:
            self._listen(self._patience(deadline))
            self._go_on()
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._heard

    def done(self) -> None:
        """See `WorkerPool`."""
        self._heard = []
        self._pool.done()

    def _go_on(self) -> None:
        """Ends those that hang, and starts others in the place of those that failed."""
        if self._hung():
            while self._listen(0):  # what they have said, and whether they are there
                pass
            for worker in self._hung():
                text = f"{self._pool.told(worker)} gave no sign of life for too long (worker_timeout, start_timeout)"
                death = WorkerDied(f"{text}; it was ended.", worker=worker, exitcode=None, stage="hanging")
                self._failed(worker, death)
        self._start_due()

    def _listen(self, seconds: float | None) -> bool:
        """Hears what is said within this time; whether there was anything."""
        try:
            replies = self._pool.ready(seconds)
        except WorkerDied as error:
            if self._pool.is_spent or error.worker >= len(self._own):
                self.is_spent = self._pool.is_spent
                raise
            self._failed(error.worker, error)
            return True
        failures = []
        with Held():
            for reply in replies:
                try:
                    self._heard += self._sorted_in(reply)
                except BaseException as error:  # once too often; what the others say is heard all the same
                    failures.append(error)
            self._pool.done()
        if failures:
            raise failures[0]
        return bool(replies)

    def _sorted_in(self, reply: Reply) -> list[Reply]:
        """What others are to hear of it."""
        revival, sent = self._revival, self._sent.get(reply.id)
        assert revival is not None
        if sent is None:
            return [reply]
        if reply.failure is not None and isinstance(sent.command, Collect | Build):
            self._failed(reply.worker, reply.failure.raised())
            return []
        del self._sent[reply.id]
        if isinstance(sent.command, Build):
            revival.check(reply.worker, reply.value)
            return []
        return [replace(reply, value=self._as_of_all(reply.worker, reply.value))]

    def _as_of_all(self, worker: int, value: Any) -> Any:
        """What it says, as if it had done what those had that it came after."""
        if isinstance(value, Collected):
            assert self._revival is not None
            self._revival.note_progress(worker)
            self._own[worker], self._own_rollouts[worker] = value.report, value.number
            self._cuts[worker] = sum(getattr(each, "is_cut", False) for each in self._waiting_of(worker))
            self._note_found(worker, value.found)
            report = value.report.after(self._past[worker])
            return replace(value, report=report, number=value.number + self._rollouts[worker])
        if isinstance(value, Saved):
            state = _with_past(value.state, self._past[worker])
            return replace(value, state=state, rollouts=value.rollouts + self._rollouts[worker])
        if isinstance(value, Report):  # it has loaded a state
            self._own[worker], self._past[worker] = value, Report()
        return value

    def _note_found(self, worker: int, steps: int) -> None:
        """So many steps stand in a buffer that those had made whom it came after: they were not lost."""
        past, missed = self._past[worker], self._missed[worker]
        frames = min(missed, steps * self._facts[worker].num_lanes)
        self._past[worker] = replace(past, steps=past.steps + steps)
        self.dropped[worker] -= frames
        self._missed[worker] = missed - frames if steps else 0

    # --- failing, and being made anew ---

    def _failed(self, worker: int, cause: BaseException) -> None:
        """A worker failed: it will be made anew.

        Raises:
            The cause, when that was once too often, or nothing that another attempt would mend.
        """
        revival = self._revival
        assert revival is not None
        with Held():
            self._pool.retire(worker)  # what stands is known when nobody writes any more
            own = self._own[worker]
            _, under_way, kept = self._under_way(worker)
            new = 0 if under_way is None else max(0, kept - under_way.start)
            if new:
                revival.note_progress(worker)
            self.is_spent = True  # unless there is another attempt
            if isinstance(cause, BufferDied | OptionError | SpaceError):
                raise cause
            wait = revival.wait_after(worker, cause)
            self.is_spent = False
            missed = self._lost(worker, cause, own.steps + new)
            self._missed[worker] += missed
            self.dropped[worker] += own.surplus + missed
            made = replace(own, steps=own.steps + new, surplus=0, warmup=owed(own.warmup, new))
            self._past[worker] = replace(made.after(self._past[worker]), warmup=made.warmup)
            # no step ends more than one episode of a lane: these are numbers that nobody has seen, also where frames
            # were written to a buffer of which nobody has heard
            asked = sum(each.steps - each.start + 1 for each in self._waiting_of(worker) if isinstance(each, Collect))
            begun, self._cuts[worker] = asked + self._cuts[worker], 0
            numbers = tuple(number + begun + 1 for number in own.numbers)
            self._own[worker] = Report(warmup=made.warmup, numbers=numbers)
            self._rollouts[worker] += self._own_rollouts[worker]
            self._own_rollouts[worker] = 0
            self.restarts[worker] += 1
            self._due[worker] = time.monotonic() + wait
        warn(revival.warning(worker))

    def _under_way(self, worker: int) -> tuple[int, Collect | None, int]:
        """The number of the rollout that a worker makes, what was asked, and how many steps of it stand."""
        for number in sorted(self._sent):
            sent = self._sent[number]
            if sent.worker == worker and isinstance(sent.command, Collect):
                return number, sent.command, self._pool.kept(worker, number)
        return 0, None, 0

    def _waiting_of(self, worker: int) -> list[Any]:
        """What a worker was asked and has not answered."""
        return [sent.command for sent in self._sent.values() if sent.worker == worker]

    def _lost(self, worker: int, cause: BaseException, stand: int) -> int:
        """Frames that it had made, as far as is known, beyond so many steps."""
        facts = self._facts[worker]
        if facts.may_deliver_short:  # not all of its steps are frames
            return 0
        report = cause if isinstance(cause, WorkerError) else cause.__cause__
        told = report.step if isinstance(report, WorkerError) else 0
        return max(0, max(told, self._pool.count(worker)) - stand) * facts.num_lanes

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker, at in self._due.items() if at <= now]:
            with Held():
                self._start(worker)

    def _start(self, worker: int) -> None:
        """Another in its place, which is asked all that it had not answered."""
        revival = self._revival
        assert revival is not None
        try:
            self._pool.restart(worker)
        except (WorkerDied, OSError) as error:  # it ended at once, or there is no room for another process
            self._failed(worker, error)
            return
        del self._due[worker]
        first, under_way, kept = self._under_way(worker)
        if under_way is not None and kept > under_way.start:  # it is finished before all that came after it
            self._sent[first] = replace(self._sent[first], command=replace(under_way, start=kept), in_turn=False)
        for build in [each for each, sent in self._sent.items() if isinstance(sent.command, Build)]:
            if self._sent[build].worker == worker:  # an attempt that failed
                del self._sent[build]
        waiting = sorted(number for number, sent in self._sent.items() if sent.worker == worker)
        self._ask(worker, revival.build(worker, self._own[worker].warmup, self._own[worker].numbers))
        for command, attached in revival.afterwards(worker):
            self._send(self.new_number(), worker, command, attached=attached)
        for number in sorted(waiting, key=lambda each: (not kept or each != first, each)):
            sent = self._sent[number] = replace(self._sent[number], at=time.monotonic())
            self._send(number, worker, sent.command, in_turn=sent.in_turn)

    def _ask(self, worker: int, command: Build) -> None:
        number = self.new_number()
        self._sent[number] = _Sent(worker, command, False, time.monotonic())
        self._send(number, worker, command)

    # --- hanging ---

    def _hangs_at(self) -> dict[int, float]:
        """When each that was asked something counts as failed, if it is not heard of before."""
        revival, times = self._revival, dict[int, float]()
        assert revival is not None
        building = {sent.worker: sent.at for sent in self._sent.values() if isinstance(sent.command, Build)}
        for worker, at in building.items():
            if revival.start_timeout is not None and worker not in self._due:
                times[worker] = at + revival.start_timeout
        for sent in self._sent.values():  # the first that waits is the oldest
            if revival.worker_timeout is None or sent.worker in {*self._due, *building, *times}:
                continue
            times[sent.worker] = max(sent.at, self._pool.last_sign(sent.worker)) + revival.worker_timeout
        return times

    def _hung(self) -> list[int]:
        now = time.monotonic()
        return [worker for worker, at in self._hangs_at().items() if at <= now]

    def _patience(self, deadline: float | None) -> float | None:
        """Seconds until something has to be looked at."""
        times = [*self._due.values(), *self._hangs_at().values(), *([] if deadline is None else [deadline])]
        return max(0.0, min(times) - time.monotonic()) if times else None

    # --- the rest ---

    def told(self, worker: int) -> str:
        """See `WorkerPool`."""
        return f"worker {worker} (to be started again)" if worker in self._due else self._pool.told(worker)

    def shutdown(self, timeout: float | None = None) -> None:
        """See `WorkerPool`."""
        self._revival = None
        self._pool.shutdown(*([] if timeout is None else [timeout]))


def _with_past(state: Mapping[str, Any], past: Report) -> Mapping[str, Any]:
    """A worker's state, with what those had counted that it came after."""
    if not past.steps:
        return state
    own = state["episodes"]
    episodes = {
        **own,
        "finished": own["finished"] + past.episodes,
        "returns": [*past.returns, *own["returns"]][-RECENT:],
        "lengths": [*past.lengths, *own["lengths"]][-RECENT:],
    }
    return {**state, "episodes": episodes, "steps": state["steps"] + past.steps}
