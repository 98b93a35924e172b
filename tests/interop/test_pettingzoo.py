"""PettingZoo's own games: what a batch says is what PettingZoo's own loops say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from rlcollect import Collector
from rlcollect.errors import OptionError
from rlcollect.testing import Life, TaggedAgents
from tests.collectors.helpers import joined, same
from tests.envs.test_pettingzoo import JOINS, checked

WHY = "PettingZoo is not installed: `make interop` installs it, and runs these"
pettingzoo = pytest.importorskip("pettingzoo", reason=WHY)
conversions = pytest.importorskip("pettingzoo.utils.conversions", reason=WHY)

AGENTS = ["archer_0", "archer_1", "knight_0", "knight_1"]


def knights(**options):
    """Archers and knights of one form; zombies come fast, so that some die before the others."""
    return pettingzoo.make(
        "parallel", "butterfly/knights_archers_zombies-v11", spawn_delay=5, max_zombies=30, **options
    )


class TestKnightsArchersZombies:
    def test_against_pettingzoos_own_loop(self):
        """Frame by frame: deaths, the ends of episodes, and what is seen after them."""
        steps, seeds = 260, [0, 9]
        with Collector(knights, num_envs=2, frames_per_batch=2 * steps // 4, exclude_keys=["state"]) as collector:
            collector.set_seed(seeds)
            batch = joined(checked([collector.next() for _ in range(4)]))
        deaths = 0
        for lane, seed in enumerate(seeds):
            env, frames = knights(), batch[lane]
            observations, _ = env.reset(seed=seed)
            shown = dict(observations)
            for t in range(steps):
                frame = frames[t]
                assert np.array_equal(frame["agents", "observation"], self.stacked(shown))
                assert frame["agents", "mask"].tolist() == [agent in env.agents for agent in AGENTS]
                actions = dict(zip(AGENTS, frame["agents", "action"].numpy(), strict=True))
                observations, rewards, terminations, truncations, _ = env.step({a: actions[a] for a in env.agents})
                shown |= observations
                assert np.array_equal(frame["next", "agents", "observation"], self.stacked(shown))
                assert frame["next", "agents", "mask"].tolist() == [agent in env.agents for agent in AGENTS]
                paid = [[rewards.get(agent, 0) if agent in observations else 0] for agent in AGENTS]
                assert frame["next", "agents", "reward"].tolist() == paid
                for place, agent in enumerate(AGENTS):
                    if agent in terminations:
                        assert frame["next", "agents", "terminated"][place] == terminations[agent]
                        assert frame["next", "agents", "truncated"][place] == truncations[agent]
                    else:
                        assert frame["next", "agents", "done"][place]
                assert frame["next", "done"] == (not env.agents)
                deaths += bool(env.agents) and any(terminations.values())
                if not env.agents:
                    shown = dict(env.reset()[0])
            env.close()
        assert deaths
        assert batch["next", "done"].sum() >= 2

    def stacked(self, shown):
        return np.stack([shown[agent] for agent in AGENTS]).astype(np.float32)

    def test_its_own_limit(self):
        with Collector(
            knights, frames_per_batch=40, create_env_kwargs={"max_cycles": 20}, exclude_keys=["state"]
        ) as collector:
            batch = collector.next()
        assert batch["next", "truncated"].flatten().nonzero().flatten().tolist() == [19, 39]
        assert batch["next", "agents", "truncated"][[19, 39]].all()
        assert not batch["next", "terminated"].any()

    def test_the_state(self):
        env = knights()
        with Collector(env, frames_per_batch=30, obs_dtype="env") as collector:
            batch = collector.next()
            assert np.array_equal(batch["next", "state"][-1], env.state())
        assert torch.equal(batch["state"][1:], batch["next", "state"][:-1])
        env.close()

    def test_a_policy(self):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(47 * 5, 6))

        def policy(observation):
            return net(observation).argmax(-1)

        with Collector(knights, policy, num_envs=2, frames_per_batch=40, exclude_keys=["state"]) as collector:
            batch = collector.next()
        assert torch.equal(batch["agents", "action"], policy(batch["agents", "observation"]))


class TestTurns:
    """Games of the AEC API in which one plays after the other."""

    @pytest.mark.parametrize("game", ["classic/tictactoe-v3", "classic/connect_four-v3"])
    def test_against_pettingzoos_own_loop(self, game):
        """Random moves are legal, and lead where PettingZoo's loop says."""
        with Collector(lambda: pettingzoo.make("aec", game), frames_per_batch=60) as collector:
            batch = joined(checked([collector.next() for _ in range(2)]))
        env = pettingzoo.make("aec", game)
        t = 0
        while t + 45 < 120:  # whole games
            env.reset()
            paid, played = dict.fromkeys(env.possible_agents, 0.0), 0
            for agent in env.agent_iter():
                observation, reward, terminated, truncated, _ = env.last()
                paid[agent] += reward
                if terminated or truncated:
                    env.step(None)
                    continue
                place = env.possible_agents.index(agent)
                frame = batch["agents"][t + played]
                assert frame["mask"].tolist() == [other == place for other in range(2)]
                assert np.array_equal(frame["observation"][place], observation["observation"])
                assert np.array_equal(frame["action_mask"][place], observation["action_mask"])
                assert observation["action_mask"][frame["action"][place]]
                env.step(frame["action"][place].item())
                played += 1
            came = batch["next", "agents", "reward"][t : t + played].sum(0).flatten().tolist()
            assert came == list(paid.values())
            t += played
            assert batch["next", "done"][t - 1]
            assert not batch["next", "done"][t - played : t - 1].any()
        env.close()

    def test_a_masked_policy(self):
        def policy(td):
            scores = torch.rand(td["agents", "action_mask"].shape)
            return td.set(("agents", "action"), scores.masked_fill(td["agents", "action_mask"] == 0, -1).argmax(-1))

        with Collector(
            lambda: pettingzoo.make("aec", "classic/tictactoe-v3"), policy, num_envs=3, frames_per_batch=90
        ) as collector:
            batch = collector.next()
        assert (batch["agents", "mask"].sum(-1) == 1).all()
        assert not (batch["next", "agents", "reward"].sum(-2) != 0).any()  # no illegal move, which costs one player


