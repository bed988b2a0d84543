"""Steps on the server: check on a GPU that the fast ones agree, and time them beside the base.

    PYTHONPATH=src python3 bench/server_steps.py check
    PYTHONPATH=src python3 bench/server_steps.py server [--methods a,b] [--profile] [--compile]
    PYTHONPATH=src python3 bench/server_steps.py rounds [--engine "loop(streams=4)"] [--compile]

``check``   three rounds of every method on a small network in fp32, with BatchNorm and GroupNorm on
            both engines, and a learning rate that changes from round to round. Steps on the server
            run as they are written (the reference), eagerly as on a GPU, captured, and, for some
            rows, captured and compiled. The table has the largest relative differences.
``server``  the time of a server's step alone at FLBoost's setting (10 teachers, torchvision's
            ResNet-18): the reference, captured, and with ``--compile`` compiled.
``rounds``  the time of whole rounds at this setting, base and method, and their ratio.

``--out FILE.json`` writes the table to a file. The data are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kedge.bench.runners import read_engine, split_list
from kedge.bench.workloads import WORKLOADS, Workload
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.steps import REFERENCE, Steps
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.capture import Captures
from kedge.engines.device import precise
from kedge.engines.server_steps import FastSteps
from kedge.sim.simulation import Simulation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "batch=6, noise=3, width=4"
CHECKED = (
    f"flboost:official(steps=2, student_steps=12, {SMALL})",
    f"flboost:paper(steps=2, student_steps=2, {SMALL})",
    f"feddf(generator_steps=12, student_steps=2, {SMALL})",
    f"fedgen(steps=12, {SMALL})",
    f"fedgen(steps=3, level=input, {SMALL})",
)
METHODS = "scaffold+flboost:official,fedavg+flboost:paper,fedavg+feddf,fedavg+fedgen"
FLBOOST = Workload(
    "flboost_resnet18", "resnet18(norm=bn, stem=imagenet)", (3, 32, 32), 100, 10, 500, 50, 50, 0.1,
    "FLBoost's CIFAR-10 setting",
)  # fmt: skip


def fast(captures: bool, compiles: bool) -> FastSteps:
    return FastSteps(Captures(captures), DEVICE, compiles)


# -- check --------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.backends.cudnn.deterministic = True
    for method in CHECKED:
        for engine in ("loop", "vector"):
            for norm in ("bn", "gn"):
                compiles = norm == "bn" and engine == "loop" and method in CHECKED[::2]
                yield compare(method, engine, norm, compiles and not args.no_compile)


def compare(method: str, engine: str, norm: str, compiles: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "engine": engine, "norm": norm}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager = three_rounds(method, engine, norm, fast(False, False))
        captured = three_rounds(method, engine, norm, fast(True, False))
        row["captured - eager"] = tree.gap(captured, eager)
        row["captured - reference"] = tree.gap(
            captured, three_rounds(method, engine, norm, REFERENCE)
        )
        if compiles:
            fused = three_rounds(method, engine, norm, fast(True, True))
            row["compiled - captured"] = tree.gap(fused, captured)
    row["warnings"] = sorted({str(w.message)[:200] for w in caught if "eager" in str(w.message)})
    return row


def three_rounds(method: str, engine: str, norm: str, steps: Steps) -> tree.Tree:
    """The state of the server after three rounds."""
    problem = images(norm=norm, sizes=(25, 40, 30))
    double = problem.federation
    federation = Federation(
        double.x.float(), double.y, torch.split(double.rows, double.sizes), double.task,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    sim = Simulation(
        federation, Model(problem.module.float()), method, work=problem.work, per_round=2,
        optim=SGD(lr=0.05, schedule="exponential(0.5)"), engine=engine,
    )  # fmt: skip
    sim._steps = steps
    with precise("fp32", DEVICE):
        for _ in range(3):
            sim.run_round()
    return tree.map(lambda x: x.cpu(), {"weights": sim.weights, "slots": sim.server.slots})


# -- time ---------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], times: int) -> float:
    """The median of several times, in seconds."""
    found = []
    for _ in range(times):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def simulation(args: argparse.Namespace, federation: Federation, method: str) -> Simulation:
    work = workload(args)
    execution, _ = read_engine(args.engine)
    execution = Execution(**vars(execution) | {"compile": args.compile})
    return work.simulation(federation, execution, method, args.precision)


def workload(args: argparse.Namespace) -> Workload:
    work = WORKLOADS.get("flboost_resnet18", FLBOOST)
    if args.tiny:  # to try the script on a CPU
        values = vars(work) | {"clients": 4, "cohort": 3, "samples": 20, "batch": 10, "steps": 2}
        work = Workload(**values | {"model": "lenet5"})
    return work


def server(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    federation = workload(args).federation(str(DEVICE))
    kinds: dict[str, Steps] = {"reference": REFERENCE, "captured": fast(True, False)}
    if args.compile:
        kinds["compiled"] = fast(True, True)
    for method in args.methods:
        plain = argparse.Namespace(**vars(args) | {"compile": False})  # clients train once
        sim = simulation(plain, federation, method)
        _, done = sim.train(sim.draw_cohort(0))
        row: dict[str, Any] = {"method": method, "precision": args.precision}
        for kind, steps in kinds.items():
            sim._steps = steps
            start = time.perf_counter()
            sim.aggregate(done.totals)  # capture and compile
            synchronize()
            row[f"{kind} first"] = time.perf_counter() - start
            row[kind] = timed(lambda: sim.aggregate(done.totals), args.times)  # noqa: B023
            if args.profile:
                row[f"{kind} kernels"] = profile(lambda: sim.aggregate(done.totals))  # noqa: B023
            if DEVICE.type == "cuda":
                row[f"{kind} peak GB"] = torch.cuda.max_memory_reserved() / 1e9
        yield row


def profile(work: Callable[[], Any], shown: int = 25) -> list[str]:
    """The kernels that take most of the time: milliseconds, number, name."""
    with torch.profiler.profile() as found:
        work()
        synchronize()
    rows: dict[str, tuple[float, int]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total, count = rows.get(event.name, (0.0, 0))
            rows[event.name] = total + event.device_time / 1e3, count + 1
    total = sum(t for t, _ in rows.values()), sum(n for _, n in rows.values())
    top = sorted(rows.items(), key=lambda item: -item[1][0])[:shown]
    lines = [f"{t:9.2f} ms {n:7d}  {name[:90]}" for name, (t, n) in top]
    return [f"{total[0]:9.2f} ms {total[1]:7d}  in all", *lines]


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    federation = workload(args).federation(str(DEVICE))
    bases: dict[str, float] = {}
    for method in dict.fromkeys([*(m.split("+")[0] for m in args.methods), *args.methods]):
        sim = simulation(args, federation, method)
        start = time.perf_counter()
        for _ in range(2):
            sim.run_round(check=False)
        synchronize()
        first, seconds = time.perf_counter() - start, timed(sim.run_round, args.times)
        base = bases.setdefault(method.split("+")[0], seconds)
        yield {
            "method": method, "engine": args.engine, "compile": args.compile,
            "precision": args.precision, "two first rounds": first, "round": seconds,
            "over base": seconds / base,
        }  # fmt: skip
        del sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "server", "rounds"))
    parser.add_argument("--methods", type=split_list, default=METHODS)
    parser.add_argument("--engine", default="loop(streams=4)" if DEVICE.type == "cuda" else "loop")
    parser.add_argument("--precision", default="bf16" if DEVICE.type == "cuda" else "fp32")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="check: no compiled rows")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small problem, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = []
    with precise(args.precision, DEVICE):
        for row in {"check": check, "server": server, "rounds": rounds}[args.what](args):
            for name, value in row.items():
                lines = (
                    value
                    if isinstance(value, list)
                    else [f"{value:.4g}" if isinstance(value, float) else value]
                )
                print(
                    f"{name:22}",
                    *lines,
                    sep="\n    " if isinstance(value, list) else " ",
                    flush=True,
                )
            print(flush=True)
            table.append(row)
            if args.out:
                args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
