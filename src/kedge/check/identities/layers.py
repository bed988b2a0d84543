"""Identities of the methods in parts/layers.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import (
    LR,
    STEPS,
    A,
    H,
    after_steps,
    close,
    cross_entropy,
    descended,
    first_batch,
    pair,
    picked,
    run_quadratics,
    samples_of,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import LocalSteps, images, position, quadratics
from kedge.core import tree
from kedge.core.task import Batch
from kedge.core.tree import Params, Weights
from kedge.parts.layers import Ditto, FedBN, FedPer, FedRep, FineTune, Local
from kedge.sim.simulation import Simulation


@oracle(FedPer)
def heads_stay_private_and_bodies_are_averaged(cls: type[FedPer]) -> Iterator[Claim]:
    """Two full-batch steps on each of two clients of equal size, head and body together by
    autograd: the server's body is the mean of the two, its head is unchanged; each client's model
    is that body with its own head. Detects a head that is averaged, frozen, or trained
    separately."""
    run = images(sizes=(5, 5), batch=5, steps=2).simulate(cls())
    yield from _parted(run, set(run.bound.model.head_names()))


@oracle(FedBN)
def batchnorm_stays_private(cls: type[FedBN]) -> Iterator[Claim]:
    """The same with BatchNorm in place of the head. Its running mean and variance are private, too:
    those of each client's own two batches. Detects private parameters with shared statistics, and
    the reverse."""
    run = images(sizes=(5, 5), batch=5, steps=2, norm="bn").simulate(cls())
    own = {n for n in (*run.weights.params, *run.weights.buffers) if n.startswith("stage1.1.")}
    yield Claim("number of BatchNorm's parameters and buffers", 5.0, float(len(own)), 0.0)
    yield from _parted(run, own)


@oracle(Local)
def clients_train_alone(cls: type[Local]) -> Iterator[Claim]:
    """On f_k = h_k (w - a_k)^2/2 from w = 0, T rounds of tau steps lead to a_k (1 - (1 - lr h_k)^(T
    tau)); the server stays at 0."""
    run = run_quadratics(cls(), rounds=3)
    own = run.personal().params["head.weight"].flatten().tolist()
    for k in range(2):
        yield Claim(f"w of client {k}", after_steps(k, 0.0, 3 * STEPS), own[k])
    yield Claim("the server", 0.0, position(run), 0.0)


@oracle(Local)
def nothing_is_communicated(cls: type[Local]) -> Iterator[Claim]:
    """No parameter or buffer of the network is sent or uploaded; each client continues from its own
    weights, as a single client does under FedAvg."""
    problem = images(sizes=(5, 5), batch=5, norm="bn")
    run, plain = problem.simulate(cls()), problem.simulate("fedavg")
    start = run.weights
    for _ in range(2):
        done = run.run_round()
        plain.run_round([0])
        yield Claim("bytes per round", 0.0, float(done.up_bytes + done.down_bytes), 0.0)
    yield close("the server", run.weights, start, 0.0)
    own = tree.take(run.personal(), 0)
    yield close("error of the model of client 0", own, plain.weights)


@oracle(Ditto)
def personal_model_by_hand(cls: type[Ditto]) -> Iterator[Claim]:
    """On quadratics: u_k <- u_k - lr (h_k (u_k - a_k) + lam (u_k - w)), w as received in the round,
    tau steps per round; w is FedAvg's, the mean of a_k + r_k (w - a_k). Client 1 skips round 1.
    Detects a flipped or missing proximal term, one towards the local or the next w, and a u_k that
    restarts each round."""
    lam, rounds = 0.7, ([0, 1], [0], [0, 1])
    run = pair(STEPS).simulate(cls(lam=lam))
    w, u = 0.0, [0.0, 0.0]
    for cohort in rounds:
        local = []
        for k in cohort:
            for _ in range(STEPS):
                u[k] -= LR * (H[k] * (u[k] - A[k]) + lam * (u[k] - w))
            local.append(after_steps(k, w))
        w = sum(local) / len(local)
        run.run_round(cohort)
    own = run.personal().params["head.weight"].flatten().tolist()
    for k in range(2):
        yield Claim(f"w of client {k}", u[k], own[k])
    yield Claim("the shared model", w, position(run))


@oracle(Ditto)
def personal_model_has_its_own_batchnorm(cls: type[Ditto]) -> Iterator[Claim]:
    """With lam = 0, u is the initial model trained by client 0 alone, BatchNorm statistics
    included; after one round that is FedAvg's model of this client. In round 1 client 1 changes w,
    and u is unaffected."""
    problem = images(sizes=(5, 9), batch=5, norm="bn", steps=2)
    run = problem.trained(cls(lam=0.0), clients=[0])
    first = tree.take(run.personal([0]), 0)
    yield close("error after one round", first, run.weights)
    run.run_round([1])
    yield close("change in a round of another client", tree.take(run.personal([0]), 0), first, 0.0)
    w, buffers = first
    for t in range(2):
        w, buffers = _step(run, w, buffers, first_batch(run, 0, t))
    run.run_round([0])
    got = tree.take(run.personal([0]), 0)
    yield close("error of the parameters", got.params, w)
    yield close("error of the statistics", got.buffers, buffers)


@oracle(FineTune)
def personal_model_before_aggregation(cls: type[FineTune]) -> Iterator[Claim]:
    """On quadratics client k ends its steps at a_k + r_k (w - a_k), from the w of its last round; w
    is FedAvg's. A client that has never trained uses w. Detects the model after aggregation, a
    stale start, and zeros for new clients."""
    h, a = (*H, 3.0), (*A, 0.5)
    run = quadratics(h, a, LR, STEPS).simulate(cls())
    w = 0.0
    personal: dict[int, float] = {}
    for cohort in ([0, 1], [0], [0]):
        local = {k: a[k] + (1 - LR * h[k]) ** STEPS * (w - a[k]) for k in cohort}
        personal |= local
        w = sum(local.values()) / len(local)
        run.run_round(cohort)
    own = run.personal().params["head.weight"].flatten().tolist()
    for k, what in enumerate(("trained in the last round", "trained in round 0", "never trained")):
        yield Claim(f"w of client {k}, {what}", personal.get(k, w), own[k])
    yield Claim("the shared model", w, position(run))


@oracle(FineTune)
def personal_model_includes_statistics(cls: type[FineTune]) -> Iterator[Claim]:
    """With BatchNorm each client has its own trained parameters and statistics, whose mean is the
    shared model."""
    run = images(sizes=(5, 5), batch=5, norm="bn").simulate(cls())
    local = LocalSteps(run, 1)
    for t in range(len(local.batches)):
        local.step(t)
    run.run_round()
    own = run.personal()
    yield close("error of the model of client 1", tree.take(own, 1), local.carry.weights)
    mean = tree.map(lambda x: x.double().mean(0), own)
    shared = tree.map(lambda x: x.double(), run.weights)
    yield close("error of the mean", mean, shared)


def _parted(run: Simulation, private: set[str]) -> Iterator[Claim]:
    """Claims about one round of two clients by autograd, with private leaves."""
    start = run.weights
    local = []
    for k in range(2):
        params, buffers = start
        for t in range(2):
            params, buffers = _step(run, params, buffers, first_batch(run, k, t))
        local.append(params | {n: b.double() for n, b in buffers.items()})
    run.run_round()
    old, shared = ({**w.params, **w.buffers} for w in (start, run.weights))
    what = "change of the private leaves on the server"
    yield close(what, picked(shared, private), picked(old, private), 0.0)
    mean = {n: (x + local[1][n]) / 2 for n, x in local[0].items()}
    public = set(mean) - private
    yield close("error of the averaged leaves", picked(shared, public), picked(mean, public))
    own = run.personal()
    for k in range(2):
        model = {**tree.take(own.params, k), **tree.take(own.buffers, k)}
        expected = mean | picked(local[k], private)
        yield close(f"error of the model of client {k}", picked(model, expected), expected)


def _step(run: Simulation, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Params]:
    """One step on cross-entropy by autograd: ``(params, buffers)``."""
    model = run.bound.model

    def loss(params: Params) -> Tensor:
        out = model.forward(Weights(params, buffers), batch.x, "train")
        return F.cross_entropy(out.logits, batch.y)

    new = model.forward(Weights(params, buffers), batch.x, "train").buffers
    return descended(params, loss), tree.detach(new)


@oracle(FedRep)
def head_first_then_body(cls: type[FedRep]) -> Iterator[Claim]:
    """Two full-batch steps: the head takes a gradient step with the old body, then the body with
    the new head; the server's head is unchanged."""
    run = images(sizes=(5, 5), batch=5, steps=2).simulate(cls(head_share=0.5))
    start = run.weights.params
    batch = samples_of(run, 0)
    head = set(run.bound.model.head_names())
    params = dict(start)
    for names in (head, set(start) - head):
        step = descended(params, cross_entropy(run, batch))
        params |= picked(step, names)
    run.run_round([0])
    own = tree.take(run.store.rows["private"]["params"], 0)
    found = run.weights.params
    for what, names, a, b, tolerance in (
        ("change of the server's head", head, found, start, 0.0),
        ("error of the client's head", head, own, params, 1e-12),
        ("error of the body", set(start) - head, found, params, 1e-12),
    ):
        yield close(what, picked(a, names), picked(b, names), tolerance)
