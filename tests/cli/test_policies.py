"""What may stand behind `--policy` and `--weights`, and what is said where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rlcollect.cli.policies import load_policy
from rlcollect.errors import PolicyError
from rlcollect.export import load_dataset
from tests.cli.helpers import Policy, assert_holds, export, rlcollect


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))  # as `main` does


class Trap:
    """Unpickled, it makes a file `sprung` in the current folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("open('sprung', 'w').close()",))


class TestModuleAttribute:
    @pytest.mark.parametrize("lanes", [None, 2])
    @pytest.mark.parametrize("name", ["net", "Net", "module", "with_tensordict", "right"])
    def test_modules_their_classes_and_callables_collect(self, folder: Path, name: str, lanes: int | None) -> None:
        option = () if lanes is None else ("--num-envs", lanes)
        words = ("--frames", 40, "--policy", f"probes:{name}", *option, "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 0
        assert_holds(folder / "run", 40, lanes)
        assert (load_dataset("run")["collector", "policy_version"] == 0).all()
        if name == "right":
            assert (load_dataset("run")["action"] == 1).all()

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("prob:net", "there is no module 'prob' in "),
            ("probes.py:net", "Leave out the .py: probes:..."),
            ("probes:nett", "module 'probes' has no 'nett'. Did you mean 'net'?"),
            ("probes:zzzz", "module 'probes' has no 'zzzz'. It has Breaker, "),
            ("probes:net.layers", "has no 'layers'. Did you mean 'layer'?"),
            ("probes:number", "should be a policy: an nn.Module or another callable; it is 3"),
            ("probes:Counter", "is a class, and no nn.Module"),
            ("probes:Sized", "calling it without arguments failed: TypeError: "),
        ],
    )
    def test_what_is_missing_is_named(self, name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", "--policy", name) == 1
        error = capsys.readouterr().err
        assert told in error
        assert "Traceback" not in error

    @pytest.mark.parametrize("code", ["x = 1 / 0", "import nothing_there"])
    def test_a_module_that_raises_shows_its_own_lines(
        self, folder: Path, code: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "broken.py").write_text(code)
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", "--policy", "broken:net") == 1
        error = capsys.readouterr().err
        assert code in error
        assert "importlib" not in error
        assert error.splitlines()[-1].startswith("importing 'broken': ")

    def test_one_that_does_not_fit_is_told_without_a_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", "--policy", "probes:half") == 1
        error = capsys.readouterr().err
        assert '"action" should have shape [] and dtype int64' in error.replace("'", '"')
        assert "Traceback" not in error


class TestWeights:
    def test_are_loaded(self, folder: Path) -> None:
        weights = {"layer.weight": torch.zeros(2, 4), "layer.bias": torch.tensor([0.0, 1.0])}
        torch.save(weights, folder / "w.pt")
        words = ("--frames", 20, "--policy", "probes:Net", "--weights", "w.pt", "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 0
        assert (load_dataset("run")["action"] == 1).all()

    @pytest.mark.parametrize(
        ("state", "told"),
        [
            ({"layer.weight": torch.zeros(2, 4)}, "lacks 'layer.bias', which Net has; it has 'layer.weight'"),
            (
                {"layer.weight": torch.zeros(2, 4), "layer.bias": torch.zeros(2), "log_std": torch.zeros(2)},
                "has 'log_std', which Net has not",
            ),
            ({"layer.weight": torch.zeros(3, 4), "layer.bias": torch.zeros(2)}, "size mismatch for layer.weight"),
            ([torch.zeros(2)], "should hold a state dict; it holds list"),
            (nn.Linear(4, 2), "is no file of tensors and plain values"),
        ],
    )
    def test_that_do_not_fit_are_named(
        self, folder: Path, state: object, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch.save(state, folder / "w.pt")
        words = ("--frames", 20, "--policy", "probes:Net", "--weights", "w.pt", "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 1
        assert told in capsys.readouterr().err

    @pytest.mark.parametrize("content", [None, b"", b"hello"])
    def test_files_that_are_none_are_named(self, folder: Path, content: bytes | None) -> None:
        if content is not None:
            (folder / "w.pt").write_bytes(content)
        with pytest.raises(PolicyError, match=r"w\.pt"):
            load_policy("probes:Net", folder / "w.pt")

    def test_no_code_is_unpickled(self, folder: Path) -> None:
        torch.save({"layer.weight": Trap()}, folder / "w.pt")
        with pytest.raises(PolicyError, match="nothing else is unpickled"):
            load_policy("probes:Net", folder / "w.pt")
        assert not (folder / "sprung").exists()
        torch.load(folder / "w.pt", weights_only=False)  # the trap works
        assert (folder / "sprung").exists()


class TestProgram:
    @pytest.mark.parametrize("lanes", [None, 3])
    def test_collects_with_a_dimension_of_lanes(self, folder: Path, lanes: int | None) -> None:
        policy = export(folder / "policy.pt2")
        option = () if lanes is None else ("--num-envs", lanes)
        words = ("--frames", 60, "--policy", "policy.pt2", *option, "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 0
        assert_holds(folder / "run", 60, lanes or 1)
        batch = load_dataset("run")
        assert torch.equal(policy(batch["observation"]), batch["action"])

    def test_takes_weights(self, folder: Path) -> None:
        export(folder / "policy.pt2")
        other = Policy()
        torch.save(other.state_dict(), folder / "w.pt")
        words = ("--frames", 60, "--policy", "policy.pt2", "--weights", "w.pt", "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 0
        batch = load_dataset("run")
        assert torch.equal(other(batch["observation"]), batch["action"])

    def test_for_one_number_of_lanes_is_refused_with_the_line_to_use(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        policy = export(folder / "policy.pt2", dynamic=False)
        words = ("--frames", 60, "--num-envs", 3, "--policy", "policy.pt2", "--out", "run")
        assert rlcollect("collect", "CartPole-v1", *words) == 1
        error = capsys.readouterr().err
        assert "observation of shape [3, 4] alone" in error
        (line,) = [line for line in error.splitlines() if line.startswith("    ")]
        program = eval(line, {"torch": torch, "policy": policy, "observation": torch.zeros(2, 4)})
        torch.export.save(program, folder / "policy.pt2")
        assert load_policy("policy.pt2").call(torch.zeros(7, 4)).shape == (7,)
