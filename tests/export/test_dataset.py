"""Datasets on disk: what was written is what loads, whatever happens in between.

Functions named `child_*` run in a process of their own: they meet limits, full disks and SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

import rlcollect.errors
from rlcollect import CompactBatch
from rlcollect.errors import DatasetError
from rlcollect.export import DatasetWriter, load_dataset

SOURCE = Path(rlcollect.errors.__file__).parents[1]


def make_batch(first: int, steps: int, lanes: int | None = 2) -> TensorDict:
    """Steps `first`, `first + 1`, ... of a run in which every value is another."""
    shape = (steps,) if lanes is None else (lanes, steps)
    t = torch.arange(first, first + steps)
    at = (t if lanes is None else t + 100_000 * torch.arange(lanes)[:, None]).unsqueeze(-1)
    return TensorDict(
        {
            "observation": at / 7 + torch.arange(3),
            "pixels": (at.unsqueeze(-1) + torch.arange(6).reshape(2, 3)).to(torch.uint8),
            "action": at[..., 0],
            "next": {
                "observation": at / 7 + torch.arange(3) + 1,
                "reward": at / 3,
                "done": at % 3 == 0,
                "info": {"lives/left": (at % 5).to(torch.int32)},
            },
            "collector": {"traj_ids": (at[..., 0] // 3) + (1 << 40), "policy_version": at[..., 0] // 10},
        },
        shape,
        names=[*[None] * (len(shape) - 1), "time"],
    )


def leaves(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    return {key: batch.get(key) for key in batch.keys(True, True)}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(found: TensorDictBase, expected: TensorDictBase) -> None:
    assert found.batch_size == expected.batch_size
    assert leaves(found).keys() == leaves(expected).keys()
    for key, value in leaves(expected).items():
        assert found.get(key).dtype == value.dtype, key
        assert found.get(key).shape == value.shape, key
        assert torch.equal(raw(found.get(key)), raw(value)), key


def assert_holds(path: Path, steps: int, lanes: int | None = 2) -> None:
    """Both ways of loading give exactly the first `steps` steps of the run."""
    expected = make_batch(0, steps, lanes)
    assert_same_bits(load_dataset(path), expected)
    plain = TensorDict.load_memmap(path)
    assert_same_bits(plain if lanes is None else plain.transpose(0, 1), expected)


def names_in(path: Path) -> set[str]:
    return {str(entry.relative_to(path)) for entry in path.rglob("*")}


def start(child: Callable[..., None], *arguments: object) -> subprocess.Popen[str]:
    code = f"import sys, test_dataset; test_dataset.{child.__name__}(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def run(child: Callable[..., None], *arguments: object) -> None:
    """Run a `child_*` function to its end; what it asserts is asserted here."""
    process = start(child, *arguments)
    try:
        output, _ = process.communicate(timeout=55)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"ended with {process.returncode}:\n{output}"


class TestRoundTrip:
    @pytest.mark.parametrize("lanes", [None, 1, 3])
    def test_batches_of_different_lengths(self, tmp_path: Path, lanes: int | None) -> None:
        path, total = tmp_path / "run", 0
        with DatasetWriter(path) as writer:
            assert writer.frames == 0
            for steps in (4, 1, 7, 2):
                writer.write(make_batch(total, steps, lanes))
                total += steps
                assert writer.frames == total * (lanes or 1)
                assert_holds(path, total, lanes)
        assert writer.frames == total * (lanes or 1)
        assert_holds(path, total, lanes)

    def test_names_of_dimensions(self, tmp_path: Path) -> None:
        for lanes, names in ((None, ["time"]), (2, [None, "time"])):
            with DatasetWriter(tmp_path / str(lanes)) as writer:
                writer.write(make_batch(0, 3, lanes))
            dataset = load_dataset(tmp_path / str(lanes))
            assert dataset.names == names
            assert dataset["next", "info"].names == names
            assert type(dataset) is TensorDict

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
            torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        ],
    )  # fmt: skip
    def test_dtypes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        value = torch.tensor([[1, 0, 3], [0, 5, 0]]).to(dtype)
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(TensorDict({"v": value}, [2, 3]))
            writer.write(TensorDict({"v": value}, [2, 3]))
        assert_same_bits(load_dataset(tmp_path / "run"), TensorDict({"v": torch.cat([value, value], 1)}, [2, 6]))

    def test_nan_infinity_and_negative_zero(self, tmp_path: Path) -> None:
        batch = TensorDict({"v": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45])}, [4])
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(batch)
        assert_same_bits(load_dataset(tmp_path / "run"), batch)

    def test_tensors_that_are_not_contiguous_or_need_gradients(self, tmp_path: Path) -> None:
        value = torch.arange(24.0).reshape(3, 2, 4)
        batch = TensorDict(
            {"p": value.transpose(0, 1), "e": torch.ones(1).expand(2, 3), "s": value[0, :, ::2][:, :1].expand(2, 3)},
            [2, 3],
        )
        batch["g"] = torch.ones(2, 3, requires_grad=True)
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(batch)
        assert_same_bits(load_dataset(tmp_path / "run"), batch.detach())

    def test_a_conjugate_view(self, tmp_path: Path) -> None:
        batch = TensorDict({"c": torch.tensor([1 + 2j]).conj(), "i": torch.tensor([1 + 2j]).conj().imag}, [1])
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(batch)
        dataset = load_dataset(tmp_path / "run")
        assert dataset["c"].tolist() == [1 - 2j]
        assert dataset["i"].tolist() == [-2]

    def test_a_leaf_without_elements(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(TensorDict({"x": torch.ones(2, 3), "none": torch.ones(2, 3, 0)}, [2, 3]))
        assert load_dataset(tmp_path / "run")["none"].shape == (2, 3, 0)

    def test_a_lazy_stack_is_written_as_its_values(self, tmp_path: Path) -> None:
        batch = make_batch(0, 3)
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(LazyStackedTensorDict(batch[0].clone(), batch[1].clone()))
        assert_holds(tmp_path / "run", 3)

    def test_a_batch_without_frames(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(make_batch(0, 0))
            assert_holds(tmp_path / "run", 0)
            writer.write(make_batch(0, 2))
            writer.write(make_batch(2, 0))
            assert writer.frames == 4
        assert_holds(tmp_path / "run", 2)

    def test_a_dataset_can_be_written_again(self, tmp_path: Path) -> None:
        """Lane first and mapped, as it loads."""
        with DatasetWriter(tmp_path / "a") as writer:
            writer.write(make_batch(0, 5))
        with DatasetWriter(tmp_path / "b") as writer:
            writer.write(load_dataset(tmp_path / "a"))
        assert_holds(tmp_path / "b", 5)

    def test_the_batch_is_not_changed_and_not_kept(self, tmp_path: Path) -> None:
        batch = make_batch(0, 3)
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(batch)
            assert_same_bits(batch, make_batch(0, 3))
            batch.zero_()
            writer.write(make_batch(3, 1))
        assert_holds(tmp_path / "run", 4)


class TestReading:
    def test_it_is_mapped_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 4))
        reward = load_dataset(path)["next", "reward"]
        assert reward.untyped_storage().filename == str(path / "next" / "reward.memmap")
        with (path / "next" / "reward.memmap").open("r+b") as file:
            file.write(torch.tensor(42.0).numpy().tobytes())
        assert reward[0, 0] == 42

    def test_what_was_loaded_stays_right_while_the_run_goes_on(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 3))
            early = load_dataset(path)
            for first in range(3, 200, 10):
                writer.write(make_batch(first, 10))
            assert_same_bits(early, make_batch(0, 3))
        assert_same_bits(early, make_batch(0, 3))

    def test_a_moved_folder_loads_closed_or_open(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(make_batch(0, 3))
            shutil.copytree(tmp_path / "run", tmp_path / "open", symlinks=True)
            shutil.copytree(tmp_path / "run", tmp_path / "followed")
        (tmp_path / "run").rename(tmp_path / "closed")
        for name in ("open", "followed", "closed"):
            assert_holds(tmp_path / name, 3)

    def test_no_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"no dataset at .* without a batch leaves none"):
            load_dataset(tmp_path / "nothing")

    def test_another_folder(self, tmp_path: Path) -> None:
        TensorDict({"x": torch.zeros(3)}, [3]).memmap(tmp_path / "other")
        for path in (tmp_path, tmp_path / "other"):
            with pytest.raises(DatasetError, match="no dataset of rlcollect"):
                load_dataset(path)

    @pytest.mark.parametrize("file", ["action.memmap", "next/reward.memmap", "next/info/lives%2Fleft.memmap"])
    def test_a_copy_that_is_not_complete(self, tmp_path: Path, file: str) -> None:
        """TensorDict leaves a missing key out and grows a short file with zeros: neither may pass as data."""
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 3))
        size = (path / file).stat().st_size
        os.truncate(path / file, size - 1)
        with pytest.raises(DatasetError, match=f"{file}' has {size - 1} bytes, expected {size}"):
            load_dataset(path)
        assert (path / file).stat().st_size == size - 1
        (path / file).unlink()
        with pytest.raises(DatasetError, match="has 0 bytes"):
            load_dataset(path)

    def test_a_level_that_is_missing(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(make_batch(0, 3))
        shutil.rmtree(tmp_path / "run" / "next")
        with pytest.raises(DatasetError, match="not complete"):
            load_dataset(tmp_path / "run")


class TestFormat:
    def test_a_closed_dataset_is_what_tensordict_writes(self, tmp_path: Path) -> None:
        """File for file and byte for byte, but for our word in the root's metadata."""
        batch = make_batch(0, 5)
        batch["odd %:*?\\ names", ".."] = torch.ones(2, 5)
        with DatasetWriter(tmp_path / "ours") as writer:
            writer.write(batch[:, :2])
            writer.write(batch[:, 2:])
        batch.transpose(0, 1).contiguous().memmap(tmp_path / "theirs")
        assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
        for name in names_in(tmp_path / "theirs"):
            ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
            if name.endswith(".memmap"):
                assert ours.read_bytes() == theirs.read_bytes(), name
            elif name.endswith("meta.json"):
                found = json.loads(ours.read_bytes())
                assert found.pop("_rlcollect", None) == ("dataset 1: time first" if name == "meta.json" else None)
                assert found == json.loads(theirs.read_bytes()), name
            assert not ours.is_symlink()

    def test_an_open_dataset_has_one_set_of_metadata(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            for first in range(5):
                writer.write(make_batch(first, 1))
            hidden = sorted(entry.name for entry in (tmp_path / "run").iterdir() if entry.name.startswith("."))
            assert hidden == [".commit", ".commit-a", ".commit-b"]
            assert (tmp_path / "run" / "next" / "info" / "meta.json").readlink() == Path(
                "../../.commit/next/info/meta.json"
            )


class TestWhatStandsThere:
    def test_a_dataset_is_not_replaced_unasked(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 3))
        with pytest.raises(DatasetError, match=r"exists.*overwrite=True"):
            DatasetWriter(path)
        assert_holds(path, 3)

    def test_overwrite_replaces_a_dataset(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 3).set("other", torch.zeros(2, 3)))
        with DatasetWriter(path, overwrite=True) as writer:
            assert not list(path.iterdir())
            writer.write(make_batch(0, 2))
        assert_holds(path, 2)
        assert not (path / "other.memmap").exists()

    def test_overwrite_replaces_what_a_writer_left_open(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        left = DatasetWriter(path)
        left.write(make_batch(0, 3))
        with DatasetWriter(path, overwrite=True) as writer:
            writer.write(make_batch(0, 2))
        assert_holds(path, 2)
        with pytest.raises(DatasetError):  # its files are not there any more
            left.close()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_an_empty_folder(self, tmp_path: Path, overwrite: bool) -> None:
        if overwrite:
            with DatasetWriter(tmp_path, overwrite=True) as writer:
                writer.write(make_batch(0, 2))
            assert_holds(tmp_path, 2)
        else:
            with pytest.raises(DatasetError, match="exists"):
                DatasetWriter(tmp_path)
            assert tmp_path.is_dir()

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("content", ["file", "meta", "memmap", "broken meta"])
    def test_anything_else_is_never_touched(self, tmp_path: Path, overwrite: bool, content: str) -> None:
        """A folder with a meta.json of something else is something else, also another memory-mapped TensorDict."""
        path = tmp_path / "precious"
        path.mkdir()
        if content == "file":
            (path / "thesis.tex").write_text("text")
        elif content == "meta":
            (path / "meta.json").write_text('{"title": "holiday pictures"}')
        elif content == "broken meta":
            (path / "meta.json").write_bytes(b"\xff{")
        else:
            TensorDict({"x": torch.zeros(3)}, [3]).memmap(path)
        before = {name: (path / name).read_bytes() for name in names_in(path)}
        with pytest.raises(DatasetError, match="not a dataset of rlcollect" if overwrite else "exists"):
            DatasetWriter(path, overwrite=overwrite)
        assert {name: (path / name).read_bytes() for name in names_in(path)} == before

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_plain_file(self, tmp_path: Path, overwrite: bool) -> None:
        (tmp_path / "file").write_text("text")
        with pytest.raises(DatasetError, match="is not a folder" if overwrite else "exists"):
            DatasetWriter(tmp_path / "file", overwrite=overwrite)
        assert (tmp_path / "file").read_text() == "text"

    def test_a_path_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")
        with pytest.raises(DatasetError, match="cannot make a dataset") as caught:
            DatasetWriter(tmp_path / "file" / "run")
        assert caught.value.errno == errno.ENOTDIR

    def test_parents_are_made(self, tmp_path: Path) -> None:
        with DatasetWriter(str(tmp_path / "a" / "b")) as writer:
            writer.write(make_batch(0, 1))
        assert_holds(tmp_path / "a" / "b", 1)

    def test_files_of_the_user_stay_when_the_first_write_fails(self, tmp_path: Path) -> None:
        """A name that is taken: what was made before it is removed, what was there is not."""
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            (path / "config.yaml").write_text("seed: 0")
            (path / "action.memmap").write_text("mine")
            with pytest.raises(DatasetError, match=r"File exists \('.*action.memmap'\).*no dataset yet"):
                writer.write(make_batch(0, 2))
            assert names_in(path) == {"config.yaml", "action.memmap"}
            assert (path / "action.memmap").read_text() == "mine"
            (path / "action.memmap").unlink()
            writer.write(make_batch(0, 2))
        assert_holds(path, 2)
        assert (path / "config.yaml").exists()


class TestClosing:
    def test_without_a_batch_nothing_is_left(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            pass
        assert not (tmp_path / "run").exists()
        assert writer.frames == 0

    def test_twice(self, tmp_path: Path) -> None:
        writer = DatasetWriter(tmp_path / "run")
        writer.write(make_batch(0, 2))
        writer.close()
        writer.close()
        assert_holds(tmp_path / "run", 2)

    def test_writing_afterwards(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(make_batch(0, 2))
        with pytest.raises(DatasetError, match="closed"):
            writer.write(make_batch(2, 2))
        assert_holds(tmp_path / "run", 2)

    def test_an_error_in_the_block_keeps_the_frames(self, tmp_path: Path) -> None:
        def collect() -> None:
            with DatasetWriter(tmp_path / "run") as writer:
                writer.write(make_batch(0, 2))
                raise KeyError

        with pytest.raises(KeyError):
            collect()
        assert_holds(tmp_path / "run", 2)

    def test_no_descriptor_is_left(self, tmp_path: Path) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for name in ("a", "b", "c"):
            with DatasetWriter(tmp_path / name) as writer:
                writer.write(make_batch(0, 2))
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestBatchesThatDoNotFit:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda batch: batch.exclude("action"), "key 'action' is missing"),
            (lambda batch: batch.set(("next", "more"), torch.zeros(2, 3)), r"key \('next', 'more'\) is new"),
            (
                lambda batch: batch.set("action", batch["action"].int()),
                r"key 'action' is int32 \[\] a frame, not int64",
            ),
            (lambda batch: batch.set("observation", torch.zeros(2, 3, 4)), r"float32 \[4\] a frame, not float32 \[3\]"),
            (lambda batch: batch[:1], r"batch_size without time is \[1\], not \[2\]"),
            (lambda batch: batch[0], r"batch_size without time is \[\], not \[2\]"),
        ],
    )
    def test_the_first_difference_is_named(
        self, tmp_path: Path, change: Callable[[TensorDict], TensorDict], message: str
    ) -> None:
        path = tmp_path / "run"
        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 3))
            before = {name: (path / name).read_bytes() for name in names_in(path) if (path / name).is_file()}
            with pytest.raises(DatasetError, match=message):
                writer.write(change(make_batch(3, 3)))
            assert {name: (path / name).read_bytes() for name in names_in(path) if (path / name).is_file()} == before
            writer.write(make_batch(3, 3))
        assert_holds(path, 6)

    @pytest.mark.parametrize(
        ("key", "value", "kind"),
        [
            ("task", NonTensorData("walk", batch_size=[2, 3]), "str"),
            (("next", "task"), NonTensorData({"a": 1}, batch_size=[2, 3]), "dict"),
        ],
    )
    def test_what_is_no_tensor(self, tmp_path: Path, key: Any, value: NonTensorData, kind: str) -> None:
        with DatasetWriter(tmp_path / "run") as writer:
            with pytest.raises(DatasetError) as caught:
                writer.write(make_batch(0, 3).set(key, value))
            assert f"key {key!r} holds {kind}" in str(caught.value)
            assert not list((tmp_path / "run").iterdir())

    def test_what_is_no_tensordict(self, tmp_path: Path) -> None:
        small = CompactBatch.of(make_batch(0, 3))
        with DatasetWriter(tmp_path / "run") as writer:
            with pytest.raises(DatasetError, match=r"expected a TensorDict, got CompactBatch.*expand\(\)"):
                writer.write(small)
            writer.write(small.expand())
        assert_holds(tmp_path / "run", 3)

    @pytest.mark.parametrize("name", ["shape", "device", "_type", "_rlcollect"])
    def test_names_that_the_format_uses(self, tmp_path: Path, name: str) -> None:
        with DatasetWriter(tmp_path / "run") as writer, pytest.raises(DatasetError, match="rename"):
            writer.write(TensorDict({"a": {name: torch.zeros(3)}}, [3]))

    @pytest.mark.parametrize("shape", [[], [2, 2, 3]])
    def test_other_shapes(self, tmp_path: Path, shape: list[int]) -> None:
        with DatasetWriter(tmp_path / "run") as writer, pytest.raises(DatasetError, match="time last"):
            writer.write(TensorDict({"a": torch.zeros(shape)}, shape))

    def test_time_first(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer, pytest.raises(DatasetError, match="time last"):
            writer.write(TensorDict({"a": torch.zeros(3, 2)}, [3, 2], names=["time", None]))

    def test_no_tensors(self, tmp_path: Path) -> None:
        with DatasetWriter(tmp_path / "run") as writer, pytest.raises(DatasetError, match="none"):
            writer.write(TensorDict({}, [3]))


def sizes(path: Path) -> dict[str, int]:
    return {name: (path / name).stat().st_size for name in names_in(path) if name.endswith(".memmap")}


def refusal(writer: DatasetWriter, batch: TensorDict) -> DatasetError | None:
    """The error of a write, after which everything is as it was before; None if the batch was written."""
    before, frames = sizes(writer.path), writer.frames
    try:
        writer.write(batch)
    except DatasetError as error:
        assert writer.frames == frames
        assert sizes(writer.path) == (before or dict.fromkeys(sizes(writer.path), 0))
        return error
    return None


def write_until_refused(writer: DatasetWriter, steps: int) -> tuple[int, DatasetError]:
    """How many steps went in, and the error that ended it."""
    first = 0
    while (error := refusal(writer, make_batch(first, steps))) is None:
        first += steps
    assert first > 0
    assert writer.frames == 2 * first
    assert_holds(writer.path, first)
    return first, error


def child_meets_a_limit_of_file_size(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with DatasetWriter(path) as writer:
        first, error = write_until_refused(writer, 50)
        assert error.errno == errno.EFBIG
        assert isinstance(error.__cause__, OSError)
        needed = sum(raw(value).numel() for value in leaves(make_batch(0, 50)).values())
        for part in (
            path,
            f"{needed:,} bytes",
            "are free",
            f"{2 * first:,} frames stay and stay loadable",
            "ulimit -f",
        ):
            assert part in str(error), (part, str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.write(make_batch(first, 50))
    assert_holds(Path(path), first + 50)


def child_meets_a_limit_in_the_first_batch(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
    with DatasetWriter(path) as writer:
        error = refusal(writer, make_batch(0, 1000))
        assert error is not None
        assert error.errno == errno.EFBIG
        assert "0 frames stay" in str(error)
        assert_holds(Path(path), 0)
        writer.write(make_batch(0, 2))
    assert_holds(Path(path), 2)


def child_meets_limits_of_file_size(folder: str) -> None:
    child_meets_a_limit_in_the_first_batch(f"{folder}/first")
    child_meets_a_limit_of_file_size(f"{folder}/later")


def free_pages(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // resource.getpagesize()


def fill(disk: Path, leave: int) -> None:
    """Leave so many pages free on the disk."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes((free_pages(disk) - leave) * resource.getpagesize()))


def child_fills_the_disk(disk: str) -> None:
    path = Path(disk) / "run"
    with DatasetWriter(path) as writer:
        first, error = write_until_refused(writer, 500)
        assert error.errno == errno.ENOSPC
        free = shutil.disk_usage(disk).free
        assert f"{free:,} bytes are free there" in str(error)
        assert "make room" in str(error)
        fill(Path(disk), leave=0)
    assert_holds(path, first)  # closed on a disk without a single free page


def child_finds_every_place_where_a_disk_can_be_full(disk: str) -> None:
    """From no free page to enough: the data of each key, the metadata of each level, in the first batch and later."""
    refused = {"first": 0, "later": 0}
    for leave in range(100):
        path = Path(disk) / f"run-{leave}"
        fill(Path(disk), leave)
        with DatasetWriter(path) as writer:
            early = refusal(writer, make_batch(0, 300))
            if early is not None:
                refused["first"] += 1
                assert early.errno == errno.ENOSPC
                if "no dataset yet" in str(early):
                    assert not list(path.iterdir())
                else:
                    assert_holds(path, 0)
                (Path(disk) / "ballast").unlink()
                writer.write(make_batch(0, 300))
            fill(Path(disk), leave)
            late = refusal(writer, make_batch(300, 300))
            if late is not None:
                refused["later"] += 1
                assert late.errno == errno.ENOSPC
            assert_holds(path, 300 if late else 600)
        assert_holds(path, 300 if late else 600)
        if early is late is None:
            break
        shutil.rmtree(path)
    assert 5 < refused["later"] <= refused["first"] < 100, refused


def child_meets_full_disks(disk: str) -> None:
    child_fills_the_disk(disk)
    shutil.rmtree(Path(disk) / "run")
    child_finds_every_place_where_a_disk_can_be_full(disk)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no really full disk here: {error}")
    if mounted.returncode:
        pytest.skip(f"no really full disk here, a small tmpfs cannot be mounted: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], timeout=10, check=True)


@pytest.mark.timeout(60)
class TestRefusedBySystem:
    def test_limit_of_file_size(self, tmp_path: Path) -> None:
        run(child_meets_limits_of_file_size, tmp_path)

    def test_full_disk(self, small_disk: Path) -> None:
        run(child_meets_full_disks, small_disk)

    def test_interrupt_between_two_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in the middle of a write: the batch is not there, and the next one stands where it should."""
        path, pwrite, calls = tmp_path / "run", os.pwrite, iter(range(100))

        def interrupted(*arguments: Any) -> int:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return pwrite(*arguments)

        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 2))
            monkeypatch.setattr(os, "pwrite", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(make_batch(70, 5))
            monkeypatch.undo()
            assert writer.frames == 4
            assert_holds(path, 2)
            writer.write(make_batch(2, 2))
        assert_holds(path, 4)

    def test_interrupt_just_after_the_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the folder says counts."""
        path, replace = tmp_path / "run", Path.replace

        def interrupted(self: Path, target: Path) -> Path:
            replace(self, target)
            raise KeyboardInterrupt

        with DatasetWriter(path) as writer:
            writer.write(make_batch(0, 2))
            monkeypatch.setattr(Path, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(make_batch(2, 5))
            monkeypatch.undo()
            assert writer.frames == 14
            writer.write(make_batch(7, 1))
        assert_holds(path, 8)

    def test_short_writes_are_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The system may take less than it is given (Linux: 2 GiB at most)."""
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
        with DatasetWriter(tmp_path / "run") as writer:
            writer.write(make_batch(0, 5))
            writer.write(make_batch(5, 2))
        assert_holds(tmp_path / "run", 7)

    def test_a_folder_that_was_removed(self, tmp_path: Path) -> None:
        writer = DatasetWriter(tmp_path / "run")
        writer.write(make_batch(0, 2))
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(DatasetError, match="No such file") as caught:
            writer.write(make_batch(2, 2))
        assert caught.value.errno == errno.ENOENT
        with pytest.raises(DatasetError, match="No such file"):
            writer.close()


SYSTEM_CALLS = {"mkdir", "open", "pwrite", "rename", "replace", "rmdir", "symlink", "truncate", "unlink", "write"}


def die_before_system_call(number: int) -> None:
    """Kill this process at its `number`th call from now that can change a file, before the call."""
    calls = iter(range(number))

    def on_event(frame: object, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in SYSTEM_CALLS and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    pwrite = os.pwrite
    os.pwrite = lambda file, data, offset: pwrite(file, data[: len(data) // 2 + 1], offset)  # so that one is cut in two
    sys.setprofile(on_event)


def killed_at_each_call(folder: Path, prepare: Callable[[Path], Any], act: Callable[[Any], None]) -> Iterator[Path]:
    """Folders in which `act` was killed before its first call to the system, before its second, ... to its end."""
    torch.set_num_threads(1)
    for number in range(1000):
        path = folder / str(number)
        pid = os.fork()
        if not pid:
            try:
                subject = prepare(path)
                die_before_system_call(number)
                act(subject)
            finally:
                sys.setprofile(None)
                os._exit(0 if sys.exception() is None else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        yield path
        if not status:
            assert number > 10
            return
    raise AssertionError("act did not end")


def writer_with(path: Path, *batches: TensorDict) -> DatasetWriter:
    writer = DatasetWriter(path, overwrite=True)
    for batch in batches:
        writer.write(batch)
    return writer


def child_is_killed_in_the_first_write(folder: str) -> None:
    seen = set()
    for path in killed_at_each_call(Path(folder), DatasetWriter, lambda writer: writer.write(make_batch(0, 3))):
        if (path / "meta.json").exists():
            steps = load_dataset(path).batch_size[-1]
            assert steps in (0, 3)
            assert_holds(path, steps)
        else:
            steps = None
        seen.add(steps)
        writer_with(path, make_batch(0, 1)).close()
        assert_holds(path, 1)
    assert seen == {None, 0, 3}


def child_is_killed_in_a_later_write(folder: str) -> None:
    seen = set()

    def prepare(path: Path) -> DatasetWriter:
        return writer_with(path, make_batch(0, 2), make_batch(2, 2))

    for path in killed_at_each_call(Path(folder), prepare, lambda writer: writer.write(make_batch(4, 3))):
        steps = load_dataset(path).batch_size[-1]
        assert steps in (4, 7)
        assert_holds(path, steps)
        seen.add(steps)
    assert seen == {4, 7}


def child_is_killed_in_close(folder: str) -> None:
    for path in killed_at_each_call(
        Path(folder), lambda path: writer_with(path, make_batch(0, 4)), DatasetWriter.close
    ):
        assert_holds(path, 4)


def child_is_killed_in_overwriting(folder: str, closed: str) -> None:
    def prepare(path: Path) -> Path:
        writer = writer_with(path, make_batch(0, 4))
        if closed == "closed":
            writer.close()
        return path

    for path in killed_at_each_call(Path(folder), prepare, lambda path: DatasetWriter(path, overwrite=True)):
        with contextlib.suppress(DatasetError):
            assert_holds(path, 4)
        writer_with(path, make_batch(0, 1)).close()
        assert_holds(path, 1)


def child_writes_for_ever(path: str) -> None:
    first = 0
    with DatasetWriter(path) as writer:
        while True:
            steps = first % 7 + 1
            writer.write(make_batch(first, steps))
            first += steps
            sys.stdout.write(f"{first}\n")
            sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.timeout(60)
class TestKilled:
    def test_in_the_first_write(self, tmp_path: Path) -> None:
        run(child_is_killed_in_the_first_write, tmp_path)

    def test_in_a_later_write(self, tmp_path: Path) -> None:
        run(child_is_killed_in_a_later_write, tmp_path)

    def test_in_close(self, tmp_path: Path) -> None:
        run(child_is_killed_in_close, tmp_path)

    @pytest.mark.parametrize("state", ["closed", "open"])
    def test_in_overwriting(self, tmp_path: Path, state: str) -> None:
        run(child_is_killed_in_overwriting, tmp_path, state)

    def test_from_outside_while_it_is_read(self, tmp_path: Path) -> None:
        """Loads beside a writer at full speed are whole prefixes; so is what is left when it is killed."""
        process = start(child_writes_for_ever, tmp_path / "run")
        assert process.stdout is not None
        try:
            for _ in range(40):
                written = int(process.stdout.readline())
                dataset = load_dataset(tmp_path / "run")
                assert dataset.batch_size[-1] >= written
                assert_same_bits(dataset, make_batch(0, dataset.batch_size[-1]))
        finally:
            process.kill()
            rest = process.stdout.read().split()
            process.stdout.close()
            process.wait()
        steps = load_dataset(tmp_path / "run").batch_size[-1]
        assert steps >= max(int(line) for line in [*rest[:-1], written])
        assert_holds(tmp_path / "run", steps)
