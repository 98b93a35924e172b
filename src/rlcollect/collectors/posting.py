"""New weights on their way to where they act: checked whole, then published, to all workers or to some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlcollect.collectors.crew import Crew
from rlcollect.errors import ClosedError, PolicyError
from rlcollect.failures import warn
from rlcollect.layout import Key, Leaf
from rlcollect.weights.ends import Message, Sender
from rlcollect.weights.form import WeightsForm
from rlcollect.weights.handed import Handed
from rlcollect.weights.held import held_modules, held_names, held_tensors
from rlcollect.weights.naming import copy_into, load_weights, module_of, tensors_of
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.weights.strategy import WeightStrategy
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Command, SchemeMessage
from rlcollect.workers.models import POLICY, common_form
from rlcollect.workers.worker import Worker

__all__ = ["Addressed", "Fitted", "InPlace", "Poster", "Posting"]

Addressed = tuple[Mapping[str, Any], Sequence[int] | None]
"""Weights by model, and for whom: None for all workers."""
UNSYNCHRONISED = (
    "No weights were sent to the workers yet: each acts with those that policy_factory made there. Call "
    "update_policy_weights_(policy) first to have all act with yours."
)
WITHOUT_WEIGHTS = "What policy_factory made has no weights, so nothing is sent; the version goes on."


@dataclass(frozen=True)
class Fitted:
    """Weights that fit.

    Attributes:
        models: whose.
        tensors: by model and name.
        workers: for whom; None: for all.
    """

    models: tuple[str, ...]
    tensors: Mapping[Key, torch.Tensor]
    workers: Sequence[int] | None


class Poster(Protocol):
    """Gets weights to where they act."""

    def form(self, model_id: str) -> WeightsForm:
        """What weights a model takes."""

    def named(self, given: Any) -> dict[str, torch.Tensor]:
        """Weights of the policy by name."""

    def fitted(self, given: Sequence[Addressed]) -> Sequence[Fitted]:
        """What is to be sent, all that can be refused having been looked at.

        Args:
            given: what the user passed; None in the place of weights: those of the policy.

        Raises:
            PolicyError: something does not fit. Nothing was changed.
        """

    def post(self, fitted: Sequence[Fitted], version: int) -> None:
        """Makes these the newest, of one version."""

    def load(self, version: int) -> None:
        """The user's policy has the weights of a state, with this version: workers are to have them too."""

    def before_batch(self) -> None:
        """Says, once, if workers act with weights that nobody sent them."""


class _Policy:
    """The weights of the user's policy: its own, and those of modules that a function uses.

    Args:
        policy: the user's; None: there is none.
        strategy: what of it travels.
    """

    def __init__(self, policy: Any, strategy: WeightStrategy) -> None:
        self.held = held_modules(policy)
        self._policy = policy
        self._strategy = strategy

    def named(self, given: Any) -> dict[str, torch.Tensor]:
        """Weights by name, of what the user passed; None: of the policy as it is."""
        if given is None:
            own = {} if module_of(self._policy) is None else self._strategy.named(self._policy)
            named = {**own, **held_tensors(self.held)}
        elif module_of(given) is None and callable(given):
            named = held_tensors(held_modules(given))
        else:
            named = self._strategy.named(given)
        if len(self.held) == 1 and module_of(self._policy) is None:  # its names go without that of the function's
            (held,) = self.held
            named = {name if name.startswith(f"{held}.") else f"{held}.{name}": value for name, value in named.items()}
        return named


