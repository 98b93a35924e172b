"""The seams of the house, each as small as it can be.

`EnvDriver` steps lanes and writes what they give into the memory of a rollout. `Actor` chooses actions and writes
them. The step loop (`rollout.engine`) knows only these two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from rlcollect.layout import Arrays, Key, Leaf
from rlcollect.seeds import Root

__all__ = [
    "ActionForm",
    "Actor",
    "EnvDriver",
    "Interruptor",
    "RevivablePool",
    "RolloutMemory",
    "ScratchDriver",
    "WorkerPool",
]

Array = np.ndarray[Any, Any]


class RolloutMemory(Protocol):
    """The memory of one rollout: tensors, and the same memory as arrays `[N, T, *shape]`."""

    tensors: dict[Key, torch.Tensor]
    arrays: Arrays


class ActionForm(Protocol):
    """How actions are stored.

    Attributes:
        space: the space of one lane's action, for texts and random draws.
        leaves: the tensors of one lane's action.
        parts: the space of each.
    """

    space: gym.Space[Any]
    leaves: Sequence[Leaf]
    parts: Sequence[gym.Space[Any]]


class EnvDriver(Protocol):
    """N lanes, stepped together.

    The engine calls, for each rollout: `bind(memory)`; for each window of it `view(start, stop)`, and then for each t,
    counted from the window's start, `step(t, actions)`; `truncate(t, lanes)` where a limit ends episodes that the
    environments would have gone on with; then `finish(made)`. Between rollouts it may call `reset`. A lane whose
    episode ended is reset before `step` returns. Times are those of the rollout, except in the steps themselves.

    Attributes:
        envs: the environments, as they were made.
        num_lanes: N.
        num_rows: of a `ScratchDriver`, M; None: every step is a frame of every lane.
        lead: the batch dimensions before time: `()` for a single environment, else `(N,)` or dimensions that make N.
        device: where frames are made.
        ends: (t, lane) of every episode that ended in this rollout, in order of time.
        failed_lane: the lane whose environment raised, else None.
        failed_step: the step of the rollout that it was about; None: the one under way.
        leaves: the tensors of an observation, by their key at the root of a batch; each stands below "next" too.
        loose: what is observed and has no fixed form, by key: for each step so far what all lanes showed before it.
        after_leaves: what is recorded under "next" alone: the reward and what is asked for of the infos.
        reward_keys: those of `after_leaves` that add up to the reward of a lane.
        truncated_keys: keys under "next", beside the root's own, that say which parts of a lane were truncated; each
            stands beside a "done".
        whole_key: where the whole observation stands: () where its keys stand at the root.
        action_codec: how actions are stored.
        draw: random actions for what the lanes show now, `[N, *shape]` a leaf of the action, drawn from this generator
            or from torch's; None: they are drawn from the action space, and by the "action_mask" among `leaves`.
        refuses_lane_resets: why lanes cannot be reset one by one; None: they can.
        refuses_lane_seeds: why some lanes cannot be seeded without the others; None: they can.
        refuses_options: why a reset takes no options; None: it does.
        largest_seed: that the environments take; None: any.
        steps_one_by_one: whether each lane is an environment of its own, which begins an episode when this steps it.
    """

    envs: Sequence[Any]
    num_lanes: int
    num_rows: int | None
    lead: tuple[int, ...]
    device: torch.device
    ends: list[tuple[int, int]]
    failed_lane: int | None
    failed_step: int | None
    leaves: Sequence[Leaf]
    loose: Mapping[Key, Sequence[Any]]
    after_leaves: Sequence[Leaf]
    reward_keys: Sequence[Key]
    truncated_keys: Sequence[Key]
    whole_key: Key
    action_codec: ActionForm
    draw: Callable[[np.random.Generator], Sequence[Any]] | None
    refuses_lane_resets: str | None
    refuses_lane_seeds: str | None
    refuses_options: str | None
    largest_seed: int | None
    steps_one_by_one: bool

    @property
    def env_seconds(self) -> float:
        """Time spent inside environments during `audit_step`, in total."""

    @property
    def primed(self) -> Mapping[Key, torch.Tensor]:
        """Observations that a policy may take over as state of its own, by key: as they are at first, `[*shape]`."""

    def leave_to_policy(self, keys: Collection[Key]) -> None:
        """These of the `primed` are the policy's; called before the first rollout."""

    @property
    def current(self) -> Mapping[Key, Any]:
        """The newest observation of every lane, `[N, *shape]` by key; valid between rollouts."""

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations."""

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout."""

    def step(self, t: int, actions: Sequence[Any]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""

    def audit_step(self, t: int, actions: Sequence[Any]) -> None:
        """`step`, with the time in the environments measured and their answers held against their spaces."""

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: fills in what follows from the frames, lets the memory go."""

    def loose_batch(self, made: int) -> Mapping[Key, Any]:
        """What has no fixed form, of the rollout that was finished: `[*lead, made]` by key, below "next" too."""

    def state_dict(self) -> dict[str, Any]:
        """What can be saved of the environments."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved."""

    def open_episodes(self) -> dict[str, Any]:
        """By lane, as plain values, what the episode under way goes on from; lanes that cannot tell it are missing."""

    def reopen(self, episodes: Mapping[str, Any]) -> Collection[int]:
        """Goes on with episodes that `open_episodes` told, after `load_state_dict`; the lanes that do."""

    def seed_episodes(self, roots: Sequence[Root]) -> None:
        """Where each episode has a seed of its own: those of each lane are children of its root from now on."""

    def number_episodes(self, numbers: Mapping[int, int]) -> None:
        """The episode that begins next in each of these lanes has this number."""

    def close(self) -> list[BaseException]:
        """Closes the environments that are ours, once; the errors that came."""


class ScratchDriver(EnvDriver, Protocol):
    """A driver that cannot give a frame of every lane at every step: its steps go to a scratch memory.

    The policy is called on M rows, each of which stands for a lane. Memory is `[M, S, *shape]`, and one step longer
    than what is made of it: row t + 1 holds what the lanes show after step t, and the reward and flags in row t are
    those that came with it. What came to a row belongs to the action that its lane was given last. What a lane had come
    to when its episode ended is in row t below "next": row t + 1 then shows what row t did, which a policy can act on.

    Attributes:
        row_lanes: int64 `[S, M]`, whose row it is.
        is_frame: bool `[S, M]`, whether what came with the row is a frame, and not the beginning of an episode.
        starts: (t, row) after which a row shows the first observation of an episode, in order of time.
        fresh: rows that showed the first observation of an episode when the rollout began.
        cuts: those of `starts` whose lane began anew though the episode before had not ended.

    `is_frame`, `ends` and `starts` are up to date after `settle` and `finish`.
    """

    row_lanes: Array
    is_frame: Array
    starts: list[tuple[int, int]]
    fresh: list[int]
    cuts: Sequence[tuple[int, int]]

    def settle(self, made: int) -> None:
        """Brings `is_frame`, `ends` and `starts` up to what the first `made` steps of the rollout have given."""


class Actor(Protocol):
    """Chooses the actions of every lane; the loop calls `write(t, call(*observations[t]))`, t in a window of a rollout.

    All three may be other ones in each window.
    """

    @property
    def observations(self) -> Sequence[tuple[Any, ...]]:
        """For each t, the arguments of `call`."""

    @property
    def call(self) -> Callable[..., Any]:
        """From observations to outputs."""

    @property
    def write(self) -> Callable[[int, Any], Sequence[Array]]:
        """`write(t, outputs)` stores the outputs in row t, and gives the actions as stored: `[N, *shape]` a leaf."""

    def check(self, outputs: Any) -> None:
        """Holds outputs against the first ones there were; called for sampled steps."""


class Interruptor(Protocol):
    """Asked after each step whether to stop a rollout short; what starts and stops it is the user."""

    def start_collection(self) -> None:
        """Lets rollouts run."""

    def stop_collection(self) -> None:
        """Asks for the rollout under way to end at its next frame."""

    def collection_stopped(self) -> bool:
        """Whether it was asked to stop."""


class WorkerPool(Protocol):
    """Workers, wherever they are. Each command gets one reply, with its number.

    A worker does commands one after the other. What a command raises comes as a reply, or is raised by `ready`.

    Attributes:
        is_spent: whether it can be used no more.
    """

    is_spent: bool

    def __len__(self) -> int:
        """How many there are."""

    def new_number(self) -> int:
        """A number for a command, larger than those before."""

    def submit(
        self,
        worker: int,
        command: Any,
        *,
        in_turn: bool = True,
        attached: Sequence[Any] = (),
        number: int | None = None,
    ) -> int:
        """Has a command done.

        Args:
            worker: by whom.
            command: what.
            in_turn: after all that were submitted before; else before those that wait for their turn.
            attached: what goes with it and no message can hold: file descriptors between processes, references to
                objects on Ray.
            number: that it gets; None: a new one.

        Returns:
            Its number.
        """

    def stop(self, worker: int, number: int) -> None:
        """A command of this number, or of a lower one, may end early if it can. Nothing waits for that."""

    def withdraw(self, worker: int) -> int:
        """Commands that wait for their turn are not to be done: they get replies that say so, before this one's."""

    def ready(self, timeout: float | None) -> Sequence[Any]:
        """The replies that have come; waits for one where there are none. None after `timeout` seconds.

        The same are given again until `done` says that they were taken: a Ctrl-C in between loses none.

        Raises:
            WorkerDied: a worker is gone, and will not reply.
        """

    def done(self) -> None:
        """The replies that `ready` gave were taken."""

    def told(self, worker: int) -> str:
        """What a worker is doing, in words."""

    def shutdown(self, timeout: float = ...) -> None:
        """Ends the workers, within a few seconds. Safe to call again."""


class RevivablePool(WorkerPool, Protocol):
    """A pool whose workers can be put in the place of others that failed."""

    def retire(self, worker: int) -> None:
        """Ends a worker, whatever it does; it is then neither heard nor waited for. Safe to call again."""

    def restart(self, worker: int) -> None:
        """Starts another in its place. What the old one had been sent is lost."""

    def kept(self, worker: int, number: int) -> int:
        """How many steps of what this command asked for stand where they belong, whatever became of the worker."""

    def count(self, worker: int) -> int:
        """How many steps it said to have made."""

    def last_sign(self, worker: int) -> float:
        """When a worker was last heard of, by the machine's monotonic clock."""
