"""Tables of results: what stands beside a number so that it is not misread."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

import kedge
from kedge.history.compare import Row, paired
from kedge.report import tables


def text_of(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_clients_without_the_metric_are_counted() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype("float32")
    y = (x[:, 0] > 0).astype(int)
    healthy = (x[:20], np.zeros(20, int))
    clients = [(x[:30], y[:30]), (x[30:], y[30:]), healthy]
    result = kedge.fit("mlp", clients, rounds=1, metric="auroc", engine="loop")
    found = text_of(tables.results_table([result]))
    assert "1 of 3 clients have no AUROC (samples of one class only)" in found
    result = kedge.fit("mlp", clients, rounds=1, engine="loop")
    assert "left out" not in text_of(tables.results_table([result]))


def test_intervals_of_small_metrics_keep_their_digits() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype("float32")
    clients = [(x[:30], (x[:30, 0] > 0).astype(int)), (x[30:], (x[30:, 0] > 0).astype(int))]
    result = kedge.fit("mlp", clients, rounds=1, metric="auroc", engine="loop")
    assert repr(result) == f"<Result fedavg on own: auroc {result.last.mean:.3f}, 1 rounds, 1 seed>"
    row = Row(result, paired([0.001, 0.003]))
    assert tables.gain_cell(row, 3).text == "+0.002"
    assert tables.interval_cell(row, 3).text == "−0.011 to +0.015"


FAST = {"rounds": 2, "clients": 3, "epochs": 0.2, "engine": "loop"}


def test_a_comparison_prints_as_its_table_and_names_the_best() -> None:
    results = kedge.compare(
        ["fedavg", "scaffold"], pooled=True, validation=0.2, seeds=[0, 1], **FAST
    )
    lines = str(results).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert lines[at].split()[1:3] == ["accuracy", "%"]
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["fedavg", "scaffold", "pooled"]
    first, second = results[:2]
    assert first.validation is not None
    assert second.validation is not None
    best = max(first, second, key=lambda result: result.validation.mean)
    assert results.best is best
    assert lines[-1] == f"{best.name}: chosen on validation data"
    assert str(first.last) in lines[at + 1]


def test_a_sweep_prints_its_settings_and_marks_the_best() -> None:
    results = kedge.sweep("fedprox", {"fedprox.mu": [0.1, 500.0]}, seeds=[0], **FAST)
    lines = str(results).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fedprox.mu"))
    assert [line.split()[0] for line in lines[at : at + 3]] == ["fedprox.mu", "0.1", "500"]
    assert [line.endswith("best (test)") for line in lines[at + 1 : at + 3]] == [
        result is results.best for result in results
    ]


def test_results_without_a_rival_name_no_best() -> None:
    results = kedge.compare(["fedavg"], seeds=[0], **FAST)
    assert "best on the test set" not in str(results)
    assert str(kedge.Results([])) == "no results"