class InPlace:
    """Weights act where they are: the one worker is in this process. A copy on another device is brought up to date.

    Args:
        worker: the one there is.
        strategies: what of each model travels.
    """

    def __init__(self, worker: Worker, strategies: Mapping[str, WeightStrategy]) -> None:
        self._worker = worker
        self._strategies = strategies
        self._policy = _Policy(worker.acting.given, strategies.get(POLICY, WeightStrategy()))
        self._models = {path: worker.find(path) for path in strategies if path != POLICY}
        self._forms = {path: common_form(path, modules) for path, modules in self._models.items()}
        self._handed: Handed | None = None

    @property
    def models(self) -> list[str]:
        """Paths of what takes weights beside the policy."""
        return list(self._models)

    def hand_to(self, handed: Handed) -> None:
        """Another thread acts with copies from now on, and takes weights from there."""
        self._handed = handed

    def form(self, model_id: str) -> WeightsForm:
        """See `Poster`."""
        if model_id != POLICY:
            return self._forms[model_id]
        if (module := module_of(self._worker.acting.given)) is not None:
            return WeightsForm.of_module(module)
        held = self._policy.held
        return WeightsForm.of(held_tensors(held), names=held_names(held))

    def named(self, given: Any) -> dict[str, torch.Tensor]:
        """See `Poster`."""
        return self._policy.named(given)

    def fitted(self, given: Sequence[Addressed]) -> Sequence[Fitted]:
        """See `Poster`."""
        models: dict[str, Any] = {}
        for each, _ in given:
            models |= each
        if POLICY in models:
            self._worker.acting.check()
        tensors: dict[Key, torch.Tensor] = {
            (model, name): tensor
            for model, weights in models.items()
            if model != POLICY or not (weights is None or weights is self._worker.acting.given)
            for name, tensor in self._fitted(model, weights).items()
        }
        return [Fitted(tuple(models), tensors, None)]

    def _fitted(self, model: str, weights: Any) -> dict[str, torch.Tensor]:
        if model != POLICY:
            return self.form(model).fitted(_given(model, weights, self._strategies[model]), repr(model))
        form, named = self.form(model), self._policy.named(weights)
        if named and not form.leaves:
            raise PolicyError("The policy has no weights that could be updated.")
        return form.fitted(named, "the policy")

    def post(self, fitted: Sequence[Fitted], version: int) -> None:
        """See `Poster`."""
        for each in fitted:
            if self._handed is not None:
                self._hand(each, version, self._handed)
                continue
            for model in each.models:
                self._put(model, {name: tensor for (of, name), tensor in each.tensors.items() if of == model})
        if self._handed is None:
            self._worker.engine.policy_version = version

    def _hand(self, fitted: Fitted, version: int, handed: Handed) -> None:
        """The user's own module has them now; the thread that acts takes them before its next rollout."""
        tensors = dict(fitted.tensors)
        if POLICY in fitted.models:
            acting = self._worker.acting
            acting.adopt({name: tensor for (of, name), tensor in fitted.tensors.items() if of == POLICY})
            module = module_of(acting.given)
            own = {} if module is None else tensors_of(module)
            tensors |= {(POLICY, name): tensor for name, tensor in own.items()}
        handed.hand(tensors, version)

    def _put(self, model: str, named: Mapping[str, torch.Tensor]) -> None:
        if model == POLICY:
            acting = self._worker.acting
            acting.adopt(named)
            copy_into(held_tensors(self._policy.held), named)
            acting.update()
        else:
            for module in self._models[model]:
                copy_into(tensors_of(module), named)

    def load(self, version: int) -> None:
        """See `Poster`: they act where they are, or are handed to the thread that acts with a copy."""
        if self._handed is not None:
            self._hand(Fitted((POLICY,), {}, None), version, self._handed)

    def before_batch(self) -> None:
        """See `Poster`: there is nothing."""


