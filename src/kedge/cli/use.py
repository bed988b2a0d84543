"""Commands that use the model of a run: ``predict``, ``evaluate``, ``export``."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim, warn
from kedge.errors import KedgeError

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
PERCENT = ("accuracy", "balanced_accuracy", "f1", "f1_macro", "precision")
SHORT = {"balanced_accuracy": "balanced", "average_precision": "avg. prec."}
#: Metrics in the tables of clients and classes; all of them are in --json.
IN_ROWS = (
    "samples", "accuracy", "balanced_accuracy", "precision", "f1", "f1_macro", "auroc",
    "average_precision", "map", "r2", "mae", "rmse",
)  # fmt: skip


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
    opened = _open(run, seed, which)
    model = _model(opened, client, device)
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
    from kedge.saved.evaluate import evaluate_groups, evaluate_own, holds_training_data, read_groups

    load_files(load)
    opened = _open(run, seed, which)
    model = _model(opened, client, device)
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
    about = {"run": run, "data": data or opened.config.data, "seed": opened.seed, "which": which}
    about |= {"client": client} if client is not None else {}
    if as_json:
        typer.echo(json.dumps(about | found))
        return
    _show(about, found, opened.config.metric)


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
    from kedge.saved.export import SUFFIXES
    from kedge.saved.export import export as write

    load_files(load)
    if to not in SUFFIXES:
        raise KedgeError(f"--to {to} is not one of: {', '.join(SUFFIXES)}")
    target = check_target(out or f"model{SUFFIXES[to]}", force, SUFFIXES[to])
    opened = _open(run, seed, which)
    model = _model(opened, client, "cpu")
    described = write(model, to, target)
    _warn_global(opened, client)
    dim(f"{target} takes {_inputs(model)}; {described} describes it")


def _open(run: str, seed: int | None, which: str) -> Run:
    from kedge.saved.run import load

    return load(run, seed, which)


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


def _inputs(model: Predictor) -> str:
    from kedge.saved.export import describe

    entry = describe(model)["input"]
    return f"{entry['dtype']} {entry['shape']}".replace("'", "")


# -- tables -----------------------------------------------------------------------------------


def _show(about: dict[str, Any], found: dict[str, Any], metric: str) -> None:
    samples = found["global"].get("samples", 0)
    whose = f"personal model of {about['client']}, seed" if "client" in about else "model of seed"
    head = f"{about['data']}, {samples} samples, {about['which']} {whose} {about['seed']}"
    console.print(head, highlight=False, markup=False, soft_wrap=True)
    _print_metrics(found)
    rows = found.get("clients")
    own = found.get("personal", {}).get("clients", {})
    if rows:
        _print_rows("client", rows, own, metric)
    if found.get("per_class"):
        _print_rows("class\n(global model)" if own else "class", found["per_class"])
    confusion = found.get("confusion")
    if confusion and len(confusion) <= MAX_CONFUSION:
        _print_confusion(list(found["per_class"]), confusion)


def _print_metrics(found: dict[str, Any]) -> None:
    over, own = found.get("over_clients", {}), found.get("personal", {}).get("over_clients", {})
    keys, titles = ("mean", "worst", "spread"), ["metric"]
    if own:  # what a personal method is judged by stands in front
        titles += ["personal:\nmean", "worst", "spread"]
    titles += ["global:\nall samples" if own else "all samples"]
    titles += ["clients:\nmean", "worst", "spread"][: 2 if own else 3] if over else []
    table = _table(*titles)
    for name, value in found["global"].items():
        if name == "samples":
            continue
        of_own, of_global = (
            [_text(name, summary.get(name, {}).get(key)) for key in keys if summary]
            for summary in (own, over)
        )
        cells = [*of_own, _text(name, value), *of_global]
        table.add_row(_label(name), *cells[: len(titles) - 1])
    console.print(table)


def _print_rows(
    title: str,
    rows: dict[str, dict[str, Any]],
    personal: dict[str, dict[str, Any]] | None = None,
    metric: str = "",
) -> None:
    every = dict.fromkeys(name for one in rows.values() for name in one)
    names = [name for name in IN_ROWS if name in every] or list(every)
    names += [
        name for name in every if len(names) == 1 and name not in names
    ]  # a task of one's own
    headline = metric if metric in every else next((n for n in names if n != "samples"), "")
    table = _table(title, *(_label(name) for name in names))
    if personal:  # words below each other: one column more has to fit
        table = _table(title, *(_label(name).replace(" ", "\n") for name in names))
        table.add_column(f"personal:\n{_label(headline)}", justify="right", overflow="fold")
    for key, values in rows.items():
        cells = [_text(name, values.get(name)) for name in names]
        if personal:
            cells.append(_text(headline, personal.get(key, {}).get(headline)))
        table.add_row(key, *cells)
    console.print(table)


def _print_confusion(names: list[str], confusion: list[list[int]]) -> None:
    table = _table("true \\ predicted", *names)
    for name, row in zip(names, confusion, strict=True):
        table.add_row(name, *(str(n) if n else "·" for n in row))
    console.print(table)


def _table(*titles: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(
            title,
            justify="right" if i else "left",
            overflow="fold",
            no_wrap=not i,
            vertical="bottom",
        )
    return table


def _label(name: str) -> str:
    words = SHORT.get(name, name.replace("_", " "))
    return f"{words} %" if name in PERCENT else words


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if name in PERCENT else f"{value:.4g}"
