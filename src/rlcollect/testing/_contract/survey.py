"""The first and longest run: every answer is looked at, and kept as marks for the runs that repeat it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rlcollect.testing._contract.repetition import Mark
from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.session import Session
from rlcollect.testing._contract.subject import Subject
from rlcollect.testing._contract.watchers import Episodes, Infos, Reused, Watcher, count

__all__ = ["SURVEYED", "Survey"]

REPLAYED = 256  # steps, or some more than the first episode has
AFTER_AN_END = 64

SURVEYED: Final = (
    "spaces",
    "reset",
    "step",
    "observation form",
    "observation values",
    "rewards",
    "flags",
    "infos",
    "reused arrays",
    "episodes",
    "time",
)
"""What a survey tells of, of every kind of environment."""


@dataclass
class Survey:
    """What the first and longest run leaves to the checks after it.

    Attributes:
        marks: of each answer.
        episodes: what was seen of them.
        spaces: for observations and for actions.
    """

    marks: list[Mark] = field(default_factory=list)
    episodes: Episodes = field(default_factory=Episodes)
    spaces: tuple[Any, Any] = (None, None)
    _steps: int = 0

    @property
    def replayed(self) -> int:
        """How many steps of it other runs repeat."""
        return min(self._steps, max(REPLAYED, (self.episodes.first_end or 0) + AFTER_AN_END))

    def watch(self, subject: Subject, session: Session, watchers: Sequence[Watcher]) -> Iterator[Finding]:
        """Runs as long as steps or seconds allow, and tells what the watchers found.

        Raises:
            BrokenError: something ended the run; after what was found until then.
        """
        watchers = (*watchers, Infos(), Reused(), self.episodes)
        end = time.perf_counter() + subject.seconds
        failure: BrokenError | None = None
        try:
            for answer in session.run(subject.steps, subject.seed):
                self.marks.append((answer.where, answer.mark()))
                for watcher in watchers:
                    watcher.see(answer)
                if time.perf_counter() > end:
                    break
        except BrokenError as broken:
            failure = broken
        self._steps = session.steps
        if failure is None:
            yield Finding("reset", "ok", count(session.resets, "call"))
            yield Finding("step", "ok", count(session.steps, "call"))
        for watcher in watchers if self.marks else ():
            yield from watcher.findings()
        if failure is not None:
            raise failure
        yield _time(session)


def _time(session: Session) -> Finding:
    if not session.step_seconds:
        return Finding("time", "skipped", "no step was made")
    mean, p99 = float(np.mean(session.step_seconds)), float(np.percentile(session.step_seconds, 99))
    share = session.reset_seconds / (session.reset_seconds + sum(session.step_seconds))
    found = f"a step takes {_duration(mean)} on average, {_duration(p99)} at the 99th percentile; "
    return Finding("time", "ok", f"{found}{share:.0%} of the time is spent in reset()")


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
