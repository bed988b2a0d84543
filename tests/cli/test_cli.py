"""Commands as a user types them."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

from kedge.cli import app as cli
from kedge.cli import kinds, main, pages
from kedge.core.part import Part, parts, register

GOOD = """
import kedge
from dataclasses import dataclass
from kedge.core import tree

@kedge.register
@dataclass(frozen=True)
class Ridge(kedge.Part):
    weight: float = 0.1
    neutral = {"weight": 0.0}

    def term(self, v, params, batch, out):
        return self.weight * tree.sq_norm(params)
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def kedge_command(*args: str, cwd: Path | None = None) -> Done:
    """The command in this process: what it prints, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(cli.console, "_width", 120)
        patch.setattr(sys, "argv", ["kedge", *args])
        if cwd is not None:
            patch.chdir(cwd)
        known = set(parts)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        finally:
            for name in set(parts) - known:  # a user's file registered it
                parts.remove(name)
    return Done(code, out.getvalue(), err.getvalue())


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "show", "scafold"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: no part 'scafold'. Did you mean 'scaffold'? See: kedge list\n"


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


KINDS = {
    "parts": "scaffold",
    "models": "resnet18",
    "partitions": "class_dirichlet_capped",
    "shifts": "rotation",
    "data": "csv",
    "splits": "holdout",
    "augmentations": "crop",
    "optimizers": "adam",
    "schedules": "cosine",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_and_shown_alike(kind: str) -> None:
    listed = kedge_command("list", kind)
    assert listed.returncode == 0
    assert KINDS[kind] in listed.stdout
    page = kedge_command("show", KINDS[kind])
    assert page.returncode == 0
    for heading in ("type", "default", "meaning", "use", "source"):
        assert heading in page.stdout
    again = kedge_command("show", f"{kind}:{KINDS[kind]}")
    assert again.stdout == page.stdout


def test_every_option_of_everything_has_help() -> None:
    for kind in kinds.KINDS:
        for name, thing in kind.entries().items():
            assert pages.title(thing), name
            for row in kind.schema(name).rows():
                assert row.doc, f"{kind.name} {name}.{row.name} has no Doc"
                assert row.type not in ("any", ""), f"{kind.name} {name}.{row.name} has no type"
            assert kedge_command("show", f"{kind.word}:{name}").returncode == 0


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("fedavg", ("FedAvg", "wᵗ⁺¹ = wᵗ + Σₖ pₖ", "arXiv:1602.05629", "without parts")),
        ("resnet18", ("bn | gn", "cifar | imagenet", "at least 1", "most groups of a GroupNorm")),
        ("dirichlet", ("short for  class_dirichlet_capped", "int | classes", "above 0")),
        ("adam", ("beta1", "at least 0 and below 1", "arXiv:1412.6980")),
        ("cosine", ("must be given", "rounds until the floor", "cosine(rounds=...)")),
        ("data:cifar10", ("3x32x32", "airplane", "put cifar10.npz")),
        ("csv", ("column with the label", "csv(path='...')")),
        ("moon:fedcog", ("moon:fedcog  =  moon(mu=0.01",)),
        ("crop(4)", ("pixels on every side", "crop(padding=4)")),
    ],
)
def test_pages_say_what_one_needs(name: str, pieces: tuple[str, ...]) -> None:
    page = kedge_command("show", name)
    assert page.returncode == 0
    for piece in pieces:
        assert piece in page.stdout


def test_presets_equal_to_the_defaults_are_marked() -> None:
    @register
    @dataclass(frozen=True)
    class TwoPresets(Part):
        beta: float = 1.0
        presets: ClassVar[dict[str, dict[str, float]]] = {"a": {"beta": 1.0}, "b": {"beta": 2.0}}

    try:
        page = kedge_command("show", "twopresets").stdout
    finally:
        parts.remove("twopresets")
    assert "twopresets:a  =  twopresets(beta=1.0)  (= the defaults)" in page
    assert "twopresets:b  =  twopresets(beta=2.0)\n" in page


def test_a_name_of_several_kinds_asks_which() -> None:
    done = kedge_command("show", "silos")
    assert done.returncode == 2
    assert "'silos' is the name of a partition and a dataset" in done.stderr
    assert "kedge show partition:silos or kedge show data:silos" in done.stderr
    assert "Each group of the data" in kedge_command("show", "partition:silos").stdout
    assert "per client" in kedge_command("show", "data:silos").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "resnet81"], "no model 'resnet81'. Did you mean 'resnet18'"),
        (["show", "model:lenet"], "no model 'lenet'. Did you mean 'lenet5'"),
        (
            ["show", "cosin"],
            "no schedule 'cosin'. Did you mean 'cosine'? See: kedge list schedules",
        ),
        (["show", "zzzz"], "nothing is called 'zzzz'. See: kedge list KIND"),
        (["list", "modles"], "Did you mean 'models'"),
    ],
)
def test_wrong_names_of_any_kind(args: list[str], message: str) -> None:
    done = kedge_command(*args)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_pattern_finds_things_of_any_kind() -> None:
    done = kedge_command("list", "resnet*")
    assert "resnet18" in done.stdout
    assert "model" in done.stdout


def test_check_prints_laws_and_identities() -> None:
    done = kedge_command("check", "fedprox")
    assert done.returncode == 0
    assert "law loop=vector" in done.stdout
    assert "expected 0.736188, got 0.736188" in done.stdout
    assert "laws and identities hold for fedprox" in done.stdout


def test_check_of_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = kedge_command("check", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold for ridge" in done.stdout
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
    for piece in ("gain", "95 % interval", "to 10", "MB up", "scaffold+fedprox"):
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


def test_partition_and_data_and_lists(tmp_path: Path) -> None:
    done = kedge_command(
        "partition", "dirichlet(0.1)", "--clients", "6", "-o", "p.svg", "-o", "p.json", cwd=tmp_path
    )
    assert "class_dirichlet_capped(alpha=0.1)" in done.stdout
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    used = kedge_command("run", "--partition", "p.json", "--rounds", "1", "--json", cwd=tmp_path)
    assert json.loads(used.stdout)["partition_hash"][0] in (tmp_path / "p.json").read_text()
    assert "digits" in kedge_command("data").stdout
    assert "resnet18" in kedge_command("list", "models").stdout
    assert "label_shards" in kedge_command("list", "partitions").stdout


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
