"""The contract of weight synchronisation: how a model's weights get from where they are learned to where they act.

A scheme brings the two ends of the way (`sender`, `receiver`). The life of a model's synchronisation is here, and is
that of TorchRL's schemes: a sender and receivers are initialised, connect, send and receive, and shut down. A collector
does that by itself for the schemes in `weight_sync_schemes=`; without one, a scheme goes to its processes as an
argument, and connects them by pipes of its own.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, Literal

from rlcollect.errors import OptionError
from rlcollect.layout import Leaf
from rlcollect.weights.ends import Hand, Receiver, Sender
from rlcollect.weights.links import Link, LinkEnd
from rlcollect.weights.naming import module_of
from rlcollect.weights.sides import ByContext, Receiving, Sending, Side, WeightContext
from rlcollect.weights.strategy import WeightStrategy

__all__ = ["NoWeightSyncScheme", "WeightSyncScheme"]

CONNECTING = 60.0  # seconds that the other side has to be there
NOT_SENT = ("_links", "_side")  # attributes that stay where weights come from


class WeightSyncScheme(abc.ABC):
    """How the weights of one model are synchronised.

    In a collector: `weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}`. By itself, between two processes::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender("policy", model=policy, num_workers=1)
        process = context.Process(target=act, args=(scheme,))  # in it: init_on_receiver("policy", model=its own)
        process.start()
        scheme.connect()  # here and there: the receiver has the weights when it returns
        version = scheme.send()  # there: scheme.receive()

    Another way for weights to travel is a subclass with `sender` and `receiver`.

    Attributes:
        strategy: what of a model travels.
        model_id: which model's weights; None before it is initialised.
        worker_idx: which of the receivers this is to be, unless `init_on_receiver` is told; 0 at first.

    Args:
        strategy: a `WeightStrategy`, or its `extract_as`.
    """

    is_seen_midway: ClassVar[bool] = False  # whether a worker sees what was published without reading its pipe

    def __init__(self, strategy: WeightStrategy | Literal["tensordict", "state_dict"] = "tensordict") -> None:
        self.strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)
        self.model_id: str | None = None
        self.worker_idx = 0
        self._links: list[Link] = []
        self._ends: list[LinkEnd] = []  # those of receivers
        self._side: Side | None = None

    @property
    def version(self) -> int:
        """Of the weights that were sent, or received, last; in a collector its newest."""
        return 0 if self._side is None else self._side.version

    @abc.abstractmethod
    def sender(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> Sender:
        """The end where versions are published.

        Args:
            leaves: the tensors, by key.
            workers: how many receive them.
            hand: passes messages on to one of them.
        """

    @abc.abstractmethod
    def receiver(self) -> Receiver:
        """The end in a worker."""

    # --- its life ---

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: WeightContext | None = None,
        *,
        model: Any = None,
        weights: Any = None,
        num_workers: int = 1,
    ) -> None:
        """This is where weights come from.

        Args:
            model_id: what the model is called.
            context: the collector whose workers receive them; it brings the rest. None: the scheme is used by itself.
            model: the module whose weights are sent where none are given.
            weights: the same, as a TensorDict or a state dict.
            num_workers: how many receive them.

        Raises:
            OptionError: it was initialised before; or a model and weights too, or no receivers.
        """
        if num_workers < 1 or (model is not None and weights is not None):
            given = f"num_workers={num_workers}" if num_workers < 1 else "model= and weights="
            raise OptionError(
                f"init_on_sender needs one receiver at least, and a model or weights of it; {given} came."
            )
        self._begin(model_id)
        if context is not None:
            self._side = ByContext(context, model_id)
            return
        self._links = [Link() for _ in range(num_workers)]
        self._ends = [link.other for link in self._links]
        self._side = Sending(weights if model is None else model, self._links, self.strategy, self.sender)

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: WeightContext | None = None,
        *,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """This is where weights go to.

        Args:
            model_id: what the model is called.
            context: a collector: it is given what comes, and hands it on to its own workers.
            model: else the module that takes them, in place.
            worker_idx: which of the receivers this is; None: the attribute says so.

        Raises:
            OptionError: neither of the two was given, there is no such receiver, or it was initialised before.
            PolicyError: the module has lazy parameters without values.
        """
        if isinstance(self._side, Sending) and self._side.is_forked:  # it came along with a copy of the process
            self._side = None
        self._begin(model_id)
        if context is None and module_of(model) is None:
            raise OptionError(f"init_on_receiver needs the module that takes the weights (model=), not {model!r}.")
        self.worker_idx = worker_idx = self.worker_idx if worker_idx is None else worker_idx
        if not 0 <= worker_idx < len(self._ends):
            raise OptionError(
                f"This scheme has {len(self._ends)} receivers; worker_idx={worker_idx} is none of them. Initialise it "
                "where weights come from first (init_on_sender), with num_workers=, and pass it on."
            )
        for place, end in enumerate(self._ends):
            if place != worker_idx:
                end.close()
        for link in self._links:
            link.close()
        receiver, is_seen_midway = self.receiver(), self.is_seen_midway
        self._side = Receiving(
            self._ends[worker_idx], receiver, context, model_id, model, is_seen_midway=is_seen_midway
        )

    def _begin(self, model_id: str) -> None:
        if self._side is not None and not self._side.is_closed:
            raise OptionError(f"This scheme is that of {self.model_id!r} already. Each model needs one of its own.")
        self.model_id = model_id

    def connect(self, timeout: float = CONNECTING) -> None:
        """Waits for the other side, whose processes were started before. Receivers then have the sender's weights.

        Args:
            timeout: seconds that it may take.

        Raises:
            TimeoutError: it took longer.
            ClosedError: the other side has ended, or was never started.
            PolicyError: the receivers' models differ, or the sender's does not fit.
        """
        self._initialised().connect(time.monotonic() + timeout)

    def send(self, weights: Any = None, worker_ids: Any = None) -> int:
        """Publishes weights.

        Args:
            weights: a module, a TensorDict (nested or flat) or a state dict; None: those of the model.
            worker_ids: for whom, a number or several; None: all.

        Returns:
            Their version.

        Raises:
            PolicyError: they do not fit; names the first difference. Nothing was sent.
            ClosedError: it was shut down; or a receiver that has to be sent a message has ended, or took too long: the
                others have the weights. (Nobody notices one that would only have to look at shared memory.)
        """
        return self._initialised().send(weights, worker_ids)

    def receive(self, timeout: float = 0.0) -> int | None:
        """Takes the newest weights, if there are any that were not taken yet.

        Args:
            timeout: seconds to wait for some; a message that is on its way takes its time.

        Returns:
            Their version; None: there are none.

        Raises:
            ClosedError: there are none, and the sender has ended; or this was shut down.
        """
        return self._initialised().receive(time.monotonic() + timeout)

    def shutdown(self) -> None:
        """Closes what it holds. Safe to call again."""
        if self._side is not None:
            self._side.close()
        for link in (*self._links, *self._ends):
            link.close()

    def _initialised(self) -> Side:
        if self._side is None:
            raise OptionError("This scheme is not in use yet: call init_on_sender or init_on_receiver first.")
        return self._side

    def __getstate__(self) -> dict[str, Any]:
        """What a receiver needs: not the sender's side."""
        if isinstance(self._side, ByContext | Receiving) or (self._ends and get_spawning_popen() is None):
            raise TypeError(
                f"The {type(self).__name__} of {self.model_id!r} is in use and cannot be pickled or copied; it goes to "
                "a process as an argument, when that is started."
            )
        return {name: value for name, value in vars(self).items() if name not in NOT_SENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _links=[], _side=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy.extract_as!r})"


