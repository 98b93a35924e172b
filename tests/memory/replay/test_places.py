"""`places` and `files`: where frames lie, what is left of them, and what there has to be room for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import torch

from rlcollect import ReplayBuffer
from rlcollect.errors import DatasetError, SharedMemoryError, SpaceError
from rlcollect.layout import Leaf
from rlcollect.memory.replay import files, rows
from rlcollect.memory.replay.places import as_leaves, told_leaves
from tests.workers.fault_helpers import segments, without_those_of_others

from .helpers import batch, folders, full, lane_values, sealed, torn, values
from .test_shared import started

pytestmark = pytest.mark.timeout(60)


def write_for_ever(path, is_full, division=None):
    """Writes to files; now and then they are divided anew."""
    buffer = ReplayBuffer(64, storage="memmap", path=path)
    start = turn = 0
    while True:
        buffer.extend(sealed(2, 4, start=start))
        start += 4
        if start >= 64:
            is_full.set()
        if division and start % 64 == 0:
            turn += 1
            buffer.claim(buffer.leaves, division[turn % len(division)]).let_go()


def fill_too_much(path, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        ReplayBuffer(64, storage="memmap", path=path).extend(sealed(1, 1))
    except DatasetError as error:
        pipe.send(str(error))


class TestFiles:
    def test_a_buffer_of_an_earlier_run_goes_on(self, tmp_path):
        """With its frames, its lanes and its count."""
        with ReplayBuffer(40, storage="memmap", path=tmp_path) as buffer:
            buffer.extend(batch())
            buffer.extend(batch(4, 3, start=10))
        with ReplayBuffer(40, storage="memmap", path=tmp_path) as buffer:
            assert (len(buffer), buffer.write_count) == (40, 52)
            buffer.extend(batch(4, 3, start=13))
            assert lane_values(buffer) == {lane: [*range(6, 16)] for lane in range(4)}

    def test_it_keeps_the_form_of_its_frames(self, tmp_path):
        """Others are refused as they were."""
        full(storage="memmap", path=tmp_path).close()
        with ReplayBuffer(40, storage="memmap", path=tmp_path) as buffer:
            with pytest.raises(SpaceError, match="'observation'"):
                buffer.extend(batch(width=3))
            with pytest.raises(SpaceError, match="'observation'"):
                buffer.init(batch(width=3))

    def test_it_has_one_owner(self, tmp_path):
        """When that one is gone, another may be."""
        buffer = full(storage="memmap", path=tmp_path)
        with pytest.raises(DatasetError, match="open in another place"):
            ReplayBuffer(40, storage="memmap", path=tmp_path)
        del buffer
        gc.collect()
        with ReplayBuffer(40, storage="memmap", path=tmp_path) as buffer:
            assert len(buffer) == 40

    @pytest.mark.slow
    def test_it_has_one_owner_in_all_processes(self, tmp_path):
        code = (
            "from rlcollect import ReplayBuffer; import sys\n"
            "try: ReplayBuffer(40, storage='memmap', path=sys.argv[1])\n"
            "except OSError as error: print(error)"
        )
        with full(storage="memmap", path=tmp_path):
            told = subprocess.run(
                [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
            )
        assert "open in another place" in told.stdout

    def test_a_child_that_outlives_its_owner_does_not_keep_it(self, tmp_path):
        """A fork has a copy of the lock: it lets go of it."""
        buffer = full(storage="memmap", path=tmp_path)
        with started(time.sleep, 60):
            time.sleep(0.1)
            buffer.close()
            ReplayBuffer(40, storage="memmap", path=tmp_path).close()

    def test_another_capacity_is_refused(self, tmp_path):
        """The error says which it has, and the way to another."""
        full(storage="memmap", path=tmp_path).close()
        with pytest.raises(DatasetError, match=r"capacity of 40 frames, and 41 .*dumps\(\)"):
            ReplayBuffer(41, storage="memmap", path=tmp_path)
        ReplayBuffer(40, storage="memmap", path=tmp_path).close()

    def test_what_is_no_buffer_is_refused(self, tmp_path):
        """A file; notes of something else; frames that lack."""
        (tmp_path / "file").write_text("x")
        with pytest.raises(DatasetError, match="cannot have its files"):
            ReplayBuffer(40, storage="memmap", path=tmp_path / "file")
        full(storage="memmap", path=tmp_path / "one").close()
        (tmp_path / "one" / "frames-0" / "0.memmap").write_bytes(b"short")
        with pytest.raises(DatasetError, match=r"is not whole: .*5 bytes"):
            ReplayBuffer(40, storage="memmap", path=tmp_path / "one")
        for text in ("[]", "{}", "words", '{"capacity": 40, "turn": 0, "leaves": [3]}'):
            (tmp_path / "one" / "buffer.json").write_text(text)
            with pytest.raises(DatasetError, match="no note of a buffer"):
                ReplayBuffer(40, storage="memmap", path=tmp_path / "one")

    def test_killed_while_it_writes_it_has_what_was_committed(self, tmp_path):
        """And nothing torn; it can be written to again."""
        for turn in range(20):
            is_full = multiprocessing.Event()
            with started(write_for_ever, tmp_path, is_full) as process:
                is_full.wait()
                time.sleep(0.003 * turn)
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            with ReplayBuffer(64, storage="memmap", path=tmp_path) as buffer:
                frames = buffer.frames()
                assert len(frames) >= 48
                assert torn(frames) == 0

    def test_killed_while_it_is_divided_anew_one_of_both_stands_whole(self, tmp_path):
        """And no files of the other are left."""
        for turn in range(15):
            is_full = multiprocessing.Event()
            with started(write_for_ever, tmp_path, is_full, (4, 2, 8)) as process:
                is_full.wait()
                time.sleep(0.004 * turn)
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            with ReplayBuffer(64, storage="memmap", path=tmp_path) as buffer:
                frames = buffer.frames()
                assert 16 <= len(frames) <= 64
                assert torn(frames) == 0
                assert len([name for name in folders(tmp_path) if name.startswith("frames-")]) == 1

    def test_broken_off_while_it_is_divided_anew_it_is_what_it_was(self, tmp_path, monkeypatch):
        """Here, and when it is opened again."""
        with full(storage="memmap", path=tmp_path) as buffer:
            before = values(buffer)
            monkeypatch.setattr(files, "copy_rows", interrupted)
            with pytest.raises(KeyboardInterrupt):
                buffer.claim(buffer.leaves, 2)
            assert values(buffer) == before
            assert len([name for name in folders(tmp_path) if name.startswith("frames-")]) == 1
            monkeypatch.undo()
            buffer.claim(buffer.leaves, 2)
            assert sorted(values(buffer)) == sorted(before)

    def test_what_a_killed_owner_held_is_not_held(self, tmp_path):
        """Else who writes would wait, after a new start of the machine for as long as that had run."""
        with full(storage="memmap", path=tmp_path) as buffer:
            buffer._cursors.hold(1e6)
        with ReplayBuffer(40, storage="memmap", path=tmp_path) as buffer:
            start = time.monotonic()
            buffer.extend(batch(start=10))
            assert time.monotonic() - start < 5

    def test_a_folder_without_a_name_is_gone_at_the_end(self, tmp_path, monkeypatch):
        """By closing, by forgetting, and at the end of the program; a child that was forked does not take it along."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        for close in (True, False):
            buffer = full(storage="memmap")
            assert len(folders(tmp_path)) == 1
            with started(forget, [buffer]) as process:
                process.join()
            assert len(buffer.frames()) == 40
            assert len(folders(tmp_path)) == 1
            if close:
                buffer.close()
            del buffer
            gc.collect()
            assert folders(tmp_path) == []
        code = (
            "from rlcollect import ReplayBuffer; import torch; from tensordict import TensorDict\n"
            "buffer = ReplayBuffer(4, storage='memmap'); buffer.extend(TensorDict({'a': torch.zeros(4)}, [4]))\n"
            "import os; print(len(os.listdir(os.environ['TMPDIR'])))"
        )
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(told.stdout) >= 1
        assert [name for name in folders(tmp_path) if name.startswith("rlcollect")] == []

    def test_a_full_disk_is_an_error_with_the_bytes_that_are_needed(self, tmp_path):
        """And leaves nothing behind."""
        here, there = multiprocessing.Pipe()
        with started(fill_too_much, tmp_path, there):
            text = here.recv()
        assert "64 frames needs" in text
        assert "bytes are free there" in text
        assert folders(tmp_path) == ["owner"]

    def test_a_disk_that_gets_full_when_it_is_divided_anew_leaves_what_was(self, tmp_path, monkeypatch):
        """For that takes as much again."""

        def fail(*args):
            raise OSError(28, "No space left on device")

        with full(storage="memmap", path=tmp_path) as buffer:
            monkeypatch.setattr(os, "posix_fallocate", fail)
            with pytest.raises(DatasetError, match=r"bytes in .*No space left"):
                buffer.claim(buffer.leaves, 2)
            assert lane_values(buffer) == {lane: [*range(10)] for lane in range(4)}
            buffer.extend(batch(4, 2, start=10))
            assert lane_values(buffer) == {lane: [*range(2, 12)] for lane in range(4)}


