"""Identities of the method in parts/virtual.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import close, features_of, gradient
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng, tree
from kedge.core.tree import Params
from kedge.parts.virtual import VHL, _contrast


@oracle(VHL)
def contrastive_loss_by_hand(cls: type[VHL]) -> Iterator[Claim]:
    """Rows along x, x, y, y and -x, of the classes 0, 0, 1, 1, 2, tau = 1/2: the first two have log
    p = 2 - log(e^2 + 2 + e^-2), the next two 2 - log(e^2 + 3), the last has no positive and counts
    as 0 in the mean over five. Lengths do not matter. Detects a row among its own negatives, and a
    mean over four."""
    z = torch.tensor([[1, 0], [3, 0], [0, 2], [0, 1], [-1, 0]], dtype=DOUBLE)
    e = math.exp(2)
    expected = (2 * (math.log(e + 2 + 1 / e) - 2) + 2 * (math.log(e + 3) - 2)) / 5
    found = _contrast(z, torch.tensor([0, 0, 1, 1, 2]), 0.5)
    yield Claim("loss by hand", expected, float(found))
    equal_rows = _contrast(torch.ones(4, 2, dtype=DOUBLE), torch.zeros(4, dtype=torch.int64), 0.07)
    yield Claim("loss of four equal rows", math.log(3), float(equal_rows))


@oracle(VHL)
def one_step_by_autograd(cls: type[VHL]) -> Iterator[Claim]:
    """One step by autograd of CE(x, y) + 0.7 CE(x~, C + y~) + 0.6 L_con(z, [z~]) + 0.4 L_con(z~)
    with an explicit classifier of 2C outputs and contrastive losses summed pair by pair. Detects a
    gradient through the constants [z~], real samples without the extra outputs, virtual samples
    labelled as real, and unnormalised features."""
    part = cls(alpha=0.7, lam=0.6, lam_virtual=0.4, tau=0.5, rows=6, per_class=4)
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
    v, batch = step_view(run, 1, part)
    index = rng.integers(v.key, (6,), 12)
    x = part._virtual(v.spec, run.server.slots[cls.name]["key"], index)
    y = index % 3

    def loss(params: Params) -> Tensor:
        weight = torch.cat([params["head.weight"], params[f"{cls.name}/weight"]])  # [2 C, F]
        bias = torch.cat([params["head.bias"], params[f"{cls.name}/bias"]])
        z, z_virtual = (features_of(run, rows, params) for rows in (batch.x, x))
        real = F.cross_entropy(F.linear(z, weight, bias), batch.y)
        virtual = F.cross_entropy(F.linear(z_virtual, weight, bias), 3 + y)
        both = torch.cat([z, z_virtual.detach()])
        total = real + 0.7 * virtual + 0.6 * _pairs(both, torch.cat([batch.y, y]))
        return total + 0.4 * _pairs(z_virtual, y)

    total, grads = gradient(run.weights.params, loss)
    expected = tree.axpy(-0.05, grads, run.weights.params)
    found = run.run_round([1]).losses
    yield Claim("loss", float(total), float(found["task"][0] + found[cls.name][0]))
    for name, p in expected.items():
        yield close(f"error of {name}", run.weights.params[name], p)


@oracle(VHL)
def virtual_samples_are_shared(cls: type[VHL]) -> Iterator[Claim]:
    """Two clients in two rounds get the same sample for an index. Within a class samples have
    standard deviation 0.5, and the 3 x 64 class means are standard normal. Detects samples from the
    client's own key, or new ones each round."""
    part = cls(rows=40, per_class=2)
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
    seen: dict[int, Tensor] = {}
    gap, meetings = 0.0, 0
    for _ in range(2):
        for client in (0, 1):
            v, _ = step_view(run, client, part)
            x, y = part._draw(v)
            index = rng.integers(v.key, (40,), 6)
            for i, c, one in zip(index.tolist(), y.tolist(), x, strict=True):
                meetings += i in seen
                gap = max(
                    gap, float((seen.setdefault(i, one) - one).abs().max()), float(c != i % 3)
                )
        run.run_round()
    yield Claim("difference between clients and rounds", 0.0, gap, 0.0)
    yield Claim("repeated indices", 154.0, float(meetings), 0.0)
    key, every = run.server.slots[cls.name]["key"], torch.arange(3000)
    x = part._virtual(run.bound.spec, key, every).flatten(1)  # [3000, 64]
    means = torch.stack([x[every % 3 == c].mean(0) for c in range(3)])
    yield Claim("standard deviation within a class", 0.5, float((x - means[every % 3]).std()), 0.01)
    yield Claim("standard deviation of the class means", 1.0, float(means.std()), 0.15)


def _pairs(z: Tensor, y: Tensor) -> Tensor:
    """Supervised contrastive loss at tau = 1/2, pair by pair."""
    total, n = torch.zeros((), dtype=DOUBLE), len(z)
    z = z / z.norm(dim=1, keepdim=True)
    for i in range(n):
        partners = [j for j in range(n) if j != i and y[j] == y[i]]
        rivals = sum(torch.exp(z[i] @ z[j] / 0.5) for j in range(n) if j != i)
        for j in partners:
            total = total - torch.log(torch.exp(z[i] @ z[j] / 0.5) / rivals) / len(partners) / n
    return total
