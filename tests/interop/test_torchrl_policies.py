"""TorchRL's policies: the same numbers as when they are called by hand, and by which path they are called."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from rlcollect import Collector, ExplorationType, PolicyError, set_exploration_type
from rlcollect.rollout.seeding import lane_seed, torch_seed
from rlcollect.testing import check_batch
from tests.rollout.helpers import leaf_keys

WHY = "TorchRL is not installed: `make interop` installs it, and runs these"
# also where other releases warn while they are imported: importorskip lets them
torchrl = pytest.importorskip("torchrl", reason=WHY)
rl = pytest.importorskip("torchrl.modules", reason=WHY)
data = pytest.importorskip("torchrl.data", reason=WHY)
rl_utils = pytest.importorskip("torchrl.envs.utils", reason=WHY)
models = pytest.importorskip("torchrl.modules.models", reason=WHY)
sde = pytest.importorskip("torchrl.modules.models.exploration", reason=WHY)

RANDOM, DETERMINISTIC = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC
MODE, MEAN = ExplorationType.MODE, ExplorationType.MEAN
SEED = 3
LANES = [None, 16]
STEPS = 6  # of a batch

DIRECT = "direct path: its modules are known>"


def told(part: str, why: str | None = None) -> str:
    """What is said of a part that gets a TensorDict."""
    return f"direct path: its modules are known; {part} gets a TensorDict: {why or f'{part} is called as it is'}>"


# --- environments -----------------------------------------------------------------------------------------------------


class Walk(gym.Env):
    """Goes where its actions send it, from a drawn beginning; episodes of a drawn length end in both ways."""

    def __init__(self, action_space: gym.Space[Any], *, masked: bool = False, image: bool = False) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        if image:
            self.observation_space = spaces.Box(0, 255, (3, 12, 12), np.uint8)
        if masked:
            mask = spaces.MultiBinary(int(action_space.n))
            self.observation_space = spaces.Dict({"observation": self.observation_space, "action_mask": mask})
        self.masked, self.image = masked, image

    def _observe(self) -> Any:
        shown = self.place
        if self.image:
            shown = ((np.arange(432).reshape(3, 12, 12) % 7 + 1) * np.abs(self.place[:, None, None]) * 36).astype(
                "uint8"
            )
        if not self.masked:
            return shown
        mask = self.np_random.integers(0, 2, self.action_space.n, dtype=np.int8)
        mask[self.np_random.integers(self.action_space.n)] = 1
        return {"observation": shown, "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        self.left = int(self.np_random.integers(2, 7))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        flat = spaces.flatten(self.action_space, action).astype(np.float32)
        weights = np.linspace(-1, 1, len(flat), dtype=np.float32)
        push = np.float32([0.5, -0.3, 0.2]) * (flat * weights).sum(dtype=np.float32)
        self.place = np.tanh(self.place * np.float32(1.1) + push)
        self.left -= 1
        done = self.left <= 0
        terminated = done and bool(self.place[0] > 0)
        return self._observe(), float(self.place.sum()), terminated, done and not terminated, {}


def discrete() -> gym.Env:
    return Walk(spaces.Discrete(4))


def one_hot() -> gym.Env:
    return Walk(spaces.MultiBinary(4))


def continuous() -> gym.Env:
    return Walk(spaces.Box(-1, 1, (2,), np.float32))


def masked() -> gym.Env:
    return Walk(spaces.Discrete(4), masked=True)


def images() -> gym.Env:
    return Walk(spaces.Discrete(4), image=True)


def one_handed() -> gym.Env:
    return Walk(spaces.Dict({"grip": spaces.Discrete(4)}))


def two_handed() -> gym.Env:
    return Walk(spaces.Dict({"grip": spaces.Discrete(3), "push": spaces.Box(-1, 1, (2,), np.float32)}))


# --- policies ---------------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def module(net: Any, reads: Any, *writes: Any) -> TensorDictModule:
    return TensorDictModule(net, [reads] if isinstance(reads, str) else reads, [*writes])


def logits(reads: str = "observation", inputs: int = 3) -> TensorDictModule:
    return module(mlp(inputs, 4), reads, "logits")


def gaussian(reads: str = "observation", inputs: int = 3) -> TensorDictModule:
    return module(nn.Sequential(mlp(inputs, 4), NormalParamExtractor()), reads, "loc", "scale")


def actor(head: Any, kind: Any, **options: Any) -> Any:
    """A ProbabilisticActor over the keys that its head writes."""
    options = {"in_keys": head.out_keys, "return_log_prob": True, **options}
    return rl.ProbabilisticActor(head, distribution_class=kind, **options)


def categorical(**options: Any) -> Any:
    return actor(logits(), torch.distributions.Categorical, **options)


def categorical_of(net: nn.Module) -> Any:
    return actor(module(net, "observation", "logits"), torch.distributions.Categorical)


def as_bool() -> TensorDictModule:
    """Gymnasium's masks are numbers, TorchRL's are bool."""
    return module(lambda mask: mask.bool(), "action_mask", "mask")


def q_actor(**options: Any) -> Any:
    return rl.QValueActor(mlp(3, 4), in_keys=["observation"], **{"spec": data.Categorical(4), **options})


def q_atoms(**options: Any) -> Any:
    net = nn.Sequential(mlp(3, 20), nn.Unflatten(-1, (5, 4)))
    return rl.DistributionalQValueActor(net, support=torch.linspace(-1, 1, 5), **options)


def deterministic(**options: Any) -> Any:
    return rl.Actor(nn.Sequential(mlp(3, 2), nn.Tanh()), **options)


def box(size: float = 1) -> Any:
    return data.Bounded(-size, size, (2,))


class Ensemble(nn.Module):
    """Three networks in one, by `vmap`; acts as they do on average."""

    def __init__(self) -> None:
        super().__init__()
        nets = [mlp(3, 4) for _ in range(3)]
        params, _ = torch.func.stack_module_state(nets)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(p) for name, p in params.items()})
        self.names = list(params)
        self.skeleton = [nets[0].to("meta")]  # in a list: no child

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        params = {name: self.stacked[name.replace(".", "_")] for name in self.names}
        call = lambda p: torch.func.functional_call(self.skeleton[0], p, (observation,))  # noqa: E731
        return torch.vmap(call)(params).mean(0)


def lstm(**options: Any) -> Any:
    keys = {
        "in_keys": ["observation", "rs_h", "rs_c"],
        "out_keys": ["features", ("next", "rs_h"), ("next", "rs_c")],
    }
    return rl.LSTMModule(**{"input_size": 3, "hidden_size": 8, **keys, **options})


def gru(**options: Any) -> Any:
    keys = {"in_keys": ["observation", "rs"], "out_keys": ["features", ("next", "rs")]}
    return rl.GRUModule(**{"input_size": 3, "hidden_size": 8, **keys, **options})


def recurrent(core: Any, *more: Any) -> Any:
    sampling = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
    return TensorDictSequential(core, logits("features", 8), *(more or (sampling,)))


def unprimed(core: Any) -> Any:
    """One that cannot say which shape its state has."""
    core.make_tensordict_primer = None
    return core


def ornstein_uhlenbeck(**options: Any) -> Any:
    """Its noise shrinks from step to step of an episode, so that the count of steps matters too."""
    noise = {"sigma": 2.0, "sigma_min": 0.1, "n_steps_annealing": 5, "dt": 0.5, "theta": 0.5}
    return rl.OrnsteinUhlenbeckProcessModule(**{"spec": box(), **noise, **options})


def hooked() -> Any:
    net = mlp(3, 4)
    net.register_forward_hook(rl.QValueHook("categorical"))
    return rl.Actor(net, out_keys=["action", "action_value", "chosen_action_value"])


def dueling() -> Any:
    feature = {"in_features": 3, "out_features": 8, "num_cells": [8]}
    output = {"in_features": 8, "num_cells": [8]}
    return models.DuelingMlpDQNet(4, mlp_kwargs_feature=feature, mlp_kwargs_output=output)


def shared(head: Any, value: Any, kind: Any = None) -> Any:
    return (kind or rl.ActorValueOperator)(module(nn.Linear(3, 8), "observation", "hidden"), head, value)


class Critic(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 1)

    def forward(self, hidden: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([hidden, action], -1))


def composite() -> Any:
    net = nn.Sequential(mlp(3, 7))
    heads = module(
        lambda x: (x[..., :3], x[..., 3:5], x[..., 5:].exp()),
        "scores",
        ("params", "grip", "logits"),
        ("params", "push", "loc"),
        ("params", "push", "scale"),
    )
    kinds = {"grip": torch.distributions.Categorical, "push": rl.IndependentNormal}
    names = {"grip": ("action", "grip"), "push": ("action", "push")}
    return rl.ProbabilisticActor(
        TensorDictSequential(module(net, "observation", "scores"), heads),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds, "name_map": names},
        return_log_prob=True,
    )


def nested_choice(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 0] * 1000).long() % 4


class NextOne(rl.EGreedyModule):
    """A subclass with a `forward` of its own is not the part that its base is."""

    def forward(self, tensordict: TensorDict) -> TensorDict:
        tensordict = super().forward(tensordict)
        return tensordict.set("action", (tensordict["action"] + 1) % 4)


class AnotherCall(rl.EGreedyModule):
    """Nor is one that is called in a way of its own."""

    def __call__(self, tensordict: TensorDict) -> TensorDict:
        tensordict = super().__call__(tensordict)
        return tensordict.set("action", (tensordict["action"] + 1) % 4)


class Quarters(rl.AdditiveGaussianModule):
    """One that changes only what `forward` calls is."""

    def _add_noise(self, action: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(action.shape) < 0.25, action, -action)


@dataclass
class Case:
    """A policy of TorchRL's.

    Attributes:
        make: makes it.
        env: the environment of a lane.
        path: what `repr(collector)` says of it.
        types: exploration types that it knows beside RANDOM and DETERMINISTIC.
        carries: state that it reads, and where it writes the next one.
        marks: whether it wants `is_init`.
    """

    make: Callable[[], Any]
    env: Callable[[], gym.Env] = discrete
    path: str = DIRECT
    types: tuple[ExplorationType, ...] = ()
    carries: dict[Any, Any] | None = None
    marks: bool = False


LSTM_STATE = {"rs_h": ("next", "rs_h"), "rs_c": ("next", "rs_c")}
GRU_STATE = {"rs": ("next", "rs")}
OU_STATE = {"_ou_prev_noise": "_ou_prev_noise", "_ou_steps": "_ou_steps"}
ON_LSTM, ON_GRU = told("LSTMModule"), told("GRUModule")
ON_OU = told("OrnsteinUhlenbeckProcessModule", "a hook on OrnsteinUhlenbeckProcessModule")
SAFE = "a hook on SafeProbabilisticModule"
WHOLE = "tensordict path: {} is called as it is>"

CASES = {
    # ProbabilisticActor
    "Categorical": Case(categorical, types=(MODE,)),
    "Categorical, no log-prob": Case(lambda: categorical(return_log_prob=False)),
    "Categorical of probs": Case(
        lambda: actor(
            module(nn.Sequential(mlp(3, 4), nn.Softmax(-1)), "observation", "probs"), torch.distributions.Categorical
        )
    ),
    "Categorical, spec": Case(lambda: categorical(spec=data.Categorical(4))),
    "Categorical, safe": Case(
        lambda: categorical(spec=data.Categorical(4), safe=True), path=told("SafeProbabilisticModule", SAFE)
    ),
    "OneHotCategorical": Case(lambda: actor(logits(), rl.OneHotCategorical), one_hot, types=(MODE,)),
    "OneHotCategorical, spec": Case(lambda: actor(logits(), rl.OneHotCategorical, spec=data.OneHot(4)), one_hot),
    "TanhNormal": Case(lambda: actor(gaussian(), rl.TanhNormal), continuous, types=(MEAN,)),
    "TanhNormal, no log-prob": Case(lambda: actor(gaussian(), rl.TanhNormal, return_log_prob=False), continuous),
    "TanhNormal, bounds": Case(
        lambda: actor(
            gaussian(),
            rl.TanhNormal,
            distribution_kwargs={"low": torch.tensor([-0.5, -1]), "high": torch.tensor([0.2, 1]), "tanh_loc": True},
            spec=box(),
        ),
        continuous,
    ),
    "IndependentNormal": Case(lambda: actor(gaussian(), rl.IndependentNormal), continuous, types=(MODE, MEAN)),
    "IndependentNormal, safe": Case(
        lambda: actor(gaussian(), rl.IndependentNormal, spec=box(0.2), safe=True),
        continuous,
        told("SafeProbabilisticModule", SAFE),
        types=(MODE, MEAN),
    ),
    "IndependentNormal, spec": Case(lambda: actor(gaussian(), rl.IndependentNormal, spec=box(0.2)), continuous),
    "TruncatedNormal": Case(
        lambda: actor(gaussian(), rl.TruncatedNormal, distribution_kwargs={"low": -0.8, "high": 0.8}),
        continuous,
        types=(MODE, MEAN),
    ),
    "Delta": Case(lambda: actor(module(mlp(3, 2), "observation", "param"), rl.Delta), continuous, types=(MODE, MEAN)),
    "the default distribution": Case(
        lambda: rl.ProbabilisticActor(module(mlp(3, 2), "observation", "param"), in_keys=["param"]), continuous
    ),
    "MaskedCategorical": Case(
        lambda: actor(
            TensorDictSequential(logits(), as_bool()),
            rl.MaskedCategorical,
            in_keys={"logits": "logits", "mask": "mask"},
        ),
        masked,
        types=(MODE,),
    ),
    "CompositeDistribution": Case(composite, two_handed, "tensordict path: it reads a key that has parts>"),
    # Actor, and operators
    "Actor": Case(deterministic, continuous),
    "Actor, spec": Case(lambda: deterministic(spec=box()), continuous),
    "Actor, safe": Case(
        lambda: deterministic(spec=box(0.1), safe=True), continuous, "tensordict path: a hook on Actor>"
    ),
    "ActorValueOperator": Case(
        lambda: shared(
            actor(logits("hidden", 8), torch.distributions.Categorical), rl.ValueOperator(mlp(8, 1), in_keys=["hidden"])
        )
    ),
    "ActorValueOperator.get_policy_operator": Case(
        lambda: shared(
            actor(logits("hidden", 8), torch.distributions.Categorical), rl.ValueOperator(mlp(8, 1), in_keys=["hidden"])
        ).get_policy_operator()
    ),
    "ActorCriticOperator": Case(
        lambda: shared(
            actor(gaussian("hidden", 8), rl.TanhNormal),
            rl.ValueOperator(Critic(10), in_keys=["hidden", "action"]),
            rl.ActorCriticOperator,
        ),
        continuous,
    ),
    "ActorCriticWrapper": Case(
        lambda: rl.ActorCriticWrapper(
            actor(gaussian(), rl.TanhNormal), rl.ValueOperator(mlp(3, 1), in_keys=["observation"])
        ),
        continuous,
    ),
    # values
    "QValueActor": Case(q_actor),
    "QValueActor, one-hot": Case(lambda: q_actor(spec=data.OneHot(4)), one_hot),
    "QValueActor, action_space": Case(lambda: q_actor(spec=None, action_space="categorical")),
    "QValueActor, safe": Case(lambda: q_actor(safe=True), path=told("QValueModule", "a hook on QValueModule")),
    "QValueActor, mask": Case(lambda: TensorDictSequential(as_bool(), q_actor(action_mask_key="mask")), masked),
    "QValueModule": Case(
        lambda: TensorDictSequential(
            module(mlp(3, 4), "observation", "action_value"), rl.QValueModule(spec=data.Categorical(4))
        )
    ),
    "QValueModule, mask": Case(
        lambda: TensorDictSequential(
            as_bool(),
            module(mlp(3, 4), "observation", "action_value"),
            rl.QValueModule(action_space="categorical", action_mask_key="mask"),
        ),
        masked,
    ),
    "QValueHook": Case(hooked),
    "DistributionalQValueActor": Case(
        lambda: q_atoms(spec=data.Categorical(4)), path=WHOLE.format("DistributionalQValueModule")
    ),
    "DistributionalQValueActor, one-hot": Case(
        lambda: q_atoms(spec=data.OneHot(4)), one_hot, WHOLE.format("DistributionalQValueModule")
    ),
    # exploration
    "EGreedyModule": Case(lambda: TensorDictSequential(q_actor(), rl.EGreedyModule(data.Categorical(4), eps_init=0.5))),
    "EGreedyModule, one-hot": Case(
        lambda: TensorDictSequential(q_actor(spec=data.OneHot(4)), rl.EGreedyModule(data.OneHot(4), eps_init=0.5)),
        one_hot,
    ),
    "EGreedyModule, continuous": Case(
        lambda: TensorDictSequential(deterministic(), rl.EGreedyModule(box(), eps_init=0.5)), continuous
    ),
    "EGreedyModule, mask": Case(
        lambda: TensorDictSequential(
            as_bool(),
            q_actor(action_mask_key="mask"),
            rl.EGreedyModule(data.Categorical(4), eps_init=0.5, action_mask_key="mask"),
        ),
        masked,
    ),
    "EGreedyModule, nested key": Case(
        lambda: TensorDictSequential(
            module(nested_choice, "observation", ("action", "grip")),
            rl.EGreedyModule(
                data.Composite({"action": {"grip": data.Categorical(4)}}), eps_init=0.5, action_key=("action", "grip")
            ),
        ),
        one_handed,
        told("EGreedyModule"),
    ),
    "EGreedyModule, another forward": Case(
        lambda: TensorDictSequential(q_actor(), NextOne(data.Categorical(4), eps_init=0.5)), path=told("NextOne")
    ),
    "EGreedyModule, another call": Case(
        lambda: TensorDictSequential(q_actor(), AnotherCall(data.Categorical(4), eps_init=0.5)),
        path=told("AnotherCall"),
    ),
    "AdditiveGaussianModule": Case(
        lambda: TensorDictSequential(deterministic(), rl.AdditiveGaussianModule(box(), sigma_init=0.5)), continuous
    ),
    "AdditiveGaussianModule, another noise": Case(
        lambda: TensorDictSequential(deterministic(), Quarters(box())), continuous
    ),
    "AdditiveGaussianModule, safe": Case(
        lambda: TensorDictSequential(deterministic(), rl.AdditiveGaussianModule(box(), sigma_init=0.5, safe=True)),
        continuous,
        told("AdditiveGaussianModule", "a hook on AdditiveGaussianModule"),
    ),
    "OrnsteinUhlenbeckProcessModule": Case(
        lambda: TensorDictSequential(deterministic(), ornstein_uhlenbeck()),
        continuous,
        ON_OU,
        carries=OU_STATE,
        marks=True,
    ),
    "OrnsteinUhlenbeckProcessModule, x0": Case(
        lambda: TensorDictSequential(deterministic(), ornstein_uhlenbeck(safe=False, x0=0.3)),
        continuous,
        told("OrnsteinUhlenbeckProcessModule"),
        carries=OU_STATE,
        marks=True,
    ),
    "TanhModule": Case(
        lambda: TensorDictSequential(deterministic(), rl.TanhModule(in_keys=["action"], spec=box())),
        continuous,
        told("TanhModule"),
    ),
    # recurrent
    "LSTMModule": Case(lambda: recurrent(lstm()), path=ON_LSTM, carries=LSTM_STATE, marks=True),
    "LSTMModule, layers": Case(lambda: recurrent(lstm(num_layers=3)), path=ON_LSTM, carries=LSTM_STATE, marks=True),
    "LSTMModule, no primer": Case(
        lambda: recurrent(unprimed(lstm(num_layers=2))), path=ON_LSTM, carries=LSTM_STATE, marks=True
    ),
    "LSTMModule in Python": Case(
        lambda: recurrent(lstm(python_based=True)), path=ON_LSTM, carries=LSTM_STATE, marks=True
    ),
    "LSTMModule, default keys": Case(
        lambda: recurrent(rl.LSTMModule(3, 8, in_key="observation", out_key="features")),
        path=ON_LSTM,
        carries={f"recurrent_state_{part}": ("next", f"recurrent_state_{part}") for part in "hc"},
        marks=True,
    ),
    "GRUModule": Case(lambda: recurrent(gru()), path=ON_GRU, carries=GRU_STATE, marks=True),
    "GRUModule, layers": Case(lambda: recurrent(gru(num_layers=3)), path=ON_GRU, carries=GRU_STATE, marks=True),
    "GRUModule, no primer": Case(
        lambda: recurrent(unprimed(gru(num_layers=2))), path=ON_GRU, carries=GRU_STATE, marks=True
    ),
    "GRUModule, default keys": Case(
        lambda: recurrent(rl.GRUModule(3, 8, in_key="observation", out_key="features")),
        path=ON_GRU,
        carries={"recurrent_state": ("next", "recurrent_state")},
        marks=True,
    ),
    "GRUModule, values": Case(
        lambda: TensorDictSequential(
            gru(), module(mlp(8, 4), "features", "action_value"), rl.QValueModule(spec=data.Categorical(4))
        ),
        path=ON_GRU,
        carries=GRU_STATE,
        marks=True,
    ),
    "GRUModule in a ProbabilisticActor": Case(
        lambda: actor(
            TensorDictSequential(gru(), logits("features", 8)), torch.distributions.Categorical, in_keys=["logits"]
        ),
        path=ON_GRU,
        carries=GRU_STATE,
        marks=True,
    ),
    "GRUModule, then OrnsteinUhlenbeckProcessModule": Case(
        lambda: TensorDictSequential(gru(), module(mlp(8, 2), "features", "action"), ornstein_uhlenbeck()),
        continuous,
        "tensordict path: a hook on OrnsteinUhlenbeckProcessModule>",
        carries=GRU_STATE | OU_STATE,
        marks=True,
    ),
    # networks
    "ensemble by vmap": Case(lambda: categorical_of(Ensemble())),
    "MLP": Case(
        lambda: actor(
            module(rl.MLP(in_features=3, out_features=4, num_cells=[16, 16]), "observation", "logits"),
            torch.distributions.Categorical,
        )
    ),
    "MLP, normed": Case(
        lambda: rl.Actor(
            rl.MLP(
                in_features=3,
                out_features=2,
                depth=2,
                num_cells=16,
                norm_class=nn.LayerNorm,
                norm_kwargs={"normalized_shape": 16},
            )
        ),
        continuous,
    ),
    "ConvNet": Case(
        lambda: actor(
            TensorDictSequential(
                module(lambda pixels: pixels.float() / 255, "observation", "pixels"),
                module(rl.ConvNet(in_features=3, num_cells=[4, 4], kernel_sizes=3), "pixels", "hidden"),
                module(rl.MLP(in_features=256, out_features=4, num_cells=[8]), "hidden", "logits"),
            ),
            torch.distributions.Categorical,
            in_keys=["logits"],
        ),
        images,
    ),
    "DuelingMlpDQNet": Case(
        lambda: rl.QValueActor(
            dueling(),
            in_keys=["observation"],
            spec=data.Categorical(4),
        )
    ),
    "NoisyLinear": Case(
        lambda: rl.QValueActor(models.NoisyLinear(3, 4), in_keys=["observation"], spec=data.Categorical(4))
    ),
}


def made(case: Case) -> Any:
    """A new policy with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return case.make()


