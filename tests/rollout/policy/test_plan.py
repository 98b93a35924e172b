"""Every form of policy: what it is shown, what it may write, and what is said of those that do not fit."""

from __future__ import annotations

import functools
import operator
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from rlcollect import Collector, PolicyError, RandomPolicy, RlcollectError
from rlcollect.testing import check_batch
from tests.naming import named
from tests.rollout.helpers import BOX, DISCRETE, LANES, bits, collect, collecting, leaf_keys, maker, received

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])

DICT = spaces.Dict({"a": BOX, "b": spaces.Box(0, 9, (2,), np.int64), "c": spaces.Discrete(5)})
NESTED = spaces.Dict({"a": BOX, "group": spaces.Dict({"x": BOX, "y": spaces.Dict({"z": spaces.Discrete(5)})})})
TUPLE = spaces.Tuple((BOX, spaces.Discrete(5)))
CONTINUOUS = spaces.Box(-5, 5, (2,), np.float32)
DICT_ACTION = spaces.Dict({"g": DISCRETE, "push": spaces.Dict({"f": CONTINUOUS})})
TUPLE_ACTION = spaces.Tuple((DISCRETE, CONTINUOUS))


def act(observation):
    """The action that a test expects: another one for most observations, the same bits whatever the batch."""
    return (observation[..., 0] * 1000).long() % 4


def weigh(observation):
    return observation[..., :2] * 3


class Act(nn.Module):
    def forward(self, observation):
        return act(observation)


class Annotated:
    def method(self, observation: torch.Tensor) -> torch.Tensor:
        return act(observation)

    def __call__(self, observation):
        return act(observation)

    @staticmethod
    def static(observation):
        return act(observation)


class AnyArguments(nn.Module):
    def forward(self, *args, **kwargs):
        assert not kwargs
        (observation,) = args
        return act(observation)


class Optional(nn.Module):
    """As recurrent networks have it: the state may be left out."""

    def forward(self, x, state=None, *, scale=1):
        assert state is None
        return act(x * scale)


def scaled(factor, observation, *, offset=0):
    return (act(observation) * factor + offset) % 4


def plain(observation):
    return act(observation)


PLAIN = {
    "function": plain,
    "lambda": lambda observation: act(observation),  # noqa: PLW0108
    "partial": functools.partial(scaled, 1),
    "partial with a keyword": functools.partial(scaled, factor=1, offset=0),
    "callable object": Annotated(),
    "bound method": Annotated().method,
    "static method": Annotated.static,
    "any arguments": lambda *arguments: act(arguments[0]),
    "module": Act(),
    "module of any arguments": AnyArguments(),
    "module with optional arguments": Optional(),
    "module in modules": nn.Sequential(nn.Identity(), nn.Sequential(Act())),
    "forward of a module": Act().forward,
    "numpy": lambda observation: act(observation).numpy(),
    "numpy of another width": lambda observation: act(observation).numpy().astype(np.int16),
    "int32": lambda observation: act(observation).int(),
    "uint8": lambda observation: act(observation).to(torch.uint8),
    "an unusual name": lambda obs: act(obs),  # noqa: PLW0108
    "TensorDictModule": TensorDictModule(act, ["observation"], ["action"]),
    "function of td": lambda td: td.set("action", act(td["observation"])),
    "function of tensordict": lambda tensordict: tensordict.set("action", act(tensordict["observation"])),
    "new TensorDict": lambda td: TensorDict({"action": act(td["observation"])}, td.batch_size),
    "TensorDict from an observation": lambda x: TensorDict({"action": act(x)}, x.shape[:-1]),
    "mapping": lambda x: {"action": act(x)},
}


class TestFromObservationToAction:
    @lanes_too
    @pytest.mark.parametrize("form", sorted(PLAIN))
    def test_every_form_acts_on_what_is_recorded(self, form, lanes):
        batch, envs = collect(PLAIN[form], lanes)
        check_batch(batch)
        assert torch.equal(batch["action"], act(batch["observation"]))
        assert batch["action"].dtype is torch.int64
        assert torch.equal(received(envs, lanes), batch["action"])
        assert leaf_keys(batch) == {("observation",), ("action",)}
        assert len(batch["action"].unique()) > 1

    @lanes_too
    def test_it_is_shown_the_shapes_of_its_lanes(self, lanes):
        shapes = []

        def watching(observation):
            shapes.append((tuple(observation.shape), observation.dtype, observation.requires_grad))
            return act(observation)

        collect(watching, lanes)
        assert set(shapes) == {((lanes, 3) if lanes else (3,), torch.float32, False)}
        assert len(shapes) == 1 + 12  # once at construction

    def test_a_sequence_of_lanes_is_a_batch_even_of_one(self):
        envs = []
        make = maker(envs)
        with Collector([make, make], plain, frames_per_batch=8) as collector:
            batch = collector.next()
        assert torch.equal(batch["action"], act(batch["observation"]))

    @lanes_too
    @pytest.mark.parametrize("policy", [torch.clone, torch.Tensor.long], ids=["clone", "long"])
    def test_a_builtin_without_a_signature(self, policy, lanes):
        batch, envs = collect(policy, lanes, spaces.Discrete(4))
        assert torch.equal(batch["action"], batch["observation"])
        assert torch.equal(received(envs, lanes), batch["action"])

    @lanes_too
    def test_an_itemgetter(self, lanes):
        batch, _ = collect(operator.itemgetter((..., 0)), lanes, spaces.MultiDiscrete([3, 3]))
        assert torch.equal(batch["action"], batch["observation"][..., 0])

    @pytest.mark.parametrize("policy", [lambda o: 3, lambda o: np.int64(3), lambda o: np.array(3), lambda o: True])
    def test_numbers_for_a_single_lane(self, policy):
        batch, envs = collect(policy, None)
        assert torch.equal(batch["action"], torch.full((12,), int(policy(None))))
        assert envs[0].received == [int(policy(None))] * 12

    @single_and_lanes
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
    def test_floats_of_any_width_for_a_box(self, dtype, lanes):
        batch, envs = collect(lambda o: weigh(o).to(dtype), lanes, action_space=CONTINUOUS)
        assert batch["action"].dtype is torch.float32
        assert torch.equal(batch["action"], weigh(batch["observation"]).to(dtype).float())
        assert torch.equal(received(envs, lanes), batch["action"])

    @lanes_too
    def test_a_module_in_half_precision(self, lanes):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).bfloat16()
        batch, _ = collect(lambda o: net(o.bfloat16()), lanes, action_space=CONTINUOUS)
        assert torch.equal(batch["action"], net(batch["observation"].bfloat16()).detach().float())

    @single_and_lanes
    @pytest.mark.parametrize(
        ("action_space", "dtype"),
        [
            (spaces.MultiDiscrete([3, 3]), torch.int64),
            (spaces.MultiBinary(2), torch.int8),
            (spaces.Box(0, 5, (2,), np.uint8), torch.uint8),
            (spaces.Box(0, 5, (2,), np.int16), torch.int16),
            (spaces.Box(0, 1, (2,), np.bool_), torch.bool),
        ],
        ids=["multidiscrete", "multibinary", "uint8 box", "int16 box", "bool box"],
    )
    @pytest.mark.parametrize("given", [torch.int64, torch.int32, torch.uint8, torch.bool])
    def test_whole_numbers_of_any_width_for_the_other_spaces(self, action_space, dtype, given, lanes):
        batch, envs = collect(lambda o: (o[..., :2] > 0).to(given), lanes, action_space=action_space)
        assert batch["action"].dtype is dtype
        assert torch.equal(batch["action"], (batch["observation"][..., :2] > 0).to(dtype))
        assert torch.equal(received(envs, lanes).to(dtype), batch["action"])
        assert all(action_space.contains(action) for env in envs for action in env.received)

    @lanes_too
    def test_actions_are_cast_to_the_spaces_dtype_at_the_environment(self, lanes):
        batch, envs = collect(weigh, lanes, action_space=spaces.Box(-5, 5, (2,), np.float64))
        assert batch["action"].dtype is torch.float32
        assert received(envs, lanes).dtype is torch.float64
        assert torch.equal(received(envs, lanes), batch["action"].double())

    @lanes_too
    def test_discrete_actions_from_a_start_on(self, lanes):
        batch, envs = collect(lambda o: act(o) - 7, lanes, action_space=spaces.Discrete(4, start=-7))
        assert torch.equal(batch["action"], act(batch["observation"]) - 7)
        assert torch.equal(received(envs, lanes), batch["action"])

    @lanes_too
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_script(self, lanes):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        batch, _ = collect(torch.jit.script(net), lanes, action_space=CONTINUOUS)
        expected = net(batch["observation"]).detach()
        assert torch.allclose(batch["action"], expected)

    @lanes_too
    def test_a_compiled_module_is_called_as_it_is(self, lanes):
        """What compiling puts in the place of the call runs; nothing is compiled here."""
        net = Act()
        net._compiled_call_impl = lambda observation: (act(observation) + 1) % 4
        batch, _ = collect(net, lanes)
        assert torch.equal(batch["action"], (act(batch["observation"]) + 1) % 4)

    @lanes_too
    @pytest.mark.parametrize("kind", ["Parameter", "buffer"])
    def test_a_policy_whose_action_is_its_parameter(self, kind, lanes):
        """As `Echo` asks for: rows keep the value of their time."""
        shape = (lanes, 2) if lanes else (2,)

        class Constant(nn.Module):
            def __init__(self):
                super().__init__()
                if kind == "Parameter":
                    self.value = nn.Parameter(torch.zeros(shape))
                else:
                    self.register_buffer("value", torch.zeros(shape))

            def forward(self, observation):
                return self.value

        policy = Constant()
        with collecting(policy, lanes, action_space=CONTINUOUS) as (collector, _):
            batches = []
            for value in (0.0, 1.0, 2.0):
                with torch.no_grad():
                    policy.value.fill_(value)
                batches.append(collector.next())
        for value, batch in enumerate(batches):
            assert torch.equal(batch["action"], torch.full_like(batch["action"], value))
            assert not batch["action"].requires_grad

    @lanes_too
    def test_a_lazy_module(self, lanes):
        torch.manual_seed(0)
        policy = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
        batch, _ = collect(policy, lanes, action_space=CONTINUOUS)
        assert torch.allclose(batch["action"], policy(batch["observation"]).detach())

    def test_a_lazy_module_with_buffers(self):
        policy = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2)).eval()
        batch, _ = collect(policy, 3, action_space=CONTINUOUS)
        assert batch["action"].shape == (3, 12, 2)

    def test_a_module_with_a_buffer_that_is_expanded(self):
        class Net(Act):
            def __init__(self):
                super().__init__()
                self.register_buffer("ones", torch.ones(1).expand(5))

        batch, _ = collect(Net(), 3)
        assert torch.equal(batch["action"], act(batch["observation"]))


