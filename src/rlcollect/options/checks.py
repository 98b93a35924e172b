"""How options are declared, and what values they may have."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcollect.errors import OptionError

__all__ = ["flag", "key_of", "keys_of", "option", "positive", "seconds", "state", "switch", "takes", "value_of_worker"]


def option(doc: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with its description; without a default it has to be given."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def positive(name: str, value: object) -> int:
    """`value` as a positive int, whatever integer type it came as."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{name} must be a positive integer, not {value!r}.")
    return number


def flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}.")


def switch(name: str, value: Any) -> dict[str, Any] | None:
    """The arguments of something that is switched on, by True or by giving them; None: it is off."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be True, False or a mapping of arguments, not {value!r}.")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise OptionError(f"{name} takes arguments by name, not {wrong[0]!r}.")
    return dict(value)


def state(name: str, value: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """State by key, as tensors."""
    if value is None:
        return {}
    if not isinstance(value, Mapping | TensorDictBase):
        raise OptionError(f"{name} takes a mapping from keys to tensors, not {value!r}.")
    if isinstance(value, TensorDictBase):
        value = dict(value.items(True, True))
    keys = keys_of(name, value)
    try:
        return {key: torch.as_tensor(tensor) for key, tensor in zip(keys, value.values(), strict=True)}
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"{name} takes a mapping from keys to tensors; {value!r} came.") from error


def keys_of(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Keys as tuples; a single string is one key."""
    if not isinstance(value, Iterable):
        raise OptionError(f"{name} takes keys, strings or tuples of strings, not {value!r}.")
    keys = [value] if isinstance(value, str) else list(value)
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if not (isinstance(parts, tuple) and parts and all(isinstance(part, str) for part in parts)):
            raise OptionError(f"{name} takes strings or tuples of strings, not {key!r}.")
    return tuple((key,) if isinstance(key, str) else key for key in keys)


def key_of(name: str, value: Any) -> tuple[str, ...]:
    """One key, as a tuple."""
    parts = (value,) if isinstance(value, str) else value
    if not (isinstance(parts, tuple) and parts and all(isinstance(part, str) for part in parts)):
        raise OptionError(f"{name} must be a key, a string or a tuple of strings, not {value!r}.")
    return parts


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a callable can be called with so many positional arguments, as far as can be known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def seconds(name: str, value: Any) -> None:
    """A positive number."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        raise OptionError(f"{name} must be a positive number of seconds, or None, not {value!r}.")


def value_of_worker(name: str, given: Any, worker: int, workers: int) -> Any:
    """One of several values, if there are several."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) != workers:
        raise OptionError(f"{name} is a list of {len(given)}, and there are {workers} workers.")
    return given[worker]
