"""Numbers that are not finite: none is taken, and none is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.core.update import Update
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.data.datasets import Dataset
from kedge.errors import NotFinite, WireError
from kedge.federation.member.policy import OPEN, Policy
from kedge.federation.member.silo import Silo
from kedge.federation.messages import MemberRequest
from kedge.session import wire
from kedge.session.session import Broadcast
from kedge.session.terms import DataSchema, Terms
from tests.attacks.hostile import (
    RUN,
    Server,
    code,
    linear,
    norm,
    patients,
    reads_a_row,
    set_one,
    update,
    with_first,
    with_statistics,
)

INF, NAN = float("inf"), float("nan")
BAD = (INF, -INF, NAN)
NOISY = Policy(clip=1.0, noise=1.0)
POLICIES = {"none": None, "noise": NOISY, "clip": Policy(clip=1.0), "open": OPEN}


def refused(server: Server, reply: bytes) -> None:
    assert code(reply) == "BAD_REQUEST"
    assert "has a number that is not finite" in server.log


# -- the attack -----------------------------------------------------------------------------------


def three_outputs() -> nn.Module:
    module = nn.Sequential()
    module.add_module("head", nn.Linear(8, 3))
    return module


def test_a_weight_of_minus_infinity_does_not_switch_clipping_off(tmp_path: Path) -> None:
    """The norm was NaN, so the factor was 1: rows left unclipped, far above the noise."""
    data = replace(patients(), outputs=3)
    server = Server(
        tmp_path, NOISY, three_outputs(), data, batch=2, steps=1, optimizer="sgd(lr=100000.0)"
    )
    assert server.agree() == ""
    down = server.down()
    bias = down.weights.params["head.bias"].clone()
    bias[2] = -INF  # a class that nobody has: its probability is 0, all else is finite
    hostile = down.weights.params | {"head.bias": bias}
    reply = server.train(Broadcast(Weights(hostile, {}), {}))
    refused(server, reply)
    assert server.released("update") == 0
    honest = update(server.train())
    assert norm(honest) < 1 + 6 * 27**0.5  # clipped to 1, and noise of 1 on 27 numbers


# -- every broadcast, everywhere in it ------------------------------------------------------------


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_to_train_are_finite(number: float, policy: str, tmp_path: Path) -> None:
    server = Server(tmp_path, POLICIES[policy])
    assert server.agree() == ""
    down = server.down()
    refused(server, server.train(with_first(down, set_one(number))))
    assert server.released("update") == 0
    assert code(server.train()) == ""


@pytest.mark.parametrize("number", BAD)
def test_statistics_are_finite(number: float, tmp_path: Path) -> None:
    server = Server(tmp_path, module=with_statistics())
    assert server.agree() == ""
    down = server.down()
    buffers = with_first(down.weights.buffers, set_one(number))
    refused(server, server.train(down._replace(weights=down.weights._replace(buffers=buffers))))


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("method", ["scaffold", "fedproto", "fedcm+feddc", "fedtr"])
def test_what_parts_send_is_finite(method: str, number: float, tmp_path: Path) -> None:
    server = Server(tmp_path, method=method)
    assert server.agree() == ""
    down = server.down()
    leaves = list(tree.leaves(down.sent))
    for k in range(len(leaves)):  # each array of each part, however deep
        if not leaves[k].is_floating_point():
            continue
        places = iter(range(len(leaves)))
        sent = tree.map(
            lambda x, k=k, places=places: set_one(number)(x.clone()) if next(places) == k else x,
            down.sent,
        )
        refused(server, server.train(down._replace(sent=sent)))
    assert code(server.train()) == ""


@pytest.mark.parametrize("number", BAD)
def test_weights_to_test_are_finite(number: float, tmp_path: Path) -> None:
    server = Server(tmp_path, split="holdout(0.2)")
    assert server.agree() == ""
    weights = server.down().weights
    hostile = with_first(weights, set_one(number))
    refused(server, server.ask("evaluate", test="plain", value={"output": hostile}))
    rides = {"down": server.down(), "output": hostile}
    refused(server, server.ask("train", test="plain", value=rides))
    assert server.released("test") == 0


@pytest.mark.parametrize("number", BAD)
def test_initial_weights_are_finite(number: float, tmp_path: Path) -> None:
    server = Server(tmp_path, module=with_statistics())
    assert server.agree(with_first(server.initial, set_one(number))) == "BAD_REQUEST"
    buffers = with_first(server.initial.buffers, set_one(number))
    assert server.agree(server.initial._replace(buffers=buffers)) == "BAD_REQUEST"
    assert not (tmp_path / "runs" / RUN / "seat.json").exists()


@pytest.mark.parametrize("number", BAD)
def test_broadcasts_before_surveys_are_finite(number: float, tmp_path: Path) -> None:
    method = "fedbr(rows=4, samples=3, width=5, out=3)"
    server = Server(tmp_path, method=method)
    assert server.agree() == ""
    down = with_first(server.down(), set_one(number))
    refused(server, server.ask("survey", part="fedbr", value={"down": down}))
    assert server.released("survey") == 0


def a_silo(method: str = "scaffold", policy: Policy = OPEN) -> tuple[Silo, Broadcast]:
    """A silo without Flower, and what an honest server broadcasts to it."""
    problem = images(norm="bn", sizes=(14,))
    fed, model = problem.federation, Model(problem.module)
    terms = Terms(
        DataSchema(fed.input_shape, "classification", 3), 1, 14, method=method, batch=5,
        dtype="float64",
    )  # fmt: skip
    silo = Silo(terms, model, fed, 0, releases=policy.releases(parse(method)))
    return silo, Broadcast(silo.bound.initial, silo.bound.sent(silo.bound.server()))


def answer(silo: Silo, down: bytes) -> bytes:
    """What a silo sends after training."""
    request = silo.request(0, silo.read(wire.unpack(down, "down")))
    return wire.pack_finite("update", silo.answer(request))


@pytest.mark.parametrize("number", BAD)
def test_a_silo_without_flower_takes_finite_numbers_only(number: float) -> None:
    silo, down = a_silo()
    assert answer(silo, wire.pack("down", down))
    hostile = [
        with_first(down, set_one(number)),
        down._replace(sent=with_first(down.sent, set_one(number))),
        down._replace(
            weights=down.weights._replace(buffers=with_first(down.weights.buffers, set_one(number)))
        ),
    ]
    for one in hostile:
        with pytest.raises(WireError, match="has a number that is not finite"):
            answer(silo, wire.pack("down", one))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", BAD)
def test_all_types_of_real_numbers_are_checked(dtype: torch.dtype, number: float) -> None:
    value = {"a": {"b": torch.zeros(3, 5, dtype=dtype), "c": torch.zeros(())}}
    wire.unpack(wire.pack("x", value), "x")
    value["a"]["b"][1, 2] = number
    with pytest.raises(WireError, match=r"'a\|b' has a number that is not finite"):
        wire.unpack(wire.pack("x", value), "x")
    template = wire.template_of(value)
    with pytest.raises(WireError, match="not finite"):
        wire.unpack(wire.pack("x", value), "x", template)


def test_finite_numbers_of_all_sizes_pass() -> None:
    """Their sum may overflow; whole numbers and empty arrays are finite."""
    value = {
        "huge": torch.full((1000,), 3.4e38),
        "double": torch.full((3,), -1.7e308, dtype=torch.float64),
        "half": torch.full((9,), 6e4, dtype=torch.float16),
        "brain": torch.full((9,), 3e38, dtype=torch.bfloat16),
        "subnormal": torch.tensor([1e-45, -0.0, 0.0]),
        "empty": torch.zeros(0, 3),
        "whole": torch.tensor([2**62, 2**62, 2**62]),
        "bytes": torch.tensor([255], dtype=torch.uint8),
        "truth": torch.tensor([True, False]),
    }
    assert tree.equal(wire.unpack(wire.pack("x", value), "x"), value)
    assert tree.is_finite(value)
    assert not tree.is_finite(torch.tensor([1 + 1j, complex(0, INF)]))


def test_other_arrays_than_the_parts_send_are_refused(tmp_path: Path) -> None:
    """By broadcasting, one update would become many, each with noise of its own."""
    server = Server(tmp_path, method="scaffold")
    assert server.agree() == ""
    down = server.down()
    wide = tree.map(lambda x: x.expand(100, *x.shape).clone(), down.sent)
    double = tree.map(torch.Tensor.double, down.sent)
    for sent in (wide, double, down.sent | {"more": torch.zeros(3)}, {}):
        assert code(server.train(down._replace(sent=sent))) == "BAD_REQUEST"
    assert server.released("update") == 0


# -- what is given --------------------------------------------------------------------------------


def overflowing(server: Server) -> Broadcast:
    """Finite weights whose logits are not."""
    down = server.down()
    return down._replace(weights=tree.map(lambda x: torch.full_like(x, 3e38), down.weights))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_that_is_not_finite_does_not_leave(policy: str, tmp_path: Path) -> None:
    server = Server(tmp_path, POLICIES[policy])
    assert server.agree() == ""
    assert code(server.train(overflowing(server))) == "NOT_FINITE"
    assert "is not finite" in server.log
    assert "Traceback" not in server.log


def test_refusals_count_since_they_tell_a_bit(tmp_path: Path) -> None:
    """Finite weights can be made to overflow on one row alone, and so ask a question about it."""
    server = Server(tmp_path, Policy(max_updates=3), rounds=3)
    assert server.agree() == ""
    hostile = overflowing(server)
    codes = [
        code(server.train(tree.map(lambda x, i=i: x * (1 - i * 1e-6), hostile))) for i in range(6)
    ]
    assert codes == ["NOT_FINITE"] * 3 + ["POLICY"] * 3
    assert server.released("update") == 3
    assert code(server.train(hostile)) == "NOT_FINITE"  # what was asked before may be asked again


def test_refused_tests_count_too(tmp_path: Path) -> None:
    server = Server(tmp_path, replace(OPEN, max_tests=2), split="holdout(0.2)")
    assert server.agree() == ""
    hostile = overflowing(server).weights
    codes = [
        code(
            server.ask("evaluate", test="plain", value={"output": with_first(hostile, set_one(x))})
        )
        for x in (0.0, 1.0, 2.0)
    ]
    assert codes == ["NOT_FINITE", "NOT_FINITE", ""]  # the last has no test in it
    assert server.released("test") == 2
    assert "no test: max_tests=2" in server.log


def test_a_silo_without_flower_gives_finite_numbers_only() -> None:
    silo, down = a_silo("fedavg")
    huge = tree.map(
        lambda x: torch.full_like(x, 1e308) if x.is_floating_point() else x, down.weights
    )
    with pytest.raises(NotFinite, match="not finite"):
        answer(silo, wire.pack("down", down._replace(weights=huge)))


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("field", ["delta", "contribution", "uploads", "losses", "weight", "share"])
def test_no_field_of_a_reply_may_be_other_than_finite(
    field: str, number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part or model makes it, one place looks at all that leaves."""
    server = Server(tmp_path, method="fednova" if field == "contribution" else "scaffold")
    assert server.agree() == ""
    end = client.end

    def hostile(*args: Any) -> Any:
        done = end(*args)
        value = getattr(done.update, field)
        assert any(True for _ in tree.leaves(value))
        bad = {field: with_first(value, lambda x: torch.full_like(x, number))}
        return done._replace(update=done.update._replace(**bad))

    monkeypatch.setattr(client, "end", hostile)
    assert code(server.train()) == "NOT_FINITE"


