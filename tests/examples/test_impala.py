"""The IMPALA example: V-trace against its definition, its parts on a corridor, short runs, and a solved task."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import rlcollect
from rlcollect import Collector, MultiAsyncCollector

EXAMPLE = Path(__file__).parents[2] / "examples" / "impala_ray.py"
SHORT = {
    "backend": "processes",
    "num_envs": 2,
    "frames_per_batch": 64,
    "total_frames": 640,
    "eval_episodes": 3,
}


def load(path):
    """The example as a module: it lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


impala = load(EXAMPLE)
cloudpickle.register_pickle_by_value(impala)  # as what a script defines is; workers could not import it


class Corridor(gym.Env):
    """Observes how many steps were made (-1 after a reset); pays 1, 10, 100, and ends there."""

    observation_space = spaces.Box(-1, 3, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, end="terminated", pays="always", render_mode=None):
        self.end, self.pays, self.t = end, pays, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.float32([-1]), {}

    def step(self, action):
        self.t += 1
        paid = 10.0 ** (self.t - 1) * (1 if self.pays == "always" else float(action))
        ends = [self.t == 3 and self.end == end for end in ("terminated", "truncated")]
        return np.float32([self.t]), paid, *ends, {}


@pytest.fixture
def corridor():
    """Its id, where environments are made by id."""
    gym.register("Corridor-v0", Corridor)
    yield "Corridor-v0"
    del gym.registry["Corridor-v0"]


@pytest.fixture
def here(monkeypatch):
    """Collects in this process, between two updates, so that nothing is a matter of time."""

    def collector(args, policy):
        options = {"frames_per_batch": args.frames_per_batch, "total_frames": args.total_frames}
        return Collector(args.env_id, policy, num_envs=args.num_envs, **options)

    monkeypatch.setattr(impala, "make_collector", collector)


def parameters(policy):
    return [parameter.detach() for parameter in policy.parameters()]


def v_trace_by_definition(ratio, reward, value, next_value, terminated, done, gamma, rho_bar, c_bar):
    """Equation 1 of arXiv:1802.01561 and the advantages of its section 4.2, each element by sums of its own.

    n is as large as the episode and the rollout let it be.
    """
    lanes, steps = reward.shape
    targets, advantages = value.clone(), torch.zeros_like(value)
    for lane in range(lanes):
        for s in range(steps):
            traced = 1.0  # the product of c from s to t - 1
            for t in range(s, steps):
                after = 0.0 if terminated[lane, t] else next_value[lane, t].item()
                weight = min(rho_bar, ratio[lane, t].item())
                error = weight * (reward[lane, t].item() + gamma * after - value[lane, t].item())
                targets[lane, s] += gamma ** (t - s) * traced * error
                traced *= min(c_bar, ratio[lane, t].item())
                if done[lane, t]:
                    break
        for s in range(steps):
            if terminated[lane, s]:
                after = 0.0
            elif done[lane, s] or s == steps - 1:
                after = next_value[lane, s].item()
            else:
                after = targets[lane, s + 1].item()
            weight = min(rho_bar, ratio[lane, s].item())
            advantages[lane, s] = weight * (reward[lane, s].item() + gamma * after - value[lane, s].item())
    return targets, advantages


def returns_by_definition(reward, next_value, terminated, done, gamma):
    """Discounted rewards up to the end of the episode or the rollout, and what comes after where there is a future."""
    returns = torch.zeros_like(reward)
    lanes, steps = reward.shape
    for lane in range(lanes):
        for s in range(steps):
            for t in range(s, steps):
                returns[lane, s] += gamma ** (t - s) * reward[lane, t]
                if done[lane, t] or t == steps - 1:
                    if not terminated[lane, t]:
                        returns[lane, s] += gamma ** (t + 1 - s) * next_value[lane, t]
                    break
    return returns


CASES = {
    "seed": st.integers(0, 2**32),
    "lanes": st.integers(1, 3),
    "steps": st.integers(1, 12),
    "often": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    "gamma": st.floats(0, 1),
}


def rollout(seed, lanes, steps, often):
    """Random log-probabilities of two policies, rewards, values, values after, terminated, done: `[N, T]` each.

    A step's value after it is the next one's value, unless the episode ends between them.
    """
    draw = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, lanes, steps, generator=draw, dtype=torch.float64)
    log_probs = -3 * torch.rand(2, lanes, steps, generator=draw, dtype=torch.float64)
    terminated, truncated = torch.rand(2, lanes, steps, generator=draw) < often
    done = terminated | truncated
    next_value[:, :-1] = torch.where(done[:, :-1], next_value[:, :-1], value[:, 1:])
    return (*log_probs, reward, value, next_value, terminated, done)


