"""Which executions of a run are tried."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.planning import FORKS, make, planned
from torch.utils import backend_registration

import kedge
from kedge.core.tree import Weights
from kedge.engines import Execution
from kedge.engines.vector import Vector
from kedge.engines.workers import can_start_workers
from kedge.runs.planning import settings_of
from kedge.settings import Config
from kedge.tuning import placement, plan, timings
from kedge.tuning.memory import Need
from kedge.tuning.trial import RoundPiece, measure_need

LOOP, VECTOR, SHARED = Execution("loop"), Execution("vector"), Execution("loop", workers=4)
FUSED_LOOP, FUSED = Execution("loop", compile=True), Execution("vector", compile=True)
STREAMS, FUSED_STREAMS = Execution("loop", streams=4), Execution("loop", streams=4, compile=True)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, a C++ compiler, and no GPU that torch sees."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def candidates(device: str = "cpu", cohort: int = 6, **settings: Any) -> list[Execution]:
    sim: Any = SimpleNamespace(
        federation=SimpleNamespace(device=torch.device(device)),
        session=SimpleNamespace(cohort_size=cohort),
        weights=Weights({}, {}),
    )
    return plan.candidates(settings_of(Config(**settings)), sim)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("device", "compile", "expected"),
    [
        ("cpu", "off", [LOOP, VECTOR, SHARED]),
        ("cpu", "auto", [LOOP, VECTOR, SHARED, FUSED]),
        ("cpu", "on", [FUSED]),  # a loop is compiled on a GPU only
        ("cuda", "off", [LOOP, VECTOR, STREAMS]),
        ("cuda", "auto", [LOOP, VECTOR, STREAMS, FUSED_STREAMS, FUSED]),
        ("cuda", "on", [FUSED_STREAMS, FUSED]),
    ],
)
def test_what_is_tried(device: str, compile: str, expected: list[Execution]) -> None:
    assert candidates(device, compile=compile) == expected


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({"engine": "loop"}, "cpu", LOOP),
        ({"engine": "loop", "compile": "on"}, "cpu", LOOP),
        ({"engine": "loop", "compile": "on"}, "cuda", FUSED_LOOP),
        ({"engine": "vector"}, "cuda", VECTOR),
        ({"engine": "vector", "compile": "on"}, "cpu", FUSED),
        ({"engine": "vector", "chunk": 2}, "cpu", Execution("vector", chunk=2)),
        ({"workers": 3}, "cpu", Execution("loop", workers=3)),
    ],
)
def test_what_was_named_is_not_compared(
    settings: dict[str, Any], device: str, expected: Execution
) -> None:
    assert candidates(device, **settings) == [expected]


@pytest.mark.usefixtures("four_cores")
def test_a_cpu_compiles_if_it_has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert candidates() == [LOOP, VECTOR, SHARED]
    assert candidates("cuda") == [LOOP, VECTOR, STREAMS, FUSED_STREAMS, FUSED]


@pytest.mark.usefixtures("four_cores")
def test_streams_are_for_several_clients() -> None:
    assert candidates("cuda", cohort=1) == [LOOP, VECTOR, FUSED_LOOP, FUSED]
    assert candidates("cuda", cohort=3)[2:4] == [
        Execution("loop", streams=3),
        Execution("loop", streams=3, compile=True),
    ]


def test_more_at_once_than_was_asked_for_is_not_tried() -> None:
    assert candidates("cuda", chunk=2) == [
        LOOP,
        Execution("vector", chunk=2),
        Execution("loop", streams=2),
        Execution("loop", streams=2, compile=True),
        Execution("vector", chunk=2, compile=True),
    ]
    assert candidates("cuda", chunk=1)[2] == FUSED_LOOP


@pytest.mark.filterwarnings("ignore:.*do not fit")
def test_a_trial_with_fewer_clients_at_once_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it took would be remembered for more of them."""
    train_chunk, sizes = Vector.train_chunk, []

    def small(self: Vector, bound: Any, jobs: Any, steps: Any, *rest: Any) -> Any:
        sizes.append(len(steps))
        if len(steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train_chunk(self, bound, jobs, steps, *rest)

    sim = make(Config(clients=3))(0, LOOP)
    pieces = [RoundPiece([0, 1, 2], sim.session.workload.work)]
    assert set(timings._time_pieces(sim, [LOOP, VECTOR], 2, 1, pieces, 1, {})) == {
        LOOP,
        VECTOR,
    }
    monkeypatch.setattr(Vector, "train_chunk", small)
    assert set(timings._time_pieces(sim, [LOOP, VECTOR], 2, 1, pieces, 1, {})) == {LOOP}
    assert sizes[:2] == [3, 1]


def test_clients_side_by_side_take_their_memory_each() -> None:
    config = Config(clients=6)
    sim = make(config)(0, Execution("loop"))
    one, four = (
        placement.place(execution, Need(1000, 10), settings_of(config), sim)
        for execution in (LOOP, STREAMS)
    )
    assert (one.at_once, four.at_once) == (1, 4)
    assert four.total - one.total == 3 * 1000
    for share, streams in ((0.3, 2), (0.5, 0)):  # of the free memory for each, of which 0.8 is used
        large = placement.place(
            STREAMS, Need(int(share * one.available), 10), settings_of(config), sim
        )
        assert (large.at_once, large.execution.streams) == (max(1, streams), streams)
        assert large.total < large.available
    assert [timings.label(execution) for execution in (LOOP, STREAMS, FUSED_STREAMS)] == [
        "loop",
        "loop on 4 streams",
        "loop on 4 streams compiled",
    ]


@pytest.mark.usefixtures("four_cores")
def test_workers_are_tried_where_there_can_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(**given: Any) -> list[int]:
        return [execution.workers for execution in candidates(**given) if execution.workers]

    assert tried() == [4]
    assert tried(cohort=3) == [3]  # one for each client at most
    assert tried(cohort=1) == tried(device="cuda") == tried(device="mps") == []
    for target, name, value in (
        (os, "cpu_count", lambda: None),
        (multiprocessing, "get_all_start_methods", lambda: ["spawn"]),
        (multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True)),
        (torch.accelerator, "is_available", lambda: True),  # trials would take gradients
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert tried() == [], name
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert tried() == []


BESIDE_A_GPU = """
import torch
from torch.utils import backend_registration as backend

class Module(backend._DummyBackendModule):
    def get_rng_state(self, device): return torch.get_rng_state()
    def set_rng_state(self, state, device): pass

backend._setup_privateuseone_for_python_backend("madeup", Module())
torch.set_num_threads(1)
import kedge
for method in ("fedavg", "scaffold"):
    settings = {"clients": 3, "rounds": 2, "steps": 1, "seeds": (0, 1), "device": "cpu"}
    print(kedge.run(method, workers=2, **settings).array("loss").tolist())
torch.ones((), requires_grad=True).mul(2.0).backward()
try:
    kedge.run(workers=2, **settings)
except kedge.KedgeError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not can_start_workers()
    or not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs Linux, and a torch that lets a device be made up",
)
def test_workers_that_were_asked_for_start_beside_a_gpu(cache: Path) -> None:
    """Where torch sees a device, here one that is made up, no process can be forked that takes
    gradients once this one has: planning takes none."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_GPU],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *found, refused = done.stdout.splitlines()
    settings = {"clients": 3, "rounds": 2, "steps": 1, "seeds": (0, 1), "engine": "loop"}
    expected = [kedge.run(method, **settings).array("loss") for method in ("fedavg", "scaffold")]
    assert [json.loads(line) for line in found] == [losses.tolist() for losses in expected]
    assert refused.startswith("worker processes cannot be started after gradients were taken")
    stored = json.loads(cache.read_text()).values()
    assert all(record["needs"]["loop"] for record in stored)  # of workers as of the loop


@FORKS
def test_the_memory_of_workers_is_that_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(method="scaffold", clients=4)
    sim = make(config)(0, Execution("loop", state="host"))
    here, trials = os.getpid(), []

    def noted(*args: Any) -> Need | None:
        trials.append(os.getpid())
        return measure_need(*args)

    monkeypatch.setattr(plan, "measure_need", noted)
    found = plan._measure_need_before_fork(sim, LOOP, config.rounds)
    assert trials == [here]
    assert plan._measure_need_before_fork(sim, SHARED, config.rounds) == found is not None
    assert trials == [here]  # that was another process
    gpu: Any = SimpleNamespace(federation=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(plan, "measure_need", lambda *_: os.getpid())
    assert plan._measure_need_before_fork(gpu, SHARED, config.rounds) == here
    monkeypatch.setattr(plan, "measure_need", lambda *_: os._exit(3))
    assert plan._measure_need_before_fork(sim, SHARED, config.rounds) is None
    monkeypatch.setattr(plan, "TRIAL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(plan, "measure_need", lambda *_: time.sleep(60))
    assert plan._measure_need_before_fork(sim, SHARED, config.rounds) is None
    assert multiprocessing.active_children() == []


@FORKS
def test_a_process_that_failed_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(plan, "measure_need", lambda *_: os._exit(3))
    assert planned(workers=2).total_bytes == 0
    assert not cache.exists()
    monkeypatch.undo()
    monkeypatch.setenv("KEDGE_CACHE", str(cache.parent))
    assert planned(workers=2).total_bytes > 0
    assert len(json.loads(cache.read_text())) == 1
