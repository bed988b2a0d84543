"""One member of a federation: its data, its state, its answers."""

from kedge.silo.conform import conform, schema_of
from kedge.silo.silo import Silo, bind, collect, pack_down

__all__ = ["Silo", "bind", "collect", "conform", "pack_down", "schema_of"]
