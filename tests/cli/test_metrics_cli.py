"""Metrics, personal numbers and exploding losses on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import kedge_command

FAST = ["--clients", "4", "--rounds", "3", "--seeds", "0", "--engine", "loop"]


@pytest.mark.filterwarnings("default")
def test_a_loss_that_explodes_ends_with_exit_code_1(tmp_path: Path) -> None:
    done = kedge_command("run", "--lr", "1e5", "--clip", "10", *FAST, cwd=tmp_path)
    assert done.returncode == 1
    assert "warning: the loss of fedavg is more than 100 times what it is" in done.stderr
    assert "diverged" in done.stdout
    assert "fedavg has diverged: the loss is" in done.stderr
    assert "--lr 0.1 (now 100000)" in done.stderr
    assert "kedge predict" not in done.stderr  # nobody should use this model


def test_rare_positives_are_shown_with_balanced_accuracy_and_auroc(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    z = x[:, 0] + rng.normal(size=400)
    np.savez(tmp_path / "rare.npz", x_train=x, y_train=(z > np.quantile(z, 0.88)).astype(int))
    done = kedge_command("compare", "fedavg", "fedprox", "--data", "rare.npz", *FAST, cwd=tmp_path)
    assert done.returncode == 0
    assert "AUROC" in done.stdout
    assert "accuracy alone says little" in done.stdout
    assert "balanced accuracy" in done.stderr
    out = ("--json", "--metric", "auroc", "--class-weights", "balanced")
    done = kedge_command("run", "--data", "rare.npz", *out, *FAST, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["metric"] == "auroc"
    assert 0.5 < found["last"]["mean"] <= 1


def test_unknown_metrics_and_wrong_weights_end_in_one_message(tmp_path: Path) -> None:
    done = kedge_command("run", "--metric", "rmse", *FAST, cwd=tmp_path)
    assert done.returncode == 2
    assert "no metric 'rmse'" in done.stderr
    assert "balanced_accuracy" in done.stderr
    done = kedge_command("run", "--class-weights", "1,2", *FAST, cwd=tmp_path)
    assert done.returncode == 2
    assert "class_weights are 2 numbers for 10 classes" in done.stderr


def test_metrics_are_listed_and_shown() -> None:
    listed = kedge_command("list", "metrics").stdout
    assert all(name in listed for name in ("auroc", "balanced_accuracy", "r2", "map", "ece"))
    page = kedge_command("show", "metric:auroc").stdout
    assert "classification, multilabel; higher is better" in page
    assert "kedge run --metric auroc" in page


def test_a_metric_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import kedge\n\n\n"
        "@kedge.register_metric(higher_is_better=False)\n"
        "def misses(y_true, y_score):\n"
        '    """Share of wrong predictions."""\n'
        "    return float((y_score.argmax(1) != y_true).mean())\n"
    )
    from kedge.core.task_custom import own_metrics

    try:
        done = kedge_command(
            "run", "--load", "own.py", "--metric", "misses", "--json", *FAST, cwd=tmp_path
        )
        found = json.loads(done.stdout)
        assert (found["metric"], found["higher_is_better"]) == ("misses", False)
        records = (tmp_path / "runs/digits-fedavg-1/seed-0/metrics.jsonl").read_text().splitlines()
        last = json.loads(records[-1])
        assert last["misses"] == pytest.approx(1 - last["accuracy"] / 100)
        evaluate = ("evaluate", "runs/digits-fedavg-1", "--json")
        scores = json.loads(kedge_command(*evaluate, cwd=tmp_path).stdout)
        assert scores["global"]["misses"] == pytest.approx(last["misses"])
    finally:
        own_metrics.remove("misses")
    scores = json.loads(kedge_command(*evaluate, cwd=tmp_path).stdout)  # without the file
    assert scores["global"]["accuracy"] == pytest.approx(last["accuracy"])


def test_a_number_that_is_missing_is_null_in_json(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[::2], y_test=y[::2])
    what = ("--data", "own.npz", "--metric", "auroc", "--partition", "iid", "--json")
    done = kedge_command("run", *what, *FAST, cwd=tmp_path)  # the test set has one class
    assert json.loads(done.stdout, parse_constant=pytest.fail)["last"]["mean"] is None
