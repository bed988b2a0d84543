"""The command ``kedge``. Commands are typed functions that call the library; no logic lives
here."""

from __future__ import annotations

import inspect
import json
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from rich.console import Console
from rich.text import Text

import kedge
from kedge.bench import record, timing
from kedge.bench.workloads import GROUPS
from kedge.check import check_part
from kedge.check.conformance import own_rows, pythons, rival_rows
from kedge.cli import display
from kedge.cli.demo import CLIENTS, PARTITION, ROUNDS, run_demo
from kedge.core.part import parts
from kedge.data.datasets import load
from kedge.data.partition import draw
from kedge.errors import KedgeError
from kedge.report import figures, tables
from kedge.report.progress import Watcher
from kedge.runs import runner
from kedge.runs import sweep as sweeps
from kedge.runs.config import DEFAULTS, FIELDS, HELP, Config, load_config, read_value
from kedge.runs.folder import Folder, new_path
from kedge.runs.grid import Setting, combine, read_words
from kedge.runs.result import Result

app = typer.Typer(
    help="Federated learning on heterogeneous data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)

PANELS = {
    "What": ("method", "data", "partition", "clients", "split", "augment", "angles", "model"),
    "Rounds": ("rounds", "per_round", "steps", "epochs", "batch", "replacement", "weighting"),
    "Optimiser": ("optimizer", "lr", "momentum", "nesterov", "weight_decay", "clip", "schedule"),
    "How": (
        "seeds", "engine", "device", "precision", "workers", "chunk", "compile", "state",
        "batchnorm", "personal", "target", "eval_every",
    ),
}  # fmt: skip
SHORT = {"method": "-m", "data": "-d", "rounds": "-r"}
OUT = Annotated[str | None, typer.Option("--out", help="folder for the run")]
RESUME = Annotated[bool, typer.Option("--resume", help="go on with the run in --out")]
JSON = Annotated[bool, typer.Option("--json", help="print one JSON object, and nothing else")]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per setting of a run, in place of its ``**settings``."""
    panels = {key: panel for panel, keys in PANELS.items() for key in keys}
    options = []
    for key, hint in FIELDS.items():
        kind: Any = str if get_origin(hint) is tuple else hint
        flags = [f"--{key.replace('_', '-')}", *([SHORT[key]] if key in SHORT else [])]
        if kind is bool:
            flags = [f"{flags[0]}/--no-{key.replace('_', '-')}"]
        text = HELP[key] if kind is bool else f"{HELP[key]} (default: {DEFAULTS[key]})"
        note = typer.Option(*flags, help=text, rich_help_panel=panels[key], show_default=False)
        annotation = Annotated[kind | None, note]
        options.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    plain = inspect.signature(command, eval_str=True)
    own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    wrapper.__signature__ = plain.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    del wrapper.__wrapped__  # typer would look through it
    return wrapper


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"kedge {kedge.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning on heterogeneous data."""


@app.command(rich_help_panel="Run")
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
    **settings: Any,
) -> None:
    """Train with one method. Works without any argument: digits, 20 clients, 3 seeds.

    kedge run --method scaffold+fedprox --data cifar10 --partition "dirichlet(0.1)" --rounds 100
    kedge run experiment.toml lr=0.03 seeds=0,1,2,3,4
    kedge run --data hospitals/ --out runs/hospitals          then, if it was stopped: --resume
    """
    config = _config(file, override, settings, resume, out)
    path = Path(out) if out else new_path(config)
    with Watcher(config.rounds * len(config.seeds), console=errors) as watcher:
        show = partial(watcher.show, config)
        result = runner.run(config, path, resume, show, say=watcher.say)
    _finish([result], as_json, f"kept in {path}; the model: kedge.load_model({str(path)!r})")


@app.command(rich_help_panel="Run")
@with_settings
def compare(
    methods: Annotated[list[str], typer.Argument(help="methods to compare, the first is the base")],
    *,
    config_file: Annotated[str | None, typer.Option("--config", help="a TOML file")] = None,
    out: OUT = None,
    resume: RESUME = False,
    plot: Annotated[str | None, typer.Option(help="draw the curves to a .png or .svg file")] = None,
    as_json: JSON = False,
    **settings: Any,
) -> None:
    """Compare methods on the same partitions, cohorts and first weights.

    kedge compare fedavg scaffold "fedprox(mu=0.1)" scaffold+fedsam --rounds 50 --target 90
    """
    settings.pop("method", None)
    configs = [_config(config_file, None, settings | {"method": m}, False, None) for m in methods]
    by_name = dict(zip(methods, configs, strict=True))
    with Watcher(sum(c.rounds * len(c.seeds) for c in configs), console=errors) as watcher:
        show = lambda m, s, r: watcher.show(by_name[m], s, r)  # noqa: E731
        results = runner.compare(methods, configs, out, resume, show, watcher.say)
    if plot:
        figures.curves(results, [plot], configs[0].data)
    _finish(results, as_json, f"kept in {out}" if out else "")


