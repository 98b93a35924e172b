"""Distributions without a TensorDict: bit for bit what tensordict's module gives, draws included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.distributions import Delta, TruncatedNormal
from tensordict.nn.distributions import OneHotCategorical as OneHotOfTensordict
from torch import distributions as D
from torch import nn

from rlcollect import ExplorationType
from rlcollect.rollout.policy.distributions import distribution_call
from tests.rollout.helpers import DISCRETE, bits, collect, collecting, leaf_keys, received

CONTINUOUS = spaces.Box(-5, 5, (2,), np.float32)
SHAPES = [(), (1,), (3,), (16,), (2, 3), (4, 2, 3)]
every_type = pytest.mark.parametrize("exploration", list(InteractionType), ids=lambda kind: kind.name.lower())
with_and_without_score = pytest.mark.parametrize("scored", [False, True], ids=["sample", "with log-probability"])


class Case(NamedTuple):
    """A distribution, and parameters for it: from a shape to tensors by name."""

    kind: Callable[..., D.Distribution]
    params: Callable[[tuple[int, ...]], dict[str, torch.Tensor]]
    kwargs: Mapping[str, Any] = MappingProxyType({})


def logits(shape, wide=5, dtype=torch.float32):
    return {"logits": torch.randn(*shape, wide).to(dtype)}


def probs(shape):
    return {"probs": torch.rand(*shape, 5) + 0.1}


def gaussian(shape, wide=3, dtype=torch.float32):
    return {"loc": torch.randn(*shape, wide).to(dtype), "scale": (torch.rand(*shape, wide) + 0.1).to(dtype)}


def masked(shape):
    """Some actions are forbidden, not all."""
    forbidden = torch.rand(*shape, 5) < 0.5
    forbidden[..., 2] = False
    return {"logits": torch.randn(*shape, 5).masked_fill(forbidden, -torch.inf)}


def independent(loc, scale):
    return D.Independent(D.Normal(loc, scale), 1)


CASES = {
    # written out
    "Categorical": Case(D.Categorical, logits),
    "Categorical of one": Case(D.Categorical, lambda shape: logits(shape, 1)),
    "Categorical of many": Case(D.Categorical, lambda shape: logits(shape, 300)),
    "Categorical, some forbidden": Case(D.Categorical, masked),
    "Categorical of float64": Case(D.Categorical, lambda shape: logits(shape, dtype=torch.float64)),
    "Categorical of float16": Case(D.Categorical, lambda shape: logits(shape, dtype=torch.float16)),
    "Categorical of bfloat16": Case(D.Categorical, lambda shape: logits(shape, dtype=torch.bfloat16)),
    "Categorical, strided": Case(D.Categorical, lambda shape: {"logits": torch.randn(*shape, 10)[..., ::2]}),
    "Categorical, transposed": Case(D.Categorical, lambda shape: {"logits": torch.randn(5, *shape).movedim(0, -1)}),
    "Categorical, expanded": Case(D.Categorical, lambda shape: {"logits": torch.randn(5).expand(*shape, 5)}),
    "Normal": Case(D.Normal, gaussian),
    "Normal of many": Case(D.Normal, lambda shape: gaussian(shape, 64)),
    "Normal, scale first": Case(D.Normal, lambda shape: dict(reversed(gaussian(shape).items()))),
    "Normal of float64": Case(D.Normal, lambda shape: gaussian(shape, dtype=torch.float64)),
    "Normal of bfloat16": Case(D.Normal, lambda shape: gaussian(shape, dtype=torch.bfloat16)),
    "Normal of two dtypes": Case(
        D.Normal, lambda shape: {"loc": torch.randn(*shape, 3), "scale": torch.rand(*shape, 3).double() + 0.1}
    ),
    "Normal, transposed": Case(
        D.Normal, lambda shape: {**gaussian(shape, 30), "loc": torch.randn(30, *shape).movedim(0, -1)}
    ),
    "Normal, scale of one": Case(D.Normal, lambda shape: {**gaussian(shape), "scale": torch.rand(*shape, 1) + 0.1}),
    "Normal, loc of one": Case(D.Normal, lambda shape: {**gaussian(shape), "loc": torch.randn(*shape, 1)}),
    # built
    "Categorical of probs": Case(D.Categorical, probs),
    "Normal with its scale": Case(D.Normal, lambda shape: {"loc": torch.randn(*shape, 3)}, {"scale": 0.5}),
    "Normal, checked": Case(D.Normal, gaussian, {"validate_args": True}),
    "Categorical, checked": Case(D.Categorical, logits, {"validate_args": True}),
    "Categorical, not checked": Case(D.Categorical, logits, {"validate_args": False}),
    "Independent": Case(independent, gaussian),
    "Bernoulli": Case(D.Bernoulli, logits),
    "Bernoulli of probs": Case(D.Bernoulli, lambda shape: {"probs": torch.rand(*shape, 3)}),
    "OneHotCategorical": Case(D.OneHotCategorical, logits),
    "OneHotCategorical of tensordict": Case(OneHotOfTensordict, logits),
    "TruncatedNormal": Case(TruncatedNormal, gaussian, {"a": -9.0, "b": 9.0}),
    "Delta": Case(Delta, lambda shape: {"param": torch.randn(*shape, 3)}),
    "Beta": Case(
        D.Beta, lambda shape: {f"concentration{i}": torch.rand(*shape, 3) + 1.5 for i in range(2)}
    ),
    "Laplace": Case(D.Laplace, gaussian),
    "LogNormal": Case(D.LogNormal, gaussian),
    "Uniform": Case(D.Uniform, lambda shape: {"low": torch.randn(*shape, 3), "high": torch.rand(*shape, 3) + 5}),
    "MultivariateNormal": Case(
        D.MultivariateNormal, lambda shape: {"loc": torch.randn(*shape, 3)}, {"covariance_matrix": torch.eye(3)}
    ),
}  # fmt: skip


def module_of(case, scored, params):
    return ProbabilisticTensorDictModule(
        list(params),
        ["action"],
        distribution_class=case.kind,
        distribution_kwargs=dict(case.kwargs),
        return_log_prob=scored,
    )


def raw(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def asked(call):
    """What a call gives under one seed, and what is drawn after it; None where it refuses."""
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            values = call()
    except (NotImplementedError, ValueError, RuntimeError):
        return None
    return [raw(value) for value in (*values, torch.rand(3))]


def asked_with_tensordict(module, params, shape, exploration, scored):
    keys = ["action", *(["action_log_prob"] if scored else [])]
    data = TensorDict(params, shape)
    with set_interaction_type(exploration):
        return asked(lambda: taken(module(data), keys))


def taken(data, keys):
    return [data[key] for key in keys]


def asked_directly(module, params, exploration, scored):
    call = distribution_call(module, exploration, atomic=False).call
    assert callable(call)
    return asked(lambda: call(*params.values()) if scored else [call(*params.values())])


class TestTheSameBits:
    """Sample, log-probability, and the draws that were used up."""

    @every_type
    @with_and_without_score
    @pytest.mark.parametrize("name", sorted(CASES))
    def test_as_the_module_in_every_shape(self, name, scored, exploration):
        case, refused = CASES[name], 0
        for number, shape in enumerate(SHAPES):
            torch.manual_seed(number)
            params = case.params(shape)
            module = module_of(case, scored, params)
            expected = asked_with_tensordict(module, params, shape, exploration, scored)
            if expected is None:
                refused += 1  # and then nothing is promised, see below
                continue
            assert asked_directly(module, params, exploration, scored) == expected, shape
        assert not (refused and exploration in (InteractionType.RANDOM, InteractionType.DETERMINISTIC))

    @pytest.mark.parametrize("kind", [D.Categorical, D.Normal, D.Bernoulli, independent])
    def test_what_a_distribution_lacks_is_refused_as_the_module_refuses_it(self, kind):
        params = gaussian((3,)) if kind in (D.Normal, independent) else logits((3,))
        module = module_of(Case(kind, lambda _: params), False, params)
        with pytest.raises(NotImplementedError, match="median is not implemented"):
            distribution_call(module, InteractionType.MEDIAN, atomic=False).call(*params.values())

    def test_of_a_scalar(self):
        """No dimension at all, as a single lane with a Box of shape () has."""
        params = {"loc": torch.tensor(0.3), "scale": torch.tensor(0.2)}
        module = module_of(Case(D.Normal, gaussian), True, params)
        for exploration in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
            expected = asked_with_tensordict(module, params, (), exploration, True)
            assert expected == asked_directly(module, params, exploration, True)

    def test_parameters_by_other_names(self):
        """A mapping of in_keys says which parameter is which; their order is that of the keys."""
        module = ProbabilisticTensorDictModule(
            {"scale": "spread", "loc": ("pi", "mean")}, ["action"], distribution_class=D.Normal, return_log_prob=True
        )
        params = gaussian((4,))
        data = TensorDict({"spread": params["scale"], "pi": {"mean": params["loc"]}}, [4])
        call = distribution_call(module, InteractionType.RANDOM, atomic=False).call
        with set_interaction_type(InteractionType.RANDOM):
            expected = asked(lambda: taken(module(data), ["action", "action_log_prob"]))
        assert asked(lambda: call(params["scale"], params["loc"])) == expected

    @pytest.mark.parametrize("change", ["in place", "replaced"])
    def test_keyword_arguments_that_change_are_seen_in_the_next_batch(self, change):
        """As a scale is that a schedule lowers."""
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(lambda o: o[..., :2], ["observation"], ["loc"]),
            ProbabilisticTensorDictModule(
                ["loc"],
                ["action"],
                distribution_class=D.Normal,
                distribution_kwargs={"scale": 1.0},
                return_log_prob=True,
            ),
        )
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            for scale in (1.0, 1e-3, 0.5):
                if change == "in place":
                    policy.module[1].distribution_kwargs["scale"] = scale
                else:
                    policy.module[1].distribution_kwargs = {"scale": scale}
                batch = collector.next()
                expected = D.Normal(batch["loc"], scale).log_prob(batch["action"])
                assert torch.allclose(batch["action_log_prob"], expected, rtol=1e-3)

    @pytest.mark.parametrize("name", ["Categorical", "Normal"])
    def test_parameters_are_left_as_they_are(self, name):
        params = CASES[name].params((3,))
        before = {key: value.clone() for key, value in params.items()}
        for exploration in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
            asked_directly(module_of(CASES[name], True, params), params, exploration, True)
        assert all(torch.equal(value, before[key]) for key, value in params.items())


class TestTorchsChecks:
    """`validate_args=True` is the user's word; without it they are left out, at each call, of torch's own kinds."""

    WRONG: ClassVar = {
        "NaN logits": (D.Categorical, {"logits": torch.full((3, 4), torch.nan)}),
        "NaN loc": (D.Normal, {"loc": torch.full((3, 2), torch.nan), "scale": torch.ones(3, 2)}),
        "negative scale": (D.Normal, {"loc": torch.zeros(3, 2), "scale": -torch.ones(3, 2)}),
        "NaN logits of bits": (D.Bernoulli, {"logits": torch.full((3, 4), torch.nan)}),
    }

    @pytest.mark.parametrize("exploration", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
    @with_and_without_score
    @pytest.mark.parametrize("name", sorted(WRONG))
    def test_are_made_when_asked_for(self, name, scored, exploration):
        kind, params = self.WRONG[name]
        module = module_of(Case(kind, logits, {"validate_args": True}), scored, params)
        call = distribution_call(module, exploration, atomic=False).call
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            call(*params.values())

    def test_of_a_value_that_is_none(self):
        """The mean of bits is no bit."""
        params = logits((3,))
        module = module_of(Case(D.Bernoulli, logits, {"validate_args": True}), True, params)
        with pytest.raises(ValueError, match="within the support"):
            distribution_call(module, InteractionType.MEAN, atomic=False).call(*params.values())

    def test_of_distributions_that_are_not_torchs_stay_as_they_are(self):
        """Nobody knows whether they take `validate_args`."""

        class Own(D.Normal):
            def __init__(self, loc, scale):
                super().__init__(loc, scale)

        _, params = self.WRONG["NaN loc"]
        call = distribution_call(
            module_of(Case(Own, gaussian), True, params), InteractionType.RANDOM, atomic=False
        ).call
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            call(*params.values())

    def test_a_subclass_is_not_taken_for_its_base(self):
        class Flipped(D.Categorical):
            def __init__(self, logits, validate_args=None):
                super().__init__(logits=-logits, validate_args=validate_args)

        params = {"logits": torch.tensor([[0.0, 9.0, 1.0]])}
        call = distribution_call(
            module_of(Case(Flipped, logits), False, params), InteractionType.MODE, atomic=False
        ).call
        assert call(*params.values()).tolist() == [0]


class TestFrequencies:
    """Pearson's chi-square; the seeds are fixed, so this does not fail now and then."""

    LIMIT = 24.3  # of 7 degrees of freedom, one in a thousand

    @pytest.mark.parametrize("seed", range(3))
    def test_of_categorical_draws(self, seed):
        torch.manual_seed(seed)
        scores = torch.randn(8)
        module = module_of(Case(D.Categorical, logits), False, {"logits": scores})
        call = distribution_call(module, InteractionType.RANDOM, atomic=False).call
        draws = call(scores.expand(40_000, 8))
        counts = torch.bincount(draws, minlength=8)
        expected = 40_000 * torch.exp(scores) / torch.exp(scores).sum()
        assert ((counts - expected) ** 2 / expected).sum() < self.LIMIT

    def test_of_draws_in_a_collector(self):
        """Each lane, and each step after another, is a draw of its own."""
        scores = torch.linspace(-1, 1, 4)
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(lambda o: scores.expand(*o.shape[:-1], 4), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=D.Categorical),
        )
        with collecting(policy, 16, steps=256) as (collector, _):
            collector.set_seed(5)
            actions = collector.next()["action"]
        expected = 4096 * torch.softmax(scores, -1)
        assert ((torch.bincount(actions.flatten(), minlength=4) - expected) ** 2 / expected).sum() < 16.3  # of 3
        pairs = torch.bincount((4 * actions[:, :-1] + actions[:, 1:]).flatten(), minlength=16)
        shares = torch.softmax(scores, -1)
        expected = pairs.sum() * torch.outer(shares, shares).flatten()
        assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # of 15
        pairs = torch.bincount((4 * actions[:-1] + actions[1:]).flatten(), minlength=16)
        expected = pairs.sum() * torch.outer(shares, shares).flatten()
        assert ((pairs - expected) ** 2 / expected).sum() < 37.7

    def test_of_normal_draws(self):
        torch.manual_seed(0)
        params = {"loc": torch.tensor(2.0).expand(40_000), "scale": torch.tensor(0.5).expand(40_000)}
        module = module_of(Case(D.Normal, gaussian), False, params)
        draws = distribution_call(module, InteractionType.RANDOM, atomic=False).call(*params.values())
        edges = D.Normal(2.0, 0.5).icdf(torch.linspace(0, 1, 9)[1:-1])
        counts = torch.bincount(torch.bucketize(draws, edges), minlength=8)
        assert ((counts - 5000.0) ** 2 / 5000.0).sum() < self.LIMIT


