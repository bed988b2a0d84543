"""The attacks on features in words, tables and pictures."""

from __future__ import annotations

from typing import Any

from kedge.diagnostics.privacy.attack import ClassAttack, Level, Study
from kedge.diagnostics.privacy.inversion import psnr
from kedge.diagnostics.privacy.pictures import Pixels, picture
from kedge.diagnostics.privacy.piece import Piece
from kedge.diagnostics.privacy.uploads import FEATURES, Statistics, classes_told
from kedge.diagnostics.privacy.words import title
from kedge.history.sheet import Cell, Chart, Table
from kedge.sim.simulation import Simulation

RECOGNISED = 0.5  # an error below this share of the class mean's is told as a reconstruction
SOMETHING = 0.9  # below this share, as a hint
CLASS_MEAN, RANDOM = "guess: the class mean", "guess: a random sample of the class"


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
    tables = [Table("Reconstruction from features", columns, rows, note, decimals=4)]
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
    tables = [Table(f"Reconstruction from {part}'s upload", columns, rows, note, decimals=4)]
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
        if stats.received is not None:
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
    noise = f", with noise of {stats.noise:g}" if stats.noise else ""
    return (
        f"{lone} of the {len(counts)} class means that {name} uploads "
        f"{'has' if lone == 1 else 'have'} a single sample behind: there {part} sends the features "
        f"of this sample{noise}{stats.why and f' ({stats.why})'}."
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
