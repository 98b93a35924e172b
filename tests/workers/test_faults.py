"""One suite for what goes wrong in worker processes: every way of breaking, in every place, for both kinds.

Each test is followed by a look at what is left: no process, no shared memory, no descriptor, no thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcollect import (
    AsyncCollector,
    ClosedError,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    OptionError,
    PolicyError,
    SharedMemoryError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from rlcollect.testing import Breaker, Counter, UnpicklableError, check_batch
from rlcollect.testing.breaker import EXIT_CODE
from tests import backend
from tests.workers.fault_helpers import (
    HANG_LIMIT,
    KINDS,
    STARTING,
    Belongings,
    BreakingPolicy,
    Breaks,
    BreaksSaved,
    BreaksSeeded,
    OddError,
    Script,
    TellsItsEnd,
    act,
    becomes_true,
    check_nothing_is_left,
    counting,
    is_alive,
    kill_worker,
    odd,
    raised_by,
    within,
    worker_process,
)

pytestmark = pytest.mark.timeout(60)
IS_RAY = backend.IS_RAY
in_processes = pytest.mark.skipif(IS_RAY, reason="about processes, and memory that they share")

MISREAD = [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt]
both = pytest.mark.parametrize("kind", KINDS)
sync_soon = pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
async_soon = pytest.mark.parametrize("kind", [pytest.param(KINDS[0], marks=pytest.mark.slow), KINDS[1]])


def slowly(*values):
    """Cases for the long run alone: what is of its own in each is seen in others, but not in this combination."""
    return [pytest.param(*each, marks=pytest.mark.slow) for each in values]


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The server of processes is there before anything is counted, and stays."""
    MultiSyncCollector([Counter], frames_per_batch=4).shutdown()


@pytest.fixture(autouse=True)
def _nothing_left(_server):
    before = Belongings.now()
    yield
    check_nothing_is_left(before)


# --- every way of breaking, in every place ---

AT_START = ["constructor", "first reset", "probe"]
LATER = ["reset", "step", "policy", "pre hook", "post hook", "seed", "state_dict", "map_fn", "update"]
EXITS = ["constructor", "step"]  # one at the start, one in a rollout
STAGES = {
    "constructor": "building its environments",
    "first reset": "resetting its environments for the first time",
    "probe": "planning the policy",
    "pre hook": "running a hook",
    "post hook": "running a hook",
    "state_dict": "saving or loading a state",
    "map_fn": "running a function",
}
STEPS = 4  # of each lane in a batch, of the sync kind; the other has twice as many


class Net(torch.nn.Module):
    """Two weights, and always action 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.int64) + (self.weight[0] * 0).long()


class Updating(Collector):
    """A collector for a worker to hold, that breaks when it is given new weights."""

    breaks = None

    def update_policy_weights_(self, *arguments, **options):
        if type(self).breaks is not None:
            type(self).breaks()
        return super().update_policy_weights_(*arguments, **options)


def updating(how):
    return type("Updating", (Updating,), {"breaks": Breaks(how)})


def made(kind, where, how, **options):
    """A collector of two workers with two lanes each, which breaks in worker 1, and in its lane 1 if in a lane."""
    breaker = functools.partial(Breaker, how, exception=odd)
    makers = {
        "constructor": functools.partial(breaker, "constructor"),
        "first reset": functools.partial(breaker, "reset", 1),
        "reset": functools.partial(breaker, "reset", 2),
        "step": functools.partial(breaker, "step", 9),
        "close": functools.partial(breaker, "close"),
        "seed": functools.partial(BreaksSeeded, how),
        "state_dict": functools.partial(BreaksSaved, how),
    }
    more = {
        "probe": lambda: {"policy": BreakingPolicy(how, 1)},
        "policy": lambda: {"policy": BreakingPolicy(how, 9)},
        "pre hook": lambda: {"pre_collect_hook": Breaks(how, 2)},
        "post hook": lambda: {"post_collect_hook": Breaks(how, 2)},
        "update": lambda: {"collector_class": updating(how), "policy": Net()},
    }
    options = {**more.get(where, dict)(), **options}
    sources = [[Counter, Counter], [Counter, makers.get(where, Counter)]]
    return kind(sources, frames_per_batch=STEPS * 4, total_frames=STEPS * 4 * 10, **options)


def go_on(collector, where, how):
    """Uses it, until it breaks."""
    if where == "seed":
        collector.set_seed(0)
    if where == "map_fn":
        collector.map_fn(Breaks(how))
    if where == "state_dict":
        collector.state_dict()
    if where == "update":
        collector.update_policy_weights_()
    return list(collector)


def open_and_go_on(kind, where, how, **options):
    with made(kind, where, how, **options) as collector:
        go_on(collector, where, how)


def steps_made(kind, where):
    """How many frames the lane had made when it broke."""
    rollout = STEPS if kind is KINDS[0] else 2 * STEPS
    return {
        "reset": 4,  # the fifth ends the episode, and is under way
        "step": 8,
        "policy": 7,  # the first call was the probe's
        "pre hook": rollout,
        "post hook": 2 * rollout,
    }.get(where, 0)


def check_report(error, *, lane=None, step=0):
    """It says who, where and what, with the worker's own traceback."""
    report = error.__cause__
    assert isinstance(report, WorkerError), repr(report)
    assert (report.worker, report.lane, report.step) == (1, lane, step)
    assert "worker 1" in str(report)
    assert type(error).__name__ in str(report)
    assert "Traceback (most recent call last)" in report.worker_traceback
    assert "raise self._make_exception()" in report.worker_traceback
    told = "".join(traceback.format_exception(error))
    assert "breaker.py" in told  # the user sees it too
    return report


