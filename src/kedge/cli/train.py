"""Commands that train: ``run``, ``compare``, ``sweep``, ``demo``; and what one would type next."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kedge.cli.options import (
    FILE,
    JSON,
    LOAD,
    LOG,
    OUT,
    OVERRIDE,
    RESUME,
    load_files,
    with_settings,
)
from kedge.cli.report import NAME, NO_REPORT, after_training
from kedge.cli.screen import console, dim, errors, next_steps, print_table
from kedge.errors import KedgeError
from kedge.history.experiment import kind_of
from kedge.loading import load_options

if TYPE_CHECKING:
    from kedge.runs.result import Result
    from kedge.runs.train import Options, TrainedRuns, TrainingJob
    from kedge.settings import Config


@with_settings
def run(
    file: FILE = None,
    override: OVERRIDE = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Train with one method. Works without any argument: digits, 20 clients, 3 seeds.

    kedge run --method scaffold+fedprox --data cifar10 --partition "dirichlet(0.1)" --rounds 100
    kedge run experiment.toml lr=0.03 seeds=0,1,2,3,4
    kedge run --data hospitals/ --out runs/hospitals          after an interrupt: --resume
    """
    from kedge.history.folder import new_path
    from kedge.runs import train

    load_files(load)
    config = config_of(file, override, settings, resume, out)
    path = Path(out) if out else new_path(config)
    with _watching([config], log) as options:
        result = train.run(config, path, resume, options, numbered=not out)
    folder = _folder(result)
    note = f"saved in {folder}; load it with kedge.load({str(folder)!r})"
    _finish([result], note, result.to_dict() if as_json else None)
    after_training(folder, no_report)
    if not as_json and not result.diverged:
        _next("run", [result], folder)
    _fail_if_diverged([result])


@with_settings
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="methods to compare; the first is the baseline")
    ] = None,
    *,
    config_file: Annotated[str | None, typer.Option("--config", help="a TOML file")] = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="also train on the pooled data, as a yardstick")
    ] = False,
    out: OUT = None,
    resume: RESUME = False,
    plot: Annotated[str | None, typer.Option(help="plot the curves to a .png or .svg file")] = None,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Compare methods on the same partitions, cohorts and initial weights.

    kedge compare fedavg scaffold "fedprox(mu=0.1)" scaffold+fedsam --rounds 50 --target 90
    kedge compare fedavg scaffold --validation 0.1 --unseen 0.2 --pooled
    """
    from kedge.report import figures

    load_files(load)
    if plot:
        figures.check_path(plot)
    jobs = _jobs(methods or [], config_file, settings, pooled, resume, out)
    results, _, folder = _train("compare", jobs, out, resume, log)
    assert folder is not None
    rows = [result.to_dict() for result in results]
    found = {"results": rows} if len(rows) > 1 else rows[0]
    _finish(results, f"saved in {folder}", found if as_json else None)
    after_training(folder, no_report)
    if plot:
        figures.curves(results, [plot], jobs[0].config.data)
    if not as_json and not all(result.diverged for result in results):
        _next("compare", results, folder)
    _fail_if_diverged(results)


@with_settings
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a TOML file; settings, and PART.FIELD, as key=value,value,..."),
    ] = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Run all combinations of some settings; those that differ only in numbers train together.

    kedge sweep lr=0.01,0.03,0.1 --rounds 50 --validation 0.1
    kedge sweep lr=0.03,0.1 fedprox.mu=0.01,0.1,1 seeds=0,1,2 --method fedprox --out runs/mu
    kedge sweep experiment.toml "partition=iid,dirichlet(0.1)" "method=fedavg,scaffold"
    """
    from kedge.history.compare import lead

    load_files(load)
    jobs = _grid(words or [], settings, resume, out)
    results, computed, folder = _train("sweep", jobs, out, resume, log)
    assert folder is not None
    best, chosen_on = lead(results)
    found = {
        "computed": computed,
        "best": results[best or 0].values,
        "chosen_on": f"{chosen_on} data",
        "results": [{"setting": r.values} | r.to_dict() for r in results],
    }
    _finish(results, f"{computed}; saved in {folder}", found if as_json else None)
    after_training(folder, no_report)
    if not as_json:
        _next("sweep", results, folder)


# -- what is trained --------------------------------------------------------------------------


def config_of(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
) -> Config:
    """The configuration of a command line; ``--resume`` alone takes the one of the folder."""
    from kedge.history.folder import CONFIG
    from kedge.runs.checkpoint import TrainingFolder
    from kedge.settings import load_config

    words = [*([file] if file and "=" in file else []), *(override or [])]
    path = None if file and "=" in file else file
    flags = _flags(settings)
    if resume:
        folder = _resumed(out, "run")
        if several := kind_of(folder):
            again = f"kedge {several} --out {_quoted(folder)} --resume"
            raise KedgeError(f"{out} holds several runs; resume them with: {again}")
        stored = TrainingFolder.resume(folder, None, remote=None)[1]
        if path is None:  # a setting that is not given stays as it was
            return load_config(folder / CONFIG, words, flags) if words or flags else stored
    return load_config(path, words, flags)


