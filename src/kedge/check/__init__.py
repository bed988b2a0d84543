"""Correctness checks: laws that every part obeys, and identities from each part's paper.

``check_part(MyPart())`` checks a user's own part; ``kedge check scaffold`` prints the same report.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

from kedge.check import identities  # noqa: F401  (registers the built-in oracles)
from kedge.check.laws import LAWS, LawViolation, skipped
from kedge.check.oracles import Claim, claims_on_engines, oracle, oracles_of
from kedge.core.part import Part
from kedge.errors import CheckFailed, KedgeError
from kedge.session.purity import disabled

__all__ = ["Claim", "Finding", "Report", "check_part", "oracle"]


@dataclass(frozen=True)
class Finding:
    """Result of one law or identity."""

    kind: str  # "law" or "identity"
    name: str
    holds: bool | None  # None: does not apply
    detail: str = ""  # the reason, or expected and actual value


@dataclass(frozen=True)
class Report:
    """All findings of :func:`check_part` for one part."""

    part: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no law or identity fails."""
        return all(f.holds is not False for f in self.findings)

    def __str__(self) -> str:
        """One line per law and identity, and a verdict."""
        marks = {True: "holds", False: "FAILS", None: "-"}
        lines = [
            f"{marks[f.holds]:6} {f.kind:9} {f.name}  {f.detail}".rstrip() for f in self.findings
        ]
        held = sum(f.holds is True for f in self.findings)
        failed = ", ".join(f.name for f in self.failures())
        verdict = f"fails: {failed}" if failed else f"{held} laws and identities hold"
        return "\n".join([*lines, f"{self.part}: {verdict}"])

    def failures(self) -> list[Finding]:
        """Findings that do not hold."""
        return [f for f in self.findings if f.holds is False]

    def raise_if_failed(self) -> Report:
        """Return the report, or raise :class:`CheckFailed` with all failures."""
        if not self.ok:
            lines = [f"  {f.kind} {f.name}: {f.detail}" for f in self.failures()]
            raise CheckFailed(f"{self.part} fails its check\n" + "\n".join(lines))
        return self


def check_part(part: Part | str) -> Report:
    """Check a part against all laws and the identities of its paper.

    ``part`` is an instance or a name such as ``"scaffold"``; ``"fedavg"`` has identities only.
    Laws use the part's ``tiny`` setting. Identities use their own settings, and a subclass inherits
    the identities of its parent.

    Returns a :class:`Report`. Raises :class:`KedgeError` for a sum of several parts.

    >>> kedge.check_part("fedprox").ok
    True
    """
    if isinstance(part, str):
        from kedge.core.method import parse

        method = parse(part)
        if len(method.parts) > 1:
            raise KedgeError(f"check takes one part at a time, not the sum {part!r}")
        if not method.parts:
            return Report("fedavg", tuple(_identities(None)))
        part = method.parts[0]
    small = dataclasses.replace(part, **part.tiny)
    return Report(part.name, (*_laws(small), *_identities(part)))


def _laws(part: Part) -> list[Finding]:
    reasons = dict(skipped(part))
    findings = []
    for name, law in LAWS.items():
        holds, detail = None, reasons.get(name, "")
        if name not in reasons:
            try:
                with (
                    warnings.catch_warnings(),
                    disabled(),
                ):  # each law finds what it finds by itself
                    warnings.simplefilter("ignore")
                    law(part)
                holds = True
            except (LawViolation, KedgeError) as error:
                holds, detail = False, str(error)
        findings.append(Finding("law", name, holds, detail))
    return findings


def _identities(part: Part | None) -> list[Finding]:
    """Findings of every identity; each holds only if it holds on both engines."""
    findings = []
    for name, claims in oracles_of(part):
        try:
            findings += [
                Finding("identity", f"{name}: {claim.what}", claim.holds, claim.detail())
                for claim in claims_on_engines(claims)
            ]
        except KedgeError as error:
            findings.append(Finding("identity", name, False, str(error)))
    return findings
