"""Batches on disk: a folder that grows by each batch and can be read at any time.

The folder is a memory-mapped TensorDict in time-major order, `[T, N]` (`[T]` for a single lane): one file
`<key>.memmap` a tensor, one `meta.json` a level of keys, one sub-folder a level. So a batch is an ordinary append to
each file, and a full disk an `OSError`, never a bus error. Frames count once the metadata say so, and the `meta.json`
of all levels change in ONE step: while a writer is open they are links through `.commit`, itself a link to the folder
`.commit-<T>` in which the metadata of T steps stand; a commit writes a new such folder and swings the one link.
`close` puts the files in the links' places: what is left is what `TensorDict.memmap` would have written, and one word
in the root's `meta.json` that says that time comes first.

Knows tensordict's file format (that of 0.14), and nothing of who makes the batches.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import _encode_key_for_filesystem  # how a key names its file has no public name

from rlcollect.errors import DatasetError

__all__ = ["DatasetWriter", "load_dataset"]

Key = tuple[str, ...]

META = "meta.json"
COMMIT = ".commit"
MARK = "_rlcollect"
RESERVED = ("_type", "device", "shape", MARK)  # tensordict's words (and ours) in meta.json, beside the keys
LOAD_ATTEMPTS = 100

NO_LINKS = (
    "if that file system has no symbolic links (FAT, some network shares), write to another disk and copy the dataset "
    "when it is closed; else see who may write there"
)
REMEDIES = {
    errno.EPERM: NO_LINKS,
    errno.ENOTSUP: NO_LINKS,
    errno.ENOSPC: "make room on that disk and write the batch again",
    errno.EDQUOT: "make room within your quota and write the batch again",
    errno.EFBIG: "a file would outgrow a limit of the process (`ulimit -f`) or of the file system: raise it and write "
    "the batch again, or go on with a writer at another path",
}


class DatasetWriter:
    """Writes the batches of one run to a folder, as they come.

    After each `write` that returned, `TensorDict.load_memmap(path)` gives exactly the frames written so far, `[T, N]`,
    and `load_dataset(path)` gives them lanes first, `[N, T]`, as batches are; also when the process is killed, even in
    the middle of a `write`. (`close` puts the files on the disk itself: before it, a power cut may lose frames.)

        with DatasetWriter("runs/cartpole") as writer:
            for batch in collector:
                writer.write(batch)

    Args:
        path: the folder; it is made, with its parents. It must not exist, not even empty, unless `overwrite`.
        overwrite: an empty folder or a dataset of ours that stands at `path` is emptied, now. Anything else is
            never touched.

    Raises:
        DatasetError: `path` exists and may not be replaced, or cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._files: _Files | None = None
        self._closed = False
        try:
            _claim(self.path, overwrite=overwrite)
        except DatasetError:
            raise
        except OSError as error:
            text = f"cannot make a dataset at '{self.path}': {_reason(error)}. Choose a path that can be written"
            raise DatasetError(error.errno, text) from error

    @property
    def frames(self) -> int:
        """How many frames are safely in the dataset; rows that a mask marks as invalid count too."""
        return self._files.steps * self._files.schema.num_lanes if self._files else 0

    def write(self, batch: TensorDictBase) -> None:
        """Append a batch; all of it or nothing.

        Args:
            batch: `[T]` or `[N, T]`, time last. Keys, dtypes, shapes and N are those of the first batch; T may vary.

        Raises:
            DatasetError: the writer is closed; `batch` holds something that is no plain tensor, or differs from the
                first batch (the text names the first difference): nothing was written. Or the system refused (a full
                disk; `errno` is the system's): what was written of this batch is taken back, the frames of earlier
                writes stay and stay loadable, and the batch may be written again.
        """
        if self._closed:
            raise DatasetError(f"the writer of '{self.path}' is closed; write before close(), inside the with block")
        tensors = _tensors(batch)
        schema = _Schema.of(batch, tensors)
        if self._files and (difference := self._files.schema.difference(schema)):
            raise DatasetError(
                f"expected a batch like the first one in '{self.path}', but {difference}. Nothing was written; start a "
                "new dataset for batches of another kind"
            )
        steps = batch.batch_size[-1]
        try:
            self._files = self._files or _Files(self.path, schema)
            self._files.append(tensors, steps)
        except OSError as error:
            self._refused(error, schema.step_bytes * steps)

    def _refused(self, error: OSError, needed: int) -> NoReturn:
        """Raise what the system said about a write, and what now holds."""
        try:
            free = f"{shutil.disk_usage(self.path).free:,} bytes"
        except OSError:
            free = "an unknown number of bytes"
        safe = "stay and stay loadable" if self._files else "were there before, so there is no dataset yet"
        remedy = REMEDIES.get(error.errno or 0, "remove the cause and write the batch again")
        text = (
            f"cannot write a batch of {needed:,} bytes to '{self.path}': {_reason(error)}; {free} are free there. "
            f"Nothing of it is kept; {self.frames:,} frames {safe}. What to do: {remedy}"
        )
        raise DatasetError(error.errno, text) from error

    def close(self) -> None:
        """Put everything on the disk itself. May be called twice. Without a batch, no dataset is left.

        Raises:
            DatasetError: the disk refused; the dataset is closed, and loadable as far as the disk kept it.
        """
        if self._closed:
            return
        self._closed = True
        if self._files is None:
            with contextlib.suppress(OSError):  # not empty, or a mount point: not ours to remove
                self.path.rmdir()
            return
        try:
            self._files.close()
        except OSError as error:
            text = (
                f"the {self.frames:,} frames in '{self.path}' may not all be on the disk itself: {_reason(error)}. "
                "They load as far as the system kept them; remove the cause and copy them to another disk"
            )
            raise DatasetError(error.errno, text) from error

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _reason(error: OSError) -> str:
    """What the system said, and of which file."""
    reason = error.strerror or str(error)
    return f"{reason} ('{error.filename}')" if error.filename else reason


