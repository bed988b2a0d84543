"""Tables and sentences of the page of a method."""

from __future__ import annotations

from typing import Any

from tools.site import measured
from tools.site.computed import BYTES
from tools.site.described import Described
from tools.site.markdown import boxed, code, markdown, plain, table

from kedge.core.method import FedAvg
from kedge.core.part import Part
from kedge.grammar import write_value


def capital(text: str) -> str:
    """A text whose first letter is a capital."""
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


def presets(schema: Any) -> str:
    """The named settings of a part."""
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


def cost(cls: type[Part], traffic: dict[str, Any]) -> str:
    """What a part sends and keeps beyond FedAvg, as formulas and in megabytes."""
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


def timings(name: str) -> str:
    """Measured times of rounds over FedAvg's."""
    rows = [
        [code(t.method), plain(t.workload), f"{t.ratio:.2f}x", t.n, t.device, code(t.source)]
        for t in measured.timings_of(name)
    ]
    if not rows:
        return ""
    return table(["method", "workload", "over FedAvg", "n", "device", "record in bench"],
                 rows, "llrrll")  # fmt: skip


def leaves(cls: type[Part], told: Described) -> str:
    """What leaves a client, in words."""
    said = [
        told.labelled.get(label, "") for label in ("Uploads", "Sends, uploads", "Sends / uploads")
    ]
    words = next((text for text in said if text), "")
    declared = (
        "nothing beyond its update"
        if cls.uploads == "0"
        else f"{code(cls.uploads)} numbers beyond FedAvg's"
    )
    if cls is FedAvg:
        declared = "its update, the difference between its local model and the global one"
    text = f"Declared per round: {declared}." + (f" In words: {words}" if words else "")
    if cls.needs_clients:
        return f"{text} The server must see single clients, so secure aggregation does not fit."
    return f"{text} The server needs sums over clients only, so secure aggregation fits."


def uploads(rows: list[dict[str, Any]]) -> str:
    """The messages of a client, as measured."""
    if not rows:
        return "Nothing leaves the client."
    cells = [
        [r["part"], plain(r["name"]), r["shape"], f"{r['numbers']:,}", r["when"], r["seen"]]
        for r in rows
    ]
    heads = ["of", "message", "shape", "numbers", "when", "what the server sees"]
    return table(heads, cells, "lllrll")


def neutral(cls: type[Part], told: Described) -> str:
    """The setting at which the part does nothing."""
    words = told.labelled.get("Neutral at", "")
    if cls is FedAvg:
        return "FedAvg is the method without parts: it is neutral itself."
    if cls.neutral is None:
        tail = f" In words: {words}" if words else ""
        return f"No setting gives FedAvg back bit for bit.{tail}"
    setting = ", ".join(f"{k}={write_value(v)}" for k, v in cls.neutral.items())
    if not setting:
        return "Always: the global model is FedAvg's, bit for bit."
    written = code(f"{cls.name}({setting})")
    return f"With {written} the run equals FedAvg bit for bit (law *neutral*)."


def identities_text(rows: list[dict[str, Any]]) -> str:
    """How many identities hold."""
    held = sum(bool(row["ok"]) for row in rows)
    return (
        "Values worked out from the paper, without kedge's code, and what kedge computes: "
        f"{held} of {len(rows)} agree on both engines. Computed when this page was built; "
        "`kedge check` prints the same."
    )


def identities(rows: list[dict[str, Any]]) -> str:
    """Every identity with what is expected and what was found."""
    cells = []
    for i, row in enumerate(rows):
        new = i == 0 or rows[i - 1]["oracle"] != row["oracle"]
        marks = {True: "agrees", False: "**differs**", None: plain(row["note"])}
        numbers = [_number(row["expected"]), _number(row["got"])]
        cells.append(
            [plain(row["oracle"]) if new else "", plain(row["what"]), *numbers, marks[row["ok"]]]
        )
    return boxed("identities", table(["identity", "of", "expected", "found", ""], cells, "llrrl"))


def explanations(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each oracle and how it finds its values."""
    found = {row["oracle"]: row["doc"] for row in rows if row["doc"]}
    return [(plain(oracle), markdown(doc).replace("*", r"\*")) for oracle, doc in found.items()]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def objective(cls: type[Part], rows: list[dict[str, Any]]) -> str:
    """Which problem the fixed point solves."""
    if cls is not FedAvg and cls.solves is None:
        return "no claim: local steps bias the fixed point, as in FedAvg"
    found = rows[0]["objective"] if rows else ""
    if cls is FedAvg:
        return (
            "with several local steps the fixed point minimises no weighted mean of the losses "
            f"({found} on two quadratic clients)"
        )
    where = " in the head" if cls.solves_for == "head" else ""
    return (
        f"the fixed point minimises the run's weighted objective{where} (law *objective*; {found} "
        "on two quadratic clients of 1 and 3 samples)"
    )


def results(name: str) -> str:
    """Rows of the papers' tables that were run."""
    rows = [
        [code(r.table), plain(r.place), r.scale, code(r.method), r.paper, r.ours, r.gain, r.verdict,
         r.n, r.rounds, r.devices]
        for r in measured.results_of(name)
    ]  # fmt: skip
    heads = ["table", "setting", "scale", "method", "paper", "ours", "gain", "verdict", "n",
             "rounds", "device"]  # fmt: skip
    return boxed("measured", table(heads, rows, "llllrrrlrrl") if rows else "")
