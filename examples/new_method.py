"""A method of your own, proved, compared and combined. Run: python new_method.py [FOLDER]

With few clients in a round, the global model swings towards whoever took part. The idea here:
keep a running mean of the global models, and use that mean as the model; train as before.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import kedge
from kedge.check.problems import quadratics
from kedge.core import tree


@kedge.register
@dataclass(frozen=True)
class Smooth(kedge.Part):
    """Use the running mean of the global models, e <- beta e + (1 - beta) w, as the model."""

    beta: float = 0.8
    neutral = {"beta": 0.0}  # with this setting it must be FedAvg, bit for bit

    def server_init(self, spec):
        return spec.params

    def server_step(self, r, weights):
        mean = tree.map(lambda e, w: self.beta * e + (1 - self.beta) * w, r.server, weights.params)
        return weights, mean

    def output(self, server, weights):
        return kedge.Weights(server, weights.buffers)


# An oracle is a case worked out by hand. One client, f(w) = 10 (w - 1)² / 2, one step of 0.05 a
# round: w goes 0, 0.5, 0.75. With beta = 1/2 the mean goes 0, 0.25, 0.5.
@kedge.oracle(Smooth)
def two_rounds_by_hand(cls):
    run = quadratics((10.0,), (1.0,), lr=0.05, steps=1).simulate(cls(beta=0.5))
    run.run_round()
    run.run_round()
    found = float(run.output.params["head.weight"])
    yield kedge.Claim("the mean after two rounds", expected=0.5, got=found)


print(kedge.check_part("smooth").raise_if_failed(), "\n")  # laws on both engines, and the oracle

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
results = kedge.compare(
    ["fedavg", "smooth", "scaffold", "scaffold+smooth"], data="digits", clients=10, per_round=3,
    partition="dirichlet(0.1)", rounds=30, steps=10, out=folder / "runs",
)  # fmt: skip
print(results)
print("\nReport:", kedge.write_report(folder / "runs", folder / "report.html")[0])
