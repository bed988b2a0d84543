"""The shapes of five headline algorithms, cut down to what they ask of the hooks.

Not the methods themselves: each keeps the data flow of its paper (who holds what, what is sent
when, where gradients stop) at the smallest size, so that every hook is exercised on both engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Mean, Out, Part, Stack, Sum
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View

CLASSES = ("classification",)


@dataclass(frozen=True)
class InjectedRows(Part):
    """FedImpro's flow: shared feature statistics, rows drawn from them, statistics of the batch."""

    cut: str = "stage1"
    weight: float = 0.5

    name = "injected"
    tasks = CLASSES
    neutral = {"weight": 0.0}
    sends = "2*C*D_stage1"
    uploads = "2*C*D_stage1"

    def cuts(self) -> tuple[str, ...]:
        return (self.cut,)

    def server_init(self, spec: Spec) -> Tree:
        size = (spec.task.outputs, int(torch.Size(spec.shapes[self.cut]).numel()))
        mean = rng.uniform(spec.key, size, spec.dtype)
        return {"mean": mean, "scale": torch.full_like(mean, 0.1)}

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        return v.sent

    def inject(self, v: View, batch: Batch) -> tuple[str, Tensor]:
        mean, scale = v.local["mean"], v.local["scale"]
        return self.cut, mean + scale * rng.normal(v.key, tuple(mean.shape), mean.dtype)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        labels = torch.arange(len(out.mine.logits))
        return self.weight * F.cross_entropy(out.mine.logits, labels)

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        own = F.one_hot(batch.y, v.task.outputs).to(out.logits.dtype)  # [B, C]
        count = own.sum(0)[:, None]
        mean = own.T @ out.at[self.cut].flatten(1) / count.clamp_min(1)
        seen = count > 0
        return {"mean": torch.where(seen, mean, v.local["mean"]), "scale": v.local["scale"]}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"mean": Mean(v.local["mean"]), "scale": Mean(v.local["scale"])}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, r.uploads


@dataclass(frozen=True)
class MaxStep(Part):
    """FedBR's flow: surveyed pseudo-data, a projection trained by ascent, frozen in the descent."""

    mu: float = 0.5
    rows: int = 4
    refresh: Literal["first", "every"] = "first"

    name = "maxstep"
    tasks = CLASSES
    needs_sweep = True
    needs_features = True
    neutral = {"mu": 0.0}
    sends = "F*F + rows*X"
    uploads = "F*F"

    def surveys(self) -> Literal["first", "every", "last"]:
        return self.refresh

    def server_init(self, spec: Spec) -> Tree:
        width = spec.features
        pseudo = torch.zeros(self.rows, *spec.input_shape, dtype=spec.dtype)
        return {"projection": rng.normal(spec.key, (width, width), spec.dtype), "pseudo": pseudo}

    def survey(self, v: View) -> Tree:
        """Sums over a random subset of the client's samples; only their sum over clients is
        seen."""

        def piece(batch: Batch, mask: Tensor) -> Tree:
            draw = rng.uniform(v.key, (self.rows, len(mask)), batch.x.dtype)
            chosen = (draw < 0.5) * mask
            return {"sum": torch.einsum("rb,b...->r...", chosen, batch.x), "count": chosen.sum(1)}

        found = v.sweep(piece)
        return {"sum": Sum(found["sum"]), "count": Sum(found["count"])}

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        count = r.uploads["count"].clamp_min(1).reshape(-1, *(1,) * (r.uploads["sum"].ndim - 1))
        return weights, r.server | {"pseudo": r.uploads["sum"] / count}

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        return {"projection": v.sent["projection"]}

    def _contrast(self, v: View, projection: Tensor, params: Params, out: Out) -> Tensor:
        z = out.features[: self.rows] @ projection
        z_p = v.forward(params, v.sent["pseudo"]).features @ projection
        z_g = v.forward(v.anchor, v.sent["pseudo"]).features.detach() @ projection
        near, far = F.cosine_similarity(z_p, z_g), F.cosine_similarity(z_p, z)
        return F.softplus(far - near).mean()

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        slope = torch.func.grad(lambda p: self._contrast(v, p, params, out))(v.local["projection"])
        return {"projection": v.local["projection"] + v.info.lr * slope}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        return self.mu * self._contrast(v, v.local["projection"], params, out)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"projection": Mean(v.local["projection"])}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, r.server | r.uploads


