"""Plot a partition: clients x classes, with the sizes of the clients on top."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kedge.data.partition import Partition
from kedge.data.partition.partition import IntArray
from kedge.errors import FieldError
from kedge.files import make_folder, new_file

INK, MUTED, FAINT, BLUE = "#222222", "#6b6b6b", "#e4e6e8", "#2b6cb0"
MAX_NAME = 16  # characters of a client's name
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "svg.hashsalt": "kedge",
}


def plot_partition(
    partition: Partition,
    labels: npt.ArrayLike,
    path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    client_names: Sequence[str] | None = None,
    kind: str = "auto",
) -> Path:
    """Plot clients x classes, with the sizes of the clients on top.

    Args:
        partition: the partition.
        labels: the label of each sample, ``[N]`` or ``[N, C]``.
        path: file to write, ending in .png, .svg or .pdf.
        class_names: names of the classes.
        client_names: names of the clients; numbers for None.
        kind: ``bubbles``, ``heatmap``, or ``auto``: bubbles up to 30 clients and classes.

    Returns:
        The path.

    Raises:
        FieldError: the ending, ``kind`` or number of names is wrong.
        DataError: the labels are not those of this dataset.
    """
    labels, path = np.asarray(labels), Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise FieldError(f"cannot draw {path}: end its name in .png, .svg or .pdf")
    if kind not in ("auto", "bubbles", "heatmap"):
        raise FieldError(f"kind = {kind!r} is not auto, bubbles or heatmap")
    partition.check(len(labels))
    is_real = labels.dtype.kind == "f" and labels.ndim == 1
    counts = None if is_real else partition.label_counts(labels)  # real targets have no classes
    if counts is not None and class_names is not None and len(class_names) != counts.shape[1]:
        raise FieldError(f"{len(class_names)} class names for {counts.shape[1]} classes")
    clients = len(partition.clients)
    if client_names is not None and len(client_names) != clients:
        raise FieldError(f"{len(client_names)} client names for {clients} clients")
    if kind == "auto":
        few = counts is not None and max(counts.shape) <= 30
        kind = "bubbles" if few else "heatmap"
    make_folder(path.parent)
    with mpl.rc_context(STYLE):
        figure = _figure(partition, counts, class_names, kind, client_names)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        with new_file(path) as file:
            figure.savefig(file, format=suffix[1:], dpi=200, facecolor="white", metadata=metadata)
    return path


def _figure(
    partition: Partition,
    counts: IntArray | None,
    names: Sequence[str] | None,
    kind: str,
    client_names: Sequence[str] | None,
) -> Figure:
    clients = len(partition.clients)
    classes = 0 if counts is None else counts.shape[1]
    width = float(np.clip(2.8 + 0.3 * clients, 6.2, 11.0))
    grid_height = float(np.clip(0.28 * classes, 1.4, 6.0)) if classes else 0.0
    title, size = _title(partition.name, width)
    height = 2.1 + grid_height + 0.2 * title.count("\n")
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.04))
    if counts is None:
        top = main = figure.add_subplot()
    else:
        grid = figure.add_gridspec(2, 1, height_ratios=(0.9, grid_height))
        top = figure.add_subplot(grid[0])
        main = figure.add_subplot(grid[1], sharex=top)
        top.tick_params(labelbottom=False, bottom=False)
        _class_axis(main, classes, names)
    _bars(top, partition.sizes)
    _client_axis(main, partition, client_names)
    figure.align_ylabels()
    figure.suptitle(title, x=0.012, ha="left", fontsize=size, fontweight="bold")
    facts = (
        f"seed {partition.seed}",
        f"hash {partition.hash}",
        f"{clients:,} clients",
        f"{partition.sizes.sum():,} samples",
    )
    top.set_title("   ".join(facts), loc="left", fontsize=8, color=MUTED)
    if counts is not None:
        (_bubbles if kind == "bubbles" else _heatmap)(figure, main, counts)
    return figure


def _title(name: str, width: float) -> tuple[str, float]:
    """The name with line breaks to fit the width of the figure, and its font size."""
    size, lines = 11.0, [""]
    for word in re.split(r"(?<=[+ ])", name):
        if lines[-1] and len(lines[-1] + word) > width * 10.2:
            lines.append("")
        lines[-1] += word
    longest = max(map(len, lines))
    return "\n".join(lines), min(size, size * width * 10.2 / longest)


def _bubbles(figure: Figure, axes: Axes, counts: IntArray) -> None:
    """Bubbles with areas in proportion to counts; the largest one fills its cell."""
    clients, classes = counts.shape
    axes.set_ylim(-0.6, classes - 0.4)
    axes.set_axisbelow(True)
    axes.grid(color=FAINT, lw=0.6)
    x, y = np.nonzero(counts)
    bubbles = axes.scatter(x, y, color=BLUE, lw=0)
    for _ in range(2):  # the legend shrinks the cells, which set the size of its bubbles
        figure.draw_without_rendering()
        box = axes.get_window_extent()
        cell = min(box.width / (clients + 0.2), box.height / (classes + 0.2)) * 72 / figure.dpi
        area = (0.92 * cell) ** 2 / max(1, counts.max())
        bubbles.set_sizes(area * counts[x, y])
        shown = _round_values(int(counts.max()))
        axes.legend(
            [axes.scatter([], [], s=area * v, color=BLUE, lw=0) for v in shown],
            [f"{v:,}" for v in shown],
            title="samples",
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            frameon=False,
            alignment="left",
            handletextpad=max(0.5, cell / 30),
            labelspacing=max(0.5, cell / 10 - 0.6),
            borderpad=0.2,
            fontsize=8,
            title_fontsize=8,
        )


def _heatmap(figure: Figure, axes: Axes, counts: IntArray) -> None:
    """Colours by the square root of counts, so that small counts stay visible; white is 0."""
    blues = mpl.colormaps["Blues"](np.linspace(0.16, 1.0, 256))
    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        origin="lower",
        cmap=ListedColormap(blues),
        norm=PowerNorm(0.5, vmin=0, vmax=max(1, counts.max())),
        interpolation="nearest",
    )
    bar = figure.colorbar(image, cax=axes.inset_axes((1.012, 0.0, 0.018, 1.0)))
    bar.set_ticks([0, *_round_values(int(counts.max()))])
    bar.ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    bar.ax.set_title("samples", fontsize=8, loc="left")
    bar.outline.set_visible(False)


def _bars(axes: Axes, sizes: IntArray) -> None:
    if len(sizes) <= 150:
        axes.bar(np.arange(len(sizes)), sizes, width=0.72, color=MUTED)
    else:
        axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=MUTED)
    axes.axhline(sizes.mean(), color=INK, lw=0.7, ls=(0, (4, 3)))
    axes.set_ylim(0, max(1, sizes.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("size")
    axes.spines[["top", "right"]].set_visible(False)


def _class_axis(axes: Axes, classes: int, names: Sequence[str] | None) -> None:
    step = max(1, int(np.ceil(classes / 20)))
    at = range(0, classes, step)
    axes.set_yticks(at, [str(names[i]) for i in at] if names is not None else None)
    axes.tick_params(length=0)
    axes.set_ylabel("class")
    axes.spines[:].set_visible(False)


def _client_axis(axes: Axes, partition: Partition, names: Sequence[str] | None) -> None:
    clients = len(partition.clients)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 10**9) if clients / s <= 30)
    at = np.arange(0, clients, step)
    ticks = [str(i) if names is None else _short(names[int(i)]) for i in at]
    turned, what = max(map(len, ticks)) > 4, ["client"]
    if partition.rotation is not None:
        ticks = [f"{t}\n{partition.rotation[i] % 360:g}°" for t, i in zip(ticks, at, strict=True)]
        what.append("rotation")
    if partition.noise is not None:
        ticks = [f"{t}\n{partition.noise[i]:.2g}" for t, i in zip(ticks, at, strict=True)]
        what.append("noise")
    axes.set_xticks(at, ticks)
    if turned:  # names do not fit side by side
        axes.tick_params(axis="x", labelrotation=40)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, clients - 0.4)
    axes.set_xlabel(", ".join(what))


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _round_values(most: int) -> list[int]:
    """Round numbers up to the largest count, about a third of each other, for the legend."""
    scale = 10 ** (len(str(most)) - 1)
    steps = [scale * f for f in (5, 2, 1, 0.5, 0.2, 0.1)]
    return sorted(int(v) for v in steps if 1 <= v <= most and v == int(v))[-3:]
