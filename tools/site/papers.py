"""The references in docstrings: their links, and how to cite them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_AUTHORS = (
    r"(?P<authors>[A-Z][\w-]+(?:, [A-Z][\w-]+)* and [A-Z][\w-]+|[A-Z][\w-]+ et al\.|Anonymous)"
)
_REFERENCE = re.compile(
    _AUTHORS + r", (?P<title>.+?)"
    r"(?:, (?P<venue>[A-Z][A-Za-z&]+)? ?(?P<year>\d{4})(?:, (?!arXiv)[a-z][^,]*)?)?"
    r"(?:, arXiv:(?P<arxiv>\d{4}\.\d{4,5}))?"
)
JOURNALS, PREPRINTS = {"JMLR"}, {"OpenReview"}


@dataclass(frozen=True)
class Paper:
    """One reference. ``authors`` are as written: ``Li, He and Song`` or ``Gao et al.``."""

    authors: str
    title: str
    venue: str = ""
    year: str = ""
    arxiv: str = ""

    def bibtex(self) -> str:
        """The entry of a .bib file; its key is the first author, year and first word of the title.

        >>> print(Paper("Gao et al.", "FedDC: Local Drift", "CVPR", "2022", "2203.11751").bibtex())
        @inproceedings{gao2022feddc,
          author        = {Gao and others},
          title         = {{FedDC: Local Drift}},
          booktitle     = {CVPR},
          year          = {2022},
          eprint        = {2203.11751},
          archiveprefix = {arXiv},
        }
        """
        first = re.split(r"[, ]", self.authors)[0].lower()
        word = re.split(r"[^A-Za-z]", self.title)[0].lower()
        authors = self.authors.replace(" et al.", " and others").replace(", ", " and ")
        kind, place = "misc", ""
        if self.venue:
            kind, place = "inproceedings", "booktitle"
            kind, place = ("article", "journal") if self.venue in JOURNALS else (kind, place)
            kind, place = ("misc", "howpublished") if self.venue in PREPRINTS else (kind, place)
        fields = {"author": authors, "title": f"{{{self.title}}}", place: self.venue}
        fields |= {"year": self.year, "eprint": self.arxiv}
        fields |= {"archiveprefix": "arXiv"} if self.arxiv else {}
        lines = [f"  {k:<13} = {{{v}}}," for k, v in fields.items() if k and v]
        return "\n".join([f"@{kind}{{{first}{self.year}{word},", *lines, "}"])


def papers_in(paragraph: str) -> list[Paper]:
    """The papers that a paragraph names, the first one first; those in brackets are left out.

    >>> [paper.title for paper in papers_in("Li, He and Song, On Contrast, CVPR 2021.")]
    ['On Contrast']
    """
    text = re.sub(r"\([^()]*\)", "", " ".join(paragraph.split())).rstrip(". ")
    found = []
    for piece in re.split(r"; (?:and |for clients as in )?|\. Used ", text):
        m = _REFERENCE.fullmatch(piece.strip())
        if m and not re.fullmatch(r"[A-Z]\w+ \d{4}", m["title"]):  # a venue alone
            found.append(Paper(**{k: v or "" for k, v in m.groupdict().items()}))
    return found


def linked(markdown: str) -> str:
    """A text whose arXiv ids are links."""
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", markdown)


def first_arxiv(doc: str) -> str:
    """The first arXiv id of a docstring, or an empty text."""
    found = _ARXIV.search(doc)
    return found[1] if found else ""
