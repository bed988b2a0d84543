"""Identities of the methods in parts/pools.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import LR, close, descended, first_batch, logits_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem, images, linear, position, step_view
from kedge.core import rng
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree
from kedge.parts.pools import FedMix, Mixup, NaiveMix, _Pooled
from kedge.sim.simulation import Simulation


@oracle(_Pooled)
def pool_rows_are_means_of_one_client(cls: type[_Pooled]) -> Iterator[Claim]:
    """If sample i is the i-th unit vector, M times a mean counts the uses of each sample: integers
    that sum to M, all from one client, with the same samples' labels. Each of three clients
    contributes 4 of 12 rows. Detects means over all clients or by size, and labels that do not
    match the inputs."""
    run = _unit_vectors((3, 30, 4)).trained(cls(rows=12, samples=10))
    pool = run.server.slots[cls.name]
    counts = 10 * pool["x"]  # [rows, samples]
    yield close("distance of the sample counts from integers", counts, counts.round(), 1e-9)
    owners = torch.stack([c.sum(1) for c in torch.split(counts, [3, 30, 4], 1)], 1)  # [rows, 3]
    yield Claim("error of their sum, M", 0.0, float((owners.sum(1) - 10).abs().max()))
    yield Claim("rows from a single client", 12.0, float((owners.round() == 10).sum()), 0.0)
    shares = (owners.round() == 10).sum(0).tolist()
    yield Claim("error of the rows per client, 4", 0.0, float(max(abs(n - 4) for n in shares)), 0.0)
    labels = counts @ F.one_hot(run.federation.y, 3).to(DOUBLE) / 10
    yield close("error of the labels", pool["y"], labels, 1e-9)


@oracle(FedMix)
def squared_error_by_hand(cls: type[FedMix]) -> Iterator[Claim]:
    """f = w x on the sample (1, 2), which is also the pool: with x' = (1 - lam) the objective is (w
    x' - 2)^2 + lam 2 (w x' - 2) w, whose derivative in w is 2 x' (w x' - 2) + 2 lam (2 w x' - 2).
    Detects a missing second derivative."""
    for lam in (0.1, 0.4):
        run = _regression([1.0], [2.0]).simulate(cls(lam=lam, rows=1, samples=1))
        w, x = 0.0, 1 - lam
        for _ in range(3):
            w -= LR * (2 * x * (w * x - 2) + 2 * lam * (2 * w * x - 2))
        run.run_round()
        yield Claim(f"w after three steps at lam = {lam:g}", w, position(run))


@oracle(FedMix)
def one_step_by_autograd(cls: type[FedMix]) -> Iterator[Claim]:
    """One full-batch step on the printed objective by second-order autograd, per sample; the pool
    has one row. Detects a missing or doubled 1/B, a gradient with the pool's label, and unscaled
    inputs."""
    lam = 0.3
    run, pool, batch = _one_row(cls(lam=lam, rows=1))

    def loss(params: Params) -> Tensor:
        total = torch.zeros((), dtype=DOUBLE)
        for x, y in zip(batch.x, batch.y, strict=True):
            shrunk = ((1 - lam) * x)[None].requires_grad_()
            log_probs = torch.log_softmax(logits_of(run, shrunk, params), 1)
            own, others = -log_probs[0, y], -(pool["y"][0] * log_probs[0]).sum()
            grad = torch.autograd.grad(own, shrunk, create_graph=True)[0]
            total = total + (1 - lam) * own + lam * others + lam * (grad * pool["x"]).sum()
        return total / len(batch.y)

    expected = descended(run.weights.params, loss)
    run.run_round([0])
    yield close("error of the model after one step", run.weights.params, expected)


@oracle(FedMix)
def agrees_with_mixup_to_first_order(cls: type[FedMix]) -> Iterator[Claim]:
    """The error against the loss of the mixture is of second order: halving lam divides it by 4. A
    wrong factor or sign of the last term would divide it by 2."""
    gaps = []
    for lam in (0.02, 0.01):
        run, pool, batch = _one_row(cls(lam=lam, rows=1))
        mixed = (1 - lam) * batch.x + lam * pool["x"]
        log_probs = torch.log_softmax(logits_of(run, mixed), 1)
        labels = (1 - lam) * F.one_hot(batch.y, 3) + lam * pool["y"]
        terms = run.run_round([0]).losses
        got = float(terms["task"][0] + terms[cls.name][0])
        gaps.append(got + float((labels * log_probs).sum(1).mean()))
    yield Claim("error at lam / error at lam/2", 4.0, gaps[0] / gaps[1], 0.2)


@oracle(NaiveMix)
def mixture_by_hand(cls: type[NaiveMix]) -> Iterator[Claim]:
    """f = w x, one sample on each of two clients, (1, 2) and (3, -1), and a pool of one of them.
    Client 0 takes three steps of squared error on its mixture with that row."""
    lam = 0.4
    run = _regression([1.0, 3.0], [2.0, -1.0]).simulate(cls(lam=lam, rows=1, samples=1))
    run.survey(run.bound.parts[0], None)
    row = (float(run.server.slots[cls.name]["x"]), float(run.server.slots[cls.name]["y"]))
    yield Claim("the row is one of the samples", 1.0, float(row in ((1.0, 2.0), (3.0, -1.0))), 0.0)
    x, y = (1 - lam) * 1 + lam * row[0], (1 - lam) * 2 + lam * row[1]
    w = 0.0
    for _ in range(3):
        w -= LR * 2 * x * (w * x - y)
    run.run_round([0])
    yield Claim("w after three steps", w, position(run))


@oracle(NaiveMix)
def mixed_loss_by_hand(cls: type[NaiveMix]) -> Iterator[Claim]:
    """CE at the mixed input, weighted (1 - lam) with the sample's label and lam with the row's."""
    lam = 0.3
    run, pool, batch = _one_row(cls(lam=lam, rows=1))
    mixed = (1 - lam) * batch.x + lam * pool["x"]
    log_probs = torch.log_softmax(logits_of(run, mixed), 1)
    own, others = F.nll_loss(log_probs, batch.y), -(pool["y"] * log_probs).sum(1).mean()
    got = run.run_round([0]).losses["task"][0]
    yield Claim("loss", float((1 - lam) * own + lam * others), float(got))


def _one_row(part: Part) -> tuple[Simulation, Tree, Batch]:
    """A run with its pool of one row, and client 0's batch of all its samples."""
    run = images(sizes=(9, 9), batch=9, steps=1).simulate(part)
    run.survey(run.bound.parts[0], None)
    return run, run.server.slots[part.name], first_batch(run, 0)


def _regression(x: list[float], y: list[float]) -> Problem:
    """One sample per client, f = w x from w = 0, three steps."""
    sizes, zero = [1] * len(x), torch.zeros(1, 1)
    return linear(
        torch.tensor(x)[:, None], torch.tensor(y), sizes, zero, task="regression", steps=3
    )


def _unit_vectors(sizes: tuple[int, ...]) -> Problem:
    """Sample i is the i-th unit vector."""
    total = sum(sizes)
    y = rng.integers(rng.key(4), (total,), 3)
    return linear(torch.eye(total), y, sizes, torch.zeros(3, total), torch.zeros(3), batch=2)


@oracle(Mixup)
def mixed_label_equals_mixed_losses(cls: type[Mixup]) -> Iterator[Claim]:
    """CE(x~, lambda y_i + (1 - lambda) y_j) = lambda CE(x~, y_i) + (1 - lambda) CE(x~, y_j), where
    lambda is read off the mixed inputs."""
    part = cls(alpha=1.0)
    run = images(sizes=(14, 14), batch=7).simulate(part)
    v, batch = step_view(run, 0, part, "transform")
    mixed = part.transform(v, batch)
    logits = logits_of(run, mixed.x)
    lam, other = _read_off(batch, mixed)
    pair = [F.cross_entropy(logits, y) for y in (batch.y, batch.y[other])]
    expected = float(lam * pair[0] + (1 - lam) * pair[1])
    yield Claim("loss of the mixture", expected, float(run.bound.task.loss(logits, mixed).mean()))
    yield Claim("changed integer labels", 0.0, float((mixed.y != batch.y).sum()))


def _read_off(batch: Batch, mixed: Batch) -> tuple[Tensor, Tensor]:
    """Search for the lambda and the partners with x~ = lambda x_i + (1 - lambda) x_j."""
    x, n = batch.x.flatten(1), len(batch.x)
    best = (float("inf"), torch.tensor(0.0), torch.zeros(n, dtype=torch.int64))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            direction = x[i] - x[j]
            lam = ((mixed.x.flatten(1)[i] - x[j]) * direction).sum() / (direction * direction).sum()
            distance = torch.cdist(mixed.x.flatten(1) - lam * x, (1 - lam) * x)
            error, other = distance.min(1)
            if float(error.max()) < best[0]:
                best = (float(error.max()), lam, other)
    return best[1], best[2]
