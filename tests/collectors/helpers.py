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


class WholeEpisodes:
    """What was delivered with `trajs_per_batch=`, of `Tagged` environments: checks each episode by itself.

    Args:
        count: episodes of a batch.

    Attributes:
        episodes: (tag, its number in its lane, frames) of each, in the order in which they came.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.episodes: list[tuple[int, int, int]] = []
        self._ids: set[int] = set()

    def add(self, batch: TensorDictBase) -> TensorDictBase:
        """Takes a batch of any form; it is given back."""
        episodes = list(episodes_of(batch))
        assert len(episodes) == self.count
        for episode in episodes:
            self._check(episode)
        return batch

    def _check(self, episode: TensorDictBase) -> None:
        count = len(episode)
        (tag, number), *others = {(row[0], row[1]) for row in episode["observation"].int().tolist()}
        assert not others, "rows of two episodes"
        assert episode["observation"][:, 2].tolist() == list(range(count)), "from its first frame on, each in its place"
        assert episode["next", "observation"][:, 2].tolist() == list(range(1, count + 1))
        assert episode["next", "done"][:, 0].tolist() == [False] * (count - 1) + [True], "to its done"
        (identity,) = set(episode["collector", "traj_ids"].tolist())
        assert identity not in self._ids, "twice"
        self._ids.add(identity)
        self.episodes.append((tag, number, count))

    def check_none_is_missing(self) -> None:
        """Of each lane those from the first on, in order."""
        for tag in {episode[0] for episode in self.episodes}:
            numbers = [number for other, number, _ in self.episodes if other == tag]
            assert numbers == list(range(len(numbers))), f"lane {tag}"

    @property
    def frames(self) -> int:
        """How many came."""
        return sum(count for _, _, count in self.episodes)


def episodes_of(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """The episodes `[T]` of a batch of whole ones, without padding."""
    if batch.ndim == 2:
        for row, mask in zip(batch, batch["collector", "mask"], strict=True):
            assert mask.tolist() == sorted(mask.tolist(), reverse=True), "padding comes last"
            yield row[mask]
    elif batch.names == ["time"]:
        ends = batch["next", "done"].squeeze(-1).nonzero()[:, 0].tolist()
        assert ends[-1] == len(batch) - 1
        yield from (
            batch[first:end] for first, end in zip([0, *(e + 1 for e in ends)], [e + 1 for e in ends], strict=False)
        )
    else:
        leaves = dict(batch.items(include_nested=True, leaves_only=True))
        parts = {key: leaf.unbind() for key, leaf in leaves.items()}
        for number in range(len(batch)):
            yield TensorDict({key: part[number] for key, part in parts.items()}, [len(parts["observation"][number])])
