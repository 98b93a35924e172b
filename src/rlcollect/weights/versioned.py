"""Weights between processes: two buffers and a number. Published without a lock, taken whole.

A publish fills the buffer that is not in use and then raises the number, which only the publisher writes. Who takes
copies the buffer that the number names straight into the tensors that are to hold it, and looks afterwards whether the
publisher has begun to write there: then it copies again, before anything computes with what is torn, and asks for a
moment's peace until it has. That request has an end in time, so that a killed process holds nobody up. Knows neither
policies nor workers: names, tensors, memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.layout import ALIGNMENT, Key, Layout, Leaf
from rlcollect.processes.channel import Held

__all__ = ["Publisher", "Taker", "buffer_bytes"]

Array = np.ndarray[Any, Any]
PEACE = 100_000_000  # nanoseconds that a taker may ask for at least
SLOWEST = 0.2  # bytes that it copies in a nanosecond at least
GLANCE = 5e-5  # seconds between two looks whether it is done


def buffer_bytes(leaves: Sequence[Leaf], takers: int = 1) -> int:
    """Bytes of a pair of buffers for these tensors, and for so many that take them."""
    return _head_bytes(takers) + 2 * _stride(leaves)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _head_bytes(takers: int) -> int:
    """Bytes for the number, the one that a publish has begun with, and the time until which each taker wants peace."""
    return _aligned(8 * (2 + takers))


def _stride(leaves: Sequence[Leaf]) -> int:
    """Bytes of one buffer: its version, the number with which each tensor was published last, the tensors."""
    return _aligned(8 * (1 + len(leaves))) + Layout(leaves).nbytes()


class _Pair:
    """A number, and two buffers that each hold a version and tensors, those that were ever published.

    Args:
        buffer: uint8, `buffer_bytes` of them, zero at first.
        leaves: the tensors.
        takers: how many may take them.
    """

    def __init__(self, buffer: Array, leaves: Sequence[Leaf], takers: int = 1) -> None:
        head, stride, marks = _head_bytes(takers), _stride(leaves), _aligned(8 * (1 + len(leaves)))
        words = buffer[:head].view(np.int64)
        self._number = words[:1].data  # an index into it costs a fourth of one into an array
        self._begun = words[1:2].data
        self._peace = words[2 : 2 + takers]
        starts = [head + place * stride for place in (0, 1)]
        self._versions = [buffer[start : start + 8].view(np.int64) for start in starts]
        self._marks = [buffer[start + 8 : start + 8 * (1 + len(leaves))].view(np.int64) for start in starts]
        layout = Layout(leaves)
        self._tensors = [layout.carve(buffer[start + marks : start + stride]) for start in starts]
        self._fence = threading.Lock()

    def _in_order(self) -> None:
        """What was written before is seen before what is written after, by a processor that would reorder it."""
        with self._fence:
            pass


class Publisher(_Pair):
    """The one that writes."""

    def publish(self, tensors: Mapping[Key, torch.Tensor], version: int) -> None:
        """Makes these the newest. They must have the shapes of the leaves; dtypes and devices are converted.

        Args:
            tensors: by key; those that are not among them stay as they were published last.
            version: of them.
        """
        self._leave_in_peace()
        number = self._number[0] + 1
        here, there = number % 2, (number - 1) % 2
        self._begun[0] = number
        self._in_order()
        marks, newest = self._marks[here], self._marks[there].tolist()
        with torch.no_grad():
            for i, (key, target) in enumerate(self._tensors[here].items()):
                if key in tensors:
                    marks[i] = number  # first: what is broken off is made good by the next
                    target.copy_(tensors[key])
                elif marks[i] != newest[i]:
                    marks[i] = number
                    target.copy_(self._tensors[there][key])
                    marks[i] = newest[i]
        self._versions[here][0] = version
        self._in_order()
        self._number[0] = number

    def go_on_from(self, other: Publisher, *, keep: Collection[Key] | None = None, version: int | None = None) -> None:
        """Publishes what another has published last, if it has.

        Args:
            other: the other.
            keep: of these tensors; None: of all.
            version: with this one; None: with its own.
        """
        place = other._number[0] % 2
        published = zip(other._tensors[place].items(), other._marks[place].tolist(), strict=True)
        kept = {key: tensor for (key, tensor), mark in published if mark and (keep is None or key in keep)}
        if kept or (keep is None and other._number[0]):
            self.publish(kept, int(other._versions[place][0]) if version is None else version)

    def _leave_in_peace(self) -> None:
        """Waits for those who have been disturbed too often, and not for long."""
        end = int(self._peace.max())
        while end > time.monotonic_ns() and self._peace.any():
            time.sleep(GLANCE)


class Taker(_Pair):
    """One that reads.

    Args:
        buffer, leaves, takers: see `Publisher`.
        taker: which of those that take it is.
    """

    def __init__(self, buffer: Array, leaves: Sequence[Leaf], takers: int = 1, taker: int = 0) -> None:
        super().__init__(buffer, leaves, takers)
        self._taken = 0
        self._own_peace = self._peace[taker : taker + 1].data
        self._patience = PEACE + int(Layout(leaves).nbytes() / SLOWEST)

    def is_behind(self) -> bool:
        """Whether there is something newer than what was taken last."""
        return bool(self._number[0] != self._taken)

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """Copies the newest tensors to where they are to be: those that were published since this was done last.

        Args:
            targets: for each key the tensors that are to hold it, of any dtype and device. Nothing may compute with
                them meanwhile.

        Returns:
            The version; None: there is nothing newer.
        """
        if not self.is_behind():
            return None
        with Held():  # or a Ctrl-C would leave a mix of two versions
            since = self._taken
            try:
                while (version := self._copied(number := self._number[0], since, targets)) is None:
                    since = 0  # whatever was copied may be what is not published yet
                    self._own_peace[0] = time.monotonic_ns() + self._patience
            finally:
                self._own_peace[0] = 0
            self._taken = number
        return version

    def _copied(self, number: int, since: int, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """Copies what has this number, as far as it was published since; its version. None: somebody wrote there."""
        self._in_order()
        place = number % 2
        version, marks = int(self._versions[place][0]), self._marks[place].tolist()
        with torch.no_grad():
            for (key, tensor), mark in zip(self._tensors[place].items(), marks, strict=True):
                if mark > since:
                    for target in targets.get(key, ()):
                        target.copy_(tensor)
        self._in_order()
        return version if self._begun[0] <= number + 1 else None
