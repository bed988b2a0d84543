"""Identities of FedImpro (parts/fedimpro.py).

All run on the small network of :func:`kedge.check.problems.images`, cut after its first stage,
where a class has 16 activations, and take features from plain forward passes of that network.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import close, first_batch
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images, step_view
from kedge.core import rng, tree
from kedge.parts.fedimpro import FedImpro
from kedge.sim.simulation import Simulation

CUT = "stage1"


@oracle(FedImpro)
def statistics_of_one_batch(cls: type[FedImpro]) -> Iterator[Claim]:
    """One step on a batch of 9, beta_m = 0, no bound: mean and unbiased standard deviation of each
    class, against torch. A class with one sample keeps its standard deviation, an absent class
    keeps both. Detects a division by n, statistics of the drawn rows or of the new weights, and
    zeros for absent classes."""
    part = cls(cut=CUT, s_max=0.0, ramp=0)
    run = images(sizes=(5, 9, 14), batch=9, steps=1).simulate(part)
    first = run.server.slots[cls.name]
    h, y = _features(run, 1)
    run.run_round([1])
    expected = {n: x.clone() for n, x in first.items()}
    for c in y.unique():
        own = h[y == c]
        expected["mean"][c] = own.mean(0)
        expected["scale"][c] = own.std(0) if len(own) > 1 else first["scale"][c]
    absent = [c for c in range(3) if c not in y]
    yield Claim("a class is absent from the batch", 1.0, float(len(absent) > 0))
    got = run.server.slots[cls.name]
    yield close("error of the statistics", got, expected)
    yield close("change of the absent class", tree.take(got, absent), tree.take(first, absent), 0.0)


@oracle(FedImpro)
def momentum_of_client_and_server(cls: type[FedImpro]) -> Iterator[Claim]:
    """Two clients of 5 and 14 samples, one step each: H_m = beta_m H + (1 - beta_m) H(batch), then
    H <- beta_g H + (1 - beta_g)(H_1 + H_2)/2, so a class absent on one client keeps half of the old
    value. Detects weights by size, and swapped momenta."""
    b, g = 0.75, 0.25
    part = cls(cut=CUT, s_max=0.0, ramp=0, beta_m=b, beta_g=g)
    run = images(sizes=(5, 9, 14), batch=5, steps=1).simulate(part)
    first = run.server.slots[cls.name]["mean"]
    clients = []
    for k in (0, 2):
        h, y = _features(run, k)
        own = first.clone()
        for c in y.unique():
            own[c] = b * first[c] + (1 - b) * h[y == c].mean(0)
        clients.append(own)
    expected = g * first + (1 - g) * (clients[0] + clients[1]) / 2
    run.run_round([0, 2])
    got = run.server.slots[cls.name]["mean"]
    yield close("error of the mean", got, expected)


@oracle(FedImpro)
def momentum_of_the_released_code(cls: type[FedImpro]) -> Iterator[Claim]:
    """``official``: beta_m = 1 - D/5000, D = 16 activations at the cut (also where there is one
    statistic for each of 4 channels), so one step on 9 samples keeps 0.9968 of the received means
    and standard deviations. Detects a momentum of 0, of D/5000, and one of the number of samples
    or of channels."""
    for axes in ("element", "channel"):
        options = cls.presets["official"] | {"cut": CUT, "s_max": 0.0, "stat_axes": axes}
        run = images(sizes=(5, 9), batch=9, steps=1).simulate(cls(**options))
        first = run.server.slots[cls.name]
        h, y = _features(run, 1)
        run.run_round([1])
        expected = {n: x.clone() for n, x in first.items()}
        for c in y.unique():
            own = h[y == c]
            if axes == "channel":
                own = own.reshape(len(own), 4, 4).transpose(1, 2).flatten(0, 1)
            expected["mean"][c] = 0.9968 * first["mean"][c] + 0.0032 * own.mean(0)
            if len(own) > 1:
                expected["scale"][c] = 0.9968 * first["scale"][c] + 0.0032 * own.std(0)
        got = run.server.slots[cls.name]
        yield close(f"error of the statistics, one per {axes}", got, expected)


@oracle(FedImpro)
def term_by_hand(cls: type[FedImpro]) -> Iterator[Claim]:
    """With zero standard deviation each class is drawn at its mean, so the term is the weight times
    the mean over classes of CE(upper layers at mu_c, c). In round t the weight is min(1, t/4): 0,
    1/4, then 1; without the cap it grows to 5/4."""
    for cap, rounds in ((True, {0: 0.0, 1: 0.25, 4: 1.0, 5: 1.0}), (False, {1: 0.25, 5: 1.25})):
        part = cls(cut=CUT, ramp=4, cap=cap, s_max=1e-13, draws_from="shared")
        run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
        for t in range(6):
            classes, mean = torch.arange(3), run.server.slots[cls.name]["mean"]
            loss = F.cross_entropy(_upper(run, mean), classes)
            terms = run.run_round().losses[cls.name]
            if t in rounds:
                what = f"term of round {t}" + ("" if cap else " without cap")
                yield Claim(what, rounds[t] * float(loss), float(terms[0]))


@oracle(FedImpro)
def lower_layers_train_on_real_samples_only(cls: type[FedImpro]) -> Iterator[Claim]:
    """Drawn features are constants that enter at the cut: a step with weight 1 and a step with
    weight 0 change the lower layers equally and the upper layers differently."""
    problem = images(sizes=(5, 9), batch=5, steps=1)
    real, drawn = (
        problem.trained(cls(cut=CUT, ramp=0, weight=weight)).weights.params for weight in (0.0, 1.0)
    )
    below, above = (
        [tree.gap(p, real[n]) for n, p in drawn.items() if n.startswith(CUT) == is_below]
        for is_below in (True, False)
    )
    yield Claim("change below the cut", 0.0, max(below), 1e-14)
    yield Claim("layers above the cut change", 1.0, float(min(above) > 1e-4))


@oracle(FedImpro)
def drawn_features_by_hand(cls: type[FedImpro]) -> Iterator[Claim]:
    """B = 5, C = 3: labels 0 1 2 0 1 2, rows mu + sigma eps with eps from the part's key. With
    variances, sigma is their root (initially 0.1 = sqrt(0.01)) and the labels are the batch's."""
    for preset, labels in (("official", torch.tensor([0, 1, 2, 0, 1, 2])), ("paper", None)):
        part = cls(**cls.presets[preset] | {"cut": CUT, "draws_from": "shared"})
        run = images(sizes=(5, 9), batch=5, steps=1).simulate(part)
        v, batch = step_view(run, 1, part, "inject")
        y = batch.y if labels is None else labels
        eps = rng.normal(v.key, (len(y), 16, 1), torch.float64).flatten(1)
        rows = part.inject(v, batch)[1].flatten(1)
        expected = run.server.slots[cls.name]["mean"][y] + 0.1 * eps
        yield Claim(f"number of rows ({preset})", float(len(y)), float(len(rows)))
        yield close(f"error of the rows ({preset})", rows[: len(y)], expected[: len(rows)], 1e-14)


