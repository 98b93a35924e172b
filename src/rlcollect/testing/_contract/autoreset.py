"""How lanes are reset: the declared autoreset mode, held against what happens around every end of an episode.

NEXT_STEP: a step returns the final observation; the next one ignores the lane's action, resets it, and gives reward 0
and no flag. SAME_STEP: the observation is the first of the next episode already, and the final one is in
`info["final_obs"]`. DISABLED: nothing happens until `reset(options={"reset_mask": ...})`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcollect.testing._contract.repetition import Mark, first_difference, replayed
from rlcollect.testing._contract.report import BrokenError, Faults, Finding
from rlcollect.testing._contract.session import Answer, LanesSession, rows_of
from rlcollect.testing._contract.subject import Subject
from rlcollect.testing._contract.values import (
    Fingerprint,
    as_array,
    as_stored,
    difference,
    fingerprint,
    misfits,
)

__all__ = ["FINAL", "MODE", "Autoreset", "FinalObservations", "actions_ignored", "declared", "final_of", "stays_ended"]

Lanes: TypeAlias = VectorEnv[Any, Any, Any]
MODE: Final = "autoreset mode"
FINAL: Final = "final_obs"
_DECLARE: Final = 'Set metadata["autoreset_mode"] to the gymnasium.vector.AutoresetMode that the environment has.'


def declared(env: Lanes) -> tuple[AutoresetMode, Iterator[Finding]]:
    """The mode that the environment declares, and what is wrong with how it does so."""
    metadata = getattr(env, "metadata", None)
    mode = metadata.get("autoreset_mode") if isinstance(metadata, Mapping) else None
    if isinstance(mode, AutoresetMode):
        return mode, iter(())
    known = [each.value for each in AutoresetMode]
    if mode in known:
        told = Finding(MODE, "warning", f"it is declared as {mode!r}, a {type(mode).__name__}", _DECLARE)
        return AutoresetMode(mode), iter((told,))
    if mode is None:
        told = Finding(MODE, "warning", "none is declared, which means NEXT_STEP", _DECLARE)
    else:
        told = Finding(MODE, "broken", f"{mode!r} is declared; checked as NEXT_STEP", _DECLARE)
    return AutoresetMode.NEXT_STEP, iter((told,))


def final_of(info: Any, lane: int) -> Any:
    """The final observation of a lane; None where there is none."""
    finals = info.get(FINAL) if isinstance(info, Mapping) else None
    told = info.get(f"_{FINAL}") if isinstance(info, Mapping) else None
    if finals is None or (told is not None and not as_array(told).reshape(-1)[lane]):
        return None
    try:
        return finals[lane]
    except (IndexError, KeyError, TypeError):  # not by lane
        return None


class Autoreset:
    """What happens around ends, as far as one run shows it.

    Args:
        mode: as declared.
    """

    def __init__(self, mode: AutoresetMode) -> None:
        self._mode = mode
        self._faults = Faults(MODE)
        self._ends = 0

    def see(self, answer: Answer) -> None:
        """Looks at a step."""
        if not answer.is_step:
            return
        self._ends += int(answer.done.sum())
        if self._mode is AutoresetMode.SAME_STEP:
            return
        for lane in np.flatnonzero(answer.begun):
            reward, flag = as_array(answer.reward)[lane], answer.done[lane]
            if reward != 0 or flag:
                came = f"reward {reward} and {'a' if flag else 'no'} flag"
                self._add(f"{answer.where}: lane {lane} should only be reset: reward 0, no flag; it gave {came}")
        for lane in np.flatnonzero(answer.done):
            if final_of(answer.info, int(lane)) is not None:
                self._add(f"{answer.where}: lane {lane} ended, and there is {FINAL}: so it was reset in the same step")

    def findings(self) -> Iterator[Finding]:
        """One."""
        if self._ends:
            yield self._faults.finding(f"{self._mode.name}, as declared, at {self._ends:,} ends")
        else:
            yield Finding(MODE, "skipped", f"{self._mode.name} is declared; no episode has ended")

    def _add(self, found: str) -> None:
        self._faults.add("broken", f"{self._mode.name} does not hold: {found}", _DECLARE)


class FinalObservations:
    """`info["final_obs"]`, in SAME_STEP: there for every lane that ended, of its space, and never changed later.

    Args:
        mode: as declared.
        env: whose spaces count.
        compared: whether they are compared with what a single environment gives, so that looks need not judge.
    """

    KEPT = 8

    def __init__(self, mode: AutoresetMode, env: Lanes, *, compared: bool) -> None:
        self._mode = mode
        self._space, self._batch_space = env.single_observation_space, env.observation_space
        self._lanes = env.num_envs
        self._compared = compared
        self._faults = Faults(FINAL)
        self._kept: list[tuple[str, Any, Fingerprint]] = []
        self._ends = self._alike = 0

    def see(self, answer: Answer) -> None:
        """Looks at final observations, and again at those given before."""
        if self._mode is not AutoresetMode.SAME_STEP:
            return
        kept, self._kept = self._kept[-self.KEPT :], []
        for what, final, before in kept:
            if difference(before, fingerprint(final, "")) is None:
                self._kept.append((what, final, before))
            else:
                self._faults.add(
                    "broken",
                    f"{FINAL} of {what} had changed by {answer.where}: it is memory that is written to again",
                    "Return a copy of each observation, or let the vector environment copy before it resets.",
                )
        ended = np.flatnonzero(answer.done)
        rows = rows_of(self._batch_space, self._lanes, answer.observation) if len(ended) else []
        for lane in map(int, ended):
            self._look(f"lane {lane} at {answer.where}", final_of(answer.info, lane), rows[lane])

    def findings(self) -> Iterator[Finding]:
        """One."""
        if self._mode is not AutoresetMode.SAME_STEP:
            yield Finding(FINAL, "skipped", f"only SAME_STEP has it; this is {self._mode.name}")
        elif not self._ends:
            yield Finding(FINAL, "skipped", "no episode has ended")
        else:
            if self._alike == self._ends and not self._compared:
                self._faults.add(
                    "warning",
                    f"it is equal to the observation at all {self._ends:,} ends",
                    "One of the two is wrong, unless episodes end where they begin: the final observation belongs in "
                    f"{FINAL}, the first of the next episode in the observation.",
                )
            yield self._faults.finding(f"there at {self._ends:,} ends, of the space, and not changed later")

    def _look(self, what: str, final: Any, row: Any) -> None:
        self._ends += 1
        if final is None:
            self._faults.add(
                "broken",
                f"{what}: the episode ended and info has no {FINAL}",
                f'Put the final observation into info["{FINAL}"][lane]: nothing else shows how the episode ended.',
            )
            return
        for misfit in misfits(self._space, final, FINAL):
            self._faults.add(misfit.level, f"{what}: {misfit.text}", "It should be of single_observation_space.")
            if misfit.level == "broken":
                return
        stored = [fingerprint(as_stored(self._space, value), "") for value in (final, row)]
        self._alike += stored[0] == stored[1]
        self._kept.append((what, final, fingerprint(final, "")))


def actions_ignored(
    subject: Subject, mode: AutoresetMode, recorded: Sequence[Mark], steps: int, first_end: int | None
) -> Iterator[Finding]:
    """In NEXT_STEP, the action of a step that resets a lane changes nothing: tells where it does.

    Args:
        subject: under check; its runs repeat.
        mode: as declared.
        recorded: a run of at least so many steps.
        steps: how many.
        first_end: the step of the first end.
    """
    if mode is not AutoresetMode.NEXT_STEP or first_end is None or first_end >= steps:
        return
    altered = replayed(subject, lambda subject, env: LanesSession(subject, env, mode, alter=True), subject.seed, steps)
    if (place := first_difference(recorded, altered)) is not None:
        yield Finding(
            MODE,
            "broken",
            f"NEXT_STEP does not hold: the action of the step after an end is not ignored; it changes {place}",
            _DECLARE,
        )


def stays_ended(subject: Subject, mode: AutoresetMode, first_end: int | None) -> Iterator[Finding]:
    """With autoreset DISABLED, a lane that is stepped after its end is not found in a new episode."""
    if mode is not AutoresetMode.DISABLED or first_end is None:
        return
    with subject.opened() as env:
        session = LanesSession(subject, env, mode)
        ended = next((answer for answer in session.run(subject.steps, subject.seed) if answer.done.any()), None)
        if ended is None:
            return
        try:
            after = session.step(np.zeros(session.lanes, np.bool_))
        except BrokenError:
            return  # refused, as it should be
        alive = ended.done & ~after.done
        if not alive.any():
            return
        lane = int(np.flatnonzero(alive)[0])
        reset = as_array(after.reward)[lane] == 0
        yield Finding(
            MODE,
            "broken" if reset else "warning",
            f"DISABLED is declared: lane {lane} ended at {ended.where}, nobody reset it, and at {after.where} it has "
            + ("reward 0 and no flag, as after a reset of its own" if reset else "no flag: an episode goes on"),
            "Leave resets to reset(options={'reset_mask': ...}), and keep the flags of ended lanes; or declare the "
            "mode that it has.",
        )
