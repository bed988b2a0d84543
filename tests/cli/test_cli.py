"""Commands as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import kedge_command

GOOD = """
import kedge
from dataclasses import dataclass
from kedge.core import tree

@kedge.register
@dataclass(frozen=True)
class Ridge(kedge.Part):
    weight: float = 0.1
    neutral = {"weight": 0.0}
    strays = 0.1  # it pulls towards 0

    def term(self, v, params, batch, out):
        return self.weight * tree.sq_norm(params)
"""


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "show", "scafold"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: no part 'scafold'. Did you mean 'scaffold'? See: kedge list\n"


@pytest.mark.parametrize("name", ["bench", "bench digits --rounds 2", "conformance fedavg"])
def test_a_command_that_has_moved_says_where(name: str) -> None:
    done = kedge_command(*name.split())
    assert done.returncode == 2
    module = {"bench": "bench", "conformance": "bench.conformance"}[name.split()[0]]
    assert f"is in the repository: python -m {module}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_list_and_its_patterns() -> None:
    done = kedge_command("list")
    assert done.returncode == 0
    for name in ("scaffold", "fedprox", "moon", "fedrep"):
        assert name in done.stdout
    only = kedge_command("list", "fed*")
    assert "fedprox" in only.stdout
    assert "mixup" not in only.stdout
    none = kedge_command("list", "zzz")
    assert none.returncode == 2
    assert none.stderr.startswith("error: no part 'zzz'")


def test_show_has_equation_reference_fields_and_traffic() -> None:
    done = kedge_command("show", "scaffold")
    assert done.returncode == 0
    for piece in (
        "cₖ⁺ = cₖ - c",
        "arXiv:1910.06378",
        "eta_g",
        "extra down",
        "P numbers",
        "client keeps",
        "yes: only sums",
    ):
        assert piece in done.stdout
    assert "moon:fedcog" in kedge_command("show", "moon").stdout


def test_unknown_name_suggests_the_right_one() -> None:
    done = kedge_command("show", "scafold")
    assert done.returncode == 2
    assert done.stderr == "error: no part 'scafold'. Did you mean 'scaffold'? See: kedge list\n"
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_check_prints_laws_and_identities() -> None:
    done = kedge_command("check", "fedprox")
    assert done.returncode == 0
    assert "law engines" in done.stdout
    assert "expected 0.736188, got 0.736188" in done.stdout
    assert "laws and identities hold for fedprox" in done.stdout


def test_check_of_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = kedge_command("check", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold for ridge" in done.stdout
    assert "ridge: no identity yet" in done.stderr
    assert "register it with @kedge.oracle" in done.stderr
    (tmp_path / "bad.py").write_text(GOOD.replace("self.weight *", "self.weight + "))
    done = kedge_command("check", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAILS" in done.stdout
    assert "ridge: not right" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [("x = 1\n", "registers no part"), (None, "there is no file 'mine.py'")],
)
def test_check_of_a_file_without_parts(tmp_path: Path, content: str | None, message: str) -> None:
    if content:
        (tmp_path / "mine.py").write_text(content)
    done = kedge_command("check", "mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_version_and_help() -> None:
    assert kedge_command("--version").stdout.startswith("kedge 0.")
    assert "check" in kedge_command("--help").stdout


def test_run_without_arguments_works_offline(tmp_path: Path) -> None:
    done = kedge_command("run", "--rounds", "2", "--seeds", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout
    assert "round 2/2" in done.stderr
    assert (tmp_path / "runs" / "digits-fedavg-1" / "result.json").exists()


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    done = kedge_command("run", "rounds=2", "--seeds", "0,1", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["seeds"] == [0, 1]
    assert found["config"]["rounds"] == 2


def test_a_folder_of_hospitals_runs_with_one_command(tmp_path: Path) -> None:
    lines = [
        "age,dose,diagnosis",
        *(f"{i % 7},{i % 5},{'ill' if i % 7 > 3 else 'well'}" for i in range(40)),
    ]
    (tmp_path / "hospitals").mkdir()
    for k in range(10):
        (tmp_path / "hospitals" / f"hospital-{k}.csv").write_text("\n".join(lines))
    done = kedge_command(
        "run", "--data", "hospitals(label=diagnosis)", "--method", "scaffold", "--rounds", "3",
        "--json", "--seeds", "0", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["last"]["mean"] > 50
    missing = kedge_command("run", "--data", "hospitals", cwd=tmp_path)
    assert missing.returncode == 2
    assert "label=" in missing.stderr


def test_compare_prints_a_table(tmp_path: Path) -> None:
    done = kedge_command(
        "compare", "fedavg", "scaffold+fedprox", "--rounds", "2", "--seeds", "0,1", "--target",
        "10", "--plot", "c.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for piece in ("gain", "95 % interval", "rounds to", " up ", "scaffold+fedprox"):
        assert piece in done.stdout
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_a_toml_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('method = "fedsam"\nrounds = 9\nseeds = [4]\n')
    done = kedge_command("run", "a.toml", "rounds=2", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["method"] == "fedsam"
    assert found["config"]["rounds"] == 2
    assert found["seeds"] == [4]


def test_resume_needs_a_folder_and_takes_the_stored_settings(tmp_path: Path) -> None:
    assert "--resume needs the folder" in kedge_command("run", "--resume").stderr
    kedge_command("run", "--rounds", "2", "--seeds", "0", "--out", "r", cwd=tmp_path)
    done = kedge_command("run", "--out", "r", "--resume", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["config"]["rounds"] == 2
    again = kedge_command("run", "--rounds", "2", "--seeds", "0", "--out", "r", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_the_partition_of_a_run_without_one(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    for name in ("north", "south"):
        rows = "".join(f"{i},{'ny'[i % 2]}\n" for i in range(6))
        (tmp_path / "h" / f"{name}.csv").write_text("age,sick\n" + rows)
    done = kedge_command("partition", "--data", "h(label=sick)", cwd=tmp_path)
    assert "silos" in done.stdout
    assert "north" in done.stdout
    assert "dirichlet" in kedge_command("partition", "--clients", "3").stdout
    text = " ".join(kedge_command("partition", "--help").stdout.split())
    assert "drop=[chol,visit]" in text


def test_partition_and_data_and_lists(tmp_path: Path) -> None:
    done = kedge_command(
        "partition", "dirichlet(0.1)", "--clients", "6", "-o", "p.svg", "-o", "p.json", cwd=tmp_path
    )
    assert "class_dirichlet_capped(alpha=0.1)" in done.stdout
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    used = kedge_command("run", "--partition", "p.json", "--rounds", "1", "--json", cwd=tmp_path)
    assert json.loads(used.stdout)["partition_hash"][0] in (tmp_path / "p.json").read_text()
    assert "resnet18" in kedge_command("list", "models").stdout
    assert "label_shards" in kedge_command("list", "partitions").stdout


def test_data_is_a_short_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))
    (tmp_path / "a.csv").write_text("x,label\n1,0\n2,1\n3,1\n")
    (tmp_path / "broken.npz").write_text("no archive")
    short, long = kedge_command("data").stdout, kedge_command("data", "--all").stdout
    lines = {line.split()[0]: line.split() for line in short.splitlines() if line}
    assert " ".join(lines["digits"]) == "digits built in 1x8x8 10 1438 359 scikit-learn"
    assert lines["a"][:3] == ["a", "csv", "3"]
    assert "broken" not in lines
    assert "Cannot be read: broken (kedge data --all: why)" in short
    assert "Not on this machine: cifar10, cifar100," in short
    assert len(short.splitlines()) <= 11
    [line] = [line for line in long.splitlines() if line.startswith("cifar10 ")]
    words = "cifar10 3x32x32 10 classes cifar10.npz, or the folder cifar-10-batches-py"
    assert line.split() == words.split()
    [line] = [line for line in long.splitlines() if line.startswith("broken")]
    assert "broken.npz" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--method", "scafold"], "no part 'scafold'. Did you mean 'scaffold'"),
        (["run", "--data", "digitz"], "digitz"),
        (["run", "--data", "nothing.csv"], "nothing.csv"),
        (["run", "--model", "lenet6"], "no model 'lenet6'. Did you mean 'lenet5'"),
        (["run", "--device", "tpu"], "device = 'tpu' is not one of: auto, cpu, cuda"),
        (["run", "--lr", "-1"], "lr = -1.0 is below 0 (--lr)"),
        (["run", "none.toml"], "there is no file 'none.toml'"),
        (["run", "--clients", "3", "--per-round", "9"], "per_round = 9 is more than the 3 clients"),
        (["partition", "dirichlet(0)"], "alpha"),
        (["compare", "fedavg", "fedprox(mu="], "expected a value, found the end"),
        (["check", "nope"], "no part 'nope'"),
    ],
)
def test_mistakes_end_in_one_message(args: list[str], message: str, tmp_path: Path) -> None:
    done = kedge_command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
