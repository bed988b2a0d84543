"""FedNTD, FedDecorr, FedProto: every option, and faults that their identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch

from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Out, Part
from kedge.errors import FieldError, IncompatibleError, KedgeError
from kedge.parts.regularisers import FedDecorr, FedNTD, FedProto, _not_true
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class Swapped(FedNTD):
    def term(self, v, params, batch, out):  # KL(local || global)
        known = _not_true(v.forward(v.anchor, batch.x).logits.detach(), batch.y)
        mine = _not_true(out.logits, batch.y)
        return self.beta * self.tau**2 * v.task.divergence(mine, known, self.tau).mean()


@dataclass(frozen=True)
class TrueClassKept(FedNTD):
    def term(self, v, params, batch, out):  # plain distillation
        known = v.forward(v.anchor, batch.x).logits.detach()
        return self.beta * self.tau**2 * v.task.divergence(known, out.logits, self.tau).mean()


@dataclass(frozen=True)
class Unscaled(FedNTD):
    def term(self, v, params, batch, out):  # without tau^2
        return super().term(v, params, batch, out) / self.tau**2


@dataclass(frozen=True)
class Itself(FedNTD):
    def term(self, v, params, batch, out):  # the teacher is the local model
        known = _not_true(out.logits.detach(), batch.y)
        mine = _not_true(out.logits, batch.y)
        return self.beta * self.tau**2 * v.task.divergence(known, mine, self.tau).mean()


@dataclass(frozen=True)
class TeacherByTheBatch(FedNTD):
    def term(self, v, params, batch, out):  # BatchNorm by the batch in the teacher's pass, too
        return FedNTD.term(replace(self, eval_mode=False), v, params, batch, out)


@dataclass(frozen=True)
class SummedBatch(FedNTD):
    def term(self, v, params, batch, out):  # a sum over the batch
        return super().term(v, params, batch, out) * len(batch.y)


@dataclass(frozen=True)
class WithDiagonal(FedDecorr):
    def term(self, v, params, batch, out):  # the diagonal is counted, too
        rows, width = out.features.shape
        if rows == 1:
            return out.logits.new_zeros(())
        return super().term(v, params, batch, out) + self.beta * (rows - 1) ** 2 / rows / width


@dataclass(frozen=True)
class Biased(FedDecorr):
    def term(self, v, params, batch, out):  # divides by B in the variance, not by B - 1
        rows = len(out.features)
        return super().term(v, params, batch, out) * (rows / max(1, rows - 1)) ** 2


@dataclass(frozen=True)
class TimesBatch(FedDecorr):
    def term(self, v, params, batch, out):  # 1/B is forgotten
        return super().term(v, params, batch, out) * len(out.features)


@dataclass(frozen=True)
class CutOff(FedDecorr):
    def term(self, v, params, batch, out):  # no gradient into the body
        return super().term(v, params, batch, tree.detach(out))


@dataclass(frozen=True)
class PullsToZeros(FedProto):
    def term(self, v, params, batch, out):  # prototypes that do not exist count as zeros
        away = out.features - v.sent["prototypes"][batch.y]
        return self.lam * away.square().mean()


@dataclass(frozen=True)
class PushesAway(FedProto):
    def term(self, v, params, batch, out):
        return -super().term(v, params, batch, out)


@dataclass(frozen=True)
class SummedFeatures(FedProto):
    def term(self, v, params, batch, out):  # the squared norm, not its mean over features
        return super().term(v, params, batch, out) * out.features.shape[1]


@dataclass(frozen=True)
class AlwaysClients(FedProto):
    def reply(self, v, weights):  # a mean of means, whatever the option says
        return FedProto.reply(replace(self, pool="clients"), v, weights)


@dataclass(frozen=True)
class Forgets(FedProto):
    def server_step(self, r, weights):  # classes that the cohort lacks lose their prototypes
        weight = r.uploads["weight"][:, None]
        fresh = r.uploads["sum"] / weight.clamp_min(1)
        return weights, {"prototypes": fresh, "valid": r.server["valid"].clamp_min(1)}


@dataclass(frozen=True)
class BeforeTraining(FedProto):
    def reply(self, v, weights):  # features of the model that the round started from
        return super().reply(v, v.anchor)


FAULTY = [
    Swapped, TrueClassKept, Unscaled, Itself, TeacherByTheBatch, SummedBatch, WithDiagonal, Biased,
    TimesBatch, CutOff, PullsToZeros, PushesAway, SummedFeatures, AlwaysClients, Forgets,
    BeforeTraining,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("law", ["engines", "resumable", "frugal", "permutation"])
@pytest.mark.parametrize(
    "text",
    [
        "fedntd(beta=0.5, tau=3, eval_mode=false)",
        "fedproto:official",
        "fedproto(lam=0.1)",
        "feddecorr:fedcog",
    ],
)
def test_laws_hold_for_every_option(text: str, law: str) -> None:
    LAWS[law](parse(text).parts[0])


def test_presets() -> None:
    assert parse("feddecorr:fedcog").parts[0] == FedDecorr(beta=0.01)
    assert parse("feddecorr:fedbr").parts[0] == FedDecorr(beta=0.1)
    assert parse("fedntd:fedbr").parts[0] == FedNTD(beta=1.0, tau=1.0)
    assert parse("fedproto:cifar10").parts[0] == FedProto(lam=0.1)
    assert parse("fedproto:official").parts[0] == FedProto(pool="clients")
    with pytest.raises(FieldError, match=r"fedntd.tau = 0.0 is not above 0"):
        FedNTD(tau=0.0)


@pytest.mark.parametrize("text", ["fedntd", "fedproto"])
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_classes_are_needed(text: str, task: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{text} has no meaning for {task}"):
        images(task=task).simulate(text)


def test_two_classes_leave_nothing_to_distil() -> None:
    """Without the true class one is left, whose softmax is 1."""
    part = FedNTD(beta=5.0)
    v, batch = step_view(images().simulate(part), 0, part)
    two = batch._replace(y=batch.y.clamp_max(1))
    logits = torch.randn(len(batch.y), 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    assert _not_true(logits, two.y).shape == (len(batch.y), 1)
    assert torch.equal(_not_true(logits, two.y)[:, 0], logits.gather(1, 1 - two.y[:, None])[:, 0])
    alone = _not_true(logits, two.y)
    assert float(v.task.divergence(alone, 2 * alone).abs().max()) == 0.0


@pytest.mark.parametrize("y", [0, 1, 2, 3])
def test_the_true_class_is_taken_out(y: int) -> None:
    logits = torch.arange(4.0)[None]
    assert _not_true(logits, torch.tensor([y])).tolist() == [[c for c in range(4) if c != y]]


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_decorrelation_of_single_samples_is_fedavg(engine: str) -> None:
    """A batch of one has no correlations: no term, and no NaN."""
    runs = [images(batch=1).simulate(m, engine) for m in ("feddecorr(beta=3)", "fedavg")]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)


def test_decorrelation_lowers_correlations() -> None:
    """Twenty rounds with a large weight against twenty without."""
    found = []
    for beta in (0.0, 1.0):
        run = images().simulate(FedDecorr(beta=beta))
        for _ in range(20):
            run.run_round()
        x = run.federation.clean(run.federation.rows).x
        features = run.bound.model.forward(run.weights, x, "eval").features
        assert features is not None
        off = torch.corrcoef(features.T)[~torch.eye(6, dtype=torch.bool)]
        found.append(float((off**2).mean()))
    assert found[1] < 0.8 * found[0]


def test_a_constant_feature_does_no_harm() -> None:
    part = FedDecorr()
    v, batch = step_view(images().simulate(part), 0, part)
    features = torch.ones(4, 3, dtype=DOUBLE)
    slope = torch.func.grad(lambda z: part.term(v, {}, batch, Out(z, z, {})))(features)
    assert float(part.term(v, {}, batch, Out(features, features, {}))) == 0
    assert torch.equal(slope, torch.zeros_like(features))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_prototypes_alone(engine: str) -> None:
    """fedproto+local, the paper's setting: the network stays on the clients, prototypes travel and
    pull from the second round on."""
    plain = images(norm="bn").simulate("local", engine)
    run = images(norm="bn").simulate("fedproto+local", engine)
    start = run.weights
    for t in range(2):
        done = run.run_round()
        plain.run_round()
        assert done.up_bytes == 3 * 8 * (3 * 6 + 3)
        assert done.down_bytes == 3 * 8 * (3 * 6 + 3)
        moved = tree.gap(run.personal(), plain.personal())
        assert (moved == 0) == (t == 0)
    assert tree.equal(run.weights, start)


def test_a_head_is_needed() -> None:
    """A model without a head is refused before anything runs."""
    from torch import nn

    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    problem = replace(images(), module=Headless().to(DOUBLE))
    for text in ("feddecorr", "fedproto"):
        with pytest.raises(KedgeError, match=f"{text} needs to know the model's head"):
            problem.simulate(text)
