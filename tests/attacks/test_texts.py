"""Texts of a stranger's run on pages, in tables and in files: they end nothing, and say nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import kedge
from kedge.board.app import Board
from kedge.report.mathtext import plain_doc
from kedge.report.page import html_doc
from tests.cli.commands import Done, kedge_command

HALF = "\ud800"  # half a character, which no encoding writes
SCRIPT = "<img src=x onerror=alert(1)>"
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("texts") / "run"
    kedge.run(clients=3, rounds=2, seeds=[0], steps=1, engine="loop", out=out)
    kedge.diagnose(out, what=["data"])
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def change(file: Path, make: Change) -> None:
    """Change the JSON in a file."""
    found = json.loads(file.read_text())
    make(found)
    file.write_text(json.dumps(found))


def sound(done: Done) -> bool:
    """Whether a command ended with an answer, or with a sentence for the user."""
    return done.returncode in (0, 2) and "should not happen" not in done.stderr


PLACES: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "name of a part": ("run.json", lambda f, text: f["parts"][0].update(name=text)),
    "docstring": ("run.json", lambda f, text: f["parts"][0].update(doc=f"{text}.\n\n{text}")),
    "formula": ("run.json", lambda f, text: f["parts"][0].update(doc=f":math:`{text}`\n\nx")),
    "uploads": ("run.json", lambda f, text: f["parts"][0].update(uploads=text, sends=text)),
    "metric": ("run.json", lambda f, text: f["metrics"][0].update(title=text, unit=text)),
    "client": ("seed-0/clients.json", lambda f, text: f["names"].__setitem__(0, text)),
    "class": ("seed-0/clients.json", lambda f, text: f["classes"].__setitem__(0, text)),
    "environment": ("environment.json", lambda f, text: f.update(device=text)),
    "key": ("environment.json", lambda f, text: f.update({text: 1})),
    "diagnosis": ("diagnosis/data.json", lambda f, text: f.update(title=text, findings=[text])),
    "chart": ("diagnosis/data.json", lambda f, text: f["charts"][0].update(title=text, x=text)),
    "cell": ("diagnosis/data.json", lambda f, text: f["tables"][0]["rows"][0].__setitem__(0, text)),
}


@pytest.mark.parametrize("text", [HALF, SCRIPT, r"\frac", r"\frac{a", "\x1b]0;x\x07"])
@pytest.mark.parametrize("place", PLACES)
def test_a_text_of_a_run_is_a_text_on_its_page(
    place: str, text: str, run: Path, tmp_path: Path
) -> None:
    file, put = PLACES[place]
    change(run / file, lambda found: put(found, text))
    page = tmp_path / "page.html"
    done = kedge_command("report", str(run), "-o", str(page), "--csv", str(tmp_path / "t.csv"))
    assert sound(done), done.stderr
    assert SCRIPT not in page.read_text()
    assert "\x1b]" not in done.stdout + done.stderr
    done = kedge_command("report", str(run), "--json", str(tmp_path / "report.json"))
    assert sound(done), done.stderr


def test_half_a_character_does_not_stop_the_board(run: Path) -> None:
    change(run / "seed-0/clients.json", lambda found: found["names"].__setitem__(0, HALF))
    board = Board(run.parent, "127.0.0.1", 8765)
    client = TestClient(board.app, base_url="http://127.0.0.1:8765")
    assert client.get(f"/?token={board.token}").status_code == 200
    [row] = client.get("/runs").json()["rows"]
    answer = client.get(f"/report?ids={row['id']}")
    assert answer.status_code == 200
    assert r"\ud800" in answer.text


def test_half_a_character_as_a_class_of_a_bundle(run: Path, tmp_path: Path) -> None:
    change(run / "bundle.json", lambda found: found.update(classes=[HALF, *map(str, range(1, 10))]))
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.uint8))
    for command in ("predict", "evaluate"):
        data = [str(tmp_path / "x.npy")] if command == "predict" else []
        assert sound(done := kedge_command(command, str(run), *data)), done.stderr
    out = tmp_path / "out.csv"
    done = kedge_command("predict", str(run), str(tmp_path / "x.npy"), "-o", str(out))
    assert sound(done), done.stderr


@pytest.mark.parametrize("tex", [r"\frac", r"\frac{a", r"\frac{a}", "{" * 9, "_{" * 99, r"\hat"])
def test_formulas_that_are_none(tex: str) -> None:
    assert plain_doc(f"the :math:`{tex}` of it")
    assert html_doc(f":math:`{tex}`")


@pytest.mark.parametrize("depth", [200, 400, 700, 900, 1000, 5000])
def test_deep_formulas(depth: int) -> None:
    assert html_doc(":math:`" + "{" * depth + "}" * depth + "`")


@pytest.mark.parametrize("kind", [["compare"], {}, None, 3, True])
def test_an_experiment_of_no_kind(kind: Any, run: Path, tmp_path: Path) -> None:
    rows = {"format": 1, "kind": kind, "runs": [{"folder": "run", "name": "a", "yardstick": ""}]}
    (run.parent / "experiment.json").write_text(json.dumps(rows))
    done = kedge_command("report", str(run.parent), "-o", str(tmp_path / "page.html"))
    assert sound(done), done.stderr
