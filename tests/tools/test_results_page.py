"""The page of results says what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools.results.facts import Facts
from tools.results.figure import draw_curves
from tools.results.page import PAGES, at_best_rate, markdown, render, source

from kedge.reproduction import recipes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_records_say(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == render(RESULTS, draw=False, template=PAGES[name]), "run make results"


@pytest.mark.parametrize("template", PAGES.values())
def test_no_measured_number_is_typed(template: str) -> None:
    """Measurements have decimals or signs; settings and thresholds in sentences are whole."""
    text = (RESULTS / template).read_text(encoding="utf-8")
    prose = re.sub(r"\{[{%#].*?[}%#]\}|```.*?```|`.*?`", "", text, flags=re.S)
    assert not re.findall(r"\d\.\d|[+-]\d", prose)


def test_every_record_counts_or_is_set_aside() -> None:
    for name in recipes.all_names():
        assert Facts(name, RESULTS).left_out == []


def test_every_figure_is_there() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    figures = re.findall(r"\]\((results/[\w/]+\.svg)\)", page)
    assert figures
    for name in figures:
        assert (ROOT / "docs" / name).read_text(encoding="utf-8").startswith("<?xml")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two seeds of two rows of a real table, with curves made up for the test."""
    values = {("fedavg", 0): [10, 20, 30], ("fedavg", 1): [10, 40, 30]}
    values |= {("fedimpro", 0): [10, 25, 40], ("fedimpro", 1): [10, 30, 42]}
    table = recipes.read("fedimpro/table1").at("full")
    for (row, seed), curve in values.items():
        config = table.row(row).config(seed)
        record = json.loads((RESULTS / f"fedimpro/table1/{row}.seed0.full.json").read_text())
        record |= {
            "seed": seed, "rounds_done": 30, "rounds": config.rounds, "note": "",
            "curve": [[10 * (i + 1), v, 1.0] for i, v in enumerate(curve)],
            "partition_hash": f"of seed {seed}",
        }  # fmt: skip
        path = tmp_path / f"fedimpro/table1/{row}.seed{seed}.full.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return tmp_path


def test_statistics_by_hand(results: Path) -> None:
    of = Facts("fedimpro/table1", results)
    assert of.left_out == []
    # best of three tests: 30 and 40 against 40 and 42; the gains are 10 and 2
    assert of.value("fedavg") == 35
    assert of.value("fedimpro") == 41
    assert of.value("fedimpro", "gain") == 6
    # all tests are among the last ten: means 20, 26.67 against 25, 27.33
    assert of.value("fedimpro", "tail_gain") == pytest.approx((5 + 2 / 3) / 2)
    # equal at first: tests count from the first difference on, two of each seed; 30 < 40 is behind
    assert of.ahead("fedimpro") == (3, 4)
    assert of.mean("fedimpro", 20, 30) == pytest.approx((25 + 40 + 30 + 42) / 4)
    assert of.verdict("fedimpro") == "ahead in every seed"  # the interval of two seeds is wide


def test_a_table_shows_what_ran_and_names_what_did_not(results: Path) -> None:
    of = Facts("fedimpro/table1", results)
    text = markdown(of)
    row = next(line for line in text.splitlines() if line.startswith("| `fedimpro`"))
    assert row.split(" | ")[1:5] == ["88.5±0.4", "41.0±1.4", "-47.5", "26.2±1.6"]
    assert row.endswith("| 3 of 4 | 2 | 30 of 1000 |")
    assert "Not run yet: `fedprox`" in text
    assert "kedge reproduce fedimpro/table1" in source(of)


def test_verdicts(results: Path) -> None:
    path = results / "fedimpro/table1/fedimpro.seed1.full.json"
    path.unlink()
    assert Facts("fedimpro/table1", results).verdict("fedimpro") == "ahead in one seed"
    record = json.loads((results / "fedimpro/table1/fedimpro.seed0.full.json").read_text())
    record["curve"] = [[10, 10, 1.0], [20, 25, 1.0], [30, 20, 1.0]]
    (results / "fedimpro/table1/fedimpro.seed0.full.json").write_text(json.dumps(record))
    assert Facts("fedimpro/table1", results).verdict("fedimpro") == "level in one seed"
    assert Facts("fedimpro/table1", results).verdict("scaffold") == "not run"


def test_a_seed_that_is_behind_is_named_and_not_counted(results: Path) -> None:
    path = results / "fedimpro/table1/fedimpro.seed1.full.json"
    record = json.loads(path.read_text())
    record |= {"rounds_done": 20, "curve": record["curve"][:2]}
    path.write_text(json.dumps(record))
    of = Facts("fedimpro/table1", results)
    assert list(of.counted("fedimpro")) == [0]
    assert of.ahead("fedimpro") == (2, 2)
    assert "not counted, since it has fewer rounds: seed 1 (20 rounds)" in source(of)


def test_the_best_rate_of_a_method() -> None:
    values = [("a", 0.1, 50.0), ("a", 0.1, 60.0), ("a", 0.2, 57.0), ("b", 0.1, 90.0)]
    runs = [{"table": "t", "method": m, "lr": lr, "mean_of_last": v} for m, lr, v in values]
    assert at_best_rate(runs, "t", "a") == 57.0


def test_a_figure_has_a_line_per_row_and_is_the_same_each_time(
    results: Path, tmp_path: Path
) -> None:
    of = Facts("fedimpro/table1", results)
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        draw_curves(of, path)
    first, again = (path.read_text(encoding="utf-8") for path in paths)
    assert first == again
    for name in ("fedavg", "fedimpro"):
        assert first.count(f">{name}</text>") == 1  # in the legend
    assert "fedprox" not in first  # it has no run
    draw_curves(of, paths[1], rows=["fedavg"])
    assert ">fedimpro</text>" not in paths[1].read_text(encoding="utf-8")
