"""How a policy is taken in: made by a factory, compiled if asked, its weights found, and what is refused.

Copies on another device are in `tests/collectors/test_devices.py`.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical, Normal

from rlcollect import Collector, ExplorationType, OptionError, PolicyError, RandomPolicy, RecurrentModule, WorkerError
from rlcollect.options import How
from rlcollect.rollout.policy.intake import policy_wrapper
from rlcollect.testing import check_batch
from rlcollect.weights.naming import module_of
from tests.naming import named
from tests.rollout.helpers import BOX, DISCRETE, LANES, bits, collect, collecting, maker, received

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])
compiling = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]
CONTINUOUS = spaces.Box(-5, 5, (2,), np.float32)
EAGER = {"backend": "eager"}


@pytest.fixture
def nothing_compiled():
    """The compiler has a limit for each function, and keeps what it compiled for the whole program."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def act(observation):
    return (observation[..., 0] * 1000).long() % 4


def weigh(observation):
    return observation[..., :2] * 3


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Linear(3, 4)

    def forward(self, observation):
        return self.net(observation).argmax(-1)


class Echo(nn.Module):
    """Does what its parameter and its buffer say."""

    def __init__(self, parameter=0.0, buffer=0.0):
        super().__init__()
        self.parameter = nn.Parameter(torch.full((2,), float(parameter)))
        self.register_buffer("buffer", torch.full((2,), float(buffer)))

    def forward(self, observation):
        return (self.parameter + self.buffer).expand(*observation.shape[:-1], 2)


def actions(batch):
    """The values that the actions of a batch have."""
    return batch["action"].unique().tolist()


def seeded(policy, lanes=3, seed=5, batches=3, **options):
    with collecting(policy, lanes, **options) as (collector, _):
        collector.set_seed(seed)
        return torch.cat([collector.next() for _ in range(batches)], -1)


class TestAFactory:
    @lanes_too
    def test_makes_the_policy_once(self, lanes):
        made = []

        def factory():
            made.append(Net())
            return made[-1]

        with collecting(None, lanes, policy_factory=factory) as (collector, _):
            assert len(made) == 1
            assert collector.policy is made[0]
            batch = collector.next()
            collector.reset()
            collector.next()
        assert len(made) == 1
        assert torch.equal(batch["action"], made[0](batch["observation"]))

    @pytest.mark.parametrize(
        "factory",
        [lambda: act, Net, functools.partial(Net, 3), lambda: TensorDictModule(act, ["observation"], ["action"])],
        ids=["lambda", "class", "partial", "chain"],
    )
    def test_of_any_kind(self, factory):
        batch, envs = collect(None, policy_factory=factory)
        check_batch(batch)
        assert torch.equal(received(envs, 3), batch["action"])
        assert (batch["collector", "policy_version"] == 0).all()

    def test_may_make_random_actions(self):
        batch, _ = collect(None, policy_factory=RandomPolicy)
        assert (batch["collector", "policy_version"] == -1).all()

    def test_weights_of_what_it_made_are_the_collectors(self):
        with collecting(None, action_space=CONTINUOUS, policy_factory=lambda: Echo(1, 2)) as (collector, _):
            assert actions(collector.next()) == [3]
            with torch.no_grad():
                collector.policy.parameter.fill_(5)
            assert actions(collector.next()) == [7]
            assert set(collector.state_dict()["policy_state_dict"]) == {"parameter", "buffer"}

    @staticmethod
    def refused(error, match, policy=None, **options):
        envs = []
        with pytest.raises(error, match=match) as raised:
            Collector(maker(envs), policy, frames_per_batch=4, **options)
        assert not envs
        return raised.value

    @pytest.mark.parametrize("policy", [act, RandomPolicy(), Net()], ids=["function", "random", "module"])
    def test_or_a_policy_not_both(self, policy):
        self.refused(OptionError, "policy and policy_factory", policy, policy_factory=Net)

    @pytest.mark.parametrize("made", [None, 3, "policy", Net, RandomPolicy, (act,), torch.zeros(3)], ids=named)
    def test_that_makes_no_policy_is_told_what_came(self, made):
        self.refused(
            OptionError, f"policy_factory.*should return a policy.*{re.escape(repr(made))}", policy_factory=lambda: made
        )

    @pytest.mark.parametrize("value", [3, "Net", {}, TensorDict()], ids=repr)
    def test_that_is_none_is_an_error_that_names_the_option(self, value):
        self.refused(OptionError, "policy_factory", policy_factory=value)

    def test_whose_exception_comes_out_as_itself(self):
        class Custom(Exception):  # noqa: N818
            pass

        def factory():
            raise Custom("inside")

        self.refused(Custom, "inside", policy_factory=factory)

    def test_that_raises_what_would_end_a_loop_is_not_mistaken(self):
        """As of what environments and policies raise: a StopIteration would end the caller's loop in silence."""

        def factory():
            raise StopIteration

        self.refused(WorkerError, "StopIteration", policy_factory=factory)

    def test_whose_policy_does_not_fit_leaves_nothing_open(self):
        envs = []
        with pytest.raises(PolicyError, match="'action'"):
            Collector(maker(envs), policy_factory=lambda: weigh, frames_per_batch=6, num_envs=3)
        assert [env.closed for env in envs] == [1, 1, 1]

    def test_that_takes_an_argument_says_so(self):
        self.refused(TypeError, "argument", policy_factory=lambda device: Net())


