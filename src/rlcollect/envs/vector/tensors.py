"""Vector environments on torch tensors: simulators that step thousands of lanes on one device.

They have the methods of Gymnasium's vector environments, take and give tensors, and reset ended lanes in the step
itself (SAME_STEP). Tensors stay tensors: they are copied once, into the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlcollect.devices import CPU
from rlcollect.envs.driver import Driver
from rlcollect.envs.info import MISSING, PATIENCE, fill_of, info_entry
from rlcollect.envs.opening import Opening
from rlcollect.envs.spaces import REWARD, ActionCodec, check_names, renamed, space_leaf
from rlcollect.envs.vector.batched import checked_step
from rlcollect.envs.vector.modes import FINAL_NAMES, base_of
from rlcollect.errors import EnvError, OptionError, SpaceError
from rlcollect.interfaces import ActionForm, RolloutMemory
from rlcollect.layout import Key, Leaf, overlap, show_key

__all__ = ["AsArrays", "TensorLanes", "as_arrays", "gives_tensors", "parts_of"]

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


def gives_tensors(observation: Any) -> bool:
    """Whether an observation is made of torch tensors."""
    if isinstance(observation, Mapping):
        return bool(observation) and all(gives_tensors(value) for value in observation.values())
    return isinstance(observation, torch.Tensor)


def parts_of(observation: Any, key: Key) -> Iterator[tuple[Key, Tensor]]:
    """The tensors of an observation, or of an info, by the key they are stored under."""
    if isinstance(observation, Mapping):
        for name, value in observation.items():
            yield from parts_of(value, (*key, str(name)))
    elif isinstance(observation, torch.Tensor):
        yield key, observation


class TensorLanes(Driver):
    """The `EnvDriver` of these environments.

    Args:
        opening: with one environment.
        first: what its first reset gave.
    """

    def __init__(self, opening: Opening, first: tuple[Any, dict[str, Any]]) -> None:
        super().__init__(opening)
        env, what = opening.envs[0], opening.what
        observation, info = first
        _refuse(opening)
        self.env = env
        self.num_lanes = int(env.num_envs)
        self.lead: tuple[int, ...] = (self.num_lanes,)
        self.env_seconds = 0.0
        self.reward_keys: Sequence[Key] = (REWARD.key,)
        self.refuses_lane_resets = (
            None
            if opening.where.masked_reset
            else f"{type(base_of(env)).__name__} is not known to reset single lanes "
            '(options={"reset_mask": mask}). If it does, say so: masked_reset=True.'
        )
        self.refuses_lane_seeds = "A simulator takes one seed, for all its lanes: seed them all, or none."
        self._root: Key = () if isinstance(observation, Mapping) else ("observation",)
        self.whole_key = renamed(self._root, what.rename_keys or {})  # type: ignore[arg-type]
        found = dict(parts_of(observation, self._root))
        self.device = next(iter(found.values())).device
        self._keys = self._stored_keys(found, opening)
        self.leaves: Sequence[Leaf] = [
            Leaf(key, self._shape_of(old, found[old]), found[old].dtype) for old, key in self._keys.items()
        ]
        actions = ActionCodec(env.single_action_space)
        self.action_codec: ActionForm = actions
        self._batch = batcher(env.single_action_space, iter(range(len(actions.leaves))))
        self._infos = [(key, _info_leaf(key, form, info_entry(info, key))) for key, form in what.info_forms.items()]
        self.after_leaves: Sequence[Leaf] = (REWARD, *(leaf for _, leaf in self._infos))
        self.current: Mapping[Key, Tensor] = {key: found[old].detach().clone() for old, key in self._keys.items()}
        self._unseen = {leaf.key for _, leaf in self._infos}
        self._episodes = 0
        self._memory: RolloutMemory | None = None
        self._now: Mapping[Key, Tensor] = {}
        self._next: Mapping[Key, Tensor] = {}
        self._rows: Sequence[Sequence[Tensor]] = []
        self._actions: Sequence[tuple[Tensor, ...]] = []
        self._info_rows: list[Tensor] = []
        self._start = 0
        self._bound = 0
        self._flags = [torch.zeros((0, self.num_lanes))] * 3  # reward, terminated, truncated: time first
        self._step = self.env.step

    def _stored_keys(self, found: Mapping[Key, Tensor], opening: Opening) -> dict[Key, Key]:
        """The keys that are kept, and what they are called."""
        what = opening.what
        excluded: Sequence[Key] = what.exclude_keys  # type: ignore[assignment]
        for asked in (*excluded, *(what.rename_keys or {})):
            if not any(overlap(asked, key) for key in found):  # type: ignore[arg-type]
                raise OptionError(f"The observation has no {asked!r}; it has {', '.join(map(show_key, found))}.")
        kept = [key for key in found if not any(key[: len(prefix)] == prefix for prefix in excluded)]
        keys = {key: renamed(key, what.rename_keys or {}) for key in kept}  # type: ignore[arg-type]
        if not keys:
            raise SpaceError("Nothing is left of the observation.")
        check_names(list(keys.values()), [*opening.names, *(["info"] if what.info_forms else [])])
        return keys

    def _shape_of(self, key: Key, value: Tensor) -> tuple[int, ...]:
        if value.shape[:1] != (self.num_lanes,):
            raise EnvError(
                f"The observation {show_key(key)} should have {self.num_lanes} lanes as its first dimension; a tensor "
                f"of shape {list(value.shape)} came."
            )
        if value.device != self.device:
            raise EnvError(
                f"Observations should be on one device; {show_key(key)} is on {value.device}, not {self.device}."
            )
        return tuple(value.shape[1:])

    # --- a rollout ---

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""
        self._memory, self.ends, self.failed_lane = memory, [], None
        # by way of `data`: what is written here is not taken for a change that the policy made
        self._now = {leaf.key: memory.tensors[leaf.key].data for leaf in self.leaves}
        self._next = {leaf.key: memory.tensors["next", *leaf.key].data for leaf in self.leaves}
        self._bound = next(iter(self._now.values())).shape[1]
        for key, tensor in self._now.items():
            tensor[:, 0] = self.current[key]
        if len(self._flags[0]) < self._bound:
            self._flags = [
                torch.zeros((self._bound, self.num_lanes), dtype=dtype, device=self.device)
                for dtype in (torch.float32, torch.bool, torch.bool)
            ]
        self._info_rows = [memory.tensors["next", *leaf.key] for _, leaf in self._infos]
        for rows in self._info_rows:
            rows.fill_(fill_of(rows.dtype))

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        assert self._memory is not None
        self._start = start
        now = [tensor[:, start + 1 : stop + 1].unbind(1) for tensor in self._now.values()]
        self._rows = list(zip(*now, strict=True))
        if stop == self._bound:
            self._rows = [*self._rows, tuple(self.current.values())]
        actions = [self._memory.tensors[leaf.key][:, start:stop].unbind(1) for leaf in self.action_codec.leaves]
        self._actions = list(zip(*actions, strict=True))

    def step(self, t: int, actions: Sequence[Any]) -> None:  # noqa: ARG002 - they stand in memory, as tensors
        """Steps every lane; row t of the window then holds a true frame of each."""
        result = self._step(self._batch(self._actions[t]))
        time = self._start + t
        try:
            self._write(time, self._rows[t], *result)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            self._check_answer(result)  # says what it should have been
            raise

    def _write(
        self,
        time: int,
        rows: Sequence[Tensor],
        observation: Any,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        info: Mapping[str, Any],
    ) -> None:
        for row, value in zip(rows, self._parts(observation), strict=True):
            if value.shape != row.shape or value.dtype != row.dtype:  # would be broadcast, or cast
                raise TypeError(f"{row.shape} {row.dtype} expected")
            row.copy_(value)
        for target, value in zip(self._flags, (reward, terminated, truncated), strict=True):
            if value.shape != (self.num_lanes,):
                raise TypeError(f"[{self.num_lanes}] expected")
            target[time].copy_(value)
        for rows_of_info, (key, leaf) in zip(self._info_rows, self._infos, strict=True):
            self._record(rows_of_info[:, time], info_entry(info, key), leaf)
        final = next((info[name] for name in FINAL_NAMES if name in info), None)
        if final is not None:
            self._end(time, final, info)

    def audit_step(self, t: int, actions: Sequence[Any]) -> None:
        """`step`, with the time in the environment measured and its answer held against the first one."""
        self._step = self._timed_step
        try:
            self.step(t, actions)
        finally:
            self._step = self.env.step

    def _timed_step(self, actions: Any) -> Any:
        start = time.perf_counter()
        result = self.env.step(actions)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.env_seconds += time.perf_counter() - start
        self._check_answer(result)
        return result

    def _check_answer(self, result: Any) -> None:
        """Holds what a step gave against the first observation.

        Raises:
            EnvError: it does not fit.
        """
        observation, *numbers, _ = checked_step(result)
        self._check(observation)
        for name, value in zip(("rewards", "terminated", "truncated"), numbers, strict=True):
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != (self.num_lanes,):
                shown = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise EnvError(f"{name} should be a tensor of shape [{self.num_lanes}]; {shown} came.")

    def _parts(self, observation: Any) -> list[Tensor]:
        """The tensors that are kept, in the order of `leaves`."""
        found = []
        for old in self._keys:
            value = observation
            for part in old if self._root == () else ():
                if not isinstance(value, Mapping) or part not in value:
                    raise EnvError(f"The observation lacks {show_key(old)}; it is {_told(value)}.")
                value = value[part]
            found.append(value)
        return found

    def _check(self, observation: Any) -> None:
        for leaf, value in zip(self.leaves, self._parts(observation), strict=True):
            whole = (self.num_lanes, *leaf.shape)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != whole or value.dtype != leaf.dtype:
                raise EnvError(
                    f"The observation {show_key(leaf.key)} should be a tensor of shape {list(whole)} and dtype "
                    f"{leaf.dtype}; {_told(value)} came."
                )

    def _record(self, row: Tensor, value: Any, leaf: Leaf) -> None:
        if value is MISSING:
            return
        self._unseen.discard(leaf.key)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(row.shape):
            raise EnvError(
                f"The info's {show_key(leaf.key[1:])} should have shape {list(row.shape)}; {_told(value)} came."
            )
        row.copy_(value)

    def _end(self, t: int, final: Any, info: Mapping[str, Any]) -> None:
        """Stores what the lanes that ended had come to; others are left as they are."""
        lanes = torch.logical_or(self._flags[1][t], self._flags[2][t]).nonzero()[:, 0]
        if not len(lanes):
            return
        self._check(final)
        for key, value in zip(self._next, self._parts(final), strict=True):
            self._next[key][lanes, t] = value[lanes]
        if isinstance(last := info.get("final_info"), Mapping):
            for rows, (key, leaf) in zip(self._info_rows, self._infos, strict=True):
                value = info_entry(last, key)
                if value is not MISSING:
                    rows[lanes, t] = value[lanes].to(leaf.dtype)
                    self._unseen.discard(leaf.key)
        self.ends += [(t, lane) for lane in lanes.tolist()]
        self._episodes += len(lanes)
        if self._unseen and self._episodes >= PATIENCE:
            raise EnvError(
                f"info_keys asks for {show_key(min(self._unseen)[1:])}, and no step has had it in {self._episodes} "
                "episodes."
            )

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""
        chosen = torch.tensor(list(lanes), device=self.device)
        row = dict(zip(self._now, self._rows[t - self._start], strict=True))
        for key, value in row.items():
            self._next[key][chosen, t] = value[chosen]
        self._flags[2][t, chosen] = True
        self.ends += [(t, lane) for lane in lanes]
        self._begin(lanes, row)

    def _begin(
        self, lanes: Sequence[int], shown: Mapping[Key, Tensor], options: Mapping[str, Any] | None = None
    ) -> None:
        """Resets some lanes: what they show now stands where they showed something before.

        Raises:
            EnvError: another lane changed.
        """
        mask = torch.zeros(self.num_lanes, dtype=torch.bool, device=self.device)
        mask[list(lanes)] = True
        observation, _ = self.env.reset(options={**(options or {}), "reset_mask": mask.clone()})
        self._check(observation)
        for (key, before), after in zip(shown.items(), self._parts(observation), strict=True):
            same = (before == after) | ((before != before) & (after != after))
            untouched = same.reshape(self.num_lanes, -1).all(1) | mask
            if not bool(untouched.all()):
                self.failed_lane = int((~untouched).nonzero()[0])
                raise EnvError(
                    f"A reset of the lanes {list(lanes)} alone changed {show_key(key)} of lane {self.failed_lane}: the "
                    'environment does not keep to options["reset_mask"]. Leave out masked_reset=True.'
                )
            before[mask] = after[mask].detach()

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: copies next observations and the current one, lets the memory go.

        Raises:
            EnvError: an episode ended, and what it had come to was not told.
        """
        assert self._memory is not None
        reward, terminated, truncated = (values[:made].to(CPU).numpy().T for values in self._flags)
        times, lanes = [t for t, _ in self.ends], [lane for _, lane in self.ends]
        done = terminated | truncated
        told = np.zeros_like(done)
        told[lanes, times] = True
        if (untold := np.argwhere(done & ~told)).size:
            lane, t = untold[0].tolist()
            self.failed_lane, self.failed_step = lane, t
            raise EnvError(
                'An episode ended, and the info had no "final_obs": nothing else tells '
                "what it had come to, since the lane was reset in the same step. Have the environment give it "
                f"({' or '.join(map(repr, FINAL_NAMES))}, all lanes)."
            )
        for name, values in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            self._memory.arrays["next", name][:, :made, 0] = values
        last = self._now if made < self._bound else {}
        for key, tensor in last.items():
            self.current[key].copy_(tensor[:, made])
        for key, now in self._now.items():
            after = self._next[key]
            kept = after[lanes, times]
            after[:, : made - 1] = now[:, 1:made]
            after[:, made - 1] = self.current[key]
            after[lanes, times] = kept
        self._memory, self._now, self._next, self._rows, self._actions = None, {}, {}, [], []
        self._info_rows = []

    # --- between rollouts ---

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes. A simulator takes one seed: the first."""
        if len(lanes) < self.num_lanes:
            self._begin(lanes, self.current, (kwargs or {}).get("options"))
            return
        seed = {} if seeds is None else {"seed": seeds[0]}
        observation, _ = self.env.reset(**seed, **(kwargs or {}))
        self._check(observation)
        for tensor, value in zip(self.current.values(), self._parts(observation), strict=True):
            tensor.copy_(value.detach())

    def state_dict(self) -> dict[str, Any]:
        """What a `state_dict` method of the environment gives."""
        own = getattr(base_of(self.env), "state_dict", None)
        return {"env": own()} if callable(own) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved."""
        if "env" in state:
            base_of(self.env).load_state_dict(state["env"])


