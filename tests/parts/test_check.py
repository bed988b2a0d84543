"""``check_part`` finds what is wrong with a user's own part, and says it."""

from dataclasses import dataclass, field

import pytest
import torch

import kedge
from kedge.check.laws import CURVATURES, LAWS, LR, OPTIMA, ROUNDS, STEPS, LawViolation
from kedge.check.problems import fedavg_point, position, quadratics
from kedge.core import tree
from kedge.core.part import Part, Stack, Sum
from kedge.errors import CheckFailed, HookError, KedgeError
from kedge.parts.drift import FedCM
from kedge.parts.proximal import FedDyn, FedProx, FedSAM


def failures(part: Part) -> dict[str, str]:
    return {f.name: f.detail for f in kedge.check_part(part).failures()}


@dataclass(frozen=True)
class Good(Part):
    mu: float = 0.1

    name = "good"
    neutral = {"mu": 0.0}
    strays = 0.1  # weight decay: the objective is another one

    def term(self, v, params, batch, out):
        return self.mu * tree.sq_norm(params)


def test_a_right_part_passes() -> None:
    report = kedge.check_part(Good())
    assert report.ok
    assert report.raise_if_failed() is report
    assert {f.name for f in report.findings if f.holds} >= {"pure", "engines", "neutral"}
    *lines, verdict = str(report).splitlines()
    assert len(lines) == len(report.findings)
    held = sum(line.startswith("holds") for line in lines)
    assert verdict == f"good: {held} laws and identities hold"


@pytest.mark.long
def test_a_part_with_another_objective_declares_by_how_much() -> None:
    class Silent(Good):
        strays = 0.0

    assert set(failures(Silent())) == {"stable"}
    fault = failures(Silent())["stable"]
    assert "how much farther it settles: strays = 0.05" in fault

    class Declared(Good):
        strays = 0.05

    assert not failures(Declared())


@dataclass(frozen=True)
class Flipped(Part):
    """SCAFFOLD written anew, with the sign of the control variate turned."""

    name = "flipped"
    sends = uploads = keeps = "P"

    def server_init(self, spec):
        return tree.zeros_like(spec.params)

    def client_init(self, spec):
        return tree.zeros_like(spec.params)

    def send(self, server):
        return server

    def correct(self, v, params, grads):
        return tree.sub(v.sent, v.client)

    def reply(self, v, weights):
        k_eta = v.info.effective_steps * v.info.lr
        new = tree.map(
            lambda ck, c, x, y: ck - c + (y - x) / k_eta,
            v.client,
            v.sent,
            v.anchor.params,
            weights.params,
        )
        return new, Sum(tree.sub(new, v.client))

    def server_step(self, r, weights):
        return weights, tree.map(lambda c, d: c + d / r.num_clients, r.server, r.uploads)


def test_a_flipped_sign_is_found() -> None:
    found = failures(Flipped())
    assert set(found) == {"stable"}
    assert "sign is likely to be wrong" in found["stable"] or "not finite" in found["stable"]


@dataclass(frozen=True)
class InSelf(Part):
    """Counts its calls in an attribute."""

    memory: dict = field(default_factory=dict)
    name = "inself"

    def term(self, v, params, batch, out):
        self.memory["calls"] = self.memory.get("calls", 0) + 1
        return 1e-3 * self.memory["calls"] * tree.sq_norm(params)


@dataclass(frozen=True)
class OnClass(Part):
    """The same on the class, past the frozen dataclass."""

    name = "onclass"
    calls = 0

    def term(self, v, params, batch, out):
        type(self).calls += 1
        return 1e-3 * type(self).calls * tree.sq_norm(params)


@pytest.mark.parametrize(
    ("cls", "what"),
    [(InSelf, "inself.term changed self.memory"), (OnClass, "changed OnClass.calls")],
)
def test_state_outside_the_slots_is_found(cls: type[Part], what: str) -> None:
    found = failures(cls())
    assert what in found["pure"]
    assert "bit-identical" in found["resumable"]  # a law finds it by its effect, too


@dataclass(frozen=True)
class SilentState(Part):
    """Keeps something in an attribute without using it."""

    log: list = field(default_factory=list)
    name = "silent"

    def term(self, v, params, batch, out):
        self.log.append(1)
        return 0.0 * tree.sq_norm(params)


