"""Calling `forward` directly is calling the module: same numbers, same side effects, hooks honoured."""

from __future__ import annotations

import copy
import pickle
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from rlcollect.rollout.policy.direct import DirectCall

T = TypeVar("T")


def values(result):
    """Every tensor of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in values(part)]


def assert_same(result, expected):
    ours, theirs = values(result), values(expected)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_calls_alike(module, *inputs, direct=True):
    """A direct call gives what a copy of the module gives, draws as much and leaves the same state behind."""
    twin_of, reference = module, copy.deepcopy(module)
    call = DirectCall(twin_of)
    assert call.is_direct is direct
    for seed in range(3):  # again and again: buffers move
        torch.manual_seed(seed)
        result = call.call(*inputs)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = reference(*inputs)
        assert_same(result, expected)
        assert torch.equal(after, torch.get_rng_state())
        assert type(result) is type(expected)
    assert_same(list(module.state_dict().values()), list(reference.state_dict().values()))
    assert not call.refresh()


def parts():
    """The networks that users have, with an input each."""
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    image = torch.randn(2, 3, 8, 8)
    sequence = torch.randn(2, 6, 8)
    return {
        "linear": (nn.Linear(4, 2), x),
        "sequential": (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), x),
        "nested sequential": (nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential()), x),
        "conv": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)), image),
        "layer norm": (nn.LayerNorm(4), x),
        "batch norm": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), x),
        "batch norm 2d": (nn.BatchNorm2d(3), image),
        "instance norm with statistics": (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), image),
        "dropout": (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), x),
        "lstm": (nn.LSTM(8, 5, num_layers=2, batch_first=True, dropout=0.3), sequence),
        "gru": (nn.GRU(8, 5, bidirectional=True), sequence),
        "lstm cell": (nn.LSTMCell(4, 3), x),
        "embedding": (nn.Embedding(10, 3, max_norm=1.0), torch.arange(10)),
        "transformer layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), sequence),
        "transformer": (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
            ),
            sequence,
        ),
        "weight norm": (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 2))), x),
        "spectral norm": (nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 2))), x),
        "orthogonal": (nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))), x),
        "bilinear upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), image),
        "prelu": (nn.PReLU(), x),
    }


class TestTheSameNumbers:
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize("name", sorted(parts()))
    def test_of_common_modules(self, name, training):
        module, x = parts()[name]
        with torch.no_grad():
            assert_calls_alike(module.train(training), x)

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize("need_weights", [True, False])
    def test_of_attention_with_keyword_arguments(self, training, need_weights):
        attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True).train(training)
        x = torch.randn(2, 6, 8)
        call = DirectCall(attention)
        assert call.is_direct
        with torch.no_grad():
            torch.manual_seed(1)
            result = call.call(x, x, x, need_weights=need_weights)
            torch.manual_seed(1)
            expected = attention(x, x, x, need_weights=need_weights)
        assert torch.equal(result[0], expected[0])
        assert (result[1] is None) == (expected[1] is None)

    def test_of_containers_walked_in_forward(self):
        class Walker(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
                self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 1)})
                self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
                self.shifts = nn.ParameterDict({"x": nn.Parameter(torch.randn(4))})

            def forward(self, x):
                for layer, scale in zip(self.layers, self.scales, strict=True):
                    x = torch.tanh(layer(x)) * scale + self.shifts["x"]
                x = x + self.layers[-1](x)
                return {name: head(x) for name, head in self.heads.items()}["a"], self.heads["b"](x), len(self.layers)

        walker, x = Walker(), torch.randn(5, 4)
        call = DirectCall(walker)
        assert call.is_direct
        assert_same(call.call(x)[:2], walker(x)[:2])
        assert call.call(x)[2] == 3

    def test_of_containers_sliced_in_forward(self):
        """`self.net[:-1](x)` for features is a common idiom; slices are new containers."""

        class Sliced(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
                self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

            def forward(self, x):
                x = self.net[:-1](x) + self.net[0](x) + (self.net + self.net[1:])(x)
                for layer in self.layers[1:]:
                    x = layer(x)
                return x

        assert_calls_alike(Sliced(), torch.randn(5, 4))

    def test_of_modules_called_with_other_parameters(self):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

            def forward(self, x):
                doubled = {name: value * 2 for name, value in self.net.named_parameters()}
                return torch.func.functional_call(self.net, doubled, (x,)) + self.net(x)

        assert_calls_alike(Functional(), torch.randn(5, 4))

    def test_of_copies_made_in_forward(self):
        class Copying(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

            def forward(self, x):
                frozen = copy.deepcopy(self.net)
                return frozen(x) + self.net(x)

        with torch.no_grad():
            assert_calls_alike(Copying(), torch.randn(5, 4))

    def test_of_a_module_used_in_two_places(self):
        shared = nn.Linear(4, 4)
        assert_calls_alike(nn.Sequential(shared, nn.Tanh(), shared, nn.Sequential(shared)), torch.randn(2, 4))

    def test_of_a_parameter_used_in_two_places(self):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        net = nn.Sequential(first, second)
        call = DirectCall(net)
        with torch.no_grad():
            first.weight.mul_(2)
        x = torch.randn(2, 4)
        assert_same(call.call(x), net(x))

    def test_of_gradients(self):
        """A policy may want them for reasons of its own."""
        net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4)
        reference = copy.deepcopy(net)
        DirectCall(net).call(x).sum().backward()
        reference(x).sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])

    def test_of_modules_with_several_inputs_and_outputs(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Linear(4, 2), nn.Bilinear(4, 4, 2)

            def forward(self, a, b=None, *rest, scale=1.0, **options):
                return self.left(a) * scale, self.right(a, a if b is None else b), *rest, *options.values()

        two, a, b = Two(), torch.randn(3, 4), torch.randn(3, 4)
        call = DirectCall(two).call
        assert_same(call(a, b, a, scale=2.0, more=b), two(a, b, a, scale=2.0, more=b))
        assert_same(call(a), two(a))

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
    @pytest.mark.parametrize(
        "hooked",
        [
            lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
            lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
            lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", amount=5),
        ],
        ids=["old weight norm", "old spectral norm", "pruned"],
    )
    def test_of_children_that_are_remade_by_a_hook(self, hooked):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 4), hooked(), nn.Tanh()).eval(), torch.randn(5, 4)
        call = DirectCall(net)
        seen = []
        for _ in range(2):
            assert_same(call.call(x), net(x))
            seen.append(call.call(x))
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter))
        assert not torch.equal(*seen)

    def test_of_lazy_modules_before_and_after_their_first_call(self):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)), torch.randn(5, 4)
        call = DirectCall(net)
        first = call.call(x)
        assert call.refresh()
        assert call.is_direct
        assert not call.refresh()
        net.eval()
        assert_same(call.call(x), net(x))
        assert first.shape == (5, 2)
        assert type(net[0]) is nn.Linear


class TestWhatIsNoPlainModule:
    """Whatever is not a plain module is called as it is."""

    def test_a_function(self):
        def function(x):
            return x + 1

        call = DirectCall(function)
        assert call.call is function
        assert not call.is_direct
        assert not call.refresh()

    def test_a_custom_call(self):
        class Counted(nn.Linear):
            calls = 0

            def __call__(self, x):
                Counted.calls += 1
                return super().__call__(x) + 1

        for module in (Counted(4, 2), nn.Sequential(Counted(4, 2))):
            before, x = Counted.calls, torch.randn(3, 4)
            assert_same(DirectCall(module).call(x), module(x))
            assert Counted.calls == before + 2

    def test_a_class_that_watches_its_subclasses(self):
        made = []

        class Watching(nn.Module):
            def __init_subclass__(cls):
                super().__init_subclass__()
                made.append(cls)

            def forward(self, x):
                return x * 2

        class Watched(Watching):
            pass

        before = list(made)
        for module in (Watched(), nn.Sequential(Watched())):
            assert_same(DirectCall(module).call(torch.ones(2)), torch.full((2,), 2.0))
        assert made == before

    def test_a_class_with_slots(self):
        class Slotted(nn.Module):
            __slots__ = ("factor",)

            def __init__(self):
                super().__init__()
                self.factor = 3

            def forward(self, x):
                return x * self.factor

        for module in (Slotted(), nn.Sequential(Slotted())):
            assert_same(DirectCall(module).call(torch.ones(2)), torch.full((2,), 3.0))

    def test_a_generic_class(self):
        class Typed(nn.Module, Generic[T]):
            def forward(self, x):
                return x * 2

        for module in (Typed(), nn.Sequential(Typed[int]())):
            assert_same(DirectCall(module).call(torch.ones(2)), torch.full((2,), 2.0))

    def test_a_class_with_a_metaclass(self):
        class Meta(type):
            pass

        class Module(nn.Module, metaclass=Meta):
            def forward(self, x):
                return x * 2

        for module in (Module(), nn.Sequential(Module())):
            assert_same(DirectCall(module).call(torch.ones(2)), torch.full((2,), 2.0))

    def test_a_forward_of_the_instance(self):
        net = nn.Linear(4, 2)
        net.forward = lambda x: x.sum(-1)
        x = torch.randn(3, 4)
        call = DirectCall(nn.Sequential(net))
        assert_same(call.call(x), x.sum(-1))
        late = nn.Sequential(nn.Linear(4, 2))
        call = DirectCall(late)
        late[0].forward = lambda x: x.sum(-1)
        assert call.refresh()
        assert_same(call.call(x), x.sum(-1))

    @pytest.mark.parametrize("place", ["root", "child"])
    def test_a_custom_getattr_that_makes_weights(self, place):
        """`forward` sees what `self.weight` is, not what is stored under that name."""

        class Doubled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_parameter("weight", nn.Parameter(torch.ones(4)))
                self.register_buffer("shift", torch.ones(4))

            def __getattr__(self, name):
                value = super().__getattr__(name)
                return value * 2 if name in ("weight", "shift") else value

            def forward(self, x):
                return x * self.weight + self.shift

        x = torch.randn(3, 4)
        module = Doubled() if place == "root" else nn.Sequential(Doubled())
        assert_same(DirectCall(module).call(x), x * 2 + 2)

    def test_a_custom_getattr_that_wraps_children(self):
        class Wrapping(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 2)

            def __getattr__(self, name):
                value = super().__getattr__(name)
                return (lambda x: value(x) + 1) if name == "inner" else value

            def forward(self, x):
                return self.inner(x)

        module, x = Wrapping(), torch.randn(3, 4)
        assert_same(DirectCall(module).call(x), module(x))

    def test_a_custom_getattribute(self):
        class Doubled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_parameter("weight", nn.Parameter(torch.ones(4)))

            def __getattribute__(self, name):
                return nn.Module.__getattr__(self, name) * 2 if name == "weight" else super().__getattribute__(name)

            def forward(self, x):
                return x * self.weight

        x = torch.randn(3, 4)
        for module in (Doubled(), nn.Sequential(Doubled())):
            assert_same(DirectCall(module).call(x), x * 2)

    def test_a_custom_getattr_for_names_that_are_not_there(self):
        class Delegating(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 2)

            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(super().__getattr__("inner"), name)

            def forward(self, x):
                return self.inner(x) + self.in_features + self.weight.sum()

        module, x = Delegating(), torch.randn(3, 4)
        assert_same(DirectCall(module).call(x), module(x))

    def test_a_static_or_class_method_as_forward(self):
        class Static(nn.Module):
            @staticmethod
            def forward(x):
                return x * 2

        class OfClass(nn.Module):
            factor = 3

            @classmethod
            def forward(cls, x):
                return x * cls.factor

        x = torch.randn(3)
        for kind in (Static, OfClass):
            for module in (kind(), nn.Sequential(kind())):
                assert_same(DirectCall(module).call(x), module(x))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_script(self):
        net, x = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Tanh())), torch.randn(2, 4)
        call = DirectCall(net)
        assert not call.is_direct
        assert_same(call.call(x), net(x))
        assert_same(DirectCall(nn.Sequential(net)).call(x), net(x))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_a_traced_module(self):
        x = torch.randn(2, 4)
        net = torch.jit.trace(nn.Linear(4, 3), x)
        assert_same(DirectCall(nn.Sequential(net)).call(x), net(x))

    def test_a_graph_module(self):
        net, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh())), torch.randn(2, 4)
        assert_same(DirectCall(net).call(x), net(x))
        assert_same(DirectCall(nn.Sequential(net)).call(x), net(x))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_compiled_modules_are_not_bypassed(self):
        """Nothing is compiled here: their calls are replaced by ones that say so."""
        for wrap in (lambda m: m, nn.Sequential):
            inside = nn.Linear(4, 2)
            net = wrap(inside)
            call = DirectCall(net)
            inside.compile()
            inside._compiled_call_impl = lambda x: "compiled"
            assert call.refresh()
            assert call.call(torch.randn(3, 4)) == "compiled"
        optimized = torch.compile(nn.Linear(4, 2))
        assert not DirectCall(optimized).is_direct

    def test_a_module_of_data_parallel(self):
        net, x = nn.DataParallel(nn.Linear(4, 2)), torch.randn(3, 4)
        if not torch.cuda.is_available():
            assert_same(DirectCall(net).call(x), net(x))


REGISTER = {
    "forward": lambda module, hook: module.register_forward_hook(lambda m, args, out: hook(out)),
    "forward with keywords": lambda module, hook: module.register_forward_hook(
        lambda m, args, kwargs, out: hook(out), with_kwargs=True
    ),
    "forward, always": lambda module, hook: module.register_forward_hook(
        lambda m, args, out: hook(out), always_call=True
    ),
    "pre": lambda module, hook: module.register_forward_pre_hook(lambda m, args: hook(args[0])),
    "global forward": lambda _, hook: nn.modules.module.register_module_forward_hook(lambda m, args, out: hook(out)),
    "global pre": lambda _, hook: nn.modules.module.register_module_forward_pre_hook(lambda m, args: hook(args[0])),
}


def times_ten(tensor):
    return tensor * 10


class TestHooks:
    @pytest.mark.parametrize("place", ["root", "child", "grandchild"])
    @pytest.mark.parametrize("kind", sorted(REGISTER))
    def test_registered_before(self, kind, place):
        net, x = nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.Tanh()), torch.randn(2, 4)
        module = {"root": net, "child": net[0], "grandchild": net[0][0]}[place]
        plain = net(x)
        handle = REGISTER[kind](module, times_ten)
        try:
            expected = net(x)
            assert not torch.equal(plain, expected)
            call = DirectCall(net)
            assert_same(call.call(x), expected)
        finally:
            handle.remove()
        assert call.refresh()
        assert call.is_direct
        assert_same(call.call(x), plain)

    @pytest.mark.parametrize("place", ["root", "child", "grandchild"])
    @pytest.mark.parametrize("kind", sorted(REGISTER))
    def test_registered_after_are_honoured_from_the_next_refresh_on(self, kind, place):
        net, x = nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.Tanh()), torch.randn(2, 4)
        module = {"root": net, "child": net[0], "grandchild": net[0][0]}[place]
        call = DirectCall(net)
        plain = call.call(x)
        handle = REGISTER[kind](module, times_ten)
        try:
            assert call.refresh()
            assert not call.refresh()
            assert_same(call.call(x), net(x))
            assert not torch.equal(plain, net(x))
        finally:
            handle.remove()
        assert call.refresh()
        assert_same(call.call(x), plain)

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
    def test_backward_hooks_run(self, register, late):
        net, x, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4), []
        call = DirectCall(net) if late else None
        getattr(net[0], register)(lambda *_: seen.append(1))
        call = call or DirectCall(net)
        call.refresh()
        call.call(x.requires_grad_()).sum().backward()
        assert seen == [1]

    def test_hooks_of_children_count_every_call(self):
        net, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
        net[1].register_forward_hook(lambda *_: seen.append(1))
        call = DirectCall(net)
        for _ in range(5):
            call.call(torch.randn(2, 4))
        assert len(seen) == 5

    def test_a_hook_sees_the_users_own_module(self):
        net, seen = nn.Sequential(nn.Linear(4, 4)), []
        net[0].register_forward_hook(lambda module, *_: seen.append(module))
        DirectCall(net).call(torch.randn(2, 4))
        assert seen == [net[0]]

    def test_a_shared_modules_hook_runs_in_both_places(self):
        shared, seen = nn.Linear(4, 4), []
        call = DirectCall(nn.Sequential(shared, nn.Sequential(shared)))
        shared.register_forward_hook(lambda *_: seen.append(1))
        call.refresh()
        call.call(torch.randn(2, 4))
        assert seen == [1, 1]


class Marked(nn.Module):
    """Its `forward` writes attributes, buffers and counters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4), persistent=False)
        self.register_buffer("empty", None)
        self.register_parameter("absent", None)
        self.history = []
        self.number = 0

    def forward(self, x):
        self.calls += 1
        self.last = x.mean(0)
        self.empty = x.sum().detach()
        self.number += 1
        self.history.append(self.number)
        self.fresh = x.detach()
        return self.layer(x) + self.last + (0 if self.absent is None else self.absent)


