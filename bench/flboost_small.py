"""Variants of FLBoost on a small problem: which keep up with their base, and where accuracy goes.

    KEDGE_DATA=FOLDER PYTHONPATH=src python3 bench/flboost_small.py FILE.json [METHOD ...]

Images are averaged down to half their side, the network is a small BatchNorm CNN, 10 of 100 clients
train in a round, client_dirichlet_balanced(0.3). Every second round the test accuracy is taken of

``after``        the model that starts the next round, after fine-tuning where there is any
``before``       the average of the clients' models, before fine-tuning
``after_bn``     the fine-tuned parameters with the BatchNorm statistics of the average
``before_bn``    the average with the statistics that fine-tuning left

and every tenth round, with the images of the round's generator:

``p_label``      mean probability of the label, given by the clients weighted by a_{k,y}
``bn_fake``      distance of batch statistics on generated images from the average's running
                 statistics: mean over channels of (mean difference)^2 / variance, and
                 ``bn_real`` of test images; ``sd_fake``, ``sd_real``: mean ratio of deviations
``cosine``       of the fine-tuning with minus the gradient of the loss on 2000 test images
``ratio``        norm of the fine-tuning over norm of the round's update
``cos_update``   of the round's update with minus the same gradient
``line``         accuracy at 0.1, 0.3 and 0.6 of the fine-tuning, with the average's statistics
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import SGD, LocalWork, Model, Part, Round, Simulation, Weights, parse
from kedge.core import tree
from kedge.core.tree import Params
from kedge.core.update import Stacked, Totals
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.engines import Execution
from kedge.parts.distil import teacher_logits
from kedge.parts.flboost import FLBoost


@dataclass(frozen=True)
class SeeClients(Part):
    """Changes nothing; it requests the clients' models in the totals of a round."""

    needs_clients = True


