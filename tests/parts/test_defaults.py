"""Defaults, ranges, presets and declarations of every part, beside a table that was read once.

A default is a claim about a paper, and changing one changes users' results. If a change is meant,
write the new table with ``python tests/parts/test_defaults.py`` and say so in the changelog.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import kedge.parts  # noqa: F401  (registers the built-in parts)
from kedge.core.part import Part, Range, parts

TABLE = Path(__file__).with_name("defaults.txt")
DECLARED = (
    "side", "compute", "needs_clients", "needs_features", "needs_shared_head", "needs_labels",
    "needs_sweep", "needs_plain_sgd", "needs_pull", "personal_model", "tasks", "neutral", "solves",
    "solves_for", "strays", "tiny", "sends", "uploads", "counted", "keeps",
)  # fmt: skip


def lines_of(cls: type[Part]) -> list[str]:
    """One line per field, preset and declaration that differs from those of ``Part``."""
    lines = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, *extras = typing.get_args(hints[field.name]) or (hints[field.name],)
        text = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        ranges = "".join(f", {extra}" for extra in extras if isinstance(extra, Range))
        lines.append(f"{cls.name}.{field.name} = {field.default!r}, {text}{ranges}")
    lines += [f"{cls.name}:{preset} = {values}" for preset, values in cls.presets.items()]
    for name in DECLARED:
        value = getattr(cls, name)
        value = "depends on its fields" if isinstance(value, property) else value
        if value != getattr(Part, name):
            lines.append(f"{cls.name} {name} = {value!r}")
    return lines


def table() -> str:
    own = [name for name in sorted(parts) if parts[name].__module__.startswith("kedge.parts.")]
    return "\n".join("\n".join(lines_of(parts[name])) for name in own) + "\n"


def test_defaults_are_those_of_the_table() -> None:
    assert table().splitlines() == TABLE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
