"""Frames per second of a `Collector` with policies that write more than an action, beside loops written by hand.

The hand loop computes the same things with plain torch (`torch.distributions`, `nn.LSTM`), steps, and records nothing.

    python benchmarks/policies.py                every case
    python benchmarks/policies.py actor-critic lstm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from harness import run
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from rlcollect import Collector, RecurrentModule

FRAMES = 1024
LANES = 16

Act = Callable[[torch.Tensor, np.ndarray[Any, Any]], torch.Tensor]  # from observations, and which lanes have just begun


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def by_hand(env_id: str, lanes: int, act: Act, decode: Callable[[torch.Tensor], list[Any]]) -> Iterator[int]:
    envs = [gym.make(env_id) for _ in range(lanes)]
    current = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    observations = torch.from_numpy(current)
    begun = np.ones(lanes, bool)
    while True:
        frames = 0
        with torch.no_grad():
            while frames < FRAMES:
                actions = decode(act(observations, begun))
                for lane, env in enumerate(envs):
                    observation, _, terminated, truncated, _ = env.step(actions[lane])
                    begun[lane] = terminated or truncated
                    current[lane] = env.reset()[0] if begun[lane] else observation
                frames += lanes
        yield frames


def collected(env_id: str, policy: Any, lanes: int) -> Iterator[int]:
    collector = Collector(env_id, policy, frames_per_batch=FRAMES, num_envs=lanes)
    return (batch.numel() for batch in collector)


def categorical() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def actor_critic() -> dict[str, Iterator[int]]:
    actor, critic = mlp(4, 2), mlp(4, 1)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(actor, ["observation"], ["logits"]),
        TensorDictModule(critic, ["observation"], ["state_value"]),
        categorical(),
    )

    def act(observation: torch.Tensor, _: Any) -> torch.Tensor:
        distribution = torch.distributions.Categorical(logits=actor(observation))
        action = distribution.sample()
        distribution.log_prob(action)
        critic(observation)
        return action

    return {
        "rlcollect": collected("CartPole-v1", policy, LANES),
        "hand": by_hand("CartPole-v1", LANES, act, torch.Tensor.tolist),
    }


class Gaussian(nn.Module):
    """Mean from a network, deviation from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = mlp(3, 1)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc = self.mean(observation)
        return loc, self.log_scale.exp().expand_as(loc)


def gaussian() -> dict[str, Iterator[int]]:
    net, critic = Gaussian(), mlp(3, 1)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        TensorDictModule(critic, ["observation"], ["state_value"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            return_log_prob=True,
        ),
    )

    def act(observation: torch.Tensor, _: Any) -> torch.Tensor:
        distribution = torch.distributions.Normal(*net(observation))
        action = distribution.sample()
        distribution.log_prob(action)
        critic(observation)
        return action

    return {
        "rlcollect": collected("Pendulum-v1", policy, LANES),
        "hand": by_hand("Pendulum-v1", LANES, act, lambda action: list(action.numpy())),
    }


def lstm() -> dict[str, Iterator[int]]:
    torch.manual_seed(0)
    rnn, head = nn.LSTM(4, 64), nn.Linear(64, 2)
    policy = TensorDictSequential(
        RecurrentModule(rnn, in_key="observation", out_key="features"),
        TensorDictModule(lambda features: head(features).argmax(-1), ["features"], ["action"]),
    )
    state = [torch.zeros(1, LANES, 64), torch.zeros(1, LANES, 64)]

    def act(observation: torch.Tensor, begun: np.ndarray[Any, Any]) -> torch.Tensor:
        if begun.any():
            lanes = begun.nonzero()[0].tolist()
            for part in state:
                part[:, lanes] = 0.0
        features, (state[0], state[1]) = rnn(observation.unsqueeze(0), (state[0], state[1]))
        return head(features[0]).argmax(-1)

    return {
        "rlcollect": collected("CartPole-v1", policy, LANES),
        "hand": by_hand("CartPole-v1", LANES, act, torch.Tensor.tolist),
    }


CASES = {"actor-critic": actor_critic, "gaussian": gaussian, "lstm": lstm}


if __name__ == "__main__":
    run(__doc__, CASES)
