"""`SharedSender`, `SharedReceiver`: one memory for all, and one of its own for each that is addressed alone."""

from __future__ import annotations

import os
import weakref

import pytest

from rlcollect.errors import SharedMemoryError
from rlcollect.processes import arena
from rlcollect.weights.shared import SharedReceiver, SharedSender
from tests.weights.helpers import LEAVES, all_of, descriptors, part, taken


class Hands:
    """Passes messages on at once, to receivers of this process; a descriptor that is passed on is another's."""

    def __init__(self, workers):
        self.receivers = [SharedReceiver() for _ in range(workers)]
        self.count = 0

    def __call__(self, worker, message):
        self.count += 1
        self.receivers[worker].accept(message.content, [os.dup(fd) for fd in message.attached])


def ends(workers):
    hands = Hands(workers)
    return SharedSender(LEAVES, workers, hands), hands


class TestToAll:
    def test_each_takes_it(self):
        sender, hands = ends(3)
        sender.publish(all_of(1), 1)
        assert [taken(receiver) for receiver in hands.receivers] == [(1, 1, 1)] * 3
        sender.let_go()

    def test_no_message_is_sent(self):
        sender, hands = ends(3)
        before = hands.count
        for version in range(1, 5):
            sender.publish(all_of(version), version)
            sender.publish(all_of(version), version, [2, 1, 0])
        assert hands.count == before == 3
        sender.let_go()

    def test_whether_there_is_something_newer(self):
        sender, hands = ends(1)
        (receiver,) = hands.receivers
        assert not receiver.is_behind()
        sender.publish(all_of(1), 1)
        assert receiver.is_behind()
        taken(receiver)
        assert not receiver.is_behind()
        sender.let_go()


class TestToSome:
    def test_others_see_nothing(self):
        sender, hands = ends(3)
        sender.publish(all_of(1), 1)
        for receiver in hands.receivers:
            taken(receiver)
        sender.publish(all_of(2), 2, [1])
        assert [taken(receiver) for receiver in hands.receivers] == [(None, -1, -1), (2, 2, 2), (None, -1, -1)]
        sender.let_go()

    def test_its_place_starts_from_what_all_had(self):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        sender.publish(part(2), 2, [1])
        assert taken(hands.receivers[1]) == (2, 2, 1)
        assert taken(hands.receivers[0]) == (1, 1, 1)
        sender.let_go()

    def test_where_nothing_was_published_before(self):
        sender, hands = ends(2)
        sender.publish(part(2), 1, [0])
        assert [taken(receiver) for receiver in hands.receivers] == [(1, 2, -1), (None, -1, -1)]
        sender.let_go()

    def test_it_is_told_once(self):
        sender, hands = ends(2)
        before = hands.count
        for version in range(1, 5):
            sender.publish(all_of(version), version, [0])
        assert hands.count == before + 1
        sender.let_go()

    def test_what_all_are_given_later_comes_to_each(self):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        sender.publish(part(2), 2, [0])
        sender.publish(part(3, LEAVES[1]), 3)
        assert [taken(receiver) for receiver in hands.receivers] == [(3, 2, 3), (3, 1, 3)]
        sender.let_go()

    def test_several_of_them(self):
        sender, hands = ends(3)
        sender.publish(all_of(1), 1)
        sender.publish(all_of(2), 2, [0, 2])
        assert [taken(receiver)[0] for receiver in hands.receivers] == [2, 1, 2]
        sender.publish(all_of(3), 3, [2])
        assert [taken(receiver)[0] for receiver in hands.receivers] == [None, None, 3]
        sender.let_go()


class TestAReceiver:
    def test_that_was_told_nothing(self):
        receiver = SharedReceiver()
        assert not receiver.is_behind()
        assert taken(receiver) == (None, -1, -1)


class TestAWorkerInThePlaceOfAnother:
    def welcomed(self, sender, worker):
        receiver, message = SharedReceiver(), sender.welcome(worker)
        receiver.accept(message.content, [os.dup(fd) for fd in message.attached])
        return receiver

    def test_has_the_newest(self):
        sender, _ = ends(2)
        sender.publish(all_of(1), 1)
        assert taken(self.welcomed(sender, 0)) == (1, 1, 1)
        sender.let_go()

    def test_has_what_was_for_it_alone(self):
        sender, _ = ends(2)
        sender.publish(all_of(1), 1)
        sender.publish(part(2), 2, [1])
        assert taken(self.welcomed(sender, 1)) == (2, 2, 1)
        assert taken(self.welcomed(sender, 0)) == (1, 1, 1)
        sender.let_go()

    def test_has_what_comes_later(self):
        sender, _ = ends(1)
        receiver = self.welcomed(sender, 0)
        assert taken(receiver) == (None, -1, -1)
        sender.publish(all_of(1), 1)
        assert taken(receiver) == (1, 1, 1)
        sender.let_go()


class TestBeginningAnew:
    def test_nothing_of_before_is_for_those_that_come(self):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        sender.publish(all_of(2), 2, [1])
        sender.begin_anew([], 0)
        assert [taken(receiver) for receiver in hands.receivers] == [(None, -1, -1)] * 2
        sender.let_go()

    def test_what_comes_later_is(self):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        sender.begin_anew([], 0)
        sender.publish(part(2), 2)
        assert [taken(receiver) for receiver in hands.receivers] == [(2, 2, -1)] * 2
        sender.let_go()


class TestMemory:
    def test_is_given_back(self):
        before = descriptors()
        sender, hands = ends(2)
        sender.publish(all_of(1), 1, [0])
        sender.publish(all_of(1), 1, [1])
        mapped = [weakref.ref(place.arena.buffer) for place in sender._places.values()]
        hands.receivers.clear()
        sender.let_go()
        assert descriptors() == before
        assert [buffer() for buffer in mapped] == [None, None]

    def test_is_given_back_once(self):
        sender, _ = ends(1)
        sender.let_go()
        sender.let_go()

    def test_of_before_is_given_back_where_it_begins_anew(self):
        sender, _ = ends(2)
        sender.publish(all_of(1), 1)
        before = len(descriptors())
        for _ in range(5):
            sender.publish(all_of(1), 1)
            sender.begin_anew([], 0)
        assert len(descriptors()) == before
        sender.let_go()

    def test_what_was_published_can_be_taken_afterwards(self):
        sender, hands = ends(1)
        sender.publish(all_of(1), 1)
        sender.let_go()
        assert taken(hands.receivers[0]) == (1, 1, 1)

    def test_there_is_too_little(self, monkeypatch):
        monkeypatch.setattr(arena, "_left", lambda by_memfd: 10)
        before = descriptors()
        with pytest.raises(SharedMemoryError, match="10 bytes"):
            ends(2)
        assert descriptors() == before
