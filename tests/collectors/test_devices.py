"""A policy on one device, environments and batches on another: the same data as if all were in one place."""

from __future__ import annotations

import copy
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from rlcollect import Collector, OptionError, PolicyError, RecurrentModule
from rlcollect.devices import CPU, PlainCopies
from rlcollect.rollout.policy import intake
from rlcollect.testing import check_batch
from tests.rollout.helpers import BOX, DISCRETE, LANES, bits, collect, collecting, received

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
CONTINUOUS = spaces.Box(-5, 5, (3,), np.float32)
DICT = spaces.Dict({"a": BOX, "b": spaces.Discrete(5), "c": spaces.Box(0, 255, (2, 2), np.uint8)})


def act(observation):
    return (observation[..., 0] * 1000).long() % 4


def weigh(observation):
    return observation * 3


class Scores(nn.Module):
    """One multiplication and one addition a score: the same bits on every device."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, generator=generator))
        self.register_buffer("shift", torch.randn(3, generator=generator))

    def forward(self, observation):
        scores = observation * self.weight + self.shift
        return scores.argmax(-1), scores


def chain(scores=None):
    return TensorDictModule(scores or Scores(), ["observation"], ["action", "scores"])


class Remembering(nn.Module):
    """Recurrent, and the same bits on every device."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.25, 0.75]))

    def forward(self, observation, hidden):
        after = hidden * 0.5 + observation * self.weight
        return after.argmax(-1), after


def remembering():
    """To be used with `**REMEMBERED`, the state in which episodes begin."""
    return TensorDictModule(Remembering(), ["observation", "hidden"], ["action", ("next", "hidden")])


REMEMBERED = {"initial_policy_state": {"hidden": torch.tensor([0.5, -1.0, 2.0])}}


def stochastic():
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )


# --- another device, played by the host -------------------------------------------------------------------------------


def blank(tensor):
    """What stands in memory that nothing has been written to: a value that no test expects."""
    if tensor.dtype is torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    return torch.full(tensor.shape, 77, dtype=tensor.dtype)


def spoil(tensors):
    for tensor in tensors:
        tensor.copy_(blank(tensor))


