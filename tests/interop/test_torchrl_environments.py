"""TorchRL's environments: the same batches as from TorchRL's own collector, and what ours does beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    tensorclass,
)
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcollect import Collector, EnvError, OptionError, SpaceError, WorkerError
from rlcollect.testing import CollectionContract, check_batch

WHY = "TorchRL is not installed: `make interop` installs it, and runs these"
torchrl = pytest.importorskip("torchrl", reason=WHY)
envs = pytest.importorskip("torchrl.envs", reason=WHY)
data = pytest.importorskip("torchrl.data", reason=WHY)
modules = pytest.importorskip("torchrl.modules", reason=WHY)
collectors = pytest.importorskip("torchrl.collectors", reason=WHY)

STEPS = 12  # of a batch
BATCHES = 4
FLAGS = ("done", "terminated", "truncated")


# --- environments -----------------------------------------------------------------------------------------------------


def flags(shape: Sequence[int], names: Sequence[str] = FLAGS) -> dict[str, Any]:
    return {name: data.Binary(1, shape=(*shape, 1), dtype=torch.bool) for name in names}


class Steps(envs.EnvBase):
    """Every observation of every lane, episode and step is another number, which actions move, too.

    Episode e of lane i has 2 + (i + e) % 4 steps, and is terminated or truncated by turns.

    Args:
        batch_size: of the lanes.
        names: the flags it has.
        dtype: of observations and rewards.
        batch_locked: as TorchRL has it.
        parts: dimensions of a lane whose parts end each for itself.
    """

    def __init__(
        self,
        batch_size: Sequence[int] = (),
        *,
        names: Sequence[str] = FLAGS,
        dtype: torch.dtype = torch.float32,
        batch_locked: bool = True,
        parts: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        self._batch_locked = batch_locked
        self.names, self.dtype = names, dtype
        self.grid = (*batch_size, *parts)
        self.lanes = torch.arange(torch.Size(self.grid).numel()).view(self.grid)
        self.episode, self.tick = torch.full(self.grid, -1), torch.zeros(self.grid, dtype=torch.long)
        self.place = torch.zeros(self.grid, dtype=dtype)
        self.make_specs(tuple(batch_size))

    def make_specs(self, batch: tuple[int, ...]) -> None:
        self.observation_spec = data.Composite(observation=data.Unbounded((*batch, 3), dtype=self.dtype), shape=batch)
        self.action_spec = data.Composite(action=data.Bounded(-1, 1, (*batch, 2)), shape=batch)
        self.reward_spec = data.Composite(reward=data.Unbounded((*batch, 1), dtype=self.dtype), shape=batch)
        self.done_spec = data.Composite(flags(batch, self.names), shape=batch)

    @property
    def seen(self) -> torch.Tensor:
        return torch.stack([self.lanes * 100 + self.episode, self.tick, self.place], -1).to(self.dtype)

    def begin(self, marks: torch.Tensor | None) -> None:
        where = torch.ones(self.grid, dtype=torch.bool) if marks is None else marks.view(self.grid)
        self.episode += where
        self.tick[where], self.place[where] = 0, 0

    def move(self, action: torch.Tensor) -> dict[str, torch.Tensor]:
        """A step; what has ended by it."""
        self.tick += 1
        self.place += action.reshape(*self.grid, -1).to(self.dtype).sum(-1)
        kind = (self.lanes + self.episode) % 2 == 0
        over = self.left == 0
        told = {
            "done": over,
            "terminated": over & kind if "truncated" in self.names else over,
            "truncated": over & ~kind,
        }
        return {name: told[name].unsqueeze(-1) for name in self.names}

    @property
    def left(self) -> torch.Tensor:
        return 2 + (self.lanes + self.episode) % 4 - self.tick

    @property
    def paid(self) -> torch.Tensor:
        return (self.place * 2 + self.tick).unsqueeze(-1)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        self.begin(None if tensordict is None else tensordict.get("_reset", None))
        return TensorDict({"observation": self.seen}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        told = self.move(tensordict["action"])
        return TensorDict({"observation": self.seen, "reward": self.paid, **told}, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self.episode.fill_((seed or 0) % 1000)


def below(name: str, shape: Sequence[int], **parts: Any) -> Any:
    """A composite spec with these parts one level down."""
    return data.Composite({name: data.Composite(parts, shape=shape)}, shape=shape[:-1])


class Agents(Steps):
    """Three agents a lane, with observations, actions, rewards and flags of their own; the root has flags, too.

    Agent 0 is done one step before the others, which ends nothing.
    """

    def make_specs(self, batch: tuple[int, ...]) -> None:
        agents = (*batch, 3)
        self.observation_spec = below("agents", agents, observation=data.Unbounded((*agents, 3)))
        self.action_spec = below("agents", agents, action=data.Categorical(4, shape=agents))
        self.reward_spec = below("agents", agents, reward=data.Unbounded((*agents, 1)))
        spec = below("agents", agents, **flags(agents))
        spec.update(data.Composite(flags(batch), shape=batch))
        self.done_spec = spec

    def agents(self, **parts: torch.Tensor) -> TensorDict:
        seen = torch.stack([self.seen + agent / 8 for agent in range(3)], -2)
        return TensorDict({"observation": seen, **parts}, batch_size=(*self.batch_size, 3))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        self.begin(None if tensordict is None else tensordict.get("_reset", None))
        return TensorDict({"agents": self.agents()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict["agents", "action"]
        told = self.move(action)
        own = {name: value.unsqueeze(-2).repeat(*[1] * len(self.grid), 3, 1) for name, value in told.items()}
        for name in ("done", "terminated"):
            own[name][..., 0, 0] |= self.left <= 1
        agents = self.agents(reward=action.unsqueeze(-1) + self.paid.unsqueeze(-2), **own)
        return TensorDict({"agents": agents, **told}, batch_size=self.batch_size)


class Apart(Steps):
    """Two players a lane who end, and are reset, each for itself; nothing at the root says what has ended."""

    def __init__(self, batch_size: Sequence[int] = ()) -> None:
        super().__init__(batch_size, parts=(2,))

    def make_specs(self, batch: tuple[int, ...]) -> None:
        self.observation_spec = below("players", self.grid, observation=data.Unbounded((*self.grid, 3)))
        self.action_spec = below("players", self.grid, action=data.Bounded(-1, 1, (*self.grid, 1)))
        self.reward_spec = below("players", self.grid, reward=data.Unbounded((*self.grid, 1)))
        self.done_spec = below("players", self.grid, **flags(self.grid))

    def players(self, **parts: torch.Tensor) -> TensorDict:
        players = TensorDict({"observation": self.seen, **parts}, batch_size=self.grid)
        return TensorDict({"players": players}, batch_size=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        self.begin(None if tensordict is None else tensordict.get(("players", "_reset"), None))
        return self.players()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return self.players(**self.move(tensordict["players", "action"]), reward=self.paid)


class Masked(Steps):
    """One of five actions, of which a mask allows two; the others are errors."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        self.observation_spec["action_mask"] = data.Binary(5, (*batch, 5), dtype=torch.bool)
        self.action_spec = data.Composite(action=data.Categorical(5, shape=batch), shape=batch)

    @property
    def mask(self) -> torch.Tensor:
        first = (self.tick + self.lanes) % 5
        return torch.stack([(first == n) | ((first + 2) % 5 == n) for n in range(5)], -1)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return super()._reset(tensordict).set("action_mask", self.mask)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict["action"]
        assert self.mask.gather(-1, action.unsqueeze(-1)).all()
        return super()._step(tensordict).set("action_mask", self.mask)


