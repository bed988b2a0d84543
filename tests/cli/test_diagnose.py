"""``kedge diagnose``: in the terminal, as JSON, of data and of runs, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kedge.cli import app as cli
from kedge.cli.diagnose import print_sheet
from kedge.history.sheet import Sheet, SheetTable, read_sheet
from tests.cli.commands import kedge_command


def hospitals(folder: Path) -> Path:
    """Five hospitals: one measures in another unit, another has mostly sick patients."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name in ("east", "hill", "north", "south", "west"):
        sick = rng.random(120) < (0.95 if name == "hill" else 0.3)
        age = rng.normal(55 + 8 * sick, 12)
        dose = rng.normal(5 + sick, 1) * (18 if name == "south" else 1)
        rows = [f"{a:.1f},{d:.2f},{int(s)}" for a, d, s in zip(age, dose, sick, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["age,dose,sick", *rows]) + "\n")
    return folder


def test_a_folder_of_hospitals(tmp_path: Path) -> None:
    hospitals(tmp_path / "hospitals")
    done = kedge_command("diagnose", "hospitals(label=sick)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "5 clients, 480 training samples" in text
    assert "label skew: 1.7 of 2 classes per client" in text
    assert "hill (by its labels)" in text
    assert "south (by its features)" in text
    assert "dose on south" in text
    assert "cost: features by standardised columns" in done.stderr
    assert "next: kedge compare fedavg" in done.stderr
    assert "--data 'hospitals(label=sick)' --partition silos" in done.stderr


def test_json_is_one_object() -> None:
    done = kedge_command("diagnose", "digits", "--partition", "iid", "--clients", "5", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    [found] = json.loads(done.stdout)["sheets"]
    sheet = Sheet.from_dict(found)
    assert sheet.name == "data"
    assert sheet.values["labels"]["level"] == "none"


def test_a_page_of_the_sheet(tmp_path: Path) -> None:
    args = ("diagnose", "digits", "--partition", "iid", "--clients", "5", "-o")
    done = kedge_command(*args, "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote page.html" in done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "Labels agree; features agree; sizes are similar." in page
    assert "kedge diagnose digits --partition iid --clients 5" in page
    wrong = kedge_command(*args, "page.pdf", cwd=tmp_path)
    assert wrong.stderr == "error: page.pdf: the name must end with .html, such as page.html\n"


def test_a_run(tmp_path: Path) -> None:
    made = kedge_command(
        "run", "--rounds", "2", "--seeds", "0,1", "--clients", "4", "--out", "run", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    done = kedge_command("diagnose", "run", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kept in run/diagnosis: data, training" in done.stderr
    assert "next: kedge report run" in done.stderr
    for name in ("data", "training"):
        sheet = read_sheet(tmp_path / "run" / "diagnosis" / f"{name}.json")
        assert sheet.command == f"kedge diagnose run --what {name} --seed 1"
        assert " ".join(sheet.findings[0].split()) in " ".join(done.stdout.split())
    wrong = kedge_command("diagnose", "run", "--clients", "5", cwd=tmp_path)
    assert wrong.stderr == "error: clients is not for a run, which has its own data\n"


def test_a_comparison(tmp_path: Path) -> None:
    options = ("--rounds", "1", "--seeds", "0", "--clients", "4", "--out", "both")
    made = kedge_command("compare", "fedavg", "fedprox", *options, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = kedge_command("diagnose", "both", "--what", "data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kept in both/*/diagnosis: data" in done.stderr
    assert len(list((tmp_path / "both").glob("*/diagnosis/data.json"))) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["digit"], "no dataset 'digit'. Did you mean 'digits'?"),
        (["nowhere/run"], "nowhere/run: there is no such file or folder"),
        (["digits", "--what", "training"], "train first (kedge run --out FOLDER)"),
        (["digits", "--rounds", "last"], "--rounds last is not a list of numbers, such as 1,10,50"),
        (["digits", "--clients", "9000"], "9000 clients"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str, tmp_path: Path) -> None:
    done = kedge_command("diagnose", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_without_runs_or_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = kedge_command("diagnose", "empty", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("width", [40, 80, 120])
def test_sheets_fit_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text is wrapped, nothing is cut, and markup in names is text."""
    monkeypatch.setattr(cli.console, "_width", width)
    rows = [[f"[bold]client {k}", k * 1000, 0.5, None] for k in range(60)]
    table = SheetTable("Clients", ["client", "samples", "shift", "C_d"], rows, note="A note.")
    findings = ["A verdict " * 12, "Another [red]finding[/red] " * 9]
    print_sheet(Sheet("data", "Data", findings, [table], cost="1 s"))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "[bold]client 3" in " ".join(out.split())
    assert "[red]finding[/red]" in out
    assert "3,000" in out
    assert "0.500" in out
    assert "40 more rows with --json" in " ".join(out.split())
