"""Serialise trees to messages and back, with a version and checks.

A message is one safetensors file: named arrays and a small header, no pickle and no code. The
receiver compares it with a *template*, a tree of the same structure whose leaves are dtypes and
shapes. It checks version, kind, names, dtypes, shapes, lengths and a checksum before it allocates
an array. The checksum detects damage, not forgery.
:func:`reply_template` derives the template of a client's reply from a dry run on blank samples.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound, Server
from kedge.core.client import Reply
from kedge.core.part import Mean, Part, Stack, Sum
from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.view import Info, Job, SweepPieces
from kedge.errors import WireError
from kedge.session.session import Answer, Down

VERSION = "1"
MAX_HEADER_BYTES = 1 << 26  # bounds names, dtypes and shapes; the size of arrays is not bounded
CHECKSUM_MARK, CHECKSUM_DIGITS = b'"kedge":"', 8  # it stands at the start of kedge's own entry
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


#: Named tuples that a message may contain.
TYPES: dict[str, Any] = {t.__name__: t for t in (Weights, Sum, Mean, Stack, Reply, Answer, Down)}


class Leaf(NamedTuple):
    """Expected dtype and shape of an array."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    arrays = _apart({n: leaf.detach().cpu().contiguous() for n, leaf in _named(value).items()})
    head = json.dumps({"version": VERSION, "kind": kind, **notes}, sort_keys=True)
    # one entry, so that equal trees are equal bytes
    return sealed(save(arrays, {"kedge": "0" * CHECKSUM_DIGITS + head}))


