"""What a policy bounds is bounded: rows that are really used, rounds, sizes, every field."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.core import tree
from kedge.core.method import parse
from kedge.core.optim import SGD, Adam
from kedge.core.part import Part, parts
from kedge.core.tree import Weights
from kedge.core.update import NO_WEIGHTS, Update
from kedge.data.datasets import Dataset
from kedge.errors import FieldError, TermsError
from kedge.federation.member.policy import OPEN, Policy, written
from kedge.federation.member.releases import Releases
from kedge.federation.member.run_state import agreement_text
from kedge.federation.member.silo import Usage, remaining, usage_of
from kedge.parts.release import Clip, Gauss
from kedge.session import wire
from kedge.session.session import Broadcast
from kedge.session.terms import MAX, DataSchema, Terms
from tests.attacks.hostile import (
    ROWS,
    Server,
    code,
    linear,
    patients,
    reads_a_row,
    update,
    with_statistics,
)

EXAMPLE = Path(__file__).parents[2] / "docs" / "deploy" / "policy.toml"
FIFTY = Policy(min_samples=50)
TRAIN = 54  # rows of a member of which a tenth is held out


def nudged(server: Server, by: float) -> Any:
    down = server.down()
    return down._replace(weights=tree.map(lambda w: w + by, down.weights))


# -- single rows ----------------------------------------------------------------------------------


def test_without_a_policy_everything_leaves(tmp_path: Path) -> None:
    """What the attacks below would read."""
    server = Server(tmp_path, batch=1, steps=1)
    assert server.agree() == ""
    assert reads_a_row(update(server.train()), patients())
    assert "everything may leave" in server.log


@pytest.mark.parametrize(
    "policy",
    [FIFTY, Policy(), Policy.load(EXAMPLE), Policy.load(EXAMPLE).__class__(max_updates=500)],
    ids=["min_samples", "defaults", "example", "another"],
)
def test_rounds_of_one_row_do_not_leave(policy: Policy, tmp_path: Path) -> None:
    server = Server(tmp_path, policy, batch=1, steps=1)
    assert server.agree() == "POLICY"
    assert "the update of round 1 is computed from 1 rows, fewer than min_samples" in server.log
    assert code(server.train(nudged_or_zero())) != ""


def nudged_or_zero() -> Any:
    """A broadcast for a member that has not agreed."""
    weights = Weights({"head.weight": torch.zeros(2, 8), "head.bias": torch.zeros(2)}, {})
    return Broadcast(weights, {})


def test_a_policy_that_becomes_stricter_holds_for_runs_that_were_agreed(tmp_path: Path) -> None:
    server = Server(tmp_path, batch=1, steps=1)
    assert server.agree() == ""
    server.member.policy = FIFTY
    for i in range(20):
        assert code(server.train(nudged(server, i * 1e-3))) == "POLICY"
    assert server.released("update") == 20  # a refusal counts: with class weights it tells labels


#: Terms of rounds that use few rows, and what is counted. The member has 54 rows.
FEW: dict[str, tuple[dict[str, Any], str]] = {
    "one batch": ({"batch": 49, "steps": 1}, "49 rows, fewer"),
    "few steps": ({"batch": 7, "steps": 7}, "49 rows, fewer"),
    "a part of an epoch": ({"epochs": 0.9}, "enough"),
    "a smaller part": ({"epochs": 0.8}, "45 rows, fewer"),
    "replacement": ({"replacement": True}, "rows, fewer than min_samples=50"),
    "steps of one row": ({"batch": 1}, "1 rows in a batch, fewer than min_batch"),
    "one class": ({"class_weights": (1.0, 0.0)}, "rows, fewer than min_samples=50"),
    "light rows": ({"class_weights": (1.0, 0.09)}, "rows, fewer than min_samples=50"),
    "a decay that forgets all": ({"optimizer": "sgd(lr=0.1, weight_decay=10)"}, "9 rows, fewer"),
    "a decay that overshoots": ({"optimizer": "sgd(lr=1.0, weight_decay=30)"}, "9 rows, fewer"),
    "a decay that forgets": ({"optimizer": "sgd(lr=0.1, weight_decay=9)"}, "fewer than min_samp"),
    "momentum and decay": (
        {"optimizer": "sgd(lr=0.1, momentum=0.01, weight_decay=10)"}, "fewer than min_samples",
    ),
    "fedprox that forgets": ({"method": "fedprox(mu=10.0)"}, "9 rows, fewer"),
    "feddyn, which does not tell": ({"method": "feddyn(alpha=10.0)"}, "9 rows, fewer"),
    "fedrep, whose body has the last step": ({"method": "fedrep(head_share=0.9)"}, "9 rows, fewer"),
    "adam as sgd": (
        {"optimizer": "adam(lr=1000000.0, eps=10000000.0, weight_decay=10)"}, "9 rows, fewer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_rounds_that_use_few_rows_do_not_leave(name: str, tmp_path: Path) -> None:
    terms, reason = FEW[name]
    server = Server(tmp_path, FIFTY, **{"batch": 9} | terms)
    if reason == "enough":
        assert server.agree() == ""
        assert code(server.train()) == ""
        return
    assert (server.agree() or code(server.train())) == "POLICY"
    assert reason in server.log


HONEST: list[dict[str, Any]] = [
    {}, {"batch": 54, "steps": 1}, {"batch": 5, "epochs": 5.0}, {"method": "fedprox(mu=0.1)"},
    {"method": "scaffold"}, {"class_weights": (1.0, 4.0)}, {"weighting": "uniform"},
    {"optimizer": "sgd(lr=0.1, momentum=0.9, weight_decay=0.0005)", "epochs": 10.0},
    {"optimizer": "adam"}, {"replacement": True, "epochs": 10.0},
]  # fmt: skip


@pytest.mark.parametrize("terms", HONEST, ids=map(str, HONEST))
@pytest.mark.filterwarnings("ignore:.*assumes plain SGD")
def test_honest_rounds_leave(terms: dict[str, Any], tmp_path: Path) -> None:
    server = Server(tmp_path, FIFTY, **terms)
    assert server.agree() == ""
    assert code(server.train()) == ""


def test_steps_and_batches_have_bounds_of_their_own(tmp_path: Path) -> None:
    server = Server(tmp_path / "a", Policy(min_batch=11))
    assert server.agree() == "POLICY"
    assert "10 rows in a batch, fewer than min_batch=11" in server.log
    server = Server(tmp_path / "b", Policy(min_steps=7))
    assert server.agree() == "POLICY"
    assert "6 steps, fewer than min_steps=7" in server.log
    assert Server(tmp_path / "c", Policy(min_steps=6, min_batch=10)).agree() == ""


def test_a_batch_that_repeats_a_row_is_as_small_as_its_rows(tmp_path: Path) -> None:
    """A member with few rows fills large batches by repeating them."""
    policy = Policy(min_batch=5, min_per_word=0)
    server = Server(tmp_path, policy, data=patients(4), batch=50, steps=1)
    assert server.agree() == "POLICY"
    assert "4 rows in a batch, fewer than min_batch=5" in server.log


def test_usage() -> None:
    rows = torch.tensor([[0, 1, 2], [3, 3, 3]])
    ones = torch.ones(2, 3)
    assert usage_of(rows, ones, torch.ones(2)) == Usage(4, 3, 2)
    assert usage_of(rows, ones, torch.tensor([1.0, 0.05])) == Usage(3, 3, 2)
    assert usage_of(rows, ones, torch.tensor([0.05, 1.0])) == Usage(1, 1, 2)
    assert usage_of(rows, ones, torch.tensor([float("nan"), 1.0])).rows == 0
    heavy = torch.tensor([[9.0, 1.0, 0.8], [9.0, 9.0, 9.0]])
    assert usage_of(rows, heavy, torch.ones(2)) == Usage(3, 2, 2)
    assert usage_of(rows, 0 * ones, torch.ones(2)) == Usage(0, 0, 2)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("decay", [0.5, 8.0, 25.0])
def test_what_remains_of_a_step_is_what_the_optimiser_keeps(
    momentum: float, nesterov: bool, decay: float
) -> None:
    if nesterov and not momentum:
        return
    optim, steps, lr = SGD(momentum=momentum, nesterov=nesterov, weight_decay=decay), 6, 0.125
    found = remaining(optim, lr, 0.0, steps)
    for t in range(steps):  # a gradient of 1 in step t alone
        params = {"w": torch.zeros((), dtype=torch.float64)}
        state = optim.init(params)
        for s in range(steps):
            grads = {"w": torch.tensor(float(s == t), dtype=torch.float64)}
            params, state = optim.update(params, grads, state, torch.tensor(lr).double())
        assert abs(float(params["w"])) / lr == pytest.approx(float(found[t]), rel=1e-6)


def test_what_is_not_known_counts_as_forgotten() -> None:
    last = [0.0, 0.0, 1.0]
    assert remaining(SGD(), 0.1, None, 3).tolist() == last
    assert remaining(Adam(weight_decay=0.1), 0.1, 0.0, 3).tolist() == last
    assert remaining(Adam(), 0.1, 0.0, 3).tolist() == [1.0, 1.0, 1.0]
    assert remaining(SGD(), 0.1, 0.0, 3).tolist() == [1.0, 1.0, 1.0]


# -- rounds ---------------------------------------------------------------------------------------


def test_rounds_beyond_the_terms_are_refused(tmp_path: Path) -> None:
    method = "fedbr(rows=4, samples=3, width=5, out=3)"
    server = Server(tmp_path, rounds=3, method=method, split="holdout(0.2)")
    assert server.agree() == ""
    down = {"down": server.down()}
    output = {"output": server.down().weights}
    assert code(server.train(round=2)) == ""
    for round in (3, 4, 10**6, 999_999_999):
        assert code(server.train(round=round)) == "TERMS"
    assert "round 4 is beyond the 3 agreed" in server.log
    assert code(server.ask("survey", 3, part="fedbr", value=down)) == ""  # after the last round
    assert code(server.ask("evaluate", 3, test="plain", value=output)) == ""
    for round in (4, 10**6):
        assert code(server.ask("survey", round, part="fedbr", value=down)) == "TERMS"
        assert code(server.ask("evaluate", round, test="plain", value=output)) == "TERMS"
    assert code(server.train(round=-1)) == "BAD_REQUEST"
    assert code(server.train(round=10**9)) == "BAD_REQUEST"
    assert server.released("update") == 1


def test_more_rounds_must_be_agreed(tmp_path: Path) -> None:
    server = Server(tmp_path, Policy(max_updates=4), rounds=3)
    assert server.agree() == ""
    server.terms = replace(server.terms, rounds=4)
    assert server.agree() == ""
    assert code(server.train(round=3)) == ""
    server.terms = replace(server.terms, rounds=5)
    assert server.agree() == "POLICY"


# -- terms ----------------------------------------------------------------------------------------

DATA = DataSchema((3,), "classification", 2)
TERMS = Terms(DATA, 2, 80)
NAN, INF = float("nan"), float("inf")
ABSURD: list[dict[str, Any]] = [
    *({"rounds": x} for x in (10**9, MAX + 1, 0, -1, 2.0, True, "3", None, [3])),
    *({"steps": x} for x in (10**12, -1, 1.5, False, "1")),
    *({"batch": x} for x in (2**62, 10**30, 0, -8, 32.0, True)),
    *({"epochs": x} for x in (NAN, INF, -INF, -1, 0, 1e9, True, "1")),
    *({"num_clients": x} for x in (0, -1, 2**62, 2.0)),
    *({"examples": x} for x in (0, -5, 1.5)),
    *({"per_round": x} for x in (-1, 2**62, 0.5)),
    *({"seed": x} for x in (-1, 0.5)),
    *({"dtype": x} for x in ("float16", "load", "int8", 3)),
    *({"weighting": x} for x in ("all", None)),
    *({"replacement": x} for x in (1, "yes")),
    *({"class_weights": x} for x in ((NAN, 1.0), (INF, 1.0), (-1.0, 1.0), ("a", "b"))),
    *({"method": x} for x in (3, None)),
    *(
        {"optimizer": x}
        for x in (
            "sgd(lr=1e30)", "sgd(lr=inf)", "sgd(lr=nan)", "sgd(lr=-0.1)", "none", 3,
            "sgd(weight_decay=inf)", "sgd(momentum=1.0)", "sgd(clip=-1.0)", "sgd(clip=nan)",
            "sgd(schedule='exponential(1e300)')", "sgd(schedule='exponential(10)')",
            "sgd(schedule='step(every=1, gamma=1e9)')", "sgd(schedule='exponential(inf)')",
            "sgd(schedule='exponential(1e90)+exponential(1e-200)')", "adam(eps=0.0)",
        )
    ),
    *({"data": replace(DATA, mean=x)} for x in ((NAN,), (INF,), ("a",))),
    *({"data": replace(DATA, std=x)} for x in ((NAN,), (INF,), (0.0,), (-1.0,))),
    *({"data": replace(DATA, shape=x)} for x in ((-1,), (0,), (1.5,))),
    *({"data": replace(DATA, outputs=x)} for x in (0, -3, 2.0, True)),
]  # fmt: skip


@pytest.mark.parametrize("change", ABSURD, ids=str)
def test_absurd_terms_are_refused_with_a_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    terms = replace(TERMS, **{"rounds": 40} | change)
    with pytest.raises(TermsError) as caught:
        Terms.from_json(terms.to_json())
    [name] = change
    word = name if name != "data" else "data."
    assert word in str(caught.value) or name == "optimizer"
    server = Server(tmp_path)
    server.terms = terms
    assert server.agree() == "TERMS"
    assert "Traceback" not in server.log


def test_sane_terms_are_taken() -> None:
    for change in (
        {"rounds": MAX}, {"steps": MAX}, {"batch": MAX}, {"epochs": 0.01}, {"epochs": 3},
        {"optimizer": "sgd(lr=0.0)"}, {"optimizer": "sgd(lr=0.5, schedule='exponential(0.998)')"},
        {"optimizer": "adam", "rounds": 1000}, {"class_weights": (0.0, 2)}, {"per_round": 1},
    ):  # fmt: skip
        terms = replace(TERMS, **change)  # type: ignore[arg-type]
        assert Terms.from_json(terms.to_json()) == terms
        assert Terms.from_json(terms.to_json()).hash == terms.hash


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "NaN", "1" * 5000, '"' * 3])
def test_texts_that_are_no_terms(text: str, tmp_path: Path) -> None:
    with pytest.raises(TermsError, match="no terms"):
        Terms.from_json(text)
    server = Server(tmp_path)
    reply = server.ask("agree", text=json.dumps({"terms": text, "token": ""}))
    assert code(reply) == "TERMS"


def test_a_round_draws_a_bounded_number_of_rows(tmp_path: Path) -> None:
    for change in ({"batch": 4096, "steps": MAX}, {"batch": 1, "epochs": 1e6, "steps": 0}):
        server = Server(tmp_path / str(len(change)), **change)
        if "epochs" in change:
            server.terms = replace(server.terms, batch=10**6, epochs=1e6, steps=0)
            continue
        assert server.agree() == "TERMS"
        assert "rows of a round would take" in server.log


def test_the_hash_of_the_terms_does_not_replace_the_check(tmp_path: Path) -> None:
    server = Server(tmp_path)
    hostile = replace(server.terms, rounds=10**9)
    text = agreement_text(hostile, "")
    assert code(server.ask("agree", terms=hostile.hash, text=text)) == "TERMS"


# -- the policy itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "clip = nan", "clip = inf", "clip = -inf", "clip = -1.0", "clip = 1.0\nnoise = nan",
        "clip = 1.0\nnoise = inf", "clip = 1.0\nnoise = -0.5", "noise = 1.0", "max_mb = nan",
        "max_mb = -1", f"clip = {10**400}", f"max_mb = {10**400}", "min_batch = -1",
        "min_batch = 1.0", "min_batch = true", "min_steps = -1", "min_samples = nan",
        "max_updates = inf", "max_updates = -1", "min_per_class = -2", "clip = '1.0'",
        "clip = 0\nnoise = 1.0",
    ],
)  # fmt: skip
def test_policies_without_sense_are_refused_when_they_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(FieldError, match="policy.toml: "):
        Policy.load(path)


def test_defaults(tmp_path: Path) -> None:
    """A policy that says nothing about rows lets no single row leave; no policy lets all leave."""
    path = tmp_path / "policy.toml"
    path.write_text("max_updates = 3\n")
    policy = Policy.load(path)
    assert (policy.min_samples, policy.min_batch, policy.min_steps) == (2, 2, 1)
    assert written(OPEN) == "everything may leave"
    assert "min_samples = 2, min_batch = 2" in written(Policy())


# -- clip and noise -------------------------------------------------------------------------------

CLIP = 1e-3
COUNTER = "num_batches_tracked"
WHOLE = ("fedbr", "fedmix", "krum", "naivemix")  # they upload whole numbers
REAL = ["fedavg", *(name for name in sorted(parts) if name not in WHOLE)]


#: Fields for the table of these tests and its model.
IN_FEATURES = {"level": "feature"}
HERE = {"feddf": IN_FEATURES, "flboost": IN_FEATURES, "fedimpro": {"cut": "0"}}


def tiny(name: str) -> str:
    if name == "fedavg":
        return name
    return repr(parse(replace(parts[name](), **parts[name].tiny | HERE.get(name, {}))))


def answers(server: Server) -> list[Update]:
    """All that a member lets leave in a round: its update, and its answers to surveys."""
    assert server.agree() == "", server.log
    down = {"down": server.down()}
    replies = [server.train()]
    for part in server.silo.bound.parts_with("survey"):
        replies.append(server.ask("survey", part=part.name, value=down))
    assert [code(reply) for reply in replies] == [""] * len(replies), server.log
    found = [wire.unpack(reply, "reply")["update"] for reply in replies]
    return [u if u.delta else u._replace(delta=NO_WEIGHTS) for u in found]  # of surveys


def measured(leaving: Update) -> list[Tensor]:
    """All that tells of the data in the units in which it is clipped, array by array."""
    buffers = leaving.delta.buffers.items()
    found = [*leaving.delta.params.values(), *(x for n, x in buffers if COUNTER not in n)]
    found += [x / TRAIN for x in tree.leaves(leaving.contribution)]
    for part, uploads in leaving.uploads.items():
        for name, value in (uploads if isinstance(uploads, dict) else {"": uploads}).items():
            unit = TRAIN if name in parts[part].counted else 1
            found += [x / unit for x in tree.leaves(value)]
    return [x.double() for x in found]


def size(leaving: Update) -> float:
    return float(sum(x.square().sum() for x in measured(leaving))) ** 0.5


@pytest.mark.parametrize("name", REAL)
def test_clip_bounds_all_that_leaves(name: str, tmp_path: Path) -> None:
    """The update, statistics of BatchNorm, uploads, contributions and answers to surveys."""
    method = tiny(name) if name != "clip" else "clip(norm=5)"  # more than the policy allows
    found = answers(Server(tmp_path, Policy(clip=CLIP), with_statistics(), method=method))
    for leaving in found:
        assert size(leaving) == pytest.approx(CLIP if name != "local" else 0, rel=1e-4)


@pytest.mark.parametrize("name", REAL)
def test_with_clip_nothing_else_depends_on_the_data(name: str, tmp_path: Path) -> None:
    """Of two members with equal numbers of samples, all but what is clipped is equal."""
    rest, module = list[list[Update]](), with_statistics()
    for k in range(2):
        data = patients()
        data = replace(data, x_train=data.x_train * (1 + k) + k, y_train=data.y_train ^ k)
        server = Server(tmp_path / str(k), Policy(clip=CLIP), module, data, method=tiny(name))
        rest.append(list(map(_without_content, answers(server))))
    for leaving in rest[0]:
        assert not any(float(loss) for loss in leaving.losses.values())
        assert float(leaving.weight) == TRAIN
        assert float(leaving.share) == pytest.approx(2 * TRAIN / (2 * ROWS))
    assert all(map(tree.equal, *rest))


def _without_content(leaving: Update) -> Update:
    """What is neither clipped nor made noisy."""
    counters = {n: x for n, x in leaving.delta.buffers.items() if COUNTER in n}
    return leaving._replace(delta=Weights({}, counters), contribution={}, uploads={})


def test_no_field_of_an_update_is_forgotten() -> None:
    """A new one needs a decision: it is clipped, known from joining, or zero."""
    known = ("delta", "contribution", "uploads", "losses", "weight", "share")
    assert Update._fields == known


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "fedcm", "ccvr", "fedtr"])
def test_noise_is_on_all_that_leaves(name: str, tmp_path: Path) -> None:
    """In the same units, with the standard deviation noise * clip."""
    policy = Policy(clip=CLIP, noise=2.0)
    found = answers(Server(tmp_path, policy, with_statistics(), method=tiny(name)))
    for leaving in found:
        arrays = [x.reshape(-1) for x in measured(leaving)]
        assert all(bool((x != 0).all()) for x in arrays)
        assert float(torch.cat(arrays).std()) == pytest.approx(2 * CLIP, rel=0.4)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_do_not_leave_with_clip(name: str, tmp_path: Path) -> None:
    server = Server(tmp_path, Policy(clip=1.0), method=tiny(name))
    assert server.agree() == ""
    survey = server.silo.bound.part(name).has("survey")
    reply = server.train()
    if survey:
        reply = server.ask("survey", part=name, value={"down": server.down()})
    assert code(reply) == "POLICY"
    assert f"{name} uploads whole numbers, which can be neither clipped nor made" in server.log


BOTH = (Clip(1.0), Gauss(0.5))
ADDED: dict[str, tuple[tuple[Part, ...], tuple[Part, ...]]] = {  # by clip=1; with noise=0.5, too
    "scaffold": (BOTH[:1], BOTH),
    "scaffold+clip(norm=1.0)": ((), BOTH),
    "clip(norm=0.5)+scaffold": ((), BOTH),
    "clip(norm=1.5)": (BOTH[:1], BOTH),
    "clip(norm=1.0)+gauss(std=0.5)+fedprox": (BOTH[:1], ()),
    "clip(norm=0.1)+gauss(std=3.0)": (BOTH[:1], ()),
    "clip(norm=1.0)+gauss(std=0.4)": (BOTH[:1], BOTH),
    "clip(norm=1.1)+gauss(std=0.5)": (BOTH[:1], BOTH),
    "gauss(std=0.5)+clip(norm=1.0)": ((), BOTH),  # noise that is clipped is less noise
    "gauss(std=9.0)": (BOTH[:1], BOTH),
}


@pytest.mark.parametrize("method", ADDED)
def test_what_a_policy_adds_to_a_method(method: str) -> None:
    clipped, noisy = ADDED[method]
    assert Policy(clip=1.0).releases(parse(method)) == clipped
    assert Policy(clip=1.0, noise=0.5).releases(parse(method)) == noisy
    assert OPEN.releases(parse(method)) == ()


def test_terms_that_clip_at_least_as_much_are_left_as_they_are(tmp_path: Path) -> None:
    """A policy that adds a part adds it last; one that adds nothing changes no bit."""
    strong = f"scaffold+clip(norm={CLIP / 2})"
    module = linear()
    [free] = answers(Server(tmp_path / "free", OPEN, module, method=strong))
    [bounded] = answers(Server(tmp_path / "bounded", Policy(clip=CLIP), module, method=strong))
    assert tree.equal(bounded._replace(losses=free.losses), free)
    assert size(free) == pytest.approx(CLIP / 2, rel=1e-4)
    weak = Server(tmp_path / "weak", Policy(clip=CLIP), method="gauss(std=1.0)+clip(norm=5.0)")
    assert size(answers(weak)[0]) == pytest.approx(CLIP, rel=1e-4)


def test_the_example_policy_is_safe_or_says_what_it_is() -> None:
    policy, text = Policy.load(EXAMPLE), EXAMPLE.read_text()
    assert policy.clip > 0
    assert policy.noise > 0
    assert policy.min_batch > 2
    assert "can read single rows" in " ".join(text.replace("#", " ").split())
    assert all(part != "scaffold" for part in policy.parts)  # it uploads more than the update


def test_the_example_policy_lets_an_honest_run_train(tmp_path: Path) -> None:
    for method in ("fedavg", "fedprox(mu=0.1)"):
        server = Server(tmp_path / method, Policy.load(EXAMPLE), method=method, batch=32)
        assert server.agree() == ""
        assert code(server.train()) == ""


def test_all_keys_are_documented() -> None:
    import kedge.federation.member.policy as module

    for field in dataclasses.fields(Policy):
        assert f"\n    {field.name} = " in (module.__doc__ or ""), field.name


# -- rows that the server chooses by other means ---------------------------------------------------


def test_refusals_do_not_tell_labels(tmp_path: Path) -> None:
    """With a class of weight 0, whether enough rows count is a fact about the labels of the rows
    that a seed draws: the terms of many runs would tell all labels, and nothing would be counted.
    A refusal in a round is counted as an update."""
    policy = Policy(min_samples=10, min_batch=10, max_updates=3)
    terms: dict[str, Any] = {"batch": 20, "class_weights": (1.0, 0.0)}
    codes = list[list[str]]()
    for flipped in (False, True):
        data = patients()
        labels = np.random.default_rng(0).permutation(data.y_train)
        data = replace(data, y_train=1 - labels if flipped else labels)
        server = Server(tmp_path / str(flipped), policy, data=data, rounds=3, **terms)
        codes.append([])
        for seed in range(20):
            server.terms = replace(server.terms, seed=seed)
            agree = {"text": agreement_text(server.terms, ""), "value": {"initial": server.initial}}
            codes[-1].append(code(server.ask("agree", run=f"{seed:016x}", **agree)))
        down, run = server.down(), f"{19:016x}"
        found = [code(server.train(down, round, run=run)) for round in range(3)]
        assert "POLICY" in found
        assert server.released("update") == 3
    assert codes[0] == codes[1]


def test_a_crop_does_not_blacken_all_images_but_one(tmp_path: Path) -> None:
    """Shifted by as many pixels as it has, an image is black; the update is that of the others."""
    x = np.random.default_rng(0).random((60, 1, 4, 4), np.float32)
    y, zero, one = np.arange(60) % 2, np.zeros(1), np.ones(1)
    data = Dataset("north", x, y, zero, one, "classification", 2)
    for padding, expected in ((3, ""), (4, "TERMS"), (1000, "TERMS")):
        folder, module = tmp_path / str(padding), nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
        server = Server(folder, FIFTY, module, data, augment=f"crop({padding})")
        assert server.agree() == expected
    assert "crop.padding = 1000" in server.log


# -- processes -------------------------------------------------------------------------------------


def test_processes_of_one_member_count_together(tmp_path: Path) -> None:
    """Without a resident node each request has a process, and a server may send many at once."""
    path, start = tmp_path / "released.txt", tmp_path / "start"
    code = (
        "import sys, time, pathlib\n"
        "from kedge.federation.member.releases import Release, Releases\n"
        "found, start = Releases(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2])\n"
        "found.count('update'); print('ready', flush=True)\n"
        "while not start.exists(): time.sleep(0.001)\n"
        "for number in range(20):\n"
        "    found.note(Release('update', sys.argv[3] + f'{number:063x}', 'ab' * 8, 0), most=30)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, path, start, str(k)], stdout=subprocess.PIPE)
        for k in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    start.touch()
    assert [process.wait() for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    assert Releases(path).count("update") == 30
    assert len(path.read_text().splitlines()) == 30
