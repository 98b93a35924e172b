"""Programs that collect in worker processes, run as a user runs them: how they end, whatever ends them.

Starting one takes seconds, of which most are imports; so programs that differ in one thing run side by side. A worker
that is spawned imports it all again: there is one of these where one shows as much as two.
"""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import ExitStack

import pytest

from tests.workers.fault_helpers import Script, becomes_true, segments, told, without_those_of_others

pytestmark = pytest.mark.timeout(60)

ENDS_WITHIN = 5.0  # seconds
METHODS = ["forkserver", "spawn", "fork"]
which = pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MultiSyncCollector", ""),
        pytest.param("MultiAsyncCollector", ", start_method='fork'", marks=pytest.mark.slow),
    ],
)


@pytest.fixture
def start(tmp_path):
    """Starts programs, and ends what is left of them."""
    with ExitStack() as stack:
        count = 0

        def started(*parts):
            nonlocal count
            count += 1
            body = "\n".join(textwrap.dedent(part) for part in parts)
            return stack.enter_context(Script(tmp_path / str(count), body))

        yield started


IMPORTS = """
    import functools, gc, os, signal, sys, threading, time
    import gymnasium as gym
    import torch
    from rlcollect import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
    from rlcollect.testing import Breaker, Counter
"""


def check_one_traceback(script, last):
    """Nobody but main says anything, and it says it once."""
    err = script.err
    assert err.count("Traceback (most recent call last)") == 1, err
    assert last in err
    assert "WorkerError" not in err
    assert "Exception ignored" not in err
    assert "resource_tracker" not in err
    assert err.count("ResourceWarning") <= 1


class TestInterrupts:
    """FAULTS 51: Ctrl-C ends all processes within five seconds, with one traceback."""

    def check(self, scripts):
        for script in scripts:
            script.wait_for("ready")
        for script in scripts:
            script.interrupt()
            code = script.ended(ENDS_WITHIN)
            script.check_nothing_lives(ENDS_WITHIN)
            assert code in (-signal.SIGINT, 128 + signal.SIGINT)
            check_one_traceback(script, "KeyboardInterrupt")

    @pytest.mark.parametrize(
        ("method", "is_inside"),
        [
            ("forkserver", False),
            *(
                pytest.param(method, is_inside, marks=pytest.mark.slow)
                for method, is_inside in (("forkserver", True), ("fork", False), ("spawn", True))
            ),
        ],
    )
    def test_while_collecting(self, start, method, is_inside):
        """Inside `with`, and without it."""
        inside = """
            with MultiSyncCollector([Counter] * {count}, frames_per_batch=64, start_method={method!r}) as collector:
                for number, _ in enumerate(collector):
                    if number == 5:
                        print("ready", flush=True)
        """
        outside = """
            collector = MultiAsyncCollector([Counter] * {count}, frames_per_batch=64, start_method={method!r})
            for number, _ in enumerate(collector):
                if number == 5:
                    print("ready", flush=True)
        """
        body = inside if is_inside else outside
        self.check([start(IMPORTS, body.format(method=method, count=1 if method == "spawn" else 2))])

    @pytest.mark.slow
    def test_while_a_step_takes_long(self, start):
        """Main waits for it without end, and sees the key at once; the workers sleep on until they are ended."""
        body = """
            class Long(Counter):
                def step(self, action):
                    print("ready", flush=True)
                    time.sleep(60)
                    return super().step(action)

            with {kind}([Long] * 2, frames_per_batch=64, start_method="fork") as collector:
                collector.next()
        """
        self.check([start(IMPORTS, body.format(kind=kind)) for kind in ("MultiSyncCollector", "MultiAsyncCollector")])

    @pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
    def test_while_environments_are_made(self, start, method):
        body = """
            def long():
                print("ready", flush=True)
                time.sleep(60)

            MultiSyncCollector([Counter, long], frames_per_batch=64, start_method={method!r})
        """
        self.check([start(IMPORTS, body.format(method=method))])

    def test_while_the_server_of_processes_is_on_its_way(self, start):
        body = """
            def soon():
                time.sleep(0.3)
                print("ready", flush=True)

            threading.Thread(target=soon, daemon=True).start()
            kept = MultiSyncCollector([Counter] * 2, frames_per_batch=64)
            time.sleep(60)
        """
        self.check([start(IMPORTS, body)])

    def test_the_program_may_go_on(self, start):
        """It is caught: the collector is still there, and ends like any other."""
        body = """
            with MultiSyncCollector([Counter] * 2, frames_per_batch=64, start_method="fork") as collector:
                collector.next()
                try:
                    print("ready", flush=True)
                    while True:
                        collector.next()
                except KeyboardInterrupt:
                    print("caught", collector.closed, flush=True)
                print(collector.next().shape, flush=True)
        """
        script = start(IMPORTS, body)
        script.wait_for("ready")
        script.interrupt()
        assert script.ended(10) == 0, script.err
        script.check_nothing_lives()
        assert script.out.splitlines() == ["ready", "caught False", "torch.Size([2, 32])"]
        assert script.err == ""


