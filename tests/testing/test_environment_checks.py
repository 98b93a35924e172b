"""Every check of `check_env` finds the environment that breaks it, and that alone; clean ones break nothing."""

from __future__ import annotations

import functools
import random
import threading
from dataclasses import FrozenInstanceError
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import ClipReward

from rlcollect.errors import OptionError
from rlcollect.testing import Breaker, Counter, Echo, Finding, Report, Reuser, Tagged, check_env
from tests.naming import named

MODES = list(AutoresetMode)
STEPS = 100


def told(report):
    """What is not as it should be: name and level."""
    return {finding.name: finding.level for finding in report.findings if finding.level in ("warning", "broken")}


def check(make, **options):
    return check_env(make, **{"steps": STEPS, **options})


class Walk(gymnasium.Env):
    """Clean: a random walk of `length` steps, whose noise comes from the generator that `reset` seeds."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Discrete(3)
    length = 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.observe(), {}

    def step(self, action):
        if self.t >= self.length:
            raise ResetNeeded("the episode has ended")
        self.t += 1
        self.place += action - 1 + self.np_random.normal(0, 0.1, 2)
        return self.observe(), self.reward(), *self.flags(), self.inform()

    def observe(self):
        return self.place.astype(np.float32)

    def reward(self):
        return float(self.place.sum())

    def flags(self):
        return self.t == self.length, False

    def inform(self):
        return {}


def walk(**parts):
    """A `Walk` with some of its methods and attributes exchanged."""
    return type("Walk", (Walk,), parts)


class Actions(Walk):
    """Refuses actions that its mask forbids: each step, the one before."""

    def __init__(self, where="observation", n=3):
        self.where = where
        self.action_space = spaces.Discrete(n, start=5)
        self.forbidden = 5
        if where == "observation":
            mask = spaces.Box(0, 1, (n,), np.int8)
            self.observation_space = spaces.Dict(place=Walk.observation_space, action_mask=mask)

    @property
    def mask(self):
        return np.array([5 + i != self.forbidden for i in range(self.action_space.n)], np.int8)

    def observe(self):
        place = super().observe()
        return {"place": place, "action_mask": self.mask} if self.where == "observation" else place

    def inform(self):
        return {"action_mask": self.mask} if self.where == "info" else {}

    def reset(self, **kwargs):
        self.forbidden = 5
        observation, _ = super().reset(**kwargs)
        return observation, self.inform()

    def step(self, action):
        if action == self.forbidden:
            raise ValueError(f"{action} is forbidden")
        self.forbidden = action
        return super().step(1)


class TestCleanEnvironments:
    @pytest.mark.parametrize(
        "make",
        [
            "CartPole-v1",
            "Pendulum-v1",
            Walk,
            *[functools.partial(Counter, observation=kind) for kind in ("box", "scalar", "discrete", "dict", "tuple")],
            functools.partial(Counter, end="both"),
            functools.partial(Counter, end="truncated", dtype=np.uint8),
            functools.partial(Counter, length=1),
            Tagged,
            functools.partial(Tagged, random_length=True),
            Echo,
            functools.partial(Actions, "observation"),
            functools.partial(Actions, "info"),
            gymnasium.spec("CartPole-v1"),
        ],
        ids=str,
    )
    def test_single(self, make):
        report = check(make, steps=300)
        assert not told(report), report
        assert {finding.level for finding in report.findings} == {"ok"}, report

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize(
        ("kind", "env"),
        [(SyncVectorEnv, env) for env in (Counter, Tagged, Walk, functools.partial(Actions, "info"))]
        + [(AsyncVectorEnv, env) for env in (Tagged, Walk)],
        ids=str,
    )
    @pytest.mark.slow
    def test_vector(self, env, kind, mode):
        lanes = (
            [functools.partial(env, length=length) for length in (3, 4, 7)] if env in (Counter, Tagged) else [env] * 3
        )
        report = check(lambda: kind(lanes, autoreset_mode=mode))
        assert not told(report), report
        assert report["lanes"].level == report["masked resets"].level == report["autoreset mode"].level == "ok"
        assert report["final_obs"].level == ("ok" if mode is AutoresetMode.SAME_STEP else "skipped")
        assert mode.name in report["autoreset mode"].found

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize("kind", ["dict", "tuple", "discrete"])
    def test_vectors_of_nested_observations(self, kind, mode):
        env = functools.partial(Counter, 4, observation=kind)
        report = check(lambda: SyncVectorEnv([env] * 2, autoreset_mode=mode))
        assert not told(report), report
        assert report["lanes"].level == "ok"

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_a_vector_environment_of_ones_own(self, mode):
        report = check(functools.partial(Fleet, mode))
        assert not told(report), report
        assert report["lanes"].level == "skipped"

    def test_an_instance_is_left_open(self):
        env = Counter()
        report = check(env)
        assert not told(report), report
        assert env.closed == 0
        assert {finding.name for finding in report.findings if finding.level == "skipped"} == {"no seed", "maker"}

    def test_a_vector_instance(self):
        with_closing = SyncVectorEnv([Walk] * 2)
        report = check(with_closing)
        assert not told(report), report
        with_closing.reset()
        with_closing.close()

    def test_every_environment_made_is_closed(self):
        made = []

        def make():
            made.append(Counter())
            return made[-1]

        check(make)
        assert [env.closed for env in made] == [1] * len(made)

    def test_an_id_with_lanes_has_gymnasiums_vector_entry_point(self):
        report = check("CartPole-v1", num_envs=3)
        assert not report.broken, report
        assert "CartPoleVectorEnv" in report["lanes"].found
        assert report["masked resets"].level == "warning"  # it resets all lanes

    def test_keyword_arguments_reach_make_vec(self):
        options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "SameStep"}}
        report = check("CartPole-v1", num_envs=2, create_env_kwargs=options)
        assert not told(report), report
        assert "SAME_STEP" in report["autoreset mode"].found

    def test_a_maker_with_lanes(self):
        report = check(Counter, num_envs=2, create_env_kwargs={"length": 4})
        assert not told(report), report
        assert report["lanes"].level == "ok"
        assert "of 4 to 4 steps" in report["episodes"].found


class TestSpaces:
    @pytest.mark.parametrize(
        ("space", "level"),
        [
            (spaces.Text(3), "warning"),
            (spaces.Dict(reward=spaces.Discrete(3)), "warning"),
        ],
    )
    def test_observations_that_need_an_option(self, space, level):
        report = check(walk(observation_space=space, observe=lambda self: space.sample()))
        assert report["spaces"].level == level
        assert "exclude_keys" in report["spaces"].remedy
        assert report["observation form"].level == report["observation values"].level == "ok"

    def test_actions_without_a_tensor_form(self):
        env = walk(action_space=spaces.Text(3), step=lambda self, action: Walk.step(self, 0))
        assert told(check(env)) == {"spaces": "broken"}

    @pytest.mark.parametrize("name", ["observation_space", "action_space"])
    def test_what_is_no_space(self, name):
        report = check(walk(**{name: (2,)}))
        assert told(report) == {"spaces": "broken"}
        assert name.replace("_", " ") in report["spaces"].found
        assert name in report["spaces"].remedy
        assert report["same seed"].level == "skipped"

    def test_no_space(self):
        class Bare(gymnasium.Env):
            pass

        report = check(Bare)
        assert told(report) == {"spaces": "broken"}
        assert "AttributeError" in report["spaces"].found


def of_shape(shape, dtype=np.float32):
    return lambda self: np.zeros(shape, dtype)


NESTED = spaces.Dict(a=spaces.Box(0, 5, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))))
FITS = {"a": np.zeros(2, np.float32), "b": (1, np.zeros(2, np.int8))}


def nested(**parts):
    return walk(observation_space=NESTED, observe=lambda self: {**FITS, **parts})


class TestObservations:
    def test_nested_ones_that_fit(self):
        assert not told(check(nested()))

    @pytest.mark.parametrize(
        ("env", "level", "found"),
        [
            (walk(observe=of_shape(3)), "broken", "shape [2]"),
            (walk(observe=lambda self: None), "broken", "None"),
            (walk(observe=lambda self: np.zeros(2, "U3")), "broken", "dtype"),
            (walk(observe=lambda self: [[0.0], [0.0, 1.0]]), "broken", "array form"),
            (walk(observe=lambda self: self.place.copy()), "warning", "float64, where its space says float32"),
            (walk(observe=lambda self: [0.0, 0.0]), "warning", "of type list"),
            (walk(observation_space=spaces.Discrete(3), observe=lambda self: 0.5), "broken", "0.5"),
            (nested(c=0), "broken", "has the key 'c'"),
            (nested(b=(1,)), "broken", "observation['b'] should be a tuple of 2"),
            (nested(b=(1, np.zeros(3, np.int8))), "broken", "observation['b'][1] should have shape [2]"),
            (walk(observation_space=NESTED, observe=lambda self: {"b": FITS["b"]}), "broken", "lacks the key 'a'"),
            (walk(observation_space=NESTED, observe=lambda self: 3), "broken", "should be a dict"),
        ],
        ids=range(12),
    )
    def test_form(self, env, level, found):
        report = check(env)
        assert told(report) == {"observation form": level}
        assert found in report["observation form"].found
        assert report["observation form"].found.startswith("the first reset: ")

    @pytest.mark.parametrize(
        ("env", "level", "found"),
        [
            (walk(observe=lambda self: np.array([0, np.nan], np.float32)), "broken", "observation[1] is NaN"),
            (walk(observe=lambda self: np.array([0, 101], np.float32)), "broken", "[1] is 101.0, outside [-100.0, 100"),
            (walk(observation_space=spaces.Discrete(3, start=2), observe=lambda self: 1), "broken", "outside [2, 4]"),
            (nested(b=(3, FITS["b"][1])), "broken", "observation['b'][0] is 3, outside [0, 2]"),
            (nested(b=(1, np.full(2, 2, np.int8))), "broken", "observation['b'][1][0] is 2, outside [0, 1]"),
            (
                walk(
                    observation_space=spaces.Box(-np.inf, np.inf, (2,)),
                    observe=lambda self: np.full(2, np.inf, np.float32),
                ),
                "warning",
                "observation[0] is inf",
            ),
            (
                walk(
                    observation_space=spaces.MultiDiscrete([3, 4]),
                    observe=lambda self: np.array([2, 4]),
                ),
                "broken",
                "observation[1] is 4, outside [0, 3]",
            ),
        ],
        ids=range(7),
    )
    def test_values(self, env, level, found):
        report = check(env)
        assert told(report) == {"observation values": level}
        assert found in report["observation values"].found

    def test_where_it_happens_and_how_often(self):
        def observe(self):
            return np.full(2, 200 if self.t == 5 else 0, np.float32)

        report = check(walk(observe=observe), steps=70)
        assert report["observation values"].found.startswith("step 5: ")
        assert report["observation values"].found.endswith("(and 9 more)")


class TestWhatAStepReturns:
    @pytest.mark.parametrize(
        ("reward", "level", "found"),
        [
            (None, "broken", "no number"),
            ("1", "broken", "no number"),
            (np.nan, "broken", "nan"),
            (-np.inf, "broken", "inf"),
            (np.zeros(2), "broken", "one number is expected"),
            (np.zeros(1), "warning", "one number is expected"),
        ],
        ids=str,
    )
    def test_rewards(self, reward, level, found):
        report = check(walk(reward=lambda self: reward))
        assert told(report) == {"rewards": level}
        assert report["rewards"].found.startswith("step 1: ")
        assert found in report["rewards"].found

    @pytest.mark.parametrize("reward", [1, np.int64(1), np.float32(1), True, np.array(1.0)], ids=repr)
    def test_rewards_that_are_numbers(self, reward):
        assert not told(check(walk(reward=lambda self: reward)))

    @pytest.mark.parametrize(
        "flags",
        [
            lambda self: (int(self.t == self.length), False),
            lambda self: (False, np.array([self.t == self.length])),
            lambda self: (None, self.t == self.length),
            lambda self: (self.t == self.length, np.zeros(2, bool)),
        ],
        ids=range(4),
    )
    def test_flags(self, flags):
        report = check(walk(flags=flags))
        assert told(report) == {"flags": "broken"}

    def test_numpy_bools_are_bools(self):
        assert not told(check(walk(flags=lambda self: (np.bool_(self.t == self.length), False))))

    @pytest.mark.parametrize("info", [None, [], "no"], ids=str)
    def test_infos(self, info):
        report = check(walk(inform=lambda self: info))
        assert told(report) == {"infos": "broken"}

    @pytest.mark.parametrize(("result", "said"), [(0, "0 (int)"), ((0, {}, 0), "a tuple of 3")])
    def test_a_reset_of_other_length(self, result, said):
        report = check(walk(reset=lambda self, **_: result))
        assert told(report) == {"reset": "broken"}
        assert said in report["reset"].found
        assert report["step"].level == report["maker"].level == "skipped"

    def test_a_step_of_other_length(self):
        report = check(walk(step=lambda self, action: Walk.step(self, action)[:4]))
        assert told(report) == {"step": "broken"}
        assert "a tuple of 4" in report["step"].found


class TestWhatIsRaised:
    def test_in_a_step(self):
        report = check(functools.partial(Breaker, at=17))
        assert told(report) == {"step": "broken"}
        found = report["step"].found
        assert "RuntimeError: Breaker broke as told to: call 17 of step" in found
        assert "(breaker.py:" in found
        assert found.endswith("in _break), at step 17")
        assert report["time"].level == "skipped"
        assert report["rewards"].level == report["same seed"].level == "ok"  # until then
        assert "16 steps" in report["same seed"].found

    def test_in_a_reset(self):
        report = check(functools.partial(Breaker, where="reset", at=3))
        assert told(report) == {"reset": "broken"}
        assert report["reset"].found.endswith("at reset 3, after 10 steps")

    def test_in_the_constructor(self):
        report = check(functools.partial(Breaker, where="constructor"))
        assert told(report) == {"maker": "broken"}
        assert report["maker"].found.endswith("while it was made")

    def test_in_close(self):
        report = check(functools.partial(Breaker, where="close"))
        assert told(report) == {"close": "broken"}

    def test_in_a_step_and_then_in_close(self):
        class Twice(Breaker):
            def close(self):
                raise OSError("still open")

        assert told(check(functools.partial(Twice, at=3))) == {"step": "broken", "close": "broken"}

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
    def test_what_would_end_the_program(self, error):
        report = check(functools.partial(Breaker, exception=error))
        assert told(report) == {"step": "broken"}
        assert error.__name__ in report["step"].found

    def test_a_reset_that_takes_no_seed(self):
        report = check(walk(reset=lambda self: (0, {})))
        assert told(report) == {"reset": "broken"}
        assert "'seed'" in report["reset"].found
        assert "subject.py" not in report["reset"].found

    def test_in_a_vector_environment(self):
        report = check(lambda: SyncVectorEnv([functools.partial(Breaker, at=4)] * 2))
        assert told(report) == {"step": "broken"}
        assert report["step"].found.endswith("at step 4")

    @pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
    def test_in_a_process(self):
        report = check(lambda: AsyncVectorEnv([Counter, functools.partial(Breaker, at=4)]))
        assert told(report) == {"step": "broken"}
        assert "RuntimeError: Breaker broke as told to" in report["step"].found


class TestSeeds:
    @pytest.mark.parametrize(
        "draw",
        [lambda: np.random.default_rng().uniform(), lambda: random.Random().random(), np.random.random],
        ids=range(3),
    )
    def test_random_numbers_from_elsewhere(self, draw):
        report = check(walk(observe=lambda self: np.full(2, draw(), np.float32)))
        assert told(report) == {"same seed": "broken"}
        assert "observation at the first reset" in report["same seed"].found
        assert report["other seeds"].level == report["no seed"].level == "skipped"

    def test_what_differs_is_named(self):
        env = walk(reward=lambda self: random.random() if self.t == 3 else 0.0)
        assert "reward at step 3" in check(env)["same seed"].found

    def test_a_seed_that_is_not_passed_on(self):
        def reset(self, *, seed=None, options=None):
            return Walk.reset(self, seed=seed and 7)

        report = check(walk(reset=reset), seed=1)
        assert told(report) == {"other seeds": "warning"}

    def test_a_seed_of_its_own(self):
        def reset(self, *, seed=None, options=None):
            return Walk.reset(self, seed=7 if seed is None else seed)

        report = check(walk(reset=reset))
        assert told(report) == {"no seed": "warning"}
        assert "same episodes" in report["no seed"].found

    def test_nothing_random_is_fine_and_said(self):
        report = check(Counter)
        assert "nothing is random" in report["other seeds"].found
        assert "nothing is random" in report["no seed"].found

    def test_an_instance_that_remembers_earlier_episodes_is_warned_of(self):
        assert told(check(Tagged())) == {"same seed": "warning"}

    def test_one_seed_one_report(self):
        one, other = (check(Walk, seed=3).findings for _ in range(2))
        assert [f for f in one if f.name != "time"] == [f for f in other if f.name != "time"]


class TestReusedArrays:
    @pytest.mark.parametrize("kind", ["box", "scalar", "dict", "tuple"])
    def test_the_same_object(self, kind):
        report = check(functools.partial(Reuser, observation=kind))
        assert told(report) == {"reused arrays": "warning"}
        assert "of the first reset has changed" in report["reused arrays"].found
        assert "copies" in report["reused arrays"].remedy

    def test_a_ring_of_arrays(self):
        def observe(self):
            ring = self.__dict__.setdefault("ring", [np.zeros(2, np.float32) for _ in range(5)])
            ring.append(ring.pop(0))
            ring[-1][:] = self.place
            return ring[-1]

        assert told(check(walk(observe=observe))) == {"reused arrays": "warning"}

    def test_an_info(self):
        def inform(self):
            info = self.__dict__.setdefault("info", {})
            info["t"] = self.t
            return info

        report = check(walk(inform=inform))
        assert told(report) == {"reused arrays": "warning"}
        assert "info['t'] of step 1" in report["reused arrays"].found

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_a_vector_environment_that_does_not_copy(self, mode):
        report = check(lambda: SyncVectorEnv([Counter] * 2, autoreset_mode=mode, copy=False))
        assert told(report) == {"reused arrays": "warning"}

    def test_rewards_of_a_vector_environment(self):
        report = check(functools.partial(Fleet, flaw="rewards reused"))
        assert told(report) == {"reused arrays": "warning"}
        assert "reward of step" in report["reused arrays"].found


class TestEpisodes:
    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_lengths_and_ends(self, end):
        report = check(functools.partial(Counter, length=4, end=end), steps=40)
        assert report["episodes"].found == f"10 episodes of 4 to 4 steps, mean 4; ends: 10 {end}"

    def test_of_lanes(self):
        lanes = [functools.partial(Counter, length=length) for length in (2, 5)]
        report = check(lambda: SyncVectorEnv(lanes, autoreset_mode="SameStep"), steps=20)
        assert report["episodes"].found == "14 episodes of 2 to 5 steps, mean 2.857; ends: 14 terminated"
        report = check(lambda: SyncVectorEnv(lanes), steps=18)
        assert report["episodes"].found == "9 episodes of 2 to 5 steps, mean 3; ends: 9 terminated"

    def test_none_has_ended(self):
        report = check(functools.partial(Counter, length=None))
        assert not told(report)
        assert report["episodes"].level == report["step after the end"].level == "skipped"
        assert f"{STEPS} steps" in report["episodes"].found

    def test_first_ends_that_come_late_are_repeated(self):
        report = check(functools.partial(Counter, length=400), steps=1000)
        assert "464 steps" in report["same seed"].found

    def test_a_step_after_the_end(self):
        def step(self, action):
            self.t %= self.length
            return Walk.step(self, action)

        report = check(walk(step=step))
        assert told(report) == {"step after the end": "warning"}
        assert "ResetNeeded" in report["step after the end"].remedy

    def test_staying_ended_is_as_good_as_refusing(self):
        def flags(self):
            return self.t >= self.length, False

        class Lenient(walk(flags=flags)):
            def step(self, action):
                self.t = min(self.t, self.length - 1)
                return super().step(action)

        report = check(Lenient)
        assert not told(report)
        assert "stays ended" in report["step after the end"].found
        assert "ResetNeeded" in check(Walk)["step after the end"].found


class TestMaker:
    def test_that_returns_the_same_environment(self):
        env = Walk()
        report = check(lambda: env)
        assert told(report) == {"maker": "broken"}
        assert "the same environment twice" in report["maker"].found

    def test_that_cannot_be_pickled(self):
        lock = threading.Lock()
        report = check(lambda: Walk() if lock else None)
        assert told(report) == {"maker": "warning"}
        assert "cannot be pickled" in report["maker"].found

    def test_whose_copy_fails(self):
        class Once:
            def __init__(self):
                self.here = True

            def __call__(self):
                if not self.here:
                    raise FileNotFoundError("no such level")
                return Walk()

            def __getstate__(self):
                return {"here": False}

        report = check(Once())
        assert told(report) == {"maker": "warning"}
        assert "FileNotFoundError: no such level" in report["maker"].found

    def test_whose_copy_makes_something_else(self):
        class Other:
            space = spaces.Discrete(3)

            def __init__(self):
                self.space = Walk.observation_space

            def __call__(self):
                return walk(observation_space=self.space)()

            def __getstate__(self):
                return {"space": spaces.Discrete(3)}

        report = check(Other())
        assert told(report) == {"maker": "warning"}
        assert "other spaces" in report["maker"].found


class TestActionMasks:
    @pytest.mark.parametrize("where", ["observation", "info"])
    def test_one_that_allows_nothing(self, where):
        report = check(functools.partial(Actions, where, n=1))
        assert told(report) == {"action mask": "broken"}
        assert "allows no action" in report["action mask"].found

    def test_one_of_another_shape(self):
        report = check(walk(inform=lambda self: {"action_mask": np.ones(4, np.int8)}))
        assert told(report) == {"action mask": "broken"}
        assert "shape [3]" in report["action mask"].found

    @pytest.mark.parametrize("mask", [3, np.ones(2), np.ones((2, 4))], ids=str)
    def test_of_lanes_in_another_form(self, mask):
        class Odd(SyncVectorEnv):
            def step(self, actions):
                return *super().step(actions)[:4], {"action_mask": mask}

        assert told(check(lambda: Odd([Walk] * 2)))["action mask"] == "broken"

    def test_of_several_parts(self):
        class Parts(Walk):
            action_space = spaces.MultiDiscrete([2, 3])

            def inform(self):
                return {"action_mask": np.array([False, True, True, False, True])}

            def reset(self, **kwargs):
                return super().reset(**kwargs)[0], self.inform()

            def step(self, action):
                assert action[0] == 1
                assert action[1] != 1
                return super().step(0)

        assert not told(check(Parts))


class Fleet(VectorEnv):
    """A vector environment of its own: lane i observes (number of its episode, t), and ends after i + 2 steps.

    Episodes have random numbers. Clean, but for its flaw.
    """

    def __init__(self, mode=AutoresetMode.NEXT_STEP, *, declared=None, flaw=None, num_envs=3):
        self.num_envs = num_envs
        self.mode, self.flaw = mode, flaw
        self.metadata = {"autoreset_mode": declared or mode}
        self.single_observation_space = spaces.Box(0, 2, (2,), np.float32)
        self.single_action_space = spaces.Discrete(50)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.lengths = np.arange(num_envs) + 2
        self.rewards = np.zeros(num_envs)
        self.finals = np.zeros((num_envs, 2), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.names, self.t = np.zeros((2, self.num_envs), np.float32)
            mask = np.ones(self.num_envs, bool)
        elif self.flaw == "mask raises":
            raise TypeError("unknown option reset_mask")
        elif self.flaw == "mask does nothing":
            return self.observe(), {}
        elif self.flaw == "mask resets all":
            mask = np.ones(self.num_envs, bool)
        elif self.flaw == "mask moves others":
            self.t[~mask] += 0.001
            observation = self.observe()
            observation[~mask, 1] -= 0.001
            self.begin(mask)
            return np.where(mask[:, None], self.observe(), observation.round(2)), {}
        self.begin(mask)
        if self.flaw == "alike" and mask.all():
            self.names[:] = self.names[0]
        return self.observe(), {}

    def begin(self, lanes):
        self.names[lanes] = self.np_random.uniform(0, 1, lanes.sum()).round(2)
        self.t[lanes] = 0
        self.ended = np.where(lanes, False, getattr(self, "ended", lanes))

    def observe(self):
        return np.stack([self.names, self.t / 10], 1).astype(np.float32)

    def step(self, actions):
        pending = self.ended.copy()
        if self.mode is AutoresetMode.DISABLED and pending.any() and self.flaw != "goes on":
            raise ResetNeeded("an ended lane was not reset")
        reset = pending & (self.mode is AutoresetMode.NEXT_STEP)
        self.t += 1
        if reset.any():
            self.begin(reset)
        if self.flaw == "action counts":
            self.names[reset] = actions[reset] / 50
        self.ended = (self.t == self.lengths) & ~reset
        rewards = np.where(reset, 0.0, 1.0 + (actions == 0))
        if self.flaw == "reward of a reset":
            rewards[reset] = 1.0
        if self.flaw == "rewards reused":
            self.rewards[:] = rewards
            rewards = self.rewards
        flags = self.ended.copy()
        info = {}
        if self.mode is AutoresetMode.SAME_STEP and flags.any():
            info = self.final_info(flags)
            self.begin(flags)
        observation = self.observe()
        if self.flaw == "final is the observation" and flags.any():
            info["final_obs"] = observation.copy()
        if self.flaw == "shape of rewards":
            rewards = rewards[:, None]
        if self.flaw == "flags are floats":
            flags = flags.astype(float)
        if self.flaw == "shape of observations":
            observation = observation[:, :1]
        return observation, rewards, flags, np.zeros_like(flags), info

    def final_info(self, flags):
        self.finals[:] = self.observe()
        match self.flaw:
            case "no final_obs":
                return {}
            case "final_obs of another shape":
                return {"final_obs": self.observe()[:, 0]}
            case "final_obs of all but one":
                return {"final_obs": self.observe(), "_final_obs": flags & (np.arange(self.num_envs) != 1)}
            case "final_obs reused":
                return {"final_obs": self.finals}
            case "final_obs of no lane":
                return {"final_obs": self.observe()[:0]}
        return {"final_obs": self.observe(), "_final_obs": flags}


def fleet(flaw, mode=AutoresetMode.NEXT_STEP, **options):
    return check(functools.partial(Fleet, mode, flaw=flaw, **options))


class TestVectorData:
    @pytest.mark.parametrize(
        ("flaw", "name"),
        [
            ("shape of rewards", "rewards"),
            ("flags are floats", "flags"),
            ("shape of observations", "observation form"),
        ],
    )
    def test_what_is_returned(self, flaw, name):
        report = fleet(flaw)
        assert report[name].level == "broken", report
        assert set(told(report)) <= {name, "autoreset mode"}

    @pytest.mark.parametrize("name", ["observation_space", "action_space"])
    def test_spaces_that_are_no_batch(self, name):
        class Wrong(Fleet):
            def __init__(self):
                super().__init__()
                setattr(self, name, getattr(self, f"single_{name}"))

        report = check(Wrong)
        assert told(report) == {"spaces": "broken"}
        assert f"single_{name}" in report["spaces"].found

    def test_no_number_of_lanes(self):
        class Unnumbered(Fleet):
            def __init__(self):
                super().__init__()
                del self.num_envs

        report = check(Unnumbered)
        assert told(report) == {"spaces": "broken"}

    def test_lanes_that_all_begin_alike(self):
        report = fleet("alike")
        assert told(report) == {"lanes": "warning"}
        assert "same episode in every lane" in report["lanes"].found


class TestAutoresetMode:
    def test_none_declared_means_next_step(self):
        class Undeclared(Fleet):
            def __init__(self):
                super().__init__()
                self.metadata = {}

        report = check(Undeclared)
        assert told(report) == {"autoreset mode": "warning"}
        assert "NEXT_STEP" in report["autoreset mode"].found

    @pytest.mark.parametrize(("declared", "level"), [("NextStep", "warning"), ("next", "broken"), (True, "broken")])
    def test_declared_as_something_else(self, declared, level):
        assert told(fleet(None, declared=declared)) == {"autoreset mode": level}

    @pytest.mark.parametrize(
        ("flaw", "found"),
        [("reward of a reset", "reward 1.0 and no flag"), ("action counts", "is not ignored")],
    )
    def test_next_step(self, flaw, found):
        report = fleet(flaw)
        assert told(report) == {"autoreset mode": "broken"}
        assert found in report["autoreset mode"].found

    def test_next_step_that_is_same_step(self):
        report = fleet(None, AutoresetMode.SAME_STEP, declared=AutoresetMode.NEXT_STEP)
        assert report["autoreset mode"].level == "broken"
        assert "NEXT_STEP does not hold" in report["autoreset mode"].found

    def test_same_step_that_is_next_step(self):
        report = fleet(None, AutoresetMode.NEXT_STEP, declared=AutoresetMode.SAME_STEP)
        assert told(report) == {"final_obs": "broken"}
        assert "no final_obs" in report["final_obs"].found

    def test_disabled_that_is_same_step(self):
        report = fleet(None, AutoresetMode.SAME_STEP, declared=AutoresetMode.DISABLED)
        assert told(report)["autoreset mode"] == "broken"
        assert "final_obs" in report["autoreset mode"].found

    def test_disabled_that_is_next_step(self):
        report = fleet(None, AutoresetMode.NEXT_STEP, declared=AutoresetMode.DISABLED)
        assert told(report) == {"autoreset mode": "broken"}
        assert "reset of its own" in report["autoreset mode"].found

    def test_disabled_whose_ended_lanes_go_on(self):
        assert told(fleet("goes on", AutoresetMode.DISABLED)) == {"autoreset mode": "warning"}

    def test_a_reset_that_comes_twice(self):
        class Twice(SyncVectorEnv):
            def step(self, actions):
                pending = self._autoreset_envs.copy()
                for lane in np.flatnonzero(pending):
                    self.envs[lane].reset()
                return super().step(actions)

        report = check(lambda: Twice([Walk] * 2))
        assert told(report) == {"autoreset mode": "broken"}
        assert "the first observation of lane 0 is not what its environment gives alone" in str(report)


class TestFinalObservations:
    @pytest.mark.parametrize(
        ("flaw", "level", "found"),
        [
            ("no final_obs", "broken", "has no final_obs"),
            ("final_obs of all but one", "broken", "lane 1 at step 3: the episode ended and info has no final_obs"),
            ("final_obs of another shape", "broken", "should have shape [2]"),
            ("final_obs reused", "broken", "had changed"),
            ("final_obs of no lane", "broken", "lane 0 at step 2: the episode ended and info has no final_obs"),
            ("final is the observation", "warning", "equal to the observation"),
        ],
    )
    def test_flaws(self, flaw, level, found):
        report = fleet(flaw, AutoresetMode.SAME_STEP)
        assert report["final_obs"].level == level, report
        assert found in report["final_obs"].found
        assert set(told(report)) <= {"final_obs", "reused arrays"}

    @pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
    def test_of_environments_that_reuse_their_arrays(self, kind):
        report = check(lambda: kind([Reuser] * 2, autoreset_mode="SameStep"))
        assert report["final_obs"].level == "broken"
        assert set(told(report)) <= {"final_obs", "reused arrays"}

    def test_that_are_of_the_space_and_not_final(self):
        class Late(SyncVectorEnv):
            def step(self, actions):
                *rest, info = super().step(actions)
                for lane in np.flatnonzero(info.get("_final_obs", [])):
                    info["final_obs"][lane] = info["final_obs"][lane] - 1
                return *rest, info

        report = check(lambda: Late([Walk] * 2, autoreset_mode="SameStep"))
        assert told(report) == {"final_obs": "broken"}
        assert "is not what its environment gives alone" in report["final_obs"].found


class TestLanes:
    def test_that_share_something(self):
        class Sharing(Walk):
            steps = 0

            def reset(self, *, seed=None, options=None):
                if seed is not None:
                    Sharing.steps = 0
                return super().reset(seed=seed)

            def reward(self):
                Sharing.steps += 1
                return float(Sharing.steps)

        report = check(lambda: SyncVectorEnv([Sharing] * 2))
        assert told(report)["lanes"] == "broken"
        assert "reward" in report["lanes"].found

    def test_that_get_one_seed(self):
        class OneSeed(SyncVectorEnv):
            def reset(self, *, seed=None, options=None):
                return super().reset(seed=[seed] * self.num_envs, options=options)

        report = check(lambda: OneSeed([Walk] * 2))
        assert told(report) == {"lanes": "broken"}
        assert "lane 1" in report["lanes"].found

    def test_under_a_wrapper_there_is_nothing_to_compare_with(self):
        report = check(lambda: ClipReward(SyncVectorEnv([Walk] * 2), -1, 1))
        assert not told(report), report
        assert report["lanes"].level == "skipped"

    def test_that_do_not_repeat_are_not_compared(self):
        report = check(lambda: SyncVectorEnv([walk(reward=lambda self: random.random())] * 2))
        assert told(report) == {"same seed": "broken"}
        assert report["lanes"].level == "skipped"


class TestMaskedResets:
    FLAWS: ClassVar = {
        "mask raises": "not served: TypeError",
        "mask does nothing": "lane 0 was in the mask, and its observation stayed",
        "mask resets all": "lane 1 was not in the mask",
        "mask moves others": "lane 1 was not in the mask",
    }

    @pytest.mark.parametrize("flaw", FLAWS)
    def test_without_autoreset_they_must_work(self, flaw):
        report = check(functools.partial(Fleet, AutoresetMode.DISABLED, flaw=flaw))
        assert "broken" in told(report).values(), report

    @pytest.mark.parametrize("flaw", FLAWS)
    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
    def test_with_autoreset_it_is_a_warning(self, flaw, mode):
        class Longer(Fleet):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.lengths += 6

        report = check(functools.partial(Longer, mode, flaw=flaw))
        assert told(report) == {"masked resets": "warning"}
        assert self.FLAWS[flaw] in report["masked resets"].found

    def test_that_are_followed_by_another_reset(self):
        lanes = [functools.partial(Counter, length=length) for length in (3, 4)]
        report = check(lambda: AsyncVectorEnv(lanes, shared_memory=False))
        assert told(report) == {"masked resets": "warning"}
        assert "lane 0 is not what its environment gives alone" in report["masked resets"].found

    def test_one_lane_has_nothing_to_mask(self):
        assert check(Walk, num_envs=1)["masked resets"].level == "skipped"


JUNK = (None, 3, "text", [], {}, (), np.zeros(0), np.zeros((7, 7)), np.array([None, 1]), object(), float("nan"))


class TestWhateverComes:
    """A report comes of it: nothing is raised by the checks themselves."""

    @pytest.mark.parametrize("junk", JUNK, ids=named)
    @pytest.mark.parametrize("place", range(6))
    def test_from_one_environment(self, place, junk):
        class Odd(Walk):
            def reset(self, **kwargs):
                result = list(super().reset(**kwargs))
                if place == 5:
                    result[0] = junk
                return tuple(result)

            def step(self, action):
                result = list(super().step(action))
                if place < 5:
                    result[place] = junk
                return tuple(result)

        report = check(Odd, steps=40)
        fits = {1: 3, 4: {}}
        assert told(report) or place in (2, 3) or (place in fits and isinstance(junk, type(fits[place])))

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    @pytest.mark.parametrize("junk", JUNK, ids=named)
    @pytest.mark.parametrize("place", range(7))
    def test_from_lanes(self, place, junk, mode):
        class Odd(SyncVectorEnv):
            def reset(self, **kwargs):
                observation, info = super().reset(**kwargs)
                return junk if place == 5 else observation, info

            def step(self, actions):
                result = list(super().step(actions))
                if place == 6:
                    result[4] = {"final_obs": junk}
                elif place < 5:
                    result[place] = junk
                return tuple(result)

        assert check(lambda: Odd([functools.partial(Counter, 3)] * 2, autoreset_mode=mode), steps=40)

    @pytest.mark.parametrize("junk", JUNK, ids=named)
    def test_from_final_observations(self, junk):
        class Odd(SyncVectorEnv):
            def step(self, actions):
                *rest, info = super().step(actions)
                for lane in np.flatnonzero(info.get("_final_obs", [])):
                    info["final_obs"][lane] = junk
                return *rest, info

        env = functools.partial(Counter, 3, observation="dict")
        report = check(lambda: Odd([env] * 2, autoreset_mode="SameStep"), steps=40)
        assert told(report) == {"final_obs": "broken"}


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        "make", [3, None, dict, lambda: "env", [Counter]], ids=["a number", "None", "a class", "a lambda", "a list"]
    )
    def test_what_makes_no_environment(self, make):
        with pytest.raises(OptionError, match=r"gymnasium\.Env, a gymnasium\.vector\.VectorEnv"):
            check_env(make)

    @pytest.mark.parametrize("name", ["CartPol-v1", "no environment", "CartPole-v99", "Nope"])
    def test_an_id_that_nobody_registered(self, name):
        with pytest.raises(OptionError, match="There is no environment"):
            check_env(name)

    def test_a_name_without_version_is_the_newest(self):
        assert not check("CartPole", steps=10).broken

    @pytest.mark.parametrize("options", [{"steps": 0}, {"seconds": 0}, {"seed": -1}, {"num_envs": 0}], ids=str)
    def test_options_that_make_no_sense(self, options):
        with pytest.raises(OptionError, match=next(iter(options))):
            check_env(Counter, **options)

    @pytest.mark.parametrize("options", [{"num_envs": 2}, {"create_env_kwargs": {"length": 3}}], ids=str)
    def test_options_for_what_is_made_already(self, options):
        with pytest.raises(OptionError, match="is one already"):
            check_env(Counter(), **options)

    def test_lanes_of_vector_environments(self):
        with pytest.raises(OptionError, match="makes vector environments"):
            check_env(Fleet, num_envs=2)


class TestReport:
    def test_reads_like_a_list(self):
        report = Report("Mine", (Finding("a", "ok", "fine"), Finding("b", "broken", "gone", "Get it back.")))
        assert str(report) == "Mine\n  ok: a: fine\n  broken: b: gone -> Get it back."
        assert report.broken == (report["b"],)
        assert report.warnings == ()
        with pytest.raises(KeyError, match=r"'c'.*'a', 'b'"):
            report["c"]

    def test_cannot_be_changed(self):
        with pytest.raises(FrozenInstanceError):
            Finding("a", "ok", "fine").level = "broken"

    @pytest.mark.parametrize("make", [Reuser, functools.partial(Breaker, at=3), functools.partial(Fleet, flaw="alike")])
    def test_every_name_comes_once_and_every_fault_has_a_remedy(self, make):
        report = check(make)
        names = [finding.name for finding in report.findings]
        assert len(names) == len(set(names))
        assert all(finding.remedy for finding in (*report.broken, *report.warnings))

    def test_is_named_after_what_was_passed(self):
        assert check("CartPole-v1", steps=5).environment == "CartPole-v1"
        assert check(functools.partial(Counter, length=3), steps=5).environment == "Counter"
        assert check(Counter(), steps=5).environment == "Counter"

    def test_ends_after_the_seconds_it_is_given(self):
        report = check(Walk, seconds=1e-9)
        assert report["step"].found == "0 calls"
        assert not told(report)
