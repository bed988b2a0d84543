"""CCVR, SphereFed and FedETF: options, and faults that the identities must find."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.identities.classifiers import _features, _survey
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import client, rng, tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.task import make_task
from kedge.core.update import uploads_of
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.errors import FieldError, IncompatibleError, ModelError
from kedge.parts.classifiers import _LOG_ZERO, CCVR, FedETF, SphereFed
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class Biased(CCVR):
    def _pooled(self, sums):  # divides by n_c
        n, mean, covariance = super()._pooled(sums)
        return n, mean, covariance * ((n - 1) / n.clamp_min(1))[:, None, None]


@dataclass(frozen=True)
class NotCentred(CCVR):
    def _pooled(self, sums):  # second moments in place of covariances
        n, mean, covariance = super()._pooled(sums)
        return n, mean, covariance + torch.einsum("cf,cg->cfg", mean, mean)


@dataclass(frozen=True)
class NoRoot(CCVR):
    def _draw(self, key, mean, covariance):  # the covariance in place of its root
        eps = rng.normal(key, (len(mean), self.samples, mean.shape[1]), mean.dtype)
        return mean[:, None] + eps @ covariance


@dataclass(frozen=True)
class Diagonal(CCVR):
    def _draw(self, key, mean, covariance):  # variances alone
        return super()._draw(key, mean, torch.diag_embed(covariance.diagonal(dim1=1, dim2=2)))


@dataclass(frozen=True)
class AllClasses(CCVR):
    def _rows(self, key, count):  # draws classes that nobody has
        return super()._rows(key, count + 1)


@dataclass(frozen=True)
class Anew(CCVR):
    def absorb(self, r, weights):  # the head starts from 0
        head = {n: torch.zeros_like(weights.params[n]) for n in r.model.head_names()}
        return super().absorb(r, weights._replace(params=weights.params | head))


@dataclass(frozen=True)
class NoMomentum(CCVR):
    def absorb(self, r, weights):
        return CCVR.absorb(replace(self, momentum=0.0), r, weights)


@dataclass(frozen=True)
class AnyLength(SphereFed):
    def term(self, v, params, batch, out):  # features off the sphere
        target = torch.eye(v.task.outputs, dtype=DOUBLE)[batch.y]
        return ((out.features @ self._classifier(v.spec).T - target) ** 2).mean()


@dataclass(frozen=True)
class OwnHead(SphereFed):
    def term(self, v, params, batch, out):  # the model's first head in place of W
        target = torch.eye(v.task.outputs, dtype=DOUBLE)[batch.y]
        z = F.normalize(out.features, dim=1)
        return ((v.head(params, z) - target) ** 2).mean()


@dataclass(frozen=True)
class BesideTheTask(SphereFed):
    def weigh(self, v, batch):  # cross-entropy is still there
        return torch.ones_like(super().weigh(v, batch))


@dataclass(frozen=True)
class ClassSum(SphereFed):
    def term(self, v, params, batch, out):
        return SphereFed.term(replace(self, class_mean=False), v, params, batch, out)


@dataclass(frozen=True)
class Unwritten(SphereFed):
    def server_step(self, r, weights):  # the model predicts by its first head
        return weights, {}


@dataclass(frozen=True)
class Skewed(SphereFed):
    def _classifier(self, spec):  # rows of length 1, not at right angles
        return F.normalize(super()._classifier(spec) + 0.1, dim=1)


@dataclass(frozen=True)
class AbsoluteRidge(SphereFed):
    def absorb(self, r, weights):  # rho is not scaled by n
        n = float(r.uploads["gram"].diagonal().sum())
        return SphereFed.absorb(replace(self, ridge=self.ridge / n), r, weights)


@dataclass(frozen=True)
class Uncalibrated(SphereFed):
    def absorb(self, r, weights):
        return weights, {}


@dataclass(frozen=True)
class OffTheSphere(FedETF):
    def term(self, v, params, batch, out):  # projections of any length
        logits = v.own(params)["scale"] * self._frame(out.logits)
        n = v.label_counts
        logits = logits + torch.where(n > 0, n.clamp_min(1).log(), _LOG_ZERO)
        return v.task.loss(logits, batch).mean()


@dataclass(frozen=True)
class Shorter(FedETF):
    def _frame(self, mu):  # sqrt(C/(C-1)) forgotten
        return mu - mu.mean(1, keepdim=True)


@dataclass(frozen=True)
class Unbalanced(FedETF):
    def term(self, v, params, batch, out):
        return FedETF.term(replace(self, balanced=False), v, params, batch, out)


@dataclass(frozen=True)
class AbsentToo(FedETF):
    def term(self, v, params, batch, out):  # a class with no sample counts as one with one
        logits = v.own(params)["scale"] * self._frame(F.normalize(out.logits, dim=1))
        return v.task.loss(logits + v.label_counts.clamp_min(1).log(), batch).mean()


@dataclass(frozen=True)
class FixedScale(FedETF):
    def trainable(self, v, params):  # s does not learn
        return {f"{self.name}/scale": False}


@dataclass(frozen=True)
class TwoLosses(FedETF):
    def weigh(self, v, batch):  # cross-entropy of the projection, too
        return torch.ones_like(super().weigh(v, batch))


FAULTY = [
    Biased, NotCentred, NoRoot, Diagonal, AllClasses, Anew, NoMomentum,
    AnyLength, OwnHead, BesideTheTask, ClassSum, Unwritten, Skewed, AbsoluteRidge, Uncalibrated,
    OffTheSphere, Shorter, Unbalanced, AbsentToo, FixedScale, TwoLosses,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- CCVR -------------------------------------------------------------------------------------


def ccvr(**options: Any) -> CCVR:
    return CCVR(**CCVR.tiny | options)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_training_is_fedavgs_and_the_end_tunes_the_head_alone(engine: str) -> None:
    runs = [images(norm="bn").simulate(m, engine) for m in ("fedavg", ccvr())]
    for run in runs:
        run.run_round()
        run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)
    for run in runs:
        run.finish()
    plain, tuned = runs[0].weights, runs[1].weights
    for name in plain.params:
        same = torch.equal(plain.params[name], tuned.params[name])
        assert same == (not name.startswith("head")), name
    assert tree.equal(plain.buffers, tuned.buffers)


def test_both_engines_calibrate_alike() -> None:
    runs = [images(norm="bn").simulate(ccvr(steps=20), e) for e in ("loop", "vector")]
    for run in runs:
        run.run_round()
        run.finish()
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-11


CCVR_OPTIONS: list[dict[str, Any]] = [
    {"samples": 6},
    {"steps": 3},
    {"batch": 5},
    {"lr": 0.1},
    {"momentum": 0.0},
    {"labels": "proportional"},
    {"jitter": 1.0},
]


@pytest.mark.parametrize("option", CCVR_OPTIONS, ids=lambda o: "-".join(map(str, *o.items())))
def test_every_option_of_ccvr_changes_the_head(option: dict[str, Any]) -> None:
    heads = []
    for part in (ccvr(), ccvr(**option)):
        run = images().simulate(part)
        run.run_round()
        run.finish()
        heads.append(run.weights.params["head.weight"])
        assert bool(torch.isfinite(heads[-1]).all())
    assert tree.gap(heads[0], heads[1]) > 1e-7


def test_calibration_undoes_a_bias_of_the_head() -> None:
    """The head is spoilt to say class 0 always; virtual features bring it back."""
    run = images(sizes=(5, 9, 14), steps=40).simulate(CCVR(samples=50, steps=300, lr=0.1))
    for _ in range(15):
        run.run_round()
    spoilt = run.weights.params | {"head.bias": torch.tensor([9.0, 0.0, 0.0], dtype=DOUBLE)}
    run.session.server = run.server._replace(weights=run.weights._replace(params=spoilt))
    before = run.evaluate()["accuracy"]
    run.finish()
    assert before < 50
    assert run.evaluate()["accuracy"] > 90


def test_a_client_sends_sums_and_nothing_while_training() -> None:
    part = ccvr()
    run = images(norm="bn").simulate(part)
    assert [part.sends, part.uploads, part.keeps] == ["0", "0", "0"]
    answer = client.survey(run.bound, take_jobs(run.cohort([1]).jobs, 0), part)
    assert sum(tree.numel(u.value) for _, u in uploads_of(answer.uploads)) == 3 * (1 + 6 + 36)


def test_features_may_have_several_axes() -> None:
    """A head may flatten its input itself."""
    problem, part = images(), ccvr()
    net = nn.Sequential()
    net.add_module("stage1", problem.module.get_submodule("stage1"))
    net.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double())
    run = replace(problem, module=net).simulate(part)
    v, _ = step_view(run, 0, part, "survey")
    batch = run.federation.clean(run.federation.rows[:5])
    out = v.forward(v.anchor, batch.x, train=False)
    assert out.features.shape == (5, 4, 2, 2)
    z, one_hot = out.features.flatten(1), F.one_hot(batch.y, 3).to(DOUBLE)
    found = part.survey(v)
    torch.testing.assert_close(found["sum"].value, one_hot.T @ z)
    torch.testing.assert_close(found["outer"].value.sum(0), z.T @ z)


def test_a_class_without_samples_or_with_one_is_harmless() -> None:
    x = rng.normal(rng.key(0), (9, 1, 8, 8), DOUBLE)
    y = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0])  # none of class 2
    task = make_task("classification", 3)
    federation = Federation(x, y, [range(5), range(5, 9)], task, dtype=DOUBLE)
    run = replace(images(), federation=federation).simulate(CCVR(samples=5, steps=30, batch=6))
    run.run_round()
    n, mean, covariance = CCVR()._pooled(_survey(run, run.bound.parts[0]))
    assert n.tolist() == [8, 1, 0]
    assert float(covariance[1:].abs().max()) < 1e-15
    assert float(mean[2].abs().max()) == 0
    run.finish()
    assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(run.weights))


def test_a_head_that_stays_on_the_clients_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="ccvr works on the head on the server, but fedrep"):
        images().simulate(f"fedrep+{ccvr()}")


def test_single_precision_and_more_features_than_samples() -> None:
    """28 samples of 200 features: the covariance is singular, and rounding makes it indefinite."""
    x, y = rng.normal(rng.key(0), (28, 10)), torch.arange(28) % 3
    federation = Federation(x, y, [range(14), range(14, 28)], make_task("classification", 3))
    net = nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 3))
    torch.manual_seed(0)
    net.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    run = Simulation(federation, Model(net), CCVR(samples=20, steps=20), work=LocalWork(batch=7))
    run.run_round()
    run.finish()
    assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(run.weights))


# -- SphereFed --------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["pure", "engines", "permutation"])
def test_laws_hold_without_calibration_and_for_sums(law: str) -> None:
    LAWS[law](SphereFed(calibrate=False, class_mean=False))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_the_head_of_a_client_stays_put_even_under_weight_decay(engine: str) -> None:
    run = images(optim=SGD(lr=0.1, momentum=0.9, weight_decay=0.1)).simulate("spherefed", engine)
    found = run.clients.answer(run.session.request("", [0, 1, 2]))
    moved = {n: float(d.abs().max()) for n, d in found.summed.delta.params.items()}
    assert {n for n, d in moved.items() if d == 0} == {"head.weight", "head.bias"}


def test_the_classifier_is_the_same_everywhere_and_follows_the_seed() -> None:
    runs = [
        images().simulate("spherefed", e, seed=s)
        for e, s in (("loop", 0), ("vector", 0), ("loop", 1))
    ]
    for run in runs:
        run.run_round()
    heads = [run.weights.params["head.weight"] for run in runs]
    assert torch.equal(heads[0], heads[1])
    assert tree.gap(heads[0], heads[2]) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_rows_are_orthonormal_in_any_precision(dtype: torch.dtype) -> None:
    run = images().simulate("spherefed")
    task = make_task("classification", 100)
    spec = replace(run.bound.spec, task=task, shapes={"features": (512,)}, dtype=dtype)
    for seed in range(5):
        w = SphereFed()._classifier(replace(spec, key=rng.key(seed)))
        assert w.shape == (100, 512)
        gap = (w @ w.T - torch.eye(100, dtype=dtype)).abs().max()
        assert float(gap) < (1e-6 if dtype == torch.float32 else 1e-14)


def test_calibration_lowers_the_squared_error() -> None:
    run = images(steps=10).simulate(SphereFed())
    for _ in range(3):
        run.run_round()

    def error() -> float:
        z, y, _ = _features(run)
        said = F.normalize(z, dim=1) @ run.weights.params["head.weight"].T
        return float(((said - torch.eye(3, dtype=DOUBLE)[y]) ** 2).mean())

    before = error()
    run.finish()
    assert error() < 0.9 * before
    kept = images(steps=10).simulate(SphereFed(calibrate=False))
    kept.run_round()
    weights = kept.weights
    kept.finish()
    assert tree.equal(kept.weights, weights)


def test_class_mean_divides_by_the_number_of_classes() -> None:
    terms = [
        images(steps=1).simulate(SphereFed(class_mean=m)).run_round().losses["spherefed"]
        for m in (True, False)
    ]
    assert tree.gap(3 * terms[0], terms[1]) < 1e-14


def test_it_learns_to_tell_the_classes() -> None:
    run = images(steps=40, optim=SGD(lr=0.5)).simulate("spherefed")
    for _ in range(10):
        run.run_round()
    assert run.evaluate()["accuracy"] > 85


def test_mixed_labels_are_the_target() -> None:
    run = images(sizes=(5, 9), batch=5, steps=1).simulate("mixup+spherefed")
    mix, sphere = run.bound.parts
    v, batch = step_view(run, 1, mix, "transform")
    mixed = mix.transform(v, batch)
    assert mixed.target is not None
    z = run.bound.model.forward(run.weights, mixed.x, "eval").features
    assert z is not None
    assert isinstance(sphere, SphereFed)
    said = F.normalize(z, dim=1) @ sphere._classifier(run.bound.spec).T
    found = run.run_round([1]).losses["spherefed"][0]
    assert float(found) == pytest.approx(float(((said - mixed.target) ** 2).mean()), abs=1e-12)


def test_what_spherefed_needs_of_a_model() -> None:
    def table(net: nn.Module, method: str = "spherefed") -> Simulation:
        x, y = rng.normal(rng.key(0), (12, 5)), torch.arange(12) % 3
        clients = list(torch.arange(12).reshape(2, 6))
        return Simulation(Federation(x, y, clients, make_task("classification", 3)), net, method)

    with pytest.raises(IncompatibleError, match="as many features as classes, 3"):
        table(nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3)))
    deep = nn.Sequential(nn.Linear(5, 4))
    deep.add_module("head", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    with pytest.raises(IncompatibleError, match="one linear layer"):
        table(deep)
    scaled = nn.Linear(4, 3)
    scaled.register_parameter("gain", nn.Parameter(torch.ones(3)))
    with pytest.raises(IncompatibleError, match="one linear layer"):
        table(nn.Sequential(nn.Linear(5, 4), scaled))
    table(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))).run_round()
    with pytest.raises(IncompatibleError, match="no meaning for regression"):
        images(task="regression").simulate("spherefed")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

    for name in ("spherefed", "ccvr"):
        with pytest.raises(ModelError, match="head"):
            table(Plain(), name)
    run = table(Plain(), "fedetf")  # which needs only as many outputs as there are classes
    run.run_round()
    assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(run.weights))


# -- FedETF -----------------------------------------------------------------------------------


def test_the_frame_is_a_simplex() -> None:
    for classes in (2, 3, 10):
        frame = FedETF()._frame(torch.eye(classes, dtype=DOUBLE))
        cosines = torch.full((classes, classes), -1 / (classes - 1), dtype=DOUBLE)
        assert tree.gap(frame @ frame.T, cosines.fill_diagonal_(1.0)) < 1e-14


def test_the_scale_is_learnt_and_averaged() -> None:
    run = images(sizes=(9, 9)).simulate(FedETF(scale=3.0))
    assert run.weights.params["fedetf/scale"].tolist() == [3.0]
    ends = []
    for k in (0, 1):
        alone = images(sizes=(9, 9)).simulate(FedETF(scale=3.0))
        alone.run_round([k])
        ends.append(float(alone.weights.params["fedetf/scale"]))
    run.run_round()
    assert float(run.weights.params["fedetf/scale"]) == pytest.approx(sum(ends) / 2, abs=1e-14)
    assert ends[0] != ends[1]


def test_an_absent_class_gets_no_gradient_from_the_softmax() -> None:
    """Client 0 of (9, 9) has the classes 0 and 1: its loss is that of these two alone."""
    for balanced, expected in ((True, True), (False, False)):
        part = FedETF(balanced=balanced)
        run = images(sizes=(9, 9), batch=9, steps=1).simulate(part)
        _, batch = step_view(run, 0, part)
        mu = F.normalize(run.bound.model.forward(run.weights, batch.x, "eval").logits, dim=1)
        logits = math.sqrt(1.5) * mu[:, :2] + torch.tensor([7.0, 2.0], dtype=DOUBLE).log()
        two = F.cross_entropy(logits, batch.y)
        found = run.run_round([0]).losses["fedetf"][0]
        assert (abs(float(found) - float(two)) < 1e-12) == expected


@pytest.mark.parametrize("method", ["mixup+fedetf", "fedetf+spherefed", "fedrep+fedetf"])
def test_with_other_parts_it_stays_finite(method: str) -> None:
    runs = [images(norm="bn").simulate(parse(method), e) for e in ("loop", "vector")]
    for run in runs:
        run.run_round()
        run.run_round()
        assert all(bool(torch.isfinite(p).all()) for p in tree.leaves(run.weights))
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-11


def test_fedetf_learns_to_tell_the_classes() -> None:
    run = images(steps=40, optim=SGD(lr=0.5)).simulate("fedetf")
    for _ in range(10):
        run.run_round()
    assert run.evaluate()["accuracy"] > 85


def test_fields_are_checked() -> None:
    for bad in ({"scale": 0.0}, {"balanced": 1}):
        with pytest.raises(FieldError):
            FedETF(**bad)  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="samples"):
        CCVR(samples=0)
    with pytest.raises(FieldError, match="ridge"):
        SphereFed(ridge=-1.0)


def test_the_covariance_of_few_samples() -> None:
    """Two samples of a class: divided by 1. One sample or none: 0, not nan."""
    x = torch.tensor([[1.0, 2.0], [4.0, 0.0]], dtype=torch.float64)
    one, empty = x[:1], x[:0]
    sums = {
        "count": torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64),
        "sum": torch.stack([rows.sum(0) for rows in (x, one, empty)]),
        "outer": torch.stack([rows.T @ rows for rows in (x, one, empty)]),
    }
    _, mean, covariance = CCVR()._pooled(sums)
    torch.testing.assert_close(mean[0], x.mean(0))
    torch.testing.assert_close(covariance[0], torch.cov(x.T))
    assert covariance[1:].abs().max() == 0
