"""Federations over Flower: its apps, its grid, and the agent that owns the data of a member."""
