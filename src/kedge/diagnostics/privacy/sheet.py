"""Diagnose privacy: what a method shares, and what an attacker can make of it.

The attacks are plain ones. What they reconstruct is leaked; what they do not may still be leaked to
a better attacker.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.uploads import FEATURES
from kedge.diagnostics.privacy import copies
from kedge.diagnostics.privacy.inversion import (
    SIZES,
    ClassAttack,
    Level,
    Study,
    attack_upload,
    attackers,
    classes_of,
    evaluate,
    guesses,
    psnr,
    study,
)
from kedge.diagnostics.privacy.pictures import Features, Pixels, picture
from kedge.diagnostics.privacy.shares import (
    EVERY,
    FEDAVG,
    Shared,
    declared,
    number,
    sentences,
    share_round,
    title,
)
from kedge.diagnostics.privacy.uploads import (
    Statistics,
    classes_told,
    client_rows,
    feature_map,
    statistics,
)
from kedge.diagnostics.sheet import Cell, Chart, Sheet, SheetTable
from kedge.errors import FieldError, UnknownName
from kedge.sim.simulation import Simulation

STUDIED = 1000  # samples of the client that are studied at most
PASSES = 6  # forward passes that a step costs: two attackers, each with a gradient
RECOGNISED = 0.5  # an error below this share of the class mean's is told as a reconstruction
SOMETHING = 0.9  # below this share, as a hint
CLASS_MEAN, RANDOM = "guess: the class mean", "guess: a random sample of the class"
Report = Callable[[str], None]

GRADIENT_INVERSION = (
    "An update can leak samples by itself: with few samples and steps, gradient inversion "
    "reconstructs them (Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, arXiv:1906.08935; "
    "Geiping et al., Inverting Gradients, NeurIPS 2020, arXiv:2003.14053). It is not attacked here."
)


class Piece(NamedTuple):
    """Findings, tables, charts and values; those of several questions are joined in order."""

    findings: Sequence[str] = ()
    tables: Sequence[SheetTable] = ()
    charts: Sequence[Chart] = ()
    values: dict[str, Any] = {}


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces as one."""
    return Piece(
        [line for piece in pieces for line in piece.findings],
        [table for piece in pieces for table in piece.tables],
        [chart for piece in pieces for chart in piece.charts],
        {name: value for piece in pieces for name, value in piece.values.items()},
    )


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
        attack: whether to invert features; None: if a part reads class means of features from what
            clients upload.
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
    if pixels is not None and any(map(copies.makes_samples, sim.bound.parts)):
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