class TestRandom:
    @lanes_too
    @pytest.mark.parametrize("policy", [None, RandomPolicy()], ids=repr)
    @pytest.mark.parametrize("action_space", [DISCRETE, CONTINUOUS, DICT_ACTION, TUPLE_ACTION], ids=repr)
    def test_none_and_a_random_policy_are_the_same(self, policy, action_space, lanes):
        torch.manual_seed(3)
        batch, envs = collect(policy, lanes, action_space=action_space)
        torch.manual_seed(3)
        other, _ = collect(None, lanes, action_space=action_space)
        assert bits(batch) == bits(other)
        assert all(action_space.contains(action) for env in envs for action in env.received)
        assert (batch["collector", "policy_version"] == -1).all()


class TestSeveralKeys:
    @lanes_too
    @pytest.mark.parametrize("observation_space", [DICT, NESTED, TUPLE], ids=["dict", "nested", "tuple"])
    def test_one_parameter_gets_a_tensordict_of_the_keys(self, observation_space, lanes):
        shown = []

        def policy(observation):
            assert isinstance(observation, TensorDictBase)
            shown.append(observation.clone())
            return act(observation["0" if observation_space is TUPLE else "a"])

        batch, envs = collect(policy, lanes, observation_space)
        check_batch(batch)
        whole = batch["observation"] if observation_space is TUPLE else batch
        assert torch.equal(batch["action"], act(whole["0" if observation_space is TUPLE else "a"]))
        assert torch.equal(received(envs, lanes), batch["action"])
        for t, td in enumerate(shown[1:]):
            assert td.batch_size == torch.Size([lanes] if lanes else [])
            for key, value in td.items(include_nested=True, leaves_only=True):
                assert torch.equal(value, whole[key][:, t] if lanes else whole[key][t])
        keys = {key if isinstance(key, tuple) else (key,) for key in shown[0].keys(True, True)}
        below = ("observation",) if observation_space is TUPLE else ()
        assert {(*below, *key) for key in keys} | {("action",)} == leaf_keys(batch)

    NAMED: ClassVar = {
        "function": lambda a, c: act(a + c.unsqueeze(-1)),
        "in another order": lambda c, a: act(a + c.unsqueeze(-1)),
        "keyword-only": lambda *, c, a: act(a + c.unsqueeze(-1)),
        "one of them keyword-only": lambda c, *, a: act(a + c.unsqueeze(-1)),
        "an optional one that is there": lambda c, b, a=None: act(a + c.unsqueeze(-1)),
        "an optional one that is not there": lambda c, a, other=None: act(a + c.unsqueeze(-1)),
        "an optional one before another that is there": lambda c, b, other=None, a=None: act(a + c.unsqueeze(-1)),
        "two optional ones that are not there": lambda a, c, other=None, d=None: act(a + c.unsqueeze(-1) + (d or 0)),
        "more keywords": lambda a, c, **more: act(a + c.unsqueeze(-1) + len(more)),
        "all optional": lambda a=None, c=None: act(a + c.unsqueeze(-1)),
        "partial": functools.partial(lambda scale, a, c: act(a + scale * c.unsqueeze(-1)), 1),
        "partial by keyword": functools.partial(lambda a, c, scale: act(a + scale * c.unsqueeze(-1)), scale=1),
    }

    @lanes_too
    @pytest.mark.parametrize("form", sorted(NAMED))
    def test_several_named_ones_get_the_keys_of_those_names(self, form, lanes):
        batch, envs = collect(self.NAMED[form], lanes, DICT)
        assert torch.equal(batch["action"], act(batch["a"] + batch["c"].unsqueeze(-1)))
        assert torch.equal(received(envs, lanes), batch["action"])

    @single_and_lanes
    @pytest.mark.parametrize("form", sorted(NAMED))
    def test_several_named_ones_of_a_module(self, form, lanes):
        class Net(nn.Module):
            forward = staticmethod(self.NAMED[form])

        batch, _ = collect(Net(), lanes, DICT)
        assert torch.equal(batch["action"], act(batch["a"] + batch["c"].unsqueeze(-1)))

    def test_a_named_group_of_keys(self):
        def policy(a, group):
            assert isinstance(group, TensorDictBase)
            assert set(group.keys(True, True)) == {"x", ("y", "z")}
            return act(a + group["x"] + group["y", "z"].unsqueeze(-1))

        for lanes in LANES:
            batch, _ = collect(policy, lanes, NESTED)
            expected = act(batch["a"] + batch["group", "x"] + batch["group", "y", "z"].unsqueeze(-1))
            assert torch.equal(batch["action"], expected)

    @lanes_too
    def test_named_groups_by_keyword(self, lanes):
        def policy(*, group, a=None, more=None):
            assert more is None
            return act(a + group["x"])

        batch, _ = collect(policy, lanes, NESTED)
        assert torch.equal(batch["action"], act(batch["a"] + batch["group", "x"]))

    @lanes_too
    def test_one_keyword_only_parameter_gets_the_key_of_its_name(self, lanes):
        batch, _ = collect(lambda *, a: act(a), lanes, DICT)
        assert torch.equal(batch["action"], act(batch["a"]))
        batch, _ = collect(lambda *, observation: act(observation), lanes)
        assert torch.equal(batch["action"], act(batch["observation"]))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_compiled_module_gets_what_the_module_gets(self):
        """Its own signature says nothing."""

        class Two(nn.Module):
            def forward(self, a, c):
                return act(a + c.unsqueeze(-1))

        batch, _ = collect(torch.compile(Two(), backend="eager"), 3, DICT)
        assert torch.equal(batch["action"], act(batch["a"] + batch["c"].unsqueeze(-1)))

    @lanes_too
    def test_renamed_keys_are_those_that_policies_see(self, lanes):
        batch, _ = collect(lambda first, c: act(first), lanes, DICT, rename_keys={"a": "first"}, exclude_keys=["b"])
        assert torch.equal(batch["action"], act(batch["first"]))

    @lanes_too
    def test_a_dict_of_one_key_is_still_a_dict(self, lanes):
        batch, _ = collect(lambda observation: act(observation["a"]), lanes, spaces.Dict({"a": BOX}))
        assert torch.equal(batch["action"], act(batch["a"]))


