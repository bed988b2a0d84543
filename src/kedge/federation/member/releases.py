"""What has left a member: every distinct answer is noted once, on disk, before it is computed.

An answer depends on the kind of the request, the run, the round, the accepted round, the weights
and slots that came with it, and the member's own state and policy. A :class:`Release` is a digest
of these. A request with the same digest gets the same answer, with the same noise, and is not
counted again: an honest server may lose a reply, crash, and ask once more. Every other request
counts against the bound of its kind, so noise cannot be averaged away by asking for a round again
with slightly different weights. An answer that cannot be given, since a number in it is not finite,
has been noted, too: this tells something about the data. A profile on the data counts by what it
says: the same one may leave in every run.

``released.txt`` has one line per release::

    KIND DIGEST RUN ROUND TIME

A line is written whole and synchronised. One that was cut short, by a crash or a full disk, belongs
to an answer that did not leave; it is removed before the next line is written. Processes of one
member, as there are without a resident node, take turns, so that they count together.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kedge.core.tree import Tree
from kedge.federation.messages import MemberRequest
from kedge.files import append_file, open_append
from kedge.session import blob, wire

try:
    import fcntl
except ImportError:  # Windows, where members have one process
    fcntl = None  # type: ignore[assignment]

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

    >>> import torch
    >>> zeros = fingerprint({"a": torch.zeros(2)})
    >>> zeros == fingerprint({"a": torch.zeros(2)}), zeros == fingerprint({"a": torch.ones(2)})
    (True, False)
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(wire.named(value).items()):
        digest.update(json.dumps([name, str(leaf.dtype), list(leaf.shape)]).encode())
        digest.update(blob.bytes_of(leaf))
    return digest.digest()


class Releases:
    """The releases of a member over all runs.

    Args:
        path: the file; it is created with the first release.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._size, self._end = path, -1, 0  # as it was read, and where its lines end
        self._found: dict[str, dict[str, Release]] = {}

    @property
    def _known(self) -> dict[str, dict[str, Release]]:
        """The releases of each kind by digest, read again if another process has written."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            whole = self.path.read_bytes() if size else b""
            self._size, self._end = len(whole), whole.rfind(b"\n") + 1
            self._found, text = {kind: {} for kind in KINDS}, whole[: self._end].decode("latin-1")
            for kind, digest, run, round in LINE.findall(text):
                self._found[kind][digest] = Release(kind, digest, run, int(round))
        return self._found

    def count(self, kind: str) -> int:
        """Distinct answers of a kind that have left."""
        return len(self._known[kind])

    def of(self, kind: str, run: str) -> list[Release]:
        """The answers of a kind that have left in a run."""
        return [release for release in self._known[kind].values() if release.run == run]

    def note(self, *releases: Release, most: int = 0) -> bool:
        """Write down releases that are new, before their answer is computed; False, and nothing is
        written, if there would be more than ``most`` of a kind. 0: no bound."""
        file = open_append(self.path)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            fresh = {r.digest: r for r in releases if r.digest not in self._known[r.kind]}
            counts = Counter(r.kind for r in fresh.values())
            if most and any(n + len(self._known[kind]) > most for kind, n in counts.items()):
                return False
            if fresh:
                os.ftruncate(file, self._end)  # after a kill or a full disk; it needs no space
                self._size = self._end
                now = time.strftime("%Y-%m-%dT%H:%M:%S")
                lines = "".join(
                    f"{r.kind} {r.digest} {r.run} {r.round} {now}\n" for r in fresh.values()
                )
                append_file(self.path, lines, synchronised=True)
                self._size = self._end = self._end + len(lines)
                for release in fresh.values():
                    self._found[release.kind][release.digest] = release
            return True
        finally:
            os.close(file)
