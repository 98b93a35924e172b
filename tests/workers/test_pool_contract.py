"""The contract of pools, `interfaces.WorkerPool`: the same tests wherever the workers are.

A new pool is one line in `POOLS`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlcollect.errors import EnvError, WorkerError
from rlcollect.memory.flat import Flat
from rlcollect.options import How, What, Where
from rlcollect.processes.crossing import Parcel
from rlcollect.processes.launch import default_method
from rlcollect.testing import Breaker, Counter, check_batch
from rlcollect.weights.form import WeightsForm
from rlcollect.workers.answers import Collected, Facts, Withdrawn
from rlcollect.workers.commands import Build, Close, Collect, Load, Reset, Run, Save, SchemeMessage, Seed
from rlcollect.workers.inline import InlinePool
from rlcollect.workers.process import packed_builds, start_pool
from tests import backend
from tests.collectors.helpers import after, same, seen

pytestmark = pytest.mark.timeout(60)
LANES, STEPS = 2, 4
LONG = 40


@dataclass(frozen=True)
class Pool:
    """How a pool is made, and how commands to build are sent to it."""

    make: Callable[[], Any]
    pack: Callable[[list[Build]], list[Build]]
    works_by_itself: bool  # or when it is asked for replies
    latency: float = 0.0  # seconds in which what is sent is there


def actors():
    """Two actors on Ray."""
    from rlcollect.workers.remote import start_actors

    backend.start_ray()
    return start_actors([backend.SMALL] * 2, 1)


POOLS = {
    "inline": Pool(InlinePool, list, works_by_itself=False),
    "processes": Pool(lambda: start_pool(2, default_method(), 1), packed_builds, works_by_itself=True),
    "actors": Pool(actors, packed_builds, works_by_itself=True, latency=0.5),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros((), dtype=torch.int64))

    def forward(self, observation):
        return (observation[..., 0] * self.weight[0]).long() % 2 + self.shift


class Noting(Counter):
    """Leaves a note when it is closed."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def close(self):
        with Path(self.path).open("a") as file:
            file.write("closed\n")


def wait_for(path, _=None):
    Path(f"{path}.begun").touch()
    deadline = time.monotonic() + LONG
    while not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def build_of(pool, create_env_fn, policy=None, **options):
    """What each worker is to make."""
    what = What(frames_per_batch=LANES * STEPS)
    return [
        Build(
            create_env_fn,
            policy,
            what,
            Where(num_envs=LANES),
            How(**options),
            reuse=False,
            same=False,
            worker=worker,
            workers=len(pool),
            share=1,
            seed=3,
        )
        for worker in range(len(pool))
    ]


def opened(reply):
    """A reply whose value is not in a parcel any more, nor its batch flat."""
    if isinstance(reply.value, Collected) and isinstance(reply.value.batch, Flat):
        return replace(reply, value=replace(reply.value, batch=reply.value.batch.opened(reply.beside.copy())))
    return replace(reply, value=reply.value.opened()) if isinstance(reply.value, Parcel) else reply


class Driven:
    """A pool, and the replies that came out of it; what `ready` raises is one too."""

    def __init__(self, kind: Pool) -> None:
        self.kind = kind
        self.pool = kind.make()

    def build(self, create_env_fn=Counter, policy=None, **options):
        commands = self.kind.pack(build_of(self.pool, create_env_fn, policy, **options))
        ids = [self.pool.submit(worker, command) for worker, command in enumerate(commands)]
        return self.values(ids)

    def replies(self, count):
        came = []
        while len(came) < count:
            some = [opened(reply) for reply in self.pool.ready(LONG)]
            self.pool.done()
            assert some, f"only {came} came"
            came += some
        assert len(came) == count
        return came

    def values(self, ids):
        """The answers, in the order of these numbers."""
        came = {reply.id: reply for reply in self.replies(len(ids))}
        assert came.keys() == {*ids}
        for reply in came.values():
            if reply.failure is not None:
                raise reply.failure.raised()
        return [came[number].value for number in ids]

    def ask(self, command, worker=0, **options):
        return self.values([self.pool.submit(worker, command, **options)])[0]

    @contextmanager
    def held(self, tmp_path):
        """Worker 0 is busy until the end, where it works by itself."""
        go = tmp_path / "go"
        number = self.pool.submit(0, Run(functools.partial(wait_for, str(go))))
        if self.kind.works_by_itself:
            deadline = time.monotonic() + LONG
            while not Path(f"{go}.begun").exists():
                assert time.monotonic() < deadline
                time.sleep(0.002)
        yield number
        time.sleep(self.kind.latency)
        go.touch()