class TestWhatCannotBePickled:
    """Nothing here is: the policy stays in the process."""

    @staticmethod
    def with_a_lock():
        lock = threading.Lock()

        def policy(observation):
            with lock:
                return act(observation)

        return policy

    @staticmethod
    def with_a_generator():
        numbers = iter(int, 1)  # zeros, for ever

        def policy(observation):
            return act(observation) + next(numbers)

        return policy

    @staticmethod
    def module_with_a_lock():
        class Locked(nn.Module):
            def __init__(self):
                super().__init__()
                self.lock = threading.Lock()

            def forward(self, observation):
                with self.lock:
                    return act(observation)

        return Locked()

    FORMS = pytest.mark.parametrize("form", ["with_a_lock", "with_a_generator", "module_with_a_lock"])

    @FORMS
    @lanes_too
    def test_as_a_policy(self, form, lanes):
        batch, _ = collect(getattr(self, form)(), lanes)
        assert torch.equal(batch["action"], act(batch["observation"]))

    @FORMS
    @lanes_too
    def test_from_a_factory(self, form, lanes):
        batch, _ = collect(None, lanes, policy_factory=getattr(self, form))
        assert torch.equal(batch["action"], act(batch["observation"]))


class TestOptions:
    """What is wrong is told before an environment is made."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("compile_policy", value) for value in ("x", 1, 0, 2.5, [("backend", "eager")], EAGER.items())],
            *[("cudagraph_policy", value) for value in ("x", 1, 0, [("warmup", 3)])],
            *[("check_actions", value) for value in (1, 0, None, "yes")],
            *[("trust_policy", value) for value in (1, 0, None, "yes")],
            *[("no_cuda_sync", value) for value in (1, 0, None, "yes")],
            *[("initial_policy_state", value) for value in ([1], "hidden", torch.zeros(3), 5)],
            *[("initial_policy_state", {key: torch.zeros(3)}) for key in (3, None, (), ("a", 1))],
            *[("initial_policy_state", {"hidden": value}) for value in ("x", None, object(), ["a"])],
            *[("device", value) for value in ("nonsense", 1.5, True)],
            *[("policy_device", value) for value in ("nonsense", 1.5, True)],
            *[("env_device", value) for value in ("nonsense", 1.5, True)],
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_wrong_values_are_option_errors_that_name_the_option(self, name, value):
        envs = []
        with pytest.raises(OptionError, match=name):
            Collector(maker(envs), Net(), frames_per_batch=4, **{name: value})
        assert not envs

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
    @pytest.mark.parametrize("name", ["device", "policy_device", "storing_device", "env_device"])
    def test_cuda_where_there_is_none(self, name):
        with pytest.raises(OptionError, match=f"{name}='cuda'"):
            collect(Net(), **{name: "cuda"})

    @pytest.mark.parametrize("options", [True, {}, {"warmup": 3}], ids=repr)
    def test_a_cuda_graph_of_a_policy_on_the_host_is_refused_with_what_to_do(self, options):
        envs = []
        with pytest.raises(OptionError, match=r"cudagraph_policy.*computes on cpu.*policy_device=.*compile_policy="):
            Collector(maker(envs), Net(), frames_per_batch=4, num_envs=2, cudagraph_policy=options)
        assert all(env.closed == 1 for env in envs)

    @pytest.mark.parametrize("value", [False, None])
    @pytest.mark.parametrize("name", ["compile_policy", "cudagraph_policy"])
    def test_switched_off(self, name, value):
        assert bits(collect(Net(), **{name: value})[0]) == bits(collect(Net())[0])

    @pytest.mark.parametrize(
        "arguments", [{"backend": "nonsense"}, {"nonsense": 1}, {1: 2}, {"mode": "nonsense"}, {"options": 5}], ids=repr
    )
    def test_wrong_arguments_for_the_compiler_name_the_option(self, arguments):
        envs = []
        with pytest.raises((OptionError, PolicyError), match="compile_policy"):
            Collector(maker(envs), Net(), frames_per_batch=4, num_envs=2, compile_policy=arguments)
        assert all(env.closed == 1 for env in envs)

    def test_what_cuda_graphs_say_of_other_things_is_not_passed_on(self):
        """They warn that TensorDicts are registered with torch's trees, which no user of a collector can help."""
        wrap = policy_wrapper(How(cudagraph_policy=True), torch.device("cuda", 0))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            wrap(act)
        assert not [warning for warning in told if "PyTree" in str(warning.message)]


