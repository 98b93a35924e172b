"""The DQN example: its targets against their definition, its parts on a corridor, short runs, and a solved task."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from rlcollect import Collector, ReplayBuffer

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn.py"
SHORT = {
    "num_envs": 2,
    "frames_per_batch": 128,
    "total_frames": 2_000,
    "updates": 8,
    "learning_starts": 256,
    "epsilon_frames": 1_000,
    "eval_every": 4,
    "curve_episodes": 2,
    "solved": math.inf,  # luck can balance it for two episodes
    "eval_episodes": 3,
}


def load(path):
    """The example as a module: it lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


dqn = load(EXAMPLE)
cloudpickle.register_pickle_by_value(dqn)  # as what a script defines is; workers could not import it


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the example sets it; on a machine that does other work two threads take up to fifty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Corridor(gym.Env):
    """Observes how many steps were made (-1 after a reset); pays 1, 10, 100 times the action, and ends there."""

    observation_space = spaces.Box(-1, 3, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, end="terminated", render_mode=None):
        self.end, self.t = end, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.float32([-1]), {}

    def step(self, action):
        self.t += 1
        ends = [self.t == 3 and self.end == end for end in ("terminated", "truncated")]
        return np.float32([self.t]), float(action) * 10.0 ** (self.t - 1), *ends, {}


@pytest.fixture
def corridor():
    """Its id, where environments are made by id."""
    gym.register("Corridor-v0", Corridor)
    yield "Corridor-v0"
    del gym.registry["Corridor-v0"]


