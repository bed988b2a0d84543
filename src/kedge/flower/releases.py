"""What has left a member: every distinct answer is noted once, on disk, before it is computed.

An answer depends on the kind of the request, the run, the round, the accepted round, the weights
and slots that came with it, and the member's own state and policy. A :class:`Release` is a digest
of these. A request with the same digest gets the same answer, with the same noise, and is not
counted again: an honest server may lose a reply, crash, and ask once more. Every other request
counts against the bound of its kind, so noise cannot be averaged away by asking for a round again
with slightly different weights. An answer that cannot be given, since a number in it is not finite,
has been noted, too: this tells something about the data. A statement on the data counts by what it
says: the same one may leave in every run.

``released.txt`` has one line per release::

    KIND DIGEST RUN ROUND TIME

A line is written whole and synchronised. One that was cut short, by a crash or a full disk, belongs
to an answer that did not leave; it is removed before the next line is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kedge.core.tree import Tree
from kedge.files import append_file, open_append
from kedge.flower.messages import MemberRequest
from kedge.session import wire

JOIN, UPDATE, SURVEY, TEST = "join", "update", "survey", "test"
KINDS = (JOIN, UPDATE, SURVEY, TEST)
#: Two lines that an older kedge has run together count, too.
LINE = re.compile(rf"({'|'.join(KINDS)}) ([0-9a-f]{{64}}) ([0-9a-f]+) (\d+) ")


class Release(NamedTuple):
    """One answer that leaves a member.

    Attributes:
        kind: one of ``KINDS``.
        digest: of all that the answer depends on, hexadecimal.
        run, round: those of the request.
    """

    kind: str
    digest: str
    run: str
    round: int


def release_of(kind: str, request: MemberRequest, facts: Iterable[Any], *contents: Tree) -> Release:
    """The release that answers a request.

    Args:
        kind: one of ``KINDS``.
        request: the request.
        facts: what the answer depends on besides the run and arrays.
        contents: trees of arrays that it depends on.
    """
    digest = hashlib.sha256(json.dumps([kind, request.run, *facts]).encode())
    for content in contents:
        digest.update(fingerprint(content))
    return Release(kind, digest.hexdigest(), request.run, request.round)


def fingerprint(value: Tree) -> bytes:
    """A digest of the names, dtypes, shapes and bytes of all arrays.

    >>> zeros = fingerprint({"a": torch.zeros(2)})
    >>> zeros == fingerprint({"a": torch.zeros(2)}), zeros == fingerprint({"a": torch.ones(2)})
    (True, False)
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(wire.named(value).items()):
        digest.update(json.dumps([name, str(leaf.dtype), list(leaf.shape)]).encode())
        flat = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.digest()


class Releases:
    """The releases of a member over all runs.

    Args:
        path: the file; it is created with the first release.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _known(self) -> dict[str, dict[str, Release]]:
        """The releases of each kind by digest."""
        found: dict[str, dict[str, Release]] = {kind: {} for kind in KINDS}
        if not self.path.exists():
            return found
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # a process was killed while it wrote
            file = open_append(self.path)
            os.ftruncate(file, end)  # needs no space
            os.close(file)
        text = whole[:end].decode(errors="replace")
        for kind, digest, run, round in LINE.findall(text):
            found[kind][digest] = Release(kind, digest, run, int(round))
        return found

    def count(self, kind: str) -> int:
        """Distinct answers of a kind that have left."""
        return len(self._known[kind])

    def of(self, kind: str, run: str) -> list[Release]:
        """The answers of a kind that have left in a run."""
        return [release for release in self._known[kind].values() if release.run == run]

    def allows(self, release: Release, most: int, *others: Release) -> bool:
        """Whether releases of one kind have left before, or are within ``most`` of it; 0: no
        bound."""
        known = self._known[release.kind]
        fresh = {r.digest for r in (release, *others)} - known.keys()
        return not most or not fresh or len(known) + len(fresh) <= most

    def note(self, *releases: Release) -> None:
        """Write down releases that are new, before their answer is computed."""
        fresh = [r for r in releases if r.digest not in self._known[r.kind]]
        if not fresh:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        lines = "".join(f"{r.kind} {r.digest} {r.run} {r.round} {now}\n" for r in fresh)
        append_file(self.path, lines, synchronised=True)
        for release in fresh:
            self._known[release.kind][release.digest] = release
