"""All rounds as one table: ``RUN/log-csv/metrics.csv``, a row per seed and round."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from kedge.csv_text import csv_lines, unquoted
from kedge.files import append_file, read_file, write_file
from kedge.loggers.protocol import numbers, own_folder
from kedge.runs.result import Result
from kedge.settings import Config

FILE = "metrics.csv"
KEYS = ("seed", "round")


class CSV:
    """Appends a line per round. The file is written anew when a column appears."""

    def __init__(self) -> None:
        self.columns: list[str] = list(KEYS)
        self.rows: list[dict[str, Any]] = []

    def start(self, config: Config, folder: Path | None) -> None:
        """Read what is there; a line that was cut is dropped."""
        self.path = own_folder(folder, "csv") / FILE
        if self.path.exists():
            text = read_file(self.path).decode()
            reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
            self.columns = reader.fieldnames = [*map(unquoted, reader.fieldnames or KEYS)]
            self.rows = [row for row in reader if None not in row.values() and row["round"]]
        self._rewrite()

    def logged(self, seed: int) -> int:
        """The last round of a seed."""
        return max((int(r["round"]) for r in self.rows if int(r["seed"]) == seed), default=0)

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Append a line."""
        row = {"seed": seed, "round": record["round"]} | numbers(record)
        self.rows.append(row)
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self._rewrite()
            return
        append_file(self.path, self._text([row]), inside=self.path.parents[1])

    def end(self, result: Result | None) -> None:
        """All rounds are in the file already."""

    def _rewrite(self) -> None:
        content = self._text([dict(zip(self.columns, self.columns, strict=True)), *self.rows])
        write_file(self.path, content.encode(), inside=self.path.parents[1])

    def _text(self, rows: list[dict[str, Any]]) -> str:
        return "".join(csv_lines([row.get(name, "") for name in self.columns] for row in rows))
