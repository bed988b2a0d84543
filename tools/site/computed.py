"""What is computed about a method when the site is built: identities, uploads and traffic.

Results are kept in a file for each method and are taken from it as long as the source of kedge and
of the part is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench.conformance import own_rows

import kedge
import kedge.check  # registers the oracles
from kedge.check.oracles import oracles_of
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.task import make_task
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.diagnostics.privacy.shares import share_round
from kedge.models import build
from kedge.sim.simulation import Simulation

#: Packages around the runs: what is computed here does not depend on them.
OUTER = frozenset(("api", "board", "cli", "flower", "loggers", "report", "reproduction", "runs"))
BYTES = 4  # of a number in float32
SHAPE, CLASSES, CLIENTS, BATCH = (3, 32, 32), 10, 20, 32
LARGE = "resnet18"  # of the table of costs
SMALL, SMALL_BN = "fedcog_cnn", "fedcog_cnn(norm=bn)"  # of the uploads


def computed(name: str, cache_folder: Path | None = None) -> dict[str, Any]:
    """All that is computed about ``fedavg`` or a part, as plain data.

    Args:
        name: the part's name.
        cache_folder: where results are kept; None: nowhere.
    """
    method = parse(name)
    part = method.parts[0] if method.parts else None
    own = "" if part is None else inspect.getsource(type(part))

    def make() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                "identities": identities(name),
                "uploads": uploads(name, part),
                "traffic": traffic(part),
            }

    return kept(cache_folder, name, own, make, without=OUTER)


def kept(
    folder: Path | None,
    name: str,
    own: str,
    make: Callable[[], Any],
    without: frozenset[str] = frozenset(),
) -> Any:
    """A result that is taken from a file, or made and written to it.

    Args:
        folder: where results are kept; None: nowhere.
        name: the name of the file.
        own: what the result depends on besides the source of kedge.
        make: gives the result, as plain data.
        without: packages of kedge on which the result does not depend.
    """
    key = hashlib.sha256(f"{_source_hash(without)}{own}".encode()).hexdigest()
    file = folder / f"{name}.json" if folder else None
    if file and file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["result"]
    result = make()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "result": result}, indent=1), encoding="utf-8")
    return result


@cache
def _source_hash(without: frozenset[str]) -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    digest.update(Path(__file__).read_bytes())
    root = Path(kedge.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in without:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def identities(name: str) -> list[dict[str, Any]]:
    """Every claim of every oracle, in the order in which ``kedge check`` prints them."""
    method = parse(name)
    part = method.parts[0] if method.parts else None
    functions = {oracle: claims.func for oracle, claims in oracles_of(part)}  # type: ignore[attr-defined]
    rows = []
    for row in own_rows([name]):
        oracle, _, what = row.oracle.partition(": ")
        function = functions.get(oracle)
        doc = (inspect.getdoc(function) or "").split("\n\n")[0] if function else ""
        rows.append(
            {"oracle": oracle, "what": what, "doc": " ".join(doc.split())}
            | {key: getattr(row, key) for key in ("expected", "got", "ok", "note", "objective")}
        )
    return rows


@cache
def _model(text: str) -> Model:
    torch.manual_seed(0)
    return Model(build(text, SHAPE, CLASSES))


@cache
def _federation(task: str) -> Federation:
    """Random images: only sizes matter."""
    generator = torch.Generator().manual_seed(0)
    total = CLIENTS * BATCH
    x = torch.rand((total, *SHAPE), generator=generator)
    y = torch.randint(CLASSES, (total,), generator=generator)
    clients = list(torch.arange(total).split(BATCH))
    labels = y if task == "classification" else torch.nn.functional.one_hot(y, CLASSES).float()
    return Federation(x, labels, clients, make_task(task, CLASSES))


def _simulation(method: str | Part, part: Part | None, model: str) -> Simulation:
    return Simulation(
        _federation(part.tasks[0] if part else "classification"),
        _model(model),
        method,
        optim=SGD(lr=0.01),
        work=LocalWork(batch=BATCH, steps=1),
        engine="loop",
    )


def uploads(name: str, part: Part | None) -> dict[str, Any]:
    """What one client sends to the server, measured on a small model: each message, its size, when,
    and what of it the server sees."""
    model = SMALL_BN if part and part.needs_batchnorm else SMALL
    sim = _simulation(_quick(part) if part else name, part, model)
    for one in sim.bound.parts_with("survey"):
        if one.surveys() != "last":  # what is sent does not depend on it
            sim.survey(one, None)
    shares = share_round(sim, 0).shares
    fields = ("part", "name", "shape", "numbers", "when", "seen")
    rows = [{f: getattr(s, f) for f in fields} for s in shares if s.way == "up"]
    return {"model": model, "rows": rows}


def _quick(part: Part) -> Part:
    """The part with its quick setting where that does not change what is sent."""
    quick = dataclasses.replace(part, **part.tiny)
    if part.has("survey") or any(field in part.uploads for field in part.tiny):
        return part
    return quick


@cache
def _fedavg() -> dict[str, int]:
    """Numbers that FedAvg sends on the large model: parameters and buffers."""
    spec = _simulation("fedavg", None, LARGE).bound.spec
    return {"P": tree.numel(spec.params), "B": tree.numel(spec.buffers)}


def traffic(part: Part | None) -> dict[str, Any]:
    """Numbers per client and round on a large model: FedAvg's, and the part's beyond them."""
    extra = {"sends": 0, "uploads": 0, "keeps": 0}
    if part is not None:
        bound = _simulation(part, part, LARGE).bound
        part, sizes = bound.part(part.name), bound.spec.symbols(part)
        extra = {field: part.count(getattr(part, field), sizes) for field in extra}
    return {"model": LARGE, **_fedavg(), **extra}
