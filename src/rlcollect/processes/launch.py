"""How a process is started: from a server that has done the imports, anew, or as a copy of this one.

The program's main module is never run again in a worker: what it defines crosses by value (`crossing`). So no guard is
needed around the code that starts workers, and a notebook is as good as a script.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, resource_tracker, spawn
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from types import FunctionType, SimpleNamespace
from typing import Any

from rlcollect.errors import OptionError
from rlcollect.processes.channel import Held

__all__ = ["default_method", "launch"]

PRELOAD = "rlcollect.processes.preload"


def default_method() -> str:
    """How processes are started where the user does not say."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


def _without_main(name: str) -> dict[str, Any]:
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main")}


def _with(function: Callable[..., Any], **names: Any) -> Any:
    """The same function, which finds other things under these of its module's names."""
    assert isinstance(function, FunctionType)
    there = {**function.__globals__, **names}
    return FunctionType(function.__code__, there, function.__name__, function.__defaults__, function.__closure__)


class _Server:
    """The server of processes: of this package alone, so that nobody's preloads are changed, and one a program.

    It lives until the interpreter ends.
    """

    def __init__(self) -> None:
        self._server = ForkServer()
        self._owner = os.getpid()

    def preload(self, module: str) -> None:
        """Has a module imported by a server that is still to be started."""
        if os.getpid() != self._owner:  # a copy, in a process that was forked from the program: it has none yet
            self._server, self._owner = ForkServer(), os.getpid()
        self._server.set_forkserver_preload([PRELOAD, module])

    def connect_to_new_process(self, fds: Any) -> Any:
        with Held():  # a server that starts inherits it, until its first import
            return self._server.connect_to_new_process(fds)


_server = _Server()
_spawning = SimpleNamespace(**{**vars(spawn), "get_preparation_data": _without_main})
_serving = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": _server.connect_to_new_process})


class _ServedPopen(popen_forkserver.Popen):
    _launch = _with(popen_forkserver.Popen._launch, spawn=_spawning, forkserver=_serving)  # type: ignore[attr-defined]


class _SpawnedPopen(popen_spawn_posix.Popen):
    _launch = _with(popen_spawn_posix.Popen._launch, spawn=_spawning)  # type: ignore[attr-defined]


class _ServedProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        return _ServedPopen(process_obj)


class _SpawnedProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        return _SpawnedPopen(process_obj)


KINDS: Mapping[str, type[Any]] = {"forkserver": _ServedProcess, "spawn": _SpawnedProcess, "fork": ForkProcess}


def launch(
    method: str,
    target: Callable[..., None],
    connection: Connection[Any, Any],
    args: tuple[Any, ...],
    *,
    name: str,
    preload: str | None = None,
    inherited: Sequence[Callable[[], None]] = (),
) -> BaseProcess:
    """Starts a process.

    Args:
        method: "forkserver", "spawn" or "fork".
        target: a function of a module, called with `connection`, `args` and the environment variables.
        connection: passed to it.
        args: picklable.
        name: of the process.
        preload: a module that a server of processes imports, for all that it starts.
        inherited: closes what a copy of this process would have open: else nobody would see it close here.

    Raises:
        OptionError: no such method here.
    """
    if method not in KINDS or method not in multiprocessing.get_all_start_methods():
        there = [kind for kind in KINDS if kind in multiprocessing.get_all_start_methods()]
        raise OptionError(f"start_method must be one of {', '.join(map(repr, there))}, not {method!r}.")
    if method == "fork":
        target = functools.partial(_without, inherited, target)
    # a daemon to this interpreter, which ends such processes and does not wait for them; `serve` lifts it over there
    if method == "forkserver":
        _server.preload(preload or target.__module__)
    process: BaseProcess = KINDS[method](
        target=target, args=(connection, *args, dict(os.environ)), name=name, daemon=True
    )
    if method != "fork":
        resource_tracker.ensure_running()  # when it starts it lets signals through again that are held off
    with Held():  # the child is deaf to Ctrl-C from its first moment: it inherits this
        process.start()
    return process


def _without(inherited: Sequence[Callable[[], None]], target: Callable[..., None], *args: Any) -> None:
    for close in inherited:
        close()
    target(*args)


def hear_no_interrupts() -> None:
    """In a new process: Ctrl-C is for the program alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
