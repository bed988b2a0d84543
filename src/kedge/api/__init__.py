"""The Python interface: ``run`` takes names, ``fit`` your own model and data."""

from kedge.api.report import reproduce as reproduce
from kedge.api.report import write_report as write_report
from kedge.api.train import compare as compare
from kedge.api.train import fit as fit
from kedge.api.train import run as run
from kedge.api.train import sweep as sweep
from kedge.saved.run import Run as Run
from kedge.saved.run import load as load
