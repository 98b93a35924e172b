"""Rows of a batch put in another order, with whatever stands in them: tensors, levels of their own, text.

Tensors are moved by index, all rows at once. What is no tensor, and frames whose shapes differ, are Python objects, and
are moved one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)

from rlcollect.errors import OptionError

__all__ = ["Jagged", "JaggedTensors", "Taken", "indexed", "taken_rows"]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch has no index functions for, by what is as wide."""


class Rearrangement(ABC):
    """A way to put rows in another order: what it makes of a batch is new, and shares no memory with it.

    Args:
        dims: how many batch dimensions the batch has.
        size: batch size of what it becomes.
        names: of these dimensions.
    """

    def __init__(self, dims: int, size: Sequence[int], names: Sequence[str | None]) -> None:
        self.dims = dims
        self.size = tuple(size)
        self.names = tuple(names)

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """The rows of `data` `[*batch_size, *more]`."""
        names = data.names
        if isinstance(data, LazyStackedTensorDict):
            if data.stack_dim >= self.dims:
                return self.parts(data)
            data = LazyStackedTensorDict.maybe_dense_stack(data.tensordicts, data.stack_dim)
            if isinstance(data, LazyStackedTensorDict):
                return self.objects(data)
        size = self.size_of(data)
        names = [*self.names, *names[self.dims :]][: len(size)]
        made = TensorDict({}, size, names=names, device=data.device)
        for key, value in data.items():
            made.set(key, self._entry(value))
        return made

    def _entry(self, value: Any) -> Any:
        if isinstance(value, UnbatchedTensor):
            return value.clone()
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if is_non_tensor(value) and isinstance(value, LazyStackedTensorDict):
            return self.objects(value)
        if is_non_tensor(value):  # one for all rows
            return type(value)(data=value.data, batch_size=self.size_of(value))
        if is_tensorclass(value):
            return type(value).from_tensordict(self(value.to_tensordict()))
        return self(value)

    @abstractmethod
    def size_of(self, data: Any) -> tuple[int, ...]:
        """Batch size of what `data` `[*batch_size, *more]` becomes."""

    @abstractmethod
    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """What a tensor `[*batch_size, *shape]` becomes."""

    @abstractmethod
    def parts(self, data: LazyStackedTensorDict) -> TensorDictBase:
        """What a stack becomes whose parts all have the batch dimensions: of agents, say."""

    @abstractmethod
    def objects(self, data: Any) -> Any:
        """What becomes of something that is an object in each row: text, a TensorDict of a shape of its own."""


class Taken(Rearrangement):
    """Rows of `[*size]` from somewhere in the batch, or from nowhere: zeros, and None for what is no tensor.

    Row t of lane i has the number i * T + t, in the batch and in the result.

    Args:
        dims, size, names: see `Rearrangement`.
        rows: `[K]` which rows are taken; None: all, in order.
        places: `[K]` where in the result they are put, in ascending order; None: everywhere, in order.
    """

    def __init__(
        self,
        dims: int,
        size: Sequence[int],
        names: Sequence[str | None],
        rows: torch.Tensor | None,
        places: torch.Tensor | None = None,
    ) -> None:
        super().__init__(dims, size, names)
        self._rows = rows
        self._places = places

    def size_of(self, data: Any) -> tuple[int, ...]:
        """Dimensions behind those of the batch stay."""
        return (*self.size, *data.batch_size[self.dims :])

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Every row at once."""
        rows = taken_rows(value, self.dims, self._rows)
        if self._places is None:
            return rows.view(*self.size, *rows.shape[1:])
        made = torch.zeros((torch.Size(self.size).numel(), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        indexed(made)[self._places.to(rows.device)] = indexed(rows)
        return made.view(*self.size, *rows.shape[1:])

    def parts(self, data: LazyStackedTensorDict) -> TensorDictBase:
        """Part by part."""
        return lazy_stack([self(part) for part in data.tensordicts], data.stack_dim - self.dims + len(self.size))

    def objects(self, data: Any) -> Any:
        """One by one; what comes from nowhere has the shapes of the one before it."""
        rows = _objects(data, self.dims, self._rows)
        if not rows:
            return _none_of(data, self.size_of(data))
        count = torch.Size(self.size).numel()
        places = range(count) if self._places is None else self._places.tolist()
        put: list[Any] = [None] * count
        for place, row in zip(places, rows, strict=True):
            put[place] = row
        for place, row in enumerate(put):
            put[place] = _nothing_like(put[place - 1]) if row is None else row
        return _folded(put, self.size)


class JaggedTensors:
    """Nested tensors of pieces of these lengths.

    Attributes:
        lengths: of the pieces.

    Args:
        offsets: `[n + 1]` where each piece begins, and where the last ends.
    """

    def __init__(self, offsets: torch.Tensor) -> None:
        self.lengths: list[int] = offsets.diff().tolist()
        self._offsets = {offsets.device: offsets}  # one a device: what shares it can be computed with together
        self._least, self._most = min(self.lengths, default=0), max(self.lengths, default=0)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[K, *shape]`, piece by piece, as `[n, j, *shape]`; it shares their memory."""
        if rows.device not in self._offsets:
            self._offsets[rows.device] = next(iter(self._offsets.values())).to(rows.device)
        return torch.nested.nested_tensor_from_jagged(
            rows, self._offsets[rows.device], min_seqlen=self._least, max_seqlen=self._most
        )


