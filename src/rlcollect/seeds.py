"""Seeds.

Every stream is a child of `SeedSequence(seed, spawn_key=(worker, who, generation))`, never `seed + i`: streams of
lanes, workers and neighbouring seeds are independent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["ACTIONS", "POLICY", "Root", "Seed", "episode_seed", "lane_seed", "seed_globals", "word"]

Seed = int | Sequence[int]
Root = tuple[Seed, int, int, int]
"""Of a lane's seeds: a seed, and the worker, lane and generation whose child of it they are."""

# "who" of streams that are no lane's; lanes count from 0
POLICY = 2**31
ACTIONS = 2**31 + 1
GLOBALS = 2**31 + 2


def lane_seed(seed: Seed, worker: int, lane: int, generation: int = 0) -> int:
    """The seed of a lane's environment: 31 bits, since some simulators take a C int."""
    return word(seed, worker, lane, generation) & 0x7FFF_FFFF


def episode_seed(root: Root, episode: int) -> int:
    """The seed of one episode of a lane's environment: 31 bits."""
    seed, *child_of = root
    child = np.random.SeedSequence(seed, spawn_key=(*child_of, episode))
    return int(child.generate_state(1, np.uint32)[0]) & 0x7FFF_FFFF


def seed_globals(seed: Seed, worker: int, generation: int = 0) -> None:
    """Seeds the global generators of `random`, numpy and torch, in a process that belongs to one worker."""
    number = word(seed, worker, GLOBALS, generation)
    random.seed(number)
    np.random.seed(number & 0xFFFF_FFFF)
    torch.manual_seed(number)


def word(seed: Seed, worker: int, who: int, generation: int) -> int:
    """63 bits of a stream of their own."""
    child = np.random.SeedSequence(seed, spawn_key=(worker, who, generation))
    return int(child.generate_state(1, np.uint64)[0]) & 0x7FFF_FFFF_FFFF_FFFF
