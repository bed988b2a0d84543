"""Identities of FedTR (parts/fedtr.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kedge.check.identities.common import close, cross_entropy, features_of, gradient, samples_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, LocalSteps, Problem, images, linear, step_view
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.task import Batch
from kedge.core.tree import Params
from kedge.parts.fedtr import FedTR
from kedge.sim.simulation import Simulation

LR, DECAY = 0.5, 0.5


@oracle(FedTR)
def drift_scales_the_first_update(cls: type[FedTR]) -> Iterator[Claim]:
    """From d = 0 one local step is FedAvg's, d_i = w_i - w, and w changes by sum lambda_i (Delta_i
    + d_i), twice FedAvg's update, for any client sizes. If client 1 alone takes part, which has 10
    of all 40 samples, the mean of d over all three is Delta/4, and w changes by (1 + 1/4) Delta."""
    for cohort, factor in (([0, 1, 2], 2.0), ([1], 5 / 4)):
        problem = images(sizes=(12, 10, 18), steps=1)
        start = problem.simulate("fedavg").weights.params
        own, plain = (problem.trained(m, clients=cohort).weights for m in (cls(), "fedavg"))
        expected = tree.map(lambda w, p, f=factor: w + f * (p - w), start, plain.params)
        what = f"error of {factor:.3g} x FedAvg's update, {len(cohort)} of 3 clients"
        yield close(what, own.params, expected)


@oracle(FedTR)
def recursion_of_the_descent_rule(cls: type[FedTR]) -> Iterator[Claim]:
    """With u = w_i + d_i - w, a step with gradient g is u <- (1 - alpha eta_g)((1 - alpha eta) u -
    eta g), and the server steps by u. Detects a missing alpha in the step of d, a flipped sign, and
    an upload of w instead of w + d."""
    alpha, eta_g = 1.5, 0.2
    part = cls(drift_rule="descent", alpha=alpha, eta_g=eta_g, lambda_R=0.0)
    run = images(sizes=(5, 9), batch=5, steps=4).simulate(part)
    local, start = LocalSteps(run, 1), run.weights.params
    u, worst = tree.zeros_like(start), 0.0
    for t in range(4):
        g = _gradient(run, local.carry.weights.params, run.federation.clean(local.batches[t]))
        step = (1 - alpha * eta_g, 1 - alpha * 0.05)
        u = tree.map(lambda u, g, s=step: s[0] * (s[1] * u - 0.05 * g), u, g)
        carry = local.step(t)
        drift = carry.local[cls.name]["drift"]
        got = tree.map(lambda p, d, w: p + d - w, carry.weights.params, drift, start)
        worst = max(worst, tree.gap(got, u))
    yield Claim("error of u over four steps", 0.0, worst, 1e-12)
    run.run_round([1])
    moved = tree.sub(run.weights.params, start)
    yield close("error of the server step u", moved, u)


@oracle(FedTR)
def printed_drift_goes_on(cls: type[FedTR]) -> Iterator[Claim]:
    """``paper``: algorithm 1 resets w_i in every round (line 5), but not d. Three rounds of client
    1 alone, by autograd: p <- p - eta (g + alpha (p + d - w)), d <- d - alpha eta_g (p + d - w),
    and w <- p + d at the end. Detects a d that starts from 0 in every round."""
    part = cls(**cls.presets["paper"] | {"lambda_R": 0.0, "eta_g": 0.2})
    run = images(sizes=(5, 9), batch=5, steps=2).simulate(part)
    w = run.weights.params
    d = tree.zeros_like(w)
    for _ in range(3):
        batches, p = run.cohort([1]).batches[0], w
        for t in range(2):
            g = _gradient(run, p, run.federation.clean(batches[t]))
            p = tree.map(lambda p, g, d, w: p - 0.05 * (g + 2 * (p + d - w)), p, g, d, w)
            d = tree.map(lambda d, p, w: d - 2 * 0.2 * (p + d - w), d, p, w)
        w = tree.add(p, d)
        run.run_round([1])
    yield close("error of the model after three rounds", run.weights.params, w)


@oracle(FedTR)
def gradient_of_the_drift_term(cls: type[FedTR]) -> Iterator[Claim]:
    """The gradient of alpha/2 ||p + d - w||^2 is alpha (p + d - w), at any p, with d = w_1 - w of
    the previous round. Detects a missing 1/2 or square, and a flipped sign of d."""
    alpha = 0.7
    part = cls(alpha=alpha, lambda_R=0.0)
    run = images(steps=2).trained(part)
    v, batch = step_view(run, 1, part)
    noise = {n: rng.normal(rng.fold(rng.key(1), n), tuple(p.shape), DOUBLE)
             for n, p in run.weights.params.items()}  # fmt: skip
    point = tree.add(run.weights.params, noise)
    out = v.forward(point, batch.x)
    got = torch.func.grad(lambda p: part.term(v, p, batch, out))(point)
    drift = tree.take(run.store.rows[cls.name]["drift"], 1)
    expected = tree.map(lambda d, z: alpha * (d + z), drift, noise)
    yield close("error of the gradient", got, expected)


@oracle(FedTR)
def centroids_are_pooled_class_means(cls: type[FedTR]) -> Iterator[Claim]:
    """At learning rate 0 all clients have the same features, so sum_i n_ij c_ij / sum_i n_ij is the
    mean feature of class j over all samples. Detects a mean of the clients' means."""
    run = images(optim=SGD(lr=0.0)).trained(cls())
    batch = run.federation.clean(run.federation.rows)
    got = run.server.slots[cls.name]["centroids"]
    features = features_of(run, batch.x)
    for j in range(3):
        pooled = features[batch.y == j].mean(0)
        yield close(f"error of the centroid of class {j}", got[j], pooled)


