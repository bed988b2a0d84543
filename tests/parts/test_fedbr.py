"""FedBR: every option, the faults that its identities find, and how it goes with other parts."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kedge.check.problems import DOUBLE, Problem, images
from kedge.core import client, tree
from kedge.core.method import parse
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.view import View
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.errors import IncompatibleError
from kedge.parts.fedbr import FedBR
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

ENGINES = ("loop", "vector")
TINY: dict[str, Any] = FedBR.tiny


def both(problem: Problem, method: Any, rounds: int = 2, **options: Any) -> list[Simulation]:
    runs = [problem.simulate(method, engine, **options) for engine in ENGINES]
    for run in runs:
        for _ in range(rounds):
            run.run_round()
        assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-10
    return runs


# -- options ----------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "component 1 alone": {"mu": 0.0},
    "component 2 alone": {"lam": 0.0},
    "temperatures": {"inv_temperature1": 1.0, "inv_temperature2": 0.0},
    "more rows than in a batch": {"rows": 8},
    "one sample in a mean": {"samples": 1},
    "pool": {"means": 2},
    "means across clients": {"across": 2},
    "pool across clients": {"means": 2, "across": 3},
    "once": {"refresh": "once"},
    "mixture": {"mixture": 1},
    "mixture of three": {"mixture": 3, "refresh": "once"},
    "official projection": {"width": 0, "out": 0},
    "no max step": {"max_step": False},
    "mixture without max step": {"mixture": 1, "max_step": False},
}


@pytest.mark.long
@pytest.mark.parametrize("norm", ["bn", "gn"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_alike_on_both_engines(option: str, norm: str) -> None:
    problem = images(norm=norm, sizes=(5, 9))
    changed = both(problem, FedBR(**TINY | OPTIONS[option]), rounds=3)[0]
    plain = both(problem, FedBR(**TINY), rounds=3)[0]
    assert tree.gap(changed.weights, plain.weights) > 1e-9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mixture", [0, 1])
def test_without_weight_it_is_fedavg_bit_for_bit(engine: str, mixture: int) -> None:
    """Running statistics of BatchNorm included, as pseudo-data do not move them."""
    problem = images(norm="bn", optim=SGD(lr=0.05, momentum=0.9, weight_decay=1e-3))
    run = problem.simulate(FedBR(lam=0.0, mu=0.0, mixture=mixture, **TINY), engine)
    plain = problem.simulate("fedavg", engine)
    for _ in range(3):
        run.run_round()
        plain.run_round()
    assert tree.equal(run.weights, plain.weights)


def step_parts(part: FedBR) -> tuple[Any, Any, Any, View]:
    """The second step of a client: ``(params, batch, detached pass, view)`` of its max step."""
    run = images(sizes=(5, 9), batch=5, steps=2).simulate(part)
    run.run_round()
    run.survey(part, None)
    cohort = run.cohort([1])
    job = take_jobs(cohort.jobs, 0)
    carry = client.begin(run.bound.at(run.round), job)
    carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[0, 0])
    context = client.client_context(run.bound.at(run.round), job, carry.local, torch.tensor(1))
    batch = run.federation.clean(cohort.batches[0, 1])
    view = View(context, part, "ascend")
    out = tree.detach(view.forward(carry.weights.params, batch.x))
    return carry.weights.params, batch, out, view


def contrast(part: FedBR, projection: Any, params: Any, batch: Any, view: View) -> torch.Tensor:
    z_pseudo = view.forward(params, view.local["x"]).features
    z_real = view.forward(params, batch.x).features
    return part._contrast(projection, z_pseudo, view.local["z_global"], z_real)


def test_the_max_step_raises_the_contrast_and_changes_the_projection_alone() -> None:
    part = FedBR(**TINY)
    params, batch, out, view = step_parts(part)
    held = {n: x.clone() for n, x in params.items()}
    after = part.ascend(view, params, batch, out)
    low = contrast(part, view.local["projection"], params, batch, view)
    high = contrast(part, after["projection"], params, batch, view)
    assert float(high) > float(low)
    assert tree.equal(held, params)
    kept = {n: x for n, x in after.items() if n != "projection"}
    assert tree.equal(kept, {n: view.local[n] for n in kept})


def test_no_gradient_reaches_the_projection_or_the_global_model() -> None:
    part = FedBR(**TINY)
    params, batch, _, view = step_parts(part)
    assert not view.local["z_global"].requires_grad
    own = {n: p.clone().requires_grad_() for n, p in params.items()}
    fixed = [*tree.leaves(view.local["projection"]), *tree.leaves(view.anchor.params)]
    fixed = [p.requires_grad_() for p in fixed]
    term = part.term(view, own, batch, view.forward(own, batch.x))
    found = torch.autograd.grad(term, [*fixed, *own.values()], allow_unused=True)
    assert all(g is None for g in found[: len(fixed)])
    assert all(float(g.abs().max()) > 0 for g in found[len(fixed) :])


def test_without_a_max_step_the_projection_stays_as_it_was_drawn() -> None:
    run = images(sizes=(5, 9)).simulate(FedBR(max_step=False, **TINY))
    first = run.server.slots["fedbr"]["projection"]
    for _ in range(2):
        run.run_round()
    # the mean of equal numbers, so equal up to rounding
    assert tree.gap(first, run.server.slots["fedbr"]["projection"]) < 1e-15


@pytest.mark.parametrize(("refresh", "same"), [("once", True), ("round", False)])
def test_pseudo_data_are_made_once_or_every_round(refresh: str, same: bool) -> None:
    run = images().simulate(FedBR(refresh=refresh, **TINY))
    run.run_round()
    first = run.server.slots["fedbr"]["pseudo"]
    run.run_round()
    assert torch.equal(first, run.server.slots["fedbr"]["pseudo"]) is same


def test_once_asks_all_clients_and_each_round_its_cohort() -> None:
    """Client 2 has inputs of its own size, so its means are easily told."""
    x = torch.ones(9, 3, dtype=DOUBLE) + 0.01 * torch.arange(27, dtype=DOUBLE).reshape(9, 3)
    x[6:] *= 100
    federation = Federation(
        x, torch.arange(9) % 2, [range(3), range(3, 6), range(6, 9)], _classes(2), dtype=DOUBLE
    )
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    problem = Problem(federation, module.to(DOUBLE), images().work)
    for refresh, expected in (("once", True), ("round", False)):
        run = problem.simulate(FedBR(refresh=refresh, **TINY | {"rows": 40}))
        run.run_round([0, 1])
        assert bool((run.server.slots["fedbr"]["pseudo"] > 50).any()) is expected


def test_the_pool_is_the_union_of_all_means() -> None:
    """Algorithm 2: with as many rows as clients times means, each mean is used once."""
    part = FedBR(**TINY | {"rows": 6, "means": 2})
    run = images(sizes=(5, 9, 14)).simulate(part)
    cohort = run.cohort([0, 1, 2])
    answers = [client.survey(run.bound, take_jobs(cohort.jobs, i), part) for i in range(3)]
    union = torch.cat([a.uploads[part.name]["means"].value for a in answers]).flatten(1)
    run.survey(part, None)
    found = run.server.slots["fedbr"]["pseudo"].flatten(1)
    assert torch.equal(found.sort(0).values, union.sort(0).values)
    assert not torch.equal(found, union)


def test_a_small_pool_is_used_over_and_over() -> None:
    part = FedBR(**TINY | {"rows": 7, "means": 1})
    run = images(sizes=(5, 9, 14)).simulate(part)
    run.survey(part, None)
    found = run.server.slots["fedbr"]["pseudo"].flatten(1)
    _, uses = torch.unique(found, dim=0, return_counts=True)
    assert sorted(uses.tolist()) == [2, 2, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_means_of_clients_that_are_swept_in_several_pieces(engine: str) -> None:
    """Unit vectors tell which samples are in a mean: all of 300 are drawn, beyond a piece too."""
    x = torch.eye(320, dtype=DOUBLE)
    clients = [range(300), range(300, 320)]
    federation = Federation(x, torch.arange(320) % 2, clients, _classes(2), dtype=DOUBLE)
    module = torch.nn.Sequential(torch.nn.Linear(320, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    part = FedBR(rows=400, samples=7, width=2, out=2)
    run = Problem(federation, module.to(DOUBLE), images().work).simulate(part, engine)
    run.survey(part, None)
    counts = 7 * run.server.slots["fedbr"]["pseudo"]
    assert float((counts - counts.round()).abs().max()) < 1e-9
    assert counts.sum(1).tolist() == pytest.approx([7.0] * 400)
    assert bool((counts[:, :300].sum(1) * counts[:, 300:].sum(1) == 0).all())
    used = counts.sum(0) > 0
    assert float(used[:256].double().mean()) > 0.9
    assert float(used[256:300].double().mean()) > 0.9


def _classes(outputs: int) -> Any:
    from kedge import Classification

    return Classification(outputs)


@pytest.mark.parametrize(
    ("part", "features", "expected"),
    [
        (FedBR(), 512, 230_016),  # 0.23 M
        (FedBR(), 256, 164_480),  # 0.16 M
        (FedBR.presets["official"], 512, 2_099_712),  # 2.1 M
        (FedBR.presets["official"], 256, 525_568),  # 0.53 M
    ],
)
def test_size_of_the_projection(part: Any, features: int, expected: int) -> None:
    part = part if isinstance(part, FedBR) else FedBR(**part)
    symbols = {"F": features, "X": 3072, "R": 32}
    assert part.count(part.uploads, symbols) == expected
    assert part.count(part.sends, symbols) == expected + 32 * 3072
    assert replace(part, rows=5).count(part.sends, symbols) == expected + 5 * 3072


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"means": 2}, {"mixture": 1}, FedBR.presets["official"]])
def test_rows_of_zero_are_the_batch_size(options: dict[str, Any], engine: str) -> None:
    problem, small = images(sizes=(5, 9), batch=7), TINY | options
    runs = [problem.simulate(FedBR(**small | {"rows": rows}), engine) for rows in (0, 7)]
    for run in runs:
        run.run_round()
        run.run_round()
    assert runs[0].bound.spec.batch == 7
    assert tree.equal(runs[0].state(), runs[1].state())
    assert len(runs[0].server.slots["fedbr"]["pseudo"]) == 7


def test_default_rows() -> None:
    assert {parse(f"fedbr:{p}").parts[0].rows for p in FedBR.presets} == {0}  # type: ignore[attr-defined]
    assert str(parse("fedbr")) == "fedbr"
    run = images().simulate("fedbr(width=4, out=3)")
    assert len(run.server.slots["fedbr"]["pseudo"]) == run.session.workload.work.batch == 5
    federation = images().federation
    plain = Simulation(federation, images().module, "fedbr(width=4, out=3)")
    assert len(plain.server.slots["fedbr"]["pseudo"]) == LocalWork().batch == 32


# -- with others ------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", [0, 1])
def test_together_with_mixup(mixture: int) -> None:
    problem = images(norm="bn", sizes=(5, 9))
    mixed = both(problem, FedBR(mixture=mixture, **TINY) + "mixup(alpha=1)")[0]
    plain = both(problem, FedBR(mixture=mixture, **TINY))[0]
    assert tree.gap(mixed.weights, plain.weights) > 1e-4


def test_mixture_takes_the_labels_that_mixup_mixed() -> None:
    """With one sample per mean and K = 1, twice the label less 1/C is a row of the mixed labels."""
    method = parse("mixup(alpha=1)") + FedBR(**TINY | {"mixture": 1})
    run = images(sizes=(5, 9)).simulate(method)
    cohort = run.cohort([1])
    job = take_jobs(cohort.jobs, 0)
    carry = client.begin(run.bound.at(run.round), job)
    carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[0, 0])
    labels = 2 * carry.local["fedbr"]["target"] - 1 / 3
    assert labels.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert bool(((labels > 1e-3) & (labels < 1 - 1e-3)).any())


@pytest.mark.parametrize("other", ["scaffold", "fedsam", "fedrep", "moon(projection=4)", "feddyn"])
def test_together_with(other: str) -> None:
    both(images(norm="bn", sizes=(5, 9)), parse(other) + FedBR(**TINY))


def test_statistics_that_stay_on_the_client_and_dropout() -> None:
    both(images(norm="bn", batchnorm="local", dropout=0.3, sizes=(5, 9)), FedBR(**TINY))


def test_partial_participation() -> None:
    both(images(norm="bn", sizes=(5, 9, 14)), FedBR(**TINY), rounds=3, per_round=2)


def test_it_is_for_classes_only() -> None:
    with pytest.raises(IncompatibleError, match="no meaning for multilabel"):
        images(task="multilabel").simulate(FedBR())


@pytest.mark.parametrize("preset", sorted(FedBR.presets))
def test_presets_in_the_method_grammar(preset: str) -> None:
    method = parse(f"fedbr:{preset}")
    assert parse(str(method)) == method


# -- each of these has one fault; the comment names it, and an identity must find it -----------


@dataclass(frozen=True)
class Descends(FedBR):
    def ascend(self, v, params, batch, out):  # the projection goes down
        new = super().ascend(v, params, batch, out)
        back = tree.map(lambda p, n: 2 * p - n, v.local["projection"], new["projection"])
        return new | {"projection": back}


@dataclass(frozen=True)
class LateMaxStep(FedBR):
    def observe(self, v, params, batch, out):  # after the descent, in place of before it
        return super().ascend(v, params, batch, out)

    def ascend(self, v, params, batch, out):
        return v.local


@dataclass(frozen=True)
class NoMaxStep(FedBR):
    def ascend(self, v, params, batch, out):
        return v.local | (self._mixed(v, batch) if self.mixture else {})


@dataclass(frozen=True)
class MinMovesProjection(FedBR):
    def observe(self, v, params, batch, out):  # the descent moves the projection, too
        def loss(projection):
            z = v.forward(params, v.local["x"]).features
            return self.mu * self._contrast(projection, z, v.local["z_global"], out.features)

        slope = torch.func.grad(loss)(v.local["projection"])
        return v.local | {"projection": tree.axpy(-v.info.lr, slope, v.local["projection"])}


@dataclass(frozen=True)
class Divides(FedBR):
    def _contrast(self, projection, z_pseudo, z_global, z_real):  # cosines over tau
        inverse = FedBR(
            inv_temperature1=1 / self.inv_temperature1,
            inv_temperature2=1 / self.inv_temperature2,
            rows=self.rows,
        )
        return inverse._contrast(projection, z_pseudo, z_global, z_real)


@dataclass(frozen=True)
class Swapped(FedBR):
    def _contrast(self, projection, z_pseudo, z_global, z_real):  # real near, global far
        return super()._contrast(projection, z_pseudo, z_real, z_global)


@dataclass(frozen=True)
class GlobalFollows(FedBR):
    def term(self, v, params, batch, out):  # the global features are those of the present model
        pseudo = v.forward(params, v.local["x"])
        flat = v.task.loss(pseudo.logits, batch._replace(y=batch.y, target=v.local["target"]))
        near = self._contrast(v.local["projection"], pseudo.features, pseudo.features, out.features)
        return self.lam * flat.mean() + self.mu * near


@dataclass(frozen=True)
class RealStops(FedBR):
    def term(self, v, params, batch, out):  # no gradient through the real features
        return super().term(v, params, batch, out._replace(features=out.features.detach()))


@dataclass(frozen=True)
class SumOfSamples(FedBR):
    def absorb(self, r, weights):  # the division by M is forgotten
        weights, server = super().absorb(r, weights)
        return weights, server | {"pseudo": self.samples * server["pseudo"]}


@dataclass(frozen=True)
class MeanOverClients(FedBR):
    def absorb(self, r, weights):  # every client is in every pseudo-sample
        return weights, r.server | {"pseudo": r.uploads["means"].mean(0)}


@dataclass(frozen=True)
class OneOwner(FedBR):
    def absorb(self, r, weights):  # all from the last client
        return weights, r.server | {"pseudo": r.uploads["means"][-1]}


@dataclass(frozen=True)
class LostProjection(FedBR):
    def server_step(self, r, weights):  # clients' projections are not taken in
        return weights, r.server


@dataclass(frozen=True)
class Confident(FedBR):
    def term(self, v, params, batch, out):  # pseudo-data are taught the model's own answer
        pseudo = v.forward(params, v.local["x"])
        known = torch.softmax(pseudo.logits.detach(), -1)
        flat = v.task.loss(pseudo.logits, batch._replace(target=known)).mean()
        return self.lam * flat + super().term(v, params, batch, out)


@dataclass(frozen=True)
class MixtureKeepsLabels(FedBR):
    def _mixed(self, v, batch):  # mixes inputs alone
        return super()._mixed(v, batch) | {"target": v.local["target"]}


@dataclass(frozen=True)
class MixtureKeepsGlobal(FedBR):
    def _mixed(self, v, batch):  # compares with the global features of other inputs
        return super()._mixed(v, batch) | {"z_global": v.local["z_global"]}


@dataclass(frozen=True)
class MixtureOnce(FedBR):
    def _mixed(self, v, batch):  # never drawn again
        return super()._mixed(v, batch) if int(v.step) == 0 else {}


@dataclass(frozen=True)
class MixtureUnscaled(FedBR):
    def _mixed(self, v, batch):  # half of K + 1 = 3 is not a third
        found = super()._mixed(v, batch)
        return found | {"x": found["x"] * 3 / 2}


@dataclass(frozen=True)
class FixedRows(FedBR):
    def _rows(self, spec):  # the batch size is not asked for
        return self.rows or 32


@dataclass(frozen=True)
class FewNegatives(FedBR):
    def _contrast(self, projection, z_pseudo, z_global, z_real):  # the last rows take no part
        return super()._contrast(projection, z_pseudo, z_global, z_real[:5])


FAULTY = [
    Descends, LateMaxStep, NoMaxStep, MinMovesProjection, Divides, Swapped, GlobalFollows,
    RealStops, SumOfSamples, MeanOverClients, OneOwner, LostProjection, Confident,
    MixtureKeepsLabels, MixtureKeepsGlobal, MixtureOnce, MixtureUnscaled, FixedRows, FewNegatives,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())