def load_dataset(path: str | os.PathLike[str]) -> TensorDict:
    """The frames of a dataset, lanes first and mapped, not read: `[N, T]`, or `[T]` for a single lane.

    Works on a closed dataset, on one whose writer was killed, and on one that another process is writing (the frames
    at that moment). The tensors are views of the files: what is written to them is written to the dataset, as after
    `TensorDict.load_memmap`, which gives the same frames time first, `[T, N]` (and may raise in the very moment in
    which another process commits a batch, where this function tries again).

    Args:
        path: the folder that a `DatasetWriter` wrote.

    Returns:
        TensorDict with names `[None, "time"]` (`["time"]`).

    Raises:
        DatasetError: there is no dataset, it is not one of ours, or files are missing or too short.
    """
    folder = Path(path)
    for _ in range(LOAD_ATTEMPTS):
        before = _committed(folder)
        try:
            return _load(folder)
        except (OSError, RuntimeError, ValueError) as error:
            if _committed(folder) != before:
                continue  # a writer moved on between two of the files that were read
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(f"cannot load the dataset at '{folder}': {error}") from error
    raise DatasetError(f"'{folder}' is written to faster than it can be read; load it when its writer is closed")


def _load(folder: Path) -> TensorDict:
    if not folder.is_dir():
        raise DatasetError(
            f"there is no dataset at '{folder}'. A DatasetWriter that was closed without a batch leaves none"
        )
    if not _is_dataset(folder / META):
        raise DatasetError(
            f"'{folder}' holds no dataset of rlcollect: expected a {META} with {MARK!r} in it. A DatasetWriter makes "
            "it with the first batch; any other memory-mapped TensorDict is read by TensorDict.load_memmap"
        )
    _check_files(folder)
    loaded = TensorDict.load_memmap(folder)
    if loaded.batch_dims == 1:
        loaded.names = ["time"]
        return loaded
    result = loaded.apply(lambda value: value.transpose(0, 1), batch_size=loaded.batch_size[::-1])
    result.names = [None, "time"]
    return result


def _check_files(folder: Path) -> None:
    """Every file is as long as the metadata say: tensordict leaves missing keys out, and grows short files with zeros.

    Raises:
        DatasetError: one is not; names it.
    """
    for key, entry in json.loads((folder / META).read_bytes()).items():
        if not isinstance(entry, dict):
            continue
        name = _encode_key_for_filesystem(key)
        if "type" in entry:
            _check_files(folder / name)
            continue
        file = folder / f"{name}.memmap"
        needed = torch.Size(entry["shape"]).numel() * getattr(torch, entry["dtype"].removeprefix("torch.")).itemsize
        found = file.stat().st_size if file.exists() else 0
        if found < needed:
            raise DatasetError(
                f"'{file}' has {found:,} bytes, expected {needed:,}: the dataset is not complete; copy it again"
            )


# ---- what a path holds --------------------------------------------------------------------------------------------


