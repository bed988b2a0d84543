"""Check the built pages: links, anchors, and that nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes that a browser follows by itself, so that they must stay on the site.
LOADED = {
    "script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "object": ("data",), "embed": ("src",),
    "use": ("href", "xlink:href"), "image": ("href", "xlink:href"),
}  # fmt: skip
#: Relations of <link> that only name an address.
NAMED = {"canonical", "alternate", "prev", "next", "describedby"}
RAW_ROLE = re.compile(r":(?:math|class|func|meth|mod|attr|data|exc|obj):`")


class Page(HTMLParser):
    """The links, loaded addresses, ids and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.duplicates: set[str] = set()
        self._skipped = 0
        self._words: list[str] = []
        self.styles = ""
        self._style = False
        self.feed(text)

    @property
    def text(self) -> str:
        """What a reader sees, without code blocks."""
        return "".join(self._words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        for name in {values.get("id", ""), values.get("name", "") if tag == "a" else ""} - {""}:
            if name in self.ids and values.get("id") == name:
                self.duplicates.add(name)
            self.ids.add(name)
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and "href" in values:
            named = NAMED & set(values.get("rel", "").split())
            (self.links if named else self.loaded).append(values["href"])
        for attribute in LOADED.get(tag, ()):
            if values.get(attribute):
                self.loaded += _addresses(attribute, values[attribute])
        self.styles += values.get("style", "")
        if tag in ("pre", "script", "style"):
            self._skipped += 1
            self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "script", "style"):
            self._skipped -= 1
            self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.styles += data
        elif not self._skipped:
            self._words.append(data)


def _addresses(attribute: str, value: str) -> list[str]:
    if attribute != "srcset":
        return [value]
    return [piece.split()[0] for piece in value.split(",") if piece.strip()]


def problems(site: Path) -> list[str]:
    """What is wrong with the pages below a folder, each with its page."""

    @cache
    def read(path: Path) -> Page:
        return Page(path.read_text(encoding="utf-8"))

    found = []
    for path in sorted(site.rglob("*.html")):
        page, name = read(path), path.relative_to(site).as_posix()
        base = site if path.name == "404.html" else path.parent
        found += [f"{name}: the id {one} is there twice" for one in sorted(page.duplicates)]
        found += [f"{name}: raw markup {m}" for m in sorted(set(RAW_ROLE.findall(page.text)))]
        for address in dict.fromkeys(page.links):
            problem = _broken(address, path, base, site, read)
            found += [f"{name}: {problem}"] if problem else []
        addresses = [*page.loaded, *_in_styles(page.styles)]
        for address in dict.fromkeys(addresses):
            problem = _outside(address) or _broken(address, path, base, site, read)
            found += [f"{name}: {problem}"] if problem else []
    for path in sorted(site.rglob("*.css")):
        for address in dict.fromkeys(_in_styles(path.read_text(encoding="utf-8"))):
            problem = _outside(address) or _broken(address, path, path.parent, site, None)
            found += [f"{path.relative_to(site).as_posix()}: {problem}"] if problem else []
    return found


def _in_styles(text: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)", text)
    found += re.findall(r"@import\s+['\"]([^'\"]+)", text)
    return [address for address in found if not address.startswith(("data:", "#"))]


def _outside(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme == "data":
        return ""
    return f"loads {address}" if parts.scheme or parts.netloc else ""


def _broken(address: str, path: Path, base: Path, site: Path, read: object) -> str:
    """Why an address on the site leads nowhere; empty if it does not, or is elsewhere."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    if parts.path.startswith("/"):
        target = site / unquote(parts.path).lstrip("/")
    else:
        target = (base / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site.resolve()) and not target.is_relative_to(site):
        return f"{address} leaves the site"
    if not target.is_file():
        return f"{address} leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and target.suffix == ".html" and callable(read) and anchor not in read(target).ids:
        return f"{address}: no such place on the page"
    return ""