CHAINS = {
    "one": lambda: TensorDictModule(act, ["observation"], ["action"]),
    "one with more outputs": lambda: TensorDictModule(
        lambda o: (o * 2, act(o), o.sum(-1)), ["observation"], ["double", "action", "sum"]
    ),
    "nested out keys": lambda: TensorDictModule(
        lambda o: (o * 2, act(o)), ["observation"], [("more", "deep", "double"), "action"]
    ),
    "an output that is dropped": lambda: TensorDictModule(lambda o: (o, act(o)), ["observation"], ["_", "action"]),
    "two outputs that are dropped": lambda: TensorDictModule(
        lambda o: (o, act(o), o), ["observation"], ["_", "action", "_"]
    ),
    "the same key twice": lambda: TensorDictModule(lambda a, b: act(a + b), ["observation"] * 2, ["action"]),
    "chain": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o * 2, ["observation"], ["hidden"]),
        TensorDictModule(act, ["hidden"], ["action"]),
    ),
    "chain of networks": lambda: TensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), ["observation"], ["hidden"]),
        TensorDictModule(nn.LayerNorm(8), ["hidden"], ["hidden"]),
        TensorDictModule(nn.Linear(8, 1), ["hidden"], ["value"]),
        TensorDictModule(nn.Linear(8, 4), ["hidden"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    ),
    "overwritten later": lambda: TensorDictSequential(
        TensorDictModule(lambda o: (o, act(o)), ["observation"], ["x", "action"]),
        TensorDictModule(lambda x, a: (x + 1, (a + 1) % 4), ["x", "action"], ["x", "action"]),
        TensorDictModule(lambda x: x * 2, ["x"], ["x"]),
    ),
    "private in between": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o + 1, ["observation"], ["_hidden"]),
        TensorDictModule(act, ["_hidden"], ["action"]),
    ),
    "nested in between": lambda: TensorDictSequential(
        TensorDictModule(lambda o: (o + 1, o - 1), ["observation"], [("h", "x"), ("h", "_y")]),
        TensorDictModule(lambda x, y: act(x + y), [("h", "x"), ("h", "_y")], ["action"]),
    ),
    "sequentials in sequentials": lambda: TensorDictSequential(
        TensorDictSequential(
            TensorDictModule(lambda o: o + 1, ["observation"], ["x"]),
            TensorDictSequential(TensorDictModule(lambda x, o: x * o, ["x", "observation"], ["y"])),
        ),
        TensorDictSequential(TensorDictModule(act, ["y"], ["action"])),
    ),
    "named parts": lambda: TensorDictSequential(
        {
            "first": TensorDictModule(lambda o: o + 1, ["observation"], ["x"]),
            "second": TensorDictModule(act, ["x"], ["action"]),
        }
    ),
    "parts in a list": lambda: TensorDictSequential([TensorDictModule(act, ["observation"], ["action"])]),
    "dropped within a chain": lambda: TensorDictSequential(
        TensorDictModule(lambda o: (o, o + 1), ["observation"], ["_", "x"]),
        TensorDictModule(lambda x: (act(x), x), ["x"], ["action", "_"]),
    ),
    "a structure of outputs": lambda: TensorDictSequential(
        TensorDictModule(lambda o: torch.max(o, -1), ["observation"], ["best", "index"]),
        TensorDictModule(lambda i: i, ["index"], ["action"]),
    ),
    "a recurrent network": lambda: TensorDictSequential(
        TensorDictModule(nn.GRUCell(3, 4), ["observation"], ["h"]),
        TensorDictModule(lambda h: h.argmax(-1), ["h"], ["action"]),
    ),
    "a module that returns a dict": lambda: TensorDictModule(
        lambda o: {"action": act(o), "double": o * 2}, ["observation"], ["action", "double"]
    ),
    "a module that returns a TensorDict": lambda: TensorDictModule(
        lambda o: TensorDict({"action": act(o), "double": o * 2}, o.shape[:-1]), ["observation"], ["action", "double"]
    ),
    "numpy": lambda: TensorDictModule(lambda o: (act(o).numpy(), o.numpy() * 2), ["observation"], ["action", "x"]),
    "parameters": lambda: TensorDictSequential(
        TensorDictModule(nn.Linear(3, 3), ["observation"], ["x"]),
        TensorDictModule(act, ["observation"], ["action"]),
    ).requires_grad_(True),
    "selected out keys": lambda: TensorDictModule(
        lambda o: (act(o), o, o * 2), ["observation"], ["action", "x", "y"]
    ).select_out_keys("action", "y"),
    "selected out keys of a chain": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o + 1, ["observation"], ["x"]),
        TensorDictModule(act, ["x"], ["action"]),
        selected_out_keys=["action"],
    ),
    "not in place": lambda: TensorDictModule(act, ["observation"], ["action"], inplace=False),
    "chain not in place": lambda: TensorDictSequential(
        TensorDictModule(lambda o: (act(o), o), ["observation"], ["action", "x"]), inplace=False
    ),
    "partial tolerant": lambda: TensorDictSequential(
        TensorDictModule(act, ["observation"], ["action"]), partial_tolerant=True
    ),
    "another method": lambda: TensorDictModule(Annotated(), ["observation"], ["action"], method="method"),
    "method with keywords": lambda: TensorDictModule(
        functools.partial(scaled, 1), ["observation"], ["action"], method_kwargs={"offset": 2}
    ),
    "keys by argument": lambda: TensorDictModule(
        lambda *, x, scale=1: act(x * scale), {"x": "observation"}, ["action"]
    ),
    "a module in a module": lambda: TensorDictModule(
        TensorDictModule(act, ["observation"], ["action"]), ["observation"], ["action"]
    ),
    "a function in a chain": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o + 1, ["observation"], ["x"]),
        lambda td: td.set("action", act(td["x"])),
    ),
}


