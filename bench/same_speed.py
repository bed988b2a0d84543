"""Two checkouts are equally fast: milliseconds a round, in processes that take turns.

    python bench/same_speed.py BASE [HERE] [--pairs 9] [--workloads a,b] [--clock cpu] [--list]

BASE and HERE are folders with ``src``; HERE is by default the checkout of this script. For every
workload there are pairs of fresh processes, one of each checkout, on the CPU with one thread each.
After some rounds to warm up the two take turns (base, here, here, base, base, ...), so that what
else happens on the machine hits both. The ratio here/base of a pair is the median of that of its
turns. The table has the median over the pairs and its 95 % interval by bootstrap. A workload is a
regression if that interval lies wholly above 1.03, faster if wholly below 0.97, and level
otherwise. The status is 1 if there is a regression or a process fails.

Times are processor times, which count what others do on the machine least, and for workloads with
worker processes times on the wall; ``--clock wall`` takes those for all, which is for a quiet
machine. Workloads are those of ``kedge bench``, made small enough for a few seconds a pair.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkouts

CLASSES = 10
WARM = 3  # rounds
TURN = 0.02  # seconds at least, so that a quick round is not timed alone
TURNS, SECONDS = 8, 1.2  # turns of a pair at least, and how long they go on
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


def _digits(engine: str, method: str = "fedavg", cohort: int = 20) -> Workload:
    return Workload("mlp", 20, cohort, 72, 32, 10, engine, method)


def _overhead(engine: str) -> Workload:
    return Workload("linear", 100, 100, 1, 1, 1, engine)


FEDCOG = "fedcog(samples=32, steps=5, batch=16)"
WORKLOADS = {
    "digits_loop": _digits("loop"),
    "digits_vector": _digits("vector"),
    "cnn_loop": Workload("cnn", 4, 4, 128, 64, 2, "loop"),
    "cnn_vector": Workload("cnn", 4, 4, 32, 8, 3, "vector"),
    "pfl_workers": Workload("pfl", 40, 6, 20, 10, 1, "loop", how={"workers": 2}),
    "overhead_loop": _overhead("loop"),
    "overhead_vector": _overhead("vector"),
    "scaffold_loop": _digits("loop", "scaffold"),
    "scaffold_vector": _digits("vector", "scaffold"),
    "fedcog_loop": _digits("loop", FEDCOG, cohort=5),
    "fedcog_vector": _digits("vector", FEDCOG, cohort=5),
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


def worker(name: str) -> None:
    """Tell the seconds of a round, then run as many rounds as each line says and tell their time
    on the wall and on the processor."""
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
    for _ in range(WARM):
        start = time.perf_counter()
        sim.run_round()
    print(time.perf_counter() - start, flush=True)
    gc.collect()
    for line in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            sim.run_round()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - processor}
        print(json.dumps(spent), flush=True)


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


def take_turns(pair: tuple[Any, Any], name: str, clock: str) -> tuple[float, float, float]:
    """One pair of processes: milliseconds a round of base and here, and the ratio."""
    clock = "wall" if "workers" in WORKLOADS[name].how else clock
    talks: list[checkouts.Talk] = []
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for checkout in pair:
            talks.append(checkouts.Talk(checkout, "same_speed.py", "--worker", name))
        rounds = math.ceil(TURN / min(float(talk.answer()) for talk in talks))
        start = time.perf_counter()
        while len(times[0]) < TURNS or time.perf_counter() - start < SECONDS:
            for side in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
                talks[side].ask(str(rounds))
                times[side].append(1e3 * json.loads(talks[side].answer())[clock] / rounds)
    finally:
        for talk in talks:
            talk.close()
    base, here = (statistics.median(own) for own in times)
    return base, here, statistics.median(b / a for a, b in zip(*times, strict=True))


def measure(
    pair: tuple[Any, Any], name: str, pairs: int, clock: str
) -> list[tuple[float, float, float]]:
    """Milliseconds of base and here and their ratio, pair by pair."""
    found = []
    for i in range(pairs):
        found.append(take_turns(pair, name, clock))
        base, here, ratio = found[-1]
        print(f"{name} {i + 1}/{pairs}: {base:.2f} {here:.2f} ms, {ratio:.3f}", flush=True)
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
            base, here, middle = (statistics.median(column) for column in zip(*found, strict=True))
            low, high = interval([ratio for _, _, ratio in found])
            said, span = verdict(low, high), f"{low:.3f} to {high:.3f}"
            failed |= said == "regression"
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
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return 0
    if args.base is None and not args.list:
        parser.error("BASE is missing: the folder of a checkout")
    if args.pairs < 1:
        parser.error("--pairs must be 1 or more")
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