class TestRaise:
    """FAULTS 48: the same exception, from a report of who, where and what; all else is ended."""

    @both
    @pytest.mark.parametrize("where", ["constructor", "first reset"])
    def test_at_construction(self, kind, where):
        with pytest.raises(OddError, match="broken, with code 7") as raised:
            made(kind, where, "raise")
        assert raised.value.code == 7
        check_report(raised.value, lane=1)

    @both
    def test_in_the_probe_of_the_policy(self, kind):
        with pytest.raises(PolicyError, match=r"first observation.*broken, with code 7") as raised:
            made(kind, "probe", "raise")
        report = raised.value.__cause__
        assert (report.worker, report.lane) == (1, None)
        assert "raise self._make_exception()" in report.worker_traceback

    @both
    @pytest.mark.parametrize("where", ["reset", "step", "policy", "pre hook", "post hook", "seed"])
    def test_while_collecting(self, kind, where):
        with made(kind, where, "raise") as collector:
            with pytest.raises(OddError, match="broken, with code 7") as raised:
                go_on(collector, where, "raise")
            lane = 1 if where in ("reset", "step", "seed") else None
            check_report(raised.value, lane=lane, step=steps_made(kind, where))
            assert raised.value.code == 7
            assert collector.closed
            with pytest.raises(ClosedError):
                collector.next()

    @both
    @pytest.mark.parametrize("where", ["state_dict", "map_fn", "update"])
    def test_in_a_command(self, kind, where):
        with made(kind, where, "raise") as collector:
            with pytest.raises(OddError, match="broken, with code 7") as raised:
                go_on(collector, where, "raise")
            report = raised.value.__cause__
            assert isinstance(report, WorkerError)
            assert report.worker == 1
            assert "raise self._make_exception()" in report.worker_traceback
            assert collector.closed is (where == "update")  # the others have changed nothing
            if where != "update":
                batches = list(collector)
                assert sum(batch.numel() for batch in batches) == STEPS * 4 * 10

    def test_in_a_rollout_while_a_command_is_waited_for(self):
        """What makes frames is broken, whoever hears of it first."""
        makers = [functools.partial(Sleepy, 2, 0.05), functools.partial(Breaker, at=9, exception=odd)]
        with MultiAsyncCollector(makers, frames_per_batch=8) as collector:
            with pytest.raises(OddError):  # noqa: PT012
                collector.next()
                for _ in range(50):
                    collector.map_fn(len)
            assert collector.closed

    @both
    def test_in_close(self, kind):
        """It is said, once, and ends nothing else."""
        collector = made(kind, "close", "raise")
        collector.next()
        with pytest.warns(UserWarning, match=r"failed to close.*OddError: broken, with code 7") as warned:
            collector.shutdown()
        assert len(warned) == 1
        assert collector.closed


def check_end(error, exitcode):
    """It says how; Ray does not know."""
    assert error.exitcode == (None if IS_RAY else exitcode)
    told = signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
    assert ("Ray says: " if IS_RAY else told) in str(error)


class TestDeath:
    """Noticed at once, without a time limit, and it says how."""

    @both
    @pytest.mark.parametrize(
        ("where", "how"),
        [
            *[(where, "kill") for where in (*AT_START, *LATER)],
            *[(where, "exit") for where in EXITS],
            *slowly(*[(where, "exit") for where in (*AT_START, *LATER) if where not in EXITS]),
        ],
    )
    def test_anywhere(self, kind, where, how):
        with pytest.raises(WorkerDied) as raised, within(STARTING):
            open_and_go_on(kind, where, how)
        error = raised.value
        assert error.worker == 1
        check_end(error, EXIT_CODE if how == "exit" else -signal.SIGKILL)
        assert "worker 1" in str(error)
        assert error.stage in str(error)
        if IS_RAY:  # it is what was heard last
            assert error.stage
        elif where == "update":
            assert error.stage != "waiting for a command"
        else:
            assert error.stage == STAGES.get(where, "collecting")

    @both
    @pytest.mark.parametrize("how", ["exit", "kill"])
    def test_in_close(self, kind, how):
        """Nobody waits for it any more."""
        collector = made(kind, "close", how)
        collector.next()
        with within(HANG_LIMIT):
            collector.shutdown()
        assert collector.closed


def late_start(make, *told):
    """The error of a start that never ends, and its time; on a busy machine the other worker may need more of it."""
    for seconds in (1.0, 4.0, 16.0):
        with pytest.raises(WorkerTimeout) as raised, within(20 + seconds):
            make(start_timeout=seconds)
        if all(text in str(raised.value) for text in told) and len(raised.value.workers) == len(told):
            break
    return raised.value, seconds


class TestHang:
    """With a time limit: who, and what it is doing."""

    @pytest.mark.parametrize(
        ("kind", "where"),
        [
            (KINDS[0], "probe"),
            (KINDS[1], "first reset"),
            *slowly((KINDS[0], "constructor"), (KINDS[0], "first reset")),
            *slowly((KINDS[1], "constructor"), (KINDS[1], "probe")),
        ],
    )
    def test_at_construction(self, kind, where):
        told = f"worker 1 ({STAGES[where]}"
        error, seconds = late_start(functools.partial(made, kind, where, "hang"), told)
        assert error.workers == (1,)
        assert told in str(error)
        assert f"{seconds} s" in str(error)

    @sync_soon
    @pytest.mark.parametrize("where", LATER)
    def test_later(self, kind, where):
        """The asynchronous kind delivers what the other worker makes until only the one that hangs has frames left."""
        with made(kind, where, "hang", timeout=0.4) as collector:
            with pytest.raises(WorkerTimeout) as raised, within(20):
                go_on(collector, where, "hang")
            assert raised.value.workers == (1,)
            if where == "update":
                assert "waiting for a command" not in str(raised.value)
            else:
                assert f"worker 1 ({STAGES.get(where, 'collecting')}" in str(raised.value)
            assert "0.4 s" in str(raised.value)
            assert not collector.closed
            if where not in ("step", "map_fn"):  # what it takes to end one that hangs is seen there
                kill_worker(1)
            with within(HANG_LIMIT):
                collector.shutdown()

    @sync_soon
    def test_in_close(self, kind):
        collector = made(kind, "close", "hang")
        collector.next()
        with within(HANG_LIMIT):
            collector.shutdown()
        assert collector.closed