def _jobs(
    methods: list[str],
    config_file: str | None,
    settings: dict[str, Any],
    pooled: bool,
    resume: bool,
    out: str | None,
) -> list[TrainingJob]:
    """The jobs of a comparison; ``--resume`` takes what is not given from the folder."""
    from kedge.runs.train import method_jobs, saved_jobs
    from kedge.settings import load_config

    method = settings.pop("method", None)
    if method is not None:
        words = " ".join(shlex.quote(m) for m in (*methods, method))
        raise KedgeError(
            f"compare has no --method: its methods are arguments. Write: kedge compare {words}"
        )
    folder, flags = _resumed(out, "comparison") if resume else None, _flags(settings)
    if folder is not None and config_file is None:
        saved = saved_jobs("compare", folder)
        kept = [job.config for job in saved if not job.yardstick]
        configs = [
            dataclasses.replace(kept[0], **flags, method=m)
            for m in methods or [config.method for config in kept]
        ]
        return method_jobs(configs, pooled or len(kept) < len(saved))
    if not methods:
        raise KedgeError("there is nothing to compare; name methods: kedge compare fedavg scaffold")
    configs = [load_config(config_file, flags=flags | {"method": m}) for m in methods]
    return method_jobs(configs, pooled)


def _grid(
    words: list[str], settings: dict[str, Any], resume: bool, out: str | None
) -> list[TrainingJob]:
    """The jobs of a sweep; ``--resume`` takes those of the folder without words."""
    from kedge.runs.grid import combine, read_words
    from kedge.runs.train import saved_jobs, setting_jobs

    path = words[0] if words and "=" not in words[0] else None
    folder, flags = _resumed(out, "sweep") if resume else None, _flags(settings)
    if folder is not None and not words:
        jobs = saved_jobs("sweep", folder)
        for job in jobs:
            job.config = dataclasses.replace(job.config, **flags)
        return jobs
    return setting_jobs(combine(read_words(words[1:] if path else words), path, flags))


