"""`saving`: what is put to a folder is of one moment, and comes back as it was."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import signal
import time

import pytest
import torch

from rlcollect import ReplayBuffer
from rlcollect.errors import DatasetError, OptionError, SpaceError
from rlcollect.memory.replay import buffer as buffer_module
from rlcollect.memory.replay import saving
from rlcollect.memory.replay.table import leaves_of

from .helpers import batch, folders, full, gaps, lane_values, sealed, torn, values
from .test_shared import started, write

pytestmark = pytest.mark.timeout(60)


def by_folder(tmp_path):
    path = tmp_path / "saved"
    return (lambda buffer: buffer.dumps(path)), (lambda buffer: buffer.loads(path))


def by_state(tmp_path):
    states = []

    def save(buffer):
        file = io.BytesIO()
        torch.save(buffer.state_dict(), file)
        states.append(file)

    def load(buffer):
        states[-1].seek(0)
        buffer.load_state_dict(torch.load(states[-1], weights_only=True))

    return save, load


WAYS = pytest.mark.parametrize("way", [by_folder, by_state])


class TestRoundTrip:
    @WAYS
    @pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])
    def test_frames_count_and_draws_go_on(self, way, storage, tmp_path):
        """In another buffer it is as if it had been that one."""
        save, load = way(tmp_path)
        with full(seed=1) as one, ReplayBuffer(40, storage=storage, seed=2) as other:
            one.extend(batch(4, 3, start=10))
            one.sample(10)
            save(one)
            load(other)
            assert values(other) == values(one)
            assert (len(other), other.write_count) == (40, 52)
            assert other.sample(20)["value"].tolist() == one.sample(20)["value"].tolist()
            for buffer in (one, other):
                buffer.extend(batch(4, 3, start=13))
            assert values(other) == values(one)

    @WAYS
    @pytest.mark.parametrize("capacity", [12, 20, 100])
    def test_another_capacity_keeps_the_newest_of_each_lane(self, way, capacity, tmp_path):
        """As many as there is room for."""
        save, load = way(tmp_path)
        save(full())
        other = ReplayBuffer(capacity)
        load(other)
        kept = min(10, capacity // 4)
        assert lane_values(other) == {lane: [*range(10 - kept, 10)] for lane in range(4)}
        assert other.write_count == 40

    @WAYS
    def test_lanes_that_were_unequally_far_are_again(self, way, tmp_path):
        """And others may come to have it."""
        save, load = way(tmp_path)
        one, other = ReplayBuffer(30), ReplayBuffer(30)
        one.extend(batch(3, 4, mask=[[True] * 4, [False] * 4, [True, True, False, False]]))
        save(one)
        load(other)
        assert lane_values(other) == {0: [0, 1, 2, 3], 2: [0, 1]}
        other.claim(other.leaves, 2)
        assert sorted(values(other)) == sorted(values(one))

    @WAYS
    def test_slices_are_found_in_it(self, way, tmp_path):
        """Frames know their trajectories as before."""
        save, load = way(tmp_path)
        one = full(sampler="slice", slice_len=3, batch_size=300)
        one.extend(batch(4, 3, start=10, ends=(0,)))
        save(one)
        other = ReplayBuffer(60, sampler="slice", slice_len=3, batch_size=300)
        load(other)
        rows = other.sample()["value"]
        assert (rows.diff(dim=1) == 1).all()
        assert {*(rows[:, 0] % 1000).tolist()} == {3, 4, 5, 6, 7, 8}

    @WAYS
    def test_it_takes_the_place_of_what_was_there(self, way, tmp_path):
        """Whatever lanes that had."""
        save, load = way(tmp_path)
        save(full())
        other = ReplayBuffer(40)
        other.extend(batch(8, 5, start=500))
        load(other)
        assert lane_values(other) == {lane: [*range(10)] for lane in range(4)}

    def test_an_empty_state_empties(self):
        """A buffer that nothing was written to has a state too."""
        state = ReplayBuffer(40, seed=1).state_dict()
        buffer = full()
        buffer.load_state_dict(state)
        assert len(buffer) == 0

    @WAYS
    def test_other_frames_are_refused(self, way, tmp_path):
        """By their key; what is there stays."""
        save, load = way(tmp_path)
        save(full())
        other = ReplayBuffer(40)
        other.extend(batch(width=3))
        with pytest.raises(SpaceError, match="'observation'"):
            load(other)
        assert len(other) == 40

    def test_what_is_no_state_is_refused(self):
        with pytest.raises(OptionError, match="lacks 'frames'"):
            full().load_state_dict({"leaves": []})


class TestFolder:
    def test_another_time_takes_the_place_of_the_first(self, tmp_path):
        """Nothing else is left in the folder."""
        buffer = full()
        for start in (10, 20, 30):
            buffer.dumps(tmp_path / "here")
            buffer.extend(batch(start=start))
        assert len(folders(tmp_path / "here")) == 2
        assert folders(tmp_path) == ["here"]
        other = ReplayBuffer(40)
        other.loads(str(tmp_path / "here"))
        assert lane_values(other) == {lane: [*range(20, 30)] for lane in range(4)}

    def test_what_somebody_else_put_there_is_left_alone(self, tmp_path):
        """Files, and folders with something in them."""
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "precious").write_text("x")
        (tmp_path / "file").write_text("x")
        for name in ("mine", "file"):
            with pytest.raises(DatasetError, match="left alone"):
                full().dumps(tmp_path / name)
        assert folders(tmp_path / "mine") == ["precious"]

    def test_what_is_not_there_or_not_whole_is_refused(self, tmp_path):
        """No folder, no notes of ours, frames that lack."""
        with pytest.raises(DatasetError, match="holds nothing"):
            full().loads(tmp_path)
        full().dumps(tmp_path / "here")
        (frames,) = [each for each in (tmp_path / "here").iterdir() if each.is_dir()]
        (frames / "0.memmap").write_bytes(b"short")
        with pytest.raises(DatasetError, match="5 bytes"):
            full().loads(tmp_path / "here")
        (tmp_path / "here" / "replay.json").write_text("[]")
        with pytest.raises(DatasetError, match="holds nothing"):
            full().loads(tmp_path / "here")

    def test_nothing_written_is_nothing_to_save(self, tmp_path):
        with pytest.raises(OptionError, match="nothing to save"):
            ReplayBuffer(3).dumps(tmp_path / "here")

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
    def test_broken_off_it_leaves_what_was_saved_before(self, tmp_path, monkeypatch, error):
        """And nothing of its own."""
        buffer = full()
        buffer.dumps(tmp_path / "here")
        before = folders(tmp_path / "here")
        buffer.extend(batch(start=10))
        monkeypatch.setattr(saving, "copy_rows", raising(error))
        for name in ("here", "new"):
            with pytest.raises(DatasetError if error is OSError else error):
                buffer.dumps(tmp_path / name)
        assert folders(tmp_path) == ["here"]
        assert folders(tmp_path / "here") == before
        other = ReplayBuffer(40)
        other.loads(tmp_path / "here")
        assert lane_values(other)[0] == [*range(10)]

    def test_killed_at_any_time_it_leaves_one_of_both(self, tmp_path):
        """The one before, or its own: whole, and it can be saved over."""
        for turn in range(30):
            with started(save_for_ever, tmp_path / "here") as process:
                while not (tmp_path / "here" / "replay.json").exists():
                    time.sleep(0.001)
                time.sleep(0.002 * turn)
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            other = ReplayBuffer(64)
            other.loads(tmp_path / "here")
            frames = other.frames()
            assert len(frames) == 64
            assert torn(frames) == gaps(frames) == 0
        other.dumps(tmp_path / "here")
        assert len(folders(tmp_path / "here")) == 2

    def test_a_full_disk_is_an_error_with_the_bytes_that_are_needed(self, tmp_path):
        """What was there before stays."""
        here, there = multiprocessing.Pipe()
        full().dumps(tmp_path / "here")
        with started(save_too_much, tmp_path / "here", there):
            text = here.recv()
        assert "64 frames need 26" in text
        other = ReplayBuffer(40)
        other.loads(tmp_path / "here")
        assert len(other) == 40
        assert len(folders(tmp_path / "here")) == 2


def raising(error):
    def call(*args):
        raise error

    return call


def save_for_ever(path):
    buffer = ReplayBuffer(64)
    start = 0
    while True:
        buffer.extend(sealed(1, 64, start=start))
        buffer.dumps(path)
        start += 64


def save_too_much(path, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    buffer = ReplayBuffer(64)
    buffer.extend(sealed(1, 64))
    try:
        buffer.dumps(path)
    except DatasetError as error:
        pipe.send(str(error))


def turned_round(buffer):
    """Waits until the writer has written over some of what is there."""
    count, until = buffer.write_count, time.monotonic() + 20
    while buffer.write_count < count + 450 and time.monotonic() < until:
        time.sleep(0.001)


class TestMoment:
    """Collection goes on while the buffer is saved."""

    @pytest.mark.parametrize("storage", ["shared", pytest.param("memmap", marks=pytest.mark.slow)])
    def test_what_is_saved_is_of_one_moment(self, storage, tmp_path):
        """As many frames as the notes say, none torn, each lane's without a gap; the writer goes on afterwards."""
        with ReplayBuffer(2 * 200, storage=storage) as buffer:
            claim = buffer.claim(leaves_of(sealed(1, 1)), 2)
            share, fds = claim.share(0, 2)
            with started(write, share, fds, 0, 0, 60):
                while len(buffer) < 250:
                    time.sleep(0.001)
                for _ in range(20):
                    buffer.dumps(tmp_path / "here")
                    count = buffer.write_count
                    notes = json.loads((tmp_path / "here" / "replay.json").read_text())
                    other = ReplayBuffer(400)
                    other.loads(tmp_path / "here")
                    frames = other.frames()
                    assert len(frames) == sum(notes["counts"]) == notes["frames"] >= 250
                    assert torn(frames) == gaps(frames) == 0
                    assert other.write_count == notes["written"] <= count
                    until = time.monotonic() + 5
                    while buffer.write_count == count and time.monotonic() < until:
                        time.sleep(0.001)
                    assert buffer.write_count > count

    @WAYS
    def test_after_its_time_a_writer_goes_on_and_what_it_wrote_over_is_left_out(self, way, tmp_path, monkeypatch):
        """With a warning that says how many; what is left has no gap and is not torn."""
        save, load = way(tmp_path)
        with ReplayBuffer(2 * 200, storage="shared") as buffer:
            claim = buffer.claim(leaves_of(sealed(1, 1)), 2)
            share, fds = claim.share(0, 2)
            copy = saving.copy_rows
            monkeypatch.setattr(saving, "copy_rows", lambda *args: [turned_round(buffer), copy(*args)])
            monkeypatch.setattr(buffer_module, "HOLD", 1e-9)
            with started(write, share, fds, 0, 0, 60):
                while len(buffer) < 300:
                    time.sleep(0.001)
                if way is by_folder:
                    before = buffer.write_count
                    with pytest.warns(UserWarning, match=r"of \d+ frames were written over"):
                        buffer.dumps(tmp_path / "saved", hold=0.2)
                    assert buffer.write_count > before + 400
                else:
                    take = buffer._view[1].take
                    monkeypatch.setattr(buffer._view[1], "take", lambda rows: [turned_round(buffer), take(rows)][1])
                    with pytest.warns(UserWarning, match=r"of \d+ frames were written over"):
                        save(buffer)
            other = ReplayBuffer(400)
            load(other)
            if len(other):
                assert torn(other.frames()) == gaps(other.frames()) == 0
            assert len(other) < 300

    def test_a_writer_waits_as_long_as_frames_are_held_and_no_longer(self, tmp_path, monkeypatch):
        """It writes nothing over meanwhile, though it would."""
        with ReplayBuffer(2 * 200, storage="shared") as buffer:
            claim = buffer.claim(leaves_of(sealed(1, 1)), 2)
            share, fds = claim.share(0, 2)
            counts = []
            copy = saving.copy_rows

            def slowly(*args):
                time.sleep(0.1)
                counts.append(buffer.write_count)
                time.sleep(0.3)
                counts.append(buffer.write_count)
                copy(*args)

            monkeypatch.setattr(saving, "copy_rows", slowly)
            with started(write, share, fds, 0, 0, 60):
                while buffer.write_count < 1000:
                    time.sleep(0.001)
                buffer.dumps(tmp_path / "here", hold=30)
                assert counts[0] == counts[1]
                until = time.monotonic() + 5
                while buffer.write_count == counts[1] and time.monotonic() < until:
                    time.sleep(0.001)
                assert buffer.write_count > counts[1]
