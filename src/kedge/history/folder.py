"""A run on disk: its configuration and environment; partition, metrics and checkpoint of each seed.

::

    runs/digits-scaffold-1/
        config.toml            every setting
        environment.json       versions, device, threads, precision, execution, loaded files, data
        log.txt                events with times
        run.json               task, metrics and headline, see kedge.history.read
        bundle.json            the model but for its weights, see kedge.saved.bundle
        result.json            the summary, once the run is complete
        federation.json        terms and members, of a run with remote members
        seats.json             what members show when they come back; for the owner alone
        notes.json             tags and a note of the user, see Notes
        stop                   asks the training to stop after its round, see request_stop
        log-NAME/              what a logger wrote
        seed-0/state.json      how its training stands or has ended, and why
        seed-0/partition.json
        seed-0/clients.json    names, sizes and class counts of the clients
        seed-0/metrics.jsonl   one line per round
        seed-0/checkpoint.safetensors
        seed-0/model.safetensors     weights of the global model, once the seed is complete
        seed-0/best.safetensors      those of the best round on the validation data, if there are
        seed-0/personal.safetensors  those of all clients, if they have personal models
        seed-0/best_personal.safetensors  the same of the best round
        seed-0/scores.json           its metrics: global, per client, per class; confusion matrix

A folder is claimed once data, model and method are in order, and given back if a new run ends
before its first checkpoint. Files are written atomically: under a temporary name, then renamed. The
metrics of a round are written before its checkpoint, so a killed run has all metrics up to its
checkpoint; later ones are dropped on resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from kedge import loading
from kedge.errors import DataError, FieldError, Interrupted, KedgeError, Paused
from kedge.files import (
    append_file,
    check_links,
    create_file,
    make_folder,
    parse_json,
    read_file,
    read_json,
    read_toml,
    remove_file,
    write_file,
)
from kedge.history.lock import Lock
from kedge.settings import Config, load_config

CONFIG, ENVIRONMENT, HEADER, RESULT = "config.toml", "environment.json", "run.json", "result.json"
LOG, NOTES, STOP, BUNDLE = "log.txt", "notes.json", "stop", "bundle.json"
#: Of a run with remote members: their terms and names, and the tokens of their seats.
FEDERATION, SEATS = "federation.json", "seats.json"
METRICS, PARTITION, SCORES = "metrics.jsonl", "partition.json", "scores.json"
CLIENTS, STATE, DIAGNOSIS = "clients.json", "state.json", "diagnosis"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
BEST_MODEL, PERSONAL = "best.safetensors", "personal.safetensors"
BEST_PERSONAL = "best_personal.safetensors"
#: Files of a run that exist before its first checkpoint.
OWN_FILES = (
    CONFIG, ENVIRONMENT, LOG, HEADER, RESULT, BUNDLE, FEDERATION, SEATS
)  # fmt: skip
#: Folders of runs that this process has claimed, in order; the log of an error goes to the last.
opened: list[Path] = []
#: Settings that every run writes down; a file without them was cut.
WRITTEN = ("method", "data", "rounds", "seeds")
#: Numbers of every record.
NUMBERS = ("train_loss", "divergence", "mb_up", "mb_down", "seconds")
#: Those that are numbers by name; ``cohort`` and those that begin with ``per_`` are lists.
NESTED = ("validation", "personal_validation", "unseen")
MAX_TAGS, MAX_TAG, MAX_NOTE = 20, 40, 20_000  # tags; characters of a tag and of a note
MAX_REASON = 300  # characters


class RunFolder:
    """The folder of a run. Nothing is written before :meth:`claim`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._pending: Config | None = None  # written by `claim`
        self._numbered = False
        self._created: list[Path] = []  # folders made by `claim`
        self._is_new = self._is_resumed = self.is_claimed = False
        self.lock = Lock()
        self._training: set[int] = set()  # seeds

    @classmethod
    def create(cls, path: str | Path, config: Config, numbered: bool = False) -> Self:
        """The folder of a new run, to be claimed.

        Args:
            path: the folder.
            config: the settings of the run.
            numbered: whether ``path`` is from :func:`new_path`, so that the next number will do if
                another process claims it first.

        Raises:
            KedgeError: the folder holds a run already.
            DataError: the folder cannot be created.
        """
        folder = cls(path)
        folder._pending, folder._numbered = config, numbered
        folder._check_free()
        nearest = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise DataError(f"{path} cannot be created: {nearest} is a file")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise DataError(f"{path} cannot be created: {nearest} is not writable")
        return folder

    @classmethod
    def resume(
        cls, path: str | Path, config: Config | None, remote: bool | None = False
    ) -> tuple[Self, Config]:
        """Open the folder of a run, and return it with its configuration.

        Args:
            path: the folder.
            config: the settings of the run, if they are given again. They may have more rounds than
                the run was started with: the run is extended.
            remote: whether the run goes on with remote members; None: either will do.

        Raises:
            KedgeError: the folder has links, or holds no run, a simulated one in place of a
                federation or the other way round, or one with other settings.
        """
        folder = cls(path)
        check_links(folder.path)
        if not (folder.path / CONFIG).is_file():
            raise KedgeError(
                f"{path} holds no run to resume; leave out --resume to start one there"
            )
        check_remote(folder.path, remote, any(folder.path.glob(f"seed-*/{CHECKPOINT}")))
        stored, folder._is_resumed = stored_config(folder.path), True
        if config is None or config == stored:
            return folder, stored
        check_settings(folder.path, stored, config)
        folder._pending = config
        return folder, config

    def claim(self) -> None:
        """Make the folder that of the run: write its configuration.

        Raises:
            KedgeError: another process has just claimed it, or trains in it.
            DataError: it cannot be written.
        """
        config, self._pending = self._pending, None
        if not self._is_resumed and config is not None:
            self._take(config)
        self.lock.take(self.path)
        if self._is_resumed and config is not None and self._is_extension(config):
            for seed in config.seeds:
                self.check_checkpoint(seed)  # then the results must stay
            for name in (
                RESULT,
                *(f"seed-*/{n}" for n in (MODEL, BEST_MODEL, PERSONAL, BEST_PERSONAL, SCORES)),
            ):
                for path in self.path.glob(name):  # those of fewer rounds
                    remove_file(path, inside=self.path)
            self.write(CONFIG, config.to_toml().encode())
            self.log(f"extended to {config.rounds} rounds")
        for path in self.path.glob("seed-*/.*.part"):  # of a process that was killed
            remove_file(path, inside=self.path)
        opened.append(self.path)
        clear_stop(self.path)
        self.is_claimed = True

    def _is_extension(self, config: Config) -> bool:
        return stored_config(self.path).rounds < config.rounds

    def _take(self, config: Config) -> None:
        while True:
            made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            try:
                make_folder(self.path)
                self._created = made
                create_file(self.path / CONFIG)  # fails if another process was faster
                break
            except FileExistsError:
                if not self._numbered:
                    self._check_free()
                    raise DataError(f"{self.path} cannot be created: it is a file") from None
                self.path = new_path(config, self.path.parent)
            except OSError as error:
                raise DataError(f"{self.path} cannot be created: {error.strerror}") from None
        self._is_new = True
        self.write(CONFIG, config.to_toml().encode())

    def _check_free(self) -> None:
        if (self.path / CONFIG).exists():
            raise KedgeError(
                f"{self.path} holds a run already. Continue it with --resume, or choose another "
                "--out"
            )

    def release(self) -> None:
        """Delete what this process wrote if the run is new and has no checkpoint yet."""
        if not self._is_new or any(self.path.glob(f"seed-*/{CHECKPOINT}")):
            return
        self.lock.give_back()
        early = (PARTITION, CLIENTS, METRICS, STATE)
        for pattern in (*OWN_FILES, *(f"seed-*/{n}" for n in early), "**/.*.part"):
            for path in self.path.glob(pattern):
                with contextlib.suppress(OSError):  # a folder that is a link is not entered
                    remove_file(path, inside=self.path)
        with contextlib.suppress(OSError):  # other files stay
            for path in self.path.glob("seed-*"):
                path.rmdir()
            for path in self._created:
                path.rmdir()

    def seed(self, seed: int) -> Path:
        """The folder of a seed; it is created if needed."""
        path = self.path / f"seed-{seed}"
        try:
            make_folder(path, inside=self.path)
        except OSError as error:
            raise DataError(f"{path} cannot be made: {error.strerror}") from None
        return path

    def write(
        self, name: str, content: bytes | Iterable[bytes | memoryview], private: bool = False
    ) -> None:
        """Write a file atomically; ``content`` may be an iterator over its parts.

        Raises:
            DataError: the file cannot be written, e.g. since the disk is full.
        """
        target = self.path / name
        try:
            write_file(target, content, private=private, inside=self.path)
        except OSError as error:
            raise DataError(
                f"{target} cannot be written: {error.strerror}. Earlier files are intact; "
                "free some disk space and continue with --resume"
            ) from None

    def append(self, name: str, line: str) -> None:
        """Append a line to a file."""
        try:
            append_file(self.path / name, line + "\n", inside=self.path)
        except OSError as error:
            raise DataError(
                f"{self.path / name} cannot be written: {error.strerror}. "
                "Free some disk space and continue with --resume"
            ) from None

    def log(self, text: str) -> None:
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    def end(self, error: BaseException) -> None:
        """Write down that the run did not complete: for people, and for each seed that trained."""
        text = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, (Interrupted, KeyboardInterrupt, Paused)):
            state, reason = "interrupted", text.split(". ")[0] or "Ctrl-C"
        else:
            state, reason = "failed", (text or type(error).__name__)[:MAX_REASON]
        self.log(f"{state}: {reason}")
        for seed in [*self._training]:
            self.save_state(seed, state, reason)

    def save_state(self, seed: int, state: str, reason: str = "") -> None:
        """Write how the training of a seed stands: ``training``, ``complete``, ``stopped early``,
        ``diverged``, ``interrupted`` or ``failed``, and why."""
        self._training.discard(seed)
        if state == "training":
            self._training.add(seed)
        content = {"format": 1, "state": state, "reason": reason}
        self.write(f"seed-{seed}/{STATE}", json.dumps(content).encode())

    def check_checkpoint(self, seed: int) -> None:
        """Raise a DataError if the checkpoint of a seed is damaged."""

    def record(self, seed: int, record: dict[str, Any]) -> None:
        """Append the record of a round to the metrics of a seed."""
        self.append(f"seed-{seed}/{METRICS}", json.dumps(record))

    def records(self, seed: int, rounds: int) -> list[dict[str, Any]]:
        """Read the metrics of the first ``rounds`` rounds, and drop later ones from the file.

        Raises:
            DataError: the file is damaged. A last line that is incomplete is dropped.
        """
        path = self.path / f"seed-{seed}" / METRICS
        known = read_records(path)
        found = [r for r in known if r["round"] <= rounds and r.keys() >= set(NUMBERS)]
        if [r["round"] for r in found] != list(range(1, rounds + 1)):
            raise DataError(
                f"{path} is damaged: it has {len(found)} of the first {rounds} rounds; restore it, "
                f"or delete the folder {path.parent} to run seed {seed} from the start"
            )
        self.rewrite_records(seed, found)
        return found

    def rewrite_records(self, seed: int, records: list[dict[str, Any]]) -> None:
        """Replace the metrics of a seed."""
        text = "".join(json.dumps(r) + "\n" for r in records)
        self.write(f"seed-{seed}/{METRICS}", text.encode())


