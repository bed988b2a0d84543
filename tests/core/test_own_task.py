"""A task of one's own is one class: it runs through federation, simulation, fit, files, tables."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import kedge
from kedge.cli.progress import Watcher
from kedge.core.model import Model
from kedge.core.task import Batch, Metric, Task, guess_task, make_task, register_task, tasks
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.errors import DataError, FieldError, IncompatibleError
from kedge.report import figures, tables
from kedge.settings import Config
from kedge.sim.simulation import Simulation


@dataclass(frozen=True)
class Count(Task):
    """Counts: the Poisson loss of a log rate."""

    name = "count"
    metrics = (
        Metric(
            "deviance", lambda sums: float(sums["deviance"] / sums["samples"]), "nats", False, 4
        ),
        Metric("loss", lambda s: float(s["loss"] / s["samples"])),
    )

    @classmethod
    def faults(cls, y: Any) -> Iterator[tuple[Any, str]]:
        yield y < 0, "is negative; counts start at 0"
        yield y != y.round(), "is not a whole number"

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        y = (batch.y if batch.target is None else batch.target).reshape(logits.shape)
        return F.poisson_nll_loss(logits, y, reduction="none").mean(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        y = batch.y.reshape(logits.shape)
        each = 2 * (torch.xlogy(y, y) - y * logits - y + logits.exp()).mean(-1)
        return super().sums(logits, batch, mask) | {"deviance": (each * mask).sum()}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_task(Count)
    yield
    tasks.remove("count")


def samples(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return x, rng.poisson(np.exp(0.8 * x[:, 0])).astype(np.int64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def printed(table: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_simulation_minimises_it_in_both_engines() -> None:
    x, y = samples()
    clients = np.array_split(np.arange(len(x)), 4)
    found = []
    for engine in ("loop", "vector"):
        federation = Federation(x, y, clients, make_task("count", 1), (x, y), dtype=torch.float64)
        assert federation.y.dtype == torch.float64
        model = Model(network().double())
        sim = Simulation(federation, model, "scaffold+mixup", optim=kedge.SGD(0.05), engine=engine)
        before = sim.evaluate()["deviance"]
        for _ in range(8):
            sim.run_round()
        report = sim.evaluate()
        assert list(report) == ["deviance", "loss"]
        assert report["deviance"] < before
        found.append(report["deviance"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_parts_that_need_classes_have_no_meaning_for_it() -> None:
    x, y = samples()
    federation = Federation(x, y, [range(60), range(60, 120)], make_task("count", 1))
    with pytest.raises(IncompatibleError, match="fedlc has no meaning for count"):
        Simulation(federation, Model(network()), "fedlc")


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (3, -1.0, "label -1 in row 3 is negative; counts start at 0"),
        (5, 0.5, "label 0.5 in row 5 is not a whole number"),
        (7, math.nan, "labels hold NaN or infinite values, first in row 7"),
    ],
)
def test_wrong_labels_are_named_with_their_row(row: int, value: float, message: str) -> None:
    x, y = samples()
    y = y.astype(float)
    y[row] = value
    with pytest.raises(DataError, match=message):
        Federation(x, y, [range(120)], make_task("count", 1))
    with pytest.raises(DataError, match="test " + message):
        Federation(x, samples()[1], [range(120)], make_task("count", 1), (x, y))


def test_fit_takes_it_by_name_and_tables_show_its_metric(tmp_path: Path) -> None:
    x, y = samples()
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    seen: list[dict[str, Any]] = []
    result = kedge.fit(
        network(), clients, "fedprox", task="count", rounds=3, lr=0.05, engine="loop",
        watch=lambda seed, record: seen.append(record),
    )  # fmt: skip
    assert (result.metric, result.unit, result.higher_is_better) == ("deviance", "nats", False)
    text = printed(tables.results_table([result, result]))
    assert {"deviance", "nats"} <= set(text.split())
    assert f"{result.last.mean:.4f}" in text
    figures.curves([result], [tmp_path / "c.svg"])
    assert "deviance on the test set in nats" in (tmp_path / "c.svg").read_text()
    watcher = Watcher(3, console=Console(width=200, record=True, file=io.StringIO()))
    watcher.show(Config(rounds=3), 0, seen[-1])
    assert f"deviance {seen[-1]['deviance']:.4f} nats  loss" in watcher.console.export_text()
    assert seen[-1]["per_class"] == []
    with pytest.raises(FieldError, match="task = 'ordinal' is not one of: classification, count"):
        kedge.fit(network(), clients, task="ordinal")


def test_files_and_named_runs_take_it(tmp_path: Path) -> None:
    x, y = samples()
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    lines = [",".join(map(str, [*row, int(n)])) for row, n in zip(x, y, strict=True)]
    (tmp_path / "b.csv").write_text("\n".join(["u,v,w,n", *lines]))
    for text in (f"{tmp_path}/a.npz(task=count)", f"{tmp_path}/b.csv(label=n, task=count)"):
        dataset = load(text)
        assert dataset.task == "count"
        assert dataset.y_train.shape == (120, 1)
        assert "1 target" in dataset.describe()
        result = kedge.run(
            "fedavg", data=text, rounds=2, seeds=(0,), clients=4, lr=0.01, engine="loop"
        )
        assert result.measure.label == "deviance nats"
    (tmp_path / "b.csv").write_text("\n".join(["u,v,w,n", *lines, "1,1,1,-2"]))
    with pytest.raises(DataError, match="line 122, column 'n': '-2' is negative"):
        load(f"{tmp_path}/b.csv(label=n, task=count)")
    np.savez(tmp_path / "a.npz", x_train=x, y_train=-y)
    with pytest.raises(DataError, match=r"y_train, row \d+: label -\d.* is negative"):
        load(f"{tmp_path}/a.npz(task=count)")


def test_guessing_goes_by_the_order_that_tasks_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = np.array([0, 1, 2]), np.array([[0, 1], [1, 1]])
    assert [guess_task(y) for y in (whole, rows, whole / 2)] == [
        "classification", "multilabel", "regression",
    ]  # fmt: skip
    monkeypatch.setattr(Count, "suits", classmethod(lambda cls, y: y.ndim == 1))
    assert [guess_task(y) for y in (whole, rows)] == ["count", "multilabel"]
    monkeypatch.setattr(Count, "auto_order", 2.5)
    assert [guess_task(y) for y in (whole, whole / 2)] == ["classification", "count"]


def test_a_task_of_ones_own_is_asked_before_the_built_in_ones() -> None:
    class Zero(Count):
        name = "zero"

        @classmethod
        def suits(cls, y: Any) -> bool:
            return True

    register_task(Zero)
    try:
        assert guess_task(np.array([[0, 1], [1, 1]])) == "zero"
    finally:
        tasks.remove("zero")


def test_a_task_needs_a_name_and_a_metric() -> None:
    @dataclass(frozen=True)
    class Nothing(Task):
        name = "nothing"

    with pytest.raises(FieldError, match="Nothing needs a name and at least one metric"):
        register_task(Nothing)


def test_how_a_metric_is_written() -> None:
    metric = make_task("classification", 3).headline
    assert (metric.label, metric.write(97.5), metric.higher_is_better) == (
        "accuracy %", "97.50 %", True,
    )  # fmt: skip
    assert make_task("regression", 1).headline.write(0.5) == "0.50"