class Late:
    """A device that does everything as late as it may.

    Copies there, kernels and copies back join a queue, and are done when `to_host` waits for them. What it gave to the
    host is spoiled at the next call.
    """

    def __init__(self):
        self.queue = []
        self.given = ()
        self.moved = []

    def copy(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def to_device(self, tensors):
        assert not self.queue, "the host went on without waiting"
        spoil(self.given)
        there = tuple(map(blank, tensors))
        self.queue.append(partial(self.copy, there, tensors))
        self.moved.append([tuple(tensor.shape) for tensor in tensors])
        return there

    def policy(self, function):
        """A policy that is computed in the queue."""

        def launch(observation):
            result = function(observation)
            outputs = result if isinstance(result, tuple) else (result,)
            promised = tuple(map(blank, outputs))

            def compute():
                computed = function(observation)
                self.copy(promised, computed if isinstance(computed, tuple) else (computed,))

            if not self.probed:
                self.probed = True
                return result
            self.queue.append(compute)
            return promised if isinstance(result, tuple) else promised[0]

        self.probed = False
        return launch

    def to_host(self, tensors):
        spoil(self.given)
        self.given = tuple(map(blank, tensors))
        self.queue.append(partial(self.copy, self.given, tensors))
        for step in self.queue:
            step()
        self.queue.clear()
        return self.given


class Orderly(Late):
    """The same, with kernels that run when they are called: for policies with state, which stays on the device."""

    def to_device(self, tensors):
        there = super().to_device(tensors)
        self.queue.pop()()
        return there


@pytest.fixture
def other_device(monkeypatch):
    """Makes the collectors that follow take their policy for one on another device, which these copies lead to."""

    def use(copies):
        monkeypatch.setattr(intake, "copies_for", lambda device, no_cuda_sync, home: copies)
        return copies

    return use


class TestATransfer:
    """Between the host and a device that is late with everything."""

    @lanes_too
    @pytest.mark.parametrize("function", [act, weigh], ids=["actions", "reals"])
    def test_one_output_is_what_it_is_without(self, function, lanes, other_device):
        space = DISCRETE if function is act else CONTINUOUS
        plain, _ = collect(function, lanes, action_space=space)
        late = other_device(Late())
        batch, envs = collect(late.policy(function), lanes, action_space=space)
        check_batch(batch)
        assert bits(batch) == bits(plain)
        assert torch.equal(batch["action"], function(batch["observation"]))
        assert torch.equal(received(envs, lanes), batch["action"])

    @lanes_too
    def test_several_outputs_are_what_they_are_without(self, lanes, other_device):
        plain, _ = collect(chain(), lanes)
        late = other_device(Late())
        batch, envs = collect(TensorDictModule(late.policy(Scores()), ["observation"], ["action", "scores"]), lanes)
        assert bits(batch) == bits(plain)
        assert torch.equal(received(envs, lanes), batch["action"])
        assert torch.equal(batch["scores"], Scores()(batch["observation"])[1].detach())

    @single_and_lanes
    def test_a_rollout_longer_than_a_window_of_views(self, lanes, other_device):
        plain, _ = collect(weigh, lanes, action_space=CONTINUOUS, steps=600, batches=1)
        late = other_device(Late())
        batch, _ = collect(late.policy(weigh), lanes, action_space=CONTINUOUS, steps=600, batches=1)
        assert bits(batch) == bits(plain)

    @single_and_lanes
    def test_each_step_moves_what_the_policy_reads_and_no_more(self, lanes, other_device):
        copies = other_device(Orderly())
        collect(lambda a, c: act(a), lanes, DICT)
        lead = (lanes,) if lanes else ()
        assert copies.moved == [[(*lead, 3), (*lead, 2, 2)]] * 12

    @single_and_lanes
    def test_every_kind_of_observation(self, lanes, other_device):
        def policy(td):
            return td.set("action", (act(td["a"]) + td["b"] + td["c"].flatten(-2).sum(-1)) % 4)

        plain, _ = collect(policy, lanes, DICT)
        other_device(Orderly())
        batch, _ = collect(policy, lanes, DICT)
        assert bits(batch) == bits(plain)

    @lanes_too
    def test_recurrent_state(self, lanes, other_device):
        plain, _ = collect(remembering(), lanes, **REMEMBERED)
        other_device(Orderly())
        batch, _ = collect(remembering(), lanes, **REMEMBERED)
        assert bits(batch) == bits(plain)

    @single_and_lanes
    def test_a_layer_of_torch(self, lanes, other_device):
        def policy():
            torch.manual_seed(0)
            head = TensorDictModule(lambda x: x[..., :4].argmax(-1), ["features"], ["action"])
            return TensorDictSequential(RecurrentModule(nn.LSTM(3, 5)), head)

        plain, _ = collect(policy(), lanes, record=("is_init",))
        other_device(Orderly())
        batch, _ = collect(policy(), lanes, record=("is_init",))
        assert bits(batch) == bits(plain)

    @single_and_lanes
    @pytest.mark.parametrize(
        "options",
        [
            {"init_random_frames": 5},
            {"max_frames_per_traj": 2},
            {"check_actions": True},
            {"return_same_td": True},
            {"use_buffers": False},
            {"storing_device": "cpu"},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_with_other_options(self, options, lanes, other_device):
        def batches():
            torch.manual_seed(0)
            with collecting(chain(), lanes, **options) as (collector, _):
                collector.set_seed(5)
                return [bits(collector.next()) for _ in range(3)]

        plain = batches()
        other_device(Orderly())
        assert batches() == plain

    @lanes_too
    def test_a_stochastic_policy(self, lanes, other_device):
        def batch():
            with collecting(stochastic(), lanes) as (collector, _):
                collector.set_seed(5)
                return bits(torch.cat([collector.next() for _ in range(3)], -1))

        plain = batch()
        other_device(Orderly())
        assert batch() == plain

    @single_and_lanes
    @pytest.mark.parametrize(
        "policy",
        [
            lambda observation: act(observation).numpy(),
            lambda observation: {"action": act(observation).numpy(), "more": observation.numpy()},
            lambda observation: {"action": act(observation), "more": observation.numpy()},
        ],
        ids=["action", "several", "some"],
    )
    def test_a_policy_that_brings_its_outputs_back_itself(self, policy, lanes, other_device):
        """`action.cpu().numpy()`: an array is on the host already."""
        plain, _ = collect(policy, lanes)
        other_device(PlainCopies(CPU))
        batch, _ = collect(policy, lanes)
        assert bits(batch) == bits(plain)

    def test_a_policy_that_brings_a_number_back_itself(self, other_device):
        other_device(PlainCopies(CPU))
        batch, _ = collect(lambda observation: 2, None)
        assert batch["action"].tolist() == [2] * 12


class TestBatches:
    """Where they are delivered."""

    @lanes_too
    @pytest.mark.parametrize("option", ["storing_device", "device"])
    def test_on_the_host_if_asked(self, option, lanes):
        batch, _ = collect(act, lanes, **{option: "cpu"})
        assert batch.device == CPU
        assert bits(batch) == bits(collect(act, lanes)[0])

    @lanes_too
    @pytest.mark.parametrize("option", [{}, {"policy_device": "cpu"}, {"env_device": "cpu"}], ids=str)
    def test_without_a_storing_device_where_they_are_made(self, option, lanes):
        batch, _ = collect(act, lanes, **option)
        assert batch.device is None
        assert {value.device for value in batch.values(True, True)} == {CPU}

    @single_and_lanes
    def test_elsewhere(self, lanes):
        batch, _ = collect(act, lanes, storing_device="meta")
        assert {value.device.type for value in batch.values(True, True)} == {"meta"}
        assert batch.shape == ((lanes, 12) if lanes else (12,))
        assert batch.names[-1] == "time"

    def test_post_processing_sees_them_there(self):
        seen = []
        with collecting(act, storing_device="meta", postproc=lambda b: (seen.append(b.device.type), b)[1]) as (c, _):
            c.next()
        assert seen == ["meta"]

    def test_the_same_one_each_time_if_asked(self):
        with collecting(act, storing_device="meta", return_same_td=True) as (collector, _):
            first = collector.next()
            assert collector.next() is first


class TestWhereThePolicyComputes:
    def test_it_is_told(self):
        for options in ({}, {"policy_device": "cpu"}, {"device": "cpu:0"}, {"storing_device": "meta"}):
            with collecting(chain(), **options) as (collector, _):
                assert collector.policy_device == CPU

    @pytest.mark.parametrize("name", ["device", "policy_device", "env_device", "storing_device"])
    def test_a_device_that_is_none_is_refused_before_anything_is_made(self, name):
        def never():
            raise AssertionError

        with pytest.raises(OptionError, match=f"{name}='nonsense'"):
            Collector(never, policy_factory=never, frames_per_batch=4, **{name: "nonsense"})

    @single_and_lanes
    @pytest.mark.parametrize("form", ["action", "extra", "tensordict", "chain"])
    def test_an_output_somewhere_else_is_refused_by_name(self, form, lanes):
        def elsewhere(observation):
            return act(observation).to("meta")

        policy = {
            "action": elsewhere,
            "extra": lambda observation: {"action": act(observation), "extra": weigh(observation).to("meta")},
            "tensordict": lambda td: td.set("action", elsewhere(td["observation"])),
            "chain": TensorDictModule(elsewhere, ["observation"], ["action"]),
        }[form]
        with pytest.raises(PolicyError, match=r"should be on cpu.*came on meta.*policy_device=") as raised:
            collect(policy, lanes)
        assert ("'extra'" if form == "extra" else "'action'") in str(raised.value)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes every policy with weights be taken for one that is not where it is to compute: it is copied."""

    class Elsewhere(intake.Acting):
        def __init__(self, given, device):
            super().__init__(given, torch.device("cpu", 0))  # which torch tells from "cpu"
            self.device = CPU

    monkeypatch.setattr(intake, "Acting", Elsewhere)


class Echo(nn.Module):
    """Does what its parameter and its buffer say."""

    def __init__(self, parameter=0.0, buffer=0.0):
        super().__init__()
        self.parameter = nn.Parameter(torch.full((3,), float(parameter)))
        self.register_buffer("buffer", torch.full((3,), float(buffer)))

    def forward(self, observation):
        return (self.parameter + self.buffer).expand(observation.shape)

    def become(self, parameter, buffer):
        with torch.no_grad():
            self.parameter.fill_(parameter)
            self.buffer.fill_(buffer)


def actions(batch):
    """The values that the actions of a batch have."""
    return batch["action"].unique().tolist()


def seen_around_a_step(**options):
    """Actions before an optimiser's step, which adds 1, after it, and after an update, whose version is checked."""
    policy = Echo()
    optimiser = torch.optim.SGD(policy.parameters(), lr=1.0)
    with collecting(policy, action_space=CONTINUOUS, **options) as (collector, _):
        first = collector.next()
        policy.parameter.sum().neg().backward()
        optimiser.step()
        second = collector.next()
        assert collector.update_policy_weights_() == 1
        third = collector.next()
    versions = [batch["collector", "policy_version"].unique().tolist() for batch in (first, second, third)]
    assert versions == [[0], [0], [1]]
    return [actions(batch) for batch in (first, second, third)]


class TestTheSameDevice:
    """The policy that acts is the user's own module."""

    @pytest.mark.parametrize("options", [{}, {"policy_device": "cpu"}, {"device": "cpu:0"}], ids=str)
    def test_an_optimiser_step_is_seen_at_once(self, options):
        """`update_policy_weights_()` only counts: the rows that follow carry the new version."""
        assert seen_around_a_step(**options) == [[0.0], [1.0], [1.0]]

    def test_nothing_is_copied(self):
        policy = Echo()
        with collecting(policy, action_space=CONTINUOUS, policy_device="cpu") as (collector, _):
            assert collector.policy is policy
            collector.next()
            policy.parameter = nn.Parameter(torch.full((3,), 2.0))
            assert actions(collector.next()) == [2.0]


@pytest.mark.usefixtures("elsewhere")
class TestAnotherDevice:
    """The policy that acts is a copy, which an update brings up to date."""

    def test_an_optimiser_step_is_seen_after_an_update(self):
        assert seen_around_a_step() == [[0.0], [0.0], [1.0]]

    @single_and_lanes
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda module: module,
            lambda module: TensorDictModule(module, ["observation"], ["action"]),
            lambda module: TensorDictSequential(TensorDictModule(module, ["observation"], ["action"])),
            lambda module: nn.Sequential(module, nn.Identity()),
            lambda module: module.forward,
        ],
        ids=["module", "TensorDictModule", "chain", "in a module", "method"],
    )
    def test_every_update_shows_its_parameters_and_its_buffers(self, wrap, lanes):
        """Several times in a row: a copy must neither keep the first values nor share them."""
        module = Echo(1, 10)
        with collecting(wrap(module), lanes, action_space=CONTINUOUS) as (collector, _):
            assert actions(collector.next()) == [11]
            for parameter, buffer in [(2, 10), (2, 20), (3, 30), (0, 0)]:
                before = actions(collector.next())
                module.become(parameter, buffer)
                assert actions(collector.next()) == before
                collector.update_policy_weights_()
                assert actions(collector.next()) == [parameter + buffer]

    def test_buffers_that_are_not_saved_are_copied_too(self):
        class Statistics(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(3), persistent=False)
                self.register_buffer("nothing", None)

            def forward(self, observation):
                return self.mean.expand(observation.shape)

        policy = Statistics()
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            policy.mean.fill_(4)
            collector.update_policy_weights_()
            assert actions(collector.next()) == [4]

    def test_two_collectors_each_have_the_values_of_their_last_update(self):
        policy = Echo()
        with (
            collecting(policy, action_space=CONTINUOUS) as (one, _),
            collecting(policy, action_space=CONTINUOUS) as (other, _),
        ):
            policy.become(1, 0)
            one.update_policy_weights_()
            policy.become(2, 0)
            other.update_policy_weights_()
            assert [actions(one.next()), actions(other.next())] == [[1], [2]]

    @pytest.mark.filterwarnings("ignore:The policy changes 0.num_batches_tracked")
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_the_users_module_is_untouched(self, training):
        policy = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).train(training)
        policy[1].weight.requires_grad_(False)
        before = {name: (id(tensor), tensor.clone()) for name, tensor in policy.state_dict(keep_vars=True).items()}
        parameters = [id(parameter) for parameter in policy.parameters()]
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            assert collector.policy is policy
            collector.next()
            collector.update_policy_weights_()
            collector.next()
        after = policy.state_dict(keep_vars=True)
        assert [id(parameter) for parameter in policy.parameters()] == parameters
        assert before.keys() == after.keys()
        for name, (identity, value) in before.items():
            assert id(after[name]) == identity
            assert torch.equal(after[name], value)
            assert after[name].device == CPU
        assert policy.training is training
        assert [p.requires_grad for p in policy.parameters()] == [True, True, False, True]
        assert all(p.grad is None for p in policy.parameters())

    def test_the_copy_acts_in_the_mode_that_the_module_had(self):
        for training in (True, False):
            policy = nn.Sequential(nn.Dropout(0.9)).train(training)
            policy.register_buffer("weight", torch.zeros(1))
            batch, _ = collect(policy, action_space=CONTINUOUS)
            assert torch.equal(batch["action"], batch["observation"]) is not training

    def test_tied_weights_stay_tied(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(3, 3, bias=False)
                self.second = nn.Linear(3, 3, bias=False)
                self.second.weight = self.first.weight

            def forward(self, observation):
                return self.second(self.first(observation))

        policy = Tied()
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            with torch.no_grad():
                policy.first.weight.copy_(2 * torch.eye(3))
            collector.update_policy_weights_()
            batch = collector.next()
        assert torch.equal(batch["action"], 4 * batch["observation"])

    def test_recurrent_state_is_not_lost_by_an_update(self):
        policy = remembering()
        plain, _ = collect(remembering(), **REMEMBERED)
        with collecting(policy, **REMEMBERED) as (collector, _):
            batches = [collector.next()]
            for _ in range(2):
                collector.update_policy_weights_()
                batches.append(collector.next())
        for key in ("action", "hidden", ("next", "hidden")):
            assert torch.equal(torch.cat(batches, -1)[key], plain[key])

    def test_a_policy_without_weights_is_not_copied(self):
        lock = threading.Lock()

        def policy(observation):
            with lock:
                return act(observation)

        batch, _ = collect(policy)
        assert torch.equal(batch["action"], act(batch["observation"]))

    @pytest.mark.parametrize("hidden", [threading.Lock(), (number for number in ())], ids=["lock", "generator"])
    def test_one_that_cannot_be_copied_says_what_to_do(self, hidden):
        policy = Echo()
        policy.hidden = hidden
        made = []
        with pytest.raises(PolicyError, match=r"cannot be copied to .*pass policy_factory=") as raised:
            Collector(lambda: made.append(1), policy, frames_per_batch=4)
        assert isinstance(raised.value.__cause__, TypeError)
        assert type(hidden).__name__ in str(raised.value)
        assert not made

    @pytest.mark.parametrize("change", ["another shape", "gone"])
    def test_other_weights_than_those_that_were_copied_are_refused(self, change):
        """And an update that is refused has copied nothing: no action is computed from a mix of two updates."""

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Parameter(torch.zeros(3))
                self.second = nn.Parameter(torch.zeros(3))

            def forward(self, observation):
                return (self.first + self.second).expand(observation.shape)

        policy = Two()
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            with torch.no_grad():
                policy.first.fill_(1)
            policy.second = nn.Parameter(torch.ones(1)) if change == "another shape" else None
            with pytest.raises(PolicyError, match=r"'second'.*new collector"):
                collector.update_policy_weights_()
            assert collector.policy_version == 0
            assert actions(collector.next()) == [0]

    def test_a_lazy_module_is_told_when_its_weights_are_not_there_yet(self):
        """The copy has been called, and has weights; the user's module has not."""
        policy = nn.Sequential(nn.LazyLinear(3))
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            with pytest.raises(PolicyError, match=r"'0\.weight'"):
                collector.update_policy_weights_()
            policy(torch.zeros(1, 3))
            collector.update_policy_weights_()
            batch = collector.next()
        assert torch.allclose(batch["action"], policy(batch["observation"]).detach())

    def test_buffers_that_the_policy_changes_itself_stay_those_of_the_copy(self):
        """A counter, a normaliser: the learner's old values would undo them. One warning says so."""

        class Counting(Echo):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, observation):
                self.calls += 1
                return super().forward(observation)

        policy = Counting()
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            collector.next()
            with pytest.warns(UserWarning, match="changes calls itself"):
                collector.update_policy_weights_()
            collector.update_policy_weights_()
            assert collector._worker.acting.policy.calls == 4
            assert policy.calls == 0

    def test_what_a_factory_makes_is_copied_too(self):
        made = []

        def factory():
            made.append(Echo(5))
            return made[-1]

        with collecting(None, action_space=CONTINUOUS, policy_factory=factory) as (collector, _):
            assert collector.policy is made[0]
            collector.policy.become(6, 0)
            assert actions(collector.next()) == [5]
            collector.update_policy_weights_()
            assert actions(collector.next()) == [6]
        assert len(made) == 1

    def test_a_state_is_loaded_into_both(self):
        policy = Echo(1, 2)
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            state = collector.state_dict()
        other = Echo()
        with collecting(other, action_space=CONTINUOUS) as (collector, _):
            collector.load_state_dict(state)
            assert actions(collector.next()) == [3]
            assert actions_of(other) == 3
            collector.update_policy_weights_()
            assert actions(collector.next()) == [3]

    def test_a_compiled_module(self):
        policy = torch.compile(Echo(1), backend="eager")
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            assert actions(collector.next()) == [1]
            policy.become(2, 3)
            assert actions(collector.next()) == [1]
            collector.update_policy_weights_()
            assert actions(collector.next()) == [5]


