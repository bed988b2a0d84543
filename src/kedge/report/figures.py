"""Figures of results, as PNG or SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.files import make_folder, new_file
from kedge.runs.result import Result

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


def curves(results: Sequence[Result], paths: Sequence[str | Path], title: str = "") -> None:
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
            label = f"{result.title}  {result.written(result.last)}"
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
        axes.set_ylabel(f"{first.metric} {where}{unit}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(x=0.01)
        n = len(first.config.seeds)
        band = f"mean of {n} seeds, band: one standard deviation" if n > 1 else "one seed"
        if any(result.stopped_early for result in results):
            band += "; seeds that stopped early go on with their last value"
        axes.set_title("\n".join(t for t in (title, band) if t), loc="left", fontsize=9)
        _legend(axes, figure, len(results), first.higher_is_better)
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
