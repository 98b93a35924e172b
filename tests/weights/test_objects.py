"""Weights by way of an object store: what is put there, what each worker is told, and what it takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from rlcollect.layout import Leaf
from rlcollect.weights.objects import ObjectReceiver, ObjectSender

objects = pytest.importorskip("rlcollect.cluster.objects", exc_type=ImportError)
KEYS = [("policy", "weight"), ("policy", "bias"), ("env.model", "weight")]
LEAVES = [
    Leaf(KEYS[0], (2, 3), torch.float32),
    Leaf(KEYS[1], (3,), torch.float64),
    Leaf(KEYS[2], (), torch.int64),
]


class Store:
    """An object store, and receivers that hear at once."""

    def __init__(self, workers):
        self.objects = {}
        self.numbers = itertools.count()
        self.receivers = [ObjectReceiver() for _ in range(workers)]

    def put(self, data):
        number = next(self.numbers)
        self.objects[number] = data.copy()
        return number

    def fetched(self, reference):
        return self.objects[reference]

    def hand(self, worker, message):
        while worker >= len(self.receivers):
            self.receivers.append(ObjectReceiver())
        self.receivers[worker].accept(message.content, message.attached)


@pytest.fixture
def store(monkeypatch):
    store = Store(3)
    monkeypatch.setattr(objects, "put", store.put)
    monkeypatch.setattr(objects, "fetched", store.fetched)
    return store


def values(number, keys=KEYS):
    return {leaf.key: torch.full(leaf.shape, number, dtype=leaf.dtype) for leaf in LEAVES if leaf.key in keys}


def taken(store, worker):
    """The version that a worker takes, and what it has then by key; -1: it was not written."""
    held = {leaf.key: torch.full(leaf.shape, -1, dtype=leaf.dtype) for leaf in LEAVES}
    version = store.receivers[worker].take({key: [tensor] for key, tensor in held.items()})
    numbers = {key: {*tensor.flatten().tolist()} for key, tensor in held.items()}
    assert all(len(each) == 1 for each in numbers.values()), "torn"
    return version, [int(numbers[key].pop()) for key in KEYS]


def sender_of(store):
    return ObjectSender(LEAVES, 3, store.hand)


def test_a_version_is_put_once_for_all(store):
    sender = sender_of(store)
    sender.publish(values(1), 1)
    assert len(store.objects) == 1
    assert sender.nbytes == next(iter(store.objects.values())).nbytes
    for worker in range(3):
        assert store.receivers[worker].is_behind()
        assert taken(store, worker) == (1, [1, 1, 1])
        assert not store.receivers[worker].is_behind()
        assert taken(store, worker) == (None, [-1, -1, -1])


def test_what_was_overslept_is_not_fetched(store):
    sender = sender_of(store)
    for number in range(1, 5):
        sender.publish(values(number), number)
    store.objects = {key: data for key, data in store.objects.items() if key == 3}
    assert taken(store, 0) == (4, [4, 4, 4])


def test_some_tensors_are_the_newest_of_each(store):
    sender = sender_of(store)
    sender.publish(values(1), 1)
    sender.publish(values(2, KEYS[:1]), 2)
    sender.publish(values(3, KEYS[2:]), 3)
    assert taken(store, 0) == (3, [2, 1, 3])
    sender.publish(values(4, KEYS[:2]), 4)
    assert taken(store, 0) == (4, [4, 4, 3])
    assert sender.nbytes < sum(data.nbytes for data in store.objects.values())


def test_those_for_one_are_not_for_others(store):
    sender = sender_of(store)
    sender.publish(values(1), 1)
    sender.publish(values(2), 2, [1])
    assert [taken(store, worker)[0] for worker in range(3)] == [1, 2, 1]
    sender.add(1)
    assert taken(store, 3) == (1, [1, 1, 1]), "what all were sent"
    message = sender.welcome(1)
    store.receivers[1] = ObjectReceiver()
    store.hand(1, message)
    assert taken(store, 1) == (2, [2, 2, 2])


def test_a_message_that_was_overtaken_is_not_looked_at(store):
    """A successor is told what is the newest; while that is on its way the next is published, and comes first."""
    sender = sender_of(store)
    sender.publish(values(1), 1)
    late = sender.welcome(0)
    store.receivers[0] = ObjectReceiver()
    sender.publish(values(2), 2)
    store.hand(0, late)
    assert taken(store, 0) == (2, [2, 2, 2])


def test_of_what_is_not_wanted_any_more_nothing_is_sent(store):
    sender = sender_of(store)
    sender.publish(values(1), 1)
    sender.begin_anew([KEYS[2]], 5)
    store.receivers[0] = ObjectReceiver()
    store.hand(0, sender.welcome(0))
    assert taken(store, 0) == (5, [-1, -1, 1])
    sender.begin_anew([], 6)
    assert sender.welcome(0) is None
    sender.let_go()
    assert sender.nbytes == 0


def test_what_the_learner_does_afterwards_is_not_seen(store):
    sender, given = sender_of(store), values(1)
    sender.publish(given, 1)
    given[KEYS[0]].fill_(9)
    assert taken(store, 0) == (1, [1, 1, 1])


def test_bytes_are_seen_without_a_copy_and_without_a_warning():
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    there = objects.seen(data)
    assert torch.frombuffer(there, dtype=torch.uint8).tolist() == list(range(16))
    assert there.ctypes.data == data.ctypes.data
    assert there.base is not None