class Forced:
    """Gives a policy a TensorDict, whatever it is."""

    def __init__(self, policy):
        self.policy = policy

    def __call__(self, tensordict):
        return self.policy(tensordict)


def path(collector):
    return repr(collector).split("policy=<")[1].split(" path")[0]


class TestTensorDictModules:
    @lanes_too
    @pytest.mark.parametrize("form", sorted(CHAINS))
    def test_all_give_what_they_give_to_a_tensordict(self, form, lanes):
        """The same keys, dtypes and bits on the direct path and on the general one, as when called on the batch."""
        torch.manual_seed(0)
        policy = CHAINS[form]()
        batch, envs = collect(policy, lanes)
        general, _ = collect(Forced(policy), lanes)
        assert bits(batch) == bits(general)
        assert torch.equal(received(envs, lanes), batch["action"])
        check_batch(batch)
        with torch.no_grad():
            shown = batch.select("observation")[:, 0] if lanes else batch.select("observation")[0]
            expected = policy(shown.clone())
        row = batch[:, 0] if lanes else batch[0]
        for key, value in expected.items(include_nested=True, leaves_only=True):
            if not any(part.startswith("_") for part in ([key] if isinstance(key, str) else key)):
                assert torch.equal(row[key], torch.as_tensor(value)), key

    @pytest.mark.parametrize(
        "form",
        [
            "one", "one with more outputs", "nested out keys", "an output that is dropped", "chain",
            "chain of networks", "overwritten later", "sequentials in sequentials", "named parts",
        ],
    )  # fmt: skip
    def test_known_ones_take_the_direct_path(self, form):
        with collecting(CHAINS[form]()) as (collector, _):
            assert path(collector) == "direct"

    @pytest.mark.parametrize(
        "form",
        [
            "selected out keys", "selected out keys of a chain", "not in place", "chain not in place",
            "partial tolerant", "another method", "method with keywords", "keys by argument",
            "a module in a module", "a function in a chain",
        ],
    )  # fmt: skip
    def test_options_take_the_general_one(self, form):
        with collecting(CHAINS[form]()) as (collector, _):
            assert path(collector) == "tensordict"

    @lanes_too
    @pytest.mark.parametrize("wrap", [lambda m: m, TensorDictSequential], ids=["bare", "in a chain"])
    def test_subclasses_with_ways_of_their_own(self, wrap, lanes):
        class OwnForward(TensorDictModule):
            def forward(self, tensordict):
                return super().forward(tensordict).set("more", tensordict["observation"] + 5)

        class OwnModuleCall(TensorDictModule):
            def _call_module(self, tensors, **kwargs):
                return (super()._call_module(tensors, **kwargs) + 1) % 4

        class OwnCall(TensorDictModule):
            def __call__(self, *args, **kwargs):
                result = super().__call__(*args, **kwargs)
                return result.set("action", (result["action"] + 2) % 4)

        class Harmless(TensorDictModule):
            """Nothing but a name."""

        for kind, add in ((OwnForward, 0), (OwnModuleCall, 1), (OwnCall, 2), (Harmless, 0)):
            policy = wrap(kind(act, ["observation"], ["action"]))
            batch, _ = collect(policy, lanes)
            assert torch.equal(batch["action"], (act(batch["observation"]) + add) % 4)
            if kind is OwnForward:
                assert torch.equal(batch["more"], batch["observation"] + 5)
            with collecting(policy, lanes) as (collector, _):
                assert path(collector) == ("direct" if kind is Harmless else "tensordict")

    @lanes_too
    def test_a_module_of_ones_own(self, lanes):
        class Own(TensorDictModuleBase):
            in_keys: ClassVar = ["observation"]
            out_keys: ClassVar = ["action", "twice"]

            def forward(self, tensordict):
                observation = tensordict["observation"]
                return tensordict.update({"action": act(observation), "twice": observation * 2})

        batch, _ = collect(Own(), lanes)
        assert torch.equal(batch["twice"], batch["observation"] * 2)
        assert torch.equal(batch["action"], act(batch["observation"]))

    @lanes_too
    def test_a_probabilistic_actor(self, lanes):
        torch.manual_seed(0)
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(
                ["logits"],
                ["action"],
                distribution_class=torch.distributions.Categorical,
                return_log_prob=True,
            ),
        )
        batch, _ = collect(policy, lanes)
        assert leaf_keys(batch) == {("observation",), ("logits",), ("action",), ("action_log_prob",)}
        expected = torch.distributions.Categorical(logits=batch["logits"]).log_prob(batch["action"])
        assert torch.allclose(batch["action_log_prob"], expected)
        assert len(batch["action"].unique()) > 1

    @lanes_too
    def test_keys_with_parts_are_read_and_written(self, lanes):
        policy = TensorDictModule(
            lambda group, a: (act(a + group["x"]), group["y", "z"]), ["group", "a"], ["action", ("seen", "z")]
        )
        batch, _ = collect(policy, lanes, NESTED)
        assert torch.equal(batch["action"], act(batch["a"] + batch["group", "x"]))
        assert torch.equal(batch["seen", "z"], batch["group", "y", "z"])

    @lanes_too
    def test_nested_keys_are_read_directly(self, lanes):
        policy = TensorDictModule(lambda x, a: act(a + x), [("group", "x"), "a"], ["action"])
        batch, _ = collect(policy, lanes, NESTED)
        assert torch.equal(batch["action"], act(batch["a"] + batch["group", "x"]))
        with collecting(policy, lanes, NESTED) as (collector, _):
            assert path(collector) == "direct"

    @lanes_too
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_an_observation_that_the_policy_overwrites_is_recorded_as_the_environment_gave_it(self, wrap, lanes):
        """A chain that begins by normalising the observation under its own name: the data stays the environment's."""
        chain = TensorDictSequential(
            TensorDictModule(lambda o: o * 10 + 1, ["observation"], ["observation"]),
            TensorDictModule(act, ["observation"], ["action"]),
        )
        batch, _ = collect(wrap(chain), lanes)
        raw, _ = collect(plain, lanes)
        assert torch.equal(batch["observation"], raw["observation"])
        assert torch.equal(batch["next", "observation"], raw["next", "observation"])
        assert torch.equal(batch["action"], act(raw["observation"] * 10 + 1))

    @lanes_too
    def test_an_output_below_an_observation_is_an_error_that_names_it(self, lanes):
        policy = TensorDictModule(lambda o: (act(o), o), ["observation"], ["action", ("observation", "x")])
        with pytest.raises(PolicyError, match="'observation', 'x'"):
            collect(policy, lanes)
        policy = TensorDictModule(lambda o: (act(o), o), [("group", "x")], ["action", "group"])
        with pytest.raises(PolicyError, match="group"):
            collect(policy, lanes, NESTED)

    @lanes_too
    def test_two_outputs_one_below_the_other_are_an_error_that_names_them(self, lanes):
        policy = TensorDictModule(lambda o: (act(o), o, o), ["observation"], ["action", "x", ("x", "y")])
        with pytest.raises(PolicyError, match="'x', 'y'"):
            collect(policy, lanes)