class Talking(Steps):
    """Says what it shows in words, and in an object one level down."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        self.observation_spec["words"] = data.NonTensor(shape=batch, example_data="")
        self.observation_spec["deep"] = data.Composite(object=data.NonTensor(shape=batch), shape=batch)

    def _said(self, result: TensorDict) -> TensorDict:
        result["words"] = f"{self.episode.item()}.{self.tick.item()}"
        result["deep"] = TensorDict({}, batch_size=self.batch_size)
        result["deep"].set_non_tensor("object", {"episode": self.episode.item()})
        return result

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return self._said(super()._reset(tensordict))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return self._said(super()._step(tensordict))


class Growing(Steps):
    """A list of points that grows by one with each step of an episode."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        self.observation_spec["points"] = data.Unbounded((*batch, -1, 2))

    @property
    def points(self) -> torch.Tensor:
        count = int(self.tick.max()) + 1
        return self.seen[..., None, :2].expand(*self.batch_size, count, 2).clone()

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return super()._reset(tensordict).set("points", self.points)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return super()._step(tensordict).set("points", self.points)


class Unlike(Steps):
    """Two robots, whose arms have two and three joints, and one camera each."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        robots = [
            data.Composite(joints=data.Unbounded((*batch, n)), camera=data.Unbounded((*batch, 4)), shape=batch)
            for n in (2, 3)
        ]
        self.observation_spec["robots"] = torch.stack(robots, len(batch))

    @property
    def robots(self) -> LazyStackedTensorDict:
        first = self.seen[..., :1]
        parts = [
            TensorDict({"joints": first + torch.arange(n), "camera": first - torch.arange(4)}, self.batch_size)
            for n in (2, 3)
        ]
        return LazyStackedTensorDict(*parts, stack_dim=len(self.batch_size))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return super()._reset(tensordict).set("robots", self.robots)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return super()._step(tensordict).set("robots", self.robots)


class Handed(Unlike):
    """The robots of `Unlike`, which act, are paid and end each for itself."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        robots = (*batch, 2)
        self.action_spec = below("robots", robots, action=data.Bounded(-1, 1, (*robots, 1)))
        self.reward_spec = below("robots", robots, reward=data.Unbounded((*robots, 1)))
        self.done_spec = below("robots", robots, **flags(robots))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        told = {
            name: torch.stack([value, value], -2) for name, value in self.move(tensordict["robots", "action"]).items()
        }
        robots = self.robots.update({**told, "reward": torch.stack([self.paid, -self.paid], -2)})
        return TensorDict({"observation": self.seen, "robots": robots}, batch_size=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        marks = None if tensordict is None else tensordict.get(("robots", "_reset"), None)
        self.begin(None if marks is None else marks[..., 0, :])
        return TensorDict({"observation": self.seen, "robots": self.robots}, batch_size=self.batch_size)


@tensorclass
class Pair:
    """A text and a number."""

    text: str
    number: torch.Tensor


class Classed(Steps):
    """Shows an object of a class of its own."""

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        self.observation_spec["pair"] = data.Composite(
            text=data.NonTensor(shape=batch), number=data.Unbounded(batch), shape=batch, data_cls=Pair
        )

    @property
    def pair(self) -> Any:
        return Pair(str(self.tick.item()), self.tick.float(), batch_size=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return super()._reset(tensordict).set("pair", self.pair)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return super()._step(tensordict).set("pair", self.pair)


def cart_pole(**options: Any) -> Any:
    env = envs.GymEnv("CartPole-v1", **options)
    env.set_seed(SEED)
    return env


def pendulum() -> Any:
    env = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), envs.StepCounter(max_steps=7))
    env.set_seed(SEED)
    return env


SEED = 3


