"""A piece of the sheet on privacy: findings, tables, charts and values of one question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kedge.history.sheet import Chart, Table


class Piece(NamedTuple):
    """Findings, tables, charts and values; those of several questions are joined in order."""

    findings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    values: dict[str, Any] = {}


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces as one."""
    return Piece(
        [line for piece in pieces for line in piece.findings],
        [table for piece in pieces for table in piece.tables],
        [chart for piece in pieces for chart in piece.charts],
        {name: value for piece in pieces for name, value in piece.values.items()},
    )
