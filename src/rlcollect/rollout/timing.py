"""Where the time of a rollout goes, told from few sampled steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from rlcollect.interfaces import Actor, EnvDriver
from rlcollect.stats import TimeShares

__all__ = ["StepSampler"]

GAP = 128  # steps between samples, on average; a sample costs a few microseconds


class StepSampler:
    """Measures a step now and then, at random distances so that it falls in step with nothing.

    Attributes:
        countdown: steps until the next sample.
    """

    def __init__(self) -> None:
        self.countdown = 0  # the first step of all is a sample: it is also held against the spaces
        self._random = random.Random(0)
        self._sampled = 0
        self._env = self._policy = self._writing = 0.0

    def step(self, t: int, actor: Actor, driver: EnvDriver) -> None:
        """One step, as the loop makes it, with its parts measured."""
        env_before = driver.env_seconds
        start = time.perf_counter()
        outputs = actor.call(*actor.observations[t])
        called = time.perf_counter()
        actor.check(outputs)
        actions: Sequence[Any] = actor.write(t, outputs)
        driver.audit_step(t, actions)
        end = time.perf_counter()
        env = driver.env_seconds - env_before
        self._policy += called - start
        self._env += env
        self._writing += end - called - env
        self._sampled += 1
        self.countdown = self._random.randint(GAP // 2, GAP + GAP // 2)

    def shares(self, steps: int, seconds: float) -> TimeShares | None:
        """The shares of `seconds`, in which `steps` steps were made."""
        if not self._sampled or not seconds:
            return None
        parts = [part * steps / self._sampled / seconds for part in (self._env, self._policy, self._writing)]
        total = max(1.0, sum(parts))  # few samples can claim more than there was
        env, policy, writing = (part / total for part in parts)
        return TimeShares(env, policy, writing, max(0.0, 1.0 - env - policy - writing))
