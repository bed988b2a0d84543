"""Statistics of records, on curves made by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from kedge.errors import DataError
from kedge.reproduction import recipes
from kedge.reproduction.command import Reproduction
from kedge.reproduction.display import comparison_with_paper
from kedge.reproduction.page import facts_of as reproduction_facts
from kedge.reproduction.recipes import PaperTable
from kedge.reproduction.records import Record, read_record
from kedge.reproduction.summary import Summary, run_of, summarise, tail_means, values_of
from tests.reproduction.digits import write

Curve = dict[int, float | None]


def record(row: str, seed: int, curve: Curve, **changes: object) -> Record:
    points = tuple((number, value, None) for number, value in curve.items())
    values = {"rounds_done": max(curve), "partition_hash": "p", **changes}
    return dataclasses.replace(
        Record("demo/digits", row, "full", seed, "fedavg", {}, 4, 0, "accuracy", points, ""),
        **values,  # type: ignore[arg-type]
    )


@pytest.fixture
def table(tmp_path: Path) -> PaperTable:
    return recipes.read("demo/digits", write(tmp_path)).at("full")


def summaries(table: PaperTable, *records: Record) -> dict[str, Summary]:
    by_row: dict[str, dict[int, Record]] = {row.name: {} for row in table.rows}
    for one in records:
        by_row[one.row][one.seed] = one
    return {s.row.name: s for s in summarise(table, by_row)}


def test_metrics_of_a_curve(table: PaperTable) -> None:
    def value(metric: str, curve: Curve) -> float:
        [found] = values_of(metric, run_of(table.rows[0], [record("fedavg", 0, curve)]))
        return found

    def tail_mean(curve: Curve, tail: int) -> float:
        [found] = tail_means(run_of(table.rows[0], [record("fedavg", 0, curve)]), tail)
        return found

    points: Curve = dict(enumerate([10.0, 60.0, 20.0, 50.0, 30.0, 40.0, 25.0], 1))
    assert value("last", points) == 25.0
    assert value("best", points) == 60.0
    assert value("top5", points) == (60 + 50 + 40 + 30 + 25) / 5
    assert value("top5", {1: 10.0, 2: 60.0}) == 35.0
    assert tail_mean(points, 3) == (30 + 40 + 25) / 3
    assert tail_mean(points, 100) == pytest.approx(235 / 7)
    broken = {**points, 8: None}
    assert math.isnan(value("last", broken))
    assert value("best", broken) == 60.0
    assert math.isnan(tail_mean(broken, 3))
    untested = dataclasses.replace(record("fedavg", 0, {1: 1.0}), curve=(), diverged="exploded")
    run = run_of(table.rows[0], [untested])
    for metric in ("last", "best", "top5"):
        assert math.isnan(values_of(metric, run)[0])


def test_the_best_error_is_the_smallest(table: PaperTable) -> None:
    points = dict(enumerate([3.0, 1.0, 1.5, 4.0, 5.0, 2.0, 6.0], 1))
    run = run_of(table.rows[0], [record("fedavg", 0, points, metric="rmse")])
    assert values_of("best", run) == (1.0,)
    assert values_of("top5", run) == ((1 + 1.5 + 2 + 3 + 4) / 5,)


def test_gains_of_errors_are_positive_where_they_are_smaller(table: PaperTable) -> None:
    rows = [
        dataclasses.replace(row, paper=p) for row, p in zip(table.rows, (2.0, 1.5), strict=True)
    ]
    rows = [dataclasses.replace(r, settings={**r.settings, "target": 1.2}) for r in rows]
    table = dataclasses.replace(table, rows=tuple(rows))
    curves: dict[str, Curve] = {"fedavg": {1: 3.0, 2: 2.0}, "fedprox": {1: 1.5, 2: 1.0}}
    for direction in ({"metric": "rmse"}, {"metric": "my_error", "higher_is_better": False}):
        found = summaries(table, *(record(name, 0, c, **direction) for name, c in curves.items()))
        own = found["fedprox"]
        assert own.ours is not None
        assert own.gain is not None
        assert own.tail_gain is not None
        assert (own.ours.mean, own.gain.mean, own.tail_gain.mean) == (1.0, 1.0, 1.25)
        assert (own.paper_gain, own.difference) == (0.5, -0.5)
        assert (own.to_target, found["fedavg"].to_target) == ((2,), (None,))
        shown = comparison_with_paper(table, list(found.values()))
        assert shown.styles == ["", "bold"]
        assert ("in percent" in shown.note) is False
        group = reproduction_facts(
            [
                Reproduction(
                    table,
                    list(found.values()),
                    [record(name, 0, c, **direction) for name, c in curves.items()],
                )
            ]
        )["paper"][0]["group"]
        assert group["metric"]["higher"] is False
        assert group["columns"][0]["higher"] is False


def test_a_record_of_an_unknown_metric_without_a_direction_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "fedavg.seed0.full.json"
    one = record("fedavg", 0, {1: 3.0}, metric="my_error")
    path.write_text(one.to_json())
    with pytest.raises(DataError, match="does not say whether a high or a low my_error is better"):
        read_record(path)
    path.write_text(dataclasses.replace(one, higher_is_better=False).to_json())
    assert read_record(path).measure.higher_is_better is False


def test_gains_are_paired_by_seed(table: PaperTable) -> None:
    found = summaries(
        table,
        record("fedavg", 0, {1: 10.0, 2: 20.0, 3: 30.0, 4: 25.0}),
        record("fedavg", 1, {1: 50.0, 2: 60.0, 3: 70.0, 4: 65.0}),
        record("fedavg", 2, {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}),  # no partner
        record("fedprox", 0, {1: 12.0, 2: 22.0, 3: 31.0, 4: 29.0}),
        record("fedprox", 1, {1: 50.0, 2: 60.0, 3: 73.0, 4: 67.0}),
    )["fedprox"]
    assert found.gain is not None
    assert found.gain.values == (1.0, 3.0)  # best: 31 - 30, 73 - 70
    assert found.tail_gain is not None
    assert found.tail_gain.values == (30.0 - 27.5, 70.0 - 67.5)
    interval = found.gain.interval()
    assert interval is not None
    # Student's t with one degree of freedom, 12.706; sd sqrt(2), n = 2
    assert interval == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-3)
    assert found.n == 2


def test_a_gain_is_over_the_rounds_that_both_have(table: PaperTable) -> None:
    found = summaries(
        table,
        record("fedavg", 0, {1: 10.0, 2: 20.0, 3: 90.0, 4: 95.0}),
        record("fedprox", 0, {1: 11.0, 2: 23.0}),
    )["fedprox"]
    assert found.gain is not None
    assert found.tail_gain is not None
    assert (found.gain.mean, found.tail_gain.mean) == (3.0, 2.0)
    assert (found.gain_rounds, found.rounds, found.total) == (2, 2, 4)


def test_another_partition_is_no_pair(table: PaperTable) -> None:
    found = summaries(
        table,
        record("fedavg", 0, {4: 10.0}),
        record("fedprox", 0, {4: 12.0}, partition_hash="q"),
    )["fedprox"]
    assert found.gain is None
    assert found.ours is not None
    assert found.ours.mean == 12.0


def test_a_seed_that_is_behind_does_not_count_yet(table: PaperTable) -> None:
    found = summaries(
        table,
        record("fedavg", 0, {2: 10.0, 4: 20.0}),
        record("fedavg", 1, {2: 90.0}),
        record("fedprox", 0, {2: 11.0, 4: 25.0}),
        record("fedprox", 1, {2: 10.0}),
    )
    assert found["fedavg"].n == 1
    assert found["fedavg"].shorter == ("seed 1 (2 rounds)",)
    gain = found["fedprox"].gain
    assert gain is not None
    assert gain.values == (5.0,)


def test_rounds_to_a_target(table: PaperTable) -> None:
    row = table.rows[0]
    row = dataclasses.replace(row, settings={**row.settings, "target": 50.0})
    table = dataclasses.replace(table, rows=(row,))
    curve: Curve = {1: 10.0, 2: 50.0, 3: 40.0}
    found = summaries(table, record("fedavg", 0, curve), record("fedavg", 1, {3: 49.0}))
    assert found["fedavg"].to_target == (2, None)


def test_a_common_test_set_stands_beside_the_clients(table: PaperTable) -> None:
    def both(row: str, seed: int, own: float, common: float) -> Record:
        return record(row, seed, {1: 0.0, 2: own}, beside=((1, 0.0, None), (2, common, None)))

    pairs = [("fedavg", 0, 80.0, 40.0), ("fedavg", 1, 82.0, 44.0)]
    pairs += [("fedprox", 0, 84.0, 38.0), ("fedprox", 1, 88.0, 46.0)]
    found = summaries(table, *(both(*pair) for pair in pairs))["fedprox"]
    assert found.tail_gain is not None
    assert found.tail_gain.values == (2.0, 3.0)
    assert found.beside is not None
    assert found.beside.values == (19.0, 23.0)
    assert found.beside_gain is not None
    assert found.beside_gain.values == (-1.0, 1.0)
    text = str(comparison_with_paper(table, [found]))
    assert "common" in text
    assert " 0.00 " in text
    alone = summaries(table, record("fedavg", 0, {1: 1.0}))["fedavg"]
    assert alone.beside is None
    assert alone.beside_gain is None
