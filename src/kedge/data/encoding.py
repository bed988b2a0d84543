"""How raw inputs become arrays: the same columns, words, sizes and types for new data as for the
data that a model was trained on.

A reader fits an encoding on the training data and returns it with the samples. It is saved with the
model, so that a prediction takes raw inputs. An encoding is a frozen dataclass, registered by its
``kind``. Scaling to zero mean and unit variance is not part of it: see :attr:`Dataset.mean`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kedge.registry import Registry

Array = np.ndarray

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

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without ``kind``."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """The encoding that :meth:`to_dict` wrote."""
