"""What the tests of worker processes share: the kinds of collectors, and probes that worker processes can import.

Classes and functions that are sent to workers are here, by reference; those that are to cross by value are written in
the tests themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn

from rlcollect import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from rlcollect.testing import Probe, Tagged, check_batch
from tests import backend

ENDS: dict[int, Any] = {0: "terminated", 1: "truncated", 2: "both"}
PREFIX = 40  # bits of an id below the worker's number
MANY = 2000  # batches in which every worker has its turn


@dataclass(frozen=True)
class Kind:
    """A kind of collector, and how many workers it has in these tests."""

    cls: Any
    workers: int
    is_sync: bool
    is_on_ray: bool = False

    @property
    def is_process(self) -> bool:
        return self.cls is not Collector

    @property
    def takes_several(self) -> bool:
        return self.is_on_ray or self.cls in (MultiSyncCollector, MultiAsyncCollector)

    @property
    def together(self) -> int:
        """Workers that make a batch together."""
        return self.workers if self.is_sync else 1

    def source(self, make: Callable[[int], Any]) -> Any:
        """What to pass as `create_env_fn`: `make(worker)` for each worker."""
        return [make(worker) for worker in range(self.workers)] if self.takes_several else make(0)

    def open(
        self, make: Callable[[int], Any], policy: Any = None, *, steps: int = 4, lanes: int | None, **options: Any
    ):
        """A collector; batches of `steps` steps of each lane."""
        frames = steps * (lanes or 1) * self.together
        return self.cls(self.source(make), policy, frames_per_batch=frames, num_envs=lanes, **options)

    def parts(self, batch: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
        """What each worker made of a batch, by worker."""
        if self.cls is MultiSyncCollector or (self.is_on_ray and self.is_sync):
            return list(enumerate(batch.unbind(0)))
        return [(owner(batch), batch)]


SEVERAL = backend.sync_and_async()
KINDS = {
    "single": Kind(Collector, 1, True),
    "sync": Kind(SEVERAL["sync"], 2, True, backend.IS_RAY),
    "async": Kind(SEVERAL["async"], 2, False, backend.IS_RAY),
    "one async": Kind(AsyncCollector, 1, False),
}
PROCESSES = [name for name, kind in KINDS.items() if kind.is_process]


def of(names: Iterable[str], slow: Sequence[str] = ("one async",)) -> Any:
    """These kinds; one asynchronous worker, which does what one of two does, in the long run alone."""
    cases = [pytest.param(KINDS[name], marks=pytest.mark.slow if name in slow else (), id=name) for name in names]
    return pytest.mark.parametrize("kind", cases)


def owner(batch: TensorDictBase) -> int:
    """The worker that made it, as its ids tell."""
    ids = batch["collector", "traj_ids"]
    prefixes = set((ids[ids >= 0] >> PREFIX).tolist())
    assert len(prefixes) == 1, prefixes
    return prefixes.pop()


def by_worker(kind: Kind, batches: Iterable[TensorDictBase]) -> list[list[TensorDictBase]]:
    """Each worker's own batches, in order; each held against the one before it."""
    parts: list[list[TensorDictBase]] = [[] for _ in range(kind.workers)]
    for batch in batches:
        for worker, part in kind.parts(batch):
            check_batch(part, previous=parts[worker][-1] if parts[worker] else None)
            parts[worker].append(part)
    return parts


def take(kind: Kind, collector: Any, each: int) -> list[list[TensorDictBase]]:
    """The first so many batches of each worker."""
    batches: list[TensorDictBase] = []
    counts = [0] * kind.workers
    while min(counts) < each:
        batch = collector.next()
        batches.append(batch)
        for worker, _ in kind.parts(batch):
            counts[worker] += 1
        assert len(batches) < MANY, f"a worker starves: {counts}"
    return [parts[:each] for parts in by_worker(kind, batches)]


