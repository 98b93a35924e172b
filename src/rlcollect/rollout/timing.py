"""Where the time of a rollout goes, told from few sampled steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from rlcollect.interfaces import Actor, EnvDriver

__all__ = ["StepSampler"]

GAP = 128  # steps between samples, on average; a sample costs a few microseconds


class StepSampler:
    """Measures a step now and then, at random distances so that it falls in step with nothing.

    Attributes:
        countdown: steps until the next sample.
        sampled: steps that were measured.
        env, policy, writing: seconds of those, together.
    """

    def __init__(self) -> None:
        self.countdown = 0  # the first step of all is a sample: it is also held against the spaces
        self._random = random.Random(0)
        self.sampled = 0
        self.env = self.policy = self.writing = 0.0

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
        self.policy += called - start
        self.env += env
        self.writing += end - called - env
        self.sampled += 1
        self.countdown = self._random.randint(GAP // 2, GAP + GAP // 2)
