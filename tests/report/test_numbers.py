"""One run, one number: the report, the board's list and its comparison say the same of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.board.panel import table
from kedge.board.watch import Catalogue
from kedge.core.task_custom import own_metrics, register_metric
from kedge.history.find import find
from kedge.report.page import as_json, facts_of
from tests.report.made import run_folder

NAN = float("nan")


def write(
    path: Path, curves: Sequence[Sequence[float]], metric: str = "rmse", method: str = "fedavg"
) -> Path:
    """A run of three rounds whose seeds have these tests."""
    run_folder(path, method, rounds=3, settings={"metric": metric}, held_out=False)
    for seed, curve in enumerate(curves):
        file = path / f"seed-{seed}" / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            del record["accuracy"], record["per_class"]
        records = [r | {metric: v} for r, v in zip(records, curve, strict=False)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def reported(*folders: Path) -> dict[str, Any]:
    [group] = as_json(facts_of(find(list(folders))))["groups"]
    return dict(group)


def listed(root: Path) -> dict[str, dict[str, Any]]:
    catalogue = Catalogue(root)
    catalogue.refresh()
    return {row["name"]: row for row in catalogue.rows()}


def compared(root: Path, *names: str) -> list[dict[str, Any]]:
    """The rows of the board's comparison."""
    catalogue = Catalogue(root)
    catalogue.refresh()
    ids = {row["name"]: row["id"] for row in catalogue.rows()}
    entries = [entry for name in names if (entry := catalogue.opened(ids[name]))]
    return list(table(entries, catalogue.reader)["rows"])


