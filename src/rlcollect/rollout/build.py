"""From options to an engine: lanes are made and reset, the policy is planned and called once, memory is laid out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict.nn import set_interaction_type

from rlcollect.devices import CPU
from rlcollect.envs.calls import MASK
from rlcollect.envs.open import open_driver
from rlcollect.envs.sampling import ActionSampler, DrivenSampler, MaskedActionSampler
from rlcollect.errors import OptionError, RlcollectError, SpaceError
from rlcollect.failures import relayed, warn
from rlcollect.interfaces import EnvDriver, ScratchDriver
from rlcollect.layout import Key, Layout, Leaf, as_key
from rlcollect.memory.device import DeviceSource
from rlcollect.memory.scratch import Scratch
from rlcollect.memory.slots import SameSlot, SlotSource
from rlcollect.options import How, Sink, What, Where
from rlcollect.rollout.actors import PolicyActor
from rlcollect.rollout.chance import RandomActor, Sampler
from rlcollect.rollout.checks import ActionCheck
from rlcollect.rollout.dense import DenseEngine
from rlcollect.rollout.engine import WINDOW, Engine
from rlcollect.rollout.policy.drafts import Observed, is_declared
from rlcollect.rollout.policy.intake import (
    Acting,
    RandomPolicy,
    UntouchedBuffers,
    policy_wrapper,
    transfer_to,
    warm_calls,
)
from rlcollect.rollout.policy.plan import Plan, plan_policy
from rlcollect.rollout.policy.probe import Calling
from rlcollect.rollout.policy.stated import generators_of, looks_for_is_init
from rlcollect.rollout.scratch import ScratchEngine
from rlcollect.rollout.seeding import TorchStream, action_generator, torch_seed, untouched_randomness

__all__ = ["build_engine", "make_driver", "plan_again", "whole_steps"]


def make_driver(
    create_env_fn: Any,
    what: What,
    where: Where,
    *,
    worker: int = 0,
    seed: int = 0,
    generation: int = 0,
    before_reset: Callable[[], None] | None = None,
) -> EnvDriver:
    """Makes and resets the environments of a worker; see `open_driver`."""
    return open_driver(
        create_env_fn,
        what,
        where,
        names=_optional_names(what),
        worker=worker,
        seed=seed,
        generation=generation,
        before_reset=before_reset,
    )


def build_engine(
    driver: EnvDriver,
    acting: Acting,
    what: What,
    where: Where,
    how: How,
    sink: Sink,
    *,
    steps: int,
    worker: int = 0,
    prefix: int = 0,
    generation: int = 0,
    seed: int,
) -> tuple[Engine, Plan | None]:
    """An engine over these environments, and the plan of the policy (None: actions are random).

    Args:
        driver: made by `make_driver`.
        acting: the policy.
        what: limits and marks.
        where: devices.
        how: exploration, interruptor.
        sink: what memory is used for batches.
        steps: T of a full rollout.
        worker: number of the worker.
        prefix: of the ids of its episodes.
        generation: how many workers of this number there were before.
        seed: whose children the random streams are until others are asked for.
    """
    _check_resets(driver, what)
    _check_place(driver, where)
    acting.settle(driver.device)
    rows = driver.num_rows or driver.num_lanes
    num_lanes = driver.num_lanes if driver.lead else None
    plan = None
    if not (acting.policy is None or isinstance(acting.policy, RandomPolicy)):
        plan = _planned(acting, driver, rows if driver.lead else None, what, where, how, worker)
        if plan.reads_is_init:
            what = replace(what, record=(*what.record, "is_init"))
    layout = Layout(_leaves(driver, plan, what))
    source = _source(driver, layout, num_lanes, steps, what, where, sink)
    same = SameSlot(source) if sink.return_same_td else None
    parts: dict[str, Any] = {
        "policy": None if plan is None else _actor(plan, driver, how),
        "random": _random_actor(
            driver,
            action_generator(seed, worker, generation),
            rows,
            needed=plan is None or bool(what.init_random_frames),
        ),
        "what": what,
        "how": how,
        "stream": TorchStream(torch_seed(seed, worker, generation), acting.device),
        "worker": worker,
        "prefix": prefix,
        "leaves": layout.leaves,
    }
    if not _is_scratch(driver):
        return DenseEngine(driver, same or source, **parts), plan
    assert isinstance(source, SlotSource)  # their frames are made on the host
    scratch = Scratch(Layout(_scratch_leaves(driver, plan)), min(2 * steps, WINDOW) + 1, rows, driver.num_lanes)
    return ScratchEngine(driver, source, scratch=scratch, steps=steps, same=same, **parts), plan


def plan_again(
    acting: Acting, driver: EnvDriver, what: What, where: Where, how: How, worker: int
) -> tuple[Plan, PolicyActor]:
    """A plan of the policy as it is now, and what acts by it, over environments that have an engine already."""
    rows = driver.num_rows or driver.num_lanes
    plan = _planned(acting, driver, rows if driver.lead else None, what, where, how, worker)
    return plan, _actor(plan, driver, how)


def _actor(plan: Plan, driver: EnvDriver, how: How) -> PolicyActor:
    return PolicyActor(
        plan,
        len(driver.action_codec.leaves),
        batched=bool(driver.lead),
        check_actions=ActionCheck(driver.action_codec) if how.check_actions else None,
        on_host=driver.device == CPU,
    )


def _source(
    driver: EnvDriver, layout: Layout, num_lanes: int | None, steps: int, what: What, where: Where, sink: Sink
) -> SlotSource | DeviceSource:
    """Where rollouts get their memory from: it lies where frames are made."""
    if driver.device == CPU:
        told = where.placement.storing if where.placement.storing == CPU else None
        return SlotSource(layout, num_lanes, steps, reuse=sink.use_buffers, device=told, lead=driver.lead)
    flags = ["done", "terminated", "truncated", *(name for name in ("step_count", "is_init") if name in what.recorded)]
    parts = [(*key[:-1], name) for key in driver.truncated_keys for name in ("truncated", "done")]
    on_host = [(name,) for name in flags] + [("next", *key) for key in (*driver.reward_keys, *parts)]
    on_host += [("next", name) for name in flags]
    on_host += [leaf.key for leaf in layout.leaves if leaf.key[0] == "collector"]
    return DeviceSource(layout, on_host, num_lanes=num_lanes, lead=driver.lead, device=driver.device)


def _check_place(driver: EnvDriver, where: Where) -> None:
    if where.placement.env not in (None, driver.device):
        raise OptionError(
            f"env_device={str(where.placement.env)!r}: the environments make their frames on {driver.device}, and "
            "nothing moves them. Leave it out; policy_device= says where the policy computes, storing_device= where "
            "batches are delivered."
        )


def _is_scratch(driver: EnvDriver) -> TypeGuard[ScratchDriver]:
    return driver.num_rows is not None


def _check_resets(driver: EnvDriver, what: What) -> None:
    """Options that reset lanes one by one need environments that can be."""
    for name, asked in (("seed_per_episode=True", what.seed_per_episode), ('resume="replay"', what.resume == "replay")):
        if asked and not driver.steps_one_by_one:
            raise OptionError(f"{name} is for environments that hold one lane each, and are stepped one by one.")
    if driver.refuses_lane_resets is None:
        return
    for name, asked in (
        ("max_frames_per_traj", what.max_frames_per_traj is not None),
        ("reset_at_each_iter", what.reset_at_each_iter),
    ):
        if asked:
            raise OptionError(f"{name}: {driver.refuses_lane_resets}")


def _planned(
    acting: Acting, driver: EnvDriver, num_lanes: int | None, what: What, where: Where, how: How, worker: int
) -> Plan:
    """The policy's plan; its probe leaves random states and module buffers as they were."""
    policy = acting.policy
    taken_over = _taken_over(policy, driver)
    current = {key: torch.as_tensor(value).clone() for key, value in driver.current.items()}
    observation: dict[Key, Any] = (
        current if num_lanes is not None else {key: tensor[0] for key, tensor in current.items()}
    )
    marks_first = looks_for_is_init(policy) or ("is_init" in what.recorded and not is_declared(policy))
    observation = {**{key: shown[-1] for key, shown in driver.loose.items()}, **observation}
    pool = driver.num_lanes if num_lanes is not None and num_lanes < driver.num_lanes else None
    observed = Observed(
        observation, num_lanes, driver.whole_key, marks_first=marks_first, pool=pool, loose=frozenset(driver.loose)
    )
    calling = Calling(
        how.exploration_type,
        ours=_optional_names(what),
        initial={**taken_over, **how.initial_policy_state},  # type: ignore[dict-item]
        trusted=how.trust_policy,
        twins=how.compile_policy is None,
        wrap=policy_wrapper(how, acting.device),
        warm_calls=warm_calls(how),
        transfer=transfer_to(acting.device, where, driver.device),
    )
    try:
        with (
            untouched_randomness(generators_of(policy)),
            UntouchedBuffers(policy) as buffers,
            set_interaction_type(how.exploration_type),
        ):
            plan = plan_policy(policy, observed, driver.action_codec, calling)
    except RlcollectError:
        raise
    except BaseException as error:
        raise relayed(error, worker=worker, lane=None, step=0)  # noqa: B904 - it has a cause of its own
    acting.leave_out(buffers.changed)
    return plan


