"""The contract of `gymnasium.Env`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from rlcollect.testing._contract.parts import attempt, maker, tensor_forms, unreached
from rlcollect.testing._contract.repetition import REPEATED, repetition
from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.session import SingleSession
from rlcollect.testing._contract.subject import Subject, guarded
from rlcollect.testing._contract.survey import SURVEYED, Survey
from rlcollect.testing._contract.watchers import Flags, Observations, Rewards

__all__ = ["check_single"]

AFTER_THE_END = "step after the end"


def check_single(subject: Subject) -> Iterator[Finding]:
    """Every check of one environment."""
    survey = Survey()
    yield from attempt(SURVEYED, _survey(subject, survey))
    if not survey.marks:
        yield from unreached((*REPEATED, AFTER_THE_END, "maker"))
        return
    yield from attempt(REPEATED, repetition(subject, SingleSession, survey.marks, survey.replayed))
    yield from attempt((AFTER_THE_END,), _after_the_end(subject, survey))
    yield from attempt(("maker",), maker(subject, survey.spaces))


def _survey(subject: Subject, survey: Survey) -> Iterator[Finding]:
    with subject.opened() as env:
        spaces = [
            guarded("spaces", "while it was read", getattr, env, name) for name in ("observation_space", "action_space")
        ]
        yield from tensor_forms(*spaces)
        survey.spaces = (spaces[0], spaces[1])
        yield from survey.watch(subject, SingleSession(subject, env), (Observations(spaces[0]), Rewards(), Flags()))


def _after_the_end(subject: Subject, survey: Survey) -> Iterator[Finding]:
    """What one step more does, where the episode has ended."""
    if survey.episodes.first_end is None:
        yield Finding(AFTER_THE_END, "skipped", "no episode has ended")
        return
    with subject.opened() as env:
        session = SingleSession(subject, env)
        ended = next((answer for answer in session.run(subject.steps, subject.seed) if answer.done), None)
        if ended is None:
            yield Finding(AFTER_THE_END, "skipped", "no episode has ended in a second run")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium's own environments warn here
            try:
                done = bool(session.step(ended).done)
            except BrokenError as refused:
                yield Finding(AFTER_THE_END, "ok", f"refused, as it should be: {refused.findings[0].found}")
                return
    if done:
        yield Finding(AFTER_THE_END, "ok", "the episode stays ended")
    else:
        yield Finding(
            AFTER_THE_END,
            "warning",
            "it goes on as if the episode had not ended: terminated and truncated are False again",
            "Raise gymnasium.error.ResetNeeded. rlcollect resets before the next step; another loop may not, and an "
            "environment that resets by itself would be reset twice.",
        )