def transformed(env: Any, *transforms: Any) -> Any:
    return envs.TransformedEnv(env, envs.Compose(*transforms))


def counted() -> list[Any]:
    return [envs.RewardSum(), envs.StepCounter(max_steps=6), envs.InitTracker(), envs.DoubleToFloat()]


def seeded(env: Any) -> Any:
    env.set_seed(SEED)
    return env


def limited() -> Any:
    return transformed(envs.GymEnv("CartPole-v1"), envs.StepCounter(max_steps=8))


# --- policies ---------------------------------------------------------------------------------------------------------


def choosing(inputs: int, outputs: int, reads: str = "observation", *, one_hot: bool = False) -> TensorDictModule:
    torch.manual_seed(1)
    net = nn.Linear(inputs, outputs)

    def choose(observation: torch.Tensor) -> torch.Tensor:
        best = net(observation.float()).argmax(-1)
        return nn.functional.one_hot(best, outputs) if one_hot else best

    return TensorDictModule(choose, [reads], ["action"])


def one_hot(reads: str = "observation", inputs: int = 4) -> TensorDictModule:
    return choosing(inputs, 2, reads, one_hot=True)


def turning(reads: Any = "observation", writes: Any = "action", outputs: int = 2) -> TensorDictModule:
    """Reals between -1 and 1, of the last numbers of what it reads."""
    return TensorDictModule(lambda x: x.float()[..., -outputs:].sin(), [reads], [writes])


def spoken(words: Any) -> torch.Tensor:
    """An action from the words of `Talking`: of one lane, or of several."""
    if isinstance(words, str):
        return torch.tensor([float(number) for number in words.split(".")]).sin()
    return torch.stack([spoken(each) for each in words])


def reading(key: Any, act: Callable[[Any], torch.Tensor]) -> Callable[[], TensorDictModule]:
    return lambda: TensorDictModule(act, [key], ["action"])


def whole(act: Callable[[TensorDictBase], torch.Tensor], key: Any = "action") -> Callable[[], Any]:
    """A policy that gives the whole TensorDict back."""
    return lambda: lambda td: td.set(key, act(td))


def second(robots: TensorDictBase) -> torch.Tensor:
    return robots[..., 1].get("joints")[..., :2].sin()


def by_agent() -> TensorDictModule:
    return TensorDictModule(lambda x: x.sum(-1).long() % 4, [("agents", "observation")], [("agents", "action")])


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An environment and a policy.

    Attributes:
        make: makes the environment, seeded.
        policy: makes the policy.
        adds: flags that our batches have at the root and below "next", and TorchRL's have not.
    """

    make: Callable[[], Any]
    policy: Callable[[], Any] = turning
    adds: Sequence[str] = ()


CASES = {
    "CartPole, one-hot": Case(cart_pole, one_hot),
    "CartPole, categorical": Case(lambda: cart_pole(categorical_action_encoding=True), lambda: choosing(4, 2)),
    "Pendulum": Case(pendulum, lambda: turning(outputs=1)),
    "float64": Case(lambda: Steps(dtype=torch.float64)),
    "transforms": Case(
        lambda: transformed(cart_pole(), *counted(), envs.ObservationNorm(0.5, 2.0, in_keys=["observation"])), one_hot
    ),
    "VecNorm": Case(
        lambda: transformed(cart_pole(), envs.VecNormV2(in_keys=["observation"], out_keys=["normed"])),
        lambda: one_hot("normed"),
    ),
    "SerialEnv": Case(lambda: seeded(envs.SerialEnv(3, limited)), one_hot),
    "SerialEnv, transformed": Case(
        lambda: transformed(seeded(envs.SerialEnv(3, lambda: envs.GymEnv("CartPole-v1"))), *counted()), one_hot
    ),
    "SerialEnv, frames": Case(
        lambda: transformed(
            seeded(envs.SerialEnv(2, lambda: envs.GymEnv("CartPole-v1"))),
            envs.UnsqueezeTransform(-1, in_keys=["observation"]),
            envs.CatFrames(N=3, dim=-1, in_keys=["observation"]),
            envs.FlattenObservation(-2, -1, in_keys=["observation"]),
        ),
        lambda: one_hot(inputs=12),
    ),
    "SerialEnv of agents": Case(lambda: envs.SerialEnv(2, Agents), by_agent),
    "ParallelEnv": Case(lambda: seeded(envs.ParallelEnv(2, limited, mp_start_method="fork")), one_hot),
    "batched": Case(lambda: Steps((4,))),
    "batched, one lane": Case(lambda: Steps((1,))),
    "batched twice": Case(lambda: Steps((2, 3))),
    "batched, unlocked": Case(lambda: Steps((4,), batch_locked=False)),
    "unlocked": Case(lambda: Steps(batch_locked=False)),
    "terminated alone": Case(lambda: Steps((2,), names=("terminated",)), adds=("truncated",)),
    "done alone": Case(lambda: Steps((2,), names=("done",)), adds=("truncated",)),
    "agents": Case(Agents, by_agent),
    "agents, batched": Case(lambda: Agents((2,)), by_agent),
    "agents, batched twice": Case(lambda: Agents((2, 2)), by_agent),
    "agents, transformed": Case(
        lambda: transformed(
            Agents((2,)), envs.StepCounter(max_steps=4), envs.RewardSum(reset_keys=["_reset"]), envs.InitTracker()
        ),
        by_agent,
    ),
    "apart": Case(Apart, lambda: turning(("players", "observation"), ("players", "action"), 1), FLAGS),
    "apart, batched": Case(
        lambda: Apart((2,)), lambda: turning(("players", "observation"), ("players", "action"), 1), FLAGS
    ),
    "masks": Case(
        lambda: transformed(Masked((3,)), envs.ActionMask()),
        lambda: TensorDictModule(lambda mask: mask.int().argmax(-1), ["action_mask"], ["action"]),
    ),
    "text": Case(Talking),
    "text of lanes": Case(lambda: envs.SerialEnv(2, Talking)),
    "text of processes": Case(lambda: envs.ParallelEnv(2, Talking, mp_start_method="fork")),
    "text, read": Case(Talking, reading("words", spoken)),
    "text of lanes, read": Case(lambda: envs.SerialEnv(2, Talking), reading("words", spoken)),
    "text of lanes, as a whole": Case(lambda: envs.SerialEnv(2, Talking), whole(lambda td: spoken(td["words"]))),
    "growing": Case(Growing),
    "growing, read": Case(Growing, reading("points", lambda points: points.sum(-2).sin())),
    "growing, as a whole": Case(lambda: envs.SerialEnv(2, Growing), whole(lambda td: td["points"].sum(-2).sin())),
    "growing, unlike lanes": Case(lambda: envs.SerialEnv(2, [Growing, lambda: seeded(Growing())])),
    "unlike parts": Case(Unlike),
    "unlike parts, batched": Case(lambda: Unlike((2,))),
    "unlike parts of lanes": Case(lambda: envs.SerialEnv(2, Unlike)),
    "unlike parts, like keys": Case(Unlike, reading(("robots", "camera"), lambda seen: seen.sum(-2)[..., :2].sin())),
    "unlike parts, read": Case(lambda: Unlike((2,)), reading("robots", second)),
    "unlike parts, as a whole": Case(Unlike, whole(lambda td: second(td["robots"]))),
    "unlike parts that act": Case(
        lambda: Handed((2,)),
        whole(lambda td: td["robots"].get("camera")[..., :1].sin(), ("robots", "action")),
        FLAGS,
    ),
    "a class": Case(Classed),
    "a class, as a whole": Case(Classed, whole(lambda td: td["pair"].number.expand(2).sin())),
}


VALUES = ("growing", "unlike", "a")  # first words of cases where not all is a tensor of one shape


def frames(env: Any, steps: int = STEPS) -> int:
    return steps * torch.Size(env.batch_size).numel()


@contextmanager
def ours(case: Case, **options: Any) -> Iterator[Collector]:
    env = case.make()
    try:
        with Collector(env, case.policy(), **{"frames_per_batch": frames(env), **options}) as collector:
            yield collector
    finally:
        if not env.is_closed:
            env.close()


def theirs(case: Case, batches: int = BATCHES, **options: Any) -> list[Any]:
    """Batches of TorchRL's collector."""
    env = case.make()
    size = frames(env)
    collector = collectors.Collector(
        env,
        case.policy(),
        frames_per_batch=size,
        total_frames=batches * size,
        auto_register_policy_transforms=False,  # it would add `InitTracker` to the environment
        **options,
    )
    made = [batch.clone() for batch in collector]
    collector.shutdown()
    return made


