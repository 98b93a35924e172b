"""Environments with several agents: what a batch says of each agent is what a plain loop over one lane sees.

Nothing here needs PettingZoo: the Parallel API is a matter of names. Its own games are in `tests/interop`.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rlcollect import Collector
from rlcollect.envs.open import open_driver
from rlcollect.errors import EnvError, OptionError, PolicyError, SpaceError
from rlcollect.options import What, Where
from rlcollect.testing import Life, TaggedAgents, check_batch
from tests.collectors.helpers import ids, joined

FLAGS = ("done", "terminated", "truncated")

ONE = {"cat": Life(ends=3)}
TOGETHER = {"cat_0": Life(ends=4), "cat_1": Life(ends=4), "cat_2": Life(ends=4)}
DEATHS = {"cat_0": Life(ends=2), "cat_1": Life(ends=5, end="truncated"), "cat_2": Life(ends=1, end="both")}
JOINS = {"cat_0": Life(ends=3), "cat_1": Life(joins=2, ends=6, end="both"), "cat_2": Life(joins=1, ends=2)}
AT_ONCE = {"cat_0": Life(ends=2), "cat_1": Life(joins=2, ends=3)}  # one leaves as another joins
SHORT = {"cat_0": Life(ends=1), "cat_1": Life(ends=1, end="truncated")}
NEVER = {"cat_0": Life(ends=2), "cat_1": Life(ends=None)}
CASTS = {
    "one": ONE,
    "together": TOGETHER,
    "deaths": DEATHS,
    "joins": JOINS,
    "at once": AT_ONCE,
    "short": SHORT,
    "never": NEVER,
}


class Pack(TaggedAgents):
    """Wolves observe a row of their own form and act on a plane; sheep are as `TaggedAgents` has them."""

    def _observation_space_of(self, agent):
        if agent.startswith("wolf"):
            return spaces.Dict({"near": spaces.Box(0, np.inf, (2,), np.float64), "far": spaces.Discrete(100)})
        return super()._observation_space_of(agent)

    def _action_space_of(self, agent):
        if agent.startswith("wolf"):
            return spaces.Box(-1, 1, (2,), np.float32)
        return super()._action_space_of(agent)

    def _observe(self, agent):
        if agent.startswith("wolf"):
            return {
                "near": np.array([self.lane, self.resets - 1], np.float64),
                "far": 10 * self._number(agent) + self.t,
            }
        return super()._observe(agent)


PACK = {"wolf_0": Life(ends=2), "sheep_0": Life(ends=4), "wolf_1": Life(joins=1, ends=5), "sheep_1": Life(ends=1)}


# --- the plain loop ---------------------------------------------------------------------------------------------------


def leaves(space, value, key):
    """What a value of a space is stored as, by key: Dict spaces by their own keys."""
    if isinstance(space, spaces.Dict):
        return {k: v for name, part in space.items() for k, v in leaves(part, value[name], (*key, name)).items()}
    array = np.asarray(value)
    return {key: array.astype(np.float32) if array.dtype == np.float64 else array}


def observed(env, agent, value):
    space = env.observation_space(agent)
    return leaves(space, value, () if isinstance(space, spaces.Dict) else ("observation",))


def zeros(space):
    if isinstance(space, spaces.Dict):
        return {name: zeros(part) for name, part in space.items()}
    return np.zeros(space.shape, space.dtype)


class Stage:
    """What a plain loop over one environment knows of its agents.

    Args:
        env: a `TaggedAgents`.
        groups: agents by the name of their group.
    """

    def __init__(self, env, groups):
        self.env, self.groups = env, groups
        self.frames = defaultdict(list)
        self.shown, self.flags = {}, {}

    def begin(self):
        observations, infos = self.env.reset()
        for agent in self.env.possible_agents:
            self.shown[agent] = observed(self.env, agent, zeros(self.env.observation_space(agent)))
            if self.env.masked == "info":
                self.shown[agent]["action_mask",] = np.zeros(3, np.int8)
            self.flags[agent] = {"terminated": False, "truncated": False}
        self.show(observations, infos)

    def show(self, observations, infos):
        for agent, observation in observations.items():
            self.shown[agent] = observed(self.env, agent, observation)
            if self.env.masked == "info":
                self.shown[agent]["action_mask",] = infos[agent]["action_mask"]

    def put(self, *above):
        """What stands at the root, or below "next": of the agents."""
        for group, agents in self.groups.items():
            for key in self.shown[agents[0]]:
                self.frames[*above, group, *key].append(np.stack([self.shown[agent][key] for agent in agents]))
            self.frames[*above, group, "mask"].append([agent in self.env.agents for agent in agents])
            for name in ("terminated", "truncated"):
                self.frames[*above, group, name].append([[self.flags[agent][name]] for agent in agents])
            self.frames[*above, group, "done"].append([[any(self.flags[agent].values())] for agent in agents])

    def put_root(self, *above, terminated=False, truncated=False):
        for name, value in zip(FLAGS, (terminated or truncated, terminated, truncated), strict=True):
            self.frames[*above, name].append([value])


def plain_loop(env, groups, actions, steps, limit=None):
    """Steps one environment and writes down, frame by frame, what each agent saw and got: arrays `[T, ...]` by key.

    Args:
        env: a `TaggedAgents`.
        groups: agents by the name of their group.
        actions: of step t, as each agent is given them.
        steps: T.
        limit: frames after which an episode is truncated.
    """
    stage, count = Stage(env, groups), 0
    stage.begin()
    for t in range(steps):
        stage.put()
        stage.put_root()
        observations, rewards, terminations, truncations, infos = env.step({a: actions(t)[a] for a in env.agents})
        count += 1
        stage.show(observations, infos)
        for agent in terminations:
            stage.flags[agent] = {"terminated": terminations[agent], "truncated": truncations[agent]}
        over = not env.agents
        terminated, truncated = over and any(terminations.values()), over and any(truncations.values())
        if count == limit:
            over = truncated = True
            for agent in env.agents:
                stage.flags[agent]["truncated"] = True
        stage.put("next")
        stage.put_root("next", terminated=terminated, truncated=truncated)
        for group, agents in groups.items():
            stage.frames["next", group, "reward"].append([[rewards.get(agent, 0)] for agent in agents])
        if over:
            stage.begin()
            count = 0
    return {key: np.stack(values) for key, values in stage.frames.items()}


def given(batch, groups, lane, t):
    """What each agent did, as its environment is given it."""
    return {
        agent: batch[lane, t][group, "action"][place].numpy()
        for group, agents in groups.items()
        for place, agent in enumerate(agents)
    }


def assert_as_the_plain_loop(batch, envs, groups, limit=None):
    """Every key of a batch `[N, T]` but the actions and the collector's own."""
    for lane, env in enumerate(envs):
        actions = functools.partial(given, batch, groups, lane)
        expected = plain_loop(env, groups, actions, batch.shape[1], limit)
        came = {
            key if isinstance(key, tuple) else (key,): value[lane].numpy()
            for key, value in batch.items(include_nested=True, leaves_only=True)
        }
        own = {key for key in came if key[0] == "collector" or key[-1] in ("action", "step_count")}
        assert came.keys() - own == expected.keys()
        for key, values in expected.items():
            assert came[key].dtype == (np.float32 if key[-1] == "reward" else values.dtype), key
            assert np.array_equal(came[key], values), (key, lane)


