"""ProbabilisticTensorDictModules without a TensorDict: from parameters to a sample and its log-probability.

Two ways, and the same numbers as the module gives, bit for bit, under one seed:

- *written out*: plain `torch.distributions.Categorical` and `Normal`, whose arithmetic is a few lines. Categorical's
  is the exponential race that `torch.multinomial` runs for one draw: `argmax(p / q)` with `q ~ Exp(1)`, the Gumbel-max
  trick (Gumbel 1954) without its logarithms.
- *built*: any other distribution is made from the parameters at each call, as the module does.

The checks of parameters that torch's own distributions make by default cost as much as a small network (30 us a call).
They are made once a rollout in the place of once a call, over all its frames; where the parameters are not recorded
(private names), at each call, as the module does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, InteractionType, ProbabilisticTensorDictModule
from torch import distributions as D
from torch.nn import functional as F

from rlcollect.layout import Key, as_key, is_private

__all__ = ["Sampling", "distribution_call"]

Call = Callable[..., Any]
HALF_LOG_2PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class Sampling:
    """What a probabilistic module computes.

    Attributes:
        call: from the parameters to the sample, or to `(sample, log_prob)` where the module returns that.
        params: keys of the parameters, in order.
        is_valid: whether parameters, of any number of frames, are such that something can be drawn from them; None
            where `call` looks itself.
    """

    call: Call
    params: tuple[Key, ...]
    is_valid: Callable[..., bool] | None = None


def distribution_call(
    module: ProbabilisticTensorDictModule, exploration: InteractionType, *, atomic: bool, is_recorded: bool = True
) -> Sampling | str:
    """What a probabilistic module computes, as a function of its parameters, in the order of its `in_keys`.

    Args:
        module: samples one value under one key.
        exploration: how the sample is chosen.
        atomic: sample and log-probability come from one call where the distribution has one (TorchRL's modules).
        is_recorded: whether a rollout's memory holds what is drawn from, so that it can be looked at afterwards. (What
            has a private name, and arguments beside the parameters, are not there in any case.)

    Returns:
        The function, or why there is none.
    """
    kind, kwargs = module.distribution_class, module.distribution_kwargs
    names = [key[-1] if isinstance(key, tuple) else key for key in module.dist_keys]
    params = tuple(map(as_key, module.in_keys))
    if module._generator is not None or module._generator_key is not None or module.num_samples is not None:
        return "it has a generator or num_samples of its own"
    if isinstance(kind, type) and issubclass(kind, CompositeDistribution):
        return "its distribution is composite"
    if not _is_dict(kwargs):
        return "its distribution_kwargs are no dict"
    atomic = atomic and exploration is InteractionType.RANDOM
    recorded = is_recorded and not any(map(is_private, params))
    unwanted = kwargs.get("validate_args") is False
    if not _is_torchs(kind):
        built = _built(module, kind, names, kwargs, exploration, atomic=atomic)
        return Sampling(built, params, _no_nan if recorded and not unwanted else None)
    if not recorded or kwargs.get("validate_args") or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
        checked = {"validate_args": True, **kwargs}
        return Sampling(_built(module, kind, names, checked, exploration, atomic=atomic), params)
    if not set(kwargs) - {"validate_args"}:
        written = _written_out(kind, names, exploration, module.return_log_prob)
        if written is not None:
            return Sampling(written[0], params, None if unwanted else written[1])
    unchecked = _built(module, kind, names, {**kwargs, "validate_args": False}, exploration, atomic=atomic)
    return Sampling(unchecked, params, None if unwanted else _torchs_check(kind, names, kwargs))


def _is_torchs(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.startswith("torch.distributions.")


def _no_nan(*params: Any) -> bool:
    return not any(isinstance(p, torch.Tensor) and p.is_floating_point() and bool(p.isnan().any()) for p in params)


def _torchs_check(kind: Callable[..., Any], names: Sequence[str], kwargs: Mapping[str, Any]) -> Callable[..., bool]:
    def is_valid(*params: Any) -> bool:
        try:
            kind(**dict(zip(names, params, strict=True)), **{**kwargs, "validate_args": True})
        except ValueError:
            return False
        return True

    return is_valid


def _is_dict(kwargs: Any) -> bool:
    return isinstance(kwargs, Mapping) and not isinstance(kwargs, TensorDictBase)


def _built(
    module: ProbabilisticTensorDictModule,
    kind: Callable[..., D.Distribution],
    names: list[str],
    kwargs: Mapping[str, Any],
    exploration: InteractionType,
    *,
    atomic: bool,
) -> Call:
    draw = module._dist_sample  # the rules of tensordict for each exploration type, not ours to repeat

    def sample(*params: Any) -> Any:
        return draw(kind(**dict(zip(names, params, strict=True)), **kwargs), interaction_type=exploration)

    def sample_and_score(*params: Any) -> Any:
        distribution = kind(**dict(zip(names, params, strict=True)), **kwargs)
        together = _together(distribution) if atomic else None
        if together is not None:
            return together()
        value = draw(distribution, interaction_type=exploration)
        return value, distribution.log_prob(value)

    return sample_and_score if module.return_log_prob else sample


def _together(distribution: D.Distribution) -> Call | None:
    """The distribution's own way to draw and score at once: it need not invert its transform."""
    name = "rsample_and_log_prob" if distribution.has_rsample else "sample_and_log_prob"
    found: Call | None = getattr(distribution, name, None)
    return found


