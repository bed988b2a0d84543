"""Which runs the board finds, what it says of them, and how little it reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.board.watch import Catalogue, Reader, Tail
from kedge.errors import Interrupted, KedgeError
from kedge.history.folder import request_stop
from tests.board.fabricate import fabricate


def rows(catalogue: Catalogue) -> dict[str, dict[str, Any]]:
    catalogue.refresh()
    return {row["name"]: row for row in catalogue.rows()}


def test_runs_of_every_command_are_found(runs: Path) -> None:
    shutil.copytree(runs / "both/fedavg", runs / "one")
    shutil.copytree(runs / "both/fedavg", runs / "grid/lr_0.1")
    (runs / "grid/sweep.json").write_text("[]")
    shutil.copytree(runs / "both/fedavg", runs / "out/.runs/paper/table1/fedavg.seed0.full")
    found = rows(Catalogue(runs))
    assert {name: row["kind"] for name, row in found.items()} == {
        "both/fedavg": "compare",
        "both/scaffold": "compare",
        "one": "run",
        "grid/lr_0.1": "sweep",
        "out/.runs/paper/table1/fedavg.seed0.full": "reproduce",
    }


def test_a_row_says_what_the_result_says(runs: Path) -> None:
    row = rows(Catalogue(runs))["both/scaffold"]
    result = json.loads((runs / "both/scaffold/result.json").read_text())
    assert row["last"] == {"mean": result["last"]["mean"], "sd": result["last"]["sd"], "n": 2}
    assert (row["method"], row["data"], row["state"]) == ("scaffold", "digits", "finished")
    assert (row["done"], row["rounds"], row["metric"]) == ([4, 4], 4, "accuracy")


def test_links_are_not_followed(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(runs / "both/fedavg", outside)
    (runs / "link").symlink_to(outside, target_is_directory=True)
    half = runs / "half"  # a run of its own whose files are links
    half.mkdir()
    (half / "config.toml").symlink_to(outside / "config.toml")
    whole = runs / "whole"
    whole.mkdir()
    shutil.copy(outside / "config.toml", whole)
    (whole / "seed-0").symlink_to(outside / "seed-0", target_is_directory=True)
    (whole / "seed-1").mkdir()
    (whole / "seed-1/metrics.jsonl").symlink_to(outside / "seed-1/metrics.jsonl")
    (whole / "notes.json").symlink_to(outside / "environment.json")
    (whole / "log.txt").symlink_to(outside / "log.txt")
    found = rows(Catalogue(runs))
    assert set(found) == {"both/scaffold", "whole"}
    assert found["whole"]["done"] == [0, 0]
    assert (found["whole"]["last"], found["whole"]["reason"]) == (None, "")


def test_a_run_that_became_a_link_is_gone(runs: Path, tmp_path: Path) -> None:
    catalogue = Catalogue(runs)
    [fedavg, _] = sorted(rows(catalogue).values(), key=lambda row: row["name"])
    shutil.move(runs / "both/fedavg", tmp_path / "outside")
    (runs / "both/fedavg").symlink_to(tmp_path / "outside", target_is_directory=True)
    assert catalogue.get(fedavg["id"]) is None
    assert "both/fedavg" not in rows(catalogue)


def test_what_is_no_run_is_not_one(runs: Path) -> None:
    for name, text in (
        ("mine", 'title = "settings of something else"'),
        ("cut", 'method = "fed'),
        ("empty", ""),
        ("odd", 'method = 1\ndata = "d"\nrounds = 5\nseeds = [0]'),
        ("none", 'method = "a"\ndata = "d"\nrounds = 5\nseeds = []'),
    ):
        (runs / name).mkdir()
        (runs / name / "config.toml").write_text(text)
    assert len(rows(Catalogue(runs))) == 2


def test_a_run_is_interrupted_then_complete(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    settings: dict[str, Any] = {"clients": 3, "rounds": 3, "seeds": [0], "engine": "loop"}

    def ask(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            request_stop(tmp_path / "run")

    assert rows(catalogue) == {}
    with pytest.raises(Interrupted):
        kedge.run(out=tmp_path / "run", watch=ask, **settings)
    row = rows(catalogue)["run"]
    assert (row["state"], row["done"]) == ("interrupted", [2])
    assert row["reason"] == "interrupted: stopped after round 2 of seed 0"
    kedge.run(out=tmp_path / "run", resume=True, **settings)
    row = rows(catalogue)["run"]
    assert (row["state"], row["done"], row["reason"]) == ("finished", [3], "")
    kedge.run(out=tmp_path / "run", resume=True, **settings | {"rounds": 4})
    assert rows(catalogue)["run"]["done"] == [4]


def test_a_run_has_failed_or_diverged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 3, "rounds": 3, "seeds": [0], "engine": "loop"}

    def fail(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KedgeError("no more")

    with pytest.raises(KedgeError):
        kedge.run(out=tmp_path / "failed", watch=fail, **settings)
    with pytest.warns(UserWarning, match="the loss of fedavg"):
        kedge.run(out=tmp_path / "diverged", **settings | {"lr": 1000.0})
    kedge.sweep(grid={"lr": [1e30]}, out=tmp_path / "sweep", **settings)
    found = rows(Catalogue(tmp_path))
    assert {name: row["state"] for name, row in found.items()} == {
        "failed": "failed", "diverged": "diverged", "sweep/lr_1e_30": "diverged",
    }  # fmt: skip
    assert found["failed"]["reason"] == "failed: no more"


def test_a_run_trains_and_is_killed(runs: Path, holder: subprocess.Popen[str]) -> None:
    (runs / "both/fedavg/result.json").unlink()
    metrics = [runs / f"both/fedavg/seed-{seed}/metrics.jsonl" for seed in (0, 1)]
    lines = [path.read_text().splitlines(keepends=True) for path in metrics]
    for path in metrics:
        path.write_text("")
    catalogue = Catalogue(runs)
    assert rows(catalogue)["both/fedavg"]["state"] == "starting"
    metrics[0].write_text("".join(lines[0][:2]) + lines[0][2][:30])  # one line is being written
    row = rows(catalogue)["both/fedavg"]
    assert (row["state"], row["done"]) == ("training", [2, 0])
    last = json.loads(lines[0][1])
    assert row["last"] == {"mean": last["accuracy"], "sd": None, "n": 1}
    seconds = [json.loads(line)["seconds"] for line in lines[0][:2]]
    assert row["eta"] == pytest.approx(sum(seconds) / 2 * 6)
    request_stop(runs / "both/fedavg")
    assert rows(catalogue)["both/fedavg"]["state"] == "stopping"
    (runs / "both/fedavg/stop").unlink()
    holder.kill()
    holder.wait()
    row = rows(catalogue)["both/fedavg"]
    assert (row["state"], row["done"], row["eta"]) == ("killed", [2, 0], None)


def test_metrics_that_were_rewritten_are_read_again(
    runs: Path, holder: subprocess.Popen[str]
) -> None:
    (runs / "both/fedavg/result.json").unlink()
    catalogue = Catalogue(runs)
    assert rows(catalogue)["both/fedavg"]["done"] == [4, 4]
    path = runs / "both/fedavg/seed-0/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.with_name("new").write_text("".join(lines[:2]))
    path.with_name("new").replace(path)
    row = rows(catalogue)["both/fedavg"]
    assert row["done"] == [2, 4]
    path.write_text("".join([*lines[:1], *lines[2:]]))  # in place: the same file, other content
    entry = catalogue.get(row["id"])
    assert entry is not None
    catalogue.refresh()
    assert list(entry.tails[0].columns.rounds) == [1, 3, 4]


def test_damaged_files_do_no_harm(runs: Path, holder: subprocess.Popen[str]) -> None:
    run = runs / "both/fedavg"
    (run / "result.json").write_text('{"metric": ')
    (run / "notes.json").write_text("[1, 2")
    deep = "[" * 100_000
    odd = ["null", "{}", '{"round": true}', '{"round": 1e3}', deep, '{"round": -1}', "\x00\xff"]
    good = '{"round": 1, "accuracy": NaN, "train_loss": 1e999, "big": 1' + "0" * 400 + "}"
    (run / "seed-0/metrics.jsonl").write_text("\n".join([*odd, good, ""]), errors="ignore")
    row = rows(Catalogue(runs))["both/fedavg"]
    assert (row["state"], row["done"]) == ("training", [1, 4])
    json.dumps(row, allow_nan=False)


# -- how much is read ------------------------------------------------------------------------------


def test_opening_three_hundred_runs_reads_three_small_files_of_each(
    compared: Path, tmp_path: Path
) -> None:
    made = fabricate(compared / "both/fedavg", tmp_path, 300)
    catalogue = Catalogue(tmp_path)
    changed, gone = catalogue.refresh()
    assert (len(changed), gone) == (300, [])
    names = ("config.toml", "run.json", "result.json")
    wanted = sum((path / n).stat().st_size for path in made for n in names)
    assert catalogue.reader.bytes == wanted
    assert catalogue.reader.files == 900
    assert catalogue.refresh() == ([], [])  # at rest nothing is opened
    assert catalogue.reader.files == 900
    (made[7] / "notes.json").write_text('{"format": 1, "tags": ["best"], "note": ""}')
    [row], _ = catalogue.refresh()
    assert (row["name"], row["tags"]) == ("digits-007", ["best"])
    assert catalogue.reader.files == 901


def test_only_what_was_appended_is_read(runs: Path, holder: subprocess.Popen[str]) -> None:
    (runs / "both/fedavg/result.json").unlink()
    catalogue = Catalogue(runs)
    catalogue.refresh()
    path = runs / "both/fedavg/seed-0/metrics.jsonl"
    line = path.read_text().splitlines(keepends=True)[-1].replace('"round": 4', '"round": 5')
    before = catalogue.reader.bytes
    with path.open("a") as file:
        file.write(line)
    [row], _ = catalogue.refresh()
    assert row["done"] == [5, 4]
    assert catalogue.reader.bytes - before <= len(line) + 64


def test_a_run_that_starts_while_the_board_is_open_is_found(runs: Path) -> None:
    catalogue = Catalogue(runs)
    catalogue.refresh()
    time.sleep(0.01)
    os.mkdir(runs / "late")
    assert catalogue.refresh() == ([], [])
    (runs / "late/config.toml").write_text("")
    assert catalogue.refresh() == ([], [])
    shutil.copy(runs / "both/fedavg/config.toml", runs / "late/config.toml")
    [row], _ = catalogue.refresh()
    assert (row["name"], row["state"]) == ("late", "interrupted")
    shutil.rmtree(runs / "late")
    assert catalogue.refresh() == ([], [row["id"]])


def test_columns_have_the_order_of_the_records(runs: Path) -> None:
    """A set of names would have another order in every process."""
    path = runs / "both/fedavg/seed-0/metrics.jsonl"
    names = [f"own_{letter}" for letter in "qwertyuiopasdfghjkl"]
    path.write_text(json.dumps({"round": 1} | dict.fromkeys(names, 1.0)) + "\n")
    tail = Tail(path)
    tail.refresh(Reader())
    assert [name for name in tail.columns.named if name.startswith("own_")] == names