def _taken_over(policy: Any, driver: EnvDriver) -> dict[Key, torch.Tensor]:
    """State of the policy that the environment has among its observations, for a policy that does not carry its own."""
    reads, writes = ({as_key(key) for key in getattr(policy, name, ())} for name in ("in_keys", "out_keys"))
    found = {key: value for key, value in driver.primed.items() if key in reads and ("next", *key) in writes}
    driver.leave_to_policy(found)
    return found


def _random_actor(driver: EnvDriver, generator: np.random.Generator, rows: int, *, needed: bool) -> RandomActor:
    codec = driver.action_codec
    mask = next((leaf for leaf in driver.leaves if leaf.key[0] == MASK[0]), None)
    if needed and driver.draw is None and mask is not None and mask.key != MASK:
        raise SpaceError(
            '"action_mask" has parts in the observation space, which random actions cannot respect: it should be one '
            'array, the parts in a row. Wrap the environment, or rename it: rename_keys={"action_mask": ...}.'
        )

    def make(generator: np.random.Generator) -> Sampler:
        if driver.draw is not None:
            return DrivenSampler(driver.draw, generator)
        if mask is None or not needed:
            return ActionSampler(codec, rows, generator)
        return MaskedActionSampler(codec, mask, rows, generator)

    return RandomActor(make, generator, codec.leaves)


