"""Cohorts that are trained piece by piece, and memory that runs out."""

from __future__ import annotations

import weakref

import pytest
import torch

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.task import Classification
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.capture import Captures, is_out_of_memory, retry_smaller
from kedge.engines.engine import Engine
from kedge.engines.loop import Loop
from kedge.engines.vector import Vector, split
from kedge.errors import HookError, KedgeError
from kedge.models import build
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

SIZES = (5, 9, 14, 26, 3, 14, 7)


def execution(chunk: int = 0) -> Execution:
    return Execution("vector", chunk=chunk)


def simulate(method: str, engine: Execution | Engine | None = None, seed: int = 0) -> Simulation:
    return images(norm="bn", sizes=SIZES).simulate(method, engine or execution(), seed=seed)


@pytest.mark.parametrize(
    "method",
    [
        "scaffold+fedprox(mu=0.1)",
        "fednova",
        "krum(byzantine=0, select=2)+moon",  # single clients, and state
        "fedtr+fedmix(rows=4, samples=2)",  # surveys and whole data
    ],
)
def test_pieces_change_nothing(method: str) -> None:
    whole, straight = simulate(method), []
    for _ in range(2):
        straight.append(whole.run_round([6, 0, 3, 2, 1, 5, 4]).totals)
    for chunk in (1, 3, 20):
        pieces = simulate(method, execution(chunk))
        for totals in straight:
            found = pieces.run_round([6, 0, 3, 2, 1, 5, 4]).totals
            assert list(found.clients.items()) == list(totals.clients.items())
            assert found.up_bytes == totals.up_bytes
            assert tree.gap(found.stacked, totals.stacked) < 1e-11  # client by client
            assert tree.gap(found.summed, totals.summed) < 1e-11
            assert {p: type(u) for p, u in found.uploads.items()} == {
                p: type(u) for p, u in totals.uploads.items()
            }
        assert tree.gap(pieces.state(), whole.state()) < 1e-11


def test_pieces_have_one_size_and_clients_of_similar_length() -> None:
    pieces = split([[1, 9, 4], [7, 2, 2, 8]], 3)
    assert [[lane.steps for lane in piece] for piece in pieces] == [[9, 8, 7], [4, 2, 2], [1]]
    assert pieces[0][1][:2] == (1, 3)
    # 10 lanes, 4 at once: three pieces, of which none is nearly empty
    assert [len(piece) for piece in split([[1] * 10], 4)] == [4, 4, 2]
    assert [len(piece) for piece in split([[1] * 9], 4)] == [3, 3, 3]
    seen = []

    class Counted(Vector):
        def train_chunk(self, bound, jobs, steps, plan, *rest):
            seen.append((len(steps), len(plan), max(steps)))
            return super().train_chunk(bound, jobs, steps, plan, *rest)

    sim = simulate("fedavg", Counted(execution(3)))
    sim.run_round()
    # filled up to one size, for which a graph is captured once
    assert seen == [(3, 3, 6), (3, 3, 2), (3, 3, 1)]


def test_updates_take_the_memory_of_one_piece() -> None:
    """What clients return is summed up, and let go, before the next piece starts."""
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(Vector):
        def train_chunk(self, bound, jobs, steps, plan, *rest):
            alive.append(sum(ref() is not None for ref in made))
            done = super().train_chunk(bound, jobs, steps, plan, *rest)
            made.extend(weakref.ref(x) for x in done.update.delta.params.values())
            return done

    sim = simulate("scaffold", Watched(execution(2)))
    sim.run_round()
    assert alive == [0, 0, 0, 0]


def test_state_is_written_when_the_whole_round_has_succeeded() -> None:
    calls = [0]

    class Fails(Vector):
        def train_chunk(self, *args):
            calls[0] += 1
            if calls[0] == 2:
                raise RuntimeError("the second piece fails")
            return super().train_chunk(*args)

    sim = simulate("scaffold", Fails(execution(3)))
    before = tree.map(torch.clone, sim.state())
    with pytest.raises(RuntimeError, match="second piece"):
        sim.run_round()
    assert tree.equal(sim.state(), before)
    sim.run_round()
    plain = simulate("scaffold", execution(3))
    plain.run_round()
    assert tree.equal(sim.state(), plain.state())


