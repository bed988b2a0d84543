"""kedge: federated learning on heterogeneous data.

A method is a sum of parts; each part implements one paper. ``kedge.run("scaffold+fedprox(mu=0.01)",
data="digits")`` runs a method on a named dataset, ``kedge.fit(model, clients)`` on your own model
and data.

Public names are imported on first use, so that ``import kedge`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge._version import __version__ as __version__

if TYPE_CHECKING:
    from kedge.api.diagnose import diagnose as diagnose
    from kedge.api.report import reproduce as reproduce
    from kedge.api.report import write_report as write_report
    from kedge.api.train import Results as Results
    from kedge.api.train import compare as compare
    from kedge.api.train import fit as fit
    from kedge.api.train import run as run
    from kedge.api.train import sweep as sweep
    from kedge.check import Claim as Claim
    from kedge.check import check_part as check_part
    from kedge.check import oracle as oracle
    from kedge.core.method import Method as Method
    from kedge.core.method import parse as parse
    from kedge.core.model import Model as Model
    from kedge.core.optim import SGD as SGD
    from kedge.core.optim import Adam as Adam
    from kedge.core.part import Mean as Mean
    from kedge.core.part import Out as Out
    from kedge.core.part import Part as Part
    from kedge.core.part import Stack as Stack
    from kedge.core.part import Sum as Sum
    from kedge.core.part import register as register
    from kedge.core.round import Round as Round
    from kedge.core.task import Batch as Batch
    from kedge.core.task import Classification as Classification
    from kedge.core.task import MultiLabel as MultiLabel
    from kedge.core.task import Regression as Regression
    from kedge.core.task_custom import register_metric as register_metric
    from kedge.core.tree import Weights as Weights
    from kedge.core.view import Spec as Spec
    from kedge.core.view import View as View
    from kedge.core.work import LocalWork as LocalWork
    from kedge.data.federation import Federation as Federation
    from kedge.errors import KedgeError as KedgeError
    from kedge.runs.result import Result as Result
    from kedge.saved.run import Run as Run
    from kedge.saved.run import load as load
    from kedge.sim.simulation import Simulation as Simulation
else:
    from importlib import import_module as _import_module

    _PUBLIC = {
        "api.diagnose": ("diagnose",),
        "api.report": ("reproduce", "write_report"),
        "api.train": ("Results", "compare", "fit", "run", "sweep"),
        "check": ("Claim", "check_part", "oracle"),
        "core.method": ("Method", "parse"),
        "core.model": ("Model",),
        "core.optim": ("SGD", "Adam"),
        "core.part": ("Mean", "Out", "Part", "Stack", "Sum", "register"),
        "core.task": ("Batch", "Classification", "MultiLabel", "Regression"),
        "core.task_custom": ("register_metric",),
        "core.tree": ("Weights",),
        "core.round": ("Round",),
        "core.view": ("Spec", "View"),
        "core.work": ("LocalWork",),
        "data.federation": ("Federation",),
        "errors": ("KedgeError",),
        "runs.result": ("Result",),
        "saved.run": ("Run", "load"),
        "sim.simulation": ("Simulation",),
    }
    _MODULES = {name: f"kedge.{module}" for module, names in _PUBLIC.items() for name in names}
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        """Import a public name, or a module such as ``kedge.models``, on first use."""
        if name in _MODULES:
            value = getattr(_import_module(_MODULES[name]), name)
            globals()[name] = value
            return value
        if name == "load_model":
            raise AttributeError("kedge.load_model is gone; write kedge.load(FOLDER).model.module")
        if not name.startswith("_"):
            try:
                return _import_module(f"kedge.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"kedge.{name}":
                    raise
        raise AttributeError(f"module 'kedge' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
