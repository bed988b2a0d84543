"""Data: readers, datasets, partitions, and the federation on a device."""
