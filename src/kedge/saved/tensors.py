"""Write tensors as a safetensors file, one array at a time, and open such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kedge.errors import DataError, KedgeError
from kedge.files import open_file
from kedge.limits import is_out_of_memory, out_of_memory

_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def safetensors_of(
    arrays: dict[str, torch.Tensor], metadata: dict[str, str]
) -> Iterator[bytes | memoryview]:
    """Serialise array by array, since client state may be larger than the free memory."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, value in arrays.items():
        start, end = end, end + value.numel() * value.element_size()
        dtype = _SAFETENSORS_DTYPES[value.dtype]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in arrays.values():
        flat = value.detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data


@contextmanager
def open_tensors(path: Path, advice: str) -> Iterator[Any]:
    """Open a safetensors file, whose header is checked against the size of the file.

    Raises:
        DataError: it is damaged, or not what the block asks for; the message ends with ``advice``.
        OutOfMemory: it does not fit into memory.
    """
    try:
        open_file(path).close()  # safe_open would wait for the writer of a pipe
        with safe_open(path, "pt") as file:
            yield file
    except KedgeError:
        raise
    except Exception as error:  # noqa: BLE001  safetensors and torch have many types
        if is_out_of_memory(error):
            raise out_of_memory(error, f"reading {path}") from None
        raise DataError(f"{path} is damaged ({error}); {advice}") from None
