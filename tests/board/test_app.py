"""What the board answers: curves, tables, notes, stop, commands."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import kedge
from kedge.board.app import Board
from kedge.board.panel import LOGGERS
from kedge.core.method import parse
from kedge.core.metrics import BUILT_IN
from kedge.core.part import parts
from kedge.core.task import make_task, tasks
from kedge.history import metric
from kedge.history.compare import gain_over
from kedge.history.folder import METRICS, read_records
from kedge.history.metric import MetricInfo
from kedge.loggers.host import KNOWN as KNOWN_LOGGERS
from kedge.runs.result import Result
from kedge.settings import Config

ADDRESS = "http://127.0.0.1:8765"


class Page:
    """A page that has the token."""

    def __init__(self, folder: Path) -> None:
        self.board = Board(folder, "127.0.0.1", 8765)
        self.client = TestClient(self.board.app, base_url=ADDRESS)
        assert self.client.get(f"/?token={self.board.token}").status_code == 200

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        headers = {"Origin": ADDRESS, "X-Kedge-Key": self.board.key}
        answer = self.client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def ids(self) -> dict[str, str]:
        return {row["name"]: row["id"] for row in self.get("/runs")["rows"]}


@pytest.fixture
def page(runs: Path) -> Page:
    return Page(runs)


def records(run: Path, seed: int) -> list[dict[str, Any]]:
    return read_records(run / f"seed-{seed}" / METRICS)


def test_the_tables_of_names_are_those_of_the_library() -> None:
    found = {m.name: MetricInfo.of(m) for group in BUILT_IN.values() for m in group}
    assert found == metric.KNOWN
    built_in = ("classification", "multilabel", "regression")
    assert tuple(tasks[name].metrics[0].name for name in built_in) == metric.HEADLINES
    personal = {n for n in parts if n in KNOWN and parse(n).personal_model}
    assert personal == metric.PERSONAL_PARTS


KNOWN = set(parts)  # before other tests register their own


def test_curves_are_the_records(page: Page, runs: Path) -> None:
    name = page.ids()["both/scaffold"]
    found = page.get(f"/run/{name}/curves?column=accuracy")
    for seed, curve in zip((0, 1), found["seeds"], strict=True):
        rows = records(runs / "both/scaffold", seed)
        assert curve["round"] == [1, 2, 3, 4]
        np.testing.assert_allclose(curve["value"], [r["accuracy"] for r in rows], rtol=1e-5)
        mb = np.cumsum([r["mb_up"] + r["mb_down"] for r in rows])
        np.testing.assert_allclose(curve["mb"], mb, rtol=1e-5)
        seconds = np.cumsum([r["seconds"] for r in rows])
        np.testing.assert_allclose(curve["seconds"], seconds, rtol=1e-5)
    rest = page.get(f"/run/{name}/curves?column=accuracy&after=3,4&epoch={found['epoch']}")
    assert [seed["round"] for seed in rest["seeds"]] == [[4], []]
    other = page.get(f"/run/{name}/curves?column=accuracy&after=3,4&epoch=99")
    assert [seed["start"] for seed in other["seeds"]] == [0, 0]
    page.get(f"/run/{name}/curves?after=x", 400)
    page.get(f"/run/{name}/curves?after=-1", 400)


def test_the_table_is_that_of_a_comparison(page: Page, runs: Path) -> None:
    """The same gain as `kedge compare` prints, seed by seed."""
    ids = page.ids()
    first, second = (
        Result.of(
            Config(seeds=(0, 1), rounds=4),
            [records(runs / f"both/{name}", seed) for seed in (0, 1)],
            make_task("classification", 10),
            "global",
        )
        for name in ("fedavg", "scaffold")
    )
    found = page.get(f"/table?ids={ids['both/fedavg']},{ids['both/scaffold']}")
    assert (found["round"], found["seeds"]) == (None, [0, 1])  # all have ended
    [base, row] = found["rows"]
    assert (base["mean"], base["sd"]) == pytest.approx((first.last.mean, first.last.sd))
    gain = gain_over(second, first)
    assert gain is not None
    assert row["gain"] == pytest.approx(gain.mean)
    low, high = gain.low, gain.high
    assert (row["low"], row["high"]) == pytest.approx((low, high))
    assert row["holm"] == row["p"]  # one comparison needs no correction
    assert {one["key"] for one in found["settings"]} == {"method"}
    back = page.get(f"/table?ids={ids['both/scaffold']},{ids['both/fedavg']}")
    assert back["rows"][1]["gain"] == pytest.approx(-row["gain"])


def test_while_a_run_trains_the_table_is_of_the_last_round_that_all_have(
    page: Page, runs: Path, holder: subprocess.Popen[str]
) -> None:
    path = runs / "both/fedavg/seed-1/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    (runs / "both/fedavg/result.json").unlink()
    ids = page.ids()
    found = page.get(f"/table?ids={ids['both/fedavg']},{ids['both/scaffold']}")
    assert (found["round"], found["rows"][1]["n"]) == (2, 2)
    for name, row in zip(("fedavg", "scaffold"), found["rows"], strict=True):
        values = [records(runs / f"both/{name}", seed)[1]["accuracy"] for seed in (0, 1)]
        assert row["mean"] == pytest.approx(sum(values) / 2)
    assert found["rows"][1]["gain"] is not None


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("config.toml", "seeds = [0, 1]", "seeds = [2, 3]", "no seed in common"),
        ("environment.json", '"data": "', '"data": "x', "the data have changed in between"),
        ("seed-1/partition.json", '"hash": "', '"hash": "a', "other partitions"),
    ],
)
def test_a_table_says_why_runs_cannot_be_compared(
    page: Page, runs: Path, file: str, old: str, new: str, why: str
) -> None:
    path = runs / "both/scaffold" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path.parent)
    ids = page.ids()
    found = page.get(f"/table?ids={ids['both/fedavg']},{ids['both/scaffold']}")
    assert found["rows"][1]["why"] == why
    assert "gain" not in found["rows"][1]


def test_runs_on_other_data_are_not_compared(page: Page, runs: Path) -> None:
    folder = runs / "both/scaffold"
    for file, old, new in (
        ("config.toml", 'data = "digits"', 'data = "other"'),
        ("environment.json", '"data": "', '"data": "x'),
    ):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    os.utime(folder)
    ids = page.ids()
    row = page.get(f"/table?ids={ids['both/fedavg']},{ids['both/scaffold']}")["rows"][1]
    assert row["why"] == "other data"
    assert "gain" not in row


def test_notes_are_kept_in_the_folder_of_the_run(page: Page, runs: Path) -> None:
    name = page.ids()["both/fedavg"]
    body = {"tags": [" best  of all", "b", "b", ""], "note": "a\nb <b>"}
    row = page.post(f"/run/{name}/notes", body)["row"]
    assert (row["tags"], row["note"]) == (["best of all", "b"], "a\nb <b>")
    kept = json.loads((runs / "both/fedavg/notes.json").read_text())
    assert kept == {"format": 1, "tags": ["best of all", "b"], "note": "a\nb <b>"}
    assert not list((runs / "both/fedavg").glob(".*.part"))
    for wrong in ({"tags": "x", "note": ""}, {"tags": [1], "note": ""}, {"tags": [], "note": 3}):
        page.post(f"/run/{name}/notes", wrong, 400)
    page.post(f"/run/{name}/notes", {"tags": ["x" * 41], "note": ""}, 400)
    page.post(f"/run/{name}/notes", [1], 400)
    page.post(f"/run/{name}/notes", {"tags": [], "note": "x" * 70_000}, 413)
    assert json.loads((runs / "both/fedavg/notes.json").read_text()) == kept


def test_notes_replace_a_link_and_do_not_write_through_it(
    page: Page, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("mine")
    (runs / "both/fedavg/notes.json").symlink_to(tmp_path / "precious")
    name = page.ids()["both/fedavg"]
    page.post(f"/run/{name}/notes", {"tags": [], "note": "x"})
    assert (tmp_path / "precious").read_text() == "mine"


def test_only_a_run_that_trains_can_be_stopped(page: Page, runs: Path) -> None:
    name = page.ids()["both/fedavg"]
    assert page.post(f"/run/{name}/stop", status=409)["error"] == "this run does not train"
    assert not (runs / "both/fedavg/stop").exists()


def test_commands_repeat_and_resume(page: Page, runs: Path) -> None:
    shutil.copytree(runs / "both/fedavg", runs / "it's a run")
    (runs / "it's a run/result.json").unlink()
    for seed in (0, 1):
        (runs / f"it's a run/seed-{seed}/metrics.jsonl").write_text("")
    environment = runs / "it's a run/environment.json"
    loaded = json.loads(environment.read_text()) | {"loaded": [{"path": "/a b.py", "sha256": ""}]}
    environment.write_text(json.dumps(loaded))
    nested = runs / "out/.runs/paper/table1/fedavg.seed3.quick"
    shutil.copytree(runs / "both/fedavg", nested)
    ids = page.ids()
    path = runs / "it's a run"
    found = page.get(f"/run/{ids[path.name]}")["commands"]
    assert shlex.split(found["repeat"]) == [
        "kedge", "run", str(path / "config.toml"), "--load", "/a b.py",
    ]  # fmt: skip
    words = ["kedge", "run", "--out", str(path), "--resume", "--load", "/a b.py"]
    assert shlex.split(found["resume"]) == words
    (path / "federation.json").write_text("{}")  # its clients were members of a federation
    page.ids()
    found = page.get(f"/run/{ids[path.name]}")["commands"]
    assert found["repeat"].startswith("kedge flower run '")
    assert shlex.split(found["resume"]) == ["kedge", "flower", *words[1:]]
    found = page.get(f"/run/{ids['both/fedavg']}")["commands"]
    assert set(found) == {"repeat"}
    (runs / "both/fedavg/result.json").unlink()
    (runs / "both/fedavg/seed-1/metrics.jsonl").write_text("")
    (runs / "both/fedavg/log-csv").mkdir()
    (runs / "both/fedavg/log-wandb").mkdir()
    page.ids()
    found = page.get(f"/run/{ids['both/fedavg']}")["commands"]
    assert found["resume"] == shlex.join(
        ["kedge", "compare", "--out", str(runs / "both"), "--resume", "--log", "csv,wandb"]
    )
    assert set(LOGGERS) == set(KNOWN_LOGGERS)
    found = page.get(f"/run/{ids['out/.runs/paper/table1/fedavg.seed3.quick']}")["commands"]
    assert shlex.split(found["repeat"]) == [
        "kedge", "reproduce", "paper/table1", "--rows", "fedavg", "--seeds", "3",
        "--scale", "quick", "--results", str(runs / "out"),
    ]  # fmt: skip


def test_the_command_that_repeats_a_run_does(page: Page, runs: Path) -> None:
    found = page.get(f"/run/{page.ids()['both/scaffold']}")["commands"]["repeat"]
    again = kedge.run(config=shlex.split(found)[2])
    before = [[r["accuracy"] for r in records(runs / "both/scaffold", s)] for s in (0, 1)]
    assert again.array().tolist() == before


def test_sparks_are_read_when_asked_for(page: Page, runs: Path) -> None:
    ids = page.ids()
    assert all(row["spark"] is None for row in page.get("/runs")["rows"])
    found = page.get(f"/sparks?ids={ids['both/fedavg']}")
    values = [r["accuracy"] for r in records(runs / "both/fedavg", 0)]
    np.testing.assert_allclose(found[ids["both/fedavg"]], values, rtol=1e-4)


def test_events_tell_all_runs_then_what_changes(runs: Path) -> None:
    board = Board(runs)
    board.live.period = 0.01

    async def listen() -> list[tuple[str, Any]]:
        stream, found = board.live.stream(), []
        async for message in stream:
            kind, data = message.decode().strip().split("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if len(found) == 1:
                shutil.copytree(runs / "both/fedavg", runs / "new")
            elif len(found) >= 2 and found[-1][1]["gone"]:
                break
            elif found[-1][1]["rows"][0]["state"] == "finished":
                shutil.rmtree(runs / "new")
        await stream.aclose()
        return found

    (first, everything), *rest = asyncio.run(asyncio.wait_for(listen(), 20))
    assert (first, len(everything["rows"])) == ("all", 2)
    assert {kind for kind, _ in rest} == {"change"}
    assert rest[0][1]["rows"][0]["name"] == "new"
    assert rest[-1][1]["gone"] == [rest[0][1]["rows"][0]["id"]]
    assert board.live._task is None  # without a page nothing is looked at


def test_a_report_is_made_when_asked_for(page: Page, runs: Path) -> None:
    ids = page.ids()
    answer = page.client.get(f"/report?ids={ids['both/fedavg']},{ids['both/scaffold']}")
    assert answer.status_code == 200
    assert "scaffold" in answer.text
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts ")  # without the origin of the board
    assert "allow-same-origin" not in policy
    assert page.client.get("/report?ids=").status_code == 404


def test_a_report_follows_no_links_and_may_fail(page: Page, runs: Path, tmp_path: Path) -> None:
    name = page.ids()["both/fedavg"]
    shutil.move(runs / "both/fedavg/seed-0", tmp_path / "outside")
    (runs / "both/fedavg/seed-0").symlink_to(tmp_path / "outside")
    assert page.get(f"/report?ids={name}", 409)["error"] == "there is no report: a folder has links"
    (runs / "both/fedavg/seed-0").unlink()
    shutil.rmtree(runs / "both/fedavg/seed-1")
    assert page.get(f"/report?ids={name}", 409)["error"].startswith("there is no report: ")


def test_an_unknown_run_is_not_there(page: Page) -> None:
    for path in ("/run/0123456789abcdef", "/run/x/curves", "/table?ids=x", "/sparks?ids="):
        page.get(path, 404)
    page.post("/run/0123456789abcdef/stop", status=404)
    page.post("/run/0123456789abcdef/notes", {"tags": [], "note": ""}, 404)
    many = ",".join(f"{i:016x}" for i in range(60))
    page.get(f"/table?ids={many}", 400)
