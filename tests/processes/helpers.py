"""What runs in the processes of these tests, and what is looked at afterwards. Light: each process imports it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("starting", "holding", "resting")


class News(tuple):
    """A command of which the newest is enough."""

    is_news = True

    def __reduce__(self):
        return News, (tuple(self),)


class Obedient:
    """A handler whose commands are the name of a method and its arguments."""

    def __init__(self, worker, row):
        self.worker = worker
        self.row = row
        self.is_over = False
        self.note = None
        self.hangs_at_close = False

    def handle(self, command, descriptors):
        name, *arguments = command
        return getattr(self, f"do_{name}")(descriptors, *arguments)

    def withdraw(self, command):
        return "withdrawn", command

    def close(self):
        if self.note is not None:
            Path(self.note).write_text("closed")
        if self.hangs_at_close:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)

    # --- commands ---

    def do_size(self, descriptors, value):
        return len(value)

    def do_echo(self, descriptors, value):
        return value

    def do_call(self, descriptors, function, *arguments):
        return function(*arguments)

    def do_hold(self, descriptors):
        """Ends when a byte comes."""
        self.row.enter("holding")
        os.read(descriptors[0], 1)
        os.close(descriptors[0])
        self.row.enter("resting")

    def do_read(self, descriptors):
        read = []
        for fd in descriptors:
            read.append(os.read(fd, 100))
            os.close(fd)
        return read

    def do_note_close(self, descriptors, path):
        self.note = path

    def do_hang_at_close(self, descriptors):
        self.hangs_at_close = True

    def do_sleep(self, descriptors, deaf=False):
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.row.enter("holding")
        time.sleep(600)

    def do_beat(self, descriptors, count):
        self.row.beat(count)

    def do_fail(self, descriptors, error):
        raise error

    def do_warn(self, descriptors, text, category=UserWarning):
        warnings.warn(text, category, stacklevel=1)

    def do_unpicklable(self, descriptors):
        return threading.Lock()

    def do_start_child(self, descriptors):
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return child.exitcode

    def do_count_descriptors(self, descriptors):
        return len(list(Path("/proc/self/fd").iterdir()))


def make(worker, row):
    return Obedient(worker, row)


def make_dead(worker, row):
    os._exit(5)


def report(connection: Any, *arguments: Any) -> None:
    """A target for `launch`: says who it is and what it was given."""
    *given, environ = arguments
    connection.send(
        {
            "pid": os.getpid(),
            "given": given,
            "environ": environ,
            "name": multiprocessing.current_process().name,
            "modules": [name for name in ("torch", "tensordict", "gymnasium") if name in sys.modules],
            "blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
        }
    )
    connection.close()


def get_pid() -> int:
    return os.getpid()


def get_environ(name: str) -> str | None:
    return os.environ.get(name)


def wait_until(holds: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptors() -> set[tuple[str, str]]:
    """Number and target of each that is open here."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add((path.name, os.readlink(path)))  # noqa: PTH115 - the target is no path
        except OSError:  # the one that lists them
            continue
    return found
