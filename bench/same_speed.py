"""Compare the speed of two checkouts: milliseconds per round, in processes that take turns.

    python bench/same_speed.py BASE [HERE] [--pairs 9] [--workloads a,b] [--clock cpu] [--list]

BASE and HERE are folders with ``src``; HERE is by default the checkout of this script. Every
workload is timed in pairs of new processes, one per checkout, on the CPU with one thread each.
After a warm-up the two processes take turns (base, here, here, base, base, ...), so that other load
on the machine affects both. The ratio here/base of a pair is the median over its turns. The table
shows the median over the pairs and its 95 % bootstrap interval. A workload is a regression if the
interval lies above 1.03, faster if it lies below 0.97, and level otherwise. The exit status is 1 if
there is a regression or a process fails.

Times are CPU times, which depend least on other load. Workloads with worker processes use wall
times; ``--clock wall`` uses them for all workloads, which needs a quiet machine. The workloads are
those of ``python -m bench``, reduced to a few seconds per pair.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkouts

CLASSES = 10
WARM_UP_ROUNDS = 3
MIN_TURN_S = 0.02  # a turn has several rounds if they are quicker
MIN_TURNS, MIN_PAIR_S = 8, 1.2  # of a pair of processes
MAX_LEVEL, MIN_LEVEL = 1.03, 0.97  # ratios that count as equally fast
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class Workload:
    """A round: ``cohort`` of ``clients`` clients take ``steps`` steps each."""

    net: str  # linear, mlp, cnn or pfl, see `network`; wide, see `members`
    clients: int
    cohort: int
    samples: int  # per client
    batch: int
    steps: int
    engine: str
    method: str = "fedavg"
    execution: dict[str, Any] = field(default_factory=dict)  # besides the engine


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
    "pfl_workers": Workload("pfl", 40, 6, 20, 10, 1, "loop", execution={"workers": 2}),
    "overhead_loop": _overhead("loop"),
    "overhead_vector": _overhead("vector"),
    "scaffold_loop": _digits("loop", "scaffold"),
    "scaffold_vector": _digits("vector", "scaffold"),
    "fedcog_loop": _digits("loop", FEDCOG, cohort=5),
    "fedcog_vector": _digits("vector", FEDCOG, cohort=5),
    "members": Workload("wide", 3, 3, 600, 32, 10, "members"),  # a federation in one process, 1 MB
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
    """Random data, since speed does not depend on them; images are bytes that are normalised."""
    import torch

    draw = torch.Generator().manual_seed(0)
    is_image, count = work.net in ("cnn", "pfl"), work.clients * work.samples
    shape = (3, 32, 32) if is_image else (64,)
    x = torch.randint(0, 256, (count, *shape), generator=draw, dtype=torch.uint8)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    options: dict[str, Any] = {"moments": ([0.5] * 3, [0.25] * 3)} if is_image else {}
    rows = torch.arange(count).split(work.samples)
    task = checkouts.task("classification", CLASSES)
    inputs = x if is_image else x.float() / 255
    return checkouts.find("Federation")(inputs, y, rows, task, **options)


def worker(name: str) -> None:
    """Print the seconds of a round; then, for each input line, run so many rounds and print their
    wall and CPU time."""
    checkouts.begin()
    work = WORKLOADS[name]
    if work.engine == "members":
        members(work)
        return
    sim = checkouts.simulation(
        federation(work),
        network(work.net),
        work.method,
        execution={"engine": work.engine} | work.execution,
        optim={"lr": 0.01},
        work={"batch": work.batch, "steps": work.steps},
        per_round=work.cohort,
        weighting="uniform",
    )
    turns = answer_turns()
    while next(turns, True) is None:
        sim.run_round()


def answer_turns() -> Iterator[None]:
    """Run a round after each step of this iterator; it ends with the last turn."""
    for _ in range(WARM_UP_ROUNDS):
        start = time.perf_counter()
        yield
    print(time.perf_counter() - start, flush=True)
    gc.collect()
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            yield
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


def members(work: Workload) -> None:
    """A coordinator and its members in this process, with their messages, checks and files."""
    import numpy as np

    from kedge.data.datasets import Dataset
    from kedge.federation.coordinator.coordinator import Coordinator
    from kedge.federation.coordinator.rules import Rules
    from kedge.federation.member.member import Member
    from kedge.federation.messages import Direct

    try:
        from kedge.settings import Config
    except ImportError:  # a commit before there was this module
        from kedge.runs.config import Config  # type: ignore[import-not-found, no-redef]

    draw, zeros, ones = np.random.default_rng(0), np.zeros(64), np.ones(64)
    x = draw.random((work.clients, work.samples, 64), np.float32)
    y = draw.integers(0, CLASSES, (work.clients, work.samples))
    turns = answer_turns()
    next(turns)

    def watch(seed: int, record: Any) -> None:
        if next(turns, True):
            sys.exit(0)  # a run of so many rounds is never complete

    with tempfile.TemporaryDirectory() as folder:
        handles = {}
        for k in range(work.clients):
            data = Dataset(f"m{k}", x[k], y[k], zeros, ones, "classification", CLASSES)
            handles[f"node {k}"] = Member(f"m{k}", data, Path(folder, f"m{k}")).handle
        config = Config(
            data="members", model="mlp(hidden=[480, 440])", rounds=10**5, clients=work.clients,
            per_round=0, steps=work.steps, batch=work.batch, lr=0.01, split="holdout(0.2)",
            seeds=(0,),
        )  # fmt: skip
        rules = Rules(wait_s=0.0, join_s=1.0)
        run = Coordinator(config, Direct(handles), Path(folder, "run"), rules=rules, watch=watch)
        run.run()


# -- the comparison ------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    import numpy as np

    generator = np.random.default_rng(0)
    picked = generator.integers(0, len(ratios), (BOOTSTRAP_SAMPLES, len(ratios)))
    medians = np.median(np.array(ratios)[picked], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    return "regression" if low > MAX_LEVEL else "faster" if high < MIN_LEVEL else "level"


def take_turns(pair: tuple[Any, Any], name: str, clock: str) -> tuple[float, float, float]:
    """Time one pair of processes: milliseconds per round of base and here, and their ratio."""
    clock = "wall" if "workers" in WORKLOADS[name].execution else clock
    workers: list[checkouts.Worker] = []
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for checkout in pair:
            workers.append(checkouts.Worker(checkout, "same_speed.py", "--worker", name))
        rounds = math.ceil(MIN_TURN_S / min(float(process.answer()) for process in workers))
        start = time.perf_counter()
        while len(times[0]) < MIN_TURNS or time.perf_counter() - start < MIN_PAIR_S:
            for side in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
                workers[side].ask(str(rounds))
                times[side].append(1e3 * json.loads(workers[side].answer())[clock] / rounds)
    finally:
        for process in workers:
            process.close()
    base, here = (statistics.median(seconds) for seconds in times)
    return base, here, statistics.median(b / a for a, b in zip(*times, strict=True))


def measure(
    pair: tuple[Any, Any], name: str, pairs: int, clock: str
) -> list[tuple[float, float, float]]:
    """Milliseconds per round of base and here, and their ratio, for each pair."""
    found = []
    for i in range(pairs):
        found.append(take_turns(pair, name, clock))
        base, here, ratio = found[-1]
        print(f"{name} {i + 1}/{pairs}: {base:.2f} {here:.2f} ms, {ratio:.3f}", flush=True)
    return found


def compare(args: argparse.Namespace) -> int:
    names = checkouts.read_names(args.workloads, list(WORKLOADS), "workload")
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
            result, span = verdict(low, high), f"{low:.3f} to {high:.3f}"
            failed |= result == "regression"
            table.append(f"{name:16} {base:9.2f} {here:9.2f} {middle:7.3f} {span:>15} {result}")
    print()
    print("\n".join(table))
    print(f"{args.pairs} pairs, {args.clock} time, {time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("here", type=Path, nargs="?", default=checkouts.this_checkout())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workloads", default="", help="names from --list, separated by commas")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument(
        "--list", action="store_true", help="list the workloads without running them"
    )
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
