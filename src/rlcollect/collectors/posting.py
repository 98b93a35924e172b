"""New weights on their way to worker processes: checked whole, then published, to all or to some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rlcollect.collectors.crew import Crew
from rlcollect.errors import PolicyError
from rlcollect.failures import warn
from rlcollect.processes.arena import Arena
from rlcollect.rollout.policy.held import held_modules, held_tensors
from rlcollect.rollout.policy.intake import misfit, module_of, weights_by_name
from rlcollect.weights.versioned import Publisher, buffer_bytes
from rlcollect.workers.messages import AttachWeights, Facts

__all__ = ["Posting"]


class Posting:
    """Publishes weights in versions. All workers share a pair of buffers; one that was addressed alone has its own.

    Args:
        crew: the workers.
        facts: what they said of themselves; the weights of all are alike.
        policy: the user's, whose weights are published where none are given; None: there is none.

    Raises:
        PolicyError: the weights of one worker's policy differ from those of the first.
    """

    def __init__(self, crew: Crew, facts: Sequence[Facts], policy: Any) -> None:
        self._crew = crew
        self._policy = policy
        self._held = held_modules(policy)
        self._facts = facts[0]
        self._workers = range(len(facts))
        for worker, other in enumerate(facts):
            if other.weights != facts[0].weights:
                theirs, ours = ({leaf.key[0]: leaf for leaf in each.weights} for each in (other, facts[0]))
                name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
                raise PolicyError(
                    f"All workers need policies with the same weights; {name!r} of worker {worker}'s differs from that "
                    f"of worker 0's: {theirs.get(name, 'it has none')} where that has {ours.get(name, 'none')}."
                )
        self._has_warned = False
        self._open = ExitStack()
        self._arenas = dict[int, Arena]()  # of each worker's pair
        shared = self._new_pair(self._workers)
        self._pairs: dict[int, Publisher] = dict.fromkeys(self._workers, shared)
        if self._held:  # a function that is found by its name brings the modules that its module makes there
            try:
                self.publish(None, 0, None)
            except BaseException:
                self.let_go()
                raise

    def _new_pair(self, workers: Collection[int]) -> Publisher:
        """A pair of buffers that these workers take from."""
        leaves = self._facts.weights
        arena = Arena(buffer_bytes(leaves))
        self._open.callback(arena.let_go)
        self._arenas |= dict.fromkeys(workers, arena)
        for worker in workers:
            self._crew.tell(worker, *self.attachment(worker))
        return Publisher(arena.buffer, leaves)

    def begin_anew(self) -> None:
        """Nothing that was published is for workers that are made from now on."""
        self._pairs = dict.fromkeys(self._workers, self._new_pair(self._workers))

    def attachment(self, worker: int) -> tuple[AttachWeights, int]:
        """Where a worker takes its weights from, with the descriptor of that memory."""
        arena = self._arenas[worker]
        return AttachWeights(self._facts.weights, arena.nbytes), arena.fd

    def let_go(self) -> None:
        """Nothing will be published: keeps no memory."""
        self._pairs, self._arenas = {}, {}
        self._open.close()

    def _registered(self) -> dict[str, torch.Tensor]:
        """The weights of the user's policy, as they are now."""
        own = {} if module_of(self._policy) is None else weights_by_name(self._policy)
        return {**own, **dict(held_tensors(self._held))}

    def publish(self, given: Any, version: int, workers: Sequence[int] | None) -> None:
        """Publishes weights.

        Args:
            given: what the user passed; None: those of the policy.
            version: of them.
            workers: for whom; None: for all.

        Raises:
            PolicyError: they do not fit. Nothing was published.
        """
        weights = self.checked(given)
        if workers is not None and {*workers} != {*self._workers}:
            for worker in workers:
                if list(self._pairs.values()).count(self._pairs[worker]) > 1:
                    self._pairs[worker] = self._new_pair([worker])
        for pair in {
            id(self._pairs[w]): self._pairs[w] for w in (self._workers if workers is None else workers)
        }.values():
            pair.publish(weights, version)

    def checked(self, given: Any) -> Mapping[tuple[str, ...], torch.Tensor]:
        """Weights that fit, by the keys of the leaves.

        Raises:
            PolicyError: they do not, or there are none.
        """
        facts = self._facts
        if given is None and self._policy is None and facts.weights:
            raise PolicyError(
                "There is no policy here whose weights could be sent: each worker made its own (policy_factory). Pass "
                "a module, a TensorDict of parameters or a state dict."
            )
        if given is None:
            named = self._registered()
        elif module_of(given) is None and callable(given):
            named = dict(held_tensors(held_modules(given)))
        else:
            named = weights_by_name(given)
        if len(self._held) == 1 and module_of(self._policy) is None:  # its names go without that of the function's
            (held,) = self._held
            named = {name if name.startswith(f"{held}.") else f"{held}.{name}": value for name, value in named.items()}
        if given is not None and not facts.weights and named:
            raise PolicyError("The policy has no weights that could be updated.")
        # buffers that no state dict has stay as they were, where they are not given
        may_lack = {leaf.key[0] for leaf in facts.weights} - {*facts.names} - {*named}
        needed = {leaf.key[0]: leaf.shape for leaf in facts.weights if leaf.key[0] not in may_lack}
        if difference := misfit(named, needed, {*facts.names, *facts.kept}):
            raise PolicyError(f"The weights do not fit the workers' policy: {difference}. Nothing was sent.")
        if facts.kept and not self._has_warned:
            self._has_warned = True
            warn(
                f"The policy changes {', '.join(facts.kept)} itself while it acts; these buffers stay those of each "
                "worker, whatever the learner's are."
            )
        return {leaf.key: named[leaf.key[0]].detach() for leaf in facts.weights if leaf.key[0] in named}
