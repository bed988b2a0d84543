"""A table at one scale, and its rows: what a recipe says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.engines import Execution
from kedge.errors import KedgeError, UnknownName
from kedge.history.find import EXECUTION
from kedge.settings import Config, load_config

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
