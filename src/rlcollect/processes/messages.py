"""What crosses between a pool and its workers: requests one way, one reply to each the other way."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from rlcollect.processes.crossing import packed
from rlcollect.processes.relay import Failure

__all__ = ["Beside", "Notice", "Reply", "Request"]


@dataclass(frozen=True)
class Request:
    """Something to be done.

    Attributes:
        id: unique in its pool.
        body: what is to be done, pickled.
        in_turn: whether it waits for those that came before; else it comes first among those that wait.
        descriptors: how many file descriptors follow.
        is_news: whether the next of its kind makes up for it.
    """

    id: int
    body: bytes
    in_turn: bool
    descriptors: int = 0
    is_news: bool = False

    @classmethod
    def of(cls, number: int, command: Any, *, in_turn: bool, descriptors: int = 0) -> Request:
        """One that has a command done: by value, unless it has `is_plain`.

        Raises:
            OptionError: it cannot be pickled.
        """
        is_plain = getattr(command, "is_plain", False)
        body = pickle.dumps(command) if is_plain else packed(command, getattr(command, "title", "command"))
        return cls(number, body, in_turn, descriptors, is_news=getattr(command, "is_news", False))


@dataclass(frozen=True)
class Notice:
    """A warning that was given in a worker.

    Attributes:
        category: its class.
        text: its text.
    """

    category: type[Warning]
    text: str


@dataclass(frozen=True)
class Reply:
    """What came of a request.

    Attributes:
        id: the request's.
        worker: whose it is.
        value: the result; None with a failure.
        failure: what was raised.
        notices: the warnings that were given.
        beside: what came beside it, and not by value; None: nothing did.
    """

    id: int
    worker: int
    value: Any
    failure: Failure | None
    notices: tuple[Notice, ...] = ()
    beside: Any = None


@dataclass(frozen=True)
class Beside:
    """A result, with bytes that are to travel beside it, where a pool has a way for them.

    Attributes:
        value: the result.
        data: uint8.
    """

    value: Any
    data: Any
