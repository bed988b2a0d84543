"""Seconds and megabytes a round on real Flower processes: kedge beside Flower's PyTorch template.

    python bench/flower_rounds.py --runs 5 --rounds 8 --out bench/results/flower_rounds.json
    python bench/flower_rounds.py --runs 2 --rounds 5 --hidden 3300,3300      # a model of 45 MB

Needs the extra ``flower``. Three entrants take turns, each on a federation of its own on loopback,
with the same options of SuperLink and SuperNodes, TLS and node keys:

=============  ====================================================================================
``template``   ``bench/flower_template``: ``FedAvg.start``, a ClientApp with train and evaluate, the
               state dict as an ArrayRecord. It has the structure of Flower's PyTorch quickstart.
``clientapp``  ``kedge flower up --no-resident``: the member lives in the client process
``resident``   ``kedge flower up``: the client process carries bytes to a resident node
=============  ====================================================================================

All train FedAvg on the same model and the same files, all nodes in every round, with as many local
steps of SGD, and test the model on every node after every round. The template needs two messages
per node and round for that. With kedge the test rides along with the next round's request; the test
after the last round is a message of its own, which only the time of the whole run contains.

The time of a round is from the end of one to the end of the next. The first round of a run, which
also waits for nodes, is left out for all. Bytes are those of the objects that Flower stores and
forwards for messages, without HTTP, TLS and polling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kedge.federation.coordinator.rules import Rules
from kedge.local import federation as local
from kedge.local import runs as submit
from kedge.local.federation import CONNECTION, FederationSpec
from kedge.settings import Config

DATA, PARTITION = "digits", "iid"
TEMPLATE = Path(__file__).parent / "flower_template"
ENTRANTS = ("template", "clientapp", "resident")
RIVAL = "template"
POLL_S = 0.05
LIMIT_S = 1800.0  # of one run
RULES = Rules(minimum=1.0, deadline_s=600.0, attempts=1, join_s=120.0)


class Federations:
    """A federation per kind of member; one runs at a time."""

    def __init__(self, base: Path, nodes: int) -> None:
        self.base, self.nodes = base, nodes
        self.specs: dict[str, FederationSpec] = {}

    def up(self, entrant: str) -> Path:
        resident = entrant == "resident"
        folder = self.base / ("r" if resident else "c")
        if folder.name not in self.specs:
            self.specs[folder.name] = local.create(
                folder, DATA, PARTITION, self.nodes, resident=resident
            )
        spec = local.up(folder, self.specs[folder.name], owner=os.getpid())
        self.specs[folder.name] = spec
        return folder


# -- one run --------------------------------------------------------------------------------------


def run_template(folder: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of Flower's template: times of rounds, bytes, accuracies."""
    spec = FederationSpec.load(folder)
    app = folder / "template"
    if not app.exists():
        shutil.copytree(TEMPLATE, app, ignore=shutil.ignore_patterns("__pycache__"))
    [mean], [std] = spec.scaling
    values = {
        "num-server-rounds": args.rounds, "local-steps": args.steps, "batch-size": args.batch,
        "lr": args.lr, "hidden": args.hidden, "min-nodes": args.nodes, "mean": mean, "std": std,
        "out": str(out),
    }  # fmt: skip
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    start = time.time()
    submit.call(folder, "run", str(app), CONNECTION, "--run-config", words)
    result = out / "template.json"
    while not _is_over(folder, result, start):
        time.sleep(POLL_S)
    whole = time.time() - start
    found = json.loads(result.read_text())
    if found["failures"]:
        raise RuntimeError(f"{found['failures']} messages of the template failed")
    return {
        "seconds": _gaps(found["ends"]), "whole_s": round(whole, 2),
        "mb": sum(found["bytes"].values()) / 1e6, "accuracy": found["accuracy"],
    }  # fmt: skip


def _is_over(folder: Path, result: Path, start: float) -> bool:
    if result.exists() and result.read_bytes().endswith(b"}"):
        return True
    seconds = time.time() - start
    if seconds > LIMIT_S:
        raise RuntimeError("the template does not end; see the log of the SuperLink")
    if int(seconds / POLL_S) % int(30 / POLL_S) == 0:  # not often: it starts a process
        status = str(submit.runs(folder)[0].get("status"))
        if status.startswith("finished") and not result.exists():
            raise RuntimeError(f"the template ended: {status}; see {folder / 'logs'}")
    return False


