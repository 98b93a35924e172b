"""What may be passed to a collector, in which forms, and what is said of the rest."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from rlcollect import Collector, EnvError, ExplorationType, OptionError, SpaceError, WorkerError
from rlcollect.options import How, Sink, Sync, What, Where, option_fields
from rlcollect.testing import Counter, Reuser, Tagged, check_batch
from tests.collectors.helpers import after, checked, counters, flag, joined, seen
from tests.naming import named

OPTIONS = option_fields([What, Where, How, Sink, Sync])


def leaves(batch):
    return set(batch.keys(include_nested=True, leaves_only=True))


class Observed(gym.Env):
    """Observes samples of a space; ends after three steps."""

    def __init__(self, space, action_space=None):
        self.observation_space, self.action_space = space, action_space or spaces.Discrete(2)
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 3, False, {}


class TestUnknownOptions:
    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            ("frame_per_batch", "frames_per_batch"),
            ("max_frames_per_trajectory", "max_frames_per_traj"),
            ("num_env", "num_envs"),
            ("post_proc", "postproc"),
            ("reset_at_each_iteration", "reset_at_each_iter"),
        ],
    )
    def test_the_nearest_name_is_told(self, wrong, right):
        with pytest.raises(OptionError, match=f"Collector has no option '{wrong}'.*Did you mean '{right}'"):
            Collector(Counter, **{"frames_per_batch": 4, wrong: 1})

    def test_where_none_is_near_all_are_listed(self):
        with pytest.raises(OptionError, match=r"zzzz.*frames_per_batch.*use_buffers"):
            Collector(Counter, frames_per_batch=4, zzzz=1)

    def test_frames_per_batch_must_be_there(self):
        with pytest.raises(OptionError, match=r"needs frames_per_batch=.*Frames in a batch"):
            Collector(Counter)

    def test_no_environment_is_made_for_wrong_options(self):
        def never():
            raise AssertionError

        with pytest.raises(OptionError):
            Collector(never, frames_per_batch=0)
        with pytest.raises(OptionError):
            Collector(never, frames_per_batch=4, unknown=1)


class TestWrongValues:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("frames_per_batch", value) for value in (0, -1, -5, 2.0, 1.5, "10", None, True, [1])],
            *[("total_frames", value) for value in (0, -2, 2.5, "10", None, True, float("inf"))],
            *[("max_frames_per_traj", value) for value in (-2, 2.5, "10", True)],
            *[("init_random_frames", value) for value in (-2, 2.5, "10", True)],
            *[("num_envs", value) for value in (0, -1, 2.5, "10", True)],
            *[
                (name, value)
                for name in (
                    "reset_at_each_iter",
                    "set_truncated",
                    "track_traj_ids",
                    "split_trajs",
                    "return_same_td",
                    "use_buffers",
                    "compact_obs",
                )
                for value in (1, 0, None, "yes")
            ],
            ("record", "is_initial"),
            ("record", ("is_init", "masks")),
            ("record", 5),
            ("info_keys", [("a", 1)]),
            ("info_keys", [()]),
            ("info_keys", 5),
            ("info_keys", [5]),
            ("info_keys", {"x": "float"}),
            ("rename_keys", {"a": 5}),
            ("rename_keys", ["a"]),
            ("rename_keys", {5: "a"}),
            ("exclude_keys", 5),
            ("exclude_keys", [None]),
            ("obs_dtype", "float64"),
            ("obs_dtype", torch.float64),
            ("reset_options", 5),
            ("reset_options", [("a", 1)]),
            ("create_env_kwargs", 5),
            ("create_env_kwargs", [5]),
            ("storing_device", "nowhere"),
            ("storing_device", 1.5),
            ("exploration_type", "random"),
            ("exploration_type", 5),
            ("interruptor", object()),
            ("interruptor", lambda: False),
            ("postproc", 5),
            ("postproc", [5]),
            ("postproc", [len, None]),
        ],
        ids=lambda value: named(value)[:30],
    )
    def test_each_is_an_option_error_that_names_the_option_and_shows_the_value(self, name, value):
        with pytest.raises(OptionError) as raised:
            Collector(Counter, **{"frames_per_batch": 4, name: value})
        assert isinstance(raised.value, ValueError)
        text = str(raised.value)
        assert name in text
        wrong = value
        if isinstance(value, list | tuple) and value and name != "reset_options":
            wrong = next((part for part in value if part not in ("is_init", len)), value)
        if isinstance(value, dict):
            wrong = next((part for pair in value.items() for part in pair if part not in ("a", "x")), value)
        assert repr(wrong) in text or repr(value) in text

    def test_a_device_that_is_not_there_is_refused_at_construction(self):
        if torch.cuda.is_available():
            pytest.skip("this machine has it")
        with pytest.raises(OptionError, match="storing_device"):
            Collector(Counter, frames_per_batch=4, storing_device="cuda").shutdown()

    @pytest.mark.parametrize("other", [{"split_trajs": True}, {"use_buffers": False}])
    def test_return_same_td_does_not_go_with_what_makes_new_ones(self, other):
        with pytest.raises(OptionError, match=f"return_same_td.*{next(iter(other))}"):
            Collector(Counter, frames_per_batch=4, return_same_td=True, **other)


class TestGoodValues:
    @pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, torch.tensor])
    def test_every_kind_of_integer_is_taken(self, integer):
        with Collector(
            Counter,
            frames_per_batch=integer(4),
            total_frames=integer(12),
            num_envs=integer(2),
            init_random_frames=integer(3),
            max_frames_per_traj=integer(3),
        ) as collector:
            batch = joined(list(checked(collector)))
            assert type(collector.frames_per_batch) is int
        assert list(batch.batch_size) == [2, 6]

    def test_nothing_that_was_passed_is_changed(self):
        lengths = [{"length": 2}, {"length": 3}]
        given = {
            "create_env_kwargs": lengths,
            "record": ["is_init"],
            "info_keys": {("t",): None},
            "rename_keys": {"t": "time_of_day"},
            "exclude_keys": ["nested"],
            "reset_options": {"a": [1]},
            "postproc": [lambda batch: batch],
        }
        before = copy.deepcopy({key: value for key, value in given.items() if key != "postproc"})
        makers = [functools.partial(Counter, observation="dict")] * 2
        before_makers = list(makers)
        with Collector(makers, frames_per_batch=10, total_frames=20, **given) as collector:
            list(checked(collector))
            collector.reset()
        assert {key: value for key, value in given.items() if key != "postproc"} == before
        assert len(given["postproc"]) == 1
        assert makers == before_makers

    def test_options_changed_later_have_no_effect(self):
        options, record = {"a": 1}, ["is_init"]
        env = Counter(2)
        with Collector(env, frames_per_batch=3, reset_options=options, record=record) as collector:
            record.append("worker")
            env.last_options["a"] = 5
            collector.next()
            assert env.last_options == {"a": 1}
            assert options == {"a": 1}

    def test_an_indexed_device_and_a_device_object_are_taken(self):
        for device in ("cpu", torch.device("cpu"), "cpu:0"):
            with Collector(Counter, frames_per_batch=3, storing_device=device) as collector:
                batch = collector.next()
                assert batch.device == torch.device("cpu")
                assert batch["observation"].device.type == "cpu"

    def test_storing_device_takes_every_tensor_there(self):
        with Collector(Counter, frames_per_batch=3, storing_device="meta") as collector:
            for batch in (collector.next(), collector.rollout()):
                tensors = batch.values(include_nested=True, leaves_only=True)
                assert {value.device.type for value in tensors} == {"meta"}
                assert batch.names == ["time"]

    def test_exploration_types_are_tensordicts_own(self):
        for kind in ExplorationType:
            Collector(Counter, frames_per_batch=3, exploration_type=kind).shutdown()


class TestDocumentation:
    def test_the_signature_has_every_option_with_its_default(self):
        parameters = inspect.signature(Collector).parameters
        assert list(parameters) == ["create_env_fn", "policy", *OPTIONS]
        assert parameters["policy"].default is None
        assert parameters["frames_per_batch"].default is inspect.Parameter.empty
        assert parameters["total_frames"].default == -1
        assert parameters["exploration_type"].default is ExplorationType.RANDOM
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)

    def test_the_docstring_describes_every_option(self):
        for name, field in OPTIONS.items():
            assert f"    {name}" in Collector.__doc__
            assert field.metadata["doc"] in Collector.__doc__
            assert field.metadata["doc"].endswith(".")

    def test_a_subclass_keeps_both(self):
        class Mine(Collector):
            """Mine."""

        assert inspect.signature(Mine) == inspect.signature(Collector)
        assert Mine.__doc__.startswith("Mine.")
        assert "frames_per_batch" in Mine.__doc__

    def test_a_subclass_without_a_docstring_says_its_options_once(self):
        class Mine(Collector):
            pass

        assert Mine.__doc__.count("frames_per_batch: ") == 1


class TestASequenceOfOne:
    def test_it_has_a_dimension_of_lanes(self):
        """`[make] * n` has the same rank for every n."""
        with Collector([Counter], frames_per_batch=4) as collector:
            assert collector.next().batch_size == (1, 4)


class TestNamesFromElsewhere:
    def test_a_seed_is_set_by_a_method(self):
        with pytest.raises(OptionError, match=r"set_seed\(seed\)"):
            Collector(Counter, frames_per_batch=4, seed=0)


class TestWhatACollectorIsNot:
    @pytest.mark.timeout(60)
    def test_workers_of_a_data_loader_are_refused(self):
        with Collector(Counter, frames_per_batch=4, total_frames=8) as collector:
            loader = torch.utils.data.DataLoader(
                collector, batch_size=None, collate_fn=lambda b: b, num_workers=1, multiprocessing_context="fork"
            )
            with pytest.raises(Exception, match="num_workers=0"):
                list(loader)

    def test_a_data_loader_without_workers_works(self):
        with Collector(Counter, frames_per_batch=4, total_frames=8) as collector:
            loader = torch.utils.data.DataLoader(collector, batch_size=None, collate_fn=lambda b: b)
            assert [batch.numel() for batch in loader] == [4, 4]

    @pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_it_is_not_copied(self, copying):
        with Collector(Counter, frames_per_batch=4) as collector, pytest.raises(TypeError, match="state_dict"):
            copying(collector)

    def test_it_is_true_however_long(self):
        with Collector(Counter, frames_per_batch=4) as collector:
            assert collector


class TestCreateEnvFn:
    def test_an_id(self):
        with Collector("CartPole-v1", frames_per_batch=40, total_frames=80) as collector:
            for batch in checked(collector):
                assert batch["observation"].shape == (40, 4)

    def test_an_id_with_keyword_arguments(self):
        with Collector(
            "CartPole-v1", frames_per_batch=10, create_env_kwargs={"max_episode_steps": 3}, num_envs=2
        ) as collector:
            assert flag(collector.next(), "truncated") == [[0, 0, 1, 0, 0]] * 2

    def test_a_callable_with_keyword_arguments(self):
        with Collector(Counter, frames_per_batch=10, create_env_kwargs={"length": 2}, num_envs=2) as collector:
            assert seen(collector.next()) == [[0, 1, 0, 1, 0]] * 2

    def test_keyword_arguments_one_mapping_a_lane(self):
        with Collector(
            Counter, frames_per_batch=10, create_env_kwargs=[{"length": 2}, {"length": 3}], num_envs=2
        ) as collector:
            assert seen(collector.next()) == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]

    def test_keyword_arguments_for_a_sequence(self):
        with Collector([Counter, Reuser], frames_per_batch=10, create_env_kwargs=[{"length": 2}, {}]) as collector:
            assert seen(collector.next()) == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
        with Collector((Counter, Reuser), frames_per_batch=10, create_env_kwargs={"length": 2}) as collector:
            assert seen(collector.next()) == [[0, 1, 0, 1, 0]] * 2

    def test_too_few_keyword_arguments_are_refused(self):
        with pytest.raises(OptionError, match=r"1 entries.*2 lanes"):
            Collector(Counter, frames_per_batch=10, create_env_kwargs=[{}], num_envs=2)

    def test_an_instance_is_one_lane_and_stays_its_owners(self):
        env = Counter()
        with Collector(env, frames_per_batch=10) as collector:
            assert list(collector.next().batch_size) == [10]
        assert env.closed == 0

    def test_keyword_arguments_for_an_instance_are_refused(self):
        with pytest.raises(OptionError, match=r"create_env_kwargs.*instance"):
            Collector(Counter(), frames_per_batch=10, create_env_kwargs={"length": 2})

    def test_a_sequence_of_all_kinds_is_one_lane_each(self):
        with Collector(
            [Counter(2), functools.partial(Counter, 3), lambda: TimeLimit(Counter(None), 4)], frames_per_batch=18
        ) as collector:
            batch = collector.next()
        assert seen(batch) == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]

    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_num_envs_gives_a_dimension_of_lanes(self, num_envs):
        with Collector(Counter, frames_per_batch=4, num_envs=num_envs) as collector:
            assert list(collector.next().batch_size) == [num_envs, 4 // num_envs]

    def test_a_sequence_with_num_envs_is_refused(self):
        with pytest.raises(OptionError, match=r"sequence of 2.*num_envs=2"):
            Collector([Counter, Counter], frames_per_batch=10, num_envs=2)

    def test_an_empty_sequence_is_refused(self):
        with pytest.raises(OptionError, match="empty"):
            Collector([], frames_per_batch=10)

    def test_the_same_instance_twice_is_refused(self):
        env = Counter()
        with pytest.raises(OptionError, match=r"Lanes 0 and 2 are the same"):
            Collector([env, Counter(), env], frames_per_batch=9)
        with pytest.raises(OptionError, match="same environment"):
            Collector(env, frames_per_batch=9, num_envs=3)

    def test_a_callable_that_returns_the_same_instance_twice_is_refused(self):
        env = Counter()
        with pytest.raises(OptionError, match=r"Lanes 0 and 1 are the same"):
            Collector(lambda: env, frames_per_batch=10, num_envs=2)

    @pytest.mark.parametrize("wrong", [None, 5, 1.5, object(), {"a": 1}, [None], ["CartPole-v1", 5]])
    def test_no_environment_at_all_is_refused(self, wrong):
        with pytest.raises(OptionError, match="create_env_fn must be"):
            Collector(wrong, frames_per_batch=10)

    @pytest.mark.parametrize("wrong", [None, 5, "CartPole-v1", Counter])
    def test_a_callable_that_returns_none_is_refused(self, wrong):
        with pytest.raises(OptionError, match=r"is no environment"):
            Collector(lambda: wrong, frames_per_batch=10)

    def test_an_unknown_id_says_so(self):
        with pytest.raises(gym.error.Error, match="Nowhere") as raised:
            Collector("Nowhere-v0", frames_per_batch=10)
        assert isinstance(raised.value.__cause__, WorkerError)

    def test_what_was_made_before_a_refusal_is_closed(self):
        made = []

        def make():
            made.append(Counter())
            return made[-1]

        with pytest.raises(OptionError):
            Collector([make, make, lambda: None], frames_per_batch=9)
        assert [env.closed for env in made] == [1, 1]
        with pytest.raises(SpaceError):
            Collector([make, functools.partial(Counter, observation="dict")], frames_per_batch=10)
        assert made[-1].closed == 1

    def test_old_gym_environments_are_refused(self):
        class Old:
            def reset(self):
                return 0

            def step(self, action):
                return 0, 0.0, False, {}

        with pytest.raises(OptionError):
            Collector(Old, frames_per_batch=10)


class TestSpacesThatDiffer:
    @pytest.mark.parametrize(
        ("one", "other", "difference"),
        [
            (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,)), r"lane 2 .* observation space .*\(3,\)"),
            (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (2,), np.float64), "lane 2 .*float64"),
            (spaces.Box(0, 1, (2,)), spaces.Discrete(2), "lane 2 .*Discrete"),
            (spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=spaces.Discrete(2)), r"lane 2 .*\['b'\].*\['a'\]"),
            (
                spaces.Dict(a=spaces.Dict(b=spaces.Box(0, 1, (2,)))),
                spaces.Dict(a=spaces.Dict(b=spaces.Box(0, 1, (3,)))),
                r"lane 2 .*observation\['a'\]\['b'\]",
            ),
            (
                spaces.Tuple((spaces.Discrete(2),)),
                spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
                "lane 2 .*keys",
            ),
        ],
    )
    def test_the_lane_and_the_difference_are_named(self, one, other, difference):
        with pytest.raises(SpaceError, match=difference):
            Collector([Observed(one), Observed(one), Observed(other)], frames_per_batch=9)

    def test_actions_must_be_the_same_in_their_bounds_too(self):
        space = spaces.Discrete(2)
        with pytest.raises(SpaceError, match=r"lane 1 .*action space Discrete\(3\)"):
            Collector([Observed(space), Observed(space, spaces.Discrete(3))], frames_per_batch=10)

    def test_bounds_of_observations_may_differ(self):
        one, other = spaces.Box(0, 1, (2,)), spaces.Box(0, 2, (2,))
        with Collector([Observed(one), Observed(other)], frames_per_batch=10) as collector:
            check_batch(collector.next())

    def test_the_order_of_keys_means_nothing(self):
        one = spaces.Dict([("a", spaces.Discrete(2)), ("b", spaces.Box(5, 6, (2,)))])
        other = spaces.Dict([("b", spaces.Box(5, 6, (2,))), ("a", spaces.Discrete(2))])
        with Collector([Observed(one), Observed(other)], frames_per_batch=10) as collector:
            batch = collector.next()
        assert (batch["b"] >= 5).all()
        assert batch["a"].shape == (2, 5)


class TestKeys:
    nested = functools.partial(Counter, observation="dict")

    def test_a_dict_space_gives_its_own_keys_nested(self):
        """FAULTS 10: unbatched and batched alike."""
        with (
            Collector(self.nested, frames_per_batch=4) as one,
            Collector(self.nested, frames_per_batch=4, num_envs=1) as other,
        ):
            batches = one.next(), other.next()
        assert leaves(batches[0]) == leaves(batches[1])
        assert batches[0]["nested", "grid"].shape == (4, 2, 3)
        assert batches[1]["next", "nested", "grid"].shape == (1, 4, 2, 3)
        assert {batch["nested", "grid"].dtype for batch in batches} == {torch.int64}

    def test_a_tuple_space_gives_numbers_below_observation(self):
        with Collector(functools.partial(Counter, observation="tuple"), frames_per_batch=4) as collector:
            batch = collector.next()
        assert batch["observation", "0"].flatten().tolist() == [0, 1, 2, 3]
        assert batch["next", "observation", "1"].shape == (4, 2, 3)

    @pytest.mark.parametrize("key", ["t", ("t",)])
    def test_rename_a_key(self, key):
        with Collector(self.nested, frames_per_batch=4, rename_keys={key: ("clock", "now")}) as collector:
            batch = collector.next()
        check_batch(batch)
        assert batch["clock", "now"].flatten().tolist() == [0, 1, 2, 3]
        assert batch["next", "clock", "now"].flatten().tolist() == [1, 2, 3, 4]
        assert ("next", "nested", "grid") in leaves(batch)
        assert not {"t", ("next", "t")} & leaves(batch)

    def test_rename_the_observation_of_a_plain_space(self):
        with Collector(Counter, frames_per_batch=4, rename_keys={"observation": "pixels"}) as collector:
            batch = collector.next()
        check_batch(batch)
        assert {"pixels", ("next", "pixels")} <= leaves(batch)
        assert "observation" not in leaves(batch)

    def test_rename_a_whole_branch_and_a_leaf_within(self):
        space = spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2), c=spaces.Discrete(2)))
        with Collector(Observed(space), frames_per_batch=4, rename_keys={"a": "x", ("a", "c"): "y"}) as collector:
            assert {("x", "b"), "y", ("next", "x", "b"), ("next", "y")} <= leaves(collector.next())

    @pytest.mark.parametrize("key", ["nested", ("nested",), ("nested", "grid")])
    def test_exclude_a_key(self, key):
        with Collector(self.nested, frames_per_batch=4, exclude_keys=[key]) as collector:
            batch = collector.next()
        check_batch(batch)
        assert not any("nested" in key for key in leaves(batch))
        assert batch["next", "t"].flatten().tolist() == [1, 2, 3, 4]

    def test_one_name_is_one_key(self):
        with Collector(self.nested, frames_per_batch=4, exclude_keys="nested") as collector:
            assert ("nested", "grid") not in leaves(collector.next())

    @pytest.mark.parametrize("option", ["exclude_keys", "rename_keys"])
    def test_an_unknown_key_is_told_the_nearest(self, option):
        value = {"netsed": "x"} if option == "rename_keys" else ["netsed"]
        with pytest.raises(OptionError, match=f"{option} names 'netsed'"):
            Collector(self.nested, frames_per_batch=4, **{option: value})
        value = {("nested", "gird"): "x"} if option == "rename_keys" else [("nested", "gird")]
        with pytest.raises(OptionError, match=r"Did you mean \('nested', 'grid'\)"):
            Collector(self.nested, frames_per_batch=4, **{option: value})

    def test_leaving_out_everything_is_refused(self):
        with pytest.raises(SpaceError, match="Nothing is left"):
            Collector(self.nested, frames_per_batch=4, exclude_keys=["nested", "t"])

    @pytest.mark.parametrize("name", ["action", "reward", "done", "terminated", "truncated", "next", "collector"])
    def test_a_key_that_is_ours_is_refused_unless_it_is_renamed(self, name):
        env = Observed(spaces.Dict({name: spaces.Discrete(3), "x": spaces.Discrete(3)}))
        with pytest.raises(SpaceError, match=rf"'{name}'.*rename_keys"):
            Collector(env, frames_per_batch=4)
        with Collector(env, frames_per_batch=4, rename_keys={name: "theirs"}) as collector:
            check_batch(batch := collector.next())
            assert {"theirs", ("next", "theirs")} <= leaves(batch)
        with Collector(env, frames_per_batch=4, exclude_keys=[name]) as collector:
            check_batch(collector.next())

    @pytest.mark.parametrize(
        ("name", "option"), [("is_init", {"record": "is_init"}), ("info", {"info_keys": {"x": spaces.Discrete(2)}})]
    )
    def test_some_names_are_ours_only_when_asked_for(self, name, option):
        env = Observed(spaces.Dict({name: spaces.Discrete(3)}))
        with pytest.raises(SpaceError, match=name):
            Collector(env, frames_per_batch=4, **option)
        Collector(env, frames_per_batch=4).shutdown()

    @pytest.mark.parametrize("new", ["action", ("next", "x"), "done"])
    def test_renaming_to_a_name_of_ours_is_refused(self, new):
        with pytest.raises(SpaceError, match="name of ours"):
            Collector(self.nested, frames_per_batch=4, rename_keys={"t": new})

    @pytest.mark.parametrize("new", [("nested", "grid"), "nested", ("nested", "grid", "x")])
    def test_renaming_onto_another_key_is_refused(self, new):
        with pytest.raises(SpaceError, match="Two parts"):
            Collector(self.nested, frames_per_batch=4, rename_keys={"t": new})


class TestDtypes:
    def test_float64_becomes_torchs_default_float(self):
        make = functools.partial(Counter, dtype=np.float64)
        with Collector(make, frames_per_batch=4) as collector:
            assert collector.next()["observation"].dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            with Collector(make, frames_per_batch=4) as collector:
                batch = collector.next()
        finally:
            torch.set_default_dtype(torch.float32)
        assert batch["next", "observation"].dtype is torch.float64
        assert batch["next", "reward"].dtype is torch.float32

    def test_obs_dtype_env_keeps_it(self):
        space = spaces.Dict(a=spaces.Box(0, 1, (2,), np.float64), b=spaces.Box(0, 1, (2,), np.float32))
        with Collector(Observed(space), frames_per_batch=4, obs_dtype="env") as collector:
            batch = collector.next()
        assert (batch["a"].dtype, batch["next", "a"].dtype) == (torch.float64, torch.float64)
        assert batch["b"].dtype is torch.float32

    @pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.uint16])
    def test_other_dtypes_are_the_spaces(self, dtype):
        with Collector(functools.partial(Counter, dtype=dtype), frames_per_batch=4) as collector:
            observation = collector.next()["observation"]
        assert observation.numpy().dtype == dtype
        assert observation.flatten().tolist() == [0, 1, 2, 3]

    def test_bool_observations(self):
        with Collector(Observed(spaces.Box(0, 1, (2,), np.bool_)), frames_per_batch=4) as collector:
            assert collector.next()["observation"].dtype is torch.bool


class TestSpacesWithoutTensorForm:
    formless = {  # noqa: RUF012
        "text": spaces.Text(5),
        "sequence": spaces.Sequence(spaces.Discrete(3)),
        "graph": spaces.Graph(spaces.Box(0, 1, (2,)), None),
        "one of": spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
    }

    @pytest.mark.parametrize("name", sorted(formless))
    def test_the_key_is_named(self, name):
        with pytest.raises(SpaceError, match=r"'observation'.*no tensor form"):
            Collector(Observed(self.formless[name]), frames_per_batch=4)

    @pytest.mark.parametrize("name", sorted(formless))
    def test_it_can_be_left_out(self, name):
        env = Observed(spaces.Dict(a=spaces.Dict(b=self.formless[name]), c=spaces.Discrete(3)))
        with pytest.raises(SpaceError, match=r"\('a', 'b'\).*no tensor form.*exclude_keys"):
            Collector(env, frames_per_batch=4)
        with Collector(env, frames_per_batch=4, exclude_keys=[("a", "b")]) as collector:
            check_batch(batch := collector.next())
            assert ("next", "c") in leaves(batch)

    @pytest.mark.parametrize("name", sorted(formless))
    def test_actions_of_such_a_space_are_refused(self, name):
        with pytest.raises(SpaceError, match=r"'action'.*no tensor form") as raised:
            Collector(Observed(spaces.Discrete(2), self.formless[name]), frames_per_batch=4)
        assert "exclude_keys" not in str(raised.value)  # an action cannot be left out


class Informing(Counter):
    """Its info is what a function of (t, is it a reset) says; where it says None, there is none."""

    def __init__(self, info, length=3):
        super().__init__(length)
        self.info = info

    def _inform(self):
        return self.info(self.t)


def informed(info, keys, frames=6, **options):
    with Collector(Informing(info), frames_per_batch=frames, info_keys=keys, **options) as collector:
        batch = collector.next()
    check_batch(batch)
    return batch["next", "info"]


class TestInfoKeys:
    @pytest.mark.parametrize("keys", ["t", ["t"], ("t",), {"t": None}, [("t",)]])
    def test_a_scalar_belongs_to_the_observation_it_came_with(self, keys):
        info = informed(lambda t: {"t": t}, keys)
        assert info["t"].tolist() == [1, 2, 3, 1, 2, 3]
        assert info["t"].dtype is torch.int64

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            (1.5, torch.float32),
            (np.float64(1.5), torch.float32),
            (np.float32(1.5), torch.float32),
            (True, torch.bool),
            (np.bool_(True), torch.bool),
            (np.uint8(3), torch.uint8),
            (np.int16(3), torch.int16),
            (3, torch.int64),
            (np.arange(6, dtype=np.float32).reshape(2, 3), torch.float32),
            ([1, 2, 3], torch.int64),
            ([[1.5], [2.5]], torch.float32),
            (np.zeros((0,), np.float32), torch.float32),
        ],
        ids=repr,
    )
    def test_the_resets_info_shows_the_form(self, value, dtype):
        info = informed(lambda t: {"x": value}, "x")
        assert info["x"].dtype is dtype
        assert info["x"].shape == (6, *np.shape(value))
        assert all(np.array_equal(row, np.asarray(value)) for row in info["x"].numpy())

    def test_nested_keys(self):
        info = informed(lambda t: {"a": {"b": t, "c": 2.0 * t}, "d": t}, [("a", "b"), ("a", "c"), "d"])
        assert info["a", "b"].tolist() == [1, 2, 3, 1, 2, 3]
        assert info["a", "c"].tolist() == [2, 4, 6, 2, 4, 6]
        assert info["d"].tolist() == [1, 2, 3, 1, 2, 3]

    def test_a_batch_of_lanes(self):
        with Collector(counters(2, 3), frames_per_batch=8, info_keys="t") as collector:
            assert collector.next()["next", "info", "t"].tolist() == [[1, 2, 1, 2], [1, 2, 3, 1]]

    def test_one_absent_at_the_reset_is_a_float32_scalar(self):
        info = informed(lambda t: {"x": t} if t else {}, "x")
        assert info["x"].dtype is torch.float32
        assert info["x"].tolist() == [1, 2, 3, 1, 2, 3]

    def test_one_that_is_none_at_the_reset_counts_as_absent(self):
        info = informed(lambda t: {"x": t or None}, "x")
        assert info["x"].tolist() == [1, 2, 3, 1, 2, 3]

    @pytest.mark.parametrize(
        ("value", "fill"), [(1.5, np.nan), (np.int16(7), -1), (7, -1), (np.uint8(7), 0), (True, False)]
    )
    def test_where_the_env_left_it_out_the_row_holds_a_fill(self, value, fill):
        info = informed(lambda t: {"x": value} if t != 2 else {}, "x")
        np.testing.assert_array_equal(info["x"].numpy(), np.array([value, fill, value] * 2))

    @pytest.mark.parametrize("use_buffers", [True, False])
    def test_a_fill_is_not_what_stood_there_before(self, use_buffers):
        info = {"x": 5}
        with Collector(
            Informing(lambda t: dict(info)), frames_per_batch=6, info_keys="x", use_buffers=use_buffers
        ) as collector:
            assert collector.next()["next", "info", "x"].tolist() == [5] * 6
            info.clear()
            assert collector.next()["next", "info", "x"].tolist() == [-1] * 6

    @pytest.mark.parametrize(
        ("space", "value", "dtype"),
        [
            (spaces.Box(0, 9, (2,), np.float64), np.ones(2), torch.float64),
            (spaces.Box(0, 9, (2,), np.float64), np.ones(2, np.float32), torch.float64),
            (spaces.Discrete(5), 3, torch.int64),
            (spaces.MultiBinary(2), np.ones(2, np.int8), torch.int8),
            (spaces.Box(-9, 9, (), np.float32), 3, torch.float32),
        ],
    )
    def test_a_space_states_another_form(self, space, value, dtype):
        info = informed(lambda t: {"x": value} if t == 2 else {}, {"x": space})
        assert info["x"].dtype is dtype
        assert info["x"].shape == (6, *space.shape)
        assert np.array_equal(info["x"][1].numpy(), np.asarray(value))

    @pytest.mark.parametrize(
        ("first", "later"),
        [(0, 0.5), (0.0, np.ones(1)), (np.zeros(2), np.zeros(3)), (np.zeros(2), 1.0), (0, "x"), (True, 2), (0.0, {})],
    )
    def test_a_value_that_does_not_fit_names_key_lane_and_step(self, first, later):
        envs = [Informing(lambda t: {"a": {"b": first}}), Informing(lambda t: {"a": {"b": later if t == 2 else first}})]
        with Collector(envs, frames_per_batch=12, info_keys=[("a", "b")]) as collector:
            with pytest.raises(EnvError, match=r"lane 1, step 1: .*\('a', 'b'\)"):
                collector.next()
            assert collector.closed

    @pytest.mark.parametrize("value", ["text", object(), [[1], [2, 3]], None.__class__, 1j])
    def test_one_that_is_not_numeric_is_refused_at_construction(self, value):
        with pytest.raises(SpaceError, match="'x'"):
            Collector(Informing(lambda t: {"x": value}), frames_per_batch=4, info_keys="x")

    @pytest.mark.parametrize("key", ["never", ("a", "never"), ("a", "b", "c")])
    def test_one_that_never_comes_is_an_error(self, key):
        with (
            Collector(Informing(lambda t: {"a": {"b": 1}}), frames_per_batch=6, info_keys=[key]) as collector,
            pytest.raises(EnvError, match=r"lane 0, step 2: .*info_keys.*never|c.*episode"),
        ):
            collector.next()

    def test_one_that_never_comes_is_an_error_where_a_limit_of_the_environment_ends_its_episodes(self):
        env = TimeLimit(Informing(lambda t: {"a": 1}, length=None), 3)
        with Collector(env, frames_per_batch=20, info_keys="never") as collector:  # noqa: SIM117
            with pytest.raises(EnvError, match="'never'"):
                collector.next()

    def test_where_a_limit_of_ours_cuts_them_off_it_is_waited_for(self):
        """It might have come at the end of a whole episode, as those of RecordEpisodeStatistics do."""
        env = Informing(lambda t: {"a": 1}, length=None)
        with Collector(env, frames_per_batch=297, info_keys="never", max_frames_per_traj=3) as collector:
            collector.next()
            with pytest.raises(EnvError, match="'never'"):
                collector.next()

    def test_one_that_comes_with_the_last_step_of_an_episode_is_fine(self):
        info = informed(lambda t: {"x": 7.0} if t == 3 else {}, "x")
        assert info["x"].nan_to_num(-1).tolist() == [-1, -1, 7, -1, -1, 7]

    def test_a_rare_one_whose_form_is_stated_is_waited_for(self):
        info = informed(lambda t: {}, {"x": spaces.Discrete(3)}, frames=6)
        assert info["x"].tolist() == [-1] * 6
        with (
            Collector(
                Informing(lambda t: {}, length=1), frames_per_batch=1000, info_keys={"x": spaces.Discrete(3)}
            ) as collector,
            pytest.raises(EnvError, match=r"'x'.*100 episode"),
        ):
            collector.next()

    def test_gymnasiums_episode_statistics(self):
        """The entries that people log; they come with the last step of an episode alone."""
        make = functools.partial(lambda length: RecordEpisodeStatistics(Counter(length)), 3)
        with Collector(
            make, frames_per_batch=12, num_envs=2, info_keys=[("episode", "r"), ("episode", "l")]
        ) as collector:
            info = collector.next()["next", "info", "episode"]
        nan = float("nan")
        np.testing.assert_array_equal(info["r"], [[nan, nan, 3, nan, nan, 3]] * 2)
        np.testing.assert_array_equal(info["l"], [[nan, nan, 3, nan, nan, 3]] * 2)

    def test_an_info_dict_used_again_gives_right_data(self):
        """FAULTS 6: the info of the last step, not of the reset after it."""
        with Collector(Reuser(3), frames_per_batch=6, info_keys="t") as collector:
            assert collector.next()["next", "info", "t"].flatten().tolist() == [1, 2, 3, 1, 2, 3]

    def test_with_limits_interruptions_and_short_batches(self):
        with Collector(
            Counter(None), frames_per_batch=5, total_frames=12, info_keys="t", max_frames_per_traj=4
        ) as collector:
            info = joined(list(checked(collector)))["next", "info", "t"]
        assert info.tolist() == [t % 4 + 1 for t in range(12)]

    def test_check_batch_leaves_infos_alone(self):
        with Collector(Counter(3), frames_per_batch=5, total_frames=10, info_keys="t") as collector:
            list(checked(collector))


class TestResetOptions:
    def test_a_mapping_goes_to_every_reset(self):
        env, given = Counter(2), []
        env.reset = lambda reset=env.reset, **kw: given.append(kw) or reset(**kw)
        with Collector(env, frames_per_batch=5, reset_options={"a": 1}, reset_at_each_iter=True) as collector:
            for _ in range(2):
                collector.next()
            collector.reset()
        assert len(given) == 1 + 2 + 1 + 2 + 1
        assert all(kw["options"] == {"a": 1} for kw in given)
        assert len({id(kw["options"]) for kw in given}) == len(given)  # fresh dicts: environments may change them

    def test_without_them_environments_get_none(self):
        env, given = Counter(2), []
        env.reset = lambda reset=env.reset, **kw: given.append(kw) or reset(**kw)
        with Collector(env, frames_per_batch=5) as collector:
            collector.next()
        assert all(kw.get("options") is None for kw in given)

    def test_a_callable_gets_the_lane_the_episode_and_the_last_info(self):
        """FAULTS 84."""
        calls = []

        def options(lane, episode, info):
            calls.append((lane, episode, dict(info)))
            return {"level": episode}

        envs = counters(2, 3)
        with Collector(envs, frames_per_batch=12, reset_options=options) as collector:
            collector.next()
            assert calls == [
                (0, 0, {}),
                (1, 0, {}),
                (0, 1, {"t": 2}),
                (1, 1, {"t": 3}),
                (0, 2, {"t": 2}),
                (0, 3, {"t": 2}),
                (1, 2, {"t": 3}),
            ]
            assert [env.last_options for env in envs] == [{"level": 3}, {"level": 2}]

    def test_limits_and_resets_at_each_batch_count_as_well(self):
        calls = []
        with Collector(
            Counter(None),
            frames_per_batch=5,
            max_frames_per_traj=2,
            reset_at_each_iter=True,
            reset_options=lambda *call: calls.append((call[0], call[1], dict(call[2]))),
        ) as collector:
            collector.next()
            collector.next()
        infos = [{}, {"t": 2}, {"t": 2}, {"t": 1}, {"t": 2}, {"t": 2}]
        assert calls == [(0, episode, info) for episode, info in enumerate(infos)]

    def test_an_info_dict_used_again_is_that_of_the_last_step(self):
        calls = []
        with Collector(
            Reuser(2), frames_per_batch=4, reset_options=lambda _l, _e, info: calls.append(int(info.get("t", [-1])[0]))
        ) as collector:
            collector.next()
        assert calls == [-1, 2, 2]

    def test_a_callable_may_give_none(self):
        env = Counter(2)
        with Collector(env, frames_per_batch=5, reset_options=lambda *_: None) as collector:
            collector.next()
        assert env.last_options is None

    def test_those_of_a_call_of_reset_win(self):
        env = Counter(2)
        with Collector(env, frames_per_batch=5, reset_options={"a": 1}) as collector:
            collector.reset(options={"b": 2})
            assert env.last_options == {"b": 2}
            collector.next()
            assert env.last_options == {"a": 1}

    @pytest.mark.parametrize("when", [0, 1])
    def test_a_callable_that_gives_no_mapping_is_told_so(self, when):
        def options(_lane, episode, _info):
            return {} if episode < when else 5

        with pytest.raises((OptionError, TypeError, EnvError), match="reset_options"):  # noqa: SIM117
            with Collector(Counter(2), frames_per_batch=5, reset_options=options) as collector:
                collector.next()

    def test_they_go_with_info_keys_and_seeds(self):
        env = Counter(2)
        with Collector(env, frames_per_batch=5, reset_options={"a": 1}, info_keys="t") as collector:
            collector.set_seed([7])
            assert collector.next()["next", "info", "t"].tolist() == [1, 2, 1, 2, 1]
        assert env.seeds == [7]
        assert env.last_options == {"a": 1}


class TestReturnSameTd:
    def test_the_object_is_the_same_and_its_contents_are_overwritten(self):
        with Collector(Counter(7), frames_per_batch=4, return_same_td=True) as collector:
            first = collector.next()
            observations = first["observation"]
            assert observations.flatten().tolist() == [0, 1, 2, 3]
            second = collector.next()
            assert second is first
            assert second["observation"].data_ptr() == observations.data_ptr()
            assert observations.flatten().tolist() == [4, 5, 6, 0]
            check_batch(second)

    def test_data_is_right(self):
        with Collector(counters(2, 3), frames_per_batch=8, total_frames=20, return_same_td=True) as collector:
            batches = [batch.clone() for batch in collector]
        list(checked(batches))
        assert [batch.shape[1] for batch in batches] == [4, 4, 2]

    @pytest.mark.parametrize("device", [None, "cpu", "meta"])
    def test_keys_of_the_users_stay_and_ours_come_back(self, device):
        with Collector(Counter(None), frames_per_batch=4, return_same_td=True, storing_device=device) as collector:
            batch = collector.next()
            batch["mine"] = torch.zeros(4)
            batch["observation"] = batch["observation"].double() * 100
            del batch["action"]
            assert collector.next() is batch
            assert {"mine", "action"} <= leaves(batch)
            assert batch["observation"].dtype is torch.float32
            if device != "meta":
                assert batch["observation"].flatten().tolist() == [4, 5, 6, 7]

    @pytest.mark.parametrize("device", [None, "cpu", "meta"])
    def test_with_a_storing_device_too(self, device):
        with Collector(Counter, frames_per_batch=4, return_same_td=True, storing_device=device) as collector:
            assert collector.next() is collector.next()

    def test_without_it_batches_are_different_objects(self):
        with Collector(Counter, frames_per_batch=4) as collector:
            assert collector.next() is not collector.next()


class TestUseBuffers:
    def test_without_them_every_batch_has_new_memory(self):
        with Collector(Counter(7), frames_per_batch=4, total_frames=40, use_buffers=False) as collector:
            batches = [batch.clone() for batch in collector]
        list(checked(batches))
        assert seen(joined(batches)) == [t % 7 for t in range(40)]
        assert after(joined(batches)) == [t % 7 + 1 for t in range(40)]


class TestSeedsAndIndices:
    """Arguments of methods are refused as options are, and leave the collector open."""

    @pytest.mark.parametrize("seed", [-1, [1], [1, 2, 3], [-1, 2], [], 1.5, "7", None, [1.5, 2], np.array([1.5, 2.5])])
    def test_wrong_seeds(self, seed):
        with Collector(counters(2, 2), frames_per_batch=4) as collector:
            with pytest.raises((OptionError, TypeError)):
                collector.set_seed(seed)
            assert not collector.closed
            check_batch(collector.next())

    @pytest.mark.parametrize("seeds", [[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6])])
    def test_a_list_of_seeds_is_used_as_given(self, seeds):
        """FAULTS 102."""
        envs = counters(2, 2)
        with Collector(envs, frames_per_batch=4) as collector:
            assert collector.set_seed(seeds) == 7
            collector.next()
        assert [env.seeds for env in envs] == [[5], [6]]

    @pytest.mark.parametrize("seed", [5, np.int64(5), np.uint8(5)])
    def test_an_integer_of_any_kind(self, seed):
        with Collector(counters(2, 2), frames_per_batch=4) as collector:
            assert collector.set_seed(seed) == 6
            assert collector.set_seed(seed, static_seed=True) == 5

    @pytest.mark.parametrize("index", [2, -1, [0, 2], [True], [True] * 3, 1.5, "0", [0.5], True])
    def test_wrong_indices(self, index):
        with Collector(counters(2, 2), frames_per_batch=4) as collector:
            with pytest.raises((OptionError, TypeError)):
                collector.reset(index)
            assert not collector.closed
            check_batch(collector.next())

    def test_an_argument_that_no_reset_takes_leaves_it_open(self):
        with Collector(counters(2, 2), frames_per_batch=4) as collector:
            with pytest.raises(TypeError):
                collector.reset(sede=5)
            assert not collector.closed
            check_batch(collector.next())

    def test_tagged_lanes_keep_their_places(self):
        with Collector([Tagged(0), Tagged(1)], frames_per_batch=4) as collector:
            collector.reset([1])
            assert collector.next()["observation"][:, 0].tolist() == [[0, 0, 0], [1, 1, 0]]
