"""Remotes that come later: made like those that were there, with the newest weights, and known to all that count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlcollect.collectors.alike import check_like
from rlcollect.collectors.apart import START_HINT, Apart
from rlcollect.collectors.opened import in_turn
from rlcollect.collectors.sent import check_maker, sent_to
from rlcollect.envs.make import is_sequence
from rlcollect.errors import OptionError, WorkerDied
from rlcollect.options import How, Remotes, Where
from rlcollect.options.where import DEVICES
from rlcollect.processes.channel import Held
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Build, Seed
from rlcollect.workers.lasting import LastingPool
from rlcollect.workers.models import POLICY
from rlcollect.workers.process import packed_builds

__all__ = ["Growing"]

RANDOM = "init_random_frames"


class Growing(Apart):
    """A collector whose workers are actors, and may become more."""

    _actors: Any = None  # an `ActorPool`
    _check_room: Callable[[Sequence[Mapping[str, Any]]], None]  # raises where a cluster has less

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._seed: Seed | None = None  # of which those that are added get children
        self._own_kwargs: list[dict[str, Any]] = []  # of each, once there are more than at the beginning
        super().__init__(create_env_fn, policy, **options)

    @property
    def _remotes(self) -> Remotes:
        remotes: Remotes = self._options[Remotes]
        return remotes

    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """See `BaseCollector`. Remotes that are added later get children of the same seed; not where it is a list."""
        following = super().set_seed(seed, static_seed)
        self._seed = None if isinstance(seed, Sequence) else Seed(int(seed), static_seed)
        return following

    @in_turn
    def add_collectors(
        self,
        create_env_fn: Any,
        *,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Adds remotes, with the numbers that follow. They have the policy, and the newest weights that all were sent.

        Args:
            create_env_fn: a maker, or a sequence of one a remote.
            remote_configs: as the option, for these; None: a single mapping of the option holds for them too.
            collector_kwargs: the same.

        Raises:
            OptionError: with `sync=True`, whose batches are of so many remotes; with `trajs_per_batch` or a
                `replay_buffer`, which know all lanes from the beginning; or more is asked for than the cluster has.
            SpaceError, PolicyError: they are not like the others.
            What is raised while environments are made. Those that were there go on.
        """
        self._check_open()
        self._check_growth()
        sources = list(create_env_fn) if is_sequence(create_env_fn) else [create_env_fn]
        first = self.num_workers
        added = replace(
            self._remotes,
            remote_configs=_for_more(self._remotes.remote_configs, remote_configs),
            collector_kwargs=_for_more(self._remotes.collector_kwargs, collector_kwargs),
        )
        configs = added.configs(len(sources), first)
        self._check_room([*self._actors.configs, *configs])
        plain = self._more_builds(sources, added, first)
        builds = packed_builds(plain)
        try:
            self._actors.add(configs)
            numbered = dict(enumerate(builds, first))
            facts = self._crew.ask(numbered, timeout=self._workers.start_timeout, hint=START_HINT)
            self._prepare(facts, first)
            made_of = [(build.create_env_fn, build.where, build.how) for build in plain]
            self._take_in(facts, builds, made_of)
        except BaseException as error:
            self._break_off(error, first)
            raise
        if POLICY in self._schemes.moving and self.policy is not None and not self._updates.of_all:
            # theirs is the policy as it is now, and not what the others began with
            alone = None if self._gather.refuses_worker_ids else list(range(first, self.num_workers))
            self.update_policy_weights_(worker_ids=alone)

    def _break_off(self, error: BaseException, first: int) -> None:
        """What was begun is as if it had never been, unless it was done when a Ctrl-C came."""
        if self.num_workers == first:
            self._actors.drop(first)
            self._own_kwargs = self._own_kwargs[:first]
            for worker in [worker for worker in self._attachments if worker >= first]:
                del self._attachments[worker]
        died = isinstance(error, WorkerDied) and error.worker < first
        if died or self._crew.pool.is_spent or self._crew.has_failed:
            self._close()

    def _check_growth(self) -> None:
        for name, holds in (
            ("sync=True", self._remotes.sync),
            ("trajs_per_batch=", self._sink.trajs_per_batch is not None),
            ("replay_buffer=", self._sink.replay_buffer is not None),
            ("a list of policy_factory=", isinstance(self._how.policy_factory, list | tuple)),
        ):
            if holds:
                raise OptionError(
                    f"add_collectors() does not go with {name}: how many remotes there are is settled at the "
                    "beginning. Make another collector."
                )

    def _more_builds(self, sources: Sequence[Any], added: Remotes, first: int) -> list[Build]:
        """What remotes that come later are made from: they owe no random frames, and have prefixes of their own."""
        count = first + len(sources)
        prefix = self._prefixes.take(len(sources))
        before = self._own_kwargs or [self._remotes.kwargs_of(worker, first) for worker in range(first)]
        self._own_kwargs = [*before[:first], *[added.kwargs_of(place, len(sources)) for place in range(len(sources))]]
        same: dict[str, Any] = dict.fromkeys(DEVICES)
        where = replace(self._where, **same) if self._where.is_split else self._where
        policy = sent_to(self.policy, where.placement.policy)
        builds = []
        for place, source in enumerate(sources):
            check_maker(first + place, source)
            build = self._build(source, policy, where, first + place, count)
            held = build.hosted and {name: each for name, each in build.hosted.items() if name != RANDOM}
            what = replace(build.what, init_random_frames=None)
            builds.append(replace(build, what=what, prefix=prefix + place, hosted=held))
        return builds

    def _prepare(self, facts: Sequence[Facts], first: int) -> None:
        """They are told what the others were told at the start."""
        for worker, each in enumerate(facts, first):
            check_like(self._facts[0], worker, each)
            self._posting.check_like(worker, each)
            for command, attached in self._attachments.get(0, ()):
                self._attach(self._crew, worker, command, *attached)
            if self._seed is not None:
                self._crew.ask({worker: self._seed}, timeout=self._workers.start_timeout, hint=START_HINT)

    def _take_in(
        self, facts: Sequence[Facts], builds: Sequence[Build], made_of: Sequence[tuple[Any, Where, How]]
    ) -> None:
        """They are there: all that counts workers counts them too."""
        pool, first = self._crew.pool, self.num_workers
        assert isinstance(pool, LastingPool)
        with Held():
            if self._revival is not None:
                self._revival.add(builds)
                for worker in range(first, first + len(facts)) if self._seed is not None else ():
                    self._revival.note(worker, self._seed)
            pool.add(facts)
            self._crew.add(len(facts))
            devices = [torch.device(each.policy_device) for each in facts]
            self._updates.add(devices, functools.partial(self._posting.add, facts))
            self._started.facts.extend(facts)
            self._started.devices.extend([self._started.devices[0]] * len(facts))
            self._started.made_of.extend(made_of)
            assert self._started.threads is not None
            threads = replace(self._started.threads, workers=self._threads(self._facts).workers)
            self._started = replace(self._started, threads=threads)


def _for_more(option: Any, given: Any) -> Any:
    """What holds for remotes that come later: what is given for them, or what holds for all."""
    if given is not None:
        return given
    return option if isinstance(option, Mapping) else None
