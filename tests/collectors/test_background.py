"""Collection in the background: what can be called meanwhile, what is counted, how it fails, and how it ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import signal
import threading
import time
import warnings
import weakref

import pytest
import torch
from tensordict.nn import TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import nn

from rlcollect import (
    ClosedError,
    OptionError,
    PolicyError,
    ReplayBuffer,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from rlcollect.collectors import background, running
from rlcollect.testing import Echo, Tagged
from tests.workers.fault_helpers import (
    Belongings,
    Script,
    becomes_true,
    check_nothing_is_left,
    kill_worker,
    raised_by,
    within,
)
from tests.workers.helpers import KINDS, PROCESSES, of
from tests.workers.test_buffers import ROOM, Listed, check_counts, check_tagged, make_tagged

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")]

every_kind, process_kinds = of(KINDS), of(PROCESSES)
single_and_async = pytest.mark.parametrize("kind", [KINDS["single"], KINDS["async"]], ids=["single", "async"])
single_and_async_soon = of(KINDS, slow=("sync", "one async"))
async_soon = of(PROCESSES, slow=("sync", "one async"))
LONG = 30.0  # seconds for what must come, however busy the machine is
IDS = ("collector", "traj_ids")
VERSION = ("collector", "policy_version")


class Steady(Tagged):
    """A step takes half a millisecond, so that what is called comes in the midst of rollouts."""

    def step(self, action):
        time.sleep(0.0005)
        return super().step(action)


def steady(worker):
    return functools.partial(Steady, worker, 5)


@pytest.fixture
def buffer():
    with ReplayBuffer(ROOM, storage="shared") as made:
        yield made


def opened(kind, buffer, make=steady, policy=None, *, lanes=2, steps=8, **options):
    return kind.open(make, policy, lanes=lanes, steps=steps, replay_buffer=buffer, **options)


# --- start, pause, resume ---------------------------------------------------------------------------------------------


class TestStart:
    @every_kind
    def test_frames_come_by_themselves_until_the_total(self, kind, buffer):
        total = 160 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            assert not collector.is_running()
            assert collector.start() is None
            assert collector.is_running()
            collector.wait_for(frames=total, timeout=LONG)
            assert collector.exhausted
            assert not collector.is_running()
            check_counts(buffer, collector, total)
        check_tagged(buffer)

    @every_kind
    def test_batches_are_made_by_one_of_both(self, kind, buffer):
        """`next`, iteration and a second `start` are refused while it runs, also in a pause."""
        with opened(kind, buffer) as collector:
            collector.start()
            calls = [collector.next, lambda: list(collector), lambda: next(iter(collector)), collector.start]
            for _ in range(2):
                for call in calls:
                    with pytest.raises(OptionError, match=r"background already"):
                        call()
                with pytest.raises(OptionError, match=r"rollout\(\) does not go with"):
                    collector.rollout()
                collector.pause()

    @every_kind
    def test_without_a_buffer_there_is_nowhere_to_go(self, kind):
        with kind.open(make_tagged, lanes=2) as collector:
            with pytest.raises(OptionError, match=r"start\(\) needs replay_buffer="):
                collector.start()
            for name in ("pause", "resume", "wait_for"):
                with pytest.raises(OptionError, match=r"call start\(\) first"):
                    getattr(collector, name)(**({"frames": 1} if name == "wait_for" else {}))
            assert not collector.is_running()
            assert collector.next() is not None

    @every_kind
    def test_after_the_last_frame_it_ends_at_once(self, kind, buffer):
        """Started again when all was made, and when it was made by `next`."""
        total = 32 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            for _ in collector:
                pass
            for _ in range(2):
                collector.start()
                assert becomes_true(lambda: not collector._is_started)
                assert not collector.is_running()
                collector.wait_for(frames=total)
                with pytest.raises(OptionError, match="Collection has ended with frames="):
                    collector.wait_for(frames=total + 1)
            assert collector.next() is None
            check_counts(buffer, collector, total)

    @every_kind
    def test_it_goes_on_from_where_next_was(self, kind, buffer):
        total = 320 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            for _ in range(3):
                collector.next()
            collector.start()
            collector.wait_for(frames=total, timeout=LONG)
            check_counts(buffer, collector, total)
        check_tagged(buffer)

    def test_a_learner_that_publishes_by_itself_is_refused(self, buffer):
        """With `update_at_each_batch` the policy would be read while its optimiser writes to it."""
        with opened(KINDS["one async"], buffer, update_at_each_batch=True) as collector:
            with pytest.raises(OptionError, match="update_at_each_batch"):
                collector.start()
            collector.next()


class TestPause:
    @every_kind
    def test_nothing_is_written_meanwhile_and_counts_are_exact(self, kind, buffer):
        """FAULTS 74: at any moment, over and over; and it goes on as if nothing had been."""
        with opened(kind, buffer) as collector:
            collector.start()
            for turn in range(1, 5):
                collector.wait_for(frames=turn * 64 * kind.workers, timeout=LONG)
                collector.pause()
                count = collector.collected_frames
                assert count == buffer.write_count == len(buffer)
                assert not collector.is_running()
                time.sleep(0.02)
                assert count == collector.collected_frames == buffer.write_count
                collector.resume()
                assert collector.is_running()
            collector.pause()
            check_counts(buffer, collector)
        check_counts(buffer, collector)
        check_tagged(buffer)

    @single_and_async
    def test_as_a_context_it_goes_on_at_the_end(self, kind, buffer):
        """Unless it had been paused before; also where something is raised inside."""
        with opened(kind, buffer) as collector:
            collector.start()
            with collector.pause():
                assert not collector.is_running()
                with collector.pause():
                    pass
                assert not collector.is_running()
            assert collector.is_running()
            with pytest.raises(ZeroDivisionError), collector.pause():
                raise ZeroDivisionError
            assert collector.is_running()
            collector.pause()
            collector.pause()
            collector.resume()
            collector.resume()
            assert collector.is_running()
            count = collector.collected_frames
            collector.wait_for(frames=count + 64, timeout=LONG)

    @every_kind
    def test_where_the_program_writes(self, kind, buffer):
        """With a post-processing batches are written whole, and counted when they are."""
        with opened(kind, buffer, postproc=lambda batch: batch) as collector:
            collector.start()
            collector.wait_for(frames=64 * kind.workers, timeout=LONG)
            with collector.pause():
                check_counts(buffer, collector)
            collector.wait_for(frames=256 * kind.workers, timeout=LONG)
        check_counts(buffer, collector)
        check_tagged(buffer)

    @every_kind
    def test_it_can_end_in_a_pause(self, kind, buffer):
        with opened(kind, buffer) as collector:
            collector.start()
            collector.wait_for(frames=32, timeout=LONG)
            collector.pause()
            with within():
                collector.shutdown()
            assert not collector.is_running()
        check_counts(buffer, collector)


class TestWaitFor:
    @single_and_async
    def test_it_returns_as_soon_as_there_is_enough(self, kind, buffer):
        with opened(kind, buffer) as collector:
            collector.start()
            for goal in (1, 100, 200):
                collector.wait_for(frames=goal, timeout=LONG)
                assert collector.collected_frames >= goal
                collector.wait_for(write_count=goal + 50, timeout=LONG)
                assert buffer.write_count >= goal + 50
            collector.wait_for(frames=1, timeout=0.001)

    @single_and_async
    def test_a_time_out_loses_nothing(self, kind, buffer):
        """FAULTS 59."""
        with opened(kind, buffer, total_frames=320 * kind.workers) as collector:
            collector.start()
            wait = functools.partial(collector.wait_for, frames=320 * kind.workers, timeout=0.005)
            with pytest.raises(WorkerTimeout, match="Nothing is lost: wait again"):
                wait()
            while (error := raised_by(wait)) is not None:
                assert isinstance(error, WorkerTimeout)
            check_counts(buffer, collector, 320 * kind.workers)
        check_tagged(buffer)

    def test_what_will_not_come_is_said(self, buffer):
        with opened(KINDS["single"], buffer, total_frames=64) as collector:
            collector.start()
            with within(), pytest.raises(OptionError, match=r"Collection has ended with frames=64, .*asked for 65"):
                collector.wait_for(frames=65)
        with opened(KINDS["single"], buffer) as collector:
            collector.start()
            collector.pause()
            with within(), pytest.raises(OptionError, match=r"paused at frames=.*: resume\(\) it"):
                collector.wait_for(frames=10_000_000)

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({}, "one of them"),
            ({"frames": 1, "write_count": 1}, "one of them"),
            ({"frames": 0}, "frames"),
            ({"frames": 1.5}, "frames"),
            ({"write_count": -1}, "write_count"),
            ({"frames": 1, "timeout": -1}, "timeout"),
        ],
    )
    def test_wrong_arguments_are_refused(self, buffer, given, told):
        with opened(KINDS["single"], buffer) as collector:
            collector.start()
            with pytest.raises(OptionError, match=told):
                collector.wait_for(**given)
            collector.wait_for(frames=1, timeout=LONG)

    def test_a_buffer_that_counts_nothing(self):
        with opened(KINDS["single"], Listed()) as collector:
            collector.start()
            with pytest.raises(OptionError, match="write_count; wait for frames="):
                collector.wait_for(write_count=1)
            collector.wait_for(frames=16, timeout=LONG)

    def test_several_threads_may_wait(self, buffer):
        with opened(KINDS["async"], buffer) as collector:
            collector.start()
            waiting = [
                threading.Thread(target=collector.wait_for, kwargs={"frames": 200, "timeout": LONG}) for _ in range(4)
            ]
            for thread in waiting:
                thread.start()
            for thread in waiting:
                thread.join(LONG)
                assert not thread.is_alive()


# --- what can be called meanwhile -------------------------------------------------------------------------------------


class TestMeanwhile:
    @single_and_async_soon
    def test_all_else_can_be_called(self, kind, buffer):
        """Each waits for one rollout at most, over and over; no frame is lost or doubled, and counts stay exact."""
        total = 1600 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            collector.start()
            calls = [
                collector.stats,
                functools.partial(collector.map_fn, len),
                collector.state_dict,
                collector.reset,
                functools.partial(collector.set_seed, 4),
                collector.update_policy_weights_,
                functools.partial(collector.wait_for_version, 0, 10),
                lambda: str(collector),
            ]
            for turn in range(12):
                with within():
                    calls[turn % len(calls)]()
            collector.wait_for(frames=total, timeout=LONG)
            assert collector.map_fn(len) == [2] * kind.workers
            check_counts(buffer, collector, total)
        check_tagged(buffer)

    @every_kind
    def test_from_several_threads(self, kind, buffer):
        """One after the other has the collector; who pauses while another does waits no longer than that."""
        with opened(kind, buffer, total_frames=-1, lanes=1) as collector:
            collector.start()
            failed = []

            def program():
                for _ in range(8):
                    failed.append(raised_by(lambda: (collector.pause(), collector.stats(), collector.map_fn(len))))
                    collector.resume()

            threads = [threading.Thread(target=program) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            assert failed == [None] * 24
            collector.wait_for(frames=collector.collected_frames + 32, timeout=LONG)
            collector.pause()
            check_counts(buffer, collector)
        check_tagged(buffer)

    @every_kind
    def test_a_state_is_loaded_and_goes_on_exactly(self, kind, buffer):
        """What was made since it was saved is in the buffer, and not counted again."""
        total = 640 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            collector.start()
            collector.wait_for(frames=64 * kind.workers, timeout=LONG)
            state = collector.state_dict()
            saved = state["frames"]
            collector.wait_for(frames=saved + 128 * kind.workers, timeout=LONG)
            with collector.pause():
                written = buffer.write_count
                collector.load_state_dict(state)
                assert collector.collected_frames == saved
                pending = sum(each["frames"] for each in state.get("pending", ()))
            collector.wait_for(frames=total, timeout=LONG)
            assert collector.collected_frames == total
            assert buffer.write_count == written + total - saved - pending
        assert collector.collected_frames == total

    @every_kind
    def test_a_run_goes_on_in_another_program(self, kind, buffer, tmp_path):
        """FAULTS 109: saved in a pause, both; loaded into new ones, they go on with one number, to the total."""
        total = 640 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            collector.start()
            collector.wait_for(frames=100 * kind.workers, timeout=LONG)
            with collector.pause():
                buffer.dumps(tmp_path / "buffer")
                state = collector.state_dict()
                count, frames = collector.collected_frames, buffer.frames()
                assert state["frames"] == count == len(frames)
            collector.wait_for(frames=count + 64, timeout=LONG)
        with ReplayBuffer(ROOM, storage="shared") as other:
            other.loads(tmp_path / "buffer")
            assert torch.equal(other.frames()[IDS], frames[IDS])
            with opened(kind, other, total_frames=total) as collector:
                collector.load_state_dict(state)
                assert collector.collected_frames == count == other.write_count
                collector.start()
                collector.wait_for(frames=total, timeout=LONG)
                check_counts(other, collector, total)
            check_tagged(other)

    @single_and_async
    def test_a_buffer_that_is_saved_meanwhile_is_that_of_a_moment(self, kind, buffer, tmp_path):
        """FAULTS 109: whole frames, and of each lane all that came before its last."""
        with opened(kind, buffer) as collector:
            collector.start()
            collector.wait_for(frames=64, timeout=LONG)
            before = buffer.write_count
            buffer.dumps(tmp_path / "buffer")
            after = buffer.write_count
            collector.wait_for(frames=after + 64, timeout=LONG)
        with ReplayBuffer(ROOM) as other:
            other.loads(tmp_path / "buffer")
            assert before <= len(other) == other.write_count <= after
            check_tagged(other)
            now = buffer.frames()
            of = {
                (number, int(t)): reward
                for number, t, reward in zip(
                    now[IDS].tolist(), now["observation"][:, 2].tolist(), now["next", "reward"].tolist(), strict=True
                )
            }
            then = other.frames()
            for number, t, reward in zip(
                then[IDS].tolist(), then["observation"][:, 2].tolist(), then["next", "reward"].tolist(), strict=True
            ):
                assert of[number, int(t)] == reward

    def test_undelivered_batches_go_where_they_can_be(self):
        """Those that are in a buffer cannot be delivered, and those that are not cannot be taken for written."""
        kind, slow = KINDS["async"], functools.partial(Steady, 0, 5)
        with ReplayBuffer(ROOM, storage="shared") as buffer, opened(kind, buffer, lambda _: slow) as collector:
            state = self.state_with_pending(collector, collector.next)
        with kind.open(lambda _: slow, lanes=2, steps=8) as collector:
            with pytest.raises(OptionError, match=r"workers write to a buffer themselves.*replay_buffer="):
                collector.load_state_dict(state)
            state = self.state_with_pending(collector, collector.next)
        with ReplayBuffer(ROOM, storage="shared") as buffer, opened(kind, buffer, lambda _: slow) as collector:
            with pytest.raises(OptionError, match="workers write to a buffer themselves"):
                collector.load_state_dict(state)
            collector.next()

    def state_with_pending(self, collector, deliver):
        for _ in range(200):
            deliver()
            time.sleep(0.02)
            if (state := collector.state_dict()).get("pending"):
                return state
        raise AssertionError("no batch was ever made ahead")

    @process_kinds
    def test_what_waits_in_a_state_is_counted_once(self, kind, buffer):
        """Saved while it runs: what workers have written, and nobody has counted, is counted after the load."""
        total = 640 * kind.workers
        with opened(kind, buffer, total_frames=total) as collector:
            collector.start()
            collector.wait_for(frames=64 * kind.workers, timeout=LONG)
            state = collector.state_dict()
            collector.load_state_dict(state)
            collector.wait_for(frames=state["frames"] + 64, timeout=LONG)
            collector.pause()
            count, written = collector.collected_frames, buffer.write_count
            collector.resume()
            collector.wait_for(frames=count + 64, timeout=LONG)
        assert collector.collected_frames - count == buffer.write_count - written


# --- weights ----------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Acts as its two parameters, which are published together and are the same: a frame shows which they were."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64))
        self.last = nn.Parameter(torch.zeros(64))

    def forward(self, observation):
        action = torch.stack([self.first.min(), self.first.max(), self.last.min(), self.last.max()])
        return action.expand(*observation.shape[:-1], 4)

    def become(self, value):
        with torch.no_grad():
            self.first.fill_(value)
            self.last.fill_(value)


def echo(worker):
    return functools.partial(Echo, (4,), 5)


class TestWeights:
    @every_kind
    def test_they_are_whole_and_frames_have_their_version(self, kind, buffer):
        """Thousands of updates while others act: no frame is of two, none carries another's number, none goes back."""
        policy = Pair()
        with opened(kind, buffer, echo, policy, record=("worker",)) as collector:
            collector.start()
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline or collector.policy_version < 50:
                policy.become(collector.policy_version + 1)
                collector.update_policy_weights_()
                if buffer.write_count > ROOM - 600 * kind.workers:
                    break
            last = collector.policy_version
            collector.wait_for_version(last, LONG)
            collector.wait_for(frames=collector.collected_frames + 96 * kind.workers, timeout=LONG)
            collector.pause()
            assert max(collector.policy_lag) <= last
        frames = buffer.frames()
        actions, versions = frames["action"], frames[VERSION].float()
        assert (actions == versions[:, None]).all(), "torn, or another's"
        assert len(set(versions.tolist())) > 3, "there were few updates that any frame saw"
        assert versions.max() == last

    def test_what_acts_is_a_copy(self, buffer):
        """The user's module may be changed in any way: it is not seen until it is published."""
        policy = Pair()
        with opened(KINDS["single"], buffer, echo, policy) as collector:
            collector.start()
            for value in range(1, 100):
                policy.become(-value)
                time.sleep(0.001)
            collector.pause()
            assert (buffer.frames()["action"] == 0).all()
            collector.resume()
            policy.become(7)
            assert collector.update_policy_weights_() == 1
            policy.become(-1)
            count = collector.collected_frames
            collector.wait_for_version(1, LONG)
            collector.wait_for(frames=count + 96, timeout=LONG)
        frames = buffer.frames()
        assert {*frames["action"].flatten().tolist()} == {0.0, 7.0}
        assert policy.first[0] == -1

    def test_weights_that_are_given_are_the_users_own_too(self, buffer):
        """As in the foreground: a state dict goes into the policy that the collector was made with."""
        policy, other = Pair(), Pair()
        other.become(5)
        with opened(KINDS["single"], buffer, echo, policy) as collector:
            collector.start()
            collector.update_policy_weights_(other.state_dict())
            assert policy.last[0] == 5
            with pytest.raises(PolicyError):
                collector.update_policy_weights_({"first": torch.zeros(3)})
            collector.wait_for_version(1, LONG)
            collector.wait_for(frames=collector.collected_frames + 96, timeout=LONG)
        assert buffer.frames()["action"][-1].tolist() == [5.0] * 4

    @every_kind
    def test_those_of_a_state_act_whatever_was_published_before(self, kind, buffer):
        """A load brings weights; an update that nobody has taken yet does not come after it."""
        policy = Pair()
        with opened(kind, buffer, echo, policy) as collector:
            policy.become(3)
            for _ in range(3):
                collector.update_policy_weights_()
            collector.start()
            collector.wait_for(frames=16, timeout=LONG)
            state = collector.state_dict()
            collector.pause()
            policy.become(4)
            collector.update_policy_weights_()
            collector.load_state_dict(state)
            assert policy.first[0] == 3
            assert collector.policy_version == 3
            written = collector.collected_frames
            buffer.empty()
            collector.resume()
            collector.wait_for(frames=written + 96 * kind.workers, timeout=LONG)
        frames = buffer.frames()
        assert {*frames["action"].flatten().tolist()} == {3.0}
        assert {*frames[VERSION].tolist()} == {3}

    def test_the_programs_own_state_is_let_alone(self, buffer):
        """Random streams, gradients and the exploration type of the program are what they would be without."""
        policy = nn.Linear(4, 4)
        with opened(KINDS["single"], buffer, echo, policy) as collector:
            collector.start()
            torch.manual_seed(0)
            drawn = [torch.rand(()).item() for _ in range(200) if time.sleep(0.0005) is None]
            with set_interaction_type(InteractionType.MODE):
                for _ in range(100):
                    assert torch.is_grad_enabled()
                    assert interaction_type() is InteractionType.MODE
                    assert policy(torch.ones(4)).requires_grad
                    time.sleep(0.0005)
            assert interaction_type() is not InteractionType.MODE
            collector.wait_for(frames=96, timeout=LONG)
        torch.manual_seed(0)
        assert drawn == [torch.rand(()).item() for _ in range(200)]

    def test_a_policy_that_looks_around_is_refused(self, buffer):
        """It says what to use; the collector stays open, and its policy acts when it is asked to."""
        net = nn.Linear(4, 4)
        policies = [
            TensorDictModule(net, in_keys=["observation"], out_keys=["action"]),
            lambda tensordict: tensordict.set("action", tensordict["observation"]),
            lambda observation: net(observation) * 1.0,
        ]
        for policy in policies:
            with ReplayBuffer(ROOM) as own, opened(KINDS["single"], own, echo, policy) as collector:
                if policy is policies[0] and raised_by(collector.start) is None:
                    continue  # what it does is known, and looks at nothing
                with pytest.raises(OptionError, match="AsyncCollector"):
                    collector.start()
                assert not collector.is_running()
                collector.next()
                check_counts(own, collector, 16)
        with opened(KINDS["one async"], buffer, echo, policies[1]) as collector:
            collector.start()
            collector.wait_for(frames=16, timeout=LONG)

    def test_a_policy_that_cannot_be_copied_is_refused(self, buffer):
        class Kept(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(1))
                self.lock = threading.Lock()

            def forward(self, observation):
                return self.weight.expand(observation.shape)

        with opened(KINDS["single"], buffer, echo, Kept()) as collector:
            with pytest.raises(PolicyError, match="AsyncCollector"):
                collector.start()
            collector.next()
            check_counts(buffer, collector, 16)


