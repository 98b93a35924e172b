"""Recurrent state: what a policy writes under `("next", k)` and reads as `k`, held against state carried by hand.

Most policies here count: their state is the number of frames that the episode has had, so that every row tells what
it should be.
"""

from __future__ import annotations

import itertools
import re
import signal
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from rlcollect import Collector, OptionError, PolicyError
from rlcollect.testing import check_batch
from tests.collectors.helpers import interrupt_at_call
from tests.naming import named
from tests.reference import Scripted
from tests.rollout.helpers import BOX, DISCRETE, LANES, SCRIPT, bits, collect, collecting, leaf_keys, maker, received

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])

AGES = [t for length, _ in SCRIPT * 2 for t in range(length)]  # frames that the episode has had, for each frame
assert AGES[:12] == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 0]
PAIR = spaces.Dict({"a": BOX, "b": BOX})


def act(observation, hidden=None):
    """Another action for most observations and states, so that the actions tell which state there was."""
    shift = 0 if hidden is None else hidden[..., 0].long()
    return ((observation[..., 0] * 1000).long() + shift) % 4


def zeros(observation, *shape, dtype=None):
    return torch.zeros((*observation.shape[:-1], *(shape or (1,))), dtype=dtype)


def numbers(batch, key):
    """One number a frame, as lists."""
    return batch[key].squeeze(-1).tolist()


def in_lanes(values, lanes):
    """The same values in each lane, as `numbers` gives them."""
    return [list(values)] * lanes if lanes else list(values)


def step(observation, hidden):
    hidden = zeros(observation) if hidden is None else hidden
    return act(observation, hidden), hidden + 1, hidden.clone()


def function(observation, hidden=None):
    action, after, seen = step(observation, hidden)
    return {"action": action, ("next", "hidden"): after, "seen": seen}


def required(observation, hidden):
    return function(observation, hidden)


def nested_dicts(observation, hidden=None):
    action, after, seen = step(observation, hidden)
    return {"action": action, "next": {"hidden": after}, "seen": seen}


def another_name(obs, hidden=None):
    return function(obs, hidden)


def state_first(hidden=None, observation=None):
    return function(observation, hidden)


def keyword_only(observation, *, scale=1, hidden=None):
    assert scale == 1
    return function(observation, hidden)


def all_keyword_only(*, observation, hidden=None):
    return function(observation, hidden)


def tensordict_of_outputs(observation, hidden=None):
    action, after, seen = step(observation, hidden)
    return TensorDict({"action": action, "next": {"hidden": after}, "seen": seen}, observation.shape[:-1])


def of_tensordict(td):
    action, after, seen = step(td["observation"], td.get("hidden", None))
    td["action"], td["next", "hidden"], td["seen"] = action, after, seen
    return td


def new_tensordict(tensordict):
    action, after, seen = step(tensordict["observation"], tensordict.get("hidden", None))
    return TensorDict({"action": action, "seen": seen, "next": {"hidden": after}}, tensordict.batch_size)


class Net(nn.Module):
    def forward(self, observation, hidden=None):
        return function(observation, hidden)

    def method(self, observation, hidden=None):
        return function(observation, hidden)


class OwnForward(TensorDictModule):
    """Called as it is, with a TensorDict."""

    def forward(self, tensordict):
        return super().forward(tensordict)


class Own(TensorDictModuleBase):
    in_keys: ClassVar = ["observation", "hidden"]
    out_keys: ClassVar = ["action", ("next", "hidden"), "seen"]

    def forward(self, tensordict):
        return of_tensordict(tensordict)


def module(kind=TensorDictModule):
    return kind(step, ["observation", "hidden"], ["action", ("next", "hidden"), "seen"])


def chain(kind=TensorDictModule):
    """The state goes through several parts; the action is told from the state before."""
    return TensorDictSequential(
        kind(lambda hidden, observation: step(observation, hidden)[1:], ["hidden", "observation"], ["x", "seen"]),
        TensorDictModule(lambda x: x, ["x"], [("next", "hidden")]),
        TensorDictModule(lambda after, o: act(o, after - 1), [("next", "hidden"), "observation"], ["action"]),
    )


FORMS = {
    "function": lambda: function,
    "nested dicts": lambda: nested_dicts,
    "another name for the observation": lambda: another_name,
    "state first": lambda: state_first,
    "keyword-only": lambda: keyword_only,
    "all keyword-only": lambda: all_keyword_only,
    "a TensorDict of outputs": lambda: tensordict_of_outputs,
    "module": Net,
    "bound method": lambda: Net().method,
    "TensorDictModule": module,
    "chain": chain,
    "chain in a chain": lambda: TensorDictSequential(chain()),
    "module with a forward of its own": lambda: module(OwnForward),
    "chain with a part of its own": lambda: chain(OwnForward),
    "subclass of the base": Own,
    "function of a TensorDict": lambda: of_tensordict,
    "new TensorDict": lambda: new_tensordict,
}
forms = pytest.mark.parametrize("form", sorted(FORMS))


class TestEveryForm:
    """State at each row = t within the episode, across batches, with no help from environments."""

    @lanes_too
    @forms
    @pytest.mark.parametrize("steps", [1, 4])
    def test_state_is_carried_and_begins_anew(self, form, lanes, steps):
        batch, envs = collect(FORMS[form](), lanes, steps=steps, batches=12 // steps)
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert numbers(batch, ("next", "hidden")) == in_lanes([age + 1 for age in AGES[:12]], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])
        assert torch.equal(batch["action"], act(batch["observation"], batch["hidden"]))
        assert torch.equal(received(envs, lanes), batch["action"])
        assert {("hidden",), ("seen",), ("action",)} <= leaf_keys(batch) <= {*map(tuple, LEAVES)}
        assert ("is_init",) not in leaf_keys(batch)
        assert batch["hidden"].dtype is batch["next", "hidden"].dtype is torch.float32

    @single_and_lanes
    @forms
    @pytest.mark.parametrize("given", [torch.tensor([5.0]), np.array([5.0], np.float32), [5.0]], ids=type)
    def test_it_begins_with_what_was_given(self, form, lanes, given):
        batch, _ = collect(FORMS[form](), lanes, initial_policy_state={"hidden": given})
        assert numbers(batch, "hidden") == in_lanes([age + 5 for age in AGES[:12]], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])

    @lanes_too
    @pytest.mark.parametrize(
        "policy",
        [
            required,
            lambda *, observation, hidden: function(observation, hidden),
            lambda td: of_tensordict(td.set("hidden", td["hidden"])),
        ],
        ids=["by place", "by keyword", "TensorDict"],
    )
    def test_a_policy_that_cannot_do_without_gets_what_was_given(self, policy, lanes):
        batch, _ = collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(1)})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])

    @forms
    def test_it_passes_the_checks_of_a_batch(self, form):
        with collecting(FORMS[form](), set_truncated=True, init_random_frames=4) as (collector, _):
            previous = None
            for _ in range(4):
                batch = collector.next()
                check_batch(batch, previous=previous)
                previous = batch

    def test_a_sequence_of_lanes_is_a_batch_even_of_one(self):
        with Collector([maker([])], function, frames_per_batch=8) as collector:
            assert numbers(collector.next(), "hidden") == [AGES[:8]]

    @single_and_lanes
    def test_one_made_by_a_factory(self, lanes):
        batch, _ = collect(None, lanes, policy_factory=Net)
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)

    @single_and_lanes
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_compiled_one(self, lanes):
        batch, _ = collect(function, lanes, compile_policy={"backend": "eager"})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])

    @single_and_lanes
    def test_observations_of_several_keys(self, lanes):
        def by_name(a, b, hidden=None):
            return function(a + b, hidden)

        def whole(observation, hidden=None):
            return function(observation["a"] + observation["b"], hidden)

        for policy in (by_name, whole):
            batch, envs = collect(policy, lanes, PAIR)
            assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
            assert torch.equal(batch["action"], act(batch["a"] + batch["b"], batch["hidden"]))
            assert torch.equal(received(envs, lanes), batch["action"])


LEAVES = [("observation",), ("hidden",), ("seen",), ("action",), ("x",)]


