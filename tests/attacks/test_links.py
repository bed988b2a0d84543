"""Links, pipes and hard links in a folder of a stranger: nothing outside of it is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import KedgeError
from kedge.history.folder import Notes, request_stop, write_notes
from kedge.runs import train
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.grid import combine
from kedge.settings import Config
from tests.cli.commands import kedge_command

FAST: dict[str, Any] = {"clients": 3, "rounds": 2, "seeds": [0], "steps": 1, "engine": "loop"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    kedge.run("fedavg", out=out, log="csv", **FAST)
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, in a stranger's hands."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder outside of the run, which is the same afterwards."""
    folder = tmp_path / "victim"
    (folder / "empty").mkdir(parents=True)
    for name in ("precious", "partition.json", "metrics.jsonl", "data.json", "metrics.csv"):
        (folder / name).write_text("mine\n")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def plant(path: Path, victim: Path) -> Path:
    """Put a link in the place of whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    return path


def named(place: str, command: Callable[[], object]) -> bool:
    """Whether a command succeeds, or says what is in its way."""
    try:
        command()
    except KedgeError as error:
        return place in str(error)
    return True


# -- commands that look at a run ------------------------------------------------------------------

LOOKING: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda run, out: [
        "report", str(run), "--csv", f"{out}/a.csv", "--json", f"{out}/a.json",
        "--figures", str(out),
    ],
    "diagnose": lambda run, out: [
        "diagnose", str(run), "--what", "data,training", "-o", f"{out}/d.html"
    ],
    "predict": lambda run, out: ["predict", str(run), "digits", "-o", f"{out}/p.csv", "--force"],
    "export": lambda run, out: [
        "export", str(run), "--to", "torch", "-o", f"{out}/m.pt2", "--force"
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", LOOKING)
@pytest.mark.parametrize("goal", ["precious", "new", "empty"])
def test_what_looks_at_a_run_writes_through_no_link(
    command: str, goal: str, run: Path, victim: Path
) -> None:
    """Links at every file that the command writes, and at the names of its temporary files."""
    before = set(contents(run))
    words = LOOKING[command](run, run)
    assert kedge_command(*words).returncode == 0
    written = sorted(set(contents(run)) - before)
    assert written
    for name in written:
        path = run / name
        if path.is_dir():
            continue
        plant(path, victim / goal)
        for old in (f".{path.name}.part", f".{path.stem}.part{path.suffix}"):
            plant(path.with_name(old), victim / goal)
    done = kedge_command(*words)
    assert "should not happen" not in done.stderr


@pytest.mark.parametrize("goal", ["empty", "new", ""])
def test_diagnoses_are_not_kept_in_a_folder_that_is_a_link(
    goal: str, run: Path, victim: Path
) -> None:
    plant(run / "diagnosis", victim / goal)
    done = kedge_command("diagnose", str(run), "--what", "data")
    assert (done.returncode, "should not happen" in done.stderr) == (2, False)
    assert "diagnosis cannot be made: it is a link" in done.stderr


def test_a_comparison_cannot_name_the_runs_of_others(
    trained: Path, tmp_path: Path, victim: Path
) -> None:
    import json

    other, root = victim.parent / "mine", tmp_path / "both"
    shutil.copytree(trained, other)
    root.mkdir()
    (root / "link").symlink_to(other)
    for folder in ("../mine", str(other), "link", ".."):
        rows = [{"folder": folder, "name": "fedavg", "yardstick": ""}]
        (root / "compare.json").write_text(json.dumps(rows))
        done = kedge_command("diagnose", str(root), "--what", "data")
        assert "should not happen" not in done.stderr
        assert not (other / "diagnosis").exists(), folder


def test_what_the_board_writes_follows_no_link(run: Path, victim: Path) -> None:
    for name in ("stop", "notes.json"):
        plant(run / name, victim / "precious")
    request_stop(run)
    write_notes(run, Notes(("tag",), "text"))
    plant(run / "stop", victim / "new")
    request_stop(run)
    (run / "stop").unlink()
    os.mkfifo(run / "stop")
    request_stop(run)  # and it does not wait for a reader


# -- commands that train --------------------------------------------------------------------------

PLACES = (
    "log.txt", "config.toml", "environment.json", "result.json", ".lock", "anything", "seed-0",
    "seed-0/metrics.jsonl", "seed-0/.metrics.jsonl.part", "seed-0/checkpoint.safetensors",
    "log-csv", "log-csv/metrics.csv", "log-csv/deep/er", "two\nlines",
)  # fmt: skip


@pytest.mark.parametrize("goal", ["precious", "new", "empty", ""])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_with_a_link_is_not_resumed(place: str, goal: str, run: Path, victim: Path) -> None:
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(run / "seed-0", victim.parent / "copied")
    is_settings = place == "config.toml"
    if is_settings:  # else there would be no run
        shutil.copy(run / place, victim.parent / "settings")
    plant(run / place, victim.parent / "settings" if is_settings else victim / goal)
    with pytest.raises(KedgeError, match="link") as caught:
        kedge.run("fedavg", out=run, resume=True, log="csv", **FAST | {"rounds": 3})
    assert repr(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_commands_refuse_it_in_one_sentence(run: Path, victim: Path) -> None:
    plant(run / "seed-0", victim)
    done = kedge_command("run", "--out", str(run), "--resume", "--rounds", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {run} has a link, 'seed-0'")
    assert done.stderr.count("\n") == 1


def test_comparisons_and_sweeps_with_a_link_are_not_resumed(tmp_path: Path, victim: Path) -> None:
    configs = [Config(method=m, **FAST | {"seeds": (0,)}) for m in ("fedavg", "fedprox")]
    rows = train.method_jobs(configs)
    grid = train.setting_jobs(combine({"lr": [0.1, 0.2]}, flags=FAST))
    train.experiment("compare", rows, tmp_path / "c")
    train.experiment("sweep", grid, tmp_path / "s")
    for folder, inner in ((tmp_path / "c", "fedprox"), (tmp_path / "s", "lr_0.2")):
        assert (folder / inner / "config.toml").exists()
        for place in (f"{inner}/log.txt", inner, "beside"):
            plant(folder / place, victim)
            with pytest.raises(KedgeError, match=f"has a link, '{place}'"):
                if folder.name == "c":
                    train.experiment("compare", rows, folder, resume=True)
                else:
                    train.experiment("sweep", grid, folder, resume=True)
            (folder / place).unlink()


def test_reproduce_does_not_go_on_in_a_link(tmp_path: Path, victim: Path) -> None:
    words = ["reproduce", "fedimpro/table1", "--scale", "quick", "--rows", "fedavg"]
    words += ["--rounds", "1", "--results", str(tmp_path / "results")]
    for place in (".runs", ".runs/fedimpro", ".runs/fedimpro/table1", "fedimpro"):
        path = tmp_path / "results" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim / "empty")
        done = kedge_command(*words)
        assert done.returncode == 2, place
        assert "link" in done.stderr
        assert "should not happen" not in done.stderr
        shutil.rmtree(tmp_path / "results")


@pytest.mark.parametrize("goal", ["precious", "new", "empty", ""])
@pytest.mark.parametrize(
    "place", ["log.txt", "environment.json", ".lock", "seed-0", "log-csv", "bundle.json", "stop"]
)
def test_a_new_run_writes_and_deletes_nothing_through_links(
    place: str, goal: str, tmp_path: Path, victim: Path
) -> None:
    """Its folder is there already, with links."""
    out = tmp_path / "prepared"
    out.mkdir()
    (out / place).symlink_to(victim / goal)
    with pytest.warns() if place == "log-csv" else pytest.MonkeyPatch.context():
        assert named(place, lambda: kedge.run("fedavg", out=out, log="csv", **FAST))


def test_pipes_and_folders_in_the_place_of_files_neither_hang_nor_harm(
    tmp_path: Path, victim: Path
) -> None:
    for number, place in enumerate(("log.txt", ".lock", "stop", "result.json")):
        for make in (os.mkfifo, os.mkdir):
            out = tmp_path / f"{number}-{make.__name__}"
            out.mkdir()
            make(out / place)
            assert named(place, lambda out=out: kedge.run("fedavg", out=out, **FAST))


def test_a_log_that_is_also_a_file_elsewhere_is_not_appended_to(run: Path, victim: Path) -> None:
    (run / "log.txt").unlink()
    os.link(victim / "precious", run / "log.txt")
    with pytest.raises(KedgeError, match=r"log\.txt cannot be written: it has several names"):
        kedge.run("fedavg", out=run, resume=True, **FAST | {"rounds": 3})
    (run / "log.txt").unlink()
    os.link(victim / "metrics.jsonl", run / "new.csv")
    kedge.write_report(run, run / "report.html", csv=run / "new.csv")  # a rename: nothing of it


def test_a_file_that_the_user_names_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.csv").write_text("old")
    (tmp_path / "records.csv").symlink_to(tmp_path / "kept.csv")
    (tmp_path / "disk").mkdir()
    (tmp_path / "pages").symlink_to(tmp_path / "disk")
    kedge.write_report(run, tmp_path / "pages" / "r.html", csv=tmp_path / "records.csv")
    assert (tmp_path / "disk" / "r.html").exists()
    assert not (tmp_path / "records.csv").is_symlink()
    assert (tmp_path / "kept.csv").read_text() == "old"
    (tmp_path / "run").rename(tmp_path / "disk" / "run")
    (tmp_path / "mine").symlink_to(tmp_path / "disk" / "run")  # so may the folder of a run
    kedge.run("fedavg", out=tmp_path / "mine", resume=True, **FAST | {"rounds": 3})
    assert len(TrainingFolder(tmp_path / "mine").records(0, 3)) == 3
