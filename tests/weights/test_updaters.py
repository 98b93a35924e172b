"""Weight updaters stand between `update_policy_weights_` and the workers; all of one push is one version."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlcollect import (
    Collector,
    MultiAsyncCollector,
    MultiProcessedWeightUpdate,
    MultiSyncCollector,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from rlcollect.errors import OptionError, PolicyError
from rlcollect.testing import Echo
from tests.weights.helpers import One

pytestmark = pytest.mark.timeout(60)
KINDS = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
kinds = pytest.mark.parametrize("kind", KINDS)
provided = pytest.mark.parametrize("updater", [VanillaWeightUpdater, MultiProcessedWeightUpdate])


class Inside(nn.Module):
    """The policy, one level down."""

    def __init__(self, value=0.0):
        super().__init__()
        self.actor = One(value)

    def forward(self, observation):
        return self.actor(observation)


def weights(value, name="weight"):
    return {name: torch.tensor([float(value)])}


def of_kind(kind, policy=None, **options):
    source = Echo if kind == "single" else [Echo, Echo]
    frames = 8 if kind == "sync" else 4
    policy = One() if policy is None else policy
    return KINDS[kind](source, policy, frames_per_batch=frames, record=("worker",), **options)


def acting(collector):
    """(version, action) of each worker from now on."""
    collector.wait_for_version(collector.policy_version, timeout=30)
    shown = {}
    newest = dict.fromkeys(range(collector.num_workers), 0)
    state = collector.state_dict()
    for worker in newest:
        newest[worker] = state.get(f"worker{worker}", state)["policy_version"]
    while {worker: version for worker, (version, _) in shown.items()} != newest:
        batch = collector.next()
        keys = (("collector", "worker"), ("collector", "policy_version"), "action")
        for worker, version, action in zip(*(batch[key].flatten().tolist() for key in keys), strict=True):
            shown[worker] = version, action
    return [shown[worker] for worker in sorted(shown)]


def everywhere(collector, version, action):
    return acting(collector) == [(version, action)] * collector.num_workers


class Noting(WeightUpdaterBase):
    """Sends to all, and notes what is asked of it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _sync_weights_with_worker(self, *, worker_id, server_weights):
        self.seen.append((worker_id, None if server_weights is None else float(server_weights["weight"])))
        for collector in self.collectors:
            collector.publish_weights(server_weights, worker_ids=worker_id)


class FromPolicy(VanillaWeightUpdater):
    """Is made for a policy."""

    @classmethod
    def from_policy(cls, policy):
        made = cls()
        made.policy = policy
        return made


@kinds
class TestTheOption:
    @provided
    def test_takes_an_updater_its_class_or_what_makes_one(self, kind, updater):
        forms = [updater(), updater, functools.partial(updater)]
        for given in forms[: 3 if kind == "single" else 1]:
            with of_kind(kind, weight_updater=given) as collector:
                assert isinstance(collector.weight_updater, updater)
                assert collector.weight_updater.collector is collector
                assert collector.update_policy_weights_(weights(5)) == 1
                assert everywhere(collector, 1, 5)

    def test_can_be_set_and_taken_away_later(self, kind):
        with of_kind(kind) as collector:
            assert collector.weight_updater is None
            collector.weight_updater = noting = Noting()
            assert collector.weight_updater is noting
            assert collector.update_policy_weights_(weights(5)) == 1
            assert noting.seen == [(None, 5)]
            assert everywhere(collector, 1, 5)
            collector.weight_updater = None
            assert collector.update_policy_weights_(weights(6)) == 2
            assert len(noting.seen) == 1
            assert everywhere(collector, 2, 6)


class TestWhatMakesOne:
    def test_is_asked_for_one_of_the_policy(self):
        policy = One()
        with of_kind("single", policy, weight_updater=FromPolicy) as collector:
            assert collector.weight_updater.policy is policy
        with of_kind("single", policy) as collector:
            collector.weight_updater = FromPolicy
            assert collector.weight_updater.policy is policy

    @pytest.mark.parametrize("wrong", [lambda: None, object, lambda: 3], ids=["none", "object", "number"])
    def test_has_to_make_one(self, wrong):
        with pytest.raises(OptionError, match=r"should be, or make, a WeightUpdaterBase"):
            of_kind("single", weight_updater=wrong)

    def test_has_to_be_callable(self):
        told = "weight_updater=3 should be, or make, a WeightUpdaterBase; 3 lacks push_weights"
        with pytest.raises(OptionError, match=told):
            of_kind("single", weight_updater=3)

    def test_has_to_say_how_a_worker_gets_weights(self):
        with pytest.raises(TypeError, match="_sync_weights_with_worker"):
            WeightUpdaterBase()


