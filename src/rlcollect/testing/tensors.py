"""A probe on torch tensors: lanes stepped by one call, as simulators on a GPU do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlcollect.errors import OptionError
from rlcollect.testing.environments import End

__all__ = ["TensorTagged"]


class TensorTagged(VectorEnv[Any, Any, Any]):
    """Observes lane, episode and step of each lane, as tensors; resets ended lanes in the step itself (SAME_STEP).

    What an ended lane had come to is in `info["final_obs"]`, of the form of the observation; rows of lanes that go on
    hold NaN there. Tensors are new with every call. `reset(options={"reset_mask": mask})` resets those lanes alone.

    Args:
        lengths: steps of an episode, by lane.
        end: which flags the last step raises.
        nested: whether the observation is a dict, `{"policy": {"tag": [N, 3]}}`; else `[N, 3]`.
        device: of all tensors.
        final: the name of the last observations in the info; None: they are left out.

    Raises:
        OptionError: no lane.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        end: End = "terminated",
        nested: bool = False,
        device: torch.device | str = "cpu",
        final: Literal["final_obs", "final_observation"] | None = "final_obs",
    ) -> None:
        if not lengths:
            raise OptionError("lengths: one number a lane, of one lane at least")
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = len(lengths)
        self.device = torch.device(device)
        self.steps = 0
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_observation_space: Any = spaces.Dict({"policy": spaces.Dict({"tag": box})}) if nested else box
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._lengths = torch.tensor(list(lengths), device=self.device)
        self._flags = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}[end]
        self._nested = nested
        self._final = final
        self._episodes = torch.full((self.num_envs,), -1, device=self.device)
        self._t = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def _observe(self) -> torch.Tensor:
        lanes = torch.arange(self.num_envs, device=self.device)
        return torch.stack((lanes, self._episodes, self._t), 1).float()

    def _formed(self, tag: torch.Tensor) -> Any:
        return {"policy": {"tag": tag}} if self._nested else tag

    def _begin(self, lanes: torch.Tensor) -> None:
        self._episodes = self._episodes + lanes
        self._t = torch.where(lanes, 0, self._t)

    def reset(
        self,
        *,
        seed: Any = None,  # noqa: ARG002 - nothing is random
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode in every lane, or in those of `options["reset_mask"]`, bool `[N]`."""
        mask = (options or {}).get("reset_mask")
        self._begin(torch.ones_like(self._t, dtype=torch.bool) if mask is None else mask.to(self.device))
        return self._formed(self._observe()), {"t": self._t.clone()}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Steps every lane; the reward is the sum of its action.

        Args:
            actions: float32 `[N, 2]`.

        Returns:
            Observations, rewards `[N]`, terminated and truncated `[N]`, infos.
        """
        self.steps += 1
        self._t = self._t + 1
        ended = self._t == self._lengths
        terminated, truncated = (ended & flag for flag in self._flags)
        info: dict[str, Any] = {"t": self._t.clone()}
        if bool(ended.any()):
            final = torch.where(ended[:, None], self._observe(), torch.nan)
            if self._final is not None:
                info[self._final] = self._formed(final)
            info["final_info"] = {"t": self._t.clone()}
            self._begin(ended)
            info["t"] = self._t.clone()
        return self._formed(self._observe()), actions.sum(1), terminated, truncated, info
