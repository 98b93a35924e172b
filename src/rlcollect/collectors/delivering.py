"""Batches: made one after the other, counted, and handed over. Nothing here asks which kind of collector it is."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from rlcollect.collectors.filling import ByWorkers, ToRemote
from rlcollect.collectors.gather import Made
from rlcollect.collectors.opened import Guard
from rlcollect.collectors.supply import AsMade, Supply, WholeEpisodes, change_of, form_of
from rlcollect.collectors.synchronised import Synchronised
from rlcollect.collectors.tally import Tally
from rlcollect.collectors.updates import Updates
from rlcollect.errors import OptionError, WorkerTimeout
from rlcollect.failures import relayed
from rlcollect.memory.assembly import Assembly
from rlcollect.memory.compact import CompactMemory
from rlcollect.memory.orders import ByStart, ByTurns
from rlcollect.memory.slots import SameBatch
from rlcollect.processes.channel import Held

__all__ = ["Delivering"]


class Delivering(Synchronised, IterableDataset[TensorDictBase]):
    """Makes batches, counts them, and hands them over: to the user, or to a buffer."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._frames = 0
        self._batches = 0
        self._seconds = 0.0
        self._stored = SameBatch[TensorDictBase]()  # on a storing device, with return_same_td
        self._late: tuple[Any, Made, Counter[int]] | None = None  # on its way to a buffer elsewhere
        super().__init__(create_env_fn, policy, **options)
        self._compact = CompactMemory(keep=2 if self._sink.use_buffers else 0)
        self._ending.callback(self._compact.forget)
        self._changed = change_of(self._sink, self._compact)
        self._rollouts = AsMade(self._gather, self._steps, self._lanes)
        self._supply = self._supplied()

    def _supplied(self) -> Supply:
        """Where batches come from."""
        count = self._sink.trajs_per_batch
        if count is None:
            return self._rollouts
        lanes = self.num_workers * self.num_envs
        order = ByStart() if self._sink.traj_order == "started" else ByTurns(lanes, 2 * math.ceil(count / lanes))
        longest = None if self._what.max_frames_per_traj else self._sink.max_open_frames
        return WholeEpisodes(
            self._rollouts,
            self._gather,
            Assembly(lanes, order, longest=longest),
            form_of(self._sink),
            count=count,
            num_envs=self.num_envs,
            note=functools.partial(_note_late, self._crew.tally, self._updates),
        )

    def _left(self) -> int | None:
        """Frames that are still wanted; None: no end."""
        return None if self._total is None else self._total - self._frames

    # --- iterating ---

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, over all lanes."""
        return self._steps * self._lanes

    @property
    def total_frames(self) -> int:
        """Frames after which the collector is exhausted; -1 for never."""
        return -1 if self._total is None else self._total

    @property
    def collected_frames(self) -> int:
        """Frames delivered so far; in a buffer, after `shutdown`, also those that workers wrote meanwhile.

        Raises:
            What collection in the background failed by: a loop that waits for them would wait for good.
        """
        self._tell_failure()
        return self._frames

    @property
    def exhausted(self) -> bool:
        """Whether all frames that were asked for have been delivered.

        Raises:
            What collection in the background failed by: a loop that waits for this would wait for good.
        """
        self._tell_failure()
        return self._has_all

    @property
    def _has_all(self) -> bool:
        return self._total is not None and self._frames >= self._total

    @property
    def replay_buffer(self) -> Any:
        """Where frames go, as it was passed; None: to the user."""
        return self._sink.replay_buffer

    @property
    def policy_device(self) -> torch.device:
        """Where the policy computes; the first worker's, if there are several."""
        return torch.device(self._facts[0].policy_device)

    def next(self) -> TensorDictBase | None:
        """The next batch. With a `replay_buffer` it goes there.

        Returns:
            `[N, T]`, or `[T]` for a single lane, time last; with a dimension of workers before it, or joined, as
            `cat_results` says; or as `trajs_per_batch`, `split_trajs`, `fragment_len`, `compact_obs` and `postproc`
            make it. None when the frames are exhausted; with a `replay_buffer` always (`exhausted` tells).

        Raises:
            ClosedError: after `shutdown`.
            What an environment, the policy or a post-processing raised; the collector is then closed. A Ctrl-C (or
                what a signal handler of the program raises) leaves it open: in one process the batch under way is
                dropped, and new episodes begin with the next; batches of worker processes come at the next call.
            EnvError: an episode has over `max_open_frames` frames, and has not ended; the collector is then closed.
            WorkerDied: a worker process ended; the collector is then closed.
            WorkerTimeout: `timeout=` was not enough; the batch comes at the next call.
        """
        self._check_foreground("next()")
        given = self._given()
        return None if given is None else given[0]

    def _check_foreground(self, what: str) -> None:  # noqa: ARG002 - there is no other place here
        """Whether batches are made here, and not in the background."""
        self._check_open()

    def _given(self, most: int | None = None) -> tuple[Any] | None:
        """What the next batch has become for the user; None when the frames are exhausted.

        Args:
            most: frames that may be asked for, beside what is under way; None: as many as are wanted.
        """
        is_late = self._late is not None
        self._recover()
        if is_late:
            return (None,)
        if self._has_all:
            return None
        start = time.perf_counter()
        with Guard(self):
            self._updates.before_batch()
            self._before_batch()
            made = self._supply.first(self._left() if most is None else most)
            placed = self._placed(made)
            self._supply.is_touched = bool(self._sink.postproc)
            batch = self._processed(placed)
        self._crew.tally.note_late(made.late, self._updates.version)
        self._note_delivered(made)
        lag = self._updates.lag_with(made.versions)
        if self._filling is not None:
            self._fill(batch, made, lag, start)
            return (None,)
        given, seconds, rest = (batch,), self._seconds + time.perf_counter() - start, self._supply.kept[1:]
        frames = self._frames + made.frames
        # no call from here on: an interrupt comes before all of it or after
        self._frames, self._batches, self._seconds, self._updates.lag = frames, self._batches + 1, seconds, lag
        self._gather.is_under_way, self._supply.kept, self._supply.is_touched = False, rest, False
        return given

    def _fill(self, batch: Any, made: Made, lag: Counter[int], start: float) -> None:
        """Writes a batch to the buffer; where that takes too long, or is broken off, it is done at the next call."""
        assert self._filling is not None
        is_apart = isinstance(self._filling, ToRemote)  # a wait for another, which nothing is lost by leaving
        with Guard(self), nullcontext() if is_apart else Held():
            self._late = (batch, made, lag) if is_apart else None
            self._filling(batch, made)
            with Held():
                self._late = None
                self._count(self._frames + made.frames, lag, start)

    @property
    def _counts_what_comes(self) -> bool:
        """Whether batches are in the buffer before they are counted."""
        return isinstance(self._filling, ByWorkers)

    def _count(self, frames: int, lag: Counter[int], start: float) -> None:
        """A batch is in the buffer."""
        self._frames, self._batches, self._updates.lag = frames, self._batches + 1, lag
        self._seconds += time.perf_counter() - start
        self._gather.is_under_way, self._supply.kept, self._supply.is_touched = False, self._supply.kept[1:], False

    def _close(self) -> None:
        super()._close()
        if isinstance(self._filling, ByWorkers):  # nobody writes any more
            with suppress(WorkerTimeout):  # a buffer elsewhere has too much to do to say what came last
                self._frames += self._filling.count_all()

    def _before_batch(self) -> None:
        """What is to be done before each batch that is delivered."""

    def _note_delivered(self, made: Made) -> None:
        """This is being delivered."""

    def _recover(self) -> None:
        """Where an interrupt came between a batch's beginning and its delivery, it is kept, or never was."""
        if self._late is not None:
            self._fill(*self._late, time.perf_counter())
        self._supply.recover()
        if self._has_all:
            self._gather.forget()
            self._compact.forget()

    def _processed(self, batch: Any) -> Any:
        batch = self._changed(batch)
        for step in self._sink.postproc:  # type: ignore[union-attr]
            try:
                batch = step(batch)
            except BaseException as error:
                raise relayed(  # noqa: B904 - it has a cause
                    error, worker=0, lane=None, step=self._crew.reports[0].steps
                )
            if batch is None:
                raise OptionError(f"postproc {step!r} returned None; it should return the batch.")
        return batch

    def _placed(self, made: Made) -> TensorDictBase:
        """The batch on the device where it is delivered."""
        device = self._started.devices[made.worker or 0]
        if device is None or device == made.batch.device:
            return made.batch
        moved = made.batch.to(device)
        return self._stored.holding(moved) if self._sink.return_same_td else moved

    def rollout(self) -> TensorDictBase:
        """A full rollout as it is made: not post-processed or compact, not counted in `total_frames`.

        Episodes, ids and a warm-up go on from batch to rollout to batch.

        Returns:
            `[N, T]`, or `[T]` for a single lane; of several workers together as their batches are.

        Raises:
            OptionError: with `trajs_per_batch`, whose episodes would lack these frames, or a `replay_buffer`.
        """
        self._check_foreground("rollout()")
        if self._sink.trajs_per_batch:
            raise OptionError("rollout() takes frames out of episodes, and trajs_per_batch= delivers whole ones.")
        if self._sink.replay_buffer is not None:
            raise OptionError("rollout() does not go with replay_buffer=: frames are made for the buffer.")
        self._recover()
        with Guard(self):
            self._updates.before_batch()
            batch = self._placed(self._rollouts.first(self._left(), extra=True))
        rest = self._rollouts.kept[1:]
        self._gather.is_under_way, self._rollouts.kept = False, rest
        return batch

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches until the frames are exhausted. Breaking off and iterating again goes on.

        Raises:
            OptionError: in a worker of a DataLoader, which has a copy of the collector, and would repeat its frames.
        """
        if get_worker_info() is not None:
            raise OptionError(
                f"A {type(self).__name__} cannot be iterated over in workers of a DataLoader: each would make the same "
                "frames, with weights of its own. Use num_workers=0 (with batch_size=None, collate_fn=lambda b: b)."
            )
        while True:
            self._check_foreground("Iteration")
            if (given := self._given()) is None:
                return
            yield given[0]

    def __bool__(self) -> bool:
        """True: a collector is there, whatever its length."""
        return True

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"A {type(self).__name__} holds running environments and cannot be pickled or copied. Save state_dict(), "
            "and load it into a new one."
        )

    def __len__(self) -> int:
        """The number of batches, delivered ones included.

        Raises:
            TypeError: it is not known, as collection is endless or an interruptor may cut batches short.
        """
        unknown = {
            "total_frames is -1": self._total is None,
            "an interruptor may cut batches short": self._how.interruptor is not None,
            "lanes that are far behind others are delivered short": any(
                facts.may_deliver_short for facts in self._facts
            ),
            str(self._gather.cuts_short): self._gather.cuts_short is not None,
            str(self._supply.unknown): self._supply.unknown is not None,
        }
        if why := next((why for why, holds in unknown.items() if holds), None):
            raise TypeError(f"The number of batches is not known: {why}.")
        assert self._total is not None
        return math.ceil(self._total / self.frames_per_batch)


def _note_late(tally: Tally, updates: Updates, made: Made) -> None:
    tally.note_late(made.late, updates.version)
