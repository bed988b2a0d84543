"""Members, bytes and a coordinator: bit for bit the loop engine, with the same cohorts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kedge.core import rng, tree
from kedge.core.method import parse
from kedge.core.part import Part, parts
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.member.policy import OPEN
from kedge.federation.messages import MemberRequest
from kedge.sim.simulation import Simulation
from tests.flower.faulty import Faulty, training
from tests.flower.federations import (
    NAMES,
    Members,
    assert_same,
    coordinator,
    datasets,
    net,
    replay,
    settings,
    simulation,
)

NOISY = dataclasses.replace(OPEN, clip=0.5, noise=0.2)
ADDED = "+clip(norm=0.5)+gauss(std=0.1)"  # by such a policy
WHOLE = ("fedbr", "fedmix", "krum", "naivemix")  # they upload whole numbers


@pytest.fixture
def noise_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members and the server draw noise as a simulation does, not from their secrets."""
    for module in ("member.member", "coordinator.coordinator"):
        name = f"kedge.federation.{module}.noise_of"
        monkeypatch.setattr(name, lambda key: rng.normal_like)


def tiny(name: str) -> str:
    cls: type[Part] = parts[name]
    return repr(parse(dataclasses.replace(cls(), **cls.tiny)))


def assert_same_states(run: Coordinator, sim: Simulation, members: Members) -> None:
    """The states on disk, as a member that restarts finds them."""
    for k, name in enumerate(members.names):
        accepted, member = run.session.ledger[k], members.start(name)
        place = member.folder.place(run.roster.run, member.dataset.fingerprint)
        assert place is not None
        seat = member._take(run.roster.run, place)
        seat.load(accepted + 1, accepted)
        state = tree.to_wire(seat.silo.state(accepted))
        assert tree.equal(state, tree.to_wire(tree.take(sim.store.rows, k)))


def run_both(tmp_path: Path, members: Members, method: str, **changes: object) -> Coordinator:
    run = coordinator(members, settings(method, **changes), tmp_path / "run")
    run.run()
    sim = replay(run, members)
    sim.finish()
    assert_same(run, sim)
    assert_same_states(run, sim, members)
    return run


@pytest.mark.long
@pytest.mark.usefixtures("noise_of_the_seed")
@pytest.mark.parametrize("name", ["fedavg", *sorted(parts)])
def test_every_part(name: str, tmp_path: Path) -> None:
    """And no honest reply is taken for a bad one."""
    cls = parts[name] if name != "fedavg" else Part
    model = net(outputs=1 if cls.tasks[0] == "regression" else 3)
    members = Members(tmp_path, datasets(cls.tasks[0]), model)
    method = name if name == "fedavg" else tiny(name)
    run = run_both(tmp_path, members, method, rounds=2)
    assert not any(seat.strikes or seat.excluded for seat in run.roster.participants)


@pytest.mark.parametrize("policy", ["average", "local", "frozen", "batch"])
def test_a_composition_and_the_policies_of_batchnorm(policy: str, tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    run_both(tmp_path, members, "scaffold+fedprox(mu=0.1)+fedexp", batchnorm=policy)


@pytest.mark.parametrize("method", ["fedper", "fedbn", "ditto"])
def test_private_leaves_and_personal_models(method: str, tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    run = run_both(tmp_path, members, method)
    sim = replay(run, members)
    reports = sim.evaluate_clients(personal=True)
    expected = [report["accuracy"] for report in reports]
    assert run.recorder.records[-1]["per_personal"] == pytest.approx(expected)


@pytest.mark.parametrize("refresh", ["round", "once"])
def test_surveys_before_every_round_and_before_the_first(refresh: str, tmp_path: Path) -> None:
    """Those after the last round are of ccvr and spherefed, among all parts."""
    method = f"fedbr(rows=4, samples=3, width=5, out=3, refresh={refresh})"
    run_both(tmp_path, Members(tmp_path, model=net()), method)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_other_tasks(task: str, tmp_path: Path) -> None:
    model = net("gn", 1 if task == "regression" else 3)
    run_both(tmp_path, Members(tmp_path, datasets(task), model), "fedprox(mu=0.1)")


def test_a_model_of_the_zoo_with_augmentation_and_a_schedule(tmp_path: Path) -> None:
    members = Members(tmp_path)
    config = settings(
        model="mlp(hidden=[8], norm=bn)", augment="crop(1)+flip", schedule="exponential(0.9)",
        optimizer="sgd", momentum=0.5, weighting="uniform", epochs=2.0,
    )  # fmt: skip
    run = coordinator(members, config, tmp_path / "run")
    run.run()
    members.model = run.bound.model.template
    assert_same(run, replay(run, members))


def behind_policies(tmp_path: Path, method: str, task: str = "classification") -> Coordinator:
    """A run of members with a policy of clip and noise, and what it must equal."""
    model = net(outputs=1 if task == "regression" else 3)
    members = Members(tmp_path, datasets(task), model, dict.fromkeys(NAMES, NOISY))
    run = coordinator(members, settings(method, rounds=2), tmp_path / "run")
    run.run()
    assert not any(seat.strikes or seat.excluded for seat in run.roster.participants)
    same = dataclasses.replace(run.roster.terms, method=method + ADDED)
    sim = simulation(members.data, same, model)
    for record in run.recorder.records:
        sim.run_round(record["cohort"])
    sim.finish()
    assert_same(run, sim)
    return run


@pytest.mark.usefixtures("noise_of_the_seed")
@pytest.mark.parametrize("method", ["scaffold", "ccvr", "fedcm+fednova"])
def test_policies_are_a_simulation_of_the_parts_that_they_add(method: str, tmp_path: Path) -> None:
    """Updates, statistics, uploads, contributions and answers to surveys."""
    behind_policies(tmp_path, method)


@pytest.mark.long
@pytest.mark.usefixtures("noise_of_the_seed")
@pytest.mark.parametrize("name", sorted({*parts} - {*WHOLE, "clip", "gauss", "groupdro"}))
def test_policies_with_every_part(name: str, tmp_path: Path) -> None:
    """But for groupdro, which takes the logarithm of a sum that noise makes negative."""
    behind_policies(tmp_path, tiny(name), parts[name].tasks[0])


@pytest.mark.usefixtures("noise_of_the_seed")
def test_terms_that_end_with_clip_and_noise(tmp_path: Path) -> None:
    """A policy that asks for as much adds nothing, one that asks for less neither."""
    weaker = dataclasses.replace(OPEN, clip=1.0, noise=0.05)
    members = Members(tmp_path, model=net(), policies={"south": NOISY, "north": weaker})
    run_both(tmp_path, members, "scaffold" + ADDED)


def test_noise_is_the_members_own_and_equal_for_equal_requests(tmp_path: Path) -> None:
    """The seed does not tell it; nor does it depend on the attempt or the process."""
    members = Members(tmp_path, model=net())
    replies: dict[str, bytes] = {}

    def keep(name: str, request: MemberRequest, reply: bytes) -> bytes:
        replies[name] = reply if training(request) else replies.get(name, b"")
        return reply

    transport = Faulty(members, keep)
    config = settings("scaffold" + ADDED, rounds=1, per_round=0)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert not tree.equal(run.session.server.weights, replay(run, members).server.weights)
    for node, request in transport.requests:
        if request.kind == "train":
            name = node.removeprefix("node of ")
            assert replies[name] == members.start(name).handle(request.pack())
