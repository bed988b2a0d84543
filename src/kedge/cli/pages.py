"""The pages of ``kedge list`` and ``kedge show``, the same for all kinds of entries."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.cli.display import DATA_HINT, data_table
from kedge.cli.kinds import BY_WORD, KINDS, Kind, find
from kedge.core.method import FedAvg
from kedge.core.part import Part
from kedge.data.datasets.known import KnownDataset as Known
from kedge.data.datasets.load import EXAMPLES, FORMATS
from kedge.data.partition.grammar import aliases
from kedge.errors import KedgeError, UnknownName, nearest
from kedge.grammar import write_value
from kedge.loading import files
from kedge.report.mathtext import plain_doc, title
from kedge.schema import Schema

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
    table = _table("name", "kind", "what it is")
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
    table = _table("part", "side", "what it does")
    entries = KINDS[0].entries()
    for name in names:
        table.add_row(name, entries[name].side, Text(title(entries[name])))
    return table


def _options_table(kind: Kind, names: list[str], heading: str) -> Table:
    if kind.name == "metric":  # metrics have no options
        table = _table(heading, "what it is")
        for name in names:
            table.add_row(name, Text(title(kind.entries()[name])))
        return table
    table = _table(heading, "options", "what it is")
    for name in names:
        what = Text(title(kind.entries()[name]))
        table.add_row(name, Text(_options(kind.schema(name))), what)
    return table


def _options(schema: Schema) -> str:
    return schema.signature().removeprefix(schema.name).strip("()")


def _with_hint(table: RenderableType, kind: Kind) -> RenderableType:
    hint = _HINTS.get(kind.name, "Options, ranges and papers of one: kedge show NAME")
    return Group(table, Text(f"\n{hint}", style="dim"))


# -- pages -------------------------------------------------------------------------------------


def show_page(text: str) -> RenderableType:
    """All about one entry: what it does, its paper, its options and how to use it.

    Raises:
        KedgeError: no entry, or several, have that name; see :func:`kedge.cli.kinds.find`.
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
    facts = _table(show_header=False)
    for key, value in _facts(kind, name, thing, schema).items():
        facts.add_row(Text(key, style="bold"), Text(value))
    return Group(*pieces, Padding(facts, (0, 0, 0, 2)))


def _schema_table(schema: Schema) -> Table:
    rows = schema.rows()
    ranges = any(row.range for row in rows)
    columns = [schema.noun, "type", "default", *(["range"] if ranges else []), "meaning"]
    table = _table(*columns)
    for row in rows:
        default = row.default or "must be given"
        cells = [row.name, row.type, default, *([row.range] if ranges else []), row.doc]
        table.add_row(*map(Text, cells))
    return table


def _examples_table(examples: tuple[tuple[str, str], ...]) -> Table:
    table = _table("example", "what it does")
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


def _table(*columns: str, show_header: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=show_header)
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0)
    return table
