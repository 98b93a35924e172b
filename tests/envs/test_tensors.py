"""Vector environments on torch tensors, as simulators on a GPU have it: on the host, a pretended device, and CUDA.

The environments are homemade, and every value they give follows from lane, episode and step: what a batch must hold is
worked out here, not asked of another driver.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import vector as wrappers
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rlcollect import Collector, RecurrentModule
from rlcollect.devices import CPU
from rlcollect.envs.vector.tensors import TensorLanes
from rlcollect.errors import EnvError, OptionError, PolicyError, SpaceError
from rlcollect.rollout import build
from rlcollect.testing import CollectionContract, TensorTagged
from tests.collectors.helpers import checked, joined
from tests.envs.vector_helpers import all_keys, count, lanes_of, masked_rows_are_zero
from tests.rollout.helpers import bits

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
RECORD = ("is_init", "step_count")
REALS = spaces.Box(-1.0, 1.0, (2,), np.float32)
Tensor = torch.Tensor


class Simulator(gym.Env):
    """N lanes on tensors; no `VectorEnv`, and written as Isaac Lab's are: what it gives are buffers it uses again.

    It observes lane, episode, t, and a number that follows from seed, lane and episode; it pays t and the sum of the
    action.

    Args:
        lengths: of each lane's episodes; None for one that never ends.
        behaves: what it does at an episode's end.
        declares: what its metadata says; "nothing" for no entry at all.
        final: the name of the last observations in the info; "stale": they stay there; None: they are left out.
        group: the name of the one entry of its observation; None: it is a tensor.
        dtype: of the observation.
        actions: the space of one lane's action.
        masks: whether it resets the lanes that `reset_mask` names: "kept", or "ignored" (all are reset), or "shaken"
            (others are changed).
        live: whether it gives the same tensors each time.
        device: of all tensors.
        more: further entries of the observation, or in the place of it, by name: functions of lane, episode and t.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        *lengths: int | None,
        behaves: AutoresetMode = SAME_STEP,
        declares: Any = None,
        final: str | None = "final_obs",
        group: str | None = "policy",
        dtype: torch.dtype = torch.float32,
        actions: gym.Space[Any] = REALS,
        masks: str = "kept",
        live: bool = True,
        device: Any = "cpu",
        more: Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> None:
        self.metadata = {} if declares == "nothing" else {"autoreset_mode": declares or behaves}
        self.num_envs = len(lengths)
        self.device = torch.empty(0, device=device).device  # with its index
        self.behaves, self.final, self.group = behaves, final, group
        self.dtype, self.masks, self.live = dtype, masks, live
        self.more = more or {}
        numbers = spaces.Box(-np.inf, np.inf, (4,), np.float64 if dtype is torch.float64 else np.float32)
        self.single_observation_space = numbers if group is None else spaces.Dict({group: numbers})
        self.single_action_space = actions
        self.lengths = self.tensor([length or 10**9 for length in lengths])
        self.lane = self.tensor(range(self.num_envs))
        self.seed: int | None = 0
        self.seeds: list[Any] = []
        self.options: list[Any] = []
        self.received: list[Any] = []
        self.steps = self.closed = 0
        self.episode = self.tensor([-1] * self.num_envs)
        self.t = self.tensor([0] * self.num_envs)
        self.pending = self.t > 0
        self.buffers: dict[Any, Tensor] = {}
        self.extras: dict[str, Any] = {}

    def tensor(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values)).to(self.device)

    def given(self, name: Any, value: Tensor) -> Tensor:
        """A tensor to be given away: the same one each time, if that is how it is."""
        if not self.live:
            return value.clone()
        if name not in self.buffers:
            self.buffers[name] = value.clone()
        return self.buffers[name].copy_(value)

    def observed(self, name: str) -> Any:
        tag = torch.stack((self.lane, self.episode, self.t, noise(self.seed or 0, self.lane, self.episode)), 1)
        found = {self.group or "": self.given((name, "tag"), tag.to(self.dtype))}
        for key, function in self.more.items():
            found[key] = self.given((name, key), function(self.lane, self.episode, self.t))
        return found if self.group is not None or self.more else found[""]

    def begin(self, which: Tensor) -> None:
        self.episode = self.episode + which
        self.t = torch.where(which, 0, self.t)
        self.pending = self.pending & ~which

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not (seed is None or isinstance(seed, int)):
            raise TypeError(f"seed={seed!r} is no int")
        self.seeds.append(seed)
        self.options.append(options)
        if seed is not None:
            self.seed = seed
            self.episode = torch.full_like(self.episode, -1)
        mask = (options or {}).get("reset_mask")
        everywhere = torch.ones_like(self.pending)
        if mask is not None:
            assert isinstance(mask, Tensor)
            assert mask.device == self.device
            assert mask.dtype is torch.bool
            if self.masks == "shaken":
                self.t = torch.where(mask, self.t, self.t + 1)
        self.begin(everywhere if mask is None or self.masks == "ignored" else mask)
        self.inform()
        return self.observed("obs"), self.extras

    def inform(self) -> None:
        if not self.live:
            self.extras = {}
        self.extras["t"] = self.given("info t", self.t)
        self.extras["log"] = {"mean": self.given("mean", self.t.float() / 2)}

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self.received.append(actions)
        self.steps += 1
        parts = tree_flatten(actions)[0]
        assert all(part.device == self.device for part in parts)
        assert all(part.is_contiguous() for part in parts)
        if self.behaves is DISABLED:
            assert not bool(self.pending.any())
        acting = ~self.pending
        paid = sum(part.reshape(self.num_envs, -1).sum(1) for part in parts) + self.t
        rewards = self.given("rewards", torch.where(acting, paid.float(), 0.0))
        for part in parts:
            part.fill_(1)  # they are its own
        self.begin(self.pending.clone())
        self.t = self.t + acting
        ended = acting & (self.t >= self.lengths)
        terminated, truncated = self.given("terminated", ended), self.given("truncated", torch.zeros_like(ended))
        self.inform()
        if self.behaves is SAME_STEP:
            if self.final == "stale":
                self.extras["final_obs"] = self.observed("final")
            elif bool(ended.any()):
                self.extras["final_info"] = {"t": self.t.clone()}
                if self.final is not None:
                    self.extras[self.final] = self.observed("final")
            else:
                self.extras.pop(self.final, None)
                self.extras.pop("final_info", None)
            self.begin(ended)
            self.extras["t"] = self.given("info t", self.t)
        else:
            self.pending = ended
        return self.observed("obs"), rewards, terminated, truncated, self.extras

    def close(self) -> None:
        self.closed += 1


def noise(seed: Any, lane: Any, episode: Any) -> Any:
    return ((seed + 1) * 7919 + lane * 1297 + episode * 31) % 1009


def tags(
    lane: int, frames: int, length: int | None, *, limit: int | None = None, seed: int = 0, first: int = 0
) -> dict[Any, Any]:
    """What a lane's frames must hold, `[F, *shape]` each, without the reward."""
    per = min(length or 10**9, limit or 10**9)
    episode, t = np.divmod(np.arange(frames), per)
    episode = episode + first

    def tag(at: Any) -> Any:
        return np.stack((np.full(frames, lane), episode, at, noise(seed, lane, episode)), 1)

    terminated, truncated = t + 1 == (length or -1), t + 1 == (limit or -1)
    wide = {
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("next", "done"): terminated | truncated,
        ("step_count",): t,
        ("next", "step_count"): t + 1,
        ("is_init",): t == 0,
        **{(flag,): np.zeros(frames, bool) for flag in ("done", "terminated", "truncated")},
    }
    return {("tag",): tag(t), ("next", "tag"): tag(t + 1), **{key: value[:, None] for key, value in wide.items()}}


def assert_tagged(
    batches: Iterable[TensorDictBase],
    lengths: Sequence[int | None],
    *,
    key: tuple[str, ...] = ("policy",),
    version: int = -1,
    dtype: torch.dtype = torch.float32,
    others: Iterable[Any] = (),
    **how: Any,
) -> None:
    """Every key of every frame.

    Args:
        batches: each a view of it on the host.
        lengths: of the lanes' episodes.
        key: where the tag stands.
        version: of the policy.
        dtype: of the tag.
        others: keys that are there and not looked at.
        how: of `tags`.
    """
    batches = [batch.to("cpu") for batch in batches]
    identities = []
    for lane, (frames, length) in enumerate(zip(lanes_of(batches), lengths, strict=True)):
        expected = tags(lane, len(frames), length, **how)
        expected = {(*k[:-1], *key) if k[-1] == "tag" else k: value for k, value in expected.items()}
        ours = {("action",), ("next", "reward"), ("collector", "traj_ids"), ("collector", "policy_version")}
        assert all_keys(frames) - {("collector", "mask")} == {*expected} | ours | {*others}
        for name, values in expected.items():
            wanted = dtype if name[-1] == key[-1] else frames[name].dtype
            assert frames[name].dtype == wanted
            assert torch.equal(frames[name], torch.from_numpy(np.asarray(values)).to(wanted)), (lane, name)
        acted = frames["action"].reshape(len(frames), -1).sum(1)
        torch.testing.assert_close(frames["next", "reward"][:, 0], (acted + frames["step_count"][:, 0]).float())
        assert (frames["collector", "policy_version"] == version).all()
        episodes = expected["step_count",][:, 0] == 0
        ids = frames["collector", "traj_ids"]
        assert torch.equal(ids[1:] != ids[:-1], torch.from_numpy(episodes[1:]))
        identities += ids[torch.from_numpy(episodes)].tolist()
    assert len({*identities}) == len(identities)


