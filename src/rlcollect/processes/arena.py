"""Memory that processes share: anonymous, allocated at once, passed on as a file descriptor.

It has no name in any folder, so nothing is left behind, however its processes end: it is gone with the last mapping.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlcollect.errors import SharedMemoryError

__all__ = ["Arena"]

Array = np.ndarray[Any, Any]
SHM = Path("/dev/shm")
NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class Arena:
    """A piece of shared memory.

    Attributes:
        buffer: uint8 `[nbytes]`, zero at first. Views of it stay valid when the arena is closed.
        fd: the descriptor to pass on.

    Args:
        nbytes: its size.
        memfd: whether it is memory of the system's own; where there is no such thing, and with False, it is a file
            without a name in /dev/shm, or where temporary files are.

    Raises:
        SharedMemoryError: there is less than that.
    """

    def __init__(self, nbytes: int, *, memfd: bool = True) -> None:
        nbytes = max(nbytes, 1)
        by_memfd = memfd and hasattr(os, "memfd_create")
        left = _left(by_memfd)
        if left is not None and nbytes > left:
            raise _too_little(nbytes, left)
        fd = os.memfd_create("rlcollect", os.MFD_CLOEXEC) if by_memfd else _unnamed_file()
        try:
            os.ftruncate(fd, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)  # now, not by a bus error at the first write
            self.buffer = _mapped(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno in NO_SPACE:
                raise _too_little(nbytes, left) from error
            raise
        self.fd = fd

    @classmethod
    def attached(cls, fd: int, nbytes: int) -> Array:
        """The memory of an arena of another process: uint8 `[nbytes]`. Closes the descriptor."""
        try:
            return _mapped(fd, max(nbytes, 1))
        finally:
            os.close(fd)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.buffer)

    def close(self) -> None:
        """It can no longer be passed on. Safe to call again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def let_go(self) -> None:
        """Closes it, and keeps no view of it: it is unmapped with the last. Safe to call again."""
        self.close()
        self.buffer = np.zeros(0, np.uint8)


def _mapped(fd: int, nbytes: int) -> Array:
    # page tables are filled now: a first write to each page would cost a fault in the step loop
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, flags=flags), np.uint8)


def _folder() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _unnamed_file() -> int:
    with tempfile.TemporaryFile(dir=_folder()) as file:
        return os.dup(file.fileno())


def _left(by_memfd: bool) -> int | None:
    """Bytes that can be had, as far as is known."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    left = [] if limit == resource.RLIM_INFINITY else [limit]
    if by_memfd:
        left += _memory_left()
    else:
        state = os.statvfs(_folder())
        left.append(state.f_bavail * state.f_frsize)
    return min(left, default=None)


def _memory_left() -> list[int]:
    """Bytes of memory that the machine, or the group of processes this one belongs to, has left."""
    left = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        left.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # another system, or no limit ("max")
        pass
    return left


def _too_little(needed: int, left: int | None) -> SharedMemoryError:
    found = "less" if left is None or left >= needed else f"{left:,} bytes"
    return SharedMemoryError(
        f"{needed:,} bytes of shared memory are needed, and there are {found}. Collect less at a time "
        "(frames_per_batch, lanes), use fewer workers, or give the machine (or the container: --shm-size) more."
    )
