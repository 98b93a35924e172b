"""Frames of a buffer in files, which may be larger than memory, and outlive who wrote them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcollect.devices import CPU
from rlcollect.errors import DatasetError, OptionError
from rlcollect.layout import Layout, Leaf
from rlcollect.memory.replay.cursors import GLANCE, Cursors
from rlcollect.memory.replay.places import Columns, InMemory, InSharedMemory, Opening, Place, as_leaves, told_leaves
from rlcollect.memory.replay.rows import copy_rows

__all__ = ["InFiles", "made_file", "mapped", "place_of"]

Array = np.ndarray[Any, Any]
META, WORDS, POSITIONS = "buffer.json", "cursors.bin", "positions.bin"
LOOKS = 100  # at notes, which name a folder that may be gone a moment later


@dataclass(frozen=True)
class OpenFiles:
    """See `Opening`: without descriptors."""

    path: str
    capacity: int

    def open(self, descriptors: Sequence[int]) -> InFiles:  # noqa: ARG002
        """See `Opening`."""
        return InFiles(self.capacity, self.path, is_owner=False)


class InFiles:
    """In files, which may be larger than memory, and are there when the process is not any more.

    A file of notes says which files hold frames and cursors, and is put in its place last, so it never names any that
    are not whole.

    Args:
        capacity: frames.
        path: a folder, made if it is not there; what is in it is taken over. None: a new one, removed at the end.
        is_owner: whether others may not be.

    Raises:
        DatasetError: what is there is of another capacity, or no buffer, or has an owner.
    """

    name = "memmap"
    is_shared = True

    def __init__(self, capacity: int, path: str | os.PathLike[str] | None, *, is_owner: bool = True) -> None:
        self._capacity = capacity
        self.leaves: tuple[Leaf, ...] | None = None
        self.columns: Columns = {}
        self.positions: Array = np.zeros(0, np.int64)
        self.words: Array = np.zeros(Cursors.words_of(capacity), np.int64)  # until it is laid out
        self._turn = 0
        is_ours = path is None
        try:
            self.path = Path(tempfile.mkdtemp(prefix="rlcollect-buffer-") if path is None else path).absolute()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked() if is_owner else None
        except DatasetError:
            raise
        except OSError as error:
            raise DatasetError(f"A buffer cannot have its files in {path}: {error}.") from error
        self._end = weakref.finalize(self, _let_go, self._lock, self.path if is_ours else None)
        try:
            if (self.path / META).exists():
                self._take(*self._noted())
                if is_owner:
                    Cursors(self.words).recover()
                    self._sweep()
        except BaseException as error:
            self._end()
            if isinstance(error, OSError) and not isinstance(error, DatasetError):
                raise DatasetError(f"The buffer in {self.path} is not whole: {error}.") from error
            raise

    def _locked(self) -> int:
        """A descriptor that nobody else can have as long as it is open."""
        fd = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise DatasetError(
                f"The buffer in {self.path} is open in another place, here or in another process, and has one owner at "
                "a time. Close it there, or pass that object on to processes that are to read it."
            ) from error
        return fd

    def _noted(self) -> tuple[int, tuple[Leaf, ...]]:
        """Which folder frames are in, and what they hold."""
        try:
            notes = json.loads((self.path / META).read_text())
            capacity, turn, leaves = notes["capacity"], int(notes["turn"]), told_leaves(notes["leaves"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{self.path / META} is no note of a buffer of rlcollect: {error!r}.") from error
        if capacity != self._capacity:
            raise DatasetError(
                f"The buffer in {self.path} has a capacity of {capacity} frames, and {self._capacity} was asked for. "
                f"Open it with capacity={capacity}; to have another, load what dumps() saved of it."
            )
        return turn, leaves

    def _folder(self, turn: int) -> Path:
        return self.path / f"frames-{turn}"

    def _sweep(self) -> None:
        """Folders go that a process left which was killed."""
        for folder in self.path.glob("frames-*"):
            if folder != self._folder(self._turn):
                shutil.rmtree(folder, ignore_errors=True)

    def _mapped(self, turn: int, leaves: Sequence[Leaf]) -> tuple[Array, Array, Columns]:
        """Words, positions and columns of a folder."""
        folder = self._folder(turn)
        sizes = {WORDS: len(self.words), POSITIONS: self._capacity}
        words, positions = (
            mapped(folder / name, Leaf((), (), torch.int64), size).numpy() for name, size in sizes.items()
        )
        columns = {
            leaf.key: mapped(folder / f"{number}.memmap", leaf, self._capacity) for number, leaf in enumerate(leaves)
        }
        return words, positions, columns

    def _take(self, turn: int, leaves: Sequence[Leaf]) -> None:
        self.words, self.positions, self.columns = self._mapped(turn, leaves)
        self.leaves, self._turn = tuple(leaves), turn

    def _made(self, turn: int, leaves: Sequence[Leaf], fill: Callable[[Array, Array, Columns], None]) -> None:
        """Files for these, with room in them, and what is filled in; then it is noted that they count."""
        folder = self._folder(turn)
        shutil.rmtree(folder, ignore_errors=True)
        sizes = {f"{number}.memmap": Layout([leaf]).nbytes(self._capacity) for number, leaf in enumerate(leaves)}
        sizes |= {WORDS: 8 * len(self.words), POSITIONS: 8 * self._capacity}
        try:
            folder.mkdir()
            for name, nbytes in sizes.items():
                made_file(folder / name, nbytes)
            fill(*self._mapped(turn, leaves))
            self._note(turn, leaves)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise DatasetError(
                f"A buffer of {self._capacity:,} frames needs {sum(sizes.values()):,} bytes in {self.path}: "
                f"{error.strerror or error}. {shutil.disk_usage(self.path).free:,} bytes are free there."
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _note(self, turn: int, leaves: Sequence[Leaf]) -> None:
        notes = {"format": 1, "capacity": self._capacity, "turn": turn, "leaves": as_leaves(leaves)}
        new = self.path / f"{META}.new"
        try:
            new.write_text(json.dumps(notes, indent=1))
            new.replace(self.path / META)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """See `Place`."""

        def fill(words: Array, positions: Array, columns: Columns) -> None:  # noqa: ARG001
            words[:] = self.words

        self._made(0, leaves, fill)
        self._take(0, leaves)

    def put(self, source: Columns, rows: Array, positions: Array, places: Array, words: Array) -> None:
        """See `Place`. Whenever it is broken off, one of both stands whole."""
        assert self.leaves is not None

        def fill(new_words: Array, new_positions: Array, columns: Columns) -> None:
            copy_rows(source, rows, columns, places)
            new_positions[places] = positions
            new_words[:] = words

        old, old_words = self._turn, self.words
        self._made(old + 1, self.leaves, fill)
        self._take(old + 1, self.leaves)
        Cursors(old_words).move()
        shutil.rmtree(self._folder(old), ignore_errors=True)

    def follow(self) -> None:
        """See `Place`."""
        for look in range(LOOKS):
            try:
                turn, leaves = self._noted()
                if turn != self._turn:
                    self._take(turn, leaves)
            except FileNotFoundError as error:  # moved again meanwhile
                if look == LOOKS - 1:
                    raise DatasetError(f"The buffer in {self.path} is not there any more: {error}.") from error
                time.sleep(GLANCE)
            else:
                return

    def opening(self) -> tuple[Opening, Sequence[int]]:
        """See `Place`."""
        return OpenFiles(str(self.path), self._capacity), []

    def disown(self) -> None:
        """See `Place`."""
        if self._end.detach() is not None and self._lock is not None:
            os.close(self._lock)

    def close(self) -> None:
        """See `Place`."""
        self.words, self.columns, self.positions = self.words.copy(), {}, np.zeros(0, np.int64)
        self._end()


def _let_go(lock: int | None, ours: Path | None) -> None:
    if lock is not None:
        os.close(lock)
        if ours is not None:
            shutil.rmtree(ours, ignore_errors=True)


def made_file(path: Path, nbytes: int) -> None:
    """A file with room for so many bytes.

    Raises:
        OSError: there is less.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))


