"""How local training takes the clients apart: a probe of a round, and measures of it."""

from kedge.diagnostics.training.diagnosis import diagnose_training as diagnose_training