class Small(Vector):
    """A machine with room for so many lanes."""

    def __init__(self, how: Execution, room: int, inside_a_hook: bool = False) -> None:
        super().__init__(how)
        self.room, self.sizes, self.inside = room, [], inside_a_hook

    def train_chunk(self, bound, jobs, steps, plan, *rest):
        self.sizes.append(len(steps))
        if len(steps) > self.room:
            error = torch.OutOfMemoryError("CUDA out of memory")
            if self.inside:
                raise HookError("fedprox.term failed") from error
            raise error
        return super().train_chunk(bound, jobs, steps, plan, *rest)


@pytest.mark.parametrize("inside_a_hook", [False, True])
def test_where_memory_runs_out_fewer_train_at_once(inside_a_hook: bool) -> None:
    sim = simulate("scaffold+fedprox", Small(execution(), 2, inside_a_hook))
    plain = simulate("scaffold+fedprox")
    with pytest.warns(UserWarning, match="do not fit") as caught:
        sim.run_round()
    assert [str(w.message) for w in caught] == [
        "7 clients at once do not fit into memory: continuing with 3",
        "3 clients at once do not fit into memory: continuing with 1",
    ]
    plain.run_round()
    sim.run_round()  # it is remembered, so nothing is tried again
    plain.run_round()
    assert sim.engine.sizes == [7, 3, *[1] * 14]
    assert tree.gap(sim.state(), plain.state()) < 1e-11


def test_a_fleet_shrinks_too() -> None:
    sims = [simulate("scaffold", Small(execution(), 8)), simulate("scaffold", seed=1)]
    plain = [simulate("scaffold", seed=s) for s in (0, 1)]
    fleet = Fleet(sims)
    with pytest.warns(UserWarning, match="14 clients at once do not fit .* continuing with 7"):
        fleet.run_round()
    for sim in plain:
        sim.run_round()
    assert sims[0].engine.sizes == [14, 7, 7]
    for sim, other in zip(sims, plain, strict=True):
        assert tree.gap(sim.state(), other.state()) < 1e-11


@pytest.mark.filterwarnings("ignore:.* at once do not fit")
def test_one_client_that_does_not_fit_ends_with_advice() -> None:
    sim = simulate("fedavg", Small(execution(), 0))
    before = sim.weights
    with pytest.raises(KedgeError, match=r"one client alone .*--batch.*bf16.*--engine loop"):
        sim.run_round()
    assert sim.weights is before


def test_surveys_and_personal_models_come_in_pieces() -> None:
    whole, pieces = simulate("fedbr+ditto"), simulate("fedbr+ditto", execution(2))
    for sim in (whole, pieces):
        sim.run_round()
    assert tree.gap(whole.personal(), pieces.personal()) < 1e-11
    assert len(next(tree.leaves(pieces.personal()))) == len(SIZES)
    one, two = ({k: v for k, v in s.state().items() if "fedbr" in k} for s in (whole, pieces))
    assert one
    assert tree.gap(one, two) < 1e-11


def test_an_error_that_comes_from_memory_is_known() -> None:
    def raised(outer: type[Exception], cause: bool) -> Exception:
        try:
            try:
                raise torch.OutOfMemoryError("no memory")
            except RuntimeError as error:
                if cause:
                    raise outer("a hook failed") from error
                raise outer("the recording could not be ended")  # noqa: B904
        except outer as error:
            return error

    assert is_out_of_memory(raised(HookError, True))
    assert is_out_of_memory(raised(RuntimeError, False))
    assert not is_out_of_memory(RuntimeError("something else"))


