"""Docstrings as Markdown, links between pages, and the checker of built pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.site import assemble
from tools.site.assemble import Pages
from tools.site.links import Page, problems
from tools.site.markdown import cell, equations, markdown, plain, table
from tools.site.papers import Paper, papers_in

ROOT = Path(__file__).parents[2]


# -- docstrings --------------------------------------------------------------------------------


def test_roles_literals_and_formulas() -> None:
    text = "A :class:`~a.b.C` of :func:`run`, ``x = 1`` and\n:math:`w^t\n+ 1`; $HOME."
    expected = "A `C` of `run`, `x = 1` and\n\\(w^t + 1\\); \\$HOME."
    assert markdown(text) == expected
    known = {"run": "kedge.run"}
    assert "[`run`][kedge.run]" in markdown(text, known.get)


def test_literal_blocks_tables_and_doctests() -> None:
    doc = (
        "Register it::\n\n    @register\n    class A: ...\n\n    more = 1\n\nThen:\n\n"
        "=====  =====\n``a``  first\n       line\nb      second\n=====  =====\n\n"
        ">>> 1 + 1\n2"
    )
    assert markdown(doc) == (
        "Register it:\n\n```python\n@register\nclass A: ...\n\nmore = 1\n```\n\nThen:\n\n"
        "|  |  |\n| --- | --- |\n| `a` | first line |\n| b | second |\n\n"
        "```pycon\n>>> 1 + 1\n2\n```"
    )
    assert markdown("::\n\n    plain text") == "```text\nplain text\n```"


def test_google_sections_stay_as_they_are() -> None:
    doc = "Do it.\n\nArgs:\n    x: the ``input``.\n\nReturns:\n    A :class:`Part`."
    assert markdown(doc) == "Do it.\n\nArgs:\n    x: the `input`.\n\nReturns:\n    A `Part`."


def test_long_formulas_stand_alone_with_their_number() -> None:
    text = r"Client: :math:`y \leftarrow y - \eta g(y)` (eq. 3), then :math:`c` is sent."
    formula = r"y \leftarrow y - \eta g(y),\quad\text{(eq. 3)}"
    assert equations(text) == f"Client:\n\n$$\n{formula}\n$$\n\nthen \\(c\\) is sent."


def test_cells_keep_their_columns() -> None:
    assert table(["a"], [["x | y\nz"]]) == "| a |\n| --- |\n| x \\| y z |"
    assert cell(r"\(|x|\) and \(\|x\|\)") == r"\(\vert x\vert \) and \(\Vert x\Vert \)"
    assert plain("<b> a_b [x] `c` $d") == r"&lt;b> a\_b \[x] \`c\` \$d"


@pytest.mark.parametrize(
    ("text", "paper"),
    [
        (
            "Li, He and Song, Model-Contrastive Learning, CVPR 2021, arXiv:2103.16257.",
            Paper("Li, He and Song", "Model-Contrastive Learning", "CVPR", "2021", "2103.16257"),
        ),
        (
            "Sun et al., Larger, Less, and More, ICLR\n2023, arXiv:2302.1042.",
            Paper("Sun et al.", "Larger, Less, and More", "ICLR", "2023", "2302.1042"),
        ),
        ("Chen et al., On Drift; the drift is (Gao et al., arXiv:2203.11751).",
         Paper("Chen et al.", "On Drift")),
        ("Guo et al., FedBR, ICML 2023, table 1, arXiv:2205.13462.",
         Paper("Guo et al.", "FedBR", "ICML", "2023", "2205.13462")),
    ],
)  # fmt: skip
def test_references_are_understood(text: str, paper: Paper) -> None:
    assert papers_in(text)[0] == paper


# -- links between files -----------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    files = {
        "docs/a.md": (
            "[b](sub/b.md#top) [all](results) ![p](p.png) [code](../tool.py) `[no](x.md)`\n"
            "[web](https://a.b) [here](#x) [M](../src/kedge/parts/own.py#Own) "
            "[all methods](../src/kedge/parts) [how](../CONTRIBUTING.md)\n\n"
            "```text\n[not](a.link)\n```\n"
        ),
        "docs/sub/b.md": "# B\n[a](../a.md)",
        "docs/results/one.json": "{}",
        "docs/results/page.md.j2": "template",
        "docs/p.png": "",
        "tool.py": "print('```')\n",
        "README.md": "# kedge",
        "CONTRIBUTING.md": "[b](docs/sub/b.md)",
        "src/kedge/parts/own.py": "class Own(Part): ...",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_links_between_files_become_links_between_pages(repository: Path, tmp_path: Path) -> None:
    pages = Pages(tmp_path / "pages", repository)
    pages.copy()
    text = (pages.folder / "a.md").read_text()
    assert "[b](sub/b.md#top) [all](results/index.md) ![p](p.png) [code](source/tool.py.md)" in text
    assert "`[no](x.md)`\n[web](https://a.b) [here](#x)" in text
    assert "[M](reference/methods/own.md) [all methods](reference/methods/index.md)" in text
    assert "[how](community/contributing.md)" in text
    assert "[not](a.link)" in text
    assert "[one.json](one.json)" in (pages.folder / "results/index.md").read_text()
    assert not list(pages.folder.rglob("*.j2"))
    assert "````python\nprint('```')" in (pages.folder / "source/tool.py.md").read_text()
    assert (pages.folder / "community/contributing.md").read_text() == "[b](../sub/b.md)"
    assert not (pages.folder / "community/security.md").exists()


@pytest.mark.parametrize("link", ["gone.md", "../gone.py", "../../etc/passwd"])
def test_a_link_to_a_missing_file_is_an_error(link: str, repository: Path, tmp_path: Path) -> None:
    (repository / "docs/c.md").write_text(f"[x]({link})")
    with pytest.raises(FileNotFoundError, match="c.md: no file"):
        Pages(tmp_path / "pages", repository).copy()


def test_a_link_to_a_missing_class_is_an_error(repository: Path, tmp_path: Path) -> None:
    (repository / "docs/c.md").write_text("[x](../src/kedge/parts/own.py#Other)")
    with pytest.raises(FileNotFoundError, match="has no class Other"):
        Pages(tmp_path / "pages", repository).copy()


def test_every_link_of_the_pages_leads_to_a_file(tmp_path: Path) -> None:
    """Also on GitHub, where links are between files."""
    pages = Pages(tmp_path / "pages")
    pages.copy()
    for path in (ROOT / "docs").rglob("*.md"):
        assert (pages.folder / path.relative_to(ROOT / "docs")).is_file()
    for name in assemble.REFERENCE:
        assert (ROOT / name.partition("#")[0]).exists(), name


# -- the checker of built pages ----------------------------------------------------------------

GOOD = (
    '<link rel="stylesheet" href="s.css"><script src="x.js"></script><h1 id="top">T</h1>'
    '<a href="b.html#there">b</a><a href="https://example.org">out</a><a href="#top">t</a>'
    '<img src="p.svg"><img src="data:image/png;base64,AA=="><pre>:math:`x`</pre>'
)
FAULTS = {
    '<a href="c.html">c</a>': "c.html leads nowhere",
    '<a href="b.html#gone">b</a>': "b.html#gone: no such place on the page",
    '<a href="#gone">b</a>': "#gone: no such place on the page",
    '<a href="../x.html">x</a>': "../x.html leaves the site",
    '<img src="gone.png">': "gone.png leads nowhere",
    '<script src="https://cdn.example.org/k.js"></script>': "loads https://cdn.example.org/k.js",
    '<link rel="stylesheet" href="//fonts.example.org/f.css">': "loads //fonts.example.org/f.css",
    '<img srcset="p.svg 1x, https://a.org/p.png 2x">': "loads https://a.org/p.png",
    '<p style="background: url(https://a.org/p.png)">p</p>': "loads https://a.org/p.png",
    "<style>@import 'https://a.org/f.css';</style>": "loads https://a.org/f.css",
    "<p>a :math:`x`</p>": "raw markup :math:`",
    "<p>a :class:`x`</p>": "raw markup :class:`",
    '<p id="top">again</p>': "the id top is there twice",
}


def site(folder: Path, more: str = "") -> Path:
    (folder / "index.html").write_text(GOOD + more)
    (folder / "b.html").write_text('<p id="there">b</p>')
    (folder / "s.css").write_text("p { background: url('p.svg') } @font-face { src: url(f.woff2) }")
    for name in ("x.js", "p.svg", "f.woff2"):
        (folder / name).write_text("")
    return folder


def test_a_good_site_has_no_problems(tmp_path: Path) -> None:
    assert problems(site(tmp_path)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert problems(site(tmp_path, fault)) == [f"index.html: {FAULTS[fault]}"]


def test_faults_of_style_sheets_are_found(tmp_path: Path) -> None:
    site(tmp_path)
    (tmp_path / "s.css").write_text(
        "a { src: url(https://a.org/f.woff2) } b { src: url(gone.woff2) }"
    )
    assert problems(tmp_path) == [
        "s.css: loads https://a.org/f.woff2",
        "s.css: gone.woff2 leads nowhere",
    ]


def test_the_text_of_a_page_has_no_code() -> None:
    assert Page("<p>a <code>b</code></p><pre>c</pre><script>d</script>").text == "a b"
