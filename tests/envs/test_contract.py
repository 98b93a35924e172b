"""Every driver keeps one contract: `rlcollect.testing.CollectionContract`, once for each.

A driver is a line in one of the tables below: a name, and what makes its environments. What cannot be said of all in a
table (no seeds, no ends, single lanes that must be resettable) is a class of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from rlcollect.errors import InvalidBatchError
from rlcollect.testing import CollectionContract, Counter, Echo, Life, Tagged, TaggedAgents, TensorTagged
from tests.collectors.helpers import Restless
from tests.envs.vector_helpers import DISABLED, NEXT_STEP, SAME_STEP, Homemade, TaggedTree

RANDOM = tuple(functools.partial(Tagged, lane, 6, random_length=True) for lane in range(3))
TREES = tuple(functools.partial(TaggedTree, lane, length) for lane, length in enumerate((1, 3, 7)))
CATS = {"cat_0": Life(ends=3), "cat_1": Life(joins=1, ends=6, end="truncated")}
Make = Callable[[], Any]


def sync(lanes: Any = RANDOM, **options: Any) -> Make:
    return functools.partial(SyncVectorEnv, lanes, **options)


def run_in_processes(lanes: Any = RANDOM[:2], **options: Any) -> Make:
    return functools.partial(AsyncVectorEnv, lanes, **options)


def wrapped(wrapper: Any, make: Make, **options: Any) -> Make:
    return lambda: wrapper(make(), **options)


def each_of(makers: Mapping[str, Make]) -> Any:
    """The contract is kept once for each of these; `make` is what a test class then has."""
    cases = [
        pytest.param(make, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, make in makers.items()
    ]
    return pytest.mark.parametrize("made_by", cases, indirect=True)


@pytest.fixture(autouse=True)
def made_by(request: pytest.FixtureRequest) -> None:
    """Gives the test's instance what makes its environments."""
    if hasattr(request, "param"):
        request.instance.make = request.param


SLOW = (  # processes that send what the others have in shared memory: one of this kind is in PENDING
    "AsyncVectorEnv without shared memory, SAME_STEP",
    "AsyncVectorEnv without shared memory, DISABLED",
)

# Lanes can be reset one by one: every option is kept.
LANES: dict[str, Make] = {
    "a single environment": lambda: Tagged(0, 6, random_length=True),
    "lanes": lambda: [make() for make in RANDOM],
    "lanes that observe a tree": lambda: [make() for make in TREES],
    "one lane of a list": lambda: [Tagged(0, 4)],
    "observations of a tuple": lambda: [Counter(length, observation="tuple") for length in (2, 5)],
    "actions of a box": lambda: [Echo((2,), length) for length in (2, 5)],
    "SyncVectorEnv, as its lanes": sync(),
    "SyncVectorEnv, as its lanes, SAME_STEP": sync(TREES, autoreset_mode=SAME_STEP),
    "SyncVectorEnv, wrapped, NEXT_STEP": wrapped(wrappers.ClipReward, sync(), max_reward=2),
    "SyncVectorEnv, wrapped, SAME_STEP": wrapped(wrappers.ClipReward, sync(autoreset_mode=SAME_STEP), max_reward=2),
    "SyncVectorEnv, wrapped, DISABLED": wrapped(wrappers.FlattenObservation, sync(TREES, autoreset_mode=DISABLED)),
    "AsyncVectorEnv, NEXT_STEP": run_in_processes(),
    "AsyncVectorEnv, SAME_STEP": run_in_processes(TREES[:2], autoreset_mode=SAME_STEP, copy=False),
    "AsyncVectorEnv, DISABLED": run_in_processes(autoreset_mode=DISABLED),
    "AsyncVectorEnv, wrapped": wrapped(wrappers.TransformObservation, run_in_processes(), func=lambda seen: seen + 1),
    "AsyncVectorEnv without shared memory, SAME_STEP": run_in_processes(autoreset_mode=SAME_STEP, shared_memory=False),
    "AsyncVectorEnv without shared memory, DISABLED": run_in_processes(
        TREES[:2], autoreset_mode=DISABLED, shared_memory=False
    ),
}

# They cannot, or are not known to: options that need it are refused.
PENDING: dict[str, Make] = {
    # what its episodes are is known by seeds alone: which of its lanes are reset twice is not
    "AsyncVectorEnv without shared memory, NEXT_STEP": run_in_processes([Restless] * 2, shared_memory=False),
    "AsyncVectorEnv, wrapped": wrapped(wrappers.RecordEpisodeStatistics, run_in_processes()),
    "SyncVectorEnv under running means": wrapped(wrappers.NormalizeObservation, sync()),
    "CartPole, vectorised": functools.partial(
        gym.make_vec, "CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"
    ),
    "a homemade one": lambda: Homemade(1, 3, None),
}


@each_of(LANES)
class TestLanes(CollectionContract):
    resets_lanes = True


# Vector environments on torch tensors.
TENSORS: dict[str, Make] = {
    "numbers": lambda: TensorTagged([1, 3, 7]),
    "a tree": lambda: TensorTagged([2, 5], nested=True, end="both"),
}

# Environments of several agents.
AGENTS: dict[str, Make] = {
    "one lane": lambda: TaggedAgents(CATS),
    "lanes": lambda: [TaggedAgents(CATS, lane, random_ends=True) for lane in range(2)],
}


