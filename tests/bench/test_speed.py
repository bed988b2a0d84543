"""``python -m bench``: its rivals do the same work as kedge, and its numbers add up."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.speed import record, timing
from bench.speed.child import Child, RivalFailed
from bench.speed.command import run
from bench.speed.eager import EagerRounds, draw_batches
from bench.speed.flower_rival import trained
from bench.speed.rounds import InProcess
from bench.speed.runners import Runner, read_engine, read_pythons, split_list
from bench.speed.workloads import GROUPS, WORKLOADS, Workload
from rich.console import Console
from torch import Tensor

from kedge.cli.screen import console
from kedge.core.tree import Weights
from kedge.engines import Execution
from kedge.sim.simulation import Simulation

TINY = Workload("digits", "mlp(hidden=[8])", (5,), 6, 3, 12, 4, 5, 0.5, "")
FULL = dataclasses.replace(TINY, clients=3, batch=12)  # every batch is all of a client's samples
CONV = Workload("small10", "lenet5(norm=bn)", (3, 32, 32), 3, 2, 6, 4, 2, 0.1, "")


def loop(work: Workload) -> Simulation:
    return work.simulation(work.federation("cpu"), Execution("loop"))


def gap(weights: Weights, state: dict[str, Tensor]) -> float:
    """The largest difference to a module's parameters and floating buffers."""
    own = weights.params | {k: v for k, v in weights.buffers.items() if v.is_floating_point()}
    assert own.keys() <= state.keys()
    return max(float((own[k] - state[k]).abs().max()) for k in own)


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of ``python -m bench WORDS``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(console, "_width", 120)
        patch.setattr(sys, "argv", ["bench", *words])
        code = 0
        try:
            run()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return code, out.getvalue(), err.getvalue()


DECAY = dataclasses.replace(TINY, weight_decay=0.1)


@pytest.mark.parametrize("work", [TINY, CONV, DECAY], ids=["mlp", "batchnorm", "decay"])
def test_the_eager_rival_computes_the_same_rounds_as_the_loop(work: Workload) -> None:
    sim, eager = loop(work), EagerRounds(work, work.normalised("cpu"))
    first = {k: v.clone() for k, v in eager.server.state_dict().items()}
    assert gap(sim.weights, first) == 0
    for round in range(2):
        clients = sim.session.draw_clients(round)
        eager(clients, sim.cohort(clients).batches)
        sim.run_round(clients)
    assert gap(sim.weights, eager.server.state_dict()) < 1e-5
    assert gap(sim.weights, first) > 1e-2


def test_the_eager_rival_draws_what_the_loop_draws_in_kind() -> None:
    g = torch.Generator().manual_seed(0)
    batches = draw_batches(TINY, 2, g)
    assert batches.shape == (TINY.steps, TINY.batch)
    assert sorted(batches.flatten()[:12].tolist()) == list(range(24, 36))  # an epoch, each row once
    assert sorted(batches.flatten()[12:].tolist()) != sorted(batches.flatten()[:8].tolist())


def test_pfl_computes_the_same_rounds_as_the_loop() -> None:
    pytest.importorskip("pfl", reason="pfl is not installed: pip install pfl==0.6.0")
    from bench.speed.pfl_rival import PflRounds

    sim, data = loop(FULL), FULL.normalised("cpu")
    rival = PflRounds(FULL, data)
    steps = []
    rival.net.inner.register_forward_hook(lambda _, inputs, __: steps.append(len(inputs[0])))
    losses = []
    for _ in range(3):
        rival()
        sim.run_round()
        losses.append(rival.net.loss(*data).item())
        assert steps.pop() == len(data[0])
    assert steps == [FULL.batch] * FULL.client_steps * 3
    assert losses[2] < losses[1] < losses[0]
    assert gap(sim.weights, rival.net.inner.state_dict()) < 1e-5


def test_pfl_takes_as_many_steps_as_asked_for_where_batches_do_not_fit() -> None:
    pytest.importorskip("pfl", reason="pfl is not installed: pip install pfl==0.6.0")
    from bench.speed.pfl_rival import PflRounds

    work = dataclasses.replace(TINY, clients=3, batch=5)  # 12 samples: 5, 5, 2 + 3, 5, 5
    data = work.normalised("cpu")
    rival, eager = PflRounds(work, data), EagerRounds(work, data)
    rows = torch.arange(25) % 12
    batches = torch.stack([rows.view(5, 5) + 12 * k for k in range(3)])
    rival()
    eager([0, 1, 2], batches)
    own = rival.net.inner.state_dict()
    for name, value in eager.server.state_dict().items():
        torch.testing.assert_close(own[name], value, atol=1e-6, rtol=0)


