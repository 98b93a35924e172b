"""The replay buffer as its users see it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.errors import OptionError, SpaceError
from rlcollect.failures import warn
from rlcollect.layout import Key, Leaf, nested, show_key
from rlcollect.memory.marks import check_time
from rlcollect.memory.replay.claims import Claim, Claims
from rlcollect.memory.replay.cursors import Cursors, Moment
from rlcollect.memory.replay.dividing import Deal, newest, ring_size
from rlcollect.memory.replay.files import place_of
from rlcollect.memory.replay.places import as_leaves, in_shared_memory, told_leaves
from rlcollect.memory.replay.reading import ReplayReader
from rlcollect.memory.replay.sampling import sampler_of
from rlcollect.memory.replay.saving import POSITION, load, save
from rlcollect.memory.replay.table import columns_of, leaves_of
from rlcollect.memory.replay.tails import Tails
from rlcollect.memory.replay.writing import Pieces, Writer
from rlcollect.options.checks import flag, positive

__all__ = ["ReplayBuffer"]

Array = np.ndarray[Any, Any]
HOLD = 60.0  # seconds that frames are held for while they are saved


class ReplayBuffer(ReplayReader):
    """Keeps the newest frames, and gives samples of them, while any number of processes write to it.

    ::

        buffer = ReplayBuffer(100_000, storage="shared", batch_size=256)
        with MultiAsyncCollector(
            ["CartPole-v1"] * 2, policy, frames_per_batch=256, num_envs=8, total_frames=1_000_000, replay_buffer=buffer
        ) as collector:
            collector.start()
            collector.wait_for(frames=1_000)
            while not collector.exhausted:
                train(buffer.sample())
                collector.update_policy_weights_()

    Collection does not wait for training; `max_policy_lag=` has it (docs/replay.md).

    What it counts are frames, whatever the shape they come in: a batch `[4, 10]` of 4 lanes is 40. The last batch
    dimension is time; rows that `("collector", "mask")` leaves out are not kept. Frames hold what the first ones that
    are written do, and all others have to.

    It is divided among the lanes that write to it, a ring of `capacity // lanes` frames each, so that those of a lane
    follow each other in time, and the oldest of a lane makes room for its newest. The division is made by the first
    batch, or by the collector that it is given to; frames that are there before stay, whole trajectories first.

    Args:
        capacity: frames, over all lanes. It is rounded down to a multiple of the lanes, with a warning.
        storage: "memory", of this process; "shared", which worker processes write to and others may read; "memmap", the
            same in files, which may be larger than memory and outlive the process.
        sampler: "uniform", single frames with replacement, or "slice": `slice_len` frames of a trajectory that follow
            each other.
        batch_size: frames of a sample, where `sample` is not told. Of slices: a multiple of `slice_len`.
        transform: called with each sample, on `device`; gives what `sample` does.
        prefetch: samples that a thread makes ahead, of frames as they were then. What is saved goes on after them.
        device: where samples are; frames of storage "memory" lie there too. None: the CPU.
        seed: of the draws; None: of the system's randomness.
        slice_len: frames of a slice.
        num_slices: of a sample, in the place of `batch_size`.
        strict_length: whether slices shorter than `slice_len` are never drawn; with False they are filled up with
            zeros, which `("collector", "mask")` leaves out.
        spare_lanes: rings beside those of the first lanes, for others that come later.
        path: of "memmap": a folder, where a buffer of an earlier run goes on. None: one that is removed at the end.

    Raises:
        OptionError: a value that makes no sense.
        SharedMemoryError, DatasetError: there is too little room, which may show with the first frames.
    """

    def __init__(
        self,
        capacity: int,
        *,
        storage: Literal["memory", "shared", "memmap"] = "memory",
        sampler: Literal["uniform", "slice"] = "uniform",
        batch_size: int | None = None,
        transform: Callable[[TensorDictBase], Any] | None = None,
        prefetch: int = 0,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        slice_len: int | None = None,
        num_slices: int | None = None,
        strict_length: bool = True,
        spare_lanes: int = 0,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        capacity = positive("capacity", capacity)
        flag("strict_length", strict_length)
        if transform is not None and not callable(transform):
            raise OptionError(f"transform must be a callable from sample to sample, not {transform!r}.")
        for name, value in (("prefetch", prefetch), ("spare_lanes", spare_lanes), ("seed", seed or 0)):
            if value != 0:
                positive(name, value)
        place = None if device is None else torch.device(device)
        super().__init__(
            place_of(storage, capacity, path, place),
            capacity=capacity,
            sampler=sampler_of(sampler, batch_size, slice_len, num_slices, strict=strict_length),
            transform=transform,
            device=place,
            prefetch=prefetch,
            seed=seed,
        )
        self._spare = spare_lanes
        self._lock = threading.RLock()  # of those who write, divide or save
        self._claims = Claims()
        self._writers: dict[tuple[int, int], Writer] = {}
        self._tails = Tails(0)
        self._is_copy = False
        self._open_place()

    def _open_place(self) -> None:
        """Its memory is there, or is another, or divided otherwise."""
        self._writers = {}
        self._look_at(self._place)
        self._tails = Tails(self._cursors.rings)

    def _check_ours(self) -> None:
        self._check_open()
        if self._is_copy:
            raise OptionError(
                "This buffer came here by a fork, and belongs to the process that made it: here it can be sampled "
                "from. Write to it there, or give it to a collector, whose workers write to it."
            )

    def _after_fork(self) -> None:
        super()._after_fork()
        self._lock = threading.RLock()
        self._is_copy = self._is_copy or self._place.is_shared
        self._open_place()

    # --- writing ---

    def init(self, frame: TensorDictBase) -> None:
        """Has memory for frames like this one, whose batch dimensions do not matter, before one is written.

        Raises:
            SpaceError: it holds something else than tensors, or other ones than the frames that are here.
            SharedMemoryError, DatasetError: there is too little room.
        """
        with self._lock:
            self._check_ours()
            self.lay_out(leaves_of(frame))

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """See `init`."""
        if self._place.leaves is None:
            self._place.lay_out(leaves)
            self._open_place()
        elif {*self._place.leaves} != {*leaves}:
            ours, theirs = ({leaf.key: leaf for leaf in each} for each in (self._place.leaves, leaves))
            key = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
            raise SpaceError(
                f"Frames of this buffer have {ours.get(key, f'no {show_key(key)}')}, and others were to be written "
                f"that have {theirs.get(key, 'none')}. Use another buffer, or the same options as before."
            )

    def extend(self, batch: TensorDictBase) -> None:
        """Writes frames.

        A batch of as many lanes as it is divided among goes lane by lane; any other is dealt out, trajectory by
        trajectory, to where the least was written.

        Args:
            batch: `[T]`, `[N, T]` or `[B, N, T]`, time last.

        Raises:
            SpaceError: other keys, shapes or dtypes than those that are here.
            OptionError: it has no time; or all lanes are somebody's, and there are no `spare_lanes`.
        """
        check_time(batch)
        with self._lock:
            self._check_ours()
            if self._place.leaves is None:
                self.lay_out(leaves_of(batch))
            assert self._place.leaves is not None
            columns = columns_of(batch, self._place.leaves)
            self._write(Pieces.of(columns), batch.batch_size[:-1].numel(), batch.batch_size[-1])

    def add(self, frame: TensorDictBase) -> None:
        """Writes one frame.

        Args:
            frame: of batch size `[]`.

        Raises:
            What `extend` raises.
        """
        if frame.batch_dims:
            raise OptionError(f"add() takes one frame, of batch size []; {list(frame.batch_size)} came: use extend().")
        self.extend(frame.unsqueeze(0))

    def _write(self, pieces: Pieces, lanes: int, steps: int) -> None:
        if not steps or not lanes:
            return
        if not self._cursors.rings:
            self._divide(lanes)
        free = self._claims.free(self._cursors.rings)
        if not free:
            raise OptionError(
                "All lanes of this buffer are those of a collector, and each has one writer. Make it with "
                "spare_lanes=1 to write to it beside one."
            )
        if not self._claims and lanes == len(free) - self._spare:
            self._writer_of(0, lanes).write(pieces.columns, steps, pieces.valid)
        else:
            self._writer_of(0, self._cursors.rings).deal(pieces, free)

    def _writer_of(self, first: int, lanes: int) -> Writer:
        """What writes to some rings, in this process."""
        self._check_ours()
        if (first, lanes) not in self._writers:
            self._writers[first, lanes] = Writer(*self._view, first, lanes, self._tails)
        return self._writers[first, lanes]

    def claim(self, leaves: Sequence[Leaf], lanes: int) -> Claim:
        """Rings that belong to somebody from now on, who writes to them, here or in other processes.

        Args:
            leaves: what frames hold.
            lanes: how many.

        Raises:
            OptionError: there are not so many, others having some.
            SpaceError: frames here hold something else.
        """
        with self._lock:
            self._check_ours()
            self.lay_out(leaves)
            if not self._claims and self._cursors.rings != lanes + self._spare:
                self._divide(lanes)
            first = self._claims.take(lanes, self._cursors.rings)
            self._tails.cut(slice(first, first + lanes))  # trajectories of another may have the same numbers
            return Claim(self._place, self._claims, first, lanes, self._writer_of)

    def _divide(self, lanes: int) -> None:
        """Among so many lanes; frames that are here are dealt out to them."""
        rings = lanes + self._spare
        self._cursors.check_rings(rings, self.capacity)
        size = ring_size(self.capacity, rings)
        moment = self._cursors.moment()
        if not moment.total:
            self._cursors.divide(rings, size)
        else:
            dealt = Deal(moment, self._view[1], rings=rings, lanes=lanes, size=size)
            words = self._place.words.copy()
            Cursors(words).divide(rings, size, dealt.counts, total=self.write_count)
            self._place.put(self._place.columns, dealt.rows, dealt.positions, dealt.places, words)
            if dealt.lost:
                warn(
                    f"{dealt.lost} of {moment.total} frames found no room when the buffer was divided among {rings} "
                    f"lanes, {size} each; they are lost."
                )
        self._open_place()

    def empty(self) -> None:
        """Takes all frames out. Who writes meanwhile, in another process, has to be paused. `write_count` stays."""
        with self._lock:
            self._check_ours()
            rings = slice(0, self._cursors.rings)
            self._cursors.retired[rings] = self._cursors.committed[rings]
            if self._ahead is not None:
                self._ahead.forget()

    # --- saving ---

    def dumps(self, path: str | os.PathLike[str], *, hold: float = HOLD) -> None:
        """Saves the frames of this moment, and where the draws are, to a folder.

        Who writes meanwhile writes on, but not over frames of this moment: that waits until they are saved.

        Args:
            path: of the folder. One that was saved before is put in its place when all is written.
            hold: seconds for which that may wait. What is written over after that is left out, with a warning.

        Raises:
            DatasetError: there is too little room, or something else there.
            OptionError: nothing was ever written.
        """
        with self._lock:
            self._check_ours()
            if self._place.leaves is None:
                raise OptionError("Nothing was written to this buffer yet: there is nothing to save.")
            cursors = self._cursors
            cursors.hold(hold)
            try:
                moment = cursors.moment()
                notes, rows = self._notes(moment), moment.rows(*moment.all())
                columns = {**self._place.columns, POSITION.key: torch.from_numpy(self._place.positions)}
                leaves = [*self._place.leaves, POSITION]
                save(path, columns, leaves, rows, notes, lambda: self._left_out(moment))
            finally:
                cursors.release()

    def _notes(self, moment: Moment) -> dict[str, Any]:
        return {
            "counts": moment.counts.tolist(),
            "written": self._cursors.written_at(moment),
            "capacity": self.capacity,
            "random": self._random.bit_generator.state,
        }

    def _left_out(self, moment: Moment) -> dict[str, Any]:
        """How many of each ring's oldest frames were written over before they were saved."""
        left_out = self._cursors.written_over(moment)
        if left_out.any():
            warn(
                f"{int(left_out.sum())} of {moment.total} frames were written over before they were saved, and are "
                "left out: it took longer than hold=."
            )
        return {"left_out": left_out.tolist()}

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Puts what `dumps` saved in the place of what is here; the draws go on from there.

        Raises:
            DatasetError: there is no such thing.
            SpaceError: frames hold something else than those that were here.
            OptionError: a collector writes to it.
        """
        self._check_ours()
        leaves, columns, notes = load(path)
        positions = columns.pop(POSITION.key).numpy()
        self._load([leaf for leaf in leaves if leaf != POSITION], columns, positions, notes)

    def _load(
        self, leaves: Sequence[Leaf], columns: dict[Key, torch.Tensor], positions: Array, notes: Mapping[str, Any]
    ) -> None:
        with self._lock:
            self._check_ours()
            if self._claims:
                raise OptionError("A collector writes to this buffer: load into it before it is given to one.")
            if leaves:
                self.lay_out(leaves)
            if rings := len(notes["counts"]):
                self._cursors.check_rings(rings, self.capacity)
                self._put(columns, positions, notes, ring_size(self.capacity, rings))
            else:
                self.empty()
            self._random.bit_generator.state = notes["random"]
            if self._ahead is not None:
                self._ahead.forget()

    def _put(self, columns: dict[Key, torch.Tensor], positions: Array, notes: Mapping[str, Any], size: int) -> None:
        """Frames that were saved stand here, and no others; of each ring the newest, where there is no room for all."""
        kept, rows, places = newest(notes["counts"], notes["left_out"], size)
        words = self._place.words.copy()
        Cursors(words).divide(len(kept), size, kept, total=int(notes["written"]))
        self._place.put(columns, rows, positions[rows], places, words)
        self._open_place()

    def state_dict(self) -> dict[str, Any]:
        """All frames, copied, and where the draws are, as plain values and tensors. `dumps` takes no memory."""
        with self._lock:
            self._check_ours()
            cursors, table = self._now()
            cursors.hold(HOLD)
            try:
                moment = cursors.moment()
                notes, rows = self._notes(moment), moment.rows(*moment.all())
                taken = table.take(rows)
                notes["positions"] = torch.from_numpy(table.positions[rows])
                left_out = self._left_out(moment)
            finally:
                cursors.release()
            return {**notes, **left_out, "leaves": as_leaves(self.leaves or ()), "frames": nested(taken.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts what `state_dict` gave in the place of what is here.

        Raises:
            OptionError: it is something else; or a collector writes to this buffer.
            SpaceError: frames hold something else than those that were here.
        """
        keys = ("leaves", "frames", "positions", "counts", "left_out", "written", "random")
        if lacking := [key for key in keys if key not in state]:
            raise OptionError(f"This is no state of a ReplayBuffer: it lacks {lacking[0]!r}.")
        leaves = told_leaves(state["leaves"])
        frames = TensorDict(state["frames"], [])
        columns = {leaf.key: frames.get(leaf.key) for leaf in leaves}
        self._load(leaves, columns, state["positions"].numpy(force=True), state)

    # --- other processes ---

    def share(self) -> Self:
        """Moves frames to memory that processes share, where they are in that of this one.

        Raises:
            OptionError: a collector writes to it.
            SharedMemoryError: there is too little.
        """
        with self._lock:
            self._check_ours()
            if self._place.is_shared:
                return self
            if self._claims:
                raise OptionError("A collector writes to this buffer: share it before it is given to one.")
            old = self._place
            self._place = in_shared_memory(old, self.capacity)
            self._open_place()
            old.close()
            return self

    def close(self) -> None:
        """Lets its memory go; files of "memmap" stay where `path` said so. Safe to call again."""
        with self._lock:
            self._writers = {}
            super().close()
