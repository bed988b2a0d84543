"""Conformance tables: expected and actual values of every oracle, for kedge and other libraries.

``python -m bench.conformance`` prints them. Other libraries run the quadratic oracles in their own
environments, through the scripts in ``bench/rivals``. Their rows are informative and never fail the
command.

The column *objective* tells which problem a method solves if clients have 1 and 3 samples and are
weighted by size: ``weighted``, the run's own; ``unweighted``, where every client counts alike; or
``neither``, as FedAvg with several local steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kedge.check import objective
from kedge.check.identities.common import BEST, LR, STEPS, A, H
from kedge.check.objective import name_objective, solved
from kedge.check.oracles import claims_on_engines, oracles_of
from kedge.cli.app import main
from kedge.cli.check import part_names
from kedge.cli.options import LOAD, load_files
from kedge.cli.screen import console, errors
from kedge.core.method import Method, parse
from kedge.core.part import Part, parts
from kedge.errors import KedgeError, UnknownName
from kedge.parts.proximal import FedProx

SCRIPTS = Path(__file__).parent / "rivals"
TOLERANCE = 1e-4  # for other libraries, which compute in float32
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
    """One oracle on one method; without a result ``ok`` is None and ``note`` gives the reason."""

    method: str
    oracle: str
    expected: float | None = None
    got: float | None = None
    ok: bool | None = None
    note: str = ""
    objective: str = ""  # which objective the method solves, in its first row


def own_rows(names: Iterable[str]) -> list[Row]:
    """Rows of every claim of every oracle of the named methods.

    A claim is run on both engines; the row shows a failure if there is one. Raises
    :class:`KedgeError` for a sum of several parts.
    """
    return [row for name in names for row in _rows_of(name)]


def _rows_of(name: str) -> list[Row]:
    method = parse(name)
    if len(method.parts) > 1:
        raise KedgeError(f"conformance takes one part at a time, not the sum {name!r}")
    part = method.parts[0] if method.parts else None
    label, rows = part.name if part else "fedavg", []
    for oracle, claims in oracles_of(part):
        try:
            rows += [
                Row(label, f"{oracle}: {claim.what}", claim.expected, claim.got, claim.holds)
                for claim in claims_on_engines(claims)
            ]
        except KedgeError as error:
            rows.append(Row(label, oracle, ok=False, note=str(error)))
    rows = rows or [Row(label, "none", note="has no oracle")]
    return [replace(rows[0], objective=_objective(part)), *rows[1:]]


def _objective(part: Part | None) -> str:
    """The objective that a method solves with clients of 1 and 3 samples, weighted by size, and its
    final w; empty if the method claims none. FedAvg and FedProx are shown for comparison."""
    if part is None:
        return describe(*solved(Method()))
    if isinstance(part, FedProx):
        return describe(*solved(dataclasses.replace(part, mu=1.0)))
    if part.solves is None:
        return ""
    if "regression" not in part.tasks:
        holds = all(point.holds for point in objective.fixed_points(part, "loop", "size"))
        return "weighted" if holds else "neither"
    where = "" if part.solves_for == "all" else f" ({part.solves_for})"
    return describe(*solved(dataclasses.replace(part, **part.solves))) + where


def describe(name: str, w: float) -> str:
    """An objective and the final w, as a cell of the table."""
    return f"{name}, {w:.4g}"


def fixed_points(mu: float = 1.0) -> dict[str, tuple[str, float]]:
    """``{method: (oracle, fixed point)}`` on the standard pair of quadratics, in closed form.

    SCAFFOLD converges to the optimum; FedAvg and FedProx do not.
    """

    def weighted_mean(weights: list[float]) -> float:
        return sum(p * a for p, a in zip(weights, A, strict=True)) / sum(weights)

    plain = [1 - (1 - LR * h) ** STEPS for h in H]
    proximal = [(1 - (1 - LR * (h + mu)) ** STEPS) * h / (h + mu) for h in H]
    return {
        "fedavg": ("fixed point on two quadratics", weighted_mean(plain)),
        "scaffold": ("optimum of two quadratics", BEST),
        "fedprox": (f"fixed point on two quadratics, mu = {mu:g}", weighted_mean(proximal)),
    }


def pythons(against: str, python_of: Iterable[str] = ()) -> dict[str, str]:
    """``{library: Python interpreter}`` for a comma-separated list of libraries.

    The interpreter is given as ``pfl=PATH`` in ``python_of``, or by $KEDGE_PFL_PYTHON; the default
    is the running one. Raises :class:`KedgeError` for a malformed option or a missing interpreter.
    """
    wanted = list(dict.fromkeys(n for n in map(str.strip, against.split(",")) if n))
    named = {}
    for text in python_of:
        name, sign, path = text.partition("=")
        if not (sign and path):
            raise KedgeError(
                f"--python-of takes NAME=PATH, for example pfl=venv/bin/python, not {text!r}"
            )
        named[name] = path
    for name in (*wanted, *named):
        if name not in INSTALL:
            raise UnknownName("library", name, INSTALL)
    if unused := [name for name in named if name not in wanted]:
        raise KedgeError(
            f"--python-of names {unused[0]}, which --against does not; write --against {unused[0]}"
        )
    chosen = {}
    for name in wanted:
        python = named.get(name) or os.environ.get(f"KEDGE_{name.upper()}_PYTHON") or sys.executable
        if shutil.which(python) is None:
            raise KedgeError(
                f"the Python interpreter for {name} does not exist or is not executable: {python}. "
                f"Write --python-of {name}=PATH"
            )
        chosen[name] = python
    return chosen


def rival_rows(name: str, python: str) -> tuple[list[Row], str]:
    """Rows of another library on the quadratics, and an error message or ``""``.

    If the library is not installed, the message lists the commands that install it.
    """
    results, error, missing = _run_script(name, python)
    note = "not installed" if missing else "failed" if error else ""
    rows = []
    for method, (oracle, expected) in fixed_points().items():
        got = results.get(method)
        ok = None if got is None else abs(got - expected) <= TOLERANCE
        reason = note or ("" if method in results else "not reported")
        unequal = results.get(f"objective of {method}")
        cell = "" if unequal is None else describe(name_objective(unequal), unequal)
        rows.append(Row(f"{name} {method}", oracle, expected, got, ok, reason, cell))
    if not error:
        return rows, ""
    if not missing:
        return rows, f"{name} failed with {python}: {error}"
    lines = [f"{name} is not installed for {python} ({error}). Install it in its own environment:"]
    lines += [f"python -m venv venv-{name}"]
    lines += [f"venv-{name}/bin/{line}" for line in INSTALL[name]]
    retry = (
        f"python -m bench.conformance --against {name} --python-of {name}=venv-{name}/bin/python"
    )
    return rows, "\n  ".join([*lines, retry])


def _run_script(name: str, python: str) -> tuple[dict[str, float], str, bool]:
    """``(final w by method, error, whether the library is missing)``."""
    command = [python, str(SCRIPTS / f"{name}.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {}, f"timeout: no result within {TIMEOUT} seconds", False
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
        return {}, f"the output is not the expected JSON: {last[:80]!r}", False


def _table(rows: Iterable[Row]) -> Table:
    """The expected value of each oracle, and the one found."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("method", "oracle", "expected", "got", "ok", "objective"):
        number = column in ("expected", "got")
        table.add_column(
            column,
            no_wrap=column in ("method", "expected", "ok", "objective"),
            justify="right" if number else "left",
        )
    marks = {True: Text("ok", "green"), False: Text("FAILS", "bold red"), None: Text("-", "dim")}
    for row in rows:
        expected = "" if row.expected is None else f"{row.expected:.6g}"
        got = row.note if row.got is None else f"{row.got:.6g}"
        marked = marks[row.ok]
        table.add_row(row.method, Text(row.oracle), expected, Text(got), marked, row.objective)
    return table


def conformance(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
    against: Annotated[str, typer.Option(help="other libraries to compare with: pfl,fedlab")] = "",
    python_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python of that library (or $KEDGE_PFL_PYTHON, ...)"),
    ] = None,
    load: LOAD = None,
) -> None:
    """Compare each method with the values of its oracles. Exit code 1 if kedge deviates; other
    libraries are shown for comparison.

    python -m bench.conformance fedavg scaffold --against pfl --python-of pfl=venv-pfl/bin/python
    """
    load_files(load)
    others = pythons(against, python_of or [])
    own = own_rows(n for name in names or ["fedavg", *parts] for n in part_names(name))
    rivals = [rival_rows(name, python) for name, python in others.items()]
    rows = [*own, *(row for theirs, _ in rivals for row in theirs)]
    console.print(_table(rows), highlight=False)
    for _, message in rivals:
        if message:
            errors.print(Text(f"\n{message}"), highlight=False, soft_wrap=True)
    failed = list(dict.fromkeys(row.method for row in own if row.ok is False))
    if failed:
        console.print(Text(f"\n{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)


def run() -> None:
    """Run the command. User errors are printed in one line, without a traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(conformance)
    main(app)


if __name__ == "__main__":
    run()