class TestConversions:
    def test_an_aec_game_whose_players_act_at_once(self):
        with Collector(
            lambda: pettingzoo.make("aec", "classic/rps-v2", max_cycles=3), frames_per_batch=12, num_envs=2
        ) as collector:
            batch = collector.next()
        assert batch["agents", "observation"].shape == (2, 6, 2)
        assert batch["agents", "mask"].all()
        assert batch["next", "truncated"].squeeze(-1).tolist() == [[False, False, True] * 2] * 2
        seen, did = batch["next", "agents", "observation"], batch["agents", "action"]
        assert torch.equal(seen[:, ::3], did[:, ::3].flip(-1))  # each sees what the other did

    def test_a_parallel_game_as_an_aec_one(self):
        """It is unpacked again; the batches are the same."""

        def parallel(lane):
            return TaggedAgents(JOINS, lane)

        def aec(lane):
            return conversions.parallel_to_aec(parallel(lane))

        batches = []
        for make in (parallel, aec):
            torch.manual_seed(0)
            with Collector([make(0), make(1)], frames_per_batch=20) as collector:
                batches.append(collector.next())
        assert same(*batches)

    def test_agents_that_are_not_known_before(self):
        """Those who come to be as they are needed have no place in a tensor."""
        examples = pytest.importorskip("pettingzoo.test.example_envs.generated_agents_parallel_v0", reason=WHY)
        with pytest.raises(OptionError, match="no possible_agents"):
            Collector(examples.parallel_env, frames_per_batch=4)

    def test_wrappers_of_pettingzoo(self):
        lives = {"cat_0": Life(ends=2), "cat_1": Life(ends=3)}
        wrapped = pettingzoo.utils.wrappers.BaseParallelWrapper(TaggedAgents(lives))
        with Collector(wrapped, frames_per_batch=6) as collector:
            batch = collector.next()
        assert batch["next", "done"].flatten().tolist() == [False, False, True] * 2


class TestTorchRL:
    def test_a_network_for_several_agents(self):
        """`MultiAgentMLP` in a chain, as TorchRL's tutorials have it: it is called without a TensorDict."""
        rl = pytest.importorskip("torchrl.modules", reason=WHY)
        torch.manual_seed(0)
        net = rl.MultiAgentMLP(
            n_agent_inputs=4, n_agent_outputs=3, n_agents=len(JOINS), centralized=False, share_params=True
        )
        policy = rl.ProbabilisticActor(
            TensorDictModule(net, in_keys=[("agents", "observation")], out_keys=[("agents", "logits")]),
            in_keys=[("agents", "logits")],
            out_keys=[("agents", "action")],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key=("agents", "log_prob"),
        )
        with Collector([TaggedAgents(JOINS, 0), TaggedAgents(JOINS, 1)], policy, frames_per_batch=20) as collector:
            assert collector._worker.plan.path == "direct"
            (batch,) = checked([collector.next()])
        torch.testing.assert_close(batch["agents", "logits"], net(batch["agents", "observation"]))
        expected = torch.distributions.Categorical(logits=batch["agents", "logits"]).log_prob(batch["agents", "action"])
        torch.testing.assert_close(batch["agents", "log_prob"], expected)
