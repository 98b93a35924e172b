"""Where the frames of a buffer lie: in this process, or in memory that processes share. `files` has them on a disk."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rlcollect.errors import OptionError, SharedMemoryError
from rlcollect.layout import ALIGNMENT, Key, Layout, Leaf
from rlcollect.memory.replay.cursors import Cursors
from rlcollect.memory.replay.rows import copy_rows
from rlcollect.processes.arena import Arena

__all__ = ["InMemory", "InSharedMemory", "Opening", "Place", "as_leaves", "in_shared_memory", "told_leaves"]

Array = np.ndarray[Any, Any]
Columns = dict[Key, torch.Tensor]


class Place(Protocol):
    """Has memory for frames.

    Attributes:
        name: as the option says it.
        is_shared: whether other processes can have it.
        words: for the cursors.
        leaves: what a frame holds; None: it is not known yet.
        columns: `[capacity, *shape]` by key; empty until it is.
        positions: int64 `[capacity]`, of each frame in its trajectory; likewise.
    """

    name: str
    is_shared: bool
    words: Array
    leaves: tuple[Leaf, ...] | None
    columns: Columns
    positions: Array

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """Frames hold these, from now on. `words` may be others afterwards, with the same in them.

        Raises:
            SharedMemoryError, DatasetError: there is too little room.
        """

    def put(self, source: Columns, rows: Array, positions: Array, places: Array, words: Array) -> None:
        """Frames stand in some rows from now on, and no others stand.

        Args:
            source: `[*, *shape]` by key, where they come from; may be its own columns.
            rows: int64 `[F]`, where they are there.
            positions: int64 `[F]`, of each in its trajectory.
            places: int64 `[F]`, where they go.
            words: in the place of those that were.

        Raises:
            DatasetError: there is too little room; those that stood do.
        """

    def opening(self) -> tuple[Opening, Sequence[int]]:
        """What another process opens it by, and file descriptors that go with it; laid out, it has to be."""

    def follow(self) -> None:
        """Frames were moved by their owner: they are looked for."""

    def disown(self) -> None:
        """This is a copy, in another process, of something that belongs to its parent."""

    def close(self) -> None:
        """Lets the memory go. Safe to call again."""


class Opening(Protocol):
    """Opens a place in another process."""

    def open(self, descriptors: Sequence[int]) -> Place:
        """The same place there."""


class _InPlace:
    """Has the same memory all the time."""

    words: Array
    columns: Columns
    positions: Array

    def put(self, source: Columns, rows: Array, positions: Array, places: Array, words: Array) -> None:
        """See `Place`. Where it is broken off, nothing stands."""
        cursors = Cursors(self.words)
        cursors.begin_to_divide()
        try:
            copy_rows(source, rows, self.columns, places)
            self.positions[places] = positions
        except BaseException:
            cursors.divide(0, 0)
            raise
        cursors.replace(words)

    def follow(self) -> None:
        """See `Place`: they never are."""

    def disown(self) -> None:
        """See `Place`: it is gone with its last user."""


class InMemory(_InPlace):
    """In this process.

    Args:
        capacity: frames.
        device: where they lie.
    """

    name = "memory"
    is_shared = False

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.words: Array = np.zeros(Cursors.words_of(capacity), np.int64)
        self.leaves: tuple[Leaf, ...] | None = None
        self.columns: Columns = {}
        self.positions: Array = np.zeros(0, np.int64)
        self._capacity = capacity
        self._device = device

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """See `Place`."""
        self.leaves = tuple(leaves)
        self.positions = np.zeros(self._capacity, np.int64)
        self.columns = {
            leaf.key: torch.empty((self._capacity, *leaf.shape), dtype=leaf.dtype, device=self._device)
            for leaf in leaves
        }

    def opening(self) -> tuple[Opening, Sequence[int]]:
        """See `Place`: there is none."""
        raise OptionError(
            'This buffer is in the memory of one process (storage="memory"), and another was to have it. Make it with '
            'storage="shared" or storage="memmap", or call share() before.'
        )

    def close(self) -> None:
        """See `Place`."""
        self.columns, self.positions = {}, np.zeros(0, np.int64)


@dataclass(frozen=True)
class OpenShared:
    """See `Opening`: with one descriptor."""

    capacity: int
    leaves: tuple[Leaf, ...]

    def open(self, descriptors: Sequence[int]) -> InSharedMemory:
        """See `Opening`."""
        place = InSharedMemory(self.capacity)
        kept = os.dup(descriptors[0])
        place.attach(self.leaves, Arena.attached(descriptors[0], place.nbytes(self.leaves)), kept)
        return place


class InSharedMemory(_InPlace):
    """In anonymous memory that other processes attach to by a descriptor. It is gone with the last of them.

    Args:
        capacity: frames.
    """

    name = "shared"
    is_shared = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._words = Cursors.words_of(capacity)
        self._head = -(-8 * (self._words + capacity) // ALIGNMENT) * ALIGNMENT  # bytes of words and positions
        self.words: Array = np.zeros(Cursors.words_of(capacity), np.int64)  # until it is laid out
        self.leaves: tuple[Leaf, ...] | None = None
        self.columns: Columns = {}
        self.positions: Array = np.zeros(0, np.int64)
        self._end: Any = None

    def nbytes(self, leaves: Sequence[Leaf]) -> int:
        """Bytes for so many frames of this form, and for the cursors."""
        return self._head + Layout(leaves).nbytes(self._capacity)

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """See `Place`."""
        try:
            arena = Arena(self.nbytes(leaves))
        except SharedMemoryError as error:
            raise SharedMemoryError(
                f"A buffer of {self._capacity:,} frames needs {self.nbytes(leaves):,} bytes of shared memory: {error} "
                'Or use storage="memmap", which lies on a disk.'
            ) from error
        words = self.words
        buffer, fd = arena.buffer, arena.fd
        self.attach(leaves, buffer, fd)
        self.words[:] = words

    def attach(self, leaves: Sequence[Leaf], buffer: Array, fd: int) -> None:
        """Takes memory that is there, and its descriptor."""
        self._end = weakref.finalize(self, os.close, fd)
        self._fd = fd
        self.words = buffer[: 8 * self._words].view(np.int64)
        self.positions = buffer[8 * self._words : 8 * (self._words + self._capacity)].view(np.int64)
        self.leaves = tuple(leaves)
        self.columns = Layout(leaves).carve(buffer[self._head :], self._capacity)

    def opening(self) -> tuple[Opening, Sequence[int]]:
        """See `Place`."""
        assert self.leaves is not None
        return OpenShared(self._capacity, self.leaves), [self._fd]

    def close(self) -> None:
        """See `Place`."""
        if self._end is not None:
            self._end()
        self.words, self.columns, self.positions = self.words.copy(), {}, np.zeros(0, np.int64)


def in_shared_memory(place: Place, capacity: int) -> InSharedMemory:
    """What is in a place, there.

    Raises:
        SharedMemoryError: there is too little.
    """
    new = InSharedMemory(capacity)
    new.words[:] = place.words
    if place.leaves is not None:
        new.lay_out(place.leaves)
        every = np.arange(capacity)
        copy_rows(place.columns, every, new.columns, every)
        new.positions[:] = place.positions
    return new


def as_leaves(leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    """Leaves as JSON has them."""
    return [{"key": leaf.key, "shape": leaf.shape, "dtype": str(leaf.dtype).removeprefix("torch.")} for leaf in leaves]


def told_leaves(told: Sequence[Any]) -> tuple[Leaf, ...]:
    """What `as_leaves` told."""
    return tuple(Leaf(tuple(each["key"]), tuple(each["shape"]), getattr(torch, each["dtype"])) for each in told)
