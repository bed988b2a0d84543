"""The commands ``list`` and ``show``, ``data`` and ``partition``: what there is to use.

The lists and pages are the same for all kinds of named entries in :mod:`kedge.catalogue`.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.catalogue import BY_WORD, KINDS, Kind, find
from kedge.cli.options import LOAD, load_files
from kedge.cli.screen import console, plain_table
from kedge.core.method import FedAvg
from kedge.core.part import Part, parts
from kedge.core.task import tasks
from kedge.data.datasets import Dataset, available
from kedge.data.datasets import load as read
from kedge.data.datasets.formats import places
from kedge.data.datasets.known import DatasetListing as Listing
from kedge.data.datasets.known import KnownDataset as Known
from kedge.data.datasets.load import EXAMPLES, FORMATS
from kedge.data.partition import Partition, draw
from kedge.data.partition.grammar import aliases
from kedge.data.splits import silo_names
from kedge.errors import KedgeError, UnknownName, nearest
from kedge.grammar import write_value
from kedge.loading import files
from kedge.report.mathtext import plain_doc, title
from kedge.schema import Schema
from kedge.settings import HELP

DATA_HINT = (
    "A path works, too: an .npz, .csv or .parquet file, a folder of images (class/name.png), or "
    "one of these per client (silos). Options: kedge show data:csv, data:npz, data:images"
)
_HINTS = {
    "part": "A method is a sum: scaffold+fedprox(mu=0.1). fedavg is the method without parts.\n"
    "Equation, paper, fields, presets and traffic of one: kedge show NAME\n"
    f"There are also: {', '.join('kedge list ' + kind.plural for kind in KINDS[1:])}",
    "model": "hf:NAME, or hf:FOLDER, is a pretrained model of Hugging Face: kedge show model:hf\n"
    "Options, ranges and papers of one: kedge show NAME",
    "partition": "A shift is added to a partition: iid+rotation(15). "
    + "".join(f"{short} is short for {name}. " for short, name in aliases.items())
    + "\nOptions, ranges and papers of one: kedge show NAME",
    "dataset": DATA_HINT.strip(),
    "schedule": "The factors of several multiply: warmup(5)+exponential(0.998)",
    "metric": "The headline of tables, gains and curves: --metric NAME. Of two classes, auroc is "
    "of the second.\nWhat one is: kedge show metric:NAME",
    "augmentation": "Several are applied from left to right: crop(4)+flip",
}


# -- commands ----------------------------------------------------------------------------------


def data(
    every: Annotated[
        bool, typer.Option("--all", help="say how to add each missing dataset")
    ] = False,
) -> None:
    """List the datasets on this machine, and those that can be added."""
    console.print(data_table(every), highlight=False)
    console.print("\n" + DATA_HINT, style="dim", highlight=False)


def partition(
    text: Annotated[
        str,
        typer.Argument(
            metavar="PARTITION",
            help="a partition, see: kedge list partitions; auto: that of a run without --partition",
        ),
    ] = "auto",
    data: Annotated[str, typer.Option("--data", "-d", help=escape(HELP["data"]))] = "digits",
    clients: Annotated[
        int, typer.Option(help="number of clients; 0: one per silo, or 20 without silos")
    ] = 0,
    seed: Annotated[int, typer.Option(help="seed of the draw")] = 0,
    out: Annotated[
        list[str] | None,
        typer.Option("--out", "-o", help="write a figure (.png, .svg) or the partition (.json)"),
    ] = None,
    load: LOAD = None,
) -> None:
    """Draw a partition: how many samples of each class each client holds.

    kedge partition "dirichlet(0.1)" --data cifar10 --clients 10 -o split.png -o split.json
    kedge partition --data "hospitals(label=sick, missing=mean)"
    """
    from kedge.report.partition_picture import plot_partition
    from kedge.runs.build import partition_of

    load_files(load)
    dataset = read(data)
    text = partition_of(text, dataset)
    groups = len(dataset.group_names or ())
    drawn = draw(text, dataset.y_train, clients or groups or 20, seed, dataset.groups)
    console.print(partition_table(drawn, dataset))
    for path in out or []:
        if path.endswith(".json"):
            drawn.save(path)
        else:
            names = silo_names(dataset, drawn)
            plot_partition(
                drawn, dataset.y_train, path, class_names=dataset.classes, client_names=names
            )
        console.print(f"wrote {path}", highlight=False)


def list_things(
    pattern: Annotated[
        str,
        typer.Argument(
            help="part of a name, a pattern such as fed*, or a kind: models, partitions, shifts, "
            "data, splits, augmentations, optimizers, schedules"
        ),
    ] = "*",
    markdown: Annotated[bool, typer.Option("--markdown", help="a table in Markdown")] = False,
    load: LOAD = None,
) -> None:
    """List the parts of methods, or the entries of another kind, e.g. models."""
    load_files(load)
    if markdown:
        typer.echo(methods_markdown())
        return
    console.print(list_page(pattern), highlight=False)


def show(
    name: Annotated[str, typer.Argument(help="a part, a model, a partition, ...; or KIND:NAME")],
    load: LOAD = None,
) -> None:
    """Show a part, a model, a partition, ...: what it does, its paper, options and ranges."""
    load_files(load)
    console.print(show_page(name), highlight=False)


# -- lists -------------------------------------------------------------------------------------


def list_page(pattern: str) -> RenderableType:
    """The entries of a kind, or the entries of all kinds that match a pattern, parts first.

    Raises:
        KedgeError: nothing matches.
    """
    if pattern in BY_WORD:
        return _with_hint(_kind_table(BY_WORD[pattern]), BY_WORD[pattern])
    part, *others = KINDS
    names = _matching(part, pattern)
    if names:
        return _with_hint(_parts_table(names), part)
    found = [(kind, name) for kind in others for name in _matching(kind, pattern)]
    if not found:
        raise _unmatched(pattern, [*part.entries(), *(kind.plural for kind in KINDS)])
    table = plain_table("name", "kind", "what it is")
    for kind, name in found:
        table.add_row(name, kind.name, Text(title(kind.entries()[name])))
    return table


def _unmatched(pattern: str, known: list[str]) -> KedgeError:
    if nearest(pattern, known):
        return UnknownName("part", pattern, known, see="kedge list")
    kinds = ", ".join(kind.plural for kind in KINDS)
    return KedgeError(
        f"no part {pattern!r}, nor anything else. See: kedge list, or one of: {kinds}"
    )


def _matching(kind: Kind, pattern: str) -> list[str]:
    """Names that contain the pattern, or match it if it has wildcards."""
    pattern = pattern.lower()
    pattern = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [name for name in sorted(kind.entries()) if fnmatchcase(name.lower(), pattern)]


def _kind_table(kind: Kind) -> RenderableType:
    if kind.name == "part":
        return _parts_table(list(kind.entries()))
    if kind.name == "dataset":
        return Group(data_table(), Text(), _options_table(kind, list(FORMATS), "format"))
    names = [name for name in kind.entries() if name not in aliases]
    table = _options_table(kind, names, kind.name)
    if kind.name == "partition":
        shifts = BY_WORD["shift"]
        for name, function in shifts.entries().items():
            table.add_row(f"+{name}", Text(_options(shifts.schema(name))), Text(title(function)))
    return table


def _parts_table(names: list[str]) -> Table:
    table = plain_table("part", "side", "what it does")
    entries = KINDS[0].entries()
    for name in names:
        table.add_row(name, entries[name].side, Text(title(entries[name])))
    return table


def _options_table(kind: Kind, names: list[str], heading: str) -> Table:
    if kind.name == "metric":  # metrics have no options
        table = plain_table(heading, "what it is")
        for name in names:
            table.add_row(name, Text(title(kind.entries()[name])))
        return table
    table = plain_table(heading, "options", "what it is")
    for name in names:
        what = Text(title(kind.entries()[name]))
        table.add_row(name, Text(_options(kind.schema(name))), what)
    return table


def _options(schema: Schema) -> str:
    return schema.signature().removeprefix(schema.name).strip("()")


def _with_hint(table: RenderableType, kind: Kind) -> RenderableType:
    hint = _HINTS.get(kind.name, "Options, ranges and papers of one: kedge show NAME")
    return Group(table, Text(f"\n{hint}", style="dim"))


def methods_markdown() -> str:
    """The table of all parts in Markdown."""
    columns = ["part", "side", "what it does", "extra down", "extra up", "keeps", "extra compute"]
    columns += ["sums only", "paper"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name in parts:
        cls = parts[name]
        found = re.search(r"arXiv:(\d+\.\d+)", cls.__doc__ or "")
        paper = f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else ""
        cells = [f"`{name}`", cls.side, title(cls), cls.sends, cls.uploads, cls.keeps]
        cells += [cls.compute, "no" if cls.needs_clients else "yes", paper]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- pages -------------------------------------------------------------------------------------


def show_page(text: str) -> RenderableType:
    """All about one entry: what it does, its paper, its options and how to use it.

    Raises:
        KedgeError: no entry, or several, have that name; see :func:`kedge.catalogue.find`.
    """
    kind, name = find(text)
    thing, schema = kind.entries()[name], kind.schema(name)
    heading = thing.__name__ if kind.name == "part" else name
    heading = "hf:NAME" if (kind.name, name) == ("model", "hf") else heading
    label = "data format" if kind.name == "dataset" and name in FORMATS else kind.name
    pieces: list[RenderableType] = [
        Text(heading, style="bold") + Text(f"  {label}", style="dim"),
        Padding(Text(plain_doc(inspect.getdoc(thing) or "")), (0, 0, 1, 2)),
    ]
    if schema.options:
        pieces.append(Padding(_schema_table(schema), (0, 0, 1, 2)))
    pieces += [Text(line) for line in _presets(schema)]
    if kind.name == "dataset" and name in EXAMPLES:
        pieces.append(Padding(_examples_table(EXAMPLES[name]), (0, 0, 1, 2)))
    facts = plain_table(show_header=False)
    for key, value in _facts(kind, name, thing, schema).items():
        facts.add_row(Text(key, style="bold"), Text(value))
    return Group(*pieces, Padding(facts, (0, 0, 0, 2)))


def _schema_table(schema: Schema) -> Table:
    rows = schema.rows()
    ranges = any(row.range for row in rows)
    columns = [schema.noun, "type", "default", *(["range"] if ranges else []), "meaning"]
    table = plain_table(*columns)
    for row in rows:
        default = row.default or "must be given"
        cells = [row.name, row.type, default, *([row.range] if ranges else []), row.doc]
        table.add_row(*map(Text, cells))
    return table


def _examples_table(examples: tuple[tuple[str, str], ...]) -> Table:
    table = plain_table("example", "what it does")
    for text, what in examples:
        table.add_row(Text(f'--data "{text}"'), Text(what))
    return table


def _presets(schema: Schema) -> list[str]:
    lines = []
    for preset, values in schema.presets.items():
        same = "  (= the defaults)" if schema.is_default(values) else ""
        name = schema.name
        lines.append(f"  {name}:{preset}  =  {name}({_settings(values)}){same}")
    return [*lines, ""] if lines else []


def _facts(kind: Kind, name: str, thing: Any, schema: Schema) -> dict[str, str]:
    facts: dict[str, str] = {}
    if name in aliases and kind.name == "partition":
        facts["short for"] = aliases[name]
    if kind.name == "part":
        facts |= _part_facts(thing)
    elif isinstance(thing, Known):
        facts |= _dataset_facts(thing)
    elif kind.name == "optimizer":
        steps = "a weighted sum of gradients" if thing.is_linear else "no sum of gradients"
        facts["local update"] = steps
    facts["use"] = f"kedge run {kind.use.format(_example(kind, name, schema))}"
    source = thing if hasattr(thing, "__qualname__") else type(thing)
    loaded = [str(file.path) for file in files.values() if name in file.names(kind.name)]
    if loaded:
        facts["use"] += f" --load {shlex.quote(loaded[0])}"
        return facts | {"source": f"{source.__qualname__} in {loaded[0]}"}
    return facts | {"source": f"{source.__module__}.{source.__qualname__}"}


def _example(kind: Kind, name: str, schema: Schema) -> str:
    """An entry as it is written on the command line, with the first option that has a value."""
    if name == "hf" and kind.name == "model":
        return "hf:NAME(lora=8)"
    if name in FORMATS and kind.name == "dataset":
        return "hf:NAME" if name == "hf" else f"{name}(path='...')"
    first = next((row for row in schema.rows() if row.default not in ("-", '""')), None)
    if first is None:
        return name
    return f"{name}({first.name}={first.default or '...'})"


def _dataset_facts(known: Known) -> dict[str, str]:
    facts = {"inputs": "x".join(map(str, known.shape)), "classes": str(known.count)}
    if known.classes:
        facts["classes"] += f": {', '.join(known.classes)}"
    return facts | {"to have it": f"put {known.advice()}"}


def _part_facts(part: type[Part]) -> dict[str, str]:
    hooks = [] if part is FedAvg else part().hooks()
    secure = "no: the server must see single clients" if part.needs_clients else "yes: only sums"
    return {
        "acts on": "client and server side" if part is FedAvg else f"{part.side} side",
        "hooks": ", ".join(hooks) or "none: every method does this much",
        "extra down": _numbers(part.sends),
        "extra up": _numbers(part.uploads),
        "client keeps": _numbers(part.keeps),
        "extra compute": part.compute or ("nothing" if part is FedAvg else "next to nothing"),
        "tasks": ", ".join(part.tasks),
        "neutral at": _neutral(part.neutral),
        "objective": _objective(part),
        "secure sums": secure,
    }


def _numbers(formula: str) -> str:
    return "nothing" if formula == "0" else f"{formula} numbers"


def _neutral(setting: Mapping[str, object] | None) -> str:
    if setting is None:
        return "no setting gives FedAvg back"
    return _settings(setting) or "always: the global model is FedAvg's"


def _objective(part: type[Part]) -> str:
    """Which problem the fixed point solves, as the law *objective* checks it."""
    if part.solves is None:
        return "no claim: local steps bias the fixed point, as in FedAvg"
    where = " in the head" if part.solves_for == "head" else ""
    setting = _settings({k: v for k, v in part.solves.items() if getattr(part, k) != v})
    return f"the fixed point minimises the run's weighted objective{where}" + (
        f" (checked at {setting})" if setting else ""
    )


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={write_value(v)}" for k, v in values.items())


# -- data and partitions -----------------------------------------------------------------------


def data_table(every: bool = False) -> Group:
    """The datasets on this machine with their kind, shape, size and place, then the missing ones.

    Args:
        every: a line for each missing dataset, with the files that it needs.
    """
    numbers = ("classes", "train", "test")
    table = plain_table("dataset", "kind", "shape", *numbers, "where", right=numbers)
    for column in table.columns:
        column.no_wrap, column.overflow = column.header not in ("dataset", "where"), "fold"
    entries = available()
    present = [entry for entry in entries if entry.kind and not entry.note]
    broken = [entry for entry in entries if entry.kind and entry.note]
    missing = [entry for entry in entries if not entry.kind]
    for entry in present:
        sizes = [str(entry.sizes.get(split, "")) for split in ("train", "test")]
        kind = f"{entry.sizes['silos']} silos" if "silos" in entry.sizes else entry.kind
        table.add_row(
            entry.name, kind, _shape(entry), str(entry.classes or ""), *sizes, _short(entry.where)
        )
    lines: list[RenderableType] = [Text()]
    if not every:
        for some, what, more in (
            (broken, "Cannot be read", "why"),
            (missing, "Not on this machine", "how to add them"),
        ):
            names = ", ".join(entry.name for entry in some)
            lines += [Text(f"{what}: {names} (kedge data --all: {more})")] if some else []
        return Group(table, *lines)
    for entry in broken:
        lines.append(Text(f"{entry.name} cannot be read: {entry.note}", "red", overflow="fold"))
    if missing:
        lines.append(Text(f"Not on this machine. Put one into {places()}:"))
        own = plain_table(show_header=False)
        for entry in missing:
            own.add_row(entry.name, _shape(entry), f"{entry.classes} classes", entry.files)
        lines.append(own)
    return Group(table, *lines)


def _shape(entry: Listing) -> str:
    return "x".join(map(str, entry.shape)) if entry.shape else ""


def _short(where: str) -> str:
    """A path with ~ for the user's folder."""
    home = str(Path.home())
    return where.replace(home, "~", 1) if home != "/" and where.startswith(home) else where


def partition_table(drawn: Partition, dataset: Dataset) -> Table:
    """The number of samples of each client, in all and of each class."""
    sizes = drawn.sizes
    columns, counts = ["client", "samples"], None
    if tasks[dataset.task].one_class:
        counts = drawn.label_counts(dataset.y_train, dataset.outputs)
        labels = dataset.classes or [str(c) for c in range(dataset.outputs)]
        columns += [label[:12] for label in labels[:12]]
    title = f"{drawn.name}, seed {drawn.seed}, hash {drawn.hash}"
    table = plain_table(*columns, right=columns, padding=(0, 1, 0, 0), title=title)
    table.title_justify = "left"
    table.columns[0].no_wrap = False
    names = silo_names(dataset, drawn)
    for k in range(min(len(sizes), 40)):
        row = [names[k] if names else str(k), str(sizes[k])]
        row += [str(n) if n else "·" for n in counts[k][:12]] if counts is not None else []
        table.add_row(*row)
    return table
