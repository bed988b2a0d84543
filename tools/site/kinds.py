"""Pages of the other kinds of named entries: models, datasets, partitions, metrics, ..."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tools.site.markdown import code, markdown, plain, table
from tools.site.method_tables import fields_table
from tools.site.papers import linked
from tools.site.templates import render

from kedge.catalogue import BY_WORD, KINDS, Kind
from kedge.core.task import Metric, tasks
from kedge.data.datasets.known import KnownDataset as Known
from kedge.data.datasets.load import EXAMPLES, FORMATS
from kedge.data.partition.grammar import aliases
from kedge.report.mathtext import title


class KindPage(NamedTuple):
    """A page about one kind or several that belong together."""

    file: str
    title: str
    intro: str
    kinds: tuple[str, ...]


PAGES = (
    KindPage(
        "models", "Models",
        "Networks by name, for `--model`. `auto`, the default, takes one that fits the data. A "
        "module of your own works as well: [models](../models.md).",
        ("model",),
    ),
    KindPage(
        "data", "Datasets and readers",
        "Data by name or path, for `--data`. A reader opens files of one format; its options stand "
        "in brackets behind the path. The guide: [data](../data.md).",
        ("dataset",),
    ),
    KindPage(
        "partitions", "Partitions and shifts",
        "A partition says which client holds which samples, for `--partition`. A shift changes the "
        "inputs of clients and is added to a partition: `iid+rotation(15)`.",
        ("partition", "shift"),
    ),
    KindPage(
        "metrics", "Metrics, tasks and splits",
        "What a model is judged by and on which data. The guide: [metrics](../metrics.md).",
        ("metric", "split"),
    ),
    KindPage(
        "training", "Optimisers and schedules",
        "How clients take their local steps, for `--optimizer` and `--schedule`.",
        ("optimizer", "schedule"),
    ),
    KindPage(
        "augmentations", "Augmentations",
        "Random changes of training images, for `--augment`. Several are applied in turn.",
        ("augmentation",),
    ),
)  # fmt: skip


class Entry(NamedTuple):
    """One named thing, as Markdown."""

    name: str
    anchor: str
    title: str
    body: str
    options: str
    examples: str
    facts: list[str]
    use: str


def uncovered() -> set[str]:
    """Kinds that have no page; a test holds this to be none."""
    return {kind.name for kind in KINDS} - {"part"} - {k for page in PAGES for k in page.kinds}


def page(one: KindPage) -> str:
    """A page as Markdown."""
    groups = []
    for name in one.kinds:
        kind = BY_WORD[name]
        entries = [
            _entry(kind, n, thing) for n, thing in kind.entries().items() if n not in aliases
        ]
        for label, own in _grouped(kind, entries).items():
            groups.append({"title": label, "summary": _summary(kind, own), "entries": own})
    if "metric" in one.kinds:
        own = [_task(name) for name in tasks]
        groups.insert(1, {"title": "Tasks", "summary": "", "entries": own})
    return render("kind.md.j2", page=one, groups=groups, level="##" if len(groups) == 1 else "###")


def _grouped(kind: Kind, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Datasets and readers stand apart; others are one group."""
    if kind.name != "dataset":
        label = {"optimizer": "Optimisers"}.get(kind.name, kind.plural.capitalize())
        return {label: list(entries)}
    groups: dict[str, list[Entry]] = {"Datasets": [], "Readers": []}
    for entry in entries:
        is_reader = entry.anchor.removeprefix("dataset-") in FORMATS
        groups["Readers" if is_reader else "Datasets"].append(entry)
    return groups


def _summary(kind: Kind, entries: list[Entry]) -> str:
    is_reader = entries[0].anchor.removeprefix("dataset-") in FORMATS
    heads = ["reader" if is_reader and kind.name == "dataset" else kind.name, "what it is"]
    rows = [[f"[`{e.name}`](#{e.anchor})", e.title] for e in entries]
    return table(heads, rows)


def _entry(kind: Kind, name: str, thing: Any) -> Entry:
    schema = kind.schema(name)
    doc = inspect.cleandoc(thing.doc if kind.name == "metric" else inspect.getdoc(thing) or "")
    facts = []
    if isinstance(thing, Known):
        doc = ""
        facts += [f"Classes: {', '.join(thing.classes)}."] if thing.classes else []
        facts += [f"To have it, put {plain(_without_place(thing))} into the folder `$KEDGE_DATA`."]
    short = [alias for alias, full in aliases.items() if full == name and kind.name == "partition"]
    facts += [f"`{alias}` is short for it." for alias in short]
    _, _, body = doc.partition("\n\n")
    text = f"hf:NAME({next(iter(schema.options))}=...)" if name == "hf" else schema.signature()
    if kind.name == "dataset":
        text = EXAMPLES[name][0][0] if name in EXAMPLES else name
    examples = table(["example", "what it does"],
                     [[code(f'--data "{t}"'), plain(what)] for t, what in EXAMPLES.get(name, ())]
                     ) if kind.name == "dataset" and name in EXAMPLES else ""  # fmt: skip
    return Entry(
        name="hf:NAME" if name == "hf" else name,
        anchor=f"{kind.name}-{name}",
        title=_title(thing),
        body=linked(markdown(body)),
        options=fields_table(schema) if schema.options else "",
        examples=examples,
        facts=facts,
        use=kind.use.format(text),
    )


def _title(thing: Any) -> str:
    if isinstance(thing, Known):
        shape = "x".join(map(str, thing.shape))
        return f"{thing.count} classes, inputs of {shape}"
    doc = thing.doc if isinstance(thing, Metric) else inspect.getdoc(thing) or ""
    first = inspect.cleandoc(doc).split("\n\n")[0]
    return markdown(" ".join(first.split())).rstrip(".") or plain(title(thing))


def _without_place(known: Known) -> str:
    return re.sub(r",? into .*$", "", known.advice(), flags=re.S)


def _task(name: str) -> Entry:
    cls = tasks[name]
    doc = inspect.getdoc(cls) or ""
    _, _, body = doc.partition("\n\n")
    metrics = ", ".join(f"[`{m.name}`](#metric-{m.name})" for m in cls.metrics)
    facts = [f"Metrics: {metrics}."]
    return Entry(name, f"task-{name}", _title(cls), linked(markdown(body)), "", "", facts, "")
