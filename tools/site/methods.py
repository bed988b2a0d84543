"""A page for every method, and the table of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.site import measured, rounds
from tools.site.computed import BATCH, BYTES, CLIENTS, computed
from tools.site.described import Described, describe
from tools.site.markdown import boxed, cell, code, markdown, plain, table
from tools.site.papers import first_arxiv
from tools.site.templates import render

from kedge.cli.kinds import BY_WORD
from kedge.core.method import FedAvg, Method
from kedge.core.part import Part
from kedge.errors import IncompatibleError
from kedge.grammar import write_value
from kedge.report.mathtext import title

SIDES = {
    "both": ("The base", "What every method does"),
    "client": ("On the client", "Change the loss, the gradient or the steps of local training"),
    "server": ("On the server", "Change how updates are combined, or what follows"),
    "data": ("On the data", "Change the batches that clients train on"),
    "personal": ("Personal models", "Give each client a model of its own"),
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
        fields=fields_table(schema) if schema.options else "",
        presets=_presets(schema),
        traffic=facts["traffic"],
        batch=BATCH,
        cost=_cost(cls, facts["traffic"]),
        compute=cls.compute or ("nothing" if part is None else "next to nothing"),
        timings=_timings(name),
        leaves=_leaves(cls, told),
        uploads=_uploads(facts["uploads"]["rows"]),
        uploads_model=facts["uploads"]["model"],
        clients=CLIENTS,
        neutral=_neutral(cls, told),
        identities_text=_identities_text(facts["identities"]),
        identities=_identities(facts["identities"]),
        explanations=_explanations(facts["identities"]),
        objective=_objective(cls, facts["identities"]),
        deviations=_capital(told.deviations),
        results=_results(name),
        command=command(name),
        combined=_combined(name, cls),
        refuses=", ".join(f"[`{n}`]({n}.md)" for n in _refuses(cls)),
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def fields_table(schema: Any) -> str:
    """The fields or options of an entry."""
    rows = schema.rows()
    ranges = any(row.range for row in rows)
    heads = [schema.noun, "type", "default", *(["range"] if ranges else []), "meaning"]
    cells = [
        [code(row.name), plain(row.type), code(row.default) if row.default else "must be given"]
        + ([plain(row.range).replace(" ", "&nbsp;")] if ranges else [])
        + [plain(row.doc)]
        for row in rows
    ]
    return boxed("fields", table(heads, cells))


def _presets(schema: Any) -> str:
    if not schema.presets:
        return ""
    rows = []
    for preset, values in schema.presets.items():
        settings = ", ".join(f"{k}={write_value(v)}" for k, v in values.items())
        same = "the defaults" if schema.is_default(values) else ""
        rows.append([code(f"{schema.name}:{preset}"), code(settings), same])
    some = any(row[2] for row in rows)
    return table(["preset", "sets", *(["same as"] if some else [])],
                 [row if some else row[:2] for row in rows])  # fmt: skip


def _cost(cls: type[Part], traffic: dict[str, Any]) -> str:
    base = traffic["P"] + traffic["B"]
    rows = []
    for what, field, own in (
        ("down", "sends", base), ("up", "uploads", base), ("keeps", "keeps", 0)
    ):  # fmt: skip
        numbers = traffic[field]
        declared = getattr(cls, field)
        extra = "nothing" if declared == "0" else code(declared)
        rows.append([what, extra, _mb(numbers, sign=own > 0), _mb(own + numbers)])
    heads = ["per client and round", "numbers beyond FedAvg's", "in MB", "in all, in MB"]
    return table(heads, rows, "llrr")


def _mb(numbers: int, sign: bool = False) -> str:
    size = numbers * BYTES / 1e6
    digits = 1 if abs(size) >= 1 or not size else 3 if abs(size) >= 0.001 else 6
    return f"{size:+.{digits}f}" if sign and size else f"{size:.{digits}f}" if size else "0"


def _timings(name: str) -> str:
    rows = [
        [code(t.method), plain(t.workload), f"{t.ratio:.2f}x", t.n, t.device, code(t.source)]
        for t in measured.timings_of(name)
    ]
    if not rows:
        return ""
    return table(["method", "workload", "over FedAvg", "n", "device", "record in bench"],
                 rows, "llrrll")  # fmt: skip


def _leaves(cls: type[Part], told: Described) -> str:
    said = [told.labelled.get(label, "") for label in ("Uploads", "Sends, uploads", "Sends / uploads")]
    words = next((text for text in said if text), "")
    declared = "nothing beyond its update" if cls.uploads == "0" else f"{code(cls.uploads)} numbers beyond FedAvg's"
    if cls is FedAvg:
        declared = "its update, the difference between its local model and the global one"
    text = f"Declared per round: {declared}." + (f" In words: {words}" if words else "")
    if cls.needs_clients:
        return f"{text} The server must see single clients, so secure aggregation does not fit."
    return f"{text} The server needs sums over clients only, so secure aggregation fits."


def _uploads(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Nothing leaves the client."
    cells = [
        [r["part"], plain(r["name"]), r["shape"], f"{r['numbers']:,}", r["when"], r["seen"]]
        for r in rows
    ]
    heads = ["of", "message", "shape", "numbers", "when", "what the server sees"]
    return table(heads, cells, "lllrll")


def _neutral(cls: type[Part], told: Described) -> str:
    words = told.labelled.get("Neutral at", "")
    if cls is FedAvg:
        return "FedAvg is the method without parts: it is neutral itself."
    if cls.neutral is None:
        tail = f" In words: {words}" if words else ""
        return f"No setting gives FedAvg back bit for bit.{tail}"
    setting = ", ".join(f"{k}={write_value(v)}" for k, v in cls.neutral.items())
    if not setting:
        return "Always: the global model is FedAvg's, bit for bit."
    return f"With {code(f'{cls.name}({setting})')} the run equals FedAvg bit for bit (law *neutral*)."


def _identities_text(rows: list[dict[str, Any]]) -> str:
    held = sum(bool(row["ok"]) for row in rows)
    return (
        f"Values worked out from the paper, without kedge's code, and what kedge computes: {held} of "
        f"{len(rows)} agree on both engines. Computed when this page was built; "
        "`kedge conformance` prints the same."
    )


def _identities(rows: list[dict[str, Any]]) -> str:
    cells = []
    for i, row in enumerate(rows):
        new = i == 0 or rows[i - 1]["oracle"] != row["oracle"]
        marks = {True: "agrees", False: "**differs**", None: plain(row["note"])}
        numbers = [_number(row["expected"]), _number(row["got"])]
        cells.append([plain(row["oracle"]) if new else "", plain(row["what"]), *numbers, marks[row["ok"]]])
    return boxed("identities", table(["identity", "of", "expected", "found", ""], cells, "llrrl"))


def _explanations(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each oracle and how it finds its values."""
    found = {row["oracle"]: row["doc"] for row in rows if row["doc"]}
    return [(plain(oracle), markdown(doc).replace("*", r"\*")) for oracle, doc in found.items()]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _objective(cls: type[Part], rows: list[dict[str, Any]]) -> str:
    if cls is not FedAvg and cls.solves is None:
        return "no claim: local steps bias the fixed point, as in FedAvg"
    found = rows[0]["objective"] if rows else ""
    if cls is FedAvg:
        return f"with several local steps the fixed point minimises no weighted mean of the losses ({found} on two quadratic clients)"
    where = " in the head" if cls.solves_for == "head" else ""
    return f"the fixed point minimises the run's weighted objective{where} (law *objective*; {found} on two quadratic clients of 1 and 3 samples)"


