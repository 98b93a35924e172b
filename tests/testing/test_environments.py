"""The probes do what their docstrings say: the other tests lean on it."""

from __future__ import annotations

import doctest
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env, check_returned_data_not_reused
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rlcollect.testing
from rlcollect.errors import OptionError
from rlcollect.testing import EXIT_CODE, Breaker, Counter, Echo, Probe, Reuser, Tagged, UnpicklableError, environments

KINDS = ("box", "scalar", "discrete", "dict", "tuple")


def episode(env, action=0):
    """The first observation of an episode, and what each of its steps returned."""
    observation, _ = env.reset()
    steps = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(action))
    return observation, steps


class TestPublicNames:
    def test_everything_public_of_the_modules_is_exported(self):
        for name in environments.__all__:
            assert getattr(rlcollect.testing, name) is getattr(environments, name)

    def test_the_list_is_sorted_and_complete(self):
        names = {name for name in vars(rlcollect.testing) if not name.startswith("_")}
        modules = {"batches", "breaker", "environments", "collection_contract", "multi_agent", "tensors", "annotations"}
        assert set(rlcollect.testing.__all__) == names - modules

    @pytest.mark.parametrize("module", [environments, rlcollect.testing])
    def test_docstring_examples_run(self, module):
        assert doctest.testmod(module).failed == 0


class TestGymnasiumContract:
    @pytest.mark.parametrize(
        "make",
        [
            *[functools.partial(Counter, observation=kind) for kind in KINDS],
            functools.partial(Counter, dtype=np.uint8),
            functools.partial(Counter, dtype=np.float64, length=None),
            functools.partial(Counter, end="both"),
            functools.partial(Breaker, at=1_000_000),
        ],
    )
    def test_check_env_finds_nothing(self, make):
        check_env(make(), skip_render_check=True)

    @pytest.mark.parametrize("shape", [(1,), (), (2, 3)])
    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
    @pytest.mark.filterwarnings("ignore:.*symmetric and normalized")
    def test_check_env_finds_nothing_in_echo(self, shape, dtype):
        check_env(Echo(shape, dtype=dtype), skip_render_check=True)

    @pytest.mark.parametrize("options", [{}, {"worker": 3, "random_length": True, "dtype": np.int64}])
    def test_check_env_finds_only_that_tagged_numbers_its_episodes(self, options):
        with pytest.raises(AssertionError, match="Deterministic step observations"):
            check_env(Tagged(**options), skip_render_check=True)
        check_returned_data_not_reused(Tagged(**options))

    def test_check_env_finds_out_reuser(self):
        with pytest.raises(AssertionError, match="share an object"):
            check_env(Reuser(), skip_render_check=True)

    @pytest.mark.parametrize(
        "env", [Counter(), Tagged(), Reuser(), Echo(), Breaker(at=99)], ids=lambda env: type(env).__name__
    )
    def test_data_lies_in_the_spaces(self, env):
        observation, steps = episode(env, env.action_space.sample())
        assert all(seen in env.observation_space for seen in [observation, *(step[0] for step in steps)])

    def test_lanes_that_differ_have_equal_spaces(self):
        assert (
            Counter(2).observation_space == Counter(5, end="both").observation_space == Counter(None).observation_space
        )
        assert Tagged(0, 2).observation_space == Tagged(7, 5).observation_space

    def test_they_work_in_a_vector_environment(self):
        makers = [functools.partial(Tagged, worker=lane, length=2 + lane) for lane in range(3)]
        vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        vector.reset(seed=0)
        for _ in range(2):
            observations, *_ = vector.step(np.zeros(3, dtype=np.int64))
        assert observations.tolist() == [[0, 1, 0], [1, 0, 2], [2, 0, 2]]
        vector.close()

    @pytest.mark.parametrize("kind", [Counter, Tagged, Reuser, Echo, Breaker])
    def test_they_can_be_pickled(self, kind):
        env = pickle.loads(pickle.dumps(kind(length=3)))
        assert env.length == 3


