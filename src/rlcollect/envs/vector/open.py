"""Which driver a vector environment of Gymnasium gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rlcollect.devices import CPU
from rlcollect.envs.lanes import open_lanes
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.vector.batched import check_num_envs, checked_reset
from rlcollect.envs.vector.dense import MaskedResets, SameStep
from rlcollect.envs.vector.modes import keeps_masks, mode_of, resets_twice
from rlcollect.envs.vector.pending import PendingResets
from rlcollect.envs.vector.tensors import AsArrays, TensorLanes, as_arrays, gives_tensors, parts_of
from rlcollect.errors import EnvError, OptionError
from rlcollect.interfaces import EnvDriver

__all__ = ["NEEDS", "is_vector", "open_vector"]

NEEDS = ("reset", "step", "num_envs", "single_observation_space", "single_action_space")


def is_vector(made: Any) -> bool:
    """Whether it is a vector environment of Gymnasium, or has what makes one."""
    return isinstance(made, VectorEnv) or all(hasattr(made, name) for name in NEEDS)


def open_vector(opening: Opening) -> EnvDriver:
    """Resets a vector environment, and plans how what it gives is stored.

    Raises:
        OptionError, SpaceError, EnvError: it does not fit.
        What its first reset raises, from a `WorkerError`.
    """
    env = opening.envs[0]
    check_num_envs(opening)
    if opening.where.masked_reset is None and _is_but_its_lanes(env):
        return open_lanes(dataclasses.replace(opening, envs=env.envs, batched=True))
    options = opening.what.reset_options
    with at_lane(opening.worker, None):
        first = checked_reset(env.reset(**({"options": dict(options)} if isinstance(options, Mapping) else {})))
    if gives_tensors(first[0]):
        mode = mode_of(env, assumed=AutoresetMode.SAME_STEP)
        if mode is AutoresetMode.SAME_STEP:
            return TensorLanes(opening, first)
        if any(tensor.device != CPU for _, tensor in parts_of(first[0], ("observation",))):
            raise EnvError(
                f"{type(env).__name__} gives tensors on another device than the CPU, in mode {mode.name}; there only "
                "SAME_STEP is supported."
            )
        what = dataclasses.replace(opening.what, obs_dtype="env")  # as tensors come
        opening = dataclasses.replace(opening, envs=[AsArrays(env)], what=what)
        first = as_arrays(first[0]), as_arrays(first[1])
    mode = mode_of(env)
    if mode is AutoresetMode.SAME_STEP:
        return SameStep(opening, mode, first)
    masked = opening.where.masked_reset
    if masked and mode is AutoresetMode.NEXT_STEP and resets_twice(env):
        raise OptionError(
            "masked_reset=True: an AsyncVectorEnv without shared memory, in mode NEXT_STEP, resets a lane once more "
            "after it was reset by a mask (gymnasium 1.4). Leave it out, or use shared_memory=True or mode DISABLED."
        )
    if mode is AutoresetMode.DISABLED or (keeps_masks(env, mode) if masked is None else masked):
        return MaskedResets(opening, mode, first)
    return PendingResets(opening, mode, first)


def _is_but_its_lanes(env: Any) -> bool:
    """Whether a vector environment does nothing but step its environments one after the other.

    Then they are lanes as any others: they are stepped directly, and reset as soon as they have ended, whatever the
    mode. (Gymnasium's own loop takes longer, and gathers what we would take apart.)
    """
    return (
        type(env) is SyncVectorEnv
        and not {"step", "reset"} & vars(env).keys()
        and env.single_observation_space == env.envs[0].observation_space
    )