def test_memory_that_runs_out_while_recording_is_not_mistaken_for_a_failed_recording() -> None:
    """The same code as on a GPU, with recordings that find no memory."""
    sim = simulate("fedavg")

    class Plan:
        """Rows that say they are on a GPU."""

        device = torch.device("cuda")
        shape = (7, 1, 5)

    class NoRoom:
        enabled = True

        def get(self, key, make):
            raise torch.OutOfMemoryError("no room for a graph")

        def give_up(self, key, error):
            raise AssertionError("given up")

    sim.engine.captures = NoRoom()
    cohort = sim.cohort(list(range(7)))
    with pytest.raises(torch.OutOfMemoryError):
        sim.engine.train_chunk(sim.bound, cohort.jobs, [1] * 7, Plan())


class Crowded(Loop):
    """A machine with room for so many clients side by side."""

    def __init__(self, streams: int, room: int) -> None:
        super().__init__(Execution("loop", streams=streams))
        self.room = room

    def answers(self, cohort, query):
        for i, done in enumerate(super().answers(cohort, query)):
            if i == 1 and self.streams > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield done


def test_where_memory_runs_out_fewer_train_side_by_side() -> None:
    sim, plain = simulate("scaffold", Crowded(4, room=1)), simulate("scaffold", Loop())
    with pytest.warns(UserWarning, match="clients side by side do not fit") as caught:
        sim.run_round()
    assert [str(w.message)[:2] for w in caught] == ["4 ", "2 "]
    plain.run_round()
    assert tree.equal(sim.state(), plain.state())
    sim.engine.room = 0
    with pytest.raises(KedgeError, match="one client alone does not fit into memory"):
        sim.run_round()
    assert tree.equal(sim.state(), plain.state())


def test_surveys_and_personal_models_with_too_little_memory() -> None:
    sim, plain = (simulate("ccvr+fedbn", e) for e in (Crowded(2, room=1), Loop()))
    with pytest.warns(UserWarning, match="2 clients side by side do not fit"):
        found = sim.personal()
    assert tree.equal(found, plain.personal())
    sim = simulate("ccvr+fedbn", Crowded(2, room=1))
    with pytest.warns(UserWarning, match="2 clients side by side do not fit"):
        sim.finish()
    plain.finish()
    assert tree.equal(sim.state(), plain.state())


def test_graphs_of_other_rounds_are_freed_first() -> None:
    """Graphs of an earlier phase hold memory that may be just enough."""
    captures, narrowed, tries = Captures(True), [], []
    captures._captured["an earlier phase"] = None

    def work(times: int) -> str:
        tries.append(len(captures))
        if len(tries) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert retry_smaller(captures, lambda: work(1), lambda: narrowed.append(1)) == "done"
    assert (tries, narrowed) == ([1, 0], [])
    tries.clear()
    captures._captured["an earlier phase"] = None
    assert retry_smaller(captures, lambda: work(3), lambda: narrowed.append(1)) == "done"
    assert (tries, narrowed) == ([1, 0, 0, 0], [1, 1])
    tries.clear()
    with pytest.raises(KedgeError, match="no less"):

        def refuse() -> None:
            raise KedgeError("no less")

        retry_smaller(captures, lambda: work(9), refuse)
    assert tries == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_that_runs_out_on_a_gpu() -> None:
    x, y = torch.rand(640, 64), torch.arange(640) % 10
    fed = Federation(x, y, torch.arange(640).split(10), Classification(10), device="cuda")

    def make() -> Simulation:
        torch.manual_seed(0)
        return Simulation(fed, build("mlp(hidden=[1024, 1024])", (64,), 10), engine="vector")

    torch.cuda.empty_cache()
    base, room = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    whole = make()
    whole.run_round()
    expected = {name: value.cpu() for name, value in whole.state().items()}
    peak = torch.cuda.max_memory_reserved()
    del whole
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((base + 0.6 * (peak - base)) / room)
    try:
        small = make()
        with pytest.warns(UserWarning, match="clients at once do not fit"):
            small.run_round()
        assert 0 < small.engine.chunk <= 32
        found = {name: value.cpu() for name, value in small.state().items()}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert tree.gap(found, expected) < 1e-4
