"""Commands that show what is available: ``data``, ``partition``, ``list``, ``show``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from kedge.cli.options import LOAD, load_files
from kedge.cli.screen import console
from kedge.settings import HELP


def data(
    every: Annotated[
        bool, typer.Option("--all", help="say how to add each missing dataset")
    ] = False,
) -> None:
    """List the datasets on this machine, and those that can be added."""
    from kedge.cli import display

    console.print(display.data_table(every), highlight=False)
    console.print("\n" + display.DATA_HINT, style="dim", highlight=False)


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
    from kedge.cli import display
    from kedge.data.datasets import load as read
    from kedge.data.partition import draw
    from kedge.data.splits import silo_names
    from kedge.report.partition_picture import plot_partition
    from kedge.runs.build import partition_of

    load_files(load)
    dataset = read(data)
    text = partition_of(text, dataset)
    groups = len(dataset.group_names or ())
    drawn = draw(text, dataset.y_train, clients or groups or 20, seed, dataset.groups)
    console.print(display.partition_table(drawn, dataset))
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
    from kedge.cli import display, pages

    load_files(load)
    if markdown:
        typer.echo(display.methods_markdown())
        return
    console.print(pages.list_page(pattern), highlight=False)


def show(
    name: Annotated[str, typer.Argument(help="a part, a model, a partition, ...; or KIND:NAME")],
    load: LOAD = None,
) -> None:
    """Show a part, a model, a partition, ...: what it does, its paper, options and ranges."""
    from kedge.cli import pages

    load_files(load)
    console.print(pages.show_page(name), highlight=False)
