"""Which frames a sample is of: single ones, or slices of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlcollect.errors import OptionError
from rlcollect.memory.replay.cursors import Cursors, Moment
from rlcollect.memory.replay.rows import Table
from rlcollect.memory.replay.table import IDS
from rlcollect.options.checks import positive

__all__ = ["Drawn", "Sampler", "Slices", "Uniform", "sampler_of"]

Array = np.ndarray[Any, Any]
MORE = 2, 8, 32  # candidates for a slice, one draw after the other, before all that there are are looked for


@dataclass(frozen=True)
class Drawn:
    """Frames that were drawn.

    Attributes:
        rings, numbers: int64 `[n, *]`, which they are.
        mask: bool `[n, *]`, which rows are frames; None: all are.
    """

    rings: Array
    numbers: Array
    mask: Array | None = None

    def lost(self, cursors: Cursors, moment: Moment) -> Array:
        """Bool `[n]`, which do not stand any more: the oldest of each tells."""
        at = (slice(None),) + (0,) * (self.rings.ndim - 1)
        return cursors.lost(moment, self.rings[at], self.numbers[at])

    def put(self, places: Array, other: Drawn) -> None:
        """Others stand at these places of the first dimension."""
        self.rings[places], self.numbers[places] = other.rings, other.numbers
        if self.mask is not None and other.mask is not None:
            self.mask[places] = other.mask


class Sampler(Protocol):
    """Says which frames a sample is of.

    Attributes:
        names: of the dimensions of a sample; None: they have none.
        is_strict: whether all of its rows are frames.
    """

    is_strict: bool

    names: Sequence[str | None] | None

    def size(self, batch_size: int | None) -> int:
        """How many rows a sample of so many frames has, by whatever the user says.

        Raises:
            OptionError: it cannot be told, or makes no sense.
        """

    def draw(self, moment: Moment, table: Table, count: int, random: np.random.Generator) -> Drawn:
        """So many rows, each as likely as any other, of frames that stand at a moment. There is one at least.

        Raises:
            OptionError: there is nothing like that.
        """


class Uniform:
    """Single frames, each as likely as any other, with replacement."""

    names: Sequence[str | None] | None = None
    is_strict = True

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size

    def size(self, batch_size: int | None) -> int:
        """See `Sampler`."""
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise OptionError("sample() needs a number of frames: sample(256), or ReplayBuffer(batch_size=256).")
        return size

    def draw(self, moment: Moment, table: Table, count: int, random: np.random.Generator) -> Drawn:  # noqa: ARG002
        """See `Sampler`."""
        return Drawn(*moment.located(_any(moment, count, random)))


class Slices:
    """Frames of a trajectory that follow each other. Each frame that one can begin with is as likely as any other.

    Args:
        length: frames of a slice.
        count: slices of a sample; None: as many as `batch_size` has room for.
        batch_size: frames of a sample.
        strict: whether shorter ones are never drawn; else they are filled up with rows that the mask leaves out.
    """

    names: Sequence[str | None] | None = (None, "time")

    def __init__(self, length: int, count: int | None, batch_size: int | None, *, strict: bool) -> None:
        self._length = length
        self._offsets = np.arange(length)
        self._count = count
        self._batch_size = batch_size
        self.is_strict = strict
        if count is not None and batch_size not in (None, count * length):
            raise OptionError(
                f"batch_size={batch_size} is not num_slices * slice_len = {count} * {length}; give two of the three."
            )
        if batch_size is not None:
            self._slices_of(batch_size)

    def _slices_of(self, batch_size: int) -> int:
        if batch_size % self._length:
            raise OptionError(f"{batch_size} frames are no whole number of slices of slice_len={self._length}.")
        return batch_size // self._length

    def size(self, batch_size: int | None) -> int:
        """See `Sampler`."""
        if batch_size is not None:
            return self._slices_of(batch_size)
        if self._count is not None:
            return self._count
        if self._batch_size is None:
            raise OptionError(
                "sample() needs a number of frames: sample(256), or num_slices= or batch_size= of the ReplayBuffer."
            )
        return self._slices_of(self._batch_size)

    def draw(self, moment: Moment, table: Table, count: int, random: np.random.Generator) -> Drawn:
        """See `Sampler`."""
        if IDS not in table:
            raise OptionError(
                'Slices are of one trajectory each, and frames have no ("collector", "traj_ids"), by which those are '
                "told apart: collect with track_traj_ids=True."
            )
        if self.is_strict:
            rings, first = moment.located(self._whole(moment, table, count, random))
            return Drawn(np.repeat(rings[:, None], self._length, 1), first[:, None] + self._offsets)
        rings, first = moment.located(_any(moment, count, random))
        numbers = first[:, None] + self._offsets
        mask = numbers < moment.end[rings, None]
        rings = np.repeat(rings[:, None], self._length, 1)
        mask[:, 1:] &= table.positions.take(moment.rows(rings, numbers)[:, 1:]) > 0
        np.logical_and.accumulate(mask, axis=1, out=mask)
        return Drawn(rings, np.where(mask, numbers, first[:, None]), mask)

    def _whole(self, moment: Moment, table: Table, count: int, random: np.random.Generator) -> Array:
        """Frames with which whole slices begin, by their number among all: those that are met by chance first."""
        found: Array = np.zeros(0, np.int64)
        for more in MORE:
            starts = _any(moment, more * count, random)
            rings, first = moment.located(starts)
            last = first + (self._length - 1)
            fits = table.positions.take(moment.rows(rings, last)) >= self._length - 1
            fits &= last < moment.end[rings]
            found = np.concatenate((found, starts[fits]))
            if len(found) >= count:
                return found[:count]
        every = self._all_whole(moment, table)
        return np.concatenate((found, every[_any_of(len(every), count - len(found), random)]))

    def _all_whole(self, moment: Moment, table: Table) -> Array:
        """Every frame with which a whole slice begins, by its number among all.

        Raises:
            OptionError: there is none.
        """
        rings, numbers = moment.all()
        here = np.minimum(table.positions[moment.rows(rings, numbers)], numbers - moment.first[rings])
        ends = np.flatnonzero(here >= self._length - 1)
        if not len(ends):
            raise OptionError(
                f"No trajectory here has {self._length} frames that follow each other (the longest has "
                f"{here.max() + 1}): wait for more, take a shorter slice_len, or strict_length=False, which masks what "
                "is missing."
            )
        return ends - (self._length - 1)


def _any(moment: Moment, count: int, random: np.random.Generator) -> Array:
    """So many frames by chance, by their number among all."""
    return _any_of(moment.total, count, random)


def _any_of(total: int, count: int, random: np.random.Generator) -> Array:
    # four times as fast as integers(), and as even for all that fits into memory
    return (random.random(count) * total).astype(np.int64)


def sampler_of(
    sampler: str, batch_size: int | None, slice_len: int | None, num_slices: int | None, *, strict: bool
) -> Sampler:
    """What options mean.

    Raises:
        OptionError: they make no sense.
    """
    batch_size = None if batch_size is None else positive("batch_size", batch_size)
    if sampler == "uniform":
        for name, value in (("slice_len", slice_len), ("num_slices", num_slices)):
            if value is not None:
                raise OptionError(f'{name}= is for sampler="slice".')
        return Uniform(batch_size)
    if sampler != "slice":
        raise OptionError(
            f'sampler must be "uniform" or "slice", not {sampler!r}. Prioritised samples: give the collector a buffer '
            "of TorchRL, with its PrioritizedSampler."
        )
    if num_slices is not None:
        num_slices = positive("num_slices", num_slices)
        if slice_len is None and batch_size is not None and batch_size % num_slices == 0:
            slice_len = batch_size // num_slices
    if slice_len is None:
        raise OptionError('sampler="slice" needs slice_len=, or num_slices= and a batch_size= that they divide.')
    return Slices(positive("slice_len", slice_len), num_slices, batch_size, strict=strict)
