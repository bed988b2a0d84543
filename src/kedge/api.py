"""The Python interface: ``kedge.run`` takes names, ``kedge.fit`` your own model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.task import Task, guess_task, make_task
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.data.partition import Partition, holdout
from kedge.engines import Execution
from kedge.errors import DataError, FieldError, KedgeError
from kedge.models import build
from kedge.runs import runner
from kedge.runs import sweep as sweeps
from kedge.runs.config import load_config, resolve_device
from kedge.runs.folder import MODEL, Folder
from kedge.runs.grid import combine
from kedge.runs.result import Result
from kedge.sim.simulation import Simulation


def run(
    method: str | Method | Part | None = None,
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: runner.Watch | None = None,
    **settings: Any,
) -> Result:
    """Train with a method on a named dataset, once per seed.

    Args:
        method: a sum of parts, as text or as objects; None takes the one of ``config``, or FedAvg.
        config: a TOML file with settings; ``method`` and ``settings`` override it.
        out: folder for the run; None saves nothing.
        resume: continue the run in ``out``.
        watch: called as ``watch(seed, record)`` after every round.
        **settings: any setting of ``kedge run --help``, e.g. ``rounds=100``.

    Returns:
        The records, summary and trained models of all seeds.

    Raises:
        KedgeError: a setting is unknown or wrong, or does not fit the data, the device or ``out``.

    >>> import kedge
    >>> result = kedge.run("scaffold+fedprox(mu=0.01)", data="digits", rounds=2, seeds=[0, 1])
    >>> result.metric, result.array().shape  # [seeds, tested rounds]
    ('accuracy', (2, 2))
    """
    settings |= _method_setting(method)
    return runner.run(load_config(config, flags=settings), out, resume, watch)


def compare(
    methods: Sequence[str | Method | Part],
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> list[Result]:
    """Run several methods on the same partitions, cohorts and initial weights.

    Args:
        methods: the methods, each as in :func:`run`.
        config: a TOML file with settings; ``settings`` override it.
        out: folder with one subfolder per method; None saves nothing.
        resume: continue the runs in ``out``.
        **settings: any setting of ``kedge run --help`` but ``method``.

    Returns:
        One result per method, in the order of ``methods``.

    Raises:
        FieldError: there is no method.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0])
    >>> [result.config.method for result in results]
    ['fedavg', 'scaffold']
    """
    texts = [m if isinstance(m, str) else repr(m) for m in methods]
    if not texts:
        raise FieldError("there is nothing to compare; name at least one method")
    configs = [load_config(config, flags=settings | {"method": text}) for text in texts]
    return runner.compare(texts, configs, out, resume)


def sweep(
    method: str | Method | Part | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: sweeps.Watch | None = None,
    **settings: Any,
) -> list[Result]:
    """Run all combinations of some settings.

    Combinations that differ only in numbers train together. If a loss is not finite, only that
    combination ends, with NaN as its metric from there on.

    Args:
        method: as in :func:`run`.
        grid: the values of each key: a setting, or a field of a part such as ``"fedprox.mu"``.
        config: a TOML file with the other settings.
        out: folder with one subfolder per combination; None saves nothing.
        resume: continue the sweep in ``out``.
        watch: called as ``watch(config, seed, record, name)`` after every round.
        **settings: any other setting of ``kedge run --help``.

    Returns:
        One result per combination; the last key of ``grid`` changes fastest. ``result.config``
        holds its settings.

    Raises:
        FieldError: the grid is empty, or a key has no value or the same value twice.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> results = kedge.sweep("fedprox", {"fedprox.mu": [0.1, 1.0]}, rounds=2, seeds=[0])
    >>> [result.config.method for result in results]
    ['fedprox(mu=0.1)', 'fedprox(mu=1.0)']
    """
    settings |= _method_setting(method)
    return sweeps.sweep(combine(grid or {}, config, settings), out, resume, watch).results


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
    settings |= _method_setting(method)
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
        return runner.assemble(config, federation, module, seed, execution)

    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    return runner.run_seeds(config, make, device, folder, watch)


def load_model(folder: str | Path, seed: int | None = None) -> nn.Module:
    """Load the trained global model of a run.

    Args:
        folder: the folder of a run by name (``kedge run``, :func:`run`).
        seed: one of its seeds; None takes the first one.

    Returns:
        The module in evaluation mode, on the CPU.

    Raises:
        KedgeError: the folder holds no run, or one by :func:`fit`, whose model kedge cannot build.
        DataError: the run of this seed is not complete.

    >>> import kedge, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = kedge.run("fedavg", rounds=1, seeds=[0], out=folder)
    >>> kedge.load_model(folder)(torch.zeros(1, 64)).shape
    torch.Size([1, 10])
    """
    _, config = Folder.resume(folder, None)
    seed = config.seeds[0] if seed is None else seed
    path = Path(folder) / f"seed-{seed}" / MODEL
    if config.data == "own":
        raise KedgeError(f"the model of {folder} is your own; load {path} into it with safetensors")
    if not path.is_file():
        raise DataError(f"there is no {path}; the run of seed {seed} is not complete")
    dataset = load(config.data)
    text = runner.auto_model(dataset) if config.model == "auto" else config.model
    module = build(text, dataset.shape, dataset.outputs)
    module.load_state_dict(load_file(path))
    return module.eval()


def _method_setting(method: str | Method | Part | None) -> dict[str, str]:
    """The setting ``method`` as text; empty if no method is given."""
    if method is None:
        return {}
    return {"method": method if isinstance(method, str) else repr(parse(method))}


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
