"""What a replay buffer costs: frames per second of a `ReplayBuffer`, beside those of TorchRL and bare torch.

100,000 frames of CartPole, written as [16, 128] batches; samples of 256, single or as 16 slices of 16. Images are
20,000 frames of 84 x 84 x 4 bytes. TorchRL is asked for the same from the same frames: `ReplayBuffer` and
`TensorDictReplayBuffer`, with memory or files. Aims: extend and sample twice TorchRL's; images 0.7 of torch's
`index_select` alone, on the same tensors.

    python benchmarks/replay.py                  every case
    python benchmarks/replay.py extend sample
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from harness import run
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

from rlcollect import ReplayBuffer

LANES, STEPS, CAPACITY = 16, 128, 100_000
SAMPLE, LENGTH, EPISODE = 256, 16, 40
IMAGES = 20_000


def cartpole() -> TensorDict:
    """A batch, as a collector gives it; episodes of 40 steps."""
    size = [LANES, STEPS]
    done = (torch.arange(STEPS) % EPISODE == EPISODE - 1).expand(size)[..., None]
    ends = {"done": done.clone(), "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    ids = torch.arange(LANES)[:, None] * 1000 + torch.arange(STEPS) // EPISODE
    values = {
        "observation": torch.randn(*size, 4),
        "action": torch.randint(0, 2, size),
        **{key: torch.zeros_like(done) for key in ends},
        "next": {"observation": torch.randn(*size, 4), "reward": torch.ones(*size, 1), **ends},
        "collector": {"traj_ids": ids, "policy_version": torch.zeros(size, dtype=torch.int64)},
    }
    return TensorDict(values, size, names=[None, "time"])


def images() -> TensorDict:
    """One frame each of so many lanes."""
    size = [LANES, IMAGES // LANES]
    pixels = torch.randint(0, 256, (*size, 84, 84, 4), dtype=torch.uint8)
    values = {"pixels": pixels, "action": torch.zeros(size, dtype=torch.int64)}
    return TensorDict(values, size, names=[None, "time"])


def filled(buffer: Any, batch: TensorDict, *, flat: bool) -> Any:
    for _ in range(CAPACITY // batch.numel() + 1 if batch.numel() < IMAGES else 1):
        buffer.extend(batch.reshape(-1) if flat else batch)
    return buffer


def theirs(kind: Any, storage: Any, **options: Any) -> Any:
    warnings.filterwarnings("ignore")
    return kind(storage=storage(CAPACITY), batch_size=SAMPLE, **options)


def repeated(call: Callable[[], Any], count: int) -> Iterator[int]:
    while True:
        call()
        yield count


def extend(kind: Any, storage: Any, ours: str) -> Mapping[str, Iterator[int]]:
    batch = cartpole()
    mine, other = filled(ReplayBuffer(CAPACITY, storage=ours), batch, flat=False), theirs(kind, storage)
    return {
        "ours": repeated(lambda: mine.extend(batch), batch.numel()),
        "torchrl": repeated(lambda: other.extend(batch.reshape(-1)), batch.numel()),
    }


def sample(kind: Any, storage: Any, ours: str) -> Mapping[str, Iterator[int]]:
    batch = cartpole()
    mine = filled(ReplayBuffer(CAPACITY, storage=ours, batch_size=SAMPLE), batch, flat=False)
    other = filled(theirs(kind, storage), batch, flat=True)
    return {"ours": repeated(mine.sample, SAMPLE), "torchrl": repeated(other.sample, SAMPLE)}


def slices(kind: Any, storage: Any, ours: str) -> Mapping[str, Iterator[int]]:
    batch = cartpole()
    options = {"sampler": "slice", "slice_len": LENGTH, "batch_size": SAMPLE, "storage": ours}
    mine = filled(ReplayBuffer(CAPACITY, **options), batch, flat=False)
    sampler = SliceSampler(slice_len=LENGTH, traj_key=("collector", "traj_ids"), cache_values=True)
    other = filled(theirs(kind, storage, sampler=sampler), batch, flat=True)
    return {"ours": repeated(mine.sample, SAMPLE), "torchrl": repeated(other.sample, SAMPLE)}


def pixels(ours: str) -> Mapping[str, Iterator[int]]:
    batch = images()
    mine = filled(ReplayBuffer(IMAGES, storage=ours, batch_size=SAMPLE), batch, flat=False)
    columns = [*mine._place.columns.values()]

    def bare() -> list[torch.Tensor]:
        rows = torch.randint(0, IMAGES, (SAMPLE,))
        return [column.index_select(0, rows) for column in columns]

    return {"ours": repeated(mine.sample, SAMPLE), "index_select": repeated(bare, SAMPLE)}


STORAGES = {"memory": (LazyTensorStorage, "memory"), "files": (LazyMemmapStorage, "memmap")}
KINDS = {"": TorchRLReplayBuffer, " tensordict": TensorDictReplayBuffer}
CASES: dict[str, Callable[[], Mapping[str, Iterator[int]]]] = {
    f"{name} {where}{which}": partial(case, kind, storage, ours)
    for name, case in {"extend": extend, "sample": sample, "slices": slices}.items()
    for where, (storage, ours) in STORAGES.items()
    for which, kind in KINDS.items()
}
CASES |= {f"images {where}": partial(pixels, where) for where in ("memory", "shared", "memmap")}


if __name__ == "__main__":
    run(__doc__, CASES)
