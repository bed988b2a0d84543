"""``kedge reproduce`` on the command line, with a tiny table of one's own."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kedge
from kedge.reproduction import command, recipes
from kedge.reproduction.display import comparison_with_paper
from tests.cli.commands import Done, kedge_command

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TABLE = """\
# kedge reproduce demo/digits
title = "Demo, Table 1"
place = "digits, 4 clients"
metric = "last"
tail = 2
base = "fedavg"
rows = ["fedavg", "scaffold"]
seeds = [0]
{more}
[settings]
data = "digits"
partition = "class_dirichlet_capped(0.5)"
clients = 4
model = "mlp(hidden=[8])"
rounds = 3
batch = 64
lr = 0.1

[quick]
rounds = 2
expect = ["scaffold"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the recipes ``tables/demo/digits``."""
    table = tmp_path / "tables" / "demo" / "digits"
    table.mkdir(parents=True)
    (table / "table.toml").write_text(TABLE.format(more=""))
    (table / "fedavg.toml").write_text('method = "fedavg"\npaper = 80.0\ncost_s = 7200\n')
    (table / "scaffold.toml").write_text('method = "scaffold"\npaper = 82.0\n')
    return tmp_path


def reproduce(folder: Path, *words: str) -> Done:
    return kedge_command("reproduce", *words, "--recipes", "tables", cwd=folder)


def run(folder: Path, *words: str) -> Done:
    return reproduce(folder, "demo/digits", "--engine", "loop", "--threads", "1", *words)


def test_the_list_says_what_there_is_and_what_is_done(folder: Path) -> None:
    done = reproduce(folder)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("demo/digits"))
    assert line.split()[-7:] == ["2", "1", "~2", "h", "yes", "0", "of", "2"][-7:]
    assert "digits, 4 clients" in line
    run(folder, "--rows", "fedavg")
    assert "1 of 2" in reproduce(folder).stdout
    [entry] = json.loads(reproduce(folder, "--json").stdout)["tables"]
    assert (entry["done"], entry["runs"], entry["cost_s"]) == (1, 2, 7200)


def test_the_cost_of_a_table_names_its_device(folder: Path) -> None:
    table = folder / "tables" / "demo" / "digits" / "table.toml"
    table.write_text('cost_on = "CPU"\n' + table.read_text())
    run(folder, "--rows", "fedavg")
    line = next(x for x in reproduce(folder).stdout.splitlines() if x.startswith("demo/digits"))
    assert re.search(r" ~?\d[\d.]* (ms|s), CPU ", line), line  # measured, since runs are on a CPU


def test_the_tables_of_the_package_are_listed(tmp_path: Path) -> None:
    done = kedge_command("reproduce", cwd=tmp_path)
    assert "fedimpro/table1" in done.stdout
    assert "flboost/table1_a03" in done.stdout


def test_a_table_is_run_and_printed(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "demo/digits: Demo, Table 1. digits, 4 clients" in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line[:1].islower()}
    assert "80.00" in rows["fedavg"]
    assert "+2.00" in rows["scaffold"]
    assert "one seed" in rows["scaffold"]
    shown = reproduce(folder, "demo/digits", "--show")
    assert shown.stdout == done.stdout
    some = reproduce(folder, "demo/digits", "--show", "--rows", "scaffold", "--json").stdout
    values = json.loads(reproduce(folder, "demo/digits", "--show", "--json").stdout)
    assert json.loads(some)["rows"] == values["rows"][1:]
    assert [row["n"] for row in values["rows"]] == [1, 1]
    assert f"{values['rows'][0]['ours']['mean']:.2f}" in rows["fedavg"]
    assert (folder / "reproduced/demo/digits/scaffold.seed0.full.json").is_file()


def test_all_that_is_recorded_is_shown(folder: Path) -> None:
    empty = reproduce(folder, "--show")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no records in reproduced" in empty.stderr
    run(folder, "--rows", "fedavg", "--rounds", "1")
    assert "Demo, Table 1" in reproduce(folder, "--show").stdout
    assert "Demo" not in kedge_command("reproduce", "--show", cwd=folder).stdout


def test_a_command_in_pieces_ends_where_the_whole_one_does(folder: Path) -> None:
    run(folder, "--results", "whole")
    part = run(folder, "--results", "pieces", "--rounds", "1")
    assert "1 of 3 rounds" in part.stdout
    stopped = run(folder, "--results", "pieces", "--minutes", "1e-9")
    assert stopped.returncode == 0
    assert "the same command goes on" in stopped.stderr
    assert run(folder, "--results", "pieces").returncode == 0
    curves = [
        [point[:2] for point in json.loads(path.read_text())["curve"]]
        for where in ("whole", "pieces")
        for path in sorted((folder / where / "demo/digits").glob("*.json"))
    ]
    assert curves[:2] == curves[2:]
    merged = reproduce(folder, "demo/digits", "--results", "new", "--merge", "pieces")
    assert merged.returncode == 0
    assert "2 records copied" in merged.stderr
    assert "80.00" in merged.stdout


def test_quick_forms_run_without_a_name_and_fail_without_the_gain(folder: Path) -> None:
    words = ("--scale", "quick", "--engine", "loop", "--threads", "1", "--json")
    done = reproduce(folder, *words)
    values: dict[str, Any] = json.loads(done.stdout)
    gain = values["rows"][1]["tail_gain"]["mean"]
    assert values["scale"] == "quick"
    assert done.returncode == (0 if gain > 0 else 1)
    assert values["missed"] == ([] if gain > 0 else ["scaffold"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo/digit",), "no table or paper 'demo/digit'. Did you mean 'demo/digits'?"),
        (("demo/digits", "--rows", "scafold"), "Did you mean 'scaffold'?"),
        (("demo/digits", "--rows", ","), "write names with commas between"),
        (("--rows", "fedavg"), "name the table"),
        (("demo/digits", "--scale", "big"), "there is no scale 'big'"),
        (("demo/digits", "--seeds", "a,b"), "write numbers with commas between"),
        (("demo/digits", "--seeds", "0,0"), "must be different numbers"),
        (("demo/digits", "--minutes", "0"), "must be above 0"),
        (("demo/digits", "--merge", "nowhere"), "there is no folder 'nowhere' to merge from"),
        (("demo/digits", "--results", "tables/demo/digits/fedavg.toml"), "is a file"),
        (("demo/digits", "--engine", "fast"), "engine"),
        (("demo/digits", "--merge", "tables"), "has no records of demo/digits"),
    ],
)
def test_mistakes_are_one_line(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = reproduce(folder, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "reproduced").exists()


def test_missing_data_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "tables/demo/digits/table.toml"
    file.write_text(file.read_text().replace('"digits"\npart', '"organamnist"\npart'))
    monkeypatch.setenv("KEDGE_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    done = run(folder)
    assert done.returncode == 2
    assert "organamnist" in done.stderr
    assert "KEDGE_DATA" in done.stderr
    assert not (folder / "reproduced/demo").exists()


def test_a_folder_without_recipes_and_none(folder: Path) -> None:
    done = kedge_command("reproduce", "--recipes", "nowhere", cwd=folder)
    assert (done.returncode, "no folder 'nowhere'" in done.stderr) == (2, True)
    (folder / "empty").mkdir()
    done = kedge_command("reproduce", "--recipes", "empty", cwd=folder)
    assert (done.returncode, "has no recipes" in done.stderr) == (2, True)


@pytest.mark.long
def test_a_killed_process_is_taken_up(folder: Path) -> None:
    """SIGKILL in the middle of the second row; the same command goes on."""
    file = folder / "tables/demo/digits/table.toml"
    file.write_text(file.read_text().replace("rounds = 3", "rounds = 6"))
    code = """
import os, sys
from kedge.cli import progress
shown = progress.Watcher.show
def show(self, config, seed, record, **more):
    if config.method == "scaffold" and record["round"] == 4:
        os.kill(os.getpid(), 9)
    shown(self, config, seed, record, **more)
progress.Watcher.show = show
sys.argv = ["kedge", "reproduce", "demo/digits", "--recipes", "tables", "--engine", "loop",
            "--threads", "1"]
from kedge.cli import main
main()
"""
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, timeout=120, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(Path(kedge.__file__).parents[1])},
    )  # fmt: skip
    assert killed.returncode == -9
    seen = json.loads(reproduce(folder, "demo/digits", "--show", "--json").stdout)["rows"]
    assert [row["rounds_done"] for row in seen] == [6, 4]
    assert run(folder).returncode == 0
    assert run(folder, "--results", "whole").returncode == 0
    name = "demo/digits/scaffold.seed0.full.json"
    one, two = (
        [p[:2] for p in json.loads((folder / where / name).read_text())["curve"]]
        for where in ("reproduced", "whole")
    )
    assert one == two


def test_a_narrow_terminal_loses_columns_before_it_folds_names() -> None:
    found = command.read_table(recipes.read("flboost/table1_a03").at("full"), RESULTS)
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(comparison_with_paper(found.table, found.rows))
    text = screen.export_text()
    assert "scaffold_flboost" in text
    assert "84.38" in text
    assert "interval" not in text.splitlines()[1]