@oracle(FedTR)
def centroids_of_the_trained_model(cls: type[FedTR]) -> Iterator[Claim]:
    """With one client and no drift the next model is the client's, and its centroids are class
    means in evaluation mode at the new weights and BatchNorm statistics. An absent class has no
    centroid, or keeps its old one."""
    run = images(norm="bn", sizes=(5, 9, 14)).simulate(cls(drift_rule="none"))
    have: set[int] = set()
    expected = torch.zeros(3, run.bound.spec.features, dtype=DOUBLE)
    for k in (0, 2):
        run.run_round([k])
        batch = samples_of(run, k)
        features = features_of(run, batch.x)
        for j in batch.y.unique():
            expected[j] = features[batch.y == j].mean(0)
        have |= set(batch.y.tolist())
        slot = run.server.slots[cls.name]
        yield close(f"error of the centroids after client {k}", slot["centroids"], expected)
        valid = torch.tensor([float(j in have) for j in range(3)])
        yield close(f"error of their validity after client {k}", slot["valid"], valid, 1e-9)


@oracle(FedTR)
def centroid_term_by_hand(cls: type[FedTR]) -> Iterator[Claim]:
    """Round 0 has no centroids and no term. In round 1, after client 0 alone, the term of client 1
    is the mean over 9 rows and 6 features of (f - c_y)^2, with 0 for rows of classes without a
    centroid; the sum is 54 times that."""
    for extra, factor in (({}, 1.0), ({"reduction": "sum"}, 54.0)):
        part = cls(drift_rule="none", lambda_R=0.5, **extra)  # type: ignore[arg-type]
        run = images(sizes=(5, 9, 14), batch=9, steps=1).simulate(part)
        yield Claim("term in round 0", 0.0, float(run.run_round([0]).losses[cls.name]), 0.0)
        slot = run.server.slots[cls.name]
        _, batch = step_view(run, 1, part)
        square = (features_of(run, batch.x) - slot["centroids"][batch.y]) ** 2
        known = [bool(slot["valid"][j]) for j in batch.y]
        expected = 0.5 * factor * float(square[known].sum()) / 54
        got = float(run.run_round([1]).losses[cls.name])
        yield Claim("some rows have no centroid", 1.0, float(0 < sum(known) < 9))
        yield Claim(f"term in round 1, scaled by {factor:g}", expected, got)


@oracle(FedTR)
def accumulated_drift_at_the_optimum(cls: type[FedTR]) -> Iterator[Claim]:
    """Softmax regression with weight decay, one sample of its own class per client: every f_k is
    strongly convex. At the fixed point no client moves, so grad f_k + alpha d_k = 0 and sum
    lambda_k d_k = 0 with lambda = (1, 1, 2)/4: the gradient of sum lambda_k f_k is zero, with all
    clients or two of them per round; at FedAvg's fixed point its norm is 0.14. Detects a mean of d
    over the cohort, 1/N for unequal sizes, and a flipped sign."""
    alpha = 1.0
    for cohort, rounds in ((3, 60), (2, 100)):
        part = cls(alpha=alpha, lambda_R=0.0)
        run = convex().trained(part, rounds=rounds, per_round=cohort)
        grads = [client_gradient(run, k) for k in range(3)]
        mean = tree.map(lambda a, b, c: (a + b + 2 * c) / 4, *grads)
        norm = float(tree.sq_norm(mean).sqrt())
        yield Claim(f"norm of the global gradient, {cohort} of 3 clients", 0.0, norm)
        for k in range(3):
            drift = tree.take(run.store.rows[cls.name]["drift"], k)
            what = f"error of d_{k} = -grad f_{k}/alpha, {cohort} of 3 clients"
            yield close(what, drift, tree.scale(grads[k], -1 / alpha), 1e-9)


def convex() -> Problem:
    """Softmax regression with weight decay; each of three clients has one sample of its own class
    (1, 1 and 2 copies of it)."""
    owner = torch.tensor([0, 1, 2, 2])
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=DOUBLE)[owner]
    optim = SGD(lr=LR, weight_decay=DECAY)
    return linear(x, owner, (1, 1, 2), torch.zeros(3, 2), torch.zeros(3), steps=4, optim=optim)


def client_gradient(run: Simulation, k: int) -> Params:
    """Gradient of f_k of :func:`convex` at the global model."""
    params = run.weights.params
    return tree.axpy(DECAY, params, _gradient(run, params, samples_of(run, k)))


def _gradient(run: Simulation, params: Params, batch: Batch) -> Params:
    return gradient(params, cross_entropy(run, batch))[1]