@app.command(rich_help_panel="Run")
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
    **settings: Any,
) -> None:
    """Run all combinations of some settings; those that differ in numbers train side by side.

    kedge sweep lr=0.01,0.03,0.1 --rounds 50
    kedge sweep lr=0.03,0.1 fedprox.mu=0.01,0.1,1 seeds=0,1,2 --method fedprox --out runs/mu
    kedge sweep experiment.toml "partition=iid,dirichlet(0.1)" "method=fedavg,scaffold"
    """
    wanted = _grid(words or [], settings, resume, out)
    rounds = sum(s.config.rounds * len(s.config.seeds) for s in wanted)
    with Watcher(rounds, console=errors) as watcher:
        watcher.say(sweeps.count(wanted))
        swept = sweeps.sweep(wanted, out, resume, watcher.show, watcher.say)
    if as_json:
        typer.echo(json.dumps(swept.to_dict()))
        return
    console.print(tables.grid(swept.settings, swept.results))
    _dim(swept.computed + (f"; kept in {out}" if out else ""))


@app.command(rich_help_panel="Run")
def demo(
    out: Annotated[str, typer.Option(help="folder for the pictures")] = "kedge-demo",
) -> None:
    """Compare a few methods on digits, draw the curves and the partition. No network needed."""
    results, pictures = run_demo(out)
    n = len(results[0].config.seeds)
    console.print(
        f"digits, {CLIENTS} clients, {PARTITION}, {ROUNDS} rounds, {n} seeds: mean ± sd\n",
        highlight=False,
    )
    console.print(tables.comparison(results))
    console.print("\nPictures: " + "  ".join(str(p) for p in pictures), highlight=False)
    console.print(
        "Next: kedge list                                     what there is to combine\n"
        "      kedge compare fedavg scaffold+fedsam           your own comparison\n"
        "      kedge run --data FOLDER --method scaffold      your own silos, one file per client",
        highlight=False,
    )


@app.command(rich_help_panel="Look")
def data() -> None:
    """List the datasets that are here, and those that could be."""
    console.print(display.data_table())
    console.print(display.DATA_HINT, style="dim", highlight=False)


