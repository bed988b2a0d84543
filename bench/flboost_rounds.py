"""What one fine-tuning of FLBoost does to the average, variant by variant, on a narrow ResNet-18.

    KEDGE_DATA=FOLDER PYTHONPATH=src python3 bench/flboost_rounds.py FILE.json

A ResNet-18 with the ImageNet stem and 12 to 96 channels is trained on pooled CIFAR-10 for 600
steps, then by a base method for a few rounds (10 of 100 clients, client_dirichlet_balanced(0.3), 20
steps). The generator is trained in the first rounds, without a step of the model. Each variant then
fine-tunes the averages of the last rounds, which do not depend on it: the rounds of the base go on
from the plain average. Accuracies on 4000 test images, in percent:

``before``, ``after``       the average, and the fine-tuned model
``after_bn``, ``before_bn`` its parameters with the average's BatchNorm statistics, and the average
                            with the statistics that fine-tuning left
``line``                    at 0.1, 0.3 and 0.6 of the fine-tuning, with the average's statistics
``ratio``                   norm of the fine-tuning over norm of the round's update
``cosine``                  of the fine-tuning with minus the gradient on 1500 test images
``p_label``, ``p_student``  10, 50 and 90 % quantiles of the probability of a generated image's
                            label for the clients, weighted by a_{k,y}, and for the average
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import SGD, LocalWork, Model, Part, Round, Simulation, Weights, parse
from kedge.core import rng, tree
from kedge.core.tree import Params, Tree
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.engines import Execution
from kedge.parts.distil import teacher_logits
from kedge.parts.flboost import FLBoost

VARIANTS: dict[str, dict[str, Any]] = {
    "student_bn=batch": {"student_bn": "batch"},
    "official": {},
    "real images, student_bn=batch": {"student_bn": "batch"},
    "student_bn=batch, confidence=0.9": {"student_bn": "batch", "confidence": 0.9},
    "student_bn=frozen": {"student_bn": "frozen"},
}


@dataclass(frozen=True)
class SeeClients(Part):
    """Changes nothing; it requests the clients' models in the totals of a round."""

    needs_clients = True


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != width:
            conv = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def narrow_resnet18(width: int) -> nn.Sequential:
    net = nn.Sequential()
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    net.add_module(
        "stem", nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    )
    for k in range(4):
        inputs, own = width * max(1, 2 ** (k - 1)), width * 2**k
        blocks = [Block(inputs, own, 1 if k == 0 else 2), Block(own, own, 1)]
        ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if k == 3 else []
        net.add_module(f"stage{k + 1}", nn.Sequential(*blocks, *ends))
    net.add_module("head", nn.Linear(8 * width, 10))
    return net


class State(NamedTuple):
    """What the server has at the end of a round of the base."""

    round: int
    anchor: Weights
    average: Weights
    clients: Weights
    counts: Tensor


