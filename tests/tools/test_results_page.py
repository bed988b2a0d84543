"""The page of results says what the records say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tools.results.facts import Facts
from tools.results.figure import draw_curves
from tools.results.grand import grand_table, hold_in_all, leading, ordered, with_verdict
from tools.results.page import PAGES, at_best_rate, markdown, render, source

from kedge.history.run import Stat
from kedge.reproduction import recipes
from kedge.reproduction.recipes import settings_of
from kedge.reproduction.records import Record

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
    for values, verdict in (([-5.0, -0.5], "behind in every seed"), ([-5.0, 0.5], "level")):
        own = replace(of.summaries["fedimpro"], tail_gain=Stat.of(values))
        of.summaries["fedimpro"] = own
        assert of.verdict("fedimpro") == verdict


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


def test_a_seed_that_diverged_is_named_and_decides_the_verdict(results: Path) -> None:
    path = results / "fedimpro/table1/fedimpro.seed1.full.json"
    record = json.loads(path.read_text())
    record |= {"rounds_done": 20, "curve": record["curve"][:2], "diverged": "the loss is infinite"}
    path.write_text(json.dumps(record))
    of = Facts("fedimpro/table1", results)
    assert of.verdict("fedimpro") == "diverges in 1 of 2 seeds"
    # best tests 40 and 30 of both seeds; the gain is that of the seed that went to the end
    assert (of.value("fedimpro"), of.value("fedimpro", "gain")) == (35, 10)
    assert "`fedimpro`: the loss is not finite: seed 1 after round 20." in source(of)
    for seed in (0, 1):  # before the first test
        path = results / f"fedimpro/table1/fedimpro.seed{seed}.full.json"
        record = json.loads(path.read_text()) | {"rounds_done": 1, "curve": [], "diverged": "nan"}
        path.write_text(json.dumps(record))
    assert Facts("fedimpro/table1", results).verdict("fedimpro") == "diverges in 2 of 2 seeds"


def test_the_table_of_all_methods_is_ordered_by_gain(tmp_path: Path) -> None:
    name = "grand/small_organa"
    table = recipes.read(name).at("full")
    (tmp_path / name).mkdir(parents=True)
    curves = {"fedavg": [70, 80], "moon": [60, 61], "scaffold": [79, 92], "pooled": [90, 91]}
    for row, values in (curves | {"fedprox": [71, 83]}).items():
        of = table.row(row)
        for seed in (0, 1):
            curve = [(20 * (i + 1), v + seed, 1.0) for i, v in enumerate(values)]
            record = Record(
                name, row, "full", seed, of.method, settings_of(of.config(seed)), 40, 40,
                "accuracy", curve, str(seed), up_mb=1.5, down_mb=0.5, seconds_per_round=0.25,
            )  # fmt: skip
            (tmp_path / name / record.name).write_text(record.to_json())
    of = Facts(name, tmp_path)
    assert [s.row.name for s in ordered(of)] == ["fedavg", "pooled", "scaffold", "fedprox", "moon"]
    assert leading(of) == ["fedavg", "pooled", "scaffold", "fedprox", "moon"]
    assert with_verdict(of, "holds") == "`scaffold` (+10.5), `fedprox` (+2.0)"
    assert with_verdict(of, "behind its base") == "`moon` (-14.5)"
    assert with_verdict(of, "level") == "none"
    assert hold_in_all([of, of]) == "`scaffold`, `fedprox`"
    assert hold_in_all([of, Facts("grand/small_fmnist", tmp_path)]) == "none"
    lines = grand_table(of).replace("\u00a0", " ").splitlines()
    assert "| rounds to 80 % | traffic to 80 % |" in lines[0]
    # means of both tests: 85.5 and 86.5 against 75 and 76; 80 % after rounds 40 and 20
    assert lines[4].split(" | ")[1:4] == ["86.0±0.7", "+10.5 (+10.5 to +10.5)", "holds"]
    assert lines[4].endswith("| 30 | 60 MB | 0.25 |")
    assert lines[2].startswith("| `fedavg` | 75.5±0.7 |  |  |")
    assert lines[3].startswith("| `pooled` |")
    assert lines[3].endswith("|  | 0.25 |")
    assert "Not run yet: `ccvr`" in lines[-1]


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
