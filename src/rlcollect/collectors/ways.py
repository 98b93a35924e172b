"""How the rollouts of several workers become batches, wherever the workers are: all together, or each when it is ready.

A collector has one way, chosen when it is made. A way knows options, and how to make what gathers (`together`,
`as_ready`); where workers are it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcollect.collectors.admission import Admission, Unbounded
from rlcollect.collectors.as_ready import FirstReady, Quorum
from rlcollect.collectors.crew import Crew
from rlcollect.collectors.gather import Gather
from rlcollect.collectors.together import AllApart, AllOf
from rlcollect.errors import OptionError
from rlcollect.memory.shared import Groups
from rlcollect.options import Stacking, Staleness
from rlcollect.workers.answers import Facts

__all__ = ["AsReady", "Form", "Together", "Way"]


@dataclass(frozen=True)
class Form:
    """What a way is told of the batches that are wanted, and of where rollouts lie.

    Attributes:
        full: frames of a full rollout of one worker.
        same: whether the memory itself is delivered.
        may_stop: whether rollouts may end early for the user's reasons.
        ahead: rollouts that a worker holds at most, made or being made, where workers do not rest.
        lie_apart: whether each worker's rollouts lie in memory of its own.
    """

    full: int
    same: bool
    may_stop: bool
    ahead: int
    lie_apart: bool


class Way(Protocol):
    """How rollouts become batches.

    Attributes:
        rests: whether workers wait between two batches.
        may_pre_empt: whether workers may be told to end a rollout early.
    """

    rests: bool
    may_pre_empt: bool

    def share(self, workers: int) -> int:
        """How many workers make a batch together."""

    def lead(self, facts: Sequence[Facts]) -> tuple[int, ...]:
        """The dimensions of a batch before time."""

    def recorded(self, *, may_stop: bool) -> tuple[str, ...]:
        """Optional keys that these batches need."""

    def gather(self, crew: Crew, facts: Sequence[Facts], form: Form, slots: Callable[..., Groups | None]) -> Gather:
        """What makes them.

        Args:
            crew: the workers.
            facts: what they said of themselves.
            form: of batches.
            slots: makes the memory for rollouts.
        """


class Together:
    """A rollout of each, or of those that are ready when there are enough. See `Way`.

    Args:
        stacking: how they become one.
    """

    rests = True

    def __init__(self, stacking: Stacking) -> None:
        self._stacking = stacking
        self._goes_on = stacking.stragglers == "continue"
        self.may_pre_empt = stacking.preemptive_threshold is not None and not self._goes_on

    def share(self, workers: int) -> int:
        """See `Way`: all."""
        return workers

    def lead(self, facts: Sequence[Facts]) -> tuple[int, ...]:
        """See `Way`."""
        own = tuple(facts[0].lead)
        dim = self._dim(len(own) + 1)
        if dim is None:
            return (len(facts), *own)
        return own if dim == len(own) else (*own[:dim], own[dim] * len(facts), *own[dim + 1 :])

    def recorded(self, *, may_stop: bool) -> tuple[str, ...]:
        """See `Way`."""
        if self._goes_on:
            return ("worker",)
        return ("mask",) if self.may_pre_empt or may_stop else ()

    def gather(self, crew: Crew, facts: Sequence[Facts], form: Form, slots: Callable[..., Groups | None]) -> Gather:
        """See `Way`."""
        own: dict[str, Any] = {"full": form.full, "dim": self._dim(len(facts[0].lead) + 1), "same": form.same}
        quorum = self._stacking.preemptive_threshold or 1.0
        if self._goes_on:
            groups = slots(groups=form.ahead * len(facts), together=False, most=len(facts))
            return Quorum(crew, facts, groups, quorum=quorum, ahead=form.ahead, **own)
        kind = AllApart if form.lie_apart else AllOf
        groups = slots(groups=1, together=not form.lie_apart, most=len(facts))
        return kind(crew, facts, groups, quorum=quorum, may_stop=form.may_stop, **own)

    def _dim(self, dims: int) -> int | None:
        """The dimension of a worker's batch in which they are joined; None: they are stacked."""
        given = self._stacking.cat_results
        if given == "stack":
            return None
        dim = given + dims if given < 0 else given
        if not 0 <= dim < dims:
            raise OptionError(f"cat_results={given}: a worker's batches have {dims} dimension(s), time last.")
        return dim


class AsReady:
    """One rollout, the first that is ready. See `Way`.

    Args:
        staleness: how old its weights may be.
        counts_versions: whether the policy's weights are sent, so that it can be said how old they are.
    """

    rests = False
    may_pre_empt = False

    def __init__(self, staleness: Staleness, *, counts_versions: bool) -> None:
        self._staleness = staleness
        self._counts_versions = counts_versions

    def share(self, workers: int) -> int:  # noqa: ARG002
        """See `Way`."""
        return 1

    def lead(self, facts: Sequence[Facts]) -> tuple[int, ...]:
        """See `Way`."""
        return tuple(facts[0].lead)

    def recorded(self, *, may_stop: bool) -> tuple[str, ...]:  # noqa: ARG002
        """See `Way`."""
        return ()

    def gather(self, crew: Crew, facts: Sequence[Facts], form: Form, slots: Callable[..., Groups | None]) -> Gather:
        """See `Way`."""
        groups = slots(groups=form.ahead * len(facts), together=False)
        own: dict[str, Any] = {"full": form.full, "same": form.same, "ahead": form.ahead}
        return FirstReady(crew, facts, groups, admission=self._admission(), **own)

    def _admission(self) -> Unbounded:
        """What keeps the weights of batches from getting too old."""
        staleness = self._staleness
        if staleness.max_policy_lag is None:
            return Unbounded()
        if not self._counts_versions:
            raise OptionError("max_policy_lag= needs a policy whose weights are sent; a NoWeightSyncScheme sends none.")
        return Admission(staleness.max_policy_lag, staleness.batches_per_version)
