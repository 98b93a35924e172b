"""Schemes that are used by themselves, without a collector: between bare processes, from the first to the last."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import signal
import threading
import time
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rlcollect.errors import ClosedError, OptionError, PolicyError
from rlcollect.processes.channel import Outbox
from rlcollect.weights import sides
from rlcollect.weights.ends import Message
from rlcollect.weights.scheme import NoWeightSyncScheme, WeightSyncScheme
from rlcollect.weights.shared import SharedMemWeightSyncScheme
from rlcollect.weights.values import MultiProcessWeightSyncScheme
from tests.weights.helpers import (
    LONG,
    SCHEMES,
    Actor,
    connected,
    descriptors,
    filled,
    heavy,
    initialised,
    net,
    numbers_in,
)

pytestmark = pytest.mark.timeout(60)
PUBLISHES = 300
DIFFER = (
    r"All receivers need models with the same weights; '0\.weight' of receiver 1's differs from that of receiver 0's: "
    r".*\[4, 2\].* where that has .*\[3, 2\]"
)


@pytest.fixture(params=SCHEMES, ids=lambda one: one.__name__)
def scheme(request):
    return request.param()


@pytest.fixture
def shared():
    return SharedMemWeightSyncScheme()


@pytest.fixture
def by_value():
    return MultiProcessWeightSyncScheme()


class TestByEachStartMethod:
    @pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver", "fork"])
    @pytest.mark.parametrize("make", SCHEMES, ids=lambda one: one.__name__)
    def test_the_whole_life(self, make, method):
        scheme, model = make(), net(1)
        workers = 1 if method == "spawn" else 2  # each takes seconds
        with connected(scheme, *[net] * workers, method=method, source=model) as actors:
            assert [actor.ask("numbers") for actor in actors] == [{1}] * workers
            assert [actor.ask("receive") for actor in actors] == [None] * workers
            filled(model, 2)
            assert scheme.send() == 1
            assert [actor.ask("receive", LONG) for actor in actors] == [1] * workers
            assert [actor.ask("numbers") for actor in actors] == [{2}] * workers
            assert scheme.send(net(3), worker_ids=0) == 2
            assert actors[0].ask("receive", LONG) == 2
            assert actors[0].ask("numbers") == {3}
            assert [actor.ask("receive") for actor in actors] == [None] * workers
            scheme.shutdown()
            for actor in actors:
                with pytest.raises(ClosedError):
                    actor.ask("receive", LONG)


class TestConnecting:
    def test_gives_the_senders_weights(self, scheme):
        with connected(scheme, net, net, source=net(7)) as actors:
            assert [actor.ask("numbers") for actor in actors] == [{7}, {7}]
            assert [actor.ask("version") for actor in actors] == [0, 0]
            assert scheme.version == 0

    def test_gives_them_as_they_are_then(self, scheme):
        model = net(1)
        with initialised(scheme, net, source=model) as (actor,):
            filled(model, 2)
            actor.tell("connect", LONG)
            scheme.connect(LONG)
            actor.answer()
            assert actor.ask("numbers") == {2}

    def test_without_a_model_receivers_keep_their_own(self, scheme):
        with connected(scheme, partial(net, 4)) as (actor,):
            assert actor.ask("numbers") == {4}
            assert scheme.send(net(5)) == 1
            assert actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {5}

    @pytest.mark.parametrize(
        "given",
        [
            pytest.param(lambda: net(6).state_dict(), id="state dict"),
            pytest.param(lambda: TensorDict.from_module(net(6)), id="TensorDict"),
        ],
    )
    def test_gives_weights_that_have_no_model(self, scheme, given):
        scheme.init_on_sender("policy", weights=given())
        actor = Actor(scheme)
        try:
            actor.ask("init", net)
            actor.tell("connect", LONG)
            scheme.connect(LONG)
            actor.answer()
            assert actor.ask("numbers") == {6}
        finally:
            scheme.shutdown()
            actor.stop()

    def test_ends_that_call_the_model_by_different_names(self, scheme):
        scheme.init_on_sender("critic", model=net(6))
        actor = Actor(scheme)
        try:
            actor.ask("init", net, model_id="policy")
            actor.tell("connect", LONG)
            scheme.connect(LONG)
            actor.answer()
            assert actor.ask("numbers") == {6}
            assert scheme.send(net(7)) == actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {7}
        finally:
            scheme.shutdown()
            actor.stop()

    def test_does_not_wait_for_ever_for_a_receiver(self, scheme):
        with initialised(scheme, net, source=net()), pytest.raises(TimeoutError):
            scheme.connect(0.1)

    def test_to_a_process_that_was_never_started(self, scheme):
        scheme.init_on_sender("policy", model=net())
        with pytest.raises(ClosedError):
            scheme.connect(LONG)
        scheme.shutdown()

    def test_to_a_receiver_that_died_before(self, scheme):
        with initialised(scheme, net, source=net()) as (actor,):
            actor.kill()
            with pytest.raises(ClosedError):
                scheme.connect(LONG)

    def test_again_is_nothing(self, scheme):
        with connected(scheme, net, source=net(1)) as (actor,):
            scheme.connect(LONG)
            actor.ask("connect", LONG)
            assert actor.ask("numbers") == {1}

    def test_does_not_wait_for_ever_for_the_sender(self, scheme):
        with initialised(scheme, net) as (actor,), pytest.raises(TimeoutError):
            actor.ask("connect", 0.1)

    def test_to_a_sender_that_has_shut_down(self, shared):
        with initialised(shared, net) as (actor,):
            shared.shutdown()
            with pytest.raises(ClosedError):
                actor.ask("connect", LONG)

    def test_receivers_that_differ(self, scheme):
        with initialised(scheme, net, partial(net, 0, 4)) as actors:
            for actor in actors:
                actor.tell("connect", LONG)
            with pytest.raises(PolicyError, match=DIFFER):
                scheme.connect(LONG)
            scheme.shutdown()
            for actor in actors:  # they are told why
                with pytest.raises(PolicyError, match=DIFFER):
                    actor.answer()

    def test_a_sender_whose_model_does_not_fit(self, scheme):
        with initialised(scheme, net, source=net(0, 4)) as (actor,):
            actor.tell("connect", LONG)
            with pytest.raises(PolicyError, match=r"'0\.weight' has shape \[4, 2\], and should have \[3, 2\]"):
                scheme.connect(LONG)
            with pytest.raises(PolicyError, match="should have"):
                actor.answer()


class TestSending:
    def test_counts_versions(self, scheme):
        with connected(scheme, net, net, source=net()) as actors:
            assert [scheme.send(), scheme.send(worker_ids=1), scheme.send(worker_ids=[0, 1])] == [1, 2, 3]
            assert scheme.version == 3
            assert [actor.ask("receive", LONG) for actor in actors] == [3, 3]
            assert [actor.ask("version") for actor in actors] == [3, 3]

    def test_to_one_the_others_keep_what_they_had(self, scheme):
        with connected(scheme, net, net, net, source=net(1)) as actors:
            scheme.send(net(2), worker_ids=1)
            assert [actor.ask("receive", 0.1) for actor in actors] == [None, 1, None]
            assert [actor.ask("numbers") for actor in actors] == [{1}, {2}, {1}]

    def test_to_all_after_one_had_its_own(self, scheme):
        with connected(scheme, net, net, source=net(1)) as actors:
            scheme.send(net(2), worker_ids=[1])
            scheme.send(net(3))
            assert [actor.ask("receive", LONG) for actor in actors] == [2, 2]
            assert [actor.ask("numbers") for actor in actors] == [{3}, {3}]

    def test_to_one_with_a_tuple_of_them(self, scheme):
        with connected(scheme, net, net, source=net(1)) as actors:
            scheme.send(net(2), worker_ids=(0,))
            assert [actor.ask("receive", 0.1) for actor in actors] == [1, None]

    def test_nothing_given_sends_the_model_as_it_is(self, scheme):
        model = net(1)
        with connected(scheme, net, source=model) as (actor,):
            for value in (2, 3):
                filled(model, value)
                scheme.send()
                actor.ask("receive", LONG)
                assert actor.ask("numbers") == {value}

    def test_what_is_done_to_them_afterwards_is_not_seen(self, scheme):
        model = net(1)
        with connected(scheme, net, source=model) as (actor,):
            scheme.send()
            filled(model, 9)
            actor.ask("receive", LONG)
            assert actor.ask("numbers") == {1}

    @pytest.mark.parametrize(
        "form",
        [
            pytest.param(lambda model: model, id="module"),
            pytest.param(lambda model: model.state_dict(), id="state dict"),
            pytest.param(TensorDict.from_module, id="nested TensorDict"),
            pytest.param(lambda model: TensorDict.from_module(model).data.flatten_keys("."), id="flat TensorDict"),
        ],
    )
    def test_in_any_form(self, scheme, form):
        with connected(scheme, net) as (actor,):
            scheme.send(form(net(8)))
            assert actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {8}

    def test_another_precision_is_cast(self, scheme):
        with connected(scheme, net) as (actor,):
            scheme.send(net(8).double())
            actor.ask("receive", LONG)
            assert actor.ask("numbers") == {8}

    def test_a_large_model(self, scheme):
        with connected(scheme, heavy, source=heavy(1)) as (actor,):
            actor.tell("receive_until", 3)
            for version in (1, 2, 3):
                scheme.send(heavy(version))
            _, wrong = actor.answer()
            assert wrong == []
            assert actor.ask("numbers") == {3}


class TestReceiving:
    def test_the_newest_of_several(self, scheme):
        with connected(scheme, net, source=net()) as (actor,):
            for value in (1, 2, 3):
                scheme.send(net(value))
            assert actor.ask("receive", LONG) == 3
            assert actor.ask("numbers") == {3}
            assert actor.ask("receive") is None
            assert actor.ask("version") == 3

    def test_nothing_changes_nothing(self, scheme):
        with connected(scheme, net, source=net(1)) as (actor,):
            assert [actor.ask("receive"), actor.ask("receive", 0.05)] == [None, None]
            assert actor.ask("numbers") == {1}

    def test_waits_for_some(self, scheme):
        with connected(scheme, net, source=net()) as (actor,):
            actor.tell("receive", LONG)
            assert not actor.connection.poll(0.2)
            scheme.send(net(4))
            assert actor.answer() == 1

    def test_tensors_stay_the_objects_that_they_are(self, scheme):
        with connected(scheme, net, source=net(1)) as (actor,):
            before = actor.ask("places")
            scheme.send(net(2))
            actor.ask("receive", LONG)
            assert actor.ask("numbers") == {2}
            assert actor.ask("places") == before

    def test_is_whole_while_weights_are_sent_as_fast_as_can_be(self, scheme):
        with connected(scheme, net, net, source=net()) as actors:
            for actor in actors:
                actor.tell("receive_until", PUBLISHES)
            model = net()
            for version in range(1, PUBLISHES + 1):
                scheme.send(filled(model, version))
            for actor in actors:
                count, wrong = actor.answer()
                assert wrong == []
                assert count >= 1


class TestTheEnd:
    def test_what_was_sent_before_is_received_first(self, scheme):
        with connected(scheme, net, source=net()) as (actor,):
            scheme.send(net(5))
            scheme.shutdown()
            assert actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {5}
            for _ in range(2):
                with pytest.raises(ClosedError):
                    actor.ask("receive")

    def test_ends_one_that_waits(self, scheme):
        with connected(scheme, net, source=net()) as (actor,):
            actor.tell("receive", LONG)
            scheme.shutdown()
            with pytest.raises(ClosedError):
                actor.answer()

    def test_of_a_receiver_by_itself(self, scheme):
        with connected(scheme, net, net, source=net()) as actors:
            actors[0].ask("shutdown")
            actors[0].ask("shutdown")
            with pytest.raises(ClosedError):
                actors[0].ask("receive")
            scheme.send(net(5), worker_ids=1)
            assert actors[1].ask("receive", LONG) == 1

    def test_twice(self, scheme):
        with connected(scheme, net, source=net()):
            scheme.shutdown()
            scheme.shutdown()

    def test_before_it_was_initialised(self, scheme):
        scheme.shutdown()

    def test_of_a_sender_that_was_killed(self, scheme):
        parent, child = multiprocessing.Pipe()
        sender = multiprocessing.get_context("fork").Process(target=lead, args=(scheme, child))
        sender.start()
        try:
            assert parent.poll(LONG)
            assert parent.recv() == "connected"
            sender.kill()
            sender.join(LONG)
            child.close()
            assert parent.poll(LONG)
            assert parent.recv() == "ClosedError"
        finally:
            sender.kill()
            sender.join(LONG)
            sender.close()
            parent.close()
            child.close()


def lead(scheme, connection):
    """A sender in a process of its own, whose receiver says how it ended."""
    scheme.init_on_sender("policy", model=net(1))
    process = multiprocessing.get_context("fork").Process(target=follow, args=(scheme, connection))
    process.start()
    scheme.connect(LONG)
    connection.send("connected")
    time.sleep(LONG)


def follow(scheme, connection):
    scheme.init_on_receiver("policy", model=net())
    scheme.connect(LONG)
    try:
        scheme.receive(LONG)
    except ClosedError as error:
        connection.send(type(error).__name__)


NOT_FITTING = {
    "a name that lacks": (lambda: {**net(9).state_dict()}, lambda named: named.pop("1.bias"), r"'1\.bias' is lacking"),
    "another name": (lambda: net(9).state_dict(), lambda named: named.update(odd=torch.ones(1)), "'odd' is none"),
    "another shape": (
        lambda: net(9).state_dict(),
        lambda named: named.update({"0.bias": torch.ones(3, 1)}),
        r"'0\.bias' has shape \[3, 1\], and should have \[3\]",
    ),
    "another kind of number": (
        lambda: net(9).state_dict(),
        lambda named: named.update({"1.num_batches_tracked": torch.tensor(0.5)}),
        r"'1\.num_batches_tracked' is of torch\.float32",
    ),
}


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(("make", "change", "said"), NOT_FITTING.values(), ids=NOT_FITTING)
    def test_is_named_and_nothing_is_sent(self, scheme, make, change, said):
        given = make()
        change(given)
        with connected(scheme, net, source=net(1)) as (actor,):
            with pytest.raises(PolicyError, match=said):
                scheme.send(given)
            assert scheme.version == 0
            assert actor.ask("receive", 0.05) is None
            assert actor.ask("numbers") == {1}
            assert scheme.send(net(2)) == 1
            assert actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {2}

    @pytest.mark.parametrize("given", [3, "weights", {"0.weight": 1.0}, [torch.ones(2)]], ids=repr)
    def test_what_is_no_weights(self, scheme, given):
        with connected(scheme, net, source=net(1)), pytest.raises(PolicyError, match=r"Weights (come|are)"):
            scheme.send(given)

    def test_nothing_where_there_is_no_model(self, scheme):
        with connected(scheme, net), pytest.raises(PolicyError, match="no model here"):
            scheme.send()


class TestStateDicts:
    """By that strategy, what no state dict has stays each receiver's own."""

    @pytest.mark.parametrize("make", SCHEMES, ids=lambda one: one.__name__)
    @pytest.mark.parametrize(("extract_as", "own"), [("state_dict", {-1}), ("tensordict", {2})])
    def test_buffers_that_are_not_persistent(self, make, extract_as, own):
        scheme = make(extract_as)
        with connected(scheme, partial(with_own_buffer, -1), source=with_own_buffer(1)) as (actor,):
            scheme.send(with_own_buffer(2))
            assert actor.ask("receive", LONG) == 1
            assert actor.ask("numbers") == {2} | own


