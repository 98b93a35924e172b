"""From what the user passed as a policy to a plan: the keys it reads, the keys it writes, the call.

Made once, at construction, from the policy, the observation's leaves and one call on the first observation (two, where
the shape of a recurrent state is learned from the first). How it is read is in `drafts`, the first call in `probe`,
what it wrote in `outputs`, which state it has in `state`, and how that is carried in `carried`. None of these knows an
environment, only leaves and spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import set_interaction_type

from rlcollect.envs.spaces import ALWAYS_OURS
from rlcollect.errors import PolicyError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, is_private, show_key
from rlcollect.rollout.policy.carried import IS_INIT, Carried, PolicyState
from rlcollect.rollout.policy.distributions import Sampling
from rlcollect.rollout.policy.drafts import Observed
from rlcollect.rollout.policy.intake import UntouchedBuffers
from rlcollect.rollout.policy.outputs import checked_leaves, take_by_keys
from rlcollect.rollout.policy.pooled import PooledState
from rlcollect.rollout.policy.probe import Calling, draft_of, probe_policy
from rlcollect.rollout.policy.state import (
    check_state,
    completed_state,
    declared_state,
    found_state,
    warn_of_lost_state,
    with_state,
)
from rlcollect.rollout.policy.stated import generators_of
from rlcollect.rollout.seeding import untouched_randomness

__all__ = ["Plan", "plan_policy"]

Call = Callable[..., Any]


class Plan:
    """How a policy is called.

    Attributes:
        outputs: what `call` returns: one leaf for a single value, several for a tuple. The actions come first.
        examples: the first outputs, one a leaf; their shapes and kinds are those of all that follow. None each where
            the policy was not called.
        state: what the policy is shown of its own past; None: nothing.
        call: from tensors to a tensor, or to a tuple of them.

    Args:
        policy: what the user passed.
        observed: what it is shown.
        actions: how actions are stored.
        calling: how it is to be called.

    Raises:
        PolicyError: it reads what is not there, fails, or writes no action of this action space.
    """

    def __init__(self, policy: Any, observed: Observed, actions: ActionForm, calling: Calling) -> None:
        observed, carried = declared_state(policy, observed, calling)
        probe = probe_policy(policy, observed, actions, calling)
        found = found_state(probe, observed)
        is_learned = bool(found) or any(value is None for value in observed.state.values())
        carried = [*completed_state(carried, probe, observed), *found]
        observed = with_state(observed, carried)
        if is_learned:  # its shape is known by now
            probe = probe_policy(probe.policy, observed, actions, calling)
        check_state(carried, probe, observed, calling.initial)
        warn_of_lost_state(carried, probe)
        self._policy = probe.policy
        self._observed = observed
        self._calling = calling
        self._current, self._take = probe.draft, probe.take
        self._private = [part.source for part in carried if not part.is_recorded]
        self.outputs = checked_leaves(
            {key: value for key, value in probe.values.items() if not is_private(key)},
            actions,
            [key for key in observed.tensors if key not in observed.loose],
            [part.key for part in carried],
            observed.num_lanes,
            [*ALWAYS_OURS, *calling.ours, *(["is_init"] if self.reads_is_init else [])],
            calling.transfer.device,
        )
        self.examples = tuple(probe.values[leaf.key] if probe.called else None for leaf in self.outputs)
        self._copies = probe.touched
        self.state = _state_of(carried, observed, calling) if carried or self._past_keys else None
        self.call = self._assemble()

    @property
    def _past_keys(self) -> list[Key]:
        """What the call takes of the policy's own past, in order."""
        return [key for key in self._current.in_keys if not self._observed.is_own(key)]

    @property
    def reads_is_init(self) -> bool:
        """Whether the policy is told where episodes begin."""
        return IS_INIT in self._past_keys

    @property
    def in_keys(self) -> tuple[Key, ...]:
        """The observation keys whose tensors are the arguments of `call`, in order."""
        return tuple(key for key in self._current.in_keys if self._observed.is_own(key))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each output of one call."""
        return [(*self._observed.lead, *leaf.shape) for leaf in self.outputs]

    @property
    def path(self) -> str:
        """How it is called: "direct" or "tensordict"."""
        return self._current.path

    @property
    def looks_around(self) -> bool:
        """Whether parts of it may look at what the program's threads share: the exploration type."""
        program = self._current.program
        return self.path != "direct" or (program is not None and program.looks_around)

    @property
    def reason(self) -> str:
        """Why it took this path, in a few words."""
        return self._current.reason

    @property
    def samplings(self) -> list[Sampling]:
        """Distributions whose parameters, all of them recorded, are to be looked at after a rollout."""
        program = self._current.program
        if program is None or program.refusal is not None:
            return []
        recorded = {*self.in_keys, *(leaf.key for leaf in self.outputs)}
        return [each for each in program.samplings if each.is_valid is not None and recorded.issuperset(each.params)]

    # --- assembling ---

    def _assemble(self) -> Call:
        call = self._taking(self._current.assemble())
        if self._calling.wrap is not None:
            call = self._warmed(self._calling.wrap(call))
        call = self._stateful(call)
        return self._prepared(self._calling.transfer.around(call))

    def _warmed(self, call: Call) -> Call:
        """A compiled call that has compiled, a CUDA graph that is recorded."""
        arguments = [self._observed.example(key) for key in self._current.in_keys]
        moved = [self._calling.transfer.move(value) for value in arguments if value is not None]
        try:
            with (
                torch.no_grad(),
                untouched_randomness(generators_of(self._policy)),
                UntouchedBuffers(self._policy),
                set_interaction_type(self._calling.exploration),
            ):
                for _ in range(self._calling.warm_calls):
                    call(*moved)
        except Exception as error:
            raise PolicyError(
                f"The policy works as it is, but not compiled: {type(error).__name__}: {error}\nLeave out "
                "compile_policy= and cudagraph_policy=, or compile the part of it that can be."
            ) from error
        return call

    def _taking(self, call: Call) -> Call:
        """A call that returns the outputs alone, in order, and after them the private parts of the state."""
        take, keys = self._take, [*(leaf.key for leaf in self.outputs), *self._private]
        if take is None or (len(keys) > 1 and self._current.out_keys == keys):
            return call
        if len(keys) == 1:
            return lambda *tensors: take(call(*tensors), keys)[0]
        return lambda *tensors: take(call(*tensors), keys)

    def _stateful(self, call: Call) -> Call:
        """A call that is shown the policy's past beside the observation, and keeps what comes of it."""
        state = self.state
        if state is None:
            return call
        keys = [*(leaf.key for leaf in self.outputs), *self._private]
        places = [keys.index(source) for source in state.sources]
        begin, keep, views, recorded = state.begin, state.keep, state.views(self._past_keys), len(self.outputs)

        def marked(*tensors: torch.Tensor) -> Any:
            begin()
            return call(*tensors, *views[0])

        def carried(*tensors: torch.Tensor) -> Any:
            begin()
            outputs = call(*tensors, *views[state.turn])
            keep([outputs[place] for place in places])
            return outputs[:recorded] if recorded > 1 else outputs[0]

        return carried if places else marked

    def _prepared(self, call: Call) -> Call:
        """A call that may be given views of a rollout's memory.

        Rows of several lanes lie apart in it by as much as the rollout is long, and kernels round by how their input
        lies: so that the data do not depend on the size of a batch, reals are shown in one piece. A policy that changes
        its input gets a copy.
        """
        if loose := self._observed.loose.intersection(self.in_keys):
            return self._prepared_loose(call, sorted(loose))
        tensors = [self._observed.tensors[key] for key in self.in_keys]
        if self._calling.transfer.is_needed:  # what arrives there is in one piece, and a copy
            return call
        if self._copies:
            return lambda *given: call(*[tensor.clone(memory_format=torch.contiguous_format) for tensor in given])
        if self._calling.wrap is not None:  # compiled for one way to lie in memory
            return lambda *given: call(*[tensor.contiguous() for tensor in given])
        if self._observed.num_lanes is None or not any(tensor.is_floating_point() for tensor in tensors):
            return call
        if len(tensors) == 1:
            return lambda tensor: call(tensor.contiguous())
        reals = [tensor.is_floating_point() for tensor in tensors]
        return lambda *given: call(
            *[tensor.contiguous() if real else tensor for tensor, real in zip(given, reals, strict=True)]
        )

    def _prepared_loose(self, call: Call, loose: Sequence[Key]) -> Call:
        if self._calling.transfer.is_needed:
            raise PolicyError(
                f"The policy reads {show_key(loose[0])}, which has no fixed form and stays where the environment is; "
                f"it cannot compute on {self._calling.transfer.device}. Leave it out (exclude_keys=)."
            )
        return lambda *given: call(
            *[
                value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
                for value in given
            ]
        )

    def refresh(self) -> None:
        """Looks for hooks that came and modules that were replaced; `in_keys` and `call` may then be others."""
        program = self._current.program
        if program is not None and program.is_stale():
            before = self._past_keys
            self._current = draft_of(self._policy, self._observed, self._calling)
            self._check_still_fits(before)
            self._take = take_by_keys(self._current.out_keys)
            self.call = self._assemble()
        elif sum(direct.refresh() for direct in self._current.directs):  # every one is refreshed
            self.call = self._assemble()

    def _check_still_fits(self, past_keys: Sequence[Key]) -> None:
        """A chain that was changed writes and reads what it did."""
        written = self._current.out_keys
        lost = [key for key in (*(leaf.key for leaf in self.outputs), *self._private) if written and key not in written]
        new = [key for key in self._past_keys if key not in past_keys]
        if lost or new:
            what = f"wrote {show_key(lost[0])}" if lost else f"did not read {show_key(new[0])}"
            raise PolicyError(
                f"The policy {what} when the collector was made, and was changed since. Make a new collector for it."
            )


def _state_of(carried: Sequence[Carried], observed: Observed, calling: Calling) -> PolicyState:
    device = calling.transfer.device
    if observed.pool is None:
        return PolicyState(carried, observed.num_lanes, device, calling.initial)
    assert observed.num_lanes is not None
    return PooledState(carried, observed.num_lanes, observed.pool, device, calling.initial)


def plan_policy(policy: Any, observed: Observed, actions: ActionForm, calling: Calling | None = None) -> Plan:
    """Plans how `policy` is called; see `Plan`."""
    if not callable(policy):
        raise PolicyError(
            "policy must be None, a callable or an nn.Module from observation to action, or from TensorDict to "
            f"TensorDict; {policy!r} came."
        )
    if isinstance(policy, type):
        raise PolicyError(f"policy is the class {policy.__name__}; pass an instance of it (or policy_factory=).")
    return Plan(policy, observed, actions, calling or Calling())
