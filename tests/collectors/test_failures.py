"""What is raised where frames are made, and in which state it leaves the collector."""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn.probabilistic import interaction_type, set_interaction_type

from rlcollect import ClosedError, Collector, EnvError, InvalidBatchError, OptionError, PolicyError, WorkerError
from rlcollect.testing import Breaker, Counter, Tagged, UnpicklableError, check_batch
from tests.collectors.helpers import checked, counters, ids, interrupt_at_call, joined

MISREAD = [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt]


class BespokeError(Exception):
    """An exception with a constructor that cannot be called again."""

    def __init__(self, one, two):
        super().__init__(one, two)
        self.one, self.two = one, two


def raising(exception, after=0):
    """A callable of anything that passes its first argument through, and raises after so many calls."""
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise exception
        return arguments[0] if arguments else None

    return call


def raised_by(call):
    """Whatever a call raises, without ending the tests where that is a `KeyboardInterrupt` or `SystemExit`."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def zero(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Stopper:
    """An interruptor that raises when it is asked for the k-th time."""

    def __init__(self, exception, after):
        self.collection_stopped = raising(exception, after)

    def start_collection(self):
        pass

    def stop_collection(self):
        pass


def chain(error):
    """The exception with all its causes, as text."""
    return "".join(traceback.format_exception(error))


def check_report(error, *, lane, step, exception=None):
    """The exception came from a `WorkerError` that says who, where and what."""
    report = error.__cause__
    assert isinstance(report, WorkerError), repr(report)
    assert (report.worker, report.lane, report.step) == (0, lane, step)
    assert "worker 0" in str(report)
    assert f"step {step}" in str(report)
    assert type(error).__name__ in str(report)
    assert __file__ in report.worker_traceback
    return report


class TestEnvironmentsThatRaise:
    @pytest.mark.parametrize("at", [1, 2, 7, 200])
    @pytest.mark.parametrize("lane", [0, 2])
    def test_in_a_step(self, at, lane):
        """FAULTS 48: the same exception, who, where, and the traceback of the user's own line."""
        error = BespokeError("a", at)
        envs = counters(5, 5, 5)
        envs[lane] = Breaker(at=at, exception=error)
        with Collector(envs, frames_per_batch=30) as collector:
            with pytest.raises(BespokeError) as raised:
                list(collector)
            assert raised.value is error
            report = error.__cause__
            assert isinstance(report, WorkerError)
            assert (report.worker, report.lane, report.step) == (0, lane, at - 1)
            assert f"lane {lane}" in str(report)
            assert "raise self._make_exception()" in report.worker_traceback
            assert "breaker.py" in report.worker_traceback
            assert collector.closed

    @pytest.mark.parametrize("at", [1, 3])
    def test_in_a_reset(self, at):
        """The first comes at construction, a later one when an episode has ended."""
        env = Breaker(where="reset", at=at, exception=BespokeError("a", 1), length=4)
        with pytest.raises(BespokeError) as raised:  # noqa: SIM117
            with Collector([Counter(), env], frames_per_batch=20) as collector:
                list(collector)
        report = raised.value.__cause__
        assert isinstance(report, WorkerError)
        assert report.lane == 1
        assert report.step == (0 if at == 1 else 7)  # the last step of its second episode is not done yet
        assert "raise self._make_exception()" in report.worker_traceback

    @pytest.mark.parametrize("cause", ["limit", "reset", "reset_at_each_iter", "set_seed"])
    def test_in_a_reset_that_the_collector_wants(self, cause):
        env = Breaker(where="reset", at=2, length=None)
        options = {
            "limit": {"max_frames_per_traj": 3},
            "reset_at_each_iter": {"reset_at_each_iter": True},
        }.get(cause, {})
        with Collector([Counter(None), env], frames_per_batch=10, **options) as collector:
            if cause != "limit":
                collector.next()
            if cause == "set_seed":
                collector.set_seed(0)
            with pytest.raises(RuntimeError, match="Breaker broke") as raised:
                collector.reset() if cause == "reset" else collector.next()
            report = raised.value.__cause__
            assert (report.worker, report.lane, report.step) == (0, 1, 2 if cause == "limit" else 5)
            assert collector.closed

    def test_in_the_constructor(self):
        made = []

        def make(number):
            if number == 2:
                raise BespokeError("in", "constructor")
            made.append(Counter())
            return made[-1]

        with pytest.raises(BespokeError) as raised:
            Collector([functools.partial(make, number) for number in range(4)], frames_per_batch=8)
        check_report(raised.value, lane=2, step=0)
        assert 'raise BespokeError("in", "constructor")' in raised.value.__cause__.worker_traceback
        assert [env.closed for env in made] == [1, 1]

    def test_in_the_constructor_of_a_breaker(self):
        with pytest.raises(RuntimeError, match="Breaker broke") as raised:
            Collector([Counter, functools.partial(Breaker, where="constructor")], frames_per_batch=8)
        assert raised.value.__cause__.lane == 1

    def test_a_cause_of_their_own_is_kept(self):
        class Chained(Counter):
            def step(self, action):
                raise RuntimeError("second") from BespokeError(1, 2)

        with Collector(Chained, frames_per_batch=4) as collector:
            with pytest.raises(RuntimeError, match="second") as raised:
                collector.next()
            report = check_report(raised.value, lane=0, step=0)
            assert isinstance(report.__cause__, BespokeError)
            assert "BespokeError: (1, 2)" in report.worker_traceback
            assert "BespokeError: (1, 2)" in chain(raised.value)

    def test_one_that_no_pickler_takes(self):
        """FAULTS 54."""
        with Collector(functools.partial(Breaker, exception=UnpicklableError), frames_per_batch=4) as collector:
            with pytest.raises(UnpicklableError) as raised:
                collector.next()
            assert raised.value.__cause__.lane == 0

    @pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError, IndexError, AssertionError, OSError])
    def test_every_type_stays_its_own(self, kind):
        """Even those that also show that a value does not fit."""

        class Raising(Counter):
            def step(self, action):
                if self.t == 2:
                    raise kind("mine")
                return super().step(action)

        with Collector(Raising, frames_per_batch=4) as collector:
            with pytest.raises(kind, match="mine") as raised:
                collector.next()
            assert type(raised.value) is kind
            check_report(raised.value, lane=0, step=2)


