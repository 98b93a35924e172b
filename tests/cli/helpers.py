"""What the tests of the command line share: modules for it to import, programs for it to load, processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from rlcollect.cli import main
from rlcollect.export import load_dataset
from rlcollect.testing import check_batch

RUN = "import sys; from rlcollect.cli import main; sys.exit(main())"

MODULE = """
import time

import gymnasium
import numpy as np
import torch
from torch import nn
from tensordict.nn import TensorDictModule

from rlcollect.testing import Breaker, Counter, Echo


class Slow(Counter):
    def step(self, action):
        if self.steps >= 100:
            time.sleep(0.1)
        return super().step(action)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation):
        return self.layer(observation).argmax(-1)


class Sized(Net):
    def __init__(self, size):
        super().__init__()


def right(observation):
    return torch.ones(observation.shape[:-1], dtype=torch.int64)


def with_tensordict(td):
    td["action"] = right(td["observation"])
    return td


net = Net()
module = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
half = lambda observation: torch.full_like(observation, 0.5)
zero = lambda observation: torch.zeros((), dtype=torch.int64)
number = 3
makers = {
    "Breaks": lambda: Breaker(at=17),
    "Slow": Slow,
    "Counter": Counter,
    "Echo": Echo,
    "Dict": lambda: Counter(observation="dict"),
}
for name, maker in makers.items():
    gymnasium.register(f"Probe{name}-v0", entry_point=maker, disable_env_checker=True)
"""


class Policy(nn.Module):
    """Picks the better of two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).argmax(-1)


def write_module(folder: Path) -> None:
    """`probes.py`, with environments and policies."""
    (folder / "probes.py").write_text(MODULE)


def export(path: Path, policy: nn.Module | None = None, *, dynamic: bool = True) -> nn.Module:
    """Writes a policy on observations `[N, 4]` as a program; the policy."""
    policy = policy or Policy()
    shapes = ({0: torch.export.Dim("lanes")},) if dynamic else None
    torch.export.save(torch.export.export(policy, (torch.zeros(3, 4),), dynamic_shapes=shapes), path)
    return policy


def rlcollect(*words: object) -> int:
    """The exit status of a command."""
    return main([str(word) for word in words])


def start(*words: object, before: str = "", cwd: Path) -> subprocess.Popen[str]:
    """Starts a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", before + RUN, *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_holds(path: Path, frames: int, lanes: int | None = None) -> None:
    """A dataset of so many frames, in which every invariant of a batch holds."""
    batch = load_dataset(path)
    assert batch.numel() == frames
    assert batch.batch_size[:-1] == (() if lanes is None else (lanes,))
    check_batch(batch)
