"""Sheets of training: what they find on digits, and what they leave out."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kedge.check.problems import DOUBLE, Problem, images, quadratics
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import make_task
from kedge.core.work import LocalWork
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.diagnostics.training import diagnose_training
from kedge.diagnostics.training import measures as training_measures
from kedge.diagnostics.training.measures import Measures, measure, operations
from kedge.diagnostics.training.probe import Probe, probe
from kedge.diagnostics.training.sheet import values, verdict
from kedge.engines import Execution
from kedge.errors import FieldError
from kedge.history.sheet import Sheet
from kedge.runs.build import simulation
from kedge.settings import Config
from kedge.sim.simulation import Simulation


def digits(method: str, partition: str, **settings: Any) -> Simulation:
    config = Config(method=method, partition=partition, clients=10, **settings)
    return simulation(config, load("digits"), 0, torch.device("cpu"), Execution("vector"))


@functools.cache
def measured(method: str, partition: str, rounds: int = 5) -> Measures:
    sim = digits(method, partition)
    for _ in range(rounds):
        sim.run_round()
    return measure(probe(sim))


def numbers(method: str, partition: str = "dirichlet(0.1)") -> dict[str, Any]:
    return values(measured(method, partition))


# -- what it finds ----------------------------------------------------------------------------


def test_drift_grows_from_iid_to_dirichlet() -> None:
    """Weights, gradients, classifiers and features agree on the order."""
    found = [numbers("fedavg", p) for p in ("iid", "dirichlet(1.0)", "dirichlet(0.1)")]
    growing = (
        "weight_divergence", "cancelled", "gradient_variance_low", "gradient_variance_high",
        "prediction_skew", "across_classes",
    )  # fmt: skip
    for name in growing:
        one, two, three = (v[name] for v in found)
        assert one < two < three, name
    for name in ("mean_cosine", "generalisation"):
        one, two, three = (v[name] for v in found)
        assert one > two > three, name
    one, two, three = (v["cka"]["features"] for v in found)
    assert one > two > three
    assert "lacking_recognised" not in found[0]
    assert found[1]["lacking_recognised"] > found[2]["lacking_recognised"]
    assert found[2]["lacking_recognised"] < 0.05  # FedBR, Figure 3
    assert found[2]["lacking_to_own"] > 0.95


def test_the_verdict_names_the_drift() -> None:
    texts = [verdict(measured("fedavg", p)) for p in ("iid", "dirichlet(0.1)")]
    assert texts[0].startswith("Little drift: local models reach ")
    assert texts[1].startswith("Strong drift: local models reach ")
    assert "they drift most in the head" in texts[1]
    assert texts[1].endswith(" % of the samples of classes that they lack.")


def test_an_aggregate_that_is_worse_than_its_parts_is_named() -> None:
    """As where training diverges; the numbers are made up."""
    good = measured("fedavg", "dirichlet(0.1)")
    general = good.general._replace(afters=[5.0] * len(good.names))
    assert verdict(dataclasses.replace(good, general=general)).startswith("The aggregate fails: ")


def test_a_model_that_only_guesses_has_no_verdict() -> None:
    sim = digits("fedavg", "dirichlet(0.1)", lr=1e-6)
    assert verdict(measure(probe(sim))).startswith("Too early for a verdict: ")


def test_methods_against_drift_reduce_it() -> None:
    plain = numbers("fedavg")
    scaffold, fedprox = map(numbers, ("scaffold", "fedprox(mu=1.0)"))
    assert scaffold["weight_divergence"] < 0.6 * plain["weight_divergence"]
    assert scaffold["mean_cosine"] > plain["mean_cosine"] + 0.3
    assert scaffold["generalisation"] > plain["generalisation"] + 20
    assert fedprox["weight_divergence"] < 0.95 * plain["weight_divergence"]
    fedbr, early = (values(measured(m, "dirichlet(0.1)", 3)) for m in ("fedbr", "fedavg"))
    assert fedbr["lacking_recognised"] > early["lacking_recognised"] + 0.03
    assert fedbr["lacking_cosine"] < early["lacking_cosine"] - 0.05  # FedBR, Figure 10


def test_gradient_variance_of_quadratics() -> None:
    """Gradients -h_k a_k at w = 0: 2 and -5, with the weights 3/4 and 1/4."""
    sim = quadratics((1.0, 5.0), (-2.0, 1.0), copies=(3, 1)).simulate("fedavg")
    found = measure(probe(sim)).variance
    mean = 0.75 * 2 - 0.25 * 5
    assert found.low == 0.0
    assert found.high == pytest.approx(0.75 * (2 - mean) ** 2 + 0.25 * (-5 - mean) ** 2)
    assert found.squared_mean == pytest.approx(mean**2)


def test_large_models_are_measured_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer of 64 inputs and 10 outputs takes 1280 operations."""
    found = probe(digits("fedavg", "iid", model="linear"))
    assert operations(found) == pytest.approx(1300, abs=20)
    assert measure(found).tested_on == "the 359 test samples"
    monkeypatch.setattr(training_measures, "MAX_OPERATIONS", 1e3)
    assert measure(found).tested_on == "200 of 359 test samples"


