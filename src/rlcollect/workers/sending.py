"""Frames on their way to a buffer in an actor of a cluster: from the worker's memory straight to the actor's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDictBase

from rlcollect.layout import Layout, Leaf
from rlcollect.memory.flat import Room
from rlcollect.memory.replay.table import Columns, columns_of
from rlcollect.memory.replay.writing import Pieces
from rlcollect.memory.slots import Slot
from rlcollect.workers.filling import LeftOut, kept_leaves

if TYPE_CHECKING:
    from rlcollect.cluster.service import Call, Line

__all__ = ["Sending"]

Array = np.ndarray[Any, Any]


class Sending:
    """Writes to a buffer in an actor. See `Put`.

    A rollout is one piece of bytes, or each step is; the next is sent when the last is in the buffer, so that what is
    under way takes no more memory than one of them.

    Args:
        line: to the `Hosted` in the actor.
        writer: its number there.
        leaves: what frames hold.
        lanes: how many.
        by_step: whether each step is sent as soon as it is made.
    """

    def __init__(self, line: Line, writer: int, leaves: Sequence[Leaf], lanes: int, *, by_step: bool) -> None:
        self._line = line
        self._writer = writer
        self._leaves = kept_leaves(leaves)
        self._layout = Layout(self._leaves)
        self._lanes = lanes
        self._by_step = by_step
        self._room = Room()
        self._left_out = LeftOut()
        self._command = 0
        self._made: tuple[Slot, int, int] | None = None  # a rollout that is not sent yet: from, and before
        self._under_way: Call | None = None
        # who had this number before has written that, and writes no more
        self._token, self._standing = line.call("take_over", writer, group="write")

    def part(self, slot: Slot, start: int, stop: int) -> None:
        """See `Put`."""
        first = start if self._made is None else self._made[1]
        self._made = slot, first, stop
        if self._by_step:
            self._send_made()

    def batch(self, batch: TensorDictBase) -> None:
        """See `Put`."""
        pieces = Pieces.of(columns_of(batch, self._leaves))
        self._send(pieces.columns, 0, batch.batch_size[-1], pieces.valid)

    def begin(self, command: int) -> int:
        """See `Put`."""
        self._command, self._made = command, None
        return int(self._standing.pop(command, 0))

    def leave_out(self, frames: int) -> None:
        """See `Put`."""
        self._left_out.frames = frames

    def finish(self) -> None:
        """See `Put`."""
        self._send_made()
        self._wait()

    def _send_made(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            slot, start, stop = made
            lanes = slice(None) if slot.lead else None
            self._send({leaf.key: slot.tensors[leaf.key][lanes] for leaf in self._leaves}, start, stop, None)

    def _send(self, columns: Columns, start: int, stop: int, valid: Array | None) -> None:
        """Sends some steps of all lanes."""
        valid = self._left_out.those_of(valid, self._lanes, start, stop)
        steps = stop - start
        if not steps:
            return
        self._wait()
        data = self._room.take(self._layout.nbytes(self._lanes, steps))
        for key, tensor in self._layout.carve(data, self._lanes, steps).items():
            tensor.copy_(columns[key][:, start:stop])
        those = None if valid is None else valid[:, start:stop]
        arguments = self._writer, self._token, self._command, steps, those
        self._under_way = self._line.ask("write", *arguments, data=data, group="write")

    def _wait(self) -> None:
        """Until the last is in the buffer."""
        call, self._under_way = self._under_way, None
        if call is not None:
            self._line.answer(call)
