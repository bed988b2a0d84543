"""Image folders of five sites: what does label skew cost? Run: python images.py [FOLDER]

Writes scikit-learn's handwritten digits as PNG files, SITE/CLASS/NAME.png, compares FedAvg with two
methods for such data, reads an image that no site has, and writes a report with all curves.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

import kedge

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
digits = load_digits()
pictures = [Image.fromarray(x) for x in (digits.images * 255 / 16).round().astype("uint8")]

# A folder with one folder of images per client is a federation. Site A has zeros and ones only,
# site B twos and threes, and so on.
for i, label in enumerate(digits.target[:600]):
    path = folder / "sites" / "ABCDE"[label // 2] / str(label) / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[i].save(path)
data = str(folder / "sites")
print(kedge.diagnose(data)[0].findings[0], "\n")

# FedImpro trains the layers above the cut also on features that resemble the other sites' (drawn
# from shared means and spreads). FedTR pulls the features of a class to the same place everywhere.
methods = ["fedavg", "fedimpro(cut=stage1, ramp=10)", "fedtr"]
results = kedge.compare(
    methods, data=data, model="mlp(hidden=[64,32])", rounds=10, steps=20, validation=0.1,
    target=80, out=folder / "runs",
)  # fmt: skip
print(results, "\n")

# Who was left behind? The accuracy of the global model on each site's held-out images.
for result in results:
    sites = zip("ABCDE", result.records[0][-1]["per_client"], strict=True)
    print(f"{result.name:30}", *(f"{name} {value:5.1f}" for name, value in sites))

new = folder / "new.png"
pictures[600].save(new)  # an image that no site has
model = kedge.load(results.best.folder, which="best").model
print(f"\n{new} shows a {digits.target[600]}; the model says {model.predict(new)[0]}")
print("Report:", kedge.write_report(folder / "runs", folder / "report.html")[0])
