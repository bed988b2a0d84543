"""One run, one number: the report, the board's list and its comparison say the same of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made import run_folder

from kedge.board.catalogue import Catalogue
from kedge.board.comparison import table
from kedge.report.page.facts import as_json, facts_of
from kedge.report.page.folders import read

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
    [group] = as_json(facts_of(read(list(folders))))["groups"]
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
