"""Commands that use the model of a run: ``predict``, ``evaluate``, ``export``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim, print_table, warn
from kedge.errors import KedgeError
from kedge.history.metric import KNOWN, MetricInfo, title_of
from kedge.report.tables import Cell, Column, Table, words
from kedge.report.text import digits

if TYPE_CHECKING:
    from kedge.data.federation import Federation
    from kedge.saved.predictor import Predictor
    from kedge.saved.run import Run

RUN = Annotated[str, typer.Argument(metavar="RUN", help="the folder of a run")]
SEED = Annotated[int | None, typer.Option(help="which seed; the first one if left out")]
WHICH = Annotated[str, typer.Option(help="last, or best: the best round on validation data")]
CLIENT = Annotated[
    str | None, typer.Option(help="the personal model of a client, by name or number")
]
DEVICE = Annotated[str, typer.Option(help="auto, cpu or cuda")]
FORCE = Annotated[bool, typer.Option("--force", help="replace the file if it exists")]
FILE = Annotated[str | None, typer.Option("--out", "-o", metavar="FILE", help="the file to write")]

MAX_CONFUSION = 12  # classes; a larger matrix is in --json only
#: Metrics in the tables of clients and classes; all of them are in --json.
IN_ROWS = (
    "samples", "accuracy", "balanced_accuracy", "precision", "f1", "f1_macro", "auroc",
    "average_precision", "map", "r2", "mae", "rmse",
)  # fmt: skip
Values = Mapping[str, Any]
PRECISION = MetricInfo("precision", "precision", "%", True, 2)  # of a class


def predict(
    run: RUN,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="a CSV file, images, a folder of images, an .npz file (x_test, x or x_train) or "
            "a dataset; or a folder with one of those per client",
        ),
    ],
    *,
    out: FILE = None,
    client: CLIENT = None,
    seed: SEED = None,
    which: WHICH = "last",
    device: DEVICE = "cpu",
    force: FORCE = False,
    load: LOAD = None,
) -> None:
    """Predict from raw data with the model of a run; a CSV file of ids, classes, probabilities.

    kedge predict runs/hospitals new.csv -o predictions.csv
    kedge predict runs/hospitals new.csv --client north       with the personal model of a client
    """
    import pandas

    from kedge.csv_text import quoted
    from kedge.files import check_target, encoded, write_target
    from kedge.saved.evaluate import read_groups

    load_files(load)
    other = (out or "").lower().endswith((".xlsx", ".xls", ".parquet", ".json"))
    target = check_target(out, force, ".csv" if other else "") if out else None
    opened, model = _open(run, seed, which, client, device)
    frames = []
    for group in read_groups(model.bundle.encoding, data):
        frame = model.frame_of(group.samples)
        if group.client:
            frame.insert(0, "client", group.client)
        frames.append(frame)
    table = pandas.concat(frames, ignore_index=True)
    table = table.rename(columns=quoted)
    for name in table.select_dtypes(exclude="number"):
        table[name] = table[name].map(quoted)
    text = table.to_csv(index=False, lineterminator="\n")
    if target is None:
        typer.echo(text, nl=False)
    else:
        write_target(target, encoded(text))
        seed_of = f", by seed {opened.seed} of {len(opened.seeds)}" if len(opened.seeds) > 1 else ""
        dim(f"{len(table)} predictions in {target}{seed_of}")
    _warn_global(opened, client)


def evaluate(
    run: RUN,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="labelled data, as for predict; the test data of the run itself if left out",
        ),
    ] = None,
    *,
    client: CLIENT = None,
    seed: SEED = None,
    which: WHICH = "last",
    device: DEVICE = "cpu",
    as_json: JSON = False,
    load: LOAD = None,
) -> None:
    """Score the model of a run on labelled data: all metrics, per client and per class.

    kedge evaluate runs/hospitals                             on the test data of the run
    kedge evaluate runs/hospitals new.csv
    kedge evaluate runs/hospitals folder/                     one file per client
    """
    from kedge.saved.evaluate import (
        evaluate_groups,
        evaluate_own,
        holds_training_data,
        read_groups,
    )

    load_files(load)
    opened, model = _open(run, seed, which, client, device)
    personal = None
    if opened.has_personal and client is None:
        personal = {n: partial(_model, opened, n, device) for n in opened.clients}
    if data is None:
        found = evaluate_own(model, _federation(opened, model), personal)
    else:
        found = evaluate_groups(model, read_groups(model.bundle.encoding, data), personal)
        if "personal" not in found:
            _warn_global(opened, client)
        if holds_training_data(opened.config.data, data):
            warn(
                f"{data} is data of this run, so these are mostly samples that it trained on; "
                "leave DATA out to take its test samples alone"
            )
    data = data or opened.config.data
    if as_json:
        about = {"run": run, "data": data, "seed": opened.seed, "which": which}
        about |= {"client": client} if client is not None else {}
        typer.echo(json.dumps(about | found))
        return
    whose = "model" if client is None else f"personal model of {client},"
    head = f"{data}, {found['global'].get('samples', 0)} samples, {which} {whose}"
    head += f"{' of' if client is None else ''} seed {opened.seed}"
    console.print(head, highlight=False, markup=False, soft_wrap=True)
    metrics = [MetricInfo.of(metric) for metric in model.task.metrics]
    for table in evaluation_tables(found, opened.config.metric, metrics):
        console.print()
        print_table(table)


def export(
    run: RUN,
    *,
    to: Annotated[str, typer.Option("--to", help="onnx, or torch (.pt2 of torch.export)")] = "onnx",
    out: FILE = None,
    client: CLIENT = None,
    seed: SEED = None,
    which: WHICH = "last",
    force: FORCE = False,
    load: LOAD = None,
) -> None:
    """Write the model of a run as a program for other software, with its scaling inside.

    kedge export runs/hospitals --to onnx -o model.onnx       beside it: model.onnx.json
    """
    from kedge.files import check_target
    from kedge.saved.export import SUFFIXES, describe
    from kedge.saved.export import export as write

    load_files(load)
    if to not in SUFFIXES:
        raise KedgeError(f"--to {to} is not one of: {', '.join(SUFFIXES)}")
    target = check_target(out or f"model{SUFFIXES[to]}", force, SUFFIXES[to])
    opened, model = _open(run, seed, which, client, "cpu")
    described = write(model, to, target)
    _warn_global(opened, client)
    inputs = describe(model)["input"]
    shape = f"{inputs['dtype']} {inputs['shape']}".replace("'", "")
    dim(f"{target} takes {shape}; {described} describes it")


def _open(
    folder: str, seed: int | None, which: str, client: str | None, device: str
) -> tuple[Run, Predictor]:
    from kedge.saved.run import load

    run = load(folder, seed, which)
    return run, _model(run, client, device)


def _model(run: Run, client: str | None, device: str) -> Predictor:
    from kedge.engines.device import resolve_device

    model = run.model if client is None else run.personal(client)
    place = resolve_device(device)
    return model if place == model.device else model.to(place)


def _federation(run: Run, model: Predictor) -> Federation:
    """The clients of a run, with the data that it was trained on."""
    from kedge.runs.build import federation_of
    from kedge.saved.evaluate import own_dataset

    dataset = own_dataset(model.bundle, run.config)
    return federation_of(run.config, dataset, run.seed, model.device)


def _warn_global(run: Run, client: str | None) -> None:
    """A personal method is judged by its clients' own models; its global one may be far worse."""
    from kedge.core.part import parse
    from kedge.runs.build import is_personal

    if client is None and run.has_personal and is_personal(run.config):
        names = ", ".join(run.clients[:3]) + (", ..." if len(run.clients) > 3 else "")
        keeps = any(part.has("private") for part in parse(run.config.method).parts)
        layers = ", and its private layers were never trained in the global one" if keeps else ""
        warn(
            f"this is the global model, but {run.config.method} is judged by its clients' own"
            f"{layers}; take that of a client with --client NAME ({names})"
        )


