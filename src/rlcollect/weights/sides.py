"""What a scheme is once it is in use: the side that sends or the one that receives, with or without a collector."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from rlcollect.errors import ClosedError, OptionError, PolicyError
from rlcollect.layout import Key, Leaf
from rlcollect.weights.ends import Hand, Message, Receiver, Sender
from rlcollect.weights.form import WeightsForm
from rlcollect.weights.links import Link, LinkEnd
from rlcollect.weights.naming import module_of, tensors_of
from rlcollect.weights.strategy import WeightStrategy

__all__ = ["ByContext", "Receiving", "Sending", "Side", "WeightContext"]

SENDING = 60.0  # seconds that a receiver has to take a message
LOOKED_EACH = 0.001  # seconds between two looks at shared memory


class WeightContext(Protocol):
    """A collector, as schemes see it."""

    version: int  # the newest

    def weights_form(self, model_id: str) -> WeightsForm:
        """What weights one of its models takes."""

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, model_id: str = "policy"
    ) -> int:
        """Gives its workers new weights; their version."""

    def hand_on(self, model_id: str, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Gives its workers weights that came from elsewhere, with the version they have there."""


class Side:
    """A side of a scheme.

    Attributes:
        is_closed: whether it was shut down; the scheme may then be initialised anew.
    """

    def __init__(self) -> None:
        self.is_closed = False

    @property
    def version(self) -> int:
        """Of the weights that were sent, or received, last."""
        return 0

    def connect(self, deadline: float) -> None:
        """See `WeightSyncScheme`."""

    def send(self, weights: Any, worker_ids: Any) -> int:  # noqa: ARG002
        """See `WeightSyncScheme`."""
        raise OptionError("This is the side that receives; send() is for the other.")

    def receive(self, deadline: float) -> int | None:  # noqa: ARG002
        """See `WeightSyncScheme`."""
        raise OptionError("This is the side that sends; receive() is for the other.")

    def close(self) -> None:
        """Safe to call again."""
        self.is_closed = True

    def check_open(self) -> None:
        """Whether it can be used.

        Raises:
            ClosedError: it was shut down.
        """
        if self.is_closed:
            raise ClosedError("This scheme was shut down. Initialise it anew to use it again.")


class ByContext(Side):
    """A collector sends, and is the one that knows its workers.

    Args:
        context: the collector.
        model_id: which of its models this is for.
    """

    def __init__(self, context: WeightContext, model_id: str) -> None:
        super().__init__()
        self._context = weakref.ref(context)  # it has the scheme
        self._model_id = model_id

    @property
    def version(self) -> int:
        """The collector's newest."""
        context = self._context()
        return 0 if context is None else context.version

    def send(self, weights: Any, worker_ids: Any) -> int:
        """See `WeightSyncScheme`."""
        context = None if self.is_closed else self._context()
        if context is None:
            raise ClosedError("The collector of this scheme was shut down.")
        return context.update_policy_weights_(weights, worker_ids=worker_ids, model_id=self._model_id)