class TestProbe:
    def test_it_observes_nothing_itself(self):
        with pytest.raises(NotImplementedError):
            Probe().reset()

    @pytest.mark.parametrize("length", [0, -1])
    def test_length_below_one_is_refused(self, length):
        with pytest.raises(OptionError, match=r"length .* at least 1"):
            Counter(length)

    def test_unknown_end_is_refused(self):
        with pytest.raises(OptionError, match=r"end must be one of .*got 'done'"):
            Counter(end="done")

    def test_it_counts_resets_steps_and_closes(self):
        env = Counter(length=2)
        episode(env)
        episode(env)
        env.reset()
        env.step(0)
        env.close()
        env.close()
        assert (env.resets, env.steps, env.closed) == (3, 5, 2)

    def test_it_remembers_seeds_and_options(self):
        env, options = Counter(), {"level": 3}
        env.reset(seed=11, options=options)
        assert (env.last_seed, env.last_options, env.seeds) == (11, options, [11])
        assert env.last_options is options
        env.reset()
        assert (env.last_seed, env.last_options, env.seeds) == (None, None, [11])
        env.reset(seed=0)
        assert (env.last_seed, env.seeds) == (0, [11, 0])

    def test_it_remembers_the_action_until_the_next_reset(self):
        env, action = Counter(), np.int64(1)
        env.reset()
        assert env.last_action is None
        env.step(action)
        assert env.last_action is action
        env.reset()
        assert env.last_action is None

    def test_a_seed_starts_the_random_stream_anew(self):
        env = Counter()
        env.reset(seed=5)
        first = env.np_random.random()
        env.reset()
        assert env.np_random.random() != first
        env.reset(seed=5)
        assert env.np_random.random() == first

    def test_a_step_before_the_first_reset_is_refused(self):
        with pytest.raises(ResetNeeded):
            Counter().step(0)

    def test_a_step_after_the_end_is_refused_and_not_counted(self):
        env = Counter(length=2)
        episode(env)
        with pytest.raises(ResetNeeded, match="t = 2 of episode 0"):
            env.step(0)
        assert env.steps == 2

    def test_a_closed_one_is_refused(self):
        env = Counter()
        env.reset()
        env.close()
        with pytest.raises(ClosedEnvironmentError):
            env.step(0)
        with pytest.raises(ClosedEnvironmentError):
            env.reset()


class TestCounter:
    def test_observation_reward_and_info_of_an_episode(self):
        env = Counter(length=3)
        observation, info = env.reset()
        assert observation.tolist() == [0]
        assert observation.dtype == np.float32
        assert info == {"t": 0}
        steps = [env.step(0) for _ in range(3)]
        assert [step[0].tolist() for step in steps] == [[1], [2], [3]]
        assert [step[1] for step in steps] == [0.0, 1.0, 2.0]
        assert [step[4] for step in steps] == [{"t": 1}, {"t": 2}, {"t": 3}]
        assert all(type(step[4]["t"]) is int for step in steps)

    @pytest.mark.parametrize(
        ("end", "flags"), [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))]
    )
    def test_the_last_step_alone_raises_the_flags(self, end, flags):
        _, steps = episode(Counter(length=4, end=end))
        assert [step[2:4] for step in steps] == [(False, False)] * 3 + [flags]

    def test_the_clock_starts_again_with_each_episode(self):
        env = Counter(length=2)
        first, second = episode(env), episode(env)
        assert first[0].tolist() == second[0].tolist() == [0]
        assert len(second[1]) == 2

    def test_a_reset_in_the_middle_starts_again(self):
        env = Counter(length=3)
        env.reset()
        env.step(0)
        assert episode(env)[0].tolist() == [0]

    def test_no_length_never_ends(self):
        env = Counter(length=None)
        env.reset()
        assert not any(flag for _ in range(1000) for flag in env.step(0)[2:4])
        assert env.t == 1000

    def test_forms_of_the_observation(self):
        seen = {}
        for kind in KINDS:
            env = Counter(observation=kind)
            env.reset()
            seen[kind] = env.step(0)[0]
        assert (seen["box"].shape, seen["scalar"].shape) == ((1,), ())
        assert isinstance(seen["discrete"], np.int64)
        assert seen["dict"]["t"].dtype == np.float32
        grid = seen["dict"]["nested"]["grid"]
        assert (grid.shape, grid.dtype, np.unique(grid).tolist()) == ((2, 3), np.int64, [1])
        assert [part.shape for part in seen["tuple"]] == [(1,), (2, 3)]

    @pytest.mark.parametrize("dtype", [np.float32, "float64", np.float16, np.int64, np.uint8])
    def test_dtype_of_the_observation(self, dtype):
        assert Counter(dtype=dtype).reset()[0].dtype == np.dtype(dtype)

    @pytest.mark.parametrize(
        "options", [{"dtype": np.uint8}, {"dtype": np.int8}, {"dtype": np.float16}, {"observation": "discrete"}]
    )
    def test_a_length_that_cannot_be_counted_to_is_refused(self, options):
        with pytest.raises(OptionError, match=r"counts to \d+; got length=5000"):
            Counter(length=5000, **options)

    def test_unknown_forms_and_dtypes_are_refused(self):
        with pytest.raises(OptionError, match="observation must be one of"):
            Counter(observation="image")
        with pytest.raises(OptionError, match="dtype must be an integer or floating type; got bool"):
            Counter(dtype=bool)

    def test_returned_arrays_are_the_callers(self):
        env = Counter()
        kept = [env.reset()[0], *(env.step(0)[0] for _ in range(3))]
        assert [array.tolist() for array in kept] == [[0], [1], [2], [3]]


