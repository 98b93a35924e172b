"""Models by the path to them: a module that an environment, a hook or a post-processing holds.

`"env.reward_model"` is that of each environment of a worker, `"env[1].nets[0].head"` a part of the second one's; the
first name says where the path begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from rlcollect.errors import OptionError, PolicyError
from rlcollect.weights.form import WeightsForm
from rlcollect.weights.naming import module_of

__all__ = ["ENV", "HOOKS", "POLICY", "POSTPROC", "common_form", "find_models", "root_of"]

POLICY = "policy"
ENV = "env"
POSTPROC = "postproc"
HOOKS = ("pre_collect_hook", "post_collect_hook")
PATH = re.compile(r"[^\W\d]\w*(\[\d+\]|\.[^\W\d]\w*)*")
STEP = re.compile(r"\[(\d+)\]|\.?(\w+)")


def root_of(model_id: Any) -> str:
    """Where the path of a model begins.

    Raises:
        OptionError: it is no path, or begins nowhere.
    """
    roots = (ENV, POSTPROC, *HOOKS)
    if not (isinstance(model_id, str) and PATH.fullmatch(model_id)):
        raise OptionError(
            f'A model is named by a path ("policy", "env.reward_model", "postproc[0]"), not {model_id!r}.'
        )
    root = re.split(r"[.\[]", model_id)[0]
    if model_id != POLICY and root not in roots:
        raise OptionError(
            f'{model_id!r} begins with {root!r}; models are "policy", or paths that begin with {", ".join(roots)}.'
        )
    return root


def find_models(model_id: str, roots: Mapping[str, Sequence[Any]]) -> list[nn.Module]:
    """The modules at the end of a path, each once.

    Args:
        model_id: the path.
        roots: what stands at its beginning, by name: one thing or several.

    Raises:
        PolicyError: there is nothing there, or no module.
    """
    (_, root), *steps = STEP.findall(model_id)
    found, told = list(roots[root]), root
    if steps and steps[0][0]:  # which of them
        place = int(steps.pop(0)[0])
        told = f"{root}[{place}]"
        if place >= len(found):
            raise PolicyError(f"{model_id!r}: there is no {told}; there are {len(found)}.")
        found = [found[place]]
    for place, name in steps:
        step = f"[{place}]" if place else f".{name}"
        found = [part for each in found for part in _parts(each, place, name, f"{model_id!r}: {told} has no {step!r}")]
        told += step
    modules = {id(module): module for each in found if (module := module_of(each)) is not None}
    if len(modules) < len({id(each) for each in found}) or not modules:
        raise PolicyError(f"{model_id!r} is no module: {found!r}.")
    return list(modules.values())


def common_form(model_id: str, modules: Sequence[nn.Module]) -> WeightsForm:
    """What weights the modules at the end of a path take.

    Raises:
        PolicyError: not all the same.
    """
    return WeightsForm.common([WeightsForm.of_module(module) for module in modules], f"modules {model_id!r}", "holder")


def _parts(holder: Any, place: str, name: str, lacking: str) -> Iterable[Any]:
    if place:
        try:
            return [holder[int(place)]]
        except (TypeError, LookupError) as error:
            raise PolicyError(f"{lacking}.") from error
    if hasattr(holder, name):
        return [getattr(holder, name)]
    if callable(getattr(holder, "get_wrapper_attr", None)):
        try:
            return [holder.get_wrapper_attr(name)]
        except AttributeError:
            pass
    for vector in (holder, getattr(holder, "unwrapped", None)):
        if isinstance(inner := getattr(vector, "envs", None), list | tuple) and inner:
            return [part for each in inner for part in _parts(each, place, name, lacking)]
    raise PolicyError(f"{lacking}: {holder!r}.")
