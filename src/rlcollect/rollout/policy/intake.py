"""How a policy is taken in: made by its factory, copied to its device where it is not there, compiled if asked.

The user's module is never changed, moved or re-parameterised: what acts is that module itself, or a copy that
`update` brings up to date.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any, Self

import torch
from tensordict.nn import CudaGraphModule
from torch.nn.parameter import is_lazy

from rlcollect.devices import CPU, Transfer, copies_for
from rlcollect.errors import OptionError, PolicyError
from rlcollect.failures import relayed, warn
from rlcollect.options import How, Where
from rlcollect.weights.naming import copy_into, is_expanded, load_weights, module_of, tensors_of

__all__ = [
    "Acting",
    "RandomPolicy",
    "UntouchedBuffers",
    "policy_wrapper",
    "take_in",
    "transfer_to",
    "warm_calls",
]

Call = Callable[..., Any]


class RandomPolicy:
    """Stands for random actions in the bounds of the action space, as `policy=None` does."""

    def __repr__(self) -> str:
        return "RandomPolicy()"


class Acting:
    """The policy that acts, and where its weights come from.

    Attributes:
        given: the user's policy, or what the factory made; None for random actions.
        policy: what acts: the same, or a copy of it on another device.
        device: where it computes.
        own: buffers that the policy itself changes while it acts.

    Args:
        given: see above.
        device: where it is to compute; None: where its weights are.
    """

    def __init__(self, given: Any, device: torch.device | None) -> None:
        self.given = given
        self.policy = given
        self.own: frozenset[str] = frozenset()
        self._has_warned = False
        module = module_of(given)
        places = [] if module is None else [tensor.device for tensor in tensors_of(module).values()]
        self.device = device or (places[0] if places else CPU)
        self._has_place = device is not None or bool(places)
        if module is not None and any(place != self.device for place in places) and device is not None:
            self.policy = _copied(given, self.device)

    def go_apart(self) -> None:
        """What acts is a copy from now on, which nobody else knows.

        Raises:
            PolicyError: it cannot be copied.
        """
        if self.policy is self.given and module_of(self.given) is not None:
            self.policy = _copied(self.given, None)

    def settle(self, home: torch.device) -> None:
        """A policy that is nowhere in particular computes where the environments are."""
        if not self._has_place:
            self.device = home

    def leave_out(self, buffers: Collection[str]) -> None:
        """These buffers are changed by the policy itself while it acts: they stay those of a copy."""
        self.own = frozenset(buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights that act, parameters and buffers, but for those that the policy itself changes."""
        module = module_of(self.policy)
        tensors = {} if module is None else tensors_of(module)
        return {name: tensor for name, tensor in tensors.items() if name not in self.own and not is_lazy(tensor)}

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights that fit into the user's own module."""
        module = module_of(self.given)
        copy_into({} if module is None else tensors_of(module), weights)

    def check(self) -> None:
        """Whether `update` can be.

        Raises:
            PolicyError: the user's module has other weights than when it was copied.
        """
        for name, (source, target) in self._copied().items():
            if source is None or is_lazy(source) or source.shape != target.shape:
                raise PolicyError(
                    f"The policy's {name!r} is not there (any more, or yet), or has another shape than the copy on "
                    f"{self.device}. Call a lazy module once; make a new collector for a policy with other weights."
                )

    def update(self) -> None:
        """Copies the user's weights, parameters and buffers, to what acts; nothing where that is the same module.

        The train/eval mode goes with them; buffers that the policy changes while acting do not (one warning).
        """
        source, target = module_of(self.given), module_of(self.policy)
        if source is None or target is None or source is target:
            return
        if self.own and not self._has_warned:
            self._has_warned = True
            warn(
                f"The policy changes {', '.join(sorted(self.own))} itself while it acts; these buffers stay those of "
                f"the copy on {self.device}, whatever the learner's are."
            )
        with torch.no_grad():
            for ours, theirs in self._copied().values():
                assert ours is not None
                theirs.copy_(ours)
        modules = dict(source.named_modules())
        for name, part in target.named_modules():
            if name in modules:
                part.training = modules[name].training

    def _copied(self) -> dict[str, tuple[torch.Tensor | None, torch.Tensor]]:
        """What is copied from the user's module to a copy of it, by name."""
        source, target = module_of(self.given), module_of(self.policy)
        if source is None or target is None or source is target:
            return {}
        weights = tensors_of(source)
        return {
            name: (weights.get(name), tensor) for name, tensor in tensors_of(target).items() if name not in self.own
        }

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Loads what `weights_of` gave into the user's module, and into the copy if there is one."""
        for policy in {id(policy): policy for policy in (self.given, self.policy)}.values():
            module = module_of(policy)
            if module is not None:
                load_weights(module, state, strict=strict)


