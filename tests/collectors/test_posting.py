"""`update_policy_weights_` of the kinds with worker processes: what was published acts, whole, where it was sent.

Every action shows the weights that made it: `Mixed` acts as the sum of its tensors, each in decimal places of its own.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcollect import MultiAsyncCollector, MultiSyncCollector
from rlcollect.errors import OptionError, PolicyError
from rlcollect.testing import Echo

pytestmark = pytest.mark.timeout(60)
kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector], ids=["sync", "async"])
sync_soon = pytest.mark.parametrize(  # what is published is made in the program, whatever kind it is for
    "kind",
    [MultiSyncCollector, pytest.param(MultiAsyncCollector, marks=pytest.mark.slow)],
    ids=["sync", "async"],
)
SHARE = 4  # frames of a worker in a batch
LONG = 30  # seconds in which every worker gets its turn, however busy the machine is


class Inner(nn.Module):
    def __init__(self, weight=1.0, shift=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(weight)))
        self.register_buffer("shift", torch.full((1,), float(shift)))


class Mixed(nn.Module):
    """Acts as weight + 100 * shift + 10,000 * unsaved: a parameter, a buffer, and a buffer that no state dict has."""

    def __init__(self, weight=1.0, shift=2.0, unsaved=3.0):
        super().__init__()
        self.inner = Inner(weight, shift)
        self.register_buffer("unsaved", torch.full((1,), float(unsaved)), persistent=False)

    def forward(self, observation):
        action = self.inner.weight + 100 * self.inner.shift + 10_000 * self.unsaved
        return action.expand(observation.shape)

    def set(self, weight, shift, unsaved=None):
        with torch.no_grad():
            self.inner.weight.fill_(weight)
            self.inner.shift.fill_(shift)
            if unsaved is not None:
                self.unsaved.fill_(unsaved)
        return self


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(weight)))

    def forward(self, observation):
        return self.weight.expand(observation.shape)

    def set(self, weight):
        with torch.no_grad():
            self.weight.fill_(weight)
        return self


class Tied(nn.Module):
    """Acts as a + 100 * b, which are one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = One(), One()
        self.b.weight = self.a.weight

    def forward(self, observation):
        return (self.a.weight + 100 * self.b.weight).expand(observation.shape)


