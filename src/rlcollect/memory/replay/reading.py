"""Samples of frames that others may write over meanwhile; what another process has of a buffer."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.devices import CPU
from rlcollect.errors import ClosedError, OptionError
from rlcollect.layout import Key, Leaf
from rlcollect.memory.replay.ahead import Ahead
from rlcollect.memory.replay.cursors import GLANCE, Cursors, Moment
from rlcollect.memory.replay.places import Opening, Place
from rlcollect.memory.replay.rows import Table
from rlcollect.memory.replay.sampling import Drawn, Sampler
from rlcollect.memory.replay.table import MASK
from rlcollect.options.checks import positive

__all__ = ["ReplayReader", "opened"]

Array = np.ndarray[Any, Any]
PATIENCE = 1.0  # seconds that a sample waits for frames, where there were some a moment ago


_ALL: weakref.WeakSet[ReplayReader] = weakref.WeakSet()  # of this process


class ReplayReader:
    """Gives samples of a buffer, and says what is in it; written to it is elsewhere.

    A shared `ReplayBuffer` that is passed to another process is one of these there.

    Attributes:
        capacity: frames that there is room for.

    Args:
        place: where frames lie.
        capacity: see above.
        sampler: says which frames a sample is of.
        transform: called with each sample.
        device: where samples are; None: where frames are.
        prefetch: samples that are made ahead.
        seed: of the draws; None: of the system's randomness.
    """

    def __init__(
        self,
        place: Place,
        *,
        capacity: int,
        sampler: Sampler,
        transform: Callable[[TensorDictBase], Any] | None,
        device: torch.device | None,
        prefetch: int,
        seed: int | np.random.SeedSequence | None,
    ) -> None:
        self.capacity = capacity
        self._place = place
        self._sampler = sampler
        self._transform = transform
        self._device = device
        self._prefetch = prefetch
        self._ahead = _ahead_of(self, prefetch)
        self._seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        self._seed_of_fork = self._seeds
        self._random = np.random.default_rng(self._seeds)
        self._drawing = threading.Lock()
        self._is_closed = False
        self._look_at(place)
        _ALL.add(self)

    def _look_at(self, place: Place) -> None:
        # both at once: another thread may be reading
        self._view = Cursors(place.words), Table(place.columns, place.positions)

    def _now(self) -> tuple[Cursors, Table]:
        """Where frames are: elsewhere than a moment ago, if their owner moved them."""
        if self._view[0].is_moved:
            self._place.follow()
            self._look_at(self._place)
        return self._view

    @property
    def _cursors(self) -> Cursors:
        return self._now()[0]

    # --- what it is ---

    @property
    def storage(self) -> str:
        """Where frames are: "memory", "shared" or "memmap"."""
        return self._place.name

    @property
    def is_shared(self) -> bool:
        """Whether other processes can have it."""
        return self._place.is_shared

    @property
    def device(self) -> torch.device:
        """Where samples are."""
        return CPU if self._device is None else self._device

    @property
    def frames_device(self) -> torch.device:
        """Where frames lie."""
        return CPU if self._place.is_shared else self.device

    @property
    def leaves(self) -> tuple[Leaf, ...] | None:
        """What a frame holds; None: nothing was written yet."""
        return self._place.leaves

    def __len__(self) -> int:
        """Frames that are here."""
        return self._cursors.moment().total

    def __bool__(self) -> bool:
        """True: it is there, whatever is in it."""
        return True

    @property
    def write_count(self) -> int:
        """Frames that were ever written, also those that others took the place of."""
        return self._cursors.written

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} of {self.capacity} frames, storage={self.storage!r}, "
            f"lanes={self._cursors.rings}, write_count={self.write_count})"
        )

    # --- reading ---

    def sample(self, batch_size: int | None = None) -> Any:
        """Frames by chance, each that is here as likely as any other, with replacement.

        Args:
            batch_size: how many; None: as the buffer was made.

        Returns:
            `[batch_size]`; of slices `[num_slices, slice_len]`, time last. With `"index"`, int64: where each frame
            lies, until another is written there. What `transform` makes of it.

        Raises:
            OptionError: there are no frames; no trajectory is as long as a slice; or a number that makes no sense.
        """
        self._check_open()
        count = self._sampler.size(None if batch_size is None else positive("batch_size", batch_size))
        return self._made(count) if self._ahead is None else self._ahead.get(count)

    def _made(self, count: int) -> Any:
        with self._drawing:
            self._check_open()
            sample = self._drawn(count)
        if self._device is not None and sample.device != self._device:
            sample = sample.to(self._device)
        return sample if self._transform is None else self._transform(sample)

    def _drawn(self, count: int) -> TensorDict:
        drawn, rows, taken, table, lost = self._taken(count, reuse=True)
        while len(again := np.flatnonzero(lost)):  # others, for those that were written over while they were read
            other, other_rows, others, table, still = self._taken(len(again))
            drawn.put(again, other)
            rows[again] = other_rows
            for key, tensor in others.items():
                taken[key][torch.from_numpy(again)] = tensor
            lost = np.zeros(count, bool)
            lost[again] = still
        taken["index",] = torch.from_numpy(rows)
        if drawn.mask is not None:
            _fill_up(taken, torch.from_numpy(drawn.mask))
        return table.formed(taken, rows.shape, self._sampler.names)

    def _taken(self, count: int, *, reuse: bool = False) -> tuple[Drawn, Array, dict[Key, torch.Tensor], Table, Array]:
        """Frames that stood a moment ago: which, in which rows, copies of them, and which of them stand no more."""
        (cursors, table), moment = self._filled()
        drawn = self._sampler.draw(moment, table, count, self._random)
        rows = moment.rows(drawn.rings, drawn.numbers)
        taken = table.take(rows, reuse=reuse)
        return drawn, rows, taken, table, drawn.lost(cursors, moment)

    def _filled(self) -> tuple[tuple[Cursors, Table], Moment]:
        """Where frames are, and those that stand: some do. Where all are being written over, it waits.

        Raises:
            OptionError: none do.
        """
        deadline = 0.0
        while True:
            view = self._now()
            moment = view[0].moment()
            if moment.total:
                return view, moment
            deadline = deadline or time.monotonic() + (PATIENCE if view[0].is_written_over else 0.0)
            if time.monotonic() >= deadline and not view[0].is_moved:
                raise OptionError(
                    "There are no frames to sample from. Write some first: extend(), or collector.wait_for(frames=...)."
                )
            time.sleep(GLANCE)

    def frames(self) -> TensorDict:
        """A copy of all frames, `[F]`: lane after lane, in the order of time. For looking at them: it takes memory.

        Raises:
            OptionError: nothing was ever written.
        """
        self._check_open()
        if self._place.leaves is None:
            raise OptionError("Nothing was written to this buffer yet.")
        while True:
            cursors, table = self._now()
            moment = cursors.moment()
            rings, numbers = moment.all()
            taken = table.take(moment.rows(rings, numbers))
            stands = ~cursors.lost(moment, rings, numbers)
            if cursors.division == moment.division and not cursors.is_moved:
                frames = table.formed(taken, [len(rings)], None)
                return frames if stands.all() else frames[torch.from_numpy(stands)]

    # --- other processes ---

    def __reduce__(self) -> Any:
        """For other processes, which may read and sample it: by `multiprocessing`, whose start methods all do.

        Raises:
            OptionError: it is in the memory of one process, or has none yet.
        """
        self._check_open()
        if self._place.leaves is None and self._place.is_shared:
            raise OptionError(
                "This buffer has no memory yet that another process could have, since nobody knows what frames hold. "
                "Call init(frame), write to it, or give it to a collector first."
            )
        opening, descriptors = self._place.opening()
        settings = {
            "capacity": self.capacity,
            "sampler": self._sampler,
            "transform": self._transform,
            "device": self._device,
            "prefetch": self._prefetch,
            "seed": self._seeds.spawn(1)[0],  # its own draws go on as if nobody had been given it
        }
        return opened, (opening, [DupFd(fd) for fd in descriptors], settings)

    def _before_fork(self) -> None:
        self._seed_of_fork = self._seeds.spawn(1)[0]

    def _after_fork(self) -> None:
        """This is a copy, in a child, where no thread is that may have a lock; it draws what nobody else does."""
        self._drawing = threading.Lock()
        self._ahead = _ahead_of(self, self._prefetch)
        self._seeds = self._seed_of_fork
        self._random = np.random.default_rng(self._seeds)
        self._place.disown()
        self._look_at(self._place)

    # --- the end ---

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("This ReplayBuffer was closed. Make a new one.")

    def close(self) -> None:
        """Lets its memory go. Safe to call again."""
        self._is_closed = True
        if self._ahead is not None:
            self._ahead.close()
        with self._drawing:
            self._place.close()
            self._look_at(self._place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _all_before_fork() -> None:
    for reader in list(_ALL):
        reader._before_fork()


def _all_after_fork() -> None:
    for reader in list(_ALL):
        reader._after_fork()


os.register_at_fork(before=_all_before_fork, after_in_child=_all_after_fork)


def opened(opening: Opening, descriptors: Sequence[Any], settings: Mapping[str, Any]) -> ReplayReader:
    """A buffer of another process, from what came of it."""
    place = opening.open([each.detach() for each in descriptors])
    return ReplayReader(place, **settings)


def _ahead_of(reader: ReplayReader, count: int) -> Ahead[Any] | None:
    """What makes samples of a reader ahead, without keeping it alive."""
    there = weakref.ref(reader)

    def make(rows: int) -> Any:
        reader = there()
        return None if reader is None else reader._made(rows)  # without it, nobody waits for them either

    return Ahead(make, count) if count else None


def _fill_up(taken: dict[Key, torch.Tensor], mask: torch.Tensor) -> None:
    """Rows that are no frames are zero, and marked."""
    if not mask.all():
        for key, tensor in taken.items():
            if key != ("index",):
                tensor[~mask] = 0
    taken[MASK] = mask
