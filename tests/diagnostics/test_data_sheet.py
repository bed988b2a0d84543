"""The sheet of data: its verdict, its advice and its numbers, for all kinds of data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kedge
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.diagnostics.data import diagnose_data
from kedge.diagnostics.data.sheet import LABELS, level
from kedge.errors import DataError, FieldError
from kedge.history.sheet import Sheet

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def digits(partition: str, clients: int = 10, **options: Any) -> Sheet:
    return diagnose_data(federate(load("digits"), partition, clients=clients), **options)


def groups(rng: np.random.Generator, clients: int = 5, n: int = 80) -> list[Any]:
    """Clients with 4 columns and 3 classes, dealt out at random."""
    found = []
    for _ in range(clients):
        y = rng.integers(0, 3, n)
        found.append((rng.normal(size=(n, 4)) + 2 * y[:, None], y))
    return found


# -- the verdict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [4, 30])
def test_iid_data_are_homogeneous(clients: int) -> None:
    sheet = digits("iid", clients)
    assert sheet.findings[0] == "Labels agree; features agree; sizes are similar."
    assert "FedAvg is the natural choice" in sheet.findings[1]
    assert sheet.values["apart"] == []


def test_strong_label_skew() -> None:
    sheet = digits("dirichlet(0.1)", 20)
    classes = np.mean(sheet.values["labels"]["effective_classes"])
    assert sheet.findings[0].startswith(
        f"Strong label skew: {classes:.1f} of 10 classes per client"
    )
    assert "features agree" in sheet.findings[0]
    assert sheet.values["methods"][0] == "fedavg"
    assert {"fedcog", "fedtr", "fedimpro"} <= set(sheet.values["methods"])
    assert sheet.values["methods"] == ["fedavg", "fedcog", "fedimpro", "fedtr", "scaffold"]
    assert sheet.findings[1].startswith(
        "Parts made for label skew: fedcog, fedimpro, fedtr, scaffold. What they gain depends on"
    )
    moderate = digits("dirichlet(1)", 20)
    assert moderate.values["methods"] == ["fedavg", "fedtr", "scaffold"]
    assert "Parts made for label skew: fedtr, scaffold." in " ".join(moderate.findings)


def test_feature_shift_and_the_client_that_stands_apart() -> None:
    federation = federate(load("digits"), "iid", clients=8)
    federation.x = federation.x.clone()
    own = federation.rows[federation.offsets[7] :]
    federation.x[own] = federation.x[own].flip(-1)
    sheet = diagnose_data(federation)
    assert re.search(r"feature shift: 0\.\d\d standard deviations", sheet.findings[0])
    assert sheet.findings[0].endswith("client 7 (by its features) stands apart.")
    assert sheet.values["apart"] == [{"client": "client 7", "by": "features"}]
    assert any("with and without it" in line for line in sheet.findings)
    assert any(
        "parts made for feature shift: ditto, fedbn (needs BatchNorm), fedper" in line
        for line in sheet.findings
    )
    assert sheet.values["methods"] == ["fedavg", "ditto", "fedper", "fedrep", "scaffold"]


def test_quantity_skew(rng: np.random.Generator) -> None:
    [big, *small] = groups(rng, 5, 40)
    big = tuple(np.concatenate([v] * 10) for v in big)
    [sheet] = kedge.diagnose([big, *small])
    assert "strong quantity skew (Gini 0.51, largest to smallest 10 to 1)" in sheet.findings[0]
    assert sheet.values["quantity"]["gini"] == pytest.approx(0.5143, abs=1e-4)
    assert "fednova" in sheet.values["methods"]
    assert any("One client holds 71 % of the samples" in line for line in sheet.findings)


def test_classes_that_few_clients_lack_are_named(rng: np.random.Generator) -> None:
    found = groups(rng)
    x, y = found[2]
    found[2] = (x[y != 1], y[y != 1])
    [sheet] = kedge.diagnose(found)
    assert "Classes are missing: client 2 has no 1." in sheet.findings
    assert not any("Classes are missing" in f for f in digits("dirichlet(0.1)", 20).findings)
    x, y = groups(rng)[0]
    few = (x[y == 0][:5], y[y == 0][:5])  # too few samples to miss a class in
    for others in (groups(rng), [*groups(rng), few]):
        assert not any("Classes are missing" in f for f in kedge.diagnose(others)[0].findings)


def test_levels_need_significance() -> None:
    assert [level(v, LABELS) for v in (0.05, 0.1, 0.3, 0.9)] == [0, 1, 2, 3]
    assert level(0.9, LABELS, p=0.2) == 0


def test_the_page_shows_what_is_printed() -> None:
    page = " ".join((PAGE.parent / "diagnose.md").read_text().split())
    for finding in digits("dirichlet(0.1)").findings:
        assert finding in page


# -- duplicates ------------------------------------------------------------------------------------


def test_shared_samples_and_leaks_are_said(rng: np.random.Generator) -> None:
    clients = groups(rng, 3)
    clients[1][0][:4] = clients[0][0][:4]
    clients[1][1][:4] = (clients[0][1][:4] + 1) % 3
    test = clients[2][0][:5], clients[2][1][:5]
    [sheet] = kedge.diagnose(dict(zip("abc", clients, strict=True)), test=test)
    text = " ".join(sheet.findings)
    assert "8 samples occur on more than one client (a and b share 4), 8 of them with" in text
    assert "5 test samples also in the training data" in text
    found = sheet.values["duplicates"]
    assert (found["equal_across"], found["conflicting_labels"]) == (8, 8)
    assert found["test_in_training"] == 5


# -- kinds of data -------------------------------------------------------------------------------


def test_targets_of_a_regression(rng: np.random.Generator) -> None:
    def client(move: float) -> Any:
        x = rng.normal(size=(80, 4))
        return x, x @ [1.0, 2.0, 0.0, 0.0] + move

    [sheet] = kedge.diagnose([client(0) for _ in range(5)])
    assert sheet.findings[0] == "Targets agree; features agree; sizes are similar."
    [sheet] = kedge.diagnose([*(client(0) for _ in range(5)), client(6)])
    assert "shift of the targets" in sheet.findings[0]
    assert "client 5 (by its targets" in sheet.findings[0]
    assert any("fifths of the targets" in line for line in sheet.findings)
    assert "eff. classes" not in sheet.tables[1].columns
    assert not {"fedcog", "fedtr", "fedimpro"} & set(sheet.values["methods"])  # for classes


def test_several_labels(rng: np.random.Generator) -> None:
    mix = rng.normal(size=(4, 6))

    def client(rates: Any) -> Any:
        y = (rng.random((120, 4)) < rates).astype(int)
        return y @ mix + rng.normal(size=(120, 6)), y

    [sheet] = kedge.diagnose([client(0.3) for _ in range(4)])
    assert sheet.findings[0] == "Labels agree; features agree; sizes are similar."
    [sheet] = kedge.diagnose([client(np.roll([0.9, 0.05, 0.05, 0.05], k)) for k in range(4)])
    assert sheet.findings[0].startswith("Strong label skew")
    assert "features agree" in sheet.findings[0]
    assert "fedimpro" not in sheet.values["methods"]  # for classes only


def test_token_ids() -> None:
    x = torch.randint(0, 500, (400, 20), generator=torch.Generator().manual_seed(0))
    rows = [range(k * 100, k * 100 + 100) for k in range(4)]

    def sheet(inputs: torch.Tensor) -> Sheet:
        y = torch.arange(400) % 2
        return diagnose_data(Federation(inputs, y, rows, kedge.Classification(2), tokens=True))

    assert "features agree" in sheet(x).findings[0]
    x[300:] //= 4
    assert "feature shift" in sheet(x).findings[0]
    assert "not by their order" in sheet(x).findings[-1]


def test_one_client_and_pooled_data() -> None:
    alone = digits("iid", 1)
    assert alone.findings[0] == "One client holds all samples: there is nothing to compare."
    pooled = diagnose_data(federate(load("digits"), "iid", clients=3).pooled())
    assert pooled.values["clients"] == ["all clients"]
    assert pooled.findings == alone.findings


def test_tiny_and_constant_data() -> None:
    one = (np.ones((2, 3)), np.array([0, 1]))
    [sheet] = kedge.diagnose([one, one])
    assert "4 samples occur on more than one client" in sheet.findings[1]
    [sheet] = kedge.diagnose([(np.ones((2, 3)), np.array([k, k])) for k in range(3)])
    assert "features cannot be compared" in sheet.findings[0]
    assert "NaN" not in sheet.to_json()


# -- the sheet -----------------------------------------------------------------------------------


def test_the_sheet_survives_json_and_repeats() -> None:
    sheet = digits("dirichlet(0.5)", 6, name="digits", command="kedge diagnose digits")
    assert sheet.title == "Data of digits: 6 clients, 1,438 training samples"
    assert [t.title for t in sheet.tables] == ["Measures", "Clients", "Classes"]
    assert [c.kind for c in sheet.charts] == ["heatmap", "bars", "points", "heatmap"]
    for table in sheet.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    counts = {(row["x"], row["y"]): row["value"] for row in sheet.charts[0].rows}
    assert sum(counts.values()) == 1438
    assert sum(n for (client, _), n in counts.items() if client == "client 2") == next(
        row[1] for row in sheet.tables[1].rows if row[0] == "client 2"
    )
    again = digits("dirichlet(0.5)", 6)
    assert again.values == sheet.values
    assert Sheet.from_dict(sheet.to_dict()).values == sheet.to_dict()["values"]


def test_sub_samples_are_said() -> None:
    lines: list[str] = []
    sheet = digits("iid", 5, samples=200, report=lines.append)
    assert lines == ["features of 200 of 1,438 samples are compared"]
    assert "200 of 1,438 samples, drawn with a fixed seed" in sheet.findings[-1]
    assert sheet.values["features"]["samples"] == 200


# -- kedge.diagnose ------------------------------------------------------------------------------


def test_diagnose_takes_names_federations_and_clients(rng: np.random.Generator) -> None:
    [by_name] = kedge.diagnose("digits", partition="dirichlet(0.1)", clients=5, seed=1)
    federation = federate(load("digits"), "dirichlet(0.1)", clients=5, seed=1)
    [own] = kedge.diagnose(federation, seed=1)
    assert by_name.values == own.values
    assert by_name.command == (
        "kedge diagnose digits --partition 'dirichlet(0.1)' --clients 5 --seed 1"
    )
    pandas = pytest.importorskip("pandas")
    frames = {
        name: pandas.DataFrame({"age": rng.normal(50, 9, 60), "sick": rng.integers(0, 2, 60)})
        for name in ("north", "south", "east")
    }
    frames["south"]["age"] += 30
    [sheet] = kedge.diagnose(frames, label="sick")
    assert sheet.values["clients"] == ["north", "south", "east"]
    assert sheet.values["columns"][0]["column"] == "age"
    assert sheet.values["columns"][0]["client"] == "south"


def test_diagnose_takes_runs(tmp_path: Path) -> None:
    result = kedge.run("fedavg", rounds=1, seeds=[3], clients=4, out=tmp_path / "run")
    [data] = kedge.diagnose(result, "data")
    assert (tmp_path / "run" / "diagnosis" / "data.json").is_file()
    [again] = kedge.diagnose("digits", clients=4, partition="dirichlet(0.1)", seed=3)
    labels = again.values["labels"]["earth_movers"]
    assert data.values["labels"]["earth_movers"] == labels
    sheets = kedge.diagnose(kedge.load(tmp_path / "run"))
    assert [sheet.name for sheet in sheets] == ["data", "training"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "training"}, "digits is data"),
        ({"what": "drift"}, "what = 'drift' is not one of: data, training, privacy"),
        ({"rounds": [1]}, "rounds is not for data"),
        ({"label": "sick"}, "label is not for data by name"),
        ({"samples": 0}, "samples = 0 must be at least 1"),
        ({"partition": "dirichle(1)"}, "Did you mean"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        kedge.diagnose("digits", **options)


def test_options_that_do_not_apply(rng: np.random.Generator) -> None:
    federation = federate(load("digits"), "iid", clients=3)
    with pytest.raises(FieldError, match="clients is not for a Federation"):
        kedge.diagnose(federation, clients=4)
    with pytest.raises(FieldError, match="partition is not for your own clients"):
        kedge.diagnose(groups(rng), partition="iid")
    with pytest.raises(DataError, match="the run was not saved"):
        kedge.diagnose(kedge.run("fedavg", rounds=1, seeds=[0], clients=4))
