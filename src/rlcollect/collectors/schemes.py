"""Which models of a collector take weights, and how each one's travel."""

from __future__ import annotations

import copy

from rlcollect.errors import OptionError
from rlcollect.options import Sync
from rlcollect.weights.scheme import NoWeightSyncScheme, WeightSyncScheme
from rlcollect.weights.strategy import WeightStrategy
from rlcollect.workers.models import POLICY, POSTPROC, root_of

__all__ = ["Schemes"]


class Schemes:
    """The schemes of a collector's models.

    All models of workers go one way, so that what is published together is seen together.

    Attributes:
        given: by model, as the user has them; the policy's is there in any case.
        carrier: the one whose ends are used; None: nothing is sent.
        paths: of models in workers, beside the policy.
        local: paths of models of post-processings, which are here.

    Args:
        sync: the options.
        usual: the policy's, where none is given.

    Raises:
        OptionError: something else than a scheme, a path that begins nowhere, or schemes of different kinds.
    """

    def __init__(self, sync: Sync, usual: type[WeightSyncScheme]) -> None:
        given = dict(sync.weight_sync_schemes or {})
        for model, scheme in given.items():
            root_of(model)
            if not isinstance(scheme, WeightSyncScheme):
                raise OptionError(
                    f"weight_sync_schemes takes a WeightSyncScheme for each model; {scheme!r} came for {model!r}."
                )
        moving = [scheme for scheme in given.values() if not isinstance(scheme, NoWeightSyncScheme)]
        if wrong := [scheme for scheme in moving if type(scheme) is not type(moving[0])]:
            raise OptionError(
                f"All models of a collector go one way, so that what is published together is seen together; "
                f"{moving[0]!r} and {wrong[0]!r} came. (A NoWeightSyncScheme leaves a model alone.)"
            )
        if POLICY not in given:
            given[POLICY] = copy.copy(moving[0]) if moving else usual()
        self.given: dict[str, WeightSyncScheme] = given
        there = [model for model in self.moving if root_of(model) != POSTPROC]
        self.carrier = given[there[0]] if there else None
        self.paths = tuple(model for model in there if model != POLICY)
        self.local = tuple(model for model in self.moving if root_of(model) == POSTPROC)

    @property
    def moving(self) -> list[str]:
        """Models that are not left alone."""
        return [model for model, scheme in self.given.items() if not isinstance(scheme, NoWeightSyncScheme)]

    @property
    def strategies(self) -> dict[str, WeightStrategy]:
        """What travels of each model in a worker."""
        return {model: self.given[model].strategy for model in self.moving if model not in self.local}
