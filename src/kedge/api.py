"""The Python interface: ``kedge.run`` by names, ``kedge.fit`` on one's own model and data."""

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
    """Run a method on a named dataset; every setting of ``kedge run --help`` is a keyword.

    ``config`` is a TOML file that ``method`` and the keywords override; without a ``method`` the
    file's is run, or FedAvg where it names none. ``out`` keeps the run in a folder, where
    ``resume=True`` goes on. ``watch(seed, record)`` is called after every round.
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
    """Run several methods on the same partitions, cohorts and first weights."""
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
    """Run all combinations of some settings: ``grid={"lr": [0.01, 0.1], "fedprox.mu": [0.1, 1]}``.

    A key is any setting of :func:`run`, or a field of a part in the method. Results come in the
    order of the product, the last key changing fastest; ``result.config`` says which is which.
    Without a ``method`` the one of ``config`` is run, or FedAvg where it names none.
    Combinations that differ in numbers train side by side. One whose loss is not finite ends
    alone; its metric is NaN from there on. ``out`` keeps every run in a folder of its own.
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
    """Train one's own model on one's own clients, each a pair of inputs and labels.

    Without a ``test`` set every client holds out a share of its data (``held_out``). Settings are
    those of :func:`run`; one seed is run unless ``seeds`` says otherwise. ``task`` is read off the
    labels: whole numbers are classes, rows of 0 and 1 are multi-label, the rest is regression.
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
    made = _task(task, y, module, x)
    whole = Partition(tuple(rows), "given", 0, len(x))
    device = resolve_device(config.device)

    def make(seed: int, how: Execution) -> Simulation:
        kept, held = whole, None
        if test is None:
            labels = y if made.one_class else np.zeros(len(y), np.int64)
            kept, held = holdout(whole, labels, held_out, seed)
        federation = Federation(
            x,
            y,
            kept.clients,
            made,
            test,
            held_out=held.clients if held else None,
            augment=config.augment,
            angles=config.angles,
            device=device,
        )
        federation.partition = whole
        return runner.assemble(config, federation, module, seed, how)

    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    return runner.run_seeds(config, make, device, folder, watch)


def load_model(folder: str | Path, seed: int | None = None) -> nn.Module:
    """The trained global model of a run folder (of its first seed if none is named)."""
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
    """The setting ``method`` in the method grammar; none if no method is given."""
    if method is None:
        return {}
    return {"method": method if isinstance(method, str) else repr(parse(method))}


def _joined(clients: Sequence[tuple[Any, Any]]) -> tuple[Any, Any, list[Any]]:
    """All clients' samples in one array, and the rows of each."""
    if not len(clients):
        raise DataError("there are no clients; give a list of (inputs, labels), one per client")
    xs: list[Any] = []
    ys: list[Any] = []
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
        if xs and a.shape[1:] != xs[0].shape[1:]:
            raise DataError(
                f"client {k} has inputs of shape {a.shape[1:]}, client 0 of {xs[0].shape[1:]}"
            )
        if np.issubdtype(a.dtype, np.floating) and not np.isfinite(a).all():
            bad = int(np.flatnonzero(~np.isfinite(a).reshape(len(a), -1).all(1))[0])
            raise DataError(f"client {k} has NaN or infinite inputs, first in row {bad}")
        xs.append(a)
        ys.append(b)
    ends = np.cumsum([len(a) for a in xs])
    rows = [np.arange(end - len(a), end) for a, end in zip(xs, ends, strict=True)]
    return np.concatenate(xs), np.concatenate(ys), rows


def _task(name: str, y: Any, module: Model, x: Any) -> Task:
    weights = module.weights()
    like = next(iter(weights.params.values()))
    sample = torch.as_tensor(x[:2]).to(like.dtype)
    try:
        outputs = int(torch.Size(module.shapes(weights, sample)["logits"]).numel())
    except (RuntimeError, ValueError) as error:
        raise DataError(f"the model cannot take inputs of shape {x.shape[1:]}: {error}") from None
    return make_task(guess_task(y) if name == "auto" else name, outputs)
