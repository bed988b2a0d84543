"""How a round is computed: engines, and what makes them fast.

Importing this package registers the engines. A new one is a file with one class, named here.
"""

from kedge.engines import loop, reference, vector
from kedge.engines.engine import Engine, engines, make_engine
from kedge.engines.execution import Execution

__all__ = ["Engine", "Execution", "engines", "make_engine"]

del loop, reference, vector
