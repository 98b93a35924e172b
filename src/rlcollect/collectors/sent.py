"""What of the user's goes to workers elsewhere: makers of environments, the policy, options."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rlcollect.devices import CPU
from rlcollect.envs.open import is_environment
from rlcollect.errors import OptionError
from rlcollect.options import How, What, Where, option_fields
from rlcollect.weights.naming import module_of

__all__ = ["check_maker", "hosted_options", "sent_to"]

NOT_HOSTED = frozenset(  # options that a hosted collector does not get: they are the pool's, or the worker's
    [
        *("frames_per_batch", "total_frames", "storing_device", "device"),
        *("policy_factory", "pre_collect_hook", "post_collect_hook"),
    ]
)


def check_maker(worker: int, source: Any) -> None:
    """Refuses what is no maker.

    Raises:
        OptionError: an environment that is made already, here.
    """
    if is_environment(source):
        raise OptionError(
            f"create_env_fn has an environment that is made already for worker {worker}: {source!r}. It lives in this "
            "process; pass what makes it (lambda: ..., or its id), to be called in the worker's."
        )


def sent_to(policy: Any, device: torch.device | None) -> Any:
    """The policy as it crosses: on the host, where it is not to compute on the device that it is on."""
    module = module_of(policy)
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    foreign = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    if not foreign or (foreign[0].device.type == "cuda" and device is None):
        return policy
    copied = copy.deepcopy(policy)
    made = module_of(copied)
    assert made is not None
    made.to(CPU)
    return copied


def hosted_options(what: What, where: Where, how: How, worker: int, workers: int) -> dict[str, Any]:
    """What a collector that a worker holds is made with."""
    given: dict[str, Any] = {}
    for options in (what, where, how):
        for name, field in option_fields([type(options)]).items():
            value = getattr(options, name)
            if name not in NOT_HOSTED and value != field.default and value != {}:
                given[name] = value
    if (random := what.init_random_frames) is not None:
        given["init_random_frames"] = random // workers + (worker < random % workers)
    return given
