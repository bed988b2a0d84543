"""The Python interface: ``run`` takes names, ``fit`` your own model and data."""
