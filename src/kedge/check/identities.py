"""One identity or more per built-in part, worked out by hand from its paper.

Most run on quadratic clients :math:`f_k(w) = h_k(w - a_k)^2/2`, where :math:`\\tau` gradient steps
from w give :math:`a_k + r_k(w - a_k)` with :math:`r_k = (1 - \\eta h_k)^\\tau`, so that fixed
points are known in closed form. The usual pair is h = (1, 10), a = (0, 1), :math:`\\eta` = 0.05,
:math:`\\tau` = 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images, optimum, position, quadratics, step_view
from kedge.core import tree
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.parts import MOON, SCAFFOLD, FedAvgM, FedDyn, FedNova, FedProx, FedRep, FedSAM, Mixup
from kedge.sim.simulation import Simulation

H, A, LR, STEPS = (1.0, 10.0), (0.0, 1.0), 0.05, 10
BEST = optimum(H, A)  # 10/11


def _settled(method: Part | str, rounds: int = 60) -> Simulation:
    run = quadratics(H, A, LR, STEPS).simulate(method)
    for _ in range(rounds):
        run.run_round()
    return run


@oracle(None)
def fixed_point_on_two_quadratics(cls: None) -> Iterator[Claim]:
    """w = mean_k [a_k + r_k (w - a_k)] gives w = sum (1-r_k) a_k / sum (1-r_k) = 0.71344, not
    10/11."""
    pull = [1 - (1 - LR * h) ** STEPS for h in H]
    expected = sum(p * a for p, a in zip(pull, A, strict=True)) / sum(pull)
    yield Claim("FedAvg settles beside the optimum 0.90909", expected, position(_settled("fedavg")))


@oracle(FedProx)
def fixed_point_with_the_proximal_term(cls: type[FedProx]) -> Iterator[Claim]:
    """A step is v - lr [h (v - a) + mu (v - w)], with its own rest point c = (h a + mu w)/(h +
    mu), so v_tau = c + (w - c)(1 - lr (h + mu))^tau, and mean v_tau = w gives w = sum s_k a_k /
    sum s_k with s_k = (1 - (1 - lr (h_k + mu))^tau) h_k/(h_k + mu). A wrong sign, a missing 1/2 or
    an unsquared norm give another point."""
    mu = 1.0
    s = [(1 - (1 - LR * (h + mu)) ** STEPS) * h / (h + mu) for h in H]
    expected = sum(x * a for x, a in zip(s, A, strict=True)) / sum(s)
    yield Claim("fixed point at mu = 1", expected, position(_settled(cls(mu=mu), 200)))


@oracle(SCAFFOLD)
def control_variates_remove_the_drift(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """At the optimum c_k is the local gradient there and c is zero, so no client moves."""
    run = _settled(cls())
    yield Claim("settles at the optimum", BEST, position(run))
    yield Claim("c at the optimum", 0.0, float(run.server.slots[cls.name]["head.weight"]))
    for k in range(2):
        gradient = H[k] * (BEST - A[k])
        got = float(run.store.rows[cls.name]["head.weight"][k])
        yield Claim(f"c_{k} is the local gradient", gradient, got)


@oracle(SCAFFOLD)
def one_full_batch_step(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """From c = c_k = 0, y = x - lr g gives c_k+ = (x - y)/lr = g = h (0 - a): 0 and -10; c = -10/2.
    With the sign of x - y turned, c_k is +10."""
    run = quadratics(H, A, LR, steps=1).simulate(cls())
    run.run_round()
    kept = run.store.rows[cls.name]["head.weight"].flatten()
    yield Claim("c_0 is the gradient", 0.0, float(kept[0]))
    yield Claim("c_1 is the gradient", -10.0, float(kept[1]))
    yield Claim("c is their sum over N", -5.0, float(run.server.slots[cls.name]["head.weight"]))


@oracle(SCAFFOLD)
def partial_participation(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """With one client of two, c moves by (1/N) of its change: only client 1 takes part, so c =
    -10/2."""
    run = quadratics(H, A, LR, steps=1).simulate(cls())
    run.run_round([1])
    yield Claim("c moves by 1/N, not 1/|S|", -5.0, float(run.server.slots[cls.name]["head.weight"]))


@oracle(FedDyn)
def dynamic_regulariser_reaches_the_optimum(cls: type[FedDyn]) -> Iterator[Claim]:
    yield Claim("settles at the optimum", BEST, position(_settled(cls(alpha=1.0))), 1e-6)


@oracle(FedDyn)
def first_order_condition(cls: type[FedDyn]) -> Iterator[Claim]:
    """At a local minimum grad f_k(w_k) - g_k + alpha (w_k - w) = 0, hence g_k+ = grad f_k(w_k)."""
    alpha = 1.0
    run = quadratics(H, A, LR, steps=300).simulate(cls(alpha=alpha))
    run.run_round()
    local = H[1] * A[1] / (H[1] + alpha)  # argmin of h (v - a)^2/2 + alpha v^2/2
    got = float(run.store.rows[cls.name]["head.weight"][1])
    yield Claim("g_k is the gradient at the local minimum", H[1] * (local - A[1]), got)


@oracle(FedNova)
def equal_steps_give_fedavg(cls: type[FedNova]) -> Iterator[Claim]:
    yield Claim("fixed point of FedAvg", position(_settled("fedavg")), position(_settled(cls())))


@oracle(FedNova)
def unequal_steps_by_hand(cls: type[FedNova]) -> Iterator[Claim]:
    """h = (1, 10), a = (1, 1), 1 and 3 steps, p = (1/4, 3/4), from w = 0: the updates are 0.05 and
    1 - 0.5^3 = 0.875, so w = (1/4 + 3 * 3/4) (0.05/4 + 0.875/3 * 3/4) = 2.5 * 0.23125 =
    0.578125."""
    run = quadratics(H, (1.0, 1.0), LR, steps=None, copies=(1, 3)).simulate(cls())
    run.run_round()
    yield Claim("normalised average", 0.578125, position(run))


@oracle(FedAvgM)
def momentum_by_hand(cls: type[FedAvgM]) -> Iterator[Claim]:
    """FedAvg's update is d(w) = mean_k (1 - r_k)(a_k - w); momentum iterates u = beta u + d, w +=
    u."""
    beta, w, u = 0.5, 0.0, 0.0
    for _ in range(4):
        d = sum((1 - (1 - LR * h) ** STEPS) * (a - w) for h, a in zip(H, A, strict=True)) / 2
        u = beta * u + d
        w += u
    yield Claim("four rounds at beta = 0.5", w, position(_settled(cls(beta=beta), 4)))


@oracle(FedSAM)
def one_step_by_hand(cls: type[FedSAM]) -> Iterator[Claim]:
    """f = 10 (w - 1)^2/2 at w = 0: g = -10, the worst point is -rho, its gradient -10 (1 + rho),
    so one step of 0.05 leads to 0.5 (1 + rho)."""
    run = quadratics((10.0,), (1.0,), LR, steps=1).simulate(cls(rho=0.2))
    run.run_round()
    yield Claim("one step at rho = 0.2", 0.6, position(run))


@oracle(MOON)
def equal_models_give_log_2(cls: type[MOON]) -> Iterator[Claim]:
    """Before a client has a previous model all three coincide: the two cosines are equal."""
    problem = images(sizes=(5, 5), steps=1)
    run = problem.simulate(cls(mu=3.0, projection=4))
    plain = problem.simulate("fedavg")
    terms = run.run_round()["terms"][cls.name]
    plain.run_round()
    yield Claim("term at equal models over mu", math.log(2), float(terms[0]) / 3.0)
    gap = tree.gap(plain.weights, tree.map(lambda _, w: w, plain.weights, run.weights))
    yield Claim("its gradient there", 0.0, gap, 1e-12)


@oracle(MOON)
def second_round_by_formula(cls: type[MOON]) -> Iterator[Claim]:
    """At the first step of round 1, z = z_glob, so the cosine to the global model is 1, and that
    to the previous model is taken here from two ordinary modules: mean log(1 + e^{(cos -
    1)/tau})."""
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(cls(mu=1.0, projection=0, tau=0.5))
    run.run_round()
    _, batch = step_view(run, 1, cls(projection=0))
    previous = tree.take(run.store.rows[cls.name]["previous"], 1)
    now = run.bound.model.forward(run.weights, batch.x, "eval").features
    before = run.bound.model.forward(Weights(previous, {}), batch.x, "eval").features
    assert now is not None
    assert before is not None
    cosine = (now * before).sum(1) / (now.norm(dim=1) * before.norm(dim=1))
    expected = float(torch.log1p(torch.exp((cosine - 1) / 0.5)).mean())
    yield Claim("term of round 1", expected, float(run.run_round()["terms"][cls.name][1]))


@oracle(Mixup)
def mixed_label_mixes_the_losses(cls: type[Mixup]) -> Iterator[Claim]:
    """CE(x~, lambda y_i + (1 - lambda) y_j) = lambda CE(x~, y_i) + (1 - lambda) CE(x~, y_j), where
    lambda is read off the mixed inputs."""
    part = cls(alpha=1.0)
    run = images(sizes=(14, 14), batch=7).simulate(part)
    v, batch = step_view(run, 0, part, "transform")
    mixed = part.transform(v, batch)
    logits = run.bound.model.forward(run.weights, mixed.x, "eval").logits
    lam, other = _read_off(batch, mixed)
    pair = [F.cross_entropy(logits, y) for y in (batch.y, batch.y[other])]
    expected = float(lam * pair[0] + (1 - lam) * pair[1])
    yield Claim("loss of the mixture", expected, float(run.bound.task.loss(logits, mixed).mean()))
    yield Claim("labels stay integers", 0.0, float((mixed.y != batch.y).sum()))


def _read_off(batch: Batch, mixed: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The one lambda and the partners that explain x~ = lambda x_i + (1 - lambda) x_j, by
    search."""
    x, n = batch.x.flatten(1), len(batch.x)
    best = (float("inf"), torch.tensor(0.0), torch.zeros(n, dtype=torch.int64))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            way = x[i] - x[j]
            lam = ((mixed.x.flatten(1)[i] - x[j]) * way).sum() / (way * way).sum()
            away = torch.cdist(mixed.x.flatten(1) - lam * x, (1 - lam) * x)
            error, other = away.min(1)
            if float(error.max()) < best[0]:
                best = (float(error.max()), lam, other)
    return best[1], best[2]


