"""Batches on disk: a folder that grows by each batch and can be read at any time.

The folder is a memory-mapped TensorDict in time-major order, `[T, N]` (`[T]` for a single lane): one file
`<key>.memmap` a tensor, one `meta.json` a level of keys, one sub-folder a level. So a batch is an ordinary append to
each file, and a full disk an `OSError`, never a bus error. Frames count once the metadata say so, and the `meta.json`
of all levels change in ONE step: while a writer is open they are links through `.commit`, itself a link to one of
the folders `.commit-a` and `.commit-b`; a commit writes the metadata into the other one and swings the one link.
`close` puts the files in the links' places: what is left is what `TensorDict.memmap` would have written, and one word
in the root's `meta.json` that says that time comes first.

Knows tensordict's file format (that of 0.14), and nothing of who makes the batches.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

from rlcollect.errors import DatasetError
from rlcollect.export.files import DatasetFiles, claim, memmap_name, read_metadata
from rlcollect.export.schema import MARK, META, Schema, batch_tensors
from rlcollect.layout import Key

__all__ = ["DatasetWriter", "load_dataset"]

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
        self._files: DatasetFiles | None = None
        self._closed = False
        try:
            claim(self.path, overwrite=overwrite)
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
        tensors = batch_tensors(batch)
        schema = Schema.of(batch, tensors)
        if self._files and (difference := self._files.schema.difference(schema)):
            raise DatasetError(
                f"expected a batch like the first one in '{self.path}', but {difference}. Nothing was written; start a "
                "new dataset for batches of another kind"
            )
        steps = batch.batch_size[-1]
        try:
            self._files = self._files or DatasetFiles(self.path, schema)
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

    Works on a closed dataset, on one whose writer was killed, and on one that another process is writing: the frames at
    that moment. The tensors are views of the files: what is written to them is written to the dataset, as after
    `TensorDict.load_memmap`, which gives the same frames time first, `[T, N]`, and may raise while one is committed.

    Args:
        path: the folder that a `DatasetWriter` wrote.

    Returns:
        TensorDict with names `[None, "time"]` (`["time"]`).

    Raises:
        DatasetError: there is no dataset, it is not one of ours, or files are missing or too short.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DatasetError(
            f"there is no dataset at '{folder}'. A DatasetWriter that was closed without a batch leaves none"
        )
    try:
        metadata = read_metadata(folder / META)
        if metadata is None or MARK not in metadata:
            raise DatasetError(
                f"'{folder}' holds no dataset of rlcollect: expected a {META} with {MARK!r} in it. A DatasetWriter "
                "makes it with the first batch; any other memory-mapped TensorDict is read by TensorDict.load_memmap"
            )
        steps, *lanes = metadata["shape"]
        result = TensorDict({}, batch_size=[*lanes, steps], names=[None] * len(lanes) + ["time"])
        for key, value in _mapped(folder, metadata, steps):
            result[key] = value.movedim(0, len(lanes))
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"cannot load the dataset at '{folder}': {error}") from error
    return result


def _mapped(folder: Path, metadata: dict[str, Any], steps: int) -> Iterator[tuple[Key, torch.Tensor]]:
    """The first `steps` steps of each tensor of a level of keys and of those below it, `[T, N, *]`, by key.

    How many steps there are is read once, at the root: what was committed then never changes, however many steps a
    writer adds meanwhile, so every level is read as of that moment.
    """
    for key, entry in metadata.items():
        if not isinstance(entry, dict):
            continue
        below = folder / memmap_name(key)
        if "type" in entry:
            inner = read_metadata(below / META)
            if inner is None:
                raise DatasetError(
                    f"'{below / META}' is missing or no metadata: the dataset is not complete; copy it again"
                )
            yield from (((key, *rest), value) for rest, value in _mapped(below, inner, steps))
        else:
            yield (key,), _map_file(below.with_name(f"{below.name}.memmap"), entry, steps)


def _map_file(file: Path, entry: dict[str, Any], steps: int) -> torch.Tensor:
    """The tensor in a file, mapped.

    Raises:
        DatasetError: it is shorter than the metadata say. (tensordict would grow it with zeros.)
    """
    dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    shape = torch.Size([steps, *entry["shape"][1:]])
    needed = shape.numel() * dtype.itemsize
    found = file.stat().st_size if file.exists() else 0
    if found < needed:
        raise DatasetError(
            f"'{file}' has {found:,} bytes, expected {needed:,}: the dataset is not complete; copy it again"
        )
    mapped: torch.Tensor = MemoryMappedTensor.from_filename(file, dtype, shape)
    return mapped
