"""Several models of a collector: found by their paths, updated by their names, and all of one update seen together."""

from __future__ import annotations

import os
import threading
import time

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn

from rlcollect import (
    Collector,
    MultiAsyncCollector,
    MultiProcessWeightSyncScheme,
    MultiSyncCollector,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from rlcollect.errors import OptionError, PolicyError
from rlcollect.testing import Echo
from tests.weights.helpers import One

pytestmark = pytest.mark.timeout(60)
LONG = 30  # seconds in which every worker gets its turn, however busy the machine is
REWARD = "env.reward_model"
processes = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector], ids=["sync", "async"])
kinds = pytest.mark.parametrize(
    "kind", [Collector, MultiSyncCollector, MultiAsyncCollector], ids=["single", "sync", "async"]
)


class Scores(One):
    """Acts as its parameter; scores as it too."""

    @property
    def value(self):
        return self.weight.item()


def weights(value):
    return {"weight": torch.tensor([float(value)])}


class Rewarded(gym.Wrapper):
    """Pays what its model says."""

    def __init__(self, env, value=0.0):
        super().__init__(env)
        self.reward_model = Scores(value)

    def step(self, action):
        observation, _, *rest = self.env.step(action)
        return observation, self.reward_model.value, *rest


def rewarded():
    return Rewarded(Echo(length=None))


def shared(*models):
    return {model: SharedMemWeightSyncScheme() for model in models}


def of_kind(kind, make=rewarded, policy=None, **options):
    source = make if kind is Collector else [make] * 2
    frames = 8 if kind is MultiSyncCollector else 4
    policy = Scores() if policy is None else policy
    return kind(source, policy, **{"frames_per_batch": frames, "record": ("worker",), **options})


def frames(batch):
    """(worker, version, action, reward) of each frame."""
    keys = (("collector", "worker"), ("collector", "policy_version"), "action", ("next", "reward"))
    return list(zip(*(batch[key].flatten().tolist() for key in keys), strict=True))


def acting(collector, version):
    """(action, reward) of all frames of a version, when all workers have come to it."""
    newest, shown = {}, {}
    deadline = time.monotonic() + LONG
    while set(newest.values()) != {version} or len(newest) < collector.num_workers:
        assert time.monotonic() < deadline, f"only versions {newest} came, not {version}"
        for worker, has, action, reward in frames(collector.next()):
            newest[worker] = has
            assert shown.setdefault(has, (action, reward)) == (action, reward), "a version shows in two ways"
    return shown[version]


class Net(nn.Module):
    """Parts by name and by place."""

    def __init__(self):
        super().__init__()
        self.head = Scores(1)
        self.layers = nn.Sequential(Scores(2), Scores(3))
        self.parts = nn.ModuleDict({"a": Scores(4)})


class Holder(Echo):
    """Has modules at the end of all sorts of paths."""

    def __init__(self, length=None):
        super().__init__(length=length)
        self.net = Net()
        self.nets = [Scores(5), {"not": "a module"}, Net()]
        self.method = self.net.head.forward
        self.compiled = torch.compile(self.net.head, backend="eager")
        self.number = 3


PATHS = {
    "env.net": lambda env: env.net.head,
    "env.net.head": lambda env: env.net.head,
    "env.net.layers[1]": lambda env: env.net.layers[1],
    "env.net.parts.a": lambda env: env.net.parts["a"],
    "env.nets[0]": lambda env: env.nets[0],
    "env.nets[2].layers[0]": lambda env: env.nets[2].layers[0],
    "env.method": lambda env: env.net.head,
    "env.compiled": lambda env: env.net.head,
}


