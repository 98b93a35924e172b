"""Episodes as far as they are there: ranges of frames in batches that are kept as they came.

Knows nothing of what makes one, of the order they come in, and of what becomes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.layout import Key

__all__ = ["Columns", "Episode", "Source"]

Array = np.ndarray[Any, Any]
Columns = dict[Key, torch.Tensor]


@dataclass(eq=False, slots=True)
class Source:
    """Frames of a batch, one after the other.

    Attributes:
        batch: `[*lead, T]`.
        columns: the same, `[F, *shape]` by key; None, where it holds more than tensors.
        size: F.
        wanted: how many of them are kept for an episode.
    """

    batch: TensorDictBase
    columns: Columns | None
    size: int
    wanted: int = 0

    @classmethod
    def of(cls, batch: TensorDictBase) -> Source:
        """The frames of a batch, of which none is wanted yet."""
        columns = _columns(batch, batch.batch_dims)
        return cls(batch, columns, batch.batch_size.numel())

    def values(self, key: Key) -> Array | None:
        """`[F]`, of something with one value a frame; None, if it is not there."""
        value = self.batch.get(key, None) if self.columns is None else self.columns.get(key)
        if value is None:
            return None
        values: Array = value.reshape(-1).cpu().numpy()
        return values

    def on(self, device: torch.device | None) -> Source:
        """The same on a device."""
        return self if self.batch.device == device else Source.of(self.batch.to(device))


def _columns(data: TensorDictBase, dims: int, above: Key = ()) -> Columns | None:
    """Its tensors by key, with one batch dimension; None, where there is anything else, or a level of its own size."""
    columns: Columns = {}
    if type(data) is not TensorDict or data.batch_dims != dims:
        return None
    for name, value in data.items():
        if type(value) is torch.Tensor and not value.requires_grad:
            columns[*above, name] = value.flatten(0, dims - 1)
        elif (inner := _columns(value, dims, (*above, name))) is not None:
            columns.update(inner)
        else:
            return None
    return columns


class Episode:
    """An episode, as far as it is there.

    Attributes:
        frames: how many there are.
        is_whole: whether its last is among them.
        is_wanted: whether it will be delivered when it is.
        pieces: where its frames are, in order: source, number of the first, how many that stand side by side.

    Args:
        lane: whose, counted over all workers.
        id: of its frames.
    """

    __slots__ = ("frames", "id", "is_wanted", "is_whole", "lane", "pieces")

    def __init__(self, lane: int, id: int) -> None:  # noqa: A002 - its name
        self.lane = lane
        self.id = id
        self.frames = 0
        self.is_whole = False
        self.is_wanted = True
        self.pieces: list[tuple[Source, int, int]] = []
