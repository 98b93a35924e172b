"""Where chance comes from: the collector's streams, the learner's, seeds; and what collection leaves as it was."""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from rlcollect import Collector, ExplorationType, OptionError, PolicyError
from rlcollect.testing import Counter, Probe, check_batch
from tests.rollout.helpers import BOX, bits


class Noisy(Probe):
    """Observations and ends of episodes come from the environment's own stream."""

    def __init__(self, length=6):
        super().__init__(length)
        self.observation_space, self.action_space = BOX, spaces.Discrete(1000)

    def _observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def _draw_limit(self):
        return int(self.np_random.integers(1, self.length + 1))


def guess(observation):
    """One draw from torch's stream a call, for all lanes at once."""
    return torch.randint(1000, observation.shape[:-1])


class Dropping(nn.Module):
    """Stochastic by its dropout."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("powers", 2.0 ** torch.arange(9))

    def forward(self, observation):
        kept = self.drop(torch.ones(*observation.shape[:-1], 9))
        return (kept > 0).float().mul(self.powers).sum(-1).long()


def actor(lanes=3):
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 1000), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    )


POLICIES = {"randint": lambda: guess, "dropout": Dropping, "actor": actor, "random": lambda: None}
every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


@contextmanager
def seeded(policy, seed=5, lanes=3, steps=5, **options):
    """A collector of noisy lanes, seeded; nothing of it depends on when it is made."""
    with Collector(Noisy, policy, frames_per_batch=steps * (lanes or 1), num_envs=lanes, **options) as collector:
        if seed is not None:
            collector.set_seed(seed)
        yield collector


def collected(policy, batches=4, between=lambda: None, **options):
    """Batches in one piece, with something done between them."""
    with seeded(policy, **options) as collector:
        made = []
        for _ in range(batches):
            made.append(collector.next())
            between()
        return torch.cat(made, -1)


def global_states():
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist()


def learner_draws():
    torch.rand(7)
    nn.Dropout(0.5)(torch.ones(100))
    torch.randperm(10)
    np.random.rand(3)
    random.random()


class TestStreamsOfCollectorAndLearner:
    @every_policy
    def test_the_learners_draws_change_no_data(self, policy):
        quiet = collected(POLICIES[policy]())
        busy = collected(POLICIES[policy](), between=learner_draws)
        reseeding = collected(POLICIES[policy](), between=lambda: (torch.manual_seed(1), np.random.seed(1)))
        assert bits(quiet) == bits(busy) == bits(reseeding)

    @every_policy
    def test_collection_changes_none_of_the_learners_draws(self, policy):
        with seeded(POLICIES[policy]()) as collector:
            before = global_states()
            collector.next()
            collector.rollout()
            collector.set_seed(3)
            collector.next()
            collector.reset()
            collector.state_dict()
            assert global_states() == before

    @every_policy
    def test_two_collectors_side_by_side_do_not_meet(self, policy):
        alone = [collected(POLICIES[policy](), seed=seed) for seed in (1, 2)]
        with seeded(POLICIES[policy](), seed=1) as first, seeded(POLICIES[policy](), seed=2) as second:
            pairs = [(first.next(), second.next()) for _ in range(4)]
        for expected, made in zip(alone, zip(*pairs, strict=True), strict=True):
            assert bits(torch.cat(made, -1)) == bits(expected)

    def test_the_stream_begins_at_torchs_seed(self):
        """Where `set_seed` was not called: actions repeat with `torch.manual_seed`, whatever was drawn since."""
        made = []
        for draws in (0, 5):
            torch.manual_seed(17)
            torch.rand(draws)
            with Collector(Counter, guess_counter, frames_per_batch=12, num_envs=3) as collector:
                made.append(collector.next()["action"])
        torch.manual_seed(18)
        with Collector(Counter, guess_counter, frames_per_batch=12, num_envs=3) as collector:
            made.append(collector.next()["action"])
        assert torch.equal(made[0], made[1])
        assert not torch.equal(made[0], made[2])

    @pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
    def test_any_seed_of_torch_will_do(self, seed):
        torch.manual_seed(seed)
        for policy in (None, guess_counter):
            with Collector(Counter, policy, frames_per_batch=12, num_envs=3) as collector:
                collector.next()

    def test_the_learners_stream_comes_back_after_an_exception(self):
        calls = []

        def failing(observation):
            calls.append(1)
            torch.rand(3)
            if len(calls) == 5:
                raise ZeroDivisionError
            return guess(observation)

        with seeded(failing) as collector:
            before = global_states()
            with pytest.raises(ZeroDivisionError):
                collector.next()
            assert global_states() == before

    def test_the_stream_of_an_environment_that_draws_from_torch_is_the_collectors(self):
        class Drawing(Counter):
            def _reward_for(self, action):
                return float(torch.rand(()))

        def rewards(between):
            with Collector(Drawing, frames_per_batch=6, num_envs=2) as collector:
                collector.set_seed(0)
                collector.next()
                between()
                before = torch.get_rng_state()
                made = collector.next()["next", "reward"]
                assert torch.equal(before, torch.get_rng_state())
                return made

        assert torch.equal(rewards(lambda: None), rewards(learner_draws))


def guess_counter(observation):
    return torch.randint(2, observation.shape[:-1])


class TestSetSeed:
    @every_policy
    def test_one_seed_gives_the_same_bits(self, policy):
        """DESIGN, invariant 2."""
        assert bits(collected(POLICIES[policy]())) == bits(collected(POLICIES[policy]()))

    @every_policy
    def test_another_seed_gives_other_data(self, policy):
        one, other = (collected(POLICIES[policy](), seed=seed) for seed in (5, 6))
        assert not torch.equal(one["action"], other["action"])
        assert not torch.equal(one["observation"], other["observation"])

    @every_policy
    @pytest.mark.parametrize("warmup", [None, 7])
    def test_with_a_warm_up_and_a_limit(self, policy, warmup):
        options = {"init_random_frames": warmup, "max_frames_per_traj": 3}
        one, other = (collected(POLICIES[policy](), **options) for _ in range(2))
        assert bits(one) == bits(other)

    @every_policy
    def test_again_in_the_middle(self, policy):
        """Everything but ids begins anew."""
        with seeded(POLICIES[policy]()) as collector:
            first = torch.cat([collector.next() for _ in range(3)], -1)
            collector.next()
            collector.set_seed(5)
            again = torch.cat([collector.next() for _ in range(3)], -1)
        check_batch(again)
        assert not torch.equal(first["collector", "traj_ids"], again["collector", "traj_ids"])
        for batch in (first, again):
            del batch["collector", "traj_ids"]
        assert bits(first) == bits(again)

    @every_policy
    def test_a_single_lane_is_lane_0(self, policy):
        """The same environment seeds; what the policy draws depends on how many lanes it draws for."""
        single, one = (collected(POLICIES[policy](), lanes=lanes) for lanes in (None, 1))
        assert bits(one[0]) == bits(single)

    def test_lanes_are_reset_with_the_next_batch_not_before(self):
        """FAULTS 103."""
        envs = [Noisy() for _ in range(3)]
        with Collector(envs, guess, frames_per_batch=6) as collector:
            collector.set_seed(1)
            collector.set_seed(2)
            assert [env.resets for env in envs] == [1, 1, 1]
            collector.next()
            assert all(len(env.seeds) == 1 for env in envs)
            assert [env.resets for env in envs] == [2 + collected_ends for collected_ends in ends(envs)]

    @pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**100, np.int64(7), np.uint8(7)])
    def test_it_returns_a_seed_for_what_comes_next(self, seed):
        with Collector(Counter, frames_per_batch=4, num_envs=2) as collector:
            assert collector.set_seed(seed) == int(seed) + 1
            assert type(collector.set_seed(seed)) is int
            assert collector.set_seed(seed, static_seed=True) == int(seed)
            assert collector.set_seed([int(seed), 3]) == max(int(seed), 3) + 1
            assert collector.set_seed(seed, True) == int(seed)

    @pytest.mark.parametrize("seed", [-1, [-1, 2], [1], [1, 2, 3], []])
    def test_what_is_no_seed(self, seed):
        with Collector(Counter, frames_per_batch=4, num_envs=2) as collector:
            with pytest.raises(OptionError):
                collector.set_seed(seed)
            assert collector.next() is not None  # it stays open

    @pytest.mark.parametrize("seed", [1.5, "1", None, [1.5, 2]])
    def test_what_is_no_number(self, seed):
        with Collector(Counter, frames_per_batch=4, num_envs=2) as collector:
            with pytest.raises((OptionError, TypeError)):
                collector.set_seed(seed)
            assert collector.next() is not None

    def test_a_list_is_used_as_given(self):
        """FAULTS 102."""
        envs = [Noisy() for _ in range(3)]
        with Collector(envs, guess, frames_per_batch=30) as collector:
            collector.set_seed([11, 2**40, 11])
            batch = collector.next()
        assert [env.seeds for env in envs] == [[11], [2**40], [11]]
        assert torch.equal(batch["observation"][0], batch["observation"][2])
        assert not torch.equal(batch["observation"][0], batch["observation"][1])
        rng = np.random.default_rng(11)  # as gymnasium makes it
        rng.integers(1, 7)
        assert batch["observation"][0, 0].tolist() == rng.uniform(-1, 1, 3).astype(np.float32).tolist()

    @every_policy
    def test_a_list_fixes_the_actions_too(self, policy):
        one, other = (collected(POLICIES[policy](), seed=[3, 1, 2]) for _ in range(2))
        assert bits(one) == bits(other)
        assert not torch.equal(one["action"], collected(POLICIES[policy](), seed=[3, 1, 4])["action"])

    def test_static_seeds_give_every_lane_the_same_stream(self):
        envs = [Noisy() for _ in range(3)]
        with Collector(envs, lambda o: (o[..., 0] * 100).abs().long(), frames_per_batch=60) as collector:
            collector.set_seed(4, static_seed=True)
            batch = collector.next()
        assert len({env.seeds[0] for env in envs}) == 1
        for lane in (1, 2):
            assert torch.equal(batch["observation"][0], batch["observation"][lane])
            assert torch.equal(batch["action"][0], batch["action"][lane])

    def test_lanes_and_neighbouring_seeds_are_independent(self):
        """FAULTS 100: never `seed + i`: no lane of a seed has the stream of another lane of its neighbour."""
        seeds, first = [], []
        for seed in range(6):
            envs = [Noisy(length=None) for _ in range(4)]
            for env in envs:
                env._draw_limit = lambda: None
            with Collector(envs, guess, frames_per_batch=400) as collector:
                collector.set_seed(seed)
                batch = collector.next()
            seeds += [env.seeds[0] for env in envs]
            first += list(batch["observation"][..., 0].numpy())
        assert len(set(seeds)) == 24
        assert np.abs(np.corrcoef(first) - np.eye(24)).max() < 0.45

    def test_lanes_of_an_unseeded_collector_differ(self):
        with Collector(Noisy, guess, frames_per_batch=30, num_envs=3) as collector:
            batch = collector.next()
        for one, other in itertools.combinations(range(3), 2):
            assert not torch.equal(batch["observation"][one], batch["observation"][other])
            assert not torch.equal(batch["action"][one], batch["action"][other])

    def test_environments_do_not_get_seeds_they_were_not_given(self):
        env = Noisy()
        with Collector(env, guess, frames_per_batch=30) as collector:
            collector.next()
            assert env.seeds == []
            collector.set_seed(3)
            collector.next()
            collector.next()
        assert len(env.seeds) == 1


def ends(envs):
    return [env.resets - 2 for env in envs]


class TestTheBatchSizeIsNotPartOfTheData:
    @every_policy
    @pytest.mark.parametrize(("warmup", "lanes"), [(None, None), (None, 3), (7, 3), (20, None)])
    def test_any_cut_gives_the_same_frames(self, policy, warmup, lanes):
        """FAULTS 22, and one call of torch a step, whatever the batch."""
        wholes = [
            collected(POLICIES[policy](), batches=60 // steps, steps=steps, lanes=lanes, init_random_frames=warmup)
            for steps in (1, 6, 60)
        ]
        assert bits(wholes[0]) == bits(wholes[1]) == bits(wholes[2])

    @pytest.mark.parametrize(
        "net",
        [
            lambda: nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 2)),
            lambda: nn.Sequential(nn.GELU(), nn.Linear(17, 2)),
            lambda: nn.Sequential(nn.BatchNorm1d(17), nn.Linear(17, 2)),
        ],
        ids=["mlp", "gelu", "batch norm"],
    )
    def test_to_the_last_bit_of_what_a_network_computes(self, net):
        """Kernels round differently by how their input lies in memory, which must not depend on the batch size."""

        class Wide(Noisy):
            def __init__(self):
                super().__init__()
                self.observation_space = spaces.Box(-1, 1, (17,), np.float32)
                self.action_space = spaces.Box(-1, 1, (2,), np.float32)

            def _observe(self):
                return self.np_random.uniform(-1, 1, 17).astype(np.float32)

        wholes = []
        for steps in (1, 6, 60):
            torch.manual_seed(0)
            with Collector(Wide, net(), frames_per_batch=steps * 3, total_frames=180, num_envs=3) as collector:
                collector.set_seed(0)
                wholes.append(torch.cat(list(collector), -1))
        assert torch.equal(wholes[0]["observation"], wholes[2]["observation"])
        assert torch.equal(wholes[1]["action"], wholes[2]["action"])
        assert torch.equal(wholes[0]["action"], wholes[2]["action"])

    def test_nor_is_the_interruptor(self):
        class Stopping:
            def __init__(self):
                self.asked = 0

            def start_collection(self):
                pass

            def stop_collection(self):
                pass

            def collection_stopped(self):
                self.asked += 1
                return self.asked % 4 == 0

        whole = collected(guess, batches=1, steps=20)
        with seeded(guess, steps=20, interruptor=Stopping()) as collector:
            parts = [collector.next() for _ in range(5)]
        assert [part.shape[-1] for part in parts] == [4] * 5
        assert bits(torch.cat(parts, -1)) == bits(whole)


class Normalised(nn.Module):
    """Its buffers move with every call in train mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Dropout(0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("kept", None)

    def forward(self, observation):
        self.seen = self.seen + 1
        self.kept = observation
        return (self.inner(self.norm(observation)).sum(-1) * 100).abs().long() % 1000


class TestConstruction:
    """The probe is as if it had not been."""

    @every_policy
    def test_global_random_states_are_as_they_were(self, policy):
        made = POLICIES[policy]()
        before = global_states()
        with Collector(Noisy, made, frames_per_batch=6, num_envs=3, init_random_frames=3):
            assert global_states() == before

    def test_even_if_the_policy_draws_from_all_of_them(self):
        def policy(observation):
            torch.rand(3)
            np.random.rand(3)
            random.random()
            return guess(observation)

        before = global_states()
        with Collector(Noisy, policy, frames_per_batch=6, num_envs=3):
            assert global_states() == before

    def test_even_if_the_policy_fails(self):
        def policy(observation):
            torch.rand(3)
            np.random.rand(3)
            random.random()
            raise ZeroDivisionError

        before = global_states()
        with pytest.raises(PolicyError):
            Collector(Noisy, policy, frames_per_batch=6, num_envs=3)
        assert global_states() == before

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda net: net,
            lambda net: nn.Sequential(nn.Identity(), net),
            lambda net: TensorDictModule(net, ["observation"], ["action"]),
            lambda net: TensorDictSequential(TensorDictModule(net, ["observation"], ["action"])),
            lambda net: net.forward,
            lambda net: net.__call__,
        ],
        ids=["module", "in a module", "TensorDictModule", "chain", "its forward", "its call"],
    )
    def test_buffers_are_as_they_were(self, wrap):
        net = Normalised()
        names = dict(net.named_buffers())
        before = {name: buffer.clone() for name, buffer in names.items()}
        with Collector(Noisy, wrap(net), frames_per_batch=6, num_envs=3) as collector:
            after = dict(net.named_buffers())
            assert after.keys() == names.keys()
            assert all(torch.equal(after[name], before[name]) for name in before)
            assert all(after[name] is names[name] for name in before)  # shared ones stay shared
            assert net.kept is None
            collector.next()
            assert net.seen == 2
            assert net.norm.num_batches_tracked == 2

    def test_buffers_are_as_they_were_if_the_policy_fails(self):
        class Failing(Normalised):
            def forward(self, observation):
                super().forward(observation)
                raise ZeroDivisionError

        net = Failing()
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with pytest.raises(PolicyError):
            Collector(Noisy, net, frames_per_batch=6, num_envs=3)
        assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
        assert net.kept is None

    def test_the_first_batch_is_that_of_a_policy_that_was_never_called(self):
        """A hand-written loop over a copy of the network gives the same actions."""
        torch.manual_seed(0)
        net, reference = Normalised(), Normalised()
        net.inner[1].p = reference.inner[1].p = 0.0
        with Collector(Noisy, net, frames_per_batch=30, num_envs=3) as collector:
            batch = collector.next()
        with torch.no_grad():
            expected = torch.stack([reference(batch["observation"][:, t].contiguous()) for t in range(10)], 1)
        assert torch.equal(batch["action"], expected)
        assert torch.equal(net.norm.running_mean, reference.norm.running_mean)

    def test_gradients_are_not_touched(self):
        net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        net(torch.ones(2, 3)).sum().backward()
        before = [parameter.grad.clone() for parameter in net.parameters()]
        with Collector(Noisy, lambda o: net(o).abs().long(), frames_per_batch=6, num_envs=3) as collector:
            collector.next()
        assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


