"""What attempts to break weight synchronisation found: each a fault once, and of a kind that may come again."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from rlcollect import (
    Collector,
    MultiAsyncCollector,
    MultiProcessWeightSyncScheme,
    MultiSyncCollector,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from rlcollect.errors import PolicyError
from rlcollect.testing import Echo
from rlcollect.workers.commands import Collect
from tests.weights.helpers import One

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:No weights were sent"),
]
schemes = pytest.mark.parametrize(
    "scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "by value"]
)


class Masked(One):
    """Has a buffer whose elements share one place in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4))


class Rewarded(Echo):
    """Pays what its model says."""

    def __init__(self):
        super().__init__()
        self.model = One()

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.model.weight.item(), terminated, truncated, info


class Slow(Echo):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def two(env=Echo, policy=None, **options):
    return MultiSyncCollector([env] * 2, policy, frames_per_batch=4, **options)


def acted(batch):
    return batch["action"].flatten().tolist()


def paid(batch):
    return {*batch["next", "reward"].flatten().tolist()}


def versions(batch):
    return {*batch["collector", "policy_version"].flatten().tolist()}


@schemes
class TestAStateThatIsLoaded:
    def test_loses_no_update_of_another_model(self, scheme):
        with two(Rewarded, One(), weight_sync_schemes={"env.model": scheme()}) as collector:
            state = collector.state_dict()  # has nothing of it
            collector.update_policy_weights_(One(9), model_id="env.model")
            collector.load_state_dict(state)
            assert paid(collector.next()) == {9}

    def test_brings_no_policy_back_that_was_published_before(self, scheme):
        schemes = {"env.model": scheme()}
        with two(Rewarded, policy_factory=One, weight_sync_schemes=schemes) as collector:
            collector.update_policy_weights_(One(1))
            collector.next()
            state = collector.state_dict()
            collector.update_policy_weights_(One(2))
            collector.next()
            collector.load_state_dict(state)
            collector.update_policy_weights_(One(9), model_id="env.model", worker_ids=0)
            collector.update_policy_weights_(One(9), model_id="env.model")
            batch = collector.next()
            assert {*acted(batch)} == {1}
            assert paid(batch) == {9}


class TestHostedCollectors:
    def test_have_the_versions_of_their_pool_after_a_load(self):
        options = {"policy_factory": One, "collector_class": Collector}
        with two(**options) as collector:
            first = collector.state_dict()
            collector.update_policy_weights_(One(1))
            collector.next()
            state = collector.state_dict()
            collector.update_policy_weights_(One(2))
            collector.load_state_dict(first)
            batch = collector.next()
            assert ({*acted(batch)}, versions(batch)) == ({0}, {0})
        with two(**options) as collector:
            collector.load_state_dict(state)
            batch = collector.next()
            assert ({*acted(batch)}, versions(batch)) == ({1}, {1})


class Scratch(WeightUpdaterBase):
    """Has weights of its own for each worker, in one piece of memory."""

    def all_worker_ids(self):
        return [0, 1]

    def _sync_weights_with_worker(self, *, worker_id, server_weights):
        scratch = server_weights["weight"].fill_(10 + worker_id)
        self.collector.publish_weights({"weight": scratch}, worker_ids=worker_id)


class Again(WeightUpdaterBase):
    def _sync_weights_with_worker(self, *, worker_id, server_weights):
        self.collector.publish_weights({"weight": torch.ones(1)}, worker_ids=0)
        self.collector.publish_weights({"weight": torch.full((1,), 2.0)})
        self.collector.publish_weights({"weight": torch.ones(1)})


class TestWhatAnUpdaterSends:
    @pytest.mark.parametrize(("updater", "expected"), [(Scratch, [10, 10, 11, 11]), (Again, [1] * 4)])
    def test_is_copied_at_once_and_the_last_counts(self, updater, expected):
        with two(policy=One(), weight_updater=updater) as collector:
            assert collector.update_policy_weights_({"weight": torch.zeros(1)}) == 1
            assert acted(collector.next()) == expected


