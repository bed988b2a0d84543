"""VHL: every option, and faults that its identities must find."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng, tree
from kedge.core.client import client_context
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import make_task
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError
from kedge.parts.virtual import VHL, _contrast
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class LiveVirtual(VHL):
    def term(self, v, params, batch, out):  # the virtual features are no constants
        x, y = self._draw(v)
        z = v.forward(params, x).features
        both = torch.cat([out.features.detach(), z])
        live = _contrast(both, torch.cat([batch.y, y]), self.tau)
        return super().term(v, params, batch, out) + self.lam * (live - live.detach())


@dataclass(frozen=True)
class Blind(VHL):
    def term(self, v, params, batch, out):  # real samples do not see the extra outputs
        own = v.own(params)
        more = F.linear(out.features, own["weight"], own["bias"])
        rest = torch.logsumexp(more, 1) - torch.logsumexp(out.logits, 1)
        return super().term(v, params, batch, out) - F.softplus(rest).mean()


@dataclass(frozen=True)
class LabelledReal(VHL):
    def term(self, v, params, batch, out):  # label y~ in place of C + y~
        own, (x, y) = v.own(params), self._draw(v)
        done = v.forward(params, x)
        more = torch.cat([done.logits, F.linear(done.features, own["weight"], own["bias"])], 1)
        change = F.cross_entropy(more, y) - F.cross_entropy(more, y + v.task.outputs)
        return super().term(v, params, batch, out) + self.alpha * change


@dataclass(frozen=True)
class OwnSamples(VHL):
    def _draw(self, v):  # every client has its own virtual data
        x, y = super()._draw(v)
        return x + 0.1 * rng.normal(v.key, tuple(x.shape), x.dtype), y


@dataclass(frozen=True)
class EachRound(VHL):
    def _draw(self, v):  # virtual data change from round to round
        index = rng.integers(v.key, (self.rows,), v.task.outputs * self.per_class)
        key = rng.fold(v.sent["key"], v.round)
        return self._virtual(v.spec, key, index), index % v.task.outputs


@dataclass(frozen=True)
class Wide(VHL):
    def _virtual(self, spec, key, index):  # the variance taken for the deviation
        return VHL._virtual(replace(self, spread=self.spread**2), spec, key, index)


@dataclass(frozen=True)
class Swapped(VHL):
    def term(self, v, params, batch, out):  # the two weights of the contrasts
        other = replace(self, lam=self.lam_virtual, lam_virtual=self.lam)
        return VHL.term(other, v, params, batch, out)


FAULTY = [LiveVirtual, Blind, LabelledReal, OwnSamples, EachRound, Wide, Swapped]


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[VHL]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


def part(**options: Any) -> VHL:
    return VHL(**VHL.tiny | options)


def ran(method: Any, **options: Any) -> Simulation:
    run = images(norm="bn", **options).simulate(method, per_round=2)
    for _ in range(2):
        run.run_round()
    return run


OPTIONS: list[dict[str, Any]] = [
    {"alpha": 0.5},
    {"lam": 0.5},
    {"lam_virtual": 0.5},
    {"tau": 0.5},
    {"rows": 7},
    {"per_class": 9},
    {"labels": "shared"},
    {"spread": 0.1},
    {"grid": 4},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(map(str, *o.items())))
def test_every_option_changes_the_result(option: dict[str, Any]) -> None:
    plain, run = ran(part()), ran(part(**option))
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    shared = [n for n in plain.weights.params if n in run.weights.params]
    assert max(tree.gap(plain.weights.params[n], run.weights.params[n]) for n in shared) > 1e-6


@pytest.mark.long
@pytest.mark.parametrize("law", ["engines", "neutral", "frugal", "ragged"])
@pytest.mark.parametrize(
    "option", [{"grid": 3}, {"labels": "shared"}, {"align_epochs": 1}], ids=str
)
def test_laws_hold_for_other_settings(option: dict[str, Any], law: str) -> None:
    LAWS[law](part(**option))


def test_presets_are_the_papers() -> None:
    assert parse("vhl:fedcog").parts[0] == VHL()
    assert str(parse("vhl:fedbr")) == "vhl(rows=32)"
    assert str(parse("vhl:official")) == "vhl(alpha=0.5)"
    own = VHL()
    assert (own.alpha, own.lam, own.lam_virtual, own.tau) == (1.0, 1.0, 0.1, 0.07)
    assert (own.rows, own.per_class, own.align_epochs) == (128, 200, 5)


@pytest.mark.parametrize(("labels", "extra"), [("extra", 3 * 6 + 3), ("shared", 0)])
def test_traffic_is_the_extra_outputs_and_a_key(labels: Any, extra: int) -> None:
    own = part(labels=labels)
    run = images().simulate(own)
    symbols = run.bound.spec.symbols(own)
    counted = [own.count(f, symbols) for f in (own.sends, own.uploads, own.keeps)]
    assert counted == [extra + 2, extra, 0]
    assert tree.numel(run.bound.sent(run.server)) == 2


def test_without_extra_outputs_virtual_samples_have_the_labels_of_real_ones() -> None:
    own = part(labels="shared", lam=0.0, lam_virtual=0.0, alpha=0.3)
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(own)
    v, _ = step_view(run, 1, own)
    x, y = own._draw(v)
    expected = 0.3 * F.cross_entropy(run.bound.model.forward(run.weights, x, "eval").logits, y)
    assert float(run.run_round([1]).losses["vhl"][0]) == pytest.approx(float(expected))


@pytest.mark.parametrize(("epochs", "steps"), [(0, 4), (1, 2), (2, 4)])
def test_the_contrasts_stop_after_some_epochs(epochs: int, steps: int) -> None:
    """Ten samples in batches of five: two steps are an epoch."""
    own = part(alpha=0.0, labels="shared", align_epochs=epochs)
    run = images(sizes=(10, 9), batch=5, steps=4).simulate(own)
    cohort = run.cohort([0])
    job = take_jobs(cohort.jobs, 0)
    terms = []
    for t in range(4):
        context = client_context(run.bound, job, {}, torch.tensor(t, dtype=torch.int32))
        batch = run.federation.clean(cohort.batches[0, t])
        v = View(context, own, "term")
        terms.append(float(own.term(v, run.weights.params, batch, v.forward(run.weights, batch.x))))
    assert [x > 0 for x in terms] == [t < steps for t in range(4)]


# -- virtual samples --------------------------------------------------------------------------


def test_coarse_images_are_enlarged() -> None:
    fine, coarse = part(), part(grid=4)
    run = images().simulate(fine)
    key, index = run.server.slots["vhl"]["key"], torch.arange(12)
    x, big = (p._virtual(run.bound.spec, key, index) for p in (fine, coarse))
    assert x.shape == big.shape == (12, 1, 8, 8)
    small = part(grid=4)._virtual(replace(run.bound.spec, input_shape=(1, 4, 4)), key, index)
    assert torch.equal(big, F.interpolate(small, size=(8, 8), mode="bilinear", align_corners=False))
    assert torch.equal(part(grid=99)._virtual(run.bound.spec, key, index), x)


def test_samples_of_a_class_are_alike_and_numbers_are_not() -> None:
    own = part(spread=0.01)
    run = images().simulate(own)
    x = own._virtual(run.bound.spec, run.server.slots["vhl"]["key"], torch.tensor([0, 3, 1, 0]))
    assert torch.equal(x[0], x[3])
    assert 0 < tree.gap(x[0], x[1]) < 0.1 < tree.gap(x[0], x[2])


def test_real_samples_alone_move_the_statistics() -> None:
    runs = [images(norm="bn", steps=1).simulate(m) for m in ("fedavg", part())]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights.buffers, runs[1].weights.buffers)


def test_tables_have_virtual_rows_too() -> None:
    x, y = rng.normal(rng.key(0), (12, 5), DOUBLE), torch.arange(12) % 3
    clients = list(torch.arange(12).reshape(2, 6))
    federation = Federation(x, y, clients, make_task("classification", 3), dtype=DOUBLE)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    run = Simulation(federation, Model(net.to(DOUBLE)), part(), optim=SGD(lr=0.05))
    run.run_round()
    v, _ = step_view(run, 0, part())
    assert part()._draw(v)[0].shape == (6, 5)
    assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(run.weights))


def test_a_contrast_without_partners_or_length_is_finite() -> None:
    z = torch.zeros(3, 2, dtype=DOUBLE, requires_grad=True)
    for y, expected in ((torch.arange(3), 0.0), (torch.zeros(3, dtype=torch.int64), math.log(2))):
        loss = _contrast(z, y, 0.07)  # two partners that are equally near: log 2
        (slope,) = torch.autograd.grad(loss, z)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-15)
        assert torch.equal(slope, torch.zeros_like(z))


def test_it_is_for_classes() -> None:
    for task in ("regression", "multilabel"):
        with pytest.raises(IncompatibleError, match="no meaning"):
            images(task=task).simulate("vhl")
    with pytest.raises(FieldError, match="tau"):
        VHL(tau=0.0)
