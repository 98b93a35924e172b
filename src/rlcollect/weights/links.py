"""Pipes of a scheme that is used without a collector: whole messages with file descriptors, every wait with an end."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import time
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from rlcollect.errors import ClosedError
from rlcollect.processes.channel import Held, Outbox

__all__ = ["Link", "LinkEnd"]

GONE = "The process at the other end of this scheme has ended, or has shut it down."


class LinkEnd:
    """One end. It goes to another process with what is pickled for it, while that is started.

    Attributes:
        attached: that came with the last message.
    """

    def __init__(self, connection: Any) -> None:
        self.attached: Sequence[int] = ()
        self._connection = connection
        self._outbox: Outbox | None = None
        self._owner = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a copy, in a process that was forked from its own."""
        return os.getpid() != self._owner

    @property
    def _box(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._connection)
        return self._outbox

    def send(self, content: Any, deadline: float, attached: Sequence[int] = ()) -> None:
        """Sends a message.

        Raises:
            TimeoutError: the other end has not taken it by then; this one is closed then.
            ClosedError: there is none.
        """
        if self._connection.closed:
            raise ClosedError(GONE)
        try:
            box = self._box
            with Held():
                box.send((content, len(attached)))
                box.send_descriptors(attached)
            while box.is_behind:
                if not _takes(box.fileno(), deadline - time.monotonic()):
                    break
                box.flush()
            else:
                return
        except (OSError, ValueError) as error:
            raise ClosedError(GONE) from error
        self.close()  # half a message may be there
        raise TimeoutError("The process at the other end of this scheme took too long to take a message.")

    def receive(self, deadline: float) -> Any:
        """The next message's content.

        Raises:
            TimeoutError: none has come by then.
            ClosedError: none will come.
        """
        if not self.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("The process at the other end of this scheme said nothing in time.")
        try:
            content, count = self._box.receive()
            self.attached = self._box.receive_descriptors(count)
        except (EOFError, OSError) as error:
            raise ClosedError(GONE) from error
        return content

    def has_message(self) -> bool:
        """Whether one is there, or the end."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Waits until there is a message, or the end; whether there is."""
        try:
            return bool(self._connection.poll(seconds))
        except (OSError, EOFError) as error:
            raise ClosedError(GONE) from error

    def close(self) -> None:
        """Safe to call again."""
        if self._outbox is not None:
            self._outbox.close()
        self._connection.close()

    def __reduce__(self) -> Any:
        """Goes to a process that is being started, and nowhere else: two would take each other's messages.

        Raises:
            TypeError: it is pickled or copied otherwise.
        """
        if get_spawning_popen() is None:
            raise TypeError("The end of a scheme's pipe goes to a process as an argument, when that is started.")
        return LinkEnd, (self._connection,)


def _takes(fd: int, seconds: float) -> bool:
    """Whether more can be sent within this time."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        return bool(selector.select(max(0.0, seconds)))


class Link(LinkEnd):
    """The sender's end of a new pipe.

    Attributes:
        other: the receiver's.
    """

    def __init__(self) -> None:
        here, there = multiprocessing.Pipe(duplex=True)
        super().__init__(here)
        self.other = LinkEnd(there)
