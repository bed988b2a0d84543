"""Whether faults that were made on purpose are found by the identities of a part."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.oracles import Claim, oracles_of
from kedge.core.part import Part
from kedge.errors import KedgeError


def claims_of(part: Part) -> Iterator[Claim]:
    """Claims of all identities, one after the other; a hook that fails is a broken claim."""
    for name, oracle in oracles_of(part):
        try:
            yield from oracle()
        except KedgeError as error:
            yield Claim(f"{name}: {error}", 0.0, float("nan"))


def is_found(part: Part) -> bool:
    return any(not claim.holds for claim in claims_of(part))
