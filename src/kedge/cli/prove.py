"""Commands that verify claims: ``check``, ``conformance``, ``bench``."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kedge.bench.workloads import GROUPS
from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim, errors
from kedge.errors import KedgeError
from kedge.loading import load_file
from kedge.runs.config import HELP


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
    load: LOAD = None,
) -> None:
    """Check parts against the laws and against identities from their papers. Exit code 1 if one
    fails."""
    from kedge.check import check_part
    from kedge.cli import display
    from kedge.core.part import parts

    load_files(load)
    part_names = [n for name in names or ["fedavg", *parts] for n in _part_names(name)]
    reports = []
    for name in part_names:
        report = check_part(name)
        reports.append(report)
        console.print(display.check_table(report), highlight=False)
        console.print()
    failed = [r.part for r in reports if not r.ok]
    passed = sum(f.holds is True for r in reports for f in r.findings)
    if failed:
        console.print(Text(f"{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)
    console.print(Text(f"{passed} laws and identities hold for {', '.join(part_names)}", "green"))
    bare = [r.part for r in reports if not any(f.kind == "identity" for f in r.findings)]
    if bare:
        dim(
            f"{', '.join(bare)}: no identity yet, so the laws do not know its equation; work out a "
            "small case by hand and register it with @kedge.oracle"
        )


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

    kedge conformance fedavg scaffold --against pfl --python-of pfl=venv-pfl/bin/python
    """
    from kedge.check.conformance import own_rows, pythons, rival_rows
    from kedge.cli import display
    from kedge.core.part import parts

    load_files(load)
    others = pythons(against, python_of or [])
    own = own_rows(n for name in names or ["fedavg", *parts] for n in _part_names(name))
    rivals = [rival_rows(name, python) for name, python in others.items()]
    rows = [*own, *(row for theirs, _ in rivals for row in theirs)]
    console.print(display.conformance_table(rows), highlight=False)
    for _, message in rivals:
        if message:
            errors.print(Text(f"\n{message}"), highlight=False, soft_wrap=True)
    failed = list(dict.fromkeys(row.method for row in own if row.ok is False))
    if failed:
        console.print(Text(f"\n{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"workloads: {', '.join((*GROUPS['all'], *GROUPS, 'zoo_MODEL'))}"),
    ] = None,
    against: Annotated[
        str, typer.Option(help="rivals: loop,eager,pfl,flower or none; also: eager(threads=1)")
    ] = "eager",
    engines: Annotated[
        str,
        typer.Option(help="engines: auto,loop,vector; also: loop(workers=2),vector(compile=true)"),
    ] = "",
    precisions: Annotated[str, typer.Option(help="precisions of kedge: fp32, tf32, bf16")] = "",
    rival_precision: Annotated[
        str, typer.Option(help="precision of rivals; default: tf32 on a GPU, else fp32")
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="methods of kedge, with their cost over fedavg and over their base; default: "
            "those that the workload is about"
        ),
    ] = "",
    rounds: Annotated[
        int, typer.Option(help="turns of each runner, with at least one timed round each")
    ] = 5,
    warm: Annotated[int, typer.Option(help="warm-up rounds")] = 2,
    threads: Annotated[int, typer.Option(help="threads of torch; 0: its default")] = 0,
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    python_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python of that rival (or $KEDGE_FLOWER_PYTHON, ...)"),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="write the record to a .json")] = None,
    as_json: JSON = False,
    load: LOAD = None,
) -> None:
    """Time rounds of kedge and of its rivals, in turns, on this machine. Missing rivals are listed.

    kedge bench digits overhead --against eager,flower --python-of flower=venv-flower/bin/python
    kedge bench pfl --against eager,pfl --methods fedavg,scaffold,fedprox --out pfl.json
    """
    from kedge.bench import record, timing

    load_files(load)
    chosen = timing.read_settings(
        names or (), against=against, engines=engines, precisions=precisions,
        rival_precision=rival_precision, methods=methods, rounds=rounds, warm=warm,
        threads=threads, device=device, python_of=python_of or (),
    )  # fmt: skip
    record.check_path(out)
    done = timing.bench(chosen, report=dim, command=shlex.join(["kedge", *sys.argv[1:]]))
    if out:
        record.write(done, out)
    if as_json:
        typer.echo(json.dumps(done))
    else:
        wide = Console(
            width=max(console.width, 130)
        )  # so that no column is cut off in a narrow window
        wide.print(record.tables(done), highlight=False)
    for note in done["notes"]:
        dim(note)
    if done["interrupted"]:
        raise typer.Exit(130)


def _part_names(name: str) -> list[str]:
    """A part's name, or the names of the parts that a file registers."""
    if not name.endswith(".py"):
        return [name]
    names = load_file(name).names("part")
    if not names:
        raise KedgeError(f"{name} registers no part; put @kedge.register above its class")
    return names