# --- compiling --------------------------------------------------------------------------------------------------------


class Backend:
    """Compiles nothing, and counts the graphs that it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def network(*sizes):
    torch.manual_seed(0)
    return nn.Linear(*sizes)


def categorical():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network(3, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network(3, 2)

    def forward(self, observation):
        return self.net(observation), torch.full((*observation.shape[:-1], 2), 0.5)


def gaussian():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Gaussian(), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal, return_log_prob=True),
    )


def recurrent(kind=nn.LSTM):
    torch.manual_seed(0)
    return TensorDictSequential(
        RecurrentModule(kind(3, 5)),
        TensorDictModule(network(5, 4), ["features"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )


class Whole(nn.Module):
    """Takes a TensorDict."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, tensordict):
        return tensordict.update(
            {"action": self.net(tensordict["observation"]), "twice": tensordict["observation"] * 2}
        )


class Sampling(nn.Module):
    """Takes a TensorDict, and draws from a distribution in it."""

    def __init__(self):
        super().__init__()
        self.chain = categorical()

    def forward(self, td):
        return self.chain(td)


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network(3, 4)

    def forward(self, observation):
        logits = self.net(observation)
        return {"action": logits.argmax(-1), "logits": logits}


POLICIES = {
    "module": (Net, DISCRETE),
    "function": (lambda: weigh, CONTINUOUS),
    "method": (lambda: Net().forward, DISCRETE),
    "mapping": (Mapped, DISCRETE),
    "TensorDictModule": (lambda: TensorDictModule(Net(), ["observation"], ["action"]), DISCRETE),
    "chain": (
        lambda: TensorDictSequential(
            TensorDictModule(network(3, 4), ["observation"], ["logits"]),
            TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
        ),
        DISCRETE,
    ),
    "categorical": (categorical, DISCRETE),
    "gaussian": (gaussian, CONTINUOUS),
    "lstm": (recurrent, DISCRETE),
    "gru cell": (lambda: recurrent(nn.GRUCell), DISCRETE),
    "takes a TensorDict": (Whole, DISCRETE),
    "takes a TensorDict and draws": (Sampling, DISCRETE),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), network(3, 2)), CONTINUOUS),
    "batch norm": (
        lambda: nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten(-2), network(3, 2)),
        None,
    ),
}
BOTH = [(form, 3) for form in sorted(POLICIES)] + [(form, None) for form in ("module", "gaussian", "lstm", "chain")]
STOCHASTIC = [("categorical", None), ("categorical", 3), ("gaussian", 3), ("dropout", 3)]


def policy_of(form):
    make, space = POLICIES[form]
    return make(), space or CONTINUOUS


