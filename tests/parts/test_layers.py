"""FedPer, FedBN, Ditto, FineTune, Local: how they combine, and faults that identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images, quadratics
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.errors import FieldError, ModelError
from kedge.parts.layers import Ditto, FedBN, FedPer, FineTune, Local
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class AllAveraged(FedPer):
    def private(self, spec):  # the head travels
        return set()


@dataclass(frozen=True)
class HeadFrozen(FedPer):
    def trainable(self, v, params):
        return dict.fromkeys(v.spec.model.head_names(), False)


@dataclass(frozen=True)
class BodyFirst(FedPer):
    def trainable(self, v, params):  # head and body in turns
        head = set(v.spec.model.head_names())
        return {n: (v.step == 0) if n in head else (v.step == 1) for n in params}


@dataclass(frozen=True)
class OnlyStatistics(FedBN):
    def private(self, spec):
        return {n for n in super().private(spec) if n in spec.buffers}


@dataclass(frozen=True)
class OnlyParameters(FedBN):
    def private(self, spec):
        return {n for n in super().private(spec) if n in spec.params}


@dataclass(frozen=True)
class StatisticsTravel(Local):
    def private(self, spec):
        return set(spec.params)


@dataclass(frozen=True)
class HeadsTravel(Local):
    def private(self, spec):
        return super().private(spec) - set(spec.model.head_names())


@dataclass(frozen=True)
class PullTurned(Ditto):
    def observe(self, v, params, batch, out):
        return Ditto.observe(_negative(self), v, params, batch, out)


@dataclass(frozen=True)
class PullDoubled(Ditto):  # lam ||u - w||^2 in place of its half
    def observe(self, v, params, batch, out):
        return Ditto.observe(replace(self, lam=2 * self.lam), v, params, batch, out)


@dataclass(frozen=True)
class PullToTheLocal(Ditto):
    def observe(self, v, params, batch, out):  # towards the model in training
        new = super().observe(v, params, batch, out)
        back = v.info.lr * self.lam
        moved = tree.map(lambda n, p, w: n + back * (p - w), new["params"], params, v.anchor.params)
        return new | {"params": moved}


@dataclass(frozen=True)
class StartsAnew(Ditto):
    def prepare(self, v):  # from the shared model in each round
        return {"params": v.anchor.params, "buffers": v.anchor.buffers}


@dataclass(frozen=True)
class SharedStatistics(Ditto):
    def personal(self, v, weights):
        return super().personal(v, weights)._replace(buffers=weights.buffers)


@dataclass(frozen=True)
class StillStatistics(Ditto):
    def observe(self, v, params, batch, out):  # the personal model's never move
        new = super().observe(v, params, batch, out)
        return new | {"buffers": v.local["buffers"]}


@dataclass(frozen=True)
class AfterAggregation(FineTune):
    def personal(self, v, weights):
        return weights


@dataclass(frozen=True)
class FirstModels(FineTune):
    def personal(self, v, weights):  # a client that was never there has the first model
        return Weights(weights.params | v.client["params"], v.client["buffers"])


@dataclass(frozen=True)
class KeptOnce(FineTune):
    def reply(self, v, weights):  # the first local model, for ever
        kept, uploads = super().reply(v, weights)
        seen = v.client["seen"] > 0
        return tree.map(lambda old, new: torch.where(seen, old, new), v.client, kept), uploads


@dataclass(frozen=True)
class ForeignStatistics(FineTune):
    def personal(self, v, weights):
        return super().personal(v, weights)._replace(buffers=weights.buffers)


def _negative(part: Ditto) -> Ditto:
    turned = replace(part)
    object.__setattr__(turned, "lam", -part.lam)
    return turned


FAULTY = [
    AllAveraged, HeadFrozen, BodyFirst, OnlyStatistics, OnlyParameters, StatisticsTravel,
    HeadsTravel, PullTurned, PullDoubled, PullToTheLocal, StartsAnew, SharedStatistics,
    StillStatistics, AfterAggregation, FirstModels, KeptOnce, ForeignStatistics,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- which leaves stay ------------------------------------------------------------------------


def private_of(text: str, norm: str = "bn", batchnorm: str = "average") -> set[str]:
    bound = images(norm=norm, batchnorm=batchnorm).simulate(text).bound
    return {*bound.private_params, *bound.private_buffers}


HEAD = {"head.weight", "head.bias"}
NORM = {
    f"stage1.1.{n}"
    for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
BODY = {"stage1.0.weight", "stage1.0.bias", "stage2.1.weight", "stage2.1.bias"}


def test_private_leaves_and_their_union() -> None:
    assert private_of("fedper") == HEAD
    assert private_of("fedbn") == NORM
    assert private_of("fedbn", norm="gn") == set()
    assert private_of("local") == HEAD | NORM | BODY
    assert private_of("fedper+fedbn") == private_of("fedbn+fedper") == HEAD | NORM
    assert private_of("fedper+fedrep") == HEAD
    assert private_of("fedper", batchnorm="local") == HEAD | {n for n in NORM if n[9:] not in
                                                              ("weight", "bias")}  # fmt: skip
    assert private_of("local+fedbn+fedper") == HEAD | NORM | BODY


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_two_private_parts_in_one_method(engine: str) -> None:
    """Head and BatchNorm stay, the rest is averaged; a personal model has both of its own."""
    run = images(norm="bn").simulate("fedper+fedbn", engine)
    start = run.weights
    for _ in range(2):
        run.run_round()
    own, shared = run.personal(), run.weights
    for name in (*shared.params, *shared.buffers):
        kind = "params" if name in shared.params else "buffers"
        first, now, each = (getattr(w, kind)[name] for w in (start, shared, own))
        if name in HEAD | NORM:
            assert torch.equal(first, now)
            if name != "stage1.1.num_batches_tracked":
                assert not torch.equal(each[0], each[1])
        else:
            # the bias before BatchNorm has no gradient
            assert torch.equal(first, now) == (name == "stage1.0.bias")
            assert torch.equal(each, now.expand_as(each))


def test_batchnorm_inside_other_modules() -> None:
    """Names come from the statistics: nested, without affine parameters, of other dimensions; a
    GroupNorm and a parameter that happens to be called like one are not touched."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64, affine=False)
            self.block = nn.ModuleDict({"a": nn.Linear(64, 6), "bn": nn.BatchNorm1d(6)})
            self.group = nn.GroupNorm(2, 6)
            self.register_buffer("gate_", torch.ones(6))
            self.gate_weight = nn.Parameter(torch.ones(6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x.flatten(1))
            x = self.group(self.block["bn"](self.block["a"](x)))
            return self.head(torch.tanh(x) * self.gate_ * self.gate_weight)

    run = replace(images(), module=Net().to(DOUBLE)).simulate("fedbn")
    assert set(run.bound.private_params) == {"block.bn.weight", "block.bn.bias"}
    kept = ("running_mean", "running_var", "num_batches_tracked")
    layers = ("norm", "block.bn")
    assert set(run.bound.private_buffers) == {f"{b}.{n}" for b in layers for n in kept}
    run.run_round()


@pytest.mark.parametrize("norm", ["none", "gn"])
def test_without_batchnorm_fedbn_is_fedavg(norm: str) -> None:
    runs = [images(norm=norm).simulate(m) for m in ("fedbn", "fedavg")]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)