class TestShapes:
    @lanes_too
    @pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)], ids=str)
    def test_any_shape_of_one_lane(self, shape, lanes):
        def policy(observation, hidden):
            assert tuple(hidden.shape) == ((lanes, *shape) if lanes else shape)
            return {"action": act(observation), ("next", "hidden"): hidden + 1}

        batch, _ = collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(shape)})
        ages = torch.tensor(in_lanes(AGES[:12], lanes), dtype=torch.float32)
        assert torch.equal(batch["hidden"], ages.reshape(*ages.shape, *[1] * len(shape)).expand(*ages.shape, *shape))

    @lanes_too
    @pytest.mark.parametrize("warmup", [0, 4])
    @pytest.mark.parametrize(
        "dtype",
        [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.complex64],
        ids=str,
    )
    def test_any_dtype(self, dtype, lanes, warmup):
        def policy(observation, hidden=None):
            hidden = zeros(observation, 2, dtype=dtype) if hidden is None else hidden
            return {"action": act(observation), ("next", "hidden"): hidden + 1, "seen": hidden.clone()}

        batch, _ = collect(policy, lanes, init_random_frames=warmup)
        assert batch["hidden"].dtype is batch["next", "hidden"].dtype is dtype
        late = (..., slice(4, None), slice(None)) if warmup else ...
        assert torch.equal(batch["seen"][late], batch["hidden"][late])
        if not warmup:
            assert batch["hidden"][..., 1].tolist() == in_lanes(AGES[:12], lanes)

    @lanes_too
    def test_bool(self, lanes):
        """Whether the frame is odd."""

        def policy(observation, odd=None):
            odd = zeros(observation, dtype=torch.bool) if odd is None else odd
            return {"action": act(observation), ("next", "odd"): ~odd}

        batch, _ = collect(policy, lanes)
        assert numbers(batch, "odd") == in_lanes([age % 2 == 1 for age in AGES[:12]], lanes)

    @lanes_too
    def test_several_parts_of_unlike_shapes(self, lanes):
        def policy(observation, total=None, *, count=None):
            total = zeros(observation, 3) if total is None else total
            count = zeros(observation, dtype=torch.int64) if count is None else count
            return {"action": act(observation), "next": {"count": count + 1, "total": total + observation}}

        batch, _ = collect(policy, lanes)
        assert numbers(batch, "count") == in_lanes(AGES[:12], lanes)
        observations = batch["observation"] if lanes else batch["observation"][None]
        totals = batch["total"] if lanes else batch["total"][None]
        for lane in range(lanes or 1):
            total = torch.zeros(3)
            for t, age in enumerate(AGES[:12]):
                total = torch.zeros(3) if age == 0 else total
                assert torch.equal(totals[lane, t], total)
                total = total + observations[lane, t]

    @lanes_too
    @pytest.mark.parametrize("kind", [TensorDictModule, OwnForward])
    def test_nested_keys_of_a_chain(self, kind, lanes):
        policy = kind(step, ["observation", ("memory", "h")], ["action", ("next", "memory", "h"), ("memory", "seen")])
        batch, _ = collect(policy, lanes)
        assert numbers(batch, ("memory", "h")) == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["memory", "seen"], batch["memory", "h"])
        check_batch(batch)

    @lanes_too
    @pytest.mark.parametrize("initial", [None, {("memory", "h"): torch.zeros(1)}])
    def test_nested_keys_in_a_tensordict(self, initial, lanes):
        def policy(td):
            action, after, seen = step(td["observation"], td.get(("memory", "h"), None))
            return td.update({"action": action, "next": {"memory": {"h": after}}, "seen": seen})

        batch, _ = collect(policy, lanes, initial_policy_state=initial)
        assert numbers(batch, ("memory", "h")) == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["seen"], batch["memory", "h"])

    @lanes_too
    @pytest.mark.parametrize("initial", [None, {("memory", "h"): torch.zeros(1)}], ids=["found", "given"])
    def test_a_parameter_for_a_group_of_keys(self, initial, lanes):
        def policy(observation, memory=None):
            action, after, seen = step(observation, None if memory is None else memory["h"])
            return {"action": action, "next": {"memory": {"h": after}}, "seen": seen}

        batch, _ = collect(policy, lanes, initial_policy_state=initial)
        assert numbers(batch, ("next", "memory", "h")) == in_lanes([age + 1 for age in AGES[:12]], lanes)
        assert torch.equal(batch["seen"], batch["memory", "h"])

    @lanes_too
    @pytest.mark.parametrize("initial", [None, {"hidden": torch.zeros(1)}], ids=["found", "given"])
    def test_arrays(self, initial, lanes):
        """A policy may write arrays; its state is no exception."""

        def policy(observation, hidden=None):
            hidden = np.zeros((*observation.shape[:-1], 1), np.float32) if hidden is None else hidden.numpy().copy()
            return {"action": act(observation).numpy(), ("next", "hidden"): hidden + 1, "seen": hidden}

        batch, _ = collect(policy, lanes, initial_policy_state=initial)
        assert numbers(batch, ("next", "hidden")) == in_lanes([age + 1 for age in AGES[:12]], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])

    @lanes_too
    def test_a_grucell_without_a_hint(self, lanes):
        """A cell may be called without a state, and so tells its shape; the numbers are those of a loop by hand."""
        torch.manual_seed(0)
        cell, head = nn.GRUCell(3, 5), nn.Linear(5, 4)
        policy = TensorDictSequential(
            TensorDictModule(cell, ["observation", "hidden"], [("next", "hidden")]),
            TensorDictModule(head, [("next", "hidden")], ["logits"]),
            TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
        )
        batch, _ = collect(policy, lanes)
        hidden = torch.zeros(*([lanes] if lanes else []), 5)
        for t, age in enumerate(AGES[:12]):
            row = batch[:, t] if lanes else batch[t]
            hidden = torch.zeros_like(hidden) if age == 0 else hidden
            assert torch.equal(row["hidden"], hidden)
            with torch.no_grad():
                hidden = cell(row["observation"], hidden)
                assert torch.equal(row["next", "hidden"], hidden)
                assert torch.equal(row["action"], head(hidden).argmax(-1))


# --- against a loop by hand -------------------------------------------------------------------------------------------


class ByHand:
    """What the state of a counting policy is in one lane: a loop that carries it."""

    def __init__(self, script, initial=0.0, limit=None, random=0):
        self.script, self.initial, self.limit, self.random = script, initial, limit, random
        self.episode = -1
        self.begin()

    def begin(self):
        self.episode, self.age, self.hidden = self.episode + 1, 0, self.initial

    def step(self):
        """`(hidden, next hidden, is_init, whether the policy acts)` of one frame."""
        acts = self.random == 0
        self.random -= not acts
        after = self.hidden + 1 if acts else self.initial
        row = (self.hidden, after, self.age == 0, acts)
        self.age, self.hidden = self.age + 1, after
        length, _ = self.script[self.episode % len(self.script)]
        if self.age in (length, self.limit):
            self.begin()
        return row


def shares(total, lanes):
    """Random frames of each lane: differing by at most one, the first lanes have more."""
    return [total // lanes + (lane < total % lanes) for lane in range(lanes)]


class Cuts:
    """An interruptor that ends each rollout after so many steps."""

    def __init__(self, lengths):
        self.left, self.lengths = 0, iter(lengths)

    def start_collection(self):
        """Not called."""

    stop_collection = start_collection

    def collection_stopped(self):
        if self.left == 0:
            self.left = next(self.lengths)
        self.left -= 1
        return self.left == 0


def marked(observation, is_init, hidden=None):
    hidden = zeros(observation) if hidden is None else hidden
    return {
        "action": act(observation, hidden),
        ("next", "hidden"): hidden + 1,
        "seen": hidden.clone(),
        "first": is_init.clone(),
    }


def marked_td(td):
    td.update(marked(td["observation"], td["is_init"], td.get("hidden", None)))
    return td


def marked_chain():
    def call(observation, is_init, hidden):
        return tuple(marked(observation, is_init, hidden).values())

    return TensorDictModule(call, ["observation", "is_init", "hidden"], ["action", ("next", "hidden"), "seen", "first"])


def marked_in_place(hidden, is_init, observation):
    """Counts in the memory it is given, and returns it."""
    before = hidden.clone()
    action = act(observation, before)
    return {"action": action, ("next", "hidden"): hidden.add_(1), "seen": before, "first": is_init.clone()}


MARKED = {
    "function": lambda: marked,
    "TensorDict": lambda: marked_td,
    "chain": marked_chain,
    "in place": lambda: marked_in_place,
}
scripts = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated", "both"])), min_size=1, max_size=4
)


