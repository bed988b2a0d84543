"""``kedge board`` and ``--log`` as they are typed."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import kedge_command

FAST = ("--rounds", "2", "--seeds", "0", "--clients", "3", "--engine", "loop", "--no-report")


def test_a_run_logs_to_the_loggers_that_are_named(tmp_path: Path) -> None:
    done = kedge_command("run", *FAST, "--log", "csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/digits-fedavg-1/log-csv/metrics.csv").read_text().splitlines()
    assert lines[0].startswith("seed,round,train_loss")
    assert [line.split(",")[:2] for line in lines[1:]] == [["0", "1"], ["0", "2"]]
    words = ("compare", "fedavg", "scaffold", *FAST, "--log", "csv", "--out", "both")
    assert kedge_command(*words, cwd=tmp_path).returncode == 0
    assert kedge_command("sweep", "lr=0.1,0.2", *FAST, "--log", "csv", "--out", "grid",
                         cwd=tmp_path).returncode == 0  # fmt: skip
    found = sorted(p.parent.parent.name for p in tmp_path.rglob("metrics.csv"))
    assert found == ["digits-fedavg-1", "fedavg", "lr_0.1", "lr_0.2", "scaffold"]


def test_an_unknown_logger_is_noticed_before_the_run(tmp_path: Path) -> None:
    done = kedge_command("run", *FAST, "--log", "csv,wand", cwd=tmp_path)
    assert done.returncode == 2
    assert "no logger 'wand'. Did you mean 'wandb'?" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_has_no_board(tmp_path: Path) -> None:
    done = kedge_command("board", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "none does not exist; name a folder of runs: kedge board DIR" in done.stderr
