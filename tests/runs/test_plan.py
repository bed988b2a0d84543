"""Before a run: the engine that is the fastest, memory and time, precision, where state lies."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import backend_registration

import kedge
from kedge.config import Config
from kedge.errors import KedgeError
from kedge.runs import fit, measure, memory, plan, precision, remember, runner
from kedge.runs.fit import in_bytes
from kedge.runs.measure import Timings
from kedge.runs.memory import Need
from kedge.runs.trial import Piece, need, training, trial
from kedge.sim.engine import How
from kedge.sim.loop import Loop
from kedge.sim.vector import Vector
from kedge.sim.workers import Workers, possible
from kedge.zoo.datasets import load

CPU = torch.device("cpu")
FORKS = pytest.mark.skipif(
    not possible() or torch.accelerator.is_available(),
    reason="forks after gradients were taken, which needs Linux without a GPU",
)
TRAIN = {engine: engine.train for engine in (Loop, Vector, Workers)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is long enough to be measured, and that takes a moment only."""
    monkeypatch.setattr(measure, "SHORT", 0.0)
    monkeypatch.setattr(measure, "LEAST", 0.3)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def make(config: Config) -> plan.Make:
    dataset = load(config.data)
    return lambda seed, how: runner.simulation(config, dataset, seed, CPU, how)


def planned(**settings: Any) -> plan.Plan:
    config = Config(**{"clients": 6, "rounds": 3, "seeds": (0, 1), "steps": 4} | settings)
    return plan.choose(config, make(config), CPU, None)


def slow(monkeypatch: pytest.MonkeyPatch, engine: type, seconds: float = 0.02) -> None:
    """So much longer for every client-step."""
    train = TRAIN[engine]

    def slowly(self: Any, bound: Any, cohort: Any, phases: Any) -> Any:
        time.sleep(seconds * sum(cohort.steps))
        return train(self, bound, cohort, phases)

    monkeypatch.setattr(engine, "train", slowly)
    if engine is Loop and "train" not in vars(Workers):  # which would inherit it
        monkeypatch.setattr(Workers, "train", TRAIN[Workers], raising=False)


# -- the candidates ---------------------------------------------------------------------------

LOOP, VECTOR, SHARED = How("loop"), How("vector"), How("loop", workers=4)
FUSED_LOOP, FUSED = How("loop", compile=True), How("vector", compile=True)
STREAMS, FUSED_STREAMS = How("loop", streams=4), How("loop", streams=4, compile=True)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, a C++ compiler, and no GPU that torch sees."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def ways(device: str = "cpu", cohort: int = 6, **settings: Any) -> list[How]:
    sim: Any = SimpleNamespace(
        federation=SimpleNamespace(device=torch.device(device)), per_round=cohort
    )
    return plan.candidates(Config(**settings), sim)


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
def test_what_is_tried(device: str, compile: str, expected: list[How]) -> None:
    assert ways(device, compile=compile) == expected


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({"engine": "loop"}, "cpu", LOOP),
        ({"engine": "loop", "compile": "on"}, "cpu", LOOP),
        ({"engine": "loop", "compile": "on"}, "cuda", FUSED_LOOP),
        ({"engine": "vector"}, "cuda", VECTOR),
        ({"engine": "vector", "compile": "on"}, "cpu", FUSED),
        ({"engine": "vector", "chunk": 2}, "cpu", How("vector", chunk=2)),
        ({"workers": 3}, "cpu", How("loop", workers=3)),
    ],
)
def test_what_was_named_is_not_compared(
    settings: dict[str, Any], device: str, expected: How
) -> None:
    assert ways(device, **settings) == [expected]


@pytest.mark.usefixtures("four_cores")
def test_a_cpu_compiles_if_it_has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert ways() == [LOOP, VECTOR, SHARED]
    assert ways("cuda") == [LOOP, VECTOR, STREAMS, FUSED_STREAMS, FUSED]


@pytest.mark.usefixtures("four_cores")
def test_streams_are_for_several_clients() -> None:
    assert ways("cuda", cohort=1) == [LOOP, VECTOR, FUSED_LOOP, FUSED]
    assert ways("cuda", cohort=3)[2:4] == [
        How("loop", streams=3),
        How("loop", streams=3, compile=True),
    ]


