"""Identities of the method in parts/fedbr.py."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.check.identities.common import (
    LR,
    close,
    cross_entropy,
    descended,
    features_of,
    first_batch,
    layers,
    logits_of,
    picked,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, LocalSteps, Problem, federation_of, images, small_net
from kedge.core import rng
from kedge.core.optim import SGD
from kedge.core.task import Batch
from kedge.core.tree import Params
from kedge.core.work import LocalWork
from kedge.parts.fedbr import FedBR


@oracle(FedBR)
def equal_cosines_give_log_2(cls: type[FedBR]) -> Iterator[Claim]:
    """If all samples of a client are equal, pseudo-samples equal real ones: both cosines are 1,
    L_con is log 2, and its gradient is 0, as both cosines are at their maximum."""
    x = rng.normal(rng.key(5), (1, 1, 8, 8), DOUBLE).expand(6, 1, 8, 8)
    y = torch.ones(6, dtype=torch.int64)
    work = LocalWork(batch=6, steps=1)
    problem = Problem(federation_of(x, y, [6]), small_net("none", 3), work, SGD(lr=0.5))
    run, plain = problem.simulate(cls(lam=0.0, mu=3.0, rows=4, width=5)), problem.trained("fedavg")
    term = run.run_round().losses[cls.name][0]
    yield Claim("term / mu", math.log(2), float(term) / 3)
    yield close("effect of its gradient on the model", plain.weights, run.weights)


@oracle(FedBR)
def two_steps_by_autograd(cls: type[FedBR]) -> Iterator[Claim]:
    """Two steps of the min-max game by autograd: P ascends on L_con with fixed features, then body
    and head descend on CE + lam CE(x_p, 1/C) + mu L_con with fixed P and the global features of the
    initial model. There are as many pseudo-samples as rows in a batch, and pair b is row b of both.
    Detects a wrong sign, factor or order of the two steps, temperatures that divide, swapped
    cosines, and a gradient or update of P or the global features in the second step."""
    part = cls(lam=0.3, mu=0.7, width=4, out=3, inv_temperature1=2.0, inv_temperature2=1.5)
    run = images(sizes=(5, 9), batch=5, steps=2).simulate(part)
    run.survey(part, [0])
    body, head, model = run.weights.params, run.bound.model.head_names(), run.bound.model
    batches, slot = run.cohort([0]).batches[0], run.server.slots[cls.name]
    pseudo, projection = slot["pseudo"], slot["projection"]
    yield Claim("number of pseudo-samples", 5.0, float(len(pseudo)), 0.0)
    if len(pseudo) != 5:
        return

    def contrast(p: Params, z_pseudo: Tensor, z_real: Tensor) -> Tensor:
        local, anchor, real = (layers(p, z) for z in (z_pseudo, z_global, z_real))
        f1 = torch.exp(2.0 * F.cosine_similarity(local, anchor))
        f2 = torch.exp(1.5 * F.cosine_similarity(local, real))
        return -torch.log(f1 / (f1 + f2)).mean()

    def term(params: Params, real: Batch, p: Params) -> Tensor:
        z_pseudo, z_real = (features_of(run, x, params) for x in (pseudo, real.x))
        log_probs = F.log_softmax(model.head(params, z_pseudo), 1)
        return -0.3 * log_probs.mean() + 0.7 * contrast(p, z_pseudo, z_real)

    z_global, params, terms = features_of(run, pseudo), dict(body), []
    for t in range(2):
        real = run.federation.clean(batches[t])
        z = [features_of(run, x, params) for x in (pseudo, real.x)]
        projection = descended(projection, partial(contrast, z_pseudo=z[0], z_real=z[1]), lr=-LR)
        terms.append(float(term(params, real, projection)))
        params = descended(params, cross_entropy(run, real), partial(term, real=real, p=projection))

    # the same pseudo-data again: the survey of round 0 draws from the same keys
    mean = run.run_round([0]).losses[cls.name][0]
    yield Claim("mean of the two terms", sum(terms) / 2, float(mean))
    after = run.server.slots[cls.name]["projection"]
    yield close("error of the projection", projection, after)
    for what, names in (("head", head), ("body", set(body) - set(head))):
        found, expected = (picked(w, names) for w in (run.weights.params, params))
        yield close(f"error of the {what}", found, expected)


@oracle(FedBR)
def every_real_sample_is_a_negative(cls: type[FedBR]) -> Iterator[Claim]:
    """The gradient of L_con reaches all 7 rows of a batch; with rows = 3 it reaches the first 3
    alone, and with rows = 9 all of them again."""
    for rows, expected in ((0, 7.0), (3, 3.0), (9, 7.0)):
        part = cls(lam=0.0, width=4, out=3, rows=rows)
        run = images(sizes=(14, 14), batch=7, steps=1).simulate(part)
        run.survey(part, [0])
        local, params = LocalSteps(run, 0), run.weights.params
        view, batch = local.view(part), first_batch(run, 0)
        out = view.forward(params, batch.x)

        def term(z: Tensor) -> Tensor:
            return part.term(view, params, batch, out._replace(features=z))  # noqa: B023

        slope = torch.func.grad(term)(out.features.detach())
        reached = (slope.abs().sum(1) > 0).sum()
        yield Claim(f"real samples in L_con, rows = {rows}", expected, float(reached), 0.0)


@oracle(FedBR)
def gradient_of_component_1(cls: type[FedBR]) -> Iterator[Claim]:
    """One step changes the head's bias by -lr (mean(p - y) + lam mean(p_pseudo - 1/C))."""
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(cls(lam=2.0, mu=0.0, rows=3, width=4))
    run.survey(run.bound.parts[0], [0])
    pseudo, start = run.server.slots[cls.name]["pseudo"], run.weights
    real = first_batch(run, 0)
    p, p_pseudo = (torch.softmax(logits_of(run, x), 1) for x in (real.x, pseudo))
    grad = (p - F.one_hot(real.y, 3)).mean(0) + 2.0 * (p_pseudo - 1 / 3).mean(0)
    run.run_round([0])
    expected = start.params["head.bias"] - 0.05 * grad
    yield close("error of the head's bias", run.weights.params["head.bias"], expected)