def collected(made: Any, policy: Any = None, **options: Any) -> list[TensorDictBase]:
    """All batches, each held against the one before it."""
    with Collector(made, policy, **{"record": RECORD, **options}) as collector:
        assert isinstance(collector._worker.driver, TensorLanes)
        batches = list(checked(collector))
        assert collector.exhausted
        assert count(batches) == collector.collected_frames == collector.total_frames
    return batches


LENGTHS = (1, 3, 7, None)


# --- frames -----------------------------------------------------------------------------------------------------------


class TestFrames:
    @pytest.mark.parametrize("steps", [1, 2, 5, 300])
    def test_every_key_of_every_frame(self, steps):
        env = Simulator(*LENGTHS)
        batches = collected(env, frames_per_batch=4 * steps, total_frames=4 * max(3 * steps, 30))
        assert_tagged(batches, LENGTHS)
        assert env.steps == max(3 * steps, 30)
        assert len(env.seeds) == 1

    @pytest.mark.parametrize("total", [4, 20, 44, 48, 400])
    def test_total_frames_is_exact(self, total):
        batches = collected(Simulator(*LENGTHS), frames_per_batch=4 * 11, total_frames=total)
        assert sum(batch.numel() for batch in batches) == total
        assert batches[-1].batch_size == (4, (total // 4 - 1) % 11 + 1)
        assert_tagged(batches, LENGTHS)

    def test_the_length_is_known_and_there_is_no_mask(self):
        with Collector(Simulator(2, 3), frames_per_batch=10, total_frames=24) as collector:
            assert len(collector) == 3
            batch = collector.next()
        assert ("collector", "mask") not in all_keys(batch)
        assert batch.names == [None, "time"]
        assert batch.device is None

    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    @pytest.mark.parametrize("nested", [True, False], ids=["nested", "a tensor"])
    @pytest.mark.parametrize("final", ["final_obs", "final_observation"])
    def test_the_probe(self, end, nested, final):
        """Its last observations hold NaN where a lane goes on."""
        env = TensorTagged((1, 2, 5), end=end, nested=nested, final=final)
        batches = collected(env, frames_per_batch=12, total_frames=60)
        key = ("policy", "tag") if nested else ("observation",)
        for lane, (frames, length) in enumerate(zip(lanes_of(batches), (1, 2, 5), strict=True)):
            expected = tags(lane, 20, length)
            for where in ((), ("next",)):
                tag = torch.from_numpy(expected[*where, "tag"][:, :3]).float()
                assert torch.equal(frames[(*where, *key)], tag)
            done = torch.from_numpy(expected["next", "done"])
            assert torch.equal(frames["next", "terminated"], done & (end != "truncated"))
            assert torch.equal(frames["next", "truncated"], done & (end != "terminated"))
            torch.testing.assert_close(frames["next", "reward"], frames["action"].sum(-1, keepdim=True))
        assert env.steps == 20

    @pytest.mark.parametrize("options", [{"return_same_td": True}, {"use_buffers": False}, {"obs_dtype": "env"}])
    def test_in_whatever_memory(self, options):
        with Collector(
            Simulator(*LENGTHS), frames_per_batch=20, total_frames=104, record=RECORD, **options
        ) as collector:
            batches = [batch.clone() for batch in collector]
        assert_tagged(batches, LENGTHS)

    def test_soft_truncation_marks_the_last_frames_only(self):
        plain = collected(Simulator(*LENGTHS), frames_per_batch=20, total_frames=104)
        marked = collected(Simulator(*LENGTHS), frames_per_batch=20, total_frames=104, set_truncated=True)
        for one, other in zip(plain, marked, strict=True):
            last = torch.arange(one.batch_size[1]) == one.batch_size[1] - 1
            for name in ("truncated", "done"):
                assert torch.equal(other["next", name][..., 0], one["next", name][..., 0] | last)
            for key in ("policy", ("next", "policy"), ("next", "terminated"), "step_count"):
                assert torch.equal(one[key], other[key])

    def test_rollouts_between_lose_nothing(self):
        with Collector(Simulator(*LENGTHS), frames_per_batch=20, total_frames=60, record=RECORD) as collector:
            batches = [collector.next(), collector.rollout(), *collector]
        assert_tagged(batches, LENGTHS)

    @pytest.mark.parametrize("steps", [1, 3, 100])
    def test_an_interruptor(self, steps):
        stopping, batches = After(steps), []
        with Collector(
            Simulator(*LENGTHS), frames_per_batch=40, total_frames=120, record=RECORD, interruptor=stopping
        ) as collector:
            while not collector.exhausted:
                stopping.start_collection()
                batches.append(collector.next())
                assert batches[-1].batch_size[1] <= steps
        assert_tagged(batches, LENGTHS)

    def test_figures_of_episodes(self):
        with Collector(Simulator(2, 3), frames_per_batch=12, total_frames=48) as collector:
            list(collector)
            stats = collector.stats()
        assert stats.episodes == 12 + 8
        assert (stats.episode_length.min, stats.episode_length.max) == (2, 3)

    def test_trajectories(self):
        with Collector(Simulator(2, 3), frames_per_batch=12, split_trajs=True, record=RECORD) as collector:
            pieces = collector.next()
        assert pieces["collector", "mask"].sum(1).tolist() == [2, 2, 2, 3, 3]

    def test_of_a_vector_environment_of_gymnasium_under_a_wrapper(self):
        wrapped = wrappers.TransformReward(TensorTagged((2, 3)), lambda reward: reward * 0 + 2)
        batches = collected(wrapped, frames_per_batch=8, total_frames=40)
        assert all((batch["next", "reward"] == 2).all() for batch in batches)
        assert sum(int(batch["next", "done"].sum()) for batch in batches) == 10 + 6


class After:
    """Stops each rollout after so many of its steps."""

    def __init__(self, steps):
        self.steps, self.asked = steps, 0

    def start_collection(self):
        self.asked = 0

    def stop_collection(self):
        self.asked = self.steps

    def collection_stopped(self):
        self.asked += 1
        return self.asked >= self.steps


# --- what is observed -------------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "critic": lambda lane, episode, t: torch.stack((lane, t), 1).double() / 3,
    "scalar": lambda lane, episode, t: t.float() / 7,
    "image": lambda lane, episode, t: (lane[:, None, None] * 16 + t[:, None, None]).expand(-1, 2, 3).to(torch.uint8),
    "flag": lambda lane, episode, t: (t % 2 == 0)[:, None],
    "half": lambda lane, episode, t: (t[:, None] / 4).half(),
    "brain": lambda lane, episode, t: (t[:, None] / 4).bfloat16(),
    "number": lambda lane, episode, t: (lane * 1000 + t).int(),
}


class TestObservations:
    @pytest.mark.parametrize("name", FORMS)
    def test_every_dtype_stays_what_it_is(self, name):
        """float64 too, whatever torch's default is."""
        env = Simulator(2, 3, more={name: FORMS[name]})
        batches = collected(env, frames_per_batch=10, total_frames=40)
        assert_tagged(batches, (2, 3), others=[(name,), ("next", name)])
        for lane, frames in enumerate(lanes_of(batches)):
            episode, t = torch.zeros(20), frames["step_count"][:, 0]
            lanes = torch.full_like(t, lane)
            for found, at in ((frames[name], t), (frames["next", name], t + 1)):
                expected = FORMS[name](lanes, episode, at)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_the_dtype_of_a_single_tensor(self, dtype):
        env = Simulator(2, 3, group=None, dtype=dtype)
        batches = collected(env, frames_per_batch=10, total_frames=40)
        assert_tagged(batches, (2, 3), key=("observation",), dtype=dtype)

    def test_keys_that_are_left_out(self):
        env = Simulator(2, 3, more={"critic": FORMS["critic"], "image": FORMS["image"]})
        batches = collected(env, frames_per_batch=10, total_frames=40, exclude_keys=["critic", ("image",)])
        assert_tagged(batches, (2, 3))

    def test_keys_that_are_renamed(self):
        env = Simulator(2, 3, more={"reward": FORMS["scalar"]})
        with pytest.raises(SpaceError, match=r"'reward'.*rename_keys"):
            Collector(env, frames_per_batch=10)
        renames = {"reward": ("paid", "before"), "policy": "seen"}
        batches = collected(env, frames_per_batch=10, total_frames=40, rename_keys=renames)
        assert_tagged(batches, (2, 3), key=("seen",), others=[("paid", "before"), ("next", "paid", "before")], first=1)

    def test_a_single_tensor_is_renamed(self):
        batches = collected(
            Simulator(2, 3, group=None), frames_per_batch=10, total_frames=40, rename_keys={"observation": "pixels"}
        )
        assert_tagged(batches, (2, 3), key=("pixels",))

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"exclude_keys": ["polcy"]}, OptionError, r"'polcy'.*'policy'"),
            ({"rename_keys": {"polcy": "p"}}, OptionError, r"'polcy'.*'policy'"),
            ({"exclude_keys": ["policy"]}, SpaceError, "Nothing is left"),
            ({"rename_keys": {"policy": "action"}}, SpaceError, "'action'"),
            ({"num_envs": 3}, OptionError, "has 2 lanes"),
            ({"reset_options": {"level": 1}}, OptionError, "reset_options"),
        ],
        ids=str,
    )
    def test_options_that_do_not_fit(self, options, error, text):
        made = []

        def maker():
            made.append(Simulator(2, 3))
            return made[-1]

        with pytest.raises(error, match=text):
            Collector(maker, frames_per_batch=10, **options)
        assert made[0].closed == 1

    def test_a_key_of_the_observation_named_as_one_of_ours_that_is_not_recorded(self):
        """Without a record of them, these names are as good as any."""
        more = {"step_count": FORMS["scalar"], "is_init": FORMS["number"]}
        env = Simulator(2, 3, more=more)
        with Collector(env, frames_per_batch=10) as collector:
            batch = collector.next()
        t = batch["policy"][..., 2]
        assert torch.equal(batch["step_count"], t / 7)
        assert torch.equal(batch["is_init"], (t + 1000 * batch["policy"][..., 0]).int())

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("lanes", lambda lane, episode, t: torch.zeros(3, 2)),
            ("number", lambda lane, episode, t: torch.zeros(())),
        ],
    )
    def test_one_without_a_dimension_of_lanes_is_refused_by_name(self, name, function):
        with pytest.raises(EnvError, match=rf"'{name}' should have 2 lanes"):
            Collector(Simulator(2, 3, live=False, more={name: function}), frames_per_batch=10)

    @pytest.mark.parametrize(
        "function",
        [
            lambda lane, episode, t: torch.zeros(2, 2 if int(t.max()) == 0 else 3),
            lambda lane, episode, t: torch.zeros(2, dtype=torch.float32 if int(t.max()) == 0 else torch.int64),
        ],
        ids=["shape", "dtype"],
    )
    def test_one_that_changes_its_form_is_refused_by_name(self, function):
        with (
            Collector(Simulator(4, 3, live=False, more={"changing": function}), frames_per_batch=10) as collector,
            pytest.raises(EnvError, match="'changing' should be a tensor of shape"),
        ):
            collector.next()
        assert collector.closed

    @pytest.mark.parametrize(
        ("place", "value", "text"),
        [
            (1, np.zeros(2), "rewards should be a tensor"),
            (1, torch.zeros(2, 1), r"rewards should be a tensor of shape \[2\]; \[2, 1\] came"),
            (2, False, "terminated should be a tensor"),
            (3, torch.zeros(3), r"truncated should be a tensor of shape \[2\]"),
        ],
    )
    def test_answers_of_another_form_are_refused_by_name(self, place, value, text):
        class Wrong(Simulator):
            def step(self, actions):
                answer = list(super().step(actions))
                answer[place] = value
                return tuple(answer)

        with (
            Collector(Wrong(4, 3), frames_per_batch=10) as collector,
            pytest.raises(EnvError, match=text),
        ):
            collector.next()

    @pytest.mark.parametrize("place", [1, 2, 3])
    def test_on_a_step_that_is_not_looked_at_too(self, place):
        """As the environment's fault, not the policy's."""

        class Wrong(Simulator):
            def step(self, actions):
                answer = list(super().step(actions))
                if self.steps == 3:
                    answer[place] = answer[place].numpy()
                return tuple(answer)

        with (
            Collector(Wrong(4, 3), weigh, frames_per_batch=10) as collector,
            pytest.raises(EnvError, match="ndarray"),
        ):
            collector.next()

    @pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.uint8])
    def test_flags_may_be_numbers(self, kind):
        """Brax gives floats, RSL-RL integers; rewards may be of any precision."""

        class Numbers(Simulator):
            def step(self, actions):
                observation, rewards, terminated, truncated, info = super().step(actions)
                return observation, rewards.double(), terminated.to(kind), truncated.to(kind), info

        assert_tagged(collected(Numbers(*LENGTHS), frames_per_batch=20, total_frames=80), LENGTHS)


