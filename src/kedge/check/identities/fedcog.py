"""Identities of the method in parts/fedcog.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import close, linear_of, logits_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, LocalSteps, Problem, images, linear
from kedge.core import rng, tree
from kedge.core.tree import Tree
from kedge.parts.fedcog import FedCOG
from kedge.sim.simulation import Simulation


@oracle(FedCOG)
def targets_of_the_example_in_the_paper(cls: type[FedCOG]) -> Iterator[Claim]:
    """A.1.1: d = (500, 0, 400, 200, 400) lacks (0, 500, 100, 300, 100), so the quotas of 256
    samples are (0, 128, 25.6, 76.8, 25.6), by largest remainders (0, 128, 26, 77, 25). A client
    with one class gets 64 of each other class; a balanced client gets 52, then 51 each. Detects the
    client's own classes as targets, and quotas rounded down."""
    counts = ((500, 0, 400, 200, 400), (0, 0, 7, 0, 0), (3, 3, 3, 3, 3))
    expected = ((0, 128, 26, 77, 25), (64, 64, 0, 64, 64), (52, 51, 51, 51, 51))
    run = _linear(_classes(*counts), classes=5).simulate(cls(samples=256, steps=0))
    for k in range(3):
        found = torch.bincount(_generated(run, k)["y"], minlength=5)
        off = (found - torch.tensor(expected[k])).abs().sum()
        yield Claim(f"error of the targets of client {k}", 0.0, float(off), 0.0)


@oracle(FedCOG)
def generation_by_hand(cls: type[FedCOG]) -> Iterator[Claim]:
    """For linear models p = softmax(W x + b), q = softmax(V x + c) with mean m, L_gen's gradient is
    W'(p - e_y) - lambda (W'(J_p log(p/m)) + V'(J_q log(q/m)))/2 with J_p u = p (u - p.u). Three
    Adam steps are compared; without a previous model the second part is 0. Detects a wrong sign or
    factor of the disagreement, and a forgotten previous model."""

    def gradient(x: Tensor, y: Tensor, now: Tree, old: Tree, weight: float) -> Tensor:
        w, v = now["head.weight"], old["head.weight"]
        p, q = (torch.softmax(linear_of(params, x), 1) for params in (now, old))
        up, uq = (0.5 * torch.log(2 * s / (p + q)) for s in (p, q))
        way_p = p * (up - (p * up).sum(1, keepdim=True))
        way_q = q * (uq - (q * uq).sum(1, keepdim=True))
        return (p - F.one_hot(y, 3)) @ w - weight * (way_p @ w + way_q @ v)

    yield from _by_hand(cls, _classes((3, 2, 0), (0, 1, 4)), gradient)


@oracle(FedCOG)
def multilabel_generation_by_hand(cls: type[FedCOG]) -> Iterator[Claim]:
    """The same with p = s(W x + b) per label, s the logistic function: the loss is a mean over the
    3 labels, the divergence a sum, and J_p log(p/m) becomes p (1 - p) (logit p - logit m)."""

    def gradient(x: Tensor, y: Tensor, now: Tree, old: Tree, weight: float) -> Tensor:
        w, v = now["head.weight"], old["head.weight"]
        p, q = (torch.sigmoid(linear_of(params, x)) for params in (now, old))
        middle = torch.logit((p + q) / 2)
        way_p, way_q = (0.5 * s * (1 - s) * (torch.logit(s) - middle) for s in (p, q))
        return (p - y) @ w / 3 - weight * (way_p @ w + way_q @ v)

    labels = [[[1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]], [[0, 0, 1], [1, 0, 1]]]
    yield from _by_hand(cls, [torch.tensor(own, dtype=DOUBLE) for own in labels], gradient)


