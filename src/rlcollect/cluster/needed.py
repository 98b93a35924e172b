"""What is said where Ray is needed and not installed. Does not import it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needed"]


@contextmanager
def needed(by: str) -> Iterator[None]:
    """Around an import of a room of Ray's.

    Args:
        by: who needs it.

    Raises:
        ImportError: Ray is not installed; says how to have it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(f"{by} needs Ray, which is not installed here: pip install 'rlcollect[ray]'.") from error