class TestExplorationType:
    """What tensordict calls the interaction type."""

    @staticmethod
    def watching(seen):
        def policy(td):
            seen.append(interaction_type())
            return td.set("action", guess(td["observation"]))

        return policy

    @pytest.mark.parametrize("kind", list(ExplorationType))
    @pytest.mark.parametrize("outside", [None, InteractionType.MODE])
    def test_the_policy_sees_the_collectors_at_construction_too(self, kind, outside):
        seen = []
        with set_interaction_type(outside), seeded(self.watching(seen), exploration_type=kind) as collector:
            assert interaction_type() is outside
            collector.next()
            assert interaction_type() is outside
            collector.rollout()
            assert interaction_type() is outside
        assert set(seen[1:]) == {kind}
        assert seen[0] is kind  # what the probe learns holds for what follows

    def test_it_is_random_by_default(self):
        seen = []
        with seeded(self.watching(seen)) as collector:
            collector.next()
        assert set(seen[1:]) == {ExplorationType.RANDOM}

    @pytest.mark.parametrize("where", ["policy", "environment"])
    def test_the_process_wide_setting_comes_back_after_an_exception(self, where):
        class Failing(Noisy):
            def step(self, action):
                if where == "environment" and self.steps == 3:
                    raise ZeroDivisionError
                return super().step(action)

        calls = []

        def policy(observation):
            calls.append(1)
            if where == "policy" and len(calls) == 4:
                raise ZeroDivisionError
            return guess(observation)

        with set_interaction_type(InteractionType.MEDIAN):
            with Collector(Failing, policy, frames_per_batch=10) as collector, pytest.raises(ZeroDivisionError):
                collector.next()
            assert interaction_type() is InteractionType.MEDIAN
            assert torch.is_grad_enabled()

    @pytest.mark.parametrize("kind", [ExplorationType.MODE, ExplorationType.DETERMINISTIC, ExplorationType.RANDOM])
    def test_an_actor_acts_by_it(self, kind):
        with seeded(actor(), exploration_type=kind) as collector:
            batch = collector.next()
        best = batch["logits"].argmax(-1)
        assert torch.equal(batch["action"], best) == (kind is not ExplorationType.RANDOM)

    def test_what_can_only_be_sampled_is_probed_by_sampling(self):
        """A distribution without a mode, made where the process-wide type asks for one."""

        class OnlySamples(torch.distributions.Categorical):
            @property
            def mode(self):
                raise NotImplementedError

            deterministic_sample = mode

        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(nn.Linear(3, 1000), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=OnlySamples),
        )
        with set_interaction_type(InteractionType.MODE), seeded(policy) as collector:
            collector.next()