# --- what an exception goes through on its way ---


class BespokeError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)
        self.one, self.two = one, two


class NeedyError(Exception):
    """Cannot be made without what its arguments do not hold."""

    def __new__(cls, *, needed):
        return super().__new__(cls)

    def __init__(self, *, needed):
        super().__init__("needy")


class Trap:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return act, ("raise", NoWayBackError)


class NoWayBackError(Exception):
    def __init__(self):
        super().__init__("no way back")


class TrappedError(Exception):
    def __init__(self):
        super().__init__("trapped")
        self.trap = Trap()


class MuteError(Exception):
    """Its text cannot be made."""

    def __str__(self):
        raise ValueError("no text")


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self):
        super().__init__("slotted")
        self.code = 9


def step_breaks(kind, exception, **options):
    """Collects until a step of worker 1 raises what this makes."""
    maker = functools.partial(Breaker, at=3, exception=exception)
    with kind([Counter, maker], frames_per_batch=8, **options) as collector:
        return raised_by(lambda: [collector.next() for _ in range(50)])


FIRST = ["first reset", "reset", "pre hook", "seed", "state_dict"]
SECOND = ["constructor", "probe", "policy", "post hook", "map_fn"]


@pytest.mark.on_ray
class TestExceptions:
    """FAULTS 54: whatever it is, it comes out, or its text does."""

    @both
    def test_with_arguments_of_its_own(self, kind):
        error = step_breaks(kind, functools.partial(BespokeError, "a", [2]))
        assert type(error) is BespokeError
        assert (error.args, error.one, error.two) == (("a", [2]), "a", [2])
        check_report(error, step=2, lane=0)

    @both
    @pytest.mark.parametrize(
        ("exception", "text"),
        [
            (UnpicklableError, "UnpicklableError: this exception cannot be pickled"),
            (functools.partial(NeedyError, needed=1), "NeedyError: needy"),
            (TrappedError, "TrappedError: trapped"),
        ],
        ids=["unpicklable", "cannot be made again", "cannot be unpickled"],
    )
    def test_one_that_cannot_cross(self, kind, exception, text):
        error = step_breaks(kind, exception)
        assert type(error) is WorkerError
        assert text in str(error)
        assert (error.worker, error.lane, error.step) == (1, 0, 2)
        assert text in error.worker_traceback
        assert "raise self._make_exception()" in error.worker_traceback

    @both
    def test_one_without_a_text(self, kind):
        """It is an exception like others: nobody dies of it, and its traceback comes."""
        error = step_breaks(kind, MuteError)
        assert isinstance(error, MuteError | WorkerError), repr(error)
        report = error if isinstance(error, WorkerError) else error.__cause__
        assert isinstance(report, WorkerError)
        assert report.worker == 1
        assert "raise self._make_exception()" in report.worker_traceback

    def test_slots_of_an_exception(self):
        error = step_breaks(KINDS[0], SlottedError)
        assert isinstance(error, SlottedError)
        assert str(error) == "slotted"
        assert error.code == 9

    def test_a_class_that_only_a_function_knows(self):
        class LocalError(Exception):
            pass

        error = step_breaks(KINDS[0], lambda: LocalError("mine"))
        assert type(error) is LocalError
        check_report(error, step=2, lane=0)

    @pytest.mark.parametrize("kind_of_error", [OSError, KeyError, UnicodeDecodeError, ExceptionGroup, AssertionError])
    def test_built_in_ones(self, kind_of_error):
        arguments = {
            OSError: (2, "gone", "file"),
            UnicodeDecodeError: ("utf8", b"ab", 0, 1, "why"),
            ExceptionGroup: ("several", [ValueError(1), KeyError(2)]),
        }.get(kind_of_error, ("mine",))
        expected = kind_of_error(*arguments)
        error = step_breaks(KINDS[0], functools.partial(kind_of_error, *arguments))
        assert type(error) is type(expected)
        assert str(error) == str(expected)
        assert getattr(error, "filename", None) == getattr(expected, "filename", None)
        check_report(error, step=2, lane=0)

    def test_a_group_of_odd_ones(self):
        """Its parts have to cross too; where they cannot, its text does."""
        error = step_breaks(KINDS[0], lambda: ExceptionGroup("several", [OddError(code=1)]))
        assert isinstance(error, ExceptionGroup | WorkerError), repr(error)
        report = error if isinstance(error, WorkerError) else error.__cause__
        assert "broken, with code 1" in report.worker_traceback

    def test_a_large_one(self):
        """It does not fit a pipe."""
        error = step_breaks(KINDS[0], functools.partial(BespokeError, "x" * 5_000_000, 0))
        assert len(error.one) == 5_000_000

    def test_its_own_cause_is_in_the_traceback(self):
        class Chained(Counter):
            def step(self, action):
                raise RuntimeError("second") from OddError(code=1)

        with KINDS[0]([Counter, Chained], frames_per_batch=8) as collector:
            with pytest.raises(RuntimeError, match="second") as raised:
                collector.next()
            assert "broken, with code 1" in raised.value.__cause__.worker_traceback

    def test_all_workers_at_once(self):
        with KINDS[0]([functools.partial(Breaker, exception=odd)] * 3, frames_per_batch=12) as collector:
            with pytest.raises(OddError) as raised:
                collector.next()
            assert raised.value.__cause__.worker in range(3)

    @pytest.mark.parametrize(
        ("kind", "exception"),
        [
            *[(KINDS[0], exception) for exception in MISREAD],
            (KINDS[1], StopIteration),
            *slowly(*[(KINDS[1], exception) for exception in MISREAD[1:]]),
        ],
    )
    def test_what_would_be_misread(self, kind, exception):
        """DESIGN 9.15: no loop ends, no program stops, and nobody believes that a key was pressed."""
        error = step_breaks(kind, functools.partial(exception, "mine"))
        assert type(error) is WorkerError
        assert (error.worker, error.lane, error.step) == (1, 0, 2)
        assert f"{exception.__name__}: mine" in str(error)

    @pytest.mark.parametrize(
        ("exception", "where"),
        [
            *[(StopIteration, where) for where in FIRST],
            *[(KeyboardInterrupt, where) for where in SECOND],
            *slowly(*[(StopIteration, where) for where in SECOND], *[(KeyboardInterrupt, where) for where in FIRST]),
            *slowly(*[(SystemExit, where) for where in (*FIRST, *SECOND)]),
        ],
    )
    def test_what_would_be_misread_anywhere(self, exception, where):
        fails = functools.partial(exception, "mine")
        maker, options = {
            "constructor": (functools.partial(Breaker, "raise", "constructor", exception=fails), {}),
            "first reset": (functools.partial(Breaker, "raise", "reset", exception=fails), {}),
            "probe": (Counter, {"policy": BreakingPolicy("raise", 1, fails)}),
            "reset": (functools.partial(Breaker, "raise", "reset", 2, exception=fails), {}),
            "policy": (Counter, {"policy": BreakingPolicy("raise", 5, fails)}),
            "pre hook": (Counter, {"pre_collect_hook": Breaks("raise", 2, fails)}),
            "post hook": (Counter, {"post_collect_hook": Breaks("raise", 2, fails)}),
            "seed": (functools.partial(BreaksSeeded, "raise", fails), {}),
            "state_dict": (functools.partial(BreaksSaved, "raise", fails), {}),
            "map_fn": (Counter, {}),
        }[where]

        def use():
            with KINDS[0]([Counter, maker], frames_per_batch=16, total_frames=64, **options) as collector:
                if where == "map_fn":
                    collector.map_fn(Breaks("raise", 1, fails))
                go_on(collector, where if where != "map_fn" else "", "raise")

        error = raised_by(use)
        assert isinstance(error, WorkerError | PolicyError), repr(error)
        assert exception.__name__ in str(error)
        report = error if isinstance(error, WorkerError) else error.__cause__
        assert report.worker == 1


