"""What a check found, and what all of them found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["BrokenError", "Faults", "Finding", "Level", "Report", "merged"]

Level: TypeAlias = Literal["ok", "warning", "broken", "skipped"]
"""How a check ended; `Finding.level` says what each means."""

_RANK: Final[dict[Level, int]] = {"skipped": 0, "ok": 1, "warning": 2, "broken": 3}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check: "rewards", "same seed", ...
        level: "ok"; "warning": it can be collected from, and there is a trap or a cost; "broken": the environment
            breaks its contract, and data would be wrong or collection would fail; "skipped": nothing is known, and
            `found` says why.
        found: what was found, and where.
        remedy: what to do about it; empty where nothing is to be done.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.name}: {self.found}" + (f" -> {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Report:
    """What all checks of an environment found; its text has one line a finding.

        report = check_env(MyEnv)
        assert not report.broken, report

    Attributes:
        environment: what was checked: an id, or the name of the maker.
        findings: one for each check.
    """

    environment: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that break the contract."""
        return self._of("broken")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that warn."""
        return self._of("warning")

    def __getitem__(self, name: str) -> Finding:
        """The finding of the check of that name.

        Raises:
            KeyError: there is none.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no check {name!r}; there are {[finding.name for finding in self.findings]}")

    def __str__(self) -> str:
        return "\n".join([self.environment, *(f"  {finding}" for finding in self.findings)])

    def _of(self, level: Level) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == level)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding a name: the first of the worst ones, where the name came first."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        known = worst.setdefault(finding.name, finding)
        if _RANK[finding.level] > _RANK[known.level]:
            worst[finding.name] = finding
    return tuple(worst.values())


class BrokenError(Exception):
    """A check cannot go on: the environment raised, or gave what nothing can be made of.

    Attributes:
        findings: what was found.
    """

    def __init__(self, *findings: Finding) -> None:
        super().__init__("; ".join(map(str, findings)))
        self.findings = findings


class Faults:
    """Collects what one check sees go wrong; the first of the worst is told, with how many there were."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: dict[Level, tuple[str, str]] = {}
        self._count: dict[Level, int] = {}

    def add(self, level: Level, found: str, remedy: str) -> None:
        """One more."""
        self._first.setdefault(level, (found, remedy))
        self._count[level] = self._count.get(level, 0) + 1

    def finding(self, fine: str) -> Finding:
        """What is told; `fine` where nothing went wrong."""
        if not self._first:
            return Finding(self.name, "ok", fine)
        level = max(self._first, key=_RANK.__getitem__)
        found, remedy = self._first[level]
        more = self._count[level] - 1
        return Finding(self.name, level, f"{found} (and {more:,} more)" if more else found, remedy)
