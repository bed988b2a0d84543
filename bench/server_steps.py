"""Steps on the server: check on a GPU that the fast ones agree, and time them beside the base.

    PYTHONPATH=src:. python3 bench/server_steps.py all
    PYTHONPATH=src:. python3 bench/server_steps.py check [--quick] [--no-compile]
    PYTHONPATH=src:. python3 bench/server_steps.py server [--methods a,b] [--profile] [--compile]
    PYTHONPATH=src:. python3 bench/server_steps.py rounds [--engine "loop(streams=4)"] [--compile]

``all``     in one call of about two minutes: ``check --quick`` in a process of its own, while
            FLBoost's steps are compiled here; then ``server --compile --profile`` for FLBoost.
``check``   three rounds of every method on a small network in fp32, with BatchNorm and GroupNorm on
            both engines, and a learning rate that changes from round to round. Steps on the server
            run as they are written (the reference), eagerly as on a GPU, captured, and, for some
            rows, captured and compiled. The table has the largest relative differences after
            every round, and where the last one is. Adam turns rounding into steps of the size of
            the learning rate where a gradient is zero, so differences in float32 may grow from
            round to round; those of compiled steps in float64 must not.
``server``  the time of a server's step alone at FLBoost's setting (10 teachers, torchvision's
            ResNet-18): captured, with ``--compile`` compiled, with ``--apart`` also compiled with
            the student's passes apart from the clients', with ``--reference`` as it is written.
            Also the time of every kind of step, and of its compilation.
``rounds``  the time of whole rounds at this setting, base and method, and their ratio.

``--out FILE.json`` writes the table to a file. The data are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.speed.runners import read_engine, split_list
from bench.speed.workloads import WORKLOADS, Workload
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.steps import REFERENCE, Steps
from kedge.core.update import Totals
from kedge.data.federation import Federation
from kedge.engines import Execution, layout, server_steps
from kedge.engines.capture import Captures
from kedge.engines.compiled import compile_function
from kedge.engines.device import precise
from kedge.engines.server_steps import FastSteps
from kedge.session.session import drive
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
    for method in CHECKED[:1] if args.quick else CHECKED:
        for engine in ("loop", "vector")[: 1 if args.quick else 2]:
            for norm in ("bn", "gn")[: 1 if args.quick else 2]:
                compiles = norm == "bn" and engine == "loop" and method in CHECKED[::2]
                yield compare(method, engine, norm, compiles and not args.no_compile)


def compare(method: str, engine: str, norm: str, compiles: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "engine": engine, "norm": norm}

    def rounds(steps: Steps, dtype: torch.dtype = torch.float32) -> list[tree.Tree]:
        return three_rounds(method, engine, norm, steps, dtype)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured, reference = rounds(fast(True, False)), rounds(REFERENCE)
        row["captured - eager"] = gaps(captured, rounds(fast(False, False)))
        row["captured - reference"] = gaps(captured, reference)
        joined = fast(True, False)
        joined.stacks_all = True
        row["joined - reference"] = gaps(rounds(joined), reference)
        if compiles:
            row["compiled - reference"] = gaps(rounds(fast(True, True)), reference)
            double = rounds(fast(True, True), torch.float64), rounds(REFERENCE, torch.float64)
            row["the same in float64"] = gaps(*double)
    row["warnings"] = sorted({str(w.message)[:200] for w in caught if "eager" in str(w.message)})
    return row


def gaps(a: list[tree.Tree], b: list[tree.Tree]) -> str:
    """The largest difference after every round, and the name of the leaf with the last one."""
    found = " ".join(f"{tree.gap(x, y):.1e}" for x, y in zip(a, b, strict=True))
    last, other = tree.to_wire(a[-1]), tree.to_wire(b[-1])
    return f"{found}  {max(last, key=lambda name: tree.gap(last[name], other[name]))}"


def three_rounds(
    method: str, engine: str, norm: str, steps: Steps, dtype: torch.dtype
) -> list[tree.Tree]:
    """The state of the server after each of three rounds."""
    problem = images(norm=norm, sizes=(25, 40, 30))
    double = problem.federation
    federation = Federation(
        double.x.to(dtype), double.y, torch.split(double.rows, double.sizes), double.task,
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    sim = Simulation(
        federation, Model(problem.module.to(dtype)), method, work=problem.work, per_round=2,
        optim=SGD(lr=0.05, schedule="exponential(0.5)"), engine=engine,
    )  # fmt: skip
    sim.steps, states = steps, []
    with precise("fp32", DEVICE):
        for _ in range(3):
            sim.run_round()
            state = {"weights": sim.weights, "slots": sim.server.slots}
            states.append(tree.map(lambda x: x.cpu().clone(), state))
    return states


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


class Timed(FastSteps):
    """Adds up the time of every kind of step while ``spent`` is a dictionary."""

    spent: dict[str, float] | None = None

    def _run(self, key: Any, *rest: Any) -> Any:
        if self.spent is None:
            return super()._run(key, *rest)
        synchronize()
        start = time.perf_counter()
        result = super()._run(key, *rest)
        synchronize()
        name = key[3].__name__
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start
        return result


def timed_compile(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    start = time.perf_counter()
    compiled = compile_function(function, *examples)
    COMPILED.append(f"{time.perf_counter() - start:6.1f} s, {len(list(tree.leaves(examples)))}")
    return compiled


COMPILED: list[str] = []  # seconds, and number of inputs


def server(
    args: argparse.Namespace, wait: Callable[[], Any] = lambda: None
) -> Iterator[dict[str, Any]]:
    server_steps.compile_function = timed_compile
    federation = workload(args).federation(str(DEVICE))
    kinds: dict[str, Steps] = {"captured": Timed(Captures(True), DEVICE, False)}
    if args.reference:
        kinds["reference"] = REFERENCE
    if args.compile:
        kinds["compiled"] = Timed(Captures(True), DEVICE, True)
    if args.apart:
        kinds["apart"] = Timed(Captures(True), DEVICE, True)
        kinds["apart"].stacks_all = False
    if args.upsample:
        layout._join_upsampling = lambda net: None
    if args.combo:
        torch._inductor.config.combo_kernels = True
    for method in args.methods:
        plain = argparse.Namespace(**vars(args) | {"compile": False})  # clients train once
        sim = simulation(plain, federation, method)
        totals = sim.clients.answer(sim.session.request(""))
        row: dict[str, Any] = {"method": method, "precision": args.precision}
        for kind, steps in kinds.items():

            def aggregate(
                sim: Simulation = sim, totals: Totals = totals, how: Steps = steps
            ) -> None:
                drive(sim.session.rounds(steps=how, check="none"), lambda _: totals)

            start = time.perf_counter()
            COMPILED.clear()
            aggregate()  # capture and compile
            synchronize()
            row[f"{kind} first"] = time.perf_counter() - start
            row[f"{kind} compilation"] = list(COMPILED)
            wait()
            row[kind] = timed(aggregate, args.times)
            if isinstance(steps, Timed):
                steps.spent = {}
                aggregate()
                spent = sorted(steps.spent.items(), key=lambda item: -item[1])
                row[f"{kind} by step"] = [f"{1e3 * t:8.2f} ms {name}" for name, t in spent]
                steps.spent = None
            if args.profile and kind != "captured":
                row[f"{kind} kernels"] = profile(aggregate)
            if DEVICE.type == "cuda":
                row[f"{kind} peak GB"] = torch.cuda.max_memory_reserved() / 1e9
        yield row


def everything(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "check", "--quick", *["--tiny"] * args.tiny]
    with subprocess.Popen(command) as checking:
        values = {"compile": True, "profile": True, "methods": args.methods[:1]}
        yield from server(argparse.Namespace(**vars(args) | values), checking.wait)


def profile(work: Callable[[], Any], shown: int = 40) -> list[str]:
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
            sim.run_round(check="none")
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
    parser.add_argument("what", choices=("all", "check", "server", "rounds"))
    parser.add_argument("--methods", type=split_list, default=METHODS)
    parser.add_argument("--engine", default="loop(streams=4)" if DEVICE.type == "cuda" else "loop")
    parser.add_argument("--precision", default="bf16" if DEVICE.type == "cuda" else "fp32")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="check: no compiled rows")
    parser.add_argument("--quick", action="store_true", help="check: FLBoost with BatchNorm only")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--apart", action="store_true", help="server: also with passes apart")
    parser.add_argument("--reference", action="store_true", help="server: also as it is written")
    parser.add_argument("--upsample", action="store_true", help="generators write upsampled maps")
    parser.add_argument("--combo", action="store_true", help="with torch's combo kernels")
    parser.add_argument("--tiny", action="store_true", help="a small problem, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = []
    with precise(args.precision, DEVICE):
        work = {"all": everything, "check": check, "server": server, "rounds": rounds}
        for row in work[args.what](args):
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
