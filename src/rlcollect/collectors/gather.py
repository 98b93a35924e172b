"""Which rollouts make a batch: the one there is, those of all workers, or the first that is ready.

A policy of gathering asks the crew for rollouts and makes a batch of what arrives. It knows the memory that rollouts
lie in, and neither environments nor what becomes of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rlcollect.collectors.crew import Arrival, Crew
from rlcollect.layout import Key
from rlcollect.memory.shared import Groups
from rlcollect.memory.slots import SameBatch
from rlcollect.processes.channel import Held
from rlcollect.workers.messages import Abandon, Collect, Collected, Facts

__all__ = ["AllOf", "FirstReady", "Gather", "Made", "OneInline"]

MASK: Key = ("collector", "mask")
IDS: Key = ("collector", "traj_ids")
NO_EPISODE = -1
AHEAD = 2  # rollouts that an asynchronous worker holds at most


@dataclass(frozen=True)
class Made:
    """A batch.

    Attributes:
        batch: as it is delivered, but for what is done with it afterwards.
        frames: in it.
        worker: whose it is, if it is one worker's.
    """

    batch: TensorDictBase
    frames: int
    worker: int | None = None

    def as_state(self) -> dict[str, Any]:
        """As plain values and tensors, which any loader takes; a batch that has others stays a TensorDict."""
        state = {"frames": self.frames, "worker": self.worker}
        leaves = self.batch.values(include_nested=True, leaves_only=True)
        if not isinstance(self.batch, TensorDict) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return {"batch": self.batch, **state}
        shape, names = list(self.batch.batch_size), self.batch.names
        return {"batch": self.batch.to_dict(), "batch_size": shape, "names": names, **state}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Made:
        """What `as_state` gave."""
        batch = state["batch"]
        if "batch_size" in state:
            batch = TensorDict(batch, batch_size=state["batch_size"], names=state["names"])
        return cls(batch, state["frames"], state["worker"])


class Gather(Protocol):
    """How batches come about."""

    keeps: bool  # whether a batch that is not delivered can be delivered later
    is_under_way: bool  # whether there is one; who delivers it says that it was
    finished: Made | None  # the one that `next` has returned; who keeps it says so

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:
        """The next batch.

        Args:
            steps: T, at most.
            left: frames that are still wanted; None: no end.
            extra: whether this batch is none of those.
        """

    def pause(self) -> None:
        """Waits for what has to be whole before workers save their states."""

    def made(self, rollouts: Sequence[int]) -> list[Made]:
        """What will be delivered, of so many rollouts of each worker: copies that stay as they are."""

    def drop(self) -> None:
        """What is under way will not be delivered. Returns when nothing is."""

    def recover(self) -> None:
        """The batch that was made last was not delivered, and cannot be."""

    def lose(self) -> None:
        """A batch that was kept cannot be delivered: new episodes begin, so that none has a gap."""

    def forget(self) -> None:
        """No batch may be asked for in long: memory that the user lets go of goes back to the system."""

    def let_go(self) -> None:
        """No batch will be asked for: keeps no memory."""


class OneInline:
    """The one worker there is makes a rollout while it is waited for.

    Args:
        crew: the worker.
        forget: has it forget its memory.
    """

    keeps = False  # it may have been changed when its delivery was broken off, and new episodes cost nothing here

    def __init__(self, crew: Crew, forget: Callable[[], None]) -> None:
        self._crew = crew
        self._number = 0
        self.is_under_way = False
        self.finished: Made | None = None
        self.forget = forget

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:
        """See `Gather`."""
        crew = self._crew
        self._number += 1
        self.is_under_way = True
        crew.collect(0, Collect(steps, None if extra else left, number=self._number))
        try:
            crew.wait_for_rollouts(lambda: bool(crew.arrived))
        finally:
            arrived, crew.arrived = crew.arrived, deque()
        rollout = arrived[0].rollout
        assert rollout.batch is not None
        return Made(rollout.batch, rollout.frames)

    def pause(self) -> None:
        """See `Gather`: there is nothing."""

    def made(self, rollouts: Sequence[int]) -> list[Made]:  # noqa: ARG002
        """See `Gather`: nothing."""
        return []

    def drop(self) -> None:
        """See `Gather`: nothing is."""

    def recover(self) -> None:
        """See `Gather`: it was broken off, and is made up for by new episodes."""
        self._crew.withdraw()
        self._crew.lose()
        self._crew.ask({0: Abandon(self._number)})

    def lose(self) -> None:
        """See `Gather`: nothing is kept."""

    def let_go(self) -> None:
        """See `Gather`: memory is the worker's."""