def as_of_one(batch):
    """A batch as `check_batch` knows them: with a reward and an action of the lane."""
    groups = [name for name in batch["next"].keys() if ("next", name, "reward") in batch.keys(True)]  # noqa: SIM118
    batch = batch.copy()
    batch["next", "reward"] = sum(batch["next", name, "reward"].sum(-2) for name in groups)
    batch["action"] = batch[groups[0], "action"]
    return batch


def checked(batches):
    previous = None
    for batch in map(as_of_one, batches):
        check_batch(batch, previous=previous)
        previous = batch
    return batches


def collect(make, policy=None, *, lanes=2, steps=7, batches=3, seed=None, **options):
    """Some batches in one piece, `[N, T]` or `[T]`, and the environments they are of."""
    envs = []

    def maker():
        envs.append(make(lane=len(envs)))
        return envs[-1]

    frames = steps * (lanes or 1)
    with Collector(maker, policy, num_envs=lanes, frames_per_batch=frames, **options) as collector:
        if seed is not None:
            collector.set_seed(seed)
        batch = joined(checked([collector.next() for _ in range(batches)]))
    assert [env.closed for env in envs] == [1] * (lanes or 1)
    return batch, envs


def grouped(agents):
    return {"agents": list(agents)}


class TestAgainstAPlainLoop:
    @pytest.mark.parametrize("name", CASTS)
    @pytest.mark.parametrize("masked", [None, "observation", "info"])
    def test_every_key_of_every_frame(self, name, masked):
        lives = CASTS[name]
        make = functools.partial(TaggedAgents, lives, masked=masked)
        batch, _ = collect(make, lanes=3)
        assert_as_the_plain_loop(batch, [make(lane=lane) for lane in range(3)], grouped(lives))

    @pytest.mark.parametrize("name", CASTS)
    @pytest.mark.parametrize("limit", [1, 2, 3, 5])
    def test_with_a_limit(self, name, limit):
        make = functools.partial(TaggedAgents, CASTS[name])
        batch, _ = collect(make, lanes=2, max_frames_per_traj=limit)
        assert_as_the_plain_loop(batch, [make(lane=lane) for lane in range(2)], grouped(CASTS[name]), limit)

    @pytest.mark.parametrize("limit", [None, 3])
    def test_two_groups(self, limit):
        make = functools.partial(Pack, PACK)
        batch, _ = collect(make, lanes=2, max_frames_per_traj=limit)
        groups = {"wolf": ["wolf_0", "wolf_1"], "sheep": ["sheep_0", "sheep_1"]}
        assert_as_the_plain_loop(batch, [make(lane=lane) for lane in range(2)], groups, limit)

    @pytest.mark.parametrize("lives", [DEATHS, JOINS], ids=["deaths", "joins"])
    def test_a_single_lane(self, lives):
        """One environment: batches are `[T]`."""
        make = functools.partial(TaggedAgents, lives)
        batch, _ = collect(make, lanes=None)
        assert batch.shape == (21,)
        assert_as_the_plain_loop(batch[None], [make()], grouped(lives))

    def test_random_lengths_over_many_batches(self):
        """Lanes are out of step; nothing is shifted where batches meet."""
        lives = {f"cat_{number}": Life(ends=9, end=end) for number, end in enumerate(["terminated", "truncated"])}
        make = functools.partial(TaggedAgents, lives, random_ends=True)
        batch, envs = collect(make, lanes=4, steps=13, batches=12, seed=0)
        twins = [make(lane=lane) for lane in range(4)]
        for env, twin in zip(envs, twins, strict=True):
            twin.reset()
            twin.np_random = np.random.default_rng(env.seeds[0])  # the reset at construction, and then the seeded one
        assert_as_the_plain_loop(batch, twins, grouped(lives))
        assert batch["next", "done"].sum() > 40

    def test_rollouts_longer_than_the_views_that_are_made_at_once(self):
        lives = {"cat_0": Life(ends=300), "cat_1": Life(ends=7), "cat_2": Life(joins=255, ends=257)}
        make = functools.partial(TaggedAgents, lives)
        batch, _ = collect(make, lanes=2, steps=700, batches=2)
        assert_as_the_plain_loop(batch, [make(lane=lane) for lane in range(2)], grouped(lives))

    def test_reused_memory_holds_nothing_of_before(self):
        """Rewards of those who are gone are 0 also where the block was used before."""
        make = functools.partial(TaggedAgents, DEATHS)
        with Collector([make(0), make(1)], frames_per_batch=14) as collector:
            batches = [collector.next().clone() for _ in range(6)]  # each original goes, and its memory comes again
        assert_as_the_plain_loop(joined(batches), [make(0), make(1)], grouped(DEATHS))