class TestModelsThatAreLeftAlone:
    def test_do_not_keep_others_from_their_weights(self):
        net = One()

        def policy(observation):
            return net(observation)

        left = {"policy": NoWeightSyncScheme()}
        with two(
            Rewarded,
            policy,
            weight_sync_schemes={**left, "env.model": SharedMemWeightSyncScheme()},
        ) as collector:
            assert collector.update_policy_weights_(One(3), model_id="env.model") == 1
            assert paid(collector.next()) == {3}
        post = One()
        with two(
            policy=One(),
            postproc=lambda batch: batch,
            weight_updater=VanillaWeightUpdater(),
            weight_sync_schemes=left,
        ) as collector:
            assert collector.update_policy_weights_(post) == 0


class TestOddTensors:
    def test_expanded_buffers_take_weights(self):
        with two(policy=Masked()) as collector:
            collector.update_policy_weights_()
            assert versions(collector.next()) == {1}

    @pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
    def test_meta_tensors_have_no_values(self, kind):
        source = Echo if kind is Collector else [Echo] * 2
        with kind(source, One(), frames_per_batch=4) as collector:
            for given in ({"weight": torch.zeros(1, device="meta")}, {0: {"weight": torch.zeros(1, device="meta")}}):
                with pytest.raises(PolicyError, match="'weight' is on the meta device"):
                    collector.update_policy_weights_(given)
            assert collector.policy_version == 0
            assert versions(collector.next()) == {0}


def compiled(module):
    return torch.compile(module, backend="eager")


class Inner(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = compiled(net)

    def forward(self, observation):
        return self.net(observation)


class TestCompiledParts:
    def test_a_state_is_loaded_into_the_same_kind_of_collector(self):
        with MultiSyncCollector([Echo], Inner(nn.Linear(1, 1)), frames_per_batch=4) as collector:
            collector.load_state_dict(collector.state_dict())

    def test_a_lazy_one_begins_with_the_same_values_everywhere(self):
        policy = Inner(nn.LazyLinear(1))
        with two(policy=policy) as collector:
            batch = collector.next()
            assert torch.allclose(batch["action"], policy(batch["observation"]).detach())

    def test_a_function_that_uses_one_takes_its_state_dict(self):
        net = compiled(nn.Linear(1, 1))

        def policy(observation):
            return net(observation)

        with two(policy=policy) as collector:
            assert collector.update_policy_weights_(net.state_dict()) == 1


class TestCtrlC:
    def test_while_a_rollout_is_asked_for_it_is_counted(self):
        """With K = 0 a rollout that nobody counted would be made with weights that are too old."""
        options = {"frames_per_batch": 4, "max_policy_lag": 0, "total_frames": 24}
        with MultiAsyncCollector([Slow] * 3, One(), **options) as collector:
            submit, left = collector._crew.pool.submit, [2]

            def submitting(worker, command, **options):
                if isinstance(command, Collect) and left[0]:
                    left[0] -= 1
                    os.kill(os.getpid(), signal.SIGINT)
                return submit(worker, command, **options)

            collector._crew.pool.submit = submitting
            while not collector.exhausted:
                try:
                    collector.next()
                except KeyboardInterrupt:
                    continue
                collector.update_policy_weights_()
            assert collector.policy_lag == {0: 24}


class TestAnotherThread:
    @pytest.mark.filterwarnings("ignore::rlcollect.errors.WorkerRestarted")
    def test_publishes_while_a_worker_is_replaced(self):
        """By the pipes: nothing is raised, and no message comes before its worker is built."""
        options = {"on_worker_failure": "restart", "weight_sync_schemes": {"policy": MultiProcessWeightSyncScheme()}}
        with two(policy=One(), timeout=50, **options) as collector:
            errors, is_over = [], threading.Event()

            def publish():
                try:
                    while not is_over.is_set():
                        value = float(collector.policy_version + 1)
                        collector.update_policy_weights_({"weight": torch.full((1,), value)})
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=publish)
            thread.start()
            try:
                for _ in range(3):
                    (pid, *_) = collector.map_fn(lambda envs: os.getpid())
                    os.kill(pid, signal.SIGKILL)
                    for _ in range(3):
                        batch = collector.next()
                        columns = batch["collector", "policy_version"], batch["action"]
                        pairs = {*zip(*(column.flatten().tolist() for column in columns), strict=True)}
                        assert all(version == value for version, value in pairs), pairs
            finally:
                is_over.set()
                thread.join()
            assert not errors