class TestTagged:
    def test_observation_is_worker_episode_and_t(self):
        env = Tagged(worker=4, length=2)
        first, second = episode(env), episode(env)
        assert [first[0].tolist(), *(step[0].tolist() for step in first[1])] == [[4, 0, 0], [4, 0, 1], [4, 0, 2]]
        assert [second[0].tolist(), *(step[0].tolist() for step in second[1])] == [[4, 1, 0], [4, 1, 1], [4, 1, 2]]

    @pytest.mark.parametrize("dtype", [np.float32, np.int64])
    def test_dtype(self, dtype):
        assert Tagged(dtype=dtype).reset()[0].dtype == dtype

    def lengths(self, seed, count=50):
        env = Tagged(length=6, random_length=True)
        env.reset(seed=seed)
        return [len(episode(env)[1]) for _ in range(count)]

    def test_random_lengths_are_from_one_to_length(self):
        assert set(self.lengths(seed=0)) == {1, 2, 3, 4, 5, 6}

    def test_the_seed_gives_the_lengths(self):
        assert self.lengths(seed=1) == self.lengths(seed=1) != self.lengths(seed=2)

    def test_random_length_needs_a_length(self):
        with pytest.raises(OptionError, match="give a length"):
            Tagged(length=None, random_length=True)


class TestReuser:
    @pytest.mark.parametrize("kind", ["box", "scalar", "dict", "tuple"])
    def test_it_returns_the_same_objects_changed_in_place(self, kind):
        env = Reuser(length=3, observation=kind)
        observation, info = env.reset()
        t = info["t"]
        seen, _, _, _, seen_info = env.step(0)
        assert seen is observation
        assert seen_info is info
        assert seen_info["t"] is t
        assert t.tolist() == [1]
        assert env.reset()[0] is observation
        assert t.tolist() == [0]

    def test_parts_are_the_same_too(self):
        env = Reuser(observation="dict")
        grid = env.reset()[0]["nested"]["grid"]
        assert env.step(0)[0]["nested"]["grid"] is grid
        assert np.unique(grid).tolist() == [1]

    def test_it_counts_as_a_counter(self):
        env = Reuser(length=3)
        values = [float(env.reset()[0][0]), *(float(env.step(0)[0][0]) for _ in range(3))]
        assert values == [0, 1, 2, 3]

    def test_two_of_them_share_nothing(self):
        assert Reuser().reset()[0] is not Reuser().reset()[0]

    def test_discrete_is_refused(self):
        with pytest.raises(OptionError, match="cannot be reused"):
            Reuser(observation="discrete")


class TestEcho:
    def test_observation_and_reward_are_the_action(self):
        env = Echo(shape=(2,))
        assert env.reset()[0].tolist() == [0, 0]
        observation, reward, *_ = env.step(np.array([3, 4], dtype=np.float32))
        assert observation.tolist() == [3, 4]
        assert reward == 3.0
        assert type(reward) is float
        assert env.reset()[0].tolist() == [0, 0]

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
    def test_shapes(self, shape):
        env = Echo(shape)
        env.reset()
        observation, reward, *_ = env.step(np.full(shape, 7, dtype=np.float32))
        assert observation.shape == shape
        assert reward == 7

    def test_observation_does_not_share_memory_with_the_action(self):
        env, action = Echo(), np.ones(1, dtype=np.float32)
        env.reset()
        observation = env.step(action)[0]
        action[0] = 2
        assert observation.tolist() == [1]

    def test_an_action_of_another_shape_is_refused(self):
        env = Echo(shape=(2,))
        env.reset()
        with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
            env.step(np.zeros(1))

    def test_it_ends_as_told(self):
        _, steps = episode(Echo(length=2, end="truncated"), np.zeros(1))
        assert [step[2:4] for step in steps] == [(False, False), (False, True)]


