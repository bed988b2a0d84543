"""A trained model that takes raw inputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.task import Task
from kedge.data.encoding import Array, Samples, moments_like, normalise, to_unit
from kedge.engines.device import precise
from kedge.errors import DataError, KedgeError, ModelError
from kedge.files import encoded
from kedge.limits import is_out_of_memory
from kedge.saved.bundle import Bundle

ROWS = 1024  # samples per pass, as in the tests of a run
MAX_TYPICAL = 50.0  # standard deviations from the mean; inputs beyond are of another scale


class Predictor:
    """A trained model with all that makes its inputs from raw ones.

    Raw inputs are what the run was trained on: an array, tensor or list ``[n, ...]``, a DataFrame
    or dictionary of columns, image files or PIL images, or the path of a file or folder of those.

    Attributes:
        module: the network in evaluation mode; it takes inputs that are encoded and normalised.
        task: the task.
        bundle: all about the model but its weights.
    """

    def __init__(self, bundle: Bundle, module: nn.Module, device: str | torch.device = "cpu"):
        self.bundle, self.device = bundle, torch.device(device)
        self.module = module.to(self.device).eval()
        self.task: Task = bundle.make_task()

    def __repr__(self) -> str:
        inputs = "x".join(map(str, self.bundle.shape))
        outputs = f"{self.bundle.outputs} {self.task.outputs_are}"
        return f"<Predictor {inputs} -> {outputs}, {self.bundle.task}>"

    @property
    def classes(self) -> Array | None:
        """What :meth:`predict` returns for each class: names, or numbers where names are numbers.

        None where the outputs are not classes or labels.
        """
        if not self.task.has_classes:
            return None
        names = self.bundle.classes or tuple(map(str, range(self.bundle.outputs)))
        are_numbers = all(str(int(n)) == n for n in names if n.lstrip("-").isdecimal())
        if are_numbers and all(n.lstrip("-").isdecimal() for n in names):
            return np.array([int(n) for n in names])
        return np.array(names)

    def to(self, device: str | torch.device) -> Predictor:
        """The same model on another device."""
        return Predictor(self.bundle, copy.deepcopy(self.module), device)

    # -- predictions --------------------------------------------------------------------------

    def predict(self, raw: Any) -> Array:
        """Predict classes, labels or numbers for raw inputs.

        Returns:
            The class of each sample ``[n]``, by name where classes have names; 0 or 1 for each
            label ``[n, labels]``; or numbers, ``[n]`` for one target, else ``[n, targets]``.

        Raises:
            DataError: the inputs are not like those of the training.
        """
        return self.decide(self.logits(self.encode(raw).x))

    def predict_proba(self, raw: Any) -> Array:
        """Predict the probability of each class or label for raw inputs, ``[n, classes]``.

        Raises:
            DataError: the inputs are not like those of the training.
            KedgeError: the task has no classes.
        """
        if not self.task.has_classes:
            raise KedgeError(f"the task {self.task.name} has no probabilities; use predict")
        return self.values(self.logits(self.encode(raw).x))

    __call__ = predict

    def frame(self, raw: Any) -> Any:
        """Predictions as a pandas DataFrame: id, prediction, probabilities ``p_CLASS``."""
        return self.frame_of(self.encode(raw))

    def frame_of(self, samples: Samples) -> Any:
        """As :meth:`frame`, for encoded samples."""
        import pandas  # importing it takes a moment

        logits = self.logits(samples.x)
        predicted = self.decide(logits)
        columns: dict[str, Any] = {"id": list(map(_writable, samples.ids))}
        names = self.bundle.classes or tuple(map(str, range(self.bundle.outputs)))
        names = tuple(map(_writable, names))
        if predicted.ndim == 1:
            is_text = predicted.dtype.kind in "OU"
            columns["prediction"] = list(map(_writable, predicted)) if is_text else predicted
        else:
            columns |= {name: predicted[:, i] for i, name in enumerate(names)}
        if self.task.has_classes:
            probs = self.values(logits)
            columns |= {f"p_{name}": probs[:, i] for i, name in enumerate(names)}
        return pandas.DataFrame(columns)

    # -- steps --------------------------------------------------------------------------------

    def encode(self, raw: Any) -> Samples:
        """Encode raw inputs; see :class:`kedge.data.encoding.Encoding`."""
        samples = self.bundle.encoding.encode(raw)
        if tuple(samples.x.shape[1:]) != self.bundle.shape:
            found, wanted = list(samples.x.shape[1:]), list(self.bundle.shape)
            raise DataError(f"inputs of shape {found}, but the model takes {wanted}")
        return samples

    def prepare(self, x: Array) -> Tensor:
        """Encoded inputs in the form that the network sees: scaled and normalised."""
        inputs = torch.as_tensor(x if x.flags.writeable else x.copy()).to(self.device)
        prepared = normalise(to_unit(inputs, torch.float32), self._moments)
        if self._moments is not None and float(prepared.abs().mean()) > MAX_TYPICAL:
            warnings.warn(
                "the inputs are far from the training data (on average "
                f"{float(prepared.abs().mean()):.0f} standard deviations); are they scaled alike?",
                stacklevel=4,
            )
        return prepared

    def logits(self, x: Array) -> Tensor:
        """Outputs of the network for encoded inputs, ``[n, outputs]``, on the CPU."""
        return torch.cat([self.outputs(self.prepare(piece)) for piece in _pieces(x)])

    def outputs(self, prepared: Tensor) -> Tensor:
        """Outputs of the network for inputs that are prepared, ``[n, outputs]``, on the CPU."""
        with torch.no_grad(), precise(self.bundle.precision, self.device):
            return self._pass(prepared)

    def values(self, logits: Tensor) -> Array:
        """Probabilities of classes or labels, or predicted numbers, ``[n, outputs]``."""
        values: Array = self.task.probs(logits.reshape(len(logits), -1)).numpy()
        return values

    def decide(self, logits: Tensor) -> Array:
        """Classes ``[n]``, labels ``[n, labels]`` or numbers, as :meth:`predict` returns them."""
        if self.task.one_class:
            classes = self.classes
            assert classes is not None
            return np.asarray(classes[logits.argmax(-1).numpy()])
        values = self.values(logits)
        if self.task.has_classes:
            return (values > 0.5).astype(np.int64)
        return values[:, 0] if values.shape[1] == 1 else values

    def _pass(self, x: Tensor) -> Tensor:
        try:
            return self._model.forward(self._weights, x, "eval").logits.float().cpu()
        except IndexError as error:
            raise DataError(f"an input is a number that the model does not know: {error}") from None
        except ValueError as error:
            if self.bundle.batchnorm != "batch":
                raise
            raise DataError(
                f"this model normalises by the batch at hand (batchnorm = batch): {error}"
            ) from None
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"the model takes no inputs of shape {tuple(x.shape)} ({error}); it is not as it "
                "was trained"
            ) from None

    @cached_property
    def _model(self) -> Model:
        return Model(self.module, None, self.bundle.batchnorm, self.bundle.precision)

    @cached_property
    def _weights(self) -> Any:
        return self._model.weights()

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor] | None:
        mean, std = self.bundle.mean, self.bundle.std
        if mean is None or std is None:
            return None
        return moments_like((mean, std), self.bundle.shape, torch.float32, self.device)


def _writable(cell: Any) -> Any:
    """A cell of a table; pandas takes no half of a character, as a stranger's class may have."""
    return encoded(cell).decode() if isinstance(cell, str) else cell


def _pieces(x: Array) -> Iterator[Array]:
    for start in range(0, len(x), ROWS):
        yield x[start : start + ROWS]
