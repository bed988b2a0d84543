"""All rounds as one table: ``RUN/log-csv/metrics.csv``, a row per seed and round."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import IO, Any

from kedge.loggers.protocol import numbers, own_folder
from kedge.runs.config import Config
from kedge.runs.result import Result

FILE = "metrics.csv"
KEYS = ("seed", "round")


class CSV:
    """Appends a line per round. The file is written anew when a column appears."""

    def __init__(self) -> None:
        self.columns: list[str] = list(KEYS)
        self.rows: list[dict[str, Any]] = []
        self._file: IO[str] | None = None

    def start(self, config: Config, folder: Path | None) -> None:
        """Read what is there; a line that was cut is dropped."""
        self.path = own_folder(folder, "csv") / FILE
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8")
            reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
            self.columns = list(reader.fieldnames or KEYS)
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
        assert self._file is not None
        self._writer(self._file).writerow(row)
        self._file.flush()

    def end(self, result: Result | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _writer(self, file: IO[str]) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self.columns, restval="", lineterminator="\n")

    def _rewrite(self) -> None:
        self.end(None)
        temporary = self.path.with_name(f".{FILE}.part")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(self.rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="")
