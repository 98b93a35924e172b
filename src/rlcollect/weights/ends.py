"""The two ends of the way that weights take: what a scheme has to bring, and nothing of models.

A sender is where versions are published; a receiver is in each worker. Between them go messages, which whoever made the
sender passes on, in order, with file descriptors: a collector by the pipes of its workers, a scheme that is used by
itself by pipes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlcollect.layout import Key

__all__ = ["Hand", "Message", "Receiver", "Sender"]


@dataclass(frozen=True)
class Message:
    """What goes from a sender to a receiver.

    Attributes:
        content: what the receiver understands; it is pickled on its way.
        attached: what goes with it; file descriptors stay the sender's to close.
    """

    content: Any
    attached: Sequence[Any] = ()


Hand = Callable[[int, Message], None]
"""Passes a message on to a worker, without waiting for it."""


class Sender(Protocol):
    """Publishes versions of tensors, to all workers or to some."""

    def prepare(self, workers: Sequence[int] | None) -> None:
        """Makes ready what a publish for these needs, so that it cannot fail for lack of it; None: for all.

        Raises:
            SharedMemoryError: there is not enough.
        """

    def publish(self, tensors: Mapping[Key, torch.Tensor], version: int, workers: Sequence[int] | None = None) -> None:
        """Makes these the newest. What the caller does to them afterwards is not seen.

        Args:
            tensors: by key, of the shapes that were agreed on; those that are not among them stay as they are.
            version: of them.
            workers: for whom; None: for all.
        """

    def welcome(self, worker: int) -> Message | None:
        """What a worker that comes in the place of another is to be told first, to have the newest."""

    def add(self, workers: int) -> None:
        """There are so many more, which are sent the newest that was published for all.

        Raises:
            OptionError: this way has no room for more.
        """

    def begin_anew(self, keep: Collection[Key], version: int) -> None:
        """Nothing that was published so far is wanted, but for these tensors.

        Args:
            keep: their keys.
            version: that they have now.
        """

    def let_go(self) -> None:
        """Nothing will be published: keeps no memory. Safe to call again."""


class Receiver(Protocol):
    """Takes the newest version there is."""

    def accept(self, content: Any, attached: Sequence[Any]) -> None:
        """A message of the sender's; file descriptors that go with it are the receiver's to close."""

    def is_behind(self) -> bool:
        """Whether there is something newer than what was taken last. Costs next to nothing."""

    def take(self, targets: Mapping[Key, Sequence[torch.Tensor]]) -> int | None:
        """Copies the newest tensors to where they are to be; all of one version, whatever happens meanwhile.

        Args:
            targets: for each key the tensors that are to hold it. Nothing may compute with them meanwhile.

        Returns:
            The version; None: there is nothing newer.
        """
