"""Each logger writes what its own reader finds, and none disturbs a run."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from kedge.errors import FieldError, Interrupted, KedgeError, UnknownName
from kedge.history.folder import METRICS, read_records
from kedge.loggers import Logger
from kedge.loggers.protocol import numbers

SETTINGS: dict[str, Any] = {
    "clients": 3, "rounds": 4, "seeds": [0, 1], "engine": "loop", "eval_every": 2,
    "model": "mlp(hidden=[4])",
}  # fmt: skip
NAMES = ("csv", "tensorboard", "mlflow", "wandb")
Found = dict[int, dict[int, dict[str, float]]]  # seed -> round -> numbers; a round once


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own, and no network."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def put(found: Found, seed: int, number: int, name: str, value: float) -> None:
    row = found.setdefault(seed, {}).setdefault(number, {})
    assert name not in row, f"{name} of round {number} is there twice"
    row[name] = value


def read_csv(run: Path) -> Found:
    import pandas

    found: Found = {}
    for row in pandas.read_csv(run / "log-csv/metrics.csv").to_dict("records"):
        for name, value in row.items():
            if name not in ("seed", "round") and not math.isnan(value):
                put(found, int(row["seed"]), int(row["round"]), str(name), value)
    return found


def read_tensorboard(run: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Found = {}
    for path in (run / "log-tensorboard").iterdir():
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                put(found, int(path.name.removeprefix("seed-")), event.step, name, event.value)
    return found


def read_mlflow(run: Path, place: str = "") -> Found:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place or (run / "log-mlflow").as_uri())
    found: Found = {}
    for one in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        assert one.data.params["method"] == "fedavg"
        for name in one.data.metrics:
            for metric in client.get_metric_history(one.info.run_id, name):
                put(found, int(one.data.tags["kedge.seed"]), metric.step, name, metric.value)
    return found


def read_wandb(run: Path) -> Found:
    """By `wandb leet inspect`, W&B's own reader of its files."""
    from wandb.util import get_core_path

    ids = {
        name: int(s) for s, name in json.loads((run / "log-wandb/runs.json").read_text()).items()
    }
    words = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file"]
    found: Found = {}
    for path in sorted((run / "log-wandb/wandb").glob("offline-run-*/*.wandb")):
        done = subprocess.run([*words, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in done.stdout.splitlines()]
        for row in [r["history"]["item"] for r in records if r["type"] == "history"]:
            seed = ids[path.stem.removeprefix("run-")]
            for name, value in row.items():
                if not name.startswith("_") and name != "round":
                    put(found, seed, row["_step"], name, value)
    return found


READERS = {
    "csv": read_csv, "tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb,
}  # fmt: skip


def expected(run: Path, seeds: tuple[int, ...] = (0, 1)) -> Found:
    return {
        seed: {r["round"]: numbers(r) for r in read_records(run / f"seed-{seed}" / METRICS)}
        for seed in seeds
    }


def check(found: Found, wanted: Found) -> None:
    assert {s: sorted(rounds) for s, rounds in found.items()} == {
        s: sorted(rounds) for s, rounds in wanted.items()
    }
    for seed, rounds in wanted.items():
        for number, row in rounds.items():
            assert set(found[seed][number]) >= set(row)
            row = {name: value for name, value in row.items() if name != "seconds"}
            for name, value in row.items():  # a round that is run again takes another time
                np.testing.assert_allclose(found[seed][number][name], value, rtol=1e-6)


def needs(name: str) -> None:
    if name != "csv":
        pytest.importorskip(name, reason=f"the extra {name} is not installed")


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of the trackers themselves
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_read_back_whole_after_an_interrupt_and_a_resume(
    name: str, tmp_path: Path
) -> None:
    """Interrupted in the second round; the rest comes with the resume, once."""
    needs(name)
    run = tmp_path / "run"

    def stop(seed: int, record: dict[str, Any]) -> bool:
        return (seed, record["round"]) == (1, 2)

    with pytest.raises(Interrupted):
        kedge.run(out=run, log=name, watch=stop, **SETTINGS)
    check(READERS[name](run), expected(run))  # its files are closed
    result = kedge.run(out=run, log=[name], resume=True, **SETTINGS)
    wanted = expected(run)
    assert sorted(wanted[1]) == [1, 2, 3, 4]
    assert wanted[0][4]["accuracy"] == result.records[0][3]["accuracy"]
    check(READERS[name](run), wanted)


KILLED = """
import os, sys
import kedge
settings = eval(sys.argv[2])
def kill(seed, record):
    if (seed, record["round"]) == (1, 3):
        os.kill(os.getpid(), 9)
kedge.run(out=sys.argv[1], log=sys.argv[3], watch=kill, **settings)
"""


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_a_run_that_was_killed_is_whole_after_a_resume(tmp_path: Path) -> None:
    """Each logger had rounds in memory, or rounds after the last checkpoint."""
    names = [n for n in NAMES if n == "csv" or importlib.util.find_spec(n)]
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), repr(SETTINGS), ",".join(names)], check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    with (run / "log-csv/metrics.csv").open("a") as file:
        file.write("1,4,0.5")  # the line that was being written
    kedge.run(out=run, log=names, resume=True, **SETTINGS)
    for name in names:
        check(READERS[name](run), expected(run))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cut", [1, 40, 250])
