"""What the terminal shows of parts: their docstrings in plain characters, tables of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.check import Report
from kedge.check.conformance import Row
from kedge.core.part import field_help, parts
from kedge.core.task import tasks
from kedge.data.datasets import Dataset, available
from kedge.data.partition import Partition, partitions, shifts
from kedge.grammar import write_value
from kedge.models import models, options

_GREEK = (
    "alpha beta gamma delta epsilon eta theta lambda mu nu pi rho sigma tau phi psi omega Delta"
)
_SYMBOLS = dict(zip(_GREEK.split(), "αβγδεηθλμνπρστφψωΔ", strict=True)) | {
    "leftarrow": "←", "in": "∈", "sum": "Σ", "nabla": "∇", "min": "min", "sim": "~", "log": "log",
    "langle": "⟨", "rangle": "⟩", "|": "‖", "cdot": "·", "sqrt": "√", "ell": "ℓ", "max": "max",
    "neq": "≠", "Sigma": "Σ", "big": "", "Big": "", "left": "", "right": "", ",": " ", "quad": "  ",
    "leq": "≤", "geq": "≥", "times": "×", "log2": "log2", "frac": "",
}  # fmt: skip
_ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "bar": "\u0304"}  # combine with the letter before
_SMALL = str.maketrans("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_RAISED = str.maketrans("0123456789+-=()tkKTin", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵗᵏᴷᵀⁱⁿ")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"


def plain_math(tex: str) -> str:
    r"""LaTeX in characters a terminal can show.

    >>> plain_math(r"\frac{\mu}{2}\|w - w^t\|^2")
    '(μ/2)‖w - wᵗ‖²'
    """
    while (at := tex.rfind(r"\frac")) >= 0:  # the last one holds no other
        tex = _fraction(tex, at)
    tex = re.sub(r"\\(hat|tilde|bar) ?\{?(\w)\}?", lambda m: m[2] + _ACCENTS[m[1]], tex)
    tex = re.sub(r"\\([A-Za-z]+|[|,])", lambda m: _SYMBOLS.get(m[1], m[1]), tex)
    tex = re.sub(r"_(?:" + _GROUP + r"|(\S))", lambda m: _script(m, _SMALL, "_"), tex)
    tex = re.sub(r"\^(?:" + _GROUP + r"|(\S))", lambda m: _script(m, _RAISED, "^"), tex)
    return re.sub(r"[ ]+", " ", tex.replace("{", "").replace("}", "")).strip()


def _fraction(tex: str, at: int) -> str:
    """Write the fraction that starts at ``at`` with a slash."""
    top, middle = _argument(tex, at + len(r"\frac"))
    bottom, end = _argument(tex, middle)
    inner = (f"({s})" if re.search(r"[ +]|(?<!^)-", s.strip()) else s for s in (top, bottom))
    return tex[:at] + "(" + "/".join(inner) + ")" + tex[end:]


def _argument(tex: str, at: int) -> tuple[str, int]:
    """A braced argument (or a single character) and where it ends."""
    if tex[at] != "{":
        return tex[at], at + 1
    depth = 0
    for i in range(at, len(tex)):
        depth += {"{": 1, "}": -1}.get(tex[i], 0)
        if not depth:
            return tex[at + 1 : i], i + 1
    raise ValueError(f"a brace is not closed in {tex!r}")


def _script(m: re.Match[str], table: dict[int, int], sign: str) -> str:
    text = m[1] if m[1] is not None else m[2]
    if all(ord(c) in table for c in text):
        return text.translate(table)
    return f"{sign}{text}" if len(text) == 1 else f"{sign}({text})"


def plain_doc(doc: str) -> str:
    """A docstring without its markup."""
    doc = re.sub(r":math:`([^`]*)`", lambda m: plain_math(m[1].replace("\n", " ")), doc)
    paragraphs = doc.replace("``", "").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)


def title(thing: Callable[..., object]) -> str:
    """First line of a docstring."""
    first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
    return plain_doc(first).rstrip(".")


def methods_table(pattern: str = "*") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("part", "side", "what it does"):
        table.add_column(column, no_wrap=column != "what it does")
    for name in parts.match(pattern):
        table.add_row(name, parts[name].side, Text(title(parts[name])))
    return table


def methods_markdown() -> str:
    """The table of all parts for the README."""
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


METHODS_HINT = (
    "\nA method is a sum: scaffold+fedprox(mu=0.1). fedavg is the method without parts.\n"
    "Equation, paper, fields, presets and traffic of one: kedge show NAME"
)
DATA_HINT = (
    "\nAny path works, too: an .npz or .csv file, a folder of images (class/name.png), or a folder "
    "with one\nsuch file or folder per client (silos). Names are looked for in $KEDGE_DATA, then "
    "in the user's cache."
)


def models_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("model", "options", "what it is"):
        table.add_column(column, no_wrap=column == "model")
    for name in models:
        table.add_row(name, ", ".join(options(name)), title(models[name]))
    return table


def partitions_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("partition", "options", "what it does"):
        table.add_column(column, no_wrap=column == "partition")
    for registry, sign in ((partitions, ""), (shifts, "+")):
        for name in registry:
            function = registry[name]
            table.add_row(sign + name, _signature(function), title(function))
    return table


def data_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("dataset", "kind", "shape", "samples", "where"):
        table.add_column(column, no_wrap=column == "dataset")
    for entry in available():
        shape = "x".join(map(str, entry.shape)) if entry.shape else ""
        sizes = ", ".join(f"{n} {split}" for split, n in entry.sizes.items())
        style = "" if entry.kind else "dim"
        table.add_row(entry.name, entry.kind, shape, sizes, entry.where or entry.note, style=style)
    return table


def partition_table(drawn: Partition, dataset: Dataset) -> Table:
    """Clients and their classes, as a table for the terminal."""
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
            table.add_column(label[:8], justify="right")
    for k in range(min(len(sizes), 40)):
        row = [dataset.group_names[k] if dataset.group_names else str(k), str(sizes[k])]
        row += [str(n) if n else "·" for n in counts[k][:12]] if counts is not None else []
        table.add_row(*row)
    return table


def _signature(function: Callable[..., object]) -> str:
    known = inspect.signature(function).parameters.values()
    own = [p for p in known if p.kind is p.KEYWORD_ONLY and p.name != "groups"]
    return ", ".join(f"{p.name}={write_value(p.default)}" for p in own)


def part_page(name: str) -> RenderableType:
    """Everything about a part: equation, reference, fields, presets, what it sends and keeps."""
    cls = parts[name]
    doc = plain_doc(inspect.getdoc(cls) or "")
    facts = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    facts.add_column(style="bold")
    secure = "no: the server must see single clients" if cls.needs_clients else "yes: only sums"
    for row in (
        ("acts on", f"{cls.side} side"),
        ("hooks", ", ".join(cls().hooks())),
        ("extra down", _numbers(cls.sends)),
        ("extra up", _numbers(cls.uploads)),
        ("client keeps", _numbers(cls.keeps)),
        ("extra compute", cls.compute or "next to nothing"),
        ("tasks", ", ".join(cls.tasks)),
        ("neutral at", _neutral(cls.neutral)),
        ("secure sums", secure),
        ("source", f"{cls.__module__}.{cls.__qualname__}"),
    ):
        facts.add_row(row[0], Text(row[1]))
    pieces: list[RenderableType] = [
        Text(cls.__name__, style="bold"),
        Padding(Text(doc), (0, 0, 1, 2)),
    ]
    rows = field_help(cls)
    if rows:
        fields = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("field", "type", "default", "meaning"):
            fields.add_column(column)
        for field, kind, default, text in rows:
            fields.add_row(field, Text(kind), Text(write_value(default)), Text(text))
        pieces.append(Padding(fields, (0, 0, 1, 2)))
    for preset, values in cls.presets.items():
        pieces.append(Text(f"  {name}:{preset}  =  {name}({_settings(values)})"))
    if cls.presets:
        pieces.append(Text())
    return Group(*pieces, Padding(facts, (0, 0, 0, 2)))


def check_table(report: Report) -> Table:
    """What a check found, line by line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for column in (report.part, "", "detail"):
        table.add_column(column)
    marks = {True: Text("ok", "green"), False: Text("FAILS", "bold red"), None: Text("-", "dim")}
    for found in report.findings:
        table.add_row(Text(f"{found.kind} {found.name}"), marks[found.holds], Text(found.detail))
    return table


def _numbers(formula: str) -> str:
    return "nothing" if formula == "0" else f"{formula} numbers"


def _neutral(setting: dict[str, object] | None) -> str:
    if setting is None:
        return "no setting gives FedAvg back"
    return _settings(setting) or "always: the global model is FedAvg's"


def _settings(values: dict[str, object]) -> str:
    return ", ".join(f"{k}={write_value(v)}" for k, v in values.items())


def conformance_table(rows: Iterable[Row]) -> Table:
    """What oracles expect and what was found."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("method", "oracle", "expected", "got", "ok"):
        number = column in ("expected", "got")
        table.add_column(
            column,
            no_wrap=column in ("method", "expected", "ok"),
            justify="right" if number else "left",
        )
    marks = {True: Text("ok", "green"), False: Text("FAILS", "bold red"), None: Text("-", "dim")}
    for row in rows:
        expected = "" if row.expected is None else f"{row.expected:.6g}"
        got = row.note if row.got is None else f"{row.got:.6g}"
        table.add_row(row.method, Text(row.oracle), expected, Text(got), marks[row.ok])
    return table
