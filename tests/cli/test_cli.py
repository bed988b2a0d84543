"""Commands as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
import kedge
from dataclasses import dataclass
from kedge.core import tree

@kedge.register
@dataclass(frozen=True)
class Ridge(kedge.Part):
    weight: float = 0.1
    neutral = {"weight": 0.0}

    def term(self, v, params, batch, out):
        return self.weight * tree.sq_norm(params)
"""


def kedge_command(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kedge", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"COLUMNS": "120", "PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        check=False,
    )


def test_list_and_its_patterns() -> None:
    done = kedge_command("list")
    assert done.returncode == 0
    for name in ("scaffold", "fedprox", "moon", "fedrep"):
        assert name in done.stdout
    only = kedge_command("list", "fed*")
    assert "fedprox" in only.stdout
    assert "scaffold" not in only.stdout
    none = kedge_command("list", "zzz")
    assert none.returncode == 2
    assert none.stderr.startswith("error: no part 'zzz'")


def test_show_has_equation_reference_fields_and_traffic() -> None:
    done = kedge_command("show", "scaffold")
    assert done.returncode == 0
    for piece in (
        "cₖ⁺ = cₖ - c",
        "arXiv:1910.06378",
        "eta_g",
        "extra down",
        "P numbers",
        "client keeps",
        "yes: only sums",
    ):
        assert piece in done.stdout
    assert "moon:fedcog" in kedge_command("show", "moon").stdout


def test_unknown_name_suggests_the_right_one() -> None:
    done = kedge_command("show", "scafold")
    assert done.returncode == 2
    assert done.stderr == "error: no part 'scafold'. Did you mean 'scaffold'? See: kedge list\n"
    assert "Traceback" not in done.stderr


def test_check_prints_laws_and_identities() -> None:
    done = kedge_command("check", "fedprox")
    assert done.returncode == 0
    assert "law loop=vector" in done.stdout
    assert "expected 0.736188, got 0.736188" in done.stdout
    assert "laws and identities hold for fedprox" in done.stdout


def test_check_of_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = kedge_command("check", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold for ridge" in done.stdout
    (tmp_path / "bad.py").write_text(GOOD.replace("self.weight *", "self.weight + "))
    done = kedge_command("check", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAILS" in done.stdout
    assert "ridge: not right" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [("x = 1\n", "registers no part"), (None, "there is no file 'mine.py'")],
)
def test_check_of_a_file_without_parts(tmp_path: Path, content: str | None, message: str) -> None:
    if content:
        (tmp_path / "mine.py").write_text(content)
    done = kedge_command("check", "mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_version_and_help() -> None:
    assert kedge_command("--version").stdout.startswith("kedge 0.")
    assert "check" in kedge_command("--help").stdout
