"""Plain recurrent layers of torch as parts of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlcollect.errors import PolicyError
from rlcollect.layout import as_key

__all__ = ["RecurrentModule"]

NestedKey = str | tuple[str, ...]
LAYERS = (nn.RNN, nn.GRU, nn.LSTM)
CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)


class RecurrentModule(TensorDictModule):  # type: ignore[misc]
    """`nn.LSTM`, `nn.GRU`, `nn.RNN` or a cell of these as a part of a policy; a collector carries its state.

        core = RecurrentModule(nn.LSTM(4, 64), in_key="observation", out_key="features")
        head = TensorDictModule(nn.Linear(64, 2), in_keys=["features"], out_keys=["logits"])
        policy = TensorDictSequential(core, head, ...)

    Each call is one step: `in_key` `[N, F]` (or `[F]`) gives `out_key` `[N, H]`. The state is read under `state_keys`
    and written under `("next", key)`: `[N, num_layers, H]` for layers, `[N, H]` for cells, zeros in the first frame of
    an episode (or `initial_policy_state=`). Both are in every batch, so a learner can go on from any frame of it;
    `unroll` does, over a batch `[N, T]`.

    Args:
        rnn: the layer or cell. Layers may have several levels and projections, not two directions.
        in_key: what it reads.
        out_key: what it writes.
        state_keys: names of the state: `["hidden"]`, for an LSTM `["hidden", "cell"]`.

    Raises:
        PolicyError: another kind of module, a bidirectional layer, or another number of names.
    """

    def __init__(
        self,
        rnn: nn.Module,
        *,
        in_key: NestedKey = "observation",
        out_key: NestedKey = "features",
        state_keys: str | Sequence[NestedKey] | None = None,
    ) -> None:
        if not isinstance(rnn, LAYERS + CELLS):
            kinds = ", ".join(kind.__name__ for kind in LAYERS + CELLS)
            raise PolicyError(f"RecurrentModule takes one of {kinds}, not {type(rnn).__name__}.")
        if isinstance(rnn, LAYERS) and rnn.bidirectional:
            raise PolicyError("A bidirectional layer reads the future; while acting there is none. Use one direction.")
        names = ["hidden", "cell"] if isinstance(rnn, nn.LSTM | nn.LSTMCell) else ["hidden"]
        keys = names if state_keys is None else [state_keys] if isinstance(state_keys, str) else list(state_keys)
        if len({*keys}) != len(names) or len(keys) != len(names):
            raise PolicyError(
                f"{type(rnn).__name__} has the state {names}: state_keys should have {len(names)} name(s), each "
                f"another; {state_keys!r} came."
            )
        step = _LayerStep(rnn) if isinstance(rnn, LAYERS) else _CellStep(rnn)
        after = [("next", *as_key(key)) for key in keys]
        super().__init__(step, in_keys=[in_key, *keys], out_keys=[out_key, *after])

    def unroll(
        self,
        inputs: torch.Tensor,
        state: Sequence[torch.Tensor],
        is_init: torch.Tensor,
        initial: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs over time, for a learner; the state begins anew where an episode does.

        Args:
            inputs: `[N, T, F]`.
            state: before the first step, `[N, *]` each: `batch[key][:, 0]`.
            is_init: bool `[N, T, 1]`; `record=("is_init",)` has it in every batch. (The first step is
                computed from `state`, whatever it says; no gradient goes to the state of an episode that begins there.)
            initial: the state of one lane when an episode begins, `initial_policy_state`; None: zeros.

        Returns:
            Outputs `[N, T, H]`, then the states after the last step, `[N, *]` each.
        """
        outputs = []
        states = list(state)
        for t in range(inputs.shape[1]):
            firsts = [torch.zeros_like(part) for part in states] if initial is None else initial
            if t == 0:
                firsts = [part.detach() for part in states]
            states = [
                torch.where(_as_right(is_init[:, t, 0], part), first.to(part), part)
                for part, first in zip(states, firsts, strict=True)
            ]
            output, *states = self.module(inputs[:, t], *states)
            outputs.append(output)
        return (torch.stack(outputs, 1), *states)


def _as_right(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1, *[1] * (like.ndim - 1))


class _LayerStep(nn.Module):
    """One step of a layer, whose state has the lanes first."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn
        self.time = 1 if rnn.batch_first else 0

    def forward(self, inputs: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        batched = inputs.ndim == 2
        time = self.time if batched else 0
        outputs, after = self.rnn(inputs.unsqueeze(time), self.layers_first(state, batched))
        parts = after if isinstance(after, tuple) else (after,)
        return (outputs.squeeze(time), *[part.transpose(0, 1) if batched else part for part in parts])

    def layers_first(self, state: tuple[torch.Tensor | None, ...], batched: bool) -> Any:
        parts = [part.transpose(0, 1).contiguous() if batched else part for part in state if part is not None]
        if not parts:
            return None  # zeros
        return tuple(parts) if len(parts) == 2 else parts[0]


class _CellStep(nn.Module):
    """One step of a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.pairs = isinstance(cell, nn.LSTMCell)

    def forward(self, inputs: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if self.pairs:
            hidden, cell = self.cell(inputs, None if state[0] is None else state)
            return hidden, hidden, cell
        hidden = self.cell(inputs, state[0])
        return hidden, hidden