def whole(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """A worker's frames in one piece, `[N, T]` also for a single lane."""
    joined = torch.cat(list(parts), -1)
    return joined if joined.batch_dims > 1 else joined.unsqueeze(0)


def lanes_of(parts: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """The frames of each lane of a worker, `[F]`, without rows that are none."""
    frames = whole(parts)
    mask = frames.get(("collector", "mask"), torch.ones(frames.batch_size, dtype=torch.bool))
    return [lane[here] for lane, here in zip(frames.unbind(0), mask.unbind(0), strict=True)]


def leaves(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    return dict(batch.items(include_nested=True, leaves_only=True))


def forms(batch: TensorDictBase) -> dict[Any, Any]:
    """Dtype, and shape behind the batch dimensions, by key."""
    return {key: (value.dtype, tuple(value.shape[batch.batch_dims :])) for key, value in leaves(batch).items()}


def bits(batch: TensorDictBase) -> dict[Any, Any]:
    """Every leaf with dtype, shape and bytes."""
    return {
        key: (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist())
        for key, value in leaves(batch).items()
    }


def assert_same(
    ours: Sequence[TensorDictBase], theirs: Sequence[TensorDictBase], *, without: Sequence[Any] = ()
) -> None:
    """Bit for bit the same batches, with the same names of dimensions."""
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.batch_size == other.batch_size
        assert one.names == other.names
        assert one.device == other.device
        mine, yours = bits(one.exclude(*without)), bits(other.exclude(*without))
        assert mine.keys() == yours.keys()
        assert [key for key in mine if mine[key] != yours[key]] == [], f"batch {number}"


# --- environments -----------------------------------------------------------------------------------------------------


class TaggedLanes:
    """Makes lane after lane of a worker: tag `10 * worker + lane`, lengths and ends of their own."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.made = 0

    def __call__(self) -> Tagged:
        tag = 10 * self.worker + self.made
        self.made += 1
        return tagged_lane(tag)


def tagged_lane(tag: int) -> Tagged:
    return Tagged(tag, length_of(tag), end=ENDS[tag % 3])


def length_of(tag: int) -> int:
    return 2 + tag // 10 + 2 * (tag % 10)


def tagged_frames(tag: int, count: int) -> list[tuple[Any, ...]]:
    """What a lane of `TaggedLanes` must give: seen, seen after, reward, terminated, truncated."""
    rows, length, end = [], length_of(tag), ENDS[tag % 3]
    for frame in range(count):
        episode, t = divmod(frame, length)
        last = t == length - 1
        flags = (last and end != "truncated", last and end != "terminated")
        rows.append(([tag, episode, t], [tag, episode, t + 1], float(t), *flags))
    return rows


def frames_seen(lane: TensorDictBase) -> list[tuple[Any, ...]]:
    """The same of a lane's frames."""
    step = lane["next"]
    columns = (lane["observation"], step["observation"], step["reward"], step["terminated"], step["truncated"])
    flat = [value if value.shape[1:] == (3,) else value.squeeze(-1) for value in columns]
    return list(zip(*(value.tolist() for value in flat), strict=True))


class Endless:
    """Makes `Tagged` lanes of one worker whose episodes never end."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def __call__(self) -> Tagged:
        return Tagged(self.worker, None)


class Rich(Probe):
    """A Dict observation that begins at a random number; `reset` options and keyword arguments show in it."""

    def __init__(self, length: int = 5, offset: float = 0.0) -> None:
        super().__init__(length)
        self.offset = offset
        self.start, self.option = 0.0, 0
        self.observation_space = spaces.Dict(
            {
                "x": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "option": spaces.Discrete(1000),
                "deep": spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8)}),
            }
        )
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.option = (options or {}).get("option", 0)
        return super().reset(seed=seed, options=options)

    def _draw_limit(self) -> int:
        self.start = float(self.np_random.integers(1_000_000)) + self.offset
        return int(self.np_random.integers(1, self.length + 1))

    def _observe(self) -> Any:
        image = np.full((2, 2), self.t, np.uint8)
        return {"x": np.array([self.start, self.t]), "option": np.int64(self.option), "deep": {"image": image}}

    def _reward_for(self, action: Any) -> float:
        return float(action[0]) + self.t


class Starts(Probe):
    """Observes a number that is drawn at each reset; episodes of one length."""

    def __init__(self, length: int | None = 3) -> None:
        super().__init__(length)
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.start = 0

    def _draw_limit(self) -> int | None:
        self.start = int(self.np_random.integers(2**20))
        return self.length

    def _observe(self) -> Any:
        return np.array([self.start], np.float32)


class GloballyRandom(Starts):
    """Draws from the generators that belong to nobody."""

    def _observe(self) -> Any:
        return np.array([random.random(), np.random.rand(), float(torch.rand(()))], np.float32)

    def __init__(self, length: int | None = 3) -> None:
        super().__init__(length)
        self.observation_space = spaces.Box(0, 1, (3,), np.float32)


# --- policies ---------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Its action is a parameter, and another output a buffer: an `Echo` then tells which weights were used."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.value + self.shift).expand(*observation.shape[:-1], 1)

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.value.fill_(value)


class Noisy(nn.Module):
    """A stochastic policy for `Rich`: draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.randn(*x.shape[:-1], 1)


def talkative(tensordict: TensorDictBase) -> TensorDictBase:
    """Writes more than an action: nested keys, and of several dtypes; the same each time for the same observation."""
    first = next(iter(leaves(tensordict).values()))
    shape = tensordict.batch_size
    number = first.double().reshape(*shape, -1)[..., :1]
    tensordict["action"] = (number.squeeze(-1) % 2).long()
    tensordict["value"] = number.float() * 0.5
    tensordict["heads", "logits"] = number.expand(*shape, 2) / 3
    tensordict["heads", "deep", "flag"] = number % 2 == 0
    tensordict["small"] = (number % 100).to(torch.uint8)
    tensordict["half"] = number.to(torch.float16)
    tensordict["rounded"] = number.to(torch.bfloat16)
    return tensordict


def remembering(observation: torch.Tensor, hidden: torch.Tensor | None = None) -> dict[Any, torch.Tensor]:
    """Counts the steps of an episode in a recurrent state."""
    hidden = torch.zeros(*observation.shape[:-1], 1) if hidden is None else hidden
    return {"action": (hidden[..., 0] % 2).long(), ("next", "hidden"): hidden + 1}


class Swinging(nn.Module):
    """Dropout: its action is 1, and sometimes 0 in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.drop(torch.ones(observation.shape[:-1])) > 0).long()
