"""What a driver is opened with, and how what goes wrong on the way tells the lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rlcollect.failures import relayed
from rlcollect.options import What, Where

__all__ = ["Opening", "at_lane"]


@dataclass(frozen=True)
class Opening:
    """What a driver is opened with.

    Attributes:
        envs: the environments, one a lane, or a single one that holds all lanes.
        owned: those of them that are to be closed with the driver; instances that were passed in are not.
        what: info keys, names, dtypes and reset options are taken from here.
        where: devices, and what the user says of the environments.
        batched: whether batches have a dimension of lanes where each environment is one lane.
        names: names that observation keys may not have, beside those that are always ours.
        worker: number of the worker, for errors and seeds.
        seed: whose children the seeds of single episodes are, until others are asked for.
        generation: how many workers of this number there were before.
    """

    envs: Sequence[Any]
    owned: Sequence[Any]
    what: What
    where: Where
    batched: bool
    names: Sequence[str]
    worker: int
    seed: int = 0
    generation: int = 0


class at_lane:  # noqa: N801 - reads as a statement
    """What is raised inside comes out with worker and lane, before the first step."""

    def __init__(self, worker: int, lane: int | None) -> None:
        self._worker = worker
        self._lane = lane

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            raise relayed(error, worker=self._worker, lane=self._lane, step=0)
