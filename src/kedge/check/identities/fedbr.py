"""Identities of the method in parts/fedbr.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem, images, small_net
from kedge.core import client, rng, tree
from kedge.core.optim import SGD
from kedge.core.task import make_task
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import View
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.parts.fedbr import FedBR


@oracle(FedBR)
def equal_cosines_give_log_2(cls: type[FedBR]) -> Iterator[Claim]:
    """If all samples of a client are equal, pseudo-samples equal real ones: both cosines are 1,
    L_con is log 2, and its gradient is 0, as both cosines are at their maximum."""
    x = rng.normal(rng.key(5), (1, 1, 8, 8), DOUBLE).expand(6, 1, 8, 8)
    y = torch.ones(6, dtype=torch.int64)
    federation = Federation(x, y, [range(6)], make_task("classification", 3), dtype=DOUBLE)
    problem = Problem(federation, small_net("none", 3), LocalWork(batch=6, steps=1), SGD(lr=0.5))
    run, plain = problem.simulate(cls(lam=0.0, mu=3.0, rows=4, width=5)), problem.simulate("fedavg")
    term = run.run_round().losses[cls.name][0]
    plain.run_round()
    yield Claim("term / mu", math.log(2), float(term) / 3)
    yield Claim(
        "effect of its gradient on the model", 0.0, tree.gap(plain.weights, run.weights), 1e-12
    )


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

    def features(params: Params, x: Tensor) -> Tensor:
        found = model.forward(Weights(params, {}), x, "eval").features
        assert found is not None
        return found

    def contrast(p: Params, z_pseudo: Tensor, z_real: Tensor) -> Tensor:
        local, anchor, real = (_three_layers(p, z) for z in (z_pseudo, z_global, z_real))
        f1, f2 = torch.exp(2.0 * _cosine(local, anchor)), torch.exp(1.5 * _cosine(local, real))
        return -torch.log(f1 / (f1 + f2)).mean()

    z_global, params, terms = features(body, pseudo).detach(), dict(body), []
    for t in range(2):
        real = run.federation.clean(batches[t])
        leaves = {n: p.clone().requires_grad_() for n, p in projection.items()}
        z_pseudo, z_real = (features(params, x).detach() for x in (pseudo, real.x))
        grads = torch.autograd.grad(contrast(leaves, z_pseudo, z_real), list(leaves.values()))
        projection = {n: projection[n] + 0.05 * g for n, g in zip(leaves, grads, strict=True)}

        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        z_pseudo, z_real = features(leaves, pseudo), features(leaves, real.x)
        log_probs = F.log_softmax(model.head(leaves, z_pseudo), 1)
        term = -0.3 * log_probs.mean() + 0.7 * contrast(projection, z_pseudo, z_real)
        loss = F.cross_entropy(model.head(leaves, z_real), real.y) + term
        grads = torch.autograd.grad(loss, list(leaves.values()))
        params = {n: params[n] - 0.05 * g for n, g in zip(leaves, grads, strict=True)}
        terms.append(float(term.detach()))

    # the same pseudo-data again: the survey of round 0 draws from the same keys
    found = run.run_round([0]).losses[cls.name][0]
    after = run.server.slots[cls.name]["projection"]
    yield Claim("mean of the two terms", sum(terms) / 2, float(found))
    yield Claim("error of the projection", 0.0, tree.gap(projection, after), 1e-12)
    for what, names in (("head", head), ("body", [n for n in body if n not in head])):
        gaps = [float((params[n] - run.weights.params[n]).abs().max()) for n in names]
        yield Claim(f"error of the {what}", 0.0, max(gaps), 1e-12)


@oracle(FedBR)
def every_real_sample_is_a_negative(cls: type[FedBR]) -> Iterator[Claim]:
    """The gradient of L_con reaches all 7 rows of a batch; with rows = 3 it reaches the first 3
    alone, and with rows = 9 all of them again."""
    for rows, expected in ((0, 7.0), (3, 3.0), (9, 7.0)):
        part = cls(lam=0.0, width=4, out=3, rows=rows)
        run = images(sizes=(14, 14), batch=7, steps=1).simulate(part)
        run.survey(part, [0])
        cohort, bound, params = run.cohort([0]), run.bound.at(0), run.weights.params
        job = take_jobs(cohort.jobs, 0)
        carry = client.begin(bound, job)
        context = client.client_context(bound, job, carry.local, torch.tensor(0))
        view, batch = View(context, part, "term"), run.federation.clean(cohort.batches[0, 0])
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
    real = run.federation.clean(run.cohort([0]).batches[0, 0])
    p, p_pseudo = (
        torch.softmax(run.bound.model.forward(start, x, "eval").logits, 1) for x in (real.x, pseudo)
    )
    grad = (p - F.one_hot(real.y, 3)).mean(0) + 2.0 * (p_pseudo - 1 / 3).mean(0)
    run.run_round([0])
    error = run.weights.params["head.bias"] - (start.params["head.bias"] - 0.05 * grad)
    yield Claim("error of the head's bias", 0.0, float(error.abs().max()), 1e-12)


@oracle(FedBR)
def pseudo_samples_are_means_of_one_client(cls: type[FedBR]) -> Iterator[Claim]:
    """If sample i is the i-th unit vector, M times a pseudo-sample counts the uses of each sample:
    integers that sum to M, all from one client. Both clients are equally frequent, although one has
    ten times the samples. Detects means over all clients or by size."""
    run = _unit_vectors((3, 30)).simulate(cls(rows=400, samples=10, width=4))
    run.run_round()
    counts = 10 * run.server.slots[cls.name]["pseudo"]  # [rows, samples]
    yield Claim(
        "distance of the sample counts from integers",
        0.0,
        float((counts - counts.round()).abs().max()),
        1e-9,
    )
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
    run = _unit_vectors((3, 30)).simulate(cls(rows=400, samples=10, across=3, width=4))
    run.run_round()
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
    run = _unit_vectors((3, 30)).simulate(part)
    run.run_round()
    all_means = 30 * run.server.slots[cls.name]["pseudo"].sum(0)
    yield Claim("means of the pool from the first client", 3.0, float(all_means[:3].sum()) / 10)


@oracle(FedBR)
def mixture_by_hand(cls: type[FedBR]) -> Iterator[Claim]:
    """With unit vectors as samples, (K + 1) x~ - x_p is a sum of K samples of the batch, and (K +
    1) y~ - 1/C the sum of their labels (eq. 4). The global features are those of x~."""
    run = _unit_vectors((4, 4)).simulate(cls(rows=6, samples=3, width=4, mixture=2))
    run.run_round()
    cohort = run.cohort([1])
    job, seen = take_jobs(cohort.jobs, 0), []
    carry = client.begin(run.bound.at(run.round), job)
    for t in range(2):
        carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[0, t])
        local = carry.local[cls.name]
        added = 3 * local["x"] - run.server.slots[cls.name]["pseudo"]  # [rows, samples]
        labels = added[:, 4:] @ F.one_hot(run.federation.y[4:], 3).to(DOUBLE)
        off = (added - added.round()).abs().max() + (added[:, 4:].sum(1) - 2).abs().max()
        yield Claim(f"error of the two added samples, step {t}", 0.0, float(off))
        gap = (3 * local["target"] - 1 / 3 - labels).abs().max()
        yield Claim(f"error of their labels, step {t}", 0.0, float(gap))
        z_global = run.bound.model.forward(run.weights, local["x"], "eval").features
        assert z_global is not None
        gap = (local["z_global"] - z_global).abs().max()
        yield Claim(f"error of the global features, step {t}", 0.0, float(gap))
        seen.append(local["x"])
    yield Claim("steps draw different samples", 1.0, float(not torch.equal(*seen)), 0.0)


def _unit_vectors(sizes: tuple[int, ...]) -> Problem:
    """Sample i is the i-th unit vector."""
    total = sum(sizes)
    y = torch.arange(total) % 3
    clients = list(torch.split(torch.arange(total), list(sizes)))
    task = make_task("classification", 3)
    federation = Federation(torch.eye(total, dtype=DOUBLE), y, clients, task, dtype=DOUBLE)
    module = nn.Sequential()
    module.add_module("body", nn.Sequential(nn.Linear(total, 4), nn.Tanh()))
    module.add_module("head", nn.Linear(4, 3))
    with torch.no_grad():
        for i, weight in enumerate(module.parameters()):
            weight.copy_(rng.normal(rng.fold(rng.key(2), i), tuple(weight.shape)))
    work = LocalWork(batch=min(sizes), steps=2)
    return Problem(federation, module.to(DOUBLE), work, SGD(lr=0.05))


def _three_layers(p: Tree, z: Tensor) -> Tensor:
    hidden = torch.clamp(z @ p["weight0"].T + p["bias0"], min=0)
    hidden = torch.clamp(hidden @ p["weight1"].T + p["bias1"], min=0)
    return hidden @ p["weight2"].T + p["bias2"]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
