"""The declared dependencies are those that the source imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE_NAMES = {"sklearn": "scikit-learn", "PIL": "pillow"}
# Imported where they are found only: an export, what comes with some builds of torch, the server of
# the board, trackers, and Flower with what comes with it.
OPTIONAL = {"datasets", "flwr", "torchvision", "triton"}
OPTIONAL |= {"starlette", "uvicorn", "tensorboard", "mlflow", "wandb", "cryptography", "httpx"}
OPTIONAL |= {"google", "pyarrow"}  # protobuf; Parquet


def imported() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    top = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    return {PACKAGE_NAMES.get(name, name) for name in top - OPTIONAL - {"kedge"}}


def declared() -> set[str]:
    return {re.split(r"[<>=!~\[ ]", text)[0] for text in PROJECT["dependencies"]}


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    assert imported() == declared()


def test_torch_has_an_upper_bound_that_admits_the_one_at_hand() -> None:
    (text,) = (d for d in PROJECT["dependencies"] if d.startswith("torch"))
    low, high = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+\.\d+)", text).groups()
    release = [int(number) for number in torch.__version__.split(".")[:2]]
    assert [int(n) for n in low.split(".")] <= release < [int(n) for n in high.split(".")]


def test_importing_kedge_gives_no_warning() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import kedge"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_importing_kedge_does_not_import_the_compiler() -> None:
    """Nor what it brings along: sympy takes a quarter of the time that a client needs to start."""
    code = "import sys, kedge; print({'sympy', 'torch._inductor'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
