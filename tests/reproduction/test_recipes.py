"""Every recipe of the package can be read, and says everything that its numbers depend on."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from kedge.core.method import parse
from kedge.core.part import parts
from kedge.data.datasets import Dataset
from kedge.reproduction import recipes
from kedge.reproduction.recipes import FREE, PaperRow
from kedge.reproduction.records import found_records, read_choices
from kedge.runs.build import simulation, with_personal
from kedge.runs.planning import PLANNING
from kedge.settings import FIELDS

NAMES = recipes.all_names()
#: Settings that a table need not write out: they do not change what a row computes.
UNWRITTEN = {*FREE, "method", "sampler"} - {"rounds", "eval_every", "target"}
SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "mnist": ((1, 28, 28), 10),
    "organamnist": ((1, 28, 28), 11),
    "covid_darkcovidnet64": ((1, 64, 64), 3),
}
#: Where the paper's own claim is: this row must be there, with a number.
CLAIMS = {
    "fedimpro/table1": ("fedimpro", 88.45, 83.65),
    "fedimpro/table1_m100": ("fedimpro", 77.56, 73.42),
    "flboost/table1_a03": ("scaffold_flboost", 84.38, 82.14),
    "flboost/table1_a06": ("scaffold_flboost", 86.06, 84.55),
    "fedbr/table1_mnist": ("fedbr", 86.58, 82.47),
    "fedbr/table1_cifar10": ("fedbr", 64.65, 58.99),
    "fedcog/table1_fmnist_niid2": ("fedcog", 73.68, 64.11),
    "fedcog/table1_cifar10_niid1": ("fedcog", 64.83, 64.36),
    "fedtr/table1_organa": ("fedtr", 91.44, 89.63),
    "fedtr/table2_cifar10": ("fedtr", 88.42, 79.78),
}


def at(name: str, scale: str = "full") -> recipes.Table:
    return recipes.read(name).at(scale)


@functools.cache
def stand_in(name: str) -> Dataset:
    """A dataset of the shape of a known one, 1,000 samples of noise."""
    (shape, classes), rng = SHAPES[name], np.random.default_rng(0)
    x = rng.random((1000, *shape), dtype=np.float32)
    y = np.arange(1000) % classes
    ones = np.ones(shape[0], dtype=np.float32)
    return Dataset(
        name, x[:800], y[:800], 0 * ones, ones, "classification", classes, x[800:], y[800:]
    )


def scales(name: str) -> list[str]:
    return ["full", "quick"] if recipes.read(name).has_quick else ["full"]


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_methods_are_written_out(name: str) -> None:
    written = set(recipes.read(name).data["settings"])
    assert set(FIELDS) - UNWRITTEN <= written
    for row in at(name).rows:
        row.config(0)  # raises if a setting is unknown or wrong
        for part in parse(row.method).parts:
            fields = [f"{f.name}=" for f in dataclasses.fields(part)]
            assert all(field in row.method for field in fields), (row.name, part.name)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_is_the_command(name: str) -> None:
    folder = recipes.RECIPES / name
    for path in folder.glob("*.toml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        rows = "" if path.name == recipes.TABLE_FILE else f" --rows {path.stem}"
        assert first == f"# kedge reproduce {name}{rows}"
    data = recipes.read(name).data
    assert [*data["rows"]] == [row.name for row in at(name).rows]


@pytest.mark.parametrize("name", NAMES)
def test_costs_and_claims(name: str) -> None:
    table = at(name)
    assert all(row.cost_s for row in table.rows)
    if name in CLAIMS:
        claim, paper, base = CLAIMS[name]
        row = table.row(claim)
        assert (row.paper, table.row(row.base).paper) == (paper, base)


def representatives(name: str) -> list[PaperRow]:
    """The base, and the row that the table is about; every method is built in tests/parts."""
    rows = at(name).rows
    claim = CLAIMS.get(name, (rows[-1].name,))[0]
    return [row for row in rows if row.name in (rows[0].name, claim)]


def test_model_and_partition_fit_the_method() -> None:
    built = set()
    for name in NAMES:
        for row in representatives(name):
            [config] = with_personal([row.config(0)])
            kind = (config.model, config.partition.split("(")[0], config.method)
            if kind in built:
                continue
            built.add(kind)
            config = dataclasses.replace(config, clients=min(config.clients, 20), precision="fp32")
            sim = simulation(config, stand_in(config.data), 0, torch.device("cpu"), PLANNING)
            assert sim.federation.num_clients == config.clients, name


def test_the_grand_table_has_every_method() -> None:
    shared = {row.name for row in at("grand/fmnist_niid2").rows}
    personal = {row.name for row in at("grand/organa_personal").rows}
    assert {row.name for row in at("grand/small_personal").rows} == personal
    for name in ("organa", "small_fmnist", "small_organa"):
        assert {row.name for row in at(f"grand/{name}").rows} == shared
    private = {name for name in parts if parts[name].side == "privacy"}  # they gain no accuracy
    assert shared | personal == {*parts, "fedavg", "pooled"} - private


def test_the_records_of_the_project_count() -> None:
    """Their settings are those of the recipes of today; those that are not are in superseded."""
    results = Path(__file__).parents[2] / "docs" / "results"
    count = 0
    for name in NAMES:
        for scale in scales(name):
            table = at(name, scale)
            found, left_out = found_records(results, table, read_choices(results, table))
            assert not left_out
            count += sum(map(len, found.values()))
    files = [p for p in results.rglob("*.seed*.json") if "superseded" not in p.parts]
    assert len(files) <= count
    assert {p.parent.relative_to(results).as_posix() for p in files} <= {*NAMES}


@pytest.mark.parametrize("name", [name for name in NAMES if recipes.read(name).has_quick])
def test_quick_forms_are_small(name: str) -> None:
    table = at(name, "quick")
    assert {*table.expect} <= {row.name for row in table.rows}
    for row in table.rows:
        assert row.config(0).precision == "fp32"
