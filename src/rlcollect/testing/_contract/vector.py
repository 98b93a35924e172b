"""The contract of `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlcollect.testing._contract.autoreset import (
    FINAL,
    MODE,
    Autoreset,
    FinalObservations,
    actions_ignored,
    declared,
    stays_ended,
)
from rlcollect.testing._contract.lanes import LANES, MASKED, against_singles, alike, makers_of
from rlcollect.testing._contract.masked import masked_resets
from rlcollect.testing._contract.parts import attempt, maker, tensor_forms, unreached
from rlcollect.testing._contract.repetition import REPEATED, repetition
from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.session import LanesSession, Session
from rlcollect.testing._contract.subject import Subject, guarded
from rlcollect.testing._contract.survey import SURVEYED, Survey
from rlcollect.testing._contract.watchers import Flags, Observations, Rewards

__all__ = ["check_vector"]

Lanes: TypeAlias = VectorEnv[Any, Any, Any]


def check_vector(subject: Subject) -> Iterator[Finding]:
    """Every check of a vector environment."""
    survey = Survey()
    mode, told = declared(subject.peek())
    alone = bool(makers_of(subject.peek()))
    yield from told
    yield from attempt((*SURVEYED, MODE, FINAL), _survey(subject, survey, mode, compared=alone))
    if not survey.marks:
        yield from unreached((*REPEATED, LANES, MASKED, "maker"))
        return
    steps, first_end = survey.replayed, survey.episodes.first_end
    repeated = list(attempt(REPEATED, repetition(subject, _opening, survey.marks, steps)))
    yield from repeated
    repeats = any(finding.name == REPEATED[0] and finding.level == "ok" for finding in repeated)
    if repeats:
        yield from attempt((), actions_ignored(subject, mode, survey.marks, steps, first_end))
        yield from attempt((LANES,), against_singles(subject, mode, steps))
    else:
        yield Finding(LANES, "skipped", "runs do not repeat, so there is nothing to compare with")
    if not alone:
        yield from attempt((), stays_ended(subject, mode, first_end))
        yield from attempt((), alike(subject, mode) if repeats and subject.recipe is not None else ())
    masked = masked_resets(subject, mode, repeats=repeats, steps=steps)
    yield from attempt((MASKED,), masked)
    yield from attempt(("maker",), maker(subject, survey.spaces))


def _opening(subject: Subject, env: Lanes) -> Session:
    return LanesSession(subject, env, declared(env)[0])


def _survey(subject: Subject, survey: Survey, mode: AutoresetMode, *, compared: bool) -> Iterator[Finding]:
    with subject.opened() as env:
        yield from _spaces(env)
        survey.spaces = (env.observation_space, env.action_space)
        watchers = (
            Observations(env.observation_space),
            Rewards(),
            Flags(),
            Autoreset(mode),
            FinalObservations(mode, env, compared=compared),
        )
        yield from survey.watch(subject, LanesSession(subject, env, mode), watchers)


def _spaces(env: Lanes) -> Iterator[Finding]:
    """The spaces of one lane, and of all together."""
    names = ("num_envs", "single_observation_space", "single_action_space", "observation_space", "action_space")
    lanes, *spaces = [guarded("spaces", "while it was read", getattr, env, name) for name in names]
    if not (isinstance(lanes, int) and lanes > 0):
        raise BrokenError(
            Finding("spaces", "broken", f"num_envs is {lanes!r}; a positive int is expected", "Set it in __init__.")
        )
    yield from tensor_forms(*spaces[:2])
    for kind, single, batch in zip(("observation", "action"), spaces[:2], spaces[2:], strict=True):
        if not guarded("spaces", f"while a batch of the {kind} space was made", _is_batch, single, batch, lanes):
            raise BrokenError(
                Finding(
                    "spaces",
                    "broken",
                    f"{kind}_space is {batch}, which is no batch of {lanes} of single_{kind}_space",
                    f"Set it to gymnasium.vector.utils.batch_space(single_{kind}_space, num_envs).",
                )
            )


def _is_batch(single: Any, batch: Any, lanes: int) -> bool:
    expected = batch_space(single, lanes)
    return expected == batch or bool(is_space_dtype_shape_equiv(expected, batch))
