"""Compare the ensemble of a cohort with the average of its models: is there anything to distil?

    PYTHONPATH=src python3 bench/flboost_ensemble.py --out FILE.json [--method scaffold]

with ``cifar10.npz`` in the folder ``$KEDGE_DATA``; ``--help`` names the other options.

FLBoost distils the ensemble of a cohort into the aggregated model. That can help only if the
ensemble is better than the average of its models. This script trains a method at the setting of
FLBoost's Table 1 (CIFAR-10, the defaults below), and every few rounds reports accuracies on the
whole test set, in percent:

``global``           the model that starts the next round, after any fine-tuning
``average``          the plain average of the clients' models and of their BatchNorm statistics
``average_batch_bn`` the same, but BatchNorm normalises by the test batch
``clients_...``      single clients' models, each with its own statistics: mean, lowest, highest
``ensemble``         uniform mean of the clients' logits; ``ensemble_probs``: of their softmax
``ensemble_bn``      as ``ensemble``, but every client with the averaged BatchNorm statistics
``attention``        logits weighted by FLBoost's a_{k,y} = n_k^y / sum_i n_i^y, where y is what the
                     average predicts; ``attention_probs``: the softmax so weighted
``attention_class``  class c scores sum_k a_{k,c} p_k(c), which needs no prediction
``attention_true``   y is the true label. This leaks the label, so it is no fair test; but it is the
                     teacher that FLBoost uses on its labelled samples

and the mean negative log-likelihood of three of them. With a method such as
``scaffold+flboost:official`` the difference of ``global`` and ``average`` is the effect of
fine-tuning in that round. The record's ``lateflboost`` is today's ``flboost`` with ``start``.

The clients train on the engine loop, on a GPU in four streams. The record of an H200 is
``docs/results/flboost/ensemble_h200.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge import SGD, LocalWork, Model, Part, Simulation, Weights, parse
from kedge.core import tree
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.engines import Execution
from kedge.engines.device import precise
from kedge.models import build

TEST_BATCH = 2500


@dataclass(frozen=True)
class SeeClients(Part):
    """Changes nothing; it requests the clients' models in the totals of a round."""

    needs_clients = True


def simulate(args: argparse.Namespace) -> Simulation:
    """The paper's setting, unless the options say otherwise."""
    data = load(args.data)
    federation = federate(
        data, args.partition, clients=args.clients, augment=args.augment, seed=args.seed,
        device=args.device,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    model = Model(build(args.model, data.shape, data.outputs), precision=args.precision)
    return Simulation(
        federation,
        model,
        parse(args.method) + SeeClients(),
        optim=SGD(lr=args.lr, weight_decay=1e-3, clip=10.0, schedule="exponential(0.998)"),
        work=LocalWork(batch=args.batch, steps=args.steps),
        per_round=args.per_round,
        weighting="uniform",
        engine=Execution("loop", streams=4 if args.device == "cuda" else 0),
        seed=args.seed,
    )


@torch.no_grad()
def logits_of(sim: Simulation, weights: Weights, mode: str = "eval") -> Tensor:
    """The logits of a model on the test set, ``[N, C]``."""
    batches = sim.federation.test_batches(rows=TEST_BATCH)
    return torch.cat([sim.bound.model.forward(weights, b.x, mode).logits for b in batches])


def averaged(stacked: Tensor) -> Tensor:
    """The mean over clients; integer counters are the same on all clients."""
    return stacked.mean(0) if stacked.is_floating_point() else stacked[0]


def scores(sim: Simulation, clients: Weights, counts: Tensor) -> dict[str, Any]:
    """Accuracies and likelihoods after a round. ``clients`` are the stacked weights of its clients,
    and ``counts`` ``[K, C]`` their samples of each class."""
    y = torch.cat([b.y for b in sim.federation.test_batches(rows=TEST_BATCH)])
    number = len(counts)
    average = tree.map(averaged, clients)
    average_logits = logits_of(sim, average)  # [N, C]
    global_logits = logits_of(sim, sim.weights)
    each = [tree.take(clients, k) for k in range(number)]
    logits = torch.stack([logits_of(sim, one) for one in each])  # [K, N, C]
    average_bn = torch.stack(
        [logits_of(sim, one._replace(buffers=average.buffers)) for one in each]
    )
    probs = logits.softmax(-1)
    total = counts.sum(0)
    share = counts / (total + (total <= 0))  # a_{k,y}, [K, C]
    predicted = share[:, average_logits.argmax(-1), None]  # [K, N, 1]
    true = share[:, y, None]  # [K, N, 1]

    def accuracy(outputs: Tensor) -> float:
        return round(100 * float((outputs.argmax(-1) == y).double().mean()), 2)

    single = [accuracy(one) for one in logits]
    mean_probs = probs.mean(0)
    return {
        "global": accuracy(global_logits),
        "average": accuracy(average_logits),
        "average_batch_bn": accuracy(logits_of(sim, average, "probe")),
        "clients_mean": round(sum(single) / number, 2),
        "clients_min": min(single),
        "clients_max": max(single),
        "ensemble": accuracy(logits.mean(0)),
        "ensemble_probs": accuracy(mean_probs),
        "ensemble_bn": accuracy(average_bn.mean(0)),
        "attention": accuracy((predicted * logits).sum(0)),
        "attention_probs": accuracy((predicted * probs).sum(0)),
        "attention_class": accuracy((share[:, None] * probs).sum(0)),
        "attention_true": accuracy((true * probs).sum(0)),
        "nll_global": round(float(F.cross_entropy(global_logits, y)), 4),
        "nll_average": round(float(F.cross_entropy(average_logits, y)), 4),
        "nll_ensemble_probs": round(float(F.nll_loss(mean_probs.clamp_min(1e-12).log(), y)), 4),
    }


def train(sim: Simulation, args: argparse.Namespace) -> None:
    """Train until the last round or the time limit; write the file after every test."""
    counts = sim.federation.label_counts()
    partition = sim.federation.partition
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "device")}
    result: dict[str, Any] = {
        "method": repr(parse(args.method)),  # presets written out
        "settings": settings,
        "device": device,
        "torch": torch.__version__,
        "partition_hash": partition.hash if partition is not None else "",
        "records": [],
    }
    begin, training = time.perf_counter(), 0.0
    while sim.round < args.rounds:
        start = time.perf_counter()
        cohort = sim.session.draw_clients(sim.round)
        done = sim.run_round(cohort)
        loss = float(done.losses["task"].mean())  # waits for the device
        training += time.perf_counter() - start
        late = args.seconds > 0 and time.perf_counter() - begin > args.seconds
        if sim.round % args.every == 0 or sim.round == args.rounds or late:
            record = {"round": sim.round, "train_loss": round(loss, 4)}
            record |= scores(sim, done.totals.stacked.weights, counts[cohort])
            record["train_seconds"] = round(training, 1)
            record["seconds"] = round(time.perf_counter() - begin, 1)
            result["records"].append(record)
            Path(args.out).write_text(json.dumps(result, indent=1))
            print(" ".join(f"{k} {v}" for k, v in record.items()), flush=True)
        if late:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--method", default="scaffold")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit; 0: none")
    parser.add_argument("--every", type=int, default=20, help="rounds between two tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--partition", default="client_dirichlet_balanced(0.3)")
    parser.add_argument("--augment", default="crop(4)+flip")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--model", default="resnet18(norm=bn, stem=imagenet)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with precise(args.precision, torch.device(args.device)):
        train(simulate(args), args)


if __name__ == "__main__":
    main()