class _FromProcesses:
    """What ways to gather from worker processes have in common: batches are kept until they are delivered.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout of one worker.
        same: whether the memory itself is delivered.
    """

    keeps = True

    def __init__(self, crew: Crew, facts: Sequence[Facts], groups: Groups | None, *, full: int, same: bool) -> None:
        self.is_under_way = False
        self.finished: Made | None = None
        self._crew = crew
        self._facts = facts
        self._groups = groups
        self._full = full
        self._same = SameBatch[TensorDictBase]() if same else None
        self._is_dropping = False

    def drop(self) -> None:
        """See `Gather`."""
        self._is_dropping = True  # until nothing is under way: a time-out may come before
        self._crew.withdraw()
        self._crew.arrived.clear()
        self._clear()
        self.finished, self._is_dropping = None, False

    def _clear(self) -> None:
        """Nothing is under way."""

    def recover(self) -> None:
        """See `Gather`: it is kept by who asked for it."""

    def lose(self) -> None:
        """See `Gather`."""
        self.drop()
        self._crew.ask({worker: Abandon(0) for worker in range(len(self._facts))})

    def forget(self) -> None:
        """See `Gather`."""
        if self._groups is not None:
            self._groups.forget()

    def let_go(self) -> None:
        """See `Gather`."""
        self._same = None
        if self._groups is not None:
            self._groups.let_go()


