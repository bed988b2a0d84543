"""What is shared is measured on a real round, and equals what the parts declare."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.part import Part, Sum, parts
from kedge.diagnostics.privacy.shares import (
    EVERY,
    FIRST,
    LAST,
    Shared,
    declared,
    sentences,
    share_round,
)
from kedge.sim.simulation import Simulation

PARTS = sorted(name for name in parts if parts[name].__module__.startswith("kedge."))


def simulation(method: str | Part, **options: object) -> Simulation:
    """In its second round: what is asked once was asked before."""
    task = method.tasks[0] if isinstance(method, Part) else "classification"
    run = images(norm="bn", task=task).simulate(method, **options)
    run.run_round()
    return run


def shared(method: str | Part, client: int = 1) -> Shared:
    return share_round(simulation(method), client)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARTS)
def test_declared_measured_and_counted_numbers_agree(name: str) -> None:
    run = simulation(parts[name](**parts[name].tiny))
    before = {key: value.clone() for key, value in run.state().items()}
    found = share_round(run, 1)
    assert tree.equal(run.state(), before)
    [own] = declared(run, found)
    assert own.agrees, own
    broadcasts = 1 + len(run.session.surveys([1]))  # one with each request
    done = run.run_round([1])
    assert found.nbytes("up") == done.up_bytes
    assert found.nbytes("down") * broadcasts == done.down_bytes


def test_messages_of_fedimpro_by_hand() -> None:
    run = simulation("fedimpro(cut=stage1)")
    found = share_round(run, 0)
    up = {s.name: s for s in found.shares if s.part == "fedimpro" and s.way == "up"}
    # four channels of 2 x 2 activations, three classes, eight bytes a number
    assert {name: (s.kind, s.shape, s.numbers, s.nbytes) for name, s in up.items()} == {
        "mean": ("Sum", "3 x 16", 48, 384),
        "scale": ("Sum", "3 x 16", 48, 384),
    }
    text = " ".join(sentences(run, found))
    assert "FedImpro sends per class a mean and a standard deviation of features at stage1" in text
    assert "2 x 3 x 16 numbers" in text
    assert "The server needs only sums over the 3 clients" in text
    assert "Labels" not in text


def test_the_update_and_the_running_statistics_by_hand() -> None:
    found = shared("fedavg")
    sizes = {(s.way, s.name): s.numbers for s in found.shares}
    # 4 filters of 9 weights and a bias, BatchNorm 8, 16 x 6 + 6, 6 x 3 + 3; mean, variance, count
    assert sizes == {
        ("down", "parameters"): 171,
        ("down", "buffers"): 9,
        ("up", "parameters (update)"): 171,
        ("up", "buffers (update)"): 9,
    }


def test_single_clients_and_labels_are_told() -> None:
    run = simulation("flboost(steps=1, batch=4, noise=2, width=2)")
    found = share_round(run, 0)
    [counts] = [s for s in found.shares if s.name == "counts"]
    assert (counts.kind, counts.seen) == ("Stack", "each client's own")
    assert torch.equal(found.uploads("flboost")["counts"], run.clients.label_counts[0])
    text = " ".join(sentences(run, found))
    assert "FLBoost needs what each single client sends" in text
    assert "Labels are counted or averaged in what clients send: FLBoost (each client)" in text


def test_surveys_say_when_they_are_asked() -> None:
    kinds = {"fedmix(rows=4)": FIRST, "ccvr(steps=1)": LAST, "fedbr": EVERY}
    for method, when in kinds.items():
        asked = [s for s in shared(method).shares if s.survey]
        assert asked
        assert {s.when for s in asked} == {when}


def test_one_client_is_its_own_sum() -> None:
    run = simulation("fedavg", per_round=1)
    assert "the sum that the server sees is that client's" in " ".join(
        sentences(run, share_round(run, 0))
    )


def test_private_parameters_stay() -> None:
    run = simulation("fedper")
    text = " ".join(sentences(run, share_round(run, 0)))
    assert "150 parameters" in text  # 171 without the head's 21
    assert "2 of the model's arrays stay on the client" in text
    assert "No parameter of the model leaves" in " ".join(
        sentences(simulation("local"), shared("local"))
    )


@dataclass(frozen=True)
class Gossip(Part):
    """A part of somebody else."""

    uploads = "2"

    def reply(self, v, weights):  # type: ignore[no-untyped-def]
        return {}, {"secret": Sum(torch.ones(2, dtype=v.spec.dtype))}


def test_parts_without_words_are_listed_by_name() -> None:
    run = simulation(Gossip())
    text = " ".join(sentences(run, share_round(run, 0)))
    assert "gossip also makes a client share: it sends secret (2 numbers)." in text