class TestModesAreLeftAlone:
    @pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True), (False, False)])
    def test_train_and_eval(self, modes):
        """FAULTS 85."""
        net, seen = nn.Sequential(Normalised(), nn.Identity()), []
        net.train(modes[0])
        net[0].inner.train(modes[1])
        before = [module.training for module in net.modules()]
        net[0].norm.register_forward_hook(lambda *_: seen.append([module.training for module in net.modules()]))
        with seeded(net) as collector:
            collector.next()
            assert [module.training for module in net.modules()] == before
        assert seen == [before] * 6

    def test_dropout_drops_in_train_mode_only(self):
        net = Dropping()
        assert len(collected(net)["action"].unique()) > 5
        assert (collected(net.eval())["action"] == 511).all()

    def test_statistics_move_in_train_mode_only_once_a_step(self):
        net = Normalised()
        collected(net, batches=3)
        assert net.norm.num_batches_tracked == 15
        net.eval()
        mean = net.norm.running_mean.clone()
        collected(net, batches=3)
        assert net.norm.num_batches_tracked == 15
        assert torch.equal(net.norm.running_mean, mean)

    def test_changing_the_mode_between_batches_is_seen(self):
        net = Dropping()
        with seeded(net) as collector:
            collector.next()
            net.eval()
            assert (collector.next()["action"] == 511).all()
            net.train()
            assert (collector.next()["action"] != 511).any()


