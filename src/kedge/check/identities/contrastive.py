"""Identities of the methods in parts/contrastive.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kedge.check.identities.common import close, features_of, first_batch, layers
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.model import Mode
from kedge.parts.contrastive import MOON


@oracle(MOON)
def equal_models_give_log_2(cls: type[MOON]) -> Iterator[Claim]:
    """Without a previous model all three models coincide, so the two cosines are equal."""
    problem = images(sizes=(5, 5), steps=1)
    run, plain = problem.simulate(cls(mu=3.0, projection=4)), problem.trained("fedavg")
    terms = run.run_round().losses[cls.name]
    yield Claim("term / mu at equal models", math.log(2), float(terms[0]) / 3.0)
    model = tree.map(lambda _, w: w, plain.weights, run.weights)
    yield close("effect of its gradient on the model", plain.weights, model)


@oracle(MOON)
def both_models_run_in_evaluation_mode(cls: type[MOON]) -> Iterator[Claim]:
    """In round 0 the term has no gradient, so client 1's previous model is what FedAvg makes of it
    alone, BatchNorm statistics included. The term of its first step in round 1 follows from three
    plain passes and a projection by hand: the model in training normalises by the batch, the global
    and the previous one by their own statistics, or by the batch for eval_mode = false. A client
    that was absent from round 0 has the term log 2."""
    problem = images(sizes=(5, 9), batch=5, steps=1, norm="bn")
    alone = problem.trained("fedavg", clients=[1])
    for eval_mode in (True, False):
        part = cls(mu=1.5, tau=0.4, projection=4, eval_mode=eval_mode)
        run = problem.trained(part)
        own = tree.under(run.weights.params, cls.name)
        batch = first_batch(run, 1)
        fixed: Mode = "eval" if eval_mode else "probe"
        modes: tuple[Mode, ...] = ("probe", fixed, fixed)
        models = (run.weights, run.weights, alone.weights)
        here, there, old = (
            F.normalize(layers(own, features_of(run, batch.x, weights, mode)))
            for weights, mode in zip(models, modes, strict=True)
        )
        now, before = (here * there).sum(1), (here * old).sum(1)
        expected = float(1.5 * torch.log1p(torch.exp((before - now) / 0.4)).mean())
        got = float(run.run_round().losses[cls.name][1])
        yield Claim(f"term of round 1 with eval_mode = {eval_mode}", expected, got)
        late = problem.trained(part, clients=[0])
        first = float(late.run_round([1]).losses[cls.name][0])
        yield Claim(f"first term, late, with eval_mode = {eval_mode}", 1.5 * math.log(2), first)


@oracle(MOON)
def term_of_the_second_round(cls: type[MOON]) -> Iterator[Claim]:
    """At the first step of round 1, z = z_glob, so the cosine to the global model is 1. The cosine
    to the previous model is computed from two plain forward passes: the term is the mean of log(1 +
    e^{(cos - 1)/tau})."""
    run = images(sizes=(5, 9), batch=5, steps=1).trained(cls(mu=1.0, projection=0, tau=0.5))
    batch = first_batch(run, 1)
    previous = tree.take(run.store.rows[cls.name]["previous"], 1)
    now, before = (features_of(run, batch.x, w) for w in (run.weights, previous))
    cosine = F.cosine_similarity(now, before)
    expected = float(torch.log1p(torch.exp((cosine - 1) / 0.5)).mean())
    yield Claim("term of round 1", expected, float(run.run_round().losses[cls.name][1]))