# -- tables -----------------------------------------------------------------------------------


def evaluation_tables(
    found: Mapping[str, Any], headline: str = "auto", metrics: Sequence[MetricInfo] = ()
) -> list[Table]:
    """What an evaluation found: over all samples and over clients, by client, by class.

    Args:
        found: the values, see :func:`kedge.saved.scores.score`.
        headline: the metric of the run, which personal models are shown by.
        metrics: those of the task.
    """
    known = _Metrics(KNOWN | {metric.name: metric for metric in (PRECISION, *metrics)})
    own, classes = found.get("personal", {}), found.get("per_class", {})
    tables = [_by_metric(found, own.get("over_clients", {}), known)]
    if found.get("clients"):
        personal = own.get("clients", {})
        tables.append(_by_name("client", found["clients"], known, personal, headline))
    if classes:
        tables.append(_by_name("class (global model)" if own else "class", classes, known))
    confusion = found.get("confusion")
    if confusion and len(confusion) <= MAX_CONFUSION:
        columns = [
            Column(name, name, "", [Cell(str(n or "·"), n) for n in counts])
            for name, counts in zip(classes, zip(*confusion, strict=True), strict=True)
        ]
        tables.append(Table([words("true \\ predicted", list(classes))], columns))
    return tables


class _Metrics(dict[str, MetricInfo]):
    """Metrics by name; one that is not known has no unit."""

    def __missing__(self, name: str) -> MetricInfo:
        return MetricInfo(name, title_of(name))

    def cell(self, name: str, value: float | None) -> Cell:
        if value is None or isinstance(value, int):
            return Cell("-" if value is None else str(value), value)
        return Cell(f"{value:.2f}" if self[name].unit == "%" else digits(value, 4), value)


def _by_metric(found: Values, own: Values, known: _Metrics) -> Table:
    """A row per metric. What a personal method is judged by stands in front."""
    names = [name for name in found["global"] if name != "samples"]
    columns = [("global: all samples" if own else "all samples", found["global"])]
    over = found.get("over_clients", {})
    for whose, summary, count in (("personal", own, 3), ("clients", over, 2 if own else 3)):
        keys = ("mean", "worst", "spread")[: count if summary else 0]
        heads = [f"{whose}: mean" if key == "mean" else key for key in keys]
        values = [{n: one.get(key) for n, one in summary.items()} for key in keys]
        pairs = list(zip(heads, values, strict=True))
        columns = pairs + columns if whose == "personal" else columns + pairs
    return Table(
        [words("metric", [known[name].label for name in names])],
        [
            Column(head, head, "", [known.cell(name, values.get(name)) for name in names])
            for head, values in columns
        ],
    )


def _by_name(
    title: str, rows: Values, known: _Metrics, personal: Values | None = None, headline: str = ""
) -> Table:
    """A row per client or class; the last column is the headline of the clients' own models."""
    every = list(dict.fromkeys(name for one in rows.values() for name in one))
    names = [name for name in IN_ROWS if name in every] or every
    names = names if len(names) > 1 else every  # a task of one's own
    columns = [(name, known[name].label, rows, rank) for rank, name in enumerate(names)]
    if personal:
        first = next((name for name in names if name != "samples"), "")
        name = headline if headline in every else first
        columns.append((name, f"personal: {known[name].label}", personal, 0))
    return Table(
        [words(title, list(rows))],
        [
            Column(
                name, head, "", [known.cell(name, of.get(key, {}).get(name)) for key in rows], rank
            )
            for name, head, of, rank in columns
        ],
    )
