"""Every part has a trajectory, or the README names its other oracle and the reason."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from kedge.core.part import parse, parts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def rows() -> list[list[str]]:
    """Rows of the README's tables, as cells."""
    lines = (HERE / "README.md").read_text().splitlines()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [cells for cells in table if not cells[1].startswith("---")]


FILES = {
    row[0].strip("`"): row[1].split(", ") for row in rows() if len(row) == 2 and row[0] != "file"
}
OTHERS = {row[0]: row[2] for row in rows() if len(row) == 3 and " " not in row[0]}


def test_every_part_is_named_once() -> None:
    named = [name for names in (*FILES.values(), OTHERS) for name in names]
    assert sorted(named) == sorted(n for n in parts if parts[n].__module__.startswith("kedge."))


@pytest.mark.parametrize("file", FILES)
def test_the_file_has_these_trajectories(file: str) -> None:
    cases = importlib.import_module(f"tests.trajectories.{file.removesuffix('.py')}").CASES
    tested = {part.name for case in cases for part in parse(case.method).parts}
    assert set(FILES[file]) <= tested


@pytest.mark.parametrize("part", OTHERS)
def test_the_other_oracle_exists(part: str) -> None:
    path = re.findall(r"`(.+?)`", OTHERS[part])[0]
    assert parts[part].__name__ in (ROOT / path).read_text()
