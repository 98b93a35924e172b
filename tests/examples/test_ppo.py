"""The PPO example: its advantages against their definition, its parts on a corridor, short runs, and a solved task."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlcollect import Collector

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo.py"
SHORT = {"num_envs": 2, "frames_per_batch": 256, "total_frames": 640, "eval_episodes": 3}
RUNS = {
    "discrete": {"env_id": "CartPole-v1"},
    "continuous": {"env_id": "Pendulum-v1", "gamma": 0.9, "reward_scale": 0.1},
}


def load(path):
    """The example as a module: it lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


ppo = load(EXAMPLE)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the example sets it; on a machine that does other work two threads take up to fifty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Corridor(gym.Env):
    """Observes how many steps were made (-1 after a reset); pays 1, 10, 100, and ends there."""

    observation_space = spaces.Box(-1, 3, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, end="terminated"):
        self.end, self.t = end, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.float32([-1]), {}

    def step(self, action):
        self.t += 1
        ends = [self.t == 3 and self.end == end for end in ("terminated", "truncated")]
        return np.float32([self.t]), 10.0 ** (self.t - 1), *ends, {}


def parameters(policy):
    return [parameter.detach() for parameter in policy.parameters()]


def initial_policy(args, seed):
    torch.manual_seed(seed)
    return ppo.make_policy(ppo.make_env(args.env_id), args.hidden)


