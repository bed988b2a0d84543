"""FedOpt's three, FedExP and GroupDRO: every option, and faults that their identities must find."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kedge.check.laws import LAWS
from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.errors import FieldError
from kedge.parts.adaptive import FedAdagrad, FedAdam, FedExP, FedYogi, GroupDRO
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class AdagradForgets(FedAdagrad):
    def _second_moment(self, v, square):  # the last square only
        return self.tau**2 + square


@dataclass(frozen=True)
class AdagradFromZero(FedAdagrad):
    def server_init(self, spec):  # v starts at 0
        zero = tree.zeros_like(spec.params)
        return {"m": zero, "v": zero}


@dataclass(frozen=True)
class AdamCorrectsBias(FedAdam):
    def server_step(self, r, weights):  # m/(1 - beta1^t), as in Adam itself
        new, server = super().server_step(r, weights)
        size = 1 / (1 - self.beta1 ** (r.round + 1))
        moved = tree.map(lambda w, x: x + size * (w - x), new.params, r.anchor.params)
        return new._replace(params=moved), server


@dataclass(frozen=True)
class AdamUnderTheRoot(FedAdam):
    def server_step(self, r, weights):  # sqrt(v + tau^2)
        _, server = super().server_step(r, weights)
        moved = tree.map(
            lambda m, v, x: x + self.lr * m / torch.sqrt(v + self.tau**2),
            server["m"],
            server["v"],
            r.anchor.params,
        )
        return weights._replace(params=moved), server


@dataclass(frozen=True)
class AdamAddsUp(FedAdam):
    def server_step(self, r, weights):  # m is a sum, without 1 - beta1
        held = r.server["m"]
        r.server = r.server | {"m": tree.scale(held, 1 / (1 - self.beta1))}
        delta = tree.sub(weights.params, r.anchor.params)
        more = weights._replace(
            params=tree.map(lambda x, d: x + d / (1 - self.beta1), r.anchor.params, delta)
        )
        return super().server_step(r, more)


@dataclass(frozen=True)
class AdamOneScale(FedAdam):
    def _second_moment(self, v, square):  # one second moment per leaf
        return super()._second_moment(v, square.mean().expand_as(square))


@dataclass(frozen=True)
class AdamBuffers(FedAdam):
    def server_step(self, r, weights):  # BatchNorm statistics do not move
        new, server = super().server_step(r, weights)
        return new._replace(buffers=r.anchor.buffers), server


@dataclass(frozen=True)
class YogiSign(FedYogi):
    def _second_moment(self, v, square):
        return v + (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class YogiIsAdam(FedYogi):
    def _second_moment(self, v, square):
        return v - (1 - self.beta2) * (v - square)


@dataclass(frozen=True)
class ExpNoHalf(FedExP):
    def combine(self, r):
        mean = tree.map(lambda d: d / r.weight, r.sums["d"])
        eta = r.sums["square"] / r.weight / (tree.sq_norm(mean) + self.eps * r.cohort)
        return tree.scale(mean, torch.clamp(eta, min=1.0))


@dataclass(frozen=True)
class ExpShrinks(FedExP):
    def combine(self, r):  # without the max
        mean = tree.map(lambda d: d / r.weight, r.sums["d"])
        eta = r.sums["square"] / r.weight / (2 * (tree.sq_norm(mean) + self.eps * r.cohort))
        return tree.scale(mean, eta)


@dataclass(frozen=True)
class ExpNorms(FedExP):
    def contribute(self, v, delta):  # norms, not their squares
        found = super().contribute(v, delta)
        return found | {"square": v.info.weight * torch.sqrt(tree.sq_norm(delta))}


@dataclass(frozen=True)
class ExpUnweighted(FedExP):
    def contribute(self, v, delta):  # sizes do not enter
        return {"d": tree.scale(delta, v.info.weight), "square": tree.sq_norm(delta)}

    def combine(self, r):
        mean = tree.map(lambda d: d / r.weight, r.sums["d"])
        eta = r.sums["square"] / r.cohort / (2 * (tree.sq_norm(mean) + self.eps * r.cohort))
        return tree.scale(mean, torch.clamp(eta, min=1.0))


@dataclass(frozen=True)
class ExpByLeaf(FedExP):
    def combine(self, r):  # every leaf by its own norm
        mean = tree.map(lambda d: d / r.weight, r.sums["d"])
        spread = r.sums["square"] / r.weight
        return tree.map(
            lambda m: (
                m * torch.clamp(spread / (2 * ((m * m).sum() + self.eps * r.cohort)), min=1.0)
            ),
            mean,
        )


@dataclass(frozen=True)
class ExpPlainEps(FedExP):
    def combine(self, r):  # eps is not multiplied by S
        return FedExP.combine(replace(self, eps=self.eps / r.cohort), r)


@dataclass(frozen=True)
class ExpLastIterate(FedExP):
    def output(self, server, weights):  # the last iterate alone
        return weights


@dataclass(frozen=True)
class ExpWithTheInitialModel(FedExP):
    def server_step(self, r, weights):  # the first mean is after one round
        weights, state = super().server_step(r, weights)
        return weights, state and state | {"share": torch.full_like(state["share"], 0.5)}


@dataclass(frozen=True)
class ExpTrainsTheMean(FedExP):
    def server_step(self, r, weights):  # clients start from the mean
        weights, state = super().server_step(r, weights)
        return super().output(state, weights), state


@dataclass(frozen=True)
class ExpOldStatistics(FedExP):
    def output(self, server, weights):  # the mean is over parameters alone
        return super().output(server, weights)._replace(buffers=weights.buffers)


@dataclass(frozen=True)
class DroSign(GroupDRO):
    def _log_q(self, v):  # low losses weigh more
        return v.client["log_q"] - self.eta * v.local["loss"]


@dataclass(frozen=True)
class DroForgets(GroupDRO):
    def reply(self, v, weights):  # q starts anew each round
        return v.client, {}


@dataclass(frozen=True)
class DroForGood(GroupDRO):
    def reply(self, v, weights):  # brought down by the server's level for good
        kept, uploads = super().reply(v, weights)
        return {"log_q": kept["log_q"] - v.sent["level"]}, uploads


@dataclass(frozen=True)
class DroSizes(GroupDRO):
    def contribute(self, v, delta):  # weights by size as well
        return tree.scale(super().contribute(v, delta), v.info.weight)


@dataclass(frozen=True)
class DroSum(GroupDRO):
    def observe(self, v, params, batch, out):  # the sum of the steps' losses
        return {"loss": v.local["loss"] + v.task.loss(out.logits, batch).mean()}


@dataclass(frozen=True)
class DroAfter(GroupDRO):
    def observe(self, v, params, batch, out):  # the loss after the step
        return super().observe(v, params, batch, v.forward(params, batch.x))


FAULTY = [
    AdagradForgets, AdagradFromZero, AdamCorrectsBias, AdamUnderTheRoot, AdamAddsUp, AdamOneScale,
    AdamBuffers, YogiSign, YogiIsAdam, ExpNoHalf, ExpShrinks, ExpNorms, ExpUnweighted, ExpByLeaf,
    ExpPlainEps, ExpLastIterate, ExpWithTheInitialModel, ExpTrainsTheMean, ExpOldStatistics,
    DroSign, DroForgets, DroForGood, DroSizes, DroSum, DroAfter,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- options --------------------------------------------------------------------------------------

OPTIONS = [
    "fedadagrad(beta1=0.5, lr=0.01)",
    "fedadam:fedcog",
    "fedyogi(beta1=0, beta2=0.5, tau=0.1)",
    "fedexp:emnist",
    "fedexp(eps=0)",
    "fedexp:paper(average=false)",
    "groupdro:official",
    "groupdro(eta=1)",
]


@pytest.mark.long
@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize(
    "law", ["pure", "engines", "resumable", "wire", "frugal", "ragged", "permutation"]
)
def test_options_obey_the_laws(text: str, law: str) -> None:
    (part,) = parse(text).parts
    LAWS[law](part)


def test_presets() -> None:
    assert parse("fedexp:fedcog") == parse("fedexp(eps=1e-3)")
    assert parse("fedexp:emnist") == parse("fedexp(eps=0.1)")
    assert parse("fedadam:fedcog") == parse("fedadam(lr=1.0)")
    assert parse("groupdro:fedbr") == parse("groupdro(eta=0.01)")
    assert parse("groupdro:official") == parse("groupdro(eta=0.01, loss=first)")


def test_defaults_are_the_papers() -> None:
    assert (FedAdagrad().beta1, FedAdam().beta1, FedYogi().beta1) == (0.0, 0.9, 0.9)
    assert (FedAdam().beta2, FedYogi().beta2, FedAdam().tau) == (0.99, 0.99, 1e-3)
    assert (GroupDRO().eta, GroupDRO().loss, FedExP().eps) == (0.01, "mean", 1e-3)


@pytest.mark.parametrize("text", ["fedadam(tau=0)", "fedexp(eps=-1)", "groupdro(eta=-0.1)"])
def test_values_out_of_range(text: str) -> None:
    with pytest.raises(FieldError):
        parse(text)


@pytest.mark.parametrize("text", ["fedadagrad", "fedadam", "fedyogi", "fedexp", "groupdro"])
def test_statistics_are_averaged_as_in_fedavg(text: str) -> None:
    runs = [images(norm="bn").simulate(m) for m in (text, "fedavg")]
    for run in runs:
        run.run_round()
    assert tree.equal(runs[0].weights.buffers, runs[1].weights.buffers)
    assert tree.gap(runs[0].weights.params, runs[1].weights.params) > 1e-4


@pytest.mark.parametrize("text", ["fedadagrad", "fedadam", "fedyogi"])
def test_server_optimisers_act_on_what_the_parts_before_them_made(text: str) -> None:
    """FedNova's update goes through them as FedAvg's does; without momentum the first step of a
    huge tau is lr d/tau."""
    huge = f"{text}(tau=1e6, lr=1e6, beta1=0)"
    nova, both = (images().simulate(m) for m in ("fednova", f"fednova+{huge}"))
    start = nova.weights.params
    nova.run_round()
    both.run_round()
    # sqrt(v) is tau as well (but for Adam's beta2), so the step is half of d, or a little more
    share = 1 / (1 + math.sqrt(0.99)) if text == "fedadam" else 0.5
    moved = tree.map(lambda w, x: share * (w - x), nova.weights.params, start)
    assert tree.gap(tree.sub(both.weights.params, start), moved) < 1e-9


def test_a_private_head_has_no_moments() -> None:
    run = images().simulate("fedadam+fedrep")
    head = run.bound.model.head_names()
    run.run_round()
    assert not set(head) & set(run.server.slots["fedadam"]["m"])


def test_fedexp_starts_clients_from_the_last_iterate() -> None:
    """Two rounds by hand: h = 10, one step of 0.05 halves the way to a."""
    run = quadratics((10.0, 10.0), (1.0, -0.5), 0.05, steps=1).simulate("fedexp(eps=0)")
    w = 0.0
    for _ in range(2):
        d = [0.5 * (a - w) for a in (1.0, -0.5)]
        mean, square = sum(d) / 2, sum(x * x for x in d) / 2
        w += max(1.0, square / (2 * mean * mean)) * mean
        run.run_round()
    assert position(run) == pytest.approx(w)


def test_groupdro_weights_stay_in_range_over_many_rounds() -> None:
    """Each client's q grows by e^50 a round, beyond every float after 15 of them; the means stay
    what they are without that common factor."""
    runs = [
        quadratics((2.0, 2.0), optima, 0.25, steps=1).simulate(GroupDRO(eta=eta))
        for optima, eta in (((1.0, -1.0), 100.0), ((1.0, -1.0), 0.0))
    ]
    for _ in range(30):
        for run in runs:
            run.run_round()
    assert position(runs[0]) == pytest.approx(position(runs[1]), abs=1e-12)
    assert float(runs[0].store.rows["groupdro"]["log_q"].min()) > 1000
    assert bool(torch.isfinite(runs[0].server.slots["groupdro"]["level"]))


def test_groupdro_sees_mixed_labels() -> None:
    """The loss is the one that was trained on: with Mixup, the mixture's."""
    run = images().simulate("groupdro(eta=1)+mixup(alpha=1)")
    terms = run.run_round().losses["task"]
    assert tree.gap(run.store.rows["groupdro"]["log_q"], terms) < 1e-12
