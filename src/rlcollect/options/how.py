"""How actions are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, option, state, switch, value_of_worker
from rlcollect.options.what import NestedKey

__all__ = ["ExplorationType", "How", "exploration_type", "set_exploration_type"]

ExplorationType: TypeAlias = InteractionType
exploration_type = interaction_type
set_exploration_type = set_interaction_type


@dataclass(frozen=True, kw_only=True)
class How:
    """How actions are chosen, and who may stop a rollout."""

    exploration_type: ExplorationType = option(
        "Exploration during collection; the process-wide setting is left as it was found.", ExplorationType.RANDOM
    )
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = option(
        "Makes the policy, in the place of `policy`: called once, where the frames are made; by each worker, if there "
        "are several, which may have a list of one each.",
        None,
    )
    trust_policy: bool = option(
        "Believe a policy that declares its outputs (`out_keys`, and a `spec` for what is neither the action nor a "
        "log-probability), and do not call it at construction. One that does not tell all shapes, or is to be "
        "compiled, is called all the same.",
        False,
    )
    initial_policy_state: Mapping[NestedKey, Any] | None = option(
        "Recurrent state of one lane at the start of an episode, by key: what the policy reads as `k` and writes under "
        '`("next", k)`. Tensors are read anew before each rollout, so parameters may be learned. None: '
        "what the policy's primer or spec says, else zeros of the shape that it writes. A policy that takes any "
        'TensorDict has all that it writes under "next" carried.',
        None,
    )
    check_actions: bool = option(
        "Look at every action: no NaN, whole numbers where they are due, and in the range of a Discrete, MultiDiscrete "
        "or MultiBinary space. The error names lane and frame.",
        False,
    )
    compile_policy: bool | Mapping[str, Any] | None = option(
        "True, or arguments for `torch.compile`: the policy is compiled at construction, by a few calls.",
        None,
    )
    cudagraph_policy: bool | Mapping[str, Any] | None = option(
        "True, or arguments for `tensordict.nn.CudaGraphModule`: a policy on CUDA is recorded, at construction, and "
        "replayed. Weights may change in place; a change of mode is not seen.",
        None,
    )
    pre_collect_hook: Callable[[], Any] | None = option("Called where the frames are made, before each rollout.", None)
    post_collect_hook: Callable[[Any], Any] | None = option(
        "Called where the frames are made, after each rollout, with its batch; what it returns is not looked at. The "
        "batch is to be read only.",
        None,
    )
    interruptor: Any = option(
        "An `Interruptor`, or an object with its methods `start_collection()`, `stop_collection()` and "
        "`collection_stopped()`: asked after each step; a rollout that it stops is delivered short. Where there are "
        "worker processes, an object of another class is asked here, every 10 ms while they are waited for.",
        None,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.exploration_type, InteractionType):
            raise OptionError(
                f"exploration_type must be an ExplorationType (ExplorationType.DETERMINISTIC, say), not "
                f"{self.exploration_type!r}."
            )
        factories = self.policy_factory if self.is_split else [self.policy_factory]
        if wrong := [each for each in factories if not (each is None or callable(each))]:  # type: ignore[union-attr]
            raise OptionError(f"policy_factory must be a callable that makes a policy, not {wrong[0]!r}.")
        for name in ("pre_collect_hook", "post_collect_hook"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise OptionError(f"{name} must be a callable, not {getattr(self, name)!r}.")
        for name in ("trust_policy", "check_actions"):
            flag(name, getattr(self, name))
        for name in ("compile_policy", "cudagraph_policy"):
            object.__setattr__(self, name, switch(name, getattr(self, name)))
        object.__setattr__(self, "initial_policy_state", state("initial_policy_state", self.initial_policy_state))
        verbs = ("start_collection", "stop_collection", "collection_stopped")
        lacking = [verb for verb in verbs if not callable(getattr(self.interruptor, verb, None))]
        if self.interruptor is not None and lacking:
            raise OptionError(f"interruptor {self.interruptor!r} lacks the method {lacking[0]!r}.")

    @property
    def is_split(self) -> bool:
        """Whether a factory is given for each of several workers."""
        return isinstance(self.policy_factory, list | tuple)

    def of_worker(self, worker: int, workers: int) -> How:
        """What holds for one of several workers.

        Raises:
            OptionError: a list of another length.
        """
        factory = value_of_worker("policy_factory", self.policy_factory, worker, workers)
        return dataclasses.replace(self, policy_factory=factory)