class TestHooks:
    """Hooks on modules of TensorDicts run, whenever they were registered."""

    @pytest.mark.parametrize("place", ["chain", "part", "inner"])
    @pytest.mark.parametrize("pre", [False, True])
    def test_hooks_registered_before(self, place, pre):
        policy, seen = self.policy(), []
        module = {"chain": policy, "part": policy.module[0], "inner": policy.module[0].module}[place]
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        register(lambda *arguments: seen.append(1))
        batch, _ = collect(policy)
        assert len(seen) == 1 + 12
        assert torch.equal(batch["action"], act(batch["x"]))

    @pytest.mark.parametrize("place", ["chain", "part", "inner"])
    @pytest.mark.parametrize("pre", [False, True])
    def test_hooks_registered_after_construction_run_from_the_next_batch_on(self, place, pre):
        policy, seen = self.policy(), []
        module = {"chain": policy, "part": policy.module[0], "inner": policy.module[0].module}[place]
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        with collecting(policy) as (collector, _):
            collector.next()
            handle = register(lambda *arguments: seen.append(1))
            collector.next()
            assert len(seen) == 4
            handle.remove()
            collector.next()
            assert len(seen) == 4

    def test_a_hook_that_changes_the_output(self):
        policy = self.policy()
        policy.module[1].register_forward_hook(lambda m, a, td: td.set("action", (td["action"] + 1) % 4))
        batch, _ = collect(policy)
        assert torch.equal(batch["action"], (act(batch["x"]) + 1) % 4)

    @staticmethod
    def policy():
        torch.manual_seed(0)
        return TensorDictSequential(
            TensorDictModule(nn.Linear(3, 3), ["observation"], ["x"]), TensorDictModule(Act(), ["x"], ["action"])
        )


class TestChangesAfterConstruction:
    def test_a_module_of_a_chain_that_is_replaced_is_seen_in_the_next_batch(self):
        policy = TestHooks.policy()
        with collecting(policy) as (collector, _):
            collector.next()
            policy.module[0].module = nn.Linear(3, 3)
            batch = collector.next()
        with torch.no_grad():
            assert torch.allclose(batch["x"], policy.module[0].module(batch["observation"]))

    def test_a_part_of_a_chain_that_is_replaced_is_seen_in_the_next_batch(self):
        policy = TestHooks.policy()
        with collecting(policy) as (collector, _):
            collector.next()
            policy.module[0] = TensorDictModule(nn.Linear(3, 3), ["observation"], ["x"])
            batch = collector.next()
        with torch.no_grad():
            assert torch.allclose(batch["x"], policy.module[0].module(batch["observation"]))

    def test_a_child_that_is_replaced_is_seen_in_the_next_batch(self):
        policy = nn.Sequential(nn.Linear(3, 2))
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            collector.next()
            policy[0] = nn.Linear(3, 2)
            batch = collector.next()
        with torch.no_grad():
            assert torch.allclose(batch["action"], policy(batch["observation"]))

    def test_optimiser_steps_and_loads_are_seen_in_the_next_batch(self):
        policy = nn.Sequential(nn.Linear(3, 2))
        optimiser = torch.optim.SGD(policy.parameters(), lr=1.0)
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            for change in (
                lambda: None,
                lambda: (policy(torch.ones(3)).sum().backward(), optimiser.step()),
                lambda: policy.load_state_dict(nn.Sequential(nn.Linear(3, 2)).state_dict(), assign=True),
            ):
                change()
                batch = collector.next()
                with torch.no_grad():
                    assert torch.allclose(batch["action"], policy(batch["observation"]))


class TestExtraOutputs:
    @single_and_lanes
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8,
            torch.int16, torch.int32, torch.int64, torch.complex64, torch.uint16,
        ],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )  # fmt: skip
    def test_every_dtype_is_recorded_as_it_is(self, dtype, wrap, lanes):
        def outputs(o):
            whole = (o * 100).abs()
            return act(o), (whole.to(torch.float32).to(dtype) if dtype is not torch.bool else whole > 50)

        policy = wrap(TensorDictModule(outputs, ["observation"], ["action", "extra"]))
        batch, _ = collect(policy, lanes)
        assert batch["extra"].dtype is dtype
        expected = outputs(batch["observation"])[1]
        assert torch.equal(batch["extra"].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        assert batch["extra"].shape == expected.shape

    def test_a_dtype_that_numpy_lacks_is_recorded_too(self):
        def outputs(o):
            return act(o), o.to(torch.float8_e4m3fn)

        batch, _ = collect(TensorDictModule(outputs, ["observation"], ["action", "extra"]))
        assert torch.equal(batch["extra"].float(), outputs(batch["observation"])[1].float())

    @single_and_lanes
    @pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0), (2, 3, 1)], ids=str)
    def test_every_shape_is_recorded_as_it_is(self, shape, lanes):
        def outputs(o):
            first = o[..., 0].reshape([*o.shape[:-1], *[1] * len(shape)])
            return act(o), first.expand([*o.shape[:-1], *shape])

        batch, _ = collect(TensorDictModule(outputs, ["observation"], ["action", "extra"]), lanes)
        assert torch.equal(batch["extra"], outputs(batch["observation"])[1])

    @single_and_lanes
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_private_outputs_are_dropped(self, wrap, lanes):
        policy = TensorDictModule(
            lambda o: (o, act(o), o, o, o),
            ["observation"],
            ["_private", "action", ("_a", "b"), ("a", "_b"), ("a", "c")],
        )
        batch, _ = collect(wrap(policy), lanes)
        assert leaf_keys(batch) == {("observation",), ("action",), ("a", "c")}

    @lanes_too
    def test_by_mapping(self, lanes):
        batch, _ = collect(lambda o: {"value": o.sum(-1), "action": act(o), "more": {"twice": o * 2, "_no": o}}, lanes)
        assert leaf_keys(batch) == {("observation",), ("action",), ("value",), ("more", "twice")}
        assert torch.equal(batch["more", "twice"], batch["observation"] * 2)
        assert torch.equal(batch["action"], act(batch["observation"]))

    @single_and_lanes
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_tensors_that_are_used_again_do_not_change_what_is_recorded(self, wrap, lanes):
        """FAULTS 43, 67: outputs overwritten in place by the next call."""
        shape = (lanes,) if lanes else ()
        held = torch.zeros(shape, dtype=torch.int64), torch.zeros(*shape, 3), torch.zeros(*shape, 3).bfloat16()

        def policy(o):
            held[0].copy_(act(o))
            held[1].copy_(o)
            held[2].copy_(o)
            return held

        module = wrap(TensorDictModule(policy, ["observation"], ["action", "x", "half"]))
        batch, envs = collect(module, lanes)
        assert torch.equal(batch["action"], act(batch["observation"]))
        assert torch.equal(batch["x"], batch["observation"])
        assert torch.equal(batch["half"], batch["observation"].bfloat16())
        for tensor in held:
            tensor.zero_()
        assert torch.equal(batch["x"], batch["observation"])
        assert torch.equal(received(envs, lanes), batch["action"])

    @single_and_lanes
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_outputs_may_be_views_of_the_observation_and_of_each_other(self, wrap, lanes):
        def policy(o):
            flipped = o.flip(-1)
            return act(o), o, o[..., 1:], flipped, flipped[..., 0], o[..., 0].unsqueeze(-1).expand(*o.shape[:-1], 4)

        keys = ["action", "same", "part", "flipped", "first", "wide"]
        batch, _ = collect(wrap(TensorDictModule(policy, ["observation"], keys)), lanes)
        for key, value in zip(keys, policy(batch["observation"]), strict=True):
            assert torch.equal(batch[key], value)
        batch["same"].zero_()
        assert not torch.equal(batch["same"], batch["observation"])

    @single_and_lanes
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_a_policy_that_changes_its_observation_in_place_is_refused_or_changes_no_data(self, wrap, lanes):
        """As `x = x.float(); x /= 255` does where the observation is float32 already."""

        def policy(o):
            action = act(o)
            o /= 255
            return action

        try:
            batch, _ = collect(wrap(TensorDictModule(policy, ["observation"], ["action"])), lanes)
        except PolicyError:
            return
        raw, _ = collect(plain, lanes)
        assert torch.equal(batch["observation"], raw["observation"])
        assert torch.equal(batch["next", "observation"], raw["next", "observation"])

    @lanes_too
    def test_the_observation_itself_as_the_action(self, lanes):
        box = spaces.Box(-1, 1, (3,), np.float32)
        batch, _ = collect(lambda o: o, lanes, box, box)
        assert torch.equal(batch["action"], batch["observation"])
        assert batch["action"].data_ptr() != batch["observation"].data_ptr()

    @single_and_lanes
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_a_parameter_itself_as_an_extra_output(self, wrap, dtype, lanes):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(*([lanes] if lanes else []), 2, dtype=dtype))

            def forward(self, o):
                return act(o), self.scale

        net = Net()
        with collecting(wrap(TensorDictModule(net, ["observation"], ["action", "scale"])), lanes) as (collector, _):
            first = collector.next()
            with torch.no_grad():
                net.scale.fill_(2)
            second = collector.next()
        assert (first["scale"] == 1).all()
        assert (second["scale"] == 2).all()
        assert not first["scale"].requires_grad

    @lanes_too
    def test_outputs_that_sometimes_require_grad(self, lanes):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(*([lanes] if lanes else []), 2))
                self.calls = 0

            def forward(self, o):
                self.calls += 1
                return self.scale if self.calls % 2 == 0 else self.scale + 1

        batch, _ = collect(Net(), lanes, action_space=CONTINUOUS)
        row = batch["action"][0, :, 0] if lanes else batch["action"][:, 0]
        assert row.tolist() == [1.0, 2.0] * 6

    @lanes_too
    def test_outputs_computed_with_gradients_are_detached(self, lanes):
        weight = torch.ones(3, requires_grad=True)

        def policy(o):
            with torch.enable_grad():
                return (o * weight)[..., :2]

        batch, _ = collect(policy, lanes, action_space=CONTINUOUS)
        assert not batch["action"].requires_grad
        assert torch.equal(batch["action"], batch["observation"][..., :2])

    @pytest.mark.parametrize("first", [True, False], ids=["tensor first", "array first"])
    def test_a_policy_that_gives_tensors_now_and_arrays_then(self, first):
        """It works, or says so; it never stores something else."""
        calls = []

        def policy(o):
            calls.append(1)
            return act(o) if (len(calls) % 2) == first else act(o).numpy()

        try:
            batch, _ = collect(policy)
        except PolicyError:
            return
        assert torch.equal(batch["action"], act(batch["observation"]))


