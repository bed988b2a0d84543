"""The page with the score of every file."""

from __future__ import annotations

from collections.abc import Sequence

from tools.mutants.tables import Record, is_survivor


def page(record: Record, equivalent: dict[tuple[str, str, str], str]) -> str:
    rows, survivors, total, caught, same = [], [], 0, 0, 0
    for file, entry in record["files"].items():
        alive, skipped = [], 0
        for key, result in entry["mutants"].items():
            line, _, change = key.partition(": ")
            old, _, new = change.partition(" => ")
            if is_survivor(result):
                if (file, old, new) in equivalent:
                    skipped += 1
                else:
                    alive.append((line, old, new, result, entry["named"].get(key, "")))
        count = len(entry["mutants"]) - skipped
        total, caught, same = total + count, caught + count - len(alive), same + skipped
        rows.append(
            f"| `{_short(file)}` | {count} | {count - len(alive)} | {_share(count, alive)} |"
        )
        for line, old, new, result, why in alive:
            note = f"{why}; " if why else ""
            survivors.append(f"- `{_short(file)}`, line {line} ({note}{result}): `{old}` → `{new}`")
    versions = ", ".join(f"{n} {v}" for n, v in record.get("versions", {}).items() if v)
    score = f"{100 * caught / total:.1f} %" if total else "none"
    return "\n".join(
        [
            "# Mutation score",
            "",
            "The share of small faults that the tests notice. A mutant changes one spot of a file:",
            "an operator, a sign, a constant, a condition, an argument, a call, a statement; and",
            "there are faults written by hand (`tools/mutants/named.toml`). It is noticed if one",
            "of the tests that run that line fails, of which up to `--cap` seconds are tried.",
            "Written by `make mutants`.",
            "",
            f"**{score}**: {caught} of {total} mutants are noticed, {same} more compute the same",
            f"(`tools/mutants/equivalent.toml`). {record.get('date', '')}, "
            f"`{record.get('command', '')}`, seed {record.get('seed', 0)}; "
            f"{record.get('machine', '')}, {versions}.",
            "",
            "Passes, with what each had noticed by its end (mutants that compute the same count as",
            "missed). Tests for survivors are written between passes, so that only a first pass is",
            "an unbiased sample.",
            "",
            *(
                f"- `{p['command']}`: {p['noticed']} of {p['mutants']} in {p['seconds']} s"
                for p in record.get("passes", [])
            ),
            "",
            "| file | mutants | noticed | share |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Survivors",
            "",
            "The line as it is → the line as no test would mind it.",
            "",
            *(survivors or ["None."]),
            "",
        ]
    )


def _short(file: str) -> str:
    return file.removeprefix("src/kedge/")


def _share(count: int, alive: Sequence[object]) -> str:
    return f"{100 * (count - len(alive)) / count:.0f} %" if count else ""
