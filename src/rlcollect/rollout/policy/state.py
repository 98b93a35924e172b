"""Which state a policy has: what it declares, what its first call shows; and that what it writes is what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType

from rlcollect.envs.spaces import ALWAYS_OURS
from rlcollect.errors import PolicyError
from rlcollect.failures import warn
from rlcollect.layout import Key, as_key, is_private, overlap, show_key
from rlcollect.rollout.policy.carried import Carried
from rlcollect.rollout.policy.drafts import Observed, is_declared
from rlcollect.rollout.policy.probe import LANES_FIRST, Calling, Probe
from rlcollect.rollout.policy.program import UNUSED, Program
from rlcollect.rollout.policy.signature import parameter_names
from rlcollect.rollout.policy.stated import modules_of, stated_initial
from rlcollect.rollout.policy.torchrl_parts import kept_elsewhere

__all__ = ["check_state", "completed_state", "declared_state", "found_state", "warn_of_lost_state", "with_state"]


def declared_state(policy: Any, observed: Observed, calling: Calling) -> tuple[Observed, list[Carried]]:
    """What is known of the policy's state before it is called; what has no shape yet begins empty."""
    initial = calling.initial
    for module in modules_of(policy):
        if (why := kept_elsewhere(module, initial)) is not None:
            raise PolicyError(f"The policy cannot be used as it is: {why}.")
    for key in initial:
        if key[0] in (*ALWAYS_OURS, *calling.ours, "info"):
            raise PolicyError(f"initial_policy_state has {show_key(key)}, which is a name of ours. Give it another.")
        if clash := next((own for own in observed.tensors if overlap(own, key)), None):
            below = "" if clash == key else f" (there is {show_key(clash)})"
            raise PolicyError(
                f"initial_policy_state has {show_key(key)}, which is part of the observation{below}. State needs a "
                "name of its own."
            )
    sources = {key: key if is_private(key) and key[0] != "next" else ("next", *key) for key in initial}
    primed = stated_initial(policy, observed.num_lanes)
    if is_declared(policy):
        reads, writes = [as_key(key) for key in policy.in_keys], [as_key(key) for key in policy.out_keys]
        sources |= {key: ("next", *key) for key in reads if ("next", *key) in writes and not observed.is_own(key)}
        sources |= {key: key for key in _private_memory(policy, observed, calling.exploration, reads, writes)}
    else:
        taken = parameter_names(policy)  # None: it takes a TensorDict
        read = [key for key in primed if (taken is None or key[0] in taken) and not observed.is_own(key)]
        sources |= {key: ("next", *key) for key in read}
    known = {**{key: value for key, value in primed.items() if key in sources}, **initial}
    state = {key: _all_lanes(known[key], observed) if key in known else None for key in sources}
    carried = [
        Carried(key, source, known[key].detach() if key in known else torch.empty(0), is_known=key in known)
        for key, source in sources.items()
    ]
    return replace(observed, state=state), carried


def _private_memory(
    policy: Any, observed: Observed, exploration: InteractionType, reads: Sequence[Key], writes: Sequence[Key]
) -> list[Key]:
    """Private names that are written, and read from the call before, as far as can be known."""
    private = [key for key in writes if is_private(key) and key != UNUSED and not observed.is_own(key)]
    if not private:
        return []
    program = Program(policy, exploration, observed.lead, [], twins=False)
    looks = private if program.refusal is not None else program.unknown_writes  # those that a part may look for
    return [key for key in private if key in reads or key in looks]


def with_state(observed: Observed, carried: Sequence[Carried]) -> Observed:
    """What a policy is shown, with state whose shapes are known."""
    return replace(observed, state={part.key: _all_lanes(part.initial, observed) for part in carried})


def _one_lane(value: torch.Tensor, key: Key, observed: Observed) -> torch.Tensor:
    """The state of a single lane, of what the policy wrote."""
    if list(value.shape[: len(observed.lead)]) != observed.lead:
        raise PolicyError(
            f"The policy writes {show_key(key)} of shape {list(value.shape)}; its first dimension should be the "
            f"{observed.num_lanes} lanes. {LANES_FIRST}"
        )
    return value if observed.num_lanes is None else value[0]


def _all_lanes(value: torch.Tensor, observed: Observed) -> torch.Tensor:
    return value.detach().expand((*observed.lead, *value.shape))