def with_own_buffer(value):
    module = nn.Linear(2, 2)
    module.register_buffer("own", torch.zeros(2), persistent=False)
    return filled(module, value)


class TestMisuse:
    def test_before_it_was_initialised(self, scheme):
        for use in (scheme.connect, scheme.send, scheme.receive):
            with pytest.raises(OptionError, match="init_on_sender or init_on_receiver"):
                use()

    def test_initialised_twice(self, scheme):
        scheme.init_on_sender("policy", model=net())
        with pytest.raises(OptionError, match="that of 'policy' already"):
            scheme.init_on_sender("critic", model=net())
        with pytest.raises(OptionError, match="that of 'policy' already"):
            scheme.init_on_receiver("policy", model=net())
        assert scheme.model_id == "policy"
        scheme.shutdown()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"num_workers": 0}, "num_workers=0 came"),
            ({"num_workers": -1}, "num_workers=-1 came"),
            ({"model": net(), "weights": net().state_dict()}, "model= and weights= came"),
        ],
        ids=["no receivers", "less", "a model and weights"],
    )
    def test_a_sender_of_nothing_or_of_two_things(self, scheme, given, said):
        with pytest.raises(OptionError, match=f"one receiver at least, and a model or weights of it; {said}"):
            scheme.init_on_sender("policy", **given)
        scheme.init_on_sender("policy", model=net())  # it is still free
        scheme.shutdown()

    def test_a_receiver_that_is_initialised_twice(self, scheme):
        with initialised(scheme, net) as (actor,), pytest.raises(OptionError, match="already"):
            actor.ask("init", net)

    def test_sending_before_it_is_connected(self, scheme):
        scheme.init_on_sender("policy", model=net())
        with pytest.raises(OptionError, match="after connect"):
            scheme.send()
        scheme.shutdown()

    def test_the_wrong_side(self, scheme):
        with connected(scheme, net, source=net()) as (actor,):
            with pytest.raises(OptionError, match="side that sends"):
                scheme.receive()
            with pytest.raises(OptionError, match="side that receives"):
                actor.ask("send")

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (2, "There are receivers 0 to 1; worker_ids has 2"),
            (-1, "There are receivers 0 to 1; worker_ids has -1"),
            ([0, 5], "There are receivers 0 to 1; worker_ids has 5"),
            (["0"], r"worker_ids takes numbers of receivers, not \['0'\]"),
            ((None,), r"worker_ids takes numbers of receivers, not \(None,\)"),
            (0.5, r"worker_ids takes numbers of receivers, not 0\.5"),
        ],
        ids=repr,
    )
    def test_workers_that_there_are_not(self, scheme, wrong, said):
        with connected(scheme, net, net, source=net(1)) as actors:
            with pytest.raises(OptionError, match=said):
                scheme.send(net(2), worker_ids=wrong)
            assert [actor.ask("receive", 0.05) for actor in actors] == [None, None]
            assert scheme.version == 0

    @pytest.mark.parametrize("wrong", [1, -1])
    def test_a_receiver_that_there_is_not(self, scheme, wrong):
        scheme.init_on_sender("policy", model=net())
        actor = Actor(scheme)
        try:
            with pytest.raises(OptionError, match=f"1 receivers; worker_idx={wrong}"):
                actor.ask("init", net, worker_idx=wrong)
        finally:
            scheme.shutdown()
            actor.stop()

    def test_a_receiver_of_a_scheme_without_a_sender(self, scheme):
        with pytest.raises(OptionError, match="init_on_sender"):
            scheme.init_on_receiver("policy", model=net())

    @pytest.mark.parametrize("model", [None, 3, lambda x: x], ids=["None", "a number", "a function"])
    def test_a_receiver_without_a_module(self, scheme, model):
        with pytest.raises(OptionError, match="needs the module"):
            scheme.init_on_receiver("policy", model=model)


