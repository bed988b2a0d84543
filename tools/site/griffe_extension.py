"""A Griffe extension: roles of reStructuredText in docstrings become Markdown.

Attributes without a docstring have the comment behind them, or the ``#:`` comment above them, as
theirs. Zensical passes the extension to mkdocstrings, which reads source files and imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from tools.site.markdown import markdown


class Roles(griffe.Extension):
    """Convert every docstring; link the names that have a place on a page.

    Args:
        known: full names of all objects on the pages, such as ``kedge.core.part.Part``.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = set(known)

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is None and obj.is_attribute and obj.lineno:
            text = comment_of(Path(str(obj.filepath)), obj.lineno)
            docstring = griffe.Docstring(text, parent=obj, lineno=obj.lineno)
            obj.docstring = docstring if text else None
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, lambda name: self.find(name, obj))

    def find(self, name: str, obj: griffe.Object) -> str | None:
        """The full name of what a role means, looked up from the object outwards."""
        name = name.removesuffix("()")
        scope: griffe.Object | None = obj
        while scope is not None:
            if f"{scope.path}.{name}" in self.known:
                return f"{scope.path}.{name}"
            scope = scope.parent if isinstance(scope.parent, griffe.Object) else None
        if name in self.known:
            return name
        ends = [full for full in self.known if full.endswith(f".{name}")]
        return ends[0] if len(ends) == 1 and "." not in name else None


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def comment_of(path: Path, lineno: int) -> str:
    """The comment behind an attribute, or the ``#:`` lines above it."""
    lines = _lines(path)
    behind = re.search(r"  # (?!type:|noqa|fmt:)(.+)$", lines[lineno - 1])
    if behind:
        return behind[1].strip()
    above: list[str] = []
    for line in reversed(lines[: lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        above.insert(0, line.strip()[2:].strip())
    return " ".join(above)
