"""Clients' own state: on the device, in the host's memory or in a file, with the same results."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from kedge.check.problems import images
from kedge.core import tree
from kedge.engines import Execution
from kedge.errors import FieldError, KedgeError
from kedge.sim.simulation import Simulation
from kedge.sim.store import PLACES, Store


def first() -> dict:
    return {
        "a": {"w": torch.tensor([1.5, -2.0]), "count": torch.tensor(3, dtype=torch.int64)},
        "b": {"flag": torch.tensor([True]), "none": torch.zeros(0), "v": torch.zeros(2, 3)},
    }


def written(where: str, folder: str = "") -> Store:
    """Six clients, of which 4, 1 and then 1, 5 have taken part."""
    store = Store(first(), 6, where, folder)
    for clients in ([4, 1], [1, 5]):
        taken = store.gather(clients)
        store.put(clients, tree.map(lambda x: ~x if x.dtype == torch.bool else x + 1, taken))
    return store


@pytest.mark.parametrize("where", PLACES)
def test_rows_are_read_and_written_by_client(where: str) -> None:
    store = written(where)
    found = store.gather([5, 0, 1, 4])
    assert found["a"]["w"].tolist() == [[2.5, -1.0], [1.5, -2.0], [3.5, 0.0], [2.5, -1.0]]
    assert found["a"]["count"].tolist() == [4, 3, 5, 4]
    assert found["b"]["flag"].flatten().tolist() == [False, True, True, False]
    assert found["b"]["v"][:, 0, 0].tolist() == [1, 0, 2, 1]
    found["a"]["w"].zero_()  # what was gathered is a copy
    assert store.gather([5])["a"]["w"].tolist() == [[2.5, -1.0]]
    assert tree.equal(store.rows, written("device").rows)
    assert store.rows["a"]["count"].tolist() == [3, 5, 3, 3, 4, 4]


@pytest.mark.parametrize("where", PLACES)
def test_all_rows_can_be_set(where: str) -> None:
    store, other = Store(first(), 6, where), written("device")
    store.rows = tree.map(torch.clone, other.rows)
    assert tree.equal(store.gather([1, 0]), other.gather([1, 0]))
    store.put([0], other.gather([1]))
    assert tree.equal(store.gather([0, 1]), other.gather([1, 1]))


@pytest.mark.parametrize("method", ["scaffold", "moon(projection=0)+fedrep"])
def test_two_hundred_clients_in_every_place_and_resumed_in_another(method: str) -> None:
    problem = images(norm="bn", sizes=(4,) * 200, batch=4)

    def run(where: str, rounds: int, state: dict | None = None) -> Simulation:
        how = Execution("vector", state=where)
        made = problem.simulate(method, how, per_round=20)
        if state is not None:
            made.load_state(load(save({k: v.contiguous() for k, v in state.items()})))
        for _ in range(rounds):
            made.run_round()
        return made

    expected = run("device", 4).state()
    clients = [k for k in expected if k.startswith("clients")]
    touched = expected[clients[0]].flatten(1).ne(expected[clients[0]][-1].flatten()).any(1)
    assert 20 < int(touched.sum()) < 80  # the others have never been drawn
    for where in PLACES:
        assert tree.equal(run(where, 4).state(), expected)
    for before, after in zip(PLACES, (*PLACES[1:], PLACES[0]), strict=True):
        half = run(before, 2)
        resumed = run(after, 2, half.state())
        assert resumed.store.where == after
        assert tree.equal(resumed.state(), expected)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("where", ["host", "file"])
def test_clients_that_have_not_taken_part_take_no_memory(where: str, tmp_path: Path) -> None:
    before = resident()
    store = Store({"w": torch.full((10_000,), 2.0)}, 10_000, where, str(tmp_path))  # 400 MB
    store.put([17, 9_999], tree.map(lambda x: x + 1, store.gather([17, 9_999])))
    assert store.gather([9_999, 3])["w"].mean(1).tolist() == [3.0, 2.0]
    assert resident() - before < 20e6


def test_a_file_has_no_name_and_its_room_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, really = [], os.posix_fallocate

    def allocate(file: int, start: int, size: int) -> None:
        taken.append((start, size))
        really(file, start, size)
        assert os.fstat(file).st_blocks * 512 >= size

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    store = Store({"w": torch.zeros(100_000)}, 25, "file", str(tmp_path))
    assert taken == [(0, 10_000_000)]
    assert list(tmp_path.iterdir()) == []
    assert store.gather([3])["w"].shape == (1, 100_000)


def test_a_full_disk_is_an_error_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KedgeError, match=r"takes 2\.0 GB, .*No space left on device.*--out"):
        Store({"w": torch.zeros(5_000_000)}, 100, "file", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_place() -> None:
    with pytest.raises(FieldError, match="state = 'disk' is not one of: device, host, file"):
        Store({}, 3, "disk")


@pytest.mark.parametrize("where", PLACES)
def test_a_row_of_another_shape_is_refused(where: str) -> None:
    store = Store({"c": torch.zeros(2)}, 3, where)
    with pytest.raises(
        KedgeError, match=r"a tensor of shape \(\) on a client, which began as \(2,\)"
    ):
        store.put([1], {"c": torch.zeros(1)})
    assert tree.equal(store.gather([0, 1, 2]), {"c": torch.zeros(3, 2)})
