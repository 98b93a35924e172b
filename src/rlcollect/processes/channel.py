"""A two-way pipe for whole messages: a Ctrl-C comes before one or after it, never in the middle."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any

import cloudpickle

__all__ = ["Channel", "Held", "Outbox"]


class Held:
    """Inside, no Ctrl-C is seen; it comes at the end, of the outermost where one stands in another.

    It is noted instead of being handled, since any thread of the program may receive it: a mask of this thread alone
    would not do. The mask is for processes that are started inside, which inherit it.
    """

    def __init__(self) -> None:
        self._mask: set[Any] | None = None
        self._handler: Any = None
        self._came = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if getattr(handler, "__func__", None) is Held._note:  # inside another
            # whoever was called meanwhile may have let it through
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            return
        if handler is not None:  # else it is not Python's, and could not be put back
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._came:
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as handlers are called
        self._came = True


class Channel:
    """One end of a pipe, as a worker has it: sending waits until the other end has taken the message.

    Args:
        connection: of a socket pair.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._is_open = True

    def send(self, message: Any) -> None:
        """Sends a message that holds nothing of the user's.

        Raises:
            BrokenPipeError, ConnectionResetError: nobody is there.
        """
        self.send_bytes(pickle.dumps(message))

    def send_result(self, message: Any) -> None:
        """Sends what may hold anything.

        Raises:
            Exception: whatever pickling raises; nothing was sent then.
        """
        self.send_bytes(cloudpickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        """Sends a message that is pickled."""
        with Held():
            self.connection.send_bytes(data)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, ConnectionResetError: nobody is there.
        """
        with Held():
            data = self.connection.recv_bytes()
        return pickle.loads(data)

    def receive_descriptors(self, count: int) -> list[int]:
        """The file descriptors that follow a message."""
        with Held():
            return [reduction.recv_handle(self.connection) for _ in range(count)]

    def has_message(self) -> bool:
        """Whether one is there, or the end."""
        return self._is_open and self.connection.poll(0)

    def close(self) -> None:
        """Safe to call again."""
        if self._is_open:
            self._is_open = False
            self.connection.close()

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self.connection.fileno()


class Outbox(Channel):
    """One end of a pipe, as the program has it: nothing it sends waits for anybody. Several threads may send.

    What the other end does not take at once stays here, and goes on at the next `flush`.

    Attributes:
        lock: held while something is sent; hold it for what is to stand together.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        super().__init__(connection)
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._waiting: deque[memoryview | int] = deque()  # bytes, or a file descriptor of its own
        self._news: memoryview | None = None  # a message that the next of its kind may replace
        self.lock = threading.RLock()

    def send_news(self, message: Any) -> None:
        """Sends a message; where the last that was sent is one of these too, and waits whole, it goes in its place."""
        news = self._framed(pickle.dumps(message))
        with Held(), self.lock:
            if self._waiting and self._waiting[-1] is self._news:
                self._waiting.pop()
            self._waiting.append(news)
            self._news = news
        self.flush()

    def send_bytes(self, data: bytes) -> None:
        """Sends a message that is pickled."""
        with Held(), self.lock:
            self._waiting.append(self._framed(data))
        self.flush()

    def _framed(self, data: bytes) -> memoryview:
        """A message in the form that `Connection` has."""
        length = len(data)
        head = struct.pack("!i", length) if length <= 0x7FFFFFFF else struct.pack("!iQ", -1, length)
        return memoryview(head + data)

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Sends file descriptors after a message."""
        with Held(), self.lock:
            self._waiting.extend(os.dup(fd) for fd in descriptors)
        self.flush()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed; it stays as it is for who holds `lock`."""
        return self._is_open

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be taken."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Sends what the other end takes now.

        Raises:
            BrokenPipeError, ConnectionResetError: nobody is there.
        """
        with Held(), self.lock:
            try:
                while self._waiting:
                    self._send_first()
            except BlockingIOError:
                pass

    def _send_first(self) -> None:
        first = self._waiting[0]
        if first is self._news:  # from here on it is sent
            self._news = None
        if isinstance(first, int):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [first]))
            self._socket.sendmsg([bytes([1])], [rights], socket.MSG_DONTWAIT)  # as `recv_handle` expects it
            os.close(first)
        else:
            sent = self._socket.send(first, socket.MSG_DONTWAIT)
            if sent < len(first):
                self._waiting[0] = first[sent:]
                return
        self._waiting.popleft()

    def close(self) -> None:
        """What waits is not sent. Safe to call again."""
        with Held(), self.lock:
            self.let_go()

    def let_go(self) -> None:
        """Closes it in a copy of the program, where no other thread is, and a lock may be held for good."""
        super().close()
        self._socket.close()
        while self._waiting:
            if isinstance(waiting := self._waiting.popleft(), int):
                os.close(waiting)
