"""The table of oracles, and other libraries behind a Python of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from bench.conformance import Row, fixed_points, own_rows, pythons, rival_rows
from typer.testing import CliRunner

from bench import conformance
from kedge.check.oracles import Claim, _oracles, oracle
from kedge.errors import KedgeError, UnknownName


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name in conformance.INSTALL:
        monkeypatch.delenv(f"KEDGE_{name.upper()}_PYTHON", raising=False)


@pytest.fixture
def _broken_fedavg() -> Iterator[None]:
    @oracle(None)
    def wrong_on_purpose(cls: None) -> list[Claim]:
        return [Claim("two is three", 3.0, 2.0)]

    yield
    _oracles[None].remove(wrong_on_purpose)


def fake_python(folder: Path, body: str) -> str:
    """Stands in for the Python of another library: gets the script, answers as told."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def command(*args: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(conformance.conformance)
    done = CliRunner().invoke(app, args)
    return done.exit_code, done.stdout, done.stderr


def test_own_rows_hold() -> None:
    rows = own_rows(["fedavg", "scaffold"])
    assert {r.method for r in rows} == {"fedavg", "scaffold"}
    assert all(r.ok for r in rows)
    first = rows[0]
    assert first.expected == pytest.approx(0.71344, abs=1e-5)
    assert first.got == pytest.approx(first.expected, abs=1e-9)


def test_a_sum_of_parts_is_refused() -> None:
    with pytest.raises(KedgeError, match="one part at a time"):
        own_rows(["scaffold+fedprox"])


@pytest.mark.long
@pytest.mark.usefixtures("_broken_fedavg")
def test_a_wrong_claim_is_shown_and_fails_the_command() -> None:
    assert [r.ok for r in own_rows(["fedavg"])] == [True, False]
    code, out, _ = command("fedavg")
    assert code == 1
    assert "FAILS" in out
    assert "fedavg: not right" in out


def test_fixed_points_by_hand() -> None:
    found = {name: value for name, (_, value) in fixed_points().items()}
    assert found["fedavg"] == pytest.approx(0.71344, abs=5e-6)
    assert found["scaffold"] == pytest.approx(10 / 11)
    assert found["fedprox"] == pytest.approx(0.736188, abs=5e-7)


@pytest.mark.parametrize("name", conformance.INSTALL)
def test_a_script_has_the_numbers_of_the_oracle(name: str) -> None:
    """The scripts cannot import kedge, so they repeat the problem."""
    text = (conformance.SCRIPTS / f"{name}.py").read_text()
    assert "= (1.0, 10.0), (0.0, 1.0), 0.05, 10, 60, 1.0\n" in text
    assert "kedge" not in text
    assert (conformance.H, conformance.A) == ((1.0, 10.0), (0.0, 1.0))
    assert (conformance.LR, conformance.STEPS) == (0.05, 10)


def test_answers_are_read_from_the_last_line(tmp_path: Path) -> None:
    answer = '{"fedavg": 0.71344, "scaffold": "nan", "fedprox": 0.5}'
    python = fake_python(tmp_path, f"echo a greeting\necho '{answer}'")
    rows, message = rival_rows("pfl", python)
    assert message == ""
    assert [(r.method, r.ok) for r in rows] == [
        ("pfl fedavg", True),
        ("pfl scaffold", False),
        ("pfl fedprox", False),
    ]
    assert rows[1].got is not None
    assert math.isnan(rows[1].got)


@pytest.mark.long
def test_the_column_objective_names_the_problem_that_a_method_solves(tmp_path: Path) -> None:
    """With clients of 1 and 3 samples, weighted by size: the minimum is 30/31, or 10/11 if all
    clients count alike."""
    finals = '"objective of fedavg": 0.8819, "objective of scaffold": 0.90909'
    python = fake_python(tmp_path, f"""echo '{{"fedavg": 0.71344, {finals}}}'""")
    rows, _ = rival_rows("pfl", python)
    assert [row.objective for row in rows] == ["neither, 0.8819", "unweighted, 0.9091", ""]
    own = {row.method: row.objective for row in reversed(own_rows(["scaffold", "moon", "fedpvr"]))}
    assert own == {
        "scaffold": "weighted, 0.9677",
        "moon": "",
        "fedpvr": "weighted, 0.9677 (head)",
    }


def test_another_library_never_fails_the_command(tmp_path: Path) -> None:
    python = fake_python(tmp_path, """echo '{"fedavg": 0.1, "scaffold": -1e10}'""")
    code, out, _ = command("fedavg", "--against", "pfl", "--python-of", f"pfl={python}")
    assert code == 0
    assert "FAILS" in out
    assert "-1e+10" in out
    assert "not reported" in out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'ValueError: no good' >&2; exit 1", "ValueError: no good"),
        ("exit 7", "exit code 7"),
        ("echo hello", "not the expected JSON: 'hello'"),
        ("echo '[1]'", "not the expected JSON"),
        ("true", "not the expected JSON"),
    ],
)
def test_a_library_that_breaks(tmp_path: Path, body: str, said: str) -> None:
    rows, message = rival_rows("fedlab", fake_python(tmp_path, body))
    assert {(r.ok, r.got, r.note) for r in rows} == {(None, None, "failed")}
    assert said in message


def test_silence_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "TIMEOUT", 0.2)
    rows, message = rival_rows("pfl", fake_python(tmp_path, "exec sleep 5"))
    assert rows[0].note == "failed"
    assert "no result within" in message


def test_not_installed_says_what_to_type(tmp_path: Path) -> None:
    missing = "echo \"ModuleNotFoundError: No module named 'pfl'\" >&2; exit 1"
    python = fake_python(tmp_path, missing)
    code, out, err = command("fedavg", "--against", "pfl", "--python-of", f"pfl={python}")
    assert code == 0
    assert out.count("not installed") == 3
    assert "python -m venv venv-pfl" in err
    assert "venv-pfl/bin/pip install pfl==0.6.0 torch==2.13.0 numpy" in err


def test_this_interpreter_by_default() -> None:
    """The script's folder must not stand in for the library: here its file has the same name."""
    try:
        import pfl  # noqa: F401
    except ImportError:
        rows, message = rival_rows("pfl", pythons("pfl")["pfl"])
        assert {r.note for r in rows} == {"not installed"}
        assert "No module named 'pfl'" in message
    else:
        rows, _ = rival_rows("pfl", pythons("pfl")["pfl"])
        assert rows[0].ok


def test_which_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake_python(tmp_path, "true")
    assert pythons("") == {}
    assert pythons("pfl, fedlab") == {"pfl": sys.executable, "fedlab": sys.executable}
    monkeypatch.setenv("KEDGE_PFL_PYTHON", python)
    assert pythons("pfl") == {"pfl": python}
    assert pythons("pfl", [f"pfl={sys.executable}"]) == {"pfl": sys.executable}
    with pytest.raises(UnknownName, match="no library 'pfi'"):
        pythons("pfi")
    with pytest.raises(KedgeError, match="NAME=PATH"):
        pythons("pfl", ["pfl"])
    with pytest.raises(KedgeError, match="names fedlab, which --against does not"):
        pythons("pfl", [f"fedlab={python}"])
    with pytest.raises(KedgeError, match="does not exist"):
        pythons("pfl", [f"pfl={tmp_path}/none"])


def test_a_part_without_an_oracle_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "oracles_of", lambda part: iter(()))
    [row] = own_rows(["fedavg"])
    assert row == Row("fedavg", "none", note="has no oracle", objective="neither, 0.8819")