def test_an_unused_attribute_is_found_too() -> None:
    assert (
        "silent.term changed self.log; a part is never changed" in failures(SilentState())["pure"]
    )


@dataclass(frozen=True)
class Greedy(Part):
    """Rescales the gradient itself, for itself and for everybody after it."""

    name = "greedy"

    def correct(self, v, params, grads):
        for name in list(grads):
            grads[name] = 0.5 * grads[name]
        return tree.zeros_like(grads)


def test_a_correction_that_does_not_add_is_found() -> None:
    assert "correct must not modify grads" in failures(Greedy())["additive"]


@dataclass(frozen=True)
class InPlace(Part):
    name = "inplace"
    keeps = "P"

    def client_init(self, spec):
        return tree.zeros_like(spec.params)

    def reply(self, v, weights):
        for leaf in tree.leaves(v.client):
            leaf.add_(1.0)
        return v.client, {}


def test_a_change_in_place_is_found() -> None:
    assert "in place" in failures(InPlace())["pure"]


@dataclass(frozen=True)
class Verbose(Part):
    name = "verbose"
    uploads = "1"

    def reply(self, v, weights):
        return {}, Sum(weights.params)


def test_an_undeclared_upload_is_found() -> None:
    fault = failures(Verbose())["frugal"]
    assert fault.startswith("uploads = '1' declares 1 numbers, but")
    assert fault.endswith("; declare uploads = 'P'")


@dataclass(frozen=True)
class Forgetful(Part):
    name = "forgetful"

    def client_init(self, spec):
        return {"mean": spec.params, "seen": torch.zeros(2)}

    def reply(self, v, weights):
        return v.client, {}


def test_an_undeclared_state_is_found_with_the_sizes_for_a_formula() -> None:
    fault = failures(Forgetful())["frugal"]
    assert fault.startswith("keeps = '0' declares 0 numbers, but there are 173; declare keeps as a")
    assert "here P = 171, W = 171" in fault


@dataclass(frozen=True)
class Unordered(Part):
    """Depends on which client happens to be first."""

    name = "unordered"
    needs_clients = True

    def combine(self, r):
        return tree.map(lambda w, x: w[0] - x, r.clients.params, r.anchor.params)


def test_dependence_on_the_order_is_found() -> None:
    assert "two orders of the clients" in failures(Unordered())["permutation"]


@dataclass(frozen=True)
class Python(Part):
    """Branches on a tensor, which works in a loop only."""

    name = "python"

    def term(self, v, params, batch, out):
        return out.logits.sum() if out.logits.sum() > 0 else 0.0 * out.logits.sum()


def test_a_branch_on_a_tensor_is_found() -> None:
    assert "python.term failed" in failures(Python())["engines"]


@dataclass(frozen=True)
class Peeks(Part):
    """Reads single clients without saying so."""

    name = "peeks"
    uploads = "1"

    def reply(self, v, weights):
        return {}, Stack(v.info.num_examples)

    def server_step(self, r, weights):
        return weights, {"seen": r.clients.params}


def test_an_undeclared_need_is_found() -> None:
    assert "declare needs_clients = True" in failures(Peeks())["pure"]


@dataclass(frozen=True)
class NotNeutral(Part):
    name = "notneutral"
    mu: float = 1.0
    neutral = {"mu": 0.0}

    def term(self, v, params, batch, out):
        return (self.mu + 1e-9) * tree.sq_norm(params)


def test_a_wrong_neutral_setting_is_found() -> None:
    assert "differs from fedavg by" in failures(NotNeutral())["neutral"]


@dataclass(frozen=True)
class TorchRandom(Part):
    """Draws from torch's global generator."""

    name = "torchrandom"

    def term(self, v, params, batch, out):
        return torch.rand((), dtype=out.logits.dtype) * tree.sq_norm(params)


@dataclass(frozen=True)
class Stale(Part):
    """A running mean of the global models, with old and new exchanged."""

    beta: float = 0.5
    name = "stale"
    neutral = {"beta": 0.0}

    def server_init(self, spec):
        return spec.params

    def server_step(self, r, weights):
        return weights, tree.map(
            lambda e, w: self.beta * w + (1 - self.beta) * e, r.server, weights.params
        )

    def output(self, server, weights):
        return kedge.Weights(server, weights.buffers)