every_pool = [
    pytest.param(pool, id=name, marks=[pytest.mark.cluster] if name == "actors" else []) for name, pool in POOLS.items()
]


@pytest.mark.parametrize("kind", every_pool)
class TestEveryPool:
    @pytest.fixture
    def driven(self, kind):
        driven = Driven(kind)
        yield driven
        driven.pool.shutdown()

    # --- building ---

    def test_build_is_answered_with_facts(self, driven):
        facts = driven.build(Counter, Net())
        assert len(facts) == len(driven.pool)
        for each in facts:
            assert isinstance(each, Facts)
            assert (each.num_lanes, each.lead) == (LANES, (LANES,))
            assert each.action_space == Counter().action_space
            (form,) = each.forms.values()
            assert {leaf.key[0]: (leaf.shape, leaf.dtype) for leaf in form.leaves} == {
                "weight": ((2,), torch.float32),
                "shift": ((), torch.int64),
            }
            assert {*form.names} == {"weight", "shift"}
            assert each.policy_device == "cpu"
            assert (form.kept, each.may_deliver_short) == ((), False)

    def test_build_of_random_actions(self, driven):
        for facts in driven.build():
            assert facts.forms == {"policy": WeightsForm()}

    @pytest.mark.parametrize("where", ["constructor", "reset"])
    def test_build_that_fails(self, driven, where):
        with pytest.raises(RuntimeError) as raised:
            driven.build(functools.partial(Breaker, "raise", where))
        assert type(raised.value) is RuntimeError
        assert isinstance(raised.value.__cause__, WorkerError)

    def test_build_of_a_policy_that_fails(self, driven):
        def factory():
            raise LookupError("no policy today")

        with pytest.raises(LookupError, match="no policy today") as raised:
            driven.build(policy_factory=factory)
        assert "in factory" in raised.value.__cause__.worker_traceback

    # --- collecting ---

    def test_collect_is_answered_with_a_rollout(self, driven):
        driven.build(Counter, Net())
        for worker in range(len(driven.pool)):
            made = driven.ask(Collect(STEPS), worker)
            assert isinstance(made, Collected)
            assert (made.steps, made.frames) == (STEPS, LANES * STEPS)
            assert made.batch.batch_size == (LANES, STEPS)
            assert seen(made.batch) == [[0, 1, 2, 3]] * LANES
            assert made.report.steps == STEPS
            check_batch(made.batch)

    def test_rollouts_go_on(self, driven):
        driven.build(Counter)
        one, other = driven.ask(Collect(STEPS)), driven.ask(Collect(2))
        check_batch(one.batch)
        check_batch(other.batch, previous=one.batch)
        assert seen(other.batch) == [[4, 0]] * LANES
        assert after(other.batch) == [[5, 1]] * LANES
        assert (other.steps, other.frames, other.report.steps, other.report.episodes) == (2, 2 * LANES, 6, LANES)
        assert other.finished > one.finished

    def test_is_the_same_worker_everywhere(self, driven):
        """The frames of a seed are those that a worker makes here, whichever pool it is in."""
        here = Driven(POOLS["inline"])
        here.build(Counter)
        expected = [here.ask(command) for command in (Seed(11), Collect(STEPS), Collect(STEPS))][1:]
        here.pool.shutdown()
        driven.build(Counter)
        came = [driven.ask(command) for command in (Seed(11), Collect(STEPS), Collect(STEPS))][1:]
        for mine, theirs in zip(came, expected, strict=True):
            assert same(mine.batch, theirs.batch)
        assert len(torch.unique(torch.cat([each.batch["action"] for each in came]))) == 2

    # --- replies ---

    def test_each_command_has_one_reply_with_its_number(self, driven):
        driven.build(Counter)
        commands = [Collect(2), Run(len), Reset(None), Seed(3), Collect(1), Save(), Collect(3)]
        ids = [driven.pool.submit(0, command) for command in commands]
        assert len({*ids}) == len(ids)
        came = driven.replies(len(ids))
        assert [reply.id for reply in came] == ids
        assert {reply.worker for reply in came} == {0}
        assert [getattr(reply.value, "steps", None) for reply in came] == [2, None, None, None, 1, None, 3]
        assert came[1].value == LANES
        assert driven.pool.ready(0) == []

    def test_numbers_are_unique_over_workers(self, driven):
        driven.build(Counter)
        workers = list(range(len(driven.pool))) * 3
        ids = {driven.pool.submit(worker, Run(len)): worker for worker in workers}
        assert len(ids) == len(workers)
        assert {reply.id: reply.worker for reply in driven.replies(len(workers))} == ids

    def test_none_where_nothing_was_asked(self, driven):
        driven.build(Counter)
        assert list(driven.pool.ready(0)) == []
        assert list(driven.pool.ready(0.02)) == []

    def test_states_go_both_ways(self, driven):
        driven.build(Counter)
        driven.ask(Seed(5))
        driven.ask(Collect(STEPS))
        saved = driven.ask(Save())
        expected = driven.ask(Collect(STEPS)).batch
        driven.ask(Collect(STEPS))
        assert driven.ask(Load(saved.state)).steps == STEPS
        came = driven.ask(Collect(STEPS)).batch
        assert torch.equal(came["action"], expected["action"])

    # --- order ---

    def test_in_turn_and_out_of_turn(self, driven, tmp_path):
        driven.build(Counter)
        with driven.held(tmp_path) as first:
            later = [driven.pool.submit(0, Collect(1)), driven.pool.submit(0, Collect(2))]
            sooner = [driven.pool.submit(0, Run(len), in_turn=False) for _ in range(2)]
            last = driven.pool.submit(0, Collect(3))
        came = [reply.id for reply in driven.replies(6)]
        assert [number for number in came if number != first] == [*sooner, *later, last]

    # --- withdrawing ---

    def test_withdraw(self, driven, tmp_path):
        driven.build(Counter)
        with driven.held(tmp_path) as first:
            waiting = [driven.pool.submit(0, Collect(1)), driven.pool.submit(0, Collect(2))]
            number = driven.pool.withdraw(0)
        came = driven.replies(4)
        assert [reply.id for reply in came if reply.id != first] == [*waiting, number]
        values = {reply.id: reply.value for reply in came}
        assert [values[each] for each in waiting] == [Withdrawn()] * 2
        made = driven.ask(Collect(1))
        assert seen(made.batch) == [[0]] * LANES  # nothing was made of them
        assert made.report.steps == 1

    def test_withdraw_where_nothing_waits(self, driven):
        driven.build(Counter)
        number = driven.pool.withdraw(0)
        assert [reply.id for reply in driven.replies(1)] == [number]

    def test_what_comes_after_it_is_done(self, driven, tmp_path):
        driven.build(Counter)
        with driven.held(tmp_path):
            before = driven.pool.submit(0, Collect(1))
            driven.pool.withdraw(0)
            behind = driven.pool.submit(0, Collect(2))
        values = {reply.id: reply.value for reply in driven.replies(4)}
        assert values[before] == Withdrawn()
        assert isinstance(values[behind], Collected)

    def test_what_does_not_wait_for_its_turn_is_done(self, driven, tmp_path):
        driven.build(Counter)
        with driven.held(tmp_path):
            number = driven.pool.submit(0, Run(len), in_turn=False)
            driven.pool.withdraw(0)
        assert {reply.id: reply.value for reply in driven.replies(3)}[number] == LANES

    # --- what it is doing ---

    def test_told(self, driven):
        assert driven.pool.told(0).startswith("worker 0 (")
        driven.build(Counter)
        driven.ask(Collect(STEPS))
        for worker in range(len(driven.pool)):
            assert f"worker {worker} (waiting for a command" in driven.pool.told(worker)

    def test_told_while_it_is_busy(self, driven, tmp_path):
        driven.build(Counter)
        with driven.held(tmp_path):
            if driven.kind.works_by_itself:
                assert "worker 0 (running a function" in driven.pool.told(0)
        driven.replies(1)

    # --- failures ---

    def test_of_an_environment(self, driven):
        driven.build(functools.partial(Breaker, "raise", "step", at=3))
        with pytest.raises(RuntimeError) as raised:
            driven.ask(Collect(STEPS))
        assert type(raised.value) is RuntimeError
        report = raised.value.__cause__
        assert (report.worker, report.lane, report.step) == (0, 0, 2)
        assert "Traceback" in report.worker_traceback

    def test_of_another_worker(self, driven):
        driven.build(functools.partial(Breaker, "raise", "step", at=3))
        worker = len(driven.pool) - 1
        with pytest.raises(RuntimeError) as raised:
            driven.ask(Collect(STEPS), worker)
        assert raised.value.__cause__.worker == worker

    def test_of_a_function(self, driven):
        driven.build(Counter)

        def odd(envs):
            raise LookupError(f"{len(envs)} lanes")

        with pytest.raises(LookupError, match="2 lanes"):
            driven.ask(Run(odd))

    def test_what_comes_after_a_failure_is_done(self, driven):
        driven.build(Counter)

        def odd(envs):
            raise EnvError("odd")

        ids = [driven.pool.submit(0, Run(odd)), driven.pool.submit(0, Run(len)), driven.pool.submit(0, Collect(1))]
        came, errors = [], []
        while len(came) + len(errors) < 3:
            try:
                replies = [opened(reply) for reply in driven.pool.ready(LONG)]
                driven.pool.done()
            except EnvError as error:
                errors.append(error)
                continue
            assert replies
            errors += [reply.failure.raised() for reply in replies if reply.failure is not None]
            came += [reply for reply in replies if reply.failure is None]
        assert [str(error) for error in errors] == ["odd"]
        assert [reply.id for reply in came] == ids[1:]
        assert came[0].value == LANES

    # --- the end ---

    def test_shutdown_twice(self, kind):
        driven = Driven(kind)
        driven.build(Counter)
        driven.pool.shutdown()
        driven.pool.shutdown()

    def test_shutdown_before_anything_is_built(self, kind):
        driven = Driven(kind)
        driven.pool.shutdown()
        driven.pool.shutdown()

    def test_shutdown_with_commands_that_wait(self, kind):
        driven = Driven(kind)
        driven.build(Counter)
        for _ in range(5):
            driven.pool.submit(0, Collect(1))
        driven.pool.shutdown()

    def test_shutdown_closes_environments_once(self, kind, tmp_path):
        driven = Driven(kind)
        driven.build(functools.partial(Noting, str(tmp_path / "note")))
        driven.pool.shutdown()
        driven.pool.shutdown()
        assert (tmp_path / "note").read_text().count("closed") == LANES * len(driven_workers(kind))

    def test_close_closes_environments(self, driven, tmp_path):
        driven.build(functools.partial(Noting, str(tmp_path / "note")))
        for worker in range(len(driven.pool)):
            driven.ask(Close(), worker)
        expected = LANES * len(driven.pool)
        assert (tmp_path / "note").read_text().count("closed") == expected
        driven.pool.shutdown()
        assert (tmp_path / "note").read_text().count("closed") == expected


