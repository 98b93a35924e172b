"""Policies that are no modules and hold some: their weights arrive in workers too."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlcollect import MultiAsyncCollector, MultiSyncCollector, PolicyError
from rlcollect.testing import Echo
from rlcollect.weights.held import held_modules

pytestmark = pytest.mark.timeout(60)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 1)


everywhere = Value()
net = Value()  # an attribute of the same name is another


def by_global(observation):
    return everywhere(observation)


class Holder:
    def __init__(self):
        self.net = Value()
        self.parts = {"number": 3, "text": "x"}

    def __call__(self, observation):
        return self.net(observation)

    def act(self, observation):
        return self.net(observation)


def closing():
    value = Value()
    return (lambda observation: value(observation)), value  # noqa: PLW0108 - a function is what is meant


def given(value, observation):
    return value(observation)


def policies():
    function, value = closing()
    yield "closure", function, value
    yield "global", by_global, everywhere
    holder = Holder()
    yield "object", holder, holder.net
    holder = Holder()
    yield "method", holder.act, holder.net
    value = Value()
    yield "partial", functools.partial(given, value), value
    function, value = closing()
    yield "in a TensorDictModule", TensorDictModule(function, ["observation"], ["action"]), value
    function, value = closing()
    yield "function of a function", lambda observation: function(observation), value  # noqa: PLW0108


POLICIES = [pytest.param(policy, value, id=name) for name, policy, value in policies()]


@pytest.mark.parametrize(("policy", "value"), POLICIES)
def test_each_is_found_once(policy, value):
    assert list(held_modules(policy).values()) == [value]


def test_a_module_holds_none():
    assert held_modules(Value()) == {}
    assert held_modules(nn.Sequential(Value())) == {}
    assert held_modules(None) == {}


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(("policy", "value"), POLICIES)
def test_weights_arrive(kind, policy, value):
    with torch.no_grad():
        value.value.fill_(0.5)
    with kind([Echo], policy, frames_per_batch=4) as collector:
        assert (collector.next()["action"] == 0.5).all()
        with torch.no_grad():
            value.value.fill_(0.25)
        collector.update_policy_weights_()
        for batch in (collector.next() for _ in range(4)):
            version = batch["collector", "policy_version"].unique().item()
            assert (batch["action"] == (0.25 if version else 0.5)).all()
        assert version == 1


def test_the_module_itself_may_be_given():
    function, value = closing()
    with MultiSyncCollector([Echo], function, frames_per_batch=4) as collector:
        other = Value()
        with torch.no_grad():
            other.value.fill_(0.75)
        for form in (other, other.state_dict()):
            collector.update_policy_weights_(form)
            assert (collector.next()["action"] == 0.75).all()
            collector.update_policy_weights_(value)
            assert (collector.next()["action"] == 0.0).all()
        with pytest.raises(PolicyError, match=r"'value.value' is lacking"):
            collector.update_policy_weights_(nn.Linear(1, 1))
