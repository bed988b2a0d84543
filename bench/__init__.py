"""Kedge beside other libraries: speed (``python -m bench``) and correctness (``python -m
bench.conformance``). Run from the root of the repository; neither is part of the package."""