@pytest.mark.parametrize("number", BAD)
def test_answers_to_surveys_are_finite(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, method="fedbr(rows=4, samples=3, width=5, out=3)")
    assert server.agree() == ""
    survey = client.survey
    monkeypatch.setattr(client, "survey", lambda *args: with_first(survey(*args), set_one(number)))
    reply = server.ask("survey", part="fedbr", value={"down": server.down()})
    assert code(reply) == "NOT_FINITE"


# -- norms ----------------------------------------------------------------------------------------


def released(delta: torch.Tensor, policy: Policy) -> torch.Tensor:
    """What a policy makes of an update."""
    silo, down = a_silo("fedavg", policy)
    job = take_jobs(silo._clients.cohort(silo.request(0, down)).jobs, 0)
    context = client.client_context(silo.bound, job, {})
    update = Update(Weights({"w": delta}, {}))
    for part in silo.bound.parts_with("release"):
        update, _ = part.release(View(context, part, "release"), update)
    return update.delta.params["w"]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e19, 1e30, 3e38])
def test_norms_do_not_overflow(size: float) -> None:
    """The square of a float32 of 1e19 does."""
    found = released(torch.full((100,), size), Policy(clip=2.0))
    assert float(found.double().norm()) == pytest.approx(min(2.0, 10 * size), rel=1e-6)


