"""Every kind of policy against a loop written by hand, and the two ways to call a chain against each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type
from torch import distributions as D
from torch import nn

from rlcollect import Collector, ExplorationType, PolicyError, set_exploration_type
from rlcollect.rollout.seeding import lane_seed, torch_seed
from rlcollect.testing import Probe, check_batch
from tests.rollout.helpers import BOX, DISCRETE, bits, collect, collecting, leaf_keys, maker, received

SEED = 11
STEPS, BATCHES = 6, 3
CONTINUOUS = spaces.Box(-5, 5, (2,), np.float32)
PARTS = spaces.Dict({"position": BOX, "inner": spaces.Dict({"speed": BOX})})
RANDOM, DETERMINISTIC = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC

both_explorations = pytest.mark.parametrize("exploration", [RANDOM, DETERMINISTIC], ids=["random", "deterministic"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])


class Walk(Probe):
    """Observations, lengths of episodes and their ends come from a stream of its own; actions move it.

    So a wrong action, a draw too many or a missed reset shows in all that follows.
    """

    def __init__(self, action_space: gym.Space[Any] = DISCRETE, observation_space: gym.Space[Any] = BOX):
        super().__init__(5)
        self.action_space, self.observation_space = action_space, observation_space

    def _observe(self):
        push = 0.0 if self.last_action is None else 0.1 * float(np.sum(self.last_action))
        draws = [np.tanh(self.np_random.uniform(-1, 1, 3) + push).astype(np.float32) for _ in range(2)]
        return draws[0] if self.observation_space is BOX else {"position": draws[0], "inner": {"speed": draws[1]}}

    def _draw_limit(self):
        self.end = ("terminated", "truncated")[self.np_random.integers(2)]
        return int(self.np_random.integers(2, 6))


# --- the kinds -----------------------------------------------------------------------------------------------------


def part(module, reads, writes):
    """A TensorDictModule; single keys need no list."""
    keys = [key if isinstance(key, list) else [key] for key in (reads, writes)]
    return TensorDictModule(module, *keys)


def linear(reads, writes, wide, out):
    return part(nn.Linear(wide, out), reads, writes)


def sampler(*params, kind=D.Categorical, key="action", **options):
    return ProbabilisticTensorDictModule(list(params), [key], distribution_class=kind, **options)


def categorical(logits="logits", **options):
    """The usual discrete actor."""
    return ProbabilisticTensorDictSequential(linear("observation", logits, 3, 4), sampler(logits, **options))


def gaussian(kind=D.Normal, **options):
    """The usual continuous actor."""
    return ProbabilisticTensorDictSequential(
        part(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), "observation", ["loc", "scale"]),
        sampler("loc", "scale", kind=kind, return_log_prob=True, **options),
    )


def independent(loc, scale):
    return D.Independent(D.Normal(loc, scale), 1)


def actor_critic(*heads):
    """A trunk that actor and critic share, in one chain."""
    return TensorDictSequential(
        part(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), "observation", [("net", "hidden")]), *heads
    )


def explored(logits):
    """What a function of the user does that goes by the exploration type itself."""
    chosen = D.Categorical(logits=logits)
    return chosen.sample() if interaction_type() is RANDOM else chosen.mode


def mapped(net):
    def policy(observation):
        logits = net(observation)
        action = explored(logits)
        return {
            "action": action,
            "log_prob": D.Categorical(logits=logits).log_prob(action),
            "more": {"logits": logits, "value": logits.sum(-1, keepdim=True)},
        }

    return policy


def by_name(net):
    def policy(tensordict):
        return tensordict.set("logits", net(tensordict["observation"])).set("action", explored(tensordict["logits"]))

    return policy


def by_short_name(net):
    def policy(td):
        return TensorDict({"action": explored(net(td["observation"]))}, td.batch_size)

    return policy


def by_annotation(net):
    def policy(data: TensorDictBase) -> TensorDictBase:
        return data.set("action", explored(net(data["observation"]))).set(("a", "b"), data["observation"] + 1)

    return policy


def by_keys(net):
    def policy(position, inner):
        return explored(net(position - inner["speed"]))

    return policy


class Bumped(TensorDictModule):
    """A `forward` of its own."""

    def forward(self, tensordict, *args, **kwargs):
        out = super().forward(tensordict, *args, **kwargs)
        return out.set("action", (out["action"] + 1) % 4)


class Scaled(TensorDictModuleBase):
    """A part that is no TensorDictModule, as exploration modules are; draws, too."""

    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["logits"], ["logits", "noise"]

    def forward(self, tensordict):
        noise = torch.rand_like(tensordict["logits"]) if interaction_type() is RANDOM else tensordict["logits"] * 0
        return tensordict.set("noise", noise).set("logits", tensordict["logits"] + noise)


class Ensemble(nn.Module):
    """Several critics in one call, as `torch.vmap` is used for."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(3, 4) for _ in range(5)])

    def forward(self, observation):
        params, _ = torch.func.stack_module_state(self.nets)
        one = lambda weights: torch.func.functional_call(self.nets[0], weights, (observation,))  # noqa: E731
        scores = torch.vmap(one)(params).movedim(0, -2)
        return scores.mean(-2).argmax(-1), scores


def noisy(observation):
    return observation[:2] * 3 + torch.randn(2)


def hooked(place):
    policy = categorical(return_log_prob=True)
    module = policy.module[0].module if place == "inner" else policy.module[0]
    double = lambda _module, _args, out: out * 2 if place == "inner" else out.set("logits", out["logits"] * 2)  # noqa: E731
    module.register_forward_hook(double)
    return policy


def recurrent():
    return TensorDictSequential(
        part(nn.GRUCell(3, 5), ["observation", "h"], [("next", "h")]),
        linear([("next", "h")], "logits", 5, 4),
        sampler("logits", return_log_prob=True),
    )


def with_tensordict(policy, shown):
    return policy(shown)


def with_observation(policy, shown):
    return policy(shown["observation"])


class Kind(NamedTuple):
    """A kind of policy, and how one calls it by hand."""

    make: Callable[[], Any]
    writes: Sequence[Any] = ("action",)
    ask: Callable[[Any, TensorDict], Any] = with_tensordict
    action_space: gym.Space[Any] = DISCRETE
    observation_space: gym.Space[Any] = BOX
    path: str = "direct"
    state: Mapping[str, int] = MappingProxyType({})  # widths of recurrent state
    only_lanes: bool = False


SCORED = ("logits", "action", "action_log_prob")
GAUSSIAN = ("loc", "scale", "action", "action_log_prob")

