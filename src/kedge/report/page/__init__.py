"""Reports: one self-contained HTML page about runs, with nothing that it must load from elsewhere."""
