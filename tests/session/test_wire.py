"""Messages: round trips, and what a receiver refuses before it makes an array."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.part import Mean, Stack, Sum, parts
from kedge.core.tree import Weights
from kedge.core.work import take_jobs
from kedge.errors import WireError
from kedge.session import blob, wire
from kedge.session.session import Broadcast
from kedge.session.wire import Leaf
from kedge.sim.simulation import Simulation

TREE: dict[str, Any] = {
    "weights": Weights({"a.b": torch.arange(6.0).reshape(2, 3)}, {"n": torch.tensor(3)}),
    "up": {"x": Sum(torch.ones(2)), "y": Mean({"z": torch.zeros(0, 4)}), "s": Stack(torch.ones(1))},
    "flags": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def message(header: dict[str, Any], data: bytes, kind: str = "reply") -> bytes:
    note = "0" * 8 + json.dumps({"version": wire.VERSION, "kind": kind})
    text = json.dumps({"__metadata__": {"kedge": note}, **header}, separators=(",", ":")).encode()
    return blob.sealed(len(text).to_bytes(8, "little") + text + data)


def test_a_tree_comes_back_with_and_without_a_template() -> None:
    packed = wire.pack("reply", TREE, round="3")
    assert tree.equal(wire.unpack(packed, "reply", wire.template_of(TREE)), TREE)
    assert tree.equal(wire.unpack(packed, "reply"), TREE)
    assert wire.notes_of(packed) == {"version": wire.VERSION, "kind": "reply", "round": "3"}
    assert packed == wire.pack("reply", TREE, round="3")


def test_another_memory_format_is_the_same_message() -> None:
    x = torch.arange(48.0).reshape(2, 2, 3, 4)
    turned = x.contiguous(memory_format=torch.channels_last)
    assert wire.pack("reply", {"x": turned}) == wire.pack("reply", {"x": x})


WANTED = {"w": Leaf(torch.float32, (2, 2))}
FINE = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "header does not fit"),
        (b"\x00" * 8, "header cannot be read"),
        (b"\xff" * 40, "header does not fit"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header does not fit"),
        ((2).to_bytes(8, "little") + b"[]", "header cannot be read"),
        ((9).to_bytes(8, "little") + b'{"w": []}', "header cannot be read"),
        (wire.pack("down", {"w": torch.ones(2, 2)}), "expected a message of kind 'reply'"),
        (wire.pack("reply", {}), "lacks 'w'"),
        (wire.pack("reply", {"v": torch.ones(2)}), "holds an unknown array 'v'"),
        (wire.pack("reply", {"w": torch.ones(2, 3)}), "array 'w' is .*2, 3.* expected"),
        (wire.pack("reply", {"w": torch.ones(2, 2).double()}), "array 'w' is .*float64"),
        (message(FINE, b"\x00" * 15), "holds 15 bytes of arrays"),
        (message(FINE, b"\x00" * 17), "holds 17 bytes of arrays"),
        (message({"w": FINE["w"] | {"data_offsets": [0, 1 << 40]}}, b"\x00" * 16), "length"),
        (message({"w": FINE["w"] | {"data_offsets": [-8, 8]}}, b"\x00" * 16), "length"),
        (message({"w": FINE["w"] | {"shape": [2, -2]}}, b"\x00" * 16), "array 'w' is None"),
        (message({"w": FINE["w"] | {"shape": "x"}}, b"\x00" * 16), "array 'w' is None"),
        (message({"w": FINE["w"] | {"dtype": "C64"}}, b"\x00" * 16), "array 'w' is None"),
    ],
)
def test_what_is_refused(packed: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.unpack(packed, "reply", WANTED)


def test_another_version_is_refused() -> None:
    note = "0" * 8 + json.dumps({"version": "0", "kind": "reply"})
    text = json.dumps({"__metadata__": {"kedge": note}, **FINE}).encode()
    with pytest.raises(WireError, match="version '0', this kedge reads"):
        wire.unpack(len(text).to_bytes(8, "little") + text + b"\x00" * 16, "reply", WANTED)


def test_without_a_template_lengths_and_types_are_checked() -> None:
    with pytest.raises(WireError, match="length"):
        wire.unpack(message({"w": FINE["w"] | {"shape": [3]}}, b"\x00" * 16), "reply")
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    with pytest.raises(WireError, match="a structure that this kedge does not know"):
        wire.unpack(message({"Popen:args": entry}, b"\x00" * 4), "reply")


def test_a_damaged_message_is_refused() -> None:
    packed = wire.pack("reply", {"w": torch.ones(2, 2)})
    for at in (-1, -16):  # a bit of an array, which no other check can notice
        damaged = bytearray(packed)
        damaged[at] ^= 1
        with pytest.raises(WireError, match="the reply is damaged: its checksum is wrong"):
            wire.unpack(bytes(damaged), "reply", WANTED)


def test_a_header_that_only_json_reads_is_refused() -> None:
    """An entry of the metadata that is not ours."""
    header = {"w": FINE["w"], "__metadata__": {"kedge": "", "other": 3}}
    header["__metadata__"]["kedge"] = "0" * 8 + json.dumps(
        {"version": wire.VERSION, "kind": "reply"}
    )
    text = json.dumps(header, separators=(",", ":")).encode()
    packed = blob.sealed(len(text).to_bytes(8, "little") + text + b"\x00" * 16)
    with pytest.raises(WireError, match="its header cannot be read"):
        wire.unpack(packed, "reply", WANTED)


def test_an_array_within_an_array_is_refused() -> None:
    entry = {"dtype": "U8", "shape": [1]}
    for names in (["a", "a|b"], ["a|b", "a"], ["a", "a|b|c"]):
        header = {n: entry | {"data_offsets": [i, i + 1]} for i, n in enumerate(names)}
        with pytest.raises(WireError, match="within another array"):
            wire.unpack(message(header, b"\x00\x01"), "reply")


def test_names_with_signs_of_the_format_come_back() -> None:
    value = {"a|b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    value |= {"Weights:params": torch.ones(3), "50%7C": {"x:y": torch.ones(4)}}
    packed = wire.pack("reply", value)
    assert tree.equal(wire.unpack(packed, "reply"), value)
    assert tree.equal(wire.unpack(packed, "reply", wire.template_of(value)), value)
    assert torch.equal(wire.unpack(wire.pack("reply", torch.ones(2)), "reply"), torch.ones(2))


@pytest.mark.parametrize("name", list(parts))
def test_a_dry_round_foretells_the_shapes_of_replies(name: str) -> None:
    cls = parts[name]
    method = cls(**cls.tiny)
    run = images(norm="bn", task=cls.tasks[0]).simulate(method, "loop")
    for _ in range(2):
        for name, clients in run.session.surveys([0, 1, 2]):
            part, cohort = run.bound.part(name), run.cohort([1])
            answer = client.survey(cohort.bound, take_jobs(cohort.jobs, 0), part)
            found = wire.update_template(
                cohort.bound, broadcast(run), run.session.workload.work.batch, name
            )
            assert wire.template_of(answer) == found
            run.survey(part, clients)
        cohort = run.cohort([1])
        job = take_jobs(cohort.jobs, 0)
        carry = client.begin(cohort.bound, job)
        update = client.end(
            cohort.bound, job, client.step(cohort.bound, job, carry, cohort.batches[0, 0])
        ).update
        found = wire.update_template(cohort.bound, broadcast(run), run.session.workload.work.batch)
        assert wire.template_of(update) == found
        run.run_round()


def broadcast(run: Simulation) -> Broadcast:
    """What clients have in the present round: all weights, private ones included."""
    return Broadcast(run.weights, run.bound.sent(run.server))