def advantages_by_definition(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Equation 16 of arXiv:1506.02438, each element by a sum of its own."""
    lanes, steps = reward.shape
    advantage = torch.zeros_like(reward)
    for lane in range(lanes):
        for t in range(steps):
            for k in range(t, steps):
                future = 0.0 if terminated[lane, k] else gamma * next_value[lane, k]
                error = reward[lane, k] + future - value[lane, k]
                advantage[lane, t] += (gamma * gae_lambda) ** (k - t) * error
                if done[lane, k]:
                    break
    return advantage


class TestGae:
    @given(
        seed=st.integers(0, 2**32),
        lanes=st.integers(1, 3),
        steps=st.integers(1, 12),
        often=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
        gamma=st.floats(0, 1),
        gae_lambda=st.floats(0, 1),
    )
    def test_it_is_the_definition(self, seed, lanes, steps, often, gamma, gae_lambda):
        draw = torch.Generator().manual_seed(seed)
        reward, value, next_value = torch.randn(3, lanes, steps, generator=draw, dtype=torch.float64)
        terminated, truncated = torch.rand(2, lanes, steps, generator=draw) < often
        case = (reward, value, next_value, terminated, terminated | truncated, gamma, gae_lambda)
        torch.testing.assert_close(ppo.gae(*case), advantages_by_definition(*case))

    def test_worked_out_by_hand(self):
        """Two episodes, ended in either way, and one that is open; gamma = lambda = 1/2."""
        reward = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
        value = torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])
        next_value = torch.tensor([[20.0, 1000.0, 40.0, 60.0, 70.0]])
        terminated = torch.tensor([[False, True, False, False, False]])
        truncated = torch.tensor([[False, False, False, True, False]])
        # 1 + 20/2 - 10 = 1;  2 - 20 = -18;  3 + 40/2 - 30 = -7;  4 + 60/2 - 40 = -6;  5 + 70/2 - 50 = -10
        expected = torch.tensor([[1 - 18 / 4, -18.0, -7 - 6 / 4, -6.0, -10.0]])
        assert torch.equal(ppo.gae(reward, value, next_value, terminated, terminated | truncated, 0.5, 0.5), expected)


class TestParts:
    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    def test_an_end_is_worth_what_comes_after_it(self, end):
        args = ppo.Args(gamma=0.5, gae_lambda=0.0, reward_scale=2.0)
        policy = ppo.make_policy(Corridor(), args.hidden)
        with Collector(lambda: Corridor(end), policy, frames_per_batch=8, num_envs=2) as collector:
            batch = collector.next()
        ppo.add_advantages(batch, policy, args)
        start, one, two, three = policy["critic"].module(torch.tensor([[-1.0], [1.0], [2.0], [3.0]])).flatten().tolist()
        last = 200 + (0.5 * three if end == "truncated" else 0)
        targets = torch.tensor([2 + 0.5 * one, 20 + 0.5 * two, last, 2 + 0.5 * one]).expand(2, 4)
        values = torch.tensor([start, one, two, start]).expand(2, 4)
        torch.testing.assert_close(batch["value_target"], targets)
        torch.testing.assert_close(batch["advantage"], targets - values)

    def test_returns_go_on_from_batch_to_batch(self):
        returns = ppo.Returns(2)
        with Collector(Corridor, frames_per_batch=8, num_envs=2) as collector:
            ends = [returns.ended(collector.next()) for _ in range(3)]
        assert ends == [[(6, 111)] * 2, [(12, 111)] * 2, [(18, 111)] * 2 + [(24, 111)] * 2]

    def test_an_evaluation_is_one_episode_a_lane(self, monkeypatch):
        monkeypatch.setattr(ppo, "make_env", lambda env_id: Corridor())
        assert ppo.evaluate(ppo.make_policy(Corridor(), 8), ppo.Args(eval_episodes=4), seed=0) == [111] * 4

    def test_an_evaluation_is_greedy(self, monkeypatch):
        class PaysTheAction(Corridor):
            def step(self, action):
                observation, _, *rest = super().step(action)
                return observation, float(action), *rest

        policy = ppo.make_policy(Corridor(), 8)
        torch.nn.init.zeros_(policy["actor"].module[-1].weight)
        policy["actor"].module[-1].bias.data = torch.tensor([0.0, 0.1])
        monkeypatch.setattr(ppo, "make_env", lambda env_id: PaysTheAction())
        assert ppo.evaluate(policy, ppo.Args(eval_episodes=8), seed=0) == [3] * 8

    @pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
    def test_old_weights_are_where_the_objective_starts(self, env_id):
        """The log-probabilities recorded are those of the learner: the ratio is 1 before the first step."""
        args = ppo.Args(env_id, entropy_coef=0.0, value_coef=0.0, gae_lambda=1.0)
        policy = ppo.make_policy(ppo.make_env(env_id), args.hidden)
        with Collector(lambda: ppo.make_env(env_id), policy, frames_per_batch=64, num_envs=4) as collector:
            batch = collector.next()
        recorded = batch["state_value"].clone()
        ppo.add_advantages(batch, policy, args)
        frames = batch.flatten()
        assert abs(ppo.loss(policy, frames, args).item()) < 1e-5  # minus the mean of normalised advantages
        torch.testing.assert_close(frames["state_value"].detach(), recorded.flatten(0, 1))
        torch.testing.assert_close(policy.get_dist(frames).log_prob(frames["action"]), frames["action_log_prob"])

    @pytest.mark.parametrize(("name", "what"), [("observation_space", "Observations"), ("action_space", "Actions")])
    def test_spaces_that_it_cannot_take(self, name, what):
        env = Corridor()
        setattr(env, name, spaces.MultiBinary(2))
        with pytest.raises(TypeError, match=f"{what} should be"):
            ppo.make_policy(env, 8)

    def test_the_command_line(self):
        args = tyro.cli(ppo.Args, args=["--seeds", "0", "1", "--gamma", "0.5", "--plot", "a.png"])
        assert args == ppo.Args(seeds=(0, 1), gamma=0.5, plot=Path("a.png"))


class TestShortRuns:
    @pytest.mark.parametrize("kind", RUNS)
    def test_it_runs(self, kind):
        args = ppo.Args(**RUNS[kind], **SHORT, seeds=(3, 4))
        results = ppo.main(args)
        assert [result.seed for result in results] == [3, 4]
        for result in results:
            frames = [frame for frame, _ in result.curve]
            assert frames
            assert frames == sorted(frames)
            assert frames[-1] <= args.total_frames
            assert len(result.evaluation) == args.eval_episodes
            assert all(math.isfinite(value) for value in [*result.evaluation, *(value for _, value in result.curve)])
            for new, old in zip(parameters(result.policy), parameters(initial_policy(args, result.seed)), strict=True):
                assert new.isfinite().all()
                assert not torch.equal(new, old)
        assert results[0].curve != results[1].curve

    @pytest.mark.parametrize("kind", RUNS)
    def test_a_seed_decides_everything(self, kind):
        args = ppo.Args(**RUNS[kind], **SHORT)
        first = ppo.train(args, 5)
        torch.rand(7)  # whatever was drawn before
        again = ppo.train(args, 5)
        assert (first.curve, first.evaluation) == (again.curve, again.evaluation)
        assert all(map(torch.equal, parameters(first.policy), parameters(again.policy)))

    def test_a_last_batch_of_one_frame(self):
        args = ppo.Args(num_envs=1, frames_per_batch=64, total_frames=65, eval_episodes=1)
        assert all(parameter.isfinite().all() for parameter in parameters(ppo.train(args, 0).policy))

    def test_the_table(self, tmp_path):
        (result,) = ppo.main(ppo.Args(**SHORT, csv=tmp_path / "curve.csv"))
        header, *rows = (tmp_path / "curve.csv").read_text().splitlines()
        assert header == "seed,frame,return"
        assert rows == [f"0,{frame},{value}" for frame, value in result.curve]

    def test_the_figure(self, tmp_path):
        pytest.importorskip("matplotlib")
        ppo.main(ppo.Args(**SHORT, plot=tmp_path / "curve.png"))
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_solves_cartpole(seed):
    evaluation = ppo.train(ppo.Args(), seed).evaluation
    assert len(evaluation) == 20
    assert sum(evaluation) / 20 >= 475
