"""From options to an engine: lanes are made and reset, the policy is planned and called once, memory is laid out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tensordict.nn import set_interaction_type

from rlcollect.devices import CPU
from rlcollect.envs.calls import MASK
from rlcollect.envs.lanes import Lanes, open_lanes
from rlcollect.envs.make import EnvSource, lane_sources
from rlcollect.envs.sampling import ActionSampler, MaskedActionSampler
from rlcollect.errors import RlcollectError, SpaceError
from rlcollect.failures import relayed, warn
from rlcollect.layout import Layout, Leaf
from rlcollect.memory.slots import SameSlot, SlotSource
from rlcollect.options import How, Sink, What, Where
from rlcollect.rollout.actors import PolicyActor, RandomActor
from rlcollect.rollout.checks import ActionCheck
from rlcollect.rollout.engine import Engine
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
from rlcollect.rollout.seeding import TorchStream, action_generator, torch_seed, untouched_randomness

__all__ = ["build_engine", "make_lanes", "whole_steps"]


def make_lanes(create_env_fn: EnvSource | Sequence[EnvSource], what: What, where: Where, *, worker: int = 0) -> Lanes:
    """Makes and resets the lanes of a worker.

    Raises:
        OptionError, SpaceError, EnvError: they do not fit.
        What a maker, a constructor or a first reset raises, from a `WorkerError`.
    """
    sources = lane_sources(create_env_fn, where.num_envs, where.create_env_kwargs)
    return open_lanes(sources, what, _optional_names(what), worker)


def build_engine(
    lanes: Lanes,
    acting: Acting,
    what: What,
    where: Where,
    how: How,
    sink: Sink,
    *,
    steps: int,
    batched: bool,
    worker: int = 0,
) -> tuple[Engine, Plan | None]:
    """An engine over these lanes, and the plan of the policy (None: actions are random).

    Args:
        lanes: made by `make_lanes`.
        acting: the policy.
        what: limits and marks.
        where: devices.
        how: exploration, interruptor.
        sink: what memory is used for batches.
        steps: T of a full rollout.
        batched: whether batches have a dimension of lanes.
        worker: number of the worker.
    """
    num_lanes = lanes.num_lanes if batched else None
    plan = None
    if not (acting.policy is None or isinstance(acting.policy, RandomPolicy)):
        plan = _planned(acting, lanes, num_lanes, what, where, how, worker)
        if plan.reads_is_init:
            what = replace(what, record=(*what.record, "is_init"))
    layout = Layout(_leaves(lanes, plan, what))
    on_cpu = where.placement.storing if where.placement.storing == CPU else None
    source = SlotSource(layout, num_lanes, steps, reuse=sink.use_buffers, device=on_cpu)
    seed = torch.initial_seed()
    engine = Engine(
        lanes,
        SameSlot(source) if sink.return_same_td else source,
        policy=None
        if plan is None
        else PolicyActor(
            plan,
            len(lanes.action_leaves),
            batched=batched,
            check_actions=ActionCheck(lanes.action_codec) if how.check_actions else None,
        ),
        random=_random_actor(
            lanes, action_generator(seed, worker), needed=plan is None or bool(what.init_random_frames)
        ),
        what=what,
        how=how,
        stream=TorchStream(torch_seed(seed, worker), acting.device),
        worker=worker,
    )
    return engine, plan


def _planned(
    acting: Acting, lanes: Lanes, num_lanes: int | None, what: What, where: Where, how: How, worker: int
) -> Plan:
    """The policy's plan; its probe leaves random states and module buffers as they were."""
    current = {key: torch.from_numpy(array.copy()) for key, array in lanes.current.items()}
    observation = current if num_lanes is not None else {key: tensor[0] for key, tensor in current.items()}
    policy = acting.policy
    marks_first = looks_for_is_init(policy) or ("is_init" in what.recorded and not is_declared(policy))
    observed = Observed(observation, num_lanes, lanes.whole_key, marks_first=marks_first)
    calling = Calling(
        how.exploration_type,
        ours=_optional_names(what),
        initial=how.initial_policy_state,  # type: ignore[arg-type]
        trusted=how.trust_policy,
        twins=how.compile_policy is None,
        wrap=policy_wrapper(how, acting.device),
        warm_calls=warm_calls(how),
        transfer=transfer_to(acting.device, where),
    )
    try:
        with (
            untouched_randomness(generators_of(policy)),
            UntouchedBuffers(policy) as buffers,
            set_interaction_type(how.exploration_type),
        ):
            plan = plan_policy(policy, observed, lanes.action_codec, calling)
    except RlcollectError:
        raise
    except BaseException as error:
        raise relayed(error, worker=worker, lane=None, step=0)  # noqa: B904 - it has a cause of its own
    acting.leave_out(buffers.changed)
    return plan


def _random_actor(lanes: Lanes, generator: np.random.Generator, *, needed: bool) -> RandomActor:
    codec = lanes.action_codec
    mask = next((leaf for leaf in lanes.leaves if leaf.key[0] == MASK[0]), None)
    if needed and mask is not None and mask.key != MASK:
        raise SpaceError(
            '"action_mask" has parts in the observation space, which random actions cannot respect: it should be one '
            'array, the parts in a row. Wrap the environment, or rename it: rename_keys={"action_mask": ...}.'
        )

    def make(generator: np.random.Generator) -> ActionSampler | MaskedActionSampler:
        if mask is None or not needed:
            return ActionSampler(codec, lanes.num_lanes, generator)
        return MaskedActionSampler(codec, mask, lanes.num_lanes, generator)

    return RandomActor(make, generator, [leaf.key for leaf in codec.leaves])


def _optional_names(what: What) -> list[str]:
    return [name for name in ("is_init", "step_count") if name in what.recorded]


def _leaves(lanes: Lanes, plan: Plan | None, what: What) -> list[Leaf]:
    """Every tensor of a frame, in the order of a batch."""
    outputs = lanes.action_leaves if plan is None else plan.outputs
    flags = [Leaf((name,), (1,), torch.bool) for name in ("done", "terminated", "truncated")]
    recorded = what.recorded
    count = [Leaf(("step_count",), (1,), torch.int64)] if "step_count" in recorded else []
    first = [Leaf(("is_init",), (1,), torch.bool)] if "is_init" in recorded else []
    after = [*lanes.leaves, Leaf(("reward",), (1,), torch.float32), *flags, *count]
    marks = [Leaf(("policy_version",), (), torch.int64)]
    if "traj_ids" in recorded:
        marks.insert(0, Leaf(("traj_ids",), (), torch.int64))
    if "worker" in recorded:
        marks.append(Leaf(("worker",), (), torch.int64))
    return [
        *lanes.leaves,
        *([] if plan is None or plan.state is None else plan.state.leaves),
        *outputs,
        *flags,
        *first,
        *count,
        *(leaf.under("next") for leaf in after),
        *lanes.info_leaves,
        *(leaf.under("collector") for leaf in marks),
    ]


def whole_steps(name: str, frames: int, lanes: int) -> int:
    """Steps of all lanes that make `frames` frames; one warning where that is rounded up."""
    steps = math.ceil(frames / lanes)
    if steps * lanes != frames:
        warn(f"{name}={frames} is not a multiple of the {lanes} lanes; it is rounded up to {steps * lanes}.")
    return steps
