"""The report in a real browser: what one sees, switches, hovers, sorts and takes away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kedge.history.sheet import Chart, Sheet, SheetTable, png_uri
from kedge.report.page import report
from tests.report.made import comparison, run_folder

pytestmark = [pytest.mark.browser, pytest.mark.long]
HOSTILE = "</script><img src=x onerror=console.error('owned')>"
PIXEL = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0\x1f\x15\xc4\x89\0\0\0\rIDATx"
    b"\x9cc\xf8\xcf\xc0\xf0\x1f\0\x05\0\x01\xff\xf8\x9f\x7f\x87\0\0\0\0IEND\xaeB`\x82"
)


def sheet() -> Sheet:
    """A diagnosis with charts of all kinds."""
    xs = [{"x": x, "y": x * x, "series": s} for s in ("a", "b") for x in range(5)]
    names = [{"x": f"layer {x}", "y": x + 0.5} for x in range(4)]
    cells = [{"x": f"c{x}", "y": f"k{y}", "value": x - y} for x in range(4) for y in range(3)]
    images = [
        {"image": png_uri(PIXEL), "caption": f"{row} {column}", "row": row, "column": column}
        for row in ("generated", "nearest")
        for column in ("1", "2")
    ]
    charts = [
        Chart("Divergence", "lines", xs, "round", "divergence"),
        Chart("Layers", "bars", names, "layer", "distance"),
        Chart("Both", "bars", [{**r, "x": str(r["x"])} for r in xs], "x", "y"),
        Chart("Cosines", "heatmap", cells, "client", "client", "cosine"),
        Chart("Embedding", "points", [{**r, "label": "dot"} for r in xs], "x", "y"),
        Chart("Images", "images", images),
    ]
    table = SheetTable("Numbers", ["name", "value"], [["a", 1.5], ["b", 2], ["c", None]])
    return Sheet("training", "Training", ["clients drift apart", "mostly late"], [table], charts)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs: dict[str, dict[str, Any]] = {
        "fedavg": {"values": {0: 80.0, 1: 84.0, 2: 82.0}},
        "scaffold": {"values": {0: 85.0, 1: 88.5, 2: 87.5}},
        HOSTILE: {"values": {0: 70.0, 1: 71.0, 2: 72.5}},
    }
    for arguments in runs.values():
        arguments |= {"classes": ["cat", HOSTILE, "eel"], "clients": [HOSTILE, "B", "C"]}
    comparison(folder, runs, pooled=True)
    (folder / "m0" / "diagnosis").mkdir()
    (folder / "m0" / "diagnosis" / "training.json").write_text(sheet().to_json())
    return report(folder, folder / "report.html")


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all(
        "table.results tbody th", "all => all.map(n => n.firstChild.nextSibling.textContent.trim())"
    )


def lines(page: Any) -> int:
    return page.locator('figure[data-draw="curves"] svg g[aria-label="line"] path').count()


def test_everything_is_drawn(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    figures = page.locator("figure.chart")
    assert figures.count() >= 10
    assert page.locator("figure.chart .plot svg").count() >= figures.count()
    assert "scaffold is best" in page.locator(".verdict .lead").first.inner_text()
    assert page.locator("article.sheet img").count() == 4
    assert page.evaluate("[...document.images].every(i => i.naturalWidth === 1)")
    assert page.locator("math").count() > 3


def test_methods_seeds_and_axes_are_switched(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    figure = page.locator('figure[data-draw="curves"]')
    assert lines(page) == 4
    figure.get_by_role("button", name="scaffold").click()
    assert lines(page) == 3
    assert "3 of 4 shown" in figure.locator(".note").inner_text()
    figure.get_by_role("button", name="none", exact=True).click()
    assert lines(page) == 0
    figure.get_by_role("button", name="all", exact=True).click()
    assert "mean of 3 seeds" in figure.locator(".note").inner_text()
    figure.get_by_role("button", name="seed 1").click()
    assert "mean of 2 seeds" in figure.locator(".note").inner_text()
    figure.get_by_role("button", name="each seed").click()
    assert lines(page) == 4 + 4 * 2
    for name in ("MB", "seconds"):
        figure.get_by_role("button", name=name).click()
        assert name in figure.locator(".plot").inner_text()
    figure.get_by_role("combobox").select_option("train_loss")
    assert "training loss" in figure.locator(".note").inner_text()
    page.locator('figure[data-draw="classes"]').get_by_role("button", name="gain over").click()
    page.locator('figure[data-draw="clients"]').get_by_role("button", name="accuracy").click()
    page.locator('figure[data-draw="partition"]').get_by_role("button", name="seed 2").click()
    assert "seed 2" in page.locator('figure[data-draw="partition"] .note').inner_text()


def test_hover_reads_the_value(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    plot = page.locator('figure[data-draw="curves"] svg').first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for part in (0.2, 0.35, 0.5):  # down the right edge until a curve is near
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + part * box["height"])
        text = page.locator('figure[data-draw="curves"] [aria-label="tip"]').text_content()
        if "round 10" in text:
            break
    assert "round 10" in text
    assert "±" in text
    assert "seed 0" in text


def test_the_table_is_sorted(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    original = names(page)
    head = page.locator("table.results thead th").nth(1)
    head.click()
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page)[0] == "pooled data"
    head.click()
    assert names(page)[0] == HOSTILE
    head.click()
    assert names(page) == original


def test_theme_is_toggled(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.locator("#theme").click()
    dark = page.evaluate(colour)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 26)")
    assert open_page(page_path, dark=True).evaluate(colour) == dark


@pytest.mark.parametrize("width", [390, 320, 768])
def test_narrow_pages_do_not_scroll_sideways(open_page: Any, page_path: Path, width: int) -> None:
    page = open_page(page_path, width=width)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_print(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path, dark=True)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_charts_are_taken_away(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    figure = page.locator('figure[data-draw="curves"]')
    with page.expect_download() as csv:
        figure.get_by_role("button", name="CSV").click()
    table = Path(csv.value.path()).read_text()
    assert table.startswith("method,round,x,accuracy,sd,n")
    assert "scaffold,10,10,87" in table
    with page.expect_download() as svg:
        figure.get_by_role("button", name="SVG").click()
    image = Path(svg.value.path()).read_text()
    assert image.startswith("<svg")
    assert "var(" not in image.split("</style>")[-1]


def test_the_command_is_copied(open_page: Any, page_path: Path) -> None:
    page = open_page(page_path)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("[data-copy]").first.click()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("kedge compare fedavg scaffold")


def test_sweeps_single_runs_and_unfinished_ones(open_page: Any, tmp_path: Path) -> None:
    rows = []
    for i, (lr, momentum) in enumerate([(0.1, 0.0), (0.1, 0.9), (0.3, 0.0), (0.3, 0.9)]):
        run_folder(tmp_path / f"s{i}", level=80.0 + i, settings={"lr": lr, "momentum": momentum})
        rows.append({"folder": f"s{i}", "values": {"lr": lr, "momentum": momentum}})
    (tmp_path / "sweep.json").write_text(json.dumps(rows))
    page = open_page(report(tmp_path, tmp_path / "sweep.html"))
    assert page.locator('figure[data-draw="objective"] g[aria-label="cell"] rect').count() == 5
    page = open_page(report(run_folder(tmp_path / "one", done=3, seeds=[4]), tmp_path / "one.html"))
    assert "has reached" in page.locator(".lead").inner_text()
    assert lines(page) == 1
