"""The navigation: sections of the site and the pages in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.site import api, commands, kinds, methods
from tools.site.assemble import COMMUNITY

#: A page, with its title or None for that of the page, or a section of entries.
Entry = tuple[str | None, "str | list[Entry]"]

LEARN = ("quickstart", "reading-a-report", "choosing", "new-method", "deploying")
UNDERSTAND = ("drift", "round", "slots", "engines", "partitions", "reproducibility", "threat-model")
GUIDES = {
    "data": "Use your data",
    "models": "Use your model",
    "metrics": "Choose metrics and splits",
    "diagnose": "Diagnose clients",
    "diagnose-training": "Diagnose training",
    "privacy": "Diagnose privacy",
    "report": "Write a report",
    "board": "Watch runs live",
    "loggers": "Log to trackers",
    "deploy": "Run a real federation",
}
TITLES = {"SECURITY.md": "Security", "CODE_OF_CONDUCT.md": "Code of conduct"}


def navigation(pages: Path) -> list[Entry]:
    """All sections; optional pages are there if their files are."""
    migrate = sorted((pages / "migrate").glob("*.md"), key=lambda p: (p.stem != "index", p.stem))
    community = [(TITLES.get(f), p) for f, p in COMMUNITY.items() if (pages / p).is_file()]
    others = sorted(f"community/{path.name}" for path in (pages / "community").glob("*.md"))
    community += [(None, page) for page in others if page not in COMMUNITY.values()]
    sections: list[Entry] = [
        ("Home", "index.md"),
        ("Learn", [(None, f"learn/{name}.md") for name in LEARN]),
        ("Understand", [
            *((None, f"understand/{name}.md") for name in UNDERSTAND),
            ("Architecture", "architecture.md"),
        ]),
        ("How-to guides", [(title, f"{name}.md") for name, title in GUIDES.items()]),
        ("Results", [
            ("Is it right?", "correctness.md"),
            ("Is it fast?", "speed.md"),
            ("What holds of the papers", "results.md"),
            ("Mutation score", "mutation.md"),
        ]),
        ("Reference", _reference()),
    ]  # fmt: skip
    if migrate:
        sections.append(("Migrate", [(None, f"migrate/{p.name}") for p in migrate]))
    sections.append(("Community", community))
    return sections


def _reference() -> list[Entry]:
    by_side: list[Entry] = [(None, "reference/methods/index.md")]
    for side, (heading, _) in methods.SIDES.items():
        names = [n for n, cls in methods.entries().items() if cls.side == side]
        pages: list[Entry] = [(n, f"reference/methods/{n}.md") for n in names]
        by_side += pages if side == "both" else [(heading, pages)]
    return [
        (None, "reference/index.md"),
        ("Methods", by_side),
        *((page.title, f"reference/{page.file}.md") for page in kinds.PAGES),
        ("Settings", "reference/settings.md"),
        ("Command line", [
            (None, "reference/cli/index.md"),
            *((f"kedge {c.name}", f"reference/cli/{c.slug}.md") for c in commands.commands()),
        ]),
        ("Python", [
            (None, "reference/api/index.md"),
            *((page.title, f"reference/api/{page.file}.md") for page in api.pages()),
        ]),
        ("Error messages", "reference/errors.md"),
        ("Glossary", "glossary.md"),
    ]  # fmt: skip


def files(entries: list[Entry]) -> list[str]:
    """The pages of a navigation, in order."""
    found = []
    for _, what in entries:
        found += [what] if isinstance(what, str) else files(what)
    return found


def toml(entries: list[Entry], indent: str = "  ") -> str:
    """The navigation as a TOML array."""
    lines = [f"{indent}{_item(title, what, indent)}," for title, what in entries]
    return "[\n" + "\n".join(lines) + f"\n{indent[2:]}]"


def _item(title: str | None, what: Any, indent: str) -> str:
    value = json.dumps(what) if isinstance(what, str) else toml(what, indent + "  ")
    return value if title is None else f"{{ {json.dumps(title)} = {value} }}"