def test_a_round_that_tensorboard_wrote_in_part_is_written_again(cut: int, tmp_path: Path) -> None:
    """The writer was killed while bytes of the last round were on their way."""
    needs("tensorboard")
    run = tmp_path / "run"
    kedge.run(out=run, log="tensorboard", **SETTINGS | {"rounds": 2})
    (events,) = (run / "log-tensorboard/seed-1").iterdir()
    events.write_bytes(events.read_bytes()[:-cut])
    kedge.run(out=run, log="tensorboard", resume=True, **SETTINGS)
    check(read_tensorboard(run), expected(run))


@pytest.mark.filterwarnings("default")
def test_a_round_that_mlflow_wrote_in_part_is_completed(tmp_path: Path) -> None:
    """Its metrics are files, written one after the other."""
    needs("mlflow")
    run = tmp_path / "run"
    kedge.run(out=run, log="mlflow", **SETTINGS | {"rounds": 2})
    files = [*(run / "log-mlflow").glob("*/*/metrics/*")]
    for path in files:
        if path.name in ("seconds", "train_loss"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    kedge.run(out=run, log="mlflow", resume=True, **SETTINGS)
    check(read_mlflow(run), expected(run))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["csv", "tensorboard", "mlflow"])
def test_a_logger_that_comes_later_gets_the_rounds_before_it(name: str, tmp_path: Path) -> None:
    needs(name)
    run = tmp_path / "run"
    kedge.run(out=run, **SETTINGS | {"rounds": 2})
    kedge.run(out=run, log=name, resume=True, **SETTINGS)
    check(READERS[name](run), expected(run))
    whole = tmp_path / "whole"
    kedge.run(out=whole, **SETTINGS)
    kedge.run(out=whole, log=name, resume=True, **SETTINGS)  # complete before
    check(READERS[name](whole), expected(whole))