class TestCompiled:
    """The same policy, whatever calls it."""

    pytestmark = compiling

    @pytest.mark.parametrize(("form", "lanes"), BOTH)
    def test_the_same_numbers_bit_for_bit(self, form, lanes):
        policy, space = policy_of(form)
        plain = seeded(policy, lanes, action_space=space)
        policy, space = policy_of(form)
        with collecting(policy, lanes, action_space=space, compile_policy=EAGER) as (collector, envs):
            collector.set_seed(5)
            batch = torch.cat([collector.next() for _ in range(3)], -1)
        check_batch(batch)
        assert bits(batch) == bits(plain)
        assert torch.equal(received(envs, lanes), batch["action"])

    @pytest.mark.parametrize("form", ["module", "categorical", "lstm", "takes a TensorDict"])
    def test_the_same_numbers_from_another_backend(self, form):
        """It may round in another way."""
        policy, space = policy_of(form)
        plain = seeded(policy, action_space=space)
        policy, space = policy_of(form)
        batch = seeded(policy, action_space=space, compile_policy={"backend": "aot_eager"})
        for key, value in plain.items(True, True):
            torch.testing.assert_close(batch[key], value)

    @pytest.mark.parametrize(("form", "lanes"), STOCHASTIC)
    def test_draws_are_drawn_anew_at_each_step(self, form, lanes):
        policy, space = policy_of(form)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()  # what differs is chance
            if form == "dropout":
                policy[1].weight.fill_(1)
        batch = seeded(policy, lanes, steps=40, batches=1, action_space=space, compile_policy=EAGER)
        spread = batch["action"].float().std(1 if lanes else 0)
        assert (spread > 0.1).all()
        policy_again = copy.deepcopy(policy)
        again = seeded(policy_again, lanes, steps=40, batches=1, action_space=space, compile_policy=EAGER)
        assert bits(batch) == bits(again)
        other = seeded(policy_again, lanes, seed=6, steps=40, batches=1, action_space=space, compile_policy=EAGER)
        assert not torch.equal(batch["action"], other["action"])

    @pytest.mark.parametrize(
        "form", ["categorical", pytest.param("takes a TensorDict and draws", marks=pytest.mark.slow)]
    )
    def test_the_exploration_type_holds(self, form):
        policy, _ = policy_of(form)
        batch = seeded(policy, compile_policy=EAGER, exploration_type=ExplorationType.DETERMINISTIC)
        assert torch.equal(batch["action"], batch["logits"].argmax(-1))

    @pytest.mark.parametrize(("form", "lanes"), [("module", None), ("categorical", 3), ("lstm", 3), ("mapping", 3)])
    def test_rows_are_not_changed_by_later_steps(self, form, lanes):
        policy, space = policy_of(form)
        with collecting(policy, lanes, action_space=space, compile_policy=EAGER) as (collector, _):
            first = collector.next()
            kept = bits(first)
            collector.next()
            assert bits(first) == kept

    @single_and_lanes
    def test_an_output_that_is_the_same_memory_each_time(self, lanes):
        """Rows keep the value of their time."""

        class Reusing(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("memory", torch.zeros((lanes, 2) if lanes else 2))

            def forward(self, observation):
                return self.memory.copy_(weigh(observation))

        batch, _ = collect(Reusing(), lanes, action_space=CONTINUOUS, compile_policy=EAGER)
        assert torch.equal(batch["action"], weigh(batch["observation"]))

    @pytest.mark.parametrize(
        ("form", "lanes"),
        [pytest.param(*both, marks=() if both[1] else pytest.mark.slow) for both in BOTH if "draws" not in both[0]],
    )
    def test_everything_is_compiled_at_construction(self, form, lanes):
        backend = Backend()
        policy, space = policy_of(form)
        options = {"max_frames_per_traj": 2, "init_random_frames": 5}
        with collecting(policy, lanes, action_space=space, compile_policy={"backend": backend}, **options) as (
            collector,
            _,
        ):
            assert backend.graphs > 0
            made = backend.graphs
            for _ in range(3):
                collector.next()
            collector.reset()
            collector.set_seed(3)
            collector.update_policy_weights_()
            collector.next()
            assert backend.graphs == made

    def test_of_many_collectors_in_one_program_each_is_compiled(self):
        """The compiler gives up on a function that it has compiled eight times; ours is the same for every policy."""

        def chain(length):
            parts = [
                TensorDictModule(network(3, 3), [f"x{i - 1}" if i else "observation"], [f"x{i}"]) for i in range(length)
            ]
            head = TensorDictModule(lambda x: x[..., :2], [f"x{length - 1}"], ["action"])
            return TensorDictSequential(*parts, head)

        graphs = []
        for length in range(1, 12):
            backend = Backend()
            policy = chain(length)
            batch, _ = collect(policy, batches=1, action_space=CONTINUOUS, compile_policy={"backend": backend})
            expected = policy(TensorDict({"observation": batch["observation"]}, batch.shape))["action"]
            torch.testing.assert_close(batch["action"], expected.detach())
            graphs.append(backend.graphs)
        assert min(graphs) > 0

    def test_buffers_and_random_states_are_as_they_were(self):
        policy = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), network(3, 2))
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        random = torch.get_rng_state()
        with collecting(policy, action_space=CONTINUOUS, compile_policy=EAGER) as (collector, _):
            assert torch.equal(torch.get_rng_state(), random)
            for name, value in policy.state_dict().items():
                assert torch.equal(value, before[name])
            collector.next()
            assert policy[0].num_batches_tracked == 4

    @pytest.mark.parametrize("wrap", [lambda m: m, lambda m: TensorDictModule(m, ["observation"], ["action"])])
    def test_a_hook_that_comes_later_changes_nothing_but_what_it_does(self, wrap):
        """It makes another plan, which is compiled and tried out: behind the back of buffers and random states."""

        class Noisy(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, observation):
                self.count.add_(1)
                return torch.randn(*observation.shape[:-1], 2)

        policy = wrap(Noisy())
        inner = getattr(policy, "module", policy)
        with collecting(policy, action_space=CONTINUOUS, compile_policy=EAGER) as (collector, _):
            collector.set_seed(0)
            batches = [collector.next()]
            random = torch.get_rng_state()
            policy.register_forward_hook(lambda module, inputs, output: None)
            batches += [collector.next(), collector.next()]
            assert torch.equal(torch.get_rng_state(), random)
        assert inner.count == 12
        plain = wrap(Noisy())
        with collecting(plain, action_space=CONTINUOUS) as (collector, _):
            collector.set_seed(0)
            expected = torch.cat([collector.next() for _ in range(3)], -1)
        assert torch.equal(torch.cat(batches, -1)["action"], expected["action"])

    @pytest.mark.slow  # seconds of compiling; that the draws are those without the compiler is seen in the test above
    def test_a_hook_that_comes_later_draws_as_before(self):
        policy = categorical()
        nn.init.zeros_(policy.module[0].module.weight)
        nn.init.zeros_(policy.module[0].module.bias)
        backend = Backend()
        with collecting(policy, steps=40, compile_policy={"backend": backend}) as (collector, _):
            collector.next()
            policy.register_forward_hook(lambda module, inputs, output: None)
            batch = collector.next()
        assert (batch["action"].float().std(-1) > 0.1).all()

    @pytest.mark.parametrize("form", ["plain", "chain", "takes a TensorDict"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda policy, other: [a.data.copy_(b.data) for a, b in zip(policy.parameters(), other.parameters())],  # noqa: B905
            lambda policy, other: policy.load_state_dict(other.state_dict()),
            lambda policy, other: policy.load_state_dict(other.state_dict(), assign=True),
            lambda policy, other: setattr(policy, "net", other.net),
        ],
        ids=["in place", "load_state_dict", "by assignment", "another module"],
    )
    def test_new_weights_are_seen(self, change, form):
        """Observations tell the policies apart: nearly all actions differ."""
        module, other = Net(0), Net(7)

        def whole(td):
            return td.set("action", module(td["observation"]))

        wrap = {
            "plain": module,
            "chain": TensorDictModule(module, ["observation"], ["action"]),
            "takes a TensorDict": whole,
        }
        with collecting(wrap[form], steps=20, compile_policy=EAGER) as (collector, _):
            first = collector.next()
            expected_first = copy.deepcopy(module)(first["observation"])
            change(module, other)
            second = collector.next()
        assert torch.equal(first["action"], expected_first)
        assert torch.equal(second["action"], Net(7)(second["observation"]))
        assert not torch.equal(second["action"], Net(0)(second["observation"]))

    def test_buffers_are_seen_too(self):
        policy = Echo(1, 10)
        with collecting(policy, action_space=CONTINUOUS, compile_policy=EAGER) as (collector, _):
            assert actions(collector.next()) == [11]
            policy.buffer.fill_(20)
            assert actions(collector.next()) == [21]
            policy.buffer = torch.full((2,), 30.0)
            assert actions(collector.next()) == [31]

    def test_train_and_eval_are_seen(self):
        policy = nn.Dropout(0.9)
        with collecting(policy, action_space=BOX, compile_policy=EAGER) as (collector, _):
            first = collector.next()
            policy.eval()
            second = collector.next()
        assert not torch.equal(first["action"], first["observation"])
        assert torch.equal(second["action"], second["observation"])

    @pytest.mark.parametrize("lanes", [None, pytest.param(1, marks=pytest.mark.slow), 3])
    def test_with_other_options(self, lanes):
        options = {"init_random_frames": 5, "check_actions": True, "max_frames_per_traj": 2, "record": ("is_init",)}
        plain = seeded(recurrent(), lanes, **options)
        assert bits(seeded(recurrent(), lanes, compile_policy=EAGER, **options)) == bits(plain)

    @lanes_too
    @pytest.mark.parametrize(
        "policy",
        [
            lambda observation: act(observation).numpy(),
            lambda observation: {"action": act(observation).numpy(), "more": observation.numpy()},
        ],
        ids=["action", "several"],
    )
    def test_a_policy_that_returns_arrays(self, policy, lanes):
        assert bits(collect(policy, lanes, compile_policy=EAGER)[0]) == bits(collect(policy, lanes)[0])

    def test_a_policy_that_changes_its_observation(self):
        def policy(observation):
            return observation.mul_(2)

        batch, envs = collect(policy, action_space=BOX, compile_policy=EAGER)
        assert torch.equal(batch["action"], batch["observation"] * 2)
        assert all(np.array_equal(env.observe(), env.observe()) for env in envs)

    @single_and_lanes
    def test_a_policy_with_a_break_in_it(self, lanes):
        """Data decide what it does: the compiler leaves that to Python."""

        def policy(observation):
            return act(observation) if observation.sum().item() > 0 else 3 - act(observation)

        batch, _ = collect(policy, lanes, compile_policy=EAGER)
        for t in range(12):
            shown = batch["observation"][..., t, :]
            assert torch.equal(batch["action"][..., t], policy(shown))

    def test_one_that_cannot_be_compiled_is_told_at_construction(self):
        def policy(observation):
            torch._dynamo.graph_break()
            return act(observation)

        envs = []
        with pytest.raises(PolicyError, match=r"not compiled: (.|\n)*Leave out compile_policy=") as raised:
            Collector(maker(envs), policy, frames_per_batch=4, num_envs=2, compile_policy={**EAGER, "fullgraph": True})
        assert "graph_break" in str(raised.value)
        assert raised.value.__cause__ is not None
        assert [env.closed for env in envs] == [1, 1]

    def test_a_compiler_that_fails_is_told_at_construction(self):
        def backend(graph, inputs):
            raise RuntimeError("no compiler today")

        envs = []
        with pytest.raises(PolicyError, match=r"no compiler today(.|\n)*compile_policy="):
            Collector(maker(envs), Net(), frames_per_batch=4, num_envs=2, compile_policy={"backend": backend})
        assert [env.closed for env in envs] == [1, 1]

    def test_one_that_fails_by_itself_is_told_as_without(self):
        with pytest.raises(PolicyError, match="failed on the first observation"):
            collect(nn.Linear(7, 2), compile_policy=EAGER)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("form", ["module", "categorical", "lstm"])
    def test_the_default_compiler(self, form):
        policy, space = policy_of(form)
        with collecting(policy, action_space=space, steps=20, compile_policy=True) as (collector, envs):
            collector.set_seed(5)
            batch = torch.cat([collector.next() for _ in range(3)], -1)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.zero_()
            after = collector.next()
        assert torch.equal(received(envs, 3)[:, :60], batch["action"])
        if form == "module":
            assert torch.equal(batch["action"], Net()(batch["observation"]))
            assert actions(after) == [0]
        else:
            assert not after["logits"].any()
        if form == "categorical":
            assert (batch["action"].float().std(-1) > 0).all()
            assert (after["action"].float().std(-1) > 0).all()