class TestStaleness:
    @pytest.mark.parametrize("kind", [KINDS["async"], KINDS["one async"]], ids=["async", "one async"])
    def test_workers_wait_for_a_learner_that_is_slow(self, kind, buffer):
        """Never more frames than are allowed, no error; a new version wakes them; the end does not wait for one."""
        full, lag = 16, 1
        with opened(kind, buffer, echo, Pair(), max_policy_lag=lag) as collector:
            collector.start()
            for version in range(5):
                allowed = (version + lag + 1) * full
                collector.wait_for(frames=allowed, timeout=LONG)
                time.sleep(0.05)
                assert buffer.write_count == allowed
                with pytest.raises(WorkerTimeout, match="max_policy_lag"):
                    collector.wait_for(frames=allowed + 1, timeout=0.02)
                assert collector.is_running()
                with within(2.0):
                    collector.stats()
                    collector.pause()
                    collector.resume()
                collector.update_policy_weights_()
            with within(3.0):
                collector.shutdown()
        check_counts(buffer, collector)

    def test_who_waits_for_what_cannot_come_is_told(self, buffer, monkeypatch):
        """Without a time limit: the thread that waits may be the one that is to publish. Publishing has it go on."""
        monkeypatch.setattr(running, "PATIENCE", 0.5)
        with opened(KINDS["async"], buffer, echo, Pair(), max_policy_lag=0) as collector:
            collector.start()
            with within(), pytest.raises(WorkerTimeout, match="publish"):
                collector.wait_for(frames=17)
            threading.Timer(0.2, collector.update_policy_weights_).start()
            collector.wait_for(frames=32, timeout=LONG)


