"""What a collector does about new weights: whose they are, for whom, which version, and how old frames are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcollect.collectors.arguments import worker_numbers
from rlcollect.collectors.posting import Addressed, Poster
from rlcollect.collectors.schemes import Schemes
from rlcollect.errors import ClosedError, OptionError, PolicyError
from rlcollect.failures import warn
from rlcollect.processes.channel import Held
from rlcollect.weights.form import WeightsForm
from rlcollect.weights.naming import copy_into, tensors_of
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.workers.models import POLICY, POSTPROC, common_form, find_models

__all__ = ["Updates"]

LARGEST_LAG = 1024  # under which all larger ones are counted
LOOKED_EACH = 0.001  # seconds between two looks whether another thread has published


class Updates:
    """Versions of weights: makes them, and keeps account of which frames were made by which.

    Several threads may send.

    Attributes:
        version: the newest.
        of_all: the newest version that was sent to all workers together; 0: none was.
        lag: how many delivered frames were made by weights how many versions old; the largest stands for all above.

    Args:
        schemes: of the models.
        poster: gets weights to where they act.
        postproc: the post-processings.
        devices: on which the policy of each worker computes.
        published: told each new version.
        refuses_worker_ids: why an update cannot be for some workers only; None: it can.
    """

    def __init__(
        self,
        schemes: Schemes,
        poster: Poster,
        *,
        postproc: Sequence[Any],
        devices: Sequence[torch.device],
        published: Callable[[int], None],
        refuses_worker_ids: str | None,
    ) -> None:
        self.version = 0
        self.lag: Counter[int] = Counter()
        self._schemes = schemes
        self._poster = poster
        self._devices = devices
        self._published = published
        self._refuses_worker_ids = refuses_worker_ids
        self._receivers: list[WeightSyncScheme] = []
        self._addressed = [0] * len(devices)  # the newest version that was sent to each
        self.of_all = 0
        self._local = {path: find_models(path, {POSTPROC: postproc}) for path in schemes.local}
        self._local_forms = {path: common_form(path, modules) for path, modules in self._local.items()}
        self._gathered: list[Addressed] | None = None  # what is sent later, as one
        self._lock = threading.RLock()
        self._is_closed = False
        self._open = ExitStack()  # schemes that are in use
        for model, scheme in schemes.given.items():
            scheme.init_on_sender(model, self)
            self._open.callback(scheme.shutdown)

    def receive_by(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Takes what comes by these schemes from now on, before each batch, and hands it on.

        Raises:
            OptionError: no such model, or one that is left alone.
            What `connect` raises; a scheme that is not connected is shut down.
        """
        for model, scheme in schemes.items():
            self._check_model(model)
            if model not in self._schemes.moving:
                raise OptionError(f"{model!r} has a NoWeightSyncScheme here: nothing that comes could be handed on.")
            scheme.init_on_receiver(model, self)
            self._open.callback(scheme.shutdown)
            try:
                scheme.connect()
            except BaseException:
                scheme.shutdown()
                raise
            self._receivers.append(scheme)

    def close(self) -> None:
        """Nothing more is sent or received."""
        self._is_closed = True
        self._receivers = []
        self._open.close()

    def add(self, devices: Sequence[torch.device], tell: Callable[[], None]) -> None:
        """There are more workers.

        Args:
            devices: where their policies compute.
            tell: sends them the newest weights that all were sent.
        """
        with self._lock:
            tell()
            self._devices = [*self._devices, *devices]
            self._addressed += [self.of_all] * len(devices)

    # --- as a scheme sees it ---

    def weights_form(self, model_id: str) -> WeightsForm:
        """What weights a model takes."""
        self._check_model(model_id)
        local = self._local_forms.get(model_id)
        return self._poster.form(model_id) if local is None else local

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, model_id: str = POLICY
    ) -> int:
        """See `BaseCollector`."""
        return self.send(policy_or_weights, worker_ids, model_id)

    def hand_on(self, model_id: str, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Gives workers weights that came from elsewhere, with the version that they have there, if it is newer."""
        self.send(weights, None, model_id, version=version)

    def _check_model(self, model_id: Any) -> None:
        if model_id not in self._schemes.given:
            raise OptionError(
                f"There is no model {model_id!r} here; there are {', '.join(map(repr, self._schemes.given))} "
                "(weight_sync_schemes= names others)."
            )

    # --- updates ---

    def send(
        self,
        weights: Any,
        worker_ids: Any = None,
        model_id: str = POLICY,
        weights_dict: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> int:
        """Makes weights the newest, all of them or none; within `one_version` when that ends.

        Args:
            weights: of one model.
            worker_ids: for whom, as the user says it.
            model_id: of which.
            weights_dict: in the place of these, weights of several, by model.
            version: that they have elsewhere, where they come from there.

        Returns:
            Their version; the newest, if they are sent later, or if their model is left alone.

        Raises:
            PolicyError: something does not fit.
            OptionError: no such model or worker.
        """
        workers = worker_numbers(worker_ids, self._devices)
        given = self._addressed_to(weights, workers, model_id, weights_dict)
        with self._lock:  # what another thread gathers is its own
            if self._gathered is not None:
                self._gathered += [(self._as_it_is(models), to) for models, to in given]
            elif given:
                self._update(given, version)
            return self.version

    def _addressed_to(
        self, weights: Any, workers: Sequence[int] | None, model_id: str, weights_dict: Mapping[str, Any] | None
    ) -> list[Addressed]:
        """What is to be sent, by model and worker; not what is left alone."""
        models = {model_id: weights} if weights_dict is None else dict(weights_dict)
        for model in models:
            self._check_model(model)
            if workers is not None and model in self._local:
                raise OptionError(f"{model!r} is in this process, and no worker's: worker_ids= does not go with it.")
        models = {model: given for model, given in models.items() if model in self._schemes.moving}
        if not models:
            return []
        if not _is_by_worker(weights):
            return [(models, workers)]
        if workers is not None:
            raise OptionError("worker_ids= does not go with weights for each worker, {0: weights, 1: weights, ...}.")
        return [({model_id: given}, worker_numbers(worker, self._devices)) for worker, given in weights.items()]

    def count(self) -> int:
        """One more version, of weights that came to the workers by another way."""
        with self._lock:
            self._update([({}, None)])
            return self.version

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """All that is sent inside is one update, of one version; it is one even if nothing is."""
        with self._lock:
            if self._gathered is not None:
                yield
                return
            self._gathered = gathered = list[Addressed]()
            try:
                yield
            finally:
                self._gathered = None
            if POLICY in self._schemes.moving:
                self._update(self._joined(gathered))

    def _as_it_is(self, models: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copies of weights that are sent later; of what is the same as before, the same."""
        copies: dict[str, Any] = {}
        for model, given in models.items():
            if given is None:
                copies[model] = None
                continue
            named = {name: each.detach().clone() for name, each in self._named(model, given).items()}
            same = (each[model] for each, _ in self._gathered or () if model in each and _are_equal(each[model], named))
            copies[model] = next(same, named)
        return copies

    def _named(self, model: str, given: Any) -> dict[str, torch.Tensor]:
        strategy = self._schemes.given[model].strategy
        return self._poster.named(given) if model == POLICY else strategy.named(given)

    def _joined(self, given: Sequence[Addressed]) -> list[Addressed]:
        """The last that was sent to each worker of each model; what all workers are sent one by one is sent to all."""
        last: dict[tuple[int, str], Any] = {}
        everyone = range(len(self._devices))
        for models, workers in given:
            for worker in everyone if workers is None else workers:
                last |= {(worker, model): weights for model, weights in models.items()}
        by_weights: dict[tuple[str, int], tuple[Any, list[int]]] = {}
        for (worker, model), weights in last.items():
            by_weights.setdefault((model, id(weights)), (weights, []))[1].append(worker)
        joined: list[Addressed] = [
            ({model: weights}, None if len(workers) == len(everyone) else workers)
            for (model, _), (weights, workers) in by_weights.items()
        ]
        return joined or [({}, None)]

    def _update(self, given: Sequence[Addressed], version: int | None = None) -> None:
        if self._is_closed:
            raise ClosedError("This collector was shut down, and takes no more weights.")
        if self._refuses_worker_ids and any(workers is not None for _, workers in given):
            raise OptionError(f"worker_ids= does not go with {self._refuses_worker_ids}")
        with Held():
            here = {
                model: self._fitted_here(model, weights)
                for models, _ in given
                for model, weights in models.items()
                if model in self._local
            }
            there = [({model: models[model] for model in models if model not in here}, to) for models, to in given]
            fitted = self._poster.fitted(there)  # nothing was changed so far
            self.version = self._next(version)  # whatever happens now: no number has two sets of weights
            self._poster.post(fitted, self.version)
            for model, named in here.items():
                for module in self._local[model]:
                    copy_into(tensors_of(module), named)
            for _, workers in given:
                for worker in range(len(self._addressed)) if workers is None else workers:
                    self._addressed[worker] = self.version
                self.of_all = self.version if workers is None else self.of_all
            self._published(self.version)

    def _fitted_here(self, model: str, given: Any) -> dict[str, torch.Tensor]:
        if given is None:
            raise PolicyError(f"{model!r}: pass a module, a TensorDict of parameters or a state dict.")
        return self._local_forms[model].fitted(self._schemes.given[model].strategy.named(given), repr(model))

    def _next(self, version: int | None) -> int:
        """The next version: that of the sender, where weights come from elsewhere, as long as those grow."""
        is_first = version == self.version == 0  # those that a sender begins with
        return version if version is not None and (version > self.version or is_first) else self.version + 1

    def load(self, version: int, *, has_weights: bool) -> None:
        """Goes on from a state.

        Args:
            version: the newest.
            has_weights: whether the user's policy has weights of it; else workers have what their own states brought.
        """
        with self._lock:
            self.version, self._addressed = version, [0] * len(self._addressed)
            if has_weights and POLICY in self._schemes.moving:
                self._poster.load(version)
                self._addressed = [version] * len(self._addressed)
                self.of_all = version

    # --- waiting ---

    def sent_to(self, worker: int) -> int:
        """The newest version that was sent to a worker."""
        return self._addressed[worker]

    def is_with(self, worker: int, version: int, acting: int) -> bool:
        """Whether a worker that acts with a version has this one, or the newest that was sent to it."""
        return acting >= min(version, self._addressed[worker])

    def wait_until_published(self, version: int, timeout: float | None) -> None:
        """Waits for another thread to publish a version.

        Raises:
            OptionError: there is no time limit, and it may never come.
            TimeoutError: it has not come in time.
        """
        if version > self.version:
            self._wait_for(version, timeout)
        with self._lock:  # a number is given before its weights are sent
            return

    def _wait_for(self, version: int, timeout: float | None) -> None:
        if timeout is None:
            raise OptionError(
                f"Version {version} was not published yet; the newest is {self.version}. Pass timeout= if another "
                "thread publishes it."
            )
        deadline = time.monotonic() + timeout
        while self.version < version:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"Version {version} was not published in {timeout} s; the newest is {self.version}.")
            time.sleep(LOOKED_EACH)

    # --- frames ---

    def before_batch(self) -> None:
        """What came from elsewhere is handed on; says so, once, where workers act with weights that nobody sent."""
        for scheme in list(self._receivers):
            try:
                scheme.receive()
            except ClosedError as error:
                self._receivers.remove(scheme)
                warn(f"{error} Collection goes on with version {self.version}.")
        self._poster.before_batch()

    def lag_with(self, versions: Sequence[tuple[int, int]]) -> Counter[int]:
        """`lag`, if so many frames of these versions are delivered now."""
        lag = self.lag.copy()
        for version, frames in versions:
            if version >= 0:
                lag[min(max(0, self.version - version), LARGEST_LAG)] += frames
        return lag


def _are_equal(one: Any, other: Mapping[str, torch.Tensor]) -> bool:
    if one is None or one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in other]
    return all(ours.dtype == theirs.dtype and torch.equal(ours, theirs) for ours, theirs in pairs)


def _is_by_worker(weights: Any) -> bool:
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return False
    return bool(weights) and all(isinstance(key, int) for key in weights)
