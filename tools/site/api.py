"""Pages of the Python interface: which object is on which page. mkdocstrings writes the rest."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from typing import Any, NamedTuple

from tools.site.markdown import code, markdown, table
from tools.site.templates import render

import kedge
from kedge.core.part import Declarations


class ApiPage(NamedTuple):
    """A page of objects, each by its public name or its full one."""

    file: str
    title: str
    intro: str
    names: tuple[str, ...]
    about: str = ""  # a module whose docstring follows the introduction


PAGES = (
    ApiPage(
        "running", "Run and compare",
        "Train one method, several, or all combinations of some settings; on named data or on "
        "your own.",
        ("run", "compare", "sweep", "fit", "reproduce", "Result", "kedge.history.run.Stat"),
    ),
    ApiPage(
        "saved", "Saved runs and models",
        "What the folder of a run holds, and a model that predicts from raw inputs.",
        ("load", "Run", "kedge.saved.predictor.Predictor"),
    ),
    ApiPage(
        "looking", "Diagnose and report",
        "How unlike clients are, what training made of it, and a page about runs.",
        ("diagnose", "kedge.history.sheet.Sheet", "write_report"),
    ),
    ApiPage(
        "part", "Parts and hooks",
        "The base class of methods, and what a part may return. "
        "`from kedge.core.part import Doc, Range` for the types of its fields. "
        "[What a part declares](#declarations).",
        ("Part", "register", "Method", "parse", "Sum", "Mean", "Stack", "kedge.schema.values.Doc",
         "kedge.schema.values.Range"),
        "kedge.core.part",
    ),
    ApiPage(
        "seen", "What hooks see",
        "A client's hooks receive a `View`, the server's a `Round`; both give a part its own state "
        "and nothing of other parts.",
        ("View", "kedge.core.view.Info", "Round", "Spec", "Out", "Batch"),
    ),
    ApiPage(
        "tree", "Trees",
        "States and weights are trees: dictionaries, named tuples and tensors, nested. "
        "`from kedge.core import tree`.",
        ("Weights", "kedge.core.tree"),
    ),
    ApiPage(
        "check", "Check a part",
        "Laws that every part obeys, and identities from its paper.",
        ("check_part", "oracle", "Claim", "kedge.check.Report", "kedge.check.Finding",
         "kedge.check.problems.quadratics", "kedge.check.problems.position",
         "kedge.check.problems.choices", "kedge.check.problems.logits",
         "kedge.check.problems.images", "kedge.check.problems.Problem"),
    ),
    ApiPage(
        "simulation", "Simulate by hand",
        "The pieces below `run` and `fit`, for experiments with a loop of their own.",
        ("Simulation", "Federation", "Model", "LocalWork", "SGD", "Adam"),
    ),
    ApiPage(
        "tasks", "Tasks and metrics",
        "What is learnt and how it is judged.",
        ("Classification", "MultiLabel", "Regression", "register_metric",
         "kedge.core.task_base.Task", "kedge.core.task_base.Metric"),
    ),
    ApiPage(
        "errors", "Errors",
        "The base class; the others are on the page of [error messages](../errors.md).",
        ("KedgeError",),
    ),
)  # fmt: skip


def full_name(name: str) -> str:
    """Where an object is defined.

    >>> full_name("Part")
    'kedge.core.part.Part'
    """
    if "." in name:
        return name
    thing = getattr(kedge, name)
    return f"{thing.__module__}.{thing.__qualname__}"


def pages() -> list[ApiPage]:
    """All pages. A public name that none of them has joins the page whose objects are nearest."""
    found = {page: list(page.names) for page in PAGES}
    for name in sorted(set(kedge.__all__) - {n for names in found.values() for n in names}):
        nearest = max(PAGES, key=lambda page: max(_common(name, other) for other in page.names))
        found[nearest].append(name)
    return [page._replace(names=tuple(names)) for page, names in found.items()]


def _common(name: str, other: str) -> int:
    """How many modules the places of two objects share."""
    pairs = zip(full_name(name).split("."), full_name(other).split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def known() -> list[str]:
    """Full names of all objects on the pages, which docstrings may link to."""
    found: list[str] = []
    for page in pages():
        for name in page.names:
            full = full_name(name)
            found.append(full)
            thing = _object(full)
            if inspect.isclass(thing) or inspect.ismodule(thing):
                found += [f"{full}.{own}" for own in _documented(thing)]
    return found


def _object(full: str) -> Any:
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _documented(thing: Any) -> list[str]:
    names = []
    for name, value in vars(thing).items():
        value = inspect.unwrap(getattr(value, "__func__", value))
        value = getattr(value, "fget", value)
        own = not inspect.ismodule(thing) or getattr(value, "__module__", "") == thing.__name__
        if name[0] != "_" and callable(value) and own and getattr(value, "__doc__", None):
            names.append(name)
    return names


def page(one: ApiPage) -> str:
    """A page as Markdown, with a directive for each object."""
    full = {name: full_name(name) for name in one.names}
    objects = [
        {"full": path, "shown": name if "." in name else f"kedge.{name}",
         "module": inspect.ismodule(_object(path)),
         "elsewhere": [p.rpartition(".")[2] for p in full.values() if p.rpartition(".")[0] == path]}
        for name, path in full.items()
    ]  # fmt: skip
    doc = inspect.getdoc(importlib.import_module(one.about)) if one.about else ""
    about = markdown(doc or "", lambda name: name if name in set(known()) else None)
    declared = _declarations() if one.file == "part" else ""
    return render("api.md.j2", page=one, about=about, objects=objects, declared=declared)


def _declarations() -> str:
    """The class attributes of a part, from the comments above them."""
    rows = []
    source = inspect.getsource(Declarations)
    pattern = r"((?:    #: .*\n    # ?.*\n|    #: .*\n)+)    (\w+): ClassVar\[(.*)\] = (.*)\n"
    for comment, name, kind, default in re.findall(pattern, source):
        text = " ".join(line.strip().lstrip("#: ") for line in comment.splitlines())
        rows.append([code(name), code(kind), code(default), markdown(text)])
    return table(["attribute", "type", "default", "meaning"], rows)


def index() -> str:
    """The page with all public names."""
    rows = []
    for one in pages():
        for name in one.names:
            full = full_name(name)
            shown = name if "." in name else f"kedge.{name}"
            doc = inspect.getdoc(_object(full)) or ""
            first = " ".join(doc.split("\n\n")[0].split())
            rows.append([f"[`{shown}`][{full}]", markdown(first), f"[{one.title}]({one.file}.md)"])
    return render("api_index.md.j2", table=table(["name", "what it is", "page"], rows))
