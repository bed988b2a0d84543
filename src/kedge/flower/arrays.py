"""A message of kedge inside a message of Flower: arrays of bytes, of declared lengths.

Flower makes about two requests per array, so a message is one array whatever it holds, or a few
where it is large: Flower puts an array together in memory, and holds three copies of it then. A
piece that several messages share is one array, which Flower's SuperLink stores once. Neither the
declared type nor the declared shape of Flower's arrays are checked against their content. So here
they are compared before anything is read, and nothing is decoded by Flower or NumPy: the bytes are
taken as they are. This module needs flwr alone, neither torch nor the rest of kedge.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, Message, RecordDict

KEY, STYPE = "kedge", "kedge.bytes"
MAX_PIECES = 1000  # of one message
MARGIN_S = 60.0  # that the SuperLink keeps a message after its deadline


class NoParcel(Exception):
    """A message that does not hold one array of bytes of the declared length."""


def as_array(piece: bytes) -> Array:
    """A piece of a message as an array of Flower."""
    return Array(dtype="uint8", shape=(len(piece),), stype=STYPE, data=piece)


def wrap(pieces: Sequence[bytes | Array]) -> RecordDict:
    """The pieces of a message as content for Flower."""
    arrays = (piece if isinstance(piece, Array) else as_array(piece) for piece in pieces)
    record = {f"{number:03d}": array for number, array in enumerate(arrays)}
    return RecordDict({KEY: ArrayRecord(record)})


def unwrap(message: Message) -> list[bytes]:
    """The pieces in a message of Flower.

    Raises:
        NoParcel: it holds something else.
    """
    content = message.content
    record = content.get(KEY)
    if len(content) != 1 or not isinstance(record, ArrayRecord) or len(record) > MAX_PIECES:
        raise NoParcel("the message does not hold the pieces of a message")
    if list(record) != [f"{number:03d}" for number in range(len(record))]:
        raise NoParcel("the pieces of the message have other names")
    for array in record.values():
        if (array.dtype, array.stype) != ("uint8", STYPE):
            raise NoParcel("an array is not one of bytes")
        if tuple(array.shape) != (len(array.data),):
            raise NoParcel(f"an array has {len(array.data)} bytes and declares another number")
    return [array.data for array in record.values()]