def differences(came: Any, expected: Any, adds: Sequence[str] = (), key: tuple[str, ...] = ()) -> list[Any]:
    """Where two values differ: in what they are, in keys, shapes, dtypes or numbers."""
    if isinstance(expected, list):
        return [] if came == expected else [(key, came, expected)]
    if not is_tensor_collection(expected):
        same = came.dtype == expected.dtype and torch.equal(came, expected)
        return [] if same else [(key, came, expected)]
    if type(came) is not type(expected) or came.batch_size != expected.batch_size:
        return [(key, type(came), type(expected), came.shape, expected.shape)]
    if is_non_tensor(expected):
        return [] if came.tolist() == expected.tolist() else [(key, came.tolist(), expected.tolist())]
    if isinstance(expected, LazyStackedTensorDict):
        pairs = zip(came.tensordicts, expected.tensordicts, strict=True)
        own = [] if came.stack_dim == expected.stack_dim else [(key, came.stack_dim, expected.stack_dim)]
        return own + [d for n, pair in enumerate(pairs) for d in differences(*pair, adds, (*key, str(n)))]
    names, others = set(came.keys()) - {"collector"}, set(expected.keys()) - {"collector"}
    is_root = all(part == "next" or part.isdigit() for part in key)
    found: list[Any] = [] if names - others == (set(adds) if is_root else set()) else [(key, names - others)]
    found += [(key, others - names)] if others - names else []
    return found + [
        d for name in names & others for d in differences(came.get(name), expected.get(name), adds, (*key, name))
    ]


class TestSame:
    """After dropping "collector", batches are those of TorchRL's own collector: keys, shapes, dtypes, numbers."""

    @pytest.mark.parametrize("name", CASES)
    def test_key_by_key(self, name):
        case = CASES[name]
        expected = theirs(case)
        with ours(case) as collector:
            for batch in expected:
                came = collector.next()
                assert came.names[-1] == "time"
                assert not differences(came, batch, case.adds)
        dones = [batch["next"].get(key) for batch in expected for key in [dones_of(batch)]]
        assert sum(int(done.sum()) for done in dones) >= 2  # over several episodes

    @pytest.mark.parametrize("name", [name for name in CASES if name.split()[0].strip(",") not in VALUES])
    def test_batches_keep_what_they_promise(self, name):
        previous = None
        with ours(CASES[name]) as collector:
            for _ in range(BATCHES):
                batch = for_check(collector.next())
                check_batch(batch, previous=previous)
                previous = batch


def dones_of(batch: TensorDictBase) -> Any:
    return next(key for key in batch["next"].keys(True, True) if key == "done" or key[-1] == "done")


