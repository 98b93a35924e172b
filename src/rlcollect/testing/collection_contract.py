"""`CollectionContract`: a test class for environments, and drivers of environments, that one wants to collect from.

Subclass it in a test file; pytest finds the tests in it. (It does not need pytest: each test is a method without
arguments, and raises `InvalidBatchError` where what came is not what a batch promises.) What it knows of a collector is
what a user knows: its constructor, its methods, its batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import gymnasium as gym
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

from rlcollect.collectors.single import Collector
from rlcollect.errors import ClosedError, InvalidBatchError, OptionError
from rlcollect.testing._collected import (
    Form,
    checked,
    expect,
    expect_same,
    forms_of,
    frames_by_lane,
    keys_of,
    last_frames,
    mask_of,
)
from rlcollect.testing._rows import IDS, INIT, MASK, NEXT_DONE, STEPS, VERSION, Key, quoted
from rlcollect.testing.batches import check_batch

__all__ = ["CollectionContract"]

_STEPS: Final = 5  # of a batch: few, so that episodes go over the border between two
_BATCHES: Final = 4
_ENOUGH_ENDS: Final = 3
_RECORD: Final = ("is_init", "step_count")
_AGE: Final[Key] = ("age",)
_NEXT_AGE: Final[Key] = ("next", "age")
_FLAGS: Final = ("done", "terminated", "truncated")
_REASON: Final = 20  # characters, at least, of a refusal that says why


class CollectionContract:
    """What holds for batches from every environment: subclass it, and say how yours is made.

    Attributes:
        seedable: whether one seed gives the same episodes again; else nothing is compared between two runs.
        resets_lanes: whether lanes can be reset one by one. If True, `max_frames_per_traj`, `reset_at_each_iter` and
            `reset(index)` must work; if False they must be refused, with a reason; None: either.
        ends_within: so many steps of each lane, of random actions, see an episode end; None: episodes never end.
        options: further options of the collector.
        action_key, reward_key: where the action stands in a batch, and the reward below `"next"`.

    Example:
        ::

            from rlcollect.testing import CollectionContract

            class TestMyEnv(CollectionContract):
                ends_within = 50

                def make(self):
                    return MyVectorEnv(num_envs=4)
    """

    seedable: ClassVar[bool] = True
    resets_lanes: ClassVar[bool | None] = None
    ends_within: ClassVar[int | None] = 200
    options: ClassVar[Mapping[str, Any]] = {}
    action_key: ClassVar[str | Key] = "action"
    reward_key: ClassVar[str | Key] = "reward"

    # --- what a subclass says ---

    def make(self) -> Any:
        """A new environment, or a list of new ones, one a lane; called several times in a test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(), which makes an environment.")

    def lanes(self, made: Any) -> int:
        """How many lanes there are in what `make` gave."""
        if isinstance(made, Sequence):
            return len(made)
        batch_size = getattr(made, "batch_size", None)
        if isinstance(batch_size, torch.Size):
            return batch_size.numel()
        return int(getattr(made, "num_envs", self.options.get("num_envs", 1)))

    def close(self, made: Any) -> None:
        """Closes what `make` gave."""
        for env in made if isinstance(made, Sequence) else [made]:
            env.close()

    def act(self, tensordict: TensorDictBase, example: Any) -> None:
        """Writes an action of every lane; of the policies that are used here.

        Args:
            tensordict: what the policy is shown.
            example: a random action of one lane; written as it is for all of them, always.
        """
        shape = (*tensordict.batch_size, *example.shape)
        tensordict[self.action_key] = example.expand(shape).clone()

    # --- batches ---

    def test_batches_keep_what_a_batch_promises(self) -> None:
        """`check_batch`, over the border between batches too, through some episodes' ends."""
        with self._collector(record=_RECORD) as collector:
            for batch in self._checked(collector):
                mask = mask_of(batch)
                expect(not bool((mask[..., 1:] & ~mask[..., :-1]).any()), "a frame stands behind rows that are none")
                others = [key for key in keys_of(batch) if key != IDS]
                expect(not any(bool(batch.get(key)[~mask].any()) for key in others), "rows that are none are not zero")
                expect(bool((batch[IDS][~mask] == -1).all()), "rows that are no frames have the id of an episode")

    def test_keys_shapes_and_dtypes(self) -> None:
        """Those of the spaces, as far as these are Gymnasium's; time comes last, and is named."""
        with self._made() as made, self._over(made) as collector:
            batch, lanes = _next(collector), collector.num_envs
            expect(batch.batch_size[-1] == _STEPS, f"batch_size is {batch.batch_size}, expected {_STEPS} steps last")
            expect(batch.batch_size.numel() == lanes * _STEPS, f"batch_size is {batch.batch_size}, of {lanes} lanes")
            expect(batch.names[-1] == "time", f"the last dimension is named {batch.names[-1]!r}, expected 'time'")
            for key, (shape, dtype) in self._forms(made).items():
                leaf = batch.get(key, None)
                expect(isinstance(leaf, Tensor), f"expected a key {quoted(key)}, found {list(batch.keys(True, True))}")
                expected = (*batch.batch_size, *shape)
                expect(tuple(leaf.shape) == expected, f"{quoted(key)}: shape {tuple(leaf.shape)}, expected {expected}")
                expect(leaf.dtype == dtype, f"{quoted(key)}: {leaf.dtype}, expected {dtype}")
            for more in (_next(collector), _next(collector)):
                expect(keys_of(more) == keys_of(batch), f"keys differ: {keys_of(more) ^ keys_of(batch)}")

    def test_counts_are_exact(self) -> None:
        """`total_frames`, however it falls: the last batch is the shorter one, and then there are no more."""
        with self._made() as made:
            for steps in (1, _STEPS, 2 * _STEPS + 2):
                with self._over(made, steps=steps) as collector:
                    self._count(collector, steps * collector.num_envs)

    def _count(self, collector: Collector, total: int) -> None:
        batches = list(collector)
        counted = sum(int(mask_of(batch).sum()) for batch in batches)
        expect(counted == total, f"{counted} frames came, total_frames={total}")
        told = {collector.collected_frames, collector.stats().frames, collector.total_frames}
        expect(told == {total}, f"{told} are collected_frames, stats().frames, total_frames; {total} came")
        expect(collector.exhausted and collector.next() is None, "frames came after total_frames")
        expect(all(bool(mask_of(batch).any()) for batch in batches), "a batch came without any frame")
        with contextlib.suppress(TypeError):  # not known
            expect(len(collector) == len(batches), f"len() is {len(collector)}, {len(batches)} batches came")

    def test_ids_are_of_one_episode_each(self) -> None:
        """Constant from an episode's first frame to its last, in one lane, and never used again."""
        owners: dict[int, int] = {}
        with self._collector() as collector:
            batches = self._checked(collector)
        for lane, frames in enumerate(frames_by_lane(batches)):
            ids, done = frames[IDS].tolist(), frames[NEXT_DONE].flatten().tolist()
            begun = [ids[0], *(ids[t + 1] for t in range(len(ids) - 1) if done[t])]
            changes = [ids[0], *(ids[t + 1] for t in range(len(ids) - 1) if ids[t + 1] != ids[t])]
            expect(begun == changes, f"lane {lane}: ids change to {changes}, episodes begin with {begun}")
            for name in begun:
                expect(name not in owners, f"id {name} stands in lane {lane}, and in lane {owners.get(name)} before")
                owners[name] = lane

    def test_one_seed_gives_one_sequence(self) -> None:
        """Bit for bit, run after run."""
        if not self.seedable:
            return
        runs = []
        for _ in range(2):
            with self._collector() as collector:
                expect(collector.set_seed(11) == 12, "set_seed(11) should return 12")
                runs.append([_next(collector) for _ in range(_BATCHES)])
        for number, pair in enumerate(zip(*runs, strict=True)):
            expect_same(pair[0], pair[1], f"batch {number} of a second run with the same seed")

    def test_the_size_of_a_batch_is_no_part_of_the_data(self) -> None:
        """The same frames, whatever they are cut into, and in whatever memory they come."""
        if not self.seedable:
            return
        runs = []
        for options in ({}, {"frames": 3}, {"use_buffers": False}, {"return_same_td": True}):
            with self._collector(steps=30, **options) as collector:
                collector.set_seed(3)
                runs.append(frames_by_lane([batch.clone() for batch in collector]))
        for run in runs[1:]:
            for lane, (one, other) in enumerate(zip(runs[0], run, strict=True)):
                frames = min(len(one), len(other))  # lanes that reset by steps of their own come to different numbers
                expect_same(one[:frames].exclude(IDS), other[:frames].exclude(IDS), f"lane {lane} of another run")

    def test_batches_that_are_kept_never_change(self) -> None:
        """Nor does what is done to one reach another."""
        with self._collector() as collector:
            kept = [_next(collector) for _ in range(_BATCHES)]
            copies = [batch.clone() for batch in kept]
            spoilt = _next(collector)
            for key in keys_of(spoilt):
                spoilt.get(key).zero_()
            for _ in range(_BATCHES):
                _next(collector)
            for number, pair in enumerate(zip(kept, copies, strict=True)):
                expect_same(*pair, f"batch {number}, after others came")

    # --- options ---

    def test_a_random_warm_up_is_exact(self) -> None:
        """So many frames, the first of each lane, shared evenly; then the policy acts."""
        with self._made() as made:
            frames = 2 * self.lanes(made) + 1
            with self._over(made, self._policy(), steps=6 * _STEPS, init_random_frames=frames) as collector:
                lanes = frames_by_lane(list(collector))
        quotas = []
        for lane, made_by in enumerate(frames_of[VERSION] for frames_of in lanes):
            quotas.append(int((made_by == -1).sum()))
            first = torch.arange(len(made_by)) < quotas[-1]
            expect(bool((made_by == torch.where(first, -1, 0)).all()), f"lane {lane}: policy_version is {made_by}")
        expect(sum(quotas) == frames, f"{sum(quotas)} frames are random, init_random_frames={frames}")
        expect(max(quotas) - min(quotas) <= 1, f"random frames of each lane: {quotas}")

    def test_a_limit_of_episodes_is_kept_or_refused(self) -> None:
        """`max_frames_per_traj` truncates there, in that lane alone."""
        with self._maybe(max_frames_per_traj=3) as collector:
            if collector is None:
                return
            for batch in checked(_next(collector) for _ in range(_BATCHES)):
                last = batch[STEPS] == 2
                expect(bool((batch[STEPS] <= 2).all()), f"step_count is {batch[STEPS].max()}, max_frames_per_traj=3")
                expect(bool(batch["next", "truncated"][last].all()), "a third frame is not truncated")

    def test_a_reset_at_each_iteration_is_made_or_refused(self) -> None:
        """Every lane begins an episode with every batch."""
        with self._maybe(reset_at_each_iter=True, record=_RECORD) as collector:
            if collector is not None:
                for batch in checked(_next(collector) for _ in range(_BATCHES)):
                    expect(not batch[STEPS][..., 0, :].any(), "a lane goes on with its episode")

    def test_a_reset_of_one_lane_is_made_or_refused(self) -> None:
        """Its next frame begins an episode; the other lanes go on as if nothing were."""
        with self._collector(record=_RECORD) as collector:
            before = _next(collector)
            try:
                collector.reset([0])
            except OptionError as refusal:
                self._may_be_refused(refusal)
                expect(not collector.closed, "a refused reset closed the collector")
                check_batch(_next(collector), previous=before)
                return
            single = collector.num_envs == 1
            expect(single or self.resets_lanes is not False, "resets_lanes is False, and reset([0]) was taken")
            after = _next(collector)
            check_batch(after, previous=before)
            if MASK not in keys_of(after):
                starts = after[INIT][..., 0, 0].flatten()
                ended = before[NEXT_DONE][..., -1, 0].flatten()
                ended[0] = True
                expect(torch.equal(starts, ended), f"reset([0]): episodes begin in lanes {starts.nonzero().tolist()}")

    def test_a_reset_of_all_lanes(self) -> None:
        """Every lane begins an episode, after what had been made already."""
        with self._collector(record=_RECORD) as collector:
            batches = [_next(collector) for _ in range(2)]
            collector.reset()
            batches += [_next(collector) for _ in range(_BATCHES)]
        for lane, frames in enumerate(frames_by_lane(list(checked(batches)))):
            cuts = (frames[IDS][1:] != frames[IDS][:-1]) & ~frames[NEXT_DONE][:-1, 0]
            expect(int(cuts.sum()) <= 1, f"lane {lane} is cut {int(cuts.sum())} times by one reset")
            expect(not frames[STEPS][1:][cuts].any(), f"lane {lane} does not begin anew after reset()")

    def test_soft_truncation_marks_the_last_frames_only(self) -> None:
        """`set_truncated`: in the batch; the episode goes on."""
        with self._collector(set_truncated=True, record=_RECORD) as collector:
            collector.set_seed(5) if self.seedable else None
            marked = list(checked(_next(collector) for _ in range(_BATCHES)))
        for batch in marked:
            expect(bool(batch["next", "truncated"][last_frames(batch)].all()), "a lane's last frame is not truncated")
        if not self.seedable:
            return
        with self._collector(record=_RECORD) as collector:
            collector.set_seed(5)
            plain = [_next(collector) for _ in range(_BATCHES)]
        for one, other in zip(plain, marked, strict=True):
            for name in _FLAGS:
                flags = one["next", name][..., 0] | (last_frames(one) if name != "terminated" else False)
                expect(
                    torch.equal(flags, other["next", name][..., 0]), f"set_truncated=True changed other {name} flags"
                )
            rest = [key for key in keys_of(one) if key[0] == "next" and key[-1] in _FLAGS]
            expect_same(one.exclude(*rest), other.exclude(*rest), "a batch with set_truncated=True")

    def test_a_policy_sees_its_own_state_and_where_episodes_begin(self) -> None:
        """A state that counts frames is 0 in each episode's first frame, and goes on over the border of batches."""
        policy = self._policy(counts=True)
        initial = {"age": torch.zeros(1)}
        with self._collector(policy, record=_RECORD, initial_policy_state=initial) as collector:
            batches = self._checked(collector)
        for batch in batches:
            mask = mask_of(batch)
            count = batch[STEPS][mask].float()
            expect(torch.equal(batch[_AGE][mask], count), "what the policy carried is not the age of the episode")
            expect(torch.equal(batch[_NEXT_AGE][mask], count + 1), "what the policy wrote is not its next state")
        for age, is_init in policy.shown[1:]:
            expect(torch.equal(age == 0, is_init), "is_init, as the policy was shown it, is not where its state is new")

    # --- lifecycle ---

    def test_a_state_gives_the_remaining_frames(self) -> None:
        """Another collector goes on where it was taken; new episodes begin."""
        total = 8 * _STEPS
        with self._collector(steps=total, record=_RECORD) as collector:
            before = [_next(collector) for _ in range(3)]
            state = collector.state_dict()
        with self._collector(steps=total, record=_RECORD) as collector:
            collector.load_state_dict(state)
            after = list(collector)
            expect(collector.exhausted, "a collector that was loaded is not exhausted in the end")
            counted = sum(int(mask_of(batch).sum()) for batch in [*before, *after])
            expect(counted == collector.total_frames, f"{counted} frames came in all, of {collector.total_frames}")
        list(checked([*before, *after]))

    def test_a_rollout_is_not_counted(self) -> None:
        """And nothing is lost by it."""
        with self._collector(record=_RECORD) as collector:
            batches = [_next(collector), collector.rollout(), _next(collector)]
            counted = int(mask_of(batches[0]).sum() + mask_of(batches[2]).sum())
            expect(collector.collected_frames == counted, f"{collector.collected_frames} frames, expected {counted}")
        list(checked(batches))

    def test_a_shutdown_comes_twice_and_leaves_instances_open(self) -> None:
        """What was passed in is its owner's, to close or to collect from again."""
        with self._made() as made:
            closed = [_watch(env) for env in (made if isinstance(made, Sequence) else [made])]
            for _ in range(2):
                with self._over(made) as collector:
                    _next(collector)
                    collector.shutdown()
                    collector.shutdown()
                    expect(collector.closed, "a collector that was shut down is not closed")
                    try:
                        collector.next()
                    except ClosedError:
                        continue
                    raise InvalidBatchError("a collector that was shut down gave a batch")
            expect(not any(closed), "shutdown closed an environment that it had not made")

    # --- how ---

    @contextlib.contextmanager
    def _made(self) -> Iterator[Any]:
        made = self.make()
        try:
            yield made
        finally:
            self.close(made)

    @contextlib.contextmanager
    def _over(
        self, made: Any, policy: Any = None, *, frames: int = _STEPS, steps: int | None = None, **options: Any
    ) -> Iterator[Collector]:
        """A collector; `frames` and `steps` are those of each lane, in a batch and in all."""
        lanes = self.lanes(made)
        total = {} if steps is None else {"total_frames": lanes * steps}
        given = {"frames_per_batch": lanes * frames, **total, **self.options, **options}
        with Collector(made, policy, **given) as collector:
            expect(
                collector.num_envs == lanes, f"{collector.num_envs} lanes came; override lanes(), which says {lanes}"
            )
            yield collector

    @contextlib.contextmanager
    def _collector(self, policy: Any = None, **options: Any) -> Iterator[Collector]:
        with self._made() as made, self._over(made, policy, **options) as collector:
            yield collector

    @contextlib.contextmanager
    def _maybe(self, **options: Any) -> Iterator[Collector | None]:
        """A collector whose options reset single lanes; None: they were refused."""
        with self._made() as made, contextlib.ExitStack() as stack:
            try:
                collector = stack.enter_context(self._over(made, **options))
            except OptionError as refusal:
                self._may_be_refused(refusal)
                yield None
                return
            expect(self.resets_lanes is not False, f"resets_lanes is False, and {options} was taken")
            yield collector

    def _may_be_refused(self, refusal: OptionError) -> None:
        if self.resets_lanes:
            raise InvalidBatchError(f"resets_lanes is True, and it was refused: {refusal}") from refusal
        expect(len(str(refusal)) > _REASON, f"a refusal should say why; it says {str(refusal)!r}")

    def _checked(self, collector: Collector) -> list[TensorDictBase]:
        """Batches until some episodes have ended, each checked."""
        most = _BATCHES if self.ends_within is None else max(_BATCHES, -(-self.ends_within // _STEPS))
        batches, ends = [], 0
        for number, batch in enumerate(checked(_next(collector) for _ in range(most))):
            batches.append(batch)
            ends += int(batch[NEXT_DONE].sum())
            if number + 1 >= _BATCHES and ends >= _ENOUGH_ENDS:
                break
        if self.ends_within is not None:
            expect(bool(ends), f"no episode ended within {most * _STEPS} steps: set ends_within (None: none ever does)")
        return batches

    def _policy(self, *, counts: bool = False) -> _Policy:
        with self._collector() as collector:
            action = frames_by_lane([_next(collector)])[0][self.action_key][0]
        return _Policy(lambda tensordict: self.act(tensordict, action), counts=counts)

    def _forms(self, made: Any) -> dict[Key, Form]:
        """Shape and dtype of every key that is known."""
        env = made[0] if isinstance(made, Sequence) else made
        forms: dict[Key, Form] = dict.fromkeys(((flag,) for flag in _FLAGS), ((1,), torch.bool))
        forms |= {("next", *key): form for key, form in forms.items()}
        if self.reward_key == "reward":
            forms["next", "reward"] = ((1,), torch.float32)
        forms |= {IDS: ((), torch.int64), VERSION: ((), torch.int64)}
        if isinstance(observed := _space(env, "observation"), gym.Space):
            found = dict(forms_of(observed, () if isinstance(observed, spaces.Dict) else ("observation",)))
            found = {new: form for key, form in found.items() if (new := self._named(key)) is not None}
            if self.options.get("obs_dtype") == "env":  # float64 stays what it is
                found = {key: form for key, form in found.items() if form[1] != torch.get_default_dtype()}
            forms |= found | {("next", *key): form for key, form in found.items()}
        if isinstance(acted := _space(env, "action"), gym.Space):
            forms |= dict(forms_of(acted, ("action",)))
        return forms

    def _named(self, key: Key) -> Key | None:
        """The key under which a part of the observation space stands in a batch; None: it is left out."""
        for old in self.options.get("exclude_keys", ()):
            if key[: len(_tuple(old))] == _tuple(old):
                return None
        renames = self.options.get("rename_keys") or {}
        for old in sorted(renames, key=lambda name: len(_tuple(name)), reverse=True):
            if key[: len(_tuple(old))] == _tuple(old):
                return (*_tuple(renames[old]), *key[len(_tuple(old)) :])
        return key


class _Policy:
    """Acts, and may count the frames of each episode by a state of its own."""

    def __init__(self, act: Callable[[TensorDictBase], None], *, counts: bool) -> None:
        self.shown: list[tuple[Tensor, Tensor]] = []
        self._act = act
        self._counts = counts

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._act(tensordict)
        if self._counts:
            self.shown.append((tensordict[_AGE].clone(), tensordict[INIT].clone()))
            tensordict[_NEXT_AGE] = tensordict[_AGE] + 1
        return tensordict


def _next(collector: Collector) -> TensorDictBase:
    batch = collector.next()
    if batch is None:
        raise InvalidBatchError("a collector without total_frames came to an end")
    return batch


def _tuple(key: str | Key) -> Key:
    return (key,) if isinstance(key, str) else key


def _space(env: Any, kind: str) -> Any:
    """The space of one lane; None where there is none."""
    return getattr(env, f"single_{kind}_space", getattr(env, f"{kind}_space", None))


def _watch(env: Any) -> list[str]:
    """Notes calls of `close` from now on, which go through."""
    calls: list[str] = []
    close = getattr(env, "close", None)
    if close is None:  # it makes environments
        return calls

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append("close")
        return close(*args, **kwargs)

    with contextlib.suppress(AttributeError):  # where attributes cannot be set, nothing is seen
        env.close = noted
    return calls
