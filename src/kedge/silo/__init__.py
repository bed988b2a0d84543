"""One member of a federation: its data, its state, its answers."""

from kedge.silo.conform import conform, schema_of
from kedge.silo.silo import Silo, bind

__all__ = ["Silo", "bind", "conform", "schema_of"]
