"""N lanes of environments from TensorDict to TensorDict: a batched one that holds them all, or one environment a lane.

Every step is a frame of each lane. The environment resets what has ended itself (`step_and_maybe_reset`), so that what
it shows next is the beginning of the next episode; what came of the step stands beside it, and both are written to
memory at once: environments may use their tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcollect.devices import CPU
from rlcollect.envs.driver import Driver
from rlcollect.envs.make import close_all
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.tensordicts.carrier import Carrier, reset_data, why_no_lane_resets
from rlcollect.envs.tensordicts.forms import Form, Source, forms_agree, read_form
from rlcollect.envs.tensordicts.loose import Loose, LooseRecord, find_loose, with_levels
from rlcollect.errors import OptionError
from rlcollect.interfaces import ActionForm, RolloutMemory
from rlcollect.layout import Key, Leaf, as_key, has_numpy
from rlcollect.options import What

__all__ = ["TensorDicts", "open_tensordicts"]

Array = np.ndarray[Any, Any]


def open_tensordicts(opening: Opening) -> TensorDicts:
    """Resets environments, and plans how they are stepped and stored.

    Raises:
        OptionError, SpaceError, EnvError: they do not fit.
        What a first reset raises, from a `WorkerError`.
    """
    _check_options(opening.what)
    envs = opening.envs
    several = len(envs) > 1
    if several and (batched := [lane for lane, env in enumerate(envs) if tuple(env.batch_size)]):
        raise OptionError(
            f"Environment {batched[0]} of {len(envs)} has batch size {list(envs[batched[0]].batch_size)}: it holds "
            "lanes itself. Pass one maker of one batched environment, without num_envs=."
        )
    lanes = int(np.prod(tuple(envs[0].batch_size)))
    if opening.where.num_envs is not None and lanes not in (1, opening.where.num_envs):
        raise OptionError(
            f"num_envs={opening.where.num_envs} was given; the environment holds {lanes} lanes itself. Leave it out."
        )
    carriers, forms, nodes = [], [], []
    for lane, env in enumerate(envs):
        with at_lane(opening.worker, lane if several else None):
            data = reset_data(env)
            form, loose = _read(env, data, opening)
            carrier = Carrier(env, form, data, lane if several else None)
            carrier.check()
        carriers.append(carrier)
        forms.append(form)
        nodes.append(loose)
    forms_agree(forms)
    return TensorDicts(opening, carriers, forms[0], nodes[0])


def _check_options(what: What) -> None:
    if what.info_forms:
        raise OptionError(
            "info_keys is for environments of Gymnasium. Those from TensorDict to TensorDict give infos as keys of "
            "their own: TorchRL's have `env.auto_register_info_dict()` and `set_info_dict_reader(...)`."
        )
    if what.reset_options is not None:
        raise OptionError(
            "reset_options is for environments of Gymnasium; those from TensorDict to TensorDict reset themselves when "
            "an episode has ended. Give the options to the environment that is wrapped."
        )


def _read(env: Any, data: TensorDictBase, opening: Opening) -> tuple[Form, list[Loose]]:
    what = opening.what
    exclude: Sequence[Key] = what.exclude_keys  # type: ignore[assignment]
    rename: Mapping[Key, Key] = what.rename_keys or {}  # type: ignore[assignment]
    loose = find_loose(env, data, exclude=exclude, rename=rename)
    shown = {as_key(name) for name in data.keys(True)}
    return read_form(env, shown, loose, exclude=exclude, rename=rename, ours=opening.names), loose


class TensorDicts(Driver):
    """The `EnvDriver` of environments from TensorDict to TensorDict; made by `open_tensordicts`.

    Args:
        opening: what is asked for.
        carriers: the environments: one of all lanes, or one a lane.
        form: what each gives and takes.
        nodes: what each gives that has no fixed form.
    """

    def __init__(self, opening: Opening, carriers: Sequence[Carrier], form: Form, nodes: Sequence[Loose]) -> None:
        super().__init__(opening)
        self._carriers = carriers
        self._form = form
        self._one_a_lane = not form.batch
        self.num_lanes = len(carriers) if self._one_a_lane else int(np.prod(form.batch))
        self.lead: tuple[int, ...] = form.batch or ((self.num_lanes,) if opening.batched else ())
        self.device = carriers[0].device
        self.after_leaves: Sequence[Leaf] = [source.leaf for source in form.after]
        self.reward_keys: Sequence[Key] = tuple(form.rewards)
        self.truncated_keys = form.truncated
        self.action_codec: ActionForm = form.actions
        self.draw = self._draw
        self.refuses_lane_resets = why_no_lane_resets(carriers[0].env) if self.num_lanes > len(carriers) else None
        self.refuses_lane_seeds = (
            "A batched environment takes one seed, for all its lanes: seed them all, or none."
            if self.num_lanes > len(carriers)
            else None
        )
        self.env_seconds = 0.0
        self._record = LooseRecord(nodes, self.lead) if nodes else None
        self.loose = self._record.shown if self._record is not None else {}
        self._show_loose()
        self._look_at(form)
        # views of a rollout's memory, between `bind` and `finish`
        self._tensors: dict[Key, torch.Tensor] = {}
        self._arrays: Mapping[Key, Array] = {}
        self._start = 0

    def _look_at(self, form: Form) -> None:
        self._form = form
        recorded = [source.leaf for source in form.observed]
        self._recorded = {
            *(leaf.key for leaf in recorded),
            *(("next", *leaf.key) for leaf in (*recorded, *self.after_leaves)),
        }
        self.leaves: Sequence[Leaf] = [source.leaf for source in form.observed]
        self.whole_key: Key = form.names[0] if len(form.names) == 1 else ()

    @property
    def primed(self) -> Mapping[Key, torch.Tensor]:
        """Observations that the environment takes in again with the action, `[*shape]` by key, as they are in lane 0.

        A policy that writes the next of them has state, and carries it itself: see `leave_to_policy`.
        """
        primed = [source for source in self._form.observed if source.leaf.key in self._form.primed]
        return {source.leaf.key: torch.as_tensor(self._now(source))[0] for source in primed}

    def leave_to_policy(self, keys: Collection[Key]) -> None:
        """These of the `primed` are the policy's to show and to record; called before the first rollout."""
        form = self._form.without(keys)
        self._look_at(form)
        for carrier in self._carriers:
            carrier.record(form)

    # --- the contract ---

    @property
    def current(self) -> Mapping[Key, Any]:
        """The newest observation of every lane, `[N, *shape]` by key: arrays, or tensors where numpy lacks them."""
        return {source.leaf.key: self._now(source) for source in self._form.observed}

    def _now(self, source: Source) -> Any:
        values = [carrier.data.get(source.key) for carrier in self._carriers]
        tensor = torch.stack(values) if self._one_a_lane else values[0].reshape(self.num_lanes, *source.leaf.shape)
        return tensor.numpy() if self.device == CPU and has_numpy(tensor.dtype) else tensor

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""
        # as `data`, whose writes torch does not count: those that count are the policy's, to its observations
        self._tensors = {key: tensor.data for key, tensor in memory.tensors.items()}
        self._arrays = memory.arrays
        for name in ("terminated", "truncated"):
            self._arrays["next", name].fill(False)
        self.ends = []
        self.failed_lane = None
        for place, carrier in enumerate(self._carriers):
            carrier.bind({key: self._place(tensor, place) for key, tensor in self._tensors.items()})
        self._show_loose()

    def _place(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """`[*batch, T, *shape]`, the memory of one environment."""
        if self._one_a_lane:
            return tensor[place] if self.lead else tensor
        return tensor.view(*self._form.batch, *tensor.shape[1:]) if len(self._form.batch) > 1 else tensor

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        self._start = start
        for carrier in self._carriers:
            carrier.view(start, stop)

    def step(self, t: int, actions: Sequence[Any]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""
        self._advance(t, actions, Carrier.step)

    def _advance(self, t: int, actions: Sequence[Any], step: Callable[[Carrier, int, Sequence[Any]], bool]) -> None:
        place = 0
        try:
            for place, carrier in enumerate(self._carriers):
                if step(carrier, t, actions):
                    self._note_ends(self._start + t, place, carrier.after)
        except BaseException:
            self.failed_lane = place if self._one_a_lane else None
            raise
        if self._record is not None:
            self._record.record([carrier.after for carrier in self._carriers])
            self._record.show([carrier.data for carrier in self._carriers])

    def _note_ends(self, t: int, place: int, after: TensorDictBase) -> None:
        told = self._form.ends
        done, terminated, truncated = (self._any(after, keys) for keys in (told.done, told.terminated, told.truncated))
        for row in np.flatnonzero(done).tolist():
            lane = place + row  # an environment a lane has one row
            self._arrays["next", "truncated"][lane, t] = truncated[row]
            self._arrays["next", "terminated"][lane, t] = terminated[row] or not truncated[row]
            self.ends.append((t, lane))

    def _any(self, after: TensorDictBase, keys: Sequence[Any]) -> Array:
        """Bool `[rows of an environment]`, whether any of these flags is set."""
        rows = self.num_lanes if not self._one_a_lane else 1
        found = np.zeros(rows, bool)
        for key in keys:
            found |= after.get(key).reshape(rows, -1).any(1).cpu().numpy()
        return found

    def audit_step(self, t: int, actions: Sequence[Any]) -> None:
        """`step`, with the time in the environments measured and their answers held against their specs."""
        before = sum(carrier.seconds for carrier in self._carriers)
        self._advance(t, actions, Carrier.audit_step)
        self.env_seconds += sum(carrier.seconds for carrier in self._carriers) - before

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, every part of it, and resets them."""
        for key in self._form.flags:
            if key[-1] in ("done", "truncated"):
                tensor = self._tensors["next", *key]
                for lane in lanes:
                    (tensor[lane] if self.lead else tensor)[t] = True
        for lane in lanes:
            self._arrays["next", "truncated"][lane, t] = True
            self.ends.append((t, lane))
        self._reset(lanes, None, {})
        for carrier in self._carriers:
            carrier.show(t - self._start)
        if self._record is not None:
            self._record.show_again([carrier.data for carrier in self._carriers])

    def finish(self, made: int) -> None:  # noqa: ARG002 - all rows alike
        """The rollout has `made` steps: fills in what follows from the frames, lets the memory go."""
        for key in self._form.constant:
            self._tensors["next", *key].copy_(self._tensors[key])
        if self.device != CPU:  # arrays are apart from tensors, and count
            for key in self._recorded & self._arrays.keys():
                tensor = self._tensors[key] if self.lead else self._tensors[key].unsqueeze(0)
                self._arrays[key][...] = tensor.cpu().numpy()
        self._tensors, self._arrays = {}, {}
        for carrier in self._carriers:
            carrier.release()

    def loose_batch(self, made: int) -> Mapping[Key, Any]:
        """What has no fixed form, of the rollout that was finished: `[*lead, made]` by key, below "next" too.

        Nested levels that have batch dimensions of their own are there too, empty: `with_loose`, which puts these
        values into a batch, fills them with the tensors that stand there.
        """
        values = {} if self._record is None else self._record.batch(made)
        return with_levels(values, self._form.levels, (*self.lead, made))

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations.

        Args:
            lanes: which.
            seeds: a seed for each of them. A batched environment takes the first, for all its lanes.
            kwargs: further arguments for the environments' `reset`.
        """
        self._reset(lanes, seeds, kwargs or {})
        self._show_loose()

    def _reset(self, lanes: Sequence[int], seeds: Sequence[int] | None, kwargs: Mapping[str, Any]) -> None:
        if self._one_a_lane:
            for place, lane in enumerate(lanes):
                self.failed_lane = lane
                self._carriers[lane].reset(None, None if seeds is None else seeds[place], kwargs)
            self.failed_lane = None
        else:
            some = None if len(lanes) == self.num_lanes else lanes
            self._carriers[0].reset(some, None if seeds is None else seeds[0], kwargs)

    def _show_loose(self) -> None:
        if self._record is not None:
            self._record.begin([carrier.data for carrier in self._carriers])

    def _draw(self, _generator: np.random.Generator) -> Sequence[Any]:
        """Random actions by the environments' own rule, from torch's generator: `[N, *shape]` a leaf."""
        drawn = list(zip(*(carrier.draw() for carrier in self._carriers), strict=True))
        if self._one_a_lane:
            return [torch.stack(values) for values in drawn]
        leaves = self.action_codec.leaves
        return [values[0].reshape(self.num_lanes, *leaf.shape) for values, leaf in zip(drawn, leaves, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What the environments' own `state_dict` returns (of transforms, say), by environment."""
        return {str(place): carrier.env.state_dict() for place, carrier in enumerate(self._carriers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved. The environments are not reset by it."""
        for place, carrier in enumerate(self._carriers):
            carrier.env.load_state_dict(state[str(place)])

    def close(self) -> list[BaseException]:
        """Closes the environments that were made here; instances that were passed in are their owner's."""
        owned, self._owned = self._owned, []
        return close_all([env for env in owned if not getattr(env, "is_closed", False)])
