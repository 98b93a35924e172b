"""DQN in one file: rlcollect fills a replay buffer in the background, plain torch learns from it meanwhile.

Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236) with the targets of double Q-learning (van Hasselt et al.
2016, arXiv:1509.06461). Discrete actions, flat observations.

    python examples/dqn.py                     CartPole-v1, until it is solved, seed 0
    python examples/dqn.py --seeds 0 1 2 --plot docs/dqn_cartpole.png
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn
from torch.nn import functional as F

from rlcollect import AsyncCollector, ReplayBuffer

CURVE, FINAL = 10_000, 20_000  # seeds of evaluations begin here


@dataclass(frozen=True)
class Args:
    """Learns action values by DQN, once a seed, and evaluates the greedy policy."""

    env_id: str = "CartPole-v1"
    """An environment of Gymnasium: flat Box observations, Discrete actions from 0 on."""
    seeds: tuple[int, ...] = (0,)
    """One run each."""
    total_frames: int = 100_000
    """Frames a run is trained on, at most: it ends when an evaluation returns `solved`."""
    num_envs: int = 8
    """Environments stepped together, in the other process."""
    frames_per_batch: int = 256
    """Frames made with the same weights, over all environments."""
    updates: int = 128
    """Gradient steps while such a batch is made."""
    batch_size: int = 64
    """Frames in a gradient step."""
    capacity: int = 100_000
    """Frames that the buffer keeps, the newest."""
    learning_starts: int = 1024
    """Frames before the first gradient step."""
    learning_rate: float = 1e-3
    """Of Adam."""
    gamma: float = 0.99
    """Discount."""
    target_every: int = 128
    """Gradient steps between two copies of the learned network to the target network."""
    double: bool = True
    """Whether the learned network chooses the next action that the target network values; else the target does both."""
    epsilon: float = 0.04
    """Share of random actions, in the end; at first it is 1."""
    epsilon_frames: int = 10_000
    """Frames in which it falls there, linearly."""
    max_grad_norm: float = 10.0
    """Longer gradients are shortened to this."""
    hidden: int = 256
    """Width of the two hidden layers."""
    eval_every: int = 4
    """Batches between two evaluations, each a point of the learning curve."""
    curve_episodes: int = 50
    """Greedy episodes of each of these evaluations."""
    solved: float = 500.0
    """Training ends when the mean return of one is as high."""
    eval_episodes: int = 20
    """Greedy episodes after training, from other starts."""
    plot: Path | None = None
    """PNG of the learning curves (needs matplotlib: the extra `plot`)."""
    csv: Path | None = None
    """Table of the learning curves: seed, frames, return."""


@dataclass(frozen=True)
class Result:
    """What came of one seed.

    Attributes:
        seed: its number.
        policy: the trained policy.
        frames: that it was trained on.
        curve: after how many frames greedy episodes returned how much, on average.
        evaluation: returns of the greedy episodes after training, which are others.
    """

    seed: int
    policy: EpsilonGreedy
    frames: int
    curve: list[tuple[int, float]]
    evaluation: list[float]

    def __str__(self) -> str:
        mean, least = fmean(self.evaluation), min(self.evaluation)
        return f"seed {self.seed}: {len(self.evaluation)} greedy episodes, mean {mean:.1f}, min {least:.1f}"


# --- the policy -------------------------------------------------------------------------------------------------------


class EpsilonGreedy(nn.Module):
    """The action of the highest value, or any, with probability epsilon, in each lane.

    Epsilon is a buffer of the module, so it goes to where actions are chosen with the weights.

    Args:
        values: from observations `[..., o]` to values of actions `[..., a]`.
    """

    epsilon: torch.Tensor

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """From observations `[..., o]` to actions `[...]`."""
        values = self.values(observation)
        greedy = values.argmax(-1)
        return torch.where(
            torch.rand(greedy.shape) < self.epsilon, torch.randint_like(greedy, values.shape[-1]), greedy
        )


def make_values(env: gym.Env[Any, Any], hidden: int) -> nn.Sequential:
    """From observations of an environment to values of its actions."""
    observations, actions = env.observation_space, env.action_space
    if not (isinstance(observations, spaces.Box) and len(observations.shape) == 1):
        raise TypeError(f"Observations should be a flat Box, not {observations}.")
    if not (isinstance(actions, spaces.Discrete) and actions.start == 0):
        raise TypeError(f"Actions should be Discrete, from 0 on, not {actions}.")
    return nn.Sequential(
        nn.Linear(observations.shape[0], hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, int(actions.n)),
    )


# --- learning ---------------------------------------------------------------------------------------------------------


def targets(frames: TensorDictBase, values: nn.Module, target: nn.Module, args: Args) -> torch.Tensor:
    """What the values of the actions taken should be, `[B]`, by what came after them.

    A terminated step has no future; after a truncated one there was one, so its value counts.
    """
    reward, terminated = (frames["next", key].squeeze(-1) for key in ("reward", "terminated"))
    after = frames["next", "observation"]
    with torch.no_grad():
        valued = target(after)
        chosen = (values(after) if args.double else valued).argmax(-1, keepdim=True)
        return reward + args.gamma * valued.gather(-1, chosen).squeeze(-1) * ~terminated


def loss(frames: TensorDictBase, values: nn.Module, target: nn.Module, args: Args) -> torch.Tensor:
    """Huber's, of the values of the actions taken, over some frames `[B]`."""
    taken = values(frames["observation"]).gather(-1, frames["action"].unsqueeze(-1)).squeeze(-1)
    return F.smooth_l1_loss(taken, targets(frames, values, target, args))