class TestAReceiverThatDied:
    def test_the_others_can_be_sent_to(self, scheme):
        with connected(scheme, net, net, source=net(1)) as actors:
            actors[0].kill()
            scheme.send(net(2), worker_ids=1)
            assert actors[1].ask("receive", LONG) == 1
            assert actors[1].ask("numbers") == {2}

    def test_is_said_where_it_would_have_been_sent_something(self, by_value):
        with connected(by_value, net, net, source=net(1)) as actors:
            actors[0].kill()
            with pytest.raises(ClosedError, match="ended"):
                by_value.send(net(2))

    def test_makes_no_difference_to_shared_memory(self, shared):
        with connected(shared, net, net, source=net(1)) as actors:
            actors[0].kill()
            assert shared.send(net(2)) == 1
            assert actors[1].ask("receive", LONG) == 1


class TestAReceiverThatNeverReads:
    def test_is_waited_for_for_a_limited_time(self, by_value, monkeypatch):
        monkeypatch.setattr(sides, "SENDING", 0.2)
        with connected(by_value, heavy, source=heavy(1)):
            with pytest.raises(ClosedError, match=r"Receivers 0 have not taken version 1: .*too long"):
                by_value.send(heavy(2))
            assert by_value.version == 1  # the number is not used again

    def test_has_no_messages_piling_up(self, by_value, monkeypatch):
        """What was sent in part is no message: the pipe is closed, and all that waited is let go."""
        monkeypatch.setattr(sides, "SENDING", 0.05)
        with connected(by_value, heavy, source=heavy(1)):
            for value in range(6):
                with pytest.raises(ClosedError):
                    by_value.send(heavy(value))
            assert not by_value._links[0]._outbox._waiting

    def test_does_not_wait_for_the_other_half(self, by_value, monkeypatch):
        monkeypatch.setattr(sides, "SENDING", 0.2)
        with connected(by_value, heavy, source=heavy(1)) as (actor,):
            with pytest.raises(ClosedError):
                by_value.send(heavy(2))
            actor.tell("receive", 0.5)
            with pytest.raises(ClosedError):
                actor.answer()

    def test_is_not_waited_for_with_shared_memory(self, shared, monkeypatch):
        monkeypatch.setattr(sides, "SENDING", 0.0)
        with connected(shared, heavy, source=heavy(0)) as (actor,):
            for value in (1, 2, 3):
                shared.send(heavy(value))
            assert actor.ask("receive", LONG) == 3
            assert actor.ask("numbers") == {3}


