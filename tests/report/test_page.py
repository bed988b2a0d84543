"""The report: what it says, of which runs, and that names in it stay names."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import kedge
from kedge.errors import KedgeError
from kedge.history.compare import holm
from kedge.history.find import find
from kedge.history.read import read_clients
from kedge.history.sheet import Chart, Sheet, SheetTable, png_uri
from kedge.report.charts import lttb
from kedge.report.mathtext import UnknownFormula, mathml
from kedge.report.page import as_json, facts_of, render, report, write_sheets
from tests.report.made import comparison, run_folder

MAX_BYTES = 3_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>{{7*7}}'\"<b>"


def facts(*what: Any) -> dict[str, Any]:
    return as_json(facts_of(find(list(what))))


def verdict(*what: Any) -> str:
    [group] = facts(*what)["groups"]
    said = group["verdict"]
    return " ".join([said["lead"], *said["more"], *said["warnings"]])


# -- numbers ----------------------------------------------------------------------------------


def test_gains_are_paired_and_corrected_over_the_table(tmp_path: Path) -> None:
    values = {
        "fedavg": {0: 80.0, 1: 84.0, 2: 82.0},
        "scaffold": {0: 85.0, 1: 88.5, 2: 87.5},
        "fedprox": {0: 80.5, 1: 83.0, 2: 82.5},
    }
    folder = comparison(tmp_path, {name: {"values": own} for name, own in values.items()})
    found = facts(folder)["groups"][0]["standings"]
    base = list(values["fedavg"].values())
    p_values = [
        stats.ttest_rel(list(values[m].values()), base).pvalue for m in values if m != "fedavg"
    ]
    assert [s["p_holm"] for s in found] == pytest.approx([None, *holm(p_values)])
    gain = found[1]["gain"]
    interval = stats.ttest_rel(list(values["scaffold"].values()), base).confidence_interval()
    assert gain["mean"] == pytest.approx(5.0)
    assert (gain["low"], gain["high"]) == pytest.approx((interval.low, interval.high))


def test_classes_that_the_best_model_never_gets_right_are_named(tmp_path: Path) -> None:
    never = {"changes": {"per_class": [90.0, 0.0, None]}}
    assert "gets no test sample" not in verdict(run_folder(tmp_path / "fine"))
    alone = verdict(run_folder(tmp_path / "alone", seeds=[0], **never))
    assert "fedavg gets no test sample of the class dog right. See the chart by class" in alone
    runs = {"fedavg": {"level": 80.0}, "scaffold": {"level": 90.0} | never}
    assert "scaffold gets no test sample of the class dog right, in every seed." in verdict(
        comparison(tmp_path / "best", runs)
    )
    runs = {"fedavg": {"level": 80.0} | never, "scaffold": {"level": 90.0}}
    assert "gets no test sample" not in verdict(comparison(tmp_path / "other", runs))
    many = {"classes": [f"c{i}" for i in range(7)], "changes": {"per_class": [0.0] * 6 + [9.0]}}
    assert "of the classes c0, c1, c2, c3 and 2 more right" in verdict(
        run_folder(tmp_path / "many", **many)
    )


def test_who_wins_is_said_with_interval_seeds_and_p_value(tmp_path: Path) -> None:
    values = {"fedavg": {0: 80.0, 1: 84.0, 2: 82.0}, "scaffold": {0: 85.0, 1: 89.1, 2: 86.9}}
    text = verdict(comparison(tmp_path, {m: {"values": v} for m, v in values.items()}))
    assert text.startswith("scaffold is best: 87.00 % accuracy after 10 rounds, 5.00 points better")
    assert "(95 % interval +4.75 to +5.25, 3 seeds, p < 0.001)" in text


def test_a_gain_that_may_be_chance_is_not_a_win(tmp_path: Path) -> None:
    values = {"fedavg": {0: 80.0, 1: 84.0, 2: 82.0}, "scaffold": {0: 86.0, 1: 83.0, 2: 82.5}}
    text = verdict(comparison(tmp_path, {m: {"values": v} for m, v in values.items()}))
    assert "has the best mean" in text
    assert "cannot be told apart from fedavg" in text


def test_one_seed_says_nothing(tmp_path: Path) -> None:
    runs = {"fedavg": {"seeds": [0]}, "scaffold": {"seeds": [0], "level": 90.0}}
    folder = comparison(tmp_path, runs)
    assert "With one seed that may be chance: nothing can be said" in verdict(folder)
    [group] = facts(folder)["groups"]
    assert group["standings"][1]["p_holm"] is None
    assert "p" not in [column["key"] for column in group["table"]]


def test_equal_numbers_are_called_equal(tmp_path: Path) -> None:
    same = {0: 80.0, 1: 81.0}
    runs = {"fedavg": same, "fedprox": same, "scaffold": {0: 90.0, 1: 91.2}}
    folder = comparison(tmp_path, {m: {"values": v, "seeds": [0, 1]} for m, v in runs.items()})
    assert "fedprox gives exactly the numbers of fedavg" in verdict(folder)


def test_the_yardstick_does_not_compete(tmp_path: Path) -> None:
    folder = comparison(tmp_path, {"fedavg": {}, "scaffold": {"level": 90.0}}, pooled=True)
    text = verdict(folder)
    assert text.startswith("scaffold")
    assert "Training on the pooled data of all clients reaches" in text
    standings = facts(folder)["groups"][0]["standings"]
    assert standings[2]["p_holm"] is None


def test_clients_that_gain_and_lose_are_counted(tmp_path: Path) -> None:
    values = {"fedavg": {0: 80.0, 1: 80.0}, "scaffold": {0: 85.0, 1: 79.0}}
    folder = comparison(tmp_path, {m: {"values": v, "seeds": [0, 1]} for m, v in values.items()})
    [group] = facts(folder)["groups"]
    counts = group["clients"]["summary"][1]
    assert (counts["gain"], counts["lose"], counts["n"]) == (2, 2, 4)


def test_lower_is_better_for_errors(tmp_path: Path) -> None:
    for name, level in (("fedavg", 1.0), ("scaffold", 0.5)):
        changes = {"rmse": level, "accuracy": math.nan}
        run_folder(tmp_path / name, name, changes=changes, settings={"metric": "rmse"})
    found = facts(tmp_path / "fedavg", tmp_path / "scaffold")["groups"][0]
    assert found["standings"][1]["gain"]["mean"] == pytest.approx(0.5)
    assert found["verdict"]["lead"].startswith("scaffold is best: 0.50 RMSE")


# -- which runs -------------------------------------------------------------------------------


def test_unfinished_runs_are_said_so_and_not_compared(tmp_path: Path) -> None:
    folder = comparison(tmp_path, {"fedavg": {}, "scaffold": {"level": 99.0, "done": 4}})
    text = verdict(folder)
    assert "scaffold is not finished: 4 of 10 rounds tested" in text
    assert text.startswith("fedavg reaches")
    assert facts(folder)["resume"] == f"kedge compare --out {tmp_path} --resume"
    [group] = facts(folder)["groups"]
    assert group["standings"][1]["gain"] is None
    assert group["curves"][1]["test"]["rounds"] == [1, 2, 3, 4]


def test_a_cut_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", done=3)
    with (folder / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "train_lo')
    assert "has reached" in verdict(folder)


def test_diverged_runs_lose(tmp_path: Path) -> None:
    folder = comparison(
        tmp_path, {"fedavg": {}, "scaffold": {"level": 99.0, "changes": {"diverged": 2.0}}}
    )
    text = verdict(folder)
    assert "scaffold diverged" in text
    assert text.startswith("fedavg")


def test_a_metric_without_a_value_is_not_called_diverged(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", changes={"accuracy": math.nan})
    assert verdict(folder).startswith("fedavg has no value of the metric")


def test_a_sweep_keeps_runs_that_ended_in_nan(tmp_path: Path) -> None:
    kedge.sweep("fedavg", {"lr": [0.1, 1e9]}, rounds=2, seeds=[0], out=tmp_path / "s", clients=3)
    found = facts(tmp_path / "s")
    assert [s["status"] for s in found["groups"][0]["standings"]] == ["complete"]
    assert re.match(r"lr=1000000000 diverged before its first test: .*finite", found["notes"][0])


def test_other_partitions_data_or_metrics_are_other_groups(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", "fedavg")
    two = run_folder(tmp_path / "b", "scaffold", partition="other")
    found = facts(one, two)
    assert len(found["groups"]) == 2
    assert "cannot be compared" in found["notes"][0]
    assert "partition" in found["notes"][0]
    assert all(s["gain"] is None for g in found["groups"] for s in g["standings"])
    three = run_folder(tmp_path / "c", "fedprox", settings={"split": "holdout(0.3)"})
    assert "test data" in facts(one, three)["notes"][0]


def test_equal_methods_are_named_by_what_differs(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", settings={"lr": 0.1})
    two = run_folder(tmp_path / "b", settings={"lr": 0.3})
    runs = facts(one, two)["groups"][0]["runs"]
    assert [run["name"] for run in runs] == ["fedavg (lr=0.1)", "fedavg (lr=0.3)"]


def test_a_folder_without_clients_and_scores_still_reports(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "old", held_out=False)
    for file in folder.rglob("clients.json"):
        file.unlink()
    [group] = facts(folder)["groups"]
    assert group["partition"] == []
    assert group["clients"] is None
    assert group["classes"]["classes"] == ["0", "1", "2"]


def test_damaged_extras_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "seed-0" / "clients.json").write_text("{")
    (folder / "diagnosis").mkdir()
    (folder / "diagnosis" / "data.json").write_text("[]")
    notes = " ".join(facts(folder)["notes"])
    assert "clients.json" in notes
    assert "data.json" in notes


def test_parts_that_are_not_installed_here(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "my_own_part(x=1)")
    found = facts(folder)
    assert found["parts"][0]["title"] == "its parts are not known here"
    assert render(facts_of(find(folder)))


@pytest.mark.parametrize(
    ("where", "message"),
    [("nowhere", "no such folder"), ("empty", "holds no run"), ("run/seed-0", "part of a run")],
)
def test_what_is_no_run(tmp_path: Path, where: str, message: str) -> None:
    run_folder(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(KedgeError, match=message):
        find(tmp_path / where)


def test_a_listing_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    run_folder(tmp_path / "secret")
    (tmp_path / "cmp").mkdir()
    row = {"folder": "../secret", "name": "x", "yardstick": "", "settings": {}}
    (tmp_path / "cmp" / "compare.json").write_text(json.dumps([row]))
    with pytest.raises(KedgeError, match="outside"):
        find(tmp_path / "cmp")


# -- the page ---------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Counts elements and collects what could run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for key, value in attrs:
            loads = key in ("src", "srcset", "action", "data") or (key == "href" and tag == "link")
            if key.startswith("on") or (loads and not (value or "").startswith("data:image/png")):
                self.active.append(f"{tag} {key}={value}")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    runs = {"fedavg": {}, HOSTILE: {"level": 90.0}}
    for arguments in runs.values():
        arguments |= {"classes": [HOSTILE, "b", "c"], "clients": [HOSTILE, "client 1"]}
    folder = comparison(tmp_path / "</script><b>", runs)
    (folder / "m0" / "diagnosis").mkdir()
    evil = Chart(HOSTILE, "images", [{"image": f"javascript:{HOSTILE}", "caption": HOSTILE}])
    lines = Chart(HOSTILE, "lines", [{"x": 1, "y": 2.0, "series": HOSTILE}], HOSTILE, HOSTILE)
    table = SheetTable(HOSTILE, [HOSTILE], [[HOSTILE]], HOSTILE)
    sheet = Sheet("data", HOSTILE, [HOSTILE], [table], [evil, lines], cost=HOSTILE, command=HOSTILE)
    (folder / "m0" / "diagnosis" / "data.json").write_text(sheet.to_json())
    page = render(facts_of(find(folder)))
    found = Elements()
    found.feed(page)
    assert found.active == []
    assert found.tags["script"] == 4
    assert "img" not in found.tags
    assert "49" not in re.findall(r"\{\{7\*7\}\}|\b49\b", page.split("<script")[0])
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1])["groups"][0]["runs"][1]["name"] == HOSTILE


def test_nothing_is_loaded_and_scripts_are_pinned(tmp_path: Path) -> None:
    page = render(facts_of(find(run_folder(tmp_path / "run"))))
    found = Elements()
    found.feed(page)
    assert found.active == []
    assert "default-src 'none'" in page
    assert page.count("'sha256-") == 3


def test_many_clients_and_rounds_are_quick_and_small(tmp_path: Path) -> None:
    """100 clients, 500 rounds, 3 methods, 3 seeds."""
    shared = {
        "rounds": 500,
        "clients": [f"client {k}" for k in range(100)],
        "classes": [str(c) for c in range(10)],
    }
    folder = comparison(tmp_path, {m: dict(shared) for m in ("fedavg", "scaffold", "fedprox")})
    begin = time.perf_counter()
    path = report(folder, tmp_path / "report.html")
    assert time.perf_counter() - begin < 10
    assert path.stat().st_size < MAX_BYTES


def test_hundreds_of_runs_stay_small(tmp_path: Path) -> None:
    shared = {"rounds": 60, "seeds": [0], "clients": [f"client {k}" for k in range(60)]}
    methods = {f"fedprox(mu={i + 1})": dict(shared) for i in range(120)}
    path = report(comparison(tmp_path, methods), tmp_path / "report.html")
    assert path.stat().st_size < MAX_BYTES


def test_thinning_keeps_ends_and_peaks() -> None:
    y = [0.0] * 1000
    y[437] = 5.0
    kept = lttb(range(1000), y, 50)
    assert len(kept) == 50
    assert kept[0] == 0
    assert kept[-1] == 999
    assert 437 in kept
    assert lttb(range(3), [1.0, 2.0, 3.0], 50) == [0, 1, 2]


# -- equations --------------------------------------------------------------------------------


def test_formulas_are_mathml() -> None:
    found = mathml(r"\frac{\mu}{2}\|w - w^t\|^2")
    assert "<mrow><mfrac><mrow><mi>μ</mi></mrow><mrow><mn>2</mn>" in found
    assert "<msup><mi>w</mi><mi>t</mi></msup>" in found
    assert "&lt;" in mathml("a < b")
    assert "<mo>∼</mo>" in mathml(r"z \sim N")
    assert "arg\u2009min</mo>" in mathml(r"\argmin_w f(w)")


def test_formulas_hold_no_markup() -> None:
    found = mathml(r"\text{<script>alert(1)</script>}")
    assert "&lt;script&gt;" in found
    assert "<script" not in found
    assert "<" not in mathml(r"\text{&lt;b&gt;}").partition("<mtext>")[2].partition("</mtext>")[0]


LINKS = (r"\href{javascript:alert(1)}{x}", r"\style{x:y}{a}", r"\color{red}{a}")


@pytest.mark.parametrize("tex", [r"\unknown", "{a", "a}", "w_", r"\text{a", *LINKS])
def test_formulas_that_are_not_known_are_refused(tex: str) -> None:
    with pytest.raises(UnknownFormula):
        mathml(tex)


def test_every_formula_of_a_part_is_known() -> None:
    import inspect

    from kedge.core.part import parts

    for name in parts:
        for tex in re.findall(r":math:`([^`]*)`", inspect.getdoc(parts[name]) or ""):
            assert mathml(tex), (name, tex)


# -- files to take away -----------------------------------------------------------------------


def test_csv_and_json_have_everything(tmp_path: Path) -> None:
    folder = comparison(tmp_path / "c", {"fedavg": {}, "scaffold": {"level": 90.0}})
    page, table, plain = (tmp_path / n for n in ("r.html", "r.csv", "r.json"))
    assert kedge.write_report(folder, page, csv=table, json=plain) == [page, table, plain]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    last = [r for r in rows if r["what"] == "accuracy" and r["round"] == "10"]
    stored = json.loads(plain.read_text())["groups"][0]["standings"]
    expected = [value for s in stored for value in s["last"]["values"]]
    assert [float(r["value"]) for r in last] == pytest.approx(expected)
    named = {r["of"] for r in rows if r["what"] == "per_class"}
    assert named == {"cat", "dog", "eel"}


def test_figures_have_the_width_of_a_column(tmp_path: Path) -> None:
    folder = comparison(tmp_path / "c", {"fedavg": {}, "scaffold": {"level": 90.0}})
    found = kedge.write_report(folder, tmp_path / "r.html", figures=tmp_path / "figures")
    names = {path.name for path in found[1:]}
    assert {"curves-rounds.svg", "curves-mb.pdf", "gains.svg", "partition.pdf"} <= names
    svg = (tmp_path / "figures" / "curves-rounds.svg").read_text()
    width = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    assert width is not None
    assert float(width[1]) == pytest.approx(3.3 * 72)
    assert "scaffold" in svg  # text, not outlines


def test_results_without_a_folder(tmp_path: Path) -> None:
    results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0, 1], clients=4)
    [page] = kedge.write_report(results, tmp_path / "r.html")
    assert "<h1>2 methods on digits</h1>" in page.read_text()


def test_runs_that_share_their_data_share_the_sheet(tmp_path: Path) -> None:
    folder = comparison(tmp_path, {"fedavg": {}, "scaffold": {"level": 90.0}})
    for number in (0, 1):
        (folder / f"m{number}" / "diagnosis").mkdir()
        data = Sheet("data", "Data", ["Labels agree."], seconds=number, cost=f"{number} s")
        own = Sheet("training", "Training", [f"Drift of run {number}."])
        for sheet in (data, own):
            path = folder / f"m{number}" / "diagnosis" / f"{sheet.name}.json"
            path.write_text(sheet.to_json())
    found = [(s["run"], s["title"]) for s in facts_of(find(folder))["sheets"]]
    assert found == [("", "Data"), ("fedavg", "Training"), ("scaffold", "Training")]


def test_a_page_of_diagnoses_alone(tmp_path: Path) -> None:
    sheet = Sheet(
        "data", "Data", ["strong label skew"], charts=[Chart("c", "bars", [{"x": "a", "y": 1}])]
    )
    page = write_sheets([sheet], tmp_path / "d.html", "digits").read_text()
    assert "strong label skew" in page


def test_large_diagnoses_are_thinned(tmp_path: Path) -> None:
    rows = [{"x": i, "y": i / 7, "series": "a"} for i in range(60_000)]
    images = [{"image": png_uri(bytes(20_000)), "row": str(i), "column": ""} for i in range(200)]
    charts = [Chart("points", "points", rows), Chart("images", "images", images)]
    path = write_sheets([Sheet("training", "Training", charts=charts)], tmp_path / "d.html")
    assert path.stat().st_size < MAX_BYTES
    assert "of 60000 are shown" in path.read_text()


# -- clients.json -----------------------------------------------------------------------------


def test_a_run_keeps_who_its_clients_are(tmp_path: Path) -> None:
    kedge.run(
        "fedavg", rounds=1, seeds=[0], clients=4, partition="dirichlet(0.5)", out=tmp_path / "r"
    )
    found = read_clients(tmp_path / "r" / "seed-0")
    assert found is not None
    assert found.names == [f"client {k}" for k in range(4)]
    assert found.counts is not None
    assert [sum(row) for row in found.counts] == found.sizes
    assert found.classes == [str(c) for c in range(10)]


def test_classes_have_the_metric_of_the_task_whatever_runs_are_compared_by(tmp_path: Path) -> None:
    auroc = {"auroc": 0.8, "personal_mean": 0.8, "per_personal": [0.8, None]}
    folder = run_folder(tmp_path / "run", changes=auroc, settings={"metric": "auroc"})
    [group] = facts(folder)["groups"]
    assert group["metric"]["name"] == "AUROC"
    assert group["classes"]["metric"] == "accuracy"
    assert group["classes"]["values"][0][0] > 1  # percent, not a value of AUROC


def test_clients_without_a_value_are_counted(tmp_path: Path) -> None:
    changes = {"auroc": 0.8, "personal_mean": 0.8, "per_personal": [0.8, None]}
    of_clients = run_folder(
        tmp_path / "own", "fedper", changes=changes, settings={"metric": "auroc"}
    )
    assert "1 of 2 clients have no AUROC" in " ".join(facts(of_clients)["groups"][0]["note"])
    whole = run_folder(tmp_path / "all", "fedper", changes=changes | {"per_personal": [0.8, 0.9]})
    assert "have no" not in " ".join(facts(whole)["groups"][0]["note"])


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"global": {"samples": 2400}}, "Tested on 2,400 samples."),
        (
            {"global": {"samples": 241}, "clients": {"a": {"samples": 13}, "b": {"samples": 228}}},
            "Tested on 241 samples, 13 to 228 at a client. Intervals are over seeds; they do not",
        ),
        ({"global": {"samples": 40}}, "Tested on 40 samples. Intervals are over seeds"),
        ({"global": [], "clients": 5}, ""),
    ],
)
def test_the_size_of_the_test_data_is_named(
    scores: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run")
    for seed in folder.glob("seed-*"):
        (seed / "scores.json").write_text(json.dumps(scores))
    note = " ".join(facts(folder)["groups"][0]["note"])
    assert says in note
    assert ("Tested on" in note) == bool(says)


def test_names_have_no_more_settings_than_it_takes(tmp_path: Path) -> None:
    for lr, rounds in ((0.1, 5), (0.2, 6), (0.3, 7)):  # the number of rounds tells them apart
        run_folder(tmp_path / f"run{rounds}", rounds=rounds, settings={"lr": lr, "target": 1.0})
    names = [s["name"] for g in facts(tmp_path)["groups"] for s in g["standings"]]
    assert names == ["fedavg (rounds=5)", "fedavg (rounds=6)", "fedavg (rounds=7)"]