def _copied(policy: Any, device: torch.device | None) -> Any:
    """A copy, on another device or on the same."""
    try:
        made = copy.deepcopy(policy)
        module = module_of(made)
        assert module is not None
        if device is not None:
            module.to(device)
    except Exception as error:
        told = (
            "copied. Collect in the background with an AsyncCollector, which sends it to another process"
            if device is None
            else f"copied to {device}. Move it there yourself, or pass policy_factory=, which makes it there"
        )
        raise PolicyError(f"The policy cannot be {told}: {type(error).__name__}: {error}.") from error
    return made


def _saved(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None or is_lazy(buffer) else buffer.clone()


class UntouchedBuffers:
    """Puts the buffers of a module back as they were.

    Attributes:
        changed: the names of those that had been changed.
    """

    def __init__(self, policy: Any) -> None:
        module = module_of(policy)
        modules = () if module is None else module.named_modules()
        self._saved = [
            (f"{path}.{name}".lstrip("."), module, name, buffer, _saved(buffer))
            for path, module in modules
            for name, buffer in module._buffers.items()
        ]
        self.changed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for path, module, name, buffer, before in self._saved:
                now = module._buffers.get(name)
                if before is not None and (now is None or not torch.equal(now, before)):
                    self.changed.add(path)
                if buffer is not None and before is not None and not is_expanded(buffer):
                    buffer.copy_(before)
                if before is not None or buffer is None:
                    module._buffers[name] = buffer


def take_in(policy: Any, how: How, device: torch.device | None, *, worker: int = 0) -> Acting:
    """The policy that acts, from what the user passed.

    Args:
        policy: as passed.
        how: the factory.
        device: where it is to compute; None: where it is.
        worker: number of the worker, for errors.

    Raises:
        OptionError: both a policy and a factory, or a factory that makes none.
    """
    if how.policy_factory is not None:
        if policy is not None:
            raise OptionError("policy and policy_factory were both given; pass one of them.")
        try:
            policy = how.policy_factory()  # type: ignore[operator] # one, by now
        except BaseException as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise  # it could not be called
            raise relayed(error, worker=worker, lane=None, step=0)  # noqa: B904 - it has a cause of its own
        if not (isinstance(policy, RandomPolicy) or (callable(policy) and not isinstance(policy, type))):
            raise OptionError(f"policy_factory={how.policy_factory!r} should return a policy; {policy!r} came.")
    return Acting(policy, device)


def transfer_to(device: torch.device, where: Where, home: torch.device = CPU) -> Transfer:
    """What takes tensors from where the environments are to the policy's device and back."""
    return Transfer(device, copies_for(device, no_cuda_sync=where.no_cuda_sync, home=home))


def warm_calls(how: How) -> int:
    """Calls after which nothing is compiled or recorded any more."""
    graphing: Any = how.cudagraph_policy
    warmup = 2 if graphing is None else graphing.get("warmup", 2)
    return 2 if graphing is None else 2 + (warmup if isinstance(warmup, int) else 0)


def _compiled(call: Call, arguments: Mapping[str, Any]) -> Call:
    def compiled(*tensors: torch.Tensor) -> Any:
        return call(*tensors)

    # torch compiles the same code a few times and no more, whichever collector it belongs to: this one has its own
    own = FunctionType(compiled.__code__.replace(), globals(), "compiled", None, compiled.__closure__)
    try:
        made: Call = torch.compile(own, **arguments)
    except Exception as error:
        raise OptionError(f"compile_policy={arguments!r}: {type(error).__name__}: {error}") from error
    return made


def _graphed(call: Call, arguments: Mapping[str, Any], device: torch.device) -> Call:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tensordict is registered in PyTree")  # no TensorDict goes through it
            made: Call = CudaGraphModule(call, **{"device": device, **arguments})
    except Exception as error:
        raise OptionError(f"cudagraph_policy={arguments!r}: {type(error).__name__}: {error}") from error
    return made


def policy_wrapper(how: How, device: torch.device) -> Callable[[Call], Call] | None:
    """What makes a planned call a compiled one, a CUDA graph, or both; None: nothing does.

    Raises:
        OptionError: a CUDA graph of a policy that is not on a CUDA device.
    """
    if how.cudagraph_policy is not None and device.type != "cuda":
        raise OptionError(
            f"cudagraph_policy records CUDA kernels, and this policy computes on {device}: set policy_device=, or "
            "leave it out (compile_policy= works on any device)."
        )
    compiling: Any = how.compile_policy
    graphing: Any = how.cudagraph_policy
    if compiling is None and graphing is None:
        return None

    def wrap(call: Call) -> Call:
        if compiling is not None:
            call = _compiled(call, compiling)
        return call if graphing is None else _graphed(call, graphing, device)

    return wrap
