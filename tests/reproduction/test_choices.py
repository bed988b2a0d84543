"""Settings that are chosen on validation data, yardsticks, shared rows, and clients' own models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from kedge.engines import Execution
from kedge.errors import FieldError, KedgeError
from kedge.reproduction import command, recipes
from kedge.reproduction.display import comparison_with_paper
from kedge.reproduction.records import choice_path, read_choice, read_record
from kedge.reproduction.running import Context, Limits, OutOfTime, run_table
from kedge.runs import train
from kedge.settings import Config, load_config
from tests.reproduction.digits import TABLE, write

NAME = "demo/digits"
CHOOSE = "[choose]\nlr = [0.001, 0.3]\nrounds = 2\nvalidation = 0.2\nseed = 1\n\n"


def reproduce(root: Path, results: Path, name: str = NAME, **more: object) -> command.Reproduction:
    return kedge.reproduce(name, recipes=root, results=results, engine="loop", **more)  # type: ignore[arg-type]


def test_the_better_value_on_validation_data_is_taken(tmp_path: Path) -> None:
    root = write(tmp_path / "recipes", TABLE.replace("[quick]", CHOOSE + "[quick]"))
    found = reproduce(root, tmp_path, rows=["fedavg"])
    table = recipes.read(NAME, root).at("full")
    row = table.row("fedavg")
    choice = json.loads(choice_path(tmp_path, table, row).read_text())
    expected = [
        kedge.run(
            **vars(row.config(1)) | {"lr": lr, "rounds": 2, "validation": 0.2, "engine": "loop"}
        ).validation
        for lr in (0.001, 0.3)
    ]
    assert choice["validation"] == [stat.mean for stat in expected if stat]
    assert choice["validation"][0] < choice["validation"][1]
    assert read_choice(tmp_path, table, row) == {"lr": 0.3}
    record = read_record(tmp_path / NAME / "fedavg.seed0.full.json")
    assert record.settings["lr"] == 0.3
    assert record.settings["validation"] == 0.0
    assert found.rows[0].chosen == "lr 0.3"
    other = dataclasses.replace(row, method="fedprox(mu=1.0)")
    assert read_choice(tmp_path, table, other) is None


def test_the_smallest_error_on_validation_data_is_taken(tmp_path: Path) -> None:
    text = TABLE.replace("[quick]", CHOOSE + "[quick]").replace(
        "lr = 0.1\n", 'metric = "log_loss"\n'
    )
    root = write(tmp_path / "recipes", text)
    found = reproduce(root, tmp_path, rows=["fedavg"])
    table = recipes.read(NAME, root).at("full")
    choice = json.loads(choice_path(tmp_path, table, table.row("fedavg")).read_text())
    assert choice["validation"][0] > choice["validation"][1]
    assert choice["chosen"] == 0.3
    record = read_record(tmp_path / NAME / "fedavg.seed0.full.json")
    assert (record.metric, record.higher_is_better) == ("log_loss", False)
    assert found.rows[0].ours is not None
    assert found.rows[0].ours.mean == min(value for _, value, _ in record.curve if value)


def test_a_choice_that_is_stopped_goes_on(tmp_path: Path) -> None:
    root = write(tmp_path / "recipes", TABLE.replace("[quick]", CHOOSE + "[quick]"))
    table, limits = recipes.read(NAME, root).at("full"), Limits()

    def late(row: str, config: Any, seed: int, record: dict[str, Any]) -> None:
        limits.deadline = 0.0

    context = Context(tmp_path, limits, {"engine": "loop"}, late)
    with pytest.raises(OutOfTime):
        run_table(table, table.rows[:1], None, context)
    assert read_choice(tmp_path, table, table.rows[0]) is None
    reproduce(root, tmp_path, rows=["fedavg"])
    reproduce(root, tmp_path / "whole", rows=["fedavg"])
    one, two = (
        json.loads(choice_path(where, table, table.rows[0]).read_text())["validation"]
        for where in (tmp_path, tmp_path / "whole")
    )
    assert one == two


def test_a_record_of_another_choice_does_not_count(tmp_path: Path) -> None:
    root = write(tmp_path / "recipes", TABLE.replace("[quick]", CHOOSE + "[quick]"))
    reproduce(root, tmp_path, rows=["fedavg"])
    table = recipes.read(NAME, root).at("full")
    path = choice_path(tmp_path, table, table.rows[0])
    path.write_text(path.read_text().replace('"chosen": 0.3', '"chosen": 0.001'))
    found = reproduce(root, tmp_path, show=True)
    assert found.rows[0].n == 0
    assert "lr 0.3 (chosen: 0.001)" in found.left_out[0]


def test_choices_are_merged_with_their_records(tmp_path: Path) -> None:
    root = write(tmp_path / "recipes", TABLE.replace("[quick]", CHOOSE + "[quick]"))
    reproduce(root, tmp_path / "one", rows=["fedavg"])
    table = recipes.read(NAME, root).at("full")
    command.merge_tables([(table, [])], tmp_path / "two", tmp_path / "one")
    assert read_choice(tmp_path / "two", table, table.rows[0]) == {"lr": 0.3}
    assert reproduce(root, tmp_path / "two", show=True).rows[0].n == 1


def test_a_yardstick_trains_on_the_pooled_data(tmp_path: Path) -> None:
    pooled = 'method = "fedavg"\nyardstick = "pooled data"\n'
    root = write(tmp_path / "recipes", pooled=pooled)
    reproduce(root, tmp_path, rows=["pooled"])
    row = recipes.read(NAME, root).at("full").row("fedavg")
    settings = vars(row.config(0)) | {"engine": "loop"}
    settings.pop("method")
    expected = kedge.compare(["fedavg"], pooled=True, **settings)[1]
    curve = read_record(tmp_path / NAME / "pooled.seed0.full.json").curve
    assert [v for _, v, _ in curve] == [round(r["accuracy"], 3) for r in expected.records[0]]
    found = command.read_table(recipes.read(NAME, root).at("full"), tmp_path)
    table = comparison_with_paper(found.table, found.rows)
    assert "pooled: a yardstick" in " ".join(table.note)
    assert all(column.key != "traffic" for column in table.columns)  # a yardstick sends nothing


def test_a_shared_row_is_run_once(tmp_path: Path) -> None:
    root = write(tmp_path / "recipes")
    other = root / "demo" / "more"
    other.mkdir()
    (other / "table.toml").write_text(TABLE.replace(', "fedprox"', ""))
    (other / "fedavg.toml").write_text('same_as = "demo/digits/fedavg"\npaper = 70.0\n')
    (other / "scaffold.toml").write_text('method = "scaffold"\n')
    reproduce(root, tmp_path)
    before = (tmp_path / NAME / "fedavg.seed0.full.json").stat().st_mtime_ns
    found = reproduce(root, tmp_path, "demo/more")
    assert (tmp_path / NAME / "fedavg.seed0.full.json").stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "demo/more").iterdir()] == ["scaffold.seed0.full.json"]
    assert found.rows[0].row.paper == 70.0
    assert found.rows[1].gain is not None
    (other / "fedavg.toml").write_text('same_as = "demo/nothing/fedavg"\n')
    with pytest.raises(FieldError, match="no row of another table"):
        recipes.read("demo/more", root).at("full")
    (other / "fedavg.toml").write_text('same_as = "demo/digits/fedavg"\nmethod = "fedavg"\n')
    with pytest.raises(FieldError, match="either method or same_as"):
        recipes.read("demo/more", root)


def test_personal_methods_are_judged_by_the_clients_models(tmp_path: Path) -> None:
    text = TABLE.replace("seeds = [0]\n", 'seeds = [0]\njudged = "clients"\n', 1)
    text = text.replace("clients = 4\n", 'clients = 4\nsplit = "holdout(0.3)"\n')
    root = write(tmp_path / "recipes", text, local='method = "local"\n')
    found = {s.row.name: s for s in reproduce(root, tmp_path, rows=["fedavg", "local"]).rows}
    settings = vars(recipes.read(NAME, root).at("full").row("fedavg").config(0))
    settings |= {"engine": "loop"}
    settings.pop("method")
    global_model, local = kedge.compare(["fedavg", "local"], **settings)
    for name, result in (("fedavg", global_model), ("local", local)):
        curve = read_record(tmp_path / NAME / f"{name}.seed0.full.json").curve
        assert [v for _, v, _ in curve] == [round(v, 3) for v in result.array()[0]]
    assert found["local"].gain is not None
    assert found["local"].worst is not None


def test_a_given_execution_is_taken(tmp_path: Path) -> None:
    config = load_config(flags={"rounds": 1, "clients": 4, "seeds": [0], "engine": "auto"})
    options = train.Options(execution=Execution("vector", chunk=3))
    train.run(config, tmp_path / "run", options=options)
    how = json.loads((tmp_path / "run/environment.json").read_text())["how"]
    assert (how["engine"], how["chunk"]) == ("vector", 3)


def test_a_run_of_another_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "recipes")
    reproduce(root, tmp_path, rows=["fedavg"], rounds=1)
    path = tmp_path / ".runs" / NAME / "fedavg.seed0.full" / "environment.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
    with pytest.raises(KedgeError, match="was started on 'NVIDIA H200'.*merge"):
        reproduce(root, tmp_path, rows=["fedavg"])


def test_watch_may_stop_a_run(tmp_path: Path) -> None:
    """True from ``watch`` ends the training after the round, with a checkpoint."""
    settings = vars(Config(clients=4, rounds=4, seeds=(0,), engine="loop"))
    with pytest.raises(kedge.errors.Interrupted, match="stopped after round 2"):
        kedge.run(out=tmp_path / "run", watch=lambda seed, record: record["round"] == 2, **settings)
    rest = kedge.run(out=tmp_path / "run", resume=True, **settings)
    whole = kedge.run(**settings)
    for one, two in zip(rest.models[0].parameters(), whole.models[0].parameters(), strict=True):
        assert torch.equal(one, two)
