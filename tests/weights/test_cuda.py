"""Weights of policies that compute on a GPU: out of shared memory, into tensors there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlcollect import (
    Collector,
    MultiAsyncCollector,
    MultiProcessWeightSyncScheme,
    MultiSyncCollector,
    SharedMemWeightSyncScheme,
)
from rlcollect.testing import Echo

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(110),
]


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, observation):
        return (self.value + self.shift).expand(observation.shape)


@pytest.mark.parametrize("learner", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    "scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "by value"]
)
def test_the_version_in_a_row_belongs_to_the_value_in_that_row(kind, learner, scheme):
    policy = One().to(learner)
    source = Echo if kind is Collector else [Echo] * 2
    with kind(
        source, policy, frames_per_batch=8, policy_device="cuda", weight_sync_schemes={"policy": scheme()}
    ) as collector:
        for value in range(1, 6):
            with torch.no_grad():
                policy.value.fill_(value - 0.5)
                policy.shift.fill_(0.5)
            assert collector.update_policy_weights_() == value
            batch = collector.next()
            assert torch.equal(batch["collector", "policy_version"], batch["action"].squeeze(-1).long().cpu())
        collector.wait_for_version(5, timeout=60)


def test_workers_by_the_device_of_their_policy():
    with MultiSyncCollector([Echo] * 2, One(), frames_per_batch=8, policy_device=["cpu", "cuda"]) as collector:
        collector.update_policy_weights_({"value": torch.ones(1), "shift": torch.zeros(1)}, worker_ids="cuda")
        assert collector.next()["action"].flatten().tolist() == [0] * 4 + [1] * 4
