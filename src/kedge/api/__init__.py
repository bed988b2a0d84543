"""The Python interface: ``run`` takes names, ``fit`` your own model and data."""

from kedge.api.fitting import fit as fit
from kedge.api.reporting import write_report as write_report
from kedge.api.reproducing import reproduce as reproduce
from kedge.api.training import compare as compare
from kedge.api.training import run as run
from kedge.api.training import sweep as sweep
from kedge.saved.run import Run as Run
from kedge.saved.run import load as load