class TestHooks:
    def test_are_called_after_the_weights_were_sent(self):
        updater, seen = MultiProcessedWeightUpdate(), []
        with of_kind("single", weight_updater=updater) as collector:
            updater.register_post_hook(lambda: seen.append(collector.policy_version))
            collector.update_policy_weights_(weights(5))
            updater.push_weights(weights(6))
            assert seen == [1, 2]

    def test_are_not_called_for_an_update_that_is_refused(self):
        kept = TensorDict({"weight": torch.zeros(1)}, [])
        updater, seen = VanillaWeightUpdater(policy_weights=kept), []
        with of_kind("single", weight_updater=updater) as collector:
            updater.register_post_hook(lambda: seen.append(collector.policy_version))
            for given in (weights(5, "other"), {"weight": torch.ones(2)}):
                with pytest.raises(PolicyError):
                    collector.update_policy_weights_(given)
                with pytest.raises(PolicyError):
                    updater.push_weights(given)
            assert seen == []
            assert kept["weight"].item() == 0, "nor are copies kept of it"
            collector.update_policy_weights_(weights(5))
            assert seen == [1]
            assert kept["weight"].item() == 5


@kinds
class TestAPush:
    def test_without_weights_sends_those_of_the_policy(self, kind):
        policy = One()
        for updater in (VanillaWeightUpdater(), MultiProcessedWeightUpdate())[: 2 if kind == "single" else 1]:
            with of_kind(kind, policy, weight_updater=updater) as collector:
                policy.weight.data.fill_(7)
                assert collector.update_policy_weights_() == 1
                assert everywhere(collector, 1, 7)

    def test_can_be_made_by_the_updater_itself(self, kind):
        noting = Noting()
        with of_kind(kind, weight_updater=noting) as collector:
            noting.push_weights(weights(5))
            assert collector.policy_version == 1
            noting(weights(6))
            assert collector.policy_version == 2
            assert everywhere(collector, 2, 6)

    def test_calls_the_hooks_when_it_is_done(self, kind):
        updater, seen = MultiProcessedWeightUpdate(), []
        with of_kind(kind, weight_updater=updater) as collector:
            updater.register_post_hook(lambda: seen.append("first"))
            updater.register_post_hook(lambda: seen.append("second"))
            for number in range(1, 4):
                collector.update_policy_weights_(weights(number))
                assert seen == ["first", "second"] * number
            with pytest.raises(PolicyError):
                updater.push_weights({"other": torch.ones(1)})
            assert len(seen) == 6

    def test_that_raises_changes_nothing(self, kind):
        class Failing(MultiProcessedWeightUpdate):
            fails_at = 0

            def _sync_weights_with_worker(self, *, worker_id, server_weights):
                super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)
                if worker_id == self.fails_at:
                    raise LookupError("the server is gone")

        updater = Failing()
        with of_kind(kind, weight_updater=updater) as collector:
            for updater.fails_at in range(collector.num_workers):
                with pytest.raises(LookupError, match="the server is gone"):
                    collector.update_policy_weights_(weights(5))
                with pytest.raises(LookupError, match="the server is gone"):
                    updater.push_weights(weights(5))
            assert collector.policy_version == 0
            assert everywhere(collector, 0, 0)
            updater.fails_at = None
            assert collector.update_policy_weights_(weights(6)) == 1
            assert everywhere(collector, 1, 6)

    def test_that_does_not_fit_changes_nothing(self, kind):
        class Wrong(MultiProcessedWeightUpdate):
            def _sync_weights_with_worker(self, *, worker_id, server_weights):
                last = self.collector.num_workers - 1
                given = {"weight": torch.ones(2)} if worker_id == last else server_weights
                super()._sync_weights_with_worker(worker_id=worker_id, server_weights=given)

        with of_kind(kind, weight_updater=Wrong()) as collector:
            with pytest.raises(PolicyError, match="'weight' has shape"):
                collector.update_policy_weights_(weights(5))
            assert collector.policy_version == 0
            assert everywhere(collector, 0, 0)

    def test_that_sends_nothing_is_a_version_all_the_same(self, kind):
        class Idle(MultiProcessedWeightUpdate):
            def _skip_update(self, worker_id):
                return True

        with of_kind(kind, weight_updater=Idle()) as collector:
            assert collector.update_policy_weights_(weights(5)) == 1
            assert collector.policy_version == 1
            assert {action for _, action in acting(collector)} == {0}


@kinds
@provided
class TestWhatIsPushed:
    def test_may_be_a_module_or_a_tensordict(self, kind, updater):
        with of_kind(kind, weight_updater=updater) as collector:
            assert collector.update_policy_weights_(One(5)) == 1
            assert everywhere(collector, 1, 5)
            assert collector.update_policy_weights_(TensorDict.from_module(One(6))) == 2
            assert everywhere(collector, 2, 6)
            assert collector.update_policy_weights_(TensorDict(weights(7), [])) == 3
            assert everywhere(collector, 3, 7)


