"""A buffer in an actor of a Ray cluster, as its users see it."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from tensordict import TensorDictBase

from rlcollect.cluster.needed import needed
from rlcollect.errors import ClosedError, OptionError
from rlcollect.layout import Leaf
from rlcollect.memory.flat import Flat, Room, flattened
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.replay.hosted import Hosted, HostedFacts
from rlcollect.memory.replay.remote_claim import RemoteClaim
from rlcollect.options.checks import positive, seconds
from rlcollect.options.remotes import check_config
from rlcollect.processes.crossing import packed, unpacked

if TYPE_CHECKING:
    from rlcollect.cluster.connection import Connection
    from rlcollect.cluster.service import Call, Group, Line, Service

__all__ = ["RayReplayBuffer"]

Array = np.ndarray[Any, Any]
USUAL_CONFIG: Mapping[str, Any] = {"num_cpus": 0}
STARTING = 300.0  # seconds that an actor may take to be there


class RayReplayBuffer:
    """A replay buffer in an actor of a Ray cluster, which remotes write to and anybody samples from.

    ::

        buffer = RayReplayBuffer(100_000, batch_size=256, prefetch=4)
        with RayCollector(
            ["CartPole-v1"] * 8, policy, frames_per_batch=256, num_envs=16, total_frames=1_000_000, replay_buffer=buffer
        ) as collector:
            collector.start()
            collector.wait_for(frames=1_000)
            while not collector.exhausted:
                train(buffer.sample())
                collector.update_policy_weights_()
        buffer.close()

    Remotes of a `RayCollector` write their rollouts to it themselves; every other collector writes to it as to any
    buffer. What it gives are copies, which are the user's own.

    Args:
        capacity: the first argument of what makes the buffer; None: it gets none.
        replay_buffer_cls: what makes it, in the actor: `ReplayBuffer`, a class of TorchRL's, or a function.
        ray_init_config: see `RayCollector`.
        remote_config: what `ray.remote` takes for the actor: `memory`, `resources`, `scheduling_strategy`. It waits
            most of the time: `{"num_cpus": 0}`, unless this says otherwise.
        prefetch: samples that are under way at any time, of frames as they were then.
        timeout: seconds that a call may take; None: any. Each ends when the actor does.
        **kwargs: for what makes the buffer, as they are: `batch_size`, `sampler`, `storage`, ...

    Raises:
        ImportError: Ray is not installed.
        OptionError: the cluster lacks what the actor asks for; an argument cannot be pickled, or makes no sense.
        What is raised when the buffer is made.
    """

    def __init__(
        self,
        capacity: int | None = None,
        *,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        prefetch: int = 0,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        if prefetch != 0:
            positive("prefetch", prefetch)
        if timeout is not None:
            seconds("timeout", timeout)
        if not callable(replay_buffer_cls):
            raise OptionError(f"replay_buffer_cls must be a class or a function, not {replay_buffer_cls!r}.")
        self._told = f"RayReplayBuffer({getattr(replay_buffer_cls, '__name__', replay_buffer_cls)})"
        kind = packed(replay_buffer_cls, "replay_buffer_cls")
        keywords = {name: packed(value, name) for name, value in kwargs.items()}
        make = pickle.dumps(partial(_made, kind, () if capacity is None else (capacity,), keywords))
        config = {**USUAL_CONFIG, **(remote_config or {})}
        check_config("remote_config", config)
        self._connection, service = _started(ray_init_config or {}, make, config, self._told)
        self._line: Line = service
        self._timeout = timeout
        self._prefetch = prefetch
        self._room = Room(keep=2 + prefetch)
        self._room_to_write = Room()
        self._writing = threading.Lock()
        self._sampling = threading.RLock()
        self._ahead: deque[Call] = deque()
        self._size: tuple[int, ...] = ()  # of those
        self._ending = weakref.finalize(self, _end, service, self._connection, os.getpid())
        self._facts: HostedFacts = service.call("facts", timeout=timeout)

    # --- what it is ---

    @property
    def is_ours(self) -> bool:
        """Whether what is in the actor is a `ReplayBuffer`."""
        return self._facts.is_ours

    @property
    def storage_dims(self) -> int:
        """Dimensions of its storage."""
        return self._facts.storage_dims

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take; None: any."""
        return self._timeout

    @property
    def line(self) -> Line:
        """By what the methods of the `Hosted` in the actor are called."""
        self._check_open()
        return self._line

    def __len__(self) -> int:
        """What is here: frames, of a buffer of ours."""
        return int(self._call("length"))

    def __bool__(self) -> bool:
        """True: it is there, whatever is in it."""
        return True

    @property
    def write_count(self) -> int:
        """Frames that were ever written, also those that others took the place of.

        Raises:
            AttributeError: the buffer in the actor does not count them.
        """
        try:
            return int(self._call("get", "write_count"))
        except OptionError as error:
            raise AttributeError(str(error)) from error

    def __repr__(self) -> str:
        return f"{self._told[:-1]}, {'open' if self._ending.alive else 'closed'})"

    # --- writing ---

    def extend(self, batch: TensorDictBase) -> Any:
        """Writes frames; see `ReplayBuffer.extend`. What it returns is what the buffer in the actor does."""
        return self._give("extend", batch)

    def add(self, frame: TensorDictBase) -> Any:
        """Writes one frame; see `ReplayBuffer.add`."""
        return self._give("add", frame)

    def keep(self, batch: TensorDictBase) -> None:
        """Writes a batch of a collector, `[*lead, T]`, as what is in the actor takes it."""
        self._given("keep", batch)

    def init(self, frame: TensorDictBase) -> None:
        """See `ReplayBuffer.init`."""
        self._give("init", frame)

    def empty(self) -> None:
        """Takes all frames out."""
        self._changed("empty")

    def update_priority(self, index: Any, priority: Any) -> None:
        """Says how important frames are, where the buffer in the actor has priorities.

        Args:
            index: of a sample, `[F]`.
            priority: `[F]`.

        Raises:
            OptionError: it has none.
        """
        self._call("call", "update_priority", _plain(index), _plain(priority), group="write")

    def _give(self, method: str, value: Any) -> Any:
        return self._opened(self._given("give", value, method))

    def _given(self, method: str, value: Any, *arguments: Any) -> tuple[Any, Any]:
        """The answer to a call with a value that travels as bytes."""
        self._check_open()
        with self._writing:
            flat, data = flattened(value, self._room_to_write)
            call = self._asked(method, *arguments, flat, data=data, group="write")
        return self._line.answer(call, self._timeout)

    # --- reading ---

    def sample(self, batch_size: int | None = None) -> Any:
        """Frames by chance, as the buffer in the actor gives them; see `ReplayBuffer.sample`.

        Args:
            batch_size: how many; None: as the buffer was made.

        Raises:
            What that raises.
            WorkerTimeout: it took longer than `timeout`. Nothing is lost: call again.
            BufferDied: the actor is gone.
            ClosedError: after `close`.
        """
        self._check_open()
        size = () if batch_size is None else (batch_size,)
        with self._sampling:
            if size != self._size:
                self._forget()
                self._size = size
            call = self._ahead.popleft() if self._ahead else self._asked("sample", *size, group="read")
            while len(self._ahead) < self._prefetch:
                self._ahead.append(self._asked("sample", *size, group="read"))
        try:
            answer = self._line.answer(call, self._timeout)
        except TimeoutError:
            with self._sampling:
                if size == self._size:
                    self._ahead.appendleft(call)
            raise
        except BaseException:
            self._forget()  # they are of frames that may have changed since
            raise
        with self._sampling:
            return self._opened(answer, self._room)

    def _forget(self) -> None:
        """What was made ahead is not wanted."""
        with self._sampling:
            self._ahead.clear()

    def frames(self) -> Any:
        """A copy of all frames; see `ReplayBuffer.frames`."""
        return self._opened(self._answer("call", "frames"))

    # --- saving ---

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves it to a folder of the actor's node; see `ReplayBuffer.dumps`."""
        self._call("call", "dumps", os.fspath(path))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Puts what `dumps` saved there in the place of what is here."""
        self._changed("loads", os.fspath(path))

    def state_dict(self) -> Any:
        """What is in it, as the buffer in the actor says it; see `ReplayBuffer.state_dict`."""
        return self._opened(self._answer("call", "state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts what `state_dict` gave in the place of what is here."""
        self._give("load_state_dict", state)
        self._forget()

    def _changed(self, method: str, *arguments: Any) -> None:
        self._call("call", method, *arguments, group="write")
        self._forget()

    # --- collectors ---

    def claim(self, leaves: Sequence[Leaf], lead: Sequence[int], lanes: int, writers: int) -> RemoteClaim:
        """Writers in other actors, from now on.

        Args:
            leaves: what frames hold.
            lead: the dimensions of a writer's batch before time.
            lanes: of each writer.
            writers: how many.

        Raises:
            What `ReplayBuffer.claim` raises.
        """
        number, numbers = self._call("claim", leaves, lead, lanes, writers, group="write")
        return RemoteClaim(self.line, self._told, number, numbers, timeout=self._timeout)

    # --- the actor ---

    def _asked(self, method: str, *arguments: Any, data: Array | None = None, group: Group = None) -> Call:
        if not self.is_ours:
            group = "write"  # others may not bear that two threads use them
        return self._line.ask(method, *arguments, data=data, group=group)

    def _answer(self, method: str, *arguments: Any, **how: Any) -> tuple[Any, Any]:
        self._check_open()
        return self._line.answer(self._asked(method, *arguments, **how), self._timeout)

    def _call(self, method: str, *arguments: Any, **how: Any) -> Any:
        return self._answer(method, *arguments, **how)[0]

    def _opened(self, answer: tuple[Flat | None, Array | None], room: Room | None = None) -> Any:
        """What came, in memory of the user's own."""
        flat, data = answer
        if flat is None or data is None:
            return None
        own = (room or Room(keep=0)).take(flat.nbytes)
        np.copyto(own, data[: flat.nbytes])
        return flat.opened(own)

    # --- the end ---

    def _check_open(self) -> None:
        if not self._ending.alive:
            raise ClosedError("This RayReplayBuffer was closed. Make a new one.")

    def close(self) -> None:
        """Ends the actor, with what is in it, and gives the connection back. Safe to call again."""
        self._forget()
        self._ending()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "A RayReplayBuffer belongs to the program that made it, and cannot be pickled or copied. Pass samples, or "
            "sample from it where it was made."
        )


def _made(kind: bytes, arguments: tuple[Any, ...], keywords: Mapping[str, bytes]) -> Hosted:
    """The buffer, in its actor."""
    return Hosted(unpacked(kind), arguments, {name: unpacked(value) for name, value in keywords.items()})


def _started(init: Mapping[str, Any], make: bytes, config: Mapping[str, Any], told: str) -> tuple[Connection, Service]:
    with needed("RayReplayBuffer"):
        from rlcollect.cluster.connection import Connection, check_demand
        from rlcollect.cluster.service import Service
    connection = Connection(init)
    try:
        check_demand([config])
        return connection, Service(make, config, told=told, first="facts", timeout=STARTING)
    except BaseException:
        connection.close()
        raise


def _end(service: Service, connection: Connection, owner: int) -> None:
    if os.getpid() == owner:  # else this is a copy, in a process that was forked from the program
        service.end()
        connection.close()


def _plain(value: Any) -> Any:
    """Without the memory of a whole batch that a tensor may be a view of."""
    return value.detach().cpu().clone() if hasattr(value, "detach") else value
