"""Bytes in the object store of a cluster: put there once, seen without a copy wherever they are fetched."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

__all__ = ["fetched", "put", "seen"]

Array = np.ndarray[Any, Any]


def put(data: Array) -> Any:
    """Puts bytes into the store; a reference to them. They are there for as long as somebody has one."""
    return ray.put(data)


def fetched(reference: Any) -> Array:
    """The bytes that a reference is to, as they lie in the store of this node: not to be written to.

    Raises:
        ray.exceptions.RayError: they are lost.
    """
    return seen(ray.get(reference))


class _Bytes:
    """An array's memory, for who takes only what can be written to; keeps the array."""

    def __init__(self, data: Array) -> None:
        self._data = data
        self.__array_interface__ = {
            "version": 3,
            "shape": (data.nbytes,),
            "typestr": "|u1",
            "data": (data.ctypes.data, False),
        }


def seen(data: Array) -> Array:
    """The same memory, which torch takes without a warning. Nobody is to write to it: torch has no such promise."""
    return np.asarray(_Bytes(data))
