"""Scripts that run other libraries on the quadratics of ``python -m bench.conformance``.

Each other file here is a script for the library's own Python environment. It needs the library,
torch and numpy, but not kedge, and prints one line of JSON: the final w of FedAvg, SCAFFOLD and
FedProx (mu = 1), and the same for clients of 1 and 3 samples. kedge imports none of them.
"""