def test_flower_clients_train_as_the_loop_does() -> None:
    first = FULL.module().state_dict()
    replies = [
        {k: v.clone() for k, v in trained(FULL, "cpu", "fp32", client, first).items()}
        for client in range(3)
    ]
    sim = loop(FULL)
    sim.run_round()
    assert gap(sim.weights, {k: sum(r[k] for r in replies) / 3 for k in first}) < 1e-5


def test_flower_computes_the_same_rounds_as_the_loop() -> None:
    python = os.environ.get("KEDGE_FLOWER_PYTHON")
    if not python:
        pytest.skip("$KEDGE_FLOWER_PYTHON names no Python that has flwr[simulation]")
    sim, child = loop(FULL), Child(python, "flower", FULL, "cpu", "fp32", 1)
    first = sum(float(v.double().sum()) for v in sim.weights.params.values())
    try:
        sim.run_round()  # the child has run one to get ready
        for _ in range(2):
            sim.run_round()
            child()
    finally:
        child.close()
    total = sum(float(v.double().sum()) for v in sim.weights.params.values())
    assert child.last["total"] == pytest.approx(total, abs=1e-4)
    assert abs(total - first) > 1e-2


@pytest.mark.long
def test_the_table_and_the_record_agree_and_ratios_are_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    code, out, err = command(
        "digits", "--against", "eager,loop", "--engines", "loop,vector", "--methods",
        "scaffold", "--rounds", "2", "--warm", "1", "--threads", "1", "--device", "cpu",
        "--out", str(path),
    )  # fmt: skip
    assert code == 0, err
    done = json.loads(path.read_text())
    rows = {(r["runner"], r["method"]): r for r in done["rows"]}
    assert list(rows) == [
        ("eager", "fedavg"), ("kedge loop", "fedavg"), ("kedge loop", "scaffold"),
        ("kedge vector", "fedavg"), ("kedge vector", "scaffold"),
    ]  # fmt: skip
    eager, plain = rows["eager", "fedavg"], rows["kedge loop", "fedavg"]
    for (runner, method), row in rows.items():
        assert len(row["times"]) >= 2
        assert row["seconds"] == statistics.median(row["times"]) > 0
        assert row["client_steps_per_second"] == pytest.approx(200 / row["seconds"])
        assert row["seconds_per_client"] == pytest.approx(row["seconds"] / 20)
        others = {"eager": eager, "loop": plain}
        others = {k: v for k, v in others.items() if v is not row}
        assert row["ratios"] == {k: v["seconds"] / row["seconds"] for k, v in others.items()}
        base = rows[runner, "fedavg"]["seconds"]
        assert row["of_fedavg"] == row["seconds"] / base
        line = next(x for x in out.splitlines() if x.startswith(runner) and method in x)
        cells = line.removeprefix(runner).split()
        assert cells[:3] == [method, "fp32", f"{1e3 * row['seconds']:.2f}"]
        spread = [f"{1e3 * f(row['times']):.2f}" for f in (min, max)]
        assert cells[3:6] == [*spread, str(len(row["times"]))]
        assert cells[6] == f"{200 / row['seconds']:.0f}"
        assert cells[-1] == f"{row['of_fedavg']:.2f}x"
        assert cells[7:-1] == [f"{x:.3g}x" for x in row["ratios"].values()]
    assert done["command"].startswith("python -m bench digits --against eager,loop")
    assert done["versions"].keys() >= {"kedge", "torch", "python"}
    assert done["hardware"].keys() == {"cpu", "cores", "gpu", "load"}
    assert done["threads"] == 1
    assert not done["interrupted"]


def small_settings(**given: Any) -> timing.BenchSettings:
    settings = {"engines": "vector", "rounds": 3, "warm": 1, "threads": 1, "device": "cpu"}
    what = timing.read_settings(["digits"], **settings | given)
    return dataclasses.replace(what, works=(TINY,))