def actions_of(policy):
    return policy(torch.zeros(3)).unique().item()


# --- CUDA -------------------------------------------------------------------------------------------------------------


class Large(gym.Env):
    """64 KiB an observation."""

    observation_space = spaces.Box(-1, 1, (16384,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.answer = np.zeros(16384, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.answer, {}

    def step(self, action):
        return self.answer, 0.0, False, False, {}


def seeded(policy, lanes=3, seed=5, batches=3, **options):
    with collecting(policy, lanes, **options) as (collector, _):
        collector.set_seed(seed)
        return torch.cat([collector.next() for _ in range(batches)], -1)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.timeout(100)
class TestOnCuda:
    """A policy on CUDA, environments on the host."""

    PLACES = pytest.mark.parametrize(
        ("storing", "no_cuda_sync"),
        [(storing, plain) for storing in (None, "cpu", "cuda") for plain in (False, True)],
        ids=lambda value: {True: "plain", False: "pinned"}.get(value, str(value)),
    )

    @PLACES
    @lanes_too
    @pytest.mark.parametrize("form", ["own", "copied", "device"])
    def test_the_values_are_those_of_the_host(self, form, lanes, storing, no_cuda_sync):
        plain, _ = collect(chain(), lanes)
        policy = chain().cuda() if form == "own" else chain()
        options = {"own": {}, "copied": {"policy_device": "cuda"}, "device": {"device": "cuda"}}[form]
        if storing is not None:
            options["storing_device"] = storing
        batch, envs = collect(policy, lanes, no_cuda_sync=no_cuda_sync, **options)
        on_cuda = storing == "cuda" or (storing is None and form == "device")
        assert {value.device.type for value in batch.values(True, True)} == {"cuda" if on_cuda else "cpu"}
        assert bits(batch.cpu()) == bits(plain)
        assert torch.equal(received(envs, lanes), plain["action"])

    @PLACES
    @lanes_too
    def test_recurrent_state_too(self, lanes, storing, no_cuda_sync):
        options = {"record": ("is_init",), "init_random_frames": 4, **REMEMBERED}
        plain = seeded(remembering(), lanes, **options)
        where = {"policy_device": "cuda", "storing_device": storing, "no_cuda_sync": no_cuda_sync}
        assert bits(seeded(remembering(), lanes, **where, **options).cpu()) == bits(plain)

    @single_and_lanes
    def test_a_layer_of_torch(self, lanes):
        """Its state, as recorded, follows from the state and the observation before it."""
        torch.manual_seed(0)
        core = RecurrentModule(nn.LSTM(3, 5))
        head = TensorDictModule(lambda x: x[..., :4].argmax(-1), ["features"], ["action"])
        batch, _ = collect(TensorDictSequential(core, head), lanes, policy_device="cuda", record=("is_init",))
        rows = batch.reshape(-1)
        features, hidden, cell = core.module(rows["observation"], rows["hidden"], rows["cell"])
        for ours, theirs in [("features", features), (("next", "hidden"), hidden), (("next", "cell"), cell)]:
            torch.testing.assert_close(rows[ours], theirs.detach(), atol=1e-4, rtol=1e-4)
        first = rows["is_init"].squeeze(-1)
        assert first.sum() > 1
        assert not rows["hidden"][first].any()
        assert rows["hidden"][~first].any()

    @single_and_lanes
    @pytest.mark.parametrize("record", [(), ("is_init",)], ids=str)
    def test_a_policy_that_gets_a_tensordict(self, record, lanes):
        class Whole(Scores):
            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                scores = tensordict["observation"] * self.weight + self.shift
                return tensordict.update({"action": scores.argmax(-1), "scores": scores})

        plain, _ = collect(Whole(), lanes, record=record)
        batch, _ = collect(Whole(), lanes, record=record, policy_device="cuda")
        assert bits(batch) == bits(plain)

    def test_a_policy_that_is_trusted(self):
        class Trusted(TensorDictModule):
            pass

        policy = Trusted(lambda o: act(o), ["observation"], ["action"])  # noqa: PLW0108
        plain, _ = collect(act)
        batch, _ = collect(policy, policy_device="cuda", trust_policy=True)
        assert torch.equal(batch["action"], plain["action"])

    @pytest.mark.parametrize("policy", [lambda o: act(o).cpu().numpy(), lambda o: {"action": act(o).cpu().numpy()}])
    def test_a_policy_that_brings_its_action_back_as_an_array(self, policy):
        batch, _ = collect(policy, policy_device="cuda")
        assert torch.equal(batch["action"], act(batch["observation"]))

    def test_a_tensor_on_the_host_is_recorded_as_it_is(self):
        batch, _ = collect(lambda o: act(o).cpu(), policy_device="cuda")
        assert torch.equal(batch["action"], act(batch["observation"]))

    def test_an_update_reaches_the_device(self):
        policy = Echo(1, 10)
        with collecting(policy, action_space=CONTINUOUS, policy_device="cuda") as (collector, _):
            assert collector.policy_device == torch.device("cuda", 0)
            assert actions(collector.next()) == [11]
            for parameter, buffer in [(2, 10), (2, 20), (3, 30)]:
                before = actions(collector.next())
                policy.become(parameter, buffer)
                assert actions(collector.next()) == before
                collector.update_policy_weights_()
                assert actions(collector.next()) == [parameter + buffer]
        assert {tensor.device for tensor in (policy.parameter, policy.buffer)} == {CPU}

    def test_an_optimiser_step_on_the_device_is_seen_at_once(self):
        policy = Echo().cuda()
        with collecting(policy, action_space=CONTINUOUS, device="cuda") as (collector, _):
            assert actions(collector.next()) == [0]
            policy.become(1, 1)
            assert actions(collector.next()) == [2]

    def test_a_state_is_saved_on_the_host_and_loaded_on_the_device(self):
        with collecting(Echo(1, 2), action_space=CONTINUOUS, policy_device="cuda") as (collector, _):
            state = collector.state_dict()
        assert {tensor.device for tensor in state["policy_state_dict"].values()} == {CPU}
        policy = Echo().cuda()
        with collecting(policy, action_space=CONTINUOUS) as (collector, _):
            collector.load_state_dict(state)
            assert actions(collector.next()) == [3]
        assert policy.parameter.is_cuda

    @pytest.mark.parametrize("form", ["chain", "tensordict", "compiled", "graph"])
    def test_a_stochastic_policy_is_reproducible_and_leaves_the_programs_stream_alone(self, form):
        def run(seed, disturb=0):
            policy = stochastic().cuda()
            options = {"compiled": {"compile_policy": {"backend": "eager"}}, "graph": {"cudagraph_policy": True}}
            torch.cuda.manual_seed(disturb)
            before = torch.cuda.get_rng_state()
            batch = seeded(
                (lambda td: policy(td)) if form == "tensordict" else policy,  # noqa: PLW0108
                seed=seed,
                **({"policy_device": "cuda"} if form == "tensordict" else {}),
                **options.get(form, {}),
            )
            assert torch.equal(torch.cuda.get_rng_state(), before)
            return batch

        batch = run(3)
        assert bits(batch) == bits(run(3, disturb=7))
        assert not torch.equal(batch["action"], run(4)["action"])
        assert (batch["action"].float().std(-1) > 0).all()
        log_probs = batch["logits"].log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(batch["action_log_prob"], log_probs)

    def test_without_a_seed_the_programs_seed_decides_and_is_left_alone(self):
        policy = stochastic().cuda()
        torch.manual_seed(1)
        expected = torch.rand(3, device="cuda")
        torch.manual_seed(1)
        batch, _ = collect(policy)
        assert torch.equal(torch.rand(3, device="cuda"), expected)
        torch.manual_seed(1)
        assert bits(collect(policy)[0]) == bits(batch)

    def test_a_state_goes_on_with_the_same_draws(self):
        policy = stochastic().cuda()
        with collecting(policy) as (collector, _):
            collector.set_seed(3)
            collector.next()
            state = collector.state_dict()
        runs = []
        for _ in range(2):
            with collecting(policy) as (collector, _):
                collector.load_state_dict(state)
                runs.append(bits(collector.next()))
        assert runs[0] == runs[1]

    @pytest.mark.parametrize("no_cuda_sync", [False, True], ids=["pinned", "plain"])
    @pytest.mark.parametrize("storing", [None, "cpu"])
    def test_memory_on_the_device_does_not_grow_with_the_batch(self, storing, no_cuda_sync):
        """Batches of 0.25 and of 64 MiB."""

        def peak(frames):
            policy = nn.Linear(16384, 2).cuda()
            options = {"storing_device": storing, "no_cuda_sync": no_cuda_sync}
            with Collector(
                Large, lambda o: policy(o).argmax(-1), frames_per_batch=frames, policy_device="cuda", **options
            ) as collector:
                collector.next()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                collector.next()
                torch.cuda.synchronize()
                return torch.cuda.max_memory_allocated() - before

        assert peak(1024) - peak(4) < 1 << 20

    def test_the_lanes_of_a_window_longer_than_its_views(self):
        plain, _ = collect(chain(), steps=600, batches=1)
        batch, _ = collect(chain(), steps=600, batches=1, policy_device="cuda")
        assert bits(batch) == bits(plain)

    def test_nothing_is_read_too_soon_of_a_slow_policy(self):
        def slow(observation):
            torch.cuda._sleep(5_000_000)
            return observation * 3

        batch, envs = collect(slow, action_space=CONTINUOUS, policy_device="cuda", steps=20)
        assert torch.equal(batch["action"], batch["observation"] * 3)
        assert torch.equal(received(envs, 3), batch["action"])


GRAPHS = {
    "graph": {"cudagraph_policy": True},
    "graph after three calls": {"cudagraph_policy": {"warmup": 3}},
    "compiled": {"compile_policy": {"backend": "eager"}},
    "compiled to a graph": {"compile_policy": {"backend": "eager"}, "cudagraph_policy": True},
}
SLOW_TO_COMPILE = {
    "inductor": {"compile_policy": True},
    "inductor with graphs of its own": {"compile_policy": {"mode": "reduce-overhead"}},
}


@pytest.fixture
def nothing_compiled():
    """The compiler has a limit for each function, and keeps what it compiled for the whole program."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.timeout(100)
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
class TestGraphsAndCompilersOnCuda:
    """A policy that is replayed or compiled is the same policy."""

    QUICK = pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
    OPTIONS = pytest.mark.parametrize(
        "options", [*GRAPHS.values(), *SLOW_TO_COMPILE.values()], ids=[*GRAPHS, *SLOW_TO_COMPILE]
    )

    @OPTIONS
    @single_and_lanes
    def test_outputs_are_not_overwritten_by_those_that_follow(self, options, lanes):
        """Each row holds what follows from its own observation, also after the next batch."""
        policy = chain().cuda()
        with collecting(policy, lanes, **options) as (collector, envs):
            first = collector.next()
            kept = first.clone()
            second = collector.next()
            assert bits(first) == bits(kept)
        batch = torch.cat([first, second], -1)
        action, scores = copy.deepcopy(policy.module).cpu()(batch["observation"])
        torch.testing.assert_close(batch["scores"], scores.detach())
        assert torch.equal(batch["action"], action)
        assert torch.equal(received(envs, lanes), batch["action"])

    @OPTIONS
    def test_recurrent_state_is_carried(self, options):
        plain, _ = collect(remembering(), **REMEMBERED)
        batch, _ = collect(remembering(), policy_device="cuda", **REMEMBERED, **options)
        torch.testing.assert_close(batch["hidden"], plain["hidden"])
        assert torch.equal(batch["action"], plain["action"])

    @OPTIONS
    def test_random_draws_stay_random(self, options):
        policy = stochastic().cuda()
        nn.init.zeros_(policy.module[0].module.weight)
        nn.init.zeros_(policy.module[0].module.bias)
        batch = seeded(policy, steps=40, batches=1, **options)
        counts = torch.bincount(batch["action"].flatten(), minlength=4)
        assert (counts > 10).all()  # of 120, when all four are alike
        assert (batch["action"].float().std(-1) > 0).all()
        assert bits(batch) == bits(seeded(policy, steps=40, batches=1, **options))
        assert bits(batch) != bits(seeded(policy, steps=40, batches=1, seed=6, **options))

    @OPTIONS
    @pytest.mark.parametrize("form", ["own", "copied"])
    def test_new_weights_are_seen(self, form, options):
        policy = Echo(1, 10)
        policy = policy.cuda() if form == "own" else policy
        with collecting(policy, action_space=CONTINUOUS, policy_device="cuda", **options) as (collector, _):
            assert actions(collector.next()) == [11]
            for parameter, buffer in [(2, 10), (2, 20), (3, 30)]:
                policy.become(parameter, buffer)
                collector.update_policy_weights_()
                assert actions(collector.next()) == [parameter + buffer]
            policy.load_state_dict(Echo(4, 4).state_dict())
            collector.update_policy_weights_()
            assert actions(collector.next()) == [8]

    @QUICK
    def test_a_policy_that_gets_a_tensordict(self, options):
        scores = Scores().cuda()

        def policy(tensordict):
            action, value = scores(tensordict["observation"])
            return tensordict.update({"action": action, "scores": value})

        batch, _ = collect(policy, policy_device="cuda", **options)
        plain, _ = collect(chain())
        torch.testing.assert_close(batch["scores"], plain["scores"])
        assert torch.equal(batch["action"], plain["action"])
