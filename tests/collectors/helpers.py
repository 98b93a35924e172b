"""What the tests of the collector share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.testing import Counter, Probe, check_batch


def counters(*lengths: int | None, **options: Any) -> list[Counter]:
    """One `Counter` a lane."""
    return [Counter(length, **options) for length in lengths]


def checked(batches: Iterable[TensorDictBase]) -> Iterator[TensorDictBase]:
    """The batches, each held against the one before it."""
    previous = None
    for batch in batches:
        check_batch(batch, previous=previous)
        yield batch
        previous = batch


def joined(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """All frames of each lane in one piece."""
    return torch.cat(list(batches), -1)


def ids(batch: TensorDictBase) -> list[Any]:
    return batch["collector", "traj_ids"].tolist()


def seen(batch: TensorDictBase) -> list[Any]:
    """What the policy saw, of environments whose observation is one number."""
    return batch["observation"].squeeze(-1).tolist()


def after(batch: TensorDictBase) -> list[Any]:
    return batch["next", "observation"].squeeze(-1).tolist()


def flag(batch: TensorDictBase, name: str) -> list[Any]:
    """`("next", name)`, a number a frame."""
    return batch["next", name].squeeze(-1).int().tolist()


def same(left: TensorDictBase, right: TensorDictBase) -> bool:
    """Same keys and same values, NaN being equal to NaN."""
    ours, theirs = (dict(batch.items(include_nested=True, leaves_only=True)) for batch in (left, right))
    return ours.keys() == theirs.keys() and all(
        torch.equal(torch.nan_to_num(ours[key].double(), nan=-77.0), torch.nan_to_num(theirs[key].double(), nan=-77.0))
        for key in ours
    )


def copied(batch: TensorDictBase) -> TensorDictBase:
    """A copy that shares nothing."""
    return batch.clone()


def td_of(**values: torch.Tensor) -> TensorDict:
    return TensorDict(values, [])


class Restless(Probe):
    """A `Counter` whose episode starts at a random number and ends at a random time: its stream shows itself."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        base = Counter()
        self.observation_space, self.action_space = base.observation_space, base.action_space
        self.start = 0

    def _draw_limit(self) -> int:
        self.start = int(self.np_random.integers(1000))
        return int(self.np_random.integers(1, self.length + 1))

    def _observe(self) -> Any:
        return torch.tensor([self.start + self.t], dtype=torch.float32).numpy()


def interrupt_at_call(number):
    """Ctrl-C is typed as the so-manieth call of a Python function from now on begins; returns where that was."""
    places = []

    def look(frame, event, _):
        if event == "call":
            places.append(f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_qualname}")
            if len(places) == number:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    return places
