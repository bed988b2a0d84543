"""clip, gauss and centralgauss: what they cover, what they refuse, and every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images
from kedge.core import rng, tree
from kedge.core.method import Method
from kedge.core.optim import SGD
from kedge.core.part import Mean, Part, parts
from kedge.core.tree import Weights
from kedge.core.update import Update
from kedge.core.work import LocalWork
from kedge.engines import Execution
from kedge.engines.workers import can_start_workers
from kedge.errors import IncompatibleError
from kedge.parts.release import CentralGauss, Clip, Gauss
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

ENGINES = ("loop", "vector")
WHOLE = ("krum", "fedbr", "fedmix", "naivemix")  # these upload the client's number
SURVEYS = [n for n in parts if parts[n].survey is not Part.survey and n not in WHOLE]
COUNTING = ("feddf", "flboost", "fedgen")


def tiny(name: str) -> Part:
    return parts[name](**parts[name].tiny)


def answers(run: Simulation, part: str = "") -> list[Update]:
    """What each client sends, after training or as its answer to a survey."""
    return [done.update for done in run.clients.updates(run.session.request(part, [0, 1, 2]))]


def norm_of(part: Part, update: Update, samples: int) -> float:
    """The norm of all that leaves, with counts in units of the client's samples."""
    squares = [tree.sq_norm(update.delta.params)]
    squares += [tree.sq_norm(b) for n, b in update.delta.buffers.items() if "num_batches" not in n]
    for name, upload in update.uploads.get(part.name, {}).items():
        squares.append(tree.sq_norm(upload) / (samples if name in part.counted else 1) ** 2)
    return float(sum(squares)) ** 0.5


# -- what they cover ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SURVEYS)
def test_answers_to_surveys_are_clipped(name: str) -> None:
    """The uploads of a survey are one vector: all are multiplied by the same factor."""
    part, problem = tiny(name), images()
    plain = answers(problem.simulate(part), name)
    clipped = answers(problem.simulate(Method((part, Clip(1e-3)))), name)
    sizes = problem.federation.sizes
    for before, after, samples in zip(plain, clipped, sizes, strict=True):
        factor = 1e-3 / norm_of(part, before, samples)
        assert factor < 1
        assert norm_of(part, after, samples) == pytest.approx(1e-3, rel=1e-12)
        assert tree.gap(tree.scale(before.uploads, factor), after.uploads) < 1e-15


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["ccvr", "spherefed"])
def test_the_server_sees_clipped_answers(method: str, engine: str) -> None:
    part, seen = tiny(method), []

    class Spy(type(part)):  # type: ignore[misc]
        name = method

        def absorb(self, r: Any, weights: Weights) -> Any:
            seen.append(r.uploads)
            return super().absorb(r, weights)

    for others in ((), (Clip(0.5),)):
        run = images(sizes=(40,)).simulate(Method((Spy(**part.tiny), *others)), engine)
        run.survey(run.bound.part(method))
    plain, clipped = seen
    factors = [float(tree.sq_norm(c)) / float(tree.sq_norm(p)) for p, c in pairs(plain, clipped)]
    assert max(factors) < 0.5
    assert factors == pytest.approx([factors[0]] * len(factors))