class Posting:
    """Publishes weights to worker processes.

    Without a policy here nothing is agreed on with workers before the first update.

    Args:
        crew: the workers.
        facts: what they said of themselves.
        policy: the user's, whose weights are published where none are given; None: there is none.
        scheme: how weights get to workers; None: not at all.
        strategies: what of each model travels.
        is_made_there: whether workers made their policies by themselves.

    Raises:
        PolicyError: the weights of one worker's model differ in form from those of the first's.
    """

    def __init__(
        self,
        crew: Crew,
        facts: Sequence[Facts],
        policy: Any,
        *,
        scheme: WeightSyncScheme | None,
        strategies: Mapping[str, WeightStrategy],
        is_made_there: bool,
    ) -> None:
        self._crew = crew
        self._given = policy
        self._policy = _Policy(policy, strategies.get(POLICY, WeightStrategy()))
        self._scheme = scheme
        self._strategies = strategies
        self._forms = {
            model: WeightsForm.common(
                [each.forms[model] for each in facts], "policies" if model == POLICY else f"modules {model!r}", "worker"
            )
            for model in strategies
        }
        self._workers = len(facts)
        self._sender: Sender | None = None
        self._is_closed = False
        self._has_warned = False
        form = self.form(POLICY)
        self._unsynchronised = {*range(len(facts))} if is_made_there and form.leaves else set[int]()
        self._lacks_weights = is_made_there and not (form.leaves or form.kept)
        if scheme is not None and policy is not None:
            self._connected(scheme)
            try:
                self._begin_alike(form)
            except BaseException:
                self.let_go()
                raise

    def check_like(self, worker: int, facts: Facts) -> None:
        """Whether a worker that comes in the place of another takes the same weights.

        Raises:
            PolicyError: it does not.
        """
        for model, form in self._forms.items():
            WeightsForm.common([form, facts.forms[model]], f"successors of worker {worker} ({model!r})", "model")

    def _connected(self, scheme: WeightSyncScheme) -> Sender:
        if self._is_closed:
            raise ClosedError("The workers that these weights are for were shut down.")
        if self._sender is None:
            leaves: list[Leaf] = [leaf.under(model) for model, form in self._forms.items() for leaf in form.leaves]
            self._sender = scheme.sender(leaves, self._workers, self._hand)
        return self._sender

    def _begin_alike(self, form: WeightsForm) -> None:
        """Publishes, as they are at first, weights that workers could not be sent with their policy."""
        module = module_of(self._given)
        if form.lazy and module is not None:  # it has values in the workers, of each its own: here too, those of one
            load_weights(module, form.lazy, strict=False)
        # a function that is found by its name brings the modules that its own makes there
        if POLICY in self._strategies and (form.lazy or self._policy.held):
            self.post(self.fitted([({POLICY: None}, None)]), 0)

    def _hand(self, worker: int, message: Message) -> None:
        self._crew.tell(worker, SchemeMessage(message.content), message.attached)

    def forget_policy(self, version: int) -> None:
        """What was published of the policy is not wanted any more; other models' weights have this version now."""
        if self._sender is not None:
            others = [(model, form) for model, form in self._forms.items() if model != POLICY]
            self._sender.begin_anew([leaf.under(model).key for model, form in others for leaf in form.leaves], version)

    def attachments(self, worker: int) -> list[tuple[Command, Sequence[int]]]:
        """What a worker that comes in the place of another is told, to have the newest weights."""
        message = None if self._sender is None else self._sender.welcome(worker)
        return [] if message is None else [(SchemeMessage(message.content), message.attached)]

    def add(self, facts: Sequence[Facts]) -> None:
        """There are more workers, of which each was found alike; they are sent the newest weights that all have."""
        first, self._workers = self._workers, self._workers + len(facts)
        if self._unsynchronised:
            self._unsynchronised |= {*range(first, self._workers)}
        if self._sender is not None:
            self._sender.add(len(facts))

    @property
    def nbytes(self) -> int:
        """Bytes of weights that lie somewhere for workers to fetch."""
        return int(getattr(self._sender, "nbytes", 0))

    def let_go(self) -> None:
        """Nothing will be published: keeps no memory."""
        sender, self._sender, self._is_closed = self._sender, None, True
        if sender is not None:
            sender.let_go()

    def form(self, model_id: str) -> WeightsForm:
        """See `Poster`."""
        return self._forms.get(model_id, WeightsForm())

    def named(self, given: Any) -> dict[str, torch.Tensor]:
        """See `Poster`."""
        return self._policy.named(given)

    def fitted(self, given: Sequence[Addressed]) -> Sequence[Fitted]:
        """See `Poster`."""
        fitted = []
        for models, workers in given:
            parts = [self._fitted(model, weights) for model, weights in models.items()]
            fitted.append(Fitted(tuple(models), {key: part[key] for part in parts for key in part}, workers))
        if self._scheme is not None:
            sender = self._connected(self._scheme)
            for each in fitted:
                sender.prepare(each.workers)
        return fitted

    def post(self, fitted: Sequence[Fitted], version: int) -> None:
        """See `Poster`."""
        if self._scheme is None:
            return
        sender = self._connected(self._scheme)
        for each in fitted:
            sender.publish(each.tensors, version, each.workers)
            if POLICY in each.models:
                self._unsynchronised -= {*(range(self._workers) if each.workers is None else each.workers)}

    def _fitted(self, model: str, given: Any) -> dict[Key, torch.Tensor]:
        form = self._forms[model]
        named = self._named(given) if model == POLICY else _given(model, given, self._strategies[model])
        if given is not None and not form.leaves and named:
            raise PolicyError(f"The {model} has no weights that could be updated.")
        fitted = form.fitted(named, f"the workers' {model}")
        if form.kept and not self._has_warned:
            self._has_warned = True
            warn(
                f"The policy changes {', '.join(form.kept)} itself while it acts; these buffers stay those of each "
                "worker, whatever the learner's are."
            )
        return {(model, name): tensor for name, tensor in fitted.items()}

    def _named(self, given: Any) -> dict[str, torch.Tensor]:
        if given is None and self._given is None and self.form(POLICY).leaves:
            raise PolicyError(
                "There is no policy here whose weights could be sent: each worker made its own (policy_factory). Pass "
                "a module, a TensorDict of parameters or a state dict."
            )
        if self._lacks_weights:
            self._lacks_weights = False
            warn(WITHOUT_WEIGHTS)
        return self._policy.named(given)

    def load(self, version: int) -> None:
        """See `Poster`."""
        self.post(self.fitted([({POLICY: None}, None)]), version)

    def before_batch(self) -> None:
        """See `Poster`."""
        if self._unsynchronised:
            self._unsynchronised.clear()
            warn(UNSYNCHRONISED)


def _given(model: str, weights: Any, strategy: WeightStrategy) -> dict[str, torch.Tensor]:
    """Weights by name of a model that only who passes them knows."""
    if weights is None:
        raise PolicyError(
            f"{model!r} is where frames are made, and nothing here says what weights it should have: pass a module, a "
            "TensorDict of parameters or a state dict."
        )
    return strategy.named(weights)
