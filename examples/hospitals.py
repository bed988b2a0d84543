"""Three hospitals that do not look alike: which method? Run: python hospitals.py [FOLDER]

Makes a CSV file per hospital, says how the hospitals differ, compares three methods on them, keeps
the best model, and lets it diagnose new patients from a raw CSV file.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import kedge

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rng = np.random.default_rng(0)
signs = pd.DataFrame(  # what is typical of each diagnosis
    {"age": [45, 40, 66, 30, 64], "temperature": [36.7, 38.6, 38.3, 36.8, 36.7],
     "oxygen": [97, 96, 92, 93, 96], "pulse": [72, 88, 94, 90, 96],
     "cough": ["none", "dry", "wet", "dry", "none"]},
    index=["healthy", "flu", "pneumonia", "asthma", "angina"],
)  # fmt: skip


def patients(prefix: str, **counts: int) -> pd.DataFrame:
    """So many patients with each diagnosis, in random order."""
    diagnosis = rng.permutation(np.repeat(list(counts), list(counts.values())))
    rows = signs.loc[diagnosis].reset_index(names="diagnosis")
    for column, spread in {"age": 12, "temperature": 0.5, "oxygen": 2, "pulse": 10}.items():
        rows[column] = (rows[column] + rng.normal(0, spread, len(rows))).round(1)
    rows.loc[rng.random(len(rows)) < 0.15, "oxygen"] = np.nan  # not every patient was measured
    rows.loc[rng.random(len(rows)) < 0.2, "cough"] = "dry"
    return rows.assign(patient=[f"{prefix}{i}" for i in range(len(rows))])


# Every hospital has its specialty: a city clinic, a lung clinic, a heart clinic.
silos = folder / "hospitals"
silos.mkdir(parents=True, exist_ok=True)
patients("c", healthy=150, flu=90, pneumonia=10).to_csv(silos / "city.csv", index=False)
patients("l", asthma=60, pneumonia=70, flu=5).to_csv(silos / "lung.csv", index=False)
patients("h", angina=60, healthy=8).to_csv(silos / "heart.csv", index=False)

data = f"{silos}(label=diagnosis, id=patient, missing=mean)"
[sheet] = kedge.diagnose(data)
print(sheet.findings[0], "\n")

results = kedge.compare(
    ["fedavg", "scaffold", "fedprox(mu=0.1)"], data=data, model="mlp(hidden=[16])", rounds=10,
    steps=20, validation=0.2, metric="balanced_accuracy", out=folder / "runs",
)  # fmt: skip
print(results, "\n")

model = kedge.load(results.best.folder, which="best").model
new = patients("new", angina=2, flu=2, pneumonia=2)
new.drop(columns="diagnosis").to_csv(folder / "new.csv", index=False)
print(model.frame(folder / "new.csv").round(2).assign(truth=new.diagnosis).to_string(index=False))
print("\nReport:", kedge.write_report(folder / "runs", folder / "report.html")[0])