class Jagged(Rearrangement):
    """Rows as nested tensors: piece by piece, each of its own length.

    Args:
        dims: see `Rearrangement`.
        rows: `[K]` which rows are taken, piece by piece; None: all, in order.
        offsets: `[n + 1]` where each piece begins among them, and where the last ends.

    Raises:
        OptionError: when called with something that cannot be nested.
    """

    def __init__(self, dims: int, rows: torch.Tensor | None, offsets: torch.Tensor) -> None:
        super().__init__(dims, (len(offsets) - 1,), (None,))
        self._rows = rows
        self._nested = JaggedTensors(offsets)

    def size_of(self, data: Any) -> tuple[int, ...]:  # noqa: ARG002 - the other kind looks at it
        """What stands behind a length that differs is no batch dimension."""
        return self.size

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """All pieces at once."""
        rows = taken_rows(value, self.dims, self._rows)
        return self._nested.of(rows.clone(memory_format=torch.contiguous_format) if self._rows is None else rows)

    def parts(self, data: LazyStackedTensorDict) -> TensorDictBase:
        """As one tensor, where it can be."""
        dense = LazyStackedTensorDict.maybe_dense_stack(data.tensordicts, data.stack_dim)
        return self.objects(data) if isinstance(dense, LazyStackedTensorDict) else self(dense)

    def objects(self, data: Any) -> Any:
        """A list a piece."""
        if not is_non_tensor(data):
            differ = sorted(map(str, data.keys()))
            raise OptionError(
                f"as_nested does not go with a stack of unlike shapes or keys (it has {differ}): only the time of its "
                "pieces may differ in a nested tensor. Leave out as_nested, or these keys."
            )
        rows = iter(_objects(data, self.dims, self._rows))
        pieces = [lazy_stack([next(rows) for _ in range(length)]) for length in self._nested.lengths]
        return lazy_stack(pieces) if pieces else _none_of(data, self.size)


def taken_rows(value: torch.Tensor, dims: int, rows: torch.Tensor | None) -> torch.Tensor:
    """Rows of a tensor with `dims` batch dimensions, `[K, *shape]`; of all of them possibly a view."""
    flat = value.flatten(0, dims - 1)
    if rows is None:
        return flat
    taken = indexed(flat).index_select(0, rows.to(flat.device))
    return taken.view(flat.dtype) if flat.dtype in _SIGNED else taken


def indexed(value: torch.Tensor) -> torch.Tensor:
    """The same memory, of a type that can be indexed."""
    return value.view(_SIGNED[value.dtype]) if value.dtype in _SIGNED else value


def _objects(data: Any, dims: int, rows: torch.Tensor | None) -> list[Any]:
    """Rows of something with `dims` batch dimensions, a copy of each."""
    parts = [data]
    for _ in range(dims):
        parts = [row for part in parts for row in part.unbind(0)]
    numbers = range(len(parts)) if rows is None else rows.tolist()
    return [parts[number].clone() for number in numbers]


def _nothing_like(row: Any) -> Any:
    return NonTensorData(None, batch_size=row.batch_size) if is_non_tensor(row) else row.clone().zero_()


def _none_of(data: Any, size: Sequence[int]) -> Any:
    return NonTensorData(None, batch_size=size) if is_non_tensor(data) else TensorDict({}, size)


def _folded(rows: list[Any], size: Sequence[int]) -> Any:
    """Rows stacked again to batch dimensions."""
    for length in reversed(size[1:]):
        rows = [lazy_stack(rows[i : i + length]) for i in range(0, len(rows), length)]
    return lazy_stack(rows)
