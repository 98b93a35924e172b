"""Options of collectors whose workers are on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, option, positive, value_of_worker

__all__ = ["Remotes", "check_config"]

DEFAULT_CONFIG: Mapping[str, Any] = {"num_cpus": 1}
OURS = (
    *("concurrency_groups", "get_if_exists", "lifetime"),
    *("max_concurrency", "max_pending_calls", "max_restarts", "max_task_retries"),
)
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # amounts, and what Ray calls them


@dataclass(frozen=True, kw_only=True)
class Remotes:
    """The remotes of a cluster: where they are, and how they work together."""

    sync: bool = option(
        "True: batches are made of a rollout of each remote, in order, and remotes rest between two, as in a "
        "`MultiSyncCollector`. False: each batch is one remote's rollout, the first that is ready, as in a "
        "`MultiAsyncCollector`.",
        False,
    )
    max_in_flight: int = option(
        "Rollouts that a remote holds at most, made or being made, where `sync=False`. One: it rests from when its "
        "rollout is made until it is taken.",
        2,
    )
    num_workers_per_collector: int = option(
        'Worker processes that each remote has, where `collector_class` is "sync" or "async"; `create_env_fn` makes '
        "the environments of each.",
        1,
    )
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = option(
        "More options for the collectors that remotes hold (`collector_class`); a list has one for each remote.", None
    )
    ray_init_config: Mapping[str, Any] | None = option(
        "What `ray.init` is called with, if this program is not connected to Ray yet. With an `address` that cluster "
        "is joined. None, or without one: a running cluster is joined, if there is one, else one is started in this "
        "machine, and shut down with the collector.",
        None,
    )
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = option(
        "What `ray.remote` takes for each remote: `num_cpus`, `num_gpus`, `memory`, `resources`, "
        "`scheduling_strategy`, `runtime_env`; a list has one for each. None: `{'num_cpus': 1}`, which holds for "
        "`num_cpus` too where it is not given.",
        None,
    )
    max_weight_update_interval: int = option(
        "Where `sync=False`: a remote that has delivered so many batches since it was sent weights is sent those of "
        "the policy, at the next `next()`. -1: never by itself.",
        -1,
    )
    use_env_creator: bool = option(
        "Taken, for programs that pass it to TorchRL, and without effect: makers cross as they are.", False
    )

    def __post_init__(self) -> None:
        for name in ("sync", "use_env_creator"):
            flag(name, getattr(self, name))
        for name in ("max_in_flight", "num_workers_per_collector"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        if self.max_weight_update_interval != -1:
            number = positive("max_weight_update_interval", self.max_weight_update_interval)
            object.__setattr__(self, "max_weight_update_interval", number)
        usual = {field.name: field.default for field in fields(self)}
        for name in ("max_in_flight", "max_weight_update_interval"):
            if self.sync and (given := getattr(self, name)) != usual[name]:
                raise OptionError(f"{name}={given!r} does not go with sync=True: remotes rest between two batches.")
        for name in ("collector_kwargs", "remote_configs"):
            given = getattr(self, name)
            each = [] if given is None else [given] if isinstance(given, Mapping) else given
            if not isinstance(each, list | tuple) or not all(isinstance(one, Mapping) for one in each):
                raise OptionError(f"{name} takes a mapping, or a list of one a remote, not {given!r}.")
        if not (self.ray_init_config is None or isinstance(self.ray_init_config, Mapping)):
            raise OptionError(
                f"ray_init_config takes a mapping of arguments of ray.init, not {self.ray_init_config!r}."
            )

    def configs(self, remotes: int, first: int = 0) -> list[dict[str, Any]]:
        """What `ray.remote` takes, for each of so many.

        Args:
            remotes: how many.
            first: the number of the first.

        Raises:
            OptionError: a list of another length.
        """
        own = [value_of_worker("remote_configs", self.remote_configs, each, remotes) for each in range(remotes)]
        made = [{**DEFAULT_CONFIG, **(config or {})} for config in own]
        for remote, config in enumerate(made):
            check_config("remote_configs", config)
            if "name" in config and isinstance(self.remote_configs, Mapping):
                config["name"] = f"{config['name']}-{first + remote}"
        return made

    def kwargs_of(self, remote: int, remotes: int) -> dict[str, Any]:
        """The options of the collector that a remote holds.

        Raises:
            OptionError: a list of another length.
        """
        return dict(value_of_worker("collector_kwargs", self.collector_kwargs, remote, remotes) or {})


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Whether options of an actor are the user's to say, and amounts are numbers.

    Raises:
        OptionError: one is not.
    """
    if wrong := [key for key in OURS if key in config]:
        raise OptionError(f"{name} has {wrong[0]!r}, which rlcollect itself has a say in. Leave it out.")
    resources = config.get("resources") or {}
    if not isinstance(resources, Mapping):
        raise OptionError(f"{name} has resources={resources!r}; they are a mapping, from names to amounts.")
    amounts = {key: config[key] for key in RESOURCES if config.get(key) is not None}
    for key, amount in {**amounts, **resources}.items():
        if not isinstance(amount, Real) or isinstance(amount, bool):
            raise OptionError(f"{name} has {key}={amount!r}; what a remote asks for is a number.")
