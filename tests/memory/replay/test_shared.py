"""Buffers that several processes have: who reads gets whole frames, who is killed loses what was not committed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import time
from contextlib import contextmanager
from multiprocessing.reduction import DupFd

import pytest
import torch

from rlcollect import ReplayBuffer
from rlcollect.errors import OptionError
from rlcollect.memory.replay.reading import ReplayReader
from rlcollect.memory.replay.table import columns_of, leaves_of
from rlcollect.memory.replay.writing import Pieces

from .helpers import batch, descriptors, full, gaps, lane_values, sealed, torn

METHODS = pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)
LEAVES = leaves_of(sealed(1, 1))
pytestmark = pytest.mark.timeout(120)


def tell(reader, pipe):
    """What a process finds in a buffer that came to it."""
    sample = reader.sample(50)
    extend = getattr(reader, "extend", None)
    refused = None
    if extend is not None:
        try:
            extend(batch())
        except OptionError as error:
            refused = str(error)
    pipe.send((type(reader).__name__, len(reader), lane_values(reader), sample["value"].tolist(), refused))
    pipe.close()


def tell_of_queue(queue, pipe):
    tell(queue.get(), pipe)


def follow(queue, pipe):
    """Says how many frames there are, whenever it is asked."""
    reader = queue.get()
    while pipe.recv():
        pipe.send((len(reader), lane_values(reader), len(reader.sample(7))))


def write(share, passed, lane, generation, seconds):
    """Writes as fast as it can, until it is killed, or for so long."""
    fds = [each.detach() if hasattr(each, "detach") else os.dup(each) for each in passed]
    writer = share.open(fds)
    steps = random.Random(f"{lane} {generation}").choice([1, 3, 8])
    step, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        frames = sealed(share.lanes, steps, lane=lane, start=(generation << 20) + step)
        writer.write(columns_of(frames, LEAVES), steps)
        step += steps


def with_one_thread(target, *args):
    """Torch's other threads are not in a fork: what waits for them does so for good."""
    torch.set_num_threads(1)
    target(*args)


@contextmanager
def started(target, *args, method="fork"):
    process = multiprocessing.get_context(method).Process(target=with_one_thread, args=(target, *args))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


class TestArrival:
    @METHODS
    def test_another_process_reads_what_is_written(self, method):
        """As an argument, by every start method; what it writes to a copy that was forked is refused."""
        with full(storage="shared", seed=0) as buffer:
            here, there = multiprocessing.Pipe()
            with started(tell, buffer, there, method=method):
                name, length, lanes, sample, refused = here.recv()
            assert (length, lanes) == (40, {lane: [*range(10)] for lane in range(4)})
            assert {*sample} <= {*buffer.frames()["value"].tolist()}
            assert name == "ReplayBuffer" and "fork" in refused if method == "fork" else name == "ReplayReader"
            assert sample != buffer.sample(50)["value"].tolist()

    @METHODS
    def test_it_goes_through_a_queue(self, method):
        """Which sends it to whoever asks."""
        context = multiprocessing.get_context(method)
        with full(storage="shared") as buffer:
            queue = context.Queue()
            here, there = context.Pipe()
            with started(tell_of_queue, queue, there, method=method):
                queue.put(buffer)
                name, length, *_ = here.recv()
            queue.close()
            queue.join_thread()
            assert (name, length) == ("ReplayReader", 40)

    @pytest.mark.slow
    def test_files_are_read_elsewhere_too(self):
        """Those of a folder without a name are its owner's to remove."""
        with full(storage="memmap") as buffer:
            here, there = multiprocessing.Pipe()
            with started(tell, buffer, there, method="spawn"):
                name, length, lanes, *_ = here.recv()
            assert (name, length, len(lanes)) == ("ReplayReader", 40, 4)
            assert len(buffer.frames()) == 40

    @pytest.mark.slow
    def test_a_reader_is_passed_on(self):
        """From a process that it was passed to."""
        with full(storage="shared") as buffer:
            rebuild, (opening, _, settings) = buffer.__reduce__()
            fds = [DupFd(os.dup(fd)) for fd in buffer._place.opening()[1]]
            with rebuild(opening, fds, settings) as reader:
                here, there = multiprocessing.Pipe()
                with started(tell, reader, there, method="spawn"):
                    assert here.recv()[:2] == ("ReplayReader", 40)
                assert isinstance(reader, ReplayReader)

    def test_each_has_draws_of_its_own_and_the_same_ones_in_every_run(self):
        """And those of the buffer go on as if nobody else had any."""

        def drawn(passed):
            samples = []
            with full(storage="shared", seed=3) as buffer:
                for _ in range(passed):
                    here, there = multiprocessing.Pipe()
                    with started(tell, buffer, there):
                        samples.append(here.recv()[3])
                return [*samples, buffer.sample(50)["value"].tolist()]

        one, other = drawn(2), drawn(2)
        assert one == other
        assert one[0] != one[1] != one[2]
        assert drawn(0) == one[2:]

    def test_what_cannot_be_shared_says_how_it_could(self):
        """Memory of one process; and memory that is not there yet."""
        with pytest.raises(OptionError, match=r'storage="shared".*share\(\)'):
            pickle.dumps(full())
        with ReplayBuffer(4, storage="shared") as buffer, pytest.raises(OptionError, match=r"init\(frame\)"):
            pickle.dumps(buffer)

    @METHODS
    @pytest.mark.parametrize("storage", [pytest.param("shared", marks=pytest.mark.slow), "memmap"])
    def test_readers_follow_when_it_is_divided_anew(self, storage, method):
        """Also to other files, and more than once."""
        context = multiprocessing.get_context(method)
        with full(storage=storage) as buffer:
            queue = context.Queue()
            here, there = context.Pipe()
            with started(follow, queue, there, method=method):
                queue.put(buffer)
                for lanes in (4, 2, 8):
                    buffer.claim(buffer.leaves, lanes).let_go()
                    here.send(True)
                    length, found, _ = here.recv()
                    assert length == 40
                    assert {lane: sorted(found[lane]) for lane in found} == {lane: [*range(10)] for lane in range(4)}
                here.send(False)
            queue.close()
            queue.join_thread()

    @pytest.mark.slow
    def test_no_descriptor_is_left(self):
        """Of what was passed, here."""
        descriptors()
        with full(storage="shared") as buffer:
            before = descriptors()
            for method in ("spawn", "fork"):
                here, there = multiprocessing.Pipe()
                with started(tell, buffer, there, method=method):
                    here.recv()
                here.close()
                there.close()
            assert descriptors() <= before + 1  # the resource tracker's


