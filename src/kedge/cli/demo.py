"""``kedge demo``: a few methods on scikit-learn's digits, in a minute and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from kedge.cli.progress import Watcher
from kedge.data.datasets import load
from kedge.engines.device import resolve_device
from kedge.files import make_folder, new_file
from kedge.report import figures
from kedge.report import page as page
from kedge.report.partition_picture import plot_partition
from kedge.runs import train
from kedge.runs.build import simulation
from kedge.runs.planning import PLANNING
from kedge.runs.result import Result
from kedge.saved.run import load as load_run
from kedge.settings import Config

METHODS = (
    "fedavg", "scaffold", "fedavgm", "feddyn(alpha=0.1)", "fedtr",
    "fedimpro(cut=stage1, ramp=20)", "scaffold+fedsam",
)  # fmt: skip
ROUNDS, CLIENTS, PARTITION = 40, 20, "dirichlet(0.1)"


#: The method whose model predicts in the end, and the test image that it has not seen.
PREDICTS, SAMPLE = "scaffold", 40


class Prediction(NamedTuple):
    """What the saved model of a run says about a new image."""

    run: Path
    image: Path
    label: int
    predicted: int
    probability: float


class Demo(NamedTuple):
    """Results, paths of the figures and of the report, and a prediction."""

    results: list[Result]
    figures: list[Path]
    prediction: Prediction


def run_demo(out: str | Path) -> Demo:
    """Compare the methods over three seeds, and predict from an image with a saved model."""
    out = Path(out)
    make_folder(out)
    runs = _unused(out / "runs")
    configs = [
        Config(method=m, rounds=ROUNDS, clients=CLIENTS, partition=PARTITION, target=90.0)
        for m in METHODS
    ]
    total = len(METHODS) * ROUNDS * len(configs[0].seeds)
    with Watcher(total, names=METHODS) as watcher:
        options = train.Options(watcher.watch)
        results = train.experiment(
            "compare", train.method_jobs(configs), runs, False, options
        ).results
    dataset = load("digits")
    device = resolve_device("cpu")
    sim = simulation(configs[0], dataset, 0, device, PLANNING)
    partition = sim.federation.partition
    assert partition is not None
    names = ("curves.png", "curves.svg", "partition.png", "partition.svg")
    paths = [out / name for name in names]
    title = f"digits, {CLIENTS} clients, {PARTITION}"
    figures.curves(results, paths[:2], title)
    paths.append(page.report(results, out / "report.html", title))
    for path in paths[2:4]:
        plot_partition(partition, dataset.y_train, path, class_names=dataset.classes)
    return Demo(results, paths, _predict(runs / PREDICTS, out / "sample.png"))


def _predict(folder: Path, image: Path) -> Prediction:
    """Write an image that no client has seen, and predict its class from the file."""
    dataset = load("digits")
    assert dataset.x_test is not None
    assert dataset.y_test is not None
    with new_file(image) as file:
        Image.fromarray(dataset.x_test[SAMPLE, 0]).save(file, "PNG")
    model = load_run(folder).model
    probabilities = model.predict_proba(image)[0]
    predicted = int(model.predict(image)[0])
    label = int(dataset.y_test[SAMPLE])
    return Prediction(folder, image, label, predicted, float(np.max(probabilities)))


def _unused(path: Path) -> Path:
    """The path itself, or the first of path-2, path-3, ... that does not exist."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