@oracle(FedCOG)
def first_step_is_a_fraction_of_fedavg(cls: type[FedCOG]) -> Iterator[Claim]:
    """At the global model the distillation loss and its gradient are 0. With the class counts (4,
    1, 0) the client lacks 7 samples, so the task's loss has weight 5/12, and the step is 5/12 of
    FedAvg's. Detects swapped weights, and weights from N."""
    problem = _linear(_classes((4, 1, 0)), steps=1)
    run, plain = problem.simulate(cls(samples=4, steps=2)), problem.trained("fedavg")
    start = run.weights.params
    term = float(run.run_round().losses[cls.name][0])
    part = tree.map(lambda s, w: s + (w - s) * 5 / 12, start, plain.weights.params)
    yield Claim("distillation loss at the global model", 0.0, term, 1e-12)
    yield close("error of 5/12 of FedAvg's step", part, run.weights.params)


@oracle(FedCOG)
def distillation_loss_by_hand(cls: type[FedCOG]) -> Iterator[Claim]:
    """Two full-batch steps with weight 0.7 at T = 2: the first term and its gradient are 0, so the
    second term is 0.7 T^2 mean sum_c g_c log(g_c / s_c), with s FedAvg's model after one step and g
    the global model. Detects the reverse KL, and a missing T^2."""
    settings: dict[str, Any] = {"weighting": "lambda", "lambda_kd": 0.7, "temperature": 2.0}
    part = cls(samples=4, batch=4, steps=2, **settings)
    run = _linear(_classes((4, 2, 0)), steps=2).simulate(part)
    plain = _linear(_classes((4, 2, 0)), steps=1).simulate("fedavg")
    x, before = _generated(run, 0)["x"], run.weights
    plain.run_round()
    g, s = (torch.softmax(logits_of(run, x, weights) / 2, 1) for weights in (before, plain.weights))
    expected = 0.7 * 4 * (g * torch.log(g / s)).sum(1).mean()
    found = 2 * run.run_round().losses[cls.name][0]  # a mean over two steps
    yield Claim("term of the second step", float(expected), float(found))


@oracle(FedCOG)
def samples_are_used_equally_often(cls: type[FedCOG]) -> Iterator[Claim]:
    """With six samples in batches of four, three steps use each sample twice."""
    run = _linear(_classes((4, 2, 0)), steps=3).simulate(cls(samples=6, batch=4, steps=0))
    part = run.bound.parts[0]
    assert isinstance(part, FedCOG)
    local, used = LocalSteps(run, 0), torch.zeros(6)
    for t in range(3):
        used += torch.bincount(part._rows(local.view(part, t=t)), minlength=6)
    yield Claim("error of the uses per sample, 2", 0.0, float((used - 2).abs().max()), 0.0)


@oracle(FedCOG)
def soft_targets_are_global_logits(cls: type[FedCOG]) -> Iterator[Claim]:
    """The stored logits equal those of a plain global module in evaluation mode on the final
    images. Detects logits of earlier images, or of another mode."""
    run = images(norm="bn", sizes=(5, 9)).simulate(cls(samples=6, steps=3, batch=4, lr=0.5))
    for _ in range(2):
        made = _generated(run, 1)
        with torch.no_grad():
            logits = run.module()(made["x"])
        yield close(f"error of the logits in round {run.round}", logits, made["logits"])
        run.run_round()


