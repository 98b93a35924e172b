"""Checks that every kind of environment shares: its spaces, its maker, and how a group of checks is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym

from rlcollect.envs.spaces import ActionCodec, observation_codec
from rlcollect.errors import SpaceError
from rlcollect.layout import Leaf
from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.subject import Subject, guarded

__all__ = ["attempt", "maker", "tensor_forms", "unreached"]


def attempt(names: Sequence[str], findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings of a group of checks, of which each tells something.

    Args:
        names: of all checks in the group.
        findings: what they find; may raise `BrokenError`, which ends the group.
    """
    told = set()
    try:
        for finding in findings:
            told.add(finding.name)
            yield finding
    except BrokenError as broken:
        for finding in broken.findings:
            told.add(finding.name)
            yield finding
        cause = broken.findings[0].name
        for name in (name for name in names if name not in told):
            yield Finding(name, "skipped", f"could not go on: {cause!r} is broken")


def unreached(names: Sequence[str]) -> Iterator[Finding]:
    """For checks that need a first reset, where there was none."""
    for name in names:
        yield Finding(name, "skipped", "not even a first reset came")


def tensor_forms(observation_space: Any, action_space: Any) -> Iterator[Finding]:
    """Both are spaces, of which batches can be made.

    Raises:
        BrokenError: one is no space at all.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if not isinstance(space, gym.Space):
            raise BrokenError(
                Finding(
                    "spaces",
                    "broken",
                    f"the {name} space is {space!r}; a gymnasium.Space is expected",
                    f"Set self.{name}_space in __init__.",
                )
            )
    try:
        actions = ActionCodec(action_space).leaves
    except SpaceError as error:
        yield Finding("spaces", "broken", f"actions cannot be recorded: {error}", "Wrap the environment.")
        return
    try:
        observations = observation_codec(observation_space, keep_float64=True).leaves
    except SpaceError as error:
        remedy = "Pass exclude_keys= or rename_keys= to the collector, or wrap the environment."
        yield Finding("spaces", "warning", f"observations cannot be recorded as they are: {error}", remedy)
        return
    yield Finding("spaces", "ok", f"{_listed(observations)}; {_listed(actions)}")


def _listed(leaves: Sequence[Leaf]) -> str:
    return ", ".join(map(str, leaves[:4])) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")


def maker(subject: Subject, spaces: tuple[Any, Any]) -> Iterator[Finding]:
    """Whether environments can be made in another process: the maker is pickled, and its copy used.

    Args:
        subject: under check.
        spaces: what its environments have for observations and actions.
    """
    if subject.recipe is None:
        yield Finding(
            "maker", "skipped", "an environment was passed, no maker", "Pass a maker, to collect in other processes."
        )
        return
    remedy = "Collector works; workers in other processes get the maker pickled. Make it inside of what is pickled."
    try:
        pickled = cloudpickle.dumps(subject.recipe)
        copied = cloudpickle.loads(pickled)
    except Exception as error:
        yield Finding("maker", "warning", f"it cannot be pickled: {type(error).__name__}: {error}", remedy)
        return
    try:
        env = guarded("maker", "while its unpickled copy made one", copied)
    except BrokenError as broken:
        yield Finding("maker", "warning", broken.findings[0].found, remedy)
        return
    came = (getattr(env, "observation_space", None), getattr(env, "action_space", None))
    guarded("close", "in close() of what the maker's unpickled copy made", env.close)
    if came != spaces:
        yield Finding("maker", "warning", "its unpickled copy makes an environment with other spaces", remedy)
    else:
        yield Finding("maker", "ok", f"pickles to {len(pickled):,} bytes, and its copy works")
