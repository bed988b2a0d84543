"""The compact convolutional transformer: convolutional tokens and a learned pooling.

Hassani et al., Escaping the Big Data Paradigm with Compact Transformers, 2021 (arXiv 2104.05704).
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.models import layers
from kedge.models.layers import Rate, Shape, head, image_shape, named, stack
from kedge.schema import Doc


def cct7(
    shape: Shape,
    outputs: int,
    *,
    dropout: Annotated[Rate, Doc("share of dropped values after tokens and layers")] = 0.0,
    attention_dropout: Annotated[Rate, Doc("share of dropped attention weights")] = 0.0,
    stochastic_depth: Annotated[Rate, Doc("how often the last layer is skipped")] = 0.0,
) -> nn.Sequential:
    """CCT-7/3x1: width 256, 4 heads, 7 layers, each a stage; 256 features.

    3 783 269 parameters for (3, 32, 32) and 100 classes, FedBR's net for CIFAR-100 (Guo et al.,
    ICML 2023); 3 760 139 for ten. Initial weights as the authors of CCT draw them.
    *Deviation*: no dropout by default; CCT's authors train with
    ``cct7(attention_dropout=0.1, stochastic_depth=0.1)``.
    """
    channels, height, width = image_shape("cct7", shape)
    dim, depth = 256, 7
    stages: list[nn.Module] = []
    for i in range(depth):
        skip = stochastic_depth * i / (depth - 1)  # grows linearly with depth
        stages.append(Encoder(dim, 4, 2 * dim, dropout, attention_dropout, skip))
    stages[-1] = named(encoder=stages[-1], norm=nn.LayerNorm(dim), pool=SequencePool(dim))
    tokens = Tokens(channels, dim, ((height + 1) // 2) * ((width + 1) // 2), dropout)
    model = stack(*stages, stem=tokens, head=head(dim, outputs))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


class Tokens(nn.Module):
    """Convolution, ReLU and pool. Each position of the map is a token with a learned embedding."""

    def __init__(self, channels: int, dim: int, length: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, dim, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.position = nn.Parameter(torch.empty(length, dim))
        self.drop = layers.dropout(dropout)
        nn.init.kaiming_normal_(self.conv.weight)
        nn.init.trunc_normal_(self.position, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv(x))).flatten(2).transpose(1, 2)  # [B, T, D]
        x = self.drop(x + self.position)
        return x


class SelfAttention(nn.Module):
    """Multi-head self-attention, in plain matrix products so that it works under ``vmap``."""

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_drop = layers.dropout(attention_dropout)
        self.project = nn.Linear(dim, dim)
        self.drop = layers.dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)  # [B, H, T, T]
        x = (self.attention_drop(weights) @ v).transpose(1, 2).flatten(2)  # [B, T, D]
        x = self.drop(self.project(x))
        return x


class Encoder(nn.Module):
    """Attention and a two-layer perceptron; the second residual starts from the norm's output."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        dropout: float,
        attention_dropout: float,
        skip: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, dropout, attention_dropout)
        self.skip1 = layers.SliceDropout(skip, dims=1) if skip else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.drop1 = layers.dropout(dropout)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = layers.dropout(dropout)
        self.skip2 = layers.SliceDropout(skip, dims=1) if skip else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.skip1(self.attention(self.norm1(x))))
        y: Tensor = self.fc2(self.drop1(F.gelu(self.fc1(x))))
        y = self.skip2(self.drop2(y))
        return x + y


class SequencePool(nn.Module):
    """A weighted mean over the tokens with learned weights: ``[B, T, D]`` to ``[B, D]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.weigh(x).softmax(1)  # [B, T, 1]
        return (weights * x).sum(1)