# --- processes that are killed by somebody else ---


class TestKilled:
    @both
    @pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    def test_between_batches(self, kind, by):
        with kind([Counter] * 2, frames_per_batch=8) as collector:
            collector.next()
            kill_worker(1, by)
            with pytest.raises(WorkerDied) as raised, within(20):  # noqa: PT012
                for _ in range(20 if not IS_RAY else 2000):  # Ray takes a while to notice
                    collector.next()
            assert raised.value.worker == 1
            check_end(raised.value, -by)
            assert collector.closed

    def test_by_a_polite_signal(self):
        """It is not an exception of the environment's, and it is noticed."""
        with MultiSyncCollector([Counter] * 2, frames_per_batch=8) as collector:
            collector.next()
            kill_worker(1, signal.SIGTERM)
            with pytest.raises(WorkerDied, match=r"SIGTERM|143") as raised, within(20):
                collector.next()
            assert raised.value.worker == 1

    @pytest.mark.parametrize(
        ("kind", "command"),
        [
            *[(KINDS[0], command) for command in ("set_seed", "map_fn", "load_state_dict")],
            *[(KINDS[1], command) for command in ("reset", "state_dict", "update")],
            *slowly(*[(KINDS[0], command) for command in ("reset", "state_dict", "update")]),
            *slowly(*[(KINDS[1], command) for command in ("set_seed", "map_fn", "load_state_dict")]),
        ],
    )
    def test_before_a_command(self, kind, command):
        """Whatever is asked next says so; no broken pipe comes through."""
        with kind([Counter] * 2, Net(), frames_per_batch=8) as collector:
            state = collector.state_dict()
            collector.next()
            kill_worker(1)
            calls = {
                "set_seed": lambda: collector.set_seed(1),
                "reset": collector.reset,
                "map_fn": lambda: collector.map_fn(len),
                "state_dict": collector.state_dict,
                "load_state_dict": lambda: collector.load_state_dict(state),
                "update": lambda: collector.update_policy_weights_(worker_ids=1),
            }
            with pytest.raises(WorkerDied) as raised, within(20):  # noqa: PT012
                calls[command]()
                for _ in range(2000 if IS_RAY and command == "update" else 0):  # Ray tells nobody who does not wait
                    collector.next()
            assert raised.value.worker == 1
            assert collector.closed

    @both
    def test_before_weights_are_published_to_all(self, kind):
        """Publishing waits for nobody: at the latest, the next batches say so."""
        with kind([Counter] * 2, Net(), frames_per_batch=8) as collector:
            collector.next()
            kill_worker(0)
            with pytest.raises(WorkerDied) as raised, within(20):  # noqa: PT012
                for _ in range(20):
                    collector.update_policy_weights_()
                    collector.next()
            assert raised.value.worker == 0
            assert collector.closed

    @both
    def test_while_it_is_sent_weights_of_its_own(self, kind):
        """It hangs in a step, and is killed when it is to take them."""
        with kind(
            [Counter, functools.partial(Breaker, "hang", at=2)], Net(), frames_per_batch=8, timeout=0.3, total_frames=80
        ) as collector:
            with pytest.raises(WorkerTimeout):
                list(collector)
            threading.Timer(0.1, kill_worker, [1]).start()
            with pytest.raises(WorkerDied) as raised, within(20):  # noqa: PT012
                for _ in range(20):
                    with contextlib.suppress(WorkerTimeout):
                        collector.update_policy_weights_(worker_ids=[1])
                        collector.next()
            assert raised.value.worker == 1
            assert collector.closed

    @both
    def test_while_it_is_waited_for(self, kind):
        """No time limit is given: the death itself wakes."""
        with kind(
            [Counter, functools.partial(Breaker, "hang", at=2)], frames_per_batch=8, total_frames=80
        ) as collector:
            threading.Timer(0.3, kill_worker, [1]).start()
            with pytest.raises(WorkerDied) as raised, within(20):
                list(collector)
            check_end(raised.value, -signal.SIGKILL)

    @pytest.mark.parametrize("learning", [0.0, 0.005])
    def test_while_the_others_deliver(self, learning):
        """A worker that delivers without end does not hide that another is gone."""
        with MultiAsyncCollector([Counter] * 2, frames_per_batch=8) as collector:
            collector.next()
            kill_worker(1)

            def loop():
                for _ in range(200):
                    collector.next()
                    time.sleep(learning)

            with pytest.raises(WorkerDied) as raised:
                loop()
            assert raised.value.worker == 1

    def test_all_of_them(self):
        with MultiSyncCollector([Counter] * 3, frames_per_batch=12) as collector:
            collector.next()
            for worker in range(3):
                kill_worker(worker)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                collector.next()

    @both
    def test_while_it_starts(self, kind, tmp_path):
        there = tmp_path / "there"

        def maker():
            there.touch()
            return Breaker("hang", "constructor")

        def kill():
            while not there.exists():
                time.sleep(0.01)
            kill_worker(1)

        threading.Thread(target=kill).start()
        with pytest.raises(WorkerDied) as raised, within(STARTING):
            kind([Counter, maker], frames_per_batch=8)
        check_end(raised.value, -signal.SIGKILL)
        assert IS_RAY or raised.value.stage == "building its environments"


