"""Figures for a paper: vector files in the width of a column, with fonts of 8 points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.files import make_folder, new_file
from kedge.report.figures import COLOURS
from kedge.report.page import as_json

WIDTH_IN, HEIGHT_IN = 3.3, 2.3
SUFFIXES = (".svg", ".pdf")
MAX_CURVES = 10  # with a legend that fits into a column
SETTINGS: Any = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6, "lines.linewidth": 1.2,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "svg.fonttype": "none", "pdf.fonttype": 42,
    "svg.hashsalt": "kedge",
}  # fmt: skip
AXES = {"rounds": "round", "mb": "MB, all clients", "seconds": "seconds"}
STYLES = ("-", "--", ":")


def write_figures(facts: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write the curves over rounds, MB and seconds, the gains and the partition, as SVG and PDF.

    Args:
        facts: of a report, see :func:`kedge.report.page.facts.facts_of`.
        folder: where to; it is created.

    Returns:
        The files.

    Raises:
        DataError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plain = as_json(facts)
    groups = plain["groups"]
    target = Path(folder)
    written: list[Path] = []
    with plt.rc_context(SETTINGS):
        for i, group in enumerate(groups):
            more = f"-{i + 1}" if len(groups) > 1 else ""
            for name, draw in _figures(group).items():
                figure, axes = plt.subplots(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
                draw(axes)
                for suffix in SUFFIXES:
                    path = target / f"{name}{more}{suffix}"
                    try:
                        make_folder(target)
                        date = {"Date": None} if suffix == ".svg" else None
                        with new_file(path) as file:
                            figure.savefig(file, format=suffix[1:], metadata=date)
                    except OSError as error:
                        raise DataError(f"{path} cannot be written: {error.strerror}") from None
                    written.append(path)
                plt.close(figure)
    return written


def _figures(group: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    """What to draw of a group, by file name."""
    found: dict[str, Callable[[Any], None]] = {
        f"curves-{axis}": lambda axes, axis=axis: _curves(axes, group, axis)  # type: ignore[misc]
        for axis in AXES
    }
    gains = [s["gain"] for s in group["standings"]]
    if any(gain is not None for gain in gains):
        found["gains"] = lambda axes: _gains(axes, group)
    counted = [one for one in group["partition"] if one["counts"]]
    if counted:
        found["partition"] = lambda axes: _partition(axes, counted[0])
    return found


def _shown(group: Mapping[str, Any]) -> list[int]:
    """The runs to draw: those that the page shows at first."""
    return [i for i, run in enumerate(group["runs"]) if run["on"]][:MAX_CURVES]


def _curves(axes: Any, group: Mapping[str, Any], axis: str) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    column = group["columns"][0]
    for i in _shown(group):
        if axis == "mb" and group["runs"][i]["yardstick"]:  # it sends nothing
            continue
        run, curve = group["runs"][i], group["curves"][i]["test"]
        y = _array(curve["y"][column["key"]])
        x = np.array(curve["rounds"], dtype=float)
        if axis != "rounds":
            x = _mean(_array(curve["mb" if axis == "mb" else "s"]))
        mean, colour = _mean(y), COLOURS[run["colour"]]
        axes.plot(x, mean, STYLES[run["dash"]], color=colour, label=_clipped(run["name"]))
        if len(y) > 1:
            sd = np.nanstd(y, axis=0, ddof=1)
            axes.fill_between(x, mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)
    unit = f" ({column['unit']})" if column["unit"] else ""
    axes.set_xlabel(AXES[axis])
    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"{column['label']}{unit}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False, loc="best", handlelength=1.5, labelspacing=0.3)


def _gains(axes: Any, group: Mapping[str, Any]) -> None:
    pairs = zip(group["runs"], group["standings"], strict=True)
    rows = [(run, s["gain"]) for run, s in pairs if s["gain"] is not None]
    axes.axvline(0, color="black", linewidth=0.6)
    for at, (run, gain) in enumerate(rows):
        colour = COLOURS[run["colour"]]
        if gain["low"] is not None:
            axes.plot([gain["low"], gain["high"]], [at, at], color=colour)
        axes.plot([gain["mean"]], [at], "o", color=colour, markersize=4)
    axes.set_yticks(range(len(rows)), [_clipped(run["name"]) for run, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"gain over {_clipped(group['runs'][0]['name'])}")
    axes.spines[["top", "right"]].set_visible(False)


def _partition(axes: Any, one: Mapping[str, Any]) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    counts = np.array(one["counts"], dtype=float).T  # [classes, clients]
    axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(one["classes"]) <= 12:
        axes.set_yticks(range(len(one["classes"])), [_clipped(c, 12) for c in one["classes"]])


def _array(rows: Sequence[Sequence[Any]]) -> Any:
    """``[seeds, rounds]``, NaN where there is no value."""
    import numpy as np

    return np.array([[np.nan if v is None else v for v in row] for row in rows], dtype=float)


def _mean(values: Any) -> Any:
    """Mean over seeds; NaN where no seed has a value."""
    import numpy as np

    known = np.isfinite(values)
    return np.where(known, values, 0.0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)


def _clipped(text: str, length: int = 26) -> str:
    return text.replace("$", "\\$") if len(text) <= length else text[: length - 1] + "…"