@contextmanager
def collecting(case: Case, lanes: int | None, policy: Any = None, **options: Any) -> Iterator[Collector]:
    options = {"frames_per_batch": STEPS * (lanes or 1), "num_envs": lanes, **options}
    with Collector(case.env, made(case) if policy is None else policy, **options) as collector:
        collector.set_seed(SEED)
        yield collector


def shown(observations: list[Any], lanes: int | None) -> TensorDict:
    """A TensorDict of the lanes' observations; of the one observation where there is one lane."""
    trees = [o if isinstance(o, dict) else {"observation": o} for o in observations]
    tensors = {key: torch.stack([torch.as_tensor(tree[key]) for tree in trees]) for key in trees[0]}
    whole = TensorDict(tensors, [len(trees)])
    return whole if lanes else whole[0]


def by_hand(case: Case, lanes: int | None, steps: int, exploration: ExplorationType) -> dict[Any, torch.Tensor]:
    """The plain loop: a TensorDict of the observation to the policy, its action to the environments.

    State is carried as it was written; that an episode begins is told by `is_init` alone.
    """
    policy, envs = made(case), [case.env() for _ in range(lanes or 1)]
    space = envs[0].action_space
    observations = [env.reset(seed=lane_seed(SEED, 0, lane))[0] for lane, env in enumerate(envs)]
    first, state, frames = [True] * len(envs), {}, []
    with torch.random.fork_rng(), torch.no_grad(), set_exploration_type(exploration):
        torch.manual_seed(torch_seed(SEED, 0))
        for _ in range(steps):
            given = shown(observations, lanes).update(state)
            if case.marks:
                given["is_init"] = torch.tensor(first)[:, None] if lanes else torch.tensor(first)
            result = policy(given.clone())
            state = {key: result[source] for key, source in (case.carries or {}).items() if source in result.keys(True)}
            actions = result["action"] if lanes else result["action"][None]
            actions = [actions[lane] for lane in range(len(envs))]
            rewards, dones = [], []
            for lane, (env, action) in enumerate(zip(envs, actions, strict=True)):
                value = {k: v.numpy() for k, v in action.items()} if isinstance(space, spaces.Dict) else action.numpy()
                observations[lane], reward, terminated, truncated, _ = env.step(value)
                first[lane] = terminated or truncated
                rewards.append([reward])
                dones.append([first[lane]])
                if first[lane]:
                    observations[lane] = env.reset()[0]
            frame = dict(result.items(include_nested=True, leaves_only=True))
            frame["next", "reward"] = torch.tensor(rewards) if lanes else torch.tensor(rewards[0])
            frame["next", "done"] = torch.tensor(dones) if lanes else torch.tensor(dones[0])
            frames.append(frame)
    for key in case.carries or ():  # the module writes them beside what it was given: recorded are zeros at a beginning
        if key.startswith("_"):
            continue
        frames[0].setdefault(key, torch.zeros_like(frames[0]["next", key]))
        for frame in frames:
            begins = frame["is_init"].reshape(*frame["is_init"].shape[:-1], *[1] * (frame[key].ndim - bool(lanes)))
            frame[key] = torch.where(begins, 0, frame[key])
    return {key: torch.stack([frame[key] for frame in frames], 1 if lanes else 0) for key in frames[-1]}


