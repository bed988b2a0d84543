"""What every oracle expects and what was found: of kedge, and of other libraries.

Other libraries run the quadratic oracles in environments of their own, through the scripts in
``kedge/check/rivals``; their rows inform, they decide nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kedge.check.identities.common import BEST, LR, STEPS, A, H
from kedge.check.oracles import oracles_of
from kedge.check.problems import on_engine
from kedge.core.method import parse
from kedge.errors import KedgeError, UnknownName

SCRIPTS = Path(__file__).parent / "rivals"
TOLERANCE = 1e-4  # for other libraries, which compute in single precision
TIMEOUT = 300  # seconds
INSTALL = {
    "pfl": ["pip install pfl==0.6.0 torch==2.13.0 numpy"],
    "fedlab": [
        "pip install torch==2.13.0 numpy pandas scikit-learn pynvml tqdm munch pillow",
        "pip install --no-deps fedlab==1.3.0",
    ],
}


@dataclass(frozen=True)
class Row:
    """One oracle on one method. ``ok`` is None where nothing was found, and ``note`` says why."""

    method: str
    oracle: str
    expected: float | None = None
    got: float | None = None
    ok: bool | None = None
    note: str = ""


def own_rows(names: Iterable[str]) -> list[Row]:
    """Every claim of every oracle of these methods; of the two engines the one that is further
    off."""
    return [row for name in names for row in _rows_of(name)]


def _rows_of(name: str) -> list[Row]:
    method = parse(name)
    if len(method.parts) > 1:
        raise KedgeError(f"conformance takes one part at a time, not {name!r}")
    part = method.parts[0] if method.parts else None
    label, rows = part.name if part else "fedavg", []
    for oracle, claims in oracles_of(part):
        try:
            with on_engine("loop"):
                loop = list(claims())
            with on_engine("vector"):
                vector = list(claims())
        except KedgeError as error:
            rows.append(Row(label, oracle, ok=False, note=str(error)))
            continue
        for one, other in zip(loop, vector, strict=True):
            worse = other if one.holds else one
            what = f"{oracle}: {worse.what}"
            rows.append(Row(label, what, worse.expected, worse.got, worse.holds))
    return rows or [Row(label, "none", note="has no oracle")]


def fixed_points(mu: float = 1.0) -> dict[str, tuple[str, float]]:
    """What the usual pair of quadratics settles at, worked out by hand: FedAvg beside the optimum,
    FedProx a little nearer, SCAFFOLD at it."""

    def between(pull: list[float]) -> float:
        return sum(p * a for p, a in zip(pull, A, strict=True)) / sum(pull)

    plain = [1 - (1 - LR * h) ** STEPS for h in H]
    proximal = [(1 - (1 - LR * (h + mu)) ** STEPS) * h / (h + mu) for h in H]
    return {
        "fedavg": ("fixed point on two quadratics", between(plain)),
        "scaffold": ("optimum of two quadratics", BEST),
        "fedprox": (f"fixed point on two quadratics, mu = {mu:g}", between(proximal)),
    }


def pythons(against: str, python_of: Iterable[str] = ()) -> dict[str, str]:
    """The Python to ask for each library: named as ``pfl=PATH``, or in $KEDGE_PFL_PYTHON, or this
    one."""
    wanted = list(dict.fromkeys(n for n in map(str.strip, against.split(",")) if n))
    named = {}
    for text in python_of:
        name, sign, path = text.partition("=")
        if not (sign and path):
            raise KedgeError(
                f"--python-of takes NAME=PATH, as in pfl=venv/bin/python, not {text!r}"
            )
        named[name] = path
    for name in (*wanted, *named):
        if name not in INSTALL:
            raise UnknownName("library", name, INSTALL)
    if idle := [name for name in named if name not in wanted]:
        raise KedgeError(f"--python-of names {idle[0]}, which --against does not")
    chosen = {}
    for name in wanted:
        python = named.get(name) or os.environ.get(f"KEDGE_{name.upper()}_PYTHON") or sys.executable
        if shutil.which(python) is None:
            raise KedgeError(f"the Python for {name} is not there or cannot be run: {python}")
        chosen[name] = python
    return chosen


def rival_rows(name: str, python: str) -> tuple[list[Row], str]:
    """What another library gives on the quadratics, and what to type where it is not installed."""
    found, trouble, missing = _ask(name, python)
    note = "not installed" if missing else "failed" if trouble else ""
    rows = []
    for method, (oracle, expected) in fixed_points().items():
        got = found.get(method)
        ok = None if got is None else abs(got - expected) <= TOLERANCE
        why = note or ("" if method in found else "not reported")
        rows.append(Row(f"{name} {method}", oracle, expected, got, ok, why))
    if not trouble:
        return rows, ""
    if not missing:
        return rows, f"{name} failed under {python}: {trouble}"
    lines = [f"{name} is not installed for {python} ({trouble}). In an environment of its own:"]
    lines += [f"python -m venv venv-{name}"]
    lines += [f"venv-{name}/bin/{line}" for line in INSTALL[name]]
    again = f"kedge conformance --against {name} --python-of {name}=venv-{name}/bin/python"
    return rows, "\n  ".join([*lines, again])


def _ask(name: str, python: str) -> tuple[dict[str, float], str, bool]:
    """Where each method stands; else the trouble, and whether it is a missing library."""
    command = [python, str(SCRIPTS / f"{name}.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {TIMEOUT} seconds", False
    except OSError as error:
        return {}, str(error), False
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        kind, _, text = last.partition(": ")
        missing = kind == "ModuleNotFoundError"
        return {}, text if missing else last, missing
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        return {str(k): float(v) for k, v in json.loads(last).items()}, "", False
    except (ValueError, TypeError, AttributeError):
        return {}, f"the answer is not the expected JSON: {last[:80]!r}", False
