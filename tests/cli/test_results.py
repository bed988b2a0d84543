"""Nothing is lost after training: folders, tables, terminals, errors, and what to type next."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kedge.history.folder
from kedge.cli import train as command
from kedge.cli.screen import accept_any_text
from kedge.report import figures
from kedge.runs import train
from tests.cli.commands import kedge_command

FAST = ["--clients", "4", "--rounds", "2", "--seeds", "0,1", "--steps", "2", "--engine", "loop"]


def steps(stderr: str) -> list[list[str]]:
    """The words of the commands that are printed at the end."""
    lines = [line.removeprefix("next:").strip() for line in stderr.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("kedge ")]


def test_run_ends_with_commands_that_work(tmp_path: Path) -> None:
    done = kedge_command("run", *FAST, "--method", "fedprox(mu=0.1)", cwd=tmp_path)
    assert "saved in runs/digits-fedprox-mu-0-1-1" in done.stderr
    found = steps(done.stderr)
    assert [words[0] for words in found] == ["predict", "compare", "run"]
    for words in found:
        again = kedge_command(*words, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    assert (tmp_path / "runs" / "digits-compare-1" / "experiment.json").exists()
    text = (tmp_path / "runs" / "digits-fedprox-mu-0-1-1" / "config.toml").read_text()
    assert "rounds = 4\n" in text
    assert "steps = 2\n" in text


def test_comparison_has_a_folder_resumes_alone_and_ends_with_commands(tmp_path: Path) -> None:
    args = ["compare", "fedavg", "fedprox(mu=0.1)", *FAST, "--unseen", "0.3"]
    done = kedge_command(*args, "--validation", "0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head = next(line for line in done.stdout.splitlines() if line.startswith("method")).split()
    assert head[:4] == ["method", "accuracy", "%", "n"]
    assert {"validation", "chosen", "unseen"} <= set(done.stdout.split())
    assert "fedavg: chosen on validation data" in done.stderr or (
        "fedprox(mu=0.1): chosen on validation data" in done.stderr  # not only by a bold row
    )
    assert "chosen: on the test data, in the best round on the validation data" in done.stdout
    found = steps(done.stderr)
    for words in found:
        again = kedge_command(*words, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    wrong = kedge_command("run", "--resume", "--out", "runs/digits-compare-1", cwd=tmp_path)
    assert "kedge compare --out runs/digits-compare-1 --resume" in wrong.stderr
    again = kedge_command("compare", "--resume", "--out", "runs/digits-compare-1", cwd=tmp_path)
    rows = [line.split()[0] for line in again.stdout.splitlines()]
    at = rows.index("method") + 1
    assert rows[at : at + 3] == ["fedavg", "fedprox(mu=0.1)", "pooled"]
    for name in ("fedavg", "fedprox_mu_0.1", "pooled_data"):
        config = tmp_path / "runs" / "digits-compare-1" / name / "config.toml"
        assert "rounds = 4\n" in config.read_text()


def test_sweep_has_a_folder_and_says_on_which_data_it_chose(tmp_path: Path) -> None:
    done = kedge_command("sweep", "lr=0.05,0.3", *FAST, cwd=tmp_path)
    assert "best on the test set, as papers report it; choose with --validation 0.1" in done.stderr
    assert "best (test)" in done.stdout
    for words in steps(done.stderr):
        again = kedge_command(*words, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    chosen = kedge_command("sweep", "lr=0.05,0.3", *FAST, "--validation", "0.2", cwd=tmp_path)
    assert "chosen on validation data" in chosen.stderr
    assert "best (validation)" in chosen.stdout
    folders = {path.name for path in (tmp_path / "runs").iterdir()}
    assert {"digits-sweep-1", "digits-sweep-2"} <= folders


def test_methods_of_compare_are_arguments(tmp_path: Path) -> None:
    done = kedge_command("compare", "fedavg", "--method", "fedprox(mu=1)", cwd=tmp_path)
    assert done.returncode == 2
    assert "Write: kedge compare fedavg 'fedprox(mu=1)'" in done.stderr
    none = kedge_command("compare", cwd=tmp_path)
    assert none.returncode == 2
    assert "name methods: kedge compare fedavg scaffold" in none.stderr


def test_a_wrong_plot_is_refused_before_training(tmp_path: Path) -> None:
    for name in ("curves.xyz", "curves", "runs/"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        done = kedge_command("compare", "fedavg", "scaffold", *FAST, "--plot", name, cwd=tmp_path)
        assert done.returncode == 2
        assert "curves.png" in done.stderr
        assert "round" not in done.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_the_table_comes_before_a_plot_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures, "curves", fail)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = kedge_command("compare", "fedavg", "scaffold", *FAST, "--plot", "a.png", cwd=tmp_path)
    assert done.returncode == 2
    assert "scaffold" in done.stdout
    assert len(list(tmp_path.rglob("result.json"))) == 2


@pytest.mark.long
def test_an_ascii_terminal_loses_nothing(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "compare", "fedavg", "fedprox", *FAST],
        cwd=tmp_path, env=env, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"+-" in done.stdout
    assert b"?" not in done.stdout


def test_text_that_a_stream_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    accept_any_text()
    sys.stdout.write("1±2 … 漢\n")
    sys.stdout.flush()
    assert raw.getvalue() == "1±2 ... ?\n".encode("latin-1")


def test_a_full_disk_is_no_unforeseen_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "curve.png")

    monkeypatch.setattr(command, "_finish", fail)
    done = kedge_command("run", *FAST, cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, last) == (
        2,
        "error: curve.png cannot be written or opened: no space left on device; free some disk "
        "space",
    )


def test_an_unforeseen_error_is_one_sentence_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("something odd")

    monkeypatch.setattr(command, "_finish", fail)
    done = kedge_command("run", *FAST, cwd=tmp_path)
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: an error in kedge that should not happen (ZeroDivisionError: so")
    [log] = (tmp_path / "runs" / "digits-fedavg-1").glob("kedge-error-*.log")
    assert log.name in last
    text = log.read_text()
    assert "Traceback" in text
    assert "something odd" in text
    monkeypatch.setenv("KEDGE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        kedge_command("run", *FAST, cwd=tmp_path)


def test_an_error_outside_of_a_run_is_logged_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(command, "config_of", fail)
    monkeypatch.setattr(kedge.history.folder, "opened", [])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = kedge_command("run")
    assert done.returncode == 70
    assert len(list((tmp_path / "kedge").glob("*.log"))) == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.45 GiB for an array with shape (1,)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 8000000000 bytes. Error code 12 (Cannot allocate memory)"),
    ],
)  # fmt: skip
def test_out_of_memory_is_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(train, "_train_seeds", fail)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    done = kedge_command("run", *FAST, cwd=tmp_path)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "out of memory while training fedavg on digits: 8.0 GB more did not fit" in text
    assert "Lower --chunk" in text
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(command, "config_of", fail)
    done = kedge_command("run", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: out of memory: 8.0 GB more did not fit" in done.stderr


def test_a_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "--help"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode != 0
    assert done.stderr == ""


def test_fedbn_needs_batchnorm(tmp_path: Path) -> None:
    done = kedge_command("run", *FAST, "--method", "fedbn", cwd=tmp_path)
    assert done.returncode == 2
    assert "the model has none" in done.stderr
    words = shlex.split(done.stderr.split("e.g. ")[1].split(", or")[0])
    good = kedge_command("run", *FAST, "--method", "fedbn", *words, cwd=tmp_path)
    assert good.returncode == 0, good.stderr
