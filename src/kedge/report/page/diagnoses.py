"""Diagnoses on a page: equal ones once, large ones thinned."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from kedge.diagnostics.sheet import Sheet
from kedge.report.page.source import Source

MAX_CHART_BYTES = 1_200_000  # of the rows and images of all diagnoses
BY_RUN = ("command", "date", "seconds", "cost")  # fields that differ between equal sheets


def shared_sheets(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The sheets of all runs. Equal ones, such as those on the data of a comparison, are shown
    once; one that all runs have needs no name of a run."""
    found: dict[str, tuple[Sheet, list[str]]] = {}
    for source in sources:
        for sheet in source.sheets:
            told = {k: v for k, v in sheet.to_dict().items() if k not in BY_RUN}
            found.setdefault(json.dumps(told), (sheet, []))[1].append(source.name)
    every = len(sources)
    return sheet_facts(
        [("" if len(runs) == every else ", ".join(runs), sheet) for sheet, runs in found.values()]
    )


def sheet_facts(pairs: Sequence[tuple[str, Sheet]]) -> list[dict[str, Any]]:
    """Diagnoses as plain data, with the name of their run, without their bare numbers.

    Charts are thinned, and images left out, where they would make the page too large.
    """
    found, left = [], MAX_CHART_BYTES
    for run, sheet in pairs:
        plain_sheet = sheet.to_dict()
        del plain_sheet["values"]
        for chart in plain_sheet["charts"]:
            rows = chart["rows"]
            size = len(json.dumps(rows))
            keep = len(rows) if size <= left else int(len(rows) * left / size)
            if keep < len(rows):
                step = math.ceil(len(rows) / max(1, keep))
                chart["rows"] = rows[::step] if keep else []
                text = f"{len(chart['rows'])} of {len(rows)} are shown."
                chart["note"] = f"{chart['note']} {text}".strip()
            left -= min(left, size)
        found.append({"run": run, **plain_sheet})
    return found
