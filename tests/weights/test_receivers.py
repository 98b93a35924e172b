"""A collector that is itself a receiver: what its sender publishes elsewhere acts in its own frames."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from rlcollect import (
    Collector,
    MultiProcessWeightSyncScheme,
    MultiSyncCollector,
    SharedMemWeightSyncScheme,
)
from rlcollect.errors import ClosedError, OptionError, PolicyError
from rlcollect.testing import Echo

pytestmark = pytest.mark.timeout(60)
LONG = 30  # seconds in which a process gets its turn, however busy the machine is
KINDS = {"single": Collector, "sync": MultiSyncCollector}


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self, value=0.0, size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(value)))

    def forward(self, observation):
        return self.weight[:1].expand(observation.shape)


class Kept(One):
    """Acts as its parameter, and 100 times a buffer that no state dict has."""

    def __init__(self, value=0.0, kept=5.0):
        super().__init__(value)
        self.register_buffer("kept", torch.tensor([float(kept)]), persistent=False)

    def forward(self, observation):
        return super().forward(observation) + 100 * self.kept


def weights(value):
    return {"weight": torch.tensor([float(value)])}


def of_kind(kind, make=One, **options):
    source = Echo if kind == "single" else [Echo, Echo]
    return KINDS[kind](source, make(), frames_per_batch=8 if kind == "sync" else 4, **options)


def act(kind, scheme, pipe, *, is_option=True, worker=0, make=One, method="fork"):
    """A process that collects: a batch each time it is asked for one; what is raised is its answer too."""
    try:
        scheme.worker_idx = worker
        schemes = {"policy": scheme}
        options = {"weight_recv_schemes": schemes} if is_option else {}
        if kind == "sync" and method is not None:  # a server of processes of its own takes seconds
            options["start_method"] = method
        with warnings.catch_warnings(record=True) as told, of_kind(kind, make, **options) as collector:
            warnings.simplefilter("always")
            if not is_option:
                collector.register_scheme_receiver(schemes)
            while pipe.recv():
                batch = collector.next()
                columns = (batch["collector", "policy_version"], batch["action"])
                frames = list(zip(*(column.flatten().tolist() for column in columns), strict=True))
                pipe.send((collector.policy_version, frames, [str(each.message) for each in told]))
    except BaseException as error:
        pipe.send(error)


class Actor:
    """The process that collects, as its learner has it.

    Attributes:
        seen: the action of each version.
        told: warnings there, so far.
        expected: what these are to say in the end.
    """

    def __init__(self, kind, scheme, **options):
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=act, args=(kind, scheme, there), kwargs=options)
        self.process.start()
        there.close()
        self.seen, self.told, self.expected = {}, [], []

    def next(self):
        """The next batch there: the collector's version, and (version, action) of its frames."""
        self.pipe.send(True)
        newest, frames, self.told = self.answer()
        return newest, frames

    def answer(self):
        assert self.pipe.poll(LONG), "the process that collects says nothing"
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def shows(self, action):
        """The version of the frames that act so, when all do; each version shows in one way."""
        deadline = time.monotonic() + LONG
        while True:
            assert time.monotonic() < deadline, f"no frames act as {action}"
            newest, frames = self.next()
            for version, shown in frames:
                assert self.seen.setdefault(version, shown) == shown
                assert version <= newest
            if all(frame == (newest, action) for frame in frames):
                return newest

    def close(self):
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(LONG)
        assert self.process.exitcode == 0
        assert len(self.told) == len(self.expected), self.told
        assert all(expected in told for expected, told in zip(self.expected, self.told, strict=True)), self.told
        self.pipe.close()


KINDS_AND_SCHEMES = [
    ("single", SharedMemWeightSyncScheme),
    ("single", MultiProcessWeightSyncScheme),
    ("sync", SharedMemWeightSyncScheme),
]


@contextmanager
def learner(scheme, *kinds, value=0.0, policy=None, **options):
    """The sender's side, and processes that collect."""
    policy = One(value) if policy is None else policy
    scheme.init_on_sender("policy", model=policy, num_workers=len(kinds))
    actors = [Actor(kind, scheme, worker=worker, **options) for worker, kind in enumerate(kinds)]
    try:
        try:
            scheme.connect(LONG)
        except ClosedError:
            for actor in actors:
                actor.answer()  # says why
            raise
        yield policy, *actors
    finally:
        for actor in actors:
            actor.close()
        scheme.shutdown()