class TestActions:
    SPACES: ClassVar[dict[str, Any]] = {
        "reals": (REALS, [((2,), torch.float32)]),
        "discrete": (spaces.Discrete(4, start=2), [((), torch.int64)]),
        "several": (spaces.MultiDiscrete([3, 4]), [((2,), torch.int64)]),
        "bits": (spaces.MultiBinary(3), [((3,), torch.int8)]),
        "dict": (
            spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Dict({"c": REALS})}),
            [((), torch.int64), ((2,), torch.float32)],
        ),
        "tuple": (spaces.Tuple((spaces.Discrete(3), REALS)), [((), torch.int64), ((2,), torch.float32)]),
    }

    @pytest.mark.parametrize("name", SPACES)
    def test_the_environment_gets_tensors_of_its_own(self, name):
        """In the form of the space, all lanes at once; what it does to them is not seen in the batch."""
        space, forms = self.SPACES[name]
        env = Simulator(2, 3, actions=space)
        kept = []
        step = env.step

        def noted(actions):
            kept.append(tree_map(lambda part: part.clone(), actions))
            return step(actions)

        env.step = noted
        with Collector(env, frames_per_batch=10) as collector:
            batch = collector.next()
        first = kept[0]
        assert isinstance(first, {"dict": dict, "tuple": tuple}.get(name, Tensor))
        parts = [tree_flatten(actions)[0] for actions in kept]
        assert [(tuple(part.shape[1:]), part.dtype) for part in parts[0]] == forms
        keys = [key for key in all_keys(batch) if key[0] == "action"]
        order = {"dict": [("action", "a"), ("action", "b", "c")], "tuple": [("action", "0"), ("action", "1")]}
        for place, key in enumerate(order.get(name, keys)):
            assert torch.equal(batch[key], torch.stack([part[place] for part in parts], 1))

    def test_random_actions_are_in_the_bounds_and_reproducible(self):
        def run():
            with Collector(Simulator(2, 3, actions=spaces.Discrete(4, start=2)), frames_per_batch=80) as collector:
                collector.set_seed(3)
                return collector.next()["action"]

        assert {*run().flatten().tolist()} == {2, 3, 4, 5}
        assert torch.equal(run(), run())

    def test_an_action_mask_is_kept_to(self):
        allowed = {"action_mask": lambda lane, episode, t: torch.stack((t % 2 == 0, t % 2 == 1, t < 0), 1)}
        env = Simulator(4, 3, actions=spaces.Discrete(3), more=allowed)
        with Collector(env, frames_per_batch=40) as collector:
            batch = collector.next()
        assert torch.equal(batch["action"], (batch["policy"][..., 2] % 2).long())


# --- modes ------------------------------------------------------------------------------------------------------------


class TestModes:
    def test_one_that_does_not_tell_is_taken_for_same_step_and_told_so_once(self):
        with pytest.warns(UserWarning, match=r"Simulator does not say .*SAME_STEP is assumed") as warned:
            collector = Collector(
                Simulator(*LENGTHS, declares="nothing"), frames_per_batch=20, total_frames=80, record=RECORD
            )
        with collector:
            assert_tagged(collector, LENGTHS)
        assert len(warned) == 1

    @pytest.mark.parametrize("declares", ["SameStep", SAME_STEP])
    def test_as_a_word_or_as_gymnasium_has_it(self, declares):
        assert_tagged(collected(Simulator(2, 3, declares=declares), frames_per_batch=20, total_frames=80), (2, 3))

    def test_a_word_that_is_no_mode(self):
        with pytest.raises(EnvError, match=r"'same-step'.*should be an AutoresetMode"):
            Collector(Simulator(2, 3, declares="same-step"), frames_per_batch=20)

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED])
    @pytest.mark.parametrize("live", [True, False])
    @pytest.mark.parametrize("steps", [1, 5, 300])
    def test_other_modes_on_the_host(self, behaves, live, steps):
        env, frames = Simulator(*LENGTHS, behaves=behaves, live=live), 4 * max(steps, 20)
        with Collector(env, frames_per_batch=4 * steps, total_frames=frames, record=RECORD) as collector:
            batches = list(checked(collector))
        assert count(batches) == frames
        assert all(masked_rows_are_zero(batch) for batch in batches)
        assert_tagged(batches, LENGTHS)

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED])
    def test_other_modes_with_limits(self, behaves):
        env = Simulator(*LENGTHS, behaves=behaves)
        with Collector(
            env,
            frames_per_batch=20,
            total_frames=200,
            max_frames_per_traj=4,
            masked_reset=behaves is NEXT_STEP or None,
            record=RECORD,
        ) as collector:
            assert_tagged(list(checked(collector)), LENGTHS, limit=4)

    @pytest.mark.parametrize("behaves", [NEXT_STEP, SAME_STEP, DISABLED])
    @pytest.mark.parametrize("obs_dtype", [None, "env"])
    def test_float64_stays_in_every_mode(self, behaves, obs_dtype):
        """The default of drivers of torch-native environments is what the environment has."""
        env = Simulator(2, 3, behaves=behaves, dtype=torch.float64)
        with Collector(env, frames_per_batch=20, obs_dtype=obs_dtype, record=RECORD) as collector:
            assert_tagged([collector.next()], (2, 3), dtype=torch.float64)

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED])
    def test_what_it_is_called_in_texts(self, behaves):
        with Collector(Simulator(2, 3, behaves=behaves, live=False), frames_per_batch=20) as collector:
            refusal = collector._worker.driver.refuses_lane_resets
        assert refusal is None or "Simulator" in refusal

    @pytest.mark.parametrize("behaves", [NEXT_STEP, SAME_STEP, DISABLED])
    def test_a_state_of_the_environments_own(self, behaves):
        class Saving(Simulator):
            def state_dict(self):
                return {"seed": self.seed}

            def load_state_dict(self, state):
                self.seed = state["seed"]

        with Collector(Saving(2, 3, behaves=behaves), frames_per_batch=20) as collector:
            collector.set_seed(5)
            first = collector.next()
            state = collector.state_dict()
        with Collector(Saving(2, 3, behaves=behaves), frames_per_batch=20) as collector:
            collector.load_state_dict(state)
            second = collector.next()
        assert noise_of(first) == noise_of(second)

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED])
    def test_one_that_has_last_observations_says_another_mode_than_it_is_in(self, behaves):
        with (
            Collector(Simulator(2, 3, declares=behaves, final="stale"), frames_per_batch=20) as collector,
            pytest.raises(EnvError, match="let it say SAME_STEP"),
        ):
            collector.next()

    @pytest.mark.parametrize("behaves", [NEXT_STEP, SAME_STEP, DISABLED])
    def test_one_seed_gives_one_sequence_in_every_mode(self, behaves):
        def run(seed):
            with Collector(Simulator(2, 4, behaves=behaves), frames_per_batch=16) as collector:
                collector.next()
                collector.set_seed(seed)
                collector.next()
                return collector.next()

        assert torch.equal(run(5)["policy"], run(5)["policy"])
        assert torch.equal(run(5)["action"], run(5)["action"])
        assert noise_of(run(5)) != noise_of(run(6))


