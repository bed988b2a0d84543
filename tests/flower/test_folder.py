"""The folder of a federation is that of a run: predict, report and resume work on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kedge
from kedge.cli.app import app
from kedge.core import tree
from kedge.errors import FieldError, Interrupted, KedgeError
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.member.member import Member
from kedge.federation.messages import Direct, MemberRequest
from kedge.history.find import find
from kedge.history.folder import request_stop
from kedge.report.page import as_json, facts_of
from tests.flower.faulty import Faulty
from tests.flower.federations import (
    QUICK,
    Members,
    assert_same,
    coordinator,
    datasets,
    net,
    replay,
    settings,
)

NORTH = [f"{a},{'fm'[a % 2]},{'no' if a < 9 else 'yes'}" for a in range(18)]
SOUTH = [f"{'yes' if a > 9 else 'maybe'},x,{a}" for a in range(16)]
CSV = {
    "north": "\n".join(["age,sex,label", *NORTH, ""]),
    "south": "\n".join(["label,sex,age", *SOUTH, ""]),
}


def tables(tmp_path: Path, **changes: Any) -> tuple[Coordinator, dict[str, Any]]:
    """A run of two members with CSV files, whose columns and classes differ."""
    handles = {}
    for name, text in CSV.items():
        (tmp_path / f"{name}.csv").write_text(text)
        member = Member(name, tmp_path / f"{name}.csv", tmp_path / name)
        handles[f"node of {name}"] = member.handle
    config = settings("fedavg", clients=2, per_round=0, model="mlp(hidden=[4])", **changes)
    run = Coordinator(config, Direct(handles), tmp_path / "run", rules=QUICK)
    run.run()
    return run, handles


def test_predict_load_evaluate_and_report(tmp_path: Path) -> None:
    run, _ = tables(tmp_path)
    folder = tmp_path / "run"
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {
        "config.toml", "environment.json", "log.txt", "bundle.json", "run.json", "result.json",
        "federation.json", "seats.json", "seed-0/metrics.jsonl", "seed-0/checkpoint.safetensors",
        "seed-0/model.safetensors", "seed-0/scores.json", "seed-0/clients.json",
        "seed-0/state.json",
    }  # fmt: skip
    loaded = kedge.load(folder)
    new = tmp_path / "new.csv"
    new.write_text("sex,age\nf,3\nx,12\nm,1\n")
    assert set(loaded.model.predict(str(new))) <= {"maybe", "no", "yes"}
    assert loaded.model.predict_proba(str(new)).shape == (3, 3)
    expected = run.bound.model.module(run.session.output())
    x = torch.tensor([[3.0, 1, 0, 0], [12, 0, 0, 1], [1, 0, 1, 0]])
    data = run.roster.terms.data
    x = (x - torch.tensor(data.mean)) / torch.tensor(data.std)
    probs = torch.softmax(expected(x), -1).detach().numpy()
    assert loaded.model.predict_proba(str(new)) == pytest.approx(probs, abs=1e-6)
    labelled = tmp_path / "labelled.csv"
    labelled.write_text("sex,age,label\nf,3,no\nx,12,yes\nm,1,no\n")
    for command in (
        ["predict", str(folder), str(new)],
        ["evaluate", str(folder), str(labelled)],
        ["report", str(folder)],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert "fedavg" in str(loaded)
    assert "id,prediction,p_maybe,p_no,p_yes" in CliRunner().invoke(
        app, ["predict", str(folder), str(new)]
    ).output  # fmt: skip


def test_a_simulation_does_not_go_on_with_the_run_of_a_federation(tmp_path: Path) -> None:
    """It would lack the members' states, and call their data its own."""
    tables(tmp_path, rounds=1)
    folder = tmp_path / "run"
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for words in (("--rounds", "3"), ()):
        done = CliRunner().invoke(app, ["run", "--out", str(folder), "--resume", *words])
        assert done.exit_code != 0
        wanted = f"kedge flower run --out {folder} --resume"
        assert wanted in " ".join(done.output.split()) or wanted in str(done.exception)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    text = (folder / "config.toml").read_text()
    [command] = as_json(facts_of(find([folder])))["commands"]
    assert command.startswith("kedge flower run --")
    assert "--data" not in command
    assert "--clients" not in command
    kedge.run("fedavg", clients=2, rounds=1, seeds=[0], out=tmp_path / "simulated")
    (tmp_path / "simulated" / "config.toml").write_text(text)
    config = settings("fedavg", clients=2, per_round=0, model="mlp(hidden=[4])", rounds=1)
    with pytest.raises(KedgeError, match="is a simulated run; resume it with: kedge run --out"):
        Coordinator(config, Direct({}), tmp_path / "simulated", rules=QUICK, resume=True)


