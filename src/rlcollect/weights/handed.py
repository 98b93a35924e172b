"""Weights that one thread hands to another, in the same process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcollect.layout import Key

__all__ = ["Handed"]


class Handed:
    """Keeps what was handed over last, until it is taken. See `weights.ends.Receiver`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Key, torch.Tensor] = {}
        self._version: int | None = None

    def hand(self, tensors: Mapping[Key, torch.Tensor], version: int) -> None:
        """Makes these the newest; those that are not among them stay as they are.

        Args:
            tensors: by key; what the caller does to them afterwards is not seen.
            version: of them.
        """
        copied = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        with self._lock:
            self._waiting.update(copied)
            self._version = version

    def accept(self, content: Any, attached: Sequence[Any]) -> None:
        """See `Receiver`: nothing comes by message."""

    def is_behind(self) -> bool:
        """See `Receiver`."""
        return self._version is not None

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """See `Receiver`."""
        with self._lock:
            waiting, version = self._waiting, self._version
            self._waiting, self._version = {}, None
        with torch.no_grad():
            for key, tensor in waiting.items():
                for target in targets.get(key, ()):
                    target.copy_(tensor)
        return version
