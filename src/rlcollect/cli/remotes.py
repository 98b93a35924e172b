"""A collector whose remotes are on a Ray cluster, for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcollect import RayCollector
from rlcollect.errors import RlcollectError

__all__ = ["collector_on_ray"]


def collector_on_ray(
    environments: Sequence[str], policy: Any, *, address: str | None, cpus: float | None, **options: Any
) -> RayCollector:
    """One whose batches are `[lanes, T]`, the lanes of all remotes side by side, in the order of remotes.

    Args:
        environments: ids, one a remote.
        policy: what a collector takes.
        address: of the cluster; None: one that runs, or one that is started here.
        cpus: that Ray sets aside for each remote; None: as a `RayCollector` does.
        **options: of any collector.

    Raises:
        RlcollectError: Ray is not installed.
        What a `RayCollector` raises.
    """
    try:
        return RayCollector(
            environments,
            policy,
            sync=True,
            cat_results=0,
            ray_init_config={"address": address, "logging_level": "ERROR"},
            remote_configs=None if cpus is None else {"num_cpus": cpus},
            **options,
        )
    except ImportError as error:
        if not _is_of_ray(error.__cause__):
            raise
        raise RlcollectError(str(error)) from None


def _is_of_ray(error: BaseException | None) -> bool:
    """Whether Ray was looked for in vain."""
    return isinstance(error, ModuleNotFoundError) and error.name == "ray"
