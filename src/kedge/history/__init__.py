"""Runs on disk, and what their numbers say: the only reader of run folders. Nothing needs torch."""
