"""How a vector environment is called, and how what it gives is stored: what its drivers have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rlcollect.devices import CPU
from rlcollect.envs.calls import MASK
from rlcollect.envs.driver import Driver
from rlcollect.envs.info import MISSING, info_entry, info_leaves
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.process.env import ProcessVectorEnv
from rlcollect.envs.saving import env_state, load_env_state
from rlcollect.envs.spaces import REWARD, ActionCodec, Batcher, ObservationCodec, codec_of, renamed
from rlcollect.envs.vector.infos import VectorInfos, first_of, present
from rlcollect.envs.vector.modes import base_of
from rlcollect.errors import EnvError, OptionError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, Leaf, numpy_dtype

__all__ = ["Batched", "check_num_envs", "checked_reset", "checked_step", "in_lane_order"]

Array = np.ndarray[Any, Any]


class Batched(Driver):
    """A vector environment, reset once, with how its answers are stored.

    Attributes: see `EnvDriver`, and
        env: the environment.
        codec: how observations of one lane are stored.
        whole: the same for those of all lanes at once.
        batch: from rows of actions, `[N, *shape]` a leaf, to what `env.step` takes: arrays that nobody else holds.
        infos: records what is asked for of the infos; None: nothing is.
        current: the newest observation of every lane, by key.

    Args:
        opening: with one environment.
        first: what its first reset gave; None: it is still to come.
    """

    def __init__(self, opening: Opening, first: tuple[Any, dict[str, Any]] | None = None) -> None:
        super().__init__(opening)
        env, what = opening.envs[0], opening.what
        self.env = env
        self.num_lanes = int(env.num_envs)
        self.lead: tuple[int, ...] = (self.num_lanes,)
        self.device = CPU
        self.env_seconds = 0.0
        self.reward_keys: Sequence[Key] = (REWARD.key,)
        self._takes_lists = True
        self.options = _options(what.reset_options)
        if first is None:
            with at_lane(opening.worker, None):
                first = self.first_answer()
        observation, info = first
        mask = None
        if MASK in what.info_forms:
            if info_entry(info, MASK) is MISSING:
                raise EnvError('info_keys names "action_mask", and the info of the first reset has none.')
            mask = info_leaves({MASK: what.info_forms[MASK]}, first_of(info))[0]
        self.paired = mask is not None
        space = env.single_observation_space
        root: Key = () if isinstance(space, gym.spaces.Dict) else ("observation",)
        self.whole_key = renamed(root, what.rename_keys or {})  # type: ignore[arg-type]
        self.codec = codec_of(space, what, opening.names, mask)
        self.leaves: Sequence[Leaf] = self.codec.leaves
        rows = self.rows_at_once()
        many = tuple(Leaf(leaf.key, (rows, *leaf.shape), leaf.dtype) for leaf in self.leaves)
        self.whole = ObservationCodec(many, self.codec.paths)
        actions = ActionCodec(env.single_action_space)
        self.action_codec: ActionForm = actions
        self.batch: Batcher = actions.batch
        forms = {key: form for key, form in what.info_forms.items() if key != MASK}
        recorded = info_leaves(forms, first_of(info))
        self.infos = VectorInfos(recorded, info)
        self.after_leaves: Sequence[Leaf] = (REWARD, *(leaf.under("info") for leaf in recorded))
        self.current: Mapping[Key, Array] = {
            leaf.key: np.zeros((rows, *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in self.leaves
        }
        self._flat = (rows,)
        self._forms = [
            (path, value.shape, value.dtype)
            for path, value in zip(self.codec.paths, self.parts(self.seen(observation, info)).values(), strict=True)
        ]
        self.take_current(observation, info)

    def look(self, seen: Any, *numbers: Any) -> None:
        """Holds observations, rewards and flags against the first ones, quickly: numpy would store other forms too.

        Raises:
            EnvError: they do not fit.
        """
        for number in numbers:
            if getattr(number, "shape", None) != self._flat:
                self.check_numbers(numbers)
        for path, shape, dtype in self._forms:
            value = seen
            for part in path:
                value = value[part]
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                self.whole.check(seen)
                return

    def rows_at_once(self) -> int:
        """How many rows a step gives: one a lane."""
        return self.num_lanes

    def first_answer(self) -> tuple[Any, dict[str, Any]]:
        """What the first reset gives."""
        return checked_reset(self.env.reset(**self.options()))

    def seen(self, observation: Any, info: Mapping[str, Any], lanes: Array | None = None) -> Any:
        """An observation with what belongs to it: the action mask, if that comes in the info.

        Args:
            observation: of all lanes.
            info: that came with it.
            lanes: bool `[N]`, those that it is of; None: all.

        Raises:
            EnvError: a lane has no mask.
        """
        if not self.paired:
            return observation
        if (mask := info_entry(info, MASK)) is MISSING:
            raise EnvError('info_keys names "action_mask", and this info has none.')
        there = present(info, MASK)
        lacking = None if there is None else ~there if lanes is None else lanes & ~there
        if lacking is not None and lacking.any():
            self.failed_lane = int(lacking.argmax())
            raise EnvError(f'info_keys names "action_mask", and the info has none of lane {self.failed_lane}.')
        return observation, mask

    def take_current(self, observation: Any, info: Mapping[str, Any]) -> None:
        """What a reset gave becomes the current observation of every row."""
        seen = self.seen(observation, info)
        self.whole.check(seen)
        for key, value in self.parts(seen).items():
            self.current[key][...] = value

    def parts(self, seen: Any) -> dict[Key, Array]:
        """An observation of all lanes by key."""
        found = {}
        for leaf, path in zip(self.codec.leaves, self.codec.paths, strict=True):
            value = seen
            for part in path:
                value = value[part]
            found[leaf.key] = np.asarray(value)
        return found

    def final_of(self, finals: Any, lane: int, info: Mapping[str, Any]) -> Any:
        """What a lane had come to, with its mask if that comes in the info; it fits the space.

        Args:
            finals: what the info has of all lanes.
            lane: which.
            info: of the step that ended the episode, and reset the lane.

        Raises:
            EnvError: it is not there, or does not fit.
        """
        if finals is None:
            raise EnvError(
                f'An episode ended, and the info has no "final_obs": in mode SAME_STEP nothing else tells what it had '
                f"come to (it has {', '.join(map(repr, info)) or 'nothing'}). Use another autoreset mode, or a wrapper "
                "that keeps it."
            )
        final = _lane_of(finals, lane)
        if final is None:
            raise EnvError('An episode ended, and its lane in the info\'s "final_obs" is empty.')
        if self.paired:
            last = info.get("final_info")
            if not isinstance(last, Mapping) or "action_mask" not in last:
                raise EnvError('info_keys names "action_mask", and the "final_info" has none.')
            there = present(last, MASK)
            if there is not None and not there[lane]:
                raise EnvError('info_keys names "action_mask", and the "final_info" has none of this lane.')
            final = final, last["action_mask"][lane]
        self.codec.check(final)
        return final

    # --- resets ---

    def reset_all(self, seeds: Sequence[int] | None, kwargs: Mapping[str, Any] | None) -> None:
        """A new episode in every lane."""
        observation, info = checked_reset(self._seeded_reset(seeds, {**self.options(), **(kwargs or {})}))
        self.take_current(observation, info)

    def reset_masked(
        self, mask: Array, seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> tuple[dict[Key, Array], dict[str, Any]]:
        """A new episode in some lanes: what all of them show after it, by key, and the info.

        The dictionary of options is a new one each time: the environment takes the mask out of it.
        """
        options = {**self.options(), **(kwargs or {})}
        options["options"] = {**(options.get("options") or {}), "reset_mask": mask.copy()}
        given = None
        if seeds is not None:
            each: list[int | None] = [None] * self.num_lanes
            for lane, seed in zip(np.flatnonzero(mask).tolist(), seeds, strict=True):
                each[lane] = seed
            given = each
        observation, info = checked_reset(self._seeded_reset(given, options))
        seen = self.seen(observation, info, mask)
        self.whole.check(seen)
        return self.parts(seen), info

    def _seeded_reset(self, seeds: Sequence[int | None] | None, kwargs: Mapping[str, Any]) -> Any:
        return self.undisturbed(lambda: self._reset_with(seeds, kwargs))

    def undisturbed(self, call: Callable[[], Any]) -> Any:
        """What a call to the environment gives.

        Raises:
            EnvError: its processes are still in a step that was interrupted.
        """
        try:
            return call()
        except gym.error.AlreadyPendingCallError as error:
            raise EnvError(
                f"{type(base_of(self.env)).__name__} was interrupted in the middle of a step, and what its processes "
                "still send belongs to that. Make a new one."
            ) from error

    def _reset_with(self, seeds: Sequence[int | None] | None, kwargs: Mapping[str, Any]) -> Any:
        """Lists are what vector environments take; some take a single seed only, which is then one made of all."""
        if seeds is None:
            return self.env.reset(**kwargs)
        if self._takes_lists:
            try:
                return self.env.reset(seed=list(seeds), **kwargs)
            except Exception:  # whatever it raises for a list
                if isinstance(base_of(self.env), SyncVectorEnv | AsyncVectorEnv):
                    raise
                self._takes_lists = False
        given = [seed for seed in seeds if seed is not None]
        one = int(np.random.SeedSequence(given).generate_state(1)[0]) & 0x7FFF_FFFF
        return self.env.reset(seed=one, **kwargs)

    # --- steps ---

    def ask(self, actions: Any) -> Any:
        """One step of the environment."""
        return self.env.step(actions)

    @property
    def ask_quickly(self) -> Callable[[Any], Any]:
        """The same, without a call between."""
        step: Callable[[Any], Any] = self.env.step
        return step

    def timed_step(self, actions: Any) -> Any:
        """`env.step`, its time measured and its answer held against the spaces."""
        start = time.perf_counter()
        result = self.ask(actions)
        self.env_seconds += time.perf_counter() - start
        self.check_answer(result)
        return result

    def check_answer(self, result: Any) -> None:
        """Holds what a step gave against the spaces.

        Raises:
            EnvError: it does not fit.
        """
        observation, *numbers, info = checked_step(result)
        self.whole.check(self.seen(observation, info))
        self.check_numbers(numbers)

    def check_numbers(self, numbers: Sequence[Any]) -> None:
        """Whether there is a reward, and each flag, for every row.

        Raises:
            EnvError: there is not.
        """
        for name, value in zip(("rewards", "terminated", "truncated"), numbers, strict=True):
            if np.shape(value) != (self.rows_at_once(),):
                raise EnvError(f"{name} should have shape [{self.rows_at_once()}]; {list(np.shape(value))} came.")

    # --- the rest of a driver ---

    def state_dict(self) -> dict[str, Any]:
        """The generators of the lanes, where they can be had, and what a `state_dict` method gives."""
        base = base_of(self.env)
        if isinstance(base, SyncVectorEnv):
            return {str(lane): env_state(env) for lane, env in enumerate(base.envs)}
        if isinstance(base, AsyncVectorEnv | ProcessVectorEnv):
            return {"generators": [generator.bit_generator.state for generator in base.get_attr("np_random")]}
        state: dict[str, Any] = {}
        if isinstance(generator := getattr(base, "_np_random", None), np.random.Generator):
            state["generator"] = generator.bit_generator.state
        if callable(own := getattr(base, "state_dict", None)):
            state["env"] = own()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved."""
        base = base_of(self.env)
        if isinstance(base, SyncVectorEnv):
            for lane, env in enumerate(base.envs):
                load_env_state(env, state[str(lane)])
        elif isinstance(base, AsyncVectorEnv | ProcessVectorEnv):
            base.set_attr("np_random", [_generator(saved) for saved in state["generators"]])
        else:
            if "generator" in state:
                base._np_random = _generator(state["generator"])
            if "env" in state:
                base.load_state_dict(state["env"])


