"""A buffer's frames in a folder: those of a moment, tensor by tensor, with a note of what they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcollect.errors import DatasetError
from rlcollect.layout import Key, Layout, Leaf
from rlcollect.memory.replay.files import made_file, mapped
from rlcollect.memory.replay.places import as_leaves, told_leaves
from rlcollect.memory.replay.rows import copy_rows
from rlcollect.memory.replay.table import Columns

__all__ = ["POSITION", "load", "save"]

Array = np.ndarray[Any, Any]
NOTES = "replay.json"
POSITION = Leaf((), (), torch.int64)
"""What is saved beside the frames: the position of each in its trajectory."""


def save(
    path: str | os.PathLike[str],
    columns: Columns,
    leaves: Sequence[Leaf],
    rows: Array,
    notes: Mapping[str, Any],
    finish: Callable[[], Mapping[str, Any]],
) -> None:
    """Writes frames to a folder, in the place of what was saved there before once all is written.

    A file of notes says which folder in it they are in. It is put in its place last, at one stroke: whenever this is
    broken off, what was saved before is there, whole.

    Args:
        path: of the folder.
        columns: where frames are, and their positions.
        leaves: what they hold, with `POSITION`.
        rows: int64 `[F]`, which, in order.
        notes: to be read with them.
        finish: called when frames are copied; more notes.

    Raises:
        DatasetError: there is too little room, or something else there.
    """
    target = Path(path).absolute()
    before = _folder_of(target)
    is_new = not target.exists()
    made = target / ("frames-1" if before is not None and before.name == "frames-0" else "frames-0")
    try:
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        for number, leaf in enumerate(leaves):
            made_file(made / f"{number}.memmap", Layout([leaf]).nbytes(len(rows)))
        copy_rows(columns, rows, _columns(made, leaves, len(rows)), np.arange(len(rows)))
        told = {"format": 1, "frames": len(rows), "folder": made.name, "leaves": as_leaves(leaves), **notes, **finish()}
        new = made / NOTES
        new.write_text(json.dumps(told))
        new.replace(target / NOTES)
    except BaseException as error:
        shutil.rmtree(target if is_new else made, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        size = Layout(leaves).nbytes(len(rows))
        raise DatasetError(f"{len(rows):,} frames need {size:,} bytes in {target}: {error}.") from error
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def _folder_of(target: Path) -> Path | None:
    """Where frames are that were saved before; None: none were.

    Raises:
        DatasetError: there is something else.
    """
    try:
        return target / str(json.loads((target / NOTES).read_text())["folder"])
    except FileNotFoundError:
        left = {"frames-0", "frames-1"}  # by a process that was killed
        if not target.exists() or {each.name for each in target.iterdir()} <= left:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DatasetError(f"{target} is there, and is no folder that dumps() made: it is left alone. Name another.")


def _columns(folder: Path, leaves: Sequence[Leaf], frames: int) -> dict[Key, torch.Tensor]:
    return {leaf.key: mapped(folder / f"{number}.memmap", leaf, frames) for number, leaf in enumerate(leaves)}


def load(path: str | os.PathLike[str]) -> tuple[tuple[Leaf, ...], dict[Key, torch.Tensor], dict[str, Any]]:
    """What `save` wrote: what frames hold, `[F, *shape]` by key, the notes.

    Raises:
        DatasetError: there is no such thing.
    """
    target = Path(path)
    try:
        notes = json.loads((target / NOTES).read_text())
        leaves = told_leaves(notes["leaves"])
        columns = _columns(target / notes["folder"], leaves, notes["frames"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{target} holds nothing that ReplayBuffer.dumps() wrote: {error}.") from error
    return leaves, columns, notes
