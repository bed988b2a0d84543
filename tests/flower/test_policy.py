"""The release policy: what it forbids is a code at the server, and a reason in the member's log."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.method import parse
from kedge.core.part import parts
from kedge.core.work import take_jobs
from kedge.errors import FieldError, Paused
from kedge.federation.member.policy import OPEN, Policy, contents, declared
from kedge.federation.messages import MemberRequest, reply_header
from kedge.session import wire
from tests.flower.faulty import Faulty, training
from tests.flower.federations import (
    Members,
    assert_same,
    coordinator,
    datasets,
    net,
    replay,
    settings,
)


def run_with(tmp_path: Path, policy: Policy, method: str = "fedavg", **changes: Any) -> Any:
    """A run in which south has a policy; with what it replied to requests to train."""
    model = changes.pop("net", None) or net("gn")
    members = Members(tmp_path, model=model, policies={"south": policy})
    replies: list[bytes] = []

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "south":
            replies.append(reply)
        return reply

    config = settings(method, per_round=0, **changes)
    run = coordinator(members, config, tmp_path / "run", transport=Faulty(members, fault))
    run.run()
    return run, members, replies


def cohorts(run: Any) -> list[list[int]]:
    return [record["cohort"] for record in run.recorder.records]


@pytest.mark.parametrize(
    ("policy", "method", "reason"),
    [
        (Policy(parts=("fedprox",)), "scaffold", "the part 'scaffold', which is not allowed"),
        (Policy(uploads=("update", "test")), "scaffold", "uploads of scaffold: P numbers"),
        (Policy(uploads=("loss", "test")), "fedavg", "the update of"),
        (Policy(uploads=("update",)), "fedbr(rows=4, samples=3, width=5, out=3)", "of fedbr"),
        (Policy(max_mb=0.0001), "fedavg", "more than max_mb=0.0001"),
        (Policy(max_updates=2), "fedavg", "3 updates are more than max_updates=2"),
        (Policy(min_per_class=9), "fedlc", "has fewer than 9 samples"),
    ],
)
def test_what_the_method_declares_is_checked_when_members_agree(
    policy: Policy, method: str, reason: str, tmp_path: Path
) -> None:
    run, members, replies = run_with(tmp_path, policy, method)
    assert cohorts(run) == [[0, 1, 3]] * 3
    assert "refused with POLICY" in members.log("south")
    assert reason in members.log("south")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "south is excluded: it may not answer; its release policy says why" in log
    assert reason not in log
    assert all(reason.encode() not in reply for reply in replies)
    assert_same(run, replay(run, members))


@pytest.mark.parametrize("policy", [Policy(min_samples=100), Policy(kinds=("train",))])
def test_a_member_may_not_even_join(policy: Policy, tmp_path: Path) -> None:
    run, members, _ = run_with(tmp_path, policy, clients=0)
    assert [seat.name for seat in run.roster.participants] == ["east", "north", "west"]
    assert "refused with POLICY" in members.log("south")


def test_a_request_of_a_kind_that_is_not_answered(tmp_path: Path) -> None:
    """Training goes on without a test; a survey that may not be answered excludes."""
    run, _, replies = run_with(tmp_path, Policy(kinds=("join", "train")))
    assert cohorts(run) == [[0, 1, 2, 3]] * 3
    assert all(record["tested"] == 3 for record in run.recorder.records)
    assert all(b"sums" not in reply for reply in replies)
    run, *_ = run_with(tmp_path / "few", Policy(min_test_samples=50))
    assert all(record["tested"] == 3 for record in run.recorder.records)


def test_rounds_are_counted_over_all_runs(tmp_path: Path) -> None:
    """A server cannot ask for more by starting anew."""
    policy = Policy(max_updates=4)
    _, members, _ = run_with(tmp_path, policy)
    config = settings("fedavg", per_round=0)
    members.start("south")
    again = coordinator(members, config, tmp_path / "again")
    again.run()
    assert cohorts(again) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]
    assert "max_updates=4, and as many have left already" in members.log("south")


def test_the_loss_may_stay(tmp_path: Path) -> None:
    run, members, replies = run_with(tmp_path, Policy(uploads=("update",)))
    assert cohorts(run) == [[0, 1, 2, 3]] * 3
    trained = [r for r in replies if reply_header(r)[0].kind == "train"]
    for reply in trained:
        assert not float(wire.unpack(reply, "reply")["update"].losses["task"])
    assert_same(run, replay(run, members))


def update_norms(replies: list[bytes]) -> list[float]:
    values = [
        wire.unpack(r, "reply")["update"] for r in replies if reply_header(r)[0].kind == "train"
    ]
    return [float(tree.sq_norm(v.delta.params).sqrt()) for v in values]


def test_clip_bounds_the_update(tmp_path: Path) -> None:
    free = update_norms(run_with(tmp_path / "free", OPEN)[2])
    clipped = update_norms(run_with(tmp_path / "clipped", Policy(clip=free[0] / 2))[2])
    assert clipped == pytest.approx([free[0] / 2] * 3, rel=1e-4)
    loose = update_norms(run_with(tmp_path / "loose", Policy(clip=1e6))[2])
    assert loose == pytest.approx(free, rel=1e-6)


def test_noise_has_its_size_and_is_the_same_for_the_same_request(tmp_path: Path) -> None:
    policy = Policy(clip=0.01, noise=2.0)
    run, members, replies = run_with(tmp_path, policy)
    [first, second, _] = update_norms(replies)
    count = tree.numel(run.bound.initial.params)
    assert first == pytest.approx(0.02 * math.sqrt(count), rel=0.25)
    assert first != second
    member = members.start("south")
    secret = member.folder.secret
    assert len(secret) == 32
    assert (tmp_path / "south" / "secret").stat().st_mode & 0o077 == 0
    assert not any(secret in reply for reply in replies)
    train = [r for _, r in run.transport.requests if training(r, 2) and r.client == 2]
    again = wire.unpack(member.handle(train[0].pack()), "reply")["update"]
    last = [r for r in replies if reply_header(r)[0].kind == "train"][-1]
    assert tree.equal(again, wire.unpack(last, "reply")["update"])


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_statistics_of_batchnorm_are_clipped_and_noisy(batchnorm: str, tmp_path: Path) -> None:
    """With the update, as one vector; those that stay are neither."""
    policy = Policy(clip=1e-3)
    run, _, replies = run_with(tmp_path, policy, net=net("bn"), batchnorm=batchnorm)
    assert cohorts(run) == [[0, 1, 2, 3]] * 3
    for reply in replies:
        if reply_header(reply)[0].kind == "train":
            delta = wire.unpack(reply, "reply")["update"].delta
            statistics = {n: x for n, x in delta.buffers.items() if "running" in n}
            assert bool(statistics) == (batchnorm == "average")
            norm = float(tree.sq_norm(delta.params | statistics).sqrt())
            assert norm == pytest.approx(1e-3, rel=1e-4)


def test_whole_numbers_are_refused_in_the_first_round(tmp_path: Path) -> None:
    """They can be neither clipped nor made noisy; the member is excluded, and keeps its data."""
    run, members, replies = run_with(tmp_path, Policy(clip=1.0), "krum(byzantine=0)")
    assert cohorts(run) == [[0, 1, 3]] * 3
    assert "krum uploads whole numbers" in members.log("south")
    assert "Traceback" not in members.log("south")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "south is excluded: it may not answer; its release policy says why" in log
    assert all(b"whole numbers" not in reply for reply in replies)
    assert_same(run, replay(run, members))


def test_a_policy_that_everybody_has_pauses_the_run(tmp_path: Path) -> None:
    policies = dict.fromkeys(("east", "north", "south"), replace(OPEN, parts=()))
    members = Members(tmp_path, model=net(), policies=policies)
    run = coordinator(members, settings("scaffold", per_round=0), tmp_path / "run")
    with pytest.raises(Paused, match="1 of 4 members replied, 2 are needed.*east is excluded: it"):
        run.run()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "1 of 4 members agree on the terms" in log


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('kinds = ["join", "train"]\nparts = []\nmax_mb = 5\nclip = 1.0\nnoise = 0.5\n')
    expected = Policy(kinds=("join", "train"), parts=(), max_mb=5.0, clip=1.0, noise=0.5)
    assert Policy.load(path) == expected
    path.write_text("max_mb = inf")
    assert Policy.load(path) == Policy()
    for text, error in (
        ("max_mb = 'x'", "max_mb = 'x' is not a finite number at least 0"),
        ("maximum = 3", "no key 'maximum'. Did you mean 'max_mb'"),
        ("noise = 1.0", "noise is in units of clip"),
        ("min_samples = -1", "min_samples = -1 is below 0"),
        ("kinds = ['tain']", "'tain' is not one of: join"),
        ("kinds = [", "cannot be read as a policy"),
        ("min_samples = true", "min_samples = True is not a whole number at least 0"),
    ):
        path.write_text(text)
        with pytest.raises(FieldError, match=error.replace("(", r"\(")):
            Policy.load(path)
    with pytest.raises(FieldError, match="cannot be read"):
        Policy.load(tmp_path / "none.toml")


@pytest.mark.parametrize("name", sorted(parts))
def test_every_part_declares_what_leaves(name: str) -> None:
    """The names in a policy are complete: no reply has an array of another name."""
    cls = parts[name]
    problem = images(norm="bn", task=cls.tasks[0])
    sim = problem.simulate(parse(cls(**cls.tiny)), "loop")
    cohort = sim.cohort([0])
    bound, job = cohort.bound, take_jobs(cohort.jobs, 0)
    carry = client.step(bound, job, client.begin(bound, job), cohort.batches[0, 0])
    update = client.end(bound, job, carry).update
    leaving = {n for n, v in contents(update, bound).items() if tree.numel(v)}
    assert leaving <= declared(sim.bound).keys()


def test_class_counts_leave_only_if_there_are_enough(tmp_path: Path) -> None:
    data = datasets()
    members = Members(tmp_path, data, net(), {"south": Policy(min_per_class=50)})
    config = settings("fedavg", per_round=0, class_weights="balanced", clients=0)
    run = coordinator(members, config, tmp_path / "run")
    run.run()
    assert "south" not in [seat.name for seat in run.roster.participants]
    assert "has fewer than 50 samples" in members.log("south")