class TestPaths:
    @pytest.mark.parametrize("path", PATHS)
    def test_lead_to_a_module_of_an_environment(self, path):
        env = Holder()
        with Collector(env, Scores(), frames_per_batch=4, weight_sync_schemes=shared(path)) as collector:
            found = PATHS[path](env)
            given = env.net.state_dict() if path == "env.net" else found.state_dict()
            changed = {name: torch.full_like(tensor, 9.0) for name, tensor in given.items()}
            assert collector.update_policy_weights_(changed, model_id=path) == 1
            assert found.value == 9

    def test_go_to_the_same_module_in_each_lane(self):
        envs = [Holder() for _ in range(3)]
        with Collector(envs, Scores(), frames_per_batch=6, weight_sync_schemes=shared("env.nets[0]")) as collector:
            collector.update_policy_weights_(weights(9), model_id="env.nets[0]")
            assert [env.nets[0].value for env in envs] == [9, 9, 9]

    def test_go_to_one_lane_by_its_number(self):
        envs = [Holder() for _ in range(3)]
        paths = ("env[0].nets[0]", "env[2].nets[0]")
        with Collector(envs, Scores(), frames_per_batch=6, weight_sync_schemes=shared(*paths)) as collector:
            collector.update_policy_weights_(weights_dict={path: weights(7 + i) for i, path in enumerate(paths)})
            assert [env.nets[0].value for env in envs] == [7, 5, 8]

    def test_go_through_wrappers(self):
        env = TimeLimit(Rewarded(TimeLimit(Holder(), 100)), 50)
        with Collector(
            env, Scores(), frames_per_batch=4, weight_sync_schemes=shared(REWARD, "env.nets[0]", "env.env.reward_model")
        ) as collector:
            collector.update_policy_weights_(weights(8), model_id=REWARD)
            assert (collector.next()["next", "reward"] == 8).all()
            collector.update_policy_weights_(weights(9), model_id="env.nets[0]")
            assert env.unwrapped.nets[0].value == 9
            collector.update_policy_weights_(weights(10), model_id="env.env.reward_model")
            assert env.env.reward_model.value == 10

    def test_go_to_the_environments_of_a_vector_environment(self):
        vector = SyncVectorEnv([rewarded] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
        with Collector(vector, Scores(), frames_per_batch=6, weight_sync_schemes=shared(REWARD)) as collector:
            collector.update_policy_weights_(weights(8), model_id=REWARD)
            assert [env.reward_model.value for env in vector.envs] == [8, 8, 8]
            assert (collector.next()["next", "reward"] == 8).all()
        vector.close()

    @pytest.mark.parametrize("path", [REWARD, "env.env.reward_model"])
    def test_go_through_wrappers_of_vector_environments(self, path):
        inner = SyncVectorEnv([rewarded] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        vector = RecordEpisodeStatistics(inner)
        with Collector(vector, Scores(), frames_per_batch=4, weight_sync_schemes=shared(path)) as collector:
            collector.update_policy_weights_(weights(8), model_id=path)
            assert [env.reward_model.value for env in inner.envs] == [8, 8]
            assert (collector.next()["next", "reward"] == 8).all()
        vector.close()

    def test_a_module_that_several_lanes_share_is_one(self):
        envs = [rewarded(), rewarded()]
        envs[1].reward_model = envs[0].reward_model
        with Collector(envs, Scores(), frames_per_batch=4, weight_sync_schemes=shared(REWARD)) as collector:
            collector.update_policy_weights_(weights(8), model_id=REWARD)
            assert envs[0].reward_model.value == 8

    def test_go_to_post_processings(self):
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = Scores(1)

            def forward(self, batch):
                return batch.set("action", batch["action"] * self.factor.weight.detach())

        postproc = [Scale(), Scale()]
        paths = ("postproc[1]", "postproc[0].factor")
        with Collector(
            Echo, Scores(1), frames_per_batch=4, postproc=postproc, weight_sync_schemes=shared(*paths)
        ) as collector:
            collector.update_policy_weights_({"factor.weight": torch.tensor([5.0])}, model_id="postproc[1]")
            assert (collector.next()["action"] == 5).all()
            collector.update_policy_weights_(weights(7), model_id="postproc[0].factor")
            assert (collector.next()["action"] == 35).all()

    def test_go_to_hooks(self):
        class Hook:
            def __init__(self):
                self.model, self.seen = Scores(1), []

            def __call__(self, *_):
                self.seen.append(self.model.value)

        before, after = Hook(), Hook()
        schemes = shared("pre_collect_hook.model", "post_collect_hook.model")
        with Collector(
            Echo,
            Scores(),
            frames_per_batch=4,
            pre_collect_hook=before,
            post_collect_hook=after,
            weight_sync_schemes=schemes,
        ) as collector:
            collector.next()
            collector.update_policy_weights_(weights(5), model_id="pre_collect_hook.model")
            collector.next()
            collector.update_policy_weights_(weights(6), model_id="post_collect_hook.model")
            collector.next()
        assert (before.seen, after.seen) == ([1, 5, 5], [1, 1, 6])

    def test_go_to_hooks_in_workers(self, tmp_path):
        class Hook:
            def __init__(self):
                self.model = Scores(1)

            def __call__(self):
                (tmp_path / str(os.getpid())).write_text(str(self.model.value))

        path = "pre_collect_hook.model"
        with of_kind(MultiSyncCollector, Echo, pre_collect_hook=Hook(), weight_sync_schemes=shared(path)) as collector:
            collector.update_policy_weights_(weights(5), model_id=path)
            collector.next()
            assert [file.read_text() for file in tmp_path.iterdir()] == ["5.0", "5.0"]


WRONG = {
    "env.nothing": "has no '.nothing'",
    "env.net.nothing": "env.net has no '.nothing'",
    "env.nets[7]": r"env.nets has no '\[7\]'",
    "env.net[0]": r"env.net has no '\[0\]'",
    "env[4].net": r"there is no env\[4\]; there are 1",
    "env": "is no module",
    "env.number": "is no module: .3",
    "env.nets": "is no module",
    "env.nets[1]": "is no module",
    "pre_collect_hook.model": "has no '.model'",
    "postproc[0]": r"there is no postproc\[0\]; there are 0",
}


class TestPathsThatLeadNowhere:
    @pytest.mark.parametrize("path", WRONG)
    def test_are_named(self, path):
        with pytest.raises(PolicyError, match=WRONG[path]) as raised:
            Collector(Holder, Scores(), frames_per_batch=4, weight_sync_schemes=shared(path))
        assert repr(path) in str(raised.value)

    def test_are_named_by_a_worker(self):
        with pytest.raises(PolicyError, match=r"'env\.net\.nothing': env\.net has no '\.nothing'"):
            of_kind(MultiSyncCollector, Holder, weight_sync_schemes=shared("env.net.nothing"))

    @pytest.mark.parametrize("path", ["reward_model", "policy.head", "environment.net", "env..net", "", "env.net.", 3])
    def test_that_begin_nowhere_are_refused(self, path):
        with pytest.raises(OptionError, match=f"{path!r}"):
            Collector(Echo, Scores(), frames_per_batch=4, weight_sync_schemes=shared(path))

    @kinds
    def test_names_of_models_that_take_no_weights_are_refused(self, kind):
        with of_kind(kind, weight_sync_schemes=shared(REWARD)) as collector:
            for wrong in ("env.other", "postproc[0]", "", None, 0):
                with pytest.raises(OptionError, match=r"There is no model.*'env\.reward_model'"):
                    collector.update_policy_weights_(weights(5), model_id=wrong)
                with pytest.raises(OptionError, match="There is no model"):
                    collector.update_policy_weights_(weights_dict={"policy": weights(5), wrong: weights(5)})
            assert collector.policy_version == 0
            assert acting(collector, 0) == (0, 0)


class Wide(Rewarded):
    """Its model has more weights."""

    def __init__(self):
        super().__init__(Echo(length=None))
        self.reward_model.more = nn.Parameter(torch.zeros(2))


class TestModulesAtOnePathThatDiffer:
    TOLD = r"modules 'env\.reward_model' with the same weights; 'more' of {0} 1's differs from that of {0} 0's"

    def test_are_refused_in_the_lanes_of_a_worker(self):
        with pytest.raises(PolicyError, match=self.TOLD.format("holder")):
            Collector([rewarded, Wide], Scores(), frames_per_batch=4, weight_sync_schemes=shared(REWARD))

    def test_are_refused_in_the_lanes_of_worker_processes(self):
        with pytest.raises(PolicyError, match=self.TOLD.format("holder")):
            MultiSyncCollector([[rewarded, Wide]], Scores(), frames_per_batch=4, weight_sync_schemes=shared(REWARD))

    def test_are_refused_in_two_workers(self):
        with pytest.raises(PolicyError, match=self.TOLD.format("worker")):
            MultiSyncCollector([rewarded, Wide], Scores(), frames_per_batch=4, weight_sync_schemes=shared(REWARD))

    def test_are_refused_in_post_processings(self):
        class Scale(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.factor = nn.Linear(1, size)

            def forward(self, batch):
                return batch

        options = {"postproc": [Scale(1), Scale(2)], "weight_sync_schemes": shared("postproc.factor")}
        with pytest.raises(
            PolicyError, match=r"modules 'postproc\.factor' with the same weights; 'weight' of holder 1's"
        ):
            Collector(Echo, Scores(), frames_per_batch=4, **options)

    def test_may_differ_at_paths_of_their_own(self):
        schemes = shared("env[0].reward_model", "env[1].reward_model")
        with Collector([rewarded, Wide], Scores(), frames_per_batch=4, weight_sync_schemes=schemes) as collector:
            more = {**weights(5), "more": torch.ones(2)}
            given = {"env[0].reward_model": weights(4), "env[1].reward_model": more}
            assert collector.update_policy_weights_(weights_dict=given) == 1
            assert collector.next()["next", "reward"].flatten().unique().tolist() == [4, 5]


@kinds
class TestModelsOfOneCollector:
    def test_are_updated_alone_and_together(self, kind):
        with of_kind(kind, weight_sync_schemes=shared(REWARD)) as collector:
            assert acting(collector, 0) == (0, 0)
            assert collector.update_policy_weights_(weights(5)) == 1
            assert acting(collector, 1) == (5, 0)
            assert collector.update_policy_weights_(Scores(6), model_id=REWARD) == 2
            assert acting(collector, 2) == (5, 6)
            assert collector.update_policy_weights_(weights_dict={"policy": Scores(7), REWARD: weights(8)}) == 3
            assert acting(collector, 3) == (7, 8)
            assert collector.update_policy_weights_(weights_dict={REWARD: weights(9)}) == 4
            assert acting(collector, 4) == (7, 9)
            assert collector.update_policy_weights_(weights_dict={"policy": weights(10)}) == 5
            assert acting(collector, 5) == (10, 9)

    def test_are_updated_all_or_none(self, kind):
        """What does not fit is named, and what comes before it in the same update is not applied."""
        misfits = {
            "shape": ({"weight": torch.ones(2)}, r"'weight' has shape \[2\]"),
            "name": ({"weights": torch.ones(1)}, "'weight' is lacking"),
            "type": ([torch.ones(1)], "list"),
            "nothing": (None, "pass a module"),
        }
        with of_kind(kind, weight_sync_schemes=shared(REWARD)) as collector:
            collector.update_policy_weights_(weights_dict={"policy": weights(3), REWARD: weights(4)})
            for given, told in misfits.values():
                for order in (1, -1):
                    both = dict([("policy", weights(5)), (REWARD, given)][::order])
                    with pytest.raises(PolicyError, match=told):
                        collector.update_policy_weights_(weights_dict=both)
                with pytest.raises(PolicyError, match=told):
                    collector.update_policy_weights_(given, model_id=REWARD)
                assert collector.policy_version == 1
            with pytest.raises(PolicyError, match=r"reward_model.*'weight' has shape"):
                collector.update_policy_weights_(weights_dict={"policy": weights(5), REWARD: {"weight": torch.ones(2)}})
            with pytest.raises(PolicyError, match=r"policy.*'weight' has shape"):
                collector.update_policy_weights_(weights_dict={REWARD: weights(5), "policy": {"weight": torch.ones(2)}})
            assert acting(collector, 1) == (3, 4)

    def test_take_arguments_that_go_together(self, kind):
        with of_kind(kind, weight_sync_schemes=shared(REWARD)) as collector:
            both = {"policy": weights(5), REWARD: weights(5)}
            for arguments in ({"policy_or_weights": weights(5)}, {"policy_weights": Scores()}, {"model_id": REWARD}):
                with pytest.raises(OptionError, match="weights_dict"):
                    collector.update_policy_weights_(weights_dict=both, **arguments)
            with pytest.raises(OptionError, match="policy_or_weights and policy_weights are the same"):
                collector.update_policy_weights_(weights(5), policy_weights=weights(5))
            assert collector.update_policy_weights_(policy_weights=weights(5)) == 1
            assert acting(collector, 1) == (5, 0)

    def test_are_sent_by_their_schemes(self, kind):
        schemes = shared("policy", REWARD)
        with of_kind(kind, weight_sync_schemes=schemes) as collector:
            assert collector.weight_sync_schemes == schemes
            with pytest.raises(TypeError):
                collector.weight_sync_schemes["policy"] = SharedMemWeightSyncScheme()
            assert schemes[REWARD].send(weights(6)) == 1
            assert acting(collector, 1) == (0, 6)
            assert schemes["policy"].send(Scores(5)) == 2
            assert acting(collector, 2) == (5, 6)
            last = collector.num_workers - 1
            assert schemes[REWARD].send(weights(7), worker_ids=[last]) == 3
            assert [scheme.version for scheme in schemes.values()] == [3, 3], "each has the collector's newest"
            assert collector.policy_version == 3

    def test_of_which_one_is_left_alone(self, kind):
        schemes = {"policy": NoWeightSyncScheme(), REWARD: SharedMemWeightSyncScheme()}
        with of_kind(kind, weight_sync_schemes=schemes) as collector:
            assert collector.update_policy_weights_(weights(5)) == 0
            assert collector.update_policy_weights_() == 0
            assert schemes["policy"].send(weights(5)) == 0
            assert acting(collector, 0) == (0, 0)
            assert collector.update_policy_weights_(weights_dict={"policy": weights(5), REWARD: weights(6)}) == 1
            assert acting(collector, 1) == (0, 6)


@processes
class TestModelsInWorkers:
    def test_are_those_of_some_workers(self, kind):
        with of_kind(kind, weight_sync_schemes=shared(REWARD)) as collector:
            both = {"policy": weights(5), REWARD: weights(6)}
            collector.update_policy_weights_(weights_dict=both, worker_ids=1)
            shown, deadline = {}, time.monotonic() + LONG
            while shown.get(1, (0,))[0] < 1 or 0 not in shown:
                assert time.monotonic() < deadline
                shown |= {worker: rest for worker, *rest in frames(collector.next())}
            assert shown == {0: [0, 0, 0], 1: [1, 5, 6]}

    def test_go_by_value_too(self, kind):
        schemes = {"policy": MultiProcessWeightSyncScheme(), REWARD: MultiProcessWeightSyncScheme()}
        with of_kind(kind, weight_sync_schemes=schemes) as collector:
            collector.update_policy_weights_(weights_dict={"policy": weights(5), REWARD: weights(6)})
            assert acting(collector, 1) == (5, 6)
            collector.update_policy_weights_(weights(7), model_id=REWARD)
            assert acting(collector, 2) == (5, 7)

    def test_of_one_update_are_seen_together(self, kind):
        """A thread publishes both as fast as it can; workers look before each step."""
        is_over, errors = threading.Event(), []
        with of_kind(
            kind, weight_sync_schemes=shared(REWARD), weights_update="step", frames_per_batch=400
        ) as collector:

            def publish():
                version = 0
                try:
                    while not is_over.is_set():
                        version += 1
                        both = {"policy": weights(version), REWARD: weights(version)}
                        assert collector.update_policy_weights_(weights_dict=both) == version
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=publish)
            thread.start()
            seen, deadline = set(), time.monotonic() + LONG
            try:
                while len(seen) < 200 or collector.collected_frames < 4000:
                    assert time.monotonic() < deadline
                    for _, version, action, reward in frames(collector.next()):
                        assert action == reward == version
                        seen.add(version)
            finally:
                is_over.set()
                thread.join()
        assert errors == []


class TestSchemes:
    def test_of_different_kinds_are_refused(self):
        schemes = {"policy": SharedMemWeightSyncScheme(), REWARD: MultiProcessWeightSyncScheme()}
        for kind in (Collector, MultiSyncCollector):
            with pytest.raises(OptionError, match=r"go one way.*SharedMem.*MultiProcess"):
                of_kind(kind, weight_sync_schemes=schemes)

    def test_that_are_none_are_refused(self):
        for wrong in ("shared", SharedMemWeightSyncScheme, None):
            with pytest.raises(OptionError, match="takes a WeightSyncScheme for each model"):
                of_kind(Collector, weight_sync_schemes={REWARD: wrong})
        with pytest.raises(OptionError, match="a mapping from models to schemes"):
            of_kind(Collector, weight_sync_schemes=[SharedMemWeightSyncScheme()])

    def test_are_one_for_each_model(self):
        one = SharedMemWeightSyncScheme()
        with pytest.raises(OptionError, match="Each model needs one of its own"):
            of_kind(Collector, weight_sync_schemes={"policy": one, REWARD: one})

    def test_by_value_cannot_be_seen_midway(self):
        with pytest.raises(OptionError, match=r"weights_update=\"step\" needs weights in shared memory"):
            of_kind(
                MultiSyncCollector,
                weights_update="step",
                weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()},
            )
