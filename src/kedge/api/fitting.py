"""``fit``: train your own model on your own clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kedge.api.training import method_setting
from kedge.core.method import Method
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.task import Task, guess_task, make_task
from kedge.data.encodings import ArrayEncoding
from kedge.data.federation import Federation
from kedge.data.partition import Partition, holdout
from kedge.engines import Execution
from kedge.engines.device import resolve_device
from kedge.errors import DataError
from kedge.runs import runner
from kedge.runs.folder import Folder
from kedge.runs.reading import load_config
from kedge.runs.result import Result
from kedge.sim.simulation import Simulation


def fit(
    model: nn.Module | Model,
    clients: Sequence[tuple[Any, Any]],
    method: str | Method | Part = "fedavg",
    test: tuple[Any, Any] | None = None,
    *,
    task: str = "auto",
    held_out: float = 0.2,
    out: str | Path | None = None,
    resume: bool = False,
    watch: runner.Watch | None = None,
    **settings: Any,
) -> Result:
    """Train your own model on your own clients.

    Args:
        model: a module that maps inputs ``[batch, ...]`` to outputs ``[batch, outputs]``.
        clients: a pair ``(inputs, labels)`` of arrays or tensors per client, ``[n_k, ...]`` and
            ``[n_k]`` or ``[n_k, labels]``.
        method: as in :func:`run`.
        test: inputs and labels of the test set; None tests on held-out samples of each client.
        task: ``classification``, ``multilabel``, ``regression`` or a registered task. ``auto``
            infers it from the labels: integers are classes, rows of 0 and 1 are multi-label, other
            numbers are targets of a regression.
        held_out: share of each client's samples to test on if there is no ``test``.
        out, resume, watch: as in :func:`run`.
        **settings: as in :func:`run`; ``seeds`` is ``(0,)`` by default.

    Returns:
        The result; ``result.models[0]`` is the trained global model of the first seed.

    Raises:
        DataError: the samples of a client are missing, malformed or not finite, or the model cannot
            take them.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> x, y = torch.randn(40, 8), torch.randint(0, 2, (40,))
    >>> result = kedge.fit(nn.Linear(8, 2), [(x[:20], y[:20]), (x[20:], y[20:])], rounds=2)
    >>> result.models[0]
    Linear(in_features=8, out_features=2, bias=True)
    """
    settings = {"seeds": (0,)} | settings
    settings |= method_setting(method)
    config = load_config(flags=settings | {"data": "own", "clients": len(clients)})
    x, y, rows = _joined(clients)
    module = (
        model
        if isinstance(model, Model)
        else Model(model, batchnorm=config.batchnorm, precision=config.precision)
    )
    learning_task = _task(task, y, module, x)
    whole = Partition(tuple(rows), "given", 0, len(x))
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        training, testing = whole, None
        if test is None:
            labels = y if learning_task.one_class else np.zeros(len(y), np.int64)
            training, testing = holdout(whole, labels, held_out, seed)
        federation = Federation(
            x,
            y,
            training.clients,
            learning_task,
            test,
            held_out=testing.clients if testing else None,
            augment=config.augment,
            angles=config.angles,
            device=device,
        )
        federation.partition = whole
        stored = str(federation.x.dtype).removeprefix("torch.")
        federation.encoding = ArrayEncoding(federation.input_shape, stored, from_files=False)
        return runner.assemble(config, federation, module, seed, execution)

    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    return runner.run_seeds(config, make, device, folder, watch)


def _joined(clients: Sequence[tuple[Any, Any]]) -> tuple[Any, Any, list[Any]]:
    """The samples of all clients in one array, and the rows of each client."""
    if not len(clients):
        raise DataError("there are no clients; give a list of (inputs, labels), one per client")
    inputs: list[Any] = []
    labels: list[Any] = []
    for k, pair in enumerate(clients):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(f"client {k} is not a pair of inputs and labels")
        a, b = (np.asarray(v.detach().cpu() if isinstance(v, torch.Tensor) else v) for v in pair)
        if len(a) != len(b):
            raise DataError(f"client {k} has {len(a)} inputs but {len(b)} labels")
        if len(a) == 0:
            raise DataError(f"client {k} has no samples; leave it out")
        if a.dtype == object or b.dtype == object:
            raise DataError(f"client {k} holds objects; give numbers of one shape")
        if inputs and a.shape[1:] != inputs[0].shape[1:]:
            raise DataError(
                f"client {k} has inputs of shape {a.shape[1:]}, client 0 of {inputs[0].shape[1:]}"
            )
        if np.issubdtype(a.dtype, np.floating) and not np.isfinite(a).all():
            bad = int(np.flatnonzero(~np.isfinite(a).reshape(len(a), -1).all(1))[0])
            raise DataError(f"client {k} has NaN or infinite inputs, first in row {bad}")
        inputs.append(a)
        labels.append(b)
    ends = np.cumsum([len(a) for a in inputs])
    rows = [np.arange(end - len(a), end) for a, end in zip(inputs, ends, strict=True)]
    return np.concatenate(inputs), np.concatenate(labels), rows


def _task(name: str, y: Any, module: Model, x: Any) -> Task:
    """The task with this name, with as many outputs as the model has for these inputs."""
    weights = module.weights()
    like = next(iter(weights.params.values()))
    sample = torch.as_tensor(x[:2]).to(like.dtype)
    try:
        outputs = int(torch.Size(module.shapes(weights, sample)["logits"]).numel())
    except (RuntimeError, ValueError) as error:
        raise DataError(f"the model cannot take inputs of shape {x.shape[1:]}: {error}") from None
    return make_task(guess_task(y) if name == "auto" else name, outputs)
