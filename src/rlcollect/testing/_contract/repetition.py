"""Do runs repeat? Same seed, same bits; and what other seeds, and none, change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from rlcollect.testing._contract.report import Finding
from rlcollect.testing._contract.session import Session
from rlcollect.testing._contract.subject import Subject
from rlcollect.testing._contract.values import Fingerprint, difference

__all__ = ["REPEATED", "Mark", "Opening", "first_difference", "repetition", "replayed"]

Mark: TypeAlias = tuple[str, Fingerprint]
"""Where an answer came, and its bits."""

Opening: TypeAlias = Callable[[Subject, Any], Session]
"""How an environment of some kind is stepped."""

REPEATED: Final = ("same seed", "other seeds", "no seed")
_OTHER_SEED: Final = 1_000  # further than lanes are apart


def replayed(subject: Subject, opening: Opening, seed: int | None, steps: int) -> list[Mark]:
    """A run in an environment made for it: always the same actions."""
    with subject.opened() as env:
        return [(answer.where, answer.mark()) for answer in opening(subject, env).run(steps, seed)]


def first_difference(one: Sequence[Mark], other: Sequence[Mark]) -> str | None:
    """What differs first, and where; None: nothing does as far as both go."""
    for ours, theirs in zip_longest(one, other):
        if ours is None or theirs is None:
            return None
        if (path := difference(ours[1], theirs[1])) is not None:
            return f"{path} at {ours[0]}"
    return None


def repetition(subject: Subject, opening: Opening, recorded: Sequence[Mark], steps: int) -> Iterator[Finding]:
    """Holds a recorded run against others.

    Args:
        subject: under check.
        opening: how it is stepped.
        recorded: a run of at least so many steps, from the seed of `subject`, in an environment made for it.
        steps: of each run here.
    """
    fresh = subject.recipe is not None
    made = "two environments" if fresh else "two runs of one environment"
    same = first_difference(recorded, replayed(subject, opening, subject.seed, steps))
    if same is not None:
        yield Finding(
            "same seed",
            "broken" if fresh else "warning",
            f"with the same seed and actions, {made} differ: first in {same}",
            "Draw every random number from self.np_random, which super().reset(seed=seed) seeds, "
            "and let reset put back all else.",
        )
        for name in REPEATED[1:]:
            yield Finding(name, "skipped", "not even one seed repeats")
        return
    yield Finding("same seed", "ok", f"{made} give the same bits for {steps:,} steps")
    other = first_difference(recorded, replayed(subject, opening, subject.seed + _OTHER_SEED, steps))
    unseeded = _unseeded_difference(subject, opening, steps) if fresh else None
    yield _other_seeds(subject.seed, other, unseeded)
    yield _no_seed(other, unseeded) if fresh else Finding("no seed", "skipped", "an environment was passed, no maker")


def _unseeded_difference(subject: Subject, opening: Opening, steps: int) -> str | None:
    return first_difference(*(replayed(subject, opening, None, steps) for _ in range(2)))


def _other_seeds(seed: int, other: str | None, unseeded: str | None) -> Finding:
    if other is not None:
        return Finding("other seeds", "ok", f"another seed differs: first in {other}")
    if unseeded is None:
        return Finding("other seeds", "ok", "another seed changes nothing: it seems that nothing is random")
    return Finding(
        "other seeds",
        "warning",
        f"seeds {seed} and {seed + _OTHER_SEED} give the same, and without one it is random",
        "reset(seed=) should pass the seed on: super().reset(seed=seed).",
    )


def _no_seed(other: str | None, unseeded: str | None) -> Finding:
    if unseeded is not None:
        return Finding("no seed", "ok", f"two environments without a seed differ: first in {unseeded}")
    if other is None:
        return Finding("no seed", "ok", "it seems that nothing is random")
    return Finding(
        "no seed",
        "warning",
        "two environments that get no seed do the same: unseeded lanes would all see the same episodes",
        "Seed from entropy where reset gets no seed, as super().reset(seed=None) does.",
    )
