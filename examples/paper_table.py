"""Does a published table hold? Write it as a recipe and run it. Run: python paper_table.py [FOLDER]

A recipe is a folder PAPER/TABLE with one file for the settings and one file per row. The paper here
is a short note of our own, three seeds on scikit-learn's digits; below, other seeds try it again.
The tables that kedge brings (kedge reproduce) are written in the same way.
"""

import sys
import tempfile
from pathlib import Path

import kedge

recipe = {
    "table.toml": """
        title = "A note on drift, Table 1"
        paper = "The kedge developers, examples/paper_table.py, seeds 0 to 2"
        place = "digits, Dirichlet(0.1), 5 of 10 clients, 15 rounds"
        metric = "best"          # how the paper takes its number: last, best or top5
        base = "fedavg"          # the row that gains are taken against
        rows = ["fedavg", "fedprox", "scaffold"]
        seeds = [3, 4, 5]
        [settings]
        data = "digits"
        partition = "dirichlet(0.1)"
        clients = 10
        per_round = 5
        model = "mlp(hidden=[32])"
        rounds = 15
        steps = 10
        batch = 32
        lr = 0.1
        """,
    "fedavg.toml": "method = 'fedavg'\npaper = 84.22\npaper_sd = 5.50",
    "fedprox.toml": "method = 'fedprox(mu=0.1)'\npaper = 83.84\npaper_sd = 5.34",
    "scaffold.toml": "method = 'scaffold'\npaper = 93.96\npaper_sd = 0.43",
}
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
table = folder / "recipes" / "note" / "table1"
table.mkdir(parents=True, exist_ok=True)
for name, text in recipe.items():
    (table / name).write_text(text, encoding="utf-8")

# Stop it at any time: the same call goes on from there, and runs nothing twice.
found = kedge.reproduce("note/table1", recipes=folder / "recipes", results=folder / "results")
print(found, "\n")

for row in found.rows:
    inside = abs(row.difference) <= row.row.paper_sd
    verdict = "within" if inside else "outside"
    print(
        f"{row.row.name:9} paper {row.row.paper:.2f}  ours {row.ours}  difference "
        f"{row.difference:+.2f}: {verdict} the paper's standard deviation"
    )
print("\nReport:", kedge.write_report(found, folder / "report.html")[0])
