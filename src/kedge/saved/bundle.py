"""The bundle of a run: what a trained model needs to predict from raw inputs, elsewhere and later.

``bundle.json`` in the folder of a run holds task, classes, architecture, preprocessing and
provenance; the weights are safetensors files beside it. Nothing in a bundle is code, and none is
imported for it: reading one builds a model of the zoo, layers of ``torch.nn``, or a class that is
imported already.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kedge._version import __version__
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.task import Task, make_task
from kedge.core.task_custom import own_metrics, with_metric
from kedge.core.tree import Weights
from kedge.data.encoding import Encoding, encodings
from kedge.data.federation import Federation
from kedge.errors import DataError, KedgeError, UnknownName
from kedge.files import parse_json, read_file
from kedge.history.folder import BEST_MODEL, BEST_PERSONAL, MODEL, PERSONAL, RunFolder
from kedge.history.metric import MetricInfo
from kedge.history.read import Header, describe_parts, save_header
from kedge.loading import files
from kedge.saved.architecture import describe
from kedge.saved.tensors import open_tensors, safetensors_of
from kedge.settings import Config
from kedge.sim.simulation import Simulation

BUNDLE = "bundle.json"
#: Increase it with every change that an older kedge would misread.
FORMAT = 1
#: Numbers of one encoded input, at most.
MAX_INPUT = 2**30
#: The files of each choice: the global model, and the clients' own.
FILES = {"last": (MODEL, PERSONAL), "best": (BEST_MODEL, BEST_PERSONAL)}
PROBE_TOLERANCE = 1e-2  # relative; between devices and precisions outputs differ by less
PROBE_KEY, CLIENTS_KEY = "kedge.probe", "kedge.clients"


class Inputs(NamedTuple):
    """What a bundle keeps about the inputs of a run."""

    shape: tuple[int, ...]
    encoding: Encoding | None
    moments: tuple[Tensor, Tensor] | None
    classes: tuple[str, ...] | None
    whole: bool = False  # whether they are whole numbers, such as tokens
    fingerprint: str = ""

    @classmethod
    def of(cls, federation: Federation) -> Inputs:
        whole = not federation.prepare(federation.x[:1]).is_floating_point()
        return cls(
            federation.input_shape, federation.encoding, federation.moments, federation.classes,
            whole, federation.fingerprint,
        )  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """All about a trained model but its weights, as plain data.

    Attributes:
        task: name of the task.
        outputs: width of the model's last layer.
        classes: names of the classes or labels, or None.
        shape: shape of one encoded input.
        encoding: how raw inputs become arrays.
        mean, std: moments per channel or column, or None.
        model: the architecture, see :mod:`kedge.saved.architecture`.
        batchnorm, precision: as in training.
        method: the method that trained it.
        loaded: path and sha256 of the files that were loaded with ``--load``.
        provenance: settings, fingerprint of the data, versions and date.
    """

    task: str
    outputs: int
    classes: tuple[str, ...] | None
    shape: tuple[int, ...]
    encoding: Encoding
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    model: Mapping[str, Any]
    batchnorm: str
    precision: str
    method: str
    loaded: tuple[Mapping[str, str], ...]
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, inputs: Inputs, task: Task, model: Model) -> Bundle | None:
        """The bundle of a run; None if nothing says how its inputs are encoded."""
        if inputs.encoding is None:
            return None
        mean, std = inputs.moments or (None, None)
        return cls(
            task=task.name,
            outputs=task.outputs,
            classes=inputs.classes,
            shape=inputs.shape,
            encoding=inputs.encoding,
            mean=None if mean is None else tuple(mean.tolist()),
            std=None if std is None else tuple(std.tolist()),
            model=describe(model.template),
            batchnorm=model.batchnorm,
            precision=model.precision,
            method=config.method,
            loaded=tuple({"path": str(f.path), "sha256": f.sha256} for f in files.values()),
            provenance={
                "config": asdict(config),
                "data": config.data,
                "fingerprint": inputs.fingerprint,
                "versions": {
                    "kedge": __version__,
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
                "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            },
        )

    def make_task(self) -> Task:
        """The task; with the metric of the run if that is one's own and registered here.

        Raises:
            KedgeError: it is registered by a file that is not loaded here.
        """
        metric = str(self.provenance["config"].get("metric"))
        try:
            task = make_task(self.task, self.outputs)
            return with_metric(task, metric) if metric in own_metrics else task
        except KedgeError as error:
            raise self.explained(error) from None

    def explained(self, error: KedgeError) -> KedgeError:
        """The error, with the files to load if the run was started with some."""
        missing = [f["path"] for f in self.loaded if Path(f["path"]) not in files]
        if not missing:
            return error
        options = " ".join(f"--load {file}" for file in missing)
        calls = "; ".join(f"kedge.loading.load_file({file!r})" for file in missing)
        return KedgeError(f"{error}\nThis run was started with {options}. In Python: {calls}")

    def to_json(self) -> str:
        """The bundle as JSON."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__}
        values["encoding"] = {"kind": self.encoding.kind} | self.encoding.to_dict()
        return json.dumps({"format": FORMAT} | values, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: object) -> Bundle:
        """Parse a bundle.

        Raises:
            DataError: it is damaged, of another program, or of a newer format.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise DataError(f"{where} is damaged ({error}); copy it again") from None
        if not isinstance(values, dict) or not isinstance(values.get("format"), int):
            raise DataError(f"{where} is not a bundle of kedge")
        found = values.pop("format")
        if not 1 <= found <= FORMAT:
            raise DataError(
                f"{where} has format {found}; kedge {__version__} reads formats up to {FORMAT}. "
                "Install the kedge that wrote it, or a newer one"
            )
        try:
            encoding = dict(values.pop("encoding"))
            kind = encoding.pop("kind")
            for key in ("classes", "mean", "std", "loaded", "shape"):
                values[key] = None if values[key] is None else tuple(values[key])
            found = cls(encoding=encodings[kind].from_dict(encoding), **values)
            found._check()
            return found
        except UnknownName as error:
            raise DataError(f"{where}: {error}; a newer kedge wrote it") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{where} is damaged ({error!r}); copy it again") from None

    def _check(self) -> None:
        """Raise a ValueError, a KeyError or a TypeError if a value is none of its type."""
        texts = [self.task, self.batchnorm, self.precision, self.method, self.provenance["data"]]
        texts += [self.provenance["date"], self.provenance["versions"]["kedge"]]
        texts += [*(self.classes or ()), *(f[k] for f in self.loaded for k in ("path", "sha256"))]
        seeds, rounds = (self.provenance["config"][key] for key in ("seeds", "rounds"))
        whole = [self.outputs, rounds, *self.shape, *getattr(self.encoding, "shape", ()), *seeds]
        moments = [*(self.mean or ()), *(self.std or ())]
        if (
            not all(isinstance(value, str) for value in texts)
            or not all(type(value) is int and value >= 0 for value in whole)
            or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in moments)
            or not isinstance(self.model, dict)
            or len(self.classes or "") not in (0, self.outputs)
            or np.dtype(getattr(self.encoding, "dtype", "float32")).kind not in "uifb"
            or not (seeds and self.outputs and 0 < math.prod(self.shape) <= MAX_INPUT)
        ):
            raise ValueError("a value is of another type, or out of range")


# -- writing ----------------------------------------------------------------------------------


def save_bundle(
    folder: RunFolder, config: Config, inputs: Inputs, task: Task, model: Model
) -> None:
    """Write the header and the bundle of a run, unless they are there with the same settings."""
    save_header(folder, _header(config, task))
    path = folder.path / BUNDLE
    if path.exists() and read_bundle(folder.path).provenance["config"] == _plain(config):
        return
    bundle = Bundle.of(config, inputs, task, model)
    if bundle is not None:
        folder.write(BUNDLE, bundle.to_json().encode())


def _header(config: Config, task: Task) -> Header:
    method = parse(config.method)
    metrics = tuple(map(MetricInfo.of, task.metrics))
    return Header(task.name, task.metric, method.personal_model, metrics, describe_parts(method))


def _plain(config: Config) -> Any:
    return json.loads(json.dumps(asdict(config)))


def save_weights(
    folder: RunFolder, seed: int, module: nn.Module, inputs: Inputs, name: str = MODEL
) -> None:
    """Write the weights of a global model, with its outputs on a probe."""
    outputs = probe(module, inputs.shape, inputs.whole)
    metadata = {} if outputs is None else {PROBE_KEY: json.dumps(outputs)}
    state = {n: v.detach() for n, v in module.state_dict().items()}
    folder.write(f"seed-{seed}/{name}", safetensors_of(state, metadata))


def personal_state(stacked: Weights, sim: Simulation) -> dict[str, Tensor]:
    """The stacked personal weights that are saved: without buffers that a module does not save."""
    kept, every = sim.bound.model.template.state_dict(), stacked.params | stacked.buffers
    return {name: every[name] for name in kept if name in every}


def save_personal(
    folder: RunFolder,
    seed: int,
    state: dict[str, Tensor],
    sim: Simulation,
    name: str = PERSONAL,
) -> None:
    """Write the personal weights of all clients, stacked, with the names of the clients."""
    metadata = {CLIENTS_KEY: json.dumps(list(sim.federation.client_names))}
    folder.write(f"seed-{seed}/{name}", safetensors_of(state, metadata))


def probe(module: nn.Module, shape: tuple[int, ...], whole: bool) -> dict[str, Any] | None:
    """Outputs of a module for two inputs, which tell whether it is built again as it was.

    Args:
        module: the network.
        shape: shape of one input.
        whole: whether its inputs are whole numbers, such as tokens.

    Returns:
        ``whole`` and the outputs; None if the module does not take such inputs.
    """
    x = torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape)
    x = torch.zeros(2, *shape, dtype=torch.int64) if whole else x
    like = next(module.parameters(), x)
    try:
        with torch.no_grad():
            out = module.eval()(x.to(like.device))
        values: list[float] = out.detach().double().flatten().cpu().tolist()
    except KedgeError:
        raise
    except Exception:  # noqa: BLE001  a user's module may raise anything; then there is no probe
        return None
    return {"whole": whole, "outputs": values} if bool(np.isfinite(values).all()) else None


def differs(module: nn.Module, shape: tuple[int, ...], expected: str) -> bool:
    """Whether a module has other outputs on a probe than the one that was saved."""
    saved = parse_json(expected)
    found = probe(module, shape, bool(saved["whole"]))
    other = np.array(saved["outputs"], np.float64)
    if found is None or other.shape != (len(found["outputs"]),):
        return True
    one = np.array(found["outputs"])
    return bool(np.abs(one - other).max() > PROBE_TOLERANCE * (1 + np.abs(other).max()))


# -- reading ----------------------------------------------------------------------------------


def read_bundle(path: Path) -> Bundle:
    """Read the bundle in the folder of a run.

    Raises:
        KedgeError: there is none.
        DataError: it cannot be read.
    """
    file = path / BUNDLE
    try:
        content = read_file(file)
    except FileNotFoundError:
        raise KedgeError(
            f"{path} has no {BUNDLE}: an older kedge made this run, or it ended before its first "
            f"round. Write it with: kedge run --out {path} --resume"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    return Bundle.from_json(content, file)


def read_weights(path: Path, client: int | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of weights; of one client if they are stacked.

    Raises:
        DataError: the file is damaged.
    """
    with open_tensors(path, "copy it again") as file:
        names, metadata = list(file.keys()), dict(file.metadata() or {})
        if client is None:
            return {name: file.get_tensor(name) for name in names}, metadata
        rows = {name: file.get_slice(name)[client : client + 1] for name in names}
        return {name: row[0].clone() for name, row in rows.items()}, metadata


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of weights; a DataError if it is damaged."""
    with open_tensors(path, "copy it again") as file:
        return dict(file.metadata() or {})
