"""Diagnose the training of a federation: how local training takes the clients apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kedge.diagnostics.training.charts import charts, tables, values
from kedge.diagnostics.training.findings import findings
from kedge.diagnostics.training.measures import measure
from kedge.diagnostics.training.probe import Probe, probe
from kedge.diagnostics.training.results import Measures
from kedge.errors import FieldError
from kedge.history.sheet import Sheet
from kedge.sim.simulation import Simulation

NAME = "training"


def diagnose_training(what: Simulation | Probe | Iterable[Probe]) -> Sheet:
    """Measure the drift of local training at one or several rounds.

    Weight divergence by layer, variance of client gradients, cosines between updates, classifier
    bias, similarity of features, forgetting, generalisation and personalisation of local models,
    a t-SNE map and worst-case margins. What has no meaning for the task is left out, and a finding
    says so.

    Args:
        what: a simulation, whose present round is probed and which does not change; or probes of
            one run in the order of their rounds. An iterator is consumed one probe at a time, so
            the weights of one round at a time are in memory.

    Returns:
        A sheet: findings about the last round, the verdict first; tables, charts, and ``values``
        with the numbers of the last round and, under ``rounds``, of each.

    Raises:
        FieldError: there is no probe.
        NotFinite: the loss of a client is not finite.

    Example::

        sheet = diagnose_training(sim)
        print(sheet.findings[0])
    """
    begin = time.perf_counter()
    if isinstance(what, Simulation):
        what = probe(what)
    probes = [what] if isinstance(what, Probe) else what
    rounds = [measure(one) for one in probes]
    if not rounds:
        raise FieldError("there is no round to diagnose; give a simulation or a probe")
    last = rounds[-1]
    found = findings(rounds), tables(rounds), charts(rounds)
    numbers = values(last) | {"method": last.method, "rounds": [values(m) for m in rounds]}
    seconds = time.perf_counter() - begin
    several = "s" if len(rounds) > 1 else ""
    title = f"Training with {last.method} after round{several} "
    title += ", ".join(str(m.round) for m in rounds)
    return Sheet(NAME, title, *found, numbers, seconds, _cost(rounds, seconds))


def _cost(rounds: Sequence[Measures], seconds: float) -> str:
    probing = sum(m.probe_seconds for m in rounds)
    measuring = sum(m.seconds for m in rounds)
    points = f" at {len(rounds)} points of the run" if len(rounds) > 1 else ""
    return (
        f"{seconds:.1f} s: one more round of {rounds[-1].cohort} clients{points}, which is not "
        f"part of the run, {probing:.1f} s; measures {measuring:.1f} s; the rest are replays and "
        "t-SNE."
    )
