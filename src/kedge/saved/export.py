"""Export a trained model as a program that other software runs: ONNX, or PyTorch's ``.pt2``.

The program contains the scaling: it takes arrays as they are encoded (8-bit pixels, the columns of
a table) and returns probabilities or numbers. ``FILE.json`` beside it describes inputs, outputs and
the encoding.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge._version import __version__
from kedge.core.task import Task
from kedge.data.encoding import moments_like, normalise, to_unit
from kedge.errors import KedgeError, ModelError
from kedge.files import write_target
from kedge.saved.predictor import Predictor

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
INPUT, OUTPUT = "x", "output"


class Program(nn.Module):
    """Scaling, network and probabilities in one module."""

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        bundle = predictor.bundle
        self.network, self.task = predictor.module, predictor.task
        self.scales = bundle.mean is not None
        mean, std = moments_like(
            (bundle.mean or (0.0,), bundle.std or (1.0,)),
            bundle.shape, torch.float32, predictor.device,
        )  # fmt: skip
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Encoded inputs ``[n, ...]`` to probabilities or numbers ``[n, outputs]``."""
        x = to_unit(x, torch.float32)
        logits = self.network(normalise(x, (self.mean, self.std)) if self.scales else x)
        return _probs(self.task, logits)


def _probs(task: Task, logits: Tensor) -> Tensor:
    return task.probs(logits.reshape(logits.shape[0], -1))


def export(predictor: Predictor, kind: str, path: Path) -> Path:
    """Write a model as a program, and a description of it as JSON.

    Args:
        predictor: the model.
        kind: ``onnx`` or ``torch``.
        path: the file to write.

    Returns:
        The path of the description.

    Raises:
        KedgeError: a package is missing, or the file cannot be written.
        ModelError: the model cannot be exported.
    """
    if kind not in SUFFIXES:
        raise KedgeError(f"{kind!r} is not a form of export; there are: {', '.join(SUFFIXES)}")
    if predictor.bundle.batchnorm == "batch":
        raise ModelError(
            "this model normalises by the batch at hand (batchnorm = batch), so its answer for a "
            "sample depends on the others; train with batchnorm = average to export it"
        )
    predictor = predictor.to("cpu")
    program = Program(predictor).eval().requires_grad_(False)
    description = describe(predictor)
    x = torch.as_tensor(np.zeros((2, *predictor.bundle.shape), description["input"]["dtype"]))
    with _quiet():
        if kind == "onnx":
            _export_onnx(program, x, path, description)
        else:
            _export_torch(program, x, path)
    sidecar = path.with_name(f"{path.name}.json")
    write_target(sidecar, json.dumps(description, indent=1).encode())
    return sidecar


def describe(predictor: Predictor) -> dict[str, Any]:
    """Inputs, outputs and encoding of an exported program, as plain data."""
    bundle, encoding = predictor.bundle, predictor.bundle.encoding
    encoded = encoding.to_dict()
    columns = getattr(encoding, "names", None) or encoded.get("columns") or None
    return {
        "kedge": __version__,
        "task": bundle.task,
        "input": {
            "name": INPUT,
            "dtype": encoded.get("dtype", "float32"),
            "shape": ["n", *bundle.shape],
            **({"columns": list(columns)} if columns else {}),
        },
        "output": {
            "name": OUTPUT,
            "shape": ["n", bundle.outputs],
            "holds": "probabilities" if predictor.task.has_classes else "numbers",
            "classes": list(bundle.classes) if bundle.classes else None,
        },
        "encoding": {"kind": encoding.kind} | encoded,
        "scaling": "inside the program: 8-bit values / 255, then (x - mean) / std",
        "method": bundle.method,
        "fingerprint": bundle.provenance.get("fingerprint"),
    }


def _export_torch(program: Program, x: Tensor, path: Path) -> None:
    exported = _traced(program, x)
    written = io.BytesIO()  # torch ends the process if its own file cannot be written
    torch.export.save(exported, written)
    write_target(path, written.getvalue())


def _export_onnx(program: Program, x: Tensor, path: Path, description: dict[str, Any]) -> None:
    missing = [name for name in ("onnx", "onnxscript") if not _is_installed(name)]
    if missing:
        raise KedgeError(f"ONNX needs the package {missing[0]}: pip install 'kedge[onnx]'")
    exported = _traced(program, x)
    try:
        onnx = torch.onnx.export(
            exported, (), dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False
        )
    except Exception as error:
        raise ModelError(f"the model cannot be written as ONNX: {_first_line(error)}") from error
    assert onnx is not None
    onnx.model.metadata_props["kedge"] = json.dumps(description)
    try:
        content = onnx.model_proto.SerializeToString()
    except ValueError:
        raise ModelError(
            "a file of ONNX holds 2 GB at most, and the model is larger; export it with --to torch"
        ) from None
    write_target(path, content)


def _traced(program: Program, x: Tensor) -> Any:
    """The program as a graph for any number of samples."""
    try:
        with torch.no_grad():
            return torch.export.export(
                program, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=1)}}
            )
    except Exception as error:
        raise ModelError(
            f"the model cannot be exported ({_first_line(error)}); write its forward without "
            "branches on values and for any number of samples"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch reports its progress and its own deprecations on the screen; errors are raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
