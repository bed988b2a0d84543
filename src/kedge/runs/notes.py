"""Tags and a note of a run, in ``notes.json`` of its folder: they move with the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.errors import FieldError
from kedge.files import parse_json, write_file

NOTES, FORMAT = "notes.json", 1
MAX_TAGS, MAX_TAG, MAX_NOTE = 20, 40, 20_000  # tags; characters of a tag and of a note


class Notes(NamedTuple):
    """What people write about a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


def checked(tags: Any, note: Any) -> Notes:
    """Notes from outside.

    Raises:
        FieldError: they have the wrong type or are too long.
    """
    if not isinstance(tags, Sequence) or isinstance(tags, str):
        raise FieldError("tags must be a list of texts", "tags")
    if not isinstance(note, str) or not all(isinstance(tag, str) for tag in tags):
        raise FieldError("tags and note must be texts", "note")
    words = tuple(dict.fromkeys(word for tag in tags if (word := " ".join(tag.split()))))
    if len(words) > MAX_TAGS or any(len(word) > MAX_TAG for word in words):
        raise FieldError(f"at most {MAX_TAGS} tags of {MAX_TAG} characters", "tags")
    if len(note) > MAX_NOTE:
        raise FieldError(f"a note has at most {MAX_NOTE} characters", "note")
    return Notes(words, note)


def parse_notes(content: bytes) -> Notes:
    """The notes in a file; empty ones if it is damaged."""
    try:
        found = parse_json(content)
        return checked(found["tags"], found["note"])
    except (ValueError, TypeError, KeyError, FieldError):
        return Notes()


def write_notes(folder: Path, notes: Notes) -> None:
    """Replace the notes of a run, atomically.

    Raises:
        OSError: the folder is not writable.
    """
    content = json.dumps({"format": FORMAT, "tags": list(notes.tags), "note": notes.note})
    write_file(folder / NOTES, f"{content}\n".encode())