def public(keys: Any) -> set[tuple[str, ...]]:
    tuples = {key if isinstance(key, tuple) else (key,) for key in keys}
    return {key for key in tuples if not any(part.startswith("_") for part in key)}


def assert_same(batch: TensorDict, expected: dict[Any, torch.Tensor]) -> None:
    """Bit for bit, and no more keys of the policy's than there should be."""
    env_gives = {("next", "reward"), ("next", "done")}
    state = {key for key in public(expected) if key[0] == "next"} - env_gives
    assert leaf_keys(batch) == {key for key in public(expected) if key[0] != "next"}
    known = {"observation", "action_mask", "reward", "done", "terminated", "truncated"}
    after = {key for key in public(batch.keys(True, True)) if key[0] == "next" and key[1] not in known}
    assert after == state
    for key in public(expected):
        wanted, got = expected[key if len(key) > 1 else key[0]], batch[key]
        if key[0] == "action":  # stored as the space has it
            wanted = wanted.to(got.dtype)
        assert got.dtype == wanted.dtype, key
        assert got.shape == wanted.shape, key
        assert torch.equal(got, wanted), f"{key} differs first at {(got != wanted).nonzero()[:1].tolist()}"


each_lanes = pytest.mark.parametrize("lanes", LANES, ids=["single", "16 lanes"])
TYPES = [(name, kind) for name, case in CASES.items() for kind in (RANDOM, DETERMINISTIC, *case.types)]