# --- failures ---------------------------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


class Breaking(Steady):
    """Raises in a step, some way on."""

    def step(self, action):
        if self.steps >= 40:
            raise BrokenError("the environment broke")
        return super().step(action)


def breaking(worker):
    return functools.partial(Breaking, worker, 5)


class Calls:
    """Raises at a call, some way on."""

    def __init__(self, told):
        self.told, self.calls = told, 0

    def __call__(self, value):
        self.calls += 1
        if self.calls > 5:
            raise BrokenError(self.told)
        return value


def failing_policy(observation):
    if observation[..., 1].max() >= 4:
        raise BrokenError("the policy broke")
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class FailingBuffer(Listed):
    def extend(self, batch):
        if len(self.batches) > 5:
            raise BrokenError("the buffer broke")
        super().extend(batch)


METHODS = {
    "is_running": lambda c: c.is_running(),
    "pause": lambda c: c.pause(),
    "resume": lambda c: c.resume(),
    "start": lambda c: c.start(),
    "wait_for": lambda c: c.wait_for(frames=10**9),
    "next": lambda c: c.next(),
    "iteration": lambda c: next(iter(c)),
    "rollout": lambda c: c.rollout(),
    "stats": lambda c: c.stats(),
    "reset": lambda c: c.reset(),
    "set_seed": lambda c: c.set_seed(1),
    "map_fn": lambda c: c.map_fn(len),
    "state_dict": lambda c: c.state_dict(),
    "load_state_dict": lambda c: c.load_state_dict({}),
    "update_policy_weights_": lambda c: c.update_policy_weights_(),
    "publish_weights": lambda c: c.publish_weights(None),
    "wait_for_version": lambda c: c.wait_for_version(0, 1),
    "register_scheme_receiver": lambda c: c.register_scheme_receiver({}),
    "replay": lambda c: c.replay(0, 0, 0),
    "shutdown": lambda c: c.shutdown(),
    "async_shutdown": lambda c: asyncio.run(c.async_shutdown()),
    "with": lambda c: c.__exit__(None, None, None),
    "exhausted": lambda c: c.exhausted,
    "collected_frames": lambda c: c.collected_frames,
}
IN_WHICH_NOTHING_IS_REFUSED = (
    *("is_running", "stats", "shutdown", "async_shutdown", "with"),
    *("exhausted", "collected_frames"),
)


