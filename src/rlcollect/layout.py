"""Which tensors a rollout holds, and how they lie in one block of memory.

A `Leaf` is one tensor of one frame: key, shape, dtype. A `Layout` carves a block of bytes into the tensors of a
rollout, `[*lead, *shape]` each, aligned to cache lines. `Arrays` are those of a rollout as numpy has them. It knows
nothing of environments or policies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

__all__ = [
    "ALIGNMENT",
    "Arrays",
    "Key",
    "Layout",
    "Leaf",
    "as_key",
    "has_numpy",
    "is_private",
    "nested",
    "numpy_dtype",
    "overlap",
    "show_key",
    "tensordict_leaves",
    "torch_dtype",
]

Key = tuple[str, ...]
Array = np.ndarray[Any, Any]
Made = TypeVar("Made")
ALIGNMENT = 64


def nested(values: Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Values by key, as dicts in dicts."""
    root: dict[str, Any] = {}
    for key, value in values:
        level = root
        for part in key[:-1]:
            level = level.setdefault(part, {})
        level[key[-1]] = value
    return root


def tensordict_leaves(data: TensorDictBase, above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Everything in a TensorDict by key, non-tensor data included; not what differs in shape over a lazy stack."""
    for name in data.keys():  # noqa: SIM118
        try:
            value = data.get(name)
        except RuntimeError:  # its parts cannot be stacked
            continue
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from tensordict_leaves(value, (*above, name))
        else:
            yield (*above, name), value


def as_key(key: str | Sequence[str]) -> Key:
    """A key as the user or tensordict writes it, as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


def is_private(key: Key) -> bool:
    """Whether a key has a part with a leading underscore: what stands there is not in batches."""
    return any(part.startswith("_") for part in key)


def overlap(one: Key, other: Key) -> bool:
    """Whether two keys are the same, or one would lie below the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def show_key(key: Key) -> str:
    """A key as the user would write it: `"a"` or `("a", "b")`."""
    return repr(key[0]) if len(key) == 1 else repr(key)


@functools.lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a numpy dtype.

    Raises:
        TypeError: torch has none.
    """
    return torch.from_numpy(np.empty(0, dtype)).dtype


@functools.lru_cache(maxsize=64)
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype of a torch dtype.

    Raises:
        TypeError: numpy has none (bfloat16).
    """
    return torch.empty(0, dtype=dtype).numpy().dtype


@functools.lru_cache(maxsize=64)
def has_numpy(dtype: torch.dtype) -> bool:
    """Whether numpy has this dtype too."""
    try:
        numpy_dtype(dtype)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Leaf:
    """One tensor of one frame."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    def under(self, *prefix: str) -> Leaf:
        """The same leaf below `prefix`."""
        return Leaf((*prefix, *self.key), self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{show_key(self.key)} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Layout:
    """An ordered set of leaves; what a rollout's memory is carved by."""

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self.leaves = tuple(leaves)
        self._frame_bytes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves]

    def nbytes(self, *lead: int) -> int:
        """Bytes that `carve` needs for these leading dimensions."""
        frames = math.prod(lead)
        return sum(_aligned(size * frames) for size in self._frame_bytes)

    def carve(self, block: np.ndarray[Any, Any], *lead: int) -> dict[Key, torch.Tensor]:
        """Tensors `[*lead, *shape]` that share the memory of `block` (uint8), and keep it alive."""
        tensors, offset, frames = {}, 0, math.prod(lead)
        for leaf, size in zip(self.leaves, self._frame_bytes, strict=True):
            shape = (*lead, *leaf.shape)
            if size * frames:
                flat = torch.frombuffer(block, dtype=leaf.dtype, count=math.prod(shape), offset=offset)
                tensors[leaf.key] = flat.view(shape)
            else:
                tensors[leaf.key] = torch.empty(shape, dtype=leaf.dtype)
            offset += _aligned(size * frames)
        return tensors


class Arrays(dict[Key, Array]):
    """The memory of a rollout as numpy arrays `[N, T, *shape]`; remembers what was made of them."""

    def __init__(self, arrays: Mapping[Key, Array], *, remember: bool) -> None:
        super().__init__(arrays)
        self._remember = remember
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for as long as the memory is used: views, in the order of steps."""
        if name in self._made:
            return cast(Made, self._made[name])
        made = make()
        if self._remember:
            self._made[name] = made
        return made


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
