"""Wrapping prose changes no word, no table and no code, and wraps once and for all."""

import re
from pathlib import Path

import pytest
from tools.prose import WIDTH, wrapped

ROOT = Path(__file__).parents[2]
LONG = "word " * 30


@pytest.mark.parametrize(
    "text",
    [
        f"| {LONG} | {LONG} |",
        f"```text\n{LONG}{LONG}\n```",
        f"# {LONG}{LONG}",
        f"<p>{LONG}{LONG}</p>",
        f"paragraph\n\n    {LONG}{LONG}",
        "short lines\nstay as they are",
    ],
)
def test_what_is_no_prose_stays(text: str) -> None:
    assert wrapped(text) == text


def test_items_hang_and_marks_do_not_begin_lines() -> None:
    text = wrapped(f"- {LONG}\n- " + "a - 1. + # b " * 20 + f"\n> {LONG}{LONG}")
    assert max(map(len, text.split("\n"))) <= WIDTH
    starts = [re.match(r"\s*(\S+)", line)[1] for line in text.split("\n") if line]  # type: ignore[index]
    assert [s for s in starts if s in ("-", ">", "+", "#", "1.")] == ["-", "-", *[">"] * 4]


def test_code_and_expressions_are_not_broken() -> None:
    code = "`kedge run --rounds 3 --data digits`"
    assert wrapped(f"{'x' * 80} {code} {{{{ a b }}}}").split("\n")[1].startswith(code)


@pytest.mark.parametrize("name", ["README.md", "docs/deploy.md", "docs/results/page.md.j2"])
def test_no_word_changes(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    once = wrapped(text)
    assert once.split() == text.split() or ">" in text
    assert wrapped(once) == once