@oracle(FedCOG)
def two_steps_by_autograd_with_batchnorm(cls: type[FedCOG]) -> Iterator[Claim]:
    """w_real CE(real) + w_kd KL over two passes in training mode: BatchNorm sees real and generated
    rows separately, and both update its running statistics. Detects a joint pass, an evaluation
    pass, and a gradient into the teacher."""
    part = cls(samples=5, batch=5, steps=2, weighting="lambda", lambda_kd=0.5)
    run = images(norm="bn", sizes=(5, 9), batch=5, steps=2).simulate(part)
    cohort, made, module = run.cohort([0]), _generated(run, 0), run.module().train()
    for t in range(2):
        real = run.federation.clean(cohort.batches[0, t])
        loss = F.cross_entropy(module(real.x), real.y)
        student, teacher = F.log_softmax(module(made["x"]), 1), F.softmax(made["logits"], 1)
        gap = F.kl_div(student, teacher, reduction="batchmean")
        grads = torch.autograd.grad(loss + 0.5 * gap, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p.sub_(0.05 * g)
    run.run_round([0])
    state = module.state_dict()
    for what, found in (("parameters", run.weights.params), ("statistics", run.weights.buffers)):
        yield close(f"error of the {what}", found, {n: state[n] for n in found}, 1e-11)


@oracle(FedCOG)
def client_keeps_its_local_model(cls: type[FedCOG]) -> Iterator[Claim]:
    """With one client in the round, the global model is this client's model, and so is its
    state."""
    run = _linear(_classes((3, 2, 0), (0, 1, 4))).trained(cls(samples=4, steps=1), clients=[1])
    state = run.store.rows[cls.name]
    previous = tree.take(state["previous"], 1)
    yield close("error of the previous model", run.weights.params, previous, 1e-15)
    yield Claim("previous model of the absent client", 0.0, float(state["seen"][0]), 0.0)


@oracle(FedCOG)
def multilabel_targets_follow_label_frequencies(cls: type[FedCOG]) -> Iterator[Claim]:
    """Label frequencies of 1/4, 3/4 and 0."""
    y = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=DOUBLE)
    run = _linear([y]).simulate(cls(samples=4000, steps=0))
    found = _generated(run, 0)["y"].mean(0)
    for label, (share, tolerance) in enumerate(((0.25, 0.03), (0.75, 0.03), (0.0, 0.0))):
        yield Claim(f"frequency of label {label}", share, float(found[label]), tolerance)


def _classes(*counts: tuple[int, ...]) -> list[Tensor]:
    """Labels of clients with the given class counts."""
    return [torch.repeat_interleave(torch.tensor(own)) for own in counts]


def _linear(owned: list[Tensor], steps: int = 2, classes: int = 3) -> Problem:
    """Clients with the given labels (or label vectors), two inputs and a linear model."""
    task = "classification" if owned[0].ndim == 1 else "multilabel"
    y, sizes, keys = torch.cat(owned), [len(own) for own in owned], rng.split(rng.key(3), 3)
    x, weight, bias = (
        rng.normal(key, shape, DOUBLE)
        for key, shape in zip(keys, ((len(y), 2), (classes, 2), (classes,)), strict=True)
    )
    return linear(x, y, sizes, weight, bias, task=task, batch=min(sizes), steps=steps, lr=0.5)


def _generated(run: Simulation, k: int) -> Tree:
    """Generated data of client k in the current round."""
    return LocalSteps(run, k).carry.local[run.bound.parts[0].name]


def _by_hand(
    cls: type[FedCOG],
    owned: list[Tensor],
    gradient: Callable[[Tensor, Tensor, Tree, Tree, float], Tensor],
) -> Iterator[Claim]:
    """Three explicit Adam steps with decay rates 0.5 and 0.9 from the same noise: round 0 without,
    round 1 with a previous model."""
    settings: dict[str, Any] = {"samples": 4, "lr": 0.1, "lambda_dis": 5.0}
    run = _linear(owned).simulate(cls(steps=3, **settings))
    noise = _linear(owned).simulate(cls(steps=0, **settings))
    for round in range(2):
        made, x = _generated(run, 1), _generated(noise, 1)["x"]
        old = tree.take(run.store.rows[cls.name]["previous"], 1)
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t in range(1, 4):
            g = gradient(x, made["y"], run.weights.params, old, 5.0 * round) / 4
            m, v = 0.5 * m + 0.5 * g, 0.9 * v + 0.1 * g * g
            x = x - 0.1 * (m / (1 - 0.5**t)) / (torch.sqrt(v / (1 - 0.9**t)) + 1e-8)
        yield close(f"error of the inputs generated in round {round}", x, made["x"], 1e-9)
        run.run_round()
        noise.load_state(run.state())