def _apart(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arrays of which no two share memory, which safetensors rejects."""
    seen: set[int] = set()
    for name, array in arrays.items():
        place = array.untyped_storage().data_ptr()
        arrays[name] = array.clone() if place in seen else array
        seen.add(place)
    return arrays


def unpack(message: bytes, kind: str, template: Tree = None) -> Tree:
    """The tree of a message.

    Args:
        message: what :func:`pack` returned.
        kind: the expected kind.
        template: dtypes and shapes that the arrays must have. Without one the tree has the
            structure that the message describes: a client trusts its server.

    Raises:
        WireError: the message is malformed, of another kind, or does not match the template.
    """
    check(message, kind, template)
    try:
        arrays = load(message)
    except (SafetensorError, RuntimeError, ValueError, OverflowError) as error:
        raise WireError(f"the arrays of the {kind} cannot be read: {error}") from None
    for name, array in arrays.items():
        arrays[name] = array.clone()  # aligned as torch's own: some kernels round by alignment
    return _structured(arrays) if template is None else _filled(template, arrays)


def sealed(message: bytes) -> bytes:
    """A message with its checksum, in place of the zeros that stand there."""
    at, digits = _checksum(message)
    return b"".join((message[:at], digits, memoryview(message)[at + CHECKSUM_DIGITS :]))


def notes_of(message: bytes) -> dict[str, str]:
    """The notes of a message, its kind and version among them."""
    return _header(message)[0]


def check(message: bytes, kind: str, template: Tree = None) -> None:
    """Raise a WireError unless a message is of this kind and matches the template; no array is
    allocated. Without a template only lengths are checked, against the shapes in the header."""
    notes, entries, data_bytes = _header(message)
    if notes.get("version") != VERSION:
        raise WireError(
            f"the message has version {notes.get('version')!r}, this kedge reads {VERSION!r}; "
            "use the same release on both sides"
        )
    if notes.get("kind") != kind:
        raise WireError(f"expected a message of kind {kind!r}, found {notes.get('kind')!r}")
    wanted = (
        {name: _leaf(e) for name, e in entries.items()} if template is None else _named(template)
    )
    strange = sorted(entries.keys() ^ wanted.keys())
    if strange:
        what = "lacks" if strange[0] in wanted else "holds an unknown array"
        raise WireError(f"the {kind} {what} {strange[0]!r}")
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: _offsets(item[1])):
        leaf, actual = wanted[name], _leaf(entry)
        if leaf is None or actual != leaf:
            raise WireError(f"the {kind}'s array {name!r} is {actual}, expected {leaf}")
        if _offsets(entry) != (end, end + leaf.nbytes):
            raise WireError(f"the {kind}'s array {name!r} does not have the length of its shape")
        end += leaf.nbytes
    if end != data_bytes:
        raise WireError(f"the {kind} holds {data_bytes} bytes of arrays, its header says {end}")
    at, digits = _checksum(message)
    if message[at : at + CHECKSUM_DIGITS] != digits:
        raise WireError(f"the {kind} is damaged: its checksum is wrong. Send it again")


def _checksum(message: bytes) -> tuple[int, bytes]:
    """Where the checksum of a message stands, and the digits that belong there."""
    at = message.find(CHECKSUM_MARK) + len(CHECKSUM_MARK)
    before = zlib.crc32(b"0" * CHECKSUM_DIGITS, zlib.crc32(message[:at]))
    after = zlib.crc32(memoryview(message)[at + CHECKSUM_DIGITS :], before)
    return at, f"{after:0{CHECKSUM_DIGITS}x}".encode()


def _header(message: bytes) -> tuple[dict[str, str], dict[str, Any], int]:
    """Notes, entries of the arrays, and the number of bytes of all arrays."""
    size = int.from_bytes(message[:8], "little")
    if len(message) < 8 or size > min(MAX_HEADER_BYTES, len(message) - 8):
        raise WireError("this is not a message: its header does not fit into it")
    try:
        header = json.loads(message[8 : 8 + size])
        notes = json.loads(header.pop("__metadata__")["kedge"][CHECKSUM_DIGITS:])
        entries = {str(name): dict(entry) for name, entry in header.items()}
        return {str(k): str(v) for k, v in notes.items()}, entries, len(message) - 8 - size
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise WireError("this is not a message: its header cannot be read") from None


def _leaf(entry: dict[str, Any]) -> Leaf | None:
    shape, dtype = entry.get("shape"), DTYPES.get(str(entry.get("dtype")))
    valid = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return Leaf(dtype, tuple(shape or ())) if valid and dtype is not None else None


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    valid = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)
    return (offsets[0], offsets[1]) if valid and offsets else (-1, -1)


def _named(value: Tree, prefix: str = "") -> dict[str, Any]:
    """Every leaf under its path: keys of dicts, and ``Type:field`` for named tuples."""
    if isinstance(value, Leaf) or not isinstance(value, (dict, tuple)):
        return {prefix: value}
    pairs = value
    if isinstance(value, tuple):
        kind = type(value).__name__
        pairs = {f"{kind}:{k}": v for k, v in value._asdict().items()}  # type: ignore[attr-defined]
    named: dict[str, Any] = {}
    for key, item in pairs.items():  # type: ignore[union-attr]
        named |= _named(item, _path(prefix, key, isinstance(value, tuple)))
    return named


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
    root: dict[str, Any] = {}
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


def reply_template(bound: Bound, server: Server, batch: int) -> Reply:
    """The template of a reply in the phases of ``bound``, from a dry run of one step on a batch of
    ``batch`` samples. The client's state is not part of it."""
    dry, job = _dry_run(bound, server)
    index = torch.zeros(batch, dtype=torch.int64, device=bound.spec.device)
    reply = client.end(dry, job, client.step(dry, job, client.begin(dry, job), index))
    return template_of(without_state(reply))


def survey_template(bound: Bound, server: Server, part: Part) -> Tree:
    """The template of an answer to a part's survey."""
    return template_of(client.survey(*_dry_run(bound, server), part))


def without_state(reply: Reply) -> Reply:
    """A reply without the client's next state, which never leaves the client."""
    return reply._replace(client={})


def _dry_run(bound: Bound, server: Server) -> tuple[Bound, Job]:
    spec = bound.spec
    one = torch.ones((), dtype=spec.dtype, device=spec.device)
    zero = torch.zeros((), dtype=torch.int64, device=spec.device)
    rows = torch.zeros((1, 2), dtype=torch.int64, device=spec.device)
    job = Job(
        anchor=server.weights,
        sent=bound.sent(server),
        client=bound.client(),
        info=Info(zero, zero, *[one] * (len(Info._fields) - 2)),
        key=spec.key,
        counts=torch.ones(bound.task.outputs, dtype=spec.dtype, device=spec.device),
        sweep=SweepPieces(rows, torch.ones_like(rows, dtype=spec.dtype)),
    )
    return bound.with_data(Blank(bound)), job
