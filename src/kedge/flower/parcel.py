"""A message of kedge inside a message of Flower: one array of bytes, of a declared length.

Flower makes about two requests per array, so a message is one array whatever it holds. Neither the
declared type nor the declared shape of Flower's arrays are checked against their content. So here
they are compared before anything is read, and nothing is decoded by Flower or NumPy: the bytes are
taken as they are. This module needs flwr alone, neither torch nor the rest of kedge.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict

KEY, STYPE = "kedge", "kedge.bytes"


class NoParcel(Exception):
    """A message that does not hold one array of bytes of the declared length."""


def wrap(message: bytes) -> RecordDict:
    """A message as content for Flower."""
    array = Array(dtype="uint8", shape=(len(message),), stype=STYPE, data=message)
    return RecordDict({KEY: ArrayRecord({KEY: array})})


def unwrap(message: Message) -> bytes:
    """The bytes in a message of Flower.

    Raises:
        NoParcel: it holds something else.
    """
    content = message.content
    record = content.get(KEY)
    if len(content) != 1 or not isinstance(record, ArrayRecord) or list(record) != [KEY]:
        raise NoParcel("the message does not hold one array")
    array = record[KEY]
    if (array.dtype, array.stype) != ("uint8", STYPE):
        raise NoParcel("the array is not one of bytes")
    if tuple(array.shape) != (len(array.data),):
        raise NoParcel(f"the array has {len(array.data)} bytes and declares another number")
    return array.data
