"""An object in an actor of its own, whose methods are called by name, from wherever there is a line to it.

Bytes travel beside a call and its answer, through the object store. Every wait ends when the actor does.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import cloudpickle
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rlcollect.cluster.actor import find_modules
from rlcollect.cluster.connection import created, is_in, session
from rlcollect.cluster.objects import seen
from rlcollect.errors import BufferDied, ClosedError, WorkerTimeout
from rlcollect.failures import warn
from rlcollect.processes.crossing import unpacked
from rlcollect.processes.messages import Beside, Notice, Reply
from rlcollect.processes.relay import Failure

__all__ = ["Call", "Group", "Line", "Service"]

Array = np.ndarray[Any, Any]
Group = Literal["read", "write"] | None
LOOK_EACH = 1.0  # seconds between two looks whether there is a cluster still
LET_GO = 3.0  # seconds that an actor has to be gone


class Holding:
    """The actor: makes the object, and calls its methods; what they raise is an answer.

    Calls of a group are made one after the other, those of different groups beside each other.

    Args:
        make: makes the object, pickled.
        path: see `Serving`.
    """

    def __init__(self, make: bytes, path: Sequence[str]) -> None:
        find_modules(path)
        self._notices: list[Notice] = []
        self._failure: Failure | None = None
        warnings.showwarning = self._note
        try:
            self._held = unpacked(make)()
        except BaseException as error:  # it is told to whoever asks something
            self._failure = Failure.of(error, 0)

    def do(self, method: str, arguments: bytes, *data: Array) -> tuple[bytes, Any]:
        """Calls a method; the reply, pickled, and what comes beside it."""
        failure, value, beside = self._failure, None, None
        if failure is None:
            try:
                value = getattr(self._held, method)(*unpacked(arguments), *map(seen, data))
            except BaseException as error:
                failure = Failure.of(error, 0)
        if isinstance(value, Beside):
            value, beside = value.value, value.data
        taken, self._notices = tuple(self._notices), []
        reply = Reply(0, 0, value, failure, taken)
        return cloudpickle.dumps(reply), beside

    def live(self) -> None:
        """Never ends by itself: who waits for it sees that the actor is gone."""
        threading.Event().wait()

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        self._notices.append(Notice(category, str(message)))


@dataclass(frozen=True)
class Call:
    """A method that is being called: where the answer will be, and what comes beside it."""

    reply: Any
    beside: Any


class Line:
    """By what the methods of an object in an actor are called. It can be had by any number of processes.

    Args:
        actor: the handle.
        told: what the object is, in words.
    """

    def __init__(self, actor: Any, told: str) -> None:
        self.actor = actor
        self._told = told
        self._is_open = True
        self._session = session()

    def ask(self, method: str, *arguments: Any, data: Array | None = None, group: Group = None) -> Call:
        """Has a method called.

        Args:
            method: its name.
            arguments: for it.
            data: uint8, the last of its arguments; it may be written over when this returns.
            group: of the calls that it waits for.

        Raises:
            ClosedError: it was ended.
            BufferDied: Ray was shut down.
        """
        self._check()
        options = {"num_returns": 2} if group is None else {"num_returns": 2, "concurrency_group": group}
        do = self.actor.do.options(**options)
        return Call(*do.remote(method, cloudpickle.dumps(arguments), *([] if data is None else [data])))

    def answer(self, call: Call, timeout: float | None = None) -> tuple[Any, Any]:
        """The answer to a call, and what comes beside it: not to be written to.

        Raises:
            What the method raised.
            WorkerTimeout: it took longer. The call goes on, and can be waited for again.
            BufferDied: the actor is gone.
            ClosedError: it was ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._check()
        while True:
            left = LOOK_EACH if deadline is None else max(0.0, min(LOOK_EACH, deadline - time.monotonic()))
            try:
                data, beside = ray.get([call.reply, call.beside], timeout=left)
                break
            except GetTimeoutError:
                self._check()
                if deadline is not None and time.monotonic() >= deadline:
                    raise WorkerTimeout(
                        f"{timeout} s were not enough for {self._told}. It goes on: allow more (timeout=), or look in "
                        "Ray's dashboard at what its actor does, and whether Ray has found a node for it.",
                        workers=(),
                    ) from None
            except RayError as error:
                raise self._gone(error) from error
        return self._opened(pickle.loads(data)), None if beside is None else seen(beside)

    def call(
        self,
        method: str,
        *arguments: Any,
        data: Array | None = None,
        group: Group = None,
        timeout: float | None = None,
    ) -> Any:
        """Calls a method: its answer. See `ask` and `answer`."""
        return self.answer(self.ask(method, *arguments, data=data, group=group), timeout)[0]

    def _opened(self, reply: Reply) -> Any:
        for notice in reply.notices:
            warn(notice.text, notice.category)
        if reply.failure is not None:
            raise replace(reply.failure, context=f"{self._told}: {reply.failure.text}").raised()
        return reply.value

    def _check(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self._told} was closed. Make a new one.")
        if not is_in(self._session):  # else Ray would start anew by itself
            raise BufferDied(f"{self._told} is gone: Ray was shut down, and its actor with it. Make a new one.")

    def _gone(self, error: RayError) -> Exception:
        if not self._is_open:
            return ClosedError(f"{self._told} was closed while it was waited for.")
        where = "" if isinstance(error, RayActorError) else "did not answer, or "
        said = " ".join(str(error).split())
        return BufferDied(
            f"{self._told} {where}is gone, with what was in it. Ray says: {said} Ray's logs "
            "(/tmp/ray/session_latest/logs on its node) have what it wrote. It may have been killed for memory: give "
            "it more (remote_config={'memory': ...}) or a smaller capacity; save it now and then (dumps)."
        )


class Service(Line):
    """See `Line`: the program's, which makes the actor, and ends it.

    Args:
        make: makes the object, pickled.
        config: of the actor: what `ray.remote` takes.
        told: what the object is, in words.
        first: a method, which is called when it is made.
        timeout: seconds that it may take to be there.

    Raises:
        What is raised when the object is made.
        OptionError: `config` is not what `ray.remote` takes.
        WorkerTimeout: it took longer.
    """

    def __init__(self, make: bytes, config: Mapping[str, Any], *, told: str, first: str, timeout: float) -> None:
        # a call is not to be made twice, and an actor that is made anew has lost what was in it
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"read": 1, "write": 1, "life": 1})(Holding)
        super().__init__(created(kind, config, "remote_config", make, sys.path), told)
        self._life = self.actor.live.options(concurrency_group="life").remote()
        try:
            self.call(first, timeout=timeout)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the actor. Safe to call again."""
        if self._is_open:
            self._is_open = False
            if is_in(self._session):
                ray.kill(self.actor, no_restart=True)
                ray.wait([self._life], timeout=LET_GO)
