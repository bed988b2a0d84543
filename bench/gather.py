"""Summarise run folders: one JSON with their results and curves, and a table.

python3 bench/gather.py FOLDER     # writes FOLDER/records.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kedge.runs.reading import load_config


def main() -> None:
    root = Path(sys.argv[1])
    found = {}
    for path in sorted(root.glob("*/config.toml")):
        folder, config = path.parent, load_config(path)
        curves, seconds = {}, {}
        for seed in config.seeds:
            lines = (folder / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
            rounds = [json.loads(line) for line in lines]
            metric = next(k for k in ("accuracy", "f1", "rmse") if k in rounds[-1])
            curves[seed] = [[r["round"], round(r[metric], 3)] for r in rounds if metric in r]
            seconds[seed] = round(sum(r["seconds"] for r in rounds), 2)
        last5 = [sum(v for _, v in c[-5:]) / len(c[-5:]) for c in curves.values()]
        record = {"settings": config.changed(), "curves": curves, "mean_of_last_5": last5}
        record["seconds"] = seconds
        for name in ("environment.json", "result.json"):
            if (folder / name).exists():
                record[name.split(".")[0]] = json.loads((folder / name).read_text())
        record.get("result", {}).pop("config", None)
        found[folder.name] = record
        mean = sum(last5) / len(last5)
        done = min(c[-1][0] for c in curves.values())
        per_round = sum(seconds.values()) / sum(len(c) for c in curves.values())
        values = " ".join(f"{v:.2f}" for v in last5)
        print(
            f"{folder.name:24} {config.method:32} seeds {len(curves)} round {done:4} "
            f"last5 {mean:6.2f}  ({values})  {per_round:.2f} s/tested round"
        )
    (root / "records.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
