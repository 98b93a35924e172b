"""`WeightsForm`: what weights a model takes, and the first thing in which others differ."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from rlcollect.errors import PolicyError
from rlcollect.layout import Leaf
from rlcollect.weights.form import WeightsForm, tied_names
from rlcollect.weights.strategy import WeightStrategy
from tests.weights.helpers import net

compiled = functools.partial(torch.compile, backend="eager")  # no code is made for it


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight


def with_own_buffer():
    module = nn.Linear(2, 2)
    module.register_buffer("own", torch.zeros(2), persistent=False)
    return module


class TestOfAModule:
    def test_parameters_and_buffers_by_name(self):
        form = WeightsForm.of_module(nn.BatchNorm1d(3))
        assert form.leaves == (
            Leaf(("weight",), (3,), torch.float32),
            Leaf(("bias",), (3,), torch.float32),
            Leaf(("running_mean",), (3,), torch.float32),
            Leaf(("running_var",), (3,), torch.float32),
            Leaf(("num_batches_tracked",), (), torch.int64),
        )

    def test_what_is_tied_is_there_once(self):
        form = WeightsForm.of_module(Tied())
        assert [leaf.key for leaf in form.leaves] == [("one.weight",)]
        assert {*form.names} == {"one.weight", "other.weight"}
        assert form.tied == {"other.weight": "one.weight"}

    def test_buffers_that_no_state_dict_has_are_weights(self):
        form = WeightsForm.of_module(with_own_buffer())
        assert Leaf(("own",), (2,), torch.float32) in form.leaves
        assert "own" not in form.names

    def test_what_has_no_values_yet_is_left_out(self):
        form = WeightsForm.of_module(nn.LazyLinear(2))
        assert form.leaves == ()
        assert {*form.names} == {"weight", "bias"}

    def test_names_are_those_of_what_is_not_compiled(self):
        module = nn.Sequential(nn.Linear(2, 3))
        assert WeightsForm.of_module(compiled(module)) == WeightsForm.of_module(module)
        inner = nn.Sequential(compiled(module[0]))
        assert WeightsForm.of_module(inner) == WeightsForm.of_module(module)


def common(*forms):
    return WeightsForm.common(forms, "policies", "worker")


class TestWhatSeveralHaveInCommon:
    def test_is_the_form_of_the_first(self):
        forms = [WeightsForm.of_module(net(value)) for value in range(3)]
        assert common(*forms) is forms[0]
        assert common(forms[1]) is forms[1]

    @pytest.mark.parametrize(
        ("other", "told"),
        [
            (
                nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)),
                r"'1\.weight' of .*: '1\.weight' \[4, 3\] float32 where that has '1\.weight' \[1, 3\] float32",
            ),
            (
                nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).half()),
                r"'1\.weight' of .*: '1\.weight' \[1, 3\] float16 where that has '1\.weight' \[1, 3\] float32",
            ),
            (nn.Sequential(nn.Linear(2, 3)), r"'1\.weight' of .*: it has none where that has '1\.weight' \[1, 3\]"),
            (
                nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)),
                r"'1\.bias' of .*: it has none where that has '1\.bias' \[1\]",
            ),
            (
                nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)),
                r"'2\.weight' of .*: '2\.weight' \[1, 1\] float32 where that has none",
            ),
        ],
        ids=["shape", "dtype", "fewer", "a lack", "more"],
    )
    def test_where_one_differs_the_first_difference_is_said(self, other, told):
        form = WeightsForm.of_module(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        whose = "All workers need policies with the same weights; "
        with pytest.raises(PolicyError, match=f"^{whose}{told}") as raised:
            common(form, form, WeightsForm.of_module(other))
        assert "of worker 2's differs from that of worker 0's: " in str(raised.value)

    def test_the_order_is_no_difference(self):
        tensors = {"a": torch.ones(1), "b": torch.ones(2)}
        form = WeightsForm.of(tensors)
        assert common(form, WeightsForm.of(dict([*tensors.items()][::-1]))) is form


class TestFitting:
    def form(self, **options):
        tensors = {"a": torch.ones(2), "n": torch.ones((), dtype=torch.int64)}
        return WeightsForm.of(tensors, **{"names": ["a", "n"], **options})

    def given(self, **others):
        return {"a": torch.zeros(2), "n": torch.tensor(1), **others}

    def test_what_fits_is_given_back(self):
        given = {**self.given(), "a": nn.Parameter(torch.zeros(2))}
        fitted = self.form().fitted(given, "it")
        assert [*fitted] == ["a", "n"]
        assert fitted["a"].data_ptr() == given["a"].data_ptr()
        assert not fitted["a"].requires_grad

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"n": torch.tensor(1)}, "'a' is lacking"),
            ({"a": torch.zeros(3), "n": torch.tensor(1)}, r"'a' has shape \[3\], and should have \[2\]"),
            ({"a": torch.zeros(2), "n": torch.tensor(1.0)}, r"'n' is of torch.float32, which cannot be cast"),
            ({"a": torch.zeros(2), "n": torch.tensor(1), "odd": torch.ones(1)}, "'odd' is none"),
            ({"a": nn.UninitializedParameter(), "n": torch.tensor(1)}, "'a' has no values yet"),
        ],
        ids=["lacking", "shape", "dtype", "unknown", "lazy"],
    )
    def test_the_first_difference_is_said(self, given, said):
        with pytest.raises(PolicyError, match=f"do not fit the actor's: {said}.*Nothing was changed"):
            self.form().fitted(given, "the actor's")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool], ids=str)
    def test_what_can_be_cast_fits(self, dtype):
        assert torch.can_cast(dtype, torch.float32)
        assert self.form().fitted(self.given(a=torch.zeros(2).to(dtype)), "it")["a"].dtype == dtype

    @pytest.mark.parametrize(
        ("dtype", "to"), [(torch.float32, torch.int64), (torch.complex64, torch.float32), (torch.int64, torch.bool)]
    )
    def test_what_would_lose_its_kind_does_not(self, dtype, to):
        assert not torch.can_cast(dtype, to)
        form = WeightsForm.of({"a": torch.ones(2, dtype=to)}, names=["a"])
        with pytest.raises(PolicyError, match=f"{dtype}, which cannot be cast to {to}"):
            form.fitted({"a": torch.ones(2, dtype=dtype)}, "it")

    def test_what_no_state_dict_has_may_lack(self):
        module = with_own_buffer()
        form = WeightsForm.of_module(module)
        assert {*form.fitted(module.state_dict(), "it")} == {"weight", "bias"}
        assert {*form.fitted({**module.state_dict(), "own": torch.ones(2)}, "it")} == {"weight", "bias", "own"}

    def test_what_the_model_keeps_may_be_given_and_is_not_sent(self):
        fitted = self.form(kept=["count"]).fitted(self.given(count=torch.ones(7)), "it")
        assert [*fitted] == ["a", "n"]

    def test_names_that_are_known_may_be_given(self):
        fitted = self.form(names=["a", "n", "extra"]).fitted(self.given(extra=torch.ones(7)), "it")
        assert [*fitted] == ["a", "n"]

    def test_no_weights_at_all(self):
        assert WeightsForm().fitted({}, "it") == {}


class TestTiedNames:
    def test_of_a_module(self):
        module = nn.ModuleDict({"a": Tied(), "b": nn.Linear(2, 2)})
        assert tied_names(module) == {"a.other.weight": "a.one.weight"}

    def test_that_are_equal_fit(self):
        module = Tied()
        form = WeightsForm.of_module(module)
        assert [*form.fitted(module.state_dict(), "it")] == ["one.weight"]
        apart = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        assert [*form.fitted(apart, "it")] == ["one.weight"]
        assert [*form.fitted({**apart, "other.weight": apart["other.weight"].double()}, "it")] == ["one.weight"]

    def test_may_lack(self):
        module = Tied()
        named = module.state_dict()
        del named["other.weight"]
        assert [*WeightsForm.of_module(module).fitted(named, "it")] == ["one.weight"]

    def test_that_differ_do_not_fit(self):
        module = Tied()
        form, other = WeightsForm.of_module(module), copy.deepcopy(module).state_dict()
        other["other.weight"] = other["one.weight"] + 1
        with pytest.raises(PolicyError, match=r"'other\.weight' and 'one\.weight' differ, and are one tensor there"):
            form.fitted(other, "it")

    def test_of_another_shape_do_not_fit(self):
        module = Tied()
        named = {**module.state_dict(), "other.weight": torch.ones(3)}
        with pytest.raises(PolicyError, match=r"'other\.weight' and 'one\.weight' differ"):
            WeightsForm.of_module(module).fitted(named, "it")


class TestCrossing:
    def test_it_is_the_same_elsewhere(self):
        form = WeightsForm.of_module(net())
        assert pickle.loads(pickle.dumps(form)) == form


class TestExtraState:
    def test_is_none_of_a_modules_weights(self):
        model = Extra(2, 2)
        form = WeightsForm.of_module(model)
        for given in (model, model.state_dict()):
            for extract_as in ("tensordict", "state_dict"):
                fitted = form.fitted(WeightStrategy(extract_as).named(given), "it")
                assert fitted.keys() == {"weight", "bias"}
        assert WeightStrategy("state_dict").extract_weights(model).keys() == {"weight", "bias"}


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def test_tied_names_that_begin_at_the_same_address_and_differ():
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    weight = torch.arange(4.0).reshape(2, 2)
    with pytest.raises(PolicyError, match="differ"):
        WeightsForm.of_module(module).fitted({"a.weight": weight, "b.weight": weight.T}, "it")
