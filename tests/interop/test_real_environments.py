"""Environments that people use, in every form that they come in: what a batch says is what a plain loop says.

The loop is written by hand, over one environment for each lane, with the same seeds and the actions that the batch
holds; over a second vector environment where lanes share their random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FilterObservation
from tensordict import TensorDictBase

from rlcollect import Collector
from rlcollect.errors import EnvError, OptionError, SpaceError
from tests.collectors.helpers import checked
from tests.envs.vector_helpers import all_keys, assert_by_hand, count, lanes_of
from tests.reference import observation_leaves

WHY = "is not installed: `make interop` installs it, and runs these"
pytestmark = pytest.mark.timeout(60)

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
RECORD = ("is_init", "step_count")
SEEDS = (11, 5, 2**31 - 1)


def minigrid(name: str, *, images: bool = False) -> gym.Env[Any, Any]:
    wrappers = pytest.importorskip("minigrid.wrappers", reason=f"MiniGrid {WHY}")
    env = gym.make(f"MiniGrid-{name}-v0", max_steps=12)
    return wrappers.ImgObsWrapper(env) if images else env


def inverted_pendulum() -> gym.Env[Any, Any]:
    pytest.importorskip("mujoco", reason=f"MuJoCo {WHY}")
    return gym.make("InvertedPendulum-v5", max_episode_steps=9)


def pong() -> gym.Env[Any, Any]:
    gym.register_envs(pytest.importorskip("ale_py", reason=f"ale-py {WHY}"))
    return gym.make("ALE/Pong-v5", max_episode_steps=7)


REALS, BYTES, WHOLE = torch.float32, torch.uint8, torch.int64


class Task:
    """An environment, and what its batches hold.

    Args:
        make: makes one.
        observed: key, shape and dtype of what is observed.
        action: shape and dtype.
        options: of the collector.
        steps: of each lane, over all batches.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env[Any, Any]],
        observed: Mapping[Any, tuple[Sequence[int], torch.dtype]],
        action: tuple[Sequence[int], torch.dtype],
        options: Mapping[str, Any] | None = None,
        steps: int = 60,
    ) -> None:
        self.make, self.observed, self.action, self.options, self.steps = make, observed, action, options or {}, steps

    def seeded(self, seed: int) -> gym.Env[Any, Any]:
        """For the loop: its first reset takes the seed; it observes what is recorded."""
        env = self.make()
        if self.options:
            env = FilterObservation(env, [key for (key,) in self.observed])
        return Seeded(env, seed)


class Seeded(gym.Wrapper):
    def __init__(self, env: gym.Env[Any, Any], seed: int) -> None:
        super().__init__(env)
        self.first: int | None = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seed, self.first = self.first, None
        return self.env.reset(seed=seed, options=options)


GRID = {("direction",): ((), WHOLE), ("image",): ((7, 7, 3), BYTES)}
WITHOUT_TEXT = {"exclude_keys": ["mission"]}
TASKS = {
    "CartPole": Task(functools.partial(gym.make, "CartPole-v1"), {("observation",): ((4,), REALS)}, ((), WHOLE)),
    "Pendulum": Task(
        functools.partial(gym.make, "Pendulum-v1", max_episode_steps=13),
        {("observation",): ((3,), REALS)},
        ((1,), REALS),
    ),
    "InvertedPendulum": Task(inverted_pendulum, {("observation",): ((4,), REALS)}, ((1,), REALS)),  # of float64
    "Pong": Task(pong, {("observation",): ((210, 160, 3), BYTES)}, ((), WHOLE), steps=20),
    "MiniGrid": Task(functools.partial(minigrid, "Empty-5x5"), GRID, ((), WHOLE), WITHOUT_TEXT),
    "MiniGrid, another text each time": Task(
        functools.partial(minigrid, "Fetch-5x5-N2"), GRID, ((), WHOLE), WITHOUT_TEXT
    ),
    "MiniGrid, images alone": Task(
        functools.partial(minigrid, "Empty-5x5", images=True), {("observation",): ((7, 7, 3), BYTES)}, ((), WHOLE)
    ),
}
tasks = pytest.mark.parametrize("name", TASKS)


def batches_of(made: Any, task: Task, seeds: Sequence[int], **options: Any) -> list[TensorDictBase]:
    """All batches, each held against the one before it; the last is a short one."""
    many = len(seeds)
    given = {**task.options, "frames_per_batch": many * 9, "total_frames": many * task.steps, "record": RECORD}
    with Collector(made, **{**given, **options}) as collector:
        collector.set_seed(list(seeds))
        batches = list(checked(collector))
        assert collector.exhausted
        assert count(batches) == collector.collected_frames == many * task.steps
    assert sum(int(batch["next", "done"].sum()) for batch in batches) > 1
    return batches


