"""Stopped in any way, a run goes on and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kedge
from kedge.core import tree
from kedge.errors import DataError, KedgeError
from kedge.runs.checkpoint import FORMAT, TrainingFolder

SETTINGS = {"clients": 6, "rounds": 12, "seeds": (0, 1), "steps": 4, "per_round": 4}
ARGS = ["--clients", "6", "--rounds", "12", "--seeds", "0,1", "--steps", "4", "--per-round", "4"]
METHOD = "scaffold+moon(projection=4)"


def state(folder: Path, seed: int) -> dict:
    return load_file(folder / f"seed-{seed}" / "checkpoint.safetensors")


def metrics(folder: Path, seed: int) -> list:
    lines = (folder / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]


@pytest.fixture(scope="module", params=["loop", "vector"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    out = tmp_path_factory.mktemp(request.param) / "straight"
    kedge.run(METHOD, out=out, engine=request.param, **SETTINGS)
    return request.param, out


def command(engine: str, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "kedge", "run", "--method", METHOD, *ARGS, "--engine", engine,
        "--out", str(out), *more,
    ]  # fmt: skip


def start(args: list[str]) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def wait_for_rounds(out: Path, seed: int, rounds: int, process: subprocess.Popen) -> None:
    path = out / f"seed-{seed}" / "metrics.jsonl"
    for _ in range(6000):
        if path.exists() and path.read_text().count("\n") >= rounds:
            return
        if process.poll() is not None:
            return
        time.sleep(0.005)
    raise AssertionError("the run did not get there")


@pytest.mark.long
def test_kill_at_several_points_and_resume_bit_for_bit(straight: tuple, tmp_path: Path) -> None:
    engine, expected = straight
    out = tmp_path / "killed"
    more: list[str] = []
    for seed, rounds in ((0, 2), (0, 8), (1, 4)):
        process = start(command(engine, out, *more))
        wait_for_rounds(out, seed, rounds, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        more = ["--resume"]
    done = subprocess.run(
        command(engine, out, "--resume"), check=False, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        assert tree.equal(state(expected, seed), state(out, seed))
        assert metrics(expected, seed) == metrics(out, seed)


@pytest.mark.long
def test_a_line_that_was_half_written_is_dropped(straight: tuple, tmp_path: Path) -> None:
    engine, expected = straight
    out = tmp_path / "half"
    process = start(command(engine, out))
    wait_for_rounds(out, 0, 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with (out / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    kedge.run(METHOD, out=out, resume=True, engine=engine, **SETTINGS)
    assert metrics(expected, 0) == metrics(out, 0)
    assert tree.equal(state(expected, 1), state(out, 1))


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    process = start([*command("vector", out), "--rounds", "4000"])
    wait_for_rounds(out, 0, 2, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    text = stderr.decode()
    assert "stopped after round" in text
    assert f"--out {out} --resume" in text.replace("\n", " ")
    assert "Traceback" not in text
    rounds = len(metrics(out, 0))
    assert int(state(out, 0)["round"]) == rounds


def test_a_complete_run_resumes_to_itself(straight: tuple) -> None:
    engine, expected = straight
    before = state(expected, 1)
    seconds = json.loads((expected / "result.json").read_text())["seconds"]
    result = kedge.run(METHOD, out=expected, resume=True, engine=engine, **SETTINGS)
    assert tree.equal(before, state(expected, 1))
    assert result.seconds == seconds > 0
    assert len(result.records[0]) == 12


def test_changed_settings_are_refused_with_the_difference(straight: tuple) -> None:
    engine, expected = straight
    changed = SETTINGS | {"rounds": 20}
    with pytest.raises(KedgeError) as caught:
        kedge.run(METHOD, out=expected, resume=True, engine=engine, lr=0.2, **changed)
    text = str(caught.value)
    assert "  rounds: 12 -> 20" in text
    assert "  lr: 0.1 -> 0.2" in text
    assert "another --out" in text


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(KedgeError, match="holds no run to resume"):
        kedge.run("fedavg", out=tmp_path, resume=True, rounds=1)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    kedge.run("fedavg", out=out, clients=4, rounds=2, seeds=(0,))
    path = out / "seed-0" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged .*delete it"):
        kedge.run("fedavg", out=out, resume=True, clients=4, rounds=2, seeds=(0,))
    before = {file: file.read_bytes() for file in out.rglob("*.*") if file.name != "log.txt"}
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged"):
        kedge.run("fedavg", out=out, resume=True, clients=4, rounds=3, seeds=(0,))
    for file, content in before.items():  # the results of two rounds are all that there is
        assert file.read_bytes() == content


def _stopped_after_one_round(out: Path) -> Path:
    """A run of two rounds that was killed after its first; returns the checkpoint."""
    kedge.run("fedavg", out=out, clients=4, rounds=1, seeds=(0,), engine="loop")
    config = out / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    return out / "seed-0" / "checkpoint.safetensors"


def test_a_checkpoint_without_a_format_number_goes_on(tmp_path: Path) -> None:
    """Those that were written before there was one."""
    path = _stopped_after_one_round(tmp_path / "old")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"kedge.format": str(FORMAT)}
    save_file(load_file(path), path)
    settings = {"clients": 4, "rounds": 2, "seeds": (0,), "engine": "loop"}
    resumed = kedge.run("fedavg", out=tmp_path / "old", resume=True, **settings)
    assert (resumed.array("loss") == kedge.run("fedavg", **settings).array("loss")).all()


@pytest.mark.parametrize("number", [str(FORMAT + 1), "0", "x"])
def test_a_checkpoint_of_another_format_is_refused(number: str, tmp_path: Path) -> None:
    path = _stopped_after_one_round(tmp_path / "new")
    save_file(load_file(path), path, {"kedge.format": number})
    with pytest.raises(
        DataError,
        match=rf"checkpoint.safetensors has checkpoint format {number}; kedge {kedge.__version__} "
        rf"reads formats up to {FORMAT}. Resume with the kedge that wrote it, or delete it",
    ):
        kedge.run(
            "fedavg", out=tmp_path / "new", resume=True, clients=4, rounds=2, seeds=(0,),
            engine="loop",
        )  # fmt: skip


def test_a_full_disk_leaves_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "full"
    settings = {"clients": 4, "rounds": 6, "seeds": (0,), "engine": "loop"}
    write, count = TrainingFolder.write, [0]

    def failing(self: TrainingFolder, name: str, content: bytes) -> None:
        count[0] += name.endswith("checkpoint.safetensors")
        if count[0] == 2:  # the last one at the latest

            def full(_: int) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(os, "fsync", full)
        try:
            write(self, name, content)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(TrainingFolder, "write", failing)

    monkeypatch.setattr(TrainingFolder, "write", failing)
    message = r"No space left on device.*free some disk space and continue with --resume"
    with pytest.raises(DataError, match=message):
        kedge.run("fedavg", out=out, **settings)
    monkeypatch.undo()
    assert not list(out.rglob("*.part"))
    resumed = kedge.run("fedavg", out=out, resume=True, **settings)
    plain = kedge.run("fedavg", **settings)
    assert (resumed.array("loss") == plain.array("loss")).all()


def test_a_run_that_is_not_finite_stops_with_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "run", "--lr", "1e6", "--rounds", "5", "--seeds", "0",
         "--method", "fedprox", "--out", str(tmp_path / "nan")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "is not finite in round" in text
    assert "terms: task" in text
    assert "fedprox" in text
    assert "Traceback" not in text
