"""Modules and attributes that the user names: `module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import traceback
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rlcollect.errors import RlcollectError

__all__ = ["attribute_of", "imported"]


def imported(name: str, option: str, error_kind: type[RlcollectError], ending: str = "") -> ModuleType:
    """Runs what stands in a module, as Python does.

    Args:
        name: of the module.
        option: that named it, for errors.
        error_kind: of what is raised.
        ending: what follows the module's name in the option.

    Raises:
        RlcollectError: of that kind: there is no such module, or running it fails.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise error_kind(_failed(name, option, error)) from error  # it was found, and misses something itself
        hint = f". Leave out the .py: {name[:-3]}{ending}" if name.endswith(".py") else ""
        raise error_kind(
            f"{option}there is no module {error.name!r} in {Path.cwd()} or where Python looks for modules{hint}"
        ) from error
    except Exception as error:
        raise error_kind(_failed(name, option, error)) from error


def _failed(name: str, option: str, error: Exception) -> str:
    """Shows the user's own lines, and ends in what happened."""
    own = error.__traceback__
    while own is not None and (own.tb_frame.f_code.co_filename == __file__ or _is_importlib(own.tb_frame.f_code)):
        own = own.tb_next
    told = "".join(traceback.format_exception(type(error), error, own))
    return f"{option}importing {name!r} failed\n{told}importing {name!r}: {type(error).__name__}: {error}"


def _is_importlib(code: CodeType) -> bool:
    return code.co_filename == importlib.__file__ or code.co_filename.startswith("<frozen importlib")


def attribute_of(module: ModuleType, path: str, option: str, error_kind: type[RlcollectError]) -> Any:
    """What stands in a module under a name, or a name in a name.

    Raises:
        RlcollectError: of that kind: nothing does.
    """
    value: Any = module
    for name in path.split("."):
        if not hasattr(value, name):
            owner = f"module {module.__name__!r}" if value is module else f"{value!r}"
            known = [known for known in dir(value) if not known.startswith("_")]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known) or 'nothing'}."
            raise error_kind(f"{option}{owner} has no {name!r}. {hint}")
        value = getattr(value, name)
    return value
