"""`Assembly` and what it is made of: held against a plain loop over single frames, on whatever batches may come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from rlcollect.errors import EnvError
from rlcollect.memory.assembly import TIDY, Assembly
from rlcollect.memory.episodes import Episode, Source
from rlcollect.memory.gathering import LARGE, Cat, Form, Gathering, Nested, Padded
from rlcollect.memory.orders import ByStart, ByTurns

IDS, DONE, MASK = ("collector", "traj_ids"), ("next", "done"), ("collector", "mask")
WIDE = LARGE // 4  # floats that make a frame a large one

# --- a plain loop over frames -----------------------------------------------------------------------------------------


@dataclass
class Told:
    """An episode, by the numbers of its frames."""

    lane: int
    id: int
    frames: list[int] = field(default_factory=list)
    is_whole: bool = False
    is_wanted: bool = True


class Plainly:
    """What `Assembly` promises, frame after frame."""

    def __init__(self, lanes: int, quota: int | None) -> None:
        self.quota = quota
        self.turns = [0] * lanes
        self.turn = 0
        self.admitted: list[Told] = []
        self.open: dict[int, Told] = {}
        self.dropped: list[int] = []

    def frame(self, lane: int, identity: int, number: int, done: bool) -> None:
        if (episode := self.open.get(lane)) is None or episode.id != identity:
            if episode is not None:
                self.dropped += episode.frames
                self.admitted = [each for each in self.admitted if each is not episode]
            episode = self.open[lane] = Told(lane, identity)
            waiting = sum(each.lane == lane for each in self.admitted)
            episode.is_wanted = self.quota is None or waiting < self.quota
            self.admitted += [episode] if episode.is_wanted else []
        episode.frames.append(number)
        if done:
            episode.is_whole = True
            del self.open[lane]
            self.dropped += [] if episode.is_wanted else episode.frames

    def next(self, count: int) -> list[list[int]] | None:
        """The next episodes, if so many are whole."""
        left, turn, chosen = list(self.admitted), self.turn, []
        for _ in range(count):
            found = [each for each in left if self.quota is None or each.lane == turn]
            if not found or not found[0].is_whole:
                return None
            chosen.append(found[0])
            left = [each for each in left if each is not found[0]]
            turn = (turn + 1) % len(self.turns)
        self.admitted, self.turn = left, turn
        return [each.frames for each in chosen]

    @property
    def waiting(self) -> list[int]:
        skipped = [each for each in self.open.values() if not each.is_wanted]
        return sorted(number for each in (*self.admitted, *skipped) for number in each.frames)


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """What lanes do at each step: "." a frame, "d" the last of an episode, "c" the first of another, "-" no frame."""

    lanes: tuple[int, ...]
    events: tuple[str, ...]


class World:
    """Makes batches, whose frames are numbered in the order of time, and tells a plain loop of each frame."""

    def __init__(self, lanes: int, lead: int = 1, *, is_strange: bool = False) -> None:
        self.ids = list(range(lanes))
        self.lead = lead
        self.is_strange = is_strange
        self.frames = 0

    def new_id(self, lane: int) -> None:
        self.ids[lane] = max(self.ids) + 1

    def batch(self, rollout: Rollout, plainly: Plainly) -> TensorDict:
        shape = len(rollout.lanes), len(rollout.events[0])
        number, ids = np.zeros(shape, np.int64), np.full(shape, -1)
        done, mask = np.ones(shape, bool), np.zeros(shape, bool)
        for t in range(shape[1]):
            for row, lane in enumerate(rollout.lanes):
                if (event := rollout.events[row][t]) == "-":
                    continue
                if event == "c":
                    self.new_id(lane)
                number[row, t], ids[row, t], mask[row, t] = self.frames, self.ids[lane], True
                done[row, t] = event == "d"
                plainly.frame(lane, self.ids[lane], self.frames, event == "d")
                self.frames += 1
                if event == "d":
                    self.new_id(lane)
        return self._formed(number, ids, done, mask)

    def _formed(self, number: Any, ids: Any, done: Any, mask: Any) -> TensorDict:
        x = torch.from_numpy(number)
        values = {
            "x": x,
            "flag": (x % 2 == 0)[..., None],
            "next": {"done": torch.from_numpy(done)[..., None], "wide": x[..., None].expand(*x.shape, WIDE).float()},
            "deep": {"er": {"short": x.to(torch.uint16), "half": (x % 256).to(torch.bfloat16)}},
            "collector": {"traj_ids": torch.from_numpy(ids), "policy_version": x // 7},
        }
        if not mask.all():
            values["collector"]["mask"] = torch.from_numpy(mask)
        time_major = TensorDict(values, x.shape).apply(
            lambda value: value.transpose(0, 1).contiguous().transpose(0, 1), batch_size=x.shape
        )
        if self.is_strange:
            words = [[f"{each}" for each in row] for row in number.tolist()]
            time_major["words"] = lazy_stack([lazy_stack([NonTensorData(word) for word in row]) for row in words])
        batch = time_major if self.lead == 1 else time_major.unsqueeze(0)
        batch = batch.squeeze(0) if self.lead == 0 else batch
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        return batch


def rollouts(lanes: int) -> st.SearchStrategy[list[Rollout]]:
    """Of some lanes each, which stand side by side."""
    ranges = [tuple(range(a, b)) for a in range(lanes) for b in range(a + 1, lanes + 1)]
    events = st.integers(1, 6).flatmap(lambda steps: st.text(".....ddc-", min_size=steps, max_size=steps))

    def alike(chosen: tuple[int, ...]) -> st.SearchStrategy[Rollout]:
        return events.flatmap(
            lambda first: st.lists(
                st.text(".....ddc-", min_size=len(first), max_size=len(first)),
                min_size=len(chosen),
                max_size=len(chosen),
            ).map(lambda each: Rollout(chosen, tuple(each)))
        )

    return st.lists(st.sampled_from(ranges).flatmap(alike), min_size=1, max_size=12)


FORMS: list[Form] = [Cat(), Padded(), Padded(3), Nested(), Nested(2)]


def assembly(lanes: int, quota: int | None, longest: int | None = None) -> Assembly:
    return Assembly(lanes, ByStart() if quota is None else ByTurns(lanes, quota), longest=longest)


def numbers(frames: TensorDictBase) -> list[int]:
    """The frames' numbers; in everything that they hold."""
    mask = frames.get(MASK, None)
    if frames["x"].is_nested:
        rows = {key: frames[key].values() for key in ("x", "flag", ("next", "wide"), ("deep", "er", "short"))}
    else:
        rows = {key: frames[key] for key in ("x", "flag", ("next", "wide"), ("deep", "er", "short"))}
        if mask is not None:
            for key, value in rows.items():
                real = mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)).expand(value.shape)
                assert not value.long()[~real].any(), f"padding of {key}"
            rows = {key: value[mask] for key, value in rows.items()}
    x = rows["x"]
    assert torch.equal(rows["flag"], (x % 2 == 0)[:, None])
    assert torch.equal(rows["next", "wide"], x[:, None].expand(-1, WIDE).float())
    assert rows["deep", "er", "short"].tolist() == x.tolist()
    return x.tolist()