class TestTheSameNumbers:
    """A collector's own way to call a policy gives what TorchRL's gives with a TensorDict, from one torch stream."""

    @each_lanes
    @pytest.mark.parametrize(("name", "kind"), TYPES, ids=[f"{name}-{kind.name}" for name, kind in TYPES])
    def test_as_by_hand(self, name, kind, lanes):
        case = CASES[name]
        with collecting(case, lanes, exploration_type=kind) as collector:
            batch = torch.cat([collector.next() for _ in range(2)], -1)
        check_batch(batch)
        expected = by_hand(case, lanes, 2 * STEPS, kind)
        assert_same(batch, expected)
        done = batch["next", "done"]
        assert done.any()
        assert not done.all()


@contextmanager
def counting_tensordicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the TensorDicts that are made, in the one number of the list."""
    made_so_far = [0]
    init, unsafe = TensorDict.__init__, TensorDict._new_unsafe.__func__

    def counted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        made_so_far[0] += 1
        init(self, *args, **kwargs)

    def counted_unsafe(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made_so_far[0] += 1
        return unsafe(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TensorDict, "__init__", counted_init)
        patch.setattr(TensorDict, "_new_unsafe", classmethod(counted_unsafe))
        yield made_so_far


class TestLazyNetworks:
    @each_lanes
    def test_are_made_at_construction(self, lanes):
        """With random numbers of the program, as anywhere; the collector's own stream begins with the first frame."""
        policy = categorical_of(rl.MLP(out_features=4, num_cells=[16]))
        with collecting(Case(list), lanes, policy) as collector:
            assert not any(nn.parameter.is_lazy(parameter) for parameter in policy.parameters())
            assert_same(collector.next(), by_hand(Case(lambda: policy), lanes, STEPS, RANDOM))


