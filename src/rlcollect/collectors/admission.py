"""How many rollouts may begin, and which may overtake another, so that none is made by weights that are too old.

Rollouts are numbered in the order in which they are asked for. Number n begins only if n < (v + K + 1) * b: v is the
newest version, K how old weights may be, and b the batches that the learner takes for a version. Such a learner's
version is n / b at most when batch n is delivered, so a batch that is delivered in its turn is K versions old at most;
one may overtake others only as long as that holds for all of them too. Nothing that was made is thrown away.
"""

from __future__ import annotations

from rlcollect.failures import warn

__all__ = ["Admission", "Unbounded"]


class Unbounded:
    """Admits every rollout, in any order: nobody minds how old weights are.

    Attributes:
        spare: rollouts that are none of the learner's batches.
        refuses_worker_ids: why weights cannot be for some workers only; None: they can.
        behind: how many batches were delivered since the learner was to publish last, if that is counted.
        why_none: why no rollout may begin, and what to do.
    """

    refuses_worker_ids: str | None = None
    behind = 0
    why_none = ""

    def __init__(self) -> None:
        self.spare = 0

    def admits(self) -> bool:
        """Whether another rollout may begin."""
        return True

    def begin(self, number: int) -> None:
        """A rollout begins that has this number among commands."""

    def may_come(self, number: int) -> bool:  # noqa: ARG002 - any may
        """Whether this one may be delivered next: whether those that it overtakes can still come in time."""
        return True

    def turn(self, number: int) -> int:  # noqa: ARG002 - as they arrive
        """Where in the order of those that wait this one comes."""
        return 0

    def deliver(self, number: int) -> None:
        """This one was delivered; as a spare one, if such a one was wanted."""

    def published(self, version: int) -> None:
        """This is the newest version from now on."""

    def lose(self) -> None:
        """What was begun and is not delivered will not be."""

    def go_on(self, version: int, behind: int) -> None:
        """Goes on with a learner whose newest version this is, so many batches after it."""


class Admission(Unbounded):
    """Admits rollouts.

    Args:
        lag: K, versions.
        batches: b, for each version.
    """

    refuses_worker_ids = "max_policy_lag=: each version is for all workers."

    def __init__(self, lag: int, batches: int) -> None:
        super().__init__()
        self._lag = lag
        self._batches = batches
        self._newest = 0
        self._first: int | None = None  # the newest version when the first rollout began: what counts is since then
        self._begun = 0
        self._delivered = 0
        self._bounds: dict[int, int] = {}  # what each that is not delivered was begun with, at least
        self._has_warned = False

    @property
    def _version(self) -> int:
        """The newest, since the first rollout began."""
        return 0 if self._first is None else self._newest - self._first

    def admits(self) -> bool:
        """See `Unbounded`."""
        return self._begun < (self._version + self._lag + 1) * self._batches + self.spare

    def begin(self, number: int) -> None:
        """See `Unbounded`."""
        if self._first is None:
            self._first = self._newest
        self._bounds[number] = self._version
        self._begun += 1

    def may_come(self, number: int) -> bool:
        """See `Unbounded`."""
        others = sorted(bound for other, bound in self._bounds.items() if other != number)
        return all(
            (self._delivered + 1 + place) // self._batches <= bound + self._lag for place, bound in enumerate(others)
        )

    def turn(self, number: int) -> int:
        """See `Unbounded`: none overtakes another."""
        return number

    def deliver(self, number: int) -> None:
        """See `Unbounded`."""
        self._bounds.pop(number, None)
        if self.spare:
            self.spare, self._begun = 0, self._begun - 1
        else:
            self._delivered += 1

    def published(self, version: int) -> None:
        """See `Unbounded`."""
        self._newest = version
        if not self._has_warned and self._version > self._delivered // self._batches:
            self._has_warned = True
            warn(
                f"{self._version} versions were published for {self._delivered} batches, and max_policy_lag= holds for "
                f"one for each {self._batches} (batches_per_version=): frames may be older than {self._lag} versions."
            )

    def lose(self) -> None:
        """See `Unbounded`."""
        self.spare, self._begun = 0, self._delivered
        self._bounds.clear()

    @property
    def behind(self) -> int:  # type: ignore[override] # it changes here
        """See `Unbounded`."""
        return self._delivered - self._version * self._batches

    def go_on(self, version: int, behind: int) -> None:
        """See `Unbounded`."""
        self._newest = self._first = version
        self._delivered = max(0, behind)
        self.lose()

    @property
    def why_none(self) -> str:  # type: ignore[override] # it changes here
        """See `Unbounded`."""
        return (
            f"max_policy_lag={self._lag} lets no rollout begin before new weights are published: {self.behind} batches "
            f"were delivered since version {self._newest} was due. Call update_policy_weights_() after every "
            f"{self._batches} batch(es), or allow older weights."
        )
