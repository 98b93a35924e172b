"""IMPALA in one file: rlcollect collects on the nodes of a Ray cluster, plain torch learns meanwhile.

Importance weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561). Actors go on while the learner
learns, so their weights are some updates old; the V-trace targets account for it. Discrete actions, flat observations.

    python examples/impala_ray.py                      CartPole-v1, 300,000 frames, seed 0, on two local Ray nodes
    python examples/impala_ray.py --address auto       on the Ray cluster that this machine is a node of
    python examples/impala_ray.py --backend processes  without Ray, in worker processes
    python examples/impala_ray.py --seeds 0 1 2 --plot docs/impala_cartpole.png
"""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import gymnasium as gym
import torch
import tyro
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from rlcollect import Collector, ExplorationType, MultiAsyncCollector

if TYPE_CHECKING:
    from rlcollect import RayCollector

CPUS = 0.5  # that a worker takes of its node, as Ray counts them
WINDOW = 20  # episodes of training whose mean return is a point of the curve


@dataclass(frozen=True)
class Args:
    """Trains a policy by IMPALA, once a seed, and evaluates it."""

    backend: Literal["ray", "processes"] = "ray"
    """Where environments are stepped: in actors of Ray, or in processes of this machine."""
    address: str | None = None
    """Of a Ray cluster. Left out: two nodes are started here, and stopped in the end."""
    env_id: str = "CartPole-v1"
    """An environment of Gymnasium: flat Box observations, Discrete actions from 0 on."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--seed"])] = (0,)
    """One run each."""
    total_frames: int = 300_000
    """Frames a run is trained on."""
    num_workers: int = 2
    """Workers that collect."""
    num_envs: int = 16
    """Environments that each of them steps together."""
    frames_per_batch: int = 256
    """Frames of a rollout, over the environments of its worker: one gradient step."""
    learning_rate: float = 1e-3
    """At first; it falls linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    rho_bar: float = 1.0
    """Importance weights are cut to this; it decides which policy is valued."""
    c_bar: float = 1.0
    """Importance weights are cut to this where later errors are traced back; it decides how fast that is learned."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value's squared error."""
    max_grad_norm: float = 0.5
    """Longer gradients are shortened to this."""
    hidden: int = 64
    """Width of the two hidden layers."""
    reward_scale: float = 0.1
    """Rewards are multiplied by it for learning; returns are reported as they are."""
    goal: float = 475.0
    """Mean return of training episodes that counts as learned: the frames until then are reported."""
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
        curve: for each training episode, the frames learned from when it had ended, and its return.
        evaluation: returns of the greedy episodes.
        policy_lag: how many frames were made by weights how many updates old when they were learned from.
        seconds: that training took.
    """

    seed: int
    policy: ProbabilisticTensorDictSequential
    curve: list[tuple[int, float]]
    evaluation: list[float]
    policy_lag: Counter[int]
    seconds: float

    def __str__(self) -> str:
        mean, least = fmean(self.evaluation), min(self.evaluation)
        return f"seed {self.seed}: {len(self.evaluation)} greedy episodes, mean {mean:.1f}, min {least:.1f}"

    @property
    def mean_lag(self) -> float:
        """Of the frames."""
        return sum(lag * frames for lag, frames in self.policy_lag.items()) / self.policy_lag.total()

    def smooth(self) -> list[tuple[int, float]]:
        """The curve, each return the mean of the `WINDOW` last up to it."""
        values = [value for _, value in self.curve]
        return [
            (frame, fmean(values[max(0, end - WINDOW) : end])) for end, (frame, _) in enumerate(self.curve, start=1)
        ]

    def frames_to(self, goal: float) -> int | None:
        """Frames until `WINDOW` training episodes in a row returned as much on average; None: they never did."""
        return next((frame for frame, mean in self.smooth()[WINDOW - 1 :] if mean >= goal), None)


# --- the policy -------------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int, hidden: int, gain: float) -> nn.Sequential:
    """Two hidden layers; `gain` is that of the last."""
    first, second, last = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, layer_gain in ((first, math.sqrt(2)), (second, math.sqrt(2)), (last, gain)):
        nn.init.orthogonal_(layer.weight, layer_gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def make_networks(env: gym.Env[Any, Any], hidden: int) -> tuple[ProbabilisticTensorDictSequential, nn.Module]:
    """The policy, which goes to the workers, and the critic, which does not: the learner alone values observations.

    The policy reads "observation", `[..., o]`, and writes "logits", "action" and "action_log_prob": whatever a policy
    writes is in the batch, so the learner finds there how likely the action was to those who took it. The critic is
    from `[..., o]` to `[..., 1]`.
    """
    observations, actions = env.observation_space, env.action_space
    if not (isinstance(observations, spaces.Box) and len(observations.shape) == 1):
        raise TypeError(f"Observations should be a flat Box, not {observations}.")
    if not (isinstance(actions, spaces.Discrete) and actions.start == 0):
        raise TypeError(f"Actions should be Discrete, from 0 on, not {actions}.")
    size = observations.shape[0]
    actor, critic = mlp(size, int(actions.n), hidden, gain=0.01), mlp(size, 1, hidden, gain=1.0)
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    policy = ProbabilisticTensorDictSequential(
        {"actor": TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]), "draw": draw}
    )
    return policy, critic


# --- learning ---------------------------------------------------------------------------------------------------------


def v_trace(
    behaviour_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace targets and advantages (arXiv:1802.01561, section 4) of N lanes over T steps, time last.

    Targets are equation 1 in the recursive form of its remark 1; advantages are what the policy's gradient is weighted
    with in section 4.2, importance weight included. A terminated step has no future, so nothing is added to its reward.
    After a truncated one, or the last of the rollout, there was one: the value of what came next stands for it. Neither
    passes on anything from the steps that follow. On-policy, and with bounds of at least 1, targets are the discounted
    rewards up to there.

    Args:
        behaviour_log_prob: `[N, T]`, of each action, by the policy that took it.
        log_prob: `[N, T]`, of the same, by the policy that learns.
        reward: `[N, T]`.
        value: `[N, T]`, of the observation before each step.
        next_value: `[N, T]`, of the true observation after it, not of the one that a reset returned.
        terminated: bool `[N, T]`.
        done: bool `[N, T]`, terminated or truncated.
        gamma: discount.
        rho_bar: bound of the importance weights of errors.
        c_bar: bound of the importance weights by which errors are traced back.

    Returns:
        What values should be, and the advantages of the actions taken: `[N, T]` each, without gradients.
    """
    with torch.no_grad():
        ratio = (log_prob - behaviour_log_prob).exp()
        rho, c = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
        error = rho * (reward + gamma * next_value * ~terminated - value)
        carried = gamma * c * ~done
        correction = torch.zeros_like(value[:, 0])
        corrections = torch.empty_like(value)  # target - value
        for t in reversed(range(value.shape[1])):
            correction = error[:, t] + carried[:, t] * correction
            corrections[:, t] = correction
        targets = value + corrections
        after = next_value.clone()
        after[:, :-1] = torch.where(done[:, :-1], next_value[:, :-1], targets[:, 1:])
        return targets, rho * (reward + gamma * after * ~terminated - value)


