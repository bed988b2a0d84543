"""The pages of the site in one folder: those of ``docs``, of the root, and the generated ones.

Links between files of the repository become links between pages. A link to a folder leads to a page
that lists it, a link to a file outside ``docs`` to a page that shows it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
#: Files at the root that are pages of the section Community.
COMMUNITY = {
    "CONTRIBUTING.md": "community/contributing.md",
    "CHANGELOG.md": "community/changelog.md",
    "SECURITY.md": "community/security.md",
    "CODE_OF_CONDUCT.md": "community/conduct.md",
    "ROADMAP.md": "community/roadmap.md",
}
#: Pages of the reference in place of source files, which a link on GitHub shows.
REFERENCE = {
    "src/kedge": "reference/index.md",
    "src/kedge/__init__.py": "reference/api/index.md",
    "src/kedge/api": "reference/api/index.md",
    "src/kedge/check": "reference/api/check.md",
    "src/kedge/cli": "reference/cli/index.md",
    "src/kedge/core/part.py": "reference/api/part.md",
    "src/kedge/core/round.py": "reference/api/seen.md",
    "src/kedge/core/tree.py": "reference/api/tree.md",
    "src/kedge/core/view.py": "reference/api/seen.md",
    "src/kedge/data/datasets": "reference/data.md",
    "src/kedge/data/partition": "reference/partitions.md",
    "src/kedge/errors.py": "reference/errors.md",
    "src/kedge/models": "reference/models.md",
    "src/kedge/parts": "reference/methods/index.md",
    "src/kedge/settings.py": "reference/settings.md",
}
SHOWN = {".py": "python", ".toml": "toml", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml"}
LEFT_OUT = {".j2"}
_LINK = re.compile(
    r"(`+[^`]*`+)|(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))"
)
_FENCE = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$)", re.M | re.S)


class Pages:
    """Pages below a folder, by their paths in the site.

    Args:
        folder: where pages are written; what is there is removed.
        root: the repository.
    """

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root = folder, root
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._shown: set[str] = set()

    def copy(self) -> None:
        """Copy ``docs`` and the files of the root, with their links rewritten."""
        for path in sorted((self.root / "docs").rglob("*")):
            if path.is_file() and path.suffix not in LEFT_OUT:
                self._copy(path, path.relative_to(self.root / "docs").as_posix())
        for name, page in COMMUNITY.items():
            if (self.root / name).is_file():
                self._copy(self.root / name, page)

    def _copy(self, source: Path, page: str) -> None:
        if source.suffix == ".md":
            self.write(page, self.rewritten(source, page))
        else:
            target = self.folder / page
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def write(self, page: str, text: str) -> None:
        """Write a page."""
        target = self.folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def rewritten(self, source: Path, page: str) -> str:
        """A Markdown file whose links fit its place in the site."""
        pieces = _FENCE.split(source.read_text(encoding="utf-8"))
        replace = self._replacer(source, page)
        return "".join(p if i % 2 else _LINK.sub(replace, p) for i, p in enumerate(pieces))

    def _replacer(self, source: Path, page: str) -> Callable[[re.Match[str]], str]:
        def replace(m: re.Match[str]) -> str:
            if m[1] or re.match(r"[a-z]+:|#", m[3]):
                return m[0]
            path, sign, anchor = m[3].partition("#")
            target = Path(os.path.normpath(source.parent / path))
            there = self._reference(target, anchor)
            if there:
                return f"{m[2]}{relative(there, page)}{m[4]}"
            there = self._page_of(target)
            if there is None:
                raise FileNotFoundError(f"{source.relative_to(self.root)}: no file {m[3]}")
            return f"{m[2]}{relative(there, page)}{sign}{anchor}{m[4]}"

        return replace

    def _reference(self, target: Path, anchor: str) -> str | None:
        """The page of the reference in place of a source file; of ``parts/drift.py#FedDC``, the
        method."""
        if not target.exists() or not target.is_relative_to(self.root):
            return None
        name = target.relative_to(self.root).as_posix()
        if anchor and name.startswith("src/kedge/parts/"):
            if f"class {anchor}(" not in target.read_text(encoding="utf-8"):
                raise FileNotFoundError(f"{name} has no class {anchor}")
            return f"reference/methods/{anchor.lower()}.md"
        return REFERENCE.get(f"{name}#{anchor}" if anchor else name)

    def _page_of(self, target: Path) -> str | None:
        """The page of a file of the repository; one that has none yet gets one."""
        if not target.exists() or not target.is_relative_to(self.root):
            return None
        name = target.relative_to(self.root).as_posix()
        if name in COMMUNITY:
            return COMMUNITY[name]
        docs = self.root / "docs"
        inside = target.is_relative_to(docs)
        if target.is_file() and inside:
            return target.relative_to(docs).as_posix()
        place = target.relative_to(docs).as_posix() if inside else f"source/{name}"
        page = f"{place}/index.md" if target.is_dir() else f"{place}.md".replace(".md.md", ".md")
        if page not in self._shown:
            self._shown.add(page)
            self.write(
                page, self._listing(target, page) if target.is_dir() else self._file(target, page)
            )
        return page

    def _listing(self, folder: Path, page: str) -> str:
        name = folder.relative_to(self.root).as_posix()
        lines = [HIDDEN, f"# {name}", ""]
        for path in sorted(folder.iterdir()):
            if path.suffix in LEFT_OUT or path.name.startswith((".", "__")):
                continue
            there = self._page_of(path)
            assert there is not None
            lines.append(f"- [{path.name}{'/' if path.is_dir() else ''}]({relative(there, page)})")
        return "\n".join(lines) + "\n"

    def _file(self, path: Path, page: str) -> str:
        name = path.relative_to(self.root).as_posix()
        if path.suffix == ".md":
            return HIDDEN + self.rewritten(path, page)
        text = path.read_text(encoding="utf-8")
        fence = "`" * max([3, *(len(m) + 1 for m in re.findall(r"`{3,}", text))])
        language = SHOWN.get(path.suffix, "text")
        return f"{HIDDEN}# {name}\n\n{fence}{language}\n{text}\n{fence}\n"


#: Front matter of pages that search leaves out.
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def relative(target: str, page: str) -> str:
    """The link from a page to another.

    >>> relative("data.md", "learn/quickstart.md")
    '../data.md'
    """
    return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")