# --- time limits lose nothing ---


class Sleepy(Counter):
    """Sleeps in every so-manieth step, and never ends an episode."""

    def __init__(self, every, seconds):
        super().__init__(None)
        self.every, self.seconds = every, seconds

    def step(self, action):
        if self.t % self.every == self.every - 1:
            time.sleep(self.seconds)
        return super().step(action)


def patiently(call, seconds=30.0):
    """Calls again after each time-out; the result, and how many there were."""
    deadline = time.monotonic() + seconds
    late = 0
    while True:
        try:
            return call(), late
        except WorkerTimeout:
            late += 1
            assert time.monotonic() < deadline


def frames_of(batches):
    """What each lane saw, in order, by the number of its episode: one, as nothing ends it."""
    seen = {}
    for batch in batches:
        for numbers, observations in zip(
            batch["collector", "traj_ids"].reshape(-1, batch.shape[-1]),
            batch["observation"].reshape(-1, batch.shape[-1]),
            strict=True,
        ):
            assert len(set(numbers.tolist())) == 1
            seen.setdefault(int(numbers[0]), []).extend(observations.int().tolist())
    return seen


class TestTimeouts:
    """FAULTS 59: what comes late is there at the next call."""

    def test_sync(self):
        late = 0
        batches = []
        makers = [counting, functools.partial(Sleepy, 8, 0.25)]
        with MultiSyncCollector(makers, frames_per_batch=16, total_frames=96, timeout=0.05) as collector:
            while not collector.exhausted:
                batch, times = patiently(collector.next)
                late += times
                batches.append(batch)
                assert collector.collected_frames == 16 * len(batches)
        assert late > 6  # every batch, more than once
        for previous, batch in zip([None, *batches], batches, strict=False):
            check_batch(batch, previous=previous)
        assert sorted(frames_of(batches).values()) == [list(range(48))] * 2

    @both
    def test_every_frame_once(self, kind):
        late = 0
        batches = []
        makers = [functools.partial(Sleepy, 5, 0.1), functools.partial(Sleepy, 8, 0.15)]
        with kind(makers, frames_per_batch=16, total_frames=96, timeout=0.01) as collector:
            while not collector.exhausted:
                batch, times = patiently(collector.next)
                late += times
                batches.append(batch)
        assert late > 0
        frames = frames_of(batches)
        assert sum(map(len, frames.values())) == 96
        assert all(seen == list(range(len(seen))) for seen in frames.values())

    @both
    def test_a_first_reset_that_takes_long_is_no_matter_of_it(self, kind):
        """`timeout` is for what comes after the start."""
        maker = functools.partial(Breaker, "sleep", "reset", seconds=0.5)
        with kind([Counter, maker], frames_per_batch=8, timeout=0.2) as collector:
            check_batch(collector.next())

    @pytest.mark.parametrize(
        ("kind", "command"),
        [
            *[(KINDS[0], command) for command in ("map_fn", "reset")],
            *[(KINDS[1], command) for command in ("state_dict", "set_seed")],
            *slowly(*[(KINDS[0], command) for command in ("state_dict", "set_seed")]),
            *slowly(*[(KINDS[1], command) for command in ("map_fn", "reset")]),
        ],
    )
    def test_a_command_that_is_late_is_done_all_the_same(self, kind, command):
        makers = [counting, functools.partial(Breaker, "sleep", "step", 3, seconds=0.5, length=None)]
        with kind(makers, frames_per_batch=16, total_frames=160, timeout=0.1) as collector:
            with pytest.raises(WorkerTimeout):
                list(collector)
            delivered = collector.collected_frames
            calls = {
                "map_fn": lambda: collector.map_fn(len),
                "state_dict": collector.state_dict,
                "set_seed": lambda: collector.set_seed(3),
                "reset": collector.reset,
            }
            with pytest.raises(WorkerTimeout, match="worker 1"):
                calls[command]()
            result, _ = patiently(calls[command])
            if command == "map_fn":
                assert result == [1, 1]
            batches = []
            while not collector.exhausted:
                batch, _ = patiently(collector.next)
                batches.append(batch)
            assert delivered + sum(batch.numel() for batch in batches) == 160

    @both
    def test_the_state_after_one(self, kind):
        """The batch that was waited for is in it, or still to come: loaded elsewhere, the same frames are left."""
        makers = [counting, functools.partial(Breaker, "sleep", "step", 3, seconds=0.4, length=None)]
        with kind(makers, frames_per_batch=16, total_frames=64, timeout=0.1) as collector:
            with pytest.raises(WorkerTimeout):
                list(collector)
            state, _ = patiently(collector.state_dict)
        with kind([counting, counting], frames_per_batch=16, total_frames=64) as other:
            other.load_state_dict(state)
            left = sum(batch.numel() for batch in other)
            assert state["frames"] + left == 64

    def test_the_start_of_each_stage(self):
        """FAULTS 66. Importing is what unpickling a maker may come to."""
        with pytest.raises(WorkerTimeout, match=r"worker 1 \(importing what it was sent"), within(20):
            MultiSyncCollector([Counter, SlowToUnpack()], frames_per_batch=8, start_timeout=1.0)

    def test_the_start_of_all(self):
        makers = [functools.partial(Breaker, "hang", "constructor"), functools.partial(Breaker, "hang", "reset")]
        told = ["worker 0 (building its environments", "worker 1 (resetting its environments for the first time"]
        error, _ = late_start(functools.partial(KINDS[0], makers, frames_per_batch=8), *told)
        assert error.workers == (0, 1)
        assert all(text in str(error) for text in told), error

    def test_the_start_of_a_policy_that_its_factory_makes(self):
        told, options = "worker 1 (building the policy", {"policy_factory": SlowFactory(), "frames_per_batch": 8}
        error, _ = late_start(functools.partial(KINDS[0], [Counter] * 2, **options), told)
        assert error.workers == (1,)
        assert told in str(error)