def test_runners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.setattr(InProcess, "__call__", lambda self: order.append(id(self)) or 1.0)
    timing.bench(small_settings())
    a, b = dict.fromkeys(order)
    assert order == [a, b, a, b, a, b, a, b]  # one round each to warm up, three timed


def test_a_turn_of_a_quick_runner_has_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "__call__", lambda self: 0.06)
    for row in timing.bench(small_settings(rounds=2))["rows"]:
        assert row["times"] == [0.06] * 8  # four in a quarter of a second


def test_a_runner_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EagerRounds) -> None:
        raise RuntimeError("out of memory\nmuch more")

    monkeypatch.setattr(EagerRounds, "__call__", fail)
    monkeypatch.setitem(WORKLOADS, "digits", TINY)
    code, out, _ = command("digits", "--engines", "vector", "--device", "cpu", "--rounds", "2")
    assert code == 0
    assert "failed: eager fp32 fedavg on digits: RuntimeError: out of memory\n" in out
    assert "x eager" not in out
    assert any(x.startswith("kedge vector") and "fp32" in x for x in out.splitlines())


def test_an_interrupt_prints_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def stop(self: InProcess) -> float:
        calls.append(1)
        if len(calls) == 6:  # two to warm up, two timed of eager, one of vector
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(InProcess, "__call__", stop)
    monkeypatch.setitem(WORKLOADS, "digits", TINY)
    code, out, _ = command(
        "digits", "--engines", "vector", "--warm", "1", "--device", "cpu", "--json"
    )
    done = json.loads(out)
    assert code == 130
    assert done["interrupted"]
    assert [r["times"] for r in done["rows"]] == [[0.5, 0.5], [0.5]]
    assert done["rows"][0]["seconds"] == 0.5
    assert done["rows"][1]["seconds"] is None  # one time has no spread
    wide = Console(width=130, record=True, file=io.StringIO())
    wide.print(record.tables(done))
    text = wide.export_text()
    assert not any(line.startswith("kedge vector") for line in text.splitlines())
    assert "not shown: kedge vector fp32 fedavg on digits: timed once, so without a spread" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit"], "no workload 'digit'. Did you mean 'digits'"),
        (["--engines", "vektor"], "no engine 'vektor'. Did you mean 'vector'"),
        (["--engines", "loop(worker=2)"], "no setting of loop 'worker'. Did you mean 'workers'"),
        (["--engines", "loop(workers=two)"], "workers = 'two' is not of type int"),
        (["--engines", "loop(2)"], "name the settings, as in loop(workers=2)"),
        (["--against", "flwr"], "no rival 'flwr'"),
        (["--precisions", "fp23"], "no precision 'fp23'. Did you mean 'fp32'"),
        (["--methods", "scafold"], "no part 'scafold'. Did you mean 'scaffold'"),
        (["--rounds", "1"], "rounds must be 2 or more"),
        (["--out", "nowhere/speed.json"], "there is no folder nowhere"),
        (["--python-of", "flower"], "--python-of takes NAME=PATH"),
        (["--python-of", "eager=python"], "no rival with a Python of its own 'eager'"),
        (["--python-of", "flower=/nowhere/python"], "does not exist or cannot be run"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(words: list[str], message: str) -> None:
    code, out, err = command("--device", "cpu", *words)
    assert code == 2
    assert not out
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said() -> None:
    code, _, err = command("digits", "--device", "cuda")
    assert code == 2
    assert "torch sees no GPU here" in err


def test_lists_engines_and_groups_are_read() -> None:
    assert split_list("a, b(c=1, d=[2, 3]),a") == ["a", "b(c=1, d=[2, 3])"]
    assert read_engine("loop(workers=2, threads=1)") == (Execution("loop", workers=2), 1)
    what = timing.read_settings(["overhead"], device="cpu", methods="scaffold")
    assert [w.name for w in what.works] == ["overhead10", "overhead100", "overhead1000"]
    assert what.methods == ("fedavg", "scaffold")
    assert what.rival_precision == "fp32"


PAPERS = {  # parameters, samples of a client, methods
    "fedimpro_resnet18": (11_173_962, 4992, ["fedavg", "fedimpro(cut=stage2)"]),
    "flboost_resnet18": (11_181_642, 500, ["fedavg", "scaffold", "scaffold+flboost:official"]),
    "fedbr_vgg11": (9_225_610, 5000, ["fedavg", "fedbr:cifar10"]),
    "fedbr_mnist": (371_850, 6000, ["fedavg", "fedbr:mnist"]),
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_own_settings_have_their_networks_and_methods(name: str) -> None:
    parameters, samples, methods = PAPERS[name]
    work = WORKLOADS[name]
    what = timing.read_settings([name, "digits"], device="cpu")
    assert list(what.methods_of(work)) == methods
    assert what.methods_of(WORKLOADS["digits"]) == ("fedavg",)
    assert sum(p.numel() for p in work.module().parameters()) == parameters
    assert work.samples == samples
    small = dataclasses.replace(work, clients=2, cohort=1, samples=2, batch=2, steps=1)
    federation = small.federation("cpu")
    for method in methods:  # each is bound to the network, with its cut
        sim = small.simulation(federation, Execution("loop"), method)
        assert sim.session.cohort_size == 1
        assert sim.bound.optim.weight_decay == work.weight_decay
    assert set(GROUPS["papers"]) == set(PAPERS)


def test_methods_that_are_given_replace_those_of_the_workload() -> None:
    what = timing.read_settings(["flboost_resnet18"], device="cpu", methods="fedprox")
    assert what.methods_of(WORKLOADS["flboost_resnet18"]) == ("fedavg", "fedprox")


def test_the_cost_is_shown_of_the_base_too() -> None:
    seconds = {"fedavg": 2.0, "scaffold": 3.0, "scaffold+flboost(steps=0)": 4.5, "fedprox": 1.0}
    runners = [
        Runner("kedge loop", "fp32", lambda runner: None, method, times=[s, s])
        for method, s in seconds.items()
    ]
    rows = {row["method"]: row for row in record.rows(WORKLOADS["digits"], runners)}
    assert [row["of_fedavg"] for row in rows.values()] == [1, 1.5, 2.25, 0.5]
    assert [row["of_base"] for row in rows.values()] == [1, 1.5, 1.5, 0.5]
    assert rows["scaffold+flboost(steps=0)"]["base"] == "scaffold"
    done = record.start("cpu", 1, "") | {"rows": list(rows.values())}
    wide = Console(width=130, record=True, file=io.StringIO())
    wide.print(record.tables(done))
    lines = wide.export_text().splitlines()
    boosted = next(x for x in lines if "flboost" in x)
    assert boosted.split()[-2:] == ["2.25x", "1.50x"]
    assert any(x.rstrip().endswith("x its base") for x in lines)


@pytest.mark.long
def test_a_rival_in_another_process_runs_rounds() -> None:
    child = Child(sys.executable, "eager", TINY, "cpu", "fp32", 1)
    try:
        assert 0 < child() < 5
        assert 0 < child() < 5
    finally:
        child.close()
    assert child._process.returncode == 0


def python_that(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_rival_that_is_not_installed_is_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_that(
        tmp_path, "echo \"ModuleNotFoundError: No module named 'flwr'\" >&2; exit 1"
    )
    monkeypatch.setitem(WORKLOADS, "digits", TINY)
    code, out, err = command(
        "digits", "--against", "eager,flower", "--python-of", f"flower={python}",
        "--engines", "vector", "--device", "cpu", "--rounds", "2", "--warm", "0",
    )  # fmt: skip
    assert code == 0
    assert "failed: flower fp32 fedavg on digits: not installed: No module named 'flwr'" in out
    assert 'for flower: pip install "flwr[simulation]"' in err
    assert "x eager" in out
    assert "x flower" not in out


def test_a_rival_that_breaks_off_says_its_last_words(tmp_path: Path) -> None:
    ready = 'echo \'{"ready": true}\'; read line; echo "out of actors" >&2; exit 3'
    child = Child(python_that(tmp_path, ready), "flower", TINY, "cpu", "fp32", 1)
    with pytest.raises(RivalFailed, match="out of actors"):
        child()
    child.close()
    wrong = python_that(tmp_path, 'echo \'{"error": "no client replied"}\'')
    with pytest.raises(RivalFailed, match="no client replied"):
        Child(wrong, "flower", TINY, "cpu", "fp32", 1)


def test_the_python_of_a_rival_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEDGE_FLOWER_PYTHON", sys.executable)
    assert read_pythons([]) == {"flower": sys.executable}
    assert read_pythons([f"flower={sys.executable}", f"pfl={sys.executable}"]).keys() == {
        "flower", "pfl",
    }  # fmt: skip
