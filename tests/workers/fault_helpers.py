"""What the tests of faults share: things that break in a worker, what a collector may leave behind, scripts."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rlcollect import MultiAsyncCollector, MultiSyncCollector
from rlcollect.testing import Breaker, Counter
from tests import backend

KINDS: list[Any] = [MultiSyncCollector, MultiAsyncCollector]
if backend.IS_RAY:
    KINDS = [backend.Named(sync=True), backend.Named(sync=False)]
HANG_LIMIT = 5.0  # seconds: nothing here takes as long, unless it hangs
STARTING = 40.0 if backend.IS_RAY else 20.0  # the same, where workers start
SHARED = "memfd:rlcollect"  # as the system names it
CULPRIT = "rlcollect-1"  # the process, or actor, of worker 1, which is the one that breaks


class OddError(Exception):
    """An exception that cannot be made from its arguments, and has an attribute that they do not give."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"broken, with code {code}")
        self.code = code


def odd() -> OddError:
    return OddError(code=7)


# --- what breaks, in worker 1 alone ---


def act(how: str, exception: Callable[[], BaseException] = odd) -> None:
    """Breaks now, as a `Breaker` does."""
    Breaker(how, "close", exception=exception).close()  # type: ignore[arg-type]


class Breaks:
    """A callable that breaks at the k-th call in worker 1, and returns its first argument otherwise."""

    def __init__(self, how: str, at: int = 1, exception: Callable[[], BaseException] = odd) -> None:
        self.how, self.at, self.exception = how, at, exception
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and backend.own_name().startswith(CULPRIT):
            act(self.how, self.exception)
        return arguments[0] if arguments else None


class BreakingPolicy:
    """Always action 0, until the k-th call."""

    def __init__(self, how: str, at: int, exception: Callable[[], BaseException] = odd) -> None:
        self.breaks = Breaks(how, at, exception)

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        self.breaks()
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class BreaksSeeded(Counter):
    """Breaks in the first reset that has a seed."""

    def __init__(self, how: str, exception: Callable[[], BaseException] = odd) -> None:
        super().__init__()
        self.how, self.exception = how, exception

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            act(self.how, self.exception)
        return super().reset(seed=seed, options=options)


class BreaksSaved(Counter):
    """Breaks in the second call of its `state_dict`; the first is made at construction."""

    def __init__(self, how: str, exception: Callable[[], BaseException] = odd) -> None:
        super().__init__()
        self.breaks = Breaks(how, 2, exception)

    def state_dict(self) -> dict[str, Any]:
        self.breaks()
        return {"t": self.t}


class TellsItsEnd(Counter):
    """Makes a file when it is closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        self.folder = folder

    def close(self) -> None:
        (self.folder / f"closed-{os.getpid()}-{id(self)}").touch()
        super().close()


# --- what is there, and what is left ---


@dataclass(frozen=True)
class Belongings:
    """What this process holds, as far as a collector could leave it behind.

    Its shared memory is counted apart: a test that fails keeps the collector, in its traceback, and this by it.
    """

    processes: frozenset[int]
    descriptors: frozenset[tuple[str, str]]
    segments: frozenset[str]
    shared: int
    threads: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        gc.collect()
        held = list(_descriptors())
        return cls(
            frozenset(descendants(os.getpid())),
            frozenset(each for each in held if SHARED not in each[1]),
            segments(),
            Path("/proc/self/maps").read_text().count(SHARED) + sum(SHARED in name for _, name in held),
            frozenset(f"{thread.name} {thread.ident}" for thread in threading.enumerate()),
        )

    def more_than(self, other: Belongings) -> dict[str, Any]:
        """What is here and is not there, by name."""
        more = {
            "processes": [told(pid) for pid in self.processes - other.processes],
            "descriptors": sorted(self.descriptors - other.descriptors),
            "segments": sorted(without_those_of_others(self.segments - other.segments)),
            "threads": sorted(self.threads - other.threads),
        }
        return {name: value for name, value in more.items() if value}


def segments() -> frozenset[str]:
    """Shared memory that has a name, of whoever is on this machine."""
    folder = Path("/dev/shm")
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


def without_those_of_others(names: Collection[str]) -> set[str]:
    """Those that no process beside this one and its descendants has: other tests run on the machine, too."""
    left = set(names)
    if left:
        for pid in _parents().keys() - descendants(os.getpid()) - {os.getpid()}:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                left -= {name for name in left if f"/dev/shm/{name}" in maps}
    return {name for name in left if (Path("/dev/shm") / name).exists()}


def _descriptors() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            yield entry.name, str(entry.readlink())


def _parents() -> dict[int, int]:
    """The parent of every process that has not ended."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    return parents


