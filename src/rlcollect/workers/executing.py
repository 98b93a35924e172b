"""What a path names, of an object: attributes and indices, one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcollect.errors import OptionError

__all__ = ["executed"]

STEP = re.compile(r"""\.?([^\W\d]\w*)|\[(-?\d+)\]|\[(?:'([^']*)'|"([^"]*)")\]""")


def executed(holder: Any, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What stands at the end of a path, called with these arguments; itself, if it cannot be called.

    Args:
        holder: where the path begins.
        path: `"name"`, `"name.other"`, `"name[0]['key'].method"`.
        args: for the call.
        kwargs: the same.

    Raises:
        OptionError: it is no path, leads nowhere, or ends at what takes no arguments.
    """
    found, place = holder, 0
    while place < len(path):
        step = STEP.match(path, place)
        if step is None:
            raise OptionError(f'A path is made of attributes and indices ("envs[0].spec"), not {path!r}.')
        found, place = _next(found, step, f"{path!r}: there is no {path[: step.end()]!r}"), step.end()
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise OptionError(f"{path!r} is {found!r}, which is not called, and takes no arguments.")
    return found


def _next(holder: Any, step: re.Match[str], lacking: str) -> Any:
    name, number, *keys = step.groups()
    try:
        if name is not None:
            return getattr(holder, name)
        return holder[int(number)] if number is not None else holder[next(key for key in keys if key is not None)]
    except (AttributeError, LookupError, TypeError) as error:
        raise OptionError(f"{lacking}: {error}") from error