def loss(
    policy: ProbabilisticTensorDictSequential, critic: nn.Module, batch: TensorDictBase, args: Args
) -> torch.Tensor:
    """IMPALA's (arXiv:1802.01561, section 4.2), over a batch `[N, T]`: of values, policy gradient and entropy."""
    distribution = Categorical(logits=policy["actor"].module(batch["observation"]))
    log_prob = distribution.log_prob(batch["action"])
    value = critic(batch["observation"]).squeeze(-1)
    with torch.no_grad():
        next_value = critic(batch["next", "observation"]).squeeze(-1)
    reward, terminated, done = (batch["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))
    targets, advantage = v_trace(
        batch["action_log_prob"],
        log_prob,
        args.reward_scale * reward,
        value,
        next_value,
        terminated,
        done,
        args.gamma,
        args.rho_bar,
        args.c_bar,
    )
    gain = (advantage * log_prob).mean() + args.entropy_coef * distribution.entropy().mean()
    return args.value_coef * F.mse_loss(value, targets) - gain


# --- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def with_nodes(args: Args) -> Iterator[Args]:
    """With the address of a Ray cluster, if one is needed and none was given: of two nodes here, for as long."""
    if args.backend != "ray" or args.address is not None:
        yield args
        return
    import ray  # an extra
    from ray.cluster_utils import Cluster

    cpus = math.ceil(CPUS * args.num_workers / 2)  # whatever this machine has: else workers wait for a place
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
    try:
        cluster.add_node(num_cpus=cpus)
        yield dataclasses.replace(args, address=cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def make_collector(args: Args, policy: ProbabilisticTensorDictSequential) -> MultiAsyncCollector | RayCollector:
    """Its batches are one worker's rollout each, `[N, T]`, the first that is ready; the others go on meanwhile."""
    makers = [args.env_id] * args.num_workers
    options: dict[str, Any] = {
        "frames_per_batch": args.frames_per_batch,
        "total_frames": args.total_frames,
        "num_envs": args.num_envs,
    }
    if args.backend == "processes":
        return MultiAsyncCollector(makers, policy, **options)
    from rlcollect import RayCollector

    return RayCollector(
        makers,
        policy,
        sync=False,
        ray_init_config={"address": args.address} if args.address else None,
        remote_configs={"num_cpus": CPUS},
        **options,
    )


class Returns:
    """Adds up the returns of episodes that go on from batch to batch, of any worker: by the ids of episodes."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()

    def ended(self, batch: TensorDictBase) -> list[float]:
        """Of the episodes that ended in a batch `[N, T]`."""
        reward, done = (batch["next", key].squeeze(-1) for key in ("reward", "done"))
        ids, places = batch["collector", "traj_ids"].unique(return_inverse=True)
        sums = torch.zeros(len(ids)).index_add_(0, places.flatten(), reward.flatten())
        self._running.update(dict(zip(ids.tolist(), sums.tolist(), strict=True)))
        return [self._running.pop(number) for number in batch["collector", "traj_ids"][done].tolist()]


def train(args: Args, seed: int) -> Result:
    """One run, from the first weights to the evaluation.

    No two runs are quite the same: which weights a rollout is made with is a matter of time.
    """
    torch.manual_seed(seed)
    with closing(gym.make(args.env_id)) as env:
        policy, critic = make_networks(env, args.hidden)
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, args.learning_rate, eps=1e-5)
    returns, curve, lags, frames = Returns(), [], Counter(), 0
    with make_collector(args, policy) as collector:
        collector.set_seed(seed)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(collector))
        began = time.perf_counter()
        for number, batch in enumerate(collector, start=1):
            frames += batch.numel()
            lags.update((collector.policy_version - batch["collector", "policy_version"]).flatten().tolist())
            curve += [(frames, value) for value in returns.ended(batch)]
            optimizer.zero_grad()
            loss(policy, critic, batch, args).backward()
            nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            schedule.step()
            collector.update_policy_weights_()
            if number % 100 == 0 and curve:
                recent = fmean(value for _, value in curve[-WINDOW:])
                print(f"seed {seed}: {frames:,} frames, return {recent:.1f}", flush=True)
        seconds = time.perf_counter() - began
    result = Result(seed, policy, curve, evaluate(policy, args, seed), lags, seconds)
    learned = result.frames_to(args.goal)
    print(result)
    print(f"  return {args.goal:g} in training: " + ("never" if learned is None else f"after {learned:,} frames"))
    print(f"  policy lag in updates: mean {result.mean_lag:.2f}, max {max(lags)}; {seconds:.0f} s", flush=True)
    return result


def evaluate(policy: ProbabilisticTensorDictSequential, args: Args, seed: int) -> list[float]:
    """Returns of greedy episodes: the first of each lane, since the first to end would be the short ones."""
    returns = torch.zeros(args.eval_episodes)
    running = torch.ones(args.eval_episodes, dtype=torch.bool)
    with Collector(
        args.env_id,
        policy,
        frames_per_batch=128 * args.eval_episodes,
        num_envs=args.eval_episodes,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(10_000 + seed)  # other starts than those of training
        while running.any():
            after = collector.rollout()["next"]
            for reward, done in zip(after["reward"].unbind(1), after["done"].unbind(1), strict=True):
                returns += reward.squeeze(-1) * running
                running &= ~done.squeeze(-1)
    return returns.tolist()


def save_csv(results: Sequence[Result], path: Path) -> None:
    """Writes a line for each training episode."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "frame", "return"])
        writer.writerows([result.seed, *point] for result in results for point in result.curve)


def save_plot(results: Sequence[Result], args: Args, path: Path) -> None:
    """Draws training returns over frames; evaluations in the legend."""
    from matplotlib.figure import Figure  # an extra, and slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.plot(*zip(*result.smooth(), strict=True), label=str(result))
    axes.set(title=f"IMPALA on {args.env_id}", xlabel="frames", ylabel=f"training return (mean of {WINDOW} episodes)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main(args: Args) -> list[Result]:
    """Trains once a seed, and writes what was asked for."""
    with with_nodes(args) as args:
        results = [train(args, seed) for seed in args.seeds]
    if args.csv is not None:
        save_csv(results, args.csv)
    if args.plot is not None:
        save_plot(results, args, args.plot)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small are slower on more
    main(tyro.cli(Args, description=__doc__))