class TestActionsWithParts:
    FORMS: ClassVar = {
        "TensorDict": lambda g, f: (
            lambda td: td.set(("action", "g"), g(td["observation"])).set(("action", "push", "f"), f(td["observation"]))
        ),
        "TensorDictModule": lambda g, f: TensorDictModule(
            lambda o: (f(o), g(o)), ["observation"], [("action", "push", "f"), ("action", "g")]
        ),
        "chain": lambda g, f: TensorDictSequential(
            TensorDictModule(f, ["observation"], [("action", "push", "f")]),
            TensorDictModule(g, ["observation"], [("action", "g")]),
        ),
        "mapping": lambda g, f: lambda o: {"push": {"f": f(o)}, "g": g(o)},
        "mapping under action": lambda g, f: lambda o: {"action": {"g": g(o), "push": {"f": f(o)}}},
        "tuple": lambda g, f: lambda o: (g(o), f(o)),
        "list": lambda g, f: lambda o: [g(o), f(o)],
        "mapping of numpy": lambda g, f: lambda o: {"push": {"f": f(o).numpy()}, "g": g(o).numpy()},
    }

    @lanes_too
    @pytest.mark.parametrize("form", sorted(FORMS))
    def test_dict(self, form, lanes):
        batch, envs = collect(self.FORMS[form](act, weigh), lanes, action_space=DICT_ACTION)
        assert torch.equal(batch["action", "g"], act(batch["observation"]))
        assert torch.equal(batch["action", "push", "f"], weigh(batch["observation"]))
        assert leaf_keys(batch) == {("observation",), ("action", "g"), ("action", "push", "f")}
        for lane, env in enumerate(envs):
            row = batch[lane] if lanes else batch
            assert [action["g"] for action in env.received] == row["action", "g"].tolist()
            assert [action["push"]["f"].tolist() for action in env.received] == row["action", "push", "f"].tolist()
            assert all(DICT_ACTION.contains(action) for action in env.received)

    TUPLE_FORMS: ClassVar = {
        "TensorDict": lambda td: td.set(("action", "0"), act(td["observation"])).set(
            ("action", "1"), weigh(td["observation"])
        ),
        "TensorDictModule": TensorDictModule(
            lambda o: (weigh(o), act(o)), ["observation"], [("action", "1"), ("action", "0")]
        ),
        "mapping": lambda o: {"1": weigh(o), "0": act(o)},
        "tuple": lambda o: (act(o), weigh(o)),
        "list": lambda o: [act(o), weigh(o)],
    }

    @lanes_too
    @pytest.mark.parametrize("form", sorted(TUPLE_FORMS))
    def test_tuple(self, form, lanes):
        batch, envs = collect(self.TUPLE_FORMS[form], lanes, action_space=TUPLE_ACTION)
        assert torch.equal(batch["action", "0"], act(batch["observation"]))
        assert torch.equal(batch["action", "1"], weigh(batch["observation"]))
        for lane, env in enumerate(envs):
            row = batch[lane] if lanes else batch
            assert [action[0] for action in env.received] == row["action", "0"].tolist()
            assert [action[1].tolist() for action in env.received] == row["action", "1"].tolist()
            assert all(TUPLE_ACTION.contains(action) for action in env.received)

    @lanes_too
    @pytest.mark.parametrize(
        "policy", [lambda o: (act(o),), lambda o: [act(o)], lambda o: {"0": act(o)}], ids=["tuple", "list", "mapping"]
    )
    def test_a_tuple_of_one(self, policy, lanes):
        batch, envs = collect(policy, lanes, action_space=spaces.Tuple((DISCRETE,)))
        assert torch.equal(batch["action", "0"], act(batch["observation"]))
        assert [action[0] for action in envs[0].received] == (
            batch["action", "0"][0] if lanes else batch["action", "0"]
        ).tolist()

    @lanes_too
    def test_a_dict_with_a_part_named_action(self, lanes):
        space = spaces.Dict({"action": DISCRETE, "other": DISCRETE})
        batch, _ = collect(lambda o: {"action": {"action": act(o), "other": act(-o)}}, lanes, action_space=space)
        assert torch.equal(batch["action", "other"], act(-batch["observation"]))


