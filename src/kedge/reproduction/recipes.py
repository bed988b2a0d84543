"""Recipes: one folder per table of a paper, with one TOML file per row.

``table.toml`` has what all rows share::

    # kedge reproduce fedimpro/table1
    title = "FedImpro, PaperTable 1"
    paper = "Tang et al., FedImpro, ICLR 2024"
    place = "CIFAR-10, alpha 0.1, E = 1, M = 10"
    metric = "best"                # how the paper takes its number: last, best or top5
    tail = 10                      # tests that the mean of the last tests takes
    base = "fedavg"                # the row that gains are taken against
    rows = ["fedavg", "fedimpro"]  # their order; other files follow by name
    seeds = [0]                    # of rows that name none
    lanes = false                  # train the seeds of a row together
    judged = "global"              # or "clients": each client's model on its held-out samples
    cost_on = "H200"               # the device of cost_s in the files of rows
    [settings]                     # of every run, written out in full
    [run]                          # on a GPU: engine, streams, compile, chunk, state
    [choose]                       # e.g. lr = [0.01, 0.1]: try each first; rounds, validation, seed
    [quick]                        # settings of --scale quick; rows, seeds, expect, note

``ROW.toml`` has ``method``, and may have ``paper``, ``paper_sd``, ``base``, ``seeds``, ``cost_s``
(seconds of one seed), ``cost_from`` (where that was measured; without it, it is an estimate),
``note``, ``yardstick`` (train on pooled data), ``[settings]`` and ``[quick]``. A row with
``same_as = "PAPER/TABLE/ROW"`` in place of ``method`` is that row, and shares its records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.engines import Execution
from kedge.errors import FieldError, KedgeError, UnknownName
from kedge.files import read_toml
from kedge.history.experiment import SCALES
from kedge.history.find import EXECUTION
from kedge.settings import FIELDS, Config, load_config

RECIPES = Path(__file__).parents[1] / "recipes"
TABLE_FILE = "table.toml"
METRICS = ("last", "best", "top5")
_TABLE = {
    "title": str, "paper": str, "place": str, "metric": str, "tail": int, "base": str,
    "rows": list, "seeds": list, "lanes": bool, "judged": str, "cost_on": str, "note": str,
    "settings": dict, "run": dict, "choose": dict, "quick": dict,
}  # fmt: skip
_ROW = {
    "method": str, "same_as": str, "base": str, "seeds": list, "paper": float, "paper_sd": float,
    "cost_s": float, "cost_from": str, "note": str, "yardstick": str, "settings": dict,
    "quick": dict,
}  # fmt: skip
_RUN = {"engine": str, "streams": int, "compile": bool, "chunk": int, "state": str}
_CHOOSE = {"rounds": int, "validation": float, "seed": int}
_QUICK_TABLE = {
    "rows": list, "seeds": list, "expect": list, "note": str, "metric": str, "tail": int,
    "lanes": bool,
}  # fmt: skip
_COPIED = ("title", "paper", "place", "metric", "tail", "lanes", "judged", "cost_on")
_QUICK_ROW = {"method": str, "seeds": list, "base": str}
#: Settings in which a record may differ from its recipe: it may have fewer rounds or tests.
FREE = (*EXECUTION, "seeds", "rounds", "eval_every", "target", "personal")
#: The device on which tables of papers are run.
GPU = "H200"


@dataclass(frozen=True)
class Choose:
    """Values of a setting, of which a row takes the best one on validation data."""

    key: str
    values: tuple[Any, ...]
    rounds: int
    validation: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class PaperRow:
    """One row of a table at one scale."""

    name: str
    method: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    base: str
    file: Path
    home: tuple[str, str]  # table and row whose records these are
    paper: float | None = None
    paper_sd: float | None = None
    cost_s: float | None = None
    cost_from: str = ""
    note: str = ""
    yardstick: str = ""

    def config(self, seed: int = 0, **changes: Any) -> Config:
        """The settings of a run.

        Raises:
            KedgeError: the file has a setting that is unknown or wrong.
        """
        values = dict(self.settings) | {"method": self.method, "seeds": [seed]} | changes
        try:
            return load_config(flags=values)
        except KedgeError as error:
            raise KedgeError(f"{self.file}: {error}") from None


@dataclass(frozen=True)
class PaperTable:
    """A table at one scale."""

    name: str
    title: str
    scale: str
    rows: tuple[PaperRow, ...]
    paper: str = ""
    place: str = ""
    metric: str = "last"
    tail: int = 5
    lanes: bool = False
    judged: str = "global"
    note: str = ""
    expect: tuple[str, ...] = ()  # rows whose gain must be positive
    execution: Execution | None = None  # on a GPU
    choose: Choose | None = None
    cost_on: str = GPU  # the device that costs of rows are of

    @property
    def free(self) -> tuple[str, ...]:
        """The setting that is chosen, in which records differ from the recipe."""
        return (self.choose.key,) if self.choose else ()

    def row(self, name: str) -> PaperRow:
        return self.select([name])[0]

    def select(self, names: Sequence[str]) -> list[PaperRow]:
        """Rows by name, in the order of the table.

        Raises:
            UnknownName: there is no such row.
        """
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise UnknownName(f"row of {self.name}", name, known)
        return [row for row in self.rows if row.name in names]


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of a configuration that a record has: what is computed, not how."""
    values = dataclasses.asdict(config)
    return {k: v for k, v in values.items() if k not in (*EXECUTION, "seeds", "method")}


