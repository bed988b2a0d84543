"""The folder of a comparison or a sweep: a list of the runs in its subfolders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedge.errors import DataError, KedgeError
from kedge.files import make_folder, remove_file
from kedge.runs.config import Config, ConfigError
from kedge.runs.environment import CONFIG, stored_config
from kedge.runs.folder import Folder
from kedge.runs.reading import load_config
from kedge.runs.saved import read_json

Row = dict[str, Any]


class Listing:
    """Reads and writes ``sweep.json`` or ``compare.json``: one row per run, with its folder.

    Args:
        root: the folder.
        name: the name of the file.
        kind: ``"sweep"`` or ``"comparison"``.
        renumber: gives another folder if another process claims ``root`` first.
    """

    def __init__(
        self, root: str | Path, name: str, kind: str, renumber: Callable[[], Path] | None = None
    ) -> None:
        self.root, self.name, self.kind, self.renumber = Path(root), name, kind, renumber
        self._created: list[Path] = []

    @property
    def path(self) -> Path:
        return self.root / self.name

    def read(self, types: dict[str, type]) -> list[Row]:
        """The rows; each has a ``folder`` and the keys of ``types``.

        Raises:
            KedgeError: the folder holds no such thing.
            DataError: the file is damaged.
        """
        if not self.path.is_file():
            raise KedgeError(
                f"{self.root} holds no {self.kind} to resume; leave out --resume to start one there"
            )
        advice = "restore it, or start again with another --out. The runs beside it are intact"
        rows = read_json(self.path, advice)
        types = {"folder": str} | types
        if not isinstance(rows, list) or not rows or not all(_has(row, types) for row in rows):
            raise DataError(f"{self.path} is damaged: it does not list runs; {advice}")
        for name in (row["folder"] for row in rows):
            if name == ".." or Path(name).name != name:
                raise DataError(f"{self.path} is damaged: {name!r} is outside of {self.root}")
        return rows

    def config(self, row: Row) -> Config:
        """The settings of a run; those in the list if it has not started."""
        settings = row.get("settings", {})
        try:
            path = self.root / row["folder"]
            if not (path / CONFIG).is_file():
                return load_config(flags=settings)
            stored = stored_config(path)
            return dataclasses.replace(stored, rounds=settings.get("rounds", stored.rounds))
        except ConfigError as error:
            raise KedgeError(f"{self.path}: {error}") from None

    def check_free(self) -> None:
        """Raise a KedgeError if the folder holds such a thing already."""
        if self.path.exists():
            raise KedgeError(
                f"{self.root} holds a {self.kind} already. Continue it with --resume, or choose "
                "another --out"
            )

    def write(self, rows: Sequence[Row], resume: bool) -> None:
        """Claim the folder, unless it is resumed, and write the rows."""
        while not resume:
            made = [p for p in (self.root, *self.root.parents) if not p.exists()]
            try:
                make_folder(self.root, new=self.renumber is not None)
                self._created = made
                break
            except FileExistsError:
                if self.renumber is None:
                    raise DataError(f"{self.root} cannot be created: it is a file") from None
                self.root = self.renumber()
            except OSError as error:
                raise DataError(f"{self.root} cannot be created: {error.strerror}") from None
        Folder(self.root).write(self.name, json.dumps(list(rows), indent=1).encode())

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Delete the list again if this process made it and no run is left in the folder."""
        try:
            yield
        except (KeyboardInterrupt, KedgeError):
            if self._created and not any(self.root.glob(f"*/{CONFIG}")):
                remove_file(self.path)
                with contextlib.suppress(OSError):
                    for path in self._created:
                        path.rmdir()
            raise


def settings_row(config: Config) -> Row:
    """The settings of a run for its row; ``rounds`` are those up to which it will be resumed."""
    return {"settings": config.changed() | {"rounds": config.rounds}}


def _has(row: Any, types: dict[str, type]) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("settings", {}), dict):
        return False
    return all(isinstance(row.get(key), kind) for key, kind in types.items())