KINDS = {
    "module": Kind(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()), ask=with_observation, action_space=CONTINUOUS),
    "function": Kind(lambda: lambda observation: (observation[..., 0] * 1000).long() % 4, ask=with_observation),
    "function by name of the keys": Kind(
        lambda: by_keys(nn.Linear(3, 4)),
        ask=lambda policy, shown: policy(shown["position"], shown["inner"]),
        observation_space=PARTS,
        path="tensordict",
    ),
    "function to a mapping": Kind(
        lambda: mapped(nn.Linear(3, 4)),
        ("action", "log_prob", ("more", "logits"), ("more", "value")),
        with_observation,
    ),
    "function of tensordict": Kind(lambda: by_name(nn.Linear(3, 4)), ("logits", "action"), path="tensordict"),
    "function of td": Kind(lambda: by_short_name(nn.Linear(3, 4)), path="tensordict"),
    "function of an annotated TensorDict": Kind(
        lambda: by_annotation(nn.Linear(3, 4)), ("action", ("a", "b")), path="tensordict"
    ),
    "TensorDictModule": Kind(
        lambda: part(lambda o: ((o[..., 1] * 99).long() % 4, o * 2), "observation", ["action", "twice"]),
        ("action", "twice"),
    ),
    "TensorDictSequential": Kind(
        lambda: TensorDictSequential(
            part(lambda p, s: (p - s, p), ["position", ("inner", "speed")], [("x", "gap"), "_"]),
            linear([("x", "gap")], ("x", "deep", "y"), 3, 4),
            part(lambda y: y.argmax(-1), [("x", "deep", "y")], "action"),
        ),
        ("action", ("x", "gap"), ("x", "deep", "y")),
        observation_space=PARTS,
    ),
    "Categorical of logits": Kind(categorical, ("logits", "action")),
    "Categorical of logits, scored": Kind(lambda: categorical(return_log_prob=True), SCORED),
    "Categorical with torch's checks": Kind(
        lambda: categorical(return_log_prob=True, distribution_kwargs={"validate_args": True}), SCORED
    ),
    "Categorical of nested logits": Kind(
        lambda: categorical(("pi", "logits"), return_log_prob=True, log_prob_key=("pi", "score")),
        ("action", ("pi", "logits"), ("pi", "score")),
    ),
    "Categorical of private logits": Kind(
        lambda: ProbabilisticTensorDictSequential(
            linear("observation", "_logits", 3, 4),
            ProbabilisticTensorDictModule({"logits": "_logits"}, ["action"], distribution_class=D.Categorical),
        ),
    ),
    "Categorical of probs": Kind(
        lambda: ProbabilisticTensorDictSequential(
            part(nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), "observation", "probs"),
            sampler("probs", return_log_prob=True),
        ),
        ("probs", "action", "action_log_prob"),
    ),
    "several Categoricals": Kind(
        lambda: ProbabilisticTensorDictSequential(
            part(nn.Sequential(nn.Linear(3, 10), nn.Unflatten(-1, (2, 5))), "observation", "logits"),
            sampler("logits", return_log_prob=True),
        ),
        SCORED,
        action_space=spaces.MultiDiscrete([5, 5]),
    ),
    "Normal": Kind(gaussian, GAUSSIAN, action_space=CONTINUOUS),
    "Independent Normal": Kind(lambda: gaussian(independent), GAUSSIAN, action_space=CONTINUOUS),
    "Independent Normal by a lambda": Kind(
        lambda: gaussian(lambda loc, scale: D.Independent(D.Normal(loc, scale), 1)), GAUSSIAN, action_space=CONTINUOUS
    ),
    "Normal of one scale": Kind(
        lambda: ProbabilisticTensorDictSequential(
            linear("observation", "loc", 3, 2),
            sampler("loc", kind=D.Normal, return_log_prob=True, distribution_kwargs={"scale": 0.3}),
        ),
        ("loc", "action", "action_log_prob"),
        action_space=CONTINUOUS,
    ),
    "Bernoulli, cast": Kind(
        lambda: TensorDictSequential(
            linear("observation", "logits", 3, 3),
            sampler("logits", kind=D.Bernoulli, key="bits", return_log_prob=True),
            part(lambda value: value.to(torch.int8), "bits", "action"),
        ),
        ("logits", "bits", "bits_log_prob", "action"),
        action_space=spaces.MultiBinary(3),
    ),
    "Bernoulli": Kind(
        lambda: ProbabilisticTensorDictSequential(
            linear("observation", "logits", 3, 3), sampler("logits", kind=D.Bernoulli, return_log_prob=True)
        ),
        SCORED,
        action_space=spaces.MultiBinary(3),
    ),
    "OneHotCategorical, mapped": Kind(
        lambda: TensorDictSequential(
            linear("observation", "logits", 3, 4),
            sampler("logits", kind=D.OneHotCategorical, key="one_hot", return_log_prob=True),
            part(lambda value: value.argmax(-1), "one_hot", "action"),
        ),
        ("logits", "one_hot", "one_hot_log_prob", "action"),
    ),
    "actor and critic": Kind(
        lambda: actor_critic(
            linear([("net", "hidden")], "state_value", 8, 1),
            linear([("net", "hidden")], "logits", 8, 4),
            sampler("logits", return_log_prob=True),
        ),
        (("net", "hidden"), "state_value", *SCORED),
    ),
    "a draw in the middle of a chain": Kind(
        lambda: actor_critic(
            linear([("net", "hidden")], "logits", 8, 4),
            sampler("logits", return_log_prob=True),
            part(lambda hidden, action: hidden.sum(-1) + action, [("net", "hidden"), "action"], "q"),
        ),
        (("net", "hidden"), "q", *SCORED),
    ),
    "an actor of parts": Kind(
        lambda: ProbabilisticTensorDictSequential(
            TensorDictSequential(linear("observation", "x", 3, 6), linear("x", "logits", 6, 4)),
            sampler("logits", return_log_prob=True),
        ),
        ("x", *SCORED),
    ),
    "two draws": Kind(
        lambda: ProbabilisticTensorDictSequential(
            linear("observation", "logits", 3, 4),
            sampler("logits", key="first", return_log_prob=True),
            sampler("logits", return_log_prob=True),
        ),
        ("first", "first_log_prob", *SCORED),
    ),
    "an interaction type of its own": Kind(
        lambda: categorical(return_log_prob=True, default_interaction_type=InteractionType.MODE), SCORED
    ),
    "own forward": Kind(
        lambda: Bumped(lambda o: (o[..., 0] * 99).long() % 4, ["observation"], ["action"]), path="tensordict"
    ),
    "own forward of a part": Kind(
        lambda: TensorDictSequential(
            linear("observation", "x", 3, 4), Bumped(lambda x: x.argmax(-1), ["x"], ["action"])
        ),
        ("x", "action"),
    ),
    "a part of its own kind": Kind(
        lambda: ProbabilisticTensorDictSequential(
            linear("observation", "logits", 3, 4), Scaled(), sampler("logits", return_log_prob=True)
        ),
        ("noise", *SCORED),
    ),
    "a hook on a network": Kind(lambda: hooked("inner"), SCORED),
    "a hook on a part": Kind(lambda: hooked("part"), SCORED),
    "torch.vmap": Kind(
        lambda: torch.vmap(noisy, randomness="different"),
        ask=with_observation,
        action_space=CONTINUOUS,
        only_lanes=True,
    ),
    "torch.vmap over networks": Kind(
        lambda: part(Ensemble(), "observation", ["action", "scores"]), ("action", "scores")
    ),
    "torch.compile": Kind(
        lambda: torch.compile(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), backend="eager"),
        ask=with_observation,
        action_space=CONTINUOUS,
    ),
    "recurrent": Kind(recurrent, SCORED, state={"h": 5}),
}


