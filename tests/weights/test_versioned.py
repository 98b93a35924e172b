"""`versioned`: what is published is taken whole, with its version, or not at all."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rlcollect.layout import Leaf
from rlcollect.processes.arena import Arena
from rlcollect.weights.versioned import Publisher, Taker, buffer_bytes

PUBLISHES = 10_000


def leaves_of(*shapes, dtype=torch.float32):
    return [Leaf((f"w{place}",), shape, dtype) for place, shape in enumerate(shapes)]


def memory(leaves):
    arena = Arena(buffer_bytes(leaves))
    arena.close()
    return arena.buffer


def pair(*leaves):
    buffer = memory(leaves)
    return Publisher(buffer, leaves), Taker(buffer, leaves)


def constant(leaves, value):
    return {leaf.key: torch.full(leaf.shape, value).to(leaf.dtype) for leaf in leaves}


class TestTaking:
    def test_what_was_published(self):
        leaves = leaves_of((2,), (2, 3))
        publisher, taker = pair(*leaves)
        given = {("w0",): torch.tensor([1.0, 2.0]), ("w1",): torch.arange(6.0).reshape(2, 3)}
        publisher.publish(given, 7)
        version, taken = taker.take()
        assert version == 7
        assert taken.keys() == given.keys()
        assert all(torch.equal(taken[key], given[key]) for key in given)

    def test_nothing_before_the_first(self):
        _, taker = pair(*leaves_of((2,)))
        assert not taker.is_behind()
        assert taker.take() is None

    def test_nothing_newer(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        assert taker.is_behind()
        assert taker.take() is not None
        assert not taker.is_behind()
        assert taker.take() is None

    def test_the_newest_of_several(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        for version in range(1, 6):
            publisher.publish(constant(leaves, version * 10), version)
        version, taken = taker.take()
        assert version == 5
        assert [tensor.tolist() for tensor in taken.values()] == [[50.0] * 2, [50.0] * 3]
        assert taker.take() is None

    def test_one_after_the_other(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        for version in range(1, 8):
            publisher.publish(constant(leaves, -version), version)
            came, taken = taker.take()
            assert (came, taken["w0",].tolist()) == (version, [-version] * 2)

    def test_versions_are_the_callers(self):
        """A pair may be addressed with some versions and not with others, and a state that was loaded goes back."""
        leaves = leaves_of((1,))
        publisher, taker = pair(*leaves)
        for version in (3, 17, 4, 2**40, 0):
            publisher.publish(constant(leaves, 1), version)
            assert taker.take()[0] == version

    def test_several_takers(self):
        leaves = leaves_of((4,))
        buffer = memory(leaves)
        publisher, takers = Publisher(buffer, leaves), [Taker(buffer, leaves) for _ in range(3)]
        publisher.publish(constant(leaves, 1), 1)
        assert takers[0].take()[0] == 1
        publisher.publish(constant(leaves, 2), 2)
        for taker in takers:
            version, taken = taker.take()
            assert (version, taken["w0",].tolist()) == (2, [2.0] * 4)
            assert taker.take() is None

    def test_what_was_taken_stays_until_the_next(self):
        leaves = leaves_of((4,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        _, taken = taker.take()
        for version in (2, 3, 4):
            publisher.publish(constant(leaves, version), version)
        assert taken["w0",].tolist() == [1.0] * 4

    def test_what_is_published_is_a_copy(self):
        leaves = leaves_of((4,))
        publisher, taker = pair(*leaves)
        given = constant(leaves, 1)
        publisher.publish(given, 1)
        given["w0",].fill_(9)
        assert taker.take()[1]["w0",].tolist() == [1.0] * 4

    def test_two_pairs_have_nothing_in_common(self):
        leaves = leaves_of((2,))
        (one, taker), (_, other) = pair(*leaves), pair(*leaves)
        one.publish(constant(leaves, 1), 1)
        assert other.take() is None
        assert taker.take() is not None

    def test_what_is_not_given_stays_as_it_was(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        publisher.publish({("w0",): torch.ones(2)}, 1)
        assert list(taker.take()[1]) == [("w0",)]
        publisher.publish({("w1",): torch.full((3,), 2.0)}, 2)
        publisher.publish({("w1",): torch.full((3,), 3.0)}, 3)
        version, taken = taker.take()
        assert version == 3
        assert [tensor.tolist() for tensor in taken.values()] == [[1.0] * 2, [3.0] * 3]

    def test_a_publish_that_fails_is_none(self):
        leaves = leaves_of((2,), (3,))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 1), 1)
        with pytest.raises(RuntimeError):
            publisher.publish({("w0",): torch.full((2,), 5.0), ("w1",): torch.ones(4)}, 2)
        version, taken = taker.take()
        assert version == 1
        assert {value for tensor in taken.values() for value in tensor.tolist()} == {1.0}
        publisher.publish(constant(leaves, 3), 2)
        assert taker.take()[0] == 2


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
        publisher.publish(given, 1)
        _, taken = taker.take()
        assert all(torch.equal(taken[key], given[key]) and taken[key].dtype == given[key].dtype for key in given)

    def test_large_integers_are_exact(self):
        publisher, taker = pair(Leaf(("n",), (2,), torch.int64))
        publisher.publish({("n",): torch.tensor([2**62 + 1, -(2**53) - 1])}, 1)
        assert taker.take()[1]["n",].tolist() == [2**62 + 1, -(2**53) - 1]

    def test_dtypes_are_converted(self):
        publisher, taker = pair(*leaves_of((2,)))
        publisher.publish({("w0",): torch.tensor([1, 2])}, 1)
        _, taken = taker.take()
        assert taken["w0",].dtype == torch.float32
        assert taken["w0",].tolist() == [1.0, 2.0]

    def test_none_at_all(self):
        publisher, taker = pair()
        assert taker.take() is None
        publisher.publish({}, 1)
        assert taker.is_behind()
        assert taker.take() == (1, {})
        assert taker.take() is None
        publisher.publish({}, 2)
        assert taker.take() == (2, {})

    def test_scalars(self):
        publisher, taker = pair(*leaves_of((), (), dtype=torch.int64))
        publisher.publish({("w0",): torch.tensor(3), ("w1",): torch.tensor(4)}, 1)
        _, taken = taker.take()
        assert {key: (tensor.shape, tensor.item()) for key, tensor in taken.items()} == {
            ("w0",): (torch.Size([]), 3),
            ("w1",): (torch.Size([]), 4),
        }

    def test_tensors_without_elements(self):
        leaves = leaves_of((0,), (2,), (3, 0))
        publisher, taker = pair(*leaves)
        publisher.publish(constant(leaves, 4), 1)
        _, taken = taker.take()
        assert [tuple(tensor.shape) for tensor in taken.values()] == [(0,), (2,), (3, 0)]
        assert taken["w1",].tolist() == [4.0, 4.0]

    def test_sources_that_are_not_contiguous(self):
        leaves = leaves_of((3, 2), (3,), (4,))
        publisher, taker = pair(*leaves)
        whole = torch.arange(12.0)
        given = {("w0",): whole[:6].reshape(2, 3).T, ("w1",): whole[1::4], ("w2",): torch.tensor(2.0).expand(4)}
        publisher.publish(given, 1)
        _, taken = taker.take()
        assert taken["w0",].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert taken["w1",].tolist() == [1, 5, 9]
        assert taken["w2",].tolist() == [2] * 4

    def test_sources_that_require_grad(self):
        leaves = leaves_of((2,))
        publisher, taker = pair(*leaves)
        for version in (1, 2, 3, 4):
            source = torch.nn.Parameter(torch.full((2,), float(version)))
            publisher.publish({("w0",): source * 1}, version)
            publisher.publish({("w0",): source}, version)
            came, taken = taker.take()
            assert (came, taken["w0",].tolist()) == (version, [version] * 2)
            assert not taken["w0",].requires_grad
            assert source.grad is None

    def test_sources_that_require_grad_are_let_go(self):
        """No graph over all versions grows in the memory."""
        leaves = leaves_of((2,))
        publisher, _ = pair(*leaves)
        source = torch.nn.Parameter(torch.ones(2))
        gone = weakref.ref(source)
        publisher.publish({("w0",): source}, 1)
        del source
        gc.collect()
        assert gone() is None

    def test_a_pair_is_as_large_as_it_says(self):
        leaves = leaves_of((3,), (), (1000,))
        buffer = np.zeros(buffer_bytes(leaves) + 64, np.uint8)
        buffer[-64:] = 255
        publisher, taker = Publisher(buffer[:-64], leaves), Taker(buffer[:-64], leaves)
        for version in (1, 2):
            publisher.publish(constant(leaves, version), version)
            assert all((tensor == version).all() for tensor in taker.take()[1].values())
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


@pytest.mark.timeout(60)
class TestWhileItIsPublished:
    """Version k is k in every element: two numbers in one set are two versions."""

    @pytest.mark.parametrize("where", [in_process, in_thread], ids=["process", "thread"])
    @pytest.mark.parametrize("leaves", SIZES.values(), ids=SIZES)
    def test_nothing_that_is_taken_is_torn(self, leaves, where):
        publisher, taker = pair(*leaves)
        publishes = PUBLISHES if where is in_process else PUBLISHES // 10  # threads take turns: slowly, and seldom torn
        sources = [{leaf.key: torch.empty(leaf.shape) for leaf in leaves} for _ in range(2)]

        def publish():
            for version in range(1, publishes + 1):
                source = sources[version % 2]
                for tensor in source.values():
                    tensor.fill_(version)
                publisher.publish(source, version)

        seen, newest = 0, 0
        deadline = time.monotonic() + 50
        with where(publish):
            while newest < publishes:
                assert time.monotonic() < deadline, f"only version {newest} came"
                taken = taker.take()
                if taken is None:
                    continue
                version, tensors = taken
                bounds = {bound.item() for tensor in tensors.values() for bound in tensor.aminmax()}
                assert bounds == {version}
                assert version > newest
                seen, newest = seen + 1, version
        assert seen >= (5 if where is in_process else 2)

    def test_what_is_torn_is_not_taken(self):
        """The publisher comes in the middle of every try: nothing is taken, and nothing is lost."""
        leaves = leaves_of((2,), (2,))
        buffer = memory(leaves)
        publisher, taker = Publisher(buffer, leaves), Taker(buffer, leaves)
        publisher.publish(constant(leaves, 1), 1)
        assert taker.take()[0] == 1
        publisher.publish(constant(leaves, 2), 2)
        versions = iter(range(3, 100))

        class Meddling(dict):
            def items(self):
                for key, tensor in super().items():
                    yield key, tensor
                    version = next(versions)
                    publisher.publish(constant(leaves, version), version)

        taker._tensors = [Meddling(tensors) for tensors in taker._tensors]
        assert taker.take() is None
        assert taker.is_behind()
        taker._tensors = [dict(tensors) for tensors in taker._tensors]
        version, taken = taker.take()
        assert version == next(versions) - 1
        assert {value for tensor in taken.values() for value in tensor.tolist()} == {float(version)}
