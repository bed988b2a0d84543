"""Install a wheel into a new environment outside the repository, and use it there."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

#: What a user does first. ``kedge`` is the command of the new environment.
COMMANDS = (
    ("kedge", "list"),
    ("kedge", "reproduce"),  # reads the recipes
    ("kedge", "check", "fedavg", "scaffold"),
    ("kedge", "run", "--method", "scaffold", "--rounds", "2", "--clients", "4", "--out", "run"),
    ("kedge", "report", "run", "-o", "report.html"),  # reads the templates
    ("kedge", "evaluate", "run"),
    ("kedge", "predict", "run", "digits", "-o", "predictions.csv"),
)
PLACE = "import kedge, sys; sys.exit(not kedge.__file__.startswith(sys.prefix))"


class Failed(Exception):
    """A command of the trial failed."""


def try_wheel(
    wheel: Path, constraints: Path, version: str, python: str, demo: bool = False
) -> None:
    """Install a wheel with the constraints, and run :data:`COMMANDS`.

    Raises:
        Failed: a command fails, or another kedge than that of the wheel answers.
    """
    with tempfile.TemporaryDirectory(prefix="kedge-release-") as name:
        folder = Path(name)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"KEDGE_CACHE": str(folder / "cache"), "COLUMNS": "120"}
        _run([python, "-m", "venv", str(folder / "venv")], folder, env)
        bin_ = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        inside = str(bin_ / "python")
        pip = [inside, "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "-c", str(constraints), str(wheel)], folder, env)
        _run([*pip, "check"], folder, env)
        _run([inside, "-c", PLACE], folder, env)
        command = str(bin_ / "kedge")
        told = _run([command, "--version"], folder, env).strip()
        if version not in told.split():
            raise Failed(f"kedge --version says {told!r}, not {version}")
        for words in (*COMMANDS, *([("kedge", "demo")] if demo else [])):
            _run([command, *words[1:]], folder, env)
        rows = (folder / "predictions.csv").read_text(encoding="utf-8").splitlines()
        if len(rows) < 100:
            raise Failed(f"predictions.csv has {len(rows)} lines")


def _run(command: Sequence[str], cwd: Path, env: dict[str, str]) -> str:
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=1800
    )
    words = " ".join(Path(command[0]).name if i == 0 else w for i, w in enumerate(command))
    if done.returncode:
        raise Failed(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}"[-6000:])
    print(f"{time.monotonic() - start:6.1f} s  {words}", flush=True)
    return done.stdout