# --- the loop by hand ------------------------------------------------------------------------------------------------


def as_tuple(key):
    return key if isinstance(key, tuple) else (key,)


def flat(result):
    """What a policy wrote by key, private names left out."""
    if isinstance(result, torch.Tensor):
        return {("action",): result}
    data = result if isinstance(result, TensorDictBase) else TensorDict(result)
    items = [(as_tuple(key), value) for key, value in data.items(include_nested=True, leaves_only=True)]
    return {key: value for key, value in items if not any(name.startswith("_") for name in key)}


def shown_of(values, lanes):
    """Observations of all lanes in one TensorDict, or the one of a single lane."""
    rows = [TensorDict(value if isinstance(value, dict) else {"observation": value}) for value in values]
    return torch.stack(rows) if lanes else rows[0]


def by_hand(kind, lanes, exploration, steps):
    """Acts and steps, lane by lane; writes down what the policy was shown, what it wrote, and what came of it."""
    torch.manual_seed(SEED)
    policy = kind.make()
    envs = [Walk(kind.action_space, kind.observation_space) for _ in range(lanes or 1)]
    current = [env.reset(seed=lane_seed(SEED, 0, lane))[0] for lane, env in enumerate(envs)]
    lead = [lanes] if lanes else []
    state = {key: torch.zeros(*lead, wide) for key, wide in kind.state.items()}
    frames = []
    with torch.no_grad(), set_exploration_type(exploration):
        torch.manual_seed(torch_seed(SEED, 0))
        for _ in range(steps):
            shown = shown_of(current, lanes).update(state)
            frame = {**flat(shown), **flat(kind.ask(policy, shown))}
            state = {key: frame["next", key].clone() for key in state}
            actions = frame["action",].numpy() if lanes else frame["action",].numpy()[None]
            outcomes = [env.step(action) for env, action in zip(envs, actions, strict=True)]
            after = shown_of([outcome[0] for outcome in outcomes], lanes)
            frame |= {("next", *key): value for key, value in flat(after).items()}
            for name, place in (("terminated", 2), ("truncated", 3)):
                flags = torch.tensor([[outcome[place]] for outcome in outcomes])
                frame["next", name] = flags if lanes else flags[0]
            current = [outcome[0] for outcome in outcomes]
            for lane, outcome in enumerate(outcomes):
                if outcome[2] or outcome[3]:
                    current[lane] = envs[lane].reset()[0]
                    for value in state.values():
                        (value[lane] if lanes else value).zero_()
            frames.append(frame)
    return {key: torch.stack([frame[key] for frame in frames], len(lead)) for key in frames[0]}


def collected(kind, lanes, exploration):
    """Batches of the same policy over the same lanes, and how it was called."""
    torch.manual_seed(SEED)
    with Collector(
        lambda: Walk(kind.action_space, kind.observation_space),
        kind.make(),
        frames_per_batch=STEPS * (lanes or 1),
        num_envs=lanes,
        exploration_type=exploration,
    ) as collector:
        collector.set_seed(SEED)
        batches = [collector.next() for _ in range(BATCHES)]
        return batches, path_of(collector)


def path_of(collector):
    return repr(collector).split("policy=<")[1].split(" path")[0]


def assert_same_bits(value, expected, name):
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (value, expected)]
    assert torch.equal(*raw), name


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
class TestEveryKind:
    """Bit for bit: the loop by hand shows the same tensors in one piece, so that every kernel rounds alike."""

    @both_explorations
    @pytest.mark.parametrize("lanes", [None, 16], ids=["single", "lanes"])
    @pytest.mark.parametrize("name", sorted(KINDS))
    def test_is_called_as_by_hand(self, name, lanes, exploration):
        kind = KINDS[name]
        if kind.only_lanes and lanes is None:
            pytest.skip("it maps over the lanes")
        expected = by_hand(kind, lanes, exploration, STEPS * BATCHES)
        batches, path = collected(kind, lanes, exploration)
        batch = torch.cat(batches, -1)
        for previous, each in zip([None, *batches], batches, strict=False):
            check_batch(each, previous=previous)
        assert path == kind.path
        assert leaf_keys(batch) == {
            key for key in expected if key[0] != "next"
        } == {*map(as_tuple, kind.writes), *map(as_tuple, kind.state), *self.observation_keys(kind)}  # fmt: skip
        for key, value in expected.items():
            assert_same_bits(batch[key], value.to(batch[key].dtype) if key == ("action",) else value, key)
        assert batch["next", "terminated"].sum() + batch["next", "truncated"].sum() >= 3
        assert batch["next", "terminated"].any()
        assert exploration is DETERMINISTIC or len(batch["action"].unique()) > 1

    @staticmethod
    def observation_keys(kind):
        return {("observation",)} if kind.observation_space is BOX else {("position",), ("inner", "speed")}

    def test_one_hot_actions_are_refused_with_what_to_do(self):
        policy = ProbabilisticTensorDictSequential(
            linear("observation", "logits", 3, 4), sampler("logits", kind=D.OneHotCategorical)
        )
        with pytest.raises(PolicyError, match=r"'action'.*Discrete\(4\).*argmax\(-1\)"):
            collect(policy)


