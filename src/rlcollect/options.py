"""The options of a collector: each declared, documented and checked in this file, and nowhere else.

Four frozen value objects carry them through the house: `What` to collect, `Where` the frames are made, `How` actions
are chosen, and the `Sink` that takes the batches. What only some kinds have is in `Workers` (processes) and `Stacking`
(batches of several workers). A collector's flat constructor is made from their fields
(`collectors.base`). To add an option: a field here, its use in the room that needs it, a test.

This module knows no room of the house; it checks values, not environments.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from rlcollect.devices import Placement, device_of, resolve
from rlcollect.errors import OptionError

__all__ = [
    "ExplorationType",
    "How",
    "Sink",
    "Stacking",
    "Staleness",
    "Sync",
    "What",
    "Where",
    "Workers",
    "exploration_type",
    "option_fields",
    "parse_options",
    "set_exploration_type",
]

ExplorationType: TypeAlias = InteractionType
exploration_type = interaction_type
set_exploration_type = set_interaction_type

NestedKey = str | tuple[str, ...]
LATER = "this release does not have it yet"
ELSEWHERE = {  # names that users of this field may try
    "seed": "call set_seed(seed)",
    "max_steps": "max_frames_per_traj limits episodes, total_frames all of them",
    **dict.fromkeys(
        (
            *("replay_buffer", "extend_buffer"),
            "trajs_per_batch",
        ),
        LATER,
    ),
}
ALIASES = {  # the same under another name
    "num_collectors": "num_workers",
    "update_after_each_batch": "update_at_each_batch",
}
WORKERS_ONLY = "there is one worker, in this process; it is an option of MultiSyncCollector, MultiAsyncCollector and "
WORKERS_ONLY += "AsyncCollector"
RESTING = "workers rest between two batches, and take the newest weights for each; it is an option of "
RESTING += "MultiAsyncCollector and AsyncCollector"
DEVICES = ("device", "policy_device", "env_device", "storing_device")
RECORDABLE = ("is_init", "step_count", "worker", "mask")


def _option(doc: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc})


def _positive(name: str, value: object) -> int:
    """`value` as a positive int, whatever integer type it came as."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{name} must be a positive integer, not {value!r}.")
    return number


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}.")


