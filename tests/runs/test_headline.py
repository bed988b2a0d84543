"""The right number in front: personal models, imbalanced classes, the chosen metric."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import kedge
from kedge.cli.progress import Watcher, in_words
from kedge.core.method import parse
from kedge.core.tree import take
from kedge.data.datasets import Dataset, load
from kedge.engines import Execution
from kedge.history.compare import gain_over
from kedge.report import figures, tables
from kedge.runs.build import simulation, split_of, task_of, with_personal
from kedge.runs.measure import measure
from kedge.settings import Config

PERSONAL = [
    "fedper", "fedrep", "ditto", "fedbn", "local", "finetune", "fedtr(personal_head=True)",
    "fedavg+finetune", "scaffold+ditto",
]  # fmt: skip


def printed(table: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def imbalanced(tmp_path: Path, share: float = 0.12) -> str:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    z = x[:, 0] + rng.normal(size=400)
    np.savez(tmp_path / "rare.npz", x_train=x, y_train=(z > np.quantile(z, 1 - share)).astype(int))
    return str(tmp_path / "rare.npz")


def test_parts_say_that_their_product_is_personal() -> None:
    assert all(parse(method).personal_model for method in PERSONAL)
    for method in ("fedavg", "fedtr", "scaffold+fedprox", "moon"):
        assert not parse(method).personal_model


def test_one_personal_method_makes_all_of_a_comparison_hold_out() -> None:
    configs = [Config(method=m) for m in ("fedavg", "fedper")]
    assert [c.personal for c in with_personal(configs)] == [True, True]
    assert with_personal(configs[:1]) == configs[:1]
    digits = load("digits")
    assert split_of(with_personal(configs)[0], digits) == "holdout(0.2)"
    assert split_of(configs[0], digits) == "auto"
    assert split_of(Config(method="fedper", personal=True, split="given"), digits) == "given"
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    own_tests = Dataset(
        "silos", x, y, np.zeros(2), np.ones(2), "classification", 2, x_test=x, y_test=y,
        groups=np.array([0, 0, 1, 1]), groups_test=np.array([0, 0, 1, 1]), group_names=("a", "b"),
    )  # fmt: skip
    assert split_of(with_personal(configs)[0], own_tests) == "auto"


def test_a_personal_method_is_judged_by_its_clients_models() -> None:
    config = Config(method="fedper", clients=4, rounds=2, personal=True)
    cpu = torch.device("cpu")
    sim = simulation(config, load("digits"), 0, cpu, Execution("loop"))
    for _ in range(2):
        sim.run_round()
    record, fed, stacked = measure(sim, config, final=True), sim.federation, sim.personal()
    by_hand = []
    for k in range(4):
        batch = fed.clean(fed.held_out[k])
        predicted = sim.bound.model.module(take(stacked, k))(batch.x).argmax(1)
        by_hand.append(100 * float((predicted == batch.y).double().mean()))
    assert record["per_personal"] == pytest.approx(by_hand)
    assert record["personal_mean"] == pytest.approx(np.mean(by_hand))
    assert record["personal_worst"] == pytest.approx(min(by_hand))
    assert record["personal_spread"] == pytest.approx(np.std(by_hand))


def test_a_comparison_is_like_with_like(tmp_path: Path) -> None:
    results = kedge.compare(
        ["fedavg", "fedper"], clients=5, rounds=3, seeds=[0, 1], engine="vector", out=tmp_path
    )
    avg, per = results
    assert (avg.headline, per.headline) == ("client", "personal")
    ends = [run[-1] for run in per.records]
    assert per.last.values == tuple(end["personal_mean"] for end in ends)
    assert avg.last.values == tuple(run[-1]["client_mean"] for run in avg.records)
    assert per.last.mean > per.global_last.mean + 20
    gain = gain_over(per, avg)
    assert gain is not None
    assert gain.mean == pytest.approx(per.last.mean - avg.last.mean)
    text = printed(tables.results_table(results))
    assert "of clients" in text
    assert "global" in text
    row = next(line for line in text.splitlines() if line.startswith("fedper"))
    assert row.split()[1:3] == [per.written(per.last), "2"]
    assert f" {per.global_last.mean:.2f} " in row
    stored = json.loads((tmp_path / "fedper" / "result.json").read_text())
    assert stored["headline"] == "personal"
    assert stored["last"]["mean"] == pytest.approx(per.last.mean)
    assert stored["global_last"]["mean"] == pytest.approx(per.global_last.mean)
    figures.curves(results, [tmp_path / "c.svg"])
    figures.curves(results[:1] * 6, [tmp_path / "many.svg"])  # the legend is beside the axes
    widths = [
        float(re.findall(r'width="([\d.]+)pt"', (tmp_path / name).read_text())[0])
        for name in ("c.svg", "many.svg")
    ]
    assert widths[1] > widths[0] + 100
    assert "held-out samples, mean over clients" in (tmp_path / "c.svg").read_text()


def test_the_progress_line_has_the_personal_number_first() -> None:
    record = {"round": 1, "train_loss": 1.0, "loss": 2.0, "accuracy": 49.0, "personal_mean": 90.0}
    record |= {"client_mean": 50.0}
    assert in_words(Config(method="fedper"), record) == ["accuracy 90.00 %", "global 49.00 %"]
    assert in_words(Config(method="fedavg"), record) == ["accuracy 49.00 %", "clients 50.00 %"]
    watcher = Watcher(1, console=Console(width=200, record=True, file=io.StringIO()))
    watcher.show(Config(method="fedper", rounds=1), 0, record)
    assert "accuracy 90.00 %  global 49.00 %" in watcher.console.export_text()


def test_accuracy_does_not_stand_alone_where_classes_are_imbalanced(tmp_path: Path) -> None:
    data, seen = imbalanced(tmp_path), list[Any]()
    result = kedge.run(
        "fedavg", data=data, clients=4, rounds=3, seeds=[0], engine="loop",
        watch=lambda seed, record: seen.append(record),
    )  # fmt: skip
    assert seen[-1]["imbalanced"] == pytest.approx(0.88, abs=0.01)
    assert "auroc" in seen[-1]
    assert "auroc" not in seen[0]
    assert list(result.beside()) == ["balanced_accuracy", "auroc"]
    for width in (60, 80, 120):
        text = printed(tables.results_table([result]), width)
        assert "AUROC" in text
        assert f"{seen[-1]['balanced_accuracy']:.2f}" in text
        assert f"{seen[-1]['auroc']:.3f}" in text
        assert f"The largest class has {100 * seen[-1]['imbalanced']:.0f} %" in text
    assert any("balanced accuracy" in word for word in in_words(result.config, seen[0]))
    personal = kedge.run("ditto", data=data, clients=4, rounds=1, seeds=[0], engine="loop")
    assert personal.beside()["auroc"].mean == personal.records[0][-1]["personal_auroc"]
    balanced = kedge.run("fedavg", clients=4, rounds=1, seeds=[0], engine="loop")
    assert balanced.beside() == {}


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_metric_by_name_is_the_headline(engine: str, tmp_path: Path) -> None:
    data = imbalanced(tmp_path)
    result = kedge.run(
        "fedavg", data=data, clients=4, rounds=3, seeds=[0, 1], engine=engine, metric="auroc",
        split="holdout(0.3)",
    )  # fmt: skip
    assert (result.metric, result.higher_is_better, result.unit) == ("auroc", True, "")
    assert result.array().shape == (2, 3)
    assert "AUROC" in printed(tables.results_table([result]))
    middle = float(np.median(result.array()))
    reached = [np.flatnonzero(row >= middle) for row in result.array()]
    first = [int(rounds[0]) + 1 if len(rounds) else None for rounds in reached]
    assert result.rounds_to(middle) == first
    assert len(result.records[0][-1]["per_client"]) == 4
    assert in_words(result.config, result.records[0][-1])[0].startswith("AUROC 0.")


def test_metrics_from_histograms_come_with_the_bound_of_their_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = kedge.run(
        "fedavg", clients=4, rounds=1, seeds=[0], engine="loop", metric="auroc", out=out
    )
    last = result.records[0][-1]
    exact = json.loads((out / "seed-0/scores.json").read_text())["global"]
    for name in ("auroc", "average_precision"):
        assert 0 < abs(last[name] - exact[name]) <= last[f"{name}_bound"] < 0.05
    bound = float(re.findall(r"at most ([\d.]+) off", printed(tables.results_table([result])))[0])
    assert last["auroc_bound"] <= bound < 2.01 * last["auroc_bound"]
    assert "bins of scores" not in printed(
        tables.results_table([kedge.run(clients=4, rounds=1, seeds=[0])])
    )


def test_balanced_class_weights_come_from_the_training_rows_of_all_clients(tmp_path: Path) -> None:
    config = Config(data=imbalanced(tmp_path), clients=4, class_weights="balanced")
    sim = simulation(config, load(config.data), 0, torch.device("cpu"), Execution("loop"))
    y = sim.federation.y[sim.federation.rows]
    counts = torch.bincount(y)
    zeros = torch.zeros(2, 2)
    batch = sim.federation.clean(sim.federation.rows[:2])._replace(y=torch.tensor([0, 1]))
    expected = len(y) / (2 * counts) * np.log(2)
    torch.testing.assert_close(sim.task.loss(zeros, batch), expected.float())
    assert task_of(Config(), sim.federation) == sim.task
