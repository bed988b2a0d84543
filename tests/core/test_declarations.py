"""What a part declares that says nothing about itself."""

from __future__ import annotations

from kedge.core.part import Declarations


def test_a_part_that_declares_nothing_asks_for_nothing() -> None:
    declared = {n: v for n, v in vars(Declarations).items() if not n.startswith("__")}
    assert declared == {
        "name": "",
        "side": "client",
        "compute": "",
        "needs_clients": False,
        "needs_batchnorm": False,
        "needs_sum": False,
        "needs_share_sum": False,
        "needs_features": False,
        "needs_shared_head": False,
        "needs_labels": False,
        "needs_sweep": False,
        "needs_plain_sgd": False,
        "needs_pull": False,
        "personal_model": False,
        "tasks": ("classification", "multilabel", "regression"),
        "presets": {},
        "neutral": None,
        "solves": None,
        "solves_for": "all",
        "strays": 0.0,
        "tiny": {},
        "sends": "0",
        "uploads": "0",
        "counted": (),
        "tells_labels": (),
        "keeps": "0",
        "made_for": {},
    }