def test_an_output_that_is_not_neutral_is_found() -> None:
    assert set(failures(Stale())) == {"neutral"}
    assert "trains as fedavg, but its output differs" in failures(Stale())["neutral"]


def test_randomness_outside_the_key_is_found() -> None:
    assert "torchrandom.term draws from the global" in failures(TorchRandom())["pure"]


@dataclass(frozen=True)
class RandomServer(Part):
    """Draws from torch's global generator on the server, where no client is."""

    name = "randomserver"

    def server_step(self, r, weights):
        noise = torch.rand(())
        return weights._replace(params=tree.map(lambda p: p + noise, weights.params)), {}


def test_randomness_on_the_server_is_found() -> None:
    assert "two equal runs" in failures(RandomServer())["pure"]


@dataclass(frozen=True)
class ServerState(Part):
    """Keeps something in an attribute, on the server."""

    log: list = field(default_factory=list)
    name = "serverstate"

    def server_step(self, r, weights):
        self.log.append(1)
        return weights, {}


def test_state_on_the_server_is_found() -> None:
    assert "changed its own attributes" in failures(ServerState())["pure"]


def test_a_printed_report_names_what_fails() -> None:
    report = kedge.check_part(Flipped())
    wrong = [f.name for f in report.failures()]
    assert wrong
    lines = str(report).splitlines()
    assert [line.split()[2] for line in lines if line.startswith("FAILS")] == [
        name.split()[0] for name in wrong
    ]
    assert lines[-1] == f"{report.part}: fails: {', '.join(wrong)}"


def test_failures_are_raised_with_their_reasons() -> None:
    with pytest.raises(CheckFailed, match=r"verbose fails its check\n  law frugal: uploads"):
        kedge.check_part(Verbose()).raise_if_failed()


def test_check_takes_one_part() -> None:
    with pytest.raises(KedgeError, match="one part at a time"):
        kedge.check_part("scaffold+fedprox")


def test_a_failing_hook_names_part_hook_client_and_step() -> None:
    from kedge.check.problems import images

    @dataclass(frozen=True)
    class Fails(Part):
        name = "fails"

        def term(self, v, params, batch, out):
            return out.logits @ out.logits

    with pytest.raises(HookError, match=r"fails.term failed: RuntimeError: .*client 0, step 0"):
        images().simulate(Fails()).run_round()
    with pytest.raises(HookError, match=r"fails.term failed: RuntimeError: .*client 0, step 0"):
        images().simulate(Fails(), "vector").run_round()
    with pytest.raises(HookError, match=r"python.term failed: .*engine=loop names the client"):
        images().simulate(Python(), "vector").run_round()


@dataclass(frozen=True)
class ProxSign(FedProx):
    """Pushes away from the global model."""

    def term(self, v, params, batch, out):
        return -super().term(v, params, batch, out)


@dataclass(frozen=True)
class DynSign(FedDyn):
    """Keeps the negative of its gradient."""

    def reply(self, v, weights):
        state, uploads = super().reply(v, weights)
        return tree.scale(state, -1.0), uploads


@dataclass(frozen=True)
class MomentumSign(FedCM):
    """Corrects in the opposite direction."""

    def correct(self, v, params, grads):
        return tree.scale(super().correct(v, params, grads), -1.0)


@dataclass(frozen=True)
class Descends(FedSAM):
    """Goes down before it takes the gradient."""

    def correct(self, v, params, grads):
        return tree.scale(super().correct(v, params, grads), -1.0)


@pytest.mark.parametrize(
    "part", [ProxSign(), DynSign(alpha=1.0), MomentumSign(), Descends()], ids=lambda p: p.name
)
def test_a_wrong_sign_that_stays_bounded_is_found(part: Part) -> None:
    """All of them stay within the clients' optima, so that a bound on w finds none."""
    with pytest.raises(LawViolation, match="A sign is likely to be wrong"):
        LAWS["stable"](part)


def test_fedavg_settles_where_the_formula_says() -> None:
    run = quadratics(CURVATURES, OPTIMA, LR, STEPS).simulate("fedavg")
    for _ in range(ROUNDS):
        run.run_round()
    expected = fedavg_point(CURVATURES, OPTIMA, LR, STEPS)
    assert position(run) == pytest.approx(expected, abs=1e-12)