class TestErrors:
    """All at construction, all saying what was expected and what came; nothing is left open."""

    @staticmethod
    def refused(policy, lanes=3, observation_space=BOX, action_space=DISCRETE, **options):
        envs = []
        with (
            pytest.raises(PolicyError) as raised,
            Collector(
                maker(envs, observation_space, action_space), policy, frames_per_batch=6, num_envs=lanes, **options
            ),
        ):
            pass
        assert isinstance(raised.value, ValueError)
        assert [env.closed for env in envs] == [1] * (lanes or 1)
        assert not any(env.received for env in envs)
        return str(raised.value)

    @pytest.mark.parametrize(
        ("policy", "words", "space"),
        [
            (5, ["callable", "5"], BOX),
            ("random", ["callable", "'random'"], BOX),
            (torch.zeros(3), ["callable", "tensor"], BOX),
            ([Act()], ["callable"], BOX),
            (Act, ["class Act", "instance"], BOX),
            (nn.Linear, ["class Linear", "instance"], BOX),
            (RandomPolicy, ["class RandomPolicy", "instance"], BOX),
            (lambda: 0, ["failed", "TypeError", "'observation' [3, 3]"], BOX),
            (lambda o: 1 / 0, ["failed", "ZeroDivisionError", "'observation' [3, 3]"], BOX),
            (nn.Linear(4, 2), ["failed", "RuntimeError", "'observation' [3, 3]"], BOX),
            (lambda a, d: a, ["'d'", "parameter"], DICT),
            (lambda a, grop: a, ["'grop'", "Did you mean", "'group'"], NESTED),
            (lambda first, second: first, ["'first'", "'a'", "'b'", "'c'"], DICT),
            (lambda *, first, second: first, ["'first'", "'a'", "'b'", "'c'"], DICT),
            (TensorDictModule(act, ["observatoin"], ["action"]), ["'observatoin'", "Did you mean 'observation'"], BOX),
            (TensorDictModule(act, ["zzz"], ["action"]), ["'zzz'", "The observation has 'observation'"], BOX),
            (TensorDictModule(act, [("group", "xx")], ["action"]), ["('group', 'xx')", "('group', 'x')"], NESTED),
            (
                TensorDictSequential(
                    TensorDictModule(act, ["observation"], ["x"]), TensorDictModule(act, ["y"], ["action"])
                ),
                ["'y'", "'observation'"],
                BOX,
            ),
        ],
    )
    def test_what_is_no_policy_of_this_environment(self, policy, words, space):
        text = self.refused(policy, observation_space=space)
        for word in words:
            assert word in text

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (lambda o: None, ["action", "NoneType"]),
            (lambda o: "left", ["action", "'left'"]),
            (lambda o: object(), ["action", "object"]),
            (lambda o: (act(o), o), ["action", "tuple"]),
            (lambda o: [1, 2, 3], ["action", "list"]),
            (lambda o: {}, ["'action'", "nothing"]),
            (lambda o: {"action": None}, ["'action'", "None"]),
            (lambda o: {"action": "left"}, ["'action'", "left"]),
            (lambda o: {"action": ["left"] * 3}, ["'action'", "left"]),
            (lambda o: {"action": np.array([None] * 3)}, ["'action'", "None"]),
            (lambda o: np.array(["a"] * 3), ["'action'", "a"]),
            (lambda o: {"act": act(o)}, ["'action'", "act"]),
            (lambda td: td, ["'action'", "nothing"]),
            (lambda td: None, ["'action'", "nothing"]),
            (lambda td: td.set("act", act(td["observation"])), ["'action'", "'act'"]),
            (lambda td: td.set("action", NonTensorData("left", td.batch_size)), ["'action'"]),
            (TensorDictModule(act, ["observation"], ["act"]), ["'action'", "'act'"]),
            (TensorDictModule(act, ["observation"], [("action", "x")]), ["'action'", "('action', 'x')"]),
            (TensorDictModule(act, ["observation"], ["_action"]), ["'action'"]),
            (lambda o: o, ["'action'", "[3]", "int64", "[3, 3]", "float32", "Discrete(4)"]),
            (lambda o: act(o).float(), ["'action'", "[3]", "int64", "float32", "Discrete(4)"]),
            (lambda o: act(o).to(torch.complex64), ["'action'", "int64", "complex64"]),
            (lambda o: act(o)[:2], ["'action'", "[3]", "[2]"]),
            (lambda o: act(o)[0], ["'action'", "[3]", "[]"]),
            (lambda o: 1, ["'action'", "[3]", "int (1)"]),
            (lambda o: act(o).unsqueeze(-1), ["'action'", "[3]", "[3, 1]"]),
            (lambda o: act(o).unsqueeze(0), ["'action'", "[3]", "[1, 3]"]),
            (lambda o: o.new_zeros(3, 4), ["'action'", "[3, 4]", "argmax(-1)"]),
            (lambda o: o.new_zeros(3, 4).long(), ["'action'", "[3, 4]", "argmax(-1)"]),
            (lambda o: np.zeros((3, 4)), ["'action'", "[3]", "argmax(-1)"]),
            (TensorDictModule(nn.Linear(3, 4), ["observation"], ["action"]), ["'action'", "[3, 4]", "argmax(-1)"]),
        ],
    )
    def test_what_is_no_action(self, policy, words):
        text = self.refused(policy)
        for word in words:
            assert word in text

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (act, ["'action'", "[3, 2]", "float32", "[3]", "int64"]),
            (lambda o: o[..., :2].long(), ["'action'", "float32", "int64"]),
            (lambda o: o[..., :2] > 0, ["'action'", "float32", "bool"]),
            (lambda o: o, ["'action'", "[3, 2]", "[3, 3]"]),
            (lambda o: (o[..., :2], o[..., :2]), ["action", "tuple"]),
        ],
    )
    def test_what_is_no_action_of_a_box(self, policy, words):
        text = self.refused(policy, action_space=CONTINUOUS)
        for word in words:
            assert word in text
        assert "argmax" not in text

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (act, ["'action', 'g'", "'action', 'push', 'f'"]),
            (lambda o: (act(o),), ["'action', 'g'"]),
            (lambda o: (act(o), weigh(o), act(o)), ["'action', 'g'"]),
            (lambda o: (weigh(o), act(o)), ["'action', 'g'", "int64", "[3]", "[3, 2]"]),
            (lambda o: {"g": act(o)}, ["'action', 'push', 'f'", "('action', 'g')"]),
            (lambda o: {"g": act(o), "push": weigh(o)}, ["'action', 'push', 'f'", "('action', 'push')"]),
            (lambda o: {"g": act(o), "push": {"f": act(o)}}, ["'action', 'push', 'f'", "[3, 2]", "[3]"]),
            (lambda td: td.update({"g": act(td["observation"])}), ["'action', 'g'"]),
            (
                lambda td: td.update({"g": act(td["observation"]), "push": {"f": weigh(td["observation"])}}),
                ["nest", "'action', 'g'"],
            ),
        ],
    )
    def test_what_is_no_action_with_parts(self, policy, words):
        text = self.refused(policy, action_space=DICT_ACTION)
        for word in words:
            assert word in text

    @pytest.mark.parametrize(
        "name", ["next", "reward", "done", "terminated", "truncated", "collector", "step_count", "is_init"]
    )
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("wrap", [lambda p: p, Forced], ids=["direct", "general"])
    def test_names_of_ours_may_not_be_written(self, name, nested, wrap):
        key = (name, *("reward",) * (name == "next"), "x") if nested else name
        policy = wrap(TensorDictModule(lambda o: (act(o), o), ["observation"], ["action", key]))
        options = {"record": (name,)} if name in ("step_count", "is_init") else {}
        text = self.refused(policy, **options)
        if name == "is_init" and nested and isinstance(policy, Forced):  # shown a mark there, it cannot put a level
            assert "is_init is already present" in text
        else:
            assert f"'{name}'" in text
            assert "ours" in text

    @pytest.mark.parametrize("name", ["step_count", "is_init", "worker", "mask"])
    def test_names_that_are_ours_only_when_recorded_are_free_otherwise(self, name):
        batch, _ = collect(TensorDictModule(lambda o: (act(o), o), ["observation"], ["action", name]))
        assert torch.equal(batch[name], batch["observation"])

    @pytest.mark.parametrize(
        "value",
        ["text", None, 5, 1.5, [1, 2, 3], object(), torch.zeros(4), torch.zeros(()), torch.zeros(2, 3)],
        ids=named,
    )
    def test_extra_outputs_are_tensors_of_the_lanes(self, value):
        text = self.refused(lambda o: {"action": act(o), "extra": value})
        assert "'extra'" in text
        assert ("3 lanes" if isinstance(value, torch.Tensor) else "tensor") in text
        assert (str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__) in text

    def test_non_tensor_data_is_an_error_too(self):
        text = self.refused(lambda td: td.set("action", act(td["observation"])).set_non_tensor("note", "text"))
        assert "'note'" in text

    def test_a_chain_with_too_few_or_too_many_values(self):
        for outputs in (lambda o: act(o), lambda o: (act(o), o, o)):  # noqa: PLW0108
            text = self.refused(TensorDictModule(outputs, ["observation"], ["action", "x"]))
            assert "2" in text
            assert "out_keys" in text
            chain = TensorDictSequential(
                TensorDictModule(lambda o: o, ["observation"], ["y"]),
                TensorDictModule(outputs, ["y"], ["action", "x"]),
            )
            self.refused(chain)

    @pytest.mark.parametrize("policy", [nn.BatchNorm1d(3), lambda o: act(o)[0], lambda o: act(o)[None]])
    def test_a_single_lane_proposes_a_batch_of_one(self, policy):
        text = self.refused(policy, None)
        assert "num_envs=1" in text
        assert "num_envs" not in self.refused(lambda o: o.new_zeros(7), 3)

    def test_a_failing_forward_keeps_its_cause(self):
        class Custom(Exception):  # noqa: N818
            pass

        def policy(o):
            raise Custom("inside")

        envs = []
        with pytest.raises(PolicyError, match="Custom: inside") as raised:
            Collector(maker(envs), policy, frames_per_batch=4)
        assert isinstance(raised.value.__cause__, Custom)
        assert envs[0].closed

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_what_is_no_error_of_the_policy_closes_too(self, error):
        def policy(o):
            raise error

        envs = []
        with pytest.raises((error, RlcollectError)):
            Collector(maker(envs), policy, frames_per_batch=4, num_envs=2)
        assert [env.closed for env in envs] == [1, 1]

    def test_instances_stay_their_owners(self):
        envs = []
        env = maker(envs)()
        with pytest.raises(PolicyError):
            Collector(env, lambda o: None, frames_per_batch=4)
        assert env.closed == 0

    def test_a_policy_whose_output_changes_its_shape_is_told_at_a_sampled_step(self):
        """Storing (1,) for (3,) would broadcast in silence."""
        calls = []

        def policy(o):
            calls.append(1)
            return act(o) if len(calls) < 2 else act(o)[:1]

        with pytest.raises(PolicyError, match=r"'action'.*\[3\].*\[1\]"):
            collect(policy)

    def test_a_key_that_is_not_written_any_more(self):
        def policy(td):
            td["action"] = act(td["observation"])
            if len(calls) == 0:
                td["value"] = td["observation"]
            calls.append(1)
            return td

        calls = []
        with pytest.raises(PolicyError, match="'value'"):
            collect(policy)

    def test_discrete_actions_out_of_bounds(self):
        calls = []

        def policy(o):
            calls.append(1)
            return act(o) if len(calls) < 2 else torch.full((3,), 4)

        with pytest.raises(PolicyError, match=r"4 is not in Discrete\(4\)"):
            collect(policy)


