"""`MultiStep`: transitions of one step made into transitions of several.

Knows the keys of a batch and nothing of who made it. A loop over n, none over frames.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlcollect.errors import InvalidBatchError, OptionError
from rlcollect.layout import Key, show_key
from rlcollect.memory.marks import STEPS, Marks
from rlcollect.memory.rows import Taken
from rlcollect.options.checks import key_of, positive

__all__ = ["MultiStep"]


class MultiStep(nn.Module):
    """Makes each frame's transition one of n steps: n rewards in one, and what came after the last of them.

    For the frame at t of a lane, n is `n_steps`, or less where the episode ends before (`("next", "done")`), where it
    is cut (the next row's id is another, or the mask says that it is no frame), or where the batch ends: the frames of
    the next batch are not there yet. Then:

    - `("next", "reward")` is the sum of `gamma**k` times the reward at t + k, over k from 0 to n - 1;
    - everything else under `"next"`, flags too, is that of frame t + n - 1: `gamma**n * (1 - terminated)` is what the
      value of the next observation counts, wherever the sum was ended;
    - `"steps_to_next_obs"`, int64 `[*batch_size, 1]`, is n;
    - `("next", "original_reward")` is the reward as it was.

    With `n_steps=1` these two keys are all that is new. Rows that are no frames stay as they are, with n = 0.
    Afterwards done stands on several rows of an episode: `split_trajectories` goes first (in a collector it does).

    As in TorchRL's `MultiStep`, `n_steps` counts rewards, and fewer are summed at the end of a batch. Other than there,
    flags go along with the observation that they belong to (no `"nonterminal"` is needed), ids and masks end the sum
    too, and n has a last dimension.

    Args:
        gamma: discount of one step, in (0, 1].
        n_steps: the most steps, at least 1.
        reward_keys: rewards, by their keys under `"next"`. Each keeps its own `original_...` beside it.
        prefix: under which key ids and mask stand.
        mask_key: where else a mask may stand, as `split_trajectories` writes it.

    Raises:
        OptionError: one of them makes no sense.

    Example:
        >>> from tensordict import TensorDict
        >>> reward, done = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([False, True, False])
        >>> batch = TensorDict({"next": {"reward": reward, "done": done, "x": torch.tensor([1, 2, 3])}}, [3])
        >>> multi = MultiStep(gamma=0.5, n_steps=2)(batch)
        >>> multi["next", "reward"], multi["next", "x"], multi["steps_to_next_obs"].flatten()
        (tensor([2., 2., 4.]), tensor([2, 2, 3]), tensor([2, 1, 1]))
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Iterable[str | Key] = ("reward",),
        prefix: str = "collector",
        mask_key: str | Key | None = None,
    ) -> None:
        super().__init__()
        self.gamma = _discount(gamma)
        self.n_steps = positive("n_steps", n_steps)
        self.reward_keys = _keys(reward_keys)
        self.prefix = prefix
        masks = (prefix, "mask"), None if mask_key is None else key_of("mask_key", mask_key)
        self._masks = [key for key in masks if key is not None]

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """A new batch; the one given is only read. All under `"next"` is new; the rest, which stays, is not copied.

        Args:
            batch: `[T]`, `[N, T]` or `[B, N, T]`, time last; padded trajectories `[n_traj, T_max]` with their mask.

        Raises:
            InvalidBatchError: time is not last, there are neither ids nor done, a reward is missing or not of a
                floating type, or the batch went through a `MultiStep` before.
        """
        marks = Marks.of(batch, self.prefix, *self._masks)
        rewards = self._rewards(batch)
        goes_on = _goes_on(marks, batch.batch_size)
        steps = _left(goes_on).clamp_max(self.n_steps)
        following = _moved(batch.get("next").exclude(*rewards), steps, batch.names)
        most = int(steps.max()) if steps.numel() else 1
        for key, reward in rewards.items():
            following.set(key, _summed(reward, goes_on, self.gamma, most))
            following.set(_original(key), reward.clone())
        made = batch.copy()
        made.set("next", following)
        made.set(STEPS, (steps if marks.real is None else steps.where(marks.real, 0)).unsqueeze(-1))
        return made

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"

    def _rewards(self, batch: TensorDictBase) -> dict[Key, torch.Tensor]:
        rewards = {key: batch.get(("next", *key), None) for key in self.reward_keys}
        for key, reward in rewards.items():
            if not (isinstance(reward, torch.Tensor) and reward.is_floating_point()):
                came = reward.dtype if isinstance(reward, torch.Tensor) else type(reward).__name__
                raise InvalidBatchError(
                    f"expected a reward, a floating tensor, under {show_key(('next', *key))}: {came}"
                )
        return rewards


def _goes_on(marks: Marks, size: torch.Size) -> torch.Tensor:
    """Whether the next row of the lane is the next frame of the same episode, `[*size]`."""
    goes_on = torch.ones(size, dtype=torch.bool, device=marks.device)
    goes_on[..., -1:] = False
    if marks.done is not None:
        goes_on &= ~marks.done
    if marks.ids is not None:
        goes_on[..., :-1] &= marks.ids[..., 1:] == marks.ids[..., :-1]
    if marks.real is not None:
        goes_on &= marks.real
        goes_on[..., :-1] &= marks.real[..., 1:]
    return goes_on


def _left(goes_on: torch.Tensor) -> torch.Tensor:
    """How many frames there are from each to the last that can be reached, both counted: `[*size]`, int64."""
    if not goes_on.numel():
        return torch.ones_like(goes_on, dtype=torch.int64)
    time = torch.arange(goes_on.shape[-1], device=goes_on.device)
    ends = time.where(~goes_on, goes_on.shape[-1])
    return ends.flip(-1).cummin(-1).values.flip(-1) - time + 1


def _moved(following: TensorDictBase, steps: torch.Tensor, names: list[str | None]) -> TensorDictBase:
    """Each row's last step in the place of its first."""
    rows = torch.arange(steps.numel(), device=steps.device).reshape(steps.shape)
    return Taken(steps.ndim, steps.shape, names, (rows + steps - 1).reshape(-1))(following)


def _summed(reward: torch.Tensor, goes_on: torch.Tensor, gamma: float, steps: int) -> torch.Tensor:
    """The discounted sum over as many steps as can be made, `steps` at most; of what is not reached nothing comes in.

    Summed in double precision, from the last to the first.
    """
    time = goes_on.ndim - 1
    goes_on = goes_on.to(reward.device).reshape(*goes_on.shape, *[1] * (reward.ndim - goes_on.ndim))
    one = reward.to(torch.float32 if reward.device.type == "mps" else torch.float64, copy=True)
    total = one
    for _ in range(steps - 1):
        total = one + gamma * total.roll(-1, time).where(goes_on, 0)
    return total.to(reward.dtype)


def _original(key: Key) -> Key:
    return (*key[:-1], f"original_{key[-1]}")


def _discount(gamma: Any) -> float:
    if isinstance(gamma, bool) or not isinstance(gamma, numbers.Real) or not 0 < float(gamma) <= 1:
        raise OptionError(f"gamma must be a number in (0, 1], not {gamma!r}.")
    return float(gamma)


def _keys(reward_keys: Any) -> tuple[Key, ...]:
    if not isinstance(reward_keys, Iterable) or isinstance(reward_keys, str) or not (keys := list(reward_keys)):
        raise OptionError(f"reward_keys must be a list of keys under 'next', not {reward_keys!r}.")
    return tuple(key_of("reward_keys", key) for key in keys)