class TestEnds:
    """FAULTS 51: it ends when the program does, and says next to nothing."""

    @which
    def test_without_shutdown(self, start, kind, more):
        body = """
            collector = {kind}([Counter] * 2, frames_per_batch=64{more})
            print(collector.next().numel())
        """
        script = start(IMPORTS, body.format(kind=kind, more=more))
        assert script.ended() == 0, script.err
        script.check_nothing_lives()
        assert script.out == "64\n"
        assert "Traceback" not in script.err
        assert "resource_tracker" not in script.err
        assert script.err.count("Warning") <= 1, script.err

    @pytest.mark.slow
    def test_a_loop_that_raises(self, start):
        """By itself, or since an environment did: one traceback for the first, the worker's own too for the second."""
        mine = """
            collector = MultiAsyncCollector([Counter] * 2, frames_per_batch=64, start_method="fork")
            for _ in collector:
                raise ZeroDivisionError("mine")
        """
        theirs = """
            def maker():
                return Breaker(at=9)

            collector = MultiSyncCollector([Counter, maker], frames_per_batch=64, start_method="fork")
            for _ in collector:
                pass
        """
        scripts = [start(IMPORTS, mine), start(IMPORTS, theirs)]
        for script in scripts:
            assert script.ended() == 1
            script.check_nothing_lives()
        check_one_traceback(scripts[0], "ZeroDivisionError: mine")
        err = scripts[1].err
        assert "RuntimeError: Breaker broke" in err
        assert "worker 1, lane 0, step 8" in err
        assert "raise self._make_exception()" in err
        assert "ResourceWarning" not in err

    @pytest.mark.slow
    def test_sys_exit_in_a_loop(self, start):
        body = """
            with MultiSyncCollector([Counter] * 2, frames_per_batch=64, start_method="fork") as collector:
                for _ in collector:
                    sys.exit(7)
        """
        script = start(IMPORTS, body)
        assert script.ended() == 7
        script.check_nothing_lives()
        assert (script.out, script.err) == ("", "")


class TestMainIsKilled:
    """DESIGN 9.14: workers end by themselves; nothing has a name that could be left."""

    def check(self, scripts, before):
        for script in scripts:
            script.wait_for("ready")
        for script in scripts:
            assert len(script.living()) >= 3
            os.kill(script.process.pid, signal.SIGKILL)
            script.ended(5)
        for script in scripts:
            script.check_nothing_lives(8.0)
            assert "Traceback" not in script.err, script.err
        assert becomes_true(lambda: not without_those_of_others(segments() - before)), segments() - before

    @which
    def test_while_collecting(self, start, kind, more):
        before = segments()
        body = """
            collector = {kind}([Counter] * 2, frames_per_batch=64{more})
            for number, _ in enumerate(collector):
                if number == 5:
                    print("ready", flush=True)
        """
        self.check([start(IMPORTS, body.format(kind=kind, more=more))], before)

    @pytest.mark.slow
    def test_while_a_step_takes_long(self, start):
        """And while workers wait for a command, and for room."""
        before = segments()
        step = """
            class Long(Counter):
                def step(self, action):
                    print("ready", flush=True)
                    time.sleep(60)

            MultiSyncCollector([Counter, Long], frames_per_batch=64, start_method="fork").next()
        """
        idle = """
            collector = MultiAsyncCollector([Counter], frames_per_batch=64, start_method="spawn")
            collector.next()
            print("ready", flush=True)
            time.sleep(60)
        """
        self.check([start(IMPORTS, step), start(IMPORTS, idle)], before)