class TestFailures:
    @pytest.mark.parametrize("name", METHODS)
    def test_the_next_method_raises_it_once(self, name):
        """Whichever it is; the collector is closed by then, and says so from then on."""
        with ReplayBuffer(ROOM) as buffer:
            collector = opened(KINDS["single"], buffer, breaking)
            collector.start()
            assert becomes_true(lambda: collector.closed)
            assert becomes_true(lambda: collector._failure is not None)
            with pytest.raises(BrokenError, match="the environment broke") as caught:
                METHODS[name](collector)
            assert isinstance(caught.value.__cause__, WorkerError)
            for other, call in METHODS.items():
                error = raised_by(functools.partial(call, collector))
                assert isinstance(error, ClosedError) is (other not in IN_WHICH_NOTHING_IS_REFUSED), (other, error)
            check_counts(buffer, collector)

    @pytest.mark.parametrize("name", [name for name in METHODS if name not in ("wait_for", "shutdown")])
    @pytest.mark.slow
    def test_of_workers_it_is_raised_by_the_next_method(self, name):
        self.check(KINDS["async"], METHODS[name], "the environment broke", make=breaking)

    @every_kind
    @pytest.mark.parametrize("how", ["wait_for", "shutdown"])
    def test_an_environment(self, kind, how):
        self.check(kind, METHODS[how], "the environment broke", make=breaking)

    @every_kind
    def test_a_policy(self, kind):
        self.check(kind, METHODS["wait_for"], "the policy broke", policy=failing_policy)

    @every_kind
    def test_a_post_processing(self, kind):
        self.check(kind, METHODS["wait_for"], "the post-processing broke", postproc=Calls("the post-processing broke"))

    @every_kind
    def test_a_buffer(self, kind):
        self.check(kind, METHODS["wait_for"], "the buffer broke", buffer=FailingBuffer())

    def check(self, kind, call, told, *, buffer=None, **options):
        ours = ReplayBuffer(ROOM, storage="shared")
        with within(20.0):
            collector = opened(kind, ours if buffer is None else buffer, **options)
            collector.start()
            if call is not METHODS["wait_for"]:
                assert becomes_true(lambda: collector.closed, LONG)
            with pytest.raises(BrokenError, match=told):
                call(collector)
            assert collector.closed
            with pytest.raises(ClosedError):
                collector.wait_for(frames=1)
            collector.shutdown()
        if buffer is None:
            check_counts(ours, collector)
            check_tagged(ours)
        ours.close()

    @process_kinds
    def test_a_worker_that_is_killed(self, kind, buffer):
        with opened(kind, buffer) as collector:
            collector.start()
            collector.wait_for(frames=32, timeout=LONG)
            kill_worker(0)
            with within(), pytest.raises(WorkerDied):
                collector.wait_for(frames=10**9)
            with pytest.raises(ClosedError):
                collector.start()
        check_counts(buffer, collector)
        check_tagged(buffer)

    def test_who_calls_while_it_closes_is_told_why(self, buffer):
        """Never that it was shut down, which nobody did: a loop that publishes all the time sees the failure first."""
        for _ in range(3):
            collector = opened(KINDS["one async"], buffer, breaking, total_frames=-1)
            collector.start()
            error = None
            while error is None:
                error = raised_by(collector.update_policy_weights_)
            assert isinstance(error, BrokenError), repr(error)
            with pytest.raises(ClosedError):
                collector.update_policy_weights_()
            collector.shutdown()

    @single_and_async
    def test_leaving_a_context_raises_it(self, kind, buffer):
        """And what is raised inside comes out as it is."""

        def program(*, raises):
            with opened(kind, buffer, breaking) as collector:
                collector.start()
                assert becomes_true(lambda: collector.closed, LONG)
                if raises:
                    raise ZeroDivisionError

        assert isinstance(raised_by(functools.partial(program, raises=False)), BrokenError)
        assert isinstance(raised_by(functools.partial(program, raises=True)), ZeroDivisionError)

    def test_a_time_out_of_workers_leaves_it_open(self, buffer):
        """`timeout=` was not enough: that is told, nothing is lost, and it can be started again."""

        class Long(Tagged):
            def step(self, action):
                if self.steps == 20:
                    time.sleep(0.8)
                return super().step(action)

        with opened(KINDS["one async"], buffer, lambda _: Long, total_frames=160, timeout=0.2, lanes=1) as collector:
            collector.start()
            with pytest.raises(WorkerTimeout, match="not enough for worker 0"):
                collector.wait_for(frames=160, timeout=LONG)
            assert not collector.closed
            assert not collector.is_running()
            time.sleep(0.8)
            collector.start()
            collector.wait_for(frames=160, timeout=LONG)
            check_counts(buffer, collector, 160)
        check_tagged(buffer)


