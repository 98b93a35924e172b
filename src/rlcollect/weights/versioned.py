"""Weights between processes: two buffers and a number. Published without waiting, taken whole or not at all.

A publish fills the buffer that is not in use and then raises the number, which only the publisher writes. Who takes
copies the buffer that the number names, and believes the copy only if the number is still the same: then nobody was
writing there meanwhile. There is no lock that a killed process could keep. Knows neither policies nor workers: names,
tensors, memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.layout import ALIGNMENT, Layout, Leaf

__all__ = ["Publisher", "Taker", "buffer_bytes"]

Array = np.ndarray[Any, Any]
TRIES = 3
HEAD = ALIGNMENT


def buffer_bytes(leaves: Sequence[Leaf]) -> int:
    """Bytes of a pair of buffers for these tensors."""
    return HEAD + 2 * _stride(leaves)


def _head(leaves: Sequence[Leaf]) -> int:
    """Bytes for the version, and for which of the tensors are there."""
    return -(-(8 + len(leaves)) // ALIGNMENT) * ALIGNMENT


def _stride(leaves: Sequence[Leaf]) -> int:
    return _head(leaves) + Layout(leaves).nbytes()


class _Pair:
    """A number, and two buffers that each hold a version and tensors, those that were ever published.

    Args:
        buffer: uint8, `buffer_bytes` of them.
        leaves: the tensors.
    """

    def __init__(self, buffer: Array, leaves: Sequence[Leaf]) -> None:
        self._number = buffer[:8].view(np.int64)
        starts = [HEAD + place * _stride(leaves) for place in (0, 1)]
        self._versions = [buffer[start : start + 8].view(np.int64) for start in starts]
        self._has = [buffer[start + 8 : start + 8 + len(leaves)] for start in starts]
        layout, stride, head = Layout(leaves), _stride(leaves), _head(leaves)
        self._tensors = [layout.carve(buffer[start + head : start + stride]) for start in starts]
        self._fence = threading.Lock()

    def _in_order(self) -> None:
        """What was written before is seen before what is written after, by a processor that would reorder it."""
        with self._fence:
            pass


class Publisher(_Pair):
    """The one that writes."""

    def publish(self, tensors: Mapping[tuple[str, ...], torch.Tensor], version: int) -> None:
        """Makes these the newest. They must have the shapes of the leaves; dtypes and devices are converted.

        Args:
            tensors: by key; those that are not among them stay as they were published last.
            version: of them.
        """
        number = int(self._number[0]) + 1
        place = number % 2
        with torch.no_grad():
            for i, (key, target) in enumerate(self._tensors[place].items()):
                self._has[place][i] = key in tensors or self._has[1 - place][i]
                target.copy_(tensors[key] if key in tensors else self._tensors[1 - place][key])
        self._versions[place][0] = version
        self._in_order()
        self._number[0] = number


class Taker(_Pair):
    """One that reads. Several may."""

    def __init__(self, buffer: Array, leaves: Sequence[Leaf]) -> None:
        super().__init__(buffer, leaves)
        self._taken = 0
        copy = np.zeros(max(1, Layout(leaves).nbytes()), np.uint8)
        self._copy = Layout(leaves).carve(copy)

    def is_behind(self) -> bool:
        """Whether there is something newer than what was taken last."""
        return bool(self._number[0] != self._taken)

    def skip(self) -> None:
        """What was published so far is not wanted."""
        self._taken = int(self._number[0])

    def take(self) -> tuple[int, Mapping[tuple[str, ...], torch.Tensor]] | None:
        """The newest version and its tensors, as far as they were published; they are valid until the next call.

        Returns:
            None: nothing newer is there, or it was overtaken three times; the next call may have more luck.
        """
        for _ in range(TRIES):
            number = int(self._number[0])
            if number == self._taken:
                return None
            self._in_order()
            place = number % 2
            for key, tensor in self._tensors[place].items():
                self._copy[key].copy_(tensor)
            version, has = int(self._versions[place][0]), self._has[place].tolist()
            self._in_order()
            if int(self._number[0]) == number:
                self._taken = number
                return version, {
                    key: tensor for (key, tensor), there in zip(self._copy.items(), has, strict=True) if there
                }
        return None