class TestVTrace:
    @given(**CASES, rho_bar=st.sampled_from([0.5, 1.0, 2.0, math.inf]), c_bar=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    def test_it_is_the_definition(self, seed, lanes, steps, often, gamma, rho_bar, c_bar):
        behaviour, learner, *rest = rollout(seed, lanes, steps, often)
        found = impala.v_trace(behaviour, learner, *rest, gamma, rho_bar, c_bar)
        ratio = (learner - behaviour).exp()
        torch.testing.assert_close(found, v_trace_by_definition(ratio, *rest, gamma, rho_bar, c_bar))

    @given(**CASES, bounds=st.sampled_from([1.0, 2.0, math.inf]))
    def test_on_policy_it_is_the_return(self, seed, lanes, steps, often, gamma, bounds):
        behaviour, _, reward, value, next_value, terminated, done = rollout(seed, lanes, steps, often)
        case = (reward, value, next_value, terminated, done, gamma)
        targets, advantages = impala.v_trace(behaviour, behaviour, *case, bounds, bounds)
        returns = returns_by_definition(reward, next_value, terminated, done, gamma)
        torch.testing.assert_close(targets, returns)
        torch.testing.assert_close(advantages, returns - value)

    def test_worked_out_by_hand(self):
        """Two episodes, ended in either way, and one that is open; gamma = 1/2, ratios 1/2, 4, 4, 1/4, 2."""
        ratio = torch.tensor([[0.5, 4.0, 4.0, 0.25, 2.0]])
        reward = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
        value = torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])
        next_value = torch.tensor([[20.0, 1000.0, 40.0, 60.0, 70.0]])
        terminated = torch.tensor([[False, True, False, False, False]])
        truncated = torch.tensor([[False, False, False, True, False]])
        # With rho_bar = 2 and c_bar = 1, errors are 1/2 (1 + 20/2 - 10) = 1/2;  2 (2 - 20) = -36;
        # 2 (3 + 40/2 - 30) = -14;  1/4 (4 + 60/2 - 40) = -3/2;  2 (5 + 70/2 - 50) = -20.
        targets = torch.tensor([[10 + 0.5 - 0.25 * 36, 20 - 36.0, 30 - 14 - 0.5 * 1.5, 40 - 1.5, 50 - 20.0]])
        # Of the first and the third, the next target -16 or 38.5 stands in for the value.
        advantages = torch.tensor([[0.5 * (1 - 8 - 10), -36.0, 2 * (3 + 19.25 - 30), -1.5, -20.0]])
        log_prob = torch.full_like(ratio, 0.125).log()
        done = terminated | truncated
        found = impala.v_trace(log_prob, log_prob + ratio.log(), reward, value, next_value, terminated, done, 0.5, 2, 1)
        torch.testing.assert_close(found, (targets, advantages))

    @pytest.mark.parametrize(("rho_bar", "share"), [(math.inf, 0.9), (1.0, 5 / 6), (0.2, 1 / 2)])
    @pytest.mark.parametrize("c_bar", [0.0, 1.0])
    def test_whose_values_it_leaves_as_they_are(self, rho_bar, share, c_bar):
        """On average over what the other policy does: those of a policy in between (equation 3 of the paper).

        The other takes action 1 with probability 1/2, the learner with 9/10; steps pay 1, 10, 100 for it. The policy in
        between takes it in proportion to min(rho_bar / 2, 9/10), action 0 to min(rho_bar / 2, 1/10).
        """
        actions = torch.tensor(list(itertools.product([0, 1], repeat=3)))  # each is as likely
        behaviour = torch.full(actions.shape, 0.5).log()
        learner = torch.where(actions == 1, 0.9, 0.1).log()
        reward = actions * torch.tensor([1.0, 10.0, 100.0])
        value = share * torch.tensor([1 + 5 + 25, 10 + 50, 100.0]).expand(8, 3)
        next_value = torch.cat([value[:, 1:], torch.full((8, 1), 1000.0)], 1)
        terminated = torch.tensor([False, False, True]).expand(8, 3)
        case = (behaviour, learner, reward, value, next_value, terminated, terminated, 0.5, rho_bar, c_bar)
        targets, _ = impala.v_trace(*case)
        torch.testing.assert_close(targets.mean(0), value[0])

    def test_nothing_is_learned_through_it(self):
        *floats, terminated, done = rollout(0, 2, 5, 0.2)
        floats = [each.requires_grad_() for each in floats]
        assert not any(each.requires_grad for each in impala.v_trace(*floats, terminated, done, 0.9))


