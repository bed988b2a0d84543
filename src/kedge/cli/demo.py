"""``kedge demo``: a few methods on scikit-learn's digits, in a minute and without a network."""

from __future__ import annotations

from pathlib import Path

from kedge.data.datasets import load
from kedge.engines.device import resolve_device
from kedge.report import figures
from kedge.report.progress import Watcher
from kedge.runs import runner
from kedge.runs.config import Config
from kedge.runs.result import Result

METHODS = (
    "fedavg", "scaffold", "fedavgm", "feddyn(alpha=0.1)", "fedtr",
    "fedimpro(cut=stage1, ramp=20)", "scaffold+fedsam",
)  # fmt: skip
ROUNDS, CLIENTS, PARTITION = 40, 20, "dirichlet(0.1)"


def run_demo(out: str | Path) -> tuple[list[Result], list[Path]]:
    """Compare the methods over three seeds. Returns the results and the paths of the figures."""
    out = Path(out)
    configs = [
        Config(method=m, rounds=ROUNDS, clients=CLIENTS, partition=PARTITION, target=90.0)
        for m in METHODS
    ]
    total = len(METHODS) * ROUNDS * len(configs[0].seeds)
    with Watcher(total, names=METHODS) as watcher:
        by_name = dict(zip(METHODS, configs, strict=True))
        results = runner.compare(
            METHODS, configs, watch=lambda m, seed, r: watcher.show(by_name[m], seed, r)
        )
    dataset = load("digits")
    device = resolve_device("cpu")
    sim = runner.simulation(configs[0], dataset, 0, device, runner.PLANNING)
    partition = sim.federation.partition
    assert partition is not None
    names = ("curves.png", "curves.svg", "partition.png", "partition.svg")
    paths = [out / name for name in names]
    out.mkdir(parents=True, exist_ok=True)
    title = f"digits, {CLIENTS} clients, {PARTITION}"
    figures.curves(results, paths[:2], title)
    for path in paths[2:]:
        partition.plot(dataset.y_train, path, class_names=dataset.classes)
    return results, paths