def batcher(space: Any, indices: Iterator[int]) -> Callable[[Sequence[Tensor]], Any]:
    """From rows of actions to one action of all lanes, which nobody else holds."""
    if isinstance(space, spaces.Dict):
        parts = {name: batcher(part, indices) for name, part in space.spaces.items()}
        return lambda rows: {name: part(rows) for name, part in parts.items()}
    if isinstance(space, spaces.Tuple):
        each = [batcher(part, indices) for part in space.spaces]
        return lambda rows: tuple([part(rows) for part in each])
    index = next(indices)
    return lambda rows: rows[index].clone(memory_format=torch.contiguous_format)


def _refuse(opening: Opening) -> None:
    if opening.what.reset_options is not None:
        raise OptionError("reset_options: the environment resets its lanes itself, and gives them no options.")


def _info_leaf(key: Key, form: spaces.Space[Any] | None, value: Any) -> Leaf:
    """The form of an entry of the infos: as stated, else as the first reset shows it, else a float32 scalar.

    Raises:
        SpaceError: it is no tensor.
    """
    if form is not None:
        return space_leaf(form, key).under("info")
    if value is MISSING:
        return Leaf(("info", *key), (), torch.float32)
    if not isinstance(value, torch.Tensor) or not value.ndim:
        raise SpaceError(
            f"info_keys: the info has {show_key(key)}, which should be a tensor of all lanes; {_told(value)} came."
        )
    return Leaf(("info", *key), tuple(value.shape[1:]), value.dtype)


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype} on {value.device}"
    return f"a mapping with the keys {list(value)}" if isinstance(value, Mapping) else f"{type(value).__name__}"


class AsArrays:
    """A vector environment on host tensors, in another mode than SAME_STEP, as one on arrays.

    Args:
        env: takes and gives tensors.
    """

    def __init__(self, env: Any) -> None:
        self.env = self.gives_arrays_of = env
        self.num_envs = env.num_envs
        self.metadata = env.metadata
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space

    def reset(self, **kwargs: Any) -> tuple[Any, Any]:
        """See Gymnasium."""
        if (kwargs.get("options") or {}).get("reset_mask") is not None:
            kwargs["options"] = {**kwargs["options"], "reset_mask": torch.from_numpy(kwargs["options"]["reset_mask"])}
        observation, info = self.env.reset(**kwargs)
        return as_arrays(observation), as_arrays(info)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """See Gymnasium."""
        return tuple(as_arrays(value) for value in self.env.step(_tensors(actions)))

    def close(self) -> None:
        """See Gymnasium."""
        self.env.close()


def as_arrays(value: Any) -> Any:
    """An observation or an info with arrays in the place of tensors, on the same memory."""
    if isinstance(value, Mapping):
        return {name: as_arrays(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_arrays, value))
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tensors(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_tensors, value))
    return torch.from_numpy(value)