class TestWhatAPartMayDo:
    """One part of a chain that is not known gets a TensorDict of its own: what it does there holds for the chain."""

    class Part(TensorDictModuleBase):
        def __init__(self, in_keys, out_keys, forward):
            super().__init__()
            self.in_keys, self.out_keys, self._forward = in_keys, out_keys, forward

        def forward(self, tensordict):
            return self._forward(tensordict)

    FORWARDS: ClassVar = {
        "sets what it declares": lambda td: td.set("x", td["logits"] + 1),
        "sets what it read": lambda td: td.set("logits", td["logits"].flip(-1)).set("x", td["logits"]),
        "changes what it read in place": lambda td: td.set("x", td["logits"].mul_(-1)),
        "sets the observation": lambda td: td.set("observation", -td["observation"]).set("x", td["logits"]),
        "writes more than it declares": lambda td: td.set("x", td["logits"]).set(("y", "z"), td["logits"]),
        "reads more than it declares": lambda td: td.set("x", td["logits"] + td["observation"][..., :1]),
        "deletes what it read": lambda td: td.set("x", td["logits"]).exclude("logits"),
    }

    @single_and_lanes
    @pytest.mark.parametrize("name", sorted(FORWARDS))
    def test_it_gives_what_the_whole_chain_gives(self, name, lanes):
        torch.manual_seed(0)
        policy = TensorDictSequential(
            linear("observation", "logits", 3, 4),
            self.Part(["logits"], ["x"], self.FORWARDS[name]),
            part(lambda x: x.argmax(-1), "x", "action"),
            part(lambda o: o * 2, "observation", "twice"),
        )
        batch, envs = collect(policy, lanes)
        general, _ = collect(lambda td: policy(td), lanes)  # noqa: PLW0108 - its parameter says what it takes
        assert bits(batch) == bits(general)
        assert torch.equal(received(envs, lanes), batch["action"])

    @single_and_lanes
    def test_what_it_replaces_later_only_holds_too(self, lanes):
        """A mask that allows everything at first: the first call shows no change."""

        def mask(td):
            calls.append(1)
            scores = td["logits"]
            return td.set("logits", scores.clone() if len(calls) == 1 else scores.flip(-1)).set("x", scores)

        made = []
        for whole in (False, True):
            torch.manual_seed(0)
            calls: list[int] = []
            policy = TensorDictSequential(
                linear("observation", "logits", 3, 4),
                self.Part(["logits"], ["x"], mask),
                part(lambda scores: scores.argmax(-1), "logits", "action"),
            )
            made.append(collect((lambda td, policy=policy: policy(td)) if whole else policy, lanes)[0])
        assert bits(made[0]) == bits(made[1])

    @single_and_lanes
    def test_it_may_read_a_group_of_keys_that_the_chain_wrote(self, lanes):
        torch.manual_seed(0)
        policy = TensorDictSequential(
            linear("observation", ("net", "logits"), 3, 4),
            self.Part(["net"], ["action"], lambda td: td.set("action", td["net"]["logits"].argmax(-1))),
        )
        batch, _ = collect(policy, lanes)
        assert torch.equal(batch["action"], batch["net", "logits"].argmax(-1))


# --- the two paths ---------------------------------------------------------------------------------------------------

KEYS = ["a", "b", ("n", "a"), ("n", "b"), ("n", "m", "c"), "_p", ("n", "_p"), "observation"]
STEPS_OF_A_CHAIN = ["linear", "join", "drop", "Categorical", "probs", "Normal", "Bernoulli", "Independent"]