class TestAgainstALoop:
    @settings(max_examples=150, deadline=None)
    @given(
        form=st.sampled_from(sorted(MARKED)),
        scripts=st.lists(scripts, min_size=1, max_size=3),
        lanes=st.sampled_from([None, 1, 3, 16]),
        steps=st.integers(1, 9),
        events=st.lists(
            st.sampled_from(["", "", "reset", "reset some", "seed", "rollout", "load"]), min_size=1, max_size=5
        ),
        cuts=st.one_of(st.none(), st.lists(st.integers(1, 9), min_size=5, max_size=5)),
        limit=st.one_of(st.none(), st.integers(1, 5)),
        warmup=st.one_of(st.just(0), st.integers(1, 40)),
        at_each_iter=st.booleans(),
        set_truncated=st.booleans(),
        initial=st.sampled_from([0.0, -3.0]),
    )
    def test_random_done_patterns_batches_limits_warm_ups_and_cuts(
        self, form, scripts, lanes, steps, events, cuts, limit, warmup, at_each_iter, set_truncated, initial
    ):
        count = lanes or 1
        envs = [Scripted(lane, scripts[lane % len(scripts)], BOX, DISCRETE) for lane in range(count)]
        by_hand = [
            ByHand(env.script, initial, limit, random) for env, random in zip(envs, shares(warmup, count), strict=True)
        ]
        lengths = [min(steps, cut) for cut in cuts] if cuts else [steps] * len(events)
        with Collector(
            envs if lanes else envs[0],
            MARKED[form](),
            frames_per_batch=steps * count,
            init_random_frames=warmup,
            max_frames_per_traj=limit,
            reset_at_each_iter=at_each_iter,
            set_truncated=set_truncated,
            interruptor=Cuts(lengths) if cuts else None,
            initial_policy_state={"hidden": torch.tensor([initial])},
            record=("is_init",),
        ) as collector:
            batches, saved = [], None
            for event, length in zip(events, lengths, strict=False):
                begun = self.make_happen(event, collector, count)
                for lane in by_hand:
                    if at_each_iter and lane.age and by_hand.index(lane) not in begun:
                        begun = {*begun, by_hand.index(lane)}
                for lane in begun:
                    by_hand[lane].begin()
                batch = collector.rollout() if event == "rollout" else collector.next()
                assert batch.batch_size[-1] == length
                check_batch(batch, previous=saved)
                self.compare(batch if lanes else batch[None], by_hand)
                batches.append((batch, batch.clone()))
                saved = batch
        for batch, copy in batches:  # what was delivered is left alone
            assert bits(batch) == bits(copy)
        for env, lane in zip(envs, by_hand, strict=True):
            assert env.episode == lane.episode

    @staticmethod
    def make_happen(event, collector, lanes):
        """Does it, and says which lanes begin anew with the next batch."""
        if event == "reset":
            collector.reset()
        elif event == "reset some":
            collector.reset(range(0, lanes, 2))
            return set(range(0, lanes, 2))
        elif event == "seed":
            collector.set_seed(1)
        elif event == "load":
            collector.load_state_dict(collector.state_dict())
        return set(range(lanes)) if event in ("reset", "seed", "load") else set()

    @staticmethod
    def compare(batch, by_hand):
        rows = [[lane.step() for _ in range(batch.batch_size[1])] for lane in by_hand]
        columns = torch.tensor(rows).unbind(-1)
        hidden, after, first, acts = columns[0], columns[1], columns[2].bool(), columns[3].bool()
        assert torch.equal(batch["hidden"].squeeze(-1), hidden)
        assert torch.equal(batch["next", "hidden"].squeeze(-1), after)
        assert torch.equal(batch["is_init"].squeeze(-1), first)
        assert torch.equal(batch["seen"].squeeze(-1), torch.where(acts, hidden, 0))
        assert torch.equal(batch["first"].squeeze(-1), first & acts)
        assert torch.equal(batch["collector", "policy_version"] >= 0, acts)
        acted = act(batch["observation"], batch["hidden"])
        assert torch.equal(batch["action"][acts], acted[acts])

    @pytest.mark.parametrize("lanes", [None, 16])
    def test_rollouts_longer_than_a_window_of_views(self, lanes):
        count = lanes or 1
        scripts = [[(7 + lane, "terminated"), (90, "truncated"), (1, "both")] for lane in range(count)]
        envs = [Scripted(lane, script, BOX, DISCRETE) for lane, script in enumerate(scripts)]
        for env in envs:
            env.observe = lambda: np.zeros(3, np.float32)
        with Collector(envs if lanes else envs[0], marked, frames_per_batch=300 * count) as collector:
            batch = collector.next()
        by_hand = [ByHand(script) for script in scripts]
        self.compare(batch if lanes else batch[None], by_hand)

    @settings(max_examples=25, deadline=None)
    @given(
        scripts=st.lists(scripts, min_size=1, max_size=3),
        lanes=st.sampled_from([None, 1, 3]),
        sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
        warmup=st.integers(0, 20),
    )
    def test_the_size_of_a_batch_is_not_part_of_the_data(self, scripts, lanes, sizes, warmup):
        """A network with rounding errors: the same bits."""
        torch.manual_seed(0)
        cell, head = nn.GRUCell(3, 5), nn.Linear(5, 4)

        def policy(observation, hidden=None):
            after = cell(observation, hidden)
            return {"action": torch.distributions.Categorical(logits=head(after)).sample(), ("next", "hidden"): after}

        runs = []
        for steps in sizes:
            envs = [Scripted(lane, scripts[lane % len(scripts)], BOX, DISCRETE) for lane in range(lanes or 1)]
            with Collector(
                envs if lanes else envs[0],
                policy,
                frames_per_batch=steps * len(envs),
                total_frames=20 * len(envs),
                init_random_frames=warmup,
            ) as collector:
                collector.set_seed(3)
                runs.append(torch.cat(list(collector), -1))
        assert bits(runs[0]) == bits(runs[1])


class TestIsInit:
    """The flag of an episode's first frame is given to those that read it, and then recorded."""

    class Attribute(OwnForward):
        """As exploration modules have it: it looks for the flag, and does not declare it."""

        is_init_key = "is_init"

        def forward(self, tensordict):
            return super().forward(tensordict).set("first", tensordict["is_init"].clone())

    READERS: ClassVar = {
        "by place": lambda: lambda observation, is_init: {"action": act(observation), "first": is_init.clone()},
        "optional": lambda: lambda obs, is_init=None: {"action": act(obs), "first": is_init.clone()},
        "by keyword": lambda: lambda observation, *, is_init: {"action": act(observation), "first": is_init.clone()},
        "module": lambda: TensorDictModule(
            lambda is_init, o: (is_init.clone(), act(o)), ["is_init", "observation"], ["first", "action"]
        ),
        "general module": lambda: OwnForward(
            lambda is_init, o: (is_init.clone(), act(o)), ["is_init", "observation"], ["first", "action"]
        ),
        "attribute": lambda: TestIsInit.Attribute(act, ["observation"], ["action"]),
        "attribute of a part": lambda: TensorDictSequential(
            TensorDictModule(lambda o: o, ["observation"], ["x"]),
            TestIsInit.Attribute(act, ["x"], ["action"]),
        ),
    }

    @lanes_too
    @pytest.mark.parametrize("form", sorted(READERS))
    def test_it_is_true_in_first_frames_and_only_there(self, form, lanes):
        batch, _ = collect(self.READERS[form](), lanes)
        assert numbers(batch, "is_init") == in_lanes([age == 0 for age in AGES[:12]], lanes)
        assert torch.equal(batch["first"], batch["is_init"])
        assert batch["is_init"].dtype is torch.bool
        assert ("next", "is_init") not in batch.keys(True)
        check_batch(batch)

    @lanes_too
    def test_a_function_of_a_tensordict_finds_it_when_it_is_recorded(self, lanes):
        found = []

        def policy(td):
            found.append("is_init" in td)
            return td.set("action", act(td["observation"])).set("first", td.get("is_init", zeros(td["observation"])))

        batch, _ = collect(policy, lanes, record="is_init")
        assert all(found)
        assert torch.equal(batch["first"], batch["is_init"])
        found.clear()
        batch, _ = collect(policy, lanes)
        assert not any(found)
        assert ("is_init",) not in leaf_keys(batch)

    @lanes_too
    def test_a_key_of_the_environment_by_that_name_is_the_environments(self, lanes):
        observation_space = spaces.Dict({"a": BOX, "is_init": spaces.Discrete(5)})
        policies = {
            "chain": TensorDictModule(lambda a, i: (act(a), i.clone()), ["a", "is_init"], ["action", "seen"]),
            "function": lambda a, is_init: {"action": act(a), "seen": is_init.clone()},
        }
        for form, policy in policies.items():
            batch, _ = collect(policy, lanes, observation_space)
            assert torch.equal(batch["seen"], batch["is_init"]), form
            assert batch["is_init"].dtype is torch.int64

    def test_a_policy_that_writes_into_it_spoils_no_later_frame(self):
        def policy(observation, is_init):
            result = {"action": act(observation), "first": is_init.clone()}
            is_init.fill_(True)
            return result

        batch, _ = collect(policy)
        assert numbers(batch, "is_init") == in_lanes([age == 0 for age in AGES[:12]], 3)
        assert torch.equal(batch["first"], batch["is_init"])

    def test_any_name_for_the_observation_will_do(self):
        """As it does for a policy that takes nothing else."""
        batch, _ = collect(lambda obs, is_init: {"action": act(obs), "first": is_init.clone()})
        assert torch.equal(batch["first"], batch["is_init"])


