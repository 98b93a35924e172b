"""Batches cut into trajectories, and made into transitions of several steps: ours beside TorchRL's, batch by batch.

    python benchmarks/trajectories.py                 every case
    python benchmarks/trajectories.py split nested    some of them

The batch: CartPole-v1, random actions, 16 lanes of 4,096 frames, episodes of about 22. Where TorchRL is not installed,
"copy" is what there is.

split: `split_trajectories`, padded, against TorchRL's. Aim: 1; it is 147.
nested: with `as_nested=True`, against TorchRL's. Aim: 1; it is 51.
multistep: `MultiStep` of three steps against TorchRL's. Aim: 1; it is 497.
copy: `split_trajectories` against a clone of the batch: 0.01 to 0.03. The longest episode sets the width: padded, the
    batch is four to five times as large.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from harness import run
from tensordict import TensorDictBase

from rlcollect import Collector, MultiStep, split_trajectories

LANES, STEPS = 16, 4096
IDS = ("collector", "traj_ids")


def cartpoles() -> TensorDictBase:
    with Collector("CartPole-v1", frames_per_batch=LANES * STEPS, num_envs=LANES) as collector:
        collector.set_seed(0)
        return collector.next()


def on(batch: TensorDictBase, function: Callable[[TensorDictBase], Any]) -> Iterator[int]:
    while True:
        function(batch)
        yield batch.numel()


def against_torchrl(as_nested: bool) -> Mapping[str, Iterator[int]]:
    from torchrl.collectors.utils import split_trajectories as theirs

    batch = cartpoles()
    return {
        "rlcollect": on(batch, lambda batch: split_trajectories(batch, as_nested=as_nested)),
        "TorchRL": on(batch, lambda batch: theirs(batch, trajectory_key=IDS, as_nested=as_nested)),
    }


def against_a_copy() -> Mapping[str, Iterator[int]]:
    batch = cartpoles()
    return {"rlcollect": on(batch, split_trajectories), "clone": on(batch, TensorDictBase.clone)}


def multistep() -> Mapping[str, Iterator[int]]:
    from torchrl.data.postprocs import MultiStep as Theirs

    batch = cartpoles()
    return {"rlcollect": on(batch, MultiStep(0.99, 3)), "TorchRL": on(batch, Theirs(0.99, 3))}


AGAINST_TORCHRL: Mapping[str, Callable[[], Mapping[str, Iterator[int]]]] = {
    "split": lambda: against_torchrl(as_nested=False),
    "nested": lambda: against_torchrl(as_nested=True),
    "multistep": multistep,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(__doc__, {"copy": against_a_copy} | (AGAINST_TORCHRL if find_spec("torchrl") else {}))