# --- the end ----------------------------------------------------------------------------------------------------------


class Sleeping(Tagged):
    """A step takes longer than anybody waits."""

    def step(self, action):
        if self.steps == 8:
            time.sleep(8)
        return super().step(action)


class TestEnd:
    @single_and_async_soon
    def test_nothing_is_left(self, kind):
        """No thread, process or descriptor; however often, and wherever it is."""
        with ReplayBuffer(ROOM, storage="shared") as buffer:
            with opened(kind, buffer) as collector:  # what stays for good is there by now
                collector.next()
            before = Belongings.now()
            for goal in (1, 50):
                with opened(kind, buffer) as collector:
                    collector.start()
                    collector.wait_for(frames=goal, timeout=LONG)
            collector = opened(kind, buffer)
            collector.start()
            asyncio.run(collector.async_shutdown(timeout=LONG))
            assert collector.closed
            del collector
            check_nothing_is_left(before)

    @async_soon
    def test_workers_in_a_long_step_are_not_waited_for(self, kind, buffer):
        with opened(kind, buffer, lambda worker: functools.partial(Sleeping, worker)) as collector:
            collector.start()
            time.sleep(0.3)
            with within(4.0):
                collector.shutdown()
        check_counts(buffer, collector)

    def test_a_long_rollout_in_a_thread_is_broken_off(self, buffer):
        """What of it was written is counted."""
        with opened(KINDS["single"], buffer, steps=100_000) as collector:
            collector.start()
            collector.wait_for(write_count=200, timeout=LONG)
            with within(2.0):
                collector.shutdown()
        assert 0 < collector.collected_frames == buffer.write_count
        check_tagged(buffer)

    def test_a_long_step_in_a_thread_is_left_to_itself(self, buffer, monkeypatch):
        """After a while, with a warning: it cannot be broken off."""
        monkeypatch.setattr(background, "PATIENCE", 1.0)
        is_there, may_go = threading.Event(), threading.Event()

        class Long(Tagged):
            def step(self, action):
                if self.steps == 8:
                    is_there.set()
                    may_go.wait(LONG)
                return super().step(action)

        collector = opened(KINDS["single"], buffer, lambda _: Long, lanes=None)
        collector.start()
        assert is_there.wait(LONG)
        with within(7.0), pytest.warns(UserWarning, match="has not come back in 1.0 s"):
            collector.shutdown()
        assert collector.closed
        assert not collector.is_running()
        with within(1.0):
            collector.shutdown()
            assert isinstance(raised_by(collector.next), ClosedError)
            assert isinstance(raised_by(collector.state_dict), ClosedError)
            collector.stats()
        may_go.set()
        name = "rlcollect-collect"
        assert becomes_true(lambda: name not in [thread.name for thread in threading.enumerate()], 15)
        assert raised_by(collector.shutdown) is None

    @single_and_async
    def test_one_that_is_let_go_ends_by_itself(self, kind):
        """One ResourceWarning, whoever's thread it comes in; nothing is left."""
        with ReplayBuffer(ROOM, storage="shared") as buffer:
            with opened(kind, buffer) as collector:
                collector.next()
            del collector
            before = Belongings.now()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                collector = opened(kind, buffer)
                there = weakref.ref(collector)
                collector.start()
                collector.wait_for(frames=32, timeout=LONG)
                del collector
                assert becomes_true(lambda: gc.collect() * 0 == 0 and there() is None)
                check_nothing_is_left(before)
            told = [each for each in caught if issubclass(each.category, ResourceWarning)]
            assert [str(each.message) for each in told if "never shut down" in str(each.message)] == [
                f"A {kind.cls.__name__} was never shut down; use `with`, or call shutdown()."
            ]

    @single_and_async
    def test_async_shutdown_lets_others_go_on(self, kind, buffer):
        """It ends what is under way, and raises what there was to be told."""

        async def program():
            collector = opened(kind, buffer)
            collector.start()
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.001)

            ticking = asyncio.create_task(tick())
            await asyncio.sleep(0.05)
            await collector.async_shutdown()
            ticking.cancel()
            assert collector.closed
            assert ticks
            await collector.async_shutdown()
            return collector

        check_counts(buffer, asyncio.run(program()))

        async def failing():
            collector = opened(kind, buffer, breaking)
            collector.start()
            while not collector.closed:
                await asyncio.sleep(0.01)
            with pytest.raises(BrokenError):
                await collector.async_shutdown()
            await collector.async_shutdown()

        asyncio.run(failing())

    def test_async_shutdown_can_be_given_too_little_time(self, buffer):
        """It goes on by itself."""

        async def program():
            collector = opened(KINDS["single"], buffer, lambda _: Slow, lanes=None)
            collector.start()
            await asyncio.sleep(0.1)
            with pytest.raises(TimeoutError):
                await collector.async_shutdown(timeout=0.05)
            await asyncio.sleep(1.5)
            assert collector.closed

        class Slow(Tagged):
            def step(self, action):
                time.sleep(0.7)
                return super().step(action)

        asyncio.run(program())

    @single_and_async
    def test_ctrl_c_in_the_program(self, kind, buffer):
        """Comes out of what is waited for; collection goes on, and can be ended."""
        with opened(kind, buffer) as collector:
            collector.start()
            for call in (
                lambda: collector.wait_for(frames=10**9),
                lambda: [collector.stats() for _ in range(10**6)],
                lambda: [collector.pause().__exit__(None, None, None) for _ in range(10**6)],
                lambda: [collector.update_policy_weights_() for _ in range(10**6)],
            ):
                timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
                timer.start()
                with within(), pytest.raises(KeyboardInterrupt):
                    call()
                timer.join()
                assert not collector.closed
                collector.resume()
                collector.wait_for(frames=collector.collected_frames + 64, timeout=LONG)
            collector.pause()
            check_counts(buffer, collector)
        check_counts(buffer, collector)
        check_tagged(buffer)