def test_the_cut_is_that_of_the_method() -> None:
    assert measure(probe(images().simulate("fedimpro(cut=stage1)"))).high == "after stage1"
    assert measure(probe(images().simulate("fedavg"))).high == "in the head"


# -- the sheet --------------------------------------------------------------------------------


def test_a_sheet_of_digits() -> None:
    sim = digits("fedavg", "dirichlet(0.1)")
    sim.run_round()
    sheet = diagnose_training(sim)
    assert (sheet.name, sheet.title) == ("training", "Training with fedavg after round 1")
    heads = [text.split()[0] for text in sheet.findings[1:]]
    assert heads == [
        "Weights:", "Updates:", "Classifier:", "Forgetting:", "Own", "Features:", "Gradients:",
    ]  # fmt: skip
    titles = ["Layers after round 1", "Clients", "Updates and features", "Classes"]
    assert [t.title for t in sheet.tables] == titles
    assert all(len(row) == len(t.columns) for t in sheet.tables for row in t.rows)
    assert {c.kind for c in sheet.charts} == {"bars", "heatmap"}
    assert "one more round of 10 clients, which is not part of the run" in sheet.cost
    again = Sheet.from_dict(json.loads(sheet.to_json()))
    assert again.findings == sheet.findings
    assert sheet.values["rounds"][0]["mean_cosine"] == sheet.values["mean_cosine"]


def probes(sim: Simulation, rounds: tuple[int, ...]) -> Iterator[Probe]:
    for target in rounds:
        while sim.round < target:
            sim.run_round()
        yield probe(sim)


def test_several_rounds_have_lines() -> None:
    sim = images().simulate("fedavg")
    sheet = diagnose_training(probes(sim, (0, 2, 4)))
    assert sheet.title == "Training with fedavg after rounds 0, 2, 4"
    assert sheet.findings[1].startswith("From round 0 to round 4 the distance of local models")
    lines = [c for c in sheet.charts if c.kind == "lines"]
    assert len(lines) == 3
    layers = lines[0]  # each is divided by its maximum
    for name in ("stage1.0", "stage2.1", "head"):
        course = [row["y"] for row in layers.rows if row["series"] == name]
        assert len(course) == 3
        assert max(course) == 1.0
    assert [row[0] for row in sheet.tables[0].rows] == [0, 2, 4]
    assert [v["round"] for v in sheet.values["rounds"]] == [0, 2, 4]


def test_equal_states_give_equal_sheets() -> None:
    """Also with BatchNorm and dropout: nothing is drawn outside of the run's own keys."""
    sims = [images(norm="bn", dropout=0.5).simulate("fedavg") for _ in range(2)]
    one, two = (diagnose_training(sim) for sim in sims)
    assert one.to_dict()["values"] == two.to_dict()["values"]
    assert one.to_dict()["charts"] == two.to_dict()["charts"]


