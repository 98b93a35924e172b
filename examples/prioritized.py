"""Prioritised replay: frames from worker processes, in TorchRL's prioritised buffer.

    python examples/prioritized.py

Collection goes on in the background. The learner samples by priority, and sets the priorities of what it has seen: here
those of one-step errors of a value that it learns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from rlcollect import AsyncCollector


@dataclass
class Arguments:
    """What can be said on the command line."""

    total_frames: int = 20_000
    batch_size: int = 128
    num_envs: int = 8
    gamma: float = 0.99
    seed: int = 0


def main(arguments: Arguments) -> float:
    """Learns a value of random actions in CartPole; the mean error over the last updates."""
    torch.manual_seed(arguments.seed)
    value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimiser = torch.optim.Adam(value.parameters(), 1e-3)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(10_000), batch_size=arguments.batch_size
    )
    errors = []
    with AsyncCollector(
        "CartPole-v1",
        frames_per_batch=256,
        num_envs=arguments.num_envs,
        total_frames=arguments.total_frames,
        replay_buffer=buffer,
    ) as collector:
        collector.set_seed(arguments.seed)
        collector.start()
        collector.wait_for(frames=1_000)
        while not collector.exhausted or len(errors) < 100:
            sample = buffer.sample()
            with torch.no_grad():
                goes_on = ~sample["next", "terminated"]
                target = sample["next", "reward"] + arguments.gamma * goes_on * value(sample["next", "observation"])
            error = value(sample["observation"]) - target
            loss = (sample["priority_weight"].unsqueeze(-1) * error.square()).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            sample.set("td_error", error.detach().abs().squeeze(-1))
            buffer.update_tensordict_priority(sample)
            errors.append(float(error.detach().abs().mean()))
    return sum(errors[-100:]) / 100


if __name__ == "__main__":
    print(f"mean error of the last 100 updates: {main(tyro.cli(Arguments)):.3f}")
