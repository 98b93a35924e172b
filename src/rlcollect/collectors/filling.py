"""How frames get into a buffer: workers write them where they can; else batches are written here."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.collectors.gather import Made
from rlcollect.devices import CPU
from rlcollect.errors import BufferDied, ClosedError, OptionError
from rlcollect.layout import Leaf
from rlcollect.memory.flat import Room, flattened
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.replay.claims import Claim
from rlcollect.memory.replay.others import dims_of, extend_other, make_room
from rlcollect.memory.replay.remote import RayReplayBuffer
from rlcollect.memory.replay.remote_claim import RemoteClaim, let_go
from rlcollect.memory.replay.rows import parts_of
from rlcollect.memory.replay.table import IDS, columns_of, leaves_of
from rlcollect.memory.replay.tails import Marks
from rlcollect.memory.replay.writing import Pieces, Writer
from rlcollect.options import Sink
from rlcollect.processes.channel import Held
from rlcollect.workers.answers import Facts
from rlcollect.workers.filling import kept_leaves

if TYPE_CHECKING:
    from rlcollect.cluster.service import Call

__all__ = [
    "ByRemotes",
    "ByWorkers",
    "Filling",
    "ToOthers",
    "ToRemote",
    "ToRings",
    "are_written_there",
    "can_be_sent",
    "check_buffer",
    "filled_here",
    "ids_in",
    "lanes_of",
    "prepare_other",
]

WORKER = ("collector", "worker")
MOST_OPEN = 65536  # episodes that may be under way


class Filling(Protocol):
    """Writes a batch that is ready to a buffer."""

    def __call__(self, batch: Any, made: Made) -> None:
        """Writes it.

        Args:
            batch: post-processed.
            made: what it was made of.

        Raises:
            WorkerTimeout: it took too long. It goes on, and is waited for when this is called again with the same.
        """


class ByWorkers:
    """Workers have written it already. See `Filling`.

    Args:
        writer: of the rings that they write to; None: what they wrote cannot be counted there.
    """

    def __init__(self, writer: Writer | RemoteClaim | None = None) -> None:
        self._writer = writer
        self._counted = 0
        self.count_all()

    def __call__(self, batch: Any, made: Made) -> None:  # noqa: ARG002
        """See `Filling`."""
        self._counted += made.frames

    def count_all(self, waiting: int = 0) -> int:
        """How many frames were written of which nobody has heard; they are counted by that.

        Args:
            waiting: so many are counted later, each batch when it comes.
        """
        if self._writer is None:
            return 0
        before, self._counted = self._counted, self._writer.written - waiting
        return self._counted - before


class ByRemotes(ByWorkers):
    """Workers have written it already, to a buffer in an actor. See `Filling`.

    Args:
        claim: what they write by.
    """

    def __init__(self, claim: RemoteClaim) -> None:
        super().__init__(claim)

    def count_all(self, waiting: int = 0) -> int:
        """See `ByWorkers`: none, if the buffer is gone."""
        try:
            return super().count_all(waiting)
        except (BufferDied, ClosedError):
            return 0


class ToRings:
    """Writes it to a buffer of ours. See `Filling`.

    Lanes keep their rings; where batches have other rows than lanes, their trajectories are dealt out.

    Args:
        sink: has the buffer.
        num_envs: lanes of a worker.
        workers: how many there are.
        keep: has something called at the end.
    """

    def __init__(self, sink: Sink, num_envs: int, workers: int, keep: Callable[[Callable[[], None]], Any]) -> None:
        self._buffer: ReplayBuffer = sink.replay_buffer
        self._num_envs = num_envs
        self._lanes = num_envs * workers
        self._keep = keep
        self._claim: Claim | None = None
        self._leaves: tuple[Leaf, ...] = ()
        self._are_whole = sink.trajs_per_batch is not None
        self._is_split = bool(sink.split_trajs or sink.fragment_len)
        self._homes: dict[int, int] = {}  # the ring of each trajectory that has not ended, the last written last

    def __call__(self, batch: Any, made: Made) -> None:
        """See `Filling`."""
        check_batch_to_keep(batch)
        if self._claim is None:
            self._leaves = leaves_of(batch)
            self._claim = self._buffer.claim(self._leaves, self._lanes)
            self._keep(self._claim.let_go)
        pieces = Pieces.of(columns_of(batch, self._leaves))
        count, steps = batch.batch_size[:-1].numel(), batch.batch_size[-1]
        lanes = lanes_of(made, self._num_envs, self._lanes) if made.is_rollouts else ()
        if self._is_split or len(lanes) != count:
            self._deal(pieces, self._claim)
            return
        for first, rows in _side_by_side(lanes):
            part = pieces.of_lanes(rows)
            self._claim.writer(first, rows.stop - rows.start).write(part.columns, steps, part.valid)

    def _deal(self, pieces: Pieces, claim: Claim) -> None:
        """Trajectories go where the least was written; later pieces of one to the ring of its earlier ones."""
        if self._are_whole or IDS not in pieces.columns:
            claim.deal(pieces)
            return
        marks = Marks(parts_of(pieces.columns))
        assert marks.ids is not None
        writers = [claim.writer(ring, 1) for ring in range(claim.lanes)]
        for lane, start, stop in pieces.trajectories(marks):
            number = int(marks.ids[lane, start])
            ring = self._homes.pop(number, None)
            if ring is None:
                ring = min(range(claim.lanes), key=lambda each: writers[each].written)
            writers[ring].write(pieces.of_lanes(slice(lane, lane + 1)).columns, stop, start=start)
            if marks.done is None or not marks.done[lane, stop - 1]:
                self._homes[number] = ring
        while len(self._homes) > 2 * self._lanes:  # more than there are open ones: they were cut
            del self._homes[next(iter(self._homes))]


class ToOthers:
    """Writes it to somebody else's buffer, by its `extend`. See `Filling`.

    Args:
        buffer: the buffer.
        by_step: whether it is given one step of all lanes after the other.
    """

    def __init__(self, buffer: Any, *, by_step: bool) -> None:
        self._buffer = buffer
        self._by_step = by_step

    def __call__(self, batch: Any, made: Made) -> None:  # noqa: ARG002
        """See `Filling`."""
        check_batch_to_keep(batch)
        steps = range(batch.batch_size[-1])
        for part in [batch[..., t : t + 1] for t in steps] if self._by_step else [batch]:
            extend_other(self._buffer, part)


class ToRemote:
    """Writes it to a buffer in an actor, where it is done as it would be here. See `Filling`.

    Args:
        buffer: the buffer.
        sink: what is done with batches before.
        num_envs: lanes of a worker.
        workers: how many there are.
        keep: has something called at the end.
    """

    def __init__(
        self, buffer: RayReplayBuffer, sink: Sink, num_envs: int, workers: int, keep: Callable[..., Any]
    ) -> None:
        names = ("split_trajs", "fragment_len", "trajs_per_batch")
        given = {name: getattr(sink, name) for name in names}
        self._room = Room()
        self._line, self._timeout = buffer.line, buffer.timeout
        self._number = self._line.call(
            "take_by", partial(_taken_there, given, num_envs, workers), group="write", timeout=self._timeout
        )
        self._newest: tuple[weakref.ref[Made], Call] | None = None  # what was sent last
        keep(partial(let_go, self._line, self._number))

    def __call__(self, batch: Any, made: Made) -> None:
        """See `Filling`. One that took too long, or was broken off, is waited for again, and not written twice."""
        with Held():  # or it would be sent, and nobody knows
            if self._newest is None or self._newest[0]() is not made:
                self._newest = weakref.ref(made), self._sent(batch, made)
        self._line.answer(self._newest[1], self._timeout)

    def _sent(self, batch: Any, made: Made) -> Call:
        check_batch_to_keep(batch)
        flat, data = flattened(batch, self._room)
        known = made.batch.select(WORKER, strict=False).cpu() if made.is_rollouts else TensorDict()
        there = replace(made, batch=known, late=())
        return self._line.ask("take", self._number, flat, there, data=data, group="write")


def _taken_there(given: Mapping[str, Any], num_envs: int, workers: int, buffer: Any, keep: Callable[..., Any]) -> Any:
    """What writes batches, in the actor."""
    return filled_here(Sink(replay_buffer=buffer, **given), num_envs, workers, keep)


def check_batch_to_keep(batch: Any) -> None:
    """Whether what a post-processing returned can be written.

    Raises:
        OptionError: it is no TensorDict with a dimension of time.
    """
    if not isinstance(batch, TensorDictBase) or not batch.batch_dims:
        raise OptionError(
            f"postproc= should return a TensorDict whose last batch dimension is time, for the buffer to keep its "
            f"frames; {type(batch).__name__} came."
        )


def prepare_other(sink: Sink, facts: Sequence[Facts]) -> None:
    """A lazy storage of TorchRL's has its memory before the first rollout, where it is known what frames hold.

    Raises:
        OptionError: single steps for a storage of several dimensions.
    """
    buffer, leaves = sink.replay_buffer, facts[0].leaves
    if dims_of(buffer) > 1 and not sink.extend_buffer:
        raise OptionError(
            "extend_buffer=False does not go with a storage of several dimensions (ndim=), to which TorchRL does not "
            "add single steps: use a storage of one, or whole rollouts (extend_buffer=True)."
        )
    if leaves is not None and not sink.changes_rollouts:
        make_room(buffer, kept_leaves(leaves))


def ids_in(buffer: Any) -> int:
    """How many ids of episodes, of each worker, may be those of frames that are in a buffer.

    Each has a frame at least, but for those of episodes that were under way. Frames of a collector that had the buffer
    before would else seem to go on with those of this one.
    """
    written = getattr(buffer, "write_count", 0)
    return written + MOST_OPEN if isinstance(written, int) and written else 0


def check_buffer(sink: Sink) -> None:
    """Whether worker processes can write to the buffer.

    Raises:
        OptionError: it is one of ours, in the memory of this process.
    """
    buffer = sink.replay_buffer
    if isinstance(buffer, ReplayBuffer) and not buffer.is_shared:
        raise OptionError(
            f"replay_buffer= has its frames in the memory of this process (storage={buffer.storage!r}), and the "
            'workers are other processes: make it with storage="shared", or storage="memmap" if it is larger than '
            "memory."
        )


def can_be_sent(sink: Sink, facts: Sequence[Facts], devices: Sequence[torch.device | None]) -> bool:
    """Whether workers in actors can write frames to a buffer in another: nothing is to be done with rollouts before."""
    have_form = all(each.leaves is not None for each in facts)
    is_there = isinstance(sink.replay_buffer, RayReplayBuffer)
    return is_there and have_form and not sink.changes_rollouts and {*devices} <= {None, CPU}


def are_written_there(sink: Sink, facts: Sequence[Facts], devices: Sequence[torch.device | None]) -> bool:
    """Whether workers write frames themselves: nothing is to be done with rollouts before."""
    buffer = sink.replay_buffer
    if not isinstance(buffer, ReplayBuffer) or buffer.frames_device != CPU:
        return False
    have_form = all(each.leaves is not None for each in facts)
    return have_form and not sink.changes_rollouts and {*devices} <= {None, CPU}


def lanes_of(made: Made, num_envs: int, lanes: int) -> Sequence[int]:
    """Which each lane of a rollout is, counted over all workers.

    Args:
        made: the rollout, or those of several workers.
        num_envs: lanes of a worker.
        lanes: of all workers.
    """
    batch = made.batch
    here = math.prod(batch.batch_size[:-1])
    if made.worker is not None:
        return range(made.worker * num_envs, (made.worker + 1) * num_envs)
    if here == lanes:  # of all workers, in order
        return range(here)
    if made.workers is not None:
        return [worker * num_envs + lane for worker in made.workers for lane in range(num_envs)]
    first = batch[WORKER].reshape(here, -1)[:, 0].cpu().numpy()
    found: list[int] = (first * num_envs + np.arange(here) % num_envs).tolist()
    return found


def _side_by_side(lanes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Lanes whose numbers follow each other: the first number, and where they stand."""
    for _, group in groupby(enumerate(lanes), lambda pair: pair[1] - pair[0]):
        pairs = list(group)
        yield pairs[0][1], slice(pairs[0][0], pairs[-1][0] + 1)


def filled_here(sink: Sink, num_envs: int, workers: int, keep: Callable[[Callable[[], None]], Any]) -> Filling | None:
    """What writes batches to the buffer in this process; None: there is no buffer.

    Args:
        sink: which.
        num_envs: lanes of a worker.
        workers: how many there are.
        keep: has something called at the end.

    Raises:
        OptionError: single steps for a buffer of ours that only batches can be written to.
    """
    buffer = sink.replay_buffer
    if buffer is None:
        return None
    if isinstance(buffer, RayReplayBuffer):
        return ToRemote(buffer, sink, num_envs, workers, keep)
    if not isinstance(buffer, ReplayBuffer):
        return ToOthers(buffer, by_step=not sink.extend_buffer)
    if not sink.extend_buffer:
        raise OptionError(
            "extend_buffer=False does not go with frames that have no fixed form, use_buffers=False, collector_class=, "
            "or a storing_device or buffer that is not in the memory of the host: what is made there are batches."
        )
    return ToRings(sink, num_envs, workers, keep)
