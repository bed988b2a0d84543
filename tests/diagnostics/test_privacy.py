"""The sheet on privacy: its verdict, its attacks on real digits, and what it leaves alone."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import nn

from kedge.check.problems import images
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.task import Classification
from kedge.core.work import LocalWork
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.diagnostics.privacy import diagnose_privacy
from kedge.diagnostics.privacy.sheet import GRADIENT_INVERSION
from kedge.errors import FieldError, UnknownName
from kedge.history.sheet import Sheet
from kedge.sim.simulation import Simulation


def digits(method: str, engine: str = "loop") -> Simulation:
    """A small convolutional network on digits with label skew, after a round."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = {
            "stage1": nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            "stage2": nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
            "stage3": nn.Sequential(nn.Flatten(), nn.Linear(512, 32), nn.ReLU()),
            "head": nn.Linear(32, 10),
        }
        model = nn.Sequential(OrderedDict(layers))
    data = federate(load("digits"), "dirichlet(0.5)", clients=5, seed=0)
    work = LocalWork(batch=32, steps=10)
    run = Simulation(data, model, method, optim=SGD(lr=0.05), work=work, engine=engine)
    run.run_round()
    return run


@cache
def sheet_of_fedimpro() -> Sheet:
    return diagnose_privacy(digits("fedimpro"), targets=6, steps=100)


def test_raw_features_give_digits_away_and_class_means_do_not() -> None:
    values = sheet_of_fedimpro().values["inversion"]
    best: dict[int, float] = {}
    for level in values["levels"]:
        best[level["samples"]] = min(level["mse"], best.get(level["samples"], 1.0))
    assert values["n"] == 6
    assert best[1] < 0.1 * values["class_mean"]
    assert best[0] > 0.7 * values["class_mean"]
    assert best[1] < best[2] < best[8]  # more samples in a mean hide each of them better
    assert values["class_mean"] < values["random"]


def test_the_upload_of_fedimpro_is_attacked_class_by_class() -> None:
    upload = sheet_of_fedimpro().values["upload"]
    assert upload["classes_told"] == 10
    attackers = {attack["attacker"] for attack in upload["attacks"]}
    assert attackers == {"without other samples", "linear decoder", "decoder, then matching"}
    best: dict[int, dict[str, float]] = {}
    for attack in upload["attacks"]:
        if attack["closest"] < best.get(attack["label"], {"closest": 9.0})["closest"]:
            best[attack["label"]] = attack
    near = [a for a in best.values() if a["closest"] < 0.5 * a["guess_closest"]]
    assert (upload["classes"], upload["reconstructed"]) == (len(best), len(near))
    # a class mean over few samples is inverted better than one over many
    few = [a["closest"] for a in upload["attacks"] if a["samples"] <= 2]
    many = [a["closest"] for a in upload["attacks"] if a["samples"] >= 5]
    assert few
    assert many
    assert min(few) < min(many)


def test_the_sheet_says_it_first_in_words() -> None:
    sheet = sheet_of_fedimpro()
    assert sheet.name == "privacy"
    assert sheet.title == "Privacy of fedimpro(cut=stage2) in round 2"
    upload, client = sheet.values["upload"], sheet.values["client"]
    assert upload["lone_samples"] > 1
    assert sheet.findings[0] == (
        f"FedImpro sends features of single samples: {upload['lone_samples']} of the "
        f"{upload['classes']} class means that client {client} uploads have one sample behind; "
        f"{upload['reconstructed']} can be inverted to less than half the error of a guess."
    )
    assert sheet.findings[-1] == GRADIENT_INVERSION
    assert "2 x 10 x 512 numbers" in sheet.findings[2]
    assert sheet.seconds > 0
    assert "a round of client" in sheet.cost
    back = Sheet.from_dict(json.loads(sheet.to_json()))
    assert back.to_dict() == sheet.to_dict()
    assert [chart.kind for chart in sheet.charts] == ["lines", "images", "images"]
    for table in sheet.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_diagnoses_repeat_and_change_nothing() -> None:
    run = images().simulate("fedmix(rows=6)+fedproto")
    run.run_round()
    before = {key: value.clone() for key, value in run.state().items()}
    lines: list[str] = []
    first = diagnose_privacy(run, seed=1, steps=5, targets=4, report=lines.append)
    again = diagnose_privacy(run, seed=1, steps=5, targets=4)
    other = diagnose_privacy(run, seed=2, steps=5, targets=4)
    assert tree.equal(run.state(), before)
    assert first.values == again.values
    assert first.charts == again.charts
    assert first.values["inversion"] != other.values["inversion"]
    assert len(lines) == 3
    assert all(line.startswith("privacy: ") for line in lines)


