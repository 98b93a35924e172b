"""What a policy says of itself and is believed: outputs that are declared, without a call at construction."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from rlcollect import PolicyError
from rlcollect.devices import PlainCopies, Transfer
from rlcollect.envs.spaces import ActionCodec
from rlcollect.rollout.policy.drafts import Observed
from rlcollect.rollout.policy.plan import Calling, plan_policy
from rlcollect.testing import check_batch
from tests.rollout.helpers import DISCRETE, LANES, bits, collect, collecting, received

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])


class Leaf:
    """As much of a spec as is looked at."""

    def __init__(self, *shape, dtype=torch.float32):
        self.shape, self.dtype = torch.Size(shape), dtype


class Composite:
    """A spec of several, as TorchRL's is used: for one lane, or with the lanes in its own shape."""

    def __init__(self, leaves, shape=()):
        self.leaves, self.shape = leaves, torch.Size(shape)

    def keys(self, include_nested, leaves_only):
        assert include_nested is leaves_only is True
        return self.leaves.keys()

    def __getitem__(self, key):
        return self.leaves[key]


ACTION = Leaf(dtype=torch.int64)


def act(observation):
    return (observation[..., 0] * 1000).long() % 4


class Declaring(TensorDictModuleBase):
    """Writes an action, two scores, and whatever else it declares; counts its calls."""

    def __init__(self, spec=None, out_keys=("action", "scores"), dtype=torch.float32):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], list(out_keys)
        self.calls = 0
        self.dtype = dtype
        if spec is not None:
            self.spec = spec

    def forward(self, tensordict):
        self.calls += 1
        observation = tensordict["observation"]
        tensordict["action"] = act(observation)
        tensordict["scores"] = (observation[..., :2] * 2).to(self.dtype)
        return tensordict


def scores_of(batch):
    return batch["observation"][..., :2] * 2


SCORES = {"scores": Leaf(2)}
ALL = {"action": ACTION, **SCORES}


class TestWhenItIsCalled:
    """Once at construction, or not at all."""

    @staticmethod
    def calls(policy, lanes, **options):
        with collecting(policy, lanes, **options) as (collector, _):
            before = policy.calls
            collector.next()
            assert policy.calls == before + 4
        return before

    @lanes_too
    @pytest.mark.parametrize("leaves", [ALL, SCORES, {**ALL, "more": Leaf(5)}], ids=["all", "no action", "more"])
    def test_not_if_all_that_it_writes_is_known(self, leaves, lanes):
        """The action's form is known from its space."""
        assert self.calls(Declaring(Composite(leaves)), lanes, trust_policy=True) == 0

    def test_not_if_its_spec_has_the_lanes(self):
        leaves = {"action": Leaf(3, dtype=torch.int64), "scores": Leaf(3, 2)}
        assert self.calls(Declaring(Composite(leaves, [3])), 3, trust_policy=True) == 0

    @lanes_too
    def test_not_if_it_writes_an_action_alone(self, lanes):
        calls = []
        policy = TensorDictModule(lambda o: (calls.append(1), act(o))[1], ["observation"], ["action"])
        with collecting(policy, lanes, trust_policy=True) as (collector, _):
            assert not calls
            collector.next()
            assert len(calls) == 4

    @lanes_too
    @pytest.mark.parametrize(
        "spec",
        [None, Composite({}), Composite({"action": ACTION}), Composite({**ALL, "scores": None}), Leaf(2), object()],
        ids=["none", "empty", "of the action", "without a leaf", "of one", "another thing"],
    )
    def test_once_if_something_is_not(self, spec, lanes):
        assert self.calls(Declaring(spec), lanes, trust_policy=True) == 1

    @lanes_too
    @pytest.mark.parametrize("spec", [None, Composite(ALL)], ids=["no spec", "spec"])
    @pytest.mark.parametrize("options", [{}, {"trust_policy": False}], ids=repr)
    def test_once_if_it_is_not_trusted(self, options, spec, lanes):
        assert self.calls(Declaring(spec), lanes, **options) == 1

    @pytest.mark.parametrize("trusted", [False, True])
    def test_once_if_it_declares_nothing(self, trusted):
        calls = []
        with collecting(lambda observation: (calls.append(1), act(observation))[1], trust_policy=trusted):
            assert len(calls) == 1


class Counting(nn.Linear):
    calls = 0

    def forward(self, observation):
        self.calls += 1
        return super().forward(observation)


def categorical(spec=True, dtype=torch.float32):
    torch.manual_seed(0)
    net = Counting(3, 4).to(dtype)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda o: net(o.to(dtype)), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    if spec:
        policy.spec = Composite({"logits": Leaf(4, dtype=dtype)})
    return net, policy


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, observation, hidden):
        self.calls += 1
        after = 0.5 * hidden + observation
        return after.argmax(-1), after


