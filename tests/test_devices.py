"""Where things are: devices resolved once, and tensors that arrive whole on the other side."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlcollect import Collector, OptionError
from rlcollect.devices import CPU, CudaCopies, Placement, PlainCopies, Transfer, copies_for, device_of, resolve
from rlcollect.testing import Counter

META = torch.device("meta")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")


class TestTheDeviceThatAnOptionNames:
    @pytest.mark.parametrize("value", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
    def test_every_name_of_the_host_is_one_device(self, value):
        """Torch tells "cpu" from "cpu:0"; a policy would be copied from the one to the other."""
        assert device_of("device", value) == CPU

    @pytest.mark.parametrize("value", ["meta", "meta:0", META], ids=repr)
    def test_every_name_of_another_one_too(self, value):
        assert device_of("device", value) == META

    @pytest.mark.parametrize(
        "value",
        ["nonsense", "", "cpu:-1", "cpu:x", "vulkan", "hpu", 1.5, True, [1], {}, object(), -1, 10**30],
        ids=lambda value: repr(value)[:20],
    )
    def test_what_is_none_is_an_error_that_names_the_option_and_shows_the_value(self, value):
        """Whatever torch raises for it: it has half a dozen ways to say that it lacks a device."""
        with pytest.raises(OptionError) as raised:
            device_of("storing_device", value)
        assert "storing_device" in str(raised.value)
        assert repr(value) in str(raised.value)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
    @pytest.mark.parametrize("value", ["cuda", "cuda:0", torch.device("cuda"), 0], ids=repr)
    def test_cuda_where_there_is_none(self, value):
        with pytest.raises(OptionError, match="policy_device="):
            device_of("policy_device", value)

    @pytest.mark.cuda
    @needs_cuda
    @pytest.mark.parametrize("value", ["cuda", "cuda:0", torch.device("cuda"), 0], ids=repr)
    def test_cuda_has_its_index(self, value):
        assert device_of("policy_device", value) == torch.device("cuda", torch.cuda.current_device())

    @pytest.mark.cuda
    @needs_cuda
    def test_a_cuda_device_too_many(self):
        with pytest.raises(OptionError, match="device='cuda:99'"):
            device_of("device", "cuda:99")


class TestResolution:
    def test_without_options_all_stay_where_they_are(self):
        assert resolve() == Placement(None, None)

    @pytest.mark.parametrize(
        ("policy", "storing"), list(itertools.product([None, CPU, META], [None, CPU, META])), ids=str
    )
    @pytest.mark.parametrize("device", [None, CPU, META], ids=str)
    def test_device_stands_for_those_that_are_not_given(self, device, policy, storing):
        placement = resolve(device, policy, None, storing)
        assert placement.policy == (policy if policy is not None else device)
        assert placement.storing == (storing if storing is not None else device)

    def test_environments_are_where_they_are(self):
        assert resolve(META) == Placement(META, META)
        assert resolve(META, env_device=CPU) == Placement(META, META, CPU)
        assert resolve(env_device=CPU) == Placement(None, None, CPU)

    @pytest.mark.parametrize("others", [{}, {"device": META}, {"policy_device": META, "storing_device": CPU}])
    def test_environments_that_are_said_to_be_elsewhere_are_refused_with_what_to_say_instead(self, others):
        with pytest.raises(OptionError, match=r"env_device='meta'.*on cpu.*policy_device=.*storing_device="):
            Collector(Counter, frames_per_batch=4, env_device=META, **others)


class TestWhatMovesTensors:
    def test_the_host_needs_nothing(self):
        assert copies_for(CPU, no_cuda_sync=False) is None
        assert copies_for(CPU, no_cuda_sync=True) is None

    @pytest.mark.parametrize("no_cuda_sync", [False, True])
    def test_any_other_device_gets_plain_copies(self, no_cuda_sync):
        assert isinstance(copies_for(META, no_cuda_sync=no_cuda_sync), PlainCopies)

    def test_cuda_gets_plain_ones_if_asked(self):
        assert isinstance(copies_for(torch.device("cuda", 0), no_cuda_sync=True), PlainCopies)

    def test_plain_copies_go_there(self):
        (there,) = PlainCopies(META).to_device((torch.zeros(2, 3),))
        assert there.device == META
        assert there.shape == (2, 3)

    def test_without_copies_a_call_is_itself(self):
        def call(tensor):
            return tensor

        assert Transfer().around(call) is call
        assert Transfer().device == CPU


def blank(tensor):
    """What stands in memory that nothing has been written to: a value that no test expects."""
    if tensor.dtype is torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return torch.full(tensor.shape, float("nan") if tensor.is_floating_point() else -77, dtype=tensor.dtype)


class There(torch.Tensor):
    """A tensor on the other device: "meta" is what it is called here."""

    device = META


def bare(tensor):
    return tensor.as_subclass(torch.Tensor)


class Stream:
    """What a CUDA stream may do: nothing at all, before somebody waits for it."""

    def __init__(self):
        self.work = []

    def copy(self, target, source):
        self.work.append(lambda: bare(target).copy_(bare(source)))
        return target

    def launch(self, function, *tensors):
        """A kernel: its result is promised, and computed from what stands in its arguments when its turn comes."""
        arguments = [bare(tensor) for tensor in tensors]
        promised = blank(function(*arguments))
        self.work.append(lambda: promised.copy_(function(*arguments)))
        return promised.as_subclass(There)

    def run(self):
        for step in self.work:
            step()
        self.work.clear()


class Pinned(torch.Tensor):
    """Host memory that a stream can copy from and to."""

    stream: ClassVar[Stream]

    def to(self, device, non_blocking=False):
        assert device == META, "the device of these tests"
        assert non_blocking, "a copy that waits for itself"
        return self.stream.copy(blank(bare(self)).as_subclass(There), self)

    def copy_(self, source, non_blocking=False):
        return self.stream.copy(self, source) if non_blocking else super().copy_(source)


@pytest.fixture
def stream(monkeypatch):
    """Puts a lazy stream and memory of the host in the place of CUDA's; "meta" is the name of the other device."""
    made = Pinned.stream = Stream()
    empty = torch.empty

    class Event:
        def record(self, stream):
            assert stream is made
            self.waits_for = len(made.work)

        def synchronize(self):
            assert self.waits_for == len(made.work), "something was asked for after the event"
            made.run()

    def pinned(*shape, pin_memory=False, **options):
        tensor = empty(*shape, **options)
        return tensor.as_subclass(Pinned) if pin_memory else tensor

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch, "empty", pinned)
    return made