class TestThePath:
    @pytest.mark.parametrize("name", CASES)
    def test_is_told(self, name):
        case = CASES[name]
        with collecting(case, 3) as collector:
            assert case.path in repr(collector)

    @each_lanes
    @pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.path is DIRECT])
    def test_a_direct_one_makes_no_tensordict_per_frame(self, name, lanes, monkeypatch):
        """A batch is made of some; their number does not depend on how many frames it has."""
        if name == "QValueHook":
            pytest.skip("TorchRL's hook makes TensorDicts itself")
        counts = []
        for steps in (2, 2 + STEPS):
            with collecting(CASES[name], lanes, frames_per_batch=steps * (lanes or 1)) as collector:
                collector.next()
                with counting_tensordicts(monkeypatch) as count:
                    collector.next()
                counts.append(count[0])
        assert counts[0] == counts[1]
        assert counts[0] > 0  # the count counts

    @pytest.mark.parametrize(
        "name", ["OrnsteinUhlenbeckProcessModule", "LSTMModule", "Actor, safe", "Categorical, safe"]
    )
    def test_another_makes_one_at_least(self, name, monkeypatch):
        with collecting(CASES[name], 3) as collector:
            collector.next()
            with counting_tensordicts(monkeypatch) as count:
                collector.next()
        assert count[0] >= STEPS


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = mlp(inputs, outputs)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x)


