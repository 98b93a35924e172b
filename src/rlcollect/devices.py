"""Where things are: devices resolved once, and what moves tensors between the host and a policy's device.

The memory of a rollout lies where environments make their frames: on the host, or on a simulator's device. A policy on
another device is called through a `Transfer`: what it is shown goes there, what it wrote comes back, and the step loop
knows nothing of it. What the package does with CUDA is in `CudaCopies`, in `rollout.seeding` (the random state) and in
`rollout.policy.intake` (graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlcollect.errors import OptionError

__all__ = ["CPU", "Copies", "CudaCopies", "Placement", "PlainCopies", "Transfer", "copies_for", "device_of", "resolve"]

CPU = torch.device("cpu")
DeviceLike = torch.device | str | int


def device_of(name: str, value: DeviceLike) -> torch.device:
    """The device that an option names, with its index.

    Raises:
        OptionError: torch has no such device here.
    """
    try:
        return torch.empty(0, device=value).device
    # each for another kind of wrong
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"{name}={value!r} is no device that torch has here: {error}") from error


@dataclass(frozen=True)
class Placement:
    """Where the parts of a collector are.

    Attributes:
        policy: where the policy is to compute; None: where it is.
        storing: where batches are delivered; None: where they are made.
        env: where environments are said to make their frames; None: wherever they do.
    """

    policy: torch.device | None
    storing: torch.device | None
    env: torch.device | None = None


def resolve(
    device: Any = None,
    policy_device: Any = None,
    env_device: Any = None,
    storing_device: Any = None,
) -> Placement:
    """`device` stands for the policy's and the batches' where these are not given: environments are where they are.

    All are as `device_of` gives them, or None.
    """
    return Placement(policy_device or device, storing_device or device, env_device)


class Copies(Protocol):
    """Moves tensors between the host and another device."""

    def to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the policy is shown, there. The host's tensors may be written to as soon as `to_host` returned."""

    def to_host(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the policy wrote, here; whole when this returns, and kept until the next call.

        What is on the host already, or is no tensor, comes back as it is.
        """


class PlainCopies:
    """Copies that are done when they return: for any device, and for CUDA with `no_cuda_sync`.

    Args:
        device: the policy's.
        home: the environments'.
    """

    def __init__(self, device: torch.device, home: torch.device = CPU) -> None:
        self._device = device
        self._home = home

    def to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Copies`."""
        return tuple([tensor.to(self._device) for tensor in tensors])

    def to_host(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Copies`."""
        return tuple([value.to(self._home) if isinstance(value, torch.Tensor) else value for value in outputs])


class CudaCopies:
    """Copies through pinned memory, which do not wait for each other; one event tells when all have arrived.

    Everything runs in the order of the current stream: the policy starts when its input is there, and the copies back
    when it is done. The host waits once a step, for the event after the last copy back; by then the copies to the
    device are done too, so that their pinned memory may be written to again.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []

    def to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Copies`."""
        self._sent = _pinned_as(tensors, self._sent)
        for pinned, tensor in zip(self._sent, tensors, strict=True):
            pinned.copy_(tensor)
        return tuple([pinned.to(self._device, non_blocking=True) for pinned in self._sent])

    def to_host(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Copies`."""
        places = [place for place, value in enumerate(outputs) if _is_on(value, self._device)]
        tensors = tuple([outputs[place] for place in places])
        self._received = _pinned_as(tensors, self._received)
        for pinned, tensor in zip(self._received, tensors, strict=True):
            pinned.copy_(tensor, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._device))
        self._event.synchronize()
        arrived = list(outputs)
        for place, pinned in zip(places, self._received, strict=True):
            arrived[place] = pinned
        return tuple(arrived)


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _pinned_as(tensors: tuple[torch.Tensor, ...], pinned: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pinned tensors of these shapes: those there are, if they fit."""
    forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
    if forms == [(tensor.shape, tensor.dtype) for tensor in pinned]:
        return pinned
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in forms]


def copies_for(device: torch.device, *, no_cuda_sync: bool, home: torch.device = CPU) -> Copies | None:
    """What moves tensors from where the environments are to a device and back; None where that is the same."""
    if device == home:
        return None
    pinned = device.type == "cuda" and home == CPU and not no_cuda_sync
    return CudaCopies(device) if pinned else PlainCopies(device, home)


class Transfer:
    """Makes a call on a device one on the host.

    Args:
        device: where the call computes.
        copies: how tensors get there and back; None: they are there.
    """

    def __init__(self, device: torch.device = CPU, copies: Copies | None = None) -> None:
        self.device = device
        self._copies = copies

    @property
    def is_needed(self) -> bool:
        """Whether anything is moved."""
        return self._copies is not None

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor on the device."""
        return tensor.to(self.device)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that takes and gives tensors on the host."""
        if self._copies is None:
            return call
        to_device, to_host = self._copies.to_device, self._copies.to_host

        def moved(*tensors: torch.Tensor) -> Any:
            result = call(*to_device(tensors))
            return to_host(result) if isinstance(result, tuple) else to_host((result,))[0]

        return moved
