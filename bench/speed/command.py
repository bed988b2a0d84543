"""The command: times workloads, and prints or writes the record."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer
from rich.console import Console

from bench.speed import record, timing
from bench.speed.workloads import GROUPS
from kedge.cli.app import main
from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim
from kedge.settings import HELP


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

    python -m bench digits overhead --against eager,flower --python-of flower=venv-flower/bin/python
    python -m bench pfl --against eager,pfl --methods fedavg,scaffold,fedprox --out pfl.json
    """
    load_files(load)
    chosen = timing.read_settings(
        names or (), against=against, engines=engines, precisions=precisions,
        rival_precision=rival_precision, methods=methods, rounds=rounds, warm=warm,
        threads=threads, device=device, python_of=python_of or (),
    )  # fmt: skip
    record.check_path(out)
    done = timing.bench(
        chosen, report=dim, command=shlex.join(["python", "-m", "bench", *sys.argv[1:]])
    )
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


def run() -> None:
    """Run the command. User errors are printed in one line, without a traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(bench)
    main(app)
