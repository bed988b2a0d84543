"""DANN: both ways to take steps, and faults that its identities must find."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.laws import LAWS
from kedge.check.problems import images, small_net, step_view
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.optim import SGD
from kedge.errors import FieldError
from kedge.parts.adversarial import DANN, _discriminate
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class Helps(DANN):
    def term(self, v, params, batch, out):  # the features are not reversed
        own, client = v.own(params), v.info.client.expand(len(out.features))
        learns = F.cross_entropy(_discriminate(own, out.features.detach()), client)
        shown = F.cross_entropy(_discriminate(tree.detach(own), out.features), client)
        return learns + self.lam * shown


@dataclass(frozen=True)
class Scaled(DANN):
    def term(self, v, params, batch, out):  # lam on the discriminator's own step
        own, client = v.own(params), v.info.client.expand(len(out.features))
        learns = F.cross_entropy(_discriminate(own, out.features.detach()), client)
        fooled = F.cross_entropy(_discriminate(tree.detach(own), out.features), client)
        return self.lam * (learns - fooled)


@dataclass(frozen=True)
class Leaks(DANN):
    def term(self, v, params, batch, out):  # the discriminator's step reaches the features
        own, client = v.own(params), v.info.client.expand(len(out.features))
        loss = F.cross_entropy(_discriminate(own, out.features), client)
        return loss - self.lam * F.cross_entropy(
            _discriminate(tree.detach(own), out.features), client
        )


@dataclass(frozen=True)
class Weakened(DANN):
    def term(self, v, params, batch, out):  # the reversed loss moves the discriminator, too
        own, client = v.own(params), v.info.client.expand(len(out.features))
        learns = F.cross_entropy(_discriminate(own, out.features.detach()), client)
        return learns - self.lam * F.cross_entropy(_discriminate(own, out.features), client)


@dataclass(frozen=True)
class OneForAll(DANN):
    def term(self, v, params, batch, out):  # everybody is client 0
        own, client = v.own(params), 0 * v.info.client.expand(len(out.features))
        learns = F.cross_entropy(_discriminate(own, out.features.detach()), client)
        fooled = F.cross_entropy(_discriminate(tree.detach(own), out.features), client)
        return learns - self.lam * fooled


@dataclass(frozen=True)
class ModelFirst(DANN):
    def trainable(self, v, params):  # the turns are swapped
        return {n: ~flag for n, flag in super().trainable(v, params).items()}


@dataclass(frozen=True)
class NoTurns(DANN):
    def trainable(self, v, params):
        return {}


FAULTY = [Helps, Scaled, Leaks, Weakened, OneForAll, ModelFirst, NoTurns]


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[DANN]) -> None:
    assert is_found(cls())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["engines", "resumable", "frugal", "ragged", "neutral"])
def test_laws_hold_in_turns(law: str) -> None:
    LAWS[law](DANN(lam=0.5, width=4, alternate=True))


def test_presets_and_ranges() -> None:
    assert parse("dann:fedbr").parts[0] == DANN(lam=0.01, width=256, alternate=True)
    with pytest.raises(FieldError, match=r"dann.lam = -0.1 is below 0"):
        DANN(lam=-0.1)


def test_shapes_follow_features_and_clients() -> None:
    run = images(sizes=(5, 9, 14, 6)).simulate("dann(width=7)")
    own = tree.under(run.weights.params, "dann")
    assert {n: tuple(p.shape) for n, p in own.items()} == {
        "weight0": (7, 6), "bias0": (7,), "weight1": (7, 7), "bias1": (7,), "weight2": (4, 7),
        "bias2": (4,),
    }  # fmt: skip
    assert float(own["weight0"].abs().max()) <= 6**-0.5


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_turns_stop_momentum_and_decay(engine: str, momentum: float) -> None:
    """One step belongs to the discriminator: the model stays, weight decay or not."""
    optim = SGD(lr=0.05, momentum=momentum, weight_decay=0.1)
    run = images(steps=1, optim=optim).simulate(DANN(width=4, alternate=True), engine)
    start = run.weights.params
    run.run_round()
    moved = {n: float((run.weights.params[n] - p).abs().max()) for n, p in start.items()}
    assert all((size > 0) == n.startswith("dann/") for n, size in moved.items())


def test_features_hide_the_client() -> None:
    """A discriminator that trains against the model ends with a higher loss than one that is left
    alone; the logged term is 1 - lam of it."""
    found = []
    for lam in (0.0, 3.0):
        problem = images(sizes=(20, 20), batch=10, optim=SGD(lr=0.2))
        run = problem.simulate(DANN(lam=lam, width=16))
        for _ in range(60):
            terms = run.run_round().losses
        found.append(float(terms["dann"].mean()) / (1 - lam))
    assert found[1] > found[0] + 0.03


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_other_tasks(task: str) -> None:
    """The term of the first step: (1 - lam) times the cross-entropy of guessing the client."""
    part = DANN(width=4, lam=0.1)
    run = images(task=task, steps=1).simulate(part)
    expected = []
    for k in range(3):
        v, batch = step_view(run, k, part)
        features = v.forward(run.weights.params, batch.x).features.flatten(1)
        guess = _discriminate(v.own(run.weights.params), features)
        expected.append(0.9 * float(F.cross_entropy(guess, torch.full((len(features),), k))))
    assert run.run_round().losses["dann"].tolist() == pytest.approx(expected, abs=1e-12)


def test_features_may_have_several_axes() -> None:
    """A head may flatten its input itself."""
    part = DANN(width=4, lam=0.5)
    net = nn.Sequential(OrderedDict(stage1=small_net("none", 3).get_submodule("stage1")))
    net.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double())
    run = replace(images(), module=net).simulate(part)
    v, batch = step_view(run, 2, part)
    out = v.forward(run.weights.params, batch.x)
    assert out.features.shape == (5, 4, 2, 2)
    guess = _discriminate(v.own(run.weights.params), out.features.flatten(1))
    expected = 0.5 * F.cross_entropy(guess, torch.full((5,), 2))
    torch.testing.assert_close(part.term(v, run.weights.params, batch, out), expected)
