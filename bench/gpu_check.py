"""loop = vector on the GPU for every part, BatchNorm and GroupNorm, fp32, captured and not.

    PYTHONPATH=src python3 bench/gpu_check.py [--out FILE.json] [NAME ...]

Prints a table: the largest relative difference of the whole state after three rounds between the
vectorised engine by CUDA graphs and (a) the loop by graphs, (b) the loop without graphs.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

import torch

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.part import parts
from kedge.sim.federation import Federation
from kedge.sim.loop import Loop
from kedge.sim.simulation import Simulation
from kedge.sim.vector import Vector

ROUNDS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def simulate(part, norm: str, engine) -> Simulation:
    problem = images(
        norm=norm, task=part.tasks[0] if part else "classification", sizes=(25, 40, 70)
    )
    own = problem.federation
    fed = Federation(
        own.x.float(), own.y, torch.split(own.rows, own.sizes), own.task, dtype=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    model = Model(problem.module.float())
    sim = Simulation(
        fed, model, part or "fedavg", optim=problem.optim, work=problem.work, per_round=2
    )
    sim.engine = engine
    for _ in range(ROUNDS):
        sim.run_round()
    return sim


def main() -> None:
    args = sys.argv[1:]
    out = args[args.index("--out") + 1] if "--out" in args else None
    names = [a for a in args if not a.startswith("--") and a != out] or ["fedavg", *parts]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows, failed = [], []
    print(f"{'part':16} {'norm':5} {'vector-loop':>12} {'graph-plain':>12} {'graphs':>7} {'s':>6}")
    for name in names:
        for norm in ("bn", "gn"):
            part = None if name == "fedavg" else parts[name](**parts[name].tiny)
            start = time.time()
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    vector = simulate(part, norm, Vector()).state()
                    loop = simulate(part, norm, Loop()).state()
                    plain = simulate(part, norm, Loop(capture=False)).state()
                recorded = not any("CUDA graph" in str(w.message) for w in seen)
                why = next(
                    (str(w.message)[:200] for w in seen if "CUDA graph" in str(w.message)), ""
                )
                row = {
                    "part": name, "norm": norm, "vector_loop": tree.gap(vector, loop),
                    "graph_plain": tree.gap(loop, plain), "recorded": recorded, "why": why,
                    "seconds": time.time() - start,
                }  # fmt: skip
            except Exception as error:  # noqa: BLE001  (a table of all parts, whatever happens)
                row = {"part": name, "norm": norm, "error": f"{type(error).__name__}: {error}"}
                failed.append(traceback.format_exc()[-600:])
            rows.append(row)
            if "error" in row:
                print(f"{name:16} {norm:5} ERROR {row['error'][:150]}")
            else:
                print(
                    f"{name:16} {norm:5} {row['vector_loop']:12.1e} {row['graph_plain']:12.1e} "
                    f"{'yes' if row['recorded'] else 'NO':>7} {row['seconds']:6.1f} "
                    f"{row['why'][:90]}"
                )
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(f"\n{device}, torch {torch.__version__}; {len(failed)} errors")
    if failed:
        print(failed[0])
    if out:
        with open(out, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
