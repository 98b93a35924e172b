"""Masked resets: `reset(options={"reset_mask": mask})` begins new episodes in the lanes of the mask, and in no others.

A vector environment without autoreset lives by it. With autoreset it is a courtesy, so what is wrong is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcollect.testing._contract.lanes import MASKED, against_singles
from rlcollect.testing._contract.report import BrokenError, Finding, Level
from rlcollect.testing._contract.session import Answer, LanesSession, rows_of
from rlcollect.testing._contract.subject import Subject
from rlcollect.testing._contract.values import Fingerprint, as_array, difference, fingerprint

__all__ = ["masked_resets"]

Lanes: TypeAlias = VectorEnv[Any, Any, Any]
Rows: TypeAlias = list[Fingerprint]
_STEPS: Final = 32
_OBSERVATION: Final = "observation"
_REMEDY: Final[dict[Level, str]] = {
    "broken": "Reset what options['reset_mask'] names, and nothing else; without autoreset there is no other way.",
    "warning": "Only autoreset can be used: leave masked_reset off.",
}


def masked_resets(subject: Subject, mode: AutoresetMode, *, repeats: bool, steps: int) -> Iterator[Finding]:
    """Resets half of the lanes in the middle of their first episodes; then ended lanes, against single environments.

    Args:
        subject: under check.
        mode: as declared.
        repeats: whether its runs repeat.
        steps: of the run against single environments.
    """
    level: Level = "broken" if mode is AutoresetMode.DISABLED else "warning"
    plain = _undisturbed(subject, mode)
    if len(plain[0]) < 2:
        yield Finding(MASKED, "skipped", "one lane has nothing to mask")
    elif (found := _disturbed(subject, mode, plain, repeats=repeats)) is not None:
        yield Finding(MASKED, level, found, _REMEDY[level])
    else:
        yield Finding(MASKED, "ok", "lanes in the mask begin anew, the others go on")
        if mode is AutoresetMode.NEXT_STEP and repeats:
            told = against_singles(subject, mode, steps, by_mask=True)
            yield from (finding for finding in told if finding.name == MASKED)


def _undisturbed(subject: Subject, mode: AutoresetMode) -> list[Rows]:
    """The first reset and the steps before the first end, or the first few."""
    plain: list[Rows] = []
    with subject.opened() as env:
        for answer in LanesSession(subject, env, mode).run(_STEPS, subject.seed):
            if answer.done.any():
                break
            plain.append(_rows(env, answer))
    return plain


def _disturbed(subject: Subject, mode: AutoresetMode, plain: Sequence[Rows], *, repeats: bool) -> str | None:
    """Does the same again, with a masked reset in the middle; what is wrong with it."""
    half = (len(plain) - 1) // 2
    with subject.opened() as env:
        session = LanesSession(subject, env, mode)
        run = session.run(len(plain) - 1, subject.seed)
        before = [_rows(env, next(run)) for _ in range(half + 1)]
        mask = np.arange(session.lanes) % 2 == 0
        try:
            after = _rows(env, session.reset_lanes(mask))
        except BrokenError as broken:
            return f"not served: {broken.findings[0].found}"
        for lane, masked in enumerate(mask):
            first, last, now = (_observed(rows[lane]) for rows in (before[0], before[half], after))
            if not masked and last != now:
                return f"lane {lane} was not in the mask, and its observation is another one"
            if masked and first != last == now:
                return f"lane {lane} was in the mask, and its observation stayed as it was"
        for answer in run if repeats else ():
            rows = _rows(env, answer)
            for lane in map(int, np.flatnonzero(~mask)) if answer.is_step else ():
                if (path := difference(plain[answer.steps][lane], rows[lane])) is not None:
                    return f"lane {lane} was not in the mask, and {path} differs at {answer.where}"
    return None


def _rows(env: Lanes, answer: Answer) -> Rows:
    """The bits of each lane."""
    observations = rows_of(env.observation_space, env.num_envs, answer.observation)
    rest = ("reward", "terminated", "truncated") if answer.is_step else ()
    return [
        (*fingerprint(row, _OBSERVATION), *(_bit(answer, name, lane) for name in rest))
        for lane, row in enumerate(observations)
    ]


def _bit(answer: Answer, name: str, lane: int) -> tuple[str, int]:
    return fingerprint(as_array(getattr(answer, name))[lane], name)[0]


def _observed(row: Fingerprint) -> Fingerprint:
    return tuple(part for part in row if part[0].startswith(_OBSERVATION))