class Fixed(nn.Module):
    """Values that are a function of the observation, for all to see."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, observation):
        return self.values(observation)


def parameters(policy):
    return [parameter.detach() for parameter in policy.parameters()]


def frames_of(after, reward, *, terminated=None, truncated=None):
    """Frames `[B]` with these observations after them."""
    none = torch.zeros(len(after), dtype=torch.bool)
    terminated, truncated = (none if flag is None else torch.tensor(flag) for flag in (terminated, truncated))
    after = {
        "observation": torch.tensor(after)[:, None],
        "reward": torch.tensor(reward)[:, None],
        "terminated": terminated[:, None],
        "truncated": truncated[:, None],
        "done": (terminated | truncated)[:, None],
    }
    return TensorDict({"next": after}, [len(none)])


class TestTargets:
    FRAMES = ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    VALUES = Fixed(lambda observation: torch.cat([observation, -observation], -1))  # likes action 0
    TARGET = Fixed(lambda observation: torch.cat([4 * observation, 8 * observation], -1))  # likes action 1

    @pytest.mark.parametrize(("double", "worth"), [(True, 4), (False, 8)])
    def test_what_the_next_observation_is_worth(self, double, worth):
        """Double: the learned network chooses, the target values; else the target does both."""
        args = dqn.Args(gamma=0.5, double=double)
        expected = torch.tensor([10 + worth / 2, 20 + worth, 30 + 3 * worth / 2])
        assert torch.equal(dqn.targets(frames_of(*self.FRAMES), self.VALUES, self.TARGET, args), expected)

    @pytest.mark.parametrize("double", [True, False])
    def test_nothing_comes_after_a_termination(self, double):
        frames = frames_of(*self.FRAMES, terminated=[True, False, True], truncated=[False, True, True])
        goes_on = 20 + 0.5 * 2 * (4 if double else 8)
        targets = dqn.targets(frames, self.VALUES, self.TARGET, dqn.Args(gamma=0.5, double=double))
        assert torch.equal(targets, torch.tensor([10.0, goes_on, 30.0]))

    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    def test_frames_of_a_buffer(self, end):
        """The true last observation of an episode is there, not the first of the next."""
        buffer = ReplayBuffer(60)
        with Collector(lambda: Corridor(end), frames_per_batch=60, num_envs=2, replay_buffer=buffer) as collector:
            collector.next()
        frames = buffer.frames()
        after = {-1: 1, 1: 2, 2: 3}
        expected = []
        for before, action in zip(frames["observation"].flatten().tolist(), frames["action"].tolist(), strict=True):
            has_future = after[before] < 3 or end == "truncated"
            reward = action * 10 ** (after[before] - 1)
            expected.append(reward + 0.5 * 4 * after[before] * has_future)
        targets = dqn.targets(frames, self.VALUES, self.TARGET, dqn.Args(gamma=0.5))
        assert targets.tolist() == expected


class TestLearner:
    def test_the_target_is_what_was_learned_some_steps_ago(self):
        values = nn.Linear(1, 2)
        learner = dqn.Learner(values, dqn.Args(target_every=3))
        frames = frames_of([1.0, 2.0], [1.0, 1.0])
        frames["observation"], frames["action"] = torch.ones(2, 1), torch.tensor([0, 1])
        weights, targets = [], []
        for _ in range(7):
            weights.append(values.weight.detach().clone())
            learner.update(frames)
            targets.append(learner.target.weight.clone())
        assert not torch.equal(weights[0], weights[3])
        assert all(map(torch.equal, targets, [weights[step] for step in (0, 0, 0, 3, 3, 3, 6)]))

    def test_it_finds_the_way(self):
        """In a corridor the values are known: what is paid for action 1 from here to the end, discounted by 1/2."""
        args = dqn.Args(gamma=0.5, learning_rate=1e-2, target_every=20)
        torch.manual_seed(0)
        learner = dqn.Learner(dqn.make_values(Corridor(), 32), args)
        buffer = ReplayBuffer(300, seed=0)
        with Collector(Corridor, frames_per_batch=300, num_envs=2, replay_buffer=buffer) as collector:
            collector.next()
        for _ in range(1500):
            learner.update(buffer.sample(64))
        with torch.no_grad():
            found = learner.values(torch.tensor([[-1.0], [1.0], [2.0]]))
        best = torch.tensor([1 + 5 + 25, 10 + 50, 100.0])
        paid = torch.tensor([1.0, 10.0, 100.0])
        torch.testing.assert_close(found, torch.stack([best - paid, best], -1), rtol=0.05, atol=2)


class TestParts:
    def test_epsilon_is_a_share_of_random_actions(self):
        policy = dqn.EpsilonGreedy(Fixed(lambda observation: observation))
        observation = torch.tensor([1.0, 3.0, 2.0, 0.0]).expand(40_000, 4)
        torch.manual_seed(0)
        policy.epsilon.fill_(0.0)
        assert (policy(observation) == 1).all()
        policy.epsilon.fill_(0.4)
        shares = policy(observation).bincount(minlength=4) / len(observation)
        torch.testing.assert_close(shares, torch.tensor([0.1, 0.7, 0.1, 0.1]), rtol=0, atol=0.01)

    def test_a_single_lane(self):
        policy = dqn.EpsilonGreedy(Fixed(lambda observation: observation))
        policy.epsilon.fill_(0.0)
        assert policy(torch.tensor([1.0, 3.0])).tolist() == 1

    def test_an_evaluation_is_greedy_and_one_episode_a_lane(self, corridor):
        policy = dqn.EpsilonGreedy(Fixed(lambda observation: torch.cat([0 * observation, 0 * observation + 1], -1)))
        assert dqn.evaluate(policy, corridor, 4, 0) == [111] * 4

    @pytest.mark.parametrize(("name", "what"), [("observation_space", "Observations"), ("action_space", "Actions")])
    @pytest.mark.parametrize("space", [spaces.MultiBinary(2), spaces.Discrete(2, start=1)])
    def test_spaces_that_it_cannot_take(self, name, what, space):
        env = Corridor()
        setattr(env, name, space)
        with pytest.raises(TypeError, match=f"{what} should be"):
            dqn.make_values(env, 8)

    def test_the_command_line(self):
        args = tyro.cli(dqn.Args, args=["--seeds", "0", "1", "--no-double", "--plot", "a.png"])
        assert args == dqn.Args(seeds=(0, 1), double=False, plot=Path("a.png"))


class TestShortRuns:
    def test_it_runs(self):
        args = dqn.Args(**SHORT, seeds=(3, 4))
        results = dqn.main(args)
        assert [result.seed for result in results] == [3, 4]
        for result in results:
            assert result.frames == args.total_frames
            frames, returns = zip(*result.curve, strict=True)
            assert frames == (512, 1024, 1536, 2000)
            assert all(math.isfinite(value) and value > 0 for value in [*returns, *result.evaluation])
            assert len(result.evaluation) == args.eval_episodes
            assert result.policy.epsilon.item() == pytest.approx(args.epsilon)
            torch.manual_seed(result.seed)
            first = dqn.make_values(gym.make(args.env_id), args.hidden)
            for new, old in zip(parameters(result.policy), parameters(first), strict=True):
                assert new.isfinite().all()
                assert not torch.equal(new, old)

    def test_it_ends_when_it_is_solved(self):
        result = dqn.train(dqn.Args(**{**SHORT, "solved": 1.0}), 0)
        assert result.frames == 512
        assert [frames for frames, _ in result.curve] == [512]
        assert len(result.evaluation) == 3

    def test_each_batch_is_made_by_the_newest_weights(self, monkeypatch):
        buffers = []

        def kept(*args, **options):
            buffers.append(ReplayBuffer(*args, **options))
            return buffers[-1]

        monkeypatch.setattr(dqn, "ReplayBuffer", kept)
        args = dqn.Args(**SHORT)
        dqn.train(args, 0)
        (buffer,) = buffers
        versions = buffer.frames()["collector", "policy_version"].reshape(args.num_envs, -1)
        steps = args.frames_per_batch // args.num_envs
        expected = torch.arange(args.total_frames // args.num_envs) // steps
        assert torch.equal(versions, expected.expand_as(versions))

    def test_the_table(self, tmp_path):
        (result,) = dqn.main(dqn.Args(**SHORT, csv=tmp_path / "curve.csv"))
        header, *rows = (tmp_path / "curve.csv").read_text().splitlines()
        assert header == "seed,frames,return"
        assert rows == [f"0,{frames},{value}" for frames, value in result.curve]

    def test_the_figure(self, tmp_path):
        pytest.importorskip("matplotlib")
        dqn.main(dqn.Args(**SHORT, plot=tmp_path / "curve.png"))
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_solves_cartpole(seed):
    result = dqn.train(dqn.Args(), seed)
    assert result.frames <= 100_000
    assert len(result.evaluation) == 20
    assert sum(result.evaluation) / 20 >= 475