@kinds
class TestMapping:
    def test_may_begin_with_what_is_usual(self, kind):
        class Prefixing(MultiProcessedWeightUpdate):
            def _maybe_map_weights(self, policy_or_weights):
                mapped = super()._maybe_map_weights(policy_or_weights)
                return TensorDict({"actor": mapped}, []).float()

        with of_kind(kind, Inside(), weight_updater=Prefixing()) as collector:
            assert collector.update_policy_weights_(One(6).double()) == 1
            assert everywhere(collector, 1, 6)

    def test_gives_weights_the_names_and_types_that_the_workers_have(self, kind):
        class Prefixing(MultiProcessedWeightUpdate):
            def _maybe_map_weights(self, policy_or_weights):
                mapped = super()._maybe_map_weights(policy_or_weights)
                return None if mapped is None else {f"actor.{name}": each.float() for name, each in mapped.items()}

        with of_kind(kind, Inside(), weight_updater=Prefixing()) as collector:
            assert collector.update_policy_weights_({"weight": torch.tensor([5], dtype=torch.float64)}) == 1
            assert everywhere(collector, 1, 5)
            with pytest.raises(PolicyError, match=r"actor\.weight"):
                collector.update_policy_weights_({"actor.weight": torch.ones(1)})
            assert collector.policy_version == 1

    def test_is_given_what_a_getter_has(self, kind):
        server = {"value": 1}
        updater = VanillaWeightUpdater(weight_getter=lambda: weights(server["value"]))
        with of_kind(kind, weight_updater=updater) as collector:
            for server["value"] in (5, 6):
                collector.update_policy_weights_()
            assert everywhere(collector, 2, 6)
            collector.update_policy_weights_(weights(9))
            assert everywhere(collector, 3, 9)

    def test_is_kept_in_a_copy_too(self, kind):
        kept = TensorDict({"weight": torch.zeros(1)}, [])
        tensor = kept["weight"]
        with of_kind(kind, weight_updater=VanillaWeightUpdater(policy_weights=kept)) as collector:
            collector.update_policy_weights_(One(5))
            assert kept["weight"] is tensor
            assert tensor.item() == 5
            assert everywhere(collector, 1, 5)


class TestWorkersOfAPush:
    def test_are_all_of_the_collector_one_by_one(self):
        class Counting(MultiProcessedWeightUpdate):
            def _sync_weights_with_worker(self, *, worker_id, server_weights):
                own = {"weight": server_weights["weight"] + 10 * worker_id}
                super()._sync_weights_with_worker(worker_id=worker_id, server_weights=own)

        with of_kind("sync", weight_updater=Counting()) as collector:
            assert list(collector.weight_updater.all_worker_ids()) == [0, 1]
            assert collector.update_policy_weights_(weights(5)) == 1
            assert acting(collector) == [(1, 5), (1, 15)]

    def test_are_those_that_were_asked_for(self):
        with of_kind("sync", weight_updater=MultiProcessedWeightUpdate()) as collector:
            assert collector.update_policy_weights_(weights(5), worker_ids=1) == 1
            assert acting(collector) == [(0, 0), (1, 5)]
            assert collector.update_policy_weights_(weights(6), worker_ids=[0]) == 2
            assert acting(collector) == [(2, 6), (1, 5)]
            assert collector.update_policy_weights_(weights(7), worker_ids="cpu") == 3
            assert acting(collector) == [(3, 7), (3, 7)]

    def test_are_not_those_that_are_skipped(self):
        class Skipping(MultiProcessedWeightUpdate):
            skipped = 0

            def _skip_update(self, worker_id):
                return worker_id == self.skipped

        with of_kind("sync", weight_updater=Skipping()) as collector:
            assert collector.update_policy_weights_(weights(5)) == 1
            assert acting(collector) == [(0, 0), (1, 5)]
            collector.weight_updater.skipped = 1
            assert collector.update_policy_weights_(weights(6)) == 2
            assert acting(collector) == [(2, 6), (1, 5)]

    def test_are_those_that_have_a_copy(self):
        kept = {1: TensorDict({"weight": torch.zeros(1)}, [])}
        with of_kind("sync", weight_updater=MultiProcessedWeightUpdate(policy_weights=kept)) as collector:
            assert collector.update_policy_weights_(weights(5)) == 1
            assert acting(collector) == [(0, 0), (1, 5)]
            assert kept[1]["weight"].item() == 5


class TestSeveralCollectors:
    def test_of_one_updater_are_all_sent_to(self):
        updater = Noting()
        with of_kind("single", weight_updater=updater) as one, of_kind("single", weight_updater=updater) as other:
            assert updater.collectors == [one, other]
            with pytest.raises(OptionError, match="serves 2 collectors"):
                updater.collector  # noqa: B018 - a property
            updater.push_weights(weights(5))
            for collector in (one, other):
                assert everywhere(collector, 1, 5)

    def test_are_not_kept_alive(self):
        updater = Noting()
        collector = of_kind("single", weight_updater=updater)
        collector.shutdown()
        del collector
        gc.collect()
        assert updater.collectors == []
        assert updater.collector is None
