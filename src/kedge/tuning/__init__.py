"""The choice of an engine for a run: candidates, trials, memory, timings, and the plan."""