def noise_of(batch):
    """Of the first frame, less what its lane and episode make of it: what the seed makes."""
    lane, episode, _, value = batch["policy"][0, 0].tolist()
    return (value - lane * 1297 - episode * 31) % 1009


# --- last observations ------------------------------------------------------------------------------------------------


class TestLastObservations:
    @pytest.mark.parametrize("final", ["final_obs", "final_observation", "stale"])
    @pytest.mark.parametrize("live", [True, False])
    def test_by_whatever_name_and_stale_ones_too(self, final, live):
        assert_tagged(
            collected(Simulator(*LENGTHS, final=final, live=live), frames_per_batch=20, total_frames=400), LENGTHS
        )

    @pytest.mark.parametrize("steps", [1, 4, 10])
    def test_none_is_an_error_before_anything_is_delivered(self, steps):
        with Collector(Simulator(None, 5, final=None), frames_per_batch=2 * steps) as collector:
            for _ in range(4 // steps):
                assert collector.next()["next", "done"].sum() == 0
            with pytest.raises(EnvError, match=r"no \"final_obs\"") as raised:
                collector.next()
            assert collector.closed
        assert "lane 1" in str(raised.value)

    def test_none_is_no_matter_where_no_episode_ends(self):
        assert_tagged(collected(Simulator(None, 50, final=None), frames_per_batch=20, total_frames=80), (None, 50))

    def test_one_that_lacks_a_key_is_refused(self):
        """As the environment's fault, not the policy's."""

        class Lacking(Simulator):
            def step(self, actions):
                answer = super().step(actions)
                answer[-1].get("final_obs", {}).pop("number", None)
                return answer

        with (
            Collector(Lacking(2, 3, live=False, more={"number": FORMS["number"]}), frames_per_batch=20) as collector,
            pytest.raises(EnvError, match="number"),
        ):
            collector.next()

    def test_keys_that_are_left_out_may_lack(self):
        class Lacking(Simulator):
            def step(self, actions):
                answer = super().step(actions)
                answer[-1].get("final_obs", {}).pop("number", None)
                return answer

        env = Lacking(2, 3, live=False, more={"number": FORMS["number"]})
        assert_tagged(collected(env, frames_per_batch=20, total_frames=80, exclude_keys=["number"]), (2, 3))

    def test_an_array_of_objects_is_refused(self):
        class Objects(Simulator):
            def step(self, actions):
                answer = super().step(actions)
                if "final_obs" in answer[-1]:
                    answer[-1]["final_obs"] = np.array([None, None], dtype=object)
                return answer

        with (
            Collector(Objects(2, 3, live=False, group=None), frames_per_batch=20) as collector,
            pytest.raises(EnvError, match="should be a tensor"),
        ):
            collector.next()


class TestInfos:
    def test_of_the_step_and_not_of_the_reset(self):
        batches = collected(Simulator(*LENGTHS), frames_per_batch=20, total_frames=200, info_keys=["t"])
        assert_tagged(batches, LENGTHS, others=[("next", "info", "t")])
        for batch in batches:
            assert torch.equal(batch["next", "info", "t"], batch["next", "step_count"][..., 0])

    def test_nested_and_of_another_dtype(self):
        batches = collected(Simulator(50, 60), frames_per_batch=20, total_frames=80, info_keys=[("log", "mean")])
        for batch in batches:
            assert torch.equal(batch["next", "info", "log", "mean"], batch["next", "step_count"][..., 0] / 2)

    def test_entries_that_come_with_ends_alone(self):
        """As ManiSkill's figures of an episode do."""

        class Figures(Simulator):
            def step(self, actions):
                answer = super().step(actions)
                if "final_info" in answer[-1]:
                    answer[-1]["final_info"]["episode"] = {"length": answer[-1]["final_info"]["t"].float()}
                return answer

        env = Figures(*LENGTHS)
        batches = collected(env, frames_per_batch=20, total_frames=600, info_keys=[("episode", "length")])
        for batch in batches:
            found, done = batch["next", "info", "episode", "length"], batch["next", "done"][..., 0]
            assert torch.equal(found.isnan(), ~done)
            assert torch.equal(found[done], batch["next", "step_count"][..., 0][done].float())

    def test_the_form_that_is_stated_holds(self):
        class Forces(Simulator):
            def step(self, actions):
                answer = super().step(actions)
                answer[-1]["forces"] = torch.ones(self.num_envs, 3) * self.t[:, None]
                return answer

        stated = {"forces": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
        batches = collected(Forces(50, 60), frames_per_batch=20, total_frames=80, info_keys=stated)
        for batch in batches:
            assert batch["next", "info", "forces"].shape == (2, 10, 3)
            assert torch.equal(batch["next", "info", "forces"][..., 0], batch["next", "step_count"][..., 0].float())

    @pytest.mark.parametrize(
        "value", [0.5, "easy", {"of": torch.zeros(2)}, np.zeros(2)], ids=lambda v: type(v).__name__
    )
    def test_what_is_no_tensor_is_refused_by_name(self, value):
        class Odd(Simulator):
            def inform(self):
                super().inform()
                self.extras["odd"] = value

        with pytest.raises((EnvError, SpaceError, OptionError), match="odd"):
            Collector(Odd(2, 3), frames_per_batch=20, info_keys=["odd"])

    def test_one_of_another_shape_is_refused_by_name(self):
        class Changing(Simulator):
            def inform(self):
                super().inform()
                self.extras["odd"] = torch.zeros(2) if self.steps < 3 else torch.zeros(2, 2)

        with (
            Collector(Changing(9, 9), frames_per_batch=20, info_keys=["odd"]) as collector,
            pytest.raises(EnvError, match="'odd' should have shape"),
        ):
            collector.next()

    def test_one_that_never_comes_is_an_error_in_the_end(self):
        """As for other environments: a word that was mistyped should not be a column of NaN for ever."""
        with (
            Collector(Simulator(1, 1), frames_per_batch=200, total_frames=800, info_keys=["sucess"]) as collector,
            pytest.raises(EnvError, match="sucess"),
        ):
            list(collector)


# --- resets -----------------------------------------------------------------------------------------------------------


class TestResets:
    @pytest.mark.parametrize("limit", [1, 3, 4, 50])
    @pytest.mark.parametrize("steps", [1, 5, 300])
    def test_a_limit_of_episodes(self, limit, steps):
        env, total = Simulator(*LENGTHS), 4 * max(30, steps)
        batches = collected(
            env, frames_per_batch=4 * steps, total_frames=total, max_frames_per_traj=limit, masked_reset=True
        )
        assert_tagged(batches, LENGTHS, limit=limit)

    @pytest.mark.parametrize("live", [True, False])
    def test_a_reset_with_every_batch(self, live):
        env = Simulator(*LENGTHS, live=live)
        batches = collected(
            env, frames_per_batch=4 * 5, total_frames=4 * 40, reset_at_each_iter=True, masked_reset=True
        )
        for batch in batches:
            assert batch["is_init"][:, 0].all()
            assert (batch["policy"][:, 0, 2] == 0).all()
        for lane, frames in enumerate(lanes_of(batches)):
            per = min(LENGTHS[lane] or 99, 5)
            t = (torch.arange(40) % 5) % per
            assert torch.equal(frames["policy"][:, 2], t.float())
            assert torch.equal(frames["next", "policy"][:, 2], t + 1.0)
            starts = frames["policy"][:, 1][t == 0]
            assert torch.equal(starts, torch.arange(len(starts)).float())  # each reset is one

    @pytest.mark.parametrize("option", [{"max_frames_per_traj": 5}, {"reset_at_each_iter": True}], ids=str)
    @pytest.mark.parametrize("masked", [None, False])
    def test_without_masks_both_are_refused(self, option, masked):
        env = Simulator(2, 3)
        with pytest.raises(OptionError, match=rf"{next(iter(option))}: .*masked_reset=True"):
            Collector(env, frames_per_batch=20, masked_reset=masked, **option)

    def test_of_some_lanes(self):
        env = Simulator(None, None, None, 5)
        with Collector(env, frames_per_batch=4 * 3, masked_reset=True, record=RECORD) as collector:
            batches = [collector.next()]
            collector.reset([1])
            batches.append(collector.next())
            collector.reset([True, False, True, False])
            batches.append(collector.next())
        list(checked(batches))
        frames = joined(batches)
        assert frames["policy"][..., 1:3].tolist() == [
            [[0, t] for t in range(6)] + [[1, t] for t in range(3)],
            [[0, t] for t in range(3)] + [[1, t] for t in range(6)],
            [[0, t] for t in range(6)] + [[1, t] for t in range(3)],
            [[0, t] for t in range(5)] + [[1, t] for t in range(4)],
        ]

    def test_of_some_lanes_without_masks_is_refused_and_nothing_is_lost(self):
        with Collector(Simulator(*LENGTHS), frames_per_batch=20, record=RECORD) as collector:
            batches = [collector.next()]
            with pytest.raises(OptionError, match=r"Simulator is not known to reset single lanes.*masked_reset=True"):
                collector.reset([1])
            batches.append(collector.next())
        assert_tagged(batches, LENGTHS)

    @pytest.mark.parametrize("masks", ["ignored", "shaken"])
    @pytest.mark.parametrize("how", ["limit", "reset", "iteration"])
    def test_one_that_changes_other_lanes_is_found_out(self, masks, how):
        env = Simulator(None, 2, masks=masks)
        options = {"limit": {"max_frames_per_traj": 4}, "iteration": {"reset_at_each_iter": True}}.get(how, {})
        with (
            Collector(env, frames_per_batch=6 if how != "iteration" else 8, masked_reset=True, **options) as collector,
            pytest.raises(EnvError, match=r"changed 'policy' of lane .*masked_reset=True"),
        ):
            self.go_on(collector, [1] if how == "reset" else [])

    def go_on(self, collector, lanes):
        for _ in range(2):
            collector.next()
            collector.reset(lanes)

    def test_lanes_that_hold_nan_are_not_taken_for_changed(self):
        nan = {"odd": lambda lane, episode, t: torch.full((len(lane), 2), torch.nan)}
        env = Simulator(None, 2, more=nan)
        with Collector(env, frames_per_batch=20, max_frames_per_traj=4, masked_reset=True) as collector:
            assert collector.next()["odd"].isnan().all()

    def test_of_all_lanes(self):
        env = Simulator(*LENGTHS)
        with Collector(env, frames_per_batch=20, record=RECORD) as collector:
            first = collector.next()
            begun = env.episode.tolist()
            collector.reset()
            second = collector.next()
        list(checked([first, second]))
        assert second["policy"][:, 0, 1].tolist() == [episode + 1 for episode in begun]
        assert second["is_init"][:, 0].all()

    def test_a_seed(self):
        """A simulator takes one, for all its lanes."""
        env = Simulator(*LENGTHS)
        with Collector(env, frames_per_batch=20, record=RECORD) as collector:
            collector.next()
            collector.set_seed([11, 12, 13, 14])
            assert_tagged([collector.next()], LENGTHS, seed=11)
            collector.reset(seed=[5, 6, 7, 8])
            assert_tagged([collector.next()], LENGTHS, seed=5)
        assert env.seeds == [None, 11, 5]

    def test_one_seed_gives_one_sequence(self):
        def run(seed):
            with Collector(Simulator(*LENGTHS), frames_per_batch=20) as collector:
                assert collector.set_seed(seed) == seed + 1
                return bits(joined([collector.next() for _ in range(3)]))

        assert run(3) == run(3)
        assert run(3) != run(4)

    def test_a_seed_for_some_lanes_is_refused_and_nothing_is_lost(self):
        """It takes none but for all: to leave the seed out in silence would be worse."""
        with Collector(Simulator(*LENGTHS), frames_per_batch=20, masked_reset=True, record=RECORD) as collector:
            batches = [collector.next()]
            with pytest.raises(OptionError, match="seed"):
                collector.reset([3], seed=5)
            assert not collector.closed
            batches.append(collector.next())
        assert_tagged(batches, LENGTHS)

    def test_a_seed_that_waits_is_not_lost_by_a_reset_of_some_lanes(self):
        with Collector(Simulator(*LENGTHS), frames_per_batch=20, masked_reset=True, record=RECORD) as collector:
            collector.set_seed([11, 12, 13, 14])
            with contextlib.suppress(OptionError):
                collector.reset([1])
            assert noise_of(collector.next()) == 12 * 7919 % 1009

    @pytest.mark.parametrize("lanes", [None, [1, 3]])
    def test_options_reach_it_or_are_refused(self, lanes):
        env = Simulator(*LENGTHS)
        with Collector(env, frames_per_batch=20, masked_reset=True) as collector:
            collector.next()
            with contextlib.suppress(OptionError):
                collector.reset(lanes, options={"level": 3})
                assert env.options[-1]["level"] == 3
            assert not collector.closed

    def test_an_option_is_not_kept_for_the_next_reset(self):
        env = Simulator(None, None)
        with Collector(env, frames_per_batch=4, masked_reset=True, max_frames_per_traj=2) as collector:
            collector.reset(options={"level": 3})
            collector.next()
        assert all("level" not in (options or {}) for options in env.options[2:])

    def test_a_maker_is_closed_and_an_instance_is_not(self):
        made = []

        def maker():
            made.append(Simulator(2, 3))
            return made[-1]

        for source, closed in ((maker, 1), (Simulator(2, 3), 0)):
            with Collector(source, frames_per_batch=20) as collector:
                collector.next()
                env = collector._worker.driver.env
            assert env.closed == closed

    def test_a_state_gives_the_remaining_frames(self):
        options = {"frames_per_batch": 20, "total_frames": 100, "record": RECORD}
        with Collector(Simulator(*LENGTHS), **options) as collector:
            batches = [collector.next() for _ in range(2)]
            state = collector.state_dict()
        with Collector(Simulator(*LENGTHS), **options) as collector:
            collector.load_state_dict(state)
            batches += list(collector)
        assert count(batches) == 100
        assert all(batches[2]["is_init"][:, 0])

    @pytest.mark.parametrize("masked", [None, True])
    @pytest.mark.parametrize("at", [0, 1, 4, 7])
    def test_after_a_ctrl_c_new_episodes_begin(self, at, masked):
        calls = iter(range(-1, 10**6))

        def policy(policy):
            if next(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return weigh(policy)

        batches, env = [], Simulator(*LENGTHS)
        with Collector(
            env, policy, frames_per_batch=12, total_frames=60, record=RECORD, masked_reset=masked
        ) as collector:
            while not collector.exhausted:
                try:
                    batches.append(collector.next())
                except KeyboardInterrupt:
                    assert not collector.closed
        list(checked(batches))
        assert count(batches) == 60
        frames = joined(batches)
        assert torch.equal(frames["policy"][..., 2], frames["step_count"][..., 0].float())
        assert torch.equal(frames["next", "policy"][..., 2], frames["step_count"][..., 0] + 1.0)
        assert torch.equal(frames["next", "policy"][..., :2], frames["policy"][..., :2])


# --- memory -----------------------------------------------------------------------------------------------------------


class TestMemory:
    @pytest.mark.parametrize("options", [{}, {"use_buffers": False}, {"max_frames_per_traj": 3, "masked_reset": True}])
    @pytest.mark.parametrize("behaves", [NEXT_STEP, SAME_STEP, DISABLED])
    def test_batches_never_change(self, options, behaves):
        """Whatever becomes of the environment's buffers, which it uses again."""
        if behaves is NEXT_STEP and "masked_reset" not in options:
            options = {**options, "masked_reset": False}
        env = Simulator(*LENGTHS, behaves=behaves)
        with Collector(env, frames_per_batch=20, info_keys=["t"], **options) as collector:
            kept = [collector.next() for _ in range(4)]
            copies = [bits(batch) for batch in kept]
            for _ in range(4):
                collector.next()
            for buffer in env.buffers.values():
                buffer.fill_(1)
        assert [bits(batch) for batch in kept] == copies

    def test_what_is_done_to_a_batch_is_not_seen_in_others(self):
        with Collector(Simulator(*LENGTHS), frames_per_batch=20, record=RECORD) as collector:
            batches = []
            for _ in range(4):
                batch = collector.next()
                batches.append(batch.clone())
                for key in all_keys(batch):
                    batch[key].zero_()
        assert_tagged(batches, LENGTHS)

    @pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 2, "masked_reset": True}], ids=str)
    def test_observations_are_never_made_arrays(self, options, monkeypatch):
        """Nothing in a step is: on a GPU each array would be a copy to the host, and a wait for it."""
        within = []
        numpy, array = Tensor.numpy, Tensor.__array__

        def refused(method):
            def refuse(tensor, *args, **kwargs):
                assert not within, "a tensor was made an array"
                return method(tensor, *args, **kwargs)

            return refuse

        monkeypatch.setattr(Tensor, "numpy", refused(numpy))
        monkeypatch.setattr(Tensor, "__array__", refused(array))
        for name in ("step", "audit_step", "truncate"):
            method = getattr(TensorLanes, name)

            def guarded(self, *args, method=method):
                within.append(0)
                method(self, *args)
                within.pop()

            monkeypatch.setattr(TensorLanes, name, guarded)
        assert_tagged(
            collected(
                Simulator(*LENGTHS), lambda policy: policy[:, :2] * 0, frames_per_batch=20, total_frames=80, **options
            ),
            LENGTHS,
            version=0,
            limit=options.get("max_frames_per_traj"),
        )

    @pytest.mark.parametrize("final", ["final_obs", "stale"])
    def test_an_observation_is_copied_once_a_step_into_the_record(self, final):
        """And once more a rollout, as what came next: `[N, T, *shape]` in one copy."""
        size, steps, lanes = 37, 20, 3
        fixed = torch.ones(lanes, size)
        env = Simulator(None, None, 50, more={"wide": lambda lane, episode, t: fixed}, final=final)
        env.given = lambda name, value: value  # copies of its own do not count
        with Collector(env, lambda policy: policy[:, :2] * 0, frames_per_batch=lanes * steps) as collector:
            collector.next()
            with Copies() as copies:
                collector.next()
        of_steps = [shape for shape in copies.shapes if shape == (lanes, size)]
        of_rollouts = [shape for shape in copies.shapes if shape[-1:] == (size,) and len(shape) == 3]
        assert len(of_steps) <= steps + 3  # the first row, the last next observation, the current one
        assert of_rollouts == [(lanes, steps - 1, size)]

    def test_observations_with_a_graph_behind_them(self):
        """Of a simulator that can be differentiated: the record is none of it."""
        weight = torch.ones((), requires_grad=True)
        env = Simulator(2, 3, live=False, more={"soft": lambda lane, episode, t: t.float()[:, None] * weight})
        with Collector(env, frames_per_batch=20, total_frames=80, record=RECORD) as collector:
            batches = list(checked(collector))
            assert not any(value.requires_grad for value in collector._worker.driver.current.values())
        for batch in batches:
            assert not batch["soft"].requires_grad
            assert torch.equal(batch["soft"], batch["step_count"].float())

    def test_under_inference_mode(self):
        """Isaac Lab's environments step under it: what they give are inference tensors."""

        class Inferring(Simulator):
            def reset(self, **kwargs):
                with torch.inference_mode():
                    return super().reset(**kwargs)

            def step(self, actions):
                with torch.inference_mode():
                    return super().step(actions)

        batches = collected(Inferring(*LENGTHS), frames_per_batch=20, total_frames=80)
        assert not any(value.is_inference() for value in batches[0].values(True, True))
        assert_tagged(batches, LENGTHS)

    def test_memory_is_flat(self):
        with Collector(Simulator(*LENGTHS), frames_per_batch=400) as collector:
            pointers = set()
            for _ in range(20):
                batch = collector.next()
                pointers.add(batch["policy"].data_ptr())
                del batch
        assert len(pointers) <= 2


