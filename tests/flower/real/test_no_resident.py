"""Real processes without resident nodes: members live in client processes, which Flower starts."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from bench import flower_rounds
from kedge.errors import KedgeError
from kedge.local import federation as local
from kedge.local.processes import is_running, processes_of, read_processes
from kedge.local.runs import follow
from tests.flower.real import hostile_app
from tests.flower.real.running import (
    STRICT,
    Running,
    assert_same,
    records,
    rounds_of,
    settings,
    simulate,
    wait,
)

pytestmark = pytest.mark.flower


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(tmp_path_factory.mktemp("members") / "f", resident=False)
    try:
        yield found
    finally:
        supervisor = read_processes(found.folder)[0]
        found.end()
        assert not supervisor or not is_running(supervisor)


def test_a_federation_is_ended_and_started_again(running: Running, tmp_path: Path) -> None:
    config, out = settings("scaffold", 3), tmp_path / "run"
    run = running.submit(config, out)
    wait(lambda: rounds_of(out) >= 1)
    local.down(running.folder)
    assert not processes_of(running.spec.token)
    with pytest.raises(KedgeError):
        follow(running.folder, run, "")
    running.up()
    running.train(config, out, resume=True)
    assert_same(out, simulate(config, tmp_path / "simulated"))


def test_hostile_client_processes_are_not_averaged(running: Running, tmp_path: Path) -> None:
    """They reply with what is no message of kedge, in each attempt in another way:

    ====================================  =====================================================
    no record                             settings in place of arrays
    another name of the record            a second record, with a metric
    a second array                        a declared length of a petabyte
    two dimensions                        the type of Python objects
    an array of NumPy                     (tests/flower/real/hostile_app.py)
    ====================================  =====================================================
    """
    config, out = settings("scaffold", 2), tmp_path / "run"
    rules = dataclasses.replace(STRICT, wait_s=0.1, strikes=1000)
    running.train(config, out, rules=rules, own=hostile_app.__file__)
    log = (out / "log.txt").read_text()
    assert len(hostile_app.FORGERIES) == 9
    assert log.count("was dropped: what is no message of kedge") == len(hostile_app.FORGERIES)
    members = json.loads((out / "federation.json").read_bytes())["members"]
    assert [member["strikes"] for member in members] == [3, 3, 3]
    assert [record["cohort"] for record in records(out)] == [[0, 1, 2]] * 2
    assert_same(out, simulate(config, tmp_path / "simulated"))


def test_the_benchmark_trains_for_real(running: Running, tmp_path: Path) -> None:
    """Flower's template and kedge learn the same digits, with messages of about the same size."""
    args = flower_rounds.parse(["--rounds", "2", "--steps", "20"])
    (tmp_path / "template").mkdir()
    rows = [
        flower_rounds.row("template", [run_template(running, tmp_path / "template", args)]),
        flower_rounds.row("clientapp", [run_kedge(running, tmp_path / "kedge", args)]),
    ]
    flower_rounds.check_training(rows)
    template, ours = rows
    assert template["last_accuracy"] > 60
    assert ours["last_accuracy"] > 60
    weights = 4 * (64 * 64 + 64 + 64 * 10 + 10) / 1e6
    # a template's round has the weights three times, kedge's twice
    assert 3 * 3 * weights < template["mb"] < 3.5 * 3 * weights
    assert 3 * 2 * weights < ours["mb"] < 3 * 3 * weights
    assert len(template["runs"][0]["seconds"]) == len(ours["runs"][0]["seconds"]) == 2
    assert "clientapp" in flower_rounds.table(rows)


def run_template(running: Running, out: Path, args: object) -> dict[str, object]:
    return flower_rounds.run_template(running.folder, out, args)  # type: ignore[arg-type]


def run_kedge(running: Running, out: Path, args: object) -> dict[str, object]:
    return flower_rounds.run_kedge(running.folder, out, args)  # type: ignore[arg-type]