def three(root: Path, *names: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Mean and number of seeds of runs by the report, the board's list and its comparison."""
    found = reported(*(root / name for name in names))["standings"]
    rows = listed(root)
    report = [(s["last"]["mean"], s["last"]["n"]) for s in found]
    board = [rows[name]["last"] for name in names]
    return (
        report,
        [last and (last["mean"], last["n"]) for last in board],
        [(row["mean"], row["n"]) for row in compared(root, *names)],
    )


FIRST = [(3.0, 2.5, 2.1), (3.0, 2.4, 2.2), (3.0, 2.6, 2.3)]


def test_a_seed_that_is_a_round_behind_does_not_count_yet(tmp_path: Path) -> None:
    write(tmp_path / "a", FIRST)
    write(tmp_path / "b", [(2.9, 2.3, 2.0), (2.9, 2.2, 1.95), (2.9, 2.2)], method="scaffold")
    for numbers in three(tmp_path, "a", "b"):
        assert numbers == [pytest.approx((2.2, 3)), pytest.approx((1.975, 2))]
    standings = reported(tmp_path / "a", tmp_path / "b")["standings"]
    assert standings[1]["gain"] is None
    [_, row] = compared(tmp_path, "a", "b")
    assert "gain" not in row  # it is not finished


def test_a_seed_that_has_diverged_counts_as_nan(tmp_path: Path) -> None:
    write(tmp_path / "a", FIRST)
    write(tmp_path / "b", [(2.9, 2.3, 2.0), (2.9,), (2.9, 2.3, 2.1)], method="scaffold")
    log = "2026-01-01 00:00:00  failed: seed 1: the loss of client 0 is not finite in round 2\n"
    (tmp_path / "b" / "log.txt").write_text(log)
    found = reported(tmp_path / "a", tmp_path / "b")["standings"][1]
    assert (found["status"], found["last"]["mean"], found["last"]["n"]) == ("diverged", None, 3)
    row = listed(tmp_path)["b"]
    assert (row["state"], row["last"], row["reason"]) == (
        "diverged",
        {"mean": None, "sd": None, "n": 3},
        "seed 1: the loss of client 0 is not finite in round 2",
    )
    [_, row] = compared(tmp_path, "a", "b")
    assert (row["mean"], row["n"], row["gain"], row["holm"]) == (None, 3, None, None)


def test_a_seed_that_has_diverged_before_its_first_test_counts_as_nan(tmp_path: Path) -> None:
    write(tmp_path / "a", [(2.9, 2.3, 2.0), (), (2.9, 2.3, 2.1)])
    log = "2026-01-01 00:00:00  failed: seed 1: the loss of client 0 is not finite in round 1\n"
    (tmp_path / "a" / "log.txt").write_text(log)
    [found] = reported(tmp_path / "a")["standings"]
    assert (found["status"], found["last"]["mean"], found["last"]["n"]) == ("diverged", None, 3)
    assert listed(tmp_path)["a"]["last"] == {"mean": None, "sd": None, "n": 3}


def test_before_a_seed_has_ended_the_last_round_that_all_have_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", [(3.0, 2.5), (3.1, 2.4), (3.2,)])
    write(tmp_path / "b", [(2.0, 1.5), (2.1,), ()], method="scaffold")
    for numbers in three(tmp_path, "a", "b"):
        assert numbers == [pytest.approx((3.1, 3)), pytest.approx((2.05, 2))]
    assert [s["round"] for s in reported(tmp_path / "a", tmp_path / "b")["standings"]] == [1, 1]


# -- which way is better ----------------------------------------------------------------------


def errors(root: Path) -> tuple[Path, Path]:
    """Two runs by an own error metric: the first has the larger errors. No ``result.json``."""
    level = [(2.4, 2.2, 2.10), (2.5, 2.3, 2.12), (2.3, 2.1, 2.08)]
    better = [(1.4, 1.2, 1.08), (1.5, 1.3, 1.09), (1.3, 1.1, 1.07)]
    return write(root / "a", level, "cost"), write(root / "b", better, "cost", "scaffold")


def test_without_a_direction_there_is_no_verdict(tmp_path: Path) -> None:
    folders = errors(tmp_path)
    group = reported(*folders)
    assert group["verdict"]["lead"] == (
        "Whether a high or a low cost is better is not known, so nothing can be said about which "
        "run is better. Name the file that registers it: kedge report ... --load FILE.py"
    )
    assert group["metric"]["higher"] is None
    assert not any(run["best"] for run in group["runs"])
    assert [s["gain"] for s in group["standings"]] == [None, None]
    assert "best" not in [column["key"] for column in group["table"]]
    assert {s["gain"] for s in group["clients"]["summary"]} == {0} if group["clients"] else True
    assert [row["higher"] for row in listed(tmp_path).values()] == [None, None]
    assert all("gain" not in row for row in compared(tmp_path, "a", "b"))


@pytest.mark.parametrize("source", ["run.json", "result.json", "registered"])
def test_the_direction_is_that_of_the_run(tmp_path: Path, source: str) -> None:
    folders = errors(tmp_path)
    metric = {"name": "cost", "title": "costs", "unit": "€", "higher_is_better": False}
    header = {"format": 1, "task": "x", "headline": "cost", "personal": False}
    header |= {"metrics": [metric | {"decimals": 1}]}
    for folder in folders:
        if source == "run.json":
            (folder / source).write_text(json.dumps(header))
        elif source == "result.json":
            result = {"metric": "cost", "higher_is_better": False, "headline": "global"}
            (folder / source).write_text(json.dumps(result))
    if source == "registered":
        register_metric(lambda y, score: 0.0, name="cost", higher_is_better=False)
    try:
        group = reported(*folders)
    finally:
        if source == "registered":
            own_metrics.remove("cost")
    assert group["verdict"]["lead"].startswith("scaffold is best: 1.")
    assert group["standings"][1]["gain"]["mean"] == pytest.approx(1.02)
    if source == "run.json":
        assert group["metric"] == {"name": "costs", "unit": "€", "decimals": 1, "higher": False}
        row = listed(tmp_path)["a"]
        assert (row["unit"], row["decimals"], row["higher"]) == ("€", 1, False)
    if source != "registered":  # the board loads nothing
        [_, row] = compared(tmp_path, "a", "b")
        assert row["gain"] == pytest.approx(1.02)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "metrics": [{"name": 3}]}', '{"format": 1, "metrics": "x"}'],
)
def test_a_damaged_header_is_none(tmp_path: Path, text: str) -> None:
    folders = errors(tmp_path)
    for folder in folders:
        (folder / "run.json").write_text(text)
    assert "is not known" in reported(*folders)["verdict"]["lead"]
    assert listed(tmp_path)["a"]["higher"] is None


def test_a_run_says_from_its_start_what_it_is_judged_by(tmp_path: Path) -> None:
    """Also one of which a seed failed, read where its metric is not registered."""
    register_metric(
        lambda y, score: float((score.argmax(1) != y).mean()), name="miss", higher_is_better=False
    )
    seen: list[Any] = []

    def watch(seed: int, record: dict[str, Any]) -> None:
        seen.append(json.loads((tmp_path / "run" / "run.json").read_text()))

    try:
        kedge.run(
            "fedtr(personal_head=true)", metric="miss", rounds=1, clients=3, seeds=[0],
            model="mlp(hidden=[8])", out=tmp_path / "run", watch=watch,
        )  # fmt: skip
    finally:
        own_metrics.remove("miss")
    [header] = seen
    assert (header["format"], header["task"], header["headline"]) == (1, "classification", "miss")
    assert header["personal"] is True
    metrics = {metric["name"]: metric for metric in header["metrics"]}
    assert metrics["miss"] == {
        "name": "miss", "title": "miss", "unit": "", "higher_is_better": False, "decimals": 3,
    }  # fmt: skip
    assert (metrics["auroc"]["title"], metrics["accuracy"]["unit"]) == ("AUROC", "%")
    (tmp_path / "run" / "result.json").unlink()
    row = listed(tmp_path)["run"]
    assert (row["column"], row["higher"]) == ("personal_mean", False)
    assert reported(tmp_path / "run")["standings"][0]["headline"] == "personal"
