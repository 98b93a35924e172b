"""What is looked at beside the step loop: that actions are actions, and that there is something to draw from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlcollect.errors import PolicyError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, show_key
from rlcollect.rollout.policy.distributions import Sampling

__all__ = ["ActionCheck", "first_undrawable"]

Array = np.ndarray[Any, Any]


class ActionCheck:
    """Holds the actions of a step against what the space allows.

    Args:
        codec: how actions are stored.
    """

    def __init__(self, codec: ActionForm) -> None:
        self._parts = list(zip(codec.leaves, codec.parts, strict=True))

    def __call__(self, actions: Sequence[Array], lanes: Array | None = None) -> None:
        """Checks actions, `[N, *shape]` a leaf.

        Args:
            actions: of all lanes.
            lanes: bool `[N]`, which are looked at; None: all.

        Raises:
            PolicyError: NaN, or out of the range of a Discrete, MultiDiscrete or MultiBinary space; names the lane.
        """
        for values, (leaf, space) in zip(actions, self._parts, strict=True):
            wrong = _wrong(values, space)
            bad = np.zeros(len(values), bool) if wrong is None else wrong.reshape(len(values), -1).any(-1)
            if lanes is not None:
                bad &= lanes
            if bad.any():
                lane = int(bad.argmax())
                raise PolicyError(f"lane {lane}: {show_key(leaf.key)} is {values[lane].tolist()}, not in {space}.")


def _wrong(values: Array, space: spaces.Space[Any]) -> Any:
    """Where an action is none of the space; None for spaces that hold every number."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and values.dtype.kind == "f":
        return values != np.floor(values)
    if isinstance(space, spaces.Discrete):
        return (values < space.start) | (values >= space.start + space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return (values < space.start) | (values >= space.start + space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return (values != 0) & (values != 1)
    return np.isnan(values) if values.dtype.kind == "f" else None


def first_undrawable(
    samplings: Sequence[Sampling], memory: Mapping[Key, torch.Tensor], starts: Array, made: int, *, batched: bool
) -> tuple[int, str] | None:
    """The first step of a rollout at which nothing can be drawn from a distribution, and what to say of it.

    Args:
        samplings: what was drawn from which parameters.
        memory: the rollout's tensors, `[N, T, *shape]`, or `[T, *shape]` where not `batched`.
        starts: int64 `[N]`, the first step of each lane in which the policy acted.
        made: steps of the rollout.
        batched: whether there is a dimension of lanes.
    """
    found = []
    for sampling in samplings:
        tensors = [memory[key] for key in sampling.params]
        frames = [(tensor if batched else tensor.unsqueeze(0))[:, :made] for tensor in tensors]
        if (wrong := _undrawable(sampling, frames, starts)) is not None:
            found.append(wrong)
    return min(found, default=None)


def _undrawable(sampling: Sampling, frames: Sequence[torch.Tensor], starts: Array) -> tuple[int, str] | None:
    assert sampling.is_valid is not None
    if starts.any():  # zeros stand where chance acted
        pieces = [[frame[lane, start:] for frame in frames] for lane, start in enumerate(starts.tolist())]
    else:
        pieces = [list(frames)]
    if all(sampling.is_valid(*piece) for piece in pieces):
        return None
    for t in range(int(starts.min()), frames[0].shape[1]):
        for lane in np.flatnonzero(starts <= t).tolist():
            values = [frame[lane, t] for frame in frames]
            if not sampling.is_valid(*values):
                return t, f"lane {lane}: {_told(sampling, values)}"
    return None


def _told(sampling: Sampling, values: Sequence[torch.Tensor]) -> str:
    """What is wrong with the parameters of one frame."""
    named = dict(zip(map(show_key, sampling.params), values, strict=True))
    nan = [name for name, value in named.items() if value.is_floating_point() and bool(value.isnan().any())]
    shown = ", ".join(f"{name} {value.tolist()}" for name, value in named.items())
    what = f"{nan[0]} is NaN, and no action can be drawn from it" if nan else f"no action can be drawn from {shown}"
    return f"{what}. Look at the policy's weights (a learning rate too high?) and at its observations."