class TestPoliciesThatRaise:
    @pytest.mark.parametrize("lanes", [None, 3])
    @pytest.mark.parametrize("after", [1, 2, 9])
    def test_in_a_call(self, lanes, after):
        """The first call is the probe's; then one a step."""
        error = BespokeError("p", 1)
        fails = raising(error, after)

        def policy(observation):
            fails()
            return zero(observation)

        with Collector(Counter, policy, num_envs=lanes, frames_per_batch=12) as collector:
            with pytest.raises(BespokeError) as raised:
                list(collector)
            assert raised.value is error
            report = check_report(error, lane=None, step=after - 1)
            assert "lane" not in str(report)
            assert "raise exception" in report.worker_traceback
            assert collector.closed

    def test_in_a_module(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.calls = 0

            def forward(self, observation):
                self.calls += 1
                if self.calls == 4:
                    raise BespokeError("net", 4)
                return zero(observation)

        with Collector(Counter, Net(), frames_per_batch=12) as collector:
            with pytest.raises(BespokeError) as raised:
                collector.next()
            report = check_report(raised.value, lane=None, step=2)
            assert 'raise BespokeError("net", 4)' in report.worker_traceback

    def test_in_the_probe_call(self):
        with pytest.raises(PolicyError, match=r"first observation.*BespokeError") as raised:
            Collector(Counter, raising(BespokeError("p", 1)), frames_per_batch=12)
        assert isinstance(raised.value.__cause__, BespokeError)

    def test_an_action_out_of_its_space_is_named(self):
        def policy(observation):
            return (observation[0] > 1).long() * 5

        with Collector(Counter, policy, frames_per_batch=12) as collector:
            with pytest.raises(PolicyError, match=r"worker 0, step 2.*action 5.*Discrete\(2\)"):
                collector.next()
            assert collector.closed


class TestHooksThatRaise:
    @pytest.mark.parametrize("after", [0, 2])
    def test_postproc(self, after):
        error = BespokeError("h", 1)
        with Collector(Counter, frames_per_batch=4, postproc=raising(error, after)) as collector:
            with pytest.raises(BespokeError) as raised:
                list(collector)
            assert raised.value is error
            assert collector.closed
            report = error.__cause__
            assert isinstance(report, WorkerError)
            assert report.worker == 0
            assert report.lane is None
            assert "raise exception" in report.worker_traceback

    def test_interruptor(self):
        error = BespokeError("h", 1)
        with Collector(Counter, frames_per_batch=8, interruptor=Stopper(error, 3)) as collector:
            with pytest.raises(BespokeError) as raised:
                list(collector)
            assert raised.value is error
            assert collector.closed
            report = error.__cause__
            assert isinstance(report, WorkerError)
            assert report.lane is None
            assert "raise exception" in report.worker_traceback

    @pytest.mark.parametrize("after", [0, 1, 3])
    def test_reset_options(self, after):
        error = BespokeError("h", 1)
        with pytest.raises(BespokeError) as raised:  # noqa: SIM117
            with (
                Collector(counters(3, 3), frames_per_batch=16, reset_options=lambda *call: fails() or {})
                if (fails := raising(error, after))
                else None as collector
            ):
                list(collector)
        assert raised.value is error
        check_report(error, lane=after % 2, step=0 if after < 2 else 2)


class TestMisreadExceptions:
    """Rule 15: what would be taken for the end of a loop or a program comes out as a `WorkerError` from it."""

    def run(self, kind, where, *, later=2):
        """Collects, with `kind` raised in one place."""
        fails = raising(kind("mine"), later if where != "probe" else 0)

        class Raising(Counter):
            def step(self, action):
                if where == "step":
                    fails()
                return super().step(action)

            def reset(self, **kwargs):
                if where == "reset":
                    fails()
                return super().reset(**kwargs)

        def policy(observation):
            if where in ("policy", "probe"):
                fails()
            return zero(observation)

        options = {
            "reset_options": {"reset_options": lambda *_: fails() or {}},
            "postproc": {"postproc": fails},
            "interruptor": {"interruptor": Stopper(kind("mine"), later)},
        }.get(where, {})
        with Collector(functools.partial(Raising, 3), policy, frames_per_batch=4, **options) as collector:
            for _ in range(10):
                collector.next()

    @pytest.mark.parametrize("kind", MISREAD)
    @pytest.mark.parametrize("where", ["step", "reset", "policy", "reset_options", "postproc", "interruptor", "probe"])
    def test_none_comes_out_as_itself(self, kind, where):
        error = raised_by(lambda: self.run(kind, where))
        assert isinstance(error, PolicyError if where == "probe" and kind is StopIteration else WorkerError), repr(
            error
        )
        assert isinstance(error.__cause__, kind)
        if isinstance(error, WorkerError):
            assert error.worker == 0
            assert "raise exception" in error.worker_traceback

    @pytest.mark.parametrize("kind", MISREAD)
    @pytest.mark.parametrize("where", ["constructor", "reset"])
    def test_not_at_construction_either(self, kind, where):
        made = Counter()
        makers = [lambda: made, functools.partial(Breaker, where=where, exception=kind)]
        error = raised_by(lambda: Collector(makers, frames_per_batch=4))
        assert isinstance(error, WorkerError), repr(error)
        assert (error.lane, error.step) == (1, 0)
        assert isinstance(error.__cause__, kind)
        assert made.closed == 1

    @pytest.mark.parametrize("kind", MISREAD)
    @pytest.mark.parametrize("where", ["step", "interruptor"])
    def test_nor_at_the_first_step(self, kind, where):
        """Which is one of those that are looked at more closely."""
        error = raised_by(lambda: self.run(kind, where, later=0))
        assert isinstance(error, WorkerError), repr(error)
        assert isinstance(error.__cause__, kind)

    @pytest.mark.parametrize("kind", MISREAD)
    @pytest.mark.parametrize("call", ["reset", "set_seed", "limit"])
    def test_nor_in_a_reset_that_the_collector_wants(self, kind, call):
        limit = {"max_frames_per_traj": 2} if call == "limit" else {}
        env = Breaker(where="reset", at=2, exception=kind, length=None)
        with Collector(env, frames_per_batch=4, **limit) as collector:
            if call == "set_seed":
                collector.set_seed(0)
            error = raised_by(collector.reset if call == "reset" else collector.next)
            assert isinstance(error, WorkerError), repr(error)
            assert isinstance(error.__cause__, kind)
            assert error.lane == 0
            assert collector.closed

    @pytest.mark.parametrize("kind", MISREAD)
    def test_the_collector_is_closed_after_it(self, kind):
        env = Breaker(at=3, exception=kind)
        collector = Collector(lambda: env, frames_per_batch=8)
        with pytest.raises(WorkerError):
            collector.next()
        assert collector.closed
        assert env.closed == 1

    @pytest.mark.parametrize("kind", [StopIteration, GeneratorExit])
    def test_a_loop_does_not_end_in_silence(self, kind):
        broken = functools.partial(Breaker, at=10, exception=kind)
        with Collector(broken, frames_per_batch=4) as collector, pytest.raises(WorkerError):
            list(collector)


class Interrupted(Tagged):
    """Somebody types Ctrl-C during its k-th call of a method."""

    def __init__(self, where, at, worker=0, length=5, make=lambda: signal.raise_signal(signal.SIGINT)):
        super().__init__(worker, length)
        self.where, self.at, self.make = where, at, make
        self.calls = 0

    def count(self, where):
        if where == self.where:
            self.calls += 1
            if self.calls == self.at:
                self.make()

    def step(self, action):
        self.count("step")
        return super().step(action)

    def reset(self, **kwargs):
        self.count("reset")
        return super().reset(**kwargs)


class TestCtrlC:
    """A real one stays a KeyboardInterrupt and leaves the collector open; the batch under way is dropped."""

    @pytest.mark.parametrize("lanes", [1, 2])
    @pytest.mark.parametrize("at", [1, 2, 6, 13, 14])
    @pytest.mark.parametrize("where", ["step", "reset"])
    @pytest.mark.parametrize("limit", [None, 3])
    def test_in_an_environment(self, lanes, at, where, limit):
        if where == "reset" and at == 1:
            pytest.skip("at construction")
        envs = [*(Tagged(0, 4) for _ in range(lanes - 1)), Interrupted(where, at, 1)]
        with Collector(envs, frames_per_batch=6 * lanes, max_frames_per_traj=limit, info_keys="t") as collector:
            batches, interrupted = [], 0
            while len(batches) < 16:
                try:
                    batches.append(collector.next())
                except KeyboardInterrupt as error:
                    interrupted += 1
                    assert error.__cause__ is None  # noqa: PT017
                    assert not collector.closed
            assert interrupted == 1
            assert collector.collected_frames == 16 * 6 * lanes
        previous = None
        for batch in batches:
            check_batch(batch, previous=previous)
            assert (batch["observation"][..., :2] == batch["next", "observation"][..., :2]).all()
            previous = batch

    def test_the_frames_of_the_dropped_batch_come_all_the_same(self):
        with Collector(Interrupted("step", 7), frames_per_batch=4, total_frames=12) as collector:
            batches = [collector.next()]
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batches += list(collector)
            assert collector.collected_frames == 12
        list(checked(batches))
        assert sum(len(batch) for batch in batches) == 12
        assert set(ids(batches[0])).isdisjoint(ids(batches[1]))

    def test_in_a_policy(self):
        calls = []

        def policy(observation):
            calls.append(1)
            if len(calls) == 8:
                signal.raise_signal(signal.SIGINT)
            return zero(observation)

        with Collector(counters(5, None), policy, frames_per_batch=8, init_random_frames=3) as collector:
            batches = [collector.next()]
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batches += [collector.next(), collector.next()]
        list(checked(batches))
        before, now = (set(batch["collector", "traj_ids"].flatten().tolist()) for batch in batches[:2])
        assert before.isdisjoint(now)

    def test_random_states_and_the_exploration_type_are_put_back(self):
        before, kind = torch.get_rng_state(), interaction_type()
        with Collector(Interrupted("step", 3), frames_per_batch=8) as collector:
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            assert torch.equal(torch.get_rng_state(), before)
            assert interaction_type() is kind
            assert torch.is_grad_enabled()

    def test_during_a_reset_that_was_asked_for(self):
        """Lanes that were reset before it came are cut as well; none is joined to what was there before."""
        with Collector([Tagged(0, None), Interrupted("reset", 2, 1, None)], frames_per_batch=8) as collector:
            first = collector.next()
            with pytest.raises(KeyboardInterrupt):
                collector.reset()
            assert not collector.closed
            second = collector.next()
        check_batch(first)
        check_batch(second, previous=first)

    def test_during_the_reset_of_a_new_seed(self):
        """The seed is still used: the data are those of a run that nobody interrupted."""
        envs = [Interrupted("reset", 2, 0, None), Tagged(1, None)]
        with Collector(envs, frames_per_batch=8) as collector:
            collector.set_seed([7, 8])
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            check_batch(collector.next())
        assert [env.last_seed for env in envs] == [7, 8]

    def test_during_a_post_processing(self):
        """The batch is lost: that is a cut, and its frames are not counted."""
        calls = []

        def look(batch):
            calls.append(1)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            return batch

        with Collector(Counter(None), frames_per_batch=4, total_frames=16, postproc=look) as collector:
            batches = [collector.next()]
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batches += list(collector)
        list(checked(batches))
        assert sum(len(batch) for batch in batches) == 16

    def test_at_construction_what_was_made_is_closed(self):
        made = Tagged()

        def make():
            return made

        with pytest.raises(KeyboardInterrupt):
            Collector([make, lambda: Interrupted("reset", 1)], frames_per_batch=4)
        assert made.closed == 1

    def test_one_that_came_through_a_handler_of_the_users(self):
        """Many programs have a handler that notes something and raises KeyboardInterrupt itself."""

        def handler(number, frame):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, handler)
        try:
            with Collector(Interrupted("step", 3), frames_per_batch=8) as collector:
                with pytest.raises(KeyboardInterrupt):
                    collector.next()
                assert not collector.closed
        finally:
            signal.signal(signal.SIGINT, before)

    def test_a_handler_that_exits_is_no_failure_of_the_environments(self):
        """What batch schedulers send is SIGTERM; `sys.exit` in its handler ends a hand-written loop, and this one."""

        def handler(number, frame):
            sys.exit(5)

        before = signal.signal(signal.SIGTERM, handler)
        try:
            env = Interrupted("step", 3, make=lambda: signal.raise_signal(signal.SIGTERM))
            with Collector(env, frames_per_batch=8) as collector:
                assert isinstance(raised_by(collector.next), SystemExit)
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_one_that_a_wrapper_cleans_up_after(self):
        class Cleaning(gym.Wrapper):
            def step(self, action):
                try:
                    return super().step(action)
                except BaseException:
                    self.cleaned = True
                    raise

        with Collector(Cleaning(Interrupted("step", 3)), frames_per_batch=8) as collector:
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            check_batch(collector.next())