class TestWarmUp:
    """DESIGN 9.3: in random frames the state is as in the beginning, and so it is when the policy takes over."""

    def test_an_uneven_one(self):
        """Lanes have 3, 2 and 2 random frames; their first episodes last 3 frames, then 5."""
        with collecting(marked, init_random_frames=7, initial_policy_state={"hidden": torch.tensor([9.0])}) as (c, _):
            batch = torch.cat([c.next(), c.next()], -1)
        assert numbers(batch, "hidden") == [
            [9, 9, 9, 9, 10, 11, 12, 13],
            [9, 9, 9, 9, 10, 11, 12, 13],
            [9, 9, 9, 9, 10, 11, 12, 13],
        ]
        assert numbers(batch, ("next", "hidden")) == [
            [9, 9, 9, 10, 11, 12, 13, 14],
            [9, 9, 10, 10, 11, 12, 13, 14],
            [9, 9, 10, 10, 11, 12, 13, 14],
        ]
        assert numbers(batch, "first") == [
            [False, False, False, True, False, False, False, False],
            [False, False, False, True, False, False, False, False],
            [False, False, False, True, False, False, False, False],
        ]
        assert numbers(batch, "seen") == [
            [0, 0, 0, 9, 10, 11, 12, 13],
            [0, 0, 9, 9, 10, 11, 12, 13],
            [0, 0, 9, 9, 10, 11, 12, 13],
        ]
        assert numbers(batch, "is_init") == in_lanes([age == 0 for age in AGES[:8]], 3)

    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 12])
    def test_the_policy_takes_over_in_the_middle_of_an_episode(self, steps):
        """Random frames: 5 and 4, of episodes of 3 and 5 frames. The policy begins counting where it begins."""
        batch, _ = collect(marked, 2, steps=steps, batches=12 // steps, init_random_frames=9)
        assert numbers(batch, "hidden") == [
            [0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 2, 0],
            [0, 0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 0],
        ]
        assert numbers(batch, ("next", "hidden")) == [
            [0, 0, 0, 0, 0, 1, 2, 3, 1, 2, 3, 1],
            [0, 0, 0, 0, 1, 2, 3, 4, 1, 2, 3, 1],
        ]
        assert not batch["first"][:, :8].any()
        assert batch["first"][:, 8].all()

    @lanes_too
    def test_one_that_ends_in_a_last_batch_that_is_short(self, lanes):
        with collecting(marked, lanes, init_random_frames=5 * (lanes or 1), total_frames=7 * (lanes or 1)) as (c, _):
            batch = torch.cat(list(c), -1)
        assert numbers(batch, "hidden") == in_lanes([0, 0, 0, 0, 0, 0, 1], lanes)
        assert numbers(batch, "is_init") == in_lanes([age == 0 for age in AGES[:7]], lanes)

    def test_of_lanes_that_are_random_throughout(self):
        batch, _ = collect(marked, init_random_frames=1000, initial_policy_state={"hidden": torch.tensor([4.0])})
        assert (batch["hidden"] == 4).all()
        assert (batch["next", "hidden"] == 4).all()
        assert not batch["first"].any()

    def test_an_initial_state_that_is_learned_meanwhile(self):
        """What is recorded is what the policy was shown, and what follows from it."""
        initial, shown = nn.Parameter(torch.zeros(1)), []

        def policy(observation, hidden):
            shown.append(hidden.clone())
            return {"action": act(observation), ("next", "hidden"): hidden + 1}

        envs = [Scripted(0, [(100, "terminated")], BOX, DISCRETE)]
        with Collector(
            envs, policy, frames_per_batch=4, init_random_frames=6, initial_policy_state={"hidden": initial}
        ) as collector:
            shown.clear()
            batches = [collector.next()]
            with torch.no_grad():
                initial.fill_(10)
            batches += [collector.next(), collector.next()]
        batch = torch.cat(batches, -1)
        assert torch.equal(batch["hidden"][:, 6:], torch.stack(shown, 1))
        assert torch.equal(batch["next", "hidden"][:, 6:], batch["hidden"][:, 6:] + 1)


class TestNotAliased:
    """Whatever a policy does with the tensors it is given and gives, its state and the data are right."""

    @lanes_too
    @pytest.mark.parametrize("returns", [True, False], ids=["returned", "and another returned"])
    def test_a_policy_that_counts_in_place(self, returns, lanes):
        def policy(observation, hidden):
            after = hidden.add_(1) if returns else hidden.add_(1).clone()
            hidden.add_(0 if returns else 100)
            return {"action": act(observation), ("next", "hidden"): after}

        for form in (policy, TensorDictModule(lambda o, h: tuple(policy(o, h).values()), *KEYS)):
            batch, _ = collect(form, lanes, initial_policy_state={"hidden": torch.zeros(1)})
            assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
            assert numbers(batch, ("next", "hidden")) == in_lanes([age + 1 for age in AGES[:12]], lanes)

    @lanes_too
    def test_a_policy_with_a_buffer_of_its_own(self, lanes):
        buffer = torch.zeros((lanes, 1) if lanes else (1,))

        def policy(observation, hidden):
            torch.add(hidden, 1, out=buffer)
            return {"action": act(observation), ("next", "hidden"): buffer}

        batch, _ = collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(1)})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)

    @lanes_too
    @pytest.mark.parametrize("form", ["function", "module", "TensorDict"])
    def test_a_policy_that_returns_the_very_tensor_it_was_given(self, form, lanes):
        policies = {
            "function": lambda observation, hidden: {"action": act(observation), ("next", "hidden"): hidden},
            "module": TensorDictModule(lambda o, h: (act(o), h), *KEYS),
            "TensorDict": lambda td: td.set("action", act(td["observation"])).set(("next", "hidden"), td["hidden"]),
        }
        batch, _ = collect(policies[form], lanes, initial_policy_state={"hidden": torch.tensor([2.0])})
        assert (batch["hidden"] == 2).all()
        assert (batch["next", "hidden"] == 2).all()

    @lanes_too
    def test_a_policy_that_returns_its_observation_as_state(self, lanes):
        policy = TensorDictModule(lambda o, h: (act(o), o), *KEYS)
        batch, _ = collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(3)})
        rows = batch if lanes else batch[None]
        assert torch.equal(rows["next", "hidden"], rows["observation"])
        assert torch.equal(rows["hidden"][:, 1:3], rows["observation"][:, :2])
        assert not rows["hidden"][:, [0, 3, 8]].any()

    @lanes_too
    @pytest.mark.parametrize("form", ["function", "module", "TensorDict"])
    def test_another_output_that_is_the_state_it_was_given(self, form, lanes):
        """A view of it, as recorded, is of the state before the step."""

        def call(observation, hidden):
            return hidden, act(observation, hidden), hidden + 1, hidden[..., 0]

        keys = ["before", "action", ("next", "hidden"), "first number"]
        policies = {
            "function": lambda observation, hidden: dict(zip(keys, call(observation, hidden), strict=True)),
            "module": TensorDictModule(call, ["observation", "hidden"], keys),
            "TensorDict": lambda td: td.update(dict(zip(keys, call(td["observation"], td["hidden"]), strict=True))),
        }
        batch, _ = collect(policies[form], lanes, initial_policy_state={"hidden": torch.zeros(1)})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["before"], batch["hidden"])
        assert torch.equal(batch["first number"], batch["hidden"].squeeze(-1))

    @lanes_too
    def test_an_action_that_was_decided_a_frame_ago(self, lanes):
        policy = TensorDictModule(
            lambda observation, late: (late, act(observation)), ["observation", "late"], ["action", ("next", "late")]
        )
        batch, envs = collect(policy, lanes, initial_policy_state={"late": torch.tensor(3)})
        assert torch.equal(batch["action"], batch["late"])
        assert torch.equal(received(envs, lanes), batch["late"])
        rows = batch if lanes else batch[None]
        assert torch.equal(rows["late"][:, 4:8], act(rows["observation"][:, 3:7]))

    @lanes_too
    @pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "three"])), ids=str)
    def test_parts_that_change_places(self, order, lanes):
        """A memory of the last three observations: each becomes the next one."""

        def policy(observation, one=None, two=None, three=None):
            one, two, three = (zeros(observation, 3) if part is None else part for part in (one, two, three))
            after = {"one": observation, "two": one, "three": two}
            return {"action": act(observation), **{("next", name): after[name] for name in order}}

        batch, _ = collect(policy, lanes)
        rows = batch if lanes else batch[None]
        for name, distance in (("one", 1), ("two", 2), ("three", 3)):
            for t, age in enumerate(AGES[:12]):
                past = rows["observation"][:, t - distance] if age >= distance else torch.zeros(lanes or 1, 3)
                assert torch.equal(rows[name][:, t], past), (name, t)

    @lanes_too
    def test_batches_that_were_kept_do_not_change(self, lanes):
        initial = nn.Parameter(torch.zeros(1))
        with collecting(marked_in_place, lanes, initial_policy_state={"hidden": initial}, init_random_frames=2) as (
            collector,
            _,
        ):
            kept = []
            for _ in range(6):
                batch = collector.next()
                kept.append((batch, bits(batch)))
                with torch.no_grad():
                    initial += 1
            collector.reset()
            collector.next()
        for batch, before in kept:
            assert bits(batch) == before

    def test_a_user_who_writes_into_a_batch_changes_no_state(self):
        with collecting(function) as (collector, _):
            collector.next().zero_()
            assert numbers(collector.next(), "hidden") == in_lanes(AGES[4:8], 3)

    def test_one_tensordict_for_all_batches(self):
        with collecting(function, return_same_td=True) as (collector, _):
            rows = [numbers(collector.next(), "hidden")[0] for _ in range(3)]
        assert [*rows[0], *rows[1], *rows[2]] == AGES[:12]

    @single_and_lanes
    @pytest.mark.parametrize("mode", ["grad", "inference"])
    def test_a_policy_that_sets_its_own_grad_mode(self, mode, lanes):
        weight = torch.ones(1, requires_grad=True)
        context = torch.enable_grad if mode == "grad" else torch.inference_mode

        @context()
        def policy(observation, hidden=None):
            return function(observation, zeros(observation) if hidden is None else hidden * weight)

        batch, _ = collect(policy, lanes)
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert not any(value.requires_grad for value in batch.values(True, True))

    @pytest.mark.parametrize("policy", [function, None], ids=["recurrent", "random"])
    def test_a_collector_made_in_inference_mode(self, policy):
        with torch.inference_mode():
            collector = Collector(maker([]), policy, frames_per_batch=8, num_envs=2)
        with collector:
            batch = collector.next()
        assert policy is None or numbers(batch, "hidden") == [AGES[:4]] * 2