def wholly_specified(net: nn.Module) -> Any:
    return rl.SafeSequential(
        rl.SafeModule(net, in_keys=["observation"], out_keys=["hidden"], spec=data.Unbounded((8,))),
        rl.Actor(nn.Sequential(nn.Linear(8, 2), nn.Tanh()), in_keys=["hidden"], spec=box()),
    )


def specified_but_for_the_score(net: nn.Module) -> Any:
    scores = rl.SafeModule(
        nn.Sequential(net, nn.Linear(8, 4)), in_keys=["observation"], out_keys=["logits"], spec=data.Unbounded((4,))
    )
    return actor(scores, torch.distributions.Categorical, spec=data.Categorical(4))


def counted(make: Callable[[nn.Module], Any]) -> tuple[Counted, Any]:
    """A policy, the same each time, and the network in it that counts its calls."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        net = Counted(3, 8)
        return net, make(net)


specified = pytest.mark.parametrize(
    ("make", "env"), [(wholly_specified, continuous), (specified_but_for_the_score, discrete)]
)


class TestSpecs:
    """A policy whose `spec` says the shape of everything it writes need not be called to know it."""

    @each_lanes
    @specified
    def test_a_trusted_one_is_not_called_at_construction(self, make, env, lanes):
        batches = []
        for trusted in (False, True):
            net, policy = counted(make)
            with collecting(Case(list, env), lanes, policy, trust_policy=trusted) as collector:
                before = net.calls
                batches.append(torch.cat([collector.next() for _ in range(2)], -1))
                assert net.calls - before == 2 * STEPS
            assert not (trusted and before)
        first, second = batches
        assert set(first.keys(True)) == set(second.keys(True))
        assert all(torch.equal(first[key], second[key]) for key in first.keys(True, True))

    @each_lanes
    @specified
    def test_one_that_is_not_trusted_is_called_once(self, make, env, lanes):
        net, policy = counted(make)
        with collecting(Case(list, env), lanes, policy):
            assert net.calls == 1

    def test_one_that_lacks_a_shape_is_called_though_trusted(self):
        net = Counted(3, 8)
        policy = rl.SafeSequential(
            rl.SafeModule(net, in_keys=["observation"], out_keys=["hidden"]),
            rl.Actor(nn.Linear(8, 2), in_keys=["hidden"], spec=box()),
        )
        with collecting(Case(list, continuous), 3, policy, trust_policy=True):
            assert net.calls == 1

    def test_a_spec_of_all_lanes_is_one_of_each(self):
        """TorchRL's batched environments have such specs, and policies take theirs from `env.action_spec`."""
        case = Case(lambda: deterministic(spec=data.Bounded(-1, 1, (16, 2))), continuous)
        with collecting(case, 16) as collector:
            assert_same(collector.next(), by_hand(case, 16, STEPS, RANDOM))

    def test_a_spec_that_is_wrong_is_told(self):
        policy = rl.SafeSequential(
            rl.SafeModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["hidden"], spec=data.Unbounded((8,))),
            rl.Actor(nn.Linear(1, 2), in_keys=["hidden"], spec=box()),
        )
        with (
            collecting(Case(list, continuous), 3, policy, trust_policy=True) as collector,
            pytest.raises(PolicyError, match=r"'hidden'.*\[3, 8\].*\[3, 1\]"),
        ):
            collector.next()


