"""A buffer in an actor, as it is there: the methods that are called from elsewhere, and those who write to it.

It knows of each writer how much it wrote for which command: a successor of one that died asks for that, and goes on
behind it, so that no frame is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDict

from rlcollect.errors import OptionError
from rlcollect.layout import Key, Layout, Leaf, nested
from rlcollect.memory.flat import Flat, Room, flattened
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.replay.others import dims_of, extend_other, make_room
from rlcollect.memory.replay.writing import Writer
from rlcollect.processes.messages import Beside

__all__ = ["Hosted", "HostedFacts", "Take"]

Array = np.ndarray[Any, Any]
REMEMBERED = 4096  # commands of a writer: more than it can have been given and not have answered


@dataclass(frozen=True)
class HostedFacts:
    """What a buffer in an actor is.

    Attributes:
        is_ours: whether it is a `ReplayBuffer`.
        told: how it shows itself.
        storage_dims: dimensions of its storage.
    """

    is_ours: bool
    told: str
    storage_dims: int


class Take(Protocol):
    """Takes batches of a collector, with a word of what they were made of."""

    def __call__(self, batch: Any, made: Any) -> None:
        """Writes one."""


@dataclass
class _Writing:
    """One writer.

    Attributes:
        lanes: how many it has.
        lead: the dimensions of its batches before time.
        layout: what its frames hold.
        rings: where they go in a buffer of ours; None: it is another.
        token: of who writes now; those before are heard no more.
        counts: frames by command, of the newest ones.
        written: frames in all.
        is_over: whether nobody writes any more.
    """

    lanes: int
    lead: tuple[int, ...]
    layout: Layout
    rings: Writer | None
    token: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    written: int = 0
    is_over: bool = False

    def end(self) -> None:
        """Nobody writes any more: what still comes is not written."""
        self.is_over = True
        self.counts.clear()


class Hosted:
    """Holds a buffer.

    Args:
        kind: makes it: a class, or a function.
        arguments: for that.
        keywords: likewise.
    """

    def __init__(self, kind: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        self._buffer = kind(*arguments, **keywords)
        self._room = Room()
        self._writers: dict[int, _Writing] = {}
        self._claims: dict[int, list[Callable[[], None]]] = {}  # what ends each
        self._takes: dict[int, Take] = {}
        self._numbers = 0

    def facts(self) -> HostedFacts:
        """What it is.

        Raises:
            OptionError: it is no buffer.
        """
        buffer = self._buffer
        if not callable(getattr(buffer, "extend", None)) or not callable(getattr(buffer, "sample", None)):
            raise OptionError(
                f"replay_buffer_cls should make a buffer, with extend() and sample(); {buffer!r} was made."
            )
        return HostedFacts(isinstance(buffer, ReplayBuffer), repr(buffer), dims_of(buffer))

    # --- as anybody uses a buffer ---

    def get(self, name: str) -> Any:
        """An attribute.

        Raises:
            OptionError: it has none of this name.
        """
        self._check(name)
        return getattr(self._buffer, name)

    def length(self) -> int:
        """Frames that are here."""
        return len(self._buffer)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method; what it returns travels beside the word of it.

        Raises:
            OptionError: it has none of this name.
        """
        self._check(method)
        return self._told(getattr(self._buffer, method)(*arguments))

    def give(self, method: str, flat: Flat, data: Array) -> Any:
        """Calls a method with a value that came as bytes. See `call`."""
        self._check(method)
        return self._told(getattr(self._buffer, method)(flat.opened(self._own(data))))

    def sample(self, *sizes: int) -> Beside:
        """A sample."""
        return Beside(*flattened(self._buffer.sample(*sizes), self._room))

    def keep(self, flat: Flat, data: Array) -> None:
        """Writes a batch of a collector, `[*lead, T]`."""
        batch = flat.opened(self._own(data))
        if isinstance(self._buffer, ReplayBuffer):
            self._buffer.extend(batch)
        else:
            extend_other(self._buffer, batch)

    def _check(self, name: str) -> None:
        if not hasattr(self._buffer, name):
            raise OptionError(f"The buffer in the actor has no {name}: it is {self._buffer!r}.")

    def _told(self, value: Any) -> Any:
        return None if value is None else Beside(*flattened(value))

    def _own(self, data: Array) -> Array:
        """Bytes that a buffer can do with as it likes: ours copies frames, others may keep what they are given."""
        return data if isinstance(self._buffer, ReplayBuffer) else data.copy()

    # --- collectors ---

    def _new(self) -> int:
        self._numbers += 1
        return self._numbers

    def claim(self, leaves: Sequence[Leaf], lead: Sequence[int], lanes: int, writers: int) -> tuple[int, list[int]]:
        """So many writers of so many lanes each: a number for them all, and one for each.

        Raises:
            What `ReplayBuffer.claim` raises.
        """
        number = self._new()
        rings: list[Writer | None] = [None] * writers
        self._claims[number] = []
        if isinstance(self._buffer, ReplayBuffer):
            claim = self._buffer.claim(leaves, lanes * writers)
            self._claims[number].append(claim.let_go)
            rings = [claim.writer(each * lanes, lanes) for each in range(writers)]
        else:
            make_room(self._buffer, leaves)
        numbers = [self._new() for _ in range(writers)]
        for each, own in zip(numbers, rings, strict=True):
            self._writers[each] = _Writing(lanes, tuple(lead), Layout(leaves), own)
            self._claims[number].append(self._writers[each].end)
        return number, numbers

    def take_over(self, writer: int) -> tuple[int, dict[int, int]]:
        """Somebody writes from now on, and nobody else: a token, and the frames that stand by command."""
        own = self._writers[writer]
        own.token += 1
        return own.token, dict(own.counts)

    def write(self, writer: int, token: int, command: int, steps: int, valid: Array | None, data: Array) -> None:
        """Writes frames `[lanes, steps]`.

        Args:
            writer: whose.
            token: what `take_over` gave; with another one nothing is written: somebody else came in its place.
            command: for which they were made.
            steps: how many.
            valid: bool `[lanes, steps]`, which are frames; None: all are.
            data: their bytes.
        """
        own = self._writers[writer]
        if own.is_over or token != own.token:
            return
        columns = own.layout.carve(self._own(data), own.lanes, steps)
        if own.rings is not None:
            before = own.rings.written
            own.rings.write(columns, steps, valid)
            frames = own.rings.written - before
        else:
            frames = self._extend(own, columns, steps, valid)
        own.written += frames
        own.counts[command] = own.counts.get(command, 0) + frames
        if len(own.counts) > REMEMBERED:
            del own.counts[next(iter(own.counts))]

    def _extend(self, own: _Writing, columns: Mapping[Key, Any], steps: int, valid: Array | None) -> int:
        """Gives frames to a buffer that is not ours; how many."""
        shaped = ((key, column.reshape(*own.lead, steps, *column.shape[2:])) for key, column in columns.items())
        batch = TensorDict(nested(shaped), [*own.lead, steps], names=[*[None] * len(own.lead), "time"])
        if valid is None:
            extend_other(self._buffer, batch)
            return own.lanes * steps
        if valid.any():
            self._buffer.extend(batch[valid.reshape(batch.batch_size)] if dims_of(self._buffer) == 1 else batch)
        return int(valid.sum())

    def written(self, writers: Sequence[int]) -> int:
        """Frames that these have written."""
        return sum(self._writers[each].written for each in writers)

    def let_go(self, number: int) -> None:
        """Who had this number writes no more: what still comes of them is not written. Safe to call again."""
        for end in self._claims.pop(number, ()):
            end()
        self._takes.pop(number, None)

    def take_by(self, make: Callable[[Any, Callable[[Callable[[], None]], Any]], Take]) -> int:
        """Batches are written by what this makes, of the buffer and of what has something called at the end.

        Returns:
            Its number.
        """
        number, ends = self._new(), list[Callable[[], None]]()
        self._takes[number] = make(self._buffer, ends.append)
        self._claims[number] = ends
        return number

    def take(self, number: int, flat: Flat, made: Any, data: Array) -> None:
        """Writes a batch of a collector, which may be post-processed."""
        self._takes[number](flat.opened(self._own(data)), made)
