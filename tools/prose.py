"""Wrap the prose of Markdown files at 100 columns: ``python -m tools.prose [--check] [FILE ...]``.

Paragraphs and items of lists are wrapped. Tables, code, formulas, headings, HTML and statements of
templates stay as they are, and so do paragraphs that fit already. Without files, all Markdown
files and templates that git tracks are wrapped.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from pathlib import Path

WIDTH = 100
ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])\s+(?=\S)|(\s*>\s?)")
FENCE = re.compile(r"\s*(```|~~~)")
#: Lines that are no prose: tables, headings, HTML, statements of templates, formulas, rules, links.
OTHER = re.compile(r"\s*(\||#|<|\{%|\{#|\$\$|!!!|\?\?\?|---|===|:::|\[[^\]]+\]:)| {4,}\S")
#: What no line may break: code, expressions of templates, formulas.
WHOLE = re.compile(r"`[^`]+`|\{\{.*?\}\}|\{%.*?%\}|\$[^$\s][^$]*\$")
#: The space before a word that would begin another block at the start of a line.
MARKS = re.compile(r" (?=(?:[-*+#>]|\d+[.)]|=+|-+)(?: |$)|[|#<]|:::|\$\$)")


def wrapped(text: str) -> str:
    """Markdown with its prose wrapped.

    >>> long = "- " + "word " * 30
    >>> max(map(len, wrapped(long).splitlines())) <= WIDTH
    True
    """
    done: list[str] = []
    block: list[str] = []
    fence = ""

    def flush() -> None:
        done.extend(_paragraph(block) if any(len(line) > WIDTH for line in block) else block)
        block.clear()

    for line in text.split("\n"):
        mark = FENCE.match(line)
        if mark and (not fence or mark[1] == fence):
            flush()
            fence = "" if fence else mark[1]
            done.append(line)
        elif fence or not line.strip() or (OTHER.match(line) and not (block and line[:1] == " ")):
            flush()
            done.append(line)
        else:
            if ITEM.match(line) or (block and block[-1].endswith(("  ", "\\"))):
                flush()
            block.append(line)
    flush()
    return "\n".join(done)


def _paragraph(lines: list[str]) -> list[str]:
    """The lines of one paragraph or item, wrapped."""
    item = ITEM.match(lines[0])
    first = item[0] if item else re.match(r"\s*", lines[0])[0]  # type: ignore[index]
    rest = first if item and item[3] else " " * len(first)
    words = " ".join([lines[0][len(first) :], *(line.strip(" >") for line in lines[1:])])
    whole = MARKS.sub("\0", WHOLE.sub(lambda m: m[0].replace(" ", "\0"), words))
    found = textwrap.wrap(
        whole, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\0", " ") for line in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name files to wrap")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    names = ["*.md", "*.md.j2"]
    tracked = subprocess.run(["git", "ls-files", *names], capture_output=True, text=True).stdout
    wrong = []
    for path in args.files or map(Path, tracked.split()):
        text = path.read_text(encoding="utf-8")
        if (new := wrapped(text)) != text:
            wrong.append(path)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    if args.check and wrong:
        print(f"prose over {WIDTH} columns: {', '.join(map(str, wrong))}; make format wraps it")
    return int(args.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
