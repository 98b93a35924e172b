"""`Channel`: whole messages, descriptors after them, and no Ctrl-C in their middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from rlcollect.processes.channel import Channel, Held, Outbox


@pytest.fixture
def ends():
    one, other = multiprocessing.Pipe(duplex=True)
    here, there = Outbox(one), Channel(other)
    yield here, there
    here.close()
    there.close()


class TestMessages:
    def test_come_in_order_both_ways(self, ends):
        here, there = ends
        for message in (1, {"a": [2]}, None):
            here.send(message)
        there.send("back")
        assert [there.receive() for _ in range(3)] == [1, {"a": [2]}, None]
        assert here.receive() == "back"

    @pytest.mark.timeout(60)
    def test_of_any_size(self, ends):
        here, there = ends
        message = np.arange(5_000_000)
        sender = threading.Thread(target=there.send, args=(message,))
        sender.start()
        came = here.receive()
        sender.join()
        assert np.array_equal(came, message)

    @pytest.mark.timeout(60)
    def test_sending_waits_for_nobody(self, ends):
        here, there = ends
        message = np.arange(5_000_000)
        for _ in range(2):
            here.send(message)
        with Path(os.devnull).open() as file:
            here.send_descriptors([file.fileno()])
        here.send("last")
        assert here.is_behind
        came = []
        receiver = threading.Thread(target=lambda: came.extend(there.receive() for _ in range(2)))
        receiver.start()
        while here.is_behind and receiver.is_alive():
            here.flush()
        receiver.join()
        here.flush()
        assert all(np.array_equal(one, message) for one in came)
        (fd,) = there.receive_descriptors(1)
        assert os.fstat(fd).st_rdev == Path(os.devnull).stat().st_rdev
        os.close(fd)
        here.flush()
        assert there.receive() == "last"
        assert not here.is_behind

    def test_results_may_be_anything(self, ends):
        here, there = ends
        factor = 3
        here.send_result(lambda x: x * factor)
        assert there.receive()(4) == 12

    @pytest.mark.parametrize("how", ["send", "send_result"])
    def test_what_cannot_be_pickled_is_not_sent_in_part(self, ends, how):
        here, there = ends
        with pytest.raises(TypeError, match="pickle"):
            getattr(here, how)([1, threading.Lock()])
        assert not there.has_message()
        here.send("next")
        assert there.receive() == "next"

    def test_has_message(self, ends):
        here, there = ends
        assert not there.has_message()
        here.send(1)
        assert there.has_message()
        there.receive()
        assert not there.has_message()


def large(number):
    return bytes([number]) * 4_000_000


def fill(outbox):
    """More than a pipe takes, so that a part of it waits, and all that comes after it."""
    message = large(0)
    outbox.send(message)
    assert outbox.is_behind
    return message


def all_of(outbox, channel):
    """What comes, as far as it was sent."""
    came = []

    def receive():
        came.extend(iter(channel.receive, "the end"))

    outbox.send("the end")
    receiver = threading.Thread(target=receive)
    receiver.start()
    while outbox.is_behind and receiver.is_alive():
        outbox.flush()
    receiver.join()
    assert not outbox.is_behind
    return came


@pytest.mark.timeout(60)
class TestNews:
    """The newest of them is enough, where none was begun with."""

    def test_is_a_message_as_any_other(self, ends):
        here, there = ends
        for number in range(3):
            here.send_news(number)
            assert there.receive() == number
        assert not there.has_message()

    def test_that_the_pipe_has_taken_is_not_replaced(self, ends):
        here, there = ends
        for number in range(3):
            here.send_news(number)
        assert [there.receive() for _ in range(3)] == [0, 1, 2]

    def test_that_waits_whole_is_replaced_by_the_next(self, ends):
        here, there = ends
        before = fill(here)
        for number in range(5):
            here.send_news(number)
        first, *others = all_of(here, there)
        assert first == before
        assert others == [4]

    def test_that_is_sent_in_part_is_not_replaced(self, ends):
        here, there = ends
        for number in range(4):
            here.send_news(large(number))
        assert here.is_behind
        came = all_of(here, there)
        assert came == [large(0), large(3)]

    def test_that_waits_behind_one_that_is_sent_in_part_is_replaced(self, ends):
        """Until it is begun with; the next after that is behind it."""
        here, there = ends
        here.send_news(large(0))
        here.send_news(large(1))
        assert received_meanwhile(here, there) == large(0)
        assert here.is_behind  # the second is sent in part now
        here.send_news(large(2))
        here.send_news(large(3))
        assert all_of(here, there) == [large(1), large(3)]

    def test_one_before_another_message_and_one_after_it_are_both_sent(self, ends):
        here, there = ends
        fill(here)
        here.send_news("old")
        here.send("between")
        here.send_news("new")
        assert all_of(here, there)[1:] == ["old", "between", "new"]

    def test_after_another_message_it_is_replaced_as_before(self, ends):
        here, there = ends
        fill(here)
        here.send_news(0)
        here.send("between")
        for number in (1, 2, 3):
            here.send_news(number)
        assert all_of(here, there)[1:] == [0, "between", 3]

    def test_other_messages_are_never_replaced(self, ends):
        here, there = ends
        fill(here)
        for number in range(3):
            here.send(number)
        here.send_news("news")
        assert all_of(here, there)[1:] == [0, 1, 2, "news"]

    def test_descriptors_stay_with_their_message(self, ends):
        here, there = ends
        fill(here)
        here.send("with a file")
        with Path(os.devnull).open() as file:
            here.send_descriptors([file.fileno()])
        here.send_news(1)
        here.send_news(2)
        received_meanwhile(here, there)
        assert there.receive() == "with a file"
        (fd,) = there.receive_descriptors(1)
        assert os.fstat(fd).st_rdev == Path(os.devnull).stat().st_rdev
        os.close(fd)
        assert all_of(here, there) == [2]

    def test_that_cannot_be_pickled_replaces_nothing(self, ends):
        here, there = ends
        fill(here)
        here.send_news("good")
        with pytest.raises(TypeError, match="pickle"):
            here.send_news(threading.Lock())
        assert all_of(here, there)[1:] == ["good"]

    def test_to_nobody(self, ends):
        here, there = ends
        there.close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            here.send_news("message")


def received_meanwhile(outbox, channel):
    """The next message; what waits goes on until it is there."""
    came = []
    receiver = threading.Thread(target=lambda: came.append(channel.receive()))
    receiver.start()
    while receiver.is_alive():
        outbox.flush()
    outbox.flush()
    return came[0]


class TestDescriptors:
    def test_follow_their_message(self, ends):
        here, there = ends
        pipes = [os.pipe() for _ in range(2)]
        here.send("first")
        here.send_descriptors([read for read, _ in pipes])
        here.send("second")
        for number, (read, write) in enumerate(pipes):
            os.close(read)
            os.write(write, b"%d" % number)
            os.close(write)
        assert there.receive() == "first"
        came = there.receive_descriptors(2)
        assert [os.read(fd, 10) for fd in came] == [b"0", b"1"]
        assert there.receive() == "second"
        for fd in came:
            os.close(fd)

    def test_none(self, ends):
        here, there = ends
        here.send("first")
        there.receive()
        assert there.receive_descriptors(0) == []


class TestTheEnd:
    def test_nobody_will_send(self, ends):
        here, there = ends
        here.send("last")
        here.close()
        assert there.receive() == "last"
        assert there.has_message()  # the end is one
        with pytest.raises((EOFError, ConnectionError)):
            there.receive()

    @pytest.mark.parametrize("how", ["send", "send_result"])
    def test_nobody_will_receive(self, ends, how):
        here, there = ends
        there.close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            getattr(here, how)("message")

    def test_closing_twice(self, ends):
        here, _ = ends
        fd = here.fileno()
        here.close()
        here.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert not here.has_message()


class TestCtrlC:
    """It is typed while messages are on their way, and seen after them."""

    def test_is_held_until_the_end(self):
        reached = []

        def typed():
            with Held():
                signal.raise_signal(signal.SIGINT)
                reached.append("after it was typed")

        with pytest.raises(KeyboardInterrupt):
            typed()
        assert reached == ["after it was typed"]

    def test_the_mask_is_as_before(self):
        with Held():
            with Held():
                pass
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def test_the_mask_is_as_before_where_something_fails(self):
        with pytest.raises(ZeroDivisionError), Held():
            _ = 1 / 0
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def test_other_threads_see_none_anyway(self):
        blocked = []

        def look():
            with Held():
                blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert blocked == [False]

    @pytest.mark.timeout(60)
    def test_comes_after_a_message_that_is_being_received(self, ends):
        here, there = ends
        message = np.arange(3_000_000)
        main = threading.main_thread().ident
        received = []

        def send():
            half = message.tobytes()
            here.connection._send(len(half).to_bytes(4, "big"))  # as multiprocessing frames it
            here.connection._send(half[: len(half) // 2])
            signal.pthread_kill(main, signal.SIGINT)
            here.connection._send(half[len(half) // 2 :])

        sender = threading.Thread(target=send)
        with pytest.raises(KeyboardInterrupt), Held():  # noqa: PT012 - it comes at the end
            sender.start()
            received.append(there.connection.recv_bytes())
        sender.join()
        assert received == [message.tobytes()]


def test_news_that_were_sent_are_not_kept():
    one, other = multiprocessing.Pipe(duplex=True)
    here, there = Outbox(one), Channel(other)
    here.send_news(bytes(10_000_000))
    thread = threading.Thread(target=there.receive)
    thread.start()
    while thread.is_alive():
        here.flush()
    assert not here.is_behind
    assert here._news is None
    here.close()
    there.close()