class TestCtrlCAnywhere:
    """It comes between any two instructions, and then too no frame is lost in silence and no count is wrong."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"postproc": TensorDict.clone}, {"max_frames_per_traj": 5}],
        ids=["plain", "post-processed", "with a limit"],
    )
    @pytest.mark.parametrize("length", [pytest.param(None, marks=pytest.mark.slow), 3])
    @pytest.mark.parametrize("apart", [11, pytest.param(3, marks=pytest.mark.slow)])
    def test_in_a_batch(self, options, length, apart):
        wrong, number, places = [], 0, [None] * apart
        while len(places) >= number:
            number += apart
            with Collector(
                [Tagged(0, length), Tagged(1, length)],
                zero,
                frames_per_batch=8,
                total_frames=32,
                init_random_frames=14,
                **options,
            ) as collector:
                batches, state = [collector.next()], torch.get_rng_state()
                places = interrupt_at_call(number)
                try:
                    batches.append(collector.next())
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.setprofile(None)
                complaint = self.leftovers(state) or self.complaint(collector, batches)
                if complaint:
                    wrong.append(f"{complaint}, after Ctrl-C in {places[-1]}")
        assert number > 100
        assert not wrong, f"{len(wrong)} of {number // apart}: {wrong[0]} ... {wrong[-1]}"

    def leftovers(self, state):
        """What of the program's own state was not put back, if anything is."""
        wrong = [
            *([] if torch.is_grad_enabled() else ["gradients are off"]),
            *([] if interaction_type() is None else ["the exploration type is not the program's"]),
            *([] if torch.equal(torch.get_rng_state(), state) else ["torch's random state is the collector's"]),
        ]
        torch.set_grad_enabled(True)
        set_interaction_type(None).__enter__()
        torch.set_rng_state(state)
        return next(iter(wrong), None)

    def complaint(self, collector, batches):
        """What is wrong with the rest of the batches, if anything is."""
        if collector.closed:
            return "it is closed"
        batches = [*batches, *collector]
        try:
            list(checked(batches))
        except InvalidBatchError as error:
            return f"an unmarked cut ({error})"
        frames = sum(batch.numel() for batch in batches)
        if frames != 32:
            return f"{frames} frames of 32"
        random = int((joined(batches)["collector", "policy_version"] == -1).sum())
        return None if random == 14 else f"{random} random frames of 14"


