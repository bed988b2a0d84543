"""Folders of runs: claimed late, checked on resume, damaged files, nothing half-written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.data.datasets import load
from kedge.data.partition import draw
from kedge.errors import DataError, KedgeError, ModelError
from kedge.history.folder import new_path
from kedge.loading import files
from kedge.runs import train
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.grid import combine
from kedge.settings import Config

FAST = {"clients": 4, "rounds": 2, "seeds": (0,), "steps": 2, "engine": "loop"}


def contents(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# -- claims -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": "nothing-there"},
        {"model": "lenet5"},  # digits are 8x8
        {"method": "fedbn"},
        {"clients": 100_000},
        {"per_round": 5, "unseen": 0.5},
    ],
)
def test_a_mistake_does_not_burn_the_folder(wrong: dict, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with pytest.raises(KedgeError):
        kedge.run(out=out, **FAST | wrong)
    assert contents(tmp_path) == []
    kedge.run("fedavg", out=out, **FAST)


def test_a_mistake_does_not_burn_comparisons_and_sweeps(tmp_path: Path) -> None:
    trained: list[str] = []
    rows = train.method_jobs([Config(method=m, **FAST) for m in ("fedavg", "fedbn")])
    watched = train.Options(lambda job, *_: trained.append(job.name))
    with pytest.raises(ModelError, match="fedbn keeps BatchNorm"):
        train.experiment("compare", rows, tmp_path / "c", options=watched)
    grid = train.setting_jobs(combine({"model": ["mlp", "lenet5"]}, flags=FAST))
    with pytest.raises(KedgeError, match="model=lenet5"):
        train.experiment("sweep", grid, tmp_path / "s", options=watched)
    assert not trained
    assert contents(tmp_path) == []


def test_folders_are_not_shared(tmp_path: Path) -> None:
    """Two processes that start at once: the second takes the next number, or says so."""
    config = Config(**FAST)
    first, second = (
        TrainingFolder.create(new_path(config, tmp_path), config, numbered=True) for _ in range(2)
    )
    first.claim()
    second.claim()
    assert [first.path.name, second.path.name] == ["digits-fedavg-1", "digits-fedavg-2"]
    third, fourth = (TrainingFolder.create(tmp_path / "named", config) for _ in range(2))
    third.claim()
    with pytest.raises(KedgeError, match="holds a run already"):
        fourth.claim()
    with pytest.raises(DataError, match="is a file"):
        TrainingFolder.create(first.path / "config.toml" / "run", config)


@pytest.mark.parametrize("at", ["train_seeds", "result"])
def test_an_interrupt_before_the_first_checkpoint_leaves_nothing(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if at == "train_seeds":
        monkeypatch.setattr(train, "_train_seeds", interrupt)
    watch = interrupt if at == "result" else None
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    for out in (tmp_path / "new" / "run", tmp_path / "own"):
        with pytest.raises(KeyboardInterrupt):
            kedge.run("fedavg", out=out, watch=watch, **FAST)
    assert contents(tmp_path) == ["own", "own/notes.txt"]


def test_a_file_that_is_being_written_leaves_no_rest(tmp_path: Path) -> None:
    def pieces():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrainingFolder(tmp_path).write("x.bin", pieces())
    assert contents(tmp_path) == []


# -- the same data and files ------------------------------------------------------------------


def test_other_data_are_refused_on_resume(tmp_path: Path) -> None:
    digits = load("digits")
    config = Config(**FAST)
    train.run(config, tmp_path / "run", dataset=digits)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["data"] == digits.fingerprint
    swapped = dataclasses.replace(digits, y_train=9 - digits.y_train)
    longer = dataclasses.replace(config, rounds=3)
    with pytest.raises(KedgeError, match="the data have changed since .* was started"):
        train.run(longer, tmp_path / "run", resume=True, dataset=swapped)
    assert "rounds = 2\n" in (tmp_path / "run" / "config.toml").read_text()
    assert (tmp_path / "run" / "result.json").exists()
    train.run(longer, tmp_path / "run", resume=True, dataset=digits)


def test_another_partition_is_refused_on_resume(tmp_path: Path) -> None:
    """The file of a partition may change under the same name."""
    labels, file = load("digits").y_train, tmp_path / "p.json"
    draw("dirichlet(0.5)", labels, 4, seed=0).save(file)
    settings = {k: v for k, v in FAST.items() if k != "clients"} | {"partition": str(file)}
    kedge.run("fedavg", out=tmp_path / "run", **settings)
    draw("dirichlet(0.5)", labels, 4, seed=1).save(file)
    with pytest.raises(KedgeError, match="the partition of seed 0 has changed since"):
        kedge.run("fedavg", out=tmp_path / "run", resume=True, **settings | {"rounds": 3})


def test_other_data_of_fit_are_refused_on_resume(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2

    def fit(y: torch.Tensor, **more: object) -> None:
        clients = [(x[:20], y[:20]), (x[20:], y[20:])]
        kedge.fit(nn.Linear(3, 2), clients, out=tmp_path / "own", engine="loop", **more)

    fit(y, rounds=2)
    with pytest.raises(KedgeError, match="the data have changed"):
        fit(1 - y, rounds=2, resume=True)
    fit(y, rounds=4, resume=True)


def test_changed_files_are_refused_on_resume(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (
        "import kedge\nfrom dataclasses import dataclass\n\n@kedge.register\n"
        "@dataclass(frozen=True)\nclass Changed(kedge.Part):\n    '''Nothing.'''\n"
    )
    own.write_text(text)
    from kedge.core.part import parts
    from kedge.loading import load_file

    try:
        load_file(own)
        kedge.run("changed", out=tmp_path / "run", **FAST)
        parts.remove("changed")
        own.write_text(text + "    strays = 0.5\n")
        load_file(own)
        with pytest.raises(KedgeError, match=r"own.py has changed since .* was started with it"):
            kedge.run("changed", out=tmp_path / "run", resume=True, **FAST)
    finally:
        parts.remove("changed")
        files.clear()


# -- damaged files ----------------------------------------------------------------------------

GARBAGE = [b"\xff\xfe\x00garbage", b"", b"[1, 2]", b'"text"', b'{"round": "x"}\n', b"null", b'{"a'
           ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    kedge.run("fedavg", out=out, **FAST)
    return out


@pytest.mark.parametrize("content", GARBAGE)
@pytest.mark.parametrize("name", ["config.toml", "environment.json", "seed-0/metrics.jsonl"])
def test_garbage_is_named_with_what_to_do(
    name: str, content: bytes, finished: Path, tmp_path: Path
) -> None:
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / name).write_bytes(content)
    with pytest.raises(KedgeError) as caught:
        kedge.run("fedavg", out=out, resume=True, **FAST)
    text = str(caught.value)
    assert Path(name).name in text
    assert "restore" in text or "correct the file" in text


@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_line_is_not_passed_over(line: int, finished: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    path = out / "seed-0" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace("accuracy", "accuracy").replace("{", "{{", 1)
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=rf"damaged in line {line + 1}"):
        kedge.run("fedavg", out=out, resume=True, **FAST)


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_in_the_lists_of_runs(content: bytes, tmp_path: Path) -> None:
    for name, read in (
        ("sweep.json", lambda out: train.saved_jobs("sweep", out)),
        ("compare.json", lambda out: train.saved_jobs("compare", out)),
        ("experiment.json", lambda out: train.saved_jobs("sweep", out)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is damaged.*another --out"):
            read(tmp_path)
        (tmp_path / name).unlink()


def test_rows_with_wrong_settings(tmp_path: Path) -> None:
    row = {"folder": "a", "values": {"lr": 1}, "settings": {"rounds": "many"}}
    (tmp_path / "sweep.json").write_text(json.dumps([row]))
    with pytest.raises(KedgeError, match=r"sweep.json: .*rounds"):
        train.saved_jobs("sweep", tmp_path)


# -- small clients ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper", "local"])
def test_one_sample_per_client(method: str) -> None:
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    clients = [(x[k : k + 1], y[k : k + 1]) for k in range(6)]
    with pytest.raises(DataError, match="no client has a sample to test on"):
        kedge.fit(nn.Linear(3, 2), clients, method, rounds=1)
    result = kedge.fit(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), clients, method,
        test=(x, y), rounds=1, personal=True,
    )  # fmt: skip
    assert np.isfinite(result.last.mean)


def test_an_interrupted_comparison_says_how_to_resume_all_of_it(tmp_path: Path) -> None:
    import os
    import signal

    rows = train.method_jobs([Config(method=m, **FAST) for m in ("fedavg", "fedprox")])
    out = tmp_path / "c"

    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KedgeError, match=rf"Resume with: --out {out} --resume"):
        train.experiment("compare", rows, out, options=train.Options(interrupt))
    results = train.experiment("compare", train.saved_jobs("compare", out), out, True).results
    assert [len(r.records[0]) for r in results] == [2, 2]


def test_a_folder_in_use_by_another_process_is_not_resumed(finished: Path, tmp_path: Path) -> None:
    import shutil
    import subprocess
    import sys

    pytest.importorskip("fcntl")
    out = shutil.copytree(finished, tmp_path / "run")
    hold = (
        "import sys; from pathlib import Path; from kedge.history.lock import Lock\n"
        "lock = Lock(); lock.take(Path(sys.argv[1]))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        before = sorted(path.read_bytes() for path in out.rglob("*.*") if path.name != ".lock")
        with pytest.raises(KedgeError, match="is in use: another process is training there"):
            kedge.run("fedavg", out=out, resume=True, **FAST)
        after = sorted(path.read_bytes() for path in out.rglob("*.*") if path.name != ".lock")
        assert before == after
    finally:
        other.communicate()
    kedge.run("fedavg", out=out, resume=True, **FAST)  # a lock ends with its process
    assert not (out / ".lock").exists()