@st.composite
def chains(draw):
    """A chain of known parts over keys that are written, read, written again; it ends with a draw or the best score."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    wide: dict[Any, int] = {"observation": 3}
    parts: list[Any] = []
    for number in range(draw(st.integers(0, 5))):
        reads = draw(st.sampled_from(sorted(wide, key=str)))
        writes = draw(st.sampled_from(KEYS))
        scored = draw(st.booleans())
        parts += _step(draw, draw(st.sampled_from(STEPS_OF_A_CHAIN)), number, reads, writes, scored, wide)
        if len(parts) > 1 and draw(st.booleans()):  # chains in chains
            parts = [*parts[:-2], TensorDictSequential(*parts[-2:])]
    reads = draw(st.sampled_from(sorted(wide, key=str)))
    parts.append(linear([reads], "scores", wide[reads], 4))
    if draw(st.booleans()):
        ends = ProbabilisticTensorDictModule(
            {"logits": "scores"}, ["action"], distribution_class=D.Categorical, return_log_prob=draw(st.booleans())
        )
        return draw(st.sampled_from([TensorDictSequential, ProbabilisticTensorDictSequential]))(*parts, ends)
    return TensorDictSequential(*parts, part(lambda scores: scores.argmax(-1), "scores", "action"))


def _step(draw, kind, number, reads, writes, scored, wide):
    width = wide[reads]
    if kind == "join":
        other = draw(st.sampled_from(sorted(wide, key=str)))
        both = width + wide[other]
        more = ("j", str(number))
        wide |= {writes: both, more: 1}
        return [
            part(
                lambda x, y: (torch.cat([x, y], -1), (x.sum(-1) * y.sum(-1)).unsqueeze(-1)),
                [reads, other],
                [writes, more],
            )
        ]
    if kind == "drop":
        wide[writes] = width
        return [part(lambda x: (x, x + 1), [reads], ["_", writes])]
    if kind in ("linear", "Categorical", "probs"):
        out = draw(st.integers(1, 6))
        network = nn.Sequential(nn.Linear(width, out), nn.Softmax(-1)) if kind == "probs" else nn.Linear(width, out)
        wide[writes] = out
        found = [part(network, [reads], [writes])]
        if kind != "linear":  # whole numbers are for nobody to compute with
            found.append(
                _drawn({"logits" if kind == "Categorical" else "probs": writes}, number, D.Categorical, scored)
            )
        return found
    wide |= {("s", str(number)): width}
    if kind == "Bernoulli":
        return [_drawn({"logits": reads}, number, D.Bernoulli, scored)]
    wide[writes] = width  # and may be written again, by what is no scale
    first = part(lambda x: x.abs() + 0.1, [reads], [writes])
    return [
        first,
        _drawn({"loc": reads, "scale": writes}, number, D.Normal if kind == "Normal" else independent, scored),
    ]


def _drawn(params, number, kind, scored):
    key = ("s", str(number))
    return ProbabilisticTensorDictModule(params, [key], distribution_class=kind, return_log_prob=scored)


class TestTheTwoPaths:
    """Called part by part, or with a TensorDict as a whole: the same keys and the same bits."""

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(chains(), st.sampled_from([RANDOM, DETERMINISTIC]), st.sampled_from([None, 1, 3]))
    def test_any_chain_of_known_parts(self, policy, exploration, lanes):
        options = {"exploration_type": exploration, "init_random_frames": 2}
        made = []
        for form, path in ((policy, "direct"), (lambda td: policy(td), "tensordict")):  # noqa: PLW0108
            with collecting(form, lanes, **options) as (collector, _):
                assert path_of(collector) == path
                collector.set_seed(SEED)
                made.append(torch.cat([collector.next() for _ in range(2)], -1))
        assert bits(made[0]) == bits(made[1])


# --- exploration -----------------------------------------------------------------------------------------------------

FORMS = {
    "direct": lambda policy: policy,
    "tensordict": lambda policy: lambda td: policy(td),  # noqa: PLW0108
}
forms = pytest.mark.parametrize("form", sorted(FORMS))


class TestTheExplorationType:
    @forms
    @both_explorations
    @pytest.mark.parametrize("around", [None, *InteractionType])
    def test_of_the_collector_decides_whatever_stands_around_it(self, around, exploration, form):
        torch.manual_seed(0)
        policy = categorical(return_log_prob=True, default_interaction_type=InteractionType.MEDIAN)
        with set_exploration_type(around):
            batch, _ = collect(FORMS[form](policy), exploration_type=exploration)
            assert interaction_type() is around
        assert torch.equal(batch["action"], batch["logits"].argmax(-1)) == (exploration is DETERMINISTIC)

    @forms
    @pytest.mark.parametrize("calls", [0, 1, 6], ids=["at construction", "in the first step", "later"])
    def test_is_put_back_after_an_exception_of_the_policy(self, calls, form):
        made = []

        def failing(observation):
            made.append(1)
            if len(made) > calls:
                raise ZeroDivisionError
            return observation.new_zeros(*observation.shape[:-1], 4)

        policy = ProbabilisticTensorDictSequential(part(failing, "observation", "logits"), sampler("logits"))
        with set_exploration_type(InteractionType.MEDIAN):
            with pytest.raises((ZeroDivisionError, RuntimeError, PolicyError)):
                collect(FORMS[form](policy), exploration_type=RANDOM)
            assert interaction_type() is InteractionType.MEDIAN

    @pytest.mark.parametrize("exploration", [InteractionType.MEAN, InteractionType.MODE])
    def test_may_be_any_that_the_distribution_has(self, exploration):
        torch.manual_seed(0)
        batch, _ = collect(gaussian(), action_space=CONTINUOUS, exploration_type=exploration)
        assert torch.equal(batch["action"], batch["loc"])

    def test_that_the_distribution_lacks_is_an_error_at_construction(self):
        with pytest.raises(PolicyError, match="median is not implemented"):
            collect(categorical(), exploration_type=InteractionType.MEDIAN)


# --- warm-up ---------------------------------------------------------------------------------------------------------


class TestWarmUp:
    """FAULTS 33: what the policy writes is there from the first frame on, whoever acts."""

    WRITES: ClassVar = ["state_value", ("net", "hidden"), ("pi", "logits"), "action_log_prob"]

    @staticmethod
    def policy():
        torch.manual_seed(0)
        return actor_critic(
            linear([("net", "hidden")], "state_value", 8, 1),
            linear([("net", "hidden")], ("pi", "logits"), 8, 4),
            sampler(("pi", "logits"), return_log_prob=True),
        )

    @forms
    @both_explorations
    @pytest.mark.parametrize(
        ("lanes", "frames"), [(None, 1), (None, 6), (3, 1), (3, 7), (3, 12), (3, 14), (3, 40)]
    )  # batches are of 4 steps
    def test_zeros_stand_where_chance_acted(self, lanes, frames, exploration, form):
        with collecting(FORMS[form](self.policy()), lanes, init_random_frames=frames, exploration_type=exploration) as (
            collector,
            _,
        ):
            batches = [collector.next() for _ in range(4)]
        assert len({frozenset(batch.keys(True, True)) for batch in batches}) == 1
        batch = torch.cat(batches, -1)
        by_chance = batch["collector", "policy_version"] == -1
        shares = [frames // (lanes or 1) + (lane < frames % (lanes or 1)) for lane in range(lanes or 1)]
        expected = torch.tensor([[t < share for t in range(16)] for share in shares])
        assert torch.equal(by_chance, expected if lanes else expected[0])
        assert (batch["collector", "policy_version"][~by_chance] == 0).all()
        for key in self.WRITES:
            assert not batch[key][by_chance].any()
            acted = batch[key][~by_chance]
            assert acted.reshape(len(acted), -1).any(-1).all()

    @forms
    def test_after_it_the_policy_acts_as_it_says(self, form):
        batch, envs = collect(FORMS[form](self.policy()), init_random_frames=7)
        acts = batch["collector", "policy_version"] == 0
        scores = D.Categorical(logits=batch["pi", "logits"]).log_prob(batch["action"])
        assert torch.equal(scores[acts], batch["action_log_prob"][acts])
        assert torch.equal(received(envs, 3), batch["action"])

    @forms
    def test_a_policy_that_needs_a_mask_is_only_shown_real_ones(self, form):
        """FAULTS 33: a mask that forbids everything was made up for set-up."""

        def masked(seen, mask):
            assert mask.any(-1).all(), "made up"
            return torch.where(mask.bool(), seen.sum(-1, keepdim=True), -torch.inf)

        policy = ProbabilisticTensorDictSequential(
            part(masked, ["seen", "action_mask"], "logits"), sampler("logits", return_log_prob=True)
        )
        with Collector(
            Masked, FORMS[form](policy), frames_per_batch=12, num_envs=3, init_random_frames=14
        ) as collector:
            batches = [collector.next() for _ in range(3)]
        assert len({frozenset(batch.keys(True, True)) for batch in batches}) == 1
        batch = torch.cat(batches, -1)
        assert (batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)) == 1).all()


class Masked(Probe):
    """Allows some of its actions, others each time."""

    def __init__(self):
        super().__init__(5)
        self.action_space = DISCRETE
        self.observation_space = spaces.Dict({"seen": BOX, "action_mask": spaces.Box(0, 1, (4,), np.int8)})

    def _observe(self):
        mask = np.zeros(4, np.int8)
        mask[self.np_random.integers(4, size=2)] = 1
        return {"seen": self.np_random.uniform(-1, 1, 3).astype(np.float32), "action_mask": mask}


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Wrong:
    """A function of the observation that gives, in one call, another value in lane 1 (or in the single one).

    Args:
        call: which, counted from 0 after the one at construction.
        value: given there.
        good: given otherwise, by each lane.
    """

    def __init__(self, call, value, good):
        self.call, self.value, self.good = call, value, torch.as_tensor(good)
        self.calls = -1

    def __call__(self, observation):
        made = self.good.expand(observation.shape[:-1] + self.good.shape).clone()
        if self.calls == self.call:
            (made if observation.ndim == 1 else made[1])[...] = torch.as_tensor(self.value, dtype=made.dtype)
        self.calls += 1
        return made


def fails(policy, lanes=3, batches=3, **options):
    """The error of some batch; the collector is closed then, and its environments are."""
    envs = []
    action_space = options.pop("action_space", DISCRETE)
    collector = Collector(
        maker(envs, action_space=action_space), policy, frames_per_batch=4 * (lanes or 1), num_envs=lanes, **options
    )
    with pytest.raises((PolicyError, RuntimeError, ValueError)) as raised:
        list(itertools.islice(collector, batches))
    assert collector.closed
    assert [env.closed for env in envs] == [1] * (lanes or 1)
    return raised.value


NAN, INF = float("nan"), float("inf")


def wrong_categorical(value, key="logits", call=5):
    first = part(Wrong(call, value, [0.1, 0.2, 0.3, 0.4]), "observation", key)
    return ProbabilisticTensorDictSequential(
        first,
        ProbabilisticTensorDictModule(
            {"logits": key}, ["action"], distribution_class=D.Categorical, return_log_prob=True
        ),
    )


def wrong_normal(key, value, call=5):
    other = "scale" if key == "loc" else "loc"
    return ProbabilisticTensorDictSequential(
        part(Wrong(call, value, [0.5, 0.5]), "observation", key),
        part(lambda o: o.new_ones(*o.shape[:-1], 2), "observation", other),
        sampler("loc", "scale", kind=D.Normal, return_log_prob=True),
    )


class TestParametersThatAreNoNumbers:
    """Torch's own checks at each call are left out; what they would find is found all the same."""

    @single_and_lanes
    @both_explorations
    @pytest.mark.parametrize("key", ["logits", ("pi", "logits")], ids=["root", "nested"])
    def test_nan_logits_name_lane_and_step(self, key, exploration, lanes):
        error = fails(wrong_categorical(NAN, key), lanes, exploration_type=exploration)
        assert isinstance(error, PolicyError)
        assert f"step 5: lane {1 if lanes else 0}: {key!r} is NaN" in str(error)

    @single_and_lanes
    @pytest.mark.parametrize("key", ["loc", "scale"])
    def test_nan_of_a_normal_names_lane_and_step(self, key, lanes):
        error = fails(wrong_normal(key, [0.5, NAN]), lanes, action_space=CONTINUOUS)
        assert isinstance(error, PolicyError)
        assert f"step 5: lane {1 if lanes else 0}: {key!r} is NaN" in str(error)

    def test_in_the_first_step_of_a_later_batch(self):
        assert "step 4: lane 1: 'logits' is NaN" in str(fails(wrong_categorical(NAN, call=4)))

    def test_after_a_warm_up(self):
        """The first calls of the policy are in step 2, when lanes 1 and 2 are done with chance."""
        error = fails(wrong_categorical(NAN, call=0), init_random_frames=7)
        assert "step 2: lane 1: 'logits' is NaN" in str(error)

    def test_where_chance_acted_they_do_not_matter(self):
        policy = wrong_categorical(NAN, call=0)
        batch, _ = collect(policy, init_random_frames=8)  # 3, 3, 2: only lane 2 acts in step 2
        assert not batch["logits"].isnan().any()

    @pytest.mark.parametrize("path", ["private", "checked", "built", "tensordict"])
    def test_are_found_on_every_path(self, path):
        """By torch's own words where torch checks, at that very step."""
        space = DISCRETE
        if path == "private":
            policy = wrong_categorical(NAN, "_logits")
        elif path == "tensordict":
            policy = FORMS[path](wrong_categorical(NAN))
        elif path == "checked":
            policy = wrong_categorical(NAN)
            policy.module[1].distribution_kwargs = {"validate_args": True}
        else:
            policy, space = wrong_normal("loc", NAN), CONTINUOUS
            policy.module[2].distribution_class = independent
        error = fails(policy, action_space=space)
        assert "step 5" in str(error) + str(error.__cause__)

    @single_and_lanes
    @pytest.mark.parametrize("value", [-INF, INF, [0.0, INF, 0.0, 0.0]], ids=["all forbidden", "inf", "one inf"])
    def test_logits_that_make_no_probabilities(self, value, lanes):
        """A mask that forbids every action: torch refuses, and a first action drawn from nothing would be made up."""
        error = fails(wrong_categorical(value), lanes)
        assert "step 5" in str(error) + str(error.__cause__)

    @pytest.mark.parametrize("value", [-1.0, 0.0])
    def test_scales_that_are_not_positive(self, value):
        """As torch has it; without its check the log-probabilities would be NaN, and stay so in the learner."""
        error = fails(wrong_normal("scale", value), action_space=CONTINUOUS)
        assert "step 5" in str(error) + str(error.__cause__)

    @single_and_lanes
    def test_that_are_written_over_are_right_if_those_drawn_from_were(self, lanes):
        """The key is used again for something else, which is no scale."""
        torch.manual_seed(0)
        policy = TensorDictSequential(
            part(lambda o: (o[..., :2], o[..., 1:].abs() + 0.1), "observation", ["loc", "scale"]),
            sampler("loc", "scale", kind=D.Normal, return_log_prob=True),
            part(lambda loc, scale: (loc * NAN, scale.log()), ["loc", "scale"], ["loc", "scale"]),
        )
        batch, _ = collect(policy, lanes, action_space=CONTINUOUS)
        assert torch.equal(batch["scale"], (batch["observation"][..., 1:].abs() + 0.1).log())
        assert not batch["action_log_prob"].isnan().any()

    @single_and_lanes
    def test_that_are_written_over_are_wrong_if_those_drawn_from_were(self, lanes):
        policy = TensorDictSequential(*wrong_categorical(NAN).module, part(torch.zeros_like, "logits", "logits"))
        error = fails(policy, lanes)
        assert "step 5" in str(error) + str(error.__cause__)

    def test_a_scale_of_each_lane_is_one(self):
        """It has the lanes' dimension, and no time."""
        torch.manual_seed(0)
        scale = torch.tensor([[0.1], [0.2], [0.3]])
        policy = ProbabilisticTensorDictSequential(
            linear("observation", "loc", 3, 2),
            sampler("loc", kind=D.Normal, return_log_prob=True, distribution_kwargs={"scale": scale}),
        )
        batch, _ = collect(policy, action_space=CONTINUOUS)
        expected = D.Normal(batch["loc"], scale.unsqueeze(1)).log_prob(batch["action"])
        assert torch.allclose(batch["action_log_prob"], expected)

    def test_some_forbidden_actions_are_as_they_should_be(self):
        policy = ProbabilisticTensorDictSequential(
            part(
                lambda o: torch.where(torch.arange(4) % 2 == 1, o.sum(-1, keepdim=True), -INF), "observation", "logits"
            ),
            sampler("logits", return_log_prob=True),
        )
        batch, _ = collect(policy)
        assert set(batch["action"].unique().tolist()) == {1, 3}
        assert torch.allclose(batch["action_log_prob"], torch.tensor(0.5).log())