def remembering():
    policy = TensorDictModule(Memory(), ["observation", "hidden"], ["action", ("next", "hidden")])
    policy.spec = Composite({("next", "hidden"): Leaf(3)})
    return policy


class TestTheSameBatches:
    """As if it had been called."""

    @staticmethod
    def both(make, lanes, **options):
        batches = []
        for trusted in (False, True):
            with collecting(make(), lanes, trust_policy=trusted, **options) as (collector, envs):
                collector.set_seed(5)
                batches.append(torch.cat([collector.next() for _ in range(3)], -1))
        check_batch(batches[1])
        assert list(batches[0].keys(True, True)) == list(batches[1].keys(True, True))
        assert bits(batches[0]) == bits(batches[1])
        assert torch.equal(received(envs, lanes), batches[1]["action"])
        return batches[1]

    @lanes_too
    def test_of_a_module_that_declares_all(self, lanes):
        batch = self.both(lambda: Declaring(Composite(ALL)), lanes)
        assert torch.equal(batch["action"], act(batch["observation"]))
        assert torch.equal(batch["scores"], scores_of(batch))

    @lanes_too
    @pytest.mark.parametrize("options", [{"init_random_frames": 5}, {"check_actions": True}], ids=repr)
    def test_with_other_options(self, options, lanes):
        self.both(lambda: Declaring(Composite(ALL)), lanes, **options)

    @lanes_too
    def test_of_a_chain(self, lanes):
        def make():
            chain = TensorDictSequential(
                TensorDictModule(lambda o: o[..., :2] * 2, ["observation"], ["scores"]),
                TensorDictModule(act, ["observation"], ["action"]),
            )
            chain.spec = Composite(SCORES)
            return chain

        batch = self.both(make, lanes)
        assert torch.equal(batch["scores"], scores_of(batch))

    @lanes_too
    def test_of_a_distribution_and_its_log_probability(self, lanes):
        batch = self.both(lambda: categorical()[1], lanes)
        scores = batch["logits"].log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(batch["action_log_prob"], scores)

    @lanes_too
    def test_a_distribution_is_not_called_for_it(self, lanes):
        net, policy = categorical()
        with collecting(policy, lanes, trust_policy=True):
            assert net.calls == 0
        with collecting(policy, lanes):
            assert net.calls == 1

    def test_a_log_probability_is_as_precise_as_its_parameters(self):
        batch = self.both(lambda: categorical(dtype=torch.float64)[1], 3)
        assert batch["action_log_prob"].dtype is torch.float64

    @lanes_too
    def test_of_recurrent_state(self, lanes):
        policies = []

        def make():
            policies.append(remembering())
            return policies[-1]

        batch = self.both(make, lanes, record=("is_init",))
        assert torch.equal(batch["next", "hidden"], 0.5 * batch["hidden"] + batch["observation"])
        assert not batch["hidden"][batch["is_init"].squeeze(-1)].any()
        assert policies[1].module.calls == 12

    @lanes_too
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16, torch.bool], ids=str)
    def test_of_outputs_of_every_kind(self, dtype, lanes):
        self.both(lambda: Declaring(Composite({"scores": Leaf(2, dtype=dtype)}), dtype=dtype), lanes)

    @lanes_too
    def test_of_outputs_that_require_gradients(self, lanes):
        class Weighing(Declaring):
            def __init__(self):
                super().__init__(Composite(ALL))
                self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

            def forward(self, tensordict):
                with torch.enable_grad():
                    return super().forward(tensordict).set("scores", tensordict["scores"] * self.weight)

        assert not self.both(Weighing, lanes)["scores"].requires_grad

    @lanes_too
    @pytest.mark.slow
    def test_of_a_compiled_policy(self, lanes):
        self.both(lambda: Declaring(Composite(ALL)), lanes, compile_policy={"backend": "eager"})