def _flags(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given as options, in their types."""
    from kedge.settings import read_value

    typed = {k: read_value(k, v) if isinstance(v, str) else v for k, v in settings.items()}
    return {k: v for k, v in typed.items() if v is not None}


def _resumed(out: str | None, what: str) -> Path:
    if out is None:
        raise KedgeError(f"--resume needs the folder of the {what}: --out FOLDER --resume")
    return Path(out)


# -- training ---------------------------------------------------------------------------------


def _train(
    kind: str, jobs: Sequence[TrainingJob], out: str | None, resume: bool, log: str | None
) -> TrainedRuns:
    """Train a comparison or a sweep."""
    from kedge.history.folder import new_path
    from kedge.runs import train

    is_sweep = kind == "sweep"
    path = Path(out) if out else new_path(jobs[0].config, kind=kind)
    names = [] if is_sweep else [job.name for job in jobs]
    with _watching([job.config for job in jobs], log, names, is_sweep) as options:
        if is_sweep and options.report is not None:
            options.report(train.count(jobs))
        return train.experiment(kind, jobs, path, resume, options, not out)


@contextmanager
def _watching(
    configs: Sequence[Config], log: str | None, names: Sequence[str] = (), several: bool = False
) -> Iterator[Options]:
    """Progress on standard error, and loggers; ``several``: runs that train at the same time."""
    from kedge.cli.progress import Watcher
    from kedge.loggers import observer
    from kedge.runs.train import Options

    loggers = observer(log, saved=True, several=several)
    total = sum(config.rounds * len(config.seeds) for config in configs)
    with Watcher(total, console=errors, names=names) as watcher:
        yield Options(watcher.watch, watcher.report, loggers)


def _finish(results: Sequence[Result], note: str, found: dict[str, Any] | None) -> None:
    """Print the results as a table, or what is found as JSON."""
    from kedge.files import finite
    from kedge.report.tables import results_table
    from kedge.runs.validation import data_of_choice, leader

    if found is not None:
        typer.echo(json.dumps(finite(found)))
        return
    print_table(results_table(results))
    if len([result for result in results if not result.yardstick]) > 1:
        mark = "bold, " if console.is_terminal else ""
        dim(f"{mark}{leader(results).name}: {data_of_choice(results)}")
    dim(note)


def _fail_if_diverged(results: Sequence[Result]) -> None:
    """Exit with code 1 and a sentence for each run whose loss has exploded."""
    from kedge.runs.divergence import message

    texts = [text for text in map(message, results) if text]
    for text in texts:
        errors.print(Text("error: ", "bold red") + Text(text), soft_wrap=True)
    if texts:
        raise typer.Exit(1)


# -- what one would type next -----------------------------------------------------------------


def _next(kind: str, results: Sequence[Result], root: Path) -> None:
    """Use the best model, compare its method, go on training."""
    from kedge.runs.validation import leader

    best = leader(results)
    folder, again = _folder(best), f"kedge {kind} --out {_quoted(root)} --resume"
    rounds = {result.config.rounds for result in results}
    commands = [_predict(folder, best.config)]
    if kind != "compare":
        methods = ("fedavg", "scaffold" if best.method == "fedavg" else best.method)
        names = " ".join(map(shlex.quote, methods))
        commands.append(f"kedge compare {names} --config {_quoted(folder / 'config.toml')}")
    elif not any(result.yardstick for result in results):
        commands.append(f"{again} --pooled")
    if kind == "run" and best.stopped_early:
        commands.append(f"kedge evaluate {_quoted(folder)} --which best")
    elif len(rounds) == 1:
        commands.append(f"{again} --rounds {2 * max(rounds)}")
    next_steps([command + load_options() for command in commands])


def _predict(folder: Path, config: Config) -> str:
    """``new.csv`` and ``new.png`` stand for new data; arrays have no usual name."""
    from kedge.runs.build import is_personal
    from kedge.saved.run import load

    run = load(folder)
    own = ""
    if is_personal(config) and run.has_personal:
        own = f" --client {shlex.quote(run.clients[0])}"
    new = {"table": "new.csv", "image": "new.png"}.get(run.bundle.encoding.kind)
    data = new or shlex.quote(config.data)
    return f"kedge predict {_quoted(folder)} {data}{own} -o predictions.csv"


def _folder(result: Result) -> Path:
    assert result.folder is not None
    return result.folder


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


# -- the demonstration ------------------------------------------------------------------------

METHODS = (
    "fedavg", "scaffold", "fedavgm", "feddyn(alpha=0.1)", "fedtr",
    "fedimpro(cut=stage1, ramp=20)", "scaffold+fedsam",
)  # fmt: skip
ROUNDS, CLIENTS, PARTITION = 40, 20, "dirichlet(0.1)"
#: The method whose model predicts in the end, and the test image that it has not seen.
PREDICTS, SAMPLE = "scaffold", 40


def demo(
    out: Annotated[str, typer.Option(help="folder for the runs and figures")] = "kedge-demo",
) -> None:
    """Compare a few methods on digits; plot the curves and the partition. No network needed."""
    from kedge.files import make_folder
    from kedge.report.tables import results_table
    from kedge.runs import train
    from kedge.settings import Config

    folder = Path(out)
    make_folder(folder)
    runs, number = folder / "runs", 1
    while runs.exists():
        runs, number = folder / f"runs-{number + 1}", number + 1
    configs = [
        Config(method=m, rounds=ROUNDS, clients=CLIENTS, partition=PARTITION, target=90.0)
        for m in METHODS
    ]
    jobs = train.method_jobs(configs)
    with _watching(configs, None, METHODS) as options:
        options = train.Options(options.watch)  # without the lines of the plans
        results = train.experiment("compare", jobs, runs, False, options).results
    *pictures, report = _pictures(results, folder)
    image = folder / "sample.png"
    label, predicted, probability = _new_image(runs / PREDICTS, image)
    about, seeds = f"digits, {CLIENTS} clients, {PARTITION}", len(configs[0].seeds)
    text = f"{about}, {ROUNDS} rounds, {seeds} seeds: mean ± sd\n"
    console.print(text, highlight=False)
    print_table(results_table(results))
    lines = (
        f"\nFigures: {'  '.join(map(str, pictures))}",
        f"Report:  {report}",
        f"\nA new image, {image}, shows a {label}. The saved model of {runs / PREDICTS} says "
        f"{predicted}, with probability {probability:.2f}:\n"
        f"  kedge predict {runs / PREDICTS} {image}\n",
        "Next: kedge list                                     the parts to combine\n"
        "      kedge compare fedavg scaffold+fedsam           your own comparison\n"
        "      kedge run --data FOLDER --method scaffold      your own silos",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _pictures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the curves, the partition of the first seed, and the report."""
    from kedge.data.datasets import load
    from kedge.report import figures, page
    from kedge.report.partition_picture import plot_partition
    from kedge.runs.build import federation_of

    dataset, title = load("digits"), f"digits, {CLIENTS} clients, {PARTITION}"
    partition = federation_of(results[0].config, dataset, 0).partition
    assert partition is not None
    names = ("curves.png", "curves.svg", "partition.png", "partition.svg")
    paths = [folder / name for name in names]
    figures.curves(results, paths[:2], title)
    for path in paths[2:]:
        plot_partition(partition, dataset.y_train, path, class_names=dataset.classes)
    return [*paths, page.report(results, folder / NAME, title)]


def _new_image(run: Path, image: Path) -> tuple[int, int, float]:
    """Write an image that no client has seen: its label, and what the saved model of a run says,
    with its probability."""
    from PIL import Image

    from kedge.data.datasets import load
    from kedge.files import new_file
    from kedge.saved.run import load as load_run

    dataset = load("digits")
    assert dataset.x_test is not None
    assert dataset.y_test is not None
    with new_file(image) as file:
        Image.fromarray(dataset.x_test[SAMPLE, 0]).save(file, "PNG")
    model = load_run(run).model
    probability = float(model.predict_proba(image)[0].max())
    return int(dataset.y_test[SAMPLE]), int(model.predict(image)[0]), probability
