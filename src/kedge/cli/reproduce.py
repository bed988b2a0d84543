"""The command ``reproduce``: tables of papers, run by their recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.report import NO_REPORT, after_reproduction
from kedge.cli.screen import console, dim, errors, print_table, warn
from kedge.errors import FieldError, Interrupted, KedgeError

if TYPE_CHECKING:
    from kedge.reproduction.command import Reproduction
    from kedge.reproduction.recipes import PaperRow, PaperTable

_RUN = "How"


def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="tables, e.g. fedimpro/table1; a paper's name; or all"),
    ] = None,
    *,
    rows: Annotated[str | None, typer.Option(help="rows to run, e.g. fedavg,fedimpro")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds to run, e.g. 0,1,2")] = None,
    scale: Annotated[
        str | None, typer.Option(help="full, or quick: minutes on a CPU (default: full)")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="only print what is recorded")] = False,
    merge: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="copy the records of another machine from this folder"),
    ] = None,
    results: Annotated[str, typer.Option(metavar="DIR", help="folder for records")] = "reproduced",
    recipes: Annotated[
        str | None, typer.Option(metavar="DIR", help="a folder with tables of your own")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="stop after so many minutes, saved", rich_help_panel=_RUN)
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="stop each run after this round, saved", rich_help_panel=_RUN),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda", rich_help_panel=_RUN)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="auto, loop or vector", rich_help_panel=_RUN)
    ] = None,
    compile_steps: Annotated[
        str | None,
        typer.Option(
            "--compile", help="compile local steps: on, off or auto", rich_help_panel=_RUN
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="threads of torch on a CPU", rich_help_panel=_RUN)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="worker processes on a CPU", rich_help_panel=_RUN)
    ] = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
) -> None:
    """Run the tables of papers, and print the paper's numbers and ours side by side.

    kedge reproduce                                         lists the tables, with their cost
    kedge reproduce fedimpro/table1 --rows fedavg,fedimpro --seeds 0,1
    kedge reproduce --scale quick                           every quick form, in minutes on a CPU
    kedge reproduce fedimpro/table1 --merge OTHER           records of another machine

    Stop it at any time: the same command goes on from the last checkpoint, and skips what is done.
    """
    from kedge.reproduction import command

    load_files(load)
    root, names = _root(recipes), _words(rows)
    if names == []:
        raise FieldError(f"--rows {rows}: write names with commas between, e.g. fedavg,fedimpro")
    if not tables and scale != "quick" and merge is None and not show:
        if rows is not None or seeds is not None:
            raise FieldError("name the table of --rows and --seeds; kedge reproduce lists them")
        _list(root, Path(results), as_json)
        return
    chosen = command.selected(
        tables or ["all"], names, scale or "full", root, skip_without_quick=not tables
    )
    if merge is not None:
        for merged in command.merge_tables(chosen, results, merge):
            for text in merged.left_out:
                warn(text)
            dim(f"{len(merged.copied)} records copied, {len(merged.known)} were here already")
    if show or merge is not None:
        found = [command.read_table(table, Path(results)).only(some) for table, some in chosen]
        if not tables:  # those of which there is something
            found = [one for one in found if one.records]
            if not found and not as_json:
                dim(f"there are no records in {results}")
    else:
        execution = {
            "device": device, "engine": engine, "compile": compile_steps, "threads": threads,
            "workers": workers,
        }  # fmt: skip
        found = _run(chosen, _numbers(seeds), results, minutes, rounds, execution, as_json)
        after_reproduction(found, Path(results), no_report)
    _finish(found, as_json, printed=not (show or merge is not None))


def _run(
    chosen: list[tuple[PaperTable, list[PaperRow]]],
    seeds: list[int] | None,
    results: str,
    minutes: float | None,
    rounds: int | None,
    execution: dict[str, Any],
    as_json: bool,
) -> list[Reproduction]:
    """Run the tables, with progress on standard error; each is printed when it is done."""
    from kedge.cli.progress import Watcher
    from kedge.reproduction import command

    total = command.rounds_left(chosen, seeds, results, rounds)
    several = len(chosen) > 1
    names = [] if several else [row.name for row in chosen[0][1]]
    found: list[Reproduction] = []
    with Watcher(total, console=errors, names=names) as watcher:

        def show(name: str, config: Any, seed: int, record: dict[str, Any]) -> None:
            table = f"{chosen[len(found)][0].name} " if several else ""
            watcher.show(config, seed, record, name=table + name)

        try:
            for one in command.reproduce_tables(
                chosen, seeds, results, minutes, rounds, execution, show, watcher.report
            ):
                found.append(one)
                if not as_json:
                    with watcher.paused():
                        _print(one)
        except Interrupted:
            if not as_json and len(found) < len(chosen):
                with watcher.paused():
                    _print(command.read_table(chosen[len(found)][0], Path(results)))
            raise
    return found


def _finish(found: list[Reproduction], as_json: bool, printed: bool) -> None:
    from kedge.files import finite

    if as_json:
        values = [finite(one.to_dict()) for one in found]
        typer.echo(json.dumps(values[0] if len(values) == 1 else {"tables": values}))
    elif not printed:
        for one in found:
            _print(one)
    if any(one.is_stopped for one in found):
        dim("stopped: the minutes are over. All is saved; the same command goes on from there")
    missed = [f"{one.table.name} {name}" for one in found for name in one.missed]
    if missed:
        warn(f"no gain, though one is expected: {', '.join(missed)}")
        raise typer.Exit(1)


def _print(one: Reproduction) -> None:
    from kedge.reproduction.display import comparison_with_paper, heading

    whole = not console.is_terminal  # a terminal breaks lines between words
    console.print(f"\n{heading(one.table)}", style="bold", highlight=False, soft_wrap=whole)
    if one.table.paper:
        console.print(one.table.paper, style="dim", highlight=False, soft_wrap=whole)
    print_table(comparison_with_paper(one.table, one.rows, one.left_out))


def _list(root: Path | None, results: Path, as_json: bool) -> None:
    from kedge.reproduction import display, recipes

    found = [recipes.read(name, root) for name in recipes.find(["all"], root)]
    entries = [display.entry(recipe, results) for recipe in found]
    if as_json:
        typer.echo(json.dumps({"tables": [entry.to_dict() for entry in entries]}))
    else:
        print_table(display.listed(entries, results))


def _root(recipes: str | None) -> Path | None:
    if recipes is None:
        return None
    root = Path(recipes)
    if not root.is_dir():
        raise KedgeError(f"there is no folder {recipes!r} of recipes")
    return root


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str | None) -> list[int] | None:
    words = _words(text)
    if words is None:
        return None
    if not words or not all(word.isdigit() for word in words):
        raise FieldError(f"--seeds {text}: write numbers with commas between, e.g. 0,1,2")
    return [int(word) for word in words]