class SlowFactory(Breaks):
    """Makes a policy, but for worker 1."""

    def __init__(self):
        super().__init__("hang")

    def __call__(self):
        return super().__call__(Net())


class SlowToUnpack:
    def __call__(self):
        return Counter()

    def __reduce__(self):
        return _unpacked_slowly, ()


def _unpacked_slowly():
    act("hang")


# --- shutdown ---


class TestShutdown:
    """FAULTS 50: again, at any time, in bounded time, and without a word."""

    @both
    def test_twice(self, kind, capfd):
        collector = kind([Counter] * 2, frames_per_batch=8)
        collector.next()
        collector.shutdown()
        collector.shutdown()
        assert collector.closed
        assert capfd.readouterr().err == ""

    @both
    def test_before_anything(self, kind):
        kind([Counter] * 2, frames_per_batch=8).shutdown()

    @both
    @pytest.mark.parametrize("workers", [[0], [1], [0, 1]])
    def test_after_a_kill(self, kind, workers, capfd):
        collector = kind([Counter] * 2, frames_per_batch=8)
        collector.next()
        for worker in workers:
            kill_worker(worker)
        with within(HANG_LIMIT):
            collector.shutdown()
        collector.shutdown()
        assert capfd.readouterr().err == ""

    @sync_soon
    def test_while_a_worker_sleeps(self, kind, capfd):
        maker = functools.partial(Breaker, "sleep", seconds=60)
        collector = kind([counting, maker], frames_per_batch=8, timeout=0.2, total_frames=80)
        with pytest.raises(WorkerTimeout):
            list(collector)
        with within(HANG_LIMIT):
            collector.shutdown()
        assert capfd.readouterr().err == ""

    def test_while_a_worker_is_deaf(self):
        """It ignores every signal that can be ignored."""
        collector = MultiSyncCollector([Counter, Deaf], frames_per_batch=8, timeout=0.3)
        with pytest.raises(WorkerTimeout):
            collector.next()
        with within(HANG_LIMIT):
            collector.shutdown()

    def test_while_a_worker_is_stopped(self):
        collector = MultiSyncCollector([Counter] * 2, frames_per_batch=8)
        os.kill(worker_process(1).pid, signal.SIGSTOP)
        with within(HANG_LIMIT):
            collector.shutdown()

    @async_soon
    def test_in_the_middle_of_collection(self, kind):
        """Rollouts are under way, and nobody waits for them any more."""
        makers = [functools.partial(Sleepy, 2, 0.05)] * 2
        collector = kind(makers, frames_per_batch=64, timeout=0.1)
        with contextlib.suppress(WorkerTimeout):
            collector.next()
        with within(HANG_LIMIT):
            collector.shutdown()

    @async_soon
    def test_by_another_thread_while_it_waits(self, kind):
        """DESIGN 3.4: every wait wakes on shutdown."""
        collector = kind([functools.partial(Breaker, "hang", at=3)] * 2, frames_per_batch=8)
        timer = threading.Timer(0.3, collector.shutdown)
        timer.start()
        error = raised_by(lambda: [collector.next() for _ in range(100)])
        timer.join()
        assert isinstance(error, ClosedError | WorkerDied), repr(error)
        assert collector.closed

    @both
    def test_a_with_that_raises(self, kind, capfd):
        with pytest.raises(ZeroDivisionError) as raised:  # noqa: SIM117, PT012
            with kind([Counter] * 2, frames_per_batch=8) as collector:
                for _ in collector:
                    1 / 0  # noqa: B018
        assert collector.closed
        assert raised.value.__context__ is None
        assert capfd.readouterr().err == ""

    @both
    def test_environments_are_closed(self, kind, tmp_path):
        makers = [[functools.partial(TellsItsEnd, tmp_path)] * 2] * 2
        with kind(makers, frames_per_batch=16) as collector:
            collector.next()
        assert len(list(tmp_path.iterdir())) == 4

    @both
    @pytest.mark.parametrize("where", ["constructor", "reset", "step"])
    def test_environments_of_the_others_are_closed_too(self, kind, where, tmp_path):
        tells = functools.partial(TellsItsEnd, tmp_path)
        breaks = functools.partial(Breaker, "raise", where, exception=odd)
        with pytest.raises(OddError):  # noqa: SIM117
            with kind([[tells, tells], [tells, breaks]], frames_per_batch=16, total_frames=80) as collector:
                list(collector)
        assert len(list(tmp_path.iterdir())) == 3


