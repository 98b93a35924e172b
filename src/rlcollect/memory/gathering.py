"""Frames of episodes, taken from where they lie straight to where they are delivered.

A tensor whose frames are small is taken as a whole, by one index over all batches that it lies in; one whose frames are
large piece by piece, so that each frame is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.layout import Key, has_numpy, nested
from rlcollect.memory.episodes import Episode, Source
from rlcollect.memory.rows import JaggedTensors, taken_rows
from rlcollect.memory.trajectories import split_trajectories

__all__ = ["MASK", "Cat", "Form", "Gathering", "Nested", "Padded"]

Array = np.ndarray[Any, Any]
LARGE = 1024  # bytes of a frame from which on it is copied by itself
MASK: Key = ("collector", "mask")


class Form(Protocol):
    """How the frames of episodes are laid out."""

    def layout(self, lengths: Array) -> Layout:
        """Where the frames of episodes of these lengths go."""

    def of(self, frames: TensorDictBase) -> TensorDictBase:
        """The same of a TensorDict `[F]` that holds more than tensors."""


class Layout:
    """Where frames go.

    Args:
        size: of the batch.
        names: of its dimensions.
        places: int64 `[F]`, the row of the result that each frame goes to; None: one after the other.
        rows: how many the result has, with padding.
    """

    def __init__(
        self, size: Sequence[int], names: Sequence[str | None], rows: int, places: Array | None = None
    ) -> None:
        self.size = tuple(size)
        self.names = list(names)
        self.rows = rows
        self.places = places

    def formed(self, rows: torch.Tensor) -> torch.Tensor:
        """A tensor `[rows, *shape]` as it is delivered."""
        return rows.view(*self.size, *rows.shape[1:])

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Bool `[*size]`, where a frame is; None where everything is one."""
        if self.places is None:
            return None
        mask = np.zeros(self.rows, bool)
        mask[self.places] = True
        return torch.from_numpy(mask).view(self.size)


class Cat:
    """One after the other: `[F]`."""

    def layout(self, lengths: Array) -> Layout:
        """See `Form`."""
        count = int(lengths.sum())
        return Layout([count], ["time"], count)

    def of(self, frames: TensorDictBase) -> TensorDictBase:
        """See `Form`."""
        frames.names = ["time"]
        return frames


