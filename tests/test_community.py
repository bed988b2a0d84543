"""The files for people and for GitHub: they parse, and what they name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kedge

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_calls_targets_that_exist(path: Path) -> None:
    found = [words for step in steps(path) for words in re.findall(r"make (\w+)", str(step))]
    assert found
    assert set(found) <= TARGETS
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
    assert read(path)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in read(path)["jobs"].values())


def test_ci_runs_what_people_run_on_every_python() -> None:
    ci = read(ROOT / ".github" / "workflows" / "ci.yml")
    assert {"check", "test", "long", "flower", "docs", "dist"} == set(ci["jobs"])
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c]
    assert named == PYTHONS
    local = (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"^make (\w+)", local, re.MULTILINE)) - {"install"} <= set(ci["jobs"])


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_an_issue_form_is_complete(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "labels", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert any(field.get("validations", {}).get("required") for field in fields)
    for field in fields:
        assert field["type"] in ("input", "textarea", "checkboxes", "dropdown")
        assert field["attributes"]["label"]


def test_hooks_run_what_is_installed_and_fetch_nothing() -> None:
    [repository] = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    checks = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        words = hook["entry"].split()
        assert words[0].startswith(".venv/bin/")
        assert words[0].replace(".venv/bin", "$(BIN)") in checks
        for word in words[1:]:
            assert not word.endswith(".py") or (ROOT / word).is_file()


def test_the_citation_has_the_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == kedge.__version__
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert {"title", "message", "authors", "date-released", "abstract", "type"} <= set(citation)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changes


def test_the_readme_fits_on_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 75
    [picture] = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    data = (ROOT / picture).read_bytes()  # PNG: the width and the height follow the header
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert height <= width / 2
    assert all(len(line) <= 95 for block in text.split("```")[1::2] for line in block.splitlines())


def test_contributing_fits_on_a_screen() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "name",
    ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "ROADMAP.md", "examples/README.md",
     "docs/community/developing.md", "docs/community/release.md",
     *(f"docs/migrate/{p.name}" for p in (ROOT / "docs" / "migrate").glob("*.md"))],
)  # fmt: skip
def test_links_lead_somewhere_and_targets_exist(name: str) -> None:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (path.parent / link).exists(), link
    assert set(re.findall(r"`make (\w+)", text)) <= TARGETS
    for file in re.findall(r"`((?:src/kedge|tests|tools|bench|\.ci)/[\w./]+)`", text):
        assert (ROOT / file).exists(), file
