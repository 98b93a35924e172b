"""Calling a module's `forward` without what `nn.Module.__call__` does around it.

`nn.Module.__call__` looks for hooks, at every module of the tree, at every call: a fifth of what a small network costs.
Where nothing hooks into a module, `DirectCall` gives a *twin*: an object of a subclass whose `__call__` is `forward`,
whose attribute dictionary IS the module's own, and whose children are twins too. Parameters, buffers, modes and
whatever `forward` sets on `self` are therefore the module's; the module itself is not touched.

Hooks that come later, and children that are replaced, are seen by `refresh`, once a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["DirectCall"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class DirectCall:
    """A callable that does what a module does, without the detour.

    Attributes:
        call: the twin's `forward`, or the module itself where something hooks into its call.
        is_direct: whether `call` is a twin's.

    Args:
        module: an `nn.Module`, or any callable, which is then called as it is.
    """

    def __init__(self, module: Callable[..., Any]) -> None:
        self._module = module
        self._watched: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.is_direct = False
        self.call: Callable[..., Any] = module
        self._build()

    def _build(self) -> None:
        self._watched = []
        self.call, self.is_direct = self._module, False
        if isinstance(self._module, nn.Module):
            twin = self._twin(self._module, {})
            self.is_direct = twin is not self._module
            self.call = twin.forward if self.is_direct else self._module

    def refresh(self) -> bool:
        """Looks for new hooks and replaced children; whether `call` is another one now."""
        if any(_shape(module) != before for module, before in self._watched):
            self._build()
            return True
        return False

    def _twin(self, module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        if not _is_plain(type(module)):
            return module
        self._watched.append((module, _shape(module)))
        if _shape(module)[0]:
            return module
        children: dict[str, nn.Module | None] = {}
        kind = type(module)
        names: dict[str, Any] = {"__call__": kind.forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
        names["_modules"] = property(lambda _: children)
        for name in (*module._parameters, *module._buffers):
            if not hasattr(kind, name):
                names[name] = _stored(name, "_parameters" if name in module._parameters else "_buffers")
        twin_kind = type(kind.__name__, (kind,), names)
        twin: nn.Module = object.__new__(twin_kind)
        object.__setattr__(twin, "__dict__", module.__dict__)
        made[id(module)] = twin
        for name, child in module._modules.items():
            children[name] = None if child is None else self._twin(child, made)
            if not hasattr(kind, name):
                setattr(twin_kind, name, children[name])
        return twin


def _stored(name: str, place: str) -> property:
    return property(lambda self: self.__dict__[place][name])


def _shape(module: nn.Module) -> tuple[Any, ...]:
    """What a twin relies on: that nothing hooks into the call, the children, and the names of what is stored."""
    own = module.__dict__
    hooked = (
        any(own[name] for name in HOOKS)
        or any(getattr(torch_module, name, None) for name in GLOBAL_HOOKS)
        or own.get("_compiled_call_impl") is not None
        or "forward" in own
    )
    children = [(name, id(child)) for name, child in own["_modules"].items()]
    return hooked, children, [*own["_parameters"], *own["_buffers"]]


def _is_plain(kind: type) -> bool:
    """Whether modules of this class are called as all are, and a subclass of it is harmless."""
    return (
        kind.__call__ is nn.Module.__call__  # type: ignore[operator]
        and type(kind) is type
        and not any("__init_subclass__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__[:-1])
    )