KEYS = (["observation", "hidden"], ["action", ("next", "hidden")])


class TestInitialState:
    def test_each_key_has_its_own(self):
        policy = TensorDictModule(
            lambda o, a, b: (act(o), a + 1, b * 2), ["observation", "a", ("g", "b")], ["action", ("next", "a"), NEXT_B]
        )
        batch, _ = collect(policy, initial_policy_state={"a": torch.tensor(7), ("g", "b"): np.ones(2)})
        assert batch["a"].tolist() == in_lanes([7 + age for age in AGES[:12]], 3)
        assert batch["g", "b"][..., 1].tolist() == in_lanes([2.0**age for age in AGES[:12]], 3)
        assert batch["g", "b"].dtype is torch.float64

    @lanes_too
    @pytest.mark.parametrize("kind", [nn.Parameter, torch.clone, lambda tensor: tensor.numpy()])
    def test_what_the_user_changes_between_batches_holds_from_the_next_episode_on(self, kind, lanes):
        """A learner may learn it. Episodes under way go on as they are."""
        initial = kind(torch.zeros(1))
        with collecting(function, lanes, initial_policy_state={"hidden": initial}) as (collector, _):
            batches = [collector.next()]
            with torch.no_grad():
                initial[...] = 50
            batches += [collector.next(), collector.next()]
        batch = torch.cat(batches, -1)
        assert numbers(batch, "hidden") == in_lanes([0, 1, 2, 0, 1, 2, 3, 4, 50, 51, 52, 50], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])
        assert not batch["hidden"].requires_grad

    def test_one_learned_by_the_policy_itself_goes_with_its_weights(self):
        class Learning(nn.Module):
            def __init__(self):
                super().__init__()
                self.start = nn.Parameter(torch.zeros(1))

            def forward(self, observation, hidden):
                return function(observation, hidden)

        policies = [Learning(), Learning()]
        collectors = [
            Collector(maker([]), policy, frames_per_batch=8, initial_policy_state={"hidden": policy.start})
            for policy in policies
        ]
        with collectors[0], collectors[1]:
            with torch.no_grad():
                policies[0].start.fill_(3)
            collectors[1].load_state_dict(collectors[0].state_dict())
            batch = collectors[1].next()
        assert numbers(batch, "hidden") == [3 + age for age in AGES[3:11]]  # the first episode was cut by the load

    def test_a_tensordict_of_it(self):
        batch, _ = collect(function, initial_policy_state=TensorDict({"hidden": torch.tensor([5.0])}))
        assert numbers(batch, "hidden") == in_lanes([5 + age for age in AGES[:12]], 3)

    def test_an_empty_one_says_nothing(self):
        batch, _ = collect(function, initial_policy_state={})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], 3)


NEXT_B = ("next", "g", "b")


def gru_chain():
    return TensorDictSequential(
        TensorDictModule(nn.GRUCell(3, 5), ["observation", "hidden"], [("next", "hidden")]),
        TensorDictModule(act, [("next", "hidden")], ["action"]),
    )


