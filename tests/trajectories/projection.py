"""Linear layers with ReLU between, and cosines, with their derivatives by hand.

First weights have torch's default distribution, uniform up to 1/sqrt(inputs).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.core import rng
from tests.trajectories.problem import DOUBLE
from tests.trajectories.simulator import Vector

Leaves = dict[str, Vector]  # weight0, bias0, weight1, ...


def first_layer(key: Any, inputs: int, outputs: int) -> tuple[Vector, Vector]:
    """First weight and bias of a layer."""
    leaf = 2 * rng.uniform(key, (outputs, inputs + 1), DOUBLE).numpy() - 1
    return leaf[:, :-1] / np.sqrt(inputs), leaf[:, -1] / np.sqrt(inputs)


def first_layers(key: Any, *sizes: int) -> Leaves:
    """First weights of layers of these sizes, each drawn with a key of its own."""
    leaves: Leaves = {}
    for i in range(len(sizes) - 1):
        weight, bias = first_layer(rng.fold(key, i), sizes[i], sizes[i + 1])
        leaves |= {f"weight{i}": weight, f"bias{i}": bias}
    return leaves


def project(leaf: Leaves, x: Vector) -> list[Vector]:
    """The input and the output of every layer."""
    layers, last = [x], len(leaf) // 2 - 1
    for i in range(last + 1):
        z = layers[-1] @ leaf[f"weight{i}"].T + leaf[f"bias{i}"]
        layers.append(z if i == last else np.maximum(z, 0))
    return layers


def backward(leaf: Leaves, layers: list[Vector], d: Vector) -> tuple[Leaves, Vector]:
    """Derivatives by the leaves and by the input, from that by the output."""
    grads: Leaves = {}
    for i in reversed(range(len(layers) - 1)):
        grads |= {f"weight{i}": d.T @ layers[i], f"bias{i}": d.sum(0)}
        d = d @ leaf[f"weight{i}"] * (layers[i] > 0 if i else 1)
    return grads, d


def cosine(a: Vector, b: Vector) -> tuple[Vector, Vector]:
    """Cosine of each pair of rows, [B], and its derivative by ``a``, [B, F]."""
    length, unit = np.linalg.norm(a, axis=1, keepdims=True), b / np.linalg.norm(b, axis=1)[:, None]
    value = (a * unit).sum(1, keepdims=True) / length
    return value[:, 0], (unit - value * a / length) / length


def sigmoid(x: Vector) -> Vector:
    return 1 / (1 + np.exp(-x))