class Lab:
    def __init__(self, args: argparse.Namespace) -> None:
        data = load("cifar10")
        federation = federate(
            data, "client_dirichlet_balanced(0.3)", clients=100, augment="crop(4)+flip", seed=0
        )
        torch.manual_seed(0)
        net = narrow_resnet18(args.width)
        x = torch.as_tensor(data.x_train[:20000]).float() / 255
        mean, std = (torch.as_tensor(v).float().view(1, -1, 1, 1) for v in (data.mean, data.std))
        x, y = (x - mean) / std, torch.as_tensor(data.y_train[:20000])
        optim = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
        for _ in range(args.pretrain):
            rows = torch.randint(0, len(x), (50,))
            optim.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optim.step()
        self.images = [x[y == c] for c in range(10)]
        self.sim = Simulation(
            federation,
            Model(net),
            parse(args.base) + SeeClients() + FLBoost(steps=0, width=args.generator),
            optim=SGD(lr=0.1, weight_decay=1e-3, clip=10.0, schedule="exponential(0.998)"),
            work=LocalWork(batch=50, steps=20),
            per_round=10,
            weighting="uniform",
            engine=Execution("loop"),
            seed=0,
        )
        batches = list(federation.test_batches(rows=2500))
        self.x = torch.cat([b.x for b in batches])[:4000]
        self.y = torch.cat([b.y for b in batches])[:4000]

    def states(self, rounds: int) -> list[State]:
        counts, found = self.sim.federation.label_counts(), []
        for t in range(rounds):
            cohort, anchor = self.sim.draw_cohort(t), self.sim.weights
            clients = self.sim.run_round(cohort)["clients"]
            average = tree.map(lambda v: v.mean(0) if v.is_floating_point() else v[0], clients)
            found.append(State(t, anchor, average, clients, counts[cohort]))
        return found

    @torch.no_grad()
    def accuracy(self, weights: Weights) -> float:
        pieces = [self.sim.bound.model.forward(weights, x, "eval") for x in self.x.split(1000)]
        right = torch.cat([p.logits for p in pieces]).argmax(-1) == self.y
        return round(100 * float(right.double().mean()), 2)

    def slope(self, weights: Weights) -> Params:
        def loss(params: Params) -> Tensor:
            both = Weights(params, weights.buffers)
            out = self.sim.bound.model.forward(both, self.x[:1500], "eval")
            return F.cross_entropy(out.logits, self.y[:1500])

        return tree.scale(torch.func.grad(loss)(weights.params), -1.0)

    def round_of(self, part: FLBoost, state: State, slot: Tree) -> Round:
        return Round(
            part=part, model=self.sim.bound.model, spec=self.sim.bound.spec, round=state.round,
            lr=0.1 * 0.998**state.round, key=rng.key(100 + state.round), phase="",
            anchor=state.anchor, server=slot, uploads={"counts": state.counts},
            totals={"count": len(state.counts), "clients": state.clients},
        )  # fmt: skip

    def play(self, part: FLBoost, slot: Tree, states: list[State]) -> tuple[dict[str, Any], Tree]:
        begin, rows = time.process_time(), []
        for state in states:
            tuned, slot = part.server_step(self.round_of(part, state, slot), state.average)
            rows.append(self.row(part, state, slot, tuned))
        gains = {
            k: round(sum(r[k] - r["before"] for r in rows) / len(rows), 2)
            for k in ("after", "after_bn", "before_bn")
        }
        seconds = round(time.process_time() - begin, 1)
        return {"part": str(part), "gain": gains, "cpu_seconds": seconds, "rows": rows}, slot

    def row(self, part: FLBoost, state: State, slot: Tree, tuned: Weights) -> dict[str, Any]:
        average = state.average
        moved = tree.sub(tuned.params, average.params)
        update = tree.sub(average.params, state.anchor.params)
        slope = self.slope(average)
        norms = (tree.sq_norm(moved) * tree.sq_norm(slope)).sqrt().clamp_min(1e-12)
        row: dict[str, Any] = {
            "round": state.round,
            "before": self.accuracy(average),
            "after": self.accuracy(tuned),
            "after_bn": self.accuracy(tuned._replace(buffers=average.buffers)),
            "before_bn": self.accuracy(average._replace(buffers=tuned.buffers)),
            "ratio": round(float((tree.sq_norm(moved) / tree.sq_norm(update)).sqrt()), 3),
            "cosine": round(float(tree.dot(moved, slope) / norms), 3),
            "line": [
                self.accuracy(Weights(tree.axpy(a, moved, average.params), average.buffers))
                for a in (0.1, 0.3, 0.6)
            ],
        }
        many = dataclasses.replace(part, steps=1, batch=200)
        drawn = many._draw(rng.key(7), state.counts.sum(0), self.sim.bound.spec.dtype)
        z, y = (v[0] for v in drawn)
        with torch.no_grad():
            x, _ = part._generator(self.sim.bound.spec)(Weights(**slot), z, y, False)
            every = torch.arange(len(y))
            r = self.round_of(part, state, slot)
            probs = teacher_logits(r, "input", state.clients, x).softmax(-1)[:, every, y]
            student = self.sim.bound.model.forward(average, x, "eval").logits.softmax(-1)[every, y]
        for name, p in (
            ("p_label", (part._ensemble(state.counts)[:, y] * probs).sum(0)),
            ("p_student", student),
        ):
            row[name] = [round(float(p.quantile(q)), 2) for q in (0.1, 0.5, 0.9)]
        return row

    def real(self, options: dict[str, Any]) -> FLBoost:
        """FLBoost with training images in place of generated ones."""
        images = self.images

        class Real(FLBoost):
            name = "flboost"

            def _train_generator(self, r: Any, student: Any, generator: Any, moments: Any, g: Any):
                return generator, moments

            def _generator(self, spec: Any) -> Any:
                def pick(weights: Weights, z: Tensor, y: Tensor, train: bool) -> Any:
                    draw = torch.Generator().manual_seed(int(z.abs().sum() * 1000))
                    rows = []
                    for c in y.tolist():
                        row = torch.randint(0, len(images[c]), (1,), generator=draw)
                        rows.append(images[c][int(row)])
                    return torch.stack(rows), {}

                return pick

        return Real(**options)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--base", default="scaffold")
    parser.add_argument("--width", type=int, default=12, help="channels of the first stage")
    parser.add_argument("--generator", type=int, default=16, help="width of the generator")
    parser.add_argument("--pretrain", type=int, default=600)
    parser.add_argument("--warm", type=int, default=3, help="rounds of the generator alone")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(args)
    states = lab.states(args.rounds)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    found: dict[str, Any] = {"settings": settings, "torch": torch.__version__, "variants": {}}
    own: dict[str, Any] = {"width": args.generator}
    first = FLBoost(**own).server_init(lab.sim.bound.spec)
    warm = FLBoost(**own, student_steps=0)
    found["warm"], slot = lab.play(warm, first, states[: args.warm])
    for name, options in VARIANTS.items():
        part = lab.real(own | options) if name.startswith("real") else FLBoost(**own, **options)
        found["variants"][name], _ = lab.play(part, slot, states[args.warm :])
        Path(args.out).write_text(json.dumps(found, indent=1))
        print(name, found["variants"][name]["gain"], flush=True)


if __name__ == "__main__":
    main()
