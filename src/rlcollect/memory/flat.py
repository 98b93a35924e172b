"""Values with tensors on their way to elsewhere: all tensors in one piece of bytes, and a word of how they lie."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict

from rlcollect.devices import CPU
from rlcollect.layout import Layout, Leaf, nested, tensordict_leaves
from rlcollect.memory.slots import BlockPool

__all__ = ["Flat", "Room", "flattened"]

Array = np.ndarray[Any, Any]


class Room:
    """Memory for bytes, one size after the other; what was let go of is used again, as long as the size is the same."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._pool = BlockPool(0, keep=keep)

    def take(self, nbytes: int) -> Array:
        """uint8 `[nbytes]`, whatever was there before."""
        if nbytes > self._pool.nbytes or nbytes < self._pool.nbytes // 2:
            self._pool = BlockPool(nbytes, keep=self._keep)
        return self._pool.take()[0][:nbytes]


@dataclass(frozen=True)
class Flat:
    """How a value is made of bytes.

    Attributes:
        leaves: the tensors.
        size: the batch dimensions of a TensorDict, which `leaves` are of; None: it is another value.
        names: of these dimensions; None: they have none.
        on_host: whether the TensorDict says that its device is the host.
        body: what the value is but for its tensors.
    """

    leaves: tuple[Leaf, ...]
    size: tuple[int, ...] | None = None
    names: tuple[str | None, ...] | None = None
    on_host: bool = False
    body: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors take."""
        return Layout(self.leaves).nbytes(*(self.size or ()))

    def opened(self, data: Array) -> Any:
        """The value, on these bytes, which it keeps."""
        tensors = Layout(self.leaves).carve(data, *(self.size or ()))
        if self.size is None:
            return _Opening(io.BytesIO(self.body), list(tensors.values())).load()
        names, device = None if self.names is None else [*self.names], CPU if self.on_host else None
        return TensorDict(nested(tensors.items()), self.size, names=names, device=device)


def flattened(value: Any, room: Room | None = None) -> tuple[Flat, Array]:
    """A value as bytes, a copy.

    Args:
        value: a TensorDict, or anything that can be pickled.
        room: where they are put; None: in new memory.
    """
    flat, tensors = _of_batch(value) or _of_any(value)
    data = (room or Room(keep=0)).take(flat.nbytes)
    for target, tensor in zip(Layout(flat.leaves).carve(data, *(flat.size or ())).values(), tensors, strict=True):
        target.copy_(tensor)
    return flat, data


def _of_batch(value: Any) -> tuple[Flat, Sequence[torch.Tensor]] | None:
    """A TensorDict of tensors; None: it is something else."""
    if type(value) is not TensorDict:
        return None
    found, size = dict(tensordict_leaves(value)), tuple(value.batch_size)
    if not found or not all(_is_dense(tensor) for tensor in found.values()):
        return None
    leaves = tuple(Leaf(key, tuple(tensor.shape[len(size) :]), tensor.dtype) for key, tensor in found.items())
    names = tuple(value.names)
    return Flat(leaves, size, names if any(names) else None, value.device == CPU), list(found.values())


def _of_any(value: Any) -> tuple[Flat, Sequence[torch.Tensor]]:
    file = io.BytesIO()
    packing = _Packing(file)
    packing.dump(value)
    tensors = packing.tensors
    leaves = tuple(Leaf((str(place),), tuple(each.shape), each.dtype) for place, each in enumerate(tensors))
    return Flat(leaves, body=file.getvalue()), tensors


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


class _Packing(cloudpickle.Pickler):  # type: ignore[misc] # has no types
    """Pickles a value, and leaves its tensors out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The place of a tensor among all; None: it is something else."""
        if not _is_dense(value) or value.requires_grad:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]


class _Opening(pickle.Unpickler):
    """Takes the tensors from a list."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        """The tensor at this place."""
        return self._tensors[place]
