"""`WeightStrategy`: what of a model travels, and how it is put into another."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlcollect.errors import OptionError, PolicyError
from rlcollect.weights.strategy import WeightStrategy
from tests.weights.helpers import filled, net, numbers_in

FORMS = ["tensordict", "state_dict"]


class Nested(nn.Module):
    """A net in a net, with a buffer of each kind."""

    def __init__(self, value):
        super().__init__()
        self.inner = net()
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        filled(self, value)


class Tied(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        filled(self, value)


class TestExtracting:
    def test_a_nested_tensordict_of_parameters_and_buffers(self):
        weights = WeightStrategy("tensordict").extract_weights(Nested(1))
        assert isinstance(weights, TensorDict)
        assert weights.batch_size == torch.Size([])
        assert weights["inner", "0", "weight"].shape == (3, 2)
        assert {*weights.flatten_keys(".").keys()} == {*Nested(1).state_dict(), "cache"}

    def test_a_state_dict_has_what_the_modules_own_has(self):
        model = Nested(1)
        weights = WeightStrategy("state_dict").extract_weights(model)
        assert type(weights) is dict
        assert {*weights} == {*model.state_dict()}
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("form", FORMS)
    def test_they_share_memory_and_no_graph(self, form):
        model = net(1)
        weights = WeightStrategy(form).extract_weights(model)
        filled(model, 2)
        tensors = [*weights.values(include_nested=True, leaves_only=True)] if form == "tensordict" else weights.values()
        assert {number for tensor in tensors for number in tensor.flatten().tolist()} == {2}
        assert not any(tensor.requires_grad for tensor in tensors)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        "given",
        [
            pytest.param(TensorDict.from_module, id="nested TensorDict"),
            pytest.param(lambda model: TensorDict.from_module(model).flatten_keys("."), id="flat TensorDict"),
            pytest.param(functools.partial(TensorDict.from_module, as_module=True), id="TensorDictParams"),
            pytest.param(lambda model: model.state_dict(), id="state dict"),
        ],
    )
    def test_of_weights_as_they_are(self, form, given):
        strategy = WeightStrategy(form)
        weights = strategy.extract_weights(given(net(3)))
        model = net(1)
        strategy.apply_weights(model, weights)
        assert numbers_in(model) == {3}

    def test_names_that_are_tied_are_all_there(self):
        assert {*WeightStrategy("state_dict").extract_weights(Tied(1))} == {"one.weight", "other.weight"}

    @pytest.mark.parametrize("given", [3, [torch.ones(1)], "weights", None], ids=repr)
    def test_of_something_else(self, given):
        with pytest.raises(PolicyError, match=type(given).__name__):
            WeightStrategy().extract_weights(given)

    def test_of_what_holds_no_tensors(self):
        with pytest.raises(PolicyError, match=r"'a' is 1\.0"):
            WeightStrategy().extract_weights({"a": 1.0})


class TestApplying:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("make", [Nested, Tied, net], ids=lambda one: one.__name__)
    def test_gives_a_module_what_was_extracted(self, form, make):
        strategy, model = WeightStrategy(form), make(1)
        strategy.apply_weights(model, strategy.extract_weights(make(2)))
        own = {1, 2} if form == "state_dict" and make is Nested else {2}
        assert numbers_in(model) == own

    def test_buffers_that_no_state_dict_has_stay_as_they_were(self):
        strategy, model = WeightStrategy("state_dict"), Nested(1)
        for value, given in ((2, strategy.extract_weights(Nested(2))), (3, Nested(3))):
            strategy.apply_weights(model, given)
            assert model.cache.tolist() == [1, 1]
            assert model.scale.tolist() == [value, value]

    @pytest.mark.parametrize("form", FORMS)
    def test_tensors_stay_the_objects_that_they_are(self, form):
        strategy, model = WeightStrategy(form), net(1)
        before = [*model.parameters(), *model.buffers()]
        optimizer = torch.optim.SGD(model.parameters())
        strategy.apply_weights(model, net(2))
        after = [*model.parameters(), *model.buffers()]
        assert all(one is other for one, other in zip(before, after, strict=True))
        assert numbers_in(model) == {2}
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())

    def test_to_a_tensordict(self):
        destination = TensorDict.from_module(net(1)).data.clone()
        weight = destination["0", "weight"]
        WeightStrategy().apply_weights(destination, net(2))
        assert destination["0", "weight"] is weight
        assert weight.unique().tolist() == [2]

    def test_to_the_module_of_a_method(self):
        model = net(1)
        WeightStrategy().apply_weights(model.forward, net(2))
        assert numbers_in(model) == {2}

    def test_casts_to_the_precision_that_is_there(self):
        model = net(1)
        WeightStrategy().apply_weights(model, net(2).double())
        assert numbers_in(model) == {2}
        assert model[0].weight.dtype == torch.float32

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("1.running_var", None, "'1.running_var' is lacking"),
            ("1.running_var", torch.ones(4), r"'1.running_var' has shape \[4\]"),
            ("1.num_batches_tracked", torch.tensor(1.5), "'1.num_batches_tracked' is of torch.float32"),
            ("2.weight", torch.ones(1), "'2.weight' is none"),
        ],
        ids=["lacking", "shape", "dtype", "unknown"],
    )
    def test_nothing_is_half_applied(self, form, name, value, said):
        weights = {**net(2).state_dict(), name: value}
        if value is None:
            del weights[name]
        model = net(1)
        with pytest.raises(PolicyError, match=said):
            WeightStrategy(form).apply_weights(model, weights)
        assert numbers_in(model) == {1}


class TestWhatItIsCalled:
    def test_in_words(self):
        assert repr(WeightStrategy("state_dict")) == "WeightStrategy('state_dict')"

    def test_a_form_that_there_is_not(self):
        with pytest.raises(OptionError, match="'numpy'"):
            WeightStrategy("numpy")
