"""The command line starts without torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time

import pytest
import typer

from kedge.cli import app as cli
from tests.cli.commands import kedge_command

HEAVY = {"torch", "numpy", "matplotlib", "sklearn", "scipy", "PIL", "safetensors"}


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["-h"], [], ["rum"]])
def test_version_and_help_import_nothing_heavy(args: list[str]) -> None:
    code = f"""
import json, sys
sys.argv = ["kedge", *{args!r}]
from kedge.cli import main
try:
    main()
except SystemExit:
    pass
print(json.dumps([list(sys.modules), sum(__import__("os").times()[:2])]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    modules, seconds = json.loads(done.stdout.splitlines()[-1])
    assert not HEAVY & set(modules)
    assert not [m for m in modules if m.startswith(("kedge.core", "kedge.runs", "kedge.api"))]
    assert seconds < 1.0  # 0.1 to 0.2 s of CPU; 2 s with torch


def test_help_lines_are_the_docstrings() -> None:
    for name, entry in cli.COMMANDS.items():
        function = cli.function_of(name)
        text = function.info.help if isinstance(function, typer.Typer) else inspect.getdoc(function)
        first = str(text or "").split("\n\n")[0]
        assert " ".join(first.split()) == entry.help, name


def test_help_of_a_command_lists_its_options() -> None:
    said = kedge_command("run", "--help").stdout
    for option in ("--method", "-m", "--partition", "--no-nesterov", "--eval-every", "--resume"):
        assert option in said
    assert "Optimiser" in said
    assert "kedge run [OPTIONS]" in said


@pytest.mark.parametrize("flag", ["--label", "--missing", "--drop", "--id"])
def test_an_option_of_the_data_is_told_to_stand_in_brackets(flag: str) -> None:
    done = kedge_command("diagnose", "hospitals", flag, "sick")
    assert done.returncode == 2
    assert f"diagnose has no {flag}: it is an option of the data" in done.stderr
    assert f"{flag.lstrip('-')}=" in done.stderr


def test_a_wrong_option_is_said_to_be_one() -> None:
    done = kedge_command("show", "--nope")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "--nope" in done.stderr
    start = time.process_time()
    assert "Did you mean 'run'?" in kedge_command("rum").stderr
    assert time.process_time() - start < 1
