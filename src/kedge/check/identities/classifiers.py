"""Identities of the methods in parts/classifiers.py.

All run on the small network of :func:`kedge.check.problems.images`, which has six features, and
take these from plain forward passes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import (
    close,
    descended,
    features_of,
    logits_of,
    picked,
    server_round,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng
from kedge.core.part import Part
from kedge.core.tree import Params, Tree
from kedge.core.update import ZERO
from kedge.parts.classifiers import CCVR, FedETF, SphereFed
from kedge.sim.simulation import Simulation

HEAD = ("head.weight", "head.bias")


@oracle(CCVR)
def pooled_statistics_equal_those_of_all_samples(cls: type[CCVR]) -> Iterator[Claim]:
    """Mean and unbiased covariance of all clients' features per class, against torch.cov and
    against the paper's formula from each client's mean and covariance. Detects a division by n_c,
    covariances averaged without the spread of the means, and means not weighted by counts."""
    part = cls()
    run = images(sizes=(5, 9, 14)).simulate(part)
    z, y, owner = _features(run)
    count, mean, covariance = part._pooled(_survey(run, part))
    for c in range(3):
        own = z[y == c]
        yield Claim(f"samples of class {c}", float(len(own)), float(count[c]), 0.0)
        yield close(f"error of the mean of class {c}", mean[c], own.mean(0), 1e-13)
        yield close(f"error of the covariance of class {c}", covariance[c], own.T.cov(), 1e-13)
        total, n = torch.zeros(6, 6, dtype=DOUBLE), len(own)
        for k in range(3):
            some = z[(y == c) & (owner == k)]
            if len(some):
                m = some.mean(0)
                total = total + len(some) * torch.outer(m, m)
            if len(some) > 1:
                total = total + (len(some) - 1) * some.T.cov()
        total = (total - n * torch.outer(own.mean(0), own.mean(0))) / (n - 1)
        what = f"error against the formula of the paper for class {c}"
        yield close(what, covariance[c], total, 1e-13)


@oracle(CCVR)
def virtual_features_have_the_given_moments(cls: type[CCVR]) -> Iterator[Claim]:
    """20 000 draws from a Gaussian with the singular covariance ((2, 1, 0), (1, 1, 0), (0, 0, 0))
    have its mean and covariance up to sampling error, and no spread in its null space; with
    covariance 0 all draws equal the mean. Detects the covariance used as its own root, which gives
    5 for 2."""
    sigma = torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=DOUBLE)
    mean = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, 1.0]], dtype=DOUBLE)
    part = cls(samples=20000, jitter=0.0)
    z = part._draw(rng.key(3), mean, torch.stack([sigma, 0 * sigma]))
    for what, found, expected, tolerance in (
        ("error of the mean", z[0].mean(0), mean[0], 0.04),
        ("error of the covariance", z[0].T.cov(), sigma, 0.08),
        ("spread along the null space", z[0, :, 2], mean[0, 2], 1e-7),
        ("spread for covariance 0", z[1], mean[1], 0.0),
    ):
        yield Claim(what, 0.0, float((found - expected).abs().max()), tolerance)


@oracle(CCVR)
def head_training_equals_torch_sgd(cls: type[CCVR]) -> Iterator[Claim]:
    """Three steps of the head against torch.optim.SGD with momentum on batches of the same virtual
    features; the body is unchanged, bit for bit, and the absent class is never drawn. Detects a
    head that restarts, a loss summed over the batch, and a body that is trained."""
    part = cls(samples=7, steps=3, batch=9, lr=0.3, momentum=0.5)
    run = images(sizes=(5, 9, 14)).simulate(part)
    sums = _survey(run, part)
    sums = {n: torch.cat([x[:2], torch.zeros_like(x[2:])]) for n, x in sums.items()}  # class 2
    r = server_round(run, sums, ZERO.of([0, 1, 2], 0))
    new, _ = part.absorb(r, run.weights)
    key_features, key_batches = rng.split(r.key, 2)
    count, mean, covariance = part._pooled(sums)
    features = part._draw(key_features, mean, covariance)
    head = {n: run.weights.params[n].clone().requires_grad_() for n in HEAD}
    sgd, absent = torch.optim.SGD(head.values(), lr=0.3, momentum=0.5), 0
    for key in rng.split(key_batches, 3):
        y, row = part._rows(key, count)
        absent += int((y == 2).sum())
        sgd.zero_grad()
        F.cross_entropy(F.linear(features[y, row], *head.values()), y).backward()
        sgd.step()
    yield close("error of the head", picked(new.params, HEAD), head, 1e-13)
    yield Claim("draws of the absent class", 0.0, float(absent), 0.0)
    yield close("error of the body", _body(new.params), _body(run.weights.params), 0.0)


@oracle(CCVR)
def class_balance_of_batches(cls: type[CCVR]) -> Iterator[Claim]:
    """For n = (30, 10, 0) the two present classes have equal shares of a batch, or 3 : 1."""
    count = torch.tensor([30.0, 10.0, 0.0], dtype=DOUBLE)
    for labels, expected in (("equal", 0.5), ("proportional", 0.75)):
        y, row = cls(labels=labels, batch=8000, samples=5)._rows(rng.key(2), count)  # type: ignore[arg-type]
        share = float((y == 0).to(DOUBLE).mean())
        yield Claim(f"share of class 0 ({labels})", expected, share, 0.02)
        yield Claim(f"draws of the absent class ({labels})", 0.0, float((y == 2).sum()), 0.0)
        yield Claim(f"largest feature index ({labels})", 4.0, float(row.max()), 0.0)


@oracle(SphereFed)
def classifier_rows_are_orthonormal(cls: type[SphereFed]) -> Iterator[Claim]:
    """W W' = I, and after a round the global model's head is W without bias."""
    run = images(sizes=(5, 9), steps=1).simulate(cls())
    w = cls()._classifier(run.bound.spec)
    yield close("error of W W' = I", w @ w.T, torch.eye(3, dtype=DOUBLE), 1e-14)
    run.run_round()
    head = run.weights.params
    yield close("error of the head's weight", head["head.weight"], w, 0.0)
    yield close("bias of the head", head["head.bias"], torch.zeros(3), 0.0)


@oracle(SphereFed)
def one_step_by_autograd(cls: type[SphereFed]) -> Iterator[Claim]:
    """One step by autograd on 1/(3 B) sum |W f/|f| - e_y|^2 alone. Detects the task's loss,
    unnormalised features, the initial head, and a sum over classes."""
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(cls())
    start, w = run.weights.params, cls()._classifier(run.bound.spec)
    _, batch = step_view(run, 1, cls())

    def loss(body: Params) -> Tensor:
        f = features_of(run, batch.x, start | body)
        error = F.normalize(f, dim=1) @ w.T - torch.eye(3, dtype=DOUBLE)[batch.y]
        return (error**2).sum() / 15

    expected = descended(_body(start), loss)
    found = run.run_round([1]).losses
    yield Claim("loss", float(loss(start)), float(found[cls.name][0] + found["task"][0]))
    yield close("error of the body", _body(run.weights.params), expected, 1e-13)
    x = run.federation.clean(torch.arange(14)).x
    logits = logits_of(run, x)
    scores = F.normalize(features_of(run, x), dim=1) @ w.T
    same = (logits.argmax(1) == scores.argmax(1)).to(DOUBLE).mean()
    yield Claim("agreement with the predictions of W f/|f|", 1.0, float(same), 0.0)


@oracle(SphereFed)
def calibration_equals_ridge_regression(cls: type[SphereFed]) -> Iterator[Claim]:
    """The head after the last round against torch.linalg.lstsq on all clients' normalised features,
    with sqrt(rho n) I below them and zeros below the one-hot labels. Detects unnormalised features,
    a ridge not scaled by n, and a transposed solution."""
    part = cls(ridge=0.01)
    run = images(sizes=(5, 9, 14), steps=1).simulate(part)
    run.run_round()
    z, y, _ = _features(run)
    z = F.normalize(z, dim=1)
    left = torch.cat([z, math.sqrt(0.01 * len(z)) * torch.eye(6, dtype=DOUBLE)])
    right = torch.cat([torch.eye(3, dtype=DOUBLE)[y], torch.zeros(6, 3, dtype=DOUBLE)])
    expected = torch.linalg.lstsq(left, right).solution.T
    run.finish()
    yield close("error of the head's weight", run.weights.params["head.weight"], expected, 1e-11)
    yield close("bias of the head", run.weights.params["head.bias"], torch.zeros(3), 0.0)


@oracle(FedETF)
def one_step_with_a_rotated_frame(cls: type[FedETF]) -> Iterator[Claim]:
    """The loss and one step with an explicit frame M = sqrt(C/(C-1)) U (I - 11'/C) for a random
    rotation U and the projection U P: unit columns at cosines -1/(C-1), balanced softmax over the
    client's classes. Body, s and, rotated back, P change as the part's. Detects a frame of another
    length, unnormalised features, missing counts, an absent class in the softmax, and the task's
    loss in addition."""
    part = cls(scale=2.0)
    run = images(sizes=(9, 9), batch=9, steps=1).simulate(part)
    u = torch.linalg.qr(rng.normal(rng.key(8), (3, 3), DOUBLE)).Q
    frame = math.sqrt(1.5) * u @ (torch.eye(3, dtype=DOUBLE) - 1 / 3)
    cosines = torch.full((3, 3), -0.5, dtype=DOUBLE).fill_diagonal_(1.0)
    yield close("error of the frame's cosines", frame.T @ frame, cosines, 1e-14)
    _, batch = step_view(run, 0, part)
    counts = run.federation.label_counts()[0]
    has = counts > 0
    yield Claim("number of the client's classes", 2.0, float(has.sum()), 0.0)
    start = dict(run.weights.params)
    start |= {n: u @ start[n] for n in HEAD}  # the projection, rotated

    def loss(params: Params) -> Tensor:
        mu = logits_of(run, batch.x, params)
        logits = params[f"{cls.name}/scale"] * F.normalize(mu, dim=1) @ frame
        weight = counts[has] * torch.exp(logits[:, has])
        own = counts[batch.y] * torch.exp(logits.gather(1, batch.y[:, None])[:, 0])
        return -torch.log(own / weight.sum(1)).mean()

    after = descended(start, loss)
    after |= {n: u.T @ after[n] for n in HEAD}
    found = run.run_round([0]).losses
    yield Claim("loss", float(loss(start)), float(found[cls.name][0] + found["task"][0]))
    yield close("error of the model", after, run.weights.params)
    x = run.federation.clean(torch.arange(14)).x
    mu = logits_of(run, x) @ u.T
    same = ((mu @ frame).argmax(1) == (mu @ u).argmax(1)).to(DOUBLE).mean()
    yield Claim("agreement with the predictions of the head", 1.0, float(same), 0.0)


def _features(run: Simulation) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and owners of all clients' samples at the global model."""
    fed = run.federation
    batch = fed.clean(fed.rows)
    owner = torch.repeat_interleave(torch.tensor(fed.sizes))
    return features_of(run, batch.x), batch.y, owner


def _body(params: Params) -> Params:
    return {n: p for n, p in params.items() if n not in HEAD}


def _survey(run: Simulation, part: Part) -> Tree:
    """Uploads of a survey of all clients, as the server receives them."""
    cohort = run.cohort(range(run.federation.num_clients))
    found = run.engine.survey(cohort, part)
    return {path[-1]: upload.value for path, upload in found.uploads.items()}