def test_fedper_trains_head_and_body_together() -> None:
    """After one step it has FedAvg's body, where FedRep has moved the head alone."""
    runs = [images(steps=1).simulate(m) for m in ("fedper", "fedavg", "fedrep(head_share=1)")]
    for run in runs:
        run.run_round()
    bodies = [{n: run.weights.params[n] for n in BODY} for run in runs]
    assert tree.gap(bodies[0], bodies[1]) < 1e-15
    assert tree.gap(bodies[2], bodies[1]) > 1e-6


def test_fedper_needs_a_head() -> None:
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    with pytest.raises(ModelError, match="fedper needs to know the model's head"):
        replace(images(), module=Headless().to(DOUBLE)).simulate("fedper")


# -- a model of its own -----------------------------------------------------------------------


def test_presets_and_ranges() -> None:
    assert parse("ditto:fedetf").parts[0] == Ditto(lam=1e-3)
    with pytest.raises(FieldError, match=r"ditto.lam = -1.0 is below 0"):
        Ditto(lam=-1.0)


@pytest.mark.parametrize("text", ["ditto", "finetune", "ditto+finetune", "finetune+ditto"])
@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_the_shared_model_is_fedavgs(text: str, engine: str) -> None:
    """With momentum, weight decay, dropout and BatchNorm, too."""
    optim = SGD(lr=0.05, momentum=0.9, weight_decay=0.01)
    problem = images(norm="bn", optim=optim, dropout=0.3)
    runs = [problem.simulate(m, engine) for m in (text, "fedavg")]
    for run in runs:
        for _ in range(2):
            run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)


