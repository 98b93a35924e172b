"""From what the user wrote to value objects."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from rlcollect.errors import OptionError
from rlcollect.options.remotes import Remotes
from rlcollect.options.workers import Processes, Stacking, Staleness, Workers

__all__ = ["option_fields", "parse_options"]

ELSEWHERE = {  # names that users of this field may try
    "seed": "call set_seed(seed)",
    "max_steps": "max_frames_per_traj limits episodes, total_frames all of them",
}
ALIASES = {  # the same under another name
    "num_collectors": "num_workers",
    "update_after_each_batch": "update_at_each_batch",
}
WORKERS_ONLY = (
    "there is one worker, in this process; it is an option of MultiSyncCollector, MultiAsyncCollector, AsyncCollector "
    "and RayCollector"
)
RESTING = (
    "workers rest between two batches, and take the newest weights for each; it is an option of MultiAsyncCollector, "
    "AsyncCollector and RayCollector"
)
CLUSTER_ONLY = "workers are processes of this machine; it is an option of RayCollector"
PROCESSES_ONLY = "workers are actors of a cluster; it is an option of MultiSyncCollector and MultiAsyncCollector"


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
            if name in option_fields([Workers, Processes, Stacking, Staleness, Remotes]):
                raise OptionError(f"{owner} has no option {name!r}: {_why_not(name, known)}.")
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
            raise OptionError(f"{owner} has no option {name!r}.{hint}")
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in given:
            raise OptionError(f"{owner} needs {name}=: {field.metadata['doc']}")
    parsed = {kind: kind(**{name: given[name] for name in option_fields([kind]) if name in given}) for kind in kinds}
    values = {name: getattr(parsed[kind], name) for kind in kinds for name in option_fields([kind])}
    _check_whole_episodes(values)
    if Processes in kinds:
        _check_processes(values)
    if values["set_truncated"] and not values["extend_buffer"]:
        raise OptionError(
            "set_truncated does not go with extend_buffer=False: frames are written before there is a last one."
        )
    return parsed


def _check_whole_episodes(given: Mapping[str, Any]) -> None:
    """What whole episodes do not go with."""
    if given["trajs_per_batch"] is None:
        return
    for name, is_given, why in (
        ("set_truncated", given["set_truncated"], "it marks ends that are none"),
        ("reset_at_each_iter", given["reset_at_each_iter"], "it cuts episodes"),
        ("track_traj_ids=False", not given["track_traj_ids"], "episodes are told by their ids"),
        ("cat_results", given.get("cat_results", "stack") != "stack", "traj_format= says how batches are laid out"),
        ("max_policy_lag", given.get("max_policy_lag") is not None, "a batch takes as many rollouts as episodes need"),
    ):
        if is_given:
            raise OptionError(f"{name} does not go with trajs_per_batch=: {why}.")


def _check_processes(given: Mapping[str, Any]) -> None:
    """What processes of this machine do not go with."""
    if given["start_method"] == "fork" and given["num_sub_threads"] > 1:
        raise OptionError(
            f'start_method="fork" does not go with num_sub_threads={given["num_sub_threads"]}: torch hangs in a copy '
            'of a process that has used its threads. Use "forkserver" or "spawn".'
        )
    if isinstance(held := given["collector_class"], str):
        raise OptionError(f"collector_class must be a class of collectors, not {held!r}.")
    if given["weights_update"] == "step" and given["collector_class"] is not None:
        raise OptionError('weights_update="step" does not go with collector_class=: its rollouts are its own.')


def _without_aliases(owner: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in given and own != name:
            raise OptionError(f"{owner} was given {name} and {own}, which are the same option.")
        plain[own if own in known else name] = value
    return plain


def _why_not(name: str, known: Mapping[str, Any]) -> str:
    if "num_workers" not in known:
        return WORKERS_ONLY
    if name in option_fields([Remotes]):
        return CLUSTER_ONLY
    if name in option_fields([Processes]):
        return PROCESSES_ONLY
    return RESTING if name in option_fields([Staleness]) else "each batch is one worker's"
