"""Figures: of results as PNG or SVG, and for a paper as vector files as wide as a column."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.errors import DataError
from kedge.files import make_folder, new_file
from kedge.history.run import Run
from kedge.report.page import as_json

# Okabe and Ito's palette for colour-blind readers
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A7F00")


SUFFIXES = (".png", ".svg", ".pdf")
MAX_INSIDE = 5  # entries of a legend inside the axes


def check_path(path: str | Path) -> None:
    """Raise a DataError for a file that :func:`curves` cannot write, before anything is trained."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} must end in one of {', '.join(SUFFIXES)}, e.g. curves.png")
    if target.is_dir():
        raise DataError(f"{path} is a folder; name a file, e.g. {target / 'curves.png'}")
    nearest = next(p for p in target.absolute().parents if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise DataError(f"{path} cannot be written: {nearest} is not a folder to write to")


def curves(results: Sequence[Run], paths: Sequence[str | Path], title: str = "") -> None:
    """Plot the metric over rounds: a line per method, with a band of one standard deviation.

    Args:
        results: one per method, with the same settings otherwise.
        paths: files to write, ``.png`` or ``.svg``; missing folders are created.
        title: first line above the axes.

    Raises:
        DataError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    settings: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "kedge"}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for i, result in enumerate(results):
            values = result.array()
            mean, colour = values.mean(0), COLOURS[i % len(COLOURS)]
            style = "-" if i < len(COLOURS) else "--"
            label = f"{result.name}  {result.written(result.last)}"
            axes.plot(result.rounds, mean, style, color=colour, label=label, linewidth=1.6)
            if len(values) > 1:
                sd = values.std(0, ddof=1)
                axes.fill_between(
                    result.rounds, mean - sd, mean + sd, color=colour, alpha=0.12, linewidth=0
                )
        first = results[0]
        unit = f" in {first.unit}" if first.unit else ""
        axes.set_xlabel("round")
        where = "on the test set"
        if any(result.headline != "global" for result in results):
            where = "on held-out samples, mean over clients"
        axes.set_ylabel(f"{first.measure.title} {where}{unit}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.01)
        n = len(first.seeds)
        band = f"mean of {n} seeds, band: one standard deviation" if n > 1 else "one seed"
        if any(result.stopped_early for result in results):
            band += "; seeds that stopped early go on with their last value"
        axes.set_title("\n".join(t for t in (title, band) if t), loc="left", fontsize=9)
        _legend(axes, figure, len(results), bool(first.measure.higher_is_better))
        for path in map(Path, paths):
            try:
                make_folder(path.parent)
                with new_file(path) as file:
                    figure.savefig(file, format=path.suffix[1:].lower(), dpi=160)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be written: {error}") from None
        plt.close(figure)


def _legend(axes: Any, figure: Any, entries: int, higher_is_better: bool) -> None:
    """In the corner that curves leave free; many entries are beside the axes."""
    if entries <= MAX_INSIDE:
        axes.legend(frameon=False, loc="lower right" if higher_is_better else "upper right")
        return
    figure.set_figwidth(figure.get_figwidth() + 2.4)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))


# -- for a paper -----------------------------------------------------------------------------------

WIDTH_IN, HEIGHT_IN = 3.3, 2.3
PAPER_SUFFIXES = (".svg", ".pdf")
MAX_CURVES = 10  # with a legend that fits into a column
PAPER_STYLE: Any = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6, "lines.linewidth": 1.2,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "svg.fonttype": "none", "pdf.fonttype": 42,
    "svg.hashsalt": "kedge",
}  # fmt: skip
AXES = {"rounds": "round", "mb": "MB, all clients", "seconds": "seconds"}
DASHES = ("-", "--", ":")


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
    with plt.rc_context(PAPER_STYLE):
        for i, group in enumerate(groups):
            more = f"-{i + 1}" if len(groups) > 1 else ""
            for name, draw in _figures(group).items():
                figure, axes = plt.subplots(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
                draw(axes)
                for suffix in PAPER_SUFFIXES:
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
        f"curves-{axis}": lambda axes, axis=axis: _draw_curves(axes, group, axis)  # type: ignore[misc]
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


def _draw_curves(axes: Any, group: Mapping[str, Any], axis: str) -> None:
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
        axes.plot(x, mean, DASHES[run["dash"]], color=colour, label=_clipped(run["name"]))
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
    return np.array([[np.nan if v is None else v for v in row] for row in rows], dtype=float)


def _mean(values: Any) -> Any:
    """Mean over seeds; NaN where no seed has a value."""
    known = np.isfinite(values)
    return np.where(known, values, 0.0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)


def _clipped(text: str, length: int = 26) -> str:
    return text.replace("$", "\\$") if len(text) <= length else text[: length - 1] + "…"