class TestWhatIsRefused:
    @pytest.mark.parametrize("given", [[torch.zeros(1)], "hidden", 3, torch.zeros(1)], ids=repr)
    def test_no_mapping(self, given):
        with pytest.raises(OptionError, match=r"initial_policy_state takes a mapping from keys to tensors"):
            collect(function, initial_policy_state=given)

    @pytest.mark.parametrize("value", [None, "x", {"a": torch.zeros(1)}, [None], object()], ids=named)
    def test_values_that_are_no_tensors(self, value):
        with pytest.raises(OptionError, match=r"initial_policy_state takes a mapping from keys to tensors.*hidden"):
            collect(function, initial_policy_state={"hidden": value})

    @pytest.mark.parametrize("key", [1, (), ("a", 1), None], ids=repr)
    def test_keys_that_are_none(self, key):
        with pytest.raises(OptionError, match=re.escape(f"not {key!r}")):
            collect(function, initial_policy_state={key: torch.zeros(1)})

    @pytest.mark.parametrize("policy", [function, gru_chain(), of_tensordict], ids=["function", "chain", "td"])
    def test_a_key_of_the_observation(self, policy):
        with pytest.raises(PolicyError, match="initial_policy_state has 'observation', which is part of the obs"):
            collect(policy, initial_policy_state={"observation": torch.zeros(3)})
        with pytest.raises(PolicyError, match="'observation', 'x'"):
            collect(policy, initial_policy_state={("observation", "x"): torch.zeros(3)})

    @pytest.mark.parametrize("policy", [function, gru_chain(), of_tensordict], ids=["function", "chain", "td"])
    def test_an_unknown_key(self, policy):
        with pytest.raises(PolicyError, match=r"'hiden'.*should write.*\('next', 'hiden'\).*'hidden'"):
            collect(policy, initial_policy_state={"hiden": torch.zeros(1)})

    @pytest.mark.parametrize("form", ["parameter of another name", "any keywords", "module"])
    def test_a_key_that_the_policy_does_not_read(self, form):
        """It would be carried for nobody, while the policy goes on without: a misspelt name."""

        def misspelt(observation, hiden=None):
            return function(observation, hiden)

        policies = {
            "parameter of another name": misspelt,
            "any keywords": lambda observation, **more: function(observation),
            "module": TensorDictModule(
                lambda o: step(o, None), ["observation"], ["action", ("next", "hidden"), "seen"]
            ),
        }
        with pytest.raises(PolicyError, match="hidden"):
            collect(policies[form], initial_policy_state={"hidden": torch.zeros(1)})

    @pytest.mark.parametrize(
        "given",
        [torch.zeros(3, 5), torch.zeros(4), torch.zeros(5, dtype=torch.float64), np.zeros(5), torch.zeros(5).long()],
        ids=["all lanes", "another size", "another dtype", "numpy's dtype", "integers"],
    )
    def test_one_that_does_not_fit_says_so(self, given):
        """Whether the policy fails or the check does: the text names the option, and what was shown."""
        shown = re.escape(str([3, *given.shape]))
        with pytest.raises(PolicyError, match=rf"(?s)hidden.*{shown}.*initial_policy_state"):
            collect(gru_chain(), initial_policy_state={"hidden": given})

    @single_and_lanes
    def test_one_of_another_shape_or_dtype_than_what_is_written(self, lanes):
        def policy(observation, hidden):
            return {"action": act(observation), ("next", "hidden"): zeros(observation, 2)}

        wanted, came = ("[3, 5]", "[3, 2]") if lanes else ("[5]", "[2]")
        text = rf"\('next', 'hidden'\) should be as the initial 'hidden': {re.escape(wanted)}.*{re.escape(came)}"
        with pytest.raises(PolicyError, match=text):
            collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(5)})
        with pytest.raises(PolicyError, match=r"float64.*float32"):
            collect(policy, lanes, initial_policy_state={"hidden": torch.zeros(2, dtype=torch.float64)})

    def test_a_parameter_that_nothing_fills_shows_the_line_to_write(self):
        with pytest.raises(PolicyError, match=r"parameter 'hidden'.*initial_policy_state=\{'hidden': torch.zeros"):
            collect(required)

    def test_a_required_parameter_beside_an_observation_of_another_name(self):
        """The one that is not the observation is the state; no line with the observation's name helps."""

        def policy(obs, hidden):
            return function(obs, hidden)

        batch, _ = collect(policy, initial_policy_state={"hidden": torch.zeros(1)})
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], 3)
        with pytest.raises(PolicyError, match=r"initial_policy_state=\{'hidden'"):
            collect(policy)

    @pytest.mark.parametrize("kind", [TensorDictModule, OwnForward])
    def test_a_chain_whose_state_has_no_shape_shows_the_line_to_write(self, kind):
        policy = kind(lambda o, h: (act(o), h + 1), *KEYS)
        with pytest.raises(PolicyError, match=r"initial_policy_state=\{'hidden': torch.zeros\(...\)\}"):
            collect(policy)

    def test_a_function_of_a_tensordict_that_needs_it_shows_the_line_to_write(self):
        def policy(td):
            return of_tensordict(td.set("hidden", td["hidden"] + 0))

        with pytest.raises(PolicyError, match=r"(?s)hidden.*initial_policy_state=\{'hidden': torch.zeros\(...\)\}"):
            collect(policy)

    def test_layers_before_lanes_are_told_how_to_change_places(self):
        """The state of `nn.GRU` as it comes is `[num_layers, N, H]`."""
        layer = nn.GRU(3, 5, num_layers=2)

        def policy(observation, hidden=None):
            output, after = layer(observation[None], hidden)
            return {"action": act(output[0]), ("next", "hidden"): after}

        with pytest.raises(PolicyError, match=r"(?s)lanes.*RecurrentModule"):
            collect(policy)

    def test_a_state_without_the_lanes(self):
        def policy(observation, hidden=None):
            return {"action": act(observation), ("next", "hidden"): torch.ones(())}

        with pytest.raises(PolicyError, match=r"\('next', 'hidden'\)"):
            collect(policy)

    @pytest.mark.parametrize("name", ["reward", "done", "terminated", "truncated", "action", "info"])
    @pytest.mark.parametrize("initial", [False, True])
    def test_names_of_ours_below_next(self, name, initial):
        options = {"initial_policy_state": {name: torch.zeros(1)}} if initial else {}
        for policy in (
            lambda observation: {"action": act(observation), ("next", name): zeros(observation)},
            TensorDictModule(lambda o: (act(o), zeros(o)), ["observation"], ["action", ("next", name)]),
            lambda td: td.update({"action": act(td["observation"]), "next": {name: zeros(td["observation"])}}),
        ):
            with pytest.raises(PolicyError, match=f"'{name}'.*(name of ours|another name)"):
                collect(policy, **options)

    def test_the_next_observation(self):
        """The environment's stands there."""
        for policy in (
            lambda observation: {"action": act(observation), ("next", "observation"): observation},
            TensorDictModule(lambda o: (act(o), o), ["observation"], ["action", ("next", "observation")]),
            lambda td: td.update({"action": act(td["observation"]), "next": {"observation": td["observation"]}}),
        ):
            with pytest.raises(PolicyError, match=r"\('next', 'observation'\)"):
                collect(policy)

    def test_a_part_below_another(self):
        policy = TensorDictModule(
            lambda o, a, b: (act(o), a, b),
            ["observation", "a", ("a", "b")],
            ["action", ("next", "a"), ("next", "a", "b")],
        )
        with pytest.raises(PolicyError, match="'a', 'b'"):
            collect(policy, initial_policy_state={"a": torch.zeros(1), ("a", "b"): torch.zeros(1)})
        policy = TensorDictModule(
            lambda o, a: (act(o), a, o), ["observation", "a"], ["action", ("next", "a"), ("a", "x")]
        )
        with pytest.raises(PolicyError, match="'a', 'x'"):
            collect(policy, initial_policy_state={"a": torch.zeros(1)})

    def test_a_state_that_grows(self):
        calls = []

        def policy(observation, hidden=None):
            calls.append(1)
            return {"action": act(observation), ("next", "hidden"): zeros(observation, 2 if len(calls) < 5 else 3)}

        with collecting(policy) as (collector, _):
            with pytest.raises(Exception, match=r"3") as caught:
                collector.next()
            assert "step" in str(caught.value) + str(caught.value.__cause__)
            assert collector.closed


class TestWrittenAndNotRead:
    @lanes_too
    @pytest.mark.parametrize("form", ["function", "module", "chain"])
    def test_it_is_recorded_where_it_was_written_and_nowhere_else(self, form, lanes):
        """A model's guess of what comes next, say."""
        policies = {
            "function": lambda observation: {"action": act(observation), ("next", "guess"): observation * 2},
            "module": TensorDictModule(lambda o: (act(o), o * 2), ["observation"], ["action", ("next", "guess")]),
            "chain": TensorDictSequential(
                TensorDictModule(lambda o: o * 2, ["observation"], [("next", "guess")]),
                TensorDictModule(lambda o, guess: act(o), ["observation", ("next", "guess")], ["action"]),
            ),
        }
        batch, _ = collect(policies[form], lanes)
        assert torch.equal(batch["next", "guess"], batch["observation"] * 2)
        assert leaf_keys(batch) == {("observation",), ("action",)}
        check_batch(batch)

    @lanes_too
    def test_what_a_function_of_a_tensordict_writes_is_its_state(self, lanes):
        """It may read it; nobody can tell."""
        batch, _ = collect(of_tensordict, lanes)
        assert ("hidden",) in leaf_keys(batch)

    @lanes_too
    def test_in_a_random_frame_it_is_zero(self, lanes):
        batch, _ = collect(
            lambda observation: {"action": act(observation), ("next", "guess"): observation + 9},
            lanes,
            init_random_frames=4 * (lanes or 1),
        )
        rows = batch if lanes else batch[None]
        assert not rows["next", "guess"][:, :4].any()
        assert torch.equal(rows["next", "guess"][:, 4:], rows["observation"][:, 4:] + 9)


