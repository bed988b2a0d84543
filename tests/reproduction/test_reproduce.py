"""A tiny table runs, is interrupted, goes on, merges and prints."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import kedge
from kedge.engines import Execution
from kedge.errors import DataError, FieldError, Interrupted, KedgeError, UnknownName
from kedge.reproduction import command, recipes
from kedge.reproduction.display import comparison_with_paper
from kedge.reproduction.records import read_record, write_record
from kedge.reproduction.running import Context, Limits, OutOfTime, run_table
from tests.reproduction.digits import TABLE, write

NAME = "demo/digits"


def reproduce(root: Path, results: Path, **options: Any) -> command.Reproduction:
    return kedge.reproduce(NAME, recipes=root, results=results, engine="loop", **options)


def curves(results: Path) -> dict[str, Any]:
    files = sorted((results / NAME).glob("*.json"))
    return {f.name: [p[:2] for p in read_record(f).curve] for f in files}


def printed(found: command.Reproduction, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_with_paper(found.table, found.rows, found.left_out))
    return console.export_text()


def test_a_table_prints_as_the_command_prints_it(whole: tuple[Path, Path]) -> None:
    found = reproduce(*whole, show=True)
    head, *lines = str(found).splitlines()
    assert head == "demo/digits: Demo, Table 1. digits, 4 clients"
    assert lines == [line.rstrip() for line in printed(found, 120).splitlines()]


def test_tables_of_ones_own_have_a_page(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    found = reproduce(root, results, show=True)
    [page] = kedge.write_report(found, tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert "Demo, Table 1" in text
    assert f"kedge reproduce demo/digits --recipes {root}" in text
    with pytest.raises(KedgeError, match="Tables of your own: kedge.write_report"):
        kedge.write_report(results, tmp_path / "page.html")
    with pytest.raises(FieldError, match="a page of their own"):
        kedge.write_report([found, results], tmp_path / "page.html")
    nothing = reproduce(root, tmp_path / "empty", show=True)
    with pytest.raises(KedgeError, match="demo/digits has no records yet"):
        kedge.write_report(nothing, tmp_path / "page.html")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A table that was run without an interruption: its recipes, and its results."""
    root, results = (tmp_path_factory.mktemp(name) for name in ("recipes", "results"))
    reproduce(write(root), results)
    return root, results


def test_a_record_has_the_numbers_of_a_plain_run(whole: tuple[Path, Path]) -> None:
    root, results = whole
    row = recipes.read(NAME, root).at("full").row("fedprox")
    run = kedge.run(**vars(row.config(0)) | {"engine": "loop"})
    record = read_record(results / NAME / "fedprox.seed0.full.json")
    expected = [[r["round"], round(r["accuracy"], 3)] for r in run.records[0]]
    assert [list(p[:2]) for p in record.curve] == expected
    assert record.partition_hash == run.partition_hash[0]
    assert record.rounds == record.rounds_done == 4
    assert record.up_mb == pytest.approx(run.mb_up / 4, abs=1e-4)
    assert record.command == "kedge reproduce demo/digits --rows fedprox --seeds 0"
    assert record.environment["how"]["engine"] == "loop"
    assert "folder" not in record.environment["how"]
    assert len((results / NAME / "fedprox.seed0.full.json").read_bytes()) < 4000


def test_the_table_has_both_numbers_and_their_difference(whole: tuple[Path, Path]) -> None:
    root, results = whole
    found = reproduce(root, results, show=True)
    one, two = (
        np.array([v for _, v, _ in read_record(results / NAME / f"{n}.seed0.full.json").curve])
        for n in ("fedavg", "fedprox")
    )
    summary = found.rows[1]
    assert summary.ours is not None
    assert summary.ours.mean == two.max()
    assert summary.difference == pytest.approx(two.max() - 81.5)
    assert summary.tail is not None
    assert summary.tail.mean == pytest.approx(two[-2:].mean())
    assert summary.gain is not None
    assert summary.gain.mean == pytest.approx(two.max() - one.max())
    assert summary.tail_gain is not None
    assert summary.tail_gain.mean == pytest.approx(two[-2:].mean() - one[-2:].mean())
    assert summary.paper_gain == pytest.approx(1.5)
    text = printed(found)
    assert "80.00±1.00" in text
    assert "one seed" in text
    assert f"{two.max():.2f}" in text
    assert "+1.50" in text
    assert list(found.frame()["row"]) == ["fedavg", "fedprox"]
    assert found.frame()["ours"][1] == two.max()


