"""PPO in one file: rlcollect collects, plain torch learns.

Proximal policy optimisation with a clipped objective (Schulman et al. 2017, arXiv:1707.06347), over advantages by GAE
(Schulman et al. 2016, arXiv:1506.02438). Discrete and continuous actions, flat observations.

    python examples/ppo.py                     CartPole-v1, 100,000 frames, seed 0
    python examples/ppo.py --seeds 0 1 2 --plot docs/ppo_cartpole.png
    python examples/ppo.py --env-id Pendulum-v1 --total-frames 200000 --gamma 0.9 --reward-scale 0.1
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

from rlcollect import Collector, ExplorationType


@dataclass(frozen=True)
class Args:
    """Trains a policy by PPO, once a seed, and evaluates it."""

    env_id: str = "CartPole-v1"
    """An environment of Gymnasium: flat Box observations; Discrete actions, or a bounded flat Box of them."""
    seeds: tuple[int, ...] = (0,)
    """One run each."""
    total_frames: int = 100_000
    """Frames a run is trained on."""
    num_envs: int = 16
    """Environments stepped together."""
    frames_per_batch: int = 1024
    """Frames between two updates, over all environments."""
    learning_rate: float = 2e-3
    """At first; it falls linearly to 0."""
    epochs: int = 8
    """Passes over each batch."""
    minibatches: int = 4
    """Gradient steps in a pass."""
    gamma: float = 0.98
    """Discount."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantage: 0, one step; 1, all of them."""
    clip: float = 0.2
    """How far from 1 the ratio of new to old probability is followed."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value's squared error."""
    max_grad_norm: float = 0.5
    """Longer gradients are shortened to this."""
    hidden: int = 64
    """Width of the two hidden layers."""
    reward_scale: float = 1.0
    """Rewards are multiplied by it for learning; returns are reported as they are."""
    eval_episodes: int = 20
    """Greedy episodes after training."""
    plot: Path | None = None
    """PNG of the learning curves (needs matplotlib: the extra `plot`)."""
    csv: Path | None = None
    """Table of the training episodes: seed, frame, return."""


@dataclass(frozen=True)
class Result:
    """What came of one seed.

    Attributes:
        seed: its number.
        policy: the trained policy.
        curve: for each training episode, the frame at which it ended and its return.
        evaluation: returns of the greedy episodes.
    """

    seed: int
    policy: ProbabilisticTensorDictSequential
    curve: list[tuple[int, float]]
    evaluation: list[float]

    def __str__(self) -> str:
        mean, least = fmean(self.evaluation), min(self.evaluation)
        return f"seed {self.seed}: {len(self.evaluation)} greedy episodes, mean {mean:.1f}, min {least:.1f}"