class TestPrivate:
    """Names with a leading underscore are carried, and not recorded."""

    @staticmethod
    def writer(key):
        def policy(td):
            action, after, seen = step(td["observation"], td.get("_h", None))
            return td.update({"action": action, "seen": seen}).set(key, after)

        return policy

    @lanes_too
    @pytest.mark.parametrize("initial", [None, 5.0], ids=["found", "given"])
    @pytest.mark.parametrize(
        "form", ["TensorDict", "TensorDict, next", "function", "module", "module, next", "general"]
    )
    def test_they_are_carried_and_not_recorded(self, form, lanes, initial):
        policies = {
            "TensorDict": self.writer("_h"),
            "TensorDict, next": self.writer(("next", "_h")),
            "function": lambda observation, _h=None: dict(zip(PRIVATE_NEXT, step(observation, _h), strict=True)),
            "module": TensorDictModule(step, ["observation", "_h"], ["action", "_h", "seen"]),
            "module, next": TensorDictModule(step, ["observation", "_h"], PRIVATE_NEXT),
            "general": OwnForward(step, ["observation", "_h"], ["action", "_h", "seen"]),
        }
        options = {} if initial is None else {"initial_policy_state": {"_h": torch.tensor([initial])}}
        batch, _ = collect(policies[form], lanes, **options)
        assert numbers(batch, "seen") == in_lanes([age + (initial or 0) for age in AGES[:12]], lanes)
        assert not any("_h" in key for key in batch.keys(True, True))

    @lanes_too
    def test_they_stay_at_the_beginning_while_chance_acts(self, lanes):
        batch, _ = collect(self.writer("_h"), lanes, init_random_frames=5 * (lanes or 1))
        assert numbers(batch, "seen") == in_lanes([0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 2, 0], lanes)

    def test_one_that_is_written_and_not_read(self):
        """What parts of a chain hand each other under such a name is of no account."""
        policy = TensorDictSequential(
            TensorDictModule(lambda o: o + 1, ["observation"], ["_x"]), TensorDictModule(act, ["_x"], ["action"])
        )
        batch, _ = collect(policy)
        assert torch.equal(batch["action"], act(batch["observation"] + 1))
        assert leaf_keys(batch) == {("observation",), ("action",)}


PRIVATE_NEXT = ["action", ("next", "_h"), "seen"]


class Form:
    """A spec, as far as anybody looks."""

    def __init__(self, shape, dtype=torch.float32):
        self.shape, self.dtype = torch.Size(shape), dtype


class Composite:
    """A composite spec, as far as anybody looks."""

    def __init__(self, leaves, shape=()):
        self.leaves, self.shape = leaves, torch.Size(shape)

    def keys(self, include_nested, leaves_only):
        assert include_nested
        assert leaves_only
        return list(self.leaves)

    def __getitem__(self, key):
        return self.leaves[key]


class Primer:
    def __init__(self, primers, default_value):
        self.primers, self.default_value = primers, default_value


class Primed(nn.Module):
    """Says its state's first value by itself, as TorchRL's recurrent modules do; without it, it fails."""

    def __init__(self, primers, default_value):
        super().__init__()
        self.primer = Primer(primers, default_value)

    def make_tensordict_primer(self):
        return self.primer

    def forward(self, observation, hidden):
        return act(observation, hidden), hidden + 1, hidden.clone()


OUT = ["action", ("next", "hidden"), "seen"]


class TestStated:
    """What primers and specs say of the state."""

    @lanes_too
    @pytest.mark.parametrize(
        ("default", "first"),
        [
            (0.0, 0),
            (5, 5),
            (torch.tensor([5.0]), 5),
            ({"hidden": 5.0}, 5),
            ({"hidden": torch.tensor([5.0])}, 5),
            ({}, 0),
        ],
    )
    def test_a_primer(self, default, first, lanes):
        primed = Primed(Composite({"hidden": Form((1,)), "other": Form((2,))}), default)
        batch, _ = collect(TensorDictModule(primed, ["observation", "hidden"], OUT), lanes)
        assert numbers(batch, "hidden") == in_lanes([age + first for age in AGES[:12]], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])
        assert ("other",) not in leaf_keys(batch)

    @lanes_too
    def test_a_primer_of_a_nested_key_and_another_dtype(self, lanes):
        primed = Primed(Composite({("g", "h"): Form((1,), torch.int16)}), {("g", "h"): 5})
        policy = TensorDictModule(primed, ["observation", ("g", "h")], ["action", ("next", "g", "h"), "seen"])
        batch, _ = collect(policy, lanes)
        assert numbers(batch, ("g", "h")) == in_lanes([age + 5 for age in AGES[:12]], lanes)
        assert batch["g", "h"].dtype is torch.int16

    @lanes_too
    def test_a_primer_in_a_chain(self, lanes):
        primed = Primed(Composite({"hidden": Form((1,))}), 5.0)
        policy = TensorDictSequential(
            TensorDictModule(lambda o: o, ["observation"], ["x"]), TensorDictModule(primed, ["x", "hidden"], OUT)
        )
        batch, _ = collect(policy, lanes)
        assert numbers(batch, "hidden") == in_lanes([age + 5 for age in AGES[:12]], lanes)

    @lanes_too
    @pytest.mark.parametrize("form", ["of a TensorDict", "optional", "required"])
    def test_a_primer_in_a_module_of_ones_own(self, form, lanes):
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = Primed(Composite({"hidden": Form((1,))}), 5.0)

        class OfTensorDict(Whole):
            def forward(self, td):
                hidden = td.get("hidden", None)
                hidden = zeros(td["observation"]) if hidden is None else hidden
                return td.update(nested(self.part(td["observation"], hidden)))

        class Optional(Whole):
            def forward(self, observation, hidden=None):
                return nested(self.part(observation, zeros(observation) if hidden is None else hidden))

        class Required(Whole):
            def forward(self, observation, hidden):
                return nested(self.part(observation, hidden))

        def nested(values):
            action, after, seen = values
            return {"action": action, "next": {"hidden": after}, "seen": seen}

        policy = {"of a TensorDict": OfTensorDict, "optional": Optional, "required": Required}[form]()
        batch, _ = collect(policy, lanes)
        assert numbers(batch, "seen") == in_lanes([age + 5 for age in AGES[:12]], lanes)

    def test_what_the_user_gives_counts_more(self):
        primed = Primed(Composite({"hidden": Form((1,))}), 5.0)
        policy = TensorDictModule(primed, ["observation", "hidden"], OUT)
        batch, _ = collect(policy, initial_policy_state={"hidden": torch.tensor([7.0])})
        assert numbers(batch, "hidden") == in_lanes([age + 7 for age in AGES[:12]], 3)

    @lanes_too
    @pytest.mark.parametrize("written_for", ["one lane", "all lanes"])
    def test_a_spec(self, written_for, lanes):
        """The shape is what it says: without it, the policy could not be called."""
        lead = (lanes,) if written_for == "all lanes" and lanes else ()
        policy = TensorDictModule(lambda o, h: (act(o, h), h + 1, h.clone()), ["observation", "hidden"], OUT)
        leaves = {("next", "hidden"): Form((*lead, 1)), "action": None}
        policy.spec = Composite(leaves, lead)
        batch, _ = collect(policy, lanes)
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], lanes)
        assert torch.equal(batch["seen"], batch["hidden"])

    @lanes_too
    @pytest.mark.parametrize("initial", [None, {"hidden": torch.tensor([5.0])}])
    def test_a_trusted_policy_is_not_called_at_construction(self, initial, lanes):
        calls = []

        def call(observation, hidden):
            calls.append(1)
            return act(observation, hidden), hidden + 1, hidden.clone()

        policy = TensorDictModule(call, ["observation", "hidden"], OUT)
        policy.spec = Composite({("next", "hidden"): Form((1,)), "seen": Form((1,)), "action": Form((), torch.int64)})
        batch, _ = collect(policy, lanes, trust_policy=True, initial_policy_state=initial)
        assert len(calls) == 12
        assert numbers(batch, "hidden") == in_lanes([age + (5 if initial else 0) for age in AGES[:12]], lanes)


