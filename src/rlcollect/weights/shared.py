"""Weights by way of shared memory: one pair of buffers for all workers, and one of its own for each addressed alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcollect.errors import ClosedError, OptionError
from rlcollect.layout import Key, Leaf
from rlcollect.processes.arena import Arena
from rlcollect.weights.ends import Hand, Message
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.weights.versioned import Publisher, Taker, buffer_bytes

__all__ = ["SharedMemWeightSyncScheme"]


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights lie in shared memory; workers look at a number and copy what is newer. A publish waits for nobody.

    The usual one between processes of a machine. See `WeightSyncScheme`.
    """

    is_seen_midway = True

    def sender(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> SharedSender:
        """See `WeightSyncScheme`."""
        return SharedSender(leaves, workers, hand)

    def receiver(self) -> SharedReceiver:
        """See `WeightSyncScheme`."""
        return SharedReceiver()


@dataclass(frozen=True)
class _Attach:
    """Take weights from this memory from now on.

    Attributes:
        leaves: what lies there.
        nbytes: how large it is.
        takers: how many take from it.
        taker: which of them this is.
        number: of all that there were; a later one is to be taken from.
    """

    leaves: Sequence[Leaf]
    nbytes: int
    takers: int
    taker: int
    number: int


@dataclass(frozen=True)
class _Place:
    """A pair of buffers, and who takes from it; the how manieth it is."""

    arena: Arena
    publisher: Publisher
    takers: tuple[int, ...]
    number: int


class SharedSender:
    """See `weights.ends.Sender`.

    Args:
        leaves: the tensors.
        workers: how many take them.
        hand: passes messages on.

    Raises:
        SharedMemoryError: there is less shared memory than twice their size.
    """

    def __init__(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> None:
        self._leaves = tuple(leaves)
        self._hand = hand
        self._workers = tuple(range(workers))
        self._kept: list[_Place] = []
        self._numbers = itertools.count()
        self._places: dict[int, _Place] = {}
        self._move([self._new_place(self._workers)])

    def _new_place(self, takers: tuple[int, ...]) -> _Place:
        arena = Arena(buffer_bytes(self._leaves, len(takers)))
        publisher = Publisher(arena.buffer, self._leaves, len(takers))
        return _Place(arena, publisher, takers, next(self._numbers))

    def _move(self, places: Sequence[_Place]) -> None:
        """These are where their takers take from. Known first and told then, so that no successor misses one."""
        self._kept += places
        for place in places:
            for worker in place.takers:
                self._places[worker] = place
                self._hand(worker, self._attachment(worker, place))
        self._let_go_of_unused()

    def _attachment(self, worker: int, place: _Place) -> Message:
        takers = place.takers
        attach = _Attach(self._leaves, place.arena.nbytes, len(takers), takers.index(worker), place.number)
        return Message(attach, (place.arena.fd,))

    def prepare(self, workers: Sequence[int] | None) -> None:
        """See `Sender`: those that share a place with others get one of their own."""
        named, places = self._named(workers), self._places
        alone = [worker for worker in dict.fromkeys(named) if not {*places[worker].takers} <= {*named}]
        if alone:
            made = [self._new_place((worker,)) for worker in alone]  # all of them, before anything is changed
            for worker, place in zip(alone, made, strict=True):
                place.publisher.go_on_from(places[worker].publisher)
            self._move(made)

    def publish(self, tensors: Mapping[Key, torch.Tensor], version: int, workers: Sequence[int] | None = None) -> None:
        """See `Sender`."""
        self.prepare(workers)
        places = self._places
        for place in {id(place): place for place in (places[worker] for worker in self._named(workers))}.values():
            place.publisher.publish(tensors, version)

    def _named(self, workers: Sequence[int] | None) -> Sequence[int]:
        if not self._places:
            raise ClosedError("Whoever sends these weights was shut down.")
        return self._workers if workers is None else workers

    def _let_go_of_unused(self) -> None:
        """Memory that nobody takes from any more goes back to the system."""
        used = {id(place) for place in self._places.values()}
        for place in [place for place in self._kept if id(place) not in used]:
            place.arena.let_go()
            self._kept.remove(place)

    def welcome(self, worker: int) -> Message:
        """See `Sender`."""
        return self._attachment(worker, self._places[worker])

    def add(self, workers: int) -> None:  # noqa: ARG002
        """See `Sender`: each taker has a word in memory that is there already.

        Raises:
            OptionError: always.
        """
        raise OptionError("Weights in shared memory are for as many workers as there were; others cannot be added.")

    def begin_anew(self, keep: Collection[Key], version: int) -> None:
        """See `Sender`."""
        before = {id(place): place for place in self._places.values()}.values()
        made = [self._new_place(place.takers) for place in before]
        for old, new in zip(before, made, strict=True):
            new.publisher.go_on_from(old.publisher, keep=keep, version=version)
        self._move(made)

    def let_go(self) -> None:
        """See `Sender`."""
        self._places = {}
        self._let_go_of_unused()


class SharedReceiver:
    """See `weights.ends.Receiver`."""

    def __init__(self) -> None:
        self._taker: Taker | None = None
        self._number = -1

    def accept(self, content: _Attach, attached: Sequence[int]) -> None:
        """See `Receiver`."""
        memory = Arena.attached(attached[0], content.nbytes)
        if content.number > self._number:  # else it was told of a later one already
            self._taker = Taker(memory, content.leaves, content.takers, content.taker)
            self._number = content.number

    def is_behind(self) -> bool:
        """See `Receiver`."""
        return self._taker is not None and self._taker.is_behind()

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """See `Receiver`."""
        return None if self._taker is None else self._taker.take(targets)
