"""`Arena`: memory that is there from the start, shared by its descriptor, and gone without a trace."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from rlcollect.errors import SharedMemoryError
from rlcollect.processes.arena import Arena
from tests.processes.helpers import descriptors
from tests.workers.fault_helpers import segments, without_those_of_others

both = pytest.mark.parametrize("memfd", [True, False], ids=["memfd", "file"])
FAR_TOO_MUCH = 10**15


@both
class TestMemory:
    def test_has_its_size_and_is_zero(self, memfd):
        arena = Arena(5000, memfd=memfd)
        assert arena.nbytes == 5000
        assert arena.buffer.shape == (5000,)
        assert arena.buffer.dtype == np.uint8
        assert not arena.buffer.any()
        arena.close()

    def test_is_allocated_at_once(self, memfd):
        arena = Arena(1 << 20, memfd=memfd)
        assert os.fstat(arena.fd).st_blocks * 512 >= 1 << 20
        arena.close()

    def test_is_shared_by_its_descriptor(self, memfd):
        arena = Arena(100, memfd=memfd)
        there = Arena.attached(os.dup(arena.fd), 100)
        arena.buffer[7] = 3
        there[99] = 4
        assert there.tolist() == arena.buffer.tolist() == [3 if at == 7 else 4 if at == 99 else 0 for at in range(100)]
        arena.close()

    def test_is_shared_with_another_process(self, memfd):
        arena = Arena(100, memfd=memfd)
        pid = os.fork()
        if not pid:
            Arena.attached(os.dup(arena.fd), 100)[5] = 42
            os._exit(0)
        os.waitpid(pid, 0)
        assert arena.buffer[5] == 42
        arena.close()

    def test_two_have_nothing_in_common(self, memfd):
        one, other = Arena(10, memfd=memfd), Arena(10, memfd=memfd)
        one.buffer[:] = 1
        assert not other.buffer.any()
        one.close()
        other.close()

    def test_of_no_bytes(self, memfd):
        arena = Arena(0, memfd=memfd)
        assert len(Arena.attached(os.dup(arena.fd), 0)) == arena.nbytes
        arena.close()


@both
class TestClosing:
    def test_views_stay_valid(self, memfd):
        arena = Arena(64, memfd=memfd)
        view = arena.buffer.view(np.int64)[2:4]
        arena.close()
        view[:] = 7, 8
        assert arena.buffer.view(np.int64).tolist() == [0, 0, 7, 8, 0, 0, 0, 0]
        del arena
        gc.collect()
        assert view.tolist() == [7, 8]

    def test_closes_the_descriptor(self, memfd):
        arena = Arena(64, memfd=memfd)
        fd = arena.fd
        arena.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_twice(self, memfd):
        arena = Arena(64, memfd=memfd)
        fd = arena.fd
        arena.close()
        with Path("/dev/null").open() as other:  # gets the same number
            assert other.fileno() == fd
            arena.close()
            os.fstat(other.fileno())

    def test_attaching_closes_the_descriptor_that_it_was_given(self, memfd):
        arena = Arena(64, memfd=memfd)
        fd = os.dup(arena.fd)
        there = Arena.attached(fd, 64)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert not there.any()
        arena.close()

    def test_attaching_in_vain_closes_it_too(self, memfd):
        arena = Arena(64, memfd=memfd)
        fd = os.dup(arena.fd)
        with pytest.raises((ValueError, OSError)):
            Arena.attached(fd, 1 << 30)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        arena.close()

    def test_nothing_is_open_when_the_last_view_is_gone(self, memfd):
        before = descriptors()
        arena = Arena(64, memfd=memfd)
        there = Arena.attached(os.dup(arena.fd), 64)
        arena.close()
        del arena, there
        gc.collect()
        assert descriptors() == before


@both
class TestNames:
    def test_there_is_no_name_anywhere(self, memfd):
        before = segments()
        arena = Arena(4096, memfd=memfd)
        assert not without_those_of_others(segments() - before)
        assert os.readlink(f"/proc/self/fd/{arena.fd}").endswith("(deleted)")  # noqa: PTH115
        assert os.fstat(arena.fd).st_nlink == 0
        arena.close()

    def test_a_program_that_is_started_does_not_inherit_it(self, memfd):
        arena = Arena(4096, memfd=memfd)
        assert not os.get_inheritable(arena.fd)
        arena.close()


@both
class TestTooLittle:
    def test_the_error_has_the_bytes_needed_and_found(self, memfd):
        with pytest.raises(SharedMemoryError, match=r"1,000,000,000,000,000 bytes") as raised:
            Arena(FAR_TOO_MUCH, memfd=memfd)
        found = [int(number.replace(",", "")) for number in re.findall(r"([\d,]*\d) bytes", str(raised.value))]
        assert found[0] == FAR_TOO_MUCH
        assert 0 < found[1] < FAR_TOO_MUCH
        assert "frames_per_batch" in str(raised.value)

    def test_nothing_is_left_open(self, memfd):
        before = descriptors()
        with pytest.raises(SharedMemoryError):
            Arena(FAR_TOO_MUCH, memfd=memfd)
        assert descriptors() == before


LIMITED = """
import os, resource, sys
from rlcollect.errors import SharedMemoryError
from rlcollect.processes.arena import Arena

LIMIT, NEEDED = 1 << 20, 1 << 22
resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
for memfd in (True, False):
    before = len(os.listdir("/proc/self/fd"))
    try:
        Arena(NEEDED, memfd=memfd)
    except SharedMemoryError as error:
        print(f"{memfd}: {error}")
    print(f"{memfd} left open: {len(os.listdir('/proc/self/fd')) - before}")
    small = Arena(LIMIT // 2, memfd=memfd)
    small.buffer[:] = 1
    print(f"{memfd} small: {int(small.buffer.sum())}")
    small.close()
"""


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


class TestALimitThatOnlyTheSystemKnows:
    """A limit of this process on the size of files, `RLIMIT_FSIZE`, stands for a /dev/shm that is full."""

    @pytest.mark.timeout(60)
    @both
    def test_is_an_error_before_anything_is_written(self, lines, memfd):
        assert str(memfd) in lines, f"no SharedMemoryError: {lines}"
        assert "4,194,304 bytes" in lines[str(memfd)]

    @pytest.mark.timeout(60)
    @both
    def test_the_bytes_found_are_fewer_than_those_needed(self, lines, memfd):
        numbers = [int(number.replace(",", "")) for number in re.findall(r"([\d,]*\d) bytes", lines[str(memfd)])]
        assert all(number < numbers[0] for number in numbers[1:]), lines[str(memfd)]

    @pytest.mark.timeout(60)
    @both
    def test_nothing_is_left_open_and_less_can_be_had(self, lines, memfd):
        assert lines[f"{memfd} left open"] == "0"
        assert lines[f"{memfd} small"] == str(1 << 19)
