"""The connection to a cluster, and whether what is wanted of it is there."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import ray

from rlcollect.errors import OptionError
from rlcollect.options.remotes import RESOURCES

__all__ = ["Connection", "check_demand", "created", "demand_of", "end_ray", "is_in", "session"]

REACHING = 5.0  # seconds in which who listens at an address answers


class Connection:
    """A lease of this process's connection to Ray, of which there is one.

    A cluster that was started here is shut down when the last lease of it ends. One that was there before, or a
    connection that the program made itself, is left as it is.

    Attributes:
        session: whose lease it is: a program that shuts Ray down and connects again has another.

    Args:
        options: of `ray.init`. With an `address` that cluster; without one a running cluster of this machine, or what
            `RAY_ADDRESS` names; where there is none, one is started in this machine.

    Raises:
        OptionError: there is no cluster at that address.
    """

    _leases: ClassVar[weakref.WeakSet[Connection]] = weakref.WeakSet()  # of a cluster that was started here
    _turn: ClassVar[threading.RLock] = threading.RLock()  # of who begins a lease, or ends one

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._owner = os.getpid()
        with self._turn:
            if ray.is_initialized():
                _check_same(options.get("address"))
                is_ours = any(lease.session == session() for lease in self._leases)
            else:
                is_ours = _connected(options)
            self.session: str = session()
            if is_ours:
                self._leases.add(self)

    def close(self) -> None:
        """Ends the lease. Safe to call again; in a process that was forked from the program it is not there to end."""
        if os.getpid() != self._owner:
            return
        with self._turn:
            if self not in self._leases:
                return
            self._leases.discard(self)
            is_last = not any(lease.session == self.session for lease in self._leases)
            if is_last and is_in(self.session):
                end_ray()


def session() -> str:
    """What Ray calls this connection; only where there is one. Each cluster numbers its jobs from one on."""
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}/{context.get_job_id()}"


def is_in(own: str) -> bool:
    """Whether this process is still connected, and to the Ray that it was in this session."""
    return ray.is_initialized() and session() == own


def end_ray() -> None:
    """Shuts Ray down for this process, whoever uses it, with a cluster that was started here. Safe to call again."""
    if ray.is_initialized():
        ray.shutdown()


def _connected(options: Mapping[str, Any]) -> bool:
    """Connects; whether a cluster was started for that."""
    given = {"log_to_driver": False, "include_dashboard": False, "logging_level": logging.WARNING, **options}
    address = given.get("address")
    if isinstance(address, str) and "://" in address:
        raise OptionError(
            f"address={address!r} is one of a Ray client; run the program on a node of the cluster, with its address "
            "as host:port, or without one."
        )
    if isinstance(address, str) and ":" in address:
        _check_reachable(address)
    try:
        context: Any = ray.init(**given)
    except (ConnectionError, TypeError, ValueError) as error:  # as Ray says that a cluster, or an option, is not there
        raise OptionError(
            f"Ray could not be reached or started with ray_init_config={dict(options)!r}: {error}"
        ) from error
    by = str(context.address_info.get("session_dir", "")).rpartition("_")[2]  # ends with the number of who started it
    return address in (None, "local") and by == str(os.getpid())


def _check_reachable(address: str) -> None:
    """Whether anybody listens there: Ray would try for minutes.

    Raises:
        OptionError: nobody does.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=REACHING):
            return
    except (OSError, ValueError) as error:
        raise OptionError(
            f"There is no Ray cluster at address={address!r} (ray_init_config): {error}. Start one there (ray start "
            "--head), or leave the address out: then one is started in this machine."
        ) from error


def _check_same(address: Any) -> None:
    """Whether an address is that of the cluster that this program is connected to.

    Raises:
        OptionError: it is another one.
    """
    known = ray.get_runtime_context().gcs_address
    own = isinstance(address, str) and address.replace("localhost", "127.0.0.1")
    if own and ":" in own and known not in (own, own.replace("127.0.0.1", known.rpartition(":")[0])):
        raise OptionError(
            f"ray_init_config has address={address!r}, and this program is connected to the cluster at {known} "
            "already, of which it has one. Call ray.shutdown() first, or leave the address out."
        )


def demand_of(config: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options asks for, by resource."""
    asked = {name: float(config.get(option) or 0.0) for option, name in RESOURCES.items()}
    asked |= {name: float(amount) for name, amount in (config.get("resources") or {}).items()}
    return {name: amount for name, amount in asked.items() if amount}


def created(kind: Any, config: Mapping[str, Any], name: str, *arguments: Any) -> Any:
    """An actor. Ray neither starts it again nor asks it again: who comes in its place is told by us.

    Args:
        kind: its class, as `ray.remote` made it.
        config: its options.
        name: of the argument that they were.
        arguments: of its constructor.

    Raises:
        OptionError: the options are not what `ray.remote` takes.
    """
    own = {"max_restarts": 0, "max_task_retries": 0}
    try:
        return kind.options(**{**config, **own}).remote(*arguments)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name}={dict(config)!r} is not what ray.remote takes: {error}") from error


def check_demand(configs: Sequence[Mapping[str, Any]]) -> None:
    """Whether a cluster has what actors need: they would wait for ever.

    Raises:
        OptionError: it has not, all together or node by node.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes: list[Mapping[str, float]] = [node["Resources"] for node in alive]
    demands = [demand_of(config) for config in configs]
    for demand in demands:
        for name, amount in demand.items():
            most = max((node.get(name, 0.0) for node in nodes), default=0.0)
            if most < amount:
                raise OptionError(
                    f"A remote asks for {amount:g} {name}, and no node of the cluster has more than {most:g} "
                    "(remote_configs=). Ask for less, or add a larger node."
                )
    _check_total(demands)
    for alike, count in Counter(tuple(sorted(each.items())) for each in demands).items():
        room = sum(_fitting(dict(alike), node) for node in nodes)
        if alike and room < count:
            told = " and ".join(f"{amount:g} {name}" for name, amount in alike)
            raise OptionError(
                f"{count} remotes ask for {told} each, and the {len(nodes)} nodes of the cluster have room for {room} "
                "of them. Ask for less of each (remote_configs=), make fewer (num_collectors=), or add nodes first."
            )


def _check_total(demands: Sequence[Mapping[str, float]]) -> None:
    there: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    total: Counter[str] = Counter()
    for demand in demands:
        total.update(demand)
    for name, amount in total.items():
        if amount > there.get(name, 0.0) + 1e-9:
            raise OptionError(
                f"{len(demands)} remotes ask for {amount:g} {name} in all, and the cluster has "
                f"{there.get(name, 0.0):g}. "
                "Ask for less of each (remote_configs=), make fewer (num_collectors=), or add nodes first."
            )


def _fitting(demand: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many that ask for this a node has room for, if it has nothing else to do."""
    return min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in demand.items()), default=0)
