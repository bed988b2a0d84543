"""Hostile members and hostile strangers over real processes: nothing of theirs is averaged.

Kinds of bad replies, all sent over the real transport here (those of ``FORGERIES``), and one by one
in a process by ``tests/flower/test_distrust.py``. Content that is no message of kedge at all, nine
more kinds, is in ``test_no_resident.py``.

===========================  ====================================================================
``nothing``                  no byte
``not_safetensors``          zeros
``pickled``                  a pickle
``oversized_header``         a header of 4 EiB
``oversized``                8 MB more than there can be
``deep_json``                a header of 50 000 brackets
``cut_short``                the last bytes are missing
``damaged``                  one bit is another
``another_version``          another version of the wire
``another_kind``             a message to members, not of one
``another_name``             an array that was not asked for
``a_missing_array``          no loss
``another_shape``            an update of another shape
``another_dtype``            an update in float64
``a_header_that_lies``       an array of 10^12 numbers is announced
``arrays_that_overlap``      all arrays at one place
``nan``                      NaN in the update
``infinite``                 infinity in the update
``huge``                     1e30 in the update
``large``                    1e4 in the update, far above the norm of the weights
``a_loss_that_is_nan``       NaN as the loss
``a_negative_weight``        the weight -5 in the average
``a_billion_samples``        the weight of a billion samples
``a_larger_share``           a share of the steps above one
``the_number_of_another``    the number of another client
``an_old_round``             the number of an older round
``another_attempt``          the number of an attempt that was not made
``another_run``              another run
``other_terms``              the hash of other terms
``a_round_that_is_no_number``  text in place of the round
``another_code``             a code that does not exist
``no_code``                  the note ``code`` is missing
``more_test_samples``        a test on more samples than it has
``better_than_perfect``      more right answers than samples
===========================  ====================================================================
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import contextlib
import dataclasses
import datetime
import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient

from kedge.federation.messages import MemberRequest
from kedge.flower.agent import Node
from kedge.flower.arrays import wrap
from kedge.flower.relay import forward
from kedge.local.federation import node_id
from kedge.local.runs import follow
from tests.attacks.liars import with_statement
from tests.flower.real.running import (
    NODES,
    STRICT,
    Running,
    assert_same,
    records,
    rounds_of,
    settings,
    simulate,
    wait,
)
from tests.flower.test_distrust import FORGERIES

pytestmark = pytest.mark.flower
ROUND = 1  # the second round: the first one is honest, so there is an older one


def test_the_table_above_is_complete() -> None:
    named = re.findall(r"^``(\w+)``", __doc__ or "", re.MULTILINE)
    assert named == list(FORGERIES)
    assert len(named) == 34


def share(client: int) -> list[str]:
    """The forgeries of a member; the honest number of client 1 is no forgery."""
    names = [name for name in FORGERIES if name != "the_number_of_another"]
    shares = [names[k::NODES] for k in range(NODES)]
    shares[2].append("the_number_of_another")
    return shares[client]


#: (request, honest reply) -> what is sent.
Change = Callable[[MemberRequest, bytes], bytes]


@contextlib.contextmanager
def impostor(federation: Running, client: int, folder: Path, change: Change) -> Iterator[None]:
    """Stand between a client process and its resident node, and change replies."""
    path = federation.folder / "nodes" / federation.spec.nodes[client].name / "socket"
    honest = path.with_name("socket.honest")

    def handle(message: bytes) -> bytes:
        reply = b"".join(forward(str(honest), [message], time.time() + 120))
        return change(MemberRequest.unpack(message), reply)

    path.rename(honest)  # the resident node goes on listening
    node = Node(handle, path, folder / f"impostor-{client}", lambda text: None)
    thread = threading.Thread(target=node.serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join(30)
        honest.rename(path)


def lie(request: MemberRequest, reply: bytes) -> bytes:
    """The forgery of an attempt; the truth after the last one."""
    lies = share(request.client)
    if (request.kind, request.round) != ("train", ROUND) or request.attempt >= len(lies):
        return reply
    return FORGERIES[lies[request.attempt]][0](request, reply)


def test_forged_replies_are_dropped_one_by_one(federation: Running, tmp_path: Path) -> None:
    """Every member lies in every way, attempt by attempt, and tells the truth in the end."""
    config, out = settings("scaffold", 2), tmp_path / "run"
    lies = [share(client) for client in range(NODES)]
    rules = dataclasses.replace(STRICT, attempts=20, strikes=1000, wait_s=0.1)
    with contextlib.ExitStack() as stack:
        for client in range(NODES):
            stack.enter_context(impostor(federation, client, tmp_path, lie))
        federation.train(config, out, rules=rules)
    log = (out / "log.txt").read_text().splitlines()
    for client, names in enumerate(lies):
        said = f"round 2, train: client-{client} sent a bad reply, which was dropped: "
        reasons = [line.partition(said)[2] for line in log if said in line]
        for name, reason in zip(names, reasons, strict=True):
            assert re.search(FORGERIES[name][1], reason), (name, reason)
    members = json.loads((out / "federation.json").read_bytes())["members"]
    assert [member["strikes"] for member in members] == [len(names) for names in lies]
    assert sum(map(len, lies)) == len(FORGERIES)
    assert [record["cohort"] for record in records(out)] == [[0, 1, 2]] * 2
    assert_same(out, simulate(config, tmp_path / "simulated"))


def test_absurd_statements_do_not_end_the_run(federation: Running, tmp_path: Path) -> None:
    """Two of three members state a hundred thousand classes, and moments of 1e200."""
    config, out = settings("fedavg", 1, per_round=0), tmp_path / "run"
    config = dataclasses.replace(config, clients=1)

    def absurd(change: Callable[[dict[str, Any]], None]) -> Change:
        def lie(request: MemberRequest, reply: bytes) -> bytes:
            return with_statement(reply, change) if request.kind == "join" else reply

        return lie

    def classes(values: dict[str, Any]) -> None:
        values["schema"] |= {"outputs": 100_000, "classes": None}

    def moments(values: dict[str, Any]) -> None:
        values["schema"]["dtype"] = "float32"
        count = 64 * values["train"]
        values["moments"] = {"bytes": [], "count": count, "mean": [1e200], "squares": [0.0]}

    with contextlib.ExitStack() as stack:
        for client, change in enumerate((classes, moments)):
            stack.enter_context(impostor(federation, client, tmp_path, absurd(change)))
        federation.train(config, out)
    log = (out / "log.txt").read_text()
    assert len(re.findall("did not join: .*has 100000 classes, far more than most", log)) == 1
    assert len(re.findall("did not join: .*numbers that do not fit into 32 bits", log)) == 1
    members = json.loads((out / "federation.json").read_bytes())["members"]
    assert [member["name"] for member in members] == ["client-2"]


# -- replays --------------------------------------------------------------------------------------


class Replayer:
    """Sends requests with the signature of one request of a node, whatever their body is."""

    def __init__(self, federation: Running, name: str, age_s: float = 0.0) -> None:
        keys = federation.folder / "keys"
        key: Any = serialization.load_ssh_private_key((keys / name).read_bytes(), None)
        stamp = (now() - datetime.timedelta(seconds=age_s)).isoformat()
        encoded = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: public_key_to_bytes(key.public_key()),
            FLEET_HTTP_SIGNATURE_HEADER: sign_message(key, stamp.encode("ascii")),
        }
        self.headers = {name: b64encode(value).decode("ascii") for name, value in encoded.items()}
        self.headers[TIMESTAMP_HEADER] = stamp
        self.client = FleetHttpClient.from_server_address(
            f"127.0.0.1:{federation.spec.port}", False, (keys / "ca.crt").read_bytes(), [self]
        )

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        add_headers(context.request, self.headers)
        return call_next(context)

    def pull(self, node: int) -> list[Any]:
        request = PullMessagesRequest(node=FlowerNode(node_id=node))
        return list(self.client.PullMessages(request).messages_list)

    def push(self, node: int, reply: Message) -> None:
        """Push a reply with its objects, as a SuperNode does."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        sender, run = FlowerNode(node_id=node), reply.metadata.run_id
        answer = self.client.PushMessages(
            PushMessagesRequest(
                node=sender,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[1.0],
            )
        )
        for number, value in get_all_nested_objects(reply).items():
            if number in answer.objects_to_push:
                stored = self.client.PushObject(
                    PushObjectRequest(
                        node=sender,
                        run_id=run,
                        object_id=number,
                        object_content=value.deflate(),
                        session_id=answer.session_id,
                    )
                )
                assert stored.stored


