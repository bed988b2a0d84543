"""``load``: a dataset by name, path or hub name."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.data.datasets import cifar, idx, images, npz, silos  # noqa: F401  (register readers)
from kedge.data.datasets.dataset import Dataset, assemble
from kedge.data.datasets.formats import (
    DataReader,
    bind_options,
    file_suffixes,
    locate,
    open_path,
    places,
    readers,
    roots,
    stem_of,
    suffix_of,
)
from kedge.data.datasets.hub import Hub
from kedge.data.datasets.known import KnownDataset, datasets
from kedge.errors import DataError, GrammarError, UnknownName, nearest
from kedge.grammar import parse_call
from kedge.schema import Schema, schema_of

FORMATS: dict[str, type[DataReader]] = {**{name: readers[name] for name in readers}, "hf": Hub}
"""The reader of each format, for ``kedge show``."""

EXAMPLES = {name: reader.examples for name, reader in FORMATS.items() if reader.examples}
"""How options of each format are written after ``--data``, and what they do."""


def schema(kind: str) -> Schema:
    """The options of a format; silos take the options of their files."""
    return schema_of(FORMATS[kind], kind)


def load(text: str | os.PathLike[str], **options: Any) -> Dataset:
    """Load a dataset by name, by path or from the Hugging Face hub.

    ::

        load("digits")                                      comes with scikit-learn
        load("cifar10")                                     from $KEDGE_DATA or the user's cache
        load("hospitals/")                                  any path; the kind is detected
        load("patients.csv(label=diagnosis)")               with options
        load("csv(path='patients', label=age, task=regression)")
        load("hf:ylecun/mnist")

    A registered name takes precedence over a file of that name in the working directory; write
    ``./digits`` for the file.

    Args:
        text: a name, a path or ``hf:NAME``, optionally with options in brackets.
        **options: options of the reader; they override those in the text.

    Returns:
        The dataset: images ``[n, C, H, W]`` or a table ``[n, F]``, and labels.

    Raises:
        UnknownName: there is no dataset or option of that name, but a similar one.
        DataError: the data are missing or cannot be used; the message names file and row.
        FieldError: the value of an option is wrong.
        GrammarError: the options cannot be parsed.

    >>> digits = load("digits")
    >>> digits.x_train.shape, digits.y_train.shape
    ((1438, 1, 8, 8), (1438,))
    """
    text = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"expected the name or path of a dataset, such as 'digits', not {text!r}")
    text = text.strip()
    if text not in datasets and not text.startswith("hf:") and _path(text) is not None:
        return _open(_path(text) or Path(), None, options)
    head, parsed = _split(text)
    options = {**parsed, **options}
    if head.startswith("hf:"):
        return assemble(head, [head], Hub(**bind_options("hf", Hub, options)).read([head]))
    if head in readers and "path" in options:
        where = str(options.pop("path"))
        return _open(_path(where) or _in_roots(where) or _missing(where), head, options)
    if head in readers and _path(head) is None:
        raise DataError(f'{head} needs a path; write {head}(path="...")')
    if head in datasets:
        known = datasets[head]
        local = _path(head)  # fallback: a path of that name in the working directory
        if isinstance(known, KnownDataset) and local and locate(head, known.layouts) is None:
            return open_path(local, head, options, known=known)
        return known(**(options if _takes_any(known) else bind_options(head, known, options)))
    path = _path(head) or locate(head) if _is_name(head) else _path(head)
    return _open(path or _missing(head), None, options)


def _takes_any(dataset: Callable[..., Dataset]) -> bool:
    """Whether a dataset takes ``**options`` and checks them itself."""
    parameters = inspect.signature(dataset).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _open(path: Path, kind: str | None, options: dict[str, Any]) -> Dataset:
    return open_path(path, stem_of(path.resolve()), options, kind)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``head(options)``; the head may be a path that is not a name of the grammar."""
    brackets = [i for i, sign in enumerate(text) if sign == "("]
    if not brackets:
        return text, {}
    at = next((i for i in brackets if _path(text[:i])), brackets[0])
    head = text[:at]
    try:
        call = parse_call("data" + text[at:])
    except GrammarError as error:
        wrong = str(error).partition(" at position ")[0]
        example = f"{head}(label=diagnosis)" if _path(head) else 'csv(path="a.csv", label="sick")'
        raise GrammarError(
            f"{text!r} is neither a path that exists nor a dataset with options ({wrong}). "
            f"Write for example: {example}"
        ) from error
    if len(call.args) > 1:
        raise GrammarError(f"{text!r}: only the path may come without a name, as in csv('a.csv')")
    if call.args and "path" in call.kwargs:
        raise GrammarError(f"{text!r}: the path is given twice")
    return head.strip(), {**({"path": call.args[0]} if call.args else {}), **call.kwargs}


def _path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such user
        return None


def _in_roots(text: str) -> Path | None:
    return next((root / text for root in roots() if _path(str(root / text))), None)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\w[\w.\-]*", text) is not None


def _near_path(text: str) -> Path | None:
    """A file or folder beside the missing one whose name is similar."""
    try:
        folder = Path(text).expanduser().parent
        beside = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    except (OSError, ValueError, RuntimeError):  # as in _path
        return None
    near = nearest(Path(text).name, beside)
    return folder / near[0] if near else None


def _missing(text: str) -> Path:
    is_dataset = _is_name(text) and suffix_of(Path(text)) not in file_suffixes()
    if is_dataset and nearest(text, datasets):
        raise UnknownName("dataset", text, datasets, see=datasets.see)
    if near := _near_path(text):
        raise DataError(f"{text}: there is no such file or folder. Did you mean {near}?")
    if not is_dataset:
        raise DataError(f"{text}: there is no such file or folder, here or in {places()}")
    raise DataError(
        f"no dataset {text!r}: no such file or folder here, and neither {text}.npz, {text}.csv "
        f"nor a folder {text} in {places()}. Known by name: {', '.join(datasets)}"
    )