class TestTorchRLsNames:
    def test_exploration_types_are_the_same(self):
        assert rl_utils.ExplorationType is ExplorationType
        assert rl_utils.set_exploration_type is set_exploration_type

    def test_its_type_as_the_option(self):
        case = CASES["Categorical"]
        with collecting(case, 16, exploration_type=rl_utils.ExplorationType.DETERMINISTIC) as collector:
            batch = collector.next()
        assert torch.equal(batch["action"], batch["logits"].argmax(-1))
        with collecting(case, 16, exploration_type=rl_utils.ExplorationType.RANDOM) as collector:
            batch = collector.next()
        assert not torch.equal(batch["action"], batch["logits"].argmax(-1))

    @pytest.mark.parametrize("name", ["Categorical", "EGreedyModule", "OrnsteinUhlenbeckProcessModule"])
    def test_what_the_program_has_set_neither_matters_nor_changes(self, name):
        """Collectors go by their option; outside, it is the program's again."""
        case = CASES[name]
        expected = by_hand(case, 16, STEPS, RANDOM)
        with rl_utils.set_exploration_type(rl_utils.ExplorationType.DETERMINISTIC):
            with collecting(case, 16) as collector:
                assert_same(collector.next(), expected)
            assert rl_utils.exploration_type() is rl_utils.ExplorationType.DETERMINISTIC


