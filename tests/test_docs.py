"""Every code block in the README and the docs runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.site import commands

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


#: Pages with commands that no test runs, and why. Their names and options are checked all the same.
NOT_RUN = {
    "README.md": "the lesson runs these commands, on the folder that it makes",
    "docs/index.md": "the lesson runs these commands, on the folder that it makes",
    "docs/learn/quickstart.md": "installs kedge; the trial of the wheel does so (tools/release)",
    "docs/learn/deploying.md": "starts processes of Flower; tests/flower/real does so",
    "docs/deploy.md": "starts processes of Flower on several machines; tests/flower/real does so",
    "docs/migrate/flower.md": "starts processes of Flower; tests/flower/real does so",
    "docs/migrate/fl-bench.md": "CIFAR-10, 100 rounds; the page runs the same on digits",
    "docs/migrate/pfllib.md": "MNIST, 100 rounds; the page runs the same on digits",
    "docs/board.md": "a server that runs until it is stopped; tests/board starts it",
    "docs/loggers.md": "needs the extra tensorboard; tests/loggers has it",
    "docs/models.md": "needs a pretrained model; tests/models has a small one",
    "docs/understand/threat-model.md": "RUN stands for a folder; the guide on privacy runs it",
}
FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def _commands(text: str) -> list[list[str]]:
    """The words of the lines that call kedge, without comments; \\ continues a line."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(x, comments=True)[1:] for x in lines if x.strip().startswith("kedge ")]


def _options(words: list[str]) -> set[str]:
    """The options that a command takes; an error where there is no such command."""
    known = {command.name: command for command in commands.commands()}
    name = next((n for i in (3, 2, 1) if (n := " ".join(words[:i])) in known), None)
    assert name is not None, f"no command kedge {' '.join(words)}"
    return {one for p in known[name].parameters for flag in p.flags for one in flag.split("/")}


def _check_options(words: list[str]) -> None:
    if words[0] in ("--version", "--help"):
        return
    given = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
    assert given <= _options(words) | {"--help"}, f"kedge {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_are_not_run_have_a_reason_and_known_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ran = {code for _, _, code in _blocks(page)}
    left = [c for code in FENCE.findall(text) if code not in ran for c in _commands(code)]
    assert bool(left) == (str(page.relative_to(ROOT)) in NOT_RUN), left
    for words in left:
        _check_options(words)


def test_examples_of_commands_have_known_options() -> None:
    found = [words for c in commands.commands() for words in _commands("\n".join(c.examples))]
    assert len(found) > 30
    for words in found:
        _check_options(words)
    with pytest.raises(AssertionError, match="--sedes"):
        _check_options(["run", "--sedes", "0"])
    with pytest.raises(AssertionError, match="no command kedge rum"):
        _check_options(["rum", "--seeds", "0"])


def test_blocks_of_the_page_of_settings_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One experiment in three ways; the first line of the file has the command for it."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^    ```(\w+)\n(.*?)^    ```", commands.settings_page(), re.M | re.S)
    code = {kind: textwrap.dedent(text) for kind, text in blocks}
    assert set(code) == {"sh", "toml", "python"}
    Path("experiment.toml").write_text(code["toml"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _shell(code["sh"].strip(), monkeypatch)
        _shell(code["toml"].splitlines()[0].removeprefix("# "), monkeypatch)
        _executed(code["python"], monkeypatch)


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
