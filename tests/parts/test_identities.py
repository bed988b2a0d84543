"""The papers' identities hold, and they fail when a sign, a factor or a stop-gradient is wrong."""

from dataclasses import dataclass

import pytest
import torch

from kedge.check import check_part
from kedge.check.oracles import oracles_of
from kedge.check.problems import images, on_engine, position, quadratics
from kedge.core import tree
from kedge.core.part import Part, Sum, parts
from kedge.parts.aggregation import FedAvgM, FedNova
from kedge.parts.contrastive import MOON
from kedge.parts.layers import FedRep
from kedge.parts.pools import Mixup
from kedge.parts.proximal import FedDyn, FedProx, FedSAM
from kedge.parts.variates import SCAFFOLD
from tests.parts.faults import is_found

NAMES = [None, *(parts[name] for name in parts)]
IDS = ["fedavg", *parts]


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("cls", NAMES, ids=IDS)
def test_identities(cls: type[Part] | None, engine: str) -> None:
    with on_engine(engine):
        found = [claim for _, claims in oracles_of(cls() if cls else None) for claim in claims()]
    assert found, "a part needs at least one identity from its paper"
    for claim in found:
        assert claim.holds, f"{claim.what}: {claim.detail()}"


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(
    ("method", "expected"),
    [("fedavg", 0.71344), ("scaffold", 0.90909), ("feddyn(alpha=1)", 0.90909)],
)
def test_two_quadratics_on_both_engines(engine: str, method: str, expected: float) -> None:
    run = quadratics().simulate(method, engine)
    for _ in range(60):
        run.run_round()
    assert position(run) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_corrections_commute(engine: str) -> None:
    runs = [images().simulate(m, engine) for m in ("scaffold+fedsam", "fedsam+scaffold")]
    for run in runs:
        for _ in range(3):
            run.run_round()
    gap = max(
        float((a - b).abs().max())
        for a, b in zip(*(tree.leaves(r.weights) for r in runs), strict=True)
    )
    assert gap < 1e-14


# Each of these has one fault; the comment names it, and the check must find it.


@dataclass(frozen=True)
class ScaffoldSign(SCAFFOLD):
    def reply(self, v, weights):  # x - y turned round, as in two public libraries
        k_eta = v.info.effective_steps * v.info.lr
        new = tree.map(
            lambda ck, c, x, y: ck - c - (x - y) / k_eta,
            v.client,
            v.sent,
            v.anchor.params,
            weights.params,
        )
        return new, Sum(tree.sub(new, v.client))


@dataclass(frozen=True)
class ScaffoldLostState(SCAFFOLD):
    def reply(self, v, weights):  # the client forgets c_k
        _, upload = super().reply(v, weights)
        return v.client, upload


@dataclass(frozen=True)
class ScaffoldCohort(SCAFFOLD):
    def server_step(self, r, weights):  # 1/|S| in place of 1/N
        return weights, tree.map(lambda c, d: c + d / r.cohort, r.server, r.uploads)


@dataclass(frozen=True)
class ProxUnsquared(FedProx):
    def term(self, v, params, batch, out):  # the norm, not its square
        return 0.5 * self.mu * torch.sqrt(tree.sq_dist(params, v.anchor.params) + 1e-12)


@dataclass(frozen=True)
class ProxSign(FedProx):
    def term(self, v, params, batch, out):
        return -super().term(v, params, batch, out)


@dataclass(frozen=True)
class DynMemorySign(FedDyn):
    def reply(self, v, weights):
        new, upload = super().reply(v, weights)
        return tree.map(lambda g, n: 2 * g - n, v.client, new), upload


@dataclass(frozen=True)
class DynNoServer(FedDyn):
    def server_step(self, r, weights):  # h is kept but not applied
        return weights, super().server_step(r, weights)[1]


@dataclass(frozen=True)
class NovaUnscaled(FedNova):
    def combine(self, r):  # the mean a_k is forgotten
        return tree.map(lambda d: d / r.weight, r.sums["d"])


@dataclass(frozen=True)
class MomentumDamped(FedAvgM):
    def server_step(self, r, weights):  # (1 - beta) on the update
        delta = tree.sub(weights.params, r.anchor.params)
        u = tree.map(lambda u, d: self.beta * u + (1 - self.beta) * d, r.server, delta)
        return weights._replace(params=tree.add(r.anchor.params, u)), u


@dataclass(frozen=True)
class MoonSwapped(MOON):
    def term(self, v, params, batch, out):  # pushes from the global model, pulls to the previous
        return self.mu * 2 * torch.log(torch.tensor(2.0)) - super().term(v, params, batch, out)


@dataclass(frozen=True)
class MoonNeverStores(MOON):
    def reply(self, v, weights):  # the previous model stays the first one
        return v.client, {}


@dataclass(frozen=True)
class SamDescends(FedSAM):
    def correct(self, v, params, grads):  # steps to the best nearby point
        size = self.rho / torch.sqrt(tree.sq_norm(grads))
        best = tree.map(lambda w, g: w - size * g, params, grads)
        return tree.sub(v.grad(best), grads)


@dataclass(frozen=True)
class MixupLabels(Mixup):
    def transform(self, v, batch):  # mixes inputs, keeps labels
        return super().transform(v, batch)._replace(target=None)


@dataclass(frozen=True)
class RepTogether(FedRep):
    def trainable(self, v, params):  # trains body and head at the same time
        return dict.fromkeys(params, True)


FAULTY = [
    ScaffoldSign, ScaffoldLostState, ScaffoldCohort, ProxUnsquared, ProxSign, DynMemorySign,
    DynNoServer, NovaUnscaled, MomentumDamped, MoonSwapped, MoonNeverStores, SamDescends,
    MixupLabels, RepTogether,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


@pytest.mark.long
def test_identities_are_inherited_and_reported() -> None:
    report = check_part(ScaffoldSign())
    assert not report.ok
    failed = {f.name for f in report.failures()}
    assert "one full batch step: c_1 is the gradient" in failed
    assert "stable" in failed
