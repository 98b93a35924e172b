"""`trajs_per_batch` of TorchRL's environments: words, objects, and shapes that differ from frame to frame."""

from __future__ import annotations

import functools

import pytest
import torch

from rlcollect import Collector, MultiSyncCollector, OptionError

pytest.importorskip("torchrl", reason="TorchRL is not installed: `make interop` installs it, and runs these")

from tests.interop.test_torchrl_environments import Classed, Growing, Handed, Steps, Talking, Unlike

pytestmark = pytest.mark.timeout(100)
KINDS = [Steps, functools.partial(Steps, (2, 3)), Talking, Growing, Unlike, Classed]


def rows_of(batch, traj_format):
    """The episodes of a batch, `[T]` each."""
    if traj_format == "padded":
        return [row[mask] for row, mask in zip(batch, batch["collector", "mask"], strict=True)]
    counts = torch.unique_consecutive(batch["collector", "traj_ids"], return_counts=True)[1]
    return batch.split(counts.tolist())


def said(value):
    return value if isinstance(value, list) else value.tolist() if hasattr(value, "tolist") else value.data


def check(episode, kind):
    lane, number = divmod(int(episode["observation"][0, 0]), 100)
    length = 2 + (lane + number) % 4
    times = list(range(length))
    assert episode["observation"][:, 1].tolist() == times
    assert episode["next", "observation"][:, 1].tolist() == [t + 1 for t in times]
    if kind is Talking:
        assert said(episode["words"]) == [f"{number}.{t}" for t in times]
        assert [each["episode"] for each in said(episode["deep", "object"])] == [number] * length
    if kind is Growing:
        assert [len(frame["points"]) for frame in episode.unbind(0)] == [t + 1 for t in times]
        assert [len(frame["next", "points"]) for frame in episode.unbind(0)] == [t + 2 for t in times]
    if kind is Unlike:
        joints = [frame["robots"][1]["joints"].tolist() for frame in episode.unbind(0)]
        assert joints == [[100.0 * lane + number + j for j in range(3)]] * length
    if kind is Classed:
        assert [frame["pair"].text for frame in episode.unbind(0)] == [str(t) for t in times]
    return lane, number


@pytest.mark.parametrize("traj_format", ["cat", "padded"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "grid"))
def test_whole_episodes(kind, traj_format):
    seen = []
    with Collector(kind, frames_per_batch=12, total_frames=90, trajs_per_batch=3, traj_format=traj_format) as collector:
        for batch in collector:
            rows = rows_of(batch, traj_format)
            assert len(rows) == 3
            seen += [check(row, kind) for row in rows]
        assert collector.collected_frames >= 90
    for lane in {lane for lane, _ in seen}:
        numbers = [number for other, number in seen if other == lane]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("traj_format", ["cat", "padded"])
def test_those_of_agents_that_act_and_end_by_themselves(traj_format):
    """As rollouts have them."""
    make = functools.partial(Handed, (2,))
    with Collector(make, frames_per_batch=120) as collector:
        collector.set_seed(0)
        frames = collector.next().reshape(-1)
    with Collector(make, frames_per_batch=12, total_frames=90, trajs_per_batch=3, traj_format=traj_format) as collector:
        collector.set_seed(0)
        for episode in (row for batch in collector for row in rows_of(batch, traj_format)):
            (identity,) = set(episode["collector", "traj_ids"].tolist())
            expected = frames[frames["collector", "traj_ids"] == identity]
            assert (episode.exclude(("collector", "mask")) == expected).all()
            assert expected["next", "robots", "done"].flatten().tolist()[-1]


@pytest.mark.parametrize("kind", [Talking, Unlike])
def test_that_cross_by_value(kind):
    seen = []
    with MultiSyncCollector([kind, kind], frames_per_batch=12, trajs_per_batch=3, traj_format="cat") as collector:
        for _ in range(8):
            seen += [check(row, kind) for row in rows_of(collector.next(), "cat")]
    assert sorted(seen)[::2] == sorted(seen)[1::2], "of each worker the same"


def test_what_cannot_be_nested_is_named():
    with (
        Collector(Unlike, frames_per_batch=12, trajs_per_batch=3, traj_format="nested") as collector,
        pytest.raises(OptionError, match="as_nested"),
    ):
        collector.next()