@pytest.mark.parametrize(("kind", "make"), KINDS_AND_SCHEMES)
class TestACollectorThatReceives:
    def test_acts_by_what_the_sender_has(self, kind, make):
        scheme = make()
        with learner(scheme, kind, value=3) as (policy, actor):
            versions = [actor.shows(3)]
            for value in (5, 6):
                scheme.send(weights(value))
                versions.append(actor.shows(value))
            policy.weight.data.fill_(7)
            assert actor.shows(6) == versions[-1], "nothing is seen before it is sent"
            scheme.send()
            versions.append(actor.shows(7))
            assert versions == [0, 1, 2, 3], "they are the sender's"


class TestVersions:
    @pytest.mark.parametrize("kind", ["single", "sync"])
    def test_are_those_of_the_sender(self, kind):
        """In a forked program, too, that has worker processes by the usual start method."""
        scheme = SharedMemWeightSyncScheme()
        with learner(scheme, kind, value=3, method=None) as (_, actor):
            assert actor.shows(3) == scheme.version == 0
            for value in (5, 6):
                version = scheme.send(weights(value))
                assert actor.shows(value) == version


class TestABufferThatIsNotSent:
    @pytest.mark.parametrize(("kind", "make"), KINDS_AND_SCHEMES)
    def test_keeps_its_value(self, kind, make):
        """By a strategy by which no such buffers travel, nothing that was never sent is handed on."""
        scheme = make("state_dict")
        with learner(scheme, kind, policy=Kept(3, kept=7), make=Kept) as (policy, actor):
            assert actor.shows(503) == 0
            policy.weight.data.fill_(4)
            scheme.send()
            assert actor.shows(504) == 1
            scheme.send(Kept(6, kept=8))
            assert actor.shows(506) == 2


class TestASenderThatHasEnded:
    @pytest.mark.parametrize("make", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
    def test_is_told_of_once_and_collection_goes_on(self, make):
        scheme = make()
        with learner(scheme, "single", value=3) as (_, actor):
            actor.shows(3)
            scheme.send(weights(5))
            scheme.shutdown()
            actor.expected = ["there are no more to come. Collection goes on with version 1."]
            for _ in range(3):
                assert actor.shows(5) == 1, "what was sent before it ended is taken"


class TestSeveralReceivers:
    def test_each_take_their_own(self):
        scheme = SharedMemWeightSyncScheme()
        with learner(scheme, "single", "single", is_option=False) as (_, one, other):
            scheme.send(weights(5))
            before, newest = one.shows(5), other.shows(5)
            scheme.send(weights(6), worker_ids=1)
            assert before == newest == 1
            assert other.shows(6) == 2
            assert one.shows(5) == 1, "it was not for this one"
            scheme.send(weights(7))
            assert one.shows(7) == other.shows(7) == 3

    def test_take_only_the_newest(self):
        scheme = SharedMemWeightSyncScheme()
        with learner(scheme, "single") as (_, actor):
            assert actor.shows(0) == 0
            for value in range(1, 21):
                scheme.send(weights(value))
            assert actor.shows(20) == scheme.version == 20
            assert set(actor.seen.values()) == {0, 20}


class TestReceiversThatCannotBe:
    def test_are_told_which_models_there_are(self):
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender("env.model", model=One())
        with of_kind("single") as collector:
            with pytest.raises(OptionError, match=r"There is no model 'env.model' here; there are 'policy'"):
                collector.register_scheme_receiver({"env.model": scheme})
            assert not collector.closed
        scheme.shutdown()

    def test_need_a_scheme_that_a_sender_has_initialised(self):
        with pytest.raises(OptionError, match=r"This scheme has 0 receivers"):
            of_kind("single", weight_recv_schemes={"policy": SharedMemWeightSyncScheme()})

    def test_need_weights_of_the_senders_form(self):
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender("policy", model=One(size=2))
        actor = Actor("single", scheme)
        with pytest.raises(PolicyError, match=r"'weight' has shape \[2\], and should have \[1\]"):
            scheme.connect(LONG)
        with pytest.raises(PolicyError, match=r"'weight' has shape \[2\], and should have \[1\]"):
            actor.answer()
        actor.close()
        scheme.shutdown()

    def test_have_a_place_of_their_own(self):
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender("policy", model=One(), num_workers=1)
        actor = Actor("single", scheme, worker=1)
        with pytest.raises(OptionError, match=r"This scheme has 1 receivers; worker_idx=1 is none of them"):
            actor.answer()
        actor.close()
        scheme.shutdown()