def pairs(a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(tree.leaves(a), tree.leaves(b), strict=True)


@pytest.mark.parametrize("name", COUNTING)
def test_counts_leave_most_of_the_norm_to_the_update(name: str) -> None:
    """As they are, counts of 20 to 80 samples would leave a twentieth of it."""
    problem = images(norm="gn", sizes=(20, 40, 80), optim=SGD(lr=0.1))
    problem = dataclasses.replace(problem, work=LocalWork(batch=10, epochs=5))
    run = problem.simulate(Method((tiny(name), Clip(0.1))))
    for update in answers(run):
        assert float(tree.sq_norm(update.delta.params)) > 0.5 * 0.1**2


def test_uploads_after_training_are_in_the_norm() -> None:
    part, problem = tiny("fedproto"), images(norm="bn")
    plain, clipped = (answers(problem.simulate(m)) for m in (part, Method((part, Clip(0.1)))))
    for before, after, samples in zip(plain, clipped, problem.federation.sizes, strict=True):
        factor = 0.1 / norm_of(part, before, samples)
        assert norm_of(part, after, samples) == pytest.approx(0.1, rel=1e-12)
        assert tree.gap(tree.scale(before.uploads, factor), after.uploads) < 1e-12
        assert tree.gap(tree.scale(before.delta.params, factor), after.delta.params) < 1e-12
        assert tree.equal(before.losses, after.losses)
        assert torch.equal(before.weight, after.weight)


def test_a_survey_has_noise_of_its_own() -> None:
    """Not that of the training in the same round, and another one for every part."""

    def noise(method: str, part: str) -> Tensor:
        clean, noisy = (
            answers(images().simulate(f"{method}+gauss(std={std})"), part)[1] for std in (0, 0.1)
        )
        moved = [tree.sub(noisy.uploads, clean.uploads), tree.sub(noisy.delta, clean.delta)]
        return next(x for one in moved for x in tree.leaves(one)).flatten() / 0.1

    def drawn(*address: str | int) -> Tensor:
        key = rng.key(0)
        for item in ("clients", 0, 1, *address, "gauss", "release", 0):
            key = rng.fold(key, item)
        return key

    n = images().federation.sizes[1]  # the unit of counts
    found = noise("ccvr", "ccvr"), noise("spherefed", "spherefed"), noise("fedavg", "")
    for one, unit, part in zip(found, (n, n, 1), (["ccvr"], ["spherefed"], []), strict=True):
        wanted = unit * rng.normal(drawn(*part), (len(one),), DOUBLE)
        torch.testing.assert_close(one, wanted, atol=1e-9, rtol=0)


def test_losses_and_states_stay_as_they_are() -> None:
    runs = [images().simulate(m) for m in ("scaffold", "scaffold+clip(norm=0.001)+gauss(std=1.0)")]
    done = [run.run_round() for run in runs]
    assert tree.equal(done[0].losses, done[1].losses)
    assert tree.equal(*(run.store.rows["scaffold"] for run in runs))
    assert tree.gap(*(run.weights for run in runs)) > 0.01


def test_a_survey_of_all_clients_expects_all_of_them() -> None:
    """The mean of answers of 1 is 1; where two come of three that were expected, it is 2/3, in
    training as in a survey of the cohort."""

    @dataclasses.dataclass(frozen=True)
    class Ones(Part):
        asked: str = "first"
        name = "ones"

        def server_init(self, spec: Any) -> Any:
            return {n: torch.zeros((), dtype=spec.dtype) for n in ("survey", "training")}

        def surveys(self) -> Any:
            return self.asked

        def survey(self, v: Any) -> Any:
            return {"one": Mean(torch.ones_like(v.info.weight))}

        def absorb(self, r: Any, weights: Weights) -> Any:
            return weights, r.server | {"survey": r.uploads["one"]}

        def reply(self, v: Any, weights: Weights) -> Any:
            return {}, self.survey(v)

        def server_step(self, r: Any, weights: Weights) -> Any:
            return weights, r.server | {"training": r.uploads["one"]}

    for asked, survey in (("first", 1.0), ("every", 2 / 3)):
        method = Method((Ones(asked), CentralGauss(0.0, clients=3.0)))
        run = images(sizes=(5, 5, 5, 5)).simulate(method, per_round=2)
        run.run_round()
        found = {name: float(x) for name, x in run.server.slots["ones"].items()}
        assert found == pytest.approx({"survey": survey, "training": 2 / 3})


# -- what they refuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("release", [Clip(), Gauss()], ids=lambda p: p.name)
def test_whole_numbers_are_refused(release: Part, name: str, engine: str) -> None:
    for method in ((tiny(name), release), (release, tiny(name))):
        run = images().simulate(Method(method), engine)
        before = tree.map(torch.clone, run.state())
        with pytest.raises(
            IncompatibleError,
            match=f"^{name} uploads whole numbers, which can be neither clipped nor made noisy; "
            "leave one of them out$",
        ):
            run.run_round([0, 1, 2])
        assert tree.equal(run.state(), before)


@pytest.mark.parametrize("name", [name for name in parts if parts[name].needs_clients])
def test_noise_on_sums_is_refused_beside_those_who_see_single_clients(name: str) -> None:
    for method in ((tiny(name), CentralGauss()), (CentralGauss(), tiny(name))):
        with pytest.raises(
            IncompatibleError,
            match=f"centralgauss makes sums noisy, but {name} sees single clients; use gauss, or "
            "leave one of them out",
        ):
            images(norm="bn").simulate(Method(method))


# -- engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "scaffold+fednova+clip(norm=0.2)+gauss(std=0.05)",
        "fedtr+ccvr(samples=5, steps=2, batch=4)+clip(norm=0.5)+gauss(std=0.05)",
        "scaffold+fednova+clip(norm=0.2)+centralgauss(std=0.05, clients=3)",
    ],
)
def test_the_same_noise_on_every_engine(method: str) -> None:
    problem = images(norm="bn", sizes=(5, 9, 14, 26, 3))
    runs = [
        problem.simulate(method, execution, per_round=4)
        for execution in (
            Execution("loop"),
            *([Execution("loop", workers=2)] if can_start_workers() else []),
            Execution("vector"),
            Execution("vector", chunk=3),
        )
    ]
    for run in runs:
        for _ in range(3):
            run.run_round()
        run.finish()
    for run in runs[1:]:
        assert tree.gap(run.state(), runs[0].state()) < 1e-9
    clean = problem.simulate(method.replace("0.05", "0.0"), per_round=4)
    for _ in range(3):
        clean.run_round()
    assert tree.gap(clean.state(), runs[0].state()) > 1e-3


