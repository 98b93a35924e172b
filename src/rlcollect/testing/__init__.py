"""Probe environments and checks: what rlcollect tests itself with, for your own environments too.

Does your environment keep the contract that collectors lean on? Every finding says what to do about it::

    from rlcollect.testing import check_env

    def test_my_env_keeps_the_contract():
        report = check_env(MyEnv)
        assert not report.broken, report

Collect from your environment and let every batch be checked, each against the one before it::

    from rlcollect import Collector
    from rlcollect.testing import check_batch

    def test_my_env_survives_collection():
        previous = None
        with Collector(MyEnv, frames_per_batch=64, total_frames=640, num_envs=4) as collector:
            for batch in collector:
                check_batch(batch, previous=previous)  # names the first wrong frame: "lane 3, t = 17: ..."
                previous = batch

What is wrong then is named to the frame: an observation that the environment changed after it gave it away, a row of
one episode joined to the next, an end that was flagged twice.

The probes are for whatever stands around environments: wrappers, vectorisers, collectors. Their observations say
where each row comes from:

- `Counter`: the step; `Tagged`: worker, episode and step;
- `Reuser`: a `Counter` that hands out the same arrays every time;
- `Breaker`: a `Counter` that raises, dies, hangs or sleeps where it is told to;
- `Echo`: the last action, and so the weights that chose it;
- `TensorTagged`: the same on torch tensors, lanes stepped by one call, as simulators on a GPU have it;
- `TaggedAgents`, of several agents by PettingZoo's Parallel API: lane, episode, agent and step;
- `Probe`: what they share, to make more of them.

>>> from rlcollect.testing import Tagged
>>> env = Tagged(worker=7, length=3, end="truncated")
>>> observation, info = env.reset(seed=0)
>>> observation, reward, terminated, truncated, info = env.step(0)
>>> observation.tolist()
[7.0, 0.0, 1.0]
"""

from __future__ import annotations

from rlcollect.testing._contract.entry import check_env
from rlcollect.testing._contract.report import Finding, Level, Report
from rlcollect.testing.batches import check_batch
from rlcollect.testing.breaker import EXIT_CODE, Breaker, How, UnpicklableError, Where
from rlcollect.testing.collection_contract import CollectionContract
from rlcollect.testing.environments import Counter, Echo, End, ObservationKind, Probe, Reuser, Tagged
from rlcollect.testing.multi_agent import Life, MaskedIn, TaggedAgents
from rlcollect.testing.tensors import TensorTagged

__all__ = [
    "EXIT_CODE",
    "Breaker",
    "CollectionContract",
    "Counter",
    "Echo",
    "End",
    "Finding",
    "How",
    "Level",
    "Life",
    "MaskedIn",
    "ObservationKind",
    "Probe",
    "Report",
    "Reuser",
    "Tagged",
    "TaggedAgents",
    "TensorTagged",
    "UnpicklableError",
    "Where",
    "check_batch",
    "check_env",
]
