"""FedNova and FedAvgM: what stands beside them, and faults that their identities must find."""

from dataclasses import dataclass

import pytest

import kedge
from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.optim import SGD, Adam
from kedge.core.part import Part
from kedge.core.work import LocalWork
from kedge.errors import IncompatibleError
from kedge.parts.aggregation import FedAvgM, FedNova
from kedge.sim.fleet import Fleet
from tests.parts.faults import is_found


@dataclass(frozen=True)
class NovaIgnoresThePull(FedNova):
    def contribute(self, v, delta):
        a, n = v.info.effective_steps, v.info.weight
        return {"d": tree.scale(delta, n / a), "a": n * a}


@dataclass(frozen=True)
class NesterovWithTheOldU(FedAvgM):
    def server_step(self, r, weights):
        delta = tree.sub(weights.params, r.anchor.params)
        step = tree.axpy(self.beta, r.server, delta)
        params = tree.axpy(self.lr, step, r.anchor.params)
        return weights._replace(params=params), step


@dataclass(frozen=True)
class LearningRateIgnored(FedAvgM):
    def server_step(self, r, weights):
        part = FedAvgM(beta=self.beta, nesterov=self.nesterov)
        return part.server_step(r, weights)


FAULTY = [NovaIgnoresThePull, NesterovWithTheOldU, LearningRateIgnored]


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_fednova_beside_fedprox_is_fedprox_at_equal_steps(engine: str) -> None:
    optim = SGD(lr=0.05, momentum=0.6)
    problem = quadratics((1.0, 10.0), steps=4, copies=(1, 3), optim=optim)
    runs = [problem.simulate(m, engine) for m in ("fednova+fedprox(mu=3)", "fedprox(mu=3)")]
    for run in runs:
        for _ in range(5):
            run.run_round()
    assert position(runs[0]) == pytest.approx(position(runs[1]), abs=1e-13)


def test_fednova_beside_fedprox_settles_where_equal_steps_do() -> None:
    """With one and six steps FedProx settles at another point than with equal steps for both;
    normalised updates come nearer to the optimum of the weighted losses."""
    best = (1 * 0.0 + 6 * 1.0) / 7  # weights 1 and 6, equal curvatures
    gaps = []
    for method in ("fedprox(mu=1)", "fednova+fedprox(mu=1)"):
        problem = quadratics((1.0, 1.0), (0.0, 1.0), 0.1, None, copies=(1, 6))
        run = problem.simulate(method)
        for _ in range(30):
            run.run_round()
        gaps.append(abs(position(run) - best))
    assert gaps[1] < 0.4 * gaps[0]


def test_lanes_have_pulls_and_optimisers_of_their_own() -> None:
    ways = [(0.1, SGD(0.1, 0.5)), (2.0, SGD(0.1, 0.9)), (2.0, SGD(0.05, 0.9))]

    def make() -> list[kedge.Simulation]:
        work = LocalWork(5, epochs=1.0)
        return [
            images(norm="bn").simulate(f"fednova+fedprox(mu={mu})", "vector", optim=o, work=work)
            for mu, o in ways
        ]

    together, alone = make(), make()
    fleet = Fleet(together)
    for _ in range(2):
        fleet.run_round()
        for sim in alone:
            sim.run_round()
    assert fleet.lanes == [9]
    assert max(tree.gap(a.state(), b.state()) for a, b in zip(together, alone, strict=True)) < 1e-12
    assert tree.gap(together[0].weights, together[1].weights) > 1e-4


@pytest.mark.parametrize("other", ["feddyn", "feddc", "fedspeed", "fedtr"])
def test_fednova_is_refused_beside_a_pull_that_it_cannot_tell(other: str) -> None:
    for method in (f"fednova+{other}", f"{other}+fednova"):
        with pytest.raises(IncompatibleError, match=f"cannot tell how {other} shrinks a step"):
            parse(method)


def test_fednova_stands_beside_fedtr_without_drift_and_ditto() -> None:
    for method in ("fednova+fedtr(drift_rule=none)", "fednova+ditto"):
        assert len(parse(method).parts) == 2


def test_fednova_beside_fedprox_needs_an_optimiser_that_tells_its_steps() -> None:
    problem = images(optim=Adam(0.01))
    with pytest.raises(IncompatibleError, match="how fedprox shrinks a step, which adam does not"):
        problem.simulate("fednova+fedprox(mu=1)")
    problem.simulate("fednova+fedprox(mu=0)")  # no pull
    problem.simulate("fednova")


def test_fedavgm_takes_nesterovs_momentum_unless_a_paper_took_another() -> None:
    assert FedAvgM().nesterov
    for preset in ("fedcog", "fedntd"):
        (part,) = parse(f"fedavgm:{preset}").parts
        assert not part.nesterov
