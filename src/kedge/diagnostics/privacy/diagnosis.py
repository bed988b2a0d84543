"""Diagnose privacy: what a method shares, and what an attacker can make of it.

The attacks are plain ones. What they reconstruct is leaked; what they do not may still be leaked to
a better attacker.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.core import rng
from kedge.diagnostics.privacy import copies
from kedge.diagnostics.privacy.attack import (
    SIZES,
    attack_upload,
    attackers,
    classes_of,
    evaluate,
    guesses,
    study,
)
from kedge.diagnostics.privacy.attack_sheet import study_piece, upload_piece
from kedge.diagnostics.privacy.generated import generated, makes_samples
from kedge.diagnostics.privacy.inversion import Features
from kedge.diagnostics.privacy.pictures import Pixels
from kedge.diagnostics.privacy.piece import Piece, join
from kedge.diagnostics.privacy.shares import EVERY, Shared, declared, share_round
from kedge.diagnostics.privacy.uploads import (
    FEATURES,
    Statistics,
    client_rows,
    feature_map,
    statistics,
)
from kedge.diagnostics.privacy.words import GRADIENT_INVERSION, number, sentences, verdict
from kedge.errors import FieldError, UnknownName
from kedge.history.sheet import Cell, Sheet, Table
from kedge.sim.simulation import Simulation

STUDIED = 1000  # samples of the client that are studied at most
PASSES = 6  # forward passes that a step costs: two attackers, each with a gradient
Report = Callable[[str], None]


def diagnose_privacy(
    sim: Simulation,
    *,
    seed: int = 0,
    report: Report | None = None,
    client: int | str | None = None,
    attack: bool | None = None,
    cut: str | None = None,
    targets: int = 16,
    steps: int = 200,
    samples: int = 64,
    rows: int = 5000,
    shown: int = 8,
) -> Sheet:
    """Say what a method shares in the present round, and attack it.

    The simulation does not change. One client is trained for the round, so that what it sends is
    measured.

    Args:
        sim: the simulation, in any round.
        seed: seed of what is drawn for the diagnosis.
        report: called with a line before each piece of work.
        client: the client, by its number or its name; None: the largest of the round's cohort.
        attack: whether to invert features; None: if the method makes clients upload class means of
            features (FedImpro, FedProto, FedTR, CCVR).
        cut: where features are inverted if no part says so; None: before the head.
        targets: samples to reconstruct from raw features.
        steps: steps of an attack.
        samples: generated samples to compare with training samples.
        rows: training samples to compare with in features; inputs are compared with all.
        shown: rows of pictures.

    Raises:
        FieldError: there is no such client, or a number is below 1.
        UnknownName: the model has no such cut.

    Example::

        sheet = diagnose_privacy(sim)
        print(sheet.findings[0])
    """
    start = time.perf_counter()
    say = report or (lambda line: None)
    effort = _Effort(targets, steps, samples, rows, shown)
    chosen, client = client, _client(sim, client)
    if cut is not None and cut != FEATURES:
        sim.bound.model.check_cut(cut)
    key = rng.fold(rng.key(seed), "privacy")
    name = sim.federation.client_names[client]

    say(f"privacy: train {name} for round {sim.round + 1} and measure what it shares")
    shared = share_round(sim, client)
    pieces, work = [_shares(sim, shared)], [f"a round of {name}"]
    stats = statistics(sim, shared)
    pixels = None if sim.federation.tokens else Pixels(sim.federation)
    if pixels is None:
        pieces.append(Piece(["The inputs are token ids, which are not attacked here."]))
    if pixels is not None and (stats is not None if attack is None else attack):
        pieces.append(_attack(sim, pixels, stats, client, cut, effort, key, say))
        pieces += _smaller(sim, client) if chosen is None else []
        work.append(f"attacks of {steps} steps on {targets} samples and on class means")
    if pixels is not None and any(map(makes_samples, sim.bound.parts)):
        say(f"privacy: compare up to {samples} generated samples with the training samples")
        pieces.append(_generated(sim, pixels, client, effort, key))
        work.append(f"{samples} generated samples at most")
    if shared.numbers("up"):
        pieces.append(Piece([GRADIENT_INVERSION]))
    whole = join(pieces)
    seconds = time.perf_counter() - start
    device = str(sim.federation.device)
    count = torch.get_num_threads()
    threads = f" with {count} thread{'s' if count > 1 else ''}" if device == "cpu" else ""
    return Sheet(
        "privacy",
        f"Privacy of {sim.bound.method} in round {sim.round + 1}",
        findings=[verdict(str(sim.bound.method), name, whole.values), *whole.findings],
        tables=whole.tables,
        charts=whole.charts,
        values={"client": client, "round": sim.round, "seed": seed} | whole.values,
        seconds=seconds,
        cost=f"{seconds:.0f} s on {device}{threads}: {', '.join(work)}",
    )


@dataclass(frozen=True)
class _Effort:
    """How much is attacked, compared and shown."""

    targets: int
    steps: int
    samples: int
    rows: int
    shown: int

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if count < 1:
                raise FieldError(f"{name} = {count} is below 1")


def _client(sim: Simulation, client: int | str | None) -> int:
    sizes, names = sim.federation.sizes, sim.federation.client_names
    if client is None:
        return max(sim.session.draw_clients(sim.round), key=lambda k: sizes[k])
    if isinstance(client, str) and client in names:
        return names.index(client)
    if isinstance(client, str) and not client.isdecimal():
        raise UnknownName("client", client, names)
    client = int(client)
    if not 0 <= client < len(sizes):
        raise FieldError(f"client = {client} is not between 0 and {len(sizes) - 1}")
    return client


def _smaller(sim: Simulation, client: int) -> list[Piece]:
    """Who has more to lose than the client that was attacked."""
    sizes = sim.federation.sizes
    least = min(range(len(sizes)), key=lambda k: sizes[k])
    if sizes[least] == sizes[client]:
        return []
    name, least_name = (sim.federation.client_names[k] for k in (client, least))
    text = (
        f"{name} has {number(sizes[client])} samples; {least_name} has the fewest of all "
        f"clients, {sizes[least]}. Means over fewer samples tell more about each of them: attack "
        f"that client, too (--client {shlex.quote(least_name)})."
    )
    return [Piece([text])]


# -- what is shared ------------------------------------------------------------------------------


def _shares(sim: Simulation, shared: Shared) -> Piece:
    name = sim.federation.client_names[shared.client]
    rows: list[list[Cell]] = [
        [s.part, s.way, s.name, s.kind, s.shape, s.numbers, s.nbytes, s.seen, s.when]
        for s in shared.shares
    ]
    columns = ["part", "way", "what", "kind", "shape", "numbers", "bytes", "seen by", "when"]
    note = (
        f"Measured on {name} in round {sim.round + 1}. Mean and Sum: the server needs only that "
        "over the round's clients; Stack: it needs each client's. Seen by: the server for what "
        "goes up."
    )
    tables = [Table("What a client shares in a round", columns, rows, note)]
    known = declared(sim, shared)
    if known:
        tables.append(
            Table(
                "Numbers beyond FedAvg's in a round, declared and measured",
                ["part", "down", "down measured", "up", "up measured"],
                [[d.part, d.down, d.measured_down, d.up, d.measured_up] for d in known],
                "Surveys and updates of running statistics are left out, as in what parts declare. "
                "Declarations hold for a part by itself.",
            )
        )
    up, down = shared.nbytes("up"), shared.nbytes("down")
    values = {
        "up_bytes": up,
        "down_bytes": down,
        "shares": [s._asdict() for s in shared.shares],
        "needs_clients": sim.bound.needs("clients"),
        "declared_agrees": all(d.agrees for d in known),
    }
    once = sum(s.nbytes for s in shared.shares if s.when != EVERY)
    text = f"In a round a client sends {_size(up)} and receives {_size(down)}"
    text += f"; besides, it sends {_size(once)} once." if once else "."
    return Piece([*sentences(sim, shared), text], tables, [], values)


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{number(count)} bytes"


# -- attacks -------------------------------------------------------------------------------------


def _attack(
    sim: Simulation,
    pixels: Pixels,
    stats: Statistics | None,
    client: int,
    cut: str | None,
    effort: _Effort,
    key: Tensor,
    say: Report,
) -> Piece:
    federation = sim.federation
    keys = [k.to(federation.device) for k in rng.split(rng.fold(key, "attack"), 5)]
    where, channels = cut or FEATURES, False
    if stats is not None:
        where, channels = stats.cut, stats.channels
    elif where == FEATURES:
        sim.bound.model.require_head("the attack")
    rows = client_rows(sim, client)
    some = rows[rng.permutation(keys[0], len(rows))[:STUDIED]]
    features = feature_map(sim, pixels, sim.weights, where)
    inputs, classes = pixels.to_unit(federation.clean(some).x), classes_of(federation, some)
    guessed = guesses(federation, pixels, rows, keys[2])
    say(
        f"privacy: invert features of {effort.targets} samples and of class means, {effort.steps} "
        f"steps each: about {_seconds(features, inputs, effort):.0f} s"
    )
    known = attackers(federation, pixels, features, effort.steps, keys[1])
    done = study(inputs, classes, guessed, features, known, targets=effort.targets, key=keys[3])
    pieces = [study_piece(done, sim, pixels, where, client, len(some), effort.shown)]
    if stats is not None:
        own = feature_map(sim, pixels, stats.weights, where, channels)
        known = attackers(federation, pixels, own, effort.steps, keys[1])
        found = attack_upload(stats, federation, pixels, guessed, own, known, keys[4])
        pieces.append(upload_piece(stats, found, sim, pixels, client, effort.shown))
    return join(pieces)


def _seconds(features: Features, inputs: Tensor, effort: _Effort) -> float:
    """The expected time of the attacks, from that of a forward pass."""
    rows = min(len(inputs), 64)
    evaluate(features, inputs[:rows])  # warm-up
    start = time.perf_counter()
    float(evaluate(features, inputs[:rows]).sum())  # waits for a GPU
    forward = (time.perf_counter() - start) / rows
    attacked = effort.targets * (len(SIZES) + 1)
    return PASSES * forward * attacked * effort.steps


# -- generated samples ---------------------------------------------------------------------------


def _generated(sim: Simulation, pixels: Pixels, client: int, effort: _Effort, key: Tensor) -> Piece:
    key_made, key_spaces = rng.split(rng.fold(key, "generated"), 2)
    made, remarks = generated(sim, client, effort.samples, key_made)
    if not made:
        return Piece(remarks)
    known = copies.spaces(sim, pixels, effort.rows, key_spaces)
    found = {m.part: (m, copies.match(m, known)) for m in made}
    charts = (copies.chart(sim, pixels, *pair, effort.shown) for pair in found.values())
    values: dict[str, Any] = {part: copies.values(matches) for part, (_, matches) in found.items()}
    return Piece(
        [*(copies.sentence(*pair) for pair in found.values()), *remarks],
        [copies.table(found)],
        [chart for chart in charts if chart is not None],
        {"generated": values},
    )
