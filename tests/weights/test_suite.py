"""The weights suite: every form of policy, in every kind of collector, through every way of updating it.

An action shows the weights that made it, so the version in a row has to belong to the value in that row: whoever was
updated, with what, how often, and while what else went on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from rlcollect import (
    Collector,
    MultiProcessedWeightUpdate,
    MultiProcessWeightSyncScheme,
    MultiSyncCollector,
)
from rlcollect.errors import PolicyError
from rlcollect.testing import Echo
from tests import backend

pytestmark = pytest.mark.timeout(60)
WORKERS = 2
SHARE = 4  # frames of a worker in a batch
LONG = 30  # seconds in which every worker gets its turn, however busy the machine is
KINDS = {"single": Collector, **backend.sync_and_async()}


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation):
        return self.weight.expand(observation.shape)


class Buffered(nn.Module):
    """Acts as its buffer."""

    def __init__(self, value=1.0):
        super().__init__()
        self.register_buffer("weight", torch.tensor([float(value)]))

    forward = One.forward


class Tied(nn.Module):
    """Acts as a + 100 * b, which are one parameter."""

    def __init__(self, value=1.0):
        super().__init__()
        self.a, self.b = One(value), One(value)
        self.b.weight = self.a.weight

    def forward(self, observation):
        return (self.a.weight + 100 * self.b.weight).expand(observation.shape)


def frozen():
    return One().requires_grad_(False)


class Stripping(MultiProcessedWeightUpdate):
    """The learner has the policy inside something larger, and in double precision."""

    def _maybe_map_weights(self, policy_or_weights):
        if policy_or_weights is None:
            return None
        return {name.removeprefix("learner."): tensor.float() for name, tensor in policy_or_weights.items()}


def state(module):
    """Its weights, detached."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def prefixed(value):
    return {"learner.weight": torch.tensor([float(value)], dtype=torch.float64)}


@dataclass(frozen=True)
class Form:
    """A form of policy.

    Attributes:
        make: the policy; None: a factory makes it where it acts.
        weights: from a number to weights, detached.
        scale: the action that shows 1.
        options: makes the collector's.
        first: the numbers that workers have at first.
    """

    make: Any = One
    weights: Any = field(default=lambda value: state(One(value)))
    scale: float = 1.0
    options: Any = dict
    first: tuple[float, float] = (1.0, 1.0)


FORMS = {
    "instance": Form(),
    "buffer": Form(Buffered, lambda value: state(Buffered(value))),
    "factory": Form(None, options=lambda: {"policy_factory": One}),
    "factory per worker": Form(
        None,
        options=lambda: {"policy_factory": [functools.partial(One, 3), functools.partial(One, 4)]},
        first=(3.0, 4.0),
    ),
    "compiled": Form(options=lambda: {"compile_policy": {"backend": "eager"}}),
    "tied": Form(Tied, lambda value: state(Tied(value)), 101.0),
    "frozen": Form(frozen),
    "mapped": Form(weights=prefixed, options=lambda: {"weight_updater": Stripping()}),
    "by value": Form(options=lambda: {"weight_sync_schemes": {"policy": MultiProcessWeightSyncScheme()}}),
}