def driven_workers(kind):
    """As many as a pool of that kind has."""
    pool = kind.make()
    count = len(pool)
    pool.shutdown()
    return range(count)


@pytest.mark.parametrize("kind", every_pool[1:])
def test_what_is_to_end_early_does_so_in_a_successor_too(kind):
    """Pools whose workers can be started anew."""
    driven = Driven(kind)
    pool = driven.pool
    try:
        builds = packed_builds([replace(each, can_stop=True) for each in build_of(pool, Counter)])
        driven.values([pool.submit(worker, build) for worker, build in enumerate(builds)])
        number = pool.new_number()
        pool.stop(0, number)
        pool.restart(0)
        driven.ask(builds[0])
        assert driven.ask(Collect(50, number=number), number=number).steps == 1
        assert driven.ask(Collect(50, number=number + 1)).steps == 50
    finally:
        pool.shutdown()


@pytest.mark.cluster
def test_weights_for_an_actor_that_waits_for_a_node_do_not_pile_up():
    """Each message holds weights in the store: the newest is enough, and comes when the actor is there."""
    import ray

    from rlcollect.workers.remote import start_actors

    backend.start_ray()
    pool = start_actors([{**backend.SMALL, "resources": {"nowhere": 1}}], 1)
    try:
        sent = [
            pool.submit(0, SchemeMessage(number), attached=[ray.put(number)], in_turn=False) for number in range(20)
        ]
        other = pool.submit(0, Run(len))
        came = [reply.id for reply in pool.ready(0)]
        pool.done()
        assert came == sent[:-1]
        assert pool.ready(0.6) == []
        assert "on its way" in pool.told(0)
        assert not {other, sent[-1]} & {*came}
    finally:
        pool.shutdown()