def test_there_must_be_a_probe() -> None:
    with pytest.raises(FieldError, match="no round to diagnose"):
        diagnose_training([])


# -- what has no meaning is left out ----------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_other_tasks(task: str) -> None:
    sheet = diagnose_training(images(task=task).simulate("fedavg"))
    left_out = [text for text in sheet.findings if "left out" in text]
    assert len(left_out) == 2
    assert f"one class per sample, which {task} does not have" in left_out[0]
    assert "no client holds samples out" in left_out[1]
    assert "forgetting" not in sheet.values
    assert not [c for c in sheet.charts if c.kind == "points"]
    assert "cancels in their mean" in sheet.findings[0]
    assert math.isfinite(sheet.values["generalisation"])


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x.flatten(1))))


def test_a_model_without_a_known_head() -> None:
    problem = images()
    sim = Simulation(problem.federation, Model(Headless().double()), "fedavg", work=problem.work)
    sheet = diagnose_training(sim)
    assert any("the head of the model is not known" in text for text in sheet.findings)
    assert "in the last layer" in " ".join(sheet.findings)
    assert "cka" not in sheet.values


def test_private_heads() -> None:
    """The model before is the client's own, head included; the head has no mean."""
    sim = images().simulate("fedper")
    for _ in range(3):
        sim.run_round()
    found = probe(sim)
    sheet = diagnose_training(found)
    assert [row[0] for row in sheet.tables[0].rows] == ["stage1.0", "stage2.1"]
    for k, (after, end) in enumerate(zip(found.afters, found.ends, strict=True)):
        assert torch.equal(after.params["head.weight"], end.params["head.weight"]), k
        assert torch.equal(after.params["stage1.0.weight"], found.mean["stage1.0.weight"])


def test_a_method_in_which_nothing_travels() -> None:
    sim = images().simulate("local")
    sim.run_round()
    sheet = diagnose_training(sim)
    assert "no weight travels" in sheet.findings[-1]
    assert not [t for t in sheet.tables if t.title.startswith("Layers")]
    assert not any(text.startswith("Updates:") for text in sheet.findings)


def test_one_client() -> None:
    sheet = diagnose_training(images(sizes=(12,)).simulate("fedavg"))
    assert any(text.startswith("One client trains") for text in sheet.findings)
    assert sheet.values["weight_divergence"] == pytest.approx(0.0, abs=1e-12)
    assert not any("Cosines" in c.title for c in sheet.charts)


def test_a_learning_rate_of_zero_is_said() -> None:
    problem = images(optim=SGD(lr=0.1, schedule="cosine(rounds=1)"))
    sim = problem.simulate("fedavg")
    sim.run_round()
    [text] = diagnose_training(sim).findings
    assert text.startswith("Nothing moves: the learning rate of round 2 is 0")


def federation(held_out: bool) -> Problem:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=draw).to(DOUBLE), torch.arange(20) % 2
    clients, held = [range(8), range(10, 18)], [[8, 9], [18, 19]]
    fed = Federation(
        x, y, clients, make_task("classification", 2), held_out=held if held_out else None,
        dtype=DOUBLE,
    )  # fmt: skip
    net = nn.Sequential()
    net.add_module("head", nn.Linear(4, 2))
    return Problem(fed, net.double(), LocalWork(batch=4))


def test_data_without_tests_and_with_held_out_samples() -> None:
    plain = measure(probe(federation(False).simulate("fedavg")))
    assert plain.tested_on == "16 training samples of all clients (no test data)"
    assert plain.personal_on == "test samples in the class proportions of each client"
    held = measure(probe(federation(True).simulate("fedavg")))
    assert held.tested_on == "the 4 test samples"
    assert held.personal_on == "the held-out samples of each client"
    assert held.personal is not None
    assert set(held.personal.local) <= {0.0, 50.0, 100.0}  # of two samples each


def test_some_of_many_clients() -> None:
    sheet = diagnose_training(probe(images(sizes=(3,) * 9).simulate("fedavg"), max_clients=4))
    assert sheet.findings[-1] == "Measured on 4 of the 9 clients of the round."
