"""Read files of a run that may have been damaged: a message in place of a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedge import files
from kedge.errors import DataError

#: Numbers of every record.
NUMBERS = ("train_loss", "divergence", "mb_up", "mb_down", "seconds")
#: Those that are numbers by name; ``cohort`` and those that begin with ``per_`` are lists.
NESTED = ("validation", "personal_validation", "unseen")


def read_json(path: Path, advice: str) -> Any:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read; the message ends with ``advice``.
    """
    try:
        return files.read_json(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {advice}") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); {advice}") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one JSON line per round; empty if there is no such file.

    A last line without a newline is what was being written when the run was killed: it is dropped.

    Raises:
        DataError: a line is no record of a round.
    """
    try:
        content = files.read_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    *lines, _incomplete = content.split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = files.parse_json(line)
        except ValueError:
            record = None
        if not _is_record(record):
            raise DataError(
                f"{path} is damaged in line {number}, which is no record of a round; restore the "
                f"file, or delete the folder {path.parent} to run this seed from the start"
            )
        found.append(record)
    return found


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        return False
    if record["round"] < 1 or not all(_is_number(record.get(key, 0.0)) for key in NUMBERS):
        return False
    return all(_is_value(key, value) for key, value in record.items())


def _is_value(key: str, value: Any) -> bool:
    if key in NESTED:
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    if key == "cohort" or key.startswith("per_"):
        return isinstance(value, list) and all(v is None or _is_number(v) for v in value)
    return isinstance(value, (int, float))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
