"""Collection in the process of the caller."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlcollect.collectors.arguments import lane_indices
from rlcollect.collectors.base import BaseCollector
from rlcollect.collectors.crew import Crew, Left
from rlcollect.collectors.filling import (
    ByWorkers,
    Filling,
    are_written_there,
    filled_here,
    ids_in,
    prepare_other,
)
from rlcollect.collectors.gather import OneInline
from rlcollect.collectors.opened import Started
from rlcollect.collectors.posting import InPlace
from rlcollect.errors import OptionError
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.replay.others import extend_other
from rlcollect.memory.replay.remote import RayReplayBuffer
from rlcollect.workers.answers import Facts, Report
from rlcollect.workers.commands import Build
from rlcollect.workers.filling import Batches, Rings, kept_leaves
from rlcollect.workers.inline import InlinePool
from rlcollect.workers.worker import Worker

__all__ = ["Collector"]


class Collector(BaseCollector):
    """Runs a policy in environments, in this process, and delivers TensorDicts.

    A torch `IterableDataset` and a context manager::

        with Collector("CartPole-v1", policy, frames_per_batch=2048, total_frames=1_000_000, num_envs=16) as collector:
            for batch in collector:  # TensorDict, batch_size [16, 128]
                train(batch)
                collector.update_policy_weights_()

    Construction makes and resets the environments, and calls the policy once on the first observation to learn what it
    writes; random states and module buffers are put back after that (a counter that the policy keeps is not). The
    policy is called under `torch.no_grad()`, with a random stream of the collector's own; whether it is in train or
    eval mode is the caller's choice, and left alone.

    Args:
        create_env_fn: an environment id, a callable that makes an environment, an instance of one, or a sequence of
            these, one lane each. Environments are those of Gymnasium, its vector environments, EnvPool's, vector
            environments on tensors, TorchRL's and PettingZoo's; those that hold several lanes come one at a time.
            Instances stay their owner's to close, and are for one collector at a time.
        policy: from observation to action, as a callable or module: one positional parameter gets the observation (a
            TensorDict of its keys for a Dict space), several named ones the keys of those names. Or from TensorDict to
            TensorDict: `TensorDictModule`, `TensorDictSequential`, or a callable whose parameter is annotated as a
            TensorDict or named `tensordict` or `td`. None or `RandomPolicy()`: random actions, among those that an
            "action_mask" allows where the observation has one (or the info, if `info_keys` names it).
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        OptionError, SpaceError, PolicyError, EnvError: see `rlcollect.errors`.
        What an environment raises, from a `WorkerError`.
    """

    def _start(self, create_env_fn: Any, policy: Any) -> Started:
        if self._where.is_split or self._how.is_split:
            raise OptionError(
                "A Collector has one worker, in this process; a device or policy_factory for each of several is for "
                "MultiSyncCollector and MultiAsyncCollector."
            )
        pool = InlinePool()
        self._ending.callback(pool.shutdown)
        build = Build(
            create_env_fn,
            policy,
            self._what,
            self._where,
            self._how,
            reuse=self._sink.use_buffers,
            same=self._sink.return_same_td,
            worker=0,
            workers=1,
            share=1,
            seed=torch.initial_seed(),
            skipped=ids_in(self._sink.replay_buffer),
        )
        crew = Crew(pool, None)
        facts = crew.ask({0: build})
        assert pool.worker is not None
        self._worker: Worker = pool.worker
        self.policy = self._worker.acting.given
        self._poster = InPlace(self._worker, self._schemes.strategies)
        device = self._delivery_device(self._worker)
        return Started(
            crew=crew,
            facts=facts,
            gather=OneInline(crew, self._worker.engine.forget_memory),
            share=1,
            devices=[device],
            poster=self._poster,
            filling=self._filled(self._worker, facts, device),
            made_of=[(create_env_fn, self._where, self._how)],
        )

    def _filled(self, worker: Worker, facts: Sequence[Facts], device: torch.device | None) -> Filling | None:
        """How frames get into the buffer, if there is one."""
        sink, (own,) = self._sink, facts
        buffer = sink.replay_buffer
        if are_written_there(sink, facts, [device]):
            assert own.leaves is not None
            claim = buffer.claim(kept_leaves(own.leaves), own.num_lanes)
            self._ending.callback(claim.let_go)
            writer = claim.writer(0, own.num_lanes)
            worker.attach_buffer(Rings(writer, own.leaves), by_step=not sink.extend_buffer)
            return ByWorkers(writer)
        if buffer is not None and not isinstance(buffer, ReplayBuffer):
            prepare_other(sink, facts)
            if not sink.extend_buffer and own.leaves is not None:
                extend = buffer.keep if isinstance(buffer, RayReplayBuffer) else partial(extend_other, buffer)
                worker.attach_buffer(Batches(extend), by_step=True)
                return ByWorkers()
        return filled_here(sink, own.num_lanes, 1, self._ending.callback)

    def _go_apart(self) -> None:
        here = weakref.ref(self)  # it may be started again, and what is asked here does not keep it

        def check() -> None:
            collector = here()
            if collector is None or collector._background is None or collector._background.is_ending:
                raise Left("Collection ends.", workers=())

        if not self._worker.is_apart:
            self._poster.hand_to(self._worker.go_apart(self._poster.models, check))

    def _delivery_device(self, worker: Worker) -> torch.device | None:
        device = self._where.placement.storing
        return None if device == worker.driver.device else device

    def reset(
        self, index: Any = None, *, seed: int | Sequence[int] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode now, in all lanes or in some: a CUT in their data.

        Args:
            index: a lane, several, a slice, or one bool a lane; None: all.
            seed: for one lane as it is, for several its children; or a list of one for each of them.
            options: for the environments' `reset`, in the place of `reset_options`.

        Raises:
            OptionError: an index that names no lane, or a list of seeds of another length; some lanes of environments
                that can only be reset all together.
        """
        self._check_open()
        self._reset_lanes({0: lane_indices(index, self.num_envs)}, seed, options)

    def _reports(self) -> Sequence[Report]:
        return [self._worker.report()]

    def _state_of(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return states[0]

    def _states_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if "worker0" in state:
            raise OptionError("This is the state of a collector with worker processes; load it into one of its kind.")
        return [state]

    def _load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        self._worker.acting.load(weights, strict=strict)
