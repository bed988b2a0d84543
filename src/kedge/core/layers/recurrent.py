"""LSTM, GRU and RNN whose dropout draws from a key, step by step where ``vmap`` has no rule.

On a CPU, outside of ``vmap`` and traces and without dropout, they are torch's fused layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kedge.core.eager import is_eager
from kedge.core.layers.dropout import drop
from kedge.errors import ModelError

State = tuple[Tensor, ...]  # (h,) or (h, c), [B, H] each


class _Recurrent(nn.RNNBase):
    """Shared by the three: layers, directions and dropout between layers."""

    @property
    def is_random(self) -> bool:
        return self.dropout > 0 and self.num_layers > 1

    def forward(self, x: Any, hx: Any = None) -> Any:
        drops = self.is_random and self.training
        packed = isinstance(x, PackedSequence)
        values: Tensor = x.data if packed else x
        # cuDNN moves the weights of a layer together, which those of a pass do not survive
        if not drops and values.device.type == "cpu" and is_eager(values):
            return super().forward(x, hx)
        if packed:
            raise ModelError(
                f"a PackedSequence goes into {type(self).__name__}, which cannot be "
                + ("combined with dropout inside; set dropout=0" if drops else "run by vmap")
            )
        batched = x.dim() == 3
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)  # [T, B, F]
        starts = self._starts(x, hx, batched)
        ends: list[State] = []
        directions = 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            if layer and drops:
                x = drop(x, self.dropout)
            outs = []
            for backward in range(directions):
                name = f"_l{layer}{'_reverse' if backward else ''}"
                start = starts[layer * directions + backward]
                out, end = self._layer(x.flip(0) if backward else x, start, name)
                outs.append(out.flip(0) if backward else out)
                ends.append(end)
            x = torch.cat(outs, -1) if backward else outs[0]
        last = [torch.stack(values) for values in zip(*ends, strict=True)]
        if not batched:
            x, last = x.squeeze(1), [value.squeeze(1) for value in last]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(last) if len(last) == 2 else last[0]

    def _starts(self, x: Tensor, hx: Any, batched: bool) -> list[State]:
        """The initial state of every layer and direction."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        if hx is None:
            sizes = [self.proj_size or self.hidden_size]
            sizes += [self.hidden_size] if self.mode == "LSTM" else []
            return [tuple(x.new_zeros(x.shape[1], n) for n in sizes)] * count
        given = hx if isinstance(hx, tuple) else (hx,)
        if not batched:
            given = tuple(value.unsqueeze(1) for value in given)
        return [tuple(value[i] for value in given) for i in range(count)]

    def _layer(self, x: Tensor, state: State, name: str) -> tuple[Tensor, State]:
        """One layer in one direction: outputs ``[T, B, H]`` and the last state."""
        weight = getattr(self, f"weight_hh{name}")
        bias_x, bias_h = (
            (getattr(self, f"bias_ih{name}"), getattr(self, f"bias_hh{name}"))
            if self.bias
            else (None, None)
        )
        project = getattr(self, f"weight_hr{name}") if self.proj_size else None
        inputs = F.linear(x, getattr(self, f"weight_ih{name}"), bias_x)  # all steps at once
        outs = []
        for step in inputs.unbind():
            state = self._cell(step, F.linear(state[0], weight, bias_h), state)
            if project is not None:
                state = (F.linear(state[0], project), *state[1:])
            outs.append(state[0])
        return torch.stack(outs), state

    def _cell(self, x: Tensor, h: Tensor, state: State) -> State:
        """The next state from the input's and the state's part of the gates."""
        raise NotImplementedError


class LSTM(_Recurrent, nn.LSTM):
    """``nn.LSTM``."""

    def _cell(self, x: Tensor, h: Tensor, state: State) -> State:
        i, f, g, o = (x + h).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GRU(_Recurrent, nn.GRU):
    """``nn.GRU``."""

    def _cell(self, x: Tensor, h: Tensor, state: State) -> State:
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return ((1 - z) * n + z * state[0],)


class RNN(_Recurrent, nn.RNN):
    """``nn.RNN``."""

    def _cell(self, x: Tensor, h: Tensor, state: State) -> State:
        return (torch.tanh(x + h) if self.mode == "RNN_TANH" else torch.relu(x + h),)
