"""`ValueSender`, `ValueReceiver`: each message holds all that is the newest, and a copy."""

from __future__ import annotations

import weakref

import pytest
import torch

from rlcollect.weights.values import ValueReceiver, ValueSender
from tests.weights.helpers import LEAVES, all_of, part, taken


class Hands:
    """Keeps what is to be passed on, as pipes do that nobody reads."""

    def __init__(self, workers):
        self.messages = [[] for _ in range(workers)]

    def __call__(self, worker, message):
        self.messages[worker].append(message)

    def last(self, worker):
        """What a worker takes that has read only the last."""
        receiver = ValueReceiver()
        if self.messages[worker]:
            message = self.messages[worker][-1]
            receiver.accept(message.content, message.attached)
        return taken(receiver)


def ends(workers):
    hands = Hands(workers)
    return ValueSender(LEAVES, workers, hands), hands


class TestPublishing:
    def test_to_all(self):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        assert [hands.last(worker) for worker in range(2)] == [(1, 1, 1)] * 2

    def test_to_some_the_others_are_told_nothing(self):
        sender, hands = ends(3)
        sender.publish(all_of(1), 1)
        sender.publish(all_of(2), 2, [1])
        assert [len(messages) for messages in hands.messages] == [1, 2, 1]
        assert [hands.last(worker) for worker in range(3)] == [(1, 1, 1), (2, 2, 2), (1, 1, 1)]

    def test_the_last_message_makes_up_for_those_before(self):
        """It may go in their place."""
        sender, hands = ends(2)
        sender.publish(part(1), 1)
        sender.publish(part(2, LEAVES[1]), 2)
        assert hands.last(0) == (2, 1, 2)
        sender.publish(part(3), 3, [1])
        assert [hands.last(worker) for worker in range(2)] == [(2, 1, 2), (3, 3, 2)]

    def test_what_was_never_published_is_not_written_to(self):
        sender, hands = ends(1)
        sender.publish(part(1), 1)
        assert hands.last(0) == (1, 1, -1)

    def test_what_is_done_to_them_afterwards_is_not_seen(self):
        sender, hands = ends(1)
        given = all_of(1)
        sender.publish(given, 1)
        for tensor in given.values():
            tensor.fill_(9)
        assert hands.last(0) == (1, 1, 1)

    def test_they_are_of_the_dtypes_that_were_agreed_on(self):
        sender, hands = ends(1)
        sender.publish({LEAVES[0].key: torch.nn.Parameter(torch.ones(2, dtype=torch.float64))}, 1)
        (tensor,) = hands.messages[0][0].content.tensors.values()
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad

    def test_no_more_of_a_tensor_crosses_than_is_seen(self):
        """Of a view, say, its elements and not all that lies beside them."""
        sender, hands = ends(1)
        sender.publish({LEAVES[0].key: torch.zeros(1000, 1000)[:2, 0]}, 1)
        (tensor,) = hands.messages[0][0].content.tensors.values()
        assert tensor.untyped_storage().nbytes() == 2 * 4

    def test_has_no_descriptors(self):
        sender, hands = ends(1)
        sender.publish(all_of(1), 1)
        assert hands.messages[0][0].attached == ()


class TestReceiving:
    def test_the_newest_once(self):
        sender, hands = ends(1)
        receiver = ValueReceiver()
        assert not receiver.is_behind()
        for version in (1, 2, 3):
            sender.publish(all_of(version), version)
        for message in hands.messages[0]:
            receiver.accept(message.content, [])
        assert receiver.is_behind()
        assert taken(receiver) == (3, 3, 3)
        assert not receiver.is_behind()
        assert taken(receiver) == (None, -1, -1)

    def test_into_each_of_several_targets_in_place(self):
        sender, hands = ends(1)
        receiver = ValueReceiver()
        sender.publish(all_of(1), 1)
        receiver.accept(hands.messages[0][0].content, [])
        targets = [torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, dtype=torch.float64)]
        assert receiver.take({LEAVES[0].key: targets}) == 1
        assert [target.tolist() for target in targets] == [[1, 1], [1, 1]]
        assert targets[0].is_leaf


class TestAWorkerInThePlaceOfAnother:
    def test_is_told_nothing_before_the_first(self):
        sender, _ = ends(1)
        assert sender.welcome(0) is None

    @pytest.mark.parametrize(("worker", "has"), [(0, (1, 1, 1)), (1, (2, 2, 1))])
    def test_has_the_newest(self, worker, has):
        sender, _ = ends(2)
        sender.publish(all_of(1), 1)
        sender.publish(part(2), 2, [1])
        receiver = ValueReceiver()
        receiver.accept(sender.welcome(worker).content, [])
        assert taken(receiver) == has


class TestBeginningAnew:
    def test_nothing_of_before_is_for_those_that_come(self):
        sender, hands = ends(1)
        sender.publish(all_of(1), 1)
        sender.begin_anew([], 0)
        assert sender.welcome(0) is None
        sender.publish(part(2), 2)
        assert hands.last(0) == (2, 2, -1)


class TestMemory:
    @pytest.mark.parametrize(
        "let_go",
        [lambda sender: sender.let_go(), lambda sender: sender.begin_anew([], 0)],
        ids=["let_go", "begin_anew"],
    )
    def test_is_given_back(self, let_go):
        sender, hands = ends(2)
        sender.publish(all_of(1), 1)
        kept = weakref.ref(hands.messages[0][0].content.tensors[LEAVES[0].key])
        hands.messages.clear()
        assert kept() is not None
        let_go(sender)
        let_go(sender)
        assert kept() is None

    def test_of_what_was_taken_is_given_back(self):
        sender, hands = ends(1)
        receiver = ValueReceiver()
        sender.publish(all_of(1), 1)
        content = hands.messages[0].pop().content
        kept = weakref.ref(content)
        receiver.accept(content, [])
        del content
        sender.let_go()
        taken(receiver)
        assert kept() is None
