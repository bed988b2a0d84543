"""The mutation run: what it changes, what it reports, and that its table of faults is not stale."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.mutants import report
from tools.mutants.mutate import Source, sample
from tools.mutants.tables import Tables

ROOT = Path(__file__).parents[2]
TOY = '''"""A toy: 1 + 1."""

from dataclasses import dataclass

LIMIT = 3


def capped(x: int) -> int:
    return min(x, LIMIT)


def area(width: float, height: float = 2.0) -> float:
    if width < 0:
        raise ValueError(f"width {width} is below {0 + 0}")
    return width * height


def halve(n: float) -> float:
    while n > 1:
        n = n / 2
    return n


def unused(x: float) -> float:
    return x + 7


@dataclass
class Box:
    side: float = 5.0

    def volume(self) -> float:
        return self.side**3
'''
TESTS = """
from toy.calc import Box, area, capped, halve

def test_capped(): assert capped(9) == 3
def test_area(): assert area(2) == 4
def test_halve(): assert halve(8) == 1
def test_volume(): assert Box().volume() == 125
def test_that_is_broken(): assert area(1) == 0

STATE = []
def test_first(): STATE.append(1)
def test_that_needs_the_first(): assert STATE and area(2) == 4
"""
FAULTS = {
    "LIMIT = 3": "LIMIT = 4",  # killed: a constant of the module
    "width * height": "width / height",  # killed
    "return width * height": "return width + height",  # survives: 2 * 2 is 2 + 2
    "n = n / 2": "n = n * 1",  # hangs
    "x + 7": "x - 7",  # no test runs it
    "side: float = 5.0": "side: float = 6.0",  # killed: a default
    "self.side**3": "self.side**",  # does not compile
}


def table(folder: Path, faults: dict[str, str], name: str = "named.toml") -> None:
    folder.mkdir(exist_ok=True)
    text = "\n".join(
        f'[[mutant]]\nfile = "src/toy/calc.py"\nold = "{old}"\nnew = "{new}"\nwhy = "a fault"\n'
        for old, new in faults.items()
    )
    (folder / name).write_text(text)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in {"src/toy/calc.py": TOY, "tests/test_calc.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "src/toy/__init__.py").touch()
    (tmp_path / "pytest.ini").touch()
    table(tmp_path / "tables", dict(list(FAULTS.items())[:-1]))
    return tmp_path


def test_faults_are_killed_survive_hang_or_are_not_run(toy: Path) -> None:
    command = [
        sys.executable, "-m", "tools.mutants", "--root", toy, "--files", "src/toy/calc.py",
        "--named", "--tables", "tables", "--page", "page.md", "--limit", "1", "--warm", "pytest",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    record = json.loads((toy / "tables/record.json").read_text())
    results = list(record["files"]["src/toy/calc.py"]["mutants"].values())
    assert results == [
        "killed: tests/test_calc.py::test_capped",
        "killed: tests/test_calc.py::test_area",
        "survived: 1 of 1 tests",
        "timeout",
        "survived: no test runs this line",
        "killed: tests/test_calc.py::test_volume",
    ]
    page = (toy / "page.md").read_text()
    assert "**66.7 %**: 4 of 6" in page
    assert "| `src/toy/calc.py` | 6 | 4 | 67 % |" in page
    table(toy / "tables", {"return x + 7": "return x - 7"}, "equivalent.toml")
    tables = Tables(toy / "tables", "", 0)
    assert "**80.0 %**: 4 of 5" in report.page(tables.read(), tables.equivalent())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"x + 8": "x"}, "is 0 times in"),
        ({"return": "return"}, "is 5 times in"),
        ({"self.side**3": "self.side**"}, "invalid syntax"),
    ],
)
def test_a_stale_fault_is_an_error(tmp_path: Path, fault: dict[str, str], error: str) -> None:
    table(tmp_path, fault)
    with pytest.raises((ValueError, SyntaxError), match=error):
        Tables(tmp_path, "", 0).named({"src/toy/calc.py": Source("src/toy/calc.py", TOY)})


def test_the_faults_of_this_project_apply() -> None:
    files = [str(p.relative_to(ROOT)) for p in ROOT.glob("src/kedge/*/*.py")]
    sources = {f: Source(f, (ROOT / f).read_text(encoding="utf-8")) for f in files}
    tables = Tables(ROOT / "tools/mutants", "", 0)
    assert len(tables.named(sources)) == (ROOT / "tools/mutants/named.toml").read_text().count(
        "[[mutant]]"
    )


def test_samples_are_seeded_and_leave_text_types_and_errors_alone() -> None:
    source = Source("toy.py", TOY)
    found = sample(source, 1000, seed=0)
    assert [m.key for m in sample(source, 5, seed=1)] == [m.key for m in sample(source, 5, seed=1)]
    assert [m.key for m in sample(source, 5, seed=1)] != [m.key for m in sample(source, 5, seed=2)]
    assert {m.kind for m in found} >= {"operator", "constant", "default", "comparison", "field"}
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source != TOY
        assert mutant.source.splitlines()[0] == TOY.splitlines()[0]
        assert "raise" not in mutant.old or mutant.kind == "statement"
        assert "float" in mutant.source
    changed = {(m.old, m.new) for m in found}
    assert ("return width * height", "return width / height") in changed
    assert ("side: float = 5.0", "side: float = 10.0") in changed
