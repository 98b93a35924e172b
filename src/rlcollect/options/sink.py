"""What is done with a finished batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, option, positive

__all__ = ["Sink"]


@dataclass(frozen=True, kw_only=True)
class Sink:
    """What is done with a finished batch."""

    postproc: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = option(
        "A callable, or several in order, from batch to batch, after `split_trajs`. Modules are moved to "
        "`storing_device` (or `device`), once, if that is given.",
        None,
    )
    split_trajs: bool = option("Deliver padded trajectories (`split_trajectories`).", False)
    trajs_per_batch: int | None = option(
        "Deliver batches of so many whole episodes, each from its first frame to its done, whatever rollouts they were "
        "made in. `frames_per_batch` is then the size of these; collection ends with the first batch at `total_frames` "
        "or over it. None: batches are rollouts.",
        None,
    )
    traj_format: Literal["padded", "cat", "nested"] = option(
        'Whole episodes are "padded": `[trajs, T]` with `("collector", "mask")`; "cat": `[frames]`, one after the '
        'other; or "nested": `[trajs]` of jagged tensors.',
        "padded",
    )
    traj_order: Literal["started", "lanes"] = option(
        'Which whole episodes come first, so that short ones are not preferred. "started": those that began first; '
        'none is left out, and all wait for the longest. "lanes": each lane gives one in turn; of lanes with short '
        "ones those that would have to wait too long are left out, from their first frame on (`stats().dropped`).",
        "started",
    )
    max_open_frames: int = option(
        "Frames that an episode may have without an end, where whole ones are delivered and `max_frames_per_traj` does "
        "not end them: past it there is an error, since they are kept in memory.",
        100_000,
    )
    fragment_len: int | None = option(
        "Cut episodes into pieces of so many frames, and pad them to it; none goes beyond an episode, or a batch.", None
    )
    return_same_td: bool = option(
        "Deliver the same TensorDict each time, ours in it overwritten by the next (a shorter batch is another one).",
        False,
    )
    use_buffers: bool = option("Reuse the memory of batches that were let go. False: new memory for each batch.", True)
    replay_buffer: Any = option(
        "A `ReplayBuffer`, or anything with an `extend` (TorchRL's), to which frames are written; `next` then returns "
        "None, and collection can go on in the background (`start`). Worker processes write to a shared one of ours "
        "themselves, remotes of a cluster to a `RayReplayBuffer`.",
        None,
    )
    extend_buffer: bool = option(
        "Whether a buffer gets whole rollouts, post-processed; with False, frames as soon as they are made, a step of "
        "all lanes at a time (where lanes cannot be stepped together, or the buffer is not ours and workers are "
        "processes: when their rollout is made).",
        True,
    )
    compact_obs: bool = option(
        "Deliver each batch as a `CompactBatch`, in which observations stand once; its `expand()` gives what is "
        "delivered without.",
        False,
    )

    def __post_init__(self) -> None:
        for name in ("split_trajs", "return_same_td", "use_buffers", "compact_obs", "extend_buffer"):
            flag(name, getattr(self, name))
        self._check_episodes()
        given = self.postproc
        steps = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        if wrong := [step for step in steps if not callable(step)]:
            raise OptionError(f"postproc must be a callable or a list of callables; {wrong[0]!r} is not callable.")
        object.__setattr__(self, "postproc", steps)
        if self.return_same_td and (self.split_trajs or not self.use_buffers):
            other = "split_trajs=True" if self.split_trajs else "use_buffers=False"
            raise OptionError(f"return_same_td=True does not go with {other}: that makes a new TensorDict each time.")
        if self.compact_obs:
            self._check_compact()
        self._check_buffer()

    @property
    def changes_rollouts(self) -> bool:
        """Whether batches are other than rollouts as they are made: what a buffer gets is then made by the program."""
        return bool(self.postproc or self.split_trajs or self.fragment_len or self.trajs_per_batch)

    def _check_buffer(self) -> None:
        """What does not go with a buffer."""
        if self.replay_buffer is None:
            if not self.extend_buffer:
                raise OptionError("extend_buffer=False needs replay_buffer=.")
            return
        if not callable(getattr(self.replay_buffer, "extend", None)):
            raise OptionError(
                f"replay_buffer must be a ReplayBuffer, or have an extend(batch); {self.replay_buffer!r} came."
            )
        refused = {"return_same_td": "no batch is delivered, frames are in the buffer"}
        if not self.extend_buffer:
            why = "frames are written before there is a batch (extend_buffer=False)"
            refused |= dict.fromkeys(("postproc", "split_trajs", "fragment_len", "trajs_per_batch"), why)
        for name, reason in refused.items():
            if given := getattr(self, name):
                raise OptionError(f"{name}={given!r} does not go with replay_buffer=: {reason}.")
        if self.trajs_per_batch and self.traj_format == "nested":
            raise OptionError('traj_format="nested" does not go with replay_buffer=, which keeps frames one by one.')

    def _check_compact(self) -> None:
        """A compact batch is no TensorDict: what needs one does not go with it."""
        for name in ("split_trajs", "trajs_per_batch", "fragment_len", "postproc", "return_same_td", "replay_buffer"):
            if given := getattr(self, name):
                raise OptionError(
                    f"compact_obs=True does not go with {name}={given!r}, which needs the full form: call expand() on "
                    "batches as they come, and do it there."
                )

    def _check_episodes(self) -> None:
        for name, values in (("traj_format", ("padded", "cat", "nested")), ("traj_order", ("started", "lanes"))):
            if getattr(self, name) not in values:
                told = ", ".join(map(repr, values))
                raise OptionError(f"{name} must be one of {told}, not {getattr(self, name)!r}.")
        object.__setattr__(self, "max_open_frames", positive("max_open_frames", self.max_open_frames))
        for name in ("trajs_per_batch", "fragment_len"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive(name, getattr(self, name)))
                if self.return_same_td:
                    raise OptionError(f"return_same_td=True does not go with {name}=: no two batches are alike.")
        if self.trajs_per_batch is None:
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for name in ("traj_format", "traj_order", "max_open_frames"):
                if getattr(self, name) != defaults[name]:
                    raise OptionError(f"{name}={getattr(self, name)!r} needs trajs_per_batch=.")
        elif self.split_trajs:
            raise OptionError("split_trajs=True does not go with trajs_per_batch=: its batches hold whole episodes.")
        elif self.fragment_len is not None and self.traj_format == "cat":
            raise OptionError('fragment_len= cuts rows, and traj_format="cat" has none; use "padded" or "nested".')
