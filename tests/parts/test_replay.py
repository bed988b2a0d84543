"""FedReg: every option, and faults that its identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch

from kedge.check.laws import LAWS
from kedge.check.problems import images, step_view
from kedge.core import tree
from kedge.core.client import client_context
from kedge.core.method import parse
from kedge.core.part import Out
from kedge.core.task import Batch
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.errors import FieldError, IncompatibleError
from kedge.parts.replay import FedReg
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class Descends(FedReg):
    def _ascended(self, v, x, target, size):  # downhill
        return super()._ascended(v, x, target, -size)


@dataclass(frozen=True)
class NoSign(FedReg):
    def _ascended(self, v, x, target, size):  # steps along the gradient, not its sign
        def loss(x):
            logits = v.spec.model.forward(v.anchor, x, "eval").logits
            return v.task.loss(logits, Batch(x, target, target)).sum()

        for _ in range(self.ascents):
            x = x + size * torch.func.grad(loss)(x)
        return x


@dataclass(frozen=True)
class TrueLabels(FedReg):
    def ascend(self, v, params, batch, out):  # pseudo-data keep their labels
        made = super().ascend(v, params, batch, out)
        return made | {"pseudo": made["pseudo"] | {"target": made["perturbed"]["target"]}}


@dataclass(frozen=True)
class OwnLabels(FedReg):
    def ascend(self, v, params, batch, out):  # labels by the local model
        made = super().ascend(v, params, batch, out)
        said = torch.softmax(v.forward(params, made["pseudo"]["x"]).logits, 1)
        return made | {"pseudo": made["pseudo"] | {"target": said}}


@dataclass(frozen=True)
class HardLabels(FedReg):
    def ascend(self, v, params, batch, out):  # the likeliest class in place of what w says
        made = super().ascend(v, params, batch, out)
        said = made["pseudo"]["target"]
        hard = (said == said.amax(1, keepdim=True)).to(said.dtype)
        return made | {"pseudo": made["pseudo"] | {"target": hard}}


@dataclass(frozen=True)
class GammaTurned(FedReg):
    def correct(self, v, params, grads):
        return FedReg.correct(replace(self, gamma=1 - self.gamma), v, params, grads)


@dataclass(frozen=True)
class AtTheLocal(FedReg):
    def correct(self, v, params, grads):  # the gradient at v
        return tree.zeros_like(grads)


@dataclass(frozen=True)
class Bothways(FedReg):
    def project(self, v, params):  # k may be negative
        away = tree.sub(params, v.anchor.params)
        middle = tree.map(lambda p, w: 0.5 * (p + w), params, v.anchor.params)
        for data in (v.local["pseudo"], v.local["perturbed"]):
            slope = torch.func.grad(self._loss)(middle, v, data)
            k = tree.dot(away, slope) / tree.sq_norm(slope)
            away, params = (
                tree.map(lambda x, g, k=k: x - k * g, held, slope) for held in (away, params)
            )
        return params


@dataclass(frozen=True)
class AtTheEnd(FedReg):
    def project(self, v, params):  # slopes at v, not half way
        away, at = tree.sub(params, v.anchor.params), params
        for data in (v.local["pseudo"], v.local["perturbed"]):
            slope = torch.func.grad(self._loss)(at, v, data)
            k = (tree.dot(away, slope) / tree.sq_norm(slope)).clamp_min(0)
            away, params = (
                tree.map(lambda x, g, k=k: x - k * g, held, slope) for held in (away, params)
            )
        return params


@dataclass(frozen=True)
class SideBySide(FedReg):
    def project(self, v, params):  # k_3 from the whole of D
        away = tree.sub(params, v.anchor.params)
        middle = tree.map(lambda p, w: 0.5 * (p + w), params, v.anchor.params)
        for data in (v.local["pseudo"], v.local["perturbed"]):
            slope = torch.func.grad(self._loss)(middle, v, data)
            k = (tree.dot(away, slope) / tree.sq_norm(slope)).clamp_min(0)
            params = tree.map(lambda x, g, k=k: x - k * g, params, slope)
        return params


@dataclass(frozen=True)
class PushesOn(FedReg):
    def project(self, v, params):  # adds what should be taken back
        return tree.map(lambda new, p: 2 * p - new, super().project(v, params), params)


@dataclass(frozen=True)
class OneSize(FedReg):
    def ascend(self, v, params, batch, out):  # perturbed data by the step size of pseudo-data
        return FedReg.ascend(replace(self, eta_p=self.eta_s), v, params, batch, out)


FAULTY = [
    Descends, NoSign, TrueLabels, OwnLabels, HardLabels, GammaTurned, AtTheLocal, Bothways,
    AtTheEnd, SideBySide, PushesOn, OneSize,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[FedReg]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("law", ["engines", "pure", "additive", "ragged"])
@pytest.mark.parametrize("text", ["fedreg(gamma=1, ascents=1)", "fedreg(gamma=0, ascents=0)"])
def test_laws_hold_for_every_option(text: str, law: str) -> None:
    LAWS[law](parse(text).parts[0])


def test_presets_and_ranges() -> None:
    assert parse("fedreg:cifar10").parts[0] == FedReg()
    assert parse("fedreg:fedcog").parts[0] == FedReg(eta_s=1e-3, eta_p=1e-5)
    with pytest.raises(FieldError, match=r"fedreg.gamma = 1.5 is above 1"):
        FedReg(gamma=1.5)


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_classes_are_needed(task: str) -> None:
    with pytest.raises(IncompatibleError, match=f"fedreg has no meaning for {task}"):
        images(task=task).simulate("fedreg")


def test_data_stay_within_reach() -> None:
    """Each of S sign steps moves every pixel by eta or not at all; labels are probabilities of w,
    in evaluation mode, for pseudo-data, and the sample's own for perturbed ones."""
    part = FedReg(ascents=3, eta_s=0.25, eta_p=0.01)
    run = images(norm="bn").simulate(part)
    v, batch = step_view(run, 1, part, "ascend")
    made = part.ascend(v, run.weights.params, batch, Out(batch.x, batch.x, {}))
    for kind, eta in (("pseudo", 0.25), ("perturbed", 0.01)):
        steps = (made[kind]["x"] - batch.x) / eta
        assert tree.gap(steps, steps.round()) < 1e-9
        assert float(steps.abs().max()) == pytest.approx(3)
    said = run.bound.model.forward(run.weights, made["pseudo"]["x"], "eval").logits
    assert tree.gap(made["pseudo"]["target"], torch.softmax(said, 1)) < 1e-14
    assert torch.equal(made["perturbed"]["target"].argmax(1), batch.y)
    assert float(made["perturbed"]["target"].sum()) == len(batch.y)


