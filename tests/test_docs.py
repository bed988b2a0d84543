"""Every code block in the README and the docs runs, and tables in them are up to date."""

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
from kedge.cli.display import methods_markdown
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import parts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(kind, code, id=f"{page.relative_to(ROOT).as_posix()}-{i}")
    for page in PAGES
    for i, (kind, code) in enumerate(
        re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_code_block_runs(
    kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = io.StringIO()
    with _new_parts(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        if kind == "python":
            _executed(code, monkeypatch)
        for line in code.splitlines() if kind == "sh" else []:
            _shell(line, monkeypatch)


@contextlib.contextmanager
def _new_parts() -> Iterator[None]:
    """Parts registered inside are removed in the end."""
    known = set(parts)
    try:
        yield
    finally:
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


def test_the_table_of_methods_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    table = re.search(r"<!-- methods:.*?-->\n(.*?)<!-- end of methods -->", text, re.DOTALL)
    assert table is not None
    assert table[1].strip() == methods_markdown(), "run: make readme"


def test_the_own_method_of_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    code = re.search(r"## Your own method.*?```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert len(code[1].strip().splitlines()) <= 25


@pytest.mark.parametrize(("page", "name"), [("README.md", "Tether"), ("CONTRIBUTING.md", "Tow")])
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
