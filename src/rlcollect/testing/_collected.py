"""What `CollectionContract` looks at batches with, and what it expects of a space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import gymnasium as gym
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

from rlcollect.errors import InvalidBatchError
from rlcollect.testing._rows import MASK, Key, quoted
from rlcollect.testing.batches import check_batch

__all__ = [
    "Form",
    "checked",
    "expect",
    "expect_same",
    "forms_of",
    "frames_by_lane",
    "keys_of",
    "last_frames",
    "mask_of",
]

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]

_DTYPES: Final = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32")
}


def expect(holds: bool, text: str) -> None:
    """Raises `InvalidBatchError` where it does not hold."""
    if not holds:
        raise InvalidBatchError(text)


def checked(batches: Iterable[TensorDictBase]) -> Iterator[TensorDictBase]:
    """The same batches, each checked, also against the one before it."""
    previous = None
    for batch in batches:
        check_batch(batch, previous=previous)
        yield batch
        previous = batch


def mask_of(batch: TensorDictBase) -> Tensor:
    """bool, which rows are frames."""
    mask: Tensor | None = batch.get(MASK, None)
    return torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device) if mask is None else mask


def last_frames(batch: TensorDictBase) -> Tensor:
    """bool, which frames are the last valid ones of their lane."""
    mask = mask_of(batch)
    return mask & (mask.sum(-1, keepdim=True) - 1 == torch.arange(mask.shape[-1], device=mask.device))


def frames_by_lane(batches: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """The frames of each lane, in order of time."""
    flat = [batch.reshape(-1, batch.batch_size[-1]) for batch in batches]
    return [torch.cat([batch[lane][mask_of(batch)[lane]] for batch in flat]) for lane in range(len(flat[0]))]


def keys_of(batch: TensorDictBase) -> set[Key]:
    """Of every leaf."""
    keys = batch.keys(include_nested=True, leaves_only=True)
    return {key if isinstance(key, tuple) else (key,) for key in keys}


def expect_same(expected: Any, came: Any, what: str) -> None:
    """Raises `InvalidBatchError` where two batches differ, in keys or in a bit; NaN is equal to NaN."""
    expect(keys_of(expected) == keys_of(came), f"{what}: keys differ, {keys_of(expected) ^ keys_of(came)}")
    for key in keys_of(expected):
        one, other = expected.get(key), came.get(key)
        same = one.shape == other.shape and torch.equal(one.isnan(), other.isnan())
        same = same and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
        expect(same, f"{what}: {quoted(key)} differs")


def forms_of(space: gym.Space[Any], key: Key) -> Iterator[tuple[Key, Form]]:
    """What a batch makes of a space; what has no fixed form there is left out."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for name, part in parts:
            yield from forms_of(part, (*key, str(name)))
    elif isinstance(space, spaces.Discrete):
        yield key, ((), torch.int64)
    elif isinstance(space, spaces.MultiDiscrete):
        yield key, (tuple(space.shape), torch.int64)
    elif isinstance(space, spaces.MultiBinary):
        yield key, (tuple(space.shape), torch.int8)
    elif isinstance(space, spaces.Box):
        default = torch.get_default_dtype()  # also in the place of float64
        yield key, (tuple(space.shape), {**_DTYPES, "float64": default}.get(space.dtype.name, default))
