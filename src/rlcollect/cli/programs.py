"""Exported programs (`FILE.pt2`) as policies, without trusting the file.

`torch.export.load` trusts its file. As of torch 2.13 it runs code that the file brings along in these ways, each of
which is refused here before torch gets to see the file:

- *pickles*: weights and constants marked `use_pickle`, opaque and custom objects, the whole-file weights of older
  archives; and the sample inputs, which are unpickled with `weights_only=True` and, if that fails, without;
- *text that becomes Python*: shapes (`sympify`, which is `eval`), guards (`exec`), names of values (pasted into the
  source of the module), enums in the structure of arguments (which import a module of any name);
- *operators that write files*: `aten` has two (`save`, `from_file`). (What else a node calls is looked up from `torch`
  on, by any name; torch checks it after that, here it is checked before);
- *native code*: compiled models (AOTInductor), which are loaded as a library.

What is left is trusted: torch's own operators, called with arguments of the file's choice, and torch's reader of the
archive. So a hostile file may still give wrong actions, fill the memory or never come to an end.

This module knows files, not policies: what the program computes is for the collector to find out.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader

from rlcollect.errors import PolicyError

__all__ = ["load_program"]

PROGRAM = "models/model.json"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
SAMPLES = "data/sample_inputs/model.pt"
OTHER_RECORDS = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_\w+|byteorder|\.data/\w+|extra/.*"
)

WORD = re.compile(r"\w*")
NAME = re.compile(r"[\w.-]*")
TEXT = re.compile(r"[^'\"\\\n\r]*")
EXPRESSION = re.compile(r"[\w ()\[\]'.,=<>!+*/%&|~-]*")
ATEN = re.compile(r"torch\.ops\.aten\.(?!(?:save|from_file)\b)(\w+)\.(\w+)")
FUNCTIONS = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)|torch\.sym_(not|int|float|ite|max|min|sqrt|sum)"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond|while_loop|scan|map_impl)"
)
SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Name, ast.keyword),
    *(ast.Load, ast.operator, ast.boolop, ast.unaryop, ast.cmpop),
)
CALLED = re.compile(
    r"Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Abs|Not|And|Or|floor|ceiling|max|min|abs"
    r"|Eq|Equality|Ne|Unequality|Lt|StrictLessThan|Le|LessThan|Gt|StrictGreaterThan|Ge|GreaterThan"
    r"|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|IntTrueDiv|FloatTrueDiv|ModularIndexing|Where|Identity"
    r"|CeilToInt|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|RoundDecimal|ToFloat|LShift|RShift|PowByNatural|FloatPow"
    r"|IsNonOverlappingAndDenseIndicator"
)
METHODS = re.compile(r"size|stride|storage_offset|ceil|floor|trunc|sqrt|isnan|inf")


def load_program(path: Path) -> nn.Module:
    """The module of an exported program, called on the batch of observations `[N, ...]`.

    Raises:
        PolicyError: it is no such file, holds something that would run code of its own, or works for one number of
            lanes only.
    """
    from torch.export.pt2_archive._package import load_pt2  # `torch.export.load` without its fall-back on old pickles

    try:
        data = path.read_bytes()
        archive = PT2ArchiveReader(io.BytesIO(data))
        records = archive.get_file_names()
    except OSError as error:
        raise PolicyError(f"cannot read '{path}': {error.strerror}") from error
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(
            f"'{path}' is not an archive that torch.export.save of torch {torch.__version__} makes"
        ) from error
    try:
        _check_archive(archive, records)
        program = load_pt2(io.BytesIO(data)).exported_programs["model"]
        module = program.module()
    except PolicyError as error:
        raise PolicyError(
            f"'{path}' is refused: {error}. If you know who made it, load it in a module of your own, and pass that as "
            "--policy module:attribute"
        ) from error
    except Exception as error:
        raise PolicyError(f"'{path}' cannot be loaded: {type(error).__name__}: {error}") from error
    _check_lanes(program, path)
    return module


def _check_lanes(program: ExportedProgram, path: Path) -> None:
    """Every input has a first dimension that may vary."""
    names = list(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in names or not isinstance(value, torch.Tensor):
            continue
        if value.ndim == 0 or isinstance(value.shape[0], int):
            inputs, shapes = ", ".join(names), ", ".join(['{0: torch.export.Dim("lanes")}'] * len(names))
            comma = "," if len(names) == 1 else ""
            raise PolicyError(
                f"'{path}' was exported for {node.name} of shape {list(value.shape)} alone: its first dimension should "
                "be the lanes, however many. Export it with\n"
                f"    torch.export.export(policy, ({inputs}{comma}), dynamic_shapes=({shapes}{comma}))\n"
                f"where {node.name} has at least two lanes"
            )


# --- what is in the archive -------------------------------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise PolicyError(what)


def _check_archive(archive: PT2ArchiveReader, records: list[str]) -> None:
    known = (PROGRAM, SAMPLES, *CONFIGS)
    for record in records:
        if record not in known and not OTHER_RECORDS.fullmatch(record):
            _refuse(f"it holds {record!r}, which is loaded as code or unpickled")
    for config in CONFIGS:
        for name, payload in json.loads(archive.read_bytes(config))["config"].items():
            if payload["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
                _refuse(f"{name!r} would be unpickled from {payload['path_name']!r}")
    try:
        samples = torch.load(io.BytesIO(archive.read_bytes(SAMPLES)), weights_only=True)
    except Exception as error:
        raise PolicyError(
            "its sample inputs hold more than tensors and plain values, and would be unpickled"
        ) from error
    for key in _keys(samples):
        if not _is(WORD, key):
            _refuse(f"its sample inputs have the key {key!r}, which is no plain name")
    _check(json.loads(archive.read_bytes(PROGRAM)), "")


def _keys(value: Any) -> Iterator[Any]:
    """The keys of all mappings in there."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _keys(part)


