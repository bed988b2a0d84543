"""Identities of the methods in parts/generated.py.

On the server two clients are chosen by hand, both linear classifiers :math:`\\omega(x) = Wx + b` of
8x8 images, which are their own features; the last of the three classes is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.two_linear import linear_clients, server_round_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng, tree
from kedge.core.tree import Params, Weights
from kedge.parts.distil import allot_labels, draw_labels
from kedge.parts.generated import FedDF, FedGen
from kedge.sim.simulation import Simulation

SHARE = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.75, 0.0]], dtype=DOUBLE)  # a_{k,y}
SMALL: dict[str, Any] = {"batch": 6, "noise": 3, "width": 4}


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
        leaves, buffers = _leaves(first.params), first.buffers
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
                loss = 0.3 * _diversity(z, x)
                for k in range(2):
                    log_probs = torch.log_softmax(_linear(tree.take(r.clients.params, k), x), 1)
                    for b in range(6):
                        loss = loss - SHARE[k, y[b]] * log_probs[b, y[b]] / 6
                adam.zero_grad()
                loss.backward()
                adam.step()
                buffers = tree.detach(buffers)
            same, r.server = part.server_step(r, weights)
        found, what = r.server["generator"], f"{level}, {'kept' if keep else 'new'} moments"
        gap = max(_gap(found["params"][n], p) for n, p in leaves.items())
        yield Claim(f"error of the generator ({what})", 0.0, gap, 1e-11)
        gap = max(_gap(found["buffers"][n], b) for n, b in buffers.items())
        yield Claim(f"error of its statistics ({what})", 0.0, gap, 1e-11)
        yield Claim(f"change of the global model ({what})", 0.0, tree.gap(same, weights), 0.0)


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
        net, model = part._generator(v.spec), run.bound.model
        generator = Weights(**run.server.slots[cls.name]["generator"])
        other = net(generator, rng.uniform(key_other, (4, 3), DOUBLE), labels, train=False)[0]
        same = net(generator, rng.uniform(key_same, (5, 3), DOUBLE), batch.y, train=False)[0]
        leaves = _leaves(run.weights.params)

        def logits_of(x: Tensor, level: str = level, leaves: Params = leaves) -> Tensor:
            if level == "feature":
                return F.linear(x, leaves["head.weight"], leaves["head.bias"])
            return run.bound.model.forward(Weights(leaves, {}), x, "eval").logits  # noqa: B023

        real = model.forward(Weights(leaves, {}), batch.x, "eval").logits
        target = torch.softmax(logits_of(same), 1).detach()
        divergence = (target * (target.log() - torch.log_softmax(real, 1))).sum(1).mean()
        term = 1.5 * 0.8 * F.cross_entropy(logits_of(other), labels) + 1.0 * divergence
        total = F.cross_entropy(real, batch.y) + term
        grads = torch.autograd.grad(total, list(leaves.values()))
        expected = {
            n: p.detach() - 0.05 * g for (n, p), g in zip(leaves.items(), grads, strict=True)
        }
        found = run.run_round([1]).losses[cls.name][0]
        yield Claim(f"term ({level})", float(term.detach()), float(found))
        yield Claim(
            f"error of the model ({level})", 0.0, tree.gap(expected, run.weights.params), 1e-12
        )


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
    yield Claim("change of the generator without steps", 0.0, tree.gap(slot, r.server), 0.0)
    [z], [y] = part._draws(r, "student", 1, torch.tensor([8, 4, 0]))
    x = part._generator(r.spec)(Weights(**slot), z, y, train=False)[0].flatten(1)
    w = weights.params
    teachers = [tree.take(r.clients.params, k) for k in range(2)]
    mean = sum(torch.softmax(_linear(c, x), 1) for c in teachers) / 2
    grad = torch.softmax(_linear(w, x), 1) - mean
    expected = {
        "head.weight": grad.T @ x / len(x) + 1e-3 * w["head.weight"],
        "head.bias": grad.mean(0) + 1e-3 * w["head.bias"],
    }
    gap = max(_gap(new.params[n], w[n] - 0.1 * 0.998**3 * g) for n, g in expected.items())
    yield Claim("error of the global model after a step", 0.0, gap, 1e-13)


@oracle(FedDF)
def ensemble_generator_equals_torch_adam(cls: type[FedDF]) -> Iterator[Claim]:
    """Two steps of the generator against torch.optim.Adam with weight decay on the clients' mean
    cross-entropy + 0.3 L_div."""
    part = cls(**SMALL, generator_steps=2, student_steps=0, eta=0.3)
    r, weights = server_round_of(part, round=2)
    leaves, buffers = _leaves(r.server["params"]), r.server["buffers"]
    adam = torch.optim.Adam(leaves.values(), lr=0.01 * 0.998**2, weight_decay=1e-3)
    for z, y in zip(*part._draws(r, "generator", 2, torch.tensor([8, 4, 0])), strict=True):
        x, buffers = part._generator(r.spec)(Weights(leaves, buffers), z, y, train=True)
        logits = [_linear(tree.take(r.clients.params, k), x) for k in range(2)]
        loss = (F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y)) / 2
        adam.zero_grad()
        (loss + 0.3 * _diversity(z, x)).backward()
        adam.step()
        buffers = tree.detach(buffers)
    same, slot = part.server_step(r, weights)
    gap = max(_gap(slot["params"][n], p) for n, p in leaves.items())
    yield Claim("error of the generator", 0.0, gap, 1e-11)
    gap = max(_gap(slot["buffers"][n], b) for n, b in buffers.items())
    yield Claim("error of its statistics", 0.0, gap, 1e-11)
    yield Claim("change of the global model without steps", 0.0, tree.gap(same, weights), 0.0)


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
    plain, run = (linear_clients().simulate(m) for m in ("fedavg", part))
    plain.run_round()
    run.run_round()
    gap = tree.gap(plain.weights.params, run.weights.params)
    yield Claim("difference from FedAvg's model", 0.0, gap, 1e-12)


@oracle(FedDF)
def feature_level_trains_the_head_only(cls: type[FedDF]) -> Iterator[Claim]:
    """With generated features the body and its statistics are unchanged, bit for bit."""
    part = cls(**cls.tiny | {"level": "feature"})
    runs: list[Simulation] = [images(norm="bn").simulate(m) for m in ("fedavg", part)]
    for run in runs:
        run.run_round()
    plain, tuned = runs[0].weights, runs[1].weights
    head = runs[0].bound.model.head_names()
    body = [n for n in plain.params if n not in head]
    yield Claim(
        "change of the body", 0.0, max(_gap(plain.params[n], tuned.params[n]) for n in body), 0.0
    )
    yield Claim("change of the statistics", 0.0, tree.gap(plain.buffers, tuned.buffers), 0.0)
    moved = min(_gap(plain.params[n], tuned.params[n]) for n in head)
    yield Claim("the head changes", 1.0, float(moved > 1e-6))


def _linear(params: Params, x: Tensor) -> Tensor:
    return F.linear(x.flatten(1), params["head.weight"], params["head.bias"])


def _diversity(z: Tensor, x: Tensor) -> Tensor:
    """L_div, summed pair by pair."""
    total, flat = torch.zeros((), dtype=DOUBLE), x.flatten(1)
    for i in range(len(z)):
        for j in range(len(z)):
            total = total + ((z[i] - z[j]) ** 2).mean() * (flat[i] - flat[j]).abs().mean()
    return torch.exp(-total / len(z) ** 2)


def _leaves(params: Params) -> Params:
    return {n: p.clone().requires_grad_() for n, p in params.items()}


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())