class Copies(TorchDispatchMode):
    """Notes the shape of all that is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


# --- another device, played by the host -------------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten


class There(Tensor):
    """A tensor on a device that there is not: held by the host, and as hard to mix with the host's as one on a GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return done_there(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"There({self.held})"

    def __getitem__(self, place):
        return super().__getitem__(with_tensors(place))

    def __setitem__(self, place, value):
        super().__setitem__(with_tensors(place), value)

    def tolist(self):
        return self.held.tolist()

    def new_tensor(self, values):
        return torch.tensor(values, dtype=self.dtype).to(ELSEWHERE)

    def numpy(self, *_, **__):
        raise TypeError("A tensor on this device cannot be made an array.")

    __array__ = numpy


def with_tensors(place):
    """Indices as torch itself would make them: its own way leaves out what is done here."""
    if isinstance(place, tuple):
        return tuple(map(with_tensors, place))
    if isinstance(place, list):
        return torch.tensor(place, dtype=None if place else torch.int64)
    return place


def done_there(func, args, kwargs):
    """Does with what is held what was asked for, if nothing but what may be mixed is."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    ours = [value for value in tensors if isinstance(value, There)]
    asked = kwargs.get("device")
    if not ours and (asked is None or asked.type != ELSEWHERE.type):
        return func(*args, **kwargs)
    moves = func in (aten.copy_.default, aten._to_copy.default)
    indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else []
    theirs = [v for v in tensors if not isinstance(v, There) and v.dim() and not any(v is i for i in indices)]
    if theirs and ours and not moves:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    to_host = func is aten._to_copy.default and asked is not None and asked.type == "cpu"
    kwargs = kwargs if asked is None else {**kwargs, "device": CPU}
    held, named = tree_map(lambda value: value.held if isinstance(value, There) else value, (args, kwargs))
    result = func(*held, **named)
    if to_host:
        return result
    if isinstance(args[0] if args else None, Tensor) and result is held[0]:
        return args[0]  # done in place
    return tree_map(lambda value: There(value) if isinstance(value, Tensor) else value, result)


class Elsewhere(TorchDispatchMode):
    """Tensors can be made there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return done_there(func, args, kwargs or {})