def _switch(name: str, value: Any) -> dict[str, Any] | None:
    """The arguments of something that is switched on, by True or by giving them; None: it is off."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be True, False or a mapping of arguments, not {value!r}.")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise OptionError(f"{name} takes arguments by name, not {wrong[0]!r}.")
    return dict(value)


def _state(name: str, value: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """State by key, as tensors."""
    if value is None:
        return {}
    if not isinstance(value, Mapping | TensorDictBase):
        raise OptionError(f"{name} takes a mapping from keys to tensors, not {value!r}.")
    if isinstance(value, TensorDictBase):
        value = dict(value.items(True, True))
    keys = _keys(name, value)
    try:
        return {key: torch.as_tensor(tensor) for key, tensor in zip(keys, value.values(), strict=True)}
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"{name} takes a mapping from keys to tensors; {value!r} came.") from error


def _keys(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Keys as tuples; a single string is one key."""
    if not isinstance(value, Iterable):
        raise OptionError(f"{name} takes keys, strings or tuples of strings, not {value!r}.")
    keys = [value] if isinstance(value, str) else list(value)
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if not (isinstance(parts, tuple) and parts and all(isinstance(part, str) for part in parts)):
            raise OptionError(f"{name} takes strings or tuples of strings, not {key!r}.")
    return tuple((key,) if isinstance(key, str) else key for key in keys)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a callable can be called with so many positional arguments, as far as can be known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def _seconds(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        raise OptionError(f"{name} must be a positive number of seconds, or None, not {value!r}.")


def _of_worker(name: str, given: Any, worker: int, workers: int) -> Any:
    """One of several values, if there are several."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) != workers:
        raise OptionError(f"{name} is a list of {len(given)}, and there are {workers} workers.")
    return given[worker]


@dataclass(frozen=True, kw_only=True)
class What:
    """What to collect: how many frames, where episodes are cut, which keys a batch holds."""

    frames_per_batch: int = _option(
        "Frames in a batch, over all lanes. Rounded up to a multiple of the lanes, with a warning."
    )
    total_frames: int = _option(
        "Frames after which the collector is exhausted, -1 for never. Exact: the last batch is shorter in time; "
        "only what the lanes cannot divide is rounded up, with a warning.",
        -1,
    )
    max_frames_per_traj: int | None = _option(
        "Frames after which an episode is truncated and its lane (alone) reset. Adds `step_count`. None, -1 and 0: no "
        "limit.",
        None,
    )
    init_random_frames: int | None = _option(
        "Frames, over all lanes, whose actions are random before the policy takes over. None, -1 and 0 mean none. "
        "Their policy_version is -1, and what else the policy writes is zero there (recurrent state: its initial "
        "value).",
        None,
    )
    reset_at_each_iter: bool = _option("Reset every lane at the start of each batch.", False)
    set_truncated: bool = _option(
        "Mark the last frame of each lane of the delivered batch as truncated (and done). The episode goes on.", False
    )
    track_traj_ids: bool = _option('Record ("collector", "traj_ids").', True)
    record: Sequence[str] = _option(
        'Optional keys to record: "is_init", "step_count", "worker", "mask". "is_init" is recorded also when '
        'the policy reads it; a policy that takes any TensorDict finds it there when it is recorded. "mask" says '
        "which rows hold a frame, and is recorded wherever some may hold none.",
        (),
    )
    info_keys: Sequence[NestedKey] | Mapping[NestedKey, gym.Space[Any] | None] = _option(
        'Entries of the info to record under ("next", "info", key): names, or a mapping from names to the space that '
        "states their form (None: as the first reset shows it, else a float32 scalar). Where the env leaves one out "
        "the row holds NaN (floats), -1 (signed integers), 0 (unsigned) or False.",
        (),
    )
    rename_keys: Mapping[NestedKey, NestedKey] | None = _option(
        "New names for keys of the observation space, for those that are names of ours.", None
    )
    exclude_keys: Sequence[NestedKey] = _option("Keys of the observation space to leave out.", ())
    obs_dtype: Literal["env"] | None = _option(
        'None: float64 observations become torch\'s default float. "env": they stay as the space has them.', None
    )
    reset_options: Mapping[str, Any] | Callable[[int, int, dict[str, Any]], Mapping[str, Any] | None] | None = _option(
        "Options for the reset of EVERY episode: a mapping, or a callable of the lane, the number of the lane's "
        "episode (from 0) and the info of the step that ended the episode before (empty at first).",
        None,
    )

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "frames_per_batch", _positive("frames_per_batch", self.frames_per_batch))
        if self.total_frames != -1:
            set_field(self, "total_frames", _positive("total_frames (if not -1, for endless)", self.total_frames))
        if self.max_frames_per_traj in (0, -1):  # TorchRL's words for "no limit"
            set_field(self, "max_frames_per_traj", None)
        if self.max_frames_per_traj is not None:
            set_field(self, "max_frames_per_traj", _positive("max_frames_per_traj", self.max_frames_per_traj))
        if self.init_random_frames in (0, -1):
            set_field(self, "init_random_frames", None)
        if self.init_random_frames is not None:
            set_field(self, "init_random_frames", _positive("init_random_frames", self.init_random_frames))
        for name in ("reset_at_each_iter", "set_truncated", "track_traj_ids"):
            _flag(name, getattr(self, name))
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
        set_field(self, "exclude_keys", _keys("exclude_keys", self.exclude_keys))
        set_field(self, "info_keys", self.info_forms)
        if wrong := [form for form in self.info_forms.values() if not (form is None or isinstance(form, gym.Space))]:
            raise OptionError(f"info_keys takes spaces (or None) as forms, not {wrong[0]!r}.")
        if self.rename_keys is not None:
            if not isinstance(self.rename_keys, Mapping):
                raise OptionError(f"rename_keys takes a mapping from old to new keys, not {self.rename_keys!r}.")
            old, new = _keys("rename_keys", self.rename_keys), _keys("rename_keys", self.rename_keys.values())
            set_field(self, "rename_keys", dict(zip(old, new, strict=True)))
        if self.obs_dtype not in (None, "env"):
            raise OptionError(f'obs_dtype must be None or "env", not {self.obs_dtype!r}.')
        if not (self.reset_options is None or isinstance(self.reset_options, Mapping) or callable(self.reset_options)):
            raise OptionError(f"reset_options must be a mapping or a callable, not {self.reset_options!r}.")
        if callable(self.reset_options) and not _takes(self.reset_options, 3):
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
        keys = _keys("info_keys", self.info_keys)
        forms = self.info_keys.values() if isinstance(self.info_keys, Mapping) else [None] * len(keys)
        return dict(zip(keys, forms, strict=True))


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the frames are made and kept: lanes, environments' arguments, devices."""

    num_envs: int | None = _option(
        "Lanes made of one maker: batches are [N, T]. None: one lane, and batches are [T]; environments that hold "
        "several lanes have their own.",
        None,
    )
    env_workers: int | None = _option(
        "Processes that step the lanes, as many of them each (`ProcessVectorEnv`), while the policy is called here, "
        "for many lanes at a time. None: the lanes are stepped here.",
        None,
    )
    env_groups: int = _option(
        "Groups into which `env_workers` are divided: the policy acts for one while the others step.", 1
    )
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = _option(
        "Keyword arguments for the maker (or for `gymnasium.make`): one mapping, or one for each lane (where there are "
        "several workers: for each worker).",
        None,
    )
    masked_reset: bool | None = _option(
        'Whether a vector environment resets the lanes that `options={"reset_mask": mask}` names, and leaves the '
        "others untouched. None: as is known of Gymnasium's own.",
        None,
    )
    device: torch.device | str | int | Sequence[Any] | None = _option(
        "Stands for `policy_device` and `storing_device` where these are not given. Where there are several workers, "
        "each of the four may be a list, of one device a worker.",
        None,
    )
    policy_device: torch.device | str | int | Sequence[Any] | None = _option(
        "Where the policy computes. A module whose weights are elsewhere is copied there, and "
        "`update_policy_weights_()` copies them again. None: where its weights are.",
        None,
    )
    env_device: torch.device | str | int | Sequence[Any] | None = _option(
        "Where environments make their frames, to be held against where they do. Nothing moves them.", None
    )
    storing_device: torch.device | str | int | Sequence[Any] | None = _option(
        "Device of the delivered batches. None: where they were made.", None
    )
    no_cuda_sync: bool = _option(
        "Copy to and from a CUDA policy plainly, one tensor after the other, in the place of pinned copies that an "
        "event waits for.",
        False,
    )

    placement: Placement = dataclasses.field(init=False, repr=False, default=Placement(None, None))

    def __post_init__(self) -> None:
        for name in ("num_envs", "env_workers", "env_groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.env_groups > 1 and self.env_workers is None:
            raise OptionError(f"env_groups={self.env_groups} needs env_workers=: the processes that are divided.")
        given = self.create_env_kwargs
        each = [] if given is None else [given] if isinstance(given, Mapping) else given
        if not isinstance(each, Sequence) or not all(isinstance(kw, Mapping) for kw in each):
            raise OptionError(f"create_env_kwargs takes a mapping, or a sequence of one a lane, not {given!r}.")
        _flag("no_cuda_sync", self.no_cuda_sync)
        if self.masked_reset is not None:
            _flag("masked_reset", self.masked_reset)
        for name in DEVICES:
            device = getattr(self, name)
            if isinstance(device, list | tuple):
                devices = tuple(None if each is None else device_of(name, each) for each in device)
                object.__setattr__(self, name, devices)
            elif device is not None:
                object.__setattr__(self, name, device_of(name, device))
        if not self.is_split:
            object.__setattr__(self, "placement", resolve(*(getattr(self, name) for name in DEVICES)))

    @property
    def is_split(self) -> bool:
        """Whether a device is given for each of several workers."""
        return any(isinstance(getattr(self, name), tuple) for name in DEVICES)

    def of_worker(self, worker: int, workers: int, *, own_kwargs: bool) -> Where:
        """What holds for one of several workers.

        Args:
            worker: which.
            workers: how many there are.
            own_kwargs: whether several `create_env_kwargs` are one for each worker; else they are one for each lane.

        Raises:
            OptionError: a list of another length.
        """
        names = [*DEVICES, *(["create_env_kwargs"] if own_kwargs else [])]
        each: dict[str, Any] = {name: getattr(self, name) for name in names}
        own: dict[str, Any] = {name: _of_worker(name, value, worker, workers) for name, value in each.items()}
        return dataclasses.replace(self, **own)


@dataclass(frozen=True, kw_only=True)
class How:
    """How actions are chosen, and who may stop a rollout."""

    exploration_type: ExplorationType = _option(
        "Exploration during collection; the process-wide setting is left as it was found.", ExplorationType.RANDOM
    )
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = _option(
        "Makes the policy, in the place of `policy`: called once, where the frames are made; by each worker, if there "
        "are several, which may have a list of one each.",
        None,
    )
    trust_policy: bool = _option(
        "Believe a policy that declares its outputs (`out_keys`, and a `spec` for what is neither the action nor a "
        "log-probability), and do not call it at construction. One that does not tell all shapes, or is to be "
        "compiled, is called all the same.",
        False,
    )
    initial_policy_state: Mapping[NestedKey, Any] | None = _option(
        "Recurrent state of one lane at the start of an episode, by key: what the policy reads as `k` and writes under "
        '`("next", k)`. Tensors are read anew before each rollout, so parameters may be learned. None: '
        "what the policy's primer or spec says, else zeros of the shape that it writes. A policy that takes any "
        'TensorDict has all that it writes under "next" carried.',
        None,
    )
    check_actions: bool = _option(
        "Look at every action: no NaN, whole numbers where they are due, and in the range of a Discrete, MultiDiscrete "
        "or MultiBinary space. The error names lane and frame.",
        False,
    )
    compile_policy: bool | Mapping[str, Any] | None = _option(
        "True, or arguments for `torch.compile`: the policy is compiled at construction, by a few calls.",
        None,
    )
    cudagraph_policy: bool | Mapping[str, Any] | None = _option(
        "True, or arguments for `tensordict.nn.CudaGraphModule`: a policy on CUDA is recorded, at construction, and "
        "replayed. Weights may change in place; a change of mode is not seen.",
        None,
    )
    pre_collect_hook: Callable[[], Any] | None = _option("Called where the frames are made, before each rollout.", None)
    post_collect_hook: Callable[[Any], Any] | None = _option(
        "Called where the frames are made, after each rollout, with its batch; what it returns is not looked at. The "
        "batch is to be read only.",
        None,
    )
    interruptor: Any = _option(
        "An `Interruptor`, or an object with its methods `start_collection()`, `stop_collection()` and "
        "`collection_stopped()`: asked after each step; a rollout that it stops is delivered short. Where there are "
        "worker processes, an object of another class is asked here, every 10 ms while they are waited for.",
        None,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.exploration_type, InteractionType):
            raise OptionError(
                f"exploration_type must be an ExplorationType (ExplorationType.DETERMINISTIC, say), not "
                f"{self.exploration_type!r}."
            )
        factories = self.policy_factory if self.is_split else [self.policy_factory]
        if wrong := [each for each in factories if not (each is None or callable(each))]:  # type: ignore[union-attr]
            raise OptionError(f"policy_factory must be a callable that makes a policy, not {wrong[0]!r}.")
        for name in ("pre_collect_hook", "post_collect_hook"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise OptionError(f"{name} must be a callable, not {getattr(self, name)!r}.")
        for name in ("trust_policy", "check_actions"):
            _flag(name, getattr(self, name))
        for name in ("compile_policy", "cudagraph_policy"):
            object.__setattr__(self, name, _switch(name, getattr(self, name)))
        object.__setattr__(self, "initial_policy_state", _state("initial_policy_state", self.initial_policy_state))
        verbs = ("start_collection", "stop_collection", "collection_stopped")
        lacking = [verb for verb in verbs if not callable(getattr(self.interruptor, verb, None))]
        if self.interruptor is not None and lacking:
            raise OptionError(f"interruptor {self.interruptor!r} lacks the method {lacking[0]!r}.")

    @property
    def is_split(self) -> bool:
        """Whether a factory is given for each of several workers."""
        return isinstance(self.policy_factory, list | tuple)

    def of_worker(self, worker: int, workers: int) -> How:
        """What holds for one of several workers.

        Raises:
            OptionError: a list of another length.
        """
        factory = _of_worker("policy_factory", self.policy_factory, worker, workers)
        return dataclasses.replace(self, policy_factory=factory)


@dataclass(frozen=True, kw_only=True)
class Sink:
    """What is done with a finished batch."""

    postproc: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = _option(
        "A callable, or several in order, from batch to batch, after `split_trajs`.", None
    )
    split_trajs: bool = _option("Deliver padded trajectories (`split_trajectories`).", False)
    return_same_td: bool = _option(
        "Deliver the same TensorDict each time, ours in it overwritten by the next (a shorter batch is another one).",
        False,
    )
    use_buffers: bool = _option("Reuse the memory of batches that were let go. False: new memory for each batch.", True)

    def __post_init__(self) -> None:
        for name in ("split_trajs", "return_same_td", "use_buffers"):
            _flag(name, getattr(self, name))
        given = self.postproc
        steps = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        if wrong := [step for step in steps if not callable(step)]:
            raise OptionError(f"postproc must be a callable or a list of callables; {wrong[0]!r} is not callable.")
        object.__setattr__(self, "postproc", steps)
        if self.return_same_td and (self.split_trajs or not self.use_buffers):
            other = "split_trajs=True" if self.split_trajs else "use_buffers=False"
            raise OptionError(f"return_same_td=True does not go with {other}: that makes a new TensorDict each time.")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How weights get to where they act."""

    weight_sync_schemes: Mapping[str, Any] | None = _option(
        'A `WeightSyncScheme` for each model that takes weights: "policy" (one like the others, if it is not named), '
        'and paths to modules that environments, hooks or post-processings hold ("env.reward_model", "postproc[0]").',
        None,
    )
    weight_recv_schemes: Mapping[str, Any] | None = _option(
        "Schemes by which this collector is itself a receiver, by model: what came is handed on before each batch (see "
        "`register_scheme_receiver`).",
        None,
    )
    weight_updater: Any = _option(
        "A `WeightUpdaterBase`, or what makes one, by which `update_policy_weights_` sends the policy's weights: for "
        "updaters written for TorchRL. None: they are sent as they are.",
        None,
    )

    def __post_init__(self) -> None:
        for name in ("weight_sync_schemes", "weight_recv_schemes"):
            given = getattr(self, name)
            if not (given is None or isinstance(given, Mapping)):
                raise OptionError(f"{name} takes a mapping from models to schemes, not {given!r}.")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes that make frames."""

    num_workers: int | None = _option(
        "Worker processes made of one maker (`num_collectors` is the same). None: one for each of a sequence.", None
    )
    start_method: Literal["forkserver", "spawn", "fork"] | None = _option(
        'How processes are started. None: "forkserver", from a server that has imported torch once; where there is no '
        'such thing, "spawn". The program\'s main module is never run again: no guard is needed.',
        None,
    )
    start_timeout: float | None = _option(
        "Seconds in which all workers must have made and reset their environments. None: any.", 300.0
    )
    timeout: float | None = _option(
        "Seconds that any later wait for workers may take, before a `WorkerTimeout` says what they are doing. None: "
        "any, as long as they live.",
        None,
    )
    on_worker_failure: Literal["raise", "restart"] = _option(
        "What to do when a worker fails: its environment, policy or hook raises, its process dies, or it "
        'gives no sign of life. "raise": the error comes out, and the collector is closed. "restart": it is made anew, '
        "with environments of its own seed; its rollout goes on after the frames that stand, with new episodes, and "
        "what it was asked meanwhile (by `map_fn`, say) is asked again.",
        "raise",
    )
    max_restarts: int | None = _option(
        "Times that each worker may be started again; then the last error comes out, with a note that tells all. None: "
        "any. There is a wait before each attempt but the first in a row, of 0.1 s at first and 10 s at most.",
        10,
    )
    worker_timeout: float | None = _option(
        "Seconds without a sign of life after which a worker that has something to do is ended and started again. It "
        "gives one after each step, or every 20 ms where steps are shorter. None: it may take any time.",
        None,
    )
    num_threads: int | None = _option(
        "Threads that torch computes with in this process until `shutdown`. None: as it is, where workers rest while "
        "the program learns; where they do not, what their threads and their environments' processes leave of it.",
        None,
    )
    num_sub_threads: int = _option("Threads that torch computes with in each worker.", 1)
    update_at_each_batch: bool = _option(
        "Publish the policy's weights by itself (`update_after_each_batch` is the same): before each collection where "
        "workers rest between batches; else at the call of `next` that follows each batch.",
        False,
    )
    weights_update: Literal["rollout", "step"] = _option(
        'When workers take new weights: "rollout", before each rollout; "step", before each step (a look at a number '
        "in shared memory; each frame has the version that made it).",
        "rollout",
    )
    collector_class: Any = _option(
        "A class of collectors: each worker then holds one, and drives it by `rollout`, `reset`, `set_seed`, "
        "`state_dict`, `load_state_dict`, `update_policy_weights_` and `shutdown`. None: an engine, which is faster.",
        None,
    )

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            object.__setattr__(self, "num_workers", _positive("num_workers", self.num_workers))
        if self.num_threads is not None:
            object.__setattr__(self, "num_threads", _positive("num_threads", self.num_threads))
        object.__setattr__(self, "num_sub_threads", _positive("num_sub_threads", self.num_sub_threads))
        if self.start_method == "fork" and self.num_sub_threads > 1:
            raise OptionError(
                f'start_method="fork" does not go with num_sub_threads={self.num_sub_threads}: torch hangs in a copy '
                'of a process that has used its threads. Use "forkserver" or "spawn".'
            )
        self._check_restarts()
        for name in ("start_timeout", "timeout", "worker_timeout"):
            if getattr(self, name) is not None:
                _seconds(name, getattr(self, name))
        _flag("update_at_each_batch", self.update_at_each_batch)
        if self.weights_update not in ("rollout", "step"):
            raise OptionError(f'weights_update must be "rollout" or "step", not {self.weights_update!r}.')
        if self.weights_update == "step" and self.collector_class is not None:
            raise OptionError('weights_update="step" does not go with collector_class=: its rollouts are its own.')
        if not (self.collector_class is None or callable(self.collector_class)):
            raise OptionError(f"collector_class must be a class of collectors, not {self.collector_class!r}.")

    def _check_restarts(self) -> None:
        if self.on_worker_failure not in ("raise", "restart"):
            raise OptionError(f'on_worker_failure must be "raise" or "restart", not {self.on_worker_failure!r}.')
        if self.max_restarts is not None:
            object.__setattr__(self, "max_restarts", _positive("max_restarts", self.max_restarts))
        if self.worker_timeout is not None and not self.restarts:
            raise OptionError(
                'worker_timeout= needs on_worker_failure="restart"; timeout= limits how long a batch is waited for.'
            )
        if self.restarts and self.collector_class is not None:
            raise OptionError('on_worker_failure="restart" does not go with collector_class=.')

    @property
    def restarts(self) -> bool:
        """Whether workers that fail are started again."""
        return self.on_worker_failure == "restart"


@dataclass(frozen=True, kw_only=True)
class Stacking:
    """How the rollouts of several workers become one batch."""

    cat_results: Literal["stack"] | int = _option(
        '"stack": batches have a first dimension of workers. A number: they are joined in this dimension of a '
        "worker's batch (-1: time).",
        "stack",
    )
    preemptive_threshold: float | None = _option(
        "A share of the workers, above 0 and up to 1: when so many have finished their rollouts, the others are not "
        "waited for. None: all are.",
        None,
    )
    stragglers: Literal["stop", "continue"] = _option(
        'What becomes of the others then. "stop": they end theirs with the frame under way; rows that they have not '
        'made are marked (`("collector", "mask")` is False), or left out where rollouts are joined in time. '
        '"continue": they go on, and their rollouts come whole in a later batch; each batch has those that are ready, '
        'as many as there are, and `("collector", "worker")` says whose.',
        "stop",
    )

    def __post_init__(self) -> None:
        share = self.preemptive_threshold
        if share is not None and not (
            isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        ):
            raise OptionError(f"preemptive_threshold must be a share of the workers, in (0, 1], not {share!r}.")
        if self.stragglers not in ("stop", "continue"):
            raise OptionError(f'stragglers must be "stop" or "continue", not {self.stragglers!r}.')
        if self.stragglers == "continue" and share is None:
            raise OptionError(
                'stragglers="continue" needs preemptive_threshold=: the share of workers that are waited for.'
            )
        if self.cat_results != "stack" and (
            isinstance(self.cat_results, bool) or not isinstance(self.cat_results, int)
        ):
            raise OptionError(f'cat_results must be "stack" or a dimension, not {self.cat_results!r}.')


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How old the weights may be that made a batch."""

    max_policy_lag: int | None = _option(
        "How many versions old the weights of a delivered frame may be, for a learner that publishes at most once per "
        "`batches_per_version` batches. Rollouts begin only as versions allow, so nothing is thrown away; 0: each "
        "batch is made with the newest. None: any.",
        None,
    )
    batches_per_version: int = _option(
        "Batches that a learner takes for each version, where `max_policy_lag` is set.", 1
    )

    def __post_init__(self) -> None:
        lag = self.max_policy_lag
        if lag is not None and (isinstance(lag, bool) or not hasattr(lag, "__index__") or operator.index(lag) < 0):
            raise OptionError(f"max_policy_lag must be an integer of 0 or more, or None, not {lag!r}.")
        object.__setattr__(self, "batches_per_version", _positive("batches_per_version", self.batches_per_version))
        if self.batches_per_version > 1 and lag is None:
            raise OptionError(f"batches_per_version={self.batches_per_version} needs max_policy_lag=.")


def option_fields(kinds: Sequence[type]) -> dict[str, dataclasses.Field[Any]]:
    """Every option of these value objects, by name, in the order they are declared."""
    return {field.name: field for kind in kinds for field in dataclasses.fields(kind) if field.init}


def parse_options(owner: str, kinds: Sequence[type], given: Mapping[str, Any]) -> dict[type, Any]:
    """Sorts what the user wrote into value objects.

    Args:
        owner: the collector's name, for errors.
        kinds: the value objects that it takes.
        given: the keyword arguments.

    Raises:
        OptionError: an option that is not known (with the nearest name), is missing, or has a wrong value.
    """
    known = option_fields(kinds)
    given = _without_aliases(owner, known, given)
    for name in given:
        if name not in known:
            if name in ELSEWHERE:
                raise OptionError(f"{owner} has no option {name!r}: {ELSEWHERE[name]}.")
            if name in option_fields([Workers, Stacking, Staleness]):
                raise OptionError(f"{owner} has no option {name!r}: {_why_not(name, known)}.")
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
            raise OptionError(f"{owner} has no option {name!r}.{hint}")
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in given:
            raise OptionError(f"{owner} needs {name}=: {field.metadata['doc']}")
    return {kind: kind(**{name: given[name] for name in option_fields([kind]) if name in given}) for kind in kinds}


def _without_aliases(owner: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in given and own != name:
            raise OptionError(f"{owner} was given {name} and {own}, which are the same option.")
        plain[own if own in known else name] = value
    return plain


def _why_not(name: str, known: Mapping[str, Any]) -> str:
    if "start_method" not in known:
        return WORKERS_ONLY
    return RESTING if name in option_fields([Staleness]) else "each batch is one worker's"
