"""How what an actor gives gets into its row of a rollout: an array, or a tensor where numpy lacks the dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Leaf, has_numpy

__all__ = ["is_plain", "put", "rows_of", "store_of"]

Array = np.ndarray[Any, Any]


def rows_of(memory: RolloutMemory, leaf: Leaf, start: int, stop: int) -> Sequence[Any]:
    """For each step, where an output goes: an array `[N, *shape]`, or a tensor where numpy lacks the dtype."""
    if leaf.key in memory.arrays:
        return list(memory.arrays[leaf.key][:, start:stop].swapaxes(0, 1))
    tensor = memory.tensors[leaf.key]
    time = tensor.ndim - len(leaf.shape) - 1
    return tensor.narrow(time, start, stop - start).unbind(time)


def store_of(leaf: Leaf, shape: tuple[int, ...], example: Any, *, on_host: bool) -> Callable[[Any, Any], None]:
    """How an output of this kind gets into its row; one of another shape or dtype, which numpy would cast, does not."""
    if example is None:  # the policy was not called at construction
        return _store_any
    if not on_host:
        return _store_there(leaf, shape)
    if not isinstance(example, torch.Tensor):
        return _store_array
    if not (has_numpy(leaf.dtype) and has_numpy(example.dtype)):
        return _store_by_torch
    dtype = example.dtype

    def store_tensor(row: Array, value: torch.Tensor) -> None:
        if value.shape != shape or value.dtype is not dtype:
            raise TypeError(f"{leaf} expected, {value.shape} {value.dtype} came")
        row[...] = value.numpy()

    def store_detached(row: Array, value: torch.Tensor) -> None:
        store_tensor(row, value.detach())

    return store_detached if example.requires_grad else store_tensor


def _store_there(leaf: Leaf, shape: tuple[int, ...]) -> Callable[[Any, Any], None]:
    """How an output gets into a row on another device."""

    def store(row: torch.Tensor, value: Any) -> None:
        if tuple(np.shape(value)) != shape:
            raise TypeError(f"{leaf} expected, {np.shape(value)} came")
        row.copy_(torch.as_tensor(value))

    return store


def is_plain(leaf: Leaf, example: Any) -> bool:
    """Whether an output is a tensor that numpy can have as it is."""
    return (
        isinstance(example, torch.Tensor)
        and has_numpy(leaf.dtype)
        and has_numpy(example.dtype)
        and not example.requires_grad
    )


def _store_array(row: Array, value: Any) -> None:
    row[...] = value


def _store_any(row: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _store_by_torch(row, value.detach())
    else:
        row[...] = value


def _store_by_torch(row: Any, value: torch.Tensor) -> None:
    (row if isinstance(row, torch.Tensor) else torch.from_numpy(row)).copy_(value)


def put(row: Any, where: Any, value: Any) -> None:
    """Stores an array or a tensor in a row that is either."""
    if isinstance(row, torch.Tensor):
        value = torch.as_tensor(value, device=row.device)
        where = torch.from_numpy(where).to(row.device) if isinstance(where, np.ndarray) else where
    row[where] = value