class TestNoSync:
    def test_nothing_is_sent_or_received(self):
        scheme, model = NoWeightSyncScheme(), net(1)
        scheme.init_on_sender("policy", model=model)
        scheme.connect()
        assert scheme.send() == 0
        assert scheme.send(net(2), worker_ids=5) == 0
        assert scheme.receive(LONG) is None
        assert numbers_in(model) == {1}
        scheme.shutdown()

    @pytest.mark.parametrize("init", ["init_on_sender", "init_on_receiver"])
    def test_no_pipes_are_opened(self, init):
        scheme, before = NoWeightSyncScheme(), descriptors()
        getattr(scheme, init)("policy", model=net())
        scheme.connect()
        assert descriptors() == before
        assert scheme.model_id == "policy"
        with pytest.raises(OptionError, match="that of 'policy' already"):
            getattr(scheme, init)("critic")
        scheme.shutdown()

    def test_it_has_no_ends(self):
        scheme = NoWeightSyncScheme()
        with pytest.raises(OptionError, match="no ends"):
            scheme.sender([], 1, lambda worker, message: None)
        with pytest.raises(OptionError, match="no ends"):
            scheme.receiver()


class TestCrossing:
    def test_one_that_is_not_in_use_can_be_copied_and_pickled(self, scheme):
        for other in (copy.copy(scheme), copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
            assert type(other) is type(scheme)
            assert other.strategy.extract_as == scheme.strategy.extract_as
            assert other.model_id is None
            other.init_on_sender("policy", model=net())
            other.shutdown()
        scheme.init_on_sender("policy", model=net())
        scheme.shutdown()

    def test_a_receiver_in_use_cannot(self, scheme):
        """In a thread of its process, say: there are no two that read one pipe."""
        with connected(scheme, net, source=net()) as (actor,):
            errors = actor.ask("errors_of_copies")
        assert len(errors) == 3
        assert all("'policy' is in use" in error for error in errors)

    def test_one_of_a_collector_cannot(self, scheme):
        context = Context()
        scheme.init_on_sender("policy", context)
        for cross in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="'policy' is in use"):
                cross(scheme)


