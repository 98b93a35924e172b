"""N `gymnasium.Env` in this process, stepped one after the other by one loop.

The loop resets a lane as soon as its episode has ended, so every row is a true frame. Observations are stored once
while stepping, as the current observation of the next step; what follows from that (most next observations) is
copied in bulk when the rollout is finished. Only an episode's last observation is written at once, before the reset.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.devices import CPU
from rlcollect.envs.calls import MASK, LaneCalls, mask_of
from rlcollect.envs.driver import Driver
from rlcollect.envs.info import InfoRecorder, info_leaves
from rlcollect.envs.journal import Journal
from rlcollect.envs.make import spaces_agree
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.resuming import middle_state, put_in_the_middle
from rlcollect.envs.saving import as_plain, as_was, env_state, load_env_state
from rlcollect.envs.spaces import REWARD, ActionCodec, Rows, codec_of, renamed, rows_in_time
from rlcollect.errors import EnvError
from rlcollect.failures import warn
from rlcollect.interfaces import ActionForm, RolloutMemory
from rlcollect.layout import Arrays, Key, Leaf, numpy_dtype
from rlcollect.options import What
from rlcollect.seeds import Root

__all__ = ["Lanes", "is_gymnasium", "open_lanes"]

Array = np.ndarray[Any, Any]
Env = gym.Env[Any, Any]


def is_gymnasium(made: Any) -> bool:
    """Whether it is a single environment of Gymnasium."""
    return isinstance(made, gym.Env) and not isinstance(made, gym.vector.VectorEnv)


def open_lanes(opening: Opening) -> Lanes:
    """Resets the environments of N lanes, and plans how they are stored.

    Raises:
        OptionError, SpaceError, EnvError: they do not fit.
        What a first reset raises, from a `WorkerError`.
    """
    envs = opening.envs
    spaces_agree(envs)
    journal = Journal(envs) if opening.what.resume == "replay" else None
    roots: list[Root] = [(opening.seed, opening.worker, lane, opening.generation) for lane in range(len(envs))]
    calls = LaneCalls(
        envs,
        opening.what.reset_options,
        roots=roots if opening.what.seed_per_episode else None,
        journal=journal,
    )
    first: list[tuple[Any, dict[str, Any]]] = []
    for lane in range(len(envs)):
        with at_lane(opening.worker, lane):
            first.append(_checked_reset(calls.resets[lane]()))
    lanes = Lanes(opening, calls, first[0][1], journal=journal)
    for lane in range(len(envs)):
        with at_lane(opening.worker, lane):
            lanes.begin(lane, *first[lane])
    return lanes


def _checked_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvError(f"reset should return (observation, info); {type(result).__name__} came.")
    return result


class Lanes(Driver):
    """The `EnvDriver` of single Gymnasium environments; made by `open_lanes`.

    Args:
        opening: the environments, and what is asked for.
        calls: how they are stepped and reset.
        first_info: of lane 0: shows the form of what is recorded of infos.
        journal: what it takes to play open episodes again; None: nobody keeps it.
    """

    def __init__(
        self, opening: Opening, calls: LaneCalls, first_info: Mapping[str, Any], *, journal: Journal | None = None
    ) -> None:
        super().__init__(opening)
        self.steps_one_by_one = True
        self._cuts = opening.what.resume == "cut"
        self._keeps_info = callable(opening.what.reset_options)
        self._journal = journal
        envs, what = opening.envs, opening.what
        self.num_lanes = len(envs)
        self.lead: tuple[int, ...] = (self.num_lanes,) if opening.batched else ()
        self.device = CPU
        self.reward_keys: Sequence[Key] = (REWARD.key,)
        self._envs = envs
        self._calls = calls
        mask = _mask_leaf(what, first_info)
        self._paired = mask is not None
        root: Key = () if isinstance(envs[0].observation_space, gym.spaces.Dict) else ("observation",)
        self.whole_key = renamed(root, what.rename_keys or {})  # type: ignore[arg-type]
        self._codec = codec_of(envs[0].observation_space, what, opening.names, mask)
        self.leaves: Sequence[Leaf] = self._codec.leaves
        codec = ActionCodec(envs[0].action_space)
        self.action_codec: ActionForm = codec
        self._decode = codec.decode
        self._check = self._codec.checker()
        recorded = info_leaves(what.info_forms, first_info)
        self.after_leaves: Sequence[Leaf] = (REWARD, *(leaf.under("info") for leaf in recorded))
        stated = {key for key, form in what.info_forms.items() if form is not None}
        self._info = InfoRecorder(recorded, stated, self.num_lanes) if recorded else None
        if self._info is not None:
            calls.record(self._info)
        if self._paired:
            calls.pair_with_mask()
        self._steps, self._resets = calls.steps, calls.resets
        self._audited = calls.audited(self._codec)
        self.current: Mapping[Key, Array] = {
            leaf.key: np.zeros((self.num_lanes, *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in self.leaves
        }
        self._current_rows = self._codec.rows(self.current)
        # views of a rollout's memory, between `bind` and `finish`
        self._now: Mapping[Key, Array] = {}
        self._next: Mapping[Key, Array] = {}
        self._rows: list[Rows] = []
        self._after: Rows = self._current_rows
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0), np.float32).data
        self._start = 0
        self._steps_bound = 0
        self._arrays = Arrays({}, remember=False)

    def begin(self, lane: int, observation: Any, info: dict[str, Any]) -> None:
        """Takes what an environment's own first `reset` returned."""
        self._begin(lane, (observation, mask_of(info)) if self._paired else observation)

    def _begin(self, lane: int, observation: Any) -> None:
        self._codec.check(observation)
        self._current_rows[lane] = observation

    # --- the contract ---

    @property
    def env_seconds(self) -> float:
        """Time spent in the environments during `audit_step`, in total."""
        return self._calls.env_seconds

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""
        arrays = memory.arrays
        self._arrays = arrays
        self._steps_bound = arrays["next", "reward"].shape[1]
        self._now = {leaf.key: arrays[leaf.key] for leaf in self.leaves}
        self._next = {leaf.key: arrays["next", *leaf.key] for leaf in self.leaves}
        self._after = self._codec.rows(self._next)
        for key, array in self._now.items():
            array[:, 0] = self.current[key]
        for name in ("terminated", "truncated"):
            arrays["next", name].fill(False)
        # memoryviews are quick to write to, and refuse what is no number, where an array would store None as NaN
        self._rewards, self._terminated, self._truncated = arrays.once(
            "flags",
            lambda: [arrays["next", name][..., 0].data for name in ("reward", "terminated", "truncated")],
        )
        self.ends = []
        self.failed_lane = None
        if self._info is not None:
            self._info.bind(arrays)

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        self._start = start
        self._rows = self._arrays.once(("rows", start, stop), lambda: self._views(start, stop))

    def _views(self, start: int, stop: int) -> list[Rows]:
        """Where the observations after these steps go; after the last of all, to the current ones."""
        rows = rows_in_time(self._codec, {key: now[:, start + 1 : stop + 1] for key, now in self._now.items()})
        return rows if stop < self._steps_bound else [*rows, self._current_rows]

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""
        row, rewards, steps, time = self._rows[t], self._rewards, self._steps, self._start + t
        decoded = self._decode(actions)
        lane = 0
        try:
            for lane, action in enumerate(decoded):
                observation, reward, terminated, truncated, _ = steps[lane](action)
                rewards[lane, time] = reward
                if terminated or truncated:
                    observation = self._end(time, lane, observation, terminated, truncated)
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
            self._steps, self._resets = self._calls.steps, self._calls.resets

    def _end(self, t: int, lane: int, observation: Any, terminated: Any, truncated: Any) -> Any:
        """Stores how an episode ended; the first observation of the next."""
        self._terminated[lane, t] = terminated
        self._truncated[lane, t] = truncated
        self._check(observation)  # some environments give nothing here
        self._after[lane, t] = observation
        self.ends.append((t, lane))
        if self._info is not None:
            self._info.episode_ended(by_env=True)
        return self._restarted(lane)

    def _restarted(self, lane: int) -> Any:
        observation = self._resets[lane]()[0]
        self._check(observation)
        return observation

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""
        row, arrays = self._rows[t - self._start], self._arrays_after(t)
        for lane in lanes:
            for key, after in arrays.items():
                self._next[key][lane, t] = after[lane]
            self._truncated[lane, t] = True
            self.ends.append((t, lane))
            self.failed_lane = lane
            if self._info is not None:
                self._info.episode_ended(by_env=False)
            row[lane] = self._restarted(lane)
            self.failed_lane = None

    def _arrays_after(self, t: int) -> Mapping[Key, Array]:
        """The arrays `[N, *shape]` that hold the observations after step t."""
        if t + 1 == self._steps_bound:
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
        if self._journal is not None:
            self._note(self._journal, [ended[-1] + 1 if ended else 0 for ended in ends], made)
        self._now, self._next, self._rows, self._after = {}, {}, [], self._current_rows
        self._arrays = Arrays({}, remember=False)
        self._rewards = self._terminated = self._truncated = np.zeros((0, 0), np.float32).data
        if self._info is not None:
            self._info.release()

    def _note(self, journal: Journal, begins: Sequence[int], made: int) -> None:
        """The open episode of each lane has the frames from this one on."""
        actions = [self._arrays[leaf.key] for leaf in self.action_codec.leaves]
        for lane, begin in enumerate(begins):
            shown = [now[lane, begin:made] for now in self._now.values()]
            shown.append(np.asarray(self._rewards)[lane, begin:made])
            journal.go_on(lane, [leaf[lane, begin:made] for leaf in actions], shown)

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
            self._begin(lane, self._resets[lane](**seed, **(kwargs or {}))[0])
        self.failed_lane = None

    def state_dict(self) -> dict[str, Any]:
        """By lane: the number of its episode, its environment's generator, and what a `state_dict` of that returns."""
        return {
            str(lane): {**env_state(env), "episode": self._calls.episodes[lane], **self._calls.seeds(lane)}
            for lane, env in enumerate(self._envs)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved. The environments are not reset by it."""
        for lane, env in enumerate(self._envs):
            load_env_state(env, state[str(lane)])
            self._calls.episodes[lane] = state[str(lane)]["episode"]
            self._calls.load_seeds(lane, state[str(lane)])

    # --- the middle of an episode ---

    def open_episodes(self) -> dict[str, Any]:
        """See `EnvDriver`."""
        told = {} if self._cuts else {str(lane): self._open_episode(lane) for lane in range(self.num_lanes)}
        return {lane: episode for lane, episode in told.items() if episode is not None}

    def _open_episode(self, lane: int) -> dict[str, Any] | None:
        if (state := middle_state(self._envs[lane])) is not None:
            episode: dict[str, Any] = {"state": as_plain(state)}
        elif self._journal is not None and (told := self._journal.told(lane)) is not None:
            episode = {"journal": as_plain(told)}
        else:
            return None
        episode["current"] = [as_plain(shown[lane]) for shown in self.current.values()]
        if self._keeps_info:
            episode["info"] = as_plain(self._calls.last_info(lane))
        return episode

    def reopen(self, episodes: Mapping[str, Any]) -> list[int]:
        """See `EnvDriver`."""
        return [int(lane) for lane, episode in episodes.items() if self._goes_on(int(lane), episode)]

    def _goes_on(self, lane: int, episode: Mapping[str, Any]) -> bool:
        if self._cuts:
            return False
        if "info" in episode:
            self._calls.was_told(lane, as_was(episode["info"]))
        last = [as_was(shown) for shown in episode["current"]]
        if "state" in episode:
            if not put_in_the_middle(self._envs[lane], as_was(episode["state"])):
                return False
            for current, shown in zip(self.current.values(), last, strict=True):
                current[lane] = shown
            return True
        return self._journal is not None and self._plays(self._journal, lane, as_was(episode["journal"]), last)

    def _plays(self, journal: Journal, lane: int, told: Mapping[str, Any], last: Sequence[Array]) -> bool:
        """Plays the episode again; whether it came to the same."""
        played = journal.play(lane, told, self._decode, functools.partial(self._as_stored, lane))
        now = self._as_stored(lane, played.observation, played.info)
        same = all(one.tobytes() == other.tobytes() for one, other in zip(now, last, strict=True))
        if same and not played.has_ended and played.shown == tuple(told["shown"]):
            return True
        warn(
            f"Lane {lane} showed other observations, or paid otherwise, when its episode was played again "
            '(resume="replay"): something in it is random beside its own generator, or lasts over episodes. A new '
            "episode begins, a CUT."
        )
        return False

    def _as_stored(self, lane: int, observation: Any, info: dict[str, Any]) -> Sequence[Array]:
        """What is stored of an observation, `[1, *shape]` a leaf; it is in `current`, too."""
        self._begin(lane, (observation, mask_of(info)) if self._paired else observation)
        return [current[lane : lane + 1] for current in self.current.values()]

    def seed_episodes(self, roots: Sequence[Root]) -> None:
        """See `EnvDriver`."""
        self._calls.seed_by(roots)

    def number_episodes(self, numbers: Mapping[int, int]) -> None:
        """See `EnvDriver`."""
        for lane, number in numbers.items():
            self._calls.number(lane, number)


def _mask_leaf(what: What, info: Mapping[str, Any]) -> Leaf | None:
    """The form of an action mask that comes in the info, if the user named it."""
    if MASK not in what.info_forms:
        return None
    return info_leaves({MASK: what.info_forms[MASK]}, {MASK[0]: mask_of(info)})[0]