class Learner:
    """Learns values from frames, a gradient step at a time.

    Args:
        values: what is learned.
        args: how.
    """

    def __init__(self, values: nn.Module, args: Args) -> None:
        self.values = values
        self.target = copy.deepcopy(values)
        self._args = args
        self._steps = 0
        self._optimizer = torch.optim.Adam(values.parameters(), args.learning_rate, fused=True)

    def update(self, frames: TensorDictBase) -> None:
        """One gradient step."""
        if self._steps % self._args.target_every == 0:
            self.target.load_state_dict(self.values.state_dict())
        self._steps += 1
        self._optimizer.zero_grad()
        loss(frames, self.values, self.target, self._args).backward()
        nn.utils.clip_grad_norm_(self.values.parameters(), self._args.max_grad_norm)
        self._optimizer.step()


# --- running ----------------------------------------------------------------------------------------------------------


def train(args: Args, seed: int) -> Result:
    """One run, from the first weights to the evaluation.

    Each batch is made by the newest weights while there are updates from the batches before it: `max_policy_lag=0` has
    it wait for those weights, and `wait_for` has them wait for the batch before. So there are as many updates for each
    frame whichever of the two processes is faster, and no two runs are quite the same: what is there to be sampled
    during a batch is a matter of time.
    """
    torch.manual_seed(seed)
    with closing(gym.make(args.env_id)) as env:
        policy = EpsilonGreedy(make_values(env, args.hidden))
    learner, curve = Learner(policy.values, args), []
    buffer = ReplayBuffer(args.capacity, storage="shared", batch_size=args.batch_size, seed=seed)
    with AsyncCollector(
        args.env_id,
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        num_envs=args.num_envs,
        replay_buffer=buffer,
        max_policy_lag=0,
    ) as collector:
        collector.set_seed(seed)
        collector.start()
        for number in range(1, len(collector) + 1):
            if collector.collected_frames >= args.learning_starts:
                for _ in range(args.updates):
                    learner.update(buffer.sample())
            frames = min(number * args.frames_per_batch, args.total_frames)
            collector.wait_for(frames=frames)
            policy.epsilon.fill_(max(args.epsilon, 1 - (1 - args.epsilon) * frames / args.epsilon_frames))
            collector.update_policy_weights_()
            if number % args.eval_every == 0 or number == len(collector):
                curve.append((frames, fmean(evaluate(policy, args.env_id, args.curve_episodes, CURVE + seed))))
                print(f"seed {seed}: {frames:,} frames, return {curve[-1][1]:.1f}", flush=True)
                if curve[-1][1] >= args.solved:
                    break
    result = Result(seed, policy, frames, curve, evaluate(policy, args.env_id, args.eval_episodes, FINAL + seed))
    print(result)
    return result


def evaluate(policy: EpsilonGreedy, env_id: str, episodes: int, seed: int) -> list[float]:
    """Returns of greedy episodes: the first of each lane, since the first to end would be the short ones."""
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    with closing(gym.make_vec(env_id, episodes, vectorization_mode="sync")) as envs:
        observations, _ = envs.reset(seed=np.random.SeedSequence(seed).generate_state(episodes).tolist())
        while running.any():
            with torch.no_grad():
                actions = policy.values(torch.as_tensor(observations, dtype=torch.float32)).argmax(-1)
            observations, rewards, terminated, truncated, _ = envs.step(actions.numpy())
            returns += rewards * running
            running &= ~(terminated | truncated)
    return returns.tolist()


def save_csv(results: Sequence[Result], path: Path) -> None:
    """Writes a line for each point of the curves."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "frames", "return"])
        writer.writerows([result.seed, *point] for result in results for point in result.curve)


def save_plot(results: Sequence[Result], args: Args, path: Path) -> None:
    """Draws the returns of greedy episodes over frames; evaluations after training in the legend."""
    from matplotlib.figure import Figure  # an extra, and slow to import

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.plot(*zip(*result.curve, strict=True), label=str(result))
    axes.set(
        title=f"DQN on {args.env_id}", xlabel="frames", ylabel=f"return (mean of {args.curve_episodes} greedy episodes)"
    )
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center")  # no corner stays free
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