class TestAfterAnException:
    def broken(self, **options):
        env = Breaker(at=3)
        collector = Collector(lambda: env, frames_per_batch=8, **options)
        with pytest.raises(RuntimeError, match="Breaker"):
            collector.next()
        return collector, env

    def test_environments_that_were_made_are_closed_once(self):
        collector, env = self.broken()
        assert (collector.closed, env.closed) == (True, 1)
        collector.shutdown()
        collector.shutdown()
        assert env.closed == 1

    def test_instances_that_were_passed_are_not(self):
        envs = [Breaker(at=3), Counter()]
        with Collector(envs, frames_per_batch=8) as collector, pytest.raises(RuntimeError):
            collector.next()
        assert [env.closed for env in envs] == [0, 0]
        envs[0].reset()
        envs[0].step(0)

    @pytest.mark.parametrize(
        "call",
        [
            lambda collector: collector.next(),
            lambda collector: next(iter(collector)),
            lambda collector: collector.rollout(),
            lambda collector: collector.reset(),
            lambda collector: collector.set_seed(0),
            lambda collector: collector.state_dict(),
            lambda collector: collector.load_state_dict({}),
            lambda collector: collector.update_policy_weights_(),
        ],
    )
    def test_further_use_is_a_closed_error(self, call):
        collector, _ = self.broken()
        for _ in range(2):
            with pytest.raises(ClosedError, match="Make a new one"):
                call(collector)

    def test_figures_can_still_be_read(self):
        collector, _ = self.broken()
        assert collector.stats().frames == 0
        assert collector.collected_frames == 0
        assert "closed" in repr(collector)

    def test_global_state_is_put_back(self):
        before = torch.get_rng_state()
        self.broken()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.is_grad_enabled()

    def test_a_refused_argument_leaves_it_open(self):
        with Collector(counters(5, 5), frames_per_batch=8) as collector:
            for refused in (lambda: collector.set_seed(-1), lambda: collector.reset(9)):
                with pytest.raises(OptionError):
                    refused()
                assert not collector.closed
            check_batch(collector.next())


