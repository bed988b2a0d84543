"""Profile several jobs on a GPU: compile side by side, then time one after the other.

    PYTHONPATH=src:. python3 bench/several.py JOBS.txt FOLDER [--limit SECONDS] [--beside COMMAND]

Each line of the file is a label and the arguments of ``profile_step.py``. Compilation takes a
minute a job and one or two cores, so jobs start together, and each waits after its warm-up until
all are ready, or the limit is reached. Commands that run ``--beside`` the compilation (a check of
correctness, say) are awaited, too, so that nothing disturbs the timing. One record per job is
written to the folder, and the texts are printed in order.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs")
    parser.add_argument("folder")
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--beside", action="append", default=[])
    args = parser.parse_args()
    start, folder = time.monotonic(), Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    others = [subprocess.Popen(command, shell=True) for command in args.beside]
    script = Path(__file__).parent / "profile_step.py"
    jobs = {}
    for line in Path(args.jobs).read_text().splitlines():
        label, *words = shlex.split(line, comments=True) or [""]
        if not label:
            continue
        base = folder / label
        flags = [f"--{name}={base}.{name}" for name in ("ready", "go")]
        command = [sys.executable, str(script), *words, "--label", label, *flags]
        with open(f"{base}.txt", "w") as log:
            jobs[label] = subprocess.Popen(
                [*command, "--out", f"{base}.json"], stdout=log, stderr=subprocess.STDOUT
            )
    waiting = set(jobs)
    while waiting and time.monotonic() - start < args.limit:
        time.sleep(0.1)
        waiting = {
            x for x in waiting if jobs[x].poll() is None and not (folder / f"{x}.ready").exists()
        }
    for label in waiting:
        jobs[label].kill()
        print(f"{label}: not ready after {args.limit:.0f} s")
    for other in others:
        other.wait()
    print(f"all ready after {time.monotonic() - start:.0f} s", flush=True)
    for label, job in jobs.items():
        (folder / f"{label}.go").touch()
        job.wait()
        print((folder / f"{label}.txt").read_text().rstrip(), flush=True)
        for name in ("ready", "go", "txt"):
            (folder / f"{label}.{name}").unlink(missing_ok=True)
    print(f"done after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