def new_path(config: Config, root: str | Path = "runs", kind: str = "") -> Path:
    """An unused folder for a run, named by its data and method: ``runs/digits-scaffold-1``.

    ``kind`` takes the place of the method, such as ``compare``.
    """
    data = config.data if Path(config.data).exists() else config.data.split("(")[0]
    words = f"{Path(data.rstrip('/')).name}-{kind or config.method}"
    slug = "".join(c if c.isalnum() else "-" for c in words.lower())
    slug = "-".join(piece for piece in slug.split("-") if piece)[:60]
    number = 1
    while (Path(root) / f"{slug}-{number}").exists():
        number += 1
    return Path(root) / f"{slug}-{number}"


# -- settings --------------------------------------------------------------------------------------


def stored_config(path: Path) -> Config:
    """Read the configuration in the folder of a run.

    Raises:
        KedgeError: it is not valid. If the run was started with ``--load``, the message says so.
    """
    try:
        config = load_config(path / CONFIG)
        given, _ = read_toml(path / CONFIG)
        if missing := [name for name in WRITTEN if name not in given]:
            raise KedgeError(f"{path / CONFIG} is damaged: it lacks {', '.join(missing)}")
        return config
    except KedgeError as error:
        missing = [file for file in loaded_files(path) if Path(file) not in loading.files]
        if not missing:
            raise KedgeError(
                f"{error}\nThese are the settings of the run in {path}: correct the file, or start "
                "a new run with another --out"
            ) from None
        options = " ".join(f"--load {file}" for file in missing)
        raise KedgeError(f"{error}\nThis run was started with: {options}") from None