def test_a_run_that_is_stopped_goes_on_where_it_was(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    root, results = whole
    part = reproduce(root, tmp_path, rounds=2)
    assert [s.rounds for s in part.rows] == [2, 2]
    assert "2 of 4 rounds" in printed(part)
    lines = (tmp_path / ".runs" / NAME / "fedavg.seed0.full/log.txt").read_text()
    reproduce(root, tmp_path)
    assert curves(tmp_path) == curves(results)
    log = (tmp_path / ".runs" / NAME / "fedavg.seed0.full/log.txt").read_text()
    assert "resumed after round 2" in log.removeprefix(lines)


def test_ctrl_c_loses_nothing(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    table = recipes.read(NAME, root).at("full")

    def press(row: str, config: Any, seed: int, record: dict[str, Any]) -> None:
        if row == "fedprox" and record["round"] == 3:
            signal.raise_signal(signal.SIGINT)

    context = Context(tmp_path, execution={"engine": "loop"}, show=press)
    with pytest.raises(Interrupted, match="demo/digits, fedprox: stopped after round 3"):
        run_table(table, table.rows, None, context)
    found = {name: len(curve) for name, curve in curves(tmp_path).items()}
    assert found == {"fedavg.seed0.full.json": 4, "fedprox.seed0.full.json": 3}
    reproduce(root, tmp_path)
    assert curves(tmp_path) == curves(results)


def test_what_is_complete_is_not_run_again(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    shutil.copytree(results / NAME, tmp_path / NAME)  # the records alone, without run folders
    seen: list[int] = []
    table = recipes.read(NAME, root).at("full")
    context = Context(tmp_path, show=lambda row, config, seed, record: seen.append(seed))
    run_table(table, table.rows, None, context)
    assert not seen
    assert not (tmp_path / ".runs").exists()


def test_a_shorter_run_does_not_replace_a_longer_record(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    _, results = whole
    shutil.copytree(results / NAME, tmp_path / NAME)
    longer = write(tmp_path / "recipes", TABLE.replace("rounds = 4", "rounds = 6"))
    reports: list[str] = []
    table = recipes.read(NAME, longer).at("full")
    limits = Limits()

    def late(row: str, config: Any, seed: int, record: dict[str, Any]) -> None:
        limits.deadline = 0.0 if record["round"] == 2 else limits.deadline

    context = Context(tmp_path, limits, {"engine": "loop"}, late, reports.append)
    with pytest.raises(OutOfTime):
        run_table(table, table.rows, None, context)
    assert curves(tmp_path) == curves(results)
    assert any("its run folder is not here" in text for text in reports)
    reproduce(longer, tmp_path, rows=["fedavg"])
    assert [len(curve) for curve in curves(tmp_path).values()] == [6, 4]


def test_a_killed_process_leaves_what_it_had(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = whole
    reproduce(root, tmp_path, rows=["fedavg"], rounds=3)
    before = curves(tmp_path)
    (tmp_path / NAME / "fedavg.seed0.full.json").unlink()
    assert reproduce(root, tmp_path, show=True).rows[0].rounds == 3
    assert curves(tmp_path) == before


def test_records_of_a_read_only_folder_are_shown(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, results = whole
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    lost = copy / NAME / "fedprox.seed0.full.json"  # as if its run had been killed
    lost.unlink()
    monkeypatch.setattr("os.access", lambda *_: False)
    table = recipes.read(NAME, root).at("full")
    assert [s.n for s in command.read_table(table, copy).rows] == [1, 0]
    assert not lost.exists()
    monkeypatch.undo()
    assert [s.n for s in command.read_table(table, copy).rows] == [1, 1]


def test_time_ends_a_command_cleanly(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    found = reproduce(root, tmp_path, minutes=1e-9)
    assert found.is_stopped
    assert not (tmp_path / NAME).exists()
    table = recipes.read(NAME, root).at("full")
    limits = Limits()

    def late(row: str, config: Any, seed: int, record: dict[str, Any]) -> None:
        limits.deadline = 0.0 if record["round"] == 2 else limits.deadline

    context = Context(tmp_path, limits, {"engine": "loop"}, late)
    with pytest.raises(OutOfTime):
        run_table(table, table.rows, None, context)
    assert {n: len(c) for n, c in curves(tmp_path).items()} == {"fedavg.seed0.full.json": 2}
    reproduce(root, tmp_path)
    assert curves(tmp_path) == curves(results)


def test_seeds_in_lanes_have_a_record_each(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    lanes = write(tmp_path / "recipes", TABLE.replace("seeds = [0]\n", "lanes = true\n", 1))
    out, alone = tmp_path / "out", tmp_path / "alone"
    table = recipes.read(NAME, lanes).at("full")
    context = Context(out, Limits.of(None, 2), {"engine": "vector"})
    run_table(table, table.rows[:1], [0, 1, 2], context)
    run_table(table, table.rows[:1], [0, 1, 2], Context(out, execution={"engine": "vector"}))
    assert list(curves(out)) == [f"fedavg.seed{i}.full.json" for i in range(3)]
    kedge.reproduce(NAME, rows=["fedavg"], seeds=[1], recipes=root, results=alone, engine="loop")
    assert curves(alone)["fedavg.seed1.full.json"] == curves(out)["fedavg.seed1.full.json"]
    assert curves(results)["fedavg.seed0.full.json"] == curves(out)["fedavg.seed0.full.json"]


def test_the_quick_form_has_its_own_rounds_seeds_and_records(tmp_path: Path) -> None:
    quick = 'expect = ["fedprox"]\n'
    root = write(tmp_path / "recipes", TABLE + quick)
    found = reproduce(root, tmp_path, scale="quick")
    assert sorted(curves(tmp_path)) == sorted(
        f"{row}.seed{seed}.quick.json" for row in ("fedavg", "fedprox") for seed in (0, 1)
    )
    gain = found.rows[1].tail_gain
    assert gain is not None
    assert gain.n == 2
    assert found.missed == ([] if gain.mean > 0 else ["fedprox"])
    assert all(s.n == 0 for s in reproduce(root, tmp_path, show=True).rows)


def test_records_of_another_machine_are_merged(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    table = recipes.read(NAME, root).at("full")
    here = tmp_path / "here"
    reproduce(root, here, rows=["fedavg"], rounds=2)
    [merged] = command.merge_tables([(table, [])], here, results)
    assert sorted(merged.copied) == ["fedavg.seed0.full.json", "fedprox.seed0.full.json"]
    assert curves(here) == curves(results)
    short = tmp_path / "short"
    reproduce(root, short, rows=["fedavg"], rounds=1)
    [merged] = command.merge_tables([(table, [])], here, short)
    assert merged.copied == []
    assert curves(here) == curves(results)


def test_records_with_other_settings_are_not_merged_and_not_counted(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    _, results = whole
    other = write(tmp_path / "recipes", TABLE.replace("lr = 0.1", "lr = 0.2"))
    table = recipes.read(NAME, other).at("full")
    with pytest.raises(KedgeError, match=r"(?s)nothing was merged.*lr 0.1 \(recipe: 0.2\)"):
        command.merge_tables([(table, [])], tmp_path / "here", results)
    assert not (tmp_path / "here").exists()
    mixed = tmp_path / "mixed"
    shutil.copytree(results / NAME, mixed / NAME)
    found = command.read_table(table, mixed)
    assert [s.n for s in found.rows] == [0, 0]
    assert len(found.left_out) == 2
    assert "lr 0.1 (recipe: 0.2). It is left out." in printed(found)
    reproduce(other, mixed, rows=["fedavg"], rounds=1)  # the old one is kept, but does not count
    assert read_record(mixed / NAME / "fedavg.seed0.full.json").settings["lr"] == 0.2
    [old] = (mixed / NAME / "superseded").glob("*.json")
    assert json.loads(old.read_text())["settings"]["lr"] == 0.1
    merged = tmp_path / "merged"  # so does a merge
    shutil.copytree(results / NAME, merged / NAME)
    shutil.rmtree(mixed / NAME / "superseded")
    (mixed / NAME / "fedprox.seed0.full.json").unlink()
    command.merge_tables([(table, [])], merged, mixed)
    assert read_record(merged / NAME / "fedavg.seed0.full.json").settings["lr"] == 0.2
    [old] = (merged / NAME / "superseded").glob("*.json")
    assert json.loads(old.read_text())["settings"]["lr"] == 0.1


def test_a_damaged_record_is_named_and_left_out(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    shutil.copytree(results / NAME, tmp_path / NAME)
    path = tmp_path / NAME / "fedavg.seed0.full.json"
    content = path.read_text()
    for damage in (content[:100], "[]", content.replace('"curve"', '"curves"'), "\x00"):
        path.write_text(damage)
        found = command.read_table(recipes.read(NAME, root).at("full"), tmp_path)
        assert str(path) in found.left_out[0]
        assert [s.n for s in found.rows] == [0, 1]


def test_a_run_folder_of_other_settings_is_named(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = whole
    reproduce(root, tmp_path, rows=["fedavg"], rounds=1)
    other = write(tmp_path / "recipes", TABLE.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(KedgeError, match="lr: 0.1 -> 0.2"):
        reproduce(other, tmp_path, rows=["fedavg"])


def test_a_longer_recipe_extends_its_runs(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, results = whole
    short = write(tmp_path / "recipes", TABLE.replace("rounds = 4", "rounds = 2"))
    reproduce(short, tmp_path)
    reproduce(root, tmp_path)
    assert curves(tmp_path) == curves(results)


def test_a_loss_that_is_not_finite_ends_its_row_alone(tmp_path: Path) -> None:
    broken = 'method = "fedavg"\n[settings]\nlr = 1e12\n'
    root = write(tmp_path / "recipes", broken=broken)
    found = {s.row.name: s for s in reproduce(root, tmp_path).rows}
    assert found["fedprox"].rounds == 4
    record = read_record(tmp_path / NAME / "broken.seed0.full.json")
    assert "not finite" in record.diverged
    assert record.is_complete
    assert found["broken"].diverged == (f"seed 0 after round {record.rounds_done}",)
    assert reproduce(root, tmp_path, show=True).rows[2].diverged == found["broken"].diverged


def test_the_gpu_has_the_execution_of_the_table(tmp_path: Path) -> None:
    text = TABLE.replace("[quick]", '[run]\nengine = "loop"\nstreams = 4\ncompile = true\n[quick]')
    recipe = recipes.read(NAME, write(tmp_path, text))
    assert recipe.at("full").execution == Execution("loop", streams=4, compile=True)
    assert recipe.at("quick").execution is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("base =", "bases ="), "no key in .*table.toml 'bases'. Did you mean 'base'"),
        (('metric = "best"', 'metric = "mean"'), "none of last, best, top5"),
        (("tail = 2", 'tail = "two"'), "tail = 'two' should be of type int"),
        (("tail = 2", "tail = 0"), "tail must be at least 1"),
        (('base = "fedavg"', 'base = "fedavgg"'), "Did you mean 'fedavg'"),
        (("title", "# title"), "lacks title"),
        (("= 2\n", "= = 2\n"), "is not valid TOML"),
        (('rows = ["fedavg"', 'rows = ["fedsam"'), "there is no file fedsam.toml"),
    ],
)
def test_mistakes_in_a_table_are_named(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    write(tmp_path, TABLE.replace(*change, 1))
    with pytest.raises(KedgeError, match=message):
        recipes.read(NAME, tmp_path)


def test_mistakes_of_a_call_are_named(whole: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = whole
    call = {"recipes": root, "results": tmp_path}
    with pytest.raises(UnknownName, match="Did you mean 'demo/digits'"):
        kedge.reproduce("demo/digit", **call)
    with pytest.raises(UnknownName, match="Did you mean 'fedprox'"):
        kedge.reproduce(NAME, rows=["fedprx"], **call)
    with pytest.raises(FieldError, match="there is no scale 'small'"):
        kedge.reproduce(NAME, scale="small", **call)
    for wrong in ({"minutes": 0}, {"rounds": 0}, {"seeds": [0, 0]}, {"seeds": []}):
        with pytest.raises(FieldError):
            kedge.reproduce(NAME, **call, **wrong)
    text = TABLE.split("[quick]")[0]
    with pytest.raises(FieldError, match="has no quick form"):
        kedge.reproduce(NAME, scale="quick", recipes=write(tmp_path / "r", text), results=tmp_path)
    missing = write(tmp_path / "m", TABLE.replace('"digits"\npart', '"cifar10"\npart'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEDGE_DATA", str(tmp_path))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(DataError, match="cifar10"):
            kedge.reproduce(NAME, recipes=missing, results=tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        kedge.reproduce(NAME, recipes=root, results=tmp_path / "file" / "results")


def test_a_record_is_written_whole_or_not_at_all(whole: tuple[Path, Path], tmp_path: Path) -> None:
    _, results = whole
    record = read_record(results / NAME / "fedavg.seed0.full.json")
    path = tmp_path / "a" / record.name
    write_record(path, record)
    assert read_record(path) == record
    assert [p.name for p in path.parent.iterdir()] == [record.name]
    (tmp_path / "b").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_record(tmp_path / "b" / record.name, record)