class Made(TorchFunctionMode):
    """From numbers too, which torch's own way would leave out."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = torch.device(kwargs.get("device") or "cpu")
        from_numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], There)
        if from_numbers and asked.type == ELSEWHERE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(ELSEWHERE)
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretended() -> Iterator[Any]:
    with Elsewhere(), Made():
        yield "meta"


@contextlib.contextmanager
def taken_for_another() -> Iterator[Any]:
    """The host, which the package takes for another device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "CPU", torch.device("meta"))
        yield "cpu"


@contextlib.contextmanager
def on_cuda() -> Iterator[Any]:
    yield "cuda"


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
PLACES = [
    pytest.param(taken_for_another, id="host taken for another"),
    pytest.param(pretended, id="pretended"),
    pytest.param(on_cuda, id="cuda", marks=[pytest.mark.cuda, needs_cuda]),
]
every_place = pytest.mark.parametrize("place", PLACES)
places = pytest.mark.parametrize("place", PLACES[1:])


class TestThePretendedDevice:
    """That it is one."""

    def test_it_holds_what_it_is_given(self):
        with pretended() as device:
            there = torch.zeros(3, 4, device=device)
            there[:, 1] = torch.arange(3.0)
            there[[0, 1], [2, 2]] = there[[1, 2], [1, 1]]
            there.data[:, 3].fill_(7)
            assert there.device == ELSEWHERE
            assert there.cpu().tolist() == [[0, 0, 1, 7], [0, 1, 2, 7], [0, 2, 0, 7]]
            assert (there == 7).nonzero().tolist() == [[0, 3], [1, 3], [2, 3]]
            assert torch.tensor([1, 2], device=device).to("cpu").tolist() == [1, 2]

    def test_it_does_not_mix_with_the_host(self):
        with pretended() as device:
            there, here = torch.zeros(3, device=device), torch.ones(3)
            for mixed in (
                lambda: there + here,
                lambda: there[[0, 1]].add_(here[:2]),
                lambda: torch.stack((there, here)),
                lambda: there.__setitem__([0, 1, 2], here),
            ):
                with pytest.raises(RuntimeError, match="same device"):
                    mixed()
            for made in (there.numpy, lambda: np.asarray(there), lambda: np.zeros(3) + there):
                with pytest.raises(TypeError):
                    made()


# --- policies ---------------------------------------------------------------------------------------------------------


def weigh(policy):
    return policy[..., 1:3] * 0.125


class Weights(nn.Module):
    """One multiplication and one addition a number: the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.register_buffer("shift", torch.tensor([1.0, 2.0]))

    def forward(self, policy):
        scores = policy[..., 1:3] * self.weight + self.shift
        return scores, scores * 2

    def become(self, value):
        with torch.no_grad():
            self.weight.fill_(value)


class Remembering(nn.Module):
    """Recurrent, and the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.25]))

    def forward(self, policy, hidden):
        after = hidden * 0.5 + policy[..., 1:3] * self.weight
        return after * 0.25, after


class Counting:
    """Counts the frames of each episode by state; takes any TensorDict."""

    def __call__(self, tensordict):
        tensordict["action"] = weigh(tensordict["policy"])
        tensordict["next", "age"] = tensordict["age"] + 1
        tensordict["square"] = tensordict["age"] ** 2
        return tensordict


def whole(tensordict):
    scores = tensordict["policy"][..., 1:3] * 0.5
    return tensordict.update({"action": scores, "more": {"scores": scores.double() * 3}})


def with_marks(policy, is_init):
    return torch.where(is_init, policy[..., :2], -policy[..., :2])


POLICIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "random": (lambda: None, {}),
    "function": (lambda: weigh, {}),
    "several": (lambda: lambda policy: {"action": weigh(policy), "flag": policy[..., 0] > 0}, {}),
    "module": (lambda: TensorDictModule(Weights(), ["policy"], ["action", "value"]), {}),
    "TensorDict": (lambda: whole, {}),
    "is_init": (lambda: with_marks, {}),
    "recurrent": (
        lambda: TensorDictModule(Remembering(), ["policy", "hidden"], ["action", ("next", "hidden")]),
        {"initial_policy_state": {"hidden": torch.tensor([0.5, -1.0])}},
    ),
    "counting": (Counting, {"initial_policy_state": {"age": torch.zeros(1)}}),
}
policies = pytest.mark.parametrize("name", POLICIES)


def run(
    device: Any, name: str = "module", *, lengths: Sequence[int | None] = LENGTHS, batches: int = 3, **options: Any
) -> list[Any]:
    """Batches of a simulator there, as bits on the host."""
    make, state = POLICIES[name]
    torch.manual_seed(0)
    env = options.pop("env", Simulator)(*lengths, device=device, **options.pop("simulator", {}))
    found: list[Any] = []
    given = {"frames_per_batch": 4 * 5, "record": RECORD, **state, **options}
    with Collector(env, make(), **given) as collector:
        assert isinstance(collector._worker.driver, TensorLanes)
        collector.set_seed(5)
        for _ in range(batches):
            batch = collector.next()
            if batch is None:
                break
            home = env.observed("obs")["policy"].device
            wanted = options.get("storing_device") or options.get("device") or home
            assert {value.device.type for value in batch.values(True, True)} == {torch.device(wanted).type}
            found.append(bits(batch.to("cpu")))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a warm-up": {"init_random_frames": 28},
    "a warm-up, unevenly": {"init_random_frames": 33},
    "a limit": {"max_frames_per_traj": 4, "masked_reset": True},
    "a limit of 1": {"max_frames_per_traj": 1, "masked_reset": True},
    "a reset with every batch": {"reset_at_each_iter": True, "masked_reset": True},
    "both and a warm-up": {
        "max_frames_per_traj": 4,
        "reset_at_each_iter": True,
        "masked_reset": True,
        "init_random_frames": 33,
    },
    "soft truncation": {"set_truncated": True},
    "one TensorDict": {"return_same_td": True},
    "new memory": {"use_buffers": False},
    "a short last batch": {"total_frames": 4 * 13},
    "one TensorDict, short at last": {"return_same_td": True, "total_frames": 4 * 13},
    "infos": {"info_keys": ["t", ("log", "mean"), "never"]},
    "checked actions": {"check_actions": True},
    "no ids": {"track_traj_ids": False},
    "the worker": {"record": ("worker",)},
    "trajectories": {"split_trajs": True},
    "post-processing": {"postproc": lambda batch: batch.set("twice", batch["policy"] * 2)},
    "a long rollout": {"frames_per_batch": 4 * 300},
}


