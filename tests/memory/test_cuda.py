"""Batches on a GPU are cut and summed there, to what they are on the CPU."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect import MultiStep, split_trajectories

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def batch() -> TensorDict:
    ids = torch.tensor([[1, 1, 2, 2, 2], [3, 4, 4, 4, 9]])
    following = {
        "done": torch.zeros(2, 5, 1, dtype=torch.bool),
        "reward": torch.rand(2, 5, 1),
        "x": torch.rand(2, 5, 3),
    }
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    return TensorDict({"next": following, "collector": {"traj_ids": ids, "mask": mask}}, [2, 5])


@pytest.mark.parametrize("length", [None, 2])
def test_split_trajectories(batch: TensorDict, length: int | None) -> None:
    made = split_trajectories(batch.cuda(), fragment_len=length)
    assert all(value.is_cuda for value in made.values(True, True))
    assert (made.cpu() == split_trajectories(batch, fragment_len=length)).all()
    nested = split_trajectories(batch.cuda(), as_nested=True)["next", "x"]
    expected = split_trajectories(batch, as_nested=True)["next", "x"]
    assert torch.equal(nested.values().cpu(), expected.values())
    assert torch.equal(nested.offsets().cpu(), expected.offsets())


def test_tensors_on_several_devices(batch: TensorDict) -> None:
    expected: TensorDictBase = split_trajectories(batch)
    batch["next", "x"] = batch["next", "x"].cuda()
    made = split_trajectories(batch)
    assert made["next", "x"].is_cuda
    assert (made.cpu() == expected).all()


def test_multi_step(batch: TensorDict) -> None:
    made = MultiStep(0.9, 3)(batch.cuda())
    assert all(value.is_cuda for value in made.values(True, True))
    torch.testing.assert_close(made.cpu().to_dict(), MultiStep(0.9, 3)(batch).to_dict())
