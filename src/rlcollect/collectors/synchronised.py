"""New weights, as the user of a collector gives them: to whom, of which model, from where, and how old frames are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from rlcollect.collectors.crew import USUAL
from rlcollect.collectors.opened import DeathCloses, Opened
from rlcollect.collectors.updaters import made_updater
from rlcollect.errors import OptionError, WorkerTimeout
from rlcollect.weights.naming import module_of
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.workers.commands import Take
from rlcollect.workers.models import POLICY

__all__ = ["Synchronised"]


class Synchronised(Opened):
    """Takes new weights for its workers."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        super().__init__(create_env_fn, policy, **options)
        self._weight_updater: Any = None
        try:
            self.weight_updater = self._sync.weight_updater
            self.register_scheme_receiver(self._sync.weight_recv_schemes or {})
        except BaseException:
            self._close()
            raise

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        policy_weights: Any = None,
        worker_ids: Any = None,
        model_id: str = POLICY,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> int:
        """Gives the workers new weights. Waits for nobody; the frames that follow carry the new version.

        Worker processes have copies: parameters and buffers are copied to where workers take them, whole, when they
        begin their next rollout (or step: `weights_update=`); what the learner does to them afterwards is not seen.
        Buffers that the policy itself changes while it acts stay each worker's own. In one process the policy is the
        user's own module: without weights nothing is copied, and the version counts; only where `policy_device` made a
        copy on another device is that brought up to date.

        Shapes have to agree. Values are cast to the dtype that they have there, as far as `torch.can_cast` allows: from
        one precision to another and from integers to floats, not from floats to integers.

        Args:
            policy_or_weights: a module, a TensorDict of parameters (nested or flat) or a state dict; for each worker
                its own: `{0: weights, 1: weights}`. None: those of the policy that the collector was made with.
            policy_weights: the same by its name.
            worker_ids: for whom: a number of a worker, a device (all whose policies compute there), or several. None:
                for all.
            model_id: whose weights they are: "policy", or another model of `weight_sync_schemes`.
            weights_dict: weights of several models, by `model_id`, which are seen all together or not at all.

        Returns:
            The new version, which the frames that these weights make carry as their `policy_version`.

        Raises:
            PolicyError: they do not fit; names the first difference. Nothing was changed.
            OptionError: no such worker or model; or arguments that do not go together.
        """
        self._check_open()
        given = policy_or_weights if policy_weights is None else policy_weights
        if policy_weights is not None and policy_or_weights is not None:
            raise OptionError("policy_or_weights and policy_weights are the same; pass one of them.")
        if weights_dict is not None and (given is not None or model_id != POLICY):
            raise OptionError("weights_dict= brings the weights of each model; pass nothing else beside it.")
        with DeathCloses(self):
            if self._weight_updater is None or model_id != POLICY or weights_dict is not None:
                return self._updates.send(given, worker_ids, model_id, weights_dict)
            before = self._updates.version
            self._weight_updater.push_weights(given, worker_ids)
            if self._updates.version == before and POLICY in self._schemes.moving:
                return self._sent_as_it_is(worker_ids)
            return self._updates.version

    def _sent_as_it_is(self, worker_ids: Any) -> int:
        """An updater that is none of ours has changed the policy here, or has ways of its own to the workers."""
        return self._updates.count() if module_of(self.policy) is None else self._updates.send(None, worker_ids)

    def publish_weights(self, weights: Any, *, worker_ids: Any = None) -> int:
        """Gives the workers weights of the policy as they are: what a `weight_updater` does with those it has mapped.

        Args:
            weights: see `update_policy_weights_`.
            worker_ids: see there.

        Returns:
            The newest version: the one after it, when an updater is at work, which sends all that it does as one.
        """
        self._check_open()
        with DeathCloses(self):
            return self._updates.send(weights, worker_ids)

    def one_version(self) -> AbstractContextManager[None]:
        """All that `publish_weights` sends inside is one update, of one version; it is one even if nothing is sent."""
        return self._updates.one_version()

    @property
    def policy_version(self) -> int:
        """The newest version of the weights: how many updates there were, or what their sender says."""
        return self._updates.version

    @property
    def weight_updater(self) -> Any:
        """The `WeightUpdaterBase` by which the policy's weights are sent; None: they are sent as they are."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, updater: Any) -> None:
        self._weight_updater = made_updater(updater, self.policy)
        if self._weight_updater is not None:
            self._weight_updater.register_collector(self)

    @property
    def weight_sync_schemes(self) -> Mapping[str, WeightSyncScheme]:
        """The scheme of each model."""
        return MappingProxyType(self._schemes.given)

    def register_scheme_receiver(self, weight_recv_schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Makes this collector a receiver: before each batch it takes what came, and hands it on to its own workers.

        The frames that follow carry the sender's version.

        Args:
            weight_recv_schemes: by model; each was initialised by its sender, and came from there with this process
                (`scheme.worker_idx` says which of its receivers this is). Returns when all are connected.

        Raises:
            OptionError: no such model.
            TimeoutError, ClosedError, PolicyError: see `WeightSyncScheme.connect`.
        """
        self._check_open()
        self._updates.receive_by(weight_recv_schemes)

    @property
    def policy_lag(self) -> Mapping[int, int]:
        """How many of the frames that were delivered were made by weights how many versions old (1024: or more).

        The version that counts is the learner's when the batch was delivered; random frames do not count.
        """
        return dict(sorted(self._updates.lag.items()))

    def wait_for_version(self, version: int, timeout: float | None = None) -> None:
        """Waits until all workers act with a version of the weights, or with the newest that was sent to them.

        Args:
            version: which, or a newer one.
            timeout: seconds; a rollout that is under way takes its time. None: the collector's own `timeout=`.

        Raises:
            WorkerTimeout: it took longer; names the workers. They take it all the same.
            OptionError, TimeoutError: it was not published.
        """
        self._check_open()
        start = time.monotonic()
        self._updates.wait_until_published(version, timeout)
        with self._turn():
            self._check_open()
            left = USUAL if timeout is None else max(0.0, timeout - (time.monotonic() - start))
            acting = self._asked({worker: Take() for worker in range(self.num_workers)}, left)
        late = [worker for worker, has in enumerate(acting) if not self._updates.is_with(worker, version, has)]
        if late:
            raise WorkerTimeout(
                f"Version {version} has not come to workers {', '.join(map(str, late))}. Nothing is lost: they take it "
                "with their next rollout.",
                workers=tuple(late),
            )
