"""Batches of rollouts that are ready, while workers make others: the first there is, or as many as are enough."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tensordict import TensorDictBase

from rlcollect.collectors.admission import Unbounded
from rlcollect.collectors.crew import Arrival, Crew
from rlcollect.collectors.gather import FromProcesses, Made, needed, versions_of
from rlcollect.collectors.joining import batch_of, put_together
from rlcollect.collectors.tally import LateRollout
from rlcollect.errors import WorkerTimeout
from rlcollect.memory.shared import Groups
from rlcollect.memory.slots import SameBatch
from rlcollect.processes.channel import Held
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Collect

__all__ = ["AHEAD", "FirstReady", "Quorum"]

AHEAD = 2  # rollouts that a worker holds at most, made or being made, if nobody says otherwise
PATIENCE = 10.0  # seconds that another thread has to publish, where the user gave no limit
ASKED_EACH = 0.002  # seconds between two looks whether it has


class _AsReady(FromProcesses):
    """Rollouts that are delivered when they are ready.

    Frames are granted when a rollout is asked for: what is granted, made or delivered is never more than is wanted.
    """

    def __init__(
        self, crew: Crew, facts: Sequence[Facts], groups: Groups | None, *, full: int, same: bool, ahead: int = AHEAD
    ) -> None:
        super().__init__(crew, facts, groups, full=full, same=same)
        self._ahead = ahead
        self._shown: int | None = None  # the group that is with the user

    def _free(self) -> list[list[int]]:
        """Each worker's groups that are not written to, hold nothing to be delivered, and are not with the user."""
        used = {command.group for _, command in self._crew.under_way}
        used |= {arrival.command.group for arrival in self._crew.arrived}
        ahead = self._ahead
        groups = (range(ahead * worker, ahead * (worker + 1)) for worker in range(len(self._facts)))
        return [[group for group in own if group not in used and group != self._shown] for own in groups]

    def _grant(self, steps: int, left: int | None, free: Sequence[list[int]]) -> None:
        """Asks for as many rollouts as there is room for, in these groups of each worker, and as frames are wanted."""
        granted = self._granted()
        for _ in range(self._ahead):
            for worker, groups in enumerate(free):
                lanes = self._facts[worker].num_lanes
                amount = steps * lanes if left is None else min(steps * lanes, left - granted)
                is_last = amount < self._full and self._facts[worker].may_deliver_short
                if amount <= 0 or (is_last and granted):  # rollouts may come short, and others be the last
                    return
                if groups and self._admits():
                    command = Collect(-(-amount // lanes), amount if is_last else None, groups.pop(0))
                    self._begin(worker, command)
                    granted += self._frames_of(worker, command)

    def _admits(self) -> bool:
        """Whether another rollout may begin now."""
        return True

    def _begin(self, worker: int, command: Collect) -> int:
        """Has a rollout made; its number."""
        return self._crew.collect(worker, command)

    def _granted(self) -> int:
        """Frames that are being made, or are made and not delivered."""
        coming = sum(self._frames_of(worker, command) for worker, command in self._crew.under_way)
        return coming + sum(arrival.rollout.frames for arrival in self._crew.arrived)

    def _frames_of(self, worker: int, command: Collect) -> int:
        return command.steps * self._facts[worker].num_lanes

    def _is_full(self, worker: int, command: Collect) -> bool:
        return self._frames_of(worker, command) == self._full

    @property
    def outstanding(self) -> int:
        """See `Gather`."""
        return self._granted()

    def pause(self) -> None:
        """See `Gather`: workers go on."""

    def _clear(self) -> None:
        self._shown = None


class FirstReady(_AsReady):
    """The first rollout that is ready, whoever made it.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout.
        same: whether the memory itself is delivered.
        admission: keeps weights from getting too old.
        ahead: rollouts that a worker holds at most, made or being made.
    """

    def __init__(
        self,
        crew: Crew,
        facts: Sequence[Facts],
        groups: Groups | None,
        *,
        full: int,
        same: bool,
        admission: Unbounded,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__(crew, facts, groups, full=full, same=same, ahead=ahead)
        self._admission = admission
        self.refuses_worker_ids = admission.refuses_worker_ids

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:
        """See `Gather`."""
        if extra and left is not None:
            left += steps * self._facts[0].num_lanes
        if self.finished is not None:
            return self.finished
        if self._is_dropping:
            self.drop()
        self._shown = None
        self._crew.look()
        self._admission.spare = int(extra)
        self._grant(steps, left, self._free())
        if self._groups is not None and self._same is None and self._first() is None:
            self._groups.prepare(self._full // self._facts[0].num_lanes, self._groups.single)
        self._wait_for_admission(steps, left)
        self._crew.wait_for_rollouts(lambda: self._first() is not None)
        place = self._first()
        assert place is not None
        arrival = self._crew.arrived[place]
        batch = self._owned(arrival) if self._same is None else self._as_it_is(arrival, self._same)
        with Held():
            self.finished = _made_of(arrival, batch)
            self._admission.deliver(arrival.command.number)
            del self._crew.arrived[place]
            self._shown = None if self._same is None else arrival.command.group
        if self._same is None:
            self._grant(steps, None if left is None else left - arrival.rollout.frames, self._free())
        return self.finished

    def _admits(self) -> bool:
        return self._admission.admits()

    def _begin(self, worker: int, command: Collect) -> int:
        with Held():  # or one would be made that nobody counts
            number = super()._begin(worker, command)
            self._admission.begin(number)
        return number

    def _wait_for_admission(self, steps: int, left: int | None) -> None:
        """Where no rollout may begin, and none is to come, waits for another thread to publish: not for ever.

        Raises:
            WorkerTimeout: none did.
        """
        deadline = time.monotonic() + self._crew.patience(PATIENCE)
        while not (self._crew.under_way or self._crew.arrived):
            self._crew.check_leaving()
            if self._crew.is_to_leave is None and time.monotonic() >= deadline:  # else it may wait for long
                raise WorkerTimeout(self._admission.why_none, workers=())
            time.sleep(ASKED_EACH)
            self._grant(steps, left, self._free())

    @property
    def why_none(self) -> str | None:
        """See `Gather`: none is made, and none may begin."""
        is_idle = not (self._crew.under_way or self._crew.arrived or self._admission.admits())
        return self._admission.why_none if is_idle else None

    def published(self, version: int) -> None:
        """See `Gather`."""
        self._admission.published(version)

    def _first(self) -> int | None:
        """The place of the rollout that is delivered next: a shorter one, which is granted last, after all others."""
        first: dict[int, int] = {}  # of each worker: its own come in order
        for place, arrival in enumerate(self._crew.arrived):
            first.setdefault(arrival.worker, place)
            oldest = self._crew.arrived[first[arrival.worker]]
            is_full = self._is_full(arrival.worker, arrival.command)
            if is_full and self._admission.may_come(oldest.command.number):
                return first[arrival.worker]
        return 0 if self._crew.arrived and not self._crew.under_way else None

    def _clear(self) -> None:
        super()._clear()
        self._admission.lose()

    @property
    def behind(self) -> int:
        """See `Gather`."""
        return self._admission.behind

    def go_on(self, version: int, behind: int) -> None:
        """See `Gather`."""
        self._admission.go_on(version, behind)

    def _owned(self, arrival: Arrival) -> TensorDictBase:
        """The batch, in memory of its own."""
        rollout = arrival.rollout
        if self._groups is None:
            return batch_of(arrival)
        data = self._groups.bytes_of(arrival.command.group, arrival.beside)
        return self._groups.owned(data, rollout.room, rollout.steps, self._groups.single)[1]

    def _as_it_is(self, arrival: Arrival, same: SameBatch[TensorDictBase]) -> TensorDictBase:
        """The batch, in the memory that it was made in."""
        rollout = arrival.rollout
        if self._groups is None:
            return batch_of(arrival)
        data = self._groups.bytes_of(arrival.command.group, arrival.beside)
        return same.holding(self._groups.single(self._groups.shown(data, rollout.room), rollout.steps))

    def made(self, rollouts: Sequence[int]) -> list[Made]:
        """See `Gather`. What a worker has made since it saved its state is not in it."""
        arrived = [each for each in self._crew.arrived if each.rollout.number <= rollouts[each.worker]]
        arrived.sort(key=lambda arrival: self._admission.turn(arrival.command.number))
        return [_made_of(arrival, self._owned(arrival)) for arrival in arrived]


class Quorum(_AsReady):
    """The rollouts that are ready once there are enough of them. The others go on, and come in a later batch.

    A worker begins its next rollout when a batch is asked for after its last was delivered; one whose last was late
    goes on without waiting for that, so that none is idle since others were quicker by a moment.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout.
        dim: the dimension of a worker's batch in which they are joined; None: they are stacked.
        same: whether each batch is the same TensorDict.
        quorum: the share of workers whose rollouts are enough.
        ahead: rollouts that a worker holds at most, made or being made.
    """

    cuts_short: str | None = "batches are made of the rollouts that are ready"
    can_be_late = True

    def __init__(
        self,
        crew: Crew,
        facts: Sequence[Facts],
        groups: Groups | None,
        *,
        full: int,
        dim: int | None,
        same: bool,
        quorum: float,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__(crew, facts, groups, full=full, same=same, ahead=ahead)
        self._dim = dim
        self._in_time = dim == len(facts[0].lead)
        self._enough = needed(quorum, len(facts))
        self._number = 0  # of the batch that is waited for
        self._begun: dict[int, int] = {}  # for which batch each rollout was

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:  # noqa: ARG002
        """See `Gather`. Rollouts are full ones, as long as there are frames for them."""
        if extra and left is not None:
            left += len(self._facts) * self._full
        if self.finished is not None:
            return self.finished
        if self._is_dropping:
            self.drop()
        self._crew.look()
        self._go_on(left)
        while len(self._ready()) < self._needed():
            known = len(self._crew.arrived)
            self._crew.wait_for_rollouts(lambda known=known: len(self._crew.arrived) > known)  # type: ignore[misc]
            self._go_on(left)
        chosen = self._alike(self._ready())
        made = self._batch_of(chosen, self._same)
        with Held():
            self.finished = made
            for arrival in chosen:
                self._crew.arrived.remove(arrival)
                self._begun.pop(arrival.command.number, None)
            self._number += 1
        return made

    def _go_on(self, left: int | None) -> None:
        """Asks those who rest."""
        busy = {worker for worker, _ in self._crew.under_way}
        busy |= {arrival.worker for arrival in self._crew.arrived if not self._age(arrival)}
        free = [[] if worker in busy else groups[:1] for worker, groups in enumerate(self._free())]
        with Held():
            self._grant(self._full // self._facts[0].num_lanes, left, free)
            for _, command in self._crew.under_way:
                self._begun.setdefault(command.number, self._number)

    def _age(self, arrival: Arrival) -> int:
        """How many batches were delivered since it was begun."""
        return self._number - self._begun.get(arrival.command.number, self._number)

    def _ready(self) -> list[Arrival]:
        """The oldest that has arrived of each worker; short ones are granted last, and come after all others."""
        arrived = _oldest(self._crew.arrived)
        full = [arrival for arrival in arrived if self._is_full(arrival.worker, arrival.command)]
        return full if full or self._crew.under_way else arrived

    def _needed(self) -> int:
        """How many of these make a batch: fewer than usual, where no more are to come."""
        full = {worker for worker, command in self._crew.under_way if self._is_full(worker, command)}
        full |= {each.worker for each in self._crew.arrived if self._is_full(each.worker, each.command)}
        return max(1, min(self._enough, len(full)))

    def _alike(self, ready: Sequence[Arrival]) -> list[Arrival]:
        """Those that are as long as the first; an interruptor may have ended some early. In the order of workers."""
        first = ready[0].rollout
        return sorted(
            (each for each in ready if (each.rollout.steps, each.rollout.room) == (first.steps, first.room)),
            key=lambda arrival: arrival.worker,
        )

    def _batch_of(self, chosen: Sequence[Arrival], same: SameBatch[TensorDictBase] | None = None) -> Made:
        batch = self._joined(chosen)
        batch = batch if same is None else same.holding(batch)
        late = tuple(
            LateRollout(arrival.worker, arrival.rollout.frames, age, arrival.rollout.version)
            for arrival in chosen
            if (age := self._age(arrival))
        )
        worker = chosen[0].worker if len(chosen) == 1 else None
        rollouts = [arrival.rollout for arrival in chosen]
        frames = sum(rollout.frames for rollout in rollouts)
        return Made(batch, frames, worker, versions_of(rollouts), late, is_rollouts=not self._in_time)

    def _joined(self, chosen: Sequence[Arrival]) -> TensorDictBase:
        groups, dim, first = self._groups, self._dim, chosen[0].rollout
        if groups is None:
            batches = [batch_of(arrival) for arrival in chosen]
            return put_together(batches, dim, in_time=self._in_time)
        parts = [groups.bytes_of(arrival.command.group, arrival.beside) for arrival in chosen]
        tensors = groups.picked(parts, first.room)
        if dim is None:
            return groups.stacked(tensors, first.steps)
        return groups.joined(tensors, [first.steps] * len(chosen), dim)

    def _clear(self) -> None:
        super()._clear()
        self._begun.clear()

    def made(self, rollouts: Sequence[int]) -> list[Made]:
        """See `Gather`."""
        waiting = [each for each in self._crew.arrived if each.rollout.number <= rollouts[each.worker]]
        batches = []
        while waiting:
            chosen = self._alike(_oldest(waiting))
            batches.append(self._batch_of(chosen))
            waiting = [each for each in waiting if each not in chosen]
        return batches


def _made_of(arrival: Arrival, batch: TensorDictBase) -> Made:
    return Made(batch, arrival.rollout.frames, arrival.worker, arrival.rollout.versions)


def _oldest(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The first of each worker."""
    oldest = dict[int, Arrival]()
    for arrival in arrivals:
        oldest.setdefault(arrival.worker, arrival)
    return [*oldest.values()]