class Deaf(Counter):
    def step(self, action):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(0.05)


# --- memory ---


@in_processes
class TestSharedMemory:
    """FAULTS 97."""

    @both
    def test_more_than_the_machine_has(self, kind):
        with pytest.raises(
            SharedMemoryError, match=r"[\d,]+ bytes of shared memory are needed.*there are [\d,]+ bytes"
        ):
            kind([counting] * 2, frames_per_batch=2 * 10**9)

    def test_a_small_limit(self, tmp_path):
        """A file, and anonymous memory too, may not grow beyond it: the error comes before the crash."""
        body = """
            import gc, os, resource, sys, time
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
            import multiprocessing, threading
            from rlcollect import MultiAsyncCollector, MultiSyncCollector, SharedMemoryError
            from rlcollect.testing import Counter

            def there():
                descriptors, children = os.listdir("/proc/self/fd"), multiprocessing.active_children()
                return len(descriptors), threading.active_count(), len(children)

            before = there()
            for kind in (MultiSyncCollector, MultiAsyncCollector):
                with kind([Counter] * 2, frames_per_batch=64, start_method="fork") as collector:
                    collector.next()
                del collector
                try:
                    kind([Counter] * 2, frames_per_batch=64_000, start_method="fork")
                except SharedMemoryError as error:
                    print(f"{kind.__name__}: {error}")
            time.sleep(0.1)
            gc.collect()
            print(before == there() or (before, there()))
        """
        with Script(tmp_path, body) as script:
            assert script.ended() == 0, script.err
            script.check_nothing_lives()
            assert script.err == ""
            lines = script.out.splitlines()
        assert len(lines) == 3
        for line, kind in zip(lines, KINDS, strict=False):
            assert line.startswith(f"{kind.__name__}: ")
            assert "bytes of shared memory are needed" in line
        assert lines[2] == "True"

    @both
    def test_none_is_held_after_shutdown(self, kind):
        """Neither mapped nor open, though the collector itself is still there."""
        before = Belongings.now().shared
        collector = kind([Counter] * 2, Net(), frames_per_batch=8)
        batch = collector.next()
        assert Belongings.now().shared > before
        collector.shutdown()
        assert becomes_true(lambda: Belongings.now().shared == before, 1.0)
        check_batch(batch)
        assert collector.closed

    @both
    def test_none_is_held_when_it_is_gone(self, kind):
        """Though the user still has the batches."""
        before = Belongings.now().shared
        collector = kind([Counter] * 2, Net(), frames_per_batch=8)
        batch = collector.next()
        collector.shutdown()
        del collector
        assert becomes_true(lambda: Belongings.now().shared == before, 1.0)
        check_batch(batch)


def memory_of(pid):
    """Resident bytes that are the process's own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class TestMany:
    """FAULTS 56, 98: nothing grows."""

    @in_processes
    @pytest.mark.parametrize(
        ("kind", "count", "bytes_more"),
        [
            (KINDS[1], 500, 2_000_000),
            *slowly((KINDS[0], 500, 2_000_000), *[(kind, 1500, 4_000_000) for kind in KINDS]),
        ],
    )
    def test_small_batches(self, kind, count, bytes_more):
        with kind([Counter] * 2, Net(), frames_per_batch=16, update_at_each_batch=True) as collector:
            pids = [os.getpid(), *collector.map_fn(lambda envs: os.getpid())]
            for _ in range(count // 3):
                collector.next()
            before, memory = Belongings.now(), [memory_of(pid) for pid in pids]
            descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]  # noqa: PTH208
            for _ in range(count):
                collector.next()
            assert Belongings.now().more_than(before) == {}
            assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] == descriptors  # noqa: PTH208
            for pid, then in zip(pids, memory, strict=True):
                assert memory_of(pid) - then < bytes_more
            assert collector.policy_version > 1.25 * count

    def test_commands(self):
        """What is asked leaves nothing behind either."""
        with MultiSyncCollector([Counter] * 2, Net(), frames_per_batch=16) as collector:

            def use():
                collector.set_seed(1)
                collector.next()
                collector.map_fn(len)
                collector.load_state_dict(collector.state_dict())
                collector.reset([True, False])
                collector.update_policy_weights_(worker_ids=1)

            use()
            before = Belongings.now()
            for _ in range(30):
                use()
            assert Belongings.now().more_than(before) == {}

    def test_one_after_the_other(self):
        """FAULTS 60: of both kinds; the last leaves no more than the first."""
        MultiSyncCollector([Counter] * 2, frames_per_batch=8).shutdown()
        before = Belongings.now()
        for kind in KINDS * 3:
            with kind([Counter] * 2, frames_per_batch=8, total_frames=24) as collector:
                assert sum(batch.numel() for batch in collector) == 24
        del collector
        check_nothing_is_left(before)

    def test_at_the_same_time(self):
        """Each has workers of its own, and one that breaks does not touch the other."""
        with (
            MultiSyncCollector([Counter] * 2, frames_per_batch=8) as one,
            MultiAsyncCollector([Counter] * 2, frames_per_batch=8) as two,
            AsyncCollector(functools.partial(Breaker, at=17, exception=odd), frames_per_batch=8) as three,
        ):
            for _ in range(2):
                for collector in (one, two, three):
                    check_batch(collector.next())
            pids = {pid for each in (one, two) for pid in each.map_fn(lambda envs: os.getpid())}
            assert len(pids) == 4
            with pytest.raises(OddError):  # noqa: PT012
                for _ in range(5):
                    three.next()
            one.shutdown()
            for _ in range(5):
                check_batch(two.next())
            assert three.closed
            assert not two.closed

    def test_one_inside_the_other(self):
        """The second is made, used and ended while the first has rollouts under way."""
        with MultiAsyncCollector([functools.partial(Sleepy, 4, 0.05)] * 2, frames_per_batch=16) as outer:
            outer.next()
            with MultiSyncCollector([Counter] * 2, frames_per_batch=8) as inner:
                check_batch(inner.next())
            check_batch(outer.next())


class TestAbandoned:
    """FAULTS 51: garbage is cleared away, and that is said once."""

    @both
    def test_it_is_ended_with_one_warning(self, kind):
        collector = kind([Counter] * 2, frames_per_batch=8)
        collector.next()
        pids = collector.map_fn(lambda envs: os.getpid())
        with pytest.warns(ResourceWarning, match=f"A {kind.__name__} was never shut down") as warned:  # noqa: PT031
            del collector
            gc.collect()
        assert len(warned) == 1
        assert becomes_true(lambda: not any(map(is_alive, pids)))

    def test_a_loop_that_was_broken_off(self):
        def loop():
            for batch in MultiAsyncCollector([Counter] * 2, frames_per_batch=8):
                return batch
            return None

        with pytest.warns(ResourceWarning):  # noqa: PT031
            batch = loop()
            gc.collect()
        check_batch(batch)

    @both
    def test_one_that_failed_is_not_abandoned(self, kind):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            maker = functools.partial(Breaker, exception=odd)
            collector = kind([Counter, maker], frames_per_batch=8, total_frames=80)
            with pytest.raises(OddError):
                list(collector)
            del collector
            gc.collect()


# --- what cannot cross ---


LOCK = threading.Lock()


class Locked:
    """Goes as a maker, a policy or a hook, and cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, *arguments):
        return arguments[0] if arguments else Counter()