def _as_tensor(value: Any) -> torch.Tensor | None:
    """What was written as state, as a tensor; None if it is none."""
    return torch.as_tensor(value) if isinstance(value, torch.Tensor | np.ndarray | np.generic) else None


def found_state(probe: Probe, observed: Observed) -> list[Carried]:
    """State that shows only in what a callable wrote: `("next", k)`, where it takes `k`, or whatever there is.

    Private names that it writes to a TensorDict are its own memory, too.
    """
    draft = probe.draft
    if draft.out_keys is not None:
        return []  # it declares what it reads
    sources = {key[1:]: key for key in probe.values if key[0] == "next" and len(key) > 1}
    if draft.takes_all:
        sources |= {key: key for key in probe.values if is_private(key) and key[0] != "next"}
    else:
        sources = {key: source for key, source in sources.items() if key[0] in draft.names}
    found = []
    declared = {as_key(key) for key in probe.policy.out_keys} if is_declared(probe.policy) else set()
    for key, source in sources.items():
        if source in declared:
            continue  # and not read: it says what it reads
        value = _as_tensor(probe.values[source])
        if value is not None and not (observed.is_own(key) or key in observed.state):
            found.append(Carried(key, source, torch.zeros_like(_one_lane(value.detach(), source, observed))))
    return found


def completed_state(carried: Sequence[Carried], probe: Probe, observed: Observed) -> list[Carried]:
    """The parts with their shapes, as the first call showed them; without private ones that it did not write."""
    found = []
    for part in carried:
        if not part.is_recorded and ("next", *part.key) in probe.values:
            part = replace(part, source=("next", *part.key))
        value = _as_tensor(probe.values.get(part.source))
        if not part.is_known and value is not None:
            initial = torch.zeros_like(_one_lane(value.detach(), part.source, observed))
            part = replace(part, initial=initial, is_known=True)
        if part.is_recorded or value is not None or part.key in probe.draft.in_keys:
            found.append(part)
    return found


def check_state(
    carried: Sequence[Carried], probe: Probe, observed: Observed, given: Mapping[Key, torch.Tensor]
) -> None:
    """State that is written has the shape and dtype that is read; what the user gave an initial value of is read.

    Raises:
        PolicyError: it has not, or is not.
    """
    _check_written(carried, probe, observed)
    _check_read(carried, probe, given)


def warn_of_lost_state(carried: Sequence[Carried], probe: Probe) -> None:
    """Says so where a callable writes what it reads under the same name: that is no state."""
    draft, known = probe.draft, {part.key for part in carried}
    for key in () if draft.out_keys is not None or draft.takes_all else probe.values:
        if len(key) == 1 and key[0] in draft.names and key not in known:
            warn(
                f"The policy takes {key[0]!r} and writes {key[0]!r}, and nothing is carried from one call to the "
                f"next. If it is state, write it under {show_key(('next', *key))}."
            )


def _check_written(carried: Sequence[Carried], probe: Probe, observed: Observed) -> None:
    """State that is written has the shape and dtype that is read."""
    for part in carried:
        value = _as_tensor(probe.values.get(part.source))
        if value is None:
            written = ", ".join(show_key(key) for key in probe.values)
            raise PolicyError(
                f"{show_key(part.key)} is state of the policy, so it should write the next one under "
                f"{show_key(part.source)}; it wrote {written}."
            )
        wanted = (*observed.lead, *part.initial.shape)
        if tuple(value.shape) != wanted or value.dtype != part.initial.dtype:
            raise PolicyError(
                f"{show_key(part.source)} should be as the initial {show_key(part.key)}: {list(wanted)} "
                f"{part.initial.dtype}; {list(value.shape)} {value.dtype} came. {LANES_FIRST}"
            )


def _check_read(carried: Sequence[Carried], probe: Probe, given: Mapping[Key, torch.Tensor]) -> None:
    """What the user gave an initial value of is read."""
    for part in carried:
        if part.key in given and part.key not in probe.draft.in_keys:
            takes = ", ".join([*map(show_key, probe.draft.in_keys), *map(repr, probe.draft.names)])
            raise PolicyError(
                f"initial_policy_state has {show_key(part.key)}, which the policy does not read: it takes {takes}."
            )