@pytest.mark.filterwarnings("default")
def test_mlflow_writes_where_its_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    place = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    result = kedge.run(out=tmp_path / "run", log="mlflow", **SETTINGS)
    check(read_mlflow(tmp_path / "run", place), expected(tmp_path / "run"))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place)
    mine = client.get_experiment_by_name("mine")
    runs = client.search_runs([mine.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.info.run_name for run in runs} == {"run seed 0", "run seed 1"}
    assert float(runs[0].data.tags["kedge.accuracy_mean"]) == pytest.approx(
        result.last.mean, rel=1e-5
    )


def test_every_run_of_a_comparison_and_of_a_sweep_has_its_own(tmp_path: Path) -> None:
    settings = SETTINGS | {"rounds": 2, "seeds": [0]}
    kedge.compare(["fedavg", "scaffold"], out=tmp_path / "both", log="csv", **settings)
    kedge.sweep(
        grid={"lr": [0.01, 0.1]}, out=tmp_path / "grid", log="csv",
        **settings | {"engine": "vector"},
    )  # fmt: skip
    for name in ("both/fedavg", "both/scaffold", "grid/lr_0.01", "grid/lr_0.1"):
        check(read_csv(tmp_path / name), expected(tmp_path / name, (0,)))


# -- own loggers, and faults -----------------------------------------------------------------------


class Notebook:
    """A user's own logger; it remembers what it was told."""

    books: list[Notebook] = []

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.books.append(self)

    def start(self, config: Any, folder: Path | None) -> None:
        self.told.append(("start", config.method, folder))

    def log(self, seed: int, record: dict[str, Any]) -> None:
        self.told.append((seed, record["round"]))

    def end(self, result: Any) -> None:
        self.told.append(("end", result and result.config.method))


def test_own_loggers_are_told_of_start_rounds_and_end(tmp_path: Path) -> None:
    own = Notebook()
    assert isinstance(own, Logger)
    kedge.run(log=[own], **SETTINGS | {"rounds": 2})
    rounds = [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert own.told == [("start", "fedavg", None), *rounds, ("end", "fedavg")]
    Notebook.books.clear()
    settings = SETTINGS | {"rounds": 1, "seeds": [0]}
    kedge.sweep(grid={"lr": [0.01, 0.1]}, log=[Notebook], **settings)
    assert [book.told[1:2] for book in Notebook.books] == [[(0, 1)], [(0, 1)]]
    with pytest.raises(FieldError, match="give the class of a logger"):
        kedge.sweep(grid={"lr": [0.01, 0.1]}, log=[own], **settings)


def test_own_loggers_without_a_memory_get_every_round_of_a_resumed_run_once(tmp_path: Path) -> None:
    own = Notebook()
    with pytest.raises(Interrupted):
        kedge.run(out=tmp_path, log=[own], watch=lambda s, r: (s, r["round"]) == (1, 2), **SETTINGS)
    kedge.run(out=tmp_path, log=[own], resume=True, **SETTINGS)
    rounds = [one for one in own.told if len(one) == 2 and one[0] != "end"]
    assert rounds == [(seed, number) for seed in (0, 1) for number in (1, 2, 3, 4)]


def test_an_interrupted_run_ends_with_none() -> None:
    own = Notebook()
    with pytest.raises(Interrupted):
        kedge.run(log=[own], watch=lambda seed, record: record["round"] == 1, **SETTINGS)
    assert own.told[-1] == ("end", None)


@pytest.mark.parametrize("where", ["start", "log", "end", "logged"])
def test_a_logger_that_fails_warns_once_and_the_run_is_as_without_it(
    where: str, tmp_path: Path
) -> None:
    plain = kedge.run(**SETTINGS)

    class Broken(Notebook):
        def fail(self, *_: Any) -> Any:
            self.told.append("failed")
            raise RuntimeError("no disk")

    setattr(Broken, where, Broken.fail)
    broken, good = Broken(), Notebook()
    with pytest.warns(UserWarning, match=r"Broken has failed \(RuntimeError: no disk") as seen:
        result = kedge.run(out=tmp_path, log=[broken, good, "csv"], **SETTINGS)
    assert len([w for w in seen if "has failed" in str(w.message)]) == 1
    assert result.array().tolist() == plain.array().tolist()
    assert broken.told.count("failed") <= 2  # once, and once more where it is closed
    assert good.told[-1] == ("end", "fedavg")
    check(read_csv(tmp_path), expected(tmp_path))


def test_a_run_that_never_trains_writes_no_logs(tmp_path: Path) -> None:
    kedge.run(out=tmp_path / "run", **SETTINGS)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KedgeError, match="holds a run already"):
        kedge.run(out=tmp_path / "run", log="csv", **SETTINGS)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'tensorboard'"):
        kedge.run(out=tmp_path, log="csv, tensorbord", **SETTINGS)
    with pytest.raises(FieldError, match="is no logger"):
        kedge.run(log=[3], **SETTINGS)  # type: ignore[list-item]
    with pytest.raises(KedgeError, match="writes to the folder of the run"):
        kedge.run(log="csv", **SETTINGS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KedgeError, match=r"needs wandb: pip install 'kedge\[wandb\]'"):
        kedge.run(out=tmp_path, log="wandb", **SETTINGS)
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_not_finite_are_written(tmp_path: Path) -> None:
    from kedge.loggers.csv_file import CSV
    from kedge.settings import Config

    log = CSV()
    log.start(Config(), tmp_path)
    log.log(0, {"round": 1, "train_loss": math.nan, "x": math.inf, "stopped": True})
    log.end(None)
    with (tmp_path / "log-csv/metrics.csv").open() as file:
        [row] = csv.DictReader(file)
    assert row == {"seed": "0", "round": "1", "train_loss": "nan", "x": "inf", "stopped": "1.0"}
