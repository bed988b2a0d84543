"""FedTR: every option, and faults that its identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from kedge.check.identities.common import features_of
from kedge.check.identities.fedtr import client_gradient, convex
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.optim import SGD
from kedge.core.part import Mean, Sum, parts
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError
from kedge.parts.fedtr import FedTR
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class CohortDrift(FedTR):
    def server_step(self, r, weights):  # the cohort's drift in place of everybody's
        new, server = super().server_step(r, weights)
        if self.drift_rule != "accumulate":
            return new, server
        moved = tree.map(lambda d, w: w + d, r.mean_delta, weights.params)
        return weights._replace(params=moved), server


@dataclass(frozen=True)
class Uniform(FedTR):
    needs_sum = True

    def server_step(self, r, weights):  # 1/N whatever the sizes
        new, server = super().server_step(r, weights)
        if self.drift_rule != "accumulate":
            return new, server
        mean = tree.map(lambda d, s: d + s / r.num_clients, r.server["drift"], r.sum_delta)
        moved = tree.map(lambda d, w: w + d, mean, weights.params)
        return weights._replace(params=moved), server | {"drift": mean}


@dataclass(frozen=True)
class NotApplied(FedTR):
    def server_step(self, r, weights):  # the drift is kept but not added
        return weights, super().server_step(r, weights)[1]


@dataclass(frozen=True)
class DriftSign(FedTR):
    def _drifted_delta(self, v, params):  # w - w_i
        drift = v.local["drift"] if self.drift_rule == "descent" else v.client["drift"]
        return tree.map(lambda d, p, w: d - (p - w), drift, params, v.anchor.params)


@dataclass(frozen=True)
class LostDrift(FedTR):
    def reply(self, v, weights):  # the client forgets d
        kept, uploads = super().reply(v, weights)
        return kept | {n: v.client[n] for n in kept if n == "drift"}, uploads


@dataclass(frozen=True)
class WholeSquare(FedTR):
    def term(self, v, params, batch, out):  # alpha in place of alpha/2
        term = super().term(v, params, batch, out)
        return 2 * term if self.drift_rule != "none" else term


@dataclass(frozen=True)
class DescentUnscaled(FedTR):
    def observe(self, v, params, batch, out):  # alpha is missing in the step of d
        if self.drift_rule != "descent":
            return v.local
        drifted = self._drifted_delta(v, params)
        return {"drift": tree.map(lambda d, u: d - self.eta_g * u, v.local["drift"], drifted)}


@dataclass(frozen=True)
class DescentUnsent(FedTR):
    def reply(self, v, weights):  # w_i is sent without d_i
        kept, uploads = super().reply(v, weights)
        if self.drift_rule == "descent":
            uploads = uploads | {"drift": Mean(tree.zeros_like(v.local["drift"]))}
        return kept, uploads


@dataclass(frozen=True)
class DescentResets(FedTR):
    def prepare(self, v):  # d starts from 0 in every round, persistent or not
        local = super().prepare(v)
        return {n: tree.zeros_like(d) for n, d in local.items()}


@dataclass(frozen=True)
class MeanOfMeans(FedTR):
    def reply(self, v, weights):  # clients' centroids averaged without their counts
        kept, uploads = super().reply(v, weights)
        count = uploads["count"].value
        mean = uploads["sum"].value / count.clamp_min(1)[:, None]
        there = (count > 0).to(mean.dtype)
        return kept, uploads | {"sum": Sum(mean), "count": Sum(there)}


@dataclass(frozen=True)
class Untrained(FedTR):
    def reply(self, v, weights):  # centroids of the received extractor
        kept, uploads = super().reply(v, weights)
        return kept, uploads | self._centroids(v, v.anchor)


@dataclass(frozen=True)
class TrainingMode(FedTR):
    def _centroids(self, v, weights):  # features normalised by the piece of data at hand
        def piece(batch, mask):
            own = F.one_hot(batch.y, v.task.outputs).to(mask.dtype) * mask[:, None]
            features = v.forward(weights, batch.x).features
            return {"sum": own.T @ features, "count": own.sum(0)}

        return {n: Sum(x) for n, x in v.sweep(piece).items()}


@dataclass(frozen=True)
class ForgetsClasses(FedTR):
    def server_step(self, r, weights):  # a class that nobody had loses its centroid
        weights, server = super().server_step(r, weights)
        there = (r.uploads["count"] > 0).to(server["valid"].dtype)
        return weights, server | {
            "centroids": server["centroids"] * there[:, None],
            "valid": there,
        }


@dataclass(frozen=True)
class PullsToZero(FedTR):
    def send(self, server):  # classes without a centroid are pulled to the origin
        return super().send(server) | {"valid": torch.ones_like(server["valid"])}


FAULTY = [
    CohortDrift, Uniform, NotApplied, DriftSign, LostDrift, WholeSquare, DescentUnscaled,
    DescentUnsent, DescentResets, MeanOfMeans, Untrained, TrainingMode, ForgetsClasses, PullsToZero,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[FedTR]) -> None:
    assert is_found(cls())


# -- options on both engines ----------------------------------------------------------------------

OPTIONS = [
    "fedtr:paper",
    "fedtr(drift_rule=descent, persistent=true, alpha=1, eta_g=0.3)",
    "fedtr(drift_rule=none)",
    "fedtr(personal_head=true)",
    "fedtr(drift_rule=descent, personal_head=true, persistent=true)",
    "fedtr(drift_rule=none, personal_head=true, reduction=sum)",
]


@pytest.mark.long
@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("law", ["engines", "resumable", "frugal"])
def test_laws_hold_for_every_option(text: str, law: str) -> None:
    LAWS[law](parse(text).parts[0])


def test_presets_are_written_back_and_validated() -> None:
    for text in (*OPTIONS, "fedtr"):
        method = parse(text)
        assert parse(repr(method)) == method
    assert set(parts["fedtr"].presets) == {"paper"}
    printed = FedTR(drift_rule="descent", alpha=2, reduction="sum", persistent=True)
    assert parse("fedtr:paper").parts[0] == printed
    with pytest.raises(FieldError, match="drift_rule"):
        FedTR(drift_rule="definition")  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="no meaning for regression"):
        images(task="regression").simulate("fedtr")


def test_alpha_zero_is_not_fedavg_but_no_drift_is() -> None:
    """With alpha = 0 the server still adds the mean drift: the first update counts twice."""
    plain, own = images().simulate("fedavg"), images().simulate("fedtr(alpha=0, lambda_R=0)")
    none = images().simulate("fedtr(drift_rule=none, lambda_R=0)")
    for run in (plain, own, none):
        run.run_round()
    assert tree.gap(plain.weights, own.weights) > 1e-3
    assert tree.equal(plain.weights, none.weights)


# -- single options by hand -----------------------------------------------------------------------


def test_fedavg_settles_beside_the_optimum_and_descent_does_too() -> None:
    norms = {}
    for method in ("fedavg", "fedtr(alpha=1, lambda_R=0)", "fedtr:paper(lambda_R=0, eta_g=0.1)"):
        run = convex().simulate(method, "vector")
        for _ in range(45):
            run.run_round()
        mean = tree.map(
            lambda a, b, c: (a + b + 2 * c) / 4, *(client_gradient(run, k) for k in range(3))
        )
        norms[method[:8]] = float(tree.sq_norm(mean).sqrt())
    assert norms["fedavg"] > 0.1
    assert norms["fedtr:pa"] > 0.01
    assert norms["fedtr(al"] < 1e-9


def test_the_mean_drift_runs_over_all_clients() -> None:
    """The server holds the mean of d_i over all clients, weighted by size; clients that did not
    take part yet count with d = 0."""
    run = images(sizes=(5, 9, 14)).simulate(FedTR())
    for k in (0, 2, 1):
        anchor = run.weights.params
        own = run.clients.answer(run.session.request("", [k])).summed
        delta = tree.scale(own.delta.params, 1 / own.weight)
        run.run_round([k])
        slot, drifts = run.server.slots["fedtr"], run.store.rows["fedtr"]["drift"]
        mean = tree.map(lambda d: (5 * d[0] + 9 * d[1] + 14 * d[2]) / 28, drifts)
        assert tree.gap(slot["drift"], mean) < 1e-12
        wanted = tree.map(lambda w, d, s: w + d + s, anchor, delta, mean)
        assert tree.gap(run.weights.params, wanted) < 1e-12


@pytest.mark.parametrize("persistent", [False, True])
def test_descent_starts_anew_unless_persistent(persistent: bool) -> None:
    """At learning rate 0 only d moves: d <- d - eta_g alpha d stays 0 from 0; from a stored d it
    shrinks by (1 - eta_g alpha) a step."""
    part = FedTR(drift_rule="descent", alpha=1.0, eta_g=0.25, persistent=persistent)
    run = images(sizes=(5, 5), batch=5, steps=3, optim=SGD(lr=0.0)).simulate(part)
    before = run.weights.params
    if persistent:
        run.store.rows["fedtr"]["drift"] = tree.map(
            lambda d: torch.ones_like(d), run.store.rows["fedtr"]["drift"]
        )
    run.run_round()
    size = 0.75**3 if persistent else 0.0
    moved = tree.sub(run.weights.params, before)
    assert tree.gap(moved, tree.map(lambda w: torch.full_like(w, size), before)) < 1e-12
    assert bool(run.bound.client()["fedtr"]) == persistent


def test_head_stays_on_the_client() -> None:
    run = images().simulate(FedTR(personal_head=True))
    head = run.bound.model.head_names()
    start = run.weights.params
    assert not set(head) & set(run.server.slots["fedtr"]["drift"])
    for _ in range(2):
        run.run_round()
    for name in head:
        assert torch.equal(run.weights.params[name], start[name])
        own = run.store.rows["private"]["params"][name]
        assert float((own[0] - own[1]).abs().max()) > 1e-4
        assert torch.equal(run.personal([1]).params[name][0], own[1])


def test_the_pull_does_not_touch_the_head() -> None:
    """Two runs that differ in lambda_R from round 1 on have the same head after one step."""
    heads = []
    for weight in (0.0, 5.0):
        run = images(steps=1).simulate(FedTR(drift_rule="none", lambda_R=weight))
        run.run_round()
        run.run_round()
        heads.append(run.weights.params)
    for name, p in heads[0].items():
        gap = float((p - heads[1][name]).abs().max())
        assert (gap < 1e-14) == name.startswith("head."), name


def test_centroids_are_means_over_all_samples_without_augmentation() -> None:
    """One step on 5 of 14 augmented samples at learning rate 0."""
    problem = images(sizes=(5, 14), steps=1, optim=SGD(lr=0.0))
    plain = problem.federation
    clients = [plain.rows[:5], plain.rows[5:]]
    noisy = Federation(plain.x, plain.y, clients, plain.task, augment="crop(3)+flip", dtype=DOUBLE)
    run = replace(problem, federation=noisy).simulate(FedTR())
    run.run_round([1])
    batch = plain.clean(clients[1])
    features = features_of(run, batch.x)
    for j in batch.y.unique():
        got = run.server.slots["fedtr"]["centroids"][j]
        assert tree.gap(got, features[batch.y == j].mean(0)) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_centroids_under_batch_statistics_are_those_of_the_client(engine: str) -> None:
    """Rows that fill a piece of a sweep must not change the statistics of the others."""
    problem = images(norm="bn", sizes=(8, 16), batchnorm="batch")
    run = problem.simulate(FedTR(drift_rule="none", lambda_R=0.0), engine=engine)
    run.run_round([1])  # alone, so that the next global model is its own
    batch = run.federation.clean(run.federation.rows[8:])
    features = features_of(run, batch.x)
    for j in batch.y.unique():
        got = run.server.slots["fedtr"]["centroids"][j]
        assert tree.gap(got, features[batch.y == j].mean(0)) < 1e-12


def test_defaults() -> None:
    part = FedTR()
    assert (part.drift_rule, part.alpha, part.lambda_R) == ("accumulate", 0.1, 1.0)
    assert (part.reduction, part.persistent, part.personal_head) == ("mean", False, False)
    slot = images().simulate(replace(part, drift_rule="none")).server.slots["fedtr"]
    assert set(slot) == {"centroids", "valid"}
    assert slot["centroids"].dtype == DOUBLE