class TestLaterChanges:
    """Hooks that come and go between batches change how a chain is called, and nothing of its state."""

    @pytest.mark.parametrize("names", list(itertools.permutations(["is_init", "hidden", "more"])), ids=str)
    def test_a_hook_on_a_module_that_reads_its_past_in_any_order(self, names):
        def call(*values):
            given = dict(zip(["observation", *names], values, strict=True))
            hidden, more = given["hidden"], given["more"]
            action = act(given["observation"], hidden)
            return action, hidden + 1, more + 2, hidden.clone(), more.clone(), given["is_init"].clone()

        policy = TensorDictModule(
            call,
            ["observation", *names],
            ["action", ("next", "hidden"), ("next", "more"), "seen", "seen more", "first"],
        )
        initial = {"hidden": torch.zeros(1), "more": torch.zeros(1)}
        with collecting(policy, initial_policy_state=initial) as (collector, _):
            batches = [collector.next()]
            handle = policy.register_forward_hook(lambda *_: None)
            batches.append(collector.next())
            handle.remove()
            batches.append(collector.next())
        batch = torch.cat(batches, -1)
        assert numbers(batch, "hidden") == in_lanes(AGES[:12], 3)
        assert numbers(batch, "more") == in_lanes([2 * age for age in AGES[:12]], 3)
        assert torch.equal(batch["seen"], batch["hidden"])
        assert torch.equal(batch["seen more"], batch["more"])
        assert torch.equal(batch["first"], batch["is_init"])

    def test_a_hook_on_a_chain_with_a_private_name_that_nobody_reads_at_first(self):
        policy = TensorDictSequential(TensorDictModule(lambda o: o, ["observation"], ["_x"]), module())
        with collecting(policy) as (collector, _):
            batches = [collector.next()]
            policy.register_forward_hook(lambda *_: None)
            batches.append(collector.next())
        assert numbers(torch.cat(batches, -1), "hidden") == in_lanes(AGES[:8], 3)

    def test_a_module_that_is_replaced(self):
        policy = module()
        with collecting(policy) as (collector, _):
            batches = [collector.next()]
            policy.module = lambda o, h: (act(o, h), h + 10, h.clone())
            batches.append(collector.next())
        assert numbers(torch.cat(batches, -1), "hidden") == in_lanes([0, 1, 2, 0, 1, 11, 21, 31], 3)


class TestFailures:
    """After a rollout that was lost, episodes and state begin anew."""

    def test_an_interrupt_in_the_policy_leaves_the_collector_open(self):
        calls = []

        def policy(observation, is_init, hidden=None):
            calls.append(1)
            if len(calls) == 2 + 4 + 3:  # two at construction, four of the first batch
                signal.raise_signal(signal.SIGINT)
            return marked(observation, is_init, hidden)

        with collecting(policy) as (collector, _):
            first = collector.next()
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            assert not collector.closed
            batch = torch.cat([collector.next(), collector.next()], -1)
        assert numbers(first, "hidden") == in_lanes(AGES[:4], 3)
        # episodes of 3 and 5 frames came first, the second and the third of which was dropped: 3 and 5 once more
        assert len(calls) == 2 + 4 + 3 + 8
        lengths = [3, 5] if batch["next", "done"][0, 2] else [5, 3]
        ages = [t for length in lengths * 2 for t in range(length)][:8]
        assert numbers(batch, "hidden") == in_lanes(ages, 3)
        assert torch.equal(batch["seen"], batch["hidden"])
        assert torch.equal(batch["first"], batch["is_init"])
        assert numbers(batch, "is_init") == in_lanes([age == 0 for age in ages], 3)
        check_batch(batch, previous=first)

    @pytest.mark.parametrize("at", [1, 3, 4])
    def test_an_interrupt_in_an_environment(self, at):
        envs = [Scripted(lane, [(100, "terminated")], BOX, DISCRETE) for lane in range(2)]
        original, calls = envs[1].step, []

        def interrupted(action):
            calls.append(1)
            if len(calls) == 4 + at:
                signal.raise_signal(signal.SIGINT)
            return original(action)

        envs[1].step = interrupted
        with Collector(envs, marked, frames_per_batch=8) as collector:
            first = collector.next()
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            second = collector.next()
        assert numbers(first, "hidden") == numbers(second, "hidden") == [[0, 1, 2, 3]] * 2
        assert numbers(second, "first") == numbers(second, "is_init") == [[True, False, False, False]] * 2

    def test_an_interrupt_in_a_warm_up(self):
        """Nothing was delivered of it: all random frames come, and then the policy begins with its first state."""
        env = Scripted(0, [(100, "terminated")], BOX, DISCRETE)
        original, calls = env.step, []

        def interrupted(action):
            calls.append(1)
            if len(calls) == 4:
                signal.raise_signal(signal.SIGINT)
            return original(action)

        env.step = interrupted
        with Collector(env, marked, frames_per_batch=6, init_random_frames=3) as collector:
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batch = collector.next()
        assert numbers(batch, "hidden") == [0, 0, 0, 0, 1, 2]
        assert batch["collector", "policy_version"].tolist() == [-1, -1, -1, 0, 0, 0]
        assert not batch["first"].any()

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    def test_an_exception_of_the_policy_closes_the_collector(self, kind):
        calls = []

        def policy(observation, hidden=None):
            calls.append(1)
            if len(calls) == 9:
                raise kind("no more")
            return function(observation, hidden)

        with collecting(policy) as (collector, _):
            collector.next()
            with pytest.raises(Exception, match="no more"):
                collector.next()
            assert collector.closed


class TestCtrlCAnywhere:
    def test_state_and_flags_fit_the_frames_that_come_all_the_same(self):
        wrong, number, places = [], 0, [None] * 17
        while len(places) >= number:
            number += 17
            with collecting(marked, 2, init_random_frames=11, max_frames_per_traj=4) as (collector, _):
                batches = [collector.next()]
                places = interrupt_at_call(number)
                try:
                    batches.append(collector.next())
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.setprofile(None)
                batches += [collector.next(), collector.next()]
            wrong += [places[-1] for batch in batches if not self.fits(batch)]
        assert number > 500
        assert not wrong

    @staticmethod
    def fits(batch):
        """Each lane, whatever came before, counts from where its episode or the policy began."""
        acts = batch["collector", "policy_version"] >= 0
        hidden, after = batch["hidden"].squeeze(-1), batch["next", "hidden"].squeeze(-1)
        first = batch["step_count"].squeeze(-1) == 0
        return (
            torch.equal(after, torch.where(acts, hidden + 1, 0))
            and not hidden[first].any()
            and torch.equal(hidden[:, 1:], torch.where(first[:, 1:], 0, after[:, :-1]))
            and torch.equal(batch["seen"].squeeze(-1)[acts], hidden[acts])
            and torch.equal(batch["is_init"].squeeze(-1), first)
            and torch.equal(batch["first"].squeeze(-1), first & acts)
        )


class TestSaving:
    def test_a_load_begins_new_episodes_with_the_first_state(self):
        with collecting(marked) as (collector, _):
            collector.next()
            state = collector.state_dict()
            assert "hidden" not in repr(state)
        with collecting(marked) as (collector, _):
            collector.next()
            collector.load_state_dict(state)
            batch = collector.next()
        # the second episode of the environments was under way
        assert numbers(batch, "hidden")[0][0] == 0
        assert numbers(batch, "first") == numbers(batch, "is_init")
        assert batch["is_init"][:, 0].all()

    def test_two_collectors_of_one_policy_have_a_state_each(self):
        with collecting(function) as (one, _), collecting(function) as (other, _):
            batches = [one.next(), other.next(), other.next(), one.next()]
        assert [numbers(batch, "hidden")[0] for batch in batches] == [AGES[:4], AGES[:4], AGES[4:8], AGES[4:8]]


class TestSplit:
    def test_trajectories_begin_with_the_first_state(self):
        batch, _ = collect(function, 2, steps=8, batches=1, split_trajs=True)
        assert numbers(batch, "hidden") == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]] * 2
