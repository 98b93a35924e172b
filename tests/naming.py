"""Names for parameters that are the same in every process."""

from __future__ import annotations

import re


def named(value: object) -> str:
    """Its repr, without the address that some have."""
    return re.sub(r" at 0x[0-9a-f]*", "", repr(value))
