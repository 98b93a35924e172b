"""N environments with several agents in this process, one a lane, stepped one after the other by one loop.

A lane is reset as soon as its episode is over, that is when nobody is left in it, so every row is a true frame. What
agents observe, and where they stand (who acts, who has ended and how), is stored once while stepping, as what the lane
shows before its next step; what stands below "next" follows from that, and is copied in bulk when the rollout is
finished. Where agents stand rarely changes: it is written for all steps to come, and again where somebody ends, leaves
or joins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rlcollect.devices import CPU
from rlcollect.envs.calls import LaneCalls
from rlcollect.envs.driver import Driver, fill_next
from rlcollect.envs.make import spaces_agree
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.pettingzoo.actions import GroupActions
from rlcollect.envs.pettingzoo.casts import Casts
from rlcollect.envs.pettingzoo.checks import Checker, checked_reset, with_checked_rewards
from rlcollect.envs.pettingzoo.games import Game, Infos, Observations, Spaces
from rlcollect.envs.pettingzoo.groups import plan_groups, state_codec
from rlcollect.envs.pettingzoo.infos import InfoMasks, agent_info
from rlcollect.envs.spaces import ObservationCodec, Rows
from rlcollect.errors import EnvError
from rlcollect.interfaces import ActionForm, RolloutMemory
from rlcollect.layout import Arrays, Key, Leaf, numpy_dtype

__all__ = ["AgentLanes", "open_pettingzoo"]

Array = np.ndarray[Any, Any]
ROOT_FLAGS: Sequence[Key] = (("terminated",), ("truncated",))
BETWEEN = -1  # the time of a reset between rollouts


def open_pettingzoo(opening: Opening) -> AgentLanes:
    """Resets the environments of N lanes, and plans how they are stored.

    Raises:
        OptionError, SpaceError, EnvError: they do not fit.
        What a conversion or a first reset raises, from a `WorkerError`.
    """
    games: list[Game] = []
    for lane, env in enumerate(opening.envs):
        with at_lane(opening.worker, lane):
            games.append(Game(env))
    spaces_agree(cast(Any, [Spaces.of(game.env) for game in games]))
    calls = LaneCalls([game.env for game in games], opening.what.reset_options)
    first: list[tuple[Observations, Infos]] = []
    for lane in range(len(games)):
        with at_lane(opening.worker, lane):
            first.append(checked_reset(calls.resets[lane]()))
    lanes = AgentLanes(opening, games, calls, first[0][1])
    for lane in range(len(games)):
        with at_lane(opening.worker, lane):
            lanes.begin(lane, *first[lane])
    return lanes


class AgentLanes(Driver):
    """The `EnvDriver` of environments with several agents; made by `open_pettingzoo`.

    Args:
        opening: the environments, and what is asked for.
        games: the same, by the Parallel API.
        calls: how they are stepped and reset.
        first_infos: of lane 0: show the form of what is recorded of infos, and of action masks.
    """

    def __init__(self, opening: Opening, games: Sequence[Game], calls: LaneCalls, first_infos: Infos) -> None:
        super().__init__(opening)
        what, env = opening.what, games[0].env
        self.num_lanes = len(games)
        self.lead: tuple[int, ...] = (self.num_lanes,) if opening.batched else ()
        self.device = CPU
        groups = plan_groups(env, what, opening.names, first_infos)
        names = [group.name for group in groups]
        self._groups = groups
        self._state = state_codec(env, what, [*opening.names, *names])
        seen = [leaf for group in groups for leaf in (*group.observed, *group.standing)]
        self.leaves: Sequence[Leaf] = (*seen, *(self._state.leaves if self._state else ()))
        self._info = agent_info(groups, what, first_infos, self.num_lanes)
        infos = [leaf.under("info") for leaf in self._info.leaves] if self._info else []
        self.after_leaves: Sequence[Leaf] = (*(group.reward for group in groups), *infos)
        self.reward_keys: Sequence[Key] = tuple(group.reward.key for group in groups)
        self.truncated_keys = tuple((name, "truncated") for name in names)
        self.whole_key: Key = (names[0], *groups[0].whole) if len(groups) == 1 and groups[0].whole else ()
        self._actions = GroupActions(groups)
        self.action_codec: ActionForm = self._actions
        self.draw = self._draw if self._actions.is_masked else None
        self._games = games
        self._calls = calls
        self._info_masks = InfoMasks(groups)
        self._wrap_calls()
        checker = Checker(groups)
        self._check = checker.check
        self._steps, self._resets = calls.steps, calls.resets
        audited_steps, audited_resets = calls.audited(cast(ObservationCodec, checker))
        self._audited = [with_checked_rewards(step) for step in audited_steps], audited_resets
        self.current: Mapping[Key, Array] = {
            leaf.key: np.zeros((self.num_lanes, *leaf.shape), numpy_dtype(leaf.dtype)) for leaf in self.leaves
        }
        self._current_rows = self._rows_of(self.current)
        self._casts = Casts(games, groups, self.current)
        self._start = 0
        self._let_go()

    def _wrap_calls(self) -> None:
        calls = self._calls
        if self._info is not None:
            calls.record(self._info)
        if self._info_masks.are_there:
            wrap = self._info_masks.wrap
            calls.steps = [wrap(game, step) for game, step in zip(self._games, calls.steps, strict=True)]
            calls.resets = [wrap(game, reset) for game, reset in zip(self._games, calls.resets, strict=True)]

    def _let_go(self) -> None:
        """There is no memory of a rollout: what the lanes show is in the current arrays."""
        if self._info is not None:
            self._info.release()
        self._arrays = Arrays({}, remember=False)
        self._now: Mapping[Key, Array] = {}
        self._next: Mapping[Key, Array] = {}
        self._casts.release()
        self._held = [[(self.current[leaf.key],) * 2 for leaf in group.observed] for group in self._groups]
        self._rows: list[list[Rows]] = []
        self._rewards: Sequence[Any] = ()
        self._terminated = self._truncated = np.zeros((0, 0), bool).data
        self._bound = 0
        self._shown = BETWEEN + 1  # the row that holds what the lanes show; of `_bound`, the current arrays do

    def begin(self, lane: int, observations: Observations, infos: Infos) -> None:
        """Takes what an environment's own first `reset` returned."""
        self._begin(lane, BETWEEN, self._current_rows, self._info_masks.paired(self._games[lane], observations, infos))

    # --- the contract ---

    @property
    def env_seconds(self) -> float:
        """Time spent in the environments during `audit_step`, in total."""
        return self._calls.env_seconds

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes what the lanes show into its first row."""
        arrays = memory.arrays
        self._arrays = arrays
        self._bound = arrays["next", "terminated"].shape[1]
        self._now = {leaf.key: arrays[leaf.key] for leaf in self.leaves}
        self._next = {leaf.key: arrays["next", *leaf.key] for leaf in self.leaves}
        self._casts.bind(self._now)
        self._held = [[(self._now[leaf.key], self.current[leaf.key]) for leaf in g.observed] for g in self._groups]
        for key, array in self._now.items():
            array[:, 0] = self.current[key]
        numbers = [("next", *key) for key in (*ROOT_FLAGS, *self.reward_keys)]
        for key in numbers:
            arrays[key].fill(0)
        # memoryviews are quick to write to, and refuse what is no number, where an array would store None as NaN
        self._terminated, self._truncated, *self._rewards = arrays.once(
            "numbers", lambda: [arrays[key][..., 0].data for key in numbers]
        )
        self.ends = []
        self.failed_lane = None
        self._shown = 0
        if self._info is not None:
            self._info.bind(arrays)

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows, and writes where agents stand."""
        self._start = start
        self._rows = self._arrays.once(("rows", start, stop), lambda: self._views(start, stop))
        self._casts.view(start, stop)

    def _views(self, start: int, stop: int) -> list[list[Rows]]:
        """Where the observations after these steps go; after the last of all, to the current ones."""
        in_time = {key: list(now[:, start + 1 : stop + 1].swapaxes(0, 1)) for key, now in self._now.items()}
        steps = min(stop + 1, self._bound) - start - 1
        rows = [self._rows_of({key: arrays[t] for key, arrays in in_time.items()}) for t in range(steps)]
        return rows if stop < self._bound else [*rows, self._current_rows]

    def _rows_of(self, arrays: Mapping[Key, Array]) -> list[Rows]:
        """What takes raw observations, for each group, `[lane, place]`, and for the state, `[lane]`."""
        rows = [
            group.codec.rows({leaf.key: arrays[group.name, *leaf.key] for leaf in group.codec.leaves})
            for group in self._groups
        ]
        return rows if self._state is None else [*rows, self._state.rows(arrays)]

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""
        rows, steps, time = self._rows[t], self._steps, self._start + t
        given = self._actions.decode(actions, self._casts.masks, self._casts.acting)
        lane = 0
        try:
            for lane, action in enumerate(given):
                self._store(lane, time, rows, steps[lane](action))
        except BaseException:
            self.failed_lane = lane
            raise
        self._shown = time + 1

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environments measured and their answers held against their spaces."""
        self._steps, self._resets = self._audited
        try:
            self.step(t, actions)
        finally:
            self._steps, self._resets = self._calls.steps, self._calls.resets

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""
        for lane in lanes:
            self.failed_lane = lane
            self._casts.truncate(lane, t)
            self._truncated[lane, t] = True
            self._end(lane, t, self._rows[t - self._start], by_env=False)
            self.failed_lane = None

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: copies what came next and what the lanes show, lets the memory go."""
        for key, array in self._arrays_after(made - 1).items():
            if array is not self.current[key]:
                self.current[key][...] = array
        fill_next(self._now, self._next, self.current, self.ends, made)
        self._let_go()

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations.

        Args:
            lanes: which.
            seeds: a seed for each of them.
            kwargs: further arguments for the environments' `reset`; they win over `reset_options`.
        """
        self._let_go()  # an error may have come in the middle of a rollout
        for place, lane in enumerate(lanes):
            self.failed_lane = lane
            seed = {} if seeds is None else {"seed": seeds[place]}
            self._begin(lane, BETWEEN, self._current_rows, self._resets[lane](**seed, **(kwargs or {}))[0])
        self.failed_lane = None

    def state_dict(self) -> dict[str, Any]:
        """By lane: the number of its episode, its environment's generator, and what a `state_dict` of that returns."""
        return {
            str(lane): {**game.state_dict(), "episode": self._calls.episodes[lane]}
            for lane, game in enumerate(self._games)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved. The environments are not reset by it."""
        for lane, game in enumerate(self._games):
            game.load_state_dict(state[str(lane)])
            self._calls.episodes[lane] = state[str(lane)]["episode"]

    def _draw(self, rng: np.random.Generator) -> Sequence[Array]:
        return self._actions.draw(self._arrays_after(self._shown - 1), self._casts.masks, rng)

    # --- a step of one lane ---

    def _store(self, lane: int, time: int, rows: Sequence[Rows], result: Any) -> None:
        """Stores what a step gave, and begins the next episode where that was the last of one."""
        observations, rewards, terminated, truncated, _ = result
        game, before = self._games[lane], self._casts[lane]
        for number, places in before.absent:
            self._keep(lane, time, number, places)
        alive = game.alive()
        is_same = alive == before.alive
        present = before.present if is_same else self._casts.with_joined(lane, alive)
        for agent, number, place in present:
            observation = observations.get(agent)
            if observation is not None:
                rows[number][lane, place] = observation
            elif agent not in alive:
                self._keep(lane, time, number, [place])
            else:
                raise EnvError(f"{agent!r} is in env.agents, and step gave no observation for it.")
            if agent in rewards:
                self._rewards[number][lane, time, place] = rewards[agent]
        if self._state is not None:
            rows[-1][lane] = {"state": game.env.state()}
        if not is_same or any(terminated.values()) or any(truncated.values()):
            is_over, *how = self._casts.note_ends(lane, time, present, alive, terminated, truncated)
            if is_over:
                self._check(observations)
                self._terminated[lane, time], self._truncated[lane, time] = how
                self._end(lane, time, rows, by_env=True)
        elif game.takes_turns:
            self._casts.let_act(lane, time)

    def _end(self, lane: int, time: int, rows: Sequence[Rows], *, by_env: bool) -> None:
        """Copies how an episode ended to where no other step writes, and begins the next."""
        for key, array in self._arrays_after(time).items():
            self._next[key][lane, time] = array[lane]
        self.ends.append((time, lane))
        if self._info is not None:
            self._info.episode_ended(by_env=by_env)
        self._begin(lane, time, rows, self._resets[lane]()[0])

    def _begin(self, lane: int, time: int, rows: Sequence[Rows], observations: Observations) -> None:
        """Writes the first observations of an episode, as what the lane shows after step `time`."""
        self._check(observations)
        self._casts.begin(lane, time)
        now = self._casts[lane]
        for agent, number, place in now.present:
            if observations.get(agent) is None:
                raise EnvError(f"{agent!r} is in env.agents, and reset gave no observation for it.")
            rows[number][lane, place] = observations[agent]
        for number, places in now.absent:
            for after in self._held_after(lane, time, number):
                after[places] = 0
        if self._state is not None:
            rows[-1][lane] = {"state": self._games[lane].env.state()}

    # --- what lanes show ---

    def _keep(self, lane: int, time: int, number: int, places: list[int]) -> None:
        """Those who give no observation show their last one on."""
        for (now, _), after in zip(self._held[number], self._held_after(lane, time, number), strict=True):
            after[places] = now[lane, time, places]

    def _held_after(self, lane: int, time: int, number: int) -> list[Array]:
        """`[A, *shape]` each: what a group observes after step `time`."""
        if time + 1 == self._bound:
            return [current[lane] for _, current in self._held[number]]
        return [now[lane, time + 1] for now, _ in self._held[number]]

    def _arrays_after(self, t: int) -> Mapping[Key, Array]:
        """The arrays `[N, *shape]` that hold what the lanes show after step t."""
        if t + 1 == self._bound:
            return self.current
        return {key: array[:, t + 1] for key, array in self._now.items()}