class TestCheckActions:
    """`check_actions=True` looks at every action, and says whose it is."""

    WRONG: ClassVar = {
        "NaN": (CONTINUOUS, [0.0, NAN], [0.5, 0.5]),
        "NaN of a scalar": (spaces.Box(-1, 1, (), np.float32), NAN, 0.5),
        "NaN of float64": (spaces.Box(-1, 1, (2,), np.float64), [NAN, 0.0], [0.5, 0.5]),
        "too high": (DISCRETE, 4, 3),
        "negative": (DISCRETE, -1, 0),
        "below the start": (spaces.Discrete(4, start=2), 1, 2),
        "above, with a start": (spaces.Discrete(4, start=-3), 1, 0),
        "too high in one part": (spaces.MultiDiscrete([2, 3]), [0, 3], [1, 2]),
        "negative in one part": (spaces.MultiDiscrete([2, 3]), [-1, 0], [0, 0]),
        "below the start of one part": (spaces.MultiDiscrete([2, 3], start=[5, 7]), [6, 6], [5, 7]),
        "too high in a grid": (spaces.MultiDiscrete([[2, 3], [4, 5]]), [[0, 0], [4, 0]], [[1, 2], [3, 4]]),
        "no bit": (spaces.MultiBinary(2), [2, 0], [1, 0]),
        "no bit, and one after a cast to int8": (spaces.MultiBinary(2), [257, 0], [1, 0]),
    }

    @single_and_lanes
    @pytest.mark.parametrize("name", sorted(WRONG))
    def test_names_lane_step_and_action(self, name, lanes):
        space, value, good = self.WRONG[name]
        error = fails(Wrong(5, value, good), lanes, action_space=space, check_actions=True)
        assert isinstance(error, PolicyError)
        assert f"step 5: lane {1 if lanes else 0}: 'action' is {value}" in str(error)

    @single_and_lanes
    @pytest.mark.parametrize("name", sorted(WRONG))
    def test_lets_pass_what_is_in_the_space(self, name, lanes):
        space, _, good = self.WRONG[name]
        batch, envs = collect(Wrong(5, good, good), lanes, action_space=space, check_actions=True)
        assert all(space.contains(np.asarray(action)) for env in envs for action in env.received)
        expected = torch.as_tensor(good, dtype=batch["action"].dtype)
        assert torch.equal(batch["action"], expected.expand_as(batch["action"]))

    @pytest.mark.parametrize(("part_of", "value"), [("g", [0, 3]), ("f", [NAN, 0.0])])
    def test_names_the_part_of_a_dict(self, part_of, value):
        space = spaces.Dict({"g": spaces.MultiDiscrete([2, 3]), "f": CONTINUOUS})
        good = {"g": [1, 2], "f": [0.5, 0.5]}
        wrongs = {key: Wrong(5, value if key == part_of else good[key], good[key]) for key in good}
        error = fails(
            lambda observation: {key: wrong(observation) for key, wrong in wrongs.items()},
            action_space=space,
            check_actions=True,
        )
        assert f"step 5: lane 1: ('action', {part_of!r}) is {value}" in str(error)

    def test_of_an_actor(self):
        error = fails(wrong_normal("loc", NAN), action_space=CONTINUOUS, check_actions=True)
        assert "step 5: lane 1: 'action' is [nan, nan]" in str(error)

    def test_leaves_alone_the_lanes_that_chance_acts_in(self):
        """In step 2 lane 1 is shown to the policy together with lane 2, and acts by chance."""
        batch, _ = collect(Wrong(0, 9, 3), init_random_frames=8, check_actions=True)
        assert (batch["action"][batch["collector", "policy_version"] == 0] == 3).all()

    def test_off_by_default(self):
        batch, _ = collect(Wrong(5, NAN, [0.5, 0.5]), action_space=CONTINUOUS)
        assert batch["action"][1, 5].isnan().all()


