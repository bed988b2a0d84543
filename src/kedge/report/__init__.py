"""Progress, tables and figures of runs."""