def network(channels: int, outputs: int) -> nn.Sequential:
    """Three convolutions with BatchNorm, average pooling, a linear head."""

    def stage(inputs: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    net = nn.Sequential()
    net.add_module("stage1", stage(channels, 16, 1))
    net.add_module("stage2", stage(16, 32, 2))
    net.add_module("stage3", nn.Sequential(stage(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net.add_module("head", nn.Linear(64, outputs))
    return net


def simulate(method: str, args: argparse.Namespace) -> Simulation:
    data = load(args.data)
    small = {}
    for name in ("x_train", "x_test"):
        x = torch.as_tensor(getattr(data, name)).float()
        small[name] = F.avg_pool2d(x, 2).round().to(torch.uint8).numpy()
    data = dataclasses.replace(data, **small)
    federation = federate(
        data, "client_dirichlet_balanced(0.3)", clients=100, augment="none", seed=args.seed
    )
    torch.manual_seed(args.seed)
    return Simulation(
        federation,
        Model(network(data.shape[0], data.outputs)),
        parse(method) + SeeClients(),
        optim=SGD(lr=0.1, weight_decay=1e-3, clip=10.0, schedule="exponential(0.998)"),
        work=LocalWork(batch=50, steps=args.steps),
        per_round=10,
        weighting="uniform",
        engine=Execution("loop"),
        seed=args.seed,
    )


class Tester:
    def __init__(self, sim: Simulation) -> None:
        batches = list(sim.federation.test_batches(rows=5000))
        self.sim = sim
        self.x, self.y = torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])

    @torch.no_grad()
    def accuracy(self, weights: Weights) -> float:
        logits = self.sim.bound.model.forward(weights, self.x, "eval").logits
        return round(100 * float((logits.argmax(-1) == self.y).double().mean()), 2)

    def slope(self, weights: Weights) -> Params:
        """Minus the gradient of the loss on 2000 test images, with fixed statistics."""

        def loss(params: Params) -> Tensor:
            out = self.sim.bound.model.forward(Weights(params, weights.buffers), self.x[:2000])
            return F.cross_entropy(out.logits, self.y[:2000])

        return tree.scale(torch.func.grad(loss)(weights.params), -1.0)


def cosine(a: Params, b: Params) -> float:
    norms = (tree.sq_norm(a) * tree.sq_norm(b)).sqrt().clamp_min(1e-12)
    return round(float(tree.dot(a, b) / norms), 3)


def averaged(stacked: Tensor) -> Tensor:
    return stacked.mean(0) if stacked.is_floating_point() else stacked[0]


@torch.no_grad()
def statistics(weights: Weights, x: Tensor, running: Params) -> tuple[float, float]:
    """Distance of batch statistics on ``x`` from running ones, layer by layer in train mode."""
    net = network(x.shape[1], 10)
    net.load_state_dict({**weights.params, **weights.buffers})
    net.train()
    shifts, ratios = [], []
    for name, layer in net.named_modules():
        if isinstance(layer, nn.BatchNorm2d):

            def hook(_m: Any, inputs: Any, _o: Any, name: str = name) -> None:
                mean, var = inputs[0].mean((0, 2, 3)), inputs[0].var((0, 2, 3))
                m0, v0 = running[f"{name}.running_mean"], running[f"{name}.running_var"]
                shifts.append(float(((mean - m0) ** 2 / v0).mean()))
                ratios.append(float((var / v0).sqrt().mean()))

            layer.register_forward_hook(hook)
    net(x)
    return round(sum(shifts) / len(shifts), 3), round(sum(ratios) / len(ratios), 3)


def diagnose(
    sim: Simulation,
    tester: Tester,
    boost: FLBoost,
    before: Weights,
    anchor: Weights,
    clients: Weights,
    counts: Tensor,
) -> dict[str, Any]:
    spec = sim.bound.spec
    r = Round(
        part=boost,
        model=sim.bound.model,
        spec=spec,
        round=sim.round - 1,
        lr=0.1 * 0.998 ** (sim.round - 1),
        key=sim.session.key,
        phase="",
        anchor=anchor,
        server=sim.server.slots["flboost"],
        uploads={"counts": counts},
        totals=Totals(stacked=Stacked(weights=clients)).of(list(range(len(counts))), 0),
    )
    share = boost._ensemble(counts)
    many = dataclasses.replace(boost, steps=1, batch=500)
    z, y = (v[0] for v in many._draw(r.key, counts.sum(0), spec.dtype))
    x, _ = boost._generator(spec)(Weights(**r.server), z, y, train=False)
    out: dict[str, Any] = {}
    if boost.level == "input":
        with torch.no_grad():
            every = torch.arange(len(y))
            probs = teacher_logits(r, "input", clients, x).softmax(-1)
            own = (share[:, y] * probs[:, every, y]).sum(0)
            student = sim.bound.model.forward(before, x, "eval").logits.softmax(-1)[every, y]
        out["p_label"] = [round(float(own.quantile(q)), 3) for q in (0.1, 0.5, 0.9)]
        out["p_student"] = [round(float(student.quantile(q)), 3) for q in (0.1, 0.5, 0.9)]
        out["bn_fake"], out["sd_fake"] = statistics(before, x, before.buffers)
        out["bn_real"], out["sd_real"] = statistics(before, tester.x[:500], before.buffers)
    slope = tester.slope(before)
    moved = tree.sub(sim.weights.params, before.params)
    out["cosine"] = cosine(moved, slope)
    update = tree.sub(before.params, anchor.params)
    out["ratio"] = round(float((tree.sq_norm(moved) / tree.sq_norm(update)).sqrt()), 3)
    out["cos_update"] = cosine(update, slope)
    out["line"] = [
        tester.accuracy(Weights(tree.axpy(a, moved, before.params), before.buffers))
        for a in (0.1, 0.3, 0.6)
    ]
    return out


def run(method: str, args: argparse.Namespace) -> dict[str, Any]:
    sim = simulate(method, args)
    tester = Tester(sim)
    counts = sim.federation.label_counts()
    boosts = [p for p in parse(method).parts if isinstance(p, FLBoost)]
    rows, begin = [], time.process_time()
    while sim.round < args.rounds:
        cohort, anchor = sim.session.draw_clients(sim.round), sim.weights
        clients = sim.run_round(cohort).totals.stacked.weights
        if sim.round % 2 and sim.round < args.rounds:
            continue
        before = tree.map(averaged, clients)
        row: dict[str, Any] = {"round": sim.round, "after": tester.accuracy(sim.weights)}
        if boosts:
            row["before"] = tester.accuracy(before)
            row["after_bn"] = tester.accuracy(sim.weights._replace(buffers=before.buffers))
            row["before_bn"] = tester.accuracy(before._replace(buffers=sim.weights.buffers))
            if sim.round % 10 == 0:
                row |= diagnose(sim, tester, boosts[0], before, anchor, clients, counts[cohort])
        rows.append(row)
        if sim.round % 10 == 0:
            print(f"  {row}", flush=True)
    last = rows[-args.tail :]
    names = [k for k in ("after", "before", "after_bn", "before_bn") if k in last[0]]
    return {
        "method": repr(parse(method)),
        "tail_mean": {k: round(sum(r[k] for r in last) / len(last), 2) for k in names},
        "cpu_seconds": round(time.process_time() - begin, 1),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tail", type=int, default=10, help="evaluations in the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="fashion_mnist")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(args.out)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "methods", "seed")}
    empty = {"settings": settings, "torch": torch.__version__, "runs": {}}
    found = json.loads(path.read_text()) if path.exists() else empty
    for method in args.methods:
        key = f"{method} seed={args.seed}"
        if key in found["runs"]:
            continue
        result = run(method, args)
        found["runs"][key] = result
        path.write_text(json.dumps(found, indent=1))
        print(method, result["tail_mean"], result["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
