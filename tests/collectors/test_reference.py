"""Batches against a plain loop, element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from rlcollect import Collector
from rlcollect.testing import check_batch
from tests.reference import ACTION_SPACES, OBSERVATION_SPACES, Scripted, ScriptedPolicy, reference

scripts = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated", "both"])), min_size=1, max_size=4
)


def collect(
    scripts: list[Any], lanes: int | None, steps: int, total: int, space: str, action: str, **options: Any
) -> list[TensorDictBase]:
    observation_space, action_space = OBSERVATION_SPACES[space], ACTION_SPACES[action]
    envs = [Scripted(i, scripts[i % len(scripts)], observation_space, action_space) for i in range(lanes or 1)]
    policy = ScriptedPolicy(action_space, lanes)
    collector = Collector(
        envs if lanes else envs[0],
        policy,
        frames_per_batch=steps * len(envs),
        total_frames=total * len(envs),
        record=("is_init", "step_count"),
        **options,
    )
    with collector:
        batches = list(collector)
    expected_envs = [Scripted(i, scripts[i % len(scripts)], observation_space, action_space) for i in range(lanes or 1)]
    expected = reference(expected_envs, policy.actions, total, options.get("max_frames_per_traj"))
    assert len(batches) == math.ceil(total / steps)
    whole = torch.cat(batches, -1)
    assert_equal(whole if lanes else whole[None], expected)
    for env, other in zip(envs, expected_envs, strict=True):
        assert repr(env.received) == repr(other.received)
        assert env.episode == other.episode  # resets = episodes that began
    previous = None
    for batch in batches:
        check_batch(batch, previous=previous)
        previous = batch
    return batches


def assert_equal(batch: TensorDictBase, expected: dict[Any, np.ndarray[Any, Any]]) -> None:
    keys = {key if isinstance(key, tuple) else (key,) for key in batch.keys(include_nested=True, leaves_only=True)}
    assert keys == {*expected, ("collector", "policy_version")}
    for key, value in expected.items():
        got = batch.get(key)
        wanted = torch.from_numpy(value).to(got.dtype)
        assert got.shape == wanted.shape, key
        assert torch.equal(got, wanted), key


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(scripts, min_size=1, max_size=3),
    lanes=st.one_of(st.none(), st.integers(2, 4)),
    steps=st.integers(1, 9),
    total=st.integers(1, 20),
    space=st.sampled_from(sorted(OBSERVATION_SPACES)),
    action=st.sampled_from(sorted(ACTION_SPACES)),
)
def test_random_done_patterns_lanes_batch_sizes_and_spaces(
    scripts: list[Any], lanes: int | None, steps: int, total: int, space: str, action: str
) -> None:
    collect(scripts, lanes, steps, total, space, action)


@settings(max_examples=40, deadline=None)
@given(
    scripts=st.lists(scripts, min_size=1, max_size=3),
    lanes=st.one_of(st.none(), st.integers(2, 4)),
    steps=st.integers(1, 9),
    total=st.integers(1, 20),
    limit=st.integers(1, 5),
)
def test_an_episode_limit_of_ours_beside_the_environments_own(
    scripts: list[Any], lanes: int | None, steps: int, total: int, limit: int
) -> None:
    collect(scripts, lanes, steps, total, "dict", "discrete", max_frames_per_traj=limit)


@pytest.mark.parametrize("space", sorted(OBSERVATION_SPACES))
@pytest.mark.parametrize("lanes", [None, 3])
def test_every_observation_space(space: str, lanes: int | None) -> None:
    collect([[(3, "terminated"), (2, "truncated")]], lanes, 4, 10, space, "discrete")


@pytest.mark.parametrize("action", sorted(ACTION_SPACES))
@pytest.mark.parametrize("lanes", [None, 3])
def test_every_action_space(action: str, lanes: int | None) -> None:
    collect([[(3, "terminated"), (2, "both")]], lanes, 4, 10, "box", action)


@pytest.mark.parametrize("sizes", [(1, 17), (3, 7), (20, 5)])
def test_the_size_of_a_batch_is_not_part_of_the_data(sizes: tuple[int, int]) -> None:
    """FAULTS 22: the same frames, flags and ids whatever they are cut into."""
    one, other = (
        torch.cat(collect([[(3, "truncated")], [(4, "both")]], 2, steps, 20, "box", "discrete"), -1) for steps in sizes
    )
    assert (one == other).all()
