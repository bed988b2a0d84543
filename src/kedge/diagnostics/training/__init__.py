"""How local training takes the clients apart: a probe of a round, and measures of it."""

from kedge.diagnostics.training.sheet import diagnose_training as diagnose_training
