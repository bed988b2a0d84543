"""What a report takes from runs: clients, curves, personal headlines, and the commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from kedge.core.task import Classification, MultiLabel, Regression
from kedge.data.federation import Federation
from kedge.history.find import find
from kedge.report.charts import columns_of, curves_of
from kedge.report.page import as_json, facts_of
from kedge.runs.clients import clients_of
from kedge.settings import Config, load_config, read_value
from tests.report.made import run_folder


def facts(what: Any) -> dict[str, Any]:
    return as_json(facts_of(find(what)))


# -- clients ----------------------------------------------------------------------------------


def test_counts_of_classes_by_hand() -> None:
    y = torch.tensor([0, 2, 2, 1, 0, 2])
    found = clients_of(Federation(torch.zeros(6, 2), y, [[0, 1, 2], [3, 5]], Classification(3)))
    assert found.counts == [[1, 0, 2], [0, 1, 1]]
    assert found.sizes == [3, 2]


def test_counts_of_labels_by_hand() -> None:
    y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    found = clients_of(Federation(torch.zeros(4, 2), y, [[0, 1], [2, 3]], MultiLabel(2)))
    assert found.counts == [[2, 1], [0, 1]]


def test_targets_are_not_counted() -> None:
    y = torch.tensor([[1.0], [2.0]])
    found = clients_of(Federation(torch.zeros(2, 2), y, [[0], [1]], Regression(1)))
    assert (found.counts, found.classes, found.sizes) == (None, None, [1, 1])


# -- curves -----------------------------------------------------------------------------------


def test_traffic_and_time_add_up(tmp_path: Path) -> None:
    """0.5 MB up and 0.25 MB down in 0.01 s, every round."""
    sources = find(run_folder(tmp_path / "r", rounds=4, seeds=[0, 1])).runs
    [curve] = curves_of(sources, columns_of(sources), 1.0)
    assert curve["test"]["rounds"] == [1, 2, 3, 4]
    assert curve["test"]["mb"] == [pytest.approx([0.75, 1.5, 2.25, 3.0])] * 2
    assert curve["test"]["s"] == [pytest.approx([0.01, 0.02, 0.03, 0.04])] * 2
    assert curve["train"]["y"]["divergence"][0] == pytest.approx([1, 0.5, 0.33333, 0.25])


# -- headlines --------------------------------------------------------------------------------


def test_personal_methods_are_judged_by_the_clients_models(tmp_path: Path) -> None:
    kedge.compare(
        ["fedavg", "fedper"], rounds=2, seeds=[0, 1], clients=4, out=tmp_path / "c", pooled=True
    )
    [group] = facts(tmp_path / "c")["groups"]
    assert [s["headline"] for s in group["standings"]] == ["client", "personal", "client"]
    heads = [column["head"] for column in group["table"]]
    assert "accuracy % of clients" in heads
    assert "global model" in heads
    assert group["clients"]["whose"] == "personal"


def test_companions_of_accuracy_where_classes_are_imbalanced(tmp_path: Path) -> None:
    changes = {"imbalanced": 0.9, "balanced_accuracy": 61.5, "auroc": 0.712}
    [group] = facts(run_folder(tmp_path / "r", changes=changes))["groups"]
    heads = [column["head"] for column in group["table"]]
    assert {"balanced accuracy %", "AUROC"} <= set(heads)
    assert "61.50 % and AUROC 0.712" in " ".join(group["verdict"]["more"])


def test_a_choice_on_validation_data_is_named(tmp_path: Path) -> None:
    kedge.compare(
        ["fedavg", "scaffold"], rounds=3, seeds=[0, 1], clients=4, validation=0.2,
        out=tmp_path / "c",
    )  # fmt: skip
    found = facts(tmp_path / "c")["groups"][0]
    assert {"validation", "chosen"} <= {column["head"] for column in found["table"]}
    assert any(run["mark"] == "best on validation data" for run in found["runs"])


# -- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "scaffold+fedprox(mu=0.1)", "partition": "dirichlet(0.3)", "lr": 0.03},
        {"seeds": (3, 5), "nesterov": True, "momentum": 0.9, "angles": (0.0, 15.0)},
        {"data": "my data/tab.csv(drop=[a, 'b c'])", "class_weights": "1,5", "target": 90.0},
    ],
)
def test_the_command_repeats_the_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = Config(**settings)
    folder = run_folder(tmp_path / "r", seeds=config.seeds, rounds=config.rounds)
    (folder / "config.toml").write_text(config.to_toml())
    [command] = facts(folder)["commands"]
    words = shlex.split(command)
    assert words[:2] == ["kedge", "run"]
    flags: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            key = word[2:].replace("-", "_")
            flag = i + 1 == len(words) or words[i + 1].startswith("--")
            flags[key] = True if flag else read_value(key, words[i + 1])
    assert load_config(flags=flags) == config


def test_a_sweep_is_repeated_by_its_words(tmp_path: Path) -> None:
    kedge.sweep(
        "fedprox", {"lr": [0.1, 0.2], "fedprox.mu": [0.1, 1.0]}, rounds=1, seeds=[0], clients=3,
        out=tmp_path / "s",
    )  # fmt: skip
    [command] = facts(tmp_path / "s")["commands"]
    assert command == (
        "kedge sweep lr=0.1,0.2 fedprox.mu=0.1,1 --method fedprox --clients 3 --rounds 1 --seeds 0"
    )


def test_own_data_have_no_command(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r")
    text = (folder / "config.toml").read_text().replace('data = "digits"', 'data = "own"')
    (folder / "config.toml").write_text(text)
    assert facts(folder)["commands"] == []


def test_files_that_were_loaded_are_in_the_command(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r")
    environment = json.loads((folder / "environment.json").read_text())
    environment["loaded"] = [{"path": "my part.py", "sha256": ""}]
    (folder / "environment.json").write_text(json.dumps(environment))
    assert facts(folder)["commands"][0].endswith("--load 'my part.py'")
