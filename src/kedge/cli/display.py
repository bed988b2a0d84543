"""Tables of parts, datasets, partitions and checks, for the terminal and in Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.check import Report
from kedge.core.part import parts
from kedge.core.task import tasks
from kedge.data.datasets import Dataset, available
from kedge.data.datasets.formats import places
from kedge.data.datasets.known import DatasetListing as Listing
from kedge.data.partition import Partition
from kedge.data.splits import silo_names
from kedge.report.mathtext import title


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


DATA_HINT = (
    "A path works, too: an .npz, .csv or .parquet file, a folder of images (class/name.png), or "
    "one of these per client (silos). Options: kedge show data:csv, data:npz, data:images"
)


def data_table(every: bool = False) -> Group:
    """The datasets on this machine with their kind, shape, size and place, then the missing ones.

    Args:
        every: a line for each missing dataset, with the files that it needs.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("dataset", "kind", "shape", "classes", "train", "test", "where"):
        number = column in ("classes", "train", "test")
        fold = column in ("dataset", "where")
        table.add_column(
            column, justify="right" if number else "left", no_wrap=not fold, overflow="fold"
        )
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
        own = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
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
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.title = f"{drawn.name}, seed {drawn.seed}, hash {drawn.hash}"
    table.title_justify = "left"
    table.add_column("client", justify="right")
    table.add_column("samples", justify="right")
    counts = None
    if tasks[dataset.task].one_class:
        counts = drawn.label_counts(dataset.y_train, dataset.outputs)
        for c in range(min(dataset.outputs, 12)):
            label = dataset.classes[c] if dataset.classes else str(c)
            table.add_column(label[:12], justify="right")
    names = silo_names(dataset, drawn)
    for k in range(min(len(sizes), 40)):
        row = [names[k] if names else str(k), str(sizes[k])]
        row += [str(n) if n else "·" for n in counts[k][:12]] if counts is not None else []
        table.add_row(*row)
    return table


def check_table(report: Report) -> Table:
    """The laws and identities of a part, one row each."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for column in (report.part, "", "detail"):
        table.add_column(column)
    marks = {True: Text("ok", "green"), False: Text("FAILS", "bold red"), None: Text("-", "dim")}
    for found in report.findings:
        table.add_row(Text(f"{found.kind} {found.name}"), marks[found.holds], Text(found.detail))
    return table
