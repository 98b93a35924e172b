"""How a policy is taken in: made by its factory, copied to its device where it is not there, compiled if asked.

The user's module is never changed, moved or re-parameterised: what acts is that module itself, or a copy that
`update` brings up to date.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.nn.parameter import is_lazy

from rlcollect.devices import CPU, Transfer, copies_for
from rlcollect.errors import OptionError, PolicyError
from rlcollect.failures import relayed, warn
from rlcollect.options import How, Where

__all__ = [
    "Acting",
    "RandomPolicy",
    "UntouchedBuffers",
    "misfit",
    "module_of",
    "policy_wrapper",
    "receive",
    "take_in",
    "transfer_to",
    "warm_calls",
    "weights_by_name",
    "weights_of",
]

Call = Callable[..., Any]


class RandomPolicy:
    """Stands for random actions in the bounds of the action space, as `policy=None` does."""

    def __repr__(self) -> str:
        return "RandomPolicy()"


def module_of(policy: Any) -> nn.Module | None:
    """The module whose weights a policy computes with: itself, the one it is a method of, or that was compiled."""
    policy = getattr(policy, "_torchdynamo_orig_callable", policy)  # of a compiled function
    owner: Any = policy if isinstance(policy, nn.Module) else getattr(policy, "__self__", None)
    while isinstance(getattr(owner, "_orig_mod", None), nn.Module):
        owner = owner._orig_mod
    return owner if isinstance(owner, nn.Module) else None


def weights_of(policy: Any) -> dict[str, Any] | None:
    """The weights that a policy computes with, under the names they have where nothing is compiled; None: no module."""
    module = module_of(policy)
    return None if module is None else {_plain(name): value for name, value in module.state_dict().items()}


def receive(tensors: Sequence[tuple[str, torch.Tensor]], weights: Mapping[str, torch.Tensor]) -> None:
    """Copies weights into tensors of the same names, as far as they came."""
    with torch.no_grad():
        for name, tensor in tensors:
            if name in weights:
                tensor.copy_(weights[name])


def weights_by_name(given: Any) -> dict[str, torch.Tensor]:
    """Weights as the user has them, under the names of a state dict: of a module, a TensorDict, or such a dict.

    Raises:
        PolicyError: they are none of these.
    """
    module = module_of(given)
    if module is not None:
        return {_plain(name): tensor for name, tensor in (*module.state_dict().items(), *module.named_buffers())}
    if isinstance(given, TensorDictBase):
        given = given.flatten_keys(".")
    if not isinstance(given, Mapping | TensorDictBase):
        raise PolicyError(
            f"Weights come as a module, a TensorDict of parameters or a state dict; {type(given).__name__} came."
        )
    named = {_plain(str(name)): value for name, value in given.items()}
    if wrong := [name for name, value in named.items() if not isinstance(value, torch.Tensor)]:
        raise PolicyError(f"Weights are tensors; {wrong[0]!r} is {named[wrong[0]]!r}.")
    return named


def misfit(given: Mapping[str, torch.Tensor], leaves: Mapping[str, tuple[int, ...]], known: Collection[str]) -> str:
    """The first difference between weights that were given and those that are needed, in words; empty: there is none.

    Args:
        given: by name.
        leaves: the shapes of those that are needed.
        known: names that may be given too.
    """
    for name, shape in leaves.items():
        if name not in given:
            return f"{name!r} is lacking"
        if is_lazy(given[name]):
            return f"{name!r} has no values yet: call the lazy module once"
        if tuple(given[name].shape) != shape:
            return f"{name!r} has shape {list(given[name].shape)}, and should have {list(shape)}"
    unknown = [name for name in given if name not in leaves and name not in known]
    return f"{unknown[0]!r} is none of the policy's" if unknown else ""


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


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
        places = [] if module is None else [tensor.device for _, tensor in _tensors(module)]
        self.device = device or (places[0] if places else CPU)
        self._has_place = device is not None or bool(places)
        if module is not None and any(place != self.device for place in places) and device is not None:
            self.policy = _copied(given, self.device)

    def settle(self, home: torch.device) -> None:
        """A policy that is nowhere in particular computes where the environments are."""
        if not self._has_place:
            self.device = home

    def leave_out(self, buffers: Collection[str]) -> None:
        """These buffers are changed by the policy itself while it acts: they stay those of a copy."""
        self.own = frozenset(buffers)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The weights that act, parameters and buffers, but for those that the policy itself changes."""
        module = module_of(self.policy)
        tensors = [] if module is None else [*_tensors(module)]
        return [(_plain(name), tensor) for name, tensor in tensors if name not in self.own and not is_lazy(tensor)]

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights into the user's own module.

        Raises:
            PolicyError: they do not fit. None was copied then.
        """
        module = module_of(self.given)
        targets = {} if module is None else {_plain(name): tensor for name, tensor in _tensors(module)}
        known = set(weights_of(self.given) or ())
        lacking_here = {name for name in targets if name not in known}  # buffers that no state dict has
        needed = {
            name: tuple(tensor.shape)
            for name, tensor in targets.items()
            if not (is_lazy(tensor) or (name in lacking_here and name not in weights))
        }
        if difference := misfit(weights, needed, known):
            raise PolicyError(f"The weights do not fit the policy: {difference}. Nothing was changed.")
        with torch.no_grad():
            for name in needed:
                targets[name].copy_(weights[name])

    def update(self) -> None:
        """Copies the user's weights, parameters and buffers, to what acts; nothing where that is the same module.

        The train/eval mode goes with them; buffers that the policy changes while acting do not (one warning).

        Raises:
            PolicyError: the user's module has other weights than when it was copied.
        """
        source, target = module_of(self.given), module_of(self.policy)
        if source is None or target is None or source is target:
            return
        weights = dict(_tensors(source))
        copied = [(name, tensor) for name, tensor in _tensors(target) if name not in self.own]
        if self.own and not self._has_warned:
            self._has_warned = True
            warn(
                f"The policy changes {', '.join(sorted(self.own))} itself while it acts; these buffers stay those of "
                f"the copy on {self.device}, whatever the learner's are."
            )
        for name, tensor in copied:  # all of them are looked at before any is copied
            if name not in weights or is_lazy(weights[name]) or weights[name].shape != tensor.shape:
                raise PolicyError(
                    f"The policy's {name!r} is not there (any more, or yet), or has another shape than the copy on "
                    f"{self.device}. Call a lazy module once; make a new collector for a policy with other weights."
                )
        with torch.no_grad():
            for name, tensor in copied:
                tensor.copy_(weights[name])
        modules = dict(source.named_modules())
        for name, part in target.named_modules():
            if name in modules:
                part.training = modules[name].training

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Loads what `weights_of` gave into the user's module, and into the copy if there is one."""
        for policy in {id(policy): policy for policy in (self.given, self.policy)}.values():
            module = module_of(policy)
            if module is not None:
                names = {_plain(name): name for name in module.state_dict()}
                module.load_state_dict({names.get(name, name): value for name, value in state.items()}, strict=strict)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _copied(policy: Any, device: torch.device) -> Any:
    try:
        made = copy.deepcopy(policy)
        module = module_of(made)
        assert module is not None
        module.to(device)
    except Exception as error:
        raise PolicyError(
            f"The policy cannot be copied to {device}: {type(error).__name__}: {error}. Move it there yourself, or "
            "pass policy_factory=, which makes it there."
        ) from error
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
                if buffer is not None and before is not None and not _is_expanded(buffer):
                    buffer.copy_(before)
                if before is not None or buffer is None:
                    module._buffers[name] = buffer


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory; such a tensor cannot be written to in place, by anyone."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