def assert_forms(batches: Iterable[TensorDictBase], task: Task) -> None:
    """Keys, shapes and dtypes, all of them."""
    flags = dict.fromkeys(("done", "terminated", "truncated", "is_init"), ((1,), torch.bool))
    after = {key: form for key, form in flags.items() if key != "is_init"}
    forms = {
        **task.observed,
        **{("next", *key): form for key, form in task.observed.items()},
        ("action",): task.action,
        ("next", "reward"): ((1,), REALS),
        ("step_count",): ((1,), WHOLE),
        ("next", "step_count"): ((1,), WHOLE),
        **{(key,): form for key, form in flags.items()},
        **{("next", key): form for key, form in after.items()},
        ("collector", "traj_ids"): ((), WHOLE),
        ("collector", "policy_version"): ((), WHOLE),
    }
    for batch in batches:
        assert batch.names[-1] == "time"
        assert all_keys(batch) - {("collector", "mask")} == forms.keys()
        for key, (shape, dtype) in forms.items():
            assert batch[key].dtype == dtype, key
            assert batch[key].shape == (*batch.batch_size, *shape), key


def assert_as_the_loop(batches: Sequence[TensorDictBase], task: Task, seeds: Sequence[int]) -> None:
    assert_forms(batches, task)
    assert_by_hand(batches, [functools.partial(task.seeded, seed) for seed in seeds])


# --- one environment a lane -------------------------------------------------------------------------------------------


@tasks
class TestLanes:
    def test_a_single_lane(self, name):
        task = TASKS[name]
        batches = batches_of(task.make, task, SEEDS[:1])
        assert all(batch.batch_dims == 1 for batch in batches)
        assert_forms(batches, task)
        assert_by_hand([batch.unsqueeze(0) for batch in batches], [functools.partial(task.seeded, SEEDS[0])])

    def test_of_one_maker(self, name):
        task = TASKS[name]
        assert_as_the_loop(batches_of(task.make, task, SEEDS, num_envs=3), task, SEEDS)

    def test_instances(self, name):
        task, made = TASKS[name], [TASKS[name].make() for _ in SEEDS]
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)
        made[0].reset()  # they are still open
        for env in made:
            env.close()


# --- vector environments ----------------------------------------------------------------------------------------------

TEXT_IN_SHARED_MEMORY = ("MiniGrid", "MiniGrid, another text each time")  # which gymnasium refuses


@tasks
class TestVectorEnvironments:
    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_sync(self, name, mode):
        task = TASKS[name]
        made = functools.partial(SyncVectorEnv, [task.make] * 3, autoreset_mode=mode)
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)

    @pytest.mark.parametrize(
        ("mode", "masked"),
        [(NEXT_STEP, True), (NEXT_STEP, False), (SAME_STEP, True), (SAME_STEP, False), (DISABLED, True)],
    )
    def test_sync_stepped_as_it_is(self, name, mode, masked):
        task = TASKS[name]
        made = functools.partial(SyncVectorEnv, [task.make] * 3, autoreset_mode=mode)
        assert_as_the_loop(batches_of(made, task, SEEDS, masked_reset=masked), task, SEEDS)

    def test_async(self, name):
        task = TASKS[name]
        shared = name not in TEXT_IN_SHARED_MEMORY
        made = functools.partial(AsyncVectorEnv, [task.make] * 3, shared_memory=shared)
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)

    @pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
    def test_async_in_other_modes(self, name, mode):
        task = TASKS[name]
        made = functools.partial(AsyncVectorEnv, [task.make] * 3, shared_memory=False, autoreset_mode=mode)
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)


class TestLimits:
    @pytest.mark.parametrize("name", ["CartPole", "InvertedPendulum", "MiniGrid"])
    @pytest.mark.parametrize("form", ["lanes", "sync", "async"])
    def test_of_episodes(self, name, form):
        task = TASKS[name]
        made, options = task.make, {"num_envs": 3}
        if form == "sync":
            made, options = functools.partial(SyncVectorEnv, [task.make] * 3), {"masked_reset": True}
        elif form == "async":
            mode = functools.partial(AsyncVectorEnv, [task.make] * 3, shared_memory=False, autoreset_mode=DISABLED)
            made, options = mode, {}
        batches = batches_of(made, task, SEEDS, max_frames_per_traj=5, **options)
        assert_forms(batches, task)
        assert_by_hand(batches, [functools.partial(task.seeded, seed) for seed in SEEDS], limit=5)


# --- as gymnasium.make_vec makes them ---------------------------------------------------------------------------------


