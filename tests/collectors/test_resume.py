"""A state that is saved and loaded: episodes under way go on, bit for bit, or are cut; and any can be played again."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import signal
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from rlcollect import AsyncCollector, Collector, MultiSyncCollector, OptionError, WorkerRestarted
from rlcollect.testing import Counter, Tagged, check_batch

pytestmark = pytest.mark.timeout(120)
FRAMES, TOTAL = 240, 20_160


class Stochastic(nn.Module):
    """Draws its actions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, observation):
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


class Greedy(Stochastic):
    def forward(self, observation):
        return self.net(observation).argmax(-1)


class Recurrent(nn.Module):
    """Has state of its own, which its draws depend on."""

    in_keys = ("observation", "hidden")
    out_keys = ("action", ("next", "hidden"))

    def forward(self, tensordict):
        hidden = 0.9 * tensordict["hidden"] + tensordict["observation"]
        chance = torch.sigmoid(hidden.sum(-1))
        tensordict["action"] = (torch.rand(chance.shape) < chance).long()
        tensordict["next", "hidden"] = hidden
        return tensordict


class Greedy4(nn.Module):
    """For `Walk`: looks at nothing that is random."""

    def forward(self, at):
        return (at.sum(-1) > 0).long()


class Unknown(gym.Wrapper):
    """A wrapper that nobody knows: what it does next cannot be told."""


