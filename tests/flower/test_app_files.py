"""Keys, rules, apps and shares as files; no Flower."""

from __future__ import annotations

import math
import os
import socket
import tomllib
from pathlib import Path

import numpy as np
import pytest

from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.errors import FieldError, KedgeError, UnknownName
from kedge.federation.coordinator.rules import Rules, make_rules, read_rules, write_rules
from kedge.flower.project import PACKAGE, write_app
from kedge.local.federation import FederationSpec, NodeSpec, _with_free_ports, shares_of, with_names
from kedge.local.processes import free_ports
from kedge.settings import Config, load_config


def test_rules_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    assert read_rules(path) == (Rules(), None)
    rules = Rules(deadline_s=7.5, minimum=1.0, attempts=9, max_norm=math.inf)
    scaling = ((0.1, 1 / 3), (0.2, 1.0))
    path.write_text(write_rules(rules, scaling))
    assert read_rules(path) == (rules, scaling)
    path.write_text(write_rules(rules, None))
    assert read_rules(path) == (rules, None)


def test_wrong_rules_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'deadline_s'"):
        make_rules({"deadline": 5})
    with pytest.raises(FieldError, match="attempts = 1.5 is not a whole number at least 1"):
        make_rules({"attempts": 1.5})
    with pytest.raises(FieldError, match="minimum"):
        make_rules({"minimum": 2})
    with pytest.raises(FieldError, match="wait_s = -1 is below 0"):
        Rules(wait_s=-1)
    with pytest.raises(FieldError, match="max_variety = inf is not a finite number"):
        Rules(max_variety=math.inf)
    path = tmp_path / "rules.toml"
    for text in ("[scaling]\nmean = [1]", "[scaling]\nmean = [1]\nstd = [1, 2]", "scaling = 3"):
        path.write_text(text)
        with pytest.raises(FieldError):
            read_rules(path)


def test_an_app_has_what_a_bundle_takes(tmp_path: Path) -> None:
    config = Config(method='scaffold+fedprox(mu=0.1)', rounds=7, seeds=(3,), clients=2)  # fmt: skip
    folder = write_app(tmp_path / "My Hospitals!", config, Rules(minimum=1.0))
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-hospitals"
    parts = project["tool"]["flwr"]["app"]["components"]
    assert parts == {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"}
    assert project["tool"]["flwr"]["app"]["config"]["resume"] is False
    assert load_config(folder / PACKAGE / "settings.toml") == config
    assert read_rules(folder / PACKAGE / "rules.toml")[0] == Rules(minimum=1.0)
    for path in folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".py", ".toml", ".md")
        assert path.name not in ("lib", "parts", "build", "env", "venv")
        assert not path.name.startswith("test_")
    with pytest.raises(KedgeError, match="is not empty"):
        write_app(folder, config)
    assert write_app(folder, config, replace=True) == folder


def test_nothing_stays_of_an_app_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for folder in (tmp_path / "new" / "app", tmp_path / "empty"):
            with pytest.raises(OSError, match="No space left"):
                write_app(folder, Config(method="fedavg", seeds=(0,)))
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "empty").iterdir())
    write_app(tmp_path / "empty", Config(method="fedavg", seeds=(0,)))


def test_an_app_for_settings_of_a_simulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="seeds"):
        write_app(tmp_path / "app", Config())
    assert not (tmp_path / "app").exists()


def test_shares_are_the_clients_of_a_simulation(tmp_path: Path) -> None:
    shares, scaling = shares_of("digits", "dirichlet(0.3)", 12, "auto", 5, tmp_path)
    dataset = load("digits")
    federation = federate(dataset, "dirichlet(0.3)", clients=12, seed=5)
    assert [share.name for share in shares] == [f"client-{k:02d}" for k in range(12)]
    assert scaling == (tuple(dataset.mean.tolist()), tuple(dataset.std.tolist()))
    tests = []
    for k, share in enumerate(shares):
        own = load(share.data)
        start = federation.offsets[k]
        rows = federation.rows[start : start + federation.sizes[k]]
        assert np.array_equal(own.x_train, federation.x[rows].numpy())
        assert np.array_equal(own.y_train, federation.y[rows].numpy())
        assert own.classes == dataset.classes  # also where a class is missing
        tests.append(own.x_test)
    assert dataset.x_test is not None
    together = np.concatenate(tests)
    assert sorted(map(bytes, together)) == sorted(map(bytes, dataset.x_test))


def test_shares_with_held_out_rows(tmp_path: Path) -> None:
    shares, _ = shares_of("digits", "iid", 3, "holdout(0.25)", 0, tmp_path)
    federation = federate(load("digits"), "iid", clients=3, split="holdout(0.25)")
    for k, share in enumerate(shares):
        own = load(share.data)
        assert np.array_equal(own.x_test, federation.x[federation.held_out[k]].numpy())


def test_silos_stay_where_they_are(tmp_path: Path) -> None:
    for name in ("south", "north"):
        rows = "\n".join(f"{i},{i % 2}" for i in range(30))
        (tmp_path / f"{name}.csv").write_text(f"age,sick\n{rows}\n")
    shares, scaling = shares_of(f"{tmp_path}(label=sick)", "auto", 0, "auto", 0, tmp_path / "new")
    assert [share.name for share in shares] == ["north", "south"]
    assert shares[0].data == f"{tmp_path / 'north.csv'}(label=sick)"
    assert load(shares[0].data).sizes["train"] == 30
    assert scaling is None  # it is agreed
    assert not (tmp_path / "new").exists()
    with pytest.raises(KedgeError, match="has 2 silos"):
        shares_of(f"{tmp_path}(label=sick)", "auto", 3, "auto", 0, tmp_path / "new")
    with pytest.raises(KedgeError, match="how many members"):
        shares_of("digits", "auto", 0, "auto", 0, tmp_path / "new")
    with pytest.raises(KedgeError, match="nosuch: there is no such file or folder"):
        shares_of(str(tmp_path / "nosuch"), "auto", 0, "auto", 0, tmp_path / "new")


def test_a_federation_moves_if_others_have_taken_its_ports(tmp_path: Path) -> None:
    [port] = free_ports(1)
    spec = FederationSpec("token", port, (NodeSpec("north", "digits", *free_ports(1)),))
    assert _with_free_ports(tmp_path, spec) == spec
    with socket.create_server(("127.0.0.1", port)):
        moved = _with_free_ports(tmp_path, spec)
    assert moved.port != port
    assert FederationSpec.load(tmp_path) == moved
    connection = tomllib.loads((tmp_path / "flower" / "config.toml").read_text())["superlink"]
    assert connection["kedge"]["address"] == f"127.0.0.1:{moved.port}"


def test_numbers_of_nodes_become_names(tmp_path: Path) -> None:
    FederationSpec(
        "token", 1, (NodeSpec("north", "digits", 2), NodeSpec("south", "digits", 3))
    ).save(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "north.txt").write_text("SuperNode ID: 7\nlost\nSuperNode ID: 71\n")
    text = "node 71 did not reply; node 7 and a resident node did"
    assert with_names(tmp_path, text) == "north did not reply; node 7 and a resident node did"
