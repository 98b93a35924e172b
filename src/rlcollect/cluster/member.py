"""One actor of a pool, as the program knows it: its handle, and its signs of life."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rlcollect.cluster.actor import Pulse
from rlcollect.processes.messages import Reply, Request

__all__ = ["PULSE_EACH", "Member", "said"]

PULSE_EACH = 0.5  # seconds between two looks at what those are doing that are waited for
MOST_SAID = 300  # characters of what Ray says; the whole is in the error's cause
TOLD_ELSEWHERE = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")  # how lines of it begin


class Member:
    """One actor, and what is known of it.

    Attributes:
        actor: its handle.
        life: becomes ready when it is gone.
        pulse: the newest sign of life.
        heard: when that came, by the machine's monotonic clock.
        asked: for the next, if one is under way.
        asked_at: when that was.
        places: of what it is sent.
        early: replies that have come before others that were given before them, by place.
        place: of the reply that is next.
        kept: requests that are not sent yet, since it is not there yet, and what goes with each.
    """

    def __init__(self, actor: Any, first: str) -> None:
        self.actor = actor
        self.life = actor.live.remote()
        self.pulse = Pulse(first, first, 0.0, 0.0, 0, "")
        self.heard = self.asked_at = time.monotonic()
        self.asked: Any = None
        self.places = itertools.count()
        self.early: dict[int, Reply] = {}
        self.place = 0
        self.kept: list[tuple[Request, Sequence[Any]]] = []

    @property
    def is_there(self) -> bool:
        """Whether it has been heard of."""
        return bool(self.pulse.node)

    def keep(self, request: Request, attached: Sequence[Any]) -> list[Request]:
        """A request is sent when it is there; the news that this makes up for, which are not."""
        old = [each for each, _ in self.kept if each.is_news] if request.is_news else []
        self.kept = [*((each, with_it) for each, with_it in self.kept if each not in old), (request, attached)]
        return old

    def ask(self) -> None:
        """For a sign of life, unless that was done a moment ago."""
        if self.asked is None and time.monotonic() - self.asked_at >= PULSE_EACH / 2:
            self.ask_anew()

    def ask_anew(self) -> None:
        """For a sign of life of now; it is silent since it was asked first."""
        if self.asked is None:
            self.asked_at = time.monotonic()
        self.asked = self.actor.pulse.remote()

    def hear(self) -> None:
        """What was asked for has come."""
        asked, self.asked = self.asked, None
        try:
            self.note(ray.get(asked))
        except RayError:
            return  # its end is noticed where it is looked for

    def note(self, pulse: Pulse) -> None:
        """It has given a sign of life; one that comes late is not the newest."""
        if pulse.at >= self.pulse.at:
            self.pulse, self.heard = pulse, time.monotonic()


def said(error: RayError) -> str:
    """What Ray says of the end of one, in a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(TOLD_ELSEWHERE))
    text = text if len(text) <= MOST_SAID else f"{text[:MOST_SAID].rpartition(' ')[0]} ..."
    return text if text.endswith(".") else f"{text}."