class TestCudaCopies:
    """On a stream that does everything as late as it may: what is right there is right on every CUDA device."""

    def test_nothing_is_read_before_it_has_arrived(self, stream):
        call = Transfer(META, CudaCopies(META)).around(lambda *t: stream.launch(lambda x, y: x * 2 + y, *t))
        observation, other = torch.zeros(3), torch.zeros(3)
        for step in range(4):
            observation.fill_(step)  # the host writes the next observation in the same place
            other.fill_(100)
            assert call(observation, other).tolist() == [2 * step + 100] * 3

    def test_several_outputs_of_several_kinds(self, stream):
        def policy(observation):
            return (
                stream.launch(lambda x: x[:, 0].long(), observation),
                stream.launch(lambda x: x > 1, observation),
                stream.launch(torch.clone, observation),
            )

        call = Transfer(META, CudaCopies(META)).around(policy)
        for step in range(3):
            observation = torch.arange(6.0).reshape(2, 3) + step
            action, flags, same = call(observation)
            assert action.tolist() == [step, 3 + step]
            assert flags.tolist() == (observation > 1).tolist()
            assert same.tolist() == observation.tolist()

    def test_whoever_did_not_wait_would_be_too_soon(self, stream, monkeypatch):
        """The stream of these tests tells."""
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
        call = Transfer(META, CudaCopies(META)).around(lambda x: stream.launch(lambda x: x * 2, x))
        call(torch.ones(3))
        assert call(torch.ones(3)).tolist() != [2.0] * 3

    def test_the_memory_is_used_again(self, stream):
        call = Transfer(META, CudaCopies(META)).around(lambda x: stream.launch(lambda x: x * 2, x))
        first = call(torch.ones(3))
        assert call(torch.ones(3)).data_ptr() == first.data_ptr()

    def test_other_shapes_and_dtypes_get_memory_of_their_own(self, stream):
        call = Transfer(META, CudaCopies(META)).around(lambda x: stream.launch(lambda x: x * 2, x))
        for given in (torch.ones(3), torch.ones(4), torch.ones(4).double(), torch.ones(4, dtype=torch.int64)):
            result = call(given)
            assert result.dtype is given.dtype
            assert result.tolist() == [2] * len(given)

    def test_what_is_on_the_host_already_comes_back_as_it_is(self, stream):
        array, tensor = np.ones(3), torch.ones(3)

        def policy(observation):
            return array, stream.launch(torch.clone, observation), tensor, 5

        call = Transfer(META, CudaCopies(META)).around(policy)
        for step in range(3):
            first, second, third, fourth = call(torch.full((3,), float(step)))
            assert first is array
            assert second.tolist() == [step] * 3
            assert third is tensor
            assert fourth == 5

    def test_no_tensors_at_all(self, stream):
        call = Transfer(META, CudaCopies(META)).around(lambda: stream.launch(lambda: torch.ones(2)))
        assert call().tolist() == [1.0, 1.0]

    def test_rows_that_lie_apart_in_memory(self, stream):
        call = Transfer(META, CudaCopies(META)).around(lambda x: stream.launch(lambda x: x * 2, x))
        memory = torch.arange(12.0).reshape(3, 4)
        for t in range(4):
            assert call(memory[:, t]).tolist() == [2.0 * t, 2.0 * (4 + t), 2.0 * (8 + t)]


@pytest.mark.cuda
@needs_cuda
class TestOnCuda:
    @pytest.mark.parametrize("no_cuda_sync", [False, True], ids=["pinned", "plain"])
    def test_a_slow_kernel_is_waited_for(self, no_cuda_sync):
        device = torch.device("cuda", 0)

        def slow(x, y):
            torch.cuda._sleep(20_000_000)
            return x * 2, (x.sum(-1) + y).long()

        call = Transfer(device, copies_for(device, no_cuda_sync=no_cuda_sync)).around(slow)
        x, y = torch.zeros(64, 1000), torch.zeros(64)
        for step in range(5):
            x.fill_(step)
            y.fill_(3)
            doubled, total = call(x, y)
            x.fill_(-1)  # the host may write there as soon as the call has returned
            assert doubled.device == total.device == CPU
            assert (doubled == 2 * step).all()
            assert (total == 1000 * step + 3).all()

    def test_it_works_on_a_stream_of_the_programs_own(self):
        device = torch.device("cuda", 0)
        call = Transfer(device, CudaCopies(device)).around(lambda x: (torch.cuda._sleep(20_000_000), x * 2)[1])
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for step in range(3):
                assert (call(torch.full((1000,), float(step))) == 2 * step).all()
