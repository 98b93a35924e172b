"""The files of a dataset: what may be made or replaced at a path, and how data is appended and committed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tensordict.utils import _encode_key_for_filesystem  # how a key names its file has no public name

from rlcollect.errors import DatasetError
from rlcollect.export.schema import MARK, META, Schema
from rlcollect.layout import Key

__all__ = ["DatasetFiles", "claim", "memmap_name", "read_metadata"]

COMMIT = ".commit"
READ_ATTEMPTS = 20
COMMITS = (f"{COMMIT}-a", f"{COMMIT}-b")


def memmap_name(name: str) -> str:
    """The name, without an ending, of the file or folder of a key."""
    return str(_encode_key_for_filesystem(name))


def read_metadata(meta: Path) -> dict[str, Any] | None:
    """What a `meta.json` says; None if there is none.

    A link to it may swing, and the file that it led to be written anew, while it is read: what is not whole is read
    again. One read is far shorter than the two commits that this takes, so a few attempts are plenty.
    """
    for _ in range(READ_ATTEMPTS):
        try:
            metadata = json.loads(meta.read_bytes())
        except (OSError, ValueError):
            continue
        return metadata if isinstance(metadata, dict) else None
    return None


def is_dataset(meta: Path) -> bool:
    """Whether this is the root `meta.json` of a dataset of ours."""
    metadata = read_metadata(meta)
    return metadata is not None and MARK in metadata


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing, a dataset of ours, or what a killed writer left of one."""
    made_by_us = all(entry.name.startswith(COMMIT) for entry in folder.iterdir())
    return made_by_us or is_dataset(folder / META) or is_dataset(folder / COMMIT / META)


def committed_steps(folder: Path) -> int | None:
    """How many steps the dataset in `folder` holds, as its `.commit` says; None where no writer is at work."""
    metadata = read_metadata(folder / COMMIT / META)
    return None if metadata is None else int(metadata["shape"][0])


