"""What weights a model takes, as who holds it says: names, shapes, dtypes. What is sent is held against that first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlcollect.errors import PolicyError
from rlcollect.layout import Leaf
from rlcollect.weights.naming import misfit, plain, tensors_of

__all__ = ["WeightsForm"]


@dataclass(frozen=True)
class WeightsForm:
    """What weights a model takes.

    Attributes:
        leaves: the tensors, by name; what is tied once.
        kept: names of those that the model itself changes, and that stay its own.
        names: all names that a state dict of it has.
        tied: names that stand for the tensor of another name.
        lazy: the first values of tensors that had none when the model came, by name.
    """

    leaves: tuple[Leaf, ...] = ()
    kept: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    lazy: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        kept: Collection[str] = (),
        names: Collection[str] = (),
        tied: Mapping[str, str] | None = None,
        lazy: Mapping[str, torch.Tensor] | None = None,
    ) -> WeightsForm:
        """That of a model with these tensors."""
        leaves = tuple(Leaf((name,), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        return cls(leaves, tuple(sorted(kept)), tuple(names), dict(tied or {}), dict(lazy or {}))

    @classmethod
    def of_module(cls, module: nn.Module) -> WeightsForm:
        """That of a module."""
        tensors = {name: tensor for name, tensor in tensors_of(module).items() if not is_lazy(tensor)}
        return cls.of(tensors, names=[plain(name) for name in module.state_dict()], tied=tied_names(module))

    @classmethod
    def common(cls, forms: Sequence[WeightsForm], of: str, whose: str) -> WeightsForm:
        """That of several, which have to be alike.

        Args:
            forms: of each.
            of: what they are forms of, for errors: "policies".
            whose: what has them: "worker".

        Raises:
            PolicyError: they are not; names the first difference.
        """
        ours = {leaf.key[0]: leaf for leaf in forms[0].leaves}
        for place, form in enumerate(forms):
            theirs = {leaf.key[0]: leaf for leaf in form.leaves}
            for name in [*ours, *theirs]:
                if ours.get(name) != theirs.get(name):
                    told = f"{theirs.get(name, 'it has none')} where that has {ours.get(name, 'none')}"
                    raise PolicyError(
                        f"All {whose}s need {of} with the same weights; {name!r} of {whose} {place}'s differs from "
                        f"that of {whose} 0's: {told}."
                    )
        return forms[0]

    def fitted(self, named: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
        """The tensors that are to be sent, of those that were given.

        Args:
            named: by name. Buffers that no state dict has may lack, and stay as they were.
            what: whose they are to be, for errors.

        Raises:
            PolicyError: they do not fit; names the first difference.
        """
        may_lack = {leaf.key[0] for leaf in self.leaves} - {*self.names} - {*named}
        needed = {leaf.key[0]: leaf for leaf in self.leaves if leaf.key[0] not in may_lack}
        difference = misfit(named, needed, {*self.names, *self.kept}) or self._untied(named)
        if difference:
            raise PolicyError(f"The weights do not fit {what}: {difference}. Nothing was changed.")
        return {name: named[name].detach() for name in needed}

    def _untied(self, named: Mapping[str, torch.Tensor]) -> str:
        """What is one tensor there and differs here, in words."""
        for alias, name in self.tied.items():
            one, other = named.get(alias), named.get(name)
            if one is None or other is None or one is other:
                continue
            if one.data_ptr() == other.data_ptr() and (one.shape, one.stride()) == (other.shape, other.stride()):
                continue
            if one.shape != other.shape or not torch.equal(one.to(other), other):
                return f"{alias!r} and {name!r} differ, and are one tensor there"
        return ""


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are those of others, and whose."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[plain(name)] = first[id(parameter)]
        else:
            first[id(parameter)] = plain(name)
    return tied