def test_more_at_once_than_was_asked_for_is_not_tried() -> None:
    assert ways("cuda", chunk=2) == [
        LOOP,
        How("vector", chunk=2),
        How("loop", streams=2),
        How("loop", streams=2, compile=True),
        How("vector", chunk=2, compile=True),
    ]
    assert ways("cuda", chunk=1)[2] == FUSED_LOOP


@pytest.mark.filterwarnings("ignore:.*do not fit")
def test_a_trial_with_fewer_clients_at_once_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it took would be remembered for more of them."""
    replies, sizes = Vector.replies, []

    def small(self: Vector, bound: Any, jobs: Any, steps: Any, *rest: Any) -> Any:
        sizes.append(len(steps))
        if len(steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replies(self, bound, jobs, steps, *rest)

    sim = make(Config(clients=3))(0, LOOP)
    pieces = [Piece([0, 1, 2], sim.work)]
    assert set(measure._tried(sim, [LOOP, VECTOR], 2, 1, pieces, 1)) == {LOOP, VECTOR}
    monkeypatch.setattr(Vector, "replies", small)
    assert set(measure._tried(sim, [LOOP, VECTOR], 2, 1, pieces, 1)) == {LOOP}
    assert sizes[:2] == [3, 1]


def test_clients_side_by_side_take_their_memory_each() -> None:
    config = Config(clients=6)
    sim = make(config)(0, How("loop"))
    one, four = (fit.fit(how, Need(1000, 10), config, sim) for how in (LOOP, STREAMS))
    assert (one.at_once, four.at_once) == (1, 4)
    assert four.total - one.total == 3 * 1000
    for share, streams in ((0.3, 2), (0.5, 0)):  # of the free memory for each, of which 0.8 is used
        large = fit.fit(STREAMS, Need(int(share * one.available), 10), config, sim)
        assert (large.at_once, large.how.streams) == (max(1, streams), streams)
        assert large.total < large.available
    assert [measure.label(how) for how in (LOOP, STREAMS, FUSED_STREAMS)] == [
        "loop",
        "loop on 4 streams",
        "loop on 4 streams compiled",
    ]


@pytest.mark.usefixtures("four_cores")
def test_workers_are_tried_where_there_can_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(**given: Any) -> list[int]:
        return [how.workers for how in ways(**given) if how.workers]

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


@pytest.mark.skipif(
    not possible() or not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
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
    sim = make(config)(0, How("loop", state="host"))
    here, trials = os.getpid(), []

    def noted(*args: Any) -> Need | None:
        trials.append(os.getpid())
        return need(*args)

    monkeypatch.setattr(plan, "need", noted)
    found = plan._need(sim, LOOP, config.rounds)
    assert trials == [here]
    assert plan._need(sim, SHARED, config.rounds) == found is not None
    assert trials == [here]  # that was another process
    gpu: Any = SimpleNamespace(federation=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(plan, "need", lambda *_: os.getpid())
    assert plan._need(gpu, SHARED, config.rounds) == here  # where there will be none
    monkeypatch.setattr(plan, "need", lambda *_: os._exit(3))
    assert plan._need(sim, SHARED, config.rounds) is None
    assert multiprocessing.active_children() == []


@FORKS
def test_a_process_that_failed_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(plan, "need", lambda *_: os._exit(3))
    assert planned(workers=2).total_bytes == 0
    assert not cache.exists()
    monkeypatch.undo()
    monkeypatch.setenv("KEDGE_CACHE", str(cache.parent))
    assert planned(workers=2).total_bytes > 0
    assert len(json.loads(cache.read_text())) == 1


# -- the engine -------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("quick_one", "chosen"),
    [(Loop, How("loop")), (Vector, How("vector")), (Workers, How("loop", workers=2))],
)
def test_the_fastest_way_is_taken_and_remembered(
    quick_one: type, chosen: How, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    for other in {Loop, Vector, Workers} - {quick_one}:
        slow(monkeypatch, other)
    small = {"clients": 3, "steps": 2, "seeds": (0,)}
    first = planned(**small)
    assert first.how == chosen
    assert first.reason.startswith(
        "engine loop with 2 workers: " if chosen.workers else f"engine {chosen.engine}: "
    )
    for other in {"loop", "vector", "2 workers"} - {measure.label(chosen)}:
        assert f", {other} " in first.reason
    assert first.reason.endswith("; measured, 3 clients, batch 32, 1 thread")
    assert len(json.loads(cache.read_text())) == 1

    def never(*_: Any) -> None:
        raise AssertionError("it was to be remembered")

    monkeypatch.setattr(measure, "times", never)
    monkeypatch.setattr(plan, "need", never)
    again = planned(**small)
    assert again.reason == first.reason + " (remembered)"
    assert (again.how, again.total_seconds) == (first.how, first.total_seconds)


WAYS = [How("loop"), How("vector"), How("loop", workers=2), How("vector", compile=True)]


@pytest.mark.parametrize(
    ("steps", "chosen", "in_a_long_run"),
    [
        ((1.0, 0.96, 2.0, 0.98), 0, 0),  # within chance: the simpler
        ((1.0, 0.94, 2.0, 0.9), 1, 1),
        ((1.0, 1.5, 0.96, 0.8), 0, 3),  # compiling takes a while
        ((1.0, 1.5, 0.96, 0.9), 0, 0),  # and is not worth it for little
        ((1.0, 1.5, 0.5, 0.5), 2, 2),
        ((1.0, 0.52, 0.5, 0.4), 1, 3),
        ((math.inf, 0.5, 2.0, 0.4), 1, 3),
        ((math.inf, math.inf, math.inf, math.inf), 0, 0),
    ],
)
def test_the_simplest_of_equally_fast_ones(
    steps: tuple[float, ...], chosen: int, in_a_long_run: int
) -> None:
    took = dict(zip(map(measure.label, WAYS), steps, strict=True))
    assert measure.fastest(WAYS, Timings(took, took, 0.0), 100) == WAYS[chosen]
    assert measure.fastest(WAYS, Timings(took, took, 0.0), 1000) == WAYS[in_a_long_run]


@pytest.mark.parametrize(("vector", "tried"), [(1.4, True), (1.6, False)])
def test_compiling_is_tried_for_what_is_not_far_behind(
    vector: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"loop": 1.0, "vector": vector, "2 workers": 1.2, "vector compiled": 0.5}
    asked: list[str] = []

    def tell(sim: Any, ways: Any, rounds: int, seeds: int, pieces: list[Any], *_: Any) -> Any:
        asked.extend(map(measure.label, ways))
        return {how: [took[measure.label(how)]] * len(pieces) for how in ways}

    monkeypatch.setattr(measure, "_tried", tell)
    for bound in ("SHORT", "LONG"):
        monkeypatch.setattr(measure, bound, 0.0)
    found = measure.times(make(Config(clients=3))(0, How("loop")), WAYS, 10, 1)
    assert asked == list(took)[: 4 if tried else 3]
    assert found is not None
    assert math.isfinite(found.steps["vector compiled"]) == tried


def test_a_short_run_and_a_named_engine_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned().reason == "engine vector: too short a run to measure"
    monkeypatch.setattr(measure, "times", None)
    for engine in ("loop", "vector"):
        found = planned(engine=engine)
        assert (found.how.engine, found.reason) == (engine, "")
        assert found.total_bytes > 0


@pytest.mark.usefixtures("quick")
def test_everything_that_matters_is_part_of_what_is_remembered() -> None:
    base = {"clients": 6, "rounds": 3, "seeds": (0, 1), "steps": 4}
    changes: list[dict[str, Any]] = [
        {}, {"batch": 16}, {"steps": 5}, {"per_round": 3}, {"method": "fedprox"}, {"lr": 0.2},
        {"model": "mlp(hidden=[32])"}, {"model": "linear"}, {"optimizer": "adam"},
        {"precision": "bf16"}, {"engine": "loop"}, {"seeds": (0,)}, {"augment": "flip"},
        {"batchnorm": "frozen"}, {"chunk": 2},
    ]  # fmt: skip
    keys = []
    for change in changes:
        config = Config(**base | change)
        sim = make(config)(0, How("loop", state="host"))
        keys.append(json.dumps(plan._key(config, sim), sort_keys=True))
    assert len(set(keys)) == len(keys)
    config = Config(**base)
    sim = make(config)(0, How("loop", state="host"))
    torch.set_num_threads(2)
    try:
        assert json.dumps(plan._key(config, sim), sort_keys=True) not in keys
    finally:
        torch.set_num_threads(1)
    # how long a run is does not change which way is the fastest
    longer = Config(**base | {"rounds": 99, "eval_every": 7, "seeds": (5, 6), "target": 3.0})
    assert json.dumps(plan._key(longer, sim), sort_keys=True) == keys[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "content",
    ["", "{", "[1, 2]", '{"a": 3}', "DIGEST: 5", 'DIGEST: {"needs": 3}', 'DIGEST: {"needs": {}}'],
)
def test_a_damaged_cache_is_ignored(content: str, cache: Path) -> None:
    planned()
    [digest] = json.loads(cache.read_text())
    cache.write_text("{" + content.replace("DIGEST", f'"{digest}"') + "}" * ("DIGEST" in content))
    again = planned()
    assert again.reason.endswith("1 thread")
    assert planned().reason == again.reason + " (remembered)"


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "file" / "below"))
    for _ in range(2):
        assert planned().reason.endswith("1 thread")


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remember._path() == tmp_path / "cache" / "plans.json"
    monkeypatch.delenv("KEDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert remember._path() == Path("/elsewhere/kedge/plans.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert remember._path() == Path("/home/somebody/.cache/kedge/plans.json")


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "ENTRIES", 3)
    for i in (0, 1, 2, 0, 3):
        remember.keep({"i": i}, {"value": i})
    assert [remember.recall({"i": i}) for i in range(4)] == [
        {"value": 0}, None, {"value": 2}, {"value": 3},
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 3, "rounds": 3, "seeds": (0,), "steps": 2, "method": "scaffold"}
    slow(monkeypatch, Vector)
    slow(monkeypatch, Workers)
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = kedge.run(**settings)
    assert torch.equal(before, torch.get_rng_state())
    assert threads == torch.get_num_threads()
    assert multiprocessing.active_children() == []
    assert found.engine == "loop"
    assert np.array_equal(found.array("loss"), kedge.run(**settings, engine="loop").array("loss"))


class Branching(nn.Module):
    """Looks at values, which cannot be done for all clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.sum() > 0 else self.head(2 * x)


