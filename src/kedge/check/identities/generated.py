"""Identities of the methods in parts/generated.py.

On the server two clients are chosen by hand, both linear classifiers :math:`\\omega(x) = Wx + b` of
8x8 images, which are their own features; the last of the three classes is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import (
    close,
    cross_entropy,
    descended,
    leaves_of,
    linear_of,
    logits_of,
)
from kedge.check.identities.two_linear import (
    SHARE,
    SMALL,
    equals_fedavg,
    head_gradient,
    pairwise_diversity,
    server_round_of,
    teachers,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng, tree
from kedge.core.task import Batch
from kedge.core.tree import Params, Weights
from kedge.parts.distil import allot_labels, draw_labels
from kedge.parts.generated import FedDF, FedGen
from kedge.sim.simulation import Simulation


@oracle(FedGen)
def generator_steps_equal_torch_adam(cls: type[FedGen]) -> Iterator[Claim]:
    """Two rounds of two steps against torch.optim.Adam with weight decay, the loss summed per
    sample and per client: sum_k a_{k,y} CE + 0.3 L_div, labels uniform over the two present
    classes. Detects equal client weights, shares of a client's own data, proportional labels, a sum
    over the batch, and a lost decay or optimizer state."""
    for level, keep in (("feature", True), ("feature", False), ("input", True)):
        part = cls(**SMALL, steps=2, eta=0.3, level=level, keep_moments=keep, generator_lr=0.01)  # type: ignore[arg-type]
        r, weights = server_round_of(part)
        first = Weights(**r.server["generator"])
        leaves, buffers = leaves_of(first.params), first.buffers
        net, adam = part._generator(r.spec), None
        for round in range(2):
            r.round, r.key = round, rng.key(20 + round)
            if adam is None or not keep:
                adam = torch.optim.Adam(leaves.values(), weight_decay=1e-2)
            adam.param_groups[0]["lr"] = 0.01 * 0.98**round
            for key in rng.split(r.key, 2):
                key_y, key_z = rng.split(key, 2)
                y = draw_labels(key_y, torch.tensor([1, 1, 0]), 6)
                z = rng.uniform(key_z, (6, 3), DOUBLE)
                x, buffers = net(Weights(leaves, buffers), z, y, train=True)
                loss = 0.3 * pairwise_diversity(z, x)
                for k, teacher in enumerate(teachers(r)):
                    log_probs = torch.log_softmax(linear_of(teacher, x), 1)
                    for b in range(6):
                        loss = loss - SHARE[k, y[b]] * log_probs[b, y[b]] / 6
                adam.zero_grad()
                loss.backward()
                adam.step()
                buffers = tree.detach(buffers)
            same, r.server = part.server_step(r, weights)
        found, what = r.server["generator"], f"{level}, {'kept' if keep else 'new'} moments"
        yield close(f"error of the generator ({what})", found["params"], leaves, 1e-11)
        yield close(f"error of its statistics ({what})", found["buffers"], buffers, 1e-11)
        yield close(f"change of the global model ({what})", same, weights, 0.0)


@oracle(FedGen)
def local_step_by_autograd(cls: type[FedGen]) -> Iterator[Claim]:
    """The one step of round 1 by autograd: CE + 3/2 (4/5) CE(h(G(z', y')), y') + (2/2) mean
    KL(h(G(z, y)) || f(x)), the first argument constant, weights 3 and 2 halved once. Detects a
    gradient into h(G(z, y)), the reverse KL, a missing B'/B = 4/5, and a wrong number of decays."""
    for level in ("feature", "input"):
        part = cls(
            alpha=3.0, beta=2.0, fade=0.5, rows=4, steps=2, batch=6, noise=3, width=2, level=level
        )
        run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
        run.run_round([0])
        v, batch = step_view(run, 1, part)
        key_y, key_other, key_same = rng.split(v.key, 3)
        labels = rng.integers(key_y, (4,), 3)
        net = part._generator(v.spec)
        generator = Weights(**run.server.slots[cls.name]["generator"])
        other = net(generator, rng.uniform(key_other, (4, 3), DOUBLE), labels, train=False)[0]
        same = net(generator, rng.uniform(key_same, (5, 3), DOUBLE), batch.y, train=False)[0]
        term = partial(_local_term, run, batch, level, (other, same, labels))
        start = run.weights.params
        expected = descended(start, cross_entropy(run, batch), term)
        found = run.run_round([1]).losses[cls.name][0]
        yield Claim(f"term ({level})", float(term(start)), float(found))
        yield close(f"error of the model ({level})", expected, run.weights.params)


@oracle(FedGen)
def weights_decay_to_the_floor(cls: type[FedGen]) -> Iterator[Claim]:
    """8 is halved per round down to a floor of 1.5: 4, 2, 1.5 in rounds 1 to 3; 0 stays 0. In round
    0 the generator is untrained, so the term is 0."""
    part = cls(**cls.tiny | {"fade": 0.5, "floor": 1.5})
    run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
    yield Claim("term of round 0", 0.0, float(run.run_round().losses[cls.name][1]), 0.0)
    for round, expected in ((1, 4.0), (2, 2.0), (3, 1.5)):
        v, _ = step_view(run, 0, part)
        yield Claim(f"weight of round {round}", expected, float(part._weight(v, 8.0)))
        yield Claim(f"weight 0 in round {round}", 0.0, float(part._weight(v, 0.0)), 0.0)
        run.run_round()


@oracle(FedDF)
def student_step_by_hand(cls: type[FedDF]) -> Iterator[Claim]:
    """With s and t_k the softmax of student and clients, the gradient in the logits is s - (t_1 +
    t_2)/2; a step is W - lr 0.998^t [(1/B) sum_b grad_b x_b' + decay W]. Detects averaged logits,
    the reverse KL, weights by size or class, and a sum over the batch."""
    part = cls(**SMALL, generator_steps=0, student_steps=1)
    r, weights = server_round_of(part, round=3)
    new, slot = part.server_step(r, weights)
    yield close("change of the generator without steps", slot, r.server, 0.0)
    [z], [y] = part._draws(r, "student", 1, torch.tensor([8, 4, 0]))
    x = part._generator(r.spec)(Weights(**slot), z, y, train=False)[0].flatten(1)
    w = weights.params
    mean = sum(torch.softmax(linear_of(c, x), 1) for c in teachers(r)) / 2
    grad = torch.softmax(linear_of(w, x), 1) - mean
    expected = tree.axpy(-0.1 * 0.998**3, head_gradient(grad, x, w, 1e-3), w)
    yield close("error of the global model after a step", new.params, expected, 1e-13)


@oracle(FedDF)
def ensemble_generator_equals_torch_adam(cls: type[FedDF]) -> Iterator[Claim]:
    """Two steps of the generator against torch.optim.Adam with weight decay on the clients' mean
    cross-entropy + 0.3 L_div."""
    part = cls(**SMALL, generator_steps=2, student_steps=0, eta=0.3)
    r, weights = server_round_of(part, round=2)
    leaves, buffers = leaves_of(r.server["params"]), r.server["buffers"]
    adam = torch.optim.Adam(leaves.values(), lr=0.01 * 0.998**2, weight_decay=1e-3)
    for z, y in zip(*part._draws(r, "generator", 2, torch.tensor([8, 4, 0])), strict=True):
        x, buffers = part._generator(r.spec)(Weights(leaves, buffers), z, y, train=True)
        losses = [F.cross_entropy(linear_of(c, x), y) for c in teachers(r)]
        adam.zero_grad()
        (sum(losses) / 2 + 0.3 * pairwise_diversity(z, x)).backward()
        adam.step()
        buffers = tree.detach(buffers)
    same, slot = part.server_step(r, weights)
    yield close("error of the generator", slot["params"], leaves, 1e-11)
    yield close("error of its statistics", slot["buffers"], buffers, 1e-11)
    yield close("change of the global model without steps", same, weights, 0.0)


@oracle(FedDF)
def label_proportions(cls: type[FedDF]) -> Iterator[Claim]:
    """n = (8, 4, 0) and 2 x 7 labels: the quotas 9 1/3 and 4 2/3 are rounded to 9 and 5."""
    part = cls(**SMALL | {"batch": 7})
    r, _ = server_round_of(part)
    y = part._draws(r, "student", 2, torch.tensor([8, 4, 0])).y.flatten()
    found = torch.bincount(y, minlength=3).tolist()
    for c, expected in enumerate((9, 5, 0)):
        yield Claim(f"samples of class {c}", expected, found[c], 0.0)
    alone = allot_labels(rng.key(0), torch.tensor([0, 3, 0]), 5)
    yield Claim("samples of the only class", 5.0, float((alone == 1).sum()), 0.0)


@oracle(FedDF)
def equal_clients_equal_fedavg(cls: type[FedDF]) -> Iterator[Claim]:
    """Two clients with the same data have the same model, which is their mean: without weight decay
    the round equals FedAvg's. Detects a student that starts from last round's model."""
    part = cls(**SMALL, generator_steps=1, student_steps=3, weight_decay=0.0)
    yield from equals_fedavg(part)


@oracle(FedDF)
def feature_level_trains_the_head_only(cls: type[FedDF]) -> Iterator[Claim]:
    """With generated features the body and its statistics are unchanged, bit for bit."""
    part = cls(**cls.tiny | {"level": "feature"})
    runs = [images(norm="bn").trained(m) for m in ("fedavg", part)]
    plain, tuned, names = runs[0].weights, runs[1].weights, runs[0].bound.model.head_names()
    gaps = {n: tree.gap(p, tuned.params[n]) for n, p in plain.params.items()}
    yield Claim("change of the body", 0.0, max(gaps[n] for n in gaps if n not in names), 0.0)
    yield close("change of the statistics", plain.buffers, tuned.buffers, 0.0)
    moved = min(gaps[n] for n in names)
    yield Claim("the head changes", 1.0, float(moved > 1e-6))


def _local_term(
    run: Simulation, batch: Batch, level: str, made: tuple[Tensor, ...], params: Params
) -> Tensor:
    """3/2 (4/5) CE(h(G(z', y')), y') + mean KL(h(G(z, y)) || f(x)), the first argument constant."""

    def classified(x: Tensor) -> Tensor:
        return linear_of(params, x) if level == "feature" else logits_of(run, x, params)

    other, same, labels = made
    real = logits_of(run, batch.x, params)
    target = torch.softmax(classified(same), 1).detach()
    divergence = (target * (target.log() - torch.log_softmax(real, 1))).sum(1).mean()
    return 1.5 * 0.8 * F.cross_entropy(classified(other), labels) + 1.0 * divergence
