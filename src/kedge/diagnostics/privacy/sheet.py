"""Diagnose privacy: what a method shares, and what an attacker can make of it.

The attacks are plain ones. What they reconstruct is leaked; what they do not may still be leaked to
a better attacker.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from kedge.diagnostics.privacy.pictures import Features, Pixels, image_row
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
from kedge.errors import FieldError, UnknownName
from kedge.history.sheet import Cell, Chart, Sheet, SheetTable
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
    if cut is not None and cut != FEATURES:
        sim.bound.model.check_cut(cut)
    key, number_ = rng.fold(rng.key(seed), "privacy"), _client(sim, client)
    made = _Making(sim, number_, key, report, targets, steps, samples, rows, shown)
    made.share()
    stats = statistics(sim, made.shared)
    if sim.federation.tokens:
        made.findings.append("The inputs are token ids, which are not attacked here.")
    elif stats is not None if attack is None else attack:
        made.attack(stats, cut)
        if client is None:
            made.name_smallest()
    if not sim.federation.tokens and any(map(copies.makes_samples, sim.bound.parts)):
        made.compare_generated()
    if made.shared.numbers("up"):
        made.findings.append(GRADIENT_INVERSION)
    seconds = time.perf_counter() - start
    device = str(sim.federation.device)
    count = torch.get_num_threads()
    threads = f" with {count} thread{'s' if count > 1 else ''}" if device == "cpu" else ""
    return Sheet(
        "privacy",
        f"Privacy of {sim.bound.method} in round {sim.round + 1}",
        findings=[verdict(str(sim.bound.method), made.name, made.values), *made.findings],
        tables=made.tables,
        charts=made.charts,
        values={"client": number_, "round": sim.round, "seed": seed} | made.values,
        seconds=seconds,
        cost=f"{seconds:.0f} s on {device}{threads}: {', '.join(made.work)}",
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


@dataclass
class _Making:
    """A sheet in the making: how much is attacked, compared and shown, and what was found."""

    sim: Simulation
    client: int
    key: Tensor
    report: Report | None
    targets: int
    steps: int
    samples: int
    rows: int
    shown: int
    findings: list[str] = field(default_factory=list)
    tables: list[SheetTable] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    work: list[str] = field(default_factory=list)  # what takes the time

    def __post_init__(self) -> None:
        for name in ("targets", "steps", "samples", "rows", "shown"):
            if getattr(self, name) < 1:
                raise FieldError(f"{name} = {getattr(self, name)} is below 1")
        self.federation = self.sim.federation
        self.name = self.federation.client_names[self.client]

    def say(self, line: str) -> None:
        if self.report is not None:
            self.report(f"privacy: {line}")

    @cached_property
    def shared(self) -> Shared:
        self.say(f"train {self.name} for round {self.sim.round + 1} and measure what it shares")
        self.work.append(f"a round of {self.name}")
        return share_round(self.sim, self.client)

    @cached_property
    def pixels(self) -> Pixels:
        return Pixels(self.federation)

    def class_name(self, label: int) -> str:
        names = self.federation.classes
        return names[label] if names else f"class {label}"

    def name_smallest(self) -> None:
        """Who has more to lose than the client that was attacked."""
        sizes = self.federation.sizes
        least = min(range(len(sizes)), key=lambda k: sizes[k])
        if sizes[least] == sizes[self.client]:
            return
        name = self.federation.client_names[least]
        self.findings.append(
            f"{self.name} has {number(sizes[self.client])} samples; {name} has the fewest of all "
            f"clients, {sizes[least]}. Means over fewer samples tell more about each of them: "
            f"attack that client, too (--client {shlex.quote(name)})."
        )

    # -- what is shared ----------------------------------------------------------------------------

    def share(self) -> None:
        shared, sim = self.shared, self.sim
        rows: list[list[Cell]] = [
            [s.part, s.way, s.name, s.kind, s.shape, s.numbers, s.nbytes, s.seen, s.when]
            for s in shared.shares
        ]
        columns = ["part", "way", "what", "kind", "shape", "numbers", "bytes", "seen by", "when"]
        note = (
            f"Measured on {self.name} in round {sim.round + 1}. Mean and Sum: the server needs "
            "only that over the round's clients; Stack: it needs each client's. Seen by: the "
            "server for what goes up."
        )
        self.tables.append(SheetTable("What a client shares in a round", columns, rows, note))
        known = declared(sim, shared)
        if known:
            title_ = "Numbers beyond FedAvg's in a round, declared and measured"
            columns = ["part", "down", "down measured", "up", "up measured"]
            rows = [[d.part, d.down, d.measured_down, d.up, d.measured_up] for d in known]
            note = (
                "Surveys and updates of running statistics are left out, as in what parts declare. "
                "Declarations hold for a part by itself."
            )
            self.tables.append(SheetTable(title_, columns, rows, note))
        up, down = shared.nbytes("up"), shared.nbytes("down")
        self.values |= {
            "up_bytes": up,
            "down_bytes": down,
            "shares": [s._asdict() for s in shared.shares],
            "needs_clients": sim.bound.needs("clients"),
            "declared_agrees": all(d.agrees for d in known),
        }
        once = sum(s.nbytes for s in shared.shares if s.when != EVERY)
        text = f"In a round a client sends {_bytes(up)} and receives {_bytes(down)}"
        text += f"; besides, it sends {_bytes(once)} once." if once else "."
        self.findings += [*sentences(sim, shared), text]

    # -- attacks -----------------------------------------------------------------------------------

    def attack(self, stats: Statistics | None, cut: str | None) -> None:
        """Invert features and means of features, and what the client uploads."""
        federation, sim, steps = self.federation, self.sim, self.steps
        keys = [k.to(federation.device) for k in rng.split(rng.fold(self.key, "attack"), 5)]
        where = stats.told.cut if stats is not None else cut or FEATURES
        if stats is None and where == FEATURES:
            sim.bound.model.require_head("the attack")
        rows = client_rows(sim, self.client)
        some = rows[rng.permutation(keys[0], len(rows))[:STUDIED]]
        features = feature_map(sim, self.pixels, sim.weights, where)
        inputs = self.pixels.to_unit(federation.clean(some).x)
        guessed = guesses(federation, self.pixels, rows, keys[2])
        self.say(
            f"invert features of {self.targets} samples and of class means, {steps} steps each: "
            f"about {self._seconds(features, inputs):.0f} s"
        )
        self.work.append(f"attacks of {steps} steps on {self.targets} samples and on class means")
        known = attackers(federation, self.pixels, features, steps, keys[1])
        labels, count = classes_of(federation, some), self.targets
        done = study(inputs, labels, guessed, features, known, targets=count, key=keys[3])
        self._tell_study(done, _where(where), len(some))
        if stats is not None:
            own = feature_map(sim, self.pixels, stats.weights, where, stats.told.channels)
            known = attackers(federation, self.pixels, own, steps, keys[1])
            found = attack_upload(stats, federation, self.pixels, guessed, own, known, keys[4])
            self._tell_upload(stats, found)

    def _seconds(self, features: Features, inputs: Tensor) -> float:
        """The expected time of the attacks, from that of a forward pass."""
        rows = min(len(inputs), 64)
        evaluate(features, inputs[:rows])  # warm-up
        start = time.perf_counter()
        float(evaluate(features, inputs[:rows]).sum())  # waits for a GPU
        forward = (time.perf_counter() - start) / rows
        return PASSES * forward * self.targets * (len(SIZES) + 1) * self.steps

    def _tell_study(self, done: Study, where: str, studied: int) -> None:
        """Attacks on raw features and on means over more and more samples."""
        count = len(done.labels)
        rows: list[list[Cell]] = [
            [x.attacker, _size(x.size), *_errors(x.mse, done), x.closest, x.mismatch]
            for x in done.levels
        ]
        for guess, mse in ((CLASS_MEAN, done.class_mean), (RANDOM, done.random)):
            rows.append([guess, None, *_errors(mse, done), None, None])
        columns = [
            "attacker", "samples in the mean", "error", "PSNR (dB)", "error / class mean's",
            "error to the closest", "feature mismatch",
        ]  # fmt: skip
        note = (
            f"n = {count} samples of {self.name}, values from 0 to 1; each error is the mean "
            "squared difference to a sample behind the attacked mean of features "
            f"({where}, global model), averaged over n. The closest: of all samples behind it. "
            f"Drawn with the seed of the diagnosis from {studied} of the client's samples. Guesses "
            "are made from other clients' samples."
        )
        table = SheetTable("Reconstruction from features", columns, rows, note, decimals=4)
        self.tables.append(table)
        raw, many = done.level(1), done.level(0)
        self.findings += [
            f"For contrast, features of single samples ({where}) "
            f"{_verdict(_ratio(raw.mse, done))}: error {_error(raw, done)}, n = {count}.",
            f"Means of features over all samples of a class {_verdict(_ratio(many.mse, done))}: "
            f"error {_error(many, done)}.",
        ]
        self.values["inversion"] = {
            "n": count,
            "class_mean": done.class_mean,
            "random": done.random,
            "levels": [
                {"attacker": x.attacker, "samples": x.size, "mse": x.mse, "closest": x.closest}
                for x in done.levels
            ],
        }
        self.charts.append(_curve(done))
        if self.pixels.is_image:
            self.charts.append(self._pictures(done))

    def _pictures(self, done: Study) -> Chart:
        best = [done.level(size) for size in dict.fromkeys(x.size for x in done.levels)]
        rows = []
        for i, label in enumerate(done.labels[: self.shown]):
            row, caption = str(i + 1), self.class_name(label)
            rows.append(image_row(done.targets[i], row, "the sample", caption))
            rows += [image_row(x.inputs[i], row, _column(x)) for x in best]
        note = f"The best of {len({x.attacker for x in done.levels})} attackers in each column."
        return Chart("Samples and their reconstructions from features", "images", rows, note=note)

    def _tell_upload(self, stats: Statistics, found: list[ClassAttack]) -> None:
        """The attack on what a client really uploads, class by class."""
        part, best = title(stats.part), _best(found)
        rows: list[list[Cell]] = []
        for x in best:
            behind: list[Cell] = [self.class_name(x.label), x.samples, x.effective]
            rows.append([*behind, x.mse, x.closest, x.guess, x.guess_closest, x.attacker])
        columns = [
            "class", "samples behind", "effective samples", "error", "error to the closest",
            "class mean's error", "class mean's to the closest", "best attacker",
        ]  # fmt: skip
        note = (
            f"The upload of {self.name}, inverted in its own model after the round. Behind a mean "
            "are the samples that entered it, weighted as they are in it; effective: how many "
            "equal weights are worth as much. Of the attackers, the one that comes closest to a "
            "sample."
        )
        heading = f"Reconstruction from {part}'s upload"
        self.tables.append(SheetTable(heading, columns, rows, note, decimals=4))
        told, classes = classes_told(stats)
        lone = sum(len(b.rows) == 1 for b in stats.behind)
        read = [x for x in best if x.closest < RECOGNISED * x.guess_closest]
        self.findings.append(_behind(part, self.name, stats, lone))
        if best:
            names = ", ".join(f"{self.class_name(x.label)} ({x.samples} behind)" for x in read)
            self.findings.append(
                f"Of {len(best)} uploaded class means, {len(read)} can be inverted to less than "
                "half the error of the class mean to one of their samples"
                + (f": {names}." if names else ".")
            )
        if told == classes:
            how = "it sends their counts"
            if stats.told.received is not None:
                how = "the statistics of the others come back unchanged"
            self.findings.append(
                f"A server that sees single uploads knows which of the {classes} classes the "
                f"client had in the round: {how}."
            )
        hidden = ("input", "nearest")
        self.values["upload"] = {
            "part": stats.part,
            "classes": len(best),
            "classes_told": told,
            "lone_samples": lone,
            "reconstructed": len(read),
            "attacks": [{k: v for k, v in x._asdict().items() if k not in hidden} for x in found],
        }
        if self.pixels.is_image and best:
            pictures = []
            for x in sorted(best, key=lambda x: x.effective)[: self.shown]:
                row, error = self.class_name(x.label), f"error {x.closest:.4f}"
                behind_it = f"{x.samples} behind" if x.samples > 1 else "1 behind: raw features"
                pictures.append(image_row(x.input, row, "reconstructed", behind_it))
                column = "the closest sample behind it"
                pictures.append(image_row(x.nearest, row, column, error))
            heading = f"Reconstructions from {part}'s upload"
            note = "The classes with the fewest samples behind their mean first."
            self.charts.append(Chart(heading, "images", pictures, note=note))

    # -- generated samples -------------------------------------------------------------------------

    def compare_generated(self) -> None:
        """Samples that parts make, beside their nearest training samples."""
        self.say(f"compare up to {self.samples} generated samples with the training samples")
        self.work.append(f"{self.samples} generated samples at most")
        key_made, key_spaces = rng.split(rng.fold(self.key, "generated"), 2)
        made, remarks = copies.made_samples(self.sim, self.client, self.samples, key_made)
        if made:
            known = copies.spaces(self.sim, self.pixels, self.rows, key_spaces)
            found = {part: copies.match(drawn, known) for part, drawn in made}
            self.findings += [copies.sentence(*m, found[m.part]) for m in made]
            self.tables.append(copies.table(found))
            each = [copies.chart(self.sim, self.pixels, m, found[m.part], self.shown) for m in made]
            self.charts += [chart for chart in each if chart is not None]
            self.values["generated"] = {part: copies.values(m) for part, m in found.items()}
        self.findings += remarks


# -- words ----------------------------------------------------------------------------------------


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{number(count)} bytes"


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


def _column(level: Level) -> str:
    if level.size == 1:
        return "from its own features"
    return f"from a mean over {_size(level.size)}"


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


def _where(cut: str) -> str:
    return "before the head" if cut == FEATURES else f"at {cut}"


def _size(size: int) -> str:
    if size == 1:
        return "1 (raw features)"
    return str(size) if size else "all of the class"


def _errors(mse: float, done: Study) -> list[float]:
    return [mse, psnr(mse), _ratio(mse, done)]


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