class TestGradients:
    @pytest.mark.parametrize("outside", [True, False])
    def test_collection_runs_without_and_restores(self, outside):
        seen = []
        net = nn.Linear(3, 1)

        def policy(td):
            seen.append(torch.is_grad_enabled())
            td["value"] = net(td["observation"])
            assert not td["value"].requires_grad
            return td.set("action", guess(td["observation"]))

        with torch.set_grad_enabled(outside), seeded(policy) as collector:
            assert torch.is_grad_enabled() is outside
            batch = collector.next()
            assert torch.is_grad_enabled() is outside
        assert set(seen) == {False}
        assert not any(value.requires_grad for value in batch.values(True, True))
        assert not any(value.is_inference() for value in batch.values(True, True))

    def test_batches_can_be_learned_from(self):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        with seeded(lambda o: guess(o)) as collector:  # noqa: PLW0108
            batch = collector.next()
        net(batch["observation"]).sum().backward()
        assert net.weight.grad is not None

    def test_inside_of_inference_mode(self):
        """An evaluation loop may be in inference mode; what comes is as usual."""
        with seeded(nn.Sequential(nn.Linear(3, 2), Last())) as collector:
            collector.next()
            with torch.inference_mode():
                inside = collector.next()
            outside = collector.next()
        check_batch(outside, previous=inside)


class Last(nn.Module):
    def forward(self, x):
        return (x[..., -1] * 100).abs().long() % 1000