class TestForms:
    def test_keys_shapes_and_dtypes(self):
        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), lanes=2, steps=5, batches=1)
        forms = {
            key: (tuple(value.shape), value.dtype)
            for key, value in batch.items(include_nested=True, leaves_only=True)
            if key[0] != "collector"
        }
        both = {("agents", name): ((2, 5, 3, 1), torch.bool) for name in FLAGS}
        both |= dict.fromkeys(FLAGS, ((2, 5, 1), torch.bool))
        both |= {("agents", "mask"): ((2, 5, 3), torch.bool), ("agents", "observation"): ((2, 5, 3, 4), torch.float32)}
        after = {("next", *((key,) if isinstance(key, str) else key)): form for key, form in both.items()}
        assert forms == {
            **both,
            **after,
            ("agents", "action"): ((2, 5, 3), torch.int64),
            ("next", "agents", "reward"): ((2, 5, 3, 1), torch.float32),
        }
        assert batch.names == [None, "time"]

    def test_a_group_of_their_own_for_agents_whose_spaces_differ(self):
        batch, _ = collect(functools.partial(Pack, PACK), batches=1)
        assert batch["wolf", "near"].shape == (2, 7, 2, 2)
        assert batch["wolf", "near"].dtype is torch.float32  # float64 in the space
        assert batch["wolf", "far"].shape == (2, 7, 2)
        assert batch["wolf", "action"].shape == (2, 7, 2, 2)
        assert batch["sheep", "action"].shape == (2, 7, 2)
        assert "agents" not in batch

    def test_double_precision_can_be_kept(self):
        batch, _ = collect(functools.partial(Pack, PACK), batches=1, obs_dtype="env")
        assert batch["wolf", "near"].dtype is torch.float64

    def test_agents_without_a_number_in_their_name_are_groups_by_themselves(self):
        class Two(TaggedAgents):
            def _action_space_of(self, agent):
                return spaces.Discrete(3 if agent == "fox" else 2)

        batch, _ = collect(functools.partial(Two, {"fox": Life(), "red_hen": Life()}), batches=1)
        assert {"fox", "red"} <= set(batch.keys())

    @pytest.mark.parametrize(
        ("space", "shape", "dtype"),
        [
            (spaces.Discrete(3, start=1), (), torch.int64),
            (spaces.MultiDiscrete([2, 3]), (2,), torch.int64),
            (spaces.MultiBinary(3), (3,), torch.int8),
            (spaces.Box(-1, 1, (2,), np.float64), (2,), torch.float32),
            (spaces.Box(0, 9, (2,), np.int32), (2,), torch.int32),
        ],
        ids=str,
    )
    def test_actions_come_in_the_form_of_their_space(self, space, shape, dtype):
        class Env(TaggedAgents):
            def _action_space_of(self, agent):
                return space

        batch, envs = collect(functools.partial(Env, DEATHS), lanes=2, check_actions=True)
        assert batch["agents", "action"].shape == (2, 21, 3, *shape)
        assert batch["agents", "action"].dtype is dtype
        for lane, env in enumerate(envs):
            assert len(env.received) == 21
            for t, actions in enumerate(env.received):
                for agent, action in actions.items():
                    assert space.contains(action)
                    stored = batch["agents", "action"][lane, t, env.possible_agents.index(agent)].numpy()
                    assert np.array_equal(stored, action.astype(stored.dtype))

    def test_actions_with_parts(self):
        class Env(TaggedAgents):
            def _action_space_of(self, agent):
                return spaces.Dict({"go": spaces.Discrete(3), "at": spaces.Box(-1, 1, (2,))})

        batch, envs = collect(functools.partial(Env, DEATHS), batches=1)
        assert batch["agents", "action", "go"].shape == (2, 7, 3)
        assert batch["agents", "action", "at"].shape == (2, 7, 3, 2)
        assert {*envs[0].received[0]["cat_1"]} == {"go", "at"}
        assert envs[0].received[0]["cat_1"]["go"] == batch["agents", "action", "go"][0, 0, 1]


class TestEnds:
    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_the_episode_ends_as_the_last_ones_do(self, end):
        lives = {"cat_0": Life(ends=1), "cat_1": Life(ends=3, end=end)}
        batch, _ = collect(functools.partial(TaggedAgents, lives), lanes=None, steps=6, batches=1)
        expected = {"terminated": end != "truncated", "truncated": end != "terminated", "done": True}
        for name, value in expected.items():
            assert batch["next", name].flatten().tolist() == [False, False, value] * 2
            assert batch["next", "agents", name][:, 1].flatten().tolist() == [False, False, value] * 2
        assert batch["next", "agents", "terminated"][:, 0].all()

    def test_both_flags_where_one_is_terminated_and_another_truncated(self):
        batch, _ = collect(functools.partial(TaggedAgents, SHORT), lanes=None, steps=3, batches=1)
        for name in FLAGS:
            assert batch["next", name].all()
        assert batch["next", "agents", "terminated"].squeeze(-1).tolist() == [[True, False]] * 3

    def test_ended_agents_that_stay(self):
        """An environment that never empties `agents`: the episode is over when all have ended."""

        class Staying(TaggedAgents):
            def step(self, actions):
                result = super().step(actions)
                self.agents = list(self.possible_agents)
                return result

        def make(lane=0):
            return Staying({"cat_0": Life(ends=1), "cat_1": Life(ends=3)}, lane)

        batch, envs = collect(make, steps=9, batches=1)
        assert batch["next", "done"].squeeze(-1).tolist() == [[False, False, True] * 3] * 2
        assert batch["agents", "mask"].all()
        assert envs[0].resets == 4

    def test_a_limit_marks_those_who_are_there(self):
        lives = {"cat_0": Life(ends=1), "cat_1": Life(ends=9), "cat_2": Life(joins=4)}
        batch, _ = collect(functools.partial(TaggedAgents, lives), lanes=None, steps=4, max_frames_per_traj=2)
        assert batch["next", "truncated"].flatten().tolist() == [False, True] * 6
        last = batch["next", "agents"][1::2]
        assert last["terminated"].squeeze(-1).tolist() == [[True, False, False]] * 6
        assert last["truncated"].squeeze(-1).tolist() == [[False, True, False]] * 6
        assert last["done"].squeeze(-1).tolist() == [[True, True, False]] * 6
        assert last["mask"].tolist() == [[False, True, False]] * 6

    def test_set_truncated_reaches_the_agents(self):
        batch, envs = collect(functools.partial(TaggedAgents, NEVER), lanes=2, steps=5, batches=1, set_truncated=True)
        assert batch["next", "truncated"].squeeze(-1).tolist() == [[False] * 4 + [True]] * 2
        assert batch["next", "agents", "truncated"][:, -1, 1].all()
        assert batch["next", "agents", "done"][:, -1, 1].all()
        assert not batch["next", "agents", "done"][:, :-1, 1].any()
        assert [env.resets for env in envs] == [1, 1]

    def test_ids_change_with_the_episode(self):
        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), lanes=2, steps=10, batches=1)
        assert ids(batch) == [[0] * 5 + [2] * 5, [1] * 5 + [3] * 5]

    def test_episode_returns_are_sums_over_agents(self):
        with Collector(TaggedAgents(DEATHS), frames_per_batch=10) as collector:
            collector.next()
            stats = collector.stats()
        assert stats.episodes == 2
        # cat_0: 0 + 1; cat_1: 10 a step and 0 + 1 + 2 + 3 + 4; cat_2: 20
        assert stats.episode_return.mean == 1 + 60 + 20
        assert stats.episode_length.mean == 5


