"""The signature and the docstring of a collector, from where its options are declared."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from rlcollect.options import option_fields

__all__ = ["described", "signature_of"]


def signature_of(kinds: Sequence[type]) -> inspect.Signature:
    """That of a constructor that takes these value objects' options."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("create_env_fn", positional),
        inspect.Parameter("policy", positional, default=None),
    ]
    for name, field in option_fields(kinds).items():
        default = field.default if _has_default(field) else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=field.type))
    return inspect.Signature(parameters)


def described(kinds: Sequence[type]) -> str:
    """Their options, one a line."""
    lines = []
    for name, field in option_fields(kinds).items():
        default = f" (default: {field.default!r})" if _has_default(field) else ""
        lines.append(f"    {name}{default}: {field.metadata['doc']}")
    return "\n".join(lines)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING
