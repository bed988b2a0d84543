"""A large model: what is packed once, what waits on disk, and how much memory it takes."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from kedge.core import tree
from kedge.errors import WireError
from kedge.federation import large_messages as spool
from kedge.federation import messages
from kedge.federation.coordinator import requests as couriers
from kedge.federation.coordinator.coordinator import Recorder
from kedge.federation.coordinator.requests import _norm, largest
from kedge.federation.large_messages import size_of, spooled
from kedge.federation.messages import MemberRequest
from kedge.session import blob, wire
from kedge.session.session import Session
from tests.flower.faulty import Faulty
from tests.flower.federations import Members, assert_same, coordinator, net, replay, settings

TREE = {
    "w": torch.randn(50, 40),
    "n": torch.tensor(3),
    "empty": torch.zeros(0),
    "b": torch.ones(2) > 0,
}


def test_pieces_are_those_of_one_message() -> None:
    whole = wire.pack("state", TREE, round="1")
    for most in (1, 7, 100, 1 << 20):
        pieces = wire.pieces("state", TREE, most, round="1")
        assert b"".join(pieces) == whole
        assert max(map(len, pieces)) <= most
    assert tree.equal(load(whole), TREE)  # any reader of safetensors reads it


def test_a_file_is_read_as_bytes_are(tmp_path: Path) -> None:
    whole = wire.pack("state", TREE)
    path = tmp_path / "state.safetensors"
    path.write_bytes(whole)
    with path.open("rb") as file:
        assert tree.equal(wire.unpack(file, "state", wire.template_of(TREE)), TREE)
        assert wire.notes_of(file)["kind"] == "state"
    for wrong in (whole[:-1], whole + b"\0", whole[:-1] + b"\1", whole[:20], b""):
        for message in (wrong, io.BytesIO(wrong)):
            with pytest.raises(WireError):
                wire.unpack(message, "state", wire.template_of(TREE))


def test_truth_values_of_strangers() -> None:
    message = bytearray(wire.pack("state", {"b": torch.tensor([True, False])}))
    message[-1] = 7
    with pytest.raises(WireError, match="neither 0 nor 1"):
        wire.unpack(blob.sealed(bytes(message)), "state")


def test_a_request_and_its_arrays_belong_together() -> None:
    request = MemberRequest("train", "ab" * 8, value={"down": torch.ones(3)})
    other = MemberRequest("train", "ab" * 8, value={"down": torch.zeros(3)})
    head, *content = request.pieces(messages.content_of(request.value))
    foreign = messages.content_of(other.value)
    assert tree.equal(MemberRequest.unpack(b"".join([head, *content])).value, request.value)
    for message in ([head], [head, *foreign], content, [head, *content, b"x"], [head, head]):
        with pytest.raises(WireError):
            MemberRequest.unpack(b"".join(message))
    plain = MemberRequest("join", "ab" * 8, text="hello")
    assert MemberRequest.unpack(plain.pack()) == plain


def test_large_messages_are_files_without_a_name(tmp_path: Path) -> None:
    small = spooled([b"ab", b"c"], tmp_path)
    assert small == b"abc"
    pieces = [bytes([i]) * (1 << 19) for i in range(5)]
    content = b"".join(pieces)
    large = spooled(pieces, tmp_path)
    assert not isinstance(large, bytes)
    assert not pieces  # each was freed once it was written
    assert size_of(large) == len(content)
    large.seek(0)
    assert large.read() == content
    assert not list(tmp_path.iterdir())
    again = spooled(iter([content, b"x"]), tmp_path)
    assert size_of(again) == len(content) + 1


def test_a_run_whose_replies_all_wait_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same; and arrays are packed once for all members of a round."""
    monkeypatch.setattr(spool, "MAX_IN_MEMORY", 0)
    monkeypatch.setattr(messages, "PIECE", 500)
    packed: list[int] = []

    def count(value: tree.Tree) -> list[bytes]:
        found = messages.content_of(value)
        packed.extend([1] * bool(found))
        return found

    monkeypatch.setattr(couriers, "content_of", count)
    members = Members(tmp_path, model=net())
    transport = Faulty(members, lambda name, request, reply: reply)
    config = settings("scaffold", rounds=3, per_round=2)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert_same(run, replay(run, members))
    # the initial weights; a round; then rounds with tests of those that do not train; the last test
    assert len(packed) == 1 + 1 + 2 * 2 + 1
    assert not list((tmp_path / "run").glob("tmp*"))