class AllOf(_FromProcesses):
    """A rollout of every worker, in the order of workers. Nobody works between two batches.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout of one worker.
        dim: the dimension of a worker's batch in which they are joined; None: they are stacked.
        same: whether the memory itself is delivered.
    """

    def __init__(
        self, crew: Crew, facts: Sequence[Facts], groups: Groups | None, *, full: int, dim: int | None, same: bool
    ) -> None:
        super().__init__(crew, facts, groups, full=full, same=same)
        self._dim = dim
        self._is_copied = not same and not dim  # else it is delivered as it is, or copied when it is joined
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
        arrived = self._crew.arrived
        if self._groups is not None and self._is_copied:
            # by then one of them needs its processor no more
            self._crew.wait_for_rollouts(lambda: len(arrived) >= min(1, len(self._asked) - 1))
            self._groups.prepare(self._steps, self._form)
        self._crew.wait_for_rollouts(lambda: len(arrived) == len(self._asked))
        came = {arrival.worker: arrival for arrival in arrived}
        made = Made(self._joined(came), sum(arrival.rollout.frames for arrival in arrived))
        with Held():
            arrived.clear()
            self._asked = []
            if self._is_extra:
                self._extra = made
            else:
                self.finished = made

    def _ask(self, steps: int, left: int | None, *, extra: bool) -> None:
        count = len(self._facts)
        asked = list(range(count))
        shares: list[int | None] = [None] * count
        if left is not None and self._facts[0].may_deliver_short and left < count * self._full:  # it may be the last
            shares = [left // count + (worker < left % count) for worker in range(count)]
            asked = [worker for worker in asked if shares[worker]]
        with Held():
            self._steps, self._asked, self._is_extra = steps, asked, extra
            for worker in asked:
                self._crew.collect(worker, Collect(steps, shares[worker]))

    def _joined(self, came: dict[int, Arrival]) -> TensorDictBase:
        room = next(iter(came.values())).rollout.room
        made = max(arrival.rollout.steps for arrival in came.values())
        if self._groups is None:
            return self._put_together([_batch(came[worker].rollout) for worker in self._asked])
        if self._is_copied:
            tensors, batch = self._groups.owned(0, room, made, self._form)
            self._blank(tensors, came)
            return batch
        tensors = self._groups.shown(0, room)
        self._blank(tensors, came)
        batch = self._form(tensors, made)
        return batch if self._same is None else self._same.holding(batch)

    def _form(self, tensors: dict[Key, Any], made: int) -> TensorDict:
        assert self._groups is not None
        if self._dim is None:
            return self._groups.stacked(tensors, made)
        return self._groups.joined(tensors, made, self._dim)

    def _blank(self, tensors: dict[Key, Any], came: dict[int, Arrival]) -> None:
        """Rows that workers have not made are marked as such, where rows can be."""
        if MASK in tensors:
            for worker in range(len(self._facts)):
                _blank(tensors, worker, came[worker].rollout.steps if worker in came else 0)

    def _put_together(self, batches: Sequence[TensorDictBase]) -> TensorDictBase:
        if self._dim is not None:
            return torch.cat(list(batches), self._dim)
        try:
            return torch.stack(list(batches), 0)
        except RuntimeError:  # shapes differ from worker to worker
            return lazy_stack(list(batches), 0)

    def pause(self) -> None:
        """See `Gather`: a batch that was waited for in vain."""
        if self._asked:
            self._finish()

    def made(self, rollouts: Sequence[int]) -> list[Made]:  # noqa: ARG002
        """See `Gather`."""
        return [] if self.finished is None else [self.finished]

    def _clear(self) -> None:
        self._asked, self._extra = [], None


class FirstReady(_FromProcesses):
    """The first rollout that is ready, whoever made it. Each worker has two at most, made or being made.

    Frames are granted when a rollout is asked for: what is granted, made or delivered is never more than is wanted.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        groups: the memory they write to; None: batches cross as they are.
        full: frames of a full rollout.
        same: whether the memory itself is delivered.
    """

    def __init__(self, crew: Crew, facts: Sequence[Facts], groups: Groups | None, *, full: int, same: bool) -> None:
        super().__init__(crew, facts, groups, full=full, same=same)
        self._shown: int | None = None  # the group that is with the user

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
        self._grant(steps, left)
        if self._groups is not None and self._same is None and self._first() is None:
            self._groups.prepare(self._full // self._facts[0].num_lanes, self._groups.single)
        self._crew.wait_for_rollouts(lambda: self._first() is not None)
        place = self._first()
        assert place is not None
        arrival = self._crew.arrived[place]
        batch = self._owned(arrival) if self._same is None else self._as_it_is(arrival, self._same)
        with Held():
            self.finished = Made(batch, arrival.rollout.frames, arrival.worker)
            del self._crew.arrived[place]
            self._shown = None if self._same is None else arrival.command.group
        if self._same is None:
            self._grant(steps, None if left is None else left - arrival.rollout.frames)
        return self.finished

    def _free(self) -> list[list[int]]:
        """Each worker's groups that are not written to, hold nothing to be delivered, and are not with the user."""
        used = {command.group for _, command in self._crew.under_way}
        used |= {arrival.command.group for arrival in self._crew.arrived}
        groups = (range(AHEAD * worker, AHEAD * (worker + 1)) for worker in range(len(self._facts)))
        return [[group for group in own if group not in used and group != self._shown] for own in groups]

    def _first(self) -> int | None:
        """The place of the rollout that is delivered next: a shorter one, which is granted last, after all others."""
        first: dict[int, int] = {}  # of each worker: its own come in order
        for place, arrival in enumerate(self._crew.arrived):
            first.setdefault(arrival.worker, place)
            if self._frames_of(arrival.worker, arrival.command) == self._full:
                return first[arrival.worker]
        return 0 if self._crew.arrived and not self._crew.under_way else None

    def _frames_of(self, worker: int, command: Collect) -> int:
        return command.steps * self._facts[worker].num_lanes

    def _grant(self, steps: int, left: int | None) -> None:
        """Asks for as many rollouts as there is room for, and as frames are wanted."""
        free, granted = self._free(), self._granted()
        for _ in range(AHEAD):
            for worker, groups in enumerate(free):
                lanes = self._facts[worker].num_lanes
                amount = steps * lanes if left is None else min(steps * lanes, left - granted)
                is_last = amount < self._full and self._facts[worker].may_deliver_short
                if amount <= 0 or (is_last and granted):  # rollouts may come short, and others be the last
                    return
                if groups:
                    command = Collect(-(-amount // lanes), amount if is_last else None, groups.pop(0))
                    self._crew.collect(worker, command)
                    granted += self._frames_of(worker, command)

    def _granted(self) -> int:
        """Frames that are being made, or are made and not delivered."""
        coming = sum(self._frames_of(worker, command) for worker, command in self._crew.under_way)
        return coming + sum(arrival.rollout.frames for arrival in self._crew.arrived)

    def _owned(self, arrival: Arrival) -> TensorDictBase:
        """The batch, in memory of its own."""
        rollout = arrival.rollout
        if self._groups is None:
            return _batch(rollout)
        return self._groups.owned(arrival.command.group, rollout.room, rollout.steps, self._groups.single)[1]

    def _as_it_is(self, arrival: Arrival, same: SameBatch[TensorDictBase]) -> TensorDictBase:
        """The batch, in the memory that it was made in."""
        rollout = arrival.rollout
        if self._groups is None:
            return _batch(rollout)
        return same.holding(self._groups.single(self._groups.shown(arrival.command.group, rollout.room), rollout.steps))

    def pause(self) -> None:
        """See `Gather`: workers go on."""

    def made(self, rollouts: Sequence[int]) -> list[Made]:
        """See `Gather`. What a worker has made since it saved its state is not in it."""
        return [
            Made(self._owned(arrival), arrival.rollout.frames, arrival.worker)
            for arrival in self._crew.arrived
            if arrival.rollout.number <= rollouts[arrival.worker]
        ]

    def _clear(self) -> None:
        self._shown = None


def _batch(rollout: Collected) -> TensorDictBase:
    assert rollout.batch is not None
    return rollout.batch


def _blank(tensors: dict[Key, Any], worker: int, made: int) -> None:
    """Rows that a worker has not made are marked as such."""
    mask = tensors[MASK][worker]
    if made < mask.shape[-1]:
        for key, tensor in tensors.items():
            time = mask.ndim - 1
            tensor[worker].narrow(time, made, mask.shape[-1] - made).fill_(NO_EPISODE if key == IDS else 0)
