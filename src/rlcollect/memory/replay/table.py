"""What a batch holds, and whether it is what frames of a buffer have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from rlcollect.errors import SpaceError
from rlcollect.layout import Key, Leaf, show_key, tensordict_leaves

__all__ = ["DONE", "IDS", "MASK", "Columns", "columns_of", "leaves_of"]

Columns = Mapping[Key, torch.Tensor]
IDS: Key = ("collector", "traj_ids")
DONE: Key = ("next", "done")
MASK: Key = ("collector", "mask")


def leaves_of(batch: TensorDictBase) -> tuple[Leaf, ...]:
    """What a frame of a batch holds.

    Raises:
        SpaceError: something that is no tensor, or a tensor whose rows differ in shape.
    """
    leaves = []
    for key, value in tensordict_leaves(batch):
        if not isinstance(value, torch.Tensor):
            raise SpaceError(
                f"{show_key(key)} is a {type(value).__name__}; a ReplayBuffer keeps tensors whose rows have one shape. "
                "Leave it out (exclude_keys), or use a buffer that keeps lists."
            )
        if value.is_nested or value.layout is not torch.strided:
            raise SpaceError(
                f"{show_key(key)} is a nested or sparse tensor; a ReplayBuffer keeps frames of one form: use padded "
                "or cat episodes, and dense tensors."
            )
        leaves.append(Leaf(key, tuple(value.shape[batch.ndim :]), value.dtype))
    if not leaves:
        raise SpaceError("An empty batch was to be kept: it has no keys.")
    return tuple(leaves)


def columns_of(batch: TensorDictBase, leaves: Sequence[Leaf]) -> dict[Key, torch.Tensor]:
    """The tensors of a batch, `[lanes, T, *shape]` by key, held against what frames hold.

    Raises:
        SpaceError: they do not fit; names the first key.
    """
    size = batch.batch_size
    lanes, steps = size[:-1].numel(), size[-1]
    found = dict(_tensors(batch))
    columns = {}
    for leaf in leaves:
        value = found.get(leaf.key)
        if value is None or value.dtype is not leaf.dtype or value.shape != (*size, *leaf.shape):
            raise SpaceError(_why_not(batch, leaf, value))
        columns[leaf.key] = value if len(size) == 2 else value.reshape(lanes, steps, *leaf.shape)
    if len(found) > len(columns):
        extra = next(key for key in found if key not in columns)
        raise SpaceError(
            f"{show_key(extra)} is new: frames of this buffer do not have it. All that is written to a buffer has the "
            "same keys."
        )
    return columns


def _tensors(data: TensorDictBase, above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Everything in a TensorDict by key."""
    if type(data) is not TensorDict:
        yield from tensordict_leaves(data, above)
        return
    for name, value in data.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from _tensors(value, (*above, name))
        else:
            yield (*above, name), value


def _why_not(batch: TensorDictBase, leaf: Leaf, value: Any) -> str:
    if value is None:
        return f"The batch lacks {show_key(leaf.key)}, which frames of this buffer have ({leaf})."
    if not isinstance(value, torch.Tensor):
        return f"{show_key(leaf.key)} is a {type(value).__name__}; frames of this buffer have a tensor there: {leaf}."
    came = Leaf(leaf.key, tuple(value.shape[batch.ndim :]), value.dtype)
    return f"Frames of this buffer have {leaf}; {came} came."