class TestPolicies:
    @pytest.fixture
    def module(self):
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def greedy(self, module, batch):
        return module(batch["agents", "observation"]).argmax(-1)

    @pytest.mark.parametrize("lanes", [None, 1, 3])
    def test_a_chain_of_modules(self, module, lanes):
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(module, in_keys=[("agents", "observation")], out_keys=[("agents", "logits")]),
            ProbabilisticTensorDictModule(
                in_keys=[("agents", "logits")],
                out_keys=[("agents", "action")],
                distribution_class=torch.distributions.Categorical,
                return_log_prob=True,
                log_prob_key=("agents", "log_prob"),
            ),
        )
        batch, envs = collect(functools.partial(TaggedAgents, DEATHS), policy, lanes=lanes)
        lead = (21,) if lanes is None else (lanes, 21)
        assert batch["agents", "log_prob"].shape == (*lead, 3)
        logits = module(batch["agents", "observation"])
        torch.testing.assert_close(batch["agents", "logits"], logits)
        expected = torch.distributions.Categorical(logits=logits).log_prob(batch["agents", "action"])
        torch.testing.assert_close(batch["agents", "log_prob"], expected)
        whole = batch if lanes else batch[None]
        for lane, env in enumerate(envs):
            assert [actions["cat_1"] for actions in env.received] == whole["agents", "action"][lane, :, 1].tolist()

    @pytest.mark.parametrize("lanes", [None, 2])
    def test_a_function_of_the_observation(self, module, lanes):
        """One group, one tensor: it gets that, and returns the actions of all agents."""
        batch, _ = collect(
            functools.partial(TaggedAgents, DEATHS), lambda observation: module(observation).argmax(-1), lanes=lanes
        )
        assert torch.equal(batch["agents", "action"], self.greedy(module, batch))

    def test_a_module_of_the_observation(self, module):
        policy = nn.Sequential(module, _Argmax())
        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), policy)
        assert torch.equal(batch["agents", "action"], self.greedy(module, batch))

    @pytest.mark.parametrize(
        "written",
        [
            lambda action: {("agents", "action"): action, ("agents", "value"): action.float()},
            lambda action: {"agents": {"action": action, "value": action.float()}},
            lambda action: TensorDict({"agents": {"action": action, "value": action.float()}}, action.shape[:1]),
        ],
        ids=["flat", "nested", "TensorDict"],
    )
    def test_a_function_that_writes_more(self, module, written):
        batch, _ = collect(
            functools.partial(TaggedAgents, DEATHS), lambda observation: written(module(observation).argmax(-1))
        )
        assert torch.equal(batch["agents", "action"], self.greedy(module, batch))
        assert torch.equal(batch["agents", "value"], batch["agents", "action"].float())

    def test_a_function_of_a_tensordict_sees_who_acts_and_who_has_ended(self):
        shown = []

        def policy(td):
            shown.append(td["agents"].clone())
            return td.set(("agents", "action"), td["agents", "mask"].long())

        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), policy, lanes=2, steps=6, batches=2)
        for t, agents in enumerate(shown[1:]):  # the first is the probe's
            for key in ("observation", "mask", *FLAGS):
                assert torch.equal(agents[key], batch["agents", key][:, t])

    def test_masked_actions(self):
        """The policy is shown the masks, and chooses what they allow; the environment refuses anything else."""

        def policy(td):
            return td.set(("agents", "action"), td["agents", "action_mask"].argmax(-1))

        for masked in ("observation", "info"):
            batch, envs = collect(functools.partial(TaggedAgents, JOINS, masked=masked), policy)
            assert [len(env.received) for env in envs] == [21, 21]
            allowed = batch["agents", "action_mask"].gather(-1, batch["agents", "action"].unsqueeze(-1))
            assert allowed[batch["agents", "mask"]].all()

    @pytest.mark.parametrize("form", ["mapping", "nested", "tuple", "TensorDict", "chain"])
    def test_several_groups(self, form):
        def act(near, tag):
            wolf, sheep = near.tanh(), tag[..., 3].long() % 3
            if form == "tuple":
                return wolf, sheep
            if form == "mapping":
                return {("wolf", "action"): wolf, ("sheep", "action"): sheep}
            return {"wolf": {"action": wolf}, "sheep": {"action": sheep}}

        def of_tensordict(td):
            wolf, sheep = act(td["wolf", "near"], td["sheep", "observation"]).values()
            return td.update({"wolf": wolf, "sheep": sheep})

        policies = {
            "TensorDict": of_tensordict,
            "chain": TensorDictModule(
                lambda near, tag: (near.tanh(), tag[..., 3].long() % 3),
                in_keys=[("wolf", "near"), ("sheep", "observation")],
                out_keys=[("wolf", "action"), ("sheep", "action")],
            ),
        }
        policy = policies.get(form, lambda wolf, sheep: act(wolf["near"], sheep["observation"]))
        batch, envs = collect(functools.partial(Pack, PACK), policy)
        assert torch.equal(batch["wolf", "action"], batch["wolf", "near"].tanh())
        assert torch.equal(batch["sheep", "action"], batch["sheep", "observation"][..., 3].long() % 3)
        assert envs[0].received[1].keys() == {"wolf_0", "wolf_1", "sheep_0"}

    def test_recurrent_state_of_every_agent(self):
        policy = TensorDictModule(
            lambda observation, hidden: (observation[..., 3].long() % 3, hidden + 1),
            in_keys=[("agents", "observation"), ("agents", "hidden")],
            out_keys=[("agents", "action"), ("next", "agents", "hidden")],
        )
        initial = {("agents", "hidden"): torch.zeros(3, 2)}
        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), policy, initial_policy_state=initial)
        expected = torch.arange(21) % 5  # the episodes have five steps
        assert (batch["agents", "hidden"] == expected[None, :, None, None]).all()

    def test_versions(self):
        def policy(observation):
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

        with Collector(TaggedAgents(DEATHS), policy, frames_per_batch=5, init_random_frames=3) as collector:
            first = collector.next()
            collector.update_policy_weights_()
            second = collector.next()
        assert first["collector", "policy_version"].tolist() == [-1, -1, -1, 0, 0]
        assert second["collector", "policy_version"].tolist() == [1] * 5

    @pytest.mark.parametrize("masked", [None, "observation", "info"])
    def test_a_random_warm_up(self, masked):
        """It is shared unevenly; what else the policy writes is zero there, and its action is not."""

        def policy(td):
            action = td["agents", "action_mask"].argmax(-1) if masked else td["agents", "mask"].long()
            return td.update({"agents": {"action": action, "value": torch.ones(action.shape)}})

        make = functools.partial(TaggedAgents, JOINS, masked=masked)
        batch, _ = collect(make, policy, lanes=3, init_random_frames=13, check_actions=True)
        random = batch["collector", "policy_version"] == -1
        assert random.sum(-1).tolist() == [5, 4, 4]
        assert not batch["agents", "value"][random].any()
        assert batch["agents", "value"][~random].all()
        assert_as_the_plain_loop(
            batch.exclude(("agents", "value")), [make(lane=lane) for lane in range(3)], grouped(JOINS)
        )

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (lambda td: td.set("action", torch.zeros(2, 3)), ["nest", "('agents', 'action')"]),
            (lambda td: td.set(("agents", "actoin"), torch.zeros(2, 3)), ["('agents', 'actoin')", "meant"]),
            (lambda observation: torch.zeros(2, 3, 3), ["[2, 3]", "argmax"]),
            (lambda observation: torch.zeros(2, 3), ["Integers"]),
            (lambda observation: {"action": torch.zeros(2, 3).long()}, ["('agents', 'action')"]),
            (lambda observation: None, ["action tensor", "('agents', 'action')"]),
        ],
    )
    def test_what_is_no_action(self, policy, words):
        with pytest.raises(PolicyError) as caught:
            Collector(functools.partial(TaggedAgents, DEATHS), policy, num_envs=2, frames_per_batch=4)
        for word in words:
            assert word in str(caught.value)

    def test_what_is_no_action_of_several_groups(self):
        with pytest.raises(PolicyError, match=r"\('wolf', 'action'\), \('sheep', 'action'\)"):
            Collector(Pack(PACK), lambda wolf, sheep: torch.zeros(2), frames_per_batch=4)

    def test_an_action_out_of_range(self):
        def policy(observation):
            return torch.full(observation.shape[:-1], 7)

        with Collector(TaggedAgents(DEATHS), policy, frames_per_batch=4) as collector, pytest.raises(PolicyError):
            collector.next()

    def test_trusted_declarations(self, module):
        """The policy is not called at construction: shapes of actions are those of all agents."""
        calls = []

        def act(observation):
            calls.append(observation.shape)
            return module(observation).argmax(-1)

        policy = TensorDictModule(act, in_keys=[("agents", "observation")], out_keys=[("agents", "action")])
        with Collector([TaggedAgents(DEATHS)], policy, frames_per_batch=4, trust_policy=True) as collector:
            assert not calls
            assert torch.equal((batch := collector.next())["agents", "action"], self.greedy(module, batch))

    def test_a_log_probability_of_each_agent_is_not_guessed(self, module):
        """Its shape is not that of one action a lane: such a policy is called, trusted or not."""
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(module, in_keys=[("agents", "observation")], out_keys=[("agents", "_logits")]),
            ProbabilisticTensorDictModule(
                in_keys={"logits": ("agents", "_logits")},
                out_keys=[("agents", "action")],
                distribution_class=torch.distributions.Categorical,
                return_log_prob=True,
                log_prob_key=("agents", "log_prob"),
            ),
        )
        batch, _ = collect(functools.partial(TaggedAgents, DEATHS), policy, trust_policy=True)
        assert batch["agents", "log_prob"].shape == (2, 21, 3)


