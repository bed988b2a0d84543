"""Check on a GPU that the fast paths agree with the eager one, for every part.

    PYTHONPATH=src python3 bench/gpu_check.py [--out FILE.json] [--shards N] [NAME ...]

Every part runs three rounds in fp32, once with BatchNorm and once with GroupNorm. The table shows
the largest relative difference of the whole state between

- ``vector-loop``: the engines vector and loop, both replaying CUDA graphs;
- ``graph-plain``: the engine loop with CUDA graphs and without;
- ``compiled``: the engine vector compiled and not, for the parts named by ``--compile``.

``graphs`` says NO where a step could not be captured. ``--shards N`` distributes the parts over N
processes. Then the Triton convolutions with a client axis are compared with PyTorch's, relative to
the largest value. On a machine without a GPU the engines run on the CPU, without CUDA graphs and
without the convolutions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.part import Part, parts
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.loop import Loop
from kedge.sim.simulation import Simulation

ROUNDS = 3
COMPILE = "fedavg,scaffold,fedimpro,fedtr,flboost,fedcog,fedbr,fedreg"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONVOLUTIONS = [  # channels, filters, kernel, stride, padding
    (3, 6, 5, 1, 0),
    (6, 16, 5, 1, 0),
    (3, 32, 3, 1, 0),
    (64, 128, 3, 2, 1),
    (64, 64, 3, 1, 1),
]


def simulate(
    part: Part | None, norm: str, execution: Execution, capture: bool = True
) -> Simulation:
    """Train for ``ROUNDS`` rounds; a loop with ``capture=False`` runs its steps eagerly."""
    problem = images(
        norm=norm, task=part.tasks[0] if part else "classification", sizes=(25, 40, 70)
    )
    double = problem.federation
    federation = Federation(
        double.x.float(), double.y, torch.split(double.rows, double.sizes), double.task,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    sim = Simulation(
        federation, Model(problem.module.float()), part or "fedavg", optim=problem.optim,
        work=problem.work, per_round=2,
        engine=execution if capture else Loop(execution, capture=False),
    )  # fmt: skip
    for _ in range(ROUNDS):
        sim.run_round()
    return sim


def check(name: str, norm: str, compile: bool) -> dict:
    """Compare the engines on one part: a row of the table."""
    part = None if name == "fedavg" else parts[name](**parts[name].tiny)
    start = time.time()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vector = simulate(part, norm, Execution("vector")).state()
            loop = simulate(part, norm, Execution("loop")).state()
            plain = simulate(part, norm, Execution("loop"), capture=False).state()
            fused = (
                simulate(part, norm, Execution("vector", compile=True)).state() if compile else None
            )
    except Exception as error:  # noqa: BLE001  (one failed part must not end the table)
        print(traceback.format_exc()[-600:], file=sys.stderr)
        return {"part": name, "norm": norm, "error": f"{type(error).__name__}: {error}"}
    messages = [str(w.message) for w in caught]
    failures = [text for text in messages if "CUDA graph" in text or "compile" in text]
    return {
        "part": name, "norm": norm, "vector_loop": tree.gap(vector, loop),
        "graph_plain": tree.gap(loop, plain),
        "compiled": tree.gap(fused, vector) if fused else None,
        "recorded": not failures, "why": failures[0][:200] if failures else "",
        "seconds": time.time() - start,
    }  # fmt: skip


def convolutions() -> list[dict]:
    """Compare the Triton kernels with PyTorch's convolutions, in fp32."""
    from kedge.engines import kernels

    rows = []
    for c, o, r, stride, pad in CONVOLUTIONS:
        x, w = (
            torch.randn(4, 8, c, 16, 16, device=DEVICE),
            torch.randn(4, o, c, r, r, device=DEVICE),
        )
        x.requires_grad_(), w.requires_grad_()
        y = torch.stack([F.conv2d(a, b, None, stride, pad) for a, b in zip(x, w, strict=True)])
        g = torch.randn_like(y)
        y.backward(g)
        xd, wd = x.detach(), w.detach()
        forward = wd.permute(0, 3, 4, 1, 2).contiguous()  # [K, R, S, O, C]
        backward = wd.permute(0, 3, 4, 2, 1).contiguous()  # [K, R, S, C, O]
        results = {
            "forward": (kernels.conv(xd, forward, stride, (pad, pad)), y.detach()),
            "inputs": (kernels.conv_inputs(g, backward, (16, 16), stride, (pad, pad)), x.grad),
            "weights": (kernels.conv_weights(g, xd, (r, r), stride, (pad, pad)), w.grad),
        }
        gaps = {k: float((a - b).abs().max() / b.abs().max()) for k, (a, b) in results.items()}
        rows.append({"channels": c, "filters": o, "kernel": r, "stride": stride, "pad": pad} | gaps)
    return rows


def line_of(row: dict) -> str:
    """A row of the table as text."""
    if "error" in row:
        return f"{row['part']:16} {row['norm']:5} ERROR {row['error'][:150]}"
    fused = "" if row["compiled"] is None else f"{row['compiled']:.1e}"
    return (
        f"{row['part']:16} {row['norm']:5} {row['vector_loop']:12.1e} {row['graph_plain']:12.1e} "
        f"{fused:>12} {'yes' if row['recorded'] else 'NO':>7} {row['seconds']:6.1f} "
        f"{row['why'][:90]}"
    )


def run_shards(names: list[str], count: int, compile: str) -> list[dict]:
    """Run the parts in ``count`` processes and collect their rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(count)]
        command = [sys.executable, __file__, "--compile", compile, "--out"]
        shards = [
            subprocess.Popen([*command, str(file), *names[i::count]], stdout=subprocess.DEVNULL)
            for i, file in enumerate(files)
        ]
        for shard in shards:
            shard.wait()
        rows = [r for f in files if f.exists() for r in json.loads(f.read_text())["rows"]]
    return sorted(rows, key=lambda r: names.index(r["part"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument(
        "--compile", default=COMPILE, help="also compile these parts, separated by commas"
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    names = args.names or ["fedavg", *parts]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(
        f"{'part':16} {'norm':5} {'vector-loop':>12} {'graph-plain':>12} {'compiled':>12} "
        f"{'graphs':>7} {'s':>6}"
    )
    if args.shards > 1:
        rows = run_shards(names, args.shards, args.compile)
        print("\n".join(map(line_of, rows)), flush=True)
    else:
        rows = []
        for name in names:
            for norm in ("bn", "gn"):
                fused = norm == "bn" and name in args.compile.split(",")
                rows.append(check(name, norm, fused))
                print(line_of(rows[-1]), flush=True)
                if args.out:  # keep the rows so far if a later part is interrupted
                    Path(args.out).write_text(json.dumps({"rows": rows}))
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    record = {"device": device, "torch": torch.__version__, "rows": rows, "kernels": []}
    if args.out:  # keep the rows if a kernel fails
        Path(args.out).write_text(json.dumps(record, indent=1))
    errors = sum("error" in r for r in rows)
    print(f"\n{device}, torch {torch.__version__}; {len(rows)} rows, {errors} errors", flush=True)
    record["kernels"] = convolutions() if DEVICE == "cuda" else []
    for row in record["kernels"]:
        columns = (f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(columns))
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