class Padded:
    """One a row, padded with zeros at its end: `[n, T]`, with a mask.

    Args:
        fragment_len: T; longer ones are cut. None: as long as the longest.
    """

    def __init__(self, fragment_len: int | None = None) -> None:
        self._fragment_len = fragment_len

    def layout(self, lengths: Array) -> Layout:
        """See `Form`."""
        steps = int(lengths.max()) if self._fragment_len is None else self._fragment_len
        rows = -(-lengths // steps)  # of each episode
        ends = np.cumsum(lengths)
        shift = (np.cumsum(rows) - rows) * steps - (ends - lengths)
        count = int(rows.sum())
        places = np.arange(ends[-1]) + np.repeat(shift, lengths)
        return Layout([count, steps], [None, "time"], count * steps, places)

    def of(self, frames: TensorDictBase) -> TensorDictBase:
        """See `Form`."""
        return split_trajectories(frames, fragment_len=self._fragment_len)


class Nested:
    """Tensors of jagged layout: `[n]`.

    Args:
        fragment_len: longer ones are cut; None: none is.
    """

    def __init__(self, fragment_len: int | None = None) -> None:
        self._fragment_len = fragment_len

    def layout(self, lengths: Array) -> Layout:
        """See `Form`."""
        return _Jagged(lengths if self._fragment_len is None else _cut(lengths, self._fragment_len))

    def of(self, frames: TensorDictBase) -> TensorDictBase:
        """See `Form`."""
        return split_trajectories(frames, as_nested=True, fragment_len=self._fragment_len)


class _Jagged(Layout):
    def __init__(self, lengths: Array) -> None:
        super().__init__([len(lengths)], [None], int(lengths.sum()))
        self._nested = JaggedTensors(torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))))

    def formed(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Layout`."""
        return self._nested.of(rows)


def _cut(lengths: Array, longest: int) -> Array:
    """Lengths of what is left of episodes when they are cut into pieces of at most so many frames."""
    pieces = -(-lengths // longest)
    cut = np.full(pieces.sum(), longest)
    cut[np.cumsum(pieces) - 1] = lengths - longest * (pieces - 1)
    return cut


class Gathering:
    """The frames of some episodes, one after the other.

    Attributes:
        episodes: how many there are.
        frames: how many there are.

    Args:
        episodes: at least one.
    """

    def __init__(self, episodes: Sequence[Episode]) -> None:
        pieces = chain.from_iterable([episode.pieces for episode in episodes])
        sources, starts, counts = zip(*pieces, strict=True)
        numbers = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        self._sources = list(numbers)
        self._device = sources[-1].batch.device  # of those that came last: others may be of a state
        self._all = [source.on(self._device) for source in numbers]
        self._lengths = np.array([episode.frames for episode in episodes])
        self._of = np.array([numbers[source] for source in sources])  # of each piece
        self._starts, self._counts = np.array(starts), np.array(counts)
        ends = np.cumsum(self._counts)
        self.episodes, self.frames = len(episodes), int(ends[-1])
        self._begins = ends - self._counts  # which frame its first is
        sizes = np.array([source.size for source in numbers])
        self._size = int(sizes.sum())
        shift = (np.cumsum(sizes) - sizes)[self._of] + self._starts - self._begins
        # which of all rows, of one batch after the other, each frame is
        self._index: Array = np.arange(self.frames) + np.repeat(shift, self._counts)

    @property
    def sources(self) -> list[tuple[Source, int]]:
        """Where they are, and how many in each."""
        counts = np.bincount(self._of, self._counts)
        return list(zip(self._sources, counts.astype(np.int64).tolist(), strict=True))

    def values(self, key: Key) -> Array | None:
        """`[F]`, of something with one value a frame; None, if it is not there."""
        values = [each for source in self._all if (each := source.values(key)) is not None]
        if len(values) < len(self._all):
            return None
        taken: Array = np.concatenate(values)[self._index]
        return taken

    def formed(self, form: Form) -> TensorDictBase:
        """The frames as a batch, which shares no memory with where they came from."""
        columns = [source.columns for source in self._all if source.columns is not None]
        if len(columns) < len(self._all):
            return form.of(self._any())
        layout = form.layout(self._lengths)
        taken = _Taken(self, layout)
        keys = [key for key in columns[0] if key != MASK or self._have_masks]
        rows = {key: layout.formed(taken([each[key] for each in columns])) for key in keys}
        if layout.mask is not None:
            rows[MASK] = layout.mask.to(next(iter(rows.values())).device)
        return TensorDict(nested(rows.items()), layout.size, names=layout.names, device=self._device)

    @cached_property
    def _have_masks(self) -> bool:
        """Whether all batches say which rows are frames, as some may where it is needed."""
        return len([source for source in self._all if source.batch.get(MASK, None) is not None]) == len(self._all)

    def _any(self) -> TensorDictBase:
        """The frames `[F]`, of whatever kind."""
        batches = [source.batch if self._have_masks else source.batch.exclude(MASK) for source in self._all]
        frames: TensorDictBase = torch.cat([batch.reshape(-1) for batch in batches])
        return frames[torch.from_numpy(self._index).to(frames.device or "cpu")]

    def _index_in(self, layout: Layout) -> Array:
        """int64 `[rows]`, which of all rows each row of the result is; where it is padding, one behind them."""
        if layout.places is None:
            return self._index
        index: Array = np.full(layout.rows, self._size)
        index[layout.places] = self._index
        return index

    def _ranges_in(self, layout: Layout) -> list[tuple[int, int, int, int]]:
        """Of each piece: its batch, its first row there, how many, and the first in the result."""
        places = self._begins if layout.places is None else layout.places[self._begins]
        columns = self._of, self._starts, self._counts, places
        return list(zip(*[each.tolist() for each in columns], strict=True))


class _Taken:
    """Takes one tensor after the other.

    Args:
        frames: which.
        layout: where they go.
    """

    def __init__(self, frames: Gathering, layout: Layout) -> None:
        self._frames = frames
        self._layout = layout
        self._index = frames._index_in(layout)
        self._rows: dict[torch.device, torch.Tensor] = {}
        self._is_padded = layout.places is not None
        self._ranges: list[tuple[int, int, int, int]] | None = None

    def __call__(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the result.

        Args:
            leaves: of each batch, `[F, *shape]`.
        """
        first = leaves[0]
        if first[:1].numel() * first.element_size() >= LARGE:
            return self._one_by_one(leaves)
        if first.is_cpu and has_numpy(first.dtype):  # a fraction of the time
            arrays = [leaf.numpy() for leaf in leaves]
            if self._is_padded:
                arrays.append(np.zeros((1, *first.shape[1:]), arrays[0].dtype))
            return torch.from_numpy((np.concatenate(arrays) if len(arrays) > 1 else arrays[0]).take(self._index, 0))
        return self._selected(torch.cat([*leaves, first.new_zeros((1, *first.shape[1:]))]))

    def _selected(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.device not in self._rows:
            self._rows[leaf.device] = torch.from_numpy(self._index).to(leaf.device)
        return taken_rows(leaf, 1, self._rows[leaf.device])

    def _one_by_one(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._ranges is None:
            self._ranges = self._frames._ranges_in(self._layout)
        new = leaves[0].new_zeros if self._is_padded else leaves[0].new_empty
        made = new((self._layout.rows, *leaves[0].shape[1:]))
        for number, start, count, place in self._ranges:
            made[place : place + count] = leaves[number][start : start + count]
        return made
