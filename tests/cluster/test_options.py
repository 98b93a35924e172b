"""FAULTS 61: whatever is passed to a `RayCollector` gets to its workers, in the message that processes get."""

from __future__ import annotations

import dataclasses

import pytest

from rlcollect import MultiAsyncCollector, MultiSyncCollector, RayCollector
from rlcollect.testing import Counter
from tests.workers.test_parity import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore")
BUFFERS = {"replay_buffer", "extend_buffer"}  # two kinds: test_ray_buffer.py is about theirs
OF_THE_WAY = {"receiver", "policy"}  # weights come another way; a policy is pickled, and no two pickles are alike


class BuildsError(Exception):
    """What workers would be told."""

    def __init__(self, builds):
        super().__init__("enough was seen")
        self.builds = builds


def told(cls, monkeypatch, name, **own):
    """What its two workers are told, and how what is done here with batches was understood."""

    def seen(self, builds):
        raise BuildsError((builds, self._sink))

    given = {
        key: value() if key in ("replay_buffer", "weight_updater") and callable(value) else value
        for key, value in OPTIONS[name].items()
    }
    options = {"frames_per_batch": 8, "total_frames": 36, "num_envs": 2, **given}
    with monkeypatch.context() as patched:
        patched.setattr(cls, "_pool", seen)
        with pytest.raises(BuildsError) as caught:
            cls([Counter] * 2, None, **options, **own)
    return caught.value.builds


def shown(value):
    if dataclasses.is_dataclass(value):
        return {field.name: shown(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


@pytest.mark.parametrize(("kind", "sync"), [(MultiSyncCollector, True), (MultiAsyncCollector, False)])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in BUFFERS])
def test_every_option_gets_there(monkeypatch, name, kind, sync):
    ours, sink = told(RayCollector, monkeypatch, name, sync=sync)
    theirs, other = told(kind, monkeypatch, name)
    assert shown(sink) == shown(other)
    for one, build in zip(ours, theirs, strict=True):
        mine, yours = shown(one), shown(build)
        assert {key for key in mine if mine[key] != yours[key]} <= OF_THE_WAY