def for_check(batch: TensorDictBase) -> TensorDict:
    """As the check wants it: its reward and action are the root's, and every value is a tensor."""
    plain = batch.clone().select(*batch.keys(True, True))
    for name, default in ((("next", "reward"), torch.zeros(*batch.shape, 1)), (("action",), torch.zeros(batch.shape))):
        value = plain.get(name, None)
        plain.set(name, default if value is None else value.float())
    return plain


# --- what ours does beside that ---------------------------------------------------------------------------------------


class TestLanes:
    """Several environments that hold no lanes themselves are one lane each."""

    def test_each_lane_is_as_by_itself(self):
        makers = [lambda seed=seed: envs.GymEnv("CartPole-v1") for seed in range(3)]
        made = [maker() for maker in makers]
        for seed, env in enumerate(made):
            env.set_seed(seed)
        with Collector(made, one_hot(), frames_per_batch=3 * 40) as collector:
            batches = [collector.next() for _ in range(2)]
        for lane in range(3):

            def make(lane: int = lane) -> Any:
                env = envs.GymEnv("CartPole-v1")
                env.set_seed(lane)
                return env

            env = make()
            alone = collectors.Collector(
                env, one_hot(), frames_per_batch=40, total_frames=80, auto_register_policy_transforms=False
            )
            for came, expected in zip(batches, alone, strict=True):
                assert not differences(came[lane], expected)
            alone.shutdown()

    @pytest.mark.parametrize(("num_envs", "lead"), [(None, ()), (1, (1,)), (3, (3,))])
    def test_their_number_makes_the_shape(self, num_envs, lead):
        with Collector(Agents, by_agent(), frames_per_batch=12, num_envs=num_envs) as collector:
            batch = collector.next()
            assert batch.shape == (*lead, 12 // collector.num_envs)
            assert batch["agents"].shape == (*batch.shape, 3)

    def test_text_of_each(self):
        with Collector(Talking, turning(), frames_per_batch=6, num_envs=2) as collector:
            batch = collector.next()
        assert batch["words"] == [["0.0", "0.1", "1.0"]] * 2
        assert batch["next", "words"] == [["0.1", "0.2", "1.1"]] * 2

    def test_batched_ones_are_refused(self):
        with pytest.raises(OptionError, match=r"batch size \[2\].*one maker of one batched"):
            Collector(lambda: Steps((2,)), turning(), frames_per_batch=4, num_envs=3)
        with pytest.raises(OptionError, match=r"num_envs=1.*2 lanes"):
            Collector(lambda: Steps((2,)), turning(), frames_per_batch=4, num_envs=1)

    def test_all_have_one_form(self):
        with pytest.raises(SpaceError, match=r"lane 1 differs.*float64 where lane 0 has.*float32"):
            Collector([Steps, lambda: Steps(dtype=torch.float64)], turning(), frames_per_batch=4)


class TestLimit:
    """`max_frames_per_traj` is what TorchRL's collector makes of it."""

    NAMES = ("batched", "batched twice", "agents, batched", "terminated alone", "SerialEnv", "text", "unlike parts")

    @pytest.mark.parametrize("name", NAMES)
    def test_as_there(self, name):
        case = CASES[name]
        if name == "SerialEnv":
            case = Case(lambda: seeded(envs.SerialEnv(3, lambda: envs.GymEnv("CartPole-v1"))), one_hot)
        expected = theirs(case, max_frames_per_traj=3)
        with ours(case, max_frames_per_traj=3) as collector:
            for batch in expected:
                assert not differences(collector.next(), batch)  # with "truncated", which the limit adds there
        assert expected[0]["next"].get(dones_of(expected[0])).any()

    def test_every_part_of_a_lane_is_truncated(self):
        with ours(CASES["apart, batched"], max_frames_per_traj=1) as collector:
            batch = collector.next()
        for name in ("truncated", "done"):
            assert batch["next", "players", name].all()
        assert not batch["next", "players", "terminated"].any()
        assert (batch["players", "observation"][..., 1] == 0).all()  # all begin anew
        check_batch(for_check(batch))

    def test_a_counter_of_the_environments_own_is_told(self):
        with pytest.raises(SpaceError, match=r"'step_count'.*max_frames_per_traj= and record="):
            Collector(
                lambda: transformed(Steps(), envs.StepCounter()), turning(), frames_per_batch=4, max_frames_per_traj=3
            )


class TestTruncated:
    @pytest.mark.parametrize("name", ["agents, batched", "SerialEnv of agents"])
    def test_every_part_is_at_the_end_of_a_batch(self, name):
        expected = theirs(CASES[name], set_truncated=True)
        with ours(CASES[name], set_truncated=True) as collector:
            for batch in expected:
                came = collector.next()
                assert came["next", "agents", "truncated"][..., -1, :, :].all()
                assert not differences(came, batch)


class TestReset:
    @pytest.mark.parametrize("make", [lambda: Steps((4,)), lambda: envs.SerialEnv(4, Steps)])
    def test_one_lane_begins_anew(self, make):
        """Episode e of lane i is seen at its first number, i * 100 + e, and the steps since then at the second."""
        with Collector(make, turning(), frames_per_batch=4, record=("is_init",)) as collector:
            first = collector.next()
            collector.reset(2)
            second = collector.next()
        assert first["observation"][:, 0, 1].tolist() == [0] * 4
        assert second["is_init"].squeeze().tolist() == [False, False, True, False]
        assert second["observation"][:, 0, 1].tolist() == [1, 1, 0, 1]
        assert second["observation"][2, 0, 0] == first["observation"][2, 0, 0] + 1
        assert torch.equal(second["observation"][0, 0], first["next", "observation"][0, 0])

    def test_agents_of_one_lane(self):
        with Collector(lambda: Apart((3,)), CASES["apart"].policy(), frames_per_batch=3) as collector:
            collector.next()
            collector.reset([0, 2])
            batch = collector.next()
        assert batch["players", "observation"][:, 0, :, 1].tolist() == [[0, 0], [1, 1], [0, 0]]

    def test_of_all_goes_to_the_environment_with_its_arguments(self):
        given = []

        class Optional(Steps):
            def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
                given.append(kwargs)
                return super()._reset(tensordict)

        with Collector(Optional, turning(), frames_per_batch=4) as collector:
            collector.reset(options={"hard": True})
        assert given == [{}, {"options": {"hard": True}}]

    def test_lanes_that_reset_themselves_are_not_reset_one_by_one(self):
        with Collector(lambda: envs.GymEnv("CartPole-v1", num_envs=2), one_hot(), frames_per_batch=80) as collector:
            previous = None
            for _ in range(2):
                batch = collector.next()
                check_batch(batch, previous=previous)
                previous = batch
            assert previous["next", "done"].any()
        with pytest.raises(OptionError, match=r"max_frames_per_traj.*reset themselves"):
            Collector(
                lambda: envs.GymEnv("CartPole-v1", num_envs=2), one_hot(), frames_per_batch=4, max_frames_per_traj=3
            )


class TestSeeds:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: envs.GymEnv("CartPole-v1"),
            lambda: envs.SerialEnv(3, lambda: envs.GymEnv("CartPole-v1")),
            envs.PendulumEnv,
        ],
        ids=["GymEnv", "SerialEnv", "PendulumEnv"],
    )
    def test_one_seed_is_one_run(self, make):
        runs = []
        for seed in (0, 0, 1):
            torch.manual_seed(len(runs))
            with Collector(make, frames_per_batch=60) as collector:  # random actions, too
                collector.set_seed(seed)
                runs.append(torch.cat([collector.next() for _ in range(2)], -1).exclude("collector"))
        assert not differences(runs[0], runs[1])
        assert differences(runs[0], runs[2])

    def test_lanes_of_a_batched_one_differ(self):
        with Collector(lambda: envs.SerialEnv(3, lambda: envs.GymEnv("CartPole-v1")), frames_per_batch=3) as collector:
            collector.set_seed(0)
            batch = collector.next()
        assert len({tuple(row) for row in batch["observation"][:, 0].tolist()}) == 3


