"""Small networks with weights that are always the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.core import rng
from kedge.core.tree import Weights

DOUBLE = torch.float64
KEY = rng.key(5)


def normal(name: str, *shape: int) -> Tensor:
    return rng.normal(rng.fold(KEY, name), shape, DOUBLE)


def fill(module: nn.Module) -> nn.Module:
    """Weights that do not depend on torch's global generator."""
    module = module.to(DOUBLE)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(normal(name, *p.shape) / max(1, p[0].numel()) ** 0.5)
        for name, b in module.named_buffers():
            if b.is_floating_point():
                b.copy_(normal(name, *b.shape).abs() + 0.5)
    return module


def stages(norm: bool = True, dropout: float = 0.0) -> nn.Sequential:
    net = nn.Sequential()
    bn: nn.Module = nn.BatchNorm2d(4) if norm else nn.Identity()
    net.add_module("stage1", nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), bn, nn.Tanh()))
    pooled = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 6))
    net.add_module("stage2", pooled)
    last: nn.Module = nn.BatchNorm1d(6) if norm else nn.Identity()
    net.add_module("stage3", nn.Sequential(last, nn.Tanh(), nn.Dropout(dropout)))
    net.add_module("head", nn.Linear(6, 3))
    return fill(net)  # type: ignore[return-value]


class Custom(nn.Module):
    """The same network written by hand, with a name of the head to choose."""

    def __init__(self, head: str = "fc", norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.hidden = nn.Linear(16, 6)
        self.add_module(head, nn.Linear(6, 3))
        self.last = head

    def body(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.bn(self.conv(x))), 2)
        return torch.tanh(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.last)(self.body(x))


class Recurrent(nn.Module):
    """A submodule of it returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


X = normal("x", 7, 2, 4, 4)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in module.state_dict().items()}


def as_state(weights: Weights) -> dict[str, Tensor]:
    return weights.params | weights.buffers
