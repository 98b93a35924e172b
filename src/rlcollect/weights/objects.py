"""Weights by way of a cluster's object store: put there once a version, fetched by whoever acts with them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlcollect.errors import OptionError
from rlcollect.layout import Key, Layout, Leaf
from rlcollect.processes.channel import Held
from rlcollect.weights.ends import Hand, Message
from rlcollect.weights.scheme import WeightSyncScheme

__all__ = ["RayWeightSyncScheme"]

Array = np.ndarray[Any, Any]


class RayWeightSyncScheme(WeightSyncScheme):
    """Weights lie in Ray's object store, once a version, and each node fetches them once.

    The usual one of a `RayCollector`, and for it alone. A worker has the newest when it begins a rollout. See
    `WeightSyncScheme`.
    """

    def sender(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> ObjectSender:
        """See `WeightSyncScheme`."""
        return ObjectSender(leaves, workers, hand)

    def receiver(self) -> ObjectReceiver:
        """See `WeightSyncScheme`."""
        return ObjectReceiver()

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """See `WeightSyncScheme`.

        Raises:
            OptionError: there is no collector: processes that are connected by pipes have no object store.
        """
        self._check_context(context)
        super().init_on_sender(model_id, context, **given)

    def init_on_receiver(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:  # noqa: ARG002
        """Never.

        Raises:
            OptionError: workers of a `RayCollector` receive by themselves.
        """
        self._check_context(None)

    def _check_context(self, context: Any) -> None:
        if context is None:
            raise OptionError(
                "A RayWeightSyncScheme works in a RayCollector (weight_sync_schemes=), whose workers are connected to "
                "its object store. Between two processes use a SharedMemWeightSyncScheme."
            )


@dataclass(frozen=True)
class _Part:
    """Tensors that lie in one object.

    Attributes:
        leaves: all of them.
        keys: of those that are wanted.
    """

    leaves: tuple[Leaf, ...]
    keys: frozenset[Key]


@dataclass(frozen=True)
class _Newest:
    """What was published, as far as it is the newest, and its version; a message with a higher number is a later one.

    Attributes:
        parts: of each object that goes with it what it holds; a later one holds newer tensors.
        version: of the last.
        number: of the message.
    """

    parts: Sequence[_Part]
    version: int
    number: int


@dataclass(frozen=True)
class _Object:
    """Some tensors in the store."""

    part: _Part
    reference: Any


@dataclass(frozen=True)
class _Known:
    """What a worker was told to take, by the message of this number."""

    objects: tuple[_Object, ...]
    version: int
    number: int


class ObjectSender:
    """See `weights.ends.Sender`.

    Attributes:
        nbytes: of what is in the store for those that may still fetch it.

    Args:
        leaves: the tensors.
        workers: how many take them.
        hand: passes messages on.
    """

    def __init__(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> None:
        self._leaves = {leaf.key: leaf for leaf in leaves}
        self._hand = hand
        self._workers = range(workers)
        self._known: dict[int, _Known] = {}
        self._of_all: _Known | None = None  # what was published for all
        self._numbers = itertools.count()

    @property
    def nbytes(self) -> int:
        """See above."""
        objects = {id(each): each for known in self._known.values() for each in known.objects}
        return sum(Layout(each.part.leaves).nbytes() for each in objects.values())

    def add(self, workers: int) -> None:
        """See `Sender`."""
        first = len(self._workers)
        self._workers = range(first + workers)
        if self._of_all is not None:
            for worker in range(first, first + workers):
                self._tell(worker, replace(self._of_all, number=next(self._numbers)))

    def prepare(self, workers: Sequence[int] | None) -> None:
        """See `Sender`: there is nothing."""

    def publish(self, tensors: Mapping[Key, torch.Tensor], version: int, workers: Sequence[int] | None = None) -> None:
        """See `Sender`."""
        made = self._stored(tensors)
        for worker in self._workers if workers is None else workers:
            before = self._known[worker].objects if worker in self._known else ()
            self._tell(worker, _Known((*_without(before, tensors.keys()), made), version, next(self._numbers)))
        if workers is None:
            before = self._of_all.objects if self._of_all is not None else ()
            self._of_all = _Known((*_without(before, tensors.keys()), made), version, 0)

    def _stored(self, tensors: Mapping[Key, torch.Tensor]) -> _Object:
        from rlcollect.cluster.objects import put

        leaves = tuple(self._leaves[key] for key in tensors)
        layout = Layout(leaves)
        data = np.empty(layout.nbytes(), np.uint8)
        with torch.no_grad():
            for key, target in layout.carve(data).items():
                target.copy_(tensors[key])
        return _Object(_Part(leaves, frozenset(tensors)), put(data))

    def _tell(self, worker: int, known: _Known) -> None:
        self._known[worker] = known
        self._hand(worker, self._message(known))

    def _message(self, known: _Known) -> Message:
        newest = _Newest([each.part for each in known.objects], known.version, known.number)
        return Message(newest, [each.reference for each in known.objects])

    def welcome(self, worker: int) -> Message | None:
        """See `Sender`."""
        return self._message(self._known[worker]) if worker in self._known else None

    def begin_anew(self, keep: Collection[Key], version: int) -> None:
        """See `Sender`."""
        for worker, known in list(self._known.items()):
            kept = tuple(each for each in _only(known.objects, keep) if each.part.keys)
            if kept:
                self._known[worker] = _Known(kept, version, next(self._numbers))
            else:
                del self._known[worker]
        self._of_all = None

    def let_go(self) -> None:
        """See `Sender`."""
        self._known, self._of_all = {}, None


def _without(objects: Sequence[_Object], keys: Collection[Key]) -> list[_Object]:
    """Those that hold something else too."""
    return [each for each in objects if not each.part.keys <= {*keys}]


def _only(objects: Sequence[_Object], keys: Collection[Key]) -> list[_Object]:
    """The same, of which no more than these tensors are wanted."""
    parts = [replace(each.part, keys=each.part.keys & {*keys}) for each in objects]
    return [replace(each, part=part) for each, part in zip(objects, parts, strict=True)]


class ObjectReceiver:
    """See `weights.ends.Receiver`."""

    def __init__(self) -> None:
        self._newest: _Newest | None = None
        self._references: Sequence[Any] = ()
        self._number = -1

    def accept(self, content: _Newest, attached: Sequence[Any]) -> None:
        """See `Receiver`. One that was overtaken on its way to a successor is not looked at."""
        if content.number > self._number:
            self._newest, self._references, self._number = content, attached, content.number

    def is_behind(self) -> bool:
        """See `Receiver`."""
        return self._newest is not None

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """See `Receiver`."""
        from rlcollect.cluster.objects import fetched

        newest = self._newest
        if newest is None:
            return None
        blocks = [fetched(reference) for reference in self._references]
        with Held(), torch.no_grad():
            for part, data in zip(newest.parts, blocks, strict=True):
                for key, tensor in Layout(part.leaves).carve(data).items():
                    for target in targets.get(key, ()) if key in part.keys else ():
                        target.copy_(tensor)
            self._newest, self._references = None, ()
        return newest.version
