"""A page for every method, and the table of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.site import method_tables, rounds
from tools.site.computed import BATCH, CLIENTS, computed
from tools.site.described import describe
from tools.site.markdown import cell, code, markdown, table
from tools.site.papers import first_arxiv
from tools.site.templates import render

from kedge.catalogue import BY_WORD
from kedge.core.method import FedAvg, Method
from kedge.core.part import Part
from kedge.errors import IncompatibleError
from kedge.report.mathtext import title

SIDES = {
    "both": ("The base", "What every method does"),
    "client": ("On the client", "Change the loss, the gradient or the steps of local training"),
    "server": ("On the server", "Change how updates are combined, or what follows"),
    "data": ("On the data", "Change the batches that clients train on"),
    "personal": ("Personal models", "Give each client a model of its own"),
    "privacy": ("What leaves", "Bound what leaves a client, or what the server sees"),
}
LETTERS = {
    "P": "parameters that travel",
    "W": "all parameters of the network",
    "B": "its buffers, such as BatchNorm's statistics",
    "H": "parameters of the head",
    "E": "parameters of the part itself",
    "G": "parameters of a generator",
    "F": "features before the head",
    "D": "activations, or channels, at the part's cut",
    "C": "outputs, such as classes",
    "X": "numbers of one input",
    "N": "clients",
    "R": "rows of a batch",
}
MAX_FORMULA_LENGTH = 40  # characters, in the table of all methods


def entries() -> dict[str, type[Part]]:
    """FedAvg and all registered parts."""
    return BY_WORD["part"].entries()


def page(name: str, cache: Path | None = None) -> str:
    """The page of one method as Markdown."""
    cls = entries()[name]
    part = None if cls is FedAvg else cls()
    told, facts = describe(cls), computed(name, cache)
    hooks = part.hooks() if part else []
    schema = BY_WORD["part"].schema(name)
    return render(
        "method.md.j2",
        name=name,
        heading="FedAvg" if part is None else cls.__name__,
        sentence=title(cls),
        side={"both": "client and server side"}.get(cls.side, f"{cls.side} side"),
        sums_only=not cls.needs_clients,
        tasks=cls.tasks,
        how=told.how,
        notes=told.notes,
        figure=rounds.figure(hooks),
        hooks=hooks,
        hooks_table=rounds.hooks_table(hooks),
        reference=told.reference,
        papers=told.papers,
        fields=method_tables.fields_table(schema) if schema.options else "",
        presets=method_tables.presets(schema),
        traffic=facts["traffic"],
        batch=BATCH,
        cost=method_tables.cost(cls, facts["traffic"]),
        compute=cls.compute or ("nothing" if part is None else "next to nothing"),
        timings=method_tables.timings(name),
        leaves=method_tables.leaves(cls, told),
        uploads=method_tables.uploads(facts["uploads"]["rows"]),
        uploads_model=facts["uploads"]["model"],
        clients=CLIENTS,
        neutral=method_tables.neutral(cls, told),
        identities_text=method_tables.identities_text(facts["identities"]),
        identities=method_tables.identities(facts["identities"]),
        explanations=method_tables.explanations(facts["identities"]),
        objective=method_tables.objective(cls, facts["identities"]),
        deviations=method_tables.capital(told.deviations),
        results=method_tables.results(name),
        command=command(name),
        combined=_combined(name, cls),
        refuses=", ".join(f"[`{n}`]({n}.md)" for n in _refuses(cls)),
    )


def command(name: str) -> str:
    """A command that runs the method on built-in data in seconds."""
    cls = entries()[name]
    model = ' --model "mlp(norm=bn)"' if cls.needs_batchnorm else ""
    return f"kedge run --method {name}{model} --rounds 3 --clients 5 --seeds 0"


def _refuses(cls: type[Part]) -> list[str]:
    """Parts that cannot be in one method with this one."""
    if cls is FedAvg:
        return []
    found = []
    for name, other in entries().items():
        if other in (FedAvg, cls):
            continue
        try:
            Method((cls(), other()))
        except IncompatibleError:
            found.append(name)
    return found


def _combined(name: str, cls: type[Part]) -> str:
    """A sum with another part."""
    if cls is FedAvg:
        return "scaffold"
    others = [n for n in ("fedprox", "scaffold", *entries()) if n not in (name, "fedavg")]
    refused = _refuses(cls)
    return f"{name}+{next(n for n in others if n not in refused)}"


# -- the table of all methods ------------------------------------------------------------------


def index() -> str:
    """The page with the table of all methods, by side."""
    groups = []
    for side, (heading, what) in SIDES.items():
        rows = [_index_row(n, cls) for n, cls in entries().items() if cls.side == side]
        groups.append({"side": side, "heading": heading, "what": what, "rows": rows})
    others = {cls.side for cls in entries().values()} - set(SIDES)
    if others:
        raise ValueError(f"no heading for the side {others.pop()!r} of a part; see SIDES")
    letters = table(["letter", "means"], [[code(k), v] for k, v in LETTERS.items()])
    return render("methods.md.j2", groups=groups, letters=letters, total=len(entries()))


def _index_row(name: str, cls: type[Part]) -> dict[str, Any]:
    return {
        "name": name,
        "what": cell(markdown(title(cls))),
        "down": _short(name, cls.sends),
        "up": _short(name, cls.uploads),
        "keeps": _short(name, cls.keeps),
        "sums": "no" if cls.needs_clients else "yes",
        "paper": first_arxiv(cls.__doc__ or ""),
    }


def _short(name: str, formula: str) -> str:
    """A formula; a long one is on the page of the method."""
    if len(formula) <= MAX_FORMULA_LENGTH:
        return code(formula)
    return f"[a longer formula]({name}.md#cost)"