def loaded_files(path: Path) -> list[str]:
    """The files that a run was started with by ``--load``; empty if they are not known."""
    try:
        found = read_json(path / ENVIRONMENT)["loaded"]
        return [str(file["path"]) for file in found]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def check_settings(path: Path, stored: Config, config: Config) -> None:
    """Raise a KedgeError if settings differ from those of a run, but for more rounds."""
    old, new = vars(stored), vars(config)
    changed = [k for k in old if old[k] != new[k]]
    if changed != ["rounds"]:
        raise KedgeError(
            f"{path} was started with other settings and cannot be resumed with these:\n"
            + "\n".join(f"  {k}: {old[k]!r} -> {new[k]!r}" for k in changed)
            + "\nResume it with the old settings (more rounds are possible), "
            "or start a new run with another --out"
        )
    if config.rounds < stored.rounds:
        raise KedgeError(
            f"{path} was started with {stored.rounds} rounds, and {config.rounds} are fewer; "
            f"resume it without --rounds, or with more than {stored.rounds}"
        )


def check_remote(path: Path, remote: bool | None, has_checkpoint: bool) -> None:
    """Raise a KedgeError for a simulation of a federation's run, which lacks its members' states,
    and for a federation that is to go on with a simulated run; None: either will do."""
    is_remote = (path / FEDERATION).exists()
    again = f"--out {shlex.quote(str(path))} --resume"
    if remote is False and is_remote:
        raise KedgeError(
            f"{path} is a run of a real federation; resume it with: kedge flower run {again}"
        )
    if remote and has_checkpoint and not is_remote:
        raise KedgeError(f"{path} is a simulated run; resume it with: kedge run {again}")


# -- what is read of it ----------------------------------------------------------------------------


def read_own_json(path: Path, advice: str) -> Any:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read; the message ends with ``advice``.
    """
    try:
        return read_json(path)
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
        content = read_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    *lines, _incomplete = content.split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
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


# -- asking it to stop -----------------------------------------------------------------------------


def request_stop(folder: Path) -> None:
    """Ask the training in a folder to stop after its round.

    Raises:
        OSError: the folder is not writable.
    """
    with contextlib.suppress(FileExistsError):  # someone has asked already
        create_file(folder / STOP)


def is_stop_requested(folder: Path) -> bool:
    """Whether someone asked for a stop."""
    return os.path.lexists(folder / STOP)


def clear_stop(folder: Path) -> None:
    """Withdraw the request, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(folder / STOP)


# -- notes of the user -----------------------------------------------------------------------------


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
    content = json.dumps({"format": 1, "tags": list(notes.tags), "note": notes.note})
    write_file(folder / NOTES, f"{content}\n".encode())
