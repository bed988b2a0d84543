"""A hostile server over real processes, with members that have a release policy.

=============================================  ================================================
-inf, NaN and inf in the broadcast of a round  refused, and not counted
a test of other weights than the broadcast     no test
a round beyond the terms                       refused
rounds of one row, in other terms              refused
=============================================  ================================================
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import dataclasses
from pathlib import Path

from kedge.federation.member.releases import Releases
from tests.flower.real import hostile_server
from tests.flower.real.running import (
    NODES,
    STRICT,
    Running,
    assert_same,
    records,
    settings,
    simulate,
)

pytestmark = pytest.mark.flower
POLICY = """
uploads = ["update", "loss", "test"]
min_samples = 20
min_batch = 16
min_test_cell = 1   # tests are not rounded, so the run is that of a simulation
min_per_word = 0
max_updates = 5
"""


def test_a_hostile_server_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    running = Running(tmp_path / "f", policy=str(tmp_path / "policy.toml"))
    try:
        check(running, tmp_path)
    finally:
        running.end()


def check(running: Running, tmp_path: Path) -> None:
    config, out = settings("fedavg", 2), tmp_path / "run"
    rules = dataclasses.replace(STRICT, wait_s=0.1)
    folders = [running.folder / "nodes" / node.name / "state" for node in running.spec.nodes]
    running.train(config, out, rules=rules, own=hostile_server.__file__)
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert [log.count("has a number that is not finite") for log in logs] == [1] * NODES
    assert logs[0].count("no test: it is of other weights than the broadcast") == 1
    assert logs[1].count("round 1000001 is beyond the 2 agreed") == 1
    assert logs[2].count("is computed from 1 rows in a batch, fewer than min_batch=16") == 1
    assert [Releases(folder / "released.txt").count("update") for folder in folders] == [2] * NODES
    assert [record["cohort"] for record in records(out)] == [[0, 1, 2]] * 2
    assert_same(out, simulate(config, tmp_path / "simulated"))