class NoWeightSyncScheme(WeightSyncScheme):
    """The model is left alone: nothing is sent, nothing received, and no update of it counts a version."""

    def sender(self, leaves: Sequence[Leaf], workers: int, hand: Hand) -> Sender:  # noqa: ARG002
        """There is none.

        Raises:
            OptionError: always.
        """
        raise OptionError("A NoWeightSyncScheme has no ends: its model is left alone.")

    def receiver(self) -> Receiver:
        """There is none.

        Raises:
            OptionError: always.
        """
        raise OptionError("A NoWeightSyncScheme has no ends: its model is left alone.")

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **_: Any) -> None:  # noqa: ARG002
        """There are no pipes."""
        self._begin(model_id)
        self._side = Side()

    def init_on_receiver(self, model_id: str = "policy", context: Any = None, **_: Any) -> None:  # noqa: ARG002
        """There are no pipes."""
        self._begin(model_id)
        self._side = Side()

    def connect(self, timeout: float = CONNECTING) -> None:
        """Nothing: there is no other side."""

    def send(self, weights: Any = None, worker_ids: Any = None) -> int:  # noqa: ARG002
        """Nothing; the version stays."""
        return self.version

    def receive(self, timeout: float = 0.0) -> int | None:  # noqa: ARG002
        """Nothing."""
        return None