class TestAnnotations:
    """A parameter that says that it is a TensorDict gets one."""

    def test_by_class_and_by_text(self):
        def by_text(x: TensorDict):
            return x.set("action", act(x["observation"]))

        def by_class(x):
            return x.set("action", act(x["observation"]))

        by_class.__annotations__ = {"x": TensorDict}

        def by_base(x):
            return x.set("action", act(x["observation"]))

        by_base.__annotations__ = {"x": TensorDictBase}

        def optional(x):
            return x.set("action", act(x["observation"]))

        optional.__annotations__ = {"x": TensorDict | None}
        for policy in (by_text, by_class, by_base, optional):
            batch, _ = collect(policy)
            assert torch.equal(batch["action"], act(batch["observation"]))

    def test_modules_and_methods(self):
        class Net(nn.Module):
            def forward(self, data: TensorDictBase) -> TensorDictBase:
                return data.set("action", act(data["observation"])).set("value", data["observation"].sum(-1))

        class Own:
            def act_on(self, data: TensorDictBase) -> TensorDictBase:
                return data.set("action", act(data["observation"])).set("value", data["observation"].sum(-1))

        for policy in (Net(), Own().act_on):
            batch, _ = collect(policy)
            assert torch.equal(batch["action"], act(batch["observation"]))
            assert "value" in batch.keys()  # noqa: SIM118

    def test_all_keys_are_in_it(self):
        seen = []

        def policy(td):
            seen.append(set(td.keys(True, True)))
            return td.set("action", act(td["a"]))

        collect(policy, 3, NESTED)
        assert set(map(frozenset, seen)) == {frozenset({"a", ("group", "x"), ("group", "y", "z")})}

    def test_what_a_policy_puts_into_its_tensordict_does_not_change_the_data(self):
        """New entries, replaced entries, private ones."""

        def policy(td):
            td["observation"] = td["observation"] * 100
            td["_private"] = td["observation"]
            td["action"] = act(td["observation"] / 100)
            return td

        batch, _ = collect(policy)
        raw, _ = collect(plain)
        assert torch.equal(batch["observation"], raw["observation"])
        assert torch.equal(batch["next", "observation"], raw["next", "observation"])


class TestHowAChainIsCalled:
    """What else than `forward` a call of a TensorDictModule runs."""

    def test_a_patched_forward_is_called(self):
        policy = TensorDictModule(act, ["observation"], ["action"])
        policy.forward = lambda td: td.set("action", act(td["observation"]) * 0 + 1)
        batch, _ = collect(policy)
        assert (batch["action"] == 1).all()

    def test_global_hooks_are_called(self):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        try:
            collect(TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"]), action_space=CONTINUOUS)
        finally:
            handle.remove()
        assert {"TensorDictModule", "Linear"} <= set(seen)

    def test_a_missing_key_is_told_with_those_there_are(self):
        with pytest.raises(PolicyError, match=r"Did you mean 'observation'\? The observation has 'observation'"):
            collect(TensorDictModule(act, ["observatoin"], ["action"]))
