"""What is looked at in every answer of a run: one watcher a question, for one environment and for lanes alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import gymnasium as gym
import numpy as np

from rlcollect.testing._contract.report import Faults, Finding
from rlcollect.testing._contract.session import Answer
from rlcollect.testing._contract.values import Fingerprint, as_array, described, difference, fingerprint, misfits

__all__ = [
    "Episodes",
    "Flags",
    "Infos",
    "Observations",
    "Reused",
    "Rewards",
    "Watcher",
    "count",
]

Space: TypeAlias = gym.Space[Any]


class Watcher(Protocol):
    """Sees every answer of a run, then says what it found."""

    def see(self, answer: Answer, /) -> None:
        """Looks at one."""

    def findings(self) -> Iterator[Finding]:
        """What it found."""


class Observations:
    """Structure, shapes and dtypes; NaN and bounds."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._faults = {"form": Faults("observation form"), "values": Faults("observation values")}
        self._seen = 0

    def see(self, answer: Answer) -> None:
        """Holds it against the space."""
        self._seen += 1
        for misfit in misfits(self._space, answer.observation):
            self._faults[misfit.aspect].add(misfit.level, f"{answer.where}: {misfit.text}", misfit.remedy)

    def findings(self) -> Iterator[Finding]:
        """Of form and of values."""
        if self._seen:
            yield self._faults["form"].finding(f"{count(self._seen, 'observation')} as the space says")
            yield self._faults["values"].finding("finite, within the bounds of the space")


class Rewards:
    """One finite number a lane."""

    def __init__(self) -> None:
        self._faults = Faults("rewards")
        self._least, self._greatest = math.inf, -math.inf

    def see(self, answer: Answer) -> None:
        """Looks at the reward of a step."""
        if not answer.is_step:
            return
        array, lanes = as_array(answer.reward), answer.begun.shape
        came = f"{answer.where}: it is {described(answer.reward)}"
        if array.dtype.kind not in "biuf":
            self._faults.add("broken", f"{came}, which is no number", "Return a float.")
        elif lanes == () and array.size != 1:
            self._faults.add("broken", f"{came}; one number is expected", "Return a float.")
        elif not np.isfinite(array).all():
            self._faults.add("broken", f"{came}: {array.tolist()}", "Find where it is computed: it ruins every return.")
        else:
            self._least = min(self._least, float(array.min()))
            self._greatest = max(self._greatest, float(array.max()))
            if array.shape != lanes:
                remedy = "rlcollect takes the number in it; gymnasium's vector environments may fail: return a float."
                self._faults.add("warning", f"{came}; one number is expected", remedy)

    def findings(self) -> Iterator[Finding]:
        """One."""
        if self._least <= self._greatest:
            yield self._faults.finding(f"finite, from {self._least:.4g} to {self._greatest:.4g}")
        else:
            yield from _only_faults(self._faults)


class Flags:
    """`terminated` and `truncated` are bools."""

    def __init__(self) -> None:
        self._faults = Faults("flags")
        self._seen = False

    def see(self, answer: Answer) -> None:
        """Looks at both."""
        if not answer.is_step:
            return
        self._seen = True
        for name, value in (("terminated", answer.terminated), ("truncated", answer.truncated)):
            one_of_its_own = isinstance(value, bool | np.bool_)
            if not (one_of_its_own if answer.begun.shape == () else as_array(value).dtype == np.bool_):
                self._faults.add(
                    "broken", f"{answer.where}: {name} is {described(value)}; a bool is expected", "Return bool(...)."
                )

    def findings(self) -> Iterator[Finding]:
        """One."""
        if self._seen:
            yield self._faults.finding("bools")


