"""Lanes against single environments: each lane gives what its environment gives alone, from the same seed.

This sees what no look at a vector environment by itself can: final observations that are not final, resets that
happen twice or not at all, lanes that share something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcollect.testing._contract.autoreset import FINAL, MODE, final_of
from rlcollect.testing._contract.report import Finding
from rlcollect.testing._contract.session import Answer, LanesSession, rows_of
from rlcollect.testing._contract.subject import Subject, guarded
from rlcollect.testing._contract.values import Fingerprint, as_array, as_stored, difference, fingerprint

__all__ = ["LANES", "MASKED", "against_singles", "alike", "makers_of"]

Env: TypeAlias = gym.Env[Any, Any]
Lanes: TypeAlias = VectorEnv[Any, Any, Any]
LANES: Final = "lanes"
MASKED: Final = "masked resets"

_REMEDY: Final = {
    LANES: "Keep nothing that environments share (class attributes, module globals), and give each lane its own seed.",
    MODE: "Reset where the declared mode says so, and nowhere else.",
    FINAL: "Copy the final observation before the environment is reset: it may reuse its arrays.",
    MASKED: "Reset the lanes of the mask once, at once, and no others; do not pass masked_reset=True meanwhile.",
}


def makers_of(env: Lanes) -> Sequence[Any]:
    """What makes the environment of each lane alone; empty where that is not known."""
    makers = getattr(env, "env_fns", None)
    known = env is env.unwrapped and isinstance(makers, Sequence) and len(makers) == getattr(env, "num_envs", None)
    return makers if known and makers is not None and all(map(callable, makers)) else ()


def against_singles(subject: Subject, mode: AutoresetMode, steps: int, *, by_mask: bool = False) -> Iterator[Finding]:
    """Steps both side by side, as far as they agree.

    Args:
        subject: under check; its runs repeat.
        mode: as declared.
        steps: how many.
        by_mask: reset ended lanes by mask, whatever the mode; nothing is told then if they agree.
    """
    with subject.opened() as env, ExitStack() as stack:
        makers = makers_of(env)
        if not makers:
            yield Finding(LANES, "skipped", f"{type(env).__name__} has no single environments to compare with")
            return
        singles: list[Env] = []
        for make in makers:
            singles.append(guarded(LANES, "while an environment was made alone", make))
            stack.callback(guarded, "close", "in close() of an environment made alone", singles[-1].close)
        comparison = _Comparison(env, mode, singles, subject.seed, by_mask=by_mask)
        session = LanesSession(subject, env, mode, by_mask=by_mask)
        for answer in session.run(steps, subject.seed):
            if (finding := comparison.see(answer)) is not None:
                yield finding
                return
    if not by_mask:
        yield Finding(LANES, "ok", f"all {len(singles)} give what their environments give alone, for {steps:,} steps")


def alike(subject: Subject, mode: AutoresetMode) -> Iterator[Finding]:
    """Tells where one seed begins the same episode in every lane, though another seed begins another."""
    begun = []
    for seed in (subject.seed, subject.seed + 1):
        with subject.opened() as env:
            reset = LanesSession(subject, env, mode).reset(seed=seed)
            rows = rows_of(env.observation_space, env.num_envs, reset.observation)
            begun.append([fingerprint(row, "") for row in rows])
    first, other = begun
    if len(first) > 1 and first != other and all(row == first[0] for row in first):
        yield Finding(
            LANES,
            "warning",
            "one seed begins the same episode in every lane",
            "Seed lane i with seed + i, or let all lanes draw from one stream.",
        )


class _Comparison:
    """The single environments, one step behind their lanes.

    Args:
        env: whose spaces count.
        mode: of autoreset.
        singles: one a lane.
        seed: that the lanes were reset with.
        by_mask: as for `against_singles`.
    """

    def __init__(self, env: Lanes, mode: AutoresetMode, singles: Sequence[Env], seed: int, *, by_mask: bool) -> None:
        self._space, self._batch_space = env.single_observation_space, env.observation_space
        self._mode = mode
        self._singles = singles
        self._seed = seed
        self._masked = by_mask or mode is AutoresetMode.DISABLED
        self._level = "broken" if not by_mask or mode is AutoresetMode.DISABLED else "warning"
        self._age = np.zeros(len(singles), np.int64)  # frames of the episode

    def see(self, answer: Answer) -> Finding | None:
        """Does the same in every single environment; the first difference."""
        rows = rows_of(self._batch_space, len(self._singles), answer.observation)
        for lane, row in enumerate(rows):
            if not (answer.is_step or answer.begun[lane]):
                continue
            follow = self._stepped if answer.is_step and not answer.begun[lane] else self._begun
            if (told := follow(answer, lane, self._bits(row))) is not None:
                name, what = told
                return Finding(
                    name,
                    "warning" if name == MASKED and self._level == "warning" else "broken",
                    f"{answer.where}: {what} of lane {lane} is not what its environment gives alone",
                    _REMEDY[name],
                )
        return None

    def _begun(self, answer: Answer, lane: int, row: Fingerprint) -> tuple[str, str] | None:
        """The lane was reset: by `reset`, by mask, or by the step after an end."""
        first = not answer.is_step and answer.steps == 0
        expected = self._reset(lane, seed=self._seed + lane) if first else self._reset(lane)
        self._age[lane] = 0
        if difference(expected, row) is None:
            return None
        return (LANES if first else MODE if answer.is_step else MASKED), "the first observation"

    def _stepped(self, answer: Answer, lane: int, row: Fingerprint) -> tuple[str, str] | None:
        """The lane made a frame."""
        where = f"in lane {lane} alone, at {answer.where}"
        observation, *rest, _ = guarded(LANES, where, self._singles[lane].step, answer.actions[lane])
        expected = self._bits(observation)  # at once: it may be changed by the reset
        self._age[lane] += 1
        name = MASKED if self._masked and self._age[lane] == 1 and answer.steps > 1 else LANES
        for what, ours, theirs in zip(("reward", "terminated", "truncated"), rest, _outcome(answer), strict=True):
            if as_array(ours).astype(theirs.dtype).item() != theirs[lane].item():
                return name, f"{what} {theirs[lane]}"
        if self._mode is AutoresetMode.SAME_STEP and answer.done[lane]:
            final = final_of(answer.info, lane)
            if final is not None and difference(expected, self._bits(final, FINAL)) is not None:
                return FINAL, FINAL
            expected, name = self._reset(lane), MODE
            self._age[lane] = 0
        elif answer.done[lane]:
            name = MODE
        return (name, "the observation") if difference(expected, row) is not None else None

    def _reset(self, lane: int, **kwargs: Any) -> Fingerprint:
        return self._bits(guarded(LANES, f"in lane {lane} alone", self._singles[lane].reset, **kwargs)[0])

    def _bits(self, observation: Any, name: str = LANES) -> Fingerprint:
        return fingerprint(guarded(name, "while observations were compared", as_stored, self._space, observation), "")


def _outcome(answer: Answer) -> list[np.ndarray[Any, Any]]:
    flags = [as_array(value).astype(np.bool_) for value in (answer.terminated, answer.truncated)]
    return [as_array(answer.reward), *flags]
