"""A loss that explodes without being NaN is noticed; healthy runs are left alone."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import kedge
import kedge.runs.train as train
from kedge.errors import NotFinite
from kedge.report import tables
from kedge.runs.divergence import message
from kedge.runs.grid import combine
from kedge.runs.validation import leader


def explode(method: str = "fedavg", **settings: Any) -> kedge.Result:
    with pytest.warns(UserWarning, match="more than 100 times what it is without training. Lower"):
        return kedge.run(
            method, clients=4, rounds=3, seeds=[0], engine="loop", lr=1e5, clip=10, **settings
        )


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_an_exploded_loss_is_reported_with_what_to_type(method: str) -> None:
    result = explode(method)
    last = result.records[0][-1]
    assert last["train_loss"] > 100 * last["diverged"]
    assert last["diverged"] == pytest.approx(np.log(10), rel=0.2)
    assert result.diverged
    assert f"{method} has diverged: the loss is" in message(result)
    assert "--lr 0.1 (now 100000)" in message(result)
    assert result.to_dict()["diverged"]


def test_the_row_is_marked_and_is_never_the_best() -> None:
    bad = explode()
    good = kedge.run("fedavg", clients=4, rounds=3, seeds=[0], engine="loop")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables.results_table([bad, good]))
    row = next(line for line in console.export_text().splitlines() if "diverged" in line)
    assert bad.written(bad.last) in row
    assert leader([bad, good]) is good
    assert message(good) == ""


def test_a_sweep_marks_the_setting() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = combine({"lr": [0.1, 1e5]}, flags={
            "clip": 10.0, "rounds": 3, "seeds": (0,), "clients": 4, "engine": "vector",
        })  # fmt: skip
        done = train.experiment("sweep", train.setting_jobs(settings))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables.results_table(done.results))
    rows = console.export_text().splitlines()
    assert "best" in next(row for row in rows if row.startswith("0.1"))
    assert "diverged in round 1" in next(row for row in rows if row.startswith("100000"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_targets_of_any_scale_are_no_alarm(scale: float, offset: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)).astype(np.float32)
    y = (scale * (x[:, 0] + offset + 0.1 * rng.normal(size=90))).astype(np.float32)
    torch.manual_seed(0)
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    result = kedge.fit(nn.Linear(3, 1), clients, rounds=4, lr=0.01, engine="loop")
    assert not result.diverged


@pytest.mark.filterwarnings("error")
def test_a_bad_start_is_no_alarm() -> None:
    """Raw inputs of a large scale: the untrained model itself has a huge loss."""
    rng = np.random.default_rng(0)
    x = (1e4 * rng.normal(size=(60, 3))).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    torch.manual_seed(0)
    clients = [(x[i::2], y[i::2]) for i in range(2)]
    result = kedge.fit(nn.Linear(3, 2), clients, rounds=3, lr=1e-6, engine="loop")
    assert result.records[0][0]["train_loss"] > 100 * np.log(2)
    assert not result.diverged


@pytest.mark.parametrize(
    ("scale", "lr", "remark"),
    [(2.5e5, 0.1, r"set clip. The targets are large, about 25\d,\d+: scale"), (1.0, 1e4, "clip$")],
)
def test_large_targets_are_named_as_the_reason(scale: float, lr: float, remark: str) -> None:
    x = torch.linspace(-1, 1, 40)[:, None].repeat(1, 3)
    y = scale * (1 + 0.1 * x[:, 0])
    with pytest.raises(NotFinite, match=remark), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kedge.fit("mlp(hidden=[16])", [(x, y)], rounds=9, lr=lr, task="regression")


def test_large_targets_are_named_where_a_loss_has_exploded() -> None:
    x = torch.linspace(-1, 1, 40)[:, None].repeat(1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = kedge.fit(
            nn.Linear(3, 1), [(x, 1e5 * (2 + x[:, 0]))], rounds=12, lr=3.0, task="regression"
        )
    assert result.diverged
    assert "The targets are large, about 2" in message(result)
