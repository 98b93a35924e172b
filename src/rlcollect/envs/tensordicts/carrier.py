"""One environment, and its data from step to step: what it gave last, hidden counters and private keys included.

What it gives is written to memory at once, since it may use its tensors again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase, is_non_tensor

from rlcollect.devices import CPU
from rlcollect.envs.tensordicts.forms import Form, Source, td_key
from rlcollect.errors import EnvError
from rlcollect.layout import Key, as_key, show_key

__all__ = ["Carrier", "reset_data", "why_no_lane_resets"]

Array = np.ndarray[Any, Any]
Rows = Sequence[tuple[Any, Sequence[torch.Tensor]]]  # for each tensor: its key, and where it goes at each step


class Carrier:
    """Steps and resets an environment, and keeps its data, as TorchRL's own collector does.

    The driver calls, for each rollout: `bind(memory)`; for each window of it `view(start, stop)`, and then for each t,
    counted from the window's start, `step(t, actions)`.

    Attributes:
        env: the environment.
        device: where its frames are made.
        data: what it shows now: the TensorDict that the next action is written to.
        after: what came of the last step.
        seconds: time spent in its audited steps, the resets after them included.

    Args:
        env: the environment.
        form: what it gives and takes.
        data: what its first reset gave.
        lane: which of the actions are for it; None: all.
    """

    def __init__(self, env: Any, form: Form, data: TensorDictBase, lane: int | None) -> None:
        self.env = env
        self.data = data
        self.after = data
        self.seconds = 0.0
        self._step: Callable[[TensorDictBase], Any] = env.step_and_maybe_reset
        self.device = CPU if env.device is None or torch.device(env.device).type == "cpu" else torch.device(env.device)
        self._time = len(form.batch)
        lanes = ... if lane is None else slice(lane, lane + 1)
        self._actions = [(td_key(leaf.key), lanes, (*form.batch, *leaf.shape)) for leaf in form.actions.leaves]
        one = [int(np.prod(form.masks[key])) == 1 for key in form.ends.masks]
        self._ended = [(key, bool if alone else _any) for key, alone in zip(form.ends.done, one, strict=True)]
        self._memory: Mapping[Key, torch.Tensor] = {}
        self._rows_now: Rows = []
        self._rows_after: Rows = []
        self.record(form)

    def record(self, form: Form) -> None:
        """From now on this is what is written to memory."""
        given = [source for source in form.observed if source.leaf.key not in form.constant]
        self._form = form
        self._given: Sequence[Source] = [*given, *form.after]
        keys = [source.key for source in (*form.observed, *form.after)]
        is_flat = not form.is_loose and all(isinstance(key, str) for key in (*keys, *form.ends.done))
        self._values: Callable[[TensorDictBase], Callable[[Any], Any]] = _all_at_once if is_flat else _one_by_one

    # --- a rollout ---

    def bind(self, memory: Mapping[Key, torch.Tensor]) -> None:
        """Takes its part of the memory of the next rollout, and writes what it shows into the first row.

        Args:
            memory: `[*batch, T, *shape]` by key.
        """
        self._memory = memory
        for source in self._form.observed:
            memory[source.leaf.key].select(self._time, 0).copy_(self.data.get(source.key))

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        self._rows_after = [(source.key, self._rows(("next", *source.leaf.key), start, stop)) for source in self._given]
        self._rows_now = [
            (source.key, self._rows(source.leaf.key, start + 1, stop + 1)) for source in self._form.observed
        ]

    def _rows(self, key: Key, start: int, stop: int) -> Sequence[torch.Tensor]:
        """Where values go at these steps; beyond the last of the rollout, to where nobody looks."""
        tensor, time = self._memory[key], self._time
        end = min(stop, tensor.shape[time])
        rows = tensor.narrow(time, start, end - start).unbind(time)
        return rows if end == stop else (*rows, torch.empty_like(tensor.select(time, 0)))

    def step(self, t: int, actions: Sequence[Any]) -> bool:
        """Steps, resets what ended, and writes what came of it to row t, and what is shown now to the row after.

        Args:
            t: of the window.
            actions: of all lanes.

        Returns:
            Whether anything ended.
        """
        data = self.data
        for (key, lanes, shape), action in zip(self._actions, actions, strict=True):
            data.set(key, self._own(action[lanes], shape))
        stepped, self.data = self._step(data)
        self.after = stepped.get("next")
        came = self._values(self.after)
        for key, rows in self._rows_after:
            value, row = came(key), rows[t]
            if value is None or value.shape != row.shape:
                raise misfit(("next", *as_key(key)), f"shape {list(row.shape)}", value)
            row.copy_(value)
        self.show(t)
        for key, is_set in self._ended:  # noqa: SIM110 - a generator costs more than the question
            if is_set(came(key)):
                return True
        return False

    def show(self, t: int) -> None:
        """Writes what is shown after step t of the window."""
        shown = self._values(self.data)
        for key, rows in self._rows_now:
            value, row = shown(key), rows[t]
            if value is None or value.shape != row.shape:
                raise misfit(as_key(key), f"shape {list(row.shape)}", value)
            row.copy_(value)

    def _own(self, action: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """An action as a tensor that is the environment's to keep, or to change."""
        if isinstance(action, np.ndarray):
            tensor = torch.from_numpy(action.copy().reshape(shape))
            return tensor if self.device == CPU else tensor.to(self.device)
        owned: torch.Tensor = action.clone(memory_format=torch.contiguous_format).view(shape).to(self.device)
        return owned

    def release(self) -> None:
        """Lets the memory go."""
        self._memory, self._rows_now, self._rows_after = {}, [], []

    def audit_step(self, t: int, actions: Sequence[Any]) -> bool:
        """`step`, with the time measured, and what came held against the specs.

        Raises:
            EnvError: it does not fit; names key, what was expected and what came.
        """
        self._step = self._timed_step
        try:
            ended = self.step(t, actions)
        finally:
            self._step = self.env.step_and_maybe_reset
        _check(self._given, self.after, self._form.batch, "next")
        self.check()
        return ended

    def _timed_step(self, data: TensorDictBase) -> Any:
        start = time.perf_counter()
        result = self.env.step_and_maybe_reset(data)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        return result

    def check(self) -> None:
        """Holds what is shown against the specs; see `audit_step`."""
        _check(self._form.observed, self.data, self._form.batch)

    # --- resets, and random actions ---

    def reset(self, lanes: Sequence[int] | None, seed: int | None, kwargs: Mapping[str, Any]) -> None:
        """Begins a new episode.

        Args:
            lanes: in which lanes; None: in all.
            seed: for the whole environment.
            kwargs: for its `reset`.
        """
        if seed is not None:
            self.env.set_seed(seed)
        self.data = reset_data(self.env, self._masked(lanes), **kwargs)
        self.check()

    def _masked(self, lanes: Sequence[int] | None) -> TensorDictBase | None:
        """What the lanes show, with the marks that tell which to reset."""
        if lanes is None:
            return None
        for key, shape in self._form.masks.items():
            mask = torch.zeros(shape, dtype=torch.bool, device=self.env.device)
            mask.view(-1, *shape[self._time :])[list(lanes)] = True
            self.data.set(key, mask)
        return self.data

    def draw(self) -> list[torch.Tensor]:
        """Random actions for what it shows now, `[*batch, *shape]` a leaf, by the environment's own rule and masks."""
        drawn = self.env.rand_action(self.data.copy())
        return [drawn.get(key) for key, _, _ in self._actions]


