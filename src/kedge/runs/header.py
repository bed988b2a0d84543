"""What a run is judged by, in ``run.json`` from its start: readers need neither task nor parts.

::

    {"format": 1, "task": "classification", "headline": "accuracy", "personal": false,
     "metrics": [{"name": "accuracy", "title": "accuracy", "unit": "%",
                  "higher_is_better": true, "decimals": 2}, ...]}

``personal`` says whether the clients' own models are what its method is for. Unknown keys are
ignored. Folders of kedge 0.1 may lack the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kedge.files import read_file, read_json

if TYPE_CHECKING:
    from kedge.core.task_base import Metric, Task
    from kedge.runs.folder import Folder

HEADER, FORMAT = "run.json", 1
MAX_DECIMALS = 12
TITLES = {
    "rmse": "RMSE", "mae": "MAE", "r2": "R²", "auroc": "AUROC", "f1": "F1", "f1_macro": "macro F1",
    "map": "mAP", "ece": "calibration error",
}  # fmt: skip


class MetricInfo(NamedTuple):
    """A metric as it is shown; ``higher_is_better`` is None where nobody knows."""

    name: str
    title: str
    unit: str = ""
    higher_is_better: bool | None = None
    decimals: int = 3

    @classmethod
    def of(cls, metric: Metric) -> MetricInfo:
        unit, higher, decimals = metric.unit, metric.higher_is_better, metric.decimals
        return cls(metric.name, title_of(metric.name), unit, higher, decimals)


@dataclass(frozen=True)
class Header:
    """The content of ``run.json``."""

    task: str
    headline: str  # the name of a metric
    personal: bool
    metrics: Mapping[str, MetricInfo]


def title_of(name: str) -> str:
    """The name of a metric for people: ``rmse`` is RMSE."""
    return TITLES.get(name, name.replace("_", " "))


def save_header(folder: Folder, task: Task, personal: bool) -> None:
    """Write what a run is judged by, unless the file says so already."""
    metrics = [MetricInfo.of(metric)._asdict() for metric in task.metrics]
    found = {"format": FORMAT, "task": task.name, "headline": task.metric, "personal": personal}
    content = json.dumps(found | {"metrics": metrics}, indent=1).encode()
    with contextlib.suppress(OSError):
        if read_file(folder.path / HEADER) == content:
            return
    folder.write(HEADER, content)


def read_header(folder: Path) -> Header | None:
    """What a run is judged by; None without the file, or if it is damaged."""
    try:
        return header_of(read_json(folder / HEADER))
    except (OSError, ValueError):
        return None


def header_of(found: Any) -> Header | None:
    """The header in the content of a file; None if it is damaged."""
    try:
        metrics = [
            MetricInfo(m["name"], m["title"], m["unit"], m["higher_is_better"], m["decimals"])
            for m in found["metrics"]
        ]
        task, headline, personal = found["task"], found["headline"], found["personal"]
    except (LookupError, TypeError):
        return None
    texts = [task, headline, *(text for m in metrics for text in m[:3])]
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(isinstance(yes, bool) for yes in (personal, *(m[3] for m in metrics)))
        or not all(type(m.decimals) is int and 0 <= m.decimals <= MAX_DECIMALS for m in metrics)
    ):
        return None
    return Header(task, headline, personal, {m.name: m for m in metrics})


def metric_info(
    name: str, header: Header | None, result: Mapping[str, Any], known: Mapping[str, MetricInfo]
) -> MetricInfo:
    """A metric of a run: as its header says; in an older folder as ``result.json`` says, else as
    it is known here."""
    if header is not None and name in header.metrics:
        return header.metrics[name]
    info = known.get(name) or MetricInfo(name, title_of(name))
    higher = result.get("higher_is_better") if result.get("metric") == name else None
    return info._replace(higher_is_better=higher) if isinstance(higher, bool) else info
