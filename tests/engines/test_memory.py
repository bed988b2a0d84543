"""Before a run: its memory, where state lies, and its precision."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engines.planning import CPU, make, planned
from torch import Tensor

import kedge
from kedge.engines import Execution
from kedge.engines import device as precision
from kedge.errors import KedgeError
from kedge.runs.planning import settings_of
from kedge.settings import Config
from kedge.tuning import memory, placement, plan
from kedge.tuning.memory import Need
from kedge.tuning.placement import format_bytes
from kedge.tuning.trial import RoundPiece, measure_need, start_trial, training

# -- memory -----------------------------------------------------------------------------------


def test_bytes_are_counted_while_they_are_held() -> None:
    def work(lanes: int) -> Tensor:
        x = torch.zeros(lanes, 1000)  # 4 kB a lane
        y = (x + 1) * 2  # two more, the first of which is let go
        return y.view(-1)[:3]

    assert [memory.peak(lambda n=n: work(n), CPU) for n in (1, 2)] == [12_000, 24_000]
    there = torch.ones(10_000)
    assert memory.peak(lambda: there.view(100, 100)[:3].clone(), CPU) == 1200
    assert Need(100, 40).of(3) == 180
    assert [Need(100, 40).lanes(room) for room in (99, 100, 139, 140, 1000)] == [0, 1, 1, 2, 23]


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+fedprox", "moon"])
def test_the_memory_of_a_cohort_is_foretold(engine: str, method: str) -> None:
    config = Config(method=method, clients=12, model="mlp(hidden=[128])", engine=engine)
    sim = make(config)(0, Execution("loop", state="host"))
    found = measure_need(sim, engine, config.rounds)
    assert found is not None
    whole = start_trial(sim, Execution(engine), config.rounds)
    piece = RoundPiece(list(range(12)), dataclasses.replace(sim.session.workload.work, steps=3))
    assert found.of(12) == pytest.approx(memory.peak(training(whole, piece), CPU), rel=0.2)


def test_a_cohort_that_does_not_fit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 12, "model": "mlp(hidden=[128])", "engine": "vector", "seeds": (0,)}
    plain = planned(**settings)
    assert (plain.execution.chunk, plain.at_once) == (0, 12)
    assert plain.total_bytes > 12 * plain.lane_bytes
    held = plain.total_bytes - 12 * plain.lane_bytes
    monkeypatch.setattr(memory, "available", lambda _: int((held + 5.5 * plain.lane_bytes) / 0.8))
    tight = planned(**settings)
    assert 5 <= tight.execution.chunk <= 7  # data and server count as free: they are there already
    assert tight.at_once == tight.execution.chunk
    assert tight.total_bytes <= 0.8 * tight.available_bytes
    assert "12 clients at once would take" in tight.notes[0]
    assert planned(**settings, chunk=9).execution.chunk == 9  # what the user says
    one = kedge.run(**settings, rounds=3)
    monkeypatch.undo()
    other = kedge.run(**settings, rounds=3)
    np.testing.assert_allclose(one.array("loss"), other.array("loss"), rtol=1e-5)


def test_seeds_that_do_not_fit_together_train_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 4, "model": "mlp(hidden=[128])", "engine": "vector", "seeds": (0, 1, 2)}
    plain = planned(**settings)
    assert (plain.execution.chunk, plain.at_once) == (0, 12)
    monkeypatch.setattr(memory, "available", lambda _: int(0.9 * plain.total_bytes / 0.8))
    tight = planned(**settings)
    assert (tight.execution.chunk, tight.at_once) == (8, 8)
    assert tight.total_bytes < plain.total_bytes


def test_not_even_one_client_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 100_000)
    with pytest.raises(KedgeError) as caught:
        planned(model="mlp(hidden=[512])", batch=64)
    text = str(caught.value)
    assert text.startswith("this run does not fit into memory: one client takes 1 MB beside")
    assert "Make the batch smaller (--batch, now 64), use --precision bf16" in text
    assert "--state" not in text
    with pytest.raises(KedgeError, match="or move client state off the device: --state host"):
        planned(model="mlp(hidden=[512])", method="scaffold", state="device")


@pytest.mark.parametrize(
    ("free", "host", "where"),
    [(4.1, 0.0, "device"), (3.9, 2.1, "host"), (3.9, 1.9, "file")],
)
def test_where_clients_state_lies(
    free: float, host: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(method="scaffold", clients=20, seeds=(0,))
    sim = make(config)(0, Execution("loop", state="host"))
    kept = 20 * 4 * sum(p.numel() for p in sim.weights.params.values())
    there = sim.federation.nbytes + 2 * kept // 20  # data, and c of the server beside the weights
    monkeypatch.setattr(memory, "available", lambda _: int(free * kept) - there)
    monkeypatch.setattr(memory, "host_available", lambda: int(host * kept))
    found = placement.place(Execution("loop"), None, settings_of(config), sim)
    assert found.execution.state == where
    assert bool(found.notes) == (where != "device")
    named = dataclasses.replace(config, state="host")
    assert (
        placement.place(Execution("loop"), None, settings_of(named), sim).execution.state == "host"
    )


def test_a_file_of_state_stays_with_its_run_and_goes_with_it(tmp_path: Path) -> None:
    settings = {"clients": 8, "per_round": 3, "rounds": 6, "seeds": (0, 1), "engine": "vector"}
    seen = []

    def stop(seed: int, record: dict) -> None:
        seen.append(seed)
        if len(seen) == 5:
            raise RuntimeError("stopped")

    plain = kedge.run("scaffold", out=tmp_path / "plain", **settings)
    with pytest.raises(RuntimeError, match="stopped"):
        kedge.run("scaffold", out=tmp_path / "file", state="file", watch=stop, **settings)
    resumed = kedge.run("scaffold", out=tmp_path / "file", state="file", resume=True, **settings)
    assert np.array_equal(plain.array("loss"), resumed.array("loss"))
    stored = [
        load_file(tmp_path / n / "seed-1" / "checkpoint.safetensors") for n in ("plain", "file")
    ]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][n], stored[1][n]) for n in stored[0])
    how = json.loads((tmp_path / "file" / "environment.json").read_text())["how"]
    assert (how["state"], how["folder"]) == ("file", str(tmp_path / "file"))
    names = [{p.name for p in (tmp_path / n).rglob("*")} for n in ("plain", "file")]
    assert names[0] == names[1]


# -- precision --------------------------------------------------------------------------------


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_a_gpu_has_the_wanted_precision_for_as_long_as_a_run_takes() -> None:
    before = flags()
    for wanted, allowed in (("fp32", False), ("tf32", True), ("bf16", True)):
        with precision.precise(wanted, torch.device("cuda")):
            assert flags() == (allowed, allowed)
        assert flags() == before
    with pytest.raises(ValueError, match="x"), precision.precise("tf32", torch.device("cuda")):
        raise ValueError("x")
    assert flags() == before
    with precision.precise("bf16", CPU):
        assert flags() == before


def test_tf32_on_a_cpu_is_fp32_and_says_so(tmp_path: Path) -> None:
    settings = {"clients": 4, "rounds": 2, "seeds": (0,), "engine": "loop"}
    with pytest.warns(UserWarning, match="precision tf32 needs a GPU; cpu uses fp32"):
        found = kedge.run(precision="tf32", out=tmp_path / "run", **settings)
    assert np.array_equal(found.array("loss"), kedge.run(**settings).array("loss"))
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["precision"] == "fp32"


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_bf16_keeps_float32_weights_and_the_accuracy(engine: str, tmp_path: Path) -> None:
    settings = {"clients": 5, "rounds": 12, "seeds": (0,), "engine": engine}
    out = tmp_path / "run"
    low = kedge.run("scaffold", precision="bf16", out=out, **settings)
    full = kedge.run("scaffold", **settings)
    assert not np.array_equal(low.array("loss"), full.array("loss"))
    np.testing.assert_allclose(low.array("loss"), full.array("loss"), rtol=0.05)
    assert abs(low.last.mean - full.last.mean) < 1.5
    assert all(p.dtype == torch.float32 for p in low.models[0].parameters())
    stored = load_file(out / "seed-0" / "checkpoint.safetensors")
    assert {x.dtype for x in stored.values()} == {torch.float32, torch.int64}
    assert json.loads((out / "environment.json").read_text())["precision"] == "bf16"
    again = kedge.run("scaffold", precision="bf16", out=out, resume=True, **settings)
    assert np.array_equal(again.array("loss"), low.array("loss"))


def test_numbers_in_words() -> None:
    assert format_bytes(139_000_000_000) == "139 GB"
    assert [plan.format_seconds(s) for s in (0.0312, 9.4, 9.6, 119, 200, 9000)] == [
        "0.03 s", "9 s", "10 s", "119 s", "3.3 min", "2.5 h",
    ]  # fmt: skip