class TestWriters:
    @pytest.mark.parametrize("storage", ["shared", "memmap"])
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_another_process_writes(self, storage, method):
        """To the lanes that it has, by a descriptor."""
        with ReplayBuffer(200, storage=storage) as buffer:
            claim = buffer.claim(LEAVES, 4)
            share, fds = claim.share(2, 2)
            context = multiprocessing.get_context(method)
            process = context.Process(target=write, args=(share, Descriptors(fds), 2, 0, 0.3))
            process.start()
            process.join()
            assert process.exitcode == 0
            frames = buffer.frames()
            assert {*(frames["number"] >> 40).tolist()} == {2, 3}
            assert torn(frames) == gaps(frames) == 0
            claim.let_go()

    @pytest.mark.parametrize(
        ("storage", "kills"),
        [("shared", 20), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("shared", 100), ("memmap", 20)))],
    )
    def test_writers_killed_at_any_time_leave_whole_frames(self, storage, kills):
        """Two of them, again and again, while samples are drawn: none is torn, and each ring goes on where it was."""
        chance = random.Random(0)
        with ReplayBuffer(4 * 48, storage=storage, seed=0, sampler="slice", slice_len=4) as buffer:
            claim = buffer.claim(LEAVES, 4)
            context = multiprocessing.get_context("fork")
            shares = [claim.share(lane, 2) for lane in (0, 2)]

            def start(which, generation):
                process = context.Process(target=write, args=(*shares[which], 2 * which, generation, 60))
                process.start()
                return process

            writers = [start(which, 0) for which in range(2)]
            sampled, before, seen = 0, 0, set()
            try:
                for kill in range(1, kills + 1):
                    until = time.monotonic() + chance.uniform(0.0, 0.1)
                    while time.monotonic() < until or buffer.write_count == before:
                        if len(buffer) > 50:
                            sample = buffer.sample(64)
                            assert torn(sample.reshape(-1)) == 0
                            assert (sample["number"].diff(dim=1) == 1).all()
                            sampled += 1
                    which = kill % 2
                    os.kill(writers[which].pid, signal.SIGKILL)
                    writers[which].join()
                    writers[which].close()
                    before = buffer.write_count
                    seen |= check_lanes(buffer.frames())
                    writers[which] = start(which, kill)
            finally:
                for writer in writers:
                    writer.kill()
                    writer.join()
            assert len(buffer) >= 4 * 48 * 3 // 4
            assert sampled > kills
            assert len(seen) > kills // 2

    def test_what_was_committed_stays_and_the_next_one_goes_on(self):
        """In the same ring: frames of the one that was killed stand before its own."""
        with ReplayBuffer(2000, storage="shared") as buffer:
            claim = buffer.claim(LEAVES, 1)
            share, fds = claim.share(0, 1)
            found = []
            for generation in range(3):
                with started(write, share, fds, 0, generation, 60) as process:
                    count = buffer.write_count
                    while buffer.write_count < count + 50:
                        time.sleep(0.001)
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()
                numbers = buffer.frames()["number"].tolist()
                assert numbers[: len(found)] == found
                assert [number >> 20 for number in numbers[len(found) :]] == [generation] * (len(numbers) - len(found))
                assert [number & 0xFFFFF for number in numbers[len(found) :]] == [*range(len(numbers) - len(found))]
                found = numbers