def _optional_names(what: What) -> list[str]:
    return [name for name in ("is_init", "step_count") if name in what.recorded]


def _leaves(driver: EnvDriver, plan: Plan | None, what: What) -> list[Leaf]:
    """Every tensor of a frame, in the order of a batch."""
    outputs = driver.action_codec.leaves if plan is None else plan.outputs
    flags = [Leaf((name,), (1,), torch.bool) for name in ("done", "terminated", "truncated")]
    recorded = what.recorded
    count = [Leaf(("step_count",), (1,), torch.int64)] if "step_count" in recorded else []
    first = [Leaf(("is_init",), (1,), torch.bool)] if "is_init" in recorded else []
    reward, infos = _split(driver)
    after = [*driver.leaves, *reward, *flags, *count, *infos]
    marks = [Leaf(("policy_version",), (), torch.int64)]
    if "traj_ids" in recorded:
        marks.insert(0, Leaf(("traj_ids",), (), torch.int64))
    marks += [Leaf((name,), (), torch.int64) for name in ("worker", "episode") if name in recorded]
    if _is_scratch(driver) or "mask" in recorded:
        marks.append(Leaf(("mask",), (), torch.bool))
    return [
        *driver.leaves,
        *([] if plan is None or plan.state is None else plan.state.leaves),
        *outputs,
        *flags,
        *first,
        *count,
        *(leaf.under("next") for leaf in after),
        *(leaf.under("collector") for leaf in marks),
    ]


def _scratch_leaves(driver: EnvDriver, plan: Plan | None) -> list[Leaf]:
    """What the steps themselves give; the rest follows from it."""
    flags = [Leaf((name,), (1,), torch.bool) for name in ("terminated", "truncated")]
    return [
        *driver.leaves,
        *([] if plan is None or plan.state is None else plan.state.leaves),
        *(driver.action_codec.leaves if plan is None else plan.outputs),
        *(leaf.under("next") for leaf in (*driver.leaves, *driver.after_leaves, *flags)),
    ]


def _split(driver: EnvDriver) -> tuple[list[Leaf], list[Leaf]]:
    """What stands under "next" alone: the reward, and the rest."""
    rewards = [leaf for leaf in driver.after_leaves if leaf.key in driver.reward_keys]
    return rewards, [leaf for leaf in driver.after_leaves if leaf.key not in driver.reward_keys]


def whole_steps(name: str, frames: int, lanes: int) -> int:
    """Steps of all lanes that make `frames` frames; one warning where that is rounded up."""
    steps = math.ceil(frames / lanes)
    if steps * lanes != frames:
        warn(f"{name}={frames} is not a multiple of the {lanes} lanes; it is rounded up to {steps * lanes}.")
    return steps
