"""kedge: federated learning on heterogeneous data.

A method is a sum of parts, each one paper; ``parse("scaffold+fedprox(mu=0.01)")`` reads one, and
``Simulation`` runs it on a :class:`Federation`, one client at a time or all clients at once.
"""

from kedge import parts as _parts  # registers the built-in parts
from kedge.check import Claim, check_part, oracle
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.optim import SGD, Adam
from kedge.core.part import Mean, Out, Part, Stack, Sum, register
from kedge.core.task import Batch, Classification, MultiLabel, Regression
from kedge.core.tree import Weights
from kedge.core.view import Round, Spec, View
from kedge.errors import KedgeError
from kedge.sim.federation import Federation, LocalWork
from kedge.sim.simulation import Simulation

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "Batch",
    "Claim",
    "Classification",
    "Federation",
    "KedgeError",
    "LocalWork",
    "Mean",
    "Method",
    "Model",
    "MultiLabel",
    "Out",
    "Part",
    "Regression",
    "Round",
    "Simulation",
    "Spec",
    "Stack",
    "Sum",
    "View",
    "Weights",
    "check_part",
    "oracle",
    "parse",
    "register",
]

del _parts
