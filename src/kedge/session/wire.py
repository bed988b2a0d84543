"""Serialise trees to messages and back, with a version and checks.

A message is one safetensors file (:mod:`kedge.session.blob`): named arrays and a small header, no
pickle and no code. The receiver compares it with a *template*, a tree of the same structure whose
leaves are dtypes and shapes. It checks version, kind, names, dtypes, shapes, lengths and a checksum
before it allocates an array, and that all numbers are finite. The checksum detects damage, not
forgery.

:func:`update_template` derives the template of a client's update from a dry run on blank samples.
"""

from __future__ import annotations

import sys
from typing import IO
from urllib.parse import unquote

import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.part import Mean, Stack, Sum
from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.update import Update
from kedge.core.view import Info, Job, SweepPieces
from kedge.errors import NotFinite, WireError
from kedge.session import blob
from kedge.session.blob import Leaf, Message, MessageHeader
from kedge.session.session import Broadcast

VERSION = "2"

#: Named tuples that a message may contain.
TYPES = {t.__name__: t for t in (Weights, Sum, Mean, Stack, Update, Broadcast)}


def template_of(value: Tree) -> Tree:
    """The template of messages with trees like ``value``.

    >>> template_of({"w": torch.zeros(2, 3)})
    {'w': Leaf(dtype=torch.float32, shape=(2, 3))}
    """
    if isinstance(value, dict):
        return {key: template_of(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return type(value)(*(template_of(item) for item in value))
    return Leaf(value.dtype, tuple(value.shape))


def pack(kind: str, value: Tree, **notes: str) -> bytes:
    """Serialise a tree.

    Args:
        kind: kind of the message, which the receiver checks.
        value: the tree; tensors are copied to the host.
        notes: further entries of the header, such as the round.

    >>> unpack(pack("state", {"w": torch.ones(2)}), "state", {"w": Leaf(torch.float32, (2,))})
    {'w': tensor([1., 1.])}
    """
    [message] = pieces(kind, value, sys.maxsize, **notes)
    return message


def pack_finite(kind: str, value: Tree, **notes: str) -> bytes:
    """:func:`pack` for what leaves a client; a NotFinite if a number of it is not finite."""
    for name, array in named(value).items():
        if not tree.is_finite(array):
            raise NotFinite(
                f"the {kind}'s array {name!r} has a number that is not finite: the training "
                "diverges, or the server's weights are no honest ones"
            )
    return pack(kind, value, **notes)


def pieces(kind: str, value: Tree, most: int, **notes: str) -> list[bytes]:
    """The message of :func:`pack` in pieces of at most ``most`` bytes."""
    return blob.write(named(value), {"version": VERSION, "kind": kind, **notes}, most)


def unpack(message: Message, kind: str, template: Tree = None, at: int = 0) -> Tree:
    """The tree of a message.

    Args:
        message: what :func:`pack` returned, or a file with it.
        kind: the expected kind.
        template: dtypes and shapes that the arrays must have. Without one the tree has the
            structure that the message describes: a client trusts its server.
        at: where the message begins.

    Raises:
        WireError: the message is malformed, of another kind, does not match the template, or has
            a number that is not finite.
    """
    file = blob.opened(message)
    header = _checked(file, kind, template, at)
    arrays: dict[str, Tensor] = {}
    for name, entry in header.entries.items():
        assert entry.leaf is not None  # it was checked
        arrays[name] = blob.read_array(file, header.start + entry.start, entry.leaf)
        if not tree.is_finite(arrays[name]):
            raise WireError(f"the {kind}'s array {name!r} has a number that is not finite")
    return _structured(arrays) if template is None else _filled(template, arrays)


def notes_of(message: Message) -> dict[str, str]:
    """The notes of a message, its kind and version among them."""
    return blob.header_of(blob.opened(message)).notes


def check(message: Message, kind: str, template: Tree = None) -> None:
    """Raise a WireError unless a message is of this kind and matches the template; no array is
    allocated. Without a template only lengths are checked, against the shapes in the header."""
    _checked(blob.opened(message), kind, template)


def _checked(file: IO[bytes], kind: str, template: Tree, at: int = 0) -> MessageHeader:
    header = blob.header_of(file, at)
    notes, entries = header.notes, header.entries
    if notes.get("version") != VERSION:
        raise WireError(
            f"the message has version {notes.get('version')!r}, this kedge reads {VERSION!r}; "
            "use the same release on both sides"
        )
    if notes.get("kind") != kind:
        raise WireError(f"expected a message of kind {kind!r}, found {notes.get('kind')!r}")
    told = {name: entry.leaf for name, entry in entries.items()}
    wanted = told if template is None else named(template)
    strange = sorted(entries.keys() ^ wanted.keys())
    if strange:
        what = "lacks" if strange[0] in wanted else "holds an unknown array"
        raise WireError(f"the {kind} {what} {strange[0]!r}")
    end = 0
    for name, (actual, *place) in sorted(entries.items(), key=lambda item: item[1][1:]):
        leaf = wanted[name]
        if leaf is None or actual != leaf:
            raise WireError(f"the {kind}'s array {name!r} is {actual}, expected {leaf}")
        if place != [end, end + leaf.nbytes]:
            raise WireError(f"the {kind}'s array {name!r} does not have the length of its shape")
        end += leaf.nbytes
    if end != header.size:
        raise WireError(f"the {kind} holds {header.size} bytes of arrays, its header says {end}")
    if not blob.is_whole(file, header, at):
        raise WireError(f"the {kind} is damaged: its checksum is wrong. Send it again")
    return header


def named(value: Tree, prefix: str = "") -> dict[str, Tree]:
    """Every leaf under its path: keys of dicts, and ``Type:field`` for named tuples."""
    if isinstance(value, Leaf) or not isinstance(value, (dict, tuple)):
        return {prefix: value}
    pairs = value
    if isinstance(value, tuple):
        kind = type(value).__name__
        pairs = {f"{kind}:{k}": v for k, v in value._asdict().items()}  # type: ignore[attr-defined]
    found: dict[str, Tree] = {}
    for key, item in pairs.items():  # type: ignore[union-attr]
        found |= named(item, _path(prefix, key, isinstance(value, tuple)))
    return found


def _path(prefix: str, key: str, is_field: bool = False) -> str:
    """The name of a leaf or branch; signs with a meaning in names are escaped in keys of dicts."""
    if not is_field:
        key = tree.escaped(key).replace(":", "%3A")
        key = "%5F" + key[1:] if key == "__metadata__" and not prefix else key  # of safetensors
    return f"{prefix}{tree.SEPARATOR}{key}" if prefix else key


def _filled(template: Tree, arrays: dict[str, Tensor], prefix: str = "") -> Tree:
    """Arrays in the structure of a template."""
    if isinstance(template, Leaf):
        return arrays[prefix]
    if isinstance(template, dict):
        return {key: _filled(item, arrays, _path(prefix, key)) for key, item in template.items()}
    kind, fields = type(template).__name__, template._asdict().items()
    values = (_filled(item, arrays, _path(prefix, f"{kind}:{key}", True)) for key, item in fields)
    return type(template)(*values)


def _structured(arrays: dict[str, Tensor]) -> Tree:
    """Arrays in the structure that their names describe, sorted; empty branches are lost."""
    if arrays.keys() == {""}:
        return arrays[""]
    root: Tree = {}
    for name, value in sorted(arrays.items()):  # safetensors gives them in random order
        *path, last = name.split(tree.SEPARATOR)
        node = root
        for key in (*path, None):
            if not isinstance(node, dict) or (key is None and last in node):
                raise WireError(f"the message holds an array {name!r} within another array")
            node = node if key is None else node.setdefault(key, {})
        node[last] = value
    return _typed(root)


def _typed(node: Tree) -> Tree:
    if not isinstance(node, dict):
        return node
    items = {key: _typed(item) for key, item in node.items()}
    kinds = {key.partition(":")[0] for key in items if ":" in key}
    if len(kinds) != 1 or not all(":" in key for key in items):
        return {unquote(key): item for key, item in items.items()}
    kind = TYPES.get(kinds.pop())
    fields = {key.partition(":")[2]: item for key, item in items.items()}
    if kind is None or not fields.keys() <= set(kind._fields):
        raise WireError("the message holds a structure that this kedge does not know")
    return kind(**{name: fields.get(name, {}) for name in kind._fields})


# -- templates from a dry run ---------------------------------------------------------------------


class Blank:
    """Two samples of zeros, for a dry run."""

    is_random = False

    def __init__(self, bound: Bound) -> None:
        spec, outputs = bound.spec, bound.task.outputs
        self._x = torch.zeros((2, *spec.input_shape), dtype=spec.dtype, device=spec.device)
        one_class = bound.task.one_class
        self._y = torch.zeros((2,) if one_class else (2, outputs), device=spec.device)
        self._y = self._y.to(torch.int64 if one_class else spec.dtype)

    def batch(self, index: Tensor, key: Tensor) -> Batch:
        return Batch(self._x[index % 2], self._y[index % 2])

    def clean(self, index: Tensor) -> Batch:
        return Batch(self._x[index % 2], self._y[index % 2])


def update_template(bound: Bound, received: Broadcast, batch: int, part: str = "") -> Update:
    """The template of a client's update, from a dry run in the phases of ``bound``.

    Args:
        bound: the method.
        received: what the client received, with all weights.
        batch: rows of the batch of the only step.
        part: whose survey is answered; empty: after training.
    """
    dry, job = _dry_run(bound, received)
    if part:
        return template_of(client.survey(dry, job, bound.part(part)))
    index = torch.zeros(batch, dtype=torch.int64, device=bound.spec.device)
    carry = client.step(dry, job, client.begin(dry, job), index)
    return template_of(client.end(dry, job, carry).update)


def _dry_run(bound: Bound, received: Broadcast) -> tuple[Bound, Job]:
    spec = bound.spec
    one = torch.ones((), dtype=spec.dtype, device=spec.device)
    zero = torch.zeros((), dtype=torch.int64, device=spec.device)
    rows = torch.zeros((1, 2), dtype=torch.int64, device=spec.device)
    job = Job(
        anchor=received.weights,
        sent=received.sent,
        client=bound.client(),
        info=Info(zero, zero, *[one] * (len(Info._fields) - 2)),
        key=spec.key,
        counts=torch.ones(bound.task.outputs, dtype=spec.dtype, device=spec.device),
        sweep=SweepPieces(rows, torch.ones_like(rows, dtype=spec.dtype)),
    )
    return bound.with_data(Blank(bound)), job
