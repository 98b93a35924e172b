"""The probe with several agents does what it says, and refuses what a collector must not do."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from rlcollect.errors import OptionError
from rlcollect.testing import Life, TaggedAgents

LIVES = {"cat_0": Life(ends=2), "cat_1": Life(joins=1, ends=3, end="truncated"), "cat_2": Life(ends=4, end="both")}


def acting(env):
    return dict.fromkeys(env.agents, 0)


class TestTaggedAgents:
    def test_a_whole_episode(self):
        env = TaggedAgents(LIVES, lane=7)
        observations, infos = env.reset(seed=3)
        assert {agent: tag.tolist() for agent, tag in observations.items()} == {
            "cat_0": [7, 0, 0, 0],
            "cat_2": [7, 0, 2, 0],
        }
        assert infos == {"cat_0": {"t": 0}, "cat_2": {"t": 0}}
        told = []
        while env.agents:
            observations, rewards, terminations, truncations, infos = env.step(acting(env))
            assert observations.keys() == rewards.keys() == terminations.keys() == truncations.keys() == infos.keys()
            ends = {agent for agent in observations if terminations[agent] or truncations[agent]}
            assert not ends & {*env.agents}
            told.append((rewards, sorted(ends)))
        assert told == [
            ({"cat_0": 0, "cat_1": 0, "cat_2": 20}, []),
            ({"cat_0": 1, "cat_1": 11, "cat_2": 21}, ["cat_0"]),
            ({"cat_1": 12, "cat_2": 22}, ["cat_1"]),
            ({"cat_2": 23}, ["cat_2"]),
        ]
        assert (terminations, truncations) == ({"cat_2": True}, {"cat_2": True})
        assert (env.resets, env.steps, env.seeds) == (1, 4, [3])

    def test_spaces_hold_what_is_observed_and_are_the_same_objects_each_time(self):
        for masked in (None, "observation", "info"):
            env = TaggedAgents(LIVES, masked=masked)
            for agent, observation in env.reset()[0].items():
                assert env.observation_space(agent).contains(observation)
                assert env.observation_space(agent) is env.observation_space(agent)
                assert env.action_space(agent) is env.action_space(agent)

    @pytest.mark.parametrize("masked", ["observation", "info"])
    def test_masks(self, masked):
        env = TaggedAgents(LIVES, masked=masked)
        observations, infos = env.reset()
        masks = {a: (infos if masked == "info" else observations)[a]["action_mask"].tolist() for a in env.agents}
        assert masks == {"cat_0": [1, 0, 0], "cat_2": [0, 0, 1]}
        env.step({"cat_0": 0, "cat_2": 2})
        with pytest.raises(ValueError, match="cat_0 may not take the action 0 at t = 1"):
            env.step({"cat_0": 0, "cat_1": 2, "cat_2": 0})

    def test_random_ends_are_of_the_seed(self):
        lives = {f"cat_{number}": Life(ends=50) for number in range(3)}

        def lengths(seed):
            env = TaggedAgents(lives, random_ends=True)
            env.reset(seed=seed)
            while env.agents:
                env.step(acting(env))
            return env.t

        assert lengths(1) == lengths(1)
        assert len({lengths(seed) for seed in range(10)}) > 3

    def test_the_state(self):
        env = TaggedAgents(LIVES, lane=2, has_state=True)
        env.reset()
        env.step(acting(env))
        assert env.state().tolist() == [2, 0, 1]
        assert env.state_space.contains(env.state())
        assert not hasattr(TaggedAgents(LIVES), "state_space")

    def test_observations_are_not_reused(self):
        env = TaggedAgents(LIVES)
        first = env.reset()[0]["cat_0"]
        env.step(acting(env))
        assert np.array_equal(first, [0, 0, 0, 0])

    def test_refusals(self):
        env = TaggedAgents(LIVES)
        with pytest.raises(ResetNeeded, match="nobody is there"):
            env.step({})
        env.reset()
        with pytest.raises(ValueError, match=r"expected actions of \['cat_0', 'cat_2'\], got \['cat_0'\]"):
            env.step({"cat_0": 0})
        env.close()
        with pytest.raises(ClosedEnvironmentError):
            env.reset()
        with pytest.raises(ClosedEnvironmentError):
            env.step(acting(env))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Life(joins=-1),
            lambda: Life(joins=3, ends=3),
            lambda: Life(end="sudden"),
            lambda: TaggedAgents(LIVES, masked="here"),
        ],
    )
    def test_options(self, make):
        with pytest.raises(OptionError):
            make()
