"""Docstrings as Markdown, and pieces of Markdown that several pages need.

Docstrings are Google style with a few roles and literals of reStructuredText: ``:math:``,
``:class:`~a.b.C```, double backticks, literal blocks after ``::``, simple tables and doctests.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

#: Gives the link target of a name, such as ``kedge.core.part.Part``; None: the name is not linked.
Resolve = Callable[[str], str | None]

_INLINE = re.compile(
    r":math:`(?P<math>[^`]*)`|:(?P<role>[a-z]+):`(?P<target>[^`]*)`|``(?P<code>[^`]*)``|(?P<dollar>\$)"
)
_RULE = re.compile(r"^ *=+( +=+)+ *$")
_LABEL = re.compile(
    r"^\s*\(((?:eqs?\.|algorithms?|section|appendix|definition|A\.\d|\d+(?=\)))[^()]*)\)"
)
#: Formulas of the equation paragraph with at least this many characters stand on their own line.
MIN_DISPLAY_LENGTH = 18


def markdown(doc: str, resolve: Resolve | None = None) -> str:
    """A docstring as Markdown.

    Args:
        doc: the docstring without its indentation.
        resolve: how names in roles are linked; without it they are set as code.

    >>> markdown("Returns a :class:`~kedge.core.part.Part`, ``mu`` times :math:`x^2`.")
    'Returns a `Part`, `mu` times \\\\(x^2\\\\).'
    """
    out: list[str] = []
    literal: list[str] = []  # blocks of code after a line that ends with ::
    margin: int | None = None  # the indentation of that line; None elsewhere
    for block in re.split(r"\n{2,}", doc.strip("\n")):
        indent = len(block) - len(block.lstrip(" "))
        if margin is not None and indent > margin:
            literal.append(block)
            continue
        _close(out, literal, margin)
        margin = indent if block.endswith("::") else None
        if block.lstrip().startswith(">>>"):
            out.append(_fence(block, " " * indent))
        elif _RULE.match(block.partition("\n")[0]):
            out.append(_simple_table(block, resolve))
        else:
            out.append(_inline(block, resolve))
    _close(out, literal, margin)
    return "\n\n".join(block for block in out if block)


def _close(out: list[str], literal: list[str], margin: int | None) -> None:
    """End a literal block: its text has one colon, or none if it was the block's only text."""
    if margin is not None:
        out[-1] = out[-1][:-1] if out[-1].strip() != "::" else ""
    if literal:
        out.append(_fence("\n\n".join(literal), " " * (margin or 0)))
        literal.clear()


def _fence(block: str, indent: str) -> str:
    code = textwrap.dedent(block)
    starts = {">>>": "pycon", "@": "python", "import ": "python", "from ": "python"}
    language = next((name for start, name in starts.items() if code.startswith(start)), "text")
    return textwrap.indent(f"```{language}\n{code}\n```", indent)


def _inline(text: str, resolve: Resolve | None) -> str:
    return _INLINE.sub(lambda m: _piece(m, resolve), text)


def _piece(m: re.Match[str], resolve: Resolve | None) -> str:
    if m["math"] is not None:
        return formula(m["math"])
    if m["code"] is not None:
        return f"`{' '.join(m['code'].split())}`"
    if m["dollar"]:
        return r"\$"
    name = " ".join(m["target"].split())
    shown = name.rpartition(".")[2] if name.startswith("~") else name
    target = resolve(name.lstrip("~")) if resolve else None
    return f"[`{shown}`][{target}]" if target else f"`{shown}`"


def formula(tex: str) -> str:
    """LaTeX in a line of text."""
    return rf"\({' '.join(tex.split())}\)"


def equations(paragraph: str) -> str:
    """A paragraph of a docstring whose long formulas stand on their own lines.

    A place in the paper, such as ``(eq. 3)``, and punctuation after a formula join its line.
    """
    pieces = re.split(r":math:`([^`]*)`", " ".join(paragraph.split()))
    lines, text = [], ""
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            text += _inline(piece, None)
            continue
        if len(piece) < MIN_DISPLAY_LENGTH:
            text += formula(piece)
            continue
        label = _LABEL.match(pieces[i + 1])
        rest = pieces[i + 1][label.end() if label else 0 :]
        sign = re.match(r"\s*([,.;:]?)\s*", rest)
        assert sign is not None
        pieces[i + 1] = rest[sign.end() :]
        tex = piece + sign[1] + (rf"\quad\text{{({label[1]})}}" if label else "")
        lines += [text.strip(), f"$$\n{tex}\n$$"]
        text = ""
    return "\n\n".join(line for line in [*lines, text.strip()] if line)


def _simple_table(block: str, resolve: Resolve | None) -> str:
    """A table between lines of ``=``; without a heading, as all of them are."""
    rule, *body = textwrap.dedent(block).splitlines()
    second = rule.index(" =") + 1
    while rule[second] != "=":
        second += 1
    rows: list[list[str]] = []
    for line in body:
        if _RULE.match(line):
            continue
        first, rest = line[:second].strip(), line[second:].strip()
        if first:
            rows.append([first, rest])
        else:
            rows[-1][1] += f" {rest}"
    return table(["", ""], [[_inline(cell, resolve) for cell in row] for row in rows])


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table.

    Args:
        heads: the heading of each column.
        rows: the cells; line breaks and bars in them are escaped.
        align: a letter per column, ``r`` for numbers; missing ones are ``l``.
    """
    marks = {"l": "---", "r": "---:"}
    rule = [marks[side] for side in align.ljust(len(heads), "l")]
    lines = [heads, rule, *([cell(str(c)) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def boxed(name: str, markdown_table: str) -> str:
    """A table in a box whose class the style sheet knows."""
    return f'<div class="{name}" markdown>\n\n{markdown_table}\n\n</div>' if markdown_table else ""


def cell(text: str) -> str:
    r"""A text inside a table cell.

    >>> cell("a|b")
    'a\\|b'
    """
    text = re.sub(r"\\\((.*?)\\\)", lambda m: rf"\({_without_bars(m[1])}\)", " ".join(text.split()))
    return re.sub(r"(?<!\\)\|", r"\|", text)


def _without_bars(tex: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\vert ", tex.replace(r"\|", r"\Vert "))


def code(text: str) -> str:
    """A text as inline code, also one with backticks."""
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def plain(text: str) -> str:
    """A text from code, such as a help string, in which nothing is markup.

    >>> plain("one of <a>, tab.csv(drop=[chol,visit])")
    'one of &lt;a>, tab.csv(drop=\\\\[chol,visit])'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[$])", r"\\\1", text)


def help_text(text: str) -> str:
    """A help string, in which words between backticks are code.

    >>> help_text("after `flwr run`, tab.csv(drop=[a])")
    'after `flwr run`, tab.csv(drop=\\\\[a])'
    """
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(p if p[:1] == "`" and len(p) > 1 else plain(p) for p in pieces)