@oracle(FedBR)
def pseudo_samples_are_means_of_one_client(cls: type[FedBR]) -> Iterator[Claim]:
    """If sample i is the i-th unit vector, M times a pseudo-sample counts the uses of each sample:
    integers that sum to M, all from one client. Both clients are equally frequent, although one has
    ten times the samples. Detects means over all clients or by size."""
    run = _unit_vectors((3, 30)).trained(cls(rows=400, samples=10, width=4))
    counts = 10 * run.server.slots[cls.name]["pseudo"]  # [rows, samples]
    yield close("distance of the sample counts from integers", counts, counts.round(), 1e-9)
    first, second = counts[:, :3].sum(1), counts[:, 3:].sum(1)
    yield Claim("error of their sum, M", 0.0, float((first + second - 10).abs().max()))
    yield Claim("overlap of two clients", 0.0, float((first * second).abs().max()))
    yield Claim("fraction from the first client", 0.5, float((first > 0).to(DOUBLE).mean()), 0.08)
    inside = counts[first > 0, :3].mean(0) / 10
    yield Claim("deviation from uniform sampling", 0.0, float((inside - 1 / 3).abs().max()), 0.05)


@oracle(FedBR)
def means_across_clients(cls: type[FedBR]) -> Iterator[Claim]:
    """With unit vectors as samples, A M times the mean of A clients' means counts the uses of each
    sample: M times how often each client was drawn. The pool of all means is cut into pieces of
    A."""
    run = _unit_vectors((3, 30)).trained(cls(rows=400, samples=10, across=3, width=4))
    counts = 30 * run.server.slots[cls.name]["pseudo"]  # [rows, samples]
    clients = torch.stack([counts[:, :3].sum(1), counts[:, 3:].sum(1)])
    off = (counts - counts.round()).abs().max() + (clients.sum(0) - 30).abs().max()
    yield Claim("distance of the sample counts from integers that sum to A M", 0.0, float(off))
    turns = clients / 10
    gap = (turns - turns.round()).abs().max()
    yield Claim("distance from whole means of each client", 0.0, float(gap))
    once = (turns[0].round() == 1).to(DOUBLE).mean()
    yield Claim("fraction with one of three from the first client", 3 / 8, float(once), 0.08)
    part = cls(rows=2, samples=10, means=3, across=3, width=4)
    run = _unit_vectors((3, 30)).trained(part)
    all_means = 30 * run.server.slots[cls.name]["pseudo"].sum(0)
    yield Claim("means of the pool from the first client", 3.0, float(all_means[:3].sum()) / 10)


@oracle(FedBR)
def mixture_by_hand(cls: type[FedBR]) -> Iterator[Claim]:
    """With unit vectors as samples, (K + 1) x~ - x_p is a sum of K samples of the batch, and (K +
    1) y~ - 1/C the sum of their labels (eq. 4). The global features are those of x~."""
    run = _unit_vectors((4, 4)).trained(cls(rows=6, samples=3, width=4, mixture=2))
    steps, seen = LocalSteps(run, 1), []
    for t in range(2):
        local = steps.step(t).local[cls.name]
        added = 3 * local["x"] - run.server.slots[cls.name]["pseudo"]  # [rows, samples]
        labels = added[:, 4:] @ F.one_hot(run.federation.y[4:], 3).to(DOUBLE)
        off = (added - added.round()).abs().max() + (added[:, 4:].sum(1) - 2).abs().max()
        yield Claim(f"error of the two added samples, step {t}", 0.0, float(off))
        targets = 3 * local["target"] - 1 / 3
        yield close(f"error of their labels, step {t}", targets, labels, 1e-9)
        z_global = features_of(run, local["x"])
        yield close(f"error of the global features, step {t}", local["z_global"], z_global, 1e-9)
        seen.append(local["x"])
    yield Claim("steps draw different samples", 1.0, float(not torch.equal(*seen)), 0.0)


def _unit_vectors(sizes: tuple[int, ...]) -> Problem:
    """Sample i is the i-th unit vector."""
    total = sum(sizes)
    module = nn.Sequential(
        OrderedDict(body=nn.Sequential(nn.Linear(total, 4), nn.Tanh()), head=nn.Linear(4, 3))
    )
    with torch.no_grad():
        for i, weight in enumerate(module.parameters()):
            weight.copy_(rng.normal(rng.fold(rng.key(2), i), tuple(weight.shape)))
    data = federation_of(torch.eye(total), torch.arange(total) % 3, sizes)
    return Problem(data, module.to(DOUBLE), LocalWork(batch=min(sizes), steps=2))
