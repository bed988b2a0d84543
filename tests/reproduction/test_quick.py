"""Quick forms show the effects that hold, in a cheaper form: with their first seed alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kedge
from kedge.reproduction import recipes

pytestmark = [
    pytest.mark.data,
    pytest.mark.long,
    pytest.mark.skipif("KEDGE_DATA" not in os.environ, reason="$KEDGE_DATA is not set"),
]
QUICK = [name for name in recipes.all_names() if recipes.read(name).has_quick]


@pytest.mark.parametrize("name", QUICK)
def test_the_sign_of_the_effect(name: str, tmp_path: Path) -> None:
    table = recipes.read(name).at("quick")
    first = [table.rows[0].seeds[0]]
    found = kedge.reproduce(name, scale="quick", seeds=first, results=tmp_path)
    gains = {s.row.name: s.tail_gain for s in found.rows if s.row.name in table.expect}
    assert all(gain is not None for gain in gains.values())
    assert not found.missed, gains
