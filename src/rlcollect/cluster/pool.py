"""The program's side of workers in actors of a Ray cluster: see `interfaces.RevivablePool`.

Placement, the object store and the life of nodes are Ray's work. Every wait wakes on a reply, on the end of an actor,
or when its time is up.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlcollect.cluster.actor import Serving
from rlcollect.cluster.connection import created, demand_of, is_in, session
from rlcollect.cluster.member import PULSE_EACH, Member, said
from rlcollect.cluster.objects import seen
from rlcollect.errors import ClosedError, WorkerDied
from rlcollect.processes.board import Row
from rlcollect.processes.channel import Held
from rlcollect.processes.crossing import unpacked
from rlcollect.processes.messages import Reply, Request
from rlcollect.processes.serve import Handler

__all__ = ["ActorPool"]

LET_GO = 3.0  # seconds that actors have to be gone
CLOSING = 0.5  # and to close their environments before
TELLING = 0.5  # and all to say what they are doing, for an error
NO_RAY = "All workers are gone: Ray was shut down. Make a new collector."
ADVICE = "Ray's logs on its node have what it wrote (session_latest/logs in Ray's folder)."


@dataclass(frozen=True)
class _Call:
    """A request that was sent.

    Attributes:
        worker: to whom.
        reply: where the answer will be.
        beside: where what comes beside it will be.
    """

    worker: int
    reply: Any
    beside: Any


class ActorPool:
    """Workers in actors. All are created at once, and each makes what handles its commands by itself.

    Attributes:
        is_spent: whether Ray was shut down; a death is raised.
        patience: seconds that actors have to be gone.

    Args:
        make: a function of a module: from a worker's number and its row of a board to a `Handler`.
        configs: of each worker what `ray.remote` takes: resources, placement.
        stages: what workers may be doing.
    """

    def __init__(
        self,
        make: Callable[[int, Row], Handler],
        configs: Sequence[Mapping[str, Any]],
        *,
        stages: Sequence[str],
    ) -> None:
        self.is_spent = False
        self.patience = LET_GO
        self._kind = ray.remote(Serving)
        self._make = make
        self._configs = [dict(config) for config in configs]
        self._stages = tuple(stages)
        self._numbers = itertools.count(1)
        self._is_open = True
        self._owner = os.getpid()
        self._members: list[Member] = []
        self._retired = set[int]()
        self._calls: dict[int, _Call] = {}
        self._stops: dict[int, int] = {}  # the newest number that each was told to stop
        self._half = set[int]()  # those of which all is here but the reply
        self._telling = 0.0  # until when those that were asked for a sign of life have time, for an error
        self._told = set[int]()  # of which it was told since they were asked
        self._session = session()
        self._gone: list[tuple[int, RayError]] = []
        self._heard: list[Reply] = []
        try:
            with Held():
                for worker, config in enumerate(self._configs):
                    self._members.append(self._made(worker, config))
        except BaseException:
            self.shutdown()
            raise

    def _made(self, worker: int, config: Mapping[str, Any]) -> Member:
        there = worker, self._stages, self._make, _node, sys.path
        return Member(created(self._kind, config, "remote_configs", *there), self._stages[0])

    def add(self, configs: Sequence[Mapping[str, Any]]) -> None:
        """More workers, with the numbers that follow."""
        for config in configs:
            with Held():
                self._members.append(self._made(len(self._members), config))
                self._configs.append(dict(config))

    def drop(self, first: int) -> None:
        """Ends the workers from this number on, as if they had never been."""
        for worker in range(first, len(self._members)):
            self.retire(worker)
        with Held():
            self._heard = [reply for reply in self._heard if reply.worker < first]
            del self._members[first:], self._configs[first:]
            self._retired -= {worker for worker in self._retired if worker >= first}

    @property
    def nbytes(self) -> int:
        """Bytes of rollouts that have come and were not taken."""
        return sum(reply.beside.nbytes for reply in self._heard if reply.beside is not None)

    @property
    def configs(self) -> list[dict[str, Any]]:
        """What each was created with."""
        return list(self._configs)

    @property
    def actors(self) -> list[Any]:
        """Their handles."""
        return [member.actor for member in self._members]

    def __len__(self) -> int:
        return len(self._members)

    # --- asking ---

    def new_number(self) -> int:
        """See `WorkerPool`."""
        return next(self._numbers)

    def submit(
        self,
        worker: int,
        command: Any,
        *,
        in_turn: bool = True,
        attached: Sequence[Any] = (),
        number: int | None = None,
    ) -> int:
        """See `WorkerPool`. What goes with a command are references to objects.

        Raises:
            OptionError: it cannot be pickled. Nothing was sent.
        """
        number = self.new_number() if number is None else number
        request = Request.of(number, command, in_turn=in_turn)
        with Held():
            self._check(worker)
            if self._members[worker].is_there:
                self._send(worker, request, attached)
            else:  # what is sent to an actor that waits for a node stays in the store until it has one
                old = self._members[worker].keep(request, attached)
                self._heard += [Reply(each.id, worker, None, None) for each in old]
        return number

    def _send(self, worker: int, request: Request, attached: Sequence[Any]) -> None:
        member = self._members[worker]
        reply, beside = member.actor.do.remote(next(member.places), pickle.dumps(request), list(attached))
        self._calls[request.id] = _Call(worker, reply, beside)

    def _hear(self, worker: int) -> None:
        """A sign of life that was asked for has come."""
        member = self._members[worker]
        with Held():
            member.hear()
            if member.is_there:
                kept, member.kept = member.kept, []
                for request, attached in kept:
                    self._send(worker, request, attached)

    def _check(self, worker: int) -> None:
        if not self._is_open:
            raise ClosedError("It was shut down.")
        if worker in self._retired:
            raise ClosedError(f"Worker {worker} was ended; start another in its place first.")
        if not is_in(self._session):  # else Ray would start anew by itself
            raise self._died(worker, None)

    def stop(self, worker: int, number: int) -> None:
        """See `WorkerPool`. Who comes in its place is told too, of what it has not done."""
        with Held():
            self._stops[worker] = max(number, self._stops.get(worker, 0))
            if is_in(self._session):
                self._members[worker].actor.stop.remote(number)

    def withdraw(self, worker: int) -> int:
        """See `WorkerPool`."""
        return self.submit(worker, None, in_turn=False)

    # --- listening ---

    def ready(self, timeout: float | None) -> list[Reply]:
        """See `WorkerPool`."""
        if self._heard:
            return self._heard
        if self._gone:
            raise self._died(*self._gone[0])
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = PULSE_EACH if deadline is None else max(0.0, min(PULSE_EACH, deadline - time.monotonic()))
            if self._listened(left):
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        if self._gone and not self._heard:
            raise self._died(*self._gone[0])
        return self._heard

    def _listened(self, seconds: float) -> bool:
        """Waits so long at most; whether somebody answered, or is gone."""
        if not self._is_open:
            raise ClosedError("It was shut down while its workers were waited for.")
        if not is_in(self._session):
            raise self._died(0, None)
        calls = self._calls.copy()
        # what comes beside a reply is the larger, as a rule; where it is the reply, that is waited for then
        waited: dict[Any, int] = {
            call.reply if number in self._half else call.beside: number for number, call in calls.items()
        }
        members = [(worker, each) for worker, each in enumerate(self._members) if worker not in self._retired]
        lives = {member.life: worker for worker, member in members}
        asked = {call.worker for call in calls.values()}
        for worker, member in members:
            if worker in asked or member.kept:
                member.ask()
        pulses = {member.asked: worker for worker, member in members if member.asked is not None}
        refs = [*waited, *lives, *pulses]
        if not refs:
            time.sleep(seconds)
            return False
        ready, others = ray.wait(refs, num_returns=1, timeout=seconds)
        if ready and others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        with Held():
            for ref in ready:
                if ref in pulses:
                    self._hear(pulses[ref])
                elif ref in waited:
                    self._receive(waited[ref])
            for ref in ready:
                if ref in lives:
                    self._note_end(lives[ref], ref)
        return bool(self._heard or self._gone)

    def _receive(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:  # it was ended meanwhile
            return
        if number not in self._half and not ray.wait([call.reply], timeout=0)[0]:
            self._half.add(number)
            return
        try:
            (place, data), beside = ray.get([call.reply, call.beside])
        except RayError as error:
            self._note_gone(call.worker, error)
            return
        self._calls.pop(number, None)
        self._half.discard(number)
        reply, pulse = unpacked(data)
        member = self._members[call.worker]
        member.note(pulse)
        own = None if beside is None else seen(beside)
        member.early[place] = replace(reply, id=number, worker=call.worker, beside=own)
        while member.place in member.early:
            self._heard.append(member.early.pop(member.place))
            member.place += 1

    def _note_end(self, worker: int, life: Any) -> None:
        try:
            ray.get(life, timeout=0)
        except GetTimeoutError:
            return
        except RayError as error:
            self._note_gone(worker, error)

    def _note_gone(self, worker: int, error: RayError) -> None:
        if worker not in self._retired and worker not in [gone for gone, _ in self._gone]:
            self._gone.append((worker, error))

    def done(self) -> None:
        """See `WorkerPool`."""
        self._heard = []

    # --- the ends ---

    def retire(self, worker: int) -> None:
        """See `RevivablePool`."""
        if worker not in self._retired:
            with Held():
                self._retired.add(worker)
                self._gone = [each for each in self._gone if each[0] != worker]
                self._calls = {number: call for number, call in self._calls.copy().items() if call.worker != worker}
                self._half &= self._calls.keys()
                self._end([self._members[worker]])

    def restart(self, worker: int) -> None:
        """See `RevivablePool`: Ray chooses the node."""
        self.retire(worker)
        with Held():
            if not self._is_open:
                raise ClosedError("It was shut down while a worker was started.")
            if not is_in(self._session):
                raise self._died(worker, None)
            self._members[worker] = self._made(worker, self._configs[worker])
            self._retired.discard(worker)
            if worker in self._stops:
                self._members[worker].actor.stop.remote(self._stops[worker])

    def kept(self, worker: int, number: int) -> int:  # noqa: ARG002
        """See `RevivablePool`: a rollout is in its worker's memory until it is whole."""
        return 0

    def count(self, worker: int) -> int:
        """See `RevivablePool`: as far as it was heard."""
        return self._members[worker].pulse.count

    def last_sign(self, worker: int) -> float:
        """See `RevivablePool`."""
        member = self._members[worker]
        # where nobody has asked since, it was not silent
        return (time.monotonic() if member.asked is None else member.asked_at) - member.pulse.age

    def told(self, worker: int) -> str:
        """See `WorkerPool`."""
        member = self._members[worker]
        if not is_in(self._session):
            return f"worker {worker} ({member.pulse.told}, before Ray was shut down)"
        self._look_around(worker)
        if member.asked is not None and ray.wait([member.asked], timeout=max(0.0, self._telling - time.monotonic()))[0]:
            self._hear(worker)
        if not member.pulse.node:
            asked, free = demand_of(self._configs[worker]), ray.available_resources()  # type: ignore[no-untyped-call]
            told = ", ".join(f"{amount:g} {name} ({free.get(name, 0.0):g} free)" for name, amount in asked.items())
            return f"worker {worker} (on its way: its actor starts, or waits for a node with {told or 'room'})"
        age = time.monotonic() - member.heard
        when = f", {age:.0f} s ago" if age > 2 * PULSE_EACH else ""
        return f"worker {worker} ({member.pulse.told}{when}; on node {member.pulse.node})"

    def _look_around(self, worker: int) -> None:
        """Asks all for a sign of life, once for each: an error may tell of many, which have the same time for it."""
        now = time.monotonic()
        if worker in self._told or now >= self._telling:
            self._telling, self._told = now + TELLING, set()
            for each, member in enumerate(self._members):
                if each not in self._retired:
                    member.ask_anew()
        self._told.add(worker)

    def shutdown(self, timeout: float | None = None) -> None:
        """See `WorkerPool`.

        Args:
            timeout: seconds that actors have to be gone; None: `patience`.
        """
        if not self._is_open:
            return
        self._is_open = False
        if os.getpid() != self._owner:  # a copy, in a process that was forked from the program
            return
        with Held():
            members = [each for worker, each in enumerate(self._members) if worker not in self._retired]
            self._calls, self._heard = {}, []
            timeout = self.patience if timeout is None else timeout
            if is_in(self._session):
                leaving = [member.actor.leave.remote() for member in members]
                if leaving:
                    ray.wait(leaving, num_returns=len(leaving), timeout=min(CLOSING, timeout))
            self._end(members, timeout)

    def _end(self, members: Sequence[Member], timeout: float = LET_GO) -> None:
        """Ends actors, and waits until they are gone, for a while."""
        if not is_in(self._session):
            return
        for member in members:
            ray.kill(member.actor, no_restart=True)
        if members:
            ray.wait([member.life for member in members], num_returns=len(members), timeout=timeout)

    def _died(self, worker: int, error: RayError | None) -> WorkerDied:
        stage = self._members[worker].pulse.stage
        if error is None:
            self.is_spent = True
            return WorkerDied(NO_RAY, worker=worker, exitcode=None, stage=stage)
        node = self._members[worker].pulse.node
        where = f" (on node {node})" if node else ""
        age = time.monotonic() - self.last_sign(worker)
        died = WorkerDied(
            f"worker {worker}{where} is gone. It was last heard of {age:.1f} s ago, while {stage}. Ray says: "
            f"{said(error)} {ADVICE}",
            worker=worker,
            exitcode=None,
            stage=stage,
        )
        died.__cause__ = error
        return died


def _node() -> str:
    """Where this is."""
    context = ray.get_runtime_context()
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"{address} ({context.get_node_id()[:8]})"
