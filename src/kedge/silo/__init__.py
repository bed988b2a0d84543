"""One member of a federation: its data, its state, its answers."""
