"""Diagnose runs in their folders: checkpoints, replays, and what may be wrong with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge.api.train import fit
from kedge.data.datasets import load
from kedge.diagnostics.run import diagnose_run
from kedge.diagnostics.training import diagnose_training
from kedge.engines import Execution
from kedge.errors import DataError, KedgeError, NotFinite
from kedge.history.sheet import Sheet, read_sheet
from kedge.loading import files, load_file
from kedge.runs.build import simulation
from kedge.runs.train import experiment, method_jobs, run
from kedge.settings import Config

SETTINGS: dict[str, Any] = {
    "partition": "dirichlet(0.3)", "clients": 6, "per_round": 4, "rounds": 4, "seeds": (0,),
    "engine": "vector",
}  # fmt: skip


def settings(**changed: Any) -> Config:
    return Config(**SETTINGS | changed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "scaffold"
    run(settings(method="scaffold", seeds=(0, 3)), path)
    return path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "scaffold"))


def training(path: Path, **options: Any) -> Sheet:
    [sheet] = diagnose_run(path, ("training",), **options)
    return sheet


def numbers(sheet: Sheet) -> Any:
    return json.loads(sheet.to_json())["values"]


# -- states of a run --------------------------------------------------------------------------


def test_the_checkpoint_is_diagnosed_and_the_sheet_written(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    sheet = training(folder)
    assert sheet.title == "Training with scaffold after round 4"
    assert sheet.command == f"kedge diagnose {folder} --what training"
    assert sheet.date.startswith("20")
    stored = read_sheet(folder / "diagnosis" / "training.json")
    assert stored.findings == sheet.findings
    assert numbers(stored) == numbers(sheet)
    for path, content in before.items():  # the run itself is untouched
        assert path.read_bytes() == content
    assert [p.name for p in (folder / "diagnosis").iterdir()] == ["training.json"]


def test_a_replay_equals_a_run_that_stopped_there(folder: Path, tmp_path: Path) -> None:
    """Bit for bit: all numbers of the sheets are equal. Seed 3, clients with state."""
    lines: list[str] = []
    replayed = training(folder, rounds=[2], seed=3, report=lines.append)
    run(settings(method="scaffold", rounds=2, seeds=(3,)), tmp_path / "short")
    assert numbers(training(tmp_path / "short")) == numbers(replayed)
    assert len(lines) == 1
    assert lines[0].startswith("replaying 2 rounds of seed 3: about ")
    assert "--rounds 2 --seed 3" in replayed.command


def test_replayed_rounds_and_the_checkpoint_are_one_course(folder: Path) -> None:
    sheet = training(folder, rounds=[4, 0, 2, 4])
    assert [v["round"] for v in sheet.values["rounds"]] == [0, 2, 4]
    assert numbers(training(folder))["rounds"] == numbers(sheet)["rounds"][2:]


def test_the_state_is_that_before_the_last_surveys(tmp_path: Path) -> None:
    """CCVR calibrates the head after the last round; clients would train from before."""
    config = settings(method="ccvr", rounds=2)
    run(config, tmp_path / "ccvr")
    sim = simulation(config, load("digits"), 0, torch.device("cpu"), Execution("vector"))
    for _ in range(2):
        sim.run_round()
    assert numbers(diagnose_training(sim)) == numbers(training(tmp_path / "ccvr"))


def test_a_checkpoint_with_best_weights(tmp_path: Path) -> None:
    """A run with validation data keeps the weights of its best round beside the last ones."""
    run(settings(method="fedavg", rounds=2, validation=0.2), tmp_path / "run")
    assert training(tmp_path / "run").values["round"] == 2


def test_a_run_that_was_cut_is_replayed(folder: Path) -> None:
    """Without a checkpoint its records tell how far it got."""
    expected = numbers(training(folder, rounds=[4]))
    (folder / "seed-0" / "checkpoint.safetensors").unlink()
    (folder / "result.json").unlink()
    lines: list[str] = []
    assert numbers(training(folder, report=lines.append)) == expected
    assert lines[0].startswith("replaying 4 rounds of seed 0")


def test_a_replay_that_differs_is_told(folder: Path) -> None:
    path = folder / "seed-0" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["train_loss"] *= 1.5
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    lines: list[str] = []
    training(folder, rounds=[3], report=lines.append)
    assert "the replay differs from the run: its training loss by 33.33% at most" in lines[-1]


def test_another_device_is_told(folder: Path) -> None:
    path = folder / "environment.json"
    found = json.loads(path.read_text())
    expected = numbers(training(folder))
    path.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
    if not torch.cuda.is_available():
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace('device = "auto"', 'device = "cuda"'))
    lines: list[str] = []
    sheet = training(folder, report=lines.append)
    assert "was trained on 'NVIDIA H200', this is 'cpu'" in lines[0]
    assert numbers(sheet)["mean_cosine"] == pytest.approx(expected["mean_cosine"], abs=1e-5)


# -- comparisons and dispatch -----------------------------------------------------------------


def test_a_comparison_is_diagnosed_run_by_run(tmp_path: Path) -> None:
    configs = [settings(method=m, rounds=1) for m in ("fedavg", "fedprox(mu=1.0)")]
    experiment("compare", method_jobs(configs, pooled=True), tmp_path / "both")
    lines: list[str] = []
    sheets = diagnose_run(tmp_path / "both", ("training",), report=lines.append)
    assert [s.values["method"] for s in sheets] == ["fedavg", "fedprox(mu=1.0)"]
    assert any("trains on pooled data, without clients" in line for line in lines)
    assert (tmp_path / "both" / "fedprox_mu_1.0" / "diagnosis" / "training.json").is_file()
    with pytest.raises(KedgeError, match="it has one client, and no drift"):
        training(tmp_path / "both" / "pooled_data")


def test_every_diagnosis_gets_its_state(folder: Path) -> None:
    """The partition of the seed; and the state at the last wanted round, whatever comes first."""
    privacy, data, drift = diagnose_run(folder, ("privacy", "data", "training"), rounds=[3, 1])
    assert [s.name for s in (privacy, data, drift)] == ["privacy", "data", "training"]
    [other] = diagnose_run(folder, ("privacy",), rounds=[3], client="client 1")
    assert other.values["client"] == 1
    assert other.command.endswith("--client 'client 1'")
    [alone] = diagnose_run(folder, ("privacy",), rounds=[3])
    assert numbers(alone) == numbers(privacy)
    names = sorted(p.name for p in (folder / "diagnosis").iterdir())
    assert names == ["data.json", "privacy.json", "training.json"]
    [other] = diagnose_run(folder, ("data",), seed=3)
    assert numbers(other) != numbers(data)
    shutil.rmtree(folder / "seed-0")  # data need no round
    assert numbers(diagnose_run(folder, ("data",))[0]) == numbers(data)


# -- what may be wrong ------------------------------------------------------------------------


def test_no_run(tmp_path: Path, finished: Path) -> None:
    for path, text in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path, "holds no run"),
        (finished / "seed-0", f"is part of a run; give {finished}"),
        (finished.parent, "holds several runs; give one of them: scaffold"),
    ):
        with pytest.raises(KedgeError, match=text):
            diagnose_run(path)
    with pytest.raises(KedgeError, match="is not one of: data, training, privacy"):
        diagnose_run(finished, ("weather",))
    with pytest.raises(KedgeError, match="is not one of"):
        diagnose_run(finished, ())


@pytest.mark.parametrize("rounds", [[5], [-1, 2], []])
def test_rounds_beyond_the_run(finished: Path, rounds: list[int]) -> None:
    with pytest.raises(KedgeError, match="has 4 rounds of seed 0; choose rounds from 0 to 4, "):
        training(finished, rounds=rounds)


def test_an_unknown_seed(finished: Path) -> None:
    with pytest.raises(KedgeError, match="has no seed 7; it has: 0, 3"):
        training(finished, seed=7)


def test_a_run_without_a_finished_round(folder: Path) -> None:
    shutil.rmtree(folder / "seed-3")
    with pytest.raises(KedgeError, match=r"no finished round of seed 3 yet.*--resume"):
        training(folder, seed=3)
    assert training(folder, seed=3, rounds=[0]).values["round"] == 0


def test_a_damaged_checkpoint(folder: Path) -> None:
    path = folder / "seed-0" / "checkpoint.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        training(folder)
    other = folder.parent / "other"
    run(settings(method="scaffold", rounds=1, model="mlp(hidden=[9])"), other)
    shutil.copy(other / "seed-0" / "checkpoint.safetensors", path)
    with pytest.raises(DataError, match="checkpoint in .* does not fit: this state belongs"):
        training(folder)


def test_data_that_are_gone_or_changed(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    path = tmp_path / "own.npz"

    def save(shift: float) -> None:
        x, y = draw.normal(size=(60, 5)) + shift, np.arange(60) % 3
        np.savez(path, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])

    save(0.0)
    run(settings(data=str(path), rounds=1), tmp_path / "run")
    assert training(tmp_path / "run").values["round"] == 1
    save(1.0)
    with pytest.raises(DataError, match="the data have changed since"):
        training(tmp_path / "run")
    path.unlink()
    with pytest.raises(DataError, match=r"the data of the run in .* cannot be read: .*own\.npz"):
        training(tmp_path / "run")


def test_a_changed_partition(folder: Path) -> None:
    path = folder / "seed-0" / "partition.json"
    shutil.copy(folder / "seed-3" / "partition.json", path)
    with pytest.raises(DataError, match="the partition of seed 0 has changed"):
        training(folder)


def test_data_in_memory(tmp_path: Path) -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    fit(torch.nn.Linear(3, 2), [(x[:10], y[:10]), (x[10:], y[10:])], rounds=1, out=tmp_path / "own")
    with pytest.raises(KedgeError, match=r"data in memory \(kedge\.fit\)"):
        training(tmp_path / "own")


def test_a_run_that_diverges(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(settings(method="fedavg", rounds=1), path)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("lr = 0.1", "lr = 1e12"))
    with pytest.raises(
        NotFinite, match="has diverged: the loss .* Earlier rounds can be diagnosed"
    ):
        training(path)


def test_a_run_with_loaded_parts(tmp_path: Path) -> None:
    source = tmp_path / "halved.py"
    source.write_text(
        "from dataclasses import dataclass\nimport kedge\n\n\n"
        "@kedge.register\n@dataclass(frozen=True)\nclass Halved(kedge.Part):\n"
        '    """Halve the gradient."""\n\n'
        "    def correct(self, v, params, grads):\n"
        "        return {n: -0.5 * g for n, g in grads.items()}\n"
    )
    loaded = load_file(source)
    try:
        run(settings(method="halved", rounds=1), tmp_path / "run")
        sheet = training(tmp_path / "run")
        assert sheet.command.endswith(f" --load {source}")
        files[source] = loaded._replace(sha256="0" * 64)
        with pytest.raises(KedgeError, match=r"halved\.py has changed since"):
            training(tmp_path / "run")
    finally:
        for registry, entry in loaded.entries:
            registry.remove(entry)
        del files[source]
    with pytest.raises(KedgeError, match=r"started with: --load .*halved\.py"):
        training(tmp_path / "run")


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "diagnosis").write_text("a file")
    with pytest.raises(DataError, match="diagnosis cannot be made"):
        training(folder)


def test_a_run_that_is_read_only_is_diagnosed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    lines: list[str] = []
    [sheet] = diagnose_run(folder, ("data",), report=lines.append)
    assert sheet.findings
    assert "so that the diagnosis is not kept there" in lines[0]
    assert not (folder / "diagnosis").exists()


def test_the_number_of_threads_is_that_of_before(finished: Path) -> None:
    assert torch.get_num_threads() == 1
    training(finished)
    assert torch.get_num_threads() == 1
