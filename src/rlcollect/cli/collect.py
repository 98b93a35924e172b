"""`rlcollect collect`: frames of an environment, into a dataset on disk."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from tyro import conf

from rlcollect import Collector, RayCollector
from rlcollect.cli.interrupt import CtrlC
from rlcollect.cli.policies import PROGRAM_SUFFIX, load_policy
from rlcollect.cli.progress import Report
from rlcollect.cli.remotes import collector_on_ray
from rlcollect.cli.summary import print_summary
from rlcollect.errors import DatasetError, OptionError
from rlcollect.export import DatasetWriter

__all__ = ["Collect", "frames_of_a_batch"]

STEPS, FRAMES = 256, 1024  # of a batch, at least: each one costs some milliseconds on the disk
INTERRUPTED = 130
REMOTES = 2  # of a cluster, where the user does not say


@dataclass(frozen=True, kw_only=True)
class Collect:
    """Collect frames of an environment, and write them to a folder as they come.

    The folder holds a memory-mapped TensorDict, which can be loaded at any time. Ctrl-C ends the collection and keeps
    what was collected.

    Attributes:
        env: A Gymnasium id; "module:id" imports the module first, as seen from the current folder.
        frames: How many frames to collect, over all lanes.
        out: The folder to write; it must not exist, unless --overwrite.
        num_envs: Lanes that are stepped together. Without it, one environment, and no dimension of lanes (with --ray:
            a lane of each remote).
        policy: "random"; or "module:attribute", where the attribute is an nn.Module, its class, or any callable, and
            the module is found from the current folder, and runs; or the FILE.pt2 of a torch.export program, which is
            called on observations [N, *shape] with N lanes. What is in such a file is not trusted: one that unpickles
            anything but tensors, or brings Python or native code along, is refused. Trusted are torch's operators, and
            its reader of such files.
        weights: A state dict for the policy, as torch.save wrote it; nothing but tensors and plain values is unpickled.
        max_frames_per_traj: Frames after which an episode is truncated.
        seed: Makes the run repeatable.
        frames_per_batch: Frames that are written at once. Without it, 256 steps of all lanes, or about 1,024 frames.
        overwrite: Replace the dataset that stands in --out.
        ray: Collect in remotes on a Ray cluster. Their lanes lie side by side in the dataset, in the order of remotes.
            What ENV and --policy import has to be there on every node.
        address: Of the cluster to join, HOST:PORT, "auto" or "local". Without it, what RAY_ADDRESS says, or a cluster
            that runs on this machine; else one is started here, and ended with the collection.
        num_collectors: Remotes, each with --num-envs lanes. Without it, two.
        remote_cpus: What Ray is to set aside for each remote, in CPUs; parts of one are allowed. Without it, one.
    """

    env: conf.Positional[Annotated[str, conf.arg(metavar="ENV")]]
    frames: Annotated[int, conf.arg(metavar="N")]
    out: Annotated[Path, conf.arg(metavar="DIR")]
    num_envs: Annotated[int | None, conf.arg(metavar="N")] = None
    policy: Annotated[str, conf.arg(metavar="random|MODULE:ATTRIBUTE|FILE.pt2")] = "random"
    weights: Annotated[Path | None, conf.arg(metavar="FILE")] = None
    max_frames_per_traj: Annotated[int | None, conf.arg(metavar="N")] = None
    seed: Annotated[int | None, conf.arg(metavar="N")] = None
    frames_per_batch: Annotated[int | None, conf.arg(metavar="N")] = None
    overwrite: conf.FlagCreatePairsOff[bool] = False
    ray: conf.FlagCreatePairsOff[bool] = False
    address: Annotated[str | None, conf.arg(metavar="HOST:PORT")] = None
    num_collectors: Annotated[int | None, conf.arg(metavar="K")] = None
    remote_cpus: Annotated[float | None, conf.arg(metavar="X")] = None

    def run(self) -> int:
        """Collects.

        Returns:
            The exit status: 0, or 130 where Ctrl-C ended it.

        Raises:
            RlcollectError: it cannot be done; what was written stays.
            What an environment or the policy raised, from a `WorkerError`; what was written stays.
        """
        if self.out.exists() and not self.overwrite:
            raise DatasetError(
                f"'{self.out}' exists. Choose another --out, or replace what stands there by --overwrite"
            )
        console = Console()
        with self._collector() as collector:
            writer = DatasetWriter(self.out, overwrite=self.overwrite)
            clock = _Clock()
            try:
                finished = _collect(collector, writer, clock, console)
            finally:
                with clock.disk():
                    writer.close()
                if writer.frames:
                    print_summary(
                        console, self.out, collector.stats(), writer.frames, clock.seconds, clock.seconds_on_disk
                    )
        if finished:
            return 0
        told = f"the dataset holds {writer.frames:,} frames" if writer.frames else "nothing was written"
        print(f"interrupted: {told}", file=sys.stderr)
        return INTERRUPTED

    def _collector(self) -> Collector | RayCollector:
        self._check()
        if self.seed is not None:
            torch.manual_seed(self.seed)  # for policies that are made here, and for the draws of remotes
        policy = load_policy(self.policy, self.weights)
        num_envs, given = policy.lanes(self.num_envs), self.frames_per_batch
        remotes = (self.num_collectors or REMOTES) if self.ray else 1
        lanes = (num_envs or 1) * remotes if self.ray else num_envs
        options: dict[str, Any] = {
            "frames_per_batch": frames_of_a_batch(lanes, self.frames) if given is None else given,
            "total_frames": self.frames,
            "max_frames_per_traj": self.max_frames_per_traj,
        }
        collector: Collector | RayCollector
        if self.ray:
            options["num_envs"] = num_envs or 1
            collector = collector_on_ray(
                [self.env] * remotes, policy.call, address=self.address, cpus=self.remote_cpus, **options
            )
        else:
            collector = Collector(self.env, policy.call, num_envs=num_envs, **options)
        if self.seed is not None:
            collector.set_seed(self.seed)
        return collector

    def _check(self) -> None:
        """Whether the words make sense, and go together."""
        if self.frames < 1:
            raise OptionError(f"--frames must be positive, not {self.frames}")
        if self.seed is not None and self.seed < 0:
            raise OptionError(f"--seed must not be negative; {self.seed} came")
        of_ray = {
            "--address": self.address,
            "--num-collectors": self.num_collectors,
            "--remote-cpus": self.remote_cpus,
        }
        for flag, value in of_ray.items():
            if value is not None and not self.ray:
                raise OptionError(f"{flag} {value} is for remotes on a Ray cluster; add --ray, or leave it out")
        if self.ray and self.policy.endswith(PROGRAM_SUFFIX):
            raise OptionError(
                f"--policy {self.policy} does not go with --ray: a program cannot be sent to remotes. Name a policy by "
                "module:attribute, and its weights by --weights"
            )
        if self.num_collectors is not None and self.num_collectors < 1:
            raise OptionError(f"--num-collectors must be positive, not {self.num_collectors}")
        if self.remote_cpus is not None and not (0 <= self.remote_cpus < math.inf):
            raise OptionError(f"--remote-cpus must not be negative, and have an end; {self.remote_cpus} came")


def frames_of_a_batch(num_envs: int | None, frames: int | None = None) -> int:
    """Frames of a batch where the user does not say: whole steps of all lanes, and no more than are asked for."""
    lanes = max(num_envs or 1, 1)
    steps = max(STEPS, FRAMES // lanes)
    return lanes * (steps if frames is None else min(steps, math.ceil(frames / lanes)))


class _Clock:
    """Seconds since it was made, and those of them that the disk took."""

    def __init__(self) -> None:
        self.seconds_on_disk = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def disk(self) -> Iterator[None]:
        """What is done inside counts as the disk's."""
        start = self.seconds
        try:
            yield
        finally:
            self.seconds_on_disk += self.seconds - start


def _collect(collector: Collector | RayCollector, writer: DatasetWriter, clock: _Clock, console: Console) -> bool:
    """Writes batch after batch; whether all came, or Ctrl-C first."""
    with CtrlC() as ctrl_c, Report(console, collector.total_frames) as report:
        try:
            while not ctrl_c.asked and (batch := collector.next()) is not None:
                with clock.disk():
                    writer.write(batch)
                report.update(writer.frames, collector.stats())
        except KeyboardInterrupt:
            if not ctrl_c.asked:
                raise
    return writer.frames == collector.total_frames
