"""The version of kedge."""

__version__ = "0.1.0"
