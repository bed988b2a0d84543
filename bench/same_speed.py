"""Two checkouts are equally fast: milliseconds a round, in processes that take turns.

    python bench/same_speed.py BASE [HERE] [--pairs 9] [--workloads a,b] [--clock wall] [--list]

BASE and HERE are folders with ``src``; HERE is by default the checkout of this script. For every
workload, processes of the two checkouts run in turn (base, here, here, base, base, ...) on the CPU
with one thread each. A process runs a few rounds to warm up and then gives the median time of some
more. A pair of neighbours gives the ratio here/base; the table has the median of the ratios and
its 95 % interval by bootstrap over the pairs. A workload is a regression if that interval lies
wholly above 1.03, faster if wholly below 0.97, and level otherwise. The status is 1 if there is a
regression or a process fails.

``--clock cpu`` takes the processor time of the process in place of the time on the wall, for a
machine that others use, too; workloads with workers keep to the wall. Workloads are those of
``kedge bench``, made small enough for a few seconds a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkouts

CLASSES = 10
WARM, LEAST, MOST, SECONDS = 2, 5, 60, 0.8  # rounds, and how long those that are timed take
ABOVE, BELOW = 1.03, 0.97
DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True)
class Workload:
    """A round: ``cohort`` clients of ``clients``, each with ``steps`` batches of its samples."""

    net: str  # linear, mlp, cnn or pfl, see `network`
    clients: int
    cohort: int
    samples: int  # per client
    batch: int
    steps: int
    engine: str
    method: str = "fedavg"
    how: dict[str, Any] = field(default_factory=dict)  # besides the engine


def _digits(engine: str, method: str = "fedavg") -> Workload:
    return Workload("mlp", 20, 20, 72, 32, 10, engine, method)


def _overhead(engine: str) -> Workload:
    return Workload("linear", 100, 100, 1, 1, 1, engine)


FEDCOG = "fedcog(samples=32, steps=5, batch=16)"
WORKLOADS = {
    "digits_loop": _digits("loop"),
    "digits_vector": _digits("vector"),
    "cnn_loop": Workload("cnn", 4, 4, 128, 64, 3, "loop"),
    "cnn_vector": Workload("cnn", 4, 4, 32, 8, 3, "vector"),
    "pfl_workers": Workload("pfl", 40, 8, 20, 10, 2, "loop", how={"workers": 2}),
    "overhead_loop": _overhead("loop"),
    "overhead_vector": _overhead("vector"),
    "scaffold_loop": _digits("loop", "scaffold"),
    "scaffold_vector": _digits("vector", "scaffold"),
    "fedcog_loop": _digits("loop", FEDCOG),
    "fedcog_vector": _digits("vector", FEDCOG),
}


# -- the process of one checkout -----------------------------------------------------------------


def network(kind: str) -> Any:
    """Logistic regression, an MLP, the small CNN of FedCOG or the CIFAR-10 net of pfl."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind == "linear":
        return checkouts.stack(flatten=nn.Flatten(), head=nn.Linear(64, CLASSES))
    if kind == "mlp":
        hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        return checkouts.stack(stage1=hidden, head=nn.Linear(64, CLASSES))
    if kind == "cnn":
        return checkouts.stack(
            stage1=nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            stage2=nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            stage3=nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
            stage4=nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            head=nn.Linear(84, CLASSES),
        )
    return checkouts.stack(
        stage1=nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU()),
        stage2=nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        stage3=nn.Sequential(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5)),
        head=nn.Linear(128, CLASSES),
    )


def federation(work: Workload) -> Any:
    """Random data, on which speed does not depend; pictures are bytes that are normalised."""
    import torch

    draw = torch.Generator().manual_seed(0)
    pictures, count = work.net in ("cnn", "pfl"), work.clients * work.samples
    shape = (3, 32, 32) if pictures else (64,)
    x = torch.randint(0, 256, (count, *shape), generator=draw, dtype=torch.uint8)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    options: dict[str, Any] = {"moments": ([0.5] * 3, [0.25] * 3)} if pictures else {}
    rows = torch.arange(count).split(work.samples)
    task = checkouts.task("classification", CLASSES)
    inputs = x if pictures else x.float() / 255
    return checkouts.find("Federation")(inputs, y, rows, task, **options)


def worker(name: str, clock: str) -> None:
    """Print the milliseconds of a round."""
    checkouts.begin()
    work = WORKLOADS[name]
    sim = checkouts.simulation(
        federation(work),
        network(work.net),
        work.method,
        how={"engine": work.engine} | work.how,
        optim={"lr": 0.01},
        work={"batch": work.batch, "steps": work.steps},
        per_round=work.cohort,
        weighting="uniform",
    )
    processor = clock == "cpu" and "workers" not in work.how
    now = time.process_time if processor else time.perf_counter
    for _ in range(WARM):
        sim.run_round()
    gc.collect()
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < SECONDS and len(times) < MOST):
        start = now()
        sim.run_round()
        times.append(now() - start)
    print(json.dumps({"ms": 1e3 * statistics.median(times), "rounds": len(times)}))


# -- the comparison ------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of the ratios drawn again, with replacement."""
    import numpy as np

    draw = np.random.default_rng(0)
    picked = draw.integers(0, len(ratios), (DRAWS, len(ratios)))
    medians = np.median(np.array(ratios)[picked], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    return "regression" if low > ABOVE else "faster" if high < BELOW else "level"


def measure(pair: tuple[Any, Any], name: str, pairs: int, clock: str) -> list[tuple[float, float]]:
    """Milliseconds of base and here, pair by pair."""
    found = []
    for i in range(pairs):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        ms = [0.0, 0.0]
        for side in order:
            text = pair[side].run("same_speed.py", "--worker", name, "--clock", clock)
            ms[side] = json.loads(text)["ms"]
        found.append((ms[0], ms[1]))
        ratio = ms[1] / ms[0]
        print(f"{name} {i + 1}/{pairs}: {ms[0]:.2f} {ms[1]:.2f} ms, {ratio:.3f}", flush=True)
    return found


def compare(args: argparse.Namespace) -> int:
    names = checkouts.chosen(args.workloads, list(WORKLOADS), "workload")
    if args.list:
        print("\n".join(f"{name:16} {WORKLOADS[name]}" for name in names))
        return 0
    start, failed = time.perf_counter(), False
    table = [
        f"{'workload':16} {'base ms':>9} {'here ms':>9} {'ratio':>7} {'95 % interval':>15} verdict"
    ]
    with checkouts.both(args.base, args.here) as pair:
        for name in names:
            try:
                found = measure(pair, name, args.pairs, args.clock)
            except checkouts.Failed as error:
                print(error, file=sys.stderr)
                table.append(f"{name:16} failed, see above")
                failed = True
                continue
            base, here = (statistics.median(ms) for ms in zip(*found, strict=True))
            ratios = [one / other for other, one in found]
            low, high = interval(ratios)
            said, span = verdict(low, high), f"{low:.3f} to {high:.3f}"
            failed |= said == "regression"
            middle = statistics.median(ratios)
            table.append(f"{name:16} {base:9.2f} {here:9.2f} {middle:7.3f} {span:>15} {said}")
    print()
    print("\n".join(table))
    print(f"{args.pairs} pairs, {args.clock} time, {time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("here", type=Path, nargs="?", default=checkouts.this_checkout())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workloads", default="", help="names of --list, with commas")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.clock)
        return 0
    if args.base is None and not args.list:
        parser.error("BASE is missing: the folder of a checkout")
    if args.pairs < 1:
        parser.error("--pairs must be 1 or more")
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
