"""A member of a federation: its data, its state, and what may leave it."""
