"""`ProcessPool`: requests and replies, their order, deaths, and that nothing is left when it is over."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlcollect.errors import ClosedError, OptionError, WorkerDied, WorkerError
from rlcollect.processes.launch import default_method
from rlcollect.processes.pool import LET_GO, ProcessPool
from tests.processes.helpers import (
    STAGES,
    News,
    descriptors,
    get_environ,
    get_pid,
    is_alive,
    make,
    make_dead,
    wait_until,
)

METHODS = [method for method in ("forkserver", "fork") if method in multiprocessing.get_all_start_methods()]
pytestmark = pytest.mark.timeout(60)
LONG = 30  # seconds; waits that end by themselves


def new_pool(count=1, method=None, made_by=make):
    return ProcessPool(count, made_by, method=method or default_method(), stages=STAGES)


@contextmanager
def pool_of(count=1, method=None):
    pool = new_pool(count, method)
    try:
        yield pool
    finally:
        pool.shutdown()


def replies(pool, count):
    """So many, by number."""
    came = []
    while len(came) < count:
        some = pool.ready(LONG)
        pool.done()
        assert some, f"only {came} came"
        came += some
    assert len(came) == count
    return came


def answer(pool, command, worker=0, **options):
    number = pool.submit(worker, command, **options)
    (reply,) = replies(pool, 1)
    assert (reply.id, reply.worker) == (number, worker)
    assert reply.failure is None, reply.failure.told
    return reply.value


def pids(pool):
    return [answer(pool, ("call", get_pid), worker) for worker in range(len(pool))]


@contextmanager
def held(pool, worker=0):
    """A worker that is busy until the end."""
    read, write = os.pipe()
    number = pool.submit(worker, ("hold",), attached=[read])
    os.close(read)
    try:
        wait_until(lambda: pool.board.stage(worker) == "holding")
        yield number
    finally:
        with suppress(BrokenPipeError):
            os.write(write, b"x")
        os.close(write)


class TestReplies:
    def test_have_number_worker_and_value(self):
        with pool_of(3) as pool:
            assert len(pool) == 3
            numbers = {pool.submit(worker, ("echo", {"from": worker})): worker for worker in range(3)}
            assert len(numbers) == 3
            came = {reply.id: reply for reply in replies(pool, 3)}
            assert {number: reply.worker for number, reply in came.items()} == numbers
            assert all(came[number].value == {"from": worker} for number, worker in numbers.items())

    @pytest.mark.parametrize("method", METHODS)
    def test_by_each_start_method(self, method):
        with pool_of(2, method) as pool:
            first, second = pids(pool)
            assert len({first, second, os.getpid()}) == 3

    def test_one_to_each_command(self):
        with pool_of() as pool:
            numbers = [pool.submit(0, ("echo", value)) for value in range(50)]
            came = replies(pool, 50)
            assert [reply.id for reply in came] == numbers
            assert [reply.value for reply in came] == list(range(50))
            assert pool.ready(0.05) == []

    def test_of_local_functions_and_classes(self):
        class Local:
            def __init__(self, value):
                self.value = value

        with pool_of() as pool:
            came = answer(pool, ("call", lambda value: Local(value + 1), 2))
            assert type(came) is Local
            assert came.value == 3

    def test_of_many_bytes(self):
        with pool_of() as pool:
            assert answer(pool, ("echo", b"x" * 10_000_000)) == b"x" * 10_000_000

    def test_of_one_worker_do_not_wait_for_another(self):
        with pool_of(2) as pool, held(pool, 0):
            assert answer(pool, ("echo", 1), 1) == 1

    def test_are_given_again_until_they_are_taken(self):
        with pool_of() as pool:
            number = pool.submit(0, ("echo", 1))
            assert [reply.id for reply in pool.ready(LONG)] == [number]
            assert [reply.id for reply in pool.ready(LONG)] == [number]
            pool.done()
            assert pool.ready(0.05) == []

    def test_none_after_the_time(self):
        with pool_of() as pool:
            assert pool.ready(0) == []
            assert pool.ready(0.05) == []
            with held(pool):
                assert pool.ready(0.05) == []
            assert len(replies(pool, 1)) == 1  # nothing was lost

    def test_without_a_time_it_waits_for_one(self):
        with pool_of() as pool:
            number = pool.submit(0, ("call", time.sleep, 0.2))
            assert [reply.id for reply in pool.ready(None)] == [number]

    def test_a_command_that_cannot_cross(self):
        with pool_of() as pool:
            with pytest.raises(OptionError, match=r"command.*\[1\] is .*lock"):
                pool.submit(0, ("echo", threading.Lock()))
            assert pool.ready(0.05) == []
            assert answer(pool, ("echo", 1)) == 1

    def test_an_answer_that_cannot_cross(self):
        with pool_of() as pool:
            number = pool.submit(0, ("unpicklable",))
            (reply,) = replies(pool, 1)
            assert reply.id == number
            assert isinstance(reply.failure.raised(), TypeError)
            assert answer(pool, ("echo", 1)) == 1


class TestOrder:
    def test_out_of_turn_comes_before_those_that_wait(self):
        with pool_of() as pool:
            with held(pool) as first:
                later = [pool.submit(0, ("echo", 1)), pool.submit(0, ("echo", 2))]
                sooner = [pool.submit(0, ("echo", 3), in_turn=False), pool.submit(0, ("echo", 4), in_turn=False)]
            assert [reply.id for reply in replies(pool, 5)] == [first, *sooner, *later]

    def test_out_of_turn_does_not_interrupt(self):
        with pool_of() as pool:
            with held(pool):
                pool.submit(0, ("echo", 1), in_turn=False)
                assert pool.ready(0.05) == []
            assert len(replies(pool, 2)) == 2

    def test_what_comes_later_in_turn_is_later(self):
        with pool_of() as pool:
            with held(pool) as first:
                sooner = pool.submit(0, ("echo", 0), in_turn=False)
                later = [pool.submit(0, ("echo", value)) for value in range(3)]
            assert [reply.id for reply in replies(pool, 5)] == [first, sooner, *later]


class TestNews:
    """Of some commands the newest is enough: a worker that is busy has one of them when it looks again."""

    def filled(self, pool):
        """A command that is more than the pipe takes."""
        number = pool.submit(0, ("size", b"x" * 10_000_000))
        assert pool.is_behind(0)
        return number

    def test_is_a_command_as_any_other(self):
        with pool_of() as pool:
            for value in range(3):
                assert answer(pool, News(("echo", value))) == value

    def test_that_waits_is_replaced_by_the_next(self):
        with pool_of() as pool:
            with held(pool) as first:
                large = self.filled(pool)
                numbers = [pool.submit(0, News(("echo", value))) for value in range(5)]
                last = pool.submit(0, ("echo", "last"))
            came = replies(pool, 4)
            assert [reply.id for reply in came] == [first, large, numbers[-1], last]
            assert [reply.value for reply in came] == [None, 10_000_000, 4, "last"]
            assert pool.ready(0.05) == []

    def test_another_command_between_them_keeps_both(self):
        with pool_of() as pool:
            with held(pool):
                self.filled(pool)
                for value in range(3):
                    pool.submit(0, News(("echo", value)))
                pool.submit(0, ("echo", "between"))
                for value in range(3, 6):
                    pool.submit(0, News(("echo", value)))
            came = replies(pool, 5)
            assert [reply.value for reply in came[2:]] == [2, "between", 5]
            assert pool.ready(0.05) == []

    def test_one_worker_has_nothing_to_do_with_another(self):
        with pool_of(2) as pool:
            with held(pool, 0):
                self.filled(pool)
                for value in range(3):
                    pool.submit(0, News(("echo", value)))
                assert answer(pool, News(("echo", "other")), 1) == "other"
            assert [reply.value for reply in replies(pool, 3)] == [None, 10_000_000, 2]

    def test_with_descriptors_none_is_replaced(self):
        with pool_of() as pool:
            with held(pool):
                self.filled(pool)
                for value in (b"a", b"b"):
                    read, write = os.pipe()
                    os.write(write, value)
                    pool.submit(0, News(("read",)), attached=[read])
                    os.close(read)
                    os.close(write)
            assert [reply.value for reply in replies(pool, 4)[2:]] == [[b"a"], [b"b"]]

    def test_what_was_replaced_is_not_withdrawn_either(self):
        with pool_of() as pool:
            with held(pool) as first:
                large = self.filled(pool)
                numbers = [pool.submit(0, News(("echo", value))) for value in range(3)]
                last = pool.withdraw(0)
            came = replies(pool, 4)
            assert sorted(reply.id for reply in came) == [first, large, numbers[-1], last]
            assert pool.ready(0.05) == []

    def test_a_worker_in_the_place_of_another_is_sent_its_own(self):
        with pool_of() as pool:
            pool.submit(0, ("sleep",))
            wait_until(lambda: pool.board.stage(0) == "holding")
            self.filled(pool)
            pool.submit(0, News(("echo", "old")))
            pool.restart(0)
            assert answer(pool, News(("echo", "new"))) == "new"
            assert pool.ready(0.05) == []


class TestWithdrawing:
    def test_those_that_wait_get_replies_that_say_so(self):
        with pool_of() as pool:
            with held(pool) as first:
                waiting = [pool.submit(0, ("echo", 1)), pool.submit(0, ("echo", 2))]
                last = pool.withdraw(0)
            came = replies(pool, 4)
            assert [reply.id for reply in came] == [first, *waiting, last]
            assert [reply.value for reply in came] == [
                None,
                ("withdrawn", ("echo", 1)),
                ("withdrawn", ("echo", 2)),
                None,
            ]
            assert all(reply.failure is None for reply in came)

    def test_where_nothing_waits(self):
        with pool_of() as pool:
            number = pool.withdraw(0)
            assert [reply.id for reply in replies(pool, 1)] == [number]

    def test_what_comes_afterwards_is_done(self):
        with pool_of() as pool:
            with held(pool):
                pool.submit(0, ("echo", 1))
                pool.withdraw(0)
                after = pool.submit(0, ("echo", 2))
            came = {reply.id: reply.value for reply in replies(pool, 4)}
            assert came[after] == 2

    def test_what_does_not_wait_for_its_turn_is_done(self):
        with pool_of() as pool:
            with held(pool):
                number = pool.submit(0, ("echo", 1), in_turn=False)
                pool.withdraw(0)
            assert {reply.id: reply.value for reply in replies(pool, 3)}[number] == 1

    def test_only_of_that_worker(self):
        with pool_of(2) as pool:
            with held(pool, 0), held(pool, 1):
                numbers = [pool.submit(worker, ("echo", worker)) for worker in range(2)]
                pool.withdraw(0)
            came = {reply.id: reply.value for reply in replies(pool, 5)}
            assert [came[number] for number in numbers] == [("withdrawn", ("echo", 0)), 1]

    def test_descriptors_that_came_with_them_are_closed(self):
        with pool_of() as pool:
            before = answer(pool, ("count_descriptors",))
            with held(pool):
                read, write = os.pipe()
                pool.submit(0, ("read",), attached=[read])
                pool.withdraw(0)
            os.close(read)
            os.close(write)
            replies(pool, 3)
            assert answer(pool, ("count_descriptors",)) == before


class TestDescriptors:
    @pytest.mark.parametrize("method", METHODS)
    def test_go_with_a_command(self, method):
        with pool_of(1, method) as pool:
            pipes = [os.pipe() for _ in range(2)]
            for number, (_, write) in enumerate(pipes):
                os.write(write, b"%d" % number)
                os.close(write)
            assert answer(pool, ("read",), attached=[read for read, _ in pipes]) == [b"0", b"1"]
            for read, _ in pipes:
                os.close(read)  # they stayed ours

    def test_to_one_that_is_busy(self):
        with pool_of() as pool:
            with held(pool):
                numbers = {}
                for value in (b"a", b"b"):
                    read, write = os.pipe()
                    os.write(write, value)
                    numbers[pool.submit(0, ("read",), attached=[read], in_turn=value == b"a")] = value
                    os.close(read)
                    os.close(write)
            came = {reply.id: reply.value for reply in replies(pool, 3)}
            assert all(came[number] == [value] for number, value in numbers.items())


class TestFailures:
    def test_come_as_replies_with_type_and_traceback(self):
        with pool_of(2) as pool:
            number = pool.submit(1, ("fail", KeyError("odd")))
            (reply,) = replies(pool, 1)
            assert (reply.id, reply.worker, reply.value) == (number, 1, None)
            error = reply.failure.raised()
            assert type(error) is KeyError
            assert error.args == ("odd",)
            assert error.__cause__.worker == 1
            assert "do_fail" in error.__cause__.worker_traceback

    def test_the_worker_goes_on(self):
        with pool_of() as pool:
            pid = answer(pool, ("call", get_pid))
            pool.submit(0, ("fail", ValueError()))
            pool.submit(0, ("echo", 1))
            first, second = replies(pool, 2)
            assert first.failure is not None
            assert (second.value, second.failure) == (1, None)
            assert answer(pool, ("call", get_pid)) == pid

    def test_of_classes_that_a_function_defines(self):
        class LocalError(Exception):
            pass

        with pool_of() as pool:
            pool.submit(0, ("fail", LocalError("here")))
            (reply,) = replies(pool, 1)
            assert type(reply.failure.raised()) is LocalError

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()], ids=repr)
    def test_of_those_that_would_end_something(self, error):
        with pool_of() as pool:
            pool.submit(0, ("fail", error))
            (reply,) = replies(pool, 1)
            assert type(error).__name__ in reply.failure.text
            assert answer(pool, ("echo", 1)) == 1

    def test_with_a_text_that_fails(self):
        class BrokenError(Exception):
            def __str__(self):
                raise ValueError

        with pool_of() as pool:
            pool.submit(0, ("fail", BrokenError()))
            (reply,) = replies(pool, 1)
            assert isinstance(reply.failure.raised(), BrokenError | WorkerError)

    def test_of_a_function_that_is_not_there(self):
        """What a command needs is missing over there: it cannot be unpacked."""
        with pool_of() as pool:
            pool.submit(0, ("echo", _OnlyHere()))
            (reply,) = replies(pool, 1)
            assert isinstance(reply.failure.raised(), ModuleNotFoundError)
            assert answer(pool, ("echo", 1)) == 1


class _OnlyHere:
    def __reduce__(self):
        return __import__, ("a_module_that_is_not_there",)


class TestWarnings:
    def test_come_as_notices(self):
        with pool_of() as pool:
            pool.submit(0, ("warn", "odd"))
            pool.submit(0, ("warn", "odder", RuntimeWarning))
            pool.submit(0, ("echo", 1))
            notices = [[(notice.category, notice.text) for notice in reply.notices] for reply in replies(pool, 3)]
            assert notices == [[(UserWarning, "odd")], [(RuntimeWarning, "odder")], []]


class TestSurroundings:
    @pytest.mark.parametrize("method", METHODS)
    def test_environment_variables_are_those_of_the_moment(self, method, monkeypatch):
        with pool_of(1, method):  # a server is there by now
            pass
        monkeypatch.setenv("RLCOLLECT_TEST_LATE", "yes")
        with pool_of(1, method) as pool:
            assert answer(pool, ("call", get_environ, "RLCOLLECT_TEST_LATE")) == "yes"
        monkeypatch.delenv("RLCOLLECT_TEST_LATE")
        with pool_of(1, method) as pool:
            assert answer(pool, ("call", get_environ, "RLCOLLECT_TEST_LATE")) is None

    def test_a_worker_may_have_children(self):
        with pool_of() as pool:
            assert answer(pool, ("start_child",)) == 0

    @pytest.mark.parametrize("method", METHODS)
    def test_ctrl_c_is_not_seen(self, method):
        with pool_of(1, method) as pool:
            (pid,) = pids(pool)
            with held(pool):
                os.kill(pid, signal.SIGINT)
            (reply,) = replies(pool, 1)
            assert reply.failure is None
            assert answer(pool, ("echo", 1)) == 1

    def test_what_it_is_doing(self):
        with pool_of(2) as pool:
            assert pool.told(1) == "worker 1 (starting)"
            with held(pool, 1):
                assert re.fullmatch(r"worker 1 \(holding, for \d+\.\d s\)", pool.told(1))
                assert pool.board.stage(0) == "starting"
            answer_of_hold = replies(pool, 1)
            assert answer_of_hold[0].worker == 1
            answer(pool, ("beat", 12), 1)
            assert "last sign of life" in pool.told(1)
            assert pool.board.count(1) == 12

    def test_by_spawn(self, monkeypatch):
        """All of it at once: it takes seconds to start."""
        monkeypatch.setenv("RLCOLLECT_TEST_LATE", "yes")
        with pool_of(1, "spawn") as pool:
            (pid,) = pids(pool)
            assert answer(pool, ("call", get_environ, "RLCOLLECT_TEST_LATE")) == "yes"
            read, write = os.pipe()
            os.write(write, b"1")
            assert answer(pool, ("read",), attached=[read]) == [b"1"]
            os.close(read)
            os.close(write)
            with held(pool):
                os.kill(pid, signal.SIGINT)
            (reply,) = replies(pool, 1)
            assert reply.failure is None
            pool.submit(0, ("call", die_by, signal.SIGKILL))
            with pytest.raises(WorkerDied, match=r"worker 0 .*SIGKILL"):
                pool.ready(None)
        assert not is_alive(pid)


def die_by(number):
    faulthandler.disable()  # a copy of this program has pytest's
    os.kill(os.getpid(), number)
    time.sleep(LONG)


class TestDeaths:
    @pytest.mark.parametrize("method", METHODS)
    def test_by_exit_code(self, method):
        with pool_of(2, method) as pool:
            pool.submit(1, ("call", os._exit, 3))
            with pytest.raises(WorkerDied, match=r"worker 1 .*exit code 3") as raised:
                pool.ready(None)
            assert (raised.value.worker, raised.value.exitcode) == (1, 3)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda one: one.name)
    def test_by_signal(self, method, number):
        with pool_of(2, method) as pool:
            pool.submit(0, ("call", die_by, number))
            with pytest.raises(WorkerDied, match=f"worker 0 .*{number.name}") as raised:
                pool.ready(None)
            assert (raised.value.worker, raised.value.exitcode) == (0, -number)

    def test_of_an_idle_one(self):
        with pool_of(3) as pool:
            _, pid, _ = pids(pool)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"worker 1 .*SIGKILL"):
                pool.ready(None)

    def test_says_what_it_was_doing(self):
        with pool_of() as pool:
            (pid,) = pids(pool)
            with held(pool):
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(WorkerDied, match="holding") as raised:
                    pool.ready(None)
            assert raised.value.stage == "holding"

    def test_while_another_is_busy(self):
        with pool_of(2) as pool:
            pid = pids(pool)[1]
            with held(pool, 0):
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(WorkerDied, match="worker 1 "):
                    pool.ready(None)

    def test_replies_that_came_before_are_not_lost(self):
        with pool_of(2) as pool:
            numbers = {pool.submit(0, ("echo", 0)), pool.submit(1, ("echo", 1)), pool.submit(1, ("echo", 2))}
            pool.submit(1, ("call", os._exit, 3))
            came = set()
            with pytest.raises(WorkerDied):  # noqa: PT012 - as late as can be
                while True:
                    came |= {reply.id for reply in pool.ready(LONG)}
                    pool.done()
            assert came >= numbers - {min(numbers)}
            assert came <= numbers

    def test_is_said_again(self):
        with pool_of() as pool:
            pool.submit(0, ("call", os._exit, 3))
            for _ in range(2):
                with pytest.raises(WorkerDied, match="exit code 3"):
                    pool.ready(LONG)

    def test_is_said_when_something_is_to_be_done(self):
        with pool_of() as pool:
            (pid,) = pids(pool)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not is_alive(pid))
            with pytest.raises(WorkerDied, match="SIGKILL"):
                pool.submit(0, ("echo", 1))

    def test_in_the_middle_of_a_start(self):
        pool = None
        try:
            with pytest.raises(WorkerDied, match=r"exit code 5.*starting"):  # noqa: PT012 - wherever it is noticed
                pool = new_pool(made_by=make_dead)
                pool.ready(LONG)
        finally:
            if pool is not None:
                pool.shutdown()

    def test_by_somebody_who_asks_it_to_end(self, tmp_path):
        with pool_of() as pool:
            (pid,) = pids(pool)
            answer(pool, ("note_close", str(tmp_path / "note")))
            os.kill(pid, signal.SIGTERM)
            with pytest.raises(WorkerDied, match=r"SIGTERM|143"):
                pool.ready(LONG)
            assert (tmp_path / "note").exists()


@pytest.fixture
def leaves_nothing():
    """What the program has before and after: the server of processes stays."""
    with pool_of():
        pass
    gc.collect()
    before = descriptors(), set(threading.enumerate()), {*multiprocessing.active_children()}
    yield
    gc.collect()
    after = descriptors(), set(threading.enumerate()), {*multiprocessing.active_children()}
    assert after == before


@pytest.mark.usefixtures("leaves_nothing")
class TestShutdown:
    def ended(self, pool, processes):
        start = time.monotonic()
        pool.shutdown()
        assert time.monotonic() - start < 20, "it is to be over within seconds"
        assert [pid for pid in processes if is_alive(pid)] == []
        pool.shutdown()

    @pytest.mark.parametrize("method", METHODS)
    def test_of_idle_workers_closes_what_they_hold(self, method, tmp_path):
        pool = new_pool(2, method)
        processes = pids(pool)
        for worker in range(2):
            answer(pool, ("note_close", str(tmp_path / f"{worker}")), worker)
        self.ended(pool, processes)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

    def test_at_once(self):
        self.ended(new_pool(2), [])

    @pytest.mark.parametrize("method", ["forkserver", pytest.param("fork", marks=pytest.mark.slow)])
    def test_of_workers_that_hang(self, method, tmp_path):
        """They are told to end, and close what they hold."""
        pool = new_pool(3, method)
        processes = pids(pool)
        for worker in range(3):
            answer(pool, ("note_close", str(tmp_path / f"{worker}")), worker)
            pool.submit(worker, ("sleep",))
        wait_until(lambda: all(pool.board.stage(worker) == "holding" for worker in range(3)))
        self.ended(pool, processes)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]

    @pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
    def test_of_workers_that_do_not_listen(self, method):
        pool = new_pool(3, method)
        processes = pids(pool)
        for worker in range(3):
            pool.submit(worker, ("sleep", True))
        wait_until(lambda: all(pool.board.stage(worker) == "holding" for worker in range(3)))
        self.ended(pool, processes)

    def test_of_a_worker_that_hangs_while_it_closes(self):
        pool = new_pool(2)
        processes = pids(pool)
        answer(pool, ("hang_at_close",))
        self.ended(pool, processes)

    def test_with_commands_that_wait(self):
        pool = new_pool()
        processes = pids(pool)
        for value in range(20):
            pool.submit(0, ("echo", value))
        self.ended(pool, processes)

    def test_after_a_death(self):
        pool = new_pool(3)
        processes = pids(pool)
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            pool.ready(None)
        self.ended(pool, processes)

    def test_of_a_stopped_process(self):
        pool = new_pool()
        processes = pids(pool)
        os.kill(processes[0], signal.SIGSTOP)
        self.ended(pool, processes)

    def test_in_a_copy_of_the_program_ends_nothing(self):
        pool = new_pool()
        processes = pids(pool)
        copy = os.fork()
        if not copy:
            pool.shutdown()
            os._exit(0)
        os.waitpid(copy, 0)
        assert answer(pool, ("echo", 1)) == 1
        self.ended(pool, processes)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1])
    def test_a_ctrl_c_between_two_steps_of_a_start_leaves_nothing(self, method, at, monkeypatch):
        """What was made a moment ago has an owner: no socket, no process stays."""
        pipe, made = multiprocessing.Pipe, []

        def interrupted(duplex):
            made.append(pipe(duplex))
            if len(made) == at + 1:
                signal.raise_signal(signal.SIGINT)
            return made[-1]

        with pool_of(1, method):  # the server is there
            pass
        gc.collect()
        before = descriptors()
        monkeypatch.setattr(multiprocessing, "Pipe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            new_pool(2, method)
        assert len(made) > at
        made.clear()
        gc.collect()
        assert descriptors() == before

    @pytest.mark.parametrize("method", METHODS)
    def test_is_seen_by_each_worker_at_once(self, method):
        """The copies of the program that came later have nothing open that belongs to others."""
        with pool_of(3, method) as pool:
            (pid, *_) = pids(pool)
            began = time.monotonic()
            pool.retire(0)
            assert not is_alive(pid)
            assert time.monotonic() - began < LET_GO, "it did not see its pipe close, and had to be terminated"

    def test_a_start_that_fails_leaves_nothing(self):
        with pytest.raises(OptionError, match="start_method"):
            new_pool(2, method="thread")


class TestRestart:
    @pytest.mark.parametrize("method", METHODS)
    def test_after_a_death(self, method):
        with pool_of(2, method) as pool:
            before = pids(pool)
            os.kill(before[0], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="worker 0 "):
                pool.ready(None)
            pool.restart(0)
            after = pids(pool)
            assert after[1] == before[1]
            assert after[0] != before[0]
        assert not any(is_alive(pid) for pid in (*before, *after))

    def test_of_one_that_is_busy(self):
        with pool_of() as pool:
            pool.submit(0, ("call", time.sleep, LONG))
            (old,) = (process.pid for process in pool._processes)
            start = time.monotonic()
            pool.restart(0)
            assert time.monotonic() - start < 20, "it is to be over within seconds"
            assert not is_alive(old)
            assert answer(pool, ("echo", 1)) == 1

    def test_what_the_others_say_is_heard(self):
        with pool_of(2) as pool:
            number = pool.submit(1, ("echo", 5))
            pool.restart(0)
            (reply,) = replies(pool, 1)
            assert (reply.id, reply.value) == (number, 5)

    def test_two_that_are_gone(self):
        with pool_of(3) as pool:
            for pid in pids(pool)[:2]:
                os.kill(pid, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(WorkerDied) as raised:
                    pool.ready(None)
                pool.restart(raised.value.worker)
            assert len({*pids(pool)}) == 3

    def test_a_command_may_have_the_number_that_it_had(self):
        with pool_of() as pool:
            number = pool.submit(0, ("call", os._exit, 3))
            with pytest.raises(WorkerDied):
                pool.ready(None)
            pool.restart(0)
            assert pool.submit(0, ("echo", 1), number=number) == number
            (reply,) = replies(pool, 1)
            assert (reply.id, reply.value) == (number, 1)

    def test_another_thread_may_send_meanwhile(self):
        """Nothing but `ClosedError` is raised, nothing comes before the worker knows where its page is."""
        errors, is_over, sent = [], threading.Event(), 0

        def send():
            nonlocal sent
            while not is_over.is_set():
                try:
                    pool.submit(0, News(("echo", sent)))
                    sent += 1
                except ClosedError:
                    continue
                except BaseException as error:
                    errors.append(error)

        with pool_of() as pool:
            thread = threading.Thread(target=send)
            thread.start()
            try:
                for _ in range(10):
                    pool.restart(0)
                    time.sleep(0.02)
            finally:
                is_over.set()
                thread.join()
            assert errors == []
            assert sent
            number = pool.submit(0, ("echo", "last"))
            while not (came := [reply for reply in pool.ready(LONG) if reply.id == number]):
                pool.done()
            assert came[0].value == "last"

    def test_leaves_nothing_behind(self):
        with pool_of(2) as pool:
            pids(pool)
            before = len([*Path("/proc/self/fd").iterdir()])
            for _ in range(5):
                pool.restart(0)
            pids(pool)
            assert len([*Path("/proc/self/fd").iterdir()]) == before
