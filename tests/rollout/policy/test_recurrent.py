"""`RecurrentModule`: layers and cells of torch as parts of a policy, held against the layers themselves over time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcollect import Collector, PolicyError, RecurrentModule
from rlcollect.testing import check_batch
from tests.reference import Scripted
from tests.rollout.helpers import BOX, DISCRETE, LANES, bits, collect, collecting, leaf_keys, maker

lanes_too = pytest.mark.parametrize("lanes", LANES, ids=["single", "one lane", "three lanes"])
HIDDEN = 5

KINDS = {
    "RNN": lambda: nn.RNN(3, HIDDEN),
    "RNN of two layers": lambda: nn.RNN(3, HIDDEN, num_layers=2, nonlinearity="relu"),
    "GRU": lambda: nn.GRU(3, HIDDEN),
    "GRU, batch first": lambda: nn.GRU(3, HIDDEN, batch_first=True),
    "GRU of three layers": lambda: nn.GRU(3, HIDDEN, num_layers=3),
    "GRU without bias": lambda: nn.GRU(3, HIDDEN, bias=False),
    "LSTM": lambda: nn.LSTM(3, HIDDEN),
    "LSTM of two layers, batch first": lambda: nn.LSTM(3, HIDDEN, num_layers=2, batch_first=True),
    "LSTM with a projection": lambda: nn.LSTM(3, HIDDEN, num_layers=2, proj_size=2),
    "RNNCell": lambda: nn.RNNCell(3, HIDDEN),
    "GRUCell": lambda: nn.GRUCell(3, HIDDEN),
    "LSTMCell": lambda: nn.LSTMCell(3, HIDDEN),
}
kinds = pytest.mark.parametrize("kind", sorted(KINDS))


def made(kind):
    torch.manual_seed(0)
    return KINDS[kind]()


def is_lstm(rnn):
    return isinstance(rnn, nn.LSTM | nn.LSTMCell)


def policy_with(core):
    """A policy whose action is told from the features."""
    head = TensorDictModule(lambda features: (features[..., 0] * 1000).long() % 4, ["features"], ["action"])
    return TensorDictSequential(core, head)


def first_state(rnn):
    """Zeros `[num_layers, H]` or `[H]` for each part of the state."""
    layers = [rnn.num_layers] if isinstance(rnn, nn.RNNBase) else []
    sizes = [getattr(rnn, "proj_size", 0) or HIDDEN, HIDDEN]
    return [torch.zeros(*layers, size) for size in sizes[: 1 + is_lstm(rnn)]]


@torch.no_grad()
def over_an_episode(rnn, observations, first=None):
    """Outputs `[T, H]` and states after each step `[T, *]`, of the layer itself, run over one episode `[T, F]`."""
    state = first_state(rnn) if first is None else first
    outputs, states = [], []
    for observation in observations:
        given = tuple(state) if is_lstm(rnn) else state[0]
        if isinstance(rnn, nn.RNNBase):
            output, after = rnn(observation[None], given)
            output = output[0]
        else:
            after = rnn(observation, given)
            output = after[0] if is_lstm(rnn) else after
        state = list(after) if is_lstm(rnn) else [after]
        outputs.append(output)
        states.append(state)
    return torch.stack(outputs), [torch.stack(parts) for parts in zip(*states, strict=True)]


def episodes(row):
    """Where the episodes of one lane begin and end, in a piece of it that begins with an episode."""
    ends = (row["next", "done"].squeeze(-1).nonzero().squeeze(-1) + 1).tolist()
    starts = [0, *ends]
    return [(start, end) for start, end in zip(starts, [*ends, len(row)], strict=True) if start < end]


class TestCollecting:
    @lanes_too
    @kinds
    def test_outputs_and_states_are_those_of_the_layer_over_each_episode(self, kind, lanes):
        rnn = made(kind)
        batch, _ = collect(policy_with(RecurrentModule(rnn)), lanes)
        check_batch(batch)
        names = ["hidden", "cell"][: 1 + is_lstm(rnn)]
        assert leaf_keys(batch) == {("observation",), ("features",), ("action",), *((name,) for name in names)}
        for row in batch if lanes else batch[None]:
            for start, end in episodes(row):
                piece = row[start:end]
                outputs, states = over_an_episode(rnn, piece["observation"])
                assert torch.allclose(piece["features"], outputs, atol=1e-6)
                assert torch.equal(piece["action"], (piece["features"][..., 0] * 1000).long() % 4)
                for name, after, zero in zip(names, states, first_state(rnn), strict=True):
                    assert torch.allclose(piece["next", name], after, atol=1e-6)
                    assert torch.equal(piece[name][0], zero)
                    assert torch.equal(piece[name][1:], piece["next", name][:-1])
        assert len(batch["action"].unique()) > 1

    @kinds
    def test_a_whole_episode_at_once_gives_the_same(self, kind):
        """Layers can be run over time by torch itself, from the state that a row holds on."""
        rnn = made(kind)
        if not isinstance(rnn, nn.RNNBase):
            pytest.skip("a cell")
        batch, _ = collect(policy_with(RecurrentModule(rnn)), None)
        piece = batch[4:8]  # of the second episode, which begins with frame 3
        state = [piece[name][0] for name in ["hidden", "cell"][: 1 + is_lstm(rnn)]]
        assert any(part.any() for part in state)
        outputs, _ = rnn(piece["observation"], tuple(state) if is_lstm(rnn) else state[0])
        assert torch.allclose(piece["features"], outputs, atol=1e-6)

    @lanes_too
    @pytest.mark.parametrize("kind", ["GRU", "LSTM with a projection", "LSTMCell"])
    def test_the_size_of_a_batch_is_not_part_of_the_data(self, kind, lanes):
        policy = policy_with(RecurrentModule(made(kind)))
        runs = [collect(policy, lanes, steps=steps, batches=12 // steps)[0] for steps in (1, 3, 12)]
        assert bits(runs[0]) == bits(runs[1]) == bits(runs[2])

    @pytest.mark.parametrize("kind", ["GRU of three layers", "LSTM of two layers, batch first", "RNNCell"])
    def test_one_lane_batched_or_not_makes_the_same_frames(self, kind):
        policy = policy_with(RecurrentModule(made(kind)))
        single, _ = collect(policy, None)
        batch, _ = collect(policy, 1)
        for key in ("observation", "features", "hidden", ("next", "hidden")):
            assert torch.allclose(single[key], batch[key][0], atol=1e-6)

    @lanes_too
    @kinds
    def test_initial_values_of_ones_own(self, kind, lanes):
        rnn = made(kind)
        names = ["hidden", "cell"][: 1 + is_lstm(rnn)]
        initial = {name: torch.randn_like(zero) for name, zero in zip(names, first_state(rnn), strict=True)}
        batch, _ = collect(policy_with(RecurrentModule(rnn)), lanes, initial_policy_state=initial)
        for row in batch if lanes else batch[None]:
            for start, end in episodes(row):
                outputs, _ = over_an_episode(rnn, row["observation"][start:end], list(initial.values()))
                assert torch.allclose(row["features"][start:end], outputs, atol=1e-6)
                for name, value in initial.items():
                    assert torch.equal(row[name][start], value)

    @lanes_too
    def test_keys_of_ones_own(self, lanes):
        rnn = made("LSTM")
        core = RecurrentModule(
            rnn, in_key="observation", out_key=("net", "out"), state_keys=[("memory", "h"), ("memory", "c")]
        )
        assert core.in_keys == ["observation", ("memory", "h"), ("memory", "c")]
        assert core.out_keys == [("net", "out"), ("next", "memory", "h"), ("next", "memory", "c")]
        head = TensorDictModule(lambda x: x[..., 0].long(), [("net", "out")], ["action"])
        batch, _ = collect(TensorDictSequential(core, head), lanes)
        row = batch[0] if lanes else batch
        outputs, states = over_an_episode(rnn, row["observation"][3:8])
        assert torch.allclose(row["net", "out"][3:8], outputs, atol=1e-6)
        assert torch.allclose(row["next", "memory", "h"][3:8], states[0], atol=1e-6)
        assert torch.allclose(row["next", "memory", "c"][3:8], states[1], atol=1e-6)

    def test_two_of_them_in_one_policy(self):
        first, second = made("GRU"), nn.LSTM(HIDDEN, HIDDEN)
        policy = TensorDictSequential(
            RecurrentModule(first, out_key="x", state_keys=["h1"]),
            RecurrentModule(second, in_key="x", state_keys=["h2", "c2"]),
            policy_with(nn.Identity()).module[1],
        )
        batch, _ = collect(policy)
        for row in batch:
            for start, end in episodes(row):
                x, _ = over_an_episode(first, row["observation"][start:end])
                outputs, _ = over_an_episode(second, x)
                assert torch.allclose(row["features"][start:end], outputs, atol=1e-6)

    @pytest.mark.parametrize("change", ["in place", "another parameter", "another state dict"])
    def test_new_weights_are_used_from_the_next_batch_on(self, change):
        rnn = made("GRU")
        with collecting(policy_with(RecurrentModule(rnn)), None, steps=3) as (collector, _):
            collector.next()
            with torch.no_grad():
                if change == "in place":
                    rnn.weight_ih_l0.mul_(-2)
                elif change == "another parameter":
                    rnn.weight_ih_l0 = nn.Parameter(rnn.weight_ih_l0 * -2)
                else:
                    rnn.load_state_dict({name: value * -2 for name, value in rnn.state_dict().items()})
            batch = collector.next()  # begins with an episode
        outputs, _ = over_an_episode(copy.deepcopy(rnn), batch["observation"])
        assert torch.allclose(batch["features"], outputs, atol=1e-6)

    def test_dropout_between_layers_is_drawn_from_the_collectors_stream(self):
        policy = policy_with(RecurrentModule(nn.LSTM(3, HIDDEN, num_layers=2, dropout=0.5)))
        runs = []
        for _ in range(2):
            with Collector(maker([]), policy, frames_per_batch=8, num_envs=2) as collector:
                collector.set_seed(0)
                runs.append(bits(collector.next()))
        assert runs[0] == runs[1]

    def test_it_is_called_without_a_tensordict(self):
        with collecting(policy_with(RecurrentModule(made("LSTM")))) as (collector, _):
            assert "direct path" in repr(collector)

    def test_it_takes_part_in_a_warm_up(self):
        rnn = made("LSTM")
        batch, _ = collect(policy_with(RecurrentModule(rnn)), None, init_random_frames=5)
        assert not batch["hidden"][:6].any()
        assert not batch["next", "cell"][:5].any()
        outputs, _ = over_an_episode(rnn, batch["observation"][5:8])  # the policy begins in the middle of an episode
        assert torch.allclose(batch["features"][5:8], outputs, atol=1e-6)

    def test_called_by_hand_with_a_tensordict(self):
        rnn = made("LSTM of two layers, batch first")
        core = RecurrentModule(rnn)
        observation = torch.randn(4, 3)
        state = torch.zeros(4, 2, HIDDEN)
        td = core(TensorDict({"observation": observation, "hidden": state, "cell": state}, [4]))
        outputs, (hidden, cell) = rnn(observation[:, None])
        assert torch.allclose(td["features"], outputs[:, 0], atol=1e-6)
        assert torch.allclose(td["next", "hidden"], hidden.transpose(0, 1), atol=1e-6)
        assert torch.allclose(td["next", "cell"], cell.transpose(0, 1), atol=1e-6)


class TestUnroll:
    """Over a batch `[N, T]`, from the state that its first column holds, it gives what was recorded."""

    @staticmethod
    def recorded(rnn, lanes=3, steps=10, batches=2, **options):
        """The last of some batches of lanes whose episodes begin and end at different times."""
        scripts = [[(3 + lane, "terminated"), (1, "truncated"), (4, "both")] for lane in range(lanes)]
        envs = [Scripted(lane, script, BOX, DISCRETE) for lane, script in enumerate(scripts)]
        core = RecurrentModule(rnn)
        with Collector(
            envs, policy_with(core), frames_per_batch=steps * lanes, record=("is_init",), **options
        ) as collector:
            for _ in range(batches):
                batch = collector.next()
        return core, batch

    @kinds
    @pytest.mark.parametrize("batches", [1, 2])
    def test_it_gives_what_was_recorded(self, kind, batches):
        rnn = made(kind)
        core, batch = self.recorded(rnn, batches=batches)
        names = ["hidden", "cell"][: 1 + is_lstm(rnn)]
        assert batch["is_init"][:, 1:].any()
        state = [batch[name][:, 0] for name in names]
        before = [part.clone() for part in state]
        outputs, *after = core.unroll(batch["observation"], state, batch["is_init"])
        assert outputs.requires_grad
        assert torch.allclose(outputs, batch["features"], atol=1e-6)
        for name, part, left, old in zip(names, after, state, before, strict=True):
            assert torch.allclose(part, batch["next", name][:, -1], atol=1e-6)
            assert torch.equal(left, old)

    @pytest.mark.parametrize("kind", ["GRU", "LSTM"])
    @pytest.mark.parametrize("start", range(10))
    def test_from_any_frame_of_it(self, kind, start):
        core, batch = self.recorded(made(kind))
        piece = batch[:, start:]
        state = [piece[name][:, 0] for name in ["hidden", "cell"][: 1 + (kind == "LSTM")]]
        outputs, *_ = core.unroll(piece["observation"], state, piece["is_init"])
        assert torch.allclose(outputs, piece["features"], atol=1e-6)

    @pytest.mark.parametrize("start", [0, 1, 2])
    def test_of_episodes_that_began_with_values_of_ones_own(self, start):
        """Its first state is that of the batch, whatever it was; no episode begins later in these frames."""
        core, batch = self.recorded(
            made("GRU"), lanes=2, steps=3, batches=1, initial_policy_state={"hidden": torch.ones(1, HIDDEN)}
        )
        piece = batch[:, start:]
        outputs, *_ = core.unroll(piece["observation"], [piece["hidden"][:, 0]], piece["is_init"])
        assert torch.allclose(outputs, piece["features"], atol=1e-6)

    def test_no_gradient_crosses_the_beginning_of_an_episode(self):
        core, batch = self.recorded(made("GRU"))
        inputs = batch["observation"].clone().requires_grad_()
        outputs, _ = core.unroll(inputs, [batch["hidden"][:, 0]], batch["is_init"])
        outputs[0, -1].sum().backward()
        start = int(batch["is_init"][0].squeeze(-1).nonzero()[-1])
        reached = inputs.grad.abs().sum(-1) > 0
        assert reached[0].tolist() == [t >= start for t in range(10)]
        assert not reached[1:].any()

    def test_a_state_in_the_middle_of_an_episode_gets_a_gradient(self):
        core, batch = self.recorded(made("GRU"))
        state = torch.zeros(3, 1, HIDDEN, requires_grad=True)
        outputs, _ = core.unroll(batch["observation"], [state], batch["is_init"])
        outputs[:, 0].sum().backward()
        begins = batch["is_init"][:, 0, 0]
        assert not begins.all()
        assert ((state.grad.abs().sum((1, 2)) > 0) == ~begins).all()


class TestWhatIsRefused:
    @pytest.mark.parametrize("module", [nn.Linear(3, 5), nn.LSTM, None, nn.Transformer, 3], ids=repr)
    def test_other_modules(self, module):
        with pytest.raises(
            PolicyError, match=r"RecurrentModule takes one of RNN, GRU, LSTM, RNNCell, GRUCell, LSTMCell"
        ):
            RecurrentModule(module)

    @pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
    def test_two_directions(self, kind):
        with pytest.raises(PolicyError, match="future"):
            RecurrentModule(kind(3, 5, bidirectional=True))

    @pytest.mark.parametrize(
        ("rnn", "keys"),
        [
            (nn.LSTM(3, 5), ["h"]),
            (nn.GRU(3, 5), ["h", "c"]),
            (nn.LSTMCell(3, 5), []),
            (nn.GRUCell(3, 5), []),
            (nn.LSTM(3, 5), "hidden"),
            (nn.LSTM(3, 5), ["h", "h"]),  # one of them would be lost
        ],
        ids=str,
    )
    def test_another_number_of_names(self, rnn, keys):
        with pytest.raises(PolicyError, match="state_keys"):
            RecurrentModule(rnn, state_keys=keys)

    def test_an_observation_of_another_width(self):
        with pytest.raises(PolicyError, match=r"failed on the first observation \('observation' \[3, 3\]\)"):
            collect(policy_with(RecurrentModule(nn.GRU(7, 5))))

    def test_an_input_that_is_not_there(self):
        with pytest.raises(PolicyError, match="'pixels'"):
            collect(policy_with(RecurrentModule(nn.GRU(3, 5), in_key="pixels")))

    @pytest.mark.parametrize(
        "given",
        [np.zeros((3, 1, 5), np.float32), torch.zeros(5), torch.zeros(1, 5).double()],
        ids=["lanes", "H", "double"],
    )
    def test_initial_values_that_do_not_fit(self, given):
        with pytest.raises(PolicyError, match=r"(?s)hidden.*initial_policy_state"):
            collect(policy_with(RecurrentModule(nn.GRU(3, 5))), initial_policy_state={"hidden": given})
