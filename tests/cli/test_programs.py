"""Exported programs: honest ones load, hostile ones run nothing.

Each attack is checked to be one: `torch.export.load` falls for it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter

from rlcollect.cli.programs import load_program
from rlcollect.errors import PolicyError
from tests.cli.helpers import Policy, export
from tests.cli.test_policies import Trap

PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
SPRING = "__import__('os').mkdir('sprung')"

Records = dict[str, bytes]


class Wide(nn.Module):
    """Uses what policies use: no_grad, a buffer, a constant, branches on shapes, text arguments, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 2))
        self.register_buffer("mean", torch.zeros(4))
        self.scale = torch.ones(4)

    def forward(self, observation: torch.Tensor, goal: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            n = observation.shape[0]
            x = (observation - self.mean) * self.scale
            if n % 3 == 2:
                x = x * 2
            x = x.repeat(2, 1)[: n // 2 + 1].clone().reshape(-1, 4)
            logits = self.net(observation) + torch.einsum("ij,kj->i", observation, x)[:, None]
            logits = torch.div(logits, 3, rounding_mode="trunc") + goal["at"].sum()
            action = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        return action, logits


def records(archive: bytes) -> Records:
    reader = PT2ArchiveReader(io.BytesIO(archive))
    return {name: reader.read_bytes(name) for name in reader.get_file_names()}


def write(path: Path, content: Records) -> None:
    with PT2ArchiveWriter(str(path)) as writer:
        for name, data in content.items():
            if not name.startswith(".data/") and name != "byteorder":  # the writer's own
                writer.write_bytes(name, data)


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def sample_inputs(content: Records) -> None:
    content[SAMPLES] = pickled((Trap(),))


def pickled_weight(content: Records) -> None:
    config = json.loads(content[WEIGHTS])
    next(iter(config["config"].values()))["use_pickle"] = True
    content[WEIGHTS] = json.dumps(config).encode()
    content["data/weights/weight_0"] = pickled(Trap())


def pickled_constant(content: Records) -> None:
    entry = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    content[CONSTANTS] = json.dumps({"config": {"x": entry}}).encode()
    content["data/constants/tensor_0"] = pickled(Trap())


def opaque_constant(content: Records) -> None:
    import pickle

    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    content[CONSTANTS] = json.dumps({"config": {"x": entry}}).encode()
    content["data/constants/opaque_obj_0"] = pickle.dumps(Trap())


def weights_of_an_older_archive(content: Records) -> None:
    content["data/weights/model.pt"] = pickled({"x": Trap()})


def constants_of_an_older_archive(content: Records) -> None:
    content["data/constants/model.pt"] = pickled({"x": Trap()})


def second_model(content: Records) -> None:
    for name in (PROGRAM, WEIGHTS, CONSTANTS):
        content[name.replace("model.", "other.").replace("model_", "other_")] = content[name]
    content[SAMPLES.replace("model.", "other.")] = pickled((Trap(),))


def program(change: Callable[[dict[str, Any]], None]) -> Callable[[Records], None]:
    def attack(content: Records) -> None:
        parsed = json.loads(content[PROGRAM])
        change(parsed)
        content[PROGRAM] = json.dumps(parsed).encode()

    attack.__name__ = change.__name__
    return attack


def graph(parsed: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = parsed["graph_module"]["graph"]
    return found


@program
def shape(parsed: dict[str, Any]) -> None:
    expression = graph(parsed)["tensor_values"]["observation"]["sizes"][0]["as_expr"]
    expression["expr_str"] = f"{SPRING} or {expression['expr_str']}"


@program
def shape_of_a_value_that_is_named_as_what_is_only_shown(parsed: dict[str, Any]) -> None:
    values = graph(parsed)["tensor_values"]
    values["metadata"] = json.loads(json.dumps(values["observation"]))
    values["metadata"]["sizes"][0]["as_expr"]["expr_str"] = SPRING
    node = graph(parsed)["nodes"][-1]
    node["outputs"][0]["as_tensor"]["name"] = "metadata"
    for output in (
        graph(parsed)["outputs"][0],
        parsed["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"],
    ):
        output["as_tensor"]["name"] = "metadata"


@program
def guard(parsed: dict[str, Any]) -> None:
    parsed["guards_code"] = [f"{SPRING} is None"]


@program
def operator_that_writes_a_file(parsed: dict[str, Any]) -> None:
    arguments = {"filename": {"as_string": "sprung"}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
    node = {
        "target": "torch.ops.aten.from_file.default",
        "inputs": [{"name": name, "arg": argument, "kind": 1} for name, argument in arguments.items()],
        "outputs": [{"as_tensor": {"name": "spring"}}],
        "metadata": {},
        "name": "spring",
    }
    graph(parsed)["nodes"].insert(0, node)
    graph(parsed)["tensor_values"]["spring"] = graph(parsed)["tensor_values"]["observation"]


@program
def name(parsed: dict[str, Any]) -> None:
    parsed.update(json.loads(json.dumps(parsed).replace('"observation"', json.dumps(f"observation={SPRING}"))))


def text(content: Records) -> None:
    class Moody(Policy):
        def forward(self, observation: torch.Tensor, mood: str) -> torch.Tensor:
            return super().forward(observation)

    torch.export.save(torch.export.export(Moody(), (torch.zeros(3, 4), "glad")), "moody.pt2")
    content.update(records(Path("moody.pt2").read_bytes()))
    parsed = json.loads(content[PROGRAM])
    graph(parsed)["inputs"][-1] = {"as_string": f"' or {SPRING} or '"}
    content[PROGRAM] = json.dumps(parsed).encode()


@program
def structure(parsed: dict[str, Any]) -> None:
    Path("trap.py").write_text("open('sprung', 'w')\nclass X: pass")
    signature = parsed["graph_module"]["module_call_graph"][0]["signature"]
    version, spec = json.loads(signature["in_spec"])
    spec["context"] = json.dumps({"__enum__": True, "fqn": "trap:X", "name": "A"})
    signature["in_spec"] = json.dumps([version, spec])


ATTACKS = [
    sample_inputs,
    pickled_weight,
    pickled_constant,
    opaque_constant,
    weights_of_an_older_archive,
    constants_of_an_older_archive,
    second_model,
    shape,
    shape_of_a_value_that_is_named_as_what_is_only_shown,
    guard,
    operator_that_writes_a_file,
    name,
    text,
    structure,
]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("programs") / "policy.pt2"
    export(path)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore")  # torch's, about what it falls for
class TestHostile:
    @pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
    def test_code_in_a_program_does_not_run(
        self, folder: Path, honest: bytes, attack: Callable[[Records], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(folder))
        content = records(honest)
        attack(content)
        write(folder / "hostile.pt2", content)
        with pytest.raises(PolicyError, match=r"is refused: .* --policy module:attribute"):
            load_program(folder / "hostile.pt2")
        assert not (folder / "sprung").exists()
        failed = self._fall_for(folder / "hostile.pt2")
        assert (folder / "sprung").exists(), f"this is no attack: {failed}"

    def _fall_for(self, path: Path) -> list[Exception]:
        failed = []
        for arguments in ((torch.zeros(3, 4),), (torch.zeros(3, 4), "glad")):
            try:
                torch.export.load(path).module()(*arguments)
            except Exception as error:  # too late, if it was an attack
                failed.append(error)
        return failed

    @pytest.mark.parametrize(
        "target",
        [
            "torch.ops.aten.save.default",
            "torch.ops.aten.nothing.default",
            "torch.ops.aten.__class__.mro",
            "torch.os.system",
            "_operator.methodcaller",
            "torch.ops.load_library",
        ],
    )
    def test_calls_of_anything_else_are_refused(self, folder: Path, honest: bytes, target: str) -> None:
        content = records(honest)
        parsed = json.loads(content[PROGRAM])
        graph(parsed)["nodes"][0]["target"] = target
        content[PROGRAM] = json.dumps(parsed).encode()
        write(folder / "hostile.pt2", content)
        with pytest.raises(PolicyError, match=target):
            load_program(folder / "hostile.pt2")

    @pytest.mark.parametrize(
        "record", ["data/aotinductor/model/model.so", "data/constants/custom_obj_0", "models/x.json"]
    )
    def test_compiled_code_and_objects_are_refused(self, folder: Path, honest: bytes, record: str) -> None:
        write(folder / "hostile.pt2", {**records(honest), record: b"x"})
        with pytest.raises(PolicyError, match=record):
            load_program(folder / "hostile.pt2")


class TestHonest:
    def test_programs_load_whatever_policies_do(self, folder: Path) -> None:
        shapes = ({0: torch.export.Dim.AUTO}, {"at": {0: torch.export.Dim.AUTO}})
        arguments = (torch.randn(8, 4), {"at": torch.randn(8, 2)})
        exported = torch.export.export(
            Wide(), arguments, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=False
        )
        assert exported._guards_code
        torch.export.save(exported, folder / "wide.pt2")
        action, logits = load_program(folder / "wide.pt2")(*arguments)
        assert action.shape == (8,)
        assert torch.equal(logits, exported.module()(*arguments)[1])

    @pytest.mark.parametrize("content", [None, b"", b"hello"])
    def test_what_is_no_program_is_named(self, folder: Path, content: bytes | None) -> None:
        if content is not None:
            (folder / "x.pt2").write_bytes(content)
        with pytest.raises(PolicyError, match=r"x\.pt2"):
            load_program(folder / "x.pt2")

    def test_other_archives_are_named(self, folder: Path) -> None:
        torch.save({"a": torch.zeros(2)}, folder / "x.pt2")
        with pytest.raises(PolicyError, match=r"not an archive that torch\.export\.save"):
            load_program(folder / "x.pt2")