class Walk(gym.Env):
    """A random walk that says itself what it does next; its observation is a Dict."""

    observation_space = spaces.Dict({"at": spaces.Box(-np.inf, np.inf, (2,), np.float64), "t": spaces.Discrete(1000)})
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.at, self.t = np.zeros(2), 0

    def _shown(self):
        return {"at": self.at.copy(), "t": self.t}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = self.np_random.normal(size=2), 0
        return self._shown(), {}

    def step(self, action):
        self.at = self.at + self.np_random.normal(size=2) + action
        self.t += 1
        return self._shown(), float(self.at[0]), bool(self.np_random.random() < 0.05), False, {}

    def get_state(self):
        return {"at": self.at.copy(), "t": self.t, "generator": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.at, self.t = state["at"].copy(), state["t"]
        self.np_random.bit_generator.state = state["generator"]


class Breaking(Walk):
    """A Ctrl-C comes in one of its steps."""

    breaks_at = -1
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.breaks_at:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


class Forgetful(Counter):
    """Shows something random that its own generator knows nothing of."""

    def _observe(self):
        return super()._observe() + np.random.random()


def unknown():
    return Unknown(gym.make("CartPole-v1"))


def digest(batch):
    """Of every key of a batch."""
    sums = hashlib.sha256()
    for key, value in sorted(batch.items(include_nested=True, leaves_only=True), key=str):
        sums.update(str(key).encode() + str(value.dtype).encode() + value.contiguous().numpy().tobytes())
    return sums.hexdigest()


def digests(collector, count=None):
    found = []
    while (count is None or len(found) < count) and (batch := collector.next()) is not None:
        found.append(digest(batch))
    return found


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def halves(make, before=5, after=6):
    """Digests of a collection that is never stopped, and of one that is saved and loaded."""
    with make() as collector:
        collector.set_seed(7)
        whole = digests(collector, before + after)
    with make() as collector:
        collector.set_seed(7)
        first = digests(collector, before)
        state = through_a_file(collector.state_dict())
    with make() as collector:
        digests(collector, 1)
        collector.load_state_dict(state)
        return whole, first + digests(collector, after)


WRAPPED = {"num_envs": 2, "seed_per_episode": True}  # what the first reset showed is in its statistics
SINGLE = {
    "cartpole": ("CartPole-v1", Stochastic, {"num_envs": 3}),
    "one lane": ("CartPole-v1", Stochastic, {}),
    "lanes of a list": (["CartPole-v1", lambda: gym.make("CartPole-v1", max_episode_steps=9)], Stochastic, {}),
    "random": ("CartPole-v1", lambda: None, {"num_envs": 3}),
    "a warm-up": ("CartPole-v1", Stochastic, {"num_envs": 3, "init_random_frames": 450}),
    "a limit": ("CartPole-v1", Stochastic, {"num_envs": 3, "max_frames_per_traj": 11}),
    "recurrent": (
        "CartPole-v1",
        Recurrent,
        {"num_envs": 3, "initial_policy_state": {"hidden": torch.zeros(4)}, "record": ("is_init",)},
    ),
    "with get_state": (Walk, lambda: None, {"num_envs": 3}),
    "wrapped": (lambda: gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1")), lambda: None, WRAPPED),
    "replayed": (unknown, Stochastic, {"num_envs": 3, "resume": "replay"}),
    "replayed with a limit": (unknown, Stochastic, {"num_envs": 3, "resume": "replay", "max_frames_per_traj": 11}),
    "replayed with seeds": (unknown, Stochastic, {"num_envs": 3, "resume": "replay", "seed_per_episode": True}),
    "reset options": (
        unknown,
        Stochastic,
        {"num_envs": 3, "resume": "replay", "reset_options": lambda lane, episode, info: {"low": -0.01 * (lane + 1)}},
    ),
    "whole episodes": (
        "CartPole-v1",
        Stochastic,
        {"num_envs": 3, "trajs_per_batch": 7, "traj_format": "cat", "frames_per_batch": 60},
    ),
}


class TestBitForBit:
    """FAULTS 105 - 107: what comes after a load is what would have come."""

    @pytest.mark.parametrize("case", SINGLE)
    def test_in_one_process(self, case):
        source, policy, options = SINGLE[case]
        whole, resumed = halves(lambda: Collector(source, policy(), **{"frames_per_batch": FRAMES, **options}))
        assert resumed == whole
        assert len({*whole}) == len(whole)

    @pytest.mark.parametrize(
        "case",
        [
            *("recurrent", "with get_state", "replayed with seeds"),
            *(pytest.param(case, marks=pytest.mark.slow) for case in ("cartpole", "a warm-up")),
        ],
    )
    def test_in_sync_workers(self, case):
        source, policy, options = SINGLE[case]
        options = {"frames_per_batch": 120, **options}
        whole, resumed = halves(lambda: MultiSyncCollector([source] * 2, policy(), **options), 3, 4)
        assert resumed == whole

    def test_whole_episodes_of_sync_workers(self):
        options = {"trajs_per_batch": 9, "traj_format": "cat", "num_envs": 2, "frames_per_batch": 64}
        whole, resumed = halves(lambda: MultiSyncCollector(["CartPole-v1"] * 2, Stochastic(), **options))
        assert resumed == whole

    def test_in_an_async_worker_each_sequence_goes_on(self):
        """A worker's own rollouts are those that would have come: nothing is published."""
        whole, resumed = halves(lambda: AsyncCollector("CartPole-v1", Stochastic(), frames_per_batch=120), 3, 4)
        assert resumed == whole

    def test_globals_of_workers_go_on(self):
        """Environments that draw from `random`, numpy and torch themselves."""

        class Drawing(Walk):
            def step(self, action):
                shown, reward, *rest = super().step(action)
                return shown, reward + np.random.random() + float(torch.rand(())), *rest

        whole, resumed = halves(lambda: MultiSyncCollector([Drawing] * 2, None, frames_per_batch=40))
        assert resumed == whole

    def test_generators_of_a_policy_go_on(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.generator = torch.Generator().manual_seed(3)

            def forward(self, observation):
                return torch.randint(2, observation.shape[:-1], generator=self.generator)

        whole, resumed = halves(lambda: Collector("CartPole-v1", Own(), frames_per_batch=40, num_envs=2))
        assert resumed == whole

    def test_ids_counts_and_returns_go_on(self):
        def make():
            return Collector("CartPole-v1", Stochastic(), frames_per_batch=FRAMES, num_envs=3, record=("episode",))

        with make() as collector:
            collector.set_seed(7)
            batches = [collector.next().clone()]
            state = collector.state_dict()
        with make() as collector:
            collector.load_state_dict(state)
            batches += [collector.next().clone() for _ in range(3)]
            stats = collector.stats()
        joined = torch.cat(batches, -1)
        check_batch(joined)
        ids, numbers, done = joined["collector", "traj_ids"], joined["collector", "episode"], joined["next", "done"]
        assert (ids[:, 1:] != ids[:, :-1]).equal(done[:, :-1, 0]), "no cut"
        assert (numbers[:, 1:] - numbers[:, :-1]).equal(done[:, :-1, 0].long())
        lengths = [end - start for lane in done[..., 0] for start, end in _between(lane)]
        assert stats.episodes == len(lengths)
        assert stats.episode_length.max == max(lengths)


def _between(ended):
    ends = ended.nonzero().flatten().tolist()
    return zip([-1, *ends[:-1]], ends, strict=True) if ends else []


def _collect_and_die(kind, source, options, path, sender):
    """Saves half-way, and is killed while it goes on."""
    torch.set_num_threads(1)
    with kind(source, Stochastic(), **options) as collector:
        collector.set_seed(11)
        found = digests(collector, TOTAL // FRAMES // 2)
        torch.save(collector.state_dict(), path)
        sender.send(found)
        collector.next()
        os.kill(os.getpid(), signal.SIGKILL)


class TestKilled:
    @pytest.mark.parametrize(
        ("kind", "source"),
        [
            (Collector, "CartPole-v1"),
            pytest.param(MultiSyncCollector, ["CartPole-v1"] * 2, marks=pytest.mark.slow),
        ],
    )
    def test_hashes_of_20_000_frames_are_those_of_a_collection_that_was_not(self, kind, source, tmp_path):
        path = tmp_path / "state.pt"
        options = {"frames_per_batch": FRAMES, "total_frames": TOTAL, "num_envs": 2}
        if kind is MultiSyncCollector:
            options["start_method"] = "fork"
        receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")  # quicker by an interpreter
        process = context.Process(target=_collect_and_die, args=(kind, source, options, path, sender))
        process.start()
        sender.close()
        with kind(source, Stochastic(), **options) as collector:
            collector.set_seed(11)
            whole = digests(collector)
        assert receiver.poll(100)
        first = receiver.recv()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        with kind(source, Stochastic(), **options) as collector:
            collector.load_state_dict(torch.load(path, weights_only=True))
            rest = digests(collector)
            assert collector.collected_frames == TOTAL
        assert len(whole) == TOTAL // FRAMES
        assert first + rest == whole


class TestCuts:
    def cut_lanes(self, source, **options):
        """Whether each lane begins a new episode after a load."""
        with Collector(source, None, frames_per_batch=30, **options) as collector:
            last = collector.next().clone()
            state = collector.state_dict()
        with Collector(source, None, frames_per_batch=30, **options) as collector:
            collector.load_state_dict(state)
            first = collector.next()
        check_batch(torch.cat([last, first], -1))
        same = last["collector", "traj_ids"][..., -1] == first["collector", "traj_ids"][..., 0]
        ended = last["next", "done"][..., -1, 0]
        return (~same & ~ended).tolist(), ended.tolist()

    @pytest.mark.parametrize(
        ("source", "options"),
        [
            (unknown, {}),
            (lambda: Counter(100), {}),
            ("CartPole-v1", {"resume": "cut"}),
            (unknown, {"resume": "cut"}),
        ],
        ids=["unknown", "probe", "asked for", "unknown, asked for"],
    )
    def test_where_nothing_can_be_told_or_nothing_is_wanted(self, source, options):
        cut, ended = self.cut_lanes(source, num_envs=2, **options)
        assert [each or over for each, over in zip(cut, ended, strict=True)] == [True, True]
        assert any(cut)

    def test_lane_by_lane(self):
        cut, _ = self.cut_lanes([Walk, lambda: Unknown(Walk()), Walk])
        assert [cut[0], cut[2]] == [False, False]

    def test_of_what_shows_something_else_when_it_is_played_again(self):
        with Collector(lambda: Forgetful(100), None, frames_per_batch=10, resume="replay") as collector:
            collector.next()
            state = collector.state_dict()
        with Collector(lambda: Forgetful(100), None, frames_per_batch=10, resume="replay") as collector:
            with pytest.warns(UserWarning, match="Lane 0 showed other observations"):
                collector.load_state_dict(state)
            assert int(collector.next()["observation"][0]) == 0, "a new episode"

    def test_of_what_was_due_anyway(self):
        """A seed that waited for the next batch is used."""
        with Collector("CartPole-v1", None, frames_per_batch=30, num_envs=2) as collector:
            collector.next()
            collector.set_seed(5)
            state = collector.state_dict()
            expected = digest(collector.next())
        with Collector("CartPole-v1", None, frames_per_batch=30, num_envs=2) as collector:
            collector.load_state_dict(state)
            assert digest(collector.next()) == expected

    def test_of_environments_of_another_kind(self):
        """What cannot be put back is cut, and not an error."""
        with Collector(lambda: gym.make("CartPole-v1"), None, frames_per_batch=30) as collector:
            collector.next()
            state = collector.state_dict()
        with Collector(unknown, None, frames_per_batch=30) as collector:
            collector.load_state_dict(state)
            batch = collector.next()
        assert batch["observation"][0].abs().max() <= 0.05, "as CartPole begins"

    def test_nothing_is_kept_where_nobody_asked(self):
        with Collector(unknown, None, frames_per_batch=30) as collector:
            collector.next()
            assert collector.state_dict()["open"]["episodes"] == {}


class TestRefused:
    @pytest.mark.parametrize("option", [{"resume": "replay"}, {"seed_per_episode": True}], ids=str)
    def test_vector_environments(self, option):
        envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        with pytest.raises(OptionError, match="hold one lane each"):
            Collector(envs, None, frames_per_batch=10, **option)
        envs.close()

    def test_another_word(self):
        with pytest.raises(OptionError, match='"state", "replay" or "cut"'):
            Collector(Walk, None, frames_per_batch=10, resume="exact")


class TestSeedPerEpisode:
    """Each episode's seed is a function of (seed, worker, lane, episode)."""

    def first_shown(self, seed=3, **options):
        """What each episode begins with, by lane and number."""
        with Collector(
            Walk, None, frames_per_batch=FRAMES, seed_per_episode=True, record=("episode",), **options
        ) as made:
            made.set_seed(seed)
            batch = made.next()
        starts = (batch["t"] == 0).nonzero().tolist()
        return {
            (lane, int(batch["collector", "episode"][lane, t])): tuple(batch["at"][lane, t].tolist())
            for lane, t in starts
        }

    def test_no_two_episodes_are_alike(self):
        shown = self.first_shown(num_envs=3)
        assert len(shown) > 4
        assert len({*shown.values()}) == len(shown)

    def test_the_same_seed_gives_the_same_whatever_was_done_in_between(self):
        """The policy is another one, and so are the lengths of episodes; what they begin with is not."""
        one, other = self.first_shown(num_envs=3), self.first_shown(num_envs=3, max_frames_per_traj=5)
        shared = {*one} & {*other}
        assert len(shared) > 3
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}
        assert {*self.first_shown(4, num_envs=3).values()}.isdisjoint(one.values())

    def test_a_seed_given_to_reset_wins(self):
        env = Tagged(4)
        with Collector(env, None, frames_per_batch=6, seed_per_episode=True) as collector:
            collector.next()
            collector.reset(seed=99)
            assert env.last_seed == 99
            collector.next()
            assert env.last_seed != 99

    def test_a_static_seed_is_the_same_for_every_lane(self):
        with Collector(Walk, None, frames_per_batch=8, seed_per_episode=True, num_envs=2) as collector:
            collector.set_seed(1, static_seed=True)
            batch = collector.next()
        assert batch["at"][0, 0].equal(batch["at"][1, 0])


def episodes_of(batch):
    """The whole episodes of a batch `[N, T]`, as (lane, number, rows)."""
    numbers, done = batch["collector", "episode"], batch["next", "done"][..., 0]
    for lane in range(len(numbers)):
        for number in numbers[lane].unique().tolist()[1:]:
            rows = (numbers[lane] == number).nonzero().flatten()
            if done[lane, rows[-1]]:
                yield lane, number, rows


class TestReplay:
    def check(self, collector, batch, worker=0):
        count = 0
        for lane, number, rows in episodes_of(batch):
            again = collector.replay(worker, lane, number)
            check_batch(again)
            for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
                assert again[key][0].equal(batch[key][lane, rows]), key
            count += 1
            if count == 3:
                return
        assert count

    @pytest.mark.parametrize("source", ["CartPole-v1", unknown], ids=["known", "unknown"])
    def test_any_episode_is_the_same_again(self, source):
        options = {"frames_per_batch": 120, "num_envs": 2, "seed_per_episode": True, "record": ("episode",)}
        with Collector(source, Greedy(), **options) as collector:
            self.check(collector, collector.next().clone())
            collector.set_seed(5)
            collector.next()
            batch = collector.next().clone()
            self.check(collector, batch)
            frames = collector.collected_frames
            assert collector.next() is not None
            assert collector.collected_frames == frames + 120

    def test_of_a_worker_process(self):
        options = {"frames_per_batch": 160, "num_envs": 2, "seed_per_episode": True, "record": ("episode",)}
        with MultiSyncCollector(["CartPole-v1"] * 2, Greedy(), **options) as collector:
            collector.set_seed(2)
            batch = collector.next().clone()
            for worker in (0, 1):
                self.check(collector, batch[worker], worker)

    def test_after_a_load(self):
        options = {"frames_per_batch": 120, "num_envs": 2, "seed_per_episode": True, "record": ("episode",)}
        with Collector("CartPole-v1", Greedy(), **options) as collector:
            collector.set_seed(5)
            state = collector.state_dict()
            batch = collector.next().clone()
        with Collector("CartPole-v1", Greedy(), **options) as collector:
            collector.load_state_dict(state)
            self.check(collector, batch)

    def test_it_may_be_broken_off(self):
        with Collector(lambda: Counter(None), None, frames_per_batch=4, seed_per_episode=True) as collector:
            batch = collector.replay(0, 0, 3, max_frames=300)
            assert batch["observation"].flatten().tolist() == list(range(300))

    def test_what_raises_leaves_the_collector_open(self):
        class Once(Counter):
            made = 0

            def __init__(self):
                super().__init__(5)
                Once.made += 1
                self.number = Once.made

            def step(self, action):
                if self.number > 1:
                    raise ValueError("only once")
                return super().step(action)

        with Collector(Once, None, frames_per_batch=4, seed_per_episode=True) as collector:
            with pytest.raises(ValueError, match="only once"):
                collector.replay(0, 0, 0)
            assert collector.next() is not None

    @pytest.mark.parametrize("wrong", [(1, 0, 0), (0, 1, 0), (0, 0, -1), (-1, 0, 0)], ids=str)
    def test_numbers_that_there_are_not(self, wrong):
        with Collector(Walk, None, frames_per_batch=4, seed_per_episode=True) as collector:
            with pytest.raises(OptionError, match="replay"):
                collector.replay(*wrong)
            assert collector.next() is not None

    @pytest.mark.parametrize(
        ("source", "options", "text"),
        [(Walk, {}, "seed_per_episode=True"), (Walk(), {"seed_per_episode": True}, "instance")],
        ids=["without seeds", "an instance"],
    )
    def test_what_cannot_be_run_again(self, source, options, text):
        with Collector(source, None, frames_per_batch=4, **options) as collector:
            with pytest.raises(OptionError, match=text):
                collector.replay(0, 0, 0)
            assert collector.next() is not None


class TestEpisodeNumbers:
    """`record=("episode",)`: the number of a frame's episode in its lane."""

    def test_they_count_ends_and_cuts(self):
        with Collector(lambda: Counter(3), None, frames_per_batch=16, num_envs=2, record=("episode",)) as collector:
            first = collector.next().clone()
            collector.reset(0)
            second = collector.next().clone()
        assert first["collector", "episode"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]] * 2
        assert second["collector", "episode"].tolist() == [[3, 3, 3, 4, 4, 4, 5, 5], [2, 3, 3, 3, 4, 4, 4, 5]]

    def test_where_steps_are_no_frames(self):
        """NEXT_STEP environments, on the scratch path."""
        envs = gym.vector.SyncVectorEnv([lambda: Counter(3), lambda: Counter(5)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Collector(envs, None, frames_per_batch=16, record=("episode",), masked_reset=False) as collector:
                batches = [collector.next().clone() for _ in range(3)]
        envs.close()
        joined = torch.cat(batches, -1)
        for lane, length in enumerate((3, 5)):
            valid = joined["collector", "mask"][lane]
            numbers = joined["collector", "episode"][lane][valid]
            assert numbers.tolist() == [t // length for t in range(len(numbers))]


class Interrupted(Walk):
    """Its state can be put back only once the key is let go."""

    is_pressed = False

    def set_state(self, state):
        if Interrupted.is_pressed:
            raise KeyboardInterrupt
        super().set_state(state)


class Lasting(Walk):
    """Pays by what nobody sees: how many episodes it has had."""

    count = 0

    def reset(self, **kwargs):
        self.count += 1
        return super().reset(**kwargs)

    def step(self, action):
        shown, _, *rest = super().step(action)
        return shown, float(self.count), *rest

    get_state = set_state = None


class TestWhatAReviewFound:
    def test_a_load_that_is_broken_off_closes(self):
        """It would be neither what it was nor what the state says."""
        with Collector([Walk, Interrupted], None, frames_per_batch=8) as collector:
            collector.next()
            state = collector.state_dict()
            Interrupted.is_pressed = True
            try:
                with pytest.raises(BaseException):  # noqa: B017 - the one that is raised, or its WorkerError
                    collector.load_state_dict(state)
            finally:
                Interrupted.is_pressed = False
            assert collector.closed

    def test_an_engine_that_is_loaded_in_part_begins_new_episodes(self):
        with Collector([Walk, Interrupted], None, frames_per_batch=8) as collector:
            collector.next()
            engine, state = collector._worker.engine, collector._worker.engine.state_dict()
            Interrupted.is_pressed = True
            try:
                with pytest.raises(KeyboardInterrupt):
                    engine.load_state_dict(state)
            finally:
                Interrupted.is_pressed = False
            assert (collector.next()["t"][:, 0] == 0).all()

    def test_numbers_stay_with_seeds_whatever_was_lost(self):
        """A rollout that a Ctrl-C broke off had begun episodes; those that are recorded can be replayed."""
        env = Breaking()
        with Collector(
            lambda: env, Greedy4(), frames_per_batch=40, seed_per_episode=True, record=("episode",)
        ) as collector:
            collector.next()
            env.breaks_at = env.steps + 25
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batch = collector.next().clone()
            numbers = batch["collector", "episode"].unique().tolist()
            for number in numbers[:-1]:
                rows = batch["collector", "episode"] == number
                again = collector.replay(0, 0, number)
                assert again["next", "at"].equal(batch["next", "at"][rows])

    def test_a_worker_that_is_replaced_repeats_no_number(self):
        options = {"frames_per_batch": 60, "seed_per_episode": True, "record": ("episode",)}
        with MultiSyncCollector([Walk], None, on_worker_failure="restart", timeout=60, **options) as collector:
            before = collector.next()["collector", "episode"].unique().tolist()
            (pid,) = collector.map_fn(lambda envs: os.getpid())
            os.kill(pid, signal.SIGKILL)
            with pytest.warns(WorkerRestarted):
                after = collector.next()["collector", "episode"].unique().tolist()
            assert min(after) > max(before)
            with pytest.raises(OptionError, match="not known any more"):
                collector.replay(0, 0, before[0])

    def test_what_lasts_over_episodes_is_noticed_when_one_is_played_again(self):
        options = {"frames_per_batch": 50, "resume": "replay"}
        with Collector(Lasting, None, **options) as collector:
            collector.set_seed(1)
            collector.next()
            state = collector.state_dict()
        with (
            Collector(Lasting, None, **options) as collector,
            pytest.warns(UserWarning, match="other observations"),
        ):
            collector.load_state_dict(state)

    def test_replay_leaves_the_policy_alone(self):
        class Counting(Greedy):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, observation):
                self.calls += 1
                return super().forward(observation)

        with Collector("CartPole-v1", Counting(), frames_per_batch=8, num_envs=2, seed_per_episode=True) as collector:
            collector.next()
            calls = int(collector.policy.calls)
            collector.replay(0, 0, 0)
            assert int(collector.policy.calls) == calls > 0

    def test_replay_steps_no_further_than_the_end(self):
        made = []

        def make():
            made.append(Counter(5))
            return made[-1]

        with Collector(make, None, frames_per_batch=4, seed_per_episode=True) as collector:
            assert collector.replay(0, 0, 2)["observation"].flatten().tolist() == [0, 1, 2, 3, 4]
        assert made[-1].steps == 5
        assert made[-1].closed == 1

    def test_replay_of_what_was_given_a_seed_is_refused(self):
        with Collector(Walk, None, frames_per_batch=4, seed_per_episode=True) as collector:
            collector.reset(seed=77)
            with pytest.raises(OptionError, match="not known any more"):
                collector.replay(0, 0, 1)
            with pytest.raises(OptionError, match="max_frames"):
                collector.replay(0, 0, 0, max_frames=0)

    @pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
    def test_replay_of_a_policy_that_a_factory_makes(self, kind):
        options = {"policy_factory": Greedy, "frames_per_batch": 80, "num_envs": 2, "record": ("episode",)}
        source = "CartPole-v1" if kind is Collector else ["CartPole-v1"]
        with kind(source, None, seed_per_episode=True, **options) as collector:
            collector.set_seed(3)
            with torch.no_grad():
                weights = {name: -tensor for name, tensor in Greedy().state_dict().items()}
            collector.update_policy_weights_(weights)
            batch = collector.next().clone()
            TestReplay().check(collector, batch if kind is Collector else batch[0])

    def test_replay_of_lanes_that_are_made_at_once_is_refused(self):
        def make():
            return gym.vector.SyncVectorEnv([Walk] * 2)

        with Collector(make, None, frames_per_batch=8, seed_per_episode=True) as collector:
            with pytest.raises(OptionError, match="made at once"):
                collector.replay(0, 1, 0)
            assert collector.next() is not None

    def test_numbers_of_a_state_that_had_no_seeds(self):
        with Collector(Walk, None, frames_per_batch=200, record=("episode",)) as collector:
            last = int(collector.next()["collector", "episode"][-1])
            state = collector.state_dict()
        with Collector(Walk, Greedy4(), frames_per_batch=200, record=("episode",), seed_per_episode=True) as collector:
            collector.load_state_dict(state, strict=False)
            batch = collector.next().clone()
            numbers = batch["collector", "episode"]
            assert int(numbers[0]) in (last, last + 1)
            with pytest.raises(OptionError, match="not known any more"):
                collector.replay(0, 0, last)
            number = int(numbers[-1]) - 1
            again = collector.replay(0, 0, number)
            assert again["next", "at"].equal(batch["next", "at"][numbers == number])

    def test_an_episode_that_is_too_long_to_be_played_again_is_cut(self, monkeypatch):
        monkeypatch.setattr("rlcollect.envs.journal.LONGEST", 50)
        with Collector(lambda: Counter(None), None, frames_per_batch=40, resume="replay") as collector:
            for is_kept in (True, True, False, False):
                collector.next()
                assert bool(collector.state_dict()["open"]["episodes"]) is is_kept

    def test_methods_of_that_name_that_are_others_are_not_asked(self):
        class Other(Counter):
            def get_state(self):
                return 1

            def set_state(self, qpos, qvel):
                raise AssertionError

        with Collector(Other, None, frames_per_batch=4) as collector:
            collector.next()
            state = collector.state_dict()
            assert state["open"]["episodes"] == {}
            collector.load_state_dict(state)
            assert collector.next() is not None

    def test_a_state_of_another_policy_cuts(self):
        options = {"frames_per_batch": 20, "num_envs": 2}
        with Collector("CartPole-v1", None, **options) as collector:
            collector.next()
            state = collector.state_dict()
        recurrent = {"initial_policy_state": {"hidden": torch.zeros(4)}}
        with Collector("CartPole-v1", Recurrent(), **options, **recurrent) as collector:
            collector.load_state_dict(state, strict=False)
            assert (collector.next()["observation"][:, 0].abs() <= 0.05).all()

    def test_a_get_state_that_fails_leaves_it_open(self):
        class Fails(Walk):
            def get_state(self):
                raise ValueError("not now")

        with Collector(Fails, None, frames_per_batch=4) as collector:
            collector.next()
            with pytest.raises(ValueError, match="not now"):
                collector.state_dict()
            assert collector.next() is not None

    def test_an_error_of_a_worker_that_is_built_closes_its_environments(self):
        made = []

        class Fails(Counter):
            def __init__(self):
                super().__init__()
                made.append(self)

            def state_dict(self):
                raise ValueError("no state")

        with pytest.raises(ValueError, match="no state"):
            Collector([Fails, Fails], None, frames_per_batch=4)
        assert [env.closed for env in made] == [1, 1]

    def test_a_shutdown_that_was_broken_off_can_be_done_again(self, monkeypatch):
        made = []

        def make():
            made.append(Counter())
            return made[-1]

        collector = Collector(make, None, frames_per_batch=4)

        def pressed():
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(collector._ending, "close", pressed)
            with pytest.raises(KeyboardInterrupt):
                collector.shutdown()
        collector.shutdown()
        collector.shutdown()
        assert made[-1].closed == 1

    def test_states_of_environments_are_no_views(self):
        class Live(Counter):
            def __init__(self):
                super().__init__()
                self.kept = np.zeros(2)

            def step(self, action):
                self.kept += 1
                return super().step(action)

            def state_dict(self):
                return {"kept": self.kept}

            def load_state_dict(self, state):
                self.kept = state["kept"]

        with Collector(Live, None, frames_per_batch=4) as collector:
            state = collector.state_dict()
            collector.next()
            assert state["env_state_dict"]["0"]["env"]["kept"].tolist() == [0, 0]


def test_the_form_of_a_state_is_plain():
    """Everything in it is what `torch.load(weights_only=True)` takes, and a TensorDict is none of it."""
    with Collector(Walk, None, frames_per_batch=30, num_envs=2, trajs_per_batch=2) as collector:
        collector.next()
        state = collector.state_dict()
    assert not _tensordicts(state)
    through_a_file(state)


def _tensordicts(value):
    if isinstance(value, TensorDict):
        return [value]
    if isinstance(value, dict):
        return [found for part in value.values() for found in _tensordicts(part)]
    if isinstance(value, list | tuple):
        return [found for part in value for found in _tensordicts(part)]
    return []
