"""A federation of real processes on this machine."""
