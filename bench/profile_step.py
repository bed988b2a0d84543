"""Profile one round of a workload on a GPU: the top kernels, launches, and how long the GPU idles.

    PYTHONPATH=src:. python3 bench/profile_step.py flboost_resnet18 \
        --engine "vector(compile=true)" [--method scaffold] [--precision bf16] \
        [--set steps=10,batch=64] [--norm none] [--out FILE]

Kernels are grouped by name and grid. Times are per round. ``idle`` is the share of the round's time
in which no kernel runs. ``--set`` changes fields of the workload. ``--norm torch`` has torch's own
BatchNorm in compiled steps, ``none`` leaves it out. The engine ``eager`` is the plain PyTorch loop.
``--ready FILE --go FILE`` let :mod:`several` time jobs one after the other that have compiled side
by side: the first file is written after the warm-up, and the second awaited before the timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.speed.eager import EagerRounds
from bench.speed.rounds import InProcess
from bench.speed.runners import read_engine
from bench.speed.workloads import WORKLOADS, Workload
from kedge.engines import layout as norms

WARM, ROUNDS, TOP = 2, 5, 22
Rounds = Callable[[], Any]


class Variant(Workload):
    """A workload whose network has no BatchNorm."""

    def module(self) -> nn.Module:
        net = super().module()
        for layer in list(net.modules()):
            for name, child in layer.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(layer, name, nn.Identity())
        return net


def prepare(work: Workload, engine: str, method: str, precision: str) -> InProcess:
    """Rounds of a workload on the GPU, after a warm-up."""
    if engine == "eager":
        run: Rounds = EagerRounds(work, work.normalised("cuda"), precision)
    else:
        execution, _ = read_engine(engine)
        sim = work.simulation(work.federation("cuda"), execution, method, precision)
        run = partial(sim.run_round, check="none")
    rounds = InProcess(run, "cuda", precision, 16)
    for _ in range(WARM):
        rounds()
    return rounds


def timed(rounds: Rounds, count: int = ROUNDS) -> list[float]:
    """Milliseconds of some rounds."""
    return [1e3 * rounds() for _ in range(count)]


def profile(rounds: Rounds) -> dict[str, Any]:
    """What the GPU does in a round."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=kinds) as profiler:
            rounds()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found.sort(key=lambda e: e["ts"])
    busy, end = 0.0, 0.0
    for e in found:  # the union of the intervals
        last = e["ts"] + e["dur"]
        busy += max(0.0, last - max(end, e["ts"]))
        end = max(end, last)
    span = end - found[0]["ts"]
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for e in found:
        grid = e.get("args", {}).get("grid", "")
        groups[_short(e["name"]), "x".join(map(str, grid))].append(e["dur"])
    rows = [
        {"kernel": name, "grid": grid, "ms": sum(times) / 1e3, "n": len(times)}
        for (name, grid), times in groups.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    kinds_of: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for row in rows:
        kind = kinds_of[_kind(row["kernel"])]
        kind[0] += row["ms"]
        kind[1] += row["n"]
    return {
        "span_ms": span / 1e3, "busy_ms": busy / 1e3, "idle": 1 - busy / span,
        "launches": len(found), "sum_ms": sum(row["ms"] for row in rows),
        "kinds": dict(sorted(kinds_of.items(), key=lambda item: -item[1][0])), "rows": rows,
    }  # fmt: skip


def _short(name: str) -> str:
    name = re.sub(r"^void |<.*|\(.*", "", name) if not name.startswith("triton") else name
    return name[:88]


def _kind(name: str) -> str:
    for kind, pattern in {
        "convolution (client axis)": r"^_product", "its weight gradient": r"^_weights",
        "cuDNN, cuBLAS": r"cudnn|cutlass|xmma|gemm|nvjet|wgrad|dgrad|fprop|sm90|sm80|conv",
        "compiled reductions": r"triton_(red|per)", "compiled pointwise": r"triton_poi",
        "copies": r"Memcpy|Memset|memcpy|copy",
    }.items():  # fmt: skip
        if re.search(pattern, name):
            return kind
    return "other"


def show(found: dict[str, Any], top: int = TOP) -> None:
    print(
        f"span {found['span_ms']:.2f} ms, busy {found['busy_ms']:.2f}, kernels "
        f"{found['sum_ms']:.2f}, idle {100 * found['idle']:.0f} %, {found['launches']} launches"
    )
    kinds = (f"{k} {ms:.2f} ({n})" for k, (ms, n) in found["kinds"].items())
    print("  " + "; ".join(kinds))
    for row in found["rows"][:top]:
        print(f"  {row['ms']:8.3f} ms {row['n']:5} x {row['kernel']} [{row['grid']}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--engine", default="vector(compile=true)")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--set", default="", help="fields of the workload, as steps=10,lr=0")
    parser.add_argument("--norm", choices=("fused", "torch", "none"), default="fused")
    parser.add_argument("--label", default="")
    parser.add_argument("--no-profile", action="store_true", help="only time the rounds")
    parser.add_argument("--ready")
    parser.add_argument("--go")
    parser.add_argument("--top", type=int, default=TOP)
    parser.add_argument("--out")
    args = parser.parse_args()
    fields = dataclasses.asdict(WORKLOADS[args.workload])
    for text in filter(None, args.set.split(",")):
        name, _, value = text.partition("=")
        fields[name] = float(value) if name == "lr" else int(value)
    work = (Variant if args.norm == "none" else Workload)(**fields)
    if args.norm == "torch":
        norms.is_traced = lambda: False
    start = time.perf_counter()
    rounds = prepare(work, args.engine, args.method, args.precision)
    seconds = time.perf_counter() - start
    if args.ready:
        Path(args.ready).touch()
        while not Path(args.go).exists():
            time.sleep(0.05)
    times = timed(rounds)
    found = {} if args.no_profile else profile(rounds)
    name = f"{args.label} {work.name}, {args.engine}, {args.method}, {args.precision}"
    name += f", {work.steps} steps" + (f", {args.set}, norm {args.norm}" if args.set else "")
    print(
        f"{name}: {statistics.median(times):.2f} ms a round (n = {len(times)}; ready after "
        f"{seconds:.0f} s; {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB)"
    )
    if found:
        show(found, args.top)
        found["rows"] = found["rows"][:60]
    if args.out:
        record = {"what": name, "device": torch.cuda.get_device_name(), "times_ms": times}
        Path(args.out).write_text(json.dumps(record | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
