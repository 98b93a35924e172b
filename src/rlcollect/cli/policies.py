"""From what stands behind `--policy` and `--weights` to a policy.

What runs code of whose: `module:attribute` imports a Python module, so it runs what stands in it, as Python does.
`--weights FILE` is read with `torch.load(weights_only=True)`: tensors and plain values, nothing else is unpickled.
`FILE.pt2` is checked before it is loaded (`rlcollect.cli.programs` says what is trusted).
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcollect.cli.modules import attribute_of, imported
from rlcollect.cli.programs import load_program
from rlcollect.errors import OptionError, PolicyError

__all__ = ["PROGRAM_SUFFIX", "Policy", "load_policy"]

RANDOM = "random"
PROGRAM_SUFFIX = ".pt2"


@dataclass(frozen=True)
class Policy:
    """A policy, and what it needs.

    Attributes:
        call: what a collector takes: a module, a callable; None for random actions.
        needs_lanes: whether its observations must have a dimension of lanes, even for a single one.
    """

    call: Any
    needs_lanes: bool = False

    def lanes(self, num_envs: int | None) -> int | None:
        """`num_envs` for the collector, from what the user gave."""
        return 1 if num_envs is None and self.needs_lanes else num_envs


def load_policy(name: str, weights: Path | None = None) -> Policy:
    """The policy of that name.

    Args:
        name: `random`, `module:attribute` or `FILE.pt2`.
        weights: a state dict, to be loaded into the policy.

    Raises:
        OptionError: `name` is none of the three, or weights for what is no module.
        PolicyError: it cannot be found or loaded, or the weights do not fit.
    """
    policy = _named(name)
    if weights is not None:
        if not isinstance(policy.call, nn.Module):
            raise OptionError(f"--weights needs a policy that is an nn.Module; --policy {name} is not one")
        _load_weights(policy.call, weights)
    return policy


def _named(name: str) -> Policy:
    if name == RANDOM:
        return Policy(None)
    if name.endswith(PROGRAM_SUFFIX):
        return Policy(load_program(Path(name)), needs_lanes=True)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(
            f"--policy takes random, module:attribute, or a FILE{PROGRAM_SUFFIX} of torch.export, not {name!r}"
        )
    return Policy(_made(_found(module, attribute), name))


def _found(module: str, attribute: str) -> Any:
    found = imported(module, "--policy: ", PolicyError, ending=":...")
    return attribute_of(found, attribute, "--policy: ", PolicyError)


def _made(found: Any, name: str) -> Any:
    """What was found, or an instance of it where it is a module's class."""
    if isinstance(found, type):
        if not issubclass(found, nn.Module):
            raise PolicyError(f"--policy {name} is a class, and no nn.Module. Make an instance, and name that")
        try:
            return found()
        except Exception as error:
            raise PolicyError(
                f"--policy {name} is a class; calling it without arguments failed: {type(error).__name__}: {error}. "
                "Make an instance in the module, and name that"
            ) from error
    if not callable(found):
        raise PolicyError(f"--policy {name} should be a policy: an nn.Module or another callable; it is {found!r}")
    return found


def _load_weights(module: nn.Module, path: Path) -> None:
    how = f"Make it with torch.save(policy.state_dict(), {str(path)!r})"
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise PolicyError(f"--weights: cannot read '{path}': {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise PolicyError(
            f"--weights: '{path}' is no file of tensors and plain values, and nothing else is unpickled. {how}"
        ) from error
    if not isinstance(state, Mapping):
        raise PolicyError(f"--weights: '{path}' should hold a state dict; it holds {type(state).__name__}. {how}")
    kind = type(module).__name__
    ours = module.state_dict()
    for key in (key for key in ours if key not in state):
        raise PolicyError(f"--weights: '{path}' lacks {key!r}, which {kind} has{_nearest(key, state)}")
    for key in (key for key in state if key not in ours):
        raise PolicyError(f"--weights: '{path}' has {key!r}, which {kind} has not{_nearest(key, ours)}")
    try:
        module.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError) as error:
        raise PolicyError(f"--weights: '{path}' does not fit {kind}: {error}") from error


def _nearest(key: Any, keys: Mapping[Any, Any]) -> str:
    near = difflib.get_close_matches(str(key), [str(known) for known in keys], n=1)
    return f"; it has {near[0]!r}" if near else ""
