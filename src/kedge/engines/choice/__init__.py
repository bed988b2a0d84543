"""Which engine computes a run: candidates, trials, memory, timings."""