class _Argmax(nn.Module):
    def forward(self, scores):
        return scores.argmax(-1)


class TestRandomActions:
    @pytest.mark.parametrize("masked", ["observation", "info"])
    def test_they_respect_the_masks(self, masked):
        """The environment raises where they do not."""
        batch, envs = collect(functools.partial(TaggedAgents, JOINS, masked=masked), lanes=3, steps=30)
        assert sum(len(env.received) for env in envs) == batch.numel() == 270

    def test_they_are_any_that_are_allowed(self):
        class Two(TaggedAgents):
            def _mask(self, agent):
                return 1 - super()._mask(agent)

        batch, _ = collect(functools.partial(Two, DEATHS, masked="observation"), lanes=2, steps=40)
        acts, actions = batch["agents", "mask"], batch["agents", "action"]
        allowed = batch["agents", "action_mask"]
        chosen = nn.functional.one_hot(actions, 3)[acts]
        assert (chosen <= allowed[acts]).all()
        shares = chosen.float().mean(0)
        assert (shares > 0.2).all()

    def test_of_one_seed_they_are_the_same(self):
        make = functools.partial(TaggedAgents, DEATHS, masked="info")
        (one, _), (other, _), (third, _) = (collect(make, seed=seed, steps=40) for seed in (3, 3, 4))
        assert torch.equal(one["agents", "action"], other["agents", "action"])
        free = ~one["agents", "mask"]  # those who act have no choice
        assert not torch.equal(one["agents", "action"][free], third["agents", "action"][free])

    def test_drawn_directly(self):
        envs = [TaggedAgents(DEATHS, lane, masked="observation") for lane in range(2)]
        driver = open_driver(envs, What(frames_per_batch=1), Where())
        (actions,) = driver.draw(np.random.default_rng(0))
        assert actions.shape == (2, 3)
        assert actions.tolist() == [[0, 1, 2]] * 2

    def test_no_draw_of_their_own_without_masks(self):
        assert open_driver(TaggedAgents(DEATHS), What(frames_per_batch=1), Where()).draw is None

    def test_groups_without_masks_beside_those_that_have_them(self):
        class Mixed(Pack):
            def _observation_space_of(self, agent):
                space = super()._observation_space_of(agent)
                if agent.startswith("wolf"):
                    return space
                return spaces.Dict({"observation": space, "action_mask": spaces.Box(0, 1, (3,), np.int8)})

            def _observe(self, agent):
                seen = super()._observe(agent)
                if agent.startswith("wolf"):
                    return seen
                return {"observation": seen, "action_mask": np.array([0, 1, 0], np.int8)}

        batch, _ = collect(functools.partial(Mixed, PACK), lanes=2, steps=20)
        assert (batch["sheep", "action"][batch["sheep", "mask"]] == 1).all()
        wolves = batch["wolf", "action"]
        assert wolves.min() < -0.8
        assert wolves.max() > 0.8

    def test_an_agent_that_may_do_nothing(self):
        class Stuck(TaggedAgents):
            def _mask(self, agent):
                mask = super()._mask(agent)
                return np.zeros_like(mask) if self.lane == 1 and self.t == 2 else mask

        envs = [Stuck(NEVER, lane, masked="observation") for lane in range(3)]
        with (
            Collector(envs, frames_per_batch=15) as collector,
            pytest.raises(EnvError, match=r"lane 1: 'cat_1' is to act, .* allows nothing"),
        ):
            collector.next()

    def test_masks_of_actions_that_cannot_be_masked(self):
        class Plane(TaggedAgents):
            def _action_space_of(self, agent):
                return spaces.Box(-1, 1, (2,))

        with (
            Collector(Plane(NEVER, masked="observation"), frames_per_batch=3) as collector,
            pytest.raises(SpaceError, match="action_mask"),
        ):
            collector.next()


