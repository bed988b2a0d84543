"""``--load FILE.py``: parts, models and partitions of one's own in every command with names."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kedge.cli.app as cli
from kedge.errors import LoadError
from kedge.loading import load_file
from tests.cli.commands import kedge_command

MINE = '''
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import nn

import kedge
from kedge.core import tree
from kedge.core.part import Doc, Range
from kedge.data.partition import partitions
from neighbour import HALF


@kedge.register
@dataclass(frozen=True)
class Tether(kedge.Part):
    """Tie the local model to the anchor with a rope of its own."""

    mu: Annotated[float, Doc("stiffness of the rope"), Range(0)] = 0.1
    neutral = {"mu": 0.0}

    def term(self, v, params, batch, out):
        return HALF * self.mu * tree.sq_dist(params, v.anchor.params)


@kedge.models.models.register("tiny")
def tiny(shape, outputs, *, width=4):
    """Two small layers."""
    inputs = int(np.prod(shape))
    stage = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU())
    return nn.Sequential(OrderedDict(stage1=stage, head=nn.Linear(width, outputs)))


@partitions.register("halves")
def halves(labels, clients, rng):
    """Cut the samples in order."""
    return np.array_split(np.arange(len(labels)), clients)
'''
QUICK = ("--rounds", "1", "--seeds", "0", "--clients", "3", "--steps", "1", "--engine", "loop")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("HALF = 0.5\n")
    return tmp_path


def test_run_with_part_model_and_partition(folder: Path) -> None:
    done = kedge_command(
        "run", "--method", "tether(mu=0.5)+scaffold", "--model", "tiny(width=5)",
        "--partition", "halves", *QUICK, "--out", "r", "--json", "--load", "mine.py", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "tether(mu=0.5)+scaffold"
    noted = json.loads((folder / "r" / "environment.json").read_text())["loaded"]
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    assert noted == [{"path": str(folder / "mine.py"), "sha256": digest}]
    again = kedge_command("run", "--out", "r", "--resume", "--json", cwd=folder)
    assert again.returncode == 2
    assert "no part 'tether'" in again.stderr
    assert f"--load {folder / 'mine.py'}" in again.stderr
    again = kedge_command("run", "--out", "r", "--resume", "--load", "mine.py", cwd=folder)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["compare", "fedavg", "tether", *QUICK], "tether"),
        (["sweep", "tether.mu=0.1,1", "--method", "tether", *QUICK], "tether"),
        (["check", "tether"], "hold for tether"),
        (["check", "mine.py"], "hold for tether"),
        (["show", "tether"], "Tie the local model to the anchor with a rope of its own"),
        (["list", "teth*"], "Tie the local model"),
        (["list", "models"], "Two small layers"),
        (["partition", "halves", "--clients", "3"], "halves"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)  # fmt: skip
def test_every_command_that_takes_names(folder: Path, args: list[str], said: str) -> None:
    done = kedge_command(*args, "--load", "mine.py", "--load", "mine.py", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    assert said in done.stdout
    assert kedge_command("show", "tether").returncode == 2  # nothing of it stays


def test_what_a_file_registers_is_shown_with_its_file(folder: Path) -> None:
    done = kedge_command("show", "tether", "--load", "mine.py", cwd=folder)
    text = "".join(done.stdout.split())  # without line breaks
    assert f"--load{folder / 'mine.py'}" in text
    assert f"Tetherin{folder / 'mine.py'}" in text


def test_every_command_that_runs_or_shows_parts_has_the_option() -> None:
    without = ("board", "data", "demo", "flower")  # those of flower have it, not the group
    for name in cli.COMMANDS:
        assert ("--load" in kedge_command(name, "--help").stdout) is (name not in without)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file 'mine.py'; give a Python file that registers a part"),
        (
            "x = 1\n",
            "mine.py registers no part, model or partition; put @kedge.register above",
        ),
        ("x = 1\nclass Broken(:\n", "mine.py, line 2: invalid syntax"),
        ("x = 1\n  y = 2\n", "mine.py, line 2: unexpected indent"),
        ("\n\ny = x\n", "mine.py, line 3: NameError: name 'x' is not defined"),
        (
            "import json\ndef f():\n    json.loads('x')\n\nf()\n",
            "mine.py, line 3: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        ("import sys\nsys.exit(3)\n", "mine.py, line 2: SystemExit: 3"),
        (
            MINE.replace("Range(0)", "Range(0, wrong=1)"),
            "an annotation of tether cannot be evaluated: TypeError: Range.__new__() got an "
            "unexpected keyword argument 'wrong'",
        ),
        (
            MINE.replace("Range(0)", "Rnage(0)").replace("from __future__ import annotations", ""),
            "mine.py, line 23: NameError: name 'Rnage' is not defined",
        ),
        ("x = '\0'\n", "null bytes"),
        (
            MINE.replace("class Tether", "class SCAFFOLD"),
            "part 'scaffold' is registered twice; choose another name",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded(folder: Path, text: str | None, message: str) -> None:
    (folder / "mine.py").unlink() if text is None else (folder / "mine.py").write_text(text)
    for args in (["show", "scaffold"], ["run", *QUICK]):
        done = kedge_command(*args, "--load", "mine.py", cwd=folder)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert not (folder / "runs").exists()


def _loaded_modules() -> list[ModuleType]:
    return [m for name, m in sys.modules.items() if name.startswith("kedge_file_")]


def test_a_file_that_fails_leaves_nothing_behind(folder: Path) -> None:
    (folder / "mine.py").write_text(MINE + "\nraise RuntimeError('late')\n")
    with pytest.raises(LoadError, match="RuntimeError: late"):
        load_file(folder / "mine.py")
    assert kedge_command("show", "tether").returncode == 2
    assert not any(m.__file__ == str(folder / "mine.py") for m in _loaded_modules())


def test_a_folder_is_not_a_file(folder: Path) -> None:
    done = kedge_command("list", "--load", str(folder))
    assert done.returncode == 2
    assert "there is no file" in done.stderr


def test_a_file_with_only_a_model_has_no_part_to_check(folder: Path) -> None:
    (folder / "mine.py").write_text(MINE.replace("@kedge.register\n", ""))
    done = kedge_command("check", "mine.py", cwd=folder)
    assert done.returncode == 2
    assert "mine.py registers no part; put @kedge.register above its class" in done.stderr


@pytest.mark.long
def test_parts_of_a_file_work_in_worker_processes(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "run", "--method", "tether", *QUICK, "--workers", "2",
         "--device", "cpu", "--load", str(folder / "mine.py"), "--out", str(folder / "r")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