class Sending(Side):
    """The side that sends, by pipes of the scheme's own. Several threads may.

    Args:
        source: the model, or weights of it, that are sent where none are given; None: there is none.
        links: to the receivers.
        strategy: what of a model travels.
        sender: makes the end that publishes.
    """

    def __init__(
        self,
        source: Any,
        links: Sequence[Link],
        strategy: WeightStrategy,
        sender: Callable[[Sequence[Leaf], int, Hand], Sender],
    ) -> None:
        super().__init__()
        self._source = source
        self._links = links
        self._strategy = strategy
        self._make = sender
        self._forms: dict[int, WeightsForm] = {}  # that have come
        self._form = WeightsForm()
        self._sender: Sender | None = None
        self._version = 0
        self._deadline = 0.0
        self._failed: dict[int, Exception] = {}  # receivers that have not taken what is being sent
        self._lock = threading.RLock()

    @property
    def version(self) -> int:
        """That was sent last."""
        return self._version

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy, in another process."""
        return any(link.is_foreign for link in self._links)

    def connect(self, deadline: float) -> None:
        """See `WeightSyncScheme`."""
        self.check_open()
        if self._sender is not None:
            return
        for link in self._links:  # theirs by now: that one is gone can be seen
            link.other.close()
        for worker, link in enumerate(self._links):
            if worker not in self._forms:
                self._forms[worker] = link.receive(deadline)
        self._deadline = deadline
        try:
            forms = [self._forms[worker] for worker in range(len(self._links))]
            self._form = WeightsForm.common(forms, "models", "receiver")
            weights = None if self._source is None else self._fitted(None)
        except PolicyError as error:
            for link in self._links:
                link.send(error, deadline)
            raise
        self._sender = self._make(self._form.leaves, len(forms), self._hand)
        if weights is not None:
            self._sender.publish(weights, 0)
        for link in self._links:
            link.send(None, deadline)
        for link in self._links:  # each has taken them
            link.receive(deadline)
        self._raise_failure()

    def _hand(self, worker: int, message: Message) -> None:
        try:
            self._links[worker].send(message.content, self._deadline, message.attached)
        except (TimeoutError, ClosedError) as error:  # the others are to have it all the same
            self._failed[worker] = error

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, {}
        if failed:
            first = next(iter(failed.values()))
            raise ClosedError(
                f"Receivers {', '.join(map(str, failed))} have not taken version {self._version}: {first} The others "
                "have it; leave these out from now on (worker_ids=)."
            ) from first

    def _fitted(self, weights: Any) -> dict[Key, torch.Tensor]:
        if weights is None and self._source is None:
            raise PolicyError("There is no model here to send the weights of: pass them, or init_on_sender(model=).")
        named = self._strategy.named(self._source if weights is None else weights)
        return {(name,): tensor for name, tensor in self._form.fitted(named, "the receivers' model").items()}

    def send(self, weights: Any, worker_ids: Any) -> int:
        """See `WeightSyncScheme`."""
        self.check_open()
        if self._sender is None:
            raise OptionError("send() comes after connect().")
        workers = _numbers(worker_ids, len(self._links))
        with self._lock:
            tensors = self._fitted(weights)
            self._deadline = time.monotonic() + SENDING
            self._version += 1  # whoever gets it: no number has two sets of weights
            self._sender.publish(tensors, self._version, workers)
            self._raise_failure()
            return self._version

    def close(self) -> None:
        """See `Side`."""
        super().close()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.let_go()


class Receiving(Side):
    """The side that receives, in a process of its own.

    Args:
        end: of the pipe.
        receiver: takes what comes.
        context: a collector that is given it; None: there is none.
        model_id: which of its models takes it.
        model: else the module that does.
        is_seen_midway: whether new weights show without a message.
    """

    def __init__(
        self,
        end: LinkEnd,
        receiver: Receiver,
        context: WeightContext | None,
        model_id: str,
        model: Any,
        *,
        is_seen_midway: bool,
    ) -> None:
        super().__init__()
        self._end = end
        self._receiver = receiver
        self._context = None if context is None else weakref.ref(context)
        self._model_id = model_id
        self._looked_each = LOOKED_EACH if is_seen_midway else None
        self._version = 0
        self._is_connected = False
        self._has_ended = False
        if context is not None:
            self._form = context.weights_form(model_id)
            self._own = {leaf.key[0]: torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in self._form.leaves}
        else:
            module = module_of(model)
            assert module is not None
            self._own = tensors_of(module)
            if lazy := [name for name, tensor in self._own.items() if is_lazy(tensor)]:
                raise PolicyError(f"{lazy[0]!r} has no values yet: call the lazy module once before.")
            self._form = WeightsForm.of_module(module)
        self._before = {name: tensor._version for name, tensor in self._own.items()}
        self._targets: dict[Key, list[torch.Tensor]] = {(name,): [tensor] for name, tensor in self._own.items()}

    @property
    def version(self) -> int:
        """That was received last."""
        return self._version

    def connect(self, deadline: float) -> None:
        """See `WeightSyncScheme`."""
        self.check_open()
        if self._is_connected:
            return
        self._end.send(self._form, deadline)
        while (content := self._end.receive(deadline)) is not None:
            if isinstance(content, PolicyError):
                raise content
            self._receiver.accept(content, self._end.attached)
        self._take()
        self._is_connected = True
        self._end.send(None, deadline)

    def _take(self) -> int | None:
        version = self._receiver.take(self._targets)
        if version is None:
            return None
        self._version = version
        context = None if self._context is None else self._context()
        if context is not None:  # what was never sent has no values here
            came = {name: each for name, each in self._own.items() if each._version != self._before[name]}
            context.hand_on(self._model_id, came, version)
        return version

    def receive(self, deadline: float) -> int | None:
        """See `WeightSyncScheme`."""
        self.check_open()
        while True:
            self._listen()
            if (version := self._take()) is not None:
                return version
            if self._has_ended:
                raise ClosedError("The sender of these weights has ended; there are no more to come.")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._end.wait(left if self._looked_each is None else min(left, self._looked_each))

    def _listen(self) -> None:
        try:
            while not self._has_ended and self._end.has_message():
                content = self._end.receive(0.0)
                self._receiver.accept(content, self._end.attached)
        except ClosedError:
            self._has_ended = True

    def close(self) -> None:
        """See `Side`."""
        super().close()
        self._end.close()


def _numbers(worker_ids: Any, count: int) -> list[int] | None:
    """Receivers as the user names them, each once; None for all."""
    if worker_ids is None:
        return None
    try:
        given = [worker_ids] if hasattr(worker_ids, "__index__") else list(worker_ids)
        numbers = [operator.index(each) for each in given]
    except TypeError as error:
        raise OptionError(f"worker_ids takes numbers of receivers, not {worker_ids!r}.") from error
    if wrong := [each for each in numbers if each not in range(count)]:
        raise OptionError(f"There are receivers 0 to {count - 1}; worker_ids has {wrong[0]!r}.")
    return list(dict.fromkeys(numbers))