def sources(whole: Assembly) -> set[Source]:
    return {piece[0] for episode in whole._order for piece in episode.pieces}


def check_held(whole: Assembly, last: int) -> None:
    """What is kept is what is said to be, and no more than it may be."""
    kept = sources(whole)
    assert whole.held == sum(source.size for source in kept) <= last + TIDY * whole.wanted
    assert whole.wanted == sum(episode.frames for episode in whole._order) == sum(source.wanted for source in kept)


def run(
    script: Sequence[Rollout], lanes: int, quota: int | None, count: int, lead: int, form: Form, saves: Sequence[bool]
) -> None:
    whole, plainly, world = assembly(lanes, quota), Plainly(lanes, quota), World(lanes, lead)
    delivered: list[int] = []
    for rollout, save in zip(script, saves, strict=True):
        batch = world.batch(rollout, plainly)
        before = batch.clone()
        whole.take(batch, rollout.lanes)
        check_held(whole, batch.numel())
        if save:
            state, whole = whole.state_dict(), assembly(lanes, quota)
            whole.load_state_dict(state)
        while (expected := plainly.next(count)) is not None:
            frames = whole.ready(count)
            assert frames is not None
            assert frames.episodes == count
            assert frames.frames == sum(map(len, expected))
            flat = [number for each in expected for number in each]
            assert numbers(frames.formed(form)) == flat
            assert frames.values(("collector", "policy_version")).tolist() == [number // 7 for number in flat]
            whole.delivered(frames)
            delivered += flat
        assert whole.ready(count) is None
        assert whole.dropped == len(plainly.dropped)
        assert whole.waiting == len(plainly.waiting)
        assert sorted([*delivered, *plainly.dropped, *plainly.waiting]) == list(range(world.frames))
        assert (batch == before).all(), "a batch is left as it is"


class TestAgainstAPlainLoop:
    @given(data=st.data(), count=st.integers(1, 4), quota=st.sampled_from([None, None, 1, 2, 3]))
    @settings(max_examples=150, deadline=None)
    def test_the_same_episodes_in_the_same_order(self, data: Any, count: int, quota: int | None) -> None:
        lanes = data.draw(st.integers(1, 4))
        script = data.draw(rollouts(lanes))
        saves = data.draw(st.lists(st.booleans(), min_size=len(script), max_size=len(script)))
        lead = data.draw(st.sampled_from([0, 1, 2] if lanes == 1 else [1, 2]))
        run(script, lanes, quota, count, lead, data.draw(st.sampled_from(FORMS)), saves)


# --- by hand ----------------------------------------------------------------------------------------------------------


def fed(*rows: str, lanes: int | None = None, quota: int | None = None, **options: Any) -> tuple[Assembly, World]:
    """An assembly that took one batch of these lanes, whose frames are numbered by time, then by lane."""
    count = len(rows) if lanes is None else lanes
    whole, world = assembly(count, quota, **options), World(count)
    feed(whole, world, *rows)
    return whole, world


def feed(whole: Assembly, world: World, *rows: str, first: int = 0) -> None:
    lanes = tuple(range(first, first + len(rows)))
    whole.take(world.batch(Rollout(lanes, rows), Plainly(len(world.ids), None)), lanes)


def taken(whole: Assembly, count: int = 1) -> list[int] | None:
    """The frames of the next episodes."""
    if (frames := whole.ready(count)) is None:
        return None
    whole.delivered(frames)
    return numbers(frames.formed(Cat()))


def all_taken(whole: Assembly) -> Iterator[list[int]]:
    while (frames := taken(whole)) is not None:
        yield frames


class TestOrders:
    def test_the_one_that_began_first_comes_first_and_all_wait_for_it(self) -> None:
        whole, world = fed("....", "d.dd")
        assert taken(whole) is None
        feed(whole, world, "d.", "..")
        assert list(all_taken(whole)) == [[0, 2, 4, 6, 8], [1], [3, 5], [7]]

    def test_of_those_that_began_at_once_the_first_lane_comes_first(self) -> None:
        whole, _ = fed(".d", "dd", "..")
        assert list(all_taken(whole)) == [[0, 3], [1]]
        assert whole.waiting == 3, "lane 2 began before the second of lane 1"

    def test_lanes_give_one_in_turn(self) -> None:
        whole, _ = fed(".d.d", "dddd", quota=2)
        assert list(all_taken(whole)) == [[0, 2], [1], [4, 6], [3]]
        assert whole.dropped == 2

    def test_a_turn_goes_on_from_batch_to_batch(self) -> None:
        whole, world = fed("d", "d", "d", quota=4)
        assert taken(whole, 2) == [0, 1]
        feed(whole, world, "d", "d", "d")
        assert taken(whole, 2) == [2, 3]

    def test_what_would_wait_too_long_is_left_out_from_its_first_frame(self) -> None:
        whole, world = fed("......", "d.d.d.", quota=1)
        assert [whole.dropped, whole.waiting, whole.wanted] == [4, 8, 7]
        feed(whole, world, "d.", ".d")
        assert list(all_taken(whole)) == [[0, 2, 4, 6, 8, 10, 12], [1]]
        assert [whole.dropped, whole.waiting] == [4 + 3, 1], "which began while there was no room for it"

    def test_an_order_looks_at_no_length(self) -> None:
        """An episode is admitted with its first frame."""
        for order in (ByStart(), ByTurns(1, 1)):
            episode = Episode(0, 7)
            assert order.admit(episode)
            assert [*order] == [episode]
            assert order.first(2) == [episode]
        assert not ByTurns(1, 0).admit(Episode(0, 7))


class TestCuts:
    def test_what_was_cut_is_dropped_and_nothing_waits_for_it(self) -> None:
        whole, world = fed("...", "d.d")
        feed(whole, world, "c.d", "...")
        assert whole.dropped == 3
        assert list(all_taken(whole)) == [[1], [3, 5], [6, 8, 10]]

    def test_what_begins_and_is_cut_in_one_batch(self) -> None:
        """As a worker that died twice in a rollout leaves it."""
        whole, _ = fed("d..c..c.d")
        assert list(all_taken(whole)) == [[0], [6, 7, 8]]
        assert whole.dropped == 5

    def test_of_one_that_is_left_out_each_frame_counts_once(self) -> None:
        whole, world = fed("d..", quota=1)
        feed(whole, world, ".c.d")
        assert whole.dropped == 3 + 3
        assert whole.waiting == 1

    def test_one_that_is_cut_gives_up_its_place(self) -> None:
        whole, _ = fed("..c.d", quota=1)
        assert whole.dropped == 2
        assert taken(whole) == [2, 3, 4]


def batch_of(ids: Any, done: Any, mask: Any = None) -> TensorDict:
    """Frames that are numbered by lane, then by time."""
    shape = torch.tensor(ids).shape
    values: dict[str, Any] = {
        "x": torch.arange(shape.numel()).reshape(shape),
        "next": {"done": torch.tensor(done).bool()[..., None]},
        "collector": {"traj_ids": torch.tensor(ids)},
    }
    if mask is not None:
        values["collector"]["mask"] = torch.tensor(mask).bool()
    return TensorDict(values, shape)


def each_of(batch: TensorDict, lanes: int) -> list[list[int]]:
    """The frames of each whole episode of a batch."""
    whole, found = assembly(lanes, None), list[list[int]]()
    whole.take(batch, range(lanes))
    while (frames := whole.ready(1)) is not None:
        found.append(frames.formed(Cat())["x"].tolist())
        whole.delivered(frames)
    return found


class TestWhatTellsEpisodesApart:
    """Ours have ids that none had before; those of a collector that a worker holds may be anything."""

    def test_lanes(self) -> None:
        assert each_of(batch_of([[1, 1, 1], [1, 1, 1]], [[1, 0, 0], [0, 1, 1]]), 2) == [[0], [3, 4]]

    def test_done(self) -> None:
        assert each_of(batch_of([1, 1, 1, 1], [0, 1, 0, 1]), 1) == [[0, 1], [2, 3]]

    def test_a_row_that_is_none_whatever_stands_there(self) -> None:
        assert each_of(batch_of([1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]), 1) == [[0, 3]]


class TestRowsThatAreNone:
    def test_a_gap_in_an_episode_is_none(self) -> None:
        whole, _ = fed(".--.d", "-----")
        assert taken(whole) == [0, 1, 2]

    def test_a_batch_of_no_frame(self) -> None:
        whole, world = fed("--", "--")
        assert [whole.waiting, whole.held, whole.dropped] == [0, 0, 0]
        feed(whole, world, "d-", "-d")
        assert list(all_taken(whole)) == [[0], [1]]

    def test_what_stands_there_does_not_count(self) -> None:
        """Rows that are none are done in these tests, and of the episode -1."""
        whole, world = fed("..-", lanes=1)
        feed(whole, world, "-.d")
        assert taken(whole) == [0, 1, 2, 3]


class TestTooLong:
    def test_the_error_names_the_lane(self) -> None:
        whole, world = fed("...", "..d", longest=5)
        feed(whole, world, "..", "..")
        with pytest.raises(EnvError, match=r"lane 0 \(counted over all workers\) has 6 frames.*of 5.*max_open_frames"):
            feed(whole, world, ".", "d")
        assert whole.waiting == 6 + 3 + 3, "nothing is lost by it"

    def test_one_that_has_ended_may_be_of_any_length(self) -> None:
        whole, _ = fed("......d", longest=2)
        assert taken(whole) == [0, 1, 2, 3, 4, 5, 6]

    def test_one_that_is_left_out_may_not_either(self) -> None:
        with pytest.raises(EnvError, match=r"lane 0 .* has 4 frames"):
            fed("d....", quota=1, longest=3)


class TestMemory:
    def test_of_what_is_let_go_nothing_is_kept(self) -> None:
        whole, world = fed("d.", lanes=1)
        for _ in range(50):
            assert taken(whole) is not None
            feed(whole, world, "dd.")
            assert len(list(all_taken(whole))) == 2
            feed(whole, world, "d.")
        assert len(sources(whole)) <= 2

    def test_what_is_a_small_part_of_what_is_kept_is_copied(self) -> None:
        """A lane whose episodes are long, among others whose episodes are left out."""
        whole, world = fed(".", *["d"] * 9, quota=1)
        for _ in range(200):
            feed(whole, world, ".", *["d"] * 9)
            check_held(whole, 10)
        assert whole.wanted == 201 + 9
        assert whole.held <= 10 + TIDY * whole.wanted
        feed(whole, world, "d", *["d"] * 9)
        assert taken(whole) == [10 * t for t in range(202)]

    def test_it_is_copied_seldom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that each frame is copied less than once."""
        copied = 0
        original = Gathering.formed

        def formed(self: Gathering, form: Form) -> TensorDictBase:
            nonlocal copied
            frames = original(self, form)
            copied += frames.numel()
            return frames

        monkeypatch.setattr(Gathering, "formed", formed)
        whole, world = fed(".", *["d"] * 9, quota=1)
        for _ in range(300):
            feed(whole, world, ".", *["d"] * 9)
        assert 0 < copied < world.frames / 2

    def test_a_batch_shares_no_memory_with_what_came(self) -> None:
        for form in FORMS:
            whole, world = assembly(1, None), World(1)
            batch = world.batch(Rollout((0,), ("..d",)), Plainly(1, None))
            whole.take(batch, [0])
            frames = whole.ready(1).formed(form)
            for value in batch.values(include_nested=True, leaves_only=True):
                value.fill_(1)
            assert numbers(frames) == [0, 1, 2]


class TestForms:
    @given(
        rows=st.lists(st.text("..d-", min_size=6, max_size=6), min_size=1, max_size=3),
        form=st.sampled_from(FORMS),
        is_strange=st.booleans(),
    )
    @settings(max_examples=80, deadline=None)
    def test_it_is_what_split_trajectories_makes_of_them(self, rows: list[str], form: Form, is_strange: bool) -> None:
        lanes = tuple(range(len(rows)))
        whole, world = assembly(len(rows), None), World(len(rows), is_strange=is_strange)
        for _ in range(3):
            whole.take(world.batch(Rollout(lanes, tuple(rows)), Plainly(len(rows), None)), lanes)
        whole.take(world.batch(Rollout(lanes, tuple("d" * 2 for _ in rows)), Plainly(len(rows), None)), lanes)
        episodes = [each for each in whole._order if each.is_whole]
        gathering = Gathering(episodes)
        expected = form.of(gathering._any())
        made = gathering.formed(form)
        assert made.batch_size == expected.batch_size
        assert made.names == expected.names
        ours, theirs = (dict(each.items(include_nested=True, leaves_only=True)) for each in (made, expected))
        assert ours.keys() == theirs.keys()
        for key in ours:
            if key == "words":
                assert made.get(key).tolist() == expected.get(key).tolist()
                continue
            one, other = ours[key], theirs[key]
            assert one.dtype == other.dtype
            if one.is_nested:
                assert torch.equal(one.offsets(), other.offsets())
                one, other = one.values(), other.values()
            assert one.tolist() == other.tolist()

    def test_nested_tensors_can_be_computed_with_together(self) -> None:
        whole, _ = fed("d..d.d")
        frames = whole.ready(3).formed(Nested())
        total = frames["x"] + frames["collector", "policy_version"]
        assert [each.tolist() for each in total.unbind()] == [[0], [1, 2, 3], [4, 5]]

    def test_padding_is_zero_whatever_stands_in_the_frames(self) -> None:
        whole = assembly(1, None)
        done = torch.tensor([1, 0, 1]).bool()[:, None]
        values = {"nan": torch.full((3, 2), torch.nan), "wide": torch.full((3, WIDE), torch.nan)}
        batch = TensorDict({**values, "next": {"done": done}, "collector": {"traj_ids": torch.tensor([1, 2, 2])}}, [3])
        whole.take(batch, [0])
        frames = whole.ready(2).formed(Padded())
        for key in values:
            assert torch.equal(frames[key].isnan().all(-1), frames[MASK])
            assert (frames[key][0, 1] == 0).all()


class TestState:
    def test_frames_of_a_state_go_to_where_others_are(self) -> None:
        """A state is on no device that is named; batches may be."""
        whole = assembly(1, None)
        whole.take(batch_of([1, 1], [0, 0]), [0])
        whole.take(batch_of([1, 2], [1, 0]).to("cpu"), [0])
        frames = whole.ready(1).formed(Padded())
        assert frames.device == torch.device("cpu")
        assert frames["x"].tolist() == [[0, 1, 0]]

    def test_frames_that_came_with_a_state_and_others(self) -> None:
        whole, world = fed("..", "d.")
        state = whole.state_dict()
        again = assembly(2, None)
        again.load_state_dict(state)
        feed(again, world, ".d", "d.")
        assert list(all_taken(again)) == [[0, 2, 4, 6], [1], [3, 5]]

    def test_what_was_there_before_a_load_is_gone(self) -> None:
        whole, _ = fed("..", "d.")
        whole.load_state_dict({})
        assert [whole.dropped, whole.waiting, whole.held, whole.wanted] == [0, 0, 0, 0]
        assert whole.ready(1) is None

    def test_less_room_for_waiting_ones_than_when_it_was_saved(self) -> None:
        whole, _ = fed("ddd.", quota=4)
        fewer = assembly(1, 2)
        fewer.load_state_dict(whole.state_dict())
        assert list(all_taken(fewer)) == [[0], [1]]
        assert [fewer.dropped, fewer.waiting, fewer.held] == [1, 1, 0]

    def test_another_order_goes_on_from_it(self) -> None:
        whole, world = fed("d.", "dd", quota=4)
        other = assembly(2, None)
        other.load_state_dict(whole.state_dict())
        feed(other, world, "d", "d")
        assert sum(map(len, all_taken(other))) == 6