def _check(value: Any, key: str) -> None:
    """Every string in the program's JSON: how it may look depends on the key that it, or its list, stands under."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_name(name)
            _check(part, name)
    elif isinstance(value, list):
        for part in value:
            _check(part, key)
    elif isinstance(value, str):
        CHECKS.get(key, _check_name)(value)


def _matches(pattern: re.Pattern[str], what: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not pattern.fullmatch(text):
            _refuse(f"it has {text!r} for {what}")

    return check


_check_name = _matches(NAME, "a name")
_check_function = _matches(FUNCTIONS, "a function to call, which is not one of those that policies are made of")


def _check_target(name: str) -> None:
    """What a node calls: an operator of `aten`, or one of a few functions."""
    if not (operator := ATEN.fullmatch(name)):
        _check_function(name)
        return
    packet = getattr(torch.ops.aten, operator[1], None)
    if not isinstance(getattr(packet, operator[2], None), torch._ops.OpOverload):
        _refuse(f"it calls {name!r}, which is no operator of this torch")


def _check_expression(text: str) -> None:
    """A shape or a guard: arithmetic and comparisons of sizes."""
    _matches(EXPRESSION, "an expression")(text)
    if not all(_is_arithmetic(node) for node in ast.walk(ast.parse(text, mode="eval"))):
        _refuse(f"it has {text!r} for an expression")


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) or _is(CALLED, getattr(node.func, "id", None))
    if isinstance(node, ast.Attribute):
        return _is(METHODS, node.attr)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) or _is(WORD, node.value)
    return isinstance(node, SYNTAX)


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _check_structure(text: str) -> None:
    """How arguments nest: tuples, lists and dicts with plain keys."""
    _, root = json.loads(text)
    waiting = [root]
    while waiting:
        spec = waiting.pop()
        keys = json.loads(spec["context"] or "null") or []
        if spec["type"] not in (None, "builtins.tuple", "builtins.list", "builtins.dict") or not (
            isinstance(keys, list) and all(_is(WORD, key) for key in keys)
        ):
            _refuse(f"its arguments have the structure {text}")
        waiting += spec["children_spec"]


def _anything(_: str) -> None:
    """For what is only shown."""


CHECKS: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("target", "as_operator"), _check_target),
    **dict.fromkeys(("expr_str", "guards_code"), _check_expression),
    **dict.fromkeys(("in_spec", "out_spec"), _check_structure),
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _matches(WORD, "a name")),
    **dict.fromkeys(("as_string", "as_strings"), _matches(TEXT, "a text")),
    **dict.fromkeys(("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node"), _anything),
    **dict.fromkeys(("custom", "torch_version"), _anything),
}
