"""The adversary: weights are published as fast as they can be while workers step, and no frame shows two versions.

Version k is k in every element of every parameter, and the action is the smallest and the largest of all elements: a
set that is mixed of two versions shows in the frame it made, and so does one that goes by another's number.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from rlcollect import MultiAsyncCollector, MultiSyncCollector
from rlcollect.testing import Echo

WORKERS = 2
LANES = 32
STEPS = 125
SHAPES = ((1,), (64, 64), (7,), (300,), (300, 300), (3, 5), (100, 400))  # a take is long enough to be disturbed in


class Bounds(nn.Module):
    """Acts as [smallest, largest] of all elements of its parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, observation):
        bounds = torch.stack([torch.stack(part.aminmax()) for part in self.parts])
        return torch.stack([bounds[:, 0].min(), bounds[:, 1].max()]).expand(*observation.shape[:-1], 2)


@contextmanager
def publishing(collector):
    """A thread publishes version after version meanwhile; yields the list of what it raised."""
    number = torch.zeros(())  # nothing to fill: hardly any time is spent on anything but publishing
    weights = {name: number.expand(tensor.shape) for name, tensor in Bounds().state_dict().items()}
    is_over, errors = threading.Event(), []

    def publish():
        version = 0
        try:
            while not is_over.is_set():
                version += 1
                number.fill_(version)
                assert collector.update_policy_weights_(weights) == version
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield errors
    finally:
        is_over.set()
        thread.join()


def check(kind, frames, versions):
    """Frames are whole, so many at least, and made by so many versions at least."""
    share = WORKERS if kind is MultiSyncCollector else 1
    collector = kind(
        [lambda: Echo((2,), None)] * WORKERS,
        Bounds(),
        frames_per_batch=STEPS * LANES * share,
        num_envs=LANES,
        weights_update="step",
    )
    seen = set()
    with collector:
        with publishing(collector) as errors:
            while collector.collected_frames < frames or len(seen) < versions:
                batch = collector.next()
                version, action = batch["collector", "policy_version"], batch["action"]
                assert (action == version.unsqueeze(-1)).all(), "a frame was made by weights of more than one version"
                seen |= set(version.unique().tolist())
        published = collector.policy_version
    assert errors == []
    assert max(seen) <= published


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector], ids=["sync", "async"])
class TestNoFrameIsTorn:
    @pytest.mark.timeout(60)
    def test_while_a_thread_publishes(self, kind):
        check(kind, frames=100_000, versions=100)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_for_a_million_frames(self, kind):
        check(kind, frames=1_000_000, versions=1_000)
