"""The law *objective*: which problem a drift correction solves with clients of unequal size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import kedge.parts  # noqa: F401  (registers the built-in parts)
from kedge.check.laws import LawViolation, objective
from kedge.check.objective import fixed_points, name_objective, solved
from kedge.check.problems import images, minimum
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part, Sum, parts
from kedge.core.work import Workload
from kedge.errors import HookError
from kedge.parts import SCAFFOLD, FedDC, FedDyn, FedPVR, FedSpeed
from kedge.parts.drift import release_drift
from kedge.sim.fleet import Fleet

SOLVERS = {"scaffold", "feddyn", "feddc", "fedspeed", "fedpvr", "fedtr"}


def test_every_drift_correction_claims_its_objective() -> None:
    assert {name for name in parts if parts[name].solves is not None} == SOLVERS


@pytest.mark.parametrize("name", ["feddyn:official", "feddc:official"])
@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_alpha_over_the_share_solves_the_same_problem(name: str, engine: str) -> None:
    [part] = parse(name).parts
    for point in fixed_points(part, engine, "size"):
        assert point.got == pytest.approx(point.expected, abs=1e-8), point.what


class PlainMean(SCAFFOLD):
    def reply(self, v: Any, weights: Any) -> Any:  # c_k counts alike, whatever the client's size
        new, upload = super().reply(v, weights)
        return new, Sum(tree.scale(upload.value, 1 / v.info.share))


class PlainHead(PlainMean, FedPVR):
    pass


class PlainDyn(FedDyn):
    needs_sum = True

    def server_step(self, r: Any, weights: Any) -> Any:
        h = tree.map(lambda h, s: h - self.alpha / r.num_clients * s, r.server, r.sum_delta)
        params = tree.map(lambda h, w: w - h / self.alpha, h, weights.params)
        return weights._replace(params=weights.params | params), h


class PlainDrift(FedSpeed):
    needs_sum = True

    def server_step(self, r: Any, weights: Any) -> Any:
        return release_drift(r, weights, r.server, r.sum_delta)


class PlainSlope(FedDC):
    def reply(self, v: Any, weights: Any) -> Any:
        new, upload = super().reply(v, weights)
        return new, Sum(tree.scale(upload.value, 1 / v.info.share))


@pytest.mark.parametrize("cls", [PlainMean, PlainHead, PlainDyn, PlainDrift, PlainSlope])
def test_the_law_notices_another_mean(cls: type[Part]) -> None:
    with pytest.raises(LawViolation, match="with weighting = size"):
        objective(cls())


def test_two_quadratics_of_one_and_three_samples() -> None:
    """One-step FedAvg settles at the weighted minimum; ten steps, at neither."""
    h, a = (1.0, 10.0), (0.0, 1.0)
    assert minimum(h, a, (1, 3)) == pytest.approx(0.967742, abs=1e-6)
    assert minimum(h, a, (1, 1)) == pytest.approx(0.909091, abs=1e-6)
    assert name_objective(0.967742) == "weighted"
    assert name_objective(0.909091) == "unweighted"
    assert solved(parse("fedavg"))[0] == name_objective(float("nan")) == "neither"
    assert solved(SCAFFOLD()) == ("weighted", pytest.approx(0.967742, abs=1e-6))


def test_share_is_exactly_one_for_equal_sizes() -> None:
    for size in (1, 3, 7, 49, 12345):
        for clients in (2, 3, 10, 77):
            assert Workload(clients, size * clients).share_of(size) == 1.0
    assert Workload(4, 80).share_of(30) == 1.5
    assert Workload(4, 80, weighting="uniform").share_of(30) == 1.0


def test_equal_sizes_are_the_plain_mean_bit_for_bit() -> None:
    """With equal sizes the share is 1, so SCAFFOLD's corrections are those of the plain rule."""

    class Plain(SCAFFOLD):
        name = "scaffold"

        def reply(self, v: Any, weights: Any) -> Any:
            k_eta = v.info.effective_steps * v.info.lr
            new = tree.map(
                lambda ck, c, x, y: ck - c + (x - y) / k_eta,
                v.client, v.sent, v.anchor.params, weights.params,
            )  # fmt: skip
            return new, Sum(tree.sub(new, v.client))

    for engine in ("loop", "vector"):
        runs = [images(sizes=(7, 7, 7)).simulate(p, engine) for p in (SCAFFOLD(), Plain())]
        for run in runs:
            for _ in range(3):
                run.run_round()
        assert tree.equal(runs[0].state(), runs[1].state())


def test_lanes_of_one_fleet_may_differ_in_weighting() -> None:
    settings = [("size", "feddyn"), ("uniform", "feddyn")]
    alone = [images().simulate(m, "vector", weighting=w) for w, m in settings]
    together = [images().simulate(m, "vector", weighting=w) for w, m in settings]
    fleet = Fleet(together)
    for _ in range(3):
        fleet.run_round()
        for run in alone:
            run.run_round()
    for one, other in zip(alone, together, strict=True):
        assert tree.gap(one.state(), other.state()) < 1e-12
    assert tree.gap(alone[0].weights, alone[1].weights) > 1e-4


@dataclass(frozen=True)
class Undeclared(Part):
    def server_step(self, r: Any, weights: Any) -> Any:
        return weights, r.share_delta


def test_share_delta_must_be_declared() -> None:
    with pytest.raises(HookError, match="declare needs_share_sum = True"):
        images().simulate(Undeclared()).run_round()
