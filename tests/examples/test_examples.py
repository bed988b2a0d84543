"""Every example runs as its reader would run it, and shows what it promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60


def run(name: str, *arguments: str | Path, cwd: Path) -> str:
    """What an example prints, in a new process where warnings are errors."""
    path = ROOT / "examples" / name
    done = subprocess.run(
        [sys.executable, "-W", "error", path, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=600, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(cwd.iterdir()) or arguments, "it writes where it was not told to"
    return done.stdout


def accuracies(text: str) -> dict[str, float]:
    """The first number of each row of a comparison, by method."""
    rows = re.findall(r"^(\S.*?) +(\d+\.\d+)±", text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def test_every_example_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [p.name for p in EXAMPLES if f'run("{p.name}"' not in text] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_stranger_can_read_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(rf"\. |\? Run: python {path.name} \[\w+\]$", docstring.splitlines()[0])
    assert f"Run: python {path.name}" in docstring.splitlines()[0]


@pytest.mark.long
def test_hospitals(tmp_path: Path) -> None:
    text = run("hospitals.py", tmp_path, cwd=tmp_path)
    assert text.startswith("Strong label skew: 2.0 of 5 classes per client")
    found = accuracies(text)
    assert found["scaffold"] > found["fedavg"] + 5
    assert "scaffold: chosen on validation data" in text
    patients = re.findall(r"^ *new\d +(\w+) .* (\w+)$", text, re.MULTILINE)
    assert len(patients) == 6
    assert sum(predicted == truth for predicted, truth in patients) >= 4
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_images(tmp_path: Path) -> None:
    text = run("images.py", tmp_path, cwd=tmp_path)
    found = accuracies(text)
    fedavg, fedimpro, fedtr = found.values()
    assert fedimpro > fedavg + 3
    assert fedtr > fedavg + 5
    assert re.search(r"new.png shows a (\d); the model says \1$", text, re.MULTILINE)
    assert len(re.findall(r"A +\d+\.\d B +\d+\.\d", text)) == 3
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_text_lora(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run("text_lora.py", cwd=tmp_path)
    rows = re.findall(r"accuracy (\S+) % with (\S+) MB", text)
    (every, all_mb), (lora, lora_mb) = [(float(a), float(b)) for a, b in rows]
    assert min(every, lora) > 90
    assert all_mb > 10 * lora_mb


@pytest.mark.long
def test_new_method(tmp_path: Path) -> None:
    text = run("new_method.py", tmp_path, cwd=tmp_path)
    assert "smooth: 10 laws and identities hold" in text
    assert "expected 0.5, got 0.5" in text
    found = accuracies(text)
    assert found["smooth"] > found["fedavg"] + 2
    assert found["scaffold+smooth"] > found["fedavg"] + 5
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_paper_table(tmp_path: Path) -> None:
    text = run("paper_table.py", tmp_path, cwd=tmp_path)
    rows = re.findall(r"^(\w+) +paper (\S+)  ours (\S+)±\S+  difference (\S+):", text, re.M)
    assert [row[0] for row in rows] == ["fedavg", "fedprox", "scaffold"]
    for _, paper, ours, difference in rows:
        assert float(ours) - float(paper) == pytest.approx(float(difference), abs=0.011)
        assert abs(float(difference)) < 3
    assert (tmp_path / "report.html").stat().st_size > 10_000