@each_of(PENDING)
class TestPending(CollectionContract):
    resets_lanes = False


@each_of(TENSORS)
class TestTensors(CollectionContract):
    resets_lanes = False


@each_of(AGENTS)
class TestAgents(CollectionContract):
    action_key = ("agents", "action")
    reward_key = ("agents", "reward")


class Masked(CollectionContract):
    """A vector environment that is stepped as it is, not as its lanes."""

    options: ClassVar[Mapping[str, Any]] = {"masked_reset": True}
    resets_lanes = True


@each_of({mode.name: sync(TREES, autoreset_mode=mode) for mode in (NEXT_STEP, SAME_STEP, DISABLED)})
class TestSyncByMasks(Masked):
    pass


@each_of({mode.name: lambda mode=mode: Homemade(1, 3, None, behaves=mode) for mode in (NEXT_STEP, SAME_STEP, DISABLED)})
class TestHomemadeByMasks(Masked):
    pass


@each_of(TENSORS)
class TestTensorsByMasks(Masked):
    pass


@each_of({mode.name: sync(TREES, autoreset_mode=mode) for mode in (NEXT_STEP, SAME_STEP, DISABLED)})
class TestSyncWithoutMasks(CollectionContract):
    options: ClassVar[Mapping[str, Any]] = {"masked_reset": False}
    resets_lanes = False


@pytest.mark.filterwarnings("ignore:Homemade does not say:UserWarning")
class TestOneThatDoesNotTellItsMode(CollectionContract):
    resets_lanes = False

    def make(self) -> VectorEnv:
        return Homemade(2, 3, 5, declares="nothing", seeds="ints")


class TestEpisodesThatNeverEnd(CollectionContract):
    ends_within = None
    resets_lanes = True

    def make(self) -> Any:
        return [Tagged(lane, None) for lane in range(2)]


class TestKeysOfOtherNames(CollectionContract):
    options: ClassVar[Mapping[str, Any]] = {
        "exclude_keys": [("nested", "acted")],
        "rename_keys": {"nested": ("state", "of"), "tag": "reward_tag"},
        "obs_dtype": "env",
    }

    def make(self) -> Any:
        return [make() for make in TREES]


class TestManyLanesOfAMaker(CollectionContract):
    options: ClassVar[Mapping[str, Any]] = {"num_envs": 2}
    resets_lanes = True
    seedable = True

    def make(self) -> Any:
        return functools.partial(gym.make, "CartPole-v1", max_episode_steps=20)

    def close(self, made: Any) -> None:
        """Nothing: it is a maker."""


# --- the suite itself -------------------------------------------------------------------------------------------------


class TestTheSuite:
    """It finds what is wrong."""

    @staticmethod
    def broken(make: Make, **attributes: Any) -> set[str]:
        """The tests that fail, of a class that a user would write."""
        contract = type("Contract", (CollectionContract,), {"make": lambda self: make(), **attributes})()
        found = set()
        for name in dir(contract):
            if name.startswith("test_"):
                try:
                    getattr(contract, name)()
                except InvalidBatchError:
                    found.add(name.removeprefix("test_"))
        return found

    def test_an_environment_that_is_right(self):
        assert self.broken(lambda: Counter(3)) == set()

    def test_one_whose_seeds_mean_nothing(self):
        count = iter(range(10**6))

        class Drifting(Counter):
            def _draw_limit(self):
                return 2 + next(count) % 3

        found = self.broken(lambda: [Drifting(), Drifting()])
        assert "one_seed_gives_one_sequence" in found
        assert not {"batches_keep_what_a_batch_promises", "counts_are_exact"} & found
        assert self.broken(lambda: [Drifting(), Drifting()], seedable=False) == set()

    def test_one_that_never_ends_though_it_should(self):
        assert "batches_keep_what_a_batch_promises" in self.broken(lambda: Counter(None), ends_within=30)
        assert self.broken(lambda: Counter(None), ends_within=None) == set()

    def test_a_claim_about_lanes_that_is_not_true(self):
        claimed = {
            "a_limit_of_episodes_is_kept_or_refused",
            "a_reset_at_each_iteration_is_made_or_refused",
            "a_reset_of_one_lane_is_made_or_refused",
        }
        assert self.broken(lambda: Homemade(2, 3), resets_lanes=True) == claimed
        assert self.broken(lambda: [Counter(2), Counter(3)], resets_lanes=False) == claimed

    def test_a_wrong_number_of_lanes(self):
        assert self.broken(lambda: Homemade(2, 4, behaves=DISABLED), lanes=lambda self, made: 4)

    def test_a_space_that_is_not_what_comes(self):
        class Narrow(gym.Wrapper):
            @property
            def observation_space(self):
                return gym.spaces.Discrete(9)

        assert self.broken(lambda: Narrow(Counter(3, observation="discrete"))) == set()

    def test_make_is_asked_for(self):
        with pytest.raises(NotImplementedError, match="make"):
            CollectionContract().test_counts_are_exact()

    def test_it_needs_no_pytest(self, monkeypatch):
        source = importlib.util.find_spec("rlcollect.testing.collection_contract").origin
        spec = importlib.util.spec_from_file_location("read_once_more", source)
        monkeypatch.setitem(sys.modules, "pytest", None)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
