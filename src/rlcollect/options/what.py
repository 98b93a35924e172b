"""What to collect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym

from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, keys_of, option, positive, takes

__all__ = ["RECORDABLE", "NestedKey", "What"]

NestedKey = str | tuple[str, ...]

RECORDABLE = ("is_init", "step_count", "worker", "mask", "episode")


@dataclass(frozen=True, kw_only=True)
class What:
    """What to collect: how many frames, where episodes are cut, which keys a batch holds."""

    frames_per_batch: int = option(
        "Frames in a batch, over all lanes. Rounded up to a multiple of the lanes, with a warning."
    )
    total_frames: int = option(
        "Frames after which the collector is exhausted, -1 for never. Exact: the last batch is shorter in time; "
        "only what the lanes cannot divide is rounded up, with a warning.",
        -1,
    )
    max_frames_per_traj: int | None = option(
        "Frames after which an episode is truncated and its lane (alone) reset. Adds `step_count`. None, -1 and 0: no "
        "limit.",
        None,
    )
    init_random_frames: int | None = option(
        "Frames, over all lanes, whose actions are random before the policy takes over. None, -1 and 0 mean none. "
        "Their policy_version is -1, and what else the policy writes is zero there (recurrent state: its initial "
        "value).",
        None,
    )
    reset_at_each_iter: bool = option("Reset every lane at the start of each batch.", False)
    set_truncated: bool = option(
        "Mark the last frame of each lane of the delivered batch as truncated (and done). The episode goes on.", False
    )
    track_traj_ids: bool = option('Record ("collector", "traj_ids").', True)
    record: Sequence[str] = option(
        'Optional keys to record: "is_init", "step_count", "worker", "mask", "episode". "is_init" is recorded also '
        'when the policy reads it; a policy that takes any TensorDict finds it there when it is recorded. "mask" says '
        'which rows hold a frame, and is recorded wherever some may hold none. "episode" is the number of the episode '
        "in its lane, from 0.",
        (),
    )
    info_keys: Sequence[NestedKey] | Mapping[NestedKey, gym.Space[Any] | None] = option(
        'Entries of the info to record under ("next", "info", key): names, or a mapping from names to the space that '
        "states their form (None: as the first reset shows it, else a float32 scalar). Where the env leaves one out "
        "the row holds NaN (floats), -1 (signed integers), 0 (unsigned) or False.",
        (),
    )
    rename_keys: Mapping[NestedKey, NestedKey] | None = option(
        "New names for keys of the observation space, for those that are names of ours.", None
    )
    exclude_keys: Sequence[NestedKey] = option("Keys of the observation space to leave out.", ())
    obs_dtype: Literal["env"] | None = option(
        'None: float64 observations become torch\'s default float. "env": they stay as the space has them.', None
    )
    reset_options: Mapping[str, Any] | Callable[[int, int, dict[str, Any]], Mapping[str, Any] | None] | None = option(
        "Options for the reset of EVERY episode: a mapping, or a callable of the lane, the number of the lane's "
        "episode (from 0) and the info of the step that ended the episode before (empty at first).",
        None,
    )
    seed_per_episode: bool = option(
        "Seed the reset of every episode, by a child of the seed for (worker, lane, episode): so that `replay` can run "
        "it again. For environments that hold one lane each.",
        False,
    )
    resume: Literal["state", "replay", "cut"] = option(
        'What becomes of episodes under way when a state is saved and loaded. "state": they go on, bit by bit, where '
        "environments tell and take their state (`get_state`, `set_state`; Gymnasium's wrappers, classic control and "
        'MuJoCo), and are cut elsewhere. "replay": where they do not, the actions of the episode are kept, played '
        'again, and what comes of them is compared. "cut": new episodes begin.',
        "state",
    )

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "frames_per_batch", positive("frames_per_batch", self.frames_per_batch))
        if self.total_frames != -1:
            set_field(self, "total_frames", positive("total_frames (if not -1, for endless)", self.total_frames))
        if self.max_frames_per_traj in (0, -1):  # TorchRL's words for "no limit"
            set_field(self, "max_frames_per_traj", None)
        if self.max_frames_per_traj is not None:
            set_field(self, "max_frames_per_traj", positive("max_frames_per_traj", self.max_frames_per_traj))
        if self.init_random_frames in (0, -1):
            set_field(self, "init_random_frames", None)
        if self.init_random_frames is not None:
            set_field(self, "init_random_frames", positive("init_random_frames", self.init_random_frames))
        for name in ("reset_at_each_iter", "set_truncated", "track_traj_ids", "seed_per_episode"):
            flag(name, getattr(self, name))
        if self.resume not in ("state", "replay", "cut"):
            raise OptionError(f'resume must be "state", "replay" or "cut", not {self.resume!r}.')
        self._check_keys()

    def _check_keys(self) -> None:
        set_field = object.__setattr__
        record = (self.record,) if isinstance(self.record, str) else self.record
        if not isinstance(record, Iterable):
            raise OptionError(f"record takes {', '.join(map(repr, RECORDABLE))}, not {record!r}.")
        record = tuple(record)
        if unknown := [key for key in record if key not in RECORDABLE]:
            raise OptionError(f"record takes {', '.join(map(repr, RECORDABLE))}, not {unknown[0]!r}.")
        set_field(self, "record", record)
        set_field(self, "exclude_keys", keys_of("exclude_keys", self.exclude_keys))
        set_field(self, "info_keys", self.info_forms)
        if wrong := [form for form in self.info_forms.values() if not (form is None or isinstance(form, gym.Space))]:
            raise OptionError(f"info_keys takes spaces (or None) as forms, not {wrong[0]!r}.")
        if self.rename_keys is not None:
            if not isinstance(self.rename_keys, Mapping):
                raise OptionError(f"rename_keys takes a mapping from old to new keys, not {self.rename_keys!r}.")
            old, new = keys_of("rename_keys", self.rename_keys), keys_of("rename_keys", self.rename_keys.values())
            set_field(self, "rename_keys", dict(zip(old, new, strict=True)))
        if self.obs_dtype not in (None, "env"):
            raise OptionError(f'obs_dtype must be None or "env", not {self.obs_dtype!r}.')
        if not (self.reset_options is None or isinstance(self.reset_options, Mapping) or callable(self.reset_options)):
            raise OptionError(f"reset_options must be a mapping or a callable, not {self.reset_options!r}.")
        if callable(self.reset_options) and not takes(self.reset_options, 3):
            raise OptionError(
                f"reset_options={self.reset_options!r} should take three arguments: the lane, the number of its "
                "episode, and the info of the step that ended the one before."
            )

    @property
    def recorded(self) -> frozenset[str]:
        """The optional keys that are recorded, whether asked for or because another option needs them."""
        needed = [("step_count", self.max_frames_per_traj is not None), ("traj_ids", self.track_traj_ids)]
        return frozenset([*self.record, *(name for name, is_needed in needed if is_needed)])

    @property
    def info_forms(self) -> dict[tuple[str, ...], gym.Space[Any] | None]:
        """The entries to record; None: in the form that the first reset shows."""
        keys = keys_of("info_keys", self.info_keys)
        forms = self.info_keys.values() if isinstance(self.info_keys, Mapping) else [None] * len(keys)
        return dict(zip(keys, forms, strict=True))
