"""Layers that draw from a key and work under ``vmap``, in place of those of torch.

Multi-head attention is in plain operations that ``vmap`` knows; LSTM, GRU and RNN go step by step
where ``vmap`` has no rule. On a CPU, outside of ``vmap`` and traces and without dropout, recurrent
layers are torch's fused ones.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from kedge.core.eager import is_eager
from kedge.core.layers.dropout import Dropout, drop, has_keys
from kedge.errors import ModelError

# -- Layers over sequences -------------------------------------------------------------------------


Function = Callable[..., Tensor]
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention, ``[..., L, D]``, and its weights ``[..., L, S]`` after dropout ``p``.

    ``bias`` is added to the scores; minus infinity masks.
    """
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    weights = F.softmax(scores if bias is None else scores + bias, -1)
    weights = drop(weights, p) if p else weights
    return weights @ v, weights


def as_bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of ``nn.MultiheadAttention`` (True: left out) as a bias of the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
    return zeros.masked_fill(mask, -math.inf)


class Attention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with the same weights and results."""

    @property
    def is_random(self) -> bool:
        return self.dropout > 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint beside attn_mask
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        inputs = (query, key, value)
        if not batched:
            inputs = tuple(x.unsqueeze(0) for x in inputs)  # type: ignore[assignment]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)  # type: ignore[assignment]
        q, k, v = self._project(*inputs)  # [B, L, E], [B, S, E]
        masks = [self._mask(attn_mask, q), self._padding(key_padding_mask, q)]
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)  # type: ignore[union-attr]
        if self.add_zero_attn:
            k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
        extra = k.shape[1] - inputs[1].shape[1]  # keys that no mask knows
        bias: Tensor | None = None
        for mask in masks:
            if mask is not None:
                mask = F.pad(mask, (0, extra))
                bias = mask if bias is None else bias + mask
        q, k, v = (self._heads(x) for x in (q, k, v))
        mixed, weights = attend(q, k, v, bias, self.dropout if self.training else 0.0)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))  # [B, L, E]
        if not batched:
            out, weights = out[0], weights[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(-3) if average_attn_weights else weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights = (
            self.in_proj_weight.chunk(3)
            if self._qkv_same_embed_dim
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        both = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(x, w, b) for x, w, b in both]

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, L, E]`` to ``[B, heads, L, E / heads]``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """A mask ``[L, S]`` or ``[B * heads, L, S]``."""
        mask = as_bias(mask, like)
        return mask if mask is None or mask.dim() == 2 else mask.unflatten(0, (-1, self.num_heads))

    def _padding(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """A mask of keys ``[B, S]`` for all heads and queries."""
        mask = as_bias(mask, like)
        return None if mask is None else mask[:, None, None]


# -- Random functions that a user's module calls by itself, such as ``F.dropout`` ------------------

#: Code that draws, as a regular expression.
_DRAWS = (
    r"(?<!self\.)\bdropout[123]?d?\(|scaled_dot_product|\brand|bernoulli|multinomial|gumbel"
    r"|normal_?\(|uniform_\(|exponential_\(|rrelu|alpha_dropout"
)


def may_draw(module: nn.Module) -> bool:
    """Whether the code of a module may call random functions.

    Layers of torch and kedge do not, and most files of users do not name any.
    """
    homes = {cls.__module__ for m in module.modules() for cls in type(m).__mro__}
    own = (h for h in homes if h.partition(".")[0] not in ("builtins", "kedge"))
    return any(_names_draws(home) for home in own if not home.startswith("torch.nn."))


@cache
def _names_draws(module: str) -> bool:
    try:
        return bool(re.search(_DRAWS, inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):  # no source, as in a notebook
        return True


class KeyedFunctions(TorchFunctionMode):
    """Within the block, functions that drop values draw from the keys of the pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))


def _check(name: str) -> None:
    if not has_keys():
        raise ModelError(
            f"the model calls {name} in evaluation, too; pass it self.training, or use nn.Dropout"
        )


def _dropout(
    _: object, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    _check("F.dropout")
    return drop(input, p)


def _torch_dropout(_: object, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(_, input, p, train)


def _channels(
    func: Function,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0:
        return input
    _check(f"F.{func.__name__}")
    return drop(input, p, channels=True)


def _attention(
    func: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p:
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, **options)
    _check("F.scaled_dot_product_attention with dropout_p")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # True: takes part
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(~attn_mask, -math.inf)
    return attend(query, key, value, attn_mask, dropout_p, scale)[0]


def _refused(func: Function, *args: object, **kwargs: object) -> Tensor:
    if kwargs.get("generator") is not None:  # of the user, who may know
        return func(*args, **kwargs)
    raise ModelError(
        f"the model draws random numbers by {func.__name__}, where no key reaches, so that no run "
        "could be repeated; use nn.Dropout, or draw them outside of the model"
    )


def _refused_in_training(func: Any, *args: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", args[2] if len(args) > 2 else False)
    return _refused(func) if training else args[0]


_HANDLERS: dict[Function, Function] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    F.scaled_dot_product_attention: _attention,
    F.alpha_dropout: _refused_in_training,
    F.feature_alpha_dropout: _refused_in_training,
}
_HANDLERS |= dict.fromkeys(
    [
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint,
        torch.randint_like, torch.randperm, torch.bernoulli, torch.multinomial, torch.normal,
        Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_, Tensor.uniform_,
        Tensor.random_, Tensor.exponential_, F.gumbel_softmax,
    ],
    _refused,
)  # fmt: skip


#: Layers of torch that :func:`keyed` replaces by a :class:`Dropout`.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
#: Layers that change their class alone, so that their weights stay where they are.
SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: Attention,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
}


def keyed(module: nn.Module) -> nn.Module:
    """Replace the layers of a module, in place where it has children, by layers that draw from a
    key; a ModelError for layers that cannot."""
    _convert(module, type(module).__name__)
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if isinstance(child, DROPOUTS):
            setattr(module, name, Dropout(child.p, channels=not isinstance(child, nn.Dropout)))
        elif isinstance(child, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise ModelError(
                f"{type(child).__name__} ({name}) cannot draw from a key; use nn.Dropout"
            )
        else:
            keyed(child)
    return module


def _convert(layer: nn.Module, name: str) -> None:
    if type(layer) in SUBCLASSES:
        layer.__class__ = SUBCLASSES[type(layer)]
    elif isinstance(layer, (Attention, LSTM, GRU, RNN)):
        return  # a layer that is used twice
    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.dropout:
        raise ModelError(
            f"{name} drops out inside, where no key reaches; "
            "set its dropout to 0 and add nn.Dropout after it"
        )
    elif isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # no fused kernel in evaluation: vmap has no rule for it
    elif isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False