class Counting(nn.Module):
    """Acts as 1000 * weight + the number of calls so far, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, observation):
        self.calls += 1
        return (1000 * self.weight + self.calls).expand(observation.shape)


def of_kind(kind, policy=None, *, workers=2, **options):
    frames = SHARE * workers if kind is MultiSyncCollector else SHARE
    return kind([Echo] * workers, policy, frames_per_batch=frames, record=("worker",), **options)


def frames(batch):
    """(worker, version, action) of each frame, in order of time."""
    columns = (batch["collector", "worker"], batch["collector", "policy_version"], batch["action"].squeeze(-1))
    return list(zip(*(column.flatten().tolist() for column in columns), strict=True))


def latest(collector, expected):
    """What each worker does when its frames have come to these versions: `{worker: (version, action)}`.

    All frames of a version have one action.
    """
    newest, seen = {}, {}
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        for worker, version, action in frames(collector.next()):
            assert seen.setdefault((worker, version), action) == action, "two actions of one version"
            assert version >= newest.get(worker, (-2,))[0]
            newest[worker] = version, action
        if {worker: version for worker, (version, _) in newest.items()} == expected:
            return newest
    raise AssertionError(f"only {newest} came, where {expected} was expected")


def acting(collector, version, workers=2):
    """The action of all workers with this version."""
    actions = {action for _, action in latest(collector, dict.fromkeys(range(workers), version)).values()}
    assert len(actions) == 1
    return actions.pop()


def flat(module):
    return TensorDict.from_module(module).flatten_keys(".")


def compiled_state(module):
    state = compiled(module).state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    return state


compiled = functools.partial(torch.compile, backend="eager")
FORMS = {
    "module": lambda module: module,
    "method": lambda module: module.forward,
    "compiled module": compiled,
    "nested TensorDict": TensorDict.from_module,
    "nested TensorDict as a module": functools.partial(TensorDict.from_module, as_module=True),
    "flat TensorDict": flat,
    "detached TensorDict": lambda module: TensorDict.from_module(module).data.clone(),
    "state dict": lambda module: module.state_dict(),
    "plain dict": lambda module: dict(module.state_dict()),
    "compiled module's state dict": compiled_state,
}
SAVED = {"state dict", "plain dict", "compiled module's state dict"}  # without what no state dict has


@sync_soon
class TestWhatIsGiven:
    def test_nothing_is_the_policy_itself(self, kind):
        policy = Mixed()
        with of_kind(kind, policy) as collector:
            assert acting(collector, 0) == 30_201
            policy.set(4, 5, 6)
            assert collector.update_policy_weights_() == 1
            assert acting(collector, 1) == 60_504

    def test_weights_in_any_form(self, kind):
        with of_kind(kind, Mixed()) as collector:
            assert acting(collector, 0) == 30_201
            for number, (form, make) in enumerate(FORMS.items()):
                other = Mixed(10 + number, 20 + number, 9)
                assert collector.update_policy_weights_(make(other)) == 2 * number + 1, form
                expected = 10 + number + 100 * (20 + number) + (30_000 if form in SAVED else 90_000)
                assert acting(collector, 2 * number + 1) == expected, form
                assert collector.update_policy_weights_() == 2 * number + 2
                assert acting(collector, 2 * number + 2) == 30_201, f"{form}: the policy is as it was"

    @pytest.mark.parametrize("wrap", ["method", "TensorDictModule", "compiled module"])
    def test_policies_of_any_form(self, kind, wrap):
        module = Mixed()
        policy = {
            "method": lambda: module.forward,
            "TensorDictModule": lambda: TensorDictModule(module, ["observation"], ["action"]),
            "compiled module": lambda: compiled(module),
        }[wrap]()
        with of_kind(kind, policy) as collector:
            assert acting(collector, 0) == 30_201
            module.set(4, 5, 6)
            collector.update_policy_weights_()
            assert acting(collector, 1) == 60_504
            collector.update_policy_weights_(policy)
            assert acting(collector, 2) == 60_504

    def test_other_dtypes_are_converted(self, kind):
        with of_kind(kind, Mixed()) as collector:
            collector.update_policy_weights_(Mixed(7, 8, 9).double())
            assert acting(collector, 1) == 90_807

    def test_tied_parameters(self, kind):
        policy = Tied()
        with of_kind(kind, policy) as collector:
            assert acting(collector, 0) == 101
            policy.a.set(5)
            assert collector.update_policy_weights_() == 1
            assert acting(collector, 1) == 505
            for version, form in enumerate(("state dict", "nested TensorDict", "module"), 2):
                other = Tied()
                other.a.set(version + 10)
                assert collector.update_policy_weights_(FORMS[form](other)) == version
                assert acting(collector, version) == 101 * (version + 10)

    def test_frozen_parameters(self, kind):
        policy = Mixed()
        policy.inner.weight.requires_grad_(False)
        with of_kind(kind, policy) as collector:
            policy.set(4, 5, 6)
            collector.update_policy_weights_()
            assert acting(collector, 1) == 60_504
            collector.update_policy_weights_(Mixed(7, 8, 9))
            assert acting(collector, 2) == 90_807

    def test_the_form_does_not_keep_what_was_given(self, kind):
        other = Mixed(7, 8, 9)
        with of_kind(kind, Mixed()) as collector:
            collector.update_policy_weights_(other)
            other.set(1, 1, 1)
            assert acting(collector, 1) == 90_807


@kinds
class TestBuffersThatThePolicyChanges:
    def test_stay_the_workers_own_with_one_warning(self, kind):
        policy = Counting()
        with of_kind(kind, policy) as collector:
            seen = {0: [], 1: []}

            def look():
                for worker, version, action in frames(collector.next()):
                    seen[worker].append((version, action))

            look()
            with pytest.warns(UserWarning, match="calls") as given:
                collector.update_policy_weights_()
            assert len(given) == 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                policy.weight.data.fill_(2)
                policy.calls.fill_(500)
                collector.update_policy_weights_()
                collector.update_policy_weights_(policy.state_dict())
            deadline = time.monotonic() + LONG
            while time.monotonic() < deadline:
                look()
                if all(rows and rows[-1][0] == 3 for rows in seen.values()):
                    break
            for rows in seen.values():
                weights = {0: 1, 1: 1, 2: 2, 3: 2}
                assert rows[-1][0] == 3
                assert [action for _, action in rows] == [
                    1000 * weights[version] + call for call, (version, _) in enumerate(rows, 1)
                ]


@sync_soon
@pytest.mark.filterwarnings("ignore:No weights were sent")
class TestWithoutAPolicyHere:
    def test_says_what_to_pass(self, kind):
        with of_kind(kind, policy_factory=Mixed) as collector:
            with pytest.raises(PolicyError, match=r"policy_factory.*module.*TensorDict.*state dict"):
                collector.update_policy_weights_()
            assert acting(collector, 0) == 30_201

    @pytest.mark.parametrize("form", ["module", "nested TensorDict", "state dict", "compiled module's state dict"])
    def test_what_is_passed_is_taken(self, kind, form):
        with of_kind(kind, policy_factory=Mixed) as collector:
            assert collector.update_policy_weights_(FORMS[form](Mixed(7, 8, 9))) == 1
            assert acting(collector, 1) == (30_807 if form in SAVED else 90_807)

    def test_factories_of_each_worker(self, kind):
        with of_kind(kind, policy_factory=[lambda: One(3), lambda: One(4)]) as collector:
            assert latest(collector, {0: 0, 1: 0}) == {0: (0, 3), 1: (0, 4)}
            assert collector.update_policy_weights_(One(9)) == 1
            assert acting(collector, 1) == 9

    def test_factories_whose_weights_differ(self, kind):
        with pytest.raises(PolicyError, match="'weight' of worker 1's differs"):
            of_kind(kind, policy_factory=[One, Mixed])

    def test_another_number_of_factories(self, kind):
        with pytest.raises(OptionError, match="policy_factory is a list of 3, and there are 2 workers"):
            of_kind(kind, policy_factory=[One] * 3)


def without(name):
    state = Mixed(7, 8, 9).state_dict()
    del state[name]
    return state


MISFITS = {
    "missing parameter": (lambda: without("inner.weight"), "'inner.weight'"),
    "missing buffer": (lambda: without("inner.shift"), "'inner.shift'"),
    "unknown": (lambda: {**Mixed(7, 8, 9).state_dict(), "odd": torch.ones(1)}, "'odd'"),
    "shape": (lambda: {**Mixed(7, 8, 9).state_dict(), "inner.shift": torch.ones(2)}, r"'inner.shift'.*\[2\].*\[1\]"),
    "shape that would broadcast": (
        lambda: {**Mixed(7, 8, 9).state_dict(), "inner.shift": torch.ones(())},
        r"'inner.shift'.*\[\].*\[1\]",
    ),
    "another module": (lambda: One(7), "'inner.weight'"),
    "nothing": (dict, "'inner.weight'"),
    "no tensor": (lambda: {**Mixed(7, 8, 9).state_dict(), "inner.weight": 3.0}, "'inner.weight'"),
    "no weights": (lambda: 3, "int"),
    "a list": (lambda: [torch.ones(1)], "list"),
}


@sync_soon
class TestWhatDoesNotFit:
    def test_is_refused_whole(self, kind):
        """Nothing is applied, not even what comes before the first difference; nothing counts."""
        policy = Mixed()
        with of_kind(kind, policy) as collector:
            assert acting(collector, 0) == 30_201
            for name, (make, difference) in MISFITS.items():
                with pytest.raises(PolicyError, match=difference):
                    collector.update_policy_weights_(make())
                assert collector.policy_version == 0, name
                for worker_ids in (0, [1]):
                    with pytest.raises(PolicyError, match=difference):
                        collector.update_policy_weights_(make(), worker_ids=worker_ids)
                assert acting(collector, 0) == 30_201, name
            assert collector.update_policy_weights_(Mixed(7, 8, 9)) == 1
            assert acting(collector, 1) == 90_807

    def test_a_policy_that_has_changed(self, kind):
        policy = One()
        with of_kind(kind, policy) as collector:
            policy.weight = nn.Parameter(torch.ones(3))
            with pytest.raises(PolicyError, match=r"'weight'.*\[3\].*\[1\]"):
                collector.update_policy_weights_()
            assert acting(collector, 0) == 1


@kinds
class TestPolicies:
    """Without weights."""

    def test_random(self, kind):
        with of_kind(kind) as collector:
            assert collector.update_policy_weights_() == 1
            assert {version for _, version, _ in frames(collector.next())} == {-1}
            with pytest.raises(PolicyError, match="no weights"):
                collector.update_policy_weights_(One())

    def test_functions(self, kind):
        with of_kind(kind, lambda observation: observation * 0 + 2) as collector:
            assert acting(collector, 0) == 2
            assert collector.update_policy_weights_() == 1
            assert acting(collector, 1) == 2
            with pytest.raises(PolicyError, match="no weights"):
                collector.update_policy_weights_({"weight": torch.ones(1)})


@kinds
class TestSomeWorkers:
    def test_only_these(self, kind):
        with of_kind(kind, One(), workers=3) as collector:
            for version, worker_ids in enumerate((1, [1], (1,), range(1, 2)), 1):
                assert collector.update_policy_weights_(One(5 + version), worker_ids=worker_ids) == version
                expected = {0: (0, 1), 1: (version, 5 + version), 2: (0, 1)}
                assert latest(collector, {0: 0, 1: version, 2: 0}) == expected, worker_ids

    def test_several(self, kind):
        with of_kind(kind, One(), workers=3) as collector:
            assert collector.update_policy_weights_(One(5), worker_ids=[2, 0]) == 1
            assert latest(collector, {0: 1, 1: 0, 2: 1}) == {0: (1, 5), 1: (0, 1), 2: (1, 5)}

    def test_all_of_them(self, kind):
        with of_kind(kind, One()) as collector:
            assert collector.update_policy_weights_(One(5), worker_ids=[0, 1]) == 1
            assert acting(collector, 1) == 5

    def test_wrong_ones(self, kind):
        with of_kind(kind, One()) as collector:
            for worker_ids in (2, -1, [0, 5], True, [False], "0", 1.5, [0.5], [None]):
                with pytest.raises(OptionError, match="worker"):
                    collector.update_policy_weights_(One(5), worker_ids=worker_ids)
                assert collector.policy_version == 0
            assert acting(collector, 0) == 1

    def test_numpys_integers(self, kind):
        with of_kind(kind, One()) as collector:
            collector.update_policy_weights_(One(5), worker_ids=np.int64(1))
            collector.update_policy_weights_(One(6), worker_ids=np.array([0]))
            assert latest(collector, {0: 2, 1: 1}) == {0: (2, 6), 1: (1, 5)}

    def test_some_then_all_then_others(self, kind):
        """Each shows what it was sent last; versions are those of the collector."""
        with of_kind(kind, One()) as collector:
            steps = [
                (One(5), 0, {0: (1, 5), 1: (0, 1)}),
                (One(7), None, {0: (2, 7), 1: (2, 7)}),
                (One(9), 1, {0: (2, 7), 1: (3, 9)}),
                (One(3), 0, {0: (4, 3), 1: (3, 9)}),
                (One(4), [1, 0], {0: (5, 4), 1: (5, 4)}),
                (None, None, {0: (6, 1), 1: (6, 1)}),
                (One(2), [0], {0: (7, 2), 1: (6, 1)}),
            ]
            for number, (weights, workers, expected) in enumerate(steps, 1):
                assert collector.update_policy_weights_(weights, worker_ids=workers) == number
                assert latest(collector, {worker: version for worker, (version, _) in expected.items()}) == expected

    def test_the_last_one(self, kind):
        """Updating one of four reaches just that one."""
        with of_kind(kind, One(), workers=4) as collector:
            for version, worker in enumerate((3, 0), 1):
                collector.update_policy_weights_(One(10 + worker), worker_ids=worker)
                assert collector.policy_version == version
            expected = {0: (2, 10), 1: (0, 1), 2: (0, 1), 3: (1, 13)}
            assert latest(collector, {worker: version for worker, (version, _) in expected.items()}) == expected


@kinds
class TestAgainAndAgain:
    def test_alternating(self, kind):
        policy = Mixed()
        with of_kind(kind, policy) as collector:
            for version in range(1, 9):
                weights = (4, 5, 6) if version % 2 else (7, 8, 9)
                policy.set(*weights)
                assert collector.update_policy_weights_() == version
                assert acting(collector, version) == weights[0] + 100 * weights[1] + 10_000 * weights[2]

    def test_only_the_newest_acts(self, kind):
        with of_kind(kind, One()) as collector:
            for version in range(1, 20):
                collector.update_policy_weights_(One(version))
            assert acting(collector, 19) == 19

    def test_to_zero_on_devices_of_each(self, kind):
        policy = copy.deepcopy(One(5))
        with of_kind(kind, policy, policy_device=["cpu", "cpu"]) as collector:
            assert acting(collector, 0) == 5
            policy.set(0)
            assert acting(collector, 0) == 5  # nothing is seen before it is published
            collector.update_policy_weights_()
            assert acting(collector, 1) == 0


def drawn(collector, batches=5):
    """The versions in each batch, and their actions."""
    return [{(version, action) for _, version, action in frames(collector.next())} for _ in range(batches)]


@pytest.mark.parametrize("name", ["update_at_each_batch", "update_after_each_batch"])
class TestAtEachBatch:
    def test_sync_before_each_collection(self, name):
        policy = One()
        with of_kind(MultiSyncCollector, policy, **{name: True}) as collector:
            for number in range(1, 6):
                policy.set(10 + number)
                assert frames(collector.next()) == [
                    (worker, number, 10 + number) for worker in (0, 1) for _ in range(SHARE)
                ]
                assert collector.policy_version == number

    def test_async_at_the_next_after_each_batch(self, name):
        policy = One()
        with of_kind(MultiAsyncCollector, policy, **{name: True}) as collector:
            versions = []
            for number in range(8):
                policy.set(10 + number)  # is published as version `number`, but for the first
                for _, version, action in frames(collector.next()):
                    assert action == (10 + version if version else 1 if number == 0 else action)
                    versions.append(version)
                assert collector.policy_version == number
            assert versions[0] == 0
            assert 0 < max(versions) <= 7

    def test_one_version_each_besides_the_users_own(self, name):
        policy = One()
        with of_kind(MultiSyncCollector, policy, **{name: True}) as collector:
            collector.next()
            assert collector.update_policy_weights_(One(50)) == 2
            policy.set(60)
            assert drawn(collector, 1) == [{(3, 60)}]

    def test_both_names_at_once(self, name):
        with pytest.raises(OptionError, match="same option"):
            of_kind(MultiSyncCollector, One(), update_at_each_batch=True, update_after_each_batch=True)

    def test_not_unless_asked(self, name):
        policy = One()
        with of_kind(MultiSyncCollector, policy, **{name: False}) as collector:
            policy.set(60)
            assert drawn(collector, 3) == [{(0, 1)}] * 3


@kinds
class TestTheUsersModule:
    def test_keeps_its_parameters_as_they_are(self, kind):
        policy = Mixed()
        policy.inner.weight.grad = torch.full((1,), 0.5)
        tensors = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
        before = {name: (id(tensor), tensor.data_ptr(), tensor.is_shared()) for name, tensor in tensors.items()}
        values = {name: tensor.tolist() for name, tensor in tensors.items()}

        def look():
            now = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
            assert {name: (id(each), each.data_ptr(), each.is_shared()) for name, each in now.items()} == before
            assert {name: each.tolist() for name, each in now.items()} == values
            assert isinstance(policy.inner.weight, nn.Parameter)
            assert policy.inner.weight.requires_grad
            assert policy.inner.weight.grad.tolist() == [0.5]
            assert policy.training

        collector = of_kind(kind, policy)
        look()
        collector.next()
        for given in (None, Mixed(7, 8, 9), Mixed(7, 8, 9).state_dict()):
            collector.update_policy_weights_(given)
            collector.next()
            look()
        collector.update_policy_weights_(Mixed(7, 8, 9), worker_ids=0)
        collector.next()
        collector.shutdown()
        look()
        assert collector.policy is policy

    def test_what_is_learned_is_seen_when_it_is_published(self, kind):
        policy = One()
        optimiser = torch.optim.SGD(policy.parameters(), lr=1.0)
        with of_kind(kind, policy) as collector:
            for step in range(3):
                assert acting(collector, step) == 1 - step
                policy.weight.sum().backward()
                optimiser.step()
                optimiser.zero_grad()
                assert acting(collector, step) == 1 - step
                collector.update_policy_weights_()