def changing(first, later, call=5):
    """Gives something else from some call on, counted from 0 after the one at construction."""
    calls = []

    def given():
        calls.append(1)
        return later if len(calls) > call + 1 else first

    return given


def best(observation):
    return (observation[..., 0] * 1000).long() % 4


class TestOutputsThatChange:
    """The keys of a batch are those of the first call. Others later are an error, not data that is lost in silence."""

    CASES: ClassVar = {  # first keys, later keys, names that the error has
        "one is missing": (["x", "y"], ["x"], ["'y'"]),
        "one is new": (["x"], ["x", "y"], ["'y'"]),
        "another one": (["x"], ["y"], ["'x'", "'y'"]),
        "a nested one is missing": ([("x", "a"), ("x", "b")], [("x", "a")], ["'b'"]),
        "a nested one is new": ([("x", "a")], [("x", "a"), ("x", "b")], ["'b'"]),
        "the action is missing": (["action", "x"], ["x"], ["'action'"]),
    }

    @single_and_lanes
    @pytest.mark.parametrize("name", sorted(CASES))
    @pytest.mark.parametrize("form", ["TensorDict", "mapping"])
    def test_is_an_error_that_names_them(self, form, name, lanes):
        first, later, names = self.CASES[name]
        keys = changing(first, later)

        def by_tensordict(td):
            written = keys()
            td["action"] = best(td["observation"])
            for key in written:
                td[key] = td["action"] if key == "action" else td["observation"]
            return td.exclude("action") if "action" in first and "action" not in written else td

        def by_mapping(observation):
            data = by_tensordict(TensorDict({"observation": observation}, observation.shape[:-1]))
            return data.exclude("observation").to_dict()

        error = fails(by_tensordict if form == "TensorDict" else by_mapping, lanes)
        assert isinstance(error, PolicyError)
        assert "step 5: What the policy wrote" in str(error) or "step 5: The policy wrote" in str(error)
        assert all(name in str(error) for name in names)

    FORMS: ClassVar = {
        "action": best,
        "mapping": lambda o: {"action": best(o)},
        "mapping of more": lambda o: {"action": best(o), "x": o},
        "TensorDict": lambda o: TensorDict({"action": best(o)}, o.shape[:-1]),
        "nothing": lambda o: None,
    }

    @pytest.mark.parametrize(
        ("first", "later"),
        [
            ("action", "mapping"), ("action", "TensorDict"), ("action", "nothing"), ("mapping", "action"),
            ("mapping", "nothing"), ("mapping of more", "action"), ("TensorDict", "action"), ("TensorDict", "nothing"),
        ],
    )  # fmt: skip
    def test_of_form_too_is_told_as_what_it_is(self, first, later):
        """Not as an error of Python's in lines that the user never wrote."""
        form = changing(self.FORMS[first], self.FORMS[later])
        error = fails(lambda observation: form()(observation))  # noqa: PLW0108 - another each time
        assert isinstance(error, PolicyError)
        assert "step 5" in str(error)
        assert not any(word in str(error) for word in ("AttributeError", "TypeError", "tensor("))

    @pytest.mark.parametrize("later", [3, 1, 0])
    def test_of_number_in_a_chain_is_an_error(self, later):
        outputs = changing(2, later)
        policy = part(lambda o: (best(o), o, o)[: outputs()] or None, "observation", ["action", "x"])
        error = fails(policy)
        assert isinstance(error, PolicyError)
        assert "step 5" in str(error)


class TestKeysThatAreNotThere:
    """Told at construction, with the nearest name there is."""

    CASES: ClassVar = {
        "of the observation": (lambda: part(best, "observatoin", "action"), "observatoin", "observation"),
        "of a parameter": (lambda: lambda observatoin, other: best(observatoin), "observatoin", "observation"),
        "of a part": (
            lambda: TensorDictSequential(linear("observation", "hidden", 3, 4), part(best, "hiden", "action")),
            "hiden",
            "hidden",
        ),
        "of a part, nested": (
            lambda: TensorDictSequential(
                linear("observation", ("net", "hidden"), 3, 4), part(best, [("net", "hiden")], "action")
            ),
            "hiden",
            "hidden",
        ),
        "of a distribution": (
            lambda: ProbabilisticTensorDictSequential(
                linear("observation", "logits", 3, 4),
                ProbabilisticTensorDictModule({"logits": "logit"}, ["action"], distribution_class=D.Categorical),
            ),
            "logit",
            "logits",
        ),
    }

    @pytest.mark.parametrize("name", sorted(CASES))
    def test_did_you_mean(self, name):
        make, wrong, right = self.CASES[name]
        with pytest.raises(PolicyError) as raised:
            collect(make())
        assert f"'{wrong}'" in str(raised.value)
        assert "Did you mean" in str(raised.value)
        assert f"'{right}'" in str(raised.value).split("Did you mean")[1]