def in_step(env: VectorEnv, actions: Sequence[np.ndarray[Any, Any]]) -> list[dict[Any, list[Any]]]:
    """Steps a vector environment in mode NEXT_STEP, each lane through its own actions, and writes down the frames.

    Args:
        env: seeded, and not reset since.
        actions: of each lane.
    """
    many, space = len(actions), env.single_observation_space
    frames: list[dict[Any, list[Any]]] = [{} for _ in actions]
    made, ages, pending = [0] * many, [0] * many, [False] * many
    shown = observation_leaves(space, env.reset()[0])
    while any(have < len(asked) for have, asked in zip(made, actions, strict=True)):
        chosen = [each[min(have, len(each) - 1)] for have, each in zip(made, actions, strict=True)]
        observation, rewards, terminated, truncated, _ = env.step(np.stack(chosen))
        after = observation_leaves(space, observation)
        for lane in range(many):
            if pending[lane]:
                ages[lane] = 0
            elif made[lane] < len(actions[lane]):
                frame = {
                    **{key: value[lane] for key, value in shown.items()},
                    **{("next", *key): value[lane] for key, value in after.items()},
                    ("next", "reward"): [rewards[lane]],
                    ("next", "terminated"): [terminated[lane]],
                    ("next", "truncated"): [truncated[lane]],
                    ("next", "done"): [terminated[lane] or truncated[lane]],
                    ("step_count",): [ages[lane]],
                }
                for key, value in frame.items():
                    frames[lane].setdefault(key, []).append(np.array(value))
                made[lane], ages[lane] = made[lane] + 1, ages[lane] + 1
            pending[lane] = bool(terminated[lane] or truncated[lane])
        shown = {key: np.array(value) for key, value in after.items()}
    return frames


def assert_in_step(make: Callable[[], VectorEnv], task: Task, **options: Any) -> list[TensorDictBase]:
    """Batches from one, and the loop over another with the same seed."""
    one, other = make(), make()
    for env in (one, other):
        env.reset(seed=SEEDS[0])
    given = {"frames_per_batch": 3 * 9, "total_frames": 3 * task.steps, "record": RECORD, **task.options, **options}
    with Collector(one, **given) as collector:
        batches = list(checked(collector))
        assert count(batches) == 3 * task.steps
    assert sum(int(batch["next", "done"].sum()) for batch in batches) > 1
    assert_forms(batches, task)
    made = lanes_of(batches)
    expected = in_step(other, [frames["action"].numpy() for frames in made])
    for lane, (frames, wanted) in enumerate(zip(made, expected, strict=True)):
        for key, values in wanted.items():
            came = torch.from_numpy(np.stack(values)).to(frames[key].dtype)
            assert torch.equal(frames[key], came), (lane, key)
    one.step(one.action_space.sample())  # it is still open
    one.close()
    other.close()
    return batches


class TestMakeVec:
    def test_cartpole(self):
        """One environment of many poles, which share their random numbers; its resets heed no mask."""
        task = TASKS["CartPole"]
        assert_in_step(functools.partial(gym.make_vec, "CartPole-v1", num_envs=3), task)

    def test_cartpole_seeded_by_the_collector(self):
        def run(seed):
            with Collector(
                functools.partial(gym.make_vec, "CartPole-v1", num_envs=3), frames_per_batch=90
            ) as collector:
                collector.set_seed(seed)
                return collector.next()["observation"]

        assert torch.equal(run(3), run(3))
        assert not torch.equal(run(3), run(4))

    @pytest.mark.parametrize("mode", ["sync", "async"])
    @pytest.mark.parametrize(("identity", "name"), [("CartPole-v1", "CartPole"), ("Pendulum-v1", "Pendulum")])
    def test_the_other_modes(self, mode, identity, name):
        task = TASKS[name]
        made = functools.partial(
            gym.make_vec,
            identity,
            num_envs=3,
            vectorization_mode=mode,
            **({"max_episode_steps": 13} if name == "Pendulum" else {}),
        )
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)

    def test_what_is_default(self):
        task = TASKS["InvertedPendulum"]
        pytest.importorskip("mujoco", reason=f"MuJoCo {WHY}")
        made = functools.partial(gym.make_vec, "InvertedPendulum-v5", num_envs=3, max_episode_steps=9)
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)

    def test_minigrid_with_a_wrapper(self):
        wrappers = pytest.importorskip("minigrid.wrappers", reason=f"MiniGrid {WHY}")
        made = functools.partial(
            gym.make_vec,
            "MiniGrid-Empty-5x5-v0",
            num_envs=3,
            vectorization_mode="sync",
            wrappers=[wrappers.ImgObsWrapper],
            max_steps=12,
        )
        task = TASKS["MiniGrid, images alone"]
        assert_as_the_loop(batches_of(made, task, SEEDS), task, SEEDS)


