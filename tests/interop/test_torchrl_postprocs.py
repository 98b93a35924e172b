"""What is done to batches, beside what TorchRL's functions of the same names make of them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase

from rlcollect import Collector, MultiStep, split_trajectories
from rlcollect.testing import Tagged

WHY = "TorchRL is not installed: `make interop` installs it, and runs these"
utils = pytest.importorskip("torchrl.collectors.utils", reason=WHY)
postprocs = pytest.importorskip("torchrl.data.postprocs", reason=WHY)

IDS = ("collector", "traj_ids")


@pytest.fixture(scope="module")
def batch() -> TensorDictBase:
    with Collector(lambda: Tagged(length=7, random_length=True), frames_per_batch=120, num_envs=3) as collector:
        return collector.next()


def test_padded_pieces(batch: TensorDictBase) -> None:
    ours, theirs = split_trajectories(batch), utils.split_trajectories(batch, trajectory_key=IDS)
    assert set(ours.keys(True)) == set(theirs.keys(True))
    assert (ours == theirs).all()


def test_nested_pieces(batch: TensorDictBase) -> None:
    """Ours are jagged, with time not in the batch size; theirs are strided. Padded they are the same."""
    ours = split_trajectories(batch, as_nested=True)
    theirs = utils.split_trajectories(batch, trajectory_key=IDS, as_nested=True)
    assert set(ours.keys(True)) == set(theirs.keys(True))
    for key in ("observation", ("next", "reward")):
        assert torch.equal(ours[key].to_padded_tensor(0), theirs[key].to_padded_tensor(0))


@pytest.mark.parametrize("n_steps", [1, 2, 3, 9])
def test_several_steps(batch: TensorDictBase, n_steps: int) -> None:
    """All but flags, which they leave where they are, and the last dimension of n."""
    ours, theirs = MultiStep(0.9, n_steps)(batch), postprocs.MultiStep(0.9, n_steps)(batch)
    assert (ours["steps_to_next_obs"].squeeze(-1) == theirs["steps_to_next_obs"]).all()
    for key in ("observation", "original_reward"):
        assert (ours["next", key] == theirs["next", key]).all()
    torch.testing.assert_close(ours["next", "reward"], theirs["next", "reward"])
    torch.testing.assert_close(0.9 ** ours["steps_to_next_obs"].squeeze(-1), theirs["gamma"])