def test_ascent_raises_the_loss() -> None:
    part = FedReg(ascents=5, eta_s=0.05, eta_p=0.01)
    run = images().simulate(part)
    v, batch = step_view(run, 1, part, "ascend")
    made = part.ascend(v, run.weights.params, batch, Out(batch.x, batch.x, {}))

    def loss(x: torch.Tensor) -> float:
        logits = run.bound.model.forward(run.weights, x, "eval").logits
        return float(run.federation.task.loss(logits, batch).mean())

    assert loss(batch.x) < loss(made["perturbed"]["x"]) < loss(made["pseudo"]["x"])


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_mixed_labels_are_used(engine: str) -> None:
    """Behind Mixup, perturbed data have the mixed labels; both engines agree."""
    runs = [images(norm="bn").simulate("mixup+fedreg(ascents=2)", e) for e in (engine, "loop")]
    for run in runs:
        run.run_round()
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-11
    part = runs[0].bound.parts[1]
    v, batch = step_view(runs[0], 1, part, "ascend")
    target = torch.full((len(batch.y), 3), 1 / 3, dtype=batch.x.dtype)
    made = part.ascend(v, {}, batch._replace(target=target), Out(batch.x, batch.x, {}))
    assert torch.equal(made["perturbed"]["target"], target)


def test_statistics_move_once_a_step() -> None:
    """BatchNorm sees the batch alone: its statistics are FedAvg's after the first step."""
    runs = [images(norm="bn", steps=1).simulate(m) for m in ("fedreg(ascents=2)", "fedavg")]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights.buffers, runs[1].weights.buffers)


def test_a_slope_of_zero_does_no_harm() -> None:
    """At w itself pseudo-data have slope 0, as they carry what w says; with learning rate 0 that
    is where every step ends."""
    from kedge.core.optim import SGD

    run = images(optim=SGD(lr=0.0)).simulate("fedreg(ascents=1)")
    start = run.weights
    run.run_round()
    assert tree.gap(run.weights, start) < 1e-15


def test_a_slope_of_exactly_zero_takes_nothing_back() -> None:
    """A model that is certain of the right class has no slope, in float64 to the last bit."""
    part = FedReg()
    run = images().simulate(part)
    cohort = run.cohort([1])
    batch = run.federation.clean(cohort.batches[0, 0])
    target = torch.zeros(len(batch.y), 3, dtype=batch.x.dtype)
    target[:, 0] = 1.0
    data = {"x": batch.x, "target": target}
    local = {"fedreg": {"pseudo": data, "perturbed": data}}
    first = torch.zeros((), dtype=torch.int32)
    context = client_context(run.bound.at(0), take_jobs(cohort.jobs, 0), local, first)
    params = tree.add(run.weights.params, tree.zeros_like(run.weights.params))
    params["head.bias"] = torch.tensor([4000.0, 0.0, 0.0], dtype=batch.x.dtype)
    assert tree.equal(part.project(View(context, part, "project"), params), params)
