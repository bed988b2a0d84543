"""The plan of a run: the fastest execution, and the time that it will take."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.planning import TRAIN, make, planned, slow
from torch import Tensor, nn

import kedge
from kedge.engines import Execution
from kedge.engines.loop import Loop
from kedge.engines.vector import Vector
from kedge.engines.workers import Workers
from kedge.runs.planning import settings_of
from kedge.settings import Config
from kedge.tuning import plan, timings
from kedge.tuning.timings import Timings
from kedge.tuning.trial import RoundPiece

# -- the engine -------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("quick_one", "chosen"),
    [
        (Loop, Execution("loop", threads=1)),
        (Vector, Execution("vector", threads=1)),
        (Workers, Execution("loop", workers=2, threads=1)),
    ],
)
def test_the_fastest_way_is_taken_and_remembered(
    quick_one: type, chosen: Execution, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    for other in {Loop, Vector, Workers} - {quick_one}:
        slow(monkeypatch, other)
    small = {"clients": 3, "steps": 2, "seeds": (0,)}
    first = planned(**small)
    assert first.execution == chosen
    assert first.reason.startswith(
        "engine loop with 2 workers: " if chosen.workers else f"engine {chosen.engine}: "
    )
    for other in {"loop", "vector", "2 workers"} - {timings.label(chosen)}:
        assert f", {other} " in first.reason
    assert first.reason.endswith("; measured, 3 clients, batch 32, 1 thread")
    assert len(json.loads(cache.read_text())) == 1

    def never(*_: Any) -> None:
        raise AssertionError("it was to be remembered")

    monkeypatch.setattr(timings, "measure", never)
    monkeypatch.setattr(plan, "measure_need", never)
    again = planned(**small)
    assert again.reason == first.reason + " (cached)"
    assert (again.execution, again.total_seconds) == (first.execution, first.total_seconds)


CANDIDATES = [
    Execution("loop"),
    Execution("vector"),
    Execution("loop", workers=2),
    Execution("vector", compile=True),
]


@pytest.mark.parametrize(
    ("steps", "chosen", "in_a_long_run"),
    [
        ((1.0, 0.96, 2.0, 0.98), 0, 0),  # within chance: the simpler
        ((1.0, 0.94, 2.0, 0.9), 1, 1),
        ((1.0, 1.5, 0.96, 0.8), 0, 3),  # compiling takes a while
        ((1.0, 1.5, 0.96, 0.9), 0, 2),  # and is not worth it for little, but a tenth is too much
        ((1.0, 1.5, 0.97, 0.92), 0, 0),
        ((1.15, 2.0, 2.0, 1.0), 0, 3),
        ((1.0, 1.5, 0.5, 0.5), 2, 2),
        ((1.0, 0.52, 0.5, 0.4), 1, 3),
        ((math.inf, 0.5, 2.0, 0.4), 1, 3),
        ((math.inf, math.inf, math.inf, math.inf), 0, 0),
    ],
)
def test_the_simplest_of_equally_fast_ones(
    steps: tuple[float, ...], chosen: int, in_a_long_run: int
) -> None:
    took = dict(zip(map(timings.label, CANDIDATES), steps, strict=True))
    assert timings.fastest(CANDIDATES, Timings(took, took, 0.0), 100) == CANDIDATES[chosen]
    assert timings.fastest(CANDIDATES, Timings(took, took, 0.0), 1000) == CANDIDATES[in_a_long_run]


@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_the_choice_is_within_a_tenth_of_the_best(spread: float) -> None:
    """Noise, and what compilation has to gain, do not add up to more."""
    values = [0.8 + 0.04 * i for i in range(10)]
    for steps in itertools.product(values, values[::2], values[::2]):
        some = [CANDIDATES[i] for i in (0, 1, 3)]
        took = dict(zip(map(timings.label, some), steps, strict=True))
        known = Timings(took, took, 0.0, spread=dict.fromkeys(took, spread))
        chosen = took[timings.label(timings.fastest(some, known, 1000))]
        assert chosen <= 1.1 * (1 + spread) * min(steps) + 1e-9


@pytest.mark.parametrize(("vector", "tried"), [(1.4, True), (1.6, False)])
def test_compiling_is_tried_for_what_is_not_far_behind(
    vector: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"loop": 1.0, "vector": vector, "2 workers": 1.2, "vector compiled": 0.5}
    asked: list[str] = []

    def tell(sim: Any, candidates: Any, rounds: int, seeds: int, pieces: list[Any], *_: Any) -> Any:
        asked.extend(map(timings.label, candidates))
        return {
            execution: [[took[timings.label(execution)]]] * len(pieces) for execution in candidates
        }

    monkeypatch.setattr(timings, "_time_pieces", tell)
    for bound in ("MIN_RUN_S", "MIN_COMPILED_RUN_S"):
        monkeypatch.setattr(timings, bound, 0.0)
    found = timings.measure(make(Config(clients=3))(0, Execution("loop")), CANDIDATES, 10, 1)
    assert asked == list(took)[: 4 if tried else 3]
    assert found is not None
    assert math.isfinite(found.steps["vector compiled"]) == tried


def test_a_short_run_and_a_named_engine_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned().reason == "engine vector: too short a run to measure"
    monkeypatch.setattr(timings, "measure", None)
    for engine in ("loop", "vector"):
        found = planned(engine=engine)
        assert (found.execution.engine, found.reason) == (engine, "")
        assert found.total_bytes > 0


def key(config: Config, sim: Any) -> str:
    settings = settings_of(config)
    found = plan.key_of(plan.candidates(settings, sim), settings, sim)
    return json.dumps(found, sort_keys=True)


@pytest.mark.usefixtures("quick")
def test_everything_that_matters_is_part_of_what_is_remembered() -> None:
    base = {"clients": 6, "rounds": 3, "seeds": (0, 1), "steps": 4}
    changes: list[dict[str, Any]] = [
        {}, {"batch": 16}, {"steps": 5}, {"per_round": 3}, {"method": "fedprox"}, {"lr": 0.2},
        {"model": "mlp(hidden=[32])"}, {"model": "linear"}, {"optimizer": "adam"},
        {"precision": "bf16"}, {"engine": "loop"}, {"seeds": (0,)}, {"augment": "flip"},
        {"batchnorm": "frozen"}, {"chunk": 2}, {"threads": 3},
    ]  # fmt: skip
    keys = []
    for change in changes:
        config = Config(**base | change)
        sim = make(config)(0, Execution("loop", state="host"))
        keys.append(key(config, sim))
    assert len(set(keys)) == len(keys)
    config = Config(**base)
    sim = make(config)(0, Execution("loop", state="host"))
    torch.set_num_threads(2)
    try:
        assert key(config, sim) not in keys
    finally:
        torch.set_num_threads(1)
    # the length of a run does not change which execution is the fastest
    longer = Config(**base | {"rounds": 99, "eval_every": 7, "seeds": (5, 6), "target": 3.0})
    assert key(longer, sim) == keys[0]


@pytest.mark.long
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
    assert planned().reason == again.reason + " (cached)"


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "file" / "below"))
    for _ in range(2):
        assert planned().reason.endswith("1 thread")


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan._cache_path() == tmp_path / "cache" / "plans.json"
    monkeypatch.delenv("KEDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert plan._cache_path() == Path("/elsewhere/kedge/plans.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert plan._cache_path() == Path("/home/somebody/.cache/kedge/plans.json")


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_ENTRIES", 3)
    for i in (0, 1, 2, 0, 3):
        plan.store_record({"i": i}, {"value": i})
    assert [plan.load_record({"i": i}) for i in range(4)] == [
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


def failing(monkeypatch: pytest.MonkeyPatch, engine: type, compile: bool, error: BaseException):
    """An engine that raises in training, as one whose compiled step is wrong."""
    train = TRAIN[engine]

    def fail(self: Any, *args: Any) -> Any:
        if self.execution.compile == compile:
            raise error
        return train(self, *args)

    monkeypatch.setattr(engine, "train", fail)


@pytest.mark.usefixtures("quick")
def test_a_candidate_that_fails_in_any_way_is_left_out(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """The compiler's steps check their inputs by ``assert``."""
    error = AssertionError("expected size 3==3, stride 1==512 at dim=1\nThis error most often ...")
    failing(monkeypatch, Vector, True, error)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(timings, "MIN_COMPILED_RUN_S", 0.0)
    monkeypatch.setattr(timings, "MAX_COMPILE_SPEEDUP", math.inf)
    note = (
        "engine vector compiled failed in a trial and is left out: "
        "AssertionError: expected size 3==3, stride 1==512 at dim=1"
    )
    for _ in range(2):  # the second time from what is remembered
        found = planned(clients=3)
        assert not found.execution.compile
        assert found.notes == (note,)
        assert note in found.lines()


