"""MOON: both modes of its constant models, and faults that its identities must find."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from faults import is_found

from kedge.check.laws import LAWS
from kedge.core.method import parse
from kedge.core.part import Part
from kedge.parts.contrastive import MOON

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


@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


@pytest.mark.parametrize("text", ["moon(projection=4, eval_mode=false)", "moon:fedcog"])
@pytest.mark.parametrize("law", ["pure", "engines", "resumable", "frugal", "ragged", "neutral"])
def test_options_obey_the_laws(text: str, law: str) -> None:
    (part,) = parse(text).parts
    LAWS[law](part)