class TestRandomActions:
    """Drawn by the environment's own rule, from the collector's torch stream."""

    @pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
    def test_are_those_that_a_mask_allows(self, batch_size):
        """`Masked` fails on others."""
        with Collector(lambda: transformed(Masked(batch_size), envs.ActionMask()), frames_per_batch=120) as collector:
            batch = collector.next()
        allowed = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1))
        assert allowed.all()
        assert len(batch["action"].unique()) == 5
        assert (batch["collector", "policy_version"] == -1).all()

    def test_come_first(self):
        with ours(CASES["batched"], init_random_frames=8) as collector:
            batch = collector.next()
        acted = batch["observation"][..., -2:].sin()
        assert (batch["action"][:, :2] != acted[:, :2]).all(-1).all()
        assert torch.equal(batch["action"][:, 2:], acted[:, 2:])

    @pytest.mark.parametrize("make", [Agents, lambda: Agents((2,)), lambda: envs.SerialEnv(2, Agents)])
    def test_under_the_keys_of_agents(self, make):
        with Collector(make, frames_per_batch=40) as collector:
            batch = collector.next()
        assert batch["agents", "action"].shape == (*batch.shape, 3)
        assert batch["agents", "action"].unique().tolist() == [0, 1, 2, 3]

    def test_are_as_the_space_says(self):
        with Collector(Agents, by_agent(), frames_per_batch=4) as collector:
            form = collector._worker.driver.action_codec
        assert repr(form.space) == "Categorical(n=4, shape=[3], dtype=int64)"
        assert form.space.contains([0, 1, 3])
        assert not form.space.contains([0, 1, 4])
        assert form.space.contains(form.space.sample())


class TestNames:
    def test_one_observation_is_what_a_plain_module_gets(self):
        with Collector(Steps, lambda x: x[..., -2:].sin(), frames_per_batch=4) as collector:
            batch = collector.next()
        assert torch.equal(batch["action"], batch["observation"][..., -2:].sin())

    def test_can_be_left_out_and_changed(self):
        make = lambda: transformed(Steps((2,)), envs.StepCounter(), envs.RewardSum())  # noqa: E731
        options = {"exclude_keys": ["episode_reward"], "rename_keys": {"step_count": ("own", "count")}}
        with Collector(make, turning(), frames_per_batch=24, max_frames_per_traj=4, **options) as collector:
            batch = collector.next()
        assert batch.get("episode_reward", None) is None
        assert torch.equal(batch["own", "count"], batch["step_count"])
        assert torch.equal(batch["next", "own", "count"], batch["next", "step_count"])
        check_batch(batch)

    def test_private_ones_are_shown_and_not_delivered(self):
        class Hiding(Steps):
            def make_specs(self, batch: tuple[int, ...]) -> None:
                super().make_specs(batch)
                self.observation_spec["_secret"] = data.Unbounded((*batch, 2))

            def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
                return super()._reset(tensordict).set("_secret", self.seen[..., :2] + 0.5)

            def _step(self, tensordict: TensorDictBase) -> TensorDict:
                return super()._step(tensordict).set("_secret", self.seen[..., :2] + 0.5)

        with Collector(Hiding, turning("_secret"), frames_per_batch=8) as collector:
            batch = collector.next()
        assert torch.equal(batch["action"], (batch["observation"][..., :2] + 0.5).sin())
        assert not [key for key in batch.keys(True) if "_secret" in key]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"exclude_keys": ["observatoin"]}, r"exclude_keys names 'observatoin'.*Did you mean 'observation'"),
            (
                {"rename_keys": {"x": "y"}},
                r"rename_keys names 'x'.*They are 'observation', 'words', \('deep', 'object'\)",
            ),
            ({"rename_keys": {"words": "text"}}, "'words'.*'words' has no fixed form and keeps its name"),
            ({"info_keys": ["x"]}, "info_keys.*keys of their own.*set_info_dict_reader"),
            ({"reset_options": {"x": 1}}, "reset_options.*reset themselves"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options, words):
        with pytest.raises(OptionError, match=words):
            Collector(Talking, turning(), frames_per_batch=4, **options)

    def test_nothing_left(self):
        with pytest.raises(SpaceError, match="Nothing is left of the observations"):
            Collector(Steps, turning(), frames_per_batch=4, exclude_keys=["observation"])

    def test_names_of_ours(self):
        with pytest.raises(SpaceError, match=r"'collector'.*name of ours.*rename_keys=\{'collector': \.\.\.\}"):
            Collector(lambda: Naming("collector"), turning(), frames_per_batch=4)


