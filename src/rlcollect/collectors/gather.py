"""How batches come about: asks the crew for rollouts, and makes a batch of what arrives.

A way to gather knows the memory that rollouts lie in, and neither environments nor what becomes of the batch. The one
for a worker in this process is here; `together` and `as_ready` have those for worker processes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.collectors.crew import Crew
from rlcollect.collectors.joining import batch_of
from rlcollect.collectors.tally import LateRollout
from rlcollect.memory.shared import Groups
from rlcollect.memory.slots import SameBatch
from rlcollect.workers.answers import Collected, Facts
from rlcollect.workers.commands import Abandon, Collect

__all__ = ["FromProcesses", "Gather", "Made", "OneInline", "needed", "versions_of"]


@dataclass(frozen=True)
class Made:
    """A batch.

    Attributes:
        batch: as it is delivered, but for what is done with it afterwards.
        frames: in it.
        worker: whose it is, if it is one worker's.
        versions: how many frames in it each version of the weights made.
        late: rollouts in it that were begun for an earlier one.
        is_rollouts: whether its lanes are those of the workers.
        workers: whose, in order, where it lacks those of some; None: it does not, or its frames tell.
    """

    batch: TensorDictBase
    frames: int
    worker: int | None = None
    versions: tuple[tuple[int, int], ...] = ()
    late: tuple[LateRollout, ...] = ()
    is_rollouts: bool = True
    workers: tuple[int, ...] | None = None

    def as_state(self) -> dict[str, Any]:
        """As plain values and tensors, which any loader takes; a batch that has others stays a TensorDict."""
        device = None if self.batch.device is None else str(self.batch.device)
        plain = ("frames", "worker", "versions", "is_rollouts", "workers")
        state: dict[str, Any] = {"device": device, **{name: getattr(self, name) for name in plain}}
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
            device = state.get("device")
            batch = TensorDict(batch, batch_size=state["batch_size"], names=state["names"], device=device)
        versions, workers = tuple(map(tuple, state.get("versions", ()))), state.get("workers")
        return cls(
            batch,
            state["frames"],
            state["worker"],
            versions,
            is_rollouts=state.get("is_rollouts", True),
            workers=None if workers is None else tuple(workers),
        )


class Gather(Protocol):
    """How batches come about."""

    keeps: bool  # whether a batch that is not delivered can be delivered later
    is_under_way: bool  # whether there is one; who delivers it says that it was
    finished: Made | None  # the one that `next` has returned; who keeps it says so
    cuts_short: str | None  # why batches may be shorter than was asked for, in words; None: they are not
    can_be_late: bool  # whether rollouts may come in a later batch than they were begun for
    refuses_worker_ids: str | None  # why weights cannot be for some workers only; None: they can

    def next(self, steps: int, left: int | None, *, extra: bool = False) -> Made:
        """The next batch.

        Args:
            steps: T, at most.
            left: frames that are still wanted; None: no end.
            extra: whether this batch is none of those.
        """

    def published(self, version: int) -> None:
        """This is the newest version of the weights from now on."""

    @property
    def waiting(self) -> int:
        """Frames that have come, of rollouts that no batch was made of yet."""

    @property
    def outstanding(self) -> int:
        """Frames that are being made, or are made and not delivered."""

    @property
    def why_none(self) -> str | None:
        """Why no batch can come now, and what to do; None: one can."""

    @property
    def behind(self) -> int:
        """How many batches were delivered since the learner was to publish weights, where that is counted."""

    def go_on(self, version: int, behind: int) -> None:
        """Goes on from a state: with this newest version, so many batches after it."""

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


class _Uncounted:
    """What most ways to gather have in common: batches are as long as was asked and in time, and nobody counts them."""

    cuts_short: str | None = None
    can_be_late = False
    refuses_worker_ids: str | None = None

    @property
    def why_none(self) -> str | None:
        """See `Gather`."""
        return None

    @property
    def waiting(self) -> int:
        """See `Gather`: none."""
        return 0

    @property
    def behind(self) -> int:
        """See `Gather`."""
        return 0

    def go_on(self, version: int, behind: int) -> None:
        """See `Gather`."""

    def published(self, version: int) -> None:
        """See `Gather`."""


class OneInline(_Uncounted):
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
        number = crew.pool.new_number()
        self.is_under_way, self._number = True, number
        crew.collect(0, Collect(steps, None if extra else left, number=self._number))
        try:
            crew.wait_for_rollouts(lambda: bool(crew.arrived))
        finally:
            arrived, crew.arrived = crew.arrived, deque()
        arrival, rollout = arrived[0], arrived[0].rollout
        return Made(batch_of(arrival), rollout.frames, versions=rollout.versions)

    @property
    def outstanding(self) -> int:
        """See `Gather`: none, between two calls."""
        return 0

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


class FromProcesses(_Uncounted):
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

    @property
    def is_idle(self) -> bool:
        """Whether no batch is being waited for."""
        return self.finished is None

    @property
    def waiting(self) -> int:
        """See `Gather`."""
        return sum(arrival.rollout.frames for arrival in self._crew.arrived)

    def let_go(self) -> None:
        """See `Gather`."""
        self._same = None
        if self._groups is not None:
            self._groups.let_go()


def versions_of(rollouts: Iterable[Collected]) -> tuple[tuple[int, int], ...]:
    """How many frames of some rollouts each version made."""
    counts = Counter[int]()
    for rollout in rollouts:
        counts.update(dict(rollout.versions))
    return tuple(counts.items())


def needed(share: float, count: int) -> int:
    """How many of so many workers are this share."""
    return min(count, math.ceil(share * count - 1e-9))  # 0.1 * 30 is a little more than 3
