"""Weight updaters as TorchRL's older releases had them, for code that was written for those.

An updater stands between `update_policy_weights_` and the workers: it may fetch weights, change their form, and choose
for which workers they are. What it sends goes the collector's own way, and all of one push is one version.
"""

from __future__ import annotations

import abc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rlcollect.errors import OptionError
from rlcollect.weights.naming import copy_into, weights_by_name

__all__ = [
    "MultiProcessedWeightUpdate",
    "RayWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "made_updater",
]


class WeightUpdaterBase(abc.ABC):
    """How weights get to workers, in steps that a subclass may change.

    `push_weights` calls `_get_server_weights` (where none are given), `_maybe_map_weights`, and
    `_sync_weights_with_worker` for each of `all_worker_ids` (or of those that were asked for). A subclass that sends to
    the workers of a collector calls its `publish_weights`.
    """

    def __init__(self) -> None:
        self._collectors: list[weakref.ref[Any]] = []
        self.post_hooks: list[Callable[[], Any]] = []

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:  # noqa: ARG003
        """Makes one for a policy; None: there is no such way, and it is called without arguments."""
        return None

    def register_collector(self, collector: Any) -> None:
        """This is a collector whose workers get the weights; it is not kept alive."""
        self._collectors.append(weakref.ref(collector))

    @property
    def collectors(self) -> list[Any]:
        """Those that were registered and are still there."""
        return [collector for ref in self._collectors if (collector := ref()) is not None]

    @property
    def collector(self) -> Any:
        """The one that was registered; None: it is not there (any more).

        Raises:
            OptionError: there are several.
        """
        if len(self.collectors) > 1:
            raise OptionError(f"This {type(self).__name__} serves {len(self.collectors)} collectors; see `collectors`.")
        return next(iter(self.collectors), None)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Sends weights to workers, then calls the hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; None: what `_get_server_weights` has.
            worker_ids: a number of a worker, a device, or several; None: `all_worker_ids`.
        """
        with ExitStack() as stack:
            for collector in self.collectors:
                stack.enter_context(collector.one_version())
            sent = self._push_weights(policy_or_weights, worker_ids)
        for worker, weights in sent:
            self._copy(worker, weights)
        for hook in self.post_hooks:
            hook()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """See `push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, policy_or_weights: Any, worker_ids: Any) -> list[tuple[Any, Any]]:
        """Sends; to whom, and what."""
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        several = [ids] if ids is None or isinstance(ids, int | str | torch.device) else list(ids)
        chosen = [worker for worker in several if worker is None or not self._skip_update(worker)]
        for worker in chosen:
            self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        return [(worker, weights) for worker in chosen]

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """This is called after each push."""
        self.post_hooks.append(hook)

    def all_worker_ids(self) -> Iterable[Any] | None:
        """Whom a push is for; None: it is one for all."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:  # noqa: ARG002
        """Whether a worker is left out of this push."""
        return False

    def _get_server_weights(self) -> Any:
        """Weights, where a push is not given any; None: those of the collector's policy."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """The weights as the workers' policy has them: names, shapes. None: those of the collector's policy."""
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        return policy_or_weights

    def _copy(self, worker_id: Any, weights: Any) -> None:  # noqa: B027 - most keep none
        """A push was sent: keeps copies up to date, where there are some."""

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        """Sends weights to a worker; to all, if `worker_id` is None."""


class _Publishing(WeightUpdaterBase):
    """Sends by the collectors' own ways."""

    _getter: Callable[[], Any] | None = None

    def _get_server_weights(self) -> Any:
        return None if self._getter is None else self._getter()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        for collector in self.collectors:
            collector.publish_weights(server_weights, worker_ids=worker_id)


class VanillaWeightUpdater(_Publishing):
    """Sends to all workers at once.

    Args:
        weight_getter: called for the weights, where a push is not given any; None: those of the collector's policy.
        policy_weights: a TensorDict that the weights are copied into too, in place; None: nowhere.
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], Any] | None = None,
        policy_weights: TensorDictBase | None = None,
    ) -> None:
        super().__init__()
        self.weight_getter = self._getter = weight_getter
        self.policy_weights = policy_weights

    def _copy(self, worker_id: Any, weights: Any) -> None:  # noqa: ARG002 - there is one
        if self.policy_weights is not None and weights is not None:
            _update(self.policy_weights, weights)


class MultiProcessedWeightUpdate(_Publishing):
    """Sends to each worker by itself.

    Args:
        get_server_weights: called for the weights, where a push is not given any; None: those of the collector's
            policy.
        policy_weights: TensorDicts that weights are copied into too, in place, by worker or device, which are then all
            whom a push is for; None: all workers of the collector.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[Any, TensorDictBase] | None = None,
    ) -> None:
        super().__init__()
        self.weights_getter = self._getter = get_server_weights
        self.policy_weights = policy_weights

    def all_worker_ids(self) -> Iterable[Any] | None:
        """Whom a push is for."""
        if self.policy_weights is not None:
            return list(self.policy_weights)
        return None if self.collector is None else list(range(self.collector.num_workers))

    def _copy(self, worker_id: Any, weights: Any) -> None:
        if self.policy_weights is not None and weights is not None:
            _update(self.policy_weights[worker_id], weights)


class RayWeightUpdater(_Publishing):
    """Sends to each remote of a `RayCollector`, but for those that were sent weights a moment ago.

    Args:
        policy_weights: a TensorDict of parameters that is sent where a push is not given any; None: those of the
            collector's policy.
        remote_collectors: one a remote, whatever they are; None: all of the collector.
        max_interval: pushes that a remote is left out of after one that it got.
    """

    def __init__(
        self,
        policy_weights: TensorDictBase | None = None,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
    ) -> None:
        super().__init__()
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self._left_out: Counter[int] = Counter()

    def all_worker_ids(self) -> Iterable[Any] | None:
        """Whom a push is for."""
        if self.remote_collectors is not None:
            return range(len(self.remote_collectors))
        return None if self.collector is None else range(self.collector.num_workers)

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _skip_update(self, worker_id: Any) -> bool:
        if self._left_out[worker_id] < self.max_interval:
            self._left_out[worker_id] += 1
            return True
        self._left_out[worker_id] = 0
        return False


def _update(kept: TensorDictBase, weights: Any) -> None:
    """Copies weights of any form into a TensorDict, nested or flat."""
    flat = kept.data.flatten_keys(".")
    copy_into(dict(flat.items()), weights_by_name(weights))


def made_updater(given: Any, policy: Any) -> Any:
    """An updater, from one or from what makes one; None stays None.

    Raises:
        OptionError: it is none, and makes none.
    """
    if given is None:
        return None
    made = given
    if isinstance(given, type):
        from_policy = getattr(given, "from_policy", lambda _: None)
        made = from_policy(policy)
        made = given() if made is None else made
    elif callable(given) and not callable(getattr(given, "push_weights", None)):
        made = given()
    lacking = [name for name in ("push_weights", "register_collector") if not callable(getattr(made, name, None))]
    if lacking:
        raise OptionError(
            f"weight_updater={given!r} should be, or make, a WeightUpdaterBase; {made!r} lacks {lacking[0]}."
        )
    return made
