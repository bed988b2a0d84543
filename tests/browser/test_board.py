"""The board in a real browser: runs watched live, killed, stopped, resumed, listed, compared."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge

pytestmark = [pytest.mark.browser, pytest.mark.long]
pytest.importorskip("starlette", reason="the extra board is not installed")
Start = Callable[..., subprocess.Popen[str]]
ENVIRONMENT = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
KEDGE = [sys.executable, "-m", "kedge"]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(*words)``: a command of kedge in a process of its own, killed at the end."""
    processes = []

    def start_one(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*KEDGE, *words], cwd=cwd, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def board(start: Start, tmp_path: Path, open_page: Any) -> Callable[..., Any]:
    """``board(width=, dark=)``: the page of a board over ``runs`` in the test's own folder."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    process = start("board", "runs", "--port", "0", "--no-browser", cwd=tmp_path)
    assert process.stdout is not None
    found = re.search(r"(http://[^/]+)/\S*", process.stdout.readline())
    assert found is not None

    def open_board(**options: Any) -> Any:
        page = open_page(found[0], allowed=(found[1],), **options)
        page.set_default_timeout(60_000)
        page.wait_for_selector("#connection.on")
        return page

    return open_board


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    kedge.compare(
        ["fedavg", "scaffold"], out=folder / "both", rounds=8, seeds=[0, 1], clients=4,
        engine="loop", model="mlp(hidden=[8])",
    )  # fmt: skip
    return folder


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Wait for something to hold; the page's policy allows no script to wait inside it."""
    for _ in range(1200):
        if condition():
            return
        page.wait_for_timeout(50)
    assert condition()


def count(page: Any, selector: str, wanted: int) -> None:
    until(page, lambda: page.locator(selector).count() == wanted)


def state(page: Any, name: str) -> Any:
    return page.locator("#rows tr", has_text=name).locator("td.status")


def rounds(page: Any) -> int:
    return int(page.locator("#rows td.progress .rounds").inner_text().split("/")[0])


def shown_values(page: Any) -> list[float]:
    return [float(text.split()[0]) for text in page.locator("#rows .value").all_inner_texts()]


def wait_for_state(page: Any, name: str, wanted: str) -> None:
    state(page, name).get_by_text(wanted, exact=True).wait_for()


def test_a_run_is_watched_from_its_start_to_its_end(
    start: Start, board: Any, tmp_path: Path
) -> None:
    page = board()
    page.get_by_text("No runs in runs yet").wait_for()
    words = ["--seeds", "0,1", "--out", "runs/live", "--engine", "vector", "--rounds", "120"]
    process = start("run", *words, "--no-report", cwd=tmp_path)
    page.locator("#rows tr").wait_for()
    page.click("#rows a")
    page.wait_for_selector("#chart g[aria-label=line] path", state="attached")
    wait_for_state(page, "live", "finished")
    assert process.wait(60) == 0
    page.get_by_text("It is complete.").wait_for()
    assert page.locator("#rows .rounds").inner_text() == "120/120"
    assert re.fullmatch(r"\d\d\.\d\d ± \d+\.\d\d %", page.locator("#rows .value").inner_text())
    assert page.locator("#stop").count() == 0
    longest = "Math.max(...[...document.querySelectorAll('#chart path')].map(p => "
    assert page.evaluate(longest + "p.getAttribute('d')?.split('L').length ?? 0))") == 120


def test_a_run_is_killed_resumed_stopped_from_the_page(
    start: Start, board: Any, tmp_path: Path
) -> None:
    """It was started before the page was opened, by another process."""
    words = ["--rounds", "100000", "--seeds", "0", "--out", "runs/long", "--engine", "vector"]
    process = start("run", *words, "--clients", "4", cwd=tmp_path)
    page = board()
    wait_for_state(page, "long", "training")
    page.click("#rows a")
    page.wait_for_selector("#chart g[aria-label=line] path", state="attached")
    first = max(5, rounds(page))
    until(page, lambda: rounds(page) > first)
    until(page, lambda: page.locator("#rows .eta").inner_text().startswith("ETA "))
    assert page.locator("#rows td.curve svg path").count() == 1
    page.get_by_text("It is training.").wait_for()
    process.send_signal(signal.SIGKILL)
    wait_for_state(page, "long", "killed")
    page.get_by_text("Its process was killed after round").wait_for()
    before = rounds(page)
    command = page.locator(".command", has_text="Resume it").locator("code").inner_text()
    assert command == "kedge run --out runs/long --resume"
    again = start(*shlex.split(command)[1:], cwd=tmp_path)
    wait_for_state(page, "long", "training")
    until(page, lambda: rounds(page) > before)
    page.click("#stop")
    page.get_by_role("button", name="Stop after this round?").click()
    wait_for_state(page, "long", "interrupted")
    page.get_by_text("It was interrupted after round").wait_for()
    assert again.wait(60) == 130
    assert not (tmp_path / "runs/long/stop").exists()
    at = rounds(page)
    lines = (tmp_path / "runs/long/seed-0/metrics.jsonl").read_text().splitlines()
    assert len(lines) == at > before
    assert page.locator("#stop").count() == 0


