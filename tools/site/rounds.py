"""One round with its hooks, those of a part highlighted."""

from __future__ import annotations

import inspect
from html import escape

from tools.site.markdown import markdown, table

from kedge.core.part import HOOKS, Part

#: Where each hook is called: stages of a round in their order, and who runs them.
STAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("once", "both", ("extend", "private", "server_init", "client_init")),
    ("the round starts", "server", ("phase", "survey", "absorb", "send")),
    ("a client starts", "client", ("prepare",)),
    (
        "every local step",
        "client",
        (
            "transform", "inject", "ascend", "logits", "weigh", "term", "correct", "trainable",
            "project", "observe",
        ),
    ),
    ("a client ends", "client", ("reply", "contribute", "release")),
    ("the server updates", "server", ("receive", "combine", "server_step")),
    ("models are used", "both", ("output", "personal")),
)  # fmt: skip


def stage_of(hook: str) -> str:
    """The stage of a hook.

    >>> stage_of("term")
    'every local step'
    """
    return next(stage for stage, _, hooks in STAGES if hook in hooks)


def figure(hooks: list[str]) -> str:
    """The stages of a round as HTML; hooks of the list are links to what they do."""
    stages = []
    for stage, side, names in STAGES:
        chips = "".join(_chip(name, name in hooks) for name in names)
        used = " used" if any(name in hooks for name in names) else ""
        stages.append(
            f'<li class="{side}{used}"><span class="stage">{escape(stage)}</span>'
            f'<span class="hooks">{chips}</span></li>'
        )
    return f'<ol class="round">{"".join(stages)}</ol>'


def _chip(name: str, used: bool) -> str:
    if not used:
        return f"<span>{name}</span>"
    return f'<a href="#hook-{name}">{name}</a>'


def hooks_table(hooks: list[str]) -> str:
    """The hooks of a part: when they run, and what they may do."""
    rows = [
        (f'<span id="hook-{hook}"></span>[`{hook}`][kedge.core.part.Part.{hook}]',
         stage_of(hook), meaning(hook))
        for hook in hooks
    ]  # fmt: skip
    return table(["hook", "when", "what it may do"], rows)


def meaning(hook: str) -> str:
    """The docstring of a hook, as one paragraph."""
    return markdown(" ".join((inspect.getdoc(getattr(Part, hook)) or "").split()))


def missing() -> set[str]:
    """Hooks that no stage has; a test holds this to be none."""
    return set(HOOKS) ^ {hook for _, _, hooks in STAGES for hook in hooks}
