"""Tests of a model tell no patient: a lying server chooses weights, and reads what comes back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge.core.tree import Weights
from kedge.federation.member.policy import OPEN, Policy
from kedge.session import wire
from tests.attacks.server import HELD_OUT, Server, cells, code, patients, step_at, sums
from tests.flower.federations import Members, coordinator, datasets, net, settings

#: What an owner of data writes, but for the bounds that have defaults.
LISTED = Policy(uploads=("update", "loss", "test"), min_samples=50, min_test_samples=20)
OFTEN = replace(LISTED, max_tests=10_000)


def server(tmp_path: Path, policy: Policy | None = LISTED, **changes: Any) -> Server:
    found = Server(tmp_path / "north", policy, **changes)
    assert found.agree() == ""
    return found


# -- reading rows ---------------------------------------------------------------------------------


def gap(found: float, values: Any) -> float:
    """How far a number is from the nearest value of a patient."""
    return float(np.abs(np.asarray(values, np.float64) - found).min())


def bisected(lying: Server, tests: int, **changes: Any) -> float:
    """The value at which the number of patients above it becomes less than a half."""
    low, high = -4.0, 4.0
    for number in range(tests):
        middle = (low + high) / 2
        found = lying.test(step_at(0, middle), round=number, **changes)
        if found is None:
            break
        above = float(found["predicted"][1]) * 2 > HELD_OUT
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def test_bisection_reads_no_value(tmp_path: Path) -> None:
    values = patients().x_test[:, 0]
    open_server = server(tmp_path / "open", None)
    assert gap(bisected(open_server, 30), values) < 1e-5  # without a policy: a patient's value
    for policy in (LISTED, OFTEN):
        lying = server(tmp_path / str(policy.max_tests), policy)
        assert gap(bisected(lying, 30), values) > 1e-5


def test_a_count_is_never_known_to_one_patient(tmp_path: Path) -> None:
    """Between two thresholds with one patient between them, the answers do not differ by one."""
    lying = server(tmp_path, OFTEN)
    values = np.sort(patients().x_test[:, 0])
    found = [lying.test(step_at(0, (a + b) / 2)) for a, b in itertools.pairwise(values)]
    counts = {float(n) for one in found for n in (*one["predicted"], *one["right"])}
    assert {n for n in counts if n % 10} <= {30.0}  # all of a class, of which there are 30
    true = np.arange(HELD_OUT - 1, 0, -1)
    told = np.array([float(one["predicted"][1]) for one in found])
    assert abs((told - true).mean()) < 2.5  # rounded up and down at random: right in the mean


def test_the_sum_of_losses_reads_no_row(tmp_path: Path) -> None:
    """With a steep slope only the patient with the largest value has a loss, and it is the
    value."""
    data = patients(labels=[0] * HELD_OUT)
    first, second = np.sort(data.x_test[:, 0])[[-1, -2]]
    slope, theta = 1e3, (first + second) / 2
    weights = step_at(0, theta, slope)
    free = server(tmp_path / "open", None, data=data).test(weights)
    assert float(free["loss"]) / slope + theta == pytest.approx(first, abs=1e-2)
    found = server(tmp_path / "policy", data=data).test(weights)
    assert "loss" not in found
    assert {float(n) for n in found["predicted"]} <= {0.0, 10.0, 50.0, 60.0}


def test_targets_of_a_regression_are_not_summed(tmp_path: Path) -> None:
    data = patients(task="regression")
    lying = server(tmp_path, data=data)
    assert lying.test() is None
    assert '"test:sum_abs"' in lying.log
    named = replace(LISTED, uploads=(*LISTED.uploads, "test:sum_abs"))
    found = server(tmp_path / "named", named, data=data).test()
    assert found.keys() == {"samples", "sum_abs"}


# -- histograms -----------------------------------------------------------------------------------


def test_a_detailed_test_releases_no_histogram(tmp_path: Path) -> None:
    for number, policy in enumerate((LISTED, replace(LISTED, uploads=("*",)), Policy())):
        found = server(tmp_path / str(number), policy).test(test="detailed")
        assert found.keys() == {"count", "right", "predicted"}
    assert "histogram" in server(tmp_path / "open", None).test(test="detailed")


def test_a_histogram_that_is_named_has_few_bins_and_no_small_cell(tmp_path: Path) -> None:
    listed = ("update", "test", "test:histogram", "fedbr", "survey:fedbr")
    policy = replace(LISTED, uploads=listed)
    found = server(tmp_path, policy).test(step_at(0, 0.0, 1.0), test="detailed")
    assert found.keys() == {"count", "right", "predicted", "histogram"}
    histogram = found["histogram"]
    assert histogram.shape == (2, 2, 1000)
    used = (histogram != 0).any(0).any(0).sum()
    assert 1 < used <= HELD_OUT // 10
    assert not (histogram % 10).any()
    survey = server(tmp_path / "survey", policy, method="fedbr(rows=4, samples=3, width=5, out=3)")
    found = survey.test(kind="survey", part="fedbr", test="detailed")
    assert not (found["histogram"] % 10).any()


# -- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        [0] * 59 + [1],
        [0] * 50 + [1] * 8 + [2] * 2,
        [0] * 30 + [1] * 28 + [3] * 2,
        [0] * 20 + [1] * 20 + [2] * 20,
        [0] * 60,
    ],
)
def test_no_small_cell_leaves_nor_follows_from_others(labels: list[int], tmp_path: Path) -> None:
    lying = server(tmp_path, OFTEN, data=patients(labels))
    for number in range(20):
        weights = lying.initial.params
        found = lying.test(
            Weights({n: torch.randn_like(w) * 3 for n, w in weights.items()}, {}), round=number
        )
        assert found["count"].sum() == HELD_OUT
        assert bool((found["right"] <= found["count"]).all())
        assert {n for n in cells(found) if 0 < n < 10} == set()


def test_labels_that_few_have_are_not_counted(tmp_path: Path) -> None:
    data = patients([1] * 2 + [0] * 58, task="multilabel")
    found = server(tmp_path, data=data).test()
    assert {float(n) for n in found["count"]} <= {0.0, 10.0, 50.0, 60.0}
    for name in ("hits", "said"):
        assert {n for n in found[name].tolist() if 0 < n < 10} == set()
    assert bool((found["hits"] <= found["count"]).all())
    assert bool((found["hits"] <= found["said"]).all())


@pytest.mark.parametrize("least", [0, 1, 20])
def test_few_samples_are_not_tested(least: int, tmp_path: Path) -> None:
    data = patients()
    few = replace(data, x_test=data.x_test[:9], y_test=data.y_test[:9])
    lying = server(tmp_path, replace(LISTED, min_test_samples=least), data=few)
    assert lying.test() is None
    assert lying.test(test="detailed") is None


def test_the_same_test_gets_the_same_answer(tmp_path: Path) -> None:
    """So the rounding cannot be averaged away."""
    lying = server(tmp_path)
    found = [
        lying.test(step_at(0, 0.3), attempt=i, test=t) for i, t in ((1, "plain"), (2, "plain"))
    ]
    found.append(lying.test(step_at(0, 0.3), test="detailed"))
    assert lying.released("test") == 1
    for one in found[1:]:
        assert all(torch.equal(one[name], found[0][name]) for name in found[0])


# -- weights of the server's choice ---------------------------------------------------------------


def test_only_weights_to_train_from_are_tested(tmp_path: Path) -> None:
    lying = server(tmp_path)
    down, chosen = lying.down(), step_at(0, 0.5)
    assert lying.test() is not None
    assert lying.test(value={"down": down, "output": chosen}) is None
    assert lying.test(value={"down": down, "output": down.weights}) is not None
    for round in range(5):
        assert lying.evaluate(chosen, round) is None
        assert lying.evaluate(down.weights, round) is None
        assert lying.evaluate(chosen, round, value={"output": chosen, "down": down}) is None
    assert "names no 'output'" in lying.log
    assert lying.released("test") == 1


def test_after_the_last_round_one_model_is_tested(tmp_path: Path) -> None:
    lying = server(tmp_path, rounds=5)
    assert lying.evaluate(step_at(0, 0.1), 5) is None  # it has not trained
    lying.test(test="")
    assert lying.evaluate(step_at(0, 0.1), 5) is not None
    assert lying.evaluate(step_at(0, 0.1), 5, test="detailed") is not None
    for threshold in (0.2, 0.3):
        assert lying.evaluate(step_at(0, threshold), 5) is None
        later = lying.ask("evaluate", 6, test="plain", value={"output": step_at(0, threshold)})
        assert code(later) == "TERMS"
    assert lying.released("test") == 1
    lying.member = type(lying.member)(
        "north", lying.data, lying.folder, LISTED, model=lying.module
    )  # a new process
    assert lying.evaluate(step_at(0, 0.2), 5) is None
    assert lying.evaluate(step_at(0, 0.1), 5) is not None


def test_other_models_are_tested_where_the_policy_names_them(tmp_path: Path) -> None:
    policy = replace(LISTED, uploads=(*LISTED.uploads, "fedexp", "output"))
    lying = server(tmp_path, policy, method="fedexp")
    down = lying.down()
    assert lying.test(value={"down": down, "output": step_at(0, 0.5)}) is not None
    assert lying.evaluate(step_at(0, 0.5), 3) is not None


# -- the number of tests --------------------------------------------------------------------------


def test_a_policy_bounds_tests_by_itself(tmp_path: Path) -> None:
    lying = server(tmp_path)
    found = [lying.test(step_at(0, 0.01 * n)) for n in range(60)]
    assert [one is not None for one in found] == [True] * 50 + [False] * 10


def test_a_personal_model_counts_as_a_second_one(tmp_path: Path) -> None:
    lying = server(tmp_path, replace(LISTED, max_tests=3))
    first = lying.ask("train", test="plain", personal=True, value={"down": lying.down()})
    assert wire.unpack(first, "reply").keys() >= {"sums", "personal"}
    assert lying.released("test") == 2
    again = lying.down(step_at(0, 0.5))
    second = lying.ask("train", 1, test="plain", personal=True, value={"down": again})
    assert sums(second) is None
    assert lying.test(again.weights) is not None
    assert lying.released("test") == 3


def test_a_personal_model_is_made_from_the_weights_that_are_tested(tmp_path: Path) -> None:
    """Else the personal model is a second one of the server's choice, after the last round."""
    lying = server(tmp_path, rounds=5)
    lying.test(test="")
    value = {"output": step_at(0, 0.1), "down": lying.down(step_at(0, 0.2))}
    assert lying.evaluate(step_at(0, 0.1), 5, personal=True, value=value) is None
    same = value | {"down": lying.down(step_at(0, 0.1))}
    assert lying.evaluate(step_at(0, 0.1), 5, personal=True, value=same) is not None


