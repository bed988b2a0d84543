"""Runs: from a configuration to results, in a folder that can be resumed."""
