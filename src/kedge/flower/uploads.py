"""What leaves a member in a run, by the names that a policy has for it."""

from __future__ import annotations

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.tree import Tree
from kedge.core.update import Update

UPDATE, BUFFERS, LOSS, TEST, OUTPUT = "update", "statistics", "loss", "test", "output"


def survey_name(part: str) -> str:
    """How the answer to a part's survey is called in a policy."""
    return f"survey:{part}"


def declared(bound: Bound) -> dict[str, str]:
    """What leaves a member in a run, by the name in a policy, in words.

    ``update`` is the change of the weights, ``statistics`` that of BatchNorm's, ``loss`` the mean
    training loss, ``test`` the sums of metrics. A part that declares uploads adds its own name, one
    with a survey adds ``survey:NAME``.
    """
    public = bound.only_public(bound.initial)
    found = {
        UPDATE: f"the update of {tree.numel(public.params)} numbers",
        LOSS: "the training loss",
    }
    if public.buffers:
        found[BUFFERS] = f"{tree.numel(public.buffers)} running statistics"
    for part in bound.parts:
        if part.uploads != "0" or part.has("contribute"):
            found[part.name] = f"uploads of {part.name}: {part.uploads} numbers"
        if part.has("survey"):
            found[survey_name(part.name)] = f"the survey of {part.name}"
    return found | {TEST: "sums of metrics on held-out samples"}


def contents(update: Update, bound: Bound) -> dict[str, Tree]:
    """The arrays of an update by the name in a policy."""
    named: dict[str, Tree] = {UPDATE: update.delta.params, BUFFERS: update.delta.buffers}
    named |= {name: {"uploads": value} for name, value in update.uploads.items()}
    for part in bound.parts_with("contribute"):
        named[part.name] = {"sum": update.contribution} | named.get(part.name, {})
    return named | {LOSS: update.losses}
