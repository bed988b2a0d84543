"""The fast paths on the GPU give what the plain ones do, for every part, BatchNorm and GroupNorm.

    PYTHONPATH=src python3 bench/gpu_check.py [--out FILE.json] [--shards N] [NAME ...]

Prints a table, in fp32: the largest relative difference of the whole state after three rounds
between the vectorised engine by CUDA graphs and (a) the loop by graphs, (b) itself compiled, for
those named by ``--compile``; and between the loop by graphs and the loop without. ``--shards``
shares the parts among N processes.
Then the convolutions with a client axis against PyTorch's, relative to the largest value.
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
from kedge.core.part import parts
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.loop import Loop
from kedge.sim.simulation import Simulation

ROUNDS = 3
COMPILE = "fedavg,scaffold,fedimpro,fedtr,flboost,fedcog,fedbr,fedreg"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# channels, filters, kernel, stride, padding
SHAPES = [
    (3, 6, 5, 1, 0),
    (6, 16, 5, 1, 0),
    (3, 32, 3, 1, 0),
    (64, 128, 3, 2, 1),
    (64, 64, 3, 1, 1),
]


def simulate(part, norm: str, how: Execution, capture: bool = True) -> Simulation:
    problem = images(
        norm=norm, task=part.tasks[0] if part else "classification", sizes=(25, 40, 70)
    )
    own = problem.federation
    fed = Federation(
        own.x.float(), own.y, torch.split(own.rows, own.sizes), own.task, dtype=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    sim = Simulation(
        fed, Model(problem.module.float()), part or "fedavg", optim=problem.optim,
        work=problem.work, per_round=2, engine=how,
    )  # fmt: skip
    if not capture:
        sim.engine = Loop(how, capture=False)
    for _ in range(ROUNDS):
        sim.run_round()
    return sim


def check(name: str, norm: str, compile: bool) -> dict:
    """One row of the table."""
    part = None if name == "fedavg" else parts[name](**parts[name].tiny)
    start = time.time()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            vector = simulate(part, norm, Execution("vector")).state()
            loop = simulate(part, norm, Execution("loop")).state()
            plain = simulate(part, norm, Execution("loop"), capture=False).state()
            fused = (
                simulate(part, norm, Execution("vector", compile=True)).state() if compile else None
            )
    except Exception as error:  # noqa: BLE001  (a table of all parts, whatever happens)
        print(traceback.format_exc()[-600:], file=sys.stderr)
        return {"part": name, "norm": norm, "error": f"{type(error).__name__}: {error}"}
    told = [str(w.message) for w in seen if "CUDA graph" in str(w.message) or "compile" in str(w)]
    return {
        "part": name, "norm": norm, "vector_loop": tree.gap(vector, loop),
        "graph_plain": tree.gap(loop, plain),
        "compiled": tree.gap(fused, vector) if fused else None,
        "recorded": not told, "why": told[0][:200] if told else "", "seconds": time.time() - start,
    }  # fmt: skip


def convolutions() -> list[dict]:
    """The kernels against PyTorch's convolutions, in fp32."""
    from kedge.engines import kernels

    rows = []
    for c, o, r, stride, pad in SHAPES:
        x, w = (
            torch.randn(4, 8, c, 16, 16, device=DEVICE),
            torch.randn(4, o, c, r, r, device=DEVICE),
        )
        x.requires_grad_(), w.requires_grad_()
        y = torch.stack([F.conv2d(a, b, None, stride, pad) for a, b in zip(x, w, strict=True)])
        g = torch.randn_like(y)
        y.backward(g)
        xd, wd = x.detach(), w.detach()
        laid, back = (wd.permute(0, 3, 4, *d).contiguous() for d in ((1, 2), (2, 1)))
        found = {
            "forward": (kernels.conv(xd, laid, stride, (pad, pad)), y.detach()),
            "inputs": (kernels.conv_inputs(g, back, (16, 16), stride, (pad, pad)), x.grad),
            "weights": (kernels.conv_weights(g, xd, (r, r), stride, (pad, pad)), w.grad),
        }
        gaps = {k: float((a - b).abs().max() / b.abs().max()) for k, (a, b) in found.items()}
        rows.append({"channels": c, "filters": o, "kernel": r, "stride": stride, "pad": pad} | gaps)
    return rows


def shown(row: dict) -> str:
    if "error" in row:
        return f"{row['part']:16} {row['norm']:5} ERROR {row['error'][:150]}"
    fused = "" if row["compiled"] is None else f"{row['compiled']:.1e}"
    return (
        f"{row['part']:16} {row['norm']:5} {row['vector_loop']:12.1e} {row['graph_plain']:12.1e} "
        f"{fused:>12} {'yes' if row['recorded'] else 'NO':>7} {row['seconds']:6.1f} "
        f"{row['why'][:90]}"
    )


def shared(names: list[str], count: int, compile: str) -> list[dict]:
    """The rows of all parts, from several processes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(count)]
        own = [sys.executable, __file__, "--compile", compile, "--out"]
        runs = [
            subprocess.Popen([*own, str(file), *names[i::count]], stdout=subprocess.DEVNULL)
            for i, file in enumerate(files)
        ]
        for run in runs:
            run.wait()
        rows = [r for f in files if f.exists() for r in json.loads(f.read_text())["rows"]]
    return sorted(rows, key=lambda r: names.index(r["part"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--compile", default=COMPILE, help="parts to be compiled, too")
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
        rows = shared(names, args.shards, args.compile)
        print("\n".join(map(shown, rows)), flush=True)
    else:
        rows = []
        for name in names:
            for norm in ("bn", "gn"):
                fused = norm == "bn" and name in args.compile.split(",")
                rows.append(check(name, norm, fused))
                print(shown(rows[-1]), flush=True)
                if args.out:  # whatever is there so far
                    Path(args.out).write_text(json.dumps({"rows": rows}))
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    record = {"device": device, "torch": torch.__version__, "rows": rows, "kernels": []}
    if args.out:  # whatever happens to the kernels
        Path(args.out).write_text(json.dumps(record, indent=1))
    errors = sum("error" in r for r in rows)
    print(f"\n{device}, torch {torch.__version__}; {len(rows)} rows, {errors} errors", flush=True)
    record["kernels"] = convolutions() if DEVICE == "cuda" else []
    for row in record["kernels"]:
        words = (f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(words))
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
