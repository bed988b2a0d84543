"""Measure heterogeneity and drift: of the data, of the training, and of what a method shares."""