@app.command(rich_help_panel="Look")
def partition(
    text: Annotated[str, typer.Argument(help="a partition, see: kedge list partitions")],
    data: Annotated[str, typer.Option(help=HELP["data"])] = "digits",
    clients: Annotated[int, typer.Option(help="number of clients; 0: as many as silos")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the draw")] = 0,
    out: Annotated[
        list[str] | None,
        typer.Option("--out", "-o", help="write to .png or .svg (a picture) or .json (the split)"),
    ] = None,
) -> None:
    """Draw a partition: who holds how much of which class.

    kedge partition "dirichlet(0.1)" --data cifar10 --clients 10 -o split.png -o split.json
    """
    dataset = load(data)
    groups = len(dataset.group_names or ())
    drawn = draw(text, dataset.y_train, clients or groups or 20, seed, dataset.groups)
    console.print(display.partition_table(drawn, dataset))
    for path in out or []:
        if path.endswith(".json"):
            drawn.save(path)
        else:
            drawn.plot(dataset.y_train, path, class_names=dataset.classes)
        console.print(f"wrote {path}", highlight=False)


@app.command("list", rich_help_panel="Look")
def list_things(
    pattern: Annotated[
        str, typer.Argument(help="part of a name, a pattern such as fed*, or: models, partitions")
    ] = "*",
    markdown: Annotated[bool, typer.Option("--markdown", help="the table for the README")] = False,
) -> None:
    """List the parts that methods are made of, or the things of another kind, e.g. models."""
    if markdown:
        typer.echo(display.methods_markdown())
        return
    from kedge.cli import pages

    console.print(pages.list_page(pattern), highlight=False)


@app.command(rich_help_panel="Look")
def show(name: Annotated[str, typer.Argument(help="name of a part")]) -> None:
    """Show a part, a model, a partition, ...: what it does, its paper, options and ranges."""
    from kedge.cli import pages

    console.print(pages.show_page(name), highlight=False)


@app.command(rich_help_panel="Prove")
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
) -> None:
    """Check parts against the laws and against identities from their papers. Exit code 1 if one
    fails."""
    wanted = [n for name in names or ["fedavg", *parts] for n in _named(name)]
    reports = []
    for name in wanted:
        report = check_part(name)
        reports.append(report)
        console.print(display.check_table(report), highlight=False)
        console.print()
    failed = [r.part for r in reports if not r.ok]
    held = sum(f.holds is True for r in reports for f in r.findings)
    if failed:
        console.print(Text(f"{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)
    console.print(Text(f"{held} laws and identities hold for {', '.join(wanted)}", "green"))


@app.command(rich_help_panel="Prove")
def conformance(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
    against: Annotated[
        str, typer.Option(help="other libraries to put to the same test: pfl,fedlab")
    ] = "",
    python_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python of that library (or $KEDGE_PFL_PYTHON, ...)"),
    ] = None,
) -> None:
    """Print what the oracles expect and what was found. Exit code 1 if kedge is off; other
    libraries only inform.

    kedge conformance fedavg scaffold --against pfl --python-of pfl=venv-pfl/bin/python
    """
    others = pythons(against, python_of or [])
    own = own_rows(n for name in names or ["fedavg", *parts] for n in _named(name))
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


@app.command(rich_help_panel="Prove")
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
    precisions: Annotated[str, typer.Option(help="of kedge: fp32, tf32, bf16")] = "",
    rival_precision: Annotated[str, typer.Option(help="of rivals; on a GPU tf32")] = "",
    methods: Annotated[str, typer.Option(help="methods of kedge, and what they cost")] = "fedavg",
    rounds: Annotated[int, typer.Option(help="turns of each, of at least one timed round")] = 5,
    warm: Annotated[int, typer.Option(help="rounds before them")] = 2,
    threads: Annotated[int, typer.Option(help="of torch; 0: as many as it takes")] = 0,
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    python_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python of that rival (or $KEDGE_FLOWER_PYTHON, ...)"),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="write the record to a .json")] = None,
    as_json: JSON = False,
) -> None:
    """Time rounds of kedge beside its rivals, in turn, on this machine. Missing rivals are named.

    kedge bench digits overhead --against eager,flower --python-of flower=venv-flower/bin/python
    kedge bench pfl --against eager,pfl --methods fedavg,scaffold,fedprox --out pfl.json
    """
    what = timing.plan(
        names or (), against=against, engines=engines, precisions=precisions,
        rival_precision=rival_precision, methods=methods, rounds=rounds, warm=warm,
        threads=threads, device=device, python_of=python_of or (),
    )  # fmt: skip
    record.check_path(out)
    done = timing.bench(what, say=_dim, command=shlex.join(["kedge", *sys.argv[1:]]))
    if out:
        record.write(done, out)
    if as_json:
        typer.echo(json.dumps(done))
    else:
        wide = Console(width=max(console.width, 130))  # nothing is cut off, whatever the window
        wide.print(record.tables(done), highlight=False)
    for note in done["notes"]:
        _dim(note)
    if done["interrupted"]:
        raise typer.Exit(130)


def _dim(text: str) -> None:
    errors.print(Text(text), style="dim", highlight=False, soft_wrap=True)


def _config(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
) -> Config:
    """The configuration that a command line means; a resumed run may name nothing anew."""
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
    """The settings that a command line means; a resumed sweep may name nothing anew."""
    path = words[0] if words and "=" not in words[0] else None
    flags = {k: read_value(k, v) if isinstance(v, str) else v for k, v in settings.items()}
    flags = {k: v for k, v in flags.items() if v is not None}
    if resume and out is None:
        raise KedgeError("--resume needs the folder of the sweep: --out FOLDER --resume")
    if resume and out is not None and not words and not flags:
        return sweeps.listed(out)
    return combine(read_words(words[1:] if path else words), path, flags)


def _finish(results: list[Result], as_json: bool, note: str) -> None:
    if as_json:
        every = [r.to_dict() for r in results]
        typer.echo(json.dumps(every[0] if len(every) == 1 else {"results": every}))
        return
    console.print(tables.comparison(results))
    if note:
        errors.print(note, style="dim", highlight=False, soft_wrap=True)


def _named(name: str) -> list[str]:
    """A part's name, or the names of the parts that a file registers."""
    if not name.endswith(".py"):
        return [name]
    if not Path(name).is_file():
        raise KedgeError(
            f"there is no file {name!r}; give a part's name or a file that registers one"
        )
    before = set(parts)
    runpy.run_path(name, run_name="kedge_user_parts")
    added = [n for n in parts if n not in before]
    if not added:
        raise KedgeError(f"{name} registers no part; put @kedge.register above its class")
    return added


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    errors.print(Text("warning: ", "yellow") + Text(str(message)), soft_wrap=True)


def main() -> None:
    """Run the command; what a user got wrong ends in one line, not in a traceback."""
    warnings.showwarning = _show_warning
    try:
        app()
    except runner.Interrupted as error:
        errors.print(str(error), highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        errors.print("stopped; what was saved is whole", highlight=False)
        sys.exit(130)
    except KedgeError as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        sys.exit(2)