class TestResets:
    def test_seeds(self):
        make = functools.partial(TaggedAgents, DEATHS, random_ends=True)
        (one, envs), (other, _), (third, _) = (collect(make, seed=seed, steps=30) for seed in (3, 3, 4))
        assert torch.equal(one["next", "agents", "done"], other["next", "agents", "done"])
        assert not torch.equal(one["next", "agents", "done"], third["next", "agents", "done"])
        assert len({seed for env in envs for seed in env.seeds}) == 2

    def test_seeds_as_given(self):
        envs = [TaggedAgents(DEATHS, lane) for lane in range(2)]
        with Collector(envs, frames_per_batch=6) as collector:
            collector.set_seed([5, 7])
            collector.next()
        assert [env.seeds for env in envs] == [[5], [7]]

    def test_options_for_every_episode(self):
        with Collector(TaggedAgents(SHORT), frames_per_batch=3, reset_options={"level": 2}) as collector:
            collector.next()
            env = collector._worker.driver._games[0].source
        assert env.options == [{"level": 2}] * 4

    def test_options_by_lane_episode_and_the_last_infos(self):
        asked = []

        def options(lane, episode, infos):
            asked.append((lane, episode, {agent: info["t"] for agent, info in infos.items()}))
            return {"episode": episode}

        envs = [TaggedAgents(SHORT, lane) for lane in range(2)]
        with Collector(envs, frames_per_batch=4, reset_options=options) as collector:
            collector.next()
        assert [env.options for env in envs] == [[{"episode": n} for n in range(3)]] * 2
        assert asked[:3] == [(0, 0, {}), (1, 0, {}), (0, 1, {"cat_0": 1, "cat_1": 1})]

    def test_some_lanes_by_hand(self):
        envs = [TaggedAgents(JOINS, lane) for lane in range(3)]
        with Collector(envs, frames_per_batch=12) as collector:
            batches = [collector.next()]
            collector.reset([0, 2], seed=[1, 2], options={"x": 1})
            batches += [collector.next(), collector.next()]
        batch = joined(checked(batches))
        tags = batch["agents", "observation"]
        assert tags[0, 4, 0].tolist() == [0, 1, 0, 0]
        assert tags[1, 4, 0].tolist() == [1, 0, 0, 3]  # its first agent has left
        assert not tags[0, 4, 1:].any()  # and in lane 0 the others have not joined
        assert not batch["agents", "done"][0, 4].any()
        assert batch["agents", "mask"][0, 4].tolist() == [True, False, False]
        assert ids(batch)[0][3:5] == [0, 3]
        assert envs[0].options[-1] is None or envs[0].seeds == [1]
        assert {"x": 1} in envs[2].options

    def test_after_an_interrupted_rollout(self):
        """Nothing of what was under way is left over; those who have not joined show zeros again."""

        class Interrupted(TaggedAgents):
            def step(self, actions):
                if self.steps == 11:
                    self.steps += 1
                    signal.raise_signal(signal.SIGINT)
                return super().step(actions)

        env = Interrupted(JOINS)
        with Collector(env, frames_per_batch=10, info_keys="t") as collector:
            collector.next()
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batch = collector.next()
        assert batch["agents", "observation"][0].tolist() == [[0, 2, 0, 0], [0] * 4, [0] * 4]
        assert batch["agents", "mask"][0].tolist() == [True, False, False]
        assert not batch["agents", "done"][0].any()

    def test_at_each_batch(self):
        env = TaggedAgents(NEVER)
        with Collector(env, frames_per_batch=3, reset_at_each_iter=True) as collector:
            batch = joined(checked([collector.next() for _ in range(3)]))
        assert batch["agents", "observation"][:, 1, 3].tolist() == [0, 1, 2] * 3

    def test_a_state_that_is_saved(self):
        make = functools.partial(TaggedAgents, DEATHS, random_ends=True)

        def collector():
            return Collector([make(0), make(1)], frames_per_batch=40)

        with collector() as one, collector() as other:
            one.set_seed(1)
            one.next()
            state = one.state_dict()
            other.load_state_dict(state)
            one.load_state_dict(state)
            expected, came = one.next(), other.next()
        assert torch.equal(expected["next", "agents", "done"], came["next", "agents", "done"])
        assert torch.equal(expected["agents", "action"], came["agents", "action"])

    def test_a_state_of_the_environments_own(self):
        class Saving(TaggedAgents):
            def state_dict(self):
                return {"resets": self.resets}

            def load_state_dict(self, state):
                self.resets = state["resets"]

        with Collector(Saving(SHORT), frames_per_batch=3) as collector:
            collector.next()
            state = collector.state_dict()
        env = Saving(SHORT)
        with Collector(env, frames_per_batch=3) as collector:
            collector.load_state_dict(state)
            assert env.resets == 4

    def test_environments_that_were_passed_in_are_left_open(self):
        mine = TaggedAgents(SHORT)
        made = []

        def make():
            made.append(TaggedAgents(SHORT))
            return made[0]

        with Collector([mine, make], frames_per_batch=4) as collector:
            collector.next()
        assert (mine.closed, made[0].closed) == (0, 1)