def claim(path: Path, *, overwrite: bool) -> None:
    """Make an empty folder at `path`, of nothing or, with `overwrite`, of an empty folder or a dataset of ours."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        pass
    else:
        return
    if not overwrite:
        raise DatasetError(
            f"'{path}' exists. Choose another path, or pass overwrite=True to replace the dataset that stands there"
        )
    if not path.is_dir():
        raise DatasetError(
            f"'{path}' is not a folder, so it is not replaced. Choose another path, or remove it yourself"
        )
    if not _is_ours(path):
        raise DatasetError(
            f"'{path}' holds something that is not a dataset of rlcollect (no {META} with {MARK!r} in it), so it is "
            "not replaced. Choose another path, or empty it yourself"
        )
    _empty(path)


def _empty(path: Path) -> None:
    """Remove what is in a dataset's folder; what tells that it is one goes last, so that a broken call can be redone.

    The folder itself stays: it may be a mount point, or a link.
    """
    for entry in sorted(path.iterdir(), key=lambda entry: (entry.name.startswith(COMMIT), entry.name == META)):
        _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


class DatasetFiles:
    """The files of a dataset that is being written; made with no steps in them.

    Attributes:
        schema: what each batch holds.
        steps: how many steps are committed.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.schema = schema
        self.steps = 0
        self._path = path
        self._data: dict[Key, BinaryIO] = {}
        try:
            self._create()
        except BaseException:
            self._close_data()
            with contextlib.suppress(OSError):
                self._undo_create()
            raise

    def _create(self) -> None:
        """The metadata first, so that the folder is known as ours; the root's `meta.json` last: it loads whole."""
        self._commit(0)
        for folder in self.schema.folders():
            self._folder(folder).mkdir(exist_ok=True)
        for key in self.schema.leaves:
            self._data[key] = self._file(key).open("xb", buffering=0)
        for folder in reversed(self.schema.folders()):
            up = Path(*[".."] * len(folder))
            (self._folder(folder) / META).symlink_to(up / COMMIT / self._folder(folder, Path()) / META)

    def _undo_create(self) -> None:
        """Remove what `_create` made, and nothing else that may stand there."""
        for key in self._data:
            self._file(key).unlink(missing_ok=True)
        for folder in reversed(self.schema.folders()):
            meta = self._folder(folder) / META
            if meta.is_symlink():
                meta.unlink()
            if folder:
                with contextlib.suppress(OSError):  # not made yet, or something of the user's stands in it
                    self._folder(folder).rmdir()
        for entry in self._path.glob(f"{COMMIT}*"):
            _remove(entry)

    def _file(self, key: Key) -> Path:
        return self._folder(key[:-1]) / f"{memmap_name(key[-1])}.memmap"

    def _folder(self, folder: Key, below: Path | None = None) -> Path:
        return (self._path if below is None else below).joinpath(*map(memmap_name, folder))

    def append(self, tensors: dict[Key, torch.Tensor], steps: int) -> None:
        """Add a batch of `steps` steps.

        Raises:
            OSError: it could not be written; everything is as it was before.
        """
        if not steps:
            return
        try:
            for key, file in self._data.items():
                _write_all(file, _time_major(tensors[key], len(self.schema.lanes)), self.steps * self._step_bytes(key))
            self._commit(self.steps + steps)
            self.steps += steps
        except BaseException:
            self._roll_back()
            raise

    def _step_bytes(self, key: Key) -> int:
        return self.schema.num_lanes * self.schema.leaves[key].nbytes

    def _commit(self, steps: int) -> None:
        """Make `steps` steps count: one link is replaced, and with it the metadata of all levels."""
        fresh = self._path / self._other_commit()
        for folder in self.schema.folders():
            target = self._folder(folder, fresh)
            target.mkdir(exist_ok=True)
            (target / META).write_text(json.dumps(self.schema.metadata(folder, steps)))
        link = self._path / f"{COMMIT}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(fresh.name)
        link.replace(self._path / COMMIT)

    def _other_commit(self) -> str:
        """The folder of the two that the link does not point to: making new ones each time costs milliseconds."""
        current = self._path / COMMIT
        return COMMITS[0] if not current.is_symlink() or current.readlink().name == COMMITS[1] else COMMITS[1]

    def _roll_back(self) -> None:
        """Cut off what is not committed. As good as it goes: nothing reads it, and the next write goes over it."""
        committed = committed_steps(self._path)
        if committed is not None:
            self.steps = committed  # an interrupt may have come just after the commit
        for key, file in self._data.items():
            with contextlib.suppress(OSError):
                file.truncate(self.steps * self._step_bytes(key))

    def close(self) -> None:
        """Put the data on the disk, then the metadata in the places of the links to them: needs no space."""
        try:
            for file in self._data.values():
                os.fsync(file.fileno())
            committed = self._path / (self._path / COMMIT).readlink()
            for folder in self.schema.folders():
                meta = self._folder(folder, committed) / META
                _sync(meta)
                meta.replace(self._folder(folder) / META)
            (self._path / COMMIT).unlink()
            for name in COMMITS:
                shutil.rmtree(self._path / name, ignore_errors=True)
            for folder in self.schema.folders():
                _sync(self._folder(folder))
        finally:
            self._close_data()

    def _close_data(self) -> None:
        for file in self._data.values():
            file.close()


def _time_major(tensor: torch.Tensor, lane_dims: int) -> memoryview:
    """The bytes of a tensor `[N, T, *]` (`[T, *]`) in the order `[T, N, *]`."""
    rows = tensor.detach().resolve_conj().resolve_neg().movedim(lane_dims, 0).cpu().contiguous()
    flat = rows.as_strided([rows.numel()], [1])  # reshape(-1) would keep the odd stride of a dimension of size one
    return flat.view(torch.uint8).numpy().data


def _write_all(file: BinaryIO, data: memoryview, offset: int) -> None:
    """Write at an offset; the system may take less than all at a time."""
    written = 0
    while written < len(data):
        written += os.pwrite(file.fileno(), data[written:], offset + written)


def _sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
