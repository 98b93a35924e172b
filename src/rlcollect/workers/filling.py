"""Frames on their way to a buffer, where they are made: rollouts when they are finished, or step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from rlcollect.layout import Leaf, is_private
from rlcollect.memory.replay.table import Columns, columns_of
from rlcollect.memory.replay.writing import Pieces, Writer
from rlcollect.memory.slots import Slot
from rlcollect.rollout.parts import Parts
from rlcollect.workers.keeping import Keeping

__all__ = ["Batches", "Filling", "LeftOut", "Put", "Rings", "kept_leaves"]

Array = np.ndarray[Any, Any]


def kept_leaves(leaves: Sequence[Leaf]) -> list[Leaf]:
    """What frames in a buffer hold."""
    return [leaf for leaf in leaves if not is_private(leaf.key)]


class Put(Protocol):
    """Writes frames to a buffer."""

    def part(self, slot: Slot, start: int, stop: int) -> None:
        """Writes some steps of all lanes, from the memory of their rollout: from one on, and before another."""

    def batch(self, batch: TensorDictBase) -> None:
        """Writes a rollout, whose rows are not all frames."""

    def begin(self, command: int) -> int:
        """A rollout begins; how many frames of it stand, which somebody has written who died at it."""

    def leave_out(self, frames: int) -> None:
        """So many of the frames that come first are not written: others are in their place."""

    def finish(self) -> None:
        """The rollout is made; all of it is in the buffer when this returns."""


class LeftOut:
    """How many of the frames that come next are not to be written."""

    def __init__(self) -> None:
        self.frames = 0

    def those_of(self, valid: Array | None, lanes: int, start: int, stop: int) -> Array | None:
        """Bool `[lanes, stop]`, which rows are to be written.

        Args:
            valid: bool `[lanes, stop]`, which rows are frames; None: all are.
            lanes: how many.
            start: the first that may be written.
            stop: before which they end.

        Returns:
            None where all are, from `start` on.
        """
        if not self.frames:
            return valid
        valid = np.ones((lanes, stop), bool) if valid is None else valid.copy()
        valid[:, :start] = False
        first = np.argwhere(valid.T)[: self.frames]
        valid[first[:, 1], first[:, 0]] = False
        self.frames -= len(first)
        return valid


class Batches:
    """Writes to whatever takes TensorDicts. See `Put`.

    Args:
        extend: takes a batch `[*lead, T]`.
    """

    def __init__(self, extend: Callable[[TensorDictBase], Any]) -> None:
        self.batch = extend

    def part(self, slot: Slot, start: int, stop: int) -> None:
        """See `Put`."""
        self.batch(slot.part(start, stop).batch(stop - start))

    def begin(self, command: int) -> int:  # noqa: ARG002
        """See `Put`: none, in this process."""
        return 0

    def leave_out(self, frames: int) -> None:
        """See `Put`."""

    def finish(self) -> None:
        """See `Put`: it is."""


class Rings:
    """Writes to rings, one a lane. See `Put`.

    Args:
        writer: of the lanes.
        leaves: what frames hold.
        keeping: knows what stands of somebody who died; None: nobody does.
    """

    def __init__(self, writer: Writer, leaves: Sequence[Leaf], keeping: Keeping | None = None) -> None:
        self._writer = writer
        self._keeping = keeping
        self._left_out = LeftOut()
        self._leaves = kept_leaves(leaves)
        self._seen: tuple[Slot | None, Columns] = None, {}

    def part(self, slot: Slot, start: int, stop: int) -> None:
        """See `Put`."""
        if self._seen[0] is not slot:
            lanes = slice(None) if slot.lead else None
            self._seen = slot, {leaf.key: slot.tensors[leaf.key][lanes] for leaf in self._leaves}
        self._writer.write(
            self._seen[1], stop, self._left_out.those_of(None, self._writer.lanes, start, stop), start=start
        )

    def batch(self, batch: TensorDictBase) -> None:
        """See `Put`."""
        pieces = Pieces.of(columns_of(batch, self._leaves))
        steps = batch.batch_size[-1]
        self._writer.write(pieces.columns, steps, self._left_out.those_of(pieces.valid, self._writer.lanes, 0, steps))

    def begin(self, command: int) -> int:
        """See `Put`."""
        return 0 if self._keeping is None else self._keeping.standing(command, self._writer.written)

    def leave_out(self, frames: int) -> None:
        """See `Put`."""
        self._left_out.frames = frames

    def finish(self) -> None:
        """See `Put`: it is."""


class Filling:
    """Writes parts of a rollout as soon as they are finished. See `rollout.parts.Parts`.

    Args:
        put: writes them.
        parts: says how long they are, and is told of them.
        lanes: how many make a step.
        by_step: whether each is a single step.

    Attributes:
        before: steps of the rollout under way that were written before, by a worker that died.
    """

    def __init__(self, put: Put, parts: Parts, *, lanes: int, by_step: bool) -> None:
        self.put = put
        self.keeps = parts.keeps
        self._parts = parts
        self._by_step = by_step
        self.before = 0
        self._lanes = lanes
        self._written = 0

    def begin(self, command: int, *, in_parts: bool) -> int:
        """A rollout begins; how many steps of it stand.

        A worker that died may have written a step of some lanes, or a rollout that is not kept in parts: as many frames
        as it was ahead are left out, so that counts are exact.

        Args:
            command: its number.
            in_parts: whether parts are written when they are finished.
        """
        standing = self.put.begin(command)
        self.before, more = divmod(standing, self._lanes) if in_parts else (0, standing)
        self.put.leave_out(more)
        self._written = 0
        return self.before

    def next(self, left: int) -> int:
        """See `Parts`."""
        return 1 if self._by_step else self._parts.next(left)

    def finished(self, made: int, steps: int, slot: Slot) -> None:
        """See `Parts`."""
        self.put.part(slot, self._written, made)
        self._written = made
        self._parts.finished(self.before + made, steps, slot)