# --- the policy -------------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int, hidden: int, gain: float) -> nn.Sequential:
    """Two hidden layers; `gain` is that of the last."""
    first, second, last = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, layer_gain in ((first, math.sqrt(2)), (second, math.sqrt(2)), (last, gain)):
        nn.init.orthogonal_(layer.weight, layer_gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


class Gaussian(nn.Module):
    """Mean and standard deviation of an action; the deviation does not depend on the observation."""

    def __init__(self, mean: nn.Module, size: int) -> None:
        super().__init__()
        self.mean = mean
        self.log_std = nn.Parameter(torch.zeros(size))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From `[..., o]` to mean and deviation, `[..., a]` each."""
        loc = self.mean(observation)
        return loc, self.log_std.exp().expand_as(loc)


def diagonal_normal(loc: torch.Tensor, scale: torch.Tensor) -> Distribution:
    """A distribution over whole actions: one log-probability for `[..., a]`."""
    return Independent(Normal(loc, scale), 1)


def make_policy(env: gym.Env[Any, Any], hidden: int) -> ProbabilisticTensorDictSequential:
    """Reads "observation"; writes the distribution's parameters, "state_value", "action" and "action_log_prob".

    Whatever a policy writes is in the batch, so the learner finds there what the policy knew when it acted.
    """
    observations, actions = env.observation_space, env.action_space
    if not (isinstance(observations, spaces.Box) and len(observations.shape) == 1):
        raise TypeError(f"Observations should be a flat Box, not {observations}.")
    size = observations.shape[0]
    distribution: Callable[..., Distribution]
    if isinstance(actions, spaces.Discrete):
        actor: nn.Module = mlp(size, int(actions.n), hidden, gain=0.01)
        parameters, distribution = ["logits"], Categorical
    elif isinstance(actions, spaces.Box) and len(actions.shape) == 1:
        actor = Gaussian(mlp(size, actions.shape[0], hidden, gain=0.01), actions.shape[0])
        parameters, distribution = ["loc", "scale"], diagonal_normal
    else:
        raise TypeError(f"Actions should be Discrete or a flat Box, not {actions}.")
    critic = mlp(size, 1, hidden, gain=1.0)
    draw = ProbabilisticTensorDictModule(
        in_keys=parameters, out_keys=["action"], distribution_class=distribution, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(
        {
            "actor": TensorDictModule(actor, in_keys=["observation"], out_keys=parameters),
            "critic": TensorDictModule(critic, in_keys=["observation"], out_keys=["state_value"]),
            "draw": draw,
        }
    )


def make_env(env_id: str) -> gym.Env[Any, Any]:
    """An environment whose Box actions mean the same everywhere: -1 to 1, and what lies beyond is cut."""
    env = gym.make(env_id)
    if isinstance(env.action_space, spaces.Box):
        low, high = np.float32(-1), np.float32(1)  # Gymnasium warns of doubles
        env = gym.wrappers.ClipAction(gym.wrappers.RescaleAction(env, low, high))
    return env


# --- learning ---------------------------------------------------------------------------------------------------------


def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimates (arXiv:1506.02438, equation 16) of N lanes over T steps, time last.

    A terminated step has no future, so nothing is added to its reward. After a truncated one, or the last of the batch,
    there was one: the value of what came next stands for it. Neither passes on anything from the steps that follow.

    Args:
        reward: `[N, T]`.
        value: `[N, T]`, of the observation before each step.
        next_value: `[N, T]`, of the true observation after it, not of the one that a reset returned.
        terminated: bool `[N, T]`.
        done: bool `[N, T]`, terminated or truncated.
        gamma: discount.
        gae_lambda: weight of longer returns.

    Returns:
        `[N, T]`.
    """
    error = reward + gamma * next_value * ~terminated - value
    carried = gamma * gae_lambda * (~done).to(error.dtype)
    advantage = torch.empty_like(error)
    later = torch.zeros_like(error[:, 0])
    for t in reversed(range(error.shape[1])):
        later = error[:, t] + carried[:, t] * later
        advantage[:, t] = later
    return advantage


def add_advantages(batch: TensorDictBase, policy: ProbabilisticTensorDictSequential, args: Args) -> None:
    """Writes "advantage" and "value_target", `[N, T]`, into a batch."""
    with torch.no_grad():
        next_value = policy["critic"].module(batch["next", "observation"]).squeeze(-1)
    value = batch["state_value"].squeeze(-1)
    reward, terminated, done = (batch["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))
    batch["advantage"] = gae(
        args.reward_scale * reward, value, next_value, terminated, done, args.gamma, args.gae_lambda
    )
    batch["value_target"] = batch["advantage"] + value


def loss(policy: ProbabilisticTensorDictSequential, frames: TensorDictBase, args: Args) -> torch.Tensor:
    """PPO's objective (arXiv:1707.06347, equation 9), to be minimised, over some frames `[B]`."""
    acted = frames["action_log_prob"]
    advantage = frames["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    distribution = policy.get_dist(frames)  # writes "state_value" anew, too
    ratio = (distribution.log_prob(frames["action"]) - acted).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
    value_error = F.mse_loss(frames["state_value"].squeeze(-1), frames["value_target"])
    return args.value_coef * value_error - gain.mean() - args.entropy_coef * distribution.entropy().mean()


def update(
    policy: ProbabilisticTensorDictSequential, optimizer: torch.optim.Optimizer, batch: TensorDictBase, args: Args
) -> None:
    """Some passes over a batch `[N, T]`, in random minibatches."""
    add_advantages(batch, policy, args)
    frames = batch.select("observation", "action", "action_log_prob", "advantage", "value_target").flatten()
    for _ in range(args.epochs):
        for indices in torch.randperm(len(frames)).chunk(args.minibatches):
            optimizer.zero_grad()
            loss(policy, frames[indices], args).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()


# --- running ----------------------------------------------------------------------------------------------------------


def rewards_and_dones(batch: TensorDictBase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each step in turn, `[N]` both, from a batch `[N, T]`."""
    reward, done = (batch["next", key].squeeze(-1).unbind(1) for key in ("reward", "done"))
    return zip(reward, done, strict=True)


class Returns:
    """Adds up the returns of episodes that go on from batch to batch."""

    def __init__(self, lanes: int) -> None:
        self._running = torch.zeros(lanes)
        self._frames = 0

    def ended(self, batch: TensorDictBase) -> list[tuple[int, float]]:
        """For each episode that ended in a batch `[N, T]`: the frame, counted over all lanes, and its return."""
        ends = []
        for reward, done in rewards_and_dones(batch):
            self._running += reward
            self._frames += len(reward)
            ends += [(self._frames, value) for value in self._running[done].tolist()]
            self._running[done] = 0
        return ends


def train(args: Args, seed: int) -> Result:
    """One run, from the first weights to the evaluation."""
    torch.manual_seed(seed)
    with closing(make_env(args.env_id)) as env:
        policy = make_policy(env, args.hidden)
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, eps=1e-5)
    returns, curve = Returns(args.num_envs), []
    with Collector(
        partial(make_env, args.env_id),
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        num_envs=args.num_envs,
    ) as collector:
        collector.set_seed(seed)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(collector))
        for batch in collector:
            curve += returns.ended(batch)
            update(policy, optimizer, batch, args)
            collector.update_policy_weights_()
            schedule.step()
            if collector.policy_version % 10 == 0 and curve:
                recent = fmean(value for _, value in curve[-20:])
                print(f"seed {seed}: {collector.collected_frames:,} frames, return {recent:.1f}")
    result = Result(seed, policy, curve, evaluate(policy, args, seed))
    print(result)
    return result


def evaluate(policy: ProbabilisticTensorDictSequential, args: Args, seed: int) -> list[float]:
    """Returns of greedy episodes: the first of each lane, since the first to end would be the short ones."""
    returns = torch.zeros(args.eval_episodes)
    running = torch.ones(args.eval_episodes, dtype=torch.bool)
    with Collector(
        partial(make_env, args.env_id),
        policy,
        frames_per_batch=128 * args.eval_episodes,
        num_envs=args.eval_episodes,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(10_000 + seed)  # other starts than those of training
        while running.any():
            for reward, done in rewards_and_dones(collector.rollout()):
                returns += reward * running
                running &= ~done
    return returns.tolist()


def save_csv(results: Sequence[Result], path: Path) -> None:
    """Writes a line for each training episode."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "frame", "return"])
        writer.writerows([result.seed, *point] for result in results for point in result.curve)


def save_plot(results: Sequence[Result], args: Args, path: Path, window: int = 20) -> None:
    """Draws training returns over frames, each the mean of the last `window` episodes; evaluations in the legend."""
    from matplotlib.figure import Figure  # an extra, and slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        frames, values = [frame for frame, _ in result.curve], [value for _, value in result.curve]
        means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
        axes.plot(frames, means, label=str(result))
    axes.set(title=f"PPO on {args.env_id}", xlabel="frames", ylabel=f"training return (mean of {window} episodes)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main(args: Args) -> list[Result]:
    """Trains once a seed, and writes what was asked for."""
    results = [train(args, seed) for seed in args.seeds]
    if args.csv is not None:
        save_csv(results, args.csv)
    if args.plot is not None:
        save_plot(results, args, args.plot)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small are slower on more
    main(tyro.cli(Args, description=__doc__))
