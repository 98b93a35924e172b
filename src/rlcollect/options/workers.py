"""Options of kinds with workers in other processes, here or elsewhere."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

from rlcollect.errors import OptionError
from rlcollect.options.checks import flag, option, positive, seconds

__all__ = ["Processes", "Stacking", "Staleness", "Workers"]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers that make frames in other processes."""

    num_workers: int | None = option(
        "Workers made of one maker (`num_collectors` is the same). None: one for each of a sequence.", None
    )
    start_timeout: float | None = option(
        "Seconds in which all workers must have made and reset their environments. None: any.", 300.0
    )
    timeout: float | None = option(
        "Seconds that any later wait for workers may take, before a `WorkerTimeout` says what they are doing. None: "
        "any, as long as they live.",
        None,
    )
    on_worker_failure: Literal["raise", "restart"] = option(
        "What to do when a worker fails: its environment, policy or hook raises, its process dies, or it "
        'gives no sign of life. "raise": the error comes out, and the collector is closed. "restart": it is made anew, '
        "with environments of its own seed; its rollout goes on after the frames that stand, with new episodes, and "
        "what it was asked meanwhile (by `map_fn`, say) is asked again.",
        "raise",
    )
    max_restarts: int | None = option(
        "Times that each worker may be started again; then the last error comes out, with a note that tells all. None: "
        "any. There is a wait before each attempt but the first in a row, of 0.1 s at first and 10 s at most.",
        10,
    )
    worker_timeout: float | None = option(
        "Seconds without a sign of life after which a worker that has something to do is ended and started again. It "
        "gives one after each step, or every 20 ms where steps are shorter. None: it may take any time.",
        None,
    )
    num_threads: int | None = option(
        "Threads that torch computes with in this process until `shutdown`. None: as it is, where workers rest while "
        "the program learns; where they do not, what their threads and their environments' processes leave of it.",
        None,
    )
    num_sub_threads: int = option("Threads that torch computes with in each worker.", 1)
    update_at_each_batch: bool = option(
        "Publish the policy's weights by itself (`update_after_each_batch` is the same): before each collection where "
        "workers rest between batches; else at the call of `next` that follows each batch.",
        False,
    )
    collector_class: Any = option(
        "A class of collectors: each worker then holds one, and drives it by `rollout`, `reset`, `set_seed`, "
        "`state_dict`, `load_state_dict`, `update_policy_weights_` and `shutdown`. None: an engine, which is faster.",
        None,
    )

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            object.__setattr__(self, "num_workers", positive("num_workers", self.num_workers))
        if self.num_threads is not None:
            object.__setattr__(self, "num_threads", positive("num_threads", self.num_threads))
        object.__setattr__(self, "num_sub_threads", positive("num_sub_threads", self.num_sub_threads))
        self._check_restarts()
        for name in ("start_timeout", "timeout", "worker_timeout"):
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))
        flag("update_at_each_batch", self.update_at_each_batch)
        if not (
            self.collector_class is None or isinstance(self.collector_class, str) or callable(self.collector_class)
        ):
            raise OptionError(f"collector_class must be a class of collectors, not {self.collector_class!r}.")

    def _check_restarts(self) -> None:
        if self.on_worker_failure not in ("raise", "restart"):
            raise OptionError(f'on_worker_failure must be "raise" or "restart", not {self.on_worker_failure!r}.')
        if self.max_restarts is not None:
            object.__setattr__(self, "max_restarts", positive("max_restarts", self.max_restarts))
        if self.worker_timeout is not None and not self.restarts:
            raise OptionError(
                'worker_timeout= needs on_worker_failure="restart"; timeout= limits how long a batch is waited for.'
            )
        if self.restarts and self.collector_class is not None:
            raise OptionError('on_worker_failure="restart" does not go with collector_class=.')

    @property
    def restarts(self) -> bool:
        """Whether workers that fail are started again."""
        return self.on_worker_failure == "restart"


@dataclass(frozen=True, kw_only=True)
class Processes:
    """What holds where workers are processes of this machine."""

    start_method: Literal["forkserver", "spawn", "fork"] | None = option(
        'How processes are started. None: "forkserver", from a server that has imported torch once; where there is no '
        'such thing, "spawn". The program\'s main module is never run again: no guard is needed.',
        None,
    )
    weights_update: Literal["rollout", "step"] = option(
        'When workers take new weights: "rollout", before each rollout; "step", before each step (a look at a number '
        "in shared memory; each frame has the version that made it).",
        "rollout",
    )

    def __post_init__(self) -> None:
        if self.weights_update not in ("rollout", "step"):
            raise OptionError(f'weights_update must be "rollout" or "step", not {self.weights_update!r}.')


@dataclass(frozen=True, kw_only=True)
class Stacking:
    """How the rollouts of several workers become one batch."""

    cat_results: Literal["stack"] | int = option(
        '"stack": batches have a first dimension of workers. A number: they are joined in this dimension of a '
        "worker's batch (-1: time).",
        "stack",
    )
    preemptive_threshold: float | None = option(
        "A share of the workers, above 0 and up to 1: when so many have finished their rollouts, the others are not "
        "waited for. None: all are.",
        None,
    )
    stragglers: Literal["stop", "continue"] = option(
        'What becomes of the others then. "stop": they end theirs with the frame under way; rows that they have not '
        'made are marked (`("collector", "mask")` is False), or left out where rollouts are joined in time. '
        '"continue": they go on, and their rollouts come whole in a later batch; each batch has those that are ready, '
        'as many as there are, and `("collector", "worker")` says whose.',
        "stop",
    )

    def __post_init__(self) -> None:
        share = self.preemptive_threshold
        if share is not None and not (
            isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        ):
            raise OptionError(f"preemptive_threshold must be a share of the workers, in (0, 1], not {share!r}.")
        if self.stragglers not in ("stop", "continue"):
            raise OptionError(f'stragglers must be "stop" or "continue", not {self.stragglers!r}.')
        if self.stragglers == "continue" and share is None:
            raise OptionError(
                'stragglers="continue" needs preemptive_threshold=: the share of workers that are waited for.'
            )
        if self.cat_results != "stack" and (
            isinstance(self.cat_results, bool) or not isinstance(self.cat_results, int)
        ):
            raise OptionError(f'cat_results must be "stack" or a dimension, not {self.cat_results!r}.')


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How old the weights may be that made a batch."""

    max_policy_lag: int | None = option(
        "How many versions old the weights of a delivered frame may be, for a learner that publishes at most once per "
        "`batches_per_version` batches. Rollouts begin only as versions allow, so nothing is thrown away; 0: each "
        "batch is made with the newest. None: any.",
        None,
    )
    batches_per_version: int = option(
        "Batches that a learner takes for each version, where `max_policy_lag` is set.", 1
    )

    def __post_init__(self) -> None:
        lag = self.max_policy_lag
        if lag is not None and (isinstance(lag, bool) or not hasattr(lag, "__index__") or operator.index(lag) < 0):
            raise OptionError(f"max_policy_lag must be an integer of 0 or more, or None, not {lag!r}.")
        object.__setattr__(self, "batches_per_version", positive("batches_per_version", self.batches_per_version))
        if self.batches_per_version > 1 and lag is None:
            raise OptionError(f"batches_per_version={self.batches_per_version} needs max_policy_lag=.")
