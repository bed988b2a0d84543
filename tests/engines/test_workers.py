"""Worker processes: the loop's result bit for bit, errors that name the client, nothing left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kedge
from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.part import Out, Part, parts
from kedge.core.task import Batch
from kedge.core.tree import Params, Weights
from kedge.core.view import Spec, View
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.engines import Execution, make_engine, workers
from kedge.engines.layout import layout_of
from kedge.engines.ops import FOREACH, IN_PLACE
from kedge.engines.workers import Workers
from kedge.errors import FieldError, HookError, KedgeError
from kedge.models import build
from kedge.sim.simulation import Simulation

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or torch.cuda.is_available(),
    reason="forks after gradients were taken, which needs Linux without a GPU",
)
RAGGED = (6, 21, 11, 9)


def tiny(name: str) -> Part | str:
    return parts[name](**parts[name].tiny) if name in parts else name


def after(sim: Simulation, rounds: int = 2) -> dict[str, Tensor]:
    for _ in range(rounds):
        sim.run_round()
    sim.finish()
    return sim.state()


def pids(sim: Simulation) -> list[int]:
    assert isinstance(sim.engine, Workers)
    assert sim.engine._pool is not None
    return [process.pid for process in sim.engine._pool._processes]  # type: ignore[misc]


def is_gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


# -- the same result ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "fedcog", "fedimpro", "fedtr", "fedbr", "fedrep", "flboost"]
)
def test_the_result_is_the_loops_bit_for_bit(method: str) -> None:
    problem = images(norm="bn", dropout=0.3, sizes=RAGGED)
    loop = problem.simulate(tiny(method), "loop", per_round=3)
    expected, own = after(loop), loop.personal()
    for count in (1, 2, 3):
        sim = problem.simulate(tiny(method), Execution("loop", workers=count), per_round=3)
        assert tree.equal(after(sim), expected), count
        assert tree.equal(sim.personal(), own), count


def channels_last(sim: Simulation) -> bool:
    return layout_of(sim.bound.model).channels_last


def convolutions(how: Execution, model: str = "pfl_cnn", method: str = "scaffold") -> Simulation:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 3, 16, 16), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 10, (60,), generator=g)
    rows = torch.arange(60).split(15)
    fed = Federation(x, y, rows, kedge.Classification(10), moments=([0.5] * 3, [0.25] * 3))
    torch.manual_seed(0)
    return Simulation(
        fed, build(model, (3, 16, 16), 10), method, optim=kedge.SGD(lr=0.05, momentum=0.5),
        work=LocalWork(batch=5, steps=3), engine=how,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:scaffold assumes plain SGD")
@pytest.mark.parametrize("model", ["pfl_cnn", "fedcog_cnn(norm=bn)", "lenet5(norm=gn)"])
def test_convolutions_in_single_precision_as_well(model: str) -> None:
    loop, shared, vector = (
        convolutions(how, model)
        for how in (Execution("loop"), Execution("loop", workers=2), Execution("vector"))
    )
    assert (
        loop.bound.model.layout.channels_last
        == shared.bound.model.layout.channels_last
        == ("norm" not in model)
    )
    assert not channels_last(vector)
    expected = after(loop)
    assert tree.equal(after(shared), expected)
    assert tree.gap(after(vector), expected) < 1e-4


def test_a_slow_first_client_does_not_change_the_order() -> None:
    problem = images(norm="gn", sizes=(150, *[4] * 19))
    expected = after(problem.simulate("fedavg", "loop"))
    assert tree.equal(after(problem.simulate("fedavg", Execution("loop", workers=2))), expected)


def test_cohorts_may_change_in_size() -> None:
    problem = images(norm="bn", sizes=RAGGED)
    runs = [problem.simulate("scaffold", how) for how in ("loop", Execution("loop", workers=2))]
    for sim in runs:
        for clients in ([0], [1, 2, 3], [0, 1, 2, 3], [2]):
            sim.run_round(clients)
    assert tree.equal(runs[0].state(), runs[1].state())


def test_the_number_of_threads_is_as_before() -> None:
    sim = images(sizes=RAGGED).simulate("fedavg", Execution("loop", workers=2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        sim.run_round()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- steps in place ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Keeps(Part):
    """Holds on to the weights of two steps; what it keeps is how far they are apart."""

    name = "keeps"

    def client_init(self, spec: Spec) -> dict[str, Tensor]:
        return {"apart": torch.zeros((), dtype=spec.dtype)}

    def prepare(self, v: View) -> dict[str, Params]:
        return {"before": v.anchor.params, "now": v.anchor.params}

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> dict[str, Params]:
        return {"before": v.local["now"], "now": params}

    def reply(self, v: View, weights: Weights) -> tuple[dict[str, Tensor], Any]:
        return {"apart": tree.sq_dist(v.local["before"], v.local["now"])}, {}


@dataclass(frozen=True)
class Shows(Part):
    """Its term is a piece of a parameter itself."""

    name = "shows"

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        return params["head.bias"][0]


@pytest.mark.parametrize("part", [Keeps(), Shows()])
def test_parts_may_hold_on_to_weights(part: Part) -> None:
    runs = [images(sizes=RAGGED).simulate(part, engine) for engine in ("loop", "vector")]
    terms = [sim.run_round().losses for sim in runs]
    assert tree.gap(*(sim.state() for sim in runs)) < 1e-12
    assert tree.gap(*terms) < 1e-12
    if part.name == "keeps":
        assert float(runs[0].state()["clients|keeps|apart"].min()) > 1e-6


def test_a_step_in_place_gives_the_same_bits_and_leaves_the_anchor() -> None:
    sim = images(norm="bn", sizes=(20,)).simulate("scaffold", "loop")
    cohort = sim.cohort([0])
    job, ends = take_jobs(cohort.jobs, 0), []
    before = tree.map(torch.clone, job)
    for in_place in (False, True):
        carry = client.begin(sim.bound.at(sim.round), job)
        for t, index in enumerate(cohort.batches[0]):
            last = carry
            own = in_place and t > 0
            ops = IN_PLACE if own else FOREACH
            carry = client.step(sim.bound.at(0), job, carry, index, ops)
            old, new = (next(tree.leaves(c.weights)).data_ptr() for c in (last, carry))
            assert (old == new) is own
        ends.append(carry)
    assert tree.equal(*ends)
    assert tree.equal(job, before)


# -- errors ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trips(Part):
    """Raises, or ends its process, on some clients in their second step."""

    name = "trips"
    clients: tuple[int, ...] = (2,)
    how: str = "value"

    def transform(self, v: View, batch: Batch) -> Batch:
        if int(v.info.client) in self.clients and int(v.step) == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("tripped")
        return batch


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_client_that_fails_is_named(count: int) -> None:
    part = Trips(clients=(2, 3))
    sim = images(sizes=(20,) * 5).simulate(part, Execution("loop", workers=count))
    for _ in range(2):  # the second time with new processes
        with pytest.raises(
            HookError, match=r"trips.transform failed: ValueError.*client 2, step 1"
        ):
            sim.run_round()
    assert sim.round == 0


class Odd(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Failing(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.head, self.error = nn.Linear(64, 3), error

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise Odd(1, 2) if self.error == "odd" else RuntimeError(self.error)
        return self.head(x.flatten(1).to(self.head.weight.dtype))


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        ("a fault", RuntimeError, "a fault"),
        ("odd", KedgeError, "client 0: Odd: 1 and 2"),
    ],
)
def test_errors_outside_of_hooks(error: str, raised: Any, text: str) -> None:
    fed = images(sizes=(8, 8)).federation
    sim = Simulation(fed, Failing(error), engine=Execution("loop", workers=1))
    with pytest.raises(raised, match=text) as found:
        sim.run_round()
    if raised is RuntimeError:
        assert "in a worker process, client 0" in found.value.__notes__[0]


def test_a_worker_that_is_killed_is_reported() -> None:
    sim = images(sizes=(20,) * 4).simulate(Trips(how="killed"), Execution("loop", workers=2))
    with pytest.raises(KedgeError, match=r"a worker process died \(SIGKILL\).*fewer workers"):
        sim.run_round()
    idle = images(sizes=(8, 8)).simulate("fedavg", Execution("loop", workers=2))
    idle.run_round()
    for pid in pids(idle):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KedgeError, match="SIGKILL"):
        idle.run_round()
    idle.run_round()  # with new ones
    assert idle.round == 2


def test_workers_that_cannot_take_gradients_or_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = images(sizes=(8, 8)).simulate("fedavg", Execution("loop", workers=2))
    monkeypatch.setattr(workers, "_gradient_error", lambda: KedgeError("hide the GPU"))
    with pytest.raises(KedgeError, match="hide the GPU"):
        sim.run_round()
    monkeypatch.setattr(workers, "_gradient_error", lambda: time.sleep(60))
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.2)
    with pytest.raises(KedgeError, match=r"did not start within 0.2 s"):
        sim.run_round()
    assert not multiprocessing.active_children()
    monkeypatch.undo()
    sim.run_round()
    assert sim.round == 1


def test_where_there_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    how = Execution("loop", workers=2)
    with pytest.raises(FieldError, match=r"workers = 2: .* on cuda; leave workers out"):
        make_engine(how, torch.device("cuda"))
    with pytest.raises(FieldError, match="set engine = loop"):
        make_engine(Execution("vector", workers=2), torch.device("cpu"))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(FieldError, match="need Linux"):
        make_engine(how, torch.device("cpu"))


# -- nothing is left ---------------------------------------------------------------------------


def test_processes_and_files_go_with_the_simulation() -> None:
    gc.collect()
    files = set(os.listdir("/proc/self/fd"))
    sim = images(sizes=RAGGED).simulate("scaffold", Execution("loop", workers=2))
    sim.run_round()
    found = pids(sim)
    assert len(set(found)) == 2
    del sim
    assert all(is_gone(pid) for pid in found)
    assert set(os.listdir("/proc/self/fd")) == files


def test_ctrl_c_does_not_reach_the_workers() -> None:
    problem = images(sizes=RAGGED)
    expected = after(problem.simulate("fedavg", "loop"))
    sim = problem.simulate("fedavg", Execution("loop", workers=2))
    sim.run_round()
    for pid in pids(sim):
        os.kill(pid, signal.SIGINT)
    assert tree.equal(after(sim, 1), expected)


ORPHANS = """
import sys, torch
from kedge.check.problems import images
from kedge.core.work import take_jobs
from kedge.engines import Execution
sim = images(sizes=(8, 8)).simulate("fedavg", Execution("loop", workers=2))
sim.run_round()
print(*(p.pid for p in sim.engine._pool._processes), flush=True)
sys.stdin.read()
"""


def test_workers_end_with_their_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        found = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(found) == 2
        parent.kill()
        assert all(is_gone(pid) for pid in found)


# -- whole runs --------------------------------------------------------------------------------


def test_a_run_with_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {
        "clients": 5,
        "rounds": 4,
        "seeds": (0,),
        "steps": 3,
        "per_round": 3,
        "engine": "loop",
    }

    def stop(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    kedge.run("scaffold", out=tmp_path / "loop", **settings)
    with pytest.raises(KeyboardInterrupt):
        kedge.run("scaffold", out=tmp_path / "two", workers=2, watch=stop, **settings)
    kedge.run("scaffold", out=tmp_path / "two", workers=2, resume=True, **settings)
    one, two = (
        load_file(tmp_path / name / "seed-0" / "checkpoint.safetensors") for name in ("loop", "two")
    )
    assert tree.equal(one, two)
    assert int(two["round"]) == 4