def test_a_strong_pull_leads_to_the_shared_model() -> None:
    """With lr lam = 1 and no gradient (learning from a flat function) u is w at once; with lam = 0
    it never hears of it."""
    for lam, wanted in ((20.0, 0.0), (0.0, 1.0)):
        run = quadratics((1e-12, 1e-12), (0.0, 0.0)).simulate(Ditto(lam=lam))
        ones = {"head.weight": torch.ones(2, 1, 1, dtype=DOUBLE)}
        run.store.rows["ditto"] = run.store.rows["ditto"] | {"params": ones}
        run.run_round()
        got = run.personal().params["head.weight"].flatten().tolist()
        assert got == pytest.approx([wanted] * 2, abs=1e-9)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_personal_models_fit_better(engine: str) -> None:
    """Each on its own skewed data: FedAvg's model is the worst, a lone one the best."""
    losses = {}
    for text in ("fedavg", "ditto(lam=0.5)", "finetune", "local"):
        run = images(optim=SGD(lr=0.2)).simulate(text, engine)
        for _ in range(8):
            run.run_round()
        losses[text] = own_loss(run)
    assert losses["local"] < losses["fedavg"]
    assert losses["ditto(lam=0.5)"] < losses["fedavg"]
    assert losses["finetune"] < losses["fedavg"]


def own_loss(run: Simulation) -> float:
    """Mean over clients of the loss of each one's model on its own data."""
    own, total = run.personal(), 0.0
    for k, rows in enumerate(torch.split(run.federation.rows, run.federation.sizes)):
        batch = run.federation.clean(rows)
        logits = run.bound.model.forward(tree.take(own, k), batch.x, "eval").logits
        total += float(run.federation.task.loss(logits, batch).mean())
    return total / run.federation.num_clients


def test_dittos_models_have_the_precision_of_the_data() -> None:
    """A module in float32 beside data in float64."""
    problem = images()
    problem.module.to(torch.float32)
    run = problem.simulate("ditto")
    kept = run.bound.client()["ditto"]["params"]
    assert {p.dtype for p in kept.values()} == {DOUBLE}
    assert tree.equal(kept, run.weights.params)


def test_ditto_has_a_head_of_its_own_beside_a_private_one() -> None:
    """FedPer's head on a client is one thing, the personal model's another."""
    run = images().simulate("fedper+ditto(lam=0)")
    for _ in range(2):
        run.run_round()
    private = run.store.rows["private"]["params"]["head.weight"]
    own = run.store.rows["ditto"]["params"]["head.weight"]
    assert tree.gap(private, own) > 1e-6
    assert torch.equal(run.personal().params["head.weight"], own)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_fine_tuning_of_a_method_with_private_leaves(engine: str) -> None:
    """The personal model is the whole local one: public leaves kept, private ones restored."""
    run = images(norm="bn").simulate("fedper+finetune", engine)
    for cohort in ([0, 1, 2], [1]):
        run.run_round(cohort)
    kept = run.store.rows["finetune"]
    assert not HEAD & set(kept["params"])
    own = run.personal()
    assert tree.equal({n: own.params[n] for n in kept["params"]}, kept["params"])
    private = run.store.rows["private"]["params"]
    assert tree.equal({n: own.params[n] for n in private}, private)


def test_the_last_one_decides_which_model_is_used() -> None:
    """Two parts with a model of their own: left to right, the last one wins."""
    runs = [images().simulate(m) for m in ("ditto+finetune", "finetune+ditto")]
    for run in runs:
        run.run_round()
    own = [run.personal().params for run in runs]
    assert tree.equal(own[0], runs[0].store.rows["finetune"]["params"])
    assert tree.equal(own[1], runs[1].store.rows["ditto"]["params"])


@pytest.mark.long
@pytest.mark.parametrize("law", ["engines", "resumable", "pure"])
@pytest.mark.parametrize("text", ["ditto:fedetf", "ditto(lam=2)"])
def test_laws_hold_for_every_option(text: str, law: str) -> None:
    LAWS[law](parse(text).parts[0])


def test_single_clients_models_are_evaluated() -> None:
    """The held-out accuracy of clients alone is that of their own models."""
    problem = images(sizes=(10, 10))
    rows = torch.split(problem.federation.rows, 10)
    fed = type(problem.federation)(
        problem.federation.x, problem.federation.y, [r[:6] for r in rows],
        problem.federation.task, held_out=[r[6:] for r in rows], dtype=DOUBLE,
    )  # fmt: skip
    run = replace(problem, federation=fed).simulate("local")
    for _ in range(3):
        run.run_round()
    own, shared = run.evaluate_clients(personal=True), run.evaluate_clients()
    assert [r["loss"] for r in own] != [r["loss"] for r in shared]
    first = tree.take(run.personal(), 0)
    batch = next(fed.held_out_batches(0))
    logits = run.bound.model.forward(first, batch.x, "eval").logits
    assert own[0]["loss"] == pytest.approx(float(fed.task.loss(logits, batch).mean()))
