"""FedDC, FedSpeed, FedPVR and FedCM: every option, and faults that their identities must find."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from kedge.check.laws import LAWS
from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Adam
from kedge.core.part import Mean, Part, Sum
from kedge.errors import FieldError, IncompatibleError, ModelError, UnknownName
from kedge.parts.drift import FedCM, FedDC, FedPVR, FedSpeed, _drifted_delta
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class DCWholeSquare(FedDC):
    def term(self, v, params, batch, out):  # alpha in place of alpha/2
        near = 0.5 * self.alpha * tree.sq_norm(_drifted_delta(v.client["drift"], v, params))
        return super().term(v, params, batch, out) + near


@dataclass(frozen=True)
class DCDriftSign(FedDC):
    def term(self, v, params, batch, out):  # v - h - w
        turned = tree.map(lambda h: -h, v.client["drift"])
        near = 0.5 * self.alpha * tree.sq_norm(_drifted_delta(turned, v, params))
        return near + tree.dot(tree.sub(v.sent, v.client["slope"]), params)


@dataclass(frozen=True)
class DCSlopeSign(FedDC):
    def term(self, v, params, batch, out):  # <v, s_k - s>
        near = 0.5 * self.alpha * tree.sq_norm(_drifted_delta(v.client["drift"], v, params))
        return near + tree.dot(tree.sub(v.client["slope"], v.sent), params)


@dataclass(frozen=True)
class DCNoSlope(FedDC):
    def term(self, v, params, batch, out):  # the linear term is forgotten: FedTR's drift
        return 0.5 * self.alpha * tree.sq_norm(_drifted_delta(v.client["drift"], v, params))


@dataclass(frozen=True)
class DCLostDrift(FedDC):
    def reply(self, v, weights):  # h_k is not accumulated
        kept, change = super().reply(v, weights)
        return kept | {
            "drift": _drifted_delta(tree.zeros_like(v.client["drift"]), v, weights.params)
        }, change


@dataclass(frozen=True)
class DCForgetsServerSlope(FedDC):
    def reply(self, v, weights):  # s_k - s without s
        kept, _ = super().reply(v, weights)
        slope = tree.add(kept["slope"], v.sent)
        return kept | {"slope": slope}, Sum(tree.sub(slope, v.client["slope"]))


@dataclass(frozen=True)
class DCCohort(FedDC):
    def server_step(self, r, weights):  # means over the cohort in place of all clients
        r.num_clients = r.cohort
        return super().server_step(r, weights)


@dataclass(frozen=True)
class DCNotReleased(FedDC):
    def server_step(self, r, weights):  # h is kept but not added
        return weights, super().server_step(r, weights)[1]


@dataclass(frozen=True)
class SpeedDescends(FedSpeed):
    def correct(self, v, params, grads):  # a step down before the second gradient
        size = self.rho / (torch.sqrt(tree.sq_norm(grads)) + 1e-12)
        below = v.grad(tree.map(lambda w, g: w - size * g, params, grads))
        drifted = _drifted_delta(v.client, v, params)
        return tree.map(lambda u, b, g: self.lam * u + self.merge * (b - g), drifted, below, grads)


@dataclass(frozen=True)
class SpeedUnscaled(FedSpeed):
    def correct(self, v, params, grads):  # the ascent step is rho g, not rho g/|g|
        above = v.grad(tree.map(lambda w, g: w + self.rho * g, params, grads))
        drifted = _drifted_delta(v.client, v, params)
        return tree.map(lambda u, b, g: self.lam * u + self.merge * (b - g), drifted, above, grads)


@dataclass(frozen=True)
class SpeedInverse(FedSpeed):
    def correct(self, v, params, grads):  # the paper's 1/lambda
        size = 1 / max(self.lam, 1e-9)
        return FedSpeed(size, self.rho, self.merge).correct(v, params, grads)


@dataclass(frozen=True)
class SpeedNoMemory(FedSpeed):
    def correct(self, v, params, grads):  # a proximal term without its correction
        own = super().correct(v, params, grads)
        return tree.map(lambda c, h: c - self.lam * h, own, v.client)


@dataclass(frozen=True)
class SpeedProxInTheAscent(FedSpeed):
    def term(self, v, params, batch, out):  # the proximal term bends the ascent step, too
        return 0.5 * self.lam * tree.sq_norm(_drifted_delta(v.client, v, params))

    def correct(self, v, params, grads):
        own = super().correct(v, params, grads)
        return tree.map(lambda c, u: c - self.lam * u, own, _drifted_delta(v.client, v, params))


@dataclass(frozen=True)
class SpeedAdds(FedSpeed):
    def correct(self, v, params, grads):  # g + a g' in place of (1 - a) g + a g'
        own = super().correct(v, params, grads)
        return tree.map(lambda c, g: c + self.merge * g, own, grads)


@dataclass(frozen=True)
class SpeedCohort(FedSpeed):
    def server_step(self, r, weights):  # the cohort's mean of h
        r.num_clients = r.cohort
        return super().server_step(r, weights)


@dataclass(frozen=True)
class PVREverywhere(FedPVR):
    def _corrected(self, spec):  # SCAFFOLD
        return tree.zeros_like(spec.params)


@dataclass(frozen=True)
class PVRBody(FedPVR):
    def _corrected(self, spec):  # the wrong end
        head = set(spec.model.head_names()) if len(spec.params) > 1 else set()
        return tree.zeros_like({n: p for n, p in spec.params.items() if n not in head})


@dataclass(frozen=True)
class PVRSign(FedPVR):
    def correct(self, v, params, grads):
        return tree.sub(v.client, v.sent)


@dataclass(frozen=True)
class PVRCohort(FedPVR):
    def server_step(self, r, weights):  # 1/|S|
        r.num_clients = r.cohort
        return super().server_step(r, weights)


@dataclass(frozen=True)
class CMUndamped(FedCM):
    def correct(self, v, params, grads):  # g + (1 - a) m
        if v.phase == "first":
            return {}
        return tree.map(lambda m: (1 - self.alpha) * m, v.sent)


@dataclass(frozen=True)
class CMSwapped(FedCM):
    def correct(self, v, params, grads):  # (1 - a) g + a m
        if v.phase == "first":
            return {}
        return tree.map(lambda m, g: self.alpha * (m - g), v.sent, grads)


@dataclass(frozen=True)
class CMSign(FedCM):
    def send(self, server):  # m points uphill
        return tree.scale(server, -1.0)


@dataclass(frozen=True)
class CMFirst(FedCM):
    def phase(self, round):  # a g in the first round, whatever the start
        return "later"


@dataclass(frozen=True)
class CMWholeFirst(FedCM):
    def phase(self, round):  # g in the first round, whatever the start
        return "later" if round else "first"


@dataclass(frozen=True)
class CMWholeUpdate(FedCM):
    def reply(self, v, weights):  # not divided by the number of steps
        return {}, {"steps": Mean(torch.ones_like(v.info.lr))}


@dataclass(frozen=True)
class CMServerStep(FedCM):
    def server_step(self, r, weights):  # eta_g enters the direction, too
        weights, m = super().server_step(r, weights)
        return weights, tree.scale(m, self.eta_g)


FAULTY = [
    DCWholeSquare, DCDriftSign, DCSlopeSign, DCNoSlope, DCLostDrift, DCForgetsServerSlope,
    DCCohort, DCNotReleased, SpeedDescends, SpeedUnscaled, SpeedInverse, SpeedNoMemory,
    SpeedProxInTheAscent, SpeedAdds, SpeedCohort, PVREverywhere, PVRBody, PVRSign, PVRCohort,
    CMUndamped, CMSwapped, CMSign, CMFirst, CMWholeFirst, CMWholeUpdate, CMServerStep,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- options --------------------------------------------------------------------------------------

OPTIONS = [
    "fedspeed(lam=1, rho=0.05, merge=0.5)",
    "fedspeed(rho=0)",
    "fedpvr(from_stage=stage2)",
    "fedpvr(from_stage=head, eta_g=0.5)",
    "fedcm(alpha=0.5, eta_g=1.5)",
    "fedcm(start=gradient)",
    "feddc(alpha=0)",
]


@pytest.mark.long
@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize(
    "law", ["pure", "engines", "resumable", "ragged", "permutation", "additive"]
)
def test_options_obey_the_laws(text: str, law: str) -> None:
    (part,) = parse(text).parts
    LAWS[law](part)


def test_presets() -> None:
    assert parse("fedcm:fedbr") == parse("fedcm(alpha=0.1)")


@pytest.mark.long
@pytest.mark.parametrize("text", ["feddc", "fedspeed(lam=0.5, rho=0)", "fedpvr", "fedcm"])
def test_drift_goes_away_on_two_quadratics(text: str) -> None:
    """Where FedAvg settles at 0.713, FedCM comes nearer and the others reach 10/11."""
    run = quadratics().simulate(text)
    for _ in range(150):
        run.run_round()
    gap = abs(position(run) - 10 / 11)
    assert gap < (0.15 if text == "fedcm" else 1e-6)


@pytest.mark.parametrize(
    ("text", "error"),
    [("feddc", "sgd"), ("fedpvr", "sgd"), ("fedcm", "sgd")],
)
def test_adam_has_no_sum_of_steps(text: str, error: str) -> None:
    with pytest.raises(IncompatibleError, match=error):
        images(optim=Adam()).simulate(text)


def test_momentum_is_divided_out_of_fedcms_direction() -> None:
    """With the same gradient in every step, m is a share alpha of it whatever the momentum."""
    found = []
    for momentum in (0.0, 0.9):
        optim = SGD(lr=1e-9, momentum=momentum)
        problem = quadratics(steps=4, optim=optim)
        if momentum:
            with pytest.warns(UserWarning, match="fedcm assumes plain SGD"):
                run = problem.simulate("fedcm")
        else:
            run = problem.simulate("fedcm")
        run.run_round()
        found.append(float(run.server.slots["fedcm"]["head.weight"]))
    assert found == pytest.approx([-0.5, -0.5], abs=1e-6)


def test_fedcm_uses_the_learning_rate_of_the_round() -> None:
    run = quadratics(steps=1, optim=SGD(lr=0.05, schedule="exponential(0.5)")).simulate(
        FedCM(alpha=1.0)
    )
    run.run_round()
    run.run_round()
    # plain steps: w = 0.25, where the mean gradient is (0.25 - 7.5)/2
    assert float(run.server.slots["fedcm"]["head.weight"]) == pytest.approx(-3.625)
    assert position(run) == pytest.approx(0.25 + 0.025 * 3.625)


def test_fedspeed_perturbs_by_the_norm_over_all_leaves() -> None:
    """lam = 0 in a single round with one client, without the release of h, is FedSAM. Client 1 has
    9 of all 28 samples, and releases that share of its h."""
    speed = images(steps=1).simulate(FedSpeed(lam=0.0, rho=0.3))
    sam = images(steps=1).simulate("fedsam(rho=0.3)")
    start = speed.weights.params
    speed.run_round([1])
    sam.run_round([1])
    released = tree.map(lambda w, x: x + (w - x) * (1 + 9 / 28), sam.weights.params, start)
    assert tree.gap(speed.weights.params, released) < 1e-12


# -- FedPVR's layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "first"),
    [("", "head.weight"), ("head", "head.weight"), ("stage2", "stage2.1.weight"), ("stage1", None)],
)
def test_corrected_layers(stage: str, first: str | None) -> None:
    run = images(norm="bn").simulate(FedPVR(from_stage=stage))
    names = list(run.weights.params)
    wanted = names[names.index(first) :] if first else names
    size = sum(run.weights.params[n].numel() for n in wanted)
    for held in (run.server.slots["fedpvr"], run.bound.client()["fedpvr"]):
        assert list(held) == wanted
        assert tree.numel(held) == size
    plain = images(norm="bn").simulate("fedavg").run_round()
    done = run.run_round()
    assert done.down_bytes - plain.down_bytes == 3 * 8 * size
    assert done.up_bytes - plain.up_bytes == 3 * 8 * size


def test_from_the_first_layer_on_it_is_scaffold() -> None:
    runs = [images().simulate(m) for m in ("fedpvr(from_stage=stage1)", "scaffold")]
    for run in runs:
        for _ in range(3):
            run.run_round()
    assert tree.equal(runs[0].weights, runs[1].weights)


def test_first_round_is_fedavg() -> None:
    runs = [images().simulate(m) for m in ("fedpvr", "fedavg")]
    for run in runs:
        run.run_round()
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-14


def test_a_private_head_leaves_nothing_to_correct() -> None:
    runs = [images().simulate(m) for m in ("fedpvr+fedrep", "fedrep")]
    for run in runs:
        for _ in range(2):
            run.run_round()
    assert runs[0].server.slots["fedpvr"] == {}
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-14


class Branches(nn.Module):
    """Not sequential, and without a name that says where its head is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.gate, self.two = nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.gate(self.one(x.flatten(1))))


def test_models_that_are_not_sequential() -> None:
    problem = dataclasses.replace(images(), module=Branches().double())
    with pytest.raises(ModelError, match="fedpvr needs to know the model's head"):
        problem.simulate("fedpvr")
    run = problem.simulate("fedpvr(from_stage=two)")
    assert list(run.server.slots["fedpvr"]) == ["two.weight", "two.bias"]
    with pytest.raises(FieldError, match="fedpvr.from_stage = 'gate' has no parameters"):
        problem.simulate("fedpvr(from_stage=gate)")
    named = Simulation(problem.federation, Model(Branches().double(), head="two"), "fedpvr")
    assert list(named.server.slots["fedpvr"]) == ["two.weight", "two.bias"]


def test_an_unknown_layer_is_named() -> None:
    with pytest.raises(UnknownName, match="no layer 'stage3'. Did you mean 'stage2'"):
        images().simulate("fedpvr(from_stage=stage3)")
