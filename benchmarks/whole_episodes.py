"""What whole episodes cost: frames per second of a `Collector` that delivers them, beside one that delivers rollouts.

CartPole-v1 in 16 lanes, a small network's best action, which is always the same: episodes of 9 frames, the most pieces
that there can be. 2,048 frames a rollout; a batch of whole episodes has about as many. Aim: 0.95 for each but nested,
where torch itself takes as long for each key as all else together.

    python benchmarks/whole_episodes.py                  every case
    python benchmarks/whole_episodes.py padded split
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from harness import run
from single_process import Greedy, cartpole

from rlcollect import Collector

LANES, FRAMES = 16, 2048


def network() -> Greedy:
    torch.manual_seed(0)
    return Greedy()


def collected(**options: Any) -> Iterator[int]:
    """Frames that were delivered; padding is none."""
    collector = Collector(cartpole, network(), frames_per_batch=FRAMES, num_envs=LANES, **options)
    collector.set_seed(0)
    before = 0
    while True:
        collector.next()
        yield collector.collected_frames - before
        before = collector.collected_frames


def episodes_of_a_batch() -> int:
    """How many make about `FRAMES`."""
    with Collector(cartpole, network(), frames_per_batch=8 * FRAMES, num_envs=LANES) as collector:
        collector.set_seed(0)
        batch = collector.next()
    return round(int(batch["next", "done"].sum()) / 8)


def case(**options: Any) -> Mapping[str, Iterator[int]]:
    if "split_trajs" not in options:
        options = {"trajs_per_batch": episodes_of_a_batch(), **options}
    return {"whole": collected(**options), "rollouts": collected()}


CASES = {
    "padded": {"traj_format": "padded"},
    "cat": {"traj_format": "cat"},
    "nested": {"traj_format": "nested"},
    "lanes": {"traj_order": "lanes"},
    "split": {"split_trajs": True},
}


if __name__ == "__main__":
    run(__doc__, {name: partial(case, **options) for name, options in CASES.items()})