def test_a_replayed_signature_gets_nothing_into_an_average(
    federation: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's signature covers the time of a request, not its body, for five minutes.

    Who has one can take a request away from the node, and answer it with the reply to an older one.
    That reply is dropped, and the node is asked again. (Who makes up a plausible reply to the
    request *is* that node as long as the signature lasts: TLS is what keeps signatures secret.)
    """
    config, out = settings("scaffold", 3), tmp_path / "run"
    mine, other = (int(node_id(federation.folder, f"client-{k}")) for k in (0, 1))
    rules = dataclasses.replace(STRICT, wait_s=0.1)
    old: list[bytes] = []

    def keep(request: MemberRequest, reply: bytes) -> bytes:
        old.extend([reply] if request.kind == "train" and request.round == 0 else [])
        return reply

    with contextlib.ExitStack() as stack:
        stack.enter_context(impostor(federation, 0, tmp_path, keep))
        run = federation.submit(config, out, rules=rules)
        wait(lambda: rounds_of(out) >= 1)
        replayer, late = (Replayer(federation, "client-0", age_s) for age_s in (0.0, 400.0))
        stack.callback(replayer.client.close)
        stack.callback(late.client.close)
        for sender, node in ((replayer, other), (late, mine)):
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                sender.pull(node)
        [taken] = wait(lambda: replayer.pull(mine))  # the same signature, again and again
        request = message_from_proto(taken)
        for name, value in (("_run_id", request.metadata.run_id), ("_node_id", mine)):
            monkeypatch.setattr(TaskIdentity, name, value)
        monkeypatch.setattr(TaskIdentity, "_task_id", 1)
        replayer.push(mine, Message(wrap([old[0]]), reply_to=request))
        follow(federation.folder, run, "")
    log = (out / "log.txt").read_text()
    assert "client-0 sent a bad reply, which was dropped: round 0 of another request" in log
    assert_same(out, simulate(config, tmp_path / "simulated"))
