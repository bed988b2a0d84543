"""Formulas as names of classes, clients and columns, or in samples: a spreadsheet gets text."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kedge
from kedge.csv_text import csv_lines, quoted, unquoted
from kedge.data.datasets import load
from kedge.loggers.csv_file import CSV
from kedge.settings import Config
from tests.cli.commands import kedge_command

FORMULAS = (
    "=1+1", "=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\rx", "\n=1", " =1",
    '=HYPERLINK("http://x";A1)', "\ufeff=1", "\u200b=1", "\x00=1", "＝1", "-", "+a", "''=1", "'=1",
    "harmless;=1+1", "a\n=1", "a\t@b", "a\r-b", "\xa0=1",
)  # fmt: skip
NUMBERS = ("-1", "+1", "-1.5", "-.5", "-1e-5", "+2E+10", "-inf", "nan", "12", "1.")
SIGNS = tuple("=+-@\t\r＝＋－＠")


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet would compute a cell, or what it takes as one elsewhere."""
    for piece in io.StringIO(cell.replace(";", "\n").replace("\t", "\n").replace("\r", "\n")):
        bare = piece.strip(" \x00\ufeff\u200b\xa0\n")
        if bare.startswith(SIGNS) and not any(bare == n for n in NUMBERS):
            return True
    return cell.startswith(("\t", "\r", "\n"))


def cells(text: str) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text_and_comes_back(text: str) -> None:
    assert is_formula(text) or text.startswith("'")
    assert quoted(text).startswith("'") or text.startswith(("harmless", "a"))
    assert not is_formula(quoted(text))
    assert unquoted(quoted(text)) == text


def test_numbers_and_other_text_stay_as_they_are() -> None:
    for cell in (*NUMBERS, -1, -1.5, np.float32(-0.5), None, True, "", "a-b", "x=1", "'", "1;2"):
        assert quoted(cell) is cell
    line = next(csv_lines([[-1, -0.25, float("-inf"), None, "a,b", 'c"d', "=x"]]))
    assert line == '-1,-0.25,-inf,,"a,b","c""d",\'=x\n'


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet=[*"=+-@';\t\r\n ,\"a1.e", "＝", "\ufeff", "\x00"], max_size=8))
def test_all_text_comes_back_and_is_no_formula(text: str) -> None:
    assert unquoted(quoted(text)) == text
    number = text.strip("+-").replace(".", "").replace("e", "").replace("-", "").isdigit()
    assert number or not is_formula(quoted(text))


# -- the files of kedge ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hospitals with formulas as names, wards and diagnoses."""
    folder = tmp_path_factory.mktemp("formulas")
    rng = np.random.default_rng(0)
    for name in ("=1+1", "@north"):
        frame = pd.DataFrame({
            "id": [f"{sign}1+{i}" for i, sign in enumerate("=+-@" * 8)],
            "-age": rng.normal(0, 1, 32),
            "=ward": rng.choice(["=cmd|' /C calc'!A0", "@b"], 32),
            "diagnosis": rng.choice(["=2+3", "+ill", "-1"], 32),
        })  # fmt: skip
        (folder / "data").mkdir(exist_ok=True)
        frame.to_csv(folder / "data" / f"{name}.csv", index=False)
    data = f"{folder / 'data'}(label=diagnosis, id=id)"
    fast: dict[str, Any] = {"rounds": 2, "seeds": [0], "split": "holdout(0.25)", "engine": "loop"}
    kedge.run("fedavg", data=data, out=folder / "run", log="csv", **fast)
    return folder / "run"


def test_predictions_hold_no_formula(run: Path) -> None:
    data, out = run.parent / "data", run.parent / "out.csv"
    done = kedge_command("predict", str(run), str(data), "-o", str(out))
    assert done.returncode == 0, done.stderr
    shown = kedge_command("predict", str(run), str(data)).stdout
    assert shown == out.read_text()
    found = cells(shown)
    assert {"'=1+1", "'@north", "p_=2+3", "'=1+0", "'-1+2"} <= set(found)
    assert not [cell for cell in found if is_formula(cell)]
    assert set(pd.read_csv(out)["prediction"]) <= {"'=2+3", "'+ill", "-1"}


def test_predictions_without_formulas_are_those_of_pandas(tmp_path: Path) -> None:
    kedge.run("fedavg", out=tmp_path / "run", clients=3, rounds=1, seeds=[0], engine="loop")
    kedge_command("predict", "run", "digits", "-o", "out.csv", cwd=tmp_path)
    frame = kedge.load(tmp_path / "run").model.frame(load("digits").x_test)
    found = (tmp_path / "out.csv").read_text()
    assert found == frame.to_csv(index=False)
    assert frame.select_dtypes("number").shape[1] >= 10


def test_records_of_a_report_hold_no_formula(run: Path) -> None:
    table = run.parent / "records.csv"
    clients = run / "seed-0" / "clients.json"
    known = json.loads(clients.read_text())
    assert known["names"] == ["=1+1", "@north"]
    kedge.write_report(run, run.parent / "report.html", csv=table)
    found = cells(table.read_text())
    assert "'=2+3" in found
    assert not [cell for cell in found if is_formula(cell)]
    assert any(cell.startswith("0.") for cell in found)


def test_a_logger_reads_its_own_file_again(tmp_path: Path) -> None:
    """Also columns with formulas as names; none is doubled."""
    first = {"round": 1, "=cost": -1.5, "plain": -0.0, "outer": {"@x": float("-inf")}}
    for number in (1, 2, 3):
        logger = CSV()
        logger.start(Config(), tmp_path)
        assert logger.logged(0) == number - 1
        logger.log(0, first | {"round": number})
        logger.end(None)
    lines = (tmp_path / "log-csv" / "metrics.csv").read_text().splitlines()
    assert lines == ["seed,round,'=cost,plain,outer/@x"] + [
        f"0,{number},-1.5,-0.0,-inf" for number in (1, 2, 3)
    ]