class Case:
    """A collector of one kind with one form of policy, and what each version is to show."""

    def __init__(self, form, kind, **options):
        self.form = FORMS[form]
        self.policy = None if self.form.make is None else self.form.make()
        self.workers = 1 if kind == "single" else WORKERS
        self.tensors = [] if self.policy is None else [*self.policy.parameters(), *self.policy.buffers()]
        self.optimiser = None
        if parameters := [each for each in self.tensors if isinstance(each, nn.Parameter) and each.requires_grad]:
            self.optimiser = torch.optim.SGD(parameters, lr=1.0)
        sources = Echo if kind == "single" else [Echo] * WORKERS
        frames = SHARE * WORKERS if kind == "sync" else SHARE
        options = {"frames_per_batch": frames, "record": ("worker",), **self.form.options(), **options}
        self.collector = KINDS[kind](sources, self.policy, **options)
        self.version = 0
        self.shown = {}  # the action of each version
        self.newest = dict.fromkeys(range(self.workers), 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.collector.shutdown()

    def update(self, value, weights=None, **options):
        """Updates to weights that show a number; None: the policy has them already."""
        self.version += 1
        assert self.collector.update_policy_weights_(weights, **options) == self.version
        self.shown[self.version] = value * self.form.scale
        chosen = options.get("worker_ids")
        for worker in self.newest if chosen is None else [chosen]:
            self.newest[worker] = self.version

    def set(self, value):
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(value)

    def look(self):
        """One batch: each frame's action is its version's, and no worker goes back. The newest version of each."""
        batch = self.collector.next()
        columns = (batch["collector", "worker"], batch["collector", "policy_version"], batch["action"].squeeze(-1))
        seen = {}
        for worker, version, action in zip(*(column.flatten().tolist() for column in columns), strict=True):
            own = self.form.first[worker] * self.form.scale
            assert action == (own if version == 0 else self.shown[version]), f"version {version} of worker {worker}"
            assert version >= seen.get(worker, 0)
            seen[worker] = version
        assert batch["next", "reward"].flatten().tolist() == batch["action"].flatten().tolist()
        return seen

    def settle(self):
        """Looks until all workers act with the newest that was sent to them."""
        deadline, seen = time.monotonic() + LONG, {}
        while seen != self.newest:
            assert time.monotonic() < deadline, f"only {seen} came, where {self.newest} was sent"
            seen |= self.look()

    def told_of_factories(self, kind):
        """Where workers act with weights that nobody sent them, that is said."""
        if kind == "single" or self.form.make is not None:
            return contextlib.nullcontext()
        return pytest.warns(UserWarning, match="No weights were sent to the workers yet")

    def check_module(self):
        """The user's module has the tensors it had, and an optimiser sees them."""
        if self.policy is None:
            return
        now = [*self.policy.parameters(), *self.policy.buffers()]
        assert all(one is other for one, other in zip(now, self.tensors, strict=True))
        assert not any(tensor.is_shared() for tensor in now)
        if self.optimiser is not None:
            before = self.tensors[0].item()
            self.optimiser.zero_grad()
            self.policy(torch.zeros(1)).sum().backward()
            self.tensors[0].grad.fill_(1.0)
            self.optimiser.step()
            assert now[0].item() == before - 1


class TestWeightsThatNobodySent:
    """Each worker's policy was made there; two updates may be one for all."""

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (({0: state(One(5)), 1: state(One(6))},), {5, 6}),
            ((state(One(5)), [0, 1]), {5}),
        ],
        ids=["for each worker", "for all by number"],
    )
    def test_are_none_where_all_workers_were_sent_some(self, arguments, expected):
        options = {"policy_factory": [One, functools.partial(One, 2)], "frames_per_batch": SHARE * WORKERS}
        with MultiSyncCollector([Echo] * WORKERS, **options) as collector:
            weights, *worker_ids = arguments
            given = {"worker_ids": worker_ids[0]} if worker_ids else {}
            assert collector.update_policy_weights_(weights, **given) == 1
            assert set(collector.next()["action"].flatten().tolist()) == expected  # warnings are errors

    def test_are_told_of_where_one_worker_was_sent_none(self):
        options = {"policy_factory": [One, functools.partial(One, 2)], "frames_per_batch": SHARE * WORKERS}
        with MultiSyncCollector([Echo] * WORKERS, **options) as collector:
            collector.update_policy_weights_(state(One(5)), worker_ids=[0])
            with pytest.warns(UserWarning, match="No weights were sent to the workers yet") as told:
                assert set(collector.next()["action"].flatten().tolist()) == {5, 2}
            assert len(told) == 1
            collector.next()


def function_of(module):
    """A policy that is no module, and uses one."""

    def act(observation):
        return module(observation)

    return act