class TestAnotherDevice:
    """Frames are made there and stay there; what is worked out about them comes from the host. The bits are equal."""

    @every_place
    @policies
    def test_every_kind_of_policy(self, place, name):
        plain = run("cpu", name)
        with place() as device:
            assert run(device, name) == plain

    @places
    @policies
    @pytest.mark.parametrize("option", ["a warm-up, unevenly", "a limit", "both and a warm-up"])
    def test_warm_ups_and_limits_with_every_kind_of_policy(self, place, name, option):
        plain = run("cpu", name, **OPTIONS[option])
        with place() as device:
            assert run(device, name, **OPTIONS[option]) == plain

    @every_place
    @pytest.mark.parametrize("name", ["random", "counting"])
    @pytest.mark.parametrize("option", OPTIONS)
    @pytest.mark.slow
    def test_every_option(self, place, name, option):
        batches = 1 if option == "a long rollout" else 4
        plain = run("cpu", name, batches=batches, **OPTIONS[option])
        with place() as device:
            assert run(device, name, batches=batches, **OPTIONS[option]) == plain

    @places
    @pytest.mark.parametrize("steps", [1, 3, 100])
    def test_an_interruptor(self, place, steps):
        """A rollout that is stopped is delivered short, and nothing is lost."""

        def stopped(device):
            stopping, batches = After(steps), []
            env = Simulator(*LENGTHS, device=device)
            with Collector(
                env, weigh, frames_per_batch=40, total_frames=120, record=RECORD, interruptor=stopping
            ) as collector:
                while not collector.exhausted:
                    stopping.start_collection()
                    batches.append(collector.next().to("cpu"))
            return batches

        with place() as device:
            batches = stopped(device)
        assert_tagged(batches, LENGTHS, version=0)
        assert list(map(bits, batches)) == list(map(bits, stopped("cpu")))

    @places
    def test_the_frames_are_right(self, place):
        with place() as device:
            env = Simulator(*LENGTHS, device=device, more={"critic": FORMS["critic"]})
            options = {"max_frames_per_traj": 4, "masked_reset": True, "exclude_keys": ["critic"]}
            batches = [
                batch.to("cpu") for batch in collected_there(env, frames_per_batch=20, total_frames=204, **options)
            ]
        assert_tagged(batches, LENGTHS, limit=4)

    @every_place
    def test_a_key_of_the_observation_named_as_one_of_ours_that_is_not_recorded(self, place):
        more = {"step_count": FORMS["scalar"], "is_init": FORMS["number"]}
        with (
            place() as device,
            Collector(Simulator(2, 3, more=more, device=device), frames_per_batch=10) as collector,
        ):
            batch = collector.next().to("cpu")
        t = batch["policy"][..., 2]
        assert torch.equal(batch["step_count"], t / 7)
        assert torch.equal(batch["next", "step_count"], batch["next", "policy"][..., 2] / 7)
        assert torch.equal(batch["is_init"], (t + 1000 * batch["policy"][..., 0]).int())

    @places
    @pytest.mark.parametrize("name", FORMS)
    def test_every_dtype(self, place, name):
        options = {"simulator": {"more": {name: FORMS[name]}}}
        plain = run("cpu", **options)
        with place() as device:
            assert run(device, **options) == plain

    @places
    @pytest.mark.parametrize("name", TestActions.SPACES)
    def test_every_action_space(self, place, name):
        options = {"simulator": {"actions": TestActions.SPACES[name][0]}}
        plain = run("cpu", "random", **options)
        with place() as device:
            assert run(device, "random", **options) == plain

    @places
    @pytest.mark.parametrize("warmup", [{}, {"init_random_frames": 10}])
    @pytest.mark.parametrize("name", ["random", "masked"])
    def test_an_action_mask(self, place, name, warmup):
        allowed = {"action_mask": lambda lane, episode, t: torch.stack((t % 2 == 0, t % 2 == 1, t < 0), 1)}
        options = {
            "simulator": {"actions": spaces.Discrete(3), "more": allowed},
            **(warmup if name == "masked" else {}),
        }

        def batches(device):
            env = Simulator(*LENGTHS, device=device, **options["simulator"])
            policy = None if name == "random" else lambda action_mask: action_mask.long().argmax(-1)
            with Collector(env, policy, frames_per_batch=20, **(warmup if policy else {})) as collector:
                collector.set_seed(5)
                return [collector.next().to("cpu") for _ in range(3)]

        plain = batches("cpu")
        with place() as device:
            found = batches(device)
        assert list(map(bits, found)) == list(map(bits, plain))
        assert all(torch.equal(batch["action"], (batch["policy"][..., 2] % 2).long()) for batch in found)

    @places
    def test_batches_never_change(self, place):
        with place() as device:
            env = Simulator(*LENGTHS, device=device)
            with Collector(env, weigh, frames_per_batch=20, info_keys=["t"]) as collector:
                kept = [collector.next() for _ in range(4)]
                copies = [bits(batch.to("cpu", non_blocking=False).clone()) for batch in kept]
                for _ in range(4):
                    collector.next()
                for buffer in env.buffers.values():
                    buffer.fill_(1)
                assert [bits(batch.to("cpu").clone()) for batch in kept] == copies

    @places
    def test_one_tensordict_is_the_same_each_time(self, place):
        with place() as device:
            for storing in (None, "cpu"):
                with Collector(
                    Simulator(*LENGTHS, device=device),
                    weigh,
                    frames_per_batch=20,
                    return_same_td=True,
                    storing_device=storing,
                ) as collector:
                    first = collector.next()
                    assert collector.next() is first
                    assert (first["policy"][3, :, 2].to("cpu") == torch.arange(5.0) + 5).all()

    @places
    def test_the_probe(self, place):
        with place() as device:
            env = Probe(*LENGTHS[:3], device=device)
            with Collector(env, frames_per_batch=12, record=RECORD) as collector:
                batches = list(checked([collector.next().to("cpu") for _ in range(5)]))
        for lane, (frames, length) in enumerate(zip(lanes_of(batches), LENGTHS, strict=False)):
            expected = tags(lane, 20, length)
            assert torch.equal(frames["policy", "tag"], torch.from_numpy(expected["tag",][:, :3]).float())
            after = torch.from_numpy(expected["next", "tag"][:, :3]).float()
            assert torch.equal(frames["next", "policy", "tag"], after)

    @places
    def test_a_state_gives_the_remaining_frames(self, place):
        options = {"frames_per_batch": 20, "total_frames": 100, "record": RECORD}
        with place() as device:
            with Collector(Simulator(*LENGTHS, device=device), POLICIES["module"][0](), **options) as collector:
                batches = [collector.next().to("cpu") for _ in range(2)]
                state = collector.state_dict()
            assert all(value.device == CPU for value in tree_flatten(state)[0] if isinstance(value, Tensor))
            with Collector(Simulator(*LENGTHS, device=device), POLICIES["module"][0](), **options) as collector:
                collector.load_state_dict(state)
                batches += [batch.to("cpu") for batch in collector]
        assert count(batches) == 100

    @places
    def test_none_of_the_last_observations_is_an_error(self, place):
        with (
            place() as device,
            Collector(Simulator(None, 5, final=None, device=device), frames_per_batch=20) as collector,
            pytest.raises(EnvError, match=r"no \"final_obs\""),
        ):
            collector.next()

    @places
    def test_one_that_changes_other_lanes_is_found_out(self, place):
        with (
            place() as device,
            Collector(
                Simulator(None, 2, masks="shaken", device=device),
                frames_per_batch=20,
                max_frames_per_traj=4,
                masked_reset=True,
            ) as collector,
            pytest.raises(EnvError, match="changed 'policy' of lane 1"),
        ):
            collector.next()

    @places
    def test_a_policy_whose_output_changes_its_shape_is_refused_by_name(self, place):
        calls = iter(range(-1, 100))

        def policy(policy):
            values = weigh(policy)
            return {"action": values, "value": values[..., 0] if next(calls) < 2 else values}

        with (
            place() as device,
            Collector(Simulator(*LENGTHS, device=device), policy, frames_per_batch=20) as collector,
            pytest.raises(PolicyError, match="'value' had shape"),
        ):
            collector.next()

    @places
    @pytest.mark.parametrize("how", ["tensor", "array"])
    def test_a_policy_that_brings_its_outputs_to_the_host_itself(self, place, how):
        def policy(policy):
            action = weigh(policy).cpu()
            return {"action": action if how == "tensor" else action.numpy(), "flag": policy[..., 0] > 0}

        def batches(device):
            with Collector(Simulator(*LENGTHS, device=device), policy, frames_per_batch=20) as collector:
                return [bits(collector.next().to("cpu")) for _ in range(3)]

        plain = batches("cpu")
        with place() as device:
            assert batches(device) == plain

    @places
    def test_a_policy_that_raises_is_told_with_its_step(self, place):
        calls = iter(range(-1, 100))

        def policy(policy):
            if next(calls) == 3:
                raise ZeroDivisionError("mine")
            return weigh(policy)

        with (
            place() as device,
            Collector(Simulator(*LENGTHS, device=device), policy, frames_per_batch=20) as collector,
            pytest.raises(ZeroDivisionError, match="mine") as raised,
        ):
            collector.next()
        assert raised.value.__cause__.step == 3

    @places
    def test_a_policy_that_changes_what_it_is_shown_is_refused(self, place):
        calls = iter(range(-1, 100))

        def policy(policy):
            if next(calls) == 2:
                policy[0] = 7
            return weigh(policy)

        with place() as device, Collector(Simulator(*LENGTHS, device=device), policy, frames_per_batch=20) as collector:
            try:
                batch = collector.next().to("cpu")
            except PolicyError:
                return
        assert (batch["policy"][0, :, 0] == 0).all()

    @places
    def test_actions_out_of_range_are_found_out_if_asked(self, place):
        env = functools.partial(Simulator, *LENGTHS, actions=spaces.Discrete(3))
        with (
            place() as device,
            Collector(
                env(device=device), lambda policy: policy[..., 2].long(), frames_per_batch=20, check_actions=True
            ) as collector,
            pytest.raises(PolicyError, match=r"lane 2: 'action' is 3, not in Discrete\(3\)"),
        ):
            collector.next()

    @places
    def test_a_stochastic_policy_is_reproducible(self, place):
        def batches(seed, device):
            torch.manual_seed(0)
            logits = TensorDictModule(nn.Linear(4, 3), ["policy"], ["logits"])
            draw = ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
            )
            policy = ProbabilisticTensorDictSequential(logits, draw)
            env = Simulator(*LENGTHS, device=device, actions=spaces.Discrete(3))
            with Collector(env, policy, frames_per_batch=20, policy_device=device, init_random_frames=9) as collector:
                collector.set_seed(seed)
                return [bits(collector.next().to("cpu")) for _ in range(3)]

        with place() as device:
            one = batches(3, device)
            assert one == batches(3, device)
            assert one != batches(4, device)

    @places
    def test_new_weights_reach_the_device(self, place):
        weights = Weights()
        policy = TensorDictModule(weights, ["policy"], ["action", "value"])
        with (
            place() as device,
            Collector(
                Simulator(None, None, device=device), policy, frames_per_batch=4, policy_device=device
            ) as collector,
        ):
            for version, value in enumerate((0.5, 2.0, -1.0)):
                weights.become(value)
                if version:
                    assert collector.update_policy_weights_() == version
                batch = collector.next().to("cpu")
                if version:
                    assert torch.equal(batch["action"], batch["policy"][..., 1:3] * value + torch.tensor([1.0, 2.0]))
                    assert (batch["collector", "policy_version"] == version).all()

    @places
    def test_a_layer_of_torch(self, place):
        torch.manual_seed(0)
        core = RecurrentModule(nn.GRU(4, 3), in_key="policy")
        head = TensorDictModule(lambda features: features[..., :2], ["features"], ["action"])
        with place() as device:
            env = Simulator(*LENGTHS, device=device)
            with Collector(
                env, TensorDictSequential(core, head), frames_per_batch=40, policy_device=device, record=RECORD
            ) as collector:
                batch = collector.next().to("cpu")
        first = batch["is_init"][..., 0]
        assert not batch["hidden"][first].any()
        again = core.module(batch["policy"].reshape(-1, 4), batch["hidden"].reshape(40, *batch["hidden"].shape[2:]))
        torch.testing.assert_close(
            batch["next", "hidden"].reshape(again[1].shape), again[1].detach(), atol=1e-4, rtol=1e-4
        )