# --- written out ------------------------------------------------------------------------------------------------------


def _written_out(
    kind: Any, names: list[str], exploration: InteractionType, return_log_prob: bool
) -> tuple[Call, Callable[..., bool]] | None:
    """The call, and whether its parameters are valid; None for a distribution or a choice that is not written out."""
    random = exploration is InteractionType.RANDOM
    greedy = exploration in (InteractionType.DETERMINISTIC, InteractionType.MODE)
    if kind is D.Categorical and names == ["logits"] and (random or greedy):
        return _categorical(random=random, score=return_log_prob), _finite_sum
    central = greedy or exploration is InteractionType.MEAN
    if kind is D.Normal and sorted(names) == ["loc", "scale"] and (random or central):
        first = names.index("loc")
        return _normal(first, random=random, score=return_log_prob), lambda *params: _positive(params, first)
    return None


def _finite_sum(logits: torch.Tensor) -> bool:
    """Whether no logit is NaN or infinitely large, and not all are forbidden."""
    return bool(logits.logsumexp(-1).isfinite().all())


def _positive(params: Sequence[torch.Tensor], first: int) -> bool:
    loc, scale = params[first], params[1 - first]
    return bool((scale > 0).all()) and not bool(loc.isnan().any())


def _categorical(*, random: bool, score: bool) -> Call:
    def sample(logits: torch.Tensor) -> torch.Tensor:
        return choose(logits - logits.logsumexp(-1, keepdim=True))

    def choose(log_probs: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(log_probs, -1)
        return (probs / torch.empty_like(probs).exponential_() if random else probs).argmax(-1)

    def sample_and_score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        value = choose(log_probs)
        return value, log_probs.gather(-1, value.unsqueeze(-1)).squeeze(-1)

    return sample_and_score if score else sample


def _normal(first: int, *, random: bool, score: bool) -> Call:
    def sample(*params: torch.Tensor) -> torch.Tensor:
        return choose(params[first], params[1 - first])

    def choose(loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)  # type: ignore[no-untyped-call]
        if not random:
            return loc
        return loc + torch.randn(loc.shape, dtype=loc.dtype, device=loc.device) * scale

    def sample_and_score(*params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = params[first], params[1 - first]
        value = choose(loc, scale)
        return value, -((value - loc) ** 2) / (2 * scale**2) - scale.log() - HALF_LOG_2PI

    return sample_and_score if score else sample
