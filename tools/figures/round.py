"""One round as a diagram, with every hook where it is called."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tools.figures.style import CLIENTS, TEXT

from kedge.core.part import HOOKS

WIDTH, CLIENT, SERVER = 780, CLIENTS[0], CLIENTS[1]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
LEFT, RIGHT = 20, 400  # the server's and the clients' column
COLUMN = 340

#: Boxes: column, top, title, and rows of (what happens, hooks).
BOXES = (
    (LEFT, 40, 118, "once, on the server", SERVER, (
        ("first state of the server", ("server_init",)),
        ("extra trainable leaves", ("extend",)),
        ("what stays on the clients", ("private",)),
    )),
    (RIGHT, 40, 118, "once, on each client", CLIENT, (
        ("first state of a client", ("client_init",)),
    )),
    (LEFT, 196, 146, "a round starts", SERVER, (
        ("what kind of round it is", ("phase",)),
        ("ask clients without training", ("survey",)),
        ("take in their answers", ("absorb",)),
        ("what clients receive besides weights", ("send",)),
    )),
    (RIGHT, 196, 92, "each client of the cohort", CLIENT, (
        ("start from the received weights", ()),
        ("prepare the round", ("prepare",)),
    )),
    (RIGHT, 300, 322, "every local step", CLIENT, (
        ("draw a batch, change it", ("transform",)),
        ("add rows at a cut of the network", ("inject",)),
        ("forward pass; a max step on it", ("ascend",)),
        ("change logits, weigh samples", ("logits", "weigh")),
        ("loss of the task + terms", ("term",)),
        ("gradient + corrections", ("correct",)),
        ("which leaves may move", ("trainable",)),
        ("optimiser step", ()),
        ("change the new parameters", ("project",)),
        ("remember something", ("observe",)),
    )),
    (RIGHT, 654, 146, "each client ends", CLIENT, (
        ("delta = local - anchor", ()),
        ("uploads, and its next state", ("reply",)),
        ("own way to be averaged", ("contribute",)),
        ("change what leaves", ("release",)),
    )),
    (LEFT, 654, 146, "the server updates", SERVER, (
        ("change what the parts see", ("receive",)),
        ("weighted mean, or", ("combine",)),
        ("next weights, next state", ("server_step",)),
        ("weights to test and to keep", ("output",)),
    )),
    (RIGHT, 812, 64, "after training", CLIENT, (("a client's own model", ("personal",)),)),
)  # fmt: skip
HEIGHT = 890


def drawn_hooks() -> list[str]:
    """The hooks of the diagram, in the order of its boxes."""
    return [hook for *_, rows in BOXES for _, hooks in rows for hook in hooks]


def draw(folder: Path) -> None:
    """Write ``round.svg``."""
    assert sorted(drawn_hooks()) == sorted(HOOKS)
    (folder / "round.svg").write_text("\n".join(_svg()) + "\n", encoding="utf-8")


def _svg() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="{FONT}" font-size="13" fill="{TEXT}">'
    )
    yield "<title>One round of a federation, with every hook</title>"
    yield (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{TEXT}"/></marker></defs>'
    )
    for x, label in ((LEFT, "server"), (RIGHT, "clients")):
        yield f'<text x="{x}" y="24" font-size="15" font-weight="600">{label}</text>'
    for box in BOXES:
        yield from _box(*box)
    yield from _arrow(360, 244, 400, 244)
    yield from _label(380, 184, "weights + sent")
    yield from _arrow(400, 712, 360, 712)
    yield from _label(0, 642, "delta + uploads, reduced to sums", start=True, x=150)
    yield f'<path d="M 60 654 V 348" stroke="{TEXT}" fill="none" marker-end="url(#tip)"/>'
    yield from _label(130, 500, "next round", start=True, x=70)
    loop = "M 740 602 h 22 V 322 h -20"
    yield f'<path d="{loop}" stroke="{TEXT}" fill="none" marker-end="url(#tip)"/>'
    yield "</svg>"


def _box(
    x: int, y: int, height: int, title: str, colour: str,
    rows: tuple[tuple[str, tuple[str, ...]], ...],
) -> Iterator[str]:  # fmt: skip
    yield (
        f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.08" stroke="{colour}" stroke-opacity="0.5"/>'
    )
    head = f'font-weight="600" fill="{colour}"'
    yield f'<text x="{x + 12}" y="{y + 22}" {head}>{escape(title)}</text>'
    for i, (what, hooks) in enumerate(rows):
        line = y + 48 + 28 * i
        yield f'<text x="{x + 12}" y="{line}">{escape(what)}</text>'
        if hooks:
            names, side = "  ".join(hooks), CLIENT if "survey" in hooks else colour
            yield (
                f'<text x="{x + COLUMN - 12}" y="{line}" text-anchor="end" font-family="{MONO}" '
                f'fill="{side}" xml:space="preserve">{names}</text>'
            )


def _arrow(x1: int, y1: int, x2: int, y2: int) -> Iterator[str]:
    yield (
        f'<path d="M {x1} {y1} L {x2} {y2}" stroke="{TEXT}" fill="none" marker-end="url(#tip)"/>'
    )


def _label(middle: int, y: int, text: str, start: bool = False, x: int = 0) -> Iterator[str]:
    where = f'x="{x}"' if start else f'x="{middle}" text-anchor="middle"'
    yield f'<text {where} y="{y}" font-size="12" font-style="italic">{escape(text)}</text>'
