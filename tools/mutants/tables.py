"""Files of the tool: faults by hand, equivalent mutants, the record of the last run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.mutants.mutate import Mutant, Source

Record = dict[str, Any]


class Tables:
    def __init__(self, folder: Path, command: str, seed: int) -> None:
        self.folder, self.command, self.seed = folder, command.strip(), seed

    def named(self, sources: dict[str, Source]) -> list[Mutant]:
        """The faults of ``named.toml`` in these files; ValueError if a text is not there once."""
        found, stale = [], []
        for entry in _entries(self.folder / "named.toml"):
            if entry["file"] in sources:
                source = sources[entry["file"]]
                count = source.bytes.count(entry["old"].encode())
                if count == 1:
                    found.append(_named(source, entry))
                else:
                    stale.append(f"{entry['old']!r} is {count} times in {source.file}")
        if stale:
            raise ValueError("named.toml: each text must be there once:\n" + "\n".join(stale))
        return found

    def equivalent(self) -> dict[tuple[str, str, str], str]:
        """Reasons by (file, old line, new line)."""
        return {
            (e["file"], e["old"], e["new"]): e["why"]
            for e in _entries(self.folder / "equivalent.toml")
        }

    def read(self) -> Record:
        path = self.folder / "record.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"files": {}}

    def done(self, mutants: Iterable[Mutant], killed_only: bool) -> dict[str, str]:
        """Results in the record; of its killed mutants only, or of all."""
        found = {}
        for file, entry in self.read()["files"].items():
            for key, result in entry["mutants"].items():
                if not killed_only or not is_survivor(result):
                    found[f"{file}:{key}"] = result
        return {m.key: found[m.key] for m in mutants if m.key in found}

    def write(
        self, mutants: Iterable[Mutant], results: dict[str, str], seconds: float, keep: bool
    ) -> None:
        """Replace the results of these mutants' files, or ``keep`` those of other mutants."""
        files: dict[str, Any] = self.read()["files"] if keep else {}
        for m in mutants:
            if m.key in results:
                entry = files.setdefault(m.file, {"named": {}, "mutants": {}})
                key = m.key.removeprefix(f"{m.file}:")
                entry["mutants"][key] = results[m.key]
                if m.why:
                    entry["named"][key] = m.why
        record = {
            "date": datetime.date.today().isoformat(),
            "command": self.command,
            "seed": self.seed,
            "seconds": round(seconds),
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {n: _version(n) for n in ("torch", "numpy", "pytest")},
            "files": dict(sorted((self.read()["files"] | files).items())),
        }
        self._save(record | {"passes": self.read().get("passes", [])})

    def finish(self, seconds: float, noticed: int, mutants: int, again: bool) -> None:
        """Add this run to the passes of the record; ``again`` if it went on with an earlier one."""
        record = self.read()
        run = {"command": self.command, "seconds": round(seconds)}
        run |= {"noticed": noticed, "mutants": mutants}
        record["passes"] = [*(record.get("passes", []) if again else []), run]
        self._save(record)

    def _save(self, record: Record) -> None:
        draft = self.folder / "record.json.new"
        draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.rename(self.folder / "record.json")


def is_survivor(result: str) -> bool:
    return not result.startswith(("killed", "timeout"))


def _named(source: Source, entry: dict[str, str]) -> Mutant:
    old = entry["old"].encode()
    start = source.bytes.find(old)
    mutant = source.mutant("named", start, start + len(old), entry["new"], None, entry["why"])
    compile(mutant.source, source.file, "exec")
    return mutant


def _entries(path: Path) -> list[dict[str, str]]:
    return (
        tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []) if path.exists() else []
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
