"""A worker that holds a collector of the user's own class, and drives it by its public methods alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcollect.envs.make import is_sequence
from rlcollect.errors import OptionError
from rlcollect.failures import relayed
from rlcollect.rollout.engine import counts_of
from rlcollect.rollout.episodes import COUNTER_BITS
from rlcollect.rollout.policy.intake import take_in
from rlcollect.rollout.seeding import lane_seed, seed_globals
from rlcollect.workers.answers import Collected, Facts, Report, Saved
from rlcollect.workers.commands import (
    AttachSlots,
    Build,
    Close,
    Collect,
    Command,
    Execute,
    Load,
    Reset,
    Run,
    Save,
    Seed,
    Take,
)
from rlcollect.workers.executing import executed
from rlcollect.workers.interruptor import Stops
from rlcollect.workers.keeping import Keeping
from rlcollect.workers.taking import Taking

__all__ = ["HostedWorker"]

HOLDER_BITS = 52  # of an id below the worker's number, where what it holds has workers, whose numbers are in its ids
REMEMBERED = 100  # versions that frames of a rollout may still have
NEEDED = ("rollout", "reset", "set_seed", "state_dict", "load_state_dict", "update_policy_weights_", "shutdown")


class HostedWorker:
    """Does what it is asked by way of a collector; see `messages`. Its batches cross as they are.

    Ids of episodes get the worker's number in front, and versions are those of the pool: the collector counts its own.

    Attributes:
        taking: takes the policy's weights.
        facts: what it says of itself.

    Args:
        build: what to make.
        enter: told what is being done.
        beat: see `Worker`.
        is_alone: whether the process is this worker's own.
        stops, keeping: nothing is asked of them.
    """

    def __init__(
        self,
        build: Build,
        enter: Callable[[str], None],
        *,
        beat: Callable[[int], None] | None = None,  # noqa: ARG002 - its collector gives no sign of life
        is_alone: bool = False,
        stops: Stops | None = None,  # noqa: ARG002 - it is not to be stopped
        keeping: Keeping | None = None,  # noqa: ARG002 - nothing of a rollout stands before it is whole
    ) -> None:
        if is_alone:
            seed_globals(build.seed, build.worker)
        self._worker = build.worker
        self._enter = enter
        self._hooks = build.how.pre_collect_hook, build.how.post_collect_hook
        self._version = 0
        self._versions = {0: 0}  # of the pool, by the collector's own
        self._is_alone = is_alone
        self._steps = 0
        self._seconds = 0.0
        self._rollouts = 0
        enter("building the policy")
        acting = take_in(build.policy, build.how, build.where.placement.policy, worker=build.worker)
        self.taking = Taking(acting, build.receiver)
        enter("building its environments")
        frames = -(-build.what.frames_per_batch // build.share)
        options = dict(build.hosted or {})
        self._collector = build.kind(
            build.create_env_fn, acting.policy, frames_per_batch=frames, total_frames=-1, **options
        )
        if lacking := [name for name in NEEDED if not callable(getattr(self._collector, name, None))]:
            raise OptionError(f"collector_class={build.kind!r} lacks the method {lacking[0]!r}.")
        lead = self._lead(build)
        self._id_bits = COUNTER_BITS if getattr(self._collector, "num_workers", 1) == 1 else HOLDER_BITS
        if hasattr(self._collector, "worker_idx"):
            self._collector.worker_idx = build.worker
        self.facts = Facts(
            num_lanes=math.prod(lead),
            lead=lead,
            leaves=None,
            action_space=None,
            may_deliver_short=True,
            refuses_lane_resets=None,
            refuses_lane_seeds=None,
            refuses_options=None,
            largest_seed=None,
            state_keys=("collector", "steps", "policy_version"),
            env_state_keys=(),
            policy=f"held by a {type(self._collector).__name__}",
            policy_device=str(acting.device),
            forms=self.taking.forms,
            processes=0,
        )
        self._handlers: dict[type[Command], Callable[[Any], Any]] = {
            Collect: self._collect,
            Seed: self._seed,
            Reset: self._reset,
            Save: self._save,
            Load: self._load,
            Run: self._run,
            Execute: self._execute,
            Take: self._take,
            Close: self._close,
        }

    def _lead(self, build: Build) -> tuple[int, ...]:
        """The dimensions of its batches before time."""
        if (told := getattr(self._collector, "batch_lead", None)) is not None:
            return tuple(told)
        lanes = int(getattr(self._collector, "num_envs", 1))
        is_batched = build.where.num_envs is not None or is_sequence(build.create_env_fn)
        return (lanes,) if lanes > 1 or is_batched else ()

    def handle(self, command: Command) -> Any:
        """Does it; the answer."""
        if type(command) not in self._handlers:
            raise OptionError(f"{command.title} does not go with collector_class=.")
        return self._handlers[type(command)](command)

    def attach_slots(self, command: AttachSlots, buffer: Any) -> None:
        """Nothing: batches cross as they are."""

    def _collect(self, command: Collect) -> Collected:
        self._take()
        before, after = self._hooks
        self._enter("collecting")
        start = time.perf_counter()
        try:
            if before is not None:
                before()
            batch = self._collector.rollout()
            if after is not None:
                after(batch)
        except BaseException as error:
            raise relayed(  # noqa: B904 - it has a cause of its own
                error, worker=self._worker, lane=None, step=self._steps
            )
        self._seconds += time.perf_counter() - start
        self._rollouts += 1
        made = self._marked(batch[..., : command.steps].clone())
        self._steps += int(made.batch_size[-1])
        report = Report(steps=self._steps, seconds=self._seconds)
        steps = int(made.batch_size[-1])
        mask = made.get(("collector", "mask"), None)
        frames = made.numel() if mask is None else int(mask.sum())
        numbers = self._rollouts, self._version, _versions_of(made)
        return Collected(steps, steps, frames, made, report, *numbers, time.monotonic_ns())

    def _take(self, command: Take | None = None) -> int:  # noqa: ARG002
        self._enter("taking new weights")
        if (version := self.taking.take()) is not None:
            self._versions[self._collector.update_policy_weights_()] = self._version = version
            self._versions = dict(list(self._versions.items())[-REMEMBERED:])
        return self._version

    def _marked(self, batch: TensorDictBase) -> TensorDictBase:
        marks: Mapping[str, Any] = {
            "traj_ids": lambda ids: torch.where(ids < 0, ids, ids + (self._worker << self._id_bits)),
            "policy_version": self._of_the_pool,
            "worker": lambda workers: torch.full_like(workers, self._worker),
        }
        for name, change in marks.items():
            if (marked := batch.get(("collector", name), None)) is not None:
                batch.set(("collector", name), change(marked))
        return batch

    def _of_the_pool(self, versions: torch.Tensor) -> torch.Tensor:
        for own in sorted({*versions.flatten().tolist()}):
            if own >= 0:
                of_pool = self._versions.get(own, self._version)
                versions = torch.where(versions == own, -2 - of_pool, versions)  # not to be found again
        return torch.where(versions < -1, -2 - versions, versions)

    def _seed(self, command: Seed) -> None:
        seed = command.seed
        if self._is_alone:
            seed_globals(seed, self._worker)
        own = lane_seed(seed, 0 if command.static else self._worker, 0) if isinstance(seed, int) else list(seed)
        self._collector.set_seed(own, **({"static_seed": True} if command.static else {}))

    def _reset(self, command: Reset) -> None:
        self._enter("resetting environments")
        given = {"seed": command.seeds, "options": command.options}
        are_all = command.lanes is None or len(command.lanes) == self.facts.num_lanes
        index = [] if command.lanes is None or are_all else [list(command.lanes)]
        self._collector.reset(*index, **{name: value for name, value in given.items() if value is not None})

    def _save(self, command: Save) -> Saved:  # noqa: ARG002
        self._enter("saving or loading a state")
        own = self._collector.state_dict()
        state = {"collector": own, "steps": self._steps, "policy_version": self._version, "versions": self._versions}
        return Saved(state, self._rollouts)

    def _load(self, command: Load) -> Report:
        self._take()
        self._enter("saving or loading a state")
        self._collector.load_state_dict(command.state["collector"])
        self._steps, self._version = command.state["steps"], command.state["policy_version"]
        self._versions = dict(command.state.get("versions", {}))
        return Report(steps=self._steps, seconds=self._seconds)

    def _run(self, command: Run) -> Any:
        self._enter("running a function")
        return self._collector.map_fn(command.fn)[0]

    def _execute(self, command: Execute) -> Any:
        self._enter("running a function")
        return executed(self._collector, command.path, command.args, command.kwargs)

    def _close(self, command: Close) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> list[BaseException]:
        """Shuts the collector down."""
        self._enter("closing its environments")
        self._collector.shutdown()
        return []


def _versions_of(batch: TensorDictBase) -> tuple[tuple[int, int], ...]:
    """How many frames of a batch each version made, as far as it tells."""
    versions, mask = batch.get(("collector", "policy_version"), None), batch.get(("collector", "mask"), None)
    if versions is None:
        return ()
    return counts_of((versions if mask is None else versions[mask]).cpu().numpy())