@pytest.mark.parametrize("kind", ["single", "sync"])
class TestAFunctionThatUsesAModule:
    def test_takes_the_state_dict_of_that(self, kind):
        sources = Echo if kind == "single" else [Echo] * WORKERS
        module = One(1)
        with KINDS[kind](sources, function_of(module), frames_per_batch=SHARE * WORKERS) as collector:
            assert (collector.next()["action"] == 1).all()
            for version, given in enumerate((state(One(5)), {"module.weight": torch.tensor([6.0])}, One(7)), 1):
                assert collector.update_policy_weights_(given) == version
                batch = collector.next()
                assert (batch["action"] == 4 + version).all()
                assert (batch["collector", "policy_version"] == version).all()
            with pytest.raises(PolicyError, match=r"'module\.other' is none"):
                collector.update_policy_weights_({**state(One(5)), "other": torch.ones(1)})
            assert collector.policy_version == 3


CASES = [
    (form, kind)
    for form in FORMS
    for kind in KINDS
    if (form, kind)
    not in (
        ("factory per worker", "single"),  # has one worker
        ("by value", "single"),  # in its own process
        ("compiled", "async"),  # takes seconds, as the other two do
    )
]


SLOW = [(form, ("sync", "async")[place % 2]) for place, form in enumerate(FORMS) if form != "compiled"]
"""One of the kinds with workers for each form: it is seen with the other."""


@pytest.mark.parametrize(
    ("form", "kind"), [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
class TestTheVersionInARowBelongsToTheValueInTheRow:
    def test_through_all_ways_of_updating(self, form, kind):
        with Case(form, kind) as case:
            make = case.form.weights
            with case.told_of_factories(kind):
                case.settle()
            # all workers
            case.update(5, make(5))
            case.settle()
            # one worker, the last
            case.update(6, make(6), worker_ids=case.workers - 1)
            case.settle()
            # the same detached weights again and again
            weights = make(7)
            for _ in range(3):
                case.update(7, weights)
                case.settle()
            kept = make(7)
            assert all(torch.equal(weights[name], tensor) for name, tensor in kept.items())
            # different ones while collection goes on
            for value in range(10, 20):
                case.update(value, make(value))
                if value % 3:
                    case.look()
            case.settle()
            # one worker while collection goes on
            for value in range(20, 26):
                case.update(value, make(value), worker_ids=value % case.workers)
                case.look()
            case.settle()
            # the policy itself, as it was learned
            case.check_module()
            if case.policy is not None:
                case.set(30)
                case.update(30)
                case.settle()
                if case.optimiser is not None:
                    case.check_module()
                    case.update(29)
                    case.settle()
            # and for all again
            case.update(40, make(40))
            case.settle()
            assert case.collector.policy_version == case.version


@pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("instance", "async"),
        ("factory", "sync"),
        ("factory per worker", "async"),
        ("mapped", "sync"),
        ("by value", "async"),
    ],
)
class TestAWorkerInThePlaceOfAnother:
    def test_has_the_weights_that_were_sent_last(self, form, kind):
        with Case(form, kind, on_worker_failure="restart", timeout=LONG) as case:
            for worker_ids in ({}, {"worker_ids": 1}):
                case.update(5 + len(worker_ids), case.form.weights(5 + len(worker_ids)), **worker_ids)
                case.settle()
            number = os.getpid()
            pids = case.collector.map_fn(lambda envs: os.getpid())
            assert number not in pids
            os.kill(pids[1], signal.SIGKILL)
            deadline = time.monotonic() + LONG
            while case.collector.stats().workers[1].restarts == 0:
                assert time.monotonic() < deadline
                case.look()
            case.settle()
            case.update(8, case.form.weights(8))
            case.settle()
            case.check_module()
            after = case.collector.map_fn(lambda envs: os.getpid())
            assert after[0] == pids[0]
            assert after[1] != pids[1]