def test_no_path_of_a_member_is_in_the_folder_of_the_run(tmp_path: Path) -> None:
    tables(tmp_path)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert b"north.csv" not in file.read_bytes(), file


def test_a_test_is_exact(tmp_path: Path) -> None:
    """Sums of members are those of all held-out rows together, in every round and at the end."""
    members = Members(tmp_path, model=net())
    run = coordinator(members, settings("scaffold", rounds=4, eval_every=2), tmp_path / "run")
    result = run.run()
    records = result.records[0]
    sim = replay(run, members)
    report, per_class = sim.evaluate_all(detailed=True)
    assert [("accuracy" in r) for r in records] == [False, True, False, True]
    for name, value in report.items():
        assert records[-1][name] == pytest.approx(value, abs=1e-6), name
    assert records[-1]["per_class"] == pytest.approx(per_class)
    each = [r.get("accuracy") for r in sim.evaluate_clients()]
    assert records[-1]["per_client"] == pytest.approx(each)
    assert {"auroc", "average_precision", "ece", "log_loss"} <= records[-1].keys()
    scores = json.loads((tmp_path / "run" / "seed-0" / "scores.json").read_text())
    assert scores["global"]["samples"] == sim.federation.num_test
    assert scores["clients"].keys() == set(members.names)
    again = Members(tmp_path / "two", model=net())
    short = coordinator(again, settings("scaffold", rounds=2), tmp_path / "two" / "run")
    assert short.run().records[0][-1]["accuracy"] == records[1]["accuracy"]


def test_a_test_rides_along(tmp_path: Path) -> None:
    """One message per member and round; others are asked for the test alone."""
    members = Members(tmp_path, model=net())
    transport = Faulty(members, lambda name, request, reply: reply)
    config = settings("fedavg", rounds=3, per_round=2)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    kinds = [(r.kind, r.round, r.test) for _, r in transport.requests if r.kind in _WORK]
    assert sorted(kinds) == sorted(
        [("train", 0, "")] * 2
        + [(kind, t, "plain") for t in (1, 2) for kind in ("train", "evaluate") for _ in "ab"]
        + [("evaluate", 3, "detailed")] * 4
    )


_WORK = ("train", "survey", "evaluate")


def test_weights_to_test_that_are_not_those_to_train(tmp_path: Path) -> None:
    """FedExP's model is the mean of its last two iterates."""
    members = Members(tmp_path, model=net("gn"))
    run = coordinator(members, settings("fedexp", rounds=3), tmp_path / "run")
    result = run.run()
    sim = replay(run, members)
    assert result.records[0][-1]["accuracy"] == pytest.approx(sim.evaluate()["accuracy"])
    assert result.records[0][-1]["loss"] == pytest.approx(sim.evaluate()["loss"], rel=1e-5)
    assert tree.equal(run.session.output(), sim.output)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_tests_of_other_tasks_are_exact(task: str, tmp_path: Path) -> None:
    model = net("gn", 1 if task == "regression" else 3)
    members = Members(tmp_path, datasets(task), model)
    run = coordinator(members, settings(rounds=2), tmp_path / "run")
    record = run.run().records[0][-1]
    for name, value in replay(run, members).evaluate(detailed=True).items():
        assert record[name] == pytest.approx(value, rel=1e-5), name


