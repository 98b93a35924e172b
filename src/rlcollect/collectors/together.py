"""Batches of a rollout of every worker; those that are late may be ended early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from rlcollect.collectors.crew import Arrival, Crew
from rlcollect.collectors.gather import FromProcesses, Made, needed, versions_of
from rlcollect.collectors.joining import IDS, NO_EPISODE, batch_of, put_together
from rlcollect.layout import Key
from rlcollect.memory.shared import Form, Groups
from rlcollect.processes.channel import Held
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Collect

__all__ = ["AllApart", "AllOf"]

MASK: Key = ("collector", "mask")


class AllOf(FromProcesses):
    """A rollout of every worker, in the order of workers. Nobody works between two batches.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout of one worker.
        dim: the dimension of a worker's batch in which they are joined; None: they are stacked.
        same: whether the memory itself is delivered.
        quorum: the share of workers that are waited for: the others then end theirs with the frame under way.
        may_stop: whether rollouts may end early for another reason too.
    """

    def __init__(
        self,
        crew: Crew,
        facts: Sequence[Facts],
        groups: Groups | None,
        *,
        full: int,
        dim: int | None,
        same: bool,
        quorum: float = 1.0,
        may_stop: bool = False,
    ) -> None:
        super().__init__(crew, facts, groups, full=full, same=same)
        self._dim = dim
        self._is_copied = not same and not dim  # else it is delivered as it is, or copied when it is joined
        self._in_time = dim == len(facts[0].lead)
        self._quorum = quorum
        self._may_stop = may_stop or quorum < 1.0
        self.cuts_short = "workers that are late are pre-empted" if quorum < 1.0 else None
        self._asked: list[int] = []
        self._steps = 0  # that were asked for
        self._is_extra = False  # whether what is under way is
        self._extra: Made | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._asked and self.finished is None

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:
        """See `Gather`."""
        if self._is_dropping:
            self.drop()
        if self._asked and self._is_extra and not extra:  # for a `rollout` that was waited for in vain
            self._finish()
        if extra and self._extra is not None:
            self.finished, self._extra = self._extra, None
            return self.finished
        if self.finished is None:
            if not self._asked:
                self._ask(steps, None if extra else left, extra=extra)
            self._finish()
        if extra and self._extra is not None:
            self.finished, self._extra = self._extra, None
        assert self.finished is not None
        return self.finished

    def _finish(self) -> None:
        """Waits for what was asked for, and makes the batch."""
        arrived, asked = self._crew.arrived, len(self._asked)
        if self._groups is not None and self._is_copied:
            # by then one of them needs its processor no more
            self._crew.wait_for_rollouts(lambda: len(arrived) >= min(1, asked - 1))
            self._groups.prepare(self._steps, self._form([self._steps] * len(self._facts)))
        if (enough := needed(self._quorum, asked)) < asked:
            self._crew.wait_for_rollouts(lambda: len(arrived) >= enough)
            self._crew.stop()
        self._crew.wait_for_rollouts(lambda: len(arrived) == asked)
        came = {arrival.worker: arrival for arrival in arrived}
        rollouts = [arrival.rollout for arrival in arrived]
        frames = sum(rollout.frames for rollout in rollouts)
        some = tuple(self._asked) if self._groups is None and asked < len(self._facts) else None
        versions, is_rollouts = versions_of(rollouts), not self._in_time
        made = Made(self._joined(came), frames, versions=versions, is_rollouts=is_rollouts, workers=some)
        with Held():
            for worker, arrival in came.items():
                self._crew.tally.preempted[worker] += self._lacking(arrival)
            arrived.clear()
            self._asked = []
            if self._is_extra:
                self._extra = made
            else:
                self.finished = made

    def _ask(self, steps: int, left: int | None, *, extra: bool) -> None:
        count, lanes = len(self._facts), self._facts[0].num_lanes
        asked = list(range(count))
        shares: list[int | None] = [None] * count
        if left is not None and left < count * self._full:  # it may be the last
            if self._facts[0].may_deliver_short:
                shares = [left // count + (worker < left % count) for worker in range(count)]
            elif left < count * steps * lanes:  # rollouts that ended early have left some, whole steps of all lanes
                whole = left // lanes
                shares = [lanes * (whole // count + (worker < whole % count)) for worker in range(count)]
            asked = [worker for worker in asked if shares[worker] != 0]
        with Held():
            self._steps, self._asked, self._is_extra = steps, asked, extra
            for worker in asked:
                self._crew.collect(worker, Collect(steps, shares[worker]))

    def _lacking(self, arrival: Arrival) -> int:
        """Frames that were asked for, and not made, since the rollout was ended early."""
        if not self._may_stop:
            return 0
        whole = arrival.command.steps * self._facts[arrival.worker].num_lanes
        asked = arrival.command.at_most
        return max(0, (whole if asked is None else min(whole, asked)) - arrival.rollout.frames)

    def _joined(self, came: dict[int, Arrival]) -> TensorDictBase:
        room = next(iter(came.values())).rollout.room
        steps = [came[worker].rollout.steps if worker in came else 0 for worker in range(len(self._facts))]
        if self._groups is None:
            return self._put_together([batch_of(came[worker]) for worker in self._asked])
        if self._is_copied:
            data = self._groups.bytes_of(0, None)
            tensors, batch = self._groups.owned(data, room, max(steps), self._form(steps))
            self._blank(tensors, steps)
            is_ragged = self._in_time and min(steps) < max(steps)  # what was prepared is for whole ones
            return self._form(steps)(tensors, max(steps)) if is_ragged else batch
        tensors = self._groups.shown(self._groups.bytes_of(0, None), room)
        self._blank(tensors, steps)
        batch = self._form(steps)(tensors, max(steps))
        return batch if self._same is None else self._same.holding(batch)

    def _form(self, steps: Sequence[int]) -> Form:
        """How rollouts of so many steps make a batch."""
        groups, dim = self._groups, self._dim
        assert groups is not None
        if dim is None:
            return groups.stacked
        return lambda tensors, made: groups.joined(tensors, [min(each, made) for each in steps], dim)

    def _blank(self, tensors: dict[Key, Any], steps: Sequence[int]) -> None:
        """Rows that workers have not made are marked as such, where rows can be."""
        if MASK in tensors:
            for worker, made in enumerate(steps):
                _blank(tensors, worker, made)

    def _put_together(self, batches: Sequence[TensorDictBase]) -> TensorDictBase:
        return put_together(batches, self._dim, in_time=self._in_time)

    @property
    def outstanding(self) -> int:
        """See `Gather`."""
        return 0 if self.is_idle else self._steps * self._facts[0].num_lanes * max(1, len(self._asked))

    def pause(self) -> None:
        """See `Gather`: a batch that was waited for in vain."""
        if self._asked:
            self._finish()

    def made(self, rollouts: Sequence[int]) -> list[Made]:  # noqa: ARG002
        """See `Gather`."""
        return [] if self.finished is None else [self.finished]

    def _clear(self) -> None:
        self._asked, self._extra = [], None


class AllApart(AllOf):
    """The same where each worker's rollout lies in memory of its own."""

    def __init__(self, crew: Crew, facts: Sequence[Facts], groups: Groups | None, **form: Any) -> None:
        super().__init__(crew, facts, groups, **form)
        self._is_copied = False  # in one piece

    def _joined(self, came: dict[int, Arrival]) -> TensorDictBase:
        groups, everyone = self._groups, range(len(self._facts))
        if groups is None:
            return super()._joined(came)
        room = next(iter(came.values())).rollout.room
        steps = [came[worker].rollout.steps if worker in came else 0 for worker in everyone]
        parts = [
            groups.bytes_of(came[worker].command.group, came[worker].beside) if worker in came else None
            for worker in everyone
        ]
        tensors = groups.picked(parts, room)
        self._blank(tensors, steps)
        batch = self._form(steps)(tensors, max(steps))
        return batch if self._same is None else self._same.holding(batch)


def _blank(tensors: dict[Key, Any], worker: int, made: int) -> None:
    """Rows that a worker has not made are marked as such."""
    mask = tensors[MASK][worker]
    if made < mask.shape[-1]:
        for key, tensor in tensors.items():
            time = mask.ndim - 1
            tensor[worker].narrow(time, made, mask.shape[-1] - made).fill_(NO_EPISODE if key == IDS else 0)