@oracle(FedRep)
def head_first_then_body(cls: type[FedRep]) -> Iterator[Claim]:
    """Two full-batch steps: the head takes a gradient step at the old body, then the body one at
    the new head; the server's head stays where it was."""
    run = images(sizes=(5, 5), batch=5, steps=2).simulate(cls(head_share=0.5))
    start = run.weights.params
    batch = run.federation.clean(run.federation.rows[:5])
    head = set(run.bound.model.head_names())
    params = dict(start)
    for names in (head, set(start) - head):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        out = run.bound.model.forward(Weights(leaves, {}), batch.x, "eval").logits
        grads = torch.autograd.grad(F.cross_entropy(out, batch.y), list(leaves.values()))
        step = dict(zip(leaves, grads, strict=True))
        params = {n: p - LR * step[n] if n in names else p for n, p in params.items()}
    run.run_round([0])
    own = run.store.rows["private"]["params"]
    moved = max(float((run.weights.params[n] - start[n]).abs().max()) for n in head)
    yield Claim("the server's head does not move", 0.0, moved, 0.0)
    yield Claim(
        "client's head", 0.0, max(float((own[n][0] - params[n]).abs().max()) for n in head), 1e-12
    )
    body = max(float((run.weights.params[n] - params[n]).abs().max()) for n in set(start) - head)
    yield Claim("body", 0.0, body, 1e-12)
