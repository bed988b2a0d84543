"""Speed as a ratio to a plain eager PyTorch loop, and to pfl where it is installed, in one process.

    PYTHONPATH=src python3 bench/speed.py pfl small10 --engine vector --precision tf32 --out FILE

Warm-up rounds are not timed. Times are medians of several rounds, with the device synchronised.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from functools import partial

import torch
from workloads import WORKLOADS, Workload


def timed(run, warm: int, rounds: int, device: str) -> float:
    """Median seconds of a round."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(warm):
        run()
    times = []
    for _ in range(rounds):
        sync()
        start = time.perf_counter()
        run()
        sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def pfl_round(work: Workload, device: str):
    """pfl 0.6.0's simulated backend on the same data and model, one process; None if not there."""
    try:
        from pfl_rival import make_round
    except ImportError as error:
        print(f"pfl is not installed: {error}")
        return None
    return make_round(work, device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["pfl", "small10"])
    parser.add_argument("--engines", default="vector")
    parser.add_argument("--precisions", default="tf32")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--against", default="eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    rows = []
    for name in args.names:
        work = WORKLOADS[name]
        rivals = {}
        if "eager" in args.against:
            rivals["eager"] = timed(work.eager_round(device), 1, max(2, args.rounds // 2), device)
        if "pfl" in args.against and name == "pfl":
            other = pfl_round(work, device)
            if other:
                rivals["pfl"] = timed(other, 1, 3, device)
        for rival, seconds in rivals.items():
            print(f"{name:10} {rival:24} {1e3 * seconds:9.2f} ms/round", flush=True)
            rows.append({"workload": name, "runner": rival, "seconds": seconds})
        for engine in args.engines.split(","):
            for precision in args.precisions.split(","):
                for method in args.methods.split(","):
                    label = f"kedge {engine} {precision} {method}"
                    try:
                        sim = work.simulation(device, engine, method, precision)
                        run = partial(sim.run_round, check=False)
                        seconds = timed(run, args.warm, args.rounds, device)
                    except Exception as error:  # noqa: BLE001
                        print(
                            f"{name:10} {label:24} ERROR {type(error).__name__}: {str(error)[:160]}"
                        )
                        continue
                    ratios = {rival: s / seconds for rival, s in rivals.items()}
                    rows.append(
                        {"workload": name, "runner": label, "seconds": seconds, "ratios": ratios}
                    )
                    text = "  ".join(f"{r:.1f}x {rival}" for rival, r in ratios.items())
                    steps = work.cohort * work.steps / seconds
                    speed = f"{1e3 * seconds:9.2f} ms/round {steps:9.0f} steps/s"
                    print(f"{name:10} {label:24} {speed}  {text}", flush=True)
                    del sim, run
    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores"
    print(f"{where}, torch {torch.__version__}")
    if args.out:
        record = {
            "device": where, "torch": torch.__version__, "python": platform.python_version(),
            "threads": torch.get_num_threads(), "rows": rows,
        }  # fmt: skip
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