def forget(buffers):
    buffers.clear()
    gc.collect()


def interrupted(*args):
    raise KeyboardInterrupt


class TestMemory:
    def test_too_little_shared_memory_says_where_there_is_more(self):
        """When the first frames come."""
        with (
            ReplayBuffer(10**13, storage="shared") as buffer,
            pytest.raises(SharedMemoryError, match=r'frames needs .*storage="memmap"'),
        ):
            buffer.extend(batch())

    @pytest.mark.parametrize("storage", ["memory", "shared"])
    def test_broken_off_while_it_is_divided_anew_it_is_empty_and_of_use(self, storage, monkeypatch):
        """Frames were half moved: none of them stands."""
        with full(storage=storage) as buffer:
            monkeypatch.setattr("rlcollect.memory.replay.places.copy_rows", interrupted)
            with pytest.raises(KeyboardInterrupt):
                buffer.claim(buffer.leaves, 2)
            assert (len(buffer), buffer.write_count) == (0, 40)
            monkeypatch.undo()
            buffer.extend(batch(start=10))
            assert lane_values(buffer) == {lane: [*range(10, 20)] for lane in range(4)}

    def test_its_memory_has_no_name(self):
        """Nothing in /dev/shm that a killed process would leave there."""
        before = segments()
        with full(storage="shared"):
            assert not without_those_of_others(segments() - before)


class TestCopies:
    @pytest.mark.parametrize("chunk", [1, 100, 1 << 26])
    def test_rows_are_copied_a_part_at_a_time(self, chunk, monkeypatch):
        """Whatever fits into it; a tensor in itself is copied whole."""
        monkeypatch.setattr(rows, "CHUNK", chunk)
        source = {("a",): torch.arange(30).view(10, 3), ("b",): torch.arange(10).to(torch.uint16)}
        target = {key: torch.zeros_like(value) for key, value in source.items()}
        rows.copy_rows(source, np.array([9, 0, 4]), target, np.array([0, 1, 2]))
        assert target["a",].tolist() == [[27, 28, 29], [0, 1, 2], [12, 13, 14]] + [[0] * 3] * 7
        assert target["b",].tolist() == [9, 0, 4] + [0] * 7
        rows.copy_rows(target, np.array([0, 1]), target, np.array([1, 0]))
        assert target["b",].tolist() == [0, 9, 4] + [0] * 7


class TestLeaves:
    def test_they_are_told_and_understood(self):
        """As JSON has them."""
        leaves = (Leaf(("a", "b"), (2, 0), torch.bfloat16), Leaf(("c",), (), torch.uint64))
        assert told_leaves(as_leaves(leaves)) == leaves
