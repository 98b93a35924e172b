"""Frames in rows: how they get there, and how they are taken out. Knows no cursors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlcollect.layout import Key, Layout, Leaf, has_numpy, nested
from rlcollect.memory.replay.table import Columns
from rlcollect.memory.rows import indexed
from rlcollect.memory.slots import BlockPool

__all__ = ["Parts", "Rings", "Table", "copy_rows", "parts_of"]

Array = np.ndarray[Any, Any]
Parts = Mapping[Key, Any]
"""Columns as they are written: arrays where numpy has their dtype, else tensors."""
LARGE = 1024  # bytes of a frame from which on torch takes rows faster than numpy does
CHUNK = 1 << 26  # bytes that are copied at a time


class Table:
    """Frames in rows.

    Attributes:
        positions: int64 `[rows]`, how many frames of its trajectory come right before each one in its ring.

    Args:
        columns: `[rows, *shape]` by key.
        positions: see above.
    """

    def __init__(self, columns: Columns, positions: Array) -> None:
        self.positions = positions
        self._columns = dict(columns)
        self._arrays = {
            key: column.numpy() for key, column in columns.items() if column.is_cpu and has_numpy(column.dtype)
        }
        self._others = {key: column for key, column in columns.items() if key not in self._arrays}
        self._device = next(iter(columns.values())).device if columns else None
        self._small: list[tuple[Key, Array]] = []
        self._large: list[tuple[Key, torch.Tensor]] = []
        for key, column in columns.items():
            if key in self._arrays and column[:1].numel() * column.element_size() < LARGE:
                self._small.append((key, self._arrays[key]))
            else:
                self._large.append((key, column))
        self._pool = BlockPool(0)

    def __contains__(self, key: Key) -> bool:
        return key in self._columns

    # --- taking ---

    def flags(self, key: Key, rows: Array) -> Array:
        """Bool `[...]`, of something with one value a frame."""
        index = torch.from_numpy(rows).to(self._device)
        column = self._columns[key]
        return column.reshape(len(column), -1)[index].bool().any(-1).cpu().numpy()

    def take(self, rows: Array, *, reuse: bool = False) -> dict[Key, torch.Tensor]:
        """`[*rows.shape, *shape]` by key: copies.

        Args:
            rows: int64.
            reuse: whether large ones may lie where others did that nobody has any more; by one thread at a time.
        """
        taken = {key: torch.from_numpy(array.take(rows, 0)) for key, array in self._small}
        if self._large:
            index = torch.from_numpy(rows.reshape(-1)).to(self._device)
            room = self._room(len(index)) if reuse and index.is_cpu else {}
            for key, column in self._large:
                out = indexed(room[key]) if key in room else None
                part = torch.index_select(indexed(column), 0, index, out=out).view(column.dtype)
                taken[key] = part if rows.ndim == 1 else part.view(*rows.shape, *column.shape[1:])
        return taken

    def _room(self, count: int) -> dict[Key, torch.Tensor]:
        """Memory for so many rows of large columns; to have new memory from the system takes longer than to fill it."""
        layout = Layout([Leaf(key, tuple(column.shape[1:]), column.dtype) for key, column in self._large])
        if (nbytes := layout.nbytes(count)) != self._pool.nbytes:
            self._pool = BlockPool(nbytes)
        return layout.carve(self._pool.take()[0], count)

    def formed(
        self, taken: Mapping[Key, torch.Tensor], size: Sequence[int], names: Sequence[str | None] | None
    ) -> TensorDict:
        """What was taken, as a TensorDict."""
        return _made(nested(taken.items()), torch.Size(size), names, self._device)

    # --- putting ---

    def rings(self, count: int, size: int, first: int, lanes: int) -> Rings:
        """Some rings.

        Args:
            count: rings in all.
            size: rows of each.
            first: of those that are meant.
            lanes: how many are.
        """

        def part(column: Any) -> Any:
            return column[: count * size].reshape(count, size, *column.shape[1:])[first : first + lanes]

        columns = {key: part(column) for key, column in (self._arrays | self._others).items()}
        return Rings(columns, part(self.positions))

    def scatter(self, parts: Parts, source: tuple[Array, Array], positions: Array, rows: Array) -> None:
        """Writes frames to any rows.

        Args:
            parts: `[lanes, T, *shape]` by key.
            source: int64 `[F]` each, lanes and times.
            positions: int64 `[F]`.
            rows: int64 `[F]`, where to.
        """
        self.positions[rows] = positions
        for key, array in self._arrays.items():
            array[rows] = parts[key][source]
        if self._others:
            lanes, times, to = (torch.from_numpy(each).to(self._device) for each in (*source, rows))
            for key, column in self._others.items():
                values = indexed(parts[key].to(self._device))[lanes, times]
                indexed(column).index_copy_(0, to, values)


class Rings:
    """Rings side by side: `[rings, size, *shape]` by key, and positions `[rings, size]`."""

    def __init__(self, columns: Parts, positions: Array) -> None:
        self._columns = list(columns.items())
        self._positions = positions

    def put(self, parts: Parts, positions: Array, times: slice, row: int) -> None:
        """Writes frames, those of each lane to its ring, from a row on.

        Args:
            parts: `[rings, T, *shape]` by key.
            positions: int64 `[rings, F]`, of those that are written.
            times: from which time on, and before which.
            row: the first.
        """
        rows = slice(row, row + times.stop - times.start)
        self._positions[:, rows] = positions
        for key, column in self._columns:
            column[:, rows] = parts[key][:, times]


def parts_of(columns: Columns) -> Parts:
    """Columns, as they are written."""
    return {
        key: column.numpy(force=True) if has_numpy(column.dtype) else column.detach() for key, column in columns.items()
    }


def _made(
    values: Mapping[str, Any], size: torch.Size, names: Sequence[str | None] | None, device: torch.device | None
) -> TensorDict:
    # the public constructor looks at each tensor again, which takes as long as taking all rows does
    made: TensorDict = TensorDict._new_unsafe(
        source={
            key: _made(value, size, names, device) if isinstance(value, dict) else value
            for key, value in values.items()
        },
        batch_size=size,
        names=None if names is None else list(names),
        device=device,
    )
    return made


def copy_rows(source: Columns, rows: Array, target: Columns, places: Array) -> None:
    """Copies frames; where source and target are the same memory, each tensor is copied out of it first.

    Args:
        source: `[*, *shape]` by key.
        rows: int64 `[F]`, which.
        target: likewise.
        places: int64 `[F]`, where to.
    """
    index, to = torch.from_numpy(rows), torch.from_numpy(places)
    for key, column in source.items():
        if column is target[key]:
            taken = indexed(column).index_select(0, index.to(column.device))
            indexed(column).index_copy_(0, to.to(column.device), taken)
            continue
        step = max(1, CHUNK // max(1, column[:1].numel() * column.element_size()))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            taken = indexed(column).index_select(0, index[part].to(column.device))
            indexed(target[key]).index_copy_(0, to[part].to(target[key].device), taken.to(target[key].device))