class SecondIsBest(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(*observation.shape[:-1], 4)


class TestAnnealing:
    """What is annealed between batches is what the next batch is made with."""

    def test_the_share_of_random_actions(self):
        """With eps the policy's choice stands in 1 - eps + eps / 4 of the frames."""
        explore = rl.EGreedyModule(data.Categorical(4), eps_init=1.0, eps_end=0.0, annealing_num_steps=10)
        policy = TensorDictSequential(rl.QValueActor(SecondIsBest(), spec=data.Categorical(4)), explore)
        shares = []
        with collecting(Case(list), 16, policy, frames_per_batch=1600) as collector:
            for _ in range(3):
                shares.append((collector.next()["action"] == 1).float().mean().item())
                explore.step(5)
            assert DIRECT in repr(collector)
        assert shares[0] == pytest.approx(0.25, abs=0.06)  # five standard errors
        assert shares[1] == pytest.approx(0.625, abs=0.06)
        assert shares[2] == 1

    @pytest.mark.parametrize("kind", ["AdditiveGaussianModule", "OrnsteinUhlenbeckProcessModule"])
    def test_noise(self, kind):
        end = "sigma_end" if kind == "AdditiveGaussianModule" else "eps_end"
        explore = getattr(rl, kind)(box(), annealing_num_steps=10, **{end: 0.0})
        policy = TensorDictSequential(module(lambda x: x[..., :2] / 2, "observation", "action"), explore)
        with collecting(Case(list, continuous), 16, policy) as collector:
            before = collector.next()
            explore.step(10)
            after = collector.next()
        assert (before["action"] != before["observation"][..., :2] / 2).any(-1).float().mean() > 0.9
        assert torch.equal(after["action"], after["observation"][..., :2] / 2)


class TestState:
    @each_lanes
    @pytest.mark.parametrize("name", ["LSTMModule, layers", "GRUModule, layers"])
    def test_what_was_written_is_read_in_the_next_frame(self, name, lanes):
        """Also over the border of two batches; and zeros where an episode begins."""
        case = CASES[name]
        with collecting(case, lanes) as collector:
            batch = torch.cat([collector.next() for _ in range(3)], -1)
        batch = batch if lanes else batch.unsqueeze(0)
        begins = batch["is_init"][..., 0]
        assert torch.equal(begins[:, 1:], batch["next", "done"][:, :-1, 0])
        assert begins[:, 0].all()
        for key in case.carries:
            assert not batch[key][begins].any()
            assert torch.equal(batch[key][:, 1:][~begins[:, 1:]], batch["next", key][:, :-1][~begins[:, 1:]])
            assert batch[key][~begins].any()

    @pytest.mark.parametrize("name", ["LSTMModule, layers", "GRUModule, layers"])
    def test_a_batch_has_what_the_recurrent_mode_reads(self, name):
        """A learner calls the same module over time, from the recorded state on, and finds the collected features."""
        case = CASES[name]
        policy = made(case)
        with collecting(case, 16, policy) as collector:
            collector.next()
            batch = collector.next()  # begins in the middle of episodes
        assert not batch["is_init"][:, 0].all()
        core = policy[0]
        with torch.no_grad(), rl.set_recurrent_mode(True):
            features = core(batch.select(*core.in_keys))["features"]
        torch.testing.assert_close(features, batch["features"])

    @each_lanes
    def test_private_state_is_in_no_batch(self, lanes):
        with collecting(CASES["OrnsteinUhlenbeckProcessModule"], lanes) as collector:
            batch = collector.next()
        assert not [key for key in batch.keys(True, True) if "_ou" in str(key)]

    @each_lanes
    def test_noise_begins_anew_with_each_episode(self, lanes):
        """Without noise of its own a process only forgets: after k steps it stands at a number that k alone tells."""
        process = ornstein_uhlenbeck(sigma=0.0, sigma_min=None, mu=1.0, safe=False)
        policy = TensorDictSequential(module(lambda x: x[..., :2] * 0, "observation", "action"), process)
        with collecting(Case(list, continuous), lanes, policy, record=("step_count",)) as collector:
            batch = torch.cat([collector.next() for _ in range(3)], -1)
        expected = 1 - 0.75 ** (batch["step_count"].expand(*batch.shape, 2) + 1.0)
        torch.testing.assert_close(batch["action"], expected)


class TestGenerators:
    @each_lanes
    def test_a_policys_own_is_not_used_up_at_construction(self, lanes):
        """Its first draw belongs to the first frame, whoever owns the generator."""
        case = Case(lambda: categorical(generator=7), path=told("SafeProbabilisticModule"))
        with collecting(case, lanes) as collector:
            assert_same(collector.next(), by_hand(case, lanes, STEPS, RANDOM))


def chunked(**options: Any) -> Any:
    """Plans three actions at once, and gives one of them in each step."""
    key = options.pop("key", "action")
    plan = module(nn.Sequential(nn.Linear(3, 6), nn.Unflatten(-1, (3, 2))), "observation", key)
    return rl.MultiStepActorWrapper(plan, n_steps=3, **options)


def dropping(**options: Any) -> Any:
    return TensorDictSequential(
        module(nn.Linear(3, 8), "observation", "hidden"),
        rl.ConsistentDropoutModule(p=0.5, in_keys="hidden", **options),
        module(nn.Linear(8, 2), "hidden", "action"),
    )


REFUSED = {
    "one-hot actions": (lambda: actor(logits(), rl.OneHotCategorical), discrete, ["[3, 4]", "[3]", "argmax(-1)"]),
    "one-hot values": (lambda: q_actor(spec=data.OneHot(4)), discrete, ["[3, 4]", "[3]", "argmax(-1)"]),
    "one-hot actions, reals": (
        lambda: actor(logits(), rl.OneHotCategorical),
        lambda: Walk(spaces.Box(0, 1, (4,), np.float32)),
        ["int64", "float32"],
    ),
    "a mask that is not there": (lambda: q_actor(action_mask_key="action_mask"), discrete, ["'action_mask'"]),
    "a mask of numbers": (lambda: q_actor(action_mask_key="action_mask"), masked, ["'action_mask'", "boolean"]),
    "noise without a spec": (
        lambda: TensorDictSequential(deterministic(), rl.AdditiveGaussianModule()),
        continuous,
        ["spec has not been set"],
    ),
    "exploration alone": (lambda: rl.EGreedyModule(data.Categorical(4)), discrete, ["'action'"]),
    "plans of several actions": (chunked, continuous, ["MultiStepActorWrapper"]),
    "plans of several actions, named": (
        lambda: chunked(key="action_chunk"),
        continuous,
        ["MultiStepActorWrapper"],
    ),
    "plans of several actions, private": (
        lambda: chunked(key="_chunk", action_keys=["action"], chunk_keys=["_chunk"]),
        continuous,
        ["MultiStepActorWrapper"],
    ),
    "dropout that lasts an episode": (lambda: dropping(input_shape=(8,)), continuous, ["'mask_"]),
    "dropout of unknown shape": (dropping, continuous, ["'mask_"]),
    "state that is not below next": (
        lambda: recurrent(gru(out_keys=["features", "rs"])),
        discrete,
        ["'rs'", "('next', 'rs')"],
    ),
}


class TestWhatDoesNotFit:
    """Told at construction, by a PolicyError that names what is the matter."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_is_refused_by_name(self, name):
        make, env, words = REFUSED[name]
        with pytest.raises(PolicyError) as raised:
            Collector(env, make(), frames_per_batch=6, num_envs=3).shutdown()
        text = str(raised.value)
        for word in words:
            assert word in text
        assert re.search(r"reads the key ('[^']+').*Did you mean \1\?", text) is None  # no use to say it again

    @pytest.mark.parametrize("make", [lambda: sde.gSDEModule(2, 3), sde.LazygSDEModule], ids=["gSDE", "lazy gSDE"])
    def test_noise_that_depends_on_the_state_is_there_or_refused(self, make):
        """TorchRL's environments draw its first value; zeros would stay zeros, and nothing would be explored."""
        policy = TensorDictSequential(
            module(nn.Linear(3, 2), "observation", "action"),
            module(make(), ["action", "observation", "_eps_gSDE"], "loc", "scale", "action", "_eps_gSDE"),
        )
        try:
            with collecting(Case(list, continuous), 16, policy) as collector:
                batch = collector.next()
        except PolicyError as error:
            assert "_eps_gSDE" in str(error)  # noqa: PT017
        else:
            assert (batch["action"] != batch["loc"]).any(-1).all()


WITHOUT_TORCHRL = textwrap.dedent(
    """
    import sys

    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torchrl":
                raise AssertionError(f"{name} is imported")

    sys.meta_path.insert(0, Refusing())
    import pkgutil
    import torch
    from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
    import rlcollect
    from rlcollect import Collector

    for found in pkgutil.walk_packages(rlcollect.__path__, "rlcollect."):
        if not found.name.endswith("__main__"):
            __import__(found.name)
    policy = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
    )
    with Collector("CartPole-v1", policy, frames_per_batch=32, num_envs=4) as collector:
        print(tuple(collector.next().shape), "torchrl" in sys.modules)
    """
)


def test_rlcollect_never_imports_torchrl():
    """Every module of it, and a collection, where TorchRL cannot be imported."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHRL], check=False, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "(4, 8) False"
