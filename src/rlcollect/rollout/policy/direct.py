"""Calling a module's `forward` without what `nn.Module.__call__` does around it.

`nn.Module.__call__` looks for hooks, at every module of the tree, at every call: a third of what a small network costs.
Where nothing hooks into a module, `DirectCall` gives a *twin*: an object of a subclass whose `__call__` is `forward`,
whose attribute dictionary IS the module's own, and whose children are twins too. Parameters, buffers, modes are
therefore the module's; the module itself is not touched.

A twin stands for its module only where nobody can tell: modules of torch itself, and others whose `forward` does
nothing with `self` but read attributes and call methods that do no more (its bytecode is looked at). Anything else is
called as it is. Hooks that come later, and children that are replaced, are seen by `refresh`, once a rollout.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["DirectCall", "is_hooked"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
TORCH = "torch.nn.modules."
LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK")
READS = ("LOAD_ATTR", "LOAD_METHOD")
GIVEAWAYS = {"super", "type", "locals", "vars", "eval", "exec", "__class__"}  # ways to get at a twin, or to know it


class DirectCall:
    """A callable that does what a module does, without the detour.

    Attributes:
        call: the twin's `forward`, or the module itself where something hooks into its call.
        is_direct: whether `call` is a twin's.

    Args:
        module: an `nn.Module`, or any callable, which is then called as it is.
        twins: False: a module is called as it is, too (a compiler knows better what to leave out).
    """

    def __init__(self, module: Callable[..., Any], *, twins: bool = True) -> None:
        self._module = module
        self._twins = twins
        self._watched: list[tuple[nn.Module, bool, tuple[Any, ...]]] = []
        self.is_direct = False
        self.call: Callable[..., Any] = module
        self._build()

    def _build(self) -> None:
        self._watched = []
        self.call, self.is_direct = self._module, False
        if self._twins and isinstance(self._module, nn.Module):
            twin = self._twin(self._module, {})
            self.is_direct = twin is not self._module
            self.call = twin.forward if self.is_direct else self._module

    def refresh(self) -> bool:
        """Looks for new hooks and replaced children; whether `call` is another one now."""
        if any(_shape(module, plain=plain) != before for module, plain, before in self._watched):
            self._build()
            return True
        return False

    def _twin(self, module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        kind = type(module)
        plain = _is_plain(kind)
        shape = _shape(module, plain=plain)
        self._watched.append((module, plain, shape))
        if not plain or shape[1]:
            return module
        children = _Children(module._modules)
        names: dict[str, Any] = {
            "__call__": kind.forward,
            "__class__": property(lambda _: kind),
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "_modules": property(lambda _: children),
        }
        for name in (*module._parameters, *module._buffers):
            if not hasattr(kind, name):
                names[name] = _stored(name, "_parameters" if name in module._parameters else "_buffers")
        twin_kind = type(kind.__name__, (kind,), names)
        twin: nn.Module = object.__new__(twin_kind)
        object.__setattr__(twin, "__dict__", module.__dict__)
        made[id(module)] = twin
        for name, child in module._modules.items():
            children.see(name, None if child is None else self._twin(child, made))
            if not hasattr(kind, name):
                setattr(twin_kind, name, children[name])
        return twin


class _Children(dict[str, Any]):
    """The children's twins; what is added or removed is added to or removed from the module's own children too."""

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__()
        self._own = own

    def see(self, name: str, twin: Any) -> None:
        super().__setitem__(name, twin)

    def __setitem__(self, name: str, child: Any) -> None:
        self._own[name] = child
        super().__setitem__(name, child)

    def __delitem__(self, name: str) -> None:
        del self._own[name]
        super().__delitem__(name)

    def clear(self) -> None:
        self._own.clear()
        super().clear()

    def pop(self, name: str, *default: Any) -> Any:
        self._own.pop(name, *default)
        return super().pop(name, *default)


def _stored(name: str, place: str) -> property:
    return property(lambda self: self.__dict__[place][name])


def is_hooked(module: nn.Module) -> bool:
    """Whether something else than the class's `forward` runs when the module is called."""
    own = module.__dict__
    return (
        any(own[name] for name in HOOKS)
        or any(getattr(torch_module, name, None) for name in GLOBAL_HOOKS)
        or own.get("_compiled_call_impl") is not None
        or "forward" in own
    )


def _shape(module: nn.Module, *, plain: bool) -> tuple[Any, ...]:
    """What a twin relies on: the class, that nothing hooks into the call, the children, the names of what is stored."""
    if not plain:
        return (type(module),)
    own = module.__dict__
    children = [(name, id(child)) for name, child in own["_modules"].items()]
    return type(module), is_hooked(module), children, [*own["_parameters"], *own["_buffers"]]


# --- whether a twin would be noticed ----------------------------------------------------------------------------------


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether modules of this class are called as all are, and nothing tells a twin from its module."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    theirs = [base for base in bases if not base.__module__.startswith(TORCH)]
    return (
        type(kind) is type
        and kind.__call__ is nn.Module.__call__
        and not issubclass(kind, torch.jit.ScriptModule)
        and not any(name in vars(base) for base in bases for name in ("__init_subclass__", "__slots__"))
        and not any(name.startswith("__get") or name == "__setattr__" for base in theirs for name in vars(base))
        and (not theirs or _only_reads(kind, "forward", set()))
    )


def _only_reads(kind: type, name: str, known: set[str]) -> bool:
    """Whether a method does nothing with `self` but read attributes and call methods of which the same is true."""
    if name in known:
        return True
    known.add(name)
    method = inspect.getattr_static(kind, name)
    if isinstance(method, property) and method.fset is None and isinstance(method.fget, FunctionType):
        method = method.fget
    if not isinstance(method, FunctionType) or method.__code__.co_argcount == 0:
        return False
    code = method.__code__
    self_name = code.co_varnames[0]
    if self_name in code.co_cellvars or GIVEAWAYS & {*code.co_names, *code.co_freevars}:
        return False
    instructions = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for step, after in zip(instructions, [*instructions[1:], None], strict=True):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # later Pythons load two at once
        if self_name not in names or "FAST" not in step.opname:
            continue
        if step.opname not in LOADS or after is None or after.opname not in READS:
            return False
        if not _harmless(kind, after.argval, known):
            return False
    return True


def _harmless(kind: type, name: str, known: set[str]) -> bool:
    """Whether reading this attribute of a twin gives what reading it of the module gives."""
    try:
        found = inspect.getattr_static(kind, name)
    except AttributeError:
        return True  # a parameter, a buffer, a child, or a plain attribute
    if isinstance(found, FunctionType) and found.__module__.startswith("torch."):
        return name not in vars(nn.Module)  # a method of a layer; those of every module walk the tree, or change it
    if isinstance(found, FunctionType | property):
        return _only_reads(kind, name, known)
    return not hasattr(found, "__get__")  # a constant of the class
