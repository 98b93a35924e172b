"""Weights by value: a copy with each message, for models that cannot lie in shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcollect.layout import Key, Leaf
from rlcollect.processes.channel import Held
from rlcollect.weights.ends import Hand, Message
from rlcollect.weights.scheme import WeightSyncScheme

__all__ = ["MultiProcessWeightSyncScheme"]


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights go to each worker by value, over its pipe, and are taken between two rollouts.

    For where there is too little shared memory, or where it is not to be used. Each worker costs a copy; an update that
    waits for its worker is replaced by the next. See `WeightSyncScheme`.
    """

    def sender(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> ValueSender:
        """See `WeightSyncScheme`."""
        return ValueSender(leaves, workers, hand)

    def receiver(self) -> ValueReceiver:
        """See `WeightSyncScheme`."""
        return ValueReceiver()


@dataclass(frozen=True)
class _Values:
    """All that was published, and its version; a message with a higher number is a later one."""

    tensors: Mapping[Key, torch.Tensor]
    version: int
    number: int


class ValueSender:
    """See `weights.ends.Sender`. Each message holds all that is the newest, so that one makes up for those before.

    Args:
        leaves: the tensors.
        workers: how many take them.
        hand: passes messages on.
    """

    def __init__(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> None:
        self._dtypes = {leaf.key: leaf.dtype for leaf in leaves}
        self._hand = hand
        self._workers = tuple(range(workers))
        self._newest: dict[int, _Values] = {}
        self._of_all: _Values | None = None  # what was published for all
        self._numbers = itertools.count()

    def prepare(self, workers: Sequence[int] | None) -> None:
        """See `Sender`: there is nothing."""

    def publish(self, tensors: Mapping[Key, torch.Tensor], version: int, workers: Sequence[int] | None = None) -> None:
        """See `Sender`."""
        copies = {key: self._copy(key, tensor) for key, tensor in tensors.items()}
        for worker in self._workers if workers is None else workers:
            before = self._newest[worker].tensors if worker in self._newest else {}
            self._newest[worker] = _Values({**before, **copies}, version, next(self._numbers))
            self._hand(worker, Message(self._newest[worker]))
        if workers is None:
            before = self._of_all.tensors if self._of_all is not None else {}
            self._of_all = _Values({**before, **copies}, version, 0)

    def _copy(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", self._dtypes[key], copy=True)

    def welcome(self, worker: int) -> Message | None:
        """See `Sender`."""
        return Message(self._newest[worker]) if worker in self._newest else None

    def add(self, workers: int) -> None:
        """See `Sender`."""
        first = len(self._workers)
        self._workers = tuple(range(first + workers))
        for worker in range(first, first + workers):
            if self._of_all is not None:
                self._newest[worker] = _Values(self._of_all.tensors, self._of_all.version, next(self._numbers))
                self._hand(worker, Message(self._newest[worker]))

    def begin_anew(self, keep: Collection[Key], version: int) -> None:
        """See `Sender`."""
        for worker, values in list(self._newest.items()):
            kept = {key: tensor for key, tensor in values.tensors.items() if key in keep}
            self._newest[worker] = _Values(kept, version, next(self._numbers))
            if not kept:
                del self._newest[worker]
        self._of_all = None

    def let_go(self) -> None:
        """See `Sender`."""
        self._newest, self._of_all = {}, None


class ValueReceiver:
    """See `weights.ends.Receiver`."""

    def __init__(self) -> None:
        self._newest: _Values | None = None
        self._number = -1

    def accept(self, content: _Values, attached: Sequence[int]) -> None:  # noqa: ARG002 - there are none
        """See `Receiver`. One that was overtaken on its way to a successor is not looked at."""
        if content.number > self._number:
            self._newest, self._number = content, content.number

    def is_behind(self) -> bool:
        """See `Receiver`."""
        return self._newest is not None

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """See `Receiver`."""
        if self._newest is None:
            return None
        values = self._newest
        with Held(), torch.no_grad():  # or a Ctrl-C would leave a mix of two versions
            for key, tensor in values.tensors.items():
                for target in targets.get(key, ()):
                    target.copy_(tensor)
            self._newest = None
        return values.version
