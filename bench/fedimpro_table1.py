"""Run methods at the setting of FedImpro's Table 1, CIFAR-10 (alpha 0.1, one epoch, 10 clients).

    PYTHONPATH=src python3 bench/fedimpro_table1.py run fedimpro --out FOLDER [--rounds 1000]
    PYTHONPATH=src python3 bench/fedimpro_table1.py gather FILE.json [NAME=]FOLDER ...

with ``cifar10.npz`` in the folder ``$KEDGE_DATA``. ``run`` trains one method with all its settings
written out, so that a changed default does not matter. All methods have the same partition, cohorts
and first weights. The clients train on the engine loop, on a GPU compiled and in four streams. A
run that is stopped can be continued by the same command. ``gather`` writes the curves of finished
or stopped runs to one file, where other runs that it holds already stay, and prints for each the
best accuracy and means over tested rounds.
The record of an H200 is ``docs/results/fedimpro_table1_h200.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kedge.engines import Execution
from kedge.engines.device import resolve_device
from kedge.runs import rounds, runner
from kedge.runs.config import Config
from kedge.runs.folder import Folder
from kedge.runs.reading import load_config

METHODS = {
    "fedavg": "fedavg",
    "fedimpro": "fedimpro(cut=stage2, weight=1.0, ramp=500, cap=true, mix=sum, labels=balanced, "
    "draws_from=local, stat_axes=element, spread=std, s_max=0.1, beta_m=0.0, beta_g=0.0, "
    "noise=0.0, count_weighted=false)",
    "scaffold": "scaffold(eta_g=1.0)",
    "fedprox": "fedprox(mu=0.1)",
    "fednova": "fednova",
    # the paper does not give alpha
    "feddyn": "feddyn(alpha=0.1, by_share=false)",
}
PAPER = {  # Table 1: best test accuracy of 1000 rounds, mean and deviation of three seeds
    "fedavg": [83.65, 2.03],
    "fedprox": [83.22, 1.52],
    "scaffold": [82.33, 1.13],
    "fednova": [84.97, 0.87],
    "feddyn": [84.73, 0.81],
    "fedimpro": [88.45, 0.43],
}
HUNDREDS = range(1, 1000, 100)
SAVE_SHARE = 0.01  # of the time, spent on checkpoints


def config_of(args: argparse.Namespace) -> Config:
    """The paper's setting."""
    return load_config(
        flags={
            "method": METHODS[args.method], "data": "cifar10",
            "partition": "class_dirichlet_capped(0.1)", "clients": 10, "per_round": 5,
            "augment": "crop(4)+flip", "model": "resnet18(norm=bn, stem=cifar)",
            "batchnorm": "average", "weighting": "size", "rounds": args.rounds, "epochs": 1.0,
            "batch": 128, "optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 1e-4,
            "precision": "bf16", "eval_every": args.eval_every, "seeds": [args.seed],
            "device": args.device,
        }
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    config, device = config_of(args), resolve_device(args.device)
    fast = device.type == "cuda" and not args.eager
    if not (Path(args.out) / "config.toml").exists():
        folder = Folder.create(args.out, config)
        how = Execution("loop", streams=4 if fast else 0, compile=fast)
        folder.save_environment(how, device, config.precision)
        folder.write("date.txt", time.strftime("%Y-%m-%d").encode())
    rounds.MAX_SAVE_SHARE = SAVE_SHARE
    runner.run(config, args.out, resume=True, watch=show)


def show(seed: int, record: dict[str, Any]) -> None:
    if "accuracy" in record:
        words = (f"{k} {record[k]:.4g}" for k in ("round", "train_loss", "accuracy", "seconds"))
        print(*words, flush=True)


def gather(args: argparse.Namespace) -> None:
    alone = dict(word.split("=") for word in args.alone)
    file = Path(args.file)
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    gathered = []
    for text in args.folders:
        given, _, location = text.rpartition("=")
        path = Path(location)
        config = load_config(path / "config.toml")
        seed = config.seeds[0]
        method, folder = config.method.split("(")[0], path / f"seed-{seed}"
        name = given or (f"{method}, seed {seed}" if seed else method)
        gathered.append(name)
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        elapsed, curve = 0.0, []
        for r in records:
            elapsed += r["seconds"]
            if "accuracy" in r:
                curve.append([r["round"], round(r["accuracy"], 2), round(elapsed, 1)])
        runs[name] = {
            "command": f"python3 bench/fedimpro_table1.py run {method} --out FOLDER "
            f"--rounds {config.rounds} --seed {seed}",
            "settings": dataclasses.asdict(config),
            "date": (path / "date.txt").read_text(),
            "environment": json.loads((path / "environment.json").read_text()),
            "partition_hash": json.loads((folder / "partition.json").read_text())["hash"],
            "seed": seed,
            "rounds_done": records[-1]["round"],
            "first_train_losses": [round(r["train_loss"], 4) for r in records[:3]],
            "median_seconds": round(statistics.median(r["seconds"] for r in records), 3),
            "summary": summary(curve),
            "paper_best": PAPER[method],
            "curve": curve,
        }
        if name in alone:
            first, last = map(int, alone[name].split("-"))
            seconds = statistics.median(r["seconds"] for r in records[first - 1 : last])
            runs[name] |= {"alone": [first, last], "median_seconds_alone": round(seconds, 3)}
    bases = {run["seed"]: run for run in runs.values() if run["settings"]["method"] == "fedavg"}
    for run in runs.values():
        base = dict(row[:2] for row in bases.get(run["seed"], {}).get("curve", []))
        pairs = [(row[1], base[row[0]]) for row in run["curve"] if row[0] in base]
        if run["settings"]["method"] != "fedavg" and pairs:
            run["tests_ahead_of_fedavg"] = [sum(x > y for x, y in pairs), len(pairs)]
    for name in gathered:
        print(name, json.dumps(runs[name]["summary"]))
        print("  tests ahead of fedavg:", runs[name].get("tests_ahead_of_fedavg"))
    columns = ["round", "test accuracy in percent", "seconds of training and tests so far"]
    seeds = sorted({run["seed"] for run in runs.values()})
    text = json.dumps({"seeds": seeds, "columns_of_curve": columns, "runs": runs}, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    file.write_text(text + "\n")


def summary(curve: list[list[float]]) -> dict[str, Any]:
    """The best tested round, the mean of the last five, and means over stretches of rounds."""
    best = max(curve, key=lambda row: row[1])
    means = {}
    for first, last in ((100, 300), (310, 600), (510, 1000), *((i, i + 99) for i in HUNDREDS)):
        tested = [accuracy for r, accuracy, _ in curve if first <= r <= last]
        if tested and last <= curve[-1][0]:  # no mean of a part of a stretch
            means[f"{first}-{last}"] = round(statistics.mean(tested), 2)
    last_five = round(statistics.mean(row[1] for row in curve[-5:]), 2)
    return {"best": best[1], "best_round": best[0], "mean_of_last_5": last_five, "means": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("method", choices=METHODS)
    one.add_argument("--out", required=True, help="the folder of the run")
    one.add_argument("--rounds", type=int, default=1000)
    one.add_argument("--eval-every", type=int, default=10)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--eager", action="store_true", help="neither compiled nor in streams")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.set_defaults(action=run)
    several = commands.add_parser("gather")
    several.add_argument("file")
    several.add_argument(
        "folders", nargs="+", metavar="[NAME=]FOLDER",
        help="runs; they are called by their method (and seed) where no name is given",
    )  # fmt: skip
    several.add_argument(
        "--alone", action="append", default=[], metavar="NAME=FIRST-LAST",
        help="rounds of a run in which nothing else ran on the GPU, to time them",
    )  # fmt: skip
    several.set_defaults(action=gather)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