class TestNoGuard:
    """No `if __name__ == "__main__"` is needed, and what the script defines crosses: by value, or as a copy of it."""

    BODY = """
        with open(__file__ + ".runs", "a") as file:
            file.write("run\\n")

        class Mine(Counter):
            def step(self, action):
                answer = super().step(action)
                return answer[0], self.bonus(), *answer[2:]

            def bonus(self):
                return BONUS

        class MineBreaks(Mine):
            def step(self, action):
                if self.t == 3:
                    raise MineError("mine", code=5)
                return super().step(action)

        class MineError(Exception):
            def __init__(self, text, *, code):
                super().__init__(text)
                self.code = code

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def forward(self, observation):
                return choose(observation)

        def choose(observation):
            return torch.ones(observation.shape[:-1], dtype=torch.int64)

        BONUS = 4.0
        before = lambda: CALLS.append(1)
        CALLS = []
        method = {method!r}

        def after(batch):
            assert (batch["next", "reward"] == BONUS).all()

        options = dict(frames_per_batch=8, total_frames=24, start_method=method)
        hooks = dict(pre_collect_hook=before, post_collect_hook=after)
        with MultiSyncCollector([functools.partial(Mine, 2), lambda: Mine(3)], Net(), **options, **hooks) as collector:
            frames = 0
            for batch in collector:
                assert (batch["action"] == 1).all(), batch["action"]
                assert (batch["next", "reward"] == BONUS).all()
                frames += batch.numel()
                collector.update_policy_weights_()
            print(frames, collector.map_fn(lambda envs: [type(env).__name__ for env in envs]))
        collector = AsyncCollector(MineBreaks, choose, **options)
        try:
            list(collector)
        except MineError as error:
            print(type(error) is MineError, error, error.code, error.__cause__.worker, error.__cause__.step)
            assert "MineError: mine" in error.__cause__.worker_traceback
        print("CALLS", len(CALLS), __name__)
    """

    @pytest.mark.slow
    def test_each_start_method(self, start):
        scripts = [start(IMPORTS, textwrap.dedent(self.BODY.format(method=method))) for method in METHODS]
        for script in scripts:
            assert script.ended() == 0, script.err
            script.check_nothing_lives()
            assert script.err == ""
            assert script.out.splitlines() == [
                "24 [['Mine'], ['Mine']]",
                "True mine 5 0 3",
                "CALLS 0 __main__",
            ]
            assert script.path.with_name("script.py.runs").read_text() == "run\n"


class TestThreads:
    @pytest.mark.slow
    def test_after_torch_and_others_have_used_threads(self, start):
        """FAULTS 53: each start method works in a program whose threads hold locks at any moment.

        A copy has torch's locks as they are, so while it is made the thread does nothing but use torch.
        """
        body = """
            lock, stop, rest = threading.Lock(), threading.Event(), 0.0

            def busy():
                while not stop.is_set():
                    with lock:
                        torch.rand(64, 64) @ torch.rand(64, 64)
                        time.sleep(rest) if rest else None

            torch.set_num_threads(2)
            torch.rand(600, 600) @ torch.rand(600, 600)
            thread = threading.Thread(target=busy)
            thread.start()
            net = torch.nn.Linear(64, 64)

            def policy(observation):
                net(torch.rand(600, 64)) @ torch.rand(64, 600)
                return torch.zeros(observation.shape[:-1], dtype=torch.int64)

            for method in ("fork", "forkserver", "spawn"):
                rest = 0.0 if method == "fork" else 0.001
                for kind in (MultiSyncCollector, MultiAsyncCollector)[: 1 if method == "spawn" else 2]:
                    makers = [Counter] * (1 if method == "spawn" else 2)
                    options = dict(total_frames=64, start_method=method, timeout=20, start_timeout=20)
                    with kind(makers, policy, frames_per_batch=16, **options) as collector:
                        print(method, sum(batch.numel() for batch in collector), flush=True)
            print(torch.get_num_threads(), threading.active_count())
            stop.set()
        """
        script = start(IMPORTS, body)
        assert script.ended(50) == 0, script.err
        script.check_nothing_lives()
        assert script.out.splitlines() == ["fork 64"] * 2 + ["forkserver 64"] * 2 + ["spawn 64", "2 2"]
        assert "Traceback" not in script.err


