"""From raw inputs to what a model sees, the same for new data as for the training data.

A reader fits an encoding on the training data and returns it with the samples. It is saved with the
model, so that a prediction takes raw inputs: the same columns, words, sizes and types. An encoding
is a frozen dataclass, registered by its ``kind``. What happens to encoded inputs then, 8-bit values
to 0..1 and moments to zero and one (:attr:`Dataset.mean`), is the same for training batches, test
batches and predictions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.core.labels import finite_float
from kedge.errors import DataError, KedgeError
from kedge.registry import Registry
from kedge.schema import read_fields

Array = np.ndarray
Moments = tuple[Tensor, Tensor]  # mean and standard deviation, shaped like one input or broadcast

encodings: Registry[type[Encoding]] = Registry("encoding", module="kedge.data.encodings")


class Samples(NamedTuple):
    """Encoded samples."""

    x: Array  # [n, ...], as Dataset.x_train
    ids: tuple[str, ...]  # n names for tables of predictions: file names, an id column, or numbers
    labels: Array | None = None  # raw labels [n] or [n, outputs]: class names, numbers; or None


class Encoding(ABC):
    """Raw inputs to arrays."""

    kind: ClassVar[str]

    @abstractmethod
    def encode(self, raw: Any) -> Samples:
        """Encode raw inputs: a path, an array, a DataFrame, a list of image files, ...

        Raises:
            DataError: the inputs do not fit the encoding; the message names file and row.
        """

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without ``kind``."""
        values: Any = self
        return dataclasses.asdict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """The encoding that :meth:`to_dict` wrote; a ValueError for anything else."""
        try:
            return read_fields(cls, values, "encoding", complete=True)
        except KedgeError as error:
            raise ValueError(str(error)) from None


# -- arrays of new data ----------------------------------------------------------------------------


def to_numpy(raw: Any, where: str) -> Array:
    """An array, tensor, list or DataFrame of numbers as an array.

    Raises:
        DataError: it does not consist of numbers of one shape.
    """
    if hasattr(raw, "detach"):
        raw = raw.detach().cpu()
    try:
        array = np.asarray(raw)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not numbers of one shape ({error})") from None
    if array.dtype == object:
        with contextlib.suppress(TypeError, ValueError):
            array = array.astype(np.float64)
    if array.dtype.kind not in "uifb":
        raise DataError(f"{where}: values of type {array.dtype}; the model takes numbers")
    return array


def conform(
    array: Array, shape: tuple[int, ...], dtype: str, where: str, from_files: bool = True
) -> Array:
    """An array with the shape and type of the training data.

    Samples of shape ``[C, ...]`` may also have their channels last, or none if C is 1. A single
    sample may come without the axis of samples.

    Args:
        array: raw inputs ``[n, ...]``.
        shape: shape of one training sample, channels first.
        dtype: type of the training samples, such as ``uint8`` or ``float32``.
        where: its place, for messages.
        from_files: whether the training data were read from files, where whole numbers are pixels
            and 16-bit ones are divided by 65535.

    Returns:
        The inputs, ``[n, *shape]`` in ``dtype``.

    Raises:
        DataError: shape, type or values do not fit.

    >>> conform(np.zeros((2, 8, 8), np.uint8), (1, 8, 8), "uint8", "x").shape
    (2, 1, 8, 8)
    """
    if array.size == 0:
        raise DataError(f"{where}: no values (shape {list(array.shape)})")
    shaped = _shaped(array, shape, where)
    if from_files and len(shape) > 2 and dtype == "float32" and array.dtype == np.uint16:
        return np.divide(shaped, np.float32(65535), dtype=np.float32)  # as kedge.data.datasets does
    if np.dtype(dtype).kind in "ui":
        if array.dtype.kind == "f":
            finite_float(shaped, where)
        return _whole(shaped, dtype, where)
    if len(shape) > 2 and (array.dtype == np.uint8 or (from_files and array.dtype.kind in "uib")):
        raise DataError(
            f"{where} has 8-bit values, but the model was trained on numbers of type {dtype}; "
            "convert them as the training data were, for instance x.astype('float32') / 255"
        )
    return finite_float(shaped, where)


def _shaped(array: Array, shape: tuple[int, ...], where: str) -> Array:
    forms: list[tuple[tuple[int, ...], bool]] = [(shape, False)]  # (shape of a sample, is last)
    if len(shape) > 1:
        forms += [((*shape[1:], shape[0]), True)]
        forms += [(shape[1:], False)] if shape[0] == 1 else []
    for batched in (array, array[None]):  # a single sample comes without the axis of samples
        for form, is_last in forms:
            if batched.shape[1:] == form:
                moved = np.moveaxis(batched, -1, 1) if is_last else batched
                return np.ascontiguousarray(moved.reshape(len(batched), *shape))
    expected = " or ".join(str(["n", *form]).replace("'", "") for form, _ in forms)
    raise DataError(f"{where} has shape {list(array.shape)}; the model takes {expected}")


def _whole(array: Array, dtype: str, where: str) -> Array:
    """Whole numbers of a type; those of another type are converted if their values fit."""
    if array.dtype == dtype:
        return array
    info = np.iinfo(dtype)
    if array.dtype.kind == "b":
        return array.astype(dtype) * (255 if dtype == "uint8" else 1)
    low, high = array.min(), array.max()
    whole = array.dtype.kind != "f" or bool((array == np.round(array)).all())
    # floats from 0 to 1 are 8-bit images that are scaled already, even if all are 0 or 1
    scaled = dtype == "uint8" and array.dtype.kind == "f" and high <= 1
    if whole and not scaled and info.min <= low and high <= info.max:
        return array.astype(dtype)
    found = f"{where} has values of type {array.dtype} from {low:g} to {high:g}"
    if dtype == "uint8":
        advice = "; write (255 * x).round().astype('uint8')" if low >= 0 and scaled else ""
        raise DataError(f"{found}, but the model takes 8-bit values from 0 to 255{advice}")
    raise DataError(f"{found}, but the model takes whole numbers ({dtype})")


# -- encoded inputs --------------------------------------------------------------------------------


def moments_like(
    moments: tuple[Any, Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Moments:
    """Mean and standard deviation per channel or column, for inputs of a shape without batch."""
    broadcast = (-1, *(1,) * (len(shape) - 1))
    mean, std = (torch.as_tensor(m, dtype=dtype, device=device) for m in moments)
    return mean.reshape(broadcast), std.reshape(broadcast)


def to_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit values as numbers from 0 to 1; others unchanged."""
    return x.to(dtype) / 255 if x.dtype == torch.uint8 else x


def normalise(x: Tensor, moments: Moments | None) -> Tensor:
    """Zero mean and unit variance per channel or column; unchanged without moments."""
    if moments is None:
        return x
    mean, std = moments
    return (x - mean) / std