def in_place(module):
    module.compile(backend="eager")
    return module


def compiled(call):
    return torch.compile(call, backend="eager")


class TestWeightsOfACompiledPolicy:
    """The state holds them under the names that the module gave them."""

    pytestmark = compiling
    NAMES = ("net.weight", "net.bias")

    @staticmethod
    def state(policy, **options):
        with collecting(policy, **options) as (collector, _):
            return collector.state_dict()

    @pytest.mark.parametrize(
        ("wrap", "before"),
        [
            (compiled, ""),
            (in_place, ""),
            (lambda module: compiled(compiled(module)), ""),
            (lambda module: compiled(module.forward), ""),
            (lambda module: compiled(module).__call__, ""),
            (lambda module: compiled(TensorDictModule(module, ["observation"], ["action"])), "module."),
            (lambda module: TensorDictModule(compiled(module), ["observation"], ["action"]), "module."),
            (lambda module: TensorDictModule(in_place(module), ["observation"], ["action"]), "module."),
            (lambda module: nn.Sequential(compiled(module)), "0."),
        ],
        ids=[
            "module",
            "in place",
            "twice",
            "method",
            "call",
            "chain",
            "inside a chain",
            "in place in a chain",
            "inside",
        ],
    )
    def test_one_that_the_user_compiled(self, wrap, before):
        """Also where it is loaded into a collector of the plain module, and the other way round."""
        state = self.state(wrap(Net(3)))
        assert set(state["policy_state_dict"]) == {before + name for name in self.NAMES}
        plain = {
            "": lambda module: module,
            "0.": nn.Sequential,
            "module.": lambda module: TensorDictModule(module, ["observation"], ["action"]),
        }[before]
        for target in (plain, wrap):
            module = Net(0)
            with collecting(target(module), steps=20) as (collector, _):
                collector.load_state_dict(state)
                batch = collector.next()
            assert torch.equal(module.net.weight, Net(3).net.weight)
            assert torch.equal(batch["action"], Net(3)(batch["observation"]))
        module = Net(0)
        with collecting(wrap(module)) as (collector, _):
            collector.load_state_dict(self.state(plain(Net(4))))
        assert torch.equal(module.net.weight, Net(4).net.weight)

    @pytest.mark.parametrize(
        ("wrap", "before"),
        [
            (lambda module: module, ""),
            (lambda module: module.forward, ""),
            (lambda module: TensorDictModule(module, ["observation"], ["action"]), "module."),
            (compiled, ""),
        ],
        ids=["module", "method", "chain", "compiled twice"],
    )
    def test_one_that_the_collector_compiled(self, wrap, before):
        state = self.state(wrap(Net(3)), compile_policy=EAGER)
        assert set(state["policy_state_dict"]) == {before + name for name in self.NAMES}
        for options in ({}, {"compile_policy": EAGER}):
            module = Net(0)
            with collecting(wrap(module), steps=20, **options) as (collector, _):
                collector.next()
                collector.load_state_dict(state)
                batch = collector.next()
            assert torch.equal(module.net.weight, Net(3).net.weight)
            assert torch.equal(batch["action"], Net(3)(batch["observation"]))

    def test_the_users_policy_is_the_collectors(self):
        policy = Net()
        names = list(policy.state_dict())
        with collecting(policy, compile_policy=EAGER) as (collector, _):
            assert collector.policy is policy
        assert list(policy.state_dict()) == names
        assert type(policy) is Net
        assert policy._compiled_call_impl is None

    def test_policies_without_weights_have_none(self):
        for policy in (act, compiled(act), functools.partial(act)):
            assert "policy_state_dict" not in self.state(policy)


class TestTheModuleOfAPolicy:
    pytestmark = compiling

    def test_is_itself_or_the_one_that_it_is_a_method_of(self):
        module = Net()
        for policy in (module, module.forward, module.__call__, compiled(module), in_place(module)):
            assert module_of(policy) is module

    def test_is_none_for_what_has_none(self):
        for policy in (act, torch.clone, "text".join, functools.partial(Net()), None, RandomPolicy(), object()):
            assert module_of(policy) is None