class TestWhatTurnsOutToBeWrong:
    """An error at the first frame: nothing of another form gets into a batch."""

    @staticmethod
    def refused(leaves, lanes, match, policy=Declaring, **options):
        with (
            pytest.raises(PolicyError, match=match) as raised,
            collecting(policy(Composite(leaves)), lanes, trust_policy=True, **options) as (collector, _),
        ):
            collector.next()
        return str(raised.value)

    @lanes_too
    @pytest.mark.parametrize("shape", [(3,), (1,), (), (5, 2), (1, 2), (2, 1)], ids=str)
    def test_a_shape(self, shape, lanes):
        """Of these (5, 2) and (1, 2) could be filled with (2,), and (2,) would be stored in (1,)."""
        text = self.refused({"scores": Leaf(*shape)}, lanes, "step 0: .*'scores'")
        assert str([*([lanes] if lanes else []), *shape]) in text
        assert str([*([lanes] if lanes else []), 2]) in text

    @lanes_too
    @pytest.mark.parametrize("shape", [(5, 2), (1, 2), (2, 2)], ids=str)
    @pytest.mark.parametrize("lead", [1, 2])
    def test_a_shape_after_random_frames(self, lead, shape, lanes):
        """The first frames are not the policy's; it is held against what it declares in the first that is."""
        self.refused({"scores": Leaf(*shape)}, lanes, "'scores'", init_random_frames=lead * (lanes or 1))

    def test_a_shape_after_random_frames_in_some_lanes(self):
        self.refused({"scores": Leaf(1, 2)}, 3, "'scores'", init_random_frames=1)

    @lanes_too
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8], ids=str)
    def test_a_dtype_that_cannot_hold_what_is_written(self, dtype, lanes):
        self.refused({"scores": Leaf(2, dtype=dtype)}, lanes, "step 0: .*'scores'")

    @lanes_too
    def test_a_key_that_is_not_written(self, lanes):
        self.refused(
            {**ALL, "more": Leaf(2)},
            lanes,
            "step 0: .*'more'",
            policy=lambda spec: Declaring(spec, ["action", "scores", "more"]),
        )

    @lanes_too
    def test_an_action_of_another_shape(self, lanes):
        class Scoring(Declaring):
            def forward(self, tensordict):
                return super().forward(tensordict).set("action", tensordict["observation"].long())

        self.refused(ALL, lanes, "step 0: .*'action'", policy=Scoring)

    @lanes_too
    def test_an_action_of_another_kind(self, lanes):
        """Rounded, it would be another action."""

        class Halves(Declaring):
            def forward(self, tensordict):
                return super().forward(tensordict).set("action", tensordict["action"] * 0.5 + 0.25)

        self.refused(ALL, lanes, "step 0: .*'action'", policy=Halves)

    @lanes_too
    def test_state_of_another_shape(self, lanes):
        def make(spec):
            policy = remembering()
            policy.spec = spec
            return policy

        self.refused({("next", "hidden"): Leaf(1)}, lanes, "'hidden'", policy=make)

    def test_names_of_ours_are_refused_at_construction(self):
        with pytest.raises(PolicyError, match=r"'reward'.*name of ours"):
            collect(Declaring(Composite({**ALL, "reward": Leaf(1)}), ["action", "scores", "reward"]), trust_policy=True)

    def test_an_observation_that_it_changes_in_place(self):
        """Without a call nobody could see it at construction."""

        class Changing(Declaring):
            def forward(self, tensordict):
                result = super().forward(tensordict)
                tensordict["observation"].zero_()
                return result

        for lanes in LANES:
            try:
                batch, envs = collect(Changing(Composite(ALL)), lanes, trust_policy=True)
            except PolicyError as error:
                assert "in place" in str(error)  # noqa: PT017
            else:
                first = envs[0]
                first.episode, first.t = 0, 0
                assert torch.equal(batch["observation"].reshape(-1, 3)[0], torch.from_numpy(first.observe()))


class TestOnAnotherDevice:
    def test_it_is_believed_there_too(self):
        """Nothing is computed at construction, so a device without data will do."""
        meta = torch.device("meta")
        for lanes in LANES:
            observed = Observed({("observation",): torch.zeros((lanes, 3) if lanes else (3,))}, lanes, ("observation",))
            calling = Calling(trusted=True, transfer=Transfer(meta, PlainCopies(meta)))
            plan = plan_policy(Declaring(Composite(ALL)), observed, ActionCodec(DISCRETE), calling)
            assert [(leaf.key, leaf.shape, leaf.dtype) for leaf in plan.outputs] == [
                (("action",), (), torch.int64),
                (("scores",), (2,), torch.float32),
            ]


class TestSpecsWithParts:
    @lanes_too
    def test_nested_keys(self, lanes):
        def make():
            policy = TensorDictModule(
                lambda o: (act(o), o, o[..., 0]), ["observation"], ["action", ("extra", "all"), ("extra", "first")]
            )
            policy.spec = Composite({("extra", "all"): Leaf(3), ("extra", "first"): Leaf()})
            return policy

        batch, _ = collect(make(), lanes, trust_policy=True)
        assert torch.equal(batch["extra", "all"], batch["observation"])
        assert torch.equal(batch["extra", "first"], batch["observation"][..., 0])

    @lanes_too
    def test_an_action_with_parts(self, lanes):
        space = spaces.Dict({"a": DISCRETE, "b": spaces.Box(-5, 5, (3,))})
        calls = []

        def forward(observation):
            calls.append(1)
            return act(observation), observation

        policy = TensorDictModule(forward, ["observation"], [("action", "a"), ("action", "b")])
        with collecting(policy, lanes, action_space=space, trust_policy=True) as (collector, _):
            assert not calls
            batch = collector.next()
        assert torch.equal(batch["action", "a"], act(batch["observation"]))
        assert torch.equal(batch["action", "b"], batch["observation"])
