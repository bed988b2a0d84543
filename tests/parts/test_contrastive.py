"""MOON: both modes of its constant models, and faults that its identities must find."""

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from kedge.check.laws import LAWS
from kedge.check.problems import images, small_net
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.parts.contrastive import MOON
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class OneSetOfStatistics(MOON):
    def _previous(self, v):  # the previous model runs with the global model's statistics
        return super()._previous(v)._replace(buffers=v.anchor.buffers)


@dataclass(frozen=True)
class ByTheBatch(MOON):
    def term(self, v, params, batch, out):  # BatchNorm by the batch in all passes
        return MOON.term(dataclasses.replace(self, eval_mode=False), v, params, batch, out)


@dataclass(frozen=True)
class StoresTheAnchor(MOON):
    def reply(self, v, weights):  # the global model as the previous one
        return super().reply(v, v.anchor)


@dataclass(frozen=True)
class NeverSeen(MOON):
    def client_init(self, spec):  # a new client compares with the initial model
        first = super().client_init(spec)
        return first | {"seen": torch.ones_like(first["seen"])}


@dataclass(frozen=True)
class ColdTau(MOON):
    def term(self, v, params, batch, out):  # the temperature is ignored
        return MOON.term(dataclasses.replace(self, tau=1.0), v, params, batch, out)


@dataclass(frozen=True)
class LinearProjection(MOON):
    def _project(self, v, params, features):  # without the ReLU
        own = v.own(params)
        if not own:
            return features
        hidden = features @ own["weight0"].T + own["bias0"]
        return hidden @ own["weight1"].T + own["bias1"]


FAULTY = [OneSetOfStatistics, ByTheBatch, StoresTheAnchor, NeverSeen, ColdTau, LinearProjection]


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


@pytest.mark.long
@pytest.mark.parametrize("text", ["moon(projection=4, eval_mode=false)", "moon:fedcog"])
@pytest.mark.parametrize("law", ["pure", "engines", "resumable", "frugal", "ragged", "neutral"])
def test_options_obey_the_laws(text: str, law: str) -> None:
    (part,) = parse(text).parts
    LAWS[law](part)


@pytest.mark.parametrize("projection", [0, 4])
def test_features_may_have_several_axes(projection: int) -> None:
    """A head that flattens its input itself is the same network as one behind a flattening."""
    runs = []
    for inside in (True, False):
        stage, last = small_net("none", 3).get_submodule("stage1"), nn.Linear(16, 3).double()
        nn.init.constant_(last.weight, 0.1)
        nn.init.zeros_(last.bias)
        layers: OrderedDict[str, nn.Module] = OrderedDict(stage1=stage)
        if inside:
            layers["head"] = nn.Sequential(nn.Flatten(), last)
        else:
            layers |= {"flat": nn.Flatten(), "head": last}
        run = replace(images(), module=nn.Sequential(layers)).simulate(MOON(projection=projection))
        for _ in range(3):
            losses = run.run_round().losses
        runs.append((run, losses))
    (inside_run, inside_losses), (behind_run, behind_losses) = runs
    assert tree.gap(inside_losses, behind_losses) < 1e-12
    first, second = inside_run.weights.params, behind_run.weights.params
    assert len(first) == len(second)
    for name, value in second.items():
        other = first[name.replace("head.", "head.1.")]
        assert float((other - value).abs().max()) < 1e-12, name