def _results(name: str) -> str:
    rows = [
        [code(r.table), plain(r.place), r.scale, code(r.method), r.paper, r.ours, r.gain, r.verdict,
         r.n, r.rounds, r.devices]
        for r in measured.results_of(name)
    ]  # fmt: skip
    heads = ["table", "setting", "scale", "method", "paper", "ours", "gain", "verdict", "n",
             "rounds", "device"]  # fmt: skip
    return boxed("measured", table(heads, rows, "llllrrrlrrl") if rows else "")


def command(name: str) -> str:
    """A command that runs the method on built-in data in seconds."""
    cls = entries()[name]
    stages = [1] if cls is FedAvg else [1, *map(_stage, cls().cuts())]
    options = [f"hidden=[{','.join(['64'] * max(stages))}]"] if max(stages) > 1 else []
    options += ["norm=bn"] if cls.needs_batchnorm else []
    model = f' --model "mlp({", ".join(options)})"' if options else ""
    return f"kedge run --method {name}{model} --rounds 3 --clients 5 --seeds 0"


def _stage(cut: str) -> int:
    """The stage after which a cut is; 1 for a cut of another name."""
    number = cut.removeprefix("stage")
    return int(number) if number.isdigit() else 1


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
    paper = first_arxiv(cls.__doc__ or "")
    return {
        "name": name, "what": cell(markdown(title(cls))), "down": _short(name, cls.sends),
        "up": _short(name, cls.uploads), "keeps": _short(name, cls.keeps), "sums": "no" if cls.needs_clients else "yes", "paper": paper,
    }  # fmt: skip


def _short(name: str, formula: str) -> str:
    """A formula; a long one is on the page of the method."""
    if len(formula) <= MAX_FORMULA_LENGTH:
        return code(formula)
    return f"[a longer formula]({name}.md#cost)"

