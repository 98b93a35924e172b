"""What a collector can tell about itself, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Late", "Spread", "Stats", "Threads", "TimeShares", "WorkerStats"]


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of the last episodes; None where no episode has ended yet."""

    mean: float | None
    min: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values."""
        if not values:
            return cls(None, None, None)
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class TimeShares:
    """Where the time goes, as shares of the time spent making rollouts; they add up to 1. Told from sampled steps."""

    env: float
    policy: float
    writing: float
    elsewhere: float

    @classmethod
    def of(
        cls, sampled: int, env: float, policy: float, writing: float, *, steps: int, seconds: float
    ) -> TimeShares | None:
        """The shares of `seconds`, in which `steps` steps were made, told from some that were measured.

        Args:
            sampled: how many were.
            env: seconds of those in environments.
            policy: in the policy.
            writing: spent writing.
            steps: of all.
            seconds: in which they were made.
        """
        if not sampled or not seconds:
            return None
        parts = [part * steps / sampled / seconds for part in (env, policy, writing)]
        total = max(1.0, sum(parts))  # few samples can claim more than there was
        env, policy, writing = (part / total for part in parts)
        return cls(env, policy, writing, max(0.0, 1.0 - env - policy - writing))

    @classmethod
    def mean(cls, several: Sequence[TimeShares | None]) -> TimeShares | None:
        """The mean of those that are known; None: none is."""
        known = [dataclasses.astuple(shares) for shares in several if shares is not None]
        return cls(*(sum(parts) / len(known) for parts in zip(*known, strict=True))) if known else None


@dataclass(frozen=True)
class Threads:
    """Threads that torch computes with.

    Attributes:
        main: in the program.
        workers: in each worker process; and processes that its environments have started.
    """

    main: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class WorkerStats:
    """What one worker's frames came to.

    Attributes:
        restarts: how many times it was put in the place of one that failed.
        dropped: frames that were made and never delivered: see `Stats`; and those lost when it failed, as far as known.
        preempted: frames that were not made, since the rollout was ended early.
        late: frames that were delivered in a later batch than they were begun for.
    """

    restarts: int = 0
    dropped: int = 0
    preempted: int = 0
    late: int = 0


@dataclass(frozen=True)
class Late:
    """Rollouts that came in a later batch than they were begun for.

    Attributes:
        rollouts: how many there were.
        batches: how many batches later, of the last hundred.
        versions: how many updates of the weights their frames were behind when they were delivered, of the same.
    """

    rollouts: int
    batches: Spread
    versions: Spread


@dataclass(frozen=True)
class Stats:
    """Figures of a collector, so far.

    Attributes:
        frames: delivered.
        batches: delivered.
        seconds: spent collecting; what the caller did between batches is not in it.
        frames_per_second: frames / seconds.
        episodes: that have ended.
        episode_return: undiscounted, of the last 100 episodes that ended.
        episode_length: in frames, of the same.
        policy_version: how many times weights were updated.
        time: None before the first step.
        dropped: frames that lanes had made ahead of others and that were never delivered: when the last batch came,
            when a rollout was broken off, when a state was loaded, or when a worker failed (as far as is known).
        threads: None where there are no worker processes.
        workers: one a worker process.
        late: None where no rollout can be.
        object_store_bytes: of Ray's object store: rollouts that have come and were not taken (small ones are in the
            program's memory, and counted too), and weights; None where workers are not on a cluster.
    """

    frames: int
    batches: int
    seconds: float
    frames_per_second: float
    episodes: int
    episode_return: Spread
    episode_length: Spread
    policy_version: int
    time: TimeShares | None
    dropped: int = 0
    threads: Threads | None = None
    workers: tuple[WorkerStats, ...] = ()
    late: Late | None = None
    object_store_bytes: int | None = None

    def as_dict(self) -> dict[str, float]:
        """Flat, for loggers: `{"frames": ..., "episode_return/mean": ..., "workers/0/restarts": ...}`.

        What is not known yet is left out.
        """
        return dict(_flat("", dataclasses.asdict(self)))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple):
        value = {str(place): part for place, part in enumerate(value)}
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from _flat(f"{name}/{part}" if name else part, inner)
    elif value is not None:
        yield name, value
