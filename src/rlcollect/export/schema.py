"""What a batch holds, as a dataset stores it: keys, shapes and dtypes, and the metadata that say so on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from rlcollect.errors import DatasetError
from rlcollect.layout import Key, show_key, tensordict_leaves

__all__ = ["MARK", "META", "Schema", "batch_tensors"]

META = "meta.json"
MARK = "_rlcollect"
RESERVED = ("_type", "device", "shape", MARK)  # tensordict's words (and ours) in meta.json, beside the keys


@dataclass(frozen=True)
class _Leaf:
    """One tensor of one frame."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """What is the same for all batches of a dataset."""

    lanes: tuple[int, ...]
    leaves: dict[Key, _Leaf]

    @classmethod
    def of(cls, batch: TensorDictBase, tensors: dict[Key, torch.Tensor]) -> Schema:
        """The schema of a batch.

        Raises:
            DatasetError: it is not `[T]` or `[N, T]`, or has no tensors.
        """
        dims = batch.batch_dims
        if dims not in (1, 2) or "time" in batch.names[:-1]:
            raise DatasetError(
                f"expected a batch [T] or [N, T], time last, but this one has batch_size {list(batch.batch_size)} and "
                f"names {batch.names}. Bring the lanes into one dimension (cat_results=0 for several workers)"
            )
        if not tensors:
            raise DatasetError("expected a batch with tensors, but this one has none")
        leaves = {key: _Leaf(tuple(value.shape[dims:]), value.dtype) for key, value in tensors.items()}
        return cls(tuple(batch.batch_size[:-1]), leaves)

    @property
    def num_lanes(self) -> int:
        """N; 1 for a batch without lanes."""
        return torch.Size(self.lanes).numel()

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of all lanes."""
        return self.num_lanes * sum(leaf.nbytes for leaf in self.leaves.values())

    def difference(self, other: Schema) -> str | None:
        """The first thing in which `other` is not as this one, as a clause; None if there is none."""
        if self.lanes != other.lanes:
            return f"its batch_size without time is {list(other.lanes)}, not {list(self.lanes)}"
        for key, leaf in self.leaves.items():
            if key not in other.leaves:
                return f"key {show_key(key)} is missing"
            if leaf != other.leaves[key]:
                return f"key {show_key(key)} is {other.leaves[key]} a frame, not {leaf}"
        return next((f"key {show_key(key)} is new" for key in other.leaves if key not in self.leaves), None)

    def folders(self) -> list[Key]:
        """Every level of keys, the root first, each after the one it stands in."""
        return list(dict.fromkeys(key[:depth] for key in self.leaves for depth in range(len(key))))

    def metadata(self, folder: Key, steps: int) -> dict[str, Any]:
        """What `meta.json` of a level says when the dataset holds `steps` steps."""
        depth = len(folder)
        entries: dict[str, Any] = {}
        for key, leaf in self.leaves.items():
            if key[:depth] != folder:
                continue
            if len(key) > depth + 1:
                entries[key[depth]] = {"type": "TensorDict"}
                continue
            shape = [steps, *self.lanes, *leaf.shape]
            entries[key[depth]] = {"device": "cpu", "shape": shape, "dtype": str(leaf.dtype), "is_nested": False}
        entries |= {"shape": [steps, *self.lanes], "device": "cpu", "_type": str(TensorDict)}
        return entries if folder else {MARK: "dataset 1: time first", **entries}


def batch_tensors(batch: TensorDictBase) -> dict[Key, torch.Tensor]:
    """The tensors of a batch, by key.

    Raises:
        DatasetError: it is no TensorDict; something in it is no tensor of a fixed shape, or stands under a name that
            the format uses itself.
    """
    if not isinstance(batch, TensorDictBase):
        raise DatasetError(f"expected a TensorDict, got {batch!r}. Of a CompactBatch, write what expand() gives")
    tensors = dict(tensordict_leaves(batch))
    for key, value in tensors.items():
        if not _is_plain(value) or value.shape[: batch.batch_dims] != batch.batch_size:
            kind = type(getattr(value, "data", value) if is_non_tensor(value) else value).__name__
            raise DatasetError(
                f"expected plain tensors with one row a frame, but key {show_key(key)} holds {kind}. Leave it out with "
                f"batch.exclude({show_key(key)}), or turn it into a tensor"
            )
        if taken := next((part for part in key if part in RESERVED), None):
            raise DatasetError(f"key {show_key(key)}: {taken!r} means something else in a {META}; rename that key")
    return tensors


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
