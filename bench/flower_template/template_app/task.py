"""Model, data, training and test of the app: plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Fully connected layers with ReLU, with as many parameters as kedge's ``mlp``."""

    def __init__(self, hidden: str = "64", inputs: int = 64, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for size in map(int, hidden.split(",")):
            layers += [nn.Linear(inputs, size), nn.ReLU()]
            inputs = size
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def load_data(path: str, config: Mapping[str, Any]) -> tuple[DataLoader, DataLoader]:
    """Batches of a node's own file, for training and for the test."""
    with np.load(path) as arrays:
        train, test = (
            TensorDataset(
                (torch.from_numpy(arrays[f"x_{name}"]).float() / 255 - config["mean"])
                / config["std"],
                torch.from_numpy(arrays[f"y_{name}"]).long(),
            )
            for name in ("train", "test")
        )
    batch = int(config["batch-size"])
    return DataLoader(train, batch, shuffle=True), DataLoader(test, batch)


def train(net: nn.Module, batches: DataLoader, steps: int, lr: float) -> float:
    """Take so many steps of SGD; return the mean loss."""
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), steps):
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def test(net: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    net.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in batches:
            outputs = net(x)
            loss += criterion(outputs, y).item()
            right += int((outputs.argmax(1) == y).sum())
            count += len(y)
    return loss / count, right / count
