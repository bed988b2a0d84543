"""Raw labels as they come from files: checks that name the file and the row."""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.errors import DataError

Array = np.ndarray[Any, Any]


def check_rows(wrong: Array, y: Array, where: str, what: str) -> None:
    """Raise a DataError for the first label that is wrong.

    >>> check_rows(np.array([False, True]), np.array([1, -2]), "y_train", "is negative")
    Traceback (most recent call last):
    kedge.errors.DataError: y_train, row 1: label -2 is negative
    """
    if wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(f"{where}, row {at[0]}: label {y[tuple(at)]} {what}")


def finite_float(x: Array, where: str) -> Array:
    """Convert to float32; a DataError for the first value that is not finite in float32."""
    with np.errstate(over="ignore"):
        small = x.astype(np.float32, copy=False)
    good = np.isfinite(small)
    if not good.all():
        at = np.argwhere(~good)[0]
        column = f", column {at[1]}" if x.ndim == 2 else ""
        raise DataError(
            f"{where}, row {at[0]}{column}: {x[tuple(at)]} is not a finite float32 number; "
            "fill it in or delete the row"
        )
    return small