def _all_at_once(data: TensorDictBase) -> Callable[[Any], Any]:
    return dict(data.items()).get


def _one_by_one(data: TensorDictBase) -> Callable[[Any], Any]:
    get: Callable[[Any], Any] = data.get
    return get


def _any(flags: torch.Tensor) -> bool:
    return bool(flags.any())


@torch.no_grad()
def reset_data(env: Any, data: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
    """What an environment shows after a reset; `data` holds what it showed before, where only parts are reset.

    Raises:
        EnvError: it is no TensorDict of the environment's batch dimensions.
    """
    fresh = env.reset(**kwargs) if data is None else env.reset(data, select_reset_only=True, **kwargs)
    if not isinstance(fresh, TensorDictBase) or tuple(fresh.batch_size) != tuple(env.batch_size):
        came = f" {list(fresh.batch_size)}" if isinstance(fresh, TensorDictBase) else ""
        raise EnvError(
            f"reset should return a TensorDict of batch size {list(env.batch_size)}; {type(fresh).__name__}{came} came."
        )
    return fresh


def why_no_lane_resets(env: Any) -> str | None:
    """Why lanes of one environment cannot be reset one by one, as far as can be known; None: they can."""
    level: Any = env
    while level is not None:
        own = vars(level)
        if own.get("_torchrl_native_autoreset", False) or isinstance(own.get("_env"), VectorEnv):
            return f"{type(level).__name__} steps environments that reset themselves, and only those that ended"
        level = own.get("_modules", {}).get("base_env", own.get("base_env"))
    return None


def _check(sources: Sequence[Source], data: TensorDictBase, batch: tuple[int, ...], *above: str) -> None:
    for source in sources:
        value, leaf = data.get(source.key, None), source.leaf
        wanted = (*batch, *leaf.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != wanted:
            raise misfit((*above, *as_key(source.key)), f"shape {list(wanted)}", value)
        if value.dtype != leaf.dtype and not torch.can_cast(value.dtype, leaf.dtype):
            raise misfit((*above, *as_key(source.key)), f"dtype {str(leaf.dtype).removeprefix('torch.')}", value)


def misfit(key: Key, expected: str, value: Any) -> EnvError:
    """What to raise for a value that is not as the specs say."""
    if isinstance(value, torch.Tensor):
        came = f"shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')} came"
    elif value is None:
        came = "it is not there"
    else:
        came = f"{'an object' if is_non_tensor(value) else type(value).__name__} came"
    return EnvError(f"{show_key(key)} should, by the environment's specs, have {expected}; {came}.")
