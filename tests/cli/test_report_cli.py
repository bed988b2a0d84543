"""``kedge report``, and the report at the end of commands that train."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kedge.report.page as pages
from tests.cli.commands import kedge_command

RESULTS = Path(__file__).parents[2] / "docs" / "results"
QUICK = ("--rounds", "1", "--seeds", "0", "--clients", "3", "--out", "r")


@pytest.mark.parametrize(
    "words", [("run",), ("compare", "fedavg", "scaffold"), ("sweep", "lr=0.1,0.2")]
)
def test_training_ends_with_a_report(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = kedge_command(*words, *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"report: {Path('r') / 'report.html'}" in done.stderr
    assert "on digits" in (tmp_path / "r" / "report.html").read_text()


def test_no_report(tmp_path: Path) -> None:
    assert kedge_command("run", "--no-report", *QUICK, cwd=tmp_path).returncode == 0
    assert not (tmp_path / "r" / "report.html").exists()


def test_json_stays_alone_on_stdout(tmp_path: Path) -> None:
    done = kedge_command("sweep", "lr=0.1,0.2", "--json", *QUICK, cwd=tmp_path)
    assert done.stdout.count("\n") == 1
    assert (tmp_path / "r" / "report.html").exists()


def test_a_report_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(pages, "facts_of", fail)
    done = kedge_command("run", *QUICK, cwd=tmp_path)
    assert done.returncode == 0
    assert "the report could not be written (no such luck)" in done.stderr
    assert "kedge report r" in done.stderr


def test_the_command_writes_what_is_asked_for(tmp_path: Path) -> None:
    kedge_command("compare", "fedavg", "scaffold", *QUICK, "--no-report", cwd=tmp_path)
    words = ("--csv", "r.csv", "--json", "r.json", "--title", "My title")
    done = kedge_command("report", "r", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<h1>My title</h1>" in (tmp_path / "r" / "report.html").read_text()
    assert done.stderr.split() == ["r/report.html", "r.csv", "r.json"]
    done = kedge_command("report", "r/fedavg", "r/scaffold", "-o", "two.html", cwd=tmp_path)
    assert "kedge compare fedavg scaffold --clients 3" in (tmp_path / "two.html").read_text()


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    done = kedge_command("report", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr


def test_reproduced_tables_have_a_page(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "fedcog", tmp_path / "results" / "fedcog")
    done = kedge_command("report", "results", "-o", "r.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    assert "fedcog/table1_fmnist_niid2" in page
    assert "paper&#39;s gain" in page
    assert "kedge reproduce fedcog/table1_fmnist_niid2" in page