class TestInfo:
    def test_entries_of_every_agent(self):
        batch, _ = collect(functools.partial(TaggedAgents, JOINS), lanes=1, steps=6, batches=1, info_keys="t")
        info = batch["next", "info", "t"]
        assert info.dtype is torch.int64
        assert info[0].tolist() == [[1, -1, 1], [2, 2, 2], [3, 3, -1], [-1, 4, -1], [-1, 5, -1], [-1, 6, -1]]

    def test_by_group(self):
        form = {"t": spaces.Box(0, 100, (), np.float32)}
        batch, _ = collect(functools.partial(Pack, PACK), lanes=1, steps=2, batches=1, info_keys=form)
        assert batch["next", "info", "wolf", "t"].nan_to_num(nan=-1)[0].tolist() == [[1, 1], [2, 2]]
        assert batch["next", "info", "sheep", "t"].nan_to_num(nan=-1)[0].tolist() == [[1, 1], [2, -1]]

    def test_one_that_never_comes(self):
        with (
            Collector(TaggedAgents(SHORT), frames_per_batch=3, info_keys="score") as collector,
            pytest.raises(EnvError, match="'score'"),
        ):
            collector.next()

    def test_one_of_another_form(self):
        class Odd(TaggedAgents):
            def _infos(self, agents):
                return {a: {"t": [1, 2] if self.t == 2 and a == "cat_1" else self.t} for a in agents}

        with (
            Collector(Odd(NEVER), frames_per_batch=5, info_keys="t") as collector,
            pytest.raises(EnvError, match="'cat_1': the info's 't'"),
        ):
            collector.next()


class TestState:
    def test_it_is_recorded(self):
        make = functools.partial(TaggedAgents, SHORT, has_state=True)
        batch, _ = collect(make, lanes=2, steps=4, batches=2)
        assert batch["state"][1].tolist() == [[1, episode, 0] for episode in range(8)]
        assert batch["next", "state"][1].tolist() == [[1, episode, 1] for episode in range(8)]

    def test_it_can_be_left_out_and_renamed(self):
        make = functools.partial(TaggedAgents, SHORT, has_state=True)
        asked = []

        class Dear(TaggedAgents):
            def state(self):
                asked.append(self.t)
                return super().state()

        batch, _ = collect(functools.partial(Dear, SHORT, has_state=True), exclude_keys=["state"])
        assert "state" not in batch
        assert not asked
        batch, _ = collect(make, rename_keys={"state": "world"})
        assert batch["world"].shape == (2, 21, 3)


class TestNames:
    def test_keys_can_be_left_out(self):
        batch, _ = collect(functools.partial(Pack, PACK), exclude_keys=[("wolf", "far")])
        assert ("wolf", "far") not in batch.keys(include_nested=True)
        assert ("wolf", "near") in batch.keys(include_nested=True)

    def test_a_mask_that_is_left_out_binds_nobody(self):
        class Free(TaggedAgents):
            def step(self, actions):
                masked, self.masked = self.masked, None
                result = super().step(actions)
                self.masked = masked
                return (*result[:4], self._infos(list(result[0])))

        batch, _ = collect(
            functools.partial(Free, NEVER, masked="info"), exclude_keys=[("agents", "action_mask")], steps=30
        )
        assert ("agents", "action_mask") not in batch.keys(include_nested=True)
        assert batch["agents", "action"].unique().tolist() == [0, 1, 2]

    @pytest.mark.parametrize("masked", ["observation", "info"])
    def test_what_agents_observe_can_be_renamed(self, masked):
        make = functools.partial(TaggedAgents, NEVER, masked=masked)
        renames = {("agents", "action_mask"): ("agents", "allowed")}

        def policy(td):
            return td.set(("agents", "action"), td["agents", "allowed"].argmax(-1))

        batch, _ = collect(make, policy, rename_keys=renames)
        assert batch["agents", "allowed"].shape == (2, 21, 2, 3)

    def test_a_group_can_be_renamed(self):
        batch, _ = collect(
            functools.partial(Pack, PACK), rename_keys={"wolf": "hunter", ("wolf", "far"): ("wolf", "x")}
        )
        assert batch["hunter", "x"].shape == (2, 21, 2)
        for key in (("hunter", "action"), ("hunter", "mask"), ("next", "hunter", "reward"), ("hunter", "done")):
            assert key in batch.keys(include_nested=True)
        assert "wolf" not in batch

    def test_a_single_tensor_that_was_renamed_is_still_the_observation(self):
        def policy(seen):
            return seen[..., 3].long() % 3

        batch, _ = collect(
            functools.partial(TaggedAgents, NEVER), policy, rename_keys={("agents", "observation"): ("agents", "tag")}
        )
        assert torch.equal(batch["agents", "action"], batch["agents", "tag"][..., 3].long() % 3)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"exclude_keys": ["observation"]}, ["exclude_keys", "('agents', 'observation')"]),
            ({"rename_keys": {("agents", "observatoin"): "x"}}, ["rename_keys", "Did you mean"]),
            ({"rename_keys": {("agents", "observation"): "x"}}, ["stays in their group", "('agents', ...)"]),
            ({"rename_keys": {"agents": ("a", "b")}}, ["'agents'", "one name"]),
        ],
        ids=str,
    )
    def test_refusals(self, options, words):
        with pytest.raises(OptionError) as caught:
            Collector(TaggedAgents(NEVER), frames_per_batch=2, **options)
        for word in words:
            assert word in str(caught.value)

    def test_names_of_ours(self):
        class Env(TaggedAgents):
            def _observation_space_of(self, agent):
                return spaces.Dict({"mask": super()._observation_space_of(agent)})

            def _observe(self, agent):
                return {"mask": super()._observe(agent)}

        with pytest.raises(SpaceError, match=r"name of ours.*\('agents', 'mask'\): \('agents', '\.\.\.'\)"):
            Collector(Env(NEVER), frames_per_batch=2)
        renames = {("agents", "mask"): ("agents", "seen")}
        with Collector(Env(NEVER), frames_per_batch=2, rename_keys=renames) as collector:
            assert collector.next()["agents", "seen"].shape == (2, 2, 4)

    def test_a_group_with_a_name_of_ours(self):
        lives = {"next_0": Life(), "wolf_0": Life()}
        with pytest.raises(SpaceError, match=r"'next'.*rename_keys=\{'next'"):
            Collector(Pack(lives), frames_per_batch=2)
        with Collector(Pack(lives), frames_per_batch=2, rename_keys={"next": "after"}) as collector:
            assert "after" in collector.next()