def mapped(path: Path, leaf: Leaf, rows: int) -> torch.Tensor:
    """A file as a tensor `[rows, *shape]`.

    Raises:
        OSError: it is not there, or is shorter than that.
    """
    shape = (rows, *leaf.shape)
    count = math.prod(shape)
    if path.stat().st_size < count * leaf.dtype.itemsize:  # torch would make it longer
        raise OSError(f"{path} has {path.stat().st_size} bytes, and {count * leaf.dtype.itemsize} should be there")
    if not count:
        return torch.empty(shape, dtype=leaf.dtype)
    return torch.from_file(str(path), shared=True, size=count, dtype=leaf.dtype).view(shape)


def place_of(storage: str, capacity: int, path: str | os.PathLike[str] | None, device: torch.device | None) -> Place:
    """What options mean.

    Raises:
        OptionError: they make no sense.
        DatasetError: a folder is of another capacity, or no buffer, or has an owner.
    """
    if path is not None and storage != "memmap":
        raise OptionError(f'path= is for storage="memmap"; storage={storage!r} came.')
    if storage == "memory":
        return InMemory(capacity, CPU if device is None else device)
    if storage == "shared":
        return InSharedMemory(capacity)
    if storage == "memmap":
        return InFiles(capacity, path)
    raise OptionError(f'storage must be "memory", "shared" or "memmap", not {storage!r}.')
