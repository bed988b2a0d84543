"""Is it right? Laws that hold for every part, and identities from each part's paper.

``check_part(MyPart())`` runs both on a user's own part; ``kedge check scaffold`` prints the same.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

from kedge.check import identities  # noqa: F401  (registers the built-in oracles)
from kedge.check.laws import LAWS, Broken, skipped
from kedge.check.oracles import Claim, oracle, oracles_of
from kedge.check.problems import on_engine
from kedge.core.part import Part
from kedge.errors import CheckFailed, KedgeError
from kedge.session.check_client import disabled

__all__ = ["Claim", "Finding", "Report", "check_part", "oracle"]


@dataclass(frozen=True)
class Finding:
    """One law or identity: whether it holds (None: does not apply), and the detail."""

    kind: str  # law or identity
    name: str
    holds: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`check_part` found."""

    part: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(f.holds is not False for f in self.findings)

    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.holds is False]

    def raise_if_failed(self) -> Report:
        if not self.ok:
            lines = [f"  {f.kind} {f.name}: {f.detail}" for f in self.failures()]
            raise CheckFailed(f"{self.part} fails its check\n" + "\n".join(lines))
        return self


def check_part(part: Part | str) -> Report:
    """Check a part against all laws and against the identities of its paper.

    Laws run with the part's ``tiny`` setting. Identities choose their own settings, and a subclass
    inherits those of its parent.
    """
    if isinstance(part, str):
        from kedge.core.method import parse

        method = parse(part)
        if len(method.parts) > 1:
            raise KedgeError(f"check takes one part at a time, not {part!r}")
        if not method.parts:
            return Report("fedavg", tuple(_identities(None)))
        part = method.parts[0]
    small = dataclasses.replace(part, **part.tiny)
    return Report(part.name, (*_laws(small), *_identities(part)))


def _laws(part: Part) -> list[Finding]:
    reasons = dict(skipped(part))
    found = []
    for name, law in LAWS.items():
        if name in reasons:
            found.append(Finding("law", name, None, reasons[name]))
            continue
        try:
            with warnings.catch_warnings(), disabled():  # each law finds what it finds by itself
                warnings.simplefilter("ignore")
                law(part)
        except (Broken, KedgeError) as error:
            found.append(Finding("law", name, False, str(error)))
        else:
            found.append(Finding("law", name, True))
    return found


def _identities(part: Part | None) -> list[Finding]:
    """Every identity on both engines; one line where they agree."""
    found = []
    for name, claims in oracles_of(part):
        try:
            with on_engine("loop"):
                loop = list(claims())
            with on_engine("vector"):
                vector = list(claims())
        except KedgeError as error:
            found.append(Finding("identity", name, False, str(error)))
            continue
        for one, other in zip(loop, vector, strict=True):
            worse = other if one.holds else one
            found.append(Finding("identity", f"{name}: {one.what}", worse.holds, worse.detail()))
    return found
