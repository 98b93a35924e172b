"""One episode, run again from its seed: by a worker that is made for it, in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcollect.envs.make import is_sequence, lane_sources
from rlcollect.envs.open import is_environment
from rlcollect.errors import OptionError
from rlcollect.interfaces import EnvDriver
from rlcollect.options import How, What, Where
from rlcollect.seeds import Root
from rlcollect.weights.naming import module_of
from rlcollect.workers.commands import Build
from rlcollect.workers.worker import Worker

__all__ = ["replayed"]

AT_A_TIME = 256  # frames


def replayed(
    source: Any,
    policy: Any,
    what: What,
    where: Where,
    how: How,
    *,
    weights: Mapping[str, Any] | None,
    root: Root,
    lane: int,
    lanes: int,
    episode: int,
    max_frames: int,
) -> TensorDictBase:
    """The frames of an episode, `[1, T]`, or `[T]` where lanes are single ones.

    Args:
        source: what the worker makes its environments of.
        policy: as the user passed it.
        what: options of the worker.
        where: likewise.
        how: likewise.
        weights: for the policy, where a factory makes it.
        root: of the lane's seeds.
        lane: which of the worker's.
        lanes: how many it has.
        episode: its number in that lane.
        max_frames: after which it is broken off.

    Raises:
        OptionError: the source is an instance, which cannot be made again, or makes all lanes at once.
        What is raised while it runs, from a `WorkerError`.
    """
    build = _build(source, policy, what, where, how, root=root, lane=lane, lanes=lanes)
    worker = Worker(replace(build, weights=weights), _nobody)
    try:
        engine, driver = worker.engine, worker.driver
        engine.interruptor = _UntilTheEnd(driver)
        driver.seed_episodes([root])
        engine.episodes.numbers[:] = episode - 1
        engine.reset([0])
        parts: list[TensorDictBase] = []
        made = 0
        while made < max_frames:
            steps = min(AT_A_TIME, max_frames - made)
            part = engine.rollout(steps)
            parts.append(part)
            made += steps
            if driver.ends:
                break
        joined: TensorDictBase = torch.cat(parts, -1)
        return joined
    finally:
        worker.close()


def _build(source: Any, policy: Any, what: What, where: Where, how: How, *, root: Root, lane: int, lanes: int) -> Build:
    batched = where.num_envs is not None or is_sequence(source)
    sources = lane_sources(source, where.num_envs, where.create_env_kwargs, is_environment)
    if len(sources) != lanes:
        raise OptionError(f"The {lanes} lanes are made at once, as a vector environment; replay() makes single ones.")
    made_of, kwargs = sources[lane]
    if is_environment(made_of):
        raise OptionError(
            f"Lane {lane} is an instance that was passed in, and is in use; to replay its episodes pass a callable "
            "that makes it."
        )
    options = what.reset_options
    return Build(
        made_of,
        policy if module_of(policy) is None else copy.deepcopy(policy),
        replace(
            what,
            frames_per_batch=AT_A_TIME,
            total_frames=-1,
            init_random_frames=None,
            reset_at_each_iter=False,
            set_truncated=False,
            resume="cut",
            reset_options=_of_lane(options, lane) if callable(options) else options,
        ),
        replace(where, num_envs=1 if batched else None, create_env_kwargs=kwargs, storing_device=None),
        replace(how, interruptor=None, pre_collect_hook=None, post_collect_hook=None),
        reuse=False,
        same=False,
        worker=root[1],
        workers=1,
        share=1,
        seed=torch.initial_seed(),
    )


def _of_lane(options: Any, lane: int) -> Any:
    """Reset options as that lane gets them."""

    def of_lane(_: int, episode: int, info: dict[str, Any]) -> Mapping[str, Any] | None:
        given: Mapping[str, Any] | None = options(lane, episode, info)
        return given

    return of_lane


class _UntilTheEnd:
    """Stops a rollout with the end of its first episode."""

    def __init__(self, driver: EnvDriver) -> None:
        self._driver = driver

    def start_collection(self) -> None:
        """It is never stopped from outside."""

    def stop_collection(self) -> None:
        """It is never stopped from outside."""

    def collection_stopped(self) -> bool:
        """Whether the episode has ended."""
        return bool(self._driver.ends)


def _nobody(stage: str) -> None:
    """Nobody asks what is being done."""