def test_a_run_is_extended(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    first = coordinator(members, settings("scaffold", rounds=2), tmp_path / "run")
    first.run()
    config = settings("scaffold", rounds=4)
    longer = coordinator(members, config, tmp_path / "run", resume=True)
    result = longer.run()
    assert [r["round"] for r in result.records[0]] == [1, 2, 3, 4]
    assert_same(longer, replay(longer, members))
    assert longer.roster.run == first.roster.run


def test_a_complete_run_is_resumed_without_training(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    config = settings("scaffold")
    before = coordinator(members, config, tmp_path / "run").run()
    transport = Faulty(members, lambda name, request, reply: reply)
    again = coordinator(members, config, tmp_path / "run", resume=True, transport=transport)
    result = again.run()
    assert not any(r.kind == "train" for _, r in transport.requests)
    assert result.last == before.last


def test_members_without_anything_to_test_on(tmp_path: Path) -> None:
    data = datasets()
    empty = {"x_test": data[0].x_train[:0], "y_test": data[0].y_train[:0]}
    members = Members(tmp_path, [replace(d, **empty) for d in data], net())
    run = coordinator(members, settings(split="given"), tmp_path / "run")
    result = run.run()
    assert np.isnan(result.last.mean)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["last"]["mean"] is None
    assert kedge.load(tmp_path / "run", model=net()).model is not None


def test_settings_of_a_simulation_are_refused(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    for changes, text in (
        ({"seeds": (0, 1)}, "a federation trains one"),
        ({"validation": 0.1}, "validation is not for real federations"),
        ({"split": "pooled(0.4, 0.3)"}, "is not for members"),
    ):
        with pytest.raises(FieldError, match=text):
            coordinator(members, settings(**changes), tmp_path / "run")
    with pytest.raises(FieldError, match="per_round = 4 is more than the 3 members"):
        few = Members(tmp_path / "few", datasets()[:3], net())
        coordinator(few, settings(per_round=4, clients=0), tmp_path / "run").run()
    coordinator(members, settings(rounds=1), tmp_path / "run").run()
    with pytest.raises(KedgeError, match="holds a run already"):
        coordinator(members, settings(rounds=1), tmp_path / "run")


def test_a_run_is_stopped_from_outside_and_goes_on(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    config = settings("scaffold", rounds=4)

    def watch(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 1:
            request_stop(tmp_path / "run")

    with pytest.raises(Interrupted, match="stopped after round 2 of seed 0. Resume with"):
        coordinator(members, config, tmp_path / "run", watch=watch).run()
    again = coordinator(members, config, tmp_path / "run", resume=True)
    again.run()
    assert_same(again, replay(again, members))


def test_a_stop_while_members_join_leaves_nothing(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    config, rules = settings("scaffold", clients=5), replace(QUICK, join_s=600.0)
    looks: list[bool] = []

    def stop() -> bool:
        looks.append(len(looks) == 2)
        return looks[-1]

    run = coordinator(members, config, tmp_path / "run", rules=rules, stop=stop)
    run.transport.wait = lambda seconds: None  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="before all members had joined; nothing is saved"):
        run.run()
    assert not (tmp_path / "run").exists()


def test_a_stop_does_not_wait_for_all_attempts(tmp_path: Path) -> None:
    """A round in which members are missing is not asked for again, and is repeated on resume."""
    members = Members(tmp_path, model=net())
    dead = True

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if dead and (request.kind, request.round) == ("train", 1) else reply

    config, transport = settings("scaffold"), Faulty(members, fault)

    def stop() -> bool:
        return dead and any(r.kind == "train" and r.round == 1 for _, r in transport.requests)

    with pytest.raises(Interrupted, match="stopped after round 1 of seed 0. Resume with"):
        coordinator(members, config, tmp_path / "run", transport=transport, stop=stop).run()
    assert transport.waits == 0
    dead = False
    again = coordinator(members, config, tmp_path / "run", transport=transport, resume=True)
    again.run()
    assert_same(again, replay(again, members))


def test_messages_contain_no_pickle_and_one_blob(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    seen: list[bytes] = []

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        seen.extend([request.pack(), reply])
        return reply

    coordinator(
        members, settings("scaffold"), tmp_path / "run", transport=Faulty(members, fault)
    ).run()
    folder = str(tmp_path).encode()
    for message in seen:
        size = int.from_bytes(message[:8], "little")
        assert json.loads(message[8 : 8 + size])["__metadata__"].keys() == {"kedge"}
        assert folder not in message