@dataclass(frozen=True)
class Recipe:
    """The files of a table, read but for the settings of its rows."""

    name: str
    folder: Path
    data: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def has_quick(self) -> bool:
        return "quick" in self.data

    def at(self, scale: str) -> PaperTable:
        """The table at a scale.

        Raises:
            FieldError: there is no such scale, or the table has no quick form.
        """
        if scale not in SCALES:
            raise FieldError(f"there is no scale {scale!r}; write --scale quick or --scale full")
        quick = self.data.get("quick", {}) if scale == "quick" else {}
        if scale == "quick" and not self.has_quick:
            raise FieldError(
                f"{self.name} has no quick form; run it with --scale full, or see kedge reproduce "
                "for tables that have one"
            )
        data = self.data
        tables = [data["settings"], {k: v for k, v in quick.items() if k not in _QUICK_TABLE}]
        names = [name for name in quick.get("rows", self.rows) if name in self.rows]
        own = _some(data, _COPIED) | _some(quick, ("metric", "tail", "lanes"))
        if scale == "full":
            own |= {"note": data.get("note", ""), "choose": self._choose()}
            own["execution"] = Execution(**data["run"]) if "run" in data else None
        return PaperTable(
            name=self.name,
            scale=scale,
            rows=tuple(self._row(name, scale, tables, quick) for name in names),
            **{"note": quick.get("note", ""), "expect": tuple(quick.get("expect", ()))} | own,
        )

    def _row(
        self, name: str, scale: str, tables: Iterable[Mapping[str, Any]], quick: Mapping[str, Any]
    ) -> PaperRow:
        data, own = self.rows[name], dict[str, Any]()
        if "same_as" in data:
            return self._shared(name, data, scale)
        if scale == "quick":
            own = data.get("quick", {})
        settings: dict[str, Any] = {}
        base, changed = tables
        for part in (base, data.get("settings", {}), changed, own):
            settings |= {k: v for k, v in part.items() if k not in _QUICK_ROW}
        given = (own.get("seeds"), quick.get("seeds"), data.get("seeds"), self.data.get("seeds"))
        seeds = next((s for s in given if s is not None), [0])
        return PaperRow(
            name=name,
            method=own.get("method", data["method"]),
            settings=settings,
            seeds=tuple(seeds),
            base=own.get("base", data.get("base", self.data.get("base", ""))),
            file=self.folder / f"{name}.toml",
            home=(self.name, name),
            cost_s=data.get("cost_s") if scale == "full" else None,
            **_some(data, ("paper", "paper_sd", "cost_from", "note", "yardstick")),
        )

    def _shared(self, name: str, data: Mapping[str, Any], scale: str) -> PaperRow:
        """A row that is one of another table, with its records."""
        other, _, row = data["same_as"].rpartition("/")
        root = self.folder.parents[1]
        if other == self.name or not (root / other / TABLE_FILE).is_file():
            wrong = f"same_as = {data['same_as']!r} is no row of another table"
            raise FieldError(f"{self.folder / name}.toml: {wrong}; write PAPER/TABLE/ROW")
        found = read(other, root).at(scale).row(row)
        own = _some(data, ("paper", "paper_sd", "note"))
        seeds = tuple(data.get("seeds", found.seeds))
        base = data.get("base", self.data.get("base", ""))
        return dataclasses.replace(found, name=name, base=base, seeds=seeds, **own)

    def _choose(self) -> Choose | None:
        given = dict(self.data.get("choose", {}))
        if not given:
            return None
        extra = {key: given.pop(key) for key in _CHOOSE if key in given}
        [(key, values)] = given.items()
        return Choose(key, tuple(values), **({"rounds": self.data["settings"]["rounds"]} | extra))