@pytest.mark.parametrize("law", [law for law in LAWS if law not in ("additive", "objective")])
def test_laws_hold_for_all_of_them_together_beside_uploads(law: str) -> None:
    class Together(type(tiny("scaffold"))):  # type: ignore[misc]
        """SCAFFOLD whose messages are clipped and noisy."""

        name = "scaffold"
        strays = 0.2  # clipped control variates

        def release(self, v: Any, update: Update) -> tuple[Update, Any]:
            update, _ = Clip(0.5).release(v, update)
            return Gauss(0.001).release(v, update)[0], v.client

        def receive(self, r: Any, totals: Any) -> Any:
            return CentralGauss(0.001).receive(r, totals)[0], r.server

    LAWS[law](Together())


# -- faults that the identities must find ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PerLeaf(Clip):
    def release(self, v: Any, update: Update) -> Any:  # a norm for each leaf
        params = {
            n: x * (self.norm / (x.norm() + 1e-30)).clamp(max=1.0)
            for n, x in update.delta.params.items()
        }
        return update._replace(delta=update.delta._replace(params=params)), v.client


@dataclasses.dataclass(frozen=True)
class UpdateAlone(Clip):
    def release(self, v: Any, update: Update) -> Any:  # uploads leave as they are
        clipped, state = super().release(v, update._replace(uploads={}, contribution={}))
        return update._replace(delta=clipped.delta), state


@dataclasses.dataclass(frozen=True)
class NoUnits(Clip):
    def release(self, v: Any, update: Update) -> Any:  # counts are measured as they are
        content = update.delta.params, update.uploads, update.contribution
        size = sum(float(x.square().sum()) for part in content for x in tree.leaves(part)) ** 0.5
        factor = min(1.0, self.norm / size)
        return tree.scale(update, factor)._replace(weight=update.weight), v.client


@dataclasses.dataclass(frozen=True)
class ScalesUp(Clip):
    def release(self, v: Any, update: Update) -> Any:  # to the norm, from below, too
        size = tree.sq_norm(update.delta.params).sqrt()
        delta = update.delta._replace(params=tree.scale(update.delta.params, self.norm / size))
        return update._replace(delta=delta), v.client


@dataclasses.dataclass(frozen=True)
class Squared(Clip):
    def release(self, v: Any, update: Update) -> Any:  # by the squared norm
        factor = (self.norm / tree.sq_norm(update.delta.params)).clamp(max=1.0)
        delta = update.delta._replace(params=tree.scale(update.delta.params, factor))
        return update._replace(delta=delta), v.client


@dataclasses.dataclass(frozen=True)
class Variance(Gauss):
    def release(self, v: Any, update: Update) -> Any:  # std is taken for the variance
        return Gauss(self.std**0.5).release(v, update)


@dataclasses.dataclass(frozen=True)
class SameForAll(Gauss):
    def release(self, v: Any, update: Update) -> Any:  # one number for all leaves
        z = rng.normal(v.key, (), DOUBLE)
        delta = tree.map(lambda x: x + self.std * z, update.delta)
        return update._replace(delta=delta), v.client


@dataclasses.dataclass(frozen=True)
class OnTheMean(CentralGauss):
    def receive(self, r: Any, totals: Any) -> Any:  # as large on the mean as on the sum
        louder = dataclasses.replace(self, std=self.std * float(r.weight))
        return CentralGauss.receive(louder, r, totals)


@dataclasses.dataclass(frozen=True)
class WhoCame(CentralGauss):
    def receive(self, r: Any, totals: Any) -> Any:  # the denominator is not constant
        return CentralGauss.receive(dataclasses.replace(self, clients=0.0), r, totals)


@dataclasses.dataclass(frozen=True)
class UpdatesAlone(CentralGauss):
    def receive(self, r: Any, totals: Any) -> Any:  # uploads have no noise
        noisy, state = super().receive(r, totals)
        summed = noisy.summed._replace(uploads=totals.summed.uploads)
        return noisy._replace(summed=summed), state


FAULTY = [
    PerLeaf, UpdateAlone, NoUnits, ScalesUp, Squared, Variance, SameForAll, OnTheMean, WhoCame,
    UpdatesAlone,
]  # fmt: skip


@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())
