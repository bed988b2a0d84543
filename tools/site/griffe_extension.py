"""A Griffe extension: roles of reStructuredText in docstrings become Markdown.

Zensical passes it to mkdocstrings. It reads nothing of kedge, so that the build needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        return name if name in self.known else None