class TestBreakerRaises:
    def test_in_the_kth_step_and_makes_no_frame_of_it(self):
        env = Breaker(where="step", at=3)
        env.reset()
        env.step(0)
        env.step(0)
        with pytest.raises(RuntimeError, match="call 3 of step"):
            env.step(0)
        assert env.steps == 2

    def test_and_later_calls_work(self):
        env = Breaker(where="step", at=1)
        env.reset()
        with pytest.raises(RuntimeError):
            env.step(0)
        assert env.step(0)[0].tolist() == [1]

    def test_at_every_call_if_asked(self):
        env = Breaker(where="reset", at=None)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                env.reset()
        assert env.resets == 0

    def test_in_the_kth_reset(self):
        env = Breaker(where="reset", at=2)
        env.reset()
        with pytest.raises(RuntimeError, match="call 2 of reset"):
            env.reset()

    def test_in_close(self):
        env = Breaker(where="close")
        with pytest.raises(RuntimeError, match="call 1 of close"):
            env.close()
        env.close()
        assert env.closed == 1

    def test_in_the_constructor(self):
        with pytest.raises(RuntimeError, match="call 1 of constructor"):
            Breaker(where="constructor")

    def test_what_it_was_given(self):
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught:
            Breaker(where="constructor", exception=error)
        assert caught.value is error

    @pytest.mark.parametrize("factory", [ZeroDivisionError, lambda: ZeroDivisionError("made")])
    def test_what_a_factory_makes(self, factory):
        with pytest.raises(ZeroDivisionError):
            Breaker(where="constructor", exception=factory)

    def test_something_that_no_pickler_takes(self):
        with pytest.raises(UnpicklableError) as caught:
            Breaker(where="constructor", exception=UnpicklableError)
        for pickler in (pickle, cloudpickle):
            with pytest.raises(TypeError):
                pickler.dumps(caught.value)

    def test_once_over_several_lives(self, tmp_path):
        make = functools.partial(Breaker, where="reset", once=tmp_path / "broke")
        with pytest.raises(RuntimeError):
            make().reset()
        make().reset()
        assert (tmp_path / "broke").exists()


class TestBreakerStalls:
    def test_sleep_delays_the_call_and_goes_on(self):
        env = Breaker("sleep", "step", at=2, seconds=0.1)
        env.reset()
        started = time.monotonic()
        env.step(0)
        assert time.monotonic() - started < 0.1
        assert env.step(0)[0].tolist() == [2]
        assert time.monotonic() - started >= 0.1

    def test_hang_returns_for_a_signal_only(self):
        class Woken(Exception):  # noqa: N818 - it is no error
            pass

        def wake(number, frame):
            raise Woken

        before = signal.signal(signal.SIGUSR1, wake)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
        started = time.monotonic()
        try:
            timer.start()
            with pytest.raises(Woken):
                Breaker("hang", "reset").reset()
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        assert time.monotonic() - started >= 0.3


class TestBreakerDies:
    @pytest.mark.parametrize(("how", "status"), [("exit", EXIT_CODE), ("kill", -signal.SIGKILL)])
    @pytest.mark.slow
    def test_the_process_ends_without_clean_up(self, how, status):
        script = (
            "import atexit; from rlcollect.testing import Breaker; atexit.register(print, 'cleaned up', flush=True)\n"
            f"env = Breaker({how!r}, 'step', at=2)\n"
            "env.reset(); env.step(0); print('one step', flush=True); env.step(0); print('too far', flush=True)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status
        assert done.stdout == "one step\n"


class TestBreakerOptions:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"how": "explode"}, "how must be one of"),
            ({"where": "render"}, "where must be one of"),
            ({"at": 0}, "at counts calls from 1"),
            ({"where": "constructor", "at": 2}, "a constructor is called once"),
        ],
    )
    def test_nonsense_is_refused(self, options, text):
        with pytest.raises(OptionError, match=text):
            Breaker(**options)

    def test_it_is_a_counter_otherwise(self):
        env = Breaker(at=99, length=2, end="both", observation="scalar", dtype=np.int64)
        observation, steps = episode(env)
        assert (observation.shape, observation.dtype) == ((), np.int64)
        assert [step[2:4] for step in steps] == [(False, False), (True, True)]

    def test_it_can_be_registered_and_made(self):
        gymnasium.register("ProbeBreaker-v0", entry_point=Breaker)
        try:
            env = gymnasium.make("ProbeBreaker-v0", where="reset", at=2)
            env.reset(seed=0)
            with pytest.raises(RuntimeError, match="call 2 of reset"):
                env.reset()
        finally:
            del gymnasium.registry["ProbeBreaker-v0"]