class Naming(Steps):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__()

    def make_specs(self, batch: tuple[int, ...]) -> None:
        super().make_specs(batch)
        self.observation_spec[self.name] = data.Unbounded((*batch, 1))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        return super()._reset(tensordict).set(self.name, self.paid)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return super()._step(tensordict).set(self.name, self.paid)


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Broken(Steps):
    """Gives something else from its third step on."""

    def __init__(self, batch_size: Sequence[int] = (), *, value: Any, after: int = 3, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self.value, self.left_steps = value, after

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        result = super()._step(tensordict)
        self.left_steps -= 1
        if self.left_steps > 0:
            return result
        if isinstance(self.value, Exception):
            raise self.value
        return result.exclude("observation") if self.value is None else result.set("observation", self.value)


class TestErrors:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (torch.zeros(5), r"\('next', 'observation'\) should.*shape \[3\]; shape \[5\] and dtype float32 came"),
            (torch.zeros(1), r"shape \[3\]; shape \[1\]"),  # which would be spread over the row
            (None, "it is not there"),
        ],
        ids=["longer", "spread", "missing"],
    )
    def test_a_value_that_does_not_fit_is_named(self, value, words):
        with (
            Collector(Broken(value=value), turning(), frames_per_batch=8) as collector,
            pytest.raises(EnvError, match=f"lane 0, step 2: .*{words}"),
        ):
            collector.next()

    def test_a_first_step_of_another_dtype_too(self):
        env = Broken(value=torch.zeros(3), after=1, dtype=torch.int64)
        with (
            Collector(env, turning(), frames_per_batch=8) as collector,
            pytest.raises(EnvError, match=r"\('next', 'observation'\) should.*dtype int64; .* float32 came"),
        ):
            collector.next()

    def test_what_an_environment_raises_comes_with_lane_and_step(self):
        makers = [Steps, lambda: Broken(value=ZeroDivisionError("by hand"))]
        with (
            Collector(makers, turning(), frames_per_batch=8) as collector,
            pytest.raises(ZeroDivisionError, match="by hand") as raised,
        ):
            collector.next()
        cause = raised.value.__cause__
        assert isinstance(cause, WorkerError)
        assert (cause.lane, cause.step) == (1, 2)

    def test_of_a_batched_one_no_lane_is_named(self):
        with (
            Collector(Broken((3,), value=ZeroDivisionError()), turning(), frames_per_batch=12) as collector,
            pytest.raises(ZeroDivisionError) as raised,
        ):
            collector.next()
        assert raised.value.__cause__.lane is None

    def test_a_first_reset_of_another_shape(self):
        class Wrong(Steps):
            def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
                return super()._reset(tensordict).set("observation", torch.zeros(4))

        with pytest.raises(EnvError, match=r"'observation' should.*shape \[3\]; shape \[4\]"):
            Collector(Wrong, turning(), frames_per_batch=4)

    def test_actions_of_unlike_agents_are_refused(self):
        class Hands(Steps):
            def make_specs(self, batch: tuple[int, ...]) -> None:
                super().make_specs(batch)
                hands = [data.Composite(action=data.Bounded(-1, 1, (n,))) for n in (2, 3)]
                self.action_spec = data.Composite(hands=torch.stack(hands, 0))

        with pytest.raises(SpaceError, match=r"\('hands', 'action'\) has no tensor form of a fixed shape"):
            Collector(Hands, lambda td: td, frames_per_batch=4)

    def test_keys_of_some_parts_alone_are_refused_by_name(self):
        class Lone(Unlike):
            @property
            def robots(self) -> LazyStackedTensorDict:
                robots = super().robots
                robots.tensordicts[1].set("lidar", torch.zeros(2))
                return robots

        with pytest.raises(SpaceError, match=r"Only some.*\('robots', 'lidar'\) \(1 of 2\).*consolidate_spec"):
            Collector(Lone, turning(), frames_per_batch=4)

    def test_something_else_is_no_environment(self):
        with pytest.raises(OptionError, match=r"(?s)TensorDict environment: reset, step.*no step_and_maybe_reset"):
            Collector(dict, frames_per_batch=4)


