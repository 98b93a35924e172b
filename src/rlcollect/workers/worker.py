"""A worker: environments, a policy and an engine behind `handle(command)`. Knows no process.

The same class works in the program's own process and in others; what moves its commands and answers is elsewhere.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rlcollect.envs.saving import as_plain, as_was
from rlcollect.errors import OptionError
from rlcollect.failures import is_interrupt, relayed, warn
from rlcollect.memory.shared import MemberSource
from rlcollect.memory.slots import Slot
from rlcollect.options import Sink
from rlcollect.rollout.build import build_engine, make_driver, plan_again
from rlcollect.rollout.engine import STATE_KEYS, shares_of
from rlcollect.rollout.parts import Parts, Whole
from rlcollect.rollout.policy.intake import take_in
from rlcollect.rollout.policy.stated import generators_of
from rlcollect.rollout.seeding import globals_state, seed_globals, set_globals_state
from rlcollect.weights.handed import Handed
from rlcollect.weights.held import held_modules
from rlcollect.weights.naming import module_of, weights_of
from rlcollect.workers.answers import Collected, Facts, Report, Saved
from rlcollect.workers.breaking import Checking, InGlances
from rlcollect.workers.commands import (
    Abandon,
    AttachSlots,
    Build,
    Close,
    Collect,
    Command,
    Load,
    Reset,
    Run,
    Save,
    Seed,
    Take,
)
from rlcollect.workers.filling import Filling, Put
from rlcollect.workers.interruptor import Stops
from rlcollect.workers.keeping import Keeping
from rlcollect.workers.models import ENV, HOOKS, find_models
from rlcollect.workers.taking import Taking

__all__ = ["STAGES", "Worker"]

STAGES = (
    "starting its process",
    "importing what it was sent",
    "building the policy",
    "building its environments",
    "resetting its environments for the first time",
    "planning the policy",
    "waiting for a command",
    "taking new weights",
    "collecting",
    "running a hook",
    "resetting environments",
    "saving or loading a state",
    "running a function",
    "closing its environments",
)


class Worker:
    """Does what it is asked; see `messages`.

    Attributes:
        acting: the policy.
        taking: takes its weights.
        engine: makes the rollouts.
        driver: steps the environments.
        facts: what it says of itself.
        keeping: says what stands if the worker dies; None: nobody asks.
        is_apart: whether it makes rollouts beside other threads.

    Args:
        build: what to make.
        enter: told what is being done, in the words of `STAGES`.
        beat: told now and then how many steps were made.
        is_alone: whether the process is this worker's own, and so are its random generators.
        stops: says when to end a rollout early; None: the user's `interruptor` does, if there is one.
        keeping: says what stands if the worker dies; None: nobody asks.
    """

    def __init__(
        self,
        build: Build,
        enter: Callable[[str], None],
        *,
        beat: Callable[[int], None] | None = None,
        is_alone: bool = False,
        stops: Stops | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self._build = build
        self._enter = enter
        self._is_alone = is_alone
        if is_alone:
            seed_globals(build.seed, build.worker, build.generation)
        enter("building the policy")
        self.acting = take_in(build.policy, build.how, build.where.placement.policy, worker=build.worker)
        self.taking = Taking(self.acting, build.receiver)
        enter("building its environments")
        self.driver = make_driver(
            build.create_env_fn,
            build.what,
            build.where,
            worker=build.worker,
            seed=build.seed,
            generation=build.generation,
            before_reset=self._before_reset,
        )
        try:
            self.taking.look_after({path: self.find(path) for path in build.models})
            enter("planning the policy")
            what = self._own_share()
            lanes = self.driver.num_lanes * build.share
            self.steps = -(-what.frames_per_batch // lanes)
            sink = Sink(return_same_td=build.same, use_buffers=build.reuse)
            self.engine, self.plan = build_engine(
                self.driver,
                self.acting,
                what,
                build.where,
                build.how,
                sink,
                steps=self.steps,
                worker=build.worker,
                prefix=build.worker if build.prefix is None else build.prefix,
                generation=build.generation,
                seed=build.seed,
            )
            self._begin(beat, stops, keeping)
        except BaseException:
            self.driver.close()
            raise

    def _begin(self, beat: Callable[[int], None] | None, stops: Stops | None, keeping: Keeping | None) -> None:
        """What the engine is given beside what it is made of; and what is known of it all."""
        build = self._build
        self.engine.beat = beat or self.engine.beat
        if build.weights is not None:
            self.acting.load(build.weights, strict=False)
        self.engine.policy_version = build.version
        self.engine.episodes.skip(build.skipped)
        if build.by_step:
            self.engine.newer = self.taking.take
        if build.warmup is not None:
            self.engine.warmup_left = np.array(build.warmup, np.int64)
        if build.numbers is not None:
            self.engine.episodes.numbers[:] = build.numbers
            self.driver.number_episodes({lane: number + 1 for lane, number in enumerate(build.numbers)})
        self._stops = stops
        if stops is not None and (build.can_stop or build.keeps):  # a question after each step is a sign of life
            self.engine.interruptor = stops
        self.keeping = keeping if build.keeps else None
        self.facts = self._facts()
        self._seconds = 0.0
        self._rollouts = 0
        self._owed = 0, self.engine.warmup_owed  # before the rollout of this number
        self._slots: MemberSource | None = None
        self._copies_to_slots = False
        self._filling: Filling | None = None
        self.is_apart = False
        self._handlers: dict[type[Command], Callable[[Any], Any]] = {
            Collect: self._collect,
            Abandon: self._abandon,
            Seed: self._seed,
            Reset: self._reset,
            Save: self._save,
            Load: self._load,
            Run: self._run,
            Take: self._take,
            Close: self._close,
        }

    def find(self, path: str) -> list[nn.Module]:
        """The modules of a model that is not the policy; see `find_models`."""
        how = self._build.how
        hooks = {name: [getattr(how, name)] for name in HOOKS}
        return find_models(path, {ENV: self.driver.envs, **hooks})

    def _before_reset(self) -> None:
        self._enter("resetting its environments for the first time")

    def _own_share(self) -> Any:
        """`What` with this worker's part of the random frames: lanes of all workers share them evenly."""
        what, build = self._build.what, self._build
        if what.init_random_frames is None or build.workers == 1:
            return what
        lanes = self.driver.num_lanes
        shares = shares_of(what.init_random_frames, lanes * build.workers)
        return replace(what, init_random_frames=int(shares[build.worker * lanes : (build.worker + 1) * lanes].sum()))

    def _facts(self) -> Facts:
        driver = self.driver
        by_value = bool(driver.loose) or not self._build.reuse
        text = "random actions" if self.plan is None else f"{self.plan.path} path: {self.plan.reason}"
        return Facts(
            num_lanes=driver.num_lanes,
            lead=tuple(driver.lead),
            leaves=None if by_value else self.engine.leaves,
            action_space=driver.action_codec.space,
            may_deliver_short=self.engine.may_deliver_short,
            refuses_lane_resets=driver.refuses_lane_resets,
            refuses_lane_seeds=driver.refuses_lane_seeds,
            refuses_options=driver.refuses_options,
            largest_seed=driver.largest_seed,
            state_keys=STATE_KEYS,
            env_state_keys=tuple(driver.state_dict()),
            policy=text,
            policy_device=str(self.acting.device),
            forms=self.taking.forms,
            processes=len(multiprocessing.active_children()) if self._is_alone else 0,
            warmup=tuple(self.engine.warmup_owed.tolist()),
        )

    def handle(self, command: Command) -> Any:
        """Does it; the answer."""
        return self._handlers[type(command)](command)

    def attach_slots(self, command: AttachSlots, buffer: Any) -> None:
        """Rollouts go to shared memory from now on: are made there, or copied there by the engine or here."""
        self._slots = MemberSource(command.plan, buffer, command.member)
        self._copies_to_slots = not self.engine.deliver_to(self._slots)
        if self.keeping is not None and not self._copies_to_slots:
            self._make_by(self.keeping)

    def attach_buffer(self, put: Put, *, by_step: bool) -> None:
        """Frames go to a buffer from now on, and to nobody else."""
        parts = self.keeping or Whole()
        self._filling = Filling(put, parts, lanes=self.driver.num_lanes, by_step=by_step)
        if not self.engine.may_deliver_short:
            self._make_by(self._filling)

    def _make_by(self, parts: Parts) -> None:
        """Rollouts are made in these parts."""
        self.engine.parts = parts
        if self.keeping is not None and not (self._build.can_stop or self.engine.may_deliver_short):
            self.engine.interruptor = None  # each part is a sign of life

    def go_apart(self, models: Sequence[str], check: Callable[[], None]) -> Handed:
        """Makes rollouts beside other threads from now on: with a copy of the policy, which weights are handed to.

        Args:
            models: paths of what takes weights beside the policy.
            check: called now and then while a rollout is made; raises what it is to be broken off by.

        Raises:
            OptionError: the policy may look at what threads share, or uses modules that cannot be copied.
            PolicyError: it cannot be copied.
        """
        build, acting, handed = self._build, self.acting, Handed()
        actor = None
        if self.plan is not None:
            if self.plan.looks_around or (module_of(acting.given) is None and held_modules(acting.given)):
                raise OptionError(
                    "This policy cannot act in a thread beside the program's own: "
                    f"{'it is called with a TensorDict, or looks at the exploration type' * self.plan.looks_around}"
                    f"{'it is a function that uses modules' * (not self.plan.looks_around)}. Use an AsyncCollector, "
                    "whose start() is another process."
                )
            acting.go_apart()
            self.plan, actor = plan_again(acting, self.driver, build.what, build.where, build.how, build.worker)
        self.engine.go_apart(actor)
        self.taking = Taking(acting, handed)
        self.taking.look_after({path: self.find(path) for path in models})
        if self.engine.may_deliver_short:
            self.engine.interruptor = Checking(check, self.engine.interruptor)
        else:
            self.engine.parts = InGlances(check, self.engine.parts)
        self.is_apart = True
        return handed

    # --- commands ---

    def _collect(self, command: Collect) -> Collected:
        build, engine = self._build, self.engine
        self._owed = command.number, engine.warmup_owed
        self._take()
        if build.how.pre_collect_hook is not None:
            self._hook(build.how.pre_collect_hook)
        if self._slots is not None:
            self._slots.choose(command.group)
        if self._stops is not None:
            self._stops.command = command.number
        if self.keeping is not None:
            self.keeping.begin(command.number, command.start)
        self._enter("collecting")
        start = time.perf_counter()
        batch = self._made(command)
        self._seconds += time.perf_counter() - start
        self._rollouts += 1
        if build.how.post_collect_hook is not None:
            self._hook(build.how.post_collect_hook, batch.copy() if self._slots is not None else batch)
        made = int(batch.batch_size[-1])
        kept, room = (batch, made) if self._slots is None else (None, self._slots.taken)
        frames, versions, found = engine.frames, engine.versions, 0
        if self._filling is not None:
            kept = None
            if (steps := self._filling.before) > 0:  # of those nothing else is known here
                before = steps * self.driver.num_lanes
                frames, versions = frames + before, (*versions, (engine.policy_version, before))
                made += steps
                found = steps - command.start
        numbers = self._rollouts, engine.policy_version, versions
        return Collected(made, room, frames, kept, self.report(), *numbers, time.monotonic_ns(), found)

    def _made(self, command: Collect) -> TensorDictBase:
        """A rollout, which stands where it is to."""
        engine, filling = self.engine, self._filling
        if filling is not None:
            return self._filled(command, filling)
        batch = engine.rollout(command.steps, command.at_most, command.start)
        if self._slots is not None and self._copies_to_slots:
            _copy_to(self._slots.take(command.steps), batch)
        return batch

    def _filled(self, command: Collect, filling: Filling) -> TensorDictBase:
        """What is left of a rollout: what a worker that died has made of it is in the buffer, and not here."""
        start, most = filling.begin(command.number, in_parts=not self.engine.may_deliver_short), command.at_most
        if start > command.start:
            self.engine.warmup_left = np.maximum(self.engine.warmup_left - (start - command.start), 0)
        batch = self.engine.rollout(
            command.steps - start, None if most is None else most - start * self.driver.num_lanes
        )
        if self.engine.may_deliver_short:
            filling.put.batch(batch)
        filling.put.finish()
        return batch

    def _take(self, command: Take | None = None) -> int:  # noqa: ARG002
        self._enter("taking new weights")
        if (version := self.taking.take()) is not None:
            self.engine.policy_version = version
        return self.engine.policy_version

    def _hook(self, hook: Callable[..., Any], *arguments: Any) -> None:
        self._enter("running a hook")
        try:
            hook(*arguments)
        except BaseException as error:
            self.engine.abandon()
            raise relayed(  # noqa: B904 - it has a cause of its own
                error, worker=self._build.worker, lane=None, step=self.engine.steps
            )

    def _abandon(self, command: Abandon) -> None:
        number, owed = self._owed
        self.engine.abandon(owed if number == command.number else None)

    def _seed(self, command: Seed) -> None:
        if self._is_alone:
            seed_globals(command.seed, self._build.worker, command.generation)
        seed = command.seed if isinstance(command.seed, int) else list(command.seed)
        self.engine.seed(seed, static=command.static, generation=command.generation)

    def _reset(self, command: Reset) -> None:
        self._enter("resetting environments")
        lanes = range(self.driver.num_lanes) if command.lanes is None else command.lanes
        seeds = command.seeds
        self.engine.reset(lanes, seeds if seeds is None or isinstance(seeds, int) else list(seeds), command.options)

    def _save(self, command: Save) -> Saved:  # noqa: ARG002
        self._take()  # as the next rollout would: the state is what that begins with
        self._enter("saving or loading a state")
        state = self.engine.state_dict()
        if self._is_alone:
            state["globals"] = as_plain(globals_state())
        if generators := generators_of(self.acting.policy):
            state["generators"] = [generator.get_state() for generator in generators]
        if self._is_alone and (weights := self._own_weights()):
            state["weights"] = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        return Saved(state, self._rollouts)

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """What nobody else has: buffers that the policy itself changes; all, if a factory made it here."""
        weights = weights_of(self.acting.policy) or {}
        if self._build.how.policy_factory is not None:
            return weights
        return {name: tensor for name, tensor in weights.items() if name in self.acting.own}

    def _load(self, command: Load) -> Report:
        self._take()  # of other models; what is of the state comes afterwards
        self._enter("saving or loading a state")
        self.engine.load_state_dict(command.state)
        if self._is_alone and "globals" in command.state:
            set_globals_state(as_was(command.state["globals"]))
        for generator, own in zip(generators_of(self.acting.policy), command.state.get("generators", ()), strict=False):
            generator.set_state(own)
        if "weights" in command.state:
            self.acting.load(command.state["weights"], strict=False)
        return self.report()

    def _close(self, command: Close) -> None:  # noqa: ARG002
        self.close()

    def _run(self, command: Run) -> Any:
        self._enter("running a function")
        return command.fn(list(self.driver.envs))

    def report(self) -> Report:
        """How it is doing."""
        engine, sampler = self.engine, self.engine.sampler
        return Report(
            episodes=engine.episodes.finished,
            returns=tuple(engine.episodes.returns),
            lengths=tuple(engine.episodes.lengths),
            dropped=engine.dropped,
            surplus=engine.surplus,
            steps=engine.steps,
            seconds=self._seconds,
            sampled=sampler.sampled,
            env=sampler.env,
            policy=sampler.policy,
            writing=sampler.writing,
            warmup=tuple(engine.warmup_owed.tolist()),
            numbers=tuple(engine.episodes.numbers.tolist()),
        )

    def close(self) -> list[BaseException]:
        """Closes the environments that were made here; the errors that came."""
        self._enter("closing its environments")
        self.engine.forget_memory()
        errors = self.driver.close()
        for error in errors:
            if not is_interrupt(error):
                warn(f"An environment failed to close: {type(error).__name__}: {error}")
        return errors


def _copy_to(slot: Slot, batch: TensorDictBase) -> None:
    """What was made elsewhere, into shared memory."""
    made = int(batch.batch_size[-1])
    shared: Mapping[Any, torch.Tensor] = dict(slot.batch(made).items(include_nested=True, leaves_only=True))
    for key, tensor in shared.items():
        tensor.copy_(batch.get(key))