def _is_dataset(meta: Path) -> bool:
    """Whether this is the root `meta.json` of a dataset of ours."""
    try:
        metadata = json.loads(meta.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and MARK in metadata


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing, a dataset of ours, or what a killed writer left of one."""
    made_by_us = all(entry.name.startswith(COMMIT) for entry in folder.iterdir())
    return made_by_us or _is_dataset(folder / META) or _is_dataset(folder / COMMIT / META)


def _committed(folder: Path) -> int | None:
    """How many steps the dataset in `folder` holds, as its `.commit` says; None where no writer is at work."""
    try:
        return int((folder / COMMIT).readlink().name.rpartition("-")[2])
    except OSError:
        return None


def _claim(path: Path, *, overwrite: bool) -> None:
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


# ---- what a batch holds -------------------------------------------------------------------------------------------


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
class _Schema:
    """What is the same for all batches of a dataset."""

    lanes: tuple[int, ...]
    leaves: dict[Key, _Leaf]

    @classmethod
    def of(cls, batch: TensorDictBase, tensors: dict[Key, torch.Tensor]) -> _Schema:
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
        return torch.Size(self.lanes).numel()

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of all lanes."""
        return self.num_lanes * sum(leaf.nbytes for leaf in self.leaves.values())

    def difference(self, other: _Schema) -> str | None:
        """The first thing in which `other` is not as this one, as a clause; None if there is none."""
        if self.lanes != other.lanes:
            return f"its batch_size without time is {list(other.lanes)}, not {list(self.lanes)}"
        for key, leaf in self.leaves.items():
            if key not in other.leaves:
                return f"key {_show(key)} is missing"
            if leaf != other.leaves[key]:
                return f"key {_show(key)} is {other.leaves[key]} a frame, not {leaf}"
        return next((f"key {_show(key)} is new" for key in other.leaves if key not in self.leaves), None)

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


def _tensors(batch: TensorDictBase) -> dict[Key, torch.Tensor]:
    """The tensors of a batch, by key.

    Raises:
        DatasetError: something in it is no tensor of a fixed shape, or stands under a name that the format uses itself.
    """
    tensors = dict(_leaves(batch, ()))
    for key, value in tensors.items():
        if not _is_plain(value) or value.shape[: batch.batch_dims] != batch.batch_size:
            kind = type(getattr(value, "data", value) if is_non_tensor(value) else value).__name__
            raise DatasetError(
                f"expected plain tensors with one row a frame, but key {_show(key)} holds {kind}. Leave it out with "
                f"batch.exclude({_show(key)}), or turn it into a tensor"
            )
        if taken := next((part for part in key if part in RESERVED), None):
            raise DatasetError(f"key {_show(key)}: {taken!r} means something else in a {META}; rename that key")
    return tensors


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def _leaves(batch: TensorDictBase, above: Key) -> Iterator[tuple[Key, Any]]:
    for name, value in batch.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _show(key: Key) -> str:
    """A key as the user would write it."""
    return repr(key[0]) if len(key) == 1 else repr(key)


# ---- the files of an open dataset ---------------------------------------------------------------------------------


class _Files:
    """The files of a dataset that is being written; made with no steps in them.

    Attributes:
        schema: what each batch holds.
        steps: how many steps are committed.
    """

    def __init__(self, path: Path, schema: _Schema) -> None:
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
        return self._folder(key[:-1]) / f"{_encode_key_for_filesystem(key[-1])}.memmap"

    def _folder(self, folder: Key, below: Path | None = None) -> Path:
        return (self._path if below is None else below).joinpath(*map(_encode_key_for_filesystem, folder))

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
        self._forget_old_commits()

    def _step_bytes(self, key: Key) -> int:
        return self.schema.num_lanes * self.schema.leaves[key].nbytes

    def _commit(self, steps: int) -> None:
        """Make `steps` steps count: one link is replaced, and with it the metadata of all levels."""
        fresh = self._path / f"{COMMIT}-{steps}"
        for folder in self.schema.folders():
            target = self._folder(folder, fresh)
            target.mkdir(exist_ok=True)
            (target / META).write_text(json.dumps(self.schema.metadata(folder, steps)))
        link = self._path / f"{COMMIT}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(fresh.name)
        link.replace(self._path / COMMIT)

    def _roll_back(self) -> None:
        """Cut off what is not committed. As good as it goes: nothing reads it, and the next write goes over it."""
        committed = _committed(self._path)
        if committed is not None:
            self.steps = committed  # an interrupt may have come just after the commit
        for key, file in self._data.items():
            with contextlib.suppress(OSError):
                file.truncate(self.steps * self._step_bytes(key))
        self._forget_old_commits()

    def _forget_old_commits(self) -> None:
        for folder in self._path.glob(f"{COMMIT}-*"):
            if folder.name != f"{COMMIT}-{self.steps}":
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Put the data on the disk, then the metadata in the places of the links to them: needs no space."""
        try:
            for file in self._data.values():
                os.fsync(file.fileno())
            committed = self._path / f"{COMMIT}-{self.steps}"
            for folder in self.schema.folders():
                meta = self._folder(folder, committed) / META
                _sync(meta)
                meta.replace(self._folder(folder) / META)
            (self._path / COMMIT).unlink()
            shutil.rmtree(committed)
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
