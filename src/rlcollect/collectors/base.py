"""What every collector can be asked between two batches, and how its state is saved."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcollect.collectors.arguments import seeds_of
from rlcollect.collectors.filling import ByWorkers
from rlcollect.collectors.gather import Made
from rlcollect.collectors.opened import Guard, in_turn
from rlcollect.collectors.replaying import replayed
from rlcollect.collectors.running import Running
from rlcollect.errors import OptionError
from rlcollect.processes.crossing import opened
from rlcollect.stats import Spread, Stats, TimeShares
from rlcollect.weights.naming import module_of, weights_of
from rlcollect.workers.answers import Report, Saved
from rlcollect.workers.commands import Load, Reset, Run, Save, Seed

__all__ = ["BaseCollector"]


class BaseCollector(Running):
    """What every kind has in common. See `Opened`, `Synchronised`, `Delivering` and `Running`."""

    @abc.abstractmethod
    def _load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Puts the policy's weights of a state back into it."""

    # --- talking to it ---

    @in_turn
    def map_fn(self, fn: Callable[[Sequence[Any]], Any]) -> list[Any]:
        """Runs a function where the environments are, between two rollouts.

        Args:
            fn: called with the list of a worker's environments, once a worker.

        Returns:
            What it returned, one a worker.

        Raises:
            What it raises; the collector stays open.
        """
        self._check_open()
        return [*map(opened, self._asked({worker: Run(fn) for worker in range(self.num_workers)}))]

    @in_turn
    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """Seeds environments, the policy's randomness and random actions. Lanes are reset with the next batch.

        Without it environments are seeded by themselves, and the other streams from torch's seed: two collectors in
        one program then draw alike, so seed at least one of them.

        Args:
            seed: an integer, of which every stream becomes an independent child; or one seed a lane, used as given:
                those of the first worker's lanes first.
            static_seed: every lane gets the same stream.

        Returns:
            A seed for whatever is seeded next: `seed + 1`; `seed` itself with `static_seed`; the largest of a list,
            plus 1.

        Raises:
            OptionError: a negative seed, or a list of another length than there are lanes.
        """
        self._check_open()
        workers, lanes = range(self.num_workers), self.num_envs
        given = seeds_of(seed, lanes * self.num_workers)
        if isinstance(given, int):
            self._asked({worker: Seed(given, static_seed) for worker in workers})
            return given if static_seed else given + 1
        for facts in self._facts:
            facts.check_seeds(given)
        if static_seed:
            raise OptionError("static_seed=True gives every lane the stream of one seed; a list has one for each.")
        self._asked({worker: Seed(given[worker * lanes : (worker + 1) * lanes]) for worker in workers})
        return max(given) + 1

    @in_turn
    def _reset_lanes(self, lanes: Mapping[int, Sequence[int]], seed: Any, options: Any) -> None:
        """Begins a new episode in these lanes, by worker."""
        count = sum(map(len, lanes.values()))
        seeds = None if seed is None else seeds_of(seed, count)
        if not (options is None or isinstance(options, Mapping)):
            raise OptionError(f"options must be a mapping or None, not {options!r}.")
        commands, first = {}, 0
        for worker, chosen in lanes.items():
            facts = self._facts[worker]
            own = seeds[first : first + len(chosen)] if isinstance(seeds, list) else seeds
            first += len(chosen)
            if isinstance(own, list) or len(chosen) == 1:
                facts.check_seeds(own if isinstance(own, list) else [own or 0])
            facts.check_reset(chosen, seeded=seeds is not None, with_options=options is not None)
            commands[worker] = Reset(tuple(chosen), own, options)
        self._recover()
        with Guard(self, spares=OptionError):
            self._asked(commands)

    @in_turn
    def stats(self) -> Stats:
        """Figures so far: frames, speed, episodes, where the time goes."""
        reports = self._reports()
        dropped = [report.dropped + (report.surplus if self._has_all else 0) for report in reports]
        return Stats(
            frames=self._frames,
            batches=self._batches,
            dropped=sum(dropped)
            + sum(self._crew.tally.dropped)
            + self._supply.dropped
            + (self._supply.waiting if self._has_all else 0),
            seconds=self._seconds,
            frames_per_second=self._frames / self._seconds if self._seconds else 0.0,
            episodes=sum(report.episodes for report in reports),
            episode_return=Spread.of([value for report in reports for value in report.returns]),
            episode_length=Spread.of([value for report in reports for value in report.lengths]),
            policy_version=self._updates.version,
            time=TimeShares.mean([report.shares() for report in reports]),
            threads=self._started.threads,
            workers=() if self._started.threads is None else self._crew.tally.workers(dropped),
            late=self._crew.tally.late() if self._gather.can_be_late else None,
        )

    def _reports(self) -> Sequence[Report]:
        """The newest of each worker."""
        return self._crew.reports

    @in_turn
    def replay(self, worker: int, lane: int, episode: int, *, max_frames: int | None = None) -> TensorDictBase:
        """Runs an episode again in this process: in an environment made anew, from its seed, by the policy as it is.

        It is the same episode frame by frame where the policy draws nothing (`exploration_type`) and has the weights
        that it had then. Nothing of the collector changes. `record=("worker", "episode")` tells which episode a frame
        is of; lanes of a batch are in order.

        Args:
            worker: of which; 0 where there is one.
            lane: which of the worker's lanes.
            episode: its number in that lane, from 0, since the last `set_seed` (they count on).
            max_frames: after which it is broken off; None: it goes on to its end, of `max_open_frames` at most.

        Returns:
            Its frames, `[1, T]`, or `[T]` where lanes are single ones; keys as in rollouts.

        Raises:
            OptionError: without `seed_per_episode=True`; a number that there is not; environments that were passed in
                as instances.
            What an environment or the policy raises, from a `WorkerError`; the collector stays open.
        """
        self._check_open()
        if not self._what.seed_per_episode:
            raise OptionError("replay() needs seed_per_episode=True: else episodes have no seeds of their own.")
        for name, value, count in (("worker", worker, self.num_workers), ("lane", lane, self.num_envs)):
            if not 0 <= value < count:
                raise OptionError(f"replay() has {name}={value}, and there are {count}.")
        if episode < 0:
            raise OptionError(f"replay() has episode={episode}; they are numbered from 0.")
        if max_frames is not None and max_frames < 1:
            raise OptionError(f"replay() has max_frames={max_frames}; it takes one at least, or None.")
        (saved,) = self._asked({worker: Save()})
        seeds = saved.state.get("env_state_dict", {}).get(str(lane), {})
        if "root" not in seeds:
            raise OptionError("replay() does not go with collector_class=: replay in that collector.")
        if episode < seeds["since"] or episode in seeds["otherwise"]:
            raise OptionError(
                f"The seed of episode {episode} of lane {lane}, worker {worker}, is not known any more: episodes are "
                f"seeded as they are since number {seeds['since']} (set_seed, or a restart), but for those that were "
                "given a seed (reset)."
            )
        source, where, how = self._started.made_of[worker]
        return replayed(
            source,
            self.policy,
            self._what,
            where,
            how if self.policy is None else replace(how, policy_factory=None),
            weights=None if self.policy is not None else saved.state.get("weights"),
            root=seeds["root"],
            lane=lane,
            lanes=self.num_envs,
            episode=episode,
            max_frames=self._sink.max_open_frames if max_frames is None else max_frames,
        )

    # --- saving ---

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: counts, ids, random states, the policy's and the environments' own states.

        The policy's weights are in it if the policy is a module or a method of one (where `policy_device` made a copy:
        those of your module); not those that a function uses. Worker processes are taken to have them: publish what was
        learned (`update_policy_weights_`) before you save, or they have it from the load on. Batches that are made and
        not delivered are in it too.

        Tensors are copies on the CPU. Environments of Gymnasium save their random generator, and what a `state_dict`
        method of theirs returns. Open episodes are saved as `resume=` says: with all that they go on from, or with
        their actions; or not, and a load begins new ones.
        """
        self._check_open()
        self._recover()
        with Guard(self):
            self._gather.pause()
        saved: list[Saved] = self._asked({worker: Save() for worker in range(self.num_workers)})
        with Guard(self):
            made = [*self._rollouts.kept, *self._gather.made([each.rollouts for each in saved])]
        states = self._state_of([dict(each.state) for each in saved])
        state = {"frames": self._frames, "iter": self._batches, "seconds": self._seconds, **states}
        if behind := self._gather.behind:
            state["batches_since_version"] = behind
        if supply := self._supply.state_dict():
            state["supply"] = supply
        if made:
            state["pending"] = [each.as_state() for each in made]
        if (weights := weights_of(self.policy)) is not None:
            state["policy_state_dict"] = weights
        copied: dict[str, Any] = _on_cpu(state)
        return copied

    def _state_of(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The workers' states in that of the collector."""
        workers = {f"worker{worker}": state for worker, state in enumerate(states)}
        return {"policy_version": self._updates.version, **workers}

    def _states_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The workers' states again."""
        workers = [key for key in state if key.startswith("worker")]
        if len(workers) != self.num_workers:
            raise OptionError(f"The state is of {len(workers)} workers, this collector has {self.num_workers}.")
        return [state[f"worker{worker}"] for worker in range(self.num_workers)]

    @in_turn
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on where `state_dict` was taken: exactly the remaining batches come.

        Where open episodes are in the state (`resume=`) they go on, and in one process and with sync workers each batch
        is, bit for bit, the one that would have come. Elsewhere new ones begin, a CUT. What was made here and not
        delivered is dropped.

        Args:
            state: what `state_dict` returned.
            strict: the policy's weights must be there, and fit exactly.

        Raises:
            OptionError: something else than a state, one of another number of lanes or workers, or without weights for
                the policy (or with weights for none); one whose undelivered batches are in a buffer, where frames are
                delivered, or the other way round.
            RuntimeError: torch's, for weights that do not fit.
            WorkerTimeout, KeyboardInterrupt, and what is raised while it is put back: the collector is then closed,
                since it is neither what it was nor what the state says.
        """
        self._check_open()
        if lacking := [key for key in ("frames", "iter", "seconds", "policy_version") if key not in state]:
            raise OptionError(f"This is no state of a collector: it lacks {lacking[0]!r}.")
        if "supply" in state and self._sink.trajs_per_batch is None:
            raise OptionError(
                "The state has episodes in it that wait to be delivered whole; it needs trajs_per_batch=."
            )
        self._check_pending(state.get("pending", ()))
        states = self._states_in(state)
        for facts, own in zip(self._facts, states, strict=True):
            facts.check_state(own)
        module = module_of(self.policy)
        if strict and ("policy_state_dict" in state) is not (module is not None):
            why = "is in the state, and the policy is no module" if module is None else "is not in the state"
            raise OptionError(f"policy_state_dict {why}. (With strict=False weights are left out.)")
        has_weights = module is not None and "policy_state_dict" in state
        if has_weights:
            self._load_weights(state["policy_state_dict"], strict=strict)
        try:
            self._put_back(state, states, has_weights=has_weights)
        except BaseException:
            self._close()
            raise

    def _check_pending(self, pending: Sequence[Mapping[str, Any]]) -> None:
        """Whether batches that were not delivered can be here: they are where they are to go to, or on their way."""
        if any((not each["batch"].keys()) is not self._counts_what_comes for each in pending):
            raise OptionError(
                "The state has batches that were not delivered, of a collector whose workers write to a buffer "
                "themselves, and this one's do not; or the other way round. Load it into one with the same "
                "replay_buffer= and post-processing, or save it in a pause()."
            )

    def _put_back(self, state: Mapping[str, Any], states: Sequence[Mapping[str, Any]], *, has_weights: bool) -> None:
        """Goes on from a state that fits."""
        self._gather.drop()
        self._crew.reports[:] = self._crew.ask({worker: Load(own) for worker, own in enumerate(states)})
        self._gather.is_under_way, self._late = False, None
        self._rollouts.kept = tuple(Made.of_state(each) for each in state.get("pending", ()))
        self._supply.load_state_dict(state.get("supply", {}))
        self._updates.load(int(state["policy_version"]), has_weights=has_weights)
        self._gather.go_on(self._updates.version, state.get("batches_since_version", 0) + len(self._rollouts.kept))
        if isinstance(self._filling, ByWorkers):
            # what was dropped is in the buffer, and not counted; so is what comes with the state
            self._filling.count_all(sum(made.frames for made in self._rollouts.kept))
        self._frames, self._batches, self._seconds = state["frames"], state["iter"], state["seconds"]

    def __repr__(self) -> str:
        workers = "" if self.num_workers == 1 else f"num_workers={self.num_workers}, "
        return (
            f"{type(self).__name__}({workers}num_envs={self.num_envs}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, collected_frames={self._frames}, policy=<{self._facts[0].policy}>, "
            f"{self._state.value})"
        )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, TensorDictBase):
        return value.detach().clone()  # made on the host
    if isinstance(value, Mapping):
        return {key: _on_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(part) for part in value)
    return value
