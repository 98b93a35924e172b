"""`versioned`: what is published is taken whole, with its version, or not at all."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

from rlcollect.layout import Leaf
from rlcollect.processes.arena import Arena
from rlcollect.weights import versioned
from rlcollect.weights.versioned import Publisher, Taker, buffer_bytes

PUBLISHES = 6_000


def leaves_of(*shapes, dtype=torch.float32):
    return [Leaf((f"w{place}",), shape, dtype) for place, shape in enumerate(shapes)]


def memory(leaves, takers=1):
    arena = Arena(buffer_bytes(leaves, takers))
    arena.close()
    return arena.buffer


def pair(*leaves):
    buffer = memory(leaves)
    return Publisher(buffer, leaves), Taker(buffer, leaves)


def constant(leaves, value):
    return {leaf.key: torch.full(leaf.shape, value).to(leaf.dtype) for leaf in leaves}


def targets_of(leaves, value=-1):
    """A tensor for each."""
    return {key: [tensor] for key, tensor in constant(leaves, value).items()}


def values_of(targets):
    """All that stand in any of them."""
    return {value for tensors in targets.values() for tensor in tensors for value in tensor.flatten().tolist()}


class Watched(torch.Tensor):
    """A target that has something happen once what is copied into it is there."""

    @staticmethod
    def __new__(cls, tensor, happens):
        made = tensor.as_subclass(cls)
        made.happens = happens
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.copy_:
            args[0].happens()
        return result


class TestTaking:
    def test_what_was_published(self):
        leaves = leaves_of((2,), (2, 3))
        publisher, taker = pair(*leaves)
        given = {("w0",): torch.tensor([1.0, 2.0]), ("w1",): torch.arange(6.0).reshape(2, 3)}
        targets = targets_of(leaves)
        publisher.publish(given, 7)
        assert taker.take(targets) == 7
        assert all(torch.equal(targets[key][0], given[key]) for key in given)

    def test_nothing_before_the_first(self):
        leaves = leaves_of((2,))
        _, taker = pair(*leaves)
        targets = targets_of(leaves)
        assert not taker.is_behind()
        assert taker.take(targets) is None
        assert values_of(targets) == {-1}

    def test_nothing_newer(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        assert taker.is_behind()
        assert taker.take(targets_of(leaves)) == 1
        assert not taker.is_behind()
        targets = targets_of(leaves)
        assert taker.take(targets) is None
        assert values_of(targets) == {-1}

    def test_the_newest_of_several(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        for version in range(1, 6):
            publisher.publish(constant(leaves, version * 10), version)
        targets = targets_of(leaves)
        assert taker.take(targets) == 5
        assert values_of(targets) == {50}
        assert taker.take(targets) is None

    def test_one_after_the_other(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        for version in range(1, 8):
            publisher.publish(constant(leaves, -version), version)
            assert taker.take(targets) == version
            assert values_of(targets) == {-version}

    def test_versions_are_the_callers(self):
        """A pair may be addressed with some versions and not with others, and a state that was loaded goes back."""
        leaves = leaves_of((1,))
        publisher, taker = pair(*leaves)
        for version in (3, 17, 4, 2**40, 0):
            publisher.publish(constant(leaves, 1), version)
            assert taker.take(targets_of(leaves)) == version

    def test_several_takers(self):
        leaves = leaves_of((4,))
        buffer = memory(leaves, 3)
        publisher, takers = Publisher(buffer, leaves, 3), [Taker(buffer, leaves, 3, taker) for taker in range(3)]
        publisher.publish(constant(leaves, 1), 1)
        assert takers[0].take(targets_of(leaves)) == 1
        publisher.publish(constant(leaves, 2), 2)
        for taker in takers:
            targets = targets_of(leaves)
            assert taker.take(targets) == 2
            assert values_of(targets) == {2}
            assert taker.take(targets) is None

    def test_what_was_taken_stays_until_the_next(self):
        leaves = leaves_of((4,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        publisher.publish(constant(leaves, 1), 1)
        taker.take(targets)
        for version in (2, 3, 4):
            publisher.publish(constant(leaves, version), version)
        assert values_of(targets) == {1}

    def test_what_is_published_is_a_copy(self):
        leaves = leaves_of((4,))
        publisher, taker = pair(*leaves)
        given, targets = constant(leaves, 1), targets_of(leaves)
        publisher.publish(given, 1)
        given["w0",].fill_(9)
        taker.take(targets)
        assert values_of(targets) == {1}

    def test_two_pairs_have_nothing_in_common(self):
        leaves = leaves_of((2,))
        (one, taker), (_, other) = pair(*leaves), pair(*leaves)
        one.publish(constant(leaves, 1), 1)
        assert other.take(targets_of(leaves)) is None
        assert taker.take(targets_of(leaves)) == 1

    def test_each_of_several_targets(self):
        """Two copies of a policy, say, in one worker."""
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        targets = {leaf.key: [torch.zeros(leaf.shape) for _ in range(3)] for leaf in leaves}
        publisher.publish(constant(leaves, 1), 1)
        assert taker.take(targets) == 1
        assert values_of(targets) == {1}

    def test_what_has_no_target_is_left_out(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves[1:])
        publisher.publish(constant(leaves, 1), 1)
        assert taker.take(targets) == 1
        assert values_of(targets) == {1}


class TestPartOfThem:
    def test_what_was_never_published_is_not_written_to(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        publisher.publish({("w0",): torch.ones(2)}, 1)
        assert taker.take(targets) == 1
        assert [tensors[0].tolist() for tensors in targets.values()] == [[1] * 2, [-1] * 3]

    def test_what_is_not_given_stays_as_it_was(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        publisher.publish({("w0",): torch.ones(2)}, 1)
        publisher.publish({("w1",): torch.full((3,), 2.0)}, 2)
        publisher.publish({("w1",): torch.full((3,), 3.0)}, 3)
        targets = targets_of(leaves)
        assert taker.take(targets) == 3
        assert [tensors[0].tolist() for tensors in targets.values()] == [[1] * 2, [3] * 3]

    def test_only_what_was_published_since_is_copied(self):
        leaves = leaves_of((2,), (3,), (1,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        targets = targets_of(leaves)
        taker.take(targets)
        for tensors in targets.values():
            tensors[0].fill_(-1)
        publisher.publish({("w1",): torch.full((3,), 2.0)}, 2)
        publisher.publish({("w0",): torch.full((2,), 3.0)}, 3)
        assert taker.take(targets) == 3
        assert [tensors[0].tolist() for tensors in targets.values()] == [[3] * 2, [2] * 3, [-1]]

    def test_each_taker_has_what_it_has_not(self):
        leaves = leaves_of((2,), (3,))
        buffer = memory(leaves, 2)
        publisher, takers = Publisher(buffer, leaves, 2), [Taker(buffer, leaves, 2, taker) for taker in range(2)]
        publisher.publish(constant(leaves, 1), 1)
        takers[0].take(targets_of(leaves))
        publisher.publish({("w0",): torch.full((2,), 2.0)}, 2)
        came = [targets_of(leaves) for _ in takers]
        assert [taker.take(targets) for taker, targets in zip(takers, came, strict=True)] == [2, 2]
        assert [values_of(targets) for targets in came] == [{2, -1}, {2, 1}]

    def test_none_of_them_is_a_version_too(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        publisher.publish({}, 2)
        targets = targets_of(leaves)
        assert taker.take(targets) == 2
        assert values_of(targets) == {1}


class TestAPublishThatFails:
    def test_is_none(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        with pytest.raises(RuntimeError):
            publisher.publish({("w0",): torch.full((2,), 5.0), ("w1",): torch.ones(4)}, 2)
        targets = targets_of(leaves)
        assert taker.take(targets) == 1
        assert values_of(targets) == {1}
        publisher.publish(constant(leaves, 3), 2)
        assert taker.take(targets) == 2
        assert values_of(targets) == {3}

    def test_nothing_of_it_is_in_the_next(self):
        """Neither when the next does not give what it did."""
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        for version in (1, 2):
            publisher.publish(constant(leaves, version), version)
        with pytest.raises(RuntimeError):
            publisher.publish({("w0",): torch.full((2,), 5.0), ("w1",): torch.ones(4)}, 3)
        publisher.publish({("w1",): torch.full((3,), 4.0)}, 3)
        targets = targets_of(leaves)
        assert taker.take(targets) == 3
        assert [tensors[0].tolist() for tensors in targets.values()] == [[2] * 2, [4] * 3]


class TestGoingOn:
    """One pair starts from what another has."""

    def test_has_the_others_newest(self):
        leaves = leaves_of((2,), (3,))
        (before, _), (publisher, taker) = pair(*leaves), pair(*leaves)
        for version in (4, 5):
            before.publish(constant(leaves, version), version)
        publisher.go_on_from(before)
        targets = targets_of(leaves)
        assert taker.take(targets) == 5
        assert values_of(targets) == {5}

    def test_from_one_that_has_nothing(self):
        leaves = leaves_of((2,))
        (before, _), (publisher, taker) = pair(*leaves), pair(*leaves)
        publisher.go_on_from(before)
        assert not taker.is_behind()

    def test_what_the_other_never_had_is_not_written_to(self):
        leaves = leaves_of((2,), (3,))
        (before, _), (publisher, taker) = pair(*leaves), pair(*leaves)
        before.publish({("w1",): torch.ones(3)}, 1)
        publisher.go_on_from(before)
        publisher.publish({}, 2)
        targets = targets_of(leaves)
        assert taker.take(targets) == 2
        assert [tensors[0].tolist() for tensors in targets.values()] == [[-1] * 2, [1] * 3]

    def test_the_other_is_left_alone(self):
        leaves = leaves_of((2,))
        (before, other), (publisher, _) = pair(*leaves), pair(*leaves)
        before.publish(constant(leaves, 1), 1)
        publisher.go_on_from(before)
        publisher.publish(constant(leaves, 2), 2)
        targets = targets_of(leaves)
        assert other.take(targets) == 1
        assert values_of(targets) == {1}


class TestTensors:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float64])
    def test_dtypes(self, dtype):
        leaves = [Leaf(("a",), (3,), dtype), Leaf(("b",), (2,), torch.float32), Leaf(("c",), (1,), dtype)]
        publisher, taker = pair(*leaves)
        given = {
            ("a",): torch.tensor([0, 1, 1]).to(dtype),
            ("b",): torch.tensor([0.5, -1]),
            ("c",): torch.tensor([1]).to(dtype),
        }
        targets = targets_of(leaves, 0)
        publisher.publish(given, 1)
        taker.take(targets)
        assert all(torch.equal(targets[key][0], given[key]) for key in given)

    def test_large_integers_are_exact(self):
        leaves = [Leaf(("n",), (2,), torch.int64)]
        publisher, taker = pair(*leaves)
        publisher.publish({("n",): torch.tensor([2**62 + 1, -(2**53) - 1])}, 1)
        targets = targets_of(leaves)
        taker.take(targets)
        assert values_of(targets) == {2**62 + 1, -(2**53) - 1}

    def test_dtypes_are_converted_on_both_ways(self):
        publisher, taker = pair(*leaves_of((2,)))
        publisher.publish({("w0",): torch.tensor([1, 2])}, 1)
        target = torch.zeros(2, dtype=torch.float64)
        taker.take({("w0",): [target]})
        assert target.tolist() == [1.0, 2.0]

    def test_none_at_all(self):
        publisher, taker = pair()
        assert taker.take({}) is None
        publisher.publish({}, 1)
        assert taker.is_behind()
        assert taker.take({}) == 1
        assert taker.take({}) is None
        publisher.publish({}, 2)
        assert taker.take({}) == 2

    def test_scalars(self):
        leaves = leaves_of((), (), dtype=torch.int64)
        publisher, taker = pair(*leaves)
        publisher.publish({("w0",): torch.tensor(3), ("w1",): torch.tensor(4)}, 1)
        targets = targets_of(leaves)
        taker.take(targets)
        assert [tensors[0].item() for tensors in targets.values()] == [3, 4]

    def test_without_elements(self):
        leaves = leaves_of((0,), (2,), (3, 0))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 4), 1)
        targets = targets_of(leaves)
        assert taker.take(targets) == 1
        assert values_of(targets) == {4}

    def test_sources_that_are_not_contiguous(self):
        leaves = leaves_of((3, 2), (3,), (4,))
        publisher, taker = pair(*leaves)
        whole = torch.arange(12.0)
        given = {("w0",): whole[:6].reshape(2, 3).T, ("w1",): whole[1::4], ("w2",): torch.tensor(2.0).expand(4)}
        publisher.publish(given, 1)
        targets = targets_of(leaves)
        taker.take(targets)
        assert [tensors[0].tolist() for tensors in targets.values()] == [[[0, 3], [1, 4], [2, 5]], [1, 5, 9], [2] * 4]

    def test_targets_that_are_not_contiguous(self):
        publisher, taker = pair(*leaves_of((2, 3)))
        publisher.publish({("w0",): torch.arange(6.0).reshape(2, 3)}, 1)
        whole = torch.full((3, 4), -1.0)
        taker.take({("w0",): [whole[:, ::2].T]})
        assert whole.tolist() == [[0, -1, 3, -1], [1, -1, 4, -1], [2, -1, 5, -1]]

    def test_sources_that_require_grad(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        for version in (1, 2, 3, 4):
            source = torch.nn.Parameter(torch.full((2,), float(version)))
            publisher.publish({("w0",): source * 1}, version)
            publisher.publish({("w0",): source}, version)
            assert taker.take(targets) == version
            assert values_of(targets) == {version}
            assert not targets["w0",][0].requires_grad
            assert source.grad is None

    def test_sources_that_require_grad_are_let_go(self):
        """No graph over all versions grows in the memory."""
        publisher, _ = pair(*leaves_of((2,)))
        source = torch.nn.Parameter(torch.ones(2))
        gone = weakref.ref(source)
        publisher.publish({("w0",): source}, 1)
        del source
        gc.collect()
        assert gone() is None

    def test_targets_that_require_grad(self):
        """Parameters, that is: they stay leaves of no graph."""
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        target = torch.nn.Parameter(torch.zeros(2))
        publisher.publish(constant(leaves, 1), 1)
        taker.take({("w0",): [target]})
        assert target.tolist() == [1, 1]
        assert target.is_leaf
        assert target.requires_grad

    @pytest.mark.parametrize("takers", [1, 7, 100])
    def test_a_pair_is_as_large_as_it_says(self, takers):
        leaves = leaves_of((3,), (), (1000,))
        buffer = np.zeros(buffer_bytes(leaves, takers) + 64, np.uint8)
        buffer[-64:] = 255
        publisher = Publisher(buffer[:-64], leaves, takers)
        taker = Taker(buffer[:-64], leaves, takers, takers - 1)
        for version in (1, 2):
            publisher.publish(constant(leaves, version), version)
            targets = targets_of(leaves)
            taker.take(targets)
            assert values_of(targets) == {version}
        assert (buffer[-64:] == 255).all()


@contextmanager
def in_process(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


SIZES = {
    "few numbers": leaves_of((1,), (3,)),
    "a small net": leaves_of((64, 4), (64,), (64, 64), (64,), (2, 64), (2,)),
    "many tensors": leaves_of(*[(5,)] * 20),
    "a large one": leaves_of((7,), (20_000,), (7,)),
}


def publish_all(publisher, leaves, publishes, halfway=lambda: None):
    """As fast as it can; version k is k in every element. Halfway it calls something."""
    sources = [{leaf.key: torch.empty(leaf.shape) for leaf in leaves} for _ in range(2)]
    for version in range(1, publishes + 1):
        source = sources[version % 2]
        for tensor in source.values():
            tensor.fill_(version)
        publisher.publish(source, version)
        if version == publishes // 2:
            halfway()


@pytest.mark.timeout(60)
class TestWhileItIsPublished:
    """Version k is k in every element: two numbers in one set are two versions."""

    @pytest.mark.parametrize("where", [in_process, in_thread], ids=["process", "thread"])
    @pytest.mark.parametrize("leaves", SIZES.values(), ids=SIZES)
    def test_nothing_that_is_taken_is_torn(self, leaves, where):
        publisher, taker = pair(*leaves)
        publishes = PUBLISHES if where is in_process else PUBLISHES // 10  # threads take turns: slowly, and seldom torn
        targets = targets_of(leaves)
        seen, newest = 0, 0
        deadline = time.monotonic() + 50
        taken = threading.Event()  # or a thread may have published all before this one gets its turn
        halfway = [lambda: taken.wait(50)] if where is in_thread else []
        with where(lambda: publish_all(publisher, leaves, publishes, *halfway)):
            while newest < publishes:
                assert time.monotonic() < deadline, f"only version {newest} came"
                version = taker.take(targets)
                if version is None:
                    continue
                bounds = {bound.item() for tensors in targets.values() for bound in tensors[0].aminmax()}
                assert bounds == {version}
                assert version > newest
                seen, newest = seen + 1, version
                taken.set()
        assert seen >= (5 if where is in_process else 2)

    def test_nor_where_several_take_it(self):
        leaves = SIZES["a small net"]
        takers = 3
        buffer = memory(leaves, takers)
        publisher = Publisher(buffer, leaves, takers)
        wrong = []

        def take(number):
            taker, targets, version = Taker(buffer, leaves, takers, number), targets_of(leaves), 0
            while version != PUBLISHES // 5 and not wrong:
                version = taker.take(targets) or version
                if version and values_of(targets) != {version}:
                    wrong.append((number, version, values_of(targets)))

        threads = [threading.Thread(target=take, args=(number,)) for number in range(takers)]
        with in_process(lambda: publish_all(publisher, leaves, PUBLISHES // 5)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []


class TestATornCopy:
    """The publisher comes in the middle of it."""

    def meddling(self, leaves, times):
        """A publisher that comes in so often; a taker; targets; and which versions came in."""
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        came = [1]

        def meddle():
            if len(came) <= 2 * times:  # two: the second writes where the taker reads
                for _ in range(2):
                    came.append(came[-1] + 1)
                    publisher.publish(constant(leaves, came[-1]), came[-1])

        targets = targets_of(leaves)
        targets["w0",] = [Watched(torch.full(leaves[0].shape, -1.0), meddle)]
        return publisher, taker, targets, came

    @pytest.mark.parametrize("times", [1, 3])
    def test_is_made_again(self, times, monkeypatch):
        monkeypatch.setattr(versioned, "PEACE", 0)
        monkeypatch.setattr(versioned, "SLOWEST", 1e9)
        leaves = leaves_of((2,), (2,))
        _, taker, targets, came = self.meddling(leaves, times)
        assert taker.take(targets) == 1 + 2 * times
        assert len(came) == 1 + 2 * times
        assert values_of(targets) == {1 + 2 * times}
        assert not taker.is_behind()

    def test_what_changed_before_it_was_torn_is_there_again(self, monkeypatch):
        """It may have been copied from a version that was not published yet, and only in parts."""
        monkeypatch.setattr(versioned, "PEACE", 0)
        leaves = leaves_of((2,), (2,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        targets = targets_of(leaves)
        taker.take(targets)
        publisher.publish(constant(leaves, 2), 2)
        left = [3, 4]

        def meddle():
            while left:
                publisher.publish({("w0",): torch.full((2,), float(left[0]))}, left.pop(0))

        targets["w0",] = [Watched(torch.full((2,), 1.0), meddle)]
        assert taker.take(targets) == 4
        assert [tensors[0].tolist() for tensors in targets.values()] == [[4, 4], [2, 2]]

    def test_nothing_stays_of_a_publish_that_failed_meanwhile(self):
        """The taker finds it there as newer; the version that it copies next has had the same since long ago."""
        leaves = leaves_of((2,), (2,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        publisher.publish(constant(leaves, 1), 1)
        taker.take(targets)
        publisher.publish({("w1",): torch.full((2,), 2.0)}, 2)
        in_order = taker._in_order

        def meddle():
            taker._in_order = in_order
            publisher.publish({("w1",): torch.full((2,), 3.0)}, 3)
            with pytest.raises(RuntimeError):
                publisher.publish({("w0",): torch.full((2,), 9.0), ("w1",): torch.ones(4)}, 4)

        taker._in_order = meddle
        assert taker.take(targets) == 3
        assert [tensors[0].tolist() for tensors in targets.values()] == [[1, 1], [3, 3]]

    def test_peace_is_over_when_it_is_made(self):
        leaves = leaves_of((2,), (2,))
        publisher, taker, targets, _ = self.meddling(leaves, 1)
        taker.take(targets)
        assert not publisher._peace.any()


@pytest.mark.timeout(60)
class TestWhoWantsPeace:
    """The word of a taker that was killed is set by hand."""

    def test_and_was_killed_holds_nobody_up_for_long(self):
        leaves = leaves_of((2,))
        buffer = memory(leaves, 2)
        publisher, taker = Publisher(buffer, leaves, 2), Taker(buffer, leaves, 2, 0)
        end = time.monotonic_ns() + 100_000_000
        publisher._peace[1] = end
        publisher.publish(constant(leaves, 1), 1)
        assert time.monotonic_ns() >= end
        assert taker.take(targets_of(leaves)) == 1

    def test_may_want_it_as_long_as_its_copy_takes(self):
        """Else a copy of many bytes would never be whole."""
        sizes = [leaves_of((2,)), leaves_of((25_000_000,))]
        small, large = (Taker(np.zeros(buffer_bytes(leaves), np.uint8), leaves) for leaves in sizes)
        assert large._patience > 2 * small._patience

    def test_and_was_killed_long_ago_holds_nobody_up(self):
        leaves = leaves_of((2,))
        publisher, _ = pair(*leaves)
        publisher._peace[0] = time.monotonic_ns() - 1
        slept = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", slept.append)
            publisher.publish(constant(leaves, 1), 1)
        assert slept == []


class TestCtrlC:
    def test_leaves_no_mix(self):
        leaves = leaves_of((2,), (2,), (2,))
        publisher, taker = pair(*leaves)
        targets = targets_of(leaves)
        targets["w0",] = [Watched(torch.full((2,), -1.0), lambda: signal.raise_signal(signal.SIGINT))]
        publisher.publish(constant(leaves, 1), 1)
        with pytest.raises(KeyboardInterrupt):
            taker.take(targets)
        assert values_of(targets) == {1}
        assert not taker.is_behind()

    def test_nor_where_the_copy_is_torn(self):
        leaves = leaves_of((2,), (2,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        left = [2, 3]

        def meddle():
            signal.raise_signal(signal.SIGINT)
            while left:
                publisher.publish(constant(leaves, left[0]), left.pop(0))

        targets = targets_of(leaves)
        targets["w0",] = [Watched(torch.full((2,), -1.0), meddle)]
        with suppress(KeyboardInterrupt):
            taker.take(targets)
        assert values_of(targets) == {3}
        assert not publisher._peace.any()


class TestATakeThatFails:
    """A target of another shape, say."""

    def test_is_made_good_by_the_next(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        with pytest.raises(RuntimeError):
            taker.take({**targets_of(leaves), ("w1",): [torch.zeros(4)]})
        assert taker.is_behind()
        assert not publisher._peace.any()
        targets = targets_of(leaves)
        assert taker.take(targets) == 1
        assert values_of(targets) == {1}


def test_what_was_broken_off_is_made_good_by_the_next():
    """A Ctrl-C after a copy: the next publish, which does not bring this tensor, has what was published before."""
    leaves = leaves_of((2,), (2,))
    publisher, taker = pair(*leaves)
    publisher.publish(constant(leaves, 1), 1)
    publisher.publish({}, 2)  # both buffers have the first now
    publisher.publish({}, 3)
    here, kept = publisher._tensors[0], publisher._tensors[0]["w0",]
    here["w0",] = Watched(kept, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({("w0",): torch.full((2,), 9.0)}, 4)
    here["w0",] = kept
    publisher.publish({("w1",): torch.full((2,), 5.0)}, 4)
    targets = targets_of(leaves)
    taker.take(targets)
    assert targets["w0",][0].tolist() == [1, 1]
