"""What a vector environment does at an episode's end, and whether it resets the lanes it is told to and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import vector
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from rlcollect.envs.process.env import ProcessVectorEnv
from rlcollect.errors import EnvError
from rlcollect.failures import warn

__all__ = ["FINAL_NAMES", "base_of", "finals_of", "keeps_masks", "mode_of", "refuse_finals", "resets_twice"]

# Wrappers that hand reset options on, and keep nothing of their own of lanes that are not reset. (In gymnasium 1.4
# RecordEpisodeStatistics and NormalizeReward forget all lanes, and NormalizeObservation fails.)
TRANSPARENT = (
    wrappers.ClipAction,
    wrappers.RescaleAction,
    wrappers.TransformAction,
    wrappers.VectorizeTransformAction,
    wrappers.ClipReward,
    wrappers.TransformReward,
    wrappers.VectorizeTransformReward,
    wrappers.FlattenObservation,
    wrappers.GrayscaleObservation,
    wrappers.ReshapeObservation,
    wrappers.ResizeObservation,
    wrappers.RescaleObservation,
    wrappers.DtypeObservation,
    wrappers.FilterObservation,
    wrappers.TransformObservation,
    wrappers.VectorizeTransformObservation,
)
FINAL_NAMES = ("final_obs", "final_observation")  # the second is the older one, which some simulators keep


def mode_of(env: Any, assumed: AutoresetMode = AutoresetMode.NEXT_STEP) -> AutoresetMode:
    """What the environment says it does at an episode's end; one warning where it says nothing, and what is assumed.

    Raises:
        EnvError: it says something else than one of Gymnasium's modes.
    """
    told = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if told is None:
        by = "as Gymnasium does" if assumed is AutoresetMode.NEXT_STEP else "as simulators on tensors do"
        warn(
            f"{type(base_of(env)).__name__} does not say what it does at an episode's end: its "
            f'metadata["autoreset_mode"] is missing. {assumed.name} is assumed, {by}. Set it: '
            f"metadata = {{'autoreset_mode': gymnasium.vector.AutoresetMode.{assumed.name}}}."
        )
        return assumed
    try:
        return AutoresetMode(told)
    except ValueError as error:
        known = ", ".join(f"{mode.value!r}" for mode in AutoresetMode)
        raise EnvError(f'metadata["autoreset_mode"] is {told!r}; it should be an AutoresetMode: {known}.') from error


def finals_of(info: Mapping[str, Any]) -> Any:
    """What an info has of the last observations of lanes that the step has reset; None: nothing."""
    return next((info[name] for name in FINAL_NAMES if name in info), None)


def refuse_finals(info: Mapping[str, Any], mode: AutoresetMode) -> None:
    """Whether an environment of another mode resets in the step that ends an episode all the same.

    Raises:
        EnvError: its info has a last observation.
    """
    if name := next((name for name in FINAL_NAMES if name in info), None):
        raise EnvError(
            f'metadata["autoreset_mode"] says {mode.name}, and the info has {name!r}, as of an environment that resets '
            "in the step that ends an episode. If it does, let it say SAME_STEP; if not, leave it out."
        )


def base_of(env: Any) -> Any:
    """The vector environment below all wrappers, and below what makes arrays of its tensors."""
    while isinstance(env, vector.VectorWrapper) or getattr(env, "gives_arrays_of", None) is not None:
        env = env.env
    return env


def keeps_masks(env: Any, mode: AutoresetMode) -> bool:
    """Whether an environment is known to reset the lanes that `options={"reset_mask": mask}` names, and no other."""
    while isinstance(env, vector.VectorWrapper):
        if type(env) not in TRANSPARENT:
            return False
        env = env.env
    known = SyncVectorEnv, AsyncVectorEnv, ProcessVectorEnv
    return type(env) in known and not (mode is AutoresetMode.NEXT_STEP and resets_twice(env))


def resets_twice(env: Any) -> bool:
    """Whether a reset that follows an episode's end is followed by another, with the next step (gymnasium 1.4)."""
    base = base_of(env)
    return isinstance(base, AsyncVectorEnv) and not base.shared_memory