def test_engines_agree() -> None:
    sheets = []
    for engine in ("loop", "vector"):
        run = images(norm="bn").simulate("fedimpro(cut=stage1)", engine)
        run.run_round()
        sheets.append(diagnose_privacy(run, client=2, steps=20).values["upload"]["attacks"])
    for one, two in zip(*sheets, strict=True):
        assert one["mse"] == pytest.approx(two["mse"], rel=1e-6)


def test_fedavg_is_not_attacked_unless_asked() -> None:
    run = images().simulate("fedavg")
    sheet = diagnose_privacy(run)
    assert sheet.findings[0] == (
        "fedavg shares the model and its updates alone; they are not attacked here."
    )
    assert not sheet.charts
    assert "arXiv:1906.08935" in sheet.findings[-1]
    asked = diagnose_privacy(run, attack=True, cut="stage1", steps=5)
    assert any("at stage1" in line for line in asked.findings)
    assert "upload" not in asked.values


def test_clients_on_their_own_share_nothing() -> None:
    sheet = diagnose_privacy(images().simulate("local"))
    assert sheet.findings[0] == "local shares nothing: every client is on its own."
    assert GRADIENT_INVERSION not in sheet.findings
    assert (sheet.values["up_bytes"], sheet.values["down_bytes"]) == (0, 0)


def test_copies_come_first() -> None:
    run = images().simulate("fedmix(samples=1, rows=6)")
    sheet = diagnose_privacy(run)
    assert sheet.findings[0] == (
        "FedMix hands out copies: 6 of 6 samples are training samples or nearly so."
    )


def test_tables_are_attacked_without_pictures() -> None:
    x = rng.normal(rng.key(0), (40, 6))
    y = (x[:, 0] > 0).to(torch.int64)
    rows = list(torch.split(torch.arange(40), 10))
    data = Federation(x, y, rows, Classification(2))  # no test samples
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(stage1=nn.Linear(6, 12), head=nn.Linear(12, 2)))
    run = Simulation(data, model, "fedproto", engine="loop")
    sheet = diagnose_privacy(run, steps=100)
    assert [chart.kind for chart in sheet.charts] == ["lines"]
    assert {level["attacker"] for level in sheet.values["inversion"]["levels"]} == {
        "without other samples"
    }
    [raw] = [v for v in sheet.values["inversion"]["levels"] if v["samples"] == 1]
    assert raw["mse"] < 0.01 * sheet.values["inversion"]["class_mean"]  # 12 numbers tell 6


def test_token_ids_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x).mean(1))

    x = rng.integers(rng.key(0), (12, 3), 5)
    data = Federation(x, x[:, 0] % 2, [list(range(12))], Classification(2), tokens=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        run = Simulation(data, Net(), "fedproto", engine="loop")
    sheet = diagnose_privacy(run)
    assert sheet.findings[0] == "Nothing that fedproto shares besides the model is attacked here."
    assert "The inputs are token ids, which are not attacked here." in sheet.findings


def test_the_client_that_has_most_to_lose_is_named_and_can_be_chosen() -> None:
    sizes, names = digits("fedimpro").federation.sizes, digits("fedimpro").federation.client_names
    largest, smallest = (names[sizes.index(pick(sizes))] for pick in (max, min))
    [hint] = [line for line in sheet_of_fedimpro().findings if "the fewest of all" in line]
    assert hint.startswith(f"{largest} has {max(sizes)} samples; {smallest} has")
    own = diagnose_privacy(digits("fedimpro"), targets=1, steps=1, client=smallest)
    assert own.values["client"] == sizes.index(min(sizes))
    assert not any("the fewest of all" in line for line in own.findings)
    with pytest.raises(UnknownName, match="client 9"):
        diagnose_privacy(digits("fedimpro"), client="client 9")


def test_wrong_arguments() -> None:
    run = images().simulate("fedavg")
    with pytest.raises(FieldError, match="client = 3 is not between 0 and 2"):
        diagnose_privacy(run, client=3)
    with pytest.raises(FieldError, match="steps = 0 is below 1"):
        diagnose_privacy(run, steps=0)
    with pytest.raises(UnknownName, match="stage7"):
        diagnose_privacy(run, attack=True, cut="stage7")