class TestErrors:
    def test_the_lane_that_raises(self):
        class Failing(TaggedAgents):
            def step(self, actions):
                if self.lane == 1 and self.t == 3:
                    raise ZeroDivisionError("as asked")
                return super().step(actions)

        envs = [Failing(NEVER, lane) for lane in range(3)]
        with Collector(envs, frames_per_batch=30) as collector, pytest.raises(ZeroDivisionError) as caught:
            collector.next()
        assert caught.value.__cause__.lane == 1
        assert caught.value.__cause__.step == 3

    @pytest.mark.parametrize("when", ["reset", "step", "end"])
    def test_an_observation_of_another_shape(self, when):
        """It is found at construction, in the first step, and at the end of an episode."""

        class Odd(TaggedAgents):
            def _observe(self, agent):
                bad = {"reset": self.t == 0, "step": self.t == 1, "end": self.t == 4}[when]
                return super()._observe(agent)[: 1 if bad and agent == "cat_1" else 4]

        with pytest.raises(EnvError, match=r"'cat_1': The observation .* shape \[4\]"):  # noqa: SIM117
            with Collector([Odd(TOGETHER, 0)], frames_per_batch=10) as collector:
                collector.next()

    def test_an_agent_that_gets_no_observation(self):
        class Silent(TaggedAgents):
            def _observations(self, agents):
                seen = super()._observations(agents)
                return {agent: value for agent, value in seen.items() if not (agent == "cat_1" and self.t == 1)}

        with (
            Collector([Silent(NEVER)], frames_per_batch=4) as collector,
            pytest.raises(EnvError, match=r"lane 0.*'cat_1' is in env\.agents, and step gave no observation"),
        ):
            collector.next()

    def test_the_last_observation_may_be_lacking(self):
        """Some environments give none to those who leave; they show their last one on."""

        class Short(TaggedAgents):
            def _observations(self, agents):
                return super()._observations([agent for agent in agents if agent in self.agents])

        batch, _ = collect(functools.partial(Short, DEATHS), lanes=1, steps=5, batches=1)
        assert batch["next", "agents", "observation"][0, :, 0, 3].tolist() == [1, 1, 1, 1, 1]

    def test_one_who_leaves_without_an_end(self):
        class Leaving(TaggedAgents):
            def step(self, actions):
                result = super().step(actions)
                self.agents = [agent for agent in self.agents if agent != "cat_1"]
                return result

        with (
            Collector([Leaving(TOGETHER)], frames_per_batch=4) as collector,
            pytest.raises(EnvError, match=r"'cat_1' has left env\.agents"),
        ):
            collector.next()

    def test_a_stranger(self):
        class Crowded(TaggedAgents):
            def step(self, actions):
                result = super().step(actions)
                self.agents = [*self.agents, "dog_0"]
                return result

        with (
            Collector([Crowded(TOGETHER)], frames_per_batch=4) as collector,
            pytest.raises(EnvError, match="'dog_0'; expected each of possible_agents"),
        ):
            collector.next()

    def test_nobody_after_a_reset(self):
        with pytest.raises(EnvError, match=r"nobody in env\.agents"):
            Collector(TaggedAgents({"cat_0": Life(joins=1)}), frames_per_batch=4)

    def test_a_reset_of_another_api(self):
        class Old(TaggedAgents):
            def reset(self, seed=None, options=None):
                return super().reset(seed, options)[0]

        with pytest.raises(EnvError, match="observations, infos"):
            Collector(Old(TOGETHER), frames_per_batch=4)

    @pytest.mark.parametrize("reward", [[1.0, 2.0], np.zeros(2)], ids=["list", "array"])
    def test_a_reward_that_is_no_number(self, reward):
        class Odd(TaggedAgents):
            def step(self, actions):
                observations, _, *rest = super().step(actions)
                return observations, dict.fromkeys(observations, reward), *rest

        with (
            Collector([Odd(TOGETHER)], frames_per_batch=4) as collector,
            pytest.raises(EnvError, match="'cat_0': the reward"),
        ):
            collector.next()

    def test_agents_of_a_group_that_differ(self):
        class Odd(Pack):
            def _action_space_of(self, agent):
                return spaces.Discrete(5) if agent == "sheep_1" else super()._action_space_of(agent)

        with pytest.raises(SpaceError, match=r"'sheep_1' differs from 'sheep_0'.*Discrete\(5\), and not Discrete\(3\)"):
            Collector(Odd(PACK), frames_per_batch=4)

    def test_lanes_that_differ(self):
        with pytest.raises(SpaceError, match=r"lane 1 differs from lane 0.*keys"):
            Collector([TaggedAgents(TOGETHER), TaggedAgents(DEATHS | {"cat_3": Life()})], frames_per_batch=4)
        with pytest.raises(SpaceError, match=r"lane 1 differs from lane 0: observation\['cat_0'\]"):
            Collector([TaggedAgents(TOGETHER), TaggedAgents(TOGETHER, masked="observation")], frames_per_batch=4)

    def test_lanes_of_another_kind(self):
        with pytest.raises(OptionError, match="one kind"):
            Collector([TaggedAgents(TOGETHER), gym.make("CartPole-v1")], frames_per_batch=4)

    def test_a_space_without_a_tensor_form(self):
        class Odd(TaggedAgents):
            def _observation_space_of(self, agent):
                return spaces.Text(4)

        with pytest.raises(SpaceError, match="no tensor form"):
            Collector(Odd(TOGETHER), frames_per_batch=4)

    def test_masks_that_stop_coming(self):
        class Odd(TaggedAgents):
            def _infos(self, agents):
                return {agent: {} if self.t == 2 else info for agent, info in super()._infos(agents).items()}

        def policy(td):
            return td.set(("agents", "action"), td["agents", "action_mask"].argmax(-1))

        with (
            Collector([Odd(TOGETHER, masked="info")], policy, frames_per_batch=4) as collector,
            pytest.raises(EnvError, match=r"'cat_0'.*action_mask"),
        ):
            collector.next()

    def test_the_aec_api_without_pettingzoo(self, monkeypatch):
        class Aec(TaggedAgents):
            def agent_iter(self):
                return iter(())

            def last(self):
                return None

        monkeypatch.setitem(sys.modules, "pettingzoo", None)
        monkeypatch.setitem(sys.modules, "pettingzoo.utils.conversions", None)
        with pytest.raises(OptionError, match="pip install pettingzoo"):
            Collector(Aec(TOGETHER), frames_per_batch=4)

    def test_what_lacks_possible_agents(self):
        class Lacking:
            def reset(self):
                return {}, {}

            def step(self, actions):
                return {}, {}, {}, {}, {}

            def observation_space(self, agent):
                return spaces.Discrete(2)

            action_space = observation_space

        with pytest.raises(OptionError, match="no possible_agents"):
            Collector(Lacking, frames_per_batch=4)
