"""Named arrays as one message: a safetensors file with a checksum, written and read by array.

A message may be as large as the model, so nothing is copied twice: writing gathers views of the
arrays, reading fills new arrays from bytes or from a file. The header has one entry ``kedge`` in
its metadata: eight digits of a checksum (CRC-32) over all the rest, then the notes as JSON.
"""

from __future__ import annotations

import io
import json
import math
import sys
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kedge.errors import WireError

#: A message: bytes, or a file that contains nothing else.
Message: TypeAlias = bytes | IO[bytes]

MAX_HEADER_BYTES = 1 << 26  # bounds names, dtypes and shapes; the size of arrays is not bounded
MAX_AXES = 64  # of an array
BLOCK = 1 << 20  # bytes that are read at a time
DIGITS = 8  # of the checksum
MARK = b'"kedge":"'  # after it stands the checksum
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Leaf(NamedTuple):
    """Expected dtype and shape of an array."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayEntry(NamedTuple):
    """What a header says of an array; None and -1 stand for what cannot be."""

    leaf: Leaf | None
    start: int
    end: int


class MessageHeader(NamedTuple):
    """What stands before the arrays.

    Attributes:
        notes: short texts.
        entries: dtype, shape and place of each array, as they were written.
        start: where the arrays begin.
        size: bytes of all arrays.
    """

    notes: dict[str, str]
    entries: dict[str, ArrayEntry]
    start: int
    size: int


def write(arrays: dict[str, Tensor], notes: dict[str, str], most: int) -> list[bytes]:
    """A message in pieces; equal arrays and notes give equal bytes.

    Args:
        arrays: by name.
        notes: short texts.
        most: bytes of one piece.
    """
    views = {name: bytes_of(arrays[name]) for name in sorted(arrays)}
    entries, end = dict[str, object](), 0
    for name, view in views.items():
        start, end = end, end + len(view)
        value = arrays[name]
        entries[name] = {
            "dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(notes, sort_keys=True)
    header = {"__metadata__": {"kedge": "0" * DIGITS + text}} | entries
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    checksum = zlib.crc32(head)
    for view in views.values():
        checksum = zlib.crc32(view, checksum)
    at = _place(head)
    head = head[:at] + _digits(checksum) + head[at + DIGITS :]
    return list(_cut([memoryview(head), *views.values()], most))


def bytes_of(array: Tensor) -> memoryview:
    """The numbers of an array as they are in memory."""
    flat = array.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def _cut(views: list[memoryview], most: int) -> Iterator[bytes]:
    """The content of views, in pieces."""
    piece: list[memoryview] = []
    space = most
    for view in views:
        while len(view):
            piece.append(view[:space])
            view, space = view[space:], space - len(piece[-1])
            if not space:
                yield b"".join(piece)
                piece, space = [], most
    if piece:
        yield b"".join(piece)


def checksum_of(message: bytes) -> str:
    """The checksum that stands in a message, or in its first piece; empty if there is none."""
    at = _place(message)
    return message[at : at + DIGITS].decode(errors="replace") if at >= len(MARK) else ""


def sealed(message: bytes) -> bytes:
    """A message with its checksum, in place of what stands there."""
    at = _place(message)
    return message[:at] + _checksum(io.BytesIO(message), 0, at) + message[at + DIGITS :]


# -- reading ------------------------------------------------------------------------------------


def opened(message: Message) -> IO[bytes]:
    """A message as a file; bytes are not copied."""
    return io.BytesIO(message) if isinstance(message, bytes) else message


def read_json(text: str) -> Any:
    """JSON of a stranger; a ValueError or RecursionError for what is none, for a key that stands
    twice, and for NaN and infinity."""
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refused)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number")


def header_of(file: IO[bytes], at: int = 0) -> MessageHeader:
    """The header of the message that begins at ``at`` and ends with the file.

    Raises:
        WireError: there is none.
    """
    end = file.seek(0, io.SEEK_END)
    file.seek(at)
    size = int.from_bytes(file.read(8), "little")
    if end - at < 8 or size > min(MAX_HEADER_BYTES, end - at - 8):
        raise WireError("this is not a message: its header does not fit into it")
    try:
        header = read_json(file.read(size).decode())
        metadata = header.pop("__metadata__")
        notes = read_json(metadata.pop("kedge")[DIGITS:])
        entries = {name: _entry(dict(values)) for name, values in header.items()}
        if metadata or not all(type(value) is str for value in notes.values()):
            raise ValueError("metadata that are not kedge's")
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise WireError("this is not a message: its header cannot be read") from None
    return MessageHeader(notes, entries, at + 8 + size, end - at - 8 - size)


def _entry(values: dict[str, object]) -> ArrayEntry:
    dtype, shape = DTYPES.get(str(values.get("dtype"))), values.get("shape")
    places = values.get("data_offsets")
    if not isinstance(places, list) or len(places) != 2 or any(type(n) is not int for n in places):
        places = [-1, -1]
    valid = isinstance(shape, list) and len(shape) <= MAX_AXES
    sizes = tuple(shape) if isinstance(shape, list) and valid else ()
    valid = valid and all(type(n) is int and 0 <= n <= sys.maxsize for n in sizes)
    valid = valid and math.prod(n or 1 for n in sizes) <= sys.maxsize >> 4
    return ArrayEntry(Leaf(dtype, sizes) if valid and dtype is not None else None, *places)


def is_whole(file: IO[bytes], header: MessageHeader, at: int = 0) -> bool:
    """Whether the checksum of a message is right."""
    file.seek(at)
    place = _place(file.read(header.start - at))
    file.seek(at + place)
    return place >= len(MARK) and file.read(DIGITS) == _checksum(file, at, at + place)


def read_array(file: IO[bytes], at: int, leaf: Leaf) -> Tensor:
    """The array at a place of a file, in memory of its own, aligned as torch's: some kernels round
    by alignment.

    Raises:
        WireError: the file is too short, or has a truth value that is neither 0 nor 1.
    """
    array = torch.empty(leaf.shape, dtype=leaf.dtype)
    raw = array.view(-1).view(torch.uint8)
    file.seek(at)
    target, done = raw.numpy().data, 0
    while done < len(target):
        count = file.readinto(target[done : done + BLOCK])  # type: ignore[attr-defined]
        if not count:
            raise WireError("the message is too short")
        done += count
    if leaf.dtype is torch.bool and len(raw) and int(raw.max()) > 1:
        raise WireError("the message has a truth value that is neither 0 nor 1")
    return array


def _place(head: bytes) -> int:
    """Where the checksum stands."""
    return head.find(MARK) + len(MARK)


def _checksum(file: IO[bytes], at: int, place: int) -> bytes:
    """The digits that belong at a place of the message that begins at ``at``."""
    file.seek(at)
    found = zlib.crc32(b"0" * DIGITS, zlib.crc32(file.read(place - at)))
    file.seek(place + DIGITS)
    while block := file.read(BLOCK):
        found = zlib.crc32(block, found)
    return _digits(found)


def _digits(checksum: int) -> bytes:
    return f"{checksum:0{DIGITS}x}".encode()