class TestNested:
    """Environments that have processes of their own: these are gone too, whoever was ended, and how."""

    MAKER = """
        def vector():
            return gym.vector.AsyncVectorEnv(
                [lambda: gym.make("CartPole-v1")] * 2, context="fork",
                autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
            )

        def nested(envs):
            return [process.pid for env in envs for process in env.unwrapped.processes]
    """

    @pytest.mark.slow
    def test_after_shutdown_and_after_a_kill(self, start):
        body = """
            def is_alive(pid):
                try:
                    with open(f"/proc/{pid}/stat") as file:
                        return file.read().rpartition(")")[2].split()[0] not in "ZX"
                except OSError:
                    return False

            def gone(pids):
                deadline = time.monotonic() + 8
                while any(map(is_alive, pids)) and time.monotonic() < deadline:
                    time.sleep(0.02)
                return not any(map(is_alive, pids))

            for kind in (MultiSyncCollector, MultiAsyncCollector):
                with kind([vector] * 2, frames_per_batch=64) as collector:
                    print(collector.next().numel())
                    children = sum(collector.map_fn(nested), [])
                    print(len(set(children)), all(map(is_alive, children)))
                print("shutdown", gone(children))
            collector = MultiSyncCollector([vector] * 2, frames_per_batch=64)
            collector.next()
            children = sum(collector.map_fn(nested), [])
            os.kill(collector.map_fn(lambda envs: os.getpid())[1], signal.SIGKILL)
            try:
                collector.next()
            except RuntimeError as error:
                print(type(error).__name__)
            print("kill", gone(children))
        """
        script = start(IMPORTS, self.MAKER, body)
        assert script.ended(50) == 0, script.err
        lines = script.out.splitlines()
        assert lines == ["64", "4 True", "shutdown True"] * 2 + ["WorkerDied", "kill True"]
        script.check_nothing_lives()

    def test_after_ctrl_c_and_after_main_was_killed(self, start):
        body = """
            with MultiSyncCollector([vector] * 2, frames_per_batch=64, start_method="fork") as collector:
                for number, _ in enumerate(collector):
                    if number == 5:
                        print("ready", flush=True)
        """
        interrupted, killed = start(IMPORTS, self.MAKER, body), start(IMPORTS, self.MAKER, body)
        for script in (interrupted, killed):
            script.wait_for("ready")
            assert len(script.living()) >= 7
        interrupted.interrupt()
        os.kill(killed.process.pid, signal.SIGKILL)
        assert interrupted.ended(ENDS_WITHIN) != 0
        interrupted.check_nothing_lives(ENDS_WITHIN)
        check_one_traceback(interrupted, "KeyboardInterrupt")
        killed.ended(5)
        killed.check_nothing_lives(8.0)

    @pytest.mark.slow
    def test_a_worker_that_hangs(self, start):
        """It is killed at shutdown, and what it had started goes with it."""
        body = """
            class Holding(Counter):
                def __init__(self):
                    super().__init__()
                    self.held = vector()
                    self.held.reset()

                def step(self, action):
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    while True:
                        time.sleep(0.1)

            collector = MultiSyncCollector([Counter, Holding], frames_per_batch=64, timeout=0.5, start_method="fork")
            try:
                collector.next()
            except TimeoutError as error:
                print(type(error).__name__)
            collector.shutdown()
            print("ready", flush=True)
            time.sleep(60)
        """
        script = start(IMPORTS, self.MAKER, body)
        script.wait_for("ready")
        assert script.out.splitlines()[0] == "WorkerTimeout"
        main = script.process.pid
        alone = becomes_true(lambda: script.living() == [main])
        assert alone, [told(pid) for pid in script.living() if pid != main]