class TestAtariVectorEnv:
    """ale-py's own, which `make_vec` makes: four frames in a stack, stepped by threads."""

    TASK = Task(lambda: None, {("observation",): ((4, 84, 84), BYTES)}, ((), WHOLE), steps=40)

    def make(self, game: str = "breakout", **options: Any) -> VectorEnv:
        ale_py = pytest.importorskip("ale_py", reason=f"ale-py {WHY}")
        return ale_py.AtariVectorEnv(game, **{"num_envs": 3, "max_num_frames_per_episode": 60, **options})

    def test_next_step(self):
        assert_in_step(self.make, self.TASK)

    def test_as_make_vec_makes_it(self):
        gym.register_envs(pytest.importorskip("ale_py", reason=f"ale-py {WHY}"))
        make = functools.partial(gym.make_vec, "ALE/Pong-v5", num_envs=3, max_num_frames_per_episode=60)
        assert type(make()).__name__ == "AtariVectorEnv"
        assert_in_step(make, self.TASK)

    def test_same_step(self):
        """Its last observations are those that the mode NEXT_STEP shows."""
        actions: list[Any] = []

        def policy(observation):
            actions.append(observation.float().sum((1, 2, 3)).long() % 4)
            return actions[-1]

        found = []
        for mode in (NEXT_STEP, SAME_STEP):
            env = self.make(autoreset_mode=mode, noop_max=0)
            env.reset(seed=3)
            with Collector(env, policy, frames_per_batch=3 * 20, total_frames=3 * 40, record=RECORD) as collector:
                found.append(lanes_of(list(checked(collector))))
            env.close()
        for one, other in zip(*found, strict=True):
            ended = one["next", "done"][:, 0]
            assert ended.sum() > 1
            for key in all_keys(other) - {("collector", "traj_ids"), ("collector", "mask")}:
                assert torch.equal(one[key], other[key]), key

    @pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
    def test_limits_by_masks(self, mode):
        options = {"max_frames_per_traj": 6, "masked_reset": True, "record": RECORD}
        env = self.make(autoreset_mode=mode)
        with Collector(env, frames_per_batch=3 * 8, total_frames=3 * 40, **options) as collector:
            batches = list(checked(collector))
        assert max(int(batch["next", "step_count"].max()) for batch in batches) == 6
        env.close()

    def test_infos(self):
        env = self.make()
        keys = ("lives", "env_id", "episode_frame_number")
        with Collector(env, frames_per_batch=3 * 20, info_keys=keys, record=RECORD) as collector:
            batch = collector.next()
        for lane, frames in enumerate(lanes_of([batch])):
            assert (frames["next", "info", "env_id"] == lane).all()
            assert (frames["next", "info", "lives"] >= 0).all()
            numbers = frames["next", "info", "episode_frame_number"]
            assert (numbers[1:] > numbers[:-1])[~frames["next", "done"][:-1, 0]].all()
        env.close()

    def test_some_lanes_at_a_time_is_refused(self):
        with pytest.raises((EnvError, OptionError)):
            Collector(self.make(num_envs=4, batch_size=2), frames_per_batch=16)


class TestText:
    @pytest.mark.parametrize("form", ["lanes", "sync", "async"])
    def test_it_is_refused_by_name_and_with_what_to_do(self, form):
        make = functools.partial(minigrid, "Empty-5x5")
        made = {
            "lanes": make,
            "sync": functools.partial(SyncVectorEnv, [make] * 2),
            "async": functools.partial(AsyncVectorEnv, [make] * 2, shared_memory=False),
        }[form]
        with pytest.raises(SpaceError, match=r"'mission'.*exclude_keys=\['mission'\]"):
            Collector(made, frames_per_batch=8)


class TestMiddleOfAnEpisode:
    @pytest.mark.parametrize("name", ["Ant-v5", "Humanoid-v5", "Reacher-v5", "InvertedDoublePendulum-v5"])
    def test_a_load_goes_on_bit_for_bit(self, name):
        """Some of what MuJoCo's environments show lags behind the positions, and follows from none of them."""
        pytest.importorskip("mujoco", reason=f"MuJoCo {WHY}")

        def made():
            return Collector(name, None, frames_per_batch=60, num_envs=2, max_frames_per_traj=41)

        with made() as collector:
            collector.set_seed(4)
            collector.next()
            state = collector.state_dict()
            expected = [collector.next().clone() for _ in range(3)]
        with made() as collector:
            collector.next()
            collector.load_state_dict(state)
            for batch in expected:
                assert (collector.next() == batch).all()
