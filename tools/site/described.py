"""What the docstring of a part says, piece by piece.

A docstring has a title, the equations, the reference, and remarks in which *Deviations*,
*Neutral at*, *Sends*, *Uploads* and *Keeps* start their own texts.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from tools.site.markdown import equations, markdown
from tools.site.papers import Paper, linked, papers_in

from kedge.core.part import Part

_LABELS = ("Deviations", "Neutral at", "Sends / keeps", "Sends / uploads", "Sends, uploads")
_LABELS += ("Sends", "Uploads", "Keeps")
_LABEL = re.compile(rf"(?:^|(?<=\. )|(?<=\.\) ))({'|'.join(_LABELS)}): ")


@dataclass(frozen=True)
class Described:
    """The docstring of a part, as Markdown; what it does not have is empty."""

    how: str = ""  # the equations
    reference: str = ""
    papers: tuple[Paper, ...] = ()
    notes: str = ""
    labelled: dict[str, str] = field(default_factory=dict)

    @property
    def deviations(self) -> str:
        return self.labelled.get("Deviations", "")


def describe(part: type[Part]) -> Described:
    """Take the docstring of a part apart."""
    _, *paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(part.__doc__ or ""))
    at = next((i for i, p in enumerate(paragraphs) if "arXiv:" in p), None)
    if at is None:
        at = next((i for i, p in enumerate(paragraphs) if papers_in(p)), len(paragraphs))
    reference = " ".join(paragraphs[at].split()) if at < len(paragraphs) else ""
    if at == 0 and ":math:" in reference:  # equations and reference in one paragraph
        sentence = max(m.end() for m in re.finditer(r"\)\. ", reference))
        paragraphs.insert(0, reference[:sentence])
        reference, at = reference[sentence:], 1
    pieces = _LABEL.split(" ".join(" ".join(paragraphs[at + 1 :]).split()))
    labels = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    return Described(
        how="\n\n".join(equations(p) for p in paragraphs[:at]),
        reference=linked(markdown(reference)),
        papers=tuple(papers_in(reference)),
        notes=markdown(pieces[0].strip()),
        labelled={label: linked(markdown(text.strip())) for label, text in labels.items()},
    )
