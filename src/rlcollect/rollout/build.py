"""From options to an engine: lanes are made and reset, the policy is planned and called once, memory is laid out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import set_interaction_type
from torch import nn
from torch.nn.parameter import is_lazy

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
from rlcollect.rollout.engine import Engine
from rlcollect.rollout.plan import Observed, Plan, plan_policy
from rlcollect.rollout.seeding import TorchStream, action_generator, torch_seed, untouched_randomness

__all__ = ["RandomPolicy", "build_engine", "make_lanes", "module_of", "whole_steps"]


class RandomPolicy:
    """Stands for random actions in the bounds of the action space, as `policy=None` does."""

    def __repr__(self) -> str:
        return "RandomPolicy()"


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
    policy: Any,
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
        policy: what the user passed.
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
    if not (policy is None or isinstance(policy, RandomPolicy)):
        plan = _planned(policy, lanes, num_lanes, what, how, worker)
    layout = Layout(_leaves(lanes, plan, what))
    on_cpu = where.storing_device if where.storing_device == torch.device("cpu") else None
    source = SlotSource(layout, num_lanes, steps, reuse=sink.use_buffers, device=on_cpu)
    seed = torch.initial_seed()
    engine = Engine(
        lanes,
        SameSlot(source) if sink.return_same_td else source,
        policy=None if plan is None else PolicyActor(plan, len(lanes.action_leaves), batched=batched),
        random=_random_actor(
            lanes, action_generator(seed, worker), needed=plan is None or bool(what.init_random_frames)
        ),
        what=what,
        how=how,
        stream=TorchStream(torch_seed(seed, worker)),
        worker=worker,
    )
    return engine, plan


def _planned(policy: Any, lanes: Lanes, num_lanes: int | None, what: What, how: How, worker: int) -> Plan:
    """The policy's plan; its probe leaves random states and module buffers as they were."""
    current = {key: torch.from_numpy(array.copy()) for key, array in lanes.current.items()}
    observation = current if num_lanes is not None else {key: tensor[0] for key, tensor in current.items()}
    ours = _optional_names(what)
    try:
        with untouched_randomness(), _UntouchedBuffers(policy), set_interaction_type(how.exploration_type):
            return plan_policy(policy, Observed(observation, num_lanes, lanes.whole_key), lanes.action_codec, ours)
    except RlcollectError:
        raise
    except BaseException as error:
        raise relayed(error, worker=worker, lane=None, step=0)  # noqa: B904 - it has a cause of its own


def module_of(policy: Any) -> nn.Module | None:
    """The module whose weights a policy computes with: itself, or the one that it is a method of."""
    owner = policy if isinstance(policy, nn.Module) else getattr(policy, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


class _UntouchedBuffers:
    """Puts the buffers of a module back as they were."""

    def __init__(self, policy: Any) -> None:
        module = module_of(policy)
        modules = () if module is None else module.modules()
        self._saved = [
            (module, name, buffer, None if buffer is None or is_lazy(buffer) else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._saved:
                if buffer is not None and before is not None and not _is_expanded(buffer):
                    buffer.copy_(before)
                if before is not None or buffer is None:
                    module._buffers[name] = buffer


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory; such a tensor cannot be written to in place, by anyone."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
