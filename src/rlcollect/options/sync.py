"""How weights get to where they act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcollect.errors import OptionError
from rlcollect.options.checks import option

__all__ = ["Sync"]


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How weights get to where they act."""

    weight_sync_schemes: Mapping[str, Any] | None = option(
        'A `WeightSyncScheme` for each model that takes weights: "policy" (one like the others, if it is not named), '
        'and paths to modules that environments, hooks or post-processings hold ("env.reward_model", "postproc[0]").',
        None,
    )
    weight_recv_schemes: Mapping[str, Any] | None = option(
        "Schemes by which this collector is itself a receiver, by model: what came is handed on before each batch (see "
        "`register_scheme_receiver`).",
        None,
    )
    weight_updater: Any = option(
        "A `WeightUpdaterBase`, or what makes one, by which `update_policy_weights_` sends the policy's weights: for "
        "updaters written for TorchRL. None: they are sent as they are.",
        None,
    )

    def __post_init__(self) -> None:
        for name in ("weight_sync_schemes", "weight_recv_schemes"):
            given = getattr(self, name)
            if not (given is None or isinstance(given, Mapping)):
                raise OptionError(f"{name} takes a mapping from models to schemes, not {given!r}.")