class Context:
    """A collector, as schemes see it."""

    def __init__(self):
        self.updates = []
        self.version = 0

    def update_policy_weights_(self, weights=None, *, worker_ids=None, model_id="policy"):
        self.updates.append((weights, worker_ids, model_id))
        self.version = 7
        return self.version


class TestWithAContext:
    def test_it_is_the_one_that_sends(self, scheme):
        context = Context()
        scheme.init_on_sender("critic", context)
        assert scheme.version == 0
        assert scheme.send("weights", worker_ids=[1]) == 7
        assert context.updates == [("weights", [1], "critic")]
        assert scheme.version == 7
        context.version = 8  # by another of its schemes
        assert scheme.version == 8, "it is the collector's newest"

    def test_that_is_gone(self, scheme):
        context = Context()
        scheme.init_on_sender("policy", context)
        del context
        gc.collect()
        with pytest.raises(ClosedError):
            scheme.send()

    def test_after_it_was_shut_down(self, scheme):
        context = Context()
        scheme.init_on_sender("policy", context)
        scheme.shutdown()
        with pytest.raises(ClosedError):
            scheme.send()


class TallyScheme(WeightSyncScheme):
    """One of the user's own: what is published goes over in lists of numbers, and is counted."""

    def sender(self, leaves, workers, hand):
        return TallySender(workers, hand)

    def receiver(self):
        return TallyReceiver()


