"""Other libraries on the quadratics of ``kedge conformance``.

Each file but this one is a script for the Python of that library's own environment. It needs that
library, torch and numpy, not kedge, and prints one line of JSON: where FedAvg, SCAFFOLD and FedProx
(mu = 1) stand after the rounds. Nothing here is imported by kedge.
"""