class TestShutdown:
    def test_it_is_idempotent_and_closes_once(self):
        env = Counter()
        collector = Collector(lambda: env, frames_per_batch=4)
        collector.next()
        for _ in range(3):
            collector.shutdown()
        assert env.closed == 1
        assert collector.closed

    def test_leaving_with_closes(self):
        env = Counter()
        with Collector(lambda: env, frames_per_batch=4) as collector:
            assert env.closed == 0
        assert (env.closed, collector.closed) == (1, True)

    def test_leaving_with_by_an_exception_closes_and_passes_it_on(self):
        env = Counter()
        with pytest.raises(BespokeError), Collector(lambda: env, frames_per_batch=4):
            raise BespokeError(1, 2)
        assert env.closed == 1

    def test_an_env_that_fails_to_close_is_a_warning_and_the_others_are_closed(self):
        env = Counter()
        collector = Collector([functools.partial(Breaker, where="close"), lambda: env], frames_per_batch=4)
        with pytest.warns(UserWarning, match=r"failed to close: RuntimeError: Breaker broke") as caught:
            collector.shutdown()
        assert len(caught) == 1
        assert env.closed == 1
        collector.shutdown()

    def test_a_failing_close_does_not_hide_the_exception_before_it(self):
        class Bad(Breaker):
            def close(self):
                raise RuntimeError("close")

        with pytest.warns(UserWarning, match="failed to close"), pytest.raises(RuntimeError, match="Breaker broke"):
            Collector(functools.partial(Bad, at=2), frames_per_batch=4).next()

    def test_a_failing_close_does_not_hide_the_exception_of_the_loop(self):
        with (
            pytest.warns(UserWarning, match="failed to close"),
            pytest.raises(BespokeError),
            Collector(functools.partial(Breaker, where="close"), frames_per_batch=4),
        ):
            raise BespokeError(1, 2)

    @pytest.mark.parametrize("kind", MISREAD)
    def test_what_is_misread_is_a_warning_too(self, kind):
        env = Counter()
        collector = Collector(
            [functools.partial(Breaker, where="close", exception=kind), lambda: env], frames_per_batch=4
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert raised_by(collector.shutdown) is None
        assert "failed to close" in str(caught[0].message)
        assert env.closed == 1

    def test_failing_to_close_at_a_failed_construction_does_not_hide_why(self):
        with pytest.raises(BespokeError):
            Collector(
                [functools.partial(Breaker, where="close"), raising(BespokeError(1, 2))],
                frames_per_batch=4,
            )


class TestGarbage:
    def test_one_resource_warning_and_closed_environments(self):
        env = Counter()
        collector = Collector(lambda: env, frames_per_batch=4)
        collector.next()
        with pytest.warns(ResourceWarning, match="Collector was never shut down") as caught:  # noqa: PT031
            del collector
            gc.collect()
        assert len(caught) == 1
        assert env.closed == 1

    def test_reference_counts_are_enough(self):
        """No cycles: it does not wait for the garbage collector."""
        env = Counter()
        collector = Collector(lambda: env, zero, frames_per_batch=4)
        for _ in collector:
            break
        gc.collect()
        gc.disable()
        try:
            with pytest.warns(ResourceWarning):
                del collector
            assert env.closed == 1
        finally:
            gc.enable()

    def test_one_that_was_shut_down_warns_of_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector = Collector(Counter, frames_per_batch=4)
            collector.shutdown()
            del collector
            gc.collect()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_environments_are_closed_where_warnings_are_errors_too(self):
        env = Counter()
        collector = Collector(lambda: env, frames_per_batch=4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del collector
            gc.collect()
        assert env.closed == 1

    def test_an_unfinished_loop_does_not_keep_it(self):
        env = Counter()

        def loop():
            for batch in Collector(lambda: env, frames_per_batch=4):
                return batch
            return None

        with pytest.warns(ResourceWarning):  # noqa: PT031
            batch = loop()
            gc.collect()
        check_batch(batch)
        assert env.closed == 1


class Answering(gym.Env):
    """Gives what it is told to from its k-th step (or reset) on."""

    def __init__(self, answer, where="step", at=1, length=4):
        self.observation_space, self.action_space = spaces.Box(-9, 99, (2, 3), np.float32), spaces.Discrete(2)
        self.answer, self.where, self.at, self.length = answer, where, at, length
        self.calls = {"step": 0, "reset": 0}
        self.t = 0

    def due(self, where):
        self.calls[where] += 1
        return where == self.where and self.calls[where] >= self.at

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.answer if self.due("reset") else (self.observe(), {})

    def observe(self):
        return np.full((2, 3), self.t, np.float32)

    def step(self, action):
        self.t += 1
        if self.due("step"):
            return self.answer(self) if callable(self.answer) else self.answer
        return self.observe(), 1.0, self.t == self.length, False, {}


def with_observation(observation):
    return lambda env: (observation, 1.0, env.t == env.length, False, {})


def with_reward(reward):
    return lambda env: (env.observe(), reward, env.t == env.length, False, {})


class TestAnswersThatDoNotFit:
    @pytest.mark.parametrize("at", [1, 3, 150])
    @pytest.mark.parametrize(
        "answer",
        [
            (np.zeros((2, 3), np.float32), 1.0, False, {}),
            (np.zeros((2, 3), np.float32), 1.0, False, False, {}, 0),
            None,
            5,
        ],
        ids=["four", "six", "none", "a number"],
    )
    def test_a_step_of_another_length(self, answer, at):
        envs = [Answering(None, at=10**9), Answering(answer, at=at)]
        with Collector(envs, frames_per_batch=400) as collector:
            with pytest.raises(EnvError, match=rf"worker 0, lane 1, step {at - 1}") as raised:
                collector.next()
            assert raised.value.__cause__ is not None
            assert collector.closed

    def test_a_first_step_of_four_says_what_it_should_be(self):
        with Collector(Answering((0, 1.0, False, {})), frames_per_batch=4) as collector:  # noqa: SIM117
            with pytest.raises(EnvError, match=r"\(observation, reward, terminated, truncated, info\).*length 4"):
                collector.next()

    @pytest.mark.parametrize("at", [1, 3, 150])
    @pytest.mark.parametrize("shape", [(4,), (3, 2), (2, 4), (2, 3, 1)])
    def test_an_observation_of_another_shape(self, at, shape):
        env = Answering(with_observation(np.zeros(shape, np.float32)), at=at)
        with Collector([Answering(None, at=10**9), env], frames_per_batch=400) as collector:  # noqa: SIM117
            with pytest.raises(EnvError, match=rf"worker 0, lane 1, step {at - 1}"):
                collector.next()

    @pytest.mark.parametrize("shape", [(3,), (1,), (), (1, 3), (2, 1), (1, 2, 3)])
    @pytest.mark.parametrize("at", [1, 3])
    def test_an_observation_of_a_shape_that_could_be_stretched(self, at, shape):
        """No data are made up: at the latest a sampled step finds it."""
        env = Answering(with_observation(np.zeros(shape, np.float32)), at=at)
        with Collector(env, frames_per_batch=400) as collector, pytest.raises(EnvError, match=r"shape \[2, 3\]"):
            collector.next()

    @pytest.mark.parametrize("value", [None, "text", {}, [], object()])
    @pytest.mark.parametrize("at", [1, 3])
    def test_no_observation_at_all(self, at, value):
        """`None` among them, which numpy takes for NaN."""
        env = Answering(with_observation(value), at=at)
        with Collector(env, frames_per_batch=400) as collector, pytest.raises(EnvError, match="worker 0, lane 0"):
            collector.next()

    def test_none_at_the_end_of_an_episode_is_found_too(self):
        """A sampled step would not see it; a row of NaN would go to the learner in silence."""
        env = Answering(
            lambda env: (None if env.calls["step"] == 3 else env.observe(), 1.0, env.calls["step"] == 3, False, {})
        )
        with Collector(env, frames_per_batch=8) as collector, pytest.raises(EnvError, match="lane 0, step 2"):
            collector.next()

    def test_a_reward_of_none_is_found_too(self):
        env = Answering(lambda env: (env.observe(), None if env.calls["step"] == 3 else 1.0, False, False, {}))
        with Collector(env, frames_per_batch=8) as collector, pytest.raises(EnvError, match="lane 0, step 2"):
            collector.next()

    @pytest.mark.parametrize(
        "answer",
        [None, 5, np.zeros((2, 3), np.float32), (np.zeros((2, 3), np.float32),), (np.zeros(3, np.float32), {})],
        ids=["none", "a number", "observation alone", "one", "shape"],
    )
    @pytest.mark.parametrize("at", [1, 2])
    def test_a_reset_that_does_not_fit(self, at, answer):
        if at == 2 and isinstance(answer, tuple) and len(answer) == 1:
            pytest.skip("the info of a later reset is not looked at")
        env = Answering(answer, "reset", at)
        with pytest.raises(EnvError, match=r"worker 0, lane 1") as raised:  # noqa: SIM117
            with Collector([Answering(None, at=10**9), env], frames_per_batch=1000) as collector:
                collector.next()
        assert "policy" not in str(raised.value)

    @pytest.mark.parametrize("reward", [np.ones(1), np.ones(1, np.float32), [1.0], np.ones((1, 1)), torch.ones(1)])
    def test_a_reward_of_one_element_works(self, reward):
        """FAULTS 8."""
        envs = [Answering(with_reward(reward)), Answering(with_reward(2.0))]
        with Collector(envs, frames_per_batch=800) as collector:
            check_batch(batch := collector.next())
        assert batch["next", "reward"].squeeze(-1).tolist() == [[1.0] * 400, [2.0] * 400]

    @pytest.mark.parametrize("reward", [1, True, np.float64(1), np.int64(1), np.ones(()), torch.tensor(1.0)])
    def test_rewards_of_many_kinds_work(self, reward):
        with Collector(Answering(with_reward(reward)), frames_per_batch=8) as collector:
            assert collector.next()["next", "reward"].flatten().tolist() == [1.0] * 8

    @pytest.mark.parametrize("reward", [np.ones(2), "text", None, np.ones((0,)), {}])
    @pytest.mark.parametrize("at", [1, 3])
    def test_a_reward_that_is_no_number(self, at, reward):
        with Collector(Answering(with_reward(reward), at=at), frames_per_batch=400) as collector:  # noqa: SIM117
            with pytest.raises(EnvError, match="worker 0, lane 0"):
                collector.next()

    def test_nan_is_fine(self):
        env = Answering(lambda env: (np.full((2, 3), np.nan, np.float32), np.nan, env.t == 4, False, {}))
        with Collector(env, frames_per_batch=10, total_frames=30) as collector:
            batch = joined(list(checked(collector)))
        assert batch["next", "observation"].isnan().all()
        assert batch["next", "reward"].isnan().all()

    @pytest.mark.parametrize("truth", [1, np.True_, np.ones(()), np.ones(1, bool), torch.tensor(True)])
    def test_flags_of_many_kinds_work(self, truth):
        env = Answering(lambda env: (env.observe(), 1.0, truth if env.t == 2 else False, False, {}))
        with Collector(env, frames_per_batch=4) as collector:
            batch = collector.next()
        assert batch["next", "terminated"].flatten().tolist() == [False, True, False, True]
        assert batch["next", "done"].dtype is torch.bool

    def test_missing_parts_of_a_dict_are_named(self):
        class Lacking(Counter):
            def _observe(self):
                whole = super()._observe()
                return whole if self.t < 2 else {"t": whole["t"]}

        with Collector(functools.partial(Lacking, observation="dict"), frames_per_batch=4) as collector:  # noqa: SIM117
            with pytest.raises(EnvError, match=r"lane 0, step 1.*nested"):
                collector.next()

    def test_floats_for_integers_are_refused(self):
        class Float(Counter):
            def _observe(self):
                return np.array([self.t + 0.5])

        with pytest.raises(EnvError, match=r"dtype int64.*float64"):
            Collector(functools.partial(Float, dtype=np.int64), frames_per_batch=4)


class TestPoliciesThatChangeTheirAnswer:
    @pytest.mark.parametrize(
        "later", [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), "text", None, {}]
    )
    def test_it_is_a_policy_error(self, later):
        calls = []

        def policy(observation):
            calls.append(1)
            return zero(observation) if len(calls) < 4 else later

        with Collector(counters(5, 5), policy, frames_per_batch=20) as collector:  # noqa: SIM117
            with pytest.raises(PolicyError, match=r"step 2.*policy"):
                collector.next()

    def test_an_action_of_another_shape_is_not_stretched(self):
        """One action for all lanes, from a policy that gave one a lane at first."""
        calls = []

        def policy(observation):
            calls.append(1)
            return zero(observation) if len(calls) < 4 else torch.tensor(1)

        with Collector(counters(5, 5), policy, frames_per_batch=2000) as collector, pytest.raises(PolicyError):
            collector.next()

    def test_a_key_that_is_not_written_any_more(self):
        calls = []

        def policy(td: TensorDict) -> TensorDict:
            calls.append(1)
            td["action"] = zero(td["observation"])
            return td.set("value", td["observation"]) if len(calls) < 4 else td

        with Collector(counters(5, 5), policy, frames_per_batch=20) as collector:  # noqa: SIM117
            with pytest.raises(PolicyError, match=r"step 2.*'value'"):
                collector.next()


SCRIPT = """
import signal, sys, time
from rlcollect import Collector
from rlcollect.testing import Counter

class Closing(Counter):
    def close(self):
        super().close()
        print("closed", flush=True)

def collector():
    return Collector(Closing, frames_per_batch=4, num_envs=2, total_frames=10**9)
"""


def run(body, *, send=None):
    """Runs a script; where `send` is a signal, sends it once the script says that it is ready."""
    code = SCRIPT + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-W", "default", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if send is not None:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.1)
            process.send_signal(send)
        start = time.monotonic()
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    if send is not None:
        assert time.monotonic() - start < 10
    return process.returncode, out, err


class TestScripts:
    """FAULTS 51: they end, soon, with at most one traceback."""

    def test_one_that_ends_without_shutdown(self):
        code, out, err = run("c = collector()\nc.next()\nprint('end')")
        assert code == 0
        assert out == "end\nclosed\nclosed\n"
        assert err.count("Traceback") == 0
        assert err.count("ResourceWarning") <= 1

    @pytest.mark.slow
    def test_one_that_raises_in_the_loop(self):
        code, out, err = run("for batch in collector():\n    raise ValueError('mine')")
        assert code == 1
        assert out == "closed\nclosed\n"
        assert err.count("Traceback") == 1
        assert err.rstrip().splitlines()[-1].startswith("ValueError: mine") or "ValueError: mine" in err

    @pytest.mark.slow
    def test_one_that_raises_inside_with(self):
        code, out, err = run("with collector() as c:\n    for batch in c:\n        raise ValueError('mine')")
        assert (code, out) == (1, "closed\nclosed\n")
        assert err.count("Traceback") == 1
        assert "ResourceWarning" not in err

    @pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_one_that_gets_ctrl_c(self, inside):
        body = (
            "with collector() as c:\n    print('ready', flush=True)\n    for batch in c: pass"
            if inside
            else "c = collector()\nprint('ready', flush=True)\nfor batch in c: pass"
        )
        code, out, err = run(body, send=signal.SIGINT)
        assert code == -signal.SIGINT
        assert out == "closed\nclosed\n"
        assert err.count("Traceback") == 1
        assert err.count("KeyboardInterrupt") >= 1
        assert "WorkerError" not in err

    @pytest.mark.slow
    def test_one_whose_environment_raises(self):
        code, _, err = run(
            """
            from rlcollect.testing import Breaker
            with Collector([Counter, lambda: Breaker(at=7)], frames_per_batch=4) as c:
                for batch in c: pass
            """
        )
        assert code == 1
        assert "lane 1" in err
        assert "step 6" in err
        assert err.rstrip().splitlines()[-1].startswith("RuntimeError: Breaker broke")

    @pytest.mark.slow
    def test_one_that_calls_sys_exit_in_the_loop(self):
        code, out, err = run("with collector() as c:\n    for batch in c: sys.exit(3)")
        assert (code, out, err) == (3, "closed\nclosed\n", "")


class TestNumbersThatDoNotFit:
    def test_a_negative_number_in_an_unsigned_observation(self):
        """Numpy would store 255; the first step is always held against the space."""

        class Negative(Counter):
            def __init__(self):
                super().__init__(None)
                self.observation_space = gym.spaces.Box(0, 255, (1,), np.uint8)

            def _observe(self):
                return np.array([-1 if self.t == 1 else self.t], np.int64)

        with Collector(Negative, frames_per_batch=4) as collector, pytest.raises(EnvError, match="lane 0"):
            collector.next()

    def test_an_old_step_with_info_keys_is_told_what_step_should_return(self):
        class Old(Counter):
            def step(self, action):
                return super().step(action)[:4]

        with Collector(Old, frames_per_batch=4, info_keys={"t": None}) as collector:  # noqa: SIM117
            with pytest.raises(EnvError):
                collector.next()
