"""Faults that weights have had elsewhere (FAULTS.md), as far as other tests do not show them."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlcollect import Collector, MultiSyncCollector
from rlcollect.testing import Counter, Echo
from tests.weights.helpers import One

pytestmark = pytest.mark.timeout(60)


class Spread(One):
    """Acts as its parameter, and a draw beside it."""

    def forward(self, observation):
        return self.weight + 0.1 * torch.randn(observation.shape)


class Running(nn.Module):
    """Counts, sums and squares all that it sees; and has the statistics of torch's own layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=None)
        for name in ("count", "sum", "squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, observation):
        self.norm(observation)
        self.count += observation.numel()
        self.sum += observation.sum()
        self.squares += (observation**2).sum()
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Dropping(nn.Module):
    """Acts as the share of ones that a dropout leaves of many."""

    def __init__(self):
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, observation):
        return (self.drop(torch.ones(64)) > 0).float().mean().expand(observation.shape)


class TestFault42WhoSharesParametersWithWhom:
    def test_in_one_process_a_step_of_the_optimiser_acts_at_once(self):
        """Unlike in worker processes, where it acts when it is published."""
        policy = One(5)
        optimiser = torch.optim.SGD(policy.parameters(), lr=1.0)
        with Collector(Echo, policy, frames_per_batch=4) as collector:
            assert (collector.next()["action"] == 5).all()
            policy(torch.zeros(1)).sum().backward()
            optimiser.step()
            batch = collector.next()
            assert (batch["action"] == 4).all()
            assert (batch["collector", "policy_version"] == 0).all(), "nobody said that these are new"
            assert collector.update_policy_weights_() == 1
            assert (collector.next()["collector", "policy_version"] == 1).all()


class TestFault43CompiledPolicies:
    def test_of_workers_draw_anew_keep_what_was_delivered_and_take_weights(self):
        options = {"frames_per_batch": 32, "compile_policy": {"backend": "eager"}}
        with MultiSyncCollector([Echo], Spread(), **options) as collector:
            first = collector.next()
            kept = first.clone()
            assert first["action"].std() > 0.01
            assert len(set(first["action"].flatten().tolist())) == 32
            collector.update_policy_weights_({"weight": torch.tensor([100.0])})
            second = collector.next()
            assert (second["action"] > 90).all()
            assert len(set(second["action"].flatten().tolist())) == 32
            assert (first == kept).all()


class TestFault85Modes:
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_are_the_callers_and_left_alone(self, training):
        policy = Dropping().train(training)
        policy.other.train(not training)  # one of its own
        with Collector(Echo, policy, frames_per_batch=16) as collector:
            for _ in range(2):
                shares = collector.next()["action"]
                assert bool(((shares > 0) & (shares < 1)).all()) is training
                collector.update_policy_weights_()
                collector.update_policy_weights_(Dropping().train(not training))
                assert (policy.training, policy.drop.training, policy.other.training) == (
                    training,
                    training,
                    not training,
                )
            policy.train(not training)
            shares = collector.next()["action"]
            assert bool(((shares > 0) & (shares < 1)).all()) is not training


class TestFault99RunningStatistics:
    def test_over_lanes_are_the_pooled_ones(self):
        policy = Running()
        lengths = (3, 5, 7, 11)
        with Collector([Counter(length) for length in lengths], policy, frames_per_batch=80) as collector:
            seen = torch.cat([collector.next()["observation"] for _ in range(3)], 1).double()
        assert policy.count == seen.numel() == 240, "the calls at construction are not in it"
        assert policy.sum == seen.sum()
        assert policy.squares == (seen**2).sum()
        assert policy.norm.num_batches_tracked == 60
        torch.testing.assert_close(policy.norm.running_mean.double(), seen.mean().reshape(1))
        torch.testing.assert_close(policy.norm.running_var.double(), seen.var(0).mean().reshape(1), rtol=1e-4, atol=0)

    def test_are_in_the_state(self):
        policy = Running()
        with Collector([Counter(3), Counter(5)], policy, frames_per_batch=8) as collector:
            collector.next()
            state = collector.state_dict()
        other = Running()
        with Collector([Counter(3), Counter(5)], other, frames_per_batch=8) as collector:
            collector.load_state_dict(state)
        assert other.count == policy.count == 8
        assert other.sum == policy.sum


WRAPS = {
    "plain": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "method": lambda module: module.forward,
    "compiled method": lambda module: torch.compile(module.forward, backend="eager"),
    "TensorDictModule": lambda module: TensorDictModule(module, ["observation"], ["action"]),
    "compiled TensorDictModule": lambda module: torch.compile(
        TensorDictModule(module, ["observation"], ["action"]), backend="eager"
    ),
}


class TestFault107StatesOfWrappedPolicies:
    @pytest.mark.parametrize("wrap", WRAPS)
    @pytest.mark.parametrize("other", ["same", "not compiled"])
    def test_hold_the_weights_and_load_back(self, wrap, other):
        name = wrap if other == "same" else wrap.removeprefix("compiled ").replace("compiled", "plain")
        with Collector(Echo, WRAPS[wrap](One(5)), frames_per_batch=4) as collector:
            collector.update_policy_weights_()
            state = copy.deepcopy(collector.state_dict())
        assert [tensor.tolist() for tensor in state["policy_state_dict"].values()] == [[5.0]]
        assert not any("_orig_mod" in key for key in state["policy_state_dict"])
        module = One(0)
        with Collector(Echo, WRAPS[name](module), frames_per_batch=4) as collector:
            collector.load_state_dict(state)
            assert module.weight.item() == 5
            batch = collector.next()
            assert (batch["action"] == 5).all()
            assert (batch["collector", "policy_version"] == 1).all()
