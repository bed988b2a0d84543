"""What each method shares, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kedge.core.part import Part, parts
from kedge.core.view import Spec
from kedge.diagnostics.privacy.shares import FEDAVG, FIRST, LAST, Share, Shared
from kedge.sim.simulation import Simulation

#: Uploads that hold or reveal how many samples of each class a client has, by part and name.
LABEL_COUNTS = {
    ("flboost", "counts"), ("feddf", "counts"), ("fedgen", "counts"), ("fedtr", "count"),
    ("fedproto", "weight"), ("ccvr", "count"), ("fedimpro", "count"), ("fedmix", "y"),
    ("naivemix", "y"),
}  # fmt: skip

GRADIENT_INVERSION = (
    "An update can leak samples by itself: with few samples and steps, gradient inversion "
    "reconstructs them (Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, arXiv:1906.08935; "
    "Geiping et al., Inverting Gradients, NeurIPS 2020, arXiv:2003.14053). It is not attacked here."
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


def sentences(sim: Simulation, shared: Shared) -> list[str]:
    """What every method shares, then one sentence for each part that shares more."""
    lines = [_base(sim, shared)]
    for part in sim.bound.method.parts:
        own = [s for s in shared.shares if s.part == part.name]
        if own:
            words = WORDS.get(part.name)
            text = words(part, sim.bound.spec) if words else _plain(own)
            lines.append(f"{title(part.name)} {text}.")
    return [*lines, *_observers(sim, shared)]


def title(name: str) -> str:
    """A part by the name that its paper gives it."""
    return parts[name].__name__ if name in parts else name


def _base(sim: Simulation, shared: Shared) -> str:
    own = [s for s in shared.shares if s.part == FEDAVG and s.way == "up"]
    params = sum(s.numbers for s in own if s.name.startswith("parameters"))
    buffers = sum(s.numbers for s in own if s.name.startswith("buffers"))
    kept = len(sim.bound.private_params) + len(sim.bound.private_buffers)
    if not params:
        return "No parameter of the model leaves the clients."
    text = f"Every client receives the model and sends its update: {number(params)} parameters"
    text += f" and {number(buffers)} running statistics" if buffers else ""
    text += f"; {number(kept)} of the model's arrays stay on the client" if kept else ""
    return text + "."


def _plain(shares: Sequence[Share]) -> str:
    """A part without words of its own: its messages by name."""
    ways = {"up": "sends", "down": "receives"}
    texts = []
    for way, verb in ways.items():
        own = [f"{s.name} ({number(s.numbers)} numbers)" for s in shares if s.way == way]
        texts += [f"{verb} {', '.join(own)}"] if own else []
    return "also makes a client share: it " + "; it ".join(texts)


def _observers(sim: Simulation, shared: Shared) -> list[str]:
    """Who sees single clients, and who sees labels."""
    lines = []
    needing = [title(p.name) for p in sim.bound.parts if p.needs_clients]
    cohort = sim.session.cohort_size
    if needing:
        lines.append(
            f"On the server, {_join(needing)} needs what each single client sends, not only sums, "
            "so secure aggregation cannot be used."
        )
    elif cohort == 1:
        lines.append("With one client per round, the sum that the server sees is that client's.")
    else:
        lines.append(
            f"The server needs only sums over the {cohort} clients of a round, so secure "
            "aggregation could hide single clients; kedge itself does not encrypt what they send."
        )
    counts = [
        f"{title(s.part)} ({'each client' if s.kind == 'Stack' else 'as a sum'})"
        for s in shared.shares
        if s.way == "up" and (s.part, s.name) in LABEL_COUNTS
    ]
    if counts:
        lines.append(f"Labels are counted or averaged in what clients send: {_join(counts)}.")
    return lines


# -- parts with words of their own ---------------------------------------------------------------


def _fedimpro(part: Any, spec: Spec) -> str:
    shape = torch.Size(spec.shapes[part.cut])
    size = shape[0] if part.stat_axes == "channel" else shape.numel()
    spread = "variance" if part.spread == "variance" else "standard deviation"
    per = "of each channel " if part.stat_axes == "channel" else ""
    classes = spec.task.outputs
    noise = f", with noise of {part.noise:g}" if part.noise else ""
    counts = ", and how many samples of each class the client has" if part.count_weighted else ""
    return (
        f"sends per class a mean and a {spread} {per}of features at {part.cut}, as every client "
        f"also receives them: 2 x {classes} x {size} numbers{noise}{counts}"
    )


def _class_means(part: Part, spec: Spec) -> str:
    return (
        f"sends per class the sum of the features before the head and a count: {spec.task.outputs} "
        f"x {spec.features} + {spec.task.outputs} numbers"
    )


def _ccvr(part: Part, spec: Spec) -> str:
    f = spec.features
    return (
        f"asks {LAST} for the sum of features and of their outer products per class: "
        f"{spec.task.outputs} x ({f} + {f} x {f} + 1) numbers"
    )


def _spherefed(part: Any, spec: Spec) -> str:
    return (
        f"asks {LAST} for sums of products of features, over all classes together, and of features "
        "with labels"
    )


def _label_counts(part: Part, spec: Spec) -> str:
    sent = "; every client receives its generator" if part.has("send") else ""
    return (
        f"sends how many samples of each of the {spec.task.outputs} classes the client has, and "
        f"the server trains a generator against the clients' models{sent}"
    )


def _pool(part: Any, spec: Spec) -> str:
    when = FIRST if part.refresh == "once" else "in every round"
    return (
        f"asks {when} for means of {part.samples} samples and of their labels; the server knows "
        f"whose they are and sends {part.rows} of them to every client"
    )


def _fedbr(part: Any, spec: Spec) -> str:
    when = FIRST if part.refresh == "once" else "in every round"
    return (
        f"asks {when} for {part.means or part.rows or spec.batch} means of {part.samples} samples "
        f"each; the server knows whose they are and sends {part.rows or spec.batch} of them to "
        "every client, beside a small projection network that clients train"
    )


def _per_parameter(what: str) -> Callable[[Part, Spec], str]:
    return lambda part, spec: f"sends {what}, a function of the client's gradients"


def _own(what: str) -> Callable[[Part, Spec], str]:
    return lambda part, spec: f"sends {what}"


WORDS: dict[str, Callable[[Any, Spec], str]] = {
    "fedimpro": _fedimpro,
    "fedproto": _class_means,
    "fedtr": _class_means,
    "ccvr": _ccvr,
    "spherefed": _spherefed,
    "flboost": _label_counts,
    "feddf": _label_counts,
    "fedgen": _label_counts,
    "fedmix": _pool,
    "naivemix": _pool,
    "fedbr": _fedbr,
    "scaffold": _per_parameter("the change of its control variate, one number per parameter"),
    "feddc": _per_parameter("the change of its estimate of the gradient, one number per parameter"),
    "fedpvr": _per_parameter("the change of its control variate for the upper layers"),
    "fedexp": _own("its update a second time and its squared norm, for the size of the step"),
    "fednova": _own("its update divided by its number of steps"),
    "groupdro": _own("its update weighted by its loss, and the weight"),
    "krum": _own("its number, so that ties are broken in the same way"),
    "vhl": lambda part, spec: (
        "sends a key from which every client draws the same virtual samples; they are noise and "
        "depend on no data"
    ),
}


def number(count: int) -> str:
    """A whole number in groups of three.

    >>> number(44426)
    '44,426'
    """
    return f"{count:,}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