@dataclass(frozen=True)
class SweptCentroids(Part):
    """FedTR's flow: class centroids by a sweep with the trained model, a drift kept by each
    client."""

    pull: float = 1.0
    alpha: float = 0.1

    name = "swept"
    tasks = CLASSES
    needs_sweep = True
    needs_features = True
    needs_sum = True
    sends = "C*F + C"
    uploads = "C*F + C"
    keeps = "P"

    def phase(self, round: int) -> str:
        return "first" if round == 0 else "later"

    def server_init(self, spec: Spec) -> Tree:
        centroids = torch.zeros(spec.task.outputs, spec.features, dtype=spec.dtype)
        return {
            "centroids": centroids,
            "valid": centroids[:, 0],
            "drift": tree.zeros_like(spec.params),
        }

    def client_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)

    def send(self, server: Tree) -> Tree:
        return {"centroids": server["centroids"], "valid": server["valid"]}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        lag = tree.map(lambda d, p, w: p + d - w, v.client, params, v.anchor.params)
        term = 0.5 * self.alpha * tree.sq_norm(lag)
        if v.phase == "first":
            return term
        away = (out.features - v.sent["centroids"][batch.y]) ** 2
        return term + self.pull * (away.mean(1) * v.sent["valid"][batch.y]).mean()

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        def piece(batch: Batch, mask: Tensor) -> Tree:
            own = F.one_hot(batch.y, v.task.outputs).to(mask.dtype) * mask[:, None]
            features = v.forward(weights, batch.x, train=False).features
            return {"sum": own.T @ features, "count": own.sum(0)}

        found = v.sweep(piece)
        drift = tree.map(lambda d, p, w: d + p - w, v.client, weights.params, v.anchor.params)
        return drift, {"sum": Sum(found["sum"]), "count": Sum(found["count"])}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        drift = tree.map(lambda d, s: d + s / r.num_clients, r.server["drift"], r.sum_delta)
        count = r.uploads["count"][:, None]
        fresh = r.uploads["sum"] / count.clamp_min(1)
        centroids = torch.where(count > 0, fresh, r.server["centroids"])
        valid = torch.maximum(r.server["valid"], (count[:, 0] > 0).to(fresh.dtype))
        moved = tree.map(lambda d, w: w + d, drift, weights.params)
        server = {"centroids": centroids, "valid": valid, "drift": drift}
        return weights._replace(params=weights.params | moved), server


@dataclass(frozen=True)
class Generated(Part):
    """FedCOG's flow: from a start round on, each client makes inputs by gradient descent and
    distils."""

    start: int = 1
    steps: int = 3
    rows: int = 4

    name = "generated"
    needs_labels = True
    tasks = CLASSES
    keeps = "P + 1"
    neutral = {"start": 10}

    def client_init(self, spec: Spec) -> Tree:
        return {"previous": spec.params, "seen": torch.zeros((), dtype=spec.dtype)}

    def phase(self, round: int) -> str:
        return "generate" if round >= self.start else "wait"

    def prepare(self, v: View) -> Tree:
        if v.phase == "wait":
            return {}
        target = (v.label_counts.max() - v.label_counts).argsort(descending=True)
        labels = target[torch.arange(self.rows) % len(target)]
        before = Weights(v.anchor.params | v.client["previous"], v.anchor.buffers)

        def loss(x: Tensor) -> Tensor:
            now = v.forward(v.anchor, x, train=False).logits
            then = v.forward(before, x, train=False).logits
            return F.cross_entropy(now, labels) - 0.1 * v.task.divergence(now, then).mean()

        x = rng.normal(v.key, (self.rows, *v.spec.input_shape), v.spec.dtype)
        for _ in range(self.steps):
            x = x - 0.1 * torch.func.grad(loss)(x)
        return {"x": x, "logits": v.forward(v.anchor, x, train=False).logits}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        if v.phase == "wait":
            return torch.zeros((), dtype=out.logits.dtype)
        student = v.forward(params, v.local["x"], update=True).logits
        return v.task.divergence(v.local["logits"], student).mean()

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {"previous": v.public(weights.params), "seen": torch.ones_like(v.client["seen"])}, {}


@dataclass(frozen=True)
class Boosted(Part):
    """FLBoost's flow: label counts go up, the server fine-tunes the mean against every client's
    model."""

    steps: int = 2
    rows: int = 4

    name = "boosted"
    side = "server"
    tasks = CLASSES
    needs_clients = True
    needs_labels = True
    neutral = {"steps": 0}
    uploads = "C"

    def server_init(self, spec: Spec) -> Tree:
        return {"x": rng.normal(spec.key, (self.rows, *spec.input_shape), spec.dtype)}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"counts": Stack(v.label_counts)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        x = r.server["x"] + 0.1 * rng.normal(r.key, tuple(r.server["x"].shape), r.spec.dtype)
        share = r.uploads["counts"].sum(1) / r.uploads["counts"].sum()  # [K]
        teach = torch.func.vmap(lambda w: r.forward(w, x).logits)(r.clients).detach()

        def loss(params: Params) -> Tensor:
            logits = r.forward(Weights(params, weights.buffers), x).logits
            gaps = torch.stack([r.task.divergence(t, logits).mean() for t in teach])
            return (share * gaps).sum()

        params = weights.params
        for _ in range(self.steps):
            slope = torch.func.grad(loss)(params)
            params = tree.map(lambda w, g: w - 0.05 * g, params, slope)
        return weights._replace(params=params), {"x": x}


@dataclass(frozen=True)
class Recipes(Part):
    """The small hooks that none of the above uses: logits, weigh, project, personal, contribute."""

    name = "recipes"
    tasks = CLASSES
    needs_labels = True
    uploads = "P + 1"

    def logits(self, v: View, batch: Batch, logits: Tensor) -> Tensor:
        return logits + torch.log(v.label_counts + 1)

    def weigh(self, v: View, batch: Batch) -> Tensor:
        return 1 / (1 + v.label_counts[batch.y])

    def project(self, v: View, params: Params) -> Params:
        return tree.map(lambda p: p.clamp(-1.5, 1.5), params)

    def contribute(self, v: View, delta: Params) -> Tree:
        size = torch.sqrt(tree.sq_norm(delta))
        return {"d": tree.scale(delta, size), "size": size}

    def combine(self, r: Round) -> Params:
        return tree.map(lambda d: d / r.sums["size"], r.sums["d"])

    def personal(self, v: View, weights: Weights) -> Weights:
        return weights._replace(params=tree.scale(weights.params, 0.5))


SKETCHES = (InjectedRows(), MaxStep(), SweptCentroids(), Generated(), Boosted(), Recipes())