# -- honest runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedexp", "finetune", "ccvr"])
def test_an_honest_run_reports_what_leaves(method: str, tmp_path: Path) -> None:
    """Members with and without a policy: no strike, and unknown metrics are no numbers."""
    data = datasets(sizes=(60, 80, 70, 90))
    policies = {"north": replace(LISTED, min_samples=1, uploads=("*",)), "south": Policy()}
    members = Members(tmp_path, data, net("gn"), policies)
    config = settings(method, per_round=0, personal=method == "finetune")
    run = coordinator(members, config, tmp_path / "run")
    run.run()
    assert [seat.strikes for seat in run.roster.participants] == [0] * 4
    records = run.recorder.records
    expected = [4, 2, 4] if method == "fedexp" else [4, 4, 4]
    assert [record["tested"] for record in records] == expected
    assert all(0 <= record["accuracy"] <= 100 for record in records)
    assert np.isnan(records[-1]["loss"])
    if method == "finetune":
        assert all(0 <= value <= 100 for value in records[-1]["per_personal"])


def test_without_a_policy_all_sums_leave(tmp_path: Path) -> None:
    assert Policy.of({}) == Policy() != OPEN
    lying = server(tmp_path, None)
    assert "everything may leave" in lying.log
    assert lying.evaluate(step_at(0, 0.5), 2, test="detailed").keys() > {"loss", "histogram", "nll"}