def collected_there(env: Any, policy: Any = None, **options: Any) -> Iterator[TensorDictBase]:
    with Collector(env, policy, record=RECORD, **options) as collector:
        yield from collector


class Probe(TensorTagged):
    """The probe, made of numbers as this device has it."""

    def __init__(self, *lengths: int, device: Any) -> None:
        super().__init__(lengths, nested=True)
        self.device = torch.device(device)
        for name in ("_lengths", "_episodes", "_t"):
            setattr(self, name, getattr(self, name).to(self.device))


class TestWhatThePretendedDeviceRefuses:
    """And a real one would."""

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED])
    def test_other_modes_are_refused_by_name(self, behaves):
        with pretended() as device, pytest.raises(EnvError, match="only SAME_STEP is supported"):
            Collector(Simulator(2, 3, behaves=behaves, device=device), frames_per_batch=20)

    def test_observations_on_two_devices_are_refused_by_name(self):
        more = {"here": lambda lane, episode, t: torch.zeros(2, 1)}
        with pretended() as device, pytest.raises(EnvError, match=r"'here' is on cpu, not meta"):
            Collector(Simulator(2, 3, device=device, more=more), frames_per_batch=20)

    def test_an_env_device_that_it_is_not_on(self):
        with pretended() as device:
            with pytest.raises(OptionError, match=r"env_device='cpu'.*make their frames on meta"):
                Collector(Simulator(2, 3, device=device), frames_per_batch=20, env_device="cpu")
            with Collector(Simulator(2, 3, device=device), frames_per_batch=20, env_device=device) as collector:
                collector.next()
        with pytest.raises(OptionError, match=r"env_device='meta'.*make their frames on cpu"):
            Collector(Simulator(2, 3), frames_per_batch=20, env_device="meta")

    def test_reset_masks_are_on_the_device(self):
        """Looked at by the simulator."""
        with pretended() as device:
            env = Simulator(2, None, device=device)
            with Collector(env, frames_per_batch=20, masked_reset=True, max_frames_per_traj=3) as collector:
                collector.next()
                collector.reset([1])
            assert any("reset_mask" in (options or {}) for options in env.options)


# --- where the policy computes, and where batches go ------------------------------------------------------------------

STORING = [None, "cpu", "there"]


def placed(place: Any, name: str, policy_place: str, storing: str | None, **options: Any) -> tuple[Any, Any]:
    """The same collection on the host, and with its parts somewhere else."""
    plain = run("cpu", name, **options)
    with place() as device:
        where = {"policy_device": {"here": "cpu", "there": device}[policy_place]}
        if storing is not None:
            where["storing_device"] = device if storing == "there" else storing
        return plain, run(device, name, **where, **options)


@pytest.mark.parametrize(
    ("policy_place", "storing"),
    [
        *(("here", None), ("here", "there"), ("there", "cpu"), ("there", "there")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("here", "cpu"), ("there", None))),
    ],
)
@places
class TestPlaces:
    """Environments there; the policy there or on the host; batches anywhere."""

    @policies
    def test_the_values_are_those_of_the_host(self, place, name, policy_place, storing):
        plain, found = placed(place, name, policy_place, storing)
        assert found == plain

    @pytest.mark.parametrize("name", ["module", "recurrent", "counting", "is_init"])
    @pytest.mark.parametrize("option", ["a warm-up, unevenly", "both and a warm-up", "one TensorDict, short at last"])
    @pytest.mark.slow
    def test_with_other_options(self, place, name, policy_place, storing, option):
        plain, found = placed(place, name, policy_place, storing, **OPTIONS[option])
        assert found == plain


@places
class TestAHostWithItsPolicyElsewhere:
    """A simulator on the host: its memory is the host's, whatever the policy's is."""

    @policies
    @pytest.mark.parametrize("storing", STORING)
    def test_the_values_are_those_of_the_host(self, place, name, storing):
        plain = run("cpu", name)
        with place() as device:
            where = {} if storing is None else {"storing_device": device if storing == "there" else storing}
            assert run("cpu", name, policy_device=device, **where) == plain


@pytest.mark.cuda
@needs_cuda
class TestOnCuda:
    """What only a real device can tell."""

    def test_the_memory_of_a_rollout_is_made_there(self):
        env = Simulator(
            *[None] * 256, device="cuda", more={"wide": lambda lane, e, t: t[:, None].expand(-1, 1024).float()}
        )
        with Collector(env, weigh, frames_per_batch=256 * 16) as collector:
            collector.next()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            batch = collector.next()
            peak = torch.cuda.max_memory_allocated() - before
        size = sum(value.numel() * value.element_size() for value in batch.values(True, True))
        assert peak < 1.5 * size

    def test_the_other_modes_are_refused_by_name(self):
        for behaves in (NEXT_STEP, DISABLED):
            with pytest.raises(EnvError, match="only SAME_STEP is supported"):
                Collector(Simulator(2, 3, behaves=behaves, device="cuda"), frames_per_batch=20)

    def test_memory_is_flat(self):
        with Collector(Simulator(*[5] * 64, device="cuda"), weigh, frames_per_batch=64 * 32) as collector:
            for _ in range(3):
                collector.next()
            before = torch.cuda.memory_allocated()
            for _ in range(20):
                collector.next()
            assert torch.cuda.memory_allocated() <= before

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_policy_that_is_recorded(self):
        policy = TensorDictModule(Weights().cuda(), ["policy"], ["action", "value"])
        plain = run("cpu", "module")
        env = Simulator(*LENGTHS, device="cuda")
        with Collector(env, policy, frames_per_batch=20, record=RECORD, cudagraph_policy=True) as collector:
            collector.set_seed(5)
            assert [bits(collector.next().to("cpu")) for _ in range(4)] == plain

    @pytest.mark.parametrize("compute", ["cuda", "cpu"])
    def test_many_lanes(self, compute):
        lengths = [lane % 13 + 1 for lane in range(256)]
        with Collector(
            Simulator(*lengths, device="cuda"), frames_per_batch=256 * 40, record=RECORD, policy_device=compute
        ) as collector:
            assert_tagged(list(checked([collector.next().to("cpu") for _ in range(2)])), lengths)


# --- the contract -----------------------------------------------------------------------------------------------------


class Contract(CollectionContract):
    ends_within = 40

    def act(self, tensordict: TensorDictBase, example: Any) -> None:
        """On whatever device it is shown."""
        device = next(iter(tensordict.values(True, True))).device
        tensordict[self.action_key] = example.expand(*tensordict.batch_size, *example.shape).clone().to(device)


class TestContractOfTheProbe(Contract):
    resets_lanes = False

    def make(self) -> VectorEnv:
        return TensorTagged((1, 3, 7))


class TestContractOfTheProbeByMasks(Contract):
    resets_lanes = True
    options: ClassVar[Mapping[str, Any]] = {"masked_reset": True}

    def make(self) -> VectorEnv:
        return TensorTagged((1, 3, 7), nested=True)


class TestContractOfASimulatorByMasks(TestContractOfTheProbeByMasks):
    def make(self) -> Any:
        return Simulator(1, 3, 7)


class TestContractOfOneInAnotherMode(Contract):
    resets_lanes = False

    def make(self) -> Any:
        return Simulator(1, 3, 7, behaves=NEXT_STEP)


class TestContractOfOneThatIsDisabled(Contract):
    resets_lanes = True

    def make(self) -> Any:
        return Simulator(1, 3, 7, behaves=DISABLED)