def check_lanes(frames):
    """Frames of each lane follow each other, or begin with the first of another writer; which writers those are."""
    assert torn(frames) == 0
    number = frames["number"]
    lane, generation, step = number >> 40, number >> 20 & 0xFFFFF, number & 0xFFFFF
    same = lane[1:] == lane[:-1]
    goes_on = generation[1:] == generation[:-1]
    assert (number.diff()[same & goes_on] == 1).all()
    assert (generation.diff()[same] >= 0).all()
    assert (step[1:][same & ~goes_on] == 0).all()
    return {*generation.tolist()}


class Descriptors(list):
    """Passed to a process, they are descriptors there."""

    def __reduce__(self):
        return list, ([DupFd(fd) for fd in self],)


class TestClaims:
    def test_frames_that_are_there_stay_when_others_are_to_write(self):
        """Divided for another number of lanes it keeps its 40 frames, whole trajectories together."""
        with ReplayBuffer(90) as buffer:
            buffer.extend(batch(3, 10, ids=[1, 2, 3]))
            buffer.extend(batch(1, 10, ids=[4], start=3000))
            claim = buffer.claim(buffer.leaves, 3)
            assert len(buffer) == buffer.write_count == 40
            frames = buffer.frames()
            assert gaps_of_values(frames) == 0
            for lane in range(3):
                claim.writer(lane, 1).write(columns_of(batch(1, 2, start=5000 + 100 * lane), buffer.leaves), 2)
            assert len(buffer) == 46
            assert {value for value in buffer.frames()["value"].tolist() if value < 5000} == {
                1000 * lane + step for lane in range(4) for step in range(10)
            }

    def test_one_that_is_extended_beside_a_claim_has_rings_of_its_own(self):
        """With spare_lanes; without, it says so."""
        with ReplayBuffer(60, spare_lanes=1) as buffer, ReplayBuffer(60) as other:
            claim = buffer.claim(leaves_of(batch()), 2)
            buffer.extend(batch(3, 4))
            writer = claim.writer(0, 2)
            writer.write(columns_of(batch(2, 30, start=100), buffer.leaves), 30)
            assert {lane: len(found) for lane, found in lane_values(buffer).items()} == {0: 24, 1: 24, 2: 4}
            other.claim(leaves_of(batch()), 2)
            with pytest.raises(OptionError, match="spare_lanes=1"):
                other.extend(batch(3, 4))

    def test_a_second_one_needs_spare_lanes(self):
        """Of any number of lanes that there are."""
        leaves = leaves_of(batch())
        with ReplayBuffer(60, spare_lanes=3) as buffer:
            first = buffer.claim(leaves, 2)
            second = buffer.claim(leaves, 2)
            with pytest.raises(OptionError, match="spare_lanes=2"):
                buffer.claim(leaves, 2)
            third = buffer.claim(leaves, 1)
            assert first.lanes + second.lanes + third.lanes == 5
            second.let_go()
            second.let_go()
            buffer.claim(leaves, 2)

    def test_it_is_divided_anew_when_nobody_has_it(self):
        """By the next one who asks, for its lanes; frames stay."""
        with full() as buffer:
            for lanes in (4, 2, 8, 1):
                claim = buffer.claim(buffer.leaves, lanes)
                claim.let_go()
                assert sorted(buffer.frames()["value"].tolist()) == sorted(full().frames()["value"].tolist())

    def test_trajectories_of_two_owners_are_two(self):
        """Though both count them from 0: no slice is of both."""
        with ReplayBuffer(60, sampler="slice", slice_len=3, batch_size=60, seed=0) as buffer:
            for start in (0, 100):
                claim = buffer.claim(leaves_of(batch()), 2)
                claim.writer(0, 2).write(columns_of(batch(2, 4, start=start), buffer.leaves), 4)
                claim.let_go()
            assert lane_values(buffer) == {lane: [0, 1, 2, 3, 100, 101, 102, 103] for lane in range(2)}
            for _ in range(20):
                assert (buffer.sample()["value"].diff(dim=1) == 1).all()

    def test_dealt_trajectories_go_where_least_was_written(self):
        """Three of 4, 2 and 3 frames among two rings."""
        with ReplayBuffer(40) as buffer:
            claim = buffer.claim(leaves_of(batch()), 2)
            data = batch(1, 9, ends=(3, 5))
            claim.deal(Pieces.of(columns_of(data, buffer.leaves)))
            assert buffer.frames()["value"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
            assert buffer._cursors.moment().counts.tolist() == [4, 5]

    def test_who_writes_to_it_keeps_it_from_being_loaded_or_moved(self):
        """Until it is let go of."""
        with full() as buffer:
            state = buffer.state_dict()
            claim = buffer.claim(buffer.leaves, 4)
            for call in (buffer.share, lambda: buffer.load_state_dict(state)):
                with pytest.raises(OptionError, match="collector writes"):
                    call()
            claim.let_go()
            buffer.load_state_dict(state)
            buffer.share()


def gaps_of_values(frames):
    value, ids = frames["value"], frames["collector", "traj_ids"]
    return int(((ids[1:] == ids[:-1]) & (value.diff() != 1)).sum())