@oracle(FedImpro)
def pooling_by_label_counts(cls: type[FedImpro]) -> Iterator[Claim]:
    """One step on all 9 samples of each client. A class of which client k has n_k samples with mean
    m_k and standard deviation s_k (the initial 0.1 if n_k = 1) gets the mean of all its samples, m
    = sum n_k m_k/n, and the root of sum n_k (s_k^2 + (m_k - m)^2)/n."""
    part = cls(cut=CUT, s_max=0.0, ramp=0, count_weighted=True)
    run = images(sizes=(9, 9, 9), batch=9, steps=1).simulate(part)
    clients = [_features(run, k) for k in range(3)]
    run.run_round()
    got = run.server.slots[cls.name]
    for c in range(3):
        own = [h[y == c] for h, y in clients if c in y]
        m, n = torch.cat(own).mean(0), sum(len(h) for h in own)
        spread = [h.std(0) if len(h) > 1 else torch.full_like(m, 0.1) for h in own]
        each = [len(h) * (s**2 + (h.mean(0) - m) ** 2) for h, s in zip(own, spread, strict=True)]
        scale = torch.stack(each).sum(0).div(n).sqrt()
        yield close(f"error of the mean of class {c}", got["mean"][c], m)
        yield close(f"error of the scale of class {c}", got["scale"][c], scale)


def _features(run: Simulation, client: int) -> tuple[Tensor, Tensor]:
    """Activations at the cut and labels of a client's first batch, at the current weights."""
    batch = first_batch(run, client)
    out = run.bound.model.forward(run.weights, batch.x, "eval", taps=(CUT,))
    return out.at[CUT].flatten(1), batch.y


def _upper(run: Simulation, rows: Tensor) -> Tensor:
    """Logits of rows that enter the network after the cut."""
    module = run.module()
    inner = rows.reshape(len(rows), *run.bound.spec.shapes[CUT])
    with torch.no_grad():
        return module.get_submodule("head")(module.get_submodule("stage2")(inner))