# --- weights, buffers and modes --------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Acts by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.zeros(2))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 2)


class TestBuffers:
    """FAULTS 39: what is changed between batches is seen in the next one."""

    CHANGES: ClassVar = {
        "in place": lambda net, value: net.value.fill_(value),
        "replaced": lambda net, value: setattr(net, "value", torch.full((2,), value)),
        "loaded": lambda net, value: net.load_state_dict({"value": torch.full((2,), value)}),
        "loaded by assignment": lambda net, value: net.load_state_dict({"value": torch.full((2,), value)}, assign=True),
    }

    @single_and_lanes
    @forms
    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_of_a_policy(self, change, form, lanes):
        net = Constant()
        with collecting(FORMS[form](part(net, "observation", "action")), lanes, action_space=CONTINUOUS) as (
            collector,
            envs,
        ):
            batches = []
            for number in range(4):
                self.CHANGES[change](net, float(number))
                collector.update_policy_weights_()
                batches.append(collector.next())
        for number, batch in enumerate(batches):
            assert (batch["action"] == number).all()
            assert (batch["collector", "policy_version"] == number + 1).all()
        assert torch.equal(received(envs, lanes), torch.cat(batches, 1 if lanes else 0)["action"])


class TestModes:
    """FAULTS 85: dropout and batch-norm do what the modules' own mode says, part by part, and nobody sets it."""

    class Own(nn.Module):
        """Shows its modules to whoever looks, and takes a TensorDict."""

        def __init__(self, policy):
            super().__init__()
            self.policy = policy

        def forward(self, tensordict):
            return self.policy(tensordict)

    FORMS: ClassVar = {"direct": lambda policy: policy, "tensordict": Own}
    MODES: ClassVar = {
        "train": (True, True),
        "eval": (False, False),
        "mixed": (True, False),
        "mixed too": (False, True),
    }

    @staticmethod
    def policy(modes):
        torch.manual_seed(0)
        policy = ProbabilisticTensorDictSequential(
            part(nn.BatchNorm1d(3), "observation", "normal"),
            part(nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5)), "normal", "hidden"),
            linear("hidden", "logits", 32, 4),
            sampler("logits", return_log_prob=True),
        )
        policy.train(modes[0])
        policy.module[1].train(modes[1])
        return policy

    @forms
    @pytest.mark.parametrize("modes", sorted(MODES))
    def test_data_and_statistics_are_those_of_a_loop_by_hand(self, modes, form):
        policies = [self.policy(self.MODES[modes]) for _ in range(2)]
        expected = by_hand(Kind(lambda: policies[0]), 16, RANDOM, STEPS * BATCHES)
        batches, path = collected(Kind(lambda: self.FORMS[form](policies[1])), 16, RANDOM)
        assert path == form
        batch = torch.cat(batches, -1)
        for key, value in expected.items():
            assert_same_bits(batch[key], value, key)
        assert (batch["hidden"] == 0).any() == self.MODES[modes][1]
        for name, buffer in policies[0].named_buffers():
            assert_same_bits(dict(policies[1].named_buffers())[name], buffer, name)
        moved = policies[1].module[0].module.num_batches_tracked
        assert moved == (STEPS * BATCHES if self.MODES[modes][0] else 0)

    @forms
    def test_stay_as_they_are_after_an_exception_too(self, form):
        policy = self.policy((True, False))
        before = [module.training for module in policy.modules()]
        policy.module[0].module.register_forward_hook(lambda *_: calls.append(1))
        calls: list[int] = []

        def failing(logits):
            if len(calls) > 3:
                raise ZeroDivisionError
            return logits

        policy.module[2].module.register_forward_hook(lambda _module, _args, logits: failing(logits))
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            collect(self.FORMS[form](policy))
        assert [module.training for module in policy.modules()] == before


class TestOutputsOfAnotherKindLater:
    """Told at that very step: numpy would cast and stretch them in silence."""

    CASES: ClassVar = {
        "reals for integers": (lambda o: best(o).float() + 0.7, "dtype torch.int64 at first"),
        "one for all lanes": (lambda o: best(o)[:1], r"shape \[3\] at first"),
        "a scalar": (lambda o: best(o)[0], r"shape \[3\] at first"),
    }

    @pytest.mark.parametrize("name", sorted(CASES))
    @pytest.mark.parametrize("wrap", [lambda action, _: action, lambda action, o: {"action": action, "x": o}])
    def test_an_action(self, name, wrap):
        later, words = self.CASES[name]
        form = changing(best, later)
        error = fails(lambda o: wrap(form()(o), o))
        assert isinstance(error, PolicyError)
        assert re.search(f"step 5: The policy's 'action' had {words}", str(error))

    def test_another_output(self):
        form = changing(lambda o: o, lambda o: o.double())
        error = fails(lambda o: {"action": best(o), "x": form()(o)})
        assert "step 5: The policy's 'x' had dtype torch.float32 at first, and now torch.float64" in str(error)


class TestFormsOfActions:
    """What a policy may return for spaces with parts."""

    PARTS = spaces.Dict({"move": DISCRETE, "turn": spaces.Discrete(4)})

    def test_tuples_as_keys(self):
        batch, _ = collect(
            lambda o: {("action", "move"): best(o), ("action", "turn"): best(o), "x": o}, action_space=self.PARTS
        )
        assert torch.equal(batch["action", "move"], best(batch["observation"]))
        assert torch.equal(batch["x"], batch["observation"])

    def test_a_tuple_beside_other_outputs(self):
        space = spaces.Tuple((DISCRETE, DISCRETE))
        batch, _ = collect(lambda o: {"action": (best(o), best(-o)), "x": o}, action_space=space)
        assert torch.equal(batch["action", "1"], best(-batch["observation"]))

    def test_more_than_the_parts_is_refused(self):
        with pytest.raises(PolicyError, match="'v', which is none of"):
            collect(lambda o: {"move": best(o), "turn": best(o), "v": o}, action_space=self.PARTS)

    def test_a_mapping_without_an_action_is_told_what_is_near(self):
        with pytest.raises(PolicyError, match=r"it wrote 'actions'\. Is 'actions' meant for it"):
            collect(lambda o: {"actions": best(o)})

    def test_a_function_of_a_tensordict_need_not_return_it(self):
        def policy(td):
            td["action"] = best(td["observation"])

        batch, _ = collect(policy)
        assert torch.equal(batch["action"], best(batch["observation"]))

    def test_state_under_its_own_name_is_told(self):
        def policy(observation, hidden=None):
            return {"action": best(observation), "hidden": observation}

        with pytest.warns(UserWarning, match=r"takes 'hidden' and writes 'hidden'.*\('next', 'hidden'\)"):
            collect(policy)
