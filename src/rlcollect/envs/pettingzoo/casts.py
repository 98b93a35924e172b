"""Who is in each lane, who acts there, and who has ended and how.

This changes rarely. It stands in the current arrays at all times, and is written to the rows of all steps to come in
a window when that is opened, and again where it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcollect.envs.pettingzoo.games import Agent, Game
from rlcollect.envs.pettingzoo.groups import FLAGS, Group
from rlcollect.errors import EnvError
from rlcollect.layout import Key

__all__ = ["Cast", "Casts", "Place"]

Array = np.ndarray[Any, Any]
Place = tuple[Agent, int, int]  # an agent, the number of its group, its place there


@dataclass
class Cast:
    """Who is in a lane.

    Attributes:
        alive: as the environment has them.
        present: their places.
        absent: the places of all others, by the number of the group.
    """

    alive: list[Agent] = field(default_factory=list)
    present: list[Place] = field(default_factory=list)
    absent: list[tuple[int, list[int]]] = field(default_factory=list)


class Casts:
    """The casts of all lanes.

    Attributes:
        acting: for each lane and group, the agents that act in the next step.
        masks: for each group bool `[N, A]`, the same.

    Args:
        games: one a lane.
        groups: of their agents.
        current: `[N, *shape]` by key, what the lanes show; where agents stand is kept here.
    """

    def __init__(self, games: Sequence[Game], groups: Sequence[Group], current: Mapping[Key, Array]) -> None:
        self.acting: list[list[list[Agent]]] = [[[] for _ in groups] for _ in games]
        self.masks = [current[group.name, "mask"] for group in groups]
        self._flags = [[current[group.name, flag][..., 0] for flag in FLAGS] for group in groups]
        self._games = games
        self._groups = groups
        self._places: list[Place] = [
            (agent, number, place) for number, group in enumerate(groups) for place, agent in enumerate(group.agents)
        ]
        self._casts = [Cast() for _ in games]
        self._current = {leaf.key: current[leaf.key] for group in groups for leaf in group.standing}
        self._rows: list[tuple[Array, Array]] = []
        self._stop = 0

    def __getitem__(self, lane: int) -> Cast:
        """The cast of a lane."""
        return self._casts[lane]

    # --- memory ---

    def bind(self, now: Mapping[Key, Array]) -> None:
        """Takes the memory of a rollout, `[N, T, *shape]` by key."""
        self._rows = [(now[key], current) for key, current in self._current.items()]

    def view(self, start: int, stop: int) -> None:
        """These steps follow."""
        self._stop = stop
        for now, current in self._rows:
            now[:, start + 1 : stop + 1] = current[:, None]

    def release(self) -> None:
        """Lets the memory go."""
        self._rows = []

    def _write(self, lane: int, time: int) -> None:
        for now, current in self._rows:
            now[lane, time + 1 : self._stop + 1] = current[lane]

    # --- what happens ---

    def begin(self, lane: int, time: int) -> None:
        """An episode begins after step `time`.

        Raises:
            EnvError: nobody is there, or somebody who is not among the possible agents.
        """
        alive = self._games[lane].alive()
        if not alive:
            raise EnvError("There is nobody in env.agents after reset.")
        self._gather(lane, alive)
        for flags in self._flags:
            for flag in flags:
                flag[lane] = False
        self.let_act(lane, time)

    def with_joined(self, lane: int, alive: Sequence[Agent]) -> list[Place]:
        """The places of those who are there, and of those who were before."""
        present = self._casts[lane].present
        return [who for who in self._places if who in present or who[0] in alive]

    def let_act(self, lane: int, time: int) -> None:
        """Notes who acts after step `time`."""
        acting = self._games[lane].acting()
        for number, group in enumerate(self._groups):
            acts = [agent in acting for agent in group.agents]
            self.acting[lane][number] = [agent for agent, does in zip(group.agents, acts, strict=True) if does]
            self.masks[number][lane] = acts
        self._write(lane, time)

    def note_ends(
        self,
        lane: int,
        time: int,
        present: Sequence[Place],
        alive: Sequence[Agent],
        terminated: Mapping[Agent, Any],
        truncated: Mapping[Agent, Any],
    ) -> tuple[bool, bool, bool]:
        """Notes who has ended with step `time`, and how, and who is there now.

        Args:
            lane: where.
            time: when.
            present: who was there before the step, or is after it.
            alive: who is there after it.
            terminated: what the step told.
            truncated: what the step told.

        Returns:
            Whether the episode is over, as nobody is left who has not ended; whether somebody was terminated now;
            whether somebody was truncated now.

        Raises:
            EnvError: somebody has left and not ended.
        """
        is_over, some_terminated, some_truncated = True, False, False
        for agent, number, place in present:
            flags = self._flags[number]
            if flags[0][lane, place]:  # before; whatever is told of it now
                continue
            how = bool(terminated.get(agent, False)), bool(truncated.get(agent, False))
            for flag, value in zip(flags, (any(how), *how), strict=True):
                flag[lane, place] = value
            some_terminated, some_truncated = some_terminated or how[0], some_truncated or how[1]
            is_over = is_over and any(how)
            if agent not in alive and not any(how):
                raise EnvError(
                    f"{agent!r} has left env.agents, and step did not tell that it was terminated or truncated."
                )
        self._gather(lane, alive)
        self.let_act(lane, time)
        return is_over, some_terminated, some_truncated

    def truncate(self, lane: int, time: int) -> None:
        """Everyone who is there, and has not ended, is truncated with step `time`."""
        for _, number, place in self._casts[lane].present:
            done, _, truncated = self._flags[number]
            truncated[lane, place] |= not done[lane, place]
            done[lane, place] = True
        self._write(lane, time)

    def _gather(self, lane: int, alive: Sequence[Agent]) -> None:
        present = [who for who in self._places if who[0] in alive]
        if len(present) != len(alive):
            possible = [agent for agent, _, _ in self._places]
            stranger = next((agent for agent in alive if agent not in possible), alive)
            raise EnvError(f"env.agents has {stranger!r}; expected each of possible_agents at most once: {possible}.")
        absent: dict[int, list[int]] = {}
        for agent, number, place in self._places:
            if agent not in alive:
                absent.setdefault(number, []).append(place)
        self._casts[lane] = Cast([*alive], present, list(absent.items()))