def run_kedge(folder: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of kedge: the same."""
    config = Config(
        method="fedavg", data=DATA, partition=PARTITION, clients=args.nodes, rounds=args.rounds,
        steps=args.steps, batch=args.batch, lr=args.lr, model=f"mlp(hidden=[{args.hidden}])",
        seeds=(0,), engine="loop", device="cpu", threads=1,
    )  # fmt: skip
    start, ends = time.time(), list[float]()
    run = submit.submit(folder, config, out, rules=RULES)
    for entry in submit.entries(folder, run, ""):
        line = str(entry.get("line", ""))
        if "agree on the terms" in line or submit.ROUND.match(line):
            ends.append(time.time())
        if entry.get("end") not in (None, "complete"):
            raise RuntimeError(f"kedge: {entry}")
    whole = time.time() - start
    text = (out / "seed-0" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    mb = statistics.median(r["wire_mb_up"] + r["wire_mb_down"] for r in records[1:])
    return {
        "seconds": _gaps(ends), "whole_s": round(whole, 2),
        "mb": mb + 2 * args.nodes * envelope() / 1e6,
        "accuracy": [record["accuracy"] for record in records],
    }  # fmt: skip


def _gaps(ends: Sequence[float]) -> list[float]:
    return [round(b - a, 3) for a, b in itertools.pairwise(ends)]


def envelope() -> int:
    """Bytes that Flower's objects add to a message of kedge."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.task_identity import TaskIdentity

    from kedge.flower.arrays import wrap

    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    content = os.urandom(100_000)
    objects = get_all_nested_objects(Message(wrap([content]), 7, "train"))
    return sum(len(one.deflate()) for one in objects.values()) - len(content)


# -- all runs -------------------------------------------------------------------------------------


def row(entrant: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All times of an entrant, and their medians."""
    return {
        "entrant": entrant,
        "seconds": statistics.median(s for run in runs for s in run["seconds"][1:]),
        "of_runs": [statistics.median(run["seconds"][1:]) for run in runs],
        "whole_s": statistics.median(run["whole_s"] for run in runs),
        "mb": round(statistics.median(run["mb"] for run in runs), 4),
        "first_accuracy": statistics.median(run["accuracy"][0] for run in runs),
        "last_accuracy": statistics.median(run["accuracy"][-1] for run in runs),
        "runs": list(runs),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    rival = next((r for r in rows if r["entrant"] == RIVAL), None)
    lines = ["entrant     s a round   ratio  whole run s   ratio  MB a round   ratio  accuracy"]
    for r in rows:
        ratio = [r[key] / rival[key] if rival else 1.0 for key in ("seconds", "whole_s", "mb")]
        lines.append(
            f"{r['entrant']:<10} {r['seconds']:10.2f} {ratio[0]:6.2f}x {r['whole_s']:12.1f} "
            f"{ratio[1]:6.2f}x {r['mb']:11.3f} {ratio[2]:6.2f}x  "
            f"{r['first_accuracy']:.1f} -> {r['last_accuracy']:.1f}"
        )
    return "\n".join(lines)


def record(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("kedge", "flwr", "torch")}
        | {"python": platform.python_version()},
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "data": f"{DATA}, {PARTITION}",
        "rows": list(rows),
    }


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def check_training(rows: Sequence[dict[str, Any]]) -> None:
    """All must have learned: a benchmark of programs that do nothing says nothing."""
    for r in rows:
        if not r["last_accuracy"] > r["first_accuracy"]:
            raise SystemExit(f"{r['entrant']} did not learn: {r['runs']}")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each entrant, in turn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="local steps of a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--hidden", default="64", help="sizes of the hidden layers: 64 or 128,64")
    parser.add_argument("--entrants", default=",".join(ENTRANTS))
    parser.add_argument("--out", help="JSON file for the record")
    return parser.parse_args(words)


def compile_all() -> None:
    """Let Python keep compiled files, as those of an installed package are: without them every
    process would compile kedge's source again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(Path(local.__file__).parents[1])],
        check=False,
    )


def main() -> None:
    args = parse()
    compile_all()
    submit.POLL_S = POLL_S
    base = Path(tempfile.mkdtemp(prefix="kedge-rounds-"))
    federations, entrants = Federations(base, args.nodes), args.entrants.split(",")
    runs: dict[str, list[dict[str, Any]]] = {entrant: [] for entrant in entrants}
    for turn in range(args.runs):
        for entrant in entrants:
            folder, out = federations.up(entrant), base / f"{entrant}-{turn}"
            try:
                load = os.getloadavg()[0]
                if entrant == "template":
                    out.mkdir()
                    found = run_template(folder, out, args)
                else:
                    found = run_kedge(folder, out, args)
            finally:
                local.down(folder)
            runs[entrant].append(found | {"load": round(load, 2)})
            middle = statistics.median(found["seconds"][1:])
            print(
                f"turn {turn + 1}, {entrant}: {middle:.2f} s a round, load {load:.1f}", flush=True
            )
            shutil.rmtree(out, ignore_errors=True)
    rows = [row(entrant, runs[entrant]) for entrant in entrants]
    print(table(rows))
    if args.out:
        Path(args.out).write_text(json.dumps(record(args, rows), indent=1) + "\n")
    check_training(rows)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
