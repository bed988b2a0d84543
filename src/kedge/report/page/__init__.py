"""Reports: one self-contained HTML page about runs, which loads nothing from elsewhere."""