def _lane_of(values: Any, lane: int) -> Any:
    """One lane of what comes by key and then by lane, or as an array of objects."""
    if isinstance(values, Mapping):
        return {key: _lane_of(value, lane) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple([_lane_of(value, lane) for value in values])
    return values[lane]


def in_lane_order(lanes: Sequence[int], seeds: Sequence[int] | None) -> list[int] | None:
    """The seeds, as a vector environment takes them."""
    return None if seeds is None else [seed for _, seed in sorted(zip(lanes, seeds, strict=True))]


def checked_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """What a reset gave.

    Raises:
        EnvError: it is not two things, the second of which is a dictionary.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        came = type(result).__name__
        if isinstance(result, tuple):
            came = f"({', '.join(type(part).__name__ for part in result)})"
        raise EnvError(
            f"reset should return (observations, infos), infos as a dict; {came} came. (Wrappers that turn infos into "
            "lists, as DictInfoToList, are to be left out.)"
        )
    return result


def checked_step(result: Any) -> tuple[Any, ...]:
    """What a step gave.

    Raises:
        EnvError: it is not five things.
    """
    if not (isinstance(result, tuple) and len(result) == 5):
        length = f" of length {len(result)}" if isinstance(result, tuple | list) else ""
        raise EnvError(
            "step should return (observations, rewards, terminated, truncated, infos); "
            f"{type(result).__name__}{length} came."
        )
    return result


def check_num_envs(opening: Opening) -> None:
    """Whether a batch environment has the lanes that were asked for.

    Raises:
        OptionError: it has not.
    """
    env, asked = opening.envs[0], opening.where.num_envs
    if asked not in (None, env.num_envs):
        raise OptionError(
            f"num_envs={asked} was given, and {type(env).__name__} has {env.num_envs} lanes. Leave num_envs out."
        )


def _generator(state: Mapping[str, Any]) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    generator.bit_generator.state = state
    return generator


def _options(given: Any) -> Callable[[], dict[str, Any]]:
    """The keyword arguments of every reset that is ours; a new dictionary each time."""
    if callable(given):
        raise OptionError(
            "reset_options as a callable is asked lane by lane, and a vector environment resets several with the same "
            "options. Pass a mapping, or what makes one of its environments, with num_envs=."
        )
    if given is None:
        return dict
    return lambda: {"options": dict(given)}