class TestClosing:
    def test_what_was_made_here_is_closed(self):
        made = []

        def make() -> Any:
            made.append(envs.SerialEnv(2, Steps))
            return made[-1]

        Collector(make, turning(), frames_per_batch=4).shutdown()
        assert made[0].is_closed

    @pytest.mark.parametrize("kind", ["SerialEnv", "ParallelEnv"])
    def test_what_was_passed_in_is_its_owners(self, kind):
        options = {"mp_start_method": "fork"} if kind == "ParallelEnv" else {}
        env = getattr(envs, kind)(2, Steps, **options)
        Collector(env, turning(), frames_per_batch=4).shutdown()
        assert not env.is_closed
        env.close()

    def test_one_that_was_closed_by_another_is_left_alone(self):
        made = []

        def make() -> Any:
            made.append(envs.SerialEnv(2, Steps))
            return made[-1]

        collector = Collector(make, turning(), frames_per_batch=4)
        made[0].close()
        collector.shutdown()


class TestArguments:
    def test_go_to_the_maker(self):
        with Collector(Steps, turning(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)}) as collector:
            assert collector.num_envs == 2

    def test_go_on_to_what_an_instance_is_still_to_make(self):
        given = []

        def make(**kwargs: Any) -> Any:
            given.append(kwargs)
            return Steps()

        env = envs.SerialEnv(2, make)
        given.clear()
        Collector(env, turning(), frames_per_batch=4, create_env_kwargs={"a": 1}).shutdown()
        env.close()
        assert given == [{"a": 1}] * 2

    @pytest.mark.parametrize("make", [Steps, lambda: started(envs.SerialEnv(2, Steps))])
    def test_of_another_instance_are_refused(self, make):
        with pytest.raises(OptionError, match=r"create_env_kwargs=\{'a': 1\} were given for an environment instance"):
            Collector(make(), turning(), frames_per_batch=4, create_env_kwargs={"a": 1})


def started(env: Any) -> Any:
    env.reset()
    return env


class TestState:
    def test_of_transforms_is_saved(self):
        """Normalisation goes on with what was seen before."""
        case = CASES["VecNorm"]
        with ours(case) as collector:
            collector.next()
            state = collector.state_dict()
            place = collector._worker.driver._carriers[0].env.transform[0].loc.clone()
        with ours(case) as collector:
            other = collector._worker.driver._carriers[0].env.transform[0]
            assert differences(other.loc, place)
            collector.load_state_dict(state)
            assert not differences(other.loc, place)
            check_batch(collector.next())


def recurrent() -> Any:
    torch.manual_seed(0)
    keys = {"in_keys": ["observation", "h", "c"], "out_keys": ["features", ("next", "h"), ("next", "c")]}
    return TensorDictSequential(modules.LSTMModule(input_size=4, hidden_size=8, **keys), one_hot("features", 8))


def remembering(num_envs: int | None, *, primed: bool) -> Any:
    primer = recurrent()[0].make_tensordict_primer()
    make = lambda: envs.GymEnv("CartPole-v1")  # noqa: E731
    env = make() if num_envs is None else envs.SerialEnv(num_envs, make)
    return seeded(transformed(env, envs.InitTracker(), *([primer] if primed else [])))


class TestRecurrent:
    """State of a policy is its own to carry, whether or not the environment has a primer for it."""

    @pytest.mark.parametrize("num_envs", [None, 3])
    @pytest.mark.parametrize("primed", [False, True], ids=["unprimed", "primed"])
    def test_as_torchrl_carries_it(self, num_envs, primed):
        expected = theirs(Case(lambda: remembering(num_envs, primed=True), recurrent))
        with ours(Case(lambda: remembering(num_envs, primed=primed), recurrent)) as collector:
            previous = None
            for batch in expected:
                came = collector.next()
                assert not differences(came, batch)
                check_batch(came, previous=previous)
                previous = came
            assert came["h"].any()

    def test_a_primer_that_no_policy_writes_is_an_observation(self):
        primer = lambda: envs.TensorDictPrimer(goal=data.Unbounded((2,)), default_value=0.5, expand_specs=True)  # noqa: E731
        case = Case(lambda: transformed(Steps((3,)), primer()), lambda: turning("goal"))
        expected = theirs(case)
        with ours(case) as collector:
            for batch in expected:
                assert not differences(collector.next(), batch)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_frames_that_are_made_on_a_device_stay_there():
    with Collector(lambda: envs.PendulumEnv(device="cuda:0"), frames_per_batch=30, max_frames_per_traj=7) as collector:
        batches = [collector.next() for _ in range(2)]
    for batch, previous in zip(batches, [None, batches[0]], strict=True):
        assert batch["th"].device == batch["next", "reward"].device == torch.device("cuda:0")
        check_batch(batch, previous=previous)


# --- the contract that every driver keeps -----------------------------------------------------------------------------


class TestContractOfOne(CollectionContract):
    resets_lanes = True

    def make(self) -> Any:
        return Steps()


class TestContractOfALane(TestContractOfOne):
    def make(self) -> Any:
        return [Steps(), Steps()]


class TestContractOfBatched(TestContractOfOne):
    def make(self) -> Any:
        return Steps((2, 2))


class TestContractOfSerialEnv(TestContractOfOne):
    def make(self) -> Any:
        return envs.SerialEnv(
            2, lambda: transformed(envs.GymEnv("CartPole-v1"), envs.StepCounter(9, step_count_key="n"))
        )


class TestContractOfAgents(TestContractOfOne):
    action_key = ("agents", "action")
    reward_key = ("agents", "reward")

    def make(self) -> Any:
        return Agents((2,))


class TestContractOfThoseApart(TestContractOfOne):
    action_key = ("players", "action")
    reward_key = ("players", "reward")

    def make(self) -> Any:
        return Apart((2,))


class TestContractOfText(TestContractOfOne):
    def make(self) -> Any:
        return envs.SerialEnv(2, Talking)


class TestContractOfThoseThatResetThemselves(CollectionContract):
    resets_lanes = False

    def make(self) -> Any:
        return envs.GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True)