def verdict(method: str, client: str, values: dict[str, Any]) -> str:
    """The first sentence: what can be read from what the method shares, as far as it was tried."""
    lines = []
    upload = values.get("upload")
    if upload:
        part, count, of = title(upload["part"]), upload["reconstructed"], upload["classes"]
        inverted = f"{count} can be inverted to less than half the error of a guess"
        means = f"of the {of} class means that {client} uploads"
        if upload["lone_samples"]:
            lone = upload["lone_samples"]
            lines.append(
                f"{part} sends features of single samples: {lone} {means} "
                f"{'has' if lone == 1 else 'have'} one sample behind; {inverted}."
            )
        elif count:
            lines.append(f"{part} gives samples away: {means}, {inverted}.")
        else:
            lines.append(
                f"The attacks tried here read no sample from what {client} uploads for {part}."
            )
    for name, spaces in values.get("generated", {}).items():
        copied = max(space["copies"] for space in spaces.values())
        of = f"{copied} of {next(iter(spaces.values()))['samples']} samples"
        lines.append(
            f"{title(name)} hands out copies: {of} are training samples or nearly so."
            if copied
            else f"The samples that {title(name)} makes are no copies of training samples."
        )
    if lines:
        return " ".join(lines)
    if not values["shares"]:
        return f"{method} shares nothing: every client is on its own."
    if any(share["part"] != FEDAVG for share in values["shares"]):
        return f"Nothing that {method} shares besides the model is attacked here."
    return f"{method} shares the model and its updates alone; they are not attacked here."


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
    tables = [SheetTable("What a client shares in a round", columns, rows, note)]
    known = declared(sim, shared)
    if known:
        tables.append(
            SheetTable(
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
    text = f"In a round a client sends {_bytes(up)} and receives {_bytes(down)}"
    text += f"; besides, it sends {_bytes(once)} once." if once else "."
    return Piece([*sentences(sim, shared), text], tables, [], values)


def _bytes(count: int) -> str:
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
        where, channels = stats.told.cut, stats.told.channels
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


def study_piece(
    done: Study, sim: Simulation, pixels: Pixels, cut: str, client: int, studied: int, shown: int
) -> Piece:
    """Attacks on raw features and on means over more and more samples."""
    name, where = sim.federation.client_names[client], _where(cut)
    count = len(done.labels)
    rows: list[list[Cell]] = [
        [x.attacker, _size(x.size), x.mse, psnr(x.mse), _ratio(x.mse, done), x.closest, x.mismatch]
        for x in done.levels
    ]
    rows += [
        [CLASS_MEAN, None, done.class_mean, psnr(done.class_mean), 1.0, None, None],
        [RANDOM, None, done.random, psnr(done.random), _ratio(done.random, done), None, None],
    ]
    columns = [
        "attacker", "samples in the mean", "error", "PSNR (dB)", "error / class mean's",
        "error to the closest", "feature mismatch",
    ]  # fmt: skip
    note = (
        f"n = {count} samples of {name}, values from 0 to 1; each error is the mean squared "
        f"difference to a sample behind the attacked mean of features ({where}, global model), "
        "averaged over n. The closest: of all samples behind it. Drawn with the seed of the "
        f"diagnosis from {studied} of the client's samples. Guesses are made from other clients' "
        "samples."
    )
    tables = [SheetTable("Reconstruction from features", columns, rows, note, decimals=4)]
    raw, many = done.level(1), done.level(0)
    findings = [
        f"For contrast, features of single samples ({where}) {_verdict(_ratio(raw.mse, done))}: "
        f"error {_error(raw, done)}, n = {count}.",
        f"Means of features over all samples of a class {_verdict(_ratio(many.mse, done))}: error "
        f"{_error(many, done)}.",
    ]
    values: dict[str, Any] = {
        "inversion": {
            "n": count,
            "class_mean": done.class_mean,
            "random": done.random,
            "levels": [
                {"attacker": x.attacker, "samples": x.size, "mse": x.mse, "closest": x.closest}
                for x in done.levels
            ],
        }
    }
    charts = [_curve(done)]
    if pixels.is_image:
        charts.append(_pictures(done, sim, shown))
    return Piece(findings, tables, charts, values)


def _curve(done: Study) -> Chart:
    points = [{"x": x.size, "y": x.mse, "series": x.attacker} for x in done.levels if x.size]
    sizes = sorted({x.size for x in done.levels if x.size})
    for name, error in ((CLASS_MEAN, done.class_mean), (RANDOM, done.random)):
        points += [{"x": size, "y": error, "series": name} for size in sizes]
    note = "Below the class mean's error, an attack tells something about the single sample."
    return Chart(
        "Error of the reconstruction by the number of samples in a mean", "lines", points,
        x="samples in the mean", y="mean squared error", note=note,
    )  # fmt: skip


def _pictures(done: Study, sim: Simulation, shown: int) -> Chart:
    best = [done.level(size) for size in dict.fromkeys(x.size for x in done.levels)]
    rows = []
    for i, label in enumerate(done.labels[:shown]):
        row, caption = str(i + 1), _class(sim, label)
        first = {"image": picture(done.targets[i]), "caption": caption}
        rows.append(first | {"row": row, "column": "the sample"})
        rows += [
            {"image": picture(x.inputs[i]), "caption": "", "row": row, "column": _column(x)}
            for x in best
        ]
    note = f"The best of {len({x.attacker for x in done.levels})} attackers in each column."
    return Chart("Samples and their reconstructions from features", "images", rows, note=note)


def _column(level: Level) -> str:
    if level.size == 1:
        return "from its own features"
    return f"from a mean over {_size(level.size)}"


def upload_piece(
    stats: Statistics,
    found: list[ClassAttack],
    sim: Simulation,
    pixels: Pixels,
    client: int,
    shown: int,
) -> Piece:
    """The attack on what a client really uploads, class by class."""
    name, part = sim.federation.client_names[client], title(stats.part)
    best = _best(found)
    rows: list[list[Cell]] = []
    for x in best:
        behind: list[Cell] = [_class(sim, x.label), x.samples, x.effective]
        rows.append([*behind, x.mse, x.closest, x.guess, x.guess_closest, x.attacker])
    columns = [
        "class", "samples behind", "effective samples", "error", "error to the closest",
        "class mean's error", "class mean's to the closest", "best attacker",
    ]  # fmt: skip
    note = (
        f"The upload of {name}, inverted in its own model after the round. Behind a mean are the "
        "samples that entered it, weighted as they are in it; effective: how many equal weights "
        "are worth as much. Of the attackers, the one that comes closest to a sample."
    )
    tables = [SheetTable(f"Reconstruction from {part}'s upload", columns, rows, note, decimals=4)]
    told, classes = classes_told(stats)
    lone = sum(len(b.rows) == 1 for b in stats.behind)
    shown_ones = [x for x in best if x.closest < RECOGNISED * x.guess_closest]
    findings = [_behind(part, name, stats, lone)]
    if best:
        names = ", ".join(f"{_class(sim, x.label)} ({x.samples} behind)" for x in shown_ones)
        findings.append(
            f"Of {len(best)} uploaded class means, {len(shown_ones)} can be inverted to less than "
            "half the error of the class mean to one of their samples"
            + (f": {names}." if names else ".")
        )
    if told == classes:
        how = "it sends their counts"
        if stats.told.received is not None:
            how = "the statistics of the others come back unchanged"
        findings.append(
            f"A server that sees single uploads knows which of the {classes} classes the client "
            f"had in the round: {how}."
        )
    values: dict[str, Any] = {
        "upload": {
            "part": stats.part,
            "classes": len(best),
            "classes_told": told,
            "lone_samples": lone,
            "reconstructed": len(shown_ones),
            "attacks": [
                {k: v for k, v in x._asdict().items() if k not in ("input", "nearest")}
                for x in found
            ],
        }
    }
    charts = [_upload_pictures(part, best, sim, shown)] if pixels.is_image and best else []
    return Piece(findings, tables, charts, values)


def _behind(part: str, name: str, stats: Statistics, lone: int) -> str:
    """How many samples are behind each uploaded mean."""
    counts = [len(b.rows) for b in stats.behind if len(b.rows)]
    if not counts:
        return f"{name} has no class mean to upload."
    if not lone:
        return (
            f"Behind each of the {len(counts)} class means that {name} uploads are {min(counts)} "
            "samples or more."
        )
    noise = f", with noise of {stats.told.noise:g}" if stats.told.noise else ""
    return (
        f"{lone} of the {len(counts)} class means that {name} uploads "
        f"{'has' if lone == 1 else 'have'} a single sample behind: there {part} sends the features "
        f"of this sample{noise}{stats.told.why and f' ({stats.told.why})'}."
    )


def _best(found: list[ClassAttack]) -> list[ClassAttack]:
    """By class, the attack whose picture is closest to a sample."""
    by_class: dict[int, list[ClassAttack]] = {}
    for x in found:
        by_class.setdefault(x.label, []).append(x)
    return [min(each, key=lambda x: x.closest) for each in by_class.values()]


def _upload_pictures(part: str, best: list[ClassAttack], sim: Simulation, shown: int) -> Chart:
    rows = []
    for x in sorted(best, key=lambda x: x.effective)[:shown]:
        row = _class(sim, x.label)
        behind = f"{x.samples} behind" if x.samples > 1 else "1 behind: raw features"
        one = {"image": picture(x.input), "caption": behind, "row": row, "column": "reconstructed"}
        two = {"image": picture(x.nearest), "caption": f"error {x.closest:.4f}", "row": row}
        rows += [one, two | {"column": "the closest sample behind it"}]
    note = "The classes with the fewest samples behind their mean first."
    return Chart(f"Reconstructions from {part}'s upload", "images", rows, note=note)


def _class(sim: Simulation, label: int) -> str:
    names = sim.federation.classes
    return names[label] if names else f"class {label}"


def _where(cut: str) -> str:
    return "before the head" if cut == FEATURES else f"at {cut}"


def _size(size: int) -> str:
    if size == 1:
        return "1 (raw features)"
    return str(size) if size else "all of the class"


def _ratio(mse: float, done: Study) -> float:
    return mse / done.class_mean if done.class_mean > 0 else float("inf")


def _error(level: Level, done: Study) -> str:
    ratio = _ratio(level.mse, done)
    times = f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"
    return f"{level.mse:.2g}, {times} times that of the class mean"


def _verdict(ratio: float) -> str:
    if ratio < RECOGNISED:
        return "give the samples away"
    if ratio < SOMETHING:
        return "tell something about the samples"
    return "tell no more about a sample than the mean of its class"


# -- generated samples ---------------------------------------------------------------------------


def _generated(sim: Simulation, pixels: Pixels, client: int, effort: _Effort, key: Tensor) -> Piece:
    key_made, key_spaces = rng.split(rng.fold(key, "generated"), 2)
    made, remarks = copies.made_samples(sim, client, effort.samples, key_made)
    if not made:
        return Piece(remarks)
    known = copies.spaces(sim, pixels, effort.rows, key_spaces)
    found = {part: copies.match(drawn, known) for part, drawn in made}
    charts = (copies.chart(sim, pixels, m, found[m.part], effort.shown) for m in made)
    return Piece(
        [*(copies.sentence(*m, found[m.part]) for m in made), *remarks],
        [copies.table(found)],
        [chart for chart in charts if chart is not None],
        {"generated": {part: copies.values(matches) for part, matches in found.items()}},
    )
