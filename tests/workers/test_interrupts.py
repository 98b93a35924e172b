"""Ctrl-C in any call, a fork of the program, late failures: no frame is lost or doubled, nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch

from rlcollect import MultiAsyncCollector, MultiSyncCollector, WorkerTimeout
from rlcollect.testing import Counter

both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
async_soon = pytest.mark.parametrize(
    "kind", [pytest.param(MultiSyncCollector, marks=pytest.mark.slow), MultiAsyncCollector]
)
pytestmark = pytest.mark.timeout(60)


def endless():
    return Counter(None)


class interrupting:  # noqa: N801 - reads as a statement
    """A real signal with the k-th call of a Python function inside."""

    def __init__(self, number):
        self.number = number
        self.calls = 0

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, argument):
        self.calls += event == "call"
        if self.calls == self.number and event == "call":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def times_of(batches):
    """By worker, the steps of its frames as they were delivered: t counts up while an episode goes on."""
    rows = {0: [], 1: []}
    for batch in batches:
        for part in batch.unbind(0) if batch.ndim == 2 else [batch]:
            (worker,) = set((part["collector", "traj_ids"] >> 40).tolist())
            rows[worker] += part["observation"].flatten().tolist()
    return rows


@both
def test_in_any_call_of_next_no_frame_is_lost(kind):
    batches, interrupted = [], 0
    with kind([endless] * 2, frames_per_batch=4, timeout=20) as collector:
        for number in range(1, 160):
            with contextlib.suppress(KeyboardInterrupt), interrupting(number) as places:
                batches.append(collector.next())
            interrupted += places.calls >= number
            batches.append(collector.next())
        assert collector.collected_frames == sum(batch.numel() for batch in batches)
    assert interrupted > 20
    for times in times_of(batches).values():
        assert times == [float(t) for t in range(len(times))]


class Interrupts:
    """Real signals at random moments, from a thread, of which those inside `next` raise."""

    def __init__(self, collector):
        self._collector = collector
        self._is_inside = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._heard)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _send(self):
        while not self._stop.wait(random.uniform(0.001, 0.01)):
            os.kill(os.getpid(), signal.SIGINT)

    def _heard(self, number, frame):
        if self._is_inside:  # one, and none while that one is handled
            self._is_inside = False
            raise KeyboardInterrupt

    def next(self):
        """A batch; None if one came."""
        try:
            self._is_inside = True
            batch = self._collector.next()
            self._is_inside = False
        except KeyboardInterrupt:
            return None
        return batch


@both
def test_at_any_moment_whichever_thread_receives_it(kind):
    """A mask of the main thread keeps away no signal that another thread receives."""
    caught = 0
    with kind([endless] * 2, frames_per_batch=4, timeout=20) as collector:
        with Interrupts(collector) as interrupts:
            end = time.monotonic() + 2
            while caught <= 50 or time.monotonic() < end:
                caught += interrupts.next() is None
        delivered = collector.collected_frames
        batches = [collector.next() for _ in range(20)]
        assert collector.collected_frames == delivered + sum(batch.numel() for batch in batches)
    assert caught > 50
    for times in times_of(batches).values():
        assert times == [times[0] + t for t in range(len(times))]


@both
def test_while_weights_are_published(kind):
    with kind([endless] * 2, frames_per_batch=4, timeout=20) as collector:
        versions = []
        for number in range(1, 60, 4):
            with contextlib.suppress(KeyboardInterrupt), interrupting(number):
                collector.update_policy_weights_()
            versions.append(collector.policy_version)
        assert collector.next() is not None
    assert versions == sorted(versions)


@both
def test_a_function_that_fails_loses_no_rollout_of_others(kind):
    batches = []
    with kind([endless] * 2, frames_per_batch=4, timeout=20) as collector:
        for _ in range(60):
            batches.append(collector.next())
            with pytest.raises(ZeroDivisionError):
                collector.map_fn(lambda envs: 1 / 0)
    for times in times_of(batches).values():
        assert times == [float(t) for t in range(len(times))]


@async_soon
def test_a_late_failure_of_what_nobody_waits_for_is_told(kind):
    def fail(envs):
        time.sleep(0.6)
        raise RuntimeError("too late")

    with kind([endless], frames_per_batch=4, timeout=0.3) as collector:
        collector.next()
        with pytest.raises(WorkerTimeout):
            collector.map_fn(fail)
        time.sleep(0.8)
        with pytest.warns(UserWarning, match="nobody waits for any more.*too late"):  # noqa: PT031 - whichever of them
            for _ in range(3):
                collector.next()
        assert not collector.closed


@both
def test_a_fork_of_the_program_leaves_the_workers_alone(kind):
    with kind([endless] * 2, frames_per_batch=4, timeout=20) as collector:
        collector.next()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                collector.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        for _ in range(10):
            assert collector.next() is not None


@async_soon
def test_large_commands_and_large_batches_pass_each_other(kind):
    """A worker that sends waits for the program to read, and the program does not wait for it to read."""
    large = torch.zeros(1_000_000)
    with kind([endless] * 2, frames_per_batch=4000, use_buffers=False, timeout=30) as collector:
        for _ in range(3):
            collector.next()
            time.sleep(0.05)
            assert collector.map_fn(lambda envs: len(large)) == [len(large)] * 2