def test_an_update_whose_norm_is_not_finite_does_not_leave_unclipped() -> None:
    for delta in (torch.tensor([1.0, NAN]), torch.tensor([1.0, -INF])):
        for policy in (Policy(clip=1.0), NOISY):
            with pytest.raises(NotFinite, match="has a number that is not finite"):
                wire.pack_finite("reply", {"w": released(delta, policy)})
    huge = torch.full((3,), 1e300, dtype=torch.float64)  # its square overflows
    assert float(released(huge, Policy(clip=1.0)).norm()) <= 1


def test_a_request_can_still_be_packed(tmp_path: Path) -> None:
    """Who sends is not who checks: the member is."""
    message = MemberRequest("train", RUN, value={"x": torch.tensor([NAN])}).pack()
    with pytest.raises(WireError, match="not finite"):
        MemberRequest.unpack(message)


def test_data_of_a_hostile_scale_give_nothing_away(tmp_path: Path) -> None:
    """The scaling of the terms cannot make inputs infinite."""
    data = patients()
    for std in (1e-45, 1e-300):
        server = Server(tmp_path / str(std), Policy(clip=1.0), data=data)
        schema = replace(server.terms.data, mean=(0.0,) * 8, std=(std,) * 8)
        server.terms = replace(server.terms, data=schema)
        assert server.agree() == ""
        reply = server.train()
        assert code(reply) == "NOT_FINITE" or norm(update(reply)) < 1.001


def test_honest_members_are_not_disturbed(tmp_path: Path) -> None:
    """A model, its statistics, its slots and tests: as before."""
    data = Dataset(
        "north", patients().x_train, patients().y_train, np.zeros(8), np.ones(8),
        "classification", 2,
    )  # fmt: skip
    server = Server(tmp_path, Policy(min_samples=40), with_statistics(), data, method="scaffold")
    assert server.agree() == ""
    assert code(server.train(test="detailed", value={"down": server.down()})) == ""
    assert not reads_a_row(update(server.train()), data)
    assert linear().get_submodule("head") is not None