class TestLoss:
    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    @pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
    def test_of_a_corridor(self, end, ratio):
        """What a batch holds is taken as what it is; three steps to an end, and one that the rollout cuts off."""
        args = impala.Args(gamma=0.5, reward_scale=2.0, value_coef=0.3, entropy_coef=0.1)
        torch.manual_seed(0)
        policy, critic = impala.make_networks(Corridor(), 8)
        with Collector(lambda: Corridor(end), policy, frames_per_batch=8, num_envs=2) as collector:
            batch = collector.next()
        log_prob = batch["action_log_prob"].clone()
        batch["action_log_prob"] -= math.log(ratio)  # as if others had acted

        def values(observations):
            return critic(torch.tensor(observations)[:, None]).detach().squeeze(-1).expand(2, 4)

        value, next_value = values([-1.0, 1.0, 2.0, -1.0]), values([1.0, 2.0, 3.0, 1.0])
        reward = 2 * torch.tensor([1.0, 10.0, 100.0, 1.0]).expand(2, 4)
        done = torch.tensor([False, False, True, False]).expand(2, 4)
        terminated = done & (end == "terminated")
        case = (torch.full((2, 4), ratio), reward, value, next_value, terminated, done, 0.5, 1.0, 1.0)
        targets, advantages = v_trace_by_definition(*case)
        entropy = -(batch["logits"].softmax(-1) * batch["logits"].log_softmax(-1)).sum(-1)
        expected = 0.3 * (value - targets).square().mean() - (advantages * log_prob).mean() - 0.1 * entropy.mean()
        torch.testing.assert_close(impala.loss(policy, critic, batch, args).detach(), expected)

    def test_it_finds_the_way(self):
        """Where action 1 is paid for it is taken, from frames of a policy that takes any."""
        args = impala.Args(gamma=0.5, reward_scale=0.01)
        torch.manual_seed(0)
        policy, critic = impala.make_networks(Corridor(), 32)
        with Collector(lambda: Corridor(pays="for 1"), policy, frames_per_batch=300, num_envs=2) as collector:
            batch = collector.next()
        optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], 1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            impala.loss(policy, critic, batch, args).backward()
            optimizer.step()
        logits = policy["actor"].module(torch.tensor([[-1.0], [1.0], [2.0]]))
        assert (logits.argmax(-1) == 1).all()
        assert logits[-1].softmax(-1)[1] > 0.9


class TestParts:
    def test_returns_of_workers_that_take_turns(self):
        returns, ends = impala.Returns(), []
        with Collector(Corridor, frames_per_batch=8, num_envs=2) as collector:
            for _ in range(3):
                batch = collector.next()
                ends.append(returns.ended(batch))
                batch["collector", "traj_ids"] += 1 << 40  # another worker's
                ends.append(returns.ended(batch))
        assert ends == [[111] * 2] * 4 + [[111] * 4] * 2

    def test_what_a_result_tells(self):
        curve = [(frame, 0.0 if frame < 30 else 100.0) for frame in range(10, 60)]
        result = impala.Result(0, None, curve, [1.0, 2.0], Counter({0: 30, 2: 10}), 1.0)
        assert str(result) == "seed 0: 2 greedy episodes, mean 1.5, min 1.0"
        assert result.mean_lag == 0.5
        assert dict(result.smooth()) == {frame: min(max(frame - 29, 0), 20) * 5 for frame, _ in curve}
        assert result.frames_to(50) == 39
        assert result.frames_to(0) == 29  # no sooner than there are enough episodes
        assert result.frames_to(101) is None

    def test_an_evaluation_is_one_episode_a_lane(self, corridor):
        policy, _ = impala.make_networks(Corridor(), 8)
        assert impala.evaluate(policy, impala.Args(env_id=corridor, eval_episodes=4), seed=0) == [111] * 4

    def test_an_evaluation_is_greedy(self):
        policy, _ = impala.make_networks(Corridor(), 8)
        torch.nn.init.zeros_(policy["actor"].module[-1].weight)
        policy["actor"].module[-1].bias.data = torch.tensor([0.0, 0.1])
        gym.register("Choice-v0", lambda render_mode=None: Corridor(pays="for 1"))
        try:
            assert impala.evaluate(policy, impala.Args(env_id="Choice-v0", eval_episodes=8), seed=0) == [111] * 8
        finally:
            del gym.registry["Choice-v0"]

    @pytest.mark.parametrize(("name", "what"), [("observation_space", "Observations"), ("action_space", "Actions")])
    @pytest.mark.parametrize("space", [spaces.MultiBinary(2), spaces.Discrete(2, start=1)])
    def test_spaces_that_it_cannot_take(self, name, what, space):
        env = Corridor()
        setattr(env, name, space)
        with pytest.raises(TypeError, match=f"{what} should be"):
            impala.make_networks(env, 8)

    @pytest.mark.parametrize("seeds", [["--seed", "3"], ["--seeds", "0", "1"]])
    def test_the_command_line(self, seeds):
        args = tyro.cli(impala.Args, args=[*seeds, "--backend", "processes", "--address", "auto", "--plot", "a.png"])
        seeds = tuple(map(int, seeds[1:]))
        assert args == impala.Args(backend="processes", address="auto", seeds=seeds, plot=Path("a.png"))