class TestSharedState:
    def test_what_forward_sets_is_set_on_the_module(self):
        module, x = Marked(), torch.randn(3, 4)
        call = DirectCall(module)
        assert not call.is_direct  # what sets attributes is called as it is
        for _ in range(3):
            call.call(x)
        assert module.calls == 3
        assert module.number == 3
        assert module.history == [1, 2, 3]
        assert torch.equal(module.last, x.mean(0))
        assert torch.equal(module.fresh, x)
        assert torch.equal(module.empty, x.sum())
        assert torch.equal(dict(module.named_buffers())["last"], x.mean(0))
        assert "last" not in module.state_dict()
        assert "calls" in module.state_dict()

    def test_what_is_set_on_the_module_is_seen_by_forward(self):
        module, x = Marked(), torch.randn(3, 4)
        call = DirectCall(module)
        before = call.call(x)
        module.number = 10
        module.absent = nn.Parameter(torch.ones(4))
        call.call(x)
        assert module.number == 11
        assert torch.equal(call.call(x), before + 1)

    def test_parameters_are_the_same_objects(self):
        class Keeping(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.weight = nn.Parameter(torch.ones(4))
                self.seen = []

            def forward(self, x):
                self.seen = [self.weight, self.layer.weight, *self.parameters()]
                return self.layer(x) * self.weight

        module = Keeping()
        DirectCall(module).call(torch.randn(3, 4))
        expected = [module.weight, module.layer.weight, *module.parameters()]
        assert len(module.seen) == len(expected)
        assert all(a is b for a, b in zip(module.seen, expected, strict=True))

    @pytest.mark.parametrize("assign", [False, True])
    def test_load_state_dict(self, assign):
        net, other = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        x = torch.randn(3, 4)
        other(x)
        call = DirectCall(net)
        net.load_state_dict(other.state_dict(), assign=assign)
        net.eval()
        assert_same(call.call(x), other.eval()(x))

    def test_optimiser_steps(self):
        net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
        call = DirectCall(net)
        optimiser = torch.optim.Adam(net.parameters())
        before = call.call(x)
        net(x).sum().backward()
        optimiser.step()
        assert_same(call.call(x), net(x))
        assert not torch.equal(before, call.call(x))

    def test_train_and_eval(self):
        net, x = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))), torch.randn(3, 4)
        call = DirectCall(net)
        net.eval()
        assert_same(call.call(x), net(x))
        net.train()
        assert (call.call(x) == 0).any()
        net[1].eval()
        net[2].eval()
        assert not (call.call(x) == 0).any()

    @pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
    def test_conversions(self, convert):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        call = DirectCall(net)
        getattr(net, convert)()
        x = getattr(torch.randn(3, 4), convert)()
        assert_same(call.call(x), net(x))
        assert call.call(x).dtype is x.dtype

    def test_requires_grad(self):
        net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
        call = DirectCall(net)
        net.requires_grad_(False)
        assert not call.call(x).requires_grad
        net.requires_grad_(True)
        assert call.call(x).requires_grad

    def test_parameters_that_are_replaced(self):
        net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
        call = DirectCall(net)
        net[0].weight = nn.Parameter(torch.ones(4, 4))
        net[0].bias = None
        assert_same(call.call(x), net(x))

    def test_children_that_are_replaced_are_seen_after_a_refresh(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
                self.heads = nn.ModuleDict({"a": nn.Linear(4, 1)})

            def forward(self, x):
                x = self.body(x)
                return torch.cat([head(x) for head in self.heads.values()], -1)

        net, x = Net(), torch.randn(3, 4)
        call = DirectCall(net)
        for change in (
            lambda: setattr(net, "body", nn.Linear(4, 4)),
            lambda: net.heads.update({"b": nn.Linear(4, 2)}),
            lambda: net.heads.pop("a"),
            lambda: setattr(net, "body", nn.Sequential(nn.Linear(4, 4))),
            lambda: net.body.append(nn.ReLU()),
            lambda: net.body.__setitem__(0, nn.Linear(4, 4, bias=False)),
            lambda: net.body.insert(0, nn.Tanh()),
        ):
            change()
            assert call.refresh()
            assert not call.refresh()
            assert_same(call.call(x), net(x))

    def test_a_child_removed_and_put_back_where_it_was(self):
        """Another module may have the address of one that is gone."""
        net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
        call = DirectCall(net)
        for _ in range(50):
            net[0] = nn.Linear(4, 4)
            call.refresh()
            assert_same(call.call(x), net(x))

    def test_parametrizations_and_pruning_that_come_later(self):
        net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
        call = DirectCall(net)

        class Symmetric(nn.Module):
            def forward(self, w):
                return w.triu() + w.triu(1).transpose(-1, -2)

        parametrize.register_parametrization(net[0], "weight", Symmetric())
        assert call.refresh()
        assert_same(call.call(x), net(x))
        parametrize.remove_parametrizations(net[0], "weight")
        assert call.refresh()
        assert_same(call.call(x), net(x))
        prune.l1_unstructured(net[1], "weight", amount=8)
        assert call.refresh()
        assert_same(call.call(x), net(x))
        prune.remove(net[1], "weight")
        assert call.refresh()
        assert_same(call.call(x), net(x))

    def test_names_that_are_added_and_removed(self):
        net = Marked()
        call = DirectCall(net)
        del net.absent
        net.absent = 2.0  # a plain attribute now
        call.refresh()
        x = torch.randn(3, 4)
        assert_same(call.call(x), net(x))

    @pytest.mark.parametrize("way", ["attribute", "add_module", "dict", "list", "registered as None"])
    def test_submodules_made_in_forward_belong_to_the_module(self, way):
        """Lazily made heads: the learner trains what the policy uses."""

        class Growing(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = nn.ModuleDict()
                self.layers = nn.ModuleList()
                if way == "registered as None":
                    self.register_module("added", None)

            def forward(self, x):
                if way == "dict":
                    if "a" not in self.heads:
                        self.heads["a"] = nn.Linear(4, 4)
                    return self.heads["a"](x)
                if way == "list":
                    if not len(self.layers):
                        self.layers.append(nn.Linear(4, 4))
                    return self.layers[0](x)
                if getattr(self, "added", None) is None:
                    if way == "add_module":
                        self.add_module("added", nn.Linear(4, 4))
                    else:
                        self.added = nn.Linear(4, 4)
                return self.added(x)

        module, x = Growing(), torch.randn(3, 4)
        call = DirectCall(module)
        first = call.call(x)
        assert_same(call.call(x), first)
        assert len(list(module.parameters())) == 2
        assert_same(module(x), first)
        call.refresh()
        assert_same(call.call(x), first)

    def test_attributes_deleted_and_set_in_forward(self):
        class Remaking(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("state", torch.zeros(2))

            def forward(self, x):
                if hasattr(self, "state"):
                    x = x + self.state
                    del self.state
                self.state = x
                return x

        module, reference, x = Remaking(), Remaking(), torch.ones(2)
        call = DirectCall(module)
        for _ in range(3):
            assert_same(call.call(x), reference(x))
            call.refresh()


class TestTheOriginalIsUntouched:
    def test_its_class_attributes_and_hooks(self):
        net = nn.Sequential(Marked(), nn.Linear(4, 4))
        kinds = [type(module) for module in net.modules()]
        keys = [set(vars(module)) for module in net.modules()]
        class_keys = [set(vars(kind)) for kind in kinds]
        children = [list(module.children()) for module in net.modules()]
        names = list(net.state_dict())
        DirectCall(net)
        assert [type(module) for module in net.modules()] == kinds
        assert [set(vars(module)) for module in net.modules()] == keys
        assert [set(vars(kind)) for kind in kinds] == class_keys
        assert [list(module.children()) for module in net.modules()] == children
        assert list(net.state_dict()) == names
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())

    def test_copies_and_pickles(self):
        net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), torch.randn(3, 4)
        call = DirectCall(net)
        call.call(x)
        net.eval()
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
            assert type(other) is nn.Sequential
            assert [type(child) for child in other] == [nn.Linear, nn.BatchNorm1d, nn.Tanh]
            assert_same(other(x), call.call(x))
        deep = copy.deepcopy(net)
        with torch.no_grad():
            deep[0].weight.zero_()
        assert not torch.equal(deep(x), call.call(x))

    def test_two_calls_of_one_module_do_not_meet(self):
        net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
        first, second = DirectCall(net), DirectCall(net)
        net[0].register_forward_hook(lambda m, a, out: out * 10)
        assert second.refresh()
        assert_same(second.call(x), net(x))
        assert first.refresh()
        assert_same(first.call(x), net(x))


class TestWhatForwardMayDo:
    def test_super_and_isinstance(self):
        class Base(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x)

        class Derived(Base):
            def forward(self, x):
                assert isinstance(self, Derived)
                assert isinstance(self, Base)
                assert isinstance(self.layer, nn.Linear)
                assert type(self).__name__ == "Derived"
                return super().forward(x) + super(Derived, self).forward(x) + Base.forward(self, x)

        assert_calls_alike(Derived(), torch.randn(3, 4), direct=False)
        assert_calls_alike(nn.Sequential(Derived()), torch.randn(3, 4))

    def test_ask_for_its_exact_class(self):
        class Exact(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                x = self.layer(x)
                if type(self) is Exact and self.__class__ is Exact and type(self.layer) is nn.Linear:
                    return x
                return x * 0

        assert_calls_alike(Exact(), torch.randn(3, 4), direct=False)
        assert_calls_alike(nn.Sequential(Exact()), torch.randn(3, 4))

    def test_ask_for_the_exact_class_of_a_child(self):
        class Exact(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x) * (1 if type(self.layer) is nn.Linear else 0)

        assert_calls_alike(Exact(), torch.randn(3, 4), direct=False)

    def test_refer_to_itself_and_its_parent(self):
        class Child(nn.Module):
            def __init__(self, parent):
                super().__init__()
                self.parent = [parent]  # a list, so that it is no child

            def forward(self, x):
                return self.parent[0].scale * x + self.parent[0].layer(x)

        class Parent(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))
                self.layer = nn.Linear(4, 4)
                self.child = Child(self)
                object.__setattr__(self, "me", self)
                self.calls = 0

            def forward(self, x):
                self.me.calls += 1
                return self.child(x) + self.me.layer(x)

        module, x = Parent(), torch.randn(3, 4)
        call = DirectCall(module)
        assert_same(call.call(x), module(x))
        assert module.calls == 2
        with torch.no_grad():
            module.scale.fill_(5.0)
        assert_same(call.call(x), module(x))

    def test_call_other_methods_and_properties(self):
        class Net(nn.Module):
            kind = "net"

            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.__secret = nn.Linear(4, 4)

            @property
            def both(self):
                return [self.layer, self.__secret]

            def encode(self, x):
                return sum(layer(x) for layer in self.both)

            def forward(self, x):
                x = self.encode(x) * len(list(self.parameters())) + len(self.kind)
                return x + sum(p.sum() for _, p in self.named_parameters()) + self.get_parameter("layer.weight").sum()

        module, x = Net(), torch.randn(3, 4)
        assert_same(DirectCall(module).call(x), module(x))

    def test_call_itself_again(self):
        class Recursive(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x, depth=2):
                x = torch.tanh(self.layer(x))
                return x if depth == 0 else self(x, depth - 1)

        assert_calls_alike(Recursive(), torch.randn(3, 4), direct=False)

    def test_a_cycle_of_children(self):
        class Ring(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x, turns=3):
                return self.layer(x) if turns == 0 else self.next_one(x, turns - 1)

        first, second = Ring(), Ring()
        first.next_one, second.next_one = second, first
        x = torch.randn(3, 4)
        call = DirectCall(first)
        assert_same(call.call(x), first(x))

    def test_raise(self):
        class Raising(nn.Module):
            def forward(self, x):
                raise ZeroDivisionError("here")

        with pytest.raises(ZeroDivisionError, match="here"):
            DirectCall(nn.Sequential(Raising())).call(torch.ones(1))

    def test_read_what_is_not_there(self):
        class Wrong(nn.Module):
            def forward(self, x):
                return self.nothing

        with pytest.raises(AttributeError, match="'Wrong' object has no attribute 'nothing'"):
            DirectCall(Wrong()).call(torch.ones(1))

    def test_class_attributes_win_over_stored_ones_as_they_do_in_the_module(self):
        class Shadowed(nn.Module):
            layer = None  # set before `__init__`: it hides the child

            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return x if self.layer is None else self.layer(x)

        module, x = Shadowed(), torch.randn(3, 4)
        assert_same(DirectCall(module).call(x), module(x))
