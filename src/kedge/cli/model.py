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
from kedge.history.metric import KNOWN, Metric, title_of
from kedge.report.tables import Cell, Column, Table

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
PRECISION = Metric("precision", "precision", "%", True, 2)  # of a class


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
    from kedge.files import check_target, write_target
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
        write_target(target, text.encode())
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
    metrics = {metric.name: Metric.of(metric) for metric in model.task.metrics}
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
    found: Mapping[str, Any], metric: str = "auto", metrics: Mapping[str, Metric] | None = None
) -> list[Table]:
    """What an evaluation found: over all samples and over clients, by client, by class.

    Args:
        found: the values, see :func:`kedge.saved.scores.score`.
        metric: that of the run, which personal models are shown by.
        metrics: those of the task, by name.
    """
    known = KNOWN | {PRECISION.name: PRECISION} | dict(metrics or {})
    own = found.get("personal", {})

    def column(name: str, head: str, values: Sequence[Any], rank: int = 0) -> Column:
        return Column(name, head, "", [_cell(known.get(name), value) for value in values], rank)

    def label(name: str) -> str:
        return known[name].label if name in known else title_of(name)

    def by_metric() -> Table:
        names = [name for name in found["global"] if name != "samples"]

        def over(whose: str, summary: Mapping[str, Mapping[str, float]]) -> list[Column]:
            keys = {"mean": f"{whose}: mean", "worst": "worst", "spread": "spread"}
            if not summary:
                return []
            return [
                numbers(head, [summary.get(name, {}).get(key) for name in names])
                for key, head in keys.items()
            ]

        def numbers(head: str, values: Sequence[Any]) -> Column:
            pairs = zip(names, values, strict=True)
            return Column(head, head, "", [_cell(known.get(name), value) for name, value in pairs])

        all_samples = numbers(
            "global: all samples" if own else "all samples", [found["global"][n] for n in names]
        )
        # what a personal method is judged by stands in front
        columns = [*over("personal", own.get("over_clients", {})), all_samples]
        columns += over("clients", found.get("over_clients", {}))[: 2 if own else 3]
        return Table([_words("metric", list(map(label, names)))], columns)

    def rows(head: str, key: str) -> Table:
        values = found[key]
        every = list(dict.fromkeys(name for one in values.values() for name in one))
        names = [name for name in IN_ROWS if name in every] or every
        if len(names) == 1:  # a task of one's own
            names += [name for name in every if name not in names]
        columns = [
            column(name, label(name), [one.get(name) for one in values.values()], rank)
            for rank, name in enumerate(names)
        ]
        if own and key == "clients":
            shown = metric if metric in every else next((n for n in names if n != "samples"), "")
            their = [own["clients"].get(client, {}).get(shown) for client in values]
            columns.append(column(shown, f"personal: {label(shown)}", their))
        return Table([_words(head, list(values))], columns)

    tables = [by_metric()]
    if found.get("clients"):
        tables.append(rows("client", "clients"))
    if found.get("per_class"):
        tables.append(rows("class (global model)" if own else "class", "per_class"))
    confusion = found.get("confusion")
    if confusion and len(confusion) <= MAX_CONFUSION:
        names = list(found["per_class"])
        columns = [
            Column(name, name, "", [Cell(str(n) if n else "·", n) for n in counts])
            for name, counts in zip(names, zip(*confusion, strict=True), strict=True)
        ]
        tables.append(Table([_words("true \\ predicted", names)], columns))
    return tables