@pytest.mark.usefixtures("quick")
def test_a_model_that_vector_cannot_run_runs_in_the_loop(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    clients = [(g.normal(size=(20, 4)).astype("float32"), g.integers(0, 2, 20)) for _ in range(3)]
    result = kedge.fit(Branching(), clients, rounds=2, out=tmp_path / "run")
    assert result.engine == "loop"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "engine vector cannot run this model with this method" in log


# -- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"steps": 40}, {"steps": 0, "epochs": 4.0}])
@pytest.mark.parametrize("budget", [0.05, 0.5, 5.0, 100.0])
def test_a_round_follows_from_its_pieces(budget: float, settings: dict) -> None:
    """With costs that are linear in clients and steps, what follows is what a round takes."""
    config = Config(clients=8, **settings)
    sim = make(config)(0, How("loop"))
    own, cost = list(range(8)), measure.Cost(0.003, 0.01)
    steps = Piece(own, sim.work).steps(sim)
    assert steps == (
        320 if settings["steps"] else sum(-(-4 * n // 32) for n in sim.federation.sizes)
    )
    pieces, repeats = measure._pieces(sim, own, cost, budget)
    took = [cost.of(piece, sim) for piece in pieces]
    assert repeats == (measure.REPEATS if budget > 0.05 else 0)
    assert (1 + repeats) * sum(took) <= 1.2 * budget
    assert len(pieces) == {0.05: 1, 0.5: 2, 5.0: 2, 100.0: 1}[budget]
    found = measure._whole(took, pieces, sim, own, cost)
    assert found == pytest.approx(8 * 0.003 + steps * 0.01)


@pytest.mark.usefixtures("quick")
def test_the_time_of_a_run_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of 6 client-steps of 10 ms and a little more, three rounds."""
    slow(monkeypatch, Loop, 0.01)
    slow(monkeypatch, Vector, 0.03)
    slow(monkeypatch, Workers, 0.03)
    found = planned(clients=3, steps=2, seeds=(0,))
    assert found.how.engine == "loop"
    assert 0.06 < found.round_seconds < 0.15
    assert found.total_seconds > 3 * found.round_seconds  # three tests
    assert found.total_seconds == pytest.approx(3 * found.round_seconds, rel=0.3)


def test_in_words() -> None:
    some = plan.Plan(
        How("vector"), "NVIDIA H200", 50, 24_000_000, 1_200_000_000, 139_000_000_000, 0.0312, 40.2,
        "engine vector: because",
    )  # fmt: skip
    assert some.lines() == [
        "engine vector: because",
        "about 1.2 GB of 139 GB free on NVIDIA H200 (50 clients at once), "
        "about 0.03 s a round, 40 s in all",
    ]
    assert plan.Plan(How("loop"), "cpu").lines() == []
    assert [plan._in_ms(s) for s in (0.0000123, 0.00011, 0.0003, 0.0123, 1.5)] == [
        "0.012", "0.11", "0.30", "12", "1500",
    ]  # fmt: skip


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
    sim = make(config)(0, How("loop", state="host"))
    found = need(sim, engine, config.rounds)
    assert found is not None
    whole = trial(sim, How(engine), config.rounds)
    piece = Piece(list(range(12)), dataclasses.replace(sim.work, steps=3))
    assert found.of(12) == pytest.approx(memory.peak(training(whole, piece), CPU), rel=0.2)


def test_a_cohort_that_does_not_fit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 12, "model": "mlp(hidden=[128])", "engine": "vector", "seeds": (0,)}
    plain = planned(**settings)
    assert (plain.how.chunk, plain.at_once) == (0, 12)
    assert plain.total_bytes > 12 * plain.lane_bytes
    held = plain.total_bytes - 12 * plain.lane_bytes
    monkeypatch.setattr(memory, "available", lambda _: int((held + 5.5 * plain.lane_bytes) / 0.8))
    tight = planned(**settings)
    assert 5 <= tight.how.chunk <= 7  # data and server count as free: they are there already
    assert tight.at_once == tight.how.chunk
    assert tight.total_bytes <= 0.8 * tight.available_bytes
    assert "12 clients at once would take" in tight.notes[0]
    assert planned(**settings, chunk=9).how.chunk == 9  # what the user says
    one = kedge.run(**settings, rounds=3)
    monkeypatch.undo()
    other = kedge.run(**settings, rounds=3)
    np.testing.assert_allclose(one.array("loss"), other.array("loss"), rtol=1e-5)


def test_seeds_that_do_not_fit_together_train_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 4, "model": "mlp(hidden=[128])", "engine": "vector", "seeds": (0, 1, 2)}
    plain = planned(**settings)
    assert (plain.how.chunk, plain.at_once) == (0, 12)
    monkeypatch.setattr(memory, "available", lambda _: int(0.9 * plain.total_bytes / 0.8))
    tight = planned(**settings)
    assert (tight.how.chunk, tight.at_once) == (8, 8)
    assert tight.total_bytes < plain.total_bytes


def test_not_even_one_client_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 100_000)
    with pytest.raises(KedgeError) as caught:
        planned(model="mlp(hidden=[512])", batch=64)
    text = str(caught.value)
    assert text.startswith("this run does not fit into the memory: one client takes 1 MB beside")
    assert "Make the batch smaller (--batch, now 64), use --precision bf16" in text
    assert "--state" not in text
    with pytest.raises(KedgeError, match="or keep clients' state elsewhere: --state host"):
        planned(model="mlp(hidden=[512])", method="scaffold", state="device")


@pytest.mark.parametrize(
    ("free", "host", "where"),
    [(4.1, 0.0, "device"), (3.9, 2.1, "host"), (3.9, 1.9, "file")],
)
def test_where_clients_state_lies(
    free: float, host: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(method="scaffold", clients=20, seeds=(0,))
    sim = make(config)(0, How("loop", state="host"))
    kept = 20 * 4 * sum(p.numel() for p in sim.weights.params.values())
    there = fit._data_bytes(sim) + 2 * kept // 20  # data, and c of the server beside the weights
    monkeypatch.setattr(memory, "available", lambda _: int(free * kept) - there)
    monkeypatch.setattr(memory, "host_available", lambda: int(host * kept))
    found = fit.fit(How("loop"), None, config, sim)
    assert found.how.state == where
    assert bool(found.notes) == (where != "device")
    named = dataclasses.replace(config, state="host")
    assert fit.fit(How("loop"), None, named, sim).how.state == "host"


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
    with pytest.warns(UserWarning, match="precision tf32 is for GPUs; on this cpu it is fp32"):
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
    assert in_bytes(139_000_000_000) == "139 GB"
    assert [plan.in_seconds(s) for s in (0.0312, 9.4, 9.6, 119, 200, 9000)] == [
        "0.03 s", "9 s", "10 s", "119 s", "3.3 min", "2.5 h",
    ]  # fmt: skip
