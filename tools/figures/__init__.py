"""Figures of the documentation, made by kedge: ``python -m tools.figures``."""