# --- what is refused -------------------------------------------------------------------------------------------------


def composite(*, scored=False):
    """Two draws from one module, as tensordict's documentation has it."""

    def params(observation):
        first = observation[..., :2]
        return observation.repeat_interleave(2, -1)[..., :4] * 5, first, first.abs() + 0.1

    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            params, ["observation"], [("params", "g", "logits"), ("params", "f", "loc"), ("params", "f", "scale")]
        ),
        ProbabilisticTensorDictModule(
            ["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"g": D.Categorical, "f": D.Normal},
                "name_map": {"g": ("action", "g"), "f": ("action", "f")},
            },
            return_log_prob=scored,
        ),
    )


def with_options(**options):
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True, **options
        ),
    )


class TestWhatIsRefused:
    """It gets a TensorDict, and works as it does anywhere."""

    @pytest.mark.parametrize(
        ("module", "why"),
        [
            (lambda: with_options(generator=3).module[1], "generator"),
            (lambda: with_options(generator=torch.Generator()).module[1], "generator"),
            (lambda: with_options(generator="seed").module[1], "generator"),
            (lambda: with_options(num_samples=2).module[1], "num_samples"),
            (lambda: with_options(num_samples=torch.Size([2])).module[1], "num_samples"),
            (lambda: composite().module[1], "composite"),
        ],
    )
    def test_says_why(self, module, why):
        assert why in distribution_call(module(), InteractionType.RANDOM, atomic=False)

    @pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])
    def test_a_generator_of_its_own_is_drawn_from(self, lanes):
        """Not the collector's stream: another seed of the collector changes no action."""
        batches = []
        for seed in (1, 2):
            with collecting(with_options(generator=3), lanes) as (collector, _):
                collector.set_seed(seed)
                batches.append(torch.cat([collector.next() for _ in range(3)], -1))
        assert bits(batches[0]) == bits(batches[1])
        scores = D.Categorical(logits=batches[0]["logits"]).log_prob(batches[0]["action"])
        assert torch.allclose(batches[0]["action_log_prob"], scores)
        assert len(batches[0]["action"].unique()) > 1

    def test_a_generator_of_its_own_is_as_it_was_when_the_first_frame_is_made(self):
        """As all random states that the call at construction may change."""
        generator = torch.Generator().manual_seed(3)
        before = generator.get_state()
        with collecting(with_options(generator=generator)):
            assert torch.equal(generator.get_state(), before)

    def test_several_samples_of_which_one_acts(self):
        class Best(TensorDictModule):
            def forward(self, tensordict):
                first = tensordict[0]
                return first.set("action", first["samples"])

        torch.manual_seed(0)
        policy = TensorDictSequential(
            TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(["logits"], ["samples"], distribution_class=D.Categorical, num_samples=2),
            Best(nn.Identity(), ["samples"], ["action"]),
        )
        batch, envs = collect(policy)
        assert torch.equal(received(envs, 3), batch["action"])
        assert torch.equal(batch["samples"], batch["action"])
        assert len(batch["action"].unique()) > 1

    @pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])
    @pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    @with_and_without_score
    def test_a_composite_one(self, scored, exploration, lanes):
        space = spaces.Dict({"g": DISCRETE, "f": CONTINUOUS})
        batch, envs = collect(composite(scored=scored), lanes, action_space=space, exploration_type=exploration)
        params = batch["params"]
        best = torch.equal(batch["action", "g"], params["g", "logits"].argmax(-1))
        assert (
            best == torch.equal(batch["action", "f"], params["f", "loc"]) == (exploration is not ExplorationType.RANDOM)
        )
        keys = {("observation",), ("action", "g"), ("action", "f")}
        keys |= {("params", "g", "logits"), ("params", "f", "loc"), ("params", "f", "scale")}
        assert leaf_keys(batch) == keys | ({("action", "g_log_prob"), ("action", "f_log_prob")} if scored else set())
        assert [action["g"] for action in envs[0].received] == (batch[0] if lanes else batch)["action", "g"].tolist()
