"""Templates of the generated pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)


def render(template: str, /, **values: Any) -> str:
    """Fill a template; several blank lines become one."""
    text = _environment.get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text)