class Infos:
    """Infos are dicts."""

    def __init__(self) -> None:
        self._faults = Faults("infos")
        self._keys: set[str] = set()

    def see(self, answer: Answer) -> None:
        """Looks at one."""
        if isinstance(answer.info, dict):
            self._keys |= {str(key) for key in answer.info if not str(key).startswith("_")}
        else:
            self._faults.add(
                "broken", f"{answer.where}: it is {described(answer.info)}; a dict is expected", "Return a dict."
            )

    def findings(self) -> Iterator[Finding]:
        """One."""
        keys = ", ".join(sorted(self._keys)[:8]) or "none"
        yield self._faults.finding(f"dicts; keys: {keys}{', ...' if len(self._keys) > 8 else ''}")


class Reused:
    """Whether what an answer held is still the same some calls later."""

    KEPT = 16

    def __init__(self) -> None:
        self._faults = Faults("reused arrays")
        self._kept: list[tuple[str, dict[str, tuple[Any, Fingerprint]]]] = []

    def see(self, answer: Answer) -> None:
        """Keeps it, and the bits that it has now."""
        parts = {"observation": answer.observation, "info": answer.info}
        if answer.begun.shape:  # arrays, which can be reused too
            parts |= {"reward": answer.reward, "terminated": answer.terminated, "truncated": answer.truncated}
        kept = {name: (value, fingerprint(value, name)) for name, value in parts.items()}
        if len(self._kept) == self.KEPT:
            self._verify()
        self._kept.append((answer.where, kept))

    def findings(self) -> Iterator[Finding]:
        """One."""
        self._verify()
        yield self._faults.finding("what was returned stays as it was")

    def _verify(self) -> None:
        for where, parts in self._kept:
            for name, (value, before) in parts.items():
                if (path := difference(before, fingerprint(value, name))) is not None:
                    self._faults.add(
                        "warning",
                        f"{path} of {where} has changed since: later calls write to the same memory",
                        "rlcollect copies what it records at once. Code that keeps what it was given sees it change: "
                        "return a copy.",
                    )
        self._kept.clear()


class Episodes:
    """How long episodes are, and how they end.

    Attributes:
        first_end: the step at which the first one ended; None: none did.
    """

    def __init__(self) -> None:
        self.first_end: int | None = None
        self._lengths: list[int] = []
        self._ends = {"terminated": 0, "truncated": 0, "both": 0}
        self._running = np.zeros(1, np.int64)

    def see(self, answer: Answer) -> None:
        """Counts."""
        begun = np.atleast_1d(answer.begun)
        running = np.where(begun, 0, self._running)
        if answer.is_step:
            running += ~begun
            done = np.atleast_1d(answer.done) & ~begun
            if done.any() and self.first_end is None:
                self.first_end = answer.steps
            terminated = np.broadcast_to(as_array(answer.terminated).astype(np.bool_).reshape(-1), done.shape)
            truncated = np.broadcast_to(as_array(answer.truncated).astype(np.bool_).reshape(-1), done.shape)
            for lane in np.flatnonzero(done):
                both = terminated[lane] and truncated[lane]
                self._ends["both" if both else "terminated" if terminated[lane] else "truncated"] += 1
                self._lengths.append(int(running[lane]))
            running[done] = 0
        self._running = running

    def findings(self) -> Iterator[Finding]:
        """One."""
        if not self._lengths:
            yield Finding(
                "episodes",
                "skipped",
                f"none has ended; the longest has {count(int(self._running.max()), 'step')}",
                "Ends are not checked: take more steps. Where episodes have no end, collect with max_frames_per_traj.",
            )
            return
        mean = sum(self._lengths) / len(self._lengths)
        ends = ", ".join(f"{count:,} {name}" for name, count in self._ends.items() if count)
        found = f"{count(len(self._lengths), 'episode')} of {min(self._lengths):,} to {max(self._lengths):,} steps"
        yield Finding("episodes", "ok", f"{found}, mean {mean:.4g}; ends: {ends}")


def _only_faults(faults: Faults) -> Iterator[Finding]:
    finding = faults.finding("")
    if finding.level != "ok":
        yield finding


def count(number: int, what: str) -> str:
    """So many of them, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
