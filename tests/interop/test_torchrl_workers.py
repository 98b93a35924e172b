"""What only TorchRL's environments have: words among the observations, and two dimensions of lanes."""

from __future__ import annotations

import functools

import pytest
import torch

from rlcollect import MultiSyncCollector
from tests.workers.helpers import KINDS, Kind, assert_same, take

pytest.importorskip("torchrl", reason="TorchRL is not installed: `make interop` installs it, and runs these")

from tests.interop.test_torchrl_environments import Steps, Talking

pytestmark = pytest.mark.timeout(100)


def said(words):
    """All words in the order of time, whatever holds them."""
    return words if isinstance(words, list) else words.tolist() if hasattr(words, "tolist") else words.data


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_words_cross_by_value(kind: Kind):
    with kind.cls(
        kind.source(lambda worker: Talking), frames_per_batch=4 * kind.together, total_frames=24
    ) as collector:
        batches = list(collector)
        assert collector.collected_frames == 24
    for batch in batches:
        parts = list(batch.unbind(0)) if kind.cls is MultiSyncCollector else [batch]
        for part in parts:
            seen = part["observation"]
            expected = [f"{int(first)}.{int(tick)}" for first, tick in seen[:, :2].tolist()]
            assert said(part["words"]) == expected
            after = part["next", "observation"]
            assert said(part["next", "words"]) == [f"{int(first)}.{int(tick)}" for first, tick in after[:, :2].tolist()]
            assert [each["episode"] for each in said(part["deep", "object"])] == seen[:, 0].int().tolist()


def test_workers_are_joined_between_lanes_and_time():
    grid = functools.partial(Steps, (2, 3))
    runs = {}
    for cat in ("stack", 0, 1, 2, -2):
        with MultiSyncCollector([grid, grid], frames_per_batch=48, total_frames=84, cat_results=cat) as collector:
            collector.set_seed(0)
            runs[cat] = list(collector)
    assert [list(batch.batch_size) for batch in runs["stack"]] == [[2, 2, 3, 4], [2, 2, 3, 3]]
    for cat in (0, 1, 2, -2):
        assert_same(runs[cat], [torch.cat(list(batch.unbind(0)), cat) for batch in runs["stack"]])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_dimensions_of_lanes_are_those_of_the_environment(kind: Kind):
    make = functools.partial(Steps, (2, 3))
    with kind.cls(kind.source(lambda worker: make), frames_per_batch=24 * kind.together) as collector:
        batch = collector.next()
        lead = [2] if kind.cls is MultiSyncCollector else []
        assert list(batch.batch_size) == [*lead, 2, 3, 4]
        assert batch.names == [*[None] * (len(lead) + 2), "time"]
        assert len(take(kind, collector, 1)) == kind.workers
