"""Where frames are made and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcollect.devices import Placement, device_of, resolve
from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, option, positive, value_of_worker

__all__ = ["DEVICES", "Where"]

DEVICES = ("device", "policy_device", "env_device", "storing_device")


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the frames are made and kept: lanes, environments' arguments, devices."""

    num_envs: int | None = option(
        "Lanes made of one maker: batches are [N, T]. None: one lane, and batches are [T]; environments that hold "
        "several lanes have their own.",
        None,
    )
    env_workers: int | None = option(
        "Processes that step the lanes, as many of them each (`ProcessVectorEnv`), while the policy is called here, "
        "for many lanes at a time. None: the lanes are stepped here.",
        None,
    )
    env_groups: int = option(
        "Groups into which `env_workers` are divided: the policy acts for one while the others step.", 1
    )
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = option(
        "Keyword arguments for the maker (or for `gymnasium.make`): one mapping, or one for each lane (where there are "
        "several workers: for each worker).",
        None,
    )
    masked_reset: bool | None = option(
        'Whether a vector environment resets the lanes that `options={"reset_mask": mask}` names, and leaves the '
        "others untouched. None: as is known of Gymnasium's own.",
        None,
    )
    device: torch.device | str | int | Sequence[Any] | None = option(
        "Stands for `policy_device` and `storing_device` where these are not given. Where there are several workers, "
        "each of the four may be a list, of one device a worker.",
        None,
    )
    policy_device: torch.device | str | int | Sequence[Any] | None = option(
        "Where the policy computes. A module whose weights are elsewhere is copied there, and "
        "`update_policy_weights_()` copies them again. None: where its weights are.",
        None,
    )
    env_device: torch.device | str | int | Sequence[Any] | None = option(
        "Where environments make their frames, to be held against where they do. Nothing moves them.", None
    )
    storing_device: torch.device | str | int | Sequence[Any] | None = option(
        "Device of the delivered batches. None: where they were made.", None
    )
    no_cuda_sync: bool = option(
        "Copy to and from a CUDA policy plainly, one tensor after the other, in the place of pinned copies that an "
        "event waits for.",
        False,
    )

    placement: Placement = dataclasses.field(init=False, repr=False, default=Placement(None, None))

    def __post_init__(self) -> None:
        for name in ("num_envs", "env_workers", "env_groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive(name, getattr(self, name)))
        if self.env_groups > 1 and self.env_workers is None:
            raise OptionError(f"env_groups={self.env_groups} needs env_workers=: the processes that are divided.")
        given = self.create_env_kwargs
        each = [] if given is None else [given] if isinstance(given, Mapping) else given
        if not isinstance(each, Sequence) or not all(isinstance(kw, Mapping) for kw in each):
            raise OptionError(f"create_env_kwargs takes a mapping, or a sequence of one a lane, not {given!r}.")
        flag("no_cuda_sync", self.no_cuda_sync)
        if self.masked_reset is not None:
            flag("masked_reset", self.masked_reset)
        for name in DEVICES:
            device = getattr(self, name)
            if isinstance(device, list | tuple):
                devices = tuple(None if each is None else device_of(name, each) for each in device)
                object.__setattr__(self, name, devices)
            elif device is not None:
                object.__setattr__(self, name, device_of(name, device))
        if not self.is_split:
            object.__setattr__(self, "placement", resolve(*(getattr(self, name) for name in DEVICES)))

    @property
    def is_split(self) -> bool:
        """Whether a device is given for each of several workers."""
        return any(isinstance(getattr(self, name), tuple) for name in DEVICES)

    def of_worker(self, worker: int, workers: int, *, own_kwargs: bool) -> Where:
        """What holds for one of several workers.

        Args:
            worker: which.
            workers: how many there are.
            own_kwargs: whether several `create_env_kwargs` are one for each worker; else they are one for each lane.

        Raises:
            OptionError: a list of another length.
        """
        names = [*DEVICES, *(["create_env_kwargs"] if own_kwargs else [])]
        each: dict[str, Any] = {name: getattr(self, name) for name in names}
        own: dict[str, Any] = {name: value_of_worker(name, value, worker, workers) for name, value in each.items()}
        return dataclasses.replace(self, **own)