def descendants(root: int) -> set[int]:
    """Children, their children, and so on. Not the resource tracker, which lives as long as the interpreter."""
    parents = _parents()
    found: set[int] = set()
    todo = [root]
    while todo:
        parent = todo.pop()
        todo += (children := [pid for pid, its in parents.items() if its == parent and pid not in found])
        found.update(children)
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None)}


def is_alive(pid: int) -> bool:
    return pid in _parents()


def told(pid: int) -> str:
    """A process, in words."""
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:200]!r}"
    except OSError:
        return f"{pid}, which has just ended"


def becomes_true(condition: Callable[[], bool], seconds: float = HANG_LIMIT) -> bool:
    """Whether it does before its time is up."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def check_nothing_is_left(before: Belongings) -> None:
    """No more is there than before; what ends by itself has a moment to do so."""
    more: dict[str, Any] = {}

    def is_clean() -> bool:
        more.clear()
        more.update(Belongings.now().more_than(before))
        return not more

    if backend.IS_RAY:  # which keeps more and more of its own
        assert becomes_true(lambda: not backend.living()), backend.living()
        return
    assert becomes_true(is_clean), more


def worker_process(number: int) -> BaseProcess:
    """The process of a worker of the only collector there is."""
    return next(each for each in multiprocessing.active_children() if each.name == f"rlcollect-{number}")


def kill_worker(number: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Kills it, and waits until that can be noticed; by a descriptor of its own, since the pool may close its one."""
    if backend.IS_RAY:
        pid = backend.pid_of(number)
        os.kill(pid, by)
        assert becomes_true(lambda: not is_alive(pid))
        return
    process = worker_process(number)
    assert process.pid is not None
    sentinel = os.dup(process.sentinel)
    os.kill(process.pid, by)
    assert wait([sentinel], HANG_LIMIT)
    os.close(sentinel)


class within:  # noqa: N801 - reads as a word
    """Around what must end soon: fails if it took so long that it must have hung."""

    def __init__(self, seconds: float = HANG_LIMIT) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert (took := time.monotonic() - self.start) <= self.seconds, f"{took} s"


def raised_by(call: Callable[[], Any]) -> BaseException | None:
    """Whatever a call raises, without ending the tests where that is a `KeyboardInterrupt` or `SystemExit`."""
    try:
        call()
    except BaseException as error:
        return error
    return None


# --- scripts ---


class Script:
    """A program that runs in a process group of its own.

    All processes that come from it can be told by a mark in their environment, whoever their parent is by then.
    """

    def __init__(self, folder: Path, body: str, name: str = "script.py") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name
        self.path.write_text(textwrap.dedent(body))
        self.mark = f"RLCOLLECT_TEST_SCRIPT={self.path}"
        key, value = self.mark.split("=", 1)
        self._files = [(folder / f"{name}.{stream}").open("w+") for stream in ("out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "default", str(self.path)],
            stdout=self._files[0],
            stderr=self._files[1],
            stdin=subprocess.DEVNULL,
            env={**os.environ, key: value},
            start_new_session=True,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for file in self._files:
            file.close()

    @property
    def out(self) -> str:
        return self.path.with_name(f"{self.path.name}.out").read_text()

    @property
    def err(self) -> str:
        return self.path.with_name(f"{self.path.name}.err").read_text()

    def living(self) -> list[int]:
        """All processes of it that have not ended."""
        found = []
        for pid in _parents():
            with contextlib.suppress(OSError):
                if self.mark in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                    found.append(pid)
        return found

    def wait_for(self, line: str, seconds: float = 40.0) -> None:
        """Until it has printed this; two processes that print at once may do so in one line."""
        came = becomes_true(lambda: line in self.out or self.process.poll() is not None, seconds)
        assert came, f"no {line!r}: {self.out}{self.err}"
        assert line in self.out, f"it ended without {line!r}: {self.out}{self.err}"

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to all processes of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self, seconds: float = 40.0) -> int:
        """Its exit status. Fails if it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.out}{self.err}") from None

    def check_nothing_lives(self, seconds: float = HANG_LIMIT) -> None:
        """All its processes end, or have ended."""
        becomes_true(lambda: not self.living(), seconds)
        assert [told(pid) for pid in self.living()] == []


counting = functools.partial(Counter, None)