class TallySender:
    def __init__(self, workers, hand):
        self.workers = range(workers)
        self.hand = hand

    def publish(self, tensors, version, workers=None):
        content = version, {key: tensor.tolist() for key, tensor in tensors.items()}
        for worker in self.workers if workers is None else workers:
            self.hand(worker, Message(content))

    def let_go(self):
        self.hand = None


class TallyReceiver:
    def __init__(self):
        self.newest = None

    def accept(self, content, descriptors):
        self.newest = content

    def take(self, targets):
        if self.newest is None:
            return None
        (version, numbers), self.newest = self.newest, None
        with torch.no_grad():
            for key, tensors in targets.items():
                for tensor in tensors:
                    tensor.copy_(torch.tensor(numbers[key]))
        return version


class TestASchemeOfOnesOwn:
    def test_works_as_the_others_do(self):
        scheme = TallyScheme()
        with connected(scheme, net, net, source=net(1)) as actors:
            assert [actor.ask("numbers") for actor in actors] == [{1}, {1}]
            assert scheme.send(net(2)) == 1
            assert scheme.send(net(3), worker_ids=0) == 2
            assert [actor.ask("receive", LONG) for actor in actors] == [2, 1]
            assert [actor.ask("numbers") for actor in actors] == [{3}, {2}]
            with pytest.raises(PolicyError, match=r"\[4, 2\]"):
                scheme.send(net(4, 4))
            scheme.shutdown()
            for actor in actors:
                with pytest.raises(ClosedError):
                    actor.ask("receive", LONG)

    def test_needs_both_ends(self):
        class Half(WeightSyncScheme):
            def receiver(self):
                return TallyReceiver()

        with pytest.raises(TypeError, match="sender"):
            Half()


