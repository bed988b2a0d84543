"""Multi-head attention whose dropout draws from a key, in plain operations that ``vmap`` knows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.core.layers.dropout import drop


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
        bias: Any = None
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
