"""Buffers that are not ours: how frames are given to them. Knows what TorchRL's have, and does not import it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.layout import Leaf, nested
from rlcollect.memory.replay.table import MASK

__all__ = ["as_others_take_it", "dims_of", "extend_other", "make_room"]


def dims_of(buffer: Any) -> int:
    """Dimensions of the storage of a buffer that is not ours."""
    if isinstance(told := getattr(buffer, "storage_dims", None), int):  # it is in an actor
        return told
    dims = getattr(storage_of(buffer), "ndim", 1)
    return dims if isinstance(dims, int) else 1


def storage_of(buffer: Any) -> Any:
    return getattr(buffer, "storage", None) or getattr(buffer, "_storage", None)


def extend_other(buffer: Any, batch: TensorDictBase) -> None:
    """Writes a batch to a buffer that is not ours."""
    frames = as_others_take_it(buffer, batch)
    if frames.numel():
        buffer.extend(frames)


def as_others_take_it(buffer: Any, batch: TensorDictBase) -> TensorDictBase:
    """A batch as a buffer that is not ours takes it.

    Returns:
        `[F]`, frame by frame, lane after lane, without rows that are none; or, where its storage has several
        dimensions, `[lanes, T]`, time last.
    """
    dims = dims_of(buffer)
    if dims > 1:
        lanes = math.prod(batch.batch_size[:-1])
        return batch if batch.batch_dims == dims else batch.reshape(lanes, batch.batch_size[-1])
    mask = batch.get(MASK, None)
    return batch.reshape(-1) if mask is None else batch[mask]


def make_room(buffer: Any, leaves: Sequence[Leaf]) -> None:
    """A lazy storage of TorchRL's, of one dimension, has its memory before the first frame, if it has none yet.

    Args:
        buffer: whose.
        leaves: what frames hold.
    """
    storage = storage_of(buffer)
    init = getattr(storage, "_init", None)
    if getattr(storage, "initialized", True) or dims_of(buffer) > 1 or init is None:
        return
    init(TensorDict(nested((leaf.key, torch.zeros(leaf.shape, dtype=leaf.dtype)) for leaf in leaves), []))
