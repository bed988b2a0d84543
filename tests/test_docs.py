"""Every code block in the README and the docs runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.check.problems import images
from kedge.cli import main
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import parts
from kedge.loading import files

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of the blocks of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if _blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in one folder. A block with a title is a file of that name."""
    monkeypatch.chdir(tmp_path)
    quiet = io.StringIO()
    for kind, title, code in _blocks(page):
        if title:
            Path(title).write_text(code, encoding="utf-8")
        with _new_parts(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if kind == "python":
                _executed(code, monkeypatch)
            for line in code.splitlines() if kind == "sh" else []:
                _shell(line, monkeypatch)


@contextlib.contextmanager
def _new_parts() -> Iterator[None]:
    """Parts registered and files loaded inside are forgotten in the end."""
    known = set(parts)
    try:
        yield
    finally:
        files.clear()
        for name in set(parts) - known:
            parts.remove(name)


def _executed(code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a block defines."""
    module = types.ModuleType("block")
    monkeypatch.setitem(sys.modules, "block", module)  # dataclasses look it up
    exec(compile(code, "block", "exec"), vars(module))
    return vars(module)


def _shell(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "make":  # the targets are there; what they do is tested elsewhere
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert words[0] == "kedge", f"a block may call kedge and make, not {words[0]}"
    monkeypatch.setattr(sys, "argv", words)
    code = None
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    assert not code, f"{line!r} ends with exit code {code}"


def test_a_command_that_fails_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="ends with exit code 2"):
        _shell("kedge show scafold", monkeypatch)


@pytest.mark.parametrize(("page", "name"), [("CONTRIBUTING.md", "Tow")])
@pytest.mark.parametrize("beside", ["fedavg", "fedper", "scaffold+fedbn"])
def test_the_proximal_parts_of_the_pages_are_fedprox(
    page: str, name: str, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also beside parts that keep leaves on the clients: those are not held."""
    text = (ROOT / page).read_text()
    code = re.search(rf"^```python\n(from [^`]*?class {name}\b.*?)\n\n\n", text, re.M | re.S)
    assert code is not None
    with _new_parts():
        sims = [
            images(norm="bn").simulate(parse(beside) + part(mu=0.5))
            for part in (parts["fedprox"], _executed(code[1], monkeypatch)[name])
        ]
        for sim in sims:
            sim.run_round()
            sim.run_round()
    assert tree.equal(sims[0].weights, sims[1].weights)
    assert tree.equal(sims[0].personal(), sims[1].personal())


def test_pages_speak_of_the_project_alone() -> None:
    folders = ("src", "tests", "tools")
    for page in [*PAGES, *(path for f in folders for path in ROOT.glob(f"{f}/**/*.py"))]:
        if page == Path(__file__):
            continue
        text = page.read_text()
        for word in ("shared/", "/work/", "issue #"):
            assert word not in text, f"{page.name} mentions {word}"
