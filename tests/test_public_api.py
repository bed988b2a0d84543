"""The public names, pinned: adding or losing one is a decision."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kedge

HEAVY = ("torch", "numpy", "matplotlib", "sklearn", "scipy", "PIL", "safetensors")


def modules_after(code: str) -> list[str]:
    """Names of the modules that a new process holds after ``code``."""
    code = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_public_names() -> None:
    assert sorted(kedge.__all__) == sorted(
        [
            "SGD", "Adam", "Batch", "Claim", "Classification", "Federation", "KedgeError",
            "LocalWork", "Mean", "Method", "Model", "MultiLabel", "Out", "Part", "Regression",
            "Result", "Results", "Round", "Run", "Simulation", "Spec", "Stack", "Sum", "View",
            "Weights", "check_part", "compare", "diagnose", "fit", "load", "oracle", "parse",
            "register", "register_metric", "reproduce", "run", "sweep", "write_report",
        ]
    )  # fmt: skip
    assert all(hasattr(kedge, name) for name in kedge.__all__)
    assert set(kedge.__all__) <= set(dir(kedge))


def test_type_checkers_see_the_names_that_are_imported_lazily() -> None:
    tree = ast.parse(Path(kedge.__file__).read_text(encoding="utf-8"))
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == kedge._MODULES
    assert sorted(seen) == sorted(kedge.__all__)


def test_importing_kedge_imports_nothing_heavy() -> None:
    for code in ("import kedge; kedge.__version__; dir(kedge)", "from kedge import KedgeError"):
        assert not set(HEAVY) & set(modules_after(code))


def test_names_and_modules_come_at_their_first_use() -> None:
    assert "kedge.api" in modules_after("import kedge\nassert callable(kedge.run)")
    assert "torch" in modules_after("from kedge import *\nassert Simulation and parse('scaffold')")
    modules_after("import kedge\nassert 'mlp' in kedge.models.models")
    modules_after("import kedge\nassert kedge.parts.SCAFFOLD().name == 'scaffold'")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'kedge' has no attribute 'simulate'"):
        _ = kedge.simulate
    assert not hasattr(kedge, "__wrapped__")


def test_what_is_public_can_be_pickled() -> None:
    method = kedge.parse("scaffold+fedprox(mu=0.5)")
    assert pickle.loads(pickle.dumps(method)) == method
    for name in kedge.__all__:
        assert pickle.loads(pickle.dumps(getattr(kedge, name))) is getattr(kedge, name)