class TestWhatItIsCalled:
    def test_in_words(self):
        assert repr(SharedMemWeightSyncScheme("state_dict")) == "SharedMemWeightSyncScheme('state_dict')"

    def test_a_strategy_that_there_is_not(self):
        with pytest.raises(OptionError, match="'numpy'"):
            MultiProcessWeightSyncScheme("numpy")


class TestNothingIsLeft:
    def open_now(self):
        gc.collect()
        return descriptors(), {*threading.enumerate()}, {*multiprocessing.active_children()}

    def test_after_a_whole_life(self, scheme):
        before = self.open_now()
        with connected(scheme, net, net, source=net(1)) as actors:
            for value in (2, 3):
                scheme.send(net(value))
                scheme.send(net(value), worker_ids=1)
                assert all(actor.ask("receive", LONG) for actor in actors)
        assert self.open_now() == before

    def test_after_one_that_nobody_joined(self, scheme):
        before = self.open_now()
        scheme.init_on_sender("policy", model=net(), num_workers=3)
        scheme.shutdown()
        assert self.open_now() == before

    def test_after_receivers_died(self, scheme):
        before = self.open_now()
        with connected(scheme, net, net, source=net(1)) as actors:
            for actor in actors:
                actor.kill()
        assert self.open_now() == before

    def test_after_a_connection_that_failed(self, scheme):
        before = self.open_now()
        with initialised(scheme, net, source=net(0, 4)) as (actor,):
            actor.tell("connect", LONG)
            with pytest.raises(PolicyError):
                scheme.connect(LONG)
        assert self.open_now() == before

    def test_after_what_was_not_taken(self, by_value, monkeypatch):
        monkeypatch.setattr(sides, "SENDING", 0.1)
        before = self.open_now()
        with connected(by_value, heavy, source=heavy(1)), pytest.raises(ClosedError):
            by_value.send(heavy(2))
        assert self.open_now() == before

    def test_in_the_receivers(self, shared):
        """One descriptor of each memory that it was told of would be too many."""
        with connected(shared, net, net, source=net(1)) as actors:
            before = actors[0].ask("descriptors")
            for value in range(5):
                shared.send(net(value), worker_ids=0)
                assert actors[0].ask("receive", LONG) == value + 1
            assert actors[0].ask("descriptors") == before

    def test_in_the_sender_while_it_is_in_use(self, scheme):
        with connected(scheme, net, net, source=net(1)):
            scheme.send(net(1), worker_ids=0)
            before = self.open_now()
            for value in range(5):
                scheme.send(net(value))
                scheme.send(net(value), worker_ids=0)
            assert self.open_now() == before