def test_runs_are_filtered_sorted_and_compared(board: Any, compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "both", tmp_path / "runs/both")
    page = board()
    rows = page.locator("#rows tr")
    rows.nth(1).wait_for()
    page.fill("#search", "scaf")
    count(page, "#rows tr", 1)
    page.fill("#search", "")
    count(page, "#rows tr", 2)
    page.select_option("#method", "fedavg")
    count(page, "#rows tr", 1)
    page.select_option("#method", "")
    page.get_by_role("button", name="finished 2").click()
    count(page, "#rows tr", 2)
    page.get_by_role("button", name="Result").click()
    page.wait_for_selector("th.last[aria-sort=descending]")
    values = sorted(shown_values(page), reverse=True)
    until(page, lambda: shown_values(page) == values)
    page.get_by_role("button", name="Result").click()
    page.wait_for_selector("th.last[aria-sort=ascending]")
    until(page, lambda: shown_values(page) == values[::-1])
    # by keyboard: the box of each run
    for i in range(2):
        rows.nth(i).locator("input").focus()
        page.keyboard.press("Space")
    page.get_by_role("heading", name="2 runs compared").wait_for()
    page.wait_for_selector("#table tbody tr")
    cells = page.locator("#table tbody tr").nth(1).locator("td").all_inner_texts()
    best, base = values
    assert cells[0].startswith(f"{best:.2f} ±")
    assert float(cells[2].split()[0].replace("−", "-")) == pytest.approx(best - base, abs=0.011)
    lines = page.locator("#chart g[aria-label=line] path")
    assert lines.count() == 6  # two means, four seeds
    box = page.locator("#chart svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    tip = page.locator("#chart g[aria-label=tip] text").first
    tip.wait_for()
    assert re.search(r"accuracy \d+\.\d\d ± \d+\.\d\d \(n = 2\).*round \d", tip.text_content())
    page.locator("#legend .entry button").first.click()
    count(page, "#chart g[aria-label=line] path", 3)
    page.uncheck("#chart-seeds")
    count(page, "#chart g[aria-label=line] path", 1)
    page.select_option("#chart-x", "mb")
    page.locator("#chart", has_text="MB sent").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Open report").click()
    problems: list[str] = []
    opened.value.on("console", lambda line: problems.append(line.text))
    opened.value.on("pageerror", lambda error: problems.append(str(error)))
    opened.value.locator("h1").wait_for()
    opened.value.locator("svg").first.wait_for()
    assert not problems
    opened.value.close()
    page.keyboard.press("Escape")
    page.locator("#panel").wait_for(state="hidden")
    page.go_back()
    page.get_by_role("heading", name="2 runs compared").wait_for()


def test_tags_and_notes_are_written_and_names_do_no_harm(
    board: Any, compared: Path, tmp_path: Path
) -> None:
    name = "<img src=x onerror=alert(1)>"
    shutil.copytree(compared / "both/fedavg", tmp_path / "runs" / name)
    settings = tmp_path / "runs" / name / "config.toml"
    hostile = "<b onmouseover=alert(2)>fedavg</b>"
    settings.write_text(settings.read_text().replace('"fedavg"', f'"{hostile}"'))
    page = board(width=390, height=844, dark=True)
    page.on("dialog", lambda dialog: pytest.fail("a name was run as a script"))
    page.locator("#rows a").wait_for()
    assert page.locator("#rows a").inner_text() == name
    assert page.locator("td.method").inner_text() == hostile
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#rows a")
    page.get_by_role("heading", name=name).wait_for()
    assert page.locator("#list").is_hidden()
    wait = "new Promise((done) => setTimeout(done, 400))"  # so the note is begun before the answer
    slow = f"window.fetch = (...a) => {wait}.then(() => f(...a))"
    page.evaluate(f"() => {{ const f = fetch; {slow} }}")
    page.fill("#new-tag", "<i>best</i>")
    page.keyboard.press("Enter")
    page.fill("#note", "a <script>alert(3)</script> note")
    notes = tmp_path / "runs" / name / "notes.json"
    until(page, lambda: notes.exists() and "alert(3)" in notes.read_text())
    assert '"tags": ["<i>best</i>"]' in notes.read_text()
    page.wait_for_selector("#chart svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("img").count() == 1  # the board's own
    page.click(".close")
    page.locator("#rows .tag", has_text="<i>best</i>").wait_for()
    assert "token" not in page.url
