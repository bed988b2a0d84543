"""A tiny table on digits, in a folder of recipes."""

from __future__ import annotations

from pathlib import Path

TABLE = """\
# kedge reproduce demo/digits
title = "Demo, Table 1"
paper = "Nobody, A Demo, 2026"
place = "digits, 4 clients"
metric = "best"
tail = 2
base = "fedavg"
rows = ["fedavg", "fedprox"]
seeds = [0]

[settings]
data = "digits"
partition = "class_dirichlet_capped(0.5)"
clients = 4
model = "mlp(hidden=[8])"
rounds = 4
batch = 64
lr = 0.1
eval_every = 1

[quick]
rounds = 2
seeds = [0, 1]
rows = ["fedavg", "fedprox"]
"""
ROWS = {
    "fedavg": 'method = "fedavg"\npaper = 80.0\npaper_sd = 1.0\ncost_s = 60\ncost_from = "a run"\n',
    "fedprox": 'method = "fedprox(mu=1.0)"\npaper = 81.5\ncost_s = 60\n',
}


def write(root: Path, table: str = TABLE, **rows: str) -> Path:
    """Write the table under ``root``; returns ``root``."""
    folder = root / "demo" / "digits"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.toml").write_text(table, encoding="utf-8")
    for name, text in (ROWS | rows).items():
        head = f"# kedge reproduce demo/digits --rows {name}\n"
        (folder / f"{name}.toml").write_text(head + text, encoding="utf-8")
    return root
