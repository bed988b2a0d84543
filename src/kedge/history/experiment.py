"""The folder of a comparison or a sweep: ``experiment.json`` lists the runs in its subfolders."""

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
from kedge.history.folder import CONFIG, RunFolder, read_own_json, stored_config
from kedge.settings import Config, ConfigError, load_config

EXPERIMENT, FORMAT = "experiment.json", 1
#: Of ``kedge reproduce``: the folder of results by default, the folder in it that has the runs, and
#: the scales of a table.
RESULTS, RUNS, SCALES = "reproduced", ".runs", ("full", "quick")
#: What an experiment is called in sentences, by the command that makes it. The keys that each row
#: of its list has, besides ``folder``, and their types.
KINDS = {"compare": "comparison", "sweep": "sweep"}
KEYS: dict[str, dict[str, type]] = {
    "compare": {"name": str, "yardstick": str},
    "sweep": {"values": dict},
}
Row = dict[str, Any]


def kind_of(folder: Path) -> str:
    """The command that made the experiment in a folder; empty if there is none."""
    for kind in KINDS:
        if (folder / f"{kind}.json").is_file():  # of kedge 0.1
            return kind
    try:
        found = read_own_json(folder / EXPERIMENT, "")["kind"]
    except (DataError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) and found in KINDS else ""


class Experiment:
    """The list of runs in a folder.

    Args:
        root: the folder.
        kind: the command that makes it: ``compare`` or ``sweep``.
        renumber: gives another folder if another process claims ``root`` first.
    """

    def __init__(
        self, root: str | Path, kind: str, renumber: Callable[[], Path] | None = None
    ) -> None:
        self.root, self.kind, self.renumber = Path(root), kind, renumber
        self._created: list[Path] = []

    @property
    def path(self) -> Path:
        """Its file; that of kedge 0.1 has the name of the command."""
        old = self.root / f"{self.kind}.json"
        return old if old.is_file() else self.root / EXPERIMENT

    def read(self) -> list[Row]:
        """The rows, each with its ``folder``.

        Raises:
            KedgeError: the folder holds no such experiment.
            DataError: the file is damaged.
        """
        advice = "restore it, or start again with another --out. The runs beside it are intact"
        found = read_own_json(self.path, advice) if self.path.is_file() else {"kind": ""}
        kind = found.get("kind", self.kind) if isinstance(found, dict) else self.kind
        if kind != self.kind:
            raise KedgeError(
                f"{self.root} holds no {KINDS[self.kind]} to resume; leave out --resume to start "
                "one there"
            )
        rows = found.get("runs") if isinstance(found, dict) else found
        types = {"folder": str} | KEYS[self.kind]
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
        """Raise a KedgeError if the folder holds an experiment already."""
        if self.path.exists():
            raise KedgeError(
                f"{self.root} holds a {KINDS[self.kind]} already. Continue it with --resume, or "
                "choose another --out"
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
        content = {"format": FORMAT, "kind": self.kind, "runs": list(rows)}
        old = self.path.name != EXPERIMENT  # stays as the kedge that wrote it reads it
        text = json.dumps(content["runs"] if old else content, indent=1)
        RunFolder(self.root).write(self.path.name, text.encode())

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


def is_results(folder: Path) -> bool:
    """Whether a folder holds records of ``kedge reproduce``."""
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return False
    return (folder / RUNS).is_dir() or any(
        any(folder.glob(f"*/*/*.seed*.{scale}.json")) for scale in SCALES
    )