PROGRAM = """
    import sys, time
    import torch
    from rlcollect import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector, ReplayBuffer
    from rlcollect.testing import Counter

    def act(observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    if __name__ == "__main__":
        buffer = ReplayBuffer(10_000, storage="shared")
        kind = {kind}
        source = [Counter] * 2 if kind in (MultiSyncCollector, MultiAsyncCollector) else Counter
        collector = kind(source, act, frames_per_batch=16, num_envs=2, replay_buffer=buffer)
        collector.start()
        collector.wait_for(frames=64)
        print("ready", flush=True)
        {ending}
"""


class TestPrograms:
    @pytest.mark.parametrize(
        ("kind", "ending"),
        [
            ("Collector", "pass"),
            ("MultiAsyncCollector", "time.sleep(60)"),
            *(
                pytest.param(kind, ending, marks=pytest.mark.slow)
                for kind in ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector")
                for ending in ("pass", "sys.exit(0)", "raise ValueError('mine')", "time.sleep(60)")
                if (kind, ending) not in (("Collector", "pass"), ("MultiAsyncCollector", "time.sleep(60)"))
            ),
        ],
    )
    def test_a_program_that_does_not_shut_down(self, tmp_path, kind, ending):
        """FAULTS 51: at its end, by an exception, by Ctrl-C: it exits soon, quietly, and leaves nothing."""
        with Script(tmp_path, PROGRAM.format(kind=kind, ending=ending)) as script:
            script.wait_for("ready")
            if ending == "time.sleep(60)":
                script.interrupt()
            code = script.ended(10)
            script.check_nothing_lives()
            tracebacks = 0 if ending in ("pass", "sys.exit(0)") else 1
            assert script.err.count("Traceback (most recent call last)") == tracebacks, script.err
            assert "Exception ignored" not in script.err
            assert "Fatal" not in script.err
            assert len(re.findall("ResourceWarning: A", script.err)) <= 1
            assert code == {"pass": 0, "sys.exit(0)": 0}.get(ending, 1 if "raise" in ending else -signal.SIGINT)
