"""Commands that train: ``run``, ``compare``, ``sweep``, ``demo``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kedge.cli.options import JSON, LOAD, OUT, RESUME, load_files, with_settings
from kedge.cli.screen import console, dim, errors
from kedge.errors import KedgeError

if TYPE_CHECKING:
    from kedge.runs.config import Config
    from kedge.runs.grid import Setting
    from kedge.runs.result import Result


@with_settings
def run(
    file: Annotated[
        str | None, typer.Argument(help="a TOML file with settings (the long options as keys)")
    ] = None,
    override: Annotated[list[str] | None, typer.Argument(help="settings as key=value")] = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    as_json: JSON = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Train with one method. Works without any argument: digits, 20 clients, 3 seeds.

    kedge run --method scaffold+fedprox --data cifar10 --partition "dirichlet(0.1)" --rounds 100
    kedge run experiment.toml lr=0.03 seeds=0,1,2,3,4
    kedge run --data hospitals/ --out runs/hospitals          after an interrupt: --resume
    """
    from kedge.report.progress import Watcher
    from kedge.runs import runner
    from kedge.runs.folder import new_path

    load_files(load)
    config = _config(file, override, settings, resume, out)
    path = Path(out) if out else new_path(config)
    with Watcher(config.rounds * len(config.seeds), console=errors) as watcher:
        show = partial(watcher.show, config)
        result = runner.run(config, path, resume, show, report=watcher.report)
    _finish(
        [result], as_json, f"saved in {path}; load the model with kedge.load_model({str(path)!r})"
    )


@with_settings
def compare(
    methods: Annotated[
        list[str], typer.Argument(help="methods to compare; the first is the baseline")
    ],
    *,
    config_file: Annotated[str | None, typer.Option("--config", help="a TOML file")] = None,
    out: OUT = None,
    resume: RESUME = False,
    plot: Annotated[str | None, typer.Option(help="plot the curves to a .png or .svg file")] = None,
    as_json: JSON = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Compare methods on the same partitions, cohorts and initial weights.

    kedge compare fedavg scaffold "fedprox(mu=0.1)" scaffold+fedsam --rounds 50 --target 90
    """
    from kedge.report import figures
    from kedge.report.progress import Watcher
    from kedge.runs import runner

    load_files(load)
    settings.pop("method", None)
    configs = [_config(config_file, None, settings | {"method": m}, False, None) for m in methods]
    by_name = dict(zip(methods, configs, strict=True))
    total = sum(c.rounds * len(c.seeds) for c in configs)
    with Watcher(total, console=errors, names=methods) as watcher:
        show = lambda m, s, r: watcher.show(by_name[m], s, r)  # noqa: E731
        results = runner.compare(methods, configs, out, resume, show, watcher.report)
    if plot:
        figures.curves(results, [plot], configs[0].data)
    _finish(results, as_json, f"saved in {out}" if out else "")


@with_settings
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a TOML file; settings, and PART.FIELD, as key=value,value,..."),
    ] = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    as_json: JSON = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Run all combinations of some settings; those that differ only in numbers train together.

    kedge sweep lr=0.01,0.03,0.1 --rounds 50
    kedge sweep lr=0.03,0.1 fedprox.mu=0.01,0.1,1 seeds=0,1,2 --method fedprox --out runs/mu
    kedge sweep experiment.toml "partition=iid,dirichlet(0.1)" "method=fedavg,scaffold"
    """
    from kedge.report import tables
    from kedge.report.progress import Watcher
    from kedge.runs import sweep as sweeps

    load_files(load)
    grid = _grid(words or [], settings, resume, out)
    rounds = sum(s.config.rounds * len(s.config.seeds) for s in grid)
    with Watcher(rounds, console=errors) as watcher:
        watcher.report(sweeps.count(grid))
        result = sweeps.sweep(grid, out, resume, watcher.show, watcher.report)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    console.print(tables.grid(result.settings, result.results))
    dim(result.computed + (f"; saved in {out}" if out else ""))


def demo(
    out: Annotated[str, typer.Option(help="folder for the figures")] = "kedge-demo",
) -> None:
    """Compare a few methods on digits; plot the curves and the partition. No network needed."""
    from kedge.cli.demo import CLIENTS, PARTITION, ROUNDS, run_demo
    from kedge.report import tables

    results, figures = run_demo(out)
    n = len(results[0].config.seeds)
    console.print(
        f"digits, {CLIENTS} clients, {PARTITION}, {ROUNDS} rounds, {n} seeds: mean ± sd\n",
        highlight=False,
    )
    console.print(tables.comparison(results))
    console.print("\nFigures: " + "  ".join(str(path) for path in figures), highlight=False)
    console.print(
        "Next: kedge list                                     the parts to combine\n"
        "      kedge compare fedavg scaffold+fedsam           your own comparison\n"
        "      kedge run --data FOLDER --method scaffold      your own silos, one file per client",
        highlight=False,
    )


def _config(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
) -> Config:
    """The configuration of a command line; ``--resume`` alone takes the one of the folder."""
    from kedge.runs.folder import Folder
    from kedge.runs.reading import load_config, read_value

    words = [*([file] if file and "=" in file else []), *(override or [])]
    path = None if file and "=" in file else file
    flags = {k: read_value(k, v) if isinstance(v, str) else v for k, v in settings.items()}
    flags = {k: v for k, v in flags.items() if v is not None}
    if resume:
        if out is None:
            raise KedgeError("--resume needs the folder of the run: --out FOLDER --resume")
        if path is None and not words and not flags:
            return Folder.resume(out, None)[1]
    return load_config(path, words, flags)


def _grid(
    words: list[str], settings: dict[str, Any], resume: bool, out: str | None
) -> list[Setting]:
    """The settings of a command line; ``--resume`` alone takes those of the folder."""
    from kedge.runs import sweep as sweeps
    from kedge.runs.grid import combine, read_words
    from kedge.runs.reading import read_value

    path = words[0] if words and "=" not in words[0] else None
    flags = {k: read_value(k, v) if isinstance(v, str) else v for k, v in settings.items()}
    flags = {k: v for k, v in flags.items() if v is not None}
    if resume and out is None:
        raise KedgeError("--resume needs the folder of the sweep: --out FOLDER --resume")
    if resume and out is not None and not words and not flags:
        return sweeps.saved_settings(out)
    return combine(read_words(words[1:] if path else words), path, flags)


def _finish(results: list[Result], as_json: bool, note: str) -> None:
    """Print the results as a table or as JSON."""
    from kedge.report import tables

    if as_json:
        rows = [result.to_dict() for result in results]
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else {"results": rows}))
        return
    console.print(tables.comparison(results))
    if note:
        errors.print(note, style="dim", highlight=False, soft_wrap=True)