def _some(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def all_names(root: Path | None = None) -> list[str]:
    """The names of all tables: ``fedimpro/table1``."""
    root = root or RECIPES
    files = root.glob(f"*/*/{TABLE_FILE}")
    return sorted(path.parent.relative_to(root).as_posix() for path in files)


def find(words: Sequence[str], root: Path | None = None) -> list[str]:
    """Names of tables, from names of tables, of papers, and ``all``.

    Raises:
        UnknownName: there is no such table or paper.
        KedgeError: the folder has no recipes.

    >>> find(["fedimpro/table1"])
    ['fedimpro/table1']
    """
    known = all_names(root)
    if not known:
        raise KedgeError(f"{root} has no recipes; a table is a folder PAPER/TABLE/{TABLE_FILE}")
    papers = list(dict.fromkeys(name.split("/")[0] for name in known))
    found: list[str] = []
    for word in words:
        name = word.strip("/")
        if name == "all":
            found += known
        elif name in papers:
            found += [n for n in known if n.split("/")[0] == name]
        elif name in known:
            found.append(name)
        else:
            raise UnknownName("table or paper", word, [*known, *papers], see="kedge reproduce")
    return list(dict.fromkeys(found))


def read(name: str, root: Path | None = None) -> Recipe:
    """Read the recipe of a table.

    Raises:
        FieldError: a file cannot be read, or has an unknown key or a value of a wrong type.
    """
    folder = (root or RECIPES) / name
    data = _checked(folder / TABLE_FILE, _TABLE, ("title", "settings"))
    files = {p.stem: p for p in sorted(folder.glob("*.toml")) if p.name != TABLE_FILE}
    order = data.get("rows", [])
    file = folder / TABLE_FILE
    for row in order:
        if row not in files:
            raise FieldError(f"{file}: rows names {row!r}, but there is no file {row}.toml")
    names = [*order, *(n for n in files if n not in order)]
    for row in names:
        if not re.fullmatch(r"[\w-]+", row):
            raise FieldError(f"{files[row]}: name it by letters, digits, '-' and '_' only")
    rows = {row: _checked(files[row], _ROW, ()) for row in names}
    for row, values in rows.items():
        if ("method" in values) == ("same_as" in values):
            raise FieldError(f"{files[row]} needs either method or same_as")
    _check_table(file, data, rows)
    return Recipe(name, folder, data, rows)


def _check_table(file: Path, data: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    if not rows:
        raise FieldError(f"{file}: the table has no rows; write a file ROW.toml beside it")
    quick = data.get("quick", {})
    _check_keys(file, data.get("run", {}), _RUN, "run")
    _check_keys(file, {k: v for k, v in quick.items() if k in _QUICK_TABLE}, _QUICK_TABLE, "quick")
    for metric in (data.get("metric", "last"), quick.get("metric", "last")):
        if metric not in METRICS:
            raise FieldError(f"{file}: metric = {metric!r} is none of {', '.join(METRICS)}")
    if min(data.get("tail", 1), quick.get("tail", 1)) < 1:
        raise FieldError(f"{file}: tail must be at least 1")
    if data.get("judged", "global") not in ("global", "clients"):
        raise FieldError(f"{file}: judged = {data['judged']!r} is neither global nor clients")
    bases = [data.get("base"), *(row.get("base") for row in rows.values())]
    for name in (*bases, *quick.get("rows", ()), *quick.get("expect", ())):
        if name is not None and name not in rows:
            raise UnknownName(f"row in {file}", name, rows)
    choose = data.get("choose", {})
    keys = [key for key in choose if key not in _CHOOSE]
    if choose and (
        len(keys) != 1 or keys[0] not in FIELDS or not isinstance(choose[keys[0]], list)
    ):
        raise FieldError(f"{file}: [choose] needs one setting with a list, e.g. lr = [0.01, 0.1]")


def _checked(path: Path, types: Mapping[str, type], needed: Sequence[str]) -> dict[str, Any]:
    try:
        data, _ = read_toml(path)
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise FieldError(f"{path} is not valid TOML: {error}") from None
    _check_keys(path, data, types, "")
    if missing := [key for key in needed if key not in data]:
        raise FieldError(f"{path} lacks {', '.join(missing)}")
    return data


def _check_keys(path: Path, data: Mapping[str, Any], types: Mapping[str, type], of: str) -> None:
    where = f"key in {path}" + (f", [{of}]" if of else "")
    for key, value in data.items():
        if key not in types:
            raise UnknownName(where, key, types)
        kind = (int, float) if types[key] is float else types[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and types[key] is not bool):
            raise FieldError(f"{path}: {key} = {value!r} should be of type {types[key].__name__}")