@pytest.mark.parametrize("method", ["fedavgm", "fedbr(rows=4, samples=3, width=5, refresh=round)"])
def test_the_weights_before_a_round_are_free_when_it_is_accepted(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as the model, and the checkpoint is written after that."""
    living: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def record(self: Recorder, session: Session, *rest: Any) -> None:
        living.append(sum(ref() is not None for ref in seen))
        weights = session.server.weights.params.values()
        seen[:] = [weakref.ref(w) for w in weights]
        real(self, session, *rest)

    real = Recorder.record_round
    monkeypatch.setattr(Recorder, "record_round", record)
    members = Members(tmp_path, model=net())
    run = coordinator(members, settings(method, rounds=3, per_round=0), tmp_path / "run")
    run.run()
    assert len(seen) > 3
    assert living == [0, 0, 0]


def test_norms_and_extremes_in_blocks() -> None:
    big = torch.randn(3, 1_000_000)
    assert _norm({"a": big, "b": {"c": torch.ones(4)}}) == pytest.approx(
        float((big.double().square().sum() + 4).sqrt()), rel=1e-12
    )
    for bad in (float("nan"), float("inf"), -float("inf")):
        big[2, 77] = bad
        assert largest({"a": big}) == math.inf  # type: ignore[arg-type]
    assert largest({"a": torch.zeros(0), "n": torch.tensor(3)}) == 3  # type: ignore[arg-type]


#: A coordinator, and a process with its members; prints the peak of the former in models.
SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.flower.federations import QUICK, Members, datasets, settings
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.flower.relay import forward
from kedge.flower.agent import Node
from kedge.federation.messages import Direct

class Remote(Direct):
    def send(self, node, message, deadline):
        self._sent[node + str(next(self._numbers))] = node, message
        return list(self._sent)[-1]

    def receive(self, ids, deadline):
        for number in ids:
            node, message = self._sent.pop(number)
            yield number, forward(self.nodes[node], message, time.time() + 600)

def memory(key):
    text = Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0]) / 1024

folder = Path(sys.argv[1])
members = Members(folder, datasets()[:2])
child = os.fork()
if not child:
    import threading
    for name in members.names:
        handle = members.handles["node of " + name]
        node = Node(handle, folder / f"{name}.sock", folder / name, print)
        threading.Thread(target=node.serve, daemon=True).start()
    while os.getppid() != 1 and not (folder / "over").exists():
        time.sleep(0.2)
    os._exit(0)
sockets = {n: str(folder / f"{n}.sock") for n in members.names}
model = "mlp(hidden=[3500, 3500])"
config = settings("fedavg", rounds=2, per_round=0, clients=2, model=model, steps=1)
before = memory("VmRSS")
run = Coordinator(config, Remote(sockets), folder / "run", rules=QUICK)
try:
    run.run()
finally:
    (folder / "over").touch()
size = sum(w.nbytes for w in run.session.server.weights.params.values()) / 2**20
print(size, (memory("VmHWM") - before) / size)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_takes_about_five_times_the_model(tmp_path: Path) -> None:
    """Weights, next weights, sum, one reply, one weighted reply; 6.5 with what libraries load."""
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    size, peak = map(float, done.stdout.splitlines()[-1].split())
    assert size > 45
    assert peak < 6.5, peak
