"""N `gymnasium.Env` in this process, stepped one after the other by one loop.

The loop resets a lane as soon as its episode has ended, so every row is a true frame. Observations are stored once
while stepping, as the current observation of the next step; what follows from that (most next observations) is
copied in bulk when the rollout is finished. Only an episode's last observation is written at once, before the reset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.envs.info import MISSING, InfoRecorder, info_entry, info_leaves
from rlcollect.envs.make import EnvSource, close_all, make_env, spaces_agree
from rlcollect.envs.spaces import ActionCodec, ObservationCodec, Rows, observation_codec
from rlcollect.errors import EnvError
from rlcollect.failures import relayed
from rlcollect.layout import Key, Leaf, numpy_dtype
from rlcollect.options import What

__all__ = ["Lanes"]

Array = np.ndarray[Any, Any]
Env = gym.Env[Any, Any]
Step = Callable[[Any], tuple[Any, Any, Any, Any, dict[str, Any]]]
Reset = Callable[..., tuple[Any, dict[str, Any]]]
MASK: Key = ("action_mask",)


class Lanes:
    """The `EnvDriver` of single Gymnasium environments.

    Args:
        sources: what each lane is made of, with keyword arguments.
        what: info keys, names, dtypes and reset options are taken from here.
        observation_names: names that observation keys may not have, beside those that are always ours.
        worker: number of the worker, for errors.

    Raises:
        OptionError, SpaceError, EnvError: what was made does not fit.
        What a maker or a first reset raises, from a `WorkerError`. The environments made so far are closed.
    """

    def __init__(
        self,
        sources: Sequence[tuple[EnvSource, Mapping[str, Any]]],
        what: What,
        observation_names: Sequence[str] = (),
        worker: int = 0,
    ) -> None:
        self.num_lanes = len(sources)
        self.failed_lane: int | None = None
        self.env_seconds = 0.0
        self.ends: list[tuple[int, int]] = []
        self.current: Mapping[Key, Array] = {}
        self._what = what
        self._envs: list[Env] = []
        self._owned = [not isinstance(source, gym.Env) for source, _ in sources]
        self._closed = False
        self._episodes = [0] * self.num_lanes
        self._last_info: list[dict[str, Any]] = [{} for _ in sources]
        try:
            for self.failed_lane, (source, kwargs) in enumerate(sources):
                self._envs.append(make_env(source, kwargs))
            self.failed_lane = None
            spaces_agree(self._envs)
            self._plan(observation_names)
        except BaseException as error:
            self.close()
            raise relayed(error, worker=worker, lane=self.failed_lane, step=0)  # noqa: B904 - it has a cause of its own

    # --- construction: everything that depends on the spaces and on the first reset ---

    def _plan(self, observation_names: Sequence[str]) -> None:
        what = self._what
        first = [self._first_reset(lane) for lane in range(self.num_lanes)]
        mask = self._info_mask(first[0][1])
        self._codec: ObservationCodec = observation_codec(
            self._envs[0].observation_space,
            exclude=what.exclude_keys,  # type: ignore[arg-type]
            rename=what.rename_keys,  # type: ignore[arg-type]
            ours=[*observation_names, *(["info"] if what.info_keys else []), *([MASK[0]] if mask else [])],
            keep_float64=what.obs_dtype == "env",
            action_mask=mask,
        )
        self._actions = ActionCodec(self._envs[0].action_space)
        self._decode = self._actions.decode
        forms = what.info_forms
        recorded = info_leaves(forms, first[0][1])
        self._info = (
            InfoRecorder(recorded, {key for key, form in forms.items() if form is not None}, self.num_lanes)
            if recorded
            else None
        )
        self.info_leaves = tuple(leaf.under("next", "info") for leaf in recorded)
        self._compose(paired=mask is not None)
        self.current = {
            leaf.key: np.zeros((self.num_lanes, *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in self.leaves
        }
        self._current_rows = self._codec.rows(self.current)
        for self.failed_lane, (observation, info) in enumerate(first):
            whole = (observation, self._mask_of(info)) if mask is not None else observation
            self._codec.check(whole)
            self._current_rows[self.failed_lane] = whole
        self.failed_lane = None

    def _first_reset(self, lane: int) -> tuple[Any, dict[str, Any]]:
        self.failed_lane = lane
        result = (
            self._reset_with_options(lane, self._envs[lane].reset)()
            if self._what.reset_options is not None
            else self._envs[lane].reset()
        )
        self.failed_lane = None
        return result

    def _info_mask(self, info: Mapping[str, Any]) -> Leaf | None:
        """The form of an action mask that comes in the info, if the user named it."""
        if MASK not in self._what.info_forms:
            return None
        value = info_entry(info, MASK)
        if value is MISSING:
            raise EnvError('info_keys names "action_mask", and the info of the first reset has none.')
        return info_leaves({MASK: self._what.info_forms[MASK]}, info)[0]

    def _compose(self, *, paired: bool) -> None:
        """The callables that the loop steps and resets by: as plain as what is asked for allows."""
        steps: list[Step] = [env.step for env in self._envs]
        resets: list[Reset] = [env.reset for env in self._envs]
        if callable(self._what.reset_options):
            steps = [self._remembering(lane, step) for lane, step in enumerate(steps)]
        if self._what.reset_options is not None:
            resets = [self._reset_with_options(lane, reset) for lane, reset in enumerate(resets)]
        if self._info is not None:
            steps = [self._info.wrap(lane, step) for lane, step in enumerate(steps)]
        if paired:
            steps = [self._paired_step(step) for step in steps]
            resets = [self._paired_reset(reset) for reset in resets]
        self._steps, self._resets = steps, resets
        self._plain = (steps, resets)
        self._audited = (
            [self._audited_step(lane, step) for lane, step in enumerate(steps)],
            [self._audited_reset(reset) for reset in resets],
        )

    def _remembering(self, lane: int, step: Step) -> Step:
        def remembering(action: Any) -> Any:
            result = step(action)
            self._last_info[lane] = result[4]
            return result

        return remembering

    def _reset_with_options(self, lane: int, reset: Reset) -> Reset:
        def with_options(**kwargs: Any) -> Any:
            options = self._what.reset_options
            if callable(options):
                options = options(lane, self._episodes[lane], self._last_info[lane])
            self._episodes[lane] += 1
            return reset(**{"options": None if options is None else dict(options), **kwargs})

        return with_options

    def _paired_step(self, step: Step) -> Step:
        def paired(action: Any) -> Any:
            observation, reward, terminated, truncated, info = step(action)
            return (observation, self._mask_of(info)), reward, terminated, truncated, info

        return paired

    def _paired_reset(self, reset: Reset) -> Reset:
        def paired(**kwargs: Any) -> Any:
            observation, info = reset(**kwargs)
            return (observation, self._mask_of(info)), info

        return paired

    def _mask_of(self, info: Mapping[str, Any]) -> Any:
        value = info_entry(info, MASK)
        if value is MISSING:
            raise EnvError('info_keys names "action_mask", and this info has none.')
        return value

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.env_seconds += time.perf_counter() - start
            return result

        return timed

    def _audited_reset(self, reset: Reset) -> Reset:
        timed = self._timed(reset)

        def audited(**kwargs: Any) -> Any:
            result = timed(**kwargs)
            self._codec.check(result[0])
            return result

        return audited

    def _audited_step(self, lane: int, step: Step) -> Step:
        timed = self._timed(step)

        def audited(action: Any) -> Any:
            result = timed(action)
            if not (isinstance(result, tuple) and len(result) == 5):
                raise EnvError(
                    "step should return (observation, reward, terminated, truncated, info); "
                    f"{type(result).__name__} of length {len(result) if hasattr(result, '__len__') else 1} came."
                )
            self._codec.check(result[0])
            if isinstance(result[1], float) or np.shape(result[1]) == ():
                return result
            self._plain[0][lane] = _scalar_reward(step)  # from now on
            return _scalar_reward(lambda _: result)(action)

        return audited

    # --- the contract ---

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The tensors of an observation."""
        return self._codec.leaves

    @property
    def whole_key(self) -> Key:
        """Where the whole observation stands: () for a Dict space, whose keys stand at the root."""
        return () if isinstance(self._envs[0].observation_space, gym.spaces.Dict) else ("observation",)

    @property
    def action_leaves(self) -> Sequence[Leaf]:
        """The tensors of an action."""
        return self._actions.leaves

    @property
    def action_codec(self) -> ActionCodec:
        """How actions are stored and given to the environments."""
        return self._actions

    def bind(self, arrays: Mapping[Key, Array]) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""
        self._now = {leaf.key: arrays[leaf.key] for leaf in self.leaves}
        self._next = {leaf.key: arrays["next", *leaf.key] for leaf in self.leaves}
        self._after = self._codec.rows(self._next)
        for key, array in self._now.items():
            array[:, 0] = self.current[key]
        self._rows = [*_rows_in_time(self._codec, self._now)[1:], self._current_rows]
        self._rewards = list(arrays["next", "reward"][..., 0].swapaxes(0, 1))
        self._terminated = arrays["next", "terminated"][..., 0]
        self._truncated = arrays["next", "truncated"][..., 0]
        self._terminated.fill(False)
        self._truncated.fill(False)
        self.ends = []
        self.failed_lane = None
        if self._info is not None:
            self._info.bind(arrays)

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane; row t of the memory then holds a true frame of each."""
        row, rewards, steps = self._rows[t], self._rewards[t], self._steps
        decoded = self._decode(actions)
        lane = 0
        try:
            for lane, action in enumerate(decoded):
                observation, reward, terminated, truncated, _ = steps[lane](action)
                rewards[lane] = reward
                if terminated or truncated:
                    observation = self._end(t, lane, observation, terminated, truncated)
                row[lane] = observation
        except BaseException:
            self.failed_lane = lane
            raise

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environments measured and their answers held against their spaces."""
        self._steps, self._resets = self._audited
        try:
            self.step(t, actions)
        finally:
            self._steps, self._resets = self._plain

    def _end(self, t: int, lane: int, observation: Any, terminated: Any, truncated: Any) -> Any:
        """Stores how an episode ended; the first observation of the next."""
        self._terminated[lane, t] = terminated
        self._truncated[lane, t] = truncated
        self._after[lane, t] = observation
        self.ends.append((t, lane))
        if self._info is not None:
            self._info.episode_ended()
        return self._resets[lane]()[0]

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""
        row = self._rows[t]
        for lane in lanes:
            for key, after in self._arrays_after(t).items():
                self._next[key][lane, t] = after[lane]
            self._truncated[lane, t] = True
            self.ends.append((t, lane))
            self.failed_lane = lane
            row[lane] = self._resets[lane]()[0]
            self.failed_lane = None

    def _arrays_after(self, t: int) -> Mapping[Key, Array]:
        """The arrays `[N, *shape]` that hold the observations after step t."""
        if self._rows[t] is self._current_rows:
            return self.current
        return {key: array[:, t + 1] for key, array in self._now.items()}

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: copies next observations and the current one, lets the memory go."""
        for key, array in self._arrays_after(made - 1).items():
            if array is not self.current[key]:
                self.current[key][...] = array
        ends: list[list[int]] = [[] for _ in range(self.num_lanes)]
        for t, lane in self.ends:
            ends[lane].append(t)
        for key, now in self._now.items():
            after, current = self._next[key], self.current[key]
            for lane, ended in enumerate(ends):
                start = 0
                for end in (*ended, made - 1):  # the last observation of an episode is there already
                    after[lane, start:end] = now[lane, start + 1 : end + 1]
                    start = end + 1
                if not (ended and ended[-1] == made - 1):
                    after[lane, made - 1] = current[lane]
        self._now, self._next, self._rows, self._rewards, self._after = {}, {}, [], [], self._current_rows
        self._terminated = self._truncated = np.zeros((0, 0), np.bool_)
        if self._info is not None:
            self._info.release()

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations.

        Args:
            lanes: which.
            seeds: a seed for each of them.
            kwargs: further arguments for the environments' `reset`; they win over `reset_options`.
        """
        for place, lane in enumerate(lanes):
            self.failed_lane = lane
            seed = {} if seeds is None else {"seed": seeds[place]}
            observation = self._resets[lane](**seed, **(kwargs or {}))[0]
            self._codec.check(observation)
            self._current_rows[lane] = observation
        self.failed_lane = None

    def state_dict(self) -> dict[str, Any]:
        """By lane: the generator that Gymnasium gives each environment, and what its own `state_dict` returns."""
        return {str(lane): _env_state(env) for lane, env in enumerate(self._envs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved. The environments are not reset by it."""
        for lane, env in enumerate(self._envs):
            _load_env_state(env, state[str(lane)])

    def close(self) -> list[Exception]:
        """Closes the environments that were made here; instances that were passed in are their owner's."""
        if self._closed:
            return []
        self._closed = True
        return close_all([env for env, owned in zip(self._envs, self._owned, strict=False) if owned])


def _scalar_reward(step: Step) -> Step:
    """A step whose reward is a scalar; some environments give an array of one element."""

    def scalar(action: Any) -> Any:
        observation, reward, *rest = step(action)
        if np.size(reward) != 1:
            raise EnvError(f"The reward should be one number; an array of shape {list(np.shape(reward))} came.")
        return observation, np.asarray(reward).item(), *rest

    return scalar


def _rows_in_time(codec: ObservationCodec, arrays: Mapping[Key, Array]) -> list[Rows]:
    """Row objects for each time of arrays `[N, T, *shape]`."""
    if len(arrays) == 1 and codec.paths == ((),):
        return list(next(iter(arrays.values())).swapaxes(0, 1))
    in_time = [array.swapaxes(0, 1) for array in arrays.values()]
    return [codec.rows(dict(zip(arrays, rows, strict=True))) for rows in zip(*in_time, strict=True)]


def _env_state(env: Env) -> dict[str, Any]:
    state: dict[str, Any] = {}
    generator = getattr(env.unwrapped, "_np_random", None)
    if isinstance(generator, np.random.Generator):
        state["generator"] = generator.bit_generator.state
    own = getattr(env, "state_dict", None)
    if callable(own):
        state["env"] = own()
    return state


def _load_env_state(env: Env, state: Mapping[str, Any]) -> None:
    if "generator" in state:
        env.unwrapped.np_random.bit_generator.state = state["generator"]
    if "env" in state:
        env.load_state_dict(state["env"])  # type: ignore[attr-defined]