@pytest.mark.usefixtures("quick")
def test_an_engine_that_fails_in_any_way_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, engine in (("vector", Vector), ("loop", Loop)):
        with monkeypatch.context() as patch:
            failing(patch, engine, False, ZeroDivisionError())
            found = planned(clients=3, method=f"fedprox(mu=0.{len(name)})")
        text = f"engine {name} cannot run this model with this method: ZeroDivisionError"
        assert found.execution.engine != name
        assert found.notes[0] == text


@pytest.mark.usefixtures("quick")
def test_if_all_engines_fail_only_the_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (Vector, Loop):
        failing(monkeypatch, engine, False, ZeroDivisionError())
    assert planned(clients=3, method="fedprox(mu=0.11)").notes == ()


@pytest.mark.usefixtures("quick")
def test_an_engine_that_was_asked_for_fails_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Vector, False, AssertionError("wrong stride"))
    with pytest.raises(AssertionError, match="wrong stride"):
        kedge.run(engine="vector", clients=3, rounds=1, seeds=(0,))


@pytest.mark.usefixtures("quick")
def test_a_trial_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Vector, False, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        planned(clients=3)


# -- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"steps": 40}, {"steps": 0, "epochs": 4.0}])
@pytest.mark.parametrize("budget", [0.05, 0.5, 5.0, 100.0])
def test_a_round_follows_from_its_pieces(budget: float, settings: dict) -> None:
    """With costs that are linear in clients and steps, what follows is what a round takes."""
    config = Config(clients=8, **settings)
    sim = make(config)(0, Execution("loop"))
    own, cost = list(range(8)), timings.Cost(0.003, 0.01)
    steps = RoundPiece(own, sim.session.workload.work).steps(sim)
    assert steps == (
        320 if settings["steps"] else sum(-(-4 * n // 32) for n in sim.federation.sizes)
    )
    pieces, repeats = timings._choose_pieces(sim, own, cost, budget)
    took = [cost.of(piece, sim) for piece in pieces]
    assert repeats == (timings.REPEATS if budget > 0.05 else 0)
    assert (1 + repeats) * sum(took) <= 1.2 * budget
    assert len(pieces) == {0.05: 1, 0.5: 2, 5.0: 2, 100.0: 1}[budget]
    found = timings._extrapolate(took, pieces, sim, own, cost)
    assert found == pytest.approx(8 * 0.003 + steps * 0.01)


@pytest.mark.usefixtures("quick")
def test_the_time_of_a_run_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of 6 client-steps of 10 ms and a little more, three rounds."""
    slow(monkeypatch, Loop, 0.01)
    slow(monkeypatch, Vector, 0.03)
    slow(monkeypatch, Workers, 0.03)
    found = planned(clients=3, steps=2, seeds=(0,))
    assert found.execution.engine == "loop"
    assert found.round_seconds > 0.06  # no upper bound: the machine may be busy
    assert found.total_seconds > 3 * found.round_seconds  # three tests


def test_in_words() -> None:
    some = plan.Plan(
        Execution("vector"), "NVIDIA H200", 50, 24_000_000, 1_200_000_000, 139_000_000_000, 0.0312,
        40.2, "engine vector: because",
    )  # fmt: skip
    assert some.lines() == [
        "engine vector: because",
        "about 1.2 GB of 139 GB free on NVIDIA H200 (50 clients at once), "
        "about 0.03 s a round, 40 s in all",
    ]
    assert plan.Plan(Execution("loop"), "cpu").lines() == []
    assert [plan._format_ms(s) for s in (0.0000123, 0.00011, 0.0003, 0.0123, 1.5)] == [
        "0.012", "0.11", "0.30", "12", "1500",
    ]  # fmt: skip
