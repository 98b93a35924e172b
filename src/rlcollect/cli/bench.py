"""`rlcollect bench`: the collector beside the loop that one would write by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict, TensorDictBase
from tyro import conf

from rlcollect import Collector
from rlcollect.cli.collect import frames_of_a_batch
from rlcollect.cli.policies import load_policy
from rlcollect.errors import OptionError

__all__ = ["Bench"]

Env = gym.Env[Any, Any]
Act = Callable[[], Any]
ONE_TENSOR = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure frames per second of a collector, beside a hand-written loop over the same environment and policy.

    The loop steps and acts, and records nothing: a ratio of 1 means that recording costs nothing. Both take turns,
    and the median of the ratios of all rounds counts. Torch uses one thread.

    Attributes:
        env: A Gymnasium id; "module:id" imports the module first, as seen from the current folder.
        policy: As for collect; the same policy acts in both. Random actions are action_space.sample() in the loop.
        weights: A state dict for the policy.
        num_envs: Lanes that are stepped together. Without it, one environment, and no dimension of lanes.
        seconds: How long each of the two runs in a round.
        rounds: How often they take turns.
    """

    env: conf.Positional[Annotated[str, conf.arg(metavar="ENV")]]
    policy: Annotated[str, conf.arg(metavar="random|MODULE:ATTRIBUTE|FILE.pt2")] = "random"
    weights: Annotated[Path | None, conf.arg(metavar="FILE")] = None
    num_envs: Annotated[int | None, conf.arg(metavar="N")] = None
    seconds: Annotated[float, conf.arg(metavar="S")] = 0.7
    rounds: Annotated[int, conf.arg(metavar="R")] = 5

    def run(self) -> int:
        """Measures.

        Returns:
            The exit status, 0.

        Raises:
            RlcollectError: it cannot be done.
            What an environment or the policy raised.
        """
        if not (self.seconds > 0 and self.rounds > 0):
            raise OptionError(f"--seconds and --rounds must be positive, not {self.seconds} and {self.rounds}")
        torch.set_num_threads(1)
        policy = load_policy(self.policy, self.weights)
        num_envs = policy.lanes(self.num_envs)
        console = Console()
        with (
            Collector(
                self.env, policy.call, frames_per_batch=frames_of_a_batch(num_envs), num_envs=num_envs
            ) as collector,
            closing(_by_hand(self.env, policy.call, num_envs)) as loop,
            console.status("measuring"),
        ):
            rates = _measured((batch.numel() for batch in collector), loop, self.seconds, self.rounds)
        console.print(_table(f"{self.env}, {_lanes(num_envs)}, policy {self.policy}", *rates), highlight=False)
        return 0


def _lanes(num_envs: int | None) -> str:
    return "one environment" if num_envs is None else f"{num_envs} lane{'s' * (num_envs > 1)}"


def _measured(
    ours: Iterator[int], theirs: Iterator[int], seconds: float, rounds: int
) -> tuple[list[float], list[float]]:
    """Frames per second of both, by round, taken in turn."""
    for arm in (ours, theirs):
        next(arm), next(arm)  # warm
    rates = [(_rate(ours, seconds), _rate(theirs, seconds)) for _ in range(rounds)]
    return [rate for rate, _ in rates], [rate for _, rate in rates]


def _rate(arm: Iterator[int], seconds: float) -> float:
    frames, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        frames += next(arm)
    return frames / elapsed


def _table(title: str, ours: list[float], theirs: list[float]) -> Table:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    table = Table("", "frames/s", "ratio (min - max)", title=Text(title))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
    table.add_row("rlcollect", f"{statistics.median(ours):,.0f}", ratio)
    table.add_row("hand-written loop, records nothing", f"{statistics.median(theirs):,.0f}", "1")
    return table


# --- the loop ---------------------------------------------------------------------------------------------------------


def _by_hand(env_id: str, policy: Any, num_envs: int | None) -> Generator[int, None, None]:
    """Steps and acts; yields how many frames that were, as many as a batch of ours has."""
    envs: list[Env] = [gym.make(env_id) for _ in range(num_envs or 1)]
    try:
        first = [env.reset()[0] for env in envs]
        current = first if policy is None else _array(first, envs[0].observation_space)
        act = _acting(policy, current, envs, batched=num_envs is not None)
        while True:
            frames = 0
            with torch.no_grad():
                while frames < frames_of_a_batch(num_envs):
                    actions = act()
                    for lane, env in enumerate(envs):
                        observation, _, terminated, truncated, _ = env.step(actions[lane])
                        current[lane] = env.reset()[0] if terminated or truncated else observation
                    frames += len(envs)
            yield frames
    finally:
        for env in envs:
            env.close()


def _array(observations: list[Any], space: gym.Space[Any]) -> Any:
    """The lanes' observations in one array, in the dtype in which a collector shows them."""
    if not isinstance(space, ONE_TENSOR):
        raise OptionError(f"the hand-written loop shows a policy one tensor; the observation space is {space}")
    array = np.stack(observations)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _acting(policy: Any, current: Any, envs: list[Env], *, batched: bool) -> Act:
    """What gives an action a lane, for the observations that `current` holds then."""
    if policy is None:
        return lambda: [env.action_space.sample() for env in envs]
    space = envs[0].action_space
    if not isinstance(space, ONE_TENSOR):
        raise OptionError(f"the hand-written loop takes a policy's action as one tensor; the action space is {space}")
    rows = torch.from_numpy(current)
    call = _caller(policy, rows if batched else rows[0], [len(envs)] if batched else [])
    if isinstance(space, spaces.Discrete):
        return (lambda: call().tolist()) if batched else (lambda: [call().item()])
    if batched:
        return lambda: call().numpy()
    return lambda: [call().numpy()]


def _caller(policy: Any, shown: torch.Tensor, lanes: list[int]) -> Callable[[], torch.Tensor]:
    """Calls the policy on a tensor, or on a TensorDict where it takes one."""

    def with_tensor() -> torch.Tensor:
        return _action(policy(shown))

    def with_tensordict() -> torch.Tensor:
        return _action(policy(TensorDict({"observation": shown}, lanes)))

    if hasattr(policy, "in_keys"):
        return with_tensordict
    try:
        with torch.no_grad():
            with_tensor()
    except Exception:
        with torch.no_grad():
            with_tensordict()  # the collector has called it before: one of the two works
        return with_tensordict
    return with_tensor


def _action(result: Any) -> torch.Tensor:
    action: torch.Tensor = result["action"] if isinstance(result, TensorDictBase | Mapping) else result
    return action
