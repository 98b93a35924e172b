"""Weights by name: whose they are, and that compiling changes no name."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlcollect.weights.naming import copy_into, misfit, module_of, plain, tensors_of, weights_by_name, weights_of
from tests.weights.helpers import net

compiled = functools.partial(torch.compile, backend="eager")  # no code is made for it


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class Plain:
    def act(self, x):
        return x


class TestTheModule:
    def test_of_itself(self):
        model = net()
        assert module_of(model) is model

    @pytest.mark.parametrize("times", [1, 2])
    def test_that_was_compiled(self, times):
        model = other = Own()
        for _ in range(times):
            other = compiled(other)
        assert module_of(other) is model

    def test_of_a_method(self):
        model = Own()
        assert module_of(model.forward) is model
        assert module_of(compiled(model).forward) is model

    def test_of_a_method_that_was_compiled(self):
        model = Own()
        assert module_of(compiled(model.forward)) is model

    @pytest.mark.parametrize(
        "policy",
        [None, 3, lambda x: x, Plain().act, Plain(), functools.partial(net), len, compiled(lambda x: x)],
        ids=["None", "number", "function", "method", "object", "partial", "builtin", "compiled function"],
    )
    def test_there_is_none(self, policy):
        assert module_of(policy) is None


class TestNames:
    def test_are_those_of_what_is_not_compiled(self):
        assert plain("_orig_mod.0.weight") == "0.weight"
        assert plain("0._orig_mod.weight") == "0.weight"
        assert plain("0.weight") == "0.weight"

    def test_of_weights_that_a_policy_computes_with(self):
        model = net()
        for policy in (model, compiled(model), model.forward, nn.ModuleList([compiled(model)])[0]):
            assert [*weights_of(policy)] == [*model.state_dict()]

    def test_of_no_weights(self):
        assert weights_of(len) is None

    def test_of_parts_that_are_compiled(self):
        part = nn.Linear(2, 2)
        assert [*weights_of(nn.Sequential(compiled(part)))] == ["0.weight", "0.bias"]


class TestWeightsByName:
    @pytest.mark.parametrize(
        "form",
        [
            pytest.param(lambda model: model, id="module"),
            pytest.param(compiled, id="compiled module"),
            pytest.param(lambda model: model.forward, id="method"),
            pytest.param(lambda model: model.state_dict(), id="state dict"),
            pytest.param(lambda model: compiled(model).state_dict(), id="compiled state dict"),
            pytest.param(TensorDict.from_module, id="nested TensorDict"),
            pytest.param(lambda model: TensorDict.from_module(model).flatten_keys("."), id="flat TensorDict"),
            pytest.param(lambda model: TensorDict(model.state_dict()), id="TensorDict of a state dict"),
        ],
    )
    def test_are_the_same_in_any_form(self, form):
        model = net(4)
        named = weights_by_name(form(model))
        assert {*named} == {*model.state_dict()}
        assert all(named[name].data_ptr() == tensor.data_ptr() for name, tensor in model.state_dict().items())

    def test_buffers_that_no_state_dict_has_are_a_modules_too(self):
        model = nn.Module()
        model.register_buffer("own", torch.ones(1), persistent=False)
        assert [*weights_by_name(model)] == ["own"]


class TestTensorsOfAModule:
    def test_each_once(self):
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        other.weight = one.weight
        tensors = tensors_of(nn.Sequential(one, other))
        assert [*tensors] == ["0.weight", "0.bias", "1.bias"]
        assert tensors["1.bias"] is other.bias


class TestMisfit:
    def test_none(self):
        assert misfit({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.zeros(1)}, ["b"]) == ""

    def test_the_first_in_the_order_of_what_is_needed(self):
        needed = {"a": torch.ones(1), "b": torch.ones(1)}
        assert misfit({"odd": torch.ones(1)}, needed, []).startswith("'a'")
        assert misfit({"odd": torch.ones(1), "a": torch.ones(1)}, needed, []).startswith("'b'")


class TestCopying:
    def test_as_far_as_they_came(self):
        one, other = nn.Parameter(torch.zeros(2)), torch.zeros(2)
        copy_into({"one": one, "other": other}, {"one": torch.ones(2), "more": torch.ones(1)})
        assert one.tolist() == [1, 1]
        assert other.tolist() == [0, 0]
        assert one.is_leaf


@pytest.mark.parametrize(
    "make",
    [lambda c, m: c(m.forward), lambda c, m: c(c(m)), lambda c, m: c(m).forward],
    ids=["forward", "twice", "of it"],
)
def test_the_module_of_a_compiled_method_of_torchs_own(make):
    """Torch wraps methods of its own classes before it compiles them."""
    model = nn.Sequential(nn.Linear(2, 2))
    assert module_of(make(lambda each: torch.compile(each, backend="eager"), model)) is model
