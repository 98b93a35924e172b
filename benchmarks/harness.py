"""Arms that take turns, and the median of their ratios: what every benchmark here is made of."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Result:
    """One case: the first arm against the second."""

    case: str
    median: float
    least: float
    most: float
    rates: Mapping[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in self.rates.items())
        return f"{self.case:28} {self.median:6.3f} ({self.least:.3f} - {self.most:.3f})   {rates}"


def rate(arm: Iterator[int], seconds: float) -> float:
    """Items per second of an arm that yields how many it has just made."""
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += next(arm)
    return count / elapsed


def compare(case: str, arms: Mapping[str, Iterator[int]], rounds: int = 7, seconds: float = 0.7) -> Result:
    """Runs the arms in turn, A B A B ..., and takes the ratio of the first to the second in each round."""
    for arm in arms.values():
        next(arm), next(arm)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            rates[name].append(rate(arm, seconds))
    ours, theirs = list(rates.values())[:2]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Result(
        case,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        {name: statistics.median(values) for name, values in rates.items()},
    )


def run(about: str | None, cases: Mapping[str, Callable[[], Mapping[str, Iterator[int]]]]) -> None:
    """What these programs do: the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(cases)}; all when none is named")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cases or cases:
        print(compare(name, cases[name](), options.rounds, options.seconds), flush=True)