class TestWhereItCollects:
    def test_in_processes(self):
        args = impala.Args(**SHORT, num_workers=3)
        with impala.make_collector(args, impala.make_networks(gym.make(args.env_id), 8)[0]) as collector:
            assert isinstance(collector, MultiAsyncCollector)
            assert collector.next().batch_size == (2, 32)
            assert len(collector.stats().workers) == 3

    @pytest.mark.parametrize(("address", "init"), [("1.2.3.4:5", {"address": "1.2.3.4:5"}), (None, None)])
    def test_on_ray(self, monkeypatch, address, init):
        monkeypatch.setattr(rlcollect, "RayCollector", lambda *args, **options: (args, options), raising=False)
        policy = object()
        args = impala.Args(address=address, num_envs=4, frames_per_batch=8, total_frames=16, num_workers=3)
        (makers, given), options = impala.make_collector(args, policy)
        assert (makers, given) == (["CartPole-v1"] * 3, policy)
        assert options == {
            "frames_per_batch": 8,
            "total_frames": 16,
            "num_envs": 4,
            "sync": False,
            "ray_init_config": init,
            "remote_configs": {"num_cpus": 0.5},
        }

    @pytest.mark.parametrize("options", [{"backend": "processes"}, {"backend": "ray", "address": "auto"}])
    def test_no_cluster_is_started_where_none_is_needed(self, options):
        args = impala.Args(**options)
        with impala.with_nodes(args) as same:
            assert same is args


class TestShortRuns:
    def test_it_runs(self):
        args = impala.Args(**SHORT, seeds=(3, 4))
        results = impala.main(args)
        assert [result.seed for result in results] == [3, 4]
        for result in results:
            frames = [frame for frame, _ in result.curve]
            assert frames
            assert frames == sorted(frames)
            assert frames[-1] <= args.total_frames
            assert len(result.evaluation) == args.eval_episodes
            assert all(math.isfinite(value) for value in [*result.evaluation, *(value for _, value in result.curve)])
            torch.manual_seed(result.seed)
            first, _ = impala.make_networks(gym.make(args.env_id), args.hidden)
            for new, old in zip(parameters(result.policy), parameters(first), strict=True):
                assert new.isfinite().all()
                assert not torch.equal(new, old)

    def test_how_old_frames_were(self):
        """The first batch is of the first weights; a later one of weights that the learner had then."""
        result = impala.train(impala.Args(**SHORT), 0)
        assert result.policy_lag.total() == 640
        assert result.policy_lag[0] >= 64
        assert 0 <= min(result.policy_lag) <= max(result.policy_lag) < 10
        assert all(frames % 64 == 0 for frames in result.policy_lag.values())

    @pytest.mark.usefixtures("here")
    def test_a_seed_decides_what_time_does_not(self):
        args = impala.Args(**SHORT)
        first = impala.train(args, 5)
        torch.rand(7)  # whatever was drawn before
        again = impala.train(args, 5)
        assert first.policy_lag == {0: 640}
        assert (first.curve, first.evaluation) == (again.curve, again.evaluation)
        assert all(map(torch.equal, parameters(first.policy), parameters(again.policy)))

    @pytest.mark.usefixtures("here")
    def test_the_table(self, tmp_path):
        (result,) = impala.main(impala.Args(**SHORT, csv=tmp_path / "curve.csv"))
        header, *rows = (tmp_path / "curve.csv").read_text().splitlines()
        assert header == "seed,frame,return"
        assert rows == [f"0,{frame},{value}" for frame, value in result.curve]

    @pytest.mark.usefixtures("here")
    def test_the_figure(self, tmp_path):
        pytest.importorskip("matplotlib")
        impala.main(impala.Args(**SHORT, plot=tmp_path / "curve.png"))
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_solves_cartpole(seed):
    evaluation = impala.train(impala.Args(backend="processes"), seed).evaluation
    assert len(evaluation) == 20
    assert sum(evaluation) / 20 >= 475


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_solves_cartpole_over_two_nodes():
    pytest.importorskip("ray", reason="Ray is not installed: the extra `ray` has it")
    (result,) = impala.main(impala.Args())
    assert sum(result.evaluation) / 20 >= 475
