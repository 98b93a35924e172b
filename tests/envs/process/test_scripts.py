"""Programs with a `ProcessVectorEnv`, run as a user runs them; and every way to start processes."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import ExitStack

import pytest

from rlcollect import Collector
from tests.envs.process.helpers import Random, check_same, processes, sync
from tests.workers.fault_helpers import Belongings, Script, check_nothing_is_left

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]
METHODS = ["forkserver", "spawn", "fork"]
BODY = """
    import os, signal, sys, time
    import gymnasium as gym
    import numpy as np
    from gymnasium import spaces
    from rlcollect import ProcessVectorEnv

    class Own(gym.Env):
        observation_space = spaces.Box(0, 9, (1,), np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {"made": Thing()}

        def step(self, action):
            if SLOW:
                time.sleep(60)
            return np.ones(1, np.float32), 1.0, False, False, {}

    class Thing:
        pass

    SLOW = False
    gym.register("Own-v0", entry_point=Own)
    print("once", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Starts programs, and ends what is left of them."""
    with ExitStack() as stack:

        def started(body, name="0"):
            body = textwrap.dedent(BODY) + textwrap.dedent(body)
            return stack.enter_context(Script(tmp_path / name, body))

        yield started


@pytest.mark.parametrize("method", METHODS)
def test_start_methods(method):
    before = Belongings.now()
    ours, theirs = processes(Random, 3, 2, start_method=method), sync([Random] * 3)
    check_same(ours.reset(seed=0), theirs.reset(seed=0))
    for _ in range(30):
        actions = ours.action_space.sample()
        check_same(ours.step(actions), theirs.step(actions))
    ours.close()
    if method != "forkserver":  # its server lives on
        check_nothing_is_left(before)


def test_without_a_guard(start):
    """Its own class, a lambda, an id that it has registered; for each start method."""
    script = start("""
        for method in ("forkserver", "spawn", "fork"):
            for make in (Own, lambda: Own(), "Own-v0") if method != "spawn" else ("Own-v0",):
                with ProcessVectorEnv(make, 4, 2, start_method=method) as envs:
                    envs.reset(seed=0)
                    print(method, envs.step(np.zeros(4, np.int64))[1].sum())
    """)
    assert script.ended(50) == 0, script.err
    assert script.out.splitlines() == ["once", *["forkserver 4.0"] * 3, "spawn 4.0", *["fork 4.0"] * 3]
    assert not script.err
    script.check_nothing_lives()


def test_ends(start):
    """By Ctrl-C in a step, by a kill, and without closing. Side by side: most of the time goes into imports."""
    begin = """
        envs = ProcessVectorEnv(Own, 4, 2, start_method={method!r})
        envs.reset()
        print("ready", flush=True)
    """
    stepping = """
        while True:
            envs.step(np.zeros(4, np.int64))
    """
    interrupted = [
        start("SLOW = True\n" + textwrap.dedent(begin.format(method=method)) + textwrap.dedent(stepping), method)
        for method in ("forkserver", "fork")
    ]
    killed = start(textwrap.dedent(begin.format(method="fork")) + textwrap.dedent(stepping), "killed")
    left = start(begin.format(method="fork"), "left")
    for script in (*interrupted, killed, left):
        script.wait_for("ready")
    os.kill(killed.process.pid, signal.SIGKILL)
    for script in interrupted:
        script.interrupt()
    for script in interrupted:
        assert script.ended(8) in (-signal.SIGINT, 128 + signal.SIGINT)
        script.check_nothing_lives(5)
        assert script.err.count("Traceback (most recent call last)") == 1, script.err
        assert "KeyboardInterrupt" in script.err
    killed.ended(5)
    killed.check_nothing_lives(6)
    assert left.ended(10) == 0
    left.check_nothing_lives(5)
    assert "Traceback" not in left.err
    assert left.err.count("ResourceWarning") <= 1, left.err


def test_a_collector_collects_from_it():
    envs = processes("CartPole-v1", 4, 2)
    with Collector(envs, frames_per_batch=400, total_frames=800) as collector:
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(4, 100)] * 2
    for batch in batches:
        ended = batch["next", "done"].squeeze(-1)
        assert ended.any()
        within = ~ended[:, :-1]
        assert (batch["next", "observation"][:, :-1][within] == batch["observation"][:, 1:][within]).all()
        assert (batch["next", "observation"][:, :-1][~within] != batch["observation"][:, 1:][~within]).any()
    envs.close()
