"""FedLC and LogitAdjust: options, and faults that their identities must find."""

from dataclasses import dataclass

import pytest
import torch

from kedge.check.laws import LAWS
from kedge.check.problems import images, step_view
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.errors import FieldError, IncompatibleError
from kedge.parts.regularisers import FedLC, LogitAdjust
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class MarginTurned(FedLC):
    def logits(self, v, batch, logits):
        return 2 * logits - super().logits(v, batch, logits)


@dataclass(frozen=True)
class SquareRoot(FedLC):
    def logits(self, v, batch, logits):  # n^(-1/2)
        return logits - self.tau * v.label_counts.clamp_min(1e-12) ** -0.5


@dataclass(frozen=True)
class MarginOfShares(FedLC):
    def logits(self, v, batch, logits):  # shares in place of counts
        share = v.label_counts / v.label_counts.sum()
        return logits - self.tau * share.clamp_min(1e-12) ** -0.25


@dataclass(frozen=True)
class TrueClassOnly(FedLC):
    def logits(self, v, batch, logits):  # as a margin loss: the other classes keep their logits
        own = torch.arange(logits.shape[1]) == batch.y[:, None]
        return torch.where(own, super().logits(v, batch, logits), logits)


@dataclass(frozen=True)
class NoMargin(FedLC):
    def logits(self, v, batch, logits):  # missing classes have no margin
        margin = v.label_counts.clamp_min(1e-12) ** -0.25
        return logits - self.tau * torch.where(v.label_counts > 0, margin, 0.0)


@dataclass(frozen=True)
class PriorTurned(LogitAdjust):
    def logits(self, v, batch, logits):
        return 2 * logits - super().logits(v, batch, logits)


@dataclass(frozen=True)
class PriorSmoothed(LogitAdjust):
    def logits(self, v, batch, logits):  # one sample more of every class
        counts = v.label_counts + 1
        return logits + self.tau * torch.log(counts / counts.sum())


@dataclass(frozen=True)
class PriorUntempered(LogitAdjust):
    def logits(self, v, batch, logits):  # tau is forgotten
        return logits + torch.log((v.label_counts / v.label_counts.sum()).clamp_min(1e-12))


FAULTY = [
    MarginTurned, SquareRoot, MarginOfShares, TrueClassOnly, NoMargin, PriorTurned, PriorSmoothed,
    PriorUntempered,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fedlc:feddecorr", "fedlc(tau=3)", "logitadjust(tau=0.5)"])
def test_both_engines_agree_for_every_option(text: str) -> None:
    LAWS["engines"](parse(text).parts[0])


def test_presets_and_ranges() -> None:
    assert parse("fedlc:feddecorr").parts[0] == FedLC(tau=0.1)
    with pytest.raises(FieldError, match=r"logitadjust.tau = -1.0 is below 0"):
        LogitAdjust(tau=-1.0)


@pytest.mark.parametrize("text", ["fedlc", "logitadjust"])
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_classes_are_needed(text: str, task: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{text} has no meaning for {task}"):
        images(task=task).simulate(text)


def test_every_client_has_its_own_counts() -> None:
    """Margins at the first step of each client of a skewed federation."""
    part = FedLC(tau=2.0)
    run = images().simulate(part)
    counts = run.federation.label_counts()
    for k in range(3):
        v, batch = step_view(run, k, part, "logits")
        margin = -part.logits(v, batch, torch.zeros(len(batch.y), 3, dtype=counts.dtype))[0]
        wanted = [2 * float(n) ** -0.25 if n else 2e3 for n in counts[k]]
        assert margin.tolist() == pytest.approx(wanted)


def test_shifts_add_up() -> None:
    """Two parts in either order; the evaluation sees neither."""
    runs = [images().simulate(m) for m in ("fedlc+logitadjust", "logitadjust+fedlc", "fedlc")]
    for run in runs:
        run.run_round()
    assert tree.gap(runs[0].weights, runs[1].weights) < 1e-12
    assert tree.gap(runs[0].weights, runs[2].weights) > 1e-6
    x = runs[0].federation.clean(torch.arange(5)).x
    plain = runs[0].bound.model.forward(runs[0].weights, x, "eval").logits
    with torch.no_grad():
        assert torch.equal(runs[0].module()(x), plain)


@pytest.mark.parametrize("text", ["fedlc", "logitadjust"])
def test_missing_classes_keep_their_rows_of_the_head(text: str) -> None:
    """One round of a client that lacks a class: its bias and weights do not move."""
    run = images().simulate(text)
    start, lacks = run.weights.params, run.federation.label_counts()[1] == 0
    assert int(lacks.sum()) == 1
    run.run_round([1])
    for name in ("head.weight", "head.bias"):
        moved = (run.weights.params[name] - start[name]).reshape(3, -1).abs().amax(1)
        assert float(moved[lacks].max()) < 1e-12
        assert float(moved[~lacks].min()) > 1e-6