class TestWhatAReviewFound:
    def test_a_sender_is_copied_only_on_its_way_to_a_process(self, scheme):
        """A copy would close its descriptors."""
        scheme.init_on_sender("policy", model=net())
        for cross in (copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps):
            with pytest.raises(TypeError, match="in use"):
                cross(scheme)
        scheme.shutdown()

    def test_a_version_is_one_set_of_weights(self, by_value):
        """Worker 1 is dead; the others have what was sent to all, wherever it stands."""
        for dead in (1, 0):
            scheme = type(by_value)()
            with connected(scheme, net, net, source=net(0)) as actors:
                actors[dead].kill()
                with pytest.raises(ClosedError, match=f"Receivers {dead} "):
                    scheme.send(net(1))
                alive = actors[1 - dead]
                assert (alive.ask("receive", LONG), alive.ask("numbers")) == (1, {1})
                scheme.send(net(2), worker_ids=1 - dead)
                assert (alive.ask("receive", LONG), alive.ask("numbers")) == (2, {2})

    def test_memory_that_nobody_takes_from_is_given_back(self, shared):
        """Both were addressed alone: the memory for all is nobody's."""
        with connected(shared, net, net, source=net(0)):
            before = len(descriptors())
            shared.send(net(1), worker_ids=0)
            shared.send(net(1), worker_ids=1)
            assert len(descriptors()) <= before + 2  # two memories where there was one, two descriptors each

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_a_scheme_keeps_its_attributes_on_its_way(self, method):
        scheme = OwnScheme("a folder")
        with connected(scheme, net, method=method):
            scheme.send(net(1))

    @pytest.mark.slow  # another interpreter, for one number
    def test_the_number_of_a_receiver_goes_with_the_scheme(self):
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender("policy", model=net(), num_workers=2)
        scheme.worker_idx = 1
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=tell_index, args=(scheme, there))
        process.start()
        assert here.poll(LONG)
        assert here.recv() == 1
        scheme.shutdown()
        process.join()

    def test_sending_after_shutdown_says_so(self, scheme):
        with connected(scheme, net, source=net(1)):
            scheme.shutdown()
            with pytest.raises(ClosedError):
                scheme.send()

    def test_workers_may_be_numbers_of_numpy(self, scheme):
        with connected(scheme, net, source=net(1)):
            assert scheme.send(worker_ids=np.int64(0)) == 1

    def test_a_ctrl_c_comes_before_a_message_with_its_descriptors_or_after_it(self, shared, monkeypatch):
        with connected(shared, net, net, source=net(1)) as actors:
            send = Outbox.send_descriptors

            def interrupted(box, fds):
                monkeypatch.setattr(Outbox, "send_descriptors", send)
                signal.raise_signal(signal.SIGINT)
                send(box, fds)

            monkeypatch.setattr(Outbox, "send_descriptors", interrupted)
            with pytest.raises(KeyboardInterrupt):
                shared.send(net(2), worker_ids=0)
            shared.send(net(3), worker_ids=0)
            assert actors[0].ask("receive", LONG) == shared.version
            assert actors[0].ask("numbers") == {3}

    def test_one_that_was_shut_down_may_be_used_again(self, scheme):
        for value in (1, 2):
            with connected(scheme, net, source=net(value)) as (actor,):
                assert actor.ask("numbers") == {value}
                assert scheme.send() == 1


class OwnScheme(SharedMemWeightSyncScheme):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def receiver(self):
        assert self.folder == "a folder"
        return super().receiver()


def tell_index(scheme, connection):
    connection.send(scheme.worker_idx)
