"""The examples in docstrings run and print what they say; the site shows them."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import kedge
from kedge.core.part import parts

ROOT = Path(__file__).parents[1]
EXTRAS = {"flwr", "triton", "zensical", "griffe", "starlette", "onnx", "datasets", "transformers"}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [
    module_name(path)
    for folder in ("src/kedge", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"{error.name} is not installed")
    monkeypatch.chdir(tmp_path)
    found = [t for t in doctest.DocTestFinder().find(module) if t.examples]
    runner, report = doctest.DocTestRunner(optionflags=FLAGS), []
    known = set(parts)
    for one in found:
        one.globs.setdefault("kedge", kedge)
        runner.run(one, out=report.append)
    for new in set(parts) - known:  # an example registers a part
        parts.remove(new)
    assert not runner.failures, "".join(report)


def test_examples_are_found() -> None:
    assert len(MODULES) > 50
