"""Versions of FLBoost with one fault each, which the comment names: an identity must find it."""

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch

from kedge.core import tree
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.parts.flboost import FLBoost
from tests.parts.faults import is_found


@dataclass(frozen=True)
class Friendly(FLBoost):
    def _generator_loss(self, *args):  # the generator helps the student: + L_md
        loss, buffers = super()._generator_loss(*args)
        other = FLBoost._generator_loss(dataclasses.replace(self, adversarial=False), *args)[0]
        return 2 * other - loss, buffers


@dataclass(frozen=True)
class OwnShares(FLBoost):
    def _ensemble(self, counts):  # n_k^y / n_k
        return counts / counts.sum(1, keepdim=True)


@dataclass(frozen=True)
class Undecayed(FLBoost):
    def server_step(self, r, weights):  # the same step size in every round
        return FLBoost.server_step(dataclasses.replace(self, decay=1.0), r, weights)


@dataclass(frozen=True)
class TurnedRound(FLBoost):
    def _discrepancy(self, r, measure, teachers, student, share):  # the other KL
        return super()._discrepancy(r, measure, student[None], teachers, share)


@dataclass(frozen=True)
class BatchSum(FLBoost):
    def _discrepancy(self, r, measure, teachers, student, share):  # not the mean over samples
        return len(student) * super()._discrepancy(r, measure, teachers, student, share)


@dataclass(frozen=True)
class FromTheAnchor(FLBoost):
    def server_step(self, r, weights):  # tunes last round's model, not the aggregated one
        return super().server_step(r, r.anchor)


@dataclass(frozen=True)
class Undecaying(FLBoost):
    def server_step(self, r, weights):  # no weight decay
        return FLBoost.server_step(dataclasses.replace(self, weight_decay=0.0), r, weights)


@dataclass(frozen=True)
class Stopped(FLBoost):
    def _generator_loss(self, *args):  # L_md does not reach G through the clients
        return FLBoost._generator_loss(dataclasses.replace(self, detach_teachers=True), *args)


@dataclass(frozen=True)
class Uniform(FLBoost):
    def _draw(self, key, counts, dtype):  # labels whatever the clients have
        return super()._draw(key, torch.ones_like(counts), dtype)


@dataclass(frozen=True)
class Collapsing(FLBoost):
    def _generator_loss(self, *args):  # - lambda_r L_r: all images alike
        loss, buffers = super()._generator_loss(*args)
        quiet = FLBoost._generator_loss(dataclasses.replace(self, lambda_r=0.0), *args)[0]
        return 2 * quiet - loss, buffers


@dataclass(frozen=True)
class Unlabelled(FLBoost):
    def _generator_loss(self, *args):  # L_cls forgotten
        return FLBoost._generator_loss(dataclasses.replace(self, lambda_cls=0.0), *args)


@dataclass(frozen=True)
class BatchWeights(FLBoost):
    def _generator_loss(self, *args):  # the samples' weights in L_cls are lost
        return FLBoost._generator_loss(dataclasses.replace(self, cls_weights="batch"), *args)


@dataclass(frozen=True)
class Forgetful(FLBoost):
    def server_step(self, r, weights):  # the generator starts anew in every round
        return super().server_step(r, weights)[0], r.server


@dataclass(frozen=True)
class Peeking(FLBoost):
    def _generator_loss(self, *args):  # always adversarial
        return FLBoost._generator_loss(dataclasses.replace(self, adversarial=True), *args)


@dataclass(frozen=True)
class Still(FLBoost):
    def _train_generator(self, r, student, fit, teams, game):  # G's statistics lost
        new = super()._train_generator(r, student, fit, teams, game)
        return new._replace(generator=Weights(new.generator.params, fit.generator.buffers))


@dataclass(frozen=True)
class Headless(FLBoost):
    def _tuned_names(self, spec):  # the bias does not learn
        return [n for n in super()._tuned_names(spec) if not n.endswith("bias")]


@dataclass(frozen=True)
class DecayedTwice(FLBoost):
    def server_step(self, r, weights):  # the decay acts on the run's rate, too
        r = copy.copy(r)
        r.lr = r.lr * self.decay**r.round
        return super().server_step(r, weights)


@dataclass(frozen=True)
class OwnRate(FLBoost):
    def server_step(self, r, weights):  # the run's rate is not asked for
        lr = 0.1 if self.lr is None else self.lr
        return FLBoost.server_step(dataclasses.replace(self, lr=lr), r, weights)


@dataclass(frozen=True)
class EarlyGenerator(FLBoost):
    def server_step(self, r, weights):  # the generator does not wait for the start
        _, slot = FLBoost.server_step(dataclasses.replace(self, start=0), r, weights)
        return super().server_step(r, weights)[0], slot


@dataclass(frozen=True)
class Hasty(FLBoost):
    def server_step(self, r, weights):  # the warm-up is forgotten
        return FLBoost.server_step(dataclasses.replace(self, warmup=0), r, weights)


@dataclass(frozen=True)
class WarmFromZero(FLBoost):
    def server_step(self, r, weights):  # rounds of the warm-up are counted from the first one
        own = dataclasses.replace(self, warmup=max(0, self.warmup - self.start))
        return FLBoost.server_step(own, r, weights)


@dataclass(frozen=True)
class BoundOfWeights(FLBoost):
    def server_step(self, r, weights):  # norms of the model in place of the update's
        r = copy.copy(r)
        r.anchor = tree.zeros_like(r.anchor)
        return super().server_step(r, weights)


@dataclass(frozen=True)
class Trusting(FLBoost):
    def server_step(self, r, weights):  # every sample counts
        return FLBoost.server_step(dataclasses.replace(self, confidence=None), r, weights)


@dataclass(frozen=True)
class Contaminated(FLBoost):
    def _student_forward(self, *args):  # statistics of generated images
        return FLBoost._student_forward(dataclasses.replace(self, student_bn="train"), *args)


@dataclass(frozen=True)
class Diluted(FLBoost):
    def _discrepancy(self, r, measure, teachers, student, share):  # a mean over the whole batch
        if self.confidence is not None:
            share = share / share.sum(0).max().clamp_min(1)
        return super()._discrepancy(r, measure, teachers, student, share)


FAULTY = [
    Friendly, OwnShares, Undecayed, TurnedRound, BatchSum, FromTheAnchor, Undecaying, Stopped,
    Uniform, Collapsing, Unlabelled, BatchWeights, Forgetful, Peeking, Still, Headless,
    DecayedTwice, OwnRate, EarlyGenerator, Hasty, WarmFromZero, BoundOfWeights, Trusting, Diluted,
    Contaminated,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())
