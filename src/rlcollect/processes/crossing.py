"""Objects on their way to another process: pickled by value where need be, with errors that name what cannot be.

Functions and classes of the program's main module, lambdas, closures and partials cross by value, so that no worker
has to run that module again.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar

import cloudpickle

from rlcollect.errors import OptionError

__all__ = ["Parcel", "opened", "packed", "unpacked"]

DEPTH = 4  # how far the search for a culprit goes


def packed(value: Any, name: str) -> bytes:
    """A value as bytes.

    Args:
        value: what is to cross.
        name: what the user calls it, for errors.

    Raises:
        OptionError: it cannot be pickled; names the part that cannot.
    """
    try:
        data = _dumped(value)
    except Exception as error:
        path, culprit = _culprit(value, name)
        raise OptionError(
            f"{name}={value!r} cannot be sent to a worker process: {path} is {culprit!r}, which cannot be pickled "
            f"({type(error).__name__}: {error}). Make it inside the function, where it is needed."
        ) from error
    return data


@dataclass(frozen=True)
class Parcel:
    """A value on its way, opened where it is wanted."""

    data: bytes

    @classmethod
    def of(cls, value: Any) -> Parcel:
        """A parcel with this value."""
        return cls(_dumped(value))

    def opened(self) -> Any:
        """The value."""
        return unpacked(self.data)


def opened(answer: Any) -> Any:
    """An answer, out of its parcel if it came in one."""
    return answer.opened() if isinstance(answer, Parcel) else answer


def unpacked(data: bytes) -> Any:
    """The value again."""
    return pickle.loads(data)


def _code(code: CodeType) -> Any:
    """As cloudpickle has it, and with its file: a traceback over there then shows the user's own lines."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # has no types
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    with _main_by_value():
        _Pickler(file).dump(value)
    return file.getvalue()


@contextmanager
def _main_by_value() -> Iterator[None]:
    """In a process that was spawned the program's main module has another name, which cloudpickle does not know."""
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _can_cross(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:  # whatever it raises, it does not cross
        return False
    return True


def _culprit(value: Any, name: str) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and the way to it."""
    for _ in range(DEPTH):
        inner = next(((path, part) for path, part in _parts(value) if not _can_cross(part)), None)
        if inner is None:
            break
        name, value = f"{name}{inner[0]}", inner[1]
    return name, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        for free, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield f" -> {free}", cell.cell_contents
            except ValueError:  # it is not set yet
                continue
        for used in value.__code__.co_names:  # more than are used: those that can cross do no harm
            if used in value.__globals__:
                yield f" -> {used}", value.__globals__[used]
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".args[{place}]", part) for place, part in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", part) for key, part in value.keywords.items())
        yield ".func", value.func
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    else:
        yield from ((f".{key}", part) for key, part in vars(value).items()) if hasattr(value, "__dict__") else ()