class TestWhatCannotBePickled:
    """FAULTS 95: the error names the option and the object, and nothing was started."""

    @both
    @pytest.mark.parametrize("where", ["worker 0", "worker 1"])
    def test_a_maker_that_closes_over_a_lock(self, kind, where):
        lock = threading.Lock()

        def maker():
            with lock:
                return Counter()

        makers = [maker, Counter] if where == "worker 0" else [Counter, maker]
        with pytest.raises(OptionError, match=r"create_env_fn.*-> lock is <unlocked _thread.lock"):
            kind(makers, frames_per_batch=8)

    @pytest.mark.parametrize(
        ("options", "path"),
        [
            ({"policy": Locked()}, r"policy=.*policy\.lock is <unlocked"),
            ({"policy_factory": Locked()}, r"policy_factory=.*policy_factory\.lock is <unlocked"),
            ({"pre_collect_hook": Locked()}, r"pre_collect_hook=.*pre_collect_hook\.lock is <unlocked"),
            ({"post_collect_hook": Locked().__call__}, r"post_collect_hook=.*__self__\.lock is <unlocked"),
            ({"reset_options": {"lock": LOCK}}, r"reset_options=.*reset_options\['lock'\] is <unlocked"),
            ({"create_env_kwargs": {"length": LOCK}}, r"create_env_kwargs=.*'length'\] is <unlocked"),
        ],
        ids=["policy", "policy_factory", "pre_collect_hook", "post_collect_hook", "reset_options", "create_env_kwargs"],
    )
    def test_an_option_that_holds_one(self, options, path):
        with pytest.raises(OptionError, match=path):
            MultiSyncCollector([Counter] * 2, frames_per_batch=8, **options)

    def test_a_module_that_holds_one(self):
        net = Net()
        net.lock = threading.Lock()
        with pytest.raises(OptionError, match=r"policy=.*policy\.lock is <unlocked"):
            MultiAsyncCollector([Counter] * 2, net, frames_per_batch=8)

    def test_a_partial_that_holds_one(self):
        maker = functools.partial(Counter, length=LOCK)
        with pytest.raises(OptionError, match=r"create_env_fn.*keywords\['length'\] is <unlocked"):
            MultiSyncCollector([Counter, maker], frames_per_batch=8)

    def test_a_function_to_be_run_there(self):
        """It is refused, and the collector goes on."""
        lock = threading.Lock()
        with MultiSyncCollector([Counter] * 2, frames_per_batch=8) as collector:
            with pytest.raises(OptionError, match=r"-> lock is <unlocked"):
                collector.map_fn(lambda envs: lock)
            check_batch(collector.next())
            assert collector.map_fn(len) == [1, 1]

    def test_a_result_that_cannot_come_back(self):
        with MultiSyncCollector([Counter] * 2, frames_per_batch=8) as collector:
            error = raised_by(lambda: collector.map_fn(lambda envs: threading.Lock()))
            assert isinstance(error, TypeError | WorkerError)
            assert "lock" in str(error)
            check_batch(collector.next())
            assert collector.map_fn(len) == [1, 1]

    def test_what_is_used_in_main_alone_may_hold_one(self):
        with MultiSyncCollector([Counter] * 2, frames_per_batch=8, postproc=Locked()) as collector:
            check_batch(collector.next())

    def test_lambdas_and_local_functions_cross(self):
        number = np.int64(3)

        class Local(Counter):
            pass

        def policy(observation):
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

        hooks = {"pre_collect_hook": lambda: number, "post_collect_hook": lambda batch: batch}
        with MultiSyncCollector([lambda: Local(int(number))] * 2, policy, frames_per_batch=8, **hooks) as collector:
            check_batch(collector.next())
            assert collector.map_fn(lambda envs: [type(env).__name__ for env in envs]) == [["Local"]] * 2
